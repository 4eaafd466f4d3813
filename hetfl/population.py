"""Who holds which examples.

A federation is a *bank* (all examples of a data set, kept whole on the
device) and, for each client, the indices of its examples in that bank.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from hetfl import checks
from hetfl.engine import bank_format

Bank = Mapping[str, np.ndarray]  # on the host, as it is read
AnyBank = Mapping[str, np.ndarray | jax.Array]  # or on a device
Positions = np.ndarray | Sequence[int]  # of examples in a bank


class Subset(NamedTuple):
  """Some examples of a bank.

  Attributes:
    bank: the arrays, each with examples on its first axis: inputs `x` and
      labels `y`, or what a transform makes these from.
    index: `int32[N]`, the positions of the examples in the bank.
  """

  bank: AnyBank
  index: np.ndarray  # type: ignore[assignment]

  @classmethod
  def whole(cls, bank: AnyBank) -> "Subset":
    """All examples of a bank.

    Args:
      bank: arrays `[N, ...]` by name.

    Returns:
      The examples, in the bank's order.

    Raises:
      ValueError: as `checks.num_examples`.

    >>> Subset.whole({'y': np.array([5, 6, 7])}).index
    array([0, 1, 2], dtype=int32)
    """
    return cls(bank, np.arange(checks.num_examples(bank), dtype=np.int32))

  def alone(self) -> "Subset":
    """The same examples in a bank of their own.

    >>> Subset({'y': np.arange(9)}, np.array([2, 7])).alone().bank['y']
    array([2, 7])
    """
    return Subset.whole({name: a[self.index] for name, a in self.bank.items()})

  def draw(self, n: int, *, seed: int | Sequence[int], name: str) -> "Subset":
    """Some of the examples, drawn without replacement, in their old order.

    Args:
      n: how many.
      seed: a seed for NumPy: a `Stream` and other numbers.
      name: the name of `n` in error messages.

    Returns:
      The examples, of the same bank.

    Raises:
      ValueError: `n` is not between 1 and the number of examples.

    >>> Subset.whole({'y': np.arange(9)}).draw(3, seed=0, name='n').index
    array([2, 4, 5], dtype=int32)
    """
    total = len(self.index)
    if not 1 <= n <= total:
      raise ValueError(f"{name}={n}: there are {total}, want 1 to {total}")
    if n == total:
      return self
    order = np.random.default_rng(seed).permutation(total)
    return Subset(self.bank, self.index[np.sort(order[:n])])


def positions_in(bank: AnyBank, positions: Any, name: str) -> np.ndarray:
  """Positions as `int32[n]`, if they are positions in the bank.

  Args:
    bank: the bank.
    positions: whole numbers.
    name: their name in error messages.

  Returns:
    The positions.

  Raises:
    ValueError: they are not whole numbers, or outside the bank.

  >>> positions_in({'x': np.zeros(3)}, [True, False, True], 'index')
  Traceback (most recent call last):
    ...
  ValueError: index: positions must be integers, not bool [3]: give int[n], \
such as np.flatnonzero of a mask
  """
  array = checks.integers(f"{name}: positions", positions)
  n = checks.num_examples(bank)
  outside = array[(array < 0) | (array >= n)]
  if len(outside):
    raise ValueError(
      f"{name}: position {outside[0]} is outside the bank of {n} examples"
    )
  return array.astype(np.int32)


def check_kind(given: Any, name: str, want: type) -> None:
  """Checks that examples are given as a set, or as a population.

  Args:
    given: the examples.
    name: their name in error messages.
    want: `Subset` or `ClientPopulation`.

  Raises:
    ValueError: they are given as something else.

  >>> check_kind({'x': np.zeros(3)}, 'test', Subset)
  Traceback (most recent call last):
    ...
  ValueError: test: give a Subset, not a bare bank; Subset.whole(bank) has all \
