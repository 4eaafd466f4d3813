"""Trials of an experiment side by side: on a batch axis, or as threaded runs.

Hyper-parameters are arrays in an algorithm's state. On accelerators, trials
with different values are therefore one program, under `jax.vmap` (`Vmapped`);
on CPUs, they are separate runs that keep the threads of one engine busy
(`SideBySide`). Trials do not affect each other, and a diverged trial keeps its
last finite state.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import core
from hetfl.engine import bank_format, jit
from hetfl.engine.work import row

PyTree = Any
Values = dict[str, float]


class Dimension(NamedTuple):
  """One hyper-parameter and its range.

  Attributes:
    low: the least value.
    high: the greatest value.
    log: whether equal ratios, not equal differences, are equally likely.

  >>> Dimension.parse('log:1e-4:0.1')
  Dimension(low=0.0001, high=0.1, log=True)
  """

  low: float
  high: float
  log: bool = False

  @classmethod
  def parse(cls, text: str) -> "Dimension":
    """Reads `log:LOW:HIGH` or `linear:LOW:HIGH`; other text is an error."""
    scale, *ends = text.split(":")
    try:
      low, high = map(float, ends)
      fine = -math.inf < low < high < math.inf and (
        low > 0 or scale == "linear"
      )
    except ValueError:
      fine = False
    if not fine or scale not in ("log", "linear"):
      raise ValueError(
        f"{text!r}: give log:LOW:HIGH or linear:LOW:HIGH, LOW below HIGH, and"
        " above 0 on a log scale"
      )
    return cls(low, high, scale == "log")

  def at(self, share: float) -> float:
    """The value at a share of the range, 0 to 1, rounded to six digits.

    The rounding lets a flag file say exactly what was tried.

    >>> Dimension(0.01, 100., log=True).at(0.5)
    1.0
    """
    span = self.high / self.low if self.log else self.high - self.low
    return self.rounded(
      self.low * span**share if self.log else self.low + span * share
    )

  def rounded(self, value: float) -> float:
    """A value to six digits, but not beyond the ends of the range.

    >>> Dimension(0.1, 0.12345678).rounded(0.12345677)
    0.12345678
    """
    return min(max(float(f"{value:.6g}"), self.low), self.high)


Space = Mapping[str, Dimension]


class Problem(NamedTuple):
  """An experiment as a search sees it.

  Attributes:
    init: `(values, seed) -> state`; traceable.
    step: `(state, plan, data) -> (state, metrics)`, one round.
    plan: `(seed, round) -> plan`, the same for all trials.
    data: passed to each step unchanged.
    evaluate: `(state, data) -> {name: Mean}`, accuracies on one of the sets in
      `eval_data`.
    eval_data: `heldout`, to choose trials by, and optionally `test`, to report
      trials that were trained to the end; passed to `evaluate` unchanged.
    objective: `{name: accuracy} -> float` of the held-out accuracies, to be
      maximised.
    rounds: how many rounds a trial has.
  """

  init: Callable[[Values, int], PyTree]
  step: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, core.Metrics]]
  plan: Callable[[int, int], PyTree]
  data: PyTree
  evaluate: Callable[[PyTree, PyTree], core.Metrics]
  eval_data: Mapping[str, PyTree]
  objective: Callable[[Mapping[str, float]], float]
  rounds: int


class Runner(abc.ABC):
  """Trains the trials of a block; the runner defines the pytree `states`.

  Args:
    problem: the experiment.
    seeds: each trial is trained with each of them.
  """

  def __init__(self, problem: Problem, seeds: Sequence[int] = (0,)):
    self.seeds = tuple(seeds)
    self._problem = problem
    self._new = lambda values, seed: core.strong(problem.init(values, seed))

  @abc.abstractmethod
  def start(self, values: Sequence[Values]) -> PyTree:
    """States before the first round.

    Args:
      values: the hyper-parameters of each of N trials, with the same names.

    Returns:
      The states.
    """

  @abc.abstractmethod
  def advance(
    self,
    states: PyTree,
    done: np.ndarray,
    last: int,
    tick: Callable[[int], None] = lambda runs: None,
  ) -> tuple[PyTree, np.ndarray]:
    """Runs rounds of the trials that have not diverged.

    Args:
      states: the states of N trials; they may be donated.
      done: `int[N]`, the round up to which each trial has been run. Those that
        are behind the others have diverged, and their states do not change.
      last: the last round.
      tick: called, from any thread, with the number of runs, each a trial with
        a seed, that have done another round.

    Returns:
      The states, and `done` after these rounds.
    """

  @abc.abstractmethod
  def take(self, states: PyTree, trials: Sequence[int]) -> PyTree:
    """The states of some of the trials.

    Args:
      states: the states of N trials.
      trials: the indices of the trials to take, in their new order.

    Returns:
      The states.
    """

  def evaluate(
    self, states: PyTree, which: str = "heldout"
  ) -> list[dict[str, float]]:
    """Each trial's accuracies on a set, the mean over the seeds.

    Args:
      states: the states of N trials.
      which: the set, one of the problem's `eval_data`.

    Returns:
      For each trial, accuracies by name, in [0, 1].
    """
    trials = [list(map(core.values, t)) for t in self._sums(states, which)]
    return [
      {name: float(np.mean([of[name] for of in trial])) for name in trial[0]}
      for trial in trials
    ]

  @abc.abstractmethod
  def _sums(self, states: PyTree, which: str) -> list[list[core.Metrics]]:
    """What `problem.evaluate` returns for each trial and seed."""


class SideBySide(Runner):
  """Runs several trials at once, each as a run of its own, on one CPU engine.

  A trial's bits do not depend on the trials beside it. While one trial waits
  for a round's last program, the programs of others fill the threads.

  Args:
    problem: the experiment; its step dispatches programs (`Threads`), or is
      jitted.
    seeds: each trial is trained with each of them.
    at_once: how many runs are active at once.
  """

  def __init__(
    self, problem: Problem, seeds: Sequence[int] = (0,), *, at_once: int = 4
  ):
    super().__init__(problem, seeds)
    self._at_once = at_once
    self._init = jit(self._new, once=True)
    self._finite = jax.jit(core.all_finite)

  def start(self, values):
    """See `Runner`."""
    scalars = [{name: np.float32(x) for name, x in v.items()} for v in values]
    return tuple(
      tuple(self._init(v, np.uint32(seed)) for seed in self.seeds)
      for v in scalars
    )

  def advance(self, states, done, last, tick=lambda runs: None):
    """See `Runner`."""
    problem, first = self._problem, int(np.max(done)) + 1
    rounds = range(first, last + 1)
    plans = [[problem.plan(seed, t) for t in rounds] for seed in self.seeds]

    def run(state, done, plans):
      for plan in plans if done == first - 1 else ():
        new, _ = problem.step(state, plan, problem.data)
        if not self._finite(new):
          break
        state, done = new, done + 1
        tick(1)
      return state, done

    number = len(self.seeds)
    flat = [state for trial in states for state in trial]
    with futures.ThreadPoolExecutor(self._at_once, "trial") as pool:
      each = pool.map(run, flat, np.repeat(done, number), plans * len(states))
      flat, done = zip(*each)
    states = zip(*(flat[i::number] for i in range(number)))
    return tuple(states), np.min(np.reshape(done, (-1, number)), axis=1)

  def take(self, states, trials):
    """See `Runner`."""
    return tuple(states[i] for i in trials)

  def _sums(self, states, which):
    data = self._problem.eval_data[which]
    return [[self._problem.evaluate(s, data) for s in of] for of in states]


def of_each(fn: Callable[[PyTree], PyTree], trials: PyTree) -> PyTree:
  """Applies a function to each trial: by `jax.vmap`, on TPUs one after another.

  XLA's convolutions on TPUs copy their inputs if both trials and lanes are
  batched.

  Args:
    fn: of one trial.
    trials: trials on the first axis of each array.

  Returns:
    The results, trials on their first axes.

  >>> of_each(lambda x: 2 * x, jnp.arange(3)).tolist()
  [0, 2, 4]
  """
  if jax.default_backend() == "tpu":
    return jax.lax.map(fn, trials)
  return jax.vmap(fn)(trials)


class Vmapped(Runner):
  """Runs all trials of a block as one program, split over the devices.

  On TPUs a device takes its trials one after another; see `of_each`.

  Args:
    problem: the experiment; its step and evaluation can be traced (`Inline`).
    seeds: each trial is trained with each of them.
    devices: the devices that share the trials; by default the first.
  """

  def __init__(
    self,
    problem: Problem,
    seeds: Sequence[int] = (0,),
    *,
    devices: Sequence[jax.Device] | None = None,
  ):
    super().__init__(problem, seeds)
    devices = jax.local_devices()[:1] if devices is None else devices
    self._devices = len(devices)
    mesh = jax.sharding.Mesh(np.array(devices), ("trials",))
    split, same = jax.P("trials"), jax.P()
    self._split = jax.sharding.NamedSharding(mesh, split)
    self._init = jit(jax.vmap(self._new, (0, None)), once=True)
    # Transferred once, not in each round.
    everywhere = jax.sharding.NamedSharding(mesh, same)
    put = lambda a: jax.device_put(a, bank_format(a, everywhere))
    self._data = jax.tree.map(put, problem.data)
    self._eval_data = jax.device_put(problem.eval_data, everywhere)
    step = lambda states, done, plan, data: of_each(
      lambda trial: self._guarded(trial[0], trial[1], plan, data),
      (states, done),
    )
    # One trial after another: side by side, evaluation would need more memory
    # than training.
    evaluate = lambda states, data: jax.lax.map(
      lambda state: problem.evaluate(state, data), states
    )
    shard = functools.partial(
      jax.shard_map, mesh=mesh, out_specs=split, check_vma=False
    )
    specs = (split, split, same, same)
    self._step = jit(shard(step, in_specs=specs), (0, 1))
    self._evaluate = jit(shard(evaluate, in_specs=(split, same)))

  def start(self, values):
    """See `Runner`."""
    stacked = jax.tree.map(lambda *each: jnp.asarray(each), *values)
    return tuple(self._init(stacked, np.uint32(seed)) for seed in self.seeds)

  def advance(self, states, done, last, tick=lambda runs: None):
    """See `Runner`."""
    first, active = int(np.max(done)) + 1, int(np.sum(done == np.max(done)))
    states, index = self._padded(states, len(done))
    results = []
    for state, seed in zip(states, self.seeds):
      now = np.asarray(done, np.int32)[index]
      state, now = jax.device_put((state, now), self._split)
      for round in range(first, last + 1):
        plan = self._problem.plan(seed, round)
        state, now = self._step(state, now, plan, self._data)
        tick(active)
      results.append((state, now))
    states, each = zip(*jax.tree.map(lambda a: a[: len(done)], results))
    return states, np.min(each, axis=0)

  def take(self, states, trials):
    """See `Runner`."""
    return row(states, np.asarray(trials))

  def _sums(self, states, which):
    number = len(jax.tree.leaves(states)[0])
    states, _ = self._padded(states, number)
    data = self._eval_data[which]
    sums = jax.device_get([self._evaluate(state, data) for state in states])
    return [[row(of_seed, i) for of_seed in sums] for i in range(number)]

  def _guarded(self, state, done, plan, data):
    """A step that keeps the last finite state of a diverged trial.

    `done` is the last round with a finite state.
    """
    new, _ = self._problem.step(state, plan, data)
    fine = (done == plan.round - 1) & core.all_finite(new)
    state = optax.tree.where(fine, new, state)
    return state, jnp.where(fine, plan.round, done)

  def _padded(self, states, number):
    """Pads trials to a multiple of the devices, by copies of the first.

    Returns the states, and which of the `number` trials each one is of.
    """
    index = [*range(number), *[0] * (-number % self._devices)]
    return states if len(index) == number else self.take(states, index), index
