"""Uses of the algorithms' steps within a user's own code."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetfl import (
  Client,
  ClientEvaluator,
  ClientPopulation,
  core,
  engine,
  Evaluator,
  fedavg,
  fedmd,
  fit,
  fml,
  local_model,
  Participant,
  periodic_codist,
  plan_fit,
  plan_round,
  Pool,
  Subset,
  with_hyper,
)
from hetfl.algorithms import personal
from hetfl.algorithms.fedmd import absolute_error, Translator
from hetfl.batches import leave_out
from hetfl.distill import kl_divergence, tempered_softmax
from hetfl.evaluate import class_f1
from hetfl.optimizers import fedavg_server, momentum_sgd
from tests import algorithms, federation
from tests.algorithms import CASES


def assert_close(*trees, rtol=1e-5, atol=1e-6):
  chex.assert_trees_all_close(*trees, rtol=rtol, atol=atol)


CLIENTS = federation.POPULATION
KEY = jax.random.key(0)
ZERO = federation.line(0.0, 0.0)


def first_round(algorithm, plan, data):
  return algorithm.step(algorithm.init(KEY), plan, data)[0]


def images(number):
  """Images of class 0: from logits (0, 0) a step of rate 1 moves by 1/2."""
  return {"x": jnp.ones((number, 1)), "y": jnp.zeros(number, int)}


def pool_round(steps=1, **settings):
  """The server's weights after a client's steps from zero."""
  settings = {**dict(server_optimizer=fedavg_server), **settings}
  pool = Pool(ZERO, "a", learning_rate=1.0, server_lr=1.0, **settings)
  clients = ClientPopulation.from_lists(images(steps), [np.arange(steps)])
  plan = plan_round({"a": clients}, seed=0, round=1, batch_size=1)
  state = first_round(fedavg([pool], rounds=None), plan, {"a": clients.bank})
  return state.server[0].params[0]


def epoch(**settings):
  """A party's weights after one step from zero."""
  plan = plan_fit({"a": Subset.whole(images(1))}, seed=0, round=1, batch_size=1)
  algorithm = fit([Participant(ZERO, "a", **settings)])
  state = first_round(algorithm, plan, {"a": images(1)})
  return state.clients[0].learner.params[0]


def alone(**settings):
  """A client's weights after one step from zero."""
  held = Subset.whole(images(1))
  plan = plan_round({"train": held}, seed=0, round=1, batch_size=1)
  algorithm = fml([Client(ZERO)], global_model=None, **settings)
  state = first_round(algorithm, plan, {"train": images(1)})
  return local_model(state, 0).params[0]


def test_hyper_parameters_of_trials_are_each_states_own():
  algorithm = CASES["merged"].build(None, 1, model=algorithms.MLP)
  states = jax.jit(jax.vmap(algorithm.init))(jax.random.split(KEY, 2))
  with pytest.raises(ValueError, match="several trials: .*vmap"):
    with_hyper(states, learning_rate=(0.1, 0.3))
  rates = jnp.array([[0.1, 0.3], [0.2, 0.4]])
  states = jax.vmap(lambda s, v: with_hyper(s, learning_rate=v))(states, rates)
  np.testing.assert_array_equal(states.hyper["learning_rate"], rates)


def test_trials_are_evaluated_together():
  model = algorithms.MLP
  subset = Subset.whole(dict(CLIENTS.bank))
  evaluator = Evaluator([model], {"test": subset}, batch_size=5)
  seeds = jax.random.split(KEY, 3)
  trials = jax.vmap(model.start)(seeds)
  data = evaluator.data("test")
  sums = jax.jit(jax.vmap(lambda v: evaluator.sums([v], data)[0]))(trials)
  for i, seed in enumerate(seeds):
    (found,) = evaluator([model.start(seed)])
    of_trial = core.values(jax.tree.map(lambda a, i=i: a[i], sums))
    assert of_trial == pytest.approx(found, rel=1e-5)
  with pytest.raises(ValueError, match="use evaluator.sums"):
    jax.vmap(lambda v: evaluator([v]))(trials)


