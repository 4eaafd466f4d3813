"""What grows with the number of clients, and of sentences.

  python benchmarks/sizes.py --json=FILE [--clients=N,...] [--sentences=N,...]
      [--rounds=N,...]

* `clients`: populations of lognormal sizes, median 20: making and planning, an
  evaluation of each client, and rounds of 20 clients of FML, whose models are
  kept on the device or on the host.
* `sentences`: reading with `--bank=disk` made-up versions of FedJAX's Stack
  Overflow files, written to `--dir`: users with about 400 sentences of zipfian
  words; 13.6 million sentences are a tenth of the real ones. A tenth of the
  users are the pool, the others' sentences distil, as in the paper.
* `rounds`: FedAvg of an LSTM, and the choice of 200 batches for distillation,
  from a bank of random words on disk and from the same bank in memory, in
  turns; the largest size, all of Stack Overflow, from disk only.

Each size has its own process. `peak_mb` is the peak resident memory, including
pages of mapped files, which the system takes back when it needs them;
`anon_mb` is what the process itself holds at the end.
"""

import argparse
import collections
from collections.abc import Callable, Iterator
from concurrent import futures
import dataclasses
import functools
import json
import pathlib
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # As a script, not with -m.
  sys.path.insert(0, str(ROOT))

from benchmarks import language  # noqa: E402
import hetfl  # noqa: E402
from hetfl import core, engine, population  # noqa: E402
from hetfl.clients import on_host  # noqa: E402
from hetfl.data import codist_text, disk  # noqa: E402
from hetfl.models import next_word  # noqa: E402
from hetfl.plans import plan_clients  # noqa: E402
from hetfl.run import logs, training  # noqa: E402

FEATURES, CLASSES, PER_ROUND = 64, 10, 20
WORDS = 200_000  # Distinct ones, in the made-up sentences.


def memory(name: str) -> float:
  """A line of Linux's report on this process's memory, in MB."""
  status = pathlib.Path("/proc/self/status").read_text()
  (line,) = (li for li in status.splitlines() if li.startswith(f"{name}:"))
  return int(line.split()[1]) / 1024


def measured(name: str, run: Callable[[], Any]) -> tuple[dict[str, float], Any]:
  """The seconds and memory that a call takes, and what it returns."""
  pathlib.Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
  start = time.perf_counter()
  result = jax.block_until_ready(run())
  row = {f"{name}_s": time.perf_counter() - start}
  return row | {f"{name}_peak_mb": memory("VmHWM")}, result


def device_mb() -> float:
  return sum(a.nbytes for a in jax.live_arrays()) / 2**20


