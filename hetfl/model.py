"""Models as pure functions, made from Flax modules or written by hand."""

from collections.abc import Callable
import dataclasses
import inspect
from typing import Any, NamedTuple

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp

from hetfl import checks

PyTree = Any


class Variables(NamedTuple):
  """A model's parameters and statistics.

  Attributes:
    params: the trained parameters.
    stats: mutable collections such as batch statistics; `{}` if none.
  """

  params: PyTree
  stats: PyTree


class Model(NamedTuple):
  """Any pair of pure functions that initialises and applies a model.

  Attributes:
    init: `key -> Variables`.
    apply: `(variables, x, key, train) -> (logits, stats)`, where `key` feeds
      dropout and the like and `train` is a Python bool. Models without
      mutable collections return `variables.stats` unchanged. Logits are
      `float[B, C]`, or whatever the pool's loss and the evaluator's measure
      take, such as `models.language.TokenLogits`.
  """

  init: Callable[[jax.Array], Variables]
  apply: Callable[..., tuple[PyTree, PyTree]]

  @classmethod
  def check(cls, owner: str, given: Any) -> None:
    """Checks that something is a model.

    Args:
      owner: its owner, or its name, for error messages.
      given: what should be a model.

    Raises:
      ValueError: it is something else, such as a bare Flax module, or its
        functions take other arguments.

    >>> Model.check('global_model', None)
    Traceback (most recent call last):
      ...
    ValueError: global_model: give a Model, not a NoneType; Model.from_flax \
and Model.from_nnx make one of a Flax module
    """
    if not isinstance(given, cls):
      raise ValueError(
        f"{owner}: give a Model, not a {type(given).__name__}; Model.from_flax"
        " and Model.from_nnx make one of a Flax module"
      )
    checks.takes(f"{owner}: init", given.init, "key")
    arguments = ("variables", "x", "key", "train")
    checks.takes(f"{owner}: apply", given.apply, *arguments)

  def start(
    self,
    key: jax.Array,
    owner: str = "a model",
    given: Variables | None = None,
  ) -> Variables:
    """Calls `init`, or copies given variables if they have the same shapes.

    Args:
      key: a random key.
      owner: the model's owner, or its name, for error messages.
      given: the parameters and statistics to continue from; `None` for new.

    Returns:
      The model's parameters and statistics: copies, since states may be
      donated, and `init` may return arrays that it keeps.

    Raises:
      ValueError: `init` returns something else, or `given` has other shapes.

    >>> Model(lambda key: {'w': jnp.zeros(3)}, None).start(jax.random.key(0))
    Traceback (most recent call last):
      ...
    ValueError: a model's init returned a dict: it must return \
Variables(params, stats); without mutable collections, stats are {}
    """

    def new(key):
      variables = self.init(key)
      if not isinstance(variables, Variables):
        raise ValueError(
          f"a model's init returned a {type(variables).__name__}: it must"
          " return Variables(params, stats); without mutable collections, stats"
          " are {}"
        )
      return variables

    if given is None:
      return jax.tree.map(jnp.copy, new(key))
    try:
      wanted = jax.eval_shape(new, key)
    except jax.errors.JAXTypeError:  # An init that cannot be traced.
      wanted = given
    checks.alike(owner, given, wanted)
    return jax.tree.map(jnp.copy, given)

  def outputs(
    self,
    variables: Variables,
    x: PyTree,
    key: jax.Array | None,
    train: bool,
  ) -> tuple[PyTree, PyTree]:
    """Calls `apply`, and checks that it returns logits and statistics.

    Args:
      variables: the model's parameters and statistics.
      x: inputs.
      key: a random key.
      train: whether this is training.

    Returns:
      The logits and the statistics.

    Raises:
      ValueError: `apply` does not return a pair or, in training, returns
        statistics of another structure.
    """
    outputs = self.apply(variables, x, key, train)
    if not isinstance(outputs, tuple) or len(outputs) != 2:
      raise ValueError(
        "a model's apply must return a pair, (logits, stats); without mutable"
        " collections, stats are variables.stats"
      )
    here, given = map(jax.tree.structure, (variables.stats, outputs[1]))
    if train and here != given:  # type: ignore[operator]
      raise ValueError(
        f"a model's apply returned stats of structure {given}, but received"
        f" structure {here}: without mutable collections, return"
        " variables.stats"
      )
    return outputs

  def predict(self, variables: Variables, x: PyTree) -> PyTree:
    """The logits in inference mode.

    Args:
      variables: the model's parameters and statistics.
      x: inputs.

    Returns:
      The logits, or whatever `apply` returns first.

    Raises:
      ValueError: as `outputs`.
    """
    return self.outputs(variables, x, None, False)[0]

  @classmethod
  def from_flax(cls, module: nn.Module, example: PyTree) -> "Model":
    """Wraps a Flax Linen module.

    Models of equal modules and of examples with the same shape and type are
    equal, and share compiled programs.

    Args:
      module: the module. If its `__call__` takes `train`, `apply` passes it on.
        Collections other than `params` become `Variables.stats`. In training
        it gets the random-number stream `dropout`; for other streams, and for
        values sown into custom collections, write `init` and `apply` yourself.
        On CPUs convolutions are far faster as `hetfl.models.layers.Conv`, which
        has the parameters of `nn.Conv`.
      example: an input with a batch axis; only its shape and type matter.

    Returns:
      The model.

    Raises:
      ValueError: `module` is not a Linen module, its `train` argument has
        another name, or `example` holds bare numbers.

    >>> model = Model.from_flax(nn.Dense(3), jnp.zeros((1, 2)))
    >>> variables = model.init(jax.random.key(0))
    >>> jax.tree.map(jnp.shape, variables.params)
    {'bias': (3,), 'kernel': (2, 3)}
    >>> logits, _ = model.apply(variables, jnp.ones((5, 2)), None, False)
    >>> logits.shape
    (5, 3)
    """
    if not isinstance(module, nn.Module):
      raise ValueError(
        f"{type(module).__name__} is not a Flax Linen module; use"
        " Model.from_nnx for NNX, and Model(init, apply) for other libraries"
      )
    takes_train = _takes_train(module)
    leaves, tree = jax.tree.flatten(example)
    if any(isinstance(x, int | float) for x in leaves):
      raise ValueError(
        f"example={example}: give an input, such as jnp.zeros((1, 32)), and not"
        " its shape"
      )
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
        The module's `nnx.Param` variables become `Variables.params`, and its
        other variables, such as `nnx.BatchStat`, become `Variables.stats`, both
        by path. `apply` sets the module's mode by `train()` or `eval()`, passes
        `train` if its `__call__` takes it, and seeds all its random-number
        streams from `key`. `make` is called once here.

    Returns:
      The model. Make one and give it to all clients that share it: two models
      are unequal.

    Raises:
      ValueError: `make` does not return an NNX module, or the module's `train`
        argument has another name.

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
    ValueError: this argument has another name.
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
        f"{type(module).__name__} takes {name!r}, which hetfl does not pass:"
        " wrap it in a module whose __call__ takes `train`"
      )
  return "train" in arguments


