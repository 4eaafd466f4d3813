"""What clients keep between rounds: rows of pytrees, in groups that are alike.

Any algorithm can keep a pytree `[K, ...]` for each group of clients with one
architecture, take the rows of those that a round samples, and put the new rows
back; clients that are not sampled cost memory, and no work.
"""

from collections import Counter
from collections.abc import Callable, Sequence
import dataclasses
import os
import tempfile
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from hetfl import checks, core, local
from hetfl.batches import Batches, check_full, of_round, Plan
from hetfl.engine import Engine, Inline, jit
from hetfl.engine.work import is_key, row
from hetfl.local import Participant

PyTree = Any


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Client(Participant):
  """A client that keeps a model of its own, and how that trains.

  Clients with equal fields, but for their names, form a group, whose states are
  stacked and whose work is one program. Functions are equal only to themselves:
  make a transform, or a model without `Model.from_flax`, once for all clients.

  Attributes:
    learning_rate: its own model's, which is not in `state.hyper`; `None` for
      the algorithm's, which is.
    optimizer: its own model's; `None` for the algorithm's.
    l2: its penalty's weight, which is not in `state.hyper`.
    bank: the name of the bank that holds its examples.
    adaptor: of `fml`: a model from the global model's outputs, if these are
      features, to logits; it stays with the client, as does the encoder.
    encoder: of `fml`: a model from inputs to the global model's inputs. With
      both, the global model is the middle of the meme.
  """

  learning_rate: float | None = None
  optimizer: core.Optimizer | None = None  # type: ignore[assignment]
  bank: str = "train"
  adaptor: core.Model | None = None
  encoder: core.Model | None = None

  def __post_init__(self):
    super().__post_init__()
    for name, part in self.parts.items():
      core.Model.check(f"{self.label}: {name}", part)

  @property
  def parts(self) -> dict[str, core.Model]:
    """The adaptor and the encoder by name, if it has them."""
    return checks.given(adaptor=self.adaptor, encoder=self.encoder)


@flax.struct.dataclass
class Group:
  """What the clients of a group keep from round to round.

  Attributes:
    learner: their own models and optimizers, arrays with a first axis K.
    extra: what else an algorithm has them keep, likewise; for `fml` the
      variables of their adaptors and encoders by name.
    clients: K client numbers.
  """

  learner: local.Learner
  extra: PyTree
  clients: tuple[int, ...] = flax.struct.field(pytree_node=False)


def group_clients(
  clients: Sequence[Participant],
) -> tuple[tuple[int, ...], ...]:
  """The groups of clients with equal fields, as client numbers.

  Args:
    clients: K clients.

  Returns:
    The groups, in the order of their first clients.

  >>> a, b = (Participant(core.Model(None, f), learning_rate=1.)
  ...         for f in (max, min))
  >>> group_clients([a, b, a])
  ((0, 2), (1,))
  """
  groups: dict[tuple[Any, ...], list[int]] = {}
  members: dict[int, list[int]] = {}  # By client: one may occur many times.
  for k, client in enumerate(clients):
    if id(client) not in members:
      fields = (f.name for f in dataclasses.fields(client) if f.name != "name")
      alike = tuple(core.hash_key(getattr(client, name)) for name in fields)
      members[id(client)] = groups.setdefault(alike, [])
    members[id(client)].append(k)
  return tuple(map(tuple, groups.values()))


def rows_of_group(
  batches: Batches, in_bank: np.ndarray, group: Sequence[int] | np.ndarray
) -> tuple[jax.Array, Batches]:
  """A group's rows in a plan, equally many in each round.

  Args:
    batches: the round's batches, of some clients of a bank.
    in_bank: `int[K]`, each client's number in its bank's population.
    group: the group's clients.

  Returns:
    `int32[N]`, rows of the group's state, and their batches; those of clients
    that do not take part have no steps and no weight.
  """
  xp = np if isinstance(batches.client, np.ndarray) else jnp
  number, group = min(len(batches.client), len(group)), np.asarray(group)
  numbers = xp.asarray(in_bank[group])  # Ascending.
  own = xp.searchsorted(numbers, batches.client).clip(0, len(group) - 1)
  present = numbers[own] == batches.client
  # Participants first, then the first other clients, to fill up the rows.
  first = xp.arange(number)
  free = ~xp.isin(first, xp.where(present, own, -1))
  turn = xp.concatenate([xp.where(present, 0, 2), xp.where(free, 1, 2)])
  taken = xp.argsort(turn, stable=True)[:number]
  chosen = xp.concatenate([own, first])[taken]
  taken = taken[xp.argsort(chosen)]
  chosen = xp.sort(chosen).astype(np.int32)
  takes_part = turn[taken] == 0
  rows = xp.where(takes_part, taken, 0)
  return chosen, Batches(
    batches.index[rows],
    xp.where(takes_part, batches.steps[rows], 0),
    xp.asarray(group)[chosen].astype(np.int32),
    xp.where(takes_part, batches.weight[rows], 0.0).astype(np.float32),
  )


