"""Federated averaging: FedAvg, FedProx, FedAvgM, FedAdam and FedYogi.

The building block of codistillation, and its baseline when several pools run
side by side without exchange. The five differ in two fields of `Pool` only:
FedProx adds a term to the clients' loss, and FedAvgM, FedAdam and FedYogi use
another server optimizer.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from hetfl import checks, core
from hetfl import engine as engine_lib
from hetfl.planning import RoundPlan
from hetfl.pool import (
  check_round,
  client_jobs,
  client_metrics,
  combine,
  init_pools,
  Pool,
  PoolsState,
  round_keys,
  step_servers,
)


def linear_decay(round: int | jax.Array, rounds: int | None) -> jax.Array:
  """`1 - (t - 1) / T`: one in the first round, zero after the last.

  Args:
    round: t, from 1.
    rounds: T; `None` for no decay.

  Returns:
    The factor of a learning rate, a scalar.

  Reference: Lichtarge et al. 2023, appendix C.3 ("linearly decaying", "with a
  zero final value").

  >>> [float(linear_decay(t, 4)) for t in (1, 4, 5)]
  [1.0, 0.25, 0.0]
  """
  if rounds is None:
    return jnp.ones(())
  return jnp.maximum(1.0 - (round - 1.0) / rounds, 0.0)


def fedavg_round(
  pools: Sequence[Pool],
  state: PoolsState,
  plan: RoundPlan,
  data: dict[str, Any],
  *,
  decay: jax.Array,
  engine: engine_lib.Engine,
) -> tuple[PoolsState, core.Metrics]:
  """A round of `fedavg`, which is also the first half of PeriodicCodist's.

  Args:
    pools: P pools.
    state: their state.
    plan: the round's plan.
    data: `pools` holds P banks on the device.
    decay: the factor of the servers' learning rates.
    engine: where the work runs.

  Returns:
    The state and the metrics after the round.
  """
  keys = round_keys(state.key, plan.round, len(pools))
  sent = engine.run(*client_jobs(pools, state, keys, plan, data))
  updates = combine(pools, sent, engine)
  states = step_servers(pools, state.pools, updates, decay, engine)
  state = dataclasses.replace(state, pools=states)
  return state, client_metrics(pools, sent)


def fedavg(
  pools: Sequence[Pool],
  *,
  rounds: int | None,
  engine: engine_lib.Engine | None = None,
) -> core.Algorithm:
  """Federated averaging in each of P pools, without exchange.

  `w <- server_optimizer(w, sum_k n_k (w - w_k) / sum_k n_k)`

  Each pool has its own server optimizer, by default FedAdam. With
  `server_optimizer=hetfl.fedavg_server, server_lr=1., rounds=None` the
  algorithm is McMahan's FedAvg, whose plans have `full_batches=False`.

  Args:
    pools: P pools.
    rounds: T, over which the servers' learning rates fall linearly to zero, so
      that later rounds change no parameters; `None` keeps them constant.
    engine: where the work runs; `Inline()` by default. With `Threads()` the
      step dispatches programs itself and must not be traced.

  Returns:
    The algorithm. Its `init` takes a key and, to continue from existing models,
    P `Variables`. Its `step` takes a `RoundPlan` and
    `{'pools': (bank, ...)}`, the banks on the device. Its metrics are each
    pool's `NAME/client_loss`, the mean over its clients' steps.

  Raises:
    ValueError: if `rounds` is below 1, there are no pools, or two pools have
      the same name.

  Reference: McMahan et al. 2017, algorithm 1; Reddi et al. 2021, algorithm 2;
  Lichtarge et al. 2023, appendix C.3.

  With one client, one image of class 0 and logits (0, 0), the client moves to
  (1/2, -1/2), and so does the server, at a learning rate of 1.

  >>> from hetfl import fedavg_server, planning, population
  >>> model = core.Model(
  ...     lambda key: core.Variables(jnp.zeros((1, 2)), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> pool = Pool('a', model, 1., 1., server_optimizer=fedavg_server)
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> clients = population.ClientPopulation.from_lists(bank, [[0]])
  >>> plan = planning.plan_round(
  ...     [clients], seed=0, round=1, clients_per_round=1, batch_size=1)
  >>> algorithm = fedavg([pool], rounds=None)
  >>> state = algorithm.init(jax.random.key(0))
  >>> state, metrics = algorithm.step(state, plan, {'pools': (bank,)})
  >>> state.pools[0].params.tolist()
  [[0.5, -0.5]]
  >>> float(metrics['a/client_loss'].value)  # log 2
  0.693...
  """
  pools = checks.named("pools", pools, Pool)
  engine = engine or engine_lib.Inline()
  checks.counts(**checks.given(rounds=rounds))

  def init(key, variables=None):
    return init_pools(pools, key, variables, {})

  def step(state, plan, data):
    check_round(pools, state, plan)
    decay = linear_decay(plan.round, rounds)
    return fedavg_round(pools, state, plan, data, decay=decay, engine=engine)

  return core.Algorithm(init, step)