@pytest.mark.parametrize("name", ["fedavg", "periodic", "fedmd"])
def test_gradients_through_a_round_whose_plan_is_known(name):
  """Reverse mode gives the gradient of forward mode."""
  case = CASES[name]
  algorithm = case.build(None, 2, model=algorithms.flat_model(name))
  start, plan, data = algorithm.init(KEY), case.plan(2), case.data()

  def distance(rate):
    state = with_hyper(start, learning_rate=rate)
    state, _ = algorithm.step(state, plan, data)
    return optax.tree.norm((state.server or state.clients)[0].params)

  rate = jnp.float32(0.1)
  _, forward = jax.jvp(jax.jit(distance), (rate,), (jnp.ones(()),))
  backward = jax.jit(jax.grad(distance))(rate)
  assert abs(forward) > 1e-3
  np.testing.assert_allclose(backward, forward, rtol=1e-4)


def test_gradients_of_clients_of_unlike_sizes_with_a_clipped_optimizer():
  """Empty steps, whose gradient is zero, are not differentiated."""
  optimizer = functools.partial(momentum_sgd, clip_norm=1.0)
  pools = federation.make_pools(1, models=federation.DENSE, optimizer=optimizer)
  algorithm = fedavg(pools, rounds=None)
  start = algorithm.init(KEY)
  plan, data = federation.make_plan(1, num_pools=1), federation.make_data(1)
  assert len({*plan.batches["pool0"].steps.tolist()}) > 1

  def norm(rate):
    state = with_hyper(start, learning_rate=rate)
    return optax.tree.norm(
      algorithm.step(state, plan, data)[0].server[0].params
    )

  rate = jnp.array([0.1])
  _, forward = jax.jvp(norm, (rate,), (jnp.ones(1),))
  np.testing.assert_allclose(jax.grad(norm)(rate)[0], forward, rtol=1e-4)


def test_clients_without_examples_have_no_slope():
  """Nor has what clips at zero: an optimizer, or what they send."""

  def clipped(key, delta):
    return optax.tree.scale(jnp.minimum(1, 0.3 / optax.tree.norm(delta)), delta)

  clip = functools.partial(momentum_sgd, clip_norm=0.1)
  options = dict(models=federation.DENSE, optimizer=clip)
  pools = federation.make_pools(1, delta_transform=clipped, **options)
  algorithm = fedavg(pools, rounds=None)
  start, data = algorithm.init(KEY), federation.make_data(1)
  plan = federation.make_plan(1, num_pools=1)
  held = leave_out(plan.batches["pool0"], plan.batches["pool0"].client[:1])
  held.index[1] = -1  # Another has steps, but nothing to learn from.
  plan = plan._replace(batches={"pool0": held})

  @jax.jit
  def norm(scale):
    (server,) = start.server
    params = optax.tree.scale(scale, server.params)
    variables = server.variables._replace(params=params)
    state = start.replace(server=(server._replace(variables=variables),))
    state, _ = algorithm.step(state, plan, data)
    return optax.tree.norm(state.server[0].params)

  scale = jnp.float32(0.5)
  _, forward = jax.jvp(norm, (scale,), (jnp.ones(()),))
  assert abs(forward) > 1e-3
  np.testing.assert_allclose(jax.grad(norm)(scale), forward, rtol=1e-4)


