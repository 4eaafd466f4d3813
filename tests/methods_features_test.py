"""Methods of bodies and heads against NumPy float64 oracles."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetfl
from hetfl import core, local_model
from hetfl.algorithms.features import (
  Features,
  headed,
  of_logits,
  train_server,
  with_parts,
)
from hetfl.algorithms.fedgen import fedgen
from hetfl.algorithms.fedgh import fedgh
from hetfl.algorithms.fedgkt import fedgkt
from hetfl.algorithms.fedmrl import fedmrl, matryoshka
from hetfl.algorithms.fedproto import fedproto, nearest
from hetfl.algorithms.fedtgp import fedtgp
from hetfl.algorithms.lgfedavg import lgfedavg
from hetfl.algorithms.personal import Method, personal
from hetfl.model import joined, parted
from hetfl.models.fedgen import draw, Generator
from tests.federation import batches_of, double, plain
from tests.oracles import codist

CLASSES, WIDTH, RATE = 3, 2, 0.125
# Client 0 alone has examples of class 2, and is absent from round 2.
LABELS = ((1, 2, 2), (0, 1, 0, 1, 1), (0, 0, 1), (1,) * 4, (0, 1, 0, 0))
assert_close = functools.partial(
  chex.assert_trees_all_close, rtol=2e-5, atol=1e-6
)


def matrices(*widths):
  """A model that multiplies by matrices, with a ReLU between two."""

  def init(key):
    keys = jax.random.split(key, len(widths) - 1)
    shapes = zip(widths, widths[1:])
    ws = [jax.random.normal(k, shape) / 2 for k, shape in zip(keys, shapes)]
    return core.Variables(ws, {})

  def apply(variables, x, key, train):
    first, *others = variables.params
    x = x @ first
    for w in others:
      x = jax.nn.relu(x) @ w
    return x, variables.stats

  return core.Model(init, apply)


HEAD = matrices(WIDTH, CLASSES)
MODELS = [headed(matrices(*w, WIDTH), HEAD) for w in ((4,), (4, 5))]
CLIENTS = [hetfl.Client(MODELS[k % 2]) for k in range(5)]
POPULATION = hetfl.ClientPopulation.from_lists(
  {
    "x": np.random.default_rng(0).normal(size=(19, 4)).astype(np.float32),
    "y": np.concatenate(LABELS).astype(np.int32),
  },
  np.split(np.arange(19), np.cumsum([len(y) for y in LABELS])[:-1]),
)


def make_plan(round, number=4):
  return hetfl.plan_round(
    {"train": POPULATION},
    seed=9,
    round=round,
    clients_per_round=number,
    batch_size=3,
    epochs=2,
    tail="short",
  )


def run(algorithm, rounds=2, **settings):
  state = algorithm.init(jax.random.key(1))
  bank = {"train": jax.device_put(dict(POPULATION.bank))}
  step = jax.jit(algorithm.step)
  for round in range(1, rounds + 1):
    state, metrics = step(state, make_plan(round, **settings), bank)
  return state, metrics


def models_of(state, parts=("body", "head")):
  """Each client's matrices, part by part."""
  each = [plain(local_model(state, k).params) for k in range(len(CLIENTS))]
  return [[w for part in parts for w in params[part]] for params in each]


# --- Oracles ------------------------------------------------------------------


def softmax_gap(z, y):
  """d mean CE / d z."""
  return codist.cross_entropy(z, y)[1]


def layers_of(model, x):
  """The inputs of each matrix; those of the last are the features."""
  inputs = [x]
  for w in model[:-1]:
    out = inputs[-1] @ w
    last = len(inputs) == len(model) - 1
    inputs.append(out if last else np.maximum(out, 0))
  return inputs


def stepped(model, inputs, d, pull=0.0):
  """An SGD step, from the gradients in the logits and in the features."""
  grads = [inputs[-1].T @ d]
  d = d @ model[-1].T + pull
  for i in reversed(range(len(model) - 1)):
    grads.insert(0, inputs[i].T @ d)
    d = (d @ model[i].T) * (inputs[i] > 0)
  return [w - RATE * g for w, g in zip(model, grads)]


