"""What the experiments share: values of flags, errors, engine and folders."""

import atexit
from collections.abc import Mapping, Sequence
import functools
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
from typing import Any

from absl import flags, logging
import jax
import numpy as np
import run_flags

from hetfl import engine as engine_lib
from hetfl.data import npz
from hetfl.models import kernels
from hetfl.run import logs

FLAGS = flags.FLAGS


class UsageError(ValueError):
  """A flag whose value makes no sense with the others."""


def npz_path(flag: str = "npz", of: str = "dataset") -> str | None:
  """The file of one's own images that a flag names.

  Args:
    flag: its name.
    of: the flag that names the data set.

  Raises:
    UsageError: there is none where the data set is npz, or one where it is not.
  """
  path, given = FLAGS[flag].value, FLAGS[of].value
  if path == "":
    raise UsageError(f"--{flag}=: give a file, or leave it out")
  datasets = given if isinstance(given, list) else [given]
  try:
    npz.check_npz(path, datasets, of=of, argument=flag)
  except ValueError as error:
    raise UsageError(f"--{error}") from error
  return path and os.path.expanduser(path)


def say_defaults(defaults: Mapping[str, Mapping[str, Mapping]]) -> None:
  """Appends the defaults of flags to their help texts.

  Args:
    defaults: data set -> algorithm -> flag -> default; the algorithm is `""` if
      there is only one.
  """
  every = [values for d in defaults.values() for values in d.values()]
  for name in {name for values in every for name in values}:
    labels = {}  # value -> where it is the default
    for dataset, algorithms in defaults.items():
      values = {a: _shown(v.get(name)) for a, v in algorithms.items()}
      alike = len(set(values.values())) == 1
      for algorithm, value in values.items():
        label = dataset if alike else f"{dataset} {algorithm}"
        if value and label not in labels.setdefault(value, []):
          labels[value].append(label)
    texts = [f"{value} ({', '.join(of)})" for value, of in labels.items()]
    if texts:
      FLAGS[name].help += f" By default {'; '.join(texts)}."


def _shown(value: Any) -> str:
  """A default as written on the command line; empty for `None`."""
  if isinstance(value, tuple):
    return ",".join(map(str, value))
  return "" if value is None else str(value)


def run_engine(lanes: int | None = None) -> engine_lib.Engine:
  """The engine that the flags ask for, the same for the same arguments.

  Args:
    lanes: how many clients train side by side, on all devices together; `None`
      for all of a round. CPU threads take as many as they are.

  Returns:
    The engine.

  Raises:
    UsageError: if flags ask for what the engine cannot do.
  """
  if FLAGS.engine in ("threads", "inline") and jax.process_count() > 1:
    raise UsageError(
      f"--engine={FLAGS.engine}: {jax.process_count()} processes need"
      " --engine=mesh, the default"
    )
  kind = FLAGS.engine
  if kind == "auto":
    on_cpu = jax.default_backend() == "cpu" and jax.process_count() == 1
    several = "mesh" if jax.device_count() > 1 else "inline"
    kind = "threads" if on_cpu else several
  if kind != "threads":
    return _inline(jax.device_count() if kind == "mesh" else None, lanes)
  if FLAGS.cpu_devices:
    raise UsageError(
      f"--cpu_devices={FLAGS.cpu_devices}: CPU threads use one device; add"
      " --engine=mesh, or leave it out"
    )
  rounds = FLAGS.rounds_per_dispatch or 1
  if rounds > 1:
    raise UsageError(
      f"--rounds_per_dispatch={rounds}: CPU threads run each round's programs"
      " one by one; use --engine=inline or mesh, or leave it out"
    )
  return _threads(FLAGS.threads)


_threads = functools.cache(engine_lib.Threads)


