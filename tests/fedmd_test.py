"""FedMD against its oracle, and what it must do besides the contract."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetfl import (
  core,
  engine,
  fedmd,
  fit,
  Learner,
  Participant,
  plan_fedmd,
  plan_fit,
  Subset,
)
from hetfl.algorithms.fedmd import consensus, squared_error
from hetfl.models import fedmd as models
from hetfl.optimizers import keras_adam
from tests import algorithms, federation
from tests.algorithms import PARTY_CLASSES, PartyMlp
from tests.federation import double, jitted, plain
from tests.oracles import codist as codist_oracle
from tests.oracles import fedmd as oracle
from tests.oracles_test import check_gradient

CLASSES = PARTY_CLASSES
WEIGHTS = (0.75, 0.25)
# The same numbers in another order of addition, in float32.
TOLERANCE = dict(rtol=2e-4, atol=2e-6)
assert_close = functools.partial(chex.assert_trees_all_close, **TOLERANCE)
assert_equal = chex.assert_trees_all_equal
FILTERS = ((3, 4), (2, 3, 4))
TRANSLATIONS = {
  "mae": (lambda z: z, oracle.absolute),
  "mse": (lambda z: z, oracle.squared),
  "kl": (lambda z: codist_oracle.softmax(z, 2.0), oracle.tempered(2.0)),
}


def transform(batch):
  """A transform, so that a test fails if one is not applied."""
  return {**batch, "x": batch["x"] / 4}


def make_parties(dropout=0.0, cnn=False):
  """Different models and rates: dense models, or two of the paper's."""
  modules = [PartyMlp(3, dropout), PartyMlp(5, dropout)]
  if cnn:
    modules = [
      models.PartyCNN(models.blocks_of(filters), dropout, CLASSES)
      for filters in FILTERS
    ]
  return [
    Participant(
      name=f"party{k}",
      model=core.Model.from_flax(module, jnp.zeros((1, *SHAPE))),
      learning_rate=2.0 ** -(6 + k),
      transform=transform,
      l2=0.125,
      penalty=models.head_penalty,
      # A bias before batch normalisation has no gradient but rounding's,
      # which Adam would blow up.
      optimizer=keras_adam if cnn else optax.sgd,
    )
    for k, module in enumerate(modules)
  ]


SHAPE = (12, 12, 1)


def make_bank(n, seed):
  bank = algorithms.make_bank(n, seed, SHAPE)
  return bank | {"x": 4 * bank["x"]}


PUBLIC = make_bank(24, 0)
PRIVATE = make_bank(11, 1)
HELD = {
  "party0": Subset(PRIVATE, np.arange(4)),
  "party1": Subset(PRIVATE, np.arange(4, 11)),
}


def make_plan(round):
  return plan_fedmd(
    Subset.whole(PUBLIC),
    HELD,
    seed=0,
    round=round,
    subset=12,
    digest_batch_size=5,
    revisit_batch_size=3,
    revisit_epochs=2,
  )


def make_data(**private):
  banks = jax.device_put({"public": PUBLIC} | dict.fromkeys(HELD, PRIVATE))
  return banks | private


def build(parties=None, runner=None, **settings):
  return fedmd(
    parties or make_parties(),
    public_transform=transform,
    engine=runner,
    **dict(consensus_weights=WEIGHTS, temperature=2.0, eval_batch_size=5)
    | settings,
  )


def run(algorithm, rounds, *, state=None, first=1, data=None):
  state = algorithm.init(jax.random.key(0)) if state is None else state
  for round in range(first, first + rounds):
    state, metrics = algorithm.step(
      state, make_plan(round), data or make_data()
    )
  return state, metrics


def params(state):
  return [learner.params for learner in state.clients]


def oracle_blocks(filters):
  return [tuple(block)[1:] for block in models.blocks_of(filters)]


def oracle_parties(parties, variables):
  """The oracle's parties, from the same parameters."""
  return [
    oracle.Party.start(
      oracle_blocks(filters),
      plain(v.params),
      plain(v.stats["batch_stats"]),
      lr=party.learning_rate,
      l2=party.l2,
    )
    for filters, party, v in zip(FILTERS, parties, variables)
  ]


