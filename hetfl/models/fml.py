"""The four networks of Federated Mutual Learning."""

from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp

from hetfl import core
from hetfl.models import kernels, layers
from hetfl.models.kernels.convolution import takes_tiles

# PyTorch's default weights: uniform in [-1, 1] / sqrt(fan_in).
torch_init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")

# By name: filters and side of the convolutions, and widths of dense layers.
_NETS = {
  "mlp": ((), 0, (200, 200)),
  "lenet5": ((6, 16), 5, (120, 84)),
  "cnn1": ((6, 16), 3, (120,)),
  "cnn2": ((128, 128, 128), 3, ()),
}
NAMES = tuple(_NETS)


class Net(nn.Module):
  """Convolutions, each followed by 2x2 max pooling and ReLU; dense layers.

  Attributes:
    filters: channels of the convolutions; none for a multi-layer perceptron.
    kernel: side of their kernels.
    dense: widths of the hidden dense layers, each followed by ReLU.
    num_classes: C; `None` gives the features before the first dense layer, one
      row per image, for a global model that has only the convolutions.
    padding: `SAME` or `VALID`.
    border: number of rows and columns by which each edge of an image is first
      extended, repeating the edge.
    conv: the form of the convolutions, or `None` for that of
      `kernels.default_conv`; changes speed only. For images of 16x16 or more,
      `patches`, and `winograd` where no layer takes that form, put the batch
      axis last.
    dtype: the type of all layers but the last, such as `jnp.bfloat16`; `None`
      for that of images and parameters. Parameters, logits and features are
      float32.

  >>> import jax
  >>> net = Net((4,), 3, (), num_classes=None)
  >>> features, _ = net.init_with_output(
  ...     jax.random.key(0), jnp.zeros((2, 8, 8, 1)))
  >>> features.shape
  (2, 36)
  """

  filters: Sequence[int]
  kernel: int
  dense: Sequence[int]
  num_classes: int | None
  padding: layers.Padding = "VALID"
  border: int = 0
  conv: kernels.ConvForm | None = None
  dtype: layers.DType | None = None

  @nn.compact
  def __call__(self, x):
    """Maps images `float[B, H, W, c]` to logits `float[B, C]` or features."""
    if self.border:
      side = (self.border, self.border)
      x = jnp.pad(x, ((0, 0), side, side, (0, 0)), mode="edge")
    small = min(x.shape[1:3]) < 16  # There compile time dominates.
    form = self.conv or kernels.default_conv(small=small)
    size, dtype = (self.kernel, self.kernel), self.dtype or x.dtype
    tiled = form == "winograd" and any(
      takes_tiles(size, channels, dtype) for channels in self.filters[:-1]
    )
    planes = form != "native" and not tiled and not small
    if planes:
      x = x.transpose(3, 1, 2, 0)
    for features in self.filters:
      # ReLU after pooling: same value and gradient, a quarter of the elements.
      x = nn.relu(
        layers.Conv(
          features,
          size,
          self.padding,
          "planes" if planes else form,
          torch_init,
          pool=True,
          dtype=self.dtype,
        )(x)
      )
    if planes:
      x = x.transpose(3, 1, 2, 0)
    x = x.reshape(x.shape[0], -1)
    if self.num_classes is None:
      return core.wide(x)
    for width in self.dense:
      x = nn.relu(layers.Dense(width, torch_init, self.dtype)(x))
    return nn.Dense(self.num_classes, kernel_init=torch_init)(core.wide(x))


def net(
  name: str,
  num_classes: int | None,
  image_shape: tuple[int, int, int],
  *,
  conv: kernels.ConvForm | None = None,
  dtype: layers.DType | None = None,
) -> Net:
  """One of the paper's networks, for images of a data set.

  | | layers | MNIST | CIFAR-10 | CIFAR-100 |
  |---|---|---|---|---|
  | mlp | dense 200, 200, C | 199,210 | 656,810 | 674,900 |
  | lenet5 | 5x5 6, 16; dense 120, 84, C | 61,706 | 62,006 | 69,656 |
  | cnn1 | 3x3 6, 16; dense 120, C | 50,270 | 71,498 | 82,388 |
  | cnn2 | 3x3 128, 128, 128; dense C | 297,738 | 303,882 | 350,052 |

  No convolution has padding, and 2x2 max pooling and ReLU follow each, as in
  the networks that the authors released. LeNet5 sees MNIST's images
  extended to 32x32 by repeating their edges, as in the released code.

  For images smaller than 28x28 (digits) the convolutions are padded and the
  networks narrower, so that each name stands for a network of similar relative
  size: dense layers have width 32 and, in cnn2, convolutions 32 channels.

  Args:
    name: 'mlp', 'lenet5', 'cnn1' or 'cnn2'.
    num_classes: C; `None` gives the convolutions alone.
    image_shape: height, width, channels.
    conv: see `Net`.
    dtype: see `Net`.

  Returns:
    The network.

  Raises:
    ValueError: there is no such network, or `num_classes` is `None` for 'mlp',
      which has no convolutions.

  Reference: Shen et al. 2020, section 5.1; McMahan et al. 2017 for the
    multi-layer perceptron; LeCun et al. 1998 for LeNet5, with maximum pooling
    and ReLU. The paper gives neither padding nor the width of CNN1's hidden
    dense layer; 120 and no padding are those of PyTorch's tutorial network,
    which has CNN1's convolutions.

  >>> net('cnn1', 10, (32, 32, 3)).dense
  (120,)
  """
  if name not in _NETS:
    raise ValueError(f"model {name!r}: choose from {', '.join(_NETS)}")
  if name == "mlp" and num_classes is None:
    raise ValueError("model 'mlp' has no convolutions to share")
  small = min(image_shape[:2]) < 28
  filters, kernel, dense = _NETS[name]
  if small:
    filters = tuple(min(width, 32) for width in filters)
    dense = (32,) * len(dense)
  return Net(
    filters,
    kernel,
    dense,
    num_classes,
    padding="SAME" if small else "VALID",
    border=2 if name == "lenet5" and image_shape[:2] == (28, 28) else 0,
    conv=conv,
    dtype=dtype,
  )
