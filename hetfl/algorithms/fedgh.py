"""FedGH: the server trains one head on the clients' mean features.

Reference: Yi et al. 2023, "FedGH: Heterogeneous Federated Learning with
Generalized Global Header", algorithm 1.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import checks, core, local
from hetfl.algorithms.features import (
  begin_with,
  class_sums,
  first_part,
  of_logits,
  train_server,
)
from hetfl.algorithms.fedproto import prototypes_of
from hetfl.algorithms.personal import Method, personal
from hetfl.clients import Client


def fedgh(
  clients: Sequence[Client],
  *,
  head: core.Model,
  server_learning_rate: float | jax.Array | core.Schedule = 0.01,
  server_epochs: int = 1,
  server_batch_size: int = 10,
  **options: Any,
) -> core.Algorithm:
  """FedGH.

  A client begins with the server's head, trains body and head on its labels and
  sends the mean features of each of its classes, `C_k[j]`. The server trains
  its head further on them, by SGD on `mean_kj CE(head(C_k[j]), j)`, in batches
  of the pairs (k, j), however many examples each is the mean of. A client sends
  C D numbers, if it has all classes; it receives a head, C (D + 1) numbers if
  that is one dense layer.

  Args:
    clients: K clients, whose models' outputs are `Features`, see `headed`: the
      bodies may differ, and all have this head.
    head: the model from features `float[B, D]` to logits `float[B, C]`.
    server_learning_rate: of the head's training: a value, which trials may
      vary, or a schedule `round -> rate`.
    server_epochs: the server's passes over the mean features of a round.
    server_batch_size: how many of them a step takes.
    **options: `learning_rate`, `optimizer` and `engine`; see `personal`.

  Returns:
    The algorithm; see `personal`. Its state's `server` holds the head's
    variables, at first the first client's. Clients keep the heads that they
    trained, until they take part again; `with_parts` gives them the server's.
    Its metric is `loss`.

  Raises:
    ValueError: as `personal`; heads have unlike shapes; labels are not classes.

  Reference: Yi et al. 2023, algorithm 1. The authors' code steps on one pair
  at a time; batches of 10 are HtFLlib's. What the paper leaves open: the server
  shuffles all pairs in each of its epochs; mean features come from a pass of
  the trained model over the round's batches, in inference mode, as in FedProto.

  The client's features are 1 for its only image, of class 0; it does not learn.
  The server's step of 1 takes its head from (0, 0) by (1, 0) - (1/2, 1/2).

  >>> from hetfl import ClientPopulation, plan_round
  >>> from hetfl.algorithms.features import headed
  >>> same = core.Model(lambda key: core.Variables({}, {}),
  ...                   lambda v, x, key, train: (x, v.stats))
  >>> zero = core.Model(lambda key: core.Variables(jnp.zeros((1, 2)), {}),
  ...                   lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> held = ClientPopulation.from_lists(bank, [[0]])
  >>> plan = plan_round({'train': held}, seed=0, round=1, batch_size=1)
  >>> algorithm = fedgh([Client(headed(same, zero))], head=zero,
  ...                   learning_rate=0., server_learning_rate=1.)
  >>> state, _ = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan, {'train': bank})
  >>> state.server.params.tolist()
  [[0.5, -0.5]]
  """
  core.Model.check("head", head)
  checks.counts(
    server_epochs=server_epochs, server_batch_size=server_batch_size
  )
  of_head = local.supervised(
    local.Participant(head, "the server's head", learning_rate=None)
  )

  def survey(outputs, batch):
    return class_sums(outputs.features, batch, outputs.logits.shape[-1])

  passes = dict(epochs=server_epochs, batch_size=server_batch_size)

  def aggregate(context, sent, key):
    last, examples = context["server"], sent_prototypes(sent.value)
    return train_server(of_head, last, examples, key, context, **passes)

  method = Method(
    objective=of_logits,
    hyper={"server_learning_rate": (server_learning_rate, np.inf)},
    server=first_part,
    begin=lambda context, kept: begin_with(kept, head=context["server"]),
    survey=survey,
    aggregate=aggregate,
  )
  return personal(clients, method, **options)


def sent_prototypes(sent: core.Mean) -> core.Batch:
  """What K clients sent, as a batch of K C examples: `mask` 0 where none is.

  >>> sent = core.Mean(jnp.array([[[6.], [0.]]]), jnp.array([[2., 0.]]))
  >>> for name, x in sent_prototypes(sent).items():
  ...   print(name, x.tolist())
  x [[3.0], [0.0]]
  y [0, 1]
  mask [1.0, 0.0]
  """
  means, known = prototypes_of(sent)
  number, classes, size = means.shape
  labels = jnp.tile(jnp.arange(classes, dtype=jnp.int32), number)
  return {"x": means.reshape(-1, size), "y": labels, "mask": known.ravel()}
