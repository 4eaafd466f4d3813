"""The models of FedMD's parties: CNNs of different depth, width and dropout."""

from collections.abc import Mapping, Sequence
import functools
from typing import NamedTuple

import flax.linen as nn
from flax.traverse_util import flatten_dict
import jax
import jax.numpy as jnp

from hetfl import checks, core
from hetfl.models import kernels, layers

# Filters of each convolution, and dropout.
TABLE_1 = (
  ((128, 256), 0.2),
  ((128, 384), 0.2),
  ((128, 512), 0.2),
  ((256, 256), 0.3),
  ((256, 512), 0.4),
  ((64, 128, 256), 0.2),
  ((64, 128, 192), 0.2),
  ((128, 192, 256), 0.2),
  ((128, 128, 128), 0.3),
  ((128, 128, 192), 0.3),
)
TABLE_2 = (
  ((128, 256), 0.2),
  ((128, 128, 192), 0.2),
  ((64, 64, 64), 0.2),
  ((128, 64, 64), 0.3),
  ((64, 64, 128), 0.4),
  ((64, 128, 256), 0.2),
  ((64, 128, 192), 0.2),
  ((128, 192, 256), 0.2),
  ((128, 128, 128), 0.3),
  ((64, 64, 64, 64), 0.2),
)
# Not in the paper: for images of 16 x 16.
SMALL = (((8, 16), 0.2), ((12, 24), 0.2), ((16, 16), 0.3), ((8, 12, 16), 0.2))
TABLES = {"table1": TABLE_1, "table2": TABLE_2, "small": SMALL}
_glorot = nn.initializers.glorot_uniform()


class Block(NamedTuple):
  """Convolution, batch normalisation, ReLU, dropout and average pooling.

  Attributes:
    filters: channels.
    kernel: height and width of the kernel.
    stride: of the convolution.
    padding: `SAME` or `VALID`.
    pool: stride of the 2x2 average pooling; 0 for none. With 1 the map keeps
      its size; with 2 it loses an odd last row or column.
  """

  filters: int
  kernel: int
  stride: int
  padding: layers.Padding
  pool: int


def blocks_of(filters: Sequence[int]) -> tuple[Block, ...]:
  """The blocks of a network with two, three or four convolutions.

  Args:
    filters: n_1 to n_2, n_3 or n_4.

  Returns:
    The blocks.

  Raises:
    ValueError: there is another number of convolutions.

  Reference: strides, padding and pooling of two and three convolutions are
  the released code's; the paper does not give them. The released code lacks
  the fourth convolution of table 2's model 9. Here the third of four keeps the
  size of its inputs, so that the last leaves 3x3 positions of a 32x32 image, as
  the last of three does; with two strides of 2 it would be one.

  >>> [block.pool for block in blocks_of((64, 128, 256))]
  [1, 2, 0]
  """
  if not 2 <= len(filters) <= 4:
    raise ValueError(f"filters={filters}: give two, three or four numbers")
  first, *middle, last = filters
  blocks = [Block(first, 3, 1, "SAME", 1)]
  if middle:
    blocks.append(Block(middle[0], 2, 2, "VALID", 2))
  blocks += [Block(n, 3, 1, "SAME", 0) for n in middle[1:]]
  return (*blocks, Block(last, 3, 2, "VALID", 0))


class PartyCNN(nn.Module):
  """Convolutional blocks and a linear head without bias.

  As in Keras, weights are Glorot-uniform, biases zero, batch normalisation has
  epsilon 1e-3, and dropout drops single elements.

  Attributes:
    blocks: the blocks, first to last.
    dropout: share of elements that each block drops in training.
    num_classes: C.
    conv: form of the convolutions, or `None` for that of
      `kernels.default_conv(alone=True)`; changes speed only.
    momentum: of batch normalisation's running statistics; 0.99 is Keras's.
    dtype: the type of all layers but the head, such as `jnp.bfloat16`; `None`
      for that of images and parameters. Parameters, statistics and logits are
      float32.

  Reference: Li & Wang 2019, tables 1 and 2, for filters and dropout; the rest
  is the released code's. Departure: the running variance takes the batch's
  variance as it is; Keras's fused layer scales it by n / (n - 1), n = B H W.

  >>> from hetfl import core
  >>> def count(table, shape):
  ...   shapes = [jax.eval_shape(module.init, jax.random.key(0),
  ...                            jnp.zeros((1, *shape)))
  ...             for _, module in party_models(table, 10, 16)]
  ...   return [core.num_parameters(s['params']) for s in shapes]
  >>> count('table1', (28, 28, 1))
  [989440, 1483392, 1977344, 1285888, 2568704,
   366464, 283328, 580416, 233728, 316864]
  >>> count('table1', (32, 32, 3))
  [1221120, 1829760, 2438400, 1519872, 3032064,
   367616, 284480, 582720, 236032, 319168]
  """

  blocks: Sequence[Block]
  dropout: float
  num_classes: int
  conv: kernels.ConvForm | None = None
  momentum: float = 0.99
  dtype: layers.DType | None = None

  @nn.compact
  def __call__(self, x, train: bool = False):
    """Maps images `float[B, H, W, c]` to logits `float[B, C]`."""
    conv = functools.partial(
      layers.Conv,
      form=self.conv or kernels.default_conv(alone=True),
      kernel_init=_glorot,
      dtype=self.dtype,
    )
    norm = functools.partial(
      nn.BatchNorm, momentum=self.momentum, epsilon=1e-3, dtype=self.dtype
    )
    for filters, kernel, stride, padding, pool in self.blocks:
      x = conv(filters, (kernel, kernel), padding, strides=(stride, stride))(x)
      x = layers.Dropout(self.dropout)(nn.relu(norm(not train)(x)), train)
      if pool:
        # As in Keras, means over the pixels inside the image.
        edges = "SAME" if pool == 1 else "VALID"
        means = nn.avg_pool(x, (2, 2), (pool, pool), edges, False)
        x = means.astype(x.dtype)
    return _head(self.num_classes)(core.wide(x.reshape(x.shape[0], -1)))