@pytest.mark.parametrize(
  "name,changes",
  [(n, {}) for n in ("merged", "fedmd", "fml", "fedkd", "scaffold")]
  + [("fml", {"sequential": True})],
)
def test_derivatives_by_hyper_parameters_are_those_of_differences(
  name, changes
):
  """Also of what a step's own gradient holds fixed, such as partners."""
  case = CASES[name]
  algorithm = case.build(None, 2, model=algorithms.flat_model(name), **changes)
  start, data = jax.jit(algorithm.init)(KEY), case.data()
  plans = [case.plan(t) for t in (1, 2)]
  if name in ("fml", "fedkd", "scaffold"):  # A client drops out.
    left = {n: leave_out(b, [0]) for n, b in plans[1].batches.items()}
    plans[1] = plans[1]._replace(batches=left)
  # How many singular vectors are kept has no slope: all.
  fixed = {"energy": jnp.ones(())} if name == "fedkd" else {}

  @jax.jit
  def after(change):
    """A number for each array of the state and each metric."""
    hyper = {n: x * (1 + change) for n, x in start.hyper.items()}
    state = start.replace(hyper=hyper | fixed)
    for plan in plans:
      state, metrics = algorithm.step(state, plan, data)
    means = {n: m.value for n, m in metrics.items()}
    leaves = jax.tree.leaves((algorithms.arrays(state), means))
    return [jnp.sum(jnp.cos(jnp.arange(x.size)) * x.ravel()) for x in leaves]

  _, found = jax.jvp(after, (0.0,), (1.0,))
  width = 0.01
  expected = [
    (a - b) / (2 * width) for a, b in zip(after(width), after(-width))
  ]
  assert np.abs(expected).max() > 0.1
  np.testing.assert_allclose(found, expected, rtol=0.01, atol=0.002)


def test_a_target_of_zero_has_a_derivative():
  """The target is 1 and, to float32, 0; so is its derivative."""
  target = lambda t: tempered_softmax(jnp.array([[0.0, -200.0]]), t)
  kl = lambda t: kl_divergence(target(t), jnp.array([[0.0, 1.0]])).sum()
  assert jax.grad(kl)(1.0) == 0
  np.testing.assert_allclose(kl(1.0), np.log1p(np.e), rtol=1e-6)


@pytest.mark.parametrize("dtype", [None, jnp.float16])
def test_types_are_those_of_the_models_init(dtype):
  """Weak ones would compile the second round anew."""
  weak = lambda key: core.Variables(jnp.full((1, 2), 0.0), {})
  model = ZERO._replace(init=weak)
  pool = Pool(model, "a", learning_rate=1.0, server_lr=1.0)
  given = dtype and [core.Variables(jnp.zeros((1, 2), dtype), {})]
  algorithm = fedavg([pool], rounds=None)
  clients = ClientPopulation.from_lists(images(1), [np.arange(1)])
  step, state = jax.jit(algorithm.step), algorithm.init(KEY, given)
  for t in (1, 2):
    plan = plan_round({"a": clients}, seed=0, round=t, batch_size=1)
    state, _ = step(state, plan, {"a": clients.bank})
  assert step._cache_size() == 1
  assert state.server[0].params.dtype == jnp.float32


def test_trials_may_lie_on_several_devices():
  mesh = jax.sharding.Mesh(jax.devices()[:2], ("trials",))
  over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("trials"))
  algorithm = fedavg(
    federation.make_pools(1, models=federation.DENSE), rounds=2
  )
  states = jax.jit(jax.vmap(algorithm.init))(jax.random.split(KEY, 4))
  plan, data = federation.make_plan(1, num_pools=1), federation.make_data(1)
  step = jax.jit(jax.vmap(lambda state: algorithm.step(state, plan, data)[0]))
  found, expected = step(jax.device_put(states, over)), step(states)
  # Products of other sizes add up in another order, which Adam magnifies.
  assert_close(found.server[0].params, expected.server[0].params, rtol=2e-4)


def test_clients_may_change_what_they_send():
  np.testing.assert_allclose(pool_round(), [0.5, -0.5])

  def clipped(key, delta):  # Of length 1 / sqrt(2), to 1 / 2.
    return optax.tree.scale(jnp.minimum(1, 0.5 / optax.tree.norm(delta)), delta)

  half = 0.5 / np.sqrt(2)
  found = pool_round(delta_transform=clipped)
  np.testing.assert_allclose(found, [half, -half], rtol=1e-6)
  with pytest.raises(ValueError, match="pool 'a': delta_transform: gives"):
    pool_round(delta_transform=lambda key, delta: delta[0])


