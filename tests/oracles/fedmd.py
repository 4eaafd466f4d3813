"""FedMD, in NumPy float64.

An oracle: slow, plain, written from the paper (and, where it is silent, from
the layers that its released code names), every gradient derived by hand, no
random numbers, so no dropout.

Parameters are nested dicts `{"Conv_0": {"kernel", "bias"}, "BatchNorm_0":
{"scale", "bias"}, ..., "head": {"kernel"}}`; running statistics are
`{"BatchNorm_0": {"mean", "var"}, ...}`. A model is a sequence of blocks
(kernel, stride, padding, pool), see `forward`; its widths are read off the
parameters.

Reference: Li & Wang, "FedMD: Heterogenous Federated Learning via Model
Distillation", 2019.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from tests.oracles import codist

Params = codist.Params
tree_map = codist.tree_map
EPS = 1e-3  # of batch normalisation
MOMENTUM = 0.99
ADAM = codist.Adam(eps=1e-7)

# --- Layers ----------------------------------------------------------------


def batch_norm(x, scale, bias, mean, var):
  """`scale (x - mean) / sqrt(var + eps) + bias`."""
  return scale * (x - mean) / np.sqrt(var + EPS) + bias


def batch_norm_backward(x, scale, dout):
  """Gradients in training mode, where mean and variance are the batch's."""
  axes, n = (0, 1, 2), x[..., 0].size
  deviation = np.sqrt(x.var(axes) + EPS)
  unit = (x - x.mean(axes)) / deviation
  dunit = dout * scale
  # With u = (x - m) / s: dm/dx = 1/n, ds/dx = u / n.
  dx = (
    dunit - dunit.sum(axes) / n - unit * (dunit * unit).sum(axes) / n
  ) / deviation
  return dx, {"scale": (dout * unit).sum(axes), "bias": dout.sum(axes)}


def _squares(height, width, stride):
  """Each output place of a 2x2 average pooling, and what it sees inside."""
  last = 0 if stride == 1 else 1
  for i in range(0, height - last, stride):
    for j in range(0, width - last, stride):
      yield i // stride, j // stride, np.s_[:, i : i + 2, j : j + 2]


