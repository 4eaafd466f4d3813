"""Accuracy and loss of a model on a set of examples."""

from collections.abc import Callable, Collection, Mapping, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import checks, core, output_checks, population
from hetfl import engine as engine_lib

PyTree = Any
Measure = Callable[[PyTree, core.Batch], dict[str, core.Mean]]


def classification(
  logits: jax.Array, batch: core.Batch
) -> dict[str, core.Mean]:
  """Accuracy and cross-entropy of a batch.

  Args:
    logits: `float[B, C]`.
    batch: holds `y: int32[B]` and `mask: float32[B]`.

  Returns:
    `accuracy` (a share) and `loss` (nats), as sums over the examples.

  Raises:
    ValueError: as `core.cross_entropy`.

  >>> batch = {'y': jnp.array([0, 1]), 'mask': jnp.ones(2)}
  >>> mean = classification(jnp.array([[2., 0.], [2., 0.]]), batch)['accuracy']
  >>> float(mean.total / mean.count)
  0.5
  """
  output_checks.dense(logits)
  # argmax takes the first NaN for the largest.
  known = ~jnp.isnan(logits).any(axis=-1)
  correct = known & (jnp.argmax(logits, axis=-1) == batch["y"])
  mask = batch["mask"]
  losses = core.cross_entropy(logits, batch)
  return {
    "accuracy": core.Mean(jnp.sum(correct * mask), jnp.sum(mask)),
    "loss": core.Mean(jnp.sum(losses * mask), jnp.sum(mask)),
  }


def batch_size_or_default(batch_size: int | None) -> int:
  """The given evaluation batch size, or a default that suits the device.

  The default is 40 on CPUs, where activations then stay in the caches, and
  1,000 elsewhere.

  Args:
    batch_size: examples evaluated at once; `None` for the default.

  Returns:
    B.

  >>> batch_size_or_default(64), batch_size_or_default(None) in (40, 1000)
  (64, True)
  """
  if batch_size is not None:
    return batch_size
  return 40 if jax.default_backend() == "cpu" else 1000


