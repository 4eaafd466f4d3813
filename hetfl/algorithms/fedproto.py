"""FedProto: clients share the mean features of each class.

Reference: Tan et al. 2022, "FedProto: Federated Prototype Learning across
Heterogeneous Clients", algorithm 1.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hetfl import core, local
from hetfl.algorithms.features import class_sums, classes_of, Features, no_sums
from hetfl.algorithms.personal import Method, personal
from hetfl.clients import Client


def fedproto(
  clients: Sequence[Client],
  *,
  num_classes: int,
  num_features: int,
  weight: float | jax.Array | core.Schedule = 1.0,
  **options: Any,
) -> core.Algorithm:
  """FedProto.

  A client learns from its labels and pulls its features towards its classes'
  prototypes, `CE + weight mean_d (h_d(x) - C_d[y])^2`. It then sends the mean
  features of each of its classes; the server takes their mean over the clients
  that have the class, `C[j] = sum_k n_kj C_k[j] / sum_k n_kj`.

  Args:
    clients: K clients, whose models' outputs are `Features`; see `headed`.
    num_classes: C.
    num_features: D, the same for all clients.
    weight: lambda, of the distance to the prototypes: a value, which trials may
      vary, or a schedule `round -> weight`.
    **options: `learning_rate`, `optimizer` and `engine`; see `personal`.

  Returns:
    The algorithm; see `personal`. Its state's `server` holds the prototypes as
    a `Mean`: sums `float32[C, D]` and counts `float32[C]`; classes without a
    prototype, count 0, have no distance. Its metrics are `loss`, with the
    distance, and `distance`, the mean over examples.

  Raises:
    ValueError: as `personal`; labels are not classes.

  Reference: Tan et al. 2022, algorithm 1. Departures: the mean of squares over
  features is that of the released code. The code gathers prototypes while a
  client trains, in the last epoch; here they are the trained model's, on the
  round's batches. The average is over examples, where the code weighs clients
  equally; a class that nobody holds in a round keeps its prototype, where the
  code drops it; a client's optimizer persists, the code's is new in each round.

  The client's features are 1 for its only image, of class 0, which has no
  prototype yet: it sends 1 (its logits do not depend on its features).

  >>> from hetfl import ClientPopulation, plan_round
  >>> from hetfl.algorithms.features import headed
  >>> same = core.Model(lambda key: core.Variables(jnp.ones(()), {}),
  ...                   lambda v, x, key, train: (x * v.params, v.stats))
  >>> zero = core.Model(lambda key: core.Variables(jnp.zeros((1, 2)), {}),
  ...                   lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> held = ClientPopulation.from_lists(bank, [[0]])
  >>> plan = plan_round({'train': held}, seed=0, round=1, batch_size=1)
  >>> algorithm = fedproto([Client(headed(same, zero))], num_classes=2,
  ...                      num_features=1)
  >>> state, metrics = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan, {'train': bank})
  >>> state.server.total.tolist(), state.server.count.tolist()
  ([[1.0], [0.0]], [1.0, 0.0])
  """

  def aggregate(context, sent, key):
    del key
    of_round = jax.tree.map(lambda a: jnp.sum(a, axis=0), sent.value)
    # Classes of which nobody has an example keep their prototypes.
    keep = of_round.count == 0
    last = context["server"]
    return core.Mean(
      jnp.where(keep[:, None], last.total, of_round.total),
      jnp.where(keep, last.count, of_round.count),
    )

  method = Method(
    objective=pulled,
    hyper={"weight": (weight, jnp.inf)},
    server=lambda key, kept: no_sums(num_classes, num_features),
    survey=lambda outs, b: class_sums(outs.features, b, num_classes),
    aggregate=aggregate,
    measured=("loss", "distance"),
  )
  return personal(clients, method, **options)


def pulled(
  client: Client, prototypes: Callable[[Any], core.Mean] = lambda server: server
) -> local.Objective:
  """A client's objective, with the distance to the server's prototypes."""

  def losses(variables, batch, key, context):
    outputs, stats = client.outputs(variables, batch, key)
    means, known = prototypes_of(prototypes(context["server"]))
    found = getattr(outputs, "features", None)
    if found is None or found.shape[-1] != means.shape[-1]:
      what = "none" if found is None else found.shape[-1]
      raise ValueError(
        f"num_features={means.shape[-1]}: {client.label} has {what}; make its"
        " model by features.headed(body, head)"
      )
    labels, _ = classes_of(batch, len(known))
    distance = known[labels] * jnp.mean(
      jnp.square(outputs.features - means[labels]), axis=-1
    )
    loss = local.losses_of(client.loss, outputs.logits, batch)
    return loss + context["weight"] * distance, stats, {"distance": distance}

  return losses


def prototypes_of(server: core.Mean) -> tuple[jax.Array, jax.Array]:
  """The means `float32[..., C, D]`, and 1 for classes that have one, else 0."""
  known = server.count != 0  # NaN shows labels that are not classes.
  means = server.total / jnp.where(known, server.count, 1)[..., None]
  return means, known.astype(means.dtype)


def nearest(outputs: Features, server: core.Mean) -> jax.Array:
  """Scores by the distance to the prototypes, `-mean_d (h_d(x) - C_d[j])^2`.

  Args:
    outputs: a client's model's.
    server: the prototypes.

  Returns:
    `float32[B, C]`, minus infinity for classes without a prototype; 0 for all
    if there is none yet.

  Reference: Tan et al. 2022, on inference.

  >>> server = core.Mean(jnp.array([[0.], [6.]]), jnp.array([1., 2.]))
  >>> nearest(Features(jnp.array([[2.]]), None), server).tolist()
  [[-4.0, -1.0]]
  """
  prototypes, known = prototypes_of(server)
  differences = outputs.features[:, None] - prototypes[None]
  scores = -jnp.mean(jnp.square(differences), axis=-1)
  scores = jnp.where(known[None] > 0, scores, -jnp.inf)
  return jnp.where(jnp.any(known > 0), scores, 0)
