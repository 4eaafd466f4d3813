"""Codistillation of federated server models, in NumPy float64.

An oracle: slow, plain, written from the paper alone, every gradient derived
by hand, no random numbers. The tests compare the simulator with it.

Parameters are nested dicts, `{"Conv_0": {"kernel": [3, 3, cin, cout],
"bias": [cout]}, ..., "Dense_0": {"kernel": [din, dout], "bias": [dout]}}`;
the architecture is read off them, so pools may have different models.

Reference: Lichtarge et al., "Heterogeneous Federated Learning Using
Knowledge Codistillation", 2023. "Eq." and "Alg." below are that paper's.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import numpy as np

Params = dict[str, dict[str, np.ndarray]]
Batch = tuple[np.ndarray, np.ndarray]

NUM_POOLED = 2  # Only the first two convolutions are followed by a pooling.

# --- Parameter trees -------------------------------------------------------


def tree_map(fn: Callable[..., np.ndarray], *trees: Params) -> Params:
  """Applies `fn` leaf by leaf to trees of one structure."""
  return {
    layer: {
      name: np.asarray(fn(*(tree[layer][name] for tree in trees)), np.float64)
      for name in trees[0][layer]
    }
    for layer in trees[0]
  }


def norm(tree: Params) -> float:
  """The L2 norm of all the parameters as one vector."""
  return float(
    np.sqrt(
      sum((a**2).sum() for layer in tree.values() for a in layer.values())
    )
  )


def _copy(tree: Params) -> Params:
  return tree_map(lambda a: np.array(a, np.float64), tree)


# --- Layers ----------------------------------------------------------------


def _padded(x: np.ndarray, kernel: np.ndarray, padding: str) -> np.ndarray:
  """Images with a border of zeros for `SAME`, which is for odd kernels."""
  if padding == "VALID":
    return x
  border = [(n // 2, n // 2) for n in kernel.shape[:2]]
  return np.pad(x, [(0, 0), *border, (0, 0)])


def _places(x: np.ndarray, kernel: np.ndarray, stride: int):
  """Yields each place of a kernel, and the pixels that it is multiplied by."""
  kh, kw = kernel.shape[:2]
  for i, j in np.ndindex(kh, kw):
    bottom, right = (n - k + 1 for n, k in zip(x.shape[1:3], (kh, kw)))
    yield i, j, np.s_[:, i : i + bottom : stride, j : j + right : stride]


def conv(
  x: np.ndarray,
  kernel: np.ndarray,
  bias: np.ndarray,
  stride: int = 1,
  padding: str = "SAME",
) -> np.ndarray:
  """Convolution (cross-correlation).

  Args:
    x: `[N, H, W, cin]`.
    kernel: `[kh, kw, cin, cout]`.
    bias: `[cout]`.
    stride: the same along height and width.
    padding: `VALID`, or `SAME` for odd kernels (with stride 1).

  Returns:
    `[N, H', W', cout]`.
  """
  x = _padded(x, kernel, padding)
  terms = (x[at] @ kernel[i, j] for i, j, at in _places(x, kernel, stride))
  return bias + sum(terms)


def conv_backward(
  x: np.ndarray,
  kernel: np.ndarray,
  dout: np.ndarray,
  stride: int = 1,
  padding: str = "SAME",
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
  """Gradients of `conv` for its input and its parameters."""
  padded = _padded(x, kernel, padding)
  dpadded, dkernel = np.zeros_like(padded), np.zeros_like(kernel)
  for i, j, at in _places(padded, kernel, stride):
    dkernel[i, j] = np.einsum("nhwc,nhwd->cd", padded[at], dout)
    dpadded[at] += dout @ kernel[i, j].T
  h, w = x.shape[1:3]
  top, left = (dpadded.shape[1] - h) // 2, (dpadded.shape[2] - w) // 2
  dx = dpadded[:, top : top + h, left : left + w]
  return dx, {"kernel": dkernel, "bias": dout.sum((0, 1, 2))}


def max_pool(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """2x2 max pooling, stride 2; an odd last row or column is left out.

  Args:
    x: `[N, H, W, C]`.

  Returns:
    The pooled `[N, H // 2, W // 2, C]` and, in the same shape, which of the
    four (row by row) was the largest; the first of equals.
  """
  h, w = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
  corners = np.stack([x[:, i:h:2, j:w:2] for i in range(2) for j in range(2)])
  return corners.max(0), corners.argmax(0)


def max_pool_backward(
  shape: tuple[int, ...], which: np.ndarray, dout: np.ndarray
) -> np.ndarray:
  """Gradient of `max_pool` for its input of the given shape."""
  h, w = shape[1] // 2 * 2, shape[2] // 2 * 2
  dx = np.zeros(shape)
  for corner in range(4):
    i, j = divmod(corner, 2)
    dx[:, i:h:2, j:w:2] = np.where(which == corner, dout, 0.0)
  return dx


# --- Models (section C.1, appendix E) --------------------------------------


def _layers(params: Params, kind: str) -> list[str]:
  """The names of the layers of one kind, in order."""
  count = sum(name.startswith(kind + "_") for name in params)
  return [f"{kind}_{i}" for i in range(count)]


def forward(params: Params, x: np.ndarray) -> tuple[np.ndarray, list[Any]]:
  """The logits of a model; an MLP where there is no convolution.

  Each convolution is followed by a 2x2 max pooling (the first two only) and
  a relu; then flatten, and dense layers with a relu after all but the last.

  Args:
    params: parameters, from which the layers are read.
    x: `[N, H, W, C]`, or any `[N, ...]` for an MLP.

  Returns:
    Logits `[N, classes]`, and what `backward` needs.
  """
  tape: list[Any] = []
  x = np.asarray(x, np.float64)
  for i, name in enumerate(_layers(params, "Conv")):
    out = conv(x, params[name]["kernel"], params[name]["bias"])
    which, shape = None, out.shape
    if i < NUM_POOLED:
      out, which = max_pool(out)
    tape.append((name, x, shape, which, out))
    x = np.maximum(out, 0.0)
  tape.append(("flatten", x.shape))
  x = x.reshape(len(x), -1)
  dense = _layers(params, "Dense")
  for name in dense:
    out = x @ params[name]["kernel"] + params[name]["bias"]
    tape.append((name, x, out))
    x = out if name == dense[-1] else np.maximum(out, 0.0)
  return x, tape


def backward(params: Params, tape: list[Any], dlogits: np.ndarray) -> Params:
  """The gradient for the parameters, given that for the logits."""
  grads = {}
  dout = dlogits
  dense = _layers(params, "Dense")
  for entry in reversed(tape):
    if entry[0] == "flatten":
      dout = dout.reshape(entry[1])
    elif entry[0].startswith("Dense"):
      name, x, out = entry
      if name != dense[-1]:
        dout = dout * (out > 0)
      grads[name] = {"kernel": x.T @ dout, "bias": dout.sum(0)}
      dout = dout @ params[name]["kernel"].T
    else:
      name, x, shape, which, out = entry
      dout = dout * (out > 0)
      if which is not None:
        dout = max_pool_backward(shape, which, dout)
      dout, grads[name] = conv_backward(x, params[name]["kernel"], dout)
  return {name: grads[name] for name in params}


def logits(params: Params, x: np.ndarray) -> np.ndarray:
  """The logits alone."""
  return forward(params, x)[0]


# --- Losses ----------------------------------------------------------------


def log_softmax(z: np.ndarray) -> np.ndarray:
  """Log of the softmax over the last axis."""
  z = z - z.max(-1, keepdims=True)
  return z - np.log(np.exp(z).sum(-1, keepdims=True))


def softmax(z: np.ndarray, temperature: float = 1.0) -> np.ndarray:
  """Tempered softmax, `exp(z_i / T) / sum_j exp(z_j / T)` (section C.4)."""
  return np.exp(log_softmax(np.asarray(z, np.float64) / temperature))


def cross_entropy(z: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
  """Mean softmax cross-entropy of labels `y`, and its gradient for `z`."""
  n = np.arange(len(y))
  loss = -log_softmax(z)[n, y].mean()
  dz = softmax(z)
  dz[n, y] -= 1.0
  return float(loss), dz / len(y)


def kl(target: np.ndarray, z: np.ndarray) -> tuple[float, np.ndarray]:
  """Mean KL(target || softmax(z)) and its gradient for `z` (section C.4).

  Args:
    target: `[N, classes]` probabilities, held fixed.
    z: `[N, classes]` logits of the student, at no temperature.

  Returns:
    The sum over classes averaged over the batch, and its gradient.
  """
  positive = np.where(target > 0, target, 1.0)  # 0 log 0 = 0
  entropy = (target * np.log(positive)).sum(-1)
  loss = (entropy - (target * log_softmax(z)).sum(-1)).mean()
  dz = softmax(z) * target.sum(-1, keepdims=True) - target
  return float(loss), dz / len(z)


def target_distribution(
  teacher_logits: Sequence[np.ndarray],
  temperatures: Sequence[float],
  own_logits: np.ndarray,
  regularization: float,
) -> np.ndarray:
  """What a student is distilled to (section C.4).

  `(1 - r) mean_j softmax(z_j / T_j) + r softmax(z_own)`. With more than one
  teacher the paper leaves the combination open; here, the mean.

  Args:
    teacher_logits: one `[N, classes]` per teacher.
    temperatures: one per teacher.
    own_logits: of the student at the start of the distillation.
    regularization: `r`, the student regularization, in [0, 1].

  Returns:
    `[N, classes]` probabilities.
  """
  if len(teacher_logits) != len(temperatures):
    raise ValueError("one temperature for each teacher")
  total = 0.0
  for z, temperature in zip(teacher_logits, temperatures):
    total = total + softmax(z, temperature)
  mean = total / len(teacher_logits)
  return (1 - regularization) * mean + regularization * softmax(own_logits)


# --- Optimizers (section C.3) ----------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sgd:
  """`w <- w - lr g`."""

  def init(self, params: Params) -> Any:
    """No state."""
    del params
    return ()

  def update(self, grads, state, params, lr):
    """Returns new parameters and state."""
    return tree_map(lambda w, g: w - lr * g, params, grads), state


@dataclasses.dataclass(frozen=True)
class Momentum:
  """`v <- g + decay v; w <- w - lr v` (FedAvgM on the server)."""

  decay: float = 0.9

  def init(self, params: Params) -> Any:
    """The trace `v`, zero."""
    return tree_map(np.zeros_like, params)

  def update(self, grads, state, params, lr):
    """Returns new parameters and state."""
    trace = tree_map(lambda g, v: g + self.decay * v, grads, state)
    return tree_map(lambda w, v: w - lr * v, params, trace), trace


@dataclasses.dataclass(frozen=True)
class Adam:
  """Adam with bias correction; the defaults are the paper's for FedAdam.

  `m <- b1 m + (1 - b1) g; v <- b2 v + (1 - b2) g^2;
  w <- w - lr m_hat / (sqrt(v_hat) + eps)`.
  """

  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-5

  def init(self, params: Params) -> Any:
    """`(count, m, v)`, zero."""
    return 0, tree_map(np.zeros_like, params), tree_map(np.zeros_like, params)

  def _second(self, g, v):
    return self.b2 * v + (1 - self.b2) * g**2

  def update(self, grads, state, params, lr):
    """Returns new parameters and state."""
    count, m, v = state
    count = count + 1
    m = tree_map(lambda g, m: self.b1 * m + (1 - self.b1) * g, grads, m)
    v = tree_map(self._second, grads, v)

    def step(w, m, v):
      m_hat = m / (1 - self.b1**count)
      v_hat = v / (1 - self.b2**count)
      return w - lr * m_hat / (np.sqrt(v_hat) + self.eps)

    return tree_map(step, params, m, v), (count, m, v)


@dataclasses.dataclass(frozen=True)
class Yogi(Adam):
  """Yogi as Optax has it: Adam, but with an additive second moment.

  `v <- v - (1 - b2) sign(v - g^2) g^2`. Both moments start at `initial`
  and both are bias-corrected, as if they had started at zero.
  """

  eps: float = 1e-3
  initial: float = 1e-6

  def init(self, params: Params) -> Any:
    """`(count, m, v)`, both moments at `initial`."""
    full = tree_map(lambda w: np.full_like(w, self.initial), params)
    return 0, full, _copy(full)

  def _second(self, g, v):
    return v - (1 - self.b2) * np.sign(v - g**2) * g**2


DISTILL_ADAM = Adam(eps=1e-8)  # "default hyper-parameters", section C.4.

# --- Clients and federated averaging (sections 2.2, C.3) -------------------


@dataclasses.dataclass
class Client:
  """What one client does in a round.

  Attributes:
    batches: all its steps in order, each `(x, y)`, over all its epochs.
    weight: its number of examples.
  """

  batches: Sequence[Batch]
  weight: float


@dataclasses.dataclass
class Pool:
  """A server model, its optimizer, and the settings of its pool.

  Learning rates are those of the round, already decayed. `Pool.start` makes
  one with a new server optimizer state.

  Attributes:
    params: the server model, theta_i.
    opt_state: state of the server optimizer.
    server: the server optimizer.
    server_lr: its learning rate.
    client_lr: learning rate of the clients' SGD.
    client_momentum: momentum of the clients' SGD, from zero each round.
    prox: mu of the proximal term.
    distill_lr: learning rate of the distillation as a student.
    temperature: T as a teacher.
    regularization: r as a student.
  """

  params: Params
  opt_state: Any
  server: Any
  server_lr: float
  client_lr: float
  client_momentum: float = 0.0
  prox: float = 0.0
  distill_lr: float = 1e-3
  temperature: float = 1.0
  regularization: float = 0.0

  @classmethod
  def start(cls, params: Params, server: Any, **settings) -> "Pool":
    """A pool before its first round."""
    return cls(_copy(params), server.init(params), server, **settings)


def client_update(
  params: Params,
  batches: Sequence[Batch],
  lr: float,
  prox: float = 0.0,
  momentum: float = 0.0,
) -> Params:
  """Trains one client: SGD on cross-entropy (+ mu/2 ||w - w_server||^2).

  Args:
    params: the server's parameters.
    batches: `(x, y)` for each step.
    lr: learning rate.
    prox: mu of the proximal term.
    momentum: decay of the trace.

  Returns:
    The client's delta, server minus client.
  """
  w = _copy(params)
  trace = tree_map(np.zeros_like, params)
  for x, y in batches:
    z, tape = forward(w, x)
    grads = backward(w, tape, cross_entropy(z, y)[1])
    grads = tree_map(lambda g, a, b: g + prox * (a - b), grads, w, params)
    trace = tree_map(lambda g, v: g + momentum * v, grads, trace)
    w = tree_map(lambda a, v: a - lr * v, w, trace)
  return tree_map(lambda a, b: a - b, params, w)


def weighted_mean(trees: Sequence[Params], weights: Sequence[float]) -> Params:
  """`sum_k n_k tree_k / sum_k n_k`."""
  total = tree_map(np.zeros_like, trees[0])
  for tree, weight in zip(trees, weights):
    total = tree_map(lambda a, b, w=weight: a + w * b, total, tree)
  return tree_map(lambda a: a / sum(weights), total)


def client_gradient(pool: Pool, clients: Sequence[Client]) -> Params:
  """`g_i^t`: the clients' mean delta, by number of examples (section 2.2)."""
  deltas = [
    client_update(
      pool.params,
      client.batches,
      pool.client_lr,
      pool.prox,
      pool.client_momentum,
    )
    for client in clients
  ]
  return weighted_mean(deltas, [client.weight for client in clients])


