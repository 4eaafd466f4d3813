"""Image classifiers."""

from collections.abc import Sequence

import flax.linen as nn

from hetfl import core
from hetfl.models import kernels, layers


class CodistCNN(nn.Module):
  """The codistillation paper's CNN: three convolutions, two dense layers.

  Convolutions are 3x3 with bias and ReLU, without normalisation. The published
  parameter counts (109,348 and 410,084) imply a 6x6 map before the first dense
  layer, and two readings of the paper give one: 32x32 images, which appendix
  C.1's "default settings in FedJAX" mean, with VALID padding and pooling after
  the last two convolutions; or 24x24 crops with SAME padding and pooling after
  the first two. Pooling is 2x2 max pooling.

  Attributes:
    filters: channels of the convolutions.
    dense: widths of the dense layers before the logits.
    num_classes: C.
    padding: `SAME` or `VALID`.
    pool_after: indices of the convolutions that are followed by pooling.
    conv: the form of the convolutions, or `None` for that of
      `kernels.default_conv`; changes speed only.
    dropout: share of each dense layer's inputs that is dropped in training.
    dtype: the type of all layers but the last, such as `jnp.bfloat16`; `None`
      for that of images and parameters. Parameters and logits are float32.

  Reference: Lichtarge et al. 2023, appendix E. Pooling, padding, input size and
  dropout are not given there.

  >>> import jax, jax.numpy as jnp
  >>> from hetfl import core
  >>> x = jnp.zeros((1, 24, 24, 3))
  >>> def count(module, x):
  ...   shapes = jax.eval_shape(module.init, jax.random.key(0), x)
  ...   return core.num_parameters(shapes['params'])
  >>> count(small_cnn(100), x), count(large_cnn(100), x)
  (109348, 410084)
  """

  filters: Sequence[int]
  dense: Sequence[int]
  num_classes: int
  padding: layers.Padding = "SAME"
  pool_after: Sequence[int] = (0, 1)
  conv: kernels.ConvForm | None = None
  dropout: float = 0.0
  dtype: layers.DType | None = None

  @nn.compact
  def __call__(self, x, train: bool = False):
    """Maps images `float[B, H, W, c]` to logits `float[B, C]`."""
    form = self.conv or kernels.default_conv(small=min(x.shape[1:3]) < 16)
    for i, features in enumerate(self.filters):
      # ReLU after pooling: same value and gradient, a quarter of the elements.
      x = nn.relu(
        layers.Conv(
          features,
          (3, 3),
          self.padding,
          form,
          pool=i in self.pool_after,
          dtype=self.dtype,
        )(x)
      )
    x = x.reshape(x.shape[0], -1)
    for width in self.dense:
      x = layers.Dropout(self.dropout)(x, train)
      x = nn.relu(layers.Dense(width, dtype=self.dtype)(x))
    x = layers.Dropout(self.dropout)(core.wide(x), train)
    return nn.Dense(self.num_classes, kernel_init=layers.haiku_init)(x)


def small_cnn(num_classes: int, **kwargs) -> CodistCNN:
  """The low-capacity pool's CNN, 109,348 parameters at 100 classes.

  Args:
    num_classes: C.
    **kwargs: other attributes of `CodistCNN`.

  Returns:
    The module.
  """
  return CodistCNN((16, 32, 32), (64, 128), num_classes, **kwargs)


def large_cnn(num_classes: int, **kwargs) -> CodistCNN:
  """The high-capacity pool's CNN, 410,084 parameters at 100 classes.

  Args:
    num_classes: C.
    **kwargs: other attributes of `CodistCNN`.

  Returns:
    The module.
  """
  return CodistCNN((32, 64, 64), (128, 256), num_classes, **kwargs)
