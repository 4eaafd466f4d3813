"""The basic types: losses, algorithms, metrics and, from `hetfl.model`, models.

Letters used throughout: K clients, S steps, B batch size, C classes, P pools
(or parties).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks
from hetfl.model import Model as Model
from hetfl.model import Variables as Variables

PyTree = Any
Batch = Mapping[str, PyTree]
"""Arrays by name, examples on the first axis; `x` may be a tree of them."""
Loss = Callable[[PyTree, Batch], jax.Array]
"""`(outputs, batch) -> losses`: `float[B]`; or a scalar, the mean over the
examples whose mask is 1. Outputs are logits `float[B, C]` or whatever else the
model returns."""
Transform = Callable[[jax.Array, Batch], Batch]
"""`(key, batch as stored in the bank) -> batch` for the model and the loss:
inputs `x` and, for the losses here, labels `y`; without a transform the bank
itself holds these. `mask` is kept unless the transform returns another one."""
Preparation = Callable[[Batch], Batch]
"""A transform that draws nothing: `batch -> batch`."""
Optimizer = Callable[[jax.Array], optax.GradientTransformation]
"""`learning rate -> optimizer`, whose state does not depend on the rate."""


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

  Raises:
    ValueError: a mean is not of scalars.

  >>> values({'loss': Mean(jnp.array(6.), jnp.array(4.)), 'none': Mean.zero()})
  {'loss': 1.5}
  """
  for name, (total, count) in metrics.items():
    if np.ndim(total) or np.ndim(count):
      raise ValueError(
        f"{name}: its sum and count have the shapes {np.shape(total)} and"
        f" {np.shape(count)}: sum over the batch; for classes use a"
        " ClientEvaluator, for several trials or rounds `.value`"
      )
  return {
    name: float(total) / float(count)
    for name, (total, count) in metrics.items()
    if count
  }


class Algorithm(NamedTuple):
  """A federated algorithm as a pair of pure functions.

  Attributes:
    init: `(key, models=None) -> state`, an immutable pytree. Without models it
      makes new ones; otherwise it continues from those given, which each
      algorithm names and describes.
    step: `(state, plan, data) -> (state, metrics)`, one round. Pure, and
      traceable by `jax.jit`, `jax.vmap` and `jax.lax.scan`, unless the
      algorithm's engine says otherwise. The plan sets the lengths of its loops,
      so it is differentiable by `jax.jvp`; for `fedavg`, `periodic_codist` and
      `fedmd`, on one device, also by `jax.grad` if the plan is closed over, not
      an argument of the traced function. The losses of tokens are not
      differentiable by `jax.jvp`.
    on_host: whether both move what clients keep to and from the host, and are
      not to be traced; see `hetfl.clients.on_host`.
  """

  init: Callable[..., PyTree]
  step: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, Metrics]]
  on_host: bool = False


class State(flax.struct.PyTreeNode):
  """The state of an algorithm.

  Attributes:
    key: the run's key; it never changes, and every draw folds the round into
      it.
    hyper: hyper-parameters by name, `float32[]` or one for each pool or party,
      `float32[P]`, so that `jax.vmap` can batch trials with different values.
    server: the models that the server keeps; `()` if none.
    clients: what clients keep between rounds; `()` if nothing.
  """

  key: jax.Array
  hyper: dict[str, jax.Array]
  server: PyTree = ()
  clients: PyTree = ()


def unique_names(what: str, given: Any, kind: type, at_least: int = 1) -> tuple:
  """Participants as a tuple.

  Args:
    what: "pools" or "parties".
    given: the participants.
    kind: their type.
    at_least: how many are needed.

  Returns:
    The participants.

  Raises:
    ValueError: one is of another type, two share a name, or there are too few.

  >>> unique_names('pools', [3], Model)
  Traceback (most recent call last):
    ...
  ValueError: pools: give a sequence of at least 1 Model, each with a \
name of its own, not [3]
  """
  several = isinstance(given, list | tuple)
  alike = several and all(isinstance(one, kind) for one in given)
  names = [one.name for one in given] if alike else []
  if len(names) < at_least or len({*names, ""}) <= len(names):
    raise ValueError(
      f"{what}: give a sequence of at least {at_least} {kind.__name__}, each"
      f" with a name of its own, not {names or given}"
    )
  return tuple(given)


