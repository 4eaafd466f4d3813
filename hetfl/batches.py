"""Who trains on what in a round, in which order.

A `Plan` describes a round: its number and named `Batches`, small arrays that
say who trains on which examples of which bank. It is a pure function of (seed,
round), so a run can be repeated, resumed and compared with another one client
by client.

Letters used throughout: K clients, S steps, B batch size.
"""

from collections.abc import Collection, Mapping, Sequence
import inspect
from typing import Any, get_args, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import checks, core
from hetfl.population import (
  AnyBank,
  check_kind,
  ClientPopulation,
  positions_in,
  Subset,
)
from hetfl.streams import generator, generators, Stream

Tail = Literal["wrap", "short", "repeat"]


class Batches(NamedTuple):
  """Rows of work: who trains on which examples, in which order.

  Attributes:
    index: `int32[K, S, B]`, positions in the bank; -1 marks an empty place.
    steps: `int32[K]`, how many of the S steps each row has.
    client: `int32[K]`, whose the rows are: numbers in their population, of
      clients that keep models among all clients. Random draws depend on them.
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
      but for FedMD's `digest`, positions among the images of the round.
  """

  round: np.integer
  batches: dict[str, Batches]


def number_of_steps(
  sizes: np.ndarray | int,
  *,
  batch_size: int,
  epochs: int = 1,
  max_steps: int | None = None,
  tail: Tail = "wrap",
) -> np.ndarray | int:
  """The steps of clients that hold so many examples; see `order`.

  Raises:
    ValueError: there is no such tail.

  >>> number_of_steps(5, batch_size=2, epochs=2)
  5
  >>> number_of_steps(5, batch_size=2, epochs=2, tail="short")
  6
  """
  if tail not in (tails := get_args(Tail)):
    raise ValueError(f"tail={tail!r}: choose one of {', '.join(tails)}")
  if tail == "wrap":
    steps = -(-sizes * epochs // batch_size)
  else:
    steps = epochs * -(-sizes // batch_size)
  return steps if max_steps is None else np.minimum(steps, max_steps)


def order(
  positions: np.ndarray,
  rng: np.random.Generator,
  *,
  batch_size: int,
  epochs: int = 1,
  max_steps: int | None = None,
  tail: Tail = "wrap",
) -> np.ndarray:
  """Orders examples into batches, reshuffled in each pass over them.

  Args:
    positions: `int[n]`, the examples.
    rng: NumPy's generator.
    batch_size: B.
    epochs: E, passes over the examples.
    max_steps: a limit to the steps; `None` for none.
    tail: what fills a pass's last batch if B does not divide n. "wrap": the
      next pass begins there, so that there are `ceil(n E / B)` full batches, as
      FedJAX makes them. "short": nothing; a pass has `ceil(n / B)` batches, and
      who holds fewer than B takes a full gradient, as in McMahan et al.
      "repeat": the pass's first examples, for models with batch statistics,
      which would count empty places.

  Returns:
    `int32[S, B]`.

  Reference: FedJAX's `ClientDataset.shuffle_repeat_batch`; McMahan et al. 2017,
  algorithm 1.

  >>> def tail(name):
  ...   rng = np.random.default_rng(0)
  ...   return order(np.arange(3), rng, batch_size=2, tail=name).tolist()
  >>> tail("short"), tail("repeat")
  ([[2, 0], [1, -1]], [[2, 0], [1, 2]])
  """
  steps = int(
    number_of_steps(
      len(positions),
      batch_size=batch_size,
      epochs=epochs,
      max_steps=max_steps,
      tail=tail,
    )
  )
  missing = 0 if tail == "wrap" else -len(positions) % batch_size
  passes = []
  for _ in range(-(-steps * batch_size // (len(positions) + missing))):
    shuffled = rng.permutation(positions)
    if missing and tail == "short":
      shuffled = np.pad(shuffled, (0, missing), constant_values=-1)
    elif missing:
      shuffled = np.resize(shuffled, len(shuffled) + missing)
    passes.append(shuffled)
  flat = np.concatenate(passes)[: steps * batch_size]
  return flat.reshape(steps, batch_size).astype(np.int32)


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
  """Examples in their order, such as those of an evaluation.

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


def plan_clients(
  clients: ClientPopulation | Subset,
  *,
  seed: int,
  round: int,
  pool: int = 0,
  phase: int = 0,
  clients_per_round: int | None = None,
  batch_size: int,
  epochs: int = 1,
  max_steps: int | None = None,
  tail: Tail = "wrap",
  uniform_weights: bool = False,
  poisson: bool = False,
  dropout_rate: float = 0.0,
  late_clients: int = 0,
  late_round: int = 1,
) -> Batches:
  """Samples a round's clients and orders their examples.

  Clients are drawn uniformly without replacement, or each on its own. A
  client's order of examples does not depend on the other clients. Those that
  drop out, or join later, keep their rows, without steps and weight: they send
  nothing and do not change.

  Args:
    clients: the clients; or the examples of a single one.
    seed: the run's seed.
    round: the number of the round, from 1.
    pool: the number of the pool or party; they draw independently.
    phase: distinguishes the phases of a run, which train one after another.
    clients_per_round: how many clients train; `None` for all, in their order.
    batch_size: B.
    epochs: see `order`.
    max_steps: see `order`.
    tail: see `order`.
    uniform_weights: weight clients equally, not by their number of examples.
    poisson: each client takes part or not by a draw of its own, so that
      `clients_per_round` do on average, as `hetfl.privacy` takes for granted;
      rows of others fill up, so that rounds share compiled programs.
    dropout_rate: the probability with which a client drops out of a round.
    late_clients: how many clients, the last ones, join later.
    late_round: the first round of these.

  Returns:
    The batches; the same for the same arguments.

  Raises:
    ValueError: there are fewer clients than a round needs, or no examples, or a
      number is not at least 1.

  >>> bank = {'y': np.arange(6)}
  >>> clients = ClientPopulation.from_lists(bank, [[0, 1, 2], [3, 4, 5]])
  >>> batches = plan_clients(
  ...     clients, seed=0, round=1, clients_per_round=1, batch_size=2)
  >>> batches.steps, batches.weight
  (array([2], dtype=int32), array([3.], dtype=float32))
  >>> for round in (1, 2):  # The second of two clients joins in round 2.
  ...   batches = plan_clients(
  ...       clients, seed=0, round=round, batch_size=2, late_clients=1,
  ...       late_round=2)
  ...   print(batches.steps, batches.weight)
  [2 0] [3. 0.]
  [2 2] [3. 3.]
  >>> batches = plan_clients(
  ...     clients, seed=0, round=1, clients_per_round=1, batch_size=2,
  ...     poisson=True)
  >>> batches.steps  # One on average.
  array([2, 0], dtype=int32)
  """
  checks.counts(
    round=round,
    batch_size=batch_size,
    epochs=epochs,
    late_round=late_round,
    **checks.given(max_steps=max_steps, clients_per_round=clients_per_round),
  )
  checks.seed(seed)
  checks.between(0, 1, dropout_rate=dropout_rate)
  if isinstance(clients, Subset):
    clients = ClientPopulation.from_lists(clients.bank, [clients.index])
  check_kind(clients, f"pool {pool}", ClientPopulation)
  checks.between(0, len(clients), late_clients=late_clients)
  if late_clients:
    checks.counts(late_clients=late_clients)
  number = clients_per_round or len(clients)
  if not 1 <= number <= len(clients):
    raise ValueError(
      f"clients_per_round={clients_per_round}: pool {pool} has {len(clients)}"
      " clients"
    )
  chosen, absent = np.arange(len(clients)), np.array([], int)
  if clients_per_round is not None:
    rng = generator(Stream.CLIENTS, seed, phase, round, pool)
    if poisson:
      draws = rng.random(len(clients))
      absent = np.flatnonzero(draws >= number / len(clients))
      # Hardly ever are more drawn than twice as many and sixteen.
      rows = max(len(clients) - len(absent), min(2 * number + 16, len(clients)))
      chosen = np.argsort(draws)[:rows]
    else:
      chosen = rng.choice(len(clients), number, replace=False)
  orders, weights = [], []
  of_client = generators(Stream.ORDER, seed, phase, round, pool)
  for k in chosen.tolist():
    held = clients.positions(k)  # int[n_k], in `clients.bank`
    weights.append(1.0 if uniform_weights else len(held))
    orders.append(
      order(
        held,
        of_client(k),
        batch_size=batch_size,
        epochs=epochs,
        max_steps=max_steps,
        tail=tail,
      )
    )
  batches = leave_out(rows_of(orders, chosen, weights), absent)
  if late_clients and round < late_round:
    batches = leave_out(batches, chosen[chosen >= len(clients) - late_clients])
  if dropout_rate:
    draw = generators(Stream.DROPOUT, seed, phase, round, pool)
    dropped = [k for k in chosen.tolist() if draw(k).random() < dropout_rate]
    batches = leave_out(batches, dropped)
  return batches


def leave_out(
  batches: Batches, absent: Collection[int] | np.ndarray
) -> Batches:
  """Batches in which some clients take no part, without steps and weight.

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
  numbers = np.asarray([*absent])  # NumPy takes a set for one object.
  if len(numbers) and numbers.dtype.kind not in "iu":
    raise ValueError(
      f"absent: numbers must be integers, not {numbers.dtype}; give"
      " np.flatnonzero of a mask"
    )
  there = ~np.isin(batches.client, numbers)
  return batches._replace(
    steps=batches.steps * there, weight=batches.weight * there
  )


def plan_distillation(
  examples: Subset, *, seed: int, round: int, steps: int, batch_size: int
) -> Batches:
  """Orders a round's distillation batches: shuffled passes over the examples.

  Args:
    examples: the distillation set.
    seed: the run's seed.
    round: the number of the round, from 1.
    steps: S, distillation steps.
    batch_size: B; may exceed the number of examples.

  Returns:
    One row of S steps.

  Raises:
    ValueError: there are no examples, a drawn one is not in the bank, or a
      number is not at least 1.

  >>> examples = Subset({'y': np.zeros(9)}, np.array([2, 5, 7]))
  >>> batches = plan_distillation(
  ...     examples, seed=0, round=1, steps=3, batch_size=2)
  >>> sorted(batches.index.ravel().tolist())
  [2, 2, 5, 5, 7, 7]
  """
  checks.counts(round=round, steps=steps, batch_size=batch_size)
  checks.seed(seed)
  check_kind(examples, "examples", Subset)
  if not len(examples.index):
    raise ValueError("examples: there are none to distil on")
  rng = generator(Stream.DISTILL, seed, round)
  positions, number = examples.index, steps * batch_size
  if len(positions) > 50 * number:
    # Shuffling millions of examples for a few takes longer than a round.
    positions = positions[rng.choice(len(positions), number, replace=False)]
  positions = np.asarray(positions)
  epochs = -(-number // len(positions))
  index = order(
    positions, rng, batch_size=batch_size, epochs=epochs, max_steps=steps
  )
  drawn = positions_in(examples.bank, index.ravel(), "examples.index")
  return in_order(drawn, batch_size)


def plan_round(
  clients: Mapping[str, ClientPopulation | Subset],
  distill: Subset | None = None,
  *,
  seed: int,
  round: int,
  clients_per_round: int | Sequence[int] | None = None,
  batch_size: int | Sequence[int],
  distill_steps: int = 1,
  distill_batch_size: int = 128,
  **options: Any,
) -> Plan:
  """Plans a round.

  Args:
    clients: the clients by the name of their bank: each pool's for FedAvg and
      codistillation, by the pools' names; all clients for `hetfl.fml`; each
      participant's examples for `hetfl.fit`, by their names.
    distill: the distillation set; `None` where none is needed.
    seed: see `plan_clients`.
    round: the number of the round, from 1.
    clients_per_round: see `plan_clients`; one number, or one for each pool.
    batch_size: see `plan_clients`; one number, or one for each pool.
    distill_steps: see `plan_distillation`.
    distill_batch_size: see `plan_distillation`.
    **options: `epochs`, `max_steps`, `tail`, `uniform_weights`, `poisson`,
      `phase`, `dropout_rate`, `late_clients`, `late_round`: see `plan_clients`.

  Returns:
    The plan, a pure function of its arguments: batches by the names of
    `clients`, and `distill`.

  Raises:
    ValueError: as `plan_clients` and `plan_distillation`.

  >>> bank = {'y': np.arange(6)}
  >>> clients = ClientPopulation.from_lists(bank, [[0, 1, 2], [3, 4, 5]])
  >>> plan = plan_round(
  ...     {'small': clients, 'large': clients}, clients.examples(), seed=0,
  ...     round=1, clients_per_round=2, batch_size=2, distill_batch_size=4)
  >>> {name: batches.steps.tolist() for name, batches in plan.batches.items()}
  {'small': [2, 2], 'large': [2, 2], 'distill': [1]}
  """
  if not isinstance(clients, Mapping) or isinstance(clients, Subset):
    raise ValueError(
      "clients: give populations by name, such as {'train': clients}, not a"
      f" {type(clients).__name__}"
    )

  def of_pools(name, number):
    if not np.ndim(number):
      return [number] * len(clients)
    if len(number) != len(clients):
      raise ValueError(f"{name}={number}: give one or {len(clients)} values")
    return list(number)

  each = zip(
    clients.items(),
    of_pools("clients_per_round", clients_per_round),
    of_pools("batch_size", batch_size),
  )
  batches = {
    name: plan_clients(
      held,
      seed=seed,
      round=round,
      pool=pool,
      clients_per_round=number,
      batch_size=size,
      **options,
    )
    for pool, ((name, held), number, size) in enumerate(each)
  }
  if distill is not None:
    if "distill" in batches:
      raise ValueError(
        "clients: 'distill' is the name of the distillation data"
      )
    batches["distill"] = plan_distillation(
      distill,
      seed=seed,
      round=round,
      steps=distill_steps,
      batch_size=distill_batch_size,
    )
  return Plan(np.int32(round), batches)


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
) -> core.Batch:
  """Prepares a gathered batch for the model and the loss.

  Args:
    transform: `None` leaves the batch as it is.
    batch: the batch.
    key: a random key in training, for a `Transform`; `None` elsewhere.

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
    batch = {"mask": batch["mask"], **given}
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
  the same.

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
      f"sets: has no {min(missing)!r}, of which the plan has batches"
    )
  together: dict[int, tuple[AnyBank, list[np.ndarray]]] = {}
  for name, batches in plan.batches.items():
    if not isinstance(sets[name], ClientPopulation):
      check_kind(sets[name], f"sets[{name!r}]", Subset)
    bank = sets[name].bank
    index = batches.index[batches.index >= 0]
    together.setdefault(id(bank), (bank, []))[1].append(index)
  positions, cut = {}, {}
  for key, (bank, indices) in together.items():
    there = np.unique(np.concatenate(indices))
    if not len(there):  # Nothing of it is needed, but no bank may be empty.
      there = np.zeros(1, np.int32)
    positions[key] = there
    length = max(8, 1 << (len(there) - 1).bit_length())
    rows = np.pad(there, (0, length - len(there)), constant_values=there[0])
    cut[key] = {name: array[rows] for name, array in bank.items()}

  def moved(batches, bank):
    new = np.searchsorted(positions[id(bank)], batches.index)
    new = np.where(batches.index >= 0, new, -1).astype(np.int32)
    return batches._replace(index=new)

  small = {name: moved(b, sets[name].bank) for name, b in plan.batches.items()}
  data = {name: cut[id(sets[name].bank)] for name in plan.batches}
  return plan._replace(batches=small), data


def stack_plans(plans: Sequence[Any]) -> Any:
  """Stacks the plans of several rounds, for `jax.lax.scan` over them.

  Args:
    plans: R plans, or other pytrees with `Batches`, of equal structure.

  Returns:
    A plan whose arrays have a new first axis R; rows are filled up to the
    longest round's length.

  >>> clients = ClientPopulation.from_lists({'y': np.arange(9)}, [[4, 8], [2]])
  >>> plans = [plan_round({'a': clients}, seed=0, round=t, batch_size=2)
  ...          for t in (1, 2)]
  >>> stack_plans(plans).batches['a'].index.shape
  (2, 2, 32, 2)
  """

  def stacked(*of_rounds):
    if not isinstance(of_rounds[0], Batches):
      return np.stack(of_rounds)
    longest = max(batches.index.shape[1] for batches in of_rounds)

    def filled(batches):
      missing = longest - batches.index.shape[1]
      widths = ((0, 0), (0, missing), (0, 0))
      index = np.pad(batches.index, widths, constant_values=-1)
      return batches._replace(index=index)

    return Batches(*map(np.stack, zip(*map(filled, of_rounds))))

  is_batches = lambda x: isinstance(x, Batches)
  return jax.tree.map(stacked, *plans, is_leaf=is_batches)
