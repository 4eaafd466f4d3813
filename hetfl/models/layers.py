"""Layers shared by the models."""

from collections.abc import Sequence
import functools
import math
from typing import get_args, Literal

import flax.linen as nn
from flax.linen.dtypes import promote_dtype
import jax
import jax.numpy as jnp
import numpy as np

from hetfl import core
from hetfl.models.winograd import check_size, winograd_conv

# Number of input channels from which Winograd's form is faster on CPUs.
MANY_CHANNELS = 16

ConvForm = Literal["patches", "winograd", "native"]
DType = jax.typing.DTypeLike
Padding = Literal["SAME", "VALID"]


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
  any case. `winograd` is the same except for 3x3 kernels with stride 1 and at
  least 16 input channels, which take 2.25 to 3 times fewer multiplications,
  unless they are computed in bfloat16; see `hetfl.models.winograd`. `native` is
  XLA's own convolution. All forms give the same numbers up to rounding.

  Attributes:
    features: number of output channels.
    kernel_size: height and width.
    padding: `SAME` or `VALID`.
    form: `patches`, `winograd` or `native`; changes speed only.
    kernel_init: draws the kernel; the bias starts at zero.
    strides: steps between receptive fields, down and across.
    pool: whether `max_pool_2x2` follows. It is then applied before the bias,
      which gives the same outputs with a quarter of the additions.
    dtype: the type of the products' factors and of the outputs, such as
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
  form: ConvForm = "patches"
  kernel_init: nn.initializers.Initializer = haiku_init
  strides: tuple[int, int] = (1, 1)
  pool: bool = False
  dtype: DType | None = None

  @nn.compact
  def __call__(self, x):
    """Maps `float[B, H, W, c]` to `float[B, H', W', features]`."""
    _check_choice("form", self.form, ConvForm)
    _check_choice("padding", self.padding, Padding)
    height, width = self.kernel_size
    kernel = self.param(
      "kernel",
      self.kernel_init,
      (height, width, x.shape[-1], self.features),
      jnp.float32,
    )
    bias = self.param(
      "bias", nn.initializers.zeros, (self.features,), jnp.float32
    )
    y = self._without_bias(*promote_dtype(x, kernel, dtype=self.dtype))
    if self.pool:
      y = max_pool_2x2(y)
    return add_bias(y, bias.reshape(1, 1, 1, -1))

  def _without_bias(self, x, kernel):
    """The convolution without bias, computed as `form` says."""
    if self.form == "native":
      return native_conv(x, kernel, self.strides, self.padding)
    tiled = self.kernel_size == (3, 3) and self.strides == (1, 1)
    tiled &= is_wide(x.dtype)
    if self.form == "winograd" and tiled and x.shape[-1] >= MANY_CHANNELS:
      return winograd_conv(x, kernel, self.padding)
    return patches_conv(x, kernel, self.strides, self.padding)


def is_wide(dtype: DType) -> bool:
  """Whether a type has the bits for Winograd's sums: float32, not bfloat16.

  >>> is_wide('float32'), is_wide(jnp.bfloat16)
  (True, False)
  """
  return jnp.dtype(dtype).itemsize >= 4


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
  """`y + bias` in y's type; the bias's gradient is summed in its own.

  Args:
    y: `float[..., f]`, such as bfloat16.
    bias: as many axes, such as float32.

  Returns:
    `float[..., f]`.

  >>> add_bias(jnp.ones((2, 1), jnp.bfloat16), jnp.ones((1, 1))).dtype
  dtype(bfloat16)
  """
  return (y + bias).astype(y.dtype)


def wide_product(a: jax.Array, b: jax.Array) -> jax.Array:
  """`a @ b` in float32 at least, of factors that may be bfloat16.

  The gradients of two narrow factors are products of their type, so the
  cotangent is rounded to it; there are no forward-mode derivatives of these.

  Args:
    a: `float[..., k]`.
    b: `float[k, m]`.

  Returns:
    `float32[..., m]`; float64 if one of them is.

  >>> a = jnp.array([[1., 2 ** -9]], jnp.bfloat16)
  >>> float(wide_product(a, a.T)[0, 0] - 1) * 2 ** 18
  1.0
  """
  if a.dtype != b.dtype or is_wide(a.dtype):
    return core.wide(a @ b)
  return _product_of_narrow(a, b)


