"""Rounds of the algorithms against NumPy float64 oracles."""

import chex
import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import hetfl
from hetfl import distill, local, optimizers
from tests import federation
from tests.federation import batches_of, double, plain
from tests.oracles import codist as oracle

# Decays of 1, 3/4 and 1/2 are exact in float32, in which rates are kept: where
# a gradient is tiny, Adam would make much of a rounded one.
ROUNDS, PERIOD = 4, 2
SERVERS = {
  "sgd": (optimizers.fedavg_server, oracle.Sgd()),
  "momentum": (optimizers.fedavgm_server, oracle.Momentum()),
  "adam": (optimizers.fedadam_server, oracle.Adam()),
  "yogi": (optimizers.fedyogi_server, oracle.Yogi()),
}


@pytest.fixture(autouse=True)
def _float64():
  with jax.enable_x64(True):
    yield


def start(algorithm, pools, server):
  """A float64 state, and the oracle's pools from the same parameters."""
  state = algorithm.init(jax.random.key(3))
  state = state.replace(
    server=tuple(
      local.Learner.start(
        learner.variables._replace(params=double(learner.params)),
        pool.server_optimizer,
      )
      for pool, learner in zip(pools, state.server)
    )
  )
  prox = state.hyper.get("prox_mu", np.zeros(len(pools)))
  return state, [
    oracle.Pool.start(
      plain(learner.params),
      server,
      server_lr=None,
      client_lr=float(state.hyper["learning_rate"][i]),
      prox=float(prox[i]),
    )
    for i, learner in enumerate(state.server)
  ]


def clients_of(batches: hetfl.Batches):
  """The oracle's view of a plan: each client's batches and weight."""
  each = batches_of(batches, federation.POPULATION.bank)
  return [
    oracle.Client(of, float(weight))
    for (_, of), weight in zip(each, batches.weight)
  ]


def of_pools(plan):
  """The plan's clients, pool by pool."""
  return [
    clients_of(batches)
    for name, batches in plan.batches.items()
    if name != "distill"
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
    chex.assert_trees_all_close(
      ours.params, theirs.params, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize(
  "server,mu",
  [("sgd", 0.0), ("sgd", 0.5), ("momentum", 0.0), ("adam", 0.0), ("yogi", 0.5)],
)
def test_fedavg(server, mu):
  ours, theirs = SERVERS[server]
  pools = federation.make_pools(server_optimizer=ours, prox_mu=mu or None)
  algorithm = hetfl.fedavg(pools, rounds=ROUNDS)
  state, expected = start(algorithm, pools, theirs)
  step = jax.jit(algorithm.step)
  for round in range(1, ROUNDS):
    plan = federation.make_plan(round)
    state, metrics = step(state, plan, federation.make_data())
    decayed(expected, round, 0.0625)
    expected = [
      oracle.fedavg_round(pool, clients)
      for pool, clients in zip(expected, of_pools(plan))
    ]
    check(state, expected)
  steps = plan.batches["pool0"].steps.sum()
  assert metrics["pool0/client_loss"].count == steps


def codist_case(num_pools, microbatch):
  settings = dict(
    distill_lr=[2**-7, 2**-8, 2**-6][:num_pools],
    temperature=[0.5, 2.0, 1.5][:num_pools],
    regularization=[0.125, 0.25, 0.0][:num_pools],
    final_share=[0.25, 0.5, 0.125][:num_pools],
  )
  distiller = hetfl.Distiller(
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
  algorithm = hetfl.periodic_codist(
    pools, distiller, period=PERIOD, rounds=ROUNDS
  )
  state, expected = start(algorithm, pools, oracle.Adam())
  step = jax.jit(algorithm.step)
  for round in range(1, ROUNDS):
    plan = federation.make_plan(round, num_pools=num_pools)
    state, metrics = step(state, plan, federation.make_data(num_pools))
    decayed(expected, round, 0.0625, settings)
    expected = oracle.periodic_codist_round(
      expected,
      of_pools(plan),
      round,
      PERIOD,
      distill_batches(plan, num_pools),
    )
    check(state, expected)
    due = round % PERIOD == 0
    assert metrics["pool1/distill_loss"].count == (3 if due else 0)


class Dropping(nn.Module):
  """A linear model with dropout."""

  rate: float

  @nn.compact
  def __call__(self, x, train):
    x = nn.Dropout(self.rate, deterministic=not train)(x.reshape(len(x), -1))
    return nn.Dense(federation.CLASSES)(x)


def test_students_may_learn_without_dropout():
  """Then they are those of models that have none; the clients do not train."""

  def students(rate, dropout):
    models = [Dropping(rate)] * 2
    pools = federation.make_pools(models=models, learning_rate=0.0)
    distiller = hetfl.Distiller(dropout=dropout)
    algorithm = hetfl.periodic_codist(pools, distiller, period=1, rounds=2)
    return federation.params(federation.run(algorithm, 1)[0])

  expected = students(0.0, True)
  chex.assert_trees_all_equal(students(0.5, False), expected)
  with pytest.raises(AssertionError):
    chex.assert_trees_all_close(students(0.5, True), expected)


@pytest.mark.parametrize("num_pools,microbatch", [(2, 4), (3, None)])
def test_merged_codist(num_pools, microbatch):
  settings, distiller, pools = codist_case(num_pools, microbatch)
  algorithm = hetfl.merged_codist(pools, distiller, alpha=0.75, rounds=ROUNDS)
  state, expected = start(algorithm, pools, oracle.Adam())
  step = jax.jit(algorithm.step)
  for round in range(1, ROUNDS):
    plan = federation.make_plan(round, num_pools=num_pools)
    state, _ = step(state, plan, federation.make_data(num_pools))
    decayed(expected, round, 0.0625, settings)
    expected = oracle.merged_codist_round(
      expected,
      of_pools(plan),
      0.75,
      distill_batches(plan, num_pools),
    )
    check(state, expected)


def test_teachers_may_see_several_batches_at_once(monkeypatch):
  (_, pool) = federation.make_pools()
  distiller = hetfl.Distiller(
    transform=lambda key, batch: {
      **batch,
      "x": batch["x"] + jax.random.normal(key, batch["x"].shape),
    },
  )
  plan = federation.make_plan(1)
  logits = []
  for examples in (8, 16, 80):  # One batch, two of three, all.
    monkeypatch.setattr(
      distill, "batch_size_or_default", lambda _, n=examples: n
    )
    work = distiller.look(
      distiller.view(pool.model),
      pool.model.init(jax.random.key(0)),
      jax.random.key(1),
      dict(federation.POPULATION.bank),
      plan.batches["distill"],
      True,
    )
    assert work.at_once == examples // 8
    logits.append(hetfl.Inline().run(work)[0])
  assert logits[0].shape == (3, 8, federation.CLASSES)
  for several in logits[1:]:
    np.testing.assert_allclose(several, logits[0], rtol=1e-5, atol=1e-6)