def _server_step(pool: Pool, grads: Params) -> Pool:
  params, state = pool.server.update(
    grads, pool.opt_state, pool.params, pool.server_lr
  )
  return dataclasses.replace(pool, params=params, opt_state=state)


def fedavg_round(pool: Pool, clients: Sequence[Client]) -> Pool:
  """One round of federated averaging of one pool (section C.3)."""
  return _server_step(pool, client_gradient(pool, clients))


# --- Codistillation (Alg. 1 and 2) -----------------------------------------


def distill(
  params: Params,
  teachers: Sequence[Params],
  temperatures: Sequence[float],
  batches: Sequence[np.ndarray],
  lr: float,
  regularization: float,
) -> Params:
  """Distils frozen teachers to a student (section C.4; Alg. 1 l. 5-7).

  Args:
    params: the student's start, which also is its own regularizer.
    teachers: parameters of the teachers.
    temperatures: one per teacher.
    batches: `x` for each of the `s` steps.
    lr: learning rate of a fresh Adam.
    regularization: `r` of the target distribution.

  Returns:
    The student.
  """
  student = _copy(params)
  state = DISTILL_ADAM.init(student)
  for x in batches:
    target = target_distribution(
      [logits(teacher, x) for teacher in teachers],
      temperatures,
      logits(params, x),
      regularization,
    )
    z, tape = forward(student, x)
    grads = backward(student, tape, kl(target, z)[1])
    student, state = DISTILL_ADAM.update(grads, state, student, lr)
  return student


