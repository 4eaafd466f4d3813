"""Partitions: which client holds which examples.

Each partition is a pure function of its arguments, seed included, and gives
one integer array of example positions per client, as
`hetfl.population.ClientPopulation.from_lists` takes them.
"""

import bisect
from collections.abc import Sequence
import math
from typing import NamedTuple

import numpy as np

from hetfl import checks
from hetfl.population import Positions
from hetfl.streams import generator, Stream


class CodistSplit(NamedTuple):
  """The clients of a codistillation experiment, by their role.

  Attributes:
    pool: `int64[K_pool]`, the clients that train the small model.
    high_capacity: `int64[K_high]`, those of the pool that also train the
      large model.
    distill: `int64[K_distill]`, clients whose examples are the server's
      distillation data.
    heldout: `int64[K_heldout]`, clients whose examples choose the
      hyper-parameters.
  """

  pool: np.ndarray
  high_capacity: np.ndarray
  distill: np.ndarray
  heldout: np.ndarray


def pachinko(
  coarse: np.ndarray,
  fine: np.ndarray,
  *,
  num_clients: int,
  examples_per_client: int,
  seed: int,
  alpha: float = 0.1,
  beta: float = 10.0,
) -> list[np.ndarray]:
  """Pachinko allocation: skewed coarse labels, milder skew of fine labels.

  Client after client draws a distribution over the coarse labels that still
  have examples, Dirichlet(alpha), and for each of them one over its remaining
  fine labels, Dirichlet(beta). Each of the client's examples is then a draw of
  a coarse label, a fine label and, uniformly, an unused example of that label.
  A label that runs out is removed and the distribution renormalised. With
  `coarse` equal to `fine` this is a partition by label skew with clients of
  equal size (Hsu et al. 2019).

  Args:
    coarse: `int[N]`, coarse label of each example.
    fine: `int[N]`, fine label of each example, within its coarse label.
    num_clients: K.
    examples_per_client: examples of each client; K times this may be at most
      N. If it is less, the other examples stay unused.
    seed: non-negative integer; with the other arguments it fixes the result.
    alpha: concentration of the Dirichlet over coarse labels, for each label.
    beta: concentration of the Dirichlet over fine labels, for each label.

  Returns:
    K arrays `int32[examples_per_client]`; no example is in two of them.

  Raises:
    ValueError: more examples asked for than there are, or a concentration that
      is not positive.

  >>> labels = np.arange(12) // 2  # 6 fine labels of 2 examples each
  >>> clients = pachinko(
  ...     labels // 3, labels, num_clients=3, examples_per_client=4, seed=0)
  >>> sorted(np.concatenate(clients).tolist())
  [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]

  Reference: Li and McCallum 2006 for the prior; Reddi et al. 2021 and the
    CIFAR-100 of TensorFlow Federated (TFF) for its use here. TFF's seed and
    script are not public, so this draws from the same distribution, but does
    not give TFF's clients.

  Departure: if every remaining label has probability zero (an underflow at
    small alpha), a new distribution is drawn over those labels.
  """
  coarse, fine = checks.classes(coarse), checks.classes(fine)
  checks.positive(alpha=alpha, beta=beta)
  checks.counts(num_clients=num_clients)
  most = len(fine) // num_clients
  checks.whole(1, most, examples_per_client=examples_per_client)
  rng = generator(Stream.PACHINKO, seed)

  # A leaf is a (coarse, fine) pair. Its unused examples are a shuffled stack:
  # popping it is a uniform draw without replacement.
  leaves, leaf_of = np.unique(
    np.stack([coarse, fine]), axis=1, return_inverse=True
  )
  order = rng.permutation(len(fine))
  piles = _by_owner(leaf_of.reshape(-1)[order], leaves.shape[1])
  stacks = [order[pile].tolist() for pile in piles]
  children = [
    np.flatnonzero(leaves[0] == root) for root in np.unique(leaves[0])
  ]
  left = np.ones(len(stacks), bool)  # leaves that have unused examples
  roots_left = lambda: np.array([left[leaves].any() for leaves in children])

  clients = []
  for _ in range(num_clients):
    to_root = _Multinomial(rng, roots_left(), alpha)
    # Only coarse labels that are drawn need a fine distribution. It does not
    # affect which ones are drawn, so it can be drawn late.
    to_leaf = {}
    picked = []
    for u, v in rng.random((examples_per_client, 2)).tolist():
      root = to_root.draw(u)
      below = children[root]
      if root not in to_leaf:
        to_leaf[root] = _Multinomial(rng, left[below], beta)
      leaf = below[to_leaf[root].draw(v)]
      picked.append(stacks[leaf].pop())
      if not stacks[leaf]:
        left[leaf] = False
        to_leaf[root].keep(left[below])
        to_root.keep(roots_left())
    clients.append(np.array(picked, np.int32))
  return clients


