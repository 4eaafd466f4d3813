"""FedMD between models of any kind: plain JAX, Flax, your own.

  python examples/fedmd_any_model.py

Each of three companies has 20 handwritten digits and a model of its own: a
linear one in plain JAX, a dense and a convolutional one in Flax. They share
only their models' outputs on 600 public digits, whose labels no model learns
from.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import hetfl
from hetfl.data.vision import load_digits


class Dense(nn.Module):
  """A dense network."""

  @nn.compact
  def __call__(self, x):
    """Maps images `float[B, 8, 8, 1]` to logits `float[B, 10]`."""
    return nn.Dense(10)(nn.relu(nn.Dense(64)(x.reshape(len(x), -1))))


class Convolutional(nn.Module):
  """A convolutional network."""

  @nn.compact
  def __call__(self, x):
    """Maps images `float[B, 8, 8, 1]` to logits `float[B, 10]`."""
    x = nn.relu(nn.Conv(16, (3, 3), strides=2)(x))
    return nn.Dense(10)(x.reshape(len(x), -1))


def linear() -> hetfl.Model:
  """A linear model without any library: an `init` and an `apply`."""

  def init(key):
    del key
    return hetfl.Variables(jnp.zeros((64, 10)), {})

  def apply(variables, x, key, train):
    del key, train
    return x.reshape(len(x), -1) @ variables.params, variables.stats

  return hetfl.Model(init, apply)


def prepare(batch):
  """Scales pixels to [0, 1]."""
  return {**batch, "x": batch["x"] / 255.0}


def main(rounds: int = 15) -> list[list[dict[str, float]]]:
  """Trains each alone, then all together, and prints both test accuracies."""
  digits = load_digits()
  order = np.random.default_rng(0).permutation(len(digits.train["y"]))
  companies = hetfl.ClientPopulation.from_lists(
    digits.train, np.split(order[:60], 3)
  )
  public = hetfl.Subset(digits.train, order[60:660])
  bank, test = hetfl.put_banks(companies, hetfl.Subset.whole(digits.test))

  example = jnp.zeros((1, 8, 8, 1))
  parties = [
    hetfl.Participant(
      model,
      name,
      learning_rate=rate,
      optimizer=hetfl.optimizers.keras_adam,
      transform=prepare,
    )
    for name, model, rate in (
      ("linear", linear(), 1e-2),
      ("dense", hetfl.Model.from_flax(Dense(), example), 1e-3),
      ("cnn", hetfl.Model.from_flax(Convolutional(), example), 1e-3),
    )
  ]
  names = [party.name for party in parties]
  private = dict(zip(names, companies.subsets()))
  data = dict.fromkeys(("public", *names), bank)
  evaluate = hetfl.Evaluator(
    [party.model for party in parties],
    {"test": hetfl.Subset.whole(test)},
    transform=prepare,
  )

  # Each by itself, on its own data.
  alone = hetfl.fit(parties)
  state, step = alone.init(jax.random.key(0)), jax.jit(alone.step)
  for epoch in range(1, 101):
    plan = hetfl.plan_fit(private, seed=0, round=epoch, batch_size=5)
    state, _ = step(state, plan, data)
  trained = [party.learner for party in state.clients]
  results = [evaluate([learner.variables for learner in trained])]

  # Then together.
  together = hetfl.fedmd(parties, public_transform=prepare)
  state = together.init(jax.random.key(1), trained)
  step = jax.jit(together.step)
  for t in range(1, rounds + 1):
    plan = hetfl.plan_fedmd(
      public, private, seed=0, round=t, subset=300, digest_batch_size=20
    )
    state, _ = step(state, plan, data)
  results.append(evaluate([learner.variables for learner in state.clients]))

  for party, *both in zip(parties, *results):
    before, after = (100 * result["test_accuracy"] for result in both)
    print(f"{party.name:7} alone {before:.1f} %, with FedMD {after:.1f} %")
  return results


if __name__ == "__main__":
  main()
