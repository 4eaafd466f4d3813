"""Rounds of FedMD's ten parties, by hetfl and by a plain PyTorch loop.

A round has Communicate, Digest and Revisit: scores on 5,000 public images, one
epoch towards their mean in batches of 256, and two epochs on 18 private images
in batches of 5. Images are 28 x 28 x 1; models have sixteen outputs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import peers, rounds
import hetfl
from hetfl import core, engine
from hetfl.models import fedmd as models

PARTIES, CLASSES, SIDE = 10, 16, 28
PUBLIC, PRIVATE = 5000, 18
BATCH, OWN_BATCH, OWN_EPOCHS = 256, 5, 2
LEARNING_RATE, L2 = 1e-3, 1e-3


def synthetic(n: int, seed: int) -> dict[str, np.ndarray]:
  """Random images and labels, the same for both sides."""
  rng = np.random.default_rng(seed)
  return {
    "x": rng.integers(0, 256, (n, SIDE, SIDE, 1), dtype=np.uint8),
    "y": rng.integers(0, CLASSES, n).astype(np.int32),
  }


def scaled(batch):
  """Centers pixels around zero, as the peer does."""
  return {**batch, "x": batch["x"].astype(jnp.float32) / 255 - 0.5}


def ours(table: str, width: float, dtype: str = "float32") -> rounds.Setup:
  """Our round."""
  runner = rounds.one_device()
  example = jnp.zeros((1, SIDE, SIDE, 1))
  named = models.party_models(table, PARTIES, CLASSES, width=width, dtype=dtype)
  parties = [
    hetfl.Participant(
      core.Model.from_flax(module, example),
      f"party{k}",
      learning_rate=LEARNING_RATE,
      transform=scaled,
      optimizer=hetfl.optimizers.keras_adam,
      penalty=models.head_penalty,
      l2=L2,
    )
    for k, (_, module) in enumerate(named)
  ]
  public, private = synthetic(PUBLIC, 0), synthetic(PRIVATE, 1)
  names = [party.name for party in parties]
  data = dict.fromkeys(names, jax.device_put(private))
  data["public"] = jax.device_put(public)

  def plan(round):
    return hetfl.plan_fedmd(
      hetfl.Subset.whole(public),
      dict.fromkeys(names, hetfl.Subset.whole(private)),
      seed=0,
      round=round,
      subset=PUBLIC,
      digest_batch_size=BATCH,
      revisit_batch_size=OWN_BATCH,
      revisit_epochs=OWN_EPOCHS,
    )

  algorithm = hetfl.fedmd(parties, public_transform=scaled, engine=runner)
  return rounds.Setup(algorithm, runner, plan, data)


def parameter_counts(table: str, width: float) -> list[int]:
  """Numbers of parameters of our parties."""
  example = jnp.zeros((1, SIDE, SIDE, 1))
  return [
    core.num_parameters(
      jax.eval_shape(module.init, jax.random.key(0), example)["params"]
    )
    for _, module in models.party_models(table, PARTIES, CLASSES, width=width)
  ]


def torch_model(filters, dropout: float):
  """A party's network, with the same layers as ours."""
  from torch import nn

  layers: list[nn.Module] = []
  channels, side = 1, SIDE
  for block in models.blocks_of(filters):
    pad = block.kernel // 2 if block.padding == "SAME" else 0
    layers += [
      nn.Conv2d(channels, block.filters, block.kernel, block.stride, pad),
      nn.BatchNorm2d(block.filters, eps=1e-3, momentum=0.01),
      nn.ReLU(),
      nn.Dropout(dropout),
    ]
    side = (side + 2 * pad - block.kernel) // block.stride + 1
    if block.pool == 1:
      # Repeating the last row and column averages only the pixels inside.
      layers += [nn.ReplicationPad2d((0, 1, 0, 1)), nn.AvgPool2d(2, 1)]
    elif block.pool == 2:
      layers.append(nn.AvgPool2d(2))
      side //= 2
    channels = block.filters
  layers.append(nn.Flatten())
  layers.append(nn.Linear(channels * side * side, CLASSES, bias=False))
  return nn.Sequential(*layers)


