"""The four networks of Federated Mutual Learning."""

import flax.linen as nn

from hetfl import checks
from hetfl.models import kernels, layers, vision

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


def net(
  name: str,
  num_classes: int | None,
  image_shape: tuple[int, int, int],
  *,
  conv: kernels.ConvForm | None = None,
  dtype: layers.DType | None = None,
) -> vision.CNN:
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
    conv: see `vision.CNN`.
    dtype: see `vision.CNN`.

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
  checks.one_of(_NETS, name=name)
  if name == "mlp" and num_classes is None:
    raise ValueError("model 'mlp' has no convolutions to share")
  small = min(image_shape[:2]) < 28
  filters, kernel, dense = _NETS[name]
  if small:
    filters = tuple(min(width, 32) for width in filters)
    dense = (32,) * len(dense)
  return vision.CNN(
    filters,
    kernel,
    dense,
    num_classes,
    padding="SAME" if small else "VALID",
    border=2 if name == "lenet5" and image_shape[:2] == (28, 28) else 0,
    kernel_init=torch_init,
    conv=conv,
    dtype=dtype,
  )
