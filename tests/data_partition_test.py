from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from hetfl import population
from hetfl.data import partition


def _entropy(clients, labels):
  classes = int(labels.max()) + 1
  counts = np.stack(
    [np.bincount(labels[c], minlength=classes) for c in clients]
  )
  p = counts / counts.sum(1, keepdims=True)
  return -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(1)


def _assert_same(a, b):
  assert len(a) == len(b)
  for x, y in zip(a, b):
    np.testing.assert_array_equal(x, y)


def _cifar100_labels():
  fine = np.random.default_rng(7).permutation(np.repeat(np.arange(100), 500))
  return fine * 7 % 20, fine  # 5 fine labels for each coarse one


def test_pachinko_at_the_size_of_federated_cifar100():
  coarse, fine = _cifar100_labels()
  clients = partition.pachinko(
    coarse, fine, num_clients=500, examples_per_client=100, seed=0
  )
  assert [len(c) for c in clients] == [100] * 500
  used = np.concatenate(clients)
  assert used.dtype == np.int32
  np.testing.assert_array_equal(np.sort(used), np.arange(50_000))

  iid = partition.iid(50_000, num_clients=500, seed=0)
  # Dirichlet(0.1) over 20 labels has an expected entropy of
  # digamma(3) - digamma(1.1) = 1.35, uniform log 20 = 3.00.
  first = _entropy(clients[:100], coarse).mean()
  assert 1.1 < first < 1.5
  assert _entropy(clients, coarse).mean() < 0.5 * _entropy(iid, coarse).mean()
  # Dirichlet(10) over 5 fine labels is mild: within a client's largest coarse
  # label its fine labels are nearly uniform (log 5 = 1.61).
  within = []
  for c in clients[:100]:
    mine = fine[c][coarse[c] == np.bincount(coarse[c]).argmax()]
    p = np.unique(mine, return_counts=True)[1] / len(mine)
    within.append(-(p * np.log(p)).sum())
  assert np.mean(within) > 1.4


def test_pachinko_is_a_function_of_its_seed():
  coarse, fine = _cifar100_labels()
  kwargs = dict(num_clients=20, examples_per_client=50)
  a = partition.pachinko(coarse, fine, seed=3, **kwargs)
  np.random.seed(0)  # the global generator has no effect
  _assert_same(a, partition.pachinko(coarse, fine, seed=3, **kwargs))
  b = partition.pachinko(coarse, fine, seed=4, **kwargs)
  assert any((x != y).any() for x, y in zip(a, b))


@settings(max_examples=60, deadline=None)
@given(
  seed=st.integers(0, 2**32),
  tree=st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
  ),
  examples_per_client=st.integers(1, 7),
  # 1e-6 makes weights underflow, so that labels run out before their turn.
  alpha=st.sampled_from([1e-6, 1e-2, 0.1, 1.0, 100.0]),
  beta=st.sampled_from([1e-6, 10.0]),
)
def test_pachinko_uses_nothing_twice(
  seed, tree, examples_per_client, alpha, beta
):
  leaves = [(c, f, n) for c, fs in enumerate(tree) for f, n in enumerate(fs)]
  coarse = np.concatenate([np.full(n, c) for c, _, n in leaves])
  fine = np.concatenate([np.full(n, f) for _, f, n in leaves])
  num_clients = len(fine) // examples_per_client
  if not num_clients:
    return
  clients = partition.pachinko(
    coarse,
    fine,
    num_clients=num_clients,
    examples_per_client=examples_per_client,
    seed=seed,
    alpha=alpha,
    beta=beta,
  )
  assert [len(c) for c in clients] == [examples_per_client] * num_clients
  used = np.concatenate(clients)
  assert len(np.unique(used)) == len(used)
  assert used.min() >= 0 and used.max() < len(fine)


def test_numbers_of_clients_are_whole():
  for number in (2.5, 0):
    with pytest.raises(ValueError, match=f"num_clients={number}: must be a wh"):
      partition.iid(10, num_clients=number, seed=0)
    with pytest.raises(ValueError, match=f"num_clients={number}: must be a wh"):
      partition.dirichlet(
        np.zeros(10, int), num_clients=number, alpha=1, seed=0
      )


