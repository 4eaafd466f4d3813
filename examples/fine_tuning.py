"""hetfl's step functions in a custom loop: personalisation.

  python examples/fine_tuning.py

FedAvg trains one model for 20 clients, each with images of two to four digits.
Then each client takes a few more steps from that model: the same local steps as
in FedAvg, under a `jax.vmap` over clients and a `jax.lax.scan` over steps. Each
client is tested on its own images that no client trained on.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import hetfl
from hetfl.batches import gather
from hetfl.data.vision import load_digits
from hetfl.local import step_of

BATCH, STEPS, RATE = 5, 20, 0.1
flatten = lambda x: x.reshape(len(x), -1)


def prepare(batch):
  """Scales pixels to [0, 1]."""
  return {**batch, "x": batch["x"] / 255.0}


def main(rounds: int = 40) -> tuple[float, float]:
  """Trains, and prints the mean accuracy before and after fine-tuning."""
  digits, rng = load_digits().train, np.random.default_rng(0)
  shards = np.array_split(np.argsort(digits["y"], kind="stable"), 40)
  holdings = [rng.permutation(np.concatenate(shards[k::20])) for k in range(20)]
  train, test = (
    hetfl.ClientPopulation.from_lists(digits, halves)
    for halves in zip(*(np.array_split(held, 2) for held in holdings))
  )
  (bank,) = hetfl.put_banks(train)
  model = hetfl.Model.from_flax(
    nn.Sequential([flatten, nn.Dense(64), nn.relu, nn.Dense(10)]),
    jnp.zeros((1, 8, 8, 1)),
  )
  pool = hetfl.Pool(
    model, "all", learning_rate=RATE, server_lr=0.01, transform=prepare
  )
  algorithm = hetfl.fedavg([pool], rounds=rounds)
  state, step = algorithm.init(jax.random.key(0)), jax.jit(algorithm.step)
  for t in range(1, rounds + 1):
    plan = hetfl.plan_round(
      {"all": train}, seed=0, round=t, clients_per_round=10, batch_size=BATCH
    )
    state, _ = step(state, plan, {"all": bank})
  server, local_step = state.server[0].variables, step_of(pool)

  def fine_tuned(key, index):
    """A client's model after its own steps on batches `int32[S, B]`."""

    def one(learner, row):
      step_key, positions = row
      batch = prepare(gather(bank, positions))
      return local_step(learner, batch, step_key, {"learning_rate": RATE})

    rows = (jax.random.split(key, len(index)), index)
    start = hetfl.Learner.start(server, pool.optimizer)
    return jax.lax.scan(one, start, rows)[0].variables

  keys = jax.random.split(jax.random.key(1), len(train))
  batches = np.stack(
    [rng.choice(held.index, (STEPS, BATCH)) for held in train.subsets()]
  )
  personal = jax.jit(jax.vmap(fine_tuned))(keys, batches)
  evaluate = hetfl.ClientEvaluator(model, test, transform=prepare)
  before = evaluate(server)["accuracy"].mean()
  after = evaluate(personal, own=True)["accuracy"].mean()
  print(
    f"one model for all {100 * before:.1f} %, fine-tuned {100 * after:.1f} %"
  )
  return before, after


if __name__ == "__main__":
  main()
