"""Models and layers."""

import dataclasses
import functools
import itertools
import typing

import chex
import codist_run
import codist_tasks
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import settings

import hetfl
from hetfl import augment, core, engine
from hetfl.models import families, fedmd, fml, kernels, layers, vision
from hetfl.models.kernels import convolution
from tests import federation
from tests.oracles import codist as codist_oracle

COUNTS = {vision.small_cnn: 109_348, vision.large_cnn: 410_084}


@pytest.mark.parametrize("cnn", COUNTS)
@pytest.mark.parametrize("name", ["crop24", "pad32"])
def test_parameter_counts_in_both_recipes(cnn, name):
  recipe = augment.RECIPES[name]
  module = cnn(100, padding=recipe.padding, pool_after=recipe.pool_after)
  x = jnp.zeros((1, recipe.size, recipe.size, 3))
  shapes = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
  assert core.num_parameters(shapes) == COUNTS[cnn]
  # The 6x6 map that the counts ask for.
  channels = shapes["Conv_2"]["kernel"].shape[-1]
  assert shapes["Dense_0"]["kernel"].shape[0] == 6 * 6 * channels


@pytest.mark.parametrize(
  "size,padding,number", [(24, "SAME", 15), (32, "VALID", 7)]
)
def test_layouts_with_the_papers_counts(size, padding, number):
  found = {
    (strides, pool_after)
    for strides in itertools.product((1, 2), repeat=3)
    for n in range(4)
    for pool_after in itertools.combinations(range(3), n)
    if count(
      dict(padding=padding, pool_after=pool_after, strides=strides), size
    )
    == COUNTS[vision.small_cnn]
  }
  assert len(found) == number
  assert {((1, 2, 2), ()), ((2, 1, 2), ())} <= found
  if padding == "SAME":  # All that halve twice.
    halvings = [strides.count(2) + len(pools) for strides, pools in found]
    assert halvings == [2] * number


def count(options, size):
  """The parameters of the small CNN; 0 if its maps vanish."""
  x, cnn = jnp.zeros((1, size, size, 3)), vision.small_cnn(100, **options)
  try:
    return core.num_parameters(
      jax.eval_shape(cnn.init, jax.random.key(0), x)["params"]
    )
  except ValueError:
    return 0