class _Nnx:
  """An NNX module as pure functions; see `Model.from_nnx`."""

  def __init__(self, make):
    from flax import nnx  # Only when needed: the import takes a while.

    self._make, self._nnx = make, nnx
    # A module given in place of `make` may be callable too.
    module = None if isinstance(make, nnx.Module) else make(nnx.Rngs(0))
    if not isinstance(module, nnx.Module):
      raise ValueError(
        "make: give a function from nnx.Rngs to an NNX module, such as lambda"
        " rngs: Net(rngs=rngs)"
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
    # Without the variables that the module sows in this call.
    return logits, {name: stats[name] for name in variables.stats}

  def _split(self, module):
    nnx = self._nnx
    return nnx.split(module, nnx.Param, nnx.RngState, ...)

  def _flat(self, state):
    """A state's arrays by path, such as `layers/0/kernel`."""
    arrays = flax.traverse_util.flatten_dict(self._nnx.to_pure_dict(state))
    return {
      "/".join(map(str, path)): a if hasattr(a, "dtype") else jnp.asarray(a)
      for path, a in arrays.items()
    }

  def _filled(self, state, arrays):
    """A state of the same structure, filled with these arrays."""
    paths = flax.traverse_util.flatten_dict(self._nnx.to_pure_dict(state))
    pure = {path: arrays["/".join(map(str, path))] for path in paths}
    state = jax.tree.map(lambda leaf: leaf, state)  # A copy, filled in place.
    self._nnx.replace_by_pure_dict(
      state, flax.traverse_util.unflatten_dict(pure)
    )
    return state

  def _seeded(self, key):
    """Keys and counts of all random streams; without a key, from `key(0)`."""
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
  """Equal to another if the fields are, even if they have no hashes."""

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
