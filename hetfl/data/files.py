"""Files of data sets: downloads, hashes, and sets prepared by TFDS."""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import glob
import hashlib
import http.client
import json
import logging
import os
import re
import tempfile
from typing import Any
import urllib.request
import zipfile
import zlib

import numpy as np

from hetfl.data.errors import DataError
from hetfl.population import ClientPopulation, Subset

_BLOCK = 1 << 20
_TIMEOUT_SECONDS = 10


def record(sets: Iterable[Subset | ClientPopulation | None], **facts) -> bytes:
  r"""A line that identifies a run's data.

  Args:
    sets: all sets that the run uses; each bank is read once.
    **facts: further facts about the data.

  Returns:
    A line of JSON: the facts, and a CRC-32 of the positions and the banks.

  >>> bank = {'y': np.arange(3)}
  >>> record([Subset(bank, np.array([0, 2])), None], source='here')
  b'{"source": "here", "crc32": "3d64a648"}\n'
  >>> record([Subset(bank, np.array([0, 1]))])
  b'{"crc32": "f47baef7"}\n'
  """
  given = [held for held in sets if held is not None]
  arrays: list[Any] = []
  for held in given:
    if isinstance(held, ClientPopulation):
      arrays += [held.offsets, held.members]
    else:
      arrays.append(held.index)
  for bank in {id(held.bank): held.bank for held in given}.values():
    arrays += [bank[name] for name in sorted(bank)]
  crc = 0
  for array in arrays:
    # Any: NumPy's types declare arrays as buffers only from Python 3.12 on.
    content: Any = np.ascontiguousarray(array)
    crc = zlib.crc32(content, crc)
  return (json.dumps({**facts, "crc32": f"{crc:08x}"}) + "\n").encode()


def find(data_dir: str | os.PathLike | None, name: str) -> str | None:
  """Finds a file in a folder or in one of its subfolders.

  Args:
    data_dir: the folder; with `None`, nothing is found.
    name: the file's name.

  Returns:
    The path; `None` if it is not there.
  """
  if data_dir is None:
    return None
  folder = glob.escape(os.path.expanduser(os.fspath(data_dir)))
  for where in (name, os.path.join("*", name)):
    for path in sorted(glob.glob(os.path.join(folder, where))):
      if os.path.isfile(path):
        return path
  return None


def tfds_roots(data_dir: str | None) -> list[str]:
  """The folders that may hold sets prepared by TFDS.

  Args:
    data_dir: a folder to look in first, used as it is; `None` for none.

  Returns:
    Paths: `data_dir`, if given, and TFDS's own folder: `$TFDS_DATA_DIR` or, if
    that is not set, `~/tensorflow_datasets`.
  """
  default = os.environ.get(
    "TFDS_DATA_DIR", os.path.join("~", "tensorflow_datasets")
  )
  roots = [] if data_dir is None else [data_dir]
  return roots + [os.path.expanduser(default)]


def _version(path: str) -> list[int]:
  """The version in the path of a TFDS set, as numbers."""
  folder = os.path.basename(os.path.dirname(path))
  return [int(number) for number in re.findall(r"\d+", folder)]


def prepared_tfds(
  name: str, data_dir: str | None
) -> tuple[str | None, list[str]]:
  """Finds a set prepared by TFDS as array_record, or in other formats.

  Looks at the files only: asked for a missing set, TFDS would try the network
  for minutes.

  Args:
    name: the set's name in TFDS.
    data_dir: a folder to look in besides TFDS's own.

  Returns:
    The newest version's folder or `None`, and folders of other formats.

  Raises:
    DataError: a set's description cannot be read.
  """
  unreadable = []
  for root in tfds_roots(data_dir):
    pattern = os.path.join(glob.escape(root), name, "*", "dataset_info.json")
    for path in sorted(glob.glob(pattern), key=_version, reverse=True):
      try:
        with open(path, encoding="utf-8") as stream:
          file_format = json.load(stream).get("fileFormat")
      except (OSError, ValueError, AttributeError) as error:
        raise DataError(
          f"{path}: cannot be read ({one_line(error)}): delete its "
          f"folder and prepare {name} with TFDS again"
        ) from error
      if file_format == "array_record":
        return os.path.dirname(path), []
      unreadable.append(os.path.dirname(path))
  return None, unreadable


def no_prepared_tfds(
  name: str, data_dir: str | None, unreadable: list[str]
) -> str:
  """What an error says if `prepared_tfds` found no folder.

  Args:
    name: see `prepared_tfds`.
    data_dir: see `prepared_tfds`.
    unreadable: the folders of other formats.

  Returns:
    Where it looked and, if it found another format, what to do about it.
  """
  where = " or ".join(os.path.join(r, name) for r in tfds_roots(data_dir))
  other = ""
  if unreadable:
    other = (
      f" ({unreadable[0]} has another format: prepare it with "
      "file_format=array_record)"
    )
  return f"no set that TFDS prepared as array_record in {where}{other}"