def train(model, batches, prototypes=None, weight=0.0):
  """Local SGD on `CE + weight mean_d (h_d - C_d[y])^2`; None: no prototype."""
  for x, y in batches:
    inputs = layers_of(model, x)
    features = inputs[-1]
    pull = np.zeros_like(features)
    for b, j in enumerate(y):
      if prototypes and prototypes[j] is not None:
        pull[b] = weight * 2 * (features[b] - prototypes[j]) / WIDTH / len(y)
    d = softmax_gap(features @ model[-1], y)
    model = stepped(model, inputs, d, pull)
  return model


def class_means(model, batches):
  """`{class: (mean features, count)}` of a client's examples."""
  y = np.concatenate([y for _, y in batches])
  h = np.concatenate([layers_of(model, x)[-1] for x, _ in batches])
  return {j: (h[y == j].mean(0), (y == j).sum()) for j in set(y)}


def proto_server(server, sent, **_):
  def merged(j):
    held = [means[j] for means, *_ in sent if j in means]
    total = sum(n for _, n in held)
    return sum(n * c for c, n in held) / total if held else server[j]

  return [merged(j) for j in range(CLASSES)]


def head_server(server, sent, **_):
  total = sum(n for *_, n in sent)
  return sum(n * model[-1] for _, model, n in sent) / total


def pairs_of(sent):
  pairs = [(c, j) for means, *_ in sent for j, (c, _) in means.items()]
  return np.array([c for c, _ in pairs]), np.array([j for _, j in pairs])


def gh_server(server, sent, epochs, **_):
  h, y = pairs_of(sent)
  for _ in range(epochs):
    server = server - RATE * h.T @ softmax_gap(h @ server, y)
  return server


def network(e, w1, b1, w2, b2):
  return np.maximum(e @ w1 + b1, 0) @ w2 + b2


def tgp_server(server, sent, epochs, margin):
  h, y = pairs_of(sent)
  means = [h[y == j].mean(0) for j in set(y)]
  apart = [[np.linalg.norm(a - b) for b in means if b is not a] for a in means]
  gap = max(min(of_one) for of_one in apart)
  for _ in range(epochs):
    e, w1, b1, w2, b2 = server
    apart = network(*server)[None] - h[:, None]
    distance = np.sqrt((apart**2).sum(2))
    scores = -distance - min(gap, margin) * np.eye(CLASSES)[y]
    d = -softmax_gap(scores, y)
    d = ((d / distance)[..., None] * apart).sum(0)
    hidden = np.maximum(e @ w1 + b1, 0)
    back = (d @ w2.T) * (hidden > 0)
    grads = back @ w1.T, e.T @ back, back.sum(0), hidden.T @ d, d.sum(0)
    server = [a - RATE * g for a, g in zip(server, grads)]
  return server


def means_in(server):
  """Prototypes from the state of FedProto's server; None where none is."""
  return [c / n if n else None for c, n in zip(*map(np.array, server))]


def network_in(server):
  embed, first, second = (
    server.network.params[f"layers_{i}"] for i in (0, 1, 3)
  )
  of = lambda dense: (dense["kernel"], dense["bias"])
  return [*map(np.array, (embed["embedding"], *of(first), *of(second)))]


SIZED = dict(num_classes=CLASSES, num_features=WIDTH, weight=0.5)
SERVED = dict(server_learning_rate=RATE, server_epochs=3, server_batch_size=99)
TGP = fedtgp, tgp_server, network_in
CASES = {
  "fedproto": (fedproto, proto_server, means_in, SIZED),
  "lgfedavg": (lgfedavg, head_server, lambda s: np.array(s.params[0]), {}),
  "fedgh": (
    fedgh,
    gh_server,
    lambda server: np.array(server.params[0]),
    dict(head=HEAD, **SERVED),
  ),
  "fedtgp": (*TGP, SIZED | SERVED | {"margin": 100.0}),
  "fedtgp, least margin": (*TGP, SIZED | SERVED | {"margin": 0.25}),
}


