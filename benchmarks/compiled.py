"""Compiles the benchmarks' rounds for an accelerator, and runs them on one.

  python benchmarks/compiled.py --target=here --json=FILE [--only=NAME,...]
  python benchmarks/compiled.py --target=v5e:2x2 --json=FILE
  python benchmarks/compiled.py --target=h100.txtpb --json=FILE

XLA's compilers for TPUs and NVIDIA GPUs also run on a machine without one: they
come with `pip install -e ".[tpu]"` and `-e ".[cuda]"`. A TPU is named by its
topology; a GPU by a file with its description, a `GpuTargetConfigProto` as text
(XLA's sources have these for many cards). For each round the table gives

* the seconds that it takes to compile on this machine's CPU;
* the memory of its arguments (banks, state and plan) and of all else;
* the operations that the device runs one after another (a GPU's kernels);
* the bytes that these read and write, and the milliseconds that this takes at
  the GPU's full bandwidth: no round is faster than this, unless the data stays
  in a cache;
* on TPUs given by name, the milliseconds that the compiler expects.

With a name or a file nothing is run: these numbers say where time goes and
whether a round fits, not how long it takes; and on GPUs the tiles of products
are XLA's defaults, since only the card itself can tune them. `here` is the
device of this machine, on which the rounds are also run: the table then ends
with the milliseconds of a round that the host waits for, those of a round in a
stream that it does not wait for, and the TFLOP/s of the latter; and bandwidth
is that of a copy, measured first.
"""

import argparse
from collections.abc import Callable
import functools
import os
import pathlib
import re
import statistics
import sys
import time
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # As a script, not with -m.
  sys.path.insert(0, str(ROOT))

from benchmarks import (  # noqa: E402
  codist,
  compare,
  fedmd,
  fml,
  language,
  peers,
  programs,
  rounds,
)
import hetfl  # noqa: E402
from hetfl import engine  # noqa: E402
from hetfl.run import logs, trials  # noqa: E402

TRIALS = 64
IMAGES = peers.COHORT * peers.EXAMPLES  # Of a FedAvg round.
TPU_GHZ = {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75}


class Target(NamedTuple):
  """What to compile for.

  Attributes:
    platform: as `jax.default_backend()` would name it: `tpu` or `gpu`.
    device: one of its devices, which need not exist.
    gb_per_s: a GPU's memory bandwidth, or 0.
    ghz: a TPU's clock rate, or 0 if it is not known.
    runs: rounds to run and to time; 0 if the device is not here.
  """

  platform: str
  device: Any
  gb_per_s: float
  ghz: float
  runs: int = 0


def target_of(name: str) -> Target:
  """The target that `--target` names.

  Args:
    name: a TPU's topology, such as `v5e:2x2`, or a file that describes a GPU.

  Returns:
    The target.

  Raises:
    ValueError: there is no such file, or no compiler for the target.
  """
  # Imported here, since `import jax` does not include it.
  from jax.experimental import topologies

  path, config = pathlib.Path(name), ""
  if path.suffix:
    platform, compiler = "gpu", "cuda"
    try:
      config = path.read_text()
    except OSError as error:
      raise ValueError(f"--target={name}: {error.strerror}") from error
    options = {"topology": "1x1x1", "target_config": config}
  else:
    platform, compiler = "tpu", "tpu"
    options = {"topology_name": name}
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # It asks a cloud server.
  try:
    there = topologies.get_topology_desc(platform=compiler, **options)
  except (RuntimeError, NotImplementedError, ValueError) as error:
    raise ValueError(
      f"--target={name}: {str(error).splitlines()[0]}. If the compiler is not"
      f" installed: pip install -e '.[{compiler}]'"
    ) from error
  bandwidth = re.search(r"memory_bandwidth: (\d+)", config)
  return Target(
    platform,
    there.devices[0],
    gb_per_s=int(bandwidth.group(1)) / 1e9 if bandwidth else 0.0,
    ghz=TPU_GHZ.get(name.partition(":")[0], 0.0),
  )


def here(runs: int) -> Target:
  """The device of this machine, with the bandwidth of a copy.

  Args:
    runs: rounds to time.

  Returns:
    The target.

  Raises:
    ValueError: there is only a CPU.
  """
  if jax.default_backend() == "cpu":
    raise ValueError("--target=here: no accelerator; see benchmarks/compare.py")
  device, number = jax.devices()[0], 2**28  # 1 GiB, beyond all caches.
  copy = jax.jit(lambda a: -a, donate_argnums=0)
  a = jnp.ones(number, jnp.float32)
  a = jax.block_until_ready(copy(a))
  start = time.perf_counter()
  for _ in range(20):
    a = copy(a)
  jax.block_until_ready(a)
  seconds = (time.perf_counter() - start) / 20
  return Target(
    device.platform, device, 2 * a.nbytes / seconds / 1e9, 0.0, runs
  )


