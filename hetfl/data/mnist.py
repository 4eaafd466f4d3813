"""MNIST, and the idx format of MNIST and related data sets.

MNIST is looked for in this order: the official files, with or without their
`.gz`; a set prepared by TensorFlow Datasets (read without TensorFlow); and,
only if asked for, a download of the official files. Nothing is ever unpickled.
"""

import gzip
import hashlib
import os
from typing import NamedTuple
import zlib

import numpy as np
import numpy.typing as npt

from hetfl.data import files as files_lib
from hetfl.data.errors import DataError
from hetfl.data.vision import VisionDataset
from hetfl.population import Bank

_PAGE = "http://yann.lecun.com/exdb/mnist"
# The official files, where torchvision and TFDS fetch them too.
_URL = "https://ossci-datasets.s3.amazonaws.com/mnist"
_FOLDERS = ("mnist", os.path.join("MNIST", "raw"), "")
_TYPES: dict[int, npt.DTypeLike] = {
  0x08: np.uint8,
  0x09: np.int8,
  0x0B: np.dtype(">i2"),
  0x0C: np.dtype(">i4"),
  0x0D: np.dtype(">f4"),
  0x0E: np.dtype(">f8"),
}


class _File(NamedTuple):
  """One official file: its array's shape and its hashes."""

  name: str
  shape: tuple[int, ...]
  sha256: str  # of the uncompressed file
  md5: str  # of the .gz


_TRAIN = (
  _File(
    "train-images-idx3-ubyte",
    (60_000, 28, 28),
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
  ),
  _File(
    "train-labels-idx1-ubyte",
    (60_000,),
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "d53e105ee54ea40749a09fcbcd1e9432",
  ),
)
_TEST = (
  _File(
    "t10k-images-idx3-ubyte",
    (10_000, 28, 28),
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "9fb629c4189551a2d022fa330f9573f3",
  ),
  _File(
    "t10k-labels-idx1-ubyte",
    (10_000,),
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    "ec29112dd5afa0611ce80d1b7f02629c",
  ),
)


def read_idx(path: str | os.PathLike) -> np.ndarray:
  """Reads an idx file, gzipped or not.

  Args:
    path: the file; gzipped if its first bytes say so.

  Returns:
    The array, of the type and shape that the file's header gives.

  Raises:
    DataError: the file is missing, not an idx file, damaged, or cut short.

  Reference: LeCun, Cortes and Burges, "The MNIST database", file formats.

  >>> import tempfile
  >>> with tempfile.NamedTemporaryFile() as f:
  ...   _ = f.write(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9])), f.flush()
  ...   read_idx(f.name)
  array([7, 8, 9], dtype=uint8)
  """
  return _parse(os.fspath(path), _content(os.fspath(path)))


def load_mnist(
  data_dir: str | os.PathLike | None = None, download: bool = False
) -> VisionDataset:
  """MNIST: 60,000 + 10,000 handwritten digits, 28 x 28 x 1.

  TFDS does not keep the official positions, so a set that it prepared has the
  same images in shuffled order, and partitions by positions differ.

  Args:
    data_dir: folder with `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`,
      `t10k-images-idx3-ubyte` and `t10k-labels-idx1-ubyte`, each with or
      without `.gz`, in `mnist/`, in `MNIST/raw/` or in the folder itself; or a
      set that TFDS prepared as array_record. TFDS's own folder is searched as
      well.
    download: if none of those is there, download the official files into
      `mnist/` in `data_dir`; if some of the four are there, add the others.

  Returns:
    The data set, of 10 classes; its banks have `x` and `y`.

  Raises:
    DataError: no source was found, a file is damaged, or the download failed.

  Reference: LeCun, Cortes and Burges 1998; http://yann.lecun.com/exdb/mnist
  """
  folder = None
  if data_dir is not None:
    data_dir = os.path.expanduser(os.fspath(data_dir))
    folder = _official_folder(data_dir)
  if folder is None:
    prepared, unreadable = files_lib.prepared_tfds("mnist", data_dir)
    if prepared is not None:
      return VisionDataset("mnist", *_read_tfds(prepared), 10)
    if not download:
      raise DataError(_not_found(data_dir, unreadable))
    if data_dir is None:
      raise DataError("mnist: download=True needs data_dir=DIRECTORY")
    folder = os.path.join(data_dir, "mnist")
  if download:
    missing = [f for f in _TRAIN + _TEST if _find(folder, f) is None]
    for file in missing:
      path = os.path.join(folder, f"{file.name}.gz")
      files_lib.download(f"{_URL}/{file.name}.gz", path, file.md5, _PAGE)
  return VisionDataset("mnist", _bank(folder, _TRAIN), _bank(folder, _TEST), 10)


