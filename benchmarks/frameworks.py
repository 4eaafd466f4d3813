"""FedAvg in hetfl, pfl-research and Flower, on the same work.

  python -m benchmarks.frameworks --pfl_python=PFL/bin/python
    --flower_python=FLOWER/bin/python --data_dir=DIR --json=FILE

The work is pfl-research's CIFAR-10 benchmark: 1,000 users of 50 images, drawn
i.i.d.; 50 users an iteration, one epoch in batches of 10 at a client rate of
.1; the server takes the mean; `simple_cnn`, with 1,626,442 parameters and
dropout. All systems have the same images, users, cohorts, batches and initial
weights, but each draws its own dropout.

Each peer has its own environment, which does not need hetfl:

  cpu=--extra-index-url=https://download.pytorch.org/whl/cpu
  python3.11 -m venv PFL
  PFL/bin/pip install $cpu torch pfl
  python3.11 -m venv FLOWER
  FLOWER/bin/pip install $cpu torch 'flwr[simulation]'

Each system runs in its own processes on the same cores, in turns of a few
iterations, so that drifts in the machine's speed affect all. The first turn, in
which ours is compiled, does not count. `ratio` is the median over the turns of
peer / ours: above one, ours is faster. Our `Evaluator` tests all final weights.
`apart` is the distance of a peer's final weights from ours, as a share of the
distance that ours have moved. With `--no-dropout --learning_rate=.001` all do
the same up to rounding, which ReLU and pooling soon magnify at higher rates.

pfl-research runs as in its own benchmark, once with its threads in one process
and once with its users divided between one process per core; Flower as in its
guide, with one client on each core. Neither evaluates. Flower has a virtual
node for each place in the cohort, not for each user, which spares it sampling.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import frameworks_peers
from benchmarks.compare import provenance, ROOT
from benchmarks.rounds import count
import hetfl
from hetfl import core
from hetfl.data import vision as data
from hetfl.models import vision
from hetfl.run import logs

NUM_CLASSES = 10
USER_EXAMPLES, BATCH_SIZE = 50, 10
DROPOUT = (0.25, 0.5)  # Of the pooled maps and of the logits' inputs.
# PyTorch's weights, in the order in which they are drawn.
SHAPES = (32, 3, 3, 3), (64, 32, 3, 3), (128, 14 * 14 * 64), (NUM_CLASSES, 128)


def simple_cnn(dropout: tuple[float, float], conv: str | None) -> core.Model:
  """pfl-research's model, for images `float32[B, 32, 32, 3]`."""
  module = vision.CNN(
    *((32, 64), 3, (128,), NUM_CLASSES),
    padding="VALID",
    pool_after=(1,),
    kernel_init=nn.initializers.xavier_uniform(),
    conv=conv,
    map_dropout=dropout[0],
    logits_dropout=dropout[1],
  )
  return core.Model.from_flax(module, jnp.zeros((1, 32, 32, 3)))


def first_weights(seed: int) -> list[np.ndarray]:
  """For each PyTorch layer a Glorot-uniform weight and its usual bias."""
  rng, weights = np.random.default_rng(seed), []
  for shape in SHAPES:
    inputs, outputs = math.prod(shape[1:]), shape[0] * math.prod(shape[2:])
    for limit, of in (6 / (inputs + outputs), shape), (1 / inputs, shape[:1]):
      draw = rng.uniform(-(limit**0.5), limit**0.5, of)
      weights.append(draw.astype(np.float32))
  return weights


def converted(weights: list[np.ndarray]) -> dict[str, Any]:
  """PyTorch's weights, each layer's weight and bias, as our parameters."""
  params, names = {}, ("Conv_0", "Conv_1", "Dense_0", "Dense_1")
  for name, kernel, bias in zip(names, weights[::2], weights[1::2]):
    if name == "Dense_0":  # Inputs [c, H, W] there, [H, W, c] here.
      planes = kernel.reshape(128, 64, 14, 14)
      kernel = planes.transpose(0, 2, 3, 1).reshape(kernel.shape)
    kernel = kernel.T if kernel.ndim == 2 else kernel.transpose(2, 3, 1, 0)
    params[name] = {"bias": bias, "kernel": kernel}
  return params


def read(folder: pathlib.Path, name: str) -> core.Variables:
  """The initial weights, or a system's final ones, as our model's."""
  with np.load(folder / f"{name}.npz") as found:
    weights = [jnp.asarray(found[key]) for key in found]
  if name != "ours":
    return core.Variables(converted(weights), {})
  first = read(folder, "initial")  # In our order already.
  return jax.tree.unflatten(jax.tree.structure(first), weights)


