"""Uses of the algorithms' steps within a user's own code."""

import functools

import chex
from hetfl.fedavg import fedavg
from hetfl.fedmd import absolute_error, fedmd, Translator
from hetfl.fml import fml, independent
from hetfl.hyperparameters import with_hyper
from hetfl.mutual import MutualClient
from hetfl.mutual_planning import plan_mutual
from hetfl.pool import fedavg_server, Pool
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetfl import codist, core, engine, evaluate, party, planning, population
from tests import algorithms, federation
from tests.algorithms import CASES


def assert_close(*trees, rtol=1e-5, atol=1e-6):
  chex.assert_trees_all_close(*trees, rtol=rtol, atol=atol)


CLIENTS = federation.POPULATION


def round_of_one(model, **settings):
  """A client's only step from the server's model, on an image of class 0."""
  settings = {**dict(server_optimizer=fedavg_server), **settings}
  pool = Pool("a", model, 1.0, 1.0, **settings)
  algorithm = fedavg([pool], rounds=None)
  bank = {"x": jnp.ones((1, 1)), "y": jnp.zeros(1, int)}
  clients = population.ClientPopulation.from_lists(bank, [[0]])
  plan = planning.plan_round(
    [clients], seed=0, round=1, clients_per_round=1, batch_size=1
  )
  state = algorithm.init(jax.random.key(0))
  return algorithm.step(state, plan, {"pools": (bank,)})[0].pools[0].params


def test_hyper_parameters_of_trials_are_each_states_own():
  algorithm = CASES["merged"].build(None, 1)
  states = jax.vmap(algorithm.init)(jax.random.split(jax.random.key(0), 2))
  with pytest.raises(ValueError, match="several trials: .*vmap"):
    with_hyper(states, client_lr=(0.1, 0.3))
  rates = jnp.array([[0.1, 0.3], [0.2, 0.4]])
  states = jax.vmap(lambda s, v: with_hyper(s, client_lr=v))(states, rates)
  found = [pool.hyper["client_lr"] for pool in states.pools]
  np.testing.assert_array_equal(np.stack(found, axis=1), rates)


def test_trials_are_evaluated_together():
  model = algorithms.MLP
  subset = population.Subset.whole(dict(CLIENTS.bank))
  evaluator = evaluate.Evaluator([model], {"test": subset}, batch_size=5)
  seeds = jax.random.split(jax.random.key(0), 3)
  trials = jax.vmap(model.start)(seeds)
  data = evaluator.data("test")
  sums = jax.jit(jax.vmap(lambda v: evaluator.sums([v], data)[0]))(trials)
  for i, seed in enumerate(seeds):
    (alone,) = evaluator([model.start(seed)])
    of_trial = core.values(jax.tree.map(lambda a, i=i: a[i], sums))
    assert of_trial == pytest.approx(alone, rel=1e-5)
  with pytest.raises(ValueError, match="use evaluator.sums"):
    jax.vmap(lambda v: evaluator([v]))(trials)


@pytest.mark.parametrize(
  "name,lanes", [("fedavg", 1), ("fedavg", 3), ("periodic", 3), ("fedmd", 1)]
)
def test_gradients_through_a_round_whose_plan_is_known(name, lanes):
  """Reverse mode gives the gradient of forward mode."""
  case = CASES[name]
  algorithm, plan, data = case.build(None, 2), case.plan(2, lanes), case.data()
  start = algorithm.init(jax.random.key(0))
  rate_of = "learning_rate" if name == "fedmd" else "client_lr"

  def distance(rate):
    state = with_hyper(start, **{rate_of: rate})
    state, _ = algorithm.step(state, plan, data)
    first = (state.parties if name == "fedmd" else state.pools)[0]
    return optax.tree.norm(first.variables.params)

  rate = jnp.float32(0.1)
  _, forward = jax.jvp(distance, (rate,), (jnp.ones(()),))
  backward = jax.jit(jax.grad(distance))(rate)
  assert abs(forward) > 0.01
  np.testing.assert_allclose(backward, forward, rtol=1e-4)