@pytest.mark.parametrize("name", CASES)
def test_rounds_are_the_oracles(name):
  make, serve, read, options = CASES[name]
  given = {"epochs": 3, "margin": options.get("margin")}
  with jax.enable_x64(True):
    algorithm = make(CLIENTS, learning_rate=RATE, **options)
    state = double(algorithm.init(jax.random.key(3)))
    server, theirs = read(state.server), models_of(state)
    bank = {"train": jax.device_put(dict(POPULATION.bank))}
    step, prototypes = jax.jit(algorithm.step), None
    for round in (1, 2):
      plan = make_plan(round)
      held = plan.batches["train"]
      assert (0 in held.client) == (round == 1)
      state, _ = step(state, plan, bank)
      sent = []
      for k, batches in batches_of(held, POPULATION.bank):
        model = theirs[k]
        if make in (lgfedavg, fedgh):
          model = [*model[:-1], server]
        theirs[k] = train(model, batches, prototypes, options.get("weight"))
        means = class_means(theirs[k], batches)
        sent.append((means, theirs[k], len(LABELS[k])))
      server = serve(server, sent, **given)
      tolerance = dict(rtol=1e-9, atol=1e-9)
      assert_close(read(state.server), server, **tolerance)
      assert_close(models_of(state), theirs, **tolerance)
      if make is fedproto:
        prototypes = server
      if make is fedtgp:
        prototypes = [*network(*server)]
        ours = state.server.prototypes.total
        assert_close(np.array(ours), network(*server), **tolerance)


# There is one example less.
GKT = dict(
  server=matrices(WIDTH, 5, CLASSES), num_classes=CLASSES, num_examples=20
)


def test_fedgkt_is_the_oracle():
  """In both directions; client 0 has no logits of round 2, and keeps those."""
  weight, t, epochs = 0.5, 2.0, 3
  bank = POPULATION.bank
  numbers = {"x": np.arange(19)[:, None], "y": bank["y"]}

  def towards(z, teacher, y, heard=1.0):
    kl_gap = t * (codist.softmax(z, t) - codist.softmax(teacher, t)) / len(y)
    return softmax_gap(z, y) + weight * heard * kl_gap

  with jax.enable_x64(True):
    algorithm = fedgkt(
      CLIENTS,
      **GKT,
      weight=weight,
      temperature=t,
      learning_rate=RATE,
      **SERVED,
    )
    state = double(algorithm.init(jax.random.key(3)))
    server, theirs = (
      [*map(np.array, state.server.model.params)],
      models_of(state),
    )
    step = jax.jit(algorithm.step)
    logits, known = np.zeros((20, CLASSES)), np.zeros(20)
    for round in (1, 2):
      held = make_plan(round).batches["train"]
      state, metrics = step(state, make_plan(round), {"train": {**bank}})
      features, said, rows = [], [], []
      for k, batches in batches_of(held, numbers):
        for at, y in batches:
          at = at[:, 0].astype(int)
          inputs = layers_of(theirs[k], bank["x"][at].astype(np.float64))
          z = inputs[-1] @ theirs[k][-1]
          d = towards(z, logits[at], y, known[at, None])
          theirs[k] = stepped(theirs[k], inputs, d)
        at = np.concatenate([at[:, 0] for at, _ in batches]).astype(int)
        features.append(layers_of(theirs[k], bank["x"][at])[-1])
        said.append(features[-1] @ theirs[k][-1])
        rows.append(at)
      h, said, rows = map(np.concatenate, (features, said, rows))
      for _ in range(epochs):
        hidden = np.maximum(h @ server[0], 0)
        d = towards(hidden @ server[1], said, bank["y"][rows])
        back = (d @ server[1].T) * (hidden > 0)
        grads = h.T @ back, hidden.T @ d
        server = [w - RATE * g for w, g in zip(server, grads)]
      logits[rows] = np.maximum(h @ server[0], 0) @ server[1]
      known[rows] = 1
      tolerance = dict(rtol=1e-9, atol=1e-9)
      assert_close(
        [*map(np.array, state.server.model.params)], server, **tolerance
      )
      assert_close(np.array(state.server.logits), logits, **tolerance)
      assert_close(np.array(state.server.known), known)
      assert_close(models_of(state), theirs, **tolerance)
      assert (float(metrics["kl"].value) > 0) == (round == 2)
  assert known.tolist() == [1.0] * 19 + [0.0]


