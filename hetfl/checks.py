"""Checks of arguments.

Errors name the argument, its value and what to do.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import inspect
from typing import Any, TypeVar

from absl import logging
import jax
import numpy as np

_Named = TypeVar("_Named", bound=Any)  # with a field `name`


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
  for name, value in numbers.items():
    _whole(name, value, 1)


def seed(seed: int) -> None:
  """Checks a seed of random draws.

  Args:
    seed: the seed.

  Raises:
    ValueError: it is not a whole number of at least zero.

  >>> seed('2')
  Traceback (most recent call last):
    ...
  ValueError: seed='2': must be a whole number, at least 0
  """
  _whole("seed", seed, 0)


def _whole(name, value, least):
  whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
  if not whole or value < least:
    raise ValueError(
      f"{name}={value!r}: must be a whole number, at least {least}"
    )


def given(**values: Any) -> dict[str, Any]:
  """The values that are not `None`, of arguments that may be left out.

  Args:
    **values: names and values.

  Returns:
    The others.

  >>> given(max_steps=None, microbatch=8)
  {'microbatch': 8}
  """
  return {name: x for name, x in values.items() if x is not None}


def between(low: float, high: float, **values: Any) -> None:
  """Checks hyper-parameters against their range.

  Args:
    low: the least allowed value.
    high: the greatest; infinity for any finite number.
    **values: names and values; of traced ones only the shapes are checked.

  Raises:
    ValueError: naming the first that is not a number, not a scalar, or out of
      its range.

  >>> between(0, 1, alpha=1.5)
  Traceback (most recent call last):
    ...
  ValueError: alpha=1.5: must lie between 0 and 1
  """
  for name, value in values.items():
    if callable(value):
      raise ValueError(
        f"{name}={value!r}: must be a number, not a schedule; if the state"
        " holds it, hetfl.with_hyper can change it between rounds"
      )
    if np.ndim(value):
      raise ValueError(
        f"{name}={value}: must be one number; to vary it over trials, use"
        " hetfl.with_hyper"
      )
    if isinstance(value, jax.core.Tracer):
      continue
    array = np.asarray(value)
    if not np.issubdtype(array.dtype, np.number):
      raise ValueError(f"{name}={value!r}: must be a number")
    if not (low <= array <= high and np.isfinite(array)):
      wanted = f"lie between {low} and {high}"
      if np.isinf(high):
        wanted = f"be finite, at least {low}"
      raise ValueError(f"{name}={value}: must {wanted}")


def positive(**values: Any) -> None:
  """Checks hyper-parameters used as divisors: at least a millionth.

  Args:
    **values: as `between`.

  Raises:
    ValueError: as `between`.

  >>> positive(temperature=0.0)
  Traceback (most recent call last):
    ...
  ValueError: temperature=0.0: must be finite, at least 1e-06
  """
  between(1e-6, np.inf, **values)


def schedule(
  name: str, value: Any, *rounds: int, allowed: tuple[float, float]
) -> None:
  """Checks a hyper-parameter that may be a schedule, in some rounds.

  Args:
    name: its name.
    value: a number, or a function of the round.
    *rounds: the rounds in which a schedule is checked.
    allowed: the least and the greatest allowed value.

  Raises:
    ValueError: as `between`.

  >>> schedule('alpha', lambda t: 0.1 * t, 1, 20, allowed=(0, 1))
  Traceback (most recent call last):
    ...
  ValueError: alpha=2.0: must lie between 0 and 1
  """
  for t in rounds:
    now = value(np.int32(t)) if callable(value) else value
    between(*allowed, **{name: now})


def factories(**optimizers: Any) -> None:
  """Checks that optimizers are given as functions of their learning rate.

  Their states must not hold the rate, which may change from step to step.

  Args:
    **optimizers: names and what should be such functions.

  Raises:
    ValueError: naming the first that is no such function, or whose state holds
      the rate.

  >>> import optax
  >>> factories(server_optimizer=optax.adam(1e-3))
  Traceback (most recent call last):
    ...
  ValueError: server_optimizer: give a function of the learning rate, such as \
