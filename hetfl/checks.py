"""Checks of values that users give; errors name them and say what to do."""

from collections.abc import Collection, Iterator, Mapping
import contextlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def counts(**numbers: int) -> None:
  """Checks numbers of rounds, steps, examples and the like.

  Args:
    **numbers: names and values.

  Raises:
    ValueError: naming the first that is not a whole number of at least one.

  >>> counts(rounds=20, batch_size=0)
  Traceback (most recent call last):
    ...
  ValueError: batch_size=0: must be a whole number, at least 1
  """
  whole(1, np.inf, **numbers)


def whole(low: int, high: float, **numbers: int) -> None:
  """As `counts`, from `low` to `high`, which is infinity for no limit.

  >>> whole(0, 5, late_clients=7)
  Traceback (most recent call last):
    ...
  ValueError: late_clients=7: must be a whole number, at least 0 and at most 5
  """
  for name, value in numbers.items():
    number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not number or not low <= value <= high:
      most = "" if np.isinf(high) else f" and at most {high}"
      raise ValueError(
        f"{name}={value!r}: must be a whole number, at least {low}{most}"
      )


def one_of(choices: Collection[str], **values: str) -> None:
  """Checks arguments that are one of some names.

  Args:
    choices: the names.
    **values: the arguments.

  Raises:
    ValueError: naming the first that is none of them.

  >>> one_of(('iid', 'file'), partition='ii')
  Traceback (most recent call last):
    ...
  ValueError: partition=ii: choose from iid, file
  """
  for name, value in values.items():
    if value not in choices:
      raise ValueError(f"{name}={value}: choose from {', '.join(choices)}")


def integers(what: str, given: Any) -> np.ndarray:
  """Numbers, such as positions or clients', as an array; it may be empty.

  Args:
    what: what they are, for error messages.
    given: the numbers.

  Returns:
    `int[n]`; of another type if there are none.

  Raises:
    ValueError: they are not integers, but a mask, for instance.

  >>> integers('absent', [True, False])
  Traceback (most recent call last):
    ...
  ValueError: absent must be integers, not bool [2]: give int[n], such as \
np.flatnonzero of a mask
  """
  array = np.asarray(given)
  if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
    raise ValueError(
      f"{what} must be integers, not {array.dtype} {list(array.shape)}: give"
      " int[n], such as np.flatnonzero of a mask"
    )
  return array


def classes(labels: Any) -> np.ndarray:
  """The labels of examples, as an array.

  Raises:
    ValueError: an example has no class, or several.

  >>> classes([0, 2, 1]).shape, classes(np.array(['cat', 'dog'])).shape
  ((3,), (2,))
  >>> classes([0.0, np.nan])
  Traceback (most recent call last):
    ...
  ValueError: labels: float64[2]: give a whole number, or a name, for each \
example
  """
  labels = np.asarray(labels)
  if not are_classes(labels):
    raise ValueError(
      f"labels: {labels.dtype}{[*labels.shape]}: give a whole number, or a"
      " name, for each example"
    )
  return labels


def are_classes(labels: np.ndarray) -> bool:
  """Whether there is a class, a whole number or a name, for each example.

  >>> are_classes(np.array([0, 2])), are_classes(np.array([0.5, 2.0]))
  (True, False)
  """
  broken = labels.dtype.kind == "f" and not np.all(labels % 1 == 0)
  return labels.ndim == 1 and not broken


def given(**values: Any) -> dict[str, Any]:
  """The values that are not `None`, of arguments that may be left out.

  >>> given(max_steps=None, microbatch=8)
  {'microbatch': 8}
  """
  return {name: x for name, x in values.items() if x is not None}


def between(low: float, high: float, **values: Any) -> None:
  """Checks hyper-parameters against their range.

  Args:
    low: the least allowed value.
    high: the greatest; infinity for any finite number.
    **values: names and values; traced ones are not looked at.

  Raises:
    ValueError: naming the first that is not a number or is out of its range.

  >>> between(0, 1, alpha=1.5)
  Traceback (most recent call last):
    ...
  ValueError: alpha=1.5: must lie between 0 and 1
  """
  for name, value in values.items():
    if isinstance(value, jax.core.Tracer):
      continue
    array = np.asarray(value)
    if array.ndim or not np.issubdtype(array.dtype, np.number):
      raise ValueError(f"{name}={value!r}: must be one number")
    if not (low <= array <= high and np.isfinite(array)):
      wanted = f"lie between {low} and {high}"
      if np.isinf(high):
        wanted = f"be finite, at least {low}"
      raise ValueError(f"{name}={value}: must {wanted}")


def positive(**values: Any) -> None:
  """As `between`, for divisors: at least a millionth."""
  between(1e-6, np.inf, **values)


def optimizers(params: Any = None, /, **given: Any) -> None:
  """Checks that optimizers are given as functions of their learning rate.

  Args:
    params: parameters, for optimizers that need their structure; by default
      those are not checked.
    **given: names and what should be such functions. Their states must not
      hold the rate, which may change from step to step.

  Raises:
    ValueError: naming the first that is no such function.

  >>> import optax
  >>> optimizers(server_optimizer=optax.adam(1e-3))
  Traceback (most recent call last):
    ...
  ValueError: server_optimizer: give a function of the learning rate, such as \
optax.adam, not an optimizer
  """
  params = np.zeros(1) if params is None else params
  small = jax.tree.map(lambda a: np.zeros((1,) * a.ndim, a.dtype), params)
  for name, optimizer in given.items():
    if not callable(optimizer):
      raise ValueError(
        f"{name}: give a function of the learning rate, such as optax.adam, not"
        " an optimizer"
      )
    try:
      with jax.ensure_compile_time_eval():  # Also under jit.
        first, second = (
          jax.tree.leaves(optimizer(rate).init(small)) for rate in (0.0, 1.0)
        )
        # Random keys, unknown to NumPy, are compared as JAX arrays.
        same = all(bool(np.all(a == b)) for a, b in zip(first, second))
    except Exception:  # It needs parameters of some other structure.
      continue
    if not same:
      raise ValueError(
        f"{name}: its state holds the learning rate, which then could not"
        " change; give it without optax.inject_hyperparams"
      )


