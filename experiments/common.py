"""What the experiments share: flags of every run, errors, and the engine."""

from collections.abc import Callable, Sequence
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
  if FLAGS.engine == "threads" or (
    FLAGS.engine == "auto" and jax.default_backend() == "cpu"
  ):
    return engine_lib.Threads(FLAGS.threads)
  if FLAGS.engine == "mesh":
    return engine_lib.Inline(
      jax.make_mesh((jax.device_count(),), (engine_lib.AXIS,))
    )
  if FLAGS.engine == "inline":
    return engine_lib.Inline()
  return engine_lib.default_engine()


def resolved_flags(module: str, values: dict) -> tuple[dict, dict]:
  """Splits the flags of a run by what they change.

  Args:
    module: the experiment's module, whose flags and the shared ones count.
    values: values in place of those of the flags, defaults filled in.

  Returns:
    Flags that change the result, and those that change its speed.
  """
  names = {
    flag.name
    for m in (module, __name__)
    for flag in FLAGS.get_flags_for_module(m)
  }
  names -= set(PLACE_FLAGS)
  given = {n: FLAGS[n].value for n in sorted(names)} | values
  speed = {n: v for n, v in given.items() if n in SPEED_FLAGS}
  result = {n: v for n, v in given.items() if n not in SPEED_FLAGS}
  return result, speed


def default_workdir(*parts: str) -> pathlib.Path:
  """`--workdir`, or a folder under `runs/` named after the run."""
  return pathlib.Path(FLAGS.workdir or pathlib.Path("runs", "-".join(parts)))


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
    if FLAGS.help or FLAGS.helpshort or FLAGS.helpfull:
      print(FLAGS.main_module_help())
      sys.exit(0)
    if rest[1:]:
      sys.exit(f"error: {rest[1]!r} is no flag; flags begin with --")
    return rest

  def start(_):
    logging.use_absl_handler()
    logging.set_verbosity(max(FLAGS.verbosity, logging.INFO))
    if FLAGS.cpu_devices:
      jax.config.update("jax_num_cpu_devices", FLAGS.cpu_devices)
    jax.config.update("jax_default_matmul_precision", FLAGS.matmul_precision)
    try:
      main()
    except (ValueError, OSError, FloatingPointError) as error:
      if FLAGS.verbosity > 0:
        raise
      sys.exit(_one_line(error))

  app.run(start, flags_parser=parse)


def _one_line(error: Exception) -> str:
  text = " ".join(str(error).split())
  kind = (
    ""
    if isinstance(error, ValueError | flags.Error)
    else (f"{type(error).__name__}: ")
  )
  return f"error: {kind}{text}"
