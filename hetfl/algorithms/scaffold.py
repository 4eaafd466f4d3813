"""SCAFFOLD: averaging with control variates against client drift.

Reference: Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning", algorithm 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from hetfl import core, local
from hetfl.algorithms.personal import Method, one_model, personal
from hetfl.clients import Client, weighted_mean

PyTree = Any


class Controlled(NamedTuple):
  """What the server sends.

  Attributes:
    model: the server's model.
    control: c, shaped as its parameters, the mean of all clients' controls.
  """

  model: core.Variables
  control: PyTree


def scaffold(
  clients: Sequence[Client],
  *,
  server_lr: float | jax.Array | core.Schedule = 1.0,
  **options: Any,
) -> core.Algorithm:
  """SCAFFOLD, with controls by option II.

  A client starts from the server's model w and takes S steps of SGD, each
  corrected by the server's control c and its own, c_k:

  `w_k <- w_k - lr (g(w_k) - c_k + c)`
  `c_k+ = c_k - c + (w - w_k) / (S lr)`

  The server makes `w <- w + server_lr (mean_k w_k - w)` and `c <- c + sum_k
  (c_k+ - c_k) / K`. A client sends and receives 2 W numbers, for W parameters.

  Args:
    clients: K clients, all with one model, and without a learning rate or an
      optimizer of their own.
    server_lr: of the server: a value, which trials may vary, or a schedule
      `round -> rate`.
    **options: `learning_rate` and `engine`; see `personal`.

  Returns:
    The algorithm; see `personal`. Its state's `server` is `Controlled`. Each
    client keeps its control as `extra`, zero at first, and as its learner the
    model that it last sent. Its metric is `loss`, the labels' alone. All
    clients that take part count equally, whatever their weights in the plan.

  Raises:
    ValueError: as `personal`; there is an optimizer, or clients have several
      models, or learning rates or optimizers of their own.

  Reference: Karimireddy et al. 2020, algorithm 1, option II. Departure: batch
  statistics, which have no controls, are the clients' mean.

  For its only image, of class 0, the client's first gradient is (-1/2, 1/2):
  its control, and that of the server, whose only client it is.

  >>> from hetfl import ClientPopulation, plan_round
  >>> linear = core.Model(
  ...     lambda key: core.Variables(jnp.zeros((1, 2)), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> held = ClientPopulation.from_lists(bank, [[0]])
  >>> plan = plan_round({'train': held}, seed=0, round=1, batch_size=1)
  >>> algorithm = scaffold([Client(linear)], learning_rate=1., server_lr=2.)
  >>> state, metrics = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan, {'train': bank})
  >>> state.server.model.params.tolist(), state.server.control.tolist()
  ([[1.0, -1.0]], [[-0.5, 0.5]])
  """

  def objective(client):
    supervised = local.supervised(client)

    def losses(variables, batch, key, context):
      loss, stats, measured = supervised(variables, batch, key, context)
      control, own = context["server"].control, context["own"].extra
      # Its gradient is the correction; its value is not a loss.
      line = optax.tree.vdot(
        optax.tree.sub(control, own), jax.tree.map(core.wide, variables.params)
      )
      return loss + (line - core.fixed(line)), stats, measured

    return losses

  def server(key, kept):
    del kept
    variables = one_model(clients).start(key)
    return Controlled(variables, core.sums_like(variables.params))

  def begin(context, kept):
    return local.Learner(context["server"].model, kept.learner.opt_state)

  def end(context, kept, learner, batches):
    rate = context["learning_rate"]
    length = rate * core.as_type(batches.steps, rate.dtype)
    moved = length > 0  # Else there is no mean gradient.
    divisor = jnp.where(moved, length, 1)
    (model, c), own = context["server"], kept.extra

    def option_ii(own, c, w, w_k):
      return own - c + (core.wide(w) - core.wide(w_k)) / divisor

    control = jax.tree.map(option_ii, own, c, model.params, learner.params)
    control = optax.tree.where(moved, control, own)
    sent = learner.variables, optax.tree.sub(control, own)
    return kept.replace(learner=learner, extra=control), sent

  def aggregate(context, sent, key):
    del key
    (models, changes), (model, control) = sent.value, context["server"]
    # Weights of their own would pull against the controls, which have none.
    equal = (sent.weight > 0).astype(sent.weight.dtype)
    mean = weighted_mean(models, equal)
    step = lambda w, x: core.wide(w) + context["server_lr"] * (x - core.wide(w))
    params = jax.tree.map(step, model.params, mean.params)
    add = lambda c, d: c + jnp.sum(d, axis=0) / len(clients)
    control = jax.tree.map(add, control, changes)
    return Controlled(mean._replace(params=params), control)

  method = Method(
    objective=objective,
    hyper={"server_lr": (server_lr, jnp.inf)},
    server=server,
    begin=begin,
    end=end,
    extra=lambda variables, client: core.sums_like(variables.params),
    aggregate=aggregate,
  )
  if "optimizer" in options:
    raise ValueError(
      "optimizer: controls are mean gradients of plain SGD; leave it out"
    )
  algorithm = personal(clients, method, optimizer=optax.sgd, **options)
  one_model(clients)
  for client in clients:
    if client.learning_rate is not None or client.optimizer is not None:
      raise ValueError(
        f"{client.label}: has a learning rate or an optimizer of its own, but"
        " controls are mean gradients of plain SGD: give scaffold the rate"
      )
  return algorithm
