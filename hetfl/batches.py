"""Who trains on what in a round, in which order.

A `Plan` describes a round: its number and named `Batches`, small arrays that
say who trains on which examples of which bank; `hetfl.plans` makes it.

Letters used throughout: K clients, S steps, B batch size.
"""

from collections.abc import Collection, Mapping, Sequence
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import checks, core
from hetfl.population import check_kind, ClientPopulation, Subset


class Batches(NamedTuple):
  """Rows of work: who trains on which examples, in which order.

  Attributes:
    index: `int32[K, S, B]`, positions in the bank; -1 marks an empty place.
    steps: `int32[K]`, how many of the S steps each row has.
    client: `int32[K]`, the rows' clients: numbers in their population or, if
      they keep models, among all clients. Random draws depend on them.
    weight: `float32[K]`, the clients' weights in an aggregate; 0 for those that
      take no part, which have no steps.
  """

  index: np.ndarray  # type: ignore[assignment]
  steps: np.ndarray
  client: np.ndarray
  weight: np.ndarray


class Plan(NamedTuple):
  """The plan of one round.

  Attributes:
    round: `int32[]`, the number of the round, from 1.
    batches: `Batches` by name; the data of a step has banks of the same names,
      except for FedMD's `digest`, positions among the round's images.
  """

  round: np.integer
  batches: dict[str, Batches]


def rows_of(
  orders: Sequence[np.ndarray],
  clients: Sequence[int] | np.ndarray,
  weights: Sequence[float] | np.ndarray,
) -> Batches:
  """Lays rows of unlike length out as `Batches`.

  Args:
    orders: K arrays `int32[s_k, B]`.
    clients: K numbers.
    weights: K weights.

  Returns:
    The batches. S is the longest row's length rounded up to 32, 128, 512, ...,
    so that different rounds share compiled programs.

  >>> rows_of([np.zeros((3, 2)), np.zeros((40, 2))], [5, 7], [1, 1]).index.shape
  (2, 128, 2)
  """
  steps = np.array([len(one) for one in orders], np.int32)
  length = 32
  while length < steps.max():
    length *= 4
  index = np.full((len(orders), length, orders[0].shape[1]), -1, np.int32)
  for row, one in zip(index, orders):
    row[: len(one)] = one
  return Batches(
    index, steps, np.array(clients, np.int32), np.array(weights, np.float32)
  )