def read_tfds(
  folder: str, name: str, split: str, visit: Callable[[dict[str, Any]], None]
) -> None:
  """Calls a function with every example of a prepared set.

  Args:
    folder: the folder that `prepared_tfds` returned.
    name: the set's name in TFDS.
    split: 'train' or 'test'.
    visit: called with each example.

  Raises:
    DataError: the set cannot be read, or `visit` raised an error.
    ImportError: TFDS is not installed.
  """
  try:
    import tensorflow_datasets as tfds
  except ImportError as error:
    raise ImportError(
      f"{folder}: reading it needs TFDS: pip install tensorflow-datasets "
      "array_record importlib_resources pillow"
    ) from error
  try:
    for example in tfds.builder_from_directory(folder).as_data_source(split):
      visit(example)
  except ImportError:
    raise
  except Exception as error:  # TFDS, array_record and PIL raise many kinds
    raise DataError(
      f"{folder}: its {split} part cannot be read ({one_line(error)}): delete"
      f" it and prepare {name} with TFDS again (array_record)"
    ) from error


def read_tfds_images(
  folder: str, name: str, split: str
) -> tuple[np.ndarray, np.ndarray]:
  """Images and labels of a prepared set, in stored order.

  Args:
    folder: the folder that `prepared_tfds` returned.
    name: the set's name in TFDS.
    split: 'train' or 'test'.

  Returns:
    The images, as they are stored, and the labels.

  Raises:
    DataError: the set cannot be read, or its images are of different shapes.
    ImportError: TFDS is not installed.
  """
  images, labels = [], []

  def visit(example):
    images.append(np.asarray(example["image"]))
    labels.append(int(example["label"]))

  read_tfds(folder, name, split, visit)
  if len({image.shape for image in images}) != 1:
    raise DataError(
      f"{folder}: its {split} part is empty or has images of different shapes:"
      f" delete it and prepare {name} with TFDS again (array_record)"
    )
  return np.stack(images), np.array(labels)


def download(url: str, path: str, md5: str, page: str) -> None:
  """Downloads a file atomically and checks its hash.

  Args:
    url: the file's address.
    path: where to write it.
    md5: its expected hash, hexadecimal.
    page: the web page about the file, for the error.

  Raises:
    DataError: the download failed or gave another file.
  """
  logging.getLogger(__name__).info("downloading %s to %s", url, path)
  data_dir, name = os.path.split(path)
  os.makedirs(data_dir, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=data_dir, prefix=".download-") as folder:
    part = os.path.join(folder, name)
    try:
      with (
        urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as source,
        open(part, "wb") as target,
      ):
        while block := source.read(_BLOCK):
          target.write(block)
    except (OSError, http.client.HTTPException) as error:
      raise DataError(
        f"{url}: download failed ({one_line(error)}): download it "
        f"elsewhere and put it into data_dir={data_dir}"
      ) from error
    check_md5(part, md5, f"try again, or see {page}")
    os.replace(part, path)


def check_md5(path: str, md5: str, remedy: str) -> None:
  """Raises `DataError` if a file does not have the expected hash.

  Args:
    path: the file.
    md5: its expected hash, hexadecimal.
    remedy: what to do, for the error.

  Raises:
    DataError: it has another hash.
  """
  digest = hashlib.md5(usedforsecurity=False)
  with open(path, "rb") as stream:
    while block := stream.read(_BLOCK):
      digest.update(block)
  if digest.hexdigest() != md5:
    raise DataError(
      f"{path}: damaged or cut short, its md5 is {digest.hexdigest()} and "
      f"not {md5}: {remedy}"
    )


@contextlib.contextmanager
def reading_npz(path: str | os.PathLike, remedy: str) -> Iterator[None]:
  """Turns errors of a NumPy file that is read within into a `DataError`.

  Args:
    path: the file.
    remedy: the end of the message, from its punctuation on.

  Raises:
    DataError: as it is if raised within, else naming the file.

  >>> with reading_npz('own.npz', '; make it again'):
  ...   raise zipfile.BadZipFile('File is not a zip file')
  Traceback (most recent call last):
    ...
  hetfl.data.errors.DataError: own.npz: cannot be read (File is not a zip \
file); make it again
  """
  try:
    yield
  except DataError:
    raise
  except (
    EOFError,
    KeyError,
    OSError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
  ) as error:
    raise DataError(
      f"{path}: cannot be read ({one_line(error)}){remedy}"
    ) from error


def one_line(error: BaseException) -> str:
  """An error's message on one line."""
  return " ".join(str(error).split()) or type(error).__name__
