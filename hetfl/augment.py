"""Image recipes: how images in a bank become a model's inputs."""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import core
from hetfl.models import kernels
from hetfl.models.kernels.convolution import Padding


def random_crop(key: jax.Array, x: jax.Array, size: int, pad: int) -> jax.Array:
  """Cuts a square at a random place out of each image.

  Args:
    key: a random key.
    x: `[B, H, W, c]`.
    size: side of the square.
    pad: zeros added on each side first.

  Returns:
    `[B, size, size, c]`, each image with its own offsets.

  Raises:
    ValueError: the padded images are smaller than the square.

  >>> x = jnp.arange(1, 10).reshape(1, 3, 3, 1)
  >>> random_crop(jax.random.key(0), x, 3, 0)[0, :, :, 0].tolist()
  [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
  """
  limits = 1 + jnp.array([_room(x, size, pad)])
  offsets = jax.random.randint(key, (x.shape[0], 2), 0, limits)
  if kernels.forms().crops == "products" and x.dtype == jnp.uint8:
    return _crop_by_products(x, offsets - pad, size)
  x = jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
  square = size, size, x.shape[-1]
  crop = lambda image, at: jax.lax.dynamic_slice(image, (*at, 0), square)
  return jax.vmap(crop)(x, offsets)


def _room(x, size, pad=0):
  """How many pixels of padded images a square leaves, down and across."""
  height, width = (n + 2 * pad for n in x.shape[1:3])
  if min(height, width) < size:
    padded = f", padded by {pad}" if pad else ""
    raise ValueError(
      f"size={size}: larger than the images, {height}x{width}{padded}"
    )
  return height - size, width - size


def _crop_by_products(x, offsets, size):
  """Squares of `uint8[B, H, W, c]`, zero outside of an image.

  Products with one-hot rows are exact: bfloat16 holds all integers up to 256.
  """

  def places(offset, length):
    there = offset[:, None, None] + jnp.arange(size)[None, :, None]
    return (there == jnp.arange(length)[None, None]).astype(jnp.bfloat16)

  y = x.astype(jnp.bfloat16)
  for axis, equation in enumerate(("bih,bhwc->biwc", "bjw,biwc->bijc")):
    rows = places(offsets[:, axis], x.shape[1 + axis])
    y = jnp.einsum(equation, rows, y, preferred_element_type=jnp.bfloat16)
  return y.astype(x.dtype)


