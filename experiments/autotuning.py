"""The measurements of --autotune before a run starts."""

from collections.abc import Callable
import dataclasses
import json
import pathlib

import jax
import launch
from settings import Given, Settings, UsageError

import hetfl
from hetfl.run import autotune as autotune_lib
from hetfl.run import training

_OFTEN = 10  # Rarer exchanges hardly affect the speed.


def measure(
  build: Callable[[Settings], object],
  given: Given,
  s: Settings,
  workdir: pathlib.Path,
) -> Settings:
  """Tunes the speeds that are not given, unless the run has stored ones.

  Args:
    build: settings -> an experiment with `algorithm`, `plan`, `lanes`,
      `device_data` and `engine`.
    given: the flags.
    s: the run's settings.
    workdir: the run's folder.

  Returns:
    The settings with the fastest values that were found.

  Raises:
    UsageError: there are several processes.
  """
  if jax.process_count() > 1:
    raise UsageError(
      "--autotune works in a single process only; run it in one process first"
    )
  if launch.stored_speed(workdir):
    return s
  experiment, every = build(s), s.exchange_every
  s = dataclasses.replace(s, lanes=experiment.lanes(s))
  algorithm = experiment.algorithm(s)
  on_cpu, often = "cpu" in s.words, 0 < every <= min(s.rounds, _OFTEN)
  lanes, most = s.lanes or 0, max(s.clients_per_round)
  few = [-(-lanes // n) for n in ((2,) if on_cpu else (2, 4))]
  candidates = {
    "lanes": [n for n in (lanes, *few, 2 * lanes) if n <= most],
    "microbatch": [16, 32, 64, 0] if on_cpu else [0, 32],
    "conv": [s.conv] if on_cpu else [s.conv, "patches", "native"],
    "rounds_per_dispatch": [1, 8],
  }
  kinds = {n: s.declared()[n].kind_in(s.words) for n in candidates}
  if not often:
    kinds["microbatch"] = "idle"
  candidates = {
    name: [getattr(s, name), *(v for v in values if v != getattr(s, name))]
    for name, values in candidates.items()
    if kinds[name] == "speed" and name not in given.values
  }

  def round_seconds(choice: dict) -> float:
    tried = dataclasses.replace(s, **choice)
    # Models are built for a form of convolution; all else is read later.
    one = experiment if tried.conv == s.conv else build(tried)
    algorithm, number = one.algorithm(tried), tried.rounds_per_dispatch
    step = algorithm.step if number == 1 else training.scanned(algorithm.step)
    step = one.engine.compile(step)

    def seconds_from(first: int) -> float:
      plans = [one.plan(s, first + i) for i in range(number)]
      plan = plans[0] if number == 1 else hetfl.stack_plans(plans)
      data = one.device_data(s)
      return autotune_lib.seconds_of(step, algorithm.init, plan, data) / number

    usual = seconds_from(1)
    rest = number % every if often else 0
    if not rest:
      return usual
    # Some dispatches contain one more exchange than the first.
    more = seconds_from(every - rest + 1)
    return usual + (more - usual) * rest / every

  key = autotune_lib.key_of(
    algorithm, experiment.plan(s, 1), experiment.device_data(s)
  )
  key += f", {type(experiment.engine).__name__} {experiment.engine.num_pieces}"
  # Shapes tell neither these nor the type.
  fixed = {n: getattr(s, n) for n in kinds if n not in candidates}
  fixed |= {"bank": s.bank, "dtype": s.dtype}
  key += f", {json.dumps([fixed, every if often else 0])}"
  choice = autotune_lib.choose(round_seconds, candidates, key=key)
  launch.forget_engines()
  return dataclasses.replace(s, **choice)
