"""Handwritten letters: EMNIST's, or others in one `.npz` file.

EMNIST is looked for in this order: the official MATLAB file, the official idx
files, FedJAX's federated EMNIST, and a set prepared by TensorFlow Datasets
(read without TensorFlow). If none is found, `letters.npz` is used instead. The
idx files and TFDS do not name the writers. Nothing is ever unpickled.
"""

import os
import pathlib

import numpy as np

from hetfl.data import fedjax_source, files
from hetfl.data.errors import DataError, reading
from hetfl.data.vision import VisionDataset
from hetfl.population import Bank

# Images, labels from 0 and, if they are known, writers.
_Letters = tuple[np.ndarray, np.ndarray, np.ndarray | None]
_PAGE = "https://www.nist.gov/itl/products-and-services/emnist-dataset"
_REMEDY = f"want a file as load_letters describes it; EMNIST is at {_PAGE}"
_MAT = "emnist-letters.mat"
_IDX = "emnist-letters-train-images-idx3-ubyte"
_SQLITE = "federated_emnist_train.sqlite"
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
    alike. The name is the source: 'mat', 'idx', 'fedjax', 'tfds' or 'npz';
    clients are the writers, except for 'idx' and 'tfds'. `letters.npz` has no
    official test images: the half of the writers with the larger numbers are
    the test writers. Images that are not 28 x 28 are brought to that size as
    MNIST's were (see `like_mnist`).

  Raises:
    DataError: no source was found, or none that names the writers, or a file
      is damaged.

  Reference: Cohen et al. 2017, EMNIST. Li & Wang 2019 call their letters
  FEMNIST; the released code reads `emnist-letters.mat`.
  """
  find = lambda *names: files.find(data_dir, *names)
  prepared, no_tfds = files.find_tfds("emnist/letters", data_dir)
  for source, path, read in (
    ("mat", find(_MAT), _read_mat),
    ("idx", None if writers else find(_IDX, f"{_IDX}.gz"), _read_idx),
    ("fedjax", find(_SQLITE), _read_sqlite),
    ("tfds", None if writers else prepared, _read_tfds),
    ("npz", find(_NPZ), _read_npz),
  ):
    if path is not None:
      official = source in ("mat", "idx")
      sizes = SIZES.values() if official else (None, None)
      with reading(path, _REMEDY):
        train, test = (read(pathlib.Path(path), split) for split in SIZES)
        banks = [_bank(x, y, n) for (x, y, _), n in zip((train, test), sizes)]
      return VisionDataset(source, banks[0], banks[1], _LETTERS, train[2])
  raise DataError(
    f"letters not found: data_dir={data_dir} and its folders hold none of"
    f" {_MAT}, {_SQLITE}, {_NPZ} nor, without writers, {_IDX}[.gz], and there"
    f" is {no_tfds}: get EMNIST from {_PAGE} and give data_dir=DIRECTORY"
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


def _bank(x: np.ndarray, y: np.ndarray, size: int | None) -> Bank:
  """A bank of letters, checked; label 0 is the letter a."""
  y = np.asarray(y).reshape(-1).astype(np.int32)
  if not 0 < len(y) == len(x) == (size or len(x)):
    raise ValueError(f"{len(x)} images and {len(y)} labels, want {size}")
  if y.min() < 0 or y.max() >= _LETTERS:
    raise ValueError(f"labels are not those of {_LETTERS} letters")
  return {"x": np.ascontiguousarray(x[..., None], np.uint8), "y": y}


def _upright(images: np.ndarray) -> np.ndarray:
  """EMNIST's files hold columns where MNIST's hold rows."""
  return np.reshape(images, (-1, _SIDE, _SIDE)).swapaxes(1, 2)


def _read_mat(path: pathlib.Path, split: str) -> _Letters:
  from scipy import io

  part = io.loadmat(path)["dataset"][0, 0][split][0, 0]
  writers = part["writers"].reshape(-1).astype(np.int32)
  return _upright(part["images"]), part["labels"] - 1.0, writers


def _read_idx(path: pathlib.Path, split: str) -> _Letters:
  images = path.name.replace("train", split)
  labels = images.replace("images-idx3", "labels-idx1")
  x, y = (
    files.parse_idx(files.content(path.with_name(name)))
    for name in (images, labels)
  )
  return _upright(x), y.astype(np.int32) - 1, None


def _read_sqlite(path: pathlib.Path, split: str) -> _Letters:
  """FedJAX's file: ink dark on 1.0; labels digits, upper case, lower case."""
  population = fedjax_source.read_sqlite(
    path.with_name(path.name.replace("train", split)),
    {"pixels": "x", "label": "y"},
  )
  # Its clients' examples lie one after another in the bank.
  writer = np.repeat(np.arange(len(population)), population.sizes)
  y = np.asarray(population.bank["y"])
  letters = np.flatnonzero((y >= 10) & (y < 10 + 2 * _LETTERS))
  x = np.clip(np.rint(255 * (1 - population.bank["x"][letters])), 0, 255)
  return x, (y[letters] - 10) % _LETTERS, writer[letters]


def _read_tfds(path: pathlib.Path, split: str) -> _Letters:
  data = files.read_tfds(path, split)
  return _upright(data["image"]), data["label"].astype(np.int32) - 1, None


def _read_npz(path: pathlib.Path, split: str) -> _Letters:
  names = ("images", "labels", "writers")
  arrays = files.read_npz(path, *names)
  images, labels, writers = (arrays.get(n, np.zeros(0)) for n in names)
  found = {name: f"{a.dtype}{[*a.shape]}" for name, a in arrays.items()}
  whole = {labels.dtype.kind, writers.dtype.kind} <= {"i", "u"}
  pixels = images.ndim == 3 and images.dtype == np.uint8
  if not (whole and pixels and len(images) == labels.size == writers.size):
    raise ValueError(
      f"has {found}, want images uint8[N, H, W], labels and writers int[N]"
    )
  everybody = np.unique(writers)
  if len(everybody) < 2:
    raise ValueError("has one writer, want two or more: half are for tests")
  is_test = writers > everybody[(len(everybody) - 1) // 2]
  keep = is_test == (split == "test")
  images = images[keep]
  if images.shape[1:] != (_SIDE, _SIDE):
    images = np.stack([like_mnist(image) for image in images])
  return images, labels[keep], writers[keep]