def train_nested(model, small, batches, weight):
  """SGD on `CE(head) + weight CE(shared head)` of the first feature."""
  for x, y in batches:
    *body, projection, head = model
    (trunk, inner), inputs = small, layers_of([*body, projection], x)
    both = np.concatenate([x @ trunk, inputs[-1]], axis=1)
    features = both @ projection
    d, d_inner = (
      softmax_gap(z, y) for z in (features @ head, features[:, :1] @ inner)
    )
    d_inner *= weight
    grads = [features.T @ d]
    of_small = [features[:, :1].T @ d_inner]
    d = d @ head.T
    d[:, :1] += d_inner @ inner.T
    grads.insert(0, both.T @ d)
    d = d @ projection.T
    of_small.insert(0, x.T @ d[:, :1])
    d = d[:, 1:]
    for i in reversed(range(len(body))):
      grads.insert(0, inputs[i].T @ d)
      d = (d @ body[i].T) * (inputs[i] > 0)
    model = [w - RATE * g for w, g in zip(model, grads)]
    small = [w - RATE * g for w, g in zip(small, of_small)]
  return model, small


def test_fedmrl_is_the_oracle():
  nested = [
    matryoshka(
      matrices(*widths, WIDTH),
      HEAD,
      matrices(1 + WIDTH, WIDTH),
      shared_body=matrices(4, 1),
      shared_head=matrices(1, CLASSES),
    )
    for widths in ((4,), (4, 5))
  ]
  clients = [hetfl.Client(nested[k % 2]) for k in range(5)]
  small_of = lambda params: [params["body"][0], params["head"][0]]

  models = functools.partial(models_of, parts=("body", "projection", "head"))

  with jax.enable_x64(True):
    algorithm = fedmrl(clients, learning_rate=RATE, weight=0.5)
    state = double(algorithm.init(jax.random.key(3)))
    server, theirs = small_of(state.server.params), models(state)
    bank = {"train": jax.device_put(dict(POPULATION.bank))}
    step = jax.jit(algorithm.step)
    for round in (1, 2):
      plan = make_plan(round)
      held, sent = plan.batches["train"], []
      for k, batches in batches_of(held, POPULATION.bank):
        theirs[k], small = train_nested(theirs[k], server, batches, 0.5)
        sent.append((len(LABELS[k]), small))
      total = sum(n for n, _ in sent)
      server = [sum(n * small[i] for n, small in sent) / total for i in (0, 1)]
      state, _ = step(state, plan, bank)
      assert_close(small_of(state.server.params), server, rtol=1e-9, atol=1e-9)
      assert_close(models(state), theirs, rtol=1e-9, atol=1e-9)


NUMBERS = dict(head=HEAD, num_classes=CLASSES, num_features=WIDTH)


@pytest.mark.parametrize("number", [1, CLASSES + 1])
def test_fedgen_has_the_classes_of_the_head(number):
  algorithm = fedgen(CLIENTS, **{**NUMBERS, "num_classes": number})
  with pytest.raises(ValueError, match=f"num_classes={number}: the head's are"):
    run(algorithm, rounds=1)


