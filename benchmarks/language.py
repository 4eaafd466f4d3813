"""Times a round of next-word prediction on ragged clients, side by side.

  python -m benchmarks.language [--json=FILE] [--data_dir=DIR] [--runs=N]

Twenty clients of unlike sizes train an LSTM for one epoch, in batches of 10
sentences of 20 positions, vocabulary 4,004. In one process, three take turns:

* ours: four lanes, on CPU threads or in one program on an accelerator;
* a `vmap` over the clients, each padded to the batches of the largest;
* a PyTorch loop over the clients (sparse embedding gradients, packed targets).

The tokens counted are those with a loss, the same for all. Clients are users
of `DIR/stackexchange/Posts.xml` (at most 100 sentences each) or, without
--data_dir, lognormal sizes like theirs with random words.
"""

import argparse
from collections.abc import Callable
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import core, engine, next_word, population
from hetfl.data import codist_text
from hetfl.fedavg import fedavg, Pool
from hetfl.models import language

CLIENTS, BATCH, LENGTH, V = 20, 10, 20, 4_004
CLIENT_LR, SERVER_LR = 0.3, 0.01
SIZES = {"small": (96, 70, 1), "large": (192, 140, 2)}


def synthetic() -> population.ClientPopulation:
  """Clients of lognormal sizes, median 8; sentences of 2 to 20 words."""
  rng = np.random.default_rng(0)
  sizes = np.clip(rng.lognormal(2.1, 1.0, 1000), 1, 100).astype(int)
  n = int(sizes.sum())
  tokens = np.zeros((n, LENGTH + 1), np.uint16)
  lengths = np.clip(rng.lognormal(2.4, 0.6, n), 2, LENGTH).astype(int)
  words = 3 + np.minimum(rng.zipf(1.2, (n, LENGTH)), V - 4)
  inside = np.arange(LENGTH) < lengths[:, None]
  tokens[:, 1:] = np.where(inside, words, 0)
  tokens[:, 0] = next_word.BOS
  tokens[np.arange(n), lengths] = next_word.EOS
  return population.ClientPopulation.from_lists(
    {"tokens": tokens}, np.split(np.arange(n), np.cumsum(sizes)[:-1])
  )


def real(data_dir: str) -> population.ClientPopulation:
  """The users of a Stack Exchange dump."""
  return codist_text.load_codist_text(
    "stackexchange",
    vocabulary_size=V - 4,
    data_dir=data_dir,
    max_sentences_per_client=100,
  ).pools[0]


def split(key, batch):
  """Sentences to `x` and `y`."""
  del key
  tokens = batch["tokens"].astype(jnp.int32)
  return {"x": tokens[:, :-1], "y": tokens[:, 1:], "mask": batch["mask"]}


def plan_of(clients, round: int, lanes: int) -> population.LanePlan:
  """The round's plan; the same clients and batches for all."""
  return population.plan_clients(
    clients,
    seed=0,
    round=round,
    clients_per_round=CLIENTS,
    batch_size=BATCH,
    num_lanes=lanes,
  )


def ours(size: str, clients, runner, lanes: int) -> Callable[[int], None]:
  """A FedAvg round of ours, given its number."""
  chunk = 128 if isinstance(runner, engine.Threads) else None
  module = language.LSTMLanguageModel(V, *SIZES[size], chunk=chunk)
  example = jnp.zeros((1, LENGTH), jnp.int32)
  pool = Pool(
    size,
    core.Model.from_flax(module, example),
    client_lr=CLIENT_LR,
    server_lr=SERVER_LR,
    loss=next_word.sentence_loss(),
    transform=split,
  )
  algorithm = fedavg([pool], rounds=None, engine=runner)
  data = {"pools": (jax.device_put(dict(clients.bank)),)}
  state = jax.jit(algorithm.init)(jax.random.key(0))
  step = runner.compile(algorithm.step)

  def run(round):
    nonlocal state
    plan = plan_of(clients, round, lanes)
    state, _ = step(
      state, population.RoundPlan(np.int32(round), (plan,), None), data
    )
    jax.block_until_ready(state)

  return run