def in_order(
  index: np.ndarray | jax.Array, batch_size: int, rows: int = 1
) -> Batches:
  """Examples in the given order, such as those of an evaluation.

  Args:
    index: `int[n]`, positions.
    batch_size: B; n if n is less.
    rows: how many rows to cut them into.

  Returns:
    The batches; the last places are empty.

  >>> in_order(np.array([4, 8, 6]), 2).index.tolist()
  [[[4, 8], [6, -1]]]
  """
  size = max(1, min(batch_size, len(index)))
  steps = max(1, -(-len(index) // (size * rows)))
  missing = rows * steps * size - len(index)
  xp = np if isinstance(index, np.ndarray) else jnp
  padded = xp.pad(index, (0, missing), constant_values=-1).astype(np.int32)
  number = np.clip(-(-len(index) // size) - np.arange(rows) * steps, 0, steps)
  return Batches(
    padded.reshape(rows, steps, size),
    number.astype(np.int32),
    np.zeros(rows, np.int32),
    np.ones(rows, np.float32),
  )


def leave_out(
  batches: Batches, absent: Collection[int] | np.ndarray
) -> Batches:
  """Batches in which some clients take no part, without steps or weight.

  Args:
    batches: the batches, on the host.
    absent: the clients' numbers.

  Returns:
    The batches.

  Raises:
    ValueError: the numbers are not integers, but a mask, for instance.

  >>> batches = rows_of([np.zeros((2, 1))] * 2, [3, 1], [5., 6.])
  >>> left = leave_out(batches, [1])
  >>> left.steps.tolist(), left.weight.tolist()
  ([2, 0], [5.0, 0.0])
  """
  if not isinstance(absent, np.ndarray):
    absent = [*absent]  # NumPy takes a set for one object.
  numbers = checks.integers("absent: numbers", absent)
  there = ~np.isin(batches.client, numbers)
  return batches._replace(
    steps=batches.steps * there, weight=batches.weight * there
  )


def of_round(plan: Any, name: str, rows: int | None = None) -> Batches:
  """The named batches of a round's plan.

  Args:
    plan: the plan.
    name: the name.
    rows: how many rows there must be; `None` for any number.

  Returns:
    The batches.

  Raises:
    ValueError: the plan has none of that name, or another number of rows.
  """
  held = getattr(plan, "batches", {})
  if name not in held:
    raise ValueError(
      f"plan: has no batches {name!r}, only {sorted(held)}; give the Plan"
      " that the algorithm takes (plan_round's, plan_fit's or plan_fedmd's)"
    )
  if rows not in (None, len(held[name].steps)):
    raise ValueError(
      f"plan: batches {name!r} have {len(held[name].steps)} rows, but there are"
      f" {rows}"
    )
  return held[name]


def row_of(
  plan: Any, name: str, client: int = 0, *, rows: int = 1, stats: Any = ()
) -> Batches:
  """A client's row of the named batches: the only one, or its own of several.

  Args:
    plan: the plan.
    name: the name.
    client: the client's number.
    rows: how many rows there must be.
    stats: the statistics of the model that trains on it.

  Returns:
    The row, without the axis K.

  Raises:
    ValueError: as `of_round` and `check_full`.
  """
  batches, own = of_round(plan, name, rows), client if rows > 1 else 0
  check_full(name, batches, stats)
  row = jax.tree.map(lambda a: a[own], batches)
  return row._replace(client=np.int32(client))


def check_full(owner: str, batches: Batches, stats: Any) -> None:
  """Raises a `ValueError` if a model's batch statistics would see empty places.

  Traced plans cannot be checked: for these `local.training` makes the loss NaN.
  """
  if not isinstance(batches.index, np.ndarray) or not jax.tree.leaves(stats):
    return
  empty = batches.index < 0
  if (empty.any(axis=-1) & ~empty.all(axis=-1)).any():
    raise ValueError(
      f"{owner}: the plan has batches that are not full, whose empty places"
      " would enter the batch statistics (all variables that are not parameters"
      " count as such): plan with tail='repeat' or 'wrap'"
    )


def gather(bank: core.Batch, index: jax.Array | np.ndarray) -> core.Batch:
  """Takes a batch out of a bank.

  Args:
    bank: arrays with examples on their first axis.
    index: `int32[B]`, positions; -1 marks an empty place, which is filled with
      the batch's first example (the bank's first if the batch is empty) and has
      `mask` 0.

  Returns:
    The batch: the bank's arrays and `mask: float32[B]`. Positions beyond the
    bank, as in a plan for another bank, have the mask NaN, and so make the loss
    NaN.

  Raises:
    ValueError: the bank has a `mask` of its own, or arrays of different
      lengths.

  >>> gather({'y': jnp.array([7, 8, 9])}, jnp.array([2, -1]))['y']
  Array([9, 9], dtype=int32)
  """
  if "mask" in bank:
    raise ValueError(
      "a bank has an array named 'mask', a name reserved for the batch's mask:"
      " rename it"
    )
  number = checks.num_examples(bank)
  # Not the bank's first example, which may hold NaN: 0 times NaN is NaN.
  taken = jnp.maximum(jnp.where(index < 0, index[0], index), 0)
  batch = {
    name: jnp.take(array, taken, axis=0, mode="clip")
    for name, array in bank.items()
  }
  mask = (index >= 0).astype(jnp.float32)
  return {**batch, "mask": jnp.where(index < number, mask, jnp.nan)}


def prepare(
  transform: core.Transform | core.Preparation | None,
  batch: core.Batch,
  key: jax.Array | None = None,
  *,
  keep: Collection[str] = (),
) -> core.Batch:
  """Prepares a gathered batch for the model and the loss.

  Args:
    transform: `None` leaves the batch as it is.
    batch: the batch.
    key: a random key in training, for a `Transform`; `None` elsewhere.
    keep: names of the batch's arrays that no transform changes or drops.

  Returns:
    The transform's result, with the batch's `mask` unless it has its own.

  Raises:
    ValueError: the transform takes other arguments or does not return a dict,
      or the result has no `x`.

  >>> batch = {'image': jnp.ones(2), 'mask': jnp.ones(2)}
  >>> sorted(prepare(lambda batch: {'x': batch['image']}, batch))
  ['mask', 'x']
  """
  if transform is not None:
    args: dict[str, Any] = {"batch": batch}
    if key is not None and not _draws_nothing(transform):
      args = {"key": key, **args}
    checks.takes("a transform", transform, *args)
    given = transform(*args.values())
    if not isinstance(given, Mapping):
      raise ValueError(
        f"a transform returned a {type(given).__name__}, not a batch: called as"
        f" transform({', '.join(args)}), it must return a dict of arrays"
      )
    kept = {name: batch[name] for name in keep}
    batch = {"mask": batch["mask"], **given, **kept}
  if "x" not in batch:
    raise ValueError(
      f"a batch holds {sorted(batch)}, but models take 'x': name the bank's"
      " inputs so, or give a transform"
    )
  return batch


def _draws_nothing(transform) -> bool:
  """Whether it is a `Preparation`, a function of the batch alone."""
  try:
    inspect.signature(transform).bind("batch")
  except (TypeError, ValueError):
    return False
  return True


def localize(
  plan: Plan, sets: Mapping[str, ClientPopulation | Subset]
) -> tuple[Plan, dict[str, dict[str, Any]]]:
  """Cuts the banks down to what one round needs of them.

  For banks that are too large for a device: the new ones hold only the examples
  of the round's few clients and of its distillation batches. The results are
  the same; but not for FedGKT, whose server knows examples by their positions.

  Args:
    plan: the round's plan.
    sets: whose examples the plan's batches are, by the same names.

  Returns:
    The plan with positions in the new banks, and these banks by name, still on
    the host. Their lengths are powers of two, so that different rounds share a
    few compiled programs.

  Raises:
    ValueError: a set that the plan has batches of is not given, or is a bare
      bank; FedMD's "digest" has none, as it counts within the round's public
      examples.

  >>> from hetfl import plan_round
  >>> clients = ClientPopulation.from_lists({'y': np.arange(9)}, [[4, 8], [2]])
  >>> plan = plan_round(
  ...     {'a': clients}, seed=0, round=1, clients_per_round=1, batch_size=2)
  >>> small, data = localize(plan, {'a': clients})
  >>> before, after = (p.batches['a'].index[0, 0] for p in (plan, small))
  >>> len(data['a']['y']), bool((
  ...     clients.bank['y'][before] == data['a']['y'][after]).all())
  (8, True)
  """
  if missing := set(plan.batches) - set(sets):
    raise ValueError(
      f"sets: has no {min(missing)!r}, for which the plan has batches"
    )
  sharing: dict[int, list[str]] = {}  # Names, by their bank.
  for name in plan.batches:
    if not isinstance(sets[name], ClientPopulation):
      check_kind(sets[name], f"sets[{name!r}]", Subset)
    sharing.setdefault(id(sets[name].bank), []).append(name)
  small, data = dict(plan.batches), {}
  for names in sharing.values():
    index = [plan.batches[name].index for name in names]
    there = np.unique(np.concatenate([i[i >= 0] for i in index]))
    if not len(there):  # Nothing of it is needed, but no bank may be empty.
      there = np.zeros(1, np.int32)
    length = max(8, 1 << (len(there) - 1).bit_length())
    rows = np.pad(there, (0, length - len(there)), constant_values=there[0])
    cut = {key: array[rows] for key, array in sets[names[0]].bank.items()}
    for name, old in zip(names, index):
      new = np.where(old >= 0, np.searchsorted(there, old), -1)
      small[name] = small[name]._replace(index=new.astype(np.int32))
      data[name] = cut
  return plan._replace(batches=small), data


def stack_plans(plans: Sequence[Any]) -> Any:
  """Stacks the plans of several rounds, for `jax.lax.scan` over them.

  Args:
    plans: R plans, or other pytrees with `Batches`, of equal structure.

  Returns:
    A plan whose arrays have a new first axis R; rows are filled up to the
    longest round's length.

  Raises:
    ValueError: rounds differ in the number of clients or in the batch size.

  >>> from hetfl import plan_round
  >>> clients = ClientPopulation.from_lists({'y': np.arange(9)}, [[4, 8], [2]])
  >>> plans = [plan_round({'a': clients}, seed=0, round=t, batch_size=2)
  ...          for t in (1, 2)]
  >>> stack_plans(plans).batches['a'].index.shape
  (2, 2, 32, 2)
  """

  def stacked(*of_rounds):
    if not isinstance(of_rounds[0], Batches):
      return np.stack(of_rounds)
    numbers, lengths, sizes = zip(*(b.index.shape for b in of_rounds))
    if len({*numbers}) > 1 or len({*sizes}) > 1:
      raise ValueError(
        f"plans: of {sorted({*numbers})} clients with batches of"
        f" {sorted({*sizes})}; give all rounds the same clients_per_round and"
        " batch_size"
      )
    longest = max(lengths)

    def filled(batches):
      missing = longest - batches.index.shape[1]
      widths = ((0, 0), (0, missing), (0, 0))
      index = np.pad(batches.index, widths, constant_values=-1)
      return batches._replace(index=index)

    return Batches(*map(np.stack, zip(*map(filled, of_rounds))))

  is_batches = lambda x: isinstance(x, Batches)
  return jax.tree.map(stacked, *plans, is_leaf=is_batches)
