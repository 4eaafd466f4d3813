"""What the experiments share: flags of every run, errors, and the engine."""

from collections.abc import Callable, Sequence
import json
import logging as std_logging
import os
import pathlib
import sys

from absl import app, flags, logging
import jax

from hetfl import engine as engine_lib

FLAGS = flags.FLAGS

# Flags that change the speed of a run and not its result.
SPEED_FLAGS = (
  "cpu_devices",
  "checkpoint_every",
  "conv",
  "engine",
  "eval_batch_size",
  "lanes",
  "microbatch",
  "stop_on_nonfinite",
  "tensorboard",
  "threads",
)
# Flags that say where things are.
PLACE_FLAGS = ("data_dir", "download", "workdir")


class UsageError(ValueError):
  """A flag whose value makes no sense with the others."""


def define_run_flags(default_rounds: str) -> None:
  """Defines the flags that every experiment has."""
  flags.DEFINE_string(
    "data_dir",
    os.environ.get("HETFL_DATA_DIR") or None,
    "Folder with the official files of the data sets; by default what the"
    " environment variable HETFL_DATA_DIR says.",
  )
  flags.DEFINE_bool(
    "download", False, "Download a data set that is not in --data_dir."
  )
  flags.DEFINE_string(
    "workdir",
    None,
    "Folder of the run; the same command on it goes on where it stopped."
    " By default runs/EXPERIMENT-DATASET-....",
  )
  flags.DEFINE_integer(
    "rounds", None, f"Rounds; {default_rounds}.", lower_bound=1
  )
  flags.DEFINE_integer("seed", 0, "Seed of the run.", lower_bound=0)
  flags.DEFINE_integer(
    "eval_every",
    None,
    "Rounds from one evaluation to the next.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "checkpoint_every",
    None,
    "Rounds from one checkpoint to the next; by default as --eval_every.",
    lower_bound=1,
  )
  flags.DEFINE_bool("tensorboard", True, "Write TensorBoard scalars.")
  flags.DEFINE_bool(
    "stop_on_nonfinite", False, "End a run whose loss is not finite."
  )
  flags.DEFINE_enum(
    "engine",
    "auto",
    ["auto", "threads", "inline", "mesh"],
    "Where the work runs: programs on CPU threads, one program on one"
    " device, or one program over all devices. Changes speed only.",
  )
  flags.DEFINE_integer(
    "threads",
    None,
    "CPU threads of --engine=threads; by default one a core.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "lanes",
    None,
    "Lanes that a round's clients are packed into. Changes speed only.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "cpu_devices",
    None,
    "Make so many devices of the CPU, to try out --engine=mesh.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "eval_batch_size",
    None,
    "Examples evaluated at once. Changes speed only.",
    lower_bound=1,
  )
  flags.DEFINE_enum(
    "conv",
    None,
    ["patches", "native"],
    "Form of the convolutions; by default patches. Changes speed only.",
  )
  flags.DEFINE_integer(
    "microbatch",
    None,
    "Distillation examples that pass through a student at once; 0: all."
    " Changes speed only.",
    lower_bound=0,
  )
  flags.DEFINE_enum(
    "matmul_precision",
    "float32",
    ["float32", "tensorfloat32", "bfloat16"],
    "Precision of matrix products.",
  )


def make_engine() -> engine_lib.Engine:
  """The engine that the flags ask for."""
  if FLAGS.engine == "threads":
    return engine_lib.Threads(FLAGS.threads)
  if FLAGS.engine == "mesh":
    return engine_lib.Inline(
      jax.make_mesh((jax.device_count(),), (engine_lib.AXIS,))
    )
  if FLAGS.engine == "inline":
    return engine_lib.Inline()
  return engine_lib.default_engine(FLAGS.threads)


def resolved_flags(
  module: str, values: dict, speed: dict, workdir: pathlib.Path
) -> tuple[dict, dict]:
  """Splits the flags of a run by what they change.

  Args:
    module: the experiment's module, whose flags and the shared ones count.
    values: values in place of those of the flags, defaults filled in.
    speed: defaults of flags that change the speed only. A run that goes on
      keeps those that it began with: other lanes, say, would add the same
      numbers up in another order.
    workdir: the run's folder.

  Returns:
    Flags that change the result, and those that change its speed.
  """
  names = {
    flag.name
    for m in (module, __name__)
    for flag in FLAGS.get_flags_for_module(m)
  } - set(PLACE_FLAGS)
  given = {n: FLAGS[n].value for n in sorted(names)}
  result = {n: v for n, v in given.items() if n not in SPEED_FLAGS} | values
  stored = _stored_speed(workdir)
  chosen = {
    n: v if FLAGS[n].present else stored.get(n, speed.get(n, v))
    for n, v in given.items()
    if n in SPEED_FLAGS
  }
  return result, chosen


def _stored_speed(workdir: pathlib.Path) -> dict:
  try:
    return dict(json.loads((workdir / "config.json").read_bytes())["speed"])
  except (OSError, ValueError, KeyError, TypeError):
    return {}


def default_workdir(*parts: str) -> pathlib.Path:
  """`--workdir`, or a folder under `runs/` named after the run."""
  return pathlib.Path(FLAGS.workdir or pathlib.Path("runs", "-".join(parts)))


def open_comparison(workdir: pathlib.Path, algorithms: Sequence[str]) -> None:
  """Checks that a folder is fit to hold one run's folder an algorithm."""
  allowed = {*algorithms, "curves.png"}
  if workdir.is_dir():
    strange = sorted(p.name for p in workdir.iterdir() if p.name not in allowed)
    if strange:
      raise UsageError(
        f"--workdir={workdir} holds {strange[0]}, which no comparison of"
        " algorithms does. Use another --workdir."
      )


def run(main: Callable[[], None]) -> None:
  """Parses flags, runs an experiment and turns its errors into one line.

  Args:
    main: the experiment; reads `FLAGS`.
  """

  def parse(argv: Sequence[str]) -> Sequence[str]:
    try:
      rest = FLAGS(argv)
    except flags.Error as error:
      sys.exit(_one_line(error))
    if rest[1:]:
      sys.exit(f"error: {rest[1]!r} is no flag; flags begin with --")
    return rest

  def start(_):
    logging.use_absl_handler()
    logging.set_verbosity(max(FLAGS.verbosity, logging.INFO))
    std_logging.getLogger("jax").setLevel(std_logging.WARNING)
    if FLAGS.cpu_devices:
      jax.config.update("jax_num_cpu_devices", FLAGS.cpu_devices)
    jax.config.update("jax_default_matmul_precision", FLAGS.matmul_precision)
    try:
      main()
    except (ValueError, OSError, FloatingPointError, ImportError) as error:
      if FLAGS.verbosity > 0:
        raise
      sys.exit(_one_line(error))

  app.run(start, flags_parser=parse)


def _one_line(error: Exception) -> str:
  text = " ".join(str(error).split())
  if not isinstance(error, ValueError | flags.Error):
    text = f"{type(error).__name__}: {text}"
  return f"error: {text}"
