"""Networks that end in equally many features, in families.

Clients whose models differ in all but the number of features can share what is
made of features: prototypes, or a head.
"""

from collections.abc import Sequence
import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from hetfl import checks, core
from hetfl.models import kernels, large, layers, vision

# By name: filters and side of the convolutions, and widths of dense layers.
_CNNS = {
  "cnn": ((32, 64), 5, ()),
  "small_cnn": ((8, 16), 3, ()),
  "lenet5": ((6, 16), 5, (120,)),
  "mlp": ((), 0, (200,)),
}
NAMES = (*_CNNS, "resnet", *large.NETWORKS)
_GROUPS = 8  # Of channels, which are normalised together.
_HTFE8 = ("cnn", *large.NETWORKS)
FAMILIES = {
  "cnn4": ("cnn", "small_cnn", "lenet5", "resnet"),
  "mixed3": ("mlp", "small_cnn", "lenet5"),
  "htfe2": ("cnn", "resnet18"),
  "htfe4": _HTFE8[:4],
  "htfe8": _HTFE8,
}


def members(names: Sequence[str]) -> tuple[str, ...]:
  """Names with those of families replaced by their members'.

  >>> members(["mixed3", "resnet"])
  ('mlp', 'small_cnn', 'lenet5', 'resnet')
  """
  return tuple(m for name in names for m in FAMILIES.get(name, (name,)))


def body(
  name: str,
  num_features: int,
  image_shape: tuple[int, int, int],
  *,
  width: float = 1.0,
  conv: kernels.ConvForm | None = None,
  dtype: layers.DType | None = None,
) -> nn.Module:
  """A network from images to features, which are not negative.

  | | layers before the features | parameters, CIFAR-10, 128 features |
  |---|---|---|
  | cnn | 5x5 32, 64 | 258,624 |
  | small_cnn | 3x3 8, 16 | 75,248 |
  | lenet5 | 5x5 6, 16; dense 120 | 66,480 |
  | mlp | dense 200 | 640,328 |
  | resnet | 3x3 16; residual blocks 16, 32, 64; mean | 85,856 |
  | googlenet | of `large`; mean of 1024 channels | 5,599,904 |
  | mobilenet_v2 | of `large`; 1280 | 2,223,872 |
  | resnet18 | of `large`; 512 | 11,176,512 |
  | resnet34 | of `large`; 512 | 21,284,672 |
  | resnet50 | of `large`; 2048 | 23,508,032 |
  | resnet101 | of `large`; 2048 | 42,500,160 |
  | resnet152 | of `large`; 2048 | 58,143,808 |

  Convolutions of the first four have no padding, and 2x2 max pooling and ReLU
  follow each. Those of `resnet`, one block a width, have group normalisation.
  For images smaller than 28x28 all are padded, and the networks narrower: dense
  layers have width 32, convolutions 16 channels. Networks of `large` are the
  same for all images, have batch normalisation, so take `train`, and their
  convolutions are XLA's own. With 512 features `cnn` is HtFLlib's `FedAvgCNN`,
  and the families `htfe2`, `htfe4` and `htfe8` are its HtFE-img-2, -4 and -8.

  Args:
    name: one of `NAMES`.
    num_features: D.
    image_shape: height, width, channels.
    width: the share of its channels, in eighths; less than 1 for `resnet` only,
      whose parameters are then leading parts of the whole's, as
      `hetfl.algorithms.heterofl` takes them.
    conv: see `vision.CNN`.
    dtype: see `vision.CNN`.

  Returns:
    The network; it maps `float[B, H, W, c]` to `float32[B, D]`.

  Raises:
    ValueError: there is no such width.

  Reference: McMahan et al. 2017 (`cnn`), LeCun et al. 1998 (`lenet5`), He et
    al. 2016 and Wu and He 2018 (`resnet`); Zhang et al. 2025 (HtFLlib).

  >>> import jax
  >>> x = jnp.zeros((1, 32, 32, 3))
  >>> shapes = jax.eval_shape(
  ...     body("resnet", 128, x.shape[1:]).init, jax.random.key(0), x)
  >>> core.num_parameters(shapes["params"])
  85856
  """
  checks.one_of(NAMES, name=name)
  if width != 1 and name != "resnet":
    raise ValueError(
      f"width={width}: {name} has no narrower copies whose arrays are leading"
      " parts of its own; choose resnet"
    )
  if name in large.NETWORKS:
    return large.NETWORKS[name](num_features=num_features, dtype=dtype)
  small = min(image_shape[:2]) < 28
  form: dict[str, Any] = dict(conv=conv, dtype=dtype)
  if name == "resnet":
    if not (0 < width <= 1 and (_GROUPS * width).is_integer()):
      raise ValueError(f"width={width}: give a share in eighths, such as 0.5")
    groups = int(_GROUPS * width)
    widths = tuple(groups * n for n in ((2, 2, 2) if small else (2, 4, 8)))
    return ResNet(widths, num_features, groups, **form)
  filters, kernel, dense = _CNNS[name]
  if small:
    filters, dense = tuple(min(w, 16) for w in filters), (32,) * len(dense)
  padding: layers.Padding = "SAME" if small else "VALID"
  net = vision.CNN(filters, kernel, dense, num_features, padding, **form)
  return nn.Sequential([net, nn.relu])


class ResNet(nn.Module):
  """Residual blocks, one per width; all but the first halve the image."""

  widths: Sequence[int]
  num_features: int
  groups: int = _GROUPS
  conv: kernels.ConvForm | None = None
  dtype: layers.DType | None = None

  @nn.compact
  def __call__(self, x):
    """Maps images to `float32[B, D]`."""
    small = min(x.shape[1:3]) < 16  # There compile time dominates.
    form = self.conv or kernels.default_conv(small=small)
    conv = functools.partial(layers.Conv, form=form, dtype=self.dtype)
    norm = functools.partial(nn.GroupNorm, self.groups, dtype=self.dtype)
    # Normalised, a single position of few channels would leave only signs.
    x = conv(self.widths[0], (3, 3), pool=not small)(x)
    for i, width in enumerate(self.widths):
      strides = (1, 1) if i == 0 else (2, 2)
      y = nn.relu(norm()(x))
      if i:
        x = conv(width, (1, 1), strides=strides)(y)
      y = conv(width, (3, 3), strides=strides)(y)
      x += conv(width, (3, 3))(nn.relu(norm()(y)))
    x = jnp.mean(core.wide(nn.relu(norm()(x))), axis=(1, 2))
    return nn.relu(layers.Dense(self.num_features)(x))
