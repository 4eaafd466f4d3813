"""Hyper-parameters: those that a state holds, and schedules over the rounds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


# round -> value
Schedule = Callable[[jax.Array], jax.Array | float]


def of_trials(state: PyTree) -> bool:
  """Whether a state has a trial axis, which it has if its key has one.

  Args:
    state: the state of any algorithm here.

  Returns:
    True if the state has a trial axis.
  """
  key = getattr(state, "key", None)
  return key is not None and jax.random.key_data(key).ndim > 1


def with_hyper(state: PyTree, **values: Any) -> PyTree:
  """Sets hyper-parameters in a state, such as those of a trial.

  Args:
    state: the state of any algorithm here.
    **values: hyper-parameters by their names in the `hyper` of the state or of
      its pools or parties; each is one value, or one for each pool or party.
      Values are not checked, since tracers could not be.

  Returns:
    The new state.

  Raises:
    ValueError: the state has no hyper-parameter of that name, or has it in
      another shape; or the state holds several trials.

  >>> from hetfl.pool import PoolsState
  >>> state = PoolsState(None, (), {'alpha': jnp.zeros(())})
  >>> with_hyper(state, alpha=0.5).hyper
  {'alpha': Array(0.5, dtype=float32)}
  >>> with_hyper(state, beta=0.5)
  Traceback (most recent call last):
    ...
  ValueError: beta: this state has no such hyper-parameter; it has ['alpha']
  """
  if of_trials(state):
    raise ValueError(
      "the state holds several trials: set each trial's values by"
      " jax.vmap(lambda state, v: with_hyper(state, NAME=v))(states, values)"
    )
  field = next((n for n in ("pools", "parties") if hasattr(state, n)), None)
  members = getattr(state, field) if field else ()
  own = getattr(state, "hyper", {})
  for name, value in values.items():
    value = jnp.asarray(value, jnp.float32)
    if name in own:
      _check_shape(name, value, own[name].shape)
      own = own | {name: jnp.broadcast_to(value, own[name].shape)}
    elif members and all(name in member.hyper for member in members):
      _check_shape(name, value, (len(members),))
      members = tuple(
        member.replace(
          hyper=member.hyper
          | {name: jnp.broadcast_to(v, member.hyper[name].shape)}
        )
        for member, v in zip(
          members, jnp.broadcast_to(value, (len(members),)), strict=True
        )
      )
    else:
      names = {*own, *(n for member in members for n in member.hyper)}
      if name in names:
        raise ValueError(
          f"{name}: not all {field} have this hyper-parameter; set it (for l2,"
          " a penalty) in all of them when you create them"
        )
      raise ValueError(
        f"{name}: this state has no such hyper-parameter; it has"
        f" {sorted(names)}"
      )
  if field:
    state = state.replace(**{field: members})
  return state.replace(hyper=own) if own else state


def _check_shape(name, value, shape):
  """Raises unless a value is a scalar or has the shape, or its last axes."""
  if value.shape != shape[len(shape) - value.ndim :]:
    raise ValueError(
      f"{name}: an array of shape {value.shape}; give one value"
      + (f", or an array of shape {shape}" if shape else "")
    )


def scheduled(
  schedule: Schedule, round: jax.Array, *, high: float
) -> jax.Array:
  """A schedule's value in a round; NaN if it is out of its range.

  NaN shows in a run's results; with a value out of range, training would
  continue in the wrong direction.

  Args:
    schedule: the schedule.
    round: the number of the round.
    high: the greatest allowed value; the least is 0.

  Returns:
    The value, `float32[]`.

  >>> [float(scheduled(lambda t: 1 - 0.4 * t, t, high=1)) for t in (1, 2, 3)]
  [0.6..., 0.2..., nan]
  >>> float(scheduled(lambda t: 1.000001, 1, high=1))
  1.0
  """
  value = jnp.asarray(schedule(round), jnp.float32)
  inside = jnp.clip(value, 0, high)
  # A schedule that ends at a bound may be beyond it by rounding.
  return jnp.where(jnp.abs(value - inside) < 1e-5, inside, jnp.nan)
