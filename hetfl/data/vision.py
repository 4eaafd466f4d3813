"""Image data sets: digits, MNIST, CIFAR-10 and CIFAR-100.

All but the digits are looked for in this order: the official files, the
official archive, a set prepared by TensorFlow Datasets (read without
TensorFlow), and, only if asked for, a download of what is published. Nothing is
ever unpickled.
"""

from collections.abc import Callable, Sequence
import functools
import hashlib
from importlib import resources
import os
import tarfile
from typing import Any, NamedTuple

import numpy as np

from hetfl.data import files as files_lib
from hetfl.data.errors import DataError, one_of, reading
from hetfl.population import AnyBank, Bank

# The digits come without official test images: these 20% are our choice.
_DIGITS_TEST = 360
_DIGITS_SPLIT_SEED = 0


class VisionDataset(NamedTuple):
  """Labelled images, for training and for testing.

  Attributes:
    name: the name of the data set, or of where it comes from.
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


def plain(bank: AnyBank) -> dict[str, Any]:
  """Images and labels alone, without a copy, so that all banks are alike."""
  return {"x": bank["x"], "y": bank["y"]}


class _Official(NamedTuple):
  """How a data set is published."""

  name: str
  classes: int
  shape: tuple[int, int, int]
  sizes: tuple[int, int]  # images for training and for testing
  page: str
  url: str  # of the folder of the downloads
  archive: str  # of all files; '' if each is published as a .gz
  md5: dict[str, str]  # of what is published
  folders: tuple[str, ...]  # where the files may be
  # By file: the first half of its SHA-256 or, if none is published, its size.
  train: dict[str, str | int]
  test: dict[str, str | int]
  parse: Callable[[Sequence[bytes]], Bank]  # the files of a split


def _parse_mnist(contents: Sequence[bytes]) -> Bank:
  images, labels = map(files_lib.parse_idx, contents)
  return {"x": images[..., np.newaxis], "y": labels.astype(np.int32)}


def _parse_cifar(classes: dict[str, int], contents: Sequence[bytes]) -> Bank:
  """Rows of label bytes, one of each kind, and 3072 bytes by channel."""
  data = np.frombuffer(b"".join(contents), np.uint8)
  rows = data.reshape(-1, len(classes) + 3 * 32 * 32)
  pixels = rows[:, len(classes) :].reshape(-1, 3, 32, 32)
  bank = {"x": np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))}
  for column, (key, number) in enumerate(classes.items()):
    bank[key] = rows[:, column].astype(np.int32)
    counts = np.bincount(bank[key], minlength=number)
    want = [len(rows) // number] * number
    if counts.tolist() != want:
      raise ValueError(f"not {want[0]} images of each of {number} {key!r}")
  return bank


_MNIST = _Official(
  name="mnist",
  classes=10,
  shape=(28, 28, 1),
  sizes=(60_000, 10_000),
  page="http://yann.lecun.com/exdb/mnist",
  # Where torchvision and TFDS fetch the official files, too.
  url="https://ossci-datasets.s3.amazonaws.com/mnist",
  archive="",
  md5={
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
  },
  folders=("mnist", os.path.join("MNIST", "raw"), ""),
  train={
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5",
  },
  test={
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351",
  },
  parse=_parse_mnist,
)
_CIFAR100 = _Official(
  name="cifar100",
  classes=100,
  shape=(32, 32, 3),
  sizes=(50_000, 10_000),
  page="https://www.cs.toronto.edu/~kriz/cifar.html",
  url="https://www.cs.toronto.edu/~kriz",
  archive="cifar-100-binary.tar.gz",
  md5={"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
  folders=("cifar-100-binary", ""),
  train={"train.bin": "f31298fc616915fa142368359df1c4ca"},
  test={"test.bin": "d8b1e6b7b3bee4020055f0699b111f60"},
  parse=functools.partial(_parse_cifar, {"coarse": 20, "y": 100}),
)
# No hash of CIFAR-10's files is published, only the archive's.
_CIFAR10 = _CIFAR100._replace(
  name="cifar10",
  classes=10,
  archive="cifar-10-binary.tar.gz",
  md5={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
  folders=("cifar-10-batches-bin", ""),
  train={f"data_batch_{i}.bin": 10_000 * 3073 for i in range(1, 6)},
  test={"test_batch.bin": 10_000 * 3073},
  parse=functools.partial(_parse_cifar, {"y": 10}),
)
_OFFICIAL = {o.name: o for o in (_MNIST, _CIFAR10, _CIFAR100)}
DATASETS = ("digits", *_OFFICIAL)


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


def load(
  name: str,
  data_dir: str | os.PathLike | None = None,
  download: bool = False,
) -> VisionDataset:
  """One of the image data sets.

  - `digits`: see `load_digits`.
  - `mnist`: 60,000 + 10,000 handwritten digits, 28 x 28 x 1. Its four files
    `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`,
    `t10k-images-idx3-ubyte` and `t10k-labels-idx1-ubyte`, each with or without
    `.gz`, are in `mnist/` or `MNIST/raw/` in `data_dir`, or in `data_dir`
    itself.
  - `cifar10`: 50,000 + 10,000 images of 10 classes, 32 x 32 x 3;
    `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin` are in
    `cifar-10-batches-bin/` or in `data_dir` itself, or
    `cifar-10-binary.tar.gz` is there.
  - `cifar100`: of 100 classes in 20 coarse ones; `train.bin` and `test.bin` in
    `cifar-100-binary/` or in `data_dir` itself, or `cifar-100-binary.tar.gz`.

  All sources give the same arrays in the same order, so a partition by
  positions does not depend on the source; but TFDS does not keep MNIST's
  official positions, so a set that it prepared has the same images in shuffled
  order.

  Args:
    name: one of these.
    data_dir: the folder. A set that TFDS prepared as array_record is looked for
      in it and in TFDS's own folder.
    download: if none of those is there, download what is published into
      `data_dir`, and of MNIST those of the four files that are missing.

  Returns:
    The data set; its banks have `x` and `y`, those of CIFAR-100 `coarse` too.

  Raises:
    DataError: no source was found, a file is damaged, or the download failed.
    ValueError: there is no such data set.

  Reference: LeCun, Cortes and Burges 1998; http://yann.lecun.com/exdb/mnist.
    Krizhevsky 2009; https://www.cs.toronto.edu/~kriz/cifar.html.
  """
  one_of(DATASETS, dataset=name)
  if name == "digits":
    return load_digits()
  return _load(_OFFICIAL[name], data_dir, download)


def _load(
  official: _Official, data_dir: str | os.PathLike | None, download: bool
) -> VisionDataset:
  """Reads a data set from the first source that is found."""
  if data_dir is not None:
    data_dir = os.path.expanduser(os.fspath(data_dir))
  names = [*official.train, *official.test]
  found = {} if data_dir is None else _find(official, names, data_dir)
  if not found:
    folder, tfds = files_lib.find_tfds(official.name, data_dir)
    if folder is not None:
      train, test = (
        _from_tfds(official, folder, split, n)
        for split, n in zip(("train", "test"), official.sizes)
      )
      return VisionDataset(official.name, train, test, official.classes)
    if data_dir is None or not download:
      places = filter(None, [*official.folders, official.archive])
      raise DataError(
        f"{official.name} not found: data_dir={data_dir} holds no"
        f" {', '.join(names)}, nor do {', '.join(places)} there, and there is"
        f" {tfds}: get {', '.join(official.md5)} from {official.page} and give"
        " data_dir=DIRECTORY, or data_dir=DIRECTORY and download=True"
      )
  if data_dir is not None and download:
    into = "" if official.archive else official.folders[0]
    for name in names:
      if name not in found:
        published = official.archive or f"{name}.gz"
        found[name] = os.path.join(data_dir, into, published)
        if not os.path.exists(found[name]):
          url = f"{official.url}/{published}"
          files_lib.download(url, found[name], official.md5[published])
  contents = _contents(official, found)
  train, test = (
    _parse(official, files, found, contents)
    for files in (official.train, official.test)
  )
  return VisionDataset(official.name, train, test, official.classes)


def _find(
  official: _Official, names: Sequence[str], data_dir: str
) -> dict[str, str]:
  """The path of each official file that is there, or of the archive."""
  found: dict[str, str] = {}
  for name in names:
    for folder in official.folders:
      for end in (".gz", ""):
        path = os.path.join(data_dir, folder, name + end)
        if os.path.isfile(path):
          found.setdefault(name, path)
  archive = os.path.join(data_dir, official.archive)
  if len(found) < len(names) and os.path.isfile(archive):
    return dict.fromkeys(names, archive)
  return found


def _contents(official: _Official, found: dict[str, str]) -> dict[str, bytes]:
  """The uncompressed bytes of the official files, by name."""
  contents = {}
  for name, path in found.items():
    if os.path.basename(path) != official.archive:
      contents[name] = files_lib.content(path)
    elif name not in contents:
      url = f"{official.url}/{official.archive}"
      files_lib.check_md5(path, official.md5[official.archive], url)
      with reading(path, f"get it again from {url}"), tarfile.open(path) as tar:
        for member in filter(tarfile.TarInfo.isfile, tar):
          file = tar.extractfile(member)
          contents[os.path.basename(member.name)] = file.read()  # type: ignore
  return contents


def _parse(
  official: _Official,
  files: dict[str, str | int],
  found: dict[str, str],
  contents: dict[str, bytes],
) -> Bank:
  """The bank of a split, of files that are as they are published."""
  remedy = f"get it again from {official.page}"
  for name, want in files.items():
    if name not in contents:
      where = os.path.dirname(next(iter(found.values())))
      raise DataError(
        f"{os.path.join(where, name)}: missing, though other files of"
        f" {official.name} are there: {remedy}"
      )
    n, digest = len(contents[name]), hashlib.sha256(contents[name]).hexdigest()
    if want not in (n, digest[:32]):
      raise DataError(
        f"{found[name]}: damaged or cut short, {n} bytes whose sha256 begins"
        f" with {digest[:32]}, want {want}: {remedy}"
      )
  with reading(found[next(iter(files))], remedy):
    return official.parse([contents[name] for name in files])


def _from_tfds(official: _Official, folder: str, split: str, n: int) -> Bank:
  """A split of a prepared set, in the official order if it is known."""
  data = files_lib.read_tfds(folder, split)
  if data["image"].shape != (n, *official.shape):
    raise DataError(
      f"{folder}: {split} images of shape {data['image'].shape}, want"
      f" {(n, *official.shape)}: delete it and prepare it with TFDS again"
    )
  order = np.arange(n)
  if "id" in data:
    # TFDS shuffles the images, but keeps their official positions in the ids:
    # "train_00017".
    order = np.argsort([int(bytes(i).rpartition(b"_")[2]) for i in data["id"]])
  bank = {"x": data["image"][order].astype(np.uint8)}
  for key, name in (("y", "label"), ("coarse", "coarse_label")):
    if name in data:
      bank[key] = data[name][order].astype(np.int32)
  return bank