class Job(NamedTuple):
  """A program to compile, and how long its loops are.

  Attributes:
    init: `() -> state`.
    step: `(state, plan, data) -> (state, metrics)`.
    plan: the plan.
    data: the data.
    steps: iterations of loops whose length is known only at run time: the
      steps of the longest client.
    flops: FLOPs of its matrix products and convolutions.
  """

  init: Callable
  step: Callable
  plan: Any
  data: Any
  steps: int
  flops: float


def job_of(setup: rounds.Setup, flops: float, steps: int | None = None) -> Job:
  """The first round; `steps` defaults to those of its longest client."""
  init = functools.partial(setup.algorithm.init, jax.random.key(0))
  plan = setup.plan(1)
  if steps is None:
    steps = max(int(b.steps.max()) for b in plan.batches.values())
  return Job(init, setup.algorithm.step, plan, setup.data, steps, flops)


def fedavg_job(size: str, dtype: str) -> Job:
  """A FedAvg round of one pool."""
  return job_of(
    codist.fedavg_round(size, dtype=dtype), codist.fedavg_flops(size, IMAGES)
  )


def fedavg_of_both(dtype: str) -> Job:
  """A FedAvg round of both pools."""
  small, large = (
    codist.fedavg_round(size, dtype=dtype) for size in codist.CNNS
  )
  setup = small._replace(
    algorithm=hetfl.fedavg(
      [codist.pool_of(size, dtype=dtype) for size in codist.CNNS],
      rounds=1500,
      engine=small.runner,
    ),
    plan=lambda t: small.plan(t)._replace(
      batches=small.plan(t).batches | large.plan(t).batches
    ),
    data=small.data | large.data,
  )
  flops = sum(codist.fedavg_flops(size, IMAGES) for size in codist.CNNS)
  return job_of(setup, flops)


def fedavg_of_trials(size: str, dtype: str) -> Job:
  """A FedAvg round of 64 trials, as a search runs them."""
  job = fedavg_job(size, dtype)
  copies = lambda a: jnp.broadcast_to(a, (TRIALS, *a.shape))
  return job._replace(
    init=lambda: jax.tree.map(copies, job.init()),
    step=lambda states, plan, data: trials.of_each(
      lambda state: job.step(state, plan, data), states
    ),
    flops=TRIALS * job.flops,
  )


