"""Sweeps that measure how the cost of a round grows.

  python benchmarks/scaling.py --json=FILE [--only=NAME,...] [--scale=S]

Sweeps: `clients` per round, `population` (planning alone, and a FedAvg round),
`lanes` of one program, host `devices` (each number in its own process),
`trials`, and `memory` over the rounds. Prints a table, and writes JSON and a
chart next to it.
`--scale=0.1` shortens every sweep to a tenth of its range, to try it out.
"""

import argparse
from collections.abc import Callable, Iterator
import gc
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time

import jax
from matplotlib import figure
from matplotlib.backends import backend_agg
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # As a script, not with -m.
  sys.path.insert(0, str(ROOT))

from benchmarks import codist as images  # noqa: E402
from benchmarks.rounds import count  # noqa: E402
import hetfl  # noqa: E402
from hetfl import checks, engine, population  # noqa: E402
from hetfl.plans import plan_distillation  # noqa: E402
from hetfl.run import logs  # noqa: E402
from hetfl.run import trials as trials_lib  # noqa: E402

Row = dict[str, float | str]
STACK_OVERFLOW = 342_477  # Clients of its training split.
BATCH_SIZE = 20


def many_clients(
  number: int, examples: int = 20
) -> population.ClientPopulation:
  """Clients of 1 to 1,280 images, lognormal.

  However many clients there are, they hold overlapping ranges of a bank of
  2,000 images: planning looks only at ids and sizes.

  Args:
    number: number of clients.
    examples: the number of examples of the median client.

  Returns:
    The clients.
  """
  bank = dict(images.clients_of([100] * 20).bank)
  size = checks.num_examples(bank)
  rng = np.random.default_rng(0)
  sizes = rng.lognormal(math.log(examples), 1.0, number).astype(int)
  sizes = np.clip(sizes, 1, 64 * BATCH_SIZE)
  offsets = np.concatenate([[0], np.cumsum(sizes)])
  members = (np.arange(offsets[-1]) % size).astype(np.int32)
  ids = tuple(map(str, range(number)))
  return population.ClientPopulation(bank, members, offsets, ids)


def plan_of(clients, round, per_round) -> hetfl.Plan:
  return hetfl.plan_round(
    {"small": clients},
    seed=0,
    round=round,
    clients_per_round=per_round,
    batch_size=BATCH_SIZE,
  )


def timed(run: Callable[[int], object], runs: int) -> Row:
  """Median, minimum and maximum seconds of `run(1)`, `run(2)`, ..."""
  seconds = []
  for i in range(1, runs + 1):
    start = time.perf_counter()
    jax.block_until_ready(run(i))
    seconds.append(time.perf_counter() - start)
  return {
    "seconds": statistics.median(seconds),
    "min_s": min(seconds),
    "max_s": max(seconds),
  }


def timed_rounds(
  clients, *, per_round: int, runner: engine.Engine, runs: int
) -> Row:
  """Times FedAvg rounds of the small CNN."""
  pools = [images.pool_of("small")]
  algorithm = hetfl.fedavg(pools, rounds=1500, engine=runner)
  step = runner.compile(algorithm.step)
  state = jax.jit(algorithm.init)(jax.random.key(0))
  data = {"small": jax.device_put(dict(clients.bank))}
  plans = [plan_of(clients, t, per_round) for t in range(1, runs + 1)]
  run = lambda i: step(state, plans[i - 1], data)
  timed(run, runs)  # Compiles for rows of all lengths.
  row = timed(run, runs)
  batches = statistics.mean(int(p.batches["small"].steps.sum()) for p in plans)
  return row | {"batches": batches, "s_per_batch": row["seconds"] / batches}


def powers(low: int, high: int, factor: int) -> list[int]:
  """`low`, `low * factor`, ... and `high` itself."""
  values = []
  while low < high:
    values.append(low)
    low *= factor
  return [*values, high]


def sweep_clients(scale: float, runs: int) -> Iterator[Row]:
  """FedAvg rounds of 1 to 2,000 clients; the median client has one batch."""
  runner = engine.default_engine()
  clients = many_clients(2_000, BATCH_SIZE)
  for number in powers(1, max(2, int(2_000 * scale)), 10):
    yield {"clients": number} | timed_rounds(
      clients, per_round=number, runner=runner, runs=runs
    )


def sweep_population(scale: float, runs: int) -> Iterator[Row]:
  """Populations of 100 to 342,477 clients: making, planning, training 20."""
  runner = engine.default_engine()
  for number in powers(100, max(101, int(STACK_OVERFLOW * scale)), 10):
    yield population_row(number, runner, runs)