def test_pachinko_refuses_more_than_there_is():
  with pytest.raises(
    ValueError, match="examples_per_client=4: .* least 1 and at most 3"
  ):
    partition.pachinko(
      np.zeros(10), np.zeros(10), num_clients=3, examples_per_client=4, seed=0
    )
  with pytest.raises(ValueError, match="alpha=0"):
    partition.pachinko(
      np.zeros(4),
      np.zeros(4),
      num_clients=1,
      examples_per_client=4,
      seed=0,
      alpha=0,
    )


@settings(max_examples=60, deadline=None)
@given(
  seed=st.integers(0, 2**32),
  labels=st.lists(st.integers(0, 3), min_size=1, max_size=60),
  clients=st.floats(0, 1),
  alpha=st.sampled_from([1e-4, 0.1, 1.0, 1e4]),
)
def test_dirichlet_and_iid_use_everything_once(seed, labels, clients, alpha):
  labels = np.array(labels)
  num_clients = 1 + int(clients * (len(labels) - 1))
  kwargs = dict(num_clients=num_clients, seed=seed)
  for parts in (
    partition.dirichlet(labels, alpha=alpha, **kwargs),
    partition.iid(len(labels), **kwargs),
  ):
    assert len(parts) == num_clients
    assert min(len(p) for p in parts) >= 1
    np.testing.assert_array_equal(
      np.sort(np.concatenate(parts)), np.arange(len(labels))
    )


def test_dirichlet_skew_grows_as_alpha_shrinks():
  labels = np.arange(10_000) % 10
  skew = [
    _entropy(
      partition.dirichlet(labels, num_clients=20, seed=0, alpha=a), labels
    ).mean()
    for a in (0.05, 0.5, 1000.0)
  ]
  assert skew[0] + 0.3 < skew[1] < skew[2] - 0.3
  assert skew[2] > 2.29  # log 10 = 2.303
  _assert_same(
    partition.dirichlet(labels, num_clients=20, seed=1, alpha=0.5),
    partition.dirichlet(labels, num_clients=20, seed=1, alpha=0.5),
  )
  with pytest.raises(ValueError, match="num_clients=11.*10 examples"):
    partition.dirichlet(labels[:10], num_clients=11, seed=0, alpha=1.0)


@pytest.mark.parametrize(
  "labels", [[0.0, np.nan], [0.5, 1.0], np.eye(2, dtype=int)]
)
def test_examples_have_one_class_each(labels):
  says = pytest.raises(ValueError, match="labels: .*: give a whole number")
  with says:
    partition.dirichlet(labels, num_clients=1, seed=0, alpha=1.0)
  with says:
    partition.shards(labels, num_clients=1, shards_per_client=2, seed=0)
  with says:
    partition.matching([[0]], [0, 1], labels, seed=0)
  with says:
    partition.pachinko(
      labels, labels, num_clients=1, examples_per_client=1, seed=0
    )
  with says:
    population.stratified(labels, size=1, seed=0)


def test_shards_and_matching_take_classes_of_any_names():
  numbers = np.array([-1, 1, 0, 0] * 10)
  names = np.array(["x", "b", "a", "a"] * 10)
  for labels in (numbers, numbers.astype(float), names):
    (parts,) = partition.shards(
      labels, num_clients=3, shards_per_client=2, seed=0
    )
    matched = partition.matching(parts, labels, labels, seed=0)
    for dealt in (parts, matched):
      assert sorted(np.concatenate(dealt).tolist()) == list(range(40))


def test_empty_clients_take_from_the_largest():
  """With one class and an alpha of nearly zero, one client gets everything."""
  parts = partition.dirichlet(
    np.zeros(9, int), num_clients=5, seed=0, alpha=1e-6
  )
  assert sorted(map(len, parts)) == [1, 1, 1, 1, 5]
  # Two classes: the larger one's client gives until both are as large.
  labels = np.repeat([0, 1], [6, 3])
  for seed in range(20):
    parts = partition.dirichlet(labels, num_clients=4, seed=seed, alpha=1e-6)
    given = [n for n in map(len, parts) if n > 1]
    assert given in ([4, 3], [3, 4], [6]), given


