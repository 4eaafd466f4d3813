"""Who trains on what in a round.

A `RoundPlan` describes a round: a small pytree of arrays that says which client
trains on which examples in which order. A plan is a pure function of (seed,
round, pool), so a run can be repeated, resumed and compared with another one
client by client.

Letters used throughout: K clients, L lanes, S steps, B batch size.
"""

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hetfl import checks, output_checks
from hetfl.lanes import fill_up, LanePlan, longest_first, pack_lanes
from hetfl.population import (
  AnyBank,
  check_kind,
  ClientPopulation,
  positions_in,
  Subset,
)


class RoundPlan(NamedTuple):
  """The plan of one round.

  Attributes:
    round: `int32[]`, the number of the round, from 1.
    pools: P `LanePlan`s.
    distill: `int32[S, B]`, positions in the distillation bank, step by step;
      `None` where no algorithm distils.
  """

  round: np.integer
  pools: tuple[LanePlan, ...]
  distill: np.ndarray | None


def enough_lanes(
  population: ClientPopulation,
  *,
  clients_per_round: int,
  batch_size: int,
  epochs: int = 1,
  max_steps: int | None = None,
  full_batches: bool = True,
) -> int:
  """The fewest lanes whose rounds are hardly longer than with one per client.

  When lanes are one program, each runs as many steps as the longest. With one
  lane per client and clients of different sizes, most of these steps are empty;
  in fewer lanes the small clients train one after another beside the largest.

  Args:
    population: the pool's clients.
    clients_per_round: see `plan_clients`.
    batch_size: see `plan_clients`.
    epochs: see `plan_clients`.
    max_steps: see `plan_clients`.
    full_batches: see `plan_clients`.

  Returns:
    L, between 1 and `clients_per_round`. Over sixteen sampled rounds, the
    longest lanes together have at most a tenth more steps than the longest
    clients. A pure function of the arguments.

  Raises:
    ValueError: as `plan_clients`.

  >>> bank = {'y': np.arange(8)}
  >>> def lanes(*clients):
  ...   population = ClientPopulation.from_lists(bank, clients)
  ...   return enough_lanes(population, clients_per_round=3, batch_size=1)
  >>> lanes([0, 1, 2, 3], [4, 5], [6, 7]), lanes([0, 1], [2, 3], [4, 5])
  (2, 3)
  """
  _check_sample(population, "the pool", clients_per_round)
  checks.counts(
    batch_size=batch_size, epochs=epochs, **checks.given(max_steps=max_steps)
  )
  rng = np.random.default_rng(0)
  steps_of_all = _steps_of(
    population.sizes, batch_size, epochs, max_steps, full_batches
  )
  samples = [
    rng.choice(steps_of_all, clients_per_round, replace=False).tolist()
    for _ in range(16)
  ]
  least = sum(map(max, samples))

  def length(num_lanes):
    return sum(
      max(sum(steps[k] for k in lane) for lane in lanes)
      for steps in samples
      for lanes in [longest_first(steps, num_lanes)]
    )

  return 1 + bisect.bisect_left(
    range(1, clients_per_round), True, key=lambda n: length(n) <= 1.1 * least
  )


