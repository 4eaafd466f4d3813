"""The NumPy oracle, tested against finite differences and hand work."""

import numpy as np
import pytest

from tests.oracles import codist

EPS = 1e-6


def dense(rng, widths, first=0):
  return {
    f"Dense_{first + i}": {
      "kernel": rng.normal(size=(a, b)) / np.sqrt(a),
      "bias": rng.normal(size=b) * 0.1,
    }
    for i, (a, b) in enumerate(zip(widths[:-1], widths[1:]))
  }


def cnn(rng, filters, widths):
  """For images of 8x8x2."""
  params, channels = {}, 2
  for i, f in enumerate(filters):
    params[f"Conv_{i}"] = {
      "kernel": rng.normal(size=(3, 3, channels, f)) / np.sqrt(9 * channels),
      "bias": rng.normal(size=f) * 0.1,
    }
    channels = f
  return params | dense(rng, (2 * 2 * channels, *widths))


def check_gradient(loss, params, grads):
  """Compares with a central difference in every single parameter."""
  for layer in params:
    for name, array in params[layer].items():
      for at in np.ndindex(array.shape):
        kept = array[at]
        array[at] = kept + EPS
        up = loss()
        array[at] = kept - EPS
        down = loss()
        array[at] = kept
        want = (up - down) / (2 * EPS)
        assert abs(grads[layer][name][at] - want) < 1e-6, (layer, name, at)


def leaves(params):
  return [a for layer in params.values() for a in layer.values()]


def assert_same(a, b, **kwargs):
  for x, y in zip(leaves(a), leaves(b)):
    np.testing.assert_allclose(x, y, **kwargs)


def one(*values):
  return {"Dense_0": {"bias": np.array(values, float)}}


def value(params):
  return params["Dense_0"]["bias"]


