"""Checkpoints that are verified when read; damaged ones are not used.

A checkpoint is a folder named after its round, `000150/`, with the leaves of
the state as Orbax wrote them (`state/`) and a `manifest.json`: the round, the
caller's `extra`, the path, dtype and shape of each leaf, and SHA-256 digests
of all of these, of Orbax's files and of the leaves' bytes. It is written under
a temporary name and then renamed, so a folder with the plain name is complete;
the digests show whether it still holds what was written.
"""

from collections.abc import Iterator, Mapping
import contextlib
import errno
import hashlib
import json
import logging as std_logging
import os
import pathlib
import re
import shutil
from typing import Any, NamedTuple

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from hetfl.run import logs

_FORMAT = 1
_PART = ".part"  # ends the names of folders that are being written or deleted
# Other errors of reading, such as too many open files, are the machine's.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)


class _Leaf(NamedTuple):
  """A leaf's entry in the manifest; `key` names a PRNG implementation."""

  path: str
  dtype: str
  shape: tuple[int, ...]
  key: str | None = None

  def __str__(self):
    return f"{self.dtype}[{','.join(map(str, self.shape))}]"

  def fits(self, other: "_Leaf | None") -> bool:
    """Whether they are of one kind; a key's dtype tells its implementation."""
    return other is not None and self[:3] == other[:3]


class _DamagedError(Exception):
  """A checkpoint cannot be read, or does not hold what was written."""


