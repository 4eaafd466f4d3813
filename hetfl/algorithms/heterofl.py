"""HeteroFL: clients train the leading channels of one global model.

Reference: Diao, Ding & Tarokh 2021, "HeteroFL: Computation and Communication
Efficient Federated Learning for Heterogeneous Clients".
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import checks, core, local
from hetfl.algorithms.personal import Method, personal
from hetfl.clients import Client

PyTree = Any


def heterofl(
  clients: Sequence[Client],
  *,
  global_model: core.Model,
  classes: Any = None,
  output: str | None = None,
  **options: Any,
) -> core.Algorithm:
  """HeteroFL.

  A client's model is a narrower copy of the global one: its arrays have the
  same names, and are leading parts of the global arrays, `w_k = w[:a, :b]`. It
  starts from these parts, trains them on its labels and sends them. The server
  takes the mean of each entry over the round's clients that hold it,

  `w[i] <- sum_k n_k w_k[i] / sum_k n_k`,

  and leaves entries that nobody holds. A client sends and receives as many
  numbers as its model has: about r^2 W with a share r of the channels.

  Args:
    clients: K clients, of any widths.
    global_model: the global model, as wide as the widest or wider.
    classes: `bool[K, C]`, which classes each client has: its loss sets the
      logits of others to 0. `None` for the plain loss.
    output: with `classes`, the name of the output layer in the parameters,
      such as a Flax module's `name`: its entries for a class are the mean over
      the clients that have it. `None` for the mean over all.
    **options: `learning_rate`, `optimizer` and `engine`; see `personal`.

  Returns:
    The algorithm; see `personal`. Its state's `server` holds the global model's
    `Variables`; a client keeps the model that it last sent, and begins each
    round with a new optimizer. Its metric is `loss`.

  Raises:
    ValueError: as `personal`; a client's array is not a leading part of a
      global one, `classes` are not of K clients, or do not match the logits.

  Reference: Diao et al. 2021, whose released code has `classes` and `output`.
  The mean is weighted as the plan is; the code's weights are equal. Left to the
  models: the Scaler, after each layer that is narrower, before it is
  normalised, `x = x / r if train else x`; and pooling over positions before the
  first dense layer, since leading entries of a flattened image belong to other
  positions and channels in a narrower one. Departure: batch statistics are
  averaged as parameters are; the code gathers them after training, and clips
  gradients at a norm of 1.

  The global model has three channels; the clients have one, and two at twice
  the rate. For the image, of class 0, both move up by half their rate.

  >>> from hetfl import ClientPopulation, plan_round
  >>> channels = lambda n: core.Model(
  ...     lambda key: core.Variables(jnp.zeros((n, 2)), {}),
  ...     lambda v, x, key, train: (x[:, :n] @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((1, 3)), 'y': jnp.zeros(1, int)}
  >>> held = ClientPopulation.from_lists(bank, [[0], [0]])
  >>> plan = plan_round({'train': held}, seed=0, round=1, batch_size=1)
  >>> clients = Client(channels(1)), Client(channels(2), learning_rate=2.)
  >>> algorithm = heterofl(clients, global_model=channels(3), learning_rate=1.)
  >>> state, metrics = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan, {'train': bank})
  >>> state.server.params.tolist()
  [[0.75, -0.75], [1.0, -1.0], [0.0, 0.0]]
  """
  core.Model.check("global_model", global_model)

  def objective(client):
    def losses(variables, batch, key, context):
      logits, stats = client.outputs(variables, batch, key)
      has = context["own"].extra
      if logits.shape[-1:] != has.shape:
        raise ValueError(
          f"classes: {len(has)} for each client, but {client.label} has logits"
          f" of shape {logits.shape}: give as many as there are logits"
        )
      logits = jnp.where(has[None], logits, 0)
      return local.losses_of(client.loss, logits, batch), stats, {}

    return losses if classes is not None else local.supervised(client)

  def extra(variables, client):
    return () if classes is None else jnp.asarray(classes)[client]

  def server(key, kept):
    whole = global_model.start(key, "global_model")
    if output is not None and output not in whole.params:
      raise ValueError(
        f"output={output!r}: the models' layers are {sorted(whole.params)}"
      )
    for group in kept:
      own = jax.tree.map(lambda a: a[0], group.learner.variables)
      _check(clients[group.clients[0]].label, own, whole)
    return whole

  def begin(context, kept):
    return leading(context["server"], kept.learner.variables)

  def end(context, kept, learner, batches):
    del batches
    ones = lambda a: jnp.ones_like(core.wide(a))
    held = jax.tree.map(ones, learner.variables)
    if output is not None:
      has = lambda a: jnp.broadcast_to(kept.extra.astype(a.dtype), a.shape)
      part = jax.tree.map(has, held.params[output])
      held = held._replace(params={**held.params, output: part})
    fill = lambda own: filled(own, context["server"])
    # The optimizer is not kept: it is new in each round.
    new = learner._replace(opt_state=kept.learner.opt_state)
    return kept.replace(learner=new), (fill(learner.variables), fill(held))

  def aggregate(context, sent, key):
    del key
    total = lambda x: jnp.tensordot(sent.weight, x, 1, precision="highest")

    def mean(last, x, held):
      weight = total(held)
      there = weight > 0
      x = total(core.wide(x) * held) / jnp.where(there, weight, 1)
      return jnp.where(there, x, core.wide(last))

    return jax.tree.map(mean, context["server"], *sent.value)

  method = Method(
    objective=objective,
    server=server,
    begin=begin,
    end=end,
    extra=extra,
    aggregate=aggregate,
  )
  algorithm = personal(clients, method, **options)
  if classes is not None:
    classes = np.asarray(classes, bool)
    if classes.ndim != 2 or len(classes) != len(clients):
      raise ValueError(
        f"classes: of shape {classes.shape}: give bool[K, C] of {len(clients)}"
        " clients"
      )
  elif output is not None:
    raise ValueError(f"output={output!r}: give classes too, or leave it out")
  return algorithm


def leading(whole: PyTree, own: PyTree) -> PyTree:
  """The leading part of each array, of the shape of another.

  >>> leading(jnp.arange(6).reshape(2, 3), jnp.zeros((1, 2))).tolist()
  [[0, 1]]
  """
  part = lambda w, x: w[tuple(map(slice, x.shape))]
  return jax.tree.map(part, whole, own)


def filled(own: PyTree, whole: PyTree) -> PyTree:
  """The inverse, with zeros for what is missing.

  >>> filled(jnp.ones((1, 2), int), jnp.zeros((2, 3))).tolist()
  [[1, 1, 0], [0, 0, 0]]
  """
  ends = lambda x, w: [(0, n - m, 0) for m, n in zip(x.shape, w.shape)]
  fill = lambda x, w: jax.lax.pad(x, jnp.zeros((), x.dtype), ends(x, w))
  return jax.tree.map(fill, own, whole)


def _check(label, own, whole):
  """Raises a `ValueError` if a model is no leading part of the global one."""
  fits = lambda x, w: x.ndim == w.ndim and leading(w, x).shape == x.shape
  alike = jax.tree.structure(own) == jax.tree.structure(whole)
  if not (alike and jax.tree.all(jax.tree.map(fits, own, whole))):
    checks.alike(f"{label}: its model beside the global one", own, whole)
