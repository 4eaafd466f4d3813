import hashlib
import io
import json
import os
import sys
import tarfile
import urllib.request

import numpy as np
import pytest

from hetfl.data import DataError, files, vision

REAL = os.environ.get("HETFL_DATA_DIR")
needs_real_data = pytest.mark.skipif(
  REAL is None, reason="HETFL_DATA_DIR is unset: no real CIFAR to read"
)
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


@pytest.fixture
def small(tmp_path):
  """A CIFAR of 12 + 8 images, made and described like the official one."""
  files = {
    "a.bin": _rows(4, 1).tobytes(),
    "b.bin": _rows(8, 2).tobytes(),
    "test.bin": _rows(8, 3).tobytes(),
  }
  archive = io.BytesIO()
  with tarfile.open(fileobj=archive, mode="w:gz") as tar:
    for name in ("test.bin", "b.bin", "a.bin"):  # in no particular order
      member = tarfile.TarInfo(f"small-bin/{name}")
      member.size = len(files[name])
      tar.addfile(member, io.BytesIO(files[name]))
  files["small.tar.gz"] = archive.getvalue()
  published = tmp_path / "published.tar.gz"
  published.write_bytes(archive.getvalue())

  def describe(name, images):
    return vision._File(name, images, hashlib.sha256(files[name]).hexdigest())

  cifar = vision._Cifar(
    name="small",
    folder="small-bin",
    archive="small.tar.gz",
    md5=hashlib.md5(archive.getvalue()).hexdigest(),
    url=published.as_uri(),
    train=(describe("a.bin", 4), describe("b.bin", 8)),
    test=(describe("test.bin", 8),),
    labels=(("coarse", "coarse_label", 2), ("y", "label", CLASSES)),
  )
  data_dir = tmp_path / "data"
  data_dir.mkdir()
  return cifar, files, data_dir


def _write(folder, files, names=("a.bin", "b.bin", "test.bin")):
  folder.mkdir(exist_ok=True)
  for name in names:
    (folder / name).write_bytes(files[name])


def _assert_is_small(dataset):
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


def _error(cifar, data_dir, download=False):
  with pytest.raises(DataError) as info:
    vision._load_cifar(cifar, data_dir, download)
  message = str(info.value)
  assert "\n" not in message
  return message


@pytest.mark.parametrize("layout", ["folder", "directly", "archive"])
def test_reads_the_official_layouts(small, layout):
  cifar, files, data_dir = small
  if layout == "folder":
    _write(data_dir / "small-bin", files)
  elif layout == "directly":
    _write(data_dir, files)
  else:
    _write(data_dir, files, ["small.tar.gz"])
  before = sorted(data_dir.rglob("*"))
  _assert_is_small(vision._load_cifar(cifar, data_dir, download=False))
  _assert_is_small(vision._load_cifar(cifar, str(data_dir), download=True))
  assert sorted(data_dir.rglob("*")) == before  # nothing unpacked anywhere


def test_files_come_before_archive_before_tfds(small, monkeypatch):
  cifar, files, data_dir = small
  _write(data_dir, files | {"small.tar.gz": b"broken"}, ["small.tar.gz"])
  _make_tfds(cifar, data_dir)
  assert "small.tar.gz" in _error(cifar, data_dir)
  _write(data_dir / "small-bin", files)
  monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
  _assert_is_small(vision._load_cifar(cifar, data_dir, False))


def test_damaged_files_are_refused(small):
  cifar, files, data_dir = small
  folder = data_dir / "small-bin"
  _write(folder, files)

  flipped = bytearray(files["b.bin"])
  flipped[2000] ^= 1
  (folder / "b.bin").write_bytes(flipped)
  message = _error(cifar, data_dir)
  assert f"{folder / 'b.bin'}: damaged" in message
  assert "unpack small.tar.gz again" in message

  (folder / "b.bin").write_bytes(files["b.bin"][:-1])
  message = _error(cifar, data_dir)
  assert "b.bin: 24,591 bytes, want 24,592" in message

  (folder / "b.bin").unlink()
  message = _error(cifar, data_dir)
  assert f"{folder / 'b.bin'}: missing" in message


def test_labels_are_counted_where_no_hash_is_known(small):
  cifar, files, data_dir = small
  cifar = cifar._replace(
    train=tuple(f._replace(sha256=None) for f in cifar.train)
  )
  for label, what in ((9, "'y' out of 0..3"), (None, "images of y=")):
    rows = _rows(8, 2)
    rows[0, 1] = (rows[0, 1] + 1) % CLASSES if label is None else label
    _write(data_dir / "small-bin", files | {"b.bin": rows.tobytes()})
    message = _error(cifar, data_dir)
    assert what in message and "small-bin (train)" in message


def test_damaged_archives_are_refused(small):
  cifar, files, data_dir = small
  broken = files["small.tar.gz"][:-100]
  path = data_dir / "small.tar.gz"
  path.write_bytes(broken)
  message = _error(cifar, data_dir)
  assert f"{path}: damaged or cut short, its md5 is" in message
  # The same were it no longer checked by its hash.
  message = _error(
    cifar._replace(md5=hashlib.md5(broken).hexdigest()), data_dir
  )
  assert f"{path}: cannot be read" in message
  other = cifar._replace(folder="other-bin")
  path.write_bytes(files["small.tar.gz"])
  assert "holds no other-bin/a.bin" in _error(other, data_dir)


