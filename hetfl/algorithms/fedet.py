"""Fed-ET: clients' small models teach a larger server model.

Reference: Cho et al. 2022, "Heterogeneous Ensemble Knowledge Transfer for
Training Large Models in Federated Learning".
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core, distill, local
from hetfl.algorithms.ensemble import ensemble
from hetfl.algorithms.fedavg import init_pools, Pool
from hetfl.batches import row_of
from hetfl.clients import weighted_mean
from hetfl.distill import Distiller
from hetfl.engine import Engine, Inline
from hetfl.engine.work import stack


def fedet(
  pools: Sequence[Pool],
  server: local.Participant,
  *,
  diversity: float | jax.Array = 0.05,
  shared: str | None = None,
  rounds: int | None,
  engine: Engine | None = None,
) -> core.Algorithm:
  """Fed-ET: P pools, one for each architecture, and a server model.

  Each pool's model takes a step of federated averaging, for which a client
  sends and receives what `fedavg`'s do. On the round's unlabelled batches the
  server's model p learns what the clients' models agree on, by `consensus`, and
  a little of what the others say: `-log p[y] + diversity KL(q || p)`.

  Args:
    pools: P pools, one or more, whose models have the same classes. With
      `server_optimizer=fedavg_server, server_lr=1.` their models are the
      clients' weighted means, as in the paper.
    server: how the server's model trains, with a name of its own. Its transform
      prepares all models' distillation batches; its `loss` is not used.
    diversity: lambda.
    shared: the name of layers that all models have, in their parameters, such
      as a Flax module's `name`. The server's model begins each round with the
      mean of the pools', and the pools end it with the server's.
    rounds: T, over which servers' rates fall linearly; `None` for no fall.
    engine: where the work runs, by default `Inline()`; see `hetfl.engine`.

  Returns:
    The algorithm. `init` takes a key and, to continue, P + 1 `Variables`, the
    server's last; `step` what `feddf`'s does. The state's `server` has P + 1
    `Learner`s, the last with its optimizer, `learning_rate` P + 1 rates.
    Metrics: each pool's `NAME/client_loss`, the server's `NAME/distill_loss`.

  Raises:
    ValueError: a value is out of its range, two names are the same, or a model
      has no `shared` parameters, or has them in other shapes.

  Reference: Cho et al. 2022; representation transfer, `shared`, is an option.
  Departure: the mean of shared layers is weighted by the pools' examples.
  Clients of weight 0, or that say NaN as they have diverged, do not teach.

  Clients, which do not learn, say (2, 0) and (0, 4), with variances 1 and 4: y
  is 1, by 0.2 (2, 0) + 0.8 (0, 4); the first disagrees: q = (0.88, 0.12).

  >>> from hetfl import ClientPopulation, optimizers, plan_round
  >>> linear = lambda *w: core.Model(
  ...     lambda key: core.Variables(jnp.array([w]), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> mean = dict(server_optimizer=optimizers.fedavg_server, server_lr=1.)
  >>> pools = [Pool(linear(*w), name, learning_rate=0., **mean)
  ...          for name, w in (('a', (2., 0.)), ('b', (0., 4.)))]
  >>> server = local.Participant(linear(0., 0.), 'large', learning_rate=1.)
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> clients = ClientPopulation.from_lists(bank, [[0]])
  >>> plan = plan_round({'a': clients, 'b': clients}, clients.examples(),
  ...                   seed=0, round=1, batch_size=1, distill_batch_size=1)
  >>> algorithm = fedet(pools, server, diversity=0.5, rounds=None)
  >>> state, _ = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan,
  ...     {'a': bank, 'b': bank, 'distill': bank})
  >>> round(float(state.server[-1].params[0, 0]), 2)  # 0.5 (0.88 - 0.5) - 0.5
  -0.31
  """
  seen = Distiller(transform=server.transform, microbatch=server.microbatch)
  everyone = core.unique_names(
    "pools and server", (*pools, server), local.Participant
  )
  why = "the server learns softmaxes", "use feddf with Distiller(divergence=)"
  pools = [local.of_classes(pool, *why) for pool in everyone[:-1]]
  engine = engine or Inline()
  average = ensemble(pools, seen, rounds=rounds, engine=engine)
  checks.between(0, jnp.inf, diversity=diversity)

  def make_batch(context, key, bank, index, s):
    del key  # The clients' models see the same batch.
    batch = seen.batch(context["batch_key"], bank, index, step=s)
    return {**batch, **{n: context[n][s] for n in ("labels", "others")}}

  def towards(variables, batch, key, context):
    logits, stats = server.outputs(variables, batch, key)
    distill.same_classes(batch["others"], logits)
    loss = core.cross_entropy(logits, {"y": batch["labels"]})
    kl = distill.kl_divergence(batch["others"], logits)
    return distill.of_examples(loss + context["diversity"] * kl), stats, {}

  student = local.own_training(server, towards, make_batch=make_batch)
  shared_part = lambda x: {} if shared is None else {shared: x.params[shared]}

  def init(key, variables=None):
    hyper = core.hyper(diversity=diversity)
    state = init_pools(pools, key, variables, hyper, server)
    for one, learner in reversed(list(zip(everyone, state.server))):
      if shared is not None and shared not in learner.params:
        raise ValueError(
          f"shared={shared!r}: the model of {one.label} has no parameters of"
          f" that name, only {sorted(learner.params)}"
        )
      owner = f"shared={shared!r}, of {one.label} beside {server.label}"
      checks.alike(owner, shared_part(learner), shared_part(state.server[-1]))
    return state

  def step(state, plan, data):
    *of_pools, learner = state.server
    state = state.replace(server=tuple(of_pools))
    averaged = average(state, plan, data, total=False)
    of_pools, when = averaged.state.server, averaged.anyone
    parts = list(map(shared_part, of_pools))
    fine = jnp.stack([core.all_finite(own) for own in parts])  # Not diverged.
    parts = [
      optax.tree.where(x, own, optax.tree.zeros_like(own))
      for x, own in zip(fine, parts)
    ]
    sizes = jnp.stack([jnp.sum(n) for n in averaged.weights])
    sizes = jnp.where(fine, sizes, 0)
    heard = jnp.where(jnp.any(sizes > 0), when, 0)
    learner = _with(learner, weighted_mean(stack(*parts), sizes), heard)
    labels, others = consensus(averaged.said)
    context = local.values_of(state, len(pools), "diversity")
    context["learning_rate"] *= averaged.decay
    context |= dict(batch_key=averaged.key, labels=labels, others=others)
    row = row_of(plan, "distill", len(pools), stats=learner.stats)
    bank = checks.bank(data, "distill")
    key = jax.random.fold_in(averaged.key, np.uint32(2**31))  # No batch's.
    work = local.work(student, context, key, bank, learner, row, when=when)
    ((learner, loss),) = engine.run(work)
    of_pools = [_with(old, shared_part(learner), heard) for old in of_pools]
    state = state.replace(server=(*of_pools, learner))
    metrics = local.metrics_of(pools, client_loss=averaged.losses)
    return state, metrics | local.metrics_of([server], distill_loss=[loss])

  return core.Algorithm(init, step)


@jax.jit
def consensus(said: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
  """What models agree on, and what those that disagree say.

  `y = argmax_c z_c` of `z = sum_k v_k z_k / sum_k v_k`, where `v_k = Var_c
  z_kc`: models that are sure count more. `q = softmax(z')`, where z' is the
  same mean over the models whose own argmax is not y.

  Args:
    said: P arrays of logits, `float[K, ..., C]`. Zeros do not count.

  Returns:
    y, `int32[...]`; and q, `float[..., C]`, zeros where all agree.

  >>> y, q = consensus([jnp.array([[2., 0.]]), jnp.array([[0., 4.]])])
  >>> int(y), [round(float(p), 2) for p in q]
  (1, [0.88, 0.12])
  """
  distill.same_classes(*(z[0] for z in said))
  z = core.wide(jnp.concatenate(said))
  # Of the classes that are not left out, whose logits are minus infinity.
  sure = jnp.var(z, axis=-1, where=z > -jnp.inf)

  def mean(weights):
    total = jnp.sum(weights, axis=0)
    weights /= jnp.where(total > 0, total, 1)[None]
    weights = weights[..., None]
    terms = jnp.where(weights == 0, 0, weights * z)  # 0 times infinity is NaN.
    return jnp.sum(terms, axis=0), total[..., None] > 0

  y = jnp.argmax(mean(sure)[0], axis=-1).astype(jnp.int32)
  differs = jnp.argmax(z, axis=-1) != y[None]
  others, there_are = mean(jnp.where(differs, sure, 0))
  return y, jnp.where(there_are, distill.tempered_softmax(others, 1.0), 0)


def _with(learner, part, when):
  """A learner with other shared layers, copied since states are donated."""
  if not part:
    return learner
  old = {name: learner.params[name] for name in part}
  new = optax.tree.where(when > 0, core.as_types(part, old), old)
  variables = learner.variables._replace(params={**learner.params, **new})
  return learner._replace(variables=variables)