class PartyMLP(nn.Module):
  """A weak party: two fully connected layers.

  Attributes:
    hidden: width of the first layer.
    num_classes: C.
    dtype: see `PartyCNN`.

  Reference: Li & Wang 2019, supplement, results 3, which gives no width.
  """

  hidden: int
  num_classes: int
  dtype: layers.DType | None = None

  @nn.compact
  def __call__(self, x):
    """Maps images `float[B, H, W, c]` to logits `float[B, C]`."""
    x = x.reshape(x.shape[0], -1)
    x = nn.relu(layers.Dense(self.hidden, _glorot, self.dtype)(x))
    return _head(self.num_classes)(core.wide(x))


def _head(num_classes):
  return nn.Dense(num_classes, False, kernel_init=_glorot, name="head")


def head_penalty(params) -> jax.Array:
  """`sum(w^2)` over the head's weights, the only ones that decay.

  Args:
    params: a party model's parameters.

  Returns:
    A scalar; 0 for a user's model without a layer named `head` that has a
    `kernel`.

  Reference: the released code's `kernel_regularizer=l2(1e-3)`.

  >>> float(head_penalty({'head': {'kernel': jnp.array([[1., 2.]])}}))
  5.0
  >>> float(head_penalty({'head': {}}))
  0.0
  """
  arrays = flatten_dict(params) if isinstance(params, Mapping) else {}
  # `Model.from_nnx` has paths as names.
  kernel = arrays.get(("head", "kernel"), arrays.get(("head/kernel",), 0.0))
  return jnp.sum(kernel**2)


def party_models(
  table: str,
  num_parties: int,
  num_classes: int,
  *,
  width: float = 1.0,
  weak_parties: int = 0,
  batch_norm_momentum: float = 0.99,
  conv: kernels.ConvForm | None = None,
  dtype: layers.DType | None = None,
) -> list[tuple[str, nn.Module]]:
  """The parties' models, by name.

  Args:
    table: 'table1', 'table2' or 'small'.
    num_parties: P; if the table has fewer models, it repeats.
    num_classes: C.
    width: factor on all numbers of filters, which are rounded and at least 1.
    weak_parties: how many parties, the last ones, are `PartyMLP`s.
    batch_norm_momentum: of the running statistics.
    conv: see `PartyCNN`.
    dtype: see `PartyCNN`.

  Returns:
    P names, such as `cnn(128,256)`, and modules.

  Raises:
    ValueError: an argument is out of its range.

  >>> models = party_models('table2', 10, 16, width=0.125, weak_parties=2)
  >>> [name for name, _ in models[:2] + models[8:]]
  ['cnn(16,32)', 'cnn(16,16,24)', 'mlp(16)', 'mlp(16)']
  """
  checks.one_of(TABLES, table=table)
  checks.counts(num_parties=num_parties)
  checks.positive(width=width)
  checks.whole(0, num_parties, weak_parties=weak_parties)
  scaled = lambda n: max(1, round(width * n))
  hidden, models = scaled(128), []
  weak = f"mlp({hidden})", PartyMLP(hidden, num_classes, dtype)
  for k in range(num_parties - weak_parties):
    filters, dropout = TABLES[table][k % len(TABLES[table])]
    filters = tuple(map(scaled, filters))
    module = PartyCNN(
      blocks_of(filters), dropout, num_classes, conv, batch_norm_momentum, dtype
    )
    models.append((f"cnn({','.join(map(str, filters))})", module))
  return models + [weak] * weak_parties