def with_hyper(state: State, **values: Any) -> State:
  """Sets hyper-parameters in a state, such as those of a trial.

  Args:
    state: the state of any algorithm here, of one trial.
    **values: hyper-parameters by their names in `state.hyper`; each is one
      value, or one for each pool or party. Values are not checked, since
      tracers could not be.

  Returns:
    The new state.

  Raises:
    ValueError: the state has no hyper-parameter of that name, or has it in
      another shape; or the state holds several trials.

  >>> state = State(jax.random.key(0), {'alpha': jnp.zeros(())})
  >>> with_hyper(state, alpha=0.5).hyper
  {'alpha': Array(0.5, dtype=float32)}
  >>> with_hyper(state, beta=0.5)
  Traceback (most recent call last):
    ...
  ValueError: beta: this state has no such hyper-parameter; it has ['alpha']
  """
  if several_trials(state):
    raise ValueError(
      "the state holds several trials: set each trial's values by"
      " jax.vmap(lambda state, v: with_hyper(state, NAME=v))(states, values)"
    )
  hyper = dict(state.hyper)
  for name, value in values.items():
    if name not in hyper:
      raise ValueError(
        f"{name}: this state has no such hyper-parameter; it has"
        f" {sorted(hyper)}"
      )
    value, shape = jnp.asarray(value, jnp.float32), hyper[name].shape
    if value.shape not in ((), shape):
      raise ValueError(
        f"{name}: an array of shape {value.shape}; give one value"
        + (f", or an array of shape {shape}" if shape else "")
      )
    # A copy, since states are donated.
    hyper[name] = jnp.array(jnp.broadcast_to(value, shape))
  return state.replace(hyper=hyper)


def unshared(tree: PyTree, other: PyTree) -> PyTree:
  """A tree that shares no arrays with another: a donated state holds both."""
  held = {id(leaf) for leaf in jax.tree.leaves(other)}
  copied = lambda a: jnp.copy(a) if id(a) in held else a
  return jax.tree.map(copied, tree)


def several_trials(state: State) -> bool:
  """Whether a state holds trials side by side; keys may be of any kind.

  >>> several_trials(State(jax.random.PRNGKey(0), {}))
  False
  """
  return jnp.ndim(jax.random.key_data(state.key)) > 1


def hyper(num: int | None = None, **values: Any) -> dict[str, jax.Array]:
  """Hyper-parameters as a state holds them: copies, since states are donated.

  Args:
    num: how many pools or parties there are; `None` for scalars.
    **values: names and values: one, or one for each of them.

  Returns:
    `float32[]` or `float32[num]` by name.

  Raises:
    ValueError: there is neither one value nor one for each.

  >>> hyper(2, temperature=(3.0,))
  {'temperature': Array([3., 3.], dtype=float32)}
  """
  shape = () if num is None else (num,)
  arrays = {}
  for name, value in values.items():
    if isinstance(value, list | tuple):
      value = jnp.stack([jnp.asarray(v, jnp.float32) for v in value])
    array = jnp.asarray(value, jnp.float32)
    if array.shape not in ((), (1,) if shape else (), shape):
      raise ValueError(f"{name}={value}: give one or {num} values")
    arrays[name] = jnp.array(jnp.broadcast_to(array, shape))
  return arrays


Schedule = Callable[[jax.Array], jax.Array | float]
"""`round -> value`, of a hyper-parameter."""