class Checkpoints:
  """The checkpoints of one run, in one folder.

  Only one process may write to a folder at a time.

  >>> import tempfile
  >>> folder = tempfile.TemporaryDirectory()
  >>> checkpoints = Checkpoints(folder.name, keep=2)
  >>> state = {'w': jnp.arange(3.), 'key': jax.random.key(0)}
  >>> for round in (50, 100, 150):
  ...   checkpoints.save(round, state, {'seconds': 1.5})
  >>> checkpoints.rounds()
  [100, 150]
  >>> round, state, extra = checkpoints.latest(like=state)
  >>> round, state['w'], extra
  (150, Array([0., 1., 2.], dtype=float32), {'seconds': 1.5})

  Attributes:
    folder: the folder that holds the checkpoints' folders.
    keep: how many checkpoints are kept; the oldest are deleted.

  Raises:
    ValueError: `keep` is below 1.
  """

  def __init__(self, folder: str | os.PathLike[str], keep: int = 3):
    if keep < 1:
      raise ValueError(f"keep={keep}: must be at least 1")
    self.folder = pathlib.Path(folder).absolute()
    self.keep = keep

  def rounds(self) -> list[int]:
    """The rounds that have a folder, damaged or not, in order."""
    names = (p.name for p in self.folder.glob("*") if p.is_dir())
    return sorted(int(n) for n in names if re.fullmatch(r"\d{6,}", n))

  def path(self, round: int) -> pathlib.Path:
    """The folder of a round's checkpoint, `000150` for round 150."""
    return self.folder / f"{round:06d}"

  def save(self, round: int, state: Any, extra: Mapping[str, Any]) -> None:
    """Writes a checkpoint; returns when it is on disk under its final name.

    Checkpoints older than the last `keep` are deleted, and so are those of
    later rounds: `latest` skipped them, so they are damaged.

    Args:
      round: the last round that the state includes.
      state: any pytree of arrays, typed PRNG keys and Python numbers.
      extra: further values to store; anything that `json` takes (NaN included).

    Raises:
      TypeError: a leaf is neither an array nor a number.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    specs = [_spec(path, leaf) for path, leaf in flat]
    data = [
      jax.random.key_data(leaf) if spec.key else leaf
      for spec, (_, leaf) in zip(specs, flat)
    ]
    arrays = list(map(np.asarray, jax.device_get(data)))
    self.folder.mkdir(parents=True, exist_ok=True)
    for path in self.folder.glob(f"*{_PART}"):  # of interrupted saves
      shutil.rmtree(path, ignore_errors=True)
    final = self.path(round)
    part = final.with_name(final.name + _PART)
    part.mkdir()
    if stored := _stored(specs, arrays):
      with _orbax() as orbax:
        orbax.save(part / "state", args=ocp.args.StandardSave(stored))
    manifest = {
      "format": _FORMAT,
      "round": int(round),
      "extra": dict(extra),
      # Key data has another shape and dtype than its keys.
      "leaves": [
        {"spec": list(spec), "dtype": str(a.dtype), "shape": list(a.shape)}
        for spec, a in zip(specs, arrays)
      ],
      "sha256": _digest(arrays),
      "files": _file_digests(part),
    }
    logs.write_bytes(part / "manifest.json", _signed(json.dumps(manifest)))
    _sync(part)
    if final.exists():  # damaged, or the run would have resumed from it
      self._delete(round)
    part.rename(final)
    logs.sync_folder(self.folder)
    rounds = self.rounds()
    kept = [r for r in rounds if r <= round][-self.keep :]
    for old in set(rounds) - set(kept):
      self._delete(old)

  def latest(self, like: Any) -> tuple[int, Any, dict[str, Any]] | None:
    """The newest checkpoint that is not damaged.

    Damaged ones are skipped, with one warning.

    Args:
      like: a state of the same structure, shapes and dtypes; its arrays may be
        `jax.ShapeDtypeStruct`s.

    Returns:
      The round, the state (`jax.Array`s on the default device; NumPy arrays
      and Python numbers where `like` has those) and `extra`; or None if there
      is no such checkpoint.

    Raises:
      ValueError: the checkpoint is undamaged, but of another format or kind of
        state, or Orbax cannot read it here.
      OSError: a file cannot be read for another reason than damage, such as too
        many open files.
    """
    damaged = [
      f"{p.name} was never finished"
      for p in sorted(self.folder.glob(f"*{_PART}"))
      if ".old" not in p.name
    ]
    found = None
    for round in reversed(self.rounds()):
      try:
        found = (round, *self._read(round))
        break
      except _DamagedError as e:
        damaged.append(f"{self.path(round).name} is damaged ({e})")
    if damaged:
      use = self.path(found[0]).name if found else "none, from the start"
      logging.warning(
        f"Checkpoints in {self.folder}: {', '.join(damaged)}; using {use}."
      )
    if found is None:
      return None
    round, leaves, extra = found
    return round, self._unflatten(round, like, leaves), extra

  def _read(
    self, round: int
  ) -> tuple[list[tuple[_Leaf, np.ndarray]], dict[str, Any]]:
    """Reads and verifies a checkpoint; raises `_DamagedError` with a reason."""
    path = self.path(round)
    try:
      content = (path / "manifest.json").read_bytes().decode()
      # Before Orbax parses them: on damaged bytes a parser may do anything.
      files = _file_digests(path)
    except (OSError, ValueError) as e:
      if isinstance(e, OSError) and e.errno not in _DAMAGE:
        raise
      raise _DamagedError(f"it cannot be read: {e}") from e
    text = content.partition("\n")[2].removesuffix("\n")
    if content != _signed(text).decode():
      raise _DamagedError("its manifest is not what was written")
    # From here on the manifest can be trusted.
    manifest = json.loads(text)
    if manifest["format"] != _FORMAT:
      raise ValueError(
        f"checkpoint {path}: format {manifest['format']}, this version of"
        f" hetfl reads {_FORMAT}: use another folder"
      )
    if manifest["round"] != round:
      raise _DamagedError(f"its manifest says round {manifest['round']}")
    for file, digest in sorted(manifest["files"].items()):
      if files.get(file) != digest:
        raise _DamagedError(f"{file} is not what was written")
    specs, arrays = [], []
    for leaf in manifest["leaves"]:
      name, dtype, shape, key = leaf["spec"]
      specs.append(_Leaf(name, dtype, tuple(shape), key))
      arrays.append(np.zeros(leaf["shape"], jnp.dtype(leaf["dtype"])))
    if stored := _stored(specs, arrays):
      try:
        with _orbax() as orbax:
          stored = orbax.restore(
            path / "state", args=ocp.args.StandardRestore(stored)
          )
      except Exception as e:  # Orbax's parts raise errors of any kind
        # Not damage, as the digests are right: later checkpoints must stay.
        raise ValueError(
          f"checkpoint {path} is undamaged, but cannot be read here"
          f" ({type(e).__name__}: {e}): free memory, or use the versions of"
          " Orbax and hetfl that wrote it"
        ) from e
    for i, spec in enumerate(specs):
      arrays[i] = stored.get(_name(i, spec), arrays[i])
    if _digest(arrays) != manifest["sha256"]:
      raise _DamagedError("its arrays are not what was written")
    return list(zip(specs, arrays)), manifest["extra"]

  def _unflatten(
    self, round: int, like: Any, leaves: list[tuple[_Leaf, np.ndarray]]
  ) -> Any:
    """Puts the arrays into the structure of `like`, with its leaves' types."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(like)
    here = {s.path: s for s in (_spec(path, leaf) for path, leaf in flat)}
    there = {spec.path: spec for spec, _ in leaves}
    unlike = [
      f"{path or 'state'}: checkpoint has {there.get(path, 'none')},"
      f" state has {here.get(path, 'none')}"
      for path in here | there
      if path not in here or not here[path].fits(there.get(path))
    ]
    if unlike:
      more = len(unlike) - 5
      raise ValueError(
        f"checkpoint {self.path(round)} is of another kind of state: "
        + "; ".join(unlike[:5])
        + (f"; and {more} more" if more > 0 else "")
        + ". Use another folder, or the model and flags it was made with."
      )
    by_path = {spec.path: (spec.key, array) for spec, array in leaves}
    return jax.tree_util.tree_unflatten(
      treedef,
      [_like(leaf, *by_path[path]) for path, (_, leaf) in zip(here, flat)],
    )

  def _delete(self, round: int) -> None:
    """Deletes a checkpoint; no half-deleted folder has a plain name."""
    path = self.path(round)
    old = path.with_name(f"{path.name}.old{_PART}")
    path.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def _like(leaf: Any, key: str | None, array: np.ndarray) -> Any:
  """An array as a leaf of the same type as `leaf`."""
  if isinstance(leaf, bool | int | float | complex):
    return type(leaf)(array[()])
  if isinstance(leaf, np.ndarray | np.generic):
    return array[()] if isinstance(leaf, np.generic) else array
  # A copy: the state may be donated, NumPy's memory must not be.
  copy = jnp.array(array, copy=True)
  return jax.random.wrap_key_data(copy, impl=key) if key else copy


