"""Times rounds of hetfl against FedJAX, PyTorch and itself, side by side.

  python benchmarks/compare.py --json=FILE [--only=NAME,...] [--runs=N]

In one process; ours and the peer take turns, so that a machine whose speed
drifts slows both. The table gives medians; `ratio` is the median of the
ratios peer / ours turn by turn: above one, ours is faster. `ceiling_share` is
how much of the speed of large matrix products, measured beside, the matrix
products of our round come to.
"""

import argparse
from collections.abc import Callable
import functools
import json
import math
import os
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # As a script, not with -m.
  sys.path.insert(0, str(ROOT))

from benchmarks import peers  # noqa: E402
from hetfl import augment, codist, core, distill, engine, population  # noqa: E402
from hetfl.fedavg import fedavg, Pool  # noqa: E402
from hetfl.models import vision  # noqa: E402

CNNS = {"small": vision.small_cnn, "large": vision.large_cnn}
Round = Callable[[], None]


def scale(key, batch):
  """Pixels to [0, 1], as the peers do it."""
  del key
  return {**batch, "x": batch["x"].astype(jnp.float32) / 255}


def clients_of(sizes) -> population.ClientPopulation:
  """Clients with so many of the peers' synthetic images."""
  clients = peers.synthetic()
  bank = {
    name: np.concatenate([np.asarray(client[name]) for client in clients])
    for name in ("x", "y")
  }
  bank["y"] = bank["y"].astype(np.int32)
  draw = np.random.default_rng(0)
  return population.ClientPopulation.from_lists(
    bank, [draw.integers(0, len(bank["y"]), n) for n in sizes]
  )


def pool_of(size: str, conv: str = "patches") -> Pool:
  """The peers' model and rates."""
  example = jnp.zeros((1, peers.SIDE, peers.SIDE, 3))
  module = CNNS[size](peers.NUM_CLASSES, conv=conv)
  return Pool(
    name=size,
    model=core.Model.from_flax(module, example),
    client_lr=peers.CLIENT_LR,
    server_lr=peers.SERVER_LR,
    transform=scale,
  )


def looped(algorithm, runner, plan, data) -> Round:
  """A callable that runs the next round and blocks till it is done."""
  state = jax.jit(algorithm.init)(jax.random.key(0))
  step = runner.compile(algorithm.step, donate=(0,))
  round = 0

  def run():
    nonlocal state, round
    round += 1
    state, _ = step(state, plan(round), data)
    jax.block_until_ready(state)

  run(), run()
  return run


def fedavg_round(size: str, sizes=None, runner=None, conv="patches") -> Round:
  """A FedAvg round of 20 clients, by default of 60 with 100 images each."""
  runner = runner or engine.default_engine()
  clients = clients_of(sizes or [peers.EXAMPLES] * peers.NUM_CLIENTS)
  bank = jax.device_put(dict(clients.bank))

  def plan(round):
    lanes = population.plan_clients(
      clients,
      seed=0,
      round=round,
      clients_per_round=peers.COHORT,
      batch_size=peers.BATCH_SIZE,
      num_lanes=runner.num_lanes(peers.COHORT),
    )
    return population.RoundPlan(np.int32(round), (lanes,), None)

  algorithm = fedavg([pool_of(size, conv)], rounds=1500, engine=runner)
  return looped(algorithm, runner, plan, {"pools": (bank,)})


def merged_round(conv: str, runner, num_lanes: int, microbatch) -> Round:
  """A MergedCodist round of both CNNs: 32 steps of 128 images."""
  clients = clients_of([peers.EXAMPLES] * peers.NUM_CLIENTS)
  bank = jax.device_put(dict(clients.bank))

  def plan(round):
    lanes = tuple(
      population.plan_clients(
        clients,
        seed=0,
        round=round,
        pool=pool,
        clients_per_round=peers.COHORT,
        batch_size=peers.BATCH_SIZE,
        num_lanes=num_lanes,
      )
      for pool in range(2)
    )
    batches = population.plan_distillation(
      clients.examples(), seed=0, round=round, steps=32, batch_size=128
    )
    return population.RoundPlan(np.int32(round), lanes, batches)

  distiller = distill.Distiller(
    transform=augment.RECIPES["crop24"].distill,
    mixup_beta=2,
    microbatch=microbatch,
  )
  algorithm = codist.merged_codist(
    [pool_of(size, conv) for size in CNNS],
    distiller,
    alpha=0.5,
    rounds=1500,
    engine=runner,
  )
  return looped(
    algorithm, runner, plan, {"pools": (bank, bank), "distill": bank}
  )


def product_flops(jaxpr) -> float:
  """FLOPs of the matrix products of a traced function without loops."""
  total = 0.0
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      (contracted, _), _ = equation.params["dimension_numbers"]
      left = equation.invars[0].aval.shape
      depth = math.prod(left[axis] for axis in contracted)
      total += 2.0 * depth * math.prod(equation.outvars[0].aval.shape)
    for value in equation.params.values():
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        total += product_flops(inner)
  return total


@functools.cache
def image_flops(size: str, train: bool) -> float:
  """FLOPs of the matrix products of one image, trained on or predicted."""
  model = pool_of(size).model
  params = model.init(jax.random.key(0)).params
  batch = peers.BATCH_SIZE
  x = jnp.zeros((batch, peers.SIDE, peers.SIDE, 3))

  def loss(params):
    return model.apply(core.Variables(params, {}), x, None, True)[0].sum()

  fn = jax.grad(loss) if train else loss
  return product_flops(jax.make_jaxpr(fn)(params).jaxpr) / batch


