"""Arrays on disk: written once, then mapped into memory."""

from collections.abc import Callable
import fcntl
import hashlib
import json
import logging
import os
import pathlib
from typing import Any

import numpy as np

from hetfl import checks
from hetfl.data.errors import reading

Append = Callable[[str, np.ndarray], None]  # Rows to the array of a name.
Made = tuple[dict[str, Any], dict[str, np.ndarray]]  # Facts, and arrays.


def in_memory(make: Callable[[Append], dict[str, Any]]) -> Made:
  """What `make` makes, in memory; see `stored`.

  >>> def make(append):
  ...   for i in range(2):
  ...     append('x', np.arange(i, i + 2))
  ...   return {'made': 2}
  >>> in_memory(make)
  ({'made': 2}, {'x': array([0, 1, 1, 2])})
  """
  parts: dict[str, list[np.ndarray]] = {}
  facts = make(lambda name, rows: parts.setdefault(name, []).append(rows))
  whole = lambda rows: rows[0] if len(rows) == 1 else np.concatenate(rows)
  return facts, {name: whole(rows) for name, rows in parts.items()}


def stored(
  folder: str | os.PathLike,
  source: Any,
  make: Callable[[Append], dict[str, Any]],
) -> Made:
  """What `make` makes, from a folder; it is made only if it is not there.

  It is made again if the source is another, or if a file was cut or changed.
  Other processes that want it meanwhile wait. Nothing is pickled.

  Args:
    folder: the folder.
    source: all that it depends on, as JSON has it.
    make: given a function that appends rows to the array of a name, writes all
      arrays, none of which is empty, and returns facts, as JSON has them.

  Returns:
    The facts and the arrays, which are read from disk as they are used.

  Raises:
    DataError: the folder cannot be written.
  """
  folder = pathlib.Path(folder)
  with reading(folder, "make it writable, or keep the arrays in memory"):
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / ".lock", "wb")
  with lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
      pass  # A file system without locks.
    if (found := _found(folder, source)) is None:
      logging.getLogger(__name__).info("writing %s, once", folder)
      _write(folder, source, make)
      found = _found(folder, source)
      assert found is not None
  return found


def _digest(path: pathlib.Path) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _found(folder: pathlib.Path, source: Any) -> Made | None:
  """What is in the folder, if it is whole and of this source."""
  try:
    index = json.loads((folder / "index.json").read_text())
    if index["source"] != source:
      return None
    arrays = {}
    for name, (dtype, shape, digest) in index["arrays"].items():
      path = folder / f"{name}.bin"
      if _digest(path) != digest:
        raise ValueError(f"{path.name} is damaged")
      mapped = np.memmap(path, dtype, "r").reshape(-1, *shape)
      arrays[name] = np.asarray(mapped)
    return index["facts"], arrays
  except FileNotFoundError:
    return None
  except (ValueError, KeyError, TypeError) as error:
    logging.getLogger(__name__).warning("%s: %s", folder, error)
    return None


def _write(folder, source, make) -> None:
  for old in (folder / "index.json", *folder.glob("*.bin")):
    old.unlink(missing_ok=True)
  remedy = f"while writing {folder}; free some space, and repeat the command"
  shapes: dict[str, tuple[str, list[int]]] = {}

  def append(name, rows):
    with checks.noted(remedy), open(folder / f"{name}.bin", "ab") as file:
      np.ascontiguousarray(rows).tofile(file)
    shapes[name] = rows.dtype.str, list(rows.shape[1:])

  facts = make(append)
  digests = {name: _digest(folder / f"{name}.bin") for name in shapes}
  arrays = {name: (*shape, digests[name]) for name, shape in shapes.items()}
  # Written last, and whole: without it nothing counts.
  part = folder / "index.part"
  index = {"source": source, "facts": facts, "arrays": arrays}
  with checks.noted(remedy):
    part.write_text(json.dumps(index))
    part.replace(folder / "index.json")
