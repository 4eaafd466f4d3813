"""The nouns: models, losses, algorithms and metrics.

Letters used throughout: K clients, L lanes, S steps, B batch size, C classes,
P pools (or parties).
"""

from collections.abc import Callable, Mapping
import dataclasses
import inspect
from typing import Any, NamedTuple

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import optax

from hetfl import checks

PyTree = Any
Batch = Mapping[str, jax.Array]
# (logits [B, C], batch) -> losses [B]; or a scalar, the mean over those
# examples whose mask is 1
Loss = Callable[[jax.Array, Batch], jax.Array]
# (key, batch as it lies in the bank) -> batch as model and loss take it: inputs
# `x` and, for the losses here, labels `y`; without a transform the bank holds
# them itself. `x` may be a tree of arrays. `mask` stays as it was unless the
# transform gives another.
Transform = Callable[[jax.Array, Batch], Batch]
# round -> value
Schedule = Callable[[jax.Array], jax.Array]


class Variables(NamedTuple):
  """What a model holds.

  Attributes:
    params: the trained parameters.
    stats: mutable collections such as batch statistics; `{}` if none.
  """

  params: PyTree
  stats: PyTree


class Model(NamedTuple):
  """Any pair of pure functions that makes and applies a model.

  Attributes:
    init: `key -> Variables`.
    apply: `(variables, x, key, train) -> (logits, stats)`, where `key` feeds
      dropout and the like and `train` is a Python bool. Models without
      mutable collections return `variables.stats` unchanged. Logits are
      `float[B, C]`, or whatever the pool's loss and the evaluator's measure
      take, such as `models.language.TokenLogits`.
  """

  init: Callable[[jax.Array], Variables]
  apply: Callable[..., tuple[jax.Array, PyTree]]

  def start(self, key: jax.Array) -> Variables:
    """What `init` gives, if it is `Variables`.

    Args:
      key: a random key.

    Returns:
      A new model's parameters and statistics.

    Raises:
      ValueError: `init` gives something else.

    >>> Model(lambda key: {'w': jnp.zeros(3)}, None).start(jax.random.key(0))
    Traceback (most recent call last):
      ...
    ValueError: a model's init gave a dict: it must return Variables(params, \
stats); without mutable collections, stats are {}
    """
    variables = self.init(key)
    if not isinstance(variables, Variables):
      raise ValueError(
        f"a model's init gave a {type(variables).__name__}: it must return"
        " Variables(params, stats); without mutable collections, stats are {}"
      )
    return variables

  def outputs(
    self,
    variables: Variables,
    x: PyTree,
    key: jax.Array | None,
    train: bool,
  ) -> tuple[jax.Array, PyTree]:
    """What `apply` gives, if it is a pair with statistics like the model's.

    Args:
      variables: what the model holds.
      x: inputs.
      key: a random key.
      train: whether this is training.

    Returns:
      The logits and the statistics.

    Raises:
      ValueError: `apply` gives no pair, or in training statistics of another
        structure.
    """
    outputs = self.apply(variables, x, key, train)
    if not isinstance(outputs, tuple) or len(outputs) != 2:
      raise ValueError(
        "a model's apply gave no pair: it must return (logits, stats); without"
        " mutable collections, stats are variables.stats"
      )
    here, given = map(jax.tree.structure, (variables.stats, outputs[1]))
    if train and here != given:
      raise ValueError(
        f"a model's apply gave stats of another structure, {given}, than it was"
        f" given, {here}: without mutable collections, stats are"
        " variables.stats"
      )
    return outputs

  def predict(self, variables: Variables, x: PyTree) -> jax.Array:
    """The logits in inference mode; see `outputs`."""
    return self.outputs(variables, x, None, False)[0]

  @classmethod
  def from_flax(cls, module: nn.Module, example: jax.Array) -> "Model":
    """Wraps a Flax Linen module.

    Models of equal modules and examples of one shape are equal, and share
    programs.

    Args:
      module: the module. If its `__call__` takes `train`, it is passed on.
        Collections other than `params` become `Variables.stats`. In training
        it has random numbers for `dropout`; for other streams, and for values
        sown into collections of one's own, write `init` and `apply`.
      example: an input with a batch axis; only shape and type count.

    Returns:
      The model.

    Raises:
      ValueError: it is no Linen module, or its switch has another name.

    >>> model = Model.from_flax(nn.Dense(3), jnp.zeros((1, 2)))
    >>> variables = model.init(jax.random.key(0))
    >>> num_parameters(variables.params)
    9
    >>> logits, _ = model.apply(variables, jnp.ones((5, 2)), None, False)
    >>> logits.shape
    (5, 3)
    """
    if not isinstance(module, nn.Module):
      raise ValueError(
        f"{type(module).__name__} is no Flax Linen module; of NNX take"
        " Model.from_nnx, of other libraries write init and apply: Model(init,"
        " apply)"
      )
    takes_train = _takes_train(module)
    leaves, tree = jax.tree.flatten(example)
    shapes = tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)
    return cls(
      _FlaxInit(module, takes_train, shapes, tree),
      _FlaxApply(module, takes_train),
    )

  @classmethod
  def from_nnx(cls, make: Callable[[Any], Any]) -> "Model":
    """Wraps a Flax NNX module.

    Args:
      make: `flax.nnx.Rngs -> module`, such as `lambda rngs: Net(rngs=rngs)`.
        The module's `nnx.Param` become `Variables.params` and its other
        variables, such as `nnx.BatchStat`, `Variables.stats`, by their paths.
        It is in training by `train()` and out of it by `eval()`, and is passed
        `train` if its `__call__` takes it; all its streams of random numbers
        come from the key that `apply` is given. It is made once here.

    Returns:
      The model. Make one for all clients that share it: two are unequal.

    Raises:
      ValueError: `make` makes no NNX module, or its switch has another name.

    >>> from flax import nnx
    >>> model = Model.from_nnx(lambda rngs: nnx.Linear(2, 3, rngs=rngs))
    >>> variables = model.init(jax.random.key(0))
    >>> jax.tree.map(jnp.shape, variables.params)
    {'bias': (3,), 'kernel': (2, 3)}
    >>> logits, _ = model.apply(variables, jnp.ones((5, 2)), None, False)
    >>> logits.shape
    (5, 3)
    """
    module = _Nnx(make)
    return cls(module.init, module.apply)


