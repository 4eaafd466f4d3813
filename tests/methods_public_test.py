"""DS-FL, KT-pFL, FedDF, Fed-ET against oracles, and what else they must do."""

import dataclasses
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetfl
from hetfl import core, Participant, population
from hetfl.algorithms.dsfl import dsfl
from hetfl.algorithms.feddf import feddf
from hetfl.algorithms.fedet import consensus, fedet
from hetfl.algorithms.ktpfl import ktpfl, step_coefficients
from tests import algorithms, federation
from tests.federation import batches_of, double, plain
from tests.oracles import codist as oracle
from tests.oracles.codist import softmax, tree_map

assert_close = functools.partial(
  chex.assert_trees_all_close, rtol=2e-4, atol=5e-6
)
NAMES = ("a", "b", "c")
PUBLIC, PRIVATE = algorithms.make_bank(14, 0), algorithms.make_bank(15, 1)
HELD = {
  name: population.Subset(PRIVATE, index)
  for name, index in zip(NAMES, np.split(np.arange(15), (4, 9)))
}


def participant(name, width, rate):
  model = core.Model.from_flax(
    federation.Mlp(width, algorithms.PARTY_CLASSES), PUBLIC["x"][:1]
  )
  return Participant(model, name, learning_rate=rate)


PARTIES = [
  participant(name, width, rate)
  for name, width, rate in zip(NAMES, (3, 5, 4), (0.5, 0.25, 0.125))
]
SERVER = participant("server", 6, 0.5)


def make_plan(round, absent=None):
  plan = hetfl.plan_fedmd(
    population.Subset.whole(PUBLIC),
    HELD,
    seed=0,
    round=round,
    subset=12,
    digest_batch_size=5,
    digest_epochs=2,
    revisit_batch_size=3,
  )
  if absent is not None:
    plan.batches["digest"].steps[absent] = 0
    plan.batches[NAMES[absent]].steps[:] = 0
  return plan


def make_data():
  banks = {"public": PUBLIC} | dict.fromkeys(NAMES, PRIVATE)
  return jax.device_put(banks)


# --- The oracle -----------------------------------------------------------


def train(params, batches, lr, temperature=1.0):
  """SGD towards targets: the loss is KL(target || softmax(z / T))."""
  for x, target in batches:
    z, tape = oracle.forward(params, x)
    dz = (softmax(z, temperature) - target) / (temperature * len(x))
    grads = oracle.backward(params, tape, dz)
    params = tree_map(lambda w, g: w - lr * g, params, grads)
  return params


def revisited(params, plan, k):
  row = plan.batches[NAMES[k]]
  batches = [
    (PRIVATE["x"][i], np.eye(algorithms.PARTY_CLASSES)[PRIVATE["y"][i]])
    for i in row.index[0, : row.steps[0]]
  ]
  return train(params, batches, PARTIES[k].learning_rate)


def digested(params, plan, k, target, lr, temperature=1.0):
  row, x = plan.batches["digest"], public(plan)
  batches = [(x[i], target[i]) for i in row.index[k, : row.steps[k]]]
  return train(params, batches, lr, temperature)


def public(plan):
  return PUBLIC["x"][plan.batches["public"].index[0, 0]]


def dsfl_round(models, server, plan, weights, temperature):
  models = [revisited(w, plan, k) for k, w in enumerate(models)]
  said = [softmax(oracle.logits(w, public(plan))) for w in models]
  mean = sum(c * p for c, p in zip(weights, said)) / sum(weights)
  target = np.exp(mean / temperature)
  target /= target.sum(axis=1, keepdims=True)
  return [
    digested(w, plan, k, target, PARTIES[k].learning_rate)
    for k, w in enumerate(models)
  ], digested(server, plan, 0, target, SERVER.learning_rate)


def to_simplex(v):
  """The nearest distribution, `max(v - tau, 0)`; tau by bisection."""
  low, high = v.min() - 1, v.max()
  for _ in range(100):
    tau = (low + high) / 2
    low, high = (tau, high) if np.maximum(v - tau, 0).sum() > 1 else (low, tau)
  return np.maximum(v - high, 0)


def coefficients_step(c, said, eta, rho):
  new = np.zeros_like(c)
  for k, row in enumerate(c):
    mixed = sum(weight * p for weight, p in zip(row, said))
    # Of sum_j c_kj p_j (log m - log p_k) also the logarithm has a slope.
    slope = [
      (p * (np.log(mixed / said[k]) + 1)).sum(axis=1).mean() for p in said
    ]
    new[k] = to_simplex(
      row - eta * (np.array(slope) + 2 * rho * (row - 1 / len(c)))
    )
  return new


