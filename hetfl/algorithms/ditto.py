"""Ditto: federated averaging, and personal models that stay near its model.

Reference: Li et al. 2021, "Ditto: Fair and Robust Federated Learning Through
Personalization", algorithm 1.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import core, local
from hetfl.algorithms.fedavg import proximal_term
from hetfl.algorithms.personal import mean_sent, Method, one_model, personal
from hetfl.clients import Client
from hetfl.model import parted


def ditto(
  clients: Sequence[Client],
  *,
  weight: float | jax.Array | core.Schedule = 1.0,
  **options: Any,
) -> core.Algorithm:
  """Ditto.

  On the same batches a client trains a copy of the server's model w, which it
  sends, and its own model v_k, which stays near w:

  `w_k <- w_k - lr g(w_k)`
  `v_k <- v_k - lr (g(v_k) + weight (v_k - w))`

  The server takes FedAvg's `w <- sum_k n_k w_k / sum_k n_k`. A client sends and
  receives W numbers, for W parameters.

  Args:
    clients: K clients, all with one model. A client's learning rate, optimizer
      and penalty are its own model's.
    weight: lambda, of the proximal term: a value, which trials may vary, or a
      schedule `round -> weight`. With 0 clients learn alone.
    **options: `learning_rate`, `optimizer` and `engine`; see `personal`.

  Returns:
    The algorithm; see `personal`. Its state's `server` holds w, the model's
    `Variables`; all v_k begin as w. The optimizer of w_k is new in each round,
    that of v_k is kept. Its metrics are means over examples: `own_loss`, of the
    labels by v_k, and `shared_loss`, by w_k.

  Raises:
    ValueError: as `personal`; clients have several models.

  Reference: Li et al. 2021, algorithm 1, with as many steps of v_k as of w_k.
  The mean is weighted as the plan is; the released code's weights are equal.

  Two clients have the same image, the first as class 0, the second as class 1:
  w stays 0. The label moves the first client's own model to (1/2, -1/2); in the
  second round by another 0.269, and w pulls it back by 0.5.

  >>> from hetfl import ClientPopulation, plan_round
  >>> linear = core.Model(
  ...     lambda key: core.Variables(jnp.zeros((1, 2)), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((2, 1)), 'y': jnp.arange(2)}
  >>> held = ClientPopulation.from_lists(bank, [[0], [1]])
  >>> algorithm = ditto([Client(linear)] * 2, learning_rate=1.)
  >>> state = algorithm.init(jax.random.key(0))
  >>> for round in (1, 2):
  ...   plan = plan_round({'train': held}, seed=0, round=round, batch_size=1)
  ...   state, _ = algorithm.step(state, plan, {'train': bank})
  ...   print(float(state.server.params[0, 0]),
  ...         float(state.clients[0].learner.params[0, 0, 0]))
  0.0 0.5
  0.0 0.268...
  """

  def objective(client):
    def losses(variables, batch, key, context):
      # 2**31 differs from everything that a model folds in.
      keys = {"own": key, "shared": jax.random.fold_in(key, np.uint32(2**31))}
      losses, stats = {}, {}
      for name, part in parted(variables).items():
        outputs, stats[name] = client.outputs(part, batch, keys[name])
        losses[name] = local.losses_of(client.loss, outputs, batch)
      near = proximal_term(
        variables.params["own"], context["server"].params, mu=context["weight"]
      )
      measured = {f"{name}_loss": loss for name, loss in losses.items()}
      return losses["own"] + losses["shared"] + near, stats, measured

    return losses

  method = Method(
    objective=objective,
    hyper={"weight": (weight, jnp.inf)},
    server=lambda key, kept: one_model(clients).start(key),
    shared=lambda context: context["server"],
    alike=True,  # All v_k begin as w.
    aggregate=mean_sent,
    measured=("own_loss", "shared_loss"),
  )
  algorithm = personal(clients, method, **options)
  one_model(clients)
  return algorithm