def _takes_train(module: Any) -> bool:
  """Whether a module's `__call__` takes `train`.

  Raises:
    ValueError: its switch has another name.
  """
  arguments = inspect.signature(module.__call__).parameters
  for name in (
    "training",
    "is_training",
    "deterministic",
    "inference",
    "use_running_average",
  ):
    if name in arguments and "train" not in arguments:
      raise ValueError(
        f"{type(module).__name__} takes {name!r}, which nobody would pass:"
        " wrap it in a module whose __call__ takes `train`"
      )
  return "train" in arguments


class _Nnx:
  """An NNX module as pure functions; see `Model.from_nnx`."""

  def __init__(self, make):
    from flax import nnx  # Only where it is used: it takes a while.

    self._make, self._nnx = make, nnx
    # It is callable too.
    module = None if isinstance(make, nnx.Module) else make(nnx.Rngs(0))
    if not isinstance(module, nnx.Module):
      raise ValueError(
        "make: want a function from nnx.Rngs to an NNX module, as lambda rngs:"
        " Net(rngs=rngs)"
      )
    self._takes_train = _takes_train(module)
    self._graph, *states = self._split(module)
    self._states = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)),
      states,
    )

  def init(self, key):
    _, params, _, stats = self._split(self._make(self._nnx.Rngs(key)))
    return Variables(self._flat(params), self._flat(stats))

  def apply(self, variables, x, key, train):
    params, streams, stats = self._states
    module = self._nnx.merge(
      self._graph,
      self._filled(params, variables.params),
      self._filled(streams, self._seeded(key)),
      self._filled(stats, variables.stats),
    )
    mode = {"train": train} if self._takes_train else {}
    if not train:
      module.eval()
      return module(x, **mode), variables.stats
    module.train()
    logits = module(x, **mode)
    stats = self._flat(self._split(module)[3])
    # What a module sows in between is none of them.
    return logits, {name: stats[name] for name in variables.stats}

  def _split(self, module):
    nnx = self._nnx
    return nnx.split(module, nnx.Param, nnx.RngState, ...)

  def _flat(self, state):
    """A state's arrays by path, as `layers/0/kernel`."""
    arrays = flax.traverse_util.flatten_dict(self._nnx.to_pure_dict(state))
    return {
      "/".join(map(str, path)): a if hasattr(a, "dtype") else jnp.asarray(a)
      for path, a in arrays.items()
    }

  def _filled(self, state, arrays):
    """A state of that structure with these arrays."""
    paths = flax.traverse_util.flatten_dict(self._nnx.to_pure_dict(state))
    pure = {path: arrays["/".join(map(str, path))] for path in paths}
    state = jax.tree.map(lambda leaf: leaf, state)  # It is filled in place.
    self._nnx.replace_by_pure_dict(
      state, flax.traverse_util.unflatten_dict(pure)
    )
    return state

  def _seeded(self, key):
    """Keys and counts of all streams; equal ones where there is no key."""
    key = jax.random.key(0) if key is None else key
    arrays = {}
    for i, (name, leaf) in enumerate(self._flat(self._states[1]).items()):
      if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        stream = jax.random.fold_in(key, i)
        split = jax.random.split(stream, leaf.shape) if leaf.shape else stream
        arrays[name] = split
      else:
        arrays[name] = jnp.zeros(leaf.shape, leaf.dtype)
    return arrays


