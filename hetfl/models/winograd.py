"""Winograd's form of a 3x3 convolution."""

import jax
import jax.numpy as jnp


def winograd_conv(
  x: jax.Array, kernel: jax.Array, padding: str = "SAME"
) -> jax.Array:
  """A 3x3 convolution of stride 1 with 16 products where 36 are the rule.

  Outputs come in tiles of 2x2, each from 4x4 inputs `d`:
  `Y = A^T [(G g G^T) * (B^T d B)] A`, where `*` is elementwise. Summed over
  channels, each of the 16 places is a matrix product of all tiles by one
  transformed kernel; the transforms before and after are sums and
  differences. So are the gradients, by the same identities.

  Args:
    x: `float[B, H, W, c]`.
    kernel: `float[3, 3, c, f]`.
    padding: `SAME` or `VALID`.

  Returns:
    `float[B, H', W', f]`, a convolution's outputs to rounding: in float32 no
    further from float64's than the other forms of `layers.Conv`.

  Raises:
    ValueError: if the padding is another.

  Reference: Lavin & Gray 2016, "Fast Algorithms for Convolutional Neural
    Networks", equations 7 to 9, F(2x2, 3x3).

  >>> x = jnp.arange(20.).reshape(1, 4, 5, 1)
  >>> winograd_conv(x, jnp.ones((3, 3, 1, 1)), 'VALID')[0, :, :, 0].tolist()
  [[54.0, 63.0, 72.0], [99.0, 108.0, 117.0]]
  """
  if padding not in ("SAME", "VALID"):
    raise ValueError(f"padding={padding!r}: choose SAME or VALID")
  batch, height, width, channels = x.shape
  features = kernel.shape[-1]
  before = 1 if padding == "SAME" else 0
  height, width = height - 2 + 2 * before, width - 2 + 2 * before
  tiles = batch, -(-height // 2), -(-width // 2)
  # Each tile's 4x4 inputs overlap with those of the next by two.
  pads = [
    (before, 2 * (n + 1) - before - size)
    for n, size in zip(tiles[1:], x.shape[1:])
  ]
  x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
  inputs = [_inputs(rows, 2) for rows in _inputs(x, 1)]
  kernels = [_kernels(rows) for rows in _kernels(kernel)]
  products = [
    [
      (d.reshape(-1, channels) @ g).reshape(*tiles, features)
      for d, g in zip(*columns)
    ]
    for columns in zip(inputs, kernels)
  ]
  columns = [_outputs(*places) for places in zip(*products)]
  y = jnp.stack(
    [jnp.stack(_outputs(*row), axis=3) for row in zip(*columns)], axis=2
  )
  y = y.reshape(batch, 2 * tiles[1], 2 * tiles[2], features)
  return y[:, :height, :width]


def _inputs(x, axis):
  """`B^T d` along an axis of 2 (n + 1) entries: four arrays of n."""
  n, shape = x.shape[axis] // 2 - 1, x.shape
  # Even and odd entries by `split`, whose gradient joins them in one go.
  pairs = x.reshape(*shape[:axis], n + 1, 2, *shape[axis + 1 :])
  even, odd = (
    half.squeeze(axis + 1) for half in jax.lax.split(pairs, (1, 1), axis + 1)
  )
  first = lambda a: jax.lax.slice_in_dim(a, 0, n, axis=axis)
  second = lambda a: jax.lax.slice_in_dim(a, 1, n + 1, axis=axis)
  d0, d1, d2, d3 = first(even), first(odd), second(even), second(odd)
  return [d0 - d2, d1 + d2, d2 - d1, d1 - d3]


def _kernels(g):
  """`G g` along the first axis, of 3 entries: four arrays."""
  even = (g[0] + g[2]) / 2
  return [g[0], even + g[1] / 2, even - g[1] / 2, g[2]]


def _outputs(m0, m1, m2, m3):
  """`A^T m`: two arrays of four."""
  return m0 + m1 + m2, m1 - m2 - m3
