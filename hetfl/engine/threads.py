"""The engine for CPUs: programs on threads."""

from collections.abc import Callable, Sequence
from concurrent import futures
import math
import os
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import checks
from hetfl.engine.compilation import jit
from hetfl.engine.jobs import (
  Call,
  Chunks,
  Each,
  Job,
  Lanes,
  PyTree,
  stack,
  Stages,
  zeros_of,
)


class Threads:
  """Runs lanes, chunks, rows and calls as programs of their own, on threads.

  Which thread runs what never changes a result: every program is the same
  wherever it runs, and sums are taken in the order of the lanes. JAX's context
  managers affect one thread only; set options with `jax.config.update`.

  Args:
    num_threads: how many programs run at once; by default one for each core
      this process may use.

  Raises:
    ValueError: `num_threads` is below 1. The method `run` raises a TypeError
      under tracing.

  >>> job = Call(lambda x: 2 * x, (np.ones(()),))
  >>> [float(y) for y in Threads(2).run(job, job._replace(when=False))]
  [2.0, 0.0]
  """

  def __init__(self, num_threads: int | None = None):
    checks.counts(**checks.given(num_threads=num_threads))
    self.num_threads = num_threads or num_cores()
    # Two per thread, so that waiting for a late thread costs half as much.
    self.num_pieces = 2 * self.num_threads
    self._pool = futures.ThreadPoolExecutor(self.num_threads, "hetfl")
    self._programs: dict[Callable, Callable] = {}
    # By program and shapes of its arguments: the compiled programs, and a lock
    # for each one that is being compiled.
    self._ready: set[tuple[Any, ...]] = set()
    self._locks: dict[tuple[Any, ...], threading.Lock] = {}
    self._seconds: dict[Callable, float] = {}
    self._lock = threading.Lock()

  def num_lanes(self, num_clients: int) -> int:
    """Two per thread, but at most one per client.

    Args:
      num_clients: see `Engine`.

    Returns:
      The number of lanes.

    >>> Threads(2).num_lanes(10), Threads(2).num_lanes(3)
    (4, 3)
    """
    return min(self.num_pieces, num_clients)

  def compile(self, fn: Callable, donate: tuple[int, ...] = ()) -> Callable:
    """Returns the function as it is: its programs are compiled one by one.

    Args:
      fn: see `Engine`.
      donate: has no effect: no argument is donated.

    Returns:
      `fn`.
    """
    del donate
    return fn

  def run(self, *jobs: Job) -> tuple[PyTree, ...]:
    """Returns the jobs' results, in their order, once all are complete."""
    if any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(jobs)):
      raise TypeError(
        "Threads() dispatches programs itself: its steps cannot be part of"
        " jit, vmap or scan; build the algorithm with Inline() for that"
      )
    tasks = [self._tasks(job) for job in jobs]
    flat = [task for group in tasks for task in group]
    # Longest first, by the program's last run time; new programs come first.
    order = sorted(
      range(len(flat)), key=lambda i: -self._cost(flat[i][0], flat[i][2])
    )
    running = {i: self._start(*flat[i]) for i in order}
    try:
      results = iter([running[i].result() for i in range(len(flat))])
    except BaseException:  # Such as a second signal: no more tasks are started.
      for future in running.values():
        future.cancel()
      raise
    return tuple(
      self._join(job, [next(results) for _ in group])
      for job, group in zip(jobs, tasks)
    )

  def _tasks(self, job: Job) -> list[tuple[Callable | Stages, tuple, int]]:
    """Cuts a job into programs that can run at once, each with its size."""
    part = lambda tree, i: jax.tree.map(lambda a: a[i], tree)
    if isinstance(job, Lanes):
      return [
        (job.fn, (*job.shared, part(job.lanes, i), n), int(n))
        for i, n in enumerate(job.steps)
      ]
    if isinstance(job, Call):
      chosen = job.fn if job.when else job.otherwise
      return [(chosen, job.args, 1)] if chosen else []
    if isinstance(job, Each):
      rows = len(jax.tree.leaves(job.rows)[0])
      stages = job.stages if rows % self.num_threads else None
      fn, steps = stages or (job.fn, [1] * rows)
      each = self._execute(_unstack, (job.rows,), 1)
      return [(fn, (*job.shared, row), int(n)) for row, n in zip(each, steps)]
    if not job.when:
      return []
    # Equal chunks, so that one compiled program serves all of them.
    rows = len(jax.tree.leaves(job.rows)[0])
    size = next(
      size
      for size in range(-(-rows // (2 * self.num_pieces)), rows + 1)
      if rows % size == 0
    )
    return [
      (job.fn, (*job.shared, part(job.rows, slice(i, i + size))), 1)
      for i in range(0, rows, size)
    ]

  def _start(self, fn: Callable | Stages, args: tuple, size: int):
    """Submits a task; if it has stages, piece by piece.

    Rows that the threads cannot share equally take turns: a row's next piece
    goes to the end of the queue, so that all rows end at about the same time.
    """
    if not isinstance(fn, Stages):
      return self._pool.submit(self._execute, fn, args, size)
    result: futures.Future[PyTree] = futures.Future()
    cuts = np.linspace(0, size, self.num_pieces + 1).astype(np.int32)

    def piece(i, carry):
      if result.cancelled():  # Another job failed.
        return
      try:
        if i == 0:
          carry = self._execute(fn.begin, args, 1)
        first, last = cuts[i], cuts[i + 1]
        carry = self._execute(
          fn.advance, (*args, carry, first, last), int(last - first)
        )
        if i + 2 < len(cuts):
          self._pool.submit(piece, i + 1, carry)
        else:
          result.set_result(self._execute(fn.end, (*args, carry), 1))
      except BaseException as error:
        result.set_exception(error)

    self._pool.submit(piece, 0, None)
    return result

  def _cost(self, fn: Callable | Stages, size: int) -> float:
    """Seconds that a program may take; infinite if it never ran."""
    fn = fn.advance if isinstance(fn, Stages) else fn
    return self._seconds.get(fn, math.inf) * max(size, 1)

  def _join(self, job: Job, results: list[PyTree]) -> PyTree:
    if isinstance(job, Call) and not results:
      return zeros_of(job.fn, *job.args)
    if isinstance(job, Chunks) and not results:
      # Zeros of the full shapes that take no memory.
      shapes = jax.eval_shape(job.fn, *job.shared, job.rows)
      zeros = lambda a: np.broadcast_to(np.zeros((), a.dtype), a.shape)
      return jax.tree.map(zeros, shapes)
    if isinstance(job, Each) or (isinstance(job, Lanes) and job.stacked):
      return self._execute(stack, results, 1)
    if isinstance(job, Call) or len(results) == 1:
      return results[0]
    join = _sum if isinstance(job, Lanes) else _concatenate
    return self._execute(join, results, 1)

  def _execute(self, fn: Callable, args: Sequence[PyTree], size: int) -> PyTree:
    """Runs one program to its end; compiles it once for each shape."""
    leaves, tree = jax.tree.flatten(args)
    key = (fn, tree, tuple(jax.typeof(leaf) for leaf in leaves))
    with self._lock:
      compiling = None
      if key not in self._ready:
        compiling = self._locks.setdefault(key, threading.Lock())
      if fn not in self._programs:
        self._programs[fn] = jit(fn)
      program = self._programs[fn]
    if compiling is not None:
      # One thread compiles; the others that need the program wait for it.
      with compiling:
        if key not in self._ready:
          result = jax.block_until_ready(program(*args))
          self._ready.add(key)
          self._locks.pop(key, None)
          return result
    start = time.perf_counter()
    result = jax.block_until_ready(program(*args))
    if size:
      self._seconds[fn] = (time.perf_counter() - start) / size
    return result


def num_cores() -> int:
  """How many cores this process may use."""
  if hasattr(os, "sched_getaffinity"):  # not on macOS
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _unstack(tree):
  """The rows of a tree, by one program; slicing arrays would take many."""
  rows = len(jax.tree.leaves(tree)[0])
  return [jax.tree.map(lambda a, i=i: a[i], tree) for i in range(rows)]


def _sum(*trees):
  return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *trees)


def _concatenate(*trees):
  return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)
