"""Clipped and noisy means of clients, and what they are worth."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import optimize, stats

import hetfl
from hetfl import core, engine, optimizers, privacy
from hetfl.algorithms.fedavg import client_updates, round_keys
from hetfl.algorithms.feddf import feddf
from tests import algorithms, federation
from tests.oracles import codist as oracle
from tests.rounds_test import clients_of, start

K, CLIP, Z = 4, 0.05, 0.75  # Shorter than most updates.
MEAN = privacy.PrivateMean(CLIP, Z, K)


def make_pools(num_pools=2, **settings):
  given = dict(
    models=federation.DENSE,
    private=MEAN,
    server_optimizer=optimizers.fedavg_server,
    server_lr=1.0,
  )
  return federation.make_pools(num_pools, **{**given, **settings})


make_plan = functools.partial(federation.make_plan, poisson=True)


def noise_of(state, round, pool):
  """What the pool's server draws in a round."""
  key = round_keys(state.key, jnp.array(round), len(state.server))[pool]
  key = jax.random.fold_in(key, np.uint32(2**32 - 1))
  return optax.tree.random_like(key, state.server[pool].params)


def test_a_round_against_numpy():
  """`w - (sum_k clip(w - w_k) + z C noise) / K`, whatever the weights."""
  with jax.enable_x64(True):
    pools = make_pools()
    algorithm = hetfl.fedavg(pools, rounds=None)
    state, expected = start(algorithm, pools, oracle.Sgd())
    plan = make_plan(2)
    after, _ = jax.jit(algorithm.step)(state, plan, federation.make_data())
    for i, (pool, new) in enumerate(zip(expected, after.server)):
      clients = [c for c in clients_of(plan.batches[f"pool{i}"]) if c.weight]
      assert len({c.weight for c in clients}) > 1
      total = jax.tree.map(
        lambda n: Z * CLIP * np.asarray(n), noise_of(state, 2, i)
      )
      for client in clients:
        delta = oracle.client_update(
          pool.params, client.batches, pool.client_lr
        )
        sent = oracle.tree_map(
          functools.partial(np.multiply, min(1, CLIP / oracle.norm(delta))),
          delta,
        )
        total = jax.tree.map(np.add, total, sent)
      expected = jax.tree.map(lambda w, t: w - t / K, pool.params, total)
      chex.assert_trees_all_close(new.params, expected, rtol=1e-9, atol=1e-12)


def test_noise_is_there_in_a_round_without_clients():
  """Or else their number would be told."""
  pools = make_pools(1)
  algorithm = hetfl.fedavg(pools, rounds=None)
  state = algorithm.init(jax.random.key(0))
  plan = make_plan(1, num_pools=1, dropout_rate=1.0)
  after, _ = algorithm.step(state, plan, federation.make_data(1))
  change = optax.tree.sub(state.server[0].params, after.server[0].params)
  expected = jax.tree.map(lambda n: Z * CLIP / K * n, noise_of(state, 1, 0))
  chex.assert_trees_all_close(change, expected, rtol=1e-4, atol=1e-6)


def test_merged_codist_merges_noisy_means():
  """With alpha = 1 it is FedAvg; the distillation is as long as the mean."""
  pools, plan, data = make_pools(), make_plan(1), federation.make_data()
  build = functools.partial(
    hetfl.merged_codist, pools, algorithms.make_distiller(), rounds=None
  )
  fedavg = hetfl.fedavg(pools, rounds=None)
  state = fedavg.init(jax.random.key(0))
  same, _ = fedavg.step(state, plan, data)
  one = build(alpha=1.0)
  found, _ = one.step(one.init(jax.random.key(0)), plan, data)
  chex.assert_trees_all_equal(found.server, same.server)
  half = build(alpha=0.5)
  found, _ = half.step(half.init(jax.random.key(0)), plan, data)
  for old, plain, new in zip(state.server, same.server, found.server):
    g, merged = (optax.tree.sub(old.params, x.params) for x in (plain, new))
    rest = optax.tree.sub(merged, optax.tree.scale(0.5, g))
    np.testing.assert_allclose(
      optax.tree.norm(rest), 0.5 * optax.tree.norm(g), rtol=1e-4
    )