def test_pools_may_differ_in_size():
  few = CLIENTS.take([0, 1])
  plan_round = functools.partial(
    planning.plan_round, [CLIENTS, few], seed=0, round=1
  )
  plan = plan_round(
    clients_per_round=(4, 2), batch_size=(3, 2), num_lanes=(2, 1)
  )
  for pool, (clients, settings) in enumerate(
    (
      (CLIENTS, dict(clients_per_round=4, batch_size=3, num_lanes=2)),
      (few, dict(clients_per_round=2, batch_size=2, num_lanes=1)),
    )
  ):
    chex.assert_trees_all_equal(
      plan.pools[pool],
      planning.plan_clients(clients, seed=0, round=1, pool=pool, **settings),
    )
  assert [len(p.steps) for p in plan.pools] == [2, 1]
  chex.assert_trees_all_equal(
    plan_round(clients_per_round=np.array([4, 2]), batch_size=3, num_lanes=1),
    plan_round(clients_per_round=(4, 2), batch_size=[3, 3], num_lanes=1),
  )
  with pytest.raises(ValueError, match=r"batch_size=\[3\]: give one or 2"):
    plan_round(clients_per_round=2, batch_size=[3])


def test_clients_may_change_what_they_send():
  """From logits (0, 0) a step of rate 1 goes to (1/2, -1/2)."""
  zero = federation.line(0.0, 0.0)
  np.testing.assert_allclose(round_of_one(zero)[0], [0.5, -0.5])

  def clipped(key, delta):  # Of length 1 / sqrt(2), to 1 / 2.
    return optax.tree.scale(jnp.minimum(1, 0.5 / optax.tree.norm(delta)), delta)

  half = 0.5 / np.sqrt(2)
  np.testing.assert_allclose(
    round_of_one(zero, delta_transform=clipped)[0], [half, -half], rtol=1e-6
  )


@pytest.mark.parametrize("runner", [None, engine.Threads(2)])
def test_noise_of_clients_is_their_own_wherever_they_are(runner):
  """If clients send only noise, the server's delta is its weighted mean."""

  def noise(key, delta):
    return jax.tree.map(lambda d: jax.random.normal(key, d.shape), delta)

  pools = federation.make_pools(
    num_pools=1,
    server_optimizer=fedavg_server,
    server_lr=1.0,
    delta_transform=noise,
  )
  algorithm = fedavg(pools, rounds=None, engine=runner)
  start = algorithm.init(jax.random.key(0))
  plan = federation.make_plan(1, num_pools=1, num_lanes=3)
  data = federation.make_data(num_pools=1)
  state, _ = algorithm.step(start, plan, data)

  lanes = plan.pools[0]
  last = lanes.weight > 0
  round_key = jax.random.fold_in(jax.random.fold_in(start.key, 1), 0)
  drawn = [
    noise(
      jax.random.fold_in(
        jax.random.fold_in(round_key, client), np.uint32(2**32 - 1)
      ),
      start.pools[0].params,
    )
    for client in lanes.client[last]
  ]
  weights = lanes.weight[last]
  assert len(weights) == 4
  mean = jax.tree.map(
    lambda *n: np.tensordot(weights, np.stack(n), 1) / weights.sum(), *drawn
  )
  moved = optax.tree.sub(start.pools[0].params, state.pools[0].params)
  assert_close(moved, mean)


def epoch_of_one(**settings):
  """A party's weights after one step from zero on an image of class 0."""
  one = party.Party("a", federation.line(0.0, 0.0), **settings)
  algorithm = party.fit([one])
  bank = {"x": jnp.ones((1, 1)), "y": jnp.zeros(1, int)}
  state, _ = algorithm.step(
    algorithm.init(jax.random.key(0)),
    party.plan_fit([[0]], seed=0, round=1, batch_size=1),
    {"train": (bank,)},
  )
  return state.parties[0].trained.variables.params[0]


