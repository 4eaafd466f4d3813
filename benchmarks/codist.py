"""Rounds of FedAvg, PeriodicCodist and MergedCodist on the paper's CNNs.

FedAvg is compared with FedJAX and PyTorch (`benchmarks.peers`). Neither has
codistillation, so that is compared with a plain implementation in JAX: a `vmap`
over the clients, `nn.Conv`'s convolutions, one program.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import peers, rounds
import hetfl
from hetfl import augment, core, engine
from hetfl.models import vision

CNNS = {"small": vision.small_cnn, "large": vision.large_cnn}
EQUAL = [peers.EXAMPLES] * peers.NUM_CLIENTS
DISTILL_STEPS, DISTILL_BATCH = 32, 128


def scale(batch):
  """Scales pixels to [0, 1], as the peers do."""
  return {**batch, "x": batch["x"].astype(jnp.float32) / 255}


def clients_of(sizes) -> hetfl.ClientPopulation:
  """Clients that hold these numbers of the peers' synthetic images."""
  clients = peers.synthetic()
  bank = {
    name: np.concatenate([np.asarray(client[name]) for client in clients])
    for name in ("x", "y")
  }
  return rounds.gathered(bank, sizes)


@functools.cache
def pool_of(
  size: str, conv: str | None = None, dtype: str = "float32"
) -> hetfl.Pool:
  """The peers' model and rates; `conv` defaults to the backend's."""
  example = jnp.zeros((1, peers.SIDE, peers.SIDE, 3))
  module = CNNS[size](peers.NUM_CLASSES, conv=conv, dtype=dtype)
  return hetfl.Pool(
    core.Model.from_flax(module, example),
    size,
    learning_rate=peers.CLIENT_LR,
    server_lr=peers.SERVER_LR,
    transform=scale,
  )


def plan_of(clients, round: int, sizes, distills: bool) -> hetfl.Plan:
  """20 clients of each pool and, if `distills`, 32 batches of 128 images."""
  return hetfl.plan_round(
    dict.fromkeys(sizes, clients),
    clients.examples() if distills else None,
    seed=0,
    round=round,
    clients_per_round=peers.COHORT,
    batch_size=peers.BATCH_SIZE,
    distill_steps=DISTILL_STEPS,
    distill_batch_size=DISTILL_BATCH,
  )


def fedavg_round(
  size: str, sizes=EQUAL, dtype: str = "float32"
) -> rounds.Setup:
  """A FedAvg round of 20 clients, by default from 60 with 100 images each."""
  runner = rounds.one_device()
  clients = clients_of(sizes)
  bank = jax.device_put(dict(clients.bank))
  return rounds.Setup(
    hetfl.fedavg([pool_of(size, dtype=dtype)], rounds=1500, engine=runner),
    runner,
    lambda round: plan_of(clients, round, [size], False),
    {size: bank},
  )


def codist_round(
  name: str, plain: bool = False, dtype: str = "float32"
) -> rounds.Setup:
  """A round in which both CNNs codistil.

  Args:
    name: 'merged' or 'periodic'.
    plain: whether to use the plain implementation instead of ours.
    dtype: what the models compute in.

  Returns:
    The round.
  """
  runner = engine.Inline(at_once=1000) if plain else rounds.one_device()
  clients = clients_of(EQUAL)
  bank = jax.device_put(dict(clients.bank))
  distiller = hetfl.Distiller(
    transform=augment.RECIPES["crop24"].distill,
    mixup_beta=2,
    microbatch=rounds.microbatch(runner),
  )
  pools = [pool_of(size, "native" if plain else None, dtype) for size in CNNS]
  options = dict(rounds=1500, engine=runner)
  algorithm = (
    hetfl.merged_codist(pools, distiller, alpha=0.5, **options)
    if name == "merged"
    else hetfl.periodic_codist(pools, distiller, period=1, **options)
  )
  return rounds.Setup(
    algorithm,
    runner,
    lambda round: plan_of(clients, round, CNNS, True),
    dict.fromkeys((*CNNS, "distill"), bank),
  )


def image_flops(size: str, train: bool) -> float:
  """FLOPs of the products for one image, in training or prediction."""
  shape = (peers.BATCH_SIZE, peers.SIDE, peers.SIDE, 3)
  return rounds.example_flops(
    pool_of(size, "patches").model,
    core.cross_entropy,
    shape,
    jnp.float32,
    train,
  )


def fedavg_flops(size: str, images: int) -> float:
  """FLOPs of a FedAvg round."""
  return images * image_flops(size, True)


def codist_flops() -> float:
  """FLOPs of a round of both pools, including codistillation."""
  images, distilled = (
    peers.COHORT * peers.EXAMPLES,
    DISTILL_STEPS * DISTILL_BATCH,
  )
  return sum(
    (images + distilled) * image_flops(size, True)
    + distilled * image_flops(size, False)
    for size in CNNS
  )


def rows() -> dict[str, rounds.Row]:
  """The lines of the table."""
  lines = {}
  images = peers.COHORT * peers.EXAMPLES
  for size, (filters, dense, _) in peers.SIZES.items():
    row = functools.partial(
      rounds.Row,
      functools.partial(fedavg_round, size),
      flops=functools.partial(fedavg_flops, size, images),
      work=lambda: (images, "images"),
    )
    for backend in ("jit", "pmap", "debug"):
      lines[f"fedavg_{size}_fedjax_{backend}"] = row(
        f"FedJAX 0.0.17, {backend}",
        functools.partial(peers.fedjax_round, backend, filters, dense),
      )
    for channels_last in (False, True):
      layout = "channels_last" if channels_last else "default"
      lines[f"fedavg_{size}_torch_{layout}"] = row(
        f"PyTorch loop, {layout.replace('_', ' ')}",
        functools.partial(
          peers.torch_round, filters, dense, channels_last=channels_last
        ),
      )
  ragged, equal = rounds.ragged_sizes(peers.COHORT, peers.BATCH_SIZE)
  lines["fedavg_large_ragged"] = rounds.Row(
    functools.partial(fedavg_round, "large", ragged),
    "the same batches in equal clients",
    lambda: rounds.looped(fedavg_round("large", equal)),
    functools.partial(fedavg_flops, "large", sum(ragged)),
    lambda: (sum(ragged), "images"),
  )
  for name in ("merged", "periodic"):
    lines[f"{name}_plain"] = rounds.Row(
      functools.partial(codist_round, name),
      "vmap over 20 clients, nn.Conv's form, one program",
      lambda name=name: rounds.looped(codist_round(name, True)),
      codist_flops,
      lambda: (2 * (images + DISTILL_STEPS * DISTILL_BATCH), "images"),
    )
  return lines