def distill_all(
  pools: Sequence[Pool], batches: Sequence[Sequence[np.ndarray]]
) -> list[Params]:
  """Each pool's student, all from the same frozen copies ("in parallel").

  Args:
    pools: the pools; all the others teach each.
    batches: for each pool as a student, `x` for each step.

  Returns:
    The students.
  """
  students = []
  for i, pool in enumerate(pools):
    others = [other for j, other in enumerate(pools) if j != i]
    students.append(
      distill(
        pool.params,
        [other.params for other in others],
        [other.temperature for other in others],
        batches[i],
        pool.distill_lr,
        pool.regularization,
      )
    )
  return students


def merge(g: Params, delta: Params, alpha: float) -> Params:
  """Eq. 2: `alpha g + (1 - alpha) delta ||g|| / ||delta||`.

  The norms are of the whole model. Where delta is zero, so is its term.
  """
  size = norm(delta)
  scale = norm(g) / size if size > 0 else 0.0
  return tree_map(lambda a, b: alpha * a + (1 - alpha) * b * scale, g, delta)


def periodic_codist_round(
  pools: Sequence[Pool],
  clients: Sequence[Sequence[Client]],
  t: int,
  period: int,
  distill_batches: Sequence[Sequence[np.ndarray]] | None = None,
) -> list[Pool]:
  """One round of PeriodicCodist (Alg. 1 l. 3-9).

  Args:
    pools: the pools at the start of the round.
    clients: for each pool, its clients of this round.
    t: number of the round, from one.
    period: `p`.
    distill_batches: for each pool, `x` for each of the `s` steps; needed
      only if `t % period == 0`.

  Returns:
    The pools after it. After a codistillation the state of the server
    optimizers is new (section C.4).
  """
  pools = [fedavg_round(pool, own) for pool, own in zip(pools, clients)]
  if t % period == 0:
    students = distill_all(pools, distill_batches)
    pools = [
      dataclasses.replace(
        pool, params=student, opt_state=pool.server.init(student)
      )
      for pool, student in zip(pools, students)
    ]
  return pools


def merged_codist_round(
  pools: Sequence[Pool],
  clients: Sequence[Sequence[Client]],
  alpha: float,
  distill_batches: Sequence[Sequence[np.ndarray]],
) -> list[Pool]:
  """One round of MergedCodist (Alg. 2 l. 3-9; eq. 1 and 2).

  Args:
    pools: the pools at the start of the round.
    clients: for each pool, its clients of this round.
    alpha: weight of the clients' gradient; 1 is federated averaging.
    distill_batches: for each pool, `x` for each of the `s` steps.

  Returns:
    The pools after it.
  """
  grads = [client_gradient(pool, own) for pool, own in zip(pools, clients)]
  students = distill_all(pools, distill_batches)
  result = []
  for pool, g, student in zip(pools, grads, students):
    delta = tree_map(lambda a, b: a - b, pool.params, student)  # Eq. 1
    result.append(_server_step(pool, merge(g, delta, alpha)))
  return result