# Of PyTorch's, torchvision 0.29's and HtFLlib's, without their last layers: the
# sum of `p.numel()`, and of the running means and variances.
OF_TORCH = {
  "cnn": (873_408, 0),
  "googlenet": (5_599_904, 14_560),
  "mobilenet_v2": (2_223_872, 34_112),
  "resnet18": (11_176_512, 9_600),
  "resnet34": (21_284_672, 17_024),
  "resnet50": (23_508_032, 53_120),
  "resnet101": (42_500_160, 105_344),
  "resnet152": (58_143_808, 151_424),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_networks_of_full_size_have_the_counts_of_pytorchs(name):
  assert families.FAMILIES["htfe8"] == (*OF_TORCH,)
  x = jnp.zeros((1, 32, 32, 3))
  module = families.body(name, 512, x.shape[1:])
  shapes = jax.eval_shape(module.init, jax.random.key(0), x)
  found = [shapes.get(part, {}) for part in ("params", "batch_stats")]
  assert (*map(core.num_parameters, found),) == OF_TORCH[name]


def test_dropout_is_in_training_alone():
  x = jax.random.normal(jax.random.key(0), (4, 2, 2, 1))
  with_dropout, without = (
    core.Model.from_flax(vision.CNN((), 3, (8,), 10, dropout=rate), x)
    for rate in (0.5, 0.0)
  )
  variables = with_dropout.init(jax.random.key(1))
  chex.assert_trees_all_equal(variables, without.init(jax.random.key(1)))
  expected = without.predict(variables, x)
  chex.assert_trees_all_equal(with_dropout.predict(variables, x), expected)

  def trained(seed):
    return with_dropout.outputs(variables, x, jax.random.key(seed), True)[0]

  chex.assert_trees_all_equal(trained(2), trained(2))
  assert not jnp.allclose(trained(2), trained(3))


@pytest.mark.parametrize(
  "form,size,strides,padding,channels,pool",
  [
    ("native", (4, 5), (3, 2), "SAME", 3, False),
    ("patches", (3, 3), (1, 1), "SAME", 3, True),  # Few channels: in columns.
    ("patches", (3, 2), (2, 1), "SAME", 3, False),
    ("patches", (2, 2), (2, 2), "VALID", 32, False),
    ("patches", (4, 5), (3, 2), "SAME", 32, False),
    ("winograd", (3, 3), (1, 1), "SAME", 32, True),  # In tiles of 4x2.
    ("winograd", (3, 3), (1, 1), "VALID", 32, False),  # In tiles of 2x2.
    ("winograd", (5, 5), (1, 1), "SAME", 32, True),
    ("winograd", (5, 5), (1, 1), "VALID", 32, False),
    ("winograd", (3, 3), (2, 2), "VALID", 32, False),  # As patches.
    ("planes", (3, 3), (1, 1), "SAME", 4, True),
    ("planes", (5, 5), (1, 1), "VALID", 4, True),
    ("planes", (3, 4), (1, 1), "VALID", 4, True),
    ("planes", (4, 3), (1, 1), "SAME", 4, True),
  ],
)
def test_conv_is_flaxs_conv(form, size, strides, padding, channels, pool):
  conv = layers.Conv(5, size, padding, form, strides=strides, pool=pool)
  of_flax = nn.Conv(5, size, strides, padding)
  turn = lambda x: x.transpose(3, 1, 2, 0) if form == "planes" else x

  def ours(variables, x):
    return turn(conv.apply(variables, turn(x)))

  def theirs(variables, x):
    y = of_flax.apply(variables, x)
    return nn.max_pool(y, (2, 2), (2, 2)) if pool else y

  # No whole number of tiles; each client has weights of its own.
  x = jax.random.normal(jax.random.key(0), (3, 2, 7, 9, channels))
  keys = jax.random.split(jax.random.key(1), 3)
  variables = jax.jit(jax.vmap(of_flax.init))(keys, x)
  variables["params"]["bias"] += jnp.arange(5.0).reshape(1, 5)
  weights = jax.random.normal(jax.random.key(2), (1, 1, 1, 5))

  def value_and_grads(apply):
    loss = lambda variables, x: jnp.sum(jnp.sin(apply(variables, x)) * weights)
    return jax.jit(jax.vmap(jax.value_and_grad(loss, (0, 1))))(variables, x)

  with jax.numpy_rank_promotion("allow"):  # Flax's.
    chex.assert_trees_all_close(
      value_and_grads(ours), value_and_grads(theirs), rtol=2e-4, atol=2e-5
    )


@pytest.mark.parametrize(
  "padding,strides,batch", [("SAME", (2, 3), 3), ("VALID", (1, 1), 0)]
)
def test_a_gpus_patches_are_the_others(monkeypatch, padding, strides, batch):
  x = jax.random.normal(jax.random.key(0), (2, batch, 7, 6, 16))
  tangent = jax.random.normal(jax.random.key(1), x.shape)

  def of_all(x):
    extract = functools.partial(
      convolution.extract_patches,
      kernel_size=(3, 2),
      padding=padding,
      strides=strides,
    )
    return jax.vmap(extract)(x)

  def results():
    patches, forward = jax.jvp(of_all, (x,), (tangent,))
    cotangent = jnp.cos(jnp.arange(patches.size)).reshape(patches.shape)
    return patches, forward, *jax.vjp(of_all, x)[1](cotangent)

  joined = results()
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert "gather" in str(jax.make_jaxpr(of_all)(x))
  chex.assert_trees_all_equal(results(), joined)


@pytest.mark.parametrize(
  "backend,clients,digits,alone",
  [
    ("cpu", "winograd", "patches", "patches"),
    ("gpu", "patches", "patches", "native"),
    ("tpu", "native", "native", "native"),
  ],
)
def test_the_form_of_a_backend(monkeypatch, backend, clients, digits, alone):
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  assert kernels.default_conv() == clients
  assert kernels.default_conv(small=True) == digits
  assert kernels.default_conv(alone=True) == alone


class Wide(nn.Module):
  """A CNN whose second convolution has enough channels for patches."""

  @nn.compact
  def __call__(self, x):
    for features in (16, 3):
      x = nn.relu(layers.Conv(features, (3, 3), pool=True)(x))
    return nn.Dense(federation.CLASSES)(x.reshape(x.shape[0], -1))


def test_a_gpus_round_is_the_others(monkeypatch):
  model = core.Model.from_flax(Wide(), jnp.zeros(federation.EXAMPLE.shape))

  def trained():
    inline = engine.Inline(federation.mesh(4))
    (pool,) = federation.make_pools(1)
    pools = [dataclasses.replace(pool, model=model)]
    algorithm = hetfl.fedavg(pools, rounds=None, engine=inline)
    algorithm = algorithm._replace(step=inline.compile(algorithm.step))
    state, _ = federation.run(algorithm, 1, distill=False)
    return federation.params(state)

  expected = trained()
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  chex.assert_trees_all_close(trained(), expected, rtol=2e-4, atol=2e-5)


# In tiles of 2x2, of 4x2, and of 2x2 with six inputs a side.
@pytest.mark.parametrize(
  "side,height,times", [(3, 6, 1.5), (3, 12, 1.5), (5, 6, 3)]
)
def test_winograd_is_about_as_exact_as_patches(side, height, times):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(4, height, 8, 64)).astype(np.float32)
  kernel = rng.normal(size=(side, side, 64, 64)).astype(np.float32)
  exact = codist_oracle.conv(x.astype(float), kernel.astype(float), 0.0)
  error = lambda y: np.sqrt(np.mean((np.asarray(y, float) - exact) ** 2))
  tiled = error(convolution.winograd_conv(x, kernel, "SAME"))
  patches = convolution.extract_patches(x, (side, side), "SAME")
  direct = error(patches @ kernel.reshape(-1, 64))
  # 0.7, 1.3 and, by how the CPU adds up the direct sum of 1,600 products, 1.5
  # to 2.6 times; the second with points 1 and 2 for 2/3 and 3/2, 1.9.
  assert tiled < times * direct, (tiled, direct)


