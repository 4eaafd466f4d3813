"""Runs methods side by side, as `compare.py` asks for.

`s.learning_rate` is the flag `--learning_rate`, and so on.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import pathlib
from typing import Any

from absl import logging
from compare import Compare, PUBLIC
from compare_methods import Kind, METHODS, WITH_GLOBAL, WITH_ONE_MODEL
import flax.linen as nn
import jax.numpy as jnp
import launch
import numpy as np
import own_models
from settings import Given, shown, UsageError
import summarize

import hetfl
from hetfl import augment, core, evaluate
from hetfl.algorithms import fedmrl
from hetfl.algorithms.features import headed, logits_only, scored
from hetfl.batches import leave_out
from hetfl.clients import rows_of_group
from hetfl.data import compared_images, files, partition
from hetfl.engine.work import stack
from hetfl.models import families, large
from hetfl.optimizers import fedavg_server, momentum_sgd
from hetfl.plans import number_of_steps, plan_clients, plan_distillation
from hetfl.run import charts, logs, report, training

# CIFAR has pad32.
_RECIPES = {"digits": "digits8", "mnist": "mnist28", "npz": "plain"}

SETTINGS = Compare


def words(values: Mapping[str, Any], method: str) -> set[str]:
  """What holds of a method's run; see `settings`."""
  s = Compare.resolve(values, {Compare.resolve(values, ()).dataset})
  names = [*s.models] + [s.global_model] * (method in WITH_GLOBAL)
  kinds = {"own" if own_models.is_own(n) else "hetfl" for n in names}
  if method in PUBLIC and s.public_dataset is None:
    raise UsageError(
      f"--method={method}: needs public images; give --public_dataset of images"
      f" of the same shape, or --public_dataset={s.dataset} to set aside some"
    )
  if method == "ktpfl" and (
    s.clients_per_round or s.dropout_rate or s.late_clients
  ):
    raise UsageError(
      "--method=ktpfl: all clients take part in each round; leave out"
      " --clients_per_round, --dropout_rate and --late_clients"
    )
  if s.patience and not s.validation:
    raise UsageError(
      f"--patience={s.patience}: needs images to measure by; give --validation,"
      " such as 0.1"
    )
  if bool(s.late_clients) != (s.late_round > 1):
    raise UsageError(
      f"--late_clients={s.late_clients} --late_round={s.late_round}: give both,"
      " the round one after the first"
    )
  if method == "fedmrl" and s.inner_features > s.num_features:
    raise UsageError(
      f"--inner_features={s.inner_features}: they are the first of a client's"
      f" --num_features={s.num_features}; give at most as many"
    )
  several = len(families.members(s.models)) > 1
  if method in ("codist", "mergedcodist") and not several:
    raise UsageError(
      f"--models={shown(s.models)}: with --method={method} architectures teach"
      " each other; give two or more"
    )
  if method == "heterofl" and (several or "own" in kinds):
    raise UsageError(
      f"--models={shown(s.models)}: clients of --method=heterofl have narrower"
      " copies of one of hetfl's models; give resnet"
    )
  if method in WITH_ONE_MODEL and several:
    raise UsageError(
      f"--models={shown(s.models)}: the clients of --method={method} have the"
      " server's model; give one architecture, such as small_cnn"
    )
  found = {method, s.dataset, s.partition, "images", "device"}
  found |= {"set_aside"} if s.public_dataset == s.dataset else set()
  found |= {"several_clients"} if method != "pooled" else set()
  found |= {"momentum_sgd"} if method != "scaffold" else set()
  # For batch statistics, which the user's models may have too.
  if "own" in kinds or large.NETWORKS.keys() & {*families.members(names)}:
    found.add("full_batches")
  return found | {f"{n}_models" for n in kinds} | launch.machine_words(values)


