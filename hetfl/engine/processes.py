"""Communication between the processes of one run."""

import jax
from jax.experimental import multihost_utils
import numpy as np

from hetfl.engine.work import PyTree


def from_first(value: PyTree) -> PyTree:
  """Broadcasts the first process's value to every process.

  Args:
    value: a pytree of arrays and numbers, with the same structure, shapes and
      dtypes in every process.

  Returns:
    The first process's leaves, as NumPy arrays; with one process, `value`.

  >>> from_first({'round': 3})
  {'round': 3}
  """
  if jax.process_count() == 1:
    return value
  return multihost_utils.broadcast_one_to_all(value)


def bytes_from_first(content: bytes) -> bytes:
  """Broadcasts the first process's bytes to every process.

  Args:
    content: the bytes; those of the other processes are ignored.

  Returns:
    The first process's bytes.
  """
  if jax.process_count() == 1:
    return content
  size = int(from_first(np.int32(len(content))))
  padded = np.frombuffer(content[:size].ljust(size), np.uint8)
  return np.asarray(from_first(padded)).tobytes()
