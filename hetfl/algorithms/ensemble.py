"""Rounds of pools in which the models of all clients teach the server's.

FedDF and Fed-ET differ in who learns, and in what they learn from the clients.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import checks, core
from hetfl.algorithms.fedavg import (
  client_losses,
  client_works,
  combine,
  linear_decay,
  Pool,
  round_keys,
  step_servers,
)
from hetfl.algorithms.public import known
from hetfl.batches import of_round, Plan
from hetfl.distill import Distiller
from hetfl.engine import batch_size_or_default, Engine, Task, Work


class Averaged(NamedTuple):
  """A round of federated averaging, before anyone learns from the clients.

  Attributes:
    state: the pools' state after it.
    losses: each pool's loss.
    said: each pool's clients' logits on the distillation batches, `float[K, S,
      B, C]`, or their sum, `float[S, B, C]`. Zeros for clients of weight 0, and
      for those that have diverged.
    heard: 1 for each pool's clients that teach, 0 for those whose logits are
      zeroed, `float32[K]`; or the number of those that teach, `float32[]`.
    weights: each pool's clients' weights, `float32[K]`.
    decay: the factor of the round's learning rates.
    key: the key of the distillation batches; see `Distiller.batch`.
  """

  state: core.State
  losses: list[core.Mean]
  said: Sequence[jax.Array]
  heard: Sequence[jax.Array]
  weights: Sequence[jax.Array | np.ndarray]
  decay: jax.Array
  key: jax.Array

  @property
  def anyone(self) -> jax.Array:
    """1 if any client is heard, else 0: then there is nothing to learn."""
    return jnp.int32(sum(map(jnp.sum, self.heard)) > 0)


def ensemble(
  pools: Sequence[Pool],
  distiller: Distiller,
  *,
  rounds: int | None,
  engine: Engine,
) -> Callable[..., Averaged]:
  """Federated averaging in P pools, whose clients' models are all heard.

  Args:
    pools: P pools; the server sees each client's update.
    distiller: how models see the distillation batches.
    rounds: T, over which learning rates fall linearly; `None` for no fall.
    engine: where the work runs.

  Returns:
    `average(state, plan, data, *, total) -> Averaged`: a step of federated
    averaging in each pool, and what its clients say.

  Raises:
    ValueError: as `fedavg`.
  """
  checks.counts(**checks.given(rounds=rounds))
  core.unique_names("pools", pools, Pool)
  teachers = [_teacher(distiller.view(pool.model)) for pool in pools]

  def average(
    state: core.State, plan: Plan, data: dict[str, core.Batch], *, total: bool
  ) -> Averaged:
    """A step of federated averaging in each pool, and what its clients say.

    Args:
      state: the pools' state.
      plan: the round's plan, with batches by the pools' names and `distill`.
      data: banks by these names.
      total: whether each pool's logits are added up.

    Returns:
      The state after the step, and what learning from the clients takes.
    """
    *_, key = round_keys(state.key, plan.round, len(pools))
    index = of_round(plan, "distill", 1).index[0]
    bank = checks.bank(data, "distill")
    sent = engine.run(*client_works(pools, state, plan, data, each=True))
    weights = [of_round(plan, pool.name).weight for pool in pools]
    works = [
      Work(
        teacher,
        (old.variables, key, bank, index),
        (update.delta, update.stats),
        (weight > 0).astype(np.int32),
        total=total,
        at_once=max(1, batch_size_or_default(None) // index.shape[1]),
      )
      for teacher, old, update, weight in zip(
        teachers, state.server, sent, weights
      )
    ]
    said, heard = zip(*engine.run(*works))
    gradients = combine(pools, state, plan, sent)
    decay = linear_decay(plan.round, rounds)
    state = step_servers(pools, state, gradients, decay)
    losses = client_losses(sent)
    return Averaged(state, losses, said, heard, weights, decay, key)

  return average


def _teacher(view: Task) -> Task:
  """The logits of a client's model on a round's batches, `[S, B, C]`."""

  def logits(server, key, bank, index, update) -> Any:
    delta, stats = update
    params = jax.tree.map(jnp.subtract, server.params, delta)
    variables = core.Variables(params, stats)
    numbers = jnp.arange(len(index), dtype=jnp.int32)
    one = lambda batch: view.whole(1, variables, key, bank, batch)
    said = jax.lax.map(one, (numbers, index))
    (heard,) = known([said])
    return jnp.where(heard > 0, said, 0), heard

  return Task.of(logits)
