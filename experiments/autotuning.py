"""The measurements of --autotune before a run starts."""

from collections.abc import Callable
import json
import pathlib

from absl import flags
import common
import jax

from hetfl import stack_plans, Threads
from hetfl.run import autotune as autotune_lib
from hetfl.run import training

FLAGS = flags.FLAGS
_OFTEN = 10  # Rarer exchanges hardly affect the speed.


def measure(
  experiment_class: Callable,
  config: dict,
  speed: dict,
  workdir: pathlib.Path,
  every: int,
) -> dict:
  """Tunes the speed flags that are not set, unless the run has stored ones.

  Args:
    experiment_class: `(config, speed) ->` an experiment with `algorithm`,
      `plan`, `lanes`, `device_data` and `engine`.
    config: flags that change the result.
    speed: flags that do not.
    workdir: the run's folder.
    every: rounds from one exchange to the next; 0: none.

  Returns:
    The speed flags with the fastest values that were found.

  Raises:
    UsageError: there are several processes.
  """
  if jax.process_count() > 1:
    raise common.UsageError(
      "--autotune works in a single process only; run it in one process first"
    )
  if common.stored_speed(workdir):
    return speed
  experiment = experiment_class(config, speed)
  algorithm = experiment.algorithm(config, speed)
  speed = speed | {"lanes": experiment.lanes(config, speed)}
  on_cpu = jax.default_backend() == "cpu"
  lanes = speed["lanes"] or 0  # CPU threads have none.
  candidates = {
    "lanes": [lanes, -(-lanes // 2), 2 * lanes],
    "microbatch": [16, 32, 64, 0] if on_cpu else [0, 32],
    "conv": ["patches"] if on_cpu else ["patches", "native"],
    "rounds_per_dispatch": [1, 8],
  }
  if not on_cpu:
    candidates["lanes"].append(-(-lanes // 4))
  often = 0 < every <= min(config["rounds"], _OFTEN)
  # With dropout or models of the user's the microbatch changes the result.
  if not often or "microbatch" in config:
    del candidates["microbatch"]
  if isinstance(experiment.engine, Threads):
    candidates["rounds_per_dispatch"] = [1]
  clients = max(config["clients_per_round"])  # Those of the larger sample.
  candidates["lanes"] = [n for n in candidates["lanes"] if n <= clients]
  candidates = {
    name: [speed[name], *(v for v in values if v != speed[name])]
    for name, values in candidates.items()
    if speed.get(name) is not None and not FLAGS[name].present
  }

  def round_seconds(choice: dict) -> float:
    tried = speed | choice
    # Models are built for a form of convolution; all else is read later.
    one = experiment if tried.get("conv") == speed.get("conv") else None
    one = one or experiment_class(config, tried)
    algorithm = one.algorithm(config, tried)
    number = tried["rounds_per_dispatch"]
    step = algorithm.step if number == 1 else training.scanned(algorithm.step)
    step = one.engine.compile(step)

    def seconds_from(first: int) -> float:
      plans = [one.plan(config, first + i) for i in range(number)]
      plan = plans[0] if number == 1 else stack_plans(plans)
      data = one.device_data(config)
      return autotune_lib.seconds_of(step, algorithm.init, plan, data) / number

    usual = seconds_from(1)
    rest = number % every if often else 0
    if not rest:
      return usual
    # Some dispatches contain one more exchange than the first.
    more = seconds_from(every - rest + 1)
    return usual + (more - usual) * rest / every

  plan = experiment.plan(config, 1)
  key = autotune_lib.key_of(algorithm, plan, experiment.device_data(config))
  key += f", {type(experiment.engine).__name__} {experiment.engine.num_pieces}"
  measured = ("bank", "conv", "lanes", "microbatch", "rounds_per_dispatch")
  fixed = {n: speed.get(n) for n in measured if n not in candidates}
  fixed["dtype"] = config["dtype"]  # Shapes do not tell it.
  key += f", {json.dumps([fixed, every if often else 0])}"
  choice = autotune_lib.choose(round_seconds, candidates, key=key)
  common.forget_engine()
  return speed | choice
