"""Lanes: the clients of a round, laid out for programs of equal length.

Letters used throughout: K clients, L lanes, S steps, B batch size.
"""

from collections.abc import Sequence
import heapq
from typing import NamedTuple

import numpy as np


class LanePlan(NamedTuple):
  """The work of one pool in one round, laid out as L lanes of S steps.

  Each lane trains its clients one after another. A client's last step carries
  its weight; all other steps, including padding, carry 0.

  Attributes:
    index: `int32[L, S, B]`, positions in the bank; -1 marks an empty place.
    client: `int32[L, S]`, the client's number in its population.
    step: `int32[L, S]`, the number of the step within the client's work.
    weight: `float32[L, S]`, the client's weight at its last step, else 0. It
      also marks where a client ends, so a weight of 0 cannot exclude a client.
    steps: `int32[L]`, the number of steps in each lane that are not padding.
  """

  index: np.ndarray  # type: ignore[assignment]
  client: np.ndarray
  step: np.ndarray
  weight: np.ndarray
  steps: np.ndarray


class OneClientLanes(LanePlan):
  """A `LanePlan` in which no lane holds more than one client.

  Programs are simpler for these; their results are the same.
  """

  __slots__ = ()


def pack_lanes(
  batches: Sequence[np.ndarray],
  clients: Sequence[int] | np.ndarray,
  weights: Sequence[float],
  *,
  num_lanes: int,
) -> LanePlan:
  """Packs clients into lanes, longest client first into the shortest lane.

  S is the longest lane's length rounded up to 32, 128, 512, ..., so that
  different rounds share compiled programs; the added steps are not run.

  Args:
    batches: for each client `int32[s_k, B]`, its batches in order.
    clients: for each client its number.
    weights: for each client its weight in the aggregate; positive.
    num_lanes: L.

  Returns:
    The plan: `OneClientLanes` if there are as many lanes as clients, or more.

  Raises:
    ValueError: a weight is not positive.

  >>> two, one = np.zeros((2, 4), np.int32), np.ones((1, 4), np.int32)
  >>> plan = pack_lanes([one, two, one], [7, 8, 9], [4, 8, 4], num_lanes=2)
  >>> plan.steps
  array([2, 2], dtype=int32)
  >>> plan.client[:, :3]
  array([[8, 8, 0],
         [7, 9, 0]], dtype=int32)
  >>> plan.weight[:, :3]
  array([[0., 8., 0.],
         [4., 4., 0.]], dtype=float32)
  """
  if not all(np.float32(weight) > 0 for weight in weights):
    raise ValueError(
      f"weights={list(weights)}: must be positive; leave out clients that do"
      " not count"
    )
  lanes = longest_first([len(of) for of in batches], num_lanes)
  steps = np.array([sum(len(batches[k]) for k in lane) for lane in lanes])
  size = padded_length(int(steps.max()), at_least=32)
  batch_size = batches[0].shape[1]
  alone = len(batches) <= num_lanes
  plan = (OneClientLanes if alone else LanePlan)(
    index=np.full((num_lanes, size, batch_size), -1, np.int32),
    client=np.zeros((num_lanes, size), np.int32),
    step=np.zeros((num_lanes, size), np.int32),
    weight=np.zeros((num_lanes, size), np.float32),
    steps=steps.astype(np.int32),
  )
  for lane, members in enumerate(lanes):
    start = 0
    for k in members:
      end = start + len(batches[k])
      plan.index[lane, start:end] = batches[k]
      plan.client[lane, start:end] = clients[k]
      plan.step[lane, start:end] = np.arange(end - start)
      plan.weight[lane, end - 1] = weights[k]
      start = end
  return plan


def longest_first(lengths: Sequence[int], num_lanes: int) -> list[list[int]]:
  """Divides clients among lanes: longest client first into the shortest lane.

  Args:
    lengths: the number of steps of each client.
    num_lanes: L.

  Returns:
    For each lane its clients, as positions in `lengths`.

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


def padded_length(length: int, *, at_least: int) -> int:
  """The least of `at_least`, four times that, and so on, that is enough.

  Args:
    length: the length needed.
    at_least: the least length.

  Returns:
    The padded length. It takes few values, so that different rounds share
    compiled programs.

  >>> [padded_length(n, at_least=32) for n in (1, 32, 33, 129)]
  [32, 32, 128, 512]
  """
  padded = at_least
  while padded < length:
    padded *= 4
  return padded


def fill_up(lanes: Sequence[LanePlan]) -> list[LanePlan]:
  """Pads a pool's plans of several rounds to the length of the longest.

  Args:
    lanes: plans of as many lanes.

  Returns:
    Plans of equal shapes; the added steps are not run.
  """
  size = max(plan.client.shape[1] for plan in lanes)
  if len({type(plan) for plan in lanes}) > 1:
    lanes = [LanePlan(*plan) for plan in lanes]

  def fill(array, value):
    widths = [(0, 0)] * array.ndim
    widths[1] = (0, size - array.shape[1])
    return np.pad(array, widths, constant_values=value)

  return [
    plan._replace(
      index=fill(plan.index, -1),
      client=fill(plan.client, 0),
      step=fill(plan.step, 0),
      weight=fill(plan.weight, 0),
    )
    for plan in lanes
  ]
