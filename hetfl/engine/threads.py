"""The engine for CPUs: programs on threads.

For each row (a client, say) a program runs `carry = begin(row)`, `carry =
step(row, carry, s)` for its steps s, and `end(row, carry)`; some rows one after
another or, for few rows of different lengths, some steps at a time in turns.
"""

from collections.abc import Callable
from concurrent import futures
import functools
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
from hetfl.engine.packing import longest_first
from hetfl.engine.work import add, num_rows, PyTree, row, stack, Task, Work


class Threads:
  """Runs parts of the rows as programs of their own, on threads.

  Which thread runs what never changes a result: every program is the same
  wherever it runs, and sums are taken in the order of the parts. JAX's context
  managers affect one thread only; set options with `jax.config.update`.

  Args:
    num_threads: how many programs run at once; by default one for each core
      this process may use.

  Raises:
    ValueError: `num_threads` is below 1. The method `run` raises a TypeError
      under tracing.

  >>> double = Task.of(lambda x: 2 * x)
  >>> work = Work(double, (), np.ones(3, np.float32), np.array([1, 0, 1]))
  >>> [y.tolist() for y in Threads(2).run(work, work._replace(total=True))]
  [[2.0, 0.0, 2.0], 4.0]
  """

  def __init__(self, num_threads: int | None = None):
    checks.counts(**checks.given(num_threads=num_threads))
    self.num_threads = num_threads or num_cores()
    # Two per thread, so that waiting for a late thread costs half as much.
    self.num_pieces = 2 * self.num_threads
    self._pool = futures.ThreadPoolExecutor(self.num_threads, "hetfl")

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

  def run(self, *works: Work) -> tuple[PyTree, ...]:
    """Returns the works' results, in their order, once all are complete."""
    if any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(works)):
      raise TypeError(
        "Threads() dispatches programs itself: its steps cannot be part of"
        " jit, vmap or scan; build the algorithm with Inline() for that"
      )
    parts = [self._parts(work) for work in works]
    flat = [part for of_work in parts for part in of_work]
    # Longest first, by the program's last run time; new programs come first, of
    # each work one part before its second, so that they compile side by side.
    place = [i for of_work in parts for i in range(len(of_work))]
    order = sorted(
      range(len(flat)), key=lambda i: (-flat[i].seconds(), place[i])
    )
    running = {i: flat[i].start(self._pool) for i in order}
    try:
      results = iter([running[i].result() for i in range(len(flat))])
    except BaseException:  # Such as a second signal: no more parts are started.
      for future in running.values():
        future.cancel()
      raise
    return tuple(
      _join(work, of_work, [next(results) for _ in of_work])
      for work, of_work in zip(works, parts)
    )

  def _parts(self, work: Work) -> list["_Part | _Turns"]:
    """Cuts a work into programs that can run at once."""
    steps, rows = np.asarray(work.steps), num_rows(work)
    if rows is None:
      args = (steps.astype(np.int32), *work.shared, work.rows)
      return [_Part(_program(work.task, "whole"), args, int(steps))]
    shares = longest_first(steps.tolist(), self.num_threads)
    longest = max(int(steps[share].sum()) for share in shares)
    equal = longest * self.num_threads <= 1.05 * steps.sum()
    few = rows <= 2 * self.num_pieces <= 2 * steps.max()
    if few and not equal and not work.total:
      # A thread would work a twentieth longer than the mean: rows take turns.
      # Sums keep one program, whichever clients a round has.
      each = _unstack(work.rows)
      return [
        _Turns(work._replace(rows=one), int(n), self.num_pieces)
        for one, n in zip(each, steps)
      ]
    if work.total:
      parts = longest_first(steps.tolist(), min(rows, self.num_pieces))
      ids = np.zeros((len(parts), rows), np.int32)
      for part, members in zip(ids, parts):
        part[: len(members)] = members
    else:
      size = -(-rows // (2 * self.num_pieces))  # Equal parts share a program.
      parts = [[*range(i, min(i + size, rows))] for i in range(0, rows, size)]
      ids = np.arange(len(parts) * size, dtype=np.int32).reshape(-1, size)
    program = _program(work.task, "total" if work.total else "rows")
    every = jax.tree.map(jnp.asarray, work.rows), steps.astype(np.int32)
    return [
      _Part(
        program,
        (work.shared, *every, part, np.int32(len(members))),
        int(steps[members].sum()),
      )
      for part, members in zip(ids, parts)
    ]


class _Program:
  """A compiled function that several threads may call.

  Attributes:
    seconds: of its last run, for each step.
  """

  def __init__(self, fn: Callable):
    self.seconds = math.inf
    self._jitted = jit(fn)
    self._lock = threading.Lock()
    # By the arguments' shapes: `True` once compiled, before that a lock.
    self._compiled: dict[Any, Any] = {}

  def __call__(self, *args: PyTree, size: int = 1) -> PyTree:
    """Runs it to its end; compiles it once for each shape."""
    leaves, tree = jax.tree.flatten(args)
    key = (tree, tuple(jax.typeof(leaf) for leaf in leaves))
    with self._lock:
      compiling = self._compiled.setdefault(key, threading.Lock())
    if compiling is not True:
      # One thread compiles; the others that need the program wait for it.
      with compiling:
        if self._compiled[key] is not True:
          result = jax.block_until_ready(self._jitted(*args))
          self._compiled[key] = True
          return result
    start = time.perf_counter()
    result = jax.block_until_ready(self._jitted(*args))
    if size:
      self.seconds = (time.perf_counter() - start) / size
    return result


class _Part:
  """Some rows of a work, run by one program."""

  def __init__(self, program: _Program, args: tuple, size: int):
    self._program, self._args, self._size = program, args, size

  def seconds(self) -> float:
    """How long it may take; infinite if the program never ran."""
    return self._program.seconds * max(self._size, 1)

  def start(self, pool: futures.Executor) -> futures.Future:
    return pool.submit(self._program, *self._args, size=self._size)


class _Turns(_Part):
  """One row of a work, run in pieces.

  The next piece goes to the end of the queue, so that all rows end at about the
  same time.
  """

  def __init__(self, work: Work, size: int, num_pieces: int):
    args = (*work.shared, work.rows)
    super().__init__(_program(work.task, "advance"), args, size)
    self._task = work.task
    self._cuts = np.linspace(0, size, num_pieces + 1).astype(np.int32)

  def start(self, pool: futures.Executor) -> futures.Future:
    result: futures.Future[PyTree] = futures.Future()
    pool.submit(self._piece, pool, result, 0, None)
    return result

  def _piece(self, pool, result, i, carry):
    if result.cancelled():  # Another part failed.
      return
    task, args = self._task, self._args
    try:
      if i == 0:
        carry = _program(task, "begin")(*args)
      first, last = self._cuts[i], self._cuts[i + 1]
      if last > first:
        carry = self._program(first, last, args, carry, size=int(last - first))
      if i + 2 < len(self._cuts):
        pool.submit(self._piece, pool, result, i + 1, carry)
      else:
        result.set_result(_program(task, "end")(*args, carry))
    except BaseException as error:
      result.set_exception(error)


def _program(task: Task, name: str) -> _Program:
  """A program, kept by its task: a method of it, or "rows", or "total"."""
  if name not in task.programs:
    if name in ("rows", "total"):
      do = functools.partial(_rows, task, name == "total")
    else:
      do = getattr(task, name)
    program = lambda *args: do(*args)  # JAX keeps `functools.partial`s.
    program.__name__ = name  # Profiles show it.
    task.programs.setdefault(name, _Program(program))
  return task.programs[name]


def _rows(task, total, shared, rows, steps, ids, count):
  """Runs some rows one after another; returns a list, or the sum."""
  one = lambda i: task.whole(steps[ids[i]], *shared, row(rows, ids[i]))
  if len(ids) == 1:
    return one(0) if total else stack(one(0))
  zeros = task.zeros(*shared, row(rows, 0))
  if total:
    return jax.lax.fori_loop(0, count, lambda i, sums: add(sums, one(i)), zeros)
  put = lambda i, out: jax.tree.map(lambda a, b: a.at[i].set(b), out, one(i))
  zeros = jax.tree.map(lambda a: jnp.stack([a] * len(ids)), zeros)
  return jax.lax.fori_loop(0, count, put, zeros)


def _join(work: Work, parts: list, results: list[PyTree]) -> PyTree:
  rows = num_rows(work)
  if rows is None:
    return results[0]
  if work.total:
    return functools.reduce(_add, results)
  if isinstance(parts[0], _Turns):
    return _stack(*results)
  return _concatenate(rows, *results)


# One program each; operations on single arrays would be many.
_stack = jax.jit(stack)
_add = jax.jit(add)


def _unstack(tree):
  leaves = jax.tree.leaves(tree)
  on_host = all(isinstance(leaf, np.ndarray) for leaf in leaves)
  return (_rows_of if on_host else jax.jit(_rows_of))(tree)


def _rows_of(tree):
  return [row(tree, i) for i in range(len(jax.tree.leaves(tree)[0]))]


@functools.partial(jax.jit, static_argnums=0)
def _concatenate(rows, *trees):
  return jax.tree.map(lambda *a: jnp.concatenate(a)[:rows], *trees)


def num_cores() -> int:
  """How many cores this process may use."""
  if hasattr(os, "sched_getaffinity"):  # not on macOS
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
