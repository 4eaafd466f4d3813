"""Rounds of Federated Mutual Learning, by hetfl and by a plain PyTorch loop.

A round is that of the paper's Table 1 with one local epoch, for CNN1 on images
of CIFAR-10's shape: five clients (of 10,000 images each in the paper), batches
of 128, SGD with momentum and weight decay, random crops and flips.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import peers, rounds
import hetfl
from hetfl import augment, core
from hetfl.models import fml as nets

NUM_CLIENTS = 5
BATCH_SIZE = 128
SHAPE = (32, 32, 3)
NORMAL = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def synthetic(examples: int) -> dict[str, np.ndarray]:
  """Random images and labels of all clients, the same for both sides."""
  rng = np.random.default_rng(0)
  n = NUM_CLIENTS * examples
  return {
    "x": rng.integers(0, 256, (n, *SHAPE), dtype=np.uint8),
    "y": rng.integers(0, 10, n).astype(np.int32),
  }


def ours_round(
  examples: int, mutual: bool = True, dtype: str = "float32"
) -> rounds.Setup:
  """Our round; without `mutual`, clients train their own models alone."""
  runner = rounds.one_device()
  bank = synthetic(examples)
  model = core.Model.from_flax(
    nets.net("cnn1", 10, SHAPE, dtype=dtype), jnp.zeros((1, *SHAPE))
  )
  client = hetfl.Client(
    model,
    transform=augment.RECIPES["pad32"].train,
    microbatch=rounds.microbatch(runner),
  )
  clients = [client] * NUM_CLIENTS
  shared = model if mutual else None
  algorithm = hetfl.fml(clients, global_model=shared, engine=runner)
  held = hetfl.ClientPopulation.from_lists(
    bank, np.split(np.arange(NUM_CLIENTS * examples), NUM_CLIENTS)
  )

  def plan(round):
    return hetfl.plan_round(
      {"train": held},
      seed=0,
      round=round,
      batch_size=BATCH_SIZE,
      tail="short",
      uniform_weights=True,
    )

  data = {"train": jax.device_put(bank)}
  return rounds.Setup(algorithm, runner, plan, data)


def torch_round(
  examples: int, mutual: bool = True, channels_last: bool = False
) -> rounds.Round:
  """A plain PyTorch loop over the clients, written with care.

  The images stay uint8 in memory; a batch is cropped and flipped by one
  gather, and then normalised. PyTorch chooses the number of threads.
  """
  import torch
  from torch import nn
  from torch.nn import functional

  torch.manual_seed(0)
  device = peers.torch_device()
  layout = torch.channels_last if channels_last else torch.contiguous_format

  def cnn1():
    return nn.Sequential(
      nn.Conv2d(3, 6, 3),
      nn.MaxPool2d(2),
      nn.ReLU(),
      nn.Conv2d(6, 16, 3),
      nn.MaxPool2d(2),
      nn.ReLU(),
      nn.Flatten(),
      nn.Linear(576, 120),
      nn.ReLU(),
      nn.Linear(120, 10),
    ).to(device, memory_format=layout)

  bank = synthetic(examples)
  # Padded once, as in a loop over a loaded data set.
  x = functional.pad(
    torch.from_numpy(bank["x"]).permute(0, 3, 1, 2), (4, 4, 4, 4)
  ).contiguous(memory_format=layout)
  x, y = x.to(device), torch.from_numpy(bank["y"]).long().to(device)
  mean, deviation = (
    torch.tensor(v, device=device).view(1, 3, 1, 1) for v in NORMAL
  )
  optimizer = functools.partial(
    torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=5e-4
  )
  server = cnn1()
  locals_ = [cnn1() for _ in range(NUM_CLIENTS)]
  optimizers = [optimizer(model.parameters()) for model in locals_]
  meme = cnn1()
  span = torch.arange(32, device=device)
  colors = torch.arange(3, device=device)[None, :, None, None]

  def batch(index):
    top, left = torch.randint(0, 9, (2, len(index), 1), device=device)
    flipped = torch.rand(len(index), 1, device=device) < 0.5
    columns = left + torch.where(flipped, span, span.flip(0))
    rows = top + span
    if channels_last:
      images = x.permute(0, 2, 3, 1)[
        index[:, None, None], rows[:, :, None], columns[:, None, :]
      ].permute(0, 3, 1, 2)
    else:
      images = x[
        index[:, None, None, None],
        colors,
        rows[:, None, :, None],
        columns[:, None, None, :],
      ]
    return images.float().div_(255).sub_(mean).div_(deviation), y[index]

  def kl(student, teacher):
    return functional.kl_div(
      functional.log_softmax(student, 1),
      functional.softmax(teacher.detach(), 1),
      reduction="batchmean",
    )

  def client(k):
    meme.load_state_dict(server.state_dict())
    meme_optimizer = optimizer(meme.parameters())
    order = torch.randperm(examples, device=device) + k * examples
    for index in order.split(BATCH_SIZE):
      images, labels = batch(index)
      own = locals_[k](images)
      optimizers[k].zero_grad()
      if mutual:
        theirs = meme(images)
        meme_optimizer.zero_grad()
        loss = 0.5 * functional.cross_entropy(own, labels)
        loss = loss + 0.5 * kl(own, theirs)
        loss = loss + 0.5 * functional.cross_entropy(theirs, labels)
        loss = loss + 0.5 * kl(theirs, own)
        loss.backward()
        meme_optimizer.step()
      else:
        functional.cross_entropy(own, labels).backward()
      optimizers[k].step()

  def one_round():
    sums = None
    for k in range(NUM_CLIENTS):
      client(k)
      state = {n: a.clone() for n, a in meme.state_dict().items()}
      sums = state if sums is None else {n: sums[n] + state[n] for n in sums}
    server.load_state_dict({n: a / NUM_CLIENTS for n, a in sums.items()})

  run = peers.waited(one_round, device)
  run()
  return run


def round_flops(examples: int, mutual: bool) -> float:
  """FLOPs of a round: both of each client's models, on each image."""
  model = core.Model.from_flax(
    nets.net("cnn1", 10, SHAPE, conv="native"), jnp.zeros((1, *SHAPE))
  )
  image = rounds.example_flops(
    model, core.cross_entropy, (BATCH_SIZE, *SHAPE), jnp.float32, True
  )
  return image * NUM_CLIENTS * examples * (2 if mutual else 1)


def rows(examples: int) -> dict[str, rounds.Row]:
  """The lines of the table.

  Args:
    examples: number of images of each client.

  Returns:
    The rows by name.
  """
  lines = {}
  for name, mutual in (("fml", True), ("independent", False)):
    for channels_last in (False, True):
      layout = "channels_last" if channels_last else "default"
      lines[f"{name}_cnn1_torch_{layout}"] = rounds.Row(
        functools.partial(ours_round, examples, mutual),
        f"PyTorch loop, {layout.replace('_', ' ')}",
        functools.partial(torch_round, examples, mutual, channels_last),
        functools.partial(round_flops, examples, mutual),
        lambda: (NUM_CLIENTS * examples, "images"),
      )
  return lines
