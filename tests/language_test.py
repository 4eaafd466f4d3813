"""Language models, their losses, metrics and distillation."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetfl
from hetfl import core, distill, engine, evaluate, population
from hetfl.models import language, next_word
from hetfl.models.kernels import products
from tests.federation import double, plain
from tests.oracles import language as oracle

V, T = 11, 6
SIZES = ((3, 4, 1), (5, 3, 2), (4, 4, 1))
CHUNKS = (None, 7, 64)
tree_map = jax.tree.map


def make_model(i=0, chunk=None, vocabulary=V):
  module = language.LSTMLanguageModel(vocabulary, *SIZES[i], chunk=chunk)
  return core.Model.from_flax(module, jnp.zeros((1, T), jnp.int32))


def make_bank(n=60, seed=0):
  """Sentences of 1 to T words as in a bank, with domains."""
  rng = np.random.default_rng(seed)
  x, y = np.zeros((2, n, T), np.int32)
  for b, length in enumerate(rng.integers(1, T + 2, n)):
    words = [*rng.integers(3, V, length), 2][:T]
    y[b, : len(words)] = words
    x[b, : len(words)] = [1, *words[:-1]]
  return {"x": x, "y": y, "domain": rng.integers(0, 2, n).astype(np.int32)}


@pytest.fixture
def _float64():
  with jax.enable_x64(True):
    yield


check = functools.partial(chex.assert_trees_all_close, rtol=1e-6, atol=1e-8)


def variables_of(model, seed=0, bias=0.3):
  """Parameters with biases that are not zero."""
  params = jax.jit(model.init)(jax.random.key(seed)).params
  keys = iter(jax.random.split(jax.random.key(seed + 1), 99))
  return core.Variables(
    tree_map(
      lambda a: a + bias * jax.random.normal(next(keys), a.shape), params
    ),
    {},
  )


def test_parameter_counts_and_initial_weights():
  x = jnp.zeros((1, 20), jnp.int32)
  for build, at_10k, at_4k in (
    (language.small_lstm, 1_984_348, 826_348),
    (language.large_lstm, 4_278_644, 1_968_644),
  ):
    for vocabulary, count in ((10_004, at_10k), (4_004, at_4k)):
      shapes = jax.eval_shape(build(vocabulary).init, jax.random.key(0), x)
      assert core.num_parameters(shapes["params"]) == count
  params = language.large_lstm(500).init(jax.random.key(0), x)["params"]
  # A normal cut at two deviations keeps 0.88 of the deviation.
  for name, fan_in in (("embedding", 1), ("output_kernel", 192)):
    np.testing.assert_allclose(
      params[name].std(), 0.88 / fan_in**0.5, rtol=0.02
    )
  for name in ("kernel", "recurrent"):
    weights = params["LSTM_0"][name]
    np.testing.assert_allclose(weights.std(), 0.88 / 332**0.5, rtol=0.02)
  assert not params["LSTM_0"]["bias"].any()


def test_accelerators_recur_alike(monkeypatch):
  draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
  gates, recurrent, weights = draw(0, 23, 3, 16), draw(1, 4, 16), draw(2, 4)

  def outputs():
    # A function of its own each time: JAX remembers what it has traced.
    loss = lambda *args: jnp.sum(products.recur(*args) * weights[None, None])
    traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(gates, recurrent)
    return str(traced.jaxpr), traced.lower().compile()(gates, recurrent)

  before, expected = outputs()
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  turns, found = outputs()
  assert turns != before  # 20 positions in a turn.
  chex.assert_trees_all_close(found, expected, rtol=1e-4)


def test_recurrence_is_flaxs_but_for_the_forget_gate():
  x = jax.random.normal(jax.random.key(0), (3, 5, 2))
  ours = language.LSTM(4)
  params = variables_of(core.Model.from_flax(ours, x)).params
  gates = dict(zip("igfo", np.split(np.arange(16), 4)))
  theirs = {}
  for name, columns in gates.items():
    theirs[f"i{name}"] = {"kernel": params["kernel"][:, columns]}
    theirs[f"h{name}"] = {
      "kernel": params["recurrent"][:, columns],
      "bias": params["bias"][columns] + (name == "f"),
    }
  rnn = jax.jit(nn.RNN(nn.OptimizedLSTMCell(4)).apply)
  expected = rnn({"params": {"cell": theirs}}, x)
  found = jax.jit(ours.apply)({"params": params}, x)
  check(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("i,chunk", [(0, None), (1, 7)])
def test_client_step_is_the_oracles(_float64, i, chunk):
  model, bank = make_model(i, chunk), make_bank(9)
  variables = double(variables_of(model))
  logits = jax.jit(model.predict)(variables, bank["x"])
  expected, _ = oracle.forward(plain(variables.params), bank["x"])
  check(logits.dense(), expected)
  algorithm = hetfl.fedavg(
    [
      hetfl.Pool(
        model,
        "a",
        learning_rate=0.5,
        server_lr=1.0,
        loss=next_word.sentence_loss(),
        server_optimizer=hetfl.optimizers.fedavg_server,
      )
    ],
    rounds=None,
  )
  state = jax.jit(algorithm.init)(jax.random.key(0))
  state = state.replace(server=(state.server[0]._replace(variables=variables),))
  clients = population.ClientPopulation.from_lists(bank, [np.arange(9)])
  plan = hetfl.plan_round({"a": clients}, seed=0, round=1, batch_size=9)
  state, metrics = jax.jit(algorithm.step)(
    state, plan, {"a": tree_map(jnp.asarray, bank)}
  )
  loss, grads = oracle.loss_and_gradient(
    plain(variables.params), bank["x"], bank["y"]
  )
  stepped = tree_map(lambda w, g: w - 0.5 * g, plain(variables.params), grads)
  check(state.server[0].params, stepped)
  np.testing.assert_allclose(metrics["a/client_loss"].total, loss, rtol=1e-6)


def distilled(distiller, models, variables, bank, rows):
  """A function of views to the second pool's student and its loss; views."""
  key, on_device = jax.random.key(0), tree_map(jnp.asarray, bank)

  def view(model, its):
    of_batch = jax.jit(distiller.view(model).whole)
    return jnp.stack(
      [of_batch(1, its, key, on_device, row) for row in enumerate(rows)]
    )

  views = list(map(view, models, variables))
  steps, one = np.int32(len(rows)), np.int32(1)
  batches = hetfl.Batches(rows, steps, one, np.float32(1))
  task = distiller.student(models, 1)
  hyper = distiller.hyper(len(models))
  if jax.config.jax_enable_x64:
    hyper = double(hyper)

  @jax.jit
  def distil(views):
    context = {"decay": 1.0, "key": key, "teachers": variables, "views": views}
    return task.whole(steps, hyper | context, key, on_device, ((), batches))

  return distil, views