def peer(table: str, width: float, channels_last: bool) -> rounds.Round:
  """The same round as a plain PyTorch loop over the parties."""
  import torch
  from torch.nn import functional

  torch.manual_seed(0)
  device = peers.torch_device()
  layout = torch.channels_last if channels_last else torch.contiguous_format
  counts = parameter_counts(table, width)
  nets, digests, revisits = [], [], []
  for k in range(PARTIES):
    filters, dropout = models.TABLES[table][k]
    scaled_filters = [max(1, round(width * n)) for n in filters]
    net = torch_model(scaled_filters, dropout)
    count = sum(p.numel() for p in net.parameters())
    if count != counts[k]:
      raise RuntimeError(f"party {k}: {count} parameters, ours {counts[k]}")
    nets.append(net.to(device, memory_format=layout))
    adam = lambda net=net: torch.optim.Adam(
      net.parameters(), LEARNING_RATE, eps=1e-7
    )
    digests.append(adam())
    revisits.append(adam())

  def images(bank):
    x = torch.from_numpy(bank["x"]).permute(0, 3, 1, 2)
    x = x.float().div_(255).sub_(0.5)
    y = torch.from_numpy(bank["y"]).long()
    return x.contiguous(memory_format=layout).to(device), y.to(device)

  (x, _), (own_x, own_y) = (
    images(synthetic(PUBLIC, 0)),
    images(synthetic(PRIVATE, 1)),
  )

  def train(net, optimizer, x, target, batch, loss):
    net.train()
    for index in torch.randperm(len(x), device=device).split(batch):
      optimizer.zero_grad()
      value = loss(net(x[index]), target[index])
      (value + L2 * net[-1].weight.square().sum()).backward()
      optimizer.step()

  def one_round():
    with torch.no_grad():
      consensus = 0
      for net in nets:
        net.eval()
        # As many as ours: on CPUs, what fits into the cache.
        size = engine.batch_size_or_default(None)
        scores = torch.cat([net(part) for part in x.split(size)])
        consensus = consensus + scores / PARTIES
    for net, digest, revisit in zip(nets, digests, revisits):
      train(net, digest, x, consensus, BATCH, functional.l1_loss)
      for _ in range(OWN_EPOCHS):
        train(net, revisit, own_x, own_y, OWN_BATCH, functional.cross_entropy)

  run = peers.waited(one_round, device)
  run()
  return run


def round_flops(table: str, width: float) -> float:
  """FLOPs of a round of all parties."""
  example = jnp.zeros((1, SIDE, SIDE, 1))
  total = 0.0
  for _, module in models.party_models(
    table, PARTIES, CLASSES, width=width, conv="native"
  ):
    image = functools.partial(
      rounds.example_flops,
      core.Model.from_flax(module, example),
      core.cross_entropy,
      (BATCH, SIDE, SIDE, 1),
      jnp.float32,
    )
    trained = PUBLIC + OWN_EPOCHS * PRIVATE
    total += PUBLIC * image(False) + trained * image(True)
  return total


def rows(width: float) -> dict[str, rounds.Row]:
  """The lines of the table.

  Args:
    width: width of the ten models, as a fraction of the paper's Table 1.

  Returns:
    The rows by name.
  """
  lines = {}
  for channels_last in (False, True):
    layout = "channels_last" if channels_last else "default"
    lines[f"fedmd_torch_{layout}"] = rounds.Row(
      functools.partial(ours, "table1", width),
      f"PyTorch loop, {layout.replace('_', ' ')}",
      functools.partial(peer, "table1", width, channels_last),
      functools.partial(round_flops, "table1", width),
      lambda: (PARTIES * PUBLIC, "images"),
    )
  return lines
