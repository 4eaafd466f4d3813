"""Shards by label, MNIST's files, and the federations of FML."""

import gzip
import hashlib
import os

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from hetfl.data import DataError, fml_images, mnist, partition

REAL = os.environ.get("HETFL_DATA_DIR")
needs_real_data = pytest.mark.skipif(
  REAL is None, reason="HETFL_DATA_DIR is unset: no real images to read"
)


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
  with pytest.raises(ValueError, match="num_clients=4.* multiple of 5 clients"):
    partition.shards(y, num_clients=4, shards_per_client=2, seed=0)
  with pytest.raises(ValueError, match="class 0 has 4 examples, too few for 6"):
    partition.shards(y, num_clients=30, shards_per_client=2, seed=0)


# --- MNIST ------------------------------------------------------------------


def idx(array):
  head = bytes([0, 0, 8, array.ndim])
  return head + np.array(array.shape, ">u4").tobytes() + array.tobytes()


@pytest.fixture
def small(tmp_path, monkeypatch):
  """An MNIST of six and four images, described like the official one."""
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "no_tfds"))
  rng = np.random.default_rng(0)
  arrays, splits = {}, []
  for files, n in ((mnist._TRAIN, 6), (mnist._TEST, 4)):
    split = []
    for file in files:
      array = rng.integers(0, 10, (n, *file.shape[1:]), dtype=np.uint8)
      arrays[file.name] = array
      digest = hashlib.sha256(idx(array)).hexdigest()
      split.append(file._replace(shape=array.shape, sha256=digest))
    splits.append(tuple(split))
  monkeypatch.setattr(mnist, "_TRAIN", splits[0])
  monkeypatch.setattr(mnist, "_TEST", splits[1])
  return arrays, tmp_path / "data"


def write(arrays, folder, suffix=".gz"):
  folder.mkdir(parents=True, exist_ok=True)
  for name, array in arrays.items():
    content = idx(array)
    content = gzip.compress(content) if suffix else content
    (folder / (name + suffix)).write_bytes(content)


@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "."])
@pytest.mark.parametrize("suffix", [".gz", ""])
def test_mnist_in_its_layouts(small, folder, suffix):
  arrays, data_dir = small
  write(arrays, data_dir / folder, suffix)
  data = mnist.load_mnist(data_dir)
  for bank, part in ((data.train, "train"), (data.test, "t10k")):
    images, labels = (a for n, a in arrays.items() if n.startswith(part))
    assert bank["x"].dtype == np.uint8 and bank["y"].dtype == np.int32
    np.testing.assert_array_equal(bank["x"][..., 0], images)
    np.testing.assert_array_equal(bank["y"], labels)


def test_bad_mnist_files_are_refused(small):
  arrays, data_dir = small
  folder = data_dir / "mnist"
  write(arrays, folder)
  path = folder / "train-images-idx3-ubyte.gz"
  images = arrays["train-images-idx3-ubyte"]
  flipped = images.copy()
  flipped[3, 4, 5] ^= 1
  for content, message in (
    (gzip.compress(idx(flipped)), "damaged, the sha256 of what is in it"),
    (
      gzip.compress(idx(images[:5])),
      r"shape \(5, 28, 28\), want \(6, 28, 28\)",
    ),
    (gzip.compress(idx(images)[:-7]), "its head says"),
    (gzip.compress(idx(images))[:-20], "cannot be read"),
    (b"\x1f\x8bnonsense", "cannot be read"),
    (b"PK\x03\x04", "not an idx file"),
    (b"\0\0\x42\x01\0\0\0\0", "not an idx file .type 66"),
    (b"", "not an idx file"),
  ):
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as info:
      mnist.load_mnist(data_dir)
    assert str(path) in str(info.value) and "\n" not in str(info.value)
  path.unlink()
  with pytest.raises(DataError, match="train-images-idx3-ubyte.gz: missing"):
    mnist.load_mnist(data_dir)


def test_missing_mnist_says_what_was_looked_for(small, monkeypatch):
  arrays, data_dir = small
  with pytest.raises(DataError) as info:
    mnist.load_mnist(data_dir)
  for part in (
    str(data_dir / "mnist"),
    str(data_dir / "MNIST/raw"),
    "t10k-labels-idx1-ubyte.gz",
    "no_tfds",
    "download=True",
  ):
    assert part in str(info.value)
  with pytest.raises(DataError, match="=True needs data_dir"):
    mnist.load_mnist(None, download=True)
  # A download is what is published, whole, or nothing.
  published = data_dir.parent / "published"
  write(arrays, published)
  monkeypatch.setattr(mnist, "_URL", published.as_uri())
  with pytest.raises(DataError, match="damaged or cut short, its md5 is"):
    mnist.load_mnist(data_dir, download=True)
  assert not list((data_dir / "mnist").iterdir())
  for name in ("_TRAIN", "_TEST"):
    files = tuple(
      file._replace(
        md5=hashlib.md5(
          (published / f"{file.name}.gz").read_bytes()
        ).hexdigest()
      )
      for file in getattr(mnist, name)
    )
    monkeypatch.setattr(mnist, name, files)
  assert len(mnist.load_mnist(data_dir, download=True).train["x"]) == 6


def test_idx_files_of_all_types(tmp_path):
  for code, dtype in mnist._TYPES.items():
    array = np.arange(6).reshape(2, 3).astype(dtype)
    head = bytes([0, 0, code, 2]) + np.array([2, 3], ">u4").tobytes()
    (tmp_path / "a").write_bytes(head + array.tobytes())
    read = mnist.read_idx(tmp_path / "a")
    assert read.dtype.isnative and read.dtype.kind == np.dtype(dtype).kind
    np.testing.assert_array_equal(read, np.arange(6).reshape(2, 3))
  with pytest.raises(DataError, match="missing"):
    mnist.read_idx(tmp_path / "b")


@needs_real_data
def test_real_mnist():
  data = mnist.load_mnist(REAL)
  assert data.train["x"].shape == (60_000, 28, 28, 1)
  np.testing.assert_array_equal(data.test["y"][:5], [7, 2, 1, 0, 4])
  # The mean and deviation that the literature normalises by.
  pixels = data.train["x"] / 255
  np.testing.assert_allclose(pixels.mean(), 0.1307, atol=1e-4)
  np.testing.assert_allclose(pixels.std(), 0.3081, atol=1e-4)


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
  with pytest.raises(ValueError, match="bad_clients=5: .* 0 to 4"):
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
  with pytest.raises(ValueError, match="images of different shapes"):
    fml_images.load_fml_images(
      ["mnist", "cifar10"], num_clients=2, data_dir=REAL
    )
