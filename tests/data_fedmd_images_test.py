"""FedMD's partitions and environments."""

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from hetfl import population
from hetfl.data import DataError, fedmd_images, vision
from tests.runs import needs_real_data, REAL


@settings(max_examples=40, deadline=None)
@given(
  st.lists(st.integers(1, 30), min_size=1, max_size=6),
  st.integers(0, 1000),
  st.data(),
)
def test_stratified_keeps_the_shares(counts, seed, data):
  labels = np.repeat(np.arange(len(counts)), counts)
  size = data.draw(st.integers(1, len(labels)))
  drawn = population.stratified(labels, size=size, seed=seed)
  assert len(set(drawn.tolist())) == size
  taken = np.bincount(labels[drawn], minlength=len(counts))
  # The whole part of its share, or one more.
  share = np.array(counts) * size / len(labels)
  assert (taken >= np.floor(share)).all() and (taken <= np.ceil(share)).all()
  np.testing.assert_array_equal(
    drawn, population.stratified(labels, size=size, seed=seed)
  )


def test_the_largest_remainders_get_one_more():
  # Of 4 they have shares of 2, 1.2 and 0.8; of 7, of 3.5, 2.1 and 1.4.
  labels = np.repeat(np.arange(3), [5, 3, 2])
  for size, taken in ((4, [2, 1, 1]), (7, [4, 2, 1])):
    drawn = population.stratified(labels, size=size, seed=0)
    assert np.bincount(labels[drawn]).tolist() == taken


def test_equal_classes_are_disjoint_and_exact():
  labels = np.random.default_rng(0).permutation(np.arange(300) % 6)
  parts = fedmd_images.equal_classes(
    labels, num_clients=10, examples_per_class=3, seed=0
  )
  assert len(set(np.concatenate(parts).tolist())) == 10 * 6 * 3
  for part in parts:
    assert np.bincount(labels[part]).tolist() == [3] * 6
  with pytest.raises(
    ValueError, match="examples_per_class=3: .* want 60 of .* 50"
  ):
    fedmd_images.equal_classes(
      labels, num_clients=20, examples_per_class=3, seed=0
    )


def test_one_writer_each():
  writers = np.repeat(np.arange(8), np.arange(1, 9))
  parts = fedmd_images.one_writer(
    writers, num_clients=3, min_examples=5, seed=1
  )
  seen = [set(writers[part].tolist()) for part in parts]
  assert all(len(s) == 1 for s in seen) and len(set().union(*seen)) == 3
  # Writer w wrote w + 1: all of it, and at least five.
  assert all(len(p) == s.pop() + 1 >= 5 for p, s in zip(parts, seen))
  with pytest.raises(ValueError, match="num_parties=5: only 4 writers"):
    fedmd_images.one_writer(writers, num_clients=5, min_examples=5, seed=1)


def test_one_subclass_each():
  # Two coarse classes of five fine ones with ten examples each.
  fine = np.repeat(np.arange(10), 10)
  coarse = fine // 5
  parts = fedmd_images.one_subclass(
    coarse, fine, num_clients=7, examples_per_class=4, seed=0
  )
  for k, part in enumerate(parts):
    assert len(set(part.tolist())) == 8
    assert set(fine[part]) == {k % 5, 5 + k % 5}
  assert set(parts[0]) != set(parts[5])  # each its own draw


def test_digits():
  images = fedmd_images.load_fedmd_images(
    "digits", num_parties=5, heldout_examples=50
  )
  y = images.private.bank["y"]
  held = [set(images.private.positions(k)) for k in range(5)]
  assert all(len(a & b) == 0 for a in held for b in held if a is not b)
  for k in range(5):
    assert np.bincount(y[images.private.positions(k)]).tolist() == (
      [0] * 6 + [3] * 4
    )
  stopping = set(images.private_stopping.index)
  assert len(stopping) == 50 and not stopping & set().union(*held)
  assert set(images.public_test.bank["y"]) == set(range(6))
  assert set(images.private_test.bank["y"]) == {6, 7, 8, 9}
  public, out = set(images.public.index), set(images.public_stopping.index)
  assert not public & out and len(public | out) == len(images.public.bank["y"])
  # Pixels are doubled, and the mean is of the whole training set.
  x = images.public.bank["x"]
  np.testing.assert_array_equal(x[:, ::2, ::2], x[:, 1::2, 1::2])
  np.testing.assert_allclose(images.public_mean, x.mean(0) / 255, rtol=1e-5)


def test_what_is_out_of_range_is_refused():
  for settings_, message in [
    (dict(environment="mnist"), "environment=mnist: choose from digits"),
    (dict(num_parties=0), "num_parties=0"),
    (dict(examples_per_class=99), "examples_per_class=99: 10 parties want 990"),
    (dict(examples_per_class=0), "examples_per_class=0: must be a whole"),
    (dict(heldout_examples=871), "heldout_examples=871: .* 0 and at most 870"),
    (dict(public_examples=900), "public_examples=900: .* 1 and at most 871"),
    (dict(superclasses="both"), "superclasses=both"),
  ]:
    with pytest.raises(ValueError, match=message):
      fedmd_images.load_fedmd_images(**{"environment": "digits", **settings_})


