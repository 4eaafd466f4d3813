"""Convolutions and pooling of images, as products and element-wise maxima."""

from collections.abc import Sequence
import functools
import math
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hetfl.models import kernels
from hetfl.models.kernels.products import add_bias, is_wide
from hetfl.models.kernels.winograd import winograd_conv

# Number of input channels from which Winograd's form is faster on CPUs, and
# from which patches lie in rows.
_MANY_CHANNELS = 16

Padding = Literal["SAME", "VALID"]


def takes_tiles(
  kernel_size: Sequence[int],
  channels: int,
  dtype: jax.typing.DTypeLike,
  strides: Sequence[int] = (1, 1),
) -> bool:
  """Whether the form `winograd` computes a layer in tiles, not as patches.

  Args:
    kernel_size: height and width.
    channels: the number of input channels.
    dtype: the type of the products' factors.
    strides: steps between receptive fields, down and across.

  >>> takes_tiles((3, 3), 16, 'float32'), takes_tiles((3, 3), 16, 'bfloat16')
  (True, False)
  """
  three = tuple(kernel_size) == (3, 3) and tuple(strides) == (1, 1)
  return three and channels >= _MANY_CHANNELS and is_wide(dtype)


def conv(
  x: jax.Array,
  kernel: jax.Array,
  padding: Padding = "SAME",
  form: kernels.ConvForm = "patches",
  strides: Sequence[int] = (1, 1),
) -> jax.Array:
  """A convolution.

  Args:
    x: `float[B, H, W, c]`.
    kernel: `float[h, w, c, f]`.
    padding: `SAME` or `VALID`.
    form: see `hetfl.models.layers.Conv`; changes speed only.
    strides: steps between receptive fields, down and across.

  Returns:
    `float[B, H', W', f]`.

  Raises:
    ValueError: the images are too small.

  >>> x, kernel = jnp.arange(6.).reshape(1, 2, 3, 1), jnp.ones((2, 2, 1, 1))
  >>> for form in ('native', 'patches'):
  ...   print(conv(x, kernel, 'VALID', form).ravel().tolist())
  [8.0, 12.0]
  [8.0, 12.0]
  """
  *size, channels, _ = kernel.shape
  _check_size(x.shape[1:3], size, padding)
  if form == "native":
    return jax.lax.conv_general_dilated(
      x, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
  if form == "winograd" and takes_tiles(size, channels, x.dtype, strides):
    return winograd_conv(x, kernel, padding)
  return _patches_conv(x, kernel, padding, strides)


def _check_size(sizes, kernel_size, padding):
  """XLA would give an empty map of images that are too small."""
  least = kernel_size if padding == "VALID" else (1, 1)
  if any(size < low for size, low in zip(sizes, least)):
    raise ValueError(
      f"images of {sizes[0]}x{sizes[1]} are too small for a convolution of"
      f" {kernel_size[0]}x{kernel_size[1]}, padding={padding!r}"
    )


def _patches_conv(x, kernel, padding, strides):
  """A convolution as one matrix product."""
  *size, channels, features = kernel.shape
  matrix = kernel.reshape(-1, features)
  if channels < _MANY_CHANNELS:
    # One row for each entry of the kernel: an image's rows are copied whole.
    x = _padded(x.transpose(3, 0, 1, 2), 2, size, padding, strides)
    places = _windows(x, 2, size, strides)
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

  >>> x = jnp.arange(6.).reshape(1, 2, 3, 1)
  >>> extract_patches(x, (2, 2), 'VALID')[0, 0].tolist()
  [[0.0, 1.0, 3.0, 4.0], [1.0, 2.0, 4.0, 5.0]]
  """
  size, strides = tuple(kernel_size), tuple(strides)
  if kernels.forms().patches == "joined":
    return _joined(_padded(x, 1, size, padding, strides), size, strides)
  # Without the barrier XLA would compute what x comes from, such as a pooling,
  # once for each place in a window.
  x = jax.lax.optimization_barrier(x)
  return _gathered(_padded(x, 1, size, padding, strides), size, strides)


def _joined(x, kernel_size, strides):
  """The patches of padded images, joined from one slice for each place."""
  return jnp.concatenate(_windows(x, 1, kernel_size, strides), axis=-1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _gathered(x, kernel_size, strides):
  """The same, gathered pixel by pixel.

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


@_gathered.defjvp
def _(kernel_size, strides, primals, tangents):
  of_tangents = _joined(*tangents, kernel_size, strides)
  return _gathered(*primals, kernel_size, strides), of_tangents


def _padded(x, axis, kernel_size, padding, strides):
  """Pads images, whose height is at `axis`: `VALID` windows are then all."""
  if padding == "VALID":
    return x
  pads = [(0, 0)] * x.ndim
  pads[axis : axis + 2] = jax.lax.padtype_to_pads(
    x.shape[axis : axis + 2], kernel_size, strides, padding
  )
  return jnp.pad(x, pads)


def _windows(x, axis, kernel_size, strides):
  """For each place in a kernel, row by row, the entries of all windows there.

  `x` has an image's height and width at `axis` and the one after it.
  """
  return [
    place
    for row in _places(x, axis, kernel_size[0], strides[0])
    for place in _places(row, axis + 1, kernel_size[1], strides[1])
  ]


def _places(x, axis, size, stride):
  """For each place in a window, the entries of all windows along an axis."""
  span = (x.shape[axis] - size) // stride * stride + 1
  return [
    jax.lax.slice_in_dim(x, i, i + span, stride, axis) for i in range(size)
  ]


def _halves(height, width):
  """Numbers of 2x2 squares, down and across."""
  if min(height, width) < 2:
    raise ValueError(
      f"a map of {height}x{width} is too small for 2x2 pooling: use larger"
      " images, or pool less often"
    )
  return height // 2, width // 2


def max_pool_2x2(x: jax.Array) -> jax.Array:
  """Maximum over disjoint 2x2 squares; drops an odd last row or column.

  As element-wise maxima, ties share the gradient; in a reduction over windows
  the first takes all.

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
  rows, columns = _halves(height, width)
  if kernels.forms().pooling == "reduction":
    return nn.max_pool(x, (2, 2), (2, 2))
  x = x[:, : 2 * rows, : 2 * columns]
  x = x.reshape(batch, rows, 2, columns, 2, channels)
  # By `split`, whose gradient joins the places in one operation.
  top, bottom = (
    jnp.maximum(*jax.lax.split(row, (1, 1), 4))
    for row in jax.lax.split(x, (1, 1), 2)
  )
  return jnp.maximum(top, bottom).reshape(batch, rows, columns, channels)


def pooled_planes(
  x: jax.Array, kernel: jax.Array, bias: jax.Array, padding: Padding = "SAME"
) -> jax.Array:
  """`conv`, `max_pool_2x2` and the bias, with the batch as the last axis.

  For convolutions with few channels: the pixels of a channel are contiguous, so
  that the kernel's few rows multiply long matrices, on CPUs about twice as fast
  as the other way round. The four outputs of a pooling square see a window one
  pixel wider and higher than the kernel. One product of these windows with the
  kernel in its four places, zeros elsewhere, gives all four; for 3x3 kernels,
  with which nearly half of the entries would be zeros, there are two products
  of two places each.

  Args:
    x: `float[c, H, W, B]`.
    kernel: `float[h, w, c, f]`.
    bias: `float[f]`.
    padding: `SAME` or `VALID`.

  Returns:
    `float[f, H' // 2, W' // 2, B]`.

  Raises:
    ValueError: the images are too small.

  >>> x = jax.random.normal(jax.random.key(0), (5, 6, 7, 2))
  >>> kernel = jax.random.normal(jax.random.key(1), (3, 3, 2, 4))
  >>> y = pooled_planes(x.transpose(3, 1, 2, 0), kernel, jnp.zeros(4))
  >>> expected = max_pool_2x2(conv(x, kernel))
  >>> bool(jnp.allclose(y.transpose(3, 1, 2, 0), expected, atol=1e-5))
  True
  """
  height, width, _, features = kernel.shape
  _check_size(x.shape[1:3], (height, width), padding)
  x = _padded(x, 1, (height, width), padding, (1, 1))
  rows, columns = _halves(x.shape[1] - height + 1, x.shape[2] - width + 1)
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
    return jnp.split(product, matrix.shape[-1] // features)

  places = outputs(0, 1) if height > 3 else outputs(0, 0) + outputs(1, 1)
  top, bottom = jnp.maximum(*places[:2]), jnp.maximum(*places[2:])
  y = add_bias(jnp.maximum(top, bottom), bias.reshape(-1, 1))
  return y.reshape(features, rows, columns, -1)


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