@jax.jit
def take_rows(kept: PyTree, rows: jax.Array) -> PyTree:
  """Of what all clients keep, the rows of those that take part."""
  take = lambda a: a if len(rows) == len(a) else a[rows]  # All, in their order.
  return jax.tree.map(take, kept)


@jax.jit
def put_rows(kept: PyTree, rows: jax.Array, new: PyTree) -> PyTree:
  """What all clients keep, with some rows replaced; the inverse."""
  put = lambda a, b: b if len(rows) == len(a) else a.at[rows].set(b)
  return jax.tree.map(put, kept, new)


def weighted_mean(trees: PyTree, weights: jax.Array) -> PyTree:
  """`sum_k w_k x_k / sum_k w_k`, over arrays `x: [K, ...]`.

  >>> weighted_mean(jnp.array([[1., 5.], [4., 2.]]), jnp.array([2., 1.]))
  Array([2., 4.], dtype=float32)
  """
  total = lambda x: jnp.tensordot(weights, x, 1, precision="highest")
  return jax.tree.map(lambda x: total(x) / jnp.sum(weights), trees)


class Turn(NamedTuple):
  """The clients of a group that take part in a round.

  Attributes:
    rows: `int32[N]`, their rows in the group's state.
    kept: what they keep, a `Group` of N.
    bank: the bank with their examples.
    batches: N rows; clients that only fill up the rows have no steps and no
      weight.
  """

  rows: jax.Array
  kept: Group
  bank: core.Batch
  batches: Batches


class Roster:
  """The clients of a federation, in groups of those that are alike.

  Args:
    clients: K clients. A bank's clients are numbered in their order.

  Attributes:
    groups: the groups, as client numbers.
    first: the first client of each group, which stands for all.

  Raises:
    ValueError: there are none, or one is not a `Client`.
  """

  def __init__(self, clients: Sequence[Client]):
    if not isinstance(clients, Sequence):
      raise ValueError(f"clients: a {type(clients).__name__}; give a list")
    if not all(isinstance(one, Client) for one in clients) or not clients:
      kinds = ", ".join(sorted({type(one).__name__ for one in clients}))
      raise ValueError(f"clients: give one Client or more, not [{kinds}]")
    self.groups = group_clients(clients)
    self.first = [clients[group[0]] for group in self.groups]
    self._arrays = list(map(np.array, self.groups))  # There may be millions.
    self._sizes: Counter[str] = Counter()
    self._in_bank = np.zeros(len(clients), np.int32)
    for k, client in enumerate(clients):
      self._in_bank[k] = self._sizes[client.bank]
      self._sizes[client.bank] += 1

  def start(
    self,
    make: Callable[[Client, jax.Array], tuple[local.Learner, Any]],
    rows: Sequence[Any] | None = None,
  ) -> tuple[Group, ...]:
    """What clients keep at first.

    Args:
      make: gives learners and extra of some clients of a group.
      rows: which rows of each group's state to make; by default all.

    Returns:
      The groups.
    """
    return tuple(
      Group(*make(client, jnp.array(group)[some]), group)
      for client, group, some in zip(
        self.first, self.groups, rows or [slice(None)] * len(self.groups)
      )
    )

  def turns(
    self,
    kept: Sequence[Group],
    plan: Plan,
    data: dict[str, core.Batch],
    shared: PyTree = (),
  ) -> list[Turn]:
    """Who takes part in a round, group by group.

    Args:
      kept: what all clients keep.
      plan: the round's plan, with batches named as the banks.
      data: the banks.
      shared: the server's models that train on the batches, too.

    Returns:
      The groups' turns.

    Raises:
      ValueError: the state, the plan or the data is not for these clients.
    """
    if (given := tuple(group.clients for group in kept)) != self.groups:
      raise ValueError(
        f"the state groups clients as {given}, not {self.groups}"
      )
    turns = []
    for i, (group, client) in enumerate(zip(kept, self.first)):
      batches = of_round(plan, client.bank)
      models = jax.tree.leaves(
        (group.learner.variables, group.extra, shared),
        is_leaf=lambda x: isinstance(x, core.Variables),
      )
      stats = [getattr(model, "stats", ()) for model in models]
      check_full(client.label, batches, stats)
      rows, batches = self.rows(plan, i)
      bank = checks.bank(data, client.bank)
      turns.append(Turn(rows, take_rows(group, rows), bank, batches))
    return turns

  def rows(self, plan: Plan, i: int) -> tuple[jax.Array, Batches]:
    """The rows of group `i` in a plan; see `rows_of_group`."""
    bank = self.first[i].bank
    batches, number = of_round(plan, bank), self._sizes[bank]
    host = isinstance(batches.client, np.ndarray)
    # Of a traced plan only the number of its rows is known.
    last = batches.client.max() if host else len(batches.client) - 1
    if last >= number:
      raise ValueError(
        f"plan: batches {bank!r} are of client {last}, but there are {number}"
      )
    return rows_of_group(batches, self._in_bank, self._arrays[i])


