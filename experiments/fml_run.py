"""Runs Federated Mutual Learning and its baselines, as `fml.py` asks for.

`s.learning_rate` is the flag `--learning_rate`, and so on.
"""

from collections.abc import Mapping
import dataclasses
import functools
import pathlib
from typing import Any

import flax.linen as nn
from fml import Fml
import jax
import jax.numpy as jnp
import launch
import numpy as np
import own_models
from settings import Given, UsageError

import hetfl
from hetfl import augment, checks, core
from hetfl.batches import leave_out
from hetfl.data import files, fml_images
from hetfl.evaluate import accuracies
from hetfl.models import fml as nets
from hetfl.models.spliced import splice
from hetfl.optimizers import momentum_sgd
from hetfl.run import charts, logs, report, training
from hetfl.streams import generator, Stream

_TRUNKS = ("lenet5_conv", "cnn1_conv", "cnn2_conv")
# CIFAR has pad32.
_RECIPES = {"digits": "digits8", "mnist": "mnist28", "npz": "crop"}
# In these a client ends with its own model, in others with the global one.
_PERSONAL = ("fml", "independent")

SETTINGS = Fml


def words(values: Mapping[str, Any], algorithm: str) -> set[str]:
  """What holds of an algorithm's run; see `settings`."""
  found = launch.machine_words(values) | {algorithm, "images", "device"}
  s = Fml.resolve(values, {Fml.resolve(values, ()).dataset[0]})
  models = {s.global_model, *s.client_models}
  of_clients = s.client_models if algorithm in _PERSONAL else ()
  trained = {s.global_model, *of_clients}
  holds = {
    s.dataset[0]: True,
    "several_datasets": len(s.dataset) > 1,
    "own_models": any(map(own_models.is_own, models)),
    "hetfl_models": not all(map(own_models.is_own, trained)),
    "mlps": models == {"mlp"},
    "bad_clients": s.bad_clients,
    values.get("partition", ""): True,
  }
  return found | {word for word, held in holds.items() if held}


