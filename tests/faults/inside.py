"""Runs a command where something is at fault; for forks, see `tests/forks.py`.

The first argument says what, as JSON, by the name of a function below; then
follow the script and its arguments.
"""

import atexit
import errno
import functools
import json
import os
import pathlib
import runpy
import signal
import sys
import time

import jax

from hetfl import engine as engine_lib
from hetfl.run import training, tune


def trace(_):
  """Rounds are traced and not run: the first one ends the process."""

  @functools.wraps(training.run)
  def run(algorithm, key, plan_fn, data, evaluate, *, engine, **options):
    state = jax.eval_shape(jax.jit(algorithm.init), key)
    plan = plan_fn(1)
    if isinstance(engine, engine_lib.Inline):  # Else it dispatches programs.
      jax.eval_shape(jax.jit(algorithm.step), state, plan, data)
    sys.exit()

  @functools.wraps(tune.search)
  def search(problem, propose, runner, *, trials, block, **options):
    values = propose([], 0, min(block, trials))
    state = jax.eval_shape(lambda: problem.init(values[0], runner.seeds[0]))
    plan = problem.plan(runner.seeds[0], 1)
    if isinstance(runner, tune_trials.Vmapped):
      jax.eval_shape(problem.step, state, plan, problem.data)
    sys.exit()

  from hetfl.run import trials as tune_trials

  training.run, tune.search = run, search


def writes(spec):
  """Something happens at some of the writes below a folder.

  Args:
    spec: `folder`; the numbers of the `first` and the `last` of these writes,
      from 1; what to `do`, fail with an error of this name, or be killed by a
      signal; and a file for how many there are in all, `count`. It may be
      changed later; `seen` are the writes so far.
  """

  def hook(event, args):
    if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
      if not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    elif event not in ("os.mkdir", "os.rename"):
      return
    path = os.path.abspath(os.fsdecode(args[0]))
    if not path.startswith(spec.get("folder", "\0")):
      return
    spec["seen"] = number = spec.get("seen", 0) + 1
    if spec.get("first", 1) <= number <= spec.get("last", 0):
      if spec["do"].startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, spec["do"]))
      code = getattr(errno, spec["do"])
      raise OSError(code, os.strerror(code), path)

  sys.addaudithook(hook)
  if "count" in spec:
    count = pathlib.Path(spec["count"])
    atexit.register(lambda: count.write_text(str(spec["seen"])))


def clock(seconds):
  """The clock is set back."""
  now = time.time
  time.time = lambda: now() - seconds


if __name__ == "__main__":
  _, faults, *sys.argv = sys.argv
  for name, value in json.loads(faults).items():
    globals()[name](value)
  runpy.run_path(sys.argv[0], run_name="__main__")
