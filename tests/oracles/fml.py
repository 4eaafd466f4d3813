"""Federated Mutual Learning in NumPy float64.

An oracle: slow, plain, written from the paper alone, gradients derived by
hand. Parameters are as in `tests.oracles.codist`, whose layers it uses.

Reference: Shen et al., "Federated Mutual Learning", 2020. "Eq." and "Alg."
below are that paper's.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from tests.oracles import codist
from tests.oracles.codist import Batch, Params, tree_map


@dataclasses.dataclass
class Settings:
  """What all clients share in a round."""

  alpha: float
  beta: float
  lr: float
  temperature: float = 1.0
  momentum: float = 0.9
  decay: float = 5e-4
  sequential: bool = False


@dataclasses.dataclass
class Client:
  """A client: its own model and momentum, its other layers, its examples.

  Attributes:
    local: its own model.
    velocity: the momentum of its optimizer.
    batches: its steps of a round, over all epochs.
    own: the layers that it adds to the global model; `{}` if none.
    weight: what its meme counts in the merge.
  """

  local: Params
  velocity: Params
  batches: Sequence[Batch]
  own: Params = dataclasses.field(default_factory=dict)
  weight: float = 1.0


def loss_gradient(z, partner, y, weight, temperature):
  """Gradient for the logits of one of eq. 5's two losses, mean over a batch.

  d CE / dz = (p - onehot) / n. With q = softmax(z / T) and fixed r =
  softmax(partner / T), T^2 d KL(r || q) / dz = T (q - r) / n.
  """
  n = len(y)
  ce = codist.softmax(z)
  ce[np.arange(n), y] -= 1.0
  q = codist.softmax(z, temperature)
  r = codist.softmax(partner, temperature)
  return (weight * ce + (1 - weight) * temperature * (q - r)) / n


def sgd_step(w, velocity, gradient, settings):
  """`v <- m v + g + d w; w <- w - lr v`: PyTorch's SGD."""
  velocity = tree_map(
    lambda v, g, w: settings.momentum * v + g + settings.decay * w,
    velocity,
    gradient,
    w,
  )
  return tree_map(lambda w, v: w - settings.lr * v, w, velocity), velocity


def client_update(
  server: Params, client: Client, settings: Settings
) -> tuple[Client, Params]:
  """ClientUpdate of alg. 1: the client afterwards, and what its meme shares."""
  local, velocity = client.local, client.velocity
  meme = {**server, **client.own}  # Fork; its momentum is new.
  meme_velocity = tree_map(np.zeros_like, meme)
  for x, y in client.batches:
    z_local, tape = codist.forward(local, x)
    z_meme, meme_tape = codist.forward(meme, x)
    t = settings.temperature
    g = loss_gradient(z_local, z_meme, y, settings.alpha, t)
    g = codist.backward(local, tape, g)
    new_local, velocity = sgd_step(local, velocity, g, settings)
    if settings.sequential:
      z_local = codist.logits(new_local, x)
    g = loss_gradient(z_meme, z_local, y, settings.beta, t)
    g = codist.backward(meme, meme_tape, g)
    meme, meme_velocity = sgd_step(meme, meme_velocity, g, settings)
    local = new_local
  after = dataclasses.replace(
    client,
    local=local,
    velocity=velocity,
    own={name: meme[name] for name in client.own},
  )
  return after, {name: meme[name] for name in server}


def fml_round(
  server: Params, clients: Sequence[Client], settings: Settings
) -> tuple[Params, list[Client]]:
  """A round of alg. 1: the global model and the clients afterwards."""
  results = [client_update(server, client, settings) for client in clients]
  total = sum(client.weight for client in clients)
  merged = tree_map(
    lambda *memes: (
      sum(c.weight * meme for c, meme in zip(clients, memes)) / total
    ),
    *(meme for _, meme in results),
  )
  return merged, [client for client, _ in results]