class Evaluator:
  """Evaluates models on sets of examples that lie on the device.

  Sums run over all examples, so that the batch size changes nothing but
  rounding.

  Args:
    models: P models.
    sets: sets of examples by name; their banks should be on the device.
    transform: applied to each batch as stored in the bank.
    measure: `(outputs, batch) -> sums over the batch`, by name.
    engine: where the work runs; `Inline()` by default.
    batch_size: examples at once, by default 40 on CPUs and 1,000 elsewhere;
      changes speed and memory only.
    only: for each model the names of the sets it is evaluated on; by default
      all.

  Raises:
    ValueError: `only` names an unknown set or does not have one entry for each
      model, a set is a bare bank or has positions outside its bank,
      `batch_size` is below 1, or `models` is a single model.

  >>> model = core.Model(
  ...     lambda key: core.Variables(jnp.array([[1., 0.]]), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((4, 1)), 'y': jnp.array([0, 0, 1, 0])}
  >>> evaluator = Evaluator([model], {'test': population.Subset.whole(bank)})
  >>> evaluator([model.start(jax.random.key(0))])
  [{'test_accuracy': 0.75, 'test_loss': 0.563...}]
  """

  def __init__(
    self,
    models: Sequence[core.Model],
    sets: dict[str, population.Subset],
    *,
    transform: core.Preparation | None = None,
    measure: Measure = classification,
    engine: engine_lib.Engine | None = None,
    batch_size: int | None = None,
    only: Sequence[Collection[str]] | None = None,
  ):
    checks.sequence("models", models, core.Model)
    batch_size = batch_size_or_default(batch_size)
    checks.counts(batch_size=batch_size)
    self._engine = engine or engine_lib.Inline()
    checks.kind("sets", sets, Mapping, "subsets by name")
    for name, subset in sets.items():
      population.check_kind(subset, name, population.Subset)
    self._banks = {name: subset.bank for name, subset in sets.items()}
    self._plans = {
      name: _lanes(
        population.positions_in(subset.bank, subset.index, name),
        batch_size,
        self._engine.num_pieces,
      )
      for name, subset in sets.items()
    }
    for i, model in enumerate(models):
      core.Model.check(f"models[{i}]", model)
    # Equal models share a program.
    alike = [tuple(map(core.hash_key, model)) for model in models]
    programs = {
      key: measure_program(model, transform, measure)
      for key, model in zip(alike, models)
    }
    self._programs = [programs[key] for key in alike]
    if only is not None and len(only) != len(models):
      raise ValueError(f"only: {len(only)} for {len(models)} models")
    if only is not None and any(isinstance(names, str) for names in only):
      raise ValueError(
        f"only={only}: give a sequence of sets' names for each model"
      )
    only = [sets] * len(models) if only is None else only
    self._names = [sorted(names) for names in only]
    if strange := {n for names in self._names for n in names} - set(sets):
      raise ValueError(f"only: no set {min(strange)!r}; there are {[*sets]}")
    self._compiled = self._engine.compile(self._evaluate)

  def __call__(
    self, variables: Sequence[core.Variables]
  ) -> list[dict[str, float]]:
    """Evaluates P models.

    Args:
      variables: each model's variables.

    Returns:
      For each model a flat dict such as `{'test_accuracy': 0.5}`, without
      metrics for which a set has nothing to measure.

    Raises:
      ValueError: there are not as many variables as models, or they are traced.
    """
    checks.sequence("variables", variables, core.Variables)
    number, hint = len(self._programs), "as Model.start and states hold them"
    checks.each("variables", variables, core.Variables, number, hint)
    if any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(variables)):
      raise ValueError(
        "an Evaluator cannot be called under tracing, since it returns numbers"
        " on the host; use evaluator.sums(variables, evaluator.data(*names)),"
        " which returns Means"
      )
    sums = self._compiled(tuple(variables), self._banks, self._plans)
    return [core.values(model) for model in jax.device_get(sums)]

  def data(self, *names: str) -> PyTree:
    """The data of the named sets, as `sums` takes it."""
    return tuple(
      {name: tree[name] for name in names}
      for tree in (self._banks, self._plans)
    )

  def sums(
    self, variables: Sequence[core.Variables], data: PyTree
  ) -> list[core.Metrics]:
    """The sums over the sets in `data`; traceable if the engine is.

    Args:
      variables: each model's variables.
      data: some of the sets, from the method `data`.

    Returns:
      For each model a flat dict such as `{'test_accuracy': Mean}`.
    """
    return self._evaluate(variables, *data)

  def _evaluate(self, variables, banks, plans):
    all_names = [[n for n in names if n in plans] for names in self._names]
    jobs = [
      engine_lib.Lanes(program, (v, banks[name]), *plans[name])
      for program, v, names in zip(self._programs, variables, all_names)
      for name in names
    ]
    results = iter(self._engine.run(*jobs))
    return [
      {
        f"{name}_{key}": mean
        for name in names
        for key, mean in next(results).items()
      }
      for names in all_names
    ]


