"""The engine for accelerators: all work within one program.

For each row (a client, say) it runs `carry = begin(row)`, `carry = step(row,
carry, s)` for its steps s, and `end(row, carry)`: rows side by side, or some at
once; on a mesh each device has its own. Results are stacked or added up.
"""

from collections.abc import Callable
import functools
from typing import Any
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks
from hetfl.engine.compilation import bank_format, jit
from hetfl.engine.packing import traced_longest_first
from hetfl.engine.work import (
  add,
  key_data,
  num_rows,
  of_type,
  PyTree,
  row,
  Shard,
  stack,
  Task,
  Work,
  zeros_of,
)


class Inline:
  """Runs work within the program being traced; see `hetfl.engine`.

  Args:
    mesh: a mesh with one axis, whose devices share the rows. It may span
      processes, all of which then call the same functions with the same
      arguments. `None` for one device.
    at_once: how many rows to run side by side on a device; the others wait for
      one to end. `None` for one on a CPU and all on an accelerator, which suits
      rows with about equally many steps.

  Raises:
    ValueError: the mesh has several axes, or `at_once` is below 1.

  >>> double = Task.of(lambda x: 2 * x)
  >>> work = Work(double, (), jnp.ones(3), np.array([1, 0, 1]))
  >>> [y.tolist() for y in Inline().run(work, work._replace(total=True))]
  [[2.0, 0.0, 2.0], 4.0]
  """

  def __init__(
    self, mesh: jax.sharding.Mesh | None = None, *, at_once: int | None = None
  ):
    checks.counts(**checks.given(at_once=at_once))
    if mesh is not None:
      if len(mesh.axis_names) != 1:
        raise ValueError(
          f"mesh: has the axes {mesh.axis_names}; give one axis, such as"
          f" jax.make_mesh(({mesh.size},), ('devices',))"
        )
      # With explicit axes, inputs would have to be sharded already.
      auto = (jax.sharding.AxisType.Auto,)
      mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    self._mesh = mesh
    self._at_once = at_once
    if at_once is None and jax.default_backend() == "cpu":
      self._at_once = 1
    self.num_pieces = mesh.size if mesh else 1
    # On CPUs a device may begin one loop with collectives before it has ended
    # another, in an order of its own, and mix up their collectives. There the
    # works of one `run` take turns; those of the next wait for their arguments.
    self._in_turn = mesh is not None and mesh.devices.flat[0].platform == "cpu"
    self._placed: dict[int, jax.Array] = {}

  def run(self, *works: Work) -> tuple[PyTree, ...]:
    """Returns the works' results, in their order."""
    if self._mesh is None:
      return tuple(map(self._run, works))
    apart = self._apart(works)
    results, last = [], None
    for i, work in enumerate(works):
      if i in apart:
        results.append(apart[i])
        continue
      work = _after(last, work) if self._in_turn else work
      results.append(self._split(work))
      last = results[-1]
    return tuple(results)

  def _run(self, work: Work) -> PyTree:
    """A work on one device."""
    rows = num_rows(work)
    if rows is None:
      return _masked(work, work.rows, work.steps, most_of(work.steps))
    at_once = min(work.at_once or rows, self._at_once or rows, rows)
    if not work.total:
      return _side_by_side(work, at_once)
    # A loop whose length is not known could not be differentiated.
    if at_once == rows or isinstance(work.steps, np.ndarray):
      return _sum(_side_by_side(work, at_once))
    ids, number = jnp.arange(rows)[None], jnp.array([rows])
    if at_once > 1:
      steps = jnp.maximum(jnp.asarray(work.steps), 1)
      ids, number = traced_longest_first(steps, at_once)
    return _in_lanes(work, ids, number)

  def _split(self, work: Work) -> PyTree:
    """A work whose rows, or steps, the devices share."""
    rows, size = num_rows(work), self.num_pieces
    shared = jax.tree.map(jnp.asarray, work[1:4])
    if rows is None:
      if not work.task.shares:
        return self._run(work)

      def share(shared, one, steps, shard):
        step = functools.partial(work.task.step, shard=shard)
        task = Task(work.task.begin, step, work.task.end)
        return self._run(Work(task, shared, one, steps))

      return self._on_devices(share, *shared)

    lanes = size * min(work.at_once or rows, self._at_once or rows)
    if work.total and lanes < rows:

      def some(shared, rows, steps, shard):
        ids, number = shard.take(
          traced_longest_first(jnp.maximum(steps, 1), lanes)
        )
        there = work._replace(shared=shared, rows=rows, steps=steps)
        return shard.sum(_in_lanes(there, ids, number))

      return self._on_devices(some, *shared)

    # Repeats the last row, until all devices have equally many rows.
    padded = -(-rows // size) * size
    taken = jnp.minimum(jnp.arange(padded), rows - 1)
    counts = jnp.arange(padded) < rows

    def equally(shared, rows, steps, shard):
      mine, count = shard.take((taken, counts))
      part = work._replace(
        shared=shared, rows=row(rows, mine), steps=steps[mine], total=False
      )
      found = self._run(part)
      if not work.total:
        return shard.gather(found)
      nothing = optax.tree.zeros_like(found)
      found = jax.vmap(optax.tree.where)(count, found, nothing)
      return shard.sum(_sum(found))

    results = self._on_devices(equally, *shared)
    return results if work.total else row(results, np.s_[:rows])

  def _apart(self, works: tuple[Work, ...]) -> dict[int, PyTree]:
    """Runs single rows of several works on one device each.

    Such as FedMD's parties; and the rows of several groups of clients, if there
    are no more than devices: otherwise each device runs a row of every group.

    Returns:
      The results by the works' numbers; every device gets all of them.
    """
    size, calls = self.num_pieces, {}
    groups = [
      i for i, work in enumerate(works) if num_rows(work) and not work.total
    ]
    for i, work in enumerate(works):
      if num_rows(work) is None and not work.task.shares:
        calls[i, 0] = work
    if len(groups) > 1 and sum(len(works[i].steps) for i in groups) <= size:
      for i in groups:
        work = works[i]
        for k in range(len(work.steps)):
          one = work._replace(rows=row(work.rows, k), steps=work.steps[k])
          calls[i, k] = one
    if len(calls) < 2:
      return {}
    tasks = [call.task for call in calls.values()]
    args = [(c.shared, c.rows, jnp.asarray(c.steps)) for c in calls.values()]
    # Here, since the mesh is another one within `shard_map`.
    likes = [
      jax.eval_shape(task.whole, steps, *shared, rows)
      for task, (shared, rows, steps) in zip(tasks, args)
    ]

    def on_device(d, args):
      results = []
      for i, (task, like) in enumerate(zip(tasks, likes)):
        result = zeros_of(key_data, like)
        if i % size == d:  # All branches must agree in their types.
          found = key_data(self._run(Work(task, *args[i])))
          cast = lambda x, zero: jnp.asarray(x, zero.dtype)
          result = jax.tree.map(cast, found, result)
        results.append(result)
      return results

    def run(args, shard):
      branches = [functools.partial(on_device, d) for d in range(size)]
      here = jax.lax.axis_index(shard.axis)
      return shard.sum(jax.lax.switch(here, branches, args))

    found = jax.tree.map(of_type, self._on_devices(run, args), likes)
    there: dict[int, Any] = {}
    for (i, _), result in zip(calls, found):
      there.setdefault(i, []).append(result)
    return {
      i: results[0] if num_rows(works[i]) is None else stack(*results)
      for i, results in there.items()
    }

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
      if leaf.is_deleted() or (
        leaf.sharding.device_set == everywhere.device_set
      ):
        return leaf
      if id(leaf) in self._placed:
        return self._placed[id(leaf)]
      placed = move(leaf)
      if keep:
        placed = jax.device_put(placed, bank_format(leaf, everywhere))
        self._placed[id(leaf)] = placed
        weakref.finalize(leaf, self._placed.pop, id(leaf), None)
      return placed

    def move(leaf):
      if not self._mesh.is_multi_process:
        return jax.device_put(leaf, everywhere)
      numbers = np.asarray(key_data(leaf))
      put = jax.make_array_from_process_local_data(everywhere, numbers)
      return of_type(put, leaf)

    return jax.tree.map(place, tree)

  def _on_devices(self, fn: Callable, *args: PyTree) -> PyTree:
    """Runs `fn(*args, shard)` on each device, with the same result on all.

    Arguments and results are replicated: if they were sharded, the compiler
    would also shard the code before and after, and add collectives.
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


def _masked(work: Work, one: PyTree, steps: Any, most: Any) -> PyTree:
  """A row's work in a loop of `most` steps, of which the first `steps` count.

  The loop's length is the same for all trials and rows beside it, since `vmap`
  would else select every array of its state, by a predicate for each. The other
  steps repeat the last that counts: an optimizer may not be differentiable at
  an empty batch's gradient.
  """
  task = work.task

  def step(*args):
    *rest, carry, s = args
    real = jnp.minimum(s, jnp.maximum(steps - 1, 0))
    return optax.tree.where(s < steps, task.take(real, rest, carry), carry)

  return Task(task.begin, step, task.end).whole(most, *work.shared, one)


def _side_by_side(work: Work, at_once: int) -> PyTree:
  """The results of all rows, some at once, in loops as long as the longest."""
  args = jax.tree.map(jnp.asarray, (work.rows, work.steps))
  if at_once == 1 and isinstance(work.steps, jax.Array):
    whole = lambda args: work.task.whole(args[1], *work.shared, args[0])
    return jax.lax.map(whole, args)
  # A traced plan's loops are as long as the longest row run at once.
  known = isinstance(work.steps, np.ndarray)
  most = lambda steps: most_of(work.steps if known else steps)
  one = lambda args: _masked(work, args[0], args[1], most(args[1]))
  rows = len(work.steps)
  if at_once == rows:
    return jax.vmap(one)(args)
  if at_once == 1:
    return jax.lax.map(one, args)
  # In even lots, filled up by the last row. `jax.lax.map(batch_size=)` traces a
  # smaller last lot again, and cannot join empty arrays.
  lots = -(-rows // at_once)
  places = np.arange(lots * -(-rows // lots))
  taken = np.minimum(places, rows - 1).reshape(lots, -1)
  found = jax.lax.map(jax.vmap(one), row(args, taken))
  join = lambda a: a.reshape(len(places), *a.shape[2:])[:rows]
  return jax.tree.map(join, found)


def _in_lanes(work: Work, ids: Any, number: Any) -> PyTree:
  """The total of all rows, in lanes in which one row follows another.

  Args:
    work: the work.
    ids: `int32[L, K]`, the lanes' rows.
    number: `int32[L]`, how many rows each lane has.
  """
  task, shared = work.task, work.shared
  rows, steps = jax.tree.map(jnp.asarray, (work.rows, work.steps))
  ids, number = jnp.asarray(ids), jnp.asarray(number)
  zeros = task.zeros(*shared, row(rows, 0))
  if len(ids) == 1:
    one = lambda j: task.whole(steps[ids[0, j]], *shared, row(rows, ids[0, j]))
    body = lambda j, sums: add(sums, one(j))
    return jax.lax.fori_loop(0, number[0], body, zeros)

  lasts = jnp.maximum(steps, 1) - 1  # Rows without steps take a turn too.
  in_lane = jnp.arange(ids.shape[1])[None] < number[:, None]
  length = jnp.max(jnp.sum(jnp.where(in_lane, lasts[ids] + 1, 0), axis=1))

  def lane(ids, number):
    def body(_, carry):
      j, s, now, sums = carry
      k = ids[j]
      one = row(rows, k)
      new = task.take(s, (*shared, one), now)
      now = optax.tree.where(s < steps[k], new, now)
      ends = (s == lasts[k]) & (j < number)

      def end(now, sums):
        ended = add(sums, task.end(*shared, one, now))
        following = task.begin(*shared, row(rows, ids[j + 1]))
        return optax.tree.where(ends, (following, ended), (now, sums))

      # Lanes side by side run `end` only in steps where one ends a row.
      keep = lambda *kept: kept
      now, sums = jax.lax.cond(any_of(ends), end, keep, now, sums)
      return jnp.where(ends, j + 1, j), jnp.where(ends, 0, s + 1), now, sums

    start = task.begin(*shared, row(rows, ids[0]))
    carry = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    carry = (*carry, start, zeros)
    return jax.lax.fori_loop(0, length, body, carry)[-1]

  return _sum(jax.vmap(lane)(ids, number))


def _sum(tree: PyTree) -> PyTree:
  """The sum over the first axis."""
  return jax.tree.map(lambda a: jnp.sum(a, axis=0), tree)


def most_of(steps: Any) -> Any:
  """The largest number of steps, of all rows and of all trials under `vmap`."""
  if isinstance(steps, np.ndarray | np.integer | int):
    # The loop's length is known, and `jax.grad` can differentiate it.
    return int(np.max(steps))
  return _most(jnp.max(steps))


@jax.custom_batching.custom_vmap
def _most(steps):
  return jnp.asarray(steps)


@_most.def_vmap
def _most_of_batch(axis_size, in_batched, steps):
  del axis_size, in_batched
  return _most(jnp.max(steps, axis=0)), False


def any_of(when: jax.Array) -> jax.Array:
  """Whether it is true for any element of the batch under `vmap`.

  A `jax.lax.cond` on it stays a `cond`; on `when`, `vmap` would run both
  branches.

  >>> when = jnp.array([False, True])
  >>> jax.vmap(any_of, out_axes=None)(when)
  Array(True, dtype=bool)
  """
  return _most(when.astype(jnp.int32)) > 0


def _after(result: PyTree, work: Work) -> Work:
  """The same work, which a program can begin only once it has `result`."""
  floats = [
    a
    for a in jax.tree.leaves(result)
    if jnp.issubdtype(a.dtype, jnp.floating) and a.size
  ]
  if not floats:
    return work
  # Zero, but the compiler cannot know it; the same for all trials.
  never = _most((jnp.max(jnp.sign(floats[0])) > 1).astype(jnp.int32))
  return work._replace(steps=jnp.where(never > 0, 0, jnp.asarray(work.steps)))