def test_own_images(tmp_path):
  digits = vision.load_digits()

  def save(name, of, **more):
    arrays = {}
    for part, bank in (("train", digits.train), ("test", digits.test)):
      keep = of(bank["y"])
      arrays[f"x_{part}"] = bank["x"][keep]
      arrays[f"y_{part}"] = bank["y"][keep] - bank["y"][keep].min()
    clients = {k: v[: len(arrays["y_train"])] for k, v in more.items()}
    np.savez(tmp_path / name, **(arrays | clients))
    return tmp_path / name

  public = save("public.npz", lambda y: y < 6)
  private = save("private.npz", lambda y: y >= 6)
  load = functools.partial(
    fedmd_images.load_fedmd_images, "npz", npz=private, public_npz=public
  )
  # As `digits`, but for the pixels, which it doubles.
  own, same = (
    load(num_parties=5),
    fedmd_images.load_fedmd_images("digits", num_parties=5),
  )
  assert own.num_classes == 10 and own.image_shape == (8, 8, 1)
  np.testing.assert_array_equal(own.private.members, same.private.members)
  for part in ("public", "public_test", "private_test"):
    ours, theirs = getattr(own, part).bank, getattr(same, part).bank
    np.testing.assert_array_equal(ours["x"], theirs["x"][:, ::2, ::2])
    np.testing.assert_array_equal(ours["y"], theirs["y"])
  np.testing.assert_array_equal(own.public_mean, same.public_mean[::2, ::2])
  # A fifth of the public images is held out, or 200 if there are many.
  few = save("few.npz", lambda y: (y < 6) & (np.arange(len(y)) % 20 == 0))
  fewer = load(num_parties=5, heldout_examples=None, public_npz=few)
  sizes = [len(s.index) for s in (fewer.public, fewer.public_stopping)]
  assert sizes[1] == sum(sizes) // 5 > 0

  # By the file's own labels, not by the models' outputs.
  with pytest.raises(ValueError, match="100 parties want 300 of class 0,"):
    load(num_parties=100)

  # Seven clients, of which five are drawn; each has every seventh image.
  names = np.array([f"writer {i % 7}" for i in range(2000)])
  save("private.npz", lambda y: y >= 6, clients_train=names)
  own = load(num_parties=5, heldout_examples=100)
  held = [own.private.positions(k) for k in range(5)]
  assert all(len(set(h % 7)) == 1 for h in held)
  assert len({int(h[0] % 7) for h in held}) == 5
  in_all = len(own.private.bank["y"])
  assert all(len(h) in (in_all // 7, in_all // 7 + 1) for h in held)
  assert not set(own.private_stopping.index) & set(np.concatenate(held))

  other = save("other.npz", lambda y: y < 3)
  with np.load(other) as stored:
    cut = {n: a[:, :6] if n.startswith("x") else a for n, a in stored.items()}
  np.savez(other, **cut)
  for error, kwargs, message in (
    (ValueError, dict(num_parties=8), "only 7 writers.*at most 7"),
    (ValueError, dict(examples_per_class=3), "examples_per_class=3: .*leave"),
    (ValueError, dict(public_npz=None), "public_npz=None: environment=npz"),
    (
      DataError,
      dict(public_npz=other),
      r"images of \(6, 8, 1\), but of \(8, 8, 1\)",
    ),
  ):
    with pytest.raises(error, match=message):
      load(**kwargs)
  with pytest.raises(ValueError, match="npz=.*: environment=digits does not"):
    fedmd_images.load_fedmd_images("digits", npz=private)


@needs_real_data
def test_cifar_by_subclasses():
  images = fedmd_images.load_fedmd_images(
    "cifar_noniid", data_dir=REAL, superclasses="code"
  )
  assert images.num_classes == 16 and images.image_shape == (32, 32, 3)
  assert images.private.sizes.tolist() == [120] * 10
  # All 3,000 test images of the six superclasses, five subclasses each.
  assert np.bincount(images.private_test.bank["y"]).tolist() == (
    [0] * 10 + [500] * 6
  )


@needs_real_data
def test_cifar_and_letters():
  images = fedmd_images.load_fedmd_images("cifar_iid", data_dir=REAL)
  assert images.private.sizes.tolist() == [18] * 10
  assert len(images.private_test.index) == 600
  written = fedmd_images.load_fedmd_images(
    "mnist_letters_by_writer", data_dir=REAL, min_writer_examples=6
  )
  assert written.image_shape == (28, 28, 1) and written.num_classes == 16
  assert len(written.public.index) == 60_000
  for k in range(10):
    y = written.private.bank["y"][written.private.positions(k)]
    assert sorted(set(y)) == [10, 11, 12, 13, 14, 15]