FML_COUNTS = {
  # MNIST, CIFAR-10, CIFAR-100
  "mlp": (199_210, 656_810, 674_900),
  "lenet5": (61_706, 62_006, 69_656),
  "cnn1": (50_270, 71_498, 82_388),
  "cnn2": (297_738, 303_882, 350_052),
}


def test_parameter_counts_of_fmls_networks():
  sets = ((10, (28, 28, 1)), (10, (32, 32, 3)), (100, (32, 32, 3)))
  for name, counts in FML_COUNTS.items():
    for (classes, shape), count in zip(sets, counts):
      net, x = fml.net(name, classes, shape), jnp.zeros((1, *shape))
      shapes = jax.eval_shape(net.init, jax.random.key(0), x)
      assert core.num_parameters(shapes["params"]) == count
  with pytest.raises(ValueError, match="choose from mlp"):
    fml.net("resnet", 10, (32, 32, 3))


def test_networks_are_the_same_in_all_forms():
  x = jax.random.normal(jax.random.key(0), (3, 18, 18, 2))
  forms = typing.get_args(kernels.ConvForm)
  # Of both `patches` puts the batch last, `winograd` of the first alone.
  for filters in ((3, 4), (16, 4)):
    nets = [vision.CNN(filters, 3, (5,), 3, conv=form) for form in forms]
    variables = jax.jit(nets[0].init)(jax.random.key(1), x)
    first, *others = (jax.jit(net.apply)(variables, x) for net in nets)
    for other in others:
      np.testing.assert_allclose(first, other, rtol=1e-4, atol=1e-5)


def test_convolutions_alone_have_no_classes():
  shape = (32, 32, 3)
  net = fml.net("cnn2", None, shape)
  features, variables = jax.eval_shape(
    net.init_with_output, jax.random.key(0), jnp.zeros((2, *shape))
  )
  assert features.shape == (2, 2 * 2 * 128)
  assert set(variables["params"]) == {"Conv_0", "Conv_1", "Conv_2"}
  with pytest.raises(ValueError, match="no convolutions"):
    fml.net("mlp", None, shape)