def test_without_generated_features_fedgen_is_lgfedavg():
  expected, _ = run(lgfedavg(CLIENTS, learning_rate=RATE), rounds=3)
  for weight, same in ((0.0, True), (1.0, False)):
    algorithm = fedgen(CLIENTS, learning_rate=RATE, weight=weight, **NUMBERS)
    first, _ = run(algorithm, rounds=1)
    state, _ = run(algorithm, rounds=3)
    alike = np.allclose(state.server.head.params[0], expected.server.params[0])
    assert alike == same
  # In the first round nobody has a generator.
  only, _ = run(lgfedavg(CLIENTS, learning_rate=RATE), rounds=1)
  assert_close(first.server.head.params, only.server.params)


def fedgen_round(**options):
  """A round of one client with one batch: before, after, its batch, a key."""
  clients = hetfl.ClientPopulation.from_lists(dict(POPULATION.bank), [[0, 1]])
  plan = hetfl.plan_round({"train": clients}, seed=0, round=1, batch_size=2)
  algorithm = fedgen(CLIENTS[:1], learning_rate=RATE, **NUMBERS, **options)
  first = algorithm.init(jax.random.key(1))
  first = first.replace(server=first.server._replace(trained=jnp.ones(())))
  bank = {"train": dict(POPULATION.bank)}
  state, _ = algorithm.step(first, plan, bank)
  index = plan.batches["train"].index[0, 0]
  batch = POPULATION.bank["x"][index], POPULATION.bank["y"][index]
  return first, state, batch, jax.random.fold_in(state.key, 1)


def test_a_client_of_fedgen_learns_from_generated_features():
  first, state, batch, key = fedgen_round(weight=0.5)
  # What it draws in its step 0: see `local.training`.
  key = jax.random.fold_in(jax.random.fold_in(key, 0), 0)
  for _ in range(2):
    key = jax.random.split(key)[1]
  drawn = draw(key, 2, noise=32, num_classes=CLASSES)
  variables = first.server.generator.variables
  made = Generator(128, WIDTH).apply(
    {"params": variables.params, **variables.stats}, drawn["x"]
  )
  params = jax.tree.map(lambda a: a[0], first.clients[0].learner.params)
  *_, head = train([*params["body"], *params["head"]], [batch])
  gap = softmax_gap(made @ params["head"][0], drawn["y"])
  expected = head - RATE * 0.5 * made.T @ gap
  assert_close(state.server.head.params[0], expected)


def test_fedgens_generator_goes_down_its_loss():
  """Adam's first step is the rate, against the sign of the slope."""
  options = dict(server_batch_size=5, noise=2, hidden=3, diversity=0.5)
  first, state, _, key = fedgen_round(
    weight=0.0, server_steps=1, server_learning_rate=1e-3, **options
  )
  (key,) = jax.random.split(jax.random.fold_in(key, np.uint32(2**31)), 1)
  drawn = draw(key, 5, noise=2, num_classes=CLASSES)
  x, y, e = (np.array(drawn[name], float) for name in ("x", "y", "e"))
  head = np.array(state.server.head.params[0], float)

  def loss(params):
    of = lambda layer, name: np.array(params[layer][name], float)
    h = x @ of("Dense_0", "kernel")
    h = (h - h.mean(axis=0)) / np.sqrt(h.var(axis=0) + 1e-5)
    h = h * of("BatchNorm_0", "scale") + of("BatchNorm_0", "bias")
    z = np.maximum(h, 0) @ of("Dense_1", "kernel") + of("Dense_1", "bias")
    scores = z @ head
    labels = scores[np.arange(5), y.astype(int)]
    apart = abs(z[:, None] - z).mean(axis=-1)
    apart = apart * ((e[:, None] - e) ** 2).mean(axis=-1)
    fit = np.mean(np.log(np.exp(scores).sum(axis=1)) - labels)
    return fit + 0.5 * np.exp(-apart.mean())

  before, after = (
    jax.tree.map(lambda a: np.array(a, float), s.server.generator.params)
    for s in (first, state)
  )
  signs = []
  for path, step in jax.tree.leaves_with_path(
    jax.tree.map(lambda a, b: (b - a) / 1e-3, before, after)
  ):
    for i in np.ndindex(step.shape):
      slopes = []
      for nudge in (1e-4, -1e-4):
        params = jax.tree.map(np.copy, before)
        params[path[0].key][path[1].key][i] += nudge
        slopes.append(loss(params))
      slope = (slopes[0] - slopes[1]) / 2e-4
      if abs(slope) > 1e-4:  # Some units are off.
        signs.append((-np.sign(slope), step[i]))
  expected, found = map(np.array, zip(*signs))
  assert len(signs) > 20
  np.testing.assert_allclose(found, expected, rtol=1e-2)


