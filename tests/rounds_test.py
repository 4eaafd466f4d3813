"""Rounds of the algorithms against NumPy float64 oracles."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetfl import (
  Distiller,
  engine,
  fedadam_server,
  fedavg,
  fedavg_server,
  Learner,
  local,
  merged_codist,
  periodic_codist,
)
from hetfl.algorithms.fedavg import fedavgm_server, fedyogi_server
from tests import federation
from tests.oracles import codist as oracle

ROUNDS, PERIOD = 3, 2
SERVERS = {
  "sgd": (fedavg_server, oracle.Sgd()),
  "momentum": (fedavgm_server, oracle.Momentum()),
  "adam": (fedadam_server, oracle.Adam()),
  "yogi": (fedyogi_server, oracle.Yogi()),
}


@pytest.fixture(autouse=True)
def _float64():
  with jax.enable_x64(True):
    yield


def double(tree):
  return jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), tree)


def start(algorithm, pools, server):
  """A float64 state, and the oracle's pools from the same parameters."""
  state = algorithm.init(jax.random.key(3))
  state = state.replace(
    server=tuple(
      Learner.start(
        s.variables._replace(params=double(s.params)), pool.server_optimizer
      )
      for pool, s in zip(pools, state.server)
    )
  )
  return state, [
    oracle.Pool.start(
      jax.tree.map(np.asarray, s.params),
      server,
      server_lr=None,
      client_lr=float(pool.learning_rate),
      prox=float(pool.prox_mu or 0.0),
    )
    for pool, s in zip(pools, state.server)
  ]


def clients_of(plan, pool):
  """The oracle's view of a plan: each client's batches and weight."""
  bank, rows = federation.POPULATION.bank, plan.batches[f"pool{pool}"]
  return [
    oracle.Client(
      [(bank["x"][i].astype(np.float64), bank["y"][i]) for i in index[:steps]],
      float(weight),
    )
    for index, steps, weight in zip(rows.index, rows.steps, rows.weight)
  ]


def decayed(pools, round, server_lr, distiller_settings=()):
  for i, pool in enumerate(pools):
    decay = 1 - (round - 1) / ROUNDS
    pool.server_lr = server_lr * decay
    if distiller_settings:
      for name, values in distiller_settings.items():
        setattr(pool, name, values[i])
      share = pool.final_share
      pool.distill_lr = pool.distill_lr * (share + (1 - share) * decay)
  return pools


def check(state, pools):
  for ours, theirs in zip(state.server, pools):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8),
      ours.params,
      theirs.params,
    )


@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize("server", SERVERS)
def test_fedavg(server, mu):
  ours, theirs = SERVERS[server]
  pools = federation.make_pools(server_optimizer=ours, prox_mu=mu or None)
  algorithm = fedavg(pools, rounds=ROUNDS)
  state, expected = start(algorithm, pools, theirs)
  step = jax.jit(algorithm.step)
  for round in range(1, ROUNDS + 1):
    plan = federation.make_plan(round)
    state, metrics = step(state, plan, federation.make_data())
    decayed(expected, round, 0.0625)
    expected = [
      oracle.fedavg_round(pool, clients_of(plan, i))
      for i, pool in enumerate(expected)
    ]
    check(state, expected)
  assert metrics["pool0/client_loss"].count == plan.batches["pool0"].steps.sum()


def codist_case(num_pools, microbatch):
  settings = dict(
    distill_lr=[2**-7, 2**-8, 2**-6][:num_pools],
    temperature=[0.5, 2.0, 1.5][:num_pools],
    regularization=[0.125, 0.25, 0.0][:num_pools],
    final_share=[0.25, 0.5, 0.125][:num_pools],
  )
  distiller = Distiller(
    learning_rate=settings["distill_lr"],
    final_share=settings["final_share"],
    temperature=settings["temperature"],
    regularization=settings["regularization"],
    microbatch=microbatch,
    optimizer=optax.adam,
  )
  return settings, distiller, federation.make_pools(num_pools)


def distill_batches(plan, num_pools):
  x = federation.POPULATION.bank["x"].astype(np.float64)
  return [[x[index] for index in plan.batches["distill"].index[0]]] * num_pools


@pytest.mark.parametrize("num_pools,microbatch", [(2, None), (3, 2)])
def test_periodic_codist(num_pools, microbatch):
  settings, distiller, pools = codist_case(num_pools, microbatch)
  algorithm = periodic_codist(pools, distiller, period=PERIOD, rounds=ROUNDS)
  state, expected = start(algorithm, pools, oracle.Adam())
  step = jax.jit(algorithm.step)
  for round in range(1, ROUNDS + 1):
    plan = federation.make_plan(round, num_pools=num_pools)
    state, metrics = step(state, plan, federation.make_data(num_pools))
    decayed(expected, round, 0.0625, settings)
    expected = oracle.periodic_codist_round(
      expected,
      [clients_of(plan, i) for i in range(num_pools)],
      round,
      PERIOD,
      distill_batches(plan, num_pools),
    )
    check(state, expected)
    due = round % PERIOD == 0
    assert metrics["pool1/distill_loss"].count == (3 if due else 0)


@pytest.mark.parametrize("num_pools,microbatch", [(2, 4), (3, None)])
def test_merged_codist(num_pools, microbatch):
  settings, distiller, pools = codist_case(num_pools, microbatch)
  algorithm = merged_codist(pools, distiller, alpha=0.75, rounds=ROUNDS)
  state, expected = start(algorithm, pools, oracle.Adam())
  step = jax.jit(algorithm.step)
  for round in range(1, ROUNDS + 1):
    plan = federation.make_plan(round, num_pools=num_pools)
    state, _ = step(state, plan, federation.make_data(num_pools))
    decayed(expected, round, 0.0625, settings)
    expected = oracle.merged_codist_round(
      expected,
      [clients_of(plan, i) for i in range(num_pools)],
      0.75,
      distill_batches(plan, num_pools),
    )
    check(state, expected)


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_teachers_may_see_several_batches_at_once(at_once):
  """Two, and a rest of one; or more than there are."""
  model = federation.make_pools()[1].model
  distiller = Distiller(
    transform=lambda key, batch: {
      **batch,
      "x": batch["x"] + jax.random.normal(key, batch["x"].shape),
    },
  )
  work = distiller.look(
    distiller.view(model),
    model.init(jax.random.key(0)),
    jax.random.key(1),
    dict(federation.POPULATION.bank),
    federation.make_plan(1).batches["distill"],
    True,
  )
  (several,) = engine.Inline().run(work._replace(at_once=at_once))
  (each,) = engine.Threads(1).run(work)
  assert each.shape == (3, 8, federation.CLASSES)
  np.testing.assert_allclose(several, each, rtol=1e-5, atol=1e-6)


def test_a_batch_without_divisors_is_warned_of(monkeypatch):
  said = []
  monkeypatch.setattr(
    local.logging, "log_first_n", lambda *args: said.append(args[1] % args[3:])
  )
  assert local.num_parts(37, 16) == 37
  assert "A batch of 37 is cut into 37 parts of 1" in said.pop()
  for batch_size, at_most in ((128, 16), (8, 16), (37, None), (37, 37)):
    local.num_parts(batch_size, at_most)
  assert not said
