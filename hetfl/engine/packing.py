"""How rows of unlike length are packed into lanes, which run side by side."""

from collections.abc import Sequence
import heapq

import jax
import jax.numpy as jnp


def longest_first(lengths: Sequence[int], num_lanes: int) -> list[list[int]]:
  """Divides rows among lanes: the longest first, into the shortest lane.

  Args:
    lengths: the number of steps of each row.
    num_lanes: L.

  Returns:
    For each lane its rows.

  >>> longest_first([1, 5, 2, 3], 2)
  [[1, 0], [3, 2]]
  """
  lanes: list[list[int]] = [[] for _ in range(num_lanes)]
  heap = [(0, lane) for lane in range(num_lanes)]
  for k in sorted(range(len(lengths)), key=lambda k: -lengths[k]):
    length, lane = heapq.heappop(heap)
    lanes[lane].append(k)
    heapq.heappush(heap, (length + lengths[k], lane))
  return lanes


def traced_longest_first(
  lengths: jax.Array, num_lanes: int
) -> tuple[jax.Array, jax.Array]:
  """The same within a program.

  Args:
    lengths: `int32[K]`.
    num_lanes: L.

  Returns:
    `int32[L, K]`, each lane's rows and then padding, and `int32[L]`, how many
    rows each has.

  >>> rows, number = traced_longest_first(jnp.array([1, 5, 2, 3]), 2)
  >>> rows[:, :2].tolist(), number.tolist()
  ([[1, 0], [3, 2]], [2, 2])
  """
  order = jnp.argsort(-lengths, stable=True)

  def put(loads, k):
    lane = jnp.argmin(loads)
    return loads.at[lane].add(lengths[k]), lane

  _, lanes = jax.lax.scan(put, jnp.zeros(num_lanes, lengths.dtype), order)
  mine = lanes[None] == jnp.arange(num_lanes)[:, None]
  # Each lane's own rows to the front, in their order.
  front = jnp.argsort(~mine, axis=1, stable=True)
  return order[front].astype(jnp.int32), mine.sum(axis=1, dtype=jnp.int32)