def on_host(
  algorithm: core.Algorithm,
  clients: Sequence[Client],
  *,
  engine: Engine | None = None,
  folder: str | os.PathLike | None = None,
) -> core.Algorithm:
  """Keeps what clients keep on the host, or on disk.

  A round moves the rows of its own clients to the device, and back. For more
  clients than a device can hold; the results are the same.

  Args:
    algorithm: one whose clients keep models, such as `fml`.
    clients: its clients.
    engine: its engine, by default `Inline()`.
    folder: where to keep the rows on disk, in files without a name, which end
      with the process; `None` for in memory.

  Returns:
    The algorithm; its state's `clients` hold NumPy arrays, which a step changes
    in place. Call its `init` and its `step` as they are, not within `jit`. A
    method's `server` sees the first 1,024 clients of each group.

  Raises:
    ValueError: `init` or `step` is traced; clients keep typed random keys.

  >>> from hetfl import ClientPopulation, plan_round
  >>> from hetfl.algorithms.personal import personal
  >>> linear = core.Model(
  ...     lambda key: core.Variables(jnp.zeros((1, 2)), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> held = ClientPopulation.from_lists(bank, [[0]] * 5)
  >>> plan = plan_round(
  ...     {'train': held}, seed=0, round=1, clients_per_round=1, batch_size=1)
  >>> clients = [Client(linear)] * 5
  >>> algorithm = on_host(personal(clients, learning_rate=1.), clients)
  >>> state, _ = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan, {'train': bank})
  >>> state.clients[0].learner.params[:, 0, 0]
  array([0. , 0. , 0.5, 0. , 0. ], dtype=float32)
  """
  roster, at_once = Roster(clients), 1 << 10
  sizes = list(map(len, roster.groups))
  step = (engine or Inline()).compile(algorithm.step)

  def new(path, like):
    group = path[0].idx
    name = f"{group}{jax.tree_util.keystr(path[1:])}"
    if is_key(like):
      raise ValueError(
        f"on_host: clients keep typed random keys ({name}), which NumPy cannot"
        " hold: use jax.random.PRNGKey there"
      )
    shape = (sizes[group], *like.shape[1:])
    if folder is None or 0 in shape:  # Empty files cannot be mapped.
      return np.zeros(shape, like.dtype)
    file = tempfile.TemporaryFile(dir=folder)
    return np.memmap(file, like.dtype, "w+", shape=shape)

  def init(key, *args):
    _check_untraced(key)
    make = jit(lambda *args, rows: algorithm.init(*args, rows=rows))
    state = None
    for first in range(0, max(sizes), at_once):
      rows = [
        np.minimum(np.arange(first, first + min(at_once, n)), n - 1)
        for n in sizes
      ]
      part = make(key, *args, rows=rows)
      if state is None:  # The server starts with the first clients.
        kept = jax.tree_util.tree_map_with_path(new, part.clients)
        state = part.replace(clients=kept)
      put(state.clients, rows, part.clients)
    return state

  def put(kept, rows, new):
    for group, own, part in zip(kept, rows, jax.device_get(new)):
      jax.tree.map(lambda a, b, i=own: a.__setitem__(i, b), group, part)

  def host_step(state, plan, data):
    _check_untraced(state.key)
    kept = state.clients
    rows = [roster.rows(plan, i)[0] for i in range(len(kept))]
    there = tuple(map(row, kept, rows))
    state, metrics = step(state.replace(clients=there), plan, data)
    put(kept, rows, state.clients)
    return state.replace(clients=kept), metrics

  return core.Algorithm(init, host_step, on_host=True)


def _check_untraced(key):
  if isinstance(key, jax.core.Tracer):
    raise ValueError(
      "on_host: init and step move rows to and from the host: call them as they"
      " are, not within jit"
    )
