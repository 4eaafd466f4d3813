"""Files of data sets: their formats, hashes, downloads, and TFDS's sets."""

from collections.abc import Iterable, Iterator
import contextlib
import glob
import gzip
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import sqlite3
import struct
import tempfile
from typing import Any
import urllib.request
import zlib

import numpy as np

from hetfl.data.errors import DataError, reading
from hetfl.population import ClientPopulation, Subset

_TIMEOUT_SECONDS = 10
_IDX_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


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


def find(data_dir: str | os.PathLike | None, *names: str) -> str | None:
  """Finds a file in a folder or in one of its subfolders.

  Args:
    data_dir: the folder; with `None`, nothing is found.
    *names: names that the file may have, the preferred one first.

  Returns:
    The path; `None` if it is not there.
  """
  if data_dir is None:
    return None
  folder = glob.escape(os.path.expanduser(os.fspath(data_dir)))
  for name in names:
    for where in (name, os.path.join("*", name)):
      for path in sorted(glob.glob(os.path.join(folder, where))):
        if os.path.isfile(path):
          return path
  return None


def content(path: str | os.PathLike) -> bytes:
  """The bytes of a file, uncompressed if they are gzipped.

  Args:
    path: the file.

  Returns:
    The bytes.

  Raises:
    DataError: it is missing, or its compressed bytes are damaged.
  """
  with reading(path, "get it again"):
    raw = pathlib.Path(path).read_bytes()
    return gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw


def parse_idx(content: bytes) -> np.ndarray:
  """The array of an idx file: two zeros, type, rank, sizes, values.

  Args:
    content: the file's bytes, uncompressed.

  Returns:
    The array, of the type and shape that the head gives.

  Raises:
    ValueError: it is no idx file, or cut short.

  Reference: LeCun, Cortes and Burges, "The MNIST database", file formats.

  >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
  array([7, 8, 9], dtype=uint8)
  """
  zeros, kind, rank = struct.unpack_from(">HBB", content)
  if zeros or kind not in _IDX_TYPES:
    raise ValueError("not an idx file")
  shape = struct.unpack_from(f">{rank}I", content, 4)
  values = np.frombuffer(content, _IDX_TYPES[kind], offset=4 + 4 * rank)
  return values.reshape(shape).astype(values.dtype.newbyteorder("="))


def read_npz(
  path: str | os.PathLike, *names: str, layout: str
) -> dict[str, np.ndarray]:
  """Arrays of a file by `np.savez`; nothing is unpickled.

  Args:
    path: the file.
    *names: the arrays' names.
    layout: what the file should be, for errors.

  Returns:
    Those of the arrays that the file has.

  Raises:
    DataError: it is missing, damaged, or another file.
  """
  with reading(path, layout), np.load(path, allow_pickle=False) as stored:
    return {name: np.asarray(stored[name]) for name in names if name in stored}


@contextlib.contextmanager
def open_sqlite(
  path: str | os.PathLike, remedy: str
) -> Iterator[sqlite3.Connection]:
  """Opens an SQLite file to read it.

  Args:
    path: the file.
    remedy: what to do about a bad file, for errors.

  Yields:
    The connection.

  Raises:
    DataError: the file is missing or no SQLite file, or it cannot be read
      within.
  """
  with reading(path, remedy):
    uri = pathlib.Path(path).expanduser().resolve(strict=True).as_uri()
    connection = sqlite3.connect(f"{uri}?mode=ro", uri=True)
    with contextlib.closing(connection):
      yield connection


def find_tfds(name: str, data_dir: str | None) -> tuple[str | None, str]:
  """Finds a set prepared by TFDS as array_record.

  Looks at the files only: asked for a missing set, TFDS would try the network
  for minutes.

  Args:
    name: the set's name in TFDS.
    data_dir: a folder to look in before TFDS's own, `$TFDS_DATA_DIR` or, if
      that is not set, `~/tensorflow_datasets`.

  Returns:
    The newest version's folder or `None`, and what was not found, for errors.

  Raises:
    DataError: a set's description cannot be read.
  """
  default = os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
  roots = [] if data_dir is None else [data_dir]
  roots.append(os.path.expanduser(default))
  where = " or ".join(os.path.join(root, name) for root in roots)
  missing = f"no set that TFDS prepared as array_record in {where}"
  for root in roots:
    pattern = os.path.join(glob.escape(root), name, "*", "dataset_info.json")
    for path in sorted(glob.glob(pattern), key=_version, reverse=True):
      folder = os.path.dirname(path)
      with reading(path, f"prepare {name} with TFDS again"):
        info = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        if info.get("fileFormat") == "array_record":
          return folder, ""
      missing += f" ({folder} has another format: prepare it with"
      missing += " file_format=array_record)"
  return None, missing


def _version(path: str) -> list[int]:
  """The version in the path of a TFDS set, as numbers."""
  folder = os.path.basename(os.path.dirname(path))
  return [int(number) for number in re.findall(r"\d+", folder)]


def read_tfds(folder: str, split: str) -> dict[str, np.ndarray]:
  """All examples of a set prepared by TFDS, in stored order.

  Args:
    folder: the folder that `find_tfds` found.
    split: 'train' or 'test'.

  Returns:
    Arrays `[N, ...]`, by the name of the feature.

  Raises:
    DataError: the set cannot be read, or its examples are not of one shape.
    ImportError: TFDS is not installed.
  """
  try:
    import tensorflow_datasets as tfds
  except ImportError as error:
    raise ImportError(
      f"{folder}: reading it needs TFDS: pip install tensorflow-datasets "
      "array_record importlib_resources pillow"
    ) from error
  remedy = "delete it and prepare it with TFDS again (array_record)"
  with reading(f"{folder} ({split})", remedy):
    examples = list(tfds.builder_from_directory(folder).as_data_source(split))
    return {
      name: np.stack([np.asarray(example[name]) for example in examples])
      for name in examples[0]
    }


def download(url: str, path: str, md5: str) -> None:
  """Downloads a file atomically and checks its hash.

  Args:
    url: the file's address.
    path: where to write it.
    md5: its expected hash, hexadecimal.

  Raises:
    DataError: the download failed or gave another file.
  """
  logging.getLogger(__name__).info("downloading %s to %s", url, path)
  folder, name = os.path.split(path)
  os.makedirs(folder, exist_ok=True)
  with tempfile.TemporaryDirectory(
    dir=folder, prefix=".download-"
  ) as temporary:
    part = os.path.join(temporary, name)
    with (
      reading(url, f"download it elsewhere and put it into {folder}"),
      urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as source,
      open(part, "wb") as target,
    ):
      shutil.copyfileobj(source, target)
    check_md5(part, md5, url)
    os.replace(part, path)


def check_md5(path: str, md5: str, url: str) -> None:
  """Raises `DataError` if a file does not have the expected hash.

  Args:
    path: the file.
    md5: its expected hash, hexadecimal.
    url: where to get it.

  Raises:
    DataError: it has another hash.
  """
  with open(path, "rb") as stream:
    found = hashlib.file_digest(stream, "md5").hexdigest()
  if found != md5:
    raise DataError(
      f"{path}: damaged or cut short, its md5 is {found} and not {md5}: get it"
      f" again from {url}"
    )