of its examples
  """
  if isinstance(given, want):
    return
  hint = "ClientPopulation.from_lists(bank, positions) makes one"
  if want is Subset:
    hint = "Subset.whole(bank) has all of its examples"
    if isinstance(given, ClientPopulation):
      hint = "population.examples() has all of its examples"
  bare = isinstance(given, Mapping)
  kind = "bare bank" if bare else type(given).__name__
  raise ValueError(f"{name}: give a {want.__name__}, not a {kind}; {hint}")


@dataclasses.dataclass(frozen=True, eq=False)
class ClientPopulation:
  """K clients and their examples, as positions in one bank.

  Attributes:
    bank: the arrays, each with examples on its first axis.
    members: `int32[M]`, example positions, client after client.
    offsets: `int64[K + 1]`; client `k` holds
      `members[offsets[k]:offsets[k + 1]]`.
    ids: K client ids; unique.

  Raises:
    ValueError: positions are not whole numbers or are outside the bank, ids are
      not K different ones, offsets do not begin at 0 and end at M, or a client
      holds no examples.
  """

  bank: AnyBank
  members: np.ndarray
  offsets: np.ndarray
  ids: tuple[str, ...]

  def __post_init__(self):
    if len(set(self.ids)) != len(self.ids):
      raise ValueError("ids: two clients have the same id")
    if len(self.ids) != len(self.offsets) - 1:
      raise ValueError(
        f"ids: {len(self.ids)} ids for {len(self.offsets) - 1} clients"
      )
    if self.offsets[0] != 0 or self.offsets[-1] != len(self.members):
      raise ValueError(
        f"offsets: from {self.offsets[0]} to {self.offsets[-1]}, want 0 to"
        f" {len(self.members)}, the number of members"
      )
    positions_in(self.bank, self.members, "members")
    if len(self.sizes) and self.sizes.min() < 1:
      empty = self.ids[int(self.sizes.argmin())]
      raise ValueError(f"client {empty!r} holds no examples; leave it out")

  @classmethod
  def from_lists(
    cls,
    bank: AnyBank,
    assignment: Sequence[Positions],
    ids: Sequence[str] | None = None,
  ) -> "ClientPopulation":
    """Builds a population from one array of example positions per client.

    Args:
      bank: the arrays, each with examples on its first axis.
      assignment: K integer arrays, each client's positions in the bank.
      ids: K client ids; by default "0", "1", ...

    Returns:
      The population.

    Raises:
      ValueError: as the class.

    >>> bank = {'y': np.array([0, 1, 2, 3, 4])}
    >>> population = ClientPopulation.from_lists(bank, [[4, 0], [2]])
    >>> population.sizes
    array([2, 1])
    >>> population.client(0)
    {'y': array([4, 0])}
    """
    held = [np.asarray(own) for own in assignment]
    if any(own.ndim == 0 for own in held):
      raise ValueError(
        "assignment: give each client's positions, not one number per example;"
        " ClientPopulation.from_ids(bank, ids) takes the examples' client ids"
      )
    names = tuple(map(str, range(len(assignment))) if ids is None else ids)
    members = np.zeros(0, np.int64)
    kinds = {(own.ndim, own.dtype.kind if own.size else "i") for own in held}
    # All at once, since there may be a million.
    if good := kinds <= {(1, "i"), (1, "u")}:
      members = np.concatenate(
        [members, *held], dtype=np.int64, casting="unsafe"
      )
      inside = (members >= 0) & (members < checks.num_examples(bank))
      good = bool(inside.all())
    for name, own in zip(names, () if good else held):
      positions_in(bank, own, f"client {name!r}")  # Raises for one of them.
    return cls(
      bank=bank,
      members=members.astype(np.int32),
      offsets=np.cumsum([0, *map(len, held)], dtype=np.int64),
      ids=names,
    )

  @classmethod
  def from_ids(
    cls, bank: AnyBank, ids: np.ndarray | Sequence[Any]
  ) -> "ClientPopulation":
    """Builds a population from the client id of each example.

    Args:
      bank: the arrays, each with N examples on its first axis.
      ids: N numbers or strings: who holds each example.

    Returns:
      The population; its clients are in the order of their ids.

    Raises:
      ValueError: there are not N ids.

    >>> bank = {'y': np.array([0, 1, 2, 3, 4])}
    >>> population = ClientPopulation.from_ids(bank, ['b', 'a', 'b', 'c', 'b'])
    >>> population.ids
    ('a', 'b', 'c')
    >>> population.client(1)
    {'y': array([0, 2, 4])}
    """
    array, n = np.asarray(ids), checks.num_examples(bank)
    if array.shape != (n,):
      raise ValueError(
        f"ids: of shape {array.shape} for a bank of {n} examples; give one for"
        " each example"
      )
    names, client = np.unique(array, return_inverse=True)
    sizes = np.bincount(client, minlength=len(names))
    return cls(
      bank=bank,
      members=np.argsort(client, kind="stable").astype(np.int32),
      offsets=np.concatenate([[0], np.cumsum(sizes)]),
      ids=tuple(map(str, names)),
    )

  def __len__(self) -> int:
    """The number of clients, K."""
    return len(self.ids)

  @property
  def sizes(self) -> np.ndarray:
    """`int64[K]`: how many examples each client holds."""
    return np.diff(self.offsets)

  def positions(self, k: int) -> np.ndarray:
    """`int32[n_k]`: the positions of client `k`'s examples in the bank.

    Args:
      k: the client's number, from 0.

    Returns:
      The positions, in the order in which the client holds them.

    Raises:
      IndexError: there is no client of that number.

    >>> bank = {'y': np.array([5, 6, 7])}
    >>> ClientPopulation.from_lists(bank, [[1], [2, 0]]).positions(1)
    array([2, 0], dtype=int32)
    """
    if not 0 <= k < len(self):
      raise IndexError(
        f"client {k} does not exist: there are {len(self)}, numbered from 0"
      )
    return self.members[self.offsets[k] : self.offsets[k + 1]]

  def client(self, k: int) -> dict[str, np.ndarray | jax.Array]:
    """The examples of client `k`.

    Args:
      k: the client's number, from 0.

    Returns:
      The bank's arrays `[n_k, ...]`, by name; copies.

    Raises:
      IndexError: there is no client of that number.

    >>> bank = {'y': np.array([5, 6, 7])}
    >>> ClientPopulation.from_lists(bank, [[1], [2, 0]]).client(1)
    {'y': array([7, 5])}
    """
    return {name: a[self.positions(k)] for name, a in self.bank.items()}

  def take(self, clients: Sequence[int] | np.ndarray) -> "ClientPopulation":
    """The population of some of the clients, over the same bank.

    Args:
      clients: their numbers, in their new order.

    Returns:
      The population.

    Raises:
      IndexError: there is no client of such a number.
      ValueError: they are not whole numbers, or one occurs twice.

    >>> bank = {'y': np.arange(5)}
    >>> population = ClientPopulation.from_lists(bank, [[0], [1, 2], [3, 4]])
    >>> population.take([2, 0]).ids
    ('2', '0')
    """
    chosen = checks.integers("clients: numbers", clients).astype(np.int64)
    for k in chosen[(chosen < 0) | (chosen >= len(self))]:
      self.positions(k)  # Raises.
    sizes = self.sizes[chosen]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    moved = np.repeat(self.offsets[chosen] - offsets[:-1], sizes)
    return ClientPopulation(
      self.bank,
      self.members[moved + np.arange(len(moved))],
      offsets,
      tuple(self.ids[k] for k in chosen),
    )

  def examples(self) -> Subset:
    """All examples that any client holds."""
    return Subset(self.bank, self.members)

  def subsets(self) -> list[Subset]:
    """Each client's examples."""
    return [Subset(self.bank, self.positions(k)) for k in range(len(self))]