def avg_pool(x, stride):
  """Mean over 2x2 squares, those at the end only over what is inside."""
  n, h, w, c = x.shape
  out = np.zeros((n, h // stride, w // stride, c))
  for i, j, square in _squares(h, w, stride):
    out[:, i, j] = x[square].mean((1, 2))
  return out


def avg_pool_backward(shape, stride, dout):
  """Gradient of `avg_pool` for its input of the given shape."""
  dx = np.zeros(shape)
  for i, j, square in _squares(*shape[1:3], stride):
    inside = dx[square].shape[1] * dx[square].shape[2]
    dx[square] += dout[:, i, j][:, None, None] / inside
  return dx


# --- Models ----------------------------------------------------------------


def forward(params, stats, blocks, x, train):
  """The logits of a model.

  A block is convolution, batch normalisation, relu and, if `pool` is not 0,
  2x2 average pooling with that stride; then flatten and the head.

  Args:
    params: its parameters.
    stats: its running statistics.
    blocks: its blocks, (kernel, stride, padding, pool).
    x: `[N, H, W, C]`.
    train: whether to normalise by the batch's statistics.

  Returns:
    Logits `[N, classes]`, the new running statistics, and what `backward`
    needs.
  """
  x, new, tape = np.asarray(x, np.float64), {}, []
  for i, (_, stride, padding, pool) in enumerate(blocks):
    layer, norm = params[f"Conv_{i}"], f"BatchNorm_{i}"
    z = codist.conv(x, layer["kernel"], layer["bias"], stride, padding)
    mean, var = stats[norm]["mean"], stats[norm]["var"]
    if train:
      batch = {"mean": z.mean((0, 1, 2)), "var": z.var((0, 1, 2))}
      new[norm] = {
        name: MOMENTUM * stats[norm][name] + (1 - MOMENTUM) * batch[name]
        for name in batch
      }
      mean, var = batch["mean"], batch["var"]
    y = batch_norm(z, params[norm]["scale"], params[norm]["bias"], mean, var)
    tape.append((x, z, y))
    x = np.maximum(y, 0)
    if pool:
      x = avg_pool(x, pool)
  tape.append(x)
  flat = x.reshape(len(x), -1)
  return flat @ params["head"]["kernel"], new if train else stats, tape


def backward(params, blocks, tape, dlogits):
  """The gradient for the parameters in training mode."""
  *tape, last = tape
  flat = last.reshape(len(last), -1)
  grads = {"head": {"kernel": flat.T @ dlogits}}
  dout = (dlogits @ params["head"]["kernel"].T).reshape(last.shape)
  for i in reversed(range(len(blocks))):
    _, stride, padding, pool = blocks[i]
    x, z, y = tape[i]
    if pool:
      dout = avg_pool_backward(y.shape, pool, dout)
    dout = dout * (y > 0)
    norm = f"BatchNorm_{i}"
    dout, grads[norm] = batch_norm_backward(z, params[norm]["scale"], dout)
    dout, grads[f"Conv_{i}"] = codist.conv_backward(
      x, params[f"Conv_{i}"]["kernel"], dout, stride, padding
    )
  return {name: grads[name] for name in params}


# --- Losses ----------------------------------------------------------------


def absolute(target, z):
  """Mean of `|z - target|` over batch and outputs, and its gradient."""
  return np.abs(z - target).mean(), np.sign(z - target) / z.size


def squared(target, z):
  """Mean of `(z - target)^2` over batch and outputs, and its gradient."""
  return ((z - target) ** 2).mean(), 2 * (z - target) / z.size


def tempered(temperature):
  """KL(target || softmax(z / T)), summed over outputs, and its gradient."""

  def loss(target, z):
    value, dz = codist.kl(target, z / temperature)
    return value, dz / temperature

  return loss


# --- Algorithm 1 -----------------------------------------------------------


@dataclasses.dataclass
class Party:
  """A participant.

  Attributes:
    blocks: its model.
    params: its parameters.
    stats: its running statistics.
    digest: Adam's state of Digest.
    revisit: Adam's state of Revisit.
    lr: learning rate.
    l2: weight of the head's sum of squares in every loss.
  """

  blocks: Sequence[tuple]
  params: Params
  stats: Params
  digest: Any
  revisit: Any
  lr: float = 1e-3
  l2: float = 1e-3

  @classmethod
  def start(cls, blocks, params, stats, **settings) -> "Party":
    """A party whose optimizers are new."""
    adam = ADAM.init(params)
    return cls(blocks, params, stats, adam, adam, **settings)

  def logits(self, x):
    """Class scores, in inference mode."""
    return forward(self.params, self.stats, self.blocks, x, False)[0]


def train(party: Party, opt_state, batches, loss) -> tuple[Party, Any, list]:
  """Adam steps; a batch is (x, target), a loss (target, z) -> value, dz."""
  params, stats, values = party.params, party.stats, []
  for x, target in batches:
    z, stats, tape = forward(params, stats, party.blocks, x, True)
    value, dz = loss(target, z)
    grads = backward(params, party.blocks, tape, dz)
    head = params["head"]["kernel"]
    grads["head"] = {"kernel": grads["head"]["kernel"] + 2 * party.l2 * head}
    params, opt_state = ADAM.update(grads, opt_state, params, party.lr)
    values.append(value)
  return (
    dataclasses.replace(party, params=params, stats=stats),
    opt_state,
    (values),
  )


def round(
  parties: Sequence[Party],
  weights: Sequence[float],
  x: np.ndarray,
  digest_batches: Sequence[Sequence[np.ndarray]],
  revisit_batches: Sequence[Sequence[codist.Batch]],
  *,
  scores=lambda z: z,
  loss=absolute,
) -> list[Party]:
  """One round of algorithm 1.

  Args:
    parties: the parties at its start.
    weights: c_k, with sum 1.
    x: the round's public images, `[N, H, W, C]`.
    digest_batches: for each party positions in `x`, batch after batch.
    revisit_batches: for each party `(x, y)`, batch after batch.
    scores: logits to what is sent.
    loss: of Digest.

  Returns:
    The parties after it.
  """
  # Communicate and Aggregate, before anybody moves.
  sent = [scores(party.logits(x)) for party in parties]
  consensus = sum(c * f for c, f in zip(weights, sent))
  moved = []
  for party, digest, revisit in zip(parties, digest_batches, revisit_batches):
    batches = [(x[index], consensus[index]) for index in digest]
    party, state, _ = train(party, party.digest, batches, loss)
    party = dataclasses.replace(party, digest=state)
    party, state, _ = train(
      party, party.revisit, revisit, lambda y, z: codist.cross_entropy(z, y)
    )
    moved.append(dataclasses.replace(party, revisit=state))
  return moved
