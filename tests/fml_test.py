"""Federated Mutual Learning against its oracle, and its limits."""

import functools

from absl import logging
import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetfl import core, engine, planning
from hetfl.fedavg import fedavg
from hetfl.fml import fml, independent
from hetfl.models import fml as nets
from hetfl.models import layers
from hetfl.mutual import momentum_sgd, mutual_loss, MutualClient
from hetfl.mutual_planning import as_lanes, group_clients, plan_mutual
from hetfl.pool import fedavg_server, Pool
from tests import federation
from tests.algorithms import (
  CNN,
  HEAD,
  MLP,
  model,
  noisy,
  POPULATION,
  SIZES,
  WIDE,
)
from tests.oracles import codist
from tests.oracles import fml as oracle

ROUNDS = 3
# The same numbers in another order of addition, in float32.
TOLERANCE = dict(rtol=2e-4, atol=2e-6)
assert_close = functools.partial(chex.assert_trees_all_close, **TOLERANCE)
assert_equal = chex.assert_trees_all_equal

TRUNK = model(nets.Net((2, 3), 3, (), None, padding="SAME"))


class Stage(nn.Module):
  """The number `index` of TRUNK's convolutions; flattens after the second."""

  index: int

  @nn.compact
  def __call__(self, x):
    name, channels = f"Conv_{self.index}", (2, 3)[self.index]
    x = nn.relu(layers.Conv(channels, (3, 3), pool=True, name=name)(x))
    return x.reshape(len(x), -1) if self.index else x


FIRST = model(Stage(0))
MIDDLE = core.Model.from_flax(Stage(1), np.zeros((1, 2, 2, 2)))
ALIKE = [MutualClient(MLP)] * 5
UNLIKE = [MutualClient(m) for m in (MLP, WIDE, MLP, MLP, WIDE)]
SPLICED = [c._replace(adaptor=HEAD) for c in UNLIKE]
ENCODED = [c._replace(encoder=TRUNK) for c in UNLIKE]
BETWEEN = [c._replace(adaptor=HEAD, encoder=FIRST) for c in UNLIKE]


def held():
  return [POPULATION.positions(k) for k in range(len(SIZES))]


def make_plan(round, clients=UNLIKE, **settings):
  # Batches of four leave a last one that is not full.
  return plan_mutual(
    held(),
    group_clients(clients),
    **{**dict(seed=0, round=round, batch_size=4, epochs=2), **settings},
  )


def make_data():
  return {"train": jax.tree.map(jnp.asarray, dict(POPULATION.bank))}


def run(algorithm, rounds=ROUNDS, *, state=None, first=1, **settings):
  state = algorithm.init(jax.random.key(0)) if state is None else state
  for round in range(first, first + rounds):
    state, metrics = algorithm.step(
      state, make_plan(round, **settings), make_data()
    )
  return state, metrics


def build(clients=UNLIKE, runner=None, jit=True, **settings):
  options = dict(global_model=MLP, alpha=0.75, beta=0.25, learning_rate=0.125)
  algorithm = fml(clients, **{**options, **settings}, engine=runner)
  return algorithm._replace(step=jax.jit(algorithm.step)) if jit else algorithm


# --- The paper's update -----------------------------------------------------

CASES = {
  "alike": dict(clients=ALIKE, global_model=MLP),
  "unlike": dict(clients=UNLIKE, global_model=CNN),
  "microbatch": dict(clients=UNLIKE, microbatch=2),
  "first part": dict(clients=SPLICED, global_model=TRUNK),
  "last part": dict(clients=ENCODED, global_model=HEAD),
  "middle": dict(clients=BETWEEN, global_model=MIDDLE),
  "tempered": dict(clients=UNLIKE, temperature=2.0),
  "sequential": dict(clients=UNLIKE, sequential=True),
}


def plain(params):
  return jax.tree.map(np.asarray, params)


def own_layers(state, client):
  """The layers of a client's meme that are not the global model's."""
  parts = dict(state.meme(client).params)
  if parts.pop("trunk", None) is None:
    return {}
  return {n: p for part in parts.values() for n, p in layered(part).items()}