def check_schedule(
  name: str, value: Any, *rounds: int, low: float = 0, high: float
) -> None:
  """Checks a hyper-parameter that may be a schedule, in some rounds.

  Args:
    name: its name.
    value: a number, or a function of the round.
    *rounds: the rounds in which a schedule is checked.
    low: the least allowed value.
    high: the greatest.

  Raises:
    ValueError: as `checks.between`.

  >>> check_schedule('alpha', lambda t: 0.1 * t, 1, 20, high=1)
  Traceback (most recent call last):
    ...
  ValueError: alpha=2.0: must lie between 0 and 1
  """
  for t in rounds:
    now = value(np.int32(t)) if callable(value) else value
    checks.between(low, high, **{name: now})


def scheduled(
  hyper: Mapping[str, tuple[Any, float]], state: State, round: jax.Array
) -> dict[str, jax.Array]:
  """Hyper-parameters' values in a round: the state's, or their schedules'.

  Args:
    hyper: by name, what the algorithm was built with (a schedule if it is
      callable), and the greatest value that a schedule may give; the least is
      0.
    state: the state, which holds the values that are not schedules.
    round: the number of the round.

  Returns:
    `float32[]` by name. NaN if a schedule is out of its range: that shows in a
    run's results, instead of training in the wrong direction.

  >>> alpha = {'alpha': (lambda t: 1 - 0.4 * t, 1)}
  >>> [float(scheduled(alpha, None, t)['alpha']) for t in (1, 2, 3)]
  [0.6..., 0.2..., nan]
  >>> float(scheduled({'alpha': (lambda t: 1.000001, 1)}, None, 1)['alpha'])
  1.0
  """

  def now(name, value, high):
    if not callable(value):
      return state.hyper[name]
    value = jnp.asarray(value(round), jnp.float32)
    inside = jnp.clip(value, 0, high)
    # A schedule that ends at a bound may be beyond it by rounding.
    return jnp.where(jnp.abs(value - inside) < 1e-5, inside, jnp.nan)

  return {name: now(name, *pair) for name, pair in hyper.items()}


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


def labels_of(logits: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
  """The batch's labels, one whole number for each prediction.

  Args:
    logits: `float[..., C]`.
    batch: what should hold `y: int[...]`.

  Returns:
    `y`, of 32 bits or more, and `float[...]`: 1 where a label is in range, else
    NaN. Negative labels would count from the last class; as a factor of the
    loss, NaN makes its gradient NaN too, so that no model trains on the other
    labels unnoticed.

  Raises:
    ValueError: `y` is missing, or of another type or shape.

  >>> labels_of(jnp.zeros((8, 3)), {'y': jnp.zeros((8, 3))})
  Traceback (most recent call last):
    ...
  ValueError: batch['y'] is float32 of shape (8, 3) beside logits of shape \
(8, 3): labels are whole numbers, 0 to C - 1, of shape (8,)
  """
  if "y" not in batch:
    raise ValueError(
      f"a batch holds {sorted(batch)}, but the loss takes labels 'y': name the"
      " bank's labels so, or give a transform"
    )
  checks.array("a loss of classes", logits)
  y, shape = batch["y"], jnp.shape(logits)
  dtype = jnp.result_type(y)
  if not jnp.issubdtype(dtype, jnp.integer) or jnp.shape(y) != shape[:-1]:
    raise ValueError(
      f"batch['y'] is {dtype} of shape {jnp.shape(y)} beside logits of shape"
      f" {shape}: labels are whole numbers, 0 to C - 1, of shape"
      f" {shape[:-1]}"
    )
  if dtype.itemsize < 4:  # It may not hold C, which then wraps around.
    y = jnp.asarray(y, jnp.int32)
  return y, jnp.where((y >= 0) & (y < shape[-1]), 1.0, jnp.nan)


def cross_entropy(logits: jax.Array, batch: Batch) -> jax.Array:
  """Softmax cross-entropy of each example, `-log softmax(logits)[y]`.

  Args:
    logits: `float[B, C]`.
    batch: holds `y: int32[B]`.

  Returns:
    `float[B]`, in nats; NaN where a label is out of range.

  Raises:
    ValueError: as `labels_of`.

  >>> float(cross_entropy(jnp.zeros((1, 4)), {'y': jnp.array([2])})[0])
  1.386...
  """
  labels, known = labels_of(logits, batch)
  losses = optax.softmax_cross_entropy_with_integer_labels(wide(logits), labels)
  return losses * known


def mask_of(batch: Batch) -> jax.Array:
  """Which examples of a batch count, `float32[B]`, ones and zeros."""
  return batch["mask"]


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


def as_types(tree: PyTree, like: PyTree) -> PyTree:
  """Casts arrays, such as a mean of float32, to the types of others' leaves.

  >>> as_types([jnp.ones(1)], [jnp.ones(1, jnp.bfloat16)])
  [Array([1], dtype=bfloat16)]
  """
  cast = lambda x, old: as_type(jnp.asarray(x), old.dtype)
  return jax.tree.map(cast, tree, like)


def all_finite(tree: PyTree) -> jax.Array:
  """Whether all floating-point numbers of a tree are finite.

  Args:
    tree: a pytree of arrays; integers and keys are ignored.

  Returns:
    `bool[]`.

  >>> bool(all_finite({'w': jnp.ones(2), 'b': jnp.array(jnp.nan)}))
  False
  """
  floats = (
    leaf
    for leaf in jax.tree.leaves(tree)
    if jnp.issubdtype(leaf.dtype, jnp.floating)
  )
  return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in floats]))


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


