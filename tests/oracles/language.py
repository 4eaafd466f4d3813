"""The next-word LSTM and one client's training, in NumPy float64.

Slow and plain, every gradient derived by hand, word by word and without the
simulator's tricks. Parameters are nested as Flax has them.

Reference: FedJAX, `fedjax/models/stackoverflow.py`; dm-haiku, `hk.LSTM`.
"""

import numpy as np

from tests.oracles.codist import softmax

PAD, EOS = 0, 2


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def lstm(p, x):
  """Outputs `[B, T, H]` and what the gradient needs."""
  size = p["recurrent"].shape[0]
  h = c = np.zeros((len(x), size))
  out, tape = [], []
  for t in range(x.shape[1]):
    z = x[:, t] @ p["kernel"] + h @ p["recurrent"] + p["bias"]
    i, g, f, o = np.split(z, 4, -1)
    i, g, f, o = sigmoid(i), np.tanh(g), sigmoid(f + 1), sigmoid(o)
    tape.append((h, c, i, g, f, o))
    c = f * c + i * g
    h = o * np.tanh(c)
    out.append(h)
  return np.stack(out, 1), tape


def lstm_backward(p, x, tape, dout):
  grads = {k: np.zeros_like(v) for k, v in p.items()}
  dx = np.zeros_like(x)
  dh = dc = np.zeros_like(dout[:, 0])
  for t in reversed(range(x.shape[1])):
    h, c, i, g, f, o = tape[t]
    new = f * c + i * g
    dh = dh + dout[:, t]
    dc = dc + dh * o * (1 - np.tanh(new) ** 2)
    dz = np.concatenate(
      [
        dc * g * i * (1 - i),
        dc * i * (1 - g * g),
        dc * c * f * (1 - f),
        dh * np.tanh(new) * o * (1 - o),
      ],
      -1,
    )
    grads["kernel"] += x[:, t].T @ dz
    grads["recurrent"] += h.T @ dz
    grads["bias"] += dz.sum(0)
    dx[:, t] = dz @ p["kernel"].T
    dh, dc = dz @ p["recurrent"].T, dc * f
  return dx, grads


def forward(p, x):
  """Logits `[B, T, V]` and what the gradient needs."""
  h = p["embedding"][x]
  tape = []
  for layer in range(sum(name.startswith("LSTM") for name in p)):
    out, steps = lstm(p[f"LSTM_{layer}"], h)
    tape.append((h, out, steps))
    dense = p[f"Dense_{layer}"]
    h = np.tanh(out) @ dense["kernel"] + dense["bias"]
  return h @ p["output_kernel"] + p["output_bias"], (tape, h)


def backward(p, x, saved, dz):
  """Gradients of the parameters, from those of the logits."""
  tape, h = saved
  rows = lambda a: a.reshape(-1, a.shape[-1])
  grads = {
    "output_kernel": rows(h).T @ rows(dz),
    "output_bias": rows(dz).sum(0),
  }
  dh = dz @ p["output_kernel"].T
  for layer in reversed(range(len(tape))):
    before, out, steps = tape[layer]
    squashed = np.tanh(out)
    grads[f"Dense_{layer}"] = {
      "kernel": rows(squashed).T @ rows(dh),
      "bias": rows(dh).sum(0),
    }
    dout = dh @ p[f"Dense_{layer}"]["kernel"].T * (1 - squashed**2)
    dh, grads[f"LSTM_{layer}"] = lstm_backward(
      p[f"LSTM_{layer}"], before, steps, dout
    )
  grads["embedding"] = np.zeros_like(p["embedding"])
  for b in range(x.shape[0]):
    for t in range(x.shape[1]):
      grads["embedding"][x[b, t]] += dh[b, t]
  return grads


def loss_and_gradient(p, x, y, expected_length=13.3):
  """FedJAX's sentence loss: a sum over words / 13.3, a mean over sentences."""
  z, saved = forward(p, x)
  q = softmax(z)
  total, dz = 0.0, np.zeros_like(z)
  for b in range(len(y)):
    for t in range(y.shape[1]):
      if y[b, t] != PAD:
        total -= np.log(q[b, t, y[b, t]])
        dz[b, t] = q[b, t]
        dz[b, t, y[b, t]] -= 1
  scale = expected_length * len(y)
  return total / scale, backward(p, x, saved, dz / scale)


def divergence_and_gradient(p, x, y, teachers, temperatures, r, labels=0.0):
  """Mean KL to the codistillation target over words, and its gradient."""
  z, saved = forward(p, x)
  q = softmax(z)
  views = [
    softmax(forward(t, x)[0] / T) for t, T in zip(teachers, temperatures)
  ]
  teacher = sum(views) / len(views)
  teacher = (1 - labels) * teacher + labels * np.eye(z.shape[-1])[y]
  target = (1 - r) * teacher + r * q
  words = (y != PAD)[..., None]
  count = words.sum()
  terms = np.where(target > 0, target * np.log(target / q + (target == 0)), 0)
  return (words * terms).sum() / count, backward(
    p, x, saved, words * (q - target) / count
  )


def accuracies(z, y):
  """In vocabulary, and without EOS; counted word by word."""
  in_vocabulary, without_eos = [], []
  for row, words in zip(z, y):
    for logits, word in zip(row, words):
      if word not in (PAD, EOS):
        without_eos.append(logits.argmax() == word)
        allowed = logits.copy()
        allowed[[0, 1, 2, -1]] = -np.inf
        in_vocabulary.append(allowed.argmax() == word)
  return np.mean(in_vocabulary), np.mean(without_eos)
