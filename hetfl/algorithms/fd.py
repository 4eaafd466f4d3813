"""Federated distillation: clients share their mean predictions of each class.

Reference: Jeong et al. 2018, "Communication-Efficient On-Device Machine
Learning: Federated Distillation and Augmentation under Non-IID Private Data",
algorithm 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetfl import core, distill, local
from hetfl.algorithms.features import class_sums, classes_of, no_sums
from hetfl.algorithms.personal import Method, personal
from hetfl.clients import Client


class ClassMeans(NamedTuple):
  """Mean predictions of classes, of all clients of a round or of one.

  Attributes:
    means: the clients' means, added up, `float32[C, C]`, and how many clients
      have the class, `float32[C]`.
    turn: `int32[]`, the number of the round in which they were sent.
  """

  means: core.Mean
  turn: jax.Array


def fd(
  clients: Sequence[Client],
  *,
  num_classes: int,
  weight: float | jax.Array | core.Schedule = 1.0,
  **options: Any,
) -> core.Algorithm:
  """Federated distillation (FD).

  A client learns from its labels and from the other clients' predictions of
  the label's class, `CE + weight KL(F_k[y] || softmax(f(x)))`, with

  `F_k[j] = sum_(i != k) F_ij / |{i != k that have class j}|`

  While it trains, it adds up its predictions, `F_kj = mean of softmax(f(x))`
  over its examples of class j, and sends these means. It sends C (C + 1)
  numbers, receives as many, and subtracts its own.

  Args:
    clients: K clients, whose models' outputs are logits of C classes.
    num_classes: C.
    weight: gamma, of the others' predictions: a value, which trials may vary,
      or a schedule `round -> weight`.
    **options: `learning_rate`, `optimizer` and `engine`; see `personal`.

  Returns:
    The algorithm; see `personal`. Its state's `server` is what the clients of
    the last round sent, `ClassMeans`; each client keeps, as `extra`, what it
    sent last. Classes of which no other client had an example in the last round
    have no divergence. Its metrics are `loss`, with the divergence, and `kl`,
    the mean over examples.

  Raises:
    ValueError: as `personal`; labels are not classes, or there are not
      `num_classes` logits.

  Reference: Jeong et al. 2018, algorithm 1, whose "logits" are softmax outputs.
  Departures: the divergence in place of the cross-entropy to F_k has the same
  gradient and is 0 where they agree; the mean is over the clients that have the
  class and took part, not over all others.

  Two clients predict (1/2, 1/2) for their only images, of class 0. In the first
  round they have no targets. In the second each learns what the other sent.

  >>> from hetfl import ClientPopulation, plan_round
  >>> linear = core.Model(
  ...     lambda key: core.Variables(jnp.zeros((1, 2)), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> held = ClientPopulation.from_lists(bank, [[0], [0]])
  >>> algorithm = fd([Client(linear)] * 2, num_classes=2, learning_rate=1.)
  >>> state = algorithm.init(jax.random.key(0))
  >>> for round in (1, 2):
  ...   plan = plan_round(
  ...       {'train': held}, seed=0, round=round, batch_size=1)
  ...   state, metrics = algorithm.step(state, plan, {'train': bank})
  ...   print(state.server.means.total[0].round(3).tolist(),
  ...         metrics['kl'].value.round(3))
  [1.0, 1.0] 0.0
  [1.46..., 0.53...] 0.12...
  """
  # For a client in the first round, for its sums, and for the server.
  nothing = lambda: no_sums(num_classes, num_classes)
  never = lambda: ClassMeans(nothing(), jnp.zeros((), jnp.int32))

  def objective(client):
    def losses(variables, batch, key, context):
      stats, sums = variables.stats["model"], variables.stats["sums"]
      outputs, stats = client.outputs(
        variables._replace(stats=stats), batch, key
      )
      loss = local.losses_of(client.loss, outputs, batch)
      targets = targets_of(context["server"], context["own"].extra)
      labels, _ = classes_of(batch, num_classes)
      target = targets[labels]
      distill.same_classes(target, outputs)
      kl = distill.kl_divergence(target, outputs)
      predicted = distill.tempered_softmax(outputs, 1.0)
      sums += class_sums(predicted, batch, num_classes)
      stats = {"model": stats, "sums": sums}
      return loss + context["weight"] * kl, stats, {"kl": kl}

    return losses

  def begin(context, kept):
    del context
    variables, opt_state = kept.learner
    stats = {"model": variables.stats, "sums": nothing()}
    return local.Learner(variables._replace(stats=stats), opt_state)

  def end(context, kept, learner, batches):
    del batches
    variables, opt_state = learner
    stats, (total, count) = variables.stats["model"], variables.stats["sums"]
    has = (count > 0).astype(count.dtype)
    means = core.Mean(total / jnp.maximum(count, 1)[:, None], has)
    learner = local.Learner(variables._replace(stats=stats), opt_state)
    sent = ClassMeans(means, context["server"].turn + 1)
    return kept.replace(learner=learner, extra=sent), means

  def aggregate(context, sent, key):
    del key
    means = jax.tree.map(lambda a: jnp.sum(a, axis=0), sent.value)
    return ClassMeans(means, context["server"].turn + 1)

  method = Method(
    objective=objective,
    hyper={"weight": (weight, jnp.inf)},
    server=lambda key, kept: never(),
    begin=begin,
    end=end,
    extra=lambda variables, client: never(),
    aggregate=aggregate,
    measured=("loss", "kl"),
  )
  return personal(clients, method, **options)


def targets_of(server: ClassMeans, own: ClassMeans) -> jax.Array:
  """The mean predictions of the other clients.

  Args:
    server: the sums of the last round's clients.
    own: what a client sent last; it counts if that was in the last round.

  Returns:
    `float32[C, C]`, a distribution for each class; zeros for classes that no
    other client has.

  >>> both = core.Mean(jnp.array([[1., 1.], [0., 1.]]), jnp.array([2., 1.]))
  >>> one = core.Mean(jnp.array([[.75, .25], [0., 1.]]), jnp.array([1., 1.]))
  >>> targets_of(ClassMeans(both, 3), ClassMeans(one, 3)).tolist()
  [[0.25, 0.75], [0.0, 0.0]]
  >>> targets_of(ClassMeans(both, 3), ClassMeans(one, 2)).tolist()
  [[0.5, 0.5], [0.0, 1.0]]
  """
  counted = own.turn == server.turn
  without = lambda a, b: a - jnp.where(counted, b, 0)
  others = jax.tree.map(without, server.means, own.means)
  # Rounding leaves nothing below 0, which has no logarithm.
  total = jnp.maximum(others.total, 0)
  return total / jnp.maximum(others.count, 1)[:, None]
