"""Work: what a step asks an engine for."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

PyTree = Any


class Task:
  """A pure function of a row of work that takes its steps one by one.

  Make a task once and keep it from round to round: engines keep its compiled
  programs in it, so that they are freed with it.

  Args:
    begin: `(*shared, row) -> carry`.
    step: `(*shared, row, carry, s) -> carry`, step number `s`.
    end: `(*shared, row, carry) -> result`.
    shares: whether several devices may share each step; `step` is then also
      called with `shard`, a `Shard`, and must return the same on all of them.
  """

  def __init__(
    self,
    begin: Callable[..., PyTree],
    step: Callable[..., PyTree],
    end: Callable[..., PyTree],
    *,
    shares: bool = False,
  ):
    self.begin, self.step, self.end = begin, step, end
    self.shares = shares
    self.programs: dict[str, Any] = {}

  @classmethod
  def of(cls, fn: Callable[..., PyTree]) -> "Task":
    """A function `(*shared, row) -> result` as a task of one step.

    Args:
      fn: the function. If its row has no steps, the result is zeros.

    Returns:
      The task.

    >>> task = Task.of(lambda row: 2 * row)
    >>> float(task.whole(1, jnp.ones(()))), float(task.whole(0, jnp.ones(())))
    (2.0, 0.0)
    """
    fn = jax.jit(fn, inline=True)  # Traced once, for the zeros and the step.

    def step(*args):
      *shared, row, _, s = args
      # Else XLA, which sees the same work in each step, hoists it out of the
      # loop, and does it even if there are no steps.
      row, _ = jax.lax.optimization_barrier((row, s))
      return fn(*shared, row)

    return cls(lambda *args: zeros_of(fn, *args), step, lambda *args: args[-1])

  @classmethod
  def sums(cls, fn: Callable[..., PyTree]) -> "Task":
    """A function `(*shared, row, s) -> sums` as a task that adds up its steps.

    >>> task = Task.sums(lambda row, s: row[s])
    >>> float(task.whole(2, jnp.array([1., 2., 4.])))
    3.0
    """
    fn = jax.jit(fn, inline=True)  # Traced once, for the zeros and the step.

    def step(*args):
      *args, sums, s = args
      return add(sums, fn(*args, s))

    begin = lambda *args: zeros_of(fn, *args, 0)
    return cls(begin, step, lambda *args: args[-1])

  @classmethod
  def stacked(
    cls, fn: Callable[..., PyTree], number: Callable[[PyTree], int]
  ) -> "Task":
    """A function `(*shared, row, s) -> result` as a task that stacks its steps.

    Args:
      fn: the function.
      number: `row -> S`, the steps that there is room for; those that a row
        does not take are zeros.

    Returns:
      The task.

    >>> task = Task.stacked(lambda row, s: 2 * row[s], len)
    >>> task.whole(2, jnp.array([1., 2., 4.])).tolist()
    [2.0, 4.0, 0.0]
    """
    fn = jax.jit(fn, inline=True)  # Traced once, for the zeros and the step.

    def begin(*args):
      room = lambda a: jnp.zeros((number(args[-1]), *a.shape), a.dtype)
      return jax.tree.map(room, jax.eval_shape(fn, *args, 0))

    def step(*args):
      *args, results, s = args
      put = lambda all, one: all.at[s].set(one)
      return jax.tree.map(put, results, fn(*args, s))

    return cls(begin, step, lambda *args: args[-1])

  def zeros(self, *args: PyTree) -> PyTree:
    """Zeros like the result; no step is traced, which may take a second."""
    return zeros_of(lambda *args: self.end(*args, self.begin(*args)), *args)

  def whole(self, steps: jax.Array | int, *args: PyTree) -> PyTree:
    """Runs the steps of a row.

    Args:
      steps: how many.
      *args: what all rows share, and the row.

    Returns:
      The result.
    """
    args = jax.tree.map(jnp.asarray, args)  # NumPy arrays, if not under jit.
    carry = self.advance(0, steps, args, self.begin(*args))
    return self.end(*args, carry)

  def advance(
    self,
    first: jax.Array | int,
    last: jax.Array | int,
    args: tuple[PyTree, ...],
    carry: PyTree,
  ) -> PyTree:
    """Takes the steps from `first` to before `last`."""
    take = lambda s, carry: self.take(s, args, carry)
    return jax.lax.fori_loop(first, last, take, carry)

  def take(
    self, s: jax.Array | int, args: tuple[PyTree, ...], carry: PyTree
  ) -> PyTree:
    """Takes step `s`."""
    # Some optimizers' states change their types, such as in half precision.
    like = lambda new, old: new if is_key(new) else new.astype(old.dtype)
    return jax.tree.map(like, self.step(*args, carry, s), carry)


class Work(NamedTuple):
  """Rows of work that do not depend on each other.

  Attributes:
    task: what is done with a row.
    shared: arguments that all rows see.
    rows: a pytree with K rows on the first axes; one row, without that axis, if
      `steps` is a scalar.
    steps: `int32[K]`, how many steps each row has; or `int32[]`.
    total: whether the results are added up, not stacked.
    at_once: how many rows an accelerator runs side by side, at most; `None` for
      as many as the engine does. Changes speed and memory only.
  """

  task: Task
  shared: tuple[PyTree, ...]
  rows: PyTree
  steps: jax.Array | np.ndarray
  total: bool = False
  at_once: int | None = None


class Shard(NamedTuple):
  """A device's share of a batch, within a program that all devices run.

  Attributes:
    axis: the mesh axis.
    count: how many devices share.
  """

  axis: str
  count: int  # type: ignore[assignment]

  def take(self, tree: PyTree) -> PyTree:
    """The device's own rows of arrays that are whole on every device.

    Args:
      tree: arrays `[N, ...]`, N a multiple of `count`: rows left over would go
        to no device.

    Returns:
      Arrays `[N / count, ...]`.

    >>> take = lambda _: Shard('axis', 2).take(jnp.arange(4))
    >>> jax.vmap(take, axis_name='axis')(jnp.arange(2)).tolist()
    [[0, 1], [2, 3]]
    """

    def part(x):
      size = len(x) // self.count
      start = jax.lax.axis_index(self.axis) * size
      return jax.lax.dynamic_slice_in_dim(x, start, size)

    return jax.tree.map(part, tree)

  def sum(self, tree: PyTree) -> PyTree:
    """The sum over the devices.

    >>> total = Shard('axis', 2).sum
    >>> jax.vmap(total, axis_name='axis')(jnp.array([1, 2])).tolist()
    [3, 3]
    """
    return jax.lax.psum(tree, self.axis)

  def gather(self, tree: PyTree) -> PyTree:
    """The rows of all devices, each of which has its own.

    >>> gather = Shard('axis', 2).gather
    >>> jax.vmap(gather, axis_name='axis')(jnp.array([[1], [2]])).tolist()
    [[1, 2], [1, 2]]
    """
    return jax.lax.all_gather(tree, self.axis, tiled=True)


class Engine(Protocol):
  """Runs work; how rows are packed, split and ordered is its own business.

  Attributes:
    num_pieces: the best number of rows into which to cut long work, such as an
      evaluation.
  """

  num_pieces: int

  def run(self, *works: Work) -> tuple[PyTree, ...]:
    """Returns the results of works that do not depend on each other."""

  def compile(self, fn: Callable, donate: tuple[int, ...] = ()) -> Callable:
    """Prepares a function that runs work for use in a loop on the host.

    Args:
      fn: the function, such as an algorithm's `step`.
      donate: the numbers of the arguments to donate, whose memory the results
        may reuse.

    Returns:
      A function of the same arguments.
    """


def num_rows(work: Work) -> int | None:
  """K; `None` for one row without an axis of its own."""
  return None if jnp.ndim(work.steps) == 0 else len(work.steps)


def zeros_of(fn: Callable, *args) -> PyTree:
  """Zeros of the shapes and types of `fn(*args)`, which is not run.

  >>> zeros_of(lambda x: 2 * x, jnp.ones(2))
  Array([0., 0.], dtype=float32)
  """
  return optax.tree.zeros_like(jax.eval_shape(fn, *args))


def stack(*trees: PyTree) -> PyTree:
  """Stacks trees on a new first axis."""
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def row(tree: PyTree, i: Any) -> PyTree:
  """Row `i` of a tree of arrays."""
  return jax.tree.map(lambda a: a[i], tree)


def add(tree: PyTree, other: PyTree) -> PyTree:
  """The sum of two trees."""
  return jax.tree.map(jnp.add, tree, other)


def is_key(array: Any) -> bool:
  """Whether an array is of typed random keys."""
  return jnp.issubdtype(jax.dtypes.result_type(array), jax.dtypes.prng_key)


def key_data(tree: PyTree) -> PyTree:
  """A tree with the numbers of its typed random keys in their place."""
  return jax.tree.map(
    lambda a: jax.random.key_data(a) if is_key(a) else a, tree
  )


def of_type(numbers: jax.Array, like: Any) -> jax.Array:
  """The inverse of `key_data`; it also makes sums of bools bools again."""
  if is_key(like):
    return jax.random.wrap_key_data(numbers, impl=like.dtype)
  return numbers.astype(like.dtype)
