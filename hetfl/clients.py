"""What clients keep between rounds: rows of pytrees, in groups that are alike.

Any algorithm can keep a pytree `[K, ...]` for each group of clients with one
architecture, take the rows of those that a round samples, and put the new rows
back; clients that are not sampled cost nothing.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import core
from hetfl.batches import Batches
from hetfl.local import Participant

PyTree = Any


def group_clients(
  clients: Sequence[Participant],
) -> tuple[tuple[int, ...], ...]:
  """The groups of clients with equal fields, as client numbers.

  Args:
    clients: K clients.

  Returns:
    The groups, in the order of their first clients.

  >>> a, b = (Participant(core.Model(None, f), learning_rate=1.)
  ...         for f in (max, min))
  >>> group_clients([a, b, a])
  ((0, 2), (1,))
  """
  groups: dict[tuple[Any, ...], list[int]] = {}
  for k, client in enumerate(clients):
    fields = (f.name for f in dataclasses.fields(client) if f.name != "name")
    alike = tuple(core.hash_key(getattr(client, name)) for name in fields)
    groups.setdefault(alike, []).append(k)
  return tuple(map(tuple, groups.values()))


def check_clients(batches: Batches, name: str, number: int) -> None:
  """Raises a `ValueError` if batches are of other clients than there are."""
  host = isinstance(batches.client, np.ndarray)
  if host and (last := batches.client.max()) >= number:
    raise ValueError(
      f"plan: batches {name!r} are of client {last}, but there are {number}"
    )


def rows_of_group(
  batches: Batches, in_bank: np.ndarray, group: tuple[int, ...]
) -> tuple[jax.Array, Batches]:
  """A group's rows in a plan, as many in each round.

  Args:
    batches: the round's batches, of some clients of a bank.
    in_bank: `int[K]`, each client's number in its bank's population.
    group: the group's clients.

  Returns:
    `int32[N]`, rows of the group's state, and their batches; those of clients
    that do not take part have no steps and no weight.
  """
  xp = np if isinstance(batches.client, np.ndarray) else jnp
  numbers = in_bank[np.array(group)]
  matches = xp.asarray(batches.client)[None] == numbers[:, None]
  takes_part, row = matches.any(axis=1), matches.argmax(axis=1)
  # Participants first, then other clients to fill up the rows.
  chosen = xp.argsort(~takes_part, stable=True)[: len(batches.client)]
  chosen = xp.sort(chosen).astype(np.int32)
  takes_part, row = takes_part[chosen], row[chosen]
  return chosen, Batches(
    batches.index[row],
    xp.where(takes_part, batches.steps[row], 0),
    xp.asarray(np.array(group, np.int32))[chosen],
    xp.where(takes_part, batches.weight[row], 0.0).astype(np.float32),
  )


@jax.jit
def take_rows(kept: PyTree, rows: jax.Array) -> PyTree:
  """The rows of clients that take part, of what all clients keep."""
  take = lambda a: a if len(rows) == len(a) else a[rows]  # All, in their order.
  return jax.tree.map(take, kept)


@jax.jit
def put_rows(kept: PyTree, rows: jax.Array, new: PyTree) -> PyTree:
  """What all clients keep, with some rows replaced; the inverse."""
  put = lambda a, b: b if len(rows) == len(a) else a.at[rows].set(b)
  return jax.tree.map(put, kept, new)


def weighted_mean(trees: PyTree, weights: jax.Array) -> PyTree:
  """`sum_k w_k x_k / sum_k w_k`, over arrays `x: [K, ...]`.

  >>> weighted_mean(jnp.array([[1., 5.], [4., 2.]]), jnp.array([2., 1.]))
  Array([2., 4.], dtype=float32)
  """
  highest = jax.lax.Precision.HIGHEST
  total = lambda x: jnp.tensordot(weights, x, 1, precision=highest)
  return jax.tree.map(lambda x: total(x) / jnp.sum(weights), trees)
