"""Handwritten letters: EMNIST's, or others in one `.npz` file.

EMNIST is looked for in this order: the official MATLAB file, the official idx
files, FedJAX's federated EMNIST, and a set prepared by TensorFlow Datasets
(read without TensorFlow). If none is found, `letters.npz` is used instead. The
idx files and TFDS do not name the writers. Nothing is ever unpickled.
"""

import os
from typing import NamedTuple

import numpy as np

from hetfl.data import fedjax_source, files, mnist
from hetfl.data.errors import DataError
from hetfl.population import Bank

_PAGE = "https://www.nist.gov/itl/products-and-services/emnist-dataset"
_MAT = "emnist-letters.mat"
_IDX = "emnist-letters-{split}-{what}-ubyte"
_SQLITE = "federated_emnist_{split}.sqlite"
_NPZ = "letters.npz"
_LETTERS = 26
_SIDE = 28
_INK = 20  # side of the square that MNIST fits a digit into
# Official numbers of images.
SIZES = {"train": 124_800, "test": 20_800}


class Letters(NamedTuple):
  """Images of letters.

  Attributes:
    source: 'mat', 'idx', 'fedjax', 'tfds' or 'npz': where they come from.
    train: `x` `uint8[N, 28, 28, 1]`, ink bright; `y` `int32[N]`, 0 is a, upper
      and lower case alike; and, except from 'idx' and 'tfds', `writer`
      `int32[N]`.
    test: the same, for testing.
  """

  source: str
  train: Bank
  test: Bank


def load_letters(
  data_dir: str | os.PathLike | None = None, *, writers: bool = False
) -> Letters:
  """Letters a to z, from the first source that is found.

  Args:
    data_dir: folder that holds, directly or in a subfolder,
      `emnist-letters.mat`; `emnist-letters-{train,test}-{images-idx3,
      labels-idx1}-ubyte`, plain or as `.gz`;
      `federated_emnist_{train,test}.sqlite`; or `letters.npz`: `images`
      `uint8[N, H, W]` with bright ink, `labels` 0..25 and `writers`, integers.
      A set `emnist/letters` that TFDS prepared as array_record is looked for
      in it and in TFDS's own directory; TFDS keeps 88,800 and 14,800 of the
      official 124,800 and 20,800 images.
    writers: skip sources that do not name the writers.

  Returns:
    The letters. `letters.npz` has no official test images: the half of the
    writers with the larger numbers are the test writers. Images that are not
    28 x 28 are brought to that size as MNIST's were (see `like_mnist`).

  Raises:
    DataError: no source was found, or none that names the writers, or a file
      is damaged.

  Reference: Cohen et al. 2017, EMNIST. Li & Wang 2019 call their letters
  FEMNIST; the released code reads `emnist-letters.mat`.
  """
  if data_dir is not None:
    data_dir = os.path.expanduser(os.fspath(data_dir))
  path = files.find(data_dir, _MAT)
  if path:
    return Letters("mat", *_read_mat(path))
  names = [name + end for name in _idx() for end in ("", ".gz")]
  idx = next(filter(None, (files.find(data_dir, name) for name in names)), None)
  if data_dir is not None and idx and not writers:
    return Letters("idx", *_read_idx(data_dir))
  train = files.find(data_dir, _SQLITE.format(split="train"))
  test = files.find(data_dir, _SQLITE.format(split="test"))
  if train and test:
    return Letters("fedjax", _read_sqlite(train), _read_sqlite(test))
  folder, _ = files.prepared_tfds("emnist/letters", data_dir)
  if folder and not writers:
    return Letters("tfds", *_read_tfds(folder))
  path = files.find(data_dir, _NPZ)
  if path:
    return Letters("npz", *_read_npz(path))
  if idx or folder:
    raise DataError(
      f"the letters of {folder or idx} do not say who wrote"
      f" them: get {_MAT}, FedJAX's {_SQLITE.format(split='train')} and"
      f" ..._test.sqlite, or {_NPZ}, and give data_dir=DIRECTORY"
    )
  where = "no data_dir given"
  if data_dir is not None:
    where = f"data_dir={data_dir} and its folders hold none of"
    where += f" {_MAT}, {_idx()[0]}[.gz], {_SQLITE.format(split='train')}"
    where += f" with ..._test.sqlite, {_NPZ}"
  raise DataError(
    f"letters not found: {where}, and no emnist/letters that TFDS prepared as"
    f" array_record is in {' or '.join(files.tfds_roots(data_dir))}: get EMNIST"
    f" from {_PAGE} and give data_dir=DIRECTORY"
  )