optax.adam, not an optimizer
  """
  for name, optimizer in optimizers.items():
    if not callable(optimizer):
      raise ValueError(
        f"{name}: give a function of the learning rate, such as optax.adam, not"
        " an optimizer"
      )
    takes(name, optimizer, "learning_rate")
    if _holds_rate(optimizer):
      raise ValueError(
        f"{name}: its state holds the learning rate, which then could not"
        " change; give it without optax.inject_hyperparams"
      )
    if not _uses_rate(optimizer):
      logging.warning(
        "%s: its steps do not depend on the learning rate that it is given, so"
        " neither learning rates nor their decay have an effect.",
        name,
      )


def _holds_rate(optimizer: Any) -> bool:
  """Whether an optimizer's first states for two rates differ."""
  try:
    states = [optimizer(rate).init(np.zeros(1)) for rate in (0.0, 1.0)]
    first, second = (list(map(np.asarray, jax.tree.leaves(s))) for s in states)
  except Exception:  # It needs parameters of some structure: not checked.
    return False
  return any(not np.array_equal(a, b) for a, b in zip(first, second))


def _uses_rate(optimizer: Any) -> bool:
  """Whether the rate enters an optimizer's steps."""

  def step(rate, x):
    return optimizer(rate).update(x, optimizer(rate).init(x), x)[0]

  try:
    program = jax.make_jaxpr(step)(0.5, np.ones(1, np.float32)).jaxpr
  except Exception:  # It needs parameters of some structure: not checked.
    return True
  rate = program.invars[0]
  return any(v is rate for eqn in program.eqns for v in eqn.invars)


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


