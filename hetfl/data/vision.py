"""Image data sets: handwritten digits, CIFAR-10 and CIFAR-100.

CIFAR is looked for in this order: the official binary files, the official
archive, a set prepared by TensorFlow Datasets (read without TensorFlow), and,
only if asked for, a download of the official archive. All sources give the same
arrays in the same order, so a partition by positions does not depend on the
source. Nothing is ever unpickled.
"""

from collections.abc import Generator, Iterator
import contextlib
import hashlib
from importlib import resources
import os
import tarfile
from typing import NamedTuple, TypeVar
import zlib

import numpy as np

from hetfl.data import files as files_lib
from hetfl.data.errors import DataError
from hetfl.population import AnyBank, Bank

_AnyBank = TypeVar("_AnyBank", Bank, AnyBank)
_PIXELS = 32 * 32 * 3
_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
# The digits come without official test images: these 20% are our choice.
_DIGITS_TEST = 360
_DIGITS_SPLIT_SEED = 0


class VisionDataset(NamedTuple):
  """Labelled images, for training and for testing.

  Attributes:
    name: the name of the data set.
    train: `x` `uint8[N, H, W, C]` in 0..255, `y` `int32[N]`; CIFAR-100 also has
      its 20 coarse labels, `coarse` `int32[N]`.
    test: the same, for testing.
    num_classes: number of classes of `y`.
    clients: `[N]`, the number or name of the client that holds each training
      image; `None` if the data set has no clients.
  """

  name: str
  train: Bank
  test: Bank
  num_classes: int
  clients: np.ndarray | None = None


def plain(bank: _AnyBank) -> _AnyBank:
  """Images and labels alone, without a copy, so that all banks are alike."""
  return {"x": bank["x"], "y": bank["y"]}


class _File(NamedTuple):
  """One official file: its number of images, and its hash where known."""

  name: str
  images: int
  sha256: str | None = None


class _Cifar(NamedTuple):
  """The files and labels of a data set's official publication."""

  name: str
  folder: str
  archive: str
  md5: str
  url: str
  train: tuple[_File, ...]
  test: tuple[_File, ...]
  # The label bytes before the pixels of each image: key in the bank, key in
  # TFDS, number of classes.
  labels: tuple[tuple[str, str, int], ...]


_CIFAR100 = _Cifar(
  name="cifar100",
  folder="cifar-100-binary",
  archive="cifar-100-binary.tar.gz",
  md5="03b5dce01913d631647c71ecec9e9cb8",
  url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
  train=(
    _File(
      "train.bin",
      50_000,
      "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
    ),
  ),
  test=(
    _File(
      "test.bin",
      10_000,
      "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
    ),
  ),
  labels=(("coarse", "coarse_label", 20), ("y", "label", 100)),
)
# No hash of CIFAR-10's files is published, only the archive's.
_CIFAR10 = _Cifar(
  name="cifar10",
  folder="cifar-10-batches-bin",
  archive="cifar-10-binary.tar.gz",
  md5="c32a1d4ab5d03f1284b67883e8d87530",
  url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
  train=tuple(_File(f"data_batch_{i}.bin", 10_000) for i in range(1, 6)),
  test=(_File("test_batch.bin", 10_000),),
  labels=(("y", "label", 10),),
)