def test_optimizers_may_ask_for_the_loss():
  """Polyak's rate is loss / squared gradient norm: log 2 / (1/4 + 1/4)."""
  sizes = round_of_one(
    federation.line(0.0, 0.0),
    client_optimizer=lambda rate: optax.polyak_sgd(
      max_learning_rate=100.0, scaling=rate
    ),
  )
  np.testing.assert_allclose(sizes[0], [np.log(2), -np.log(2)], rtol=1e-5)
  # Parties, mutual clients and students pass the loss on too.
  polyak = lambda rate: optax.polyak_sgd(max_learning_rate=rate)
  bank = {"x": jnp.ones((1, 1)), "y": jnp.zeros(1, int)}
  np.testing.assert_allclose(
    epoch_of_one(learning_rate=9.0, optimizer=polyak),
    [np.log(2), -np.log(2)],
    rtol=1e-5,
  )
  clients = [MutualClient(federation.line(0.0, 0.0))]
  alone = independent(clients, learning_rate=9.0, optimizer=polyak)
  state, _ = alone.step(
    alone.init(jax.random.key(0)),
    plan_mutual([[0]], clients, seed=0, round=1, batch_size=1, epochs=1),
    {"train": bank},
  )
  np.testing.assert_allclose(
    state.local(0).params[0], [np.log(2), -np.log(2)], rtol=1e-5
  )


def falls_by_the_loss(rate):
  """An optimizer that subtracts rate times the loss from every parameter."""

  def update(updates, state, params, *, value, **extra):
    del updates, extra
    return jax.tree.map(lambda p: -rate * value + 0 * p, params), state

  return optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), update
  )


@pytest.mark.parametrize("devices", [None, 2])
def test_students_are_told_the_loss_of_the_whole_batch(devices):
  runner = engine.Inline(devices and federation.mesh(devices))
  distiller = algorithms.make_distiller(
    optimizer=falls_by_the_loss, learning_rate=1.0, microbatch=2
  )
  pools = federation.make_pools(server_lr=0.0)
  algorithm = codist.periodic_codist(
    pools, distiller, period=1, rounds=None, engine=runner
  )
  start = algorithm.init(jax.random.key(0))
  plan, data = federation.make_plan(1, num_lanes=2), federation.make_data()
  plan = plan._replace(distill=plan.distill[:1])
  state, metrics = jax.jit(algorithm.step)(start, plan, data)
  for i, (before, after) in enumerate(zip(start.pools, state.pools)):
    loss = metrics[f"pool{i}/distill_loss"].value
    moved = optax.tree.sub(before.params, after.params)
    expected = jax.tree.map(lambda p, x=loss: np.full(p.shape, x), moved)
    assert loss > 1e-3
    assert_close(moved, expected, rtol=1e-3)


def test_the_loss_has_its_penalties():
  """log 2 and mu / 2 |w - w|^2 = 0; then the second step's, by hand."""
  bank = {"x": jnp.ones((2, 1)), "y": jnp.zeros(2, int)}
  pool = Pool(
    "a",
    federation.line(0.0, 0.0),
    client_lr=1.0,
    server_lr=1.0,
    client_optimizer=falls_by_the_loss,
    server_optimizer=fedavg_server,
    prox_mu=0.5,
  )
  clients = population.ClientPopulation.from_lists(bank, [[0, 1]])
  plan = planning.plan_round(
    [clients], seed=0, round=1, clients_per_round=1, batch_size=1
  )
  algorithm = fedavg([pool], rounds=None)
  state = algorithm.init(jax.random.key(0))
  state, _ = algorithm.step(state, plan, {"pools": (bank,)})
  log2 = np.log(2)
  # Both logits fall alike, so the loss stays; the term is 1/4 (2 log2^2) then.
  fallen = log2 + (log2 + 0.25 * 2 * log2**2)
  np.testing.assert_allclose(
    state.pools[0].params[0], [-fallen, -fallen], rtol=1e-5
  )
  params = epoch_of_one(
    learning_rate=1.0,
    l2=0.5,
    penalty=lambda params: 3.0 + 0 * params.sum(),
    optimizer=falls_by_the_loss,
  )
  np.testing.assert_allclose(params, 2 * [-log2 - 1.5], rtol=1e-5)