def of_clients(number: int) -> Iterator[dict[str, float]]:
  """A row of the table of clients, in parts."""
  yield {"clients": number}
  rng = np.random.default_rng(0)
  sizes = np.clip(rng.lognormal(np.log(20), 1.0, number).astype(int), 1, 1280)
  bank = {
    "x": rng.standard_normal((4096, FEATURES), np.float32),
    "y": rng.integers(0, CLASSES, 4096).astype(np.int32),
  }
  held = np.split(np.arange(sizes.sum()) % 4096, np.cumsum(sizes)[:-1])
  make = population.ClientPopulation.from_lists
  row, clients = measured("make", functools.partial(make, bank, held))
  yield row | {"examples": len(clients.members)}
  del held
  options = dict(seed=0, batch_size=20)
  rounds = range(1, 51)
  some = dict(options, clients_per_round=PER_ROUND)
  plan = lambda t: plan_clients(clients, round=t, **some)
  row, _ = measured("plan", lambda: [*map(plan, rounds)])
  yield {"plan_ms": 1e3 * row["plan_s"] / len(rounds)}
  if (
    number <= 100_000
  ):  # All in one round: each has a row of at least 32 steps.
    every = lambda: plan_clients(clients, round=1, **options)
    yield measured("plan_all", every)[0]

  model = core.Model(
    lambda key: core.Variables(
      jax.random.normal(key, (FEATURES, CLASSES)) / 8, {}
    ),
    lambda v, x, key, train: (x @ v.params, v.stats),
  )
  start = model.start(jax.random.key(0))
  evaluate = lambda: hetfl.ClientEvaluator(model, clients)(start)
  yield measured("evaluate", evaluate)[0]

  everyone, runner = [hetfl.Client(model)] * number, engine.Inline()
  algorithm = hetfl.fml(everyone, global_model=model, engine=runner)
  data = {"train": hetfl.put_banks(clients)[0]}
  on_device = algorithm._replace(
    init=jax.jit(algorithm.init),
    step=runner.compile(algorithm.step, donate=(0,)),
  )
  hosted = on_host(algorithm, everyone, engine=runner)
  for name, one in {"host": hosted, "device": on_device}.items():
    first = functools.partial(one.init, jax.random.key(0))
    row, state = measured(f"fml_{name}_init", first)
    yield row
    seconds = []
    for t in range(1, 12):
      plan = hetfl.plan_round({"train": clients}, round=t, tail="short", **some)
      begun = time.perf_counter()
      state, metrics = one.step(state, plan, data)
      jax.block_until_ready((metrics, state))
      seconds.append(time.perf_counter() - begun)
    yield {
      f"fml_{name}_round_ms": 1e3 * statistics.median(seconds[1:]),
      f"fml_{name}_kept_mb": training.num_bytes(state.clients) / 2**20,
      f"fml_{name}_device_mb": device_mb(),
    }
    del state, metrics