@jax.custom_vjp
def _product_of_narrow(a, b):
  return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _narrow_backward(factors, cotangent):
  a, b = factors
  g = cotangent.astype(a.dtype)
  rows = lambda x: x.reshape(-1, x.shape[-1])
  return g @ b.T, rows(a).T @ rows(g)


_product_of_narrow.defvjp(
  lambda a, b: (_product_of_narrow(a, b), (a, b)), _narrow_backward
)


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
  kernel_init: nn.initializers.Initializer = haiku_init
  dtype: DType | None = None

  @nn.compact
  def __call__(self, x):
    """Maps `float[..., c]` to `float[..., features]`."""
    kernel = self.param(
      "kernel", self.kernel_init, (x.shape[-1], self.features), jnp.float32
    )
    bias = self.param(
      "bias", nn.initializers.zeros, (self.features,), jnp.float32
    )
    x, kernel = promote_dtype(x, kernel, dtype=self.dtype)
    return add_bias(x @ kernel, bias.reshape((1,) * (x.ndim - 1) + (-1,)))


def native_conv(x, kernel, strides, padding):
  """XLA's own convolution of `float[B, H, W, c]` by `float[h, w, c, f]`.

  Args:
    x: `float[B, H, W, c]`.
    kernel: `float[h, w, c, f]`.
    strides: steps between receptive fields, down and across.
    padding: `SAME` or `VALID`.

  Returns:
    `float[B, H', W', f]`.

  Raises:
    ValueError: as `check_size`.

  >>> x = jnp.arange(6.).reshape(1, 2, 3, 1)
  >>> native_conv(x, jnp.ones((2, 2, 1, 1)), (1, 1), 'VALID').ravel()
  Array([ 8., 12.], dtype=float32)
  """
  # XLA would give an empty map of images that are too small.
  check_size(x.shape[1:3], kernel.shape[:2], padding)
  return jax.lax.conv_general_dilated(
    x,
    kernel,
    strides,
    padding,
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
  )


def patches_conv(x, kernel, strides, padding):
  """`native_conv` as one matrix product.

  Args:
    x: `float[B, H, W, c]`.
    kernel: `float[h, w, c, f]`.
    strides: see `native_conv`.
    padding: see `native_conv`.

  Returns:
    `float[B, H', W', f]`.

  Raises:
    ValueError: as `extract_patches`.

  >>> x = jnp.arange(6.).reshape(1, 2, 3, 1)
  >>> patches_conv(x, jnp.ones((2, 2, 1, 1)), (1, 1), 'VALID').ravel()
  Array([ 8., 12.], dtype=float32)
  """
  *size, channels, features = kernel.shape
  matrix = kernel.reshape(-1, features)
  if channels < MANY_CHANNELS:
    # One row for each entry of the kernel: an image's rows are copied whole.
    places = _all_places(x.transpose(3, 0, 1, 2), 2, size, padding, strides)
    shape = *places[0].shape[1:], features
    rows = jnp.stack(places).reshape(len(matrix), -1)
    return (rows.T @ matrix).reshape(shape)
  patches = extract_patches(x, size, padding, strides)
  if len(matrix) > features:
    # The gradient of a tall kernel is faster as (cotangent^T patches)^T, on
    # CPUs up to 1.5 times. The barrier keeps XLA from reversing this.
    matrix = jax.lax.optimization_barrier(matrix.T).T
  y = patches.reshape(-1, patches.shape[-1]) @ matrix
  return y.reshape(*patches.shape[:-1], features)


def _check_choice(name, value, choices):
  """Raises a `ValueError` unless the value is among a `Literal`'s values."""
  if value not in get_args(choices):
    raise ValueError(f"{name}={value!r}: choose one of {get_args(choices)}")