@functools.cache
def _inline(devices: int | None, lanes: int | None) -> engine_lib.Inline:
  mesh = devices and jax.make_mesh((devices,), (engine_lib.AXIS,))
  each = lanes and -(-lanes // (devices or 1))
  return engine_lib.Inline(mesh, at_once=each)


def on_threads() -> bool:
  """Whether the engine is CPU threads."""
  return isinstance(run_engine(), engine_lib.Threads)


def forget_engine() -> None:
  """Drops the engines, and with them all programs that they compiled."""
  _threads.cache_clear()
  _inline.cache_clear()


def filled(defaults: Mapping[str, Any]) -> dict[str, Any]:
  """The values of some flags, with defaults for those that are not set."""
  return {
    name: default if FLAGS[name].value is None else FLAGS[name].value
    for name, default in defaults.items()
  }


def default_conv(dataset: str) -> str:
  """The default of --conv for models with layers of many channels."""
  return kernels.default_conv(small=dataset == "digits")


def resolved_flags(
  module: str, values: dict, speed: dict, workdir: pathlib.Path
) -> tuple[dict, dict]:
  """Splits the flags of a run by what they change.

  Args:
    module: the experiment's module; its flags and the shared ones are split.
    values: values that replace those of the flags, with defaults filled in.
    speed: defaults of flags that change the speed only. A resumed run keeps the
      values that it started with: other lanes, for example, would sum the same
      numbers in another order.
    workdir: the run's folder.

  Returns:
    Flags that change the result, and those that change its speed.
  """
  names = {
    flag.name
    for m in (module, run_flags.__name__)
    for flag in FLAGS.get_flags_for_module(m)
  } - set(run_flags.PLACE_FLAGS)
  given = {n: FLAGS[n].value for n in sorted(names)}
  result = {n: v for n, v in given.items() if n not in run_flags.SPEED_FLAGS}
  result |= {n: v for n, v in values.items() if n not in run_flags.PLACE_FLAGS}
  stored = stored_speed(workdir)
  for name in (
    *("engine", "threads", "cpu_devices"),  # depend on the current machine
    *("stop_on_nonfinite", "tensorboard"),  # change no result
  ):
    stored.pop(name, None)
  # A flag that is set, else what the run started with, else the default.
  fallback = {"rounds_per_dispatch": 1} | speed | stored
  chosen = {
    n: v if FLAGS[n].present else fallback.get(n, v)
    for n, v in given.items()
    if n in run_flags.SPEED_FLAGS
  }
  if on_threads():
    chosen["rounds_per_dispatch"] = 1  # Even if another engine ran it before.
  return result, chosen


def stored_speed(workdir: pathlib.Path) -> dict:
  """The speed flags that a run started with, the same in all processes."""
  speed = logs.read_config(workdir).get("speed", {})
  return json.loads(engine_lib.bytes_from_first(json.dumps(speed).encode()))


def numbers(
  name: str,
  given: Sequence,
  *,
  low: float = -np.inf,
  high: float = np.inf,
  kind: type = float,
) -> list:
  """Parses a flag of comma-separated numbers.

  Args:
    name: the flag.
    given: its values, as strings or numbers.
    low: the least allowed value.
    high: the greatest allowed value.
    kind: int or float.

  Returns:
    The numbers.

  Raises:
    UsageError: naming the flag, the value and what is allowed.

  >>> numbers('server_lr', ['0.01', '0.1'], low=0)
  [0.01, 0.1]
  >>> numbers('server_lr', ['0.01', '-1'], low=0, high=9)
  Traceback (most recent call last):
    ...
  common.UsageError: --server_lr=0.01,-1: -1 must lie between 0 and 9
  """
  shown = f"--{name}={','.join(str(value) for value in given)}"
  try:
    read = [kind(value) for value in given]
  except ValueError as error:
    whole = "whole " if kind is int else ""
    raise UsageError(f"{shown}: not a {whole}number") from error
  for value in read:
    if not low <= value <= high:
      low, high, value = (f"{v:.12g}" for v in (low, high, value))
      allowed = f"lie between {low} and {high}"
      if high == "inf":
        allowed = f"be at least {low}"
      raise UsageError(f"{shown}: {value} must {allowed}")
  return read


def first_last(name: str, given: Sequence) -> list[float]:
  """Parses a flag of one weight, or of FIRST,LAST for a linear schedule.

  Args:
    name: the flag.
    given: its values, as strings or numbers.

  Returns:
    One or two numbers from 0 to 1.

  Raises:
    UsageError: naming the flag, the value and what is allowed.

  >>> first_last('alpha', ['0.9', '0.5'])
  [0.9, 0.5]
  """
  values = numbers(name, given, low=0, high=1)
  if len(values) not in (1, 2):
    shown = ",".join(map(str, given))
    raise UsageError(f"--{name}={shown}: give one value, or FIRST,LAST")
  return values


def linear(values: Sequence[float], rounds: int):
  """A constant, or a linear schedule from the first value to the last.

  >>> linear([0.5], 9), linear([0.9, 0.5], 9)(5)
  (0.5, 0.7)
  """
  if len(values) == 1:
    return values[0]
  first, last = values
  return lambda t: first + (last - first) * (t - 1) / max(rounds - 1, 1)


def read_seeds() -> tuple[int, ...]:
  """`--seeds`, or else `--seed`."""
  given = FLAGS.seeds or [FLAGS.seed]
  seeds = numbers("seeds", given, low=0, high=run_flags.MAX_SEED, kind=int)
  if len(set(seeds)) < len(seeds):
    raise UsageError(f"--seeds={','.join(FLAGS.seeds)}: give different numbers")
  return tuple(seeds)


def seed_folders(workdir: pathlib.Path) -> dict[int, pathlib.Path]:
  """The folder of each seed's runs: `workdir` itself without `--seeds`.

  Raises:
    UsageError: if `workdir` holds anything but folders of seeds, or if both
      --seed and --seeds are given.
  """
  seeds = read_seeds()
  if not FLAGS.seeds:
    return {seeds[0]: workdir}
  if "seed" in typed():
    raise UsageError(f"--seed={FLAGS.seed}: give it or --seeds, not both")
  allowed = re.compile(r"seed\d+|summary\.json")
  only_holds(workdir, allowed, "seeds", "seedN, or seedN/ALGORITHM")
  return {seed: workdir / f"seed{seed}" for seed in seeds}


def only_holds(
  workdir: pathlib.Path, allowed: re.Pattern[str], kind: str, example: str
) -> None:
  """Checks that a folder can hold one folder for each of several runs.

  Args:
    workdir: the folder; may be missing.
    allowed: names that it may hold besides charts and `summarize.py`'s files.
    kind: what differs between the runs.
    example: the name of such a run's folder.

  Raises:
    UsageError: if it holds anything else.
  """
  # Hidden files are locks, partly written files or the system's.
  charts = re.compile(
    r"\..*|curves(_questions|_answers)?\.png|summary\.(csv|png)"
  )
  hint = ""
  if (workdir / "config.json").exists():
    hint = f", to which this run can be moved as WORKDIR/{example}"
  for path in sorted(workdir.iterdir()) if workdir.is_dir() else ():
    if not any(p.fullmatch(path.name) for p in (allowed, charts)):
      raise UsageError(
        f"--workdir={workdir} holds {path.name}, so it cannot hold a comparison"
        f" of {kind}. Use another --workdir{hint}."
      )


def rows_to_draw(folder: logs.RunFolder) -> list[dict[str, Any]]:
  """The rows of a finished run.

  Args:
    folder: the run's folder.

  Returns:
    One dict per row.

  Raises:
    ValueError: there are none.
  """
  rows = logs.read_rows(folder.metrics)
  if not rows:
    raise ValueError(
      f"{folder.metrics}: the run is finished, but has no rows to draw; the"
      " table is in result.json"
    )
  return rows


def open_folder(
  workdir: pathlib.Path,
  config: dict,
  speed: dict,
  *,
  named: str = "--workdir",
  lengthens: bool = False,
  idle: Sequence[str] = (),
) -> logs.RunFolder:
  """Makes a run's folder, or opens it; see `logs.RunFolder`."""
  defaults = {name: FLAGS[name].default for name in FLAGS}
  # `pretrained` is a path, stored in config.json only for resuming the run.
  kept = defaults.keys() - {"pretrained"}
  shown = {n: v for n, v in (config | speed).items() if n in kept}
  return logs.RunFolder(
    workdir,
    config,
    speed,
    flags=logs.flags_text(shown),
    defaults=defaults,
    named=named,
    lengthens=lengthens,
    # Runs with other distillation data differ even if they do not use it.
    idle=set(idle) - {"distill_data", "distill_examples", "c4_tokenizer"},
  )


def typed() -> set[str]:
  """The flags that are set on the command line itself, not in a flag file."""
  given = [arg for arg in sys.argv[1:] if arg.startswith("-")]
  names = {arg.lstrip("-").partition("=")[0] for arg in given}
  return names | {name.removeprefix("no") for name in names - set(FLAGS)}


def warn_of_idle(reason: str, *names: str) -> None:
  """Warns of flags on the command line, not in flag files, without effect.

  Args:
    reason: why.
    *names: the flags.
  """
  for name in sorted(typed() & set(names)):
    logging.warning("--%s has no effect: %s.", name, reason)


def warn_of_idle_engine() -> None:
  """Warns of the flags of other engines than the one that runs."""
  if on_threads():
    warn_of_idle("CPU threads take one client each", "lanes")
  else:
    warn_of_idle("the engine is not threads", "threads")


def refuse(reason: str, *names: str) -> None:
  """Rejects shared flags that an experiment does not support.

  Args:
    reason: why.
    *names: the flags.

  Raises:
    UsageError: naming the first of them that is set. `false` and one round per
      dispatch, which a run's own `config.flags` contains, are accepted.
  """
  for name in names:
    idle = (None, False, 1) if name == "rounds_per_dispatch" else (None, False)
    if FLAGS[name].value not in idle:
      raise UsageError(f"--{name}={FLAGS[name].value}: {reason}")


def _stem(path: pathlib.Path) -> str:
  """A flag file's name; for that of a run or a search, its folder's name.

  >>> files = ("flags/table.flags", "runs/first/config.flags")
  >>> [_stem(pathlib.Path(file)) for file in files]
  ['table', 'first']
  """
  own = path.stem in ("config", "best")
  return path.absolute().parent.name if own else path.stem


def default_workdir(*parts: str) -> pathlib.Path:
  """`--workdir`, or a folder under `runs/` named after the run.

  Of several processes only the first writes there; the others get a temporary
  folder that is deleted when they end.

  Args:
    *parts: parts of the name, before the names of the flag files.

  Returns:
    The folder.
  """
  if jax.process_index() > 0:
    scratch = tempfile.mkdtemp(prefix="hetfl-")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    return pathlib.Path(scratch, "run")
  if FLAGS.workdir:
    return pathlib.Path(FLAGS.workdir).expanduser()
  # absl replaces this argument by the file's content, but not in sys.argv.
  given = re.findall(r"(?m)^--?flagfile[=\n](.+)$", "\n".join(sys.argv[1:]))
  stems = [_stem(pathlib.Path(path)) for path in given]
  return pathlib.Path("runs", "-".join([*parts, *stems]))