def test_missing_says_what_was_looked_for(tmp_path):
  with pytest.raises(DataError) as info:
    vision.load_cifar100(tmp_path)
  message = str(info.value)
  for part in (
    str(tmp_path / "cifar-100-binary"),
    "train.bin, test.bin",
    str(tmp_path / "cifar-100-binary.tar.gz"),
    str(tmp_path / "no_tfds" / "cifar100"),
    "https://www.cs.toronto.edu/~kriz/cifar.html",
    "give data_dir=",
  ):
    assert part in message
  assert "\n" not in message
  with pytest.raises(DataError, match="no data_dir given.*data_batch_1.bin"):
    vision.load_cifar10()
  with pytest.raises(DataError, match="=True needs data_dir"):
    vision.load_cifar10(download=True)


@pytest.mark.parametrize("size", [0, 30_729_999, 30_740_000])
def test_cifar10_wants_exact_sizes(tmp_path, size):
  for i in range(1, 6):
    with open(tmp_path / f"data_batch_{i}.bin", "wb") as f:
      f.truncate(size)
  (tmp_path / "test_batch.bin").touch()
  with pytest.raises(DataError, match="data_batch_1.bin.*want 30,730,000"):
    vision.load_cifar10(tmp_path)


def test_download(small):
  cifar, files, data_dir = small
  target = data_dir / "new"
  _assert_is_small(vision._load_cifar(cifar, target, download=True))
  assert os.listdir(target) == ["small.tar.gz"]
  assert (target / "small.tar.gz").read_bytes() == files["small.tar.gz"]


def test_failed_downloads_leave_nothing(small):
  cifar, _, data_dir = small
  message = _error(cifar._replace(md5="0" * 32), data_dir, download=True)
  assert "damaged or cut short" in message
  message = _error(
    cifar._replace(url="https://example.invalid/a"), data_dir, download=True
  )
  assert "download failed (no network in tests)" in message
  assert f"data_dir={data_dir}" in message
  assert not os.listdir(data_dir)


def _make_tfds(cifar, root, images=(12, 8), file_format="array_record"):
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
  for split, rows, n in zip(("train", "test"), (train, _rows(8, 3)), images):
    path = f"{folder}/{cifar.name}-{split}.array_record-00000-of-00001"
    writer = records.ArrayRecordWriter(path, "group_size:1")
    for i in np.random.default_rng(0).permutation(n):
      writer.write(encode(rows[i], f"{split}_{i:05d}"))
    writer.close()
    splits.append(
      {
        "name": split,
        "shardLengths": [str(n)],
        "numBytes": "1",
        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
      }
    )
  info = dict(
    name=cifar.name, version="3.0.2", fileFormat=file_format, splits=splits
  )
  (folder / "dataset_info.json").write_text(json.dumps(info))
  return folder


@pytest.mark.parametrize("default_dir", [False, True])
def test_reads_what_tfds_prepared_in_the_official_order(
  small, tmp_path, default_dir
):
  cifar, _, data_dir = small
  _make_tfds(cifar, tmp_path / "no_tfds" if default_dir else data_dir)
  _assert_is_small(
    vision._load_cifar(cifar, None if default_dir else data_dir, False)
  )
  assert "tensorflow" not in sys.modules


def test_incomplete_tfds_sets_are_refused(small):
  cifar, _, data_dir = small
  folder = _make_tfds(cifar, data_dir, images=(11, 8))
  assert f"{folder}: 11 images of train, want 12" in _error(cifar, data_dir)
  shard = folder / f"{cifar.name}-train.array_record-00000-of-00001"
  shard.write_bytes(b"no record")
  assert "its train part cannot be read" in _error(cifar, data_dir)
  (folder / "dataset_info.json").write_text("{")
  assert "dataset_info.json: cannot be read" in _error(cifar, data_dir)


def test_tfds_sets_of_another_format_are_told(small):
  cifar, _, data_dir = small
  folder = _make_tfds(cifar, data_dir, file_format="tfrecord")
  message = _error(cifar, data_dir)
  assert f"{folder} has another format: prepare it with file_format=" in message


def test_digits():
  digits = vision.load_digits()
  again = vision.load_digits()
  assert digits.train["x"].dtype == np.uint8
  assert digits.train["x"].max() == 255 and digits.train["x"].min() == 0
  for a, b in ((digits.train, again.train), (digits.test, again.test)):
    assert np.bincount(a["y"]).min() > 0.07 * len(a["y"])
    for name in ("x", "y"):
      np.testing.assert_array_equal(a[name], b[name])
  greys = {round(v * 255 / 16) for v in range(17)}  # 8 is 127.5, so 128
  assert set(np.unique(digits.train["x"]).tolist()) == greys


@needs_real_data
def test_real_cifar100():
  data = vision.load_cifar100(REAL)
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
  data = vision.load_cifar10(REAL)
  assert data.train["x"].shape == (50_000, 32, 32, 3)
  assert set(data.train) == {"x", "y"}
  mean = data.train["x"].mean((0, 1, 2), dtype=np.float64) / 255
  np.testing.assert_allclose(mean, [0.4914, 0.4822, 0.4465], atol=1e-3)


def test_the_newest_version_is_so_by_its_numbers():
  paths = [
    f"cifar10/{v}/dataset_info.json" for v in ("3.0.2", "3.0.10", "2.9.9")
  ]
  assert max(paths, key=files._version) == paths[1]
