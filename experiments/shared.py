"""The settings that all commands have."""

from collections.abc import Mapping
import dataclasses
import os
from typing import Any, Literal, Self

from settings import count, setting, Settings, Words

Images = Literal["digits", "mnist", "cifar10", "cifar100", "npz"]
MAX_SEED = 2**32 - 1  # JAX keys use the lowest 32 bits of a seed.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Settings):
  """Any run.

  Attributes:
    data_dir: Folder with the official files of the data sets; by default the
      environment variable HETFL_DATA_DIR.
    download: Download CIFAR-10, CIFAR-100 or MNIST into --data_dir if it is
      missing; other data sets are never downloaded.
    npz: A NumPy file of your own images, for the data set npz, with the arrays
      x_train and x_test (uint8[N, H, W] or [N, H, W, C]), y_train and y_test
      (whole numbers from 0) and, if the images have clients, their ids
      clients_train ([N]). A resumed run needs it again, like --data_dir.
    workdir: Folder of the run; repeating the command resumes where it stopped.
      By default runs/COMMAND-DATASET-..., which ends in the names of the flag
      files.
    rounds: Number of rounds. A finished run of fml (with constant --alpha and
      --beta), fedmd or compare can be extended if its number of rounds is a
      multiple of --eval_every.
    seed: Seeds the initial models, the sampling of clients, batches,
      augmentation and --distill_examples (except for Stack Overflow and C4);
      not which client has which data (--partition_seed).
    partition_seed: Seeds the assignment of data to clients.
    seeds: Seeds of several otherwise identical runs, each in a folder seedN of
      --workdir; the table has means and standard deviations. To add seeds
      later, list all of them; finished runs are not repeated. Which client has
      which data does not change. In a search each trial is trained with all of
      these seeds, and its objective is the mean; --seed then seeds the search.
    eval_every: Rounds from one evaluation to the next.
    checkpoint_every: Rounds from one checkpoint to the next; a resumed run
      repeats at most that many.
    tensorboard: Write TensorBoard scalars.
    stop_on_nonfinite: End a run whose loss is not finite. Otherwise it goes on,
      and methods that share predictions ignore diverged models'.
    engine: Where the work runs: as programs on CPU threads (threads), as one
      program on one device (inline) or as one over all devices (mesh). auto
      takes threads on the CPU of a single process, else all devices. Changes
      speed only, except for what --dropout drops on several devices.
    threads: Number of CPU threads; by default one per core.
    cpu_devices: Split the CPU into this many devices, to try out --engine=mesh.
    eval_batch_size: Batch size of evaluations; by default 40 on CPUs and 1,000
      elsewhere. Changes speed only.
    conv: Form of the convolutions: matrix products of patches; winograd (3x3
      and 5x5 layers of 16 channels and more, in float32; others as patches); or
      native, XLA's own. By default winograd on CPUs (patches for images of less
      than 16 pixels a side and FedMD), native on TPUs, and on GPUs native for
      FedMD, else patches. Changes speed only.
    matmul_precision: Precision of float32 matrix products on accelerators; CPUs
      use float32.
    dtype: Type of models' activations and of the operands of their products.
      Parameters, logits, losses and optimizers are float32 in any case. With
      bfloat16 GPUs have less to read and write, and multiply at their full
      speed; CPUs are slower. Not for models of your own.
    distributed_coordinator: HOST:PORT of the first of several processes, each
      with its own devices, which train as one over all devices. All flags
      except --distributed_process_id must be the same in all processes. Only
      the first process writes files. Use auto where JAX finds the processes
      itself, which it does on TPU pods, and under SLURM (srun python
      experiments/...) and Open MPI.
    distributed_processes: Number of processes; on SLURM $SLURM_NTASKS. Not with
      --distributed_coordinator=auto.
    distributed_process_id: Index of this process, from 0; on SLURM
      $SLURM_PROCID. Not with --distributed_coordinator=auto.
    compilation_cache: Folder for compiled programs, so that later runs start
      sooner; none turns this off. By default the environment variable
      JAX_COMPILATION_CACHE_DIR, or else a folder in the user's cache folder.
    verbosity: With 1, errors have a traceback.
  """

  data_dir: str | None = setting(kind="place")
  download: bool = setting(False, kind="place")
  npz: str | None = setting(kind="place")
  workdir: str | None = setting(kind="place")
  rounds: int = count()
  seed: int = setting(0, low=0, high=MAX_SEED)
  partition_seed: int = setting(0, low=0)
  seeds: tuple[int, ...] | None = setting(
    kind="place", low=0, high=MAX_SEED, distinct=True
  )
  eval_every: int = count()
  checkpoint_every: int | None = count(kind="speed")
  tensorboard: bool = setting(True, kind="machine")
  stop_on_nonfinite: bool = setting(False, kind="machine")
  engine: Literal["auto", "threads", "inline", "mesh"] = setting(
    "auto", kind="machine"
  )
  threads: int | None = count(kind="machine", only="threads", high=1024)
  cpu_devices: int | None = count(kind="machine", high=1024)
  eval_batch_size: int | None = count(kind="speed")
  conv: Literal["patches", "winograd", "native"] | None = setting(
    kind="speed", only="images, hetfl_models"
  )
  matmul_precision: Literal["float32", "tensorfloat32", "bfloat16"] = setting(
    "float32"
  )
  dtype: Literal["float32", "bfloat16"] = setting(
    "float32", only="hetfl_models"
  )
  distributed_coordinator: str | None = setting(kind="place")
  distributed_processes: int | None = count(kind="place")
  distributed_process_id: int | None = setting(kind="place", low=0)
  compilation_cache: str | None = setting(kind="place")
  verbosity: int = setting(0, kind="place")

  @classmethod
  def resolve(cls, given: Mapping[str, Any], words: Words) -> Self:
    """The settings of a run; `data_dir` may be in the environment."""
    data_dir = os.environ.get("HETFL_DATA_DIR") or None
    return super().resolve({"data_dir": data_dir, **given}, words)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds(Run):
  """A run whose rounds are short.

  Attributes:
    lanes: How many clients train side by side, on all devices together; by
      default all of a round or, for codist, the fewest that hardly lengthen it,
      and on a CPU one for each device. Changes speed only.
    microbatch: Number of examples that pass through a model at once
      (distillation examples through a student, an FML client's batch through
      its two models); 0 for all. Changes speed only, unless --dropout is set or
      a model of your own has dropout or batch statistics.
    rounds_per_dispatch: Number of rounds that run as one program, between
      evaluations and checkpoints. Changes speed only.
  """

  lanes: int | None = count(kind="speed", only="inline mesh")
  rounds_per_dispatch: int = count(1, kind="speed", only="inline mesh, device")