def layered(params):
  """Parameters by layer; a model that is one dense layer has no names."""
  params = plain(params)
  return {"Dense_0": params} if "kernel" in params else params


@pytest.mark.parametrize("name", CASES)
def test_rounds_are_the_oracles(name):
  case = CASES[name]
  clients, weighted = case["clients"], name == "unlike"
  with jax.enable_x64(True):
    algorithm = build(**case)
    state = algorithm.init(jax.random.key(3))
    state = jax.tree.map(
      lambda a: jnp.asarray(a, jnp.float64), state.replace(key=None)
    ).replace(key=state.key)
    server = layered(state.server.params)
    theirs = []
    for k in range(len(clients)):
      local = plain(state.local(k).params)
      zeros = codist.tree_map(np.zeros_like, local)
      theirs.append(oracle.Client(local, zeros, (), own_layers(state, k)))
    settings = oracle.Settings(
      0.75,
      0.25,
      0.125,
      temperature=case.get("temperature", 1.0),
      sequential=case.get("sequential", False),
    )
    for round in range(1, ROUNDS + 1):
      plan = make_plan(round, clients, uniform_weights=not weighted)
      state, metrics = algorithm.step(state, plan, make_data())
      for group in plan.groups:
        for k, index, steps in zip(group.client, group.index, group.steps):
          theirs[k].batches = [
            (
              POPULATION.bank["x"][i[i >= 0]].astype(np.float64),
              POPULATION.bank["y"][i[i >= 0]],
            )
            for i in index[:steps]
          ]
          theirs[k].weight = SIZES[k] if weighted else 1.0
      server, theirs = oracle.fml_round(server, theirs, settings)
      tolerance = dict(rtol=1e-6, atol=1e-8)
      assert_close(layered(state.server.params), server, **tolerance)
      for k, client in enumerate(theirs):
        assert_close(plain(state.local(k).params), client.local, **tolerance)
        assert_close(own_layers(state, k), client.own, **tolerance)
      # The local model's momentum persists.
      for group in state.groups:
        trace = optax.tree.get(group.opt_state, "trace")
        for row, k in enumerate(group.clients):
          ours = jax.tree.map(lambda a, row=row: np.asarray(a[row]), trace)
          assert_close(ours, theirs[k].velocity, **tolerance)
  # Two epochs, each example once an epoch.
  assert float(metrics["meme_loss"].count) == 2 * sum(SIZES)


def test_losses_by_hand():
  # p = (3/4, 1/4), q = (1/2, 1/2), label 0.
  z, w = jnp.log(jnp.array([[0.75, 0.25]])), jnp.zeros((1, 2))
  # KL(q || p) = 1/2 log(2/3) + 1/2 log 2 = 0.1438410
  loss, kl = mutual_loss(z, w, -jnp.log(jnp.array([0.75])), weight=0.25)
  np.testing.assert_allclose(kl, [0.1438410], rtol=1e-5)
  np.testing.assert_allclose(loss, [0.25 * 0.2876821 + 0.75 * 0.1438410])
  # KL(p || q) = 3/4 log(3/2) + 1/4 log(1/2) = 0.1308120
  _, kl = mutual_loss(w, z, jnp.zeros(1), weight=0.25)
  np.testing.assert_allclose(kl, [0.1308120], rtol=1e-5)
  # Nothing is learnt through the partner.
  grad = jax.grad(
    lambda w: mutual_loss(z, w, jnp.zeros(1), weight=0.5)[0].sum()
  )
  assert not np.asarray(grad(w)).any()


def test_a_partner_that_is_not_heard_may_be_anything():
  z, lost = jnp.zeros((2, 3)), jnp.full((2, 3), jnp.nan)
  labels = lambda z: -jax.nn.log_softmax(z)[:, 0]
  total = lambda z, w: mutual_loss(z, lost, labels(z), weight=w)[0].sum()
  assert_close(
    jax.value_and_grad(total)(z, 1.0),
    jax.value_and_grad(lambda z: labels(z).sum())(z),
  )
  assert np.isnan(total(z, 0.9))


