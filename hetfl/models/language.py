"""Next-word language models."""

import functools

import flax.linen as nn
from flax.linen.dtypes import promote_dtype
import flax.struct
import jax
import jax.numpy as jnp

from hetfl import core
from hetfl.models import layers
from hetfl.models.kernels import products


@flax.struct.dataclass
class TokenLogits:
  """Logits of all positions, not yet computed: `features @ kernel + bias`.

  With a vocabulary of ten thousand the logits of a batch are far larger than
  everything else; `hetfl.models.next_word` computes losses and metrics from
  them part by part, at the positions that count.

  Features and kernel may be bfloat16; the logits are then float32.

  Attributes:
    features: `float[B, T, E]`.
    kernel: `float[E, V]`.
    bias: `float[V]`.
    chunk: number of positions whose logits are held at once; `None` for all.
      Changes speed and memory only.
  """

  features: jax.Array
  kernel: jax.Array
  bias: jax.Array
  chunk: int | None = flax.struct.field(pytree_node=False, default=None)

  def dense(self) -> jax.Array:
    """The logits themselves, `float[B, T, V]`."""
    product = products.wide_product(self.features, self.kernel)
    return products.add_bias(product, self.bias)


@functools.cache
def in_chunks(model: core.Model, chunk: int | None) -> core.Model:
  """A model of text, whose logits are computed in chunks.

  Args:
    model: the model; a chunk that its outputs already have stays.
    chunk: see `TokenLogits`.

  Returns:
    The model, the same for the same arguments.
  """

  def apply(variables, x, key, train):
    outputs, stats = model.apply(variables, x, key, train)
    return outputs.replace(chunk=outputs.chunk or chunk), stats

  return model._replace(apply=apply)


class LSTM(nn.Module):
  """An LSTM layer over whole sequences, with zero initial states.

  `i, g, f, o = x_t W_x + h_(t-1) W_h + b`;
  `c_t = sigmoid(f + 1) c_(t-1) + sigmoid(i) tanh(g)`;
  `h_t = sigmoid(o) tanh(c_t)`.

  The 1 added to the forget gate, the order of the gates and the initial weights
  are Haiku's. The layer has `(in + H) 4 H + 4 H` parameters.

  Attributes:
    hidden: H.
    dtype: the type of the products' operands and of the outputs, such as
      `jnp.bfloat16`; `None` for that of inputs and parameters. Parameters and
      cells are float32.

  Reference: Hochreiter & Schmidhuber 1997; dm-haiku, `hk.LSTM`.

  >>> x = jnp.ones((2, 5, 3))
  >>> h, variables = LSTM(4).init_with_output(jax.random.key(0), x)
  >>> h.shape, sum(w.size for w in variables['params'].values())
  ((2, 5, 4), 128)
  """

  hidden: int
  dtype: layers.DType | None = None

  @nn.compact
  def __call__(self, x):
    """Maps `float[B, T, in]` to `float[B, T, H]`."""
    batch, length, width = x.shape
    gates = 4 * self.hidden

    def weights(name, inputs, others):
      # Haiku has one matrix for x and h, hence one fan-in.
      scale = (1 + others / inputs) ** -0.5
      init = lambda *args: scale * layers.haiku_init(*args)
      return self.param(name, init, (inputs, gates))

    kernel = weights("kernel", width, self.hidden)
    recurrent = weights("recurrent", self.hidden, width)
    bias = self.param("bias", nn.initializers.zeros, (gates,), jnp.float32)
    x, kernel, recurrent = promote_dtype(x, kernel, recurrent, dtype=self.dtype)
    # The part that does not depend on h: one product for all time steps.
    own = products.add_bias(x.reshape(-1, width) @ kernel, bias)
    own = own.reshape(batch, length, gates).swapaxes(0, 1)
    return products.recur(own, recurrent).swapaxes(0, 1)


class LSTMLanguageModel(nn.Module):
  """Next-word model: embedding, (LSTM, tanh, projection) x layers, output.

  The output layer is not tied to the embedding and has a bias. The embedding is
  a gather, whose gradient is a scatter: on CPU it takes a seventh to a tenth of
  the time of a one-hot product.

  Attributes:
    vocabulary_size: V, with PAD, BOS, EOS and OOV.
    embedding: E.
    hidden: H of each layer.
    num_layers: number of LSTM layers.
    chunk: see `TokenLogits`.
    dtype: the type of the products' operands, such as `jnp.bfloat16`; `None`
      for that of the parameters. Parameters, cells, logits and the sums of
      products are float32.

  Reference: Lichtarge et al. 2023, appendix E, after Reddi et al. 2021; the
  tanh between LSTM and projection is FedJAX's.

  >>> from hetfl import core
  >>> x = jnp.zeros((1, 20), jnp.int32)
  >>> def count(module):
  ...   shapes = jax.eval_shape(module.init, jax.random.key(0), x)
  ...   return core.num_parameters(shapes['params'])
  >>> count(small_lstm(10_004)), count(large_lstm(10_004))
  (1984348, 4278644)
  """

  vocabulary_size: int
  embedding: int
  hidden: int
  num_layers: int = 1
  chunk: int | None = None
  dtype: layers.DType | None = None

  @nn.compact
  def __call__(self, x):
    """Maps tokens `int[B, T]` to `TokenLogits`."""
    size = self.vocabulary_size
    normal = nn.initializers.truncated_normal(1.0)
    table = self.param("embedding", normal, (size, self.embedding), jnp.float32)
    h = jnp.take(table, x, axis=0, mode="clip")
    for _ in range(self.num_layers):
      h = jnp.tanh(LSTM(self.hidden, self.dtype)(h))
      h = layers.Dense(self.embedding, dtype=self.dtype)(h)
    zeros, shape = nn.initializers.zeros, (self.embedding, size)
    kernel = self.param("output_kernel", layers.haiku_init, shape)
    bias = self.param("output_bias", zeros, (size,), jnp.float32)
    h, kernel = promote_dtype(h, kernel, dtype=self.dtype)
    return TokenLogits(h, kernel, bias, self.chunk)


def small_lstm(vocabulary_size: int, **kwargs) -> LSTMLanguageModel:
  """The low-capacity pool's model, 1,984,348 parameters at V = 10,004.

  Args:
    vocabulary_size: V, with PAD, BOS, EOS and OOV.
    **kwargs: other attributes of `LSTMLanguageModel`.

  Returns:
    The module.
  """
  kwargs = {"embedding": 96, "hidden": 70, "num_layers": 1, **kwargs}
  return LSTMLanguageModel(vocabulary_size, **kwargs)


def large_lstm(vocabulary_size: int, **kwargs) -> LSTMLanguageModel:
  """The high-capacity pool's model, 4,278,644 parameters at V = 10,004.

  Args:
    vocabulary_size: V, with PAD, BOS, EOS and OOV.
    **kwargs: other attributes of `LSTMLanguageModel`.

  Returns:
    The module.
  """
  kwargs = {"embedding": 192, "hidden": 140, "num_layers": 2, **kwargs}
  return LSTMLanguageModel(vocabulary_size, **kwargs)
