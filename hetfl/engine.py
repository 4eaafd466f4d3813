"""Where the work of a step runs: one device, a mesh, or CPU threads.

A step is written as rounds of *jobs* that do not depend on each other. The
engine runs them and hands back their results; the algorithms know nothing of
devices. Three engines give the same results to rounding:

* `Inline()`: every job becomes part of the program being traced, lanes as a
  `jax.vmap`. The step stays a pure function, for `jax.jit`, `jax.vmap` over
  trials and `jax.lax.scan` over rounds. The choice for one accelerator.
* `Inline(mesh)`: the same, with lanes, chunks and rows split over a mesh axis
  by `jax.shard_map`. The choice for several accelerators.
* `Threads()`: for CPUs. Each lane, row and call is a program of its own, run
  by a pool of threads, the longest first. XLA uses one core well in a program
  of small matrix products and several badly, so this is the fast way to use
  all cores; it also keeps collectives out of programs, which can starve XLA's
  CPU thread pool. The step then dispatches programs itself and must not be
  traced.
"""

from collections.abc import Callable
from concurrent import futures
import functools
import math
import os
import threading
import time
from typing import Any, NamedTuple, Protocol

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

PyTree = Any
AXIS = "lanes"


class Shard(NamedTuple):
  """A device's share of a batch, within a program that all devices run.

  Attributes:
    axis: the mesh axis.
    count: how many devices share.
  """

  axis: str
  count: int

  def take(self, tree: PyTree) -> PyTree:
    """Its rows of arrays whose rows all devices have."""

    def part(x):
      size = len(x) // self.count
      start = jax.lax.axis_index(self.axis) * size
      return jax.lax.dynamic_slice_in_dim(x, start, size)

    return jax.tree.map(part, tree)

  def sum(self, tree: PyTree) -> PyTree:
    """The sum over the devices."""
    return jax.lax.psum(tree, self.axis)


class Call(NamedTuple):
  """Runs `fn(*args)`.

  Attributes:
    fn: a pure function; keep the same object from round to round.
    args: its arguments.
    when: whether to run it; if not, the result is that of `otherwise`.
    otherwise: a cheap function of the same arguments with results of the same
      shapes; by default zeros.
    shared: whether devices may share the work: where there are several, `fn`
      is called with `shard`, a `Shard`, and must give all the same result.
  """

  fn: Callable[..., PyTree]
  args: tuple[PyTree, ...]
  when: jax.Array | bool = True
  otherwise: Callable[..., PyTree] | None = None
  shared: bool = False


class Lanes(NamedTuple):
  """Sums `fn(*shared, lane, steps)` over lanes.

  Attributes:
    fn: a pure function of one lane.
    shared: arguments that all lanes see.
    lanes: a pytree with lanes on the first axes.
    steps: `int32[L]`, how many steps of each lane are work. Side by side in
      one program all lanes are told the largest.
  """

  fn: Callable[..., PyTree]
  shared: tuple[PyTree, ...]
  lanes: PyTree
  steps: jax.Array | np.ndarray


class Chunks(NamedTuple):
  """Applies `fn(*shared, chunk)` to chunks of the rows of `rows`.

  Attributes:
    fn: a pure function of some rows that gives as many rows.
    shared: arguments that all chunks see.
    rows: a pytree of arrays with N rows.
    when: as in `Call`; zeros if not.
  """

  fn: Callable[..., PyTree]
  shared: tuple[PyTree, ...]
  rows: PyTree
  when: jax.Array | bool = True


class Stages(NamedTuple):
  """A function of a row that can be interrupted between its steps.

  Attributes:
    begin: `(*shared, row) -> carry`.
    advance: `(*shared, row, carry, first, last) -> carry`, runs steps `first`
      to `last - 1`.
    end: `(*shared, row, carry) -> result`.
  """

  begin: Callable[..., PyTree]
  advance: Callable[..., PyTree]
  end: Callable[..., PyTree]

  def whole(self, *args, steps: jax.Array) -> PyTree:
    """Runs all steps at once.

    Args:
      *args: the shared arguments and the row.
      steps: how many steps the row has.

    Returns:
      The result.
    """
    carry = self.begin(*args)
    return self.end(*args, self.advance(*args, carry, 0, steps))


class Each(NamedTuple):
  """Applies `fn(*shared, row)` to each row of `rows` and stacks the results.

  For clients that keep a state of their own: each is a program of its own on
  threads, and one of a `jax.vmap` elsewhere.

  Attributes:
    fn: a pure function of one row.
    shared: arguments that all rows see.
    rows: a pytree of arrays with N rows.
    stages: the same in stages, so that threads can change rows between them,
      and the number of steps of each row, `int32[N]`; `None` if it has none.
  """

  fn: Callable[..., PyTree]
  shared: tuple[PyTree, ...]
  rows: PyTree
  stages: tuple[Stages, np.ndarray] | None = None


