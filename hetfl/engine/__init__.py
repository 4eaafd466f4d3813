"""Where the rows of work of a step run: one device, a mesh, or CPU threads.

A step hands an engine *work*: rows that do not depend on each other, such as
the clients of a round, each of some steps. The engine packs, splits and orders
the rows, and hands back their results or their sum; the algorithms know nothing
of devices. The engines give the same results up to rounding, except that on a
mesh a student's dropout and batch normalisation act on each device's share of
a batch:

* `Inline()`: all work becomes part of the program being traced, rows as a
  `jax.vmap`. The step stays a pure function, for `jax.jit`, `jax.vmap` over
  trials and `jax.lax.scan` over rounds. The choice for one accelerator.
* `Inline(mesh)`: the same, with the rows split over a mesh axis by
  `jax.shard_map`. Inputs and outputs are replicated. The choice for several
  accelerators.
* `Threads()`: for CPUs. A few rows at a time form a program of their own, run
  by a pool of threads, the longest first. XLA runs a program of small matrix
  products well on one core and badly on several, so this is the fast way to use
  all cores; it also keeps collectives, which can starve XLA's CPU thread pool,
  out of programs. The step then dispatches programs itself and must not be
  traced.
"""

import jax

from hetfl.engine.compilation import bank_format as bank_format
from hetfl.engine.compilation import (
  batch_size_or_default as batch_size_or_default,
)
from hetfl.engine.compilation import compiler_options as compiler_options
from hetfl.engine.compilation import jit as jit
from hetfl.engine.inline import Inline as Inline
from hetfl.engine.processes import bytes_from_first as bytes_from_first
from hetfl.engine.processes import from_first as from_first
from hetfl.engine.threads import num_cores as num_cores
from hetfl.engine.threads import Threads as Threads
from hetfl.engine.work import Engine as Engine
from hetfl.engine.work import Shard as Shard
from hetfl.engine.work import Task as Task
from hetfl.engine.work import Work as Work

AXIS = "devices"


def default_engine(num_threads: int | None = None) -> Engine:
  """The engine for the devices at hand.

  Args:
    num_threads: how many threads to use on a CPU; by default one per core.

  Returns:
    `Threads()` on the CPU of one process, `Inline()` for one accelerator, and
    `Inline(mesh)` over all devices, of all processes, for several.

  Raises:
    ValueError: `num_threads` is below 1.
  """
  if jax.default_backend() == "cpu" and jax.process_count() == 1:
    return Threads(num_threads)
  if jax.device_count() == 1:
    return Inline()
  return Inline(jax.make_mesh((jax.device_count(),), (AXIS,)))
