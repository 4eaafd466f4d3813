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

from collections.abc import Sequence
import functools

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import checks, core, distill
from hetfl.models.kernels.products import wide_product
from hetfl.models.language import TokenLogits

PAD, BOS, EOS = 0, 1, 2


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


def _cross_entropy(z, y, _):
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
  rows = tuple(v.features for v in views), batch["y"] if label_weight else None
  heads = tuple((view.kernel, view.bias) for view in views)
  shared = heads, tuple(temperatures), regularization, label_weight
  return _weighted_sum(_kl, student, weights, rows, shared)


def _kl(z, rows, shared):
  features, y = rows
  heads, temperatures, regularization, label_weight = shared
  views = [TokenLogits(f, *head).dense() for f, head in zip(features, heads)]
  target = distill.codist_target(
    views[:-1],
    views[-1],
    None if y is None else distill.label_target(z, {"y": y}),
    temperatures=temperatures,
    regularization=regularization,
    label_weight=label_weight,
  )
  return distill.kl_divergence(target, z), jax.nn.softmax(z, axis=-1) - target


def _weighted_sum(divergence, logits, weights, rows, shared=()):
  """`sum_bt w_bt divergence(z_bt, rows_bt, shared)`, for training.

  Args:
    divergence: from logits `[n, V]` to losses `[n]` and their gradients
      `[n, V]`; a function at module level, since compiled programs are cached
      by it.
    logits: the student's `TokenLogits`; gradients flow to them and nowhere
      else.
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
  logits = logits.replace(features=features)
  if logits.chunk is not None:
    return _fused(divergence, logits, weights, rows, shared)
  weights, rows, shared = jax.lax.stop_gradient((weights, rows, shared))
  return jnp.sum(weights * divergence(logits.dense(), rows, shared)[0])


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


def _chunks(size, weights, rows):
  """Puts the positions that count first, and cuts them into chunks.

  Returns:
    The order, the number of chunks, and a function from a chunk's number to
    its weights and rows.
  """
  n = len(weights)
  # Padded with n, which does not count and which the gather clips.
  order = jnp.full(-(-n // size) * size, n, jnp.int32)
  place = jnp.where(weights != 0, jnp.cumsum(weights != 0) - 1, len(order))
  order = order.at[place].set(jnp.arange(n, dtype=jnp.int32), mode="drop")
  take = lambda a: jnp.take(a, order, axis=0, mode="clip")
  weights, rows = jax.tree.map(take, (weights, rows))
  weights = jnp.where(order < n, weights, 0)
  part = lambda c: jax.tree.map(
    lambda a: jax.lax.dynamic_slice_in_dim(a, c * size, size), (weights, rows)
  )
  return order, -(-jnp.sum(weights != 0) // size), part


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(divergence, logits, weights, rows, shared) -> jax.Array:
  return _fused_forward(divergence, logits, weights, rows, shared)[0]


def _fused_forward(divergence, logits, weights, rows, shared):
  size, features, kernel = logits.chunk, logits.features, logits.kernel
  order, number, part = _chunks(size, weights, (features, rows))

  def body(c, carry):
    total, dfeatures, dkernel, dbias = carry
    w, (f, rows) = part(c)
    losses, dz = divergence(logits.replace(features=f).dense(), rows, shared)
    dz = w[:, None] * dz
    narrow = dz.astype(jnp.result_type(f, kernel))
    df = wide_product(narrow, kernel.T).astype(wide)
    put = jax.lax.dynamic_update_slice_in_dim
    dfeatures = put(dfeatures, df, c * size, axis=0)
    dkernel += wide_product(f.T, narrow)
    total += jnp.sum(w * losses)
    return total, dfeatures, dkernel, dbias + jnp.sum(dz, axis=0)

  # Sums are float32 at least; gradients have their parameters' types.
  wide = jnp.result_type(features, kernel, logits.bias, weights)
  packed = len(order), *features.shape[1:]
  shapes = (), packed, kernel.shape, logits.bias.shape
  start = tuple(jnp.zeros(shape, wide) for shape in shapes)
  total, *sums = jax.lax.fori_loop(0, number, body, start)
  arrays = features, kernel, logits.bias
  dfeatures, *dhead = (d.astype(a.dtype) for d, a in zip(sums, arrays))
  dfeatures = jnp.zeros_like(features).at[order].set(dfeatures, mode="drop")
  return total, TokenLogits(dfeatures, *dhead, size)


def _fused_backward(divergence, grads, cotangent):
  del divergence
  scaled = lambda grad: (cotangent * grad).astype(grad.dtype)
  # Weights, rows and what is shared have no gradient.
  return jax.tree.map(scaled, grads), None, None, None


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
  domain = batch.get("domain")
  if domain is not None:
    domain = jnp.broadcast_to(domain.reshape(-1, 1), batch["y"].shape)

  def sums(known, rows):
    features, y, domain = rows
    z = logits.replace(features=features).dense()
    log_q = jax.nn.log_softmax(z, axis=-1)
    word = jnp.argmax(z[:, EOS + 1 : -1], axis=-1) + EOS + 1
    losses = _negative_log_likelihood(log_q, y)
    # The argmax of NaN is the first entry, which must not count as a hit.
    hit = lambda word: jnp.where(jnp.isnan(losses), jnp.nan, word == y)
    counted = jnp.where(y != EOS, known, 0.0)
    weighted = {
      "accuracy": (hit(word), counted),
      "accuracy_no_eos": (hit(jnp.argmax(z, axis=-1)), counted),
      "loss": (losses, known),
    }
    if domain is not None:
      for d, name in enumerate(("questions", "answers")):
        theirs = jnp.where(domain == d, counted, 0.0)
        weighted[f"accuracy_{name}"] = hit(word), theirs
    return {
      name: core.Mean(jnp.sum(x * w), jnp.sum(w))
      for name, (x, w) in weighted.items()
    }

  rows = _flat((logits.features, batch["y"], domain))
  known = token_weights(batch).ravel()
  if logits.chunk is None:
    return sums(known, rows)
  # Positions that do not count are cut off, not computed.
  _, number, part = _chunks(logits.chunk, known, rows)
  add = lambda c, total: jax.tree.map(jnp.add, total, sums(*part(c)))
  none = jax.tree.map(jnp.zeros_like, jax.eval_shape(sums, *part(0)))
  return jax.lax.fori_loop(0, number, add, none)


def perplexity(loss: float) -> float:
  """`exp(loss)`: the effective number of words the model chooses between.

  Args:
    loss: mean cross-entropy per token, in nats, over a whole set.

  Returns:
    The perplexity; infinite if it overflows float64.

  >>> perplexity(0.0)
  1.0
  """
  with np.errstate(over="ignore"):
    return float(np.exp(loss))