def test_forms_of_convolution_say_what_they_cannot_do():
  x, kernel = jnp.zeros((0, 4, 4, 2)), jnp.zeros((3, 3, 2, 5))
  assert convolution.winograd_conv(x, kernel, "SAME").shape == (0, 4, 4, 5)
  for form in ("patches", "winograd", "native", "planes"):
    small = jnp.zeros((32, 2, 4, 1) if form == "planes" else (1, 2, 4, 32))
    with pytest.raises(ValueError, match="2x4 are too small for a conv"):
      conv = layers.Conv(5, (3, 3), "VALID", form, pool=True)
      jax.eval_shape(conv.init, jax.random.key(0), small)
  # Not taken for another one, which would be silent.
  for options in ({"form": "xla"}, {"padding": "same"}):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}='{value}': choose one of"):
      layers.Conv(5, (3, 3), **options).init(
        jax.random.key(0), jnp.zeros((1, 4, 4, 2))
      )


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_max_pool_is_flaxs(backend, monkeypatch):
  ours = convolution.max_pool_2x2
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  x = jax.random.normal(jax.random.key(0), (2, 5, 7, 2))
  theirs = lambda x: nn.max_pool(x, (2, 2), (2, 2))
  np.testing.assert_array_equal(ours(x), theirs(x))
  grad = lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(x)
  np.testing.assert_allclose(grad(ours), grad(theirs), rtol=1e-6)


def test_dropout_is_fair_and_independent():
  x = jnp.ones((64, 8, 8, 16))
  drop = lambda seed, rate=0.25: np.asarray(
    layers.Dropout(rate).apply(
      {}, x, True, rngs={"dropout": jax.random.key(seed)}
    )
  )
  first, second = drop(0) > 0, drop(1) > 0
  np.testing.assert_array_equal(first, drop(0) > 0)
  n = x.size
  # Binomial: three deviations of a share p over n draws are 3 sqrt(pq / n).
  near = lambda share, p, n: abs(share - p) < 3 * (p * (1 - p) / n) ** 0.5
  assert near(first.mean(), 0.75, n) and near(second.mean(), 0.75, n)
  assert near((first & second).mean(), 0.75**2, n)
  # Neighbours along every axis, and the same place in one key's next block.
  for axis in range(4):
    pairs = first & np.roll(first, 1, axis)
    assert near(pairs.mean(), 0.75**2, n), axis
  np.testing.assert_array_equal(np.unique(drop(2, 0.5)), [0, 2])
  assert layers.Dropout(0.5).apply({}, x, False) is x


def test_fedmd_models_of_table_2_and_their_maps():
  x = jnp.zeros((1, 32, 32, 3))
  counts = {}
  for name, module in fedmd.party_models("table2", 10, 16):
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)
    counts[name] = core.num_parameters(shapes["params"])
    assert shapes["params"]["head"]["kernel"].shape[1] == 16
  # conv (9*3+1)*64, (4*64+1)*64, (9*64+1)*64 twice, BN 4 * 2*64, head 3*3*64*16
  assert counts["cnn(64,64,64,64)"] == 1792 + 16448 + 2 * 36928 + 512 + 9216
  names = [
    "cnn(128,256)",
    "cnn(128,128,192)",
    "cnn(64,64,64)",
    "cnn(128,64,64)",
    "cnn(64,64,128)",
    "cnn(64,128,256)",
    "cnn(64,128,192)",
    "cnn(128,192,256)",
    "cnn(128,128,128)",
    "cnn(64,64,64,64)",
  ]
  rates = [0.2, 0.2, 0.2, 0.3, 0.4, 0.2, 0.2, 0.2, 0.3, 0.2]
  modules = fedmd.party_models("table2", 10, 16)
  assert [(n, m.dropout) for n, m in modules] == [*zip(names, rates)]
  rates = [0.2, 0.2, 0.2, 0.3, 0.4, 0.2, 0.2, 0.2, 0.3, 0.3]
  modules = fedmd.party_models("table1", 10, 16)
  assert [m.dropout for _, m in modules] == rates
  # As in the released code, whose table 1 has these too.
  assert counts["cnn(128,256)"] == 1_221_120
  assert counts["cnn(64,128,192)"] == 284_480