class _Multinomial:
  """A Dirichlet draw over the outcomes that are left."""

  def __init__(self, rng, left: np.ndarray, concentration: float):
    self._rng, self._concentration = rng, concentration
    self._weights = np.zeros(len(left))
    self.keep(left)

  def keep(self, left: np.ndarray):
    """Outcomes that are not left are never drawn again."""
    self._weights = np.where(left, self._weights, 0)
    if left.any() and not self._weights.any():
      concentration = np.full(left.sum(), float(self._concentration))
      self._weights[left] = self._rng.dirichlet(concentration)
    self._sums = np.cumsum(self._weights).tolist()

  def draw(self, u: float) -> int:
    """The outcome at quantile `u`, uniform in [0, 1)."""
    total = self._sums[-1]
    # Never one of weight zero, even if u * total is rounded to the total.
    at = bisect.bisect_right(self._sums, u * total)
    return min(at, bisect.bisect_left(self._sums, total))


def dirichlet(
  labels: np.ndarray, *, num_clients: int, seed: int, alpha: float
) -> list[np.ndarray]:
  """Label-skew partition: a Dirichlet divides each label's examples.

  For each label, shares of the K clients are drawn from Dirichlet(alpha) and
  the label's examples, shuffled, are cut at their cumulative sums. Clients
  differ in size. Every example is used exactly once. A client left
  empty then takes one example, chosen uniformly, from the client that has
  the most (on a tie, the first), so no client is empty.

  Args:
    labels: `int[N]`, label of each example.
    num_clients: K, at most N.
    seed: non-negative integer; with the other arguments it fixes the result.
    alpha: concentration, for each client: small is skewed, large is even.

  Returns:
    K arrays `int32[n_k]` of ascending positions, `n_k >= 1`, together all of
    `0..N-1` once each.

  Raises:
    ValueError: more clients than examples, alpha not positive, or labels that
      are not classes.

  >>> clients = dirichlet(
  ...     np.arange(20) % 4, num_clients=5, seed=0, alpha=0.5)
  >>> sum(len(c) for c in clients), min(len(c) for c in clients) > 0
  (20, True)

  Reference: Yurochkin et al. 2019.

  Departure: the paper does not consider empty clients.
  """
  labels = checks.classes(labels)
  checks.positive(alpha=alpha)
  _check_clients(num_clients, len(labels))
  rng = generator(Stream.DIRICHLET, seed)
  concentration = np.full(num_clients, float(alpha))
  return _share_out(
    labels, num_clients, lambda label: rng.dirichlet(concentration), rng
  )


def matching(
  clients: Sequence[Positions],
  labels: np.ndarray,
  other: np.ndarray,
  *,
  seed: int,
) -> list[np.ndarray]:
  """Divides other examples in the pattern of a partition.

  Of each label a client gets the share that it has in the partition; labels
  that are not in the partition are divided equally. No client is left empty, as
  in `dirichlet`.

  Args:
    clients: K arrays of positions, the partition.
    labels: `int[N]`, the labels of the partitioned examples.
    other: `int[M]`, the labels of other examples, such as the test images; M
      at least K.
    seed: non-negative integer; with the other arguments it fixes the result.

  Returns:
    K arrays `int32[m_k]` of ascending positions, together all of `0..M-1`
    once each.

  Raises:
    ValueError: more clients than other examples.

  >>> labels, other = np.array([0, 0, 0, 1]), np.array([0, 1, 0, 0, 1, 0, 0, 0])
  >>> of_first, of_second = matching([[0], [1, 2, 3]], labels, other, seed=0)
  >>> np.sort(other[of_first]), np.sort(other[of_second])  # 2 and 4 of 6 zeros
  (array([0, 0]), array([0, 0, 0, 0, 1, 1]))
  """
  (labels, other), names = _numbered(labels, other)
  like = " that are divided likewise, such as the test images"
  _check_clients(len(clients), len(other), like)
  held = [labels[np.asarray(own, np.int64)] for own in clients]
  each = [np.bincount(y, minlength=len(names)) for y in held]
  counts = np.stack(each, axis=1)
  counts[~counts.any(axis=1)] = 1
  shares = counts / counts.sum(axis=1, keepdims=True)
  rng = generator(Stream.MATCHING, seed)
  return _share_out(other, len(clients), lambda label: shares[label], rng)