def center_crop(x: jax.Array, size: int) -> jax.Array:
  """Cuts a square out of the middle of each image.

  Args:
    x: `[B, H, W, c]`.
    size: side of the square.

  Returns:
    `[B, size, size, c]`; the square is nearer the top left if it cannot be
    centred exactly.

  Raises:
    ValueError: the images are smaller than the square.

  >>> center_crop(jnp.arange(16).reshape(1, 4, 4, 1), 2).ravel()
  Array([ 5,  6,  9, 10], dtype=int32)
  """
  top, left = (room // 2 for room in _room(x, size))
  return x[:, top : top + size, left : left + size]


def random_flip(key: jax.Array, x: jax.Array, axis: int) -> jax.Array:
  """Flips each image along an axis with probability 1/2.

  Args:
    key: a random key.
    x: `[B, H, W, c]`.
    axis: 1 flips top and bottom, 2 left and right.

  Returns:
    `[B, H, W, c]`.

  >>> x = jnp.tile(jnp.arange(3), (99, 1)).reshape(99, 1, 3, 1)
  >>> flipped = random_flip(jax.random.key(0), x, 2)
  >>> jnp.unique(flipped[:, 0, :, 0], axis=0).tolist()
  [[0, 1, 2], [2, 1, 0]]
  """
  flip = jax.random.bernoulli(key, shape=(x.shape[0], 1, 1, 1))
  return jnp.where(flip, jnp.flip(x, axis), x)


def normalize(
  x: jax.Array, mean: Sequence[float], deviation: Sequence[float]
) -> jax.Array:
  """`(x / 255 - mean) / deviation`, channel by channel.

  Args:
    x: `uint8[..., c]`.
    mean: mean of each channel, of pixels in [0, 1].
    deviation: standard deviation of each channel.

  Returns:
    `float32[..., c]`.

  Raises:
    ValueError: `x` is not uint8, or has other channels.

  >>> normalize(jnp.array([[0], [255]], jnp.uint8), (0.5,), (0.25,)).tolist()
  [[-2.0], [2.0]]
  """
  if x.shape[-1] != len(mean):
    raise ValueError(f"images of shape {x.shape}: want {len(mean)} channels")
  shape = (1,) * (x.ndim - 1) + (-1,)
  channels = lambda values: jnp.asarray(values, jnp.float32).reshape(shape)
  return (_shares(x) - channels(mean)) / channels(deviation)


def center(batch: core.Batch, mean: jax.Array | np.ndarray) -> core.Batch:
  """`x / 255 - mean`, pixel by pixel.

  Args:
    batch: holds `x: uint8[B, H, W, c]`.
    mean: `float[H, W, c]`, the mean image, in [0, 1].

  Returns:
    The batch with `x: float32[B, H, W, c]`.

  Raises:
    ValueError: `x` is not uint8, or of another shape.

  Reference: the released code of Li & Wang 2019.

  >>> x = jnp.array([[[[255]]]], jnp.uint8)
  >>> center({'x': x}, jnp.full((1, 1, 1), 0.25))['x'].item()
  0.75
  """
  if (shape := batch["x"].shape)[1:] != mean.shape:
    raise ValueError(f"images of shape {shape}: want {mean.shape} each")
  mean = jnp.asarray(mean, jnp.float32)[None]
  return {**batch, "x": _shares(batch["x"]) - mean}


def _shares(x):
  """Pixels as numbers in [0, 1]."""
  _check_pixels(x)
  return x.astype(jnp.float32) / 255


def _check_pixels(x):
  """Raises unless images are uint8 pixels."""
  if x.dtype != jnp.uint8:
    raise ValueError(
      f"images of {x.dtype}: want uint8 pixels, 0 to 255, which are divided by"
      " 255 here"
    )


@dataclasses.dataclass(frozen=True)
class Recipe:
  """One way of preparing images, and the network shape that goes with it.

  Attributes:
    size: side of the images that the model sees.
    mean: mean of each channel, of pixels in [0, 1].
    deviation: standard deviation of each channel.
    pad: zeros around an image before it is cropped in training.
    flip: whether training images are flipped left and right, and distillation
      images top and bottom too.
    of_batch: whether a batch's images share one crop and one flip in training.
    padding: the padding of the network's convolutions.
    pool_after: where the network pools; see `CNN.pool_after`.
  """

  size: int
  mean: tuple[float, ...]
  deviation: tuple[float, ...]
  pad: int = 0
  flip: bool = False
  of_batch: bool = False
  padding: Padding = "SAME"
  pool_after: tuple[int, ...] = (0, 1)

  def train(self, key: jax.Array, batch: core.Batch) -> core.Batch:
    """Training images: cropped, flipped if `flip`, normalised.

    Args:
      key: a random key.
      batch: holds `x: uint8[B, H, W, c]`.

    Returns:
      The batch with `x: float32[B, size, size, c]`.

    Raises:
      ValueError: the images, with `pad`, are smaller than `size`, or not uint8.

    >>> batch = {'x': jnp.zeros((5, 32, 32, 3), jnp.uint8), 'y': jnp.arange(5)}
    >>> batch = RECIPES['crop24'].train(jax.random.key(0), batch)
    >>> batch['x'].shape, batch['x'].dtype, batch['y'].shape
    ((5, 24, 24, 3), dtype('float32'), (5,))
    """
    return {**batch, "x": self._distort(key, batch["x"])}

  def distill(self, key: jax.Array, batch: core.Batch) -> core.Batch:
    """Distillation images: as in training, with both flips if `flip`.

    Args:
      key: a random key.
      batch: holds `x: uint8[B, H, W, c]`.

    Returns:
      The batch with `x: float32[B, size, size, c]`.

    Raises:
      ValueError: as `train`.

    Reference: Lichtarge et al. 2023, appendix C.1. `Distiller` does the mixup.

    >>> recipe = dataclasses.replace(RECIPES['mnist28'], size=2, flip=True)
    >>> images = jnp.tile(jnp.arange(4, dtype=jnp.uint8), (99, 1))
    >>> batch = {'x': images.reshape(99, 2, 2, 1)}
    >>> for view in (recipe.train, recipe.distill):
    ...   x = view(jax.random.key(0), batch)['x'].reshape(99, 4)
    ...   print(len(jnp.unique(x, axis=0)))
    2
    4
    """
    train_key, flip_key = jax.random.split(key)
    x = self._distort(train_key, batch["x"])
    return {**batch, "x": random_flip(flip_key, x, 1) if self.flip else x}

  def evaluate(self, batch: core.Batch) -> core.Batch:
    """Test images: cropped in the middle, normalised.

    Args:
      batch: holds `x: uint8[B, H, W, c]`.

    Returns:
      The batch with `x: float32[B, size, size, c]`.

    Raises:
      ValueError: the images are smaller than `size`, or not uint8.

    >>> recipe = dataclasses.replace(
    ...     RECIPES['mnist28'], size=1, mean=(0.5,), deviation=(0.25,))
    >>> x = jnp.zeros((1, 3, 3, 1), jnp.uint8).at[0, 1, 1, 0].set(255)
    >>> recipe.evaluate({'x': x})['x'].item()
    2.0
    """
    x = center_crop(batch["x"], self.size)
    return {**batch, "x": normalize(x, self.mean, self.deviation)}

  def _distort(self, key, x):
    crop_key, flip_key = jax.random.split(key)
    batch, height, width, channels = x.shape
    if self.of_batch:  # As channels of one image.
      x = x.transpose(1, 2, 0, 3).reshape(1, height, width, -1)
    if self.pad or x.shape[1:3] != (self.size, self.size):
      x = random_crop(crop_key, x, self.size, self.pad)
    if self.flip:
      x = random_flip(flip_key, x, 2)
    if self.of_batch:
      x = x.reshape(*x.shape[1:3], batch, channels).transpose(2, 0, 1, 3)
    return normalize(x, self.mean, self.deviation)


# FedJAX's defaults for CIFAR-100, which are CIFAR-10's statistics; the 24x24
# crop is from FedJAX's other preprocessing, that of TensorFlow Federated.
_CIFAR = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
_PAD32 = Recipe(
  32, *_CIFAR, pad=4, flip=True, padding="VALID", pool_after=(1, 2)
)
RECIPES = {
  "crop24": Recipe(24, *_CIFAR, flip=True),
  "pad32": _PAD32,
  "pad32_batch": dataclasses.replace(_PAD32, of_batch=True),
  "mnist28": Recipe(28, (0.1307,), (0.3081,), padding="VALID"),
  "digits8": Recipe(8, (0.305,), (0.376,), pad=1),
}

# Recipes of the images' own size and statistics: see `fitted`.
FITTED = ("crop", "crop_flip", "plain")


def recipe_of(name: str, x: np.ndarray) -> Recipe:
  """One of `RECIPES`, or a recipe `fitted` to the training images `x`."""
  return RECIPES.get(name) or fitted(name, x)


def fitted(name: str, x: np.ndarray) -> Recipe:
  """A recipe of a data set's own size and statistics.

  Images that are not square are cropped to squares. In training, `crop` pads
  them by an eighth of their side and crops them at random, `crop_flip` also
  flips half of them left and right, and `plain` changes nothing. Mean and
  deviation are those of the data set, channel by channel.

  Args:
    name: `crop`, `crop_flip` or `plain`.
    x: `uint8[N, H, W, C]`, the training images.

  Returns:
    The recipe.

  Raises:
    ValueError: there is no such recipe, or `x` is not uint8.

  >>> x = np.zeros((5, 16, 20, 1), np.uint8)
  >>> x[::5] = 255
  >>> recipe = fitted('crop', x)
  >>> recipe.size, recipe.pad, recipe.flip, recipe.mean, recipe.deviation
  (16, 2, False, (0.2,), (0.4,))
  """
  if name not in FITTED:
    raise ValueError(f"name={name!r}: choose one of {FITTED}")
  _check_pixels(x)
  counts = np.zeros((x.shape[-1], 256))
  for i in range(0, len(x), 100):  # Few at a time: NumPy counts in 64 bits.
    for channel, count in enumerate(counts):
      pixels = x[i : i + 100, ..., channel].ravel()
      count += np.bincount(pixels, minlength=256)
  values, share = np.arange(256) / 255, counts / x[..., 0].size
  mean = share @ values
  spread = np.sqrt((share * (values - mean[:, None]) ** 2).sum(1))
  deviation = np.where(spread > 0, spread, 1)  # 0: the same everywhere.
  size = min(x.shape[1:3])
  return Recipe(
    size,
    tuple(mean.tolist()),
    tuple(deviation.tolist()),
    pad=0 if name == "plain" else size // 8,
    flip=name == "crop_flip",
  )
