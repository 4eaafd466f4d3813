"""Rounds of the algorithms against NumPy float64 oracles."""

from hetfl.fedavg import fedavg
from hetfl.lanes import LanePlan
from hetfl.pool import (
  fedadam_server,
  fedavg_server,
  fedavgm_server,
  fedyogi_server,
)
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetfl import codist, core, distill
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
    pools=tuple(
      pool.reset_server(s.replace(params=double(s.params)))
      for pool, s in zip(pools, state.pools)
    )
  )
  return state, [
    oracle.Pool.start(
      jax.tree.map(np.asarray, s.params),
      server,
      server_lr=None,
      client_lr=float(s.hyper["client_lr"]),
      prox=float(s.hyper.get("prox_mu", 0.0)),
    )
    for s in state.pools
  ]


def clients_of(lanes: LanePlan):
  """The oracle's view of a plan: each client's batches and weight."""
  bank = federation.POPULATION.bank
  clients = {}
  for lane in range(len(lanes.steps)):
    for s in range(lanes.steps[lane]):
      k, index = lanes.client[lane, s], lanes.index[lane, s]
      batches, _ = clients.setdefault(k, ([], None))
      batches.append((bank["x"][index].astype(np.float64), bank["y"][index]))
      if lanes.weight[lane, s]:
        clients[k] = (batches, float(lanes.weight[lane, s]))
  return [oracle.Client(*c) for c in clients.values()]


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
  for ours, theirs in zip(state.pools, pools):
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
    plan = federation.make_plan(round, num_lanes=2)
    state, metrics = step(state, plan, federation.make_data())
    decayed(expected, round, 0.0625)
    expected = [
      oracle.fedavg_round(pool, clients_of(lanes))
      for pool, lanes in zip(expected, plan.pools)
    ]
    check(state, expected)
  assert metrics["pool0/client_loss"].count == plan.pools[0].steps.sum()


def codist_case(num_pools, microbatch):
  settings = dict(
    distill_lr=[2**-7, 2**-8, 2**-6][:num_pools],
    temperature=[0.5, 2.0, 1.5][:num_pools],
    regularization=[0.125, 0.25, 0.0][:num_pools],
    final_share=[0.25, 0.5, 0.125][:num_pools],
  )
  distiller = distill.Distiller(
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
  return [[x[index] for index in plan.distill]] * num_pools


@pytest.mark.parametrize("num_pools,microbatch", [(2, None), (3, 2)])
def test_periodic_codist(num_pools, microbatch):
  settings, distiller, pools = codist_case(num_pools, microbatch)
  algorithm = codist.periodic_codist(
    pools, distiller, period=PERIOD, rounds=ROUNDS
  )
  state, expected = start(algorithm, pools, oracle.Adam())
  step = jax.jit(algorithm.step)
  for round in range(1, ROUNDS + 1):
    plan = federation.make_plan(round, num_pools=num_pools)
    state, metrics = step(state, plan, federation.make_data(num_pools))
    decayed(expected, round, 0.0625, settings)
    expected = oracle.periodic_codist_round(
      expected,
      [clients_of(lanes) for lanes in plan.pools],
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
  algorithm = codist.merged_codist(pools, distiller, alpha=0.75, rounds=ROUNDS)
  state, expected = start(algorithm, pools, oracle.Adam())
  step = jax.jit(algorithm.step)
  for round in range(1, ROUNDS + 1):
    plan = federation.make_plan(round, num_pools=num_pools)
    state, _ = step(state, plan, federation.make_data(num_pools))
    decayed(expected, round, 0.0625, settings)
    expected = oracle.merged_codist_round(
      expected,
      [clients_of(lanes) for lanes in plan.pools],
      0.75,
      distill_batches(plan, num_pools),
    )
    check(state, expected)


def test_teachers_may_see_several_batches_at_once(monkeypatch):
  model = federation.make_pools()[1].model
  distiller = distill.Distiller(
    transform=lambda key, batch: {
      **batch,
      "x": batch["x"] + jax.random.normal(key, batch["x"].shape),
    },
  )
  arguments = (
    model.init(jax.random.key(0)),
    jax.random.key(1),
    dict(federation.POPULATION.bank),
    (np.arange(5), np.arange(20).reshape(5, 4)),
  )
  logits = []
  for at_once in (1, 2, 8):  # Two and a rest of one; more than there are.
    monkeypatch.setattr(distill, "_batches_at_once", lambda _, n=at_once: n)
    predict = distiller.predictor(model)
    logits.append(jax.jit(predict)(*arguments))
    # Batch by batch, or not.
    text = str(jax.make_jaxpr(predict)(*arguments))
    assert ("length=5" in text) == (at_once == 1)
  assert logits[0].shape == (5, 4, federation.CLASSES)
  for several in logits[1:]:
    np.testing.assert_allclose(several, logits[0], rtol=1e-5, atol=1e-6)


def test_a_batch_without_divisors_is_warned_of(monkeypatch):
  said = []
  monkeypatch.setattr(
    core.logging, "log_first_n", lambda *args: said.append(args[1] % args[3:])
  )
  assert core.num_parts(37, 16) == 37
  assert "A batch of 37 is cut into 37 parts of 1" in said.pop()
  for batch_size, at_most in ((128, 16), (8, 16), (37, None), (37, 37)):
    core.num_parts(batch_size, at_most)
  assert not said