def _numbered(*labels) -> tuple[list[np.ndarray], np.ndarray]:
  """Several sets' labels as numbers from 0, and the classes' own names."""
  given = list(map(checks.classes, labels))
  names, numbers = np.unique(np.concatenate(given), return_inverse=True)
  ends = np.cumsum([len(y) for y in given])[:-1]
  return np.split(numbers, ends), names


def _share_out(labels, num_clients, shares, rng) -> list[np.ndarray]:
  """Cuts each label's shuffled examples at the sums of `shares(label)`."""
  owner = np.empty(len(labels), np.int64)
  for label in np.unique(labels):
    positions = rng.permutation(np.flatnonzero(labels == label))
    ends = np.cumsum(shares(label)) * len(positions)
    cuts = np.floor(ends + 1e-9).astype(np.int64)  # 2, not 1.9999...
    cuts[-1] = len(positions)  # the sum of the shares is 1 only to rounding
    cuts = np.clip(cuts, 0, len(positions))
    sizes: np.ndarray = np.diff(cuts, prepend=0)
    owner[positions] = np.repeat(np.arange(num_clients), sizes)
  sizes = np.bincount(owner, minlength=num_clients)
  for empty in np.flatnonzero(sizes == 0):
    largest = np.argmax(sizes)
    owner[rng.choice(np.flatnonzero(owner == largest))] = empty
    sizes[largest] -= 1
    sizes[empty] = 1
  return _by_owner(owner, num_clients)


def _by_owner(owner: np.ndarray, num_clients: int) -> list[np.ndarray]:
  """Each client's positions, in order."""
  order = np.argsort(owner, kind="stable").astype(np.int32)
  sizes = np.bincount(owner, minlength=num_clients)
  return np.split(order, np.cumsum(sizes)[:-1])


def iid(num_examples: int, *, num_clients: int, seed: int) -> list[np.ndarray]:
  """Shuffles the examples and deals them out evenly.

  Args:
    num_examples: N.
    num_clients: K, at most N.
    seed: non-negative integer; with the other arguments it fixes the result.

  Returns:
    K arrays `int32[n_k]` whose sizes differ by one at most, together all of
    `0..N-1` once each.

  Raises:
    ValueError: more clients than examples.

  >>> [len(c) for c in iid(11, num_clients=3, seed=0)]
  [4, 4, 3]
  """
  _check_clients(num_clients, num_examples)
  order = generator(Stream.IID, seed).permutation(num_examples)
  return np.array_split(order.astype(np.int32), num_clients)


def shards(
  *labels: np.ndarray, num_clients: int, shards_per_client: int, seed: int
) -> list[list[np.ndarray]]:
  """Cuts each class into shards and deals each client some of them.

  Every class is cut into `K p / C` shards, so that a shard has one class only;
  the K p shards are shuffled and dealt out, p to each client, which then has
  at most p classes. Several sets of labels, such as those for training and
  for validation, are dealt out in the same pattern: in every set a client has
  the same number of shards of each class.

  Args:
    *labels: for each set `int[N]`, the label of each example, or its name.
    num_clients: K.
    shards_per_client: p; K p must be a multiple of C.
    seed: non-negative integer; with the other arguments it fixes the result.

  Returns:
    For each set K arrays `int32[n_k]` of positions, class after class,
    together all of `0..N-1` once each.

  Raises:
    ValueError: K p is not a multiple of C, or a class has fewer examples than
      shards.

  Reference: Shen et al. 2020, section 5.1 (K = 5; p = 6, 4, 2 of 10 classes,
    60, 40, 20 of 100): "We divide the dataset by label into K p shards with the
    size of n/(K p)", so that data is "equally distributed". If classes are
    equally large (CIFAR), that is what this gives. Departure: if they are not
    (MNIST), equal cuts of the sorted examples would straddle classes; ours do
    not, and the clients' sizes differ by up to 15 % (11,263 to 13,007).

  >>> train, test = shards(np.arange(12) % 4, np.arange(8) % 4,
  ...                      num_clients=2, shards_per_client=2, seed=0)
  >>> [sorted(set((c % 4).tolist())) for c in train]
  [[0, 3], [1, 2]]
  >>> [sorted(set((c % 4).tolist())) for c in test]
  [[0, 3], [1, 2]]
  """
  numbered, names = _numbered(*labels)
  _check_clients(num_clients, min(map(len, numbered)))
  checks.counts(shards_per_client=shards_per_client)
  num_classes = len(names)
  total = num_clients * shards_per_client
  each, rest = divmod(total, num_classes)
  if rest:
    step = num_classes // math.gcd(num_classes, shards_per_client)
    raise ValueError(
      f"num_clients={num_clients}: {num_classes} classes cannot share {total}"
      f" shards; use a multiple of {step} clients, or another partition"
    )
  rng = generator(Stream.LABEL_SHARDS, seed)
  # Shard number c * each + i is the i-th of class c.
  dealt = rng.permutation(total).reshape(num_clients, shards_per_client)
  sets = []
  for y in numbered:
    pieces = []
    for c in range(num_classes):
      members = rng.permutation(np.flatnonzero(y == c)).astype(np.int32)
      if len(members) < each:
        raise ValueError(
          f"num_clients={num_clients}: class {names[c]} has only {len(members)}"
          f" examples for {each} shards; use fewer clients"
        )
      pieces += np.array_split(members, each)
    sets.append(
      [np.concatenate([pieces[i] for i in np.sort(own)]) for own in dealt]
    )
  return sets


