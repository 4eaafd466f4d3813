"""FedTGP: the server trains the prototypes, to lie apart by a margin.

Reference: Zhang et al. 2024, "FedTGP: Trainable Global Prototypes with
Adaptive-Margin-Enhanced Contrastive Learning ...", algorithm 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core
from hetfl.algorithms.features import class_sums, no_sums, train_server
from hetfl.algorithms.fedgh import sent_prototypes
from hetfl.algorithms.fedproto import prototypes_of, pulled
from hetfl.algorithms.personal import Method, personal
from hetfl.clients import Client


class Trained(NamedTuple):
  """What FedTGP's server keeps.

  Attributes:
    prototypes: what clients get, a `Mean` of count 1; 0 in the first round.
    network: the variables that make them.
  """

  prototypes: core.Mean
  network: core.Variables


def fedtgp(
  clients: Sequence[Client],
  *,
  num_classes: int,
  num_features: int,
  weight: float | jax.Array | core.Schedule = 1.0,
  margin: float | jax.Array | core.Schedule = 100.0,
  server_learning_rate: float | jax.Array | core.Schedule = 0.01,
  server_epochs: int = 100,
  server_batch_size: int = 10,
  **options: Any,
) -> core.Algorithm:
  """FedTGP.

  Clients do as in FedProto, `CE + weight mean_d (h_d(x) - T_d[y])^2`, and send
  the mean features of each of their classes, `C_k[j]`. The prototypes T are a
  small network's outputs for a learnt vector of each class; the server trains
  it further, by SGD on the mean of `margin_loss` over pairs (k, j), in batches.
  The loss's margin is the largest distance from a class to the nearest other,
  between the means of `C_k[j]` over clients, but at most `margin`. In the first
  round clients have no prototypes. A client sends C D numbers, if it has all
  classes, and receives C D.

  Args:
    clients: K clients, whose models' outputs are `Features`; see `headed`.
    num_classes: C.
    num_features: D, the same for all clients.
    weight: lambda, of the distance to the prototypes: a value, or a schedule.
    margin: tau, the greatest margin; likewise.
    server_learning_rate: of the network's training; likewise.
    server_epochs: S, the server's passes over the mean features of a round.
    server_batch_size: how many of them a step takes.
    **options: `learning_rate`, `optimizer` and `engine`; see `personal`.

  Returns:
    The algorithm; see `personal`. Its state's `server` is `Trained`, whose
    `prototypes` are for `nearest`. Its metrics are `loss`, with the distance,
    and `distance`, the mean over examples.

  Raises:
    ValueError: as `personal`; labels are not classes.

  Reference: Zhang et al. 2024, algorithm 1; the margin and the network are the
  released code's: the vectors, normal at first, and two dense layers with a
  ReLU between, all of D numbers. The paper's margin is the largest distance of
  all, which runs away sooner. Departures: layers are initialised as Flax's; the
  features are the trained model's, in the code those from before the round.

  The client's features are (1, 0) for its only image, of class 0: the server
  moves its prototype of that class there.

  >>> from hetfl import ClientPopulation, plan_round
  >>> from hetfl.algorithms.features import headed
  >>> same = core.Model(lambda key: core.Variables({}, {}),
  ...                   lambda v, x, key, train: (x, v.stats))
  >>> bank = {'x': jnp.array([[1., 0.]]), 'y': jnp.zeros(1, int)}
  >>> held = ClientPopulation.from_lists(bank, [[0]])
  >>> plan = plan_round({'train': held}, seed=0, round=1, batch_size=1)
  >>> algorithm = fedtgp(
  ...     [Client(headed(same, same))], num_classes=2, num_features=2)
  >>> state, _ = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan, {'train': bank})
  >>> state.server.prototypes.total[0].round(1).tolist()
  [1.0, 0.0]
  """
  checks.counts(
    num_classes=num_classes,
    num_features=num_features,
    server_epochs=server_epochs,
    server_batch_size=server_batch_size,
  )
  dense = lambda: nn.Dense(num_features)
  normal = nn.initializers.normal(1.0)
  vectors = nn.Embed(num_classes, num_features, embedding_init=normal)
  classes = np.arange(num_classes, dtype=np.int32)
  network = core.Model.from_flax(
    nn.Sequential((vectors, dense(), nn.relu, dense())), classes
  )
  nothing = lambda: no_sums(num_classes, num_features)

  def contrast(variables, batch, key, context):
    prototypes, stats = network.outputs(variables, classes, key, True)
    losses = margin_loss(batch["x"], batch["y"], prototypes, context["margin"])
    return losses, stats, {}

  passes = dict(epochs=server_epochs, batch_size=server_batch_size)

  def aggregate(context, sent, key):
    gap = largest_gap(*prototypes_of(sent.value))
    seen = context | {"margin": jnp.minimum(gap, context["margin"])}
    last, examples = context["server"].network, sent_prototypes(sent.value)
    trained = train_server(contrast, last, examples, key, seen, **passes)
    prototypes = network.predict(trained, classes)
    return Trained(core.Mean(prototypes, jnp.ones(num_classes)), trained)

  method = Method(
    objective=lambda client: pulled(client, lambda server: server.prototypes),
    hyper={
      "weight": (weight, np.inf),
      "margin": (margin, np.inf),
      "server_learning_rate": (server_learning_rate, np.inf),
    },
    server=lambda key, kept: Trained(nothing(), network.start(key)),
    survey=lambda outs, b: class_sums(outs.features, b, num_classes),
    aggregate=aggregate,
    measured=("loss", "distance"),
  )
  return personal(clients, method, **options)


def largest_gap(means: jax.Array, known: jax.Array) -> jax.Array:
  """The largest distance from a class to the nearest other, `float[]`.

  Between the classes' means over clients; 0 if there are not two classes.

  Args:
    means: `float[K, C, D]`, each client's of its classes.
    known: `float[K, C]`, 1 for classes that a client has, else 0.

  Two clients have class 0, at 0 and 2; one has class 1, at 5, and 2, at 8.

  >>> means = jnp.array([[[0.], [5.], [8.]], [[2.], [9.], [0.]]])
  >>> float(largest_gap(means, jnp.array([[1., 1., 1.], [1., 0., 0.]])))
  4.0
  """
  sums = jnp.sum(means * known[..., None], axis=0)
  centres, known = prototypes_of(core.Mean(sums, jnp.sum(known, axis=0)))

  def to_nearest(j):  # One class at a time, since C^2 D may be large.
    gaps = jnp.linalg.norm(centres - centres[j][None], axis=-1)
    others = (known > 0) & (classes != j)
    return jnp.min(jnp.where(others, gaps, jnp.inf))

  classes = jnp.arange(len(known))
  gaps = jax.lax.map(to_nearest, classes)
  return jnp.max(jnp.where((known > 0) & (gaps < jnp.inf), gaps, 0))


def margin_loss(
  features: jax.Array, labels: jax.Array, prototypes: jax.Array, margin: Any
) -> jax.Array:
  """`CE(-d_j - margin [j = y], y)`, `d_j = ||h - T[j]||`: `float[B]`.

  Args:
    features: h, `float[B, D]`.
    labels: y, `int[B]`.
    prototypes: T, `float[C, D]`.
    margin: by how much farther away its own prototype counts.

  At distance 0 of its own prototype and 1 of the other, a margin of 1 leaves
  equal chances.

  >>> prototypes = jnp.array([[2.], [3.]])
  >>> margin_loss(jnp.array([[2.]]), jnp.array([0]), prototypes, 1.)
  Array([0.6931472], dtype=float32)
  """
  apart = features[:, None] - prototypes[None]
  distances = optax.safe_norm(apart, 1e-12, axis=-1)
  own = jax.nn.one_hot(labels, len(prototypes), dtype=distances.dtype)
  return core.cross_entropy(-distances - margin * own, {"y": labels})