class Experiment:
  """Data, models and engine of one federation, shared by its algorithms."""

  def __init__(self, s: Fml):
    own_models.check("client_models", s.client_models, nets.NAMES)
    known = [*nets.NAMES, *_TRUNKS]
    own_models.check("global_model", [s.global_model], known)
    if "npz" in s.dataset and len({*s.dataset}) > 1:
      raise UsageError(
        "--dataset: npz, normalised otherwise, goes with no other"
      )
    load = fml_images.load_fml_images
    self.data = load(**s.arguments(load))
    self.engine = launch.engine_of(s)
    classes = self.data.num_classes
    trunk = s.global_model in _TRUNKS
    if len(set(classes.values())) > 1 and not trunk:
      raise UsageError(
        f"--dataset={','.join(s.dataset)}: clients with different classes"
        f" cannot share --global_model={s.global_model}; use one of"
        f" {', '.join(_TRUNKS)}"
      )
    recipe = augment.recipe_of(
      _RECIPES.get(s.dataset[0], "pad32"), self.data.clients[0].train.bank["x"]
    )
    shape = (*[recipe.size] * 2, self.data.image_shape[-1])
    example = jnp.zeros((1, *shape))

    @functools.cache
    def model(name, num_classes):
      """A network; clients with the same network share one object."""
      is_global = name == s.global_model
      return own_models.model(
        "global_model" if is_global else "client_models",
        name,
        num_classes,
        example,
        lambda: nets.net(name, num_classes, shape, conv=s.conv, dtype=s.dtype),
      )

    @functools.cache
    def adaptor(num_classes):
      shared = self.global_model
      features = jax.eval_shape(shared.predict, shared.shapes(), example)
      return core.Model.from_flax(
        nn.Dense(num_classes, kernel_init=nets.torch_init),
        jnp.zeros(features.shape),
      )

    self.global_model = model(
      s.global_model.removesuffix("_conv" if trunk else ""),
      None if trunk else next(iter(classes.values())),
    )
    self.transform = recipe.train if s.augment else recipe.evaluate
    held = self.data.clients
    sampled = checks.given(clients_per_round=s.clients_per_round)
    checks.whole(1, len(held), **sampled)
    self.clients = [
      hetfl.Client(  # Without a rate of its own: `fml`'s is for all.
        model=model(name, classes[h.dataset]),
        transform=self.transform,
        bank=h.dataset,
        adaptor=adaptor(classes[h.dataset]) if trunk else None,
      )
      for name, h in zip(s.client_models, held)
    ]
    # A set's name is how its metrics' names in the rows begin.
    self.kinds = ["validation", *["heldout"] * bool(s.heldout_examples)]
    own_sets = [
      {f"client{k}/{kind}": getattr(h, kind) for kind in self.kinds}
      for k, h in enumerate(held)
    ]
    sets = {name: own[name] for own in own_sets for name in own}
    if not trunk:  # All clients share one data set.
      sets["global/test"] = next(iter(self.data.test.values()))
      if s.heldout_examples:
        everywhere = np.concatenate([h.heldout.index for h in held])
        sets["global/heldout"] = hetfl.Subset(held[0].heldout.bank, everywhere)
    self.populations = {}
    for dataset in classes:
      own = [h.train for h in held if h.dataset == dataset]
      self.populations[dataset] = hetfl.ClientPopulation.from_lists(
        own[0].bank, [subset.index for subset in own]
      )
    sets, self.banks = launch.put(sets, self.populations)
    evaluator = functools.partial(
      hetfl.Evaluator,
      sets=sets,
      transform=recipe.evaluate,
      engine=self.engine,
      batch_size=s.eval_batch_size,
    )
    self.local_evaluator = evaluator(
      [c.model for c in self.clients], only=own_sets
    )
    if trunk:  # The complete meme model of each client.
      memes = [splice(self.global_model, c.adaptor) for c in self.clients]
      self.meme_evaluator = evaluator(memes, only=own_sets)
    else:
      self.global_evaluator = evaluator([self.global_model])

  def files(self, s: Fml) -> dict[str, bytes]:
    """Name and content of files that belong to a run."""
    of_clients = s.client_models if s.algorithm in _PERSONAL else ()
    return {"data.json": self._record} | own_models.sources(
      [s.global_model, *of_clients]
    )

  @functools.cached_property
  def _record(self) -> bytes:
    return files.record(self.data.sets)  # Reads all data.

  def algorithm(self, s: Fml) -> core.Algorithm:
    """Builds one of the four algorithms."""
    optimizer = functools.partial(
      momentum_sgd,
      momentum=s.momentum,
      weight_decay=s.weight_decay,
      clip_norm=s.clip_norm,
    )
    engine = launch.engine_of(s, s.lanes)
    options = dict(
      learning_rate=s.learning_rate, optimizer=optimizer, engine=engine
    )
    clients = [
      dataclasses.replace(client, microbatch=s.microbatch or None)
      for client in self.clients
    ]
    if s.algorithm == "independent":
      return hetfl.fml(clients, global_model=None, **options)
    if s.algorithm == "fml":
      if s.clients_start == "global" and s.global_model not in s.client_models:
        raise UsageError(
          "--clients_start=global: none of --client_models is the"
          f" --global_model={s.global_model}"
        )
      return hetfl.fml(
        clients,
        global_model=self.global_model,
        alpha=launch.linear(s.alpha, s.rounds),
        beta=launch.linear(s.beta, s.rounds),
        temperature=s.temperature,
        sequential=s.sequential_updates,
        from_global=s.clients_start == "global",
        **options,
      )
    if s.global_model in _TRUNKS:
      raise UsageError(
        f"--global_model={s.global_model} has no output layer, but"
        f" --algorithm={s.algorithm} needs a complete model"
      )
    # A server step of rate 1 takes the mean of the clients' models.
    pool = hetfl.Pool(
      self.global_model,
      "global",
      learning_rate=s.learning_rate,
      server_lr=1.0,
      transform=self.transform,
      optimizer=optimizer,
      server_optimizer=hetfl.optimizers.fedavg_server,
      prox_mu=s.prox_mu if s.algorithm == "fedprox" else None,
    )
    return hetfl.fedavg([pool], rounds=None, engine=engine)

  def device_data(self, s: Fml) -> dict:
    """The banks, as the algorithm takes them."""
    return _named(s, self.banks)

  def plan(self, s: Fml, round: int) -> hetfl.Plan:
    """A round's plan, alike for all algorithms; a pure function of `round`."""
    sampled, number = s.clients_per_round, len(self.populations)
    several = number > 1
    plan = hetfl.plan_round(
      _named(s, self.populations),
      seed=s.seed,
      round=round,
      batch_size=s.batch_size,
      epochs=s.local_epochs,
      uniform_weights=s.merge_weights == "uniform",
      clients_per_round=None if several else sampled,
      tail="repeat" if s.full_batches else "short",
    )
    if several and sampled:
      # Drawn from the clients of all data sets.
      rng = generator(Stream.CLIENTS, s.seed, 0, round, number)
      drawn = rng.permutation(len(self.clients)) < sampled
      for name, batches in plan.batches.items():
        active, drawn = np.split(drawn, [len(batches.client)])
        plan.batches[name] = leave_out(batches, batches.client[~active])
    return plan

  def evaluate(self, s: Fml, state) -> dict[str, float]:
    """Accuracies and losses of the global model and of the clients' products.

    A client's product is its own model or, with FedAvg and FedProx, the global
    model (the paper's Figure 4).
    """
    row, clients = {}, range(len(self.clients))
    if s.algorithm in _PERSONAL:
      models = [hetfl.local_model(state, k) for k in clients]
      for values in self.local_evaluator(models):
        row |= values
    if s.algorithm != "independent":
      if self.clients[0].adaptor is None:
        found = self.global_evaluator([self.server(s, state)])
      else:
        memes = [hetfl.meme_model(state, k) for k in clients]
        found = self.meme_evaluator(memes)
      start = "global_" if s.algorithm == "fml" else ""
      for values in found:
        for name, value in values.items():
          if name.startswith("client"):
            name = name.replace("/", f"/{start}")
          row[name] = value
    for kind in self.kinds:
      row[f"clients/{kind}_accuracy"] = float(
        np.mean([row[f"client{k}/{kind}_accuracy"] for k in clients])
      )
    return row

  def server(self, s: Fml, state) -> core.Variables | None:
    """The global model's variables; `None` if there is none."""
    personal = s.algorithm in _PERSONAL
    return state.server if personal else state.server[0].variables

  def heldout(self, s: Fml) -> tuple:
    """The accuracies that a search chooses by; see `tune`.

    "test" stands for the clients' validation images where models are theirs.
    """
    if not s.heldout_examples:
      raise UsageError(
        "--heldout_examples=0: a search chooses by training examples that no"
        " client trains on; give it some"
      )
    clients = range(len(self.clients))
    data = {"heldout": {}, "test": {}}
    for which, kind in (("heldout", "heldout"), ("test", "validation")):
      if s.algorithm in _PERSONAL:
        sets = (f"client{k}/{kind}" for k in clients)
        data[which]["clients"] = self.local_evaluator.data(*sets)
      if s.algorithm != "independent" and self.clients[0].adaptor is None:
        data[which]["global"] = self.global_evaluator.data(f"global/{which}")

    def evaluate(state, data):
      means = {}
      if "global" in data:
        server = self.server(s, state)
        sums = self.global_evaluator.sums([server], data["global"])
        (means["global"],) = accuracies(sums)
      if "clients" in data:
        models = [hetfl.local_model(state, k) for k in clients]
        sums = self.local_evaluator.sums(models, data["clients"])
        each = [mean.total / mean.count for mean in accuracies(sums)]
        means["clients"] = core.Mean(sum(each), float(len(each)))
      return means

    return tuple(data["heldout"]), evaluate, data

  def summarize(
    self, s: Fml, folder: logs.RunFolder, state, evaluation
  ) -> dict:
    """What `result.json` says of a finished run: last values and best ones."""
    rows = logs.read_rows(folder.metrics)
    measured = functools.partial(report.last_and_best, evaluation, rows)

    alone, personal = s.algorithm == "independent", s.algorithm in _PERSONAL
    shared = self.global_model.shapes()
    sent = 0 if alone else training.num_bytes(shared)
    clients = []
    for k, (client, held) in enumerate(zip(self.clients, self.data.clients)):
      own = client.model if personal else self.global_model
      clients.append(
        {
          "model": s.client_models[k] if personal else s.global_model,
          "parameters": core.num_parameters(own.shapes().params),
          "dataset": held.dataset,
          "examples": len(held.train.index),
          "validation_examples": len(held.validation.index),
          **measured(f"client{k}"),
          # In a round that it takes part in.
          "bytes_sent_per_round": sent,
          "bytes_received_per_round": sent,
        }
      )
    return {
      "algorithm": s.algorithm,
      "dataset": ",".join(s.dataset),
      "partition": s.partition,
      "seed": s.seed,
      "bytes_per_round": 2 * sent * (s.clients_per_round or len(clients)),
      "global": {
        "model": None if alone else s.global_model,
        "parameters": None if alone else core.num_parameters(shared.params),
        "test_accuracy": None,
        "best_test_accuracy": None,
        **measured("global"),
      },
      "clients": clients,
    }


