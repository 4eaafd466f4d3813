"""ImageNet's networks, in full size, which want a GPU.

They end in features as in HtFLlib: means over positions, then of neighbours.
All have batch normalisation. By name they are in `families`.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hetfl import core
from hetfl.models import layers

# Widths of each block: 1x1; 1x1, 3x3; 1x1, 3x3; 1x1 after max pooling.
_INCEPTIONS = (
  ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
  (
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
  ),
  ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)
# Expansion, width, depth and first stride of each stage.
_INVERTED = (
  (1, 16, 1, 1),
  (6, 24, 2, 2),
  (6, 32, 3, 2),
  (6, 64, 4, 2),
  (6, 96, 3, 1),
  (6, 160, 3, 2),
  (6, 320, 1, 1),
)
_he = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
_linear = lambda x: x


def adaptive_mean(x: jax.Array, num_features: int) -> jax.Array:
  """PyTorch's `AdaptiveAvgPool1d`: means of neighbours, in as many windows.

  Window j of m has the features from `floor(j n / m)` to before
  `ceil((j + 1) n / m)`, so windows overlap where m does not divide n.

  Args:
    x: `float[B, n]`.
    num_features: m.

  Returns:
    `float[B, m]`.

  >>> adaptive_mean(jnp.array([[1.0, 2.0, 3.0, 4.0, 5.0]]), 2).tolist()
  [[2.0, 4.0]]
  """
  n, m = x.shape[-1], num_features
  if n == m:
    return x
  at, window = np.arange(n)[:, None], np.arange(m)[None]
  inside = (window * n // m <= at) & (at < -((window + 1) * -n // m))
  weights = (inside / inside.sum(0, keepdims=True)).astype(x.dtype)
  return jnp.matmul(x, weights, precision="highest")


class Unit(nn.Module):
  """A convolution without bias, batch normalisation and an activation.

  Attributes:
    width: number of output channels.
    side: of the kernel, an odd number; the padding is half of it.
    stride: of the convolution.
    groups: of channels.
    train: whether statistics are the batch's, which update the running ones.
    activation: what follows.
    epsilon: of the normalisation.
    kernel_init: draws the kernel.
    dtype: see `layers.Conv`.
  """

  width: int
  side: int = 1
  stride: int = 1
  groups: int = 1
  train: bool = False
  activation: Callable[[jax.Array], jax.Array] = nn.relu
  epsilon: float = 1e-5
  kernel_init: nn.initializers.Initializer = _he
  dtype: layers.DType | None = None

  @nn.compact
  def __call__(self, x):
    """Maps `float[B, H, W, c]` to `float[B, H', W', width]`."""
    x = nn.Conv(
      self.width,
      (self.side, self.side),
      self.stride,
      padding=self.side // 2,
      feature_group_count=self.groups,
      use_bias=False,
      kernel_init=self.kernel_init,
      dtype=self.dtype,
    )(x)
    x = nn.BatchNorm(
      not self.train, momentum=0.9, epsilon=self.epsilon, dtype=self.dtype
    )(x)
    return self.activation(x)


class Residual(nn.Module):
  """Two 3x3 convolutions, or a bottleneck of three, and a shortcut.

  Attributes:
    width: channels of the 3x3 convolution.
    stride: of the first 3x3 convolution.
    bottleneck: whether 1x1 convolutions come before and after a single one, the
      last with four times the width.
    unit: makes a `Unit`.
  """

  width: int
  stride: int
  bottleneck: bool
  unit: Any

  @nn.compact
  def __call__(self, x):
    """Maps `float[B, H, W, c]` to `float[B, H', W', C]`."""
    unit, last = self.unit, functools.partial(self.unit, activation=_linear)
    if self.bottleneck:
      y = unit(self.width)(x)
      y = unit(self.width, 3, self.stride)(y)
      y = last(4 * self.width)(y)
    else:
      y = unit(self.width, 3, self.stride)(x)
      y = last(self.width, 3)(y)
    if x.shape != y.shape:
      x = last(y.shape[-1], 1, self.stride)(x)
    return nn.relu(x + y)


class Inception(nn.Module):
  """Four branches, whose channels are joined.

  Attributes:
    widths: as in `_INCEPTIONS`.
    unit: makes a `Unit`.
  """

  widths: Sequence[int]
  unit: Any

  @nn.compact
  def __call__(self, x):
    """Maps `float[B, H, W, c]` to `float[B, H, W, C]`."""
    unit, (one, *branches, last) = self.unit, self.widths
    found = [unit(one)(x)]
    for before, after in zip(branches[::2], branches[1::2]):
      y = unit(before)(x)
      found.append(unit(after, 3)(y))
    pooled = nn.max_pool(x, (3, 3), (1, 1), "SAME")
    return jnp.concatenate([*found, unit(last)(pooled)], axis=-1)


class ResNet(nn.Module):
  """ResNet18 to ResNet152 as torchvision has them, without the last layer.

  A batch's variance enters the running one as it is; PyTorch's layer scales it
  by n / (n - 1), n = B H W. This holds for all networks here.

  Attributes:
    depths: residual blocks of each width, 64, 128, 256 and 512.
    bottleneck: see `Residual`.
    num_features: D.
    dtype: see `layers.Conv`.

  Reference: He et al. 2016; torchvision's `resnet`.
  """

  depths: Sequence[int]
  bottleneck: bool
  num_features: int
  dtype: layers.DType | None = None

  @nn.compact
  def __call__(self, x, train: bool = False):
    """Maps images `float[B, H, W, c]` to `float32[B, D]`."""
    unit = functools.partial(Unit, train=train, dtype=self.dtype)
    x = unit(64, 7, 2)(x)
    x = nn.max_pool(x, (3, 3), (2, 2), [(1, 1)] * 2)
    for stage, depth in enumerate(self.depths):
      for i in range(depth):
        stride = 2 if stage and not i else 1
        x = Residual(64 * 2**stage, stride, self.bottleneck, unit)(x)
    return adaptive_mean(_mean(x), self.num_features)


class GoogLeNet(nn.Module):
  """GoogLeNet as torchvision has it, without the last and auxiliary layers.

  The paper's 5x5 convolutions are 3x3 there.

  Attributes:
    num_features, dtype: see `ResNet`.

  Reference: Szegedy et al. 2015; torchvision's `googlenet`.
  """

  num_features: int
  dtype: layers.DType | None = None

  @nn.compact
  def __call__(self, x, train: bool = False):
    """Maps images `float[B, H, W, c]` to `float32[B, D]`."""
    unit = functools.partial(
      Unit,
      train=train,
      epsilon=1e-3,
      kernel_init=nn.initializers.normal(0.01),
      dtype=self.dtype,
    )
    x = unit(64, 7, 2)(x)
    x = unit(64)(_max_pool(x, 3))
    x = unit(192, 3)(x)
    for blocks, side in zip(_INCEPTIONS, (3, 3, 2)):
      x = _max_pool(x, side)
      for widths in blocks:
        x = Inception(widths, unit)(x)
    x = layers.Dropout(0.2)(_mean(x), train)
    return adaptive_mean(x, self.num_features)


class MobileNetV2(nn.Module):
  """MobileNetV2 as HtFLlib and torchvision have it, without the last layer.

  Attributes:
    num_features, dtype: see `ResNet`.

  Reference: Sandler et al. 2018; HtFLlib's `mobilenet_v2`.
  """

  num_features: int
  dtype: layers.DType | None = None

  @nn.compact
  def __call__(self, x, train: bool = False):
    """Maps images `float[B, H, W, c]` to `float32[B, D]`."""
    unit = functools.partial(
      Unit, train=train, activation=nn.relu6, dtype=self.dtype
    )
    x = unit(32, 3, 2)(x)
    for expansion, width, depth, stride in _INVERTED:
      for i in range(depth):
        inner = expansion * x.shape[-1]
        y = unit(inner)(x) if expansion > 1 else x
        y = unit(inner, 3, 1 if i else stride, groups=inner)(y)
        y = unit(width, activation=_linear)(y)
        x = x + y if i else y
    x = layers.Dropout(0.2)(_mean(unit(1280)(x)), train)
    return adaptive_mean(x, self.num_features)


def _mean(x):
  return jnp.mean(core.wide(x), axis=(1, 2))


def _max_pool(x, side):
  """Of stride 2; the last window may be partial, as in PyTorch's ceil mode."""
  missing = [max((side - n) % 2, side - n) for n in x.shape[1:3]]
  return nn.max_pool(x, (side, side), (2, 2), [(0, n) for n in missing])


# By name: `(num_features=, dtype=) -> module`.
NETWORKS: dict[str, Callable[..., nn.Module]] = {
  "googlenet": GoogLeNet,
  "mobilenet_v2": MobileNetV2,
  "resnet18": functools.partial(ResNet, (2, 2, 2, 2), False),
  "resnet34": functools.partial(ResNet, (3, 4, 6, 3), False),
  "resnet50": functools.partial(ResNet, (3, 4, 6, 3), True),
  "resnet101": functools.partial(ResNet, (3, 4, 23, 3), True),
  "resnet152": functools.partial(ResNet, (3, 8, 36, 3), True),
}
