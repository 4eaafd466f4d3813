"""Image classifiers: the codistillation paper's CNNs, and any others."""

from collections.abc import Sequence
from typing import get_args

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
    strides: steps of each convolution, down and across; `None` for 1.
    border: number of rows and columns by which each edge of an image is first
      extended, repeating the edge.
    kernel_init: draws the weights; biases start at zero.
    conv: the form of the convolutions, or `None` for that of
      `kernels.default_conv`; changes speed only. For images of 16x16 or more,
      if all layers pool, `patches`, and `winograd` where no layer takes that
      form, put the batch axis last.
    dropout: share of each dense layer's inputs that is dropped in training.
    map_dropout: share of each map that is dropped after pooling or strides.
    logits_dropout: share of the last layer's inputs; `None` for `dropout`.
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
  strides: Sequence[int] | None = None
  border: int = 0
  kernel_init: layers.Initializer = layers.haiku_init
  conv: kernels.ConvForm | None = None
  dropout: float = 0.0
  map_dropout: float = 0.0
  logits_dropout: float | None = None
  dtype: layers.DType | None = None

  @nn.compact
  def __call__(self, x, train: bool = False):
    """Maps images `float[B, H, W, c]` to logits `float[B, C]` or features."""
    init, number = self.kernel_init, range(len(self.filters))
    self._check()
    pooled = [self.pool_after is None or i in self.pool_after for i in number]
    strides = [(n, n) for n in self.strides or (1,) * len(self.filters)]
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
    # What is dropped may not depend on the form.
    planes = planes and {*strides} <= {(1, 1)} and not self.map_dropout
    if planes:
      x, form = x.transpose(3, 1, 2, 0), "planes"
    convs = zip(number, self.filters, pooled, strides, strict=True)
    for i, features, pool, stride in convs:
      x = layers.Conv(
        features, size, self.padding, form, init, stride, pool, self.dtype
      )(x)
      # ReLU after pooling: same value and gradient, a quarter of the elements.
      x = nn.relu(x)
      if pool or stride != (1, 1):
        x = layers.Dropout(self.map_dropout, name=f"map_dropout_{i}")(x, train)
    if planes:
      x = x.transpose(3, 1, 2, 0)
    x = x.reshape(x.shape[0], -1)
    if self.num_classes is None:
      return core.wide(x)
    for width in self.dense:
      x = layers.Dropout(self.dropout)(x, train)
      x = nn.relu(layers.Dense(width, init, self.dtype)(x))
    last = self.dropout if self.logits_dropout is None else self.logits_dropout
    x = layers.Dropout(last)(core.wide(x), train)
    return nn.Dense(self.num_classes, kernel_init=init)(x)

  def _check(self):
    convolutions = len(self.filters)
    if self.conv not in (forms := (None, *get_args(kernels.ConvForm))):
      raise ValueError(f"conv={self.conv!r}: choose from {forms}")
    if not {*(self.pool_after or ())} <= {*range(convolutions)}:
      raise ValueError(
        f"pool_after={self.pool_after}: give numbers of the {convolutions}"
        " convolutions, from 0"
      )
    if self.strides is not None and len(self.strides) != convolutions:
      raise ValueError(
        f"strides={self.strides}: give one for each of the {convolutions}"
        " convolutions"
      )


def small_cnn(num_classes: int, **kwargs) -> CNN:
  """The low-capacity pool's CNN, 109,348 parameters at 100 classes.

  Three convolutions and two dense layers; convolutions are 3x3 with bias and
  ReLU, without normalisation. The published parameter counts (109,348 and
  410,084) imply a 6x6 map before the first dense layer. Of the 64 nets whose
  convolutions have a stride of 1 or 2, and 2x2 pooling or none, 22 give one. 15
  are for 24x24 crops and SAME padding: all that halve twice. 7 are for 32x32
  images (appendix C.1's "default settings in FedJAX") and VALID padding: with
  (C)onvolutions as they are, (P)ooled and of (S)tride 2, CPP, CPS, CSP, CSS,
  PCS, SCS, and CC followed by one with both. (Pooling that keeps odd edges
  gives 15 and 8.) The default is PPC with max pooling; `augment.RECIPES` has
  CPP for 32x32 images.

  Args:
    num_classes: C.
    **kwargs: other attributes of `CNN`.

  Returns:
    The module.

  Reference: Lichtarge et al. 2023, appendix E. Strides, pooling, padding, input
  size and dropout are not given there.

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
