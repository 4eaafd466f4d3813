"""FedGKT: a large server model and the clients' small ones teach each other.

Reference: He et al. 2020, "Group Knowledge Transfer: Federated Learning of
Large CNNs at the Edge", algorithm 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import checks, core, distill, local
from hetfl.algorithms.features import classes_of, train_server
from hetfl.algorithms.fedproto import prototypes_of
from hetfl.algorithms.personal import Method, personal
from hetfl.clients import Client


class Taught(NamedTuple):
  """What FedGKT's server keeps.

  Attributes:
    model: the large model's variables.
    logits: `float32[N, C]`, its logits for each example of the clients' bank.
    known: `float32[N]`, 1 for examples that it has had features of, else 0.
  """

  model: core.Variables
  logits: jax.Array
  known: jax.Array


def fedgkt(
  clients: Sequence[Client],
  *,
  server: core.Model,
  num_classes: int,
  num_examples: int,
  weight: float | jax.Array | core.Schedule = 1.0,
  temperature: float | jax.Array | core.Schedule = 3.0,
  server_learning_rate: float | jax.Array | core.Schedule = 0.01,
  server_epochs: int = 1,
  server_batch_size: int = 32,
  **options: Any,
) -> core.Algorithm:
  """FedGKT.

  A client trains its model, an extractor of features and a small classifier, by
  `CE(z_k) + weight T^2 KL(softmax(z_s / T) || softmax(z_k / T))`, where z_s are
  the logits that the server last sent for the example. Then it sends features,
  logits and label of each of its examples. The server trains its large model on
  the features, by SGD on `CE(z_s) + weight T^2 KL(softmax(z_k / T) ||
  softmax(z_s / T))`, and sends back its logits. For an example a client sends D
  + C numbers and the label, and receives C numbers. To classify, a client's
  features go through the server's model.

  Args:
    clients: K clients, whose models' outputs are `Features`, see `headed`: the
      bodies may differ, but for their features' shape. Their examples are in
      one bank.
    server: the large model from features `float[B, ...]` to logits `float[B,
      C]`.
    num_classes: C.
    num_examples: N, the number of examples in the clients' bank, or more. The
      bank is the same in each round, and so not from `hetfl.localize`.
    weight: of the divergences: a value, which trials may vary, or a schedule
      `round -> weight`.
    temperature: T; likewise.
    server_learning_rate: of the server's training; likewise.
    server_epochs: the server's passes over the features of a round.
    server_batch_size: how many of them a step takes.
    **options: `learning_rate`, `optimizer` and `engine`; see `personal`.

  Returns:
    The algorithm; see `personal`. Its state's `server` is `Taught`. Its metrics
    are `loss` and `kl`, the clients' divergence before its weight.

  Raises:
    ValueError: as `personal`; clients have several banks, features of unlike
      shapes or other classes; the bank has more examples; labels are not
      classes.

  Reference: He et al. 2020, algorithm 1; the factor T^2, T and the weight are
  the released code's, whose server has the weight on its labels and, in the
  published commands, learns from labels alone, for 20 epochs of Adam.
  Departures: the server trains by SGD without momentum and weight decay, in
  batches of all clients' examples, in a new order each epoch, and computes its
  logits after training, in inference mode. Features are of the
  images as the round's batches have them, augmented or not; if an example is in
  several (plan with one epoch for the paper's), the mean logits are sent back.
  Examples whose client took no part yet have no divergence.

  The client's features are 1 for its only image, of class 0; it does not learn.
  The server's step of 1 takes its model from (0, 0) by (1, 0) - (1/2, 1/2).

  >>> from hetfl import ClientPopulation, plan_round
  >>> from hetfl.algorithms.features import headed
  >>> same = core.Model(lambda key: core.Variables({}, {}),
  ...                   lambda v, x, key, train: (x, v.stats))
  >>> zero = core.Model(lambda key: core.Variables(jnp.zeros((1, 2)), {}),
  ...                   lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> held = ClientPopulation.from_lists(bank, [[0]])
  >>> plan = plan_round({'train': held}, seed=0, round=1, batch_size=1)
  >>> algorithm = fedgkt(
  ...     [Client(headed(same, zero))], server=zero, num_classes=2,
  ...     num_examples=1, learning_rate=0., server_learning_rate=1.)
  >>> state, metrics = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan, {'train': bank})
  >>> state.server.logits.tolist(), state.server.known.tolist()
  ([[0.5, -0.5]], [1.0])
  """
  core.Model.check("server", server)
  checks.counts(
    num_classes=num_classes,
    num_examples=num_examples,
    server_epochs=server_epochs,
    server_batch_size=server_batch_size,
  )
  core.check_schedule("temperature", temperature, 1, low=1e-6, high=np.inf)

  def start(key, kept):
    del kept
    logits = jnp.zeros((num_examples, num_classes), jnp.float32)
    return Taught(server.start(key), logits, jnp.zeros_like(logits[:, 0]))

  def objective(client):
    def losses(variables, batch, key, context):
      classes_of(batch, num_classes)
      outputs, stats = client.outputs(variables, batch, key)
      if not hasattr(outputs, "features"):
        raise ValueError(
          f"{client.label}: its outputs have no features; make its model by"
          " features.headed(body, head)"
        )
      kl = batch["server_knows"] * distill.pair_divergence(
        outputs.logits, batch["server_logits"], context["temperature"]
      )
      loss = local.losses_of(client.loss, outputs.logits, batch)
      return loss + context["weight"] * kl, stats, {"kl": kl}

    return losses

  def answers(outputs, batch):
    outputs = jax.tree.map(core.wide, outputs)
    found = {"x": outputs.features, "said": outputs.logits}
    return found | {name: batch[name] for name in ("y", "mask")}

  def of_server(variables, batch, key, context):
    logits, stats = server.outputs(variables, batch["x"], key, True)
    kl = distill.pair_divergence(logits, batch["said"], context["temperature"])
    loss = core.cross_entropy(logits, batch) + context["weight"] * kl
    return loss, stats, {}

  passes = dict(epochs=server_epochs, batch_size=server_batch_size)

  def aggregate(context, sent, key):
    last, flat = context["server"], lambda a: a.reshape(-1, *a.shape[3:])
    examples, index = jax.tree.map(flat, (sent.value, sent.index))
    model = train_server(
      of_server, last.model, examples, key, context, **passes
    )
    logits = jax.lax.map(
      lambda x: server.predict(model, x[None])[0],
      examples["x"],
      batch_size=server_batch_size,
    )
    # Empty places are beyond the table, and dropped.
    at = jnp.where(examples["mask"] > 0, index, num_examples)
    total = jnp.zeros_like(last.logits)
    total = total.at[at].add(logits.astype(total.dtype), mode="drop")
    count = jnp.zeros_like(last.known).at[at].add(1, mode="drop")
    mean, new = prototypes_of(core.Mean(total, count))  # Each example's.
    logits = jnp.where(new[:, None] > 0, mean, last.logits)
    return Taught(model, logits, jnp.maximum(new, last.known))

  method = Method(
    objective=objective,
    hyper={
      "weight": (weight, np.inf),
      "temperature": (temperature, np.inf),
      "server_learning_rate": (server_learning_rate, np.inf),
    },
    server=start,
    answers=answers,
    shown={
      "server_logits": lambda taught: taught.logits,
      "server_knows": lambda taught: taught.known,
    },
    aggregate=aggregate,
    measured=("loss", "kl"),
  )
  return personal(clients, method, **options)
