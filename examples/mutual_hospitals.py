"""Federated Mutual Learning on your own table, with different models.

  python examples/mutual_hospitals.py

Four hospitals hold different numbers of patients' records (569 tumours with 30
measurements each: scikit-learn's breast cancer data, so `pip install
scikit-learn` first). Each keeps its records and a model of its own design. Only
one small network is sent: all hospitals train it, and it teaches their models
and learns from them.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets

import hetfl

WIDTHS = ((), (16,), (64,), (64, 64))  # Of hidden layers; none: linear.


class Mlp(nn.Module):
  """A dense network."""

  widths: tuple[int, ...]

  @nn.compact
  def __call__(self, x):
    """Maps `float[B, 30]` to logits `float[B, 2]`."""
    for width in self.widths:
      x = nn.relu(nn.Dense(width)(x))
    return nn.Dense(2)(x)


def main(rounds: int = 20) -> list[dict[str, float]]:
  """Trains each alone, then all together, and prints both test accuracies."""
  x, y = datasets.load_breast_cancer(return_X_y=True)
  x = (x - x.mean(axis=0)) / x.std(axis=0)
  bank = {"x": x.astype(np.float32), "y": y.astype(np.int32)}
  train, test = np.split(np.random.default_rng(0).permutation(len(x)), [400])
  hospitals = hetfl.ClientPopulation.from_lists(
    bank, np.split(train, [20, 60, 160])
  )
  (on_device,) = hetfl.put_banks(hospitals)
  *models, small = [
    hetfl.Model.from_flax(Mlp(widths), jnp.zeros((1, 30)))
    for widths in (*WIDTHS, (16,))
  ]
  clients = [hetfl.Client(model) for model in models]

  def run(algorithm):
    state, step = algorithm.init(jax.random.key(0)), jax.jit(algorithm.step)
    for t in range(1, rounds + 1):
      plan = hetfl.plan_round(
        {"train": hospitals},
        seed=0,
        round=t,
        batch_size=20,
        epochs=2,
        tail="short",
        uniform_weights=True,
      )
      state, _ = step(state, plan, {"train": on_device})
    return state.server, [hetfl.local_model(state, k) for k in range(4)]

  _, alone = run(hetfl.fml(clients, global_model=None, learning_rate=0.05))
  travels, together = run(
    hetfl.fml(clients, global_model=small, learning_rate=0.05)
  )
  evaluate = hetfl.Evaluator(
    [*models, *models, small], {"test": hetfl.Subset(on_device, test)}
  )
  results = evaluate([*alone, *together, travels])
  shown = [f"{100 * result['test_accuracy']:.1f} %" for result in results]
  for widths, before, after in zip(WIDTHS, shown[:4], shown[4:]):
    print(f"hospital with layers {widths!s:8} alone {before}, with FML {after}")
  print(f"the model that travels: {shown[-1]}")
  return results


if __name__ == "__main__":
  main()
