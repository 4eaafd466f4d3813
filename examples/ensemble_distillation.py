"""An algorithm of your own from hetfl's parts: FedDF (Lin et al. 2020).

  python examples/ensemble_distillation.py

20 clients have images of two to four digits each. As in FedAvg, ten of them
train in each round, and the server averages their models. FedDF then trains the
average on unlabelled images of the server's, towards the mean of the ten
models' logits. `client_updates` is all that it needs of hetfl: what each client
sends in a round, on any engine.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import hetfl
from hetfl.batches import gather
from hetfl.data.vision import load_digits

CLIENTS, EPOCHS, BATCH, RATE = 10, 5, 5, 0.1
STEPS, STUDENT_BATCH, STUDENT_RATE = 50, 64, 3e-3


class Dense(nn.Module):
  """A dense network."""

  @nn.compact
  def __call__(self, x):
    """Maps images `float[B, 8, 8, 1]` to logits `float[B, 10]`."""
    return nn.Dense(10)(nn.relu(nn.Dense(64)(x.reshape(len(x), -1))))


def scaled(batch):
  """Scales pixels to [0, 1]."""
  return {**batch, "x": batch["x"] / 255.0}


def distil(model, server, updates, bank, index):
  """The clients' mean model, taught by all of them.

  Args:
    model: the model.
    server: the parameters that the round began with.
    updates: the clients' `ClientUpdates`.
    bank: the server's images.
    index: `int32[S, B]`, batches of positions in the bank.

  Returns:
    The student's parameters.
  """
  clients = jax.tree.map(lambda w, d: w - d, server, updates.delta)
  share = updates.weight / updates.weight.sum()
  student = jax.tree.map(lambda w: jnp.tensordot(share, w, 1), clients)
  logits = lambda params, x: model.predict(hetfl.Variables(params, {}), x)
  adam = optax.adam(STUDENT_RATE)

  def step(carry, positions):
    params, opt_state = carry
    x = scaled(gather(bank, positions))["x"]
    target = jax.vmap(logits, (0, None))(clients, x).mean(axis=0)

    def loss(params):
      return optax.kl_divergence(
        nn.log_softmax(logits(params, x)), nn.softmax(target)
      ).mean()

    grads = jax.grad(loss)(params)
    moved, opt_state = adam.update(grads, opt_state)
    return (optax.apply_updates(params, moved), opt_state), None

  (student, _), _ = jax.lax.scan(step, (student, adam.init(student)), index)
  return student


def main(rounds: int = 10) -> tuple[float, float]:
  """Trains both, and prints the accuracies of FedAvg and FedDF."""
  digits, rng = load_digits(), np.random.default_rng(0)
  labels = digits.train["y"]
  public, private = np.split(rng.permutation(len(labels)), [len(labels) // 3])
  shards = np.array_split(private[np.argsort(labels[private])], 40)
  train = hetfl.ClientPopulation.from_lists(
    digits.train, [np.concatenate(shards[k::20]) for k in range(20)]
  )
  unlabelled = hetfl.Subset(digits.train, public)
  test = hetfl.Subset.whole(digits.test)
  model = hetfl.Model.from_flax(Dense(), jnp.zeros((1, 8, 8, 1)))
  pool = hetfl.Pool(
    model,
    "clients",
    learning_rate=RATE,
    server_lr=1.0,
    server_optimizer=hetfl.optimizers.fedavg_server,
    transform=scaled,
  )
  engine = hetfl.default_engine()
  fedavg = hetfl.fedavg([pool], rounds=None, engine=engine)
  fedavg_step = engine.compile(fedavg.step)
  (bank,) = hetfl.put_banks(train)  # Holds the server's images too.
  data = {"clients": bank}

  @engine.compile
  def clients_of(state, plan, data):
    return hetfl.algorithms.fedavg.client_updates(
      [pool], state, plan, data, engine=engine
    )[0]

  @jax.jit
  def taught(server, updates, index):
    params = distil(model, server.params, updates, bank, index)
    return hetfl.Learner(hetfl.Variables(params, {}), server.opt_state)

  def feddf_step(state, plan, data):
    index = plan.batches["distill"].index[0]
    updates = clients_of(state, plan, data)
    return state.replace(server=(taught(*state.server, updates, index),)), {}

  evaluate = hetfl.Evaluator([model], {"test": test}, transform=scaled)
  accuracies = []
  for name, step in (("FedAvg", fedavg_step), ("FedDF", feddf_step)):
    state = fedavg.init(jax.random.key(0))
    for t in range(1, rounds + 1):
      plan = hetfl.plan_round(
        {"clients": train},
        unlabelled,
        seed=0,
        round=t,
        clients_per_round=CLIENTS,
        batch_size=BATCH,
        epochs=EPOCHS,
        distill_steps=STEPS,
        distill_batch_size=STUDENT_BATCH,
      )
      state, _ = step(state, plan, data)
    (found,) = evaluate([state.server[0].variables])
    accuracies.append(found["test_accuracy"])
    print(f"{name} {100 * accuracies[-1]:.1f} %")
  return accuracies[0], accuracies[1]


if __name__ == "__main__":
  main()
