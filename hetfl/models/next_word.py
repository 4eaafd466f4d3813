"""Losses and metrics of next-word prediction.

Token ids are `PAD = 0`, `BOS = 1`, `EOS = 2`, then the words, and last OOV,
`V - 1`. A batch holds `x: int[B, T]`, BOS and words, and `y: int[B, T]`, words
and EOS, both padded with PAD. Letters: V vocabulary size, N positions.

The output layer is most of the work of a step. With `TokenLogits.chunk` the
functions here gather the positions that count, compute the logits of one chunk
of them at a time, and compute value and gradient in one pass, so that the
logits of a whole batch never exist at once. Without it (on accelerators) one
product computes them all.
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from hetfl import checks, core, distill
from hetfl.models.kernels.products import wide_product
from hetfl.models.language import TokenLogits

PAD, BOS, EOS = 0, 1, 2
PyTree = Any
# (logits [n, V], rows, shared) -> (losses [n], their gradients [n, V])
RowLoss = Callable[..., tuple[jax.Array, jax.Array]]


def sentence_loss(expected_length: float = 13.3) -> core.Loss:
  """The loss of next-word prediction.

  `1 / B sum_b 1 / l sum_(t: y_bt != PAD) -log softmax(z_bt)[y_bt]`

  Args:
    expected_length: l, the number of words in an average sentence; a constant,
      so that sentences are weighted by their length.

  Returns:
    `(logits, batch) -> float[]`, the mean over the sentences whose `mask` is
    1, in nats.

  Raises:
    ValueError: l is not positive.

  Reference: FedJAX, `fedjax/training/tasks.py`, expected length 13.3 and
  `fedjax/models/stackoverflow.py`.

  >>> logits = TokenLogits(
  ...     jnp.zeros((2, 3, 1)), jnp.zeros((1, 4)), jnp.zeros(4))
  >>> batch = {'y': jnp.array([[3, 3, 2], [2, 0, 0]]), 'mask': jnp.ones(2)}
  >>> float(sentence_loss(2.)(logits, batch))  # 4 tokens, log 4 each
  1.386...
  """
  checks.positive(expected_length=expected_length)

  def loss(logits, batch):
    _check_targets(logits, batch)
    mask = batch["mask"]
    scale = mask / (expected_length * jnp.maximum(jnp.sum(mask), 1))
    weights = jnp.where(batch["y"] != PAD, scale.reshape(-1, 1), 0.0)
    return _weighted_sum(_cross_entropy, logits, weights, batch["y"])

  return loss


def _cross_entropy(z, y, shared):
  del shared
  log_q = jax.nn.log_softmax(z, axis=-1)
  hit = jnp.arange(z.shape[-1]).reshape(1, -1) == y[:, None]
  # By a gather; a sum over `hit` would read all the logits once more.
  return _negative_log_likelihood(log_q, y), jnp.exp(log_q) - hit


def _negative_log_likelihood(log_q, y):
  """The loss of each target; NaN for ids outside the vocabulary."""
  losses = -jnp.take_along_axis(log_q, y[:, None], axis=-1)[:, 0]
  return jnp.where(y < 0, jnp.nan, losses)


def token_weights(batch: core.Batch) -> jax.Array:
  """The positions that count in distillation: all but padding.

  Args:
    batch: holds `y: int[B, T]` and `mask: float32[B]`.

  Returns:
    `float32[B, T]`, ones and zeros.

  >>> batch = {'y': jnp.array([[5, 2, 0]]), 'mask': jnp.ones(1)}
  >>> token_weights(batch).tolist()
  [[1.0, 1.0, 0.0]]
  """
  return jnp.where(batch["y"] != PAD, batch["mask"].reshape(-1, 1), 0.0)


def token_divergence(
  student: TokenLogits,
  teachers: Sequence[TokenLogits],
  own: TokenLogits,
  batch: core.Batch,
  weights: jax.Array,
  *,
  temperatures: Sequence[float | jax.Array],
  regularization: float | jax.Array,
  label_weight: float = 0.0,
) -> jax.Array:
  """KL from `distill.codist_target` to the student, summed over positions.

  `sum_bt w_bt KL(target_bt || softmax(z_bt))`. The paper leaves open how the
  positions of a sentence are weighted; `token_weights` weights them equally.

  Args:
    student: the student's logits, through which gradients flow.
    teachers: each teacher's logits.
    own: logits of the student before distillation.
    batch: holds `y: int[B, T]`.
    weights: `float[B, T]`; with `TokenLogits.chunk`, positions with weight zero
      are skipped.
    temperatures: each teacher's T.
    regularization: r, in [0, 1].
    label_weight: weight of the true next words beside the teachers, in [0, 1].

  Returns:
    The weighted sum, a scalar in nats.

  Reference: Lichtarge et al. 2023, appendix C.4.

  >>> def logits(ratio):  # of two words, at one position
  ...   bias = jnp.log(jnp.array([ratio, 1.]))
  ...   return TokenLogits(jnp.zeros((1, 1, 2)), jnp.zeros((2, 2)), bias)
  >>> batch, weights = {'y': jnp.array([[1]])}, jnp.ones((1, 1))
  >>> kl = token_divergence(logits(1.), [logits(3.)], logits(1.), batch,
  ...                       weights, temperatures=[1.], regularization=0.)
  >>> round(float(kl), 4)  # 3/4 log(3/2) + 1/4 log(1/2)
  0.1308
  """
  views = (*teachers, own)
  for view in (student, *views):
    _check_targets(view, batch)
  rows = tuple(view.features for view in views), batch["y"]
  heads = tuple((view.kernel, view.bias) for view in views)
  v = jnp.asarray(label_weight, jnp.float32) if label_weight else None
  shared = heads, tuple(temperatures), regularization, v
  return _weighted_sum(_kl, student, weights, rows, shared)


def _kl(z, rows, shared):
  features, y = rows
  heads, temperatures, regularization, label_weight = shared
  labels = None
  if label_weight is not None:
    labels = distill.label_target(z, {"y": y})
  *teachers, own = [_logits(f, *head) for f, head in zip(features, heads)]
  target = distill.codist_target(
    teachers,
    own,
    labels,
    temperatures=temperatures,
    regularization=regularization,
    label_weight=label_weight,
  )
  return distill.kl_divergence(target, z), jax.nn.softmax(z, axis=-1) - target


def _logits(features, kernel, bias):
  """Logits of some positions, float32 at least."""
  return core.wide(wide_product(features, kernel) + bias.reshape(1, -1))


def _weighted_sum(
  divergence: RowLoss,
  logits: TokenLogits,
  weights: jax.Array,
  rows: PyTree,
  shared: PyTree = (),
) -> jax.Array:
  """`sum_bt w_bt divergence(z_bt, rows_bt, shared)`, for training.

  Args:
    divergence: computes the losses of some positions and their gradients; a
      function at module level, since compiled programs are cached by it.
    logits: the student's logits; gradients flow to them and nowhere else.
    weights: `float[B, T]`.
    rows: a pytree of `[B, T, ...]`, the divergence's arguments per position.
    shared: its arguments that are the same for all positions.
  """
  if jnp.shape(weights) != logits.features.shape[:2]:
    raise ValueError(
      f"weights of shape {jnp.shape(weights)} for outputs at"
      f" {logits.features.shape[:2]} positions: give"
      " Distiller(weights=token_weights), float[B, T]"
    )
  features, weights, rows = _flat((logits.features, weights, rows))
  head = logits.kernel, logits.bias
  if logits.chunk is not None:
    return _fused(
      divergence, logits.chunk, features, *head, weights, rows, shared
    )
  z = _logits(features, *head)
  weights, rows, shared = jax.lax.stop_gradient((weights, rows, shared))
  return jnp.sum(weights * divergence(z, rows, shared)[0])


def _flat(tree):
  """Arrays of all positions in a row, `[B T, ...]`."""
  return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), tree)


def _check_targets(logits, batch):
  if not isinstance(logits, TokenLogits):
    raise ValueError(
      f"a model's outputs are {type(logits).__name__}: next-word losses and"
      " metrics need TokenLogits(features, kernel, bias)"
    )
  if jnp.shape(batch["y"]) != logits.features.shape[:2]:
    raise ValueError(
      f"batch['y'] of shape {jnp.shape(batch['y'])} for outputs at"
      f" {logits.features.shape[:2]} positions: want the next word of each"
    )


def _front(chunk, weights, rows):
  """Counts the positions that count and puts them first, in whole chunks."""
  n = len(weights)
  # Padded with n, which does not count and which the gather clips.
  order = jnp.full(-(-n // chunk) * chunk, n, jnp.int32)
  place = jnp.where(weights != 0, jnp.cumsum(weights != 0) - 1, len(order))
  order = order.at[place].set(jnp.arange(n, dtype=jnp.int32), mode="drop")
  take = lambda a: jnp.take(a, order, axis=0, mode="clip")
  weights = jnp.where(order < n, take(weights), 0)
  return order, jnp.sum(weights != 0), weights, jax.tree.map(take, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(divergence, chunk, *args) -> jax.Array:
  return _fused_forward(divergence, chunk, *args)[0]


def _fused_forward(
  divergence, chunk, features, kernel, bias, weights, rows, shared
):
  packed = features, rows
  order, count, weights, (packed, rows) = _front(chunk, weights, packed)

  def body(c, carry):
    total, dpacked, dkernel, dbias = carry
    part = lambda a: jax.lax.dynamic_slice_in_dim(a, c * chunk, chunk)
    f, w = part(packed), part(weights)
    z = _logits(f, kernel, bias)
    losses, dz = divergence(z, jax.tree.map(part, rows), shared)
    dz = w[:, None] * dz
    narrow = dz.astype(jnp.result_type(f, kernel))
    total += jnp.sum(w * losses)
    df = wide_product(narrow, kernel.T).astype(wide)
    put = jax.lax.dynamic_update_slice_in_dim
    dpacked = put(dpacked, df, c * chunk, axis=0)
    dkernel += wide_product(f.T, narrow)
    return total, dpacked, dkernel, dbias + jnp.sum(dz, axis=0)

  # Sums are float32 at least; gradients have their parameters' types.
  wide = jnp.result_type(features, kernel, bias, weights)
  zeros = lambda a: jnp.zeros(jnp.shape(a), wide)
  start = jax.tree.map(zeros, (0.0, packed, kernel, bias))
  total, dpacked, *dhead = jax.lax.fori_loop(0, -(-count // chunk), body, start)
  dpacked = dpacked.astype(features.dtype)
  dfeatures = jnp.zeros_like(features).at[order].set(dpacked, mode="drop")
  dkernel, dbias = (d.astype(a.dtype) for d, a in zip(dhead, (kernel, bias)))
  return total, (dfeatures, dkernel, dbias)


def _fused_backward(divergence, chunk, saved, cotangent):
  del divergence, chunk
  grads = [(cotangent * grad).astype(grad.dtype) for grad in saved]
  return (*grads, None, None, None)  # weights, rows, shared: no gradient.


_fused.defvjp(_fused_forward, _fused_backward)


def next_word_metrics(
  logits: TokenLogits, batch: core.Batch
) -> dict[str, core.Mean]:
  """Accuracies and loss of next-word prediction.

  * `accuracy`, in vocabulary: over targets that are neither PAD nor EOS; OOV
    targets count as errors, since PAD, BOS, EOS and OOV are never predicted.
  * `accuracy_questions` and `accuracy_answers`: the same over the sentences of
    one domain, if the batch has domains.
  * `accuracy_no_eos`: over the same targets, but any token may be predicted,
    and OOV is correct where it is the target.
  * `loss`: cross-entropy over all targets except PAD, so including EOS and
    OOV; `perplexity(loss)` is the perplexity.

  All are sums over tokens, so they do not depend on the batch size.

  Args:
    logits: the model's logits.
    batch: `y: int[B, T]`, `mask: float32[B]` and, if there are domains,
      `domain: int[B]`, 0 for questions and 1 for answers.

  Returns:
    The sums and counts.

  Reference: FedJAX, `fedjax/models/stackoverflow.py`, `accuracy_in_vocab`,
  `accuracy_no_eos` and `token_loss`. The paper says "accuracy" only.

  >>> logits = TokenLogits(  # V = 5: one word, 3; the model says OOV, then it
  ...     jnp.ones((1, 2, 1)), jnp.zeros((1, 5)), jnp.array([0., 0, 0, 1, 2]))
  >>> batch = {'y': jnp.array([[3, 4]]), 'mask': jnp.ones(1)}
  >>> means = next_word_metrics(logits, batch)
  >>> [float(means[n].total) for n in ('accuracy', 'accuracy_no_eos')]
  [1.0, 1.0]
  """
  _check_targets(logits, batch)
  domain = None
  if "domain" in batch:
    shape = batch["y"].shape
    domain = jnp.broadcast_to(batch["domain"].reshape(-1, 1), shape)

  def sums(known, features, y, domain):
    z = _logits(features, logits.kernel, logits.bias)
    log_q = jax.nn.log_softmax(z, axis=-1)
    nll = _negative_log_likelihood(log_q, y)
    word = jnp.argmax(z[:, EOS + 1 : -1], axis=-1) + EOS + 1
    # The argmax of NaN is the first entry, which must not count as a hit.
    hit = lambda word: (word == y) & ~jnp.isnan(log_q[:, 0])
    mean = lambda x, w: core.Mean(jnp.sum(x * w), jnp.sum(w))
    counted = jnp.where(y != EOS, known, 0.0)
    means = {
      "accuracy": mean(hit(word), counted),
      "accuracy_no_eos": mean(hit(jnp.argmax(z, axis=-1)), counted),
      "loss": mean(nll, known),
    }
    if domain is not None:
      for d, name in enumerate(("questions", "answers")):
        theirs = jnp.where(domain == d, counted, 0.0)
        means[f"accuracy_{name}"] = mean(hit(word), theirs)
    return means

  rows = _flat((logits.features, batch["y"], domain))
  known, chunk = token_weights(batch).ravel(), logits.chunk
  if chunk is None:
    return sums(known, *rows)
  # Positions that do not count are cut off, not computed.
  _, count, known, rows = _front(chunk, known, rows)
  part = lambda c: jax.tree.map(
    lambda a: jax.lax.dynamic_slice_in_dim(a, c * chunk, chunk), (known, *rows)
  )
  none = jax.tree.map(jnp.zeros_like, jax.eval_shape(sums, *part(0)))
  return jax.lax.fori_loop(
    0,
    -(-count // chunk),
    lambda c, total: jax.tree.map(jnp.add, total, sums(*part(c))),
    none,
  )


def perplexity(loss: float) -> float:
  """`exp(loss)`: the effective number of words the model chooses between.

  Args:
    loss: mean cross-entropy per token, in nats, over a whole set.

  Returns:
    The perplexity; infinite if it overflows float64.

  >>> perplexity(0.0)
  1.0
  """
  try:
    return math.exp(loss)
  except OverflowError:
    return math.inf