def extract_patches(
  x: jax.Array,
  kernel_size: Sequence[int],
  padding: Padding,
  strides: Sequence[int] = (1, 1),
) -> jax.Array:
  """Copies each receptive field into a row, ordered like a kernel's entries.

  Args:
    x: `float[B, H, W, c]`.
    kernel_size: height `h` and width `w`.
    padding: `SAME` or `VALID`.
    strides: steps between receptive fields, down and across.

  Returns:
    `float[B, H', W', h w c]`.

  Raises:
    ValueError: there is no such padding, or an image is too small for it.

  >>> x = jnp.arange(6.).reshape(1, 2, 3, 1)
  >>> extract_patches(x, (2, 2), 'VALID')[0, 0].tolist()
  [[0.0, 1.0, 3.0, 4.0], [1.0, 2.0, 4.0, 5.0]]
  """
  if jax.default_backend() != "gpu":
    x = _padded(x, 1, kernel_size, padding, strides)
    return _joined_patches(x, kernel_size, strides)
  # Without the barrier XLA would compute what x comes from, such as a pooling,
  # once for each place in a window.
  x = jax.lax.optimization_barrier(x)
  x = _padded(x, 1, kernel_size, padding, strides)
  height, width = kernel_size
  return _gathered_patches(x, (height, width), tuple(strides))