def test_matching_has_the_shares_of_the_partition():
  labels, other = np.arange(10_000) % 10, np.arange(2_000) % 10
  parts = partition.dirichlet(labels, num_clients=20, seed=0, alpha=0.3)
  matched = partition.matching(parts, labels, other, seed=0)
  np.testing.assert_array_equal(
    np.sort(np.concatenate(matched)), np.arange(2_000)
  )
  count = lambda parts, y: np.stack(
    [np.bincount(y[own], minlength=10) for own in parts]
  )
  # A fifth of each, to the cut at each end; and to one for an empty client.
  assert np.abs(count(matched, other) - count(parts, labels) / 5).max() <= 2
  # A label that the partition lacks is split evenly: 7 over 3 clients.
  parts = [np.array([k]) for k in range(3)]
  (few, *_) = partition.matching(
    parts, np.zeros(3, int), np.ones(7, int), seed=1
  )
  assert len(few) in (2, 3)
  # One more than the greatest label is none of a byte.
  bytes = np.array([255, 0, 0, 3], np.uint8)
  for alike in (bytes, bytes.astype(int)):
    own = partition.matching([[0, 3], [1, 2]], alike, alike, seed=0)
    assert [set(alike[held].tolist()) for held in own] == [{255, 3}, {0}]
  with pytest.raises(ValueError, match="=3: more than the 2 .* test images"):
    partition.matching(parts, np.zeros(3, int), np.ones(2, int), seed=0)


def test_clients_draw_from_everywhere_and_by_the_seed():
  """Three clients get sixty examples of one class in random order."""
  zeros = np.zeros(60, int)
  thirds = [np.arange(k, 60, 3) for k in range(3)]
  ways = {
    "pachinko": lambda seed: partition.pachinko(
      zeros, zeros, num_clients=3, examples_per_client=20, seed=seed
    ),
    "dirichlet": lambda seed: partition.dirichlet(
      zeros, num_clients=3, seed=seed, alpha=1e6
    ),
    "matching": lambda seed: partition.matching(
      thirds, zeros, zeros, seed=seed
    ),
    "iid": lambda seed: partition.iid(60, num_clients=3, seed=seed),
    "shards": lambda seed: partition.shards(
      zeros, num_clients=3, shards_per_client=2, seed=seed
    )[0],
  }
  for name, way in ways.items():
    for own in way(0):
      counts, _ = np.histogram(own, 3, (0, 60))
      assert len(own) in (19, 20, 21) and counts.min() > 1, name
    assert set(way(0)[0].tolist()) != set(way(1)[0].tolist()), name
  drawn = population.stratified(zeros, size=20, seed=0)
  assert np.histogram(drawn, 3, (0, 60))[0].min() > 1
  assert (np.diff(drawn) < 0).any()


def test_codist_split_is_the_papers():
  kwargs = dict(distill_clients=135, heldout_clients=50)
  splits = [
    partition.codist_split(500, seed=0, high_capacity_clients=n, **kwargs)
    for n in (31, 47, 63)
  ]
  for split, n in zip(splits, (31, 47, 63)):
    assert [len(p) for p in split] == [315, n, 135, 50]
    together = np.concatenate([split.pool, split.distill, split.heldout])
    np.testing.assert_array_equal(np.sort(together), np.arange(500))
    assert set(split.high_capacity) <= set(split.pool)
    for part in ("pool", "distill", "heldout"):
      np.testing.assert_array_equal(
        getattr(split, part), getattr(splits[0], part)
      )
  # A sample, and not the first of the pool: from all four quarters of it.
  ranks = np.searchsorted(splits[0].pool, splits[0].high_capacity)
  assert np.histogram(ranks, 4, (0, 315))[0].min() > 2
  small, middle, large = (set(s.high_capacity) for s in splits)
  assert small < middle < large
  other = partition.codist_split(
    500, seed=1, high_capacity_clients=47, **kwargs
  )
  assert set(other.pool) != set(splits[0].pool)
  with pytest.raises(ValueError, match="clients=316.*at most 315"):
    partition.codist_split(500, seed=0, high_capacity_clients=316, **kwargs)