MODELS = {
  "mlp": lambda rng: dense(rng, (2 * 64, 5, 4, 3)),
  "cnn": lambda rng: cnn(rng, (2, 3, 3), (4, 3)),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loss", ["cross_entropy", "kl"])
def test_model_gradients(model, loss):
  rng = np.random.default_rng(1)
  params = MODELS[model](rng)
  x = rng.normal(size=(3, 8, 8, 2))
  y = np.array([0, 2, 1])
  target = codist.softmax(rng.normal(size=(3, 3)))

  def value_and_grad(z):
    if loss == "kl":
      return codist.kl(target, z)
    return codist.cross_entropy(z, y)

  z, tape = codist.forward(params, x)
  assert z.shape == (3, 3)
  grads = codist.backward(params, tape, value_and_grad(z)[1])
  assert list(grads) == list(params)
  check_gradient(
    lambda: value_and_grad(codist.logits(params, x))[0], params, grads
  )


@pytest.mark.parametrize("shape", [(2, 4, 6, 2), (2, 5, 7, 2)])
def test_layer_input_gradients(shape):
  rng = np.random.default_rng(2)
  x = rng.normal(size=shape)
  kernel = rng.normal(size=(3, 3, 2, 3))
  bias = rng.normal(size=3)
  out = codist.conv(x, kernel, bias)
  weight = rng.normal(size=out.shape)
  dx, grads = codist.conv_backward(x, kernel, weight)
  params = {"l": {"x": x, "kernel": kernel, "bias": bias}}
  check_gradient(
    lambda: (codist.conv(x, kernel, bias) * weight).sum(),
    params,
    {"l": grads | {"x": dx}},
  )
  pooled, which = codist.max_pool(x)
  assert pooled.shape == (2, shape[1] // 2, shape[2] // 2, 2)
  weight = rng.normal(size=pooled.shape)
  dx = codist.max_pool_backward(x.shape, which, weight)
  check_gradient(
    lambda: (codist.max_pool(x)[0] * weight).sum(),
    {"l": {"x": x}},
    {"l": {"x": dx}},
  )


def test_conv_by_hand():
  x = np.arange(1.0, 10).reshape(1, 3, 3, 1)
  kernel = np.zeros((3, 3, 1, 1))
  kernel[0, 0] = 1  # A correlation: looks up and to the left.
  out = codist.conv(x, kernel, np.array([0.5]))
  want = [[0.5, 0.5, 0.5], [0.5, 1.5, 2.5], [0.5, 4.5, 5.5]]
  np.testing.assert_array_equal(out[0, :, :, 0], want)
  assert codist.max_pool(x)[0].item() == 5


def test_losses_by_hand():
  z = np.log([[1.0, 2.0, 1.0]])
  loss, dz = codist.cross_entropy(z, np.array([1]))
  np.testing.assert_allclose(loss, np.log(2))
  np.testing.assert_allclose(dz, [[0.25, -0.5, 0.25]])
  loss, dz = codist.kl(np.array([[1.0, 0.0, 0.0]]), z)
  np.testing.assert_allclose(loss, np.log(4))
  np.testing.assert_allclose(dz, [[-0.75, 0.5, 0.25]])
  loss, dz = codist.kl(codist.softmax(z), z)
  np.testing.assert_allclose(loss, 0, atol=1e-15)
  np.testing.assert_allclose(dz, 0, atol=1e-15)


def test_tempered_softmax_and_target_by_hand():
  z = np.log([[1.0, 4.0]])
  np.testing.assert_allclose(codist.softmax(z), [[0.2, 0.8]])
  np.testing.assert_allclose(codist.softmax(z, 2.0), [[1 / 3, 2 / 3]])
  np.testing.assert_allclose(codist.softmax(z, 0.5), [[1 / 17, 16 / 17]])
  big = codist.softmax(np.array([[1e4, 0.0]]), 0.1)
  np.testing.assert_array_equal(big, [[1, 0]])
  # Teachers [1/3, 2/3] and [.2, .8], mean [4/15, 11/15]; own [.5, .5].
  target = codist.target_distribution([z, z], [2, 1], np.zeros((1, 2)), 0.25)
  np.testing.assert_allclose(target, [[0.2 + 0.125, 0.55 + 0.125]])


def test_sgd_and_momentum_by_hand():
  sgd = codist.Sgd()
  w, _ = sgd.update(one(2.0), sgd.init(one(1.0)), one(1.0), 0.1)
  np.testing.assert_allclose(value(w), [0.8])
  momentum = codist.Momentum(0.9)
  w, state = one(1.0), momentum.init(one(1.0))
  w, state = momentum.update(one(2.0), state, w, 0.1)
  np.testing.assert_allclose(value(w), [0.8])
  w, state = momentum.update(one(1.0), state, w, 0.1)  # v = 1 + .9 * 2
  np.testing.assert_allclose(value(w), [0.8 - 0.28])


def test_adam_by_hand():
  adam = codist.Adam()
  g = np.array([3.0, -1e-5])
  w, state = adam.update(one(*g), adam.init(one(0, 0)), one(0, 0), 0.1)
  # First step: m_hat = g and v_hat = g^2, so lr g / (|g| + eps).
  np.testing.assert_allclose(value(w), [-0.3 / 3.00001, 0.05])
  w, _ = adam.update(one(1.0, 0), state, w, 0.1)
  m_hat = (0.9 * 0.3 + 0.1) / 0.19
  v_hat = (0.999 * 0.009 + 0.001) / (1 - 0.999**2)
  want = -0.3 / 3.00001 - 0.1 * m_hat / (np.sqrt(v_hat) + 1e-5)
  np.testing.assert_allclose(value(w)[0], want)


def test_yogi_by_hand():
  yogi = codist.Yogi()
  w, state = yogi.update(one(1.0), yogi.init(one(0.0)), one(0.0), 0.1)
  # m = .9e-6 + .1 and v = 1e-6 + .001, corrected by .1 and by .001.
  want = -0.1 * 1.000009 / (np.sqrt(1.001) + 1e-3)
  np.testing.assert_allclose(value(w), [want], rtol=1e-12)
  # A small gradient lowers v by (1 - b2) g^2 instead of decaying it.
  _, (_, _, v) = yogi.update(one(0.01), state, w, 0.1)
  np.testing.assert_allclose(value(v), [1e-6 + 1e-3 - 1e-7], rtol=1e-12)


def test_weighted_mean_by_hand():
  mean = codist.weighted_mean([one(1.0), one(5.0)], [3, 1])
  np.testing.assert_allclose(value(mean), [2.0])


def test_merge_by_hand():
  merged = codist.merge(one(3.0, 4.0), one(0.0, 2.0), 0.5)
  np.testing.assert_allclose(value(merged), [1.5, 4.5])
  zero = codist.merge(one(3.0, 4.0), one(0.0, 0.0), 0.5)
  np.testing.assert_allclose(value(zero), [1.5, 2.0])
  none = codist.merge(one(0.0, 0.0), one(1.0, 2.0), 0.5)
  np.testing.assert_allclose(value(none), [0.0, 0.0])
  # The norm is of the whole model, not of each layer.
  g = {"a": {"w": np.array([3.0])}, "b": {"w": np.array([4.0])}}
  d = {"a": {"w": np.array([0.0])}, "b": {"w": np.array([2.0])}}
  merged = codist.merge(g, d, 0.5)
  assert (merged["a"]["w"][0], merged["b"]["w"][0]) == (1.5, 4.5)


def data(seed, steps=2, size=4):
  rng = np.random.default_rng(seed)
  return [
    (rng.normal(size=(size, 8, 8, 2)), rng.integers(0, 3, size))
    for _ in range(steps)
  ]


def test_client_update():
  rng = np.random.default_rng(3)
  params = MODELS["mlp"](rng)
  batches = data(3)
  (x, y), second = batches
  z, tape = codist.forward(params, x)
  g = codist.backward(params, tape, codist.cross_entropy(z, y)[1])
  delta = codist.client_update(params, batches[:1], 0.1)
  assert_same(delta, codist.tree_map(lambda a: 0.1 * a, g), atol=1e-15)
  # Neither the proximal term nor the momentum acts on the first step.
  same = codist.client_update(params, batches[:1], 0.1, 0.5, 0.9)
  assert_same(delta, same, atol=1e-15)
  # On the second they add mu (w - w_server) = -mu lr g and .9 g.
  w = codist.tree_map(lambda a, b: a - 0.1 * b, params, g)
  z, tape = codist.forward(w, second[0])
  h = codist.backward(w, tape, codist.cross_entropy(z, second[1])[1])
  want = codist.tree_map(
    lambda a, b: 0.1 * a + 0.1 * (b - 0.5 * 0.1 * a + 0.9 * a), g, h
  )
  both = codist.client_update(params, batches, 0.1, 0.5, 0.9)
  assert_same(both, want, atol=1e-14)


def make_pools(n=2, server=None, **settings):
  rng = np.random.default_rng(4)
  server = server or codist.Adam()
  settings = (
    dict(server_lr=0.01, client_lr=0.1, distill_lr=0.01, regularization=0.1)
    | settings
  )
  return [
    codist.Pool.start(
      MODELS["cnn" if i % 2 else "mlp"](rng),
      server,
      temperature=1 + 0.5 * i,
      **settings,
    )
    for i in range(n)
  ]


def make_clients(n=2):
  return [
    [codist.Client(data(10 * i + k), weight=8 + k) for k in range(2)]
    for i in range(n)
  ]


def test_fedavg_one_client_is_its_model():
  pool = make_pools(1, codist.Sgd(), server_lr=1.0)[0]
  client = codist.Client(data(5), 8)
  after = codist.fedavg_round(pool, [client])
  delta = codist.client_update(pool.params, client.batches, 0.1)
  want = codist.tree_map(lambda a, b: a - b, pool.params, delta)
  assert_same(after.params, want, atol=1e-15)


def test_distill_lowers_the_divergence_and_leaves_teachers():
  student, teacher = make_pools()
  x = data(6, steps=1)[0][0]
  before = codist._copy(teacher.params)
  target = codist.softmax(codist.logits(teacher.params, x), 1.5)
  losses = []
  for steps in (0, 20):
    result = codist.distill(
      student.params, [teacher.params], [1.5], [x] * steps, 0.01, 0.0
    )
    losses.append(codist.kl(target, codist.logits(result, x))[0])
  assert losses[1] < 0.2 * losses[0]
  assert_same(teacher.params, before, rtol=0)
  # Full regularization: the student already is its target.
  own = codist.distill(student.params, [teacher.params], [1], [x], 0.01, 1.0)
  assert_same(own, student.params, atol=1e-9)


@pytest.mark.parametrize("n", [2, 3])
def test_periodic_codist(n):
  pools, clients = make_pools(n), make_clients(n)
  plain = [codist.fedavg_round(p, c) for p, c in zip(pools, clients)]
  x = [[b[0] for b in data(7, steps=3)]] * n
  early = codist.periodic_codist_round(pools, clients, 3, 2)
  late = codist.periodic_codist_round(pools, clients, 4, 2, x)
  for i in range(n):
    assert_same(early[i].params, plain[i].params, rtol=0)
    assert early[i].opt_state[0] == 1
    # Taught by the others as they were after federated averaging.
    others = [p for j, p in enumerate(plain) if j != i]
    want = codist.distill(
      plain[i].params,
      [p.params for p in others],
      [p.temperature for p in others],
      x[i],
      0.01,
      0.1,
    )
    assert_same(late[i].params, want, rtol=0)
    assert late[i].opt_state[0] == 0
    assert codist.norm(late[i].opt_state[1]) == 0


@pytest.mark.parametrize("n", [2, 3])
def test_merged_codist(n):
  pools, clients = make_pools(n, codist.Sgd()), make_clients(n)
  x = [[b[0] for b in data(8, steps=3)]] * n
  plain = [codist.fedavg_round(p, c) for p, c in zip(pools, clients)]
  # alpha = 1 recovers federated averaging; so does no distillation step,
  # up to the factor alpha.
  ones = codist.merged_codist_round(pools, clients, 1.0, x)
  still = codist.merged_codist_round(pools, clients, 0.5, [[]] * n)
  zeros = codist.merged_codist_round(pools, clients, 0.0, x)
  students = codist.distill_all(pools, x)
  for i, pool in enumerate(pools):
    assert_same(ones[i].params, plain[i].params, atol=1e-15)
    half = codist.tree_map(
      lambda a, b: (a + b) / 2, pool.params, plain[i].params
    )
    assert_same(still[i].params, half, atol=1e-15)
    # alpha = 0: as far as the clients' step, towards the student.
    step = codist.tree_map(np.subtract, zeros[i].params, pool.params)
    towards = codist.tree_map(np.subtract, students[i], pool.params)
    away = codist.tree_map(np.subtract, plain[i].params, pool.params)
    np.testing.assert_allclose(codist.norm(step), codist.norm(away))
    scale = codist.norm(away) / codist.norm(towards)
    want = codist.tree_map(lambda a, s=scale: s * a, towards)
    assert_same(step, want, atol=1e-14)