def _joined_patches(x, kernel_size, strides):
  """The patches of padded images, joined from one slice for each place."""
  return jnp.concatenate(_windows(x, 1, kernel_size, strides), axis=-1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _gathered_patches(x, kernel_size, strides):
  """The same, gathered pixel by pixel: fewer decisions in a GPU's kernel.

  The derivatives are those of the joined patches, which scatter nothing.
  """
  batch, height, width, channels = x.shape
  pixels = np.arange(height * width, dtype=np.int32).reshape(height, width)
  pixels = np.lib.stride_tricks.sliding_window_view(pixels, kernel_size)
  pixels = pixels[:: strides[0], :: strides[1]]
  rows = x.reshape(batch, height * width, channels)
  patches = rows.at[:, pixels.ravel()].get(mode="promise_in_bounds")
  return patches.reshape(
    batch, *pixels.shape[:2], math.prod(kernel_size) * channels
  )


@_gathered_patches.defjvp
def _(kernel_size, strides, primals, tangents):
  return (
    _gathered_patches(*primals, kernel_size, strides),
    _joined_patches(*tangents, kernel_size, strides),
  )


def _all_places(x, axis, kernel_size, padding, strides):
  """For each place in a kernel, row by row, the entries of all windows there.

  `x` has an image's height and width at `axis` and the one after it.
  """
  x = _padded(x, axis, kernel_size, padding, strides)
  return _windows(x, axis, kernel_size, strides)


def _padded(x, axis, kernel_size, padding, strides):
  """Pads images with zeros, so that `VALID` windows become the padding's."""
  _check_choice("padding", padding, Padding)
  sizes = x.shape[axis : axis + 2]
  check_size(sizes, kernel_size, padding)
  if padding == "VALID":
    return x
  totals = [
    max(-(-size // s) * s - s + k - size, 0)
    for size, k, s in zip(sizes, kernel_size, strides)
  ]
  pads = [(0, 0)] * x.ndim
  pads[axis : axis + 2] = [(total // 2, total - total // 2) for total in totals]
  return jnp.pad(x, pads)


def _windows(x, axis, kernel_size, strides):
  """`_all_places` of padded images."""
  rows = _places(x, axis, kernel_size[0], strides[0])
  return [
    place
    for row in rows
    for place in _places(row, axis + 1, kernel_size[1], strides[1])
  ]


def _places(x, axis, size, stride):
  """For each place in a window, the entries of all windows along an axis."""
  span = (x.shape[axis] - size) // stride * stride + 1
  return [
    jax.lax.slice_in_dim(x, i, i + span, stride, axis) for i in range(size)
  ]


def max_pool_2x2(x: jax.Array) -> jax.Array:
  """Maximum over disjoint 2x2 squares; drops an odd last row or column.

  Computed as three element-wise maxima, which are several times faster on CPU,
  gradient included, than a reduction over windows. Ties share the gradient;
  on TPUs, for which a reduction is the faster form, the first takes all.

  Args:
    x: `float[B, H, W, c]`.

  Returns:
    `float[B, H // 2, W // 2, c]`.

  Raises:
    ValueError: the images are smaller than 2x2.

  >>> max_pool_2x2(jnp.arange(8.).reshape(1, 2, 4, 1)).ravel()
  Array([5., 7.], dtype=float32)
  """
  batch, height, width, channels = x.shape
  rows, columns = height // 2, width // 2
  if rows < 1 or columns < 1:
    raise ValueError(
      f"a map of {height}x{width} is too small for 2x2 pooling: use larger"
      " images, or pool less often"
    )
  if jax.default_backend() == "tpu":
    return nn.max_pool(x, (2, 2), (2, 2))
  x = x[:, : 2 * rows, : 2 * columns]
  x = x.reshape(batch, rows, 2, columns, 2, channels)
  # By `split`, whose gradient joins the places in one operation.
  top, bottom = (
    jnp.maximum(*jax.lax.split(row, (1, 1), 4))
    for row in jax.lax.split(x, (1, 1), 2)
  )
  return jnp.maximum(top, bottom).reshape(batch, rows, columns, channels)


class PooledPlanes(nn.Module):
  """`Conv` and `max_pool_2x2` with the batch as the last axis.

  For convolutions with few channels: the pixels of a channel are contiguous, so
  that the kernel's few rows multiply long matrices, on CPUs about twice as fast
  as the other way round. The four outputs of a pooling square see a window one
  pixel wider and higher than the kernel. One product of these windows with the
  kernel in its four places, zeros elsewhere, gives all four; for 3x3 kernels,
  with which nearly half of the entries would be zeros, there are two products
  of two places each.

  Attributes:
    features: number of output channels.
    kernel_size: height and width.
    padding: `SAME` or `VALID`.
    kernel_init: draws the kernel; the bias starts at zero.
    dtype: see `Conv`.

  Raises:
    ValueError: the images are too small, or there is no such padding.

  >>> x = jax.random.normal(jax.random.key(0), (5, 6, 7, 2))
  >>> variables = Conv(3, (3, 3)).init(jax.random.key(1), x)
  >>> y = PooledPlanes(3, (3, 3)).apply(variables, x.transpose(3, 1, 2, 0))
  >>> expected = max_pool_2x2(Conv(3, (3, 3)).apply(variables, x))
  >>> bool(jnp.allclose(y.transpose(3, 1, 2, 0), expected, atol=1e-6))
  True
  """

  features: int
  kernel_size: tuple[int, int]
  padding: Padding = "SAME"
  kernel_init: nn.initializers.Initializer = haiku_init
  dtype: DType | None = None

  @nn.compact
  def __call__(self, x):
    """Maps `float[c, H, W, B]` to `float[features, H' // 2, W' // 2, B]`."""
    _check_choice("padding", self.padding, Padding)
    height, width = self.kernel_size
    kernel = self.param(
      "kernel",
      self.kernel_init,
      (height, width, x.shape[0], self.features),
      jnp.float32,
    )
    bias = self.param(
      "bias", nn.initializers.zeros, (self.features,), jnp.float32
    )
    x, kernel = promote_dtype(x, kernel, dtype=self.dtype)
    if self.padding == "SAME":
      pads = [((k - 1) // 2, k // 2) for k in self.kernel_size]
      x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    rows, columns = (
      (x.shape[1] - height + 1) // 2,
      (x.shape[2] - width + 1) // 2,
    )
    if rows < 1 or columns < 1:
      raise ValueError(
        f"a map of {x.shape[1]}x{x.shape[2]} is too small for a"
        f" {height}x{width} convolution and 2x2 pooling: use larger images"
      )
    # All places across, then all places down, of windows at every other pixel.
    strips = jnp.concatenate(_places(x, 2, width + 1, 2))

    def outputs(first, last):
      """The outputs in rows `first` to `last` of each square."""
      size = height + last - first
      windows = jnp.concatenate(
        _places(strips[:, first : first + size + 2 * rows - 2], 1, size, 2)
      )
      matrix = jnp.concatenate(
        [
          jnp.pad(kernel, ((i, last - first - i), (j, 1 - j), (0, 0), (0, 0)))
          for i in range(last - first + 1)
          for j in (0, 1)
        ],
        axis=-1,
      ).reshape(len(windows), -1)
      product = matrix.T @ windows.reshape(len(windows), -1)
      return jnp.split(product, matrix.shape[-1] // self.features)

    places = outputs(0, 1) if height > 3 else outputs(0, 0) + outputs(1, 1)
    top, bottom = jnp.maximum(*places[:2]), jnp.maximum(*places[2:])
    y = add_bias(jnp.maximum(top, bottom), bias.reshape(-1, 1))
    return y.reshape(self.features, rows, columns, -1)


def avg_pool_2x2(x: jax.Array, stride: int) -> jax.Array:
  """Mean over 2x2 squares, as in Keras's `AveragePooling2D`.

  With stride 1 the map keeps its size (`SAME`): at the last row and column the
  squares extend beyond the image, and their mean is over the entries inside.
  With stride 2 the squares are disjoint and an odd last row or column is
  dropped (`VALID`).

  Args:
    x: `float[B, H, W, c]`.
    stride: 1 or 2.

  Returns:
    `float[B, H, W, c]`, or `float[B, H // 2, W // 2, c]`.

  >>> x = jnp.arange(4.).reshape(1, 2, 2, 1)
  >>> avg_pool_2x2(x, 1)[0, :, :, 0].tolist()
  [[1.5, 2.0], [2.5, 3.0]]
  >>> avg_pool_2x2(x, 2).ravel()
  Array([1.5], dtype=float32)
  """
  end = 1 if stride == 1 else 0
  total = jax.lax.reduce_window(
    x,
    np.zeros((), x.dtype),  # has a gradient only if this is a constant
    jax.lax.add,
    (1, 2, 2, 1),
    (1, stride, stride, 1),
    ((0, 0), (0, end), (0, end), (0, 0)),
  )
  # One over the number of a square's rows, and columns, inside the image.
  rows, columns = (np.full(n, 0.5) for n in total.shape[1:3])
  if end:
    rows[-1] = columns[-1] = 1
  share = np.outer(rows, columns)[None, :, :, None]
  return total * jnp.asarray(share, x.dtype)


class Dropout(nn.Module):
  """Drops single elements and scales up the others, as `flax.linen.Dropout`.

  The draws are hashes of a counter (murmur3's finaliser, twice, each with a
  word of the key), several times faster on CPU than JAX's generator, which
  would take up to half the time of a small CNN's step.

  Attributes:
    rate: share of elements that is dropped; below 1.

  >>> x = jnp.ones((100, 100))
  >>> key = {'dropout': jax.random.key(0)}
  >>> y = Dropout(0.2).apply({}, x, True, rngs=key)
  >>> sorted(set(y.ravel().tolist())), round(float((y == 0).mean()), 2)
  ([0.0, 1.25], 0.2)
  """

  rate: float

  @nn.compact
  def __call__(self, x, train: bool):
    """Maps `float[...]` to the same shape; changes nothing if not `train`."""
    if not 0 <= self.rate < 1:
      raise ValueError(f"rate={self.rate}: must be at least 0 and below 1")
    if not train or not self.rate:
      return x
    key = jax.random.bits(self.make_rng("dropout"), (2,), jnp.uint32)
    count = jax.lax.iota(jnp.uint32, x.size)
    draw = _mix(_mix(count + key[:1]) ^ key[1:]).reshape(x.shape)
    kept = draw >= np.uint32(self.rate * 2**32)
    return jnp.where(kept, x / (1 - self.rate), jnp.zeros((), x.dtype))


def _mix(h):
  """murmur3's finaliser: a bijection in which every bit changes every bit."""
  h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
  h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
  return h ^ (h >> 16)
