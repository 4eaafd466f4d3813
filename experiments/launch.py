"""Runs what a command's settings ask for: engine, folders, seeds, errors."""

import atexit
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
import logging as std_logging
import os
import pathlib
import platform
import re
import shutil
import signal
import sys
import tempfile
from typing import Any, NoReturn

from absl import flags, logging
import jax
from settings import Given, in_words, Settings, UsageError

import hetfl
from hetfl import core
from hetfl import engine as engine_lib
from hetfl.run import logs, report, training

_ERRORS = (ValueError, OSError, ArithmeticError, ImportError, MemoryError)


def run(
  main: Callable[[Given], None], given: Given, cls: type[Settings]
) -> None:
  """Runs a command, and ends with its errors in one line.

  Args:
    main: the command.
    given: its flags.
    cls: its settings.
  """
  flags.FLAGS.mark_as_parsed()  # Flags of absl's own logging.
  logging.use_absl_handler()
  verbose = given.values.get("verbosity", 0) > 0
  logging.set_verbosity(logging.DEBUG if verbose else logging.INFO)
  std_logging.getLogger("jax").setLevel(std_logging.WARNING)
  try:
    s = cls.resolve(given.values, ())
    if s.cpu_devices:
      jax.config.update("jax_num_cpu_devices", s.cpu_devices)
    jax.config.update("jax_default_matmul_precision", s.matmul_precision)
    _keep_programs(s.compilation_cache)
    _join_processes(s)
    main(given)
  except KeyboardInterrupt:  # Elsewhere than in training, which is resumed.
    print("SIGINT: stopped; the same command resumes.", file=sys.stderr)
    sys.exit(128 + signal.SIGINT)
  except _ERRORS as error:
    if verbose:
      raise
    _end(_one_line(error, cls))


def _end(message: str) -> NoReturn:
  """Ends the process with a message.

  One of several processes does not wait for the others, which may be waiting
  for it inside a program; they end when they notice that it has ended.
  """
  if not jax.distributed.is_initialized():
    sys.exit(message)
  print(message, file=sys.stderr, flush=True)
  os._exit(1)


def _one_line(error: Exception, cls: type[Settings]) -> str:
  """An error's text in one line, with the library's arguments as flags."""
  # JAX adds a note of its own, about its traceback.
  notes = [n for n in getattr(error, "__notes__", ()) if not n.startswith("--")]
  text = " ".join("; ".join([str(error), *notes]).split())
  flags_of = {s.argument or name: name for name, s in cls.declared().items()}
  for argument, name in flags_of.items():
    text = re.sub(rf"(^|[ (]){argument}=", rf"\1--{name}=", text)
  if not isinstance(error, ValueError):
    text = f"{type(error).__name__}: {text}"
  return f"error: {text}"


def _keep_programs(folder: str | None) -> None:
  """Sets up the cache of compiled programs, as --compilation_cache says."""
  if folder == "none":
    jax.config.update("jax_enable_compilation_cache", False)
    return
  if folder is None and jax.config.jax_compilation_cache_dir:
    return
  try:
    path = pathlib.Path(folder or _programs()).expanduser()
    path.mkdir(parents=True, exist_ok=True)
  except (OSError, RuntimeError):
    return  # A home that is not there or not writable is no reason to stop.
  jax.config.update("jax_compilation_cache_dir", str(path))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _programs() -> pathlib.Path:
  """The folder of programs for this kind of CPU; others may not run them.

  Raises:
    RuntimeError: there is no home folder: no passwd entry, as in containers.
  """
  home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  cpus = pathlib.Path("/proc/cpuinfo")
  lines = cpus.read_text().splitlines() if cpus.exists() else []
  kinds = ("model name", "flags", "Features")
  kinds = sorted({line for line in lines if line.startswith(kinds)})
  text = platform.processor() + platform.machine() + "".join(kinds)
  digest = hashlib.sha256(text.encode()).hexdigest()[:16]
  return pathlib.Path(home, "hetfl", "programs", digest)


