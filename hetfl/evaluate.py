"""Accuracy and loss of a model on a set of examples."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import checks, core, local, population
from hetfl.batches import gather, in_order, prepare
from hetfl.distill import of_examples
from hetfl.engine import batch_size_or_default, Engine, Inline, Task, Work

PyTree = Any
Measure = Callable[[PyTree, core.Batch], dict[str, core.Mean]]


def classification(
  logits: jax.Array, batch: core.Batch
) -> dict[str, core.Mean]:
  """Accuracy and cross-entropy of a batch.

  Args:
    logits: `float[B, C]`; or of each position, `float[B, ..., C]`.
    batch: holds `y: int32[B]`, or `int32[B, ...]`, and `mask: float32[B]`.

  Returns:
    `accuracy` (a share) and `loss` (nats), means over an example's positions,
      as sums over the examples; NaN if an output is.

  Raises:
    ValueError: as `core.cross_entropy`.

  >>> batch = {'y': jnp.array([0, 1]), 'mask': jnp.ones(2)}
  >>> mean = classification(jnp.array([[2., 0.], [2., 0.]]), batch)['accuracy']
  >>> float(mean.total / mean.count)
  0.5
  """
  checks.array("classification", logits)
  mask, losses = batch["mask"], core.cross_entropy(logits, batch)
  correct = (jnp.argmax(logits, axis=-1) == batch["y"]).astype(mask.dtype)
  # Logits that are NaN have an argmax, but must not count as right or wrong.
  correct = jnp.where(jnp.isnan(losses), jnp.nan, correct)

  def mean(values):  # Without empty places: 0 times infinity is NaN.
    counted = jnp.where(mask == 0, 0, of_examples(values) * mask)
    return core.Mean(jnp.sum(counted), jnp.sum(mask))

  return {"accuracy": mean(correct), "loss": mean(losses)}


def class_f1(logits: jax.Array, batch: core.Batch) -> core.Mean:
  """F1 of each class, `2 TP / (2 TP + FP + FN)`; its mean is macro-F1.

  Args:
    logits: `float[B, C]`; or of each position, `float[B, ..., C]`.
    batch: holds `y: int32[B]`, or `int32[B, ...]`, and `mask: float32[B]`.

  Returns:
    Sums `float32[C]`, for `ClientEvaluator`: `Evaluator` takes scalars. The
    count is 0 for classes neither labelled nor predicted. All classes are NaN
    if an output is, or if a label is out of range.

  Raises:
    ValueError: as `core.labels_of`.

  >>> batch = {'y': jnp.array([0, 1, 1]), 'mask': jnp.ones(3)}
  >>> class_f1(jnp.eye(3)[jnp.array([0, 0, 1])], batch).value.tolist()
  [0.666..., 0.666..., nan]
  """
  positions = tuple(range(logits.ndim - 1))
  mask = jnp.expand_dims(batch["mask"], (*positions[1:], -1))
  labels, known = core.labels_of(logits, batch)
  marks = lambda y: jax.nn.one_hot(y, logits.shape[-1]) * mask
  predicted, true = marks(jnp.argmax(logits, axis=-1)), marks(labels)
  known = jnp.expand_dims(known, -1)
  lost = jnp.isnan(logits + known).any(-1, keepdims=True) & (mask > 0)
  predicted = jnp.where(lost, jnp.nan, predicted)
  both = 2 * jnp.sum(predicted * true, axis=positions)
  return core.Mean(both, jnp.sum(predicted + true, axis=positions))


def spread(values: Sequence[float] | np.ndarray) -> dict[str, float]:
  """How a metric, such as an accuracy, is spread over clients.

  Args:
    values: `[K]`, one for each client.

  Returns:
    The `mean` and the sample standard `deviation`; the `worst`, and the mean of
    the `worst_tenth` of the clients, rounded up. All are NaN if a value is.

  Raises:
    ValueError: there are no values.

  >>> spread([0.5, 1.0, 0.0])
  {'mean': 0.5, 'deviation': 0.5, 'worst': 0.0, 'worst_tenth': 0.0}
  """
  array = np.sort(np.asarray(values, np.float64))
  if not len(array):
    raise ValueError("values: give one or more")
  if np.isnan(array[-1]):  # One has diverged: the spread is unknown.
    array = np.full_like(array, np.nan)
  several = len(array) > 1
  return {
    "mean": float(array.mean()),
    "deviation": float(array.std(ddof=1) if several else 0 * array[0]),
    "worst": float(array[0]),
    "worst_tenth": float(array[: -(-len(array) // 10)].mean()),
  }


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
    engine: Engine | None = None,
    batch_size: int | None = None,
    only: Sequence[Collection[str]] | None = None,
  ):
    batch_size = batch_size_or_default(batch_size)
    self._engine = engine or Inline()
    banks, batches = {}, {}
    for name, subset in sets.items():
      population.check_kind(subset, name, population.Subset)
      index = population.positions_in(subset.bank, subset.index, name)
      banks[name] = subset.bank
      batches[name] = in_order(index, batch_size, self._engine.num_pieces)
    self._data = banks, batches
    for i, model in enumerate(models):
      core.Model.check(f"models[{i}]", model)
    # Equal models share a program.
    alike = [tuple(map(core.hash_key, model)) for model in models]
    tasks = {
      key: measure_task(model, transform, measure)
      for key, model in zip(alike, models)
    }
    self._tasks = [tasks[key] for key in alike]
    only = [sets] * len(models) if only is None else only
    if len(only) != len(models) or any(isinstance(n, str) for n in only):
      raise ValueError(
        f"only={only}: give a sequence of sets' names for each of"
        f" {len(models)} models"
      )
    self._names = [sorted(names) for names in only]
    if strange := {n for names in self._names for n in names} - set(sets):
      raise ValueError(f"only: no set {min(strange)!r}; there are {[*sets]}")
    self._compiled = self._engine.compile(self.sums)

  def __call__(
    self, variables: Sequence[core.Variables]
  ) -> list[dict[str, float]]:
    """Evaluates P models.

    Args:
      variables: each model's variables.

    Returns:
      For each model a flat dict such as `{'test_accuracy': 0.5}`, without
      metrics for which a set has nothing to measure. For a model that has
      diverged all are NaN.

    Raises:
      ValueError: there are not as many variables as models, or they are traced.
    """
    if len(variables) != len(self._tasks) or any(
      not isinstance(v, core.Variables) for v in variables
    ):
      raise ValueError(
        f"variables: give a sequence of {len(self._tasks)} Variables, as"
        " Model.start and states hold them"
      )
    if any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(variables)):
      raise ValueError(
        "an Evaluator cannot be called under tracing, since it returns numbers"
        " on the host; use evaluator.sums(variables, evaluator.data(*names)),"
        " which returns Means"
      )
    sums = self._compiled(tuple(variables), self._data)
    return list(map(core.values, jax.device_get(sums)))

  def data(self, *names: str) -> PyTree:
    """The data of the named sets, as `sums` takes it."""
    return tuple({name: of[name] for name in names} for of in self._data)

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
    banks, batches = data
    all_names = [[n for n in names if n in batches] for names in self._names]
    works = [
      Work(
        task,
        (v, banks[name]),
        (None, batches[name].index),
        batches[name].steps,
        total=True,
      )
      for task, v, names in zip(self._tasks, variables, all_names)
      for name in names
    ]
    results = iter(self._engine.run(*works))
    return [
      {
        f"{name}_{key}": mean
        for name in names
        for key, mean in next(results).items()
      }
      for names in all_names
    ]


class ClientEvaluator:
  """Evaluates a model on each client's examples separately.

  Args:
    model: the model.
    clients: K clients; their bank should be on the device.
    transform: as for `Evaluator`.
    measure: as for `Evaluator`.
    engine: as for `Evaluator`.
    batch_size: as for `Evaluator`.

  Raises:
    ValueError: there are no clients, one has no examples or positions outside
      the bank, or `batch_size` is below 1.

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
    engine: Engine | None = None,
    batch_size: int | None = None,
  ):
    core.Model.check("model", model)
    population.check_kind(clients, "clients", population.ClientPopulation)
    if not len(clients):
      raise ValueError("clients: there are none to evaluate")
    self._engine = engine or Inline()
    self._clients = clients
    self._parts = _alike(clients.sizes, batch_size_or_default(batch_size))
    self._task = measure_task(model, transform, measure)
    self._compiled = self._engine.compile(self._evaluate)

  def __call__(
    self, variables: core.Variables, *, own: bool = False
  ) -> dict[str, np.ndarray]:
    """Evaluates one model on each client, or each client's own model.

    Args:
      variables: the model's variables.
      own: whether each client has its own model: the arrays of `variables` then
        have a first axis of K.

    Returns:
      Arrays `float64[K]` by metric, such as `accuracy`; of `class_f1`
      `float64[K, C]`; NaN where there is nothing to measure.

    Raises:
      ValueError: these are not variables, or not a model for each client.
    """
    if not (hasattr(variables, "params") and hasattr(variables, "stats")):
      raise ValueError(
        "variables: give Variables(params, stats), as Model.start and states"
        f" hold them, not {type(variables).__name__}"
      )
    held, results = self._clients, dict[str, np.ndarray]()
    shapes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(variables)}
    if own and shapes - {(len(held),)}:
      raise ValueError(
        f"variables: arrays with the first axes {sorted(shapes)}; give each of"
        f" the {len(held)} clients its own, stacked"
      )
    for chosen, size, length in self._parts:
      of, place = held.sizes[chosen, None], np.arange(size * length)
      index = held.offsets[chosen, None] + np.minimum(place, of - 1)
      index = np.where(place < of, held.members[index], -1)
      index = index.reshape(-1, length, size).astype(np.int32)
      steps = (-(-of[:, 0] // size)).astype(np.int32)
      shared, each = (None, variables) if own else (variables, None)
      if len(chosen) < len(held):
        each = jax.tree.map(lambda a, rows=chosen: a[rows], each)
      sums = self._compiled(shared, each, held.bank, index, steps)
      for name, (total, count) in jax.device_get(sums).items():
        with np.errstate(invalid="ignore"):
          mean = np.asarray(total, np.float64) / np.asarray(count)
        shape = (len(held), *mean.shape[1:])
        results.setdefault(name, np.zeros(shape))[chosen] = mean
    return results

  def _evaluate(self, shared, each, bank, index, steps):
    # As many clients at once as suit the device.
    at_once = max(1, batch_size_or_default(None) // index.shape[-1])
    work = Work(self._task, (shared, bank), (each, index), steps)
    return self._engine.run(work._replace(at_once=at_once))[0]


_MOST_CLIENTS = 1 << 12  # In one program, to bound its memory.


def _alike(
  sizes: np.ndarray, batch_size: int
) -> list[tuple[np.ndarray, int, int]]:
  """Clients in parts of like sizes, so that few places of batches are empty.

  Args:
    sizes: `int[K]`, numbers of examples.
    batch_size: B, at most.

  Returns:
    For each part the clients' numbers, B, and how many batches each has.

  >>> _alike(np.array([9, 900, 40, 8, 9]), 40)
  [(array([0, 3, 4]), 16, 1), (array([2]), 40, 1), (array([1]), 40, 64)]
  """
  batch_size = min(batch_size, int(sizes.max()))
  batches = -(-sizes // batch_size)
  places = np.full(len(sizes), batches.max() * batch_size)
  if places.sum() > 4 * sizes.sum() or len(sizes) > _MOST_CLIENTS:
    powers = 4 ** np.arange(32, dtype=np.int64)  # To keep programs few.
    above = lambda n: powers[np.searchsorted(powers, n)]
    short = np.minimum(above(sizes), batch_size)
    places = np.where(batches > 1, above(batches) * batch_size, short)
  parts = []
  for of_one in np.unique(places).tolist():
    own, size = np.flatnonzero(places == of_one), min(of_one, batch_size)
    for first in range(0, len(own), _MOST_CLIENTS):
      chosen = own[first : first + _MOST_CLIENTS]
      parts.append((chosen, size, of_one // size))
  return parts


def accuracies(sums: Sequence[core.Metrics]) -> list[core.Mean]:
  """Each model's accuracy, out of its metrics on one set."""
  return [
    next(mean for name, mean in of_one.items() if name.endswith("_accuracy"))
    for of_one in sums
  ]


def measure_task(
  model: core.Model,
  transform: core.Preparation | None = None,
  measure: Measure = classification,
) -> Task:
  """Sums a measure over the batches of a row.

  Args:
    model: the model.
    transform: applied to each batch as stored in the bank.
    measure: `(outputs, batch) -> sums over the batch`, by name.

  Returns:
    The task. Shared arguments are `(variables, bank)`, a row is `(None,
    index)`, where `index: int32[S, B]` are positions in the bank, -1 for none;
    or, if each row has a model of its own, `(None, bank)` and `(variables,
    index)`. The results are the sums.
  """

  def of_batch(shared, bank, row, s):
    own, index = row
    variables = shared if own is None else own
    batch = prepare(transform, gather(bank, index[s]))
    outputs, _ = local.outputs_of("an evaluation", model, variables, batch)
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

  return Task.sums(of_batch)