def _steps_of(
  sizes: np.ndarray,
  batch_size: int,
  epochs: int,
  max_steps: int | None,
  full_batches: bool,
) -> np.ndarray:
  """The number of steps of clients with these numbers of examples."""
  if full_batches:
    steps = -(-sizes * epochs // batch_size)
  else:
    steps = epochs * -(-sizes // batch_size)
  return steps if max_steps is None else np.minimum(steps, max_steps)


def _check_sample(
  population: ClientPopulation, name: str, clients_per_round: int
) -> None:
  """Raises a `ValueError` if the pool has too few clients, or is a bank."""
  check_kind(population, name, ClientPopulation)
  checks.counts(clients_per_round=clients_per_round)
  if not len(population):
    raise ValueError(f"{name} has no clients")
  if clients_per_round > len(population):
    raise ValueError(
      f"clients_per_round={clients_per_round}: {name} has"
      f" {len(population)} clients; choose 1 to {len(population)}"
    )


def plan_clients(
  population: ClientPopulation,
  *,
  seed: int,
  round: int,
  pool: int = 0,
  clients_per_round: int,
  batch_size: int,
  epochs: int = 1,
  max_steps: int | None = None,
  uniform_weights: bool = False,
  full_batches: bool = True,
  num_lanes: int = 1,
) -> LanePlan:
  """Samples a round's clients and orders their examples.

  Clients are drawn uniformly without replacement. Each makes
  `ceil(n_k epochs / B)` steps over its reshuffled examples; the last batch is
  filled up from the next reshuffle, so that all batches have B examples. With
  `full_batches=False` it makes `epochs ceil(n_k / B)` steps, and the last batch
  of a pass holds what remains.

  Args:
    population: the pool's clients.
    seed: the run's seed.
    round: the number of the round, from 1.
    pool: the number of the pool; pools draw independently.
    clients_per_round: how many clients train.
    batch_size: B.
    epochs: passes of a client over its examples.
    max_steps: a limit to the steps of a client; `None` for none.
    uniform_weights: weight clients equally, not by their number of examples.
    full_batches: whether all batches have B examples. If not, a client with
      fewer than B takes its full gradient. Models with batch statistics need
      full batches, since the statistics would count empty places.
    num_lanes: L; lanes beyond `clients_per_round` stay empty.

  Returns:
    The plan; the same for the same arguments, and the same work in another
    layout if only `num_lanes` differs.

  Raises:
    ValueError: if the pool has fewer clients than a round needs or is a bare
      bank, or a number is not at least 1.

  Reference: FedJAX's `ClientDataset.shuffle_repeat_batch`; Lichtarge et al.
    2023, appendix C.3. McMahan et al. 2017, algorithm 1, with
    `full_batches=False`.

  >>> bank = {'y': np.arange(6)}
  >>> population = ClientPopulation.from_lists(bank, [[0, 1, 2], [3, 4, 5]])
  >>> plan = plan_clients(
  ...     population, seed=0, round=1, clients_per_round=1, batch_size=2)
  >>> plan.steps, plan.weight[:, :2]
  (array([2], dtype=int32), array([[0., 3.]], dtype=float32))
  >>> plan = plan_clients(population, seed=0, round=1, clients_per_round=1,
  ...                     batch_size=2, full_batches=False)
  >>> plan.index[0, :2]
  array([[ 4,  3],
         [ 5, -1]], dtype=int32)
  """
  _check_sample(population, f"pool {pool}", clients_per_round)
  checks.counts(
    round=round,
    batch_size=batch_size,
    epochs=epochs,
    num_lanes=num_lanes,
    **checks.given(max_steps=max_steps),
  )
  checks.seed(seed)
  rng = np.random.default_rng([seed, round, pool])
  chosen = rng.choice(len(population), clients_per_round, replace=False)
  holdings = [population.positions(k) for k in chosen]
  sizes = np.array([len(held) for held in holdings])
  number = _steps_of(sizes, batch_size, epochs, max_steps, full_batches)
  batches, weights = [], []
  for held, steps in zip(holdings, number.tolist()):
    missing = 0 if full_batches else -len(held) % batch_size
    empty = np.full(missing, -1, np.int32)
    passes = -(-steps * batch_size // (len(held) + missing))
    order = np.concatenate(
      [part for _ in range(passes) for part in (rng.permutation(held), empty)]
    )
    batches.append(order[: steps * batch_size].reshape(steps, batch_size))
    weights.append(1.0 if uniform_weights else len(held))
  return pack_lanes(batches, chosen, weights, num_lanes=num_lanes)


def plan_distillation(
  examples: Subset, *, seed: int, round: int, steps: int, batch_size: int
) -> np.ndarray:
  """Orders a round's distillation batches: shuffled passes over the examples.

  Args:
    examples: the distillation set.
    seed: the run's seed.
    round: the number of the round, from 1.
    steps: S, distillation steps.
    batch_size: B; may exceed the number of examples.

  Returns:
    `int32[S, B]`, positions in the bank of `examples`.

  Raises:
    ValueError: if there are no examples, a drawn one is not in the bank,
      `examples` is a bare bank, or a number is not at least 1.

  >>> examples = Subset({'y': np.zeros(9)}, np.array([2, 5, 7]))
  >>> plan = plan_distillation(
  ...     examples, seed=0, round=1, steps=3, batch_size=2)
  >>> sorted(plan.ravel().tolist())
  [2, 2, 5, 5, 7, 7]
  """
  checks.counts(round=round, steps=steps, batch_size=batch_size)
  checks.seed(seed)
  check_kind(examples, "examples", Subset)
  if not len(examples.index):
    raise ValueError("examples: there are none to distil on")
  # 2**32 - 1 keeps these draws apart from those of any pool.
  rng = np.random.default_rng([seed, round, 2**32 - 1])
  number = steps * batch_size
  if len(examples.index) > 50 * number:
    # Shuffling millions of examples for a few takes longer than a round.
    chosen = rng.choice(len(examples.index), number, replace=False)
    order = examples.index[chosen]
  else:
    passes = -(-number // len(examples.index))
    order = np.concatenate(
      [rng.permutation(examples.index) for _ in range(passes)]
    )[:number]
  order = positions_in(examples.bank, order, "examples.index")
  return order.reshape(steps, batch_size)


def plan_round(
  pools: Sequence[ClientPopulation],
  distill: Subset | None = None,
  *,
  seed: int,
  round: int,
  clients_per_round: int | Sequence[int],
  batch_size: int | Sequence[int],
  epochs: int = 1,
  max_steps: int | None = None,
  uniform_weights: bool = False,
  full_batches: bool = True,
  num_lanes: int | Sequence[int] | None = None,
  distill_steps: int = 1,
  distill_batch_size: int = 128,
) -> RoundPlan:
  """Plans a round of FedAvg, PeriodicCodist or MergedCodist.

  Args:
    pools: P pools' clients.
    distill: the distillation set; `None` where none is needed.
    seed: see `plan_clients`.
    round: the number of the round, from 1.
    clients_per_round: how many clients of a pool train; one number, or one for
      each pool.
    batch_size: see `plan_clients`; one number, or one for each pool.
    epochs: see `plan_clients`.
    max_steps: see `plan_clients`.
    uniform_weights: see `plan_clients`.
    full_batches: see `plan_clients`.
    num_lanes: L, one number, or one for each pool; an engine's
      `num_lanes(clients_per_round)` is a good choice.
      By default one lane per client, which suits accelerators if clients are
      of equal size; see `enough_lanes`.
    distill_steps: see `plan_distillation`.
    distill_batch_size: see `plan_distillation`.

  Returns:
    The plan, a pure function of its arguments.

  Raises:
    ValueError: as `plan_clients` and `plan_distillation`, such as for a pool
      with fewer clients than a round needs; or `pools` is a single population.

  >>> bank = {'y': np.arange(6)}
  >>> clients = ClientPopulation.from_lists(bank, [[0, 1, 2], [3, 4, 5]])
  >>> plan = plan_round(
  ...     [clients, clients], clients.examples(), seed=0, round=1,
  ...     clients_per_round=2, batch_size=2, distill_batch_size=4)
  >>> len(plan.pools), plan.pools[0].steps, plan.distill.shape
  (2, array([2, 2], dtype=int32), (1, 4))
  """
  checks.sequence("pools", pools, ClientPopulation)
  if num_lanes is None:
    num_lanes = clients_per_round

  def of_pools(name, number):
    if not np.ndim(number):
      return [number] * len(pools)
    if len(number) != len(pools):
      raise ValueError(f"{name}={number}: give one or {len(pools)} values")
    return list(number)

  lanes = tuple(
    plan_clients(
      clients,
      seed=seed,
      round=round,
      pool=pool,
      clients_per_round=number,
      batch_size=size,
      epochs=epochs,
      max_steps=max_steps,
      uniform_weights=uniform_weights,
      full_batches=full_batches,
      num_lanes=lanes_of_pool,
    )
    for pool, (clients, number, size, lanes_of_pool) in enumerate(
      zip(
        pools,
        of_pools("clients_per_round", clients_per_round),
        of_pools("batch_size", batch_size),
        of_pools("num_lanes", num_lanes),
      )
    )
  )
  batches = None
  if distill is not None:
    batches = plan_distillation(
      distill,
      seed=seed,
      round=round,
      steps=distill_steps,
      batch_size=distill_batch_size,
    )
  return RoundPlan(np.int32(round), lanes, batches)


def localize(
  plan: RoundPlan,
  pools: Sequence[ClientPopulation],
  distill: Subset | None = None,
) -> tuple[RoundPlan, dict[str, Any]]:
  """Cuts the banks down to what one round needs of them.

  For banks that are too large for a device: the new ones hold only the examples
  of the round's few clients and of its distillation batches. The results are
  the same.

  Args:
    plan: the round's plan.
    pools: P pools' clients.
    distill: the distillation set, if the plan has batches of it.

  Returns:
    The plan with positions in the new banks, and the banks as `step` takes
    them, still on the host. Their lengths are powers of two, so that different
    rounds share a few compiled programs.

  Raises:
    ValueError: the plan is for another number of pools, or has batches of a
      distillation set that is not given.

  >>> clients = ClientPopulation.from_lists({'y': np.arange(9)}, [[4, 8], [2]])
  >>> plan = plan_round(
  ...     [clients], seed=0, round=1, clients_per_round=1, batch_size=2,
  ...     num_lanes=1)
  >>> small, data = localize(plan, [clients])
  >>> bank = data['pools'][0]
  >>> len(bank['y']), clients.bank['y'][plan.pools[0].index[0, 0]].tolist() == (
  ...     bank['y'][small.pools[0].index[0, 0]].tolist())
  (8, True)
  """
  checks.sequence("pools", pools, ClientPopulation)
  if len(pools) != len(plan.pools):
    raise ValueError(
      f"pools: has length {len(pools)}, but the plan is for"
      f" {len(plan.pools)} pools"
    )
  used = [(p.bank, lanes.index) for p, lanes in zip(pools, plan.pools)]
  if plan.distill is not None:
    if distill is None:
      raise ValueError(
        "distill=None: the plan has distillation batches; give the distillation"
        " set"
      )
    used.append((distill.bank, plan.distill))
  together: dict[int, tuple[AnyBank, list[np.ndarray]]] = {}
  for bank, index in used:
    together.setdefault(id(bank), (bank, []))[1].append(index[index >= 0])
  positions, cut = {}, {}
  for key, (bank, indices) in together.items():
    there = np.unique(np.concatenate(indices))
    if not len(there):  # Nothing of it is needed, but no bank may be empty.
      there = np.zeros(1, np.int32)
    positions[key] = there
    length = max(8, 1 << (len(there) - 1).bit_length())
    fill = np.full(length - len(there), there[0])
    rows = np.concatenate([there, fill])
    cut[key] = {name: array[rows] for name, array in bank.items()}

  def moved(bank, index):
    new = np.searchsorted(positions[id(bank)], index)
    return np.where(index >= 0, new, -1).astype(np.int32)

  lanes = tuple(
    lanes._replace(index=moved(p.bank, lanes.index))
    for p, lanes in zip(pools, plan.pools)
  )
  data: dict[str, Any] = {"pools": tuple(cut[id(p.bank)] for p in pools)}
  batches = plan.distill
  if distill is not None and batches is not None:
    batches = moved(distill.bank, batches)
    data["distill"] = cut[id(distill.bank)]
  return RoundPlan(plan.round, lanes, batches), data


def stack_plans(plans: Sequence[Any]) -> Any:
  """Stacks the plans of several rounds, for `jax.lax.scan`.

  Args:
    plans: plans of one type; the lanes of `RoundPlan`s are padded to the
      longest, all other shapes must be equal.

  Returns:
    A plan with rounds on the first axis of each array.

  Raises:
    ValueError: there are none, or they are of different shapes.

  >>> lanes = pack_lanes([np.ones((33, 1), np.int32)], [0], [1.], num_lanes=1)
  >>> short = pack_lanes([np.ones((1, 1), np.int32)], [0], [1.], num_lanes=1)
  >>> plans = [RoundPlan(np.int32(t + 1), (p,), None)
  ...          for t, p in enumerate([lanes, short])]
  >>> stack_plans(plans).pools[0].index.shape
  (2, 1, 128, 1)
  """
  plans = list(plans)
  if not plans:
    raise ValueError("plans: give at least one plan")
  for i, plan in enumerate(plans):
    checks.kind(f"plans[{i}]", plan, type(plans[0]), "stack plans of one kind")
  if isinstance(plans[0], RoundPlan):
    numbers = {len(plan.pools) for plan in plans}
    if len(numbers) > 1:
      raise ValueError(
        "plans: must have the same number of pools, not"
        f" {min(numbers)} and {max(numbers)}"
      )
    pools = zip(*(map(fill_up, zip(*(plan.pools for plan in plans)))))
    plans = [plan._replace(pools=p) for plan, p in zip(plans, pools)]
  for i, plan in enumerate(plans):
    output_checks.alike(f"plans[{i}], beside plans[0]", plan, plans[0])
  return jax.tree.map(lambda *arrays: np.stack(arrays), *plans)