class _Alike:
  """Equal to others of equal fields, which need not have hashes."""

  def __eq__(self, other):
    try:
      return type(self) is type(other) and vars(self) == vars(other)
    except (TypeError, ValueError):  # Fields that cannot be compared: arrays.
      return False

  def __hash__(self):
    return hash(type(self))


@dataclasses.dataclass(frozen=True, eq=False)
class _FlaxInit(_Alike):
  """Initialises a Flax module on zeros of an example's shapes and types."""

  module: nn.Module
  takes_train: bool
  shapes: tuple[tuple[tuple[int, ...], Any], ...]
  tree: Any

  def __call__(self, key):
    params_key, dropout_key = jax.random.split(key)
    example = self.tree.unflatten([jnp.zeros(*leaf) for leaf in self.shapes])
    mode = {"train": False} if self.takes_train else {}
    variables = dict(
      self.module.init(
        {"params": params_key, "dropout": dropout_key}, example, **mode
      )
    )
    return Variables(variables.pop("params", {}), variables)


@dataclasses.dataclass(frozen=True, eq=False)
class _FlaxApply(_Alike):
  """Applies a Flax module; see `Model.from_flax`."""

  module: nn.Module
  takes_train: bool

  def __call__(self, variables, x, key, train):
    mode = {"train": train} if self.takes_train else {}
    rngs = {"dropout": key} if train and key is not None else {}
    collections = {"params": variables.params, **variables.stats}
    if train and variables.stats:
      return self.module.apply(
        collections, x, rngs=rngs, mutable=list(variables.stats), **mode
      )
    logits = self.module.apply(collections, x, rngs=rngs, **mode)
    return logits, variables.stats


class Mean(NamedTuple):
  """A mean in the making, so that means of unlike rounds add up rightly.

  Attributes:
    total: weighted sum, a scalar.
    count: sum of the weights, a scalar; 0 if nothing was measured.
  """

  total: jax.Array
  count: jax.Array

  @property
  def value(self) -> jax.Array:
    """The mean; not a number if nothing was measured."""
    return self.total / self.count


Metrics = dict[str, Mean]


class Algorithm(NamedTuple):
  """A federated algorithm as a pair of pure functions.

  Attributes:
    init: `key -> state`, an immutable pytree.
    step: `(state, plan, data) -> (state, metrics)`, one round. Pure, and open
      to `jax.jit`, `jax.vmap` and `jax.lax.scan`, unless the algorithm was
      built with an engine that says otherwise. Its loops are as long as the
      plan says, so that it has derivatives by `jax.jvp`, not by `jax.grad`.
  """

  init: Callable[[jax.Array], PyTree]
  step: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, Metrics]]


def cross_entropy(logits: jax.Array, batch: Batch) -> jax.Array:
  """Softmax cross-entropy of each example, `-log softmax(logits)[y]`.

  Args:
    logits: `float[B, C]`.
    batch: holds `y: int32[B]`.

  Returns:
    `float[B]`, in nats; not a number where a label is no class.

  Raises:
    ValueError: as `checks.labels`.

  >>> float(cross_entropy(jnp.zeros((1, 4)), {'y': jnp.array([2])})[0])
  1.386...
  """
  labels = checks.labels(logits, batch)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  # Negative labels would count from the last class.
  return jnp.where(labels < 0, jnp.nan, losses)


def gather(bank: Batch, index: jax.Array) -> Batch:
  """Takes a batch out of a bank.

  Args:
    bank: arrays with examples on their first axis.
    index: `int32[B]`, positions; -1 marks an empty place, which holds the
      batch's first example with `mask` 0, and the bank's first if there is
      none. Positions beyond the bank give its last example: a plan is for one
      bank only.

  Returns:
    The batch, with `mask: float32[B]` beside the bank's arrays.

  Raises:
    ValueError: the bank has a `mask` of its own.

  >>> gather({'y': jnp.array([7, 8, 9])}, jnp.array([2, -1]))['y']
  Array([9, 9], dtype=int32)
  """
  if "mask" in bank:
    raise ValueError(
      "a bank's array is called 'mask', which says what of a batch counts: give"
      " it another name"
    )
  # Not the bank's first, which may be anything: 0 times not a number is none.
  taken = jnp.maximum(jnp.where(index < 0, index[0], index), 0)
  batch = {
    name: jnp.take(array, taken, axis=0, mode="clip")
    for name, array in bank.items()
  }
  return {**batch, "mask": (index >= 0).astype(jnp.float32)}


