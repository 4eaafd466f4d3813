"""FedMD between models of any kind: plain JAX, Flax, or your own.

  python examples/fedmd_any_model.py

Each of three companies has 20 handwritten digits and its own model: a linear
one in plain JAX, a dense one and a convolutional one in Flax. They share only
their models' outputs on 600 public digits, whose labels no model learns from.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import hetfl
from hetfl.algorithms.fit import plan_fit
from hetfl.data.vision import load_digits
from hetfl.optimizers import keras_adam


def prepare(batch):
  """Scales pixels to [0, 1]."""
  return {**batch, "x": batch["x"] / 255.0}


flatten = lambda x: x.reshape(len(x), -1)
linear = hetfl.Model(  # Initial parameters, outputs; no statistics.
  init=lambda key: hetfl.Variables(jnp.zeros((64, 10)), {}),
  apply=lambda variables, x, key, train: (flatten(x) @ variables.params, {}),
)
dense = nn.Sequential([flatten, nn.Dense(64), nn.relu, nn.Dense(10)])
conv = nn.Conv(16, (3, 3), strides=2)
cnn = nn.Sequential([conv, nn.relu, flatten, nn.Dense(10)])
example = jnp.zeros((1, 8, 8, 1))
company = functools.partial(
  hetfl.Participant, optimizer=keras_adam, transform=prepare
)
PARTIES = [
  company(linear, "linear", learning_rate=1e-2),
  company(hetfl.Model.from_flax(dense, example), "dense", learning_rate=1e-3),
  company(hetfl.Model.from_flax(cnn, example), "cnn", learning_rate=1e-3),
]


def main(rounds: int = 15) -> list[list[dict[str, float]]]:
  """Trains each alone, then all together, and prints both test accuracies."""
  digits = load_digits()
  order = np.random.default_rng(0).permutation(len(digits.train["y"]))
  public = hetfl.Subset(digits.train, order[60:660])
  private = {
    party.name: hetfl.Subset(digits.train, positions)
    for party, positions in zip(PARTIES, np.split(order[:60], 3))
  }
  (bank,) = hetfl.put_banks(public)  # Also holds the companies' digits.
  data = dict.fromkeys(("public", *private), bank)

  def train(algorithm, plan, rounds, trained=None):
    state = algorithm.init(jax.random.key(0), trained)
    step = jax.jit(algorithm.step)
    for t in range(1, rounds + 1):
      state, _ = step(state, plan(seed=0, round=t), data)
    return state.clients

  epoch = functools.partial(plan_fit, private, batch_size=5)
  alone = [party.learner for party in train(hetfl.fit(PARTIES), epoch, 100)]
  fedmd = hetfl.fedmd(PARTIES, public_transform=prepare)
  plan = functools.partial(
    hetfl.plan_fedmd, public, private, subset=300, digest_batch_size=20
  )
  together = train(fedmd, plan, rounds, alone)

  evaluate = hetfl.Evaluator(
    [party.model for party in PARTIES],
    {"test": hetfl.Subset.whole(digits.test)},
    transform=prepare,
  )
  results = [evaluate([x.variables for x in of]) for of in (alone, together)]
  for party, *both in zip(PARTIES, *results):
    before, after = (100 * result["test_accuracy"] for result in both)
    print(f"{party.name:7} alone {before:.1f} %, with FedMD {after:.1f} %")
  return results


if __name__ == "__main__":
  main()
