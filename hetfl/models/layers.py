"""Layers shared by the models."""

import math
from typing import get_args, Literal

import flax.linen as nn
from flax.linen.dtypes import promote_dtype
import jax
import jax.numpy as jnp

from hetfl.models.kernels import ConvForm, convolution, products
from hetfl.models.kernels.convolution import Padding

DType = jax.typing.DTypeLike
Form = Literal[ConvForm, "planes"]
Initializer = nn.initializers.Initializer


def haiku_init(key, shape, dtype=jnp.float32):
  """Haiku's default weights: a truncated normal of scale `1 / sqrt(fan_in)`.

  The normal is truncated at two standard deviations and not rescaled, which
  leaves a standard deviation of `0.88 / sqrt(fan_in)`.

  Args:
    key: a random key.
    shape: the kernel's shape, outputs last.
    dtype: the kernel's type.

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
  """A convolution, with the parameters of `flax.linen.Conv`.

  `patches` copies each output's receptive field into a row, or a column where
  there are few channels, and multiplies by the kernel as one matrix. Under
  `vmap` over client weights this stays one batched matrix product, where
  XLA's own convolution falls back to slow paths, and on CPU it is faster in
  any case. `winograd` is the same except for 3x3 and 5x5 kernels with stride 1
  and at least 16 input channels, which take 2.25 to 3 times fewer
  multiplications, unless they are computed in bfloat16. `native` is XLA's own
  convolution. `planes` is `patches` for images `float[c, H, W, B]` of few
  channels; it needs `pool`, and strides of one. All forms give the same numbers
  up to rounding.

  Attributes:
    features: number of output channels.
    kernel_size: height and width.
    padding: `SAME` or `VALID`.
    form: `patches`, `winograd`, `native` or `planes`; changes speed only.
    kernel_init: draws the kernel; the bias starts at zero.
    strides: steps between receptive fields, down and across.
    pool: whether 2x2 max pooling follows. It is then applied before the bias,
      which gives the same outputs with a quarter of the additions.
    dtype: the type of the products' operands and of the outputs, such as
      `jnp.bfloat16`; `None` for that of inputs and kernel together. Parameters
      stay float32, and so do the sums of products and the bias's gradient's.

  Raises:
    ValueError: there is no such form or padding, or the images are too small.

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
  padding: Padding = "SAME"
  form: Form = "patches"
  kernel_init: Initializer = haiku_init
  strides: tuple[int, int] = (1, 1)
  pool: bool = False
  dtype: DType | None = None

  @nn.compact
  def __call__(self, x):
    """Maps `float[B, H, W, c]` to `float[B, H', W', features]`."""
    for name, known in ("form", get_args(Form)), ("padding", get_args(Padding)):
      if (value := getattr(self, name)) not in known:
        raise ValueError(f"{name}={value!r}: choose one of {known}")
    planes = self.form == "planes"
    if planes and (not self.pool or self.strides != (1, 1)):
      raise ValueError("form='planes': give pool=True, and no strides")
    channels = x.shape[0 if planes else -1]
    kernel, bias = _kernel_and_bias(self, (*self.kernel_size, channels))
    x, kernel = promote_dtype(x, kernel, dtype=self.dtype)
    if planes:
      return convolution.pooled_planes(x, kernel, bias, self.padding)
    y = convolution.conv(x, kernel, self.padding, self.form, self.strides)
    if self.pool:
      y = convolution.max_pool_2x2(y)
    return products.add_bias(y, bias)


def _kernel_and_bias(module, inputs):
  shape = *inputs, module.features
  kernel = module.param("kernel", module.kernel_init, shape, jnp.float32)
  zeros = nn.initializers.zeros
  return kernel, module.param("bias", zeros, shape[-1:], jnp.float32)


class Dense(nn.Module):
  """`flax.linen.Dense`, whose bias's gradient is always summed in float32.

  Flax's would sum that of a bfloat16 layer in bfloat16, which loses whatever is
  less than a 256th of the sum so far.

  Attributes:
    features: number of outputs.
    kernel_init: draws the kernel; the bias starts at zero.
    dtype: see `Conv`.

  >>> x = jnp.ones((3000, 1), jnp.bfloat16)
  >>> variables = {'params': {'kernel': jnp.ones((1, 1)), 'bias': jnp.ones(1)}}
  >>> def total(variables):
  ...   return Dense(1, dtype=x.dtype).apply(variables, x).sum(dtype='float32')
  >>> jax.grad(total)(variables)['params']['bias'].item()
  3000.0
  """

  features: int
  kernel_init: Initializer = haiku_init
  dtype: DType | None = None

  @nn.compact
  def __call__(self, x):
    """Maps `float[..., c]` to `float[..., features]`."""
    kernel, bias = _kernel_and_bias(self, x.shape[-1:])
    x, kernel = promote_dtype(x, kernel, dtype=self.dtype)
    return products.add_bias(x @ kernel, bias)


class Dropout(nn.Module):
  """`flax.linen.Dropout` with the faster draws of `hetfl.models.kernels`.

  Attributes:
    rate: share of elements that is dropped; below 1.
  """

  rate: float

  @nn.compact
  def __call__(self, x, train: bool):
    """Maps `float[...]` to the same shape; changes nothing if not `train`."""
    if not 0 <= self.rate < 1:
      raise ValueError(f"rate={self.rate}: must be at least 0 and below 1")
    if not train or not self.rate:
      return x
    return products.dropout(self.make_rng("dropout"), x, self.rate)