def check(variables, expected):
  for ours, theirs in zip(variables, expected):
    pairs = (
      (ours.params, theirs.params),
      (ours.stats["batch_stats"], theirs.stats),
    )
    for a, b in pairs:
      assert_close(dict(a), dict(b), rtol=1e-6, atol=1e-8)


def subset_of(plan):
  return plan.batches["public"].index[0, 0]


def batches_of(plan, name):
  """For each row of the plan its batches."""
  index, steps, *_ = plan.batches[name]
  return [row[:n] for row, n in zip(index, steps)]


def images(bank, index):
  """Images as the models see them, in float64."""
  return bank["x"][index].astype(np.float64) / 4


@pytest.mark.parametrize("loss", TRANSLATIONS)
def test_rounds_are_the_oracles(loss):
  parties = make_parties(cnn=True)
  with jax.enable_x64(True):
    algorithm = build(parties, digest_loss=loss)
    state = double(algorithm.init(jax.random.key(3)))
    expected = oracle_parties(parties, [p.variables for p in state.clients])
    step, scores = jax.jit(algorithm.step), TRANSLATIONS[loss][0]
    # Two rounds: in the second one both optimizers go on.
    for round in (1, 2):
      plan = make_plan(round)
      state, metrics = step(state, plan, double(make_data()))
      expected = oracle.round(
        expected,
        WEIGHTS,
        images(PUBLIC, subset_of(plan)),
        batches_of(plan, "digest"),
        [
          [(images(PRIVATE, i), PRIVATE["y"][i]) for i in index]
          for name in HELD
          for index in batches_of(plan, name)
        ],
        scores=scores,
        loss=TRANSLATIONS[loss][1],
      )
      check([p.variables for p in state.clients], expected)
    assert metrics["party1/digest_loss"].count == 3  # ceil(12 / 5)
    assert metrics["party1/revisit_loss"].count == 6  # 2 ceil(7 / 3)


def test_fit_is_the_oracles():
  parties = make_parties(cnn=True)
  with jax.enable_x64(True):
    algorithm = fit(parties)
    state = double(algorithm.init(jax.random.key(3)))
    expected = oracle_parties(
      parties, [p.learner.variables for p in state.clients]
    )
    data = double(make_data())
    values = [None] * 2
    for round in (1, 2):
      plan = plan_fit(HELD, seed=0, round=round, batch_size=3)
      state, metrics = jax.jit(algorithm.step)(state, plan, data)
      for k, name in enumerate(HELD):
        (batches,) = batches_of(plan, name)
        party, party_state, values[k] = oracle.train(
          expected[k],
          expected[k].revisit,
          [(images(PRIVATE, i), PRIVATE["y"][i]) for i in batches],
          lambda y, z: codist_oracle.cross_entropy(z, y),
        )
        party.revisit = party_state
        expected[k] = party
    check([p.learner.variables for p in state.clients], expected)
    # The loss in the records is without the penalty.
    total, count = metrics["party1/loss"]
    np.testing.assert_allclose(total / count, np.mean(values[1]), rtol=1e-6)


def test_the_oracles_gradients():
  rng = np.random.default_rng(0)
  blocks = oracle_blocks((2, 3, 2))
  shapes = jax.eval_shape(
    models.PartyCNN(models.blocks_of((2, 3, 2)), 0.0, CLASSES).init,
    jax.random.key(0),
    jnp.zeros((1, *SHAPE)),
  )
  draw = lambda tree: jax.tree.map(lambda a: rng.normal(size=a.shape), tree)
  params, stats = draw(shapes["params"]), draw(shapes["batch_stats"])
  x, y = rng.normal(size=(3, *SHAPE)), np.array([0, 2, 3])
  target = codist_oracle.softmax(rng.normal(size=(3, CLASSES)))
  losses = {
    "ce": lambda z: codist_oracle.cross_entropy(z, y),
    "mae": functools.partial(oracle.absolute, target),
    "kl": functools.partial(oracle.tempered(2.0), target),
  }
  for loss in losses.values():
    z, _, tape = oracle.forward(params, stats, blocks, x, True)
    grads = oracle.backward(params, blocks, tape, loss(z)[1])
    check_gradient(
      lambda loss=loss: loss(oracle.forward(params, stats, blocks, x, True)[0])[
        0
      ],
      params,
      grads,
    )


