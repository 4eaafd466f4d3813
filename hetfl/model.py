"""Models as pure functions, made from Flax modules or written by hand."""

from collections.abc import Callable, Mapping
import contextlib
import functools
import inspect
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hetfl import checks

PyTree = Any
_OTHER_MODES = (
  "training is_training deterministic inference use_running_average"
)


class Variables(NamedTuple):
  """A model's parameters and statistics.

  Attributes:
    params: the trained parameters.
    stats: mutable collections such as batch statistics; `{}` if none.
  """

  params: PyTree
  stats: PyTree


def joined(parts: Mapping[str, Variables]) -> Variables:
  """Several models' variables by name as one."""
  return Variables(
    {name: part.params for name, part in parts.items()},
    {name: part.stats for name, part in parts.items()},
  )


def parted(variables: Variables) -> dict[str, Variables]:
  """The parts of variables that `joined` made of several."""
  return {
    name: Variables(variables.params[name], variables.stats[name])
    for name in variables.params
  }


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

  def shapes(self) -> Variables:
    """The shapes and types of its variables, without computing them.

    >>> dense = Model.from_flax(nn.Dense(3), jnp.zeros((1, 2)))
    >>> dense.shapes().params['kernel']
    ShapeDtypeStruct(shape=(2, 3), dtype=float32)
    """
    return jax.eval_shape(self.init, jax.random.key(0))

  def start(
    self, key: jax.Array, owner: str = "a model", given: Variables | None = None
  ) -> Variables:
    """Calls `init`, or copies given variables if they have the same shapes.

    Args:
      key: a random key.
      owner: the model's owner, or its name, for error messages.
      given: the parameters and statistics to continue from; `None` for new.

    Returns:
      The model's parameters and statistics, of the types that `init` has:
      copies, since states may be donated, and `init` may return arrays that it
      keeps.

    Raises:
      ValueError: `init` returns something else, or parameters that cannot be
        trained, or a key, or `given` has other shapes.

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
      for path, leaf in jax.tree.leaves_with_path(variables):
        dtype = getattr(leaf, "dtype", None) or jnp.result_type(leaf)
        name = jax.tree_util.keystr(path)
        trained = name.startswith(".params")
        if jnp.issubdtype(dtype, jax.dtypes.prng_key) or (
          trained and not jnp.issubdtype(dtype, jnp.floating)
        ):
          raise ValueError(
            f"{owner}: init returned {name} of type {dtype}: parameters must be"
            " floating numbers, which have a gradient, and statistics numbers,"
            " which have means; a key is passed to apply as an argument"
          )
      return variables

    # Without weak types, with which a second step would compile anew.
    copy = lambda a, like: jnp.array(a, jnp.result_type(like))
    if given is None:
      given = like = new(key)
    else:
      like = given
      # An init that cannot be traced gives no shapes.
      with contextlib.suppress(jax.errors.JAXTypeError):
        like = jax.eval_shape(new, key)
        checks.alike(owner, given, like)
    return jax.tree.map(copy, given, like)

  def outputs(
    self, variables: Variables, x: PyTree, key: jax.Array | None, train: bool
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
    train = _takes_train(module)
    if any(isinstance(x, int | float) for x in jax.tree.leaves(example)):
      raise ValueError(
        f"example={example}: give an input, such as jnp.zeros((1, 32)), and not"
        " its shape"
      )
    shapes = jax.eval_shape(lambda: example)
    return cls(
      _Alike(_flax_init, module, train, shapes),
      _Alike(_flax_apply, module, train),
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
      The model. Make one and give it to all clients that share it: two are
      never equal.

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
    from flax import nnx  # Only when needed: the import takes a while.

    # A module given in place of `make` may be callable too.
    module = None if isinstance(make, nnx.Module) else make(nnx.Rngs(0))
    if not isinstance(module, nnx.Module):
      raise ValueError(
        "make: give a function from nnx.Rngs to an NNX module, such as lambda"
        " rngs: Net(rngs=rngs)"
      )
    takes_train = _takes_train(module)
    graph, *states = _split(module)
    of_params, of_streams, of_stats = jax.eval_shape(lambda: states)

    def init(key):
      _, params, _, stats = _split(make(nnx.Rngs(key)))
      return Variables(_by_path(params), _by_path(stats))

    def apply(variables, x, key, train):
      module = nnx.merge(
        graph,
        _filled(of_params, variables.params),
        _seeded(of_streams, jax.random.key(0) if key is None else key),
        _filled(of_stats, variables.stats),
      )
      mode = {"train": train} if takes_train else {}
      if not train:
        module.eval()
        return module(x, **mode), variables.stats
      module.train()
      logits = module(x, **mode)
      stats = _by_path(_split(module)[-1])
      # Without the variables that the module sows in this call.
      return logits, {name: stats[name] for name in variables.stats}

    return cls(init, apply)


def update_nnx(module: Any, variables: Variables) -> None:
  """Gives an NNX module the variables of its model, such as trained ones.

  Args:
    module: an NNX module, as `Model.from_nnx`'s `make` makes it.
    variables: the model's.

  >>> from flax import nnx
  >>> module = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
  >>> update_nnx(module, Variables({'kernel': jnp.ones((2, 1)),
  ...                               'bias': jnp.zeros(1)}, {}))
  >>> module(jnp.array([3., 4.])).tolist()
  [7.0]
  """
  from flax import nnx

  _, params, _, stats = _split(module)
  kinds = (params, variables.params), (stats, variables.stats)
  nnx.update(module, *(_filled(state, arrays) for state, arrays in kinds))


def _split(module):
  """An NNX module's graph, parameters, random streams and other state."""
  from flax import nnx

  return nnx.split(module, nnx.Param, nnx.RngState, ...)


