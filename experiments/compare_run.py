"""Runs methods side by side, as `compare.py` asks for.

`s.learning_rate` is the flag `--learning_rate`, and so on.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

from compare import Compare
import flax.linen as nn
import jax
import jax.numpy as jnp
import launch
import numpy as np
import own_models
from settings import Given

import hetfl
from hetfl import augment, core, evaluate
from hetfl.algorithms import (
  ditto,
  fd,
  fedgh,
  fedkd,
  fedproto,
  fedtgp,
  lgfedavg,
  personal,
)
from hetfl.algorithms.features import headed, logits_only
from hetfl.data import compared_images, files
from hetfl.models import families
from hetfl.optimizers import momentum_sgd
from hetfl.run import logs, report, training

_RECIPES = {"digits": "digits8", "mnist": "mnist28"}  # Of CIFAR: pad32.

SETTINGS = Compare


_by_head = lambda outputs, sent: (getattr(outputs, "logits", outputs),)


class Method(NamedTuple):
  """A method, as `METHODS` names them.

  Attributes:
    build: `(experiment, s, options) -> algorithm`; the options are `clients`,
      `learning_rate`, `optimizer` and `engine`. Its state's `clients` holds
      `hetfl.clients.Group`s.
    features: whether clients' outputs are `Features`, not logits.
    scores: `(outputs, what the server sent) -> class scores`, by each of
      `ways`; by default the logits. What was sent is there with `features`.
    ways: how clients classify; the paper's way is "", others are suffixes.
    traffic: `(experiment, s) -> bytes` that a client sends and receives in a
      round.
  """

  build: Callable[..., core.Algorithm]
  features: bool = False
  scores: Callable[[Any, Any], tuple] = _by_head
  ways: Sequence[str] = ("",)
  traffic: Callable[[Any, Compare], tuple[int, int]] = lambda e, s: (0, 0)


_alone = lambda e, s, options: personal.personal(**options)


def _fml(e, s, options):
  return hetfl.fml(
    global_model=e.model(s.global_model, False),
    alpha=s.fml_alpha,
    beta=s.fml_beta,
    **options,
  )


def _fedkd(e, s, options):
  return fedkd.fedkd(mentee=e.model(s.global_model, False), **options)


def _numbers(e, s):
  """C classes and D features."""
  return dict(num_classes=e.num_classes, num_features=s.num_features)


def _fedproto(e, s, options):
  weight = s.prototype_weight
  return fedproto.fedproto(**_numbers(e, s), weight=weight, **options)


def _fedtgp(e, s, options):
  return fedtgp.fedtgp(
    **_numbers(e, s),
    weight=s.prototype_weight,
    server_learning_rate=s.server_learning_rate,
    **options,
  )


def _fedgh(e, s, options):
  rate = s.server_learning_rate
  return fedgh.fedgh(head=e.head, server_learning_rate=rate, **options)


def _fd(e, s, options):
  return fd.fd(num_classes=e.num_classes, weight=s.fd_weight, **options)


def _ditto(e, s, options):
  return ditto.ditto(weight=s.ditto_weight, **options)


def _nearest(outputs, sent):
  sent = getattr(sent, "prototypes", sent)
  return fedproto.nearest(outputs, sent), outputs.logits


def _model_bytes(e, s):
  return (training.num_bytes(e.shapes(s.global_model)),) * 2


def _own_bytes(e, s):  # All have one architecture.
  return (training.num_bytes(e.shapes(e.kinds[0])),) * 2


def _head_bytes(e, s):
  return (4 * e.num_classes * (s.num_features + 1),) * 2


def _prototype_bytes(e, s):
  numbers = e.num_classes * s.num_features
  return 4 * (numbers + e.num_classes), 4 * numbers


def _prediction_bytes(e, s):
  return (4 * e.num_classes * (e.num_classes + 1),) * 2


_WITH_GLOBAL = {"fml", "fedkd"}  # Methods with a --global_model.
_WAYS = "", "_by_head"
METHODS = {
  "local": Method(_alone),
  "pooled": Method(_alone),
  "fml": Method(_fml, traffic=_model_bytes),
  "fedkd": Method(_fedkd, traffic=_model_bytes),  # Before compression.
  "fd": Method(_fd, traffic=_prediction_bytes),
  "fedproto": Method(_fedproto, True, _nearest, _WAYS, _prototype_bytes),
  "fedtgp": Method(_fedtgp, True, _nearest, _WAYS, _prototype_bytes),
  "fedgh": Method(_fedgh, True, traffic=_head_bytes),
  "lgfedavg": Method(
    lambda e, s, options: lgfedavg.lgfedavg(**options),
    True,
    traffic=_head_bytes,
  ),
  "ditto": Method(_ditto, traffic=_own_bytes),
}


def words(values: Mapping[str, Any], method: str) -> set[str]:
  """What holds of a method's run; see `settings`."""
  s = Compare.resolve(values, {Compare.resolve(values, ()).dataset})
  names = [*s.models] + [s.global_model] * (method in _WITH_GLOBAL)
  kinds = {"own" if own_models.is_own(n) else "hetfl" for n in names}
  found = {method, s.dataset, s.partition, "images", "device"}
  return found | {f"{n}_models" for n in kinds} | launch.machine_words(values)


