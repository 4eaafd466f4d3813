"""Starts a run, or several side by side, from the command line."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import logging as std_logging
import math
import os
import pathlib
import re
import sys
from typing import Any, NamedTuple, NoReturn

from absl import app, flags, logging
import common
import jax

from hetfl import core
from hetfl import engine as engine_lib
from hetfl.run import autotune, logs, report, training

FLAGS = flags.FLAGS
# The flags of library arguments that have other names.
_FLAG_OF = {"datasets": "dataset", "tokenizer": "c4_tokenizer"}


class _Run(NamedTuple):
  """One algorithm with one seed: where it runs, and its resolved flags."""

  seed: int
  name: str
  path: pathlib.Path
  config: dict
  speed: dict


def side_by_side(
  label: Sequence[str],
  algorithms: Sequence[str],
  *,
  unused: Mapping[str, Sequence[str]],
  configure: Callable[[str, pathlib.Path, int], tuple[dict, dict]],
  build: Callable[..., Any],
  train: Callable[..., dict],
  draw: Callable[..., None],
  table: Callable[[dict], str],
  lengthens: Callable[[dict], bool] = lambda config: False,
) -> None:
  """Runs the algorithms and seeds of the flags, then prints a table.

  Args:
    label: parts of the default folder's name.
    algorithms: the known algorithms.
    unused: algorithm -> the flags that it ignores.
    configure: (algorithm, folder, seed) -> the resolved flags, `config` and
      `speed`.
    build: `(config, speed) ->` the experiment, which all runs share that agree
      in `_made_of`; it has `algorithm(config, speed)` and
      `plan(config, round)`.
    train: `(experiment, config, speed, folder) ->` the result.
    draw: `(rows, config=, folder=, experiment=)`, draws the curves; `rows` has
      the rows of each seed, by algorithm.
    table: formats the results of each seed, by algorithm, as text.
    lengthens: whether a run of this config can be extended to more rounds.
  """
  names = FLAGS.algorithm
  for name in names:
    if name not in algorithms:
      raise common.UsageError(
        f"--algorithm={name}: choose from {', '.join(algorithms)}"
      )
  if len(set(names)) < len(names):
    raise common.UsageError(f"--algorithm={','.join(names)}: name each once")
  common.warn_of_idle(
    f"--algorithm={','.join(names)} ignores it",
    *set.intersection(*(set(unused[name]) for name in names)),
  )
  common.warn_of_idle_engine()
  several = len(names) > 1
  workdir = common.default_workdir(
    *label, *names, *["seeds"] * bool(FLAGS.seeds)
  )
  places = common.seed_folders(workdir)
  runs = []
  for seed, place in places.items():
    for name in names:
      path = place / name if several else place
      runs.append(_Run(seed, name, path, *configure(name, path, seed)))
  experiment_of = _keeper(build)
  # Raises errors before any folder is made.
  for run in runs[: len(names)]:
    experiment = experiment_of(run)
    experiment.algorithm(run.config, run.speed)
    experiment.plan(run.config, 1)
  for place in places.values() if several else ():
    allowed = re.compile("|".join(algorithms))
    common.only_holds(place, allowed, "algorithms", "ALGORITHM")
  folders = [
    common.open_folder(
      run.path,
      run.config,
      run.speed,
      lengthens=lengthens(run.config),
      idle=unused[run.name],
    )
    for run in runs
  ]
  results, rows = {}, {}
  for run, folder in zip(runs, folders):
    experiment = chart = None  # or two experiments would be alive at once
    experiment = experiment_of(run)
    result = train(experiment, run.config, run.speed, folder)
    results.setdefault(run.name, []).append(result)
    rows.setdefault(run.name, []).append(common.rows_to_draw(folder))
    latest = {name: of_seeds[-1:] for name, of_seeds in rows.items()}
    chart = functools.partial(draw, config=run.config, experiment=experiment)
    chart({run.name: latest[run.name]}, folder=run.path)
    if several and run.name == names[-1]:
      chart(latest, folder=places[run.seed])
  if FLAGS.seeds:
    chart(rows, folder=workdir)
    write_summary(workdir, results, list(places))
  print(table(results))
  print(f"\nCurves: {workdir / 'curves.png'}")


def train(
  algorithm: core.Algorithm,
  plan: Callable[[int], Any],
  data: Any,
  evaluate: Callable[[Any], dict],
  *,
  config: dict,
  speed: dict,
  engine: engine_lib.Engine,
  folder: logs.RunFolder,
  summarize: Callable[..., dict],
) -> dict:
  """Runs an algorithm as the flags say; see `training.run`.

  Args:
    algorithm: the algorithm.
    plan: round -> its plan.
    data: what a step takes as data.
    evaluate: state -> a row of metrics.
    config: flags that change the result.
    speed: flags that do not.
    engine: where it runs.
    folder: the run's folder.
    summarize: (last state, last evaluation) -> the result.

  Returns:
    The result.
  """
  return training.run(
    algorithm,
    jax.random.key(config["seed"]),
    plan,
    data,
    evaluate,
    engine=engine,
    rounds=config["rounds"],
    folder=folder,
    summarize=summarize,
    eval_every=config["eval_every"],
    checkpoint_every=speed["checkpoint_every"],
    tensorboard=speed["tensorboard"],
    stop_on_nonfinite=speed["stop_on_nonfinite"],
    rounds_per_dispatch=speed["rounds_per_dispatch"],
  )


def _keeper(build: Callable[..., Any]) -> Callable[[_Run], Any]:
  """A function from a run to its experiment, which reuses the last if it can.

  It keeps one experiment at a time, since it holds the data.
  """
  kept = {}

  def experiment_of(run):
    key = _made_of(run)
    if key not in kept:
      kept.clear()
      kept[key] = build(run.config, run.speed)
    return kept[key]

  return experiment_of


def _made_of(run: _Run) -> tuple:
  """The values in which the experiments of a command's runs may differ."""
  form = [run.speed.get(n) for n in ("conv", "eval_batch_size", "bank")]
  # The seed determines these examples.
  return *form, run.seed if run.config.get("distill_examples") else None


