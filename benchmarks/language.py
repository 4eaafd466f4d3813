"""Rounds of next-word prediction on ragged clients, in three implementations.

Twenty clients of different sizes train an LSTM for one epoch, in batches of 10
sentences of 20 positions, vocabulary 4,004:

* ours: on CPU threads, or one program with four clients at a time on an
  accelerator;
* a `vmap` over the clients, each padded to the batches of the largest;
* a PyTorch loop over the clients (sparse embedding gradients, packed targets).

Only tokens with a loss count, the same for all. Clients are users from
`DIR/stackexchange/Posts.xml` (at most 100 sentences each) or, without a folder,
have random words and similar, lognormal sizes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import peers, rounds
import hetfl
from hetfl import core, engine, population
from hetfl.batches import Batches
from hetfl.data import codist_text
from hetfl.models import language, next_word
from hetfl.plans import plan_clients

CLIENTS, BATCH, LENGTH, V = 20, 10, 20, 4_004
CLIENT_LR, SERVER_LR = 0.3, 0.01
LANES = 4
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


def split(batch):
  """Splits sentences into inputs `x` and next tokens `y`."""
  tokens = batch["tokens"].astype(jnp.int32)
  return {"x": tokens[:, :-1], "y": tokens[:, 1:], "mask": batch["mask"]}


def plan_of(clients, round: int) -> Batches:
  """The round's batches, with the same clients for all."""
  return plan_clients(
    clients,
    seed=0,
    round=round,
    clients_per_round=CLIENTS,
    batch_size=BATCH,
  )


def ours(
  size: str, clients, cycle: int, padded: bool, dtype: str = "float32"
) -> rounds.Setup:
  """A FedAvg round of ours.

  Args:
    size: size of the model, 'small' or 'large'.
    clients: the population.
    cycle: number of different rounds.
    padded: whether to run a plain `vmap` over the clients, side by side.
    dtype: what the model computes in.

  Returns:
    The round.
  """
  runner = rounds.one_device(LANES)
  if padded:
    runner = engine.Inline(at_once=CLIENTS)
  chunk = 128 if isinstance(runner, engine.Threads) else None
  pool = hetfl.Pool(
    model_of(size, chunk, dtype),
    size,
    learning_rate=CLIENT_LR,
    server_lr=SERVER_LR,
    loss=next_word.sentence_loss(),
    transform=split,
  )
  return rounds.Setup(
    hetfl.fedavg([pool], rounds=None, engine=runner),
    runner,
    lambda round: hetfl.Plan(np.int32(round), {size: plan_of(clients, round)}),
    {size: jax.device_put(dict(clients.bank))},
    cycle=cycle,
  )


@functools.cache
def model_of(
  size: str, chunk: int | None, dtype: str = "float32"
) -> core.Model:
  """The LSTM."""
  module = language.LSTMLanguageModel(V, *SIZES[size], chunk=chunk, dtype=dtype)
  return core.Model.from_flax(module, jnp.zeros((1, LENGTH), jnp.int32))


def torch_round(size: str, clients, cycle: int) -> rounds.Round:
  """A plain PyTorch loop over the same clients and batches."""
  import torch
  from torch import nn

  embedding, hidden, layers = SIZES[size]
  device = peers.torch_device()

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
      return self.output(h[counts])  # Only the positions that count.

  torch.manual_seed(0)
  model = Lstm().to(device)
  local = list(model.parameters())
  server = [nn.Parameter(p.detach().clone()) for p in local]
  sgd = torch.optim.SGD(local, lr=CLIENT_LR)
  adam = torch.optim.Adam(server, lr=SERVER_LR, eps=1e-5)
  tokens = torch.from_numpy(clients.bank["tokens"].astype(np.int64)).to(device)

  count = 0

  def one_round():
    nonlocal count
    plan = plan_of(clients, 1 + count % cycle)
    count += 1
    total = float(plan.weight.sum())
    deltas = [torch.zeros_like(p) for p in server]
    for rows, steps, weight in zip(plan.index, plan.steps, plan.weight):
      with torch.no_grad():
        for p, w in zip(local, server):
          p.copy_(w)
      for positions in rows[:steps]:
        batch = tokens[torch.from_numpy(positions.astype(np.int64))]
        x, y = batch[:, :-1], batch[:, 1:]
        counts = y != 0
        sgd.zero_grad()
        logits = model(x, counts)
        loss = nn.functional.cross_entropy(logits, y[counts], reduction="sum")
        (loss / (13.3 * BATCH)).backward()
        sgd.step()
      with torch.no_grad():
        for d, w, p in zip(deltas, server, local):
          d.add_(w - p, alpha=float(weight))
    for w, d in zip(server, deltas):
      w.grad = d.div_(total)
    adam.step()

  run = peers.waited(one_round, device)
  run(cycle)
  return run


def round_flops(size: str, steps: float) -> float:
  """FLOPs of a round's useful batches, at all their positions."""
  model = model_of(size, None)
  sentence = rounds.example_flops(
    model, next_word.sentence_loss(), (BATCH, LENGTH), jnp.int32, True
  )
  return sentence * BATCH * steps


def rows(data_dir: str | None, cycle: int) -> dict[str, rounds.Row]:
  """The lines of the table.

  Args:
    data_dir: where `stackexchange/Posts.xml` is; `None` for random words.
    cycle: number of different rounds to time.

  Returns:
    The rows by name.
  """
  clients = functools.cache(lambda: real(data_dir) if data_dir else synthetic())

  @functools.cache
  def work() -> tuple[float, float]:
    """Mean batches and tokens of a round."""
    plans = [plan_of(clients(), round) for round in range(1, cycle + 1)]
    tokens = sum(
      (clients().bank["tokens"][plan.index[plan.index >= 0]][:, 1:] != 0).sum()
      for plan in plans
    )
    steps = sum(plan.steps.sum() for plan in plans)
    return float(steps) / cycle, float(tokens) / cycle

  lines = {}
  for size in SIZES:
    for name, label, other in (
      (
        "vmap",
        "vmap over 20 padded clients",
        lambda size=size: rounds.looped(ours(size, clients(), cycle, True)),
      ),
      (
        "torch",
        "PyTorch loop",
        lambda size=size: torch_round(size, clients(), cycle),
      ),
    ):
      lines[f"language_{size}_{name}"] = rounds.Row(
        lambda size=size: ours(size, clients(), cycle, False),
        label,
        other,
        lambda size=size: round_flops(size, work()[0]),
        lambda: (work()[1], "tokens"),
      )
  sizes = rounds.ragged_sizes(CLIENTS, BATCH)
  ragged, equal = (
    functools.cache(lambda s=s: rounds.gathered(dict(clients().bank), s))
    for s in sizes
  )
  lines["language_large_ragged"] = rounds.Row(
    lambda: ours("large", ragged(), 1, False),
    "the same batches in equal clients",
    lambda: rounds.looped(ours("large", equal(), 1, False)),
    lambda: round_flops("large", sum(sizes[0]) / BATCH),
    lambda: (sum(sizes[0]), "sentences"),
  )
  return lines