class Experiment:
  """Data, models and engine of one federation, shared by the methods."""

  def __init__(self, s: Compare):
    names = families.members(s.models)
    own_models.check("models", names, [*families.FAMILIES, *families.NAMES])
    own_models.check("global_model", [s.global_model], families.NAMES)
    load = compared_images.load_compared_images
    self.images = load(**s.arguments(load))
    self.engine = launch.engine_of(s)
    self.num_classes = self.images.num_classes
    (bank,) = hetfl.put_banks(self.images.train)
    self.data = {"train": bank}
    if s.dataset == "npz":
      recipe = augment.fitted("plain", self.images.train.bank["x"])
    else:
      recipe = augment.RECIPES[_RECIPES.get(s.dataset, "pad32")]
    self.transform = recipe.evaluate
    shape = (*[recipe.size] * 2, bank["x"].shape[-1])

    self.head = core.Model.from_flax(
      nn.Dense(self.num_classes), jnp.zeros((1, s.num_features))
    )

    @functools.cache  # Clients with the same model share one object.
    def model(name, features):
      """An architecture's model, whose outputs are `Features` or logits."""
      if not features:
        return logits_only(model(name, True))
      body = own_models.model(
        "models",
        name,
        s.num_features,
        jnp.zeros((1, *shape)),
        lambda: families.body(
          name, s.num_features, shape, conv=s.conv, dtype=s.dtype
        ),
        of="features",
      )
      return headed(body, self.head)

    self.model, self._evaluators = model, {}
    self.of_client = [names[k % len(names)] for k in range(s.num_clients)]
    # `pooled` has a client for each architecture, who holds all examples.
    self.kinds = list(dict.fromkeys(self.of_client))
    everything = [self.images.train.members] * len(self.kinds)
    of = hetfl.ClientPopulation.from_lists
    self.pooled = of(self.images.train.bank, everything)

  def shapes(self, name: str) -> hetfl.Variables:
    """The shapes of an architecture's variables."""
    return jax.eval_shape(self.model(name, False).init, jax.random.key(0))

  def files(self, s: Compare) -> dict[str, bytes]:
    """Name and content of files that belong to a run."""
    names = self.kinds + [s.global_model] * bool(s.words & _WITH_GLOBAL)
    return {"data.json": self._record} | own_models.sources(names)

  @functools.cached_property
  def _record(self) -> bytes:
    return files.record([self.images.train, self.images.test])

  def algorithm(self, s: Compare) -> core.Algorithm:
    """Builds the method."""
    method = METHODS[s.method]
    names = self.kinds if s.method == "pooled" else self.of_client
    options = dict(
      clients=[
        hetfl.Client(
          model=self.model(name, method.features), transform=self.transform
        )
        for name in names
      ],
      learning_rate=s.learning_rate,
      optimizer=functools.partial(
        momentum_sgd, momentum=s.momentum, weight_decay=0.0
      ),
      engine=launch.engine_of(s, s.lanes),
    )
    return method.build(self, s, options)

  def device_data(self, s: Compare) -> dict:
    """The banks, as the algorithm takes them."""
    return self.data

  def plan(self, s: Compare, round: int) -> hetfl.Plan:
    """A round's plan, alike for all methods; a pure function of `round`."""
    pooled = s.method == "pooled"
    return hetfl.plan_round(
      {"train": self.pooled if pooled else self.images.train},
      seed=s.seed,
      round=round,
      batch_size=s.batch_size,
      epochs=s.local_epochs,
      clients_per_round=None if pooled else s.clients_per_round,
      tail="repeat" if "own_models" in s.words else "short",
    )

  def evaluate(self, s: Compare, state) -> dict[str, float]:
    """Each client's accuracy and macro-F1 on its test examples, and the spread.

    A client that is evaluated by `pooled` has the model of its architecture.
    """
    method, everyone = METHODS[s.method], np.arange(s.num_clients)
    holder = everyone
    if s.method == "pooled":
      holder = np.array([self.kinds.index(name) for name in self.of_client])
    found: dict[str, np.ndarray] = {}
    for group in state.clients:
      members = everyone[np.isin(holder, group.clients)]
      rows = np.array([group.clients.index(k) for k in holder[members]])
      sent = state.server if method.features else ()
      both = hetfl.Variables(
        jax.tree.map(lambda a, rows=rows: a[rows], group.learner.variables),
        jax.tree.map(lambda a, rows=rows: jnp.stack([a] * len(rows)), sent),
      )
      evaluator = self._evaluator(s, members.tolist())
      for name, values in evaluator(both, own=True).items():
        if values.ndim > 1:  # Of classes; NaN for those that are not there.
          values = np.nanmean(values, axis=1)
        found.setdefault(name, np.zeros(s.num_clients))[members] = values
    row = {}
    for name, values in found.items():
      row |= {f"client{k}/{name}": x for k, x in enumerate(values.tolist())}
      for what, value in evaluate.spread(values).items():
        row[f"clients/{what}_{name}".replace("/mean_", "/")] = value
    return row

  def _evaluator(self, s: Compare, members: list[int]) -> hetfl.ClientEvaluator:
    """Of models of one architecture, on the test examples of clients."""
    method, name = METHODS[s.method], self.of_client[members[0]]
    key = name, method.features, method.scores, *members
    if key not in self._evaluators:
      held = self.images.test.take(members)
      self._evaluators[key] = hetfl.ClientEvaluator(
        _scored(method, self.model(name, method.features)),
        dataclasses.replace(held, bank=self.data["train"]),
        transform=self.transform,
        measure=_measure,
        engine=self.engine,
        batch_size=s.eval_batch_size,
      )
    return self._evaluators[key]

  def summarize(
    self, s: Compare, folder: logs.RunFolder, state, evaluation
  ) -> dict:
    """What `result.json` says of a finished run: last values and best ones."""
    rows = logs.read_rows(folder.metrics)

    def measured(owner):
      """The last evaluation, and the best accuracies of all."""
      found = {}
      for name, value in evaluation.items():
        whose, _, short = name.partition("/")
        if whose == owner:
          found[short] = value
          if short.startswith("test_accuracy"):
            found[f"best_{short}"] = max(row[name] for row in rows)
      return found

    sent, received = METHODS[s.method].traffic(self, s)
    clients = [
      {
        "model": name,
        "parameters": core.num_parameters(self.shapes(name).params),
        "examples": int(self.images.train.sizes[k]),
        "test_examples": int(self.images.test.sizes[k]),
        **measured(f"client{k}"),
        # In a round that it takes part in.
        "bytes_sent_per_round": sent,
        "bytes_received_per_round": received,
      }
      for k, name in enumerate(self.of_client)
    ]
    takes_part = s.clients_per_round or s.num_clients
    return {
      **{n: getattr(s, n) for n in ("method", "dataset", "partition", "seed")},
      "bytes_per_round": takes_part * (sent + received),
      "all": measured("clients"),
      "clients": clients,
    }


