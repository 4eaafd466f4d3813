"""Flax NNX modules as models."""

import dataclasses

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetfl
from hetfl import core
from hetfl.model import update_nnx
from hetfl.run import checkpoint
from tests import federation


class Net(nnx.Module):
  """Everything that has a state: normalisation, dropout, a list, a stream."""

  def __init__(self, rngs, rate=0.5):
    self.norm = nnx.BatchNorm(32, momentum=0.5, rngs=rngs)
    widths = (32, 16, federation.CLASSES)
    self.layers = nnx.List(
      [nnx.Linear(a, b, rngs=rngs) for a, b in zip(widths, widths[1:])]
    )
    self.dropouts = nnx.List([nnx.Dropout(rate, rngs=rngs) for _ in range(2)])

  def __call__(self, x):
    x = self.dropouts[0](self.norm(x.reshape(len(x), -1)))
    x = self.dropouts[1](nnx.relu(self.layers[0](x)))
    return self.layers[1](x)


def make_model(rate=0.5):
  return core.Model.from_nnx(lambda rngs: Net(rngs, rate))


def batch(seed=0, n=8):
  x = jax.random.normal(jax.random.key(seed), (n, 4, 4, 2))
  return x, jnp.arange(n) % federation.CLASSES


def test_variables_go_by_their_paths():
  model = make_model()
  variables = model.init(jax.random.key(0))
  assert jax.tree.map(jnp.shape, variables.params) == {
    "norm/bias": (32,),
    "norm/scale": (32,),
    "layers/0/kernel": (32, 16),
    "layers/0/bias": (16,),
    "layers/1/kernel": (16, 3),
    "layers/1/bias": (3,),
  }
  assert jax.tree.map(jnp.shape, variables.stats) == {
    "norm/mean": (32,),
    "norm/var": (32,),
  }
  other = model.init(jax.random.key(1))
  name = "layers/0/kernel"
  assert not jnp.array_equal(variables.params[name], other.params[name])


def test_training_is_nnxs_own():
  x, y = batch()
  model = make_model(rate=0.0)
  variables = model.init(jax.random.key(3))

  def loss(params):
    logits, stats = model.apply(
      core.Variables(params, variables.stats), x, jax.random.key(0), True
    )
    return optax.losses.softmax_cross_entropy_with_integer_labels(
      logits, y
    ).mean(), stats

  (value, stats), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(
    variables.params
  )
  theirs = Net(nnx.Rngs(jax.random.key(3)), rate=0.0)
  theirs.train()

  def nnx_loss(net):
    return optax.losses.softmax_cross_entropy_with_integer_labels(
      net(x), y
    ).mean()

  their_value, their_grads = nnx.value_and_grad(nnx_loss)(theirs)
  close = dict(rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(value, their_value, **close)
  for name, ours in (("norm", "norm/scale"), ("layers", "layers/0/kernel")):
    node = nnx.to_pure_dict(their_grads)[name]
    expected = node["scale"] if name == "norm" else node[0]["kernel"]
    np.testing.assert_allclose(grads[ours], expected, **close)
  mean = nnx.to_pure_dict(nnx.state(theirs, nnx.BatchStat))["norm"]["mean"]
  np.testing.assert_allclose(stats["norm/mean"], mean, **close)
  # By hand: half of 0 and half of the batch's mean.
  by_hand = np.asarray(x).reshape(8, -1).mean(0) / 2
  np.testing.assert_allclose(stats["norm/mean"], by_hand, **close)


def test_streams_come_from_the_key():
  model, (x, _) = make_model(), batch()
  variables = model.init(jax.random.key(0))
  out = lambda key, train: model.apply(variables, x, key, train)
  a, b, again = (out(jax.random.key(k), True)[0] for k in (1, 2, 1))
  np.testing.assert_array_equal(a, again)
  assert not np.allclose(a, b)
  logits, stats = out(None, False)
  np.testing.assert_array_equal(logits, out(jax.random.key(1), False)[0])
  assert stats is variables.stats
  # Two layers drop different elements: by the same draws both would be alike.
  same = core.Model.from_nnx(Twice)
  ones = jnp.ones((4, 100))
  first, second = same.apply(
    same.init(jax.random.key(0)), ones, jax.random.key(0), True
  )[0]
  assert 0.3 < jnp.mean((first > 0) != (second > 0)) < 0.7


class Twice(nnx.Module):
  """Two dropouts of the same thing."""

  def __init__(self, rngs):
    self.dropouts = nnx.List([nnx.Dropout(0.5, rngs=rngs) for _ in range(2)])

  def __call__(self, x):
    return jnp.stack([dropout(x) for dropout in self.dropouts])


def test_rounds_with_nnx_models_beside_linen_ones(tmp_path):
  first, second = federation.make_pools()
  pools = [dataclasses.replace(first, model=make_model()), second]
  distiller = hetfl.Distiller(learning_rate=0.01)
  algorithm = hetfl.merged_codist(pools, distiller, alpha=0.5, rounds=3)
  state, metrics = federation.run(federation.jitted(algorithm), 2)
  assert np.isfinite(float(metrics["pool0/distill_loss"].value))
  checkpoints = checkpoint.Checkpoints(tmp_path)
  checkpoints.save(2, state, {})
  _, read, _ = checkpoints.latest(like=state)
  chex.assert_trees_all_equal(read.server, state.server)
  start = algorithm.init(jax.random.key(0)).server[0].variables
  for part in ("params", "stats"):
    moved = jax.tree.map(
      lambda a, b: bool(jnp.any(a != b)),
      getattr(start, part),
      getattr(state.server[0].variables, part),
    )
    assert all(moved.values()), moved
  # The trained model as a module, and back: its statistics too.
  net = Net(nnx.Rngs(7))
  trained = state.server[0].variables
  update_nnx(net, trained)
  net.eval()
  x, _ = batch()
  logits, _ = pools[0].model.apply(trained, x, None, False)
  np.testing.assert_array_equal(net(x), logits)
  again = core.Model.from_nnx(lambda rngs: net).init(jax.random.key(1))
  chex.assert_trees_all_equal(again, trained)


def test_what_makes_no_module_is_refused():
  for wrong in (lambda rngs: 3, Net(nnx.Rngs(0))):
    with pytest.raises(ValueError, match="make: give a function from nnx.Rngs"):
      core.Model.from_nnx(wrong)


def test_a_switch_is_passed_on_and_plain_arrays_are_state():
  class Switch(nnx.Module):
    def __init__(self, rngs):
      self.scale = nnx.Param(jnp.ones(()))
      self.table = jnp.arange(3.0)
      self.number = nnx.Variable(2.0)

    def __call__(self, x, train):
      return self.scale * x + self.table * (self.number if train else 0)

  model = core.Model.from_nnx(Switch)
  variables = model.init(jax.random.key(0))
  assert set(variables.stats) == {"table", "number"}
  for train, expected in ((True, [1, 3, 5]), (False, [1, 1, 1])):
    logits, _ = jax.jit(model.apply, static_argnums=3)(
      variables, jnp.ones(3), jax.random.key(1), train
    )
    np.testing.assert_array_equal(logits, expected)

  class Other(Switch):
    def __call__(self, x, deterministic=True):
      return x

  with pytest.raises(ValueError, match="Other takes 'deterministic'"):
    core.Model.from_nnx(Other)
