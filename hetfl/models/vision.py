"""Image classifiers: the codistillation paper's CNNs, and any others."""

from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp

from hetfl import core
from hetfl.models import kernels, layers
from hetfl.models.kernels.convolution import takes_tiles


class CNN(nn.Module):
  """Convolutions with ReLU and 2x2 max pooling, then dense layers with ReLU.

  Attributes:
    filters: channels of the convolutions; none for a multi-layer perceptron.
    kernel: side of their kernels.
    dense: widths of the dense layers before the logits.
    num_classes: C; `None` gives the features before the first dense layer, one
      row per image, for a global model that has only the convolutions.
    padding: `SAME` or `VALID`.
    pool_after: indices of the convolutions that are followed by pooling; `None`
      for all.
    border: number of rows and columns by which each edge of an image is first
      extended, repeating the edge.
    kernel_init: draws the weights; biases start at zero.
    conv: the form of the convolutions, or `None` for that of
      `kernels.default_conv`; changes speed only. For images of 16x16 or more,
      if all are pooled, `patches`, and `winograd` where no layer takes that
      form, put the batch axis last.
    dropout: share of each dense layer's inputs that is dropped in training.
    dtype: the type of all layers but the last, such as `jnp.bfloat16`; `None`
      for that of images and parameters. Parameters, logits and features are
      float32.

  >>> import jax
  >>> net = CNN((4,), 3, (), num_classes=None, padding='VALID')
  >>> features, _ = net.init_with_output(
  ...     jax.random.key(0), jnp.zeros((2, 8, 8, 1)))
  >>> features.shape
  (2, 36)
  """

  filters: Sequence[int]
  kernel: int
  dense: Sequence[int]
  num_classes: int | None
  padding: layers.Padding = "SAME"
  pool_after: Sequence[int] | None = None
  border: int = 0
  kernel_init: layers.Initializer = layers.haiku_init
  conv: kernels.ConvForm | None = None
  dropout: float = 0.0
  dtype: layers.DType | None = None

  @nn.compact
  def __call__(self, x, train: bool = False):
    """Maps images `float[B, H, W, c]` to logits `float[B, C]` or features."""
    init, number = self.kernel_init, range(len(self.filters))
    pooled = [self.pool_after is None or i in self.pool_after for i in number]
    if self.border:
      side = (self.border, self.border)
      x = jnp.pad(x, ((0, 0), side, side, (0, 0)), mode="edge")
    small = min(x.shape[1:3]) < 16  # There compile time dominates.
    form: layers.Form = self.conv or kernels.default_conv(small=small)
    size, dtype = (self.kernel, self.kernel), self.dtype or x.dtype
    tiled = form == "winograd" and any(
      takes_tiles(size, channels, dtype) for channels in self.filters[:-1]
    )
    planes = all(pooled) and form != "native" and not tiled and not small
    if planes:
      x, form = x.transpose(3, 1, 2, 0), "planes"
    for features, pool in zip(self.filters, pooled):
      x = layers.Conv(
        features, size, self.padding, form, init, pool=pool, dtype=self.dtype
      )(x)
      # ReLU after pooling: same value and gradient, a quarter of the elements.
      x = nn.relu(x)
    if planes:
      x = x.transpose(3, 1, 2, 0)
    x = x.reshape(x.shape[0], -1)
    if self.num_classes is None:
      return core.wide(x)
    for width in self.dense:
      x = layers.Dropout(self.dropout)(x, train)
      x = nn.relu(layers.Dense(width, init, self.dtype)(x))
    x = layers.Dropout(self.dropout)(core.wide(x), train)
    return nn.Dense(self.num_classes, kernel_init=init)(x)


def small_cnn(num_classes: int, **kwargs) -> CNN:
  """The low-capacity pool's CNN, 109,348 parameters at 100 classes.

  Three convolutions and two dense layers; convolutions are 3x3 with bias and
  ReLU, without normalisation. The published parameter counts (109,348 and
  410,084) imply a 6x6 map before the first dense layer, and two readings of the
  paper give one: 32x32 images, which appendix C.1's "default settings in
  FedJAX" mean, with VALID padding and pooling after the last two convolutions;
  or 24x24 crops with SAME padding and pooling after the first two, the default
  here. Pooling is 2x2 max pooling.

  Args:
    num_classes: C.
    **kwargs: other attributes of `CNN`.

  Returns:
    The module.

  Reference: Lichtarge et al. 2023, appendix E. Pooling, padding, input size and
  dropout are not given there.

  >>> import jax
  >>> def count(cnn):
  ...   shapes = jax.eval_shape(
  ...       cnn.init, jax.random.key(0), jnp.zeros((1, 24, 24, 3)))
  ...   return core.num_parameters(shapes['params'])
  >>> count(small_cnn(100)), count(large_cnn(100))
  (109348, 410084)
  """
  kwargs = {"pool_after": (0, 1), **kwargs}
  return CNN((16, 32, 32), 3, (64, 128), num_classes, **kwargs)


def large_cnn(num_classes: int, **kwargs) -> CNN:
  """The high-capacity pool's CNN, 410,084 parameters at 100 classes.

  Args:
    num_classes: C.
    **kwargs: other attributes of `CNN`.

  Returns:
    The module; see `small_cnn`.
  """
  kwargs = {"pool_after": (0, 1), **kwargs}
  return CNN((32, 64, 64), 3, (128, 256), num_classes, **kwargs)