def test_noise_of_clients_is_their_own():
  """If clients send only noise, the server's delta is its weighted mean."""

  def noise(key, delta):
    return jax.tree.map(lambda d: jax.random.normal(key, d.shape), delta)

  pools = federation.make_pools(
    1,
    server_optimizer=fedavg_server,
    server_lr=1.0,
    delta_transform=noise,
  )
  algorithm = fedavg(pools, rounds=None)
  start = algorithm.init(KEY)
  plan = federation.make_plan(1, num_pools=1)
  state, _ = jax.jit(algorithm.step)(start, plan, federation.make_data(1))
  before, after = (s.server[0].params for s in (start, state))

  batches = plan.batches["pool0"]
  fold = jax.random.fold_in
  round_key = fold(fold(start.key, 1), 0)
  drawn = [
    noise(fold(fold(round_key, client), np.uint32(2**32 - 1)), before)
    for client in batches.client
  ]
  assert len(drawn) == 4
  share = batches.weight / batches.weight.sum()
  mean = lambda *each: np.tensordot(share, np.stack(each), 1)
  assert_close(optax.tree.sub(before, after), jax.tree.map(mean, *drawn))


LOG2 = np.log(2)  # The loss at logits (0, 0).


def test_optimizers_may_ask_for_the_loss():
  """Polyak's rate is loss / squared gradient norm: log 2 / (1/4 + 1/4)."""
  polyak = lambda rate: optax.polyak_sgd(max_learning_rate=9 * rate)
  for params in (
    pool_round(optimizer=polyak),
    epoch(learning_rate=1.0, optimizer=polyak),
    alone(learning_rate=1.0, optimizer=polyak),
  ):
    np.testing.assert_allclose(params, [LOG2, -LOG2], rtol=1e-5)


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
  pools = algorithms.changed(pools, model=algorithms.MLP)
  algorithm = periodic_codist(
    pools, distiller, period=1, rounds=None, engine=runner
  )
  start, plan = algorithm.init(KEY), federation.make_plan(1)
  plan.batches["distill"].steps[:] = 1
  state, metrics = jax.jit(algorithm.step)(start, plan, federation.make_data())
  for i, (before, after) in enumerate(zip(start.server, state.server)):
    loss = metrics[f"pool{i}/distill_loss"].value
    moved = optax.tree.sub(before.params, after.params)
    expected = jax.tree.map(lambda p, x=loss: np.full(p.shape, x), moved)
    assert loss > 1e-3
    assert_close(moved, expected, rtol=1e-3)


def test_the_loss_has_its_penalties():
  """log 2 and mu / 2 |w - w|^2 = 0; then the second step's, by hand."""
  found = pool_round(steps=2, prox_mu=0.5, optimizer=falls_by_the_loss)
  # Both logits fall alike, so the loss stays; the term is 1/4 (2 log2^2) then.
  fallen = LOG2 + (LOG2 + 0.25 * 2 * LOG2**2)
  np.testing.assert_allclose(found, [-fallen, -fallen], rtol=1e-5)
  found = epoch(
    learning_rate=1.0,
    l2=0.5,
    penalty=lambda params: 3.0 + 0 * params.sum(),
    optimizer=falls_by_the_loss,
  )
  np.testing.assert_allclose(found, 2 * [-LOG2 - 1.5], rtol=1e-5)


@pytest.mark.parametrize("name", ["fedavg", "periodic", "merged"])
def test_pools_go_on_from_models(name):
  algorithm = CASES[name].build(None, 1)
  other = jax.jit(algorithm.init)(jax.random.key(7))
  models = [learner.variables for learner in other.server]
  state = algorithm.init(KEY, models)
  assert_close([learner.variables for learner in state.server], models)
  jax.jit(lambda state: state, donate_argnums=0)(state)
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(models))
  with pytest.raises(ValueError, match="variables: give 2, not 1"):
    algorithm.init(KEY, models[:1])
  with pytest.raises(ValueError, match="pool 'pool0': gives .*params"):
    algorithm.init(KEY, models[::-1])


def test_clients_go_on_from_a_global_model():
  model = algorithms.MLP
  server = model.start(jax.random.key(7))
  algorithm = fml([Client(model)] * 2, global_model=model)
  assert_close(algorithm.init(KEY, server).server, server)
  with pytest.raises(ValueError, match="server: gives"):
    algorithm.init(KEY, algorithms.WIDE.start(KEY))