def load_digits() -> VisionDataset:
  """1,797 real handwritten digits that come with the package.

  Images are 8 x 8 x 1; their values 0..16 are scaled to 0..255 and rounded.
  360 images, drawn once and for all, are the test images, 1,437 are for
  training. Needs no download.

  Returns:
    The data set, of 10 classes.

  >>> digits = load_digits()
  >>> digits.train['x'].shape, digits.test['x'].shape
  ((1437, 8, 8, 1), (360, 8, 8, 1))

  Reference: Alpaydin and Kaynak 1998, Optical Recognition of Handwritten
    Digits, UCI Machine Learning Repository, doi:10.24432/C50P49 (CC BY 4.0);
    its test part, as in scikit-learn.
  """
  with resources.files("hetfl.data").joinpath("digits.npz").open("rb") as file:
    digits = np.load(file)
    images, y = digits["images"], digits["labels"].astype(np.int32)
  x = np.rint(images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
  order = np.random.default_rng(_DIGITS_SPLIT_SEED).permutation(len(y))
  test, train = np.split(order, [_DIGITS_TEST])
  return VisionDataset(
    name="digits",
    train={"x": x[train], "y": y[train]},
    test={"x": x[test], "y": y[test]},
    num_classes=10,
  )


def load_cifar100(
  data_dir: str | os.PathLike | None = None, download: bool = False
) -> VisionDataset:
  """CIFAR-100: 50,000 + 10,000 images of 100 classes in 20 coarse ones.

  Args:
    data_dir: directory that holds `train.bin` and `test.bin`, directly or in
      `cifar-100-binary/`, or `cifar-100-binary.tar.gz`, or a set that TFDS
      prepared as array_record. TFDS's own directory is searched as well.
    download: if none of those is there, download the official archive into
      `data_dir`.

  Returns:
    The data set; its banks have `x`, `y` and `coarse`.

  Raises:
    DataError: no source was found, a file is damaged, or the download failed.

  Reference: Krizhevsky 2009; https://www.cs.toronto.edu/~kriz/cifar.html
  """
  return _load_cifar(_CIFAR100, data_dir, download)


def load_cifar10(
  data_dir: str | os.PathLike | None = None, download: bool = False
) -> VisionDataset:
  """CIFAR-10: 50,000 + 10,000 images of 10 classes.

  Args:
    data_dir: directory that holds `data_batch_1.bin` to `data_batch_5.bin`
      and `test_batch.bin`, directly or in `cifar-10-batches-bin/`, or
      `cifar-10-binary.tar.gz`, or a set that TFDS prepared as array_record.
      TFDS's own directory is searched as well.
    download: if none of those is there, download the official archive into
      `data_dir`.

  Returns:
    The data set; its banks have `x` and `y`.

  Raises:
    DataError: no source was found, a file is damaged, or the download failed.

  Reference: Krizhevsky 2009; https://www.cs.toronto.edu/~kriz/cifar.html
  """
  return _load_cifar(_CIFAR10, data_dir, download)


def _load_cifar(
  cifar: _Cifar, data_dir: str | os.PathLike | None, download: bool
) -> VisionDataset:
  """Reads a CIFAR from the first source that is found."""
  folder = archive = None
  if data_dir is not None:
    data_dir = os.path.expanduser(os.fspath(data_dir))
    folder = _official_folder(cifar, data_dir)
    archive = os.path.join(data_dir, cifar.archive)
    if not os.path.isfile(archive):
      archive = None
  prepared: str | None = None
  unreadable: list[str] = []
  if folder is None and archive is None:
    prepared, unreadable = files_lib.prepared_tfds(cifar.name, data_dir)
  if folder is None and archive is None and prepared is None:
    if not download:
      raise DataError(_not_found(cifar, data_dir, unreadable))
    if data_dir is None:
      raise DataError(f"{cifar.name}: download=True needs data_dir=DIRECTORY")
    archive = os.path.join(data_dir, cifar.archive)
    files_lib.download(cifar.url, archive, cifar.md5, _PAGE)

  if folder is not None:
    train, test = _read_files(cifar, _files_of_folder(cifar, folder))
    where = folder
  elif archive is not None:
    files_lib.check_md5(
      archive, cifar.md5, f"delete it and get it again from {cifar.url}"
    )
    with contextlib.closing(_files_of_archive(cifar, archive)) as members:
      train, test = _read_files(cifar, members)
    where = archive
  else:
    assert prepared is not None
    train, test = _read_tfds(cifar, prepared)
    where = prepared
  for split, bank in (("train", train), ("test", test)):
    _check_labels(cifar, f"{where} ({split})", bank)
  return VisionDataset(cifar.name, train, test, cifar.labels[-1][2])


def _official_folder(cifar: _Cifar, data_dir: str) -> str | None:
  """The folder with the official files, if there is one."""
  names = [file.name for file in cifar.train + cifar.test]
  folder = os.path.join(data_dir, cifar.folder)
  if any(os.path.exists(os.path.join(folder, name)) for name in names):
    return folder  # missing files are reported when the folder is read
  if all(os.path.exists(os.path.join(data_dir, name)) for name in names):
    return data_dir
  return None


def _files_of_folder(
  cifar: _Cifar, folder: str
) -> Iterator[tuple[_File, str, np.ndarray]]:
  """Yields each official file, the path to name in errors, and its bytes."""
  for file in cifar.train + cifar.test:
    path = os.path.join(folder, file.name)
    if not os.path.isfile(path):
      raise DataError(
        f"{path}: missing, though other files of {cifar.name} are there: "
        f"unpack {cifar.archive} again, from {_PAGE}"
      )
    _check_size(cifar, file, path, os.path.getsize(path))
    yield file, path, np.fromfile(path, np.uint8)


def _files_of_archive(
  cifar: _Cifar, archive: str
) -> Generator[tuple[_File, str, np.ndarray], None, None]:
  """Yields the same from the official archive, in the archive's order."""
  wanted = {
    f"{cifar.folder}/{file.name}": file for file in cifar.train + cifar.test
  }
  try:
    with tarfile.open(archive, "r|gz") as tar:
      for member in tar:
        file = wanted.get(member.name.removeprefix("./"))
        if file is None or not member.isfile():
          continue
        del wanted[member.name.removeprefix("./")]
        path = f"{archive}:{member.name}"
        _check_size(cifar, file, path, member.size)
        content = tar.extractfile(member).read()  # type: ignore[union-attr]
        yield file, path, np.frombuffer(content, np.uint8)
  except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
    raise DataError(
      f"{archive}: cannot be read ({files_lib.one_line(error)}): delete it and "
      f"get it again from {cifar.url}"
    ) from error
  if wanted:
    raise DataError(
      f"{archive}: holds no {sorted(wanted)[0]}: delete it and get it "
      f"again from {cifar.url}"
    )


def _read_files(
  cifar: _Cifar, files: Iterator[tuple[_File, str, np.ndarray]]
) -> tuple[Bank, Bank]:
  """Fills the two banks from the official files, with checks."""
  banks = {}
  place = {}  # file name -> its bank and its first position in that bank
  for split in (cifar.train, cifar.test):
    bank = _empty_bank(cifar, sum(file.images for file in split))
    banks[split] = bank
    start = 0
    for file in split:
      place[file.name] = bank, start
      start += file.images
  for file, path, data in files:
    if file.sha256 is not None:
      found = hashlib.sha256(data.data).hexdigest()
      if found != file.sha256:
        raise DataError(
          f"{path}: damaged, its sha256 is {found[:12]}... and not "
          f"{file.sha256[:12]}...: unpack {cifar.archive} again, from {_PAGE}"
        )
    bank, start = place[file.name]
    rows = data.reshape(file.images, -1)
    part = slice(start, start + file.images)
    for column, (key, _, _) in enumerate(cifar.labels):
      bank[key][part] = rows[:, column]
    pixels = rows[:, len(cifar.labels) :].reshape(-1, 3, 32, 32)
    bank["x"][part] = pixels.transpose(0, 2, 3, 1)
  return banks[cifar.train], banks[cifar.test]


def _empty_bank(cifar: _Cifar, n: int) -> dict[str, np.ndarray]:
  bank: dict[str, np.ndarray] = {"x": np.empty((n, 32, 32, 3), np.uint8)}
  for key, _, _ in reversed(cifar.labels):
    bank[key] = np.empty(n, np.int32)
  return bank


def _check_size(cifar: _Cifar, file: _File, path: str, size: int):
  want = file.images * (len(cifar.labels) + _PIXELS)
  if size != want:
    raise DataError(
      f"{path}: {size:,} bytes, want {want:,} (cut short, or not the binary "
      f"version): unpack {cifar.archive} again, from {_PAGE}"
    )


def _check_labels(cifar: _Cifar, where: str, bank: Bank):
  """Checks that labels are in range and that classes are equally large."""
  for key, _, classes in cifar.labels:
    label = bank[key]
    if label.min() < 0 or label.max() >= classes:
      raise DataError(
        f"{where}: label {key!r} out of 0..{classes - 1}, so damaged: get "
        f"{cifar.name} again from {_PAGE}"
      )
    counts = np.bincount(label, minlength=classes)
    want = len(label) // classes
    if (counts != want).any():
      wrong = int(np.argmax(counts != want))
      raise DataError(
        f"{where}: {counts[wrong]} images of {key}={wrong}, want {want}, so "
        f"damaged: get {cifar.name} again from {_PAGE}"
      )


def _read_tfds(cifar: _Cifar, folder: str) -> tuple[Bank, Bank]:
  """Reads a prepared set back into the official order."""
  banks = []
  for split, files in (("train", cifar.train), ("test", cifar.test)):
    bank = _empty_bank(cifar, sum(file.images for file in files))
    n = len(bank["x"])
    seen = np.zeros(n, bool)

    def visit(example, bank=bank, seen=seen):
      # TFDS shuffles the images, but keeps their official positions in the ids:
      # "train_00017".
      at = int(bytes(example["id"]).rpartition(b"_")[2])
      bank["x"][at] = example["image"]
      for key, tfds_key, _ in cifar.labels:
        bank[key][at] = example[tfds_key]
      seen[at] = True

    files_lib.read_tfds(folder, cifar.name, split, visit)
    if not seen.all():
      raise DataError(
        f"{folder}: {seen.sum():,} images of {split}, want {n:,}: delete it "
        f"and prepare {cifar.name} with TFDS again"
      )
    banks.append(bank)
  return banks[0], banks[1]


def _not_found(
  cifar: _Cifar, data_dir: str | None, unreadable: list[str]
) -> str:
  names = [file.name for file in cifar.train + cifar.test]
  files = ", ".join(names)
  where = "no data_dir given"
  if data_dir is not None:
    where = (
      f"neither {os.path.join(data_dir, cifar.folder)} nor {data_dir} holds "
      f"{files}, no {os.path.join(data_dir, cifar.archive)}"
    )
  tfds = files_lib.no_prepared_tfds(cifar.name, data_dir, unreadable)
  return (
    f"{cifar.name} not found: {where}, {tfds}: get {cifar.archive} from "
    f"{_PAGE} and give data_dir=DIRECTORY, where DIRECTORY/{cifar.folder}/ "
    f"holds {files}, or download=True"
  )