def stratified(
  labels: np.ndarray, *, size: int, seed: int | Sequence[int]
) -> np.ndarray:
  """Draws a sample in which labels have the same shares as in all examples.

  Each label gives the integer part of its share of `size`; those with the
  largest remainders, ties broken at random, give one more.

  Args:
    labels: `int[N]`, label of each example.
    size: size of the sample, at most N.
    seed: integer or integers that fix the result.

  Returns:
    `int32[size]`, positions in random order.

  Raises:
    ValueError: the sample would be empty or larger than N, or `labels` is not
      one number per example.

  >>> labels = np.array([0] * 6 + [1] * 3)
  >>> np.bincount(labels[stratified(labels, size=6, seed=0)])
  array([4, 2])
  """
  labels = checks.classes(labels)
  if not 1 <= size <= len(labels):
    raise ValueError(
      f"size={size}: there are {len(labels)} examples, want 1 to {len(labels)}"
    )
  rng = np.random.default_rng(seed)
  classes, counts = np.unique(labels, return_counts=True)
  shares = counts * size / len(labels)
  take = np.floor(shares).astype(np.int64)
  ranks = np.lexsort((rng.random(len(classes)), take - shares))
  take[ranks[: size - take.sum()]] += 1
  drawn = [
    rng.permutation(np.flatnonzero(labels == c))[:n]
    for c, n in zip(classes, take)
  ]
  return rng.permutation(np.concatenate(drawn)).astype(np.int32)


def put_banks(*sets: ClientPopulation | Subset) -> list[dict[str, jax.Array]]:
  """Puts the banks of some sets on the device, shared banks only once.

  Args:
    *sets: populations and subsets.

  Returns:
    The bank of each set.

  Raises:
    ValueError: one is a bare bank, or an array is not of numbers.

  >>> bank = {'y': np.arange(6)}
  >>> clients = ClientPopulation.from_lists(bank, [[0, 1, 2], [3, 4, 5]])
  >>> one, same = put_banks(clients, clients.examples())
  >>> one['y'] is same['y']
  True
  """
  for i, given in enumerate(sets):
    if not isinstance(given, ClientPopulation):
      check_kind(given, f"set {i}", Subset)
    for name, array in given.bank.items():
      if array.dtype.kind in "OSUM" or not array.dtype.isnative:
        raise ValueError(
          f"set {i}: bank[{name!r}] is of type {array.dtype}, which a device"
          " cannot hold; convert it (astype), or leave it out of the bank"
        )
  banks = {id(s.bank): s.bank for s in sets}
  there = {
    key: {name: _put(array) for name, array in bank.items()}
    for key, bank in banks.items()
  }
  return [there[id(s.bank)] for s in sets]


def _put(array):
  """An array of a bank on the device, or on the first of several.

  Only an array with a layout of its own is bound to its device.
  """
  if jax.device_count() > 1:  # A mesh lays it out: see `Inline.compile`.
    return jax.device_put(array)
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  there = bank_format(array, here)
  return jax.device_put(array, None if there is here else there)
