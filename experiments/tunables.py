"""What a search needs to know of the experiments: see `Tunable`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import common

from hetfl import core, local_model, with_hyper

PyTree = Any


class Tunable(NamedTuple):
  """What a search needs to know of an experiment.

  Its module also needs `UNUSED`, `define_flags`, `configuration` and
  `Experiment`, as in `codist`; a flag that is searched holds one value, or one
  for each model.

  Attributes:
    module: the name of the module.
    models: the names of the models for which a flag can have separate values.
    space: algorithm -> dimension -> range. `FLAG` is one value for all
      models, `FLAG.MODEL` that of one.
    place: `(state, flag, value) -> state` with the value in it, traceable;
      ValueError if the state does not hold this flag.
    accuracies: `(experiment, config) -> (names, evaluate, data)`: the
      accuracies that can be objectives; `evaluate(state, data)`, which gives a
      `Mean` for each; and its data, `heldout` and `test`.
  """

  module: str
  models: tuple[str, ...]
  space: dict[str, dict[str, str]]
  place: Callable[[PyTree, str, Any], PyTree]
  accuracies: Callable[
    [Any, dict],
    tuple[tuple[str, ...], Callable[..., core.Metrics], dict[str, PyTree]],
  ]


def _place_codist(state: PyTree, flag: str, value: Any) -> PyTree:
  name = {
    "client_lr": "learning_rate",
    "distill_lr_decay": "final_share",
    "teacher_temperature": "temperature",
    "student_regularization": "regularization",
    "merge_alpha": "alpha",
  }.get(flag, flag)
  return with_hyper(state, **{name: value})


def _codist_space() -> dict[str, dict[str, str]]:
  """Appendix F; decay coefficients, in (0, 1), have a log scale from 0.001."""
  both = lambda **ranges: {
    f"{flag}.{model}": text
    for flag, text in ranges.items()
    for model in ("small", "large")
  }
  rate = "log:1e-4:0.1"
  fedavg = {"client_lr": rate, **both(server_lr=rate)}
  periodic = fedavg | both(
    distill_lr=rate,
    distill_lr_decay="log:1e-3:1",
    teacher_temperature="log:0.1:10",
    student_regularization="log:1e-3:0.5",
  )
  merged = periodic | {"merge_alpha": "linear:0.05:0.95"}
  return {"fedavg": fedavg, "periodic": periodic, "merged": merged}


def _accuracy_of_each(sums: list[core.Metrics]) -> list[core.Mean]:
  """Each model's accuracy, out of its metrics on one set."""
  return [
    next(mean for name, mean in of_one.items() if name.endswith("_accuracy"))
    for of_one in sums
  ]


def codist_accuracies(experiment, config):
  """Accuracies of each pool's model, on held-out clients' and test examples."""
  del config
  names, evaluator = EXPERIMENTS["codist"].models, experiment.evaluator

  def evaluate(state, data):
    sums = evaluator.sums([pool.variables for pool in state.server], data)
    return dict(zip(names, _accuracy_of_each(sums)))

  data = {which: evaluator.data(which) for which in ("heldout", "test")}
  return names, evaluate, data


def _place_fml(state: PyTree, flag: str, value: Any) -> PyTree:
  return with_hyper(state, **{flag: value})


def fml_accuracies(experiment, config):
  """The global model's accuracy, and the mean accuracy of the clients' models.

  For the latter, "test" stands for the clients' validation images.
  """
  if not config["heldout_examples"]:
    raise common.UsageError(
      "--heldout_examples=0: a search chooses by training examples that no"
      " client trains on; give it some"
    )
  number = len(experiment.clients)
  whole = experiment.clients[0].adaptor is None
  data = {"heldout": {}, "test": {}}
  if config["algorithm"] in ("fml", "independent"):
    for which, suffix in (("heldout", "_heldout"), ("test", "")):
      data[which]["clients"] = experiment.local_evaluator.data(
        *(f"client{k}{suffix}" for k in range(number))
      )
  if whole and config["algorithm"] != "independent":
    for which in data:
      data[which]["global"] = experiment.global_evaluator.data(which)

  def evaluate(state, data):
    means = {}
    if "global" in data:
      server = experiment.server(config, state)
      sums = experiment.global_evaluator.sums([server], data["global"])
      (means["global"],) = _accuracy_of_each(sums)
    if "clients" in data:
      sums = experiment.local_evaluator.sums(
        [local_model(state, k) for k in range(number)], data["clients"]
      )
      each = [mean.total / mean.count for mean in _accuracy_of_each(sums)]
      means["clients"] = core.Mean(sum(each), float(number))
    return means

  return tuple(data["heldout"]), evaluate, data


_FML_RATE = {"learning_rate": "log:1e-3:0.3"}
EXPERIMENTS = {
  "codist": Tunable(
    module="codist",
    models=("small", "large"),
    space=_codist_space(),
    place=_place_codist,
    accuracies=codist_accuracies,
  ),
  "fml": Tunable(
    module="fml",
    models=(),
    space={
      "fml": _FML_RATE
      | {"alpha": "linear:0.05:0.95", "beta": "linear:0.05:0.95"},
      "fedavg": _FML_RATE,
      "fedprox": _FML_RATE | {"prox_mu": "log:1e-4:1"},
      "independent": _FML_RATE,
    },
    place=_place_fml,
    accuracies=fml_accuracies,
  ),
}