def like_mnist(image: np.ndarray) -> np.ndarray:
  """Brings a drawing to 28 x 28 as MNIST's digits were.

  The ink's bounding box is scaled to fit into 20 x 20, each pixel being the
  mean of the area it covers. Brightness is scaled so that the brightest pixel
  is 255. The centre of mass is moved to the middle.

  Args:
    image: `uint8[H, W]`, ink bright on 0, H and W any.

  Returns:
    `uint8[28, 28]`.

  Reference: LeCun et al. 1998, on MNIST; the scaling of brightness is ours, for
  thin lines.

  >>> image = np.zeros((100, 80), np.uint8)
  >>> image[10:90, 30:50] = 200
  >>> small = like_mnist(image)
  >>> np.argwhere(small).min(0), np.argwhere(small).max(0), small.max()
  (array([ 4, 12]), array([23, 16]), np.uint8(255))
  """
  rows, columns = (np.flatnonzero(image.any(axis)) for axis in (1, 0))
  if not len(rows):
    return np.zeros((_SIDE, _SIDE), np.uint8)
  ink = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
  scale = _INK / max(ink.shape)
  heights, widths = (_coverage(n, max(1, round(n * scale))) for n in ink.shape)
  small = heights @ ink.astype(np.float64) @ widths.T
  small *= 255 / small.max()
  out = np.zeros((_SIDE, _SIDE), np.uint8)
  place = []
  for axis, size in enumerate(small.shape):
    mass = small.sum(1 - axis)
    centre = (mass * (np.arange(size) + 0.5)).sum() / mass.sum()
    start = round(_SIDE / 2 - centre)
    start = min(max(start, 0), _SIDE - size)
    place.append(slice(start, start + size))
  out[tuple(place)] = np.rint(small)
  return out


def _coverage(source: int, target: int) -> np.ndarray:
  """`float[target, source]`: each source pixel's share in each target pixel."""
  edges = np.linspace(0, source, target + 1)
  pixels = np.arange(source)
  overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(
    edges[:-1, None], pixels
  )
  overlap = np.clip(overlap, 0, None)
  return overlap / overlap.sum(1, keepdims=True)


def _idx() -> list[str]:
  return [
    _IDX.format(split=split, what=what)
    for split in SIZES
    for what in ("images-idx3", "labels-idx1")
  ]


def _bank(where: str, x, y, writer=None, *, first: int, split=None) -> Bank:
  """A bank of letters, checked; `first` is the label of the letter a."""
  x, y = np.asarray(x), np.asarray(y).reshape(-1).astype(np.int64) - first
  if x.ndim == 2:
    x = x.reshape(-1, _SIDE, _SIDE) if x.shape[1] == _SIDE**2 else x
  if x.shape[1:] != (_SIDE, _SIDE) or len(x) != len(y) or not len(x):
    raise DataError(
      f"{where}: {len(y)} labels and images of shape {list(x.shape)}, want as"
      f" many images of {_SIDE} x {_SIDE}: get it again from {_PAGE}"
    )
  if split is not None and len(x) != SIZES[split]:
    raise DataError(
      f"{where}: {len(x):,} images, want {SIZES[split]:,}: get it again from"
      f" {_PAGE}"
    )
  if y.min() < 0 or y.max() >= _LETTERS:
    raise DataError(
      f"{where}: a label out of {first}..{first + _LETTERS - 1}: get it again"
    )
  bank = {
    "x": np.ascontiguousarray(x[..., None], np.uint8),
    "y": y.astype(np.int32),
  }
  if writer is not None:
    writer = np.asarray(writer).reshape(-1)
    if len(writer) != len(y):
      raise DataError(
        f"{where}: {len(writer)} writer entries for {len(y)} images"
      )
    bank["writer"] = writer.astype(np.int32)
  return bank


