"""The flags of every experiment, and what kind of flag each is."""

import os

from absl import flags

# Flags that change the speed of a run but not its result. FedMD's phases are
# the same whether they are retrained or taken from another run (pretrained).
SPEED_FLAGS = (
  "autotune",
  "bank",
  "cpu_devices",
  "checkpoint_every",
  "conv",
  "engine",
  "eval_batch_size",
  "lanes",
  "microbatch",
  "pretrained",
  "rounds_per_dispatch",
  "stop_on_nonfinite",
  "tensorboard",
  "threads",
)
# Flags for paths, the processes and the number of runs.
PLACE_FLAGS = (
  "c4_path",
  "compilation_cache",
  "data_dir",
  "distributed_coordinator",
  "distributed_process_id",
  "distributed_processes",
  "download",
  "npz",
  "public_npz",
  "seeds",
  "workdir",
)
MAX_SEED = 2**32 - 1  # JAX keys use the lowest 32 bits of a seed.


def define_run_flags() -> None:
  """Defines the flags that every experiment has."""
  flags.DEFINE_string(
    "data_dir",
    os.environ.get("HETFL_DATA_DIR") or None,
    "Folder with the official files of the data sets; by default the"
    " environment variable HETFL_DATA_DIR.",
  )
  flags.DEFINE_bool(
    "download",
    False,
    "Download CIFAR-10, CIFAR-100 or MNIST into --data_dir if it is missing;"
    " other data sets are never downloaded.",
  )
  flags.DEFINE_string(
    "workdir",
    None,
    "Folder of the run; repeating the command resumes where it stopped. By"
    " default runs/EXPERIMENT-DATASET-..., which ends in the names of the flag"
    " files.",
  )
  flags.DEFINE_integer(
    "rounds",
    None,
    "Number of rounds. A finished run of fml (with constant --alpha and --beta)"
    " or of fedmd can be extended if its number of rounds is a multiple of"
    " --eval_every.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "seed",
    0,
    "Seeds the initial models, the sampling of clients, batches, augmentation"
    " and --distill_examples (but for Stack Overflow and C4); not which client"
    " has which data (--partition_seed).",
    lower_bound=0,
    upper_bound=MAX_SEED,
  )
  flags.DEFINE_integer(
    "partition_seed",
    0,
    "Seeds the assignment of data to clients.",
    lower_bound=0,
  )
  flags.DEFINE_list(
    "seeds",
    None,
    "Comma-separated seeds of several otherwise identical runs, each in a"
    " folder seedN of --workdir; the table has means and standard deviations."
    " To add seeds later, list all of them: finished runs are not repeated."
    " Which client has which data does not change. In a search each trial is"
    " trained with all of these seeds, and its objective is the mean; --seed"
    " then seeds the search.",
  )
  flags.DEFINE_integer(
    "eval_every",
    None,
    "Rounds from one evaluation to the next.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "checkpoint_every",
    None,
    "Rounds from one checkpoint to the next; a resumed run repeats at most that"
    " many. By default --eval_every for codist (40 for its digits), 10 for fml,"
    " and 1 for fedmd (10 for its digits and on accelerators, where a round"
    " takes less time than a checkpoint).",
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
    "Where the work runs: as programs on CPU threads (threads), as one program"
    " on one device (inline) or as one over all devices (mesh); auto: threads"
    " on the CPU of a single process, else all devices. Changes speed only,"
    " except for what --dropout drops on several devices.",
  )
  flags.DEFINE_integer(
    "threads",
    None,
    "Number of CPU threads of --engine=threads; by default one per core.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "lanes",
    None,
    "Number of lanes that a round's clients are packed into, on all devices"
    " together; by default one per client or, for codist, the fewest that"
    " hardly lengthen a round. Has no effect with --engine=threads, where each"
    " thread trains one client at a time. Not for FedMD. Changes speed only.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "cpu_devices",
    None,
    "Split the CPU into this many devices, to try out --engine=mesh.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "eval_batch_size",
    None,
    "Batch size of evaluations; by default 40 on CPUs (fml 50), elsewhere 1,000"
    " (fml 2,000, language models 400). Changes speed only.",
    lower_bound=1,
  )
  flags.DEFINE_enum(
    "conv",
    None,
    ["patches", "winograd", "native"],
    "Form of the convolutions: matrix products of patches; winograd (3x3 layers"
    " of 16 channels and more, in float32; others as patches); or native, XLA's"
    " own. By default winograd on CPUs (patches for digits and FedMD), native"
    " on TPUs, and on GPUs native for FedMD, else patches. Changes speed only.",
  )
  flags.DEFINE_integer(
    "microbatch",
    None,
    "Number of examples that pass through a model at once: distillation"
    " examples through a student, an FML client's batch through its two models;"
    " 0: all. By default 16 for images on CPUs, else 0; 0 for models of your"
    " own. Not for FedMD. Changes speed only, unless --dropout is set or a"
    " model of your own has dropout or batch statistics.",
    lower_bound=0,
  )
  flags.DEFINE_integer(
    "rounds_per_dispatch",
    None,
    "Number of rounds that run as one program, between evaluations and"
    " checkpoints; by default 1. Not for --engine=threads (the default on"
    " CPUs), --bank=round, FedMD or searches. Changes speed only.",
    lower_bound=1,
  )
  flags.DEFINE_bool(
    "autotune",
    False,
    "codist only, in one process and not in a search: before the first round,"
    " measure which lanes, form of convolution, rounds per dispatch and, if"
    " pools exchange at least every tenth round, microbatch are fastest on this"
    " machine. The choice is kept in the user's cache folder and, for resuming,"
    " in the run's folder; flags that are set keep their values. Changes speed"
    " only.",
  )
  flags.DEFINE_string(
    "distributed_coordinator",
    None,
    "HOST:PORT of the first of several processes, each with its own devices,"
    " which train as one over all devices. All flags except"
    " --distributed_process_id must be the same in all processes. Only the"
    " first process writes files. Use 'auto' where JAX finds the processes"
    " itself: on TPU pods, and under SLURM (srun python experiments/...) and"
    " Open MPI.",
  )
  flags.DEFINE_integer(
    "distributed_processes",
    None,
    "Number of processes; on SLURM $SLURM_NTASKS. Not with"
    " --distributed_coordinator=auto.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "distributed_process_id",
    None,
    "Index of this process, from 0; on SLURM $SLURM_PROCID. Not with"
    " --distributed_coordinator=auto.",
    lower_bound=0,
  )
  flags.DEFINE_string(
    "compilation_cache",
    None,
    "Folder for compiled programs, so that later runs start sooner; 'none'"
    " turns this off. By default the environment variable"
    " JAX_COMPILATION_CACHE_DIR, or else a folder in the user's cache folder.",
  )
  flags.DEFINE_enum(
    "matmul_precision",
    "float32",
    ["float32", "tensorfloat32", "bfloat16"],
    "Precision of float32 matrix products on accelerators; CPUs use float32.",
  )
  flags.DEFINE_enum(
    "dtype",
    "float32",
    ["float32", "bfloat16"],
    "Type of the factors of models' products and of what lies between layers."
    " Parameters, logits, losses and optimizers are float32 in any case. With"
    " bfloat16 GPUs have less to read and write, and multiply at their full"
    " speed; CPUs are slower. Not for models of your own.",
  )


def define_npz_flag(of: str = "dataset") -> None:
  """Defines the flag of one's own images.

  Args:
    of: the flag that names the data set.
  """
  flags.DEFINE_string(
    "npz",
    None,
    f"For --{of}=npz: a NumPy file of your own images, with the arrays"
    " x_train and x_test (uint8[N, H, W] or [N, H, W, C]), y_train and y_test"
    " (whole numbers from 0) and, if the images have clients, their ids"
    " clients_train ([N]). A resumed run needs it again, like --data_dir.",
  )
