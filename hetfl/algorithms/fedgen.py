"""FedGen: the server trains a generator of features, from which clients learn.

Reference: Zhu et al. 2021, "Data-Free Knowledge Distillation for Heterogeneous
Federated Learning", algorithm 1.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core, local
from hetfl.algorithms.features import (
  begin_with,
  classes_of,
  first_part,
  of_logits,
  sharing,
)
from hetfl.algorithms.personal import mean_sent, Method, personal
from hetfl.clients import Client, weighted_mean
from hetfl.model import parted
from hetfl.models.fedgen import draw, Generator, spread


class Shared(NamedTuple):
  """What FedGen's server sends.

  Attributes:
    head: the mean head's variables.
    generator: the generator, and Adam's state.
    trained: `float32[]`, 0 before the server first trained it, then 1.
  """

  head: core.Variables
  generator: local.Learner
  trained: jax.Array


def fedgen(
  clients: Sequence[Client],
  *,
  head: core.Model,
  num_classes: int,
  num_features: int,
  weight: float | jax.Array | core.Schedule = 1.0,
  diversity: float | jax.Array | core.Schedule = 1.0,
  server_learning_rate: float | jax.Array | core.Schedule = 1e-3,
  server_steps: int = 100,
  server_batch_size: int = 32,
  noise: int = 32,
  hidden: int = 128,
  **options: Any,
) -> core.Algorithm:
  """FedGen.

  A client begins with the server's head, trains body and head by `CE(x, y) +
  weight CE(head(G(e, y')), y')` and sends the head. The server takes their mean
  with the plan's weights, and trains its generator G by Adam on the loss of
  the clients' mean logits, `CE(sum_k p_k head_k(G(e, y')), y') + diversity
  spread(G(e, y'), e)`. Noise e is uniform in [0, 1), classes y' are drawn
  evenly. In the first round clients have no generator. A client sends a head, C
  (D + 1) numbers if it is one dense layer; it receives that and the generator.

  Args:
    clients: K clients, whose models' outputs are `Features`, see `headed`: the
      bodies may differ, and all have this head.
    head: the model from features `float[B, D]` to logits `float[B, C]`.
    num_classes: C.
    num_features: D.
    weight: of the generated features: a value, or a schedule of the round.
    diversity: of the generator's spread; likewise.
    server_learning_rate: Adam's; likewise.
    server_steps: the generator's steps in a round.
    server_batch_size: the features in a step.
    noise: E, the numbers in e.
    hidden: the width of the generator's hidden layer.
    **options: `learning_rate`, `optimizer` and `engine`; see `personal`.

  Returns:
    The algorithm; see `personal`. Its state's `server` is `Shared`, whose head
    is at first the first client's. Clients keep the heads that they trained,
    until they take part again. Its metric is `loss`, of both kinds of features.

  Raises:
    ValueError: as `personal`; heads have unlike shapes; labels are not classes.

  Reference: Zhu et al. 2021, algorithm 1; generator and spread are the released
  code's. Departures: only heads are shared, as models are unlike, where the
  code averages whole ones; the generator's layers are initialised as Flax's,
  and its running variance is without Bessel's correction; classes are drawn
  evenly, where the paper counts labels, and clients' logits are averaged alike
  for all classes, where the code sums their losses, weighted by class; the
  code's weight falls from 10 by 2 % a round, as does Adam's rate, with weight
  decay and 50 steps a round; clients generate as many features as their batch
  has examples, and take no softmax of generated features as a target for their
  own.

  The client's features are 1 for its only image; it does not learn.

  >>> from hetfl import ClientPopulation, plan_round
  >>> from hetfl.algorithms.features import headed
  >>> same = core.Model(lambda key: core.Variables({}, {}),
  ...                   lambda v, x, key, train: (x, v.stats))
  >>> linear = core.Model(
  ...     lambda key: core.Variables(jnp.array([[5., -5.]]), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> held = ClientPopulation.from_lists(bank, [[0]])
  >>> plan = plan_round({'train': held}, seed=0, round=1, batch_size=1)
  >>> algorithm = fedgen(
  ...     [Client(headed(same, linear))], head=linear, num_classes=2,
  ...     num_features=1, learning_rate=0., server_learning_rate=0.1)
  >>> state, _ = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan, {'train': bank})
  >>> state.server.head.params.tolist()
  [[5.0, -5.0]]

  The generator has learnt features of both classes for it.

  >>> x = jnp.concatenate([jnp.full((2, 32), 0.5), jnp.eye(2)], axis=1)
  >>> variables = state.server.generator.variables
  >>> features = Generator(128, 1).apply(
  ...     {'params': variables.params, **variables.stats}, x)
  >>> (features[:, 0] > 0).tolist()
  [True, False]
  """
  core.Model.check("head", head)
  checks.counts(
    num_classes=num_classes,
    num_features=num_features,
    hidden=hidden,
    server_steps=server_steps,
    server_batch_size=server_batch_size,
    noise=noise,
  )
  generator = core.Model.from_flax(
    Generator(hidden, num_features), jnp.zeros((1, noise + num_classes))
  )
  drawn_by = functools.partial(draw, noise=noise, num_classes=num_classes)

  def start(key, kept):
    variables = generator.start(key)
    learner = local.Learner.start(variables, optax.adam)
    return Shared(first_part(key, kept), learner, jnp.zeros(()))

  def objective(client):
    learn = of_logits(client)

    def losses(variables, batch, key, context):
      classes_of(batch, num_classes)
      own_key, key = jax.random.split(key)
      own, stats, measured = learn(variables, batch, own_key, context)
      server = context["server"]
      drawn = drawn_by(key, len(batch["mask"]))
      features = generator.predict(server.generator.variables, drawn["x"])
      logits = head.predict(parted(variables)["head"], features)
      if logits.shape[-1] != num_classes:
        its = logits.shape[-1]
        raise ValueError(f"num_classes={num_classes}: the head's are {its}")
      generated = jnp.mean(core.cross_entropy(logits, drawn))
      weight = context["weight"] * server.trained
      return own + weight * generated, stats, measured

    return losses

  def aggregate(context, sent, key):
    def losses(variables, batch, key, context):
      z, stats = generator.outputs(variables, batch["x"], key, True)
      of_clients = jax.vmap(head.predict, (0, None))(sent.value, z)
      logits = weighted_mean(core.wide(of_clients), sent.weight)
      apart = context["diversity"] * spread(z, batch["e"])
      return core.cross_entropy(logits, batch) + apart, stats, {}

    adam = lambda context: optax.adam(context["server_learning_rate"])
    step = local.step_on(losses, adam)

    def one(learner, key):
      batch = drawn_by(key, server_batch_size)
      new, _ = step(learner, batch, key, context)
      return core.as_types(new, learner), None

    keys = jax.random.split(key, server_steps)
    learner, _ = jax.lax.scan(one, context["server"].generator, keys)
    return Shared(mean_sent(context, sent, key), learner, jnp.ones(()))

  method = Method(
    objective=objective,
    hyper={
      "weight": (weight, np.inf),
      "diversity": (diversity, np.inf),
      "server_learning_rate": (server_learning_rate, np.inf),
    },
    server=start,
    begin=lambda context, kept: begin_with(kept, head=context["server"].head),
    end=sharing("head")["end"],
    aggregate=aggregate,
  )
  return personal(clients, method, **options)
