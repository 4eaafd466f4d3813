"""What processes that train as one tell each other."""

import jax
from jax.experimental import multihost_utils
import numpy as np

from hetfl.engine.jobs import PyTree


def from_first(value: PyTree) -> PyTree:
  """What the first process holds, in every process.

  Args:
    value: a pytree of arrays and numbers, alike in structure, shape and dtype
      in every process.

  Returns:
    Its first process's leaves, as NumPy arrays.

  >>> from_first({'round': 3})
  {'round': 3}
  """
  if jax.process_count() == 1:
    return value
  return multihost_utils.broadcast_one_to_all(value)


def bytes_from_first(content: bytes) -> bytes:
  """What the first process has read, in every process.

  Args:
    content: the bytes; those of the other processes do not count.

  Returns:
    The first process's bytes.
  """
  if jax.process_count() == 1:
    return content
  size = int(from_first(np.int32(len(content))))
  padded = np.frombuffer(content[:size].ljust(size), np.uint8)
  return np.asarray(from_first(padded)).tobytes()