def population_row(number: int, runner: engine.Engine, runs: int) -> Row:
  start = time.perf_counter()
  clients = many_clients(number)
  lists = np.split(clients.members, clients.offsets[1:-1])
  made = time.perf_counter()
  population.ClientPopulation.from_lists(clients.bank, lists)
  listed = time.perf_counter()
  clients.take(range(0, number, 2))
  taken = time.perf_counter()
  planned = timed(lambda t: plan_of(clients, t, 20).round, 50)
  distilling = timed(
    lambda t: plan_distillation(
      clients.examples(), seed=0, round=t, steps=32, batch_size=128
    ),
    20,
  )
  return {
    "population": number,
    "make_s": made - start,
    "from_lists_s": listed - made,
    "take_half_s": taken - listed,
    "plan_ms": 1e3 * planned["seconds"],
    "plan_max_ms": 1e3 * planned["max_s"],
    "distill_ms": 1e3 * distilling["seconds"],
  } | timed_rounds(clients, per_round=20, runner=runner, runs=runs)


def sweep_lanes(scale: float, runs: int) -> Iterator[Row]:
  """20 clients in 1 to 20 lanes of one program."""
  clients = many_clients(200, 100)
  for lanes in [n for n in (1, 2, 4, 8, 20) if n <= max(2, 20 * scale)]:
    runner = engine.Inline(at_once=lanes)
    yield {"lanes": lanes} | timed_rounds(
      clients, per_round=20, runner=runner, runs=runs
    )


def sweep_devices(scale: float, runs: int) -> Iterator[Row]:
  """Clients over 1, 2, 4 and 8 devices by `shard_map`.

  On CPUs these are host devices, and having more of them than cores brings no
  speed-up: there the sweep shows the overhead of a mesh.
  """
  accelerators = jax.default_backend() != "cpu"
  for number in [n for n in (1, 2, 4, 8) if n <= max(2, 8 * scale)]:
    if accelerators and number > jax.device_count():
      return
    command = [sys.executable, __file__, f"--child_devices={number}"]
    done = subprocess.run(
      [*command, f"--runs={runs}"], capture_output=True, text=True
    )
    if done.returncode:
      raise RuntimeError(done.stderr[-2000:])
    yield json.loads(done.stdout.splitlines()[-1])