def write_files(folder: pathlib.Path, sentences: int) -> None:
  """Makes up FedJAX's three Stack Overflow files."""
  import fedjax

  words = np.array([f"w{i}".encode() for i in range(WORDS)], object)

  def users(rng, number):
    while number > 0:
      n = min(number, max(1, int(rng.lognormal(5.5, 1.0))))
      lengths = rng.integers(4, 24, n)
      ranks = rng.zipf(1.2, lengths.sum())
      said = words[np.minimum(ranks - 1, WORDS - 1)].tolist()
      ends = np.cumsum(lengths).tolist()
      each = [
        b" ".join(said[e - k : e]) for e, k in zip(ends, lengths.tolist())
      ]
      kinds = np.where(rng.random(n) < 0.4, b"question", b"answer")
      yield (
        f"user{number}".encode(),
        {
          "tokens": np.array(each, object),
          "type": np.array(kinds.tolist(), object),
        },
      )
      number -= n

  for i, split in enumerate(("train", "held_out", "test")):
    number = sentences if split == "train" else min(sentences // 10, 200_000)
    path = folder / f"stackoverflow_{split}.sqlite"
    with fedjax.SQLiteFederatedDataBuilder(str(path)) as builder:
      some = min(number, 200_000)
      builder.add_many(users(np.random.default_rng(i), some))
    with sqlite3.connect(path) as file:  # The others are copies.
      for copy in range(1, number // some):
        file.execute(
          "INSERT INTO federated_data SELECT client_id || ?, data, num_examples"
          " FROM federated_data WHERE client_id NOT LIKE '%-%'",
          (f"-{copy}".encode(),),
        )
    file.close()


def load(folder: pathlib.Path, users: int):
  """The paper's data: a tenth of the users for pools, the rest to distil."""
  codist_text._SO_POOL_CLIENTS = users // 10
  return codist_text.load_codist_text(
    "stackoverflow",
    data_dir=folder,
    high_capacity_clients=users // 500 + 1,
    on_disk=True,
  )


def of_sentences(
  folder: pathlib.Path, number: int
) -> Iterator[dict[str, float]]:
  """A row of the table of sentences, in parts."""
  import fedjax

  path = folder / "stackoverflow_train.sqlite"
  users = fedjax.SQLiteFederatedData.new(str(path)).num_clients()
  codist_text.SO_DISTILL_EXAMPLES = number  # All there are.
  bytes_ = sum(p.stat().st_size for p in folder.glob("*.sqlite"))
  row, data = measured("write", lambda: load(folder, users))
  yield row | {
    "sentences": len(data.pools[0].members) + len(data.distill.index),
    "users": users,
    "source_mb": bytes_ / 2**20,
    "pool": len(data.pools[0].members),
    "distill": len(data.distill.index),
    "anon_mb": memory("RssAnon"),
  }
  row, data = measured("open", lambda: load(folder, users))
  yield row | {
    "disk_mb": sum(
      p.stat().st_size for p in (folder / "hetfl_banks").rglob("*.bin")
    )
    / 2**20
  }


V = 10_004  # Of banks without a source.


def made_up(folder: pathlib.Path, number: int):
  """The pool and the distillation set of an on-disk bank of random words."""

  def make(append):
    rng, size = np.random.default_rng(0), 1 << 18
    tokens = (3 + np.minimum(rng.zipf(1.2, (size, 21)), V - 4)).astype(
      np.uint16
    )
    for first in range(0, number, size):
      last = min(first + size, number)
      append("tokens", np.roll(tokens, first // size, axis=0)[: last - first])
      append("domain", np.zeros(last - first, np.int32))
      append("index", np.arange(first, last, dtype=np.int32))
    return {}

  _, arrays = disk.stored(folder, number, make)
  index = arrays.pop("index")
  sizes = np.random.default_rng(1).lognormal(5.5, 1.0, number // 3_000) + 1
  offsets = np.concatenate([[0], np.cumsum(sizes.astype(int))])
  pool, rest = np.split(index, offsets[-1:])
  ids = tuple(map(str, range(len(sizes))))
  clients = population.ClientPopulation(arrays, pool, offsets, ids)
  return clients, hetfl.Subset(arrays, rest)


def of_rounds(folder: pathlib.Path, number: int) -> Iterator[dict[str, float]]:
  """A row of the table of rounds, in parts."""
  yield {"sentences": number}
  row, data = measured("write", lambda: made_up(folder, number))
  yield row
  row, data = measured("open", lambda: made_up(folder, number))
  size = sum(path.stat().st_size for path in folder.glob("*.bin"))
  yield row | {"disk_mb": size / 2**20}
  runs, held = {"disk": rounds_of(*data)}, memory("RssAnon")
  if number < 20_000_000:
    bank = {name: np.array(array) for name, array in data[0].bank.items()}
    clients = dataclasses.replace(data[0], bank=bank)
    runs["memory"] = rounds_of(clients, hetfl.Subset(bank, data[1].index))
    yield {"memory_banks_mb": memory("RssAnon") - held}
  seconds = collections.defaultdict(list)
  for turn in range(6):  # The first compiles.
    for name, run in runs.items():
      begun = time.perf_counter()
      spent = run(turn)
      if turn:
        seconds[name].append((time.perf_counter() - begun, spent))
  for name, times in seconds.items():
    whole, localizing = zip(*times)
    yield {
      f"rounds_per_s_{name}": ROUNDS / min(whole),
      f"median_rounds_per_s_{name}": ROUNDS / statistics.median(whole),
      f"localize_ms_{name}": 1e3 * statistics.median(localizing),
    }
  anon, peak = memory("RssAnon"), memory("VmHWM")
  yield {"anon_mb": anon, "peak_mb": peak, "device_mb": device_mb()}


ROUNDS = 3  # In a turn.


def rounds_of(clients, distill) -> Callable[[int], float]:
  """FedAvg rounds of an LSTM, and distillation batches, planned one ahead."""
  runner = engine.default_engine()
  chunk = 128 if isinstance(runner, engine.Threads) else None
  module = language.language.LSTMLanguageModel(V, 48, 35, 1, chunk=chunk)
  pool = hetfl.Pool(
    core.Model.from_flax(module, jnp.zeros((1, 20), jnp.int32)),
    "small",
    learning_rate=0.3,
    server_lr=0.01,
    loss=next_word.sentence_loss(),
    transform=language.split,
  )
  algorithm = hetfl.fedavg([pool], rounds=None, engine=runner)
  step = runner.compile(algorithm.step)
  state = algorithm.init(jax.random.key(0))
  sets = {"small": clients, "distill": distill}

  def work(round):
    plan = hetfl.plan_round(
      {"small": clients},
      distill,
      seed=0,
      round=round,
      clients_per_round=PER_ROUND,
      batch_size=20,
      max_steps=4,
      distill_steps=200,
      distill_batch_size=128,
    )
    begun = time.perf_counter()
    cut = hetfl.localize(plan, sets)
    return time.perf_counter() - begun, jax.device_put(cut)

  executor = futures.ThreadPoolExecutor(1)

  def run(turn):
    nonlocal state
    first, spent = 1 + turn * ROUNDS, 0.0
    coming = executor.submit(work, first)
    for t in range(first, first + ROUNDS):
      took, (plan, banks) = coming.result()
      coming = executor.submit(work, t + 1)
      spent += took
      small = plan._replace(batches={"small": plan.batches["small"]})
      state, _ = step(state, small, banks)
    jax.block_until_ready(state)
    coming.result()
    return spent / ROUNDS

  return run


def child(*args: str) -> dict[str, float]:
  """A row, from its own process."""
  command = [sys.executable, __file__, f"--child={','.join(args)}"]
  whole: dict[str, float] = {}
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout is not None
    for line in process.stdout:  # Read as it comes, in case of a kill.
      print(f"  {line.strip()}", flush=True)
      whole |= json.loads(line)
  if process.returncode:
    whole["exit_status"] = process.returncode
  return whole


def shown(rows: list[dict[str, float]]) -> None:
  """Prints a table with a line for each number and a column for each size."""
  for name in dict.fromkeys(name for row in rows for name in row):
    cells = (f"{row[name]:,.4g}" if name in row else "" for row in rows)
    print(f"{name:>26}" + "".join(f"{cell:>14}" for cell in cells), flush=True)
  print()


def main() -> None:
  """Measures all sizes, prints their tables and writes JSON."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--json", help="file for the rows")
  parser.add_argument("--clients", default="1000,10000,100000,1000000")
  parser.add_argument("--sentences", default="1360000,13600000")
  parser.add_argument("--rounds", default="1360000,13600000,135818730")
  parser.add_argument("--dir", help="where the made-up files go, for a while")
  parser.add_argument("--child", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.child:
    kind, *rest = args.child.split(",")
    if kind != "clients":
      of = {"sentences": of_sentences, "rounds": of_rounds}[kind]
      rows = of(pathlib.Path(rest[0]), int(rest[1]))
    else:
      rows = of_clients(int(rest[0]))
    for part in rows:
      print(json.dumps(part), flush=True)
    return
  numbers = lambda text: [n for n in text.split(",") if n]
  results: dict[str, Any] = training.provenance("fedjax")
  results |= {"cores": engine.num_cores(), "clients": [], "sentences": []}
  for number in numbers(args.clients):
    results["clients"].append(child("clients", number))
    if args.json:
      logs.write_json(args.json, results)
  shown(results["clients"])
  for number in numbers(args.sentences):
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
      folder = pathlib.Path(name)
      start = time.perf_counter()
      write_files(folder, int(number))
      row = {"generate_s": time.perf_counter() - start}
      row |= child("sentences", name, number)
    results["sentences"].append(row)
    if args.json:
      logs.write_json(args.json, results)
  shown(results["sentences"])
  results["rounds"] = []
  for number in numbers(args.rounds):
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
      results["rounds"].append(child("rounds", name, number))
    if args.json:
      logs.write_json(args.json, results)
  shown(results["rounds"])


if __name__ == "__main__":
  main()
