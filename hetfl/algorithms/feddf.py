"""FedDF: the server fuses clients' models of several kinds by distillation.

Reference: Lin et al. 2020, "Ensemble Distillation for Robust Model Fusion in
Federated Learning", algorithms 1 and 3.
"""

from collections.abc import Sequence
import dataclasses

import jax

from hetfl import checks, core, distill, local
from hetfl.algorithms.codist import exchange
from hetfl.algorithms.ensemble import ensemble
from hetfl.algorithms.fedavg import init_pools, Pool
from hetfl.distill import Distiller
from hetfl.engine import Engine, Inline


def feddf(
  pools: Sequence[Pool],
  distiller: Distiller | None = None,
  *,
  rounds: int | None,
  engine: Engine | None = None,
) -> core.Algorithm:
  """FedDF in P pools, one for each architecture.

  Each pool's model takes a step of federated averaging; then it learns from all
  clients' models of all pools, `softmax(mean_k z_k)` on the round's
  distillation batches, z_k being client k's logits. A client sends and receives
  what `fedavg`'s do.

  Args:
    pools: P pools, one or more, whose models have the same classes. With
      `server_optimizer=fedavg_server, server_lr=1.` students start from the
      clients' weighted means, as in the paper.
    distiller: how students learn; its divergence is from the mean of the
      clients' outputs, the only teacher; `None` is Adam at 1e-3. Its
      temperature is that of the mean logits, its regularization mixes the
      student's initial prediction into its target; the paper has neither (1 and
      0).
    rounds: T, over which all learning rates but the clients' fall linearly;
      `None` keeps them constant.
    engine: where the work runs, by default `Inline()`; see `hetfl.engine`.

  Returns:
    The algorithm. Its `init` takes a key and, to continue from existing models,
    P `Variables`. Its `step` takes a plan and data as for `fedavg`, both with
    `distill`, the distillation batches and their bank, whose labels are used
    with the distiller's `label_weight` only. Its metrics are each pool's
    `NAME/client_loss` and `NAME/distill_loss`, means over steps.

  Raises:
    ValueError: a value is out of its range; labels are not classes, and the
      distiller has no divergence for them.

  Reference: Lin et al. 2020. Departures: the plan says how many
  steps are taken, without a validation set; the rate is constant in a round,
  where the paper's falls by a cosine. The released code averages clients
  equally, and clips gradients at a norm of 5. Clients of weight 0, or that say
  NaN as they have diverged, do not teach.

  The clients do not learn, and say (0, 0) and (log 3, 0), on average
  (log 3 / 2, 0), whose softmax is (0.634, 0.366).

  >>> import jax.numpy as jnp
  >>> import optax
  >>> from hetfl import ClientPopulation, optimizers, plan_round
  >>> def pool(name, *w):
  ...   model = core.Model(
  ...       lambda key: core.Variables(jnp.array([w]), {}),
  ...       lambda v, x, key, train: (x @ v.params, v.stats))
  ...   return Pool(model, name, learning_rate=0., server_lr=1.,
  ...               server_optimizer=optimizers.fedavg_server)
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> clients = ClientPopulation.from_lists(bank, [[0]])
  >>> plan = plan_round({'a': clients, 'b': clients}, clients.examples(),
  ...                   seed=0, round=1, batch_size=1, distill_batch_size=1)
  >>> distiller = Distiller(1., regularization=0., optimizer=optax.sgd)
  >>> algorithm = feddf([pool('a', 0., 0.), pool('b', jnp.log(3.), 0.)],
  ...                   distiller, rounds=None)
  >>> state, _ = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan,
  ...     {'a': bank, 'b': bank, 'distill': bank})
  >>> [round(float(p.params[0, 0]), 3) for p in state.server]
  [0.134, 0.983]
  """
  distiller = distiller or Distiller(regularization=0.0)
  if not isinstance(distiller, Distiller):
    raise ValueError(f"distiller={distiller!r}: give a Distiller")
  if distiller.divergence is not None:
    distiller = dataclasses.replace(
      distiller, divergence=_of_arrays(distiller.divergence)
    )
  pools = distiller.of_classes(core.unique_names("pools", pools, Pool))
  engine = engine or Inline()
  average = ensemble(pools, distiller, rounds=rounds, engine=engine)
  distillations = exchange(pools, distiller, engine)

  def init(key, variables=None):
    return init_pools(pools, key, variables, distiller.hyper(len(pools)))

  def step(state, plan, data):
    # What each client's model says, added up by the engine.
    averaged = average(state, plan, data, total=True)
    state, decay = averaged.state, averaged.decay
    mean = _mean_of(averaged.said, averaged.heard)
    works = distillations(state, plan, data, decay, averaged.anyone, mean)
    distilled, losses = zip(*engine.run(*works))
    server = tuple(
      old._replace(variables=new) for old, new in zip(state.server, distilled)
    )
    return state.replace(server=server), local.metrics_of(
      pools, client_loss=averaged.losses, distill_loss=losses
    )

  return core.Algorithm(init, step)


def _of_arrays(divergence):
  """A divergence that refuses `TokenLogits`, whose features have no mean."""

  def of_arrays(outputs, *args, **mix):
    checks.array("feddf", outputs)
    return divergence(outputs, *args, **mix)

  return of_arrays


@jax.jit
def _mean_of(said, heard):
  """The mean logits of all clients, from each pool's sum and number."""
  distill.same_classes(*said)
  return sum(said) / sum(heard)