def _join_processes(s: Settings) -> None:
  """Makes this process one of several, if the flags say so."""
  coordinator = s.distributed_coordinator
  rest = (s.distributed_processes, s.distributed_process_id)
  if coordinator is None and rest == (None, None):
    return
  automatic = coordinator == "auto"
  if automatic and rest != (None, None):
    raise UsageError(
      "--distributed_coordinator=auto finds the number of processes and the"
      " id of this one itself; leave the other two flags out"
    )
  names = ("coordinator", "processes", "process_id")
  for name, value in zip(names, (coordinator, *rest)):
    if value is None and not automatic:
      raise UsageError(
        f"--distributed_{name}: missing; give all three of"
        f" --distributed_{{{','.join(names)}}}, or the first as auto alone"
      )
  # For CPUs; other devices have their own collectives.
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  try:
    jax.distributed.initialize(None if automatic else coordinator, *rest)
  except (RuntimeError, ValueError) as error:
    hint = " (auto is for TPU pods, srun and mpirun)" if automatic else ""
    raise UsageError(
      f"--distributed_coordinator={coordinator}: the processes did not find"
      f" each other{hint}: {error}"
    ) from error
  logging.info(
    "%d processes with %d devices in total, %d of them in this process.",
    jax.process_count(),
    jax.device_count(),
    jax.local_device_count(),
  )
  if jax.process_index() > 0:  # Only the first reports progress.
    logging.set_verbosity(logging.WARNING)
    sys.stdout = open(os.devnull, "w", encoding="utf-8")


def machine_words(values: Mapping[str, Any]) -> set[str]:
  """What holds of the machine: the engine's kind, and `cpu` on one.

  Args:
    values: the given settings.

  Returns:
    Words.

  Raises:
    UsageError: the engine cannot be.
  """
  kind, on_cpu = values.get("engine", "auto"), jax.default_backend() == "cpu"
  processes, devices = jax.process_count(), values.get("cpu_devices")
  if kind in ("threads", "inline") and processes > 1:
    raise UsageError(
      f"--engine={kind}: {processes} processes need --engine=mesh, the default"
    )
  if kind == "auto":
    several = "mesh" if jax.device_count() > 1 else "inline"
    kind = "threads" if on_cpu and processes == 1 else several
  if kind == "threads" and devices:
    raise UsageError(
      f"--cpu_devices={devices}: CPU threads use one device; add"
      " --engine=mesh, or leave it out"
    )
  return {kind} | ({"cpu"} if on_cpu else set())


def engine_of(s: Settings, lanes: int | None = None) -> engine_lib.Engine:
  """The engine of a run, the same for the same arguments.

  Args:
    s: the run's settings.
    lanes: how many clients train side by side, on all devices together; `None`
      for all of a round. CPU threads take one each.

  Returns:
    The engine.
  """
  if "threads" in s.words:
    return _threads(s.threads)
  return _inline(jax.device_count() if "mesh" in s.words else 1, lanes)


_threads = functools.cache(engine_lib.Threads)


