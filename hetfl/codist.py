"""Knowledge codistillation between pools: PeriodicCodist and MergedCodist.

Each pool trains a model of its own by federated averaging; on the server the
models teach each other on distillation data, without sharing parameters.

Reference: Lichtarge et al. 2023, "Heterogeneous Federated Learning Using
Knowledge Codistillation", appendix B, algorithms 1 and 2. The paper has two
pools, L and H; here there may be any number, and the teacher of one is the mean
of the others.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core
from hetfl import distill as distill_lib
from hetfl import engine as engine_lib
from hetfl.fedavg import fedavg_round, linear_decay
from hetfl.hyperparameters import Schedule, scheduled
from hetfl.pool import (
  check_round,
  client_jobs,
  client_metrics,
  combine,
  init_pools,
  Pool,
  round_keys,
  step_servers,
)

PyTree = Any


def merge_gradients(
  g: PyTree, delta: PyTree, *, alpha: float | jax.Array
) -> PyTree:
  """`Delta = alpha g + (1 - alpha) delta ||g|| / ||delta||`.

  The norms are over the whole model. Where `delta` is zero, so is its term.

  Args:
    g: the clients' aggregated gradient.
    delta: the distillation gradient, `theta - theta_student`.
    alpha: the merging factor, in [0, 1]; 1 gives `g`.

  Returns:
    The merged gradient.

  Reference: Lichtarge et al. 2023, equation 2.

  >>> merge_gradients(jnp.array([3., 4.]), jnp.array([0., 2.]), alpha=0.5)
  Array([1.5, 4.5], dtype=float32)
  """
  # In float16 the squares of small numbers vanish.
  g, delta = jax.tree.map(core.wide, (g, delta))
  norm = optax.tree.norm(delta)
  scale = jnp.where(
    norm > 0, optax.tree.norm(g) / jnp.where(norm > 0, norm, 1), 0
  )
  return jax.tree.map(
    lambda g, d: alpha * g + (1 - alpha) * (scale * d), g, delta
  )


class _Exchange:
  """The jobs of one codistillation between P pools.

  Attributes:
    names: the hyper-parameters that it reads.
  """

  def __init__(
    self,
    pools: tuple[Pool, ...],
    distiller: distill_lib.Distiller,
    engine: engine_lib.Engine,
  ):
    num_pools = len(pools)
    checks.kind(
      "distiller", distiller, distill_lib.Distiller, "such as Distiller()"
    )
    self.names = tuple(distiller.hyper(num_pools))
    self._engine = engine
    models = [pool.model for pool in pools]
    self._predictors = [distiller.predictor(model) for model in models]
    self._students = [distiller.student(models, i) for i in range(num_pools)]

  def jobs(self, teachers, hyper, key, plan, data, decay, when):
    """Runs the teachers and returns the jobs that distil to each student.

    Args:
      teachers: P `Variables`, the current models; students start from them.
      hyper: the exchange's hyper-parameters.
      key: the exchange's key of the round.
      plan: the round's plan.
      data: `distill` holds the distillation bank.
      decay: the linear decay over the rounds, from 1 to 0.
      when: whether this round distils; if not, students stay as they are.

    Returns:
      P jobs, whose results are `(Variables, loss)`.
    """
    rows = plan.distill
    if rows is None:
      raise ValueError("plan.distill is None: codistillation needs batches")
    steps = np.arange(len(rows), dtype=np.int32)
    bank = checks.bank(data, "distill")
    views = self._engine.run(
      *(
        engine_lib.Chunks(predict, (teacher, key, bank), (steps, rows), when)
        for predict, teacher in zip(self._predictors, teachers)
      )
    )
    models_and_views = tuple(zip(teachers, views))
    return [
      engine_lib.Call(
        student,
        (teacher, hyper, decay, key, bank, steps, rows, models_and_views),
        when,
        core.unchanged,
        shared=True,
      )
      for student, teacher in zip(self._students, teachers)
    ]


def _same(state):
  return state


def _distill_metrics(pools, losses) -> core.Metrics:
  return {
    f"{pool.name}/distill_loss": loss for pool, loss in zip(pools, losses)
  }


def periodic_codist(
  pools: Sequence[Pool],
  distiller: distill_lib.Distiller,
  *,
  period: int,
  rounds: int | None,
  engine: engine_lib.Engine | None = None,
) -> core.Algorithm:
  """PeriodicCodist: every `period` rounds the models teach each other.

  `theta_i <- FedAvg(theta_i)`; if `t % p == 0`, for all i at once,
  `theta_i <- distil(student=theta_i, teachers={theta_j, j != i})`.

  After each codistillation the server optimizers' states are reset, including
  their step counts, "as the models have departed from their initial parameters"
  (appendix C.4, which speaks only of the momentum variables).

  Args:
    pools: P >= 2 pools.
    distiller: how students learn.
    period: p; more than `rounds` gives FedAvg.
    rounds: T, over which all learning rates but the clients' fall linearly;
      `None` keeps them constant.
    engine: where the work runs; `Inline()` by default. With `Threads()` the
      step dispatches programs itself and must not be traced.

  Returns:
    The algorithm. Its `init` takes a key and, to continue from existing models,
    P `Variables`. Its `step` takes a `RoundPlan` with distillation batches and
    `{'pools': (bank, ...), 'distill': bank}`, the banks on the device. Its
    metrics are each pool's `NAME/client_loss` and `NAME/distill_loss`, means
    over steps; the second is an empty mean in rounds without codistillation.

  Raises:
    ValueError: if a value is out of its range.

  Reference: Lichtarge et al. 2023, algorithm 1.

  For the only image, of class 0, the two models predict (1/2, 1/2) and
  (3/4, 1/4). FedAvg brings the first one to logits (1/2, -1/2); then each model
  learns from the other.

  >>> from hetfl import fedavg_server, planning, population
  >>> def pool(name, *w):
  ...   model = core.Model(
  ...       lambda key: core.Variables(jnp.array([w]), {}),
  ...       lambda v, x, key, train: (x @ v.params, v.stats))
  ...   return Pool(name, model, 1., 1., server_optimizer=fedavg_server)
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> clients = population.ClientPopulation.from_lists(bank, [[0]])
  >>> plan = planning.plan_round(
  ...     [clients] * 2, clients.examples(), seed=0, round=1,
  ...     clients_per_round=1, batch_size=1, distill_batch_size=1)
  >>> distiller = distill_lib.Distiller(
  ...     1., regularization=0., optimizer=optax.sgd)
  >>> algorithm = periodic_codist(
  ...     [pool('a', 0., 0.), pool('b', jnp.log(3.), 0.)], distiller, period=1,
  ...     rounds=None)
  >>> state, metrics = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan,
  ...     {'pools': (bank, bank), 'distill': bank})
  >>> round(float(state.pools[0].params[0, 0]), 3)  # b says 0.83 now, a 0.73
  0.601
  """
  pools = checks.named("pools", pools, Pool, at_least=2)
  engine = engine or engine_lib.Inline()
  exchange = _Exchange(pools, distiller, engine)
  checks.counts(period=period, **checks.given(rounds=rounds))

  def init(key, variables=None):  # Line 1.
    return init_pools(pools, key, variables, distiller.hyper(len(pools)))

  def step(state, plan, data):
    check_round(pools, state, plan, *exchange.names)
    decay = linear_decay(plan.round, rounds)
    # Line 3: apply FedAvg to each model, sampling clients from its pool.
    state, metrics = fedavg_round(
      pools, state, plan, data, decay=decay, engine=engine
    )
    *_, key = round_keys(state.key, plan.round, len(pools))
    due = plan.round % period == 0  # Line 4.
    # Lines 5 to 7: teachers and students start as copies of the models.
    results = engine.run(
      *exchange.jobs(
        [pool.variables for pool in state.pools],
        state.hyper,
        key,
        plan,
        data,
        decay,
        due,
      )
    )
    # Line 8: replace the models by the students.
    replaced = [
      pool_state.replace(params=student.params, stats=student.stats)
      for pool_state, (student, _) in zip(state.pools, results)
    ]
    states = engine.run(
      *(
        engine_lib.Call(pool.reset_server, (s,), due, _same)
        for pool, s in zip(pools, replaced)
      )
    )
    metrics |= _distill_metrics(pools, [loss for _, loss in results])
    return state.replace(pools=states), metrics

  return core.Algorithm(init, step)


def merged_codist(
  pools: Sequence[Pool],
  distiller: distill_lib.Distiller,
  *,
  alpha: float | jax.Array | Schedule,
  rounds: int | None,
  every: int = 1,
  engine: engine_lib.Engine | None = None,
) -> core.Algorithm:
  """MergedCodist: clients' and distillation gradients in one server step.

  `delta_i = theta_i - distil(student=theta_i, teachers={theta_j, j != i})`;
  `theta_i <- server_optimizer(theta_i, alpha g_i + (1 - alpha) delta_i
  ||g_i|| / ||delta_i||)`. Statistics such as batch normalisation's are the
  clients' mean; those of the student are dropped.

  Args:
    pools: P >= 2 pools.
    distiller: how students learn.
    alpha: the merging factor, in [0, 1]: a value, which trials may vary, or a
      schedule `round -> alpha`. Rounds with alpha = 1 are FedAvg rounds and
      skip the distillation (section 4).
    rounds: T, over which all learning rates but the clients' fall linearly;
      `None` keeps them constant.
    every: alpha is 1 except in every `every`-th round.
    engine: where the work runs; `Inline()` by default. With `Threads()` the
      step dispatches programs itself and must not be traced.

  Returns:
    The algorithm. Its `init` takes a key and, to continue from existing models,
    P `Variables`. Its `step` takes a `RoundPlan` with distillation batches and
    `{'pools': (bank, ...), 'distill': bank}`, the banks on the device. Its
    metrics are each pool's `NAME/client_loss` and `NAME/distill_loss`, means
    over steps; the second is an empty mean in rounds without codistillation.

  Raises:
    ValueError: if a value is out of its range. A schedule that leaves its range
      in a later round gives NaN in that round.

  Reference: Lichtarge et al. 2023, algorithm 2.

  For the only image, of class 0, the two models predict (1/2, 1/2) and
  (3/4, 1/4). For the first model the clients' and the distillation gradient
  agree, so that it moves by ||g||; for the second they are opposite and cancel.

  >>> from hetfl import fedavg_server, planning, population
  >>> def pool(name, *w):
  ...   model = core.Model(
  ...       lambda key: core.Variables(jnp.array([w]), {}),
  ...       lambda v, x, key, train: (x @ v.params, v.stats))
  ...   return Pool(name, model, 1., 1., server_optimizer=fedavg_server)
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> clients = population.ClientPopulation.from_lists(bank, [[0]])
  >>> plan = planning.plan_round(
  ...     [clients] * 2, clients.examples(), seed=0, round=1,
  ...     clients_per_round=1, batch_size=1, distill_batch_size=1)
  >>> distiller = distill_lib.Distiller(
  ...     1., regularization=0., optimizer=optax.sgd)
  >>> algorithm = merged_codist(
  ...     [pool('a', 0., 0.), pool('b', jnp.log(3.), 0.)], distiller, alpha=0.5,
  ...     rounds=None)
  >>> state, metrics = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan,
  ...     {'pools': (bank, bank), 'distill': bank})
  >>> [p.params.round(2).tolist() for p in state.pools]  # log 3 = 1.1
  [[[0.5, -0.5]], [[1.1..., -0.0]]]
  >>> float(metrics['a/distill_loss'].value)  # 3/4 log 3/2 + 1/4 log 1/2
  0.130...
  """
  pools = checks.named("pools", pools, Pool, at_least=2)
  engine = engine or engine_lib.Inline()
  exchange = _Exchange(pools, distiller, engine)
  checks.counts(every=every, **checks.given(rounds=rounds))
  checks.schedule("alpha", alpha, 1, rounds or 1, allowed=(0, 1))
  names = exchange.names if callable(alpha) else (*exchange.names, "alpha")

  def init(key, variables=None):  # Line 1.
    hyper = distiller.hyper(len(pools))
    if not callable(alpha):
      hyper["alpha"] = alpha
    return init_pools(pools, key, variables, hyper)

  def step(state, plan, data):
    check_round(pools, state, plan, *names)
    *keys, exchange_key = round_keys(state.key, plan.round, len(pools))
    decay = linear_decay(plan.round, rounds)
    if callable(alpha):
      a = scheduled(alpha, plan.round, high=1)
    else:
      a = state.hyper["alpha"]
    if every > 1:
      a = jnp.where(plan.round % every == 0, a, 1.0)
    # Lines 4 to 6: teachers and students start as copies of the models.
    students = exchange.jobs(
      [pool.variables for pool in state.pools],
      state.hyper,
      exchange_key,
      plan,
      data,
      decay,
      a < 1,
    )
    # Line 3: aggregate client gradients, in parallel with the distillation.
    clients = client_jobs(pools, state, keys, plan, data)
    results = engine.run(*students, *clients)
    distilled, sent = results[: len(pools)], results[len(pools) :]
    gradients = combine(pools, sent, engine)
    # Lines 7 and 8.
    merged = engine.run(
      *(
        engine_lib.Call(_merge, (kept.params, *gradient, student, a))
        for kept, gradient, (student, _) in zip(
          state.pools, gradients, distilled
        )
      )
    )
    # Line 9: apply FedAvg with the merged gradient.
    states = step_servers(pools, state.pools, merged, decay, engine)
    metrics = client_metrics(pools, sent)
    metrics |= _distill_metrics(pools, [loss for _, loss in distilled])
    return state.replace(pools=states), metrics

  return core.Algorithm(init, step)


def _merge(params, g, stats, student, alpha):
  """Lines 7 and 8 of algorithm 2: the merged gradient, and the statistics."""
  delta = optax.tree.sub(params, student.params)
  return merge_gradients(g, delta, alpha=alpha), stats