def uploads(variables, plan):
  """What each party sends."""
  x = PUBLIC["x"][subset_of(plan)] / 4
  return [
    np.asarray(party.model.predict(v, x))
    for party, v in zip(make_parties(), variables)
  ]


def test_a_partys_data_never_reaches_another():
  parties, runner = make_parties(), engine.Threads(2)
  transfer = fit(parties, engine=runner)
  algorithm = build(parties, runner, consensus_weights=(0.0, 1.0))
  other = {"x": PRIVATE["x"][::-1] * 3, "y": (PRIVATE["y"] + 1) % CLASSES}
  sent, ends = [], []
  for data in (make_data(), make_data(party0=jax.device_put(other))):
    state = transfer.init(jax.random.key(0))
    plan = plan_fit(HELD, seed=0, phase=1, round=1, batch_size=4)
    state, _ = transfer.step(state, plan, data)
    trained = [progress.learner for progress in state.clients]
    sent.append(uploads([t.variables for t in trained], make_plan(1)))
    state = algorithm.init(jax.random.key(0), trained)
    state, _ = run(algorithm, 2, state=state, data=data)
    ends.append(params(state))
  # Round 1: the poisoned party says something else, the others the same bits.
  assert not np.allclose(sent[0][0], sent[1][0])
  assert_equal(sent[0][1:], sent[1][1:])
  # Its consensus weight is zero, so it does not affect the others at all.
  assert_equal(ends[0][1:], ends[1][1:])


@pytest.mark.parametrize("others", [5.0, np.nan])
def test_derivatives_where_a_party_is_ignored(others):
  f = [jnp.array([0.0, 4.0]), jnp.array([4.0, others]), jnp.array([8.0, 2.0])]
  jacobian = jax.jacobian(consensus, 1)(f, jnp.array([0.5, 0.0, 0.5]))
  # d f~ / d c_k = f_k - f~, as the weights' sum is 1, and f~ = (4, 3).
  expected = np.array([[-4, 0, 4], [1, others - 3, -1]])
  if np.isnan(others):
    expected[1, 1] = -3  # 0 in place of NaN.
  np.testing.assert_allclose(jacobian, expected, atol=1e-6)


def test_squared_errors_have_second_derivatives_at_the_consensus():
  consensus_ = jnp.array([1.0, -jnp.inf])
  hessian = jax.hessian(squared_error)(consensus_, consensus_)
  np.testing.assert_array_equal(hessian, [[1, 0], [0, 0]])  # 2 / C


def test_the_consensus_is_made_before_anybody_moves():
  """Reordering the parties only reorders the results."""
  parties = make_parties()
  forward = jitted(build(parties, consensus_weights=None))
  start = forward.init(jax.random.key(0))
  trained = [
    Learner.start(of.variables, party.optimizer)
    for party, of in zip(parties, start.clients)
  ]
  backward = jitted(build(parties[::-1], consensus_weights=None))
  plan, data = make_plan(1), make_data()
  rows = jax.tree.map(lambda a: a[::-1], plan.batches["digest"])
  mirrored = plan._replace(batches={**plan.batches, "digest": rows})
  a, _ = forward.step(forward.init(start.key, trained), plan, data)
  b, _ = backward.step(backward.init(start.key, trained[::-1]), mirrored, data)
  assert_close(params(a), params(b)[::-1])


def test_batch_statistics_and_dropout_are_for_training_only():
  """What parties send is drawn by nobody, and no image sees another."""
  parties = make_parties(dropout=0.5)
  start = build(parties).init(jax.random.key(0))
  state, _ = run(jitted(build(parties)), 1, state=start)
  before, after = (
    s.clients[0].variables.stats["batch_stats"]["BatchNorm_0"]["mean"]
    for s in (start, state)
  )
  assert not np.allclose(before, after)
  # Images of a batch would share statistics and one draw of dropout.
  ends = [
    run(jitted(build(parties, eval_batch_size=n)), 1, state=start)[1]
    for n in (1, 5, 12)
  ]
  assert_close(*ends)


