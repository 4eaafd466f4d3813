"""FedMD against its oracle, and what it must do besides the contract."""

import contextlib
import functools

import chex
import flax.linen as nn
from hetfl.fedmd import (
  consensus,
  fedmd,
  learn_program,
  plan_fedmd,
  scores_program,
  squared_error,
  TRANSLATORS,
)
from hetfl.party import fit, keras_adam, Party, plan_fit, shuffled_epochs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetfl import core, engine, population
from hetfl.models import fedmd as models
from tests import algorithms, federation
from tests.algorithms import PARTY_CLASSES, PartyMlp
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
    Party(
      name=f"party{k}",
      model=core.Model.from_flax(module, jnp.zeros((1, *SHAPE))),
      learning_rate=2.0 ** -(6 + k),
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
EXAMPLES = (np.arange(4), np.arange(4, 11))


def make_plan(round):
  return plan_fedmd(
    population.Subset.whole(PUBLIC),
    EXAMPLES,
    seed=0,
    round=round,
    subset=12,
    digest_batch_size=5,
    revisit_batch_size=3,
    revisit_epochs=2,
  )


def make_data(private=None):
  bank = jax.device_put(PRIVATE)
  return {
    "public": jax.device_put(PUBLIC),
    "private": private or (bank,) * len(EXAMPLES),
  }


def build(parties=None, runner=None, **settings):
  return fedmd(
    parties or make_parties(),
    public_transform=transform,
    private_transform=transform,
    eval_batch_size=5,
    engine=runner,
    **{"consensus_weights": WEIGHTS, "temperature": 2.0, **settings},
  )


def run(algorithm, rounds, *, state=None, first=1, data=None):
  state = algorithm.init(jax.random.key(0)) if state is None else state
  for round in range(first, first + rounds):
    state, metrics = algorithm.step(
      state, make_plan(round), data or make_data()
    )
  return state, metrics


def jitted(algorithm):
  return algorithm._replace(step=jax.jit(algorithm.step))


def params(state):
  return [party.variables.params for party in state.parties]


def oracle_blocks(filters):
  return [tuple(block)[1:] for block in models.blocks_of(filters)]


@contextlib.contextmanager
def float64():
  with jax.enable_x64(True):
    yield lambda tree: jax.tree.map(
      lambda a: (
        jnp.asarray(a, jnp.float64)
        if jnp.issubdtype(a.dtype, jnp.floating)
        else a
      ),
      tree,
    )


def oracle_parties(parties, variables):
  """The oracle's parties, from the same parameters."""
  return [
    oracle.Party.start(
      oracle_blocks(filters),
      jax.tree.map(lambda a: np.asarray(a, np.float64), v.params),
      jax.tree.map(lambda a: np.asarray(a, np.float64), v.stats["batch_stats"]),
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


def images(bank, index):
  """Images as the models see them, in float64."""
  return bank["x"][index].astype(np.float64) / 4


@pytest.mark.parametrize("loss", TRANSLATIONS)
def test_rounds_are_the_oracles(loss):
  parties = make_parties(cnn=True)
  with float64() as double:
    algorithm = build(parties, digest_loss=loss)
    state = double(algorithm.init(jax.random.key(3)))
    expected = oracle_parties(parties, [p.variables for p in state.parties])
    step, scores = jax.jit(algorithm.step), TRANSLATIONS[loss][0]
    # Two rounds: in the second one both optimizers go on.
    for round in (1, 2):
      plan = make_plan(round)
      state, metrics = step(state, plan, double(make_data()))
      expected = oracle.round(
        expected,
        WEIGHTS,
        images(PUBLIC, plan.subset),
        plan.digest,
        [
          [(images(PRIVATE, index), PRIVATE["y"][index]) for index in batches]
          for batches in plan.revisit
        ],
        scores=scores,
        loss=TRANSLATIONS[loss][1],
      )
      check([p.variables for p in state.parties], expected)
    assert metrics["party1/digest_loss"].count == 3  # ceil(12 / 5)
    assert metrics["party1/revisit_loss"].count == 6  # 2 ceil(7 / 3)


def test_fit_is_the_oracles():
  parties = make_parties(cnn=True)
  with float64() as double:
    algorithm = fit(parties, transform=transform)
    state = double(algorithm.init(jax.random.key(3)))
    expected = oracle_parties(
      parties, [p.trained.variables for p in state.parties]
    )
    bank = double(jax.device_put(PRIVATE))
    data = {"train": (bank,) * 2, "stopping": None}
    values = [None] * 2
    for round in (1, 2):
      plan = plan_fit(EXAMPLES, seed=0, phase=0, round=round, batch_size=3)
      state, metrics = jax.jit(algorithm.step)(state, plan, data)
      for k, (batches, steps) in enumerate(zip(plan.batches, plan.steps)):
        party, party_state, values[k] = oracle.train(
          expected[k],
          expected[k].revisit,
          [(images(PRIVATE, i), PRIVATE["y"][i]) for i in batches[:steps]],
          lambda y, z: codist_oracle.cross_entropy(z, y),
        )
        party.revisit = party_state
        expected[k] = party
    check([p.trained.variables for p in state.parties], expected)
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
  return [
    np.asarray(
      party.model.apply(v, PUBLIC["x"][plan.subset] / 4, None, False)[0]
    )
    for party, v in zip(make_parties(), variables)
  ]


def poisoned(k):
  """The parties' banks, of which one has other images and labels."""
  other = {"x": PRIVATE["x"][::-1] * 3, "y": (PRIVATE["y"] + 1) % CLASSES}
  banks = [jax.device_put(PRIVATE)] * len(EXAMPLES)
  banks[k] = jax.device_put(other)
  return tuple(banks)


def test_a_partys_data_never_reaches_another():
  parties, runner = make_parties(), engine.Threads(2)
  transfer = fit(parties, transform=transform, engine=runner)
  algorithm = build(parties, runner, consensus_weights=(0.0, 1.0))
  sent, ends = [], []
  for banks in (None, poisoned(0)):
    banks = banks or (jax.device_put(PRIVATE),) * len(EXAMPLES)
    state = transfer.init(jax.random.key(0))
    plan = plan_fit(EXAMPLES, seed=0, phase=1, round=1, batch_size=4)
    state, _ = transfer.step(state, plan, {"train": banks, "stopping": None})
    trained = [learner.trained for learner in state.parties]
    sent.append(uploads([t.variables for t in trained], make_plan(1)))
    state = algorithm.init(jax.random.key(0), trained)
    state, _ = run(algorithm, 2, state=state, data=make_data(banks))
    ends.append(params(state))
  # Round 1: the poisoned party says something else, the others the same bits.
  assert not np.allclose(sent[0][0], sent[1][0])
  assert_equal(sent[0][1:], sent[1][1:])
  # Its consensus weight is zero, so it does not affect the others at all.
  assert_equal(ends[0][1:], ends[1][1:])


def test_one_hot_weights_are_learning_from_that_party():
  parties = make_parties()
  algorithm = jitted(build(parties))
  plan, data = make_plan(1), make_data()
  start = algorithm.init(jax.random.key(0))
  sent = uploads([p.variables for p in start.parties], plan)
  key = jax.random.fold_in(start.key, 1)
  learn = [
    jax.jit(learn_program(party, TRANSLATORS["mae"], transform, transform))
    for party in parties
  ]
  for teacher in range(2):
    hyper = {**start.hyper, "consensus_weights": jnp.eye(2)[teacher]}
    state, _ = algorithm.step(start.replace(hyper=hyper), plan, data)
    for k in range(2):
      alone, *_ = learn[k](
        start.parties[k],
        1.0,
        jax.random.fold_in(key, k),
        data["public"],
        sent[teacher],
        plan.subset,
        plan.digest[k],
        data["private"][k],
        plan.revisit[k],
      )
      assert_close(state.parties[k].variables, alone.variables)
  # Hand-worked: (3 * 1 + 1 * 5) / 4.
  assert consensus([1.0, 5.0], jnp.array([3.0, 1.0])) == 2


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
    party.start(p.variables) for party, p in zip(parties, start.parties)
  ]
  backward = jitted(build(parties[::-1], consensus_weights=None))
  plan, data = make_plan(1), make_data()
  mirrored = plan._replace(digest=plan.digest[::-1], revisit=plan.revisit[::-1])
  a, _ = forward.step(forward.init(start.key, trained), plan, data)
  b, _ = backward.step(backward.init(start.key, trained[::-1]), mirrored, data)
  assert_close(params(a), params(b)[::-1])


def test_batch_statistics_and_dropout_are_for_training_only():
  parties = make_parties(dropout=0.5)
  algorithm = jitted(build(parties))
  start = algorithm.init(jax.random.key(0))
  before = start.parties[0].variables.stats["batch_stats"]["BatchNorm_0"]
  state, _ = run(algorithm, 1, state=start)
  after = state.parties[0].variables.stats["batch_stats"]["BatchNorm_0"]
  assert not np.allclose(before["mean"], after["mean"])
  program = scores_program(parties[0], TRANSLATORS["mae"], transform, 5)
  variables, subset = state.parties[0].variables, make_plan(1).subset
  bank = jax.device_put(PUBLIC)
  whole = program(variables, 1.0, bank, subset)
  # Inference: no draw, and no example sees another.
  np.testing.assert_allclose(
    program(variables, 1.0, bank, subset[3:4])[0], whole[3], rtol=1e-5
  )


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
  party = Party(
    "table",
    core.Model.from_flax(_Table(), jnp.zeros((1, 2))),
    learning_rate=10.0,
    optimizer=optax.sgd,
  )
  algorithm = jitted(fit([party], patience=2, min_delta=0.1))
  state = algorithm.init(jax.random.key(0))
  x = jnp.zeros((3, 2))
  stopping = population.Subset(
    {"x": x, "y": jnp.array([0, 0, 1])}, np.arange(3, dtype=np.int32)
  )
  seen = []
  for round, label in enumerate((0, 1, 1, 0, 0), 1):
    bank = {"x": x, "y": jnp.full((3,), label)}
    plan = plan_fit([np.arange(3)], seed=0, phase=0, round=round, batch_size=3)
    state, metrics = algorithm.step(
      state, plan, {"train": (bank,), "stopping": stopping}
    )
    (learner,) = state.parties
    seen.append(
      (
        round_to_thirds(learner.accuracy),
        int(learner.wait),
        int(learner.epochs),
        float(metrics["table/loss"].count),
      )
    )
  # After two epochs no better than the first it stops, with the last weights.
  assert seen == [(2, 0, 1, 1), (1, 1, 2, 1), (1, 2, 3, 1)] + [(1, 2, 3, 0)] * 2


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
  party = Party("a", federation.line(-1.0, 0.0), learning_rate=0.0)
  algorithm = jitted(
    fit(
      [party],
      transform=lambda batch: {**batch, "x": -batch["x"]},
      patience=2,
      min_delta=min_delta,
    )
  )
  state = algorithm.init(jax.random.key(0))
  x, seen = jnp.ones((10, 1)), []
  for round, right in enumerate(correct, 1):
    y = (jnp.arange(10) >= right).astype(jnp.int32)
    data = {
      "train": ({"x": x, "y": y},),
      "stopping": population.Subset({"x": x, "y": y}, np.arange(10)),
    }
    plan = plan_fit([[0]], seed=0, phase=0, round=round, batch_size=1)
    state, _ = algorithm.step(state, plan, data)
    (learner,) = state.parties
    seen.append((int(learner.wait), int(learner.epochs)))
  assert seen == expected
  assert float(learner.accuracy) == pytest.approx(last)


def test_public_and_private_examples_are_prepared_each_in_its_way():
  parties = [
    Party(name, federation.line(w, 0.0), learning_rate=1.0, optimizer=optax.sgd)
    for name, w in (("a", 0.0), ("b", 2.0))
  ]
  times = lambda n: lambda batch: {**batch, "x": n * batch["x"]}
  algorithm = fedmd(
    parties, public_transform=times(2), private_transform=times(3)
  )
  bank = {"x": jnp.ones((1, 1)), "y": jnp.zeros(1, jnp.int32)}
  plan = plan_fedmd(
    population.Subset.whole(bank),
    [[0], [0]],
    seed=0,
    round=1,
    subset=1,
    revisit_epochs=1,
  )
  _, metrics = algorithm.step(
    algorithm.init(jax.random.key(0)),
    plan,
    {"public": bank, "private": (bank, bank)},
  )
  for name in "ab":
    # They say 0 and 4, agree on 2, and go to weights of 1 +- sign 2 / 2 = 1.
    assert metrics[f"{name}/digest_loss"].value == 1
    # Of a private image that is 3, and of class 0, they say (3, 0).
    loss = metrics[f"{name}/revisit_loss"].value
    np.testing.assert_allclose(loss, np.log1p(np.exp(-3)), rtol=1e-6)


def test_revisit_goes_on_with_the_optimizer_of_transfer_learning():
  party = Party("a", federation.line(0.0, 0.0))
  bank = {"x": jnp.ones((4, 1)), "y": jnp.zeros(4, jnp.int32)}
  transfer, algorithm = fit([party]), fedmd([party])
  state = transfer.init(jax.random.key(0))
  plan = plan_fit([np.arange(4)], seed=0, phase=0, round=1, batch_size=1)
  state, _ = transfer.step(state, plan, {"train": (bank,)})
  trained = [learner.trained for learner in state.parties]
  (start,) = algorithm.init(jax.random.key(0), trained).parties
  assert_equal(start.revisit_opt_state, trained[0].opt_state)
  assert optax.tree.get(start.revisit_opt_state, "count") == 4
  assert_equal(
    start.digest_opt_state, party.start(trained[0].variables).opt_state
  )


def test_no_draw_is_made_twice():
  """Not by two parties, in two phases, in two steps, or in two rounds."""
  model = federation.recorder(12)
  parties = [Party(name, model, learning_rate=0.125) for name in "ab"]
  bank = federation.recorders_bank(2)
  private, data = [[0, 1]] * 2, (bank,) * 2
  transfer, algorithm = fit(parties), fedmd(parties)
  state = transfer.init(jax.random.key(0))
  for t in (1, 2):
    plan = plan_fit(private, seed=0, phase=0, round=t, batch_size=1)
    state, _ = transfer.step(state, plan, {"train": data})
  state = algorithm.init(
    jax.random.key(1), [learner.trained for learner in state.parties]
  )
  for t in (1, 2):
    plan = plan_fedmd(
      population.Subset.whole(bank),
      private,
      seed=0,
      round=t,
      subset=2,
      digest_batch_size=1,
      revisit_batch_size=1,
      revisit_epochs=1,
    )
    state, _ = algorithm.step(state, plan, {"public": bank, "private": data})
  draws = [p.variables.stats["draws"] for p in state.parties]
  assert np.all(draws) and len(np.unique(draws)) == 2 * 2 * (2 + 2 + 2)


def round_to_thirds(accuracy):
  return round(3 * float(accuracy))


def test_plans_are_pure_and_fresh():
  assert_equal(make_plan(1), make_plan(1))
  first, second = make_plan(1), make_plan(2)
  assert set(first.subset) != set(second.subset)
  assert len(set(first.subset.tolist())) == 12
  for batches in first.digest:
    # An epoch: everything once; 3 of 15 places are filled up.
    counts = np.bincount(batches.ravel(), minlength=12)
    assert counts.min() == 1 and counts.sum() == 15
  assert not np.array_equal(first.digest[0], first.digest[1])
  for positions, batches in zip(EXAMPLES, first.revisit):
    assert set(batches.ravel()) == set(positions)
    assert len(batches) == 2 * -(-len(positions) // 3)


def test_short_batches_are_filled_up_with_others():
  batches = shuffled_epochs(np.arange(18), seed=0, batch_size=5, epochs=3)
  assert batches.shape == (12, 5)
  for epoch in np.split(batches, 3):
    assert set(epoch.ravel()) == set(range(18))
    assert all(len(set(batch)) == 5 for batch in epoch.tolist())


def test_no_two_epochs_have_one_order():
  """Of parties, of the two phases of a round, of rounds, and of seeds."""
  public, private = (
    population.Subset.whole({"x": np.zeros(20)}),
    [range(20)] * 2,
  )
  orders = []
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
    orders += [*plan.digest, *plan.revisit]
    for phase in (0, 1):
      plan = plan_fit(private, seed=seed, phase=phase, round=t, batch_size=20)
      orders += [batches[:1] for batches in plan.batches]
  assert len(np.unique(np.concatenate(orders), axis=0)) == 3 * 2 * (2 + 2 + 2)


def test_what_is_out_of_range_is_refused():
  parties = make_parties()
  for settings, message in [
    (dict(digest_loss="l3"), "digest_loss=l3: choose from mae, mse, kl"),
    (dict(consensus_weights=(1, 1, 1)), "give 2 values, one per party"),
    (dict(consensus_weights=(2, -1)), "must not be negative"),
    (dict(consensus_weights=(0, 0)), "nor all zero"),
    (dict(temperature=0.0), "temperature=0.0"),
  ]:
    with pytest.raises(ValueError, match=message):
      build(parties, **settings)
  with pytest.raises(ValueError, match="a different name"):
    build([parties[0], parties[0]])
  with pytest.raises(ValueError, match="patience=0"):
    fit(parties, patience=0)
  with pytest.raises(ValueError, match="learning_rate=-1"):
    fit([Party("a", parties[0].model, learning_rate=-1)])
  with pytest.raises(ValueError, match="subset=99: exceeds the 24"):
    plan_fedmd(
      population.Subset.whole(PUBLIC), EXAMPLES, seed=0, round=1, subset=99
    )


def test_public_examples_need_no_labels():
  """All are then equally likely: of 6, each is in half of the subsets of 3."""
  public = population.Subset({"x": np.zeros((9, 2))}, np.arange(3, 9))
  drawn = [
    plan_fedmd(public, [[0]], seed=0, round=t, subset=3).subset
    for t in range(1, 201)
  ]
  counts = np.bincount(np.concatenate(drawn), minlength=9)
  assert counts[:3].sum() == 0 and all(70 < counts[3:]) and all(counts < 130)


def test_continues_only_from_models_of_its_parties():
  """And the parties' own arrays outlive a state that is donated."""
  parties = make_parties()
  init = fedmd(parties).init
  trained = [
    p.start(p.model.start(jax.random.key(k))) for k, p in enumerate(parties)
  ]
  state = init(jax.random.key(0), trained)
  assert_equal(
    [p.variables for p in state.parties], [t.variables for t in trained]
  )
  jax.jit(lambda s: s, donate_argnums=0)(state)
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(trained))
  with pytest.raises(ValueError, match="party 'party0': .params"):
    init(jax.random.key(0), trained[::-1])
  other = [t._replace(opt_state=optax.EmptyState()) for t in trained]
  with pytest.raises(ValueError, match="party 'party0', opt_state"):
    init(jax.random.key(0), other)
