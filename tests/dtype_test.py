"""Models that compute in bfloat16: what is narrow, and what stays float32.

And labels of few bits.
"""

import importlib

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import settings

from hetfl import core, distill, evaluate
from hetfl.algorithms import features
from hetfl.models import fedmd, fml, language, layers, next_word, vision
from hetfl.models.kernels.products import recur
from tests.runs import write_posts

IMAGES = (64, 16, 16, 3)  # Enough for batch statistics.
WORDS = 60

MODELS = {
  **{
    f"small_cnn_{form}": (
      lambda dtype, form=form: vision.small_cnn(10, conv=form, dtype=dtype)
    )
    for form in ("patches", "winograd", "native")
  },
  # Its few channels are in planes.
  "lenet5": lambda dtype: fml.net("lenet5", 10, IMAGES[1:], dtype=dtype),
  "trunk": lambda dtype: fml.net("cnn1", None, IMAGES[1:], dtype=dtype),
  "party_cnn": lambda dtype: fedmd.party_models("small", 4, 16, dtype=dtype)[3][
    1
  ],
  "party_mlp": lambda dtype: fedmd.PartyMLP(16, 10, dtype),
  "lstm": lambda dtype: language.LSTMLanguageModel(
    WORDS, 12, 8, 2, dtype=dtype
  ),
}


def example(name, seed=0):
  key = jax.random.key(seed)
  if name == "lstm":
    return jax.random.randint(key, (4, 6), 0, WORDS)
  return jax.random.normal(key, IMAGES)


def logits(outputs):
  is_text = isinstance(outputs, language.TokenLogits)
  return outputs.dense() if is_text else outputs


def products(jaxpr):
  """The types of all products' factors, and of their results."""
  found = []
  for equation in jaxpr.eqns:
    if equation.primitive.name in ("dot_general", "conv_general_dilated"):
      found.append(
        tuple(v.aval.dtype.name for v in (*equation.invars, *equation.outvars))
      )
    for value in equation.params.values():
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        found += products(inner)
  return found


