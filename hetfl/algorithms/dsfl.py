"""DS-FL: parties label public examples together, and sharpen the labels.

Reference: Itahara et al. 2021, "Distillation-Based Semi-Supervised Federated
Learning for Communication-Efficient Collaborative Training with Non-IID Private
Data".
"""

from collections.abc import Sequence
from typing import Any

import jax

from hetfl import checks, core, distill, local
from hetfl.algorithms.fedmd import consensus, consensus_shares, TRANSLATORS
from hetfl.algorithms.public import Parties

# The softmaxes have no temperature, whatever the aggregation's is.
_PLAIN = TRANSLATORS["kl"]._replace(
  scores=lambda z, t: TRANSLATORS["kl"].scores(z, 1.0),
  loss=lambda z, target, t: TRANSLATORS["kl"].loss(z, target, 1.0),
)


@jax.jit
def entropy_reduction(
  scores: Sequence[jax.Array],
  weights: jax.Array,
  temperature: float | jax.Array,
) -> jax.Array:
  """`softmax(p~ / T)`, of the mean `p~ = sum_k c_k p_k / sum_k c_k`.

  Args:
    scores: P arrays `float[N, C]`, probabilities.
    weights: c_k, `float[P]`, not negative; only their ratios matter.
    temperature: T; small ones sharpen.

  Returns:
    `float[N, C]`, probabilities.

  Reference: Itahara et al. 2021, "entropy reduction aggregation": the softmax
  is of the mean of the probabilities, not of its logarithm.

  >>> import jax.numpy as jnp
  >>> p = [jnp.array([[.5, .5]]), jnp.array([[.75, .25]])]
  >>> target = entropy_reduction(p, jnp.ones(2), 0.1)
  >>> round(float(target[0, 0]), 3)  # 1 / (1 + exp(3.75 - 6.25))
  0.924
  """
  return distill.tempered_softmax(consensus(scores, weights), temperature)


def dsfl(
  parties: Sequence[local.Participant],
  *,
  server: local.Participant | None = None,
  temperature: float | jax.Array = 0.1,
  consensus_weights: Sequence[float] | jax.Array | None = None,
  **options: Any,
) -> core.Algorithm:
  """DS-FL's rounds: Update, Predict, Aggregate, Distill.

  Each party trains on its private examples and sends its class probabilities on
  the round's public ones, p_k. Then the parties and the server's model train
  towards `softmax(p~ / T)`, where `p~ = sum_k c_k p_k / sum_k c_k`. A party
  sends N C numbers; it receives N C, and which N public examples come next.

  Args:
    parties: P parties, whose models have the same number of classes.
    server: how the server's model, with a name of its own, trains; `None` for
      no model.
    temperature: T.
    consensus_weights: c_k, not negative; only their ratios matter. `None` for
      equal weights. With weight 0 a party is not heard.
    **options: `public_transform`, `eval_batch_size` and `engine`; see
      `fedmd`.

  Returns:
    The algorithm, whose `init` and `step` take what `fedmd`'s do. Its state's
    `clients` holds a `Learner` for each party, `server` the server's, which
    digests the first party's batches, and whose learning rate is the last of
    `hyper`. Its metrics are each party's `NAME/revisit_loss` on its labels, and
    its and the server's `NAME/digest_loss`, the divergence from the targets.

  Raises:
    ValueError: a value is out of its range; labels are not classes.

  Reference: Itahara et al. 2021, DS-FL with ERA. Departures: both optimizers of
  a party, and the server's, persist; the divergence KL has the gradient of the
  paper's cross-entropy, but is 0 for a model that matches the target.

  The server's model learns from two parties, which do not learn and predict
  (1/2, 1/2) and (3/4, 1/4).

  >>> import jax.numpy as jnp
  >>> from hetfl import Participant, plan_fedmd, Subset
  >>> linear = lambda *w: core.Model(
  ...     lambda key: core.Variables(jnp.array([w]), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> a = Participant(linear(0., 0.), 'a', learning_rate=0.)
  >>> b = Participant(linear(jnp.log(3.), 0.), 'b', learning_rate=0.)
  >>> server = Participant(linear(0., 0.), 'server', learning_rate=1.)
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> image = Subset.whole(bank)
  >>> plan = plan_fedmd(image, {'a': image, 'b': image}, seed=0, round=1,
  ...                   subset=1)
  >>> algorithm = dsfl([a, b], server=server)
  >>> state, _ = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan,
  ...     {'public': bank, 'a': bank, 'b': bank})
  >>> round(float(state.server.params[0, 0]), 3)  # 0.924 - 1/2
  0.424
  """
  group = Parties(parties, _PLAIN, server=server, **options)
  shares = consensus_shares(consensus_weights, len(parties))
  checks.positive(temperature=temperature)

  def init(key, trained=None):
    values = core.hyper(temperature=temperature)
    values |= core.hyper(len(parties), consensus_weights=shares)
    return group.init(key, trained, values)

  def step(state, plan, data):
    # Update: each party trains on its own private data for a few epochs.
    state, revisit_losses = group.revisit(state, plan, data)
    # Predict and Upload.
    scores = group.communicate(state, plan, data)
    # Aggregation, by entropy reduction, and Broadcast.
    heard = group.heard(plan, scores)
    weights = state.hyper["consensus_weights"] * heard
    target = entropy_reduction(scores, weights, state.hyper["temperature"])
    (shown,) = group.distribute(plan, data, target)
    # Distillation, of the parties and of the server's model.
    everyone = [shown] * len(group.students)
    state, digest_losses = group.digest(state, plan, everyone, weights)
    return state, {
      **local.metrics_of(group.parties, revisit_loss=revisit_losses),
      **local.metrics_of(group.students, digest_loss=digest_losses),
    }

  return core.Algorithm(init, step)