@functools.cache
def _inline(devices: int, lanes: int | None) -> engine_lib.Engine:
  # Several processes have several devices together.
  mesh = jax.make_mesh((devices,), (engine_lib.AXIS,)) if devices > 1 else None
  return engine_lib.Inline(mesh, at_once=lanes and -(-lanes // devices))


def put(
  subsets: Mapping[str, hetfl.Subset], others: Mapping[str, Any]
) -> tuple[dict[str, hetfl.Subset], dict[str, Any]]:
  """Puts banks on the device, shared ones only once.

  Args:
    subsets: by name.
    others: subsets and populations by name, whose banks are all that is used.

  Returns:
    The subsets there, and the others' banks.
  """
  banks = hetfl.put_banks(*subsets.values(), *others.values())
  there = {
    name: subset._replace(bank=bank)
    for (name, subset), bank in zip(subsets.items(), banks)
  }
  return there, dict(zip(others, banks[len(subsets) :]))


def linear(values: Sequence[float], rounds: int):
  """A constant, or a linear schedule from the first value to the last.

  >>> linear([0.5], 9), linear([0.9, 0.5], 9)(5)
  (0.5, 0.7)
  """
  first, last = values[0], values[-1]
  if first == last:
    return first
  return lambda t: first + (last - first) * (t - 1) / max(rounds - 1, 1)


def settle(
  cls: type[Settings], given: Given, words: set[str], workdir: pathlib.Path
) -> Settings:
  """The settings of a run; a resumed one keeps its speed settings.

  Other lanes, for example, would sum the same numbers in another order.
  """
  kinds = {n: s.kind_in(words) for n, s in cls.declared().items()}
  speed = logs.read_config(workdir).get("speed", {})
  # The same in all processes.
  speed = json.loads(engine_lib.bytes_from_first(json.dumps(speed).encode()))
  stored = {n: v for n, v in speed.items() if kinds.get(n) == "speed"}
  return cls.resolve(stored | given.values, words)


def open_folder(
  s: Settings,
  workdir: pathlib.Path,
  named: str = "--workdir",
  lengthens: bool = False,
) -> logs.RunFolder:
  """Makes a run's folder, or opens it; see `logs.RunFolder`.

  Args:
    s: the run's settings.
    workdir: the folder.
    named: the flag that names it.
    lengthens: whether the run can be extended.

  Returns:
    The folder.
  """
  config, speed = s.of_kind("result"), s.of_kind("speed", "machine")
  text = logs.flags_text(
    # A path, which is stored only for resuming.
    {n: v for n, v in (config | speed).items() if n != "pretrained"}
  )
  declared = s.declared().items()
  defaults = {n: declared.default_in(s.words) for n, declared in declared}
  return logs.RunFolder(
    workdir,
    config,
    speed,
    flags=text,
    defaults=defaults,
    named=named,
    lengthens=lengthens,
  )


def warn_of_idle(given: Given, runs: Sequence[Settings]) -> None:
  """Warns of flags on the command line, not in flag files, without effect."""
  for name in sorted(given.typed):
    declared = runs[0].declared().get(name)
    if declared and all(declared.kind_in(s.words) == "idle" for s in runs):
      logging.warning(
        "--%s has no effect here: it is for %s.", name, in_words(declared.only)
      )


def workdir_of(given: Given, *parts: str) -> pathlib.Path:
  """`--workdir`, or a folder under `runs/` named after the run.

  Of several processes only the first writes there; the others get a temporary
  folder that is deleted when they end.

  Args:
    given: the flags.
    *parts: parts of the name, before the names of the flag files.

  Returns:
    The folder.
  """
  if jax.process_index() > 0:
    scratch = tempfile.mkdtemp(prefix="hetfl-")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    return pathlib.Path(scratch, "run")
  if given.values.get("workdir"):
    return pathlib.Path(given.values["workdir"])
  files = [pathlib.Path(file).absolute() for file in given.files]
  stems = [
    # For a run or a search, the folder's name.
    path.parent.name if path.stem in ("config", "best") else path.stem
    for path in files
  ]
  seeds = ["seeds"] * ("seeds" in given.values)
  return pathlib.Path("runs", "-".join([*parts, *seeds, *stems]))


def seed_folders(
  given: Given, workdir: pathlib.Path
) -> dict[int, pathlib.Path]:
  """The folder of each seed's runs: `workdir` itself without `--seeds`.

  Raises:
    UsageError: `workdir` holds anything but folders of seeds, or both --seed
      and --seeds are given.
  """
  seeds, seed = given.values.get("seeds"), given.values.get("seed", 0)
  if not seeds:
    return {seed: workdir}
  if "seed" in given.typed:
    raise UsageError(f"--seed={seed}: give it or --seeds, not both")
  only_holds(workdir, r"seed\d+|summary\.json", "seedN, or seedN/ALGORITHM")
  return {seed: workdir / f"seed{seed}" for seed in seeds}


def only_holds(workdir: pathlib.Path, allowed: str, example: str) -> None:
  """Checks that a folder can hold the folders of several runs.

  Args:
    workdir: the folder; may be missing.
    allowed: pattern of the names that it may hold besides charts,
      `summarize.py`'s files and hidden ones.
    example: the name of a run's folder.

  Raises:
    UsageError: it holds anything else.
  """
  # Hidden files are locks, partly written files or the system's.
  allowed += r"|\..*|\w+\.png|summary\.csv"
  for path in sorted(workdir.iterdir()) if workdir.is_dir() else ():
    if not re.fullmatch(allowed, path.name):
      raise UsageError(
        f"--workdir={workdir} holds {path.name}, so it cannot hold several"
        f" runs, each in a folder {example}. Use another --workdir."
      )


def side_by_side(
  given: Given,
  cls: type[Settings],
  label: Sequence[str],
  *,
  words: Callable[[Mapping[str, Any], str], set[str]],
  build: Callable[[Settings], Any],
  draw: Callable[..., None],
  table: Callable[[dict, dict], str],
  lengthens: Callable[[Settings], bool] = lambda s: False,
  flag: str = "algorithm",
) -> None:
  """Runs the algorithms and seeds of the flags, then prints a table.

  Args:
    given: the flags.
    cls: the settings.
    label: parts of the default folder's name.
    words: (given values, algorithm) -> what holds of its run.
    build: settings -> the experiment, which runs share; see `train` for its
      methods, beside `algorithm(s)`.
    draw: `(rows, s, folder, experiment)`, draws the curves; `rows` has the rows
      of each seed, by algorithm.
    table: `(results, rows)`, of each seed, by algorithm, formatted as text.
    lengthens: whether a run can be extended to more rounds.
    flag: the setting that names the algorithms.
  """
  names = getattr(cls.resolve(given.values, ()), flag)
  several = len(names) > 1
  workdir = workdir_of(given, *label, *names)
  places = seed_folders(given, workdir)
  runs = []
  for seed, place in places.items():
    for name in names:
      path = place / name if several else place
      s = settle(cls, given, words(given.values, name), path)
      runs.append((dataclasses.replace(s, seed=seed, **{flag: name}), path))
  warn_of_idle(given, [s for s, _ in runs])
  kept = {}

  def prepared(s):
    """The experiment and the algorithm, whose programs all seeds share."""
    key = [getattr(s, n, None) for n in ("conv", "eval_batch_size", "bank")]
    # The seed determines these examples.
    key = *key, s.seed if getattr(s, "distill_examples", None) else None
    if key not in kept:  # Only one at a time, since it holds the data.
      kept.clear()
      kept[key] = build(s), {}
    experiment, algorithms = kept[key]
    of_all = dataclasses.replace(s, seed=0)
    if of_all not in algorithms:
      algorithms[of_all] = experiment.algorithm(s)
    return experiment, algorithms[of_all]

  # Raises errors before any folder is made.
  for s, _ in runs[: len(names)]:
    experiment, _ = prepared(s)
    experiment.plan(s, 1)
  for place in places.values() if several else ():
    only_holds(place, "|".join(cls.declared()[flag].choices), flag.upper())
  folders = [open_folder(s, path, lengthens=lengthens(s)) for s, path in runs]
  results, rows = {}, {}
  for (s, _), folder in zip(runs, folders):
    experiment = algorithm = None  # Or two would be alive at once.
    experiment, algorithm = prepared(s)
    name, result = getattr(s, flag), train(experiment, algorithm, s, folder)
    results.setdefault(name, []).append(result)
    rows.setdefault(name, []).append(logs.read_rows(folder.metrics))
    finished = {
      n: of_seeds[-1:]
      for n, of_seeds in rows.items()
      if len(of_seeds) == len(rows[name])
    }
    draw(finished, s, places[s.seed], experiment)
  if "seeds" in given.values:
    draw(rows, s, workdir, experiment)
    report.write_summary(workdir, results, list(places))
  print(table(results, rows))
  print(f"\nCurves: {workdir / 'curves.png'}")
  check_finite(results)


def check_finite(results: Mapping[str, Sequence[dict]]) -> None:
  """Raises a `UsageError` if runs have diverged."""
  lost = [n for n, of in results.items() if any("diverged" in r for r in of)]
  if lost:
    raise UsageError(f"{', '.join(lost)}: diverged; lower the learning rates")


def train(
  experiment: Any,
  algorithm: core.Algorithm,
  s: Settings,
  folder: logs.RunFolder,
) -> dict:
  """Runs or resumes one algorithm in a folder of its own.

  Args:
    experiment: has `files(s)`, `plan(s, round)`, `engine`, `device_data(s)`,
      `evaluate(s, state)` and `summarize(s, folder, state, evaluation)`.
    algorithm: the experiment's.
    s: the run's settings.
    folder: the folder.

  Returns:
    The result.
  """
  folder.keep(experiment.files(s))
  options = s.arguments(
    training.run,
    algorithm=algorithm,
    engine=experiment.engine,
    key=jax.random.key(s.seed),
    plan_fn=functools.partial(experiment.plan, s),
    data=experiment.device_data(s),
    evaluate=functools.partial(experiment.evaluate, s),
    checkpoint_every=s.checkpoint_every or s.eval_every,
    rounds_per_dispatch=s.of_kind("speed").get("rounds_per_dispatch", 1),
    folder=folder,
    summarize=functools.partial(experiment.summarize, s, folder),
  )
  return training.run(**options)
