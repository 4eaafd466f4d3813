"""Shards by label, and the federations of FML."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from hetfl.data import fml_images, partition
from tests.runs import needs_real_data, REAL

# --- Shards -----------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
  seed=st.integers(0, 2**32),
  clients=st.integers(1, 4).map(lambda k: 5 * k),
  p=st.sampled_from([2, 4, 6]),
  extra=st.integers(0, 9),
)
def test_shards_are_dealt_in_one_pattern(seed, clients, p, extra):
  each = clients * p // 10  # shards of a class
  # Ten classes of different sizes, in no order.
  rng = np.random.default_rng(seed)
  train = rng.permutation(np.repeat(np.arange(10), 3 * each + np.arange(10)))
  test = rng.permutation(np.repeat(np.arange(10), each + extra))
  single = rng.permutation(np.repeat(np.arange(10), each))  # one a shard
  sets = partition.shards(
    train, test, single, num_clients=clients, shards_per_client=p, seed=seed
  )
  counts = []
  for y, parts in zip((train, test, single), sets):
    np.testing.assert_array_equal(
      np.sort(np.concatenate(parts)), np.arange(len(y))
    )
    counts.append(np.stack([np.bincount(y[c], minlength=10) for c in parts]))
  np.testing.assert_array_equal(counts[0] > 0, counts[1] > 0)
  assert ((counts[0] > 0).sum(axis=1) <= p).all()
  shards = counts[2]
  assert (shards.sum(axis=1) == p).all() and (shards.sum(axis=0) == each).all()
  # A class's shards are equal to one.
  for y, of_clients in zip((train, test), counts):
    small, rest = np.divmod(np.bincount(y), each)
    assert (of_clients >= shards * small).all()
    assert (of_clients <= shards * (small + (rest > 0))).all()


def test_shards_by_hand():
  # K = 5, p = 2, ten classes: one shard a class, so clients share none.
  y = np.repeat(np.arange(10), 4)
  (parts,) = partition.shards(y, num_clients=5, shards_per_client=2, seed=0)
  classes = [set(y[c].tolist()) for c in parts]
  assert [len(c) for c in classes] == [2] * 5
  assert set.union(*classes) == set(range(10))
  again = partition.shards(y, num_clients=5, shards_per_client=2, seed=0)
  for a, b in zip(parts, again[0]):
    np.testing.assert_array_equal(a, b)
  with pytest.raises(
    ValueError,
    match="num_clients=4: 10 classes cannot share 8 .* multiple of 5 c",
  ):
    partition.shards(y, num_clients=4, shards_per_client=2, seed=0)
  with pytest.raises(
    ValueError, match="class 0 has only 4 examples for 6 shards"
  ):
    partition.shards(y, num_clients=30, shards_per_client=2, seed=0)


# --- Federations ------------------------------------------------------------


def test_bad_clients_have_wrong_labels_and_others_have_not():
  good = fml_images.load_fml_images(["digits"])
  bad = fml_images.load_fml_images(
    ["digits"], bad_clients=[2], bad_label_share=0.5
  )
  for k, (a, b) in enumerate(zip(good.clients, bad.clients)):
    np.testing.assert_array_equal(a.train.index, b.train.index)
    wrong = a.train.bank["y"][a.train.index] != b.train.bank["y"][b.train.index]
    # Half are drawn anew, and a tenth of these by chance as they were.
    assert wrong.mean() == pytest.approx(0.45 if k == 2 else 0, abs=0.08)
    np.testing.assert_array_equal(
      a.validation.bank["y"], b.validation.bank["y"]
    )


def test_dirichlet_clients_validate_on_what_they_train_on():
  skew = {}
  default = fml_images.DIRICHLET_ALPHA
  for alpha in (0.1, default, 100.0):
    images = fml_images.load_fml_images(
      ["digits"],
      partition="dirichlet",
      **({} if alpha == default else {"partition_alpha": alpha}),
    )
    train, held = (
      np.stack([np.bincount(s.bank["y"][s.index], minlength=10) for s in sets])
      for sets in zip(*((c.train, c.validation) for c in images.clients))
    )
    assert (train.sum(), held.sum()) == (1437, 360)
    # Digits has 1,437 and 360 images, not quite in the same shares.
    shares = [counts / counts.sum(0) for counts in (train, held)]
    assert np.abs(shares[0] - shares[1]).max() < 0.06
    skew[alpha] = shares[0].max(0).mean()
  assert skew[0.1] > skew[default] + 0.1 > skew[100.0] + 0.2


def test_what_is_out_of_range_is_refused():
  load = fml_images.load_fml_images
  with pytest.raises(ValueError, match="datasets=svhn: choose from digits"):
    load(["svhn"])
  with pytest.raises(ValueError, match="partition=noniid4"):
    load(["digits"], partition="noniid4")
  with pytest.raises(ValueError, match="2 data sets for 5 clients"):
    load(["digits", "digits"])
  with pytest.raises(ValueError, match="bad_clients=5: .* 0 and at most 4"):
    load(["digits"], bad_clients=[5])


@needs_real_data
def test_the_papers_federations():
  # Figure 6: two clients with all of a data set each.
  both = fml_images.load_fml_images(
    ["cifar10", "cifar100"], num_clients=2, data_dir=REAL
  )
  assert both.num_classes == {"cifar10": 10, "cifar100": 100}
  for client in both.clients:
    assert len(client.train.index) == 50_000
    assert len(client.validation.index) == 10_000
  # Table 1, Non-IID (1): 60 shards' worth of 100 classes, 10,000 images each.
  images = fml_images.load_fml_images(
    ["cifar100"], partition="noniid1", data_dir=REAL
  )
  for client in images.clients:
    y = client.train.bank["y"][client.train.index]
    counts = np.bincount(y, minlength=100)
    # Shards of 166 or 167 images, so within 60 of the mean.
    assert abs(len(y) - 10_000) <= 60 and (counts > 0).sum() <= 60
    held = client.validation.bank["y"][client.validation.index]
    np.testing.assert_array_equal(
      counts > 0, np.bincount(held, minlength=100) > 0
    )
  with pytest.raises(ValueError, match="cannot see images of different shapes"):
    fml_images.load_fml_images(
      ["mnist", "cifar10"], num_clients=2, data_dir=REAL
    )