@jax.custom_vjp
def fixed(tree: PyTree) -> PyTree:
  """Outputs that training holds fixed, such as a partner's.

  As `jax.lax.stop_gradient` within the gradient that a step descends; but a
  whole round's derivatives, in hyper-parameters, pass through.

  >>> step = lambda w: w - jax.grad(lambda v: v * fixed(v))(w)
  >>> float(step(2.)), float(jax.grad(step)(2.))  # stop_gradient gives 1.
  (0.0, 0.0)
  """
  return tree


fixed.defvjp(lambda tree: (tree, None), lambda _, cotangents: (None,))


@jax.custom_jvp  # Where nothing is differentiated it costs nothing.
def fixed_unless(when: jax.Array, tree: PyTree) -> PyTree:
  """A tree, as a constant where `when` is false: its derivatives are 0.

  For what is 0 where there is nothing to learn from, such as an empty batch's
  gradient, and enters a function that is not differentiable at 0.

  >>> norm = lambda x, when: jnp.sqrt(fixed_unless(when, x))
  >>> [float(jax.grad(norm)(x, x > 0)) for x in (4., 0.)]
  [0.25, 0.0]
  """
  del when
  return tree


@fixed_unless.defjvp
def _change(primals, tangents):
  (when, tree), (_, change) = primals, tangents
  return tree, optax.tree.where(when, change, optax.tree.zeros_like(change))


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
    A divisor of B: B itself if B is prime.

  >>> num_parts(128, 32), num_parts(128, 60), num_parts(7, None)
  (4, 4, 1)
  >>> num_parts(128, None, multiple=8)
  8
  """
  return next(
    n
    for n in range(multiple, batch_size + 1, multiple)
    if batch_size % n == 0 and batch_size // n <= (at_most or batch_size)
  )


def cut(tree: PyTree, parts: int) -> PyTree:
  """Cuts arrays of B rows into equal parts.

  Args:
    tree: arrays `[B, ...]`.
    parts: N, a divisor of B.

  Returns:
    Arrays `[N, B / N, ...]`.

  >>> cut(jnp.arange(4), 2).tolist()
  [[0, 1], [2, 3]]
  """
  return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), tree)
