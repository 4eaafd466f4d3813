"""Image data sets, in files made and described like the official ones."""

import functools
import gzip
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
import urllib.request

import numpy as np
import pytest

from hetfl.data import DataError, files, vision
from tests.runs import needs_real_data, REAL

CLASSES = 4


@pytest.fixture(autouse=True)
def no_other_sets(tmp_path, monkeypatch):
  """No data set that TFDS has prepared here, and no network."""
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "no_tfds"))
  real = urllib.request.urlopen

  def local_only(url, **kwargs):
    if not url.startswith("file:"):
      raise OSError("no network\nin tests")
    return real(url, timeout=kwargs["timeout"])

  monkeypatch.setattr(urllib.request, "urlopen", local_only)


def _rows(images, salt):
  """Official rows: coarse label, label, 3072 bytes plane after plane."""
  rng = np.random.default_rng(salt)
  y = np.arange(images) % CLASSES
  rows = np.concatenate(
    [np.stack([y // 2, y], 1), rng.integers(0, 256, (images, 3072))], axis=1
  ).astype(np.uint8)
  return rng.permutation(rows)


def _hash(content):
  return hashlib.sha256(content).hexdigest()[:32]


@pytest.fixture
def cifar(tmp_path):
  """A CIFAR of 12 + 8 images: its description, its files, a folder."""
  content = {
    "a.bin": _rows(4, 1).tobytes(),
    "b.bin": _rows(8, 2).tobytes(),
    "test.bin": _rows(8, 3).tobytes(),
  }
  archive = io.BytesIO()
  with tarfile.open(fileobj=archive, mode="w:gz") as tar:
    for name in ("test.bin", "b.bin", "a.bin"):  # in no particular order
      member = tarfile.TarInfo(f"small-bin/{name}")
      member.size = len(content[name])
      tar.addfile(member, io.BytesIO(content[name]))
  content["small.tar.gz"] = archive.getvalue()
  published = tmp_path / "published"
  published.mkdir()
  (published / "small.tar.gz").write_bytes(archive.getvalue())
  described = vision._CIFAR100._replace(
    name="small",
    classes=CLASSES,
    url=published.as_uri(),
    archive="small.tar.gz",
    folders=("small-bin", ""),
    train={name: _hash(content[name]) for name in ("a.bin", "b.bin")},
    test={"test.bin": _hash(content["test.bin"])},
    parse=functools.partial(vision._parse_cifar, {"coarse": 2, "y": CLASSES}),
  )
  data_dir = tmp_path / "data"
  data_dir.mkdir()
  return described, content, data_dir


def _idx(array):
  head = bytes([0, 0, 8, array.ndim])
  return head + np.array(array.shape, ">u4").tobytes() + array.tobytes()


@pytest.fixture
def mnist(tmp_path):
  """An MNIST of six and four images."""
  rng = np.random.default_rng(0)
  content, splits = {}, []
  for split, n in ((vision._MNIST.train, 6), (vision._MNIST.test, 4)):
    for name, shape in zip(split, ((n, 28, 28), (n,))):
      content[name] = _idx(rng.integers(0, 10, shape, dtype=np.uint8))
    splits.append({name: _hash(content[name]) for name in split})
  published = tmp_path / "published"
  _write(published, content, pack=True)
  described = vision._MNIST._replace(
    url=published.as_uri(), train=splits[0], test=splits[1]
  )
  return described, content, tmp_path / "data"


def _write(folder, content, names=None, pack=None):
  folder.mkdir(exist_ok=True, parents=True)
  for name in names or [n for n in content if "tar" not in n]:
    path = folder / (f"{name}.gz" if pack else name)
    path.write_bytes(gzip.compress(content[name]) if pack else content[name])


def _assert_is_cifar(dataset):
  rows = np.concatenate([_rows(4, 1), _rows(8, 2)])
  for bank, want in ((dataset.train, rows), (dataset.test, _rows(8, 3))):
    assert set(bank) == {"x", "y", "coarse"}
    assert bank["x"].dtype == np.uint8 and bank["x"].flags.writeable
    assert bank["x"].shape == (len(want), 32, 32, 3)
    assert bank["y"].dtype == bank["coarse"].dtype == np.int32
    np.testing.assert_array_equal(bank["coarse"], want[:, 0])
    np.testing.assert_array_equal(bank["y"], want[:, 1])
    # Pixel (row 3, column 5) of green is byte 2 + 1024 + 3 * 32 + 5.
    np.testing.assert_array_equal(bank["x"][:, 3, 5, 1], want[:, 1127])
    np.testing.assert_array_equal(bank["x"].sum((1, 2, 3)), want[:, 2:].sum(1))
  assert dataset.num_classes == CLASSES


def _error(official, data_dir, download=False):
  with pytest.raises(DataError) as info:
    vision._load(official, data_dir, download)
  message = str(info.value)
  assert "\n" not in message
  return message


@pytest.mark.parametrize("layout", ["folder", "directly", "archive"])
def test_cifar_in_its_layouts(cifar, layout):
  official, content, data_dir = cifar
  if layout == "archive":
    _write(data_dir, content, ["small.tar.gz"])
  else:
    _write(data_dir / ("small-bin" if layout == "folder" else ""), content)
  before = sorted(data_dir.rglob("*"))
  _assert_is_cifar(vision._load(official, data_dir, download=False))
  _assert_is_cifar(vision._load(official, str(data_dir), download=True))
  assert sorted(data_dir.rglob("*")) == before  # nothing unpacked anywhere


@pytest.mark.parametrize(
  "folder, pack", [("mnist", True), ("MNIST/raw", False), (".", True)]
)
def test_mnist_in_its_layouts(mnist, folder, pack):
  official, content, data_dir = mnist
  _write(data_dir / folder, content, pack=pack)
  data = vision._load(official, data_dir, download=False)
  for bank, part in ((data.train, "train"), (data.test, "t10k")):
    images, labels = (c for n, c in content.items() if n.startswith(part))
    assert bank["x"].dtype == np.uint8 and bank["y"].dtype == np.int32
    assert bank["x"].shape[1:] == (28, 28, 1)
    assert bank["x"].tobytes() == images[16:]
    assert bank["y"].astype(np.uint8).tobytes() == labels[8:]


def test_files_come_before_archive_before_tfds(cifar, monkeypatch):
  official, content, data_dir = cifar
  _write(data_dir, {"small.tar.gz": b"broken"}, ["small.tar.gz"])
  _make_tfds(official, data_dir)
  assert "small.tar.gz" in _error(official, data_dir)
  _write(data_dir / "small-bin", content)
  monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
  _assert_is_cifar(vision._load(official, data_dir, False))


def test_damaged_files_are_refused(cifar):
  official, content, data_dir = cifar
  path = data_dir / "small-bin" / "b.bin"
  _write(path.parent, content)
  flipped = bytearray(content["b.bin"])
  flipped[2000] ^= 1
  for damaged in (flipped, content["b.bin"][:-1]):
    path.write_bytes(damaged)
    message = _error(official, data_dir)
    assert f"{path}: cannot be read (damaged or cut short: b.bin has" in message
    assert f"{len(damaged)} bytes whose sha256 begins with" in message
    assert message.endswith("get it again from " + official.page)
  path.unlink()
  assert f"{data_dir} (small): cannot be read (there is no b.bin)" in _error(
    official, data_dir
  )
  # Where no hash is known, labels are counted.
  sizes = {name: len(content[name]) for name in official.train}
  official = official._replace(train=sizes)
  for label in (9, None):
    rows = _rows(8, 2)
    rows[0, 1] = (rows[0, 1] + 1) % CLASSES if label is None else label
    path.write_bytes(rows.tobytes())
    assert "not 3 images of each of 4 'y'" in _error(official, data_dir)


def test_damaged_archives_are_refused(cifar):
  official, content, data_dir = cifar
  path = data_dir / "small.tar.gz"
  path.write_bytes(content["small.tar.gz"][:-100])
  assert f"{path}: cannot be read" in _error(official, data_dir)
  path.write_bytes(content["small.tar.gz"])
  other = official._replace(test={"other.bin": 9})
  assert "there is no other.bin" in _error(other, data_dir)
  other = official._replace(test={"test.bin": 9})
  assert f"{path}: cannot be read (damaged or cut short: test.bin" in _error(
    other, data_dir
  )


def test_damaged_idx_files_are_refused(mnist):
  official, content, data_dir = mnist
  folder = data_dir / "mnist"
  _write(folder, content, pack=True)
  path = folder / "train-images-idx3-ubyte.gz"
  images = content["train-images-idx3-ubyte"]
  for damaged, message in (
    (gzip.compress(images[:-7]), "train-images-idx3-ubyte has 4713 bytes"),
    (gzip.compress(images)[:-20], "cannot be read"),
    (b"\x1f\x8bnonsense", "cannot be read"),
    (b"PK\x03\x04", "damaged or cut short: train-images-idx3-ubyte has 4 byt"),
  ):
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=f"{path}: .*{message}"):
      vision._load(official, data_dir, False)
  for damaged in (b"", images[:-7], b"PK\3\4", b"\0\0\x42\1\0\0\0\0"):
    with pytest.raises(Exception, match="idx|reshape|unpack|buffer"):
      files.parse_idx(damaged)


def test_missing_says_what_was_looked_for(tmp_path):
  for name, data_dir, parts in (
    (
      "cifar100",
      tmp_path,
      ("train.bin, test.bin", "cifar-100-binary.tar.gz", "~kriz/cifar.html"),
    ),
    ("cifar10", None, ("data_dir=None", "data_batch_1.bin")),
    ("mnist", tmp_path, ("MNIST/raw", "t10k-labels-idx1-ubyte", "=True")),
  ):
    with pytest.raises(DataError) as info:
      vision.load(name, data_dir)
    looked = (f"{name} not found", str(tmp_path / "no_tfds" / name), *parts)
    for part in (*looked, "give data_dir="):
      assert part in str(info.value)
    assert "\n" not in str(info.value)
  with pytest.raises(DataError, match="give data_dir=DIRECTORY"):
    vision.load("cifar10", download=True)
  with pytest.raises(ValueError, match="dataset=svhn: choose from digits"):
    vision.load("svhn")


@pytest.mark.parametrize("size", [0, 30_729_999, 30_740_000])
def test_cifar10_wants_exact_sizes(tmp_path, size):
  for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
    with open(tmp_path / name, "wb") as f:
      f.truncate(size)
  with pytest.raises(DataError, match="data_batch_1.bin.*want 30730000"):
    vision.load("cifar10", tmp_path)


def test_download(cifar):
  official, content, data_dir = cifar
  message = _error(
    official._replace(url="https://example.invalid"), data_dir, True
  )
  assert "cannot be read (no network in tests)" in message
  assert f"put it into {data_dir}" in message
  assert not os.listdir(data_dir)  # A failed one leaves nothing.
  target = data_dir / "new"
  _assert_is_cifar(vision._load(official, target, download=True))
  assert os.listdir(target) == ["small.tar.gz"]
  assert (target / "small.tar.gz").read_bytes() == content["small.tar.gz"]


def test_a_download_adds_what_is_missing(mnist):
  official, content, data_dir = mnist
  _write(data_dir / "mnist", content, list(content)[:1])
  assert len(vision._load(official, data_dir, True).train["x"]) == 6
  assert len(list((data_dir / "mnist").iterdir())) == 4


def _make_tfds(cifar, root):
  """A set as TFDS prepares it, in a shuffled order, without TensorFlow."""
  tfds = pytest.importorskip("tensorflow_datasets")
  image = pytest.importorskip("PIL.Image")
  records = pytest.importorskip("array_record.python.array_record_module")
  from tensorflow_datasets.proto import tf_example_pb2
  from tensorflow_datasets.proto import tf_feature_pb2 as pb

  folder = root / cifar.name / "3.0.2"
  folder.mkdir(parents=True)
  tfds.features.FeaturesDict(
    {
      "id": tfds.features.Text(),
      "image": tfds.features.Image(shape=(32, 32, 3)),
      "label": tfds.features.ClassLabel(num_classes=CLASSES),
      "coarse_label": tfds.features.ClassLabel(num_classes=2),
    }
  ).save_config(folder)

  def encode(row, name):
    png = io.BytesIO()
    pixels = row[2:].reshape(3, 32, 32).transpose(1, 2, 0)
    image.fromarray(np.ascontiguousarray(pixels)).save(png, "png")
    features = {
      key: pb.Feature(bytes_list=pb.BytesList(value=[value]))
      for key, value in (("id", name.encode()), ("image", png.getvalue()))
    } | {
      key: pb.Feature(int64_list=pb.Int64List(value=[int(value)]))
      for key, value in (("coarse_label", row[0]), ("label", row[1]))
    }
    return tf_example_pb2.Example(
      features=pb.Features(feature=features)
    ).SerializeToString()

  train = np.concatenate([_rows(4, 1), _rows(8, 2)])
  splits = []
  for split, rows in (("train", train), ("test", _rows(8, 3))):
    path = f"{folder}/{cifar.name}-{split}.array_record-00000-of-00001"
    writer = records.ArrayRecordWriter(path, "group_size:1")
    for i in np.random.default_rng(0).permutation(len(rows)):
      writer.write(encode(rows[i], f"{split}_{i:05d}"))
    writer.close()
    splits.append(
      {
        "name": split,
        "shardLengths": [str(len(rows))],
        "numBytes": "1",
        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
      }
    )
  info = dict(
    name=cifar.name, version="3.0.2", fileFormat="array_record", splits=splits
  )
  (folder / "dataset_info.json").write_text(json.dumps(info))
  return folder


@pytest.mark.parametrize("default_dir", [False, True])
def test_reads_what_tfds_prepared_in_the_official_order(
  cifar, tmp_path, default_dir
):
  official, _, data_dir = cifar
  root = tmp_path / "no_tfds" if default_dir else data_dir
  folder = _make_tfds(official, root)
  for version in ("3.0.10", "2.9.9"):  # The newest is so by its numbers.
    other = folder.with_name(version)
    shutil.copytree(folder, other)
    if version < "3":
      (other / "dataset_info.json").write_text("not read")
  folder.joinpath("dataset_info.json").write_text("not read")
  _assert_is_cifar(
    vision._load(official, None if default_dir else data_dir, False)
  )
  assert "tensorflow" not in sys.modules


def test_bad_tfds_sets_are_refused(cifar):
  official, _, data_dir = cifar
  folder = _make_tfds(official, data_dir)
  shard = folder / f"{official.name}-train.array_record-00000-of-00001"
  shard.write_bytes(b"no record")
  assert f"{folder} (train): cannot be read" in _error(official, data_dir)
  info = folder / "dataset_info.json"
  info.write_text(json.dumps({"fileFormat": "tfrecord"}))
  message = _error(official, data_dir)
  assert f"array_record in {data_dir}" in message
  assert f"({folder} has another format)" in message
  info.write_text("[]")
  assert "dataset_info.json: cannot be read" in _error(official, data_dir)
  info.write_text("{")
  assert "dataset_info.json: cannot be read" in _error(official, data_dir)


def test_digits():
  digits = vision.load("digits")
  assert digits.train["x"].dtype == np.uint8
  for bank in (digits.train, digits.test):
    assert np.bincount(bank["y"]).min() > 0.07 * len(bank["y"])
  greys = {round(v * 255 / 16) for v in range(17)}  # 8 is 127.5, so 128
  assert set(np.unique(digits.train["x"]).tolist()) == greys


@needs_real_data
def test_real_cifar100():
  data = vision.load("cifar100", REAL)
  assert data.train["x"].shape == (50_000, 32, 32, 3)
  np.testing.assert_array_equal(np.bincount(data.train["y"]), [500] * 100)
  np.testing.assert_array_equal(np.bincount(data.test["y"]), [100] * 100)
  # Five classes in each coarse one.
  pairs = np.unique(np.stack([data.train["coarse"], data.train["y"]]), axis=1)
  np.testing.assert_array_equal(np.bincount(pairs[0]), [5] * 20)
  # The means that the literature normalises by (channels last, or they would
  # all be alike).
  mean = data.train["x"].mean((0, 1, 2), dtype=np.float64) / 255
  np.testing.assert_allclose(mean, [0.5071, 0.4865, 0.4409], atol=1e-4)


@needs_real_data
def test_real_cifar10():
  data = vision.load("cifar10", REAL)
  assert data.train["x"].shape == (50_000, 32, 32, 3)
  assert set(data.train) == {"x", "y"}
  mean = data.train["x"].mean((0, 1, 2), dtype=np.float64) / 255
  np.testing.assert_allclose(mean, [0.4914, 0.4822, 0.4465], atol=1e-3)


@needs_real_data
def test_real_mnist():
  data = vision.load("mnist", REAL)
  assert data.train["x"].shape == (60_000, 28, 28, 1)
  np.testing.assert_array_equal(data.test["y"][:5], [7, 2, 1, 0, 4])
  # The mean and deviation that the literature normalises by.
  pixels = data.train["x"] / 255
  np.testing.assert_allclose(pixels.mean(), 0.1307, atol=1e-4)
  np.testing.assert_allclose(pixels.std(), 0.3081, atol=1e-4)