def test_clipping_comes_before_weight_decay():
  sgd = momentum_sgd(1.0, weight_decay=0.5, clip_norm=1.0)
  w, g = jnp.array([2.0, 0.0]), jnp.array([3.0, 4.0])
  # -(0.6 + 0.5 * 2), -(0.8 + 0)
  np.testing.assert_allclose(sgd.update(g, sgd.init(w), w)[0], [-1.6, -0.8])


# --- Its limits -------------------------------------------------------------


def test_with_beta_one_the_global_model_is_fedavgs():
  """Another program, other plans, the same keys: FedAvg's own."""
  clients = [c._replace(transform=noisy) for c in UNLIKE]
  state, _ = run(build(clients, beta=1.0))
  pool = Pool(
    name="global",
    model=MLP,
    client_lr=0.125,
    server_lr=1.0,
    transform=noisy,
    client_optimizer=momentum_sgd,
    server_optimizer=fedavg_server,
  )
  algorithm = fedavg([pool], rounds=None)
  expected = algorithm.init(jax.random.key(0))
  for round in range(1, ROUNDS + 1):
    lanes = as_lanes(make_plan(round, clients), num_lanes=2)
    plan = planning.RoundPlan(np.int32(round), (lanes,), None)
    expected, _ = jax.jit(algorithm.step)(
      expected, plan, {"pools": (make_data()["train"],)}
    )
  assert_close(state.server.params, expected.pools[0].params)
  # And it is not FedAvg's otherwise.
  other, _ = run(build(clients, beta=0.5))
  with pytest.raises(AssertionError):
    assert_close(other.server.params, expected.pools[0].params)


def test_with_alpha_one_clients_learn_alone():
  clients = [c._replace(transform=noisy) for c in UNLIKE]
  mutual, _ = run(build(clients, alpha=1.0))
  alone = independent(clients, learning_rate=0.125)
  alone = alone._replace(step=jax.jit(alone.step))
  state, metrics = run(alone)
  assert state.server is None
  assert set(metrics) == {"local_loss", "local_kl"}
  assert_close(mutual.groups, state.groups)
  other, _ = run(build(clients, alpha=0.5))
  with pytest.raises(AssertionError):
    assert_close(other.groups, state.groups)


class Recording(engine.Inline):
  """Remembers the results of the clients' programs."""

  def run(self, *jobs):
    results = super().run(*jobs)
    if isinstance(jobs[0], engine.Each):
      self.results = results
    return results


def test_no_example_reaches_another_client_in_a_round():
  """One client's bank is poisoned: only its own upload changes."""
  runner = Recording()
  algorithm = build(UNLIKE, runner, jit=False)
  state = algorithm.init(jax.random.key(0))
  uploads = []
  for poison in (0.0, 1e3):
    data = make_data()
    bad = POPULATION.positions(2)
    data["train"]["x"] = data["train"]["x"].at[bad].add(poison)
    after, _ = algorithm.step(state, make_plan(1), data)
    uploads.append(
      {
        k: (
          jax.tree.map(lambda a, row=row: np.asarray(a[row]), memes),
          after.local(k),
        )
        for group, (_, memes, _) in zip(after.groups, runner.results)
        for row, k in enumerate(group.clients)
      }
    )
  clean, poisoned = uploads
  for k in range(len(SIZES)):
    if k != 2:
      assert_equal(clean[k], poisoned[k])
      continue
    for before, now in zip(clean[k], poisoned[k]):
      assert not np.allclose(*(jax.tree.leaves(t)[0] for t in (before, now)))


def test_clients_start_unlike_and_persist():
  state = build(ALIKE, global_model=MLP).init(jax.random.key(0))
  first = [np.asarray(jax.tree.leaves(state.local(k))[1]) for k in range(5)]
  first.append(np.asarray(jax.tree.leaves(state.server)[1]))
  for i in range(6):
    for j in range(i):
      assert not np.allclose(first[i], first[j])