def takes(what: str, function: Any, *arguments: str) -> None:
  """Checks that a function takes as many arguments as it will be given.

  Args:
    what: what the function is, for error messages.
    function: the function; one without a signature passes the check.
    *arguments: the names of the arguments it will be given.

  Raises:
    ValueError: it takes other arguments.

  >>> takes('a transform', lambda batch: batch, 'key', 'batch')
  Traceback (most recent call last):
    ...
  ValueError: a transform is called with (key, batch) here, but takes (batch)
  """
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):
    return
  try:
    signature.bind(*arguments)
  except TypeError:
    raise ValueError(
      f"{what} is called with ({', '.join(arguments)}) here, but takes"
      f" {signature}"
    ) from None


def alike(what: str, given: Any, wanted: Any) -> None:
  """Checks that a pytree has another's structure and shapes.

  Args:
    what: what the pytree is, for error messages.
    given: the pytree.
    wanted: the other one, of arrays or `jax.ShapeDtypeStruct`s.

  Raises:
    ValueError: naming the arrays that only one has, or whose shapes differ.

  >>> alike('init', {'w': jnp.ones(2), 'b': 0.}, {'w': jnp.ones(3)})
  Traceback (most recent call last):
    ...
  ValueError: init: gives {"['b']": (), "['w']": (2,)}, expected {"['w']": (3,)}
  """
  shapes, expected = (
    {
      jax.tree_util.keystr(path): jnp.shape(leaf)
      for path, leaf in jax.tree.leaves_with_path(tree)
    }
    for tree in (given, wanted)
  )
  if shapes != expected:
    only = dict(shapes.items() - expected.items())
    other = dict(expected.items() - shapes.items())
    short = lambda d: dict(sorted(d.items())[:3])
    raise ValueError(f"{what}: gives {short(only)}, expected {short(other)}")


def array(what: str, outputs: Any) -> None:
  """Raises a `ValueError` if outputs are not an array `float[...]`."""
  if not hasattr(outputs, "dtype") and not np.isscalar(outputs):
    need = (
      "Language models need Pool(loss=sentence_loss()),"
      " Distiller(divergence=token_divergence, weights=token_weights) and"
      " Evaluator(measure=next_word_metrics), from hetfl.models.next_word; fml,"
      " fedmd and feddf take arrays"
    )
    if hasattr(outputs, "logits"):
      need = "Take features.logits_only(model) of a model with a head"
    raise ValueError(
      f"{what}: outputs must be an array float[..., C], not a"
      f" {type(outputs).__name__}. {need}"
    )
  if not jnp.issubdtype(jnp.result_type(outputs), jnp.floating):
    raise ValueError(
      f"{what}: outputs must be floating numbers, such as logits, not"
      f" {jnp.result_type(outputs)}, which have no gradient"
    )


def bank(data: Any, name: str) -> Mapping[str, Any]:
  """The bank `data[name]` in the data of a step.

  Args:
    data: the step's data: banks by name.
    name: the name of the bank.

  Returns:
    The bank: arrays by name.

  Raises:
    ValueError: it is missing, or not a bank.

  >>> bank({'pool': 1}, 'train')
  Traceback (most recent call last):
    ...
  ValueError: data: give a dict with a bank 'train', arrays by name, as \
put_banks returns it; it holds ['pool']
  """
  if isinstance(data, Mapping) and isinstance(data.get(name), Mapping):
    return data[name]
  held = sorted(data) if isinstance(data, Mapping) else type(data).__name__
  raise ValueError(
    f"data: give a dict with a bank {name!r}, arrays by name, as put_banks"
    f" returns it; it holds {held}"
  )


def num_examples(bank: Mapping[str, Any]) -> int:
  """Number of examples in a bank, if all its arrays agree on it.

  Args:
    bank: arrays `[N, ...]` by name.

  Returns:
    N.

  Raises:
    ValueError: an entry is not an array, lengths differ, or there are none.

  >>> num_examples({'x': np.zeros((3, 8)), 'y': np.zeros(4)})
  Traceback (most recent call last):
    ...
  ValueError: bank: arrays of different lengths {'x': 3, 'y': 4}
  """
  sizes = {}
  if isinstance(bank, Mapping):
    for name, array in bank.items():
      if not getattr(array, "ndim", 0):
        raise ValueError(
          f"bank[{name!r}]: must be an array with examples on its first axis,"
          f" not a {type(array).__name__}; store inputs made of several arrays"
          " under separate names, and combine them into a tree x by a transform"
        )
      sizes[name] = len(array)
  if not sizes:
    raise ValueError(
      "bank: give arrays by name, such as {'x': inputs, 'y': labels}"
    )
  if len(set(sizes.values())) != 1:
    raise ValueError(f"bank: arrays of different lengths {sizes}")
  return next(iter(sizes.values()))


@contextlib.contextmanager
def noted(note: str) -> Iterator[None]:
  """Adds a note to the errors of a block, which may come from another library.

  Args:
    note: what the block does.

  Yields:
    Nothing.

  >>> try:
  ...   with noted('in the encoder'):
  ...     _ = {}['kernel']
  ... except KeyError as error:
  ...   error.__notes__
  ['in the encoder']
  """
  try:
    yield
  except Exception as error:
    error.add_note(note)
    raise
