"""How rows of unlike length are packed into lanes, which run side by side."""

from collections.abc import Sequence
import heapq

import jax
import jax.numpy as jnp
import numpy as np


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


def enough_lanes(steps: np.ndarray, rows_per_round: int) -> int:
  """The fewest lanes whose rounds are hardly longer than with one per row.

  In one program each lane runs as long as the longest. With a lane for each of
  unlike rows, most of that is idle; in fewer lanes the short rows run one after
  another beside the longest.

  Args:
    steps: `int[N]`, the steps of all rows from which a round draws some.
    rows_per_round: K, how many a round has.

  Returns:
    L, between 1 and K. Over sixteen sampled rounds, the longest lanes together
    have at most a tenth more steps than the longest rows.

  >>> enough_lanes(np.array([4, 2, 2]), 3), enough_lanes(np.array([2, 2, 2]), 3)
  (2, 3)
  """
  rng = np.random.default_rng(0)
  rounds = [
    rng.choice(steps, rows_per_round, replace=False).tolist() for _ in range(16)
  ]
  enough = 1.1 * sum(map(max, rounds))
  for num_lanes in range(1, rows_per_round):
    longest = (
      max(sum(some[k] for k in lane) for lane in longest_first(some, num_lanes))
      for some in rounds
    )
    if sum(longest) <= enough:
      return num_lanes
  return rows_per_round


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