@pytest.mark.parametrize(
  "num_pools,labels,chunk", [(2, 0.0, None), (3, 0.25, 7)]
)
def test_distillation_gradient_is_the_oracles(
  _float64, chunk, num_pools, labels
):
  models = [make_model(i, chunk) for i in range(num_pools)]
  variables = [double(variables_of(m, i)) for i, m in enumerate(models)]
  bank = make_bank(8)
  temperatures, r = [0.5, 2.0, 1.5][:num_pools], 0.125
  distiller = distill.Distiller(
    learning_rate=0.5,
    final_share=1.0,
    temperature=temperatures,
    regularization=r,
    label_weight=labels,
    optimizer=optax.sgd,
    microbatch=4,
    weights=next_word.token_weights,
    divergence=next_word.token_divergence,
  )
  rows = np.arange(8).reshape(1, 8)
  distil, views = distilled(distiller, models, variables, bank, rows)
  student, loss = distil(views)
  # It learns from these features; none are computed anew.
  _, other = distil(tree_map(jnp.zeros_like, views))
  assert abs(other.total - loss.total) > 1e-4
  others = [j for j in range(num_pools) if j != 1]
  value, grads = oracle.divergence_and_gradient(
    plain(variables[1].params),
    bank["x"],
    bank["y"],
    [plain(variables[j].params) for j in others],
    [temperatures[j] for j in others],
    r,
    labels,
  )
  np.testing.assert_allclose(loss.total, value, rtol=1e-6)
  check(
    student.params,
    tree_map(lambda w, g: w - 0.5 * g, plain(variables[1].params), grads),
  )


