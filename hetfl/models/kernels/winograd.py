"""Winograd's form of a 3x3 convolution."""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Where polynomials are evaluated, besides infinity, by the number of a tile's
# outputs along an axis. 2/3 and 3/2 give 0.7 of the error of the usual 1 and 2.
_POINTS = {2: (0, 1, -1), 4: (0, 2 / 3, -2 / 3, 3 / 2, -3 / 2)}


def winograd_conv(
  x: jax.Array, kernel: jax.Array, padding: str = "SAME"
) -> jax.Array:
  """A 3x3 convolution of stride 1 with 24 products in place of 72.

  Outputs come in tiles of 4x2, each from 6x4 inputs `d`:
  `Y = A^T [(G g G^T) * (B^T d B)] A`, where `*` is elementwise. Summed over
  channels, each of the 24 places is a matrix product of all tiles by one
  transformed kernel; the transforms before and after are sums of a few inputs
  or products. The gradients have the same form, by the same identities. Where
  tiles of 4x2 would overhang the image so far that they need no fewer products
  than tiles of 2x2, the tiles are 2x2, with 16 products in place of 36.

  Args:
    x: `float[B, H, W, c]`.
    kernel: `float[3, 3, c, f]`.
    padding: `SAME` or `VALID`.

  Returns:
    `float[B, H', W', f]`, a convolution's outputs up to rounding: in float32
    about as far from the float64 result as the other forms of `layers.Conv`.

  Reference: Lavin & Gray 2016, "Fast Algorithms for Convolutional Neural
    Networks", equations 7 to 9, F(2x2, 3x3) and F(4x2, 3x3). Departure: for
    tiles of 4 the points c, -c, 1/c and -1/c of Alam et al. 2022, "Winograd
    Convolution for Deep Neural Networks: Efficient Point Selection".

  >>> x = jnp.arange(20.).reshape(1, 4, 5, 1)
  >>> winograd_conv(x, jnp.ones((3, 3, 1, 1)), 'VALID')[0, :, :, 0].tolist()
  [[54.0, 63.0, 72.0], [99.0, 108.0, 117.0]]
  """
  batch, height, width, channels = x.shape
  features = kernel.shape[-1]
  before = 1 if padding == "SAME" else 0
  height, width = height - 2 + 2 * before, width - 2 + 2 * before
  tile = _down(height), 2
  tiles = [-(-n // m) for n, m in zip((height, width), tile)]
  # Each tile's inputs overlap with those of the next by two.
  pads = [
    (before, m * (n + 1) - before - size)
    for m, n, size in zip(tile, tiles, x.shape[1:])
  ]
  x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
  down, across = map(_transforms, tile)
  inputs = [
    _apply(across.inputs, _overlapping(rows, 2, tile[1]))
    for rows in _apply(down.inputs, _overlapping(x, 1, tile[0]))
  ]
  kernels = [
    _apply(across.kernel, rows) for rows in _apply(down.kernel, kernel)
  ]
  product = lambda d, g: (d.reshape(-1, channels) @ g).reshape(
    batch, *tiles, features
  )
  products = [list(map(product, *places)) for places in zip(inputs, kernels)]
  columns = [_apply(down.outputs, places) for places in zip(*products)]
  rows = [jnp.stack(_apply(across.outputs, row), 3) for row in zip(*columns)]
  y = jnp.stack(rows, axis=2)
  y = y.reshape(batch, tile[0] * tiles[0], tile[1] * tiles[1], features)
  return y[:, :height, :width]


class _Transforms(NamedTuple):
  """The matrices of F(m, 3), whose m outputs take m + 2 products.

  Attributes:
    inputs: `B^T`, `float[m + 2, m + 2]`.
    kernel: `G`, `float[m + 2, 3]`.
    outputs: `A^T`, `float[m, m + 2]`.
  """

  inputs: np.ndarray
  kernel: np.ndarray
  outputs: np.ndarray


@functools.cache
def _transforms(m: int) -> _Transforms:
  """The Toom-Cook algorithm at `_POINTS[m]` and infinity.

  >>> _transforms(2).outputs.tolist()
  [[1.0, 1.0, 1.0, 0.0], [0.0, 1.0, -1.0, 1.0]]
  """
  points = np.array(_POINTS[m], float)
  others = [np.delete(points, i) for i in range(m + 1)]
  scale = [np.prod(p - other) for p, other in zip(points, others)]
  powers = lambda n: points[:, None] ** np.arange(n)
  last = lambda n: np.eye(n)[-1:]
  # The polynomial whose roots are all other points, lowest power first.
  basis = [np.append(np.poly(other)[::-1], 0) for other in others]
  return _Transforms(
    inputs=np.stack([*basis, np.poly(points)[::-1]]),
    kernel=np.concatenate([powers(3) / np.reshape(scale, (-1, 1)), last(3)]),
    outputs=np.concatenate([powers(m), last(m)]).T,
  )


def _down(height: int) -> int:
  """The height of tiles, in outputs, that needs the fewest products.

  >>> [_down(height) for height in (6, 7, 12, 28)]
  [2, 4, 4, 4]
  """
  return min(_POINTS, key=lambda m: -(-height // m) * (m + 2))


def _overlapping(x, axis, m):
  """For each place in tiles of m + 2 entries, all tiles' entries there."""
  n, shape = x.shape[axis] // m - 1, x.shape
  x = x.reshape(*shape[:axis], n + 1, m, *shape[axis + 1 :])
  # By `split`, whose gradient joins the places in one operation.
  places = jax.lax.split(x, (1,) * m, axis + 1)
  places = [place.squeeze(axis + 1) for place in places]
  first = lambda a: jax.lax.slice_in_dim(a, 0, n, axis=axis)
  second = lambda a: jax.lax.slice_in_dim(a, 1, n + 1, axis=axis)
  return [*map(first, places), *map(second, places[:2])]


def _apply(matrix, arrays):
  """A matrix times a vector of arrays: a sum for each row, skipping zeros."""
  terms = lambda row: [float(c) * a for c, a in zip(row, arrays) if c]
  return [functools.reduce(operator.add, terms(row)) for row in matrix]