def _official_folder(data_dir: str) -> str | None:
  """The first folder with any of the official files."""
  for name in _FOLDERS:
    folder = os.path.join(data_dir, name)
    if any(_find(folder, file) is not None for file in _TRAIN + _TEST):
      return folder  # missing files are reported when the folder is read
  return None


def _find(folder: str, file: _File) -> str | None:
  for suffix in (".gz", ""):
    path = os.path.join(folder, file.name + suffix)
    if os.path.isfile(path):
      return path
  return None


def _bank(folder: str, files: tuple[_File, ...]) -> Bank:
  """The images and labels of a part, checked."""
  arrays = []
  for file in files:
    path = _find(folder, file)
    if path is None:
      raise DataError(
        f"{os.path.join(folder, file.name)}.gz: missing, though other files of"
        f" mnist are there: get it from {_URL}/{file.name}.gz"
      )
    content = _content(path)
    array = _parse(path, content)
    if array.shape != file.shape:
      raise DataError(
        f"{path}: an array of shape {array.shape}, want {file.shape}: get"
        f" {_URL}/{file.name}.gz"
      )
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
      raise DataError(
        f"{path}: damaged, the sha256 of what is in it is {digest[:12]}... and"
        f" not {file.sha256[:12]}...: get {_URL}/{file.name}.gz again"
      )
    arrays.append(array)
  images, labels = arrays
  return {"x": images[..., np.newaxis], "y": labels.astype(np.int32)}


def _content(path: str) -> bytes:
  """The uncompressed bytes of a file that may be gzipped."""
  try:
    with open(path, "rb") as stream:
      content = stream.read()
    return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
  except FileNotFoundError as error:
    raise DataError(f"{path}: missing") from error
  except (OSError, EOFError, zlib.error) as error:
    raise DataError(
      f"{path}: cannot be read ({files_lib.one_line(error)}): get it again"
    ) from error


def _parse(path: str, content: bytes) -> np.ndarray:
  """Parses an idx file: two zeros, type, rank, big-endian sizes, values."""
  rank = content[3] if len(content) > 3 else 0
  head = 4 + 4 * rank
  if content[:2] != b"\0\0" or content[2:3] == b"" or len(content) < head:
    raise DataError(f"{path}: not an idx file")
  if content[2] not in _TYPES or not rank:
    raise DataError(f"{path}: not an idx file (type {content[2]}, rank {rank})")
  dtype = np.dtype(_TYPES[content[2]])
  shape = tuple(np.frombuffer(content, ">u4", rank, 4).tolist())
  want = head + dtype.itemsize * int(np.prod(shape, dtype=object))
  if len(content) != want:
    raise DataError(
      f"{path}: {len(content):,} bytes, its head says {want:,} (cut short?):"
      " get it again"
    )
  array = np.frombuffer(content, dtype, offset=head).reshape(shape)
  return array.astype(dtype.newbyteorder("="))


def _read_tfds(folder: str) -> tuple[Bank, Bank]:
  """Reads a prepared set, in stored order."""
  banks: list[Bank] = []
  for split, files in (("train", _TRAIN), ("test", _TEST)):
    images, labels = files_lib.read_tfds_images(folder, "mnist", split)
    want = files[0].shape
    if images.shape != (*want, 1):
      raise DataError(
        f"{folder}: {split} images of shape {images.shape}, want {(*want, 1)}:"
        " delete it and prepare mnist with TFDS again"
      )
    banks.append({"x": images.astype(np.uint8), "y": labels.astype(np.int32)})
  return banks[0], banks[1]


def _not_found(data_dir: str | None, unreadable: list[str]) -> str:
  names = ", ".join(f"{file.name}.gz" for file in _TRAIN + _TEST)
  where = "no data_dir given"
  if data_dir is not None:
    folders = " nor ".join(os.path.join(data_dir, f) for f in _FOLDERS[:2])
    where = f"neither {folders} nor {data_dir} holds {names}"
  tfds = files_lib.no_prepared_tfds("mnist", data_dir, unreadable)
  return (
    f"mnist not found: {where}, {tfds}: get the files from {_URL}/ and give"
    f" data_dir=DIRECTORY, where DIRECTORY/mnist/ holds {names}, or"
    " download=True"
  )
