"""Plans of rounds: whose clients train on which examples, in which order.

A plan is a pure function of (seed, round), so a run can be repeated, resumed
and compared with another one client by client.

Letters used throughout: K clients, S steps, B batch size.
"""

from collections.abc import Mapping, Sequence
from typing import Any, get_args, Literal

import numpy as np

from hetfl import checks
from hetfl.batches import Batches, in_order, leave_out, Plan, rows_of
from hetfl.population import check_kind, ClientPopulation, positions_in, Subset
from hetfl.streams import generator, generators, Stream

Tail = Literal["wrap", "short", "repeat"]


def number_of_steps(
  sizes: np.ndarray | int,
  *,
  batch_size: int,
  epochs: int = 1,
  max_steps: int | None = None,
  tail: Tail = "wrap",
) -> np.ndarray | int:
  """How many steps clients with so many examples take.

  Args:
    sizes: n, how many examples, of one client or of each.
    batch_size: B.
    epochs: E, passes over the examples.
    max_steps: a limit on the steps; `None` for none.
    tail: see `order`.

  Returns:
    S, likewise.

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
  steps: int,
  batch_size: int,
  tail: Tail = "wrap",
) -> np.ndarray:
  """Orders examples into batches, reshuffled in each pass over them.

  Args:
    positions: `int[n]`, the examples.
    rng: NumPy's generator.
    steps: S, over as many passes as they take.
    batch_size: B.
    tail: what fills a pass's last batch if B does not divide n. "wrap": the
      next pass begins there, so that E passes have `ceil(n E / B)` full
      batches, as FedJAX makes them. "short": nothing; a pass has `ceil(n / B)`
      batches, and clients with fewer than B take full gradients, as in McMahan
      et al. "repeat": the pass's first examples, for models with batch
      statistics, which would count empty places.

  Returns:
    `int32[S, B]`.

  Reference: FedJAX's `ClientDataset.shuffle_repeat_batch`; McMahan et al. 2017,
  algorithm 1.

  >>> def tail(name):
  ...   rng = np.random.default_rng(0)
  ...   batches = order(np.arange(3), rng, steps=2, batch_size=2, tail=name)
  ...   return batches.tolist()
  >>> tail("short"), tail("repeat")
  ([[2, 0], [1, -1]], [[2, 0], [1, 2]])
  """
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

  Clients are drawn uniformly without replacement, or independently. A client's
  order of examples does not depend on the other clients. Those that drop out,
  or join later, keep their rows, without steps or weight: they send nothing and
  do not change.

  Args:
    clients: the clients; or the examples of a single one.
    seed: the run's seed.
    round: the number of the round, from 1.
    pool: the number of the pool or party; they draw independently.
    phase: distinguishes the phases of a run, which train one after another.
    clients_per_round: how many clients train; `None` for all, in their order.
    batch_size: B.
    epochs: see `number_of_steps`.
    max_steps: see `number_of_steps`.
    tail: see `order`.
    uniform_weights: weight clients equally, not by their number of examples.
    poisson: each client takes part or not by an independent draw, so that
      `clients_per_round` do on average, as `hetfl.privacy` assumes; others fill
      up the rows, so that rounds share compiled programs.
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
  checks.whole(0, np.inf, seed=seed)
  checks.between(0, 1, dropout_rate=dropout_rate)
  if isinstance(clients, Subset):
    clients = ClientPopulation.from_lists(clients.bank, [clients.index])
  check_kind(clients, f"pool {pool}", ClientPopulation)
  checks.whole(0, len(clients), late_clients=late_clients)
  number = clients_per_round or len(clients)
  if not 1 <= number <= len(clients):
    raise ValueError(
      f"clients_per_round={clients_per_round}: pool {pool} has {len(clients)}"
      f" clients; give 1 to {len(clients)}"
    )
  chosen, absent = np.arange(len(clients)), []
  if clients_per_round is not None:
    rng = generator(Stream.CLIENTS, seed, phase, round, pool)
    if poisson:
      draws = rng.random(len(clients))
      absent = np.flatnonzero(draws >= number / len(clients)).tolist()
      # More than twice as many plus sixteen are hardly ever drawn.
      rows = max(len(clients) - len(absent), min(2 * number + 16, len(clients)))
      chosen = np.argsort(draws)[:rows]
    else:
      chosen = rng.choice(len(clients), number, replace=False)
  if round < late_round:
    absent += range(len(clients) - late_clients, len(clients))
  if dropout_rate:
    draw = generators(Stream.DROPOUT, seed, phase, round, pool)
    absent += [k for k in chosen.tolist() if draw(k).random() < dropout_rate]
  sizes = clients.sizes[chosen]
  how: dict[str, Any] = dict(batch_size=batch_size, tail=tail)
  steps = number_of_steps(sizes, epochs=epochs, max_steps=max_steps, **how)
  of_client = generators(Stream.ORDER, seed, phase, round, pool)
  orders = [
    order(clients.positions(k), of_client(k), steps=s, **how)
    for k, s in zip(chosen.tolist(), np.asarray(steps).tolist())
  ]
  weights = np.ones(len(sizes)) if uniform_weights else sizes
  return leave_out(rows_of(orders, chosen, weights), absent)


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
  checks.whole(0, np.inf, seed=seed)
  check_kind(examples, "examples", Subset)
  if not len(examples.index):
    raise ValueError("examples: there are none to distil on")
  rng = generator(Stream.DISTILL, seed, round)
  positions, number = examples.index, steps * batch_size
  if len(positions) > 50 * number:
    # Shuffling millions of examples for a few takes longer than a round.
    positions = positions[rng.choice(len(positions), number, replace=False)]
  positions = np.asarray(positions)
  index = order(positions, rng, steps=steps, batch_size=batch_size)
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
  if not isinstance(clients, Mapping):
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
  options |= dict(seed=seed, round=round)
  batches = {
    name: plan_clients(
      held, pool=pool, clients_per_round=number, batch_size=size, **options
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