def jobs(dtype: str = "float32") -> dict[str, Callable[[], Job]]:
  """The lines of the table: what `compare.py` times, at the papers' sizes."""
  lines: dict[str, Callable[[], Job]] = {}
  for size in codist.CNNS:
    lines[f"fedavg_{size}"] = functools.partial(fedavg_job, size, dtype)
  lines["fedavg_both"] = functools.partial(fedavg_of_both, dtype)
  for size in codist.CNNS:
    lines[f"fedavg_{size}_{TRIALS}_trials"] = functools.partial(
      fedavg_of_trials, size, dtype
    )
  for name in ("periodic", "merged"):
    lines[name] = lambda name=name: job_of(
      codist.codist_round(name, dtype=dtype), codist.codist_flops()
    )
  examples = 10_000
  lines["fml_cnn1"] = lambda: job_of(
    fml.ours_round(examples, dtype=dtype),
    fml.round_flops(examples, True),
    -(-examples // fml.BATCH_SIZE),
  )
  lines["fedmd"] = lambda: job_of(
    fedmd.ours("table1", 1.0, dtype),
    fedmd.round_flops("table1", 1.0),
    -(-fedmd.PUBLIC // fedmd.BATCH),
  )
  clients = functools.cache(language.synthetic)

  def of_language(size):
    batches = language.plan_of(clients(), 1).steps.sum()
    return job_of(
      language.ours(size, clients(), 1, False, dtype),
      language.round_flops(size, float(batches)),
    )

  for size in language.SIZES:
    lines[f"language_{size}"] = functools.partial(of_language, size)
  return lines


def measure(name: str, job: Job, target: Target) -> dict[str, float | str]:
  """Compiles a round for the target, and runs it if the device is here.

  Args:
    name: the row's name.
    job: the round.
    target: what to compile for.

  Returns:
    The row's entry in the JSON.
  """
  sharding = jax.sharding.SingleDeviceSharding(target.device)

  def spec(a):
    a = a if hasattr(a, "dtype") else np.asarray(a)
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

  state, plan = jax.tree.map(spec, (jax.eval_shape(job.init), job.plan))
  bank = lambda a: jax.ShapeDtypeStruct(
    a.shape, a.dtype, sharding=engine.bank_format(a, sharding)
  )
  step = jax.jit(
    job.step,
    donate_argnums=0,
    out_shardings=sharding,
    compiler_options=engine.compiler_options() or None,
  )
  lowered = step.lower(state, plan, jax.tree.map(bank, job.data))
  start = time.perf_counter()
  compiled = lowered.compile()
  seconds = time.perf_counter() - start
  memory, work = (
    compiled.memory_analysis(),
    programs.total(compiled.as_text(), job.steps),
  )
  row = {
    "name": name,
    "compile_s": seconds,
    "arguments_mb": memory.argument_size_in_bytes / 1e6,
    "temporary_mb": memory.temp_size_in_bytes / 1e6,
    "operations": work.launches,
    "moved_gb": work.bytes / 1e9,
    "gflop": job.flops / 1e9,
  }
  if target.gb_per_s:
    row["bandwidth_ms"] = 1e3 * row["moved_gb"] / target.gb_per_s
  if work.cycles and target.ghz:
    row["expected_ms"] = work.cycles / target.ghz / 1e6
  if target.runs:
    row |= timed(compiled, job, target)
  return row


def timed(compiled: Callable, job: Job, target: Target) -> dict[str, float]:
  """Times a compiled round over many runs.

  Args:
    compiled: the round.
    job: what it was compiled from.
    target: where it runs.

  Returns:
    `round_ms`, the median of rounds that the host waits for; `stream_ms`, a
    round's time in a stream of rounds that it does not wait for, the median of
    three streams; and `tflop_per_s` of a stream.
  """
  sharding = jax.sharding.SingleDeviceSharding(target.device)
  put = lambda a: jax.device_put(a, engine.bank_format(a, sharding))
  data = jax.tree.map(put, job.data)
  state = jax.jit(job.init, out_shardings=sharding)()

  def seconds_of(number):
    nonlocal state
    start = time.perf_counter()
    for _ in range(number):
      state, _ = compiled(state, job.plan, data)
    jax.block_until_ready(state)
    return time.perf_counter() - start

  seconds_of(2)
  one = statistics.median(seconds_of(1) for _ in range(target.runs))
  stream = statistics.median(seconds_of(target.runs) for _ in range(3))
  return {
    "round_ms": 1e3 * one,
    "stream_ms": 1e3 * stream / target.runs,
    "tflop_per_s": job.flops * target.runs / stream / 1e12,
  }


def main() -> None:
  """Compiles and runs the rounds, prints a table and writes JSON."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--target", required=True, help="the accelerator")
  parser.add_argument("--json", help="file for the rows")
  parser.add_argument("--only", help="names or their beginnings, with commas")
  parser.add_argument(
    "--dtype",
    default="float32",
    choices=("float32", "bfloat16"),
    help="what the models compute in",
  )
  parser.add_argument(
    "--matmul_precision",
    choices=("float32", "tensorfloat32", "bfloat16"),
    help="of float32 products, as the commands' flag; by default JAX's, which"
    " is bfloat16 on TPUs and tensorfloat32 on GPUs",
  )
  parser.add_argument(
    "--runs",
    type=rounds.count,
    default=20,
    help="rounds to time, with --target=here",
  )
  args = parser.parse_args()
  if args.target != "here":
    # Plans and banks are made here, and no card is here to tune products.
    jax.config.update("jax_platforms", "cpu")
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()
  if args.matmul_precision:
    jax.config.update("jax_default_matmul_precision", args.matmul_precision)
  every = jobs(args.dtype)
  try:
    names = compare.chosen(args.only, every)
    target = (
      here(args.runs) if args.target == "here" else target_of(args.target)
    )
  except ValueError as error:
    sys.exit(f"error: {error}")
  origin = compare.provenance() | {
    "target": str(target.device.device_kind),
    "platform": target.platform,
    "dtype": args.dtype,
    "matmul_precision": args.matmul_precision,
    "gb_per_s": target.gb_per_s,
  }
  print(
    f"{'name':24} {'compile s':>9} {'args MB':>8} {'temp MB':>8}"
    f" {'operations':>10} {'GB':>7} {'at bandwidth':>12} {'expected':>9}"
    f" {'a round':>9} {'in stream':>10} {'TFLOP/s':>8}"
  )
  results = []
  for name in names:
    # The library asks for the backend to choose between forms.
    with mock.patch.object(jax, "default_backend", lambda: target.platform):
      row = measure(name, every[name](), target)
    results.append(row | origin)
    times = [
      f"{row[key]:.2f} ms" if key in row else "-"
      for key in ("bandwidth_ms", "expected_ms", "round_ms", "stream_ms")
    ]
    speed = f"{row['tflop_per_s']:.2f}" if target.runs else "-"
    print(
      f"{name:24} {row['compile_s']:9.1f} {row['arguments_mb']:8.1f}"
      f" {row['temporary_mb']:8.1f} {row['operations']:10.0f}"
      f" {row['moved_gb']:7.2f} {times[0]:>12} {times[1]:>9} {times[2]:>9}"
      f" {times[3]:>10} {speed:>8}",
      flush=True,
    )
    if args.json:
      logs.write_json(args.json, results)


if __name__ == "__main__":
  main()