def _spec(path: tuple[Any, ...], leaf: Any) -> _Leaf:
  """Describes a leaf; of an abstract key without its implementation."""
  name, key = jax.tree_util.keystr(path), None
  if not hasattr(leaf, "dtype"):
    if not isinstance(leaf, bool | int | float | complex):
      raise TypeError(
        f"state{name}: a {type(leaf).__name__} cannot be kept in a"
        " checkpoint; use arrays, or a static field"
      )
    return _Leaf(name, type(leaf).__name__, ())
  if isinstance(leaf, jax.Array) and jnp.issubdtype(
    leaf.dtype, jax.dtypes.prng_key
  ):
    key = str(jax.random.key_impl(leaf))
  return _Leaf(name, str(leaf.dtype), tuple(leaf.shape), key)


def _name(i: int, spec: _Leaf) -> str:
  """A leaf's name for Orbax, which makes it a part of a file's path."""
  return f"{i:04d}" + re.sub(r"\W+", "_", spec.path).rstrip("_")


def _stored(
  specs: list[_Leaf], arrays: list[np.ndarray]
) -> dict[str, np.ndarray]:
  """The arrays that Orbax stores, by name: those that have elements."""
  return {
    _name(i, spec): array
    for i, (spec, array) in enumerate(zip(specs, arrays))
    if array.size
  }


def _digest(arrays: list[np.ndarray]) -> str:
  """SHA-256 of the arrays' bytes, one after the other (hexadecimal)."""
  digest = hashlib.sha256()
  for array in arrays:
    digest.update(np.ascontiguousarray(array).tobytes())
  return digest.hexdigest()


def _signed(text: str) -> bytes:
  """A line of text below a line with its SHA-256."""
  return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n".encode()


def _file_digests(folder: pathlib.Path) -> dict[str, str]:
  """SHA-256 of each file below a folder (hexadecimal), by relative path."""
  return {
    str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
    for path in folder.rglob("*")
    if path.is_file()
  }


def _sync(folder: pathlib.Path) -> None:
  """Flushes the files of a folder and of its subfolders to disk."""
  for root, _, names in os.walk(folder):
    for name in names:
      with open(os.path.join(root, name), "r+b") as f:
        os.fsync(f.fileno())
    logs.sync_folder(root)


@contextlib.contextmanager
def _orbax() -> Iterator[ocp.Checkpointer]:
  """Orbax's synchronous checkpointer: a save is done when it returns.

  It is set up for this process alone, since it only gets NumPy arrays;
  otherwise it would wait for the processes that do not write. Its log lines,
  dozens per save, are kept out of absl's log meanwhile.
  """

  def keep(record: std_logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname

  logger = logging.get_absl_logger()
  logger.addFilter(keep)
  try:
    alone = ocp.options.MultiprocessingOptions(
      primary_host=jax.process_index(),
      active_processes={jax.process_index()},
      barrier_sync_key_prefix=f"process{jax.process_index()}",
    )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(
      handler, multiprocessing_options=alone
    ) as checkpointer:
      yield checkpointer
  finally:
    logger.removeFilter(keep)
