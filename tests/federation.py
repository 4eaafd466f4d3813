"""A small federation with different models, clients and pools, for tests."""

import gc
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hetfl import core, engine, plan_round, Pool, population
from hetfl.models import layers
from hetfl.models.kernels import ConvForm, convolution

CLASSES = 3


class Mlp(nn.Module):
  """A dense network."""

  width: int
  classes: int = CLASSES

  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Dense(self.width)(x.reshape(x.shape[0], -1)))
    return nn.Dense(self.classes)(x)


class Cnn(nn.Module):
  """The codistillation CNN, tiny."""

  form: ConvForm = "patches"

  @nn.compact
  def __call__(self, x):
    for i, features in enumerate((2, 3, 3)):
      x = layers.Conv(features, (3, 3), form=self.form)(x)
      x = nn.relu(convolution.max_pool_2x2(x) if i < 2 else x)
    x = x.reshape(x.shape[0], -1)
    for width in (4, 5):
      x = nn.relu(nn.Dense(width)(x))
    return nn.Dense(CLASSES)(x)


EXAMPLE = np.zeros((1, 4, 4, 2))
MODELS = (Mlp(5), Cnn(), Mlp(7))
DENSE = (Mlp(5), Mlp(7))  # Which are compiled in half the time.


def make_population(sizes=(3, 7, 4, 9, 5, 12, 2, 6, 8), seed=0):
  """Clients of different sizes with random images."""
  rng = np.random.default_rng(seed)
  n = sum(sizes)
  bank = {
    "x": rng.normal(size=(n, 4, 4, 2)).astype(np.float32),
    "y": rng.integers(0, CLASSES, n).astype(np.int32),
  }
  cuts = np.split(rng.permutation(n), np.cumsum(sizes)[:-1])
  return population.ClientPopulation.from_lists(bank, cuts)


POPULATION = make_population()


def make_pools(num_pools=2, models=MODELS, **settings):
  """Pools of different models with different rates."""
  defaults = dict(learning_rate=0.125, server_lr=0.0625)
  return [
    Pool(
      core.Model.from_flax(models[i], jnp.zeros(EXAMPLE.shape)),
      f"pool{i}",
      **{**defaults, **settings},
    )
    for i in range(num_pools)
  ]


def make_plan(round, *, num_pools=2, distill=True, **settings):
  """A round of four clients a pool, and three distillation steps."""
  defaults = dict(clients_per_round=4, batch_size=3)
  return plan_round(
    {f"pool{i}": POPULATION for i in range(num_pools)},
    POPULATION.examples() if distill else None,
    seed=0,
    round=round,
    distill_steps=3,
    distill_batch_size=8,
    **{**defaults, **settings},
  )


def make_data(num_pools=2):
  """The banks on the device."""
  bank = jax.device_put(dict(POPULATION.bank))
  return {f"pool{i}": bank for i in range(num_pools)} | {"distill": bank}


def run(algorithm, rounds, *, state=None, first=1, data=None, **settings):
  """Runs some rounds and returns the state and the last metrics."""
  state = state or jax.jit(algorithm.init)(jax.random.key(0))
  data = data or make_data(len(state.server))
  for round in range(first, first + rounds):
    plan = make_plan(round, num_pools=len(state.server), **settings)
    state, metrics = algorithm.step(state, plan, data)
  return state, metrics


def jitted(algorithm):
  return algorithm._replace(step=jax.jit(algorithm.step))


def params(state):
  """The pools' parameters."""
  return [learner.params for learner in state.server]


def recorder(length):
  """A linear model whose statistics record its last random draw and input."""

  def apply(variables, x, key, train):
    stats = variables.stats
    if train:
      new = {"draws": jax.random.uniform(key, (1,)), "seen": x[0]}
      stats = {n: jnp.concatenate([new[n], a[:-1]]) for n, a in stats.items()}
    return x @ variables.params, stats

  def init(key):
    zeros = jnp.zeros(length)
    return core.Variables(
      jax.random.normal(key, (1, CLASSES)), {"draws": zeros, "seen": zeros}
    )

  return core.Model(init, apply)


def recorders_bank(n):
  """Examples that are all alike."""
  return {"x": jnp.ones((n, 1)), "y": jnp.zeros(n, jnp.int32)}


def line(*w):
  """A linear model of one input, whose weights begin as they are given."""
  return core.Model(
    lambda key: core.Variables(jnp.array([w]), {}),
    lambda v, x, key, train: (x @ v.params, v.stats),
  )


def double(tree):
  """The same in float64, but for what is no floating number."""
  floats = lambda a: jnp.issubdtype(a.dtype, jnp.floating)
  cast = lambda a: jnp.asarray(a, jnp.float64) if floats(a) else a
  return jax.tree.map(cast, tree)


def plain(tree):
  """The same as NumPy's float64, for an oracle."""
  return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def batches_of(rows, bank):
  """Yields a plan's clients, and the images and labels of their batches."""
  for index, steps, client, _ in zip(*rows):
    held = [row[row >= 0] for row in index[:steps]]
    x = [bank["x"][row].astype(np.float64) for row in held]
    yield int(client), [*zip(x, (bank["y"][row] for row in held))]


def are_freed(refs):
  """Whether objects are freed, soon after threads have worked with them."""
  for _ in range(100):
    gc.collect()
    if not any(ref() for ref in refs):
      return True
    time.sleep(0.05)
  return False


def mesh(size):
  """The first devices, for `engine.Inline`."""
  return jax.make_mesh((size,), (engine.AXIS,), devices=jax.devices()[:size])