def write_summary(
  workdir: pathlib.Path,
  results: Mapping[str, Sequence[dict]],
  seeds: Sequence[int],
) -> None:
  """Writes the results of several seeds to `summary.json`.

  For each accuracy and perplexity of an algorithm, by its path in the results,
  it has the mean, the standard deviation and all values.

  Args:
    workdir: the folder of the seeds' folders.
    results: algorithm -> the content of `result.json` of each seed.
    seeds: the seeds.
  """
  algorithms = {}
  for name, of_seeds in results.items():
    leaves = [dict(_measures(result)) for result in of_seeds]
    algorithms[name] = {}
    for place in leaves[0]:
      values = [leaf.get(place) for leaf in leaves]
      if None not in values:
        mean, deviation = report.mean_and_deviation(values)
        entry = {"mean": mean, "deviation": deviation, "values": values}
        algorithms[name][place] = entry
  summary = {"seeds": seeds, "algorithms": algorithms}
  logs.write_json(workdir / "summary.json", summary)


def _measures(result: Any, place: str = "") -> Iterator[tuple[str, Any]]:
  """A result's accuracies and perplexities by path: `pools.small.test_...`."""
  parts = result.items() if isinstance(result, Mapping) else enumerate(result)
  for name, value in parts:
    if isinstance(value, Mapping | list):
      yield from _measures(value, f"{place}{name}.")
    elif re.search("accuracy|perplexity", str(name)):
      yield f"{place}{name}", value


def run(
  main: Callable[[], None],
  define: Callable[[], None] | None = None,
  *,
  refused: Sequence[str] = (),
) -> None:
  """Parses flags, runs an experiment and turns its errors into one line.

  Args:
    main: the experiment; reads `FLAGS`.
    define: defines the flags that depend on the values of others.
    refused: flags that it does not support, which `--help` leaves out. They are
      defined all the same, since `config.flags` of earlier runs has them.
  """

  def parse(argv: Sequence[str]) -> Sequence[str]:
    try:
      if define:
        argv = [arg for arg in argv if arg != "--"]
        no_help = [a for a in argv if not a.lstrip("-").startswith("help")]
        FLAGS(no_help, known_only=True)
        define()
      _list_flags(refused)
      rest = FLAGS(argv)
    except flags.Error as error:
      sys.exit(_one_line(error))
    if rest[1:]:
      sys.exit(f"error: unexpected argument {rest[1]!r}; flags begin with --")
    return rest

  def start(_):
    logging.use_absl_handler()
    if not FLAGS["verbosity"].present:
      logging.set_verbosity(logging.INFO)
    std_logging.getLogger("jax").setLevel(std_logging.WARNING)
    # Orbax logs dozens of lines for each checkpoint.
    ours = lambda r: r.levelno > std_logging.INFO or "orbax" not in r.pathname
    logging.get_absl_logger().addFilter(ours)
    if FLAGS.cpu_devices:
      jax.config.update("jax_num_cpu_devices", FLAGS.cpu_devices)
    jax.config.update("jax_default_matmul_precision", FLAGS.matmul_precision)
    try:
      _refuse_odd_values()
      _keep_programs()
      _join_processes()
      main()
    except (ValueError, OSError, ArithmeticError, ImportError) as error:
      if FLAGS.verbosity > 0:
        raise
      _end(_one_line(error))

  app.run(start, flags_parser=parse)