def ktpfl_round(models, c, plan, eta, rho, temperature, steps):
  said = [softmax(oracle.logits(w, public(plan)), temperature) for w in models]
  for _ in range(steps):
    c = coefficients_step(c, said, eta, rho)
  models = [
    digested(
      w,
      plan,
      k,
      sum(weight * p for weight, p in zip(c[k], said)),
      PARTIES[k].learning_rate,
      temperature,
    )
    for k, w in enumerate(models)
  ]
  return [revisited(w, plan, k) for k, w in enumerate(models)], c


def check(learners, expected):
  for learner, params in zip(learners, expected, strict=True):
    assert_close(learner.params, params, rtol=1e-9, atol=1e-11)


def test_dsfl_is_the_oracles():
  algorithm = dsfl(PARTIES, server=SERVER, eval_batch_size=5)
  with jax.enable_x64(True):
    state = double(algorithm.init(jax.random.key(3)))
    models = [plain(learner.params) for learner in state.clients]
    server = plain(state.server.params)
    step = jax.jit(algorithm.step)
    for round, weights, absent in ((1, (1, 1, 1), None), (2, (3, 0, 1), 1)):
      plan = make_plan(round, absent)
      state = double(core.with_hyper(state, consensus_weights=weights))
      temperature = float(state.hyper["temperature"])
      state, metrics = step(state, plan, double(make_data()))
      models, server = dsfl_round(models, server, plan, weights, temperature)
      check(state.clients, models)
      check([state.server], [server])
  counts = {name: int(mean.count) for name, mean in metrics.items()}
  assert counts["a/revisit_loss"] == 4 and counts["server/digest_loss"] == 6
  assert counts["b/revisit_loss"] == counts["b/digest_loss"] == 0


def test_ktpfl_is_the_oracles():
  how = dict(coefficients_lr=2.0, penalty=0.125, temperature=2.0)
  algorithm = ktpfl(PARTIES, coefficients_steps=2, eval_batch_size=5, **how)
  with jax.enable_x64(True):
    state = double(algorithm.init(jax.random.key(3)))
    models = [plain(learner.params) for learner in state.clients]
    c = np.full((3, 3), 1 / 3)
    state = state.replace(server=jnp.asarray(c))
    step = jax.jit(algorithm.step)
    for round, absent in ((1, None), (2, 1)):
      plan = make_plan(round, absent)
      state, _ = step(state, plan, double(make_data()))
      models, c = ktpfl_round(models, c, plan, *how.values(), 2)
      check(state.clients, models)
      np.testing.assert_allclose(state.server, c, rtol=1e-9, atol=1e-12)
  assert np.abs(c - 1 / 3).max() > 0.05


# --- FedDF ----------------------------------------------------------------


def feddf_pools(number=2):
  return federation.make_pools(
    number,
    models=federation.DENSE,
    server_lr=1.0,
    server_optimizer=hetfl.optimizers.fedavg_server,
  )


def feddf_plan(round, absent=None):
  plan = federation.make_plan(round, tail="short")
  if absent is not None:  # Is sampled, and sends nothing.
    rows = plan.batches["pool0"]
    rows.steps[absent], rows.weight[absent] = 0, 0
  return plan


def averaged(models, plan, lr, server_lr=1.0):
  """The models of the clients that take part, and the pools' new ones."""
  bank, teachers, means = federation.POPULATION.bank, [], []
  for i, params in enumerate(models):
    rows = plan.batches[f"pool{i}"]
    present = rows.weight > 0
    deltas = [
      oracle.client_update(params, batches, lr)
      for (_, batches), there in zip(batches_of(rows, bank), present)
      if there
    ]
    minus = lambda w, delta: w - delta
    teachers += [tree_map(minus, params, delta) for delta in deltas]
    mean = oracle.weighted_mean(deltas, rows.weight[present])
    means.append(tree_map(lambda w, g: w - server_lr * g, params, mean))
  return teachers, means


def feddf_round(models, plan, client_lr, distill_lr):
  """The models afterwards; Adam as in the paper, new in each round."""
  bank = federation.POPULATION.bank
  teachers, starts = averaged(models, plan, client_lr)
  fused = []
  for student in starts:
    adam = oracle.DISTILL_ADAM.init(student)
    for index in plan.batches["distill"].index[0]:
      x = bank["x"][index]
      mean = np.mean([oracle.logits(w, x) for w in teachers], axis=0)
      z, tape = oracle.forward(student, x)
      grads = oracle.backward(student, tape, oracle.kl(softmax(mean), z)[1])
      student, adam = oracle.DISTILL_ADAM.update(
        grads, adam, student, distill_lr
      )
    fused.append(student)
  return fused


