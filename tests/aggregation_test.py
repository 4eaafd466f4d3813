"""Servers that see each client's update, not only their mean."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetfl
from hetfl import core, engine, population
from hetfl.algorithms.fedavg import client_updates
from hetfl.clients import weighted_mean
from tests import federation

make_pools = functools.partial(federation.make_pools, models=federation.DENSE)


def mean(updates):
  share = updates.weight / updates.weight.sum()
  return jax.tree.map(lambda d: jnp.tensordot(share, d, 1), updates.delta)


def median(updates):
  return jax.tree.map(lambda d: jnp.median(d, axis=0), updates.delta)


def engines():
  return {
    "inline": engine.Inline(),
    "threads": engine.Threads(2),
    "mesh": engine.Inline(federation.mesh(3)),  # Not as many rows for each.
  }


def line_of_two():
  """A linear model whose statistics are the mean of its inputs."""
  return core.Model(
    lambda key: core.Variables(jnp.zeros((1, 2)), {"mean": jnp.zeros(())}),
    lambda v, x, key, train: (x @ v.params, {"mean": jnp.mean(x)}),
  )


def federation_of_three(**settings):
  """Clients of 1, 2 and 1 images of classes 0, 0 and 1; x is 1, 2 and 4."""
  bank = {
    "x": jnp.array([[1.0], [2.0], [2.0], [4.0]]),
    "y": jnp.array([0, 0, 0, 1]),
  }
  clients = population.ClientPopulation.from_lists(bank, [[0], [1, 2], [3]])
  plan = hetfl.plan_round({"a": clients}, seed=0, round=1, batch_size=2)
  pool = hetfl.Pool(
    line_of_two(),
    "a",
    learning_rate=1.0,
    server_lr=1.0,
    server_optimizer=hetfl.optimizers.fedavg_server,
    **settings,
  )
  return pool, plan, {"a": bank}


@pytest.mark.parametrize("name", [*engines(), "merged"])
def test_the_weighted_mean_is_fedavgs(name):
  runner, states, losses = engines().get(name, engine.Inline()), [], []
  build, more = hetfl.fedavg, {}
  if name == "merged":
    build = hetfl.merged_codist
    more = dict(distiller=hetfl.Distiller(), alpha=0.5)
  for aggregate in (None, mean):
    pools = make_pools(aggregate=aggregate)
    algorithm = build(pools, rounds=9, engine=runner, **more)
    algorithm = algorithm._replace(step=runner.compile(algorithm.step))
    state, metrics = federation.run(algorithm, 2)
    states.append(federation.params(state))
    losses.append(core.values(metrics))
  # The distillation's Adam amplifies rounding errors.
  chex.assert_trees_all_close(*states, rtol=2e-4, atol=5e-6)
  assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_median_by_hand():
  """From (0, 0), a step of rate 1 on x of class c: x / 2 up, x / 2 down."""
  for aggregate, moved in (
    (None, (1 * 0.5 + 2 * 1.0 - 1 * 2.0) / 4),
    (median, 0.5),
  ):
    pool, plan, data = federation_of_three(aggregate=aggregate)
    algorithm = hetfl.fedavg([pool], rounds=None)
    state = algorithm.init(jax.random.key(0))
    (after,) = algorithm.step(state, plan, data)[0].server
    np.testing.assert_allclose(after.params, [[moved, -moved]], rtol=1e-6)
    # Statistics stay the weighted mean: (1 * 1 + 2 * 2 + 1 * 4) / 4.
    assert float(after.stats["mean"]) == 2.25


def test_who_is_absent_sends_nothing():
  """Not even what a quantiser makes of a delta of 0, which is NaN."""

  def quantised(key, delta):
    del key
    step = optax.tree.max(jax.tree.map(jnp.abs, delta)) / 4
    return jax.tree.map(lambda d: step * jnp.round(d / step), delta)

  pool, plan, data = federation_of_three(delta_transform=quantised)
  after = []
  for absent in (jnp.array([1, 0, 1]), None):  # And a round without client 1.
    batches = plan.batches["a"]
    if absent is None:
      batches = jax.tree.map(lambda a: a[np.array([0, 2])], batches)
    else:
      steps, weight = batches.steps * absent, batches.weight * absent
      batches = batches._replace(steps=steps, weight=weight)
    algorithm = hetfl.fedavg([pool], rounds=None)
    state = algorithm.init(jax.random.key(0))
    round = plan._replace(batches={"a": batches})
    after.append(algorithm.step(state, round, data)[0].server[0].variables)
  assert core.all_finite(after[0])
  chex.assert_trees_all_close(*after)


@pytest.fixture(scope="module")
def alone():
  """Pools, their state, and rounds of each client of a plan by itself."""
  pools = make_pools(
    server_optimizer=hetfl.optimizers.fedavg_server, server_lr=1.0
  )
  algorithm = hetfl.fedavg(pools, rounds=None)
  state, step = algorithm.init(jax.random.key(0)), jax.jit(algorithm.step)
  plan, data, rounds = federation.make_plan(1), federation.make_data(), []
  for k in range(4):
    batches = {
      pool.name: jax.tree.map(
        lambda a, k=k: a[k : k + 1], plan.batches[pool.name]
      )
      for pool in pools
    }
    rounds.append(step(state, hetfl.Plan(plan.round, batches), data))
  return pools, state, rounds


@pytest.mark.parametrize("name", engines())
def test_each_update_is_that_of_its_client_alone(alone, name):
  pools, state, rounds = alone
  plan, data = federation.make_plan(1), federation.make_data()
  runner = engines()[name]
  updates_of = functools.partial(client_updates, pools, engine=runner)
  each = runner.compile(updates_of)(state, plan, data)
  for i, updates in enumerate(each):
    batches = plan.batches[f"pool{i}"]
    np.testing.assert_array_equal(updates.client, batches.client)
    np.testing.assert_array_equal(updates.weight, batches.weight)
    for k, (after, metrics) in enumerate(rounds):
      mine = jax.tree.map(
        lambda w, d, k=k: w - d[k], state.server[i].params, updates.delta
      )
      chex.assert_trees_all_close(
        mine, after.server[i].params, rtol=1e-5, atol=1e-6
      )
      np.testing.assert_allclose(
        updates.loss.value[k],
        metrics[f"pool{i}/client_loss"].value,
        rtol=1e-5,
      )


def test_what_is_no_aggregate_is_refused():
  pool, plan, data = federation_of_three(aggregate=lambda u: u.delta)
  algorithm = hetfl.fedavg([pool], rounds=None)
  state = algorithm.init(jax.random.key(0))
  with pytest.raises(ValueError, match=r"aggregate: .* \(3, 1, 2\)}, expected"):
    algorithm.step(state, plan, data)


def test_trials_may_have_a_median():
  pool, plan, data = federation_of_three(aggregate=median)
  algorithm = hetfl.fedavg([pool], rounds=None)
  start = lambda rate: hetfl.with_hyper(
    algorithm.init(jax.random.key(0)), learning_rate=rate
  )
  states = jax.vmap(start)(jnp.array([0.5, 1.0]))
  step = jax.jit(jax.vmap(algorithm.step, (0, None, None)))
  states, _ = step(states, plan, data)
  np.testing.assert_allclose(
    states.server[0].params[:, 0, 0], [0.25, 0.5], rtol=1e-6
  )


@pytest.mark.parametrize("runner", [engine.Inline(), engine.Threads(2)])
def test_memes_may_be_merged_in_another_way(runner):
  """Of 3 memes two are equal; all of them see class 0, two with x of 1."""
  linear = federation.line(0.0, 0.0)
  bank = {"x": jnp.array([[1.0], [1.0], [4.0], [4.0]]), "y": jnp.zeros(4, int)}
  clients = [
    hetfl.Client(linear),
    hetfl.Client(linear._replace(init=lambda key: linear.init(key))),
    hetfl.Client(linear),
  ]
  held = population.ClientPopulation.from_lists(bank, [[0], [1], [2, 3]])
  plan = hetfl.plan_round({"train": held}, seed=0, round=1, batch_size=2)
  # From (0, 0): beta / 2 x up, of rate 1; the partner says the same, kl 0.
  for merge, expected in (
    (weighted_mean, 0.25 * (1 + 1 + 2 * 4) / 4),
    (lambda memes, w: jax.tree.map(lambda a: jnp.median(a, 0), memes), 0.25),
  ):
    algorithm = hetfl.fml(
      clients,
      global_model=linear,
      learning_rate=1.0,
      optimizer=hetfl.optimizers.fedavg_server,
      merge=merge,
      engine=runner,
    )
    state = algorithm.init(jax.random.key(0))
    step = runner.compile(algorithm.step)
    state, _ = step(state, plan, {"train": bank})
    np.testing.assert_allclose(
      state.server.params, [[expected, -expected]], rtol=1e-6
    )
  short = hetfl.fml(clients, global_model=linear, merge=lambda m, w: m)
  with pytest.raises(ValueError, match=r"merge: .* \(3, 1, 2\)}, expected"):
    short.step(short.init(jax.random.key(0)), plan, {"train": bank})


def noisy(key, delta):
  leaves, structure = jax.tree.flatten(delta)
  keys = jax.random.split(key, len(leaves))
  draws = [d + jax.random.normal(k, d.shape) for k, d in zip(keys, leaves)]
  return structure.unflatten(draws)


def test_what_is_sent_is_noisy_in_the_same_way():
  """Clients of 1 to 4 steps, a stateful optimizer, noise in what is sent."""
  pools = make_pools(
    optimizer=lambda rate: optax.sgd(rate, momentum=0.5),
    delta_transform=noisy,
  )
  plan, data = federation.make_plan(1), federation.make_data()
  assert len(set(plan.batches["pool0"].steps.tolist())) > 1

  def after_a_round(runner):
    algorithm = hetfl.fedavg(pools, rounds=3, engine=runner)
    state = algorithm.init(jax.random.key(0))
    step = runner.compile(algorithm.step)
    return federation.params(step(state, plan, data)[0])

  expected = after_a_round(engine.Inline())
  for runner in (
    engine.Threads(2),
    engine.Inline(federation.mesh(3)),
    engine.Inline(at_once=2),
  ):
    found = after_a_round(runner)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