def _read_mat(path: str) -> tuple[Bank, Bank]:
  from scipy import io

  try:
    dataset = io.loadmat(path)["dataset"][0, 0]
    parts = {split: dataset[split][0, 0] for split in SIZES}
    arrays = {
      split: [part[name] for name in ("images", "labels", "writers")]
      for split, part in parts.items()
    }
  # SciPy raises many kinds of errors on damaged bytes.
  except Exception as error:
    raise DataError(
      f"{path}: cannot be read ({files.one_line(error)}): get it again from"
      f" {_PAGE}"
    ) from error
  train, test = (
    _bank(
      f"{path} ({split})",
      _transposed(images),
      labels,
      writers,
      first=1,
      split=split,
    )
    for split, (images, labels, writers) in arrays.items()
  )
  return train, test


def _transposed(images: np.ndarray) -> np.ndarray:
  """EMNIST's files hold columns where MNIST's hold rows."""
  images = np.asarray(images)
  if images.ndim == 2 and images.shape[1] == _SIDE**2:
    images = images.reshape(-1, _SIDE, _SIDE)
  return images.swapaxes(1, 2) if images.ndim == 3 else images


def _read_idx(data_dir: str) -> tuple[Bank, Bank]:
  banks = []
  for split in SIZES:
    parts = []
    for what in ("images-idx3", "labels-idx1"):
      name = _IDX.format(split=split, what=what)
      path = files.find(data_dir, name) or files.find(data_dir, name + ".gz")
      if path is None:
        raise DataError(
          f"{data_dir}: {name} is missing, though other files of EMNIST are"
          f" there: get it from {_PAGE}"
        )
      parts.append(mnist.read_idx(path))
    images, labels = parts
    where = f"{data_dir} ({split})"
    banks.append(
      _bank(where, _transposed(images), labels, first=1, split=split)
    )
  return banks[0], banks[1]


def _read_sqlite(path: str) -> Bank:
  """FedJAX's file: ink dark on 1.0; labels digits, upper case, lower case."""
  population = fedjax_source.read_sqlite(path, {"pixels": "x", "label": "y"})
  writer = np.empty(len(population.members), np.int32)
  writer[population.members] = np.repeat(
    np.arange(len(population)), population.sizes
  )
  y = np.asarray(population.bank["y"])
  letters = np.flatnonzero((y >= 10) & (y < 10 + 2 * _LETTERS))
  x = np.rint(255 * (1 - population.bank["x"][letters]))
  return _bank(
    path,
    np.clip(x, 0, 255).astype(np.uint8),
    (y[letters] - 10) % _LETTERS,
    writer[letters],
    first=0,
  )


def _read_tfds(folder: str) -> tuple[Bank, Bank]:
  banks = []
  for split in SIZES:
    images, labels = files.read_tfds_images(folder, "emnist/letters", split)
    if images.shape[-1] == 1:
      images = images[..., 0]
    where = f"{folder} ({split})"
    banks.append(_bank(where, _transposed(images), labels, first=1))
  return banks[0], banks[1]


def _read_npz(path: str) -> tuple[Bank, Bank]:
  remedy = ": want arrays images, labels and writers"
  with (
    files.reading_npz(path, remedy),
    np.load(path, allow_pickle=False) as arrays,
  ):
    images, labels, writers = (
      arrays[name] for name in ("images", "labels", "writers")
    )
  if images.ndim != 3 or images.dtype != np.uint8 or not len(images):
    raise DataError(
      f"{path}: images are {images.dtype}{list(images.shape)}, want"
      " uint8[N, H, W]"
    )
  for name, array in (("labels", labels), ("writers", writers)):
    if array.dtype.kind not in "iu" or np.any(array > np.iinfo(np.int32).max):
      raise DataError(f"{path}: {name} are {array.dtype}, want int32")
  if images.shape[1:] != (_SIDE, _SIDE):
    images = np.stack([like_mnist(image) for image in images])
  bank = _bank(path, images, labels, writers, first=0)
  everybody = np.unique(bank["writer"])
  if len(everybody) < 2:
    raise DataError(f"{path}: {len(everybody)} writers, want two or more")
  is_test = bank["writer"] > everybody[(len(everybody) - 1) // 2]
  train, test = (
    {name: array[keep] for name, array in bank.items()}
    for keep in (~is_test, is_test)
  )
  return train, test
