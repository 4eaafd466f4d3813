"""KT-pFL: each party learns its own mixture of all parties' scores.

Reference: Zhang et al. 2021, "Parameterized Knowledge Transfer for Personalized
Federated Learning".
"""

from collections.abc import Sequence
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core, local
from hetfl.algorithms.fedmd import consensus, TRANSLATORS
from hetfl.algorithms.public import known, Parties


def coefficients_loss(
  coefficients: jax.Array, scores: jax.Array, penalty: float | jax.Array
) -> jax.Array:
  """`sum_k [mean_n KL(sum_j c_kj p_jn || p_kn) + rho sum_j (c_kj - 1 / P)^2]`.

  Args:
    coefficients: c, `float[P, P]`.
    scores: p, `float[P, N, C]`, probabilities.
    penalty: rho.

  Returns:
    `float[]`.

  Party 0 says (1/2, 1/2) and learns (3/4, 1/4) from party 1, which learns from
  itself: `3/4 log(3/2) + 1/4 log(1/2) + rho`.

  >>> p = jnp.array([[[.5, .5]], [[.75, .25]]])
  >>> c = jnp.array([[0., 1.], [0., 1.]])
  >>> [round(float(coefficients_loss(c, p, rho)), 3) for rho in (0., 1.)]
  [0.131, 1.131]
  """
  known = jnp.maximum(scores, 1e-30)  # Some are 0 by rounding.
  mixed = jnp.einsum("kj,jnc->knc", coefficients, known, precision="highest")
  divergence = mixed * (jnp.log(mixed) - jnp.log(known))
  distance = jnp.sum(jnp.square(coefficients - 1 / len(coefficients)))
  return jnp.sum(divergence) / scores.shape[1] + penalty * distance


@functools.partial(jax.jit, static_argnums=4)
def step_coefficients(
  coefficients: jax.Array,
  scores: Sequence[jax.Array],
  rate: float | jax.Array,
  penalty: float | jax.Array,
  steps: int = 1,
) -> jax.Array:
  """Gradient steps `c_k <- project(c_k - eta dL / dc_k)`, to distributions.

  Args:
    coefficients: c, `float[P, P]`, whose rows are distributions.
    scores: P arrays `float[N, ..., C]`, probabilities.
    rate: eta.
    penalty: rho.
    steps: how many.

  Returns:
    `float[P, P]`.

  Two parties that say the same are equal: only the penalty, whose slope is
  `2 rho (c - 1/2)`, moves the coefficients.

  >>> c = jnp.array([[.75, .25], [.5, .5]])
  >>> p = [jnp.array([[.5, .5]])] * 2
  >>> step_coefficients(c, p, 0.25, 1.).tolist()
  [[0.625, 0.375], [0.5, 0.5]]
  """
  together = jnp.stack(scores)
  together = together.reshape(len(together), -1, together.shape[-1])

  def step(_, c):
    slope = jax.grad(coefficients_loss)(c, together, penalty)
    with jax.numpy_dtype_promotion("standard"):  # Optax divides by integers.
      new = jax.vmap(optax.projections.projection_simplex)(c - rate * slope)
    return core.as_type(new, c.dtype)

  return jax.lax.fori_loop(0, steps, step, coefficients)


@jax.jit
def _without_lost(scores):
  """The scores, with the others' mean in place of those that are not finite."""
  heard = known(scores)
  mean = consensus(scores, heard)
  return [jnp.where(one > 0, p, mean) for one, p in zip(heard, scores)]


@jax.jit
def mixtures(
  coefficients: jax.Array, scores: Sequence[jax.Array]
) -> list[jax.Array]:
  """Each party's "personalized soft prediction", `sum_j c_kj p_j`.

  >>> p = [jnp.array([[0., 1.]]), jnp.array([[1., 0.]])]
  >>> [m.tolist() for m in mixtures(jnp.array([[.25, .75], [0., 1.]]), p)]
  [[[0.75, 0.25]], [[1.0, 0.0]]]
  """
  products = lambda row: map(operator.mul, row, scores)
  return [functools.reduce(operator.add, products(c)) for c in coefficients]


