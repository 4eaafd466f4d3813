"""Client-level differential privacy: clipping, noise, and their epsilon.

Two federations are neighbours if one has a client, with all of its examples,
that the other lacks. Each client takes part in a round by an independent draw
(`plan_round(poisson=True)`). The server adds noise once to the sum of the
clipped updates, and divides by a number that is the same in every round.
Whatever is computed from these means, such as models that teach each other on
public examples, is as private as they are.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core

PyTree = Any


@dataclasses.dataclass(frozen=True)
class PrivateMean:
  """The mean of a round's updates, clipped and with noise.

  `g = (sum_k clip(delta_k, C) + N(0, (z C)^2)) / K`

  Attributes:
    clip_norm: C, the greatest norm of a client's update.
    noise_multiplier: z; 0 only clips.
    clients_per_round: K, how many clients a round has on average.

  Raises:
    ValueError: a value is out of its range.

  Reference: McMahan et al. 2018, "Learning Differentially Private Recurrent
  Language Models", algorithm 1, with the fixed-denominator estimator.
  """

  clip_norm: float
  noise_multiplier: float
  clients_per_round: float

  def __post_init__(self):
    checks.positive(
      clip_norm=self.clip_norm, clients_per_round=self.clients_per_round
    )
    checks.between(0, np.inf, noise_multiplier=self.noise_multiplier)

  def clip(self, delta: PyTree) -> PyTree:
    """`delta min(1, C / ||delta||)`, over the whole model.

    Args:
      delta: a client's update.

    Returns:
      What the client sends, in float32 at least; zeros for an update that is
      not finite, which no factor would bound.

    >>> mean = PrivateMean(
    ...     clip_norm=1., noise_multiplier=0., clients_per_round=2)
    >>> mean.clip(jnp.array([3., 4.])), mean.clip(jnp.array([0., jnp.inf]))
    (Array([0.6, 0.8], dtype=float32), Array([0., 0.], dtype=float32))
    """
    delta = jax.tree.map(core.wide, delta)
    square = optax.tree.norm(delta, squared=True)
    # The square root has no slope at zero, where absent clients are.
    norm = jnp.sqrt(jnp.maximum(square, 1e-30))
    scale = jnp.minimum(1, self.clip_norm / norm)
    clipped = lambda d: jnp.where(jnp.isfinite(square), scale * d, 0)
    return jax.tree.map(clipped, delta)

  def of_sum(self, key: jax.Array, total: PyTree) -> PyTree:
    """The mean, from the sum of what the clients send.

    Args:
      key: the round's.
      total: the sum, in which clients count alike.

    Returns:
      g.
    """
    std = self.noise_multiplier * self.clip_norm
    noise = optax.tree.random_like(key, total)
    mean = lambda s, n: (s + std * n) / self.clients_per_round
    return jax.tree.map(mean, total, noise)


def epsilon(
  noise_multiplier: float,
  sampling: Sequence[float],
  *,
  rounds: int,
  delta: float,
) -> float:
  """The epsilon of all rounds together, by privacy loss distributions.

  A client may be in every pool, and so enter a mean of each in every round.

  Args:
    noise_multiplier: z of every pool's `PrivateMean`.
    sampling: the probability that a client takes part in a round, for each
      pool: `clients_per_round` over the pool's number of clients.
    rounds: T.
    delta: the probability of worse than epsilon.

  Returns:
    Epsilon.

  Raises:
    ValueError: a value is out of its range.
    ImportError: dp-accounting is not installed.

  Reference: Doroshenko et al. 2022, "Connect the Dots: Tighter Discrete
  Approximations of Privacy Loss Distributions".

  >>> round(epsilon(2.0, [0.1, 0.5], rounds=100, delta=1e-3), 1)
  11.2
  """
  checks.between(0, np.inf, noise_multiplier=noise_multiplier)
  account, event = _accounting(sampling, rounds, delta)
  return float(account().compose(event(noise_multiplier)).get_epsilon(delta))


def noise_multiplier(
  epsilon: float, sampling: Sequence[float], *, rounds: int, delta: float
) -> float:
  """The least noise multiplier that costs at most an epsilon.

  Args:
    epsilon: the most that all rounds may cost together.
    sampling: as for `epsilon`.
    rounds: T.
    delta: as for `epsilon`.

  Returns:
    z, to 0.001.

  Raises:
    ValueError: a value is out of its range.
    ImportError: dp-accounting is not installed.

  >>> z = noise_multiplier(8.0, [0.1, 0.5], rounds=100, delta=1e-3)
  >>> round(z, 1)
  2.5
  """
  checks.positive(epsilon=epsilon)
  account, event = _accounting(sampling, rounds, delta)
  import dp_accounting

  return dp_accounting.calibrate_dp_mechanism(
    account, event, epsilon, delta, tol=1e-3
  )


def _accounting(sampling, rounds, delta):
  """How to account, and `noise multiplier -> event` of all rounds."""
  checks.counts(rounds=rounds)
  checks.between(1e-12, 1 - 1e-12, delta=delta)
  if np.ndim(sampling) != 1 or not len(sampling):
    raise ValueError(f"sampling={sampling!r}: give a sequence, one per pool")
  for share in sampling:
    checks.between(0, 1, sampling=share)
  try:
    import dp_accounting
    from dp_accounting import pld
  except ImportError as error:
    raise ImportError(
      "dp-accounting, which computes epsilon, is not installed: pip install"
      " -e '.[privacy]'"
    ) from error

  def event(z):
    mean = dp_accounting.GaussianDpEvent(z)
    of_round = [dp_accounting.PoissonSampledDpEvent(q, mean) for q in sampling]
    return dp_accounting.SelfComposedDpEvent(
      dp_accounting.ComposedDpEvent(of_round), rounds
    )

  # Neighbours differ by one client's presence, the default. Finer grids take
  # minutes, and change the fifth digit.
  return lambda: pld.PLDAccountant(value_discretization_interval=1e-3), event