# --- Early stopping and plans ----------------------------------------------


class _Table(nn.Module):
  """A model whose logits are its parameters, the same for all inputs."""

  @nn.compact
  def __call__(self, x):
    table = self.param("table", nn.initializers.zeros, (1, 2))
    return jnp.broadcast_to(table, (len(x), 2)) + 0 * x


def test_early_stopping_is_kerass():
  # The table answers the class that it was last trained on; of the stopping
  # set two thirds are of class 0. Accuracies: 2/3, 1/3, 1/3, 2/3, 2/3.
  party = Participant(
    core.Model.from_flax(_Table(), jnp.zeros((1, 2))),
    "table",
    learning_rate=10.0,
  )
  algorithm = jitted(fit([party], patience=2, min_delta=0.1))
  state = algorithm.init(jax.random.key(0))
  x = jnp.zeros((3, 2))
  stopping = Subset.whole({"x": x, "y": jnp.array([0, 0, 1])})
  seen = []
  for round, label in enumerate((0, 1, 1, 0, 0), 1):
    held = Subset.whole({"x": x, "y": jnp.full((3,), label)})
    plan = plan_fit(
      {"table": held}, stopping, seed=0, round=round, batch_size=3
    )
    data = {"table": held.bank, "stopping": stopping.bank}
    state, metrics = algorithm.step(state, plan, data)
    (progress,) = state.clients
    seen.append(
      (
        round_to_thirds(progress.accuracy),
        int(progress.wait),
        int(progress.epochs),
        float(metrics["table/loss"].count),
      )
    )
  # After two epochs no better than the first it stops, with the last weights.
  assert seen == [(2, 0, 1, 1), (1, 1, 2, 1), (1, 2, 3, 1)] + [(1, 2, 3, 0)] * 2


def test_a_party_that_has_stopped_divides_nothing_by_nothing():
  """Its accuracy is not measured any more; JAX's checks must not see 0 / 0."""
  parties = [
    Participant(federation.line(0.0, 0.0), name, learning_rate=rate)
    for name, rate in (("stops", 0.0), ("learns", 1.0))
  ]
  bank = {"x": np.array([[1.0], [-1.0]], np.float32), "y": np.arange(2)}
  whole = Subset.whole(bank)
  algorithm = fit(parties, patience=1, engine=engine.Threads(2))
  jax.clear_caches()
  with jax.debug_nans(True):
    state = algorithm.init(jax.random.key(0))
    for round in range(1, 5):
      held = dict.fromkeys(["stops", "learns"], whole)
      plan = plan_fit(held, whole, seed=0, round=round, batch_size=2)
      data = dict.fromkeys([*held, "stopping"], bank)
      state, _ = algorithm.step(state, plan, data)
  assert [int(own.epochs) for own in state.clients] == [2, 2]


@pytest.mark.parametrize(
  "min_delta,correct,expected,last",
  [
    # Above 5, 6 is no progress but 7 is; after that neither 7 nor 8 is.
    (
      0.15,
      (5, 6, 7, 7, 8, 10),
      [(0, 1), (1, 2), (0, 3), (1, 4), (2, 5), (2, 5)],
      0.8,
    ),
    # One more is exactly 0.1 and no progress; 0.3 - 0.2 > 0.1 in float32.
    (0.1, (2, 3, 4, 5, 5), [(0, 1), (1, 2), (0, 3), (1, 4), (2, 5)], 0.5),
  ],
)
def test_progress_is_more_than_min_delta_above_the_best(
  min_delta, correct, expected, last
):
  """A model that always says class 0 once its image is negated."""
  party = Participant(
    federation.line(-1.0, 0.0),
    "a",
    learning_rate=0.0,
    transform=lambda batch: {**batch, "x": -batch["x"]},
  )
  algorithm = jitted(fit([party], patience=2, min_delta=min_delta))
  state = algorithm.init(jax.random.key(0))
  x, seen = jnp.ones((10, 1)), []
  for round, right in enumerate(correct, 1):
    y = (jnp.arange(10) >= right).astype(jnp.int32)
    bank = {"x": x, "y": y}
    plan = plan_fit(
      {"a": Subset(bank, [0])},
      Subset.whole(bank),
      seed=0,
      round=round,
      batch_size=1,
    )
    state, _ = algorithm.step(state, plan, {"a": bank, "stopping": bank})
    (progress,) = state.clients
    seen.append((int(progress.wait), int(progress.epochs)))
  assert seen == expected
  assert float(progress.accuracy) == pytest.approx(last)


