"""Checkpoints that are verified when read; damaged ones are not used.

A checkpoint is a folder named after its round, `000150/`, with the leaves of
the state by path (`state.npz`) and a `manifest.json`: the caller's `extra`, the
path, dtype and shape of each leaf, the SHA-256 digests of the other files and,
in its first line, its own. It is written under a temporary name and
then renamed, so a folder with the plain name is complete; the digests show
whether it still holds what was written.
"""

from collections.abc import Iterable, Mapping
import errno
import hashlib
import json
import math
import os
import pathlib
import re
import shutil
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from hetfl.engine.work import key_data, of_type
from hetfl.run import logs

PyTree = Any
_PART = ".part"  # ends the names of folders that are being written
# Other errors of reading, such as too many open files, are the machine's.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)


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
    keep: how many checkpoints are kept, at least one; the oldest are deleted,
      but not the last whose numbers are all finite.
  """

  def __init__(self, folder: str | os.PathLike[str], keep: int = 3):
    self.folder = pathlib.Path(folder).absolute()
    self.keep = keep

  def rounds(self) -> list[int]:
    """The rounds that have a folder, damaged or not, in order."""
    names = (path.name for path in self.folder.glob("*"))
    return sorted(int(name) for name in names if re.fullmatch(r"\d{6,}", name))

  def path(self, round: int) -> pathlib.Path:
    """The folder of a round's checkpoint, `000150` for round 150."""
    return self.folder / f"{round:06d}"

  def save(self, round: int, state: PyTree, extra: Mapping[str, Any]) -> None:
    """Writes a checkpoint; returns when it is on disk under its final name.

    Checkpoints older than the last `keep` are deleted, except the last finite
    one, and so are those of later rounds: `latest` skipped them.

    Args:
      round: the last round that the state includes.
      state: a pytree of arrays and typed PRNG keys.
      extra: further values to store; anything that `json` takes (NaN included).
    """
    for path in self.folder.glob(f"*{_PART}"):  # of interrupted saves
      shutil.rmtree(path)
    final = self.path(round)
    part = final.with_name(final.name + _PART)
    part.mkdir(parents=True)
    kinds, arrays = _kinds(state), jax.tree.leaves(to_host(state))
    with logs.writing(final):
      np.savez(part / "state.npz", **dict(zip(kinds, arrays)))
    manifest = {
      "extra": dict(extra),
      "finite": all(map(_all_finite, arrays)),
      "specs": kinds,
      "files": _digests(part),
    }
    logs.write_bytes(part / "manifest.json", _signed(json.dumps(manifest)))
    for path in (part, *part.rglob("*")):
      logs.sync(path)
    shutil.rmtree(final, ignore_errors=True)  # A damaged one.
    part.rename(final)
    logs.sync(self.folder)
    rounds = self.rounds()
    earlier = [r for r in rounds if r <= round]
    finite = round
    if not manifest["finite"]:
      finite = next(filter(self._is_finite, reversed(earlier)), round)
    for old in set(rounds) - {*earlier[-self.keep :], finite}:
      shutil.rmtree(self.path(old), ignore_errors=True)

  def _is_finite(self, round: int) -> bool:
    try:
      return _verified(self.path(round)).get("finite", True)
    except (OSError, ValueError):
      return False

  def latest(
    self, like: PyTree, before: float = math.inf
  ) -> tuple[int, PyTree, dict[str, Any]] | None:
    """The newest checkpoint that is not damaged.

    Damaged ones are skipped, with one warning.

    Args:
      like: a state of the same structure, shapes and dtypes.
      before: only checkpoints of earlier rounds count.

    Returns:
      The round, the state, as `jax.Array`s on the default device (NumPy's where
      `like` has them, and its own memory maps, filled anew), and `extra`; or
      None if there is no such checkpoint.

    Raises:
      ValueError: the checkpoint is undamaged, but of another kind of state.
      OSError: a file cannot be read for another reason than damage, such as too
        many open files.
    """
    found = self._newest(before)
    if found is None:
      return None
    round, manifest = found
    there, here = manifest["specs"], _kinds(like)
    if there != here:
      few = lambda a, b: dict(sorted(a.items() - b.items())[:5])
      raise ValueError(
        f"checkpoint {self.path(round)} is of another kind of state: it has"
        f" {few(there, here)}, not {few(here, there)}. Use another folder, or"
        " the model and flags of this one."
      )
    arrays = self._restored(round, here, to_host(like))
    return round, from_host(arrays, like), manifest["extra"]

  def part(self, where: str, like: PyTree) -> PyTree:
    """A part of the newest state that is not damaged, such as a model.

    Args:
      where: its place in the state, such as `.server[0].variables`.
      like: such a part, or its shapes and types, as `jax.eval_shape` gives them
        of `model.init`.

    Returns:
      The part.

    Raises:
      ValueError: there is no checkpoint, or none with such a part.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> checkpoints = Checkpoints(folder.name)
    >>> checkpoints.save(1, {'a': [{'w': jnp.arange(3.)}, jnp.ones(2)]}, {})
    >>> checkpoints.part("['a'][0]", like={'w': jnp.zeros(3)})
    {'w': Array([0., 1., 2.], dtype=float32)}
    """
    found = self._newest()
    if found is None:
      raise ValueError(f"{self.folder}: holds no checkpoint")
    round, manifest = found
    there = manifest["specs"]
    wanted = {where + path: kind for path, kind in _kinds(like).items()}
    if unlike := wanted.items() - there.items():
      near = [(p, has) for p, has in there.items() if p.startswith(where)]
      if not near:  # How all that is there begins, as `.server[0]`.
        begun = re.findall(r"^(?:\.\w+|\[.*?\]){1,2}", "\n".join(there), re.M)
        near = [(path, "...") for path in dict.fromkeys(begun)]
      raise ValueError(
        f"where={where!r}: {self.path(round)} has {dict(near[:9])}, not"
        f" {dict(sorted(unlike)[:5])}"
      )
    plain = jax.eval_shape(key_data, like)
    arrays = self._restored(round, wanted, plain)
    return jax.tree.map(lambda a, to: of_type(jnp.asarray(a), to), arrays, like)

  def _restored(self, round: int, paths: Iterable[str], like: PyTree) -> PyTree:
    """The arrays of these paths, in the structure of `like`."""
    leaves, treedef = jax.tree.flatten(like)
    with np.load(self.path(round) / "state.npz") as stored:
      # NumPy's files have bytes in place of bfloat16 and the like.
      arrays = [stored[p].view(leaf.dtype) for p, leaf in zip(paths, leaves)]
    return jax.tree.unflatten(treedef, arrays)

  def _newest(self, before: float = math.inf) -> tuple[int, dict] | None:
    """The round and manifest of the newest checkpoint that is not damaged."""
    found, damaged = None, []
    for round in reversed([r for r in self.rounds() if r < before]):
      path = self.path(round)
      try:
        found = round, _verified(path)
        break
      except (OSError, ValueError) as e:
        if isinstance(e, OSError) and e.errno not in _DAMAGE:
          raise
        damaged.append(f"{path.name} is damaged ({e})")
    if damaged:
      use = path.name if found else "none, from the start"
      logging.warning(
        f"Checkpoints in {self.folder}: {', '.join(damaged)}; using {use}."
      )
    if found and not isinstance(found[1].get("specs"), dict):
      raise ValueError(
        f"{self.path(found[0])} is of an earlier version of hetfl; use another"
        " folder, or the version that began this one"
      )
    return found


