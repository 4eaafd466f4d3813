"""Speed choices, measured on the current machine and cached.

A choice changes how fast a round is, never its result. Names are tried one
after another, each with the best values found so far for the others. Choices
are kept in a file in the user's cache folder, by device, model and batch.
"""

from collections.abc import Callable, Mapping, Sequence
import hashlib
import json
import os
import pathlib
import platform
import statistics
import time
from typing import Any

from absl import logging
import jax

from hetfl import core
from hetfl.engine import jit
from hetfl.engine.threads import num_cores
from hetfl.run import logs

PyTree = Any
Choice = dict[str, Any]


def cache_folder() -> pathlib.Path:
  """The folder that keeps measurements and compiled programs for later runs.

  Raises:
    OSError: there is no home folder.
  """
  if cache := os.environ.get("XDG_CACHE_HOME"):
    return pathlib.Path(cache, "hetfl")
  try:
    return pathlib.Path.home() / ".cache" / "hetfl"
  except RuntimeError as error:  # No passwd entry, as in containers.
    raise OSError(f"{error} Set XDG_CACHE_HOME.") from error


def processor() -> str:
  """A hash of the kind of CPU: programs for one may not run on another."""
  description = platform.processor() + platform.machine()
  description += "".join(cpu_lines("model name", "flags", "Features"))
  return hashlib.sha256(description.encode()).hexdigest()[:16]


def cpu_lines(*beginnings: str) -> list[str]:
  """The lines of Linux's `/proc/cpuinfo` that begin so; elsewhere none."""
  path = pathlib.Path("/proc/cpuinfo")
  lines = path.read_text().splitlines() if path.exists() else []
  return sorted({line for line in lines if line.startswith(beginnings)})


def key_of(algorithm: core.Algorithm, plan: PyTree, data: PyTree) -> str:
  """The key of a choice: the devices, the cores, JAX's version and all shapes.

  Args:
    algorithm: the algorithm; its state's shapes identify the models.
    plan: a round's plan.
    data: the step's data.

  Returns:
    A line of text.
  """
  device = jax.devices()[0]
  state = jax.eval_shape(algorithm.init, jax.random.key(0))
  shapes = jax.tree.map(lambda a: (a.shape, str(a.dtype)), (state, plan, data))
  digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]
  kind = processor() if device.platform == "cpu" else device.device_kind
  return (
    f"{device.platform} {kind} x {jax.device_count()},"
    f" {num_cores()} cores, jax {jax.__version__}, shapes {digest}"
  )


def seconds_of(
  step: Callable, init: Callable, plan: PyTree, data: PyTree
) -> float:
  """The median seconds of a step, in three runs of one or, elsewhere, a few.

  On accelerators a run is five steps that the host waits for together, as
  training does not wait for each.

  Args:
    step: `(state, plan, data) -> (state, metrics)`, not donating its state.
    init: `key -> state`.
    plan: the plan.
    data: the data.

  Returns:
    Seconds.
  """
  state = core.strong(jit(init, once=True)(jax.random.key(0)))
  number, seconds = 1 if jax.default_backend() == "cpu" else 5, []
  for _ in range(4):
    start = time.perf_counter()
    for _ in range(number):
      result = step(state, plan, data)
    jax.block_until_ready(result)
    seconds.append((time.perf_counter() - start) / number)
  return statistics.median(seconds[1:])  # The first one compiles.


def choose(
  measure: Callable[[Choice], float],
  candidates: Mapping[str, Sequence[Any]],
  *,
  key: str,
  cache: str | os.PathLike[str] | None = None,
) -> Choice:
  """The fastest of some choices, measured once and remembered.

  Args:
    measure: choice -> seconds.
    candidates: name -> values; the first is kept if no other is faster by a
      twentieth.
    key: what the choice is for; see `key_of`.
    cache: the file that keeps choices; by default `autotune.json` in the cache
      folder.

  Returns:
    A value for each name.

  >>> import tempfile
  >>> cache = pathlib.Path(tempfile.mkdtemp(), 'autotune.json')
  >>> choose(lambda c: abs(c['lanes'] - 3), {'lanes': [1, 2, 3]},
  ...        key='here', cache=cache)
  {'lanes': 3}
  >>> choose(None, {'lanes': [1, 2, 3]}, key='here', cache=cache)
  {'lanes': 3}
  """
  cache = pathlib.Path(cache or cache_folder() / "autotune.json")
  key = f"{key}, {json.dumps(dict(candidates))}"
  if choice := _remembered(cache).get(key):
    logging.info("Speed, measured before (%s): %s.", cache, choice)
    return choice
  choice = {name: values[0] for name, values in candidates.items()}
  best = None
  for name, values in candidates.items():
    for value in values[1:]:
      if best is None:
        best = measure(choice)
        logging.info("Speed: %.4f s a round with %s.", best, choice)
      seconds = measure(choice | {name: value})
      logging.info("Speed: %.4f s with %s=%s.", seconds, name, value)
      if seconds < 0.95 * best:
        choice, best = choice | {name: value}, seconds
  logging.info("Speed, chosen: %s.", choice)
  try:
    cache.parent.mkdir(parents=True, exist_ok=True)
    # Read again: other processes may have written to it meanwhile.
    logs.write_json(cache, _remembered(cache) | {key: choice})
  except OSError as error:
    logging.warning(
      "Could not save the choice (%s); it will be measured again next time.",
      error,
    )
  return choice


def _remembered(cache: pathlib.Path) -> dict[str, Choice]:
  """The contents of the file; empty if it cannot be read."""
  try:
    return dict(json.loads(cache.read_bytes()))
  except (OSError, ValueError, TypeError):
    return {}