def test_feddf_is_the_oracles():
  distiller = hetfl.Distiller(0.01, regularization=0.0)
  algorithm = feddf(feddf_pools(), distiller, rounds=None)
  with jax.enable_x64(True):
    state = double(algorithm.init(jax.random.key(3)))
    models = [plain(learner.params) for learner in state.server]
    rates = [float(state.hyper[n][0]) for n in ("learning_rate", "distill_lr")]
    step = jax.jit(algorithm.step)
    for round, absent in ((1, None), (2, 1)):
      plan = feddf_plan(round, absent)
      state, _ = step(state, plan, double(federation.make_data()))
      models = feddf_round(models, plan, *rates)
      check(state.server, models)


def test_feddf_without_learning_from_others_is_fedavg():
  """Its rate is 0, or it learns from its own start alone."""
  pools, data = feddf_pools(), federation.make_data()
  expected, _ = jax.jit(hetfl.fedavg(pools, rounds=None).step)(
    hetfl.fedavg(pools, rounds=None).init(jax.random.key(0)),
    feddf_plan(1),
    data,
  )
  for rate, regularization in ((0.0, 0.0), (0.5, 1.0)):
    distiller = hetfl.Distiller(
      rate, regularization=regularization, optimizer=optax.sgd
    )
    algorithm = feddf(pools, distiller, rounds=None)
    state = algorithm.init(jax.random.key(0))
    state, _ = jax.jit(algorithm.step)(state, feddf_plan(1), data)
    assert_close(federation.params(state), federation.params(expected))


# --- Fed-ET ---------------------------------------------------------------


class Small(nn.Module):
  """Its first layer has a width of its own; the others are all models'."""

  width: int

  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Dense(self.width)(x.reshape(len(x), -1)))
    x = nn.relu(nn.Dense(4)(x))
    return nn.Dense(federation.CLASSES)(x)


def small(width):
  return core.Model.from_flax(Small(width), federation.EXAMPLE)


TEACHERS = [
  dataclasses.replace(pool, model=small(width))
  for pool, width in zip(feddf_pools(), (3, 5))
]
LARGE = Participant(small(8), "server", learning_rate=0.5)


def fedet_lesson(said):
  """Labels, and what those say who disagree, from `[K, B, C]`."""
  sure = said.var(axis=2, keepdims=True)
  labels = (sure * said).sum(axis=0).argmax(axis=1)
  others = np.zeros(said.shape[1:])
  for b, label in enumerate(labels):
    who = said[:, b].argmax(axis=1) != label
    if who.any():
      weights = sure[who, b] / sure[who, b].sum()
      others[b] = softmax((weights * said[who, b]).sum(axis=0))
  return labels, others


def fedet_round(models, server, plan, decay, diversity, shared):
  """The pools' models and the server's afterwards."""
  bank = federation.POPULATION.bank
  teachers, models = averaged(models, plan, TEACHERS[0].learning_rate, decay)
  sizes = [plan.batches[f"pool{i}"].weight.sum() for i in range(len(models))]
  parts = [{shared: w[shared]} for w in models]
  server = server | oracle.weighted_mean(parts, sizes)
  for index in plan.batches["distill"].index[0]:
    x = bank["x"][index]
    said = np.stack([oracle.logits(w, x) for w in teachers])
    labels, others = fedet_lesson(said)
    assert others.any()
    z, tape = oracle.forward(server, x)
    dz = oracle.cross_entropy(z, labels)[1]
    dz += diversity * oracle.kl(others, z)[1]
    grads = oracle.backward(server, tape, dz)
    rate = decay * LARGE.learning_rate
    server = tree_map(lambda w, g, r=rate: w - r * g, server, grads)
  return [w | {shared: server[shared]} for w in models], server


def test_fedet_is_the_oracles():
  algorithm = fedet(TEACHERS, LARGE, diversity=0.5, shared="Dense_2", rounds=4)
  with jax.enable_x64(True):
    state = double(algorithm.init(jax.random.key(3)))
    *models, server = [plain(learner.params) for learner in state.server]
    step = jax.jit(algorithm.step)
    for round, absent in ((1, None), (2, 1)):
      plan = feddf_plan(round, absent)
      state, _ = step(state, plan, double(federation.make_data()))
      decay = 1 - (round - 1) / 4
      models, server = fedet_round(models, server, plan, decay, 0.5, "Dense_2")
      check(state.server, [*models, server])


