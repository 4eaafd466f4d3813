"""FedGen's generator of features, its inputs, and how far these spread.

Reference: Zhu et al. 2021, "Data-Free Knowledge Distillation for Heterogeneous
Federated Learning".
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hetfl import core


class Generator(nn.Module):
  """From noise and a class, `float[B, E + C]`, to features `float[B, D]`.

  Attributes:
    hidden: the hidden layer's width.
    num_features: D.
  """

  hidden: int
  num_features: int

  @nn.compact
  def __call__(self, x, train: bool = False):
    """Maps `float[B, E + C]` to `float[B, D]`."""
    x = nn.Dense(self.hidden, use_bias=False)(x)  # It is normalised.
    x = nn.relu(nn.BatchNorm(not train, momentum=0.9)(x))
    return nn.Dense(self.num_features)(x)


def draw(
  key: jax.Array, number: int, *, noise: int, num_classes: int
) -> core.Batch:
  """A batch of the generator's inputs: noise e, and classes y, drawn evenly.

  Args:
    key: a random key.
    number: B.
    noise: E.
    num_classes: C.

  Returns:
    `e: float[B, E]` in [0, 1), `y: int[B]`, both in `x: float[B, E + C]`, the
    classes one-hot, and `mask`.

  >>> batch = draw(jax.random.key(0), 5, noise=1, num_classes=2)
  >>> bool((batch['x'][:, 0] == batch['e'][:, 0]).all())
  True
  >>> bool((batch['x'][:, 1:].argmax(axis=1) == batch['y']).all())
  True
  """
  noise_key, class_key = jax.random.split(key)
  e = jax.random.uniform(noise_key, (number, noise))
  y = jax.random.randint(class_key, (number,), 0, num_classes)
  x = jnp.concatenate([e, jax.nn.one_hot(y, num_classes)], axis=-1)
  return {"e": e, "y": y, "x": x, "mask": jnp.ones(number)}


def spread(features: jax.Array, noise: jax.Array) -> jax.Array:
  """`exp(-mean_ij mean_d |z_id - z_jd| mean_d (e_id - e_jd)^2)`, `float[]`.

  Args:
    features: z, `float[B, D]`.
    noise: e, `float[B, E]`, from which they are made.

  Two are 3 apart, from noise 1 apart: two of four pairs count, exp(-3 / 2).

  >>> x = spread(jnp.array([[0.], [3.]]), jnp.array([[0.], [1.]]))
  >>> round(float(x), 4)
  0.2231
  """
  of_pairs = lambda x: x[:, None] - x[None]
  apart = jnp.mean(jnp.abs(of_pairs(features)), axis=-1)
  return jnp.exp(-jnp.mean(apart * jnp.mean(of_pairs(noise) ** 2, axis=-1)))
