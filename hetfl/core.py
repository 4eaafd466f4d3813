"""The basic types: losses, algorithms, metrics and, from `hetfl.model`, models.

Letters used throughout: K clients, L lanes, S steps, B batch size, C classes,
P pools (or parties).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from absl import logging
import jax
from jax.experimental import layout
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, output_checks
from hetfl.model import Model as Model
from hetfl.model import Variables as Variables

PyTree = Any
# arrays by name; `x` may be a tree of them
Batch = Mapping[str, PyTree]
# (logits [B, C] or other model outputs, batch) -> losses [B]; or a scalar, the
# mean over the examples whose mask is 1
Loss = Callable[[PyTree, Batch], jax.Array]
# (key, batch as stored in the bank) -> batch for the model and the loss: inputs
# `x` and, for the losses here, labels `y`; without a transform the bank itself
# holds these. `mask` is kept unless the transform returns another one.
Transform = Callable[[jax.Array, Batch], Batch]
# A transform that draws nothing: batch -> batch
Preparation = Callable[[Batch], Batch]
# learning rate -> optimizer, whose state does not depend on the rate
Optimizer = Callable[[jax.Array], optax.GradientTransformation]


class Mean(NamedTuple):
  """A mean as a sum and a count, so that means of rounds add up correctly.

  Attributes:
    total: weighted sum, a scalar.
    count: sum of the weights, a scalar; 0 if nothing was measured.
  """

  total: jax.Array
  count: jax.Array  # type: ignore[assignment]

  @property
  def value(self) -> jax.Array:
    """The mean; NaN if nothing was measured."""
    return self.total / self.count

  def __add__(self, other: "Mean") -> "Mean":  # type: ignore[override]
    """The mean over everything that either mean covers."""
    return Mean(self.total + other.total, self.count + other.count)

  @classmethod
  def zero(cls) -> "Mean":
    """The empty mean; adding it changes nothing."""
    return cls(jnp.zeros(()), jnp.zeros(()))


Metrics = dict[str, Mean]


def values(metrics: Metrics) -> dict[str, float]:
  """The values of the means that are not empty, on the host.

  Args:
    metrics: names and means.

  Returns:
    Names and numbers, without empty means.

  >>> values({'loss': Mean(jnp.array(6.), jnp.array(4.)), 'none': Mean.zero()})
  {'loss': 1.5}
  """
  return {
    name: float(total) / float(count)
    for name, (total, count) in metrics.items()
    if count
  }


def unchanged(state: PyTree, *_) -> tuple[PyTree, Mean]:
  """The result of training that is skipped: the same state, and no loss.

  Args:
    state: what would have been trained.
    *_: the other arguments of the training.

  Returns:
    The state, and an empty mean.
  """
  return state, Mean.zero()


class Algorithm(NamedTuple):
  """A federated algorithm as a pair of pure functions.

  Attributes:
    init: `(key, models=None) -> state`, an immutable pytree. Without models it
      makes new ones; otherwise it continues from those given, which each
      algorithm names and describes.
    step: `(state, plan, data) -> (state, metrics)`, one round. Pure, and
      traceable by `jax.jit`, `jax.vmap` and `jax.lax.scan`, unless the
      algorithm's engine says otherwise. The plan sets the lengths of its loops,
      so it is differentiable by `jax.jvp`; for pools and `fedmd`, on one
      device, also by `jax.grad` if the plan is closed over, not an argument of
      the traced function. The losses of tokens are not differentiable by
      `jax.jvp`.
  """

  init: Callable[..., PyTree]
  step: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, Metrics]]


def wide(x: jax.Array) -> jax.Array:
  """Casts numbers to float32 at least, before differences are taken.

  Args:
    x: `[...]`, numbers of any type.

  Returns:
    `float32[...]`; `float64[...]` if `x` is float64.

  >>> wide(jnp.ones(2, jnp.bfloat16)).dtype, wide(jnp.ones(2)).dtype
  (dtype('float32'), dtype('float32'))
  """
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def cross_entropy(logits: jax.Array, batch: Batch) -> jax.Array:
  """Softmax cross-entropy of each example, `-log softmax(logits)[y]`.

  Args:
    logits: `float[B, C]`.
    batch: holds `y: int32[B]`.

  Returns:
    `float[B]`, in nats; NaN where a label is out of range.

  Raises:
    ValueError: as `output_checks.labels`.

  >>> float(cross_entropy(jnp.zeros((1, 4)), {'y': jnp.array([2])})[0])
  1.386...
  """
  labels = output_checks.labels(logits, batch)
  losses = optax.softmax_cross_entropy_with_integer_labels(wide(logits), labels)
  # Negative labels would count from the last class. A product, so that the
  # gradient is NaN too: a model must not train on the other examples unseen.
  known = (labels >= 0) & (labels < logits.shape[-1])
  return losses * jnp.where(known, 1.0, jnp.nan)


def inputs_of(batch: Batch) -> str:
  """What a batch's inputs are, for error messages.

  Args:
    batch: holds `x`.

  Returns:
    Their shapes, in words.

  >>> inputs_of({'x': jnp.zeros((2, 3))})
  'given inputs x of shape (2, 3)'
  """
  return f"given inputs x of shape {jax.tree.map(jnp.shape, batch['x'])}"


def losses_of(loss: Loss, logits: PyTree, batch: Batch) -> jax.Array:
  """The losses of a batch; an error says how a loss is called.

  Args:
    loss: the loss.
    logits: the model's outputs.
    batch: the batch.

  Returns:
    `float[B]`, or a scalar.
  """
  with checks.noted(
    "a loss is called as loss(logits, batch), and takes what it needs from the"
    f" batch, which holds {sorted(batch)}"
  ):
    return loss(logits, batch)


def gather(bank: Batch, index: jax.Array | np.ndarray) -> Batch:
  """Takes a batch out of a bank.

  Args:
    bank: arrays with examples on their first axis.
    index: `int32[B]`, positions; -1 marks an empty place, which is filled with
      the batch's first example (the bank's first if the batch is empty) and has
      `mask` 0.

  Returns:
    The batch: the bank's arrays and `mask: float32[B]`. Positions beyond the
    bank, as in a plan for another bank, have the mask NaN, and so make the loss
    NaN.

  Raises:
    ValueError: the bank has a `mask` of its own, or arrays of different
      lengths.

  >>> gather({'y': jnp.array([7, 8, 9])}, jnp.array([2, -1]))['y']
  Array([9, 9], dtype=int32)
  """
  if "mask" in bank:
    raise ValueError(
      "a bank has an array named 'mask', a name reserved for the batch's mask:"
      " rename it"
    )
  number = checks.num_examples(bank)
  # Not the bank's first example, which may hold NaN: 0 times NaN is NaN.
  taken = jnp.maximum(jnp.where(index < 0, index[0], index), 0)
  batch = {
    name: jnp.take(array, taken, axis=0, mode="clip")
    for name, array in bank.items()
  }
  mask = (index >= 0).astype(jnp.float32)
  return {**batch, "mask": jnp.where(index < number, mask, jnp.nan)}


def bank_format(
  array: jax.Array | np.ndarray, sharding: jax.sharding.Sharding
) -> jax.sharding.Sharding | layout.Format:
  """Where and how a bank's array should lie, for `jax.device_put`.

  TPUs keep images of several channels with the examples on an inner axis, and
  would copy the whole bank in each program that gathers from it.

  Args:
    array: examples on its first axis.
    sharding: the devices.

  Returns:
    The sharding; for images on TPUs a format with the examples outermost.

  >>> there = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  >>> bank_format(np.zeros((5, 8, 8, 3)), there) is there  # not on a TPU
  True
  """
  if jax.default_backend() != "tpu" or array.ndim != 4 or array.shape[3] == 1:
    return sharding
  return layout.Format(layout.Layout((0, 3, 1, 2)), sharding)


def prepare(
  transform: Transform | Preparation | None,
  batch: Batch,
  key: jax.Array | None = None,
) -> Batch:
  """Prepares a gathered batch for the model and the loss.

  Args:
    transform: `None` leaves the batch as it is.
    batch: the batch.
    key: a random key, for a `Transform`; `None` for a `Preparation`.

  Returns:
    The transform's result, with the batch's `mask` unless it has its own.

  Raises:
    ValueError: the transform takes other arguments or does not return a dict,
      or the result has no `x`.

  >>> batch = {'image': jnp.ones(2), 'mask': jnp.ones(2)}
  >>> sorted(prepare(lambda batch: {'x': batch['image']}, batch))
  ['mask', 'x']
  """
  if transform is not None:
    if not callable(transform):
      raise ValueError(
        f"a transform is a {type(transform).__name__}: give a function of a"
        " batch"
      )
    args: dict[str, Any] = {"batch": batch}
    if key is not None:
      args = {"key": key, **args}
    checks.takes("a transform", transform, *args)
    given = transform(*args.values())
    if not isinstance(given, Mapping):
      raise ValueError(
        f"a transform returned a {type(given).__name__}, not a batch: it must"
        " return a dict of arrays"
      )
    batch = {"mask": batch["mask"], **given}
  if "x" not in batch:
    raise ValueError(
      f"a batch holds {sorted(batch)}, but models take 'x': name the bank's"
      " inputs so, or give a transform"
    )
  return batch


def sums_like(tree: PyTree) -> PyTree:
  """Zeros, of float32 at least, in which to add up such arrays.

  Args:
    tree: a pytree of arrays.

  Returns:
    Zeros of the same structure and shapes.

  >>> sums_like(jnp.ones(2, jnp.bfloat16))
  Array([0., 0.], dtype=float32)
  """
  return jax.tree.map(lambda a: jnp.zeros_like(wide(a)), tree)


def as_type(x: jax.Array, dtype: Any) -> jax.Array:
  """Casts an array; to an integer type, it rounds to the nearest integer.

  Args:
    x: `[...]`, floating-point numbers or integers.
    dtype: the new type.

  Returns:
    `dtype[...]`; ties are rounded to the even integer.

  >>> as_type(jnp.array([6.9999995, 2.5]), jnp.int32)
  Array([7, 2], dtype=int32)
  """
  if jnp.issubdtype(dtype, jnp.integer):
    x = jnp.round(x)
  return x.astype(dtype)


@jax.custom_batching.custom_vmap
def any_of_batch(when: jax.Array) -> jax.Array:
  """Returns `when`; under `jax.vmap`, one value: whether it is true for any.

  A `jax.lax.cond` on it stays a `cond`; on `when`, `vmap` would run both
  branches.

  Args:
    when: `bool[]`.

  Returns:
    `bool[]`, without a batch axis.

  >>> when = jnp.array([False, True])
  >>> jax.vmap(any_of_batch, out_axes=None)(when)
  Array(True, dtype=bool)
  """
  return jnp.asarray(when)


@any_of_batch.def_vmap
def _any_of_batch(axis_size, in_batched, when):
  del axis_size, in_batched
  return any_of_batch(jnp.any(when, axis=0)), False


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
  """Mean of the values whose mask is 1; 0 if there are none.

  Args:
    values: `float[B]`; or a scalar, which is that mean already.
    mask: `float[B]`, ones and zeros.

  Returns:
    A scalar.

  Raises:
    ValueError: as `output_checks.losses`.

  >>> float(masked_mean(jnp.array([1., 2., 9.]), jnp.array([1., 1., 0.])))
  1.5
  """
  output_checks.losses(values, mask)
  if not jnp.ndim(values):
    return values
  return jnp.sum(values * mask) / jnp.maximum(jnp.sum(mask), 1)


def num_parameters(params: PyTree) -> int:
  """Number of trained parameters.

  Args:
    params: a pytree of arrays or shapes.

  Returns:
    The sum of their sizes.

  >>> num_parameters({'kernel': jnp.zeros((3, 2)), 'bias': jnp.zeros(2)})
  8
  """
  return sum(leaf.size for leaf in jax.tree.leaves(params))


def descend(
  optimizer: optax.GradientTransformation,
  params: PyTree,
  opt_state: PyTree,
  grads: PyTree,
  **extra: Any,
) -> tuple[PyTree, PyTree]:
  """One step of an optimizer.

  Args:
    optimizer: an optax optimizer.
    params: the parameters.
    opt_state: the optimizer's state.
    grads: the gradient, shaped as the parameters.
    **extra: extra arguments, such as the loss as `value`, for optimizers that
      take them; others do not get them.

  Returns:
    The parameters and the optimizer's state after the step.

  >>> sgd = optax.sgd(0.5)
  >>> descend(sgd, jnp.array(3.), sgd.init(0.), jnp.array(2.), value=9.)[0]
  Array(2., dtype=float32)
  """
  optimizer = optax.with_extra_args_support(optimizer)
  updates, opt_state = optimizer.update(grads, opt_state, params, **extra)
  return optax.apply_updates(params, updates), opt_state


def hash_key(field: Any) -> Any:
  """A key that identifies a field: itself, or its `id` if it has no hash.

  Args:
    field: anything, such as a model's function.

  Returns:
    A key for a dict, valid while the field lives.

  >>> hash_key(max) is max, isinstance(hash_key([]), int)
  (True, True)
  """
  try:
    hash(field)
  except TypeError:  # Such as a dataclass with a `__call__`.
    return id(field)
  return field


def strong(tree: PyTree) -> PyTree:
  """Removes weak types, which a checkpoint does not keep.

  With weak types, a restored state could be promoted to other types than the
  original, and a step would compile twice.

  Args:
    tree: a pytree of arrays and other leaves.

  Returns:
    The pytree.

  >>> jnp.asarray(1.0).weak_type, strong(jnp.asarray(1.0)).weak_type
  (True, False)
  """

  def leaf(x):
    if getattr(x, "weak_type", False):
      return jax.lax.convert_element_type(x, x.dtype)
    return x

  return jax.tree.map(leaf, tree)


def num_parts(
  batch_size: int, at_most: int | None, *, multiple: int = 1
) -> int:
  """The least number of equal parts of a batch that are small enough.

  Args:
    batch_size: B.
    at_most: examples in a part, at most; `None` for all.
    multiple: the number of parts must be a multiple of this; a divisor of B.

  Returns:
    A divisor of B. Logs a warning if it makes the parts much smaller than
    asked for, as when B is prime.

  >>> num_parts(128, 32), num_parts(128, 60), num_parts(7, None)
  (4, 4, 1)
  >>> num_parts(128, None, multiple=8)
  8
  """
  parts = next(
    n
    for n in range(multiple, batch_size + 1, multiple)
    if batch_size % n == 0 and batch_size // n <= (at_most or batch_size)
  )
  if at_most and 2 * batch_size // parts < min(at_most, batch_size // multiple):
    logging.log_first_n(
      logging.WARNING,
      "A batch of %d is cut into %d parts of %d, which is slow: no larger part"
      " size up to microbatch=%d divides the batch.",
      1,
      batch_size,
      parts,
      batch_size // parts,
      at_most,
    )
  return parts


def split(tree: PyTree, parts: int) -> PyTree:
  """Cuts arrays of B rows into equal parts.

  Args:
    tree: arrays `[B, ...]`.
    parts: N, a divisor of B.

  Returns:
    Arrays `[N, B / N, ...]`.

  >>> split(jnp.arange(4), 2).tolist()
  [[0, 1], [2, 3]]
  """
  return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), tree)
