"""Where the work of a step runs: one device, a mesh, or CPU threads.

A step is written as rounds of *jobs* that do not depend on each other. The
engine runs them and hands back their results; the algorithms know nothing of
devices. The three engines give the same results up to rounding, except that on
a mesh a student's dropout and batch normalisation act on each device's share of
a batch:

* `Inline()`: every job becomes part of the program being traced, lanes as a
  `jax.vmap`. The step stays a pure function, for `jax.jit`, `jax.vmap` over
  trials and `jax.lax.scan` over rounds. The choice for one accelerator.
* `Inline(mesh)`: the same, with the work on lanes, chunks and rows split over a
  mesh axis by `jax.shard_map`. Inputs and outputs are whole on every device.
  The choice for several accelerators.
* `Threads()`: for CPUs. Each lane, row and call is a program of its own, run
  by a pool of threads, the longest first. XLA runs a program of small matrix
  products well on one core and badly on several, so this is the fast way to use
  all cores; it also keeps collectives, which can starve XLA's CPU thread pool,
  out of programs. The step then dispatches programs itself and must not be
  traced.
"""

import jax

from hetfl.engine.compilation import compiler_options, jit
from hetfl.engine.inline import Inline
from hetfl.engine.jobs import (
  Call,
  Chunks,
  Each,
  Engine,
  Job,
  Lanes,
  Shard,
  Stages,
  zeros_of,
)
from hetfl.engine.processes import bytes_from_first, from_first
from hetfl.engine.threads import Threads

AXIS = "lanes"

__all__ = [
  "AXIS",
  "Call",
  "Chunks",
  "Each",
  "Engine",
  "Inline",
  "Job",
  "Lanes",
  "Shard",
  "Stages",
  "Threads",
  "bytes_from_first",
  "compiler_options",
  "default_engine",
  "from_first",
  "jit",
  "zeros_of",
]


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