def images(data_dir: str | None) -> tuple[core.Batch, core.Batch]:
  """Training and test images, of mean 0 and deviation 1 in each channel."""
  cifar = data.load("cifar10", data_dir)
  x = cifar.train["x"]
  mean, std = (
    f(x, axis=(0, 1, 2), dtype=np.float64) for f in (np.mean, np.std)
  )
  return tuple(
    {"x": ((bank["x"] - mean) / std).astype(np.float32), "y": bank["y"]}
    for bank in (cifar.train, cifar.test)
  )


def users(bank: core.Batch) -> hetfl.ClientPopulation:
  """The images divided at random."""
  order = np.random.default_rng(0).permutation(len(bank["y"]))
  return hetfl.ClientPopulation.from_lists(
    bank, order.reshape(-1, USER_EXAMPLES)
  )


def planned(
  clients: hetfl.ClientPopulation, cohort: int, round: int
) -> hetfl.Plan:
  """A round, counted from 1, with this many users."""
  return hetfl.plan_round(
    {"cifar10": clients},
    seed=0,
    round=round,
    clients_per_round=cohort,
    batch_size=BATCH_SIZE,
  )


def write(folder: pathlib.Path, bank: core.Batch, settings: dict) -> None:
  """Writes the work as all systems read it; see `frameworks_peers`."""
  clients, cohort = users(bank), settings["cohort"]
  orders = [
    planned(clients, cohort, round).batches["cifar10"].index
    for round in range(1, settings["rounds"] + 1)
  ]
  np.save(folder / "x.npy", bank["x"])
  np.save(folder / "y.npy", bank["y"].astype(np.int64))
  orders = np.reshape(orders, (len(orders), cohort, -1))
  np.save(folder / "orders.npy", orders[..., :USER_EXAMPLES])  # None is -1.
  np.savez(folder / "initial.npz", *first_weights(0))
  logs.write_json(folder / "settings.json", settings)


def run_ours(folder: pathlib.Path) -> None:
  """Our side, in its own process."""
  settings = json.loads((folder / "settings.json").read_text())
  turns = frameworks_peers.Turns(settings["turn"], "jax", "flax", "numpy")
  bank = {name: np.load(folder / f"{name}.npy") for name in ("x", "y")}
  bank["y"] = bank["y"].astype(np.int32)
  clients = users(bank)
  pool = hetfl.Pool(
    simple_cnn(settings["dropout"], settings["conv"]),
    "cifar10",
    learning_rate=settings["learning_rate"],
    server_lr=1.0,
    server_optimizer=optax.sgd,
  )
  algorithm = hetfl.fedavg([pool], rounds=None, engine=hetfl.Threads())
  state = algorithm.init(jax.random.key(0), [read(folder, "initial")])
  (banked,) = hetfl.put_banks(clients)
  turns.next()
  for round in range(1, settings["rounds"] + 1):
    plan = planned(clients, settings["cohort"], round)
    state, _ = algorithm.step(state, plan, {"cifar10": banked})
    jax.block_until_ready(state)
    turns.next()
  np.savez(folder / "ours.npz", *jax.tree.leaves(state.server[0].params))


class System:
  """A system's processes, which run a turn when told to.

  Args:
    name: the system's name.
    command: the command that runs it.
    folder: where its other output goes.
  """

  def __init__(self, name: str, command: list, folder: pathlib.Path):
    self.name, self.turns, self.versions = name, [], {}
    self._log = folder / f"{name}.log"
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    with self._log.open("w") as log:
      self._process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        cwd=ROOT,
        env=os.environ | quiet,
      )

  def started(self) -> "System":
    """The system, once it waits for its first turn."""
    self.versions = json.loads(self._line())["versions"]
    return self

  def turn(self) -> None:
    """Runs a turn, and keeps its seconds."""
    print(file=self._process.stdin, flush=True)
    self.turns.append(json.loads(self._line())["seconds"])

  def end(self) -> None:
    """Has it write its final weights."""
    print(file=self._process.stdin, flush=True)
    self._line(last=True)

  def _line(self, last: bool = False) -> str:
    line = self._process.stdout.readline()
    if not line and not (last and self._process.wait() == 0):
      tail = self._log.read_text().splitlines()[-20:]
      raise RuntimeError("\n".join([f"{self.name} stopped:", *tail]))
    return line

  def stop(self) -> None:
    """Ends it, however far it has come."""
    self._process.terminate()
    self._process.communicate()


