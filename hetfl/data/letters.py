"""Handwritten letters: EMNIST's, or others in one `.npz` file.

EMNIST is looked for in this order: the official MATLAB file, the official idx
files, FedJAX's federated EMNIST, and a set prepared by TensorFlow Datasets
(read without TensorFlow). If none is found, `letters.npz` is used instead. The
idx files and TFDS do not name the writers. Nothing is ever unpickled.
"""

from collections.abc import Sequence
import os

import numpy as np

from hetfl.data import fedjax_source, files
from hetfl.data.errors import DataError, reading
from hetfl.data.vision import VisionDataset
from hetfl.population import Bank

_PAGE = "https://www.nist.gov/itl/products-and-services/emnist-dataset"
_AGAIN = f"get it again from {_PAGE}"
_MAT = "emnist-letters.mat"
_SQLITE = ("federated_emnist_train.sqlite", "federated_emnist_test.sqlite")
_NPZ = "letters.npz"
_LETTERS = 26
_SIDE = 28
_INK = 20  # side of the square that MNIST fits a digit into
# Official numbers of images.
SIZES = {"train": 124_800, "test": 20_800}


def load_letters(
  data_dir: str | os.PathLike | None = None, *, writers: bool = False
) -> VisionDataset:
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
    The letters, 28 x 28 x 1 with bright ink; label 0 is a, upper and lower case
    alike. The name is the source: 'mat', 'idx', 'fedjax', 'tfds' or 'npz'; all
    but 'idx' and 'tfds' also have `writer` `int32[N]`. `letters.npz` has no
    official test images: the half of the writers with the larger numbers are
    the test writers. Images that are not 28 x 28 are brought to that size as
    MNIST's were (see `like_mnist`).

  Raises:
    DataError: no source was found, or none that names the writers, or a file
      is damaged.

  Reference: Cohen et al. 2017, EMNIST. Li & Wang 2019 call their letters
  FEMNIST; the released code reads `emnist-letters.mat`.
  """
  if data_dir is not None:
    data_dir = os.path.expanduser(os.fspath(data_dir))
  mat, npz = files.find(data_dir, _MAT), files.find(data_dir, _NPZ)
  sqlite = [files.find(data_dir, name) for name in _SQLITE]
  idx = {
    split: [
      files.find(data_dir, name, f"{name}.gz")
      for what in ("images-idx3", "labels-idx1")
      for name in [f"emnist-letters-{split}-{what}-ubyte"]
    ]
    for split in SIZES
  }
  anonymous = next(filter(None, [*idx["train"], *idx["test"]]), None)
  tfds, no_tfds = files.find_tfds("emnist/letters", data_dir)
  if mat:
    source, banks = "mat", [_read_mat(mat, split) for split in SIZES]
  elif anonymous and not writers:
    source, banks = "idx", [_read_idx(idx[split], split) for split in SIZES]
  elif all(sqlite):
    source, banks = "fedjax", [_read_sqlite(path) for path in sqlite if path]
  elif tfds and not writers:
    source, banks = "tfds", [_read_tfds(tfds, split) for split in SIZES]
  elif npz:
    source, banks = "npz", _read_npz(npz)
  elif anonymous or tfds:
    raise DataError(
      f"the letters of {tfds or anonymous} do not say who wrote them: get"
      f" {_MAT}, FedJAX's {' and '.join(_SQLITE)}, or {_NPZ}, and give"
      " data_dir=DIRECTORY"
    )
  else:
    raise DataError(
      f"letters not found: data_dir={data_dir} and its folders hold none of"
      f" {_MAT}, emnist-letters-train-images-idx3-ubyte[.gz],"
      f" {' with '.join(_SQLITE)}, {_NPZ}, and there is {no_tfds}: get EMNIST"
      f" from {_PAGE} and give data_dir=DIRECTORY"
    )
  return VisionDataset(source, banks[0], banks[1], _LETTERS)


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
  from scipy import ndimage

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
  for size, centre in zip(small.shape, ndimage.center_of_mass(small)):
    start = round(_SIDE / 2 - centre - 0.5)
    start = min(max(start, 0), _SIDE - size)
    place.append(slice(start, start + size))
  out[tuple(place)] = np.rint(small)
  return out


def _coverage(source: int, target: int) -> np.ndarray:
  """`float[target, source]`: each source pixel's share in each target pixel."""
  edges = np.linspace(0, source, target + 1)
  covered = np.clip(edges[:, None] - np.arange(source), 0, 1)
  overlap = np.diff(covered, axis=0)
  return overlap / overlap.sum(1, keepdims=True)