def skew(counts: np.ndarray) -> dict[str, float]:
  """How unlike the clients of a partition are, in classes and in sizes.

  Args:
    counts: `int[K, C]`, each client's examples of each class; at least one.

  Returns:
    `total_variation`, `mean_k sum_c |p_kc - p_c| / 2`, between a client's
    shares of the classes and those of all examples: 0 if all are alike, at most
    1. `effective_clients`, `1 / sum_k q_k^2` of their shares of the examples: K
    if all have equally many.

  The first class has 5/6 of all examples, and 1 and 1/2 of the clients'.

  >>> skew(np.array([[4, 0], [1, 1]]))  # (1/6 + 1/3) / 2; 1 / (4/9 + 1/9)
  {'total_variation': 0.25, 'effective_clients': 1.8}
  """
  counts = np.asarray(counts, np.float64)
  sizes, whole = counts.sum(axis=1), counts.sum(axis=0) / counts.sum()
  apart = np.abs(counts / sizes[:, None] - whole).sum(axis=1) / 2
  return {
    "total_variation": float(apart.mean()),
    "effective_clients": float(sizes.sum() ** 2 / np.square(sizes).sum()),
  }


def codist_split(
  num_clients: int,
  *,
  seed: int,
  distill_clients: int = 0,
  heldout_clients: int = 0,
  high_capacity_clients: int,
) -> CodistSplit:
  """Splits clients into pool, distillation and held-out clients.

  The pool is all clients except the distillation and held-out clients. The
  high capacity clients are a sample of the pool; for one seed a smaller sample
  is nested in a larger one, and the other parts do not depend on its size.

  Args:
    num_clients: K.
    seed: non-negative integer; with the other arguments it fixes the result.
    distill_clients: clients whose examples are distillation data.
    heldout_clients: clients whose examples choose hyper-parameters.
    high_capacity_clients: clients of the pool that train the large model too.

  Returns:
    The split; client indices ascend in each of its arrays.

  Raises:
    ValueError: a part is negative, the pool would be empty, or it has fewer
      clients than `high_capacity_clients`.

  >>> split = codist_split(500, seed=0, distill_clients=135,
  ...                      heldout_clients=50, high_capacity_clients=47)
  >>> [len(part) for part in split]
  [315, 47, 135, 50]

  Reference: Lichtarge et al. 2023, which counts examples: CIFAR-100's
    50,000 are a pool of 31,500, 13,500 for distillation (Table 4) and 5,000
    held out (Table 3); the high capacity pool has 4,700 (Table 4), 3,100 or
    6,300 (Table 1).
  """
  checks.whole(0, num_clients - 1, distill_clients=distill_clients)
  most = num_clients - 1 - distill_clients  # One is left for the pool.
  checks.whole(0, most, heldout_clients=heldout_clients)
  most = num_clients - distill_clients - heldout_clients
  checks.whole(1, most, high_capacity_clients=high_capacity_clients)
  order = generator(Stream.POOLS, seed).permutation(num_clients)
  heldout, distill, pool = np.split(
    order, [heldout_clients, heldout_clients + distill_clients]
  )
  high_capacity = pool[:high_capacity_clients]
  return CodistSplit(*map(np.sort, (pool, high_capacity, distill, heldout)))


def _check_clients(num_clients: int, num_examples: int, kind: str = ""):
  checks.counts(num_clients=num_clients)
  if num_clients > num_examples:
    raise ValueError(
      f"num_clients={num_clients}: more than the {num_examples} examples{kind}"
    )