def test_engines_rounds_in_one_program_and_trials_side_by_side():
  """Noise is of the round and the run's key, wherever the clients are."""
  pools = make_pools(1)
  build = functools.partial(hetfl.fedavg, pools, rounds=None)
  plans = [make_plan(t, num_pools=1) for t in (1, 2, 3)]
  keys = jax.random.split(jax.random.key(1), 2)

  def after(runner, *keys):
    """The parameters after the rounds, one after another, of each key."""
    algorithm, data = build(engine=runner), federation.make_data(1)
    init, step = jax.jit(algorithm.init), runner.compile(algorithm.step)
    ends = []
    for state in map(init, keys):
      for plan in plans:
        state, _ = step(state, plan, data)
      ends.append(federation.params(state))
    return ends

  expected = after(engine.Inline(), *keys)
  assert_close = functools.partial(
    chex.assert_trees_all_close, rtol=1e-4, atol=1e-5
  )
  for runner in (engine.Threads(2), engine.Inline(federation.mesh(2))):
    assert_close(after(runner, keys[0]), expected[:1])

  def scanned(key):
    algorithm, data = build(), federation.make_data(1)
    step = lambda state, plan: algorithm.step(state, plan, data)
    state, _ = jax.lax.scan(step, algorithm.init(key), hetfl.stack_plans(plans))
    return federation.params(state)

  both = jax.jit(jax.vmap(scanned))(keys)
  for i, one in enumerate(expected):
    assert_close(jax.tree.map(lambda a, i=i: a[i], both), one)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e6, 1e30, np.inf, np.nan])
def test_no_update_is_longer_than_the_clip(scale):
  delta = {"a": jnp.array([3.0, 0.0]) * scale, "b": jnp.array([[-4.0]])}
  sent = privacy.PrivateMean(10.0, 1.0, 1).clip(delta)
  assert float(optax.tree.norm(sent)) <= 10 * (1 + 1e-6)
  if scale in (0, 1e-3, 1):  # Shorter ones stay as they are.
    chex.assert_trees_all_equal(sent, delta)


def test_who_does_not_move_has_a_slope():
  clip = privacy.PrivateMean(1.0, 1.0, 1).clip
  assert jax.grad(lambda x: clip(jnp.zeros(2) + x).sum())(0.0) == 2


def test_each_client_is_drawn_on_its_own():
  """With K / N, so that the number of clients varies; that of rows does not."""
  n, rounds = 60, 400
  clients = hetfl.ClientPopulation.from_lists(
    {"x": np.zeros((n, 1)), "y": np.zeros(n)}, np.arange(n)[:, None]
  )
  plans = [
    hetfl.plan_round(
      {"a": clients},
      seed=0,
      round=t,
      clients_per_round=6,
      batch_size=1,
      poisson=True,
    ).batches["a"]
    for t in range(1, rounds + 1)
  ]
  there = np.zeros((rounds, n))
  for row, batches in zip(there, plans):
    row[batches.client[batches.weight > 0]] = 1
  assert len({batches.index.shape for batches in plans}) == 1
  # Binomial: 0.1, within five deviations; the sum's variance is N q (1 - q).
  np.testing.assert_allclose(there.mean(axis=0), 0.1, atol=0.075)
  np.testing.assert_allclose(there.mean(), 0.1, atol=0.01)
  np.testing.assert_allclose(there.sum(axis=1).var(), 60 * 0.1 * 0.9, rtol=0.3)
  everyone = federation.make_plan(1, poisson=True, clients_per_round=9)
  assert everyone.batches["pool0"].weight.all()


def of_gaussian(z, delta):
  """Epsilon of a Gaussian mechanism (Balle & Wang 2018, theorem 8)."""
  cdf = stats.norm.cdf

  def gap(e):
    a, b = 1 / (2 * z), e * z
    return cdf(a - b) - np.exp(e) * cdf(-a - b) - delta

  return optimize.brentq(gap, 0, 100)