# --- Limits -------------------------------------------------------------------


@functools.cache
def alone(number):
  algorithm = personal(CLIENTS, Method(objective=of_logits), learning_rate=RATE)
  return models_of(run(algorithm, number=number)[0])


@pytest.mark.parametrize("make", [fedproto, fedtgp])
def test_without_weight_each_learns_alone(make):
  options = {**SIZED, "weight": 0.0}
  state, metrics = run(make(CLIENTS, learning_rate=RATE, **options))
  assert_close(models_of(state), alone(4))
  assert float(metrics["distance"].value) > 0
  with pytest.raises(AssertionError):
    assert_close(
      models_of(run(make(CLIENTS, learning_rate=RATE, **SIZED))[0]), alone(4)
    )


def test_the_head_of_one_client_is_its_own():
  only = [hetfl.Client(MODELS[0])] + [
    hetfl.Client(MODELS[0], learning_rate=0.0) for _ in range(4)
  ]
  # All have the first head; the others' do not move.
  state, _ = run(lgfedavg(only, learning_rate=RATE), rounds=1, number=5)
  first = lgfedavg(only).init(jax.random.key(1)).server.params[0]
  ours = state.clients[0].learner.params["head"][0][0]
  share = len(LABELS[0]) / sum(map(len, LABELS))
  assert_close(state.server.params[0], first + share * (ours - first))


def test_a_server_that_does_not_train_keeps_the_first_head():
  algorithm = fedgh(
    CLIENTS, head=HEAD, learning_rate=RATE, server_learning_rate=0.0
  )
  first = algorithm.init(jax.random.key(1)).server
  state, _ = run(algorithm)
  assert_close(state.server, first)
  of_client = state.clients[0].learner.variables
  with pytest.raises(AssertionError):
    assert_close(parted(of_client)["head"].params[0][0], first.params[0])


@pytest.mark.parametrize("make", [fedproto, fedtgp])
@pytest.mark.parametrize("number", [1, WIDTH + 1])
def test_features_are_as_many_as_prototypes_have(make, number):
  algorithm = make(CLIENTS, num_classes=CLASSES, num_features=number)
  with pytest.raises(ValueError, match=f"num_features={number}: a client has"):
    run(algorithm, rounds=1)


@pytest.mark.parametrize(
  "make", [fedgen, fedgh, fedgkt, fedmrl, lgfedavg, fedproto]
)
def test_models_need_a_head_of_their_own(make):
  more = {
    fedgen: NUMBERS,
    fedgh: dict(head=HEAD),
    fedgkt: GKT,
    fedproto: dict(num_classes=CLASSES, num_features=WIDTH),
  }
  made_by = "fedmrl.matryoshka" if make is fedmrl else "features.headed"
  with pytest.raises(ValueError, match=f"make .* by {made_by}"):
    clients = [hetfl.Client(matrices(4, CLASSES))] * 5
    run(make(clients, **more.get(make, {})), rounds=1)


def test_fedgkt_has_one_bank_of_a_known_size():
  few = fedgkt(CLIENTS, **GKT | {"num_examples": 9})
  match = (
    "the server has 'server_logits' of 9 examples, but bank 'train' has 19"
  )
  with pytest.raises(ValueError, match=match):
    run(few, rounds=1)
  clients = [*CLIENTS[:4], hetfl.Client(MODELS[0], bank="other")]
  match = r"clients: have banks \['other', 'train'\]; the method takes one"
  with pytest.raises(ValueError, match=match):
    fedgkt(clients, **GKT)
  wide = headed(matrices(4, 7), matrices(7, CLASSES))
  clients = [*CLIENTS[:4], hetfl.Client(wide)]
  with pytest.raises(ValueError, match=r"messages of clients .*, 3, 7\)"):
    run(fedgkt(clients, **GKT), rounds=1, number=5)