def test_a_translator_of_ones_own():
  mine = Translator(lambda z, t: z, lambda z, f, t: absolute_error(z, f))
  case = CASES["fedmd"]
  plan, data = case.plan(1), case.data()
  parties = algorithms.parties(model=algorithms.flat_model("fedmd"))

  def metrics_of_a_round(digest_loss):
    algorithm = fedmd(parties, digest_loss=digest_loss)
    return jax.jit(algorithm.step)(algorithm.init(KEY), plan, data)[1]

  chex.assert_trees_all_equal(*map(metrics_of_a_round, (mine, "mae")))


def test_without_a_penalty_there_is_no_weight_of_it():
  state = fit([Participant(ZERO, "a", learning_rate=0.1)]).init(KEY)
  with pytest.raises(ValueError, match="l2: this state has no such"):
    with_hyper(state, l2=0.1)


@pytest.mark.parametrize("runner", [engine.Inline(), engine.Threads(2)])
def test_a_method_knows_the_round(runner):
  """In rounds 3 and 5 a client of rate t/8 goes from 0 by 3/16 and 5/16."""

  def begin(context, kept):
    return core.Variables(jnp.zeros_like(kept.learner.params), {})

  def losses_of(client):
    def losses(variables, batch, key, context):
      outputs, stats = client.outputs(variables, batch, key)
      return context["round"] / 8 * client.loss(outputs, batch), stats, {}

    return losses

  method = personal.Method(
    losses_of,
    begin=begin,
    server=lambda key, kept: jnp.zeros(()),
    aggregate=lambda context, sent, key: context["server"] + context["round"],
  )
  algorithm = personal.personal(
    [Client(ZERO)], method, learning_rate=1.0, engine=runner
  )
  held = Subset.whole(images(1))
  state = algorithm.init(KEY)
  step = runner.compile(algorithm.step)
  for round, moved in ((3, 3 / 16), (5, 5 / 16)):
    plan = plan_round({"train": held}, seed=0, round=round, batch_size=1)
    state, _ = step(state, plan, {"train": images(1)})
    assert_close(local_model(state, 0).params[0, 0], moved)
  assert state.server == 8


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
  "runner",
  [
    engine.Inline(),
    engine.Threads(2),
    engine.Inline(federation.mesh(2)),
  ],
  ids=["inline", "threads", "mesh"],
)
def test_each_client_is_evaluated_by_itself(runner, own):
  model, keys = algorithms.MLP, jax.random.split(KEY, 9)
  each = jax.vmap(model.start)(keys)
  take = lambda k: jax.tree.map(lambda a: a[k], each)
  evaluator = ClientEvaluator(model, CLIENTS, engine=runner, batch_size=5)
  found = evaluator(each if own else take(0), own=own)
  numbers = range(len(CLIENTS))
  sets = {f"{k}": Subset(CLIENTS.bank, CLIENTS.positions(k)) for k in numbers}
  by_itself = Evaluator([model], sets, batch_size=3)
  for k in numbers:
    (expected,) = by_itself([take(k if own else 0)])
    assert found["accuracy"][k] == pytest.approx(expected[f"{k}_accuracy"])
    assert found["loss"][k] == pytest.approx(expected[f"{k}_loss"], rel=1e-5)


def test_clients_of_very_different_sizes_are_evaluated_in_parts():
  """As each by itself; a million clients of few examples are no million rows.

  Padded to the largest client, they would take a thousand times the memory.
  """
  sizes = [1, 3, 4, 5, 60, 2, 700, 17] * 2
  rng, number = np.random.default_rng(0), sum(sizes)
  bank = {
    "x": rng.standard_normal((number, 2, 3, 1), np.float32),
    "y": rng.integers(0, 4, number),
  }
  parts = np.split(rng.permutation(number), np.cumsum(sizes)[:-1])
  clients = ClientPopulation.from_lists(bank, parts)
  model = core.Model(
    lambda key: core.Variables(jax.random.normal(key, (6, 4)), {}),
    lambda v, x, key, train: (x.reshape(len(x), -1) @ v.params, v.stats),
  )
  variables = model.start(KEY)
  found = ClientEvaluator(model, clients, batch_size=40)(variables)
  each = jax.tree.map(lambda a: np.stack([a] * len(sizes)), variables)
  own = ClientEvaluator(model, clients, batch_size=40)(each, own=True)
  weights = np.asarray(variables.params)
  for k, part in enumerate(parts):
    logits = bank["x"][part].reshape(len(part), -1) @ weights
    correct = (logits.argmax(1) == bank["y"][part]).mean()
    assert found["accuracy"][k] == own["accuracy"][k] == correct
    losses = (
      jax.nn.logsumexp(logits, axis=1)
      - logits[range(len(part)), bank["y"][part]]
    )
    np.testing.assert_allclose(found["loss"][k], losses.mean(), rtol=1e-5)
    np.testing.assert_allclose(own["loss"][k], losses.mean(), rtol=1e-5)


