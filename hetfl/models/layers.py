"""Layers shared by the models."""

from collections.abc import Sequence
import itertools
import math
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

ConvForm = Literal["patches", "native"]


def haiku_init(key, shape, dtype=jnp.float32):
  """Haiku's default weights: a normal of deviation `1 / sqrt(fan_in)`, cut.

  The normal is cut at two deviations and not rescaled, which leaves a standard
  deviation of `0.88 / sqrt(fan_in)`.

  Args:
    key: a random key.
    shape: the kernel's shape, outputs last.
    dtype: its type.

  Returns:
    The kernel.

  Reference: Lichtarge et al. 2023 build all models in Haiku; dm-haiku,
  `hk.Linear` and `hk.ConvND`.

  >>> kernel = haiku_init(jax.random.key(0), (400, 400))
  >>> round(float(kernel.std() * 400 ** 0.5), 2)
  0.88
  """
  fan_in = math.prod(shape[:-1])
  return jax.random.truncated_normal(key, -2, 2, shape, dtype) / fan_in**0.5


class Conv(nn.Module):
  """A convolution of stride one, with the parameters of `flax.linen.Conv`.

  `patches` copies each output's receptive field into a row and multiplies by
  the kernel as one matrix. Under `vmap` over client weights that stays one
  batched matrix product, where XLA's own convolution falls back to slow paths,
  and on CPU it is faster in any case. `native` is XLA's own. Both give the
  same numbers to rounding.

  Attributes:
    features: number of output channels.
    kernel_size: height and width.
    padding: `SAME` or `VALID`.
    form: `patches` or `native`; changes speed only.
    kernel_init: draws the kernel; the bias starts at zero.

  >>> x = jnp.ones((1, 4, 4, 2))
  >>> variables = Conv(3, (3, 3)).init(jax.random.key(0), x)
  >>> jax.tree.map(jnp.shape, variables['params'])
  {'bias': (3,), 'kernel': (3, 3, 2, 3)}
  >>> native = Conv(3, (3, 3), form='native').apply(variables, x)
  >>> bool(jnp.allclose(Conv(3, (3, 3)).apply(variables, x), native, atol=1e-6))
  True
  """

  features: int
  kernel_size: tuple[int, int]
  padding: Literal["SAME", "VALID"] = "SAME"
  form: ConvForm = "patches"
  kernel_init: nn.initializers.Initializer = haiku_init

  @nn.compact
  def __call__(self, x):
    """Maps `float[B, H, W, c]` to `float[B, H', W', features]`."""
    height, width = self.kernel_size
    kernel = self.param(
      "kernel",
      self.kernel_init,
      (height, width, x.shape[-1], self.features),
    )
    bias = self.param("bias", nn.initializers.zeros, (self.features,))
    if self.form == "native":
      y = jax.lax.conv_general_dilated(
        x,
        kernel,
        (1, 1),
        self.padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
      )
      return y + bias.reshape(1, 1, 1, -1)
    patches = extract_patches(x, self.kernel_size, self.padding)
    matrix = kernel.reshape(-1, self.features)
    rows = patches.reshape(-1, patches.shape[-1])
    if rows.shape[-1] > 4 * self.features:
      # The gradient of a tall kernel is faster as (cotangent^T patches)^T, 1.5
      # times on a CPU. The barrier keeps XLA from turning it around.
      matrix = jax.lax.optimization_barrier(matrix.T).T
    y = rows @ matrix + bias.reshape(1, -1)
    return y.reshape(*patches.shape[:-1], self.features)


