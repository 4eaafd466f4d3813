"""Convolutions and pooling of images, as products and element-wise maxima."""

from collections.abc import Sequence
import functools
import operator
from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hetfl.models import kernels
from hetfl.models.kernels.products import add_bias, is_wide

# Number of input channels from which Winograd's form is faster on CPUs, and
# from which patches lie in rows.
_MANY_CHANNELS = 16

# Where Winograd's polynomials are evaluated, besides infinity, by the number of
# a tile's inputs along an axis. 2/3 and 3/2 give 0.7 of the error of the usual
# 1 and 2.
_POINTS = {4: (0, 1, -1), 6: (0, 2 / 3, -2 / 3, 3 / 2, -3 / 2)}

Padding = Literal["SAME", "VALID"]


def takes_tiles(
  kernel_size: Sequence[int], channels: int, dtype: jax.typing.DTypeLike
) -> bool:
  """Whether the form `winograd` computes a layer in tiles, not as patches.

  Args:
    kernel_size: height and width.
    channels: the number of input channels.
    dtype: the type of the products' operands.

  Returns:
    Whether it does, if the layer has no strides.

  >>> takes_tiles((3, 3), 16, 'float32'), takes_tiles((3, 3), 16, 'bfloat16')
  (True, False)
  """
  many = channels >= _MANY_CHANNELS
  return many and tuple(kernel_size) in ((3, 3), (5, 5)) and is_wide(dtype)


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
  tiled = form == "winograd" and tuple(strides) == (1, 1)
  if tiled and takes_tiles(size, channels, x.dtype):
    return winograd_conv(x, kernel, padding)
  return _patches_conv(x, kernel, padding, strides)


def _check_size(sizes, kernel_size, padding):
  """XLA would give an empty map for images that are too small."""
  if padding == "VALID" and not all(map(operator.ge, sizes, kernel_size)):
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
  width = kernel_size[0] * kernel_size[1] * channels
  return patches.reshape(batch, *pixels.shape[:2], width)


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
  place = lambda i: jax.lax.slice_in_dim(x, i, i + span, stride, axis)
  return [place(i) for i in range(size)]


