"""Jobs: the ways in which a step asks an engine for work."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


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

    Args:
      tree: arrays of numbers, each device's own.

    Returns:
      The sums, on every device.

    >>> total = Shard('axis', 2).sum
    >>> jax.vmap(total, axis_name='axis')(jnp.array([1, 2])).tolist()
    [3, 3]
    """
    return jax.lax.psum(tree, self.axis)

  def gather(self, tree: PyTree) -> PyTree:
    """The rows of all devices, each of which has its own.

    Args:
      tree: arrays `[n, ...]`, each device's own.

    Returns:
      Arrays `[count * n, ...]`, device after device, on every device.

    >>> gather = Shard('axis', 2).gather
    >>> jax.vmap(gather, axis_name='axis')(jnp.array([[1], [2]])).tolist()
    [[1, 2], [1, 2]]
    """
    return jax.lax.all_gather(tree, self.axis, tiled=True)


class Call(NamedTuple):
  """Runs `fn(*args)`.

  Attributes:
    fn: a pure function; keep the same object from round to round.
    args: its arguments.
    when: whether to run it; if not, the result is that of `otherwise`. Under
      `vmap` it is run if `when` is true for any element of the batch.
    otherwise: a cheap function of the same arguments with results of the same
      shapes; by default zeros.
    shared: whether devices may share the work: if there are several, `fn` is
      called with `shard`, a `Shard`, and must return the same result on all.
    apart: whether the calls of one `run` may run on one device each; for long
      calls of different functions. Results must be numbers.
  """

  fn: Callable[..., PyTree]
  args: tuple[PyTree, ...]
  when: jax.Array | np.bool | bool = True
  otherwise: Callable[..., PyTree] | None = None
  shared: bool = False
  apart: bool = False


class Lanes(NamedTuple):
  """Sums or stacks `fn(*shared, lane, steps)` over lanes.

  Attributes:
    fn: a pure function of one lane.
    shared: arguments that all lanes see.
    lanes: a pytree with lanes on the first axes.
    steps: `int32[L]`, the number of steps in each lane that are not padding. If
      lanes run side by side in one program, all get the largest number.
    stacked: whether the results are stacked, lane by lane, not added up.
  """

  fn: Callable[..., PyTree]
  shared: tuple[PyTree, ...]
  lanes: PyTree
  steps: jax.Array | np.ndarray
  stacked: bool = False


class Chunks(NamedTuple):
  """Applies `fn(*shared, chunk)` to chunks of the rows of `rows`.

  Attributes:
    fn: a pure function of some rows that returns as many rows.
    shared: arguments that all chunks see.
    rows: a pytree of arrays with N rows.
    when: as in `Call`; the results are zeros if it is false.
  """

  fn: Callable[..., PyTree]
  shared: tuple[PyTree, ...]
  rows: PyTree
  when: jax.Array | np.bool | bool = True


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

  For clients that keep a state of their own: on threads each row is a program
  of its own, elsewhere rows are mapped by `jax.vmap`.

  Attributes:
    fn: a pure function of one row.
    shared: arguments that all rows see.
    rows: a pytree of arrays with N rows.
    stages: the same function as `Stages`, so that threads can switch rows
      between steps, and the number of steps of each row, `int32[N]`; `None` if
      it has no stages.
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
    """How many lanes a round's clients are best packed into.

    Args:
      num_clients: how many clients train, all of about the same size; for
        others see `planning.enough_lanes`.

    Returns:
      The number of lanes.
    """

  def run(self, *jobs: Job) -> tuple[PyTree, ...]:
    """Returns the jobs' results, in their order."""

  def compile(self, fn: Callable, donate: tuple[int, ...] = ()) -> Callable:
    """Prepares a function that runs jobs for use in a loop on the host.

    Args:
      fn: the function, such as an algorithm's `step`.
      donate: the numbers of the arguments to donate, whose memory the results
        may reuse.

    Returns:
      A function of the same arguments.
    """


def zeros_of(fn: Callable, *args) -> PyTree:
  """Zeros of the shapes and types of `fn(*args)`, which is not run.

  Args:
    fn: the function.
    *args: its arguments; arrays may be `jax.ShapeDtypeStruct`s.

  Returns:
    Zeros, in the structure of its result.

  >>> zeros_of(lambda x: 2 * x, jnp.ones(2))
  Array([0., 0.], dtype=float32)
  """
  return jax.tree.map(
    lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(fn, *args)
  )


def stack(*trees: PyTree) -> PyTree:
  """Stacks trees on a new first axis."""
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