def test_fedets_pools_are_fedavgs_but_for_shared_layers():
  def after(algorithm):
    state = algorithm.init(jax.random.key(0))
    data = federation.make_data()
    return jax.jit(algorithm.step)(state, feddf_plan(1), data)[0].server

  expected = after(hetfl.fedavg(TEACHERS, rounds=None))
  alone = after(fedet(TEACHERS, LARGE, rounds=None))
  assert_close([w.params for w in alone[:-1]], [w.params for w in expected])
  idle = dataclasses.replace(LARGE, learning_rate=0.0)
  found = after(fedet(TEACHERS, idle, shared="Dense_2", rounds=None))
  sizes = [rows.weight.sum() for rows in feddf_plan(1).batches.values()][:2]
  parts = [w.params["Dense_2"] for w in expected]
  mean = lambda *w: np.average(w, axis=0, weights=sizes)
  parts = jax.tree.map(mean, *parts)
  for ours, theirs in zip(found[:-1], expected):
    assert_close(ours.params, theirs.params | {"Dense_2": parts})
  assert_close(found[-1].params["Dense_2"], parts)


def test_shared_layers_of_a_pool_that_diverges_are_not_heard():
  algorithm = fedet(TEACHERS, LARGE, shared="Dense_2", rounds=None)
  state = algorithm.init(jax.random.key(0))
  first, *others = state.server
  lost = jax.tree.map(lambda a: a * jnp.nan, first.variables)
  state = state.replace(server=(first._replace(variables=lost), *others))
  data = federation.make_data()
  after, _ = jax.jit(algorithm.step)(state, feddf_plan(1), data)
  assert core.all_finite(after.server[1:])


@pytest.mark.parametrize("make", ["fedmd", "dsfl"])
def test_without_anybody_who_is_heard_parties_learn_alone(make):
  """The one that counts is away, or has diverged."""
  options = dict(consensus_weights=[1.0, 0.0, 0.0])
  if make == "fedmd":
    algorithm = hetfl.fedmd(PARTIES, **options)
  else:
    algorithm = dsfl(PARTIES, server=SERVER, **options)
  start = algorithm.init(jax.random.key(0))
  lost = jax.tree.map(lambda a: a * jnp.nan, start.clients[0].variables)
  diverged = start.replace(
    clients=(start.clients[0]._replace(variables=lost), *start.clients[1:])
  )
  alone = make_plan(1)
  alone.batches["digest"].steps[:] = 0
  step = jax.jit(algorithm.step)
  expected, _ = step(start, alone, make_data())
  for state, plan in ((start, make_plan(1, 0)), (diverged, make_plan(1))):
    after, metrics = step(state, plan, make_data())
    assert_close(
      [own.variables for own in after.clients[1:]],
      [own.variables for own in expected.clients[1:]],
    )
    if make == "dsfl":
      assert_close(after.server.variables, start.server.variables)
    assert not [n for n in core.values(metrics) if "digest" in n]


def test_an_ensemble_that_agrees_has_no_others():
  said = [jnp.array([[[0.0, 2.0]], [[0.0, 0.0]]]), jnp.array([[[1.0, 5.0]]])]
  labels, others = consensus(said)  # The second says nothing.
  assert labels.tolist() == [1] and not others.any()


def test_classes_that_are_left_out_change_nothing():
  """Models may mask a class by minus infinity; variances are 1 and 4."""
  said = [jnp.array([[2.0, 0.0]]), jnp.array([[0.0, 4.0]])]
  masked = [jnp.pad(z, ((0, 0), (0, 1)), constant_values=-np.inf) for z in said]
  (label, others), (seen, without) = consensus(said), consensus(masked)
  assert int(label) == int(seen) == 1
  np.testing.assert_allclose(without, [*others, 0.0], rtol=1e-6)


# --- Properties -----------------------------------------------------------


def run(algorithm, rounds, state=None):
  state = algorithm.init(jax.random.key(0)) if state is None else state
  step = jax.jit(algorithm.step)
  for round in range(1, rounds + 1):
    state, metrics = step(state, make_plan(round), make_data())
  return state, metrics


def test_the_servers_model_is_only_a_listener():
  alone, _ = run(dsfl(PARTIES), 2)
  beside, metrics = run(dsfl(PARTIES, server=SERVER), 2)
  assert alone.server == ()
  assert_close(alone.clients, beside.clients)
  assert metrics["server/digest_loss"].value > 0
  assert "server/revisit_loss" not in metrics