def _end(message: str) -> NoReturn:
  """Ends the process with a message.

  One of several processes does not wait for the others, which may be waiting
  for it inside a program; they end when they notice that it has ended.
  """
  if not jax.distributed.is_initialized():
    sys.exit(message)
  print(message, file=sys.stderr, flush=True)
  os._exit(1)


def _list_flags(refused: Sequence[str]) -> None:
  """Makes `--help` list the flags of all modules here, not only of the main."""
  ours = {path.stem for path in pathlib.Path(__file__).parent.glob("*.py")}
  for module, defined in FLAGS.flags_by_module_dict().items():
    for flag in defined if module in ours else ():
      if flag.name not in refused:
        FLAGS.register_key_flag_for_module(sys.argv[0], flag)


def _refuse_odd_values() -> None:
  """Rejects `--name=` for lists that must not be empty, and `--name=nan`."""
  for name in FLAGS:
    value = FLAGS[name].value
    if value == [] and FLAGS[name].default != []:
      raise common.UsageError(f"--{name}=: give a value, or leave it out")
    if isinstance(value, float) and not math.isfinite(value):
      raise common.UsageError(f"--{name}={value}: must be a finite number")


def _keep_programs() -> None:
  """Sets up the cache of compiled programs, as --compilation_cache says."""
  folder = FLAGS.compilation_cache
  if folder == "none":
    jax.config.update("jax_enable_compilation_cache", False)
    return
  if folder is not None:
    folder = pathlib.Path(folder).expanduser()
  else:
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
      return
    try:
      folder = autotune.cache_folder() / "programs" / autotune.processor()
      folder.mkdir(parents=True, exist_ok=True)
    except OSError:
      return  # A home that cannot be written to is no reason to stop.
  jax.config.update("jax_compilation_cache_dir", str(folder))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _join_processes() -> None:
  """Makes this process one of several, if the flags say so."""
  names = ("coordinator", "processes", "process_id")
  given = {n: FLAGS[f"distributed_{n}"].value for n in names}
  if all(value is None for value in given.values()):
    return
  coordinator, processes, process = given.values()
  automatic = coordinator == "auto"
  if automatic:
    if (processes, process) != (None, None):
      raise common.UsageError(
        "--distributed_coordinator=auto finds the number of processes and the"
        " id of this one itself; leave the other two flags out"
      )
    coordinator = None
  elif None in given.values():
    missing = next(n for n in names if given[n] is None)
    raise common.UsageError(
      f"--distributed_{missing}: missing; give --distributed_coordinator,"
      " --distributed_processes and --distributed_process_id, all three, or"
      " --distributed_coordinator=auto alone"
    )
  elif process >= processes:
    raise common.UsageError(
      f"--distributed_process_id={process}: must be less than"
      f" --distributed_processes={processes}"
    )
  # For CPUs; other devices have their own collectives.
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  try:
    jax.distributed.initialize(coordinator, processes, process)
  except (RuntimeError, ValueError) as error:
    reason = f"the processes did not find each other: {error}"
    if automatic and "should be defined" in str(error):
      reason = (
        "JAX found no other processes: this is neither a TPU pod nor a job"
        f" started by srun or mpirun; give HOST:PORT ({error})"
      )
    raise common.UsageError(
      f"--distributed_coordinator={FLAGS.distributed_coordinator}: {reason}"
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


def _one_line(error: Exception) -> str:
  """An error's text in one line, with library arguments as flags."""
  # JAX adds a note of its own, about its traceback.
  notes = [n for n in getattr(error, "__notes__", ()) if not n.startswith("--")]
  text = " ".join("; ".join([str(error), *notes]).split())
  if not isinstance(error, flags.Error | common.UsageError):

    def as_flag(match):
      name = _FLAG_OF.get(match[1], match[1])
      return f"--{name}=" if name in FLAGS else match[0]

    # Not in lists and paths.
    text = re.sub(r"""(?<![\w=/.,"'[-])(\w+)=""", as_flag, text)
  if not isinstance(error, ValueError | flags.Error):
    text = f"{type(error).__name__}: {text}"
  return f"error: {text}"
