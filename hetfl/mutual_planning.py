"""Plans for Federated Mutual Learning: which clients train, on which batches.

Plans are made on the host with NumPy, one for each round, as pure functions of
the seed and the round's number.

Reference: Shen et al. 2020, "Federated Mutual Learning", algorithm 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import numpy as np

from hetfl import checks, core, population
from hetfl.lanes import LanePlan, pack_lanes
from hetfl.mutual import MutualClient


class GroupPlan(NamedTuple):
  """The work of a group's clients in one round.

  Attributes:
    row: `int32[N]`, the clients' rows in the group's state.
    client: `int32[N]`, the clients' numbers.
    index: `int32[N, S, B]`, positions in the bank; -1 marks an empty place.
    steps: `int32[N]`, how many of the S steps each client runs.
    weight: `float32[N]`, the weight of each client's meme in the merge.
  """

  row: np.ndarray
  client: np.ndarray
  index: np.ndarray  # type: ignore[assignment]
  steps: np.ndarray
  weight: np.ndarray


@flax.struct.dataclass
class MutualPlan:
  """What one round of Federated Mutual Learning does.

  Attributes:
    round: `int32[]`, the number of the round, from 1.
    groups: a `GroupPlan` for each group of clients.
    clients: each group's client numbers. Like `full_batches` they are static,
      so that a wrong plan raises under `jax.jit` too.
    full_batches: for each group, whether all of its batches are full.
  """

  round: np.integer
  groups: tuple[GroupPlan, ...]
  clients: tuple[tuple[int, ...], ...] = flax.struct.field(pytree_node=False)
  full_batches: tuple[bool, ...] = flax.struct.field(pytree_node=False)


def group_clients(
  clients: Sequence[MutualClient],
) -> tuple[tuple[int, ...], ...]:
  """The groups of clients with equal fields, as client numbers.

  Args:
    clients: K clients.

  Returns:
    The groups, in the order of their first clients.

  >>> a, b = (MutualClient(core.Model(None, f)) for f in (max, min))
  >>> group_clients([a, b, a])
  ((0, 2), (1,))
  """
  checks.sequence("clients", clients, MutualClient)
  groups: dict[tuple[Any, ...], list[int]] = {}
  for k, client in enumerate(clients):
    groups.setdefault(tuple(map(core.hash_key, client)), []).append(k)
  return tuple(map(tuple, groups.values()))


def plan_mutual(
  held: (
    population.ClientPopulation
    | Sequence[population.Subset | population.Positions]
  ),
  groups: Sequence[Sequence[int]] | Sequence[MutualClient],
  *,
  seed: int,
  round: int,
  batch_size: int,
  epochs: int,
  uniform_weights: bool = True,
  full_batches: bool = False,
  clients_per_round: int | None = None,
) -> MutualPlan:
  """Orders the examples of all clients for a round.

  Each client passes over its examples `epochs` times. Each pass reshuffles
  them and cuts them into batches; its last batch holds the remainder.

  Args:
    held: the clients' examples as a population, or each client's subset or
      positions in its bank; bare positions are not checked against the bank.
    groups: the groups, as `group_clients` returns them; or the clients.
    seed: the run's seed.
    round: the number of the round, from 1.
    batch_size: B.
    epochs: E, passes of a client over its examples.
    uniform_weights: weight all memes equally in the merge, as the paper does,
      and not by the clients' numbers of examples, as FedAvg does.
    full_batches: fill up the last batch of a pass with the pass's first
      examples. Models with batch statistics need this, since the statistics
      would count empty places.
    clients_per_round: how many clients take part, drawn uniformly without
      replacement; the others keep their models and optimizer states. A group
      gets this many rows, or one for each of its clients if they are fewer.
      `None` for all clients, as in the paper.

  Returns:
    The plan, a pure function of the arguments; a client's batches do not
    depend on the other clients.

  Raises:
    ValueError: if a client holds no examples, a number is not at least 1, the
      groups do not hold each client once, `clients_per_round` exceeds the
      number of clients, or clients of one population have different banks.

  Reference: Shen et al. 2020, algorithm 1, line 4 of ClientUpdate.

  >>> plan = plan_mutual([np.arange(3), np.arange(5)], [(0, 1)],
  ...                    seed=0, round=1, batch_size=2, epochs=1)
  >>> plan.groups[0].steps, plan.groups[0].index.shape
  (array([2, 3], dtype=int32), (2, 3, 2))
  >>> plan.groups[0].index[0, 1, 1], plan.groups[0].weight
  (np.int32(-1), array([1., 1.], dtype=float32))
  """
  checks.counts(
    round=round,
    batch_size=batch_size,
    epochs=epochs,
    **checks.given(clients_per_round=clients_per_round),
  )
  checks.seed(seed)
  given, held = held, population.holdings(held)
  active = np.ones(len(held), bool)
  if clients_per_round is not None:
    if clients_per_round > len(held):
      raise ValueError(
        f"clients_per_round={clients_per_round}: there are {len(held)} clients"
      )
    # 2**32 - 1 keeps this draw apart from those of any client.
    rng = np.random.default_rng([seed, round, 2**32 - 1])
    active[:] = False
    active[rng.choice(len(held), clients_per_round, replace=False)] = True
  checks.sequence("groups", groups, MutualClient)
  alike: tuple[Any, ...] = tuple(groups)
  if alike and isinstance(alike[0], MutualClient):
    checks.each("groups", alike, MutualClient, len(alike), "or give all groups")
    banks = sorted({client.bank for client in alike})
    if len(banks) > 1 and isinstance(given, population.ClientPopulation):
      raise ValueError(
        f"held: a population has one bank, but the clients' are {banks}; give"
        " each client's Subset"
      )
    alike = group_clients(alike)
  members = tuple(tuple(map(int, group)) for group in alike)
  if sorted(k for group in members for k in group) != list(range(len(held))):
    raise ValueError(
      f"groups={members}: must contain each of the {len(held)} clients in held"
      " exactly once; pass group_clients(clients)"
    )
  rounds = []
  for group in members:
    # Participants first, then other clients to fill up the rows.
    rows = sorted(range(len(group)), key=lambda row: not active[group[row]])
    rows = sorted(rows[:clients_per_round])
    chosen = [group[row] for row in rows]
    batches = [-(-len(held[k]) // batch_size) for k in group]
    index = np.full(
      (len(rows), epochs * max(batches), batch_size), -1, np.int32
    )
    steps, weight = np.zeros(len(rows), np.int32), np.zeros(len(rows))
    for i, (row, k) in enumerate(zip(rows, chosen)):
      if not active[k]:
        continue
      n = batches[row]
      steps[i], weight[i] = epochs * n, 1 if uniform_weights else len(held[k])
      rng = np.random.default_rng([seed, round, k])
      for epoch in range(epochs):
        order = np.resize(rng.permutation(held[k]), n * batch_size)
        if not full_batches:
          order[len(held[k]) :] = -1
        index[i, epoch * n : (epoch + 1) * n] = order.reshape(n, batch_size)
    rounds.append(
      GroupPlan(
        row=np.array(rows, np.int32),
        client=np.array(chosen, np.int32),
        index=index,
        steps=steps,
        weight=weight.astype(np.float32),
      )
    )
  whole = tuple(
    full_batches or all(len(held[k]) % batch_size == 0 for k in group)
    for group in members
  )
  return MutualPlan(np.int32(round), tuple(rounds), members, whole)


def as_lanes(plan: MutualPlan, *, num_lanes: int) -> LanePlan:
  """A plan for FedAvg over one pool, with the same clients and batches.

  With this plan, `hetfl.fedavg` with `rounds=None` is FML's baseline, with the
  same batches and random draws, if its pool has `server_lr=1`,
  `server_optimizer=fedavg_server` and `client_optimizer=momentum_sgd`. Clients
  have equal weights, as in FML's merge and the released code's baseline. With
  `plan_mutual(uniform_weights=False)` they are weighted by their numbers of
  examples, as in FedAvg and the paper's equation 2.

  Args:
    plan: the plan; all clients' examples lie in one bank.
    num_lanes: L.

  Returns:
    The lanes.

  >>> plan = plan_mutual([np.arange(3), np.arange(5)], [(0, 1)],
  ...                    seed=0, round=1, batch_size=2, epochs=1)
  >>> as_lanes(plan, num_lanes=1).weight[0, :5]
  array([0., 0., 1., 0., 1.], dtype=float32)
  """
  rows = sorted(
    (client, index[:steps], weight)
    for group in plan.groups
    for _, client, index, steps, weight in zip(*group)
    if steps
  )
  clients, batches, weights = zip(*rows)
  return pack_lanes(batches, clients, weights, num_lanes=num_lanes)