def numpy_net(
  params,
  x,
  padding="VALID",
  pool_after=(0, 1, 2),
  strides=(1, 1, 1),
  factors=(1, 1, 1),
):
  """Convolutions with ReLU, some pooled; dense ones, with ReLU but the last.

  `factors` are of smaller maps, of dense layers' inputs and of the last one's.
  """
  layers_of = lambda kind: [params[n] for n in sorted(params) if kind in n]
  x = np.asarray(x, np.float64)
  for i, p in enumerate(layers_of("Conv")):
    x = codist_oracle.conv(x, p["kernel"], p["bias"], strides[i], padding)
    x = codist_oracle.max_pool(x)[0] if i in pool_after else x
    x = np.maximum(x, 0)
    x = x * factors[0] if i in pool_after or strides[i] > 1 else x
  x = x.reshape(len(x), -1)
  *hidden, last = layers_of("Dense")
  for p in hidden:
    x = np.maximum(factors[1] * x @ p["kernel"] + p["bias"], 0)
  return factors[2] * x @ last["kernel"] + last["bias"]


def with_biases(module, x):
  """Parameters whose biases are not zero."""
  params = jax.jit(module.init)(jax.random.key(0), x)["params"]
  return jax.tree.map(
    lambda a: np.asarray(a) + 0.1 * np.cos(np.arange(a.size)).reshape(a.shape),
    params,
  )


def test_whole_networks_are_numpys():
  rng = np.random.default_rng(0)
  image = lambda side, channels: rng.normal(size=(2, side, side, channels))
  crop, pad = (augment.RECIPES[name] for name in ("crop24", "pad32"))
  small = lambda recipe: vision.CNN(
    (2, 3, 4), 3, (5, 6), 3, recipe.padding, recipe.pool_after
  )
  with_edges = lambda x: np.pad(x, [(0, 0), (2, 2), (2, 2), (0, 0)], "edge")
  cases = [
    # The network, an image, and how NumPy's differs from FML's.
    (small(crop), image(8, 3), dict(padding="SAME", pool_after=(0, 1))),
    (small(pad), image(14, 3), dict(pool_after=(1, 2))),
    (fml.net("mlp", 3, (8, 8, 1)), image(8, 1), {}),
    (fml.net("lenet5", 3, (28, 28, 1)), image(28, 1), {}),
    (fml.net("cnn1", 3, (8, 8, 1)), image(8, 1), dict(padding="SAME")),
  ]
  for i, (module, x, options) in enumerate(cases):
    params = with_biases(module, x)
    seen = with_edges(x) if i == 3 else x
    expected = numpy_net(params, seen, **options)
    ours = jax.jit(module.apply)({"params": params}, x)
    np.testing.assert_allclose(ours, expected, rtol=2e-3, atol=2e-4)
  weak, x = fedmd.PartyMLP(5, 3), image(4, 2)
  params = with_biases(weak, x)
  hidden = x.reshape(2, -1) @ params["Dense_0"]["kernel"]
  hidden = np.maximum(hidden + params["Dense_0"]["bias"], 0)
  expected = hidden @ params["head"]["kernel"]
  np.testing.assert_allclose(
    weak.apply({"params": params}, x), expected, rtol=1e-4, atol=1e-5
  )


@pytest.mark.parametrize(
  "options",
  [
    dict(pool_after=(1, 2), padding="VALID"),
    dict(pool_after=(), strides=(1, 2, 2), padding="VALID"),
    dict(pool_after=(2,), strides=(2, 1, 1)),
    dict(pool_after=(0, 1, 2)),
  ],
)
@pytest.mark.parametrize("conv", typing.get_args(kernels.ConvForm))
def test_layouts_and_places_of_dropout_are_numpys(options, conv):
  module = vision.CNN(
    (16, 3, 4),
    3,
    (5, 6),
    3,
    **options,
    conv=conv,
    dropout=0.25,
    map_dropout=0.5,
    logits_dropout=0.75,
  )
  x = np.random.default_rng(0).normal(size=(2, 17, 17, 3))
  params = with_biases(module, x)

  def in_place_of_dropout(call, args, kwargs, context):
    if isinstance(context.module, layers.Dropout):
      return args[0] * (1 + context.module.rate)
    return call(*args, **kwargs)

  with nn.intercept_methods(in_place_of_dropout):
    ours = module.apply({"params": params}, x, True)
  factors = {"padding": "SAME", "factors": (1.5, 1.25, 1.75), **options}
  expected = numpy_net(params, x, **factors)
  np.testing.assert_allclose(ours, expected, rtol=2e-3, atol=2e-4)


