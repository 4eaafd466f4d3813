"""Image data sets: digits, MNIST, CIFAR-10 and CIFAR-100.

All but the digits are looked for in this order: the official files, the
official archive, a set prepared by TensorFlow Datasets (read without
TensorFlow), and, only if asked for, a download of what is published. Nothing is
ever unpickled.
"""

from collections.abc import Callable
import functools
import hashlib
from importlib import resources
import os
import pathlib
import tarfile
from typing import Any, NamedTuple

import numpy as np

from hetfl import checks
from hetfl.data import files
from hetfl.data.errors import DataError, reading
from hetfl.population import AnyBank, Bank

# The digits come without official test images: these 20% are our choice.
_DIGITS_TEST = 360


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
  page: str
  url: str  # of the folder of the downloads
  archive: str  # of all files; '' if each is published as a .gz
  folders: tuple[str, ...]  # where the files may be
  # By file: the first half of its SHA-256 or, if none is published, its size.
  train: dict[str, str | int]
  test: dict[str, str | int]
  parse: Callable[..., Bank]  # the contents of a split's files


def _parse_mnist(images: bytes, labels: bytes) -> Bank:
  x, y = files.parse_idx(images), files.parse_idx(labels)
  return {"x": x[..., np.newaxis], "y": y.astype(np.int32)}


def _parse_cifar(classes: dict[str, int], *contents: bytes) -> Bank:
  """Rows of label bytes, one of each kind, and 3072 bytes by channel."""
  data = np.frombuffer(b"".join(contents), np.uint8)
  rows = data.reshape(-1, len(classes) + 3 * 32 * 32)
  pixels = rows[:, len(classes) :].reshape(-1, 3, 32, 32)
  # Three times as fast as a copy of the transpose.
  bank = {"x": np.stack([*pixels.swapaxes(0, 1)], axis=-1)}
  for column, (key, number) in enumerate(classes.items()):
    bank[key] = rows[:, column].astype(np.int32)
    each = len(rows) // number
    if np.bincount(bank[key]).tolist() != [each] * number:
      raise ValueError(f"not {each} images of each of {number} {key!r}")
  return bank


_MNIST = _Official(
  name="mnist",
  classes=10,
  page="http://yann.lecun.com/exdb/mnist",
  # Where torchvision and TFDS fetch the official files, too.
  url="https://ossci-datasets.s3.amazonaws.com/mnist",
  archive="",
  folders=("mnist", "MNIST/raw", ""),
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
  page="https://www.cs.toronto.edu/~kriz/cifar.html",
  url="https://www.cs.toronto.edu/~kriz",
  archive="cifar-100-binary.tar.gz",
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
  order = np.random.default_rng(0).permutation(len(y))
  test, train = (
    {"x": x[own], "y": y[own]} for own in np.split(order, [_DIGITS_TEST])
  )
  return VisionDataset("digits", train, test, 10)


def load(
  name: str, data_dir: str | os.PathLike | None = None, download: bool = False
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
  checks.one_of(DATASETS, dataset=name)
  if name == "digits":
    return load_digits()
  return _load(_OFFICIAL[name], data_dir, download)


def _load(
  official: _Official, data_dir: str | os.PathLike | None, download: bool
) -> VisionDataset:
  """Reads a data set from the first source that is found."""
  wanted = official.train | official.test
  folder = None if data_dir is None else pathlib.Path(data_dir).expanduser()
  contents = {} if folder is None else _contents(official, folder)
  if not contents:
    prepared, no_tfds = files.find_tfds(official.name, folder)
    if prepared is not None:
      with reading(prepared, "delete it and prepare it with TFDS again"):
        train, test = (_from_tfds(prepared, s) for s in ("train", "test"))
      return VisionDataset(official.name, train, test, official.classes)
    if folder is None or not download:
      places = filter(None, [*official.folders, official.archive])
      raise DataError(
        f"{official.name} not found: data_dir={data_dir} holds no"
        f" {', '.join(wanted)}, nor do {', '.join(places)} there, and there is"
        f" {no_tfds}: get it from {official.page} and give data_dir=DIRECTORY,"
        " or data_dir=DIRECTORY and download=True"
      )
  missing = wanted.keys() - contents.keys()
  if missing and folder is not None and download:
    into = folder if official.archive else folder / official.folders[0]
    for file in {official.archive or f"{name}.gz" for name in missing}:
      files.download(f"{official.url}/{file}", into / file)
    contents = _contents(official, folder)
  with reading(f"{folder} ({official.name})", f"get it from {official.page}"):
    if missing := wanted.keys() - contents.keys():
      raise ValueError(f"there is no {', '.join(sorted(missing))}")
    train, test = (
      official.parse(*(contents[name] for name in split))
      for split in (official.train, official.test)
    )
  return VisionDataset(official.name, train, test, official.classes)


def _contents(official: _Official, folder: pathlib.Path) -> dict[str, bytes]:
  """The official files that are there, by name, uncompressed and checked."""
  wanted = official.train | official.test
  contents: dict[str, bytes] = {}

  def add(name: str, content: bytes):
    size, digest = len(content), hashlib.sha256(content).hexdigest()[:32]
    if wanted[name] not in (size, digest):
      raise ValueError(
        f"damaged or cut short: {name} has {size} bytes whose sha256 begins"
        f" with {digest}, want {wanted[name]}"
      )
    contents.setdefault(name, content)

  remedy = f"get it again from {official.page}"
  for name in wanted:
    for inside in official.folders:
      for path in (folder / inside / f"{name}.gz", folder / inside / name):
        if path.is_file() and name not in contents:
          with reading(path, remedy):
            add(name, files.content(path))
  archive = folder / official.archive
  if len(contents) < len(wanted) and archive.is_file():
    with reading(archive, remedy), tarfile.open(archive) as tar:
      for member in tar:
        name = os.path.basename(member.name)
        if name in wanted:
          add(name, files.unpacked(tar.extractfile(member)))  # type: ignore
  return contents


def _from_tfds(folder: str, split: str) -> Bank:
  """A split of a prepared set, in the official order if it is known."""
  data = files.read_tfds(folder, split)
  order = np.arange(len(data["image"]))
  if "id" in data:
    # TFDS shuffles the images, but keeps their official positions in the ids:
    # "train_00017".
    order = np.argsort([int(bytes(i).rpartition(b"_")[2]) for i in data["id"]])
  bank = {"x": data["image"][order].astype(np.uint8)}
  bank["y"] = data["label"][order].astype(np.int32)
  if "coarse_label" in data:
    bank["coarse"] = data["coarse_label"][order].astype(np.int32)
  return bank