def extract_patches(
  x: jax.Array, kernel_size: Sequence[int], padding: str
) -> jax.Array:
  """Copies each receptive field into a row, in the order of a kernel.

  Args:
    x: `float[B, H, W, c]`.
    kernel_size: height `h` and width `w`.
    padding: `SAME` or `VALID`.

  Returns:
    `float[B, H', W', h w c]`.

  >>> x = jnp.arange(6.).reshape(1, 2, 3, 1)
  >>> extract_patches(x, (2, 2), 'VALID')[0, 0].tolist()
  [[0.0, 1.0, 3.0, 4.0], [1.0, 2.0, 4.0, 5.0]]
  """
  height, width = kernel_size
  if padding == "SAME":
    pads = [((k - 1) // 2, k // 2) for k in kernel_size]
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
  rows = x.shape[1] - height + 1
  columns = x.shape[2] - width + 1
  return jnp.concatenate(
    [
      x[:, i : i + rows, j : j + columns]
      for i, j in itertools.product(range(height), range(width))
    ],
    axis=-1,
  )


def max_pool_2x2(x: jax.Array) -> jax.Array:
  """Maximum over disjoint 2x2 squares; odd rows and columns at the end drop.

  As three element-wise maxima, several times faster on CPU than a reduction
  over windows and its gradient. A tie's gradient is shared out.

  Args:
    x: `float[B, H, W, c]`.

  Returns:
    `float[B, H // 2, W // 2, c]`.

  >>> max_pool_2x2(jnp.arange(8.).reshape(1, 2, 4, 1)).ravel()
  Array([5., 7.], dtype=float32)
  """
  batch, height, width, channels = x.shape
  x = x[:, : height // 2 * 2, : width // 2 * 2]
  x = x.reshape(batch, height // 2, 2, width // 2, 2, channels)
  top = jnp.maximum(x[:, :, 0, :, 0], x[:, :, 0, :, 1])
  bottom = jnp.maximum(x[:, :, 1, :, 0], x[:, :, 1, :, 1])
  return jnp.maximum(top, bottom)


class PlanesConv(nn.Module):
  """`Conv` with the batch as the last axis, for convolutions of few channels.

  Pixels of one channel lie together, so that the kernel's few rows multiply
  one long matrix: on CPUs that is about twice as fast as the other way round
  where there are few channels, and pooling works on whole vectors. Under
  `vmap` over kernels, with the same images for all, it stays one product.

  Attributes:
    features: number of output channels.
    kernel_size: height and width.
    padding: `SAME` or `VALID`.
    kernel_init: draws the kernel; the bias starts at zero.

  >>> x = jax.random.normal(jax.random.key(0), (5, 6, 7, 2))
  >>> variables = Conv(3, (3, 3)).init(jax.random.key(1), x)
  >>> y = PlanesConv(3, (3, 3)).apply(variables, x.transpose(3, 1, 2, 0))
  >>> expected = Conv(3, (3, 3)).apply(variables, x)
  >>> bool(jnp.allclose(y.transpose(3, 1, 2, 0), expected, atol=1e-6))
  True
  """

  features: int
  kernel_size: tuple[int, int]
  padding: Literal["SAME", "VALID"] = "SAME"
  kernel_init: nn.initializers.Initializer = haiku_init

  @nn.compact
  def __call__(self, x):
    """Maps `float[c, H, W, B]` to `float[features, H', W', B]`."""
    height, width = self.kernel_size
    kernel = self.param(
      "kernel", self.kernel_init, (height, width, x.shape[0], self.features)
    )
    bias = self.param("bias", nn.initializers.zeros, (self.features,))
    if self.padding == "SAME":
      pads = [((k - 1) // 2, k // 2) for k in self.kernel_size]
      x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    rows, columns = x.shape[1] - height + 1, x.shape[2] - width + 1
    patches = jnp.concatenate(
      [
        x[:, i : i + rows, j : j + columns]
        for i, j in itertools.product(range(height), range(width))
      ]
    )
    matrix = kernel.reshape(-1, self.features).T
    y = matrix @ patches.reshape(len(patches), -1) + bias.reshape(-1, 1)
    return y.reshape(self.features, *patches.shape[1:])


def max_pool_planes(x: jax.Array) -> jax.Array:
  """`max_pool_2x2` of `float[c, H, W, B]`."""
  channels, height, width, batch = x.shape
  x = x[:, : height // 2 * 2, : width // 2 * 2]
  x = x.reshape(channels, height // 2, 2, width // 2, 2, batch)
  top = jnp.maximum(x[:, :, 0, :, 0], x[:, :, 0, :, 1])
  bottom = jnp.maximum(x[:, :, 1, :, 0], x[:, :, 1, :, 1])
  return jnp.maximum(top, bottom)