def torch_round(size: str, clients) -> Callable[[int], None]:
  """A plain PyTorch loop over the same clients and batches."""
  import torch
  from torch import nn

  embedding, hidden, layers = SIZES[size]
  device = "cuda" if torch.cuda.is_available() else "cpu"

  class Lstm(nn.Module):
    def __init__(self):
      super().__init__()
      self.table = nn.Embedding(V, embedding, sparse=True)
      self.lstms = nn.ModuleList(
        nn.LSTM(embedding, hidden, batch_first=True) for _ in range(layers)
      )
      self.denses = nn.ModuleList(
        nn.Linear(hidden, embedding) for _ in range(layers)
      )
      self.output = nn.Linear(embedding, V)

    def forward(self, x, counts):
      h = self.table(x)
      for lstm, dense in zip(self.lstms, self.denses):
        h = dense(torch.tanh(lstm(h)[0]))
      return self.output(h[counts])  # The positions that count, alone.

  torch.manual_seed(0)
  model = Lstm().to(device)
  local = list(model.parameters())
  server = [nn.Parameter(p.detach().clone()) for p in local]
  sgd = torch.optim.SGD(local, lr=CLIENT_LR)
  adam = torch.optim.Adam(server, lr=SERVER_LR, eps=1e-5)
  tokens = torch.from_numpy(clients.bank["tokens"].astype(np.int64)).to(device)

  def run(round):
    plan = plan_of(clients, round, 1)
    total = 0.0
    deltas = [torch.zeros_like(p) for p in server]
    fresh = True
    for s in range(int(plan.steps[0])):
      if fresh:
        with torch.no_grad():
          for p, w in zip(local, server):
            p.copy_(w)
      batch = tokens[torch.from_numpy(plan.index[0, s].astype(np.int64))]
      x, y = batch[:, :-1], batch[:, 1:]
      counts = y != 0
      sgd.zero_grad()
      logits = model(x, counts)
      loss = nn.functional.cross_entropy(logits, y[counts], reduction="sum")
      (loss / (13.3 * BATCH)).backward()
      sgd.step()
      weight = float(plan.weight[0, s])
      fresh = weight > 0
      if fresh:
        total += weight
        with torch.no_grad():
          for d, w, p in zip(deltas, server, local):
            d.add_(w - p, alpha=weight)
    for w, d in zip(server, deltas):
      w.grad = d.div_(total)
    adam.step()
    if device == "cuda":
      torch.cuda.synchronize()

  return run


def main() -> None:
  """Runs the three in turn, prints a table and writes JSON."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--json", help="file for the rows")
  parser.add_argument("--data_dir", help="folder with stackexchange/Posts.xml")
  parser.add_argument("--size", choices=tuple(SIZES), help="by default both")
  parser.add_argument("--runs", type=int, default=7, help="rounds of each")
  parser.add_argument("--lanes", type=int, default=4, help="of ours")
  args = parser.parse_args()
  clients = real(args.data_dir) if args.data_dir else synthetic()
  rows = []
  print(
    f"{'size':6} {'who':22} {'s a round':>10} {'tokens/s':>10} {'ratio':>6}"
  )
  for size in [args.size] if args.size else list(SIZES):
    peers = {
      "ours": ours(size, clients, engine.default_engine(), args.lanes),
      "padded vmap": ours(size, clients, engine.Inline(), CLIENTS),
      "PyTorch loop": torch_round(size, clients),
    }
    # Rounds of unlike lengths compile unlike programs: all before the clock.
    for run in peers.values():
      for round in range(1, args.runs + 1):
        run(round)
    seconds = {name: [] for name in peers}
    speeds = {name: [] for name in peers}
    waste = []
    for round in range(1, args.runs + 1):
      plan = plan_of(clients, round, args.lanes)
      index = plan.index[plan.index >= 0]
      tokens = int((clients.bank["tokens"][index][:, 1:] != 0).sum())
      waste.append(plan.steps.max() * args.lanes / plan.steps.sum() - 1)
      for name, run in peers.items():
        start = time.perf_counter()
        run(round)
        seconds[name].append(time.perf_counter() - start)
        speeds[name].append(tokens / seconds[name][-1])
    for name in peers:
      ratios = [b / a for a, b in zip(seconds["ours"], seconds[name])]
      row = {
        "name": f"language_{size}_{name.replace(' ', '_').lower()}",
        "median_s": statistics.median(seconds[name]),
        "tokens_per_s": statistics.median(speeds[name]),
        "ratio_to_ours": statistics.median(ratios),
        "wasted_share": statistics.mean(waste) if name == "ours" else None,
      }
      rows.append(row)
      print(
        f"{size:6} {name:22} {row['median_s']:10.3f}"
        f" {row['tokens_per_s']:10,.0f} {row['ratio_to_ours']:6.2f}",
        flush=True,
      )
      if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
          json.dump(rows, f, indent=2)


if __name__ == "__main__":
  main()