@pytest.mark.parametrize("name", ["fedavg", "periodic", "merged"])
def test_pools_go_on_from_models(name):
  algorithm = CASES[name].build(None, 1)
  models = [
    pool.model.start(jax.random.key(7)) for pool in federation.make_pools()
  ]
  state = algorithm.init(jax.random.key(0), models)
  assert_close([pool.variables for pool in state.pools], models)
  plan, data = CASES[name].plan(1, 1), CASES[name].data()
  jax.jit(algorithm.step, donate_argnums=0)(state, plan, data)
  assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(models))
  with pytest.raises(ValueError, match="variables: has length 1, expected 2"):
    algorithm.init(jax.random.key(0), models[:1])
  with pytest.raises(ValueError, match="pool 'pool0': must not have .params"):
    algorithm.init(jax.random.key(0), models[::-1])


def test_clients_go_on_from_a_global_model():
  model = algorithms.MLP
  clients = [MutualClient(model)] * 2
  server = model.start(jax.random.key(7))
  state = fml(clients, global_model=model).init(jax.random.key(0), server)
  assert_close(state.server, server)
  with pytest.raises(ValueError, match="server: independent"):
    independent(clients).init(jax.random.key(0), server)


def test_plans_group_clients_themselves():
  case = CASES["fml"]
  plan = plan_mutual(
    algorithms.POPULATION,
    algorithms.MUTUAL,
    seed=0,
    round=1,
    batch_size=4,
    epochs=2,
  )
  chex.assert_trees_all_equal(plan, case.plan(1, 1))


def test_parties_may_have_subsets():
  subsets = [population.Subset(dict(CLIENTS.bank), [4, 1]), np.arange(3)]
  held = population.holdings(subsets)
  assert [h.tolist() for h in held] == [[4, 1], [0, 1, 2]]
  with pytest.raises(ValueError, match="client 0: position 99 is outside"):
    population.holdings([population.Subset(dict(CLIENTS.bank), [99])])


def test_a_translator_of_ones_own():
  mine = Translator(lambda z, t: z, lambda z, f, t: absolute_error(z, f))
  case = CASES["fedmd"]
  plan, data = case.plan(1, 1), case.data()

  def after_a_round(digest_loss):
    algorithm = fedmd(algorithms.PARTIES, digest_loss=digest_loss)
    state = algorithm.init(jax.random.key(0))
    return jax.jit(algorithm.step)(state, plan, data)[1]

  chex.assert_trees_all_equal(after_a_round(mine), after_a_round("mae"))


def test_without_a_penalty_there_is_no_weight_of_it():
  party_state = party.fit([party.Party("a", federation.line(0.0, 0.0))]).init(
    jax.random.key(0)
  )
  with pytest.raises(ValueError, match="l2: this state has no such"):
    with_hyper(party_state, l2=0.1)


@pytest.mark.parametrize(
  "name,maker",
  [
    ("fedavg", "plan_round"),
    ("periodic", "plan_round"),
    ("merged", "plan_round"),
    ("fml", "plan_mutual"),
    ("fedmd", "plan_fedmd"),
    ("fit", "plan_fit"),
  ],
)
def test_another_algorithms_plan_is_refused(name, maker):
  case = CASES[name]
  algorithm = case.build(None, 1)
  state = algorithm.init(jax.random.key(0))
  other = "fml" if maker == "plan_round" else "fedavg"
  with pytest.raises(ValueError, match=f"plan: give a .*{maker}"):
    algorithm.step(state, CASES[other].plan(1, 1), case.data())


