"""Next-word language models."""

import flax.linen as nn
from flax.linen.dtypes import promote_dtype
import flax.struct
import jax
import jax.numpy as jnp

from hetfl import core
from hetfl.models import layers


@flax.struct.dataclass
class TokenLogits:
  """Logits of all positions, not yet computed: `features @ kernel + bias`.

  With a vocabulary of ten thousand the logits of a batch are far larger than
  everything else; `hetfl.next_word` computes losses and metrics from them part
  by part, at the positions that count.

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
    product = layers.wide_product(self.features, self.kernel)
    return product + self.bias.reshape(1, 1, -1)


class LSTM(nn.Module):
  """An LSTM layer over whole sequences, with zero initial states.

  `i, g, f, o = x_t W_x + h_(t-1) W_h + b`;
  `c_t = sigmoid(f + 1) c_(t-1) + sigmoid(i) tanh(g)`;
  `h_t = sigmoid(o) tanh(c_t)`.

  The 1 added to the forget gate, the order of the gates and the initial weights
  are Haiku's. The layer has `(in + H) 4 H + 4 H` parameters.

  Attributes:
    hidden: H.
    dtype: the type of the products' factors and of the outputs, such as
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
    # Haiku has one matrix for x and h, hence one fan-in.
    scale = (1 + self.hidden / width) ** -0.5
    kernel = self.param(
      "kernel",
      lambda *args: scale * layers.haiku_init(*args),
      (width, 4 * self.hidden),
    )
    scale_h = (1 + width / self.hidden) ** -0.5
    recurrent = self.param(
      "recurrent",
      lambda *args: scale_h * layers.haiku_init(*args),
      (self.hidden, 4 * self.hidden),
    )
    bias = self.param(
      "bias", nn.initializers.zeros, (4 * self.hidden,), jnp.float32
    )
    x, kernel, recurrent = promote_dtype(x, kernel, recurrent, dtype=self.dtype)
    # The part that does not depend on h: one product for all time steps.
    gates = layers.add_bias(x.reshape(-1, width) @ kernel, bias.reshape(1, -1))
    gates = gates.reshape(batch, length, -1).swapaxes(0, 1)
    return recur(gates, recurrent).swapaxes(0, 1)


def _positions_at_once() -> int:
  """Positions for each turn of a loop.

  On accelerators a turn costs more than the small products of one position.
  """
  return 1 if jax.default_backend() == "cpu" else 20


@jax.custom_vjp
def recur(gates: jax.Array, recurrent: jax.Array) -> jax.Array:
  """The recurrence of an LSTM; see `LSTM`.

  It has a gradient of its own: that of a `lax.scan` adds up the kernel's
  gradient step by step; here it is one product over all steps. Reverse mode
  only.

  Args:
    gates: `float[T, B, 4 H]`, the inputs' part of the gates `i, g, f, o`.
    recurrent: `float[H, 4 H]`, of the same type.

  Returns:
    `float[T, B, H]`, the outputs `h`, of that type too. The cells `c` and all
    sums are float32 at least.

  >>> import math
  >>> h = recur(jnp.zeros((1, 1, 4)).at[0, 0, 1].set(9.), jnp.zeros((1, 4)))
  >>> math.isclose(h[0, 0, 0], 0.5 * math.tanh(0.5), rel_tol=1e-5)
  True
  """
  return _recur_forward(gates, recurrent)[0]


def _recur_forward(gates, recurrent):
  def step(carry, x):
    h, c = carry
    sums = core.wide(x) + layers.wide_product(h, recurrent)
    i, g, f, o = jnp.split(sums, 4, axis=-1)
    i, g, f, o = nn.sigmoid(i), jnp.tanh(g), nn.sigmoid(f + 1), nn.sigmoid(o)
    new = f * c + i * g
    squashed = jnp.tanh(new)
    h = (o * squashed).astype(gates.dtype)
    saved = c, jnp.concatenate([i, g, f, o, squashed], axis=-1)
    return (h, new), (h, *(a.astype(gates.dtype) for a in saved))

  zero = jnp.zeros((gates.shape[1], recurrent.shape[0]), gates.dtype)
  _, (h, c, acts) = jax.lax.scan(
    step, (zero, core.wide(zero)), gates, unroll=_positions_at_once()
  )
  return h, (h, c, acts, recurrent)


def _recur_backward(saved, dh):
  h, c, acts, recurrent = saved

  def step(carry, x):
    dh, dc = carry
    dh_t, c, acts = map(core.wide, x)
    i, g, f, o, squashed = jnp.split(acts, 5, axis=-1)
    dh = dh + dh_t
    dc = dc + dh * o * (1 - squashed**2)
    dgates = jnp.concatenate(
      [
        dc * g * i * (1 - i),
        dc * i * (1 - g**2),
        dc * c * f * (1 - f),
        dh * squashed * o * (1 - o),
      ],
      axis=-1,
    ).astype(h.dtype)
    return (layers.wide_product(dgates, recurrent.T), dc * f), dgates

  zero = jnp.zeros_like(core.wide(h[0]))
  _, dgates = jax.lax.scan(
    step,
    (zero, zero),
    (dh, c, acts),
    reverse=True,
    unroll=_positions_at_once(),
  )
  before = jnp.concatenate([jnp.zeros_like(h[:1]), h[:-1]])
  rows = lambda a: a.reshape(-1, a.shape[-1])
  return dgates, rows(before).T @ rows(dgates)


recur.defvjp(_recur_forward, _recur_backward)


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
    dtype: the type of the products' factors, such as `jnp.bfloat16`; `None` for
      that of the parameters. Parameters, cells, logits and the sums of products
      are float32.

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
    table = self.param(
      "embedding",
      lambda key, *args: jax.random.truncated_normal(key, -2, 2, *args),
      (self.vocabulary_size, self.embedding),
      jnp.float32,
    )
    h = jnp.take(table, x, axis=0, mode="clip")
    for _ in range(self.num_layers):
      h = jnp.tanh(LSTM(self.hidden, self.dtype)(h))
      h = layers.Dense(self.embedding, dtype=self.dtype)(h)
    kernel = self.param(
      "output_kernel",
      layers.haiku_init,
      (self.embedding, self.vocabulary_size),
    )
    bias = self.param(
      "output_bias",
      nn.initializers.zeros,
      (self.vocabulary_size,),
      jnp.float32,
    )
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
  return LSTMLanguageModel(vocabulary_size, 96, 70, 1, **kwargs)


def large_lstm(vocabulary_size: int, **kwargs) -> LSTMLanguageModel:
  """The high-capacity pool's model, 4,278,644 parameters at V = 10,004.

  Args:
    vocabulary_size: V, with PAD, BOS, EOS and OOV.
    **kwargs: other attributes of `LSTMLanguageModel`.

  Returns:
    The module.
  """
  return LSTMLanguageModel(vocabulary_size, 192, 140, 2, **kwargs)