def prepare(transform: Callable[..., Batch] | None, *args) -> Batch:
  """A gathered batch as model and loss take it.

  Args:
    transform: `(*args) -> batch`; `None` leaves the batch as it is.
    *args: a key, where the transform takes one, and the batch.

  Returns:
    What the transform gives, with the batch's own `mask` where it gives none.

  Raises:
    ValueError: it is no dict, or has no `x`.

  >>> batch = {'image': jnp.ones(2), 'mask': jnp.ones(2)}
  >>> sorted(prepare(lambda batch: {'x': batch['image']}, batch))
  ['mask', 'x']
  """
  batch = args[-1]
  if transform is not None:
    given = transform(*args)
    if not isinstance(given, Mapping):
      raise ValueError(
        f"a transform gave a {type(given).__name__}, not a batch: want a dict"
        " of arrays"
      )
    batch = {"mask": batch["mask"], **given}
  if "x" not in batch:
    raise ValueError(
      f"a batch holds {sorted(batch)}, but models take 'x': name the bank's"
      " inputs so, or give a transform"
    )
  return batch


def as_type(x: jax.Array, dtype: Any) -> jax.Array:
  """An array of another type; of whole numbers the nearest.

  >>> as_type(jnp.array([6.9999995, 2.5]), jnp.int32)
  Array([7, 2], dtype=int32)
  """
  if jnp.issubdtype(dtype, jnp.integer):
    x = jnp.round(x)
  return x.astype(dtype)


def scaled(factor: jax.Array, tree: PyTree) -> PyTree:
  """`factor * x` of each array, in the array's own type.

  >>> scaled(jnp.float32(0.5), jnp.ones(2, jnp.bfloat16))
  Array([0.5, 0.5], dtype=bfloat16)
  """
  return jax.tree.map(lambda x: (factor * x).astype(x.dtype), tree)


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
  """Mean of the values whose mask is 1; 0 if there are none.

  Args:
    values: `float[B]`; or a scalar, which is that mean already.
    mask: `float[B]`, ones and zeros.

  Returns:
    A scalar.

  Raises:
    ValueError: as `checks.losses`.

  >>> float(masked_mean(jnp.array([1., 2., 9.]), jnp.array([1., 1., 0.])))
  1.5
  """
  checks.losses(values, mask)
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


def with_hyper(state: PyTree, **values: Any) -> PyTree:
  """A trial's state: the same, with hyper-parameters of its own.

  Args:
    state: the state of any algorithm here.
    **values: hyper-parameters by their names in the state's `hyper`, or in
      those of its pools or parties; one value, or one for each. They are not
      checked: tracers could not be.

  Returns:
    The state.

  Raises:
    ValueError: the state has no hyper-parameter of a name.

  >>> from hetfl.fedavg import PoolsState
  >>> state = PoolsState(None, (), {'alpha': jnp.zeros(())})
  >>> with_hyper(state, alpha=0.5).hyper
  {'alpha': Array(0.5, dtype=float32)}
  >>> with_hyper(state, beta=0.5)
  Traceback (most recent call last):
    ...
  ValueError: beta: this state has no such hyper-parameter; it has ['alpha']
  """
  field = next((n for n in ("pools", "parties") if hasattr(state, n)), None)
  members = getattr(state, field) if field else ()
  own = getattr(state, "hyper", {})
  for name, value in values.items():
    value = jnp.asarray(value, jnp.float32)
    if name in own:
      own = own | {name: jnp.broadcast_to(value, own[name].shape)}
    elif members and all(name in member.hyper for member in members):
      members = tuple(
        member.replace(hyper=member.hyper | {name: v})
        for member, v in zip(
          members, jnp.broadcast_to(value, (len(members),)), strict=True
        )
      )
    else:
      names = {*own, *(n for member in members for n in member.hyper)}
      if name in names:
        raise ValueError(
          f"{name}: not all {field} have it; give those without it a value"
          " when they are made"
        )
      raise ValueError(
        f"{name}: this state has no such hyper-parameter; it has"
        f" {sorted(names)}"
      )
  if field:
    state = state.replace(**{field: members})
  return state.replace(hyper=own) if own else state


def strong(tree: PyTree) -> PyTree:
  """The same without weak types, which a checkpoint does not keep.

  Otherwise a state that was restored could promote otherwise than one that
  was not; and a step would compile twice.

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
    multiple: what the number is to be a multiple of; a divisor of B.

  Returns:
    A divisor of B.

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