def winograd_conv(x: jax.Array, kernel: jax.Array, padding: str) -> jax.Array:
  """A 3x3 or 5x5 convolution of stride 1 with a third of the products.

  Outputs of 3x3 kernels come in tiles of 4x2, each from 6x4 inputs `d`:
  `Y = A^T [(G g G^T) * (B^T d B)] A`, where `*` is elementwise. Summed over
  channels, each of the 24 places is a matrix product of all tiles by one
  transformed kernel; the transforms before and after are sums of a few inputs
  or products. The gradients have the same form, by the same identities. So 24
  products take the place of 72. Where tiles of 4x2 would overhang the image so
  far that they need no fewer products than tiles of 2x2, the tiles are 2x2,
  with 16 products in place of 36; those of 5x5 kernels are 2x2 always, with 36
  in place of 100.

  Args:
    x: `float[B, H, W, c]`.
    kernel: `float[n, n, c, f]`; n is 3 or 5.
    padding: `SAME` or `VALID`.

  Returns:
    `float[B, H', W', f]`, a convolution's outputs up to rounding: in float32
    about as far from the float64 result as the other forms of `layers.Conv`;
    with 5x5 kernels up to twice as far.

  Reference: Lavin & Gray 2016, "Fast Algorithms for Convolutional Neural
    Networks", equations 7 to 9: F(2x2, 3x3), F(4x2, 3x3) and F(2x2, 5x5).
    Departure: of tiles with 6 inputs the points c, -c, 1/c and -1/c of Alam et
    al. 2022, "Winograd Convolution for Deep Neural Networks: Efficient Point
    Selection".

  >>> x = jnp.arange(20.).reshape(1, 4, 5, 1)
  >>> winograd_conv(x, jnp.ones((3, 3, 1, 1)), 'VALID')[0, :, :, 0].tolist()
  [[54.0, 63.0, 72.0], [99.0, 108.0, 117.0]]
  """
  batch, height, width, channels = x.shape
  side, features = kernel.shape[0], kernel.shape[-1]
  before = side // 2 if padding == "SAME" else 0
  height, width = (n + 1 - side + 2 * before for n in (height, width))
  tile = _down(height, side), 2
  tiles = [-(-n // m) for n, m in zip((height, width), tile)]
  # Each tile's inputs overlap with those of the next.
  pads = [
    (before, m * (n + _later(m, side)) - before - size)
    for m, n, size in zip(tile, tiles, x.shape[1:])
  ]
  x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
  down, across = (_transforms(m, side) for m in tile)
  overlapping = lambda x, axis: _overlapping(x, axis, tile[axis - 1], side)
  rows = _apply(down.inputs, overlapping(x, 1))
  inputs = [_apply(across.inputs, overlapping(d, 2)) for d in rows]
  rows = _apply(down.kernel, _split(kernel, 0))
  factors = [_apply(across.kernel, _split(row, 0)) for row in rows]
  shape = batch, *tiles, features
  product = lambda d, g: jax.lax.dot(d.reshape(-1, channels), g).reshape(shape)
  products = [list(map(product, *places)) for places in zip(inputs, factors)]
  columns = [_apply(down.outputs, places) for places in zip(*products)]
  rows = [_stack(_apply(across.outputs, row), 3) for row in zip(*columns)]
  y = _stack(rows, 2)
  y = y.reshape(batch, tile[0] * tiles[0], tile[1] * tiles[1], features)
  return y[:, :height, :width]


class _Transforms(NamedTuple):
  """The matrices of F(m, r), whose m outputs take n = m + r - 1 products.

  Points come in pairs, p and -p. For each pair, one factor of a matrix makes
  the even and the odd part, the other their sum and difference.

  Attributes:
    inputs: `B^T`, `float[n, n]`.
    kernel: `G`, `float[n, r]`.
    outputs: `A^T`, `float[m, n]`.
  """

  inputs: tuple[np.ndarray, np.ndarray]
  kernel: tuple[np.ndarray, np.ndarray]
  outputs: tuple[np.ndarray, np.ndarray]


@functools.cache
def _transforms(m: int, r: int) -> _Transforms:
  """The Toom-Cook algorithm at `_POINTS[m + r - 1]` and infinity.

  >>> parts, pairs = _transforms(2, 3).outputs
  >>> (parts @ pairs).tolist()
  [[1.0, 1.0, 1.0, 0.0], [0.0, 1.0, -1.0, 1.0]]
  """
  n = m + r - 1
  points = np.array(_POINTS[n], float)
  others = [np.delete(points, i) for i in range(n - 1)]
  scale = [np.prod(p - other) for p, other in zip(points, others)]
  powers = lambda number: points[:, None] ** np.arange(number)
  last = lambda number: np.eye(number)[-1:]
  # The polynomial whose roots are all other points, lowest power first.
  basis = [np.append(np.poly(other)[::-1], 0) for other in others]
  inputs = np.stack([*basis, np.poly(points)[::-1]])
  kernel = np.concatenate([powers(r) / np.reshape(scale, (-1, 1)), last(r)])
  outputs = np.concatenate([powers(m), last(m)]).T
  pairs = np.eye(n)
  pairs[1:-1, 1:-1] = np.kron(np.eye(n // 2 - 1), [[1, 1], [1, -1]])
  parts = np.linalg.inv(pairs)
  exact = lambda matrix: np.where(abs(matrix) < 1e-12, 0, matrix)
  return _Transforms(
    inputs=(pairs, exact(parts @ inputs)),
    kernel=(pairs, exact(parts @ kernel)),
    outputs=(exact(outputs @ parts), pairs),
  )


def _down(height: int, side: int) -> int:
  """The height of tiles, in outputs, that needs the fewest products.

  >>> [_down(height, 3) for height in (6, 7, 12, 28)], _down(12, 5)
  ([2, 4, 4, 4], 2)
  """
  heights = [n + 1 - side for n in _POINTS if n > side]
  return min(heights, key=lambda m: -(-height // m) * (m + side - 1))


def _later(m, side):
  """How many blocks of m entries, after its own, a tile reaches into."""
  return -(-(side - 1) // m)


def _overlapping(x, axis, m, side):
  """For each place in tiles of m + side - 1 entries, all tiles' entries."""
  blocks, shape = x.shape[axis] // m, x.shape
  tiles = blocks - _later(m, side)
  x = x.reshape(*shape[:axis], blocks, m, *shape[axis + 1 :])
  places = _split(x, axis + 1)

  def entries(block, place):
    part = places[place]
    return jax.lax.slice_in_dim(part, block, block + tiles, axis=axis)

  return [entries(*divmod(i, m)) for i in range(m + side - 1)]


def _split(x, axis):
  """The entries along an axis; their gradients are joined in one operation."""
  parts = jax.lax.split(x, (1,) * x.shape[axis], axis)
  return [jax.lax.squeeze(part, (axis,)) for part in parts]


def _stack(arrays, axis):
  """`jnp.stack`; with its gradient XLA would compile half as long again."""
  arrays = [jax.lax.expand_dims(a, (axis,)) for a in arrays]
  return jax.lax.concatenate(arrays, axis)


def _apply(factors, arrays):
  """A product of matrices times a vector of arrays, without idle terms.

  By `lax`, since programs of hundreds of `jnp`'s operations take long to trace;
  and XLA compiles and fuses products by 1 and 0 worse than none.
  """
  for matrix in reversed(factors):
    arrays = [functools.reduce(_add, zip(row, arrays), None) for row in matrix]
  return arrays


def _add(total, term):
  """`total + c a` for a term `(c, a)`; `None` is no sum yet."""
  c, a = term
  if c == 0:
    return total
  if abs(c) != 1:
    c, a = 1, jax.lax.mul(a, np.asarray(c, a.dtype))
  if total is None:
    return a if c == 1 else jax.lax.neg(a)
  return jax.lax.add(total, a) if c == 1 else jax.lax.sub(total, a)


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
  halves = lambda x, axis: jax.lax.split(x, (1, 1), axis)
  top, bottom = (jnp.maximum(*halves(row, 4)) for row in halves(x, 2))
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
    seen = strips[:, first : first + size + 2 * rows - 2]
    windows = jnp.concatenate(_places(seen, 1, size, 2))
    placed = [
      jnp.pad(kernel, ((i, size - height - i), (j, 1 - j), (0, 0), (0, 0)))
      for i in range(size - height + 1)
      for j in (0, 1)
    ]
    matrix = jnp.concatenate(placed, axis=-1).reshape(len(windows), -1)
    product = matrix.T @ windows.reshape(len(windows), -1)
    return jnp.split(product, matrix.shape[-1] // features)

  places = outputs(0, 1) if height > 3 else outputs(0, 0) + outputs(1, 1)
  top, bottom = jnp.maximum(*places[:2]), jnp.maximum(*places[2:])
  y = add_bias(jnp.maximum(top, bottom), bias.reshape(-1, 1))
  return y.reshape(features, rows, columns, -1)