# --- Options ----------------------------------------------------------------


def test_schedules_are_functions_of_the_round():
  falling = build(
    alpha=lambda t: 1 - 0.25 * t,
    beta=lambda t: 0.25 * t,
    learning_rate=lambda t: 0.125 / t,
    temperature=lambda t: 1.0 + t,
  )
  state, _ = run(falling, 2)
  assert not state.hyper
  expected = None
  for t in (1, 2):
    constant = build(
      alpha=1 - 0.25 * t,
      beta=0.25 * t,
      learning_rate=0.125 / t,
      temperature=1.0 + t,
    )
    start = constant.init(jax.random.key(0))
    if expected is not None:
      start = expected.replace(hyper=start.hyper)
    expected, _ = run(constant, 1, state=start, first=t)
  # Two programs, of which one computes the values: to rounding.
  assert_close(state.server, expected.server, rtol=1e-6, atol=1e-8)


def test_plans_are_epochs():
  plan = make_plan(2, epochs=3)
  for group in plan.groups:
    for k, index, steps in zip(group.client, group.index, group.steps):
      assert steps == 3 * -(-SIZES[k] // 4)
      assert (index[steps:] == -1).all()
      for epoch in np.split(index[:steps], 3):
        np.testing.assert_array_equal(
          np.sort(epoch[epoch >= 0]), np.sort(POPULATION.positions(k))
        )
  # A client's order depends on nothing but seed, round and the client.
  alone = make_plan(2, ALIKE, epochs=3).groups[0]
  np.testing.assert_array_equal(
    alone.index[1][: alone.steps[1]],
    plan.groups[1].index[0][: plan.groups[1].steps[0]],
  )
  assert (make_plan(3).groups[0].index != make_plan(2).groups[0].index).any()


def test_no_two_passes_have_one_order():
  held, orders = [np.arange(20), np.arange(20, 40)], []
  for seed, t in ((0, 1), (0, 2), (1, 1)):
    share = dict(seed=seed, round=t, batch_size=20, epochs=2)
    orders += [*plan_mutual(held, [(0, 1)], **share).groups[0].index % 20]
  assert len(np.unique(np.concatenate(orders), axis=0)) == 3 * 2 * 2


@pytest.mark.parametrize("microbatch,parts", [(None, 1), (1, 2)])
def test_no_draw_is_made_twice(microbatch, parts):
  """Not by the two models, in two steps of some parts, or in two rounds."""
  recorder = federation.recorder(2 * 2 * parts)
  client = MutualClient(recorder, transform=noisy)
  algorithm = fml([client], global_model=recorder, microbatch=microbatch)
  state = algorithm.init(jax.random.key(0))
  for t in (1, 2):
    plan = plan_mutual(
      [np.arange(4)], [(0,)], seed=0, round=t, batch_size=2, epochs=1
    )
    bank = federation.recorders_bank(4)
    state, _ = algorithm.step(state, plan, {"train": bank})
  local, server = state.local(0).stats, state.server.stats
  draws = np.array([local["draws"], server["draws"]])
  assert draws.all() and len(np.unique(draws)) == draws.size
  # Both see the same images; no key serves both for these and in a model.
  np.testing.assert_array_equal(local["seen"], server["seen"])
  assert len(np.unique(local["seen"])) == 2 * 2 * parts
  assert not np.isin(draws.round(5), (local["seen"] - 1).round(5)).any()


def test_clients_may_start_from_the_global_model():
  """Clients of its architecture do; the others keep their own random draws."""
  own, same = (
    build(from_global=f, jit=False).init(jax.random.key(0))
    for f in (False, True)
  )
  chex.assert_trees_all_equal(own.server, same.server)
  for k, client in enumerate(UNLIKE):
    start = same.server if client.model == MLP else own.local(k)
    chex.assert_trees_all_equal(same.local(k), start)
  with pytest.raises(ValueError, match="from_global=True: no client's model"):
    build(from_global=True, global_model=CNN)


@pytest.mark.parametrize("clients", [ALIKE, UNLIKE])
@pytest.mark.parametrize("runner", [None, engine.Threads(2)])
def test_who_does_not_take_part_keeps_its_model(clients, runner):
  """And the global model is the mean of those who do, weighted if asked for."""
  algorithm = build(clients, runner=runner, jit=runner is None)
  state = algorithm.init(jax.random.key(0))
  seen = set()
  for t in range(1, 6):
    settings = dict(clients=clients, uniform_weights=False)
    plan = make_plan(t, clients_per_round=2, **settings)
    everyone = make_plan(t, **settings)
    steps = {k: n for g in plan.groups for k, n in zip(g.client, g.steps)}
    active = {int(k) for k, n in steps.items() if n}
    assert len(active) == 2
    assert all(len(group.row) == 2 for group in plan.groups)
    seen |= active
    after, metrics = algorithm.step(state, plan, make_data())
    for k in range(len(clients)):
      before, now = state.local(k).params, after.local(k).params
      moved = [
        (a != b).any() for a, b in zip(*map(jax.tree.leaves, (before, now)))
      ]
      assert any(moved) == (k in active)
    # The same as if all took part and the others' memes had no weight.
    silent = everyone.replace(
      groups=tuple(
        group._replace(
          weight=np.where([k in active for k in group.client], group.weight, 0)
        )
        for group in everyone.groups
      )
    )
    heard, _ = algorithm.step(state, silent, make_data())
    assert_close(after.server, heard.server)
    for k in active:
      assert_close(after.local(k), heard.local(k))
    assert metrics["local_loss"].count == 2 * sum(SIZES[k] for k in active)
    lanes = as_lanes(plan, num_lanes=2)
    assert set(lanes.client[lanes.weight > 0].tolist()) == active
    state = after
  assert len(seen) > 2


def test_mutual_learning_switched_off_is_said(caplog):
  logging.use_absl_handler()
  with caplog.at_level("WARNING"):
    build(alpha=0.5, beta=0.5)
    assert not caplog.text
    build(alpha=1, beta=1.0)
  assert "alpha=1 switches mutual learning off" in caplog.text
  assert "beta=1 switches mutual learning off" in caplog.text


@pytest.mark.parametrize(
  "clients,global_model,note",
  [
    (ENCODED, MIDDLE, "in the trunk of a spliced model"),
    (UNLIKE, HEAD, "a client's meme, given inputs x of shape (4, 4, 4, 2)"),
    (UNLIKE, FIRST, "give the client an adaptor"),
  ],
)
def test_parts_that_do_not_fit_are_named(clients, global_model, note):
  with pytest.raises(Exception) as error:
    run(build(clients, global_model=global_model), clients=clients)
  assert any(note in each for each in error.value.__notes__)


def test_what_is_out_of_range_is_refused():
  for name, value in (
    ("alpha", 1.5),
    ("beta", -0.1),
    ("learning_rate", -0.1),
    ("temperature", 0.0),
    ("microbatch", 0),
  ):
    with pytest.raises(ValueError, match=f"{name}={value}"):
      build(**{name: value})
  with pytest.raises(ValueError, match="clients: give at least one"):
    build([])
  for jit in (False, True):
    with pytest.raises(ValueError, match="the plan groups clients as"):
      run(build(jit=jit), clients=ALIKE)
  with pytest.raises(ValueError, match="clients_per_round=9: there are 5"):
    make_plan(1, clients_per_round=9)
  with pytest.raises(ValueError, match="client=7"):
    build().init(jax.random.key(0)).local(7)
  states = jax.vmap(build().init)(jax.random.split(jax.random.key(0), 3))
  with pytest.raises(ValueError, match="the state holds several trials"):
    states.local(0)
  one = build().init(jax.random.split(jax.random.key(0), 3)[2]).local(1)
  ours = jax.vmap(lambda state: state.local(1))(states)
  assert_close(one, jax.tree.map(lambda a: a[2], ours))