@pytest.mark.parametrize("num_classes", [200, 256, 1000])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_labels_of_few_bits_are_labels(dtype, num_classes):
  """A byte cannot hold these numbers of classes, which would wrap around."""
  logits = jax.random.normal(jax.random.key(0), (5, num_classes))
  y = np.array([0, 3, 9, 9, 120], dtype)
  functions = (
    core.cross_entropy,
    evaluate.class_f1,
    distill.label_target,
    lambda z, batch: features.class_sums(z[:, :2], batch, num_classes),
  )
  for function in functions:
    few, many = (
      function(logits, {"y": jnp.asarray(labels), "mask": jnp.ones(5)})
      for labels in (y, y.astype(np.int32))
    )
    chex.assert_trees_all_equal(few, many)
  log_q = np.asarray(jax.nn.log_softmax(logits))
  losses = core.cross_entropy(logits, {"y": jnp.asarray(y)})
  expected = -log_q[np.arange(5), y.astype(int)]
  np.testing.assert_allclose(losses, expected, rtol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_products_are_narrow_and_all_else_is_not(name):
  wide, narrow = (
    core.Model.from_flax(MODELS[name](dtype), example(name))
    for dtype in (None, jnp.bfloat16)
  )
  variables = narrow.init(jax.random.key(1))
  chex.assert_trees_all_equal(variables, wide.init(jax.random.key(1)))
  assert {a.dtype.name for a in jax.tree.leaves(variables)} == {"float32"}
  x = example(name, 1)

  def outputs(model):
    key = jax.random.key(2)

    def loss(params):
      out, stats = model.outputs(
        variables._replace(params=params), x, key, True
      )
      z = logits(out)
      return jnp.mean(jnp.sin(z)), (z, stats)

    return jax.grad(loss, has_aux=True)

  (grads, (z, stats)), (exact, (expected, _)) = (
    jax.jit(outputs(model))(variables.params) for model in (narrow, wide)
  )
  of_all = {a.dtype.name for a in jax.tree.leaves((grads, z, stats))}
  assert of_all == {"float32"}
  # Close, but not the same: bfloat16 has eight bits.
  error = jnp.sqrt(jnp.mean((z - expected) ** 2) / jnp.var(expected))
  assert 1e-4 < error < 0.03, error
  flat = lambda tree: jnp.concatenate(
    [a.ravel() for a in jax.tree.leaves(tree)]
  )
  a, b = flat(grads), flat(exact)
  assert a @ b > 0.995 * jnp.linalg.norm(a) * jnp.linalg.norm(b)
  # All products are of bfloat16 but the logits' and its two gradients'.
  types = products(jax.make_jaxpr(outputs(narrow))(variables.params).jaxpr)
  of_float32 = [t for t in types if "bfloat16" not in t]
  assert all(
    t[:2] == ("bfloat16", "bfloat16") for t in types if len(set(t)) > 1
  )
  assert len(of_float32) == (0 if name in ("trunk", "lstm") else 3)
  assert len(types) > 3 or name == "trunk"


@pytest.mark.parametrize("chunk", [None, 5])
def test_logits_of_words_are_sums_in_float32(chunk):
  """Value and gradients of the loss, from the rounded features and kernel."""
  keys = jax.random.split(jax.random.key(0), 4)
  narrow = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
  features, kernel = narrow(keys[0], 2, 6, 8), narrow(keys[1], 8, WORDS)
  bias = jax.random.normal(keys[2], (WORDS,))
  batch = {
    "y": jax.random.randint(keys[3], (2, 6), 0, WORDS),
    "mask": jnp.ones(2),
  }
  loss = next_word.sentence_loss()

  def value_and_grad(*arrays):
    of = lambda arrays: loss(language.TokenLogits(*arrays, chunk), batch)
    return jax.value_and_grad(of)(arrays)

  value, grads = value_and_grad(features, kernel, bias)
  arrays = (core.wide(features), core.wide(kernel), bias)
  expected, exact = value_and_grad(*arrays)
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  assert [g.dtype.name for g in grads] == ["bfloat16", "bfloat16", "float32"]
  for ours, theirs in zip(grads, exact):
    scale = float(jnp.abs(theirs).max())
    np.testing.assert_allclose(
      core.wide(ours), theirs, rtol=2**-7, atol=2**-8 * scale
    )


def test_an_lstms_cells_are_float32():
  """They add up many small inputs, which bfloat16 would lose."""
  steps, hidden = 400, 1
  gate = lambda i, g, f, o: jnp.array([[i, g, f, o]], jnp.float32)
  # Forget nothing, add 2^-8 in each position.
  one = gate(30.0, np.arctanh(2.0**-8), 30.0, 30.0)
  gates = jnp.tile(one[None], (steps, 1, 1)).astype(jnp.bfloat16)
  recurrent = jnp.zeros((hidden, 4 * hidden), jnp.bfloat16)
  h = recur(gates, recurrent)
  assert h.dtype == jnp.bfloat16
  # tanh(400 / 256); a cell of bfloat16 would stop growing at 1.
  np.testing.assert_allclose(h[-1].item(), np.tanh(400 / 256), rtol=0.01)
  grads = jax.grad(lambda g: jnp.sum(core.wide(recur(g, recurrent))))
  assert grads(gates).dtype == jnp.bfloat16


def test_parameters_of_bfloat16_still_do():
  """Models whose parameters the user made narrow: no layer's type is given."""
  module = layers.Conv(4, (3, 3))
  x = jnp.ones((1, 4, 4, 2), jnp.bfloat16)
  variables = jax.tree.map(
    lambda a: a.astype(jnp.bfloat16), module.init(jax.random.key(0), x)
  )
  narrow = module.apply(variables, x)
  theirs = nn.Conv(4, (3, 3)).apply(variables, x)
  assert narrow.dtype == theirs.dtype == jnp.bfloat16
  np.testing.assert_allclose(core.wide(narrow), core.wide(theirs), atol=0.05)


IMAGE, SENTENCE = np.zeros((2, 8, 8, 1)), np.zeros((2, 5), int)
COMMANDS = {
  "codist": (lambda e: e.models, IMAGE),
  "codist --dataset=stackexchange": (lambda e: e.models, SENTENCE),
  "compare": (lambda e: [e.model(kind) for kind in e.kinds], IMAGE),
  "fml": (lambda e: [e.global_model, *(c.model for c in e.clients)], IMAGE),
  "fedmd": (lambda e: [p.model for p in e.parties], np.zeros((2, 16, 16, 1))),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_models_compute_in_bfloat16(tmp_path, command):
  name, *flags = command.split()
  module = importlib.import_module(f"{name}_run")
  write_posts(tmp_path)
  flags += [f"--data_dir={tmp_path}", "--dtype=bfloat16"]
  flags += ["--high_capacity_clients=5"] if name == "codist" else []
  given = settings.parse(flags, module.SETTINGS)
  words = module.words(given.values, "fml" if name == "fml" else "local")
  s = module.SETTINGS.resolve(given.values, words)
  assert s.of_kind("result")["dtype"] == "bfloat16"  # Part of what a run is.
  experiment = module.Experiment(s)
  models, x = COMMANDS[command]
  for model in models(experiment):
    variables = model.shapes()
    types = products(jax.make_jaxpr(model.predict)(variables, x).jaxpr)
    assert any("bfloat16" in t[:2] for t in types)