class Experiment:
  """Data, models and engine of one federation, shared by the methods."""

  def __init__(self, s: Compare):
    names = families.members(s.models)
    own_models.check("models", names, [*families.FAMILIES, *families.NAMES])
    own_models.check("global_model", [s.global_model], families.NAMES)
    load = compared_images.load_compared_images
    own = s.public_examples if s.public_dataset == s.dataset else 0
    self.images = load(**s.arguments(load, public_examples=own))
    load_public = compared_images.load_public_images
    shape = self.images.train.bank["x"].shape[1:]
    self._load_public = functools.partial(
      load_public, **s.arguments(load_public, image_shape=shape)
    )
    self.engine = launch.engine_of(s)
    self._eval_batch_size = s.eval_batch_size
    slow = sorted(large.NETWORKS.keys() & {*names, s.global_model})
    if slow and "cpu" in s.words:
      text = "--models: on a CPU %s take minutes to compile."
      logging.info(text, ", ".join(slow))
    self.num_classes = self.images.num_classes
    (self.bank,) = hetfl.put_banks(self.images.train)
    train = self.images.train
    recipe = augment.recipe_of(
      _RECIPES.get(s.dataset, "pad32"), train.bank["x"][train.members]
    )
    self.transform = recipe.evaluate
    shape = (*[recipe.size] * 2, shape[-1])

    def dense(inputs, outputs):
      return core.Model.from_flax(nn.Dense(outputs), jnp.zeros((1, inputs)))

    self.head = dense(s.num_features, self.num_classes)

    def body(kind, num_features=s.num_features):
      """An architecture's model, whose outputs are features."""
      name, width = kind
      return own_models.model(
        "models" if name in names else "global_model",
        name,
        num_features,
        jnp.zeros((1, *shape)),
        lambda: families.body(
          name, num_features, shape, width=width, conv=s.conv, dtype=s.dtype
        ),
        of="features",
      )

    def nested(kind):
      """An architecture's model around the shared one, for FedMRL."""
      inner = s.inner_features
      return fedmrl.matryoshka(
        body(kind),
        self.head,
        dense(inner + s.num_features, s.num_features),
        shared_body=body(Kind(s.global_model), inner),
        shared_head=dense(inner, self.num_classes),
      )

    # Clients with the same model share one object. Outputs are `Features`,
    # logits, or `Nested`.
    self.headed = functools.cache(lambda kind: headed(body(kind), self.head))
    self.model = functools.cache(lambda kind: logits_only(self.headed(kind)))
    self.nested = functools.cache(nested)
    # Methods with the same models and scores share programs.
    self._evaluator = functools.cache(self._evaluator_of)
    # Large models take seconds to trace, and all data is read for a record.
    self.shapes = functools.cache(core.Model.shapes)
    self._record = functools.cache(self._record_of)
    clients = range(s.num_clients)
    self.of_client = [Kind(names[k % len(names)]) for k in clients]
    self.kinds = list(dict.fromkeys(self.of_client))
    # `pooled` has a client for each architecture, which holds all examples.
    everything = [self.images.train.members] * len(self.kinds)
    of = hetfl.ClientPopulation.from_lists
    self.pooled = of(self.images.train.bank, everything)

  def kinds_of(self, s: Compare) -> list[Kind]:
    """Each client's architecture in a run."""
    if s.method != "heterofl":
      return self.of_client
    each = enumerate(self.of_client)
    return [Kind(of.model, s.widths[k % len(s.widths)]) for k, of in each]

  def members(self, s: Compare) -> dict[Kind, tuple[int, ...]]:
    """The clients of each architecture in a run."""
    held: dict[Kind, tuple[int, ...]] = {}
    for k, kind in enumerate(self.kinds_of(s)):
      held[kind] = (*held.get(kind, ()), k)
    return held

  def num_bytes(self, kind: Kind) -> int:
    """The bytes of an architecture's variables."""
    return training.num_bytes(self.shapes(self.model(kind)))

  def files(self, s: Compare) -> dict[str, bytes]:
    """Name and content of files that belong to a run."""
    names = [kind.model for kind in self.kinds]
    names += [s.global_model] * bool(s.words & WITH_GLOBAL)
    public = s.method in PUBLIC or "set_aside" in s.words
    return {"data.json": self._record(public)} | own_models.sources(names)

  def _record_of(self, public: bool) -> bytes:
    """What identifies the data, the public images included."""
    sets = [self.images.train, self.images.test, self.images.validation]
    if public:
      sets.append(self.public)
    return files.record(sets)

  @functools.cached_property
  def public(self) -> hetfl.Subset:
    """The public images, without labels."""
    return self.images.public or self._load_public()

  @functools.cached_property
  def _public_bank(self) -> core.Batch:
    return hetfl.put_banks(self.public)[0]

  def rows(self, s: Compare) -> dict[str, tuple[int, ...]]:
    """The clients of those who take part, by name."""
    if METHODS[s.method].of == "pools":
      members = self.members(s).values()
      return {f"pool{i}": held for i, held in enumerate(members)}
    return {f"client{k}": (k,) for k in range(s.num_clients)}

  def algorithm(self, s: Compare) -> core.Algorithm:
    """Builds the method."""
    method = METHODS[s.method]
    of_kinds = s.method == "pooled" or method.of == "pools"
    kinds = self.kinds if of_kinds else self.kinds_of(s)
    models = [method.model(self, kind) for kind in kinds]
    how: dict[str, Any] = dict(
      learning_rate=s.learning_rate,
      optimizer=functools.partial(
        momentum_sgd, momentum=s.momentum, weight_decay=0.0
      ),
    )
    public = dict(
      public_transform=self.transform, eval_batch_size=s.eval_batch_size
    )
    server = dict(server_lr=1.0, server_optimizer=fedavg_server)
    server |= dict(prox_mu=s.prox_mu) if s.method == "fedprox" else {}
    # Clients take the method's rate and optimizer, the others have their own.
    make, options = {
      "clients": (hetfl.Client, how),
      "parties": (functools.partial(hetfl.Participant, **how), public),
      "pools": (
        functools.partial(hetfl.Pool, **how, **server),
        {"rounds": None},
      ),
    }[method.of]
    make = functools.partial(make, transform=self.transform)
    return method.make(
      **{method.of: list(map(make, models, self.rows(s)))},
      **method.more(self, s),
      **options,
      engine=launch.engine_of(s, s.lanes),
    )

  def device_data(self, s: Compare) -> dict:
    """The banks, as the algorithm takes them."""
    alone = METHODS[s.method].of == "clients"
    data = dict.fromkeys(["train"] if alone else self.rows(s), self.bank)
    if s.method in PUBLIC:
      data |= dict.fromkeys(["public", "distill"], self._public_bank)
    return data

  def plan(self, s: Compare, round: int) -> hetfl.Plan:
    """A round's plan, alike for all methods; a pure function of `round`."""
    tail = "repeat" if "full_batches" in s.words else "short"
    options = s.arguments(plan_clients, round=round, tail=tail)
    clients = self.images.train
    if s.method == "pooled":
      clients = self.pooled
      options |= dict(clients_per_round=None, dropout_rate=0.0, late_clients=0)
    plan = hetfl.plan_round({"train": clients}, **options)
    if METHODS[s.method].of == "clients":
      return plan
    train, everyone = plan.batches["train"], np.arange(s.num_clients)
    batches = {
      name: rows_of_group(train, everyone, held)[1]
      for name, held in self.rows(s).items()
    }
    if s.method in PUBLIC:
      batches |= self._on_public(s, round, train)
    return hetfl.Plan(plan.round, batches)

  def _on_public(
    self, s: Compare, round: int, train: hetfl.Batches
  ) -> dict[str, hetfl.Batches]:
    """The batches of public images; only clients that take part digest."""
    if METHODS[s.method].of == "pools":
      size, epochs = s.digest_batch_size, s.digest_epochs
      steps = number_of_steps(s.public_subset, batch_size=size, epochs=epochs)
      options = dict(seed=s.seed, round=round, steps=steps, batch_size=size)
      return {"distill": plan_distillation(self.public, **options)}
    held = dict(zip(self.rows(s), self.images.train.subsets()))
    options = s.arguments(hetfl.plan_fedmd, round=round)
    drawn = hetfl.plan_fedmd(self.public, held, **options).batches
    there = train.client[train.steps > 0]
    absent = np.setdiff1d(np.arange(s.num_clients), there)
    digest = leave_out(drawn["digest"], absent)
    return {"public": drawn["public"], "digest": digest}

  def evaluate(self, s: Compare, state) -> dict[str, float]:
    """Each client's accuracy and macro-F1 on its test examples, and the spread.

    By its own model, or the one that clients of its architecture share.
    """
    method, of_kinds = METHODS[s.method], self.members(s)
    if method.shared:
      models = method.shared(state)
    elif method.of == "parties":
      models = [
        stack(*(state.clients[k].variables for k in members))
        for members in of_kinds.values()
      ]
    else:
      models = [group.learner.variables for group in state.clients]
    found: dict[str, np.ndarray] = {}
    asked = [("", *of) for of in zip(of_kinds, of_kinds.values(), models)]
    if method.server:
      everyone, model = tuple(range(s.num_clients)), method.server(state)
      asked.append(("_by_server", Kind(s.global_model), everyone, model))
    for way, kind, members, variables in asked:
      sent = stack(*[method.sent(state)] * len(members))
      both = hetfl.Variables(variables, sent)
      how = method.model(self, kind), method.scores, members
      measured = {}
      for which in ("test", "validation")[: 1 + bool(s.validation)]:
        evaluator = self._evaluator(*how, which)
        measured |= evaluator(both, own=not (method.shared or way))
      for name, values in measured.items():
        if values.ndim > 1:  # Per class; NaN for absent ones.
          values = np.ma.masked_invalid(values).mean(axis=1).filled(np.nan)
        of_all = found.setdefault(name + way, np.zeros(s.num_clients))
        of_all[[*members]] = values
    row = {}
    for name, values in found.items():
      row |= {f"client{k}/{name}": x for k, x in enumerate(values.tolist())}
      for what, value in evaluate.spread(values).items():
        row[f"clients/{what}_{name}".replace("/mean_", "/")] = value
    return row

  def _evaluator_of(self, model, scores, members, which):
    """Of models of one architecture, on `which` examples of clients."""
    held = getattr(self.images, which).take(members)
    return hetfl.ClientEvaluator(
      scored(model, scores),
      dataclasses.replace(held, bank=self.bank),
      transform=self.transform,
      measure=functools.partial(_measure, which),
      engine=self.engine,
      batch_size=self._eval_batch_size,
    )

  def summarize(
    self, s: Compare, folder: logs.RunFolder, state, evaluation
  ) -> dict:
    """What `result.json` says of a finished run: last values and best ones."""
    rows = logs.read_rows(folder.metrics)
    measured = functools.partial(report.last_and_best, evaluation, rows)
    traffic = functools.partial(METHODS[s.method].traffic, self, s)
    kinds = self.kinds_of(s)
    each = [traffic(kind) for kind in kinds]
    clients = [
      {
        **kind._asdict(),
        "parameters": core.num_parameters(self.shapes(self.model(kind)).params),
        "examples": int(self.images.train.sizes[k]),
        "test_examples": int(self.images.test.sizes[k]),
        **measured(f"client{k}"),
        # In a round that it takes part in.
        "bytes_sent_per_round": each[k][0],
        "bytes_received_per_round": each[k][1],
      }
      for k, kind in enumerate(kinds)
    ]
    takes_part = s.clients_per_round or s.num_clients
    # The mean if clients have unlike models.
    total = takes_part * sum(map(sum, each)) // s.num_clients
    everyone = measured("clients")
    for way in METHODS[s.method].ways:
      everyone |= to_target(rows, s.target_accuracy, total, way)
    return {
      **{n: getattr(s, n) for n in ("method", "dataset", "partition", "seed")},
      **partition.skew(self.images.class_counts),
      "bytes_per_round": total,
      "all": everyone,
      "clients": clients,
    }