def test_flags_reach_the_cnns():
  flags = ["--layout=stride,conv,pool", "--dropout=0,0.25"]
  flags += ["--map_dropout=0,0.5", "--logits_dropout=0.75,0"]
  given = settings.parse(flags, codist_run.SETTINGS)
  words = codist_run.words(given.values, "fedavg")
  s = codist_run.SETTINGS.resolve(given.values, words)
  x = jax.random.normal(jax.random.key(0), (2, 8, 8, 1))
  rates = (0.0, 0.25), (0.0, 0.5), (0.75, 0.0)
  for model, cnn, dense, of_map, of_logits in zip(
    codist_tasks.task_of(s).models, COUNTS, *rates
  ):
    variables = model.init(jax.random.key(1))
    key, layout = jax.random.key(2), dict(strides=(2, 1, 1), pool_after=(2,))
    layout |= dict(map_dropout=of_map, logits_dropout=of_logits)
    same = core.Model.from_flax(cnn(10, dropout=dense, **layout), x[:1])
    np.testing.assert_array_equal(
      model.outputs(variables, x, key, True)[0],
      same.outputs(variables, x, key, True)[0],
    )


def test_dropout_does_not_depend_on_the_form():
  x = jax.random.normal(jax.random.key(0), (3, 8, 8, 1))

  def trained(conv, **options):
    module = vision.CNN((4, 5), 3, (6,), 2, conv=conv, dropout=0.25, **options)
    rngs = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    return module.init_with_output(rngs, x, True)[0]

  for options in (
    dict(map_dropout=0.5),
    dict(map_dropout=0.5, strides=(2, 1), pool_after=()),
    dict(logits_dropout=0.25),
  ):
    native = trained("native", **options)
    for conv in ("patches", "winograd"):
      np.testing.assert_allclose(
        trained(conv, **options), native, rtol=1e-4, atol=1e-5
      )
  # By default as with these values, to the last bit.
  same = trained("patches", map_dropout=0.0, strides=(1, 1), pool_after=(0, 1))
  np.testing.assert_array_equal(trained("patches"), same)
  np.testing.assert_array_equal(trained("patches", logits_dropout=0.25), same)
  assert not np.allclose(trained("patches", logits_dropout=0.0), same)
  assert not np.allclose(trained("patches", map_dropout=0.5), same)


def test_weights_begin_as_in_torch_and_as_in_keras():
  x = jnp.zeros((1, 16, 16, 3))
  # Uniform up to 1 over sqrt(fan_in), and sqrt(6 / (fan_in + fan_out)).
  torch = lambda shape: np.prod(shape[:-1]) ** -0.5
  keras = lambda shape: (6 / (np.prod(shape[:-2]) * sum(shape[-2:]))) ** 0.5
  for module, limit in (
    (fml.net("cnn1", 10, x.shape[1:]), torch),
    (fml.net("lenet5", 10, x.shape[1:]), torch),
    (fedmd.party_models("small", 3, 16)[2][1], keras),
    (fedmd.PartyMLP(64, 16), keras),
  ):
    for kernel in jax.tree.leaves(
      jax.jit(module.init)(jax.random.key(0), x)["params"]
    ):
      if kernel.ndim < 2:
        continue
      greatest = limit(kernel.shape)
      assert 0.9 * greatest < np.abs(kernel).max() <= greatest * (1 + 1e-6)
      np.testing.assert_allclose(kernel.std(), greatest / 3**0.5, rtol=0.12)