def test_logits_that_are_kept_give_the_same_student():
  """Dense logits [B, T, V] and weights [B, T] in the general distiller."""
  models = [make_model(i, 5) for i in range(2)]
  kept = [
    model._replace(
      apply=lambda *args, apply=model.apply: (apply(*args)[0].dense(), {})
    )
    for model in models
  ]
  variables = [variables_of(model, i) for i, model in enumerate(models)]
  rows = np.arange(16).reshape(2, 8)
  students = []
  for pools, divergence in ((kept, None), (models, next_word.token_divergence)):
    distiller = distill.Distiller(
      learning_rate=0.5,
      temperature=(0.5, 2.0),
      regularization=0.25,
      optimizer=optax.sgd,
      weights=next_word.token_weights,
      divergence=divergence,
    )
    distil, views = distilled(distiller, pools, variables, make_bank(16), rows)
    students.append(distil(views))
  check(*students, rtol=2e-5, atol=1e-6)
  moved = (
    students[0][0].params["output_bias"] - variables[1].params["output_bias"]
  )
  assert np.abs(moved).max() > 1e-3


@pytest.mark.parametrize("chunk", [None, 2])
def test_weights_are_not_trained(chunk):
  view = next_word.TokenLogits(
    jnp.ones((1, 3, 2)), jnp.eye(2), jnp.arange(2.0), chunk
  )
  loss = lambda weights: next_word.token_divergence(
    view,
    [view],
    view,
    {"y": jnp.zeros((1, 3), int)},
    weights,
    temperatures=[0.5],
    regularization=0.0,
  )
  value, grad = jax.value_and_grad(loss)(jnp.ones((1, 3)))
  assert value > 0.01 and not np.asarray(grad).any()


def test_targets_of_a_small_type_are_no_other_classes():
  # The words 3 to 43 of 300, as uint8: 256 + 3 is not the word 3.
  y = np.arange(40).reshape(8, 5) + 3
  x = jnp.ones((8, 5), jnp.int32)
  grads = []
  for chunk, kind in ((None, np.int32), (7, np.uint8)):
    model = make_model(0, chunk, vocabulary=300)
    variables = variables_of(model, 0)
    batch = {"y": jnp.asarray(y.astype(kind)), "mask": jnp.ones(8)}
    loss = lambda params, model=model, batch=batch: next_word.sentence_loss()(
      model.apply(core.Variables(params, {}), x, None, True)[0], batch
    )
    grads.append(jax.jit(jax.grad(loss))(variables.params))
  check(grads[1], grads[0], rtol=1e-4, atol=1e-6)


