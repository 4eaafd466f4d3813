"""Your own algorithm from hetfl's parts: FedDF (Lin et al. 2020).

  python examples/ensemble_distillation.py

20 clients have images of two to four digits each. As in FedAvg, ten of them
train in each round, and the server averages their models. FedDF then trains the
average on the server's unlabelled images, towards the mean of the ten models'
logits. All it needs from hetfl is `client_updates`: what each client sends in a
round, on any engine.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import hetfl
from hetfl.algorithms.fedavg import client_updates
from hetfl.data.vision import load_digits
from hetfl.optimizers import fedavg_server

flatten = lambda x: x.reshape(len(x), -1)


def scaled(batch):
  """Scales pixels to [0, 1]."""
  return {**batch, "x": batch["x"] / 255.0}


@functools.partial(jax.jit, static_argnums=0)
def distil(model, server, updates, images):
  """The clients' mean model, taught by all of them.

  Args:
    model: the model.
    server: the parameters at the start of the round.
    updates: the clients' `ClientUpdates`.
    images: `uint8[S, B, 8, 8, 1]`, batches of the server's images.

  Returns:
    The student's parameters.
  """
  clients = jax.tree.map(lambda w, d: w - d, server, updates.delta)
  mean = lambda w: jnp.average(w, axis=0, weights=updates.weight)
  student, adam = jax.tree.map(mean, clients), optax.adam(3e-3)
  logits = lambda params, x: model.predict(hetfl.Variables(params, {}), x)

  def loss(params, x):
    teachers = jax.vmap(logits, (0, None))(clients, x).mean(axis=0)
    ours = nn.log_softmax(logits(params, x))
    return optax.kl_divergence(ours, nn.softmax(teachers)).mean()

  def step(carry, x):
    params, opt_state = carry
    grads = jax.grad(loss)(params, x / 255.0)
    moved, opt_state = adam.update(grads, opt_state)
    return (optax.apply_updates(params, moved), opt_state), None

  (student, _), _ = jax.lax.scan(step, (student, adam.init(student)), images)
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
  model = hetfl.Model.from_flax(
    nn.Sequential([flatten, nn.Dense(64), nn.relu, nn.Dense(10)]),
    jnp.zeros((1, 8, 8, 1)),
  )
  pool = hetfl.Pool(
    model,
    "clients",
    learning_rate=0.1,
    server_lr=1.0,
    server_optimizer=fedavg_server,
    transform=scaled,
  )
  engine = hetfl.default_engine()
  fedavg = hetfl.fedavg([pool], rounds=None, engine=engine)
  (bank,) = hetfl.put_banks(train)  # Also holds the server's images.

  def feddf_step(state, plan, data):
    (updates,) = client_updates([pool], state, plan, data, engine=engine)
    images = data["distill"]["x"][plan.batches["distill"].index[0]]
    (server,) = state.server
    params = distil(model, server.params, updates, images)
    server = server._replace(variables=hetfl.Variables(params, {}))
    return state.replace(server=(server,)), {}

  test = {"test": hetfl.Subset.whole(digits.test)}
  evaluate = hetfl.Evaluator([model], test, transform=scaled, engine=engine)
  accuracies = []
  for name, step in (("FedAvg", fedavg.step), ("FedDF", feddf_step)):
    state, step = fedavg.init(jax.random.key(0)), engine.compile(step)
    for t in range(1, rounds + 1):
      plan = hetfl.plan_round(
        {"clients": train},
        unlabelled,
        seed=0,
        round=t,
        clients_per_round=10,
        batch_size=5,
        epochs=5,
        distill_steps=50,
        distill_batch_size=64,
      )
      state, _ = step(state, plan, {"clients": bank, "distill": bank})
    (found,) = evaluate([state.server[0].variables])
    accuracies.append(found["test_accuracy"])
    print(f"{name} {100 * accuracies[-1]:.1f} %")
  return accuracies[0], accuracies[1]


if __name__ == "__main__":
  main()
