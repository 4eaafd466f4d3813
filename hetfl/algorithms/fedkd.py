"""FedKD: each client's large model learns with a small one that all share.

Reference: Wu et al. 2022, "Communication-efficient federated learning via
knowledge distillation", Nature Communications 13.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import core, distill, local
from hetfl.algorithms.personal import Method, own_and_shared, personal
from hetfl.clients import Client, weighted_mean
from hetfl.model import parted

PyTree = Any


def fedkd(
  clients: Sequence[Client],
  *,
  mentee: core.Model,
  energy: float | jax.Array | core.Schedule = 0.95,
  divergence: distill.PairDivergence | None = None,
  **options: Any,
) -> core.Algorithm:
  """FedKD.

  On the same batches a client trains its own model, the mentor, and a copy of
  the server's, the mentee; each learns from the labels and, the less the worse
  both are, from the other:

  `L_own = CE_own + KL(p_shared || p_own) / (CE_own + CE_shared)`
  `L_shared = CE_shared + KL(p_own || p_shared) / (CE_own + CE_shared)`

  It sends the mentee's update by singular vectors, see `compressed`; the server
  adds the updates' mean to the mentee, compressed likewise. Of an array of m
  rows and n columns, a client sends r vectors, r (m + n + 1) numbers, and
  receives as many. Arrays with one axis are sent whole.

  Args:
    clients: K clients, whose models, the mentors, may differ. A client's
      learning rate, optimizer and penalty are the mentor's.
    mentee: the shared model, of the same classes.
    energy: the share of the squared singular values that is kept, in [0, 1]: a
      value, which trials may vary, or a schedule `round -> share`; the paper's
      rises from 0.95 to 0.98.
    divergence: in place of KL, as for `fml`; its temperature is 1.
    **options: `learning_rate`, `optimizer` and `engine`; see `personal`.

  Returns:
    The algorithm; see `personal`. Its state's `server` holds the mentee's
    `Variables`. The mentee's optimizer is new in each round. Its metrics are
    means over examples: `own_loss` and `shared_loss`, of the labels alone, and
    the divergences `own_kl` and `shared_kl`.

  Raises:
    ValueError: as `personal`; mentor and mentee have different classes; labels
      are not classes, and there is no divergence for them.

  Reference: Wu et al. 2022, its adaptive mutual distillation and its dynamic
  approximation of gradients. The denominator is of a batch's means, as in the
  released code, or a microbatch's. Departures: no loss of hidden states, whose
  layers would have to correspond; partner and denominator are held fixed, where
  the code differentiates through them; divergences are sums over classes (the
  code's are also divided by their number); the mean is weighted as the plan is;
  the mentee's optimizer is new in each round, the code's persists.

  Mentor and mentee both predict (1/2, 1/2) for the only image, of class 0: they
  learn from the label alone.

  >>> from hetfl import ClientPopulation, plan_round
  >>> linear = core.Model(
  ...     lambda key: core.Variables(jnp.zeros((1, 2)), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> held = ClientPopulation.from_lists(bank, [[0]])
  >>> plan = plan_round({'train': held}, seed=0, round=1, batch_size=1)
  >>> algorithm = fedkd([Client(linear)], mentee=linear, learning_rate=1.)
  >>> state, metrics = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan, {'train': bank})
  >>> state.server.params.round(3).tolist(), float(metrics['own_kl'].value)
  ([[0.5, -0.5]], 0.0)
  """
  core.Model.check("mentee", mentee)

  def objective(client):
    pull = divergence or distill.pair_divergence
    if divergence is None:
      client = local.of_classes(
        client, "fedkd compares softmaxes", "give fedkd(divergence=)"
      )

    def towards(outputs, partner):
      return pull(outputs, core.fixed(partner), 1.0)

    def losses(variables, batch, key, context):
      del context
      of = parted(variables)
      own, own_stats = client.outputs(of["own"], batch, key)
      # 2**31 differs from everything that a model folds in.
      key = jax.random.fold_in(key, np.uint32(2**31))
      shared, shared_stats = local.outputs_of(
        f"{client.label}: mentee", mentee, of["shared"], batch, key
      )
      stats = {"own": own_stats, "shared": shared_stats}
      own_loss = local.losses_of(client.loss, own, batch)
      shared_loss = local.losses_of(client.loss, shared, batch)
      own_kl, shared_kl = towards(own, shared), towards(shared, own)
      both = _mean(own_loss + shared_loss, batch)
      total = own_loss + shared_loss + (own_kl + shared_kl) / both
      measured = dict(own_loss=own_loss, shared_loss=shared_loss)
      return total, stats, measured | dict(own_kl=own_kl, shared_kl=shared_kl)

    return losses

  def end(context, kept, learner, batches):
    del batches
    own, shared = own_and_shared(learner)
    update = optax.tree.sub(shared.params, context["server"].params)
    sent = shared._replace(params=compressed(update, context["energy"]))
    return kept.replace(learner=own), sent

  def aggregate(context, sent, key):
    del key
    mean, last = weighted_mean(sent.value, sent.weight), context["server"]
    update = compressed(mean.params, context["energy"])
    return mean._replace(params=optax.tree.add(last.params, update))

  method = Method(
    objective=objective,
    hyper={"energy": (energy, 1)},
    server=lambda key, kept: mentee.start(key, "mentee"),
    shared=lambda context: context["server"],
    end=end,
    aggregate=aggregate,
    measured=("own_loss", "shared_loss", "own_kl", "shared_kl"),
  )
  return personal(clients, method, **options)


def _mean(losses, batch):
  """The mean loss of a batch, held fixed, as a divisor."""
  count = jnp.sum(batch["mask"])
  mean = jnp.sum(losses * batch["mask"]) / jnp.where(count > 0, count, 1)
  return core.fixed(jnp.where(mean > 0, mean, 1))


def compressed(update: PyTree, energy: float | jax.Array) -> PyTree:
  """Each array, reduced to its first singular vectors.

  The fewest vectors whose squared singular values exceed a share of their sum,
  `sum_(i <= r) s_i^2 > energy sum_i s_i^2`.

  Args:
    update: arrays; those with one axis, or none, are kept whole. Others are
      matrices with their last axis as columns, such as a convolution's outputs.
    energy: the share, in [0, 1]; with 1 all are kept.

  Returns:
    The arrays, float32 at least.

  The squares are 16 and 4; 16 is 0.8 of their sum.

  >>> compressed(jnp.array([[0., 2.], [4., 0.]]), 0.7).tolist()
  [[0.0, 0.0], [4.0, 0.0]]
  >>> compressed(jnp.array([[0., 2.], [4., 0.]]), 0.9).tolist()
  [[0.0, 2.0], [4.0, 0.0]]
  """

  def leaf(a):
    if a.ndim < 2:
      return core.wide(a)
    matrix = core.wide(a).reshape(-1, a.shape[-1])
    # Vectors of zeros, as absent clients send, have no derivative.
    there, columns = jnp.any(matrix != 0), matrix.shape[1]
    other = jnp.eye(*matrix.shape, dtype=matrix.dtype)
    other *= jnp.arange(1, 1 + columns, dtype=matrix.dtype)[None]
    left, values, right = jnp.linalg.svd(
      jnp.where(there, matrix, other), full_matrices=False
    )
    squares = jnp.square(values)
    # What would be lost without a vector and those after it; summed from the
    # end, as even the least term counts, but vanishes in the sum of all.
    rest = jnp.cumsum(squares[::-1])[::-1]
    # Masked, not cut: shapes do not depend on the number of vectors.
    values = jnp.where(rest >= (1 - energy) * rest[0], values, 0)
    product = jnp.matmul(left * values[None], right, precision="highest")
    return jnp.where(there, product, matrix).reshape(a.shape)

  return jax.tree.map(leaf, update)