def test_every_engine_gives_the_same_rounds():
  bank = make_bank(80)
  cuts = np.split(np.arange(80), [1, 4, 30, 37, 50, 52])
  clients = population.ClientPopulation.from_lists(bank, cuts)
  data = tree_map(jnp.asarray, dict(bank))
  results = []
  for chunk, runner in ((None, None), (16, engine.Threads(2))):
    pools = [
      hetfl.Pool(
        make_model(i, chunk),
        f"pool{i}",
        learning_rate=0.5,
        server_lr=1.0,
        loss=next_word.sentence_loss(),
        server_optimizer=hetfl.optimizers.fedavg_server,
      )
      for i in range(2)
    ]
    algorithm = hetfl.merged_codist(
      pools,
      distill.Distiller(
        learning_rate=0.5,
        optimizer=optax.sgd,
        weights=next_word.token_weights,
        divergence=next_word.token_divergence,
      ),
      alpha=0.5,
      rounds=4,
      engine=runner,
    )
    state = jax.jit(algorithm.init)(jax.random.key(0))
    step = algorithm.step if runner else jax.jit(algorithm.step)
    for t in range(1, 3):
      plan = hetfl.plan_round(
        {"pool0": clients, "pool1": clients},
        clients.examples(),
        seed=0,
        round=t,
        clients_per_round=5,
        batch_size=4,
        distill_steps=2,
        distill_batch_size=8,
      )
      state, metrics = step(
        state, plan, {"pool0": data, "pool1": data, "distill": data}
      )
    results.append(([of.params for of in state.server], metrics))
  for other in results[1:]:
    check(other, results[0], rtol=2e-4, atol=2e-6)


def test_metrics_by_hand_on_five_sentences():
  """V = 7: PAD, BOS, EOS, words 3, 4, 5, OOV 6; the logits are chosen."""
  pad, eos, oov = 0, 2, 6
  y = jnp.array(
    [
      [3, 4, eos, pad],
      [5, oov, 3, eos],
      [eos, pad, pad, pad],  # An empty sentence.
      [4, 4, 4, 4],  # Cut off: without EOS.
      [3, eos, pad, pad],
    ]
  )
  first = jnp.array(  # What the model likes best, with logit 2 ...
    [
      [3, 5, eos, 0],
      [eos, oov, oov, eos],
      [3, 0, 0, 0],
      [4, 4, pad, 3],
      [1, 3, 0, 0],
    ]
  )
  second = jnp.array(  # ... and second best, with logit 1; others have 0.
    [
      [4, 4, 3, 3],
      [5, 3, 3, 3],
      [4, 3, 3, 3],
      [3, 3, 4, 4],
      [3, 4, 3, 3],
    ]
  )
  z = 2 * jax.nn.one_hot(first, 7) + jax.nn.one_hot(second, 7)
  batch = {
    "y": y,
    "mask": jnp.array([1.0, 1, 1, 1, 1]),
    "domain": jnp.array([0, 1, 0, 1, 0]),
  }
  means = {}
  for chunk in CHUNKS:
    # Features are the logits themselves.
    logits = language.TokenLogits(z, jnp.eye(7), jnp.zeros(7), chunk)
    means[chunk] = jax.jit(next_word.next_word_metrics)(logits, batch)
    check(means[chunk], means[None], rtol=1e-6)
  got = {n: (float(m.total), float(m.count)) for n, m in means[None].items()}
  # Targets that are no PAD or EOS: 2 + 3 + 0 + 4 + 1 = 10.
  # Right: 3; 4 no. 5 (EOS never counts), OOV no (3 is said), 3. None.
  # 4, 4, 4 (PAD never counts), 4 no. 3 (BOS never counts).
  assert got["accuracy"] == (1 + 2 + 3 + 1, 10)
  assert got["accuracy_questions"] == (1 + 1, 3)
  assert got["accuracy_answers"] == (2 + 3, 7)
  # Unmasked: 3. OOV. None. 4, 4. None.
  assert got["accuracy_no_eos"] == (1 + 1 + 0 + 2 + 0, 10)
  # -log softmax is log(e^2 + e + 5) less the target's logit: 13 + 1 - 1 = 14
  # targets that are no PAD; first hit: 3, EOS | OOV, EOS | - | 4, 4 | -.
  total = 14 * np.log(np.exp(2) + np.exp(1) + 5)
  # second hit: 4 | 5, 3 | - | 4, (3 is not 4:) 4 | 3.
  total -= 2 * 6 + 1 * (1 + 2 + 0 + 2 + 1)
  assert got["loss"][1] == 14
  assert got["loss"][0] == pytest.approx(total, rel=1e-6)
  assert next_word.perplexity(np.log(7.0)) == pytest.approx(7)
  assert next_word.perplexity(1e9) == np.inf