def test_public_and_private_examples_are_prepared_each_in_its_way():
  times = lambda n: lambda batch: {**batch, "x": n * batch["x"]}
  parties = [
    Participant(
      federation.line(w, 0.0), name, learning_rate=1.0, transform=times(3)
    )
    for name, w in (("a", 0.0), ("b", 2.0))
  ]
  algorithm = fedmd(parties, public_transform=times(2))
  bank = {"x": jnp.ones((1, 1)), "y": jnp.zeros(1, jnp.int32)}
  image = Subset.whole(bank)
  plan = plan_fedmd(
    image,
    {"a": image, "b": image},
    seed=0,
    round=1,
    subset=1,
    revisit_epochs=1,
  )
  _, metrics = algorithm.step(
    algorithm.init(jax.random.key(0)),
    plan,
    {"public": bank, "a": bank, "b": bank},
  )
  for name in "ab":
    # They say 0 and 4, agree on 2, and go to weights of 1 +- sign 2 / 2 = 1.
    assert metrics[f"{name}/digest_loss"].value == 1
    # Of a private image that is 3, and of class 0, they say (3, 0).
    loss = metrics[f"{name}/revisit_loss"].value
    np.testing.assert_allclose(loss, np.log1p(np.exp(-3)), rtol=1e-6)


def test_revisit_goes_on_with_the_optimizer_of_transfer_learning():
  party = Participant(
    federation.line(0.0, 0.0), "a", learning_rate=1e-3, optimizer=keras_adam
  )
  bank = {"x": jnp.ones((4, 1)), "y": jnp.zeros(4, jnp.int32)}
  transfer, algorithm = fit([party]), fedmd([party])
  state = transfer.init(jax.random.key(0))
  plan = plan_fit({"a": Subset.whole(bank)}, seed=0, round=1, batch_size=1)
  state, _ = transfer.step(state, plan, {"a": bank})
  trained = [progress.learner for progress in state.clients]
  (start,) = algorithm.init(jax.random.key(0), trained).clients
  assert_equal(start.opt_state["revisit"], trained[0].opt_state)
  assert optax.tree.get(start.opt_state["revisit"], "count") == 4
  new = Learner.start(trained[0].variables, keras_adam)
  assert_equal(start.opt_state["digest"], new.opt_state)


def test_no_draw_is_made_twice():
  """Not by two parties, in two phases, in two steps, or in two rounds."""
  model = federation.recorder(12)
  parties = [Participant(model, name, learning_rate=0.125) for name in "ab"]
  bank = federation.recorders_bank(2)
  held = dict.fromkeys("ab", Subset.whole(bank))
  data = dict.fromkeys(("public", *held), bank)
  transfer, algorithm = jitted(fit(parties)), jitted(fedmd(parties))
  state = transfer.init(jax.random.key(0))
  for t in (1, 2):
    plan = plan_fit(held, seed=0, round=t, batch_size=1)
    state, _ = transfer.step(state, plan, data)
  state = algorithm.init(
    jax.random.key(1), [progress.learner for progress in state.clients]
  )
  for t in (1, 2):
    plan = plan_fedmd(
      Subset.whole(bank),
      held,
      seed=0,
      round=t,
      subset=2,
      digest_batch_size=1,
      revisit_batch_size=1,
      revisit_epochs=1,
    )
    state, _ = algorithm.step(state, plan, data)
  draws = [p.variables.stats["draws"] for p in state.clients]
  assert np.all(draws) and len(np.unique(draws)) == 2 * 2 * (2 + 2 + 2)


def round_to_thirds(accuracy):
  return round(3 * float(accuracy))