def _all_finite(array: np.ndarray) -> bool:
  floats = jnp.issubdtype(array.dtype, jnp.floating)
  return not floats or bool(np.isfinite(array).all())


def to_host(state: PyTree) -> PyTree:
  """A state as NumPy arrays; of typed keys, their data."""
  return jax.device_get(key_data(state))


def from_host(arrays: PyTree, like: PyTree) -> PyTree:
  """The inverse of `to_host`; `like` has keys and NumPy arrays where it had."""

  def leaf(array, like):
    if isinstance(like, np.ndarray):  # From `on_host`; a map stays on disk.
      kept = like if isinstance(like, np.memmap) else np.empty_like(like)
      kept[...] = array
      return kept
    # A copy: the state may be donated, NumPy's memory must not be.
    return of_type(jnp.array(array, copy=True), like)

  return jax.tree.map(leaf, arrays, like)


def _kinds(state: PyTree) -> dict[str, str]:
  """The dtype and shape of each leaf, by path; a key's dtype tells its kind."""
  return {
    jax.tree_util.keystr(path): f"{leaf.dtype}{[*leaf.shape]}"
    for path, leaf in jax.tree.leaves_with_path(state)
  }


def _signed(text: str) -> bytes:
  """A line of text below a line with its SHA-256."""
  return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n".encode()


def _digests(folder: pathlib.Path) -> dict[str, str]:
  """SHA-256 of each file below a folder (hexadecimal), by relative path."""
  found = {}
  for path in filter(pathlib.Path.is_file, folder.rglob("*")):
    with path.open("rb") as file:  # It may be larger than the memory.
      digest = hashlib.file_digest(file, "sha256")
    found[str(path.relative_to(folder))] = digest.hexdigest()
  return found


def _verified(folder: pathlib.Path) -> dict[str, Any]:
  """A checkpoint's manifest; a `ValueError` if not all is as it was written."""
  content = (folder / "manifest.json").read_bytes().decode()
  text = content.partition("\n")[2].removesuffix("\n")
  if content != _signed(text).decode():
    raise ValueError("its manifest is not what was written")
  manifest = json.loads(text)
  # NumPy must not parse damaged bytes: a parser may then do anything.
  found = _digests(folder)
  for file, digest in manifest["files"].items():
    if found.get(file) != digest:
      raise ValueError(f"{file} is not what was written")
  return manifest
