"""Knowledge codistillation between pools: PeriodicCodist and MergedCodist.

Each pool trains a model of its own by federated averaging; on the server the
models teach each other on distillation data, without sharing parameters.

Reference: Lichtarge et al. 2023, "Heterogeneous Federated Learning Using
Knowledge Codistillation", appendix B, algorithms 1 and 2. The paper has two
pools, L and H; here there may be any number, and the teacher of one is the mean
of the others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core, local
from hetfl.algorithms.fedavg import (
  client_losses,
  client_works,
  combine,
  init_pools,
  linear_decay,
  Pool,
  round_keys,
  step_servers,
)
from hetfl.batches import of_round, Plan, row_of
from hetfl.distill import Distiller
from hetfl.engine import Engine, Inline, Work

PyTree = Any


@jax.jit
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
  squares = [optax.tree.norm(tree, squared=True) for tree in (g, delta)]
  # The square root has no slope at zero.
  norm_g, norm = (jnp.sqrt(jnp.where(x > 0, x, 1)) for x in squares)
  scale = jnp.where((squares[0] > 0) & (squares[1] > 0), norm_g / norm, 0)
  merged = lambda g, d: alpha * g + (1 - alpha) * (scale * d)
  return jax.tree.map(merged, g, delta)


@jax.jit
def _finite(learners):
  return core.all_finite([learner.variables for learner in learners])


def exchange(
  pools: Sequence[Pool], distiller: Distiller, engine: Engine
) -> Callable[..., list[Work]]:
  """Distillation to the models of P pools, such as codistillation.

  The function that it returns runs the teachers, and returns the works that
  distil to students. Each work's result is `(Variables, loss)` of a student
  after its steps on the teachers' targets.
  """
  if not isinstance(distiller, Distiller):
    raise ValueError(f"distiller={distiller!r}: give a Distiller")
  models = [pool.model for pool in pools]
  views_of = [distiller.view(model) for model in models]
  students = [distiller.student(models, i) for i in range(len(pools))]

  def distillations(
    state: core.State,
    plan: Plan,
    data: dict[str, core.Batch],
    decay: jax.Array,
    due: jax.Array | np.bool_,
    said: jax.Array | None = None,
  ) -> list[Work]:
    """The works.

    Args:
      state: the pools' state, from whose models teachers and students start;
        it holds the exchange's hyper-parameters.
      plan: the round's plan.
      data: holds the distillation bank.
      decay: the linear decay over the rounds, from 1 to 0.
      due: whether this round distils; if not, students stay as they are.
      said: the views of the one teacher of all students; `None` for the other
        pools' models.
    """
    batches = of_round(plan, "distill", 1)
    bank = checks.bank(data, "distill")
    when = due.astype(np.int32)
    *_, key = round_keys(state.key, plan.round, len(pools))
    teachers = [learner.variables for learner in state.server]
    views = engine.run(
      *(
        distiller.look(view, of, key, bank, batches, when)
        for view, of in zip(views_of, teachers)
      )
    )
    seen = {"decay": decay, "key": key, "teachers": teachers, "views": views}
    context = state.hyper | seen | checks.given(said=said)
    # Differs from the batches' keys.
    student_key = jax.random.fold_in(key, np.uint32(2**31))
    rows = [row_of(plan, "distill", i) for i in range(len(pools))]
    return [
      local.work(student, context, student_key, bank, (), row, when=when)
      for student, row in zip(students, rows)
    ]

  return distillations


def periodic_codist(
  pools: Sequence[Pool],
  distiller: Distiller,
  *,
  period: int,
  rounds: int | None,
  engine: Engine | None = None,
) -> core.Algorithm:
  """PeriodicCodist: every `period` rounds the models teach each other.

  `theta_i <- FedAvg(theta_i)`; if `t % p == 0`, for all i at once,
  `theta_i <- distil(student=theta_i, teachers={theta_j, j != i})`.

  While a model is not finite, as it has diverged, there is no codistillation:
  none learns from it.

  After each codistillation the server optimizers' states are reset, including
  their step counts, "as the models have departed from their initial parameters"
  (appendix C.4, which speaks only of the momentum variables).

  Args:
    pools: P >= 2 pools.
    distiller: how students learn.
    period: p; more than `rounds` gives FedAvg.
    rounds: T, over which all learning rates but the clients' fall linearly;
      `None` keeps them constant.
    engine: where the work runs, by default `Inline()`; see `hetfl.engine`.

  Returns:
    The algorithm. Its `init` takes a key and, to continue from existing models,
    P `Variables`. Its `step` takes a plan and data as for `fedavg`, both with
    `distill`, the distillation batches and their bank. Its metrics are each
    pool's `NAME/client_loss` and `NAME/distill_loss`, means over steps; the
    second is an empty mean in rounds without codistillation.

  Raises:
    ValueError: if a value is out of its range.

  Reference: Lichtarge et al. 2023, algorithm 1.

  For the only image, of class 0, the two models predict (1/2, 1/2) and
  (3/4, 1/4). FedAvg brings the first one to logits (1/2, -1/2); then each model
  learns from the other.

  >>> from hetfl import ClientPopulation, optimizers, plan_round
  >>> def pool(name, *w):
  ...   model = core.Model(
  ...       lambda key: core.Variables(jnp.array([w]), {}),
  ...       lambda v, x, key, train: (x @ v.params, v.stats))
  ...   return Pool(model, name, learning_rate=1., server_lr=1.,
  ...               server_optimizer=optimizers.fedavg_server)
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> clients = ClientPopulation.from_lists(bank, [[0]])
  >>> plan = plan_round({'a': clients, 'b': clients}, clients.examples(),
  ...                   seed=0, round=1, batch_size=1, distill_batch_size=1)
  >>> distiller = Distiller(1., regularization=0., optimizer=optax.sgd)
  >>> algorithm = periodic_codist(
  ...     [pool('a', 0., 0.), pool('b', jnp.log(3.), 0.)], distiller, period=1,
  ...     rounds=None)
  >>> state, metrics = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan,
  ...     {'a': bank, 'b': bank, 'distill': bank})
  >>> round(float(state.server[0].params[0, 0]), 3)  # b says 0.83 now, a 0.73
  0.601
  """
  pools = core.unique_names("pools", pools, Pool, at_least=2)
  engine = engine or Inline()
  distillations = exchange(pools, distiller, engine)
  pools = distiller.of_classes(pools)  # Only their losses change.
  replaced = [_replacement(pool) for pool in pools]
  checks.counts(period=period, **checks.given(rounds=rounds))

  def init(key, variables=None):  # Line 1.
    values = distiller.hyper(len(pools))  # `distill_lr` ..., in `state.hyper`.
    return init_pools(pools, key, variables, hyper=values)

  def step(state, plan, data):
    # The servers' and students' rates decay.
    decay = linear_decay(plan.round, rounds)
    # Line 3: apply FedAvg to each model, sampling clients from its pool.
    sent = engine.run(*client_works(pools, state, plan, data))
    gradients = combine(pools, state, plan, sent)
    state = step_servers(pools, state, gradients, decay)
    # Line 4.
    due = plan.round % period == 0
    # Lines 5 to 7: teachers and students start as copies of the models.
    works = distillations(state, plan, data, decay, due)
    students, losses = zip(*engine.run(*works))
    # Line 8: replace the models by the students; reset the server's moments.
    learnt = due & _finite(state.server)
    server, losses = zip(
      *(
        replace(*args, learnt)
        for replace, *args in zip(replaced, state.server, students, losses)
      )
    )
    state = state.replace(server=server)
    metrics = local.metrics_of(
      pools, client_loss=client_losses(sent), distill_loss=losses
    )
    return state, metrics

  return core.Algorithm(init, step)


def _replacement(pool):
  @jax.jit  # A program of its own, which is freed with the algorithm.
  def replace(server, student, loss, learnt):
    new = local.Learner.start(student, pool.server_optimizer)
    nothing = server, optax.tree.zeros_like(loss)
    return jax.lax.cond(learnt, lambda: (new, loss), lambda: nothing)

  return replace


def merged_codist(
  pools: Sequence[Pool],
  distiller: Distiller,
  *,
  alpha: float | jax.Array | core.Schedule,
  rounds: int | None,
  every: int = 1,
  engine: Engine | None = None,
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
      skip the distillation (section 4), and so are those in which a model is
      not finite, as it has diverged.
    rounds: T, over which all learning rates but the clients' fall linearly;
      `None` keeps them constant.
    every: alpha is 1 except in every `every`-th round.
    engine: where the work runs, by default `Inline()`; see `hetfl.engine`.

  Returns:
    The algorithm. Its `init` takes a key and, to continue from existing models,
    P `Variables`. Its `step` takes a plan and data as for `fedavg`, both with
    `distill`, the distillation batches and their bank. Its metrics are each
    pool's `NAME/client_loss` and `NAME/distill_loss`, means over steps; the
    second is an empty mean in rounds without codistillation.

  Raises:
    ValueError: if a value is out of its range. A schedule that leaves its range
      in a later round gives NaN in that round.

  Reference: Lichtarge et al. 2023, algorithm 2.

  For the only image, of class 0, the two models predict (1/2, 1/2) and
  (3/4, 1/4). For the first model the clients' and the distillation gradient
  agree, so that it moves by ||g||; for the second they are opposite and cancel.

  >>> from hetfl import ClientPopulation, optimizers, plan_round
  >>> def pool(name, *w):
  ...   model = core.Model(
  ...       lambda key: core.Variables(jnp.array([w]), {}),
  ...       lambda v, x, key, train: (x @ v.params, v.stats))
  ...   return Pool(model, name, learning_rate=1., server_lr=1.,
  ...               server_optimizer=optimizers.fedavg_server)
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> clients = ClientPopulation.from_lists(bank, [[0]])
  >>> plan = plan_round({'a': clients, 'b': clients}, clients.examples(),
  ...                   seed=0, round=1, batch_size=1, distill_batch_size=1)
  >>> distiller = Distiller(1., regularization=0., optimizer=optax.sgd)
  >>> algorithm = merged_codist(
  ...     [pool('a', 0., 0.), pool('b', jnp.log(3.), 0.)], distiller, alpha=0.5,
  ...     rounds=None)
  >>> state, metrics = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan,
  ...     {'a': bank, 'b': bank, 'distill': bank})
  >>> [p.params.round(2).tolist() for p in state.server]  # log 3 = 1.1
  [[[0.5, -0.5]], [[1.1..., -0.0]]]
  >>> float(metrics['a/distill_loss'].value)  # 3/4 log 3/2 + 1/4 log 1/2
  0.130...
  """
  pools = core.unique_names("pools", pools, Pool, at_least=2)
  engine = engine or Inline()
  distillations = exchange(pools, distiller, engine)
  pools = distiller.of_classes(pools)  # Only their losses change.
  checks.counts(every=every, **checks.given(rounds=rounds))
  core.check_schedule("alpha", alpha, 1, rounds or 1, high=1)

  def init(key, variables=None):  # Line 1.
    values = distiller.hyper(len(pools))  # `distill_lr` ..., in `state.hyper`.
    if not callable(alpha):
      values |= core.hyper(alpha=alpha)
    return init_pools(pools, key, variables, hyper=values)

  def step(state, plan, data):
    # The servers' and students' rates decay.
    decay = linear_decay(plan.round, rounds)
    a = core.scheduled({"alpha": (alpha, 1)}, state, plan.round)["alpha"]
    if every > 1:
      a = jnp.where(plan.round % every == 0, a, 1.0)
    thetas = state.server
    a = jnp.where(_finite(thetas), a, 1.0)
    # Line 3: aggregate client gradients, in parallel with the distillation.
    train = client_works(pools, state, plan, data)
    # Lines 4 to 6: teachers and students start as copies of the models.
    distil = distillations(state, plan, data, decay, a < 1)
    results = engine.run(*distil, *train)
    students, losses = zip(*results[: len(pools)])
    sent = results[len(pools) :]
    gradients = combine(pools, state, plan, sent)
    # Lines 7 and 8; the statistics are the clients'.
    merged = [
      (_merge(g, theta.params, student.params, a), *rest)
      for (g, *rest), theta, student in zip(gradients, thetas, students)
    ]
    # Line 9: apply FedAvg with the merged gradient.
    state = step_servers(pools, state, merged, decay)
    metrics = local.metrics_of(
      pools, client_loss=client_losses(sent), distill_loss=losses
    )
    return state, metrics

  return core.Algorithm(init, step)


@jax.jit
def _merge(g, theta, student, alpha):
  delta = optax.tree.sub(theta, student)  # Line 7.
  return merge_gradients(g, delta, alpha=alpha)  # Line 8.