def commands(args, folder: pathlib.Path) -> dict[str, list]:
  """How each system is run, ours first."""
  script = frameworks_peers.__file__
  module = [sys.executable, "-m", "benchmarks.frameworks"]
  found = {"ours": [*module, f"--folder={folder}"]}
  if args.pfl_python:
    found["pfl"] = [os.path.abspath(args.pfl_python), script, "pfl", folder]
    name = f"pfl_by_{args.cores}"
    found[name] = [found["pfl"][0], "-m", "torch.distributed.run"]
    found[name] += ["--standalone", f"--nproc-per-node={args.cores}"]
    found[name] += [script, name, folder]
  if args.flower_python:
    python = os.path.abspath(args.flower_python)
    found["flower"] = [python, script, "flower", folder]
  return found


def row(system: System, ours: System) -> dict[str, Any]:
  """A system's times and its ratio to ours; the first turn does not count."""
  seconds = sum(system.turns[1:], [])
  pairs = zip(system.turns[1:], ours.turns[1:])
  return {
    "system": system.name,
    "versions": system.versions,
    "iteration_s": statistics.median(seconds),
    "iteration_min_s": min(seconds),
    "iteration_max_s": max(seconds),
    "ratio": statistics.median(sum(a) / sum(b) for a, b in pairs),
    "turns_s": system.turns,
  }


def distance(a: core.Variables, b: core.Variables) -> float:
  """The Euclidean distance between two models' parameters."""
  return float(optax.tree.norm(optax.tree.sub(a.params, b.params)))


def main() -> None:
  """Runs the systems, prints a table and writes JSON."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--pfl_python", help="interpreter with pfl and torch")
  parser.add_argument("--flower_python", help="with flwr[simulation], torch")
  parser.add_argument("--data_dir", help="folder with CIFAR-10")
  parser.add_argument("--json", help="file for the results")
  parser.add_argument("--rounds", type=count, default=100, help="iterations")
  parser.add_argument("--turn", type=count, default=5, help="iterations of one")
  parser.add_argument("--cohort", type=count, default=50, help="users of one")
  parser.add_argument("--cores", type=count, default=2, help="of each system")
  parser.add_argument("--learning_rate", type=float, default=0.1)
  parser.add_argument("--conv", help="form of our convolutions")
  parser.add_argument(
    "--dropout", action=argparse.BooleanOptionalAction, default=True
  )
  parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.folder:
    run_ours(args.folder)
    return
  if args.turn < 1 or args.rounds % args.turn or args.rounds <= args.turn:
    parser.error(
      f"--rounds={args.rounds} --turn={args.turn}: want two turns or more, all"
      " of the same length"
    )
  os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
  named = ("rounds", "turn", "cohort", "cores", "learning_rate", "conv")
  settings = {
    **{name: getattr(args, name) for name in named},
    **{"batch_size": BATCH_SIZE, "classes": NUM_CLASSES},
    "dropout": DROPOUT if args.dropout else (0.0, 0.0),
  }
  train, test = images(args.data_dir)
  with contextlib.ExitStack() as stack:
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write(folder, train, settings)
    systems = []
    for name, command in commands(args, folder).items():
      systems.append(System(name, command, folder))
      stack.callback(systems[-1].stop)
    systems = [system.started() for system in systems]
    for _ in range(args.rounds // args.turn):
      for system in systems:
        system.turn()
    for system in systems:
      system.end()
    first = read(folder, "initial")
    last = {s.name: read(folder, s.name) for s in systems}
  evaluator = hetfl.Evaluator(
    [simple_cnn(DROPOUT, args.conv)],
    {"test": hetfl.Subset.whole(test)},
    engine=hetfl.Threads(),
  )
  origin = provenance() | {"settings": settings}
  origin["our_versions"] = origin.pop("versions")
  results = []
  print(f"{'system':12} s an iteration (min-max)   ratio  accuracy  apart")
  for system in systems:
    line = row(system, systems[0]) | evaluator([last[system.name]])[0]
    way = distance(last["ours"], first)
    line["apart"] = distance(last[system.name], last["ours"]) / way
    results.append(line | origin)
    print(
      f"{system.name:12} {line['iteration_s']:6.3f}"
      f" ({line['iteration_min_s']:.3f}-{line['iteration_max_s']:.3f})"
      f" {line['ratio']:8.2f} {100 * line['test_accuracy']:7.2f} %"
      f"  {line['apart']:.1e}  {system.versions}"
    )
  if args.json:
    logs.write_json(args.json, results)


if __name__ == "__main__":
  main()