Job = Call | Lanes | Chunks | Each


class Engine(Protocol):
  """Runs jobs that do not depend on each other.

  Attributes:
    num_pieces: how many pieces independent work is best cut into.
  """

  num_pieces: int

  def num_lanes(self, num_clients: int) -> int:
    """How many lanes a round's clients are best packed into."""

  def run(self, *jobs: Job) -> tuple[PyTree, ...]:
    """Returns the jobs' results, in their order."""

  def compile(self, fn: Callable, donate: tuple[int, ...] = ()) -> Callable:
    """Makes a function that runs jobs ready for a loop on the host."""


def _zeros(fn, *args):
  return jax.tree.map(
    lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(fn, *args)
  )


class Inline:
  """Runs jobs within the program being traced; see the module's docstring.

  Calls run on every device alike, but for those that share their work, such as
  the students of a codistillation.

  Args:
    mesh: a mesh with one axis, over which lanes and chunks are split. It may
      span processes, all of which then call the same functions with the same
      arguments. `None`: one device.
    max_lanes: how many lanes to run side by side on a device; `None`: as many
      as there are clients, which suits accelerators.

  >>> double = Call(lambda x: 2 * x, (jnp.ones(()),))
  >>> [float(y) for y in Inline().run(double, double._replace(when=False))]
  [2.0, 0.0]
  """

  def __init__(
    self,
    mesh: jax.sharding.Mesh | None = None,
    *,
    max_lanes: int | None = None,
  ):
    if mesh is not None:
      # With explicit axes, inputs would have to come split already.
      auto = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
      mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    self._mesh = mesh
    self._max_lanes = max_lanes
    self.num_pieces = mesh.size if mesh else 1
    self._placed = {}

  def num_lanes(self, num_clients: int) -> int:
    """The clients or `max_lanes` a device, a multiple of the mesh's size."""
    each = -(-num_clients // self.num_pieces)
    return self.num_pieces * min(each, self._max_lanes or each)

  def run(self, *jobs: Job) -> tuple[PyTree, ...]:
    """Returns the jobs' results, in their order."""
    run = {
      Call: self._call,
      Lanes: self._lanes,
      Chunks: self._chunks,
      Each: self._each,
    }
    return tuple(run[type(job)](job) for job in jobs)

  def compile(self, fn: Callable, donate: tuple[int, ...] = ()) -> Callable:
    """Jits the function; arguments `donate` are given up to it."""
    program = jax.jit(fn, donate_argnums=donate)
    if self._mesh is None or not self._mesh.is_multi_process:
      return program

    def run(*args):
      return program(
        *(self._place(arg, i not in donate) for i, arg in enumerate(args))
      )

    return run

  def _place(self, tree: PyTree, keep: bool) -> PyTree:
    """Makes arrays of this process arrays of the whole mesh.

    Args:
      tree: arrays, the same in every process.
      keep: whether to remember them, as for a bank that comes every round.
    """

    def place(leaf):
      if not isinstance(leaf, jax.Array) or not leaf.is_fully_addressable:
        return leaf  # NumPy's count as everywhere, the others are.
      if id(leaf) in self._placed:
        return self._placed[id(leaf)][1]
      everywhere = jax.sharding.NamedSharding(
        self._mesh, jax.sharding.PartitionSpec()
      )
      if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jax.make_array_from_process_local_data(
          everywhere, np.asarray(jax.random.key_data(leaf))
        )
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
      placed = jax.make_array_from_process_local_data(
        everywhere, np.asarray(leaf)
      )
      if keep:
        # With the leaf itself, so that no other can take its id.
        self._placed[id(leaf)] = (leaf, placed)
      return placed

    return jax.tree.map(place, tree)

  def _call(self, job: Call):
    if job.shared and self._mesh is not None:
      shard = Shard(self._mesh.axis_names[0], self._mesh.size)
      same = jax.sharding.PartitionSpec()
      fn = jax.shard_map(
        functools.partial(job.fn, shard=shard),
        mesh=self._mesh,
        in_specs=same,
        out_specs=same,
        check_vma=False,
      )
      job = job._replace(fn=fn, shared=False)
    if job.when is True:
      return job.fn(*job.args)

    def otherwise(*args):
      zeros = _zeros(job.fn, *args)
      if job.otherwise is None:
        return zeros
      # Both branches of a cond must agree in their types.
      return jax.tree.map(
        lambda zero, x: x.astype(zero.dtype), zeros, job.otherwise(*args)
      )

    return jax.lax.cond(job.when, job.fn, otherwise, *job.args)

  def _lanes(self, job: Lanes):
    num_lanes = len(job.steps)
    if num_lanes == 1 and self._mesh is None:
      lane = jax.tree.map(lambda a: a[0], job.lanes)
      return job.fn(*job.shared, lane, job.steps[0])

    def run(shared, lanes, steps):
      results = jax.vmap(lambda lane: job.fn(*shared, lane, jnp.max(steps)))(
        lanes
      )
      return jax.tree.map(lambda a: jnp.sum(a, axis=0), results)

    if self._mesh is None:
      return run(job.shared, job.lanes, job.steps)
    missing = -num_lanes % self._mesh.size
    if missing:
      # Lanes of another number of devices: filled up with ones that count not.
      fn, counts = job.fn, np.arange(num_lanes + missing) < num_lanes

      def counted(*args):
        *shared, (lane, count), steps = args
        return jax.tree.map(
          lambda a: jnp.where(count, a, jnp.zeros_like(a)),
          fn(*shared, lane, steps),
        )

      lanes, steps = jax.tree.map(
        lambda a: jnp.concatenate([a, jnp.repeat(a[:1], missing, axis=0)]),
        (job.lanes, job.steps),
      )
      job = job._replace(fn=counted, lanes=(lanes, counts), steps=steps)
    axis = self._mesh.axis_names[0]
    spec = jax.sharding.PartitionSpec
    return jax.shard_map(
      lambda *args: jax.lax.psum(run(*args), axis),
      mesh=self._mesh,
      in_specs=(spec(), spec(axis), spec(axis)),
      out_specs=spec(),
      check_vma=False,
    )(job.shared, job.lanes, job.steps)

  def _chunks(self, job: Chunks):
    if self._mesh is None:
      return self._call(Call(job.fn, (*job.shared, job.rows), job.when))
    rows = len(jax.tree.leaves(job.rows)[0])
    axis = self._mesh.axis_names[0]
    spec = jax.sharding.PartitionSpec
    split = spec(axis) if rows % self._mesh.size == 0 else spec()
    fn = jax.shard_map(
      lambda shared, rows: job.fn(*shared, rows),
      mesh=self._mesh,
      in_specs=(spec(), split),
      out_specs=split,
      check_vma=False,
    )
    return self._call(Call(fn, (job.shared, job.rows), job.when))

  def _each(self, job: Each):
    def run(shared, rows):
      one = lambda row: job.fn(*shared, row)
      if self._max_lanes is None:
        return jax.vmap(one)(rows)
      return jax.lax.map(one, rows, batch_size=self._max_lanes)

    if self._mesh is None:
      return run(job.shared, job.rows)
    rows = len(jax.tree.leaves(job.rows)[0])
    # The last row again and again, up to as many for each device.
    taken = np.minimum(
      np.arange(-(-rows // self._mesh.size) * self._mesh.size), rows - 1
    )
    axis = self._mesh.axis_names[0]
    spec = jax.sharding.PartitionSpec
    results = jax.shard_map(
      run,
      mesh=self._mesh,
      in_specs=(spec(), spec(axis)),
      out_specs=spec(axis),
      check_vma=False,
    )(job.shared, jax.tree.map(lambda a: jnp.asarray(a)[taken], job.rows))
    return jax.tree.map(lambda a: a[:rows], results)


class Threads:
  """Runs lanes, chunks, rows and calls as programs of their own, on threads.

  Which thread runs what never changes a result: every program is the same
  wherever it runs, and sums are taken in the order of the lanes. JAX's context
  managers act on one thread; set options with `jax.config.update`.

  Args:
    num_threads: how many programs run at once; by default one for each core
      this process may use.

  >>> job = Call(lambda x: 2 * x, (np.ones(()),))
  >>> [float(y) for y in Threads(2).run(job, job._replace(when=False))]
  [2.0, 0.0]
  """

  def __init__(self, num_threads: int | None = None):
    self.num_threads = num_threads or _num_cores()
    # Twice as many as threads, so that a late thread costs half a piece.
    self.num_pieces = 2 * self.num_threads
    self._pool = futures.ThreadPoolExecutor(self.num_threads, "hetfl")
    self._programs = {}
    self._compiled = {}
    self._seconds = {}
    self._lock = threading.Lock()

  def num_lanes(self, num_clients: int) -> int:
    """Twice as many as threads, if there are as many clients."""
    return min(self.num_pieces, num_clients)

  def compile(self, fn: Callable, donate: tuple[int, ...] = ()) -> Callable:
    """Returns the function as it is: its programs are compiled one by one."""
    del donate
    return fn

  def run(self, *jobs: Job) -> tuple[PyTree, ...]:
    """Returns the jobs' results, in their order, when all are there."""
    if any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(jobs)):
      raise TypeError(
        "Threads() dispatches programs itself: its steps cannot be part of"
        " jit, vmap or scan; build the algorithm with Inline() for that"
      )
    tasks = [self._tasks(job) for job in jobs]
    flat = [task for group in tasks for task in group]
    # Longest first, by what the program took before; new ones lead.
    order = sorted(range(len(flat)), key=lambda i: -self._cost(*flat[i]))
    running = {i: self._start(*flat[i]) for i in order}
    results = iter([running[i].result() for i in range(len(flat))])
    return tuple(
      self._join(job, [next(results) for _ in group])
      for job, group in zip(jobs, tasks)
    )

  def _tasks(self, job: Job) -> list[tuple[Callable, tuple, int]]:
    """Cuts a job into programs that can run at once, each with its size."""
    part = lambda tree, i: jax.tree.map(lambda a: a[i], tree)
    if isinstance(job, Lanes):
      return [
        (job.fn, (*job.shared, part(job.lanes, i), n), int(n))
        for i, n in enumerate(job.steps)
      ]
    if isinstance(job, Call):
      fn = job.fn if job.when else job.otherwise
      return [(fn, job.args, 1)] if fn else []
    if isinstance(job, Each):
      rows = len(jax.tree.leaves(job.rows)[0])
      fn, steps = job.fn, [1] * rows
      if job.stages and rows % self.num_threads:
        fn, steps = job.stages
      return [
        (fn, (*job.shared, part(job.rows, i)), int(n))
        for i, n in zip(range(rows), steps)
      ]
    if not job.when:
      return []
    # Equal chunks, so that one compiled program serves all of them.
    rows = len(jax.tree.leaves(job.rows)[0])
    size = rows // math.gcd(rows, 2 * self.num_pieces)
    return [
      (job.fn, (*job.shared, part(job.rows, slice(i, i + size))), 1)
      for i in range(0, rows, size)
    ]

  def _start(self, fn: Callable | Stages, args: tuple, size: int):
    """Submits a task, and one in stages piece by piece.

    Rows that the threads cannot share equally take turns: the next piece goes
    to the end of the queue, so that all rows end at about the same time.
    """
    if not isinstance(fn, Stages):
      return self._pool.submit(self._execute, fn, args, size)
    result = futures.Future()
    cuts = np.linspace(0, size, self.num_pieces + 1).astype(np.int32)

    def piece(i, carry):
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

  def _cost(self, fn: Callable | Stages, args: tuple, size: int) -> float:
    """Seconds that a program may take; infinite if it never ran."""
    del args
    fn = fn.advance if isinstance(fn, Stages) else fn
    return self._seconds.get(fn, math.inf) * max(size, 1)

  def _join(self, job: Job, results: list[PyTree]) -> PyTree:
    if not results:
      args = job.args if isinstance(job, Call) else (*job.shared, job.rows)
      return _zeros(job.fn, *args)
    if isinstance(job, Each):
      return self._execute(_stack, results, 1)
    if isinstance(job, Call) or len(results) == 1:
      return results[0]
    join = _sum if isinstance(job, Lanes) else _concatenate
    return self._execute(join, results, 1)

  def _execute(self, fn: Callable, args: tuple, size: int) -> PyTree:
    """Runs one program to its end; compiles it once for each shape."""
    leaves, tree = jax.tree.flatten(args)
    key = (fn, tree, tuple(jax.typeof(leaf) for leaf in leaves))
    with self._lock:
      lock = self._compiled.setdefault(key, threading.Lock())
      program = self._programs.setdefault(fn, jax.jit(fn))
    if lock is not None:
      # One thread compiles; the others that need the program wait for it.
      with lock:
        result = jax.block_until_ready(program(*args))
      self._compiled[key] = None
      return result
    start = time.perf_counter()
    result = jax.block_until_ready(program(*args))
    self._seconds[fn] = (time.perf_counter() - start) / max(size, 1)
    return result


def _num_cores() -> int:
  """How many cores this process may use."""
  if hasattr(os, "sched_getaffinity"):  # not on macOS
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _sum(*trees):
  return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *trees)


def _concatenate(*trees):
  return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)


def _stack(*trees):
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


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


def default_engine(num_threads: int | None = None) -> Engine:
  """The engine for the devices at hand.

  Args:
    num_threads: how many threads to use on a CPU; by default one a core.

  Returns:
    `Threads()` on CPU, `Inline()` for one accelerator, and `Inline(mesh)` over
    all devices, of all processes, for several.
  """
  if jax.default_backend() == "cpu" and jax.process_count() == 1:
    return Threads(num_threads)
  if jax.device_count() == 1:
    return Inline()
  return Inline(jax.make_mesh((jax.device_count(),), (AXIS,)))