def round_flops(name: str) -> float:
  """FLOPs of the matrix products of our round of a benchmark."""
  if name.startswith("merged"):
    images, distilled = peers.COHORT * peers.EXAMPLES, 32 * 128
    return sum(
      (images + distilled) * image_flops(size, True)
      + distilled * image_flops(size, False)
      for size in CNNS
    )
  sizes = [peers.EXAMPLES] * peers.COHORT
  if name.endswith("ragged"):
    sizes = ragged_sizes()[0]
  return sum(sizes) * image_flops(name.split("_")[1], True)


def ceiling(side: int = 1024, products: int = 8) -> Round:
  """A callable that multiplies large matrices on all cores or the device."""

  def multiply(a):
    return jax.lax.fori_loop(0, products, lambda _, b: a @ b, a)

  runner = engine.default_engine()
  number = getattr(runner, "num_threads", 1)
  if number == 1:
    multiply = jax.jit(multiply)
  # Orthogonal, so that powers neither grow nor vanish.
  q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(side, side)))
  jobs = [engine.Call(multiply, (jnp.asarray(q, jnp.float32),))] * number
  run = lambda: jax.block_until_ready(runner.run(*jobs))
  run()
  run.flops = 2.0 * side**3 * products * number
  return run


def ragged_sizes() -> tuple[list[int], list[int]]:
  """20 clients of 1 to 64 batches, lognormal, and as many of equal size."""
  draw = np.random.default_rng(1).lognormal(2.0, 1.0, peers.COHORT)
  steps = np.clip(np.round(draw), 1, 64).astype(int)
  equal = np.full(peers.COHORT, steps.sum() // peers.COHORT)
  equal[: steps.sum() - equal.sum()] += 1
  return list(steps * peers.BATCH_SIZE), list(equal * peers.BATCH_SIZE)


def benchmarks() -> dict[str, tuple[Callable, str, Callable]]:
  """Name -> (ours, the peer's name, the peer), all to be called for a round."""
  rows = {}
  for size, (filters, dense, _) in peers.SIZES.items():
    ours = functools.partial(fedavg_round, size)
    for backend in ("jit", "pmap"):
      rows[f"fedavg_{size}_fedjax_{backend}"] = (
        ours,
        f"FedJAX 0.0.17, {backend}",
        functools.partial(peers.fedjax_round, backend, filters, dense),
      )
    for channels_last in (False, True):
      layout = "channels_last" if channels_last else "default"
      rows[f"fedavg_{size}_torch_{layout}"] = (
        ours,
        f"PyTorch loop, {layout.replace('_', ' ')}",
        functools.partial(
          peers.torch_round, filters, dense, channels_last=channels_last
        ),
      )
  ragged, equal = ragged_sizes()
  rows["fedavg_large_ragged"] = (
    functools.partial(fedavg_round, "large", ragged),
    "the same batches in equal clients",
    functools.partial(fedavg_round, "large", equal),
  )
  rows["merged_native"] = (
    lambda: merged_round("patches", engine.Threads(), 4, 16),
    "vmap over 20 clients and nn.Conv's form, one program",
    lambda: merged_round("native", engine.Inline(), 20, None),
  )
  return rows


def take_turns(
  ours: Round, peer: Round, runs: int, products: Round | None = None
) -> dict[str, float]:
  """Seconds of a round of both, and of products if there are any, in turn."""
  turns = (ours, peer, products) if products else (ours, peer)
  seconds = []
  for _ in range(runs):
    pair = []
    for run in turns:
      start = time.perf_counter()
      run()
      pair.append(time.perf_counter() - start)
    seconds.append(pair)
  a, b, *c = zip(*seconds)
  row = {
    "ours_s": statistics.median(a),
    "ours_min_s": min(a),
    "ours_max_s": max(a),
    "peer_s": statistics.median(b),
    "peer_min_s": min(b),
    "peer_max_s": max(b),
    "ratio": statistics.median(y / x for x, y in zip(a, b)),
  }
  if products:
    row["ceiling_gflop_s"] = products.flops / statistics.median(c[0]) / 1e9
  return row


def main() -> None:
  """Runs the benchmarks, prints a table and writes JSON."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--json", help="file for the rows")
  parser.add_argument("--only", help="names, with commas")
  parser.add_argument("--runs", type=int, default=7, help="rounds of each")
  args = parser.parse_args()
  # For FedJAX's pmap; ours uses the first device only.
  if jax.config.jax_platforms in (None, "", "cpu"):
    jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
  every = benchmarks()
  names = args.only.split(",") if args.only else list(every)
  for name in names:
    if name not in every:
      sys.exit(f"error: --only={name}: choose from {', '.join(every)}")
  rows = []
  products = ceiling()
  print(
    f"{'name':34} {'ours s':>8} {'peer s':>8} {'ratio':>6} {'ceiling':>8}  peer"
  )
  for name in names:
    ours, label, peer = every[name]
    row = {"name": name, "peer": label}
    row |= take_turns(ours(), peer(), args.runs, products)
    speed = round_flops(name) / row["ours_s"] / 1e9
    row["ceiling_share"] = speed / row["ceiling_gflop_s"]
    rows.append(row)
    print(
      f"{name:34} {row['ours_s']:8.3f} {row['peer_s']:8.3f}"
      f" {row['ratio']:6.2f} {100 * row['ceiling_share']:6.1f} %  {label}",
      flush=True,
    )
    if args.json:
      with open(args.json, "w", encoding="utf-8") as f:
        json.dump(rows, f, indent=2)


if __name__ == "__main__":
  main()