def test_what_is_of_another_kind_is_refused():
  with pytest.raises(ValueError, match=r"pools\[0\]: give a Pool, not a Model"):
    fedavg([algorithms.MLP], rounds=1)
  with pytest.raises(ValueError, match="distiller: give a Distiller"):
    codist.merged_codist(federation.make_pools(), None, alpha=0.5, rounds=1)
  bank = {"x": {"a": np.zeros(2), "b": np.zeros(2)}, "y": np.zeros(2, int)}
  with pytest.raises(ValueError, match=r"bank\['x'\]: must be an array .*dict"):
    population.Subset.whole(bank)
  pairs = lambda logits, batch: (core.cross_entropy(logits, batch), {})
  with pytest.raises(ValueError, match="a loss returned a tuple"):
    round_of_one(federation.line(0.0, 0.0), loss=pairs)
  short = core.Model(federation.line(0.0).init, lambda variables, x: x)
  with pytest.raises(ValueError, match="apply is called with .*train"):
    Pool("a", short, 1.0, 1.0)
  subset = population.Subset.whole(dict(CLIENTS.bank))
  evaluator = evaluate.Evaluator(
    [algorithms.MLP],
    {"test": subset},
    measure=lambda logits, batch: {"mean": jnp.mean(logits)},
  )
  with pytest.raises(ValueError, match="a measure must return a dict of Means"):
    evaluator([algorithms.MLP.start(jax.random.key(0))])
  with pytest.raises(ValueError, match="delta_transform is called with"):
    federation.make_pools(delta_transform=lambda delta: delta)
  with pytest.raises(ValueError, match="delta_transform: must not have"):
    round_of_one(
      federation.line(0.0, 0.0), delta_transform=lambda key, d: (d, ())
    )
  with pytest.raises(ValueError, match="groups: give a sequence"):
    plan_mutual(
      [[0]],
      MutualClient(algorithms.MLP),
      seed=0,
      round=1,
      batch_size=1,
      epochs=1,
    )


def test_clients_may_have_optimizers_of_their_own():
  """Client 0's model stands still; the memes and client 1 learn as before."""
  still = lambda rate: optax.sgd(0 * rate)
  model = algorithms.MLP

  def after_a_round(*optimizers):
    clients = [MutualClient(model, optimizer=o) for o in optimizers]
    algorithm = fml(clients, global_model=model)
    start = algorithm.init(jax.random.key(0))
    plan = plan_mutual(
      [[0, 1], [2, 3]], clients, seed=0, round=1, batch_size=2, epochs=1
    )
    data = {"train": jax.device_put(dict(CLIENTS.bank))}
    return start, algorithm.step(start, plan, data)[0]

  start, mixed = after_a_round(still, None)
  _, usual = after_a_round(None, None)
  assert_close(mixed.local(0), start.local(0))
  assert_close(mixed.local(1), usual.local(1))
  assert_close(mixed.server, usual.server)
  moved = optax.tree.sub(usual.local(0).params, start.local(0).params)
  assert optax.tree.norm(moved) > 1e-3


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", ["inline", "threads", "mesh"])
def test_each_client_is_evaluated_by_itself(name, own):
  runner = {
    "inline": engine.Inline(),
    "threads": engine.Threads(2),
    "mesh": engine.Inline(federation.mesh(2)),
  }[name]
  model, keys = algorithms.MLP, jax.random.split(jax.random.key(0), 9)
  each = jax.vmap(model.start)(keys)
  take = lambda k: jax.tree.map(lambda a: a[k], each)
  evaluator = evaluate.ClientEvaluator(
    model, CLIENTS, engine=runner, batch_size=5
  )
  found = evaluator(each if own else take(0), own=own)
  for k in range(len(CLIENTS)):
    subset = population.Subset(CLIENTS.bank, CLIENTS.positions(k))
    alone = evaluate.Evaluator([model], {"a": subset}, batch_size=3)
    (expected,) = alone([take(k if own else 0)])
    assert found["accuracy"][k] == pytest.approx(expected["a_accuracy"])
    assert found["loss"][k] == pytest.approx(expected["a_loss"], rel=1e-5)