def test_heads_must_be_alike():
  wide = headed(matrices(4, 7), matrices(7, CLASSES))
  clients = [hetfl.Client(MODELS[0]), hetfl.Client(wide)]
  for make in (lgfedavg, functools.partial(fedgh, head=HEAD)):
    with pytest.raises(ValueError, match=r"the head of client 1 .*\(7, 3\)"):
      make(clients).init(jax.random.key(0))


def test_an_epoch_of_the_server_sees_each_example_once():
  mask = np.array([1, 0, 1, 1, 0, 1, 1], np.float32)

  def counted(variables, batch, key, context):
    seen = jnp.sum(
      jax.nn.one_hot(batch["x"], 7) * batch["mask"][:, None], axis=0
    )
    stats = {
      "seen": variables.stats["seen"] + seen,
      "steps": variables.stats["steps"] + 1,
      "last": batch["x"][0],
    }
    return variables.params * batch["mask"], stats, {}

  def trained(seed):
    zeros = {"seen": jnp.zeros(7), "steps": 0, "last": 0}
    return train_server(
      counted,
      core.Variables(0.0, zeros),
      {"x": jnp.arange(7), "mask": jnp.asarray(mask)},
      jax.random.key(seed),
      {"server_learning_rate": 1.0},
      epochs=4,
      batch_size=2,
    )

  each = [trained(seed) for seed in range(9)]
  for variables in each:
    assert variables.stats["seen"].tolist() == (4 * mask).tolist()
    assert variables.stats["steps"] == 4 * 3
    assert variables.params == -4 * 3
  assert len({int(variables.stats["last"]) for variables in each}) > 1


def test_nearest_by_hand():
  server = core.Mean(
    jnp.array([[2.0, 0.0], [3.0, 3.0], [0.0, 0.0]]), jnp.array([2.0, 1.0, 0.0])
  )
  features = jnp.array([[1.0, 2.0], [3.0, 2.0]])
  scores = nearest(Features(features, None), server)
  # (0 + 4) / 2 and (4 + 1) / 2; (4 + 4) / 2 and (0 + 1) / 2.
  assert scores.tolist() == [[-2.0, -2.5, -np.inf], [-4.0, -0.5, -np.inf]]
  nobody = server._replace(count=jnp.zeros(3))
  assert nearest(Features(features, None), nobody).tolist() == [[0.0] * 3] * 2


def test_with_parts_replaces_parameters_and_statistics():
  of = lambda w: core.Variables(w, {"mean": -w})
  whole = joined({"body": of(1.0), "head": of(2.0)})
  expected = joined({"body": of(1.0), "head": of(3.0)})
  assert with_parts(whole, head=of(3.0)) == expected


def test_prototypes_are_of_the_images_that_were_trained_on():
  """The loss is the sum of an image's features, which a rate of 0 keeps."""

  def noisy(key, batch):
    noise = jax.random.normal(key, batch["x"].shape)
    return {**batch, "x": batch["x"] + noise}

  ones = matrices(WIDTH, 1)._replace(
    init=lambda key: core.Variables([jnp.ones((WIDTH, 1))], {})
  )
  client = hetfl.Client(
    headed(matrices(4, WIDTH), ones),
    learning_rate=0.0,
    transform=noisy,
    loss=lambda logits, batch: logits[:, 0],
  )
  algorithm = fedproto(
    [client] * 5, num_classes=CLASSES, num_features=WIDTH, weight=0.0
  )
  plan = hetfl.plan_round({"train": POPULATION}, seed=9, round=1, batch_size=1)
  state, metrics = algorithm.step(
    algorithm.init(jax.random.key(1)), plan, {"train": POPULATION.bank}
  )
  assert_close(jnp.sum(state.server.total), metrics["loss"].total)