def _bank(where: str, x, y, writer=None, *, size: int | None = None) -> Bank:
  """A bank of letters, checked; label 0 is the letter a."""
  arrays = {"y": y} if writer is None else {"y": y, "writer": writer}
  bank = {
    name: np.asarray(a).reshape(-1).astype(np.int32)
    for name, a in arrays.items()
  }
  for name, array in bank.items():
    if len(array) != (size or len(x)) or len(array) != len(x):
      raise DataError(
        f"{where}: {len(x):,} images and {len(array):,} of {name}, want"
        f" {size or len(x):,} of both: {_AGAIN}"
      )
  if bank["y"].min() < 0 or bank["y"].max() >= _LETTERS:
    raise DataError(
      f"{where}: labels are not those of {_LETTERS} letters: {_AGAIN}"
    )
  return {"x": np.ascontiguousarray(x[..., None], np.uint8), **bank}


def _upright(images: np.ndarray) -> np.ndarray:
  """EMNIST's files hold columns where MNIST's hold rows."""
  return np.reshape(images, (-1, _SIDE, _SIDE)).swapaxes(1, 2)


def _read_mat(path: str, split: str) -> Bank:
  from scipy import io

  with reading(path, _AGAIN):
    part = io.loadmat(path)["dataset"][0, 0][split][0, 0]
    images, labels = _upright(part["images"]), part["labels"] - 1.0
    writers = part["writers"]
  where = f"{path} ({split})"
  return _bank(where, images, labels, writers, size=SIZES[split])


def _read_idx(paths: Sequence[str | None], split: str) -> Bank:
  images, labels = paths
  if images is None or labels is None:
    raise DataError(
      f"emnist-letters-{split}-images-idx3-ubyte, ...-labels-idx1-ubyte: one is"
      f" missing, though other files of EMNIST are there: get it from {_PAGE}"
    )
  with reading(f"{images}, {labels}", _AGAIN):
    x, y = (files.parse_idx(files.content(path)) for path in (images, labels))
    x, y = _upright(x), y.astype(np.int32) - 1
  return _bank(images, x, y, size=SIZES[split])


def _read_sqlite(path: str) -> Bank:
  """FedJAX's file: ink dark on 1.0; labels digits, upper case, lower case."""
  population = fedjax_source.read_sqlite(path, {"pixels": "x", "label": "y"})
  writer = np.empty(len(population.members), np.int32)
  writer[population.members] = np.repeat(
    np.arange(len(population)), population.sizes
  )
  y = np.asarray(population.bank["y"])
  letters = np.flatnonzero((y >= 10) & (y < 10 + 2 * _LETTERS))
  x = np.clip(np.rint(255 * (1 - population.bank["x"][letters])), 0, 255)
  return _bank(path, x, (y[letters] - 10) % _LETTERS, writer[letters])


def _read_tfds(folder: str, split: str) -> Bank:
  data = files.read_tfds(folder, split)
  y = data["label"].astype(np.int32) - 1
  return _bank(f"{folder} ({split})", _upright(data["image"]), y)


def _read_npz(path: str) -> list[Bank]:
  names = ("images", "labels", "writers")
  layout = f"want arrays {', '.join(names)}"
  arrays = files.read_npz(path, *names, layout=layout)
  found = {name: f"{a.dtype}{[*a.shape]}" for name, a in arrays.items()}
  images, labels, writers = (arrays.get(n, np.zeros(0)) for n in names)
  pixels = images.ndim == 3 and images.dtype == np.uint8 and len(images)
  if not pixels or {labels.dtype.kind, writers.dtype.kind} - {"i", "u"}:
    raise DataError(
      f"{path}: has {found}, want images uint8[N, H, W], labels and writers"
      " int32[N]"
    )
  if images.shape[1:] != (_SIDE, _SIDE):
    images = np.stack([like_mnist(image) for image in images])
  bank = _bank(path, images, labels, writers)
  everybody = np.unique(bank["writer"])
  if len(everybody) < 2:
    raise DataError(f"{path}: {len(everybody)} writers, want two or more")
  is_test = bank["writer"] > everybody[(len(everybody) - 1) // 2]
  return [
    {name: array[keep] for name, array in bank.items()}
    for keep in (~is_test, is_test)
  ]
