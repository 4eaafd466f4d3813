"""FedMRL: a small model that all share, and features that are nested.

Reference: Yi et al. 2024, "Federated Model Heterogeneous Matryoshka
Representation Learning", algorithm 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import core, local
from hetfl.algorithms.features import headed, sharing
from hetfl.algorithms.personal import Method, personal
from hetfl.clients import Client
from hetfl.model import joined, parted


class Nested(NamedTuple):
  """The outputs of a `matryoshka`.

  Attributes:
    logits: `float[B, C]`, the client's head's, of all D features.
    inner: `float[B, C]`, the shared head's, of the first d of them.
  """

  logits: jax.Array
  inner: jax.Array


def matryoshka(
  body: core.Model,
  head: core.Model,
  projection: core.Model,
  *,
  shared_body: core.Model,
  shared_head: core.Model,
) -> core.Model:
  """A client's model around a small one that all clients share.

  `R = P([G(x), F(x)])`, whose first d features the shared head classifies, and
  all D the client's.

  Args:
    body: F, from inputs to `float[B, D]`.
    head: from `float[B, D]` to logits `float[B, C]`.
    projection: P, from `float[B, d + D]` to `float[B, D]`, such as a dense
      layer.
    shared_body: G, from inputs to `float[B, d]`; d is at most D.
    shared_head: from `float[B, d]` to logits `float[B, C]`.

  Returns:
    The model, whose outputs are `Nested`; its parameters and statistics are
    dicts of `body`, `head`, `projection` and `shared`, the last a dict of
    `body` and `head`.

  F(x) = (2x, 2x), G(x) = x, and P gives their sum twice; heads multiply by 1,
  10.

  >>> times = lambda w: core.Model(
  ...     lambda key: core.Variables(jnp.array(w), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> model = matryoshka(
  ...     times([[2., 2.]]), times([[1.], [0.]]), times([[1., 1.]] * 3),
  ...     shared_body=times([[1.]]), shared_head=times([[10.]]))
  >>> outputs = model.predict(model.start(jax.random.key(0)), jnp.ones((1, 1)))
  >>> outputs.logits.item(), outputs.inner.item()
  (5.0, 50.0)
  """
  shared = headed(shared_body, shared_head)
  models = dict(body=body, head=head, projection=projection, shared=shared)

  def init(key):
    keys = dict(zip(models, jax.random.split(key, len(models))))
    return joined({name: m.start(keys[name]) for name, m in models.items()})

  def apply(variables, x, key, train):
    of = parted(variables)
    small = parted(of["shared"])
    keys = [None] * 5 if key is None else jax.random.split(key, 5)
    g, of_g = shared_body.outputs(small["body"], x, keys[0], train)
    f, of_f = body.outputs(of["body"], x, keys[1], train)
    both = jnp.concatenate([g, f], axis=-1)
    r, of_r = projection.outputs(of["projection"], both, keys[2], train)
    logits, of_logits = head.outputs(of["head"], r, keys[3], train)
    first = r[..., : g.shape[-1]]
    inner, of_inner = shared_head.outputs(small["head"], first, keys[4], train)
    stats = {
      "body": of_f,
      "head": of_logits,
      "projection": of_r,
      "shared": {"body": of_g, "head": of_inner},
    }
    return Nested(logits, inner), stats

  return core.Model(init, apply)


def fedmrl(
  clients: Sequence[Client],
  *,
  weight: float | jax.Array | core.Schedule = 1.0,
  **options: Any,
) -> core.Algorithm:
  """FedMRL.

  A client begins with the server's small model, trains it with its own by
  `CE(logits) + weight CE(inner)` and sends it; the server takes the mean with
  the plan's weights, which are numbers of examples if not uniform. A client
  sends and receives the small model.

  Args:
    clients: K clients, whose models `matryoshka` makes: all but what is shared
      may differ.
    weight: m of the shared head's loss, where the client's head's is 1: a
      value, which trials may vary, or a schedule `round -> weight`.
    **options: `learning_rate`, `optimizer` and `engine`; see `personal`.

  Returns:
    The algorithm; see `personal`. Its state's `server` holds the small model's
    variables, at first the first client's. Clients keep the small models that
    they trained, until they take part again; `features.with_parts(variables,
    shared=server)` gives them the server's. Its metric is `loss`, of both.

  Raises:
    ValueError: as `personal`; small models have unlike shapes.

  Reference: Yi et al. 2024, algorithm 1. Departures: all of a client's model is
  trained by one optimizer, whose state a client keeps.

  The only image is 1, and of class 0. F, G and P begin as 1 and sum up what
  they get, so the feature is 2 at first; heads begin at (0, 0): steps of
  1/2 - (1, 0), times 2, for both heads.

  >>> from hetfl import ClientPopulation, plan_round
  >>> times = lambda *shape: lambda w: core.Model(
  ...     lambda key: core.Variables(jnp.full(shape, w), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> one, head = times(1, 1)(1.), times(1, 2)(0.)
  >>> client = Client(matryoshka(
  ...     one, head, times(2, 1)(1.), shared_body=one, shared_head=head))
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> held = ClientPopulation.from_lists(bank, [[0]])
  >>> plan = plan_round({'train': held}, seed=0, round=1, batch_size=1)
  >>> algorithm = fedmrl([client], learning_rate=1.)
  >>> state, _ = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan, {'train': bank})
  >>> state.server.params['head'].tolist()
  [[1.0, -1.0]]
  """

  def objective(client):
    def both(outputs, batch):
      inner = client.loss(outputs.inner, batch)
      return client.loss(outputs.logits, batch), inner

    def losses(variables, batch, key, context):
      outputs, stats = client.outputs(variables, batch, key)
      own, inner = local.losses_of(both, outputs, batch)
      return own + context["weight"] * inner, stats, {}

    return losses

  method = Method(
    objective=objective, hyper={"weight": (weight, np.inf)}, **sharing("shared")
  )
  return personal(clients, method, **options)