@pytest.mark.parametrize(
  "z,sampling,rounds,delta,expected",
  [
    # The tests of dp-accounting.
    (np.sqrt(3), [1.0], 3, 0.126936, 1),
    (0.5, [0.2], 3, 0.15594, 1),
    # By hand: releases of everyone are one, with z / sqrt(releases).
    (1.0, [1.0], 1, 1e-5, of_gaussian(1.0, 1e-5)),
    (4.0, [1.0, 1.0], 8, 1e-3, of_gaussian(1.0, 1e-3)),
    # A single one of some: log(1 + q (exp(epsilon) - 1)), at delta / q.
    (1.0, [0.1], 1, 1e-3, np.log1p(0.1 * np.expm1(of_gaussian(1.0, 1e-2)))),
    (0.0, [0.1], 1, 1e-3, np.inf),
  ],
)
def test_epsilon(z, sampling, rounds, delta, expected):
  found = privacy.epsilon(z, sampling, rounds=rounds, delta=delta)
  assert found == pytest.approx(expected, abs=2e-3)


def test_noise_for_an_epsilon():
  given = dict(sampling=(0.2, 0.5), rounds=30, delta=1e-3)
  for epsilon in (0.5, 8.0):
    z = privacy.noise_multiplier(epsilon, **given)
    found = privacy.epsilon(z, **given)
    assert 0.99 * epsilon < found <= epsilon
  # A pool more costs more, and a round more, too.
  one_pool = {**given, "sampling": (0.2,)}
  assert privacy.noise_multiplier(8.0, **one_pool) < z
  assert privacy.epsilon(z, **{**given, "rounds": 31}) > found


def test_what_would_not_be_private_is_refused():
  plan, data = make_plan(1, num_pools=1), federation.make_data(1)

  def refuses(build, match, **settings):
    algorithm = build(make_pools(1, **settings))
    with pytest.raises(ValueError, match=match):
      algorithm.step(algorithm.init(jax.random.key(0)), plan, data)

  plain = functools.partial(hetfl.fedavg, rounds=None)
  seen = "pool 'pool0': private: noise is in the sum"
  refuses(plain, seen, aggregate=lambda updates: updates.delta)
  ensemble = lambda pools: feddf(pools, algorithms.make_distiller(), rounds=1)
  refuses(ensemble, seen)
  pools = make_pools(1)
  state = plain(pools).init(jax.random.key(0))
  with pytest.raises(ValueError, match=seen):
    client_updates(pools, state, plan, data)
  (pool,) = make_pools(1)
  model = core.Model(
    lambda key: core.Variables(
      pool.model.init(key).params, {"mean": jnp.ones(1)}
    ),
    lambda v, x, key, train: (
      pool.model.apply(v._replace(stats={}), x, key, train)[0],
      v.stats,
    ),
  )
  pools = [
    hetfl.Pool(model, "a", learning_rate=1.0, server_lr=1.0, private=MEAN)
  ]
  algorithm = plain(pools)
  with pytest.raises(ValueError, match="pool 'a': private: its model's stat"):
    algorithm.step(
      algorithm.init(jax.random.key(0)),
      hetfl.plan_round(
        {"a": federation.POPULATION},
        seed=0,
        round=1,
        batch_size=1,
        poisson=True,
      ),
      {"a": data["pool0"]},
    )
  for name in ("clip_norm", "clients_per_round"):
    values = dict(clip_norm=1.0, noise_multiplier=1.0, clients_per_round=1)
    with pytest.raises(ValueError, match=f"{name}=0"):
      privacy.PrivateMean(**{**values, name: 0})
  with pytest.raises(ValueError, match="noise_multiplier=-1"):
    privacy.PrivateMean(1.0, -1.0, 1)
  with pytest.raises(ValueError, match="delta=0"):
    privacy.epsilon(1.0, [0.5], rounds=1, delta=0)