def ktpfl(
  parties: Sequence[local.Participant],
  *,
  coefficients_lr: float | jax.Array = 0.1,
  coefficients_steps: int = 1,
  penalty: float | jax.Array = 0.7,
  temperature: float | jax.Array = 10.0,
  **options: Any,
) -> core.Algorithm:
  """KT-pFL's rounds: `fedmd`'s, with a target for each party.

  The parties send their tempered class probabilities p_j on the round's public
  examples. The server takes gradient steps on the coefficients c, see
  `step_coefficients`, and sends party k `sum_j c_kj p_j`, towards which it
  trains; then it trains on its private examples. A party sends N C numbers; it
  receives N C, and which N public examples come next. A party that says NaN, as
  it has diverged, counts as if it said the mean of the others. All take part in
  each round; the coefficients have no row for absent ones.

  Args:
    parties: P parties, whose models have the same number of classes.
    coefficients_lr: eta, the coefficients' learning rate; 0 is `fedmd` with
      'kl'.
    coefficients_steps: gradient steps in a round.
    penalty: rho, which pulls the coefficients to 1 / P; they swing about that
      without end unless eta rho < 1.
    temperature: T, of the probabilities and of the losses of Digest.
    **options: `public_transform`, `eval_batch_size` and `engine`; see
      `fedmd`.

  Returns:
    The algorithm, whose `init` and `step` take what `fedmd`'s do. Its state's
    `clients` holds a `Learner` for each party, `server` the coefficients,
    `float32[P, P]`, 1 / P at first. Its metrics are `fedmd`'s.

  Raises:
    ValueError: a value is out of its range; labels are not classes.

  Reference: Zhang et al. 2021. Departures: as in the released code, whose
  parties send once a round, coefficients are fitted before, not after, the
  parties learn from them. Rows are projected to distributions, where the code
  takes a softmax of 5 c; the loss is the paper's KL, not the code's squared
  error, with equal weights of the parties, whose penalties add up (the code's
  are a mean); the rate is constant. The parties' KL is a sum over classes, the
  code's their mean. Both optimizers of a party persist.

  Party b says (3/4, 1/4), a says (1/2, 1/2) and starts to learn their mean. At
  (a, b) = (1/2, 1/2) its loss has the slopes `sum_c p_jc log(m_c / p_ac) + 1`,
  m = (5/8, 3/8): -0.032 for a, 0.095 for b, if 1 is left out.

  >>> from hetfl import Participant, plan_fedmd, Subset
  >>> linear = lambda *w: core.Model(
  ...     lambda key: core.Variables(jnp.array([w]), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> parties = [Participant(linear(z, 0.), name, learning_rate=0.)
  ...            for name, z in (('a', 0.), ('b', jnp.log(3.)))]
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> image = Subset.whole(bank)
  >>> plan = plan_fedmd(image, {'a': image, 'b': image}, seed=0, round=1,
  ...                   subset=1)
  >>> algorithm = ktpfl(parties, coefficients_lr=1., temperature=1.)
  >>> state, _ = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan,
  ...     {'public': bank, 'a': bank, 'b': bank})
  >>> round(float(state.server[0, 0]), 3)  # 1/2 + (0.095 + 0.032) / 2
  0.564
  """
  group = Parties(parties, TRANSLATORS["kl"], **options)
  number = len(parties)
  checks.counts(coefficients_steps=coefficients_steps)
  values = dict(coefficients_lr=coefficients_lr, penalty=penalty)
  checks.between(0, np.inf, **values)
  checks.positive(temperature=temperature)

  def init(key, trained=None):
    hyper = core.hyper(temperature=temperature, **values)
    equal = jnp.full((number, number), 1 / number, jnp.float32)
    return group.init(key, trained, hyper, equal)

  def step(state, plan, data):
    scores = _without_lost(group.communicate(state, plan, data))
    how = *(state.hyper[name] for name in values), coefficients_steps
    coefficients = step_coefficients(state.server, scores, *how)
    shown = group.distribute(plan, data, *mixtures(coefficients, scores))
    state, digest_losses = group.digest(state, plan, shown)
    state, revisit_losses = group.revisit(state, plan, data)
    losses = dict(digest_loss=digest_losses, revisit_loss=revisit_losses)
    metrics = local.metrics_of(parties, **losses)
    return state.replace(server=coefficients), metrics

  return core.Algorithm(init, step)