def bank(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
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
  ValueError: data has no 'train'; it has ['pool']
  """
  return _as_bank(_entry(data, name), f"data[{name!r}]")


def _entry(data, name):
  if not isinstance(data, Mapping):
    raise ValueError(f"data: give a dict with {name!r}, {not_a(data)}")
  if name not in data:
    raise ValueError(f"data has no {name!r}; it has {sorted(data)}")
  return data[name]


def _as_bank(given, name):
  if not isinstance(given, Mapping):
    raise ValueError(
      f"{name}: give a bank, arrays by name, {not_a(given)}; put_banks(...)"
      " returns those of populations and subsets"
    )
  return given


def _is_several(given):
  """Whether it is a list or tuple; a NamedTuple counts as one thing."""
  return isinstance(given, list | tuple) and not hasattr(given, "_fields")


def _a(wanted):
  name = wanted.__name__
  return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def not_a(given: Any) -> str:
  """What something is not, for error messages.

  Args:
    given: the thing.

  Returns:
    The name of its type, in words.

  >>> not_a(3)
  'not a int'
  """
  return f"not a {type(given).__name__}"


def kind(name: str, given: Any, wanted: type, hint: str) -> None:
  """Checks that something is of a type.

  Args:
    name: its name in error messages.
    given: what should be of the type.
    wanted: the type.
    hint: where such things come from.

  Raises:
    ValueError: it is of another type.

  >>> kind('plan', 3, str, 'as plan_round makes it')
  Traceback (most recent call last):
    ...
  ValueError: plan: give a str, not a int; as plan_round makes it
  """
  if not isinstance(given, wanted):
    raise ValueError(f"{name}: give {_a(wanted)}, {not_a(given)}; {hint}")


def state(given: Any, wanted: type, **numbers: int) -> None:
  """Checks that the state of a step is one that the algorithm's init made.

  Args:
    given: the state.
    wanted: its type.
    **numbers: how many pools or parties it is of, by the name of their field.

  Raises:
    ValueError: it is of another type, or of another number.

  >>> import collections
  >>> State = collections.namedtuple('State', 'pools')
  >>> state(State(('a',)), State, pools=2)
  Traceback (most recent call last):
    ...
  ValueError: the state is of 1 pools, but there are 2
  """
  kind("state", given, wanted, "as this algorithm's init makes it")
  for name, number in numbers.items():
    if (held := len(getattr(given, name))) != number:
      raise ValueError(f"the state is of {held} {name}, but there are {number}")


def holds(what: str, hyper: Mapping[str, Any], *names: str) -> None:
  """Checks that a state has some hyper-parameters.

  Args:
    what: what the state is, for error messages.
    hyper: its hyper-parameters.
    *names: those that it must have.

  Raises:
    ValueError: one is missing, as in the state of another algorithm.

  >>> holds('state', {'alpha': 1.0}, 'alpha', 'beta')
  Traceback (most recent call last):
    ...
  ValueError: state: has no hyper-parameter 'beta', so another algorithm made \
it; use the state of this one's init
  """
  for name in names:
    if name not in hyper:
      raise ValueError(
        f"{what}: has no hyper-parameter {name!r}, so another algorithm made"
        " it; use the state of this one's init"
      )


def each(name: str, given: Any, wanted: type, number: int, hint: str) -> None:
  """Checks that something is a sequence of N things of a type.

  Args:
    name: its name in error messages.
    given: what should be the sequence.
    wanted: the type.
    number: N.
    hint: where such things come from.

  Raises:
    ValueError: it is something else.

  >>> each('counts', [3, 'a'], int, 2, 'count them')
  Traceback (most recent call last):
    ...
  ValueError: counts[1]: give an int, not a str; count them
  """
  if not _is_several(given):
    raise ValueError(
      f"{name}: give a sequence of {number}, each {_a(wanted)},"
      f" {not_a(given)}; {hint}"
    )
  if len(given) != number:
    raise ValueError(
      f"{name}: has length {len(given)}, expected {number}; {hint}"
    )
  for i, one in enumerate(given):
    kind(f"{name}[{i}]", one, wanted, hint)


def sequence(name: str, given: Any, kind: type) -> None:
  """Raises if given a single `kind` where a sequence of them belongs.

  Args:
    name: its name in error messages.
    given: what should be a sequence; nothing else about it is checked.
    kind: the type of its entries.

  Raises:
    ValueError: it is a single `kind`.

  >>> sequence('counts', 3, int)
  Traceback (most recent call last):
    ...
  ValueError: counts: give a sequence, such as [counts], not a bare int
  """
  if isinstance(given, kind):
    raise ValueError(
      f"{name}: give a sequence, such as [{name}], not a bare {kind.__name__}"
    )


def named(
  what: str,
  given: Sequence[_Named],
  wanted: type[_Named],
  at_least: int = 1,
) -> tuple[_Named, ...]:
  """Checks that there are enough pools or parties and that their names differ.

  Args:
    what: "pools" or "parties".
    given: the pools or parties.
    wanted: their type.
    at_least: how many are needed.

  Returns:
    Them, as a tuple.

  Raises:
    ValueError: one is of another type, two share a name, or there are too few.

  >>> import collections
  >>> Pool = collections.namedtuple('Pool', 'name')
  >>> named('pools', [Pool('a'), Pool('a')], Pool)
  Traceback (most recent call last):
    ...
  ValueError: pools=['a', 'a']: give at least 1, each with a different name
  """
  sequence(what, given, wanted)
  given = tuple(given)
  hint = f"hetfl.{wanted.__name__}(name, model, ...)"
  each(what, given, wanted, len(given), hint)
  names = [one.name for one in given]
  if len(names) < at_least or len(set(names)) != len(names):
    raise ValueError(
      f"{what}={names}: give at least {at_least}, each with a different name"
    )
  return given


def banks(data: Mapping[str, Any], name: str, number: int) -> Sequence[Any]:
  """The sequence of N banks `data[name]` in the data of a step.

  Args:
    data: the step's data: sequences of banks, and banks, by name.
    name: the name of the sequence.
    number: N.

  Returns:
    The sequence.

  Raises:
    ValueError: it is missing, or not a sequence of N banks.

  >>> banks({'pools': {'x': 1, 'y': 2}}, 'pools', 2)
  Traceback (most recent call last):
    ...
  ValueError: data['pools']: must be a sequence of 2 banks, one per pool or \
party, not a dict
  """
  found = _entry(data, name)
  several = _is_several(found)
  if not several or len(found) != number:
    what = f"not of {len(found)}" if several else not_a(found)
    raise ValueError(
      f"data[{name!r}]: must be a sequence of {number} banks, one per pool or"
      f" party, {what}"
    )
  for i, one in enumerate(found):
    _as_bank(one, f"data[{name!r}][{i}]")
  return found


def num_examples(bank: Mapping[str, Any]) -> int:
  """Number of examples in a bank, if all its arrays agree on it.

  Args:
    bank: arrays `[N, ...]` by name.

  Returns:
    N.

  Raises:
    ValueError: an entry is not an array, lengths differ, or there are no
      arrays.

  >>> num_examples({'x': np.zeros((3, 8)), 'y': np.zeros(4)})
  Traceback (most recent call last):
    ...
  ValueError: bank: arrays of different lengths {'x': 3, 'y': 4}
  """
  if not isinstance(bank, Mapping):
    raise ValueError(
      "bank: give arrays by name, such as {'x': inputs, 'y': labels},"
      f" {not_a(bank)}"
    )
  for name, array in bank.items():
    if not getattr(array, "ndim", 0):
      raise ValueError(
        f"bank[{name!r}]: must be an array with examples on its first axis,"
        f" {not_a(array)}; store inputs made of several arrays under separate"
        " names, and combine them into a tree x by a transform"
      )
  if not bank:
    raise ValueError("bank: holds no arrays; give arrays by name")
  sizes = {name: len(array) for name, array in bank.items()}
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