def test_who_has_no_model_is_not_evaluated_by_anothers():
  sizes = [180, *[2] * 19]  # Evaluated in two parts.
  bank = {"x": np.ones((180, 1), np.float32), "y": np.zeros(180, np.int32)}
  parts = [np.arange(n) for n in sizes]
  clients = ClientPopulation.from_lists(bank, parts)
  evaluator = ClientEvaluator(ZERO, clients, batch_size=4)
  of = lambda models: core.Variables(jnp.ones((models, 1, 2)), {})
  assert len(evaluator(of(20), own=True)["accuracy"]) == 20
  for models in (5, 25):
    with pytest.raises(ValueError, match="variables: .* each of the 20 client"):
      evaluator(of(models), own=True)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_infinite_losses_are_infinite_for_every_batch_size(size):
  """Empty places repeat an example, and 0 times infinity would be NaN."""
  model = core.Model(
    lambda key: core.Variables({}, {}),
    lambda v, x, key, train: (jnp.where(jnp.arange(3) == 2, -jnp.inf, x), {}),
  )
  bank = {"x": np.zeros((7, 3)), "y": np.array([2, 0, 1, 0, 1, 2, 2])}
  evaluator = Evaluator([model], {"test": Subset.whole(bank)}, batch_size=size)
  (found,) = evaluator([model.start(KEY)])
  assert found == {"test_accuracy": 2 / 7, "test_loss": np.inf}


@pytest.mark.parametrize("size", [1, 2, 3, 40])
def test_labels_of_positions_count_by_example(size):
  """Half right, and three quarters: (1/2 + 3/4) / 2, whatever the batch."""
  model = core.Model(
    lambda key: core.Variables(jnp.zeros(()), {}),
    lambda v, x, key, train: (jnp.stack([x, 0 * x], axis=-1) + v.params, {}),
  )
  bank = {
    "x": np.ones((2, 4), np.float32),  # Class 0 everywhere.
    "y": np.array([[0, 0, 1, 1], [0, 1, 0, 0]]),
  }
  (found,) = Evaluator([model], {"test": Subset.whole(bank)}, batch_size=size)(
    [model.start(KEY)]
  )
  # log(1 + 1/e) where it is right, and one more where not, of 3 of 8.
  expected = {"test_accuracy": 5 / 8, "test_loss": np.log1p(1 / np.e) + 3 / 8}
  assert found == pytest.approx(expected)
  # Class 0 is predicted 8 times and right 5 times: 2 * 5 / (8 + 5).
  measure = lambda outputs, batch: {"f1": class_f1(outputs, batch)}
  clients = ClientPopulation.from_lists(bank, [[0, 1]])
  evaluator = ClientEvaluator(model, clients, measure=measure, batch_size=size)
  f1 = evaluator(model.start(KEY))["f1"]
  np.testing.assert_allclose(f1, [[10 / 13, 0]])


def test_algorithms_are_made_under_jit_of_traced_values():
  @jax.jit
  def start(mu):
    pool = Pool(ZERO, "a", learning_rate=1.0, server_lr=1.0, prox_mu=mu)
    return fedavg([pool], rounds=None).init(jax.random.key(0)).hyper

  assert start(0.25)["prox_mu"].tolist() == [0.25]
