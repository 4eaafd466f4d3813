"""Products and sums of narrow numbers, dropout, and an LSTM's recurrence."""

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import core
from hetfl.models import kernels


def is_wide(dtype: jax.typing.DTypeLike) -> bool:
  """Whether a type has the bits for long sums: float32, not bfloat16."""
  return jnp.dtype(dtype).itemsize >= 4


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
  """`y + bias` in y's type; the bias's gradient is summed in its own.

  Args:
    y: `float[..., f]`, such as bfloat16.
    bias: `float[f]`, such as float32; or with more of the last axes.

  Returns:
    `float[..., f]`.

  >>> add_bias(jnp.ones((2, 1), jnp.bfloat16), jnp.ones(1)).dtype
  dtype(bfloat16)
  """
  bias = bias.reshape(*[1] * (y.ndim - bias.ndim), *bias.shape)
  return (y + bias).astype(y.dtype)


def wide_product(a: jax.Array, b: jax.Array) -> jax.Array:
  """`a @ b` in float32 at least, of factors that may be bfloat16.

  The gradients of two narrow factors are products of their type, so the
  cotangent is rounded to it; there are no forward-mode derivatives of these.

  Args:
    a: `float[..., k]`.
    b: `float[k, m]`.

  Returns:
    `float32[..., m]`; float64 if one of them is.

  >>> a = jnp.array([[1., 2 ** -9]], jnp.bfloat16)
  >>> float(wide_product(a, a.T)[0, 0] - 1) * 2 ** 18
  1.0
  """
  if a.dtype != b.dtype or is_wide(a.dtype):
    return core.wide(a @ b)
  return _product_of_narrow(a, b)


@jax.custom_vjp
def _product_of_narrow(a, b):
  return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _narrow_backward(factors, cotangent):
  a, b = factors
  g = cotangent.astype(a.dtype)
  rows = lambda x: x.reshape(-1, x.shape[-1])
  return g @ b.T, rows(a).T @ rows(g)


_product_of_narrow.defvjp(
  lambda a, b: (_product_of_narrow(a, b), (a, b)), _narrow_backward
)


def dropout(key: jax.Array, x: jax.Array, rate: float) -> jax.Array:
  """Drops single elements and scales up the others.

  The draws are hashes of a counter (murmur3's finaliser, twice, each with a
  word of the key), several times faster on CPU than JAX's generator, which
  would take up to half the time of a small CNN's step.

  Args:
    key: a random key.
    x: `float[...]`.
    rate: share of elements that is dropped; below 1.

  Returns:
    `float[...]`.

  >>> y = dropout(jax.random.key(0), jnp.ones((100, 100)), 0.2)
  >>> sorted(set(y.ravel().tolist())), round(float((y == 0).mean()), 2)
  ([0.0, 1.25], 0.2)
  """
  words = jax.random.bits(key, (2,), jnp.uint32)
  count = jax.lax.iota(jnp.uint32, x.size)
  draw = _mix(_mix(count + words[:1]) ^ words[1:]).reshape(x.shape)
  kept = draw >= np.uint32(rate * 2**32)
  return jnp.where(kept, x / (1 - rate), jnp.zeros((), x.dtype))


def _mix(h):
  """murmur3's finaliser: a bijection in which every bit changes every bit."""
  h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
  h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
  return h ^ (h >> 16)


@jax.custom_vjp
def recur(gates: jax.Array, recurrent: jax.Array) -> jax.Array:
  """The recurrence of an LSTM; see `hetfl.models.language.LSTM`.

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
    sums = core.wide(x) + wide_product(h, recurrent)
    i, g, f, o = jnp.split(sums, 4, axis=-1)
    sigmoid, tanh = jax.nn.sigmoid, jnp.tanh
    i, g, f, o = sigmoid(i), tanh(g), sigmoid(f + 1), sigmoid(o)
    new = f * c + i * g
    squashed = tanh(new)
    h = (o * squashed).astype(gates.dtype)
    saved = c, jnp.concatenate([i, g, f, o, squashed], axis=-1)
    return (h, new), (h, *(a.astype(gates.dtype) for a in saved))

  zero = jnp.zeros((gates.shape[1], recurrent.shape[0]), gates.dtype)
  start = zero, core.wide(zero)
  unroll = kernels.forms().positions
  _, (h, c, acts) = jax.lax.scan(step, start, gates, unroll=unroll)
  return h, (h, c, acts, recurrent)


def _recur_backward(saved, dh):
  h, c, acts, recurrent = saved

  def step(carry, x):
    dh, dc = carry
    dh_t, c, acts = map(core.wide, x)
    i, g, f, o, squashed = jnp.split(acts, 5, axis=-1)
    dh = dh + dh_t
    dc = dc + dh * o * (1 - squashed**2)
    di, dg, df = dc * g * i * (1 - i), dc * i * (1 - g**2), dc * c * f * (1 - f)
    do = dh * squashed * o * (1 - o)
    dgates = jnp.concatenate([di, dg, df, do], axis=-1).astype(h.dtype)
    return (wide_product(dgates, recurrent.T), dc * f), dgates

  zero = jnp.zeros_like(core.wide(h[0]))
  start, unroll = (zero, zero), kernels.forms().positions
  _, dgates = jax.lax.scan(
    step, start, (dh, c, acts), reverse=True, unroll=unroll
  )
  before = jnp.concatenate([jnp.zeros_like(h[:1]), h[:-1]])
  rows = lambda a: a.reshape(-1, a.shape[-1])
  return dgates, rows(before).T @ rows(dgates)


recur.defvjp(_recur_forward, _recur_backward)