def _measure(which, scores, batch):
  found = {}
  for way, of in scores.items():
    accuracy = evaluate.classification(of, batch)["accuracy"]
    found[f"{which}_accuracy{way}"] = accuracy
    if which == "test":
      found[f"macro_f1{way}"] = evaluate.class_f1(of, batch)
  return found


def to_target(
  rows: report.Rows, target: float | None, bytes_per_round: int, way: str = ""
) -> dict[str, int | None]:
  """The rounds and bytes until the mean accuracy first reached a target.

  >>> rows = [{"round": t, "clients/test_accuracy": t / 8} for t in (2, 4, 6)]
  >>> to_target(rows, 0.5, 100)
  {'rounds_to_target': 4, 'bytes_to_target': 400}
  """
  course = summarize.series(rows, f"test_accuracy{way}")["clients"]
  found = summarize.measures(course, target, bytes_per_round)
  names = ("rounds_to_target", "bytes_to_target")
  return {name + way: found[name] for name in names if name in found}


def worse(accuracies: Sequence[float], alone: Sequence[float]) -> float:
  """The share of clients that are worse than alone, or diverge only here."""
  ours, theirs = map(report.as_floats, (accuracies, alone))
  return float(np.mean((ours < theirs) | (np.isnan(ours) > np.isnan(theirs))))


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
  rounds = {r["round"] for seeds in runs.values() for of in seeds for r in of}
  whole = {
    name: [report.carried_on(rows, rounds) for rows in seeds]
    for name, seeds in runs.items()
  }
  alone = whole.get("local") if len(runs) > 1 else None
  drawn, last = {}, {}
  for label, (way, seeds) in labelled(whole).items():
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
    ends = report.as_floats([each(rows[-1], way) for rows in seeds])
    last[label] = ends.mean(axis=0)
  title = f"{s.dataset}, {s.num_clients} clients, {s.partition}"
  title += f" {s.partition_alpha:g}" * (s.partition == "dirichlet")
  charts.curves(
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
    sharey=False,  # The third has other percents.
  )
  names = [kind.model.rpartition(":")[2] for kind in experiment.of_client]
  names = [f"{k}: {name}" for k, name in enumerate(names)]
  charts.clients(last, folder / "clients.png", names=names, title=title)
  counts = experiment.images.class_counts
  skew = partition.skew(counts)
  title += f"\ntotal variation {skew['total_variation']:.2f}"
  title += f", {skew['effective_clients']:.1f} effective clients"
  charts.holdings(counts, folder / "partition.png", names=names, title=title)


def table(
  target: float | None,
  results: dict[str, list[dict]],
  rows: Mapping[str, Sequence[report.Rows]],
) -> str:
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
    of_all = lambda way, i, r, name=name: float(
      report.as_floats(r["all"][name + way])
    )
    add(title, of_all)
  if alone := results.get("local"):
    each = lambda r, way="": [c[f"test_accuracy{way}"] for c in r["clients"]]
    compared = lambda way, i, r: worse(each(r, way), each(alone[i]))
    add("worse than alone %", compared, form="{:.0f}")
  add("KB a round", lambda way, i, r: r["bytes_per_round"], 1e-3, "{:,.1f}")
  if target is not None:

    def took(name, way, i, r):
      of = rows[r["method"]][i], target, r["bytes_per_round"]
      return to_target(*of, way)[name + way]

    of = functools.partial
    add("rounds to target", of(took, "rounds_to_target"), 1, "{:,.0f}")
    add("KB to target", of(took, "bytes_to_target"), 1e-3, "{:,.1f}")
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
    table=functools.partial(table, s.target_accuracy),
    # Nothing depends on the number of rounds.
    lengthens=lambda s: True,
    flag="method",
  )