class ClientEvaluator:
  """Evaluates a model on each client's examples by itself.

  Args:
    model: the model.
    clients: K clients; their bank should be on the device.
    transform: as for `Evaluator`.
    measure: as for `Evaluator`.
    engine: as for `Evaluator`.
    batch_size: as for `Evaluator`.

  Raises:
    ValueError: a client has no examples or positions outside the bank, or
      `batch_size` is below 1.

  >>> model = core.Model(
  ...     lambda key: core.Variables(jnp.array([[1., 0.]]), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((4, 1)), 'y': jnp.array([0, 0, 1, 0])}
  >>> clients = population.ClientPopulation.from_lists(bank, [[0], [1, 2]])
  >>> evaluator = ClientEvaluator(model, clients)
  >>> evaluator(model.start(jax.random.key(0)))['accuracy']
  array([1. , 0.5])
  """

  def __init__(
    self,
    model: core.Model,
    clients: population.ClientPopulation,
    *,
    transform: core.Preparation | None = None,
    measure: Measure = classification,
    engine: engine_lib.Engine | None = None,
    batch_size: int | None = None,
  ):
    core.Model.check("model", model)
    kind = population.ClientPopulation
    population.check_kind(clients, "clients", kind)
    batch_size = batch_size_or_default(batch_size)
    checks.counts(batch_size=batch_size)
    self._engine = engine or engine_lib.Inline()
    self._bank = clients.bank
    batch_size = min(batch_size, int(clients.sizes.max()))
    steps = -(-clients.sizes // batch_size)
    index = np.full((len(clients), steps.max() * batch_size), -1, np.int32)
    for k, row in enumerate(index):
      row[: clients.sizes[k]] = clients.positions(k)
    self._work = (
      index.reshape(len(clients), -1, batch_size),
      steps.astype(np.int32),
    )
    program = measure_program(model, transform, measure)
    # As many clients at once as suit the device.
    at_once = max(1, batch_size_or_default(None) // batch_size)

    def measure_clients(own, shared, bank, rows):
      def one(row):
        variables, *work = row if own else (shared, *row)
        return program(variables, bank, *work)

      return jax.lax.map(one, rows, batch_size=at_once)

    self._programs = {
      own: functools.partial(measure_clients, own) for own in (False, True)
    }
    self._compiled = {
      own: self._engine.compile(functools.partial(self._evaluate, own))
      for own in (False, True)
    }

  def __call__(
    self, variables: core.Variables, *, own: bool = False
  ) -> dict[str, np.ndarray]:
    """Evaluates one model on each client, or each client's own model.

    Args:
      variables: the model's variables.
      own: whether each client has its own model: the arrays of `variables` then
        have a first axis of K.

    Returns:
      Arrays `float64[K]` by metric, such as `accuracy` and `loss`; NaN where
      there is nothing to measure.
    """
    checks.kind("variables", variables, core.Variables, "one for all clients")
    sums = self._compiled[own](variables, self._bank, self._work)
    with np.errstate(invalid="ignore"):
      return {
        name: np.asarray(total, np.float64) / np.asarray(count)
        for name, (total, count) in jax.device_get(sums).items()
      }

  def _evaluate(self, own, variables, bank, work):
    shared, rows = (None, (variables, *work)) if own else (variables, work)
    job = engine_lib.Chunks(self._programs[own], (shared, bank), rows)
    return self._engine.run(job)[0]


def _lanes(index, batch_size, num_lanes):
  """Lays positions out as `int32[L, S, B]`, and counts each lane's steps."""
  batches = -(-len(index) // batch_size)
  steps = max(1, -(-batches // num_lanes))
  padded = np.full(num_lanes * steps * batch_size, -1, np.int32)
  padded[: len(index)] = index
  lanes = padded.reshape(num_lanes, steps, batch_size)
  return lanes, (lanes[:, :, 0] >= 0).sum(axis=1).astype(np.int32)


def measure_program(
  model: core.Model,
  transform: core.Preparation | None = None,
  measure: Measure = classification,
) -> Callable[..., dict[str, core.Mean]]:
  """Sums a measure over the batches of a lane.

  Args:
    model: the model.
    transform: applied to each batch as stored in the bank.
    measure: `(outputs, batch) -> sums over the batch`, by name.

  Returns:
    The program `(variables, bank, lane [S, B], steps) -> sums`, where `lane`
    holds positions in the bank, -1 for none, and `steps` says how many of the
    S batches to take.
  """

  def of_batch(variables, bank, index):
    batch = core.prepare(transform, core.gather(bank, index))
    with checks.noted(f"a model {core.inputs_of(batch)}"):
      outputs = model.predict(variables, batch["x"])
    sums = measure(outputs, batch)
    pairs = isinstance(sums, Mapping) and all(
      isinstance(pair, tuple) and len(pair) == 2 for pair in sums.values()
    )
    if not pairs:
      raise ValueError(
        "a measure must return a dict of Means, sums over the batch, such as"
        " {'accuracy': Mean(correct, examples)}"
      )
    return dict(sums)

  def evaluate_lane(variables, bank, lane, steps):
    lane = jnp.asarray(lane)  # A NumPy array, if not under jit.
    zeros = engine_lib.zeros_of(of_batch, variables, bank, lane[0])
    return jax.lax.fori_loop(
      0,
      steps,
      lambda s, total: jax.tree.map(
        jnp.add, total, of_batch(variables, bank, lane[s])
      ),
      zeros,
    )

  return evaluate_lane