def test_metrics_do_not_depend_on_batches_and_agree_with_the_oracle():
  bank = make_bank(31)
  model = make_model(1)
  variables = variables_of(model)
  z, _ = oracle.forward(plain(variables.params), bank["x"])
  expected = oracle.accuracies(z, bank["y"])
  assert expected[0] > 0
  for chunk, size, runner in ((None, 31, None), (8, 4, engine.Threads(2))):
    evaluator = evaluate.Evaluator(
      [make_model(1, chunk)],
      {"test": population.Subset.whole(tree_map(jnp.asarray, bank))},
      transform=lambda batch: batch,
      measure=next_word.next_word_metrics,
      engine=runner,
      batch_size=size,
    )
    (got,) = evaluator([variables])
    assert (got["test_accuracy"], got["test_accuracy_no_eos"]) == (
      pytest.approx(expected)
    )


@pytest.mark.parametrize("chunk", CHUNKS)
def test_accuracies_of_any_answers_are_the_oracles(chunk):
  """Answers that no model gives: PAD, BOS, EOS and OOV as often as words."""
  rng, y = np.random.default_rng(0), make_bank(40)["y"]
  z = rng.normal(size=(40, T, V)).astype(np.float32)
  # Features are the logits themselves.
  logits = language.TokenLogits(jnp.asarray(z), jnp.eye(V), jnp.zeros(V), chunk)
  batch = {"y": y, "mask": jnp.ones(40)}
  means = jax.jit(next_word.next_word_metrics)(logits, batch)
  ours = [means[name].value for name in ("accuracy", "accuracy_no_eos")]
  np.testing.assert_allclose(ours, oracle.accuracies(z, y), rtol=1e-6)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_sentences_that_are_masked_do_not_count(chunk):
  rng = np.random.default_rng(0)
  z, y = rng.normal(size=(3, T, 7)), make_bank(3)["y"] % 7
  mask, kept = jnp.array([1.0, 0.0, 1.0]), np.array([0, 2])

  def loss(rows, mask):
    # Features are the logits themselves.
    logits = language.TokenLogits(z[rows], jnp.eye(7), jnp.zeros(7), chunk)
    return next_word.sentence_loss()(logits, {"y": y[rows], "mask": mask})

  expected = loss(kept, jnp.ones(2))
  np.testing.assert_allclose(loss(np.arange(3), mask), expected, rtol=1e-6)
  weights = next_word.token_weights({"y": y, "mask": mask})
  np.testing.assert_array_equal(weights[kept], y[kept] != 0)
  assert not weights[1].any() and y[1].any()


def test_the_oracles_gradients_by_differences():
  model, bank = make_model(1), make_bank(3)
  params = plain(variables_of(model).params)
  teacher = plain(variables_of(make_model(0)).params)
  rng = np.random.default_rng(0)
  direction = tree_map(lambda a: rng.normal(size=a.shape), params)
  start = params
  for function in (
    lambda p: oracle.loss_and_gradient(p, bank["x"], bank["y"]),
    # The own view is held fixed by weight zero.
    lambda p: oracle.divergence_and_gradient(
      p, bank["x"], bank["y"], [teacher], [0.5], 0.0
    ),
  ):
    at = lambda e, f=function: f(
      tree_map(lambda w, d: w + e * d, start, direction)
    )[0]
    slope = (at(1e-5) - at(-1e-5)) / 2e-5
    _, grads = function(start)
    along = sum(
      (a * b).sum()
      for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(direction))
    )
    np.testing.assert_allclose(along, slope, rtol=1e-6)