def test_with_constant_coefficients_ktpfl_is_fedmd():
  ours, metrics = run(ktpfl(PARTIES, coefficients_lr=0.0, temperature=2.0), 2)
  theirs, expected = run(
    hetfl.fedmd(PARTIES, digest_loss="kl", temperature=2.0), 2
  )
  assert_close(ours.clients, theirs.clients)
  assert_close(metrics, expected)
  np.testing.assert_allclose(ours.server, 1 / 3, rtol=1e-6)


def test_coefficients_keep_their_type_beside_scores_of_float64():
  with jax.enable_x64(True):
    scores = [jnp.full((3, 2), 0.5, jnp.float64)] * 2
    c = step_coefficients(jnp.full((2, 2), 0.5, jnp.float32), scores, 0.1, 0.7)
  assert c.dtype == jnp.float32


def test_the_penalty_decides_between_ones_own_scores_and_the_mean():
  said = list(softmax(np.random.default_rng(0).normal(size=(3, 12, 4))))
  said = [jnp.asarray(p, jnp.float32) for p in said]
  said[0] = said[0].at[0].set(jnp.array([1.0, 0.0, 0.0, 0.0]))
  start = jnp.array([[0.2, 0.2, 0.6], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
  own = step_coefficients(start, said, 0.5, 0.0, 2000)
  np.testing.assert_allclose(own, np.eye(3), atol=0.01)
  equal = step_coefficients(start, said, 1e-4, 4000.0, 100)
  np.testing.assert_allclose(equal, 1 / 3, atol=2e-3)
  # A distribution, however large the step.
  far = step_coefficients(start, said, 1e3, 1.0)
  np.testing.assert_allclose(far.sum(axis=1), 1, rtol=1e-4)
  assert (far >= 0).all()


def test_trials_of_dsfl_are_one_program():
  """16 trials as one `vmap`, three rounds as one `scan`."""
  rng, trials = np.random.default_rng(0), 16
  algorithm = dsfl(PARTIES, server=SERVER)
  state = algorithm.init(jax.random.key(0))
  values = {
    "learning_rate": rng.uniform(0.1, 0.5, (trials, 4)),
    "temperature": rng.uniform(0.05, 0.5, trials),
  }
  values = {name: jnp.float32(x) for name, x in values.items()}
  plans = [make_plan(round) for round in (1, 2, 3)]
  data = make_data()

  def trial(values):
    step = lambda state, plan: algorithm.step(state, plan, data)
    begin = core.with_hyper(state, **values)
    return jax.lax.scan(step, begin, hetfl.stack_plans(plans))

  together, metrics = jax.jit(jax.vmap(trial))(values)
  losses = metrics["server/digest_loss"].value
  assert losses.shape == (trials, 3)
  step = jax.jit(algorithm.step)
  for i in range(trials):
    one = core.with_hyper(state, **{n: x[i] for n, x in values.items()})
    for t, plan in enumerate(plans):
      one, now = step(one, plan, data)
      found = now["server/digest_loss"].value
      np.testing.assert_allclose(losses[i, t], found, rtol=1e-4)
    ours = jax.tree.map(lambda a, i=i: a[i], algorithms.arrays(together))
    assert_close(ours, algorithms.arrays(one))
  assert np.unique(np.round(losses[:, -1], 4)).size == trials


def test_what_is_out_of_range_is_refused():
  for method, settings, message in [
    (dsfl, dict(temperature=0.0), "temperature=0.0"),
    (dsfl, dict(consensus_weights=(0, 0, 0)), "^consensus_weights=0.0: one"),
    (dsfl, dict(server=PARTIES[0]), "parties and server: .* name of its own"),
    (ktpfl, dict(coefficients_lr=-1.0), "coefficients_lr=-1.0"),
    (ktpfl, dict(coefficients_steps=0), "coefficients_steps=0"),
    (ktpfl, dict(penalty=-1.0), "penalty=-1.0"),
  ]:
    with pytest.raises(ValueError, match=message):
      method(PARTIES, **settings)
  for settings, message in (
    (dict(diversity=-1.0), "diversity=-1.0"),
    (dict(shared="Dense_3"), "'server' has no parameters of that name"),
    (dict(shared="Dense_0"), "shared='Dense_0', of pool 'pool1' beside"),
  ):
    with pytest.raises(ValueError, match=message):
      fedet(TEACHERS, LARGE, rounds=1, **settings).init(jax.random.key(0))
  with pytest.raises(ValueError, match="pools and server: .* of its own"):
    fedet(TEACHERS, dataclasses.replace(LARGE, name="pool0"), rounds=1)