def _takes_train(module: Any) -> bool:
  """Whether a module's `__call__` takes `train`.

  Raises:
    ValueError: this argument has another name.
  """
  arguments = inspect.signature(module.__call__).parameters
  for name in _OTHER_MODES.split():
    if name in arguments and "train" not in arguments:
      raise ValueError(
        f"{type(module).__name__} takes {name!r}, which hetfl does not pass:"
        " wrap it in a module whose __call__ takes `train`"
      )
  return "train" in arguments


class _Alike(functools.partial):
  """Equal to another if function and arguments are, hashable or not."""

  def __eq__(self, other):
    try:
      return (self.func, *self.args) == (other.func, *other.args)
    except (AttributeError, TypeError, ValueError):  # Such as arrays.
      return False

  def __hash__(self):
    return hash(self.func)


def _flax_init(module, takes_train, shapes, key):
  """Initialises a Flax module on zeros of an example's shapes and types."""
  params_key, dropout_key = jax.random.split(key)
  rngs = {"params": params_key, "dropout": dropout_key}
  example = jax.tree.map(jnp.zeros_like, shapes)
  mode = {"train": False} if takes_train else {}
  variables = dict(module.init(rngs, example, **mode))
  return Variables(variables.pop("params", {}), variables)


def _flax_apply(module, takes_train, variables, x, key, train):
  """Applies a Flax module; see `Model.from_flax`."""
  mode = {"train": train} if takes_train else {}
  collections = {"params": variables.params, **variables.stats}
  if not train:
    return module.apply(collections, x, **mode), variables.stats
  rngs, mutable = checks.given(dropout=key), list(variables.stats)
  return module.apply(collections, x, rngs=rngs, mutable=mutable, **mode)


def _paths(state):
  """The paths of an NNX state's arrays, such as `layers/0/kernel`."""
  keystr = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
  leaves = jax.tree.leaves_with_path(state)
  return [keystr(path).removesuffix("/value") for path, _ in leaves]


def _by_path(state):
  """An NNX state's arrays by their paths."""
  return dict(zip(_paths(state), map(jnp.asarray, jax.tree.leaves(state))))


def _filled(state, arrays):
  """An NNX state of the same structure, of arrays by their paths."""
  leaves = [arrays[path] for path in _paths(state)]
  return jax.tree.structure(state).unflatten(leaves)


def _seeded(state, key):
  """A state of random streams, with keys that come from this one."""

  def seeded(i, like):
    if not jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
      return jnp.zeros(like.shape, like.dtype)  # A count.
    own = jax.random.fold_in(key, i)
    return jax.random.split(own, like.shape) if like.shape else own

  leaves, tree = jax.tree.flatten(state)
  return tree.unflatten(seeded(i, like) for i, like in enumerate(leaves))