def devices_child(number: int, runs: int) -> Row:
  """One row of the sweep over devices, in its own process."""
  if jax.config.jax_platforms in (None, "", "cpu"):
    jax.config.update("jax_num_cpu_devices", number)
  devices = jax.devices()[:number]
  mesh = jax.make_mesh((number,), (engine.AXIS,), devices=devices)
  clients = many_clients(200, 100)
  return {"devices": number} | timed_rounds(
    clients,
    per_round=20,
    runner=engine.Inline(mesh, at_once=-(-4 // number)),
    runs=runs,
  )


def sweep_trials(scale: float, runs: int) -> Iterator[Row]:
  """1 to 64 FedAvg trials at once, as `experiments/tune.py` runs them."""
  on_cpu = jax.default_backend() == "cpu"
  runner = engine.default_engine() if on_cpu else engine.Inline()
  clients = many_clients(200, 100)
  algorithm = hetfl.fedavg(
    [images.pool_of("small")], rounds=1500, engine=runner
  )

  def init(values, seed):
    return hetfl.with_hyper(algorithm.init(jax.random.key(seed)), **values)

  problem = trials_lib.Problem(
    init=init,
    step=algorithm.step,
    plan=lambda seed, round: plan_of(clients, round, 20),
    data={"small": jax.device_put(dict(clients.bank))},
    evaluate=None,
    eval_data=None,
    objective=None,
    rounds=1500,
  )
  if on_cpu:
    side = trials_lib.SideBySide(problem, at_once=2 * runner.num_threads)
  else:
    side = trials_lib.Vmapped(problem, devices=jax.devices())
  for number in powers(1, max(2, int(64 * scale)), 4):
    yield trials_row(side, number, runs)


def trials_row(side: trials_lib.Runner, number: int, runs: int) -> Row:
  states = [side.start([{"learning_rate": 0.01}] * number) for _ in range(2)]
  done = np.zeros(number, int)
  advance = lambda i: side.advance(states[i], done, runs)[0]
  jax.block_until_ready(advance(0))
  seconds = timed(advance, 1)["seconds"] / runs
  return {
    "trials": number,
    "seconds": seconds,
    "s_per_trial": seconds / number,
  }


def sweep_memory(scale: float, runs: int) -> Iterator[Row]:
  """Memory of host and device over 2,000 small MergedCodist rounds."""
  del runs
  from tests import federation

  runner = engine.default_engine()
  algorithm = hetfl.merged_codist(
    federation.make_pools(),
    hetfl.Distiller(),
    alpha=0.5,
    rounds=2_000,
    engine=runner,
  )
  step = runner.compile(algorithm.step, donate=(0,))
  data = federation.make_data()
  state = algorithm.init(jax.random.key(0))
  last = max(200, int(2_000 * scale))
  first = None
  for round in range(1, last + 1):
    state, _ = step(state, federation.make_plan(round), data)
    if round in (100, last) or round % 500 == 0:
      jax.block_until_ready(state)
      gc.collect()
      row = {"round": round, "host_mb": host_megabytes()}
      row["arrays_mb"] = sum(a.nbytes for a in jax.live_arrays()) / 2**20
      stats = jax.devices()[0].memory_stats() or {}
      row["device_mb"] = stats.get("bytes_in_use", 0) / 2**20
      first = first or row
      for name in ("host_mb", "arrays_mb", "device_mb"):
        growth = row[name] / first[name] - 1 if first[name] else 0.0
        row[name.replace("_mb", "_growth_%")] = 100 * growth
      yield row


def host_megabytes() -> float:
  """Resident memory of this process; NaN where there is no /proc."""
  try:
    with open("/proc/self/statm", encoding="ascii") as f:
      pages = int(f.read().split()[1])
  except OSError:
    return math.nan
  return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


# Name -> sweep, and its chart's x, y and y label.
SWEEPS = {
  "clients": (sweep_clients, "clients", "seconds", "Seconds a round"),
  "population": (sweep_population, "population", "plan_ms", "Planning (ms)"),
  "lanes": (sweep_lanes, "lanes", "seconds", "Seconds a round"),
  "devices": (sweep_devices, "devices", "seconds", "Seconds a round"),
  "trials": (sweep_trials, "trials", "s_per_trial", "Seconds a trial's round"),
  "memory": (sweep_memory, "round", "host_mb", "Resident memory (MB)"),
}


def chart(results: dict[str, list[Row]], path: pathlib.Path) -> None:
  """Draws one panel per sweep, to a PNG."""
  columns = min(3, len(results))
  lines = -(-len(results) // columns)
  fig = figure.Figure(
    figsize=(4.2 * columns, 3.4 * lines), layout="constrained", dpi=120
  )
  backend_agg.FigureCanvasAgg(fig)
  axes = fig.subplots(lines, columns, squeeze=False).ravel()
  for ax in axes[len(results) :]:
    ax.set_visible(False)
  for ax, (name, rows) in zip(axes, results.items()):
    _, x, y, label = SWEEPS[name]
    for group in dict.fromkeys(row.get("engine", "") for row in rows):
      points = [(r[x], r[y]) for r in rows if r.get("engine", "") == group]
      ax.plot(*zip(*points), marker="o", markersize=3.5, label=group)
    if name != "memory":
      ax.set_xscale("log", base=2 if name in ("lanes", "devices") else 10)
    heights = [row[y] for row in rows]
    if max(heights) > 10 * min(heights):
      ax.set_yscale("log")
    else:  # From zero, so that small changes look small.
      ax.set_ylim(0, 1.15 * max(heights))
    if ax.get_legend_handles_labels()[1]:
      ax.legend(fontsize=8.5, frameon=False)
    ax.set_xlabel(x.capitalize())
    ax.set_ylabel(label)
    ax.set_title(name, fontsize=11)
    ax.grid(True, color="0.9", linewidth=0.8)
    ax.spines[["top", "right"]].set_visible(False)
  fig.savefig(path)


def main() -> None:
  """Runs the sweeps, prints their tables, writes JSON and a chart."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--json", help="file for the rows; a .png beside it")
  parser.add_argument("--only", help="sweeps, with commas")
  parser.add_argument("--runs", type=count, default=5, help="rounds of each")
  parser.add_argument(
    "--scale", type=float, default=1.0, help="factor on the sweeps' ranges"
  )
  parser.add_argument("--child_devices", type=count, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.child_devices:
    print(json.dumps(devices_child(args.child_devices, args.runs)))
    return
  names = args.only.split(",") if args.only else list(SWEEPS)
  for name in names:
    if name not in SWEEPS:
      sys.exit(f"error: --only={name}: choose from {', '.join(SWEEPS)}")
  results = {}
  for name in names:
    sweep = SWEEPS[name][0]
    print(f"\n{name}: {sweep.__doc__.splitlines()[0]}", flush=True)
    results[name] = []
    for row in sweep(args.scale, args.runs):
      if not results[name]:
        print("  ".join(f"{key:>12}" for key in row))
      results[name].append(row)
      cells = (f"{v:.4g}" if isinstance(v, float) else v for v in row.values())
      print("  ".join(f"{cell:>12}" for cell in cells), flush=True)
    if args.json:
      logs.write_json(args.json, results)
      chart(results, pathlib.Path(args.json).with_suffix(".png"))


if __name__ == "__main__":
  main()