def _scored(method: Method, model: core.Model) -> core.Model:
  """A model of variables and, as their `stats`, of what the server sent."""

  def apply(variables, x, key, train):
    outputs = model.predict(variables.params, x)
    outputs = method.scores(outputs, variables.stats)
    return dict(zip(method.ways, outputs)), variables.stats

  return core.Model(model.init, apply)


def _measure(scores, batch):
  accuracy = lambda of: evaluate.classification(of, batch)["accuracy"]
  return {f"test_accuracy{way}": accuracy(of) for way, of in scores.items()} | {
    f"macro_f1{way}": evaluate.class_f1(of, batch) for way, of in scores.items()
  }


def worse(accuracies: Sequence[float], alone: Sequence[float]) -> float:
  """The share of clients that are worse than alone."""
  return float(np.mean(np.less(accuracies, alone)))


def labelled(of_methods: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
  """What is given by method, by method and way: label -> (way, given)."""
  return {
    f"{name}{way}".replace("_", " "): (way, given)
    for name, given in of_methods.items()
    for way in METHODS[name].ways
  }


def draw(
  runs: dict[str, list[list[dict]]],
  s: Compare,
  folder: pathlib.Path,
  experiment: Experiment,
) -> None:
  """Draws the partition, the curves, and each client's last accuracy."""
  each = lambda row, way="": [
    row[f"client{k}/test_accuracy{way}"] for k in range(s.num_clients)
  ]
  alone = runs.get("local") if len(runs) > 1 else None
  drawn, last = {}, {}
  for label, (way, seeds) in labelled(runs).items():
    drawn[label] = [[] for _ in seeds]
    for i, rows in enumerate(seeds):
      for row, base in zip(rows, alone[i] if alone else rows):
        point = {
          "mean/accuracy": row[f"clients/test_accuracy{way}"],
          "tenth/accuracy": row[f"clients/worst_tenth_test_accuracy{way}"],
        }
        if alone and label != "local":
          point["worse/accuracy"] = worse(each(row, way), each(base))
        drawn[label][i].append({"round": row["round"]} | point)
    last[label] = np.mean([each(rows[-1], way) for rows in seeds], axis=0)
  title = f"{s.dataset}, {s.num_clients} clients, {s.partition}"
  title += f" {s.partition_alpha:g}" * (s.partition == "dirichlet")
  report.curves(
    drawn,
    folder / "curves.png",
    metric="accuracy",
    ylabel="Clients' own test images, or clients (%)",
    title=title,
    titles={
      "mean": "accuracy, mean over clients",
      "tenth": "accuracy, mean over the worst tenth",
      "worse": "clients that are worse than alone",
    },
  )
  names = [name.rpartition(":")[2] for name in experiment.of_client]
  names = [f"{k}: {name}" for k, name in enumerate(names)]
  report.clients(last, folder / "clients.png", names=names, title=title)
  counts = experiment.images.class_counts
  report.holdings(counts, folder / "partition.png", names=names, title=title)


def table(results: dict[str, list[dict]]) -> str:
  """A plain-text table of all seeds' results, one line per method and way."""
  lines = labelled(results)
  columns = [["method", *lines]]

  def add(title, value, factor=100, form="{:.2f}"):
    columns.append([title])
    for way, seeds in lines.values():
      values = [value(way, i, result) for i, result in enumerate(seeds)]
      columns[-1].append(report.cell(values, form, factor))

  for title, name in {
    "mean %": "test_accuracy",
    "deviation": "deviation_test_accuracy",
    "worst %": "worst_test_accuracy",
    "worst tenth %": "worst_tenth_test_accuracy",
    "macro-F1 %": "macro_f1",
  }.items():
    add(title, lambda way, i, r, name=name: r["all"][name + way])
  if alone := results.get("local"):
    each = lambda r, way="": [c[f"test_accuracy{way}"] for c in r["clients"]]
    compared = lambda way, i, r: worse(each(r, way), each(alone[i]))
    add("worse than alone %", compared, form="{:.0f}")
  add("KB a round", lambda way, i, r: r["bytes_per_round"], 1e-3, "{:,.1f}")
  add("rounds", lambda way, i, r: r["rounds"], 1, "{:,d}")
  add("seconds", lambda way, i, r: r["seconds"], 1, "{:,.1f}")
  return report.align(columns)


def main(given: Given) -> None:
  """Runs the methods of --method, then prints a table."""
  s = Compare.resolve(given.values, ())
  launch.side_by_side(
    given,
    Compare,
    ("compare", s.dataset, *own_models.labels(s.models)),
    words=words,
    build=Experiment,
    draw=draw,
    table=table,
    # Nothing depends on the number of rounds.
    lengthens=lambda s: True,
    flag="method",
  )
