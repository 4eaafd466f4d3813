"""Files of data sets: their formats, downloads, and TFDS's sets."""

from collections.abc import Iterable
import gzip
import io
import json
import logging
import os
import pathlib
import re
from typing import Any, IO
import urllib.request
import zlib

import numpy as np

from hetfl.data.errors import reading
from hetfl.population import ClientPopulation, Subset

_TIMEOUT_SECONDS = 10
_MAX_BYTES = 1 << 28  # Per unpacked file; the largest has 154 million.


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
    crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
  return (json.dumps({**facts, "crc32": f"{crc:08x}"}) + "\n").encode()


def find(data_dir: str | os.PathLike | None, *names: str) -> str | None:
  """Finds a file in a folder or in one of its subfolders.

  Args:
    data_dir: the folder; with `None`, nothing is found.
    *names: names that the file may have, the preferred one first.

  Returns:
    The path; `None` if it is not there.
  """
  if data_dir is not None:
    folder = pathlib.Path(data_dir).expanduser()
    for name in names:
      for path in (folder / name, *sorted(folder.glob(f"*/{name}"))):
        if path.is_file():
          return str(path)
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
    if not raw.startswith(b"\x1f\x8b"):
      return raw
    return unpacked(gzip.GzipFile(fileobj=io.BytesIO(raw)))


def unpacked(stream: IO[bytes] | gzip.GzipFile) -> bytes:
  """All bytes of a compressed file; a `ValueError` if they are too many.

  A few bytes can be made to unpack to more than the memory holds.
  """
  content = stream.read(_MAX_BYTES + 1)
  if len(content) > _MAX_BYTES:
    raise ValueError(f"unpacks to more than {_MAX_BYTES} bytes")
  return content


def parse_idx(content: bytes) -> np.ndarray:
  """The array of an idx file of bytes: two zeros, 8, rank, sizes, values.

  Args:
    content: the file's bytes, uncompressed.

  Returns:
    The array, `uint8` of the shape that the head gives.

  Raises:
    ValueError: it is not an idx file of bytes, or is cut short.

  Reference: LeCun, Cortes and Burges, "The MNIST database", file formats.

  >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
  array([7, 8, 9], dtype=uint8)
  """
  if content[:3] != b"\0\0\x08":
    raise ValueError("not an idx file of bytes")
  rank = int.from_bytes(content[3:4])
  shape = np.frombuffer(content, ">u4", rank, offset=4)
  values = np.frombuffer(content, np.uint8, offset=4 + 4 * rank)
  return values.reshape(shape.tolist()).copy()


def read_npz(path: str | os.PathLike, *names: str) -> dict[str, np.ndarray]:
  """Arrays of a file by `np.savez`; nothing is unpickled.

  Raises an error of any kind if it is missing, damaged or another file; read it
  within `errors.reading`.

  Args:
    path: the file.
    *names: the arrays' names.

  Returns:
    Those of the arrays that the file has.
  """
  with np.load(path, allow_pickle=False) as stored:
    return {name: np.asarray(stored[name]) for name in names if name in stored}


def find_tfds(
  name: str, data_dir: str | os.PathLike | None
) -> tuple[str | None, str]:
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
  roots = [root for root in (data_dir, default) if root is not None]
  places = [pathlib.Path(root).expanduser() / name for root in roots]
  missing = "no set that TFDS prepared as array_record in "
  missing += " or ".join(map(str, places))
  version = lambda path: [int(n) for n in re.findall(r"\d+", path.parent.name)]
  for place in places:
    found = place.glob("*/dataset_info.json")
    for path in sorted(found, key=version, reverse=True):
      with reading(path, f"prepare {name} with TFDS again"):
        info = json.loads(path.read_text(encoding="utf-8"))
        file_format = info.get("fileFormat")
      if file_format == "array_record":
        return str(path.parent), ""
      missing += f" ({path.parent} has another format)"
  return None, missing


def read_tfds(folder: str | os.PathLike, split: str) -> dict[str, np.ndarray]:
  """All examples of a set prepared by TFDS, in stored order.

  Args:
    folder: the folder that `find_tfds` found.
    split: 'train' or 'test'.

  Returns:
    Arrays `[N, ...]`, by the name of the feature.

  Raises:
    DataError: the set cannot be read, or its examples are not of one shape.
    ImportError: TFDS, array_record or Pillow is not installed.
  """
  import tensorflow_datasets as tfds

  remedy = "delete it and prepare it with TFDS again (array_record)"
  with reading(f"{folder} ({split})", remedy):
    examples = list(tfds.builder_from_directory(folder).as_data_source(split))
    return {
      name: np.stack([np.asarray(example[name]) for example in examples])
      for name in examples[0]
    }


def download(url: str, path: pathlib.Path) -> None:
  """Downloads a file atomically.

  Args:
    url: the file's address.
    path: where to write it.

  Raises:
    DataError: the download failed.
  """
  logging.getLogger(__name__).info("downloading %s to %s", url, path)
  with (
    reading(url, f"download it elsewhere and put it into {path.parent}"),
    urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as source,
  ):
    content = source.read()
  path.parent.mkdir(parents=True, exist_ok=True)
  part = path.with_name(f"{path.name}.part")
  part.write_bytes(content)
  part.replace(path)
