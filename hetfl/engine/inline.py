"""The engine for accelerators: all jobs within one program."""

from collections.abc import Callable
import functools
from typing import Any
import weakref

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import checks, core
from hetfl.engine.compilation import jit
from hetfl.engine.jobs import (
  Call,
  Chunks,
  Each,
  Job,
  Lanes,
  PyTree,
  Shard,
  stack,
  zeros_of,
)


class Inline:
  """Runs jobs within the program being traced; see `hetfl.engine`.

  Every device runs all calls, except those that share their work, such as the
  students of a codistillation, and those that run on one device each, such as
  FedMD's parties.

  Args:
    mesh: a mesh with one axis, over which lanes and chunks are split. It may
      span processes, all of which then call the same functions with the same
      arguments. `None` for one device.
    max_lanes: how many lanes to run side by side on a device; `None` for as
      many as there are clients, which suits accelerators.

  Raises:
    ValueError: the mesh has several axes, or `max_lanes` is below 1.

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
    checks.counts(**checks.given(max_lanes=max_lanes))
    if mesh is not None:
      if len(mesh.axis_names) != 1:
        raise ValueError(
          f"mesh: has the axes {mesh.axis_names}; give one axis, such as"
          f" jax.make_mesh(({mesh.size},), ('lanes',))"
        )
      # With explicit axes, inputs would have to be sharded already.
      auto = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
      mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    self._mesh = mesh
    self._max_lanes = max_lanes
    self.num_pieces = mesh.size if mesh else 1
    # On CPUs a device may begin one loop with collectives before it has ended
    # another, in an order of its own, and mix up their collectives. There the
    # jobs of one `run` take turns; those of the next wait for their arguments.
    self._in_turn = mesh is not None and mesh.devices.flat[0].platform == "cpu"
    self._placed: dict[int, jax.Array] = {}

  def num_lanes(self, num_clients: int) -> int:
    """One per client, at most `max_lanes` per device, in equal numbers on each.

    Args:
      num_clients: see `Engine`.

    Returns:
      The number of lanes; for 10 clients on a mesh of eight devices it is 16,
      two per device.

    >>> Inline().num_lanes(10), Inline(max_lanes=4).num_lanes(10)
    (10, 4)
    """
    each = -(-num_clients // self.num_pieces)
    return self.num_pieces * min(each, self._max_lanes or each)

  def run(self, *jobs: Job) -> tuple[PyTree, ...]:
    """Returns the jobs' results, in their order."""
    run: dict[type, Callable[[Any], PyTree]] = {
      Call: self._call,
      Lanes: self._lanes,
      Chunks: self._chunks,
      Each: self._each,
    }
    apart, there = self._split(jobs), {}
    if len(apart) > 1:
      there = dict(zip(apart, self._apart(list(apart.values()))))
    results, last = [], None
    for i, job in enumerate(jobs):
      rows = [result for (number, _), result in there.items() if number == i]
      if rows:  # They were run on one device each.
        results.append(stack(*rows) if isinstance(job, Each) else rows[0])
        continue
      waits = self._in_turn and _has_collectives(job)
      results.append(run[type(job)](_after(last, job) if waits else job))
      if waits:
        last = results[-1]
    return tuple(results)

  def _split(self, jobs: tuple[Job, ...]) -> dict[tuple[int, int], Call]:
    """The calls that run on one device each, by numbers of their job and row.

    The rows of several `Each` jobs do too, if there are no more rows than
    devices: otherwise each device would run a row of every job.
    """
    if self._mesh is None:
      return {}
    calls = {
      (i, 0): job
      for i, job in enumerate(jobs)
      if isinstance(job, Call) and job.apart
    }
    groups = {i: job for i, job in enumerate(jobs) if isinstance(job, Each)}
    rows = {i: len(jax.tree.leaves(job.rows)[0]) for i, job in groups.items()}
    if len(groups) > 1 and sum(rows.values()) <= self._mesh.size:
      calls |= {
        (i, k): Call(
          job.fn, (*job.shared, jax.tree.map(lambda a, k=k: a[k], job.rows))
        )
        for i, job in groups.items()
        for k in range(rows[i])
      }
    return calls

  def _apart(self, calls: list[Call]) -> list[PyTree]:
    """Runs each call on one device, and gives all results to all devices."""
    size = self.num_pieces
    whens = [None if call.when is True else call.when for call in calls]
    # Here, since the mesh is another one within `shard_map`.
    likes = [jax.eval_shape(call.fn, *call.args) for call in calls]
    shapes = [jax.eval_shape(_as_numbers, like) for like in likes]

    def result(i, mine, when, args):
      zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes[i])
      if not mine:
        return zeros
      call = calls[i]._replace(args=args)
      if when is not None:
        call = call._replace(when=when)
      # All branches must agree in their types.
      cast = lambda zero, x: jnp.asarray(x, zero.dtype)
      return jax.tree.map(cast, zeros, _as_numbers(self._call(call)))

    def on_device(d, whens, args):
      return [
        result(i, i % size == d, when, a)
        for i, (when, a) in enumerate(zip(whens, args))
      ]

    def run(whens, args, shard):
      branches = [functools.partial(on_device, d) for d in range(size)]
      here = jax.lax.axis_index(shard.axis)
      return shard.sum(jax.lax.switch(here, branches, whens, args))

    args = [call.args for call in calls]
    return jax.tree.map(_of_type, likes, self._on_devices(run, whens, args))

  def compile(self, fn: Callable, donate: tuple[int, ...] = ()) -> Callable:
    """Jits the function, and donates the arguments `donate`.

    Args:
      fn: see `Engine`.
      donate: see `Engine`.

    Returns:
      The jitted function. With a mesh it copies arrays on one device to all
      devices; those that are not donated, such as banks, only once while they
      live. On a mesh of CPU devices it returns when its results are ready.
    """
    program = jit(fn, donate)
    if self._mesh is None:
      return program

    def run(*args):
      results = program(
        *(self._place(arg, i not in donate) for i, arg in enumerate(args))
      )
      # XLA runs all CPU devices' programs on as many threads as there are
      # cores. With 32 programs waiting, the dispatch of one more holds a
      # thread, which a collective of theirs may need.
      return jax.block_until_ready(results) if self._in_turn else results

    return run

  def _place(self, tree: PyTree, keep: bool) -> PyTree:
    """Copies arrays on one device to the whole mesh.

    Otherwise each call would copy them again, and the first call, whose state
    is on one device, would be compiled separately.

    Args:
      tree: arrays, the same in every process.
      keep: whether to keep the copies while the arrays live, as for a bank that
        is passed every round.
    """
    assert self._mesh is not None
    everywhere = jax.sharding.NamedSharding(
      self._mesh, jax.sharding.PartitionSpec()
    )

    def place(leaf):
      # NumPy arrays count as on all devices.
      if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return leaf
      if leaf.sharding.device_set == everywhere.device_set:
        return leaf
      if id(leaf) in self._placed:
        return self._placed[id(leaf)]
      placed = move(leaf)
      if keep:
        placed = jax.device_put(placed, core.bank_format(leaf, everywhere))
        self._placed[id(leaf)] = placed
        weakref.finalize(leaf, self._placed.pop, id(leaf), None)
      return placed

    def move(leaf):
      if not self._mesh.is_multi_process:
        return jax.device_put(leaf, everywhere)
      if _is_key(leaf):
        data = jax.make_array_from_process_local_data(
          everywhere, np.asarray(jax.random.key_data(leaf))
        )
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
      return jax.make_array_from_process_local_data(
        everywhere, np.asarray(leaf)
      )

    return jax.tree.map(place, tree)

  def _call(self, job: Call):
    if job.shared and self._mesh is not None:
      fn = functools.partial(self._on_devices, job.fn)
      job = job._replace(fn=fn, shared=False)
    if job.when is True:
      return job.fn(*job.args)

    def otherwise(*args):
      zeros = zeros_of(job.fn, *args)
      if job.otherwise is None:
        return zeros
      # Both branches of a cond must agree in their types.
      return jax.tree.map(
        lambda zero, x: x.astype(zero.dtype), zeros, job.otherwise(*args)
      )

    def run(*args):
      results = job.fn(*args), otherwise(*args)
      return jax.tree.map(lambda x, y: jnp.where(job.when, x, y), *results)

    # If trials differ, each selects its own result. With a predicate for each
    # trial, `vmap` would always run both branches, on a bank for each trial.
    when = core.any_of_batch(job.when)
    return jax.lax.cond(when, run, otherwise, *job.args)

  def _lanes(self, job: Lanes):
    num_lanes = len(job.steps)
    if num_lanes == 1 and self._mesh is None:
      lane = jax.tree.map(lambda a: a[0], job.lanes)
      result = job.fn(*job.shared, lane, job.steps[0])
      return stack(result) if job.stacked else result

    def run(shared, lanes, steps):
      # If these are not tracers, the loop's length is known, and `jax.grad` can
      # differentiate it.
      longest = steps.max()
      results = jax.vmap(lambda lane: job.fn(*shared, lane, longest))(lanes)
      if job.stacked:
        return results
      return jax.tree.map(lambda a: jnp.sum(a, axis=0), results)

    if self._mesh is None:
      return run(job.shared, job.lanes, job.steps)
    missing = -num_lanes % self._mesh.size
    if missing:
      # Packed for another number of devices: padded with lanes not counted.
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

    def on_device(shared, rows, shard):
      results = run(shared, *shard.take(rows))
      return shard.gather(results) if job.stacked else shard.sum(results)

    rows = (job.lanes, job.steps)
    results = self._on_devices(on_device, job.shared, rows)
    if job.stacked:
      return jax.tree.map(lambda a: a[:num_lanes], results)
    return results

  def _chunks(self, job: Chunks):
    args, count = (*job.shared, job.rows), len(jax.tree.leaves(job.rows)[0])
    if self._mesh is None or count % self._mesh.size:
      # If the devices cannot share the rows equally, each takes all of them.
      return self._call(Call(job.fn, args, job.when))

    def on_device(*args, shard):
      *shared, rows = args
      return shard.gather(job.fn(*shared, shard.take(rows)))

    return self._call(Call(on_device, args, job.when, shared=True))

  def _each(self, job: Each):
    def run(shared, rows):
      one = lambda row: job.fn(*shared, row)
      if self._max_lanes is None:
        return jax.vmap(one)(rows)
      return jax.lax.map(one, rows, batch_size=self._max_lanes)

    if self._mesh is None:
      return run(job.shared, job.rows)
    count = len(jax.tree.leaves(job.rows)[0])
    # Repeats the last row, until all devices have equally many rows.
    padded = -(-count // self._mesh.size) * self._mesh.size
    taken = jnp.minimum(jnp.arange(padded), count - 1)

    def on_device(shared, rows, shard):
      mine = shard.take(taken)
      rows = jax.tree.map(lambda a: a[mine], rows)
      return shard.gather(run(shared, rows))

    results = self._on_devices(on_device, job.shared, job.rows)
    return jax.tree.map(lambda a: a[:count], results)

  def _on_devices(self, fn: Callable, *args: PyTree) -> PyTree:
    """Runs `fn(*args, shard)` on each device, with the same result on all.

    Arguments and results are whole on every device: if they were split, the
    compiler would also split the code before and after, and add collectives.
    """
    assert self._mesh is not None
    shard = Shard(self._mesh.axis_names[0], self._mesh.size)
    same = jax.sharding.PartitionSpec()
    return jax.shard_map(
      lambda *args: fn(*args, shard=shard),
      mesh=self._mesh,
      in_specs=same,
      out_specs=same,
      check_vma=False,
    )(*args)


def _is_key(a) -> bool:
  return jax.dtypes.issubdtype(jax.dtypes.result_type(a), jax.dtypes.prng_key)


def _as_numbers(tree: PyTree) -> PyTree:
  """Arrays that can be summed over devices: random keys as their data."""
  return jax.tree.map(
    lambda a: jax.random.key_data(a) if _is_key(a) else a, tree
  )


def _of_type(like: jax.ShapeDtypeStruct, numbers: jax.Array) -> jax.Array:
  """The inverse of `_as_numbers`; it also makes sums of bools bools again."""
  if _is_key(like):
    return jax.random.wrap_key_data(numbers, impl=like.dtype)
  return numbers.astype(like.dtype)


def _has_collectives(job: Job) -> bool:
  """Whether a job takes turns; `Each` need not, its gather is at its end."""
  return job.shared if isinstance(job, Call) else not isinstance(job, Each)


def _after(result: PyTree, job: Job) -> Job:
  """The same job, which a program can begin only once it has `result`."""
  floats = [
    a
    for a in jax.tree.leaves(result)
    if jnp.issubdtype(a.dtype, jnp.floating) and a.size
  ]
  if not floats or isinstance(job, Each):
    return job
  never = _never(floats[0])
  if isinstance(job, Lanes):
    return job._replace(steps=jnp.where(never, 0, job.steps))
  return job._replace(when=job.when & ~never)


@jax.custom_batching.custom_vmap
def _never(x: jax.Array) -> jax.Array:
  """False, but the compiler cannot know it."""
  return jnp.any(jnp.sign(x) > 1)


@_never.def_vmap
def _never_of_trials(axis_size, in_batched, x):
  # One value for all trials; otherwise a `cond` on it would run both branches.
  del axis_size, in_batched
  return _never(x), False