def test_plans_are_pure_and_fresh():
  assert_equal(make_plan(1), make_plan(1))
  first, second = make_plan(1), make_plan(2)
  assert set(subset_of(first)) != set(subset_of(second))
  assert len(set(subset_of(first).tolist())) == 12
  one, other = batches_of(first, "digest")
  for batches in (one, other):
    # An epoch: everything once; 3 of 15 places are filled up.
    counts = np.bincount(batches.ravel(), minlength=12)
    assert counts.min() == 1 and counts.sum() == 15
  assert not np.array_equal(one, other)
  for name, held in HELD.items():
    (batches,) = batches_of(first, name)
    assert set(batches.ravel()) == set(held.index)
    assert len(batches) == 2 * -(-len(held.index) // 3)


def test_no_two_epochs_have_one_order():
  """Of parties, of the phases of a run, of its rounds, and of seeds."""
  public = Subset.whole({"x": np.zeros(20)})
  private, orders = dict.fromkeys("ab", public), []
  for seed, t in ((0, 1), (0, 2), (1, 1)):
    plan = plan_fedmd(
      public,
      private,
      seed=seed,
      round=t,
      subset=20,
      digest_epochs=2,
      revisit_batch_size=20,
    )
    orders += [batches_of(plan, name) for name in ("digest", *private)]
    for phase in (0, 1):
      plan = plan_fit(private, seed=seed, phase=phase, round=t, batch_size=20)
      orders += [batches_of(plan, name) for name in private]
  drawn = np.concatenate([one.reshape(-1, 20) for of in orders for one in of])
  assert len(np.unique(drawn, axis=0)) == len(drawn) == 3 * 2 * (2 + 2 + 2)


def test_what_is_out_of_range_is_refused():
  parties = make_parties()
  for settings, message in [
    (dict(digest_loss="l3"), "digest_loss=l3: choose from mae, mse, kl"),
    (
      dict(consensus_weights=(1, 1, 1)),
      "consensus_weights=.*: give one or 2 values",
    ),
    (
      dict(consensus_weights=(2, -1)),
      "consensus_weights=-1.0: must be finite, at least 0",
    ),
    (dict(consensus_weights=(0, 0)), "^consensus_weights=0.0: one"),
    (dict(temperature=0.0), "temperature=0.0"),
    (dict(parties=[parties[0]] * 2), "each with a name of its own"),
  ]:
    with pytest.raises(ValueError, match=message):
      build(**settings)
  with pytest.raises(ValueError, match="patience=0"):
    fit(parties, patience=0)
  with pytest.raises(ValueError, match="learning_rate=-1"):
    Participant(parties[0].model, "a", learning_rate=-1)
  with pytest.raises(ValueError, match="subset=99: exceeds the 24"):
    plan_fedmd(Subset.whole(PUBLIC), HELD, seed=0, round=1, subset=99)


@pytest.mark.parametrize("labels", [{}, {"y": np.arange(9) / 2}])
def test_public_examples_need_no_classes(labels):
  """All are then equally likely: of 6, each is in half of the subsets of 3."""
  public = Subset({"x": np.zeros((9, 2)), **labels}, np.arange(3, 9))
  drawn = [
    subset_of(plan_fedmd(public, HELD, seed=0, round=t, subset=3))
    for t in range(1, 201)
  ]
  counts = np.bincount(np.concatenate(drawn), minlength=9)
  assert counts[:3].sum() == 0 and all(70 < counts[3:]) and all(counts < 130)


def test_continues_only_from_models_of_its_parties():
  """And the parties' own arrays outlive a state that is donated."""
  parties = make_parties()
  init = fedmd(parties).init
  trained = [
    Learner.start(p.model.start(jax.random.key(k)), p.optimizer)
    for k, p in enumerate(parties)
  ]
  state = init(jax.random.key(0), trained)
  assert_equal(
    [p.variables for p in state.clients], [t.variables for t in trained]
  )
  jax.jit(lambda s: s, donate_argnums=0)(state)
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(trained))
  with pytest.raises(ValueError, match="'party0': gives .*params"):
    init(jax.random.key(0), trained[::-1])
  other = [
    t._replace(opt_state=keras_adam(0.1).init(t.params)) for t in trained
  ]
  with pytest.raises(ValueError, match="'party0': gives .*opt_state"):
    init(jax.random.key(0), other)