def _named(s: Fml, of_datasets: dict) -> dict:
  """Banks or populations by the names by which the algorithm takes them."""
  if s.algorithm in _PERSONAL:
    return of_datasets
  return dict(zip(["global"], of_datasets.values()))


def draw(
  runs: dict[str, list[list[dict]]],
  s: Fml,
  folder: pathlib.Path,
  experiment: Any = None,
) -> None:
  """Draws the curves of one or more algorithms, with one or more seeds each.

  Next to other algorithms, independent training also has a dashed line: each
  client's best accuracy (the paper's Figure 5).
  """
  titles = {"global": "global model, on test images"}
  if len(s.client_models) > logs.FEW:
    titles["clients"] = "clients' images (mean)"
  else:
    for k, model in enumerate(s.client_models):
      titles[f"client{k}"] = f"client {k}'s images (its own model: {model})"
  best = {}
  seeds = runs.get("independent", ())
  for pool in titles if len(runs) > 1 else ():
    name = f"{pool}/validation_accuracy"
    bests = [max(row.get(name) or 0.0 for row in rows) for rows in seeds]
    if any(bests):
      best[pool] = {"independent": np.mean(bests)}
  whose = ", ".join(
    f"{name} with {'their own' if name in _PERSONAL else 'the global'} model"
    for name in runs
  )
  charts.curves(
    runs,
    folder / "curves.png",
    metric=("test_accuracy", "validation_accuracy"),
    ylabel="Test or validation accuracy (%)",
    published=best,
    dashed="best",
    title=f"{','.join(s.dataset)}, {s.partition}\nOn clients' images: {whose}",
    titles=titles,
  )


def main(given: Given) -> None:
  """Runs the algorithms of --algorithm, then prints a table."""
  s = Fml.resolve(given.values, ())
  models = (s.global_model, *s.client_models)
  launch.side_by_side(
    given,
    Fml,
    ("fml", *s.dataset, *own_models.labels(models)),
    words=words,
    build=Experiment,
    draw=draw,
    table=lambda results, rows: report.clients_table(results, _PERSONAL),
    # Without schedules, nothing depends on the number of rounds.
    lengthens=lambda s: len({*s.alpha}) == len({*s.beta}) == 1,
  )
