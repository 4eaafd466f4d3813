"""FD, SCAFFOLD, Ditto, FedKD and HeteroFL against oracles, and their limits."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetfl import Client, core, fedavg, local_model, Pool
from hetfl.algorithms.ditto import ditto
from hetfl.algorithms.fd import fd
from hetfl.algorithms.fedkd import fedkd
from hetfl.algorithms.heterofl import filled, heterofl
from hetfl.algorithms.personal import personal
from hetfl.algorithms.scaffold import scaffold
from hetfl.clients import on_host
from hetfl.models import families
from hetfl.optimizers import fedavg_server
from tests import federation
from tests.algorithms import (
  MLP,
  model,
  mutual_data,
  mutual_plan,
  POPULATION,
  SIZES,
  WIDE,
)
from tests.federation import CLASSES, Cnn, double, Mlp, plain
from tests.oracles import codist
from tests.oracles.codist import tree_map

RATE, ROUNDS = 0.125, 4
ALIKE = [Client(MLP)] * 5
UNLIKE = [Client(m) for m in (MLP, WIDE, MLP, MLP, WIDE)]
assert_close = functools.partial(
  chex.assert_trees_all_close, rtol=2e-4, atol=2e-6
)
assert_exact = functools.partial(
  chex.assert_trees_all_close, rtol=1e-6, atol=1e-9
)


def make_plan(round, number=3, **settings):
  """A round of some of the five clients."""
  settings = dict(uniform_weights=False) | settings
  return mutual_plan(round, clients_per_round=number, **settings)


def rounds_of(algorithm, start=None, rounds=ROUNDS, **settings):
  """Each round's plan, the state after it and its metrics."""
  step = jax.jit(algorithm.step)
  state = algorithm.init(jax.random.key(3)) if start is None else start
  for round in range(1, rounds + 1):
    plan = make_plan(round, **settings)
    state, metrics = step(state, plan, mutual_data())
    yield plan, state, metrics


def last(algorithm, *args, **settings):
  *_, (_, state, metrics) = rounds_of(algorithm, *args, **settings)
  return state, metrics


def models_of(state):
  return [plain(local_model(state, k).params) for k in range(5)]


def batches_of(plan):
  """The batches of each client that takes part, by its number."""
  held = plan.batches["train"]
  return dict(federation.batches_of(held, POPULATION.bank))


def descend(w, x, dz, more=None):
  """`w - RATE (g + more)`, given the loss's gradient for the logits."""
  _, tape = codist.forward(w, x)
  g = codist.backward(w, tape, dz)
  if more is not None:
    g = tree_map(np.add, g, more)
  return tree_map(lambda w, g: w - RATE * g, w, g)


def merged(models):
  """FedAvg's mean of models by client."""
  total = sum(SIZES[k] for k in models)
  mean = lambda *w: sum(SIZES[k] / total * x for k, x in zip(models, w))
  return tree_map(mean, *models.values())


# --- Federated distillation ---------------------------------------------------


def fd_round(models, batches, sent, gamma):
  """Algorithm 1; `sent` holds the last round's means by client and class."""
  new = {}
  for k, of_client in batches.items():
    target = np.zeros((CLASSES, CLASSES))
    for j in range(CLASSES):
      others = [f[j] for i, f in sent.items() if i != k and j in f]
      if others:
        target[j] = np.mean(others, axis=0)
    seen = {}
    for x, y in of_client:
      p = codist.softmax(codist.logits(models[k], x))
      for row, j in zip(p, y):
        seen.setdefault(int(j), []).append(row)
      label = p - np.eye(CLASSES)[y]
      pull = p * target[y].sum(1, keepdims=True) - target[y]
      models[k] = descend(models[k], x, (label + gamma * pull) / len(y))
    new[k] = {j: np.mean(rows, axis=0) for j, rows in seen.items()}
  return models, new


# Of those that are alike, who is absent from a round keeps what it last sent.
@pytest.mark.parametrize("clients", [ALIKE, UNLIKE], ids=["alike", "unlike"])
def test_fd_is_the_oracles(clients):
  with jax.enable_x64(True):
    algorithm = fd(clients, num_classes=CLASSES, weight=0.5, learning_rate=RATE)
    start = double(algorithm.init(jax.random.key(3)))
    models, sent, lacking = models_of(start), {}, 0
    for plan, state, _ in rounds_of(algorithm, start):
      models, sent = fd_round(models, batches_of(plan), sent, 0.5)
      assert_exact(models_of(state), models)
      lacking += sum(len(means) < CLASSES for means in sent.values())
      for j in range(CLASSES):
        rows = [means[j] for means in sent.values() if j in means]
        assert_exact(np.asarray(state.server.means.total[j]), sum(rows))
        assert state.server.means.count[j] == len(rows)
    assert lacking


def test_fd_that_hears_nobody_learns_alone():
  options = dict(learning_rate=RATE)
  alone, _ = last(personal(UNLIKE, **options))
  deaf, _ = last(fd(UNLIKE, num_classes=CLASSES, weight=0.0, **options))
  assert_close(models_of(deaf), models_of(alone))
  heard, _ = last(fd(UNLIKE, num_classes=CLASSES, **options))
  with pytest.raises(AssertionError):
    assert_close(models_of(heard), models_of(alone))


def test_fd_needs_as_many_logits_as_classes():
  with pytest.raises(ValueError, match="need the same classes"):
    last(fd(UNLIKE, num_classes=CLASSES + 1))


# --- SCAFFOLD -----------------------------------------------------------------


def scaffold_round(server, control, own, batches, server_lr):
  """Algorithm 1 with option II."""
  models, changes = {}, []
  for k, of_client in batches.items():
    w, length = server, len(of_client) * RATE
    correction = tree_map(np.subtract, control, own[k])
    for x, y in of_client:
      _, dz = codist.cross_entropy(codist.logits(w, x), y)
      w = descend(w, x, dz, correction)
    moved = tree_map(lambda a, b, by=length: (a - b) / by, server, w)
    new = tree_map(lambda a, c, m: a - c + m, own[k], control, moved)
    changes.append(tree_map(np.subtract, new, own[k]))
    models[k], own[k] = w, new
  mean = lambda trees: tree_map(lambda *x: sum(x) / len(x), *trees)
  step = lambda w, x: w + server_lr * (x - w)
  server = tree_map(step, server, mean(models.values()))
  # |S| / N mean_S (c_k+ - c_k), of which N is 5.
  scale = len(changes) / 5
  control = tree_map(lambda c, d: c + scale * d, control, mean(changes))
  return server, control, own


def test_scaffold_is_the_oracles():
  with jax.enable_x64(True):
    algorithm = scaffold(ALIKE, server_lr=0.5, learning_rate=RATE)
    start = double(algorithm.init(jax.random.key(3)))
    server = plain(start.server.model.params)
    control = tree_map(np.zeros_like, server)
    own = [control] * 5
    for plan, state, _ in rounds_of(algorithm, start):
      server, control, own = scaffold_round(
        server, control, own, batches_of(plan), 0.5
      )
      assert_exact(plain(state.server.model.params), server)
      assert_exact(plain(state.server.control), control)
      (group,) = state.clients
      assert_exact(
        plain(group.extra), jax.tree.map(lambda *a: np.stack(a), *own)
      )


def as_fedavg(variables, rounds, optimizer=optax.sgd, **settings):
  """FedAvg's model and loss, from a given start."""
  pool = Pool(
    MLP,
    "train",
    learning_rate=RATE,
    optimizer=optimizer,
    server_lr=1.0,
    server_optimizer=fedavg_server,
  )
  algorithm = fedavg([pool], rounds=None)
  state = algorithm.init(jax.random.key(3), [variables])
  state, metrics = last(algorithm, state, rounds, **settings)
  return state.server[0].params, metrics["train/client_loss"]


def test_scaffold_begins_as_fedavg_and_then_differs():
  algorithm = scaffold(ALIKE, learning_rate=RATE)
  start = algorithm.init(jax.random.key(3)).server.model
  for rounds in (1, 2):
    state, metrics = last(algorithm, rounds=rounds)
    expected, loss = as_fedavg(start, rounds, uniform_weights=True)
    if rounds == 1:  # Whatever the clients' weights in its own plan.
      assert_close(state.server.model.params, expected)
      assert_close(metrics["loss"], loss)  # It holds no correction.
  with pytest.raises(AssertionError):
    assert_close(state.server.model.params, expected)


def test_scaffold_at_rate_zero_learns_nothing():
  algorithm = scaffold(ALIKE, learning_rate=lambda round: 0.125 * (round < 2))
  (_, once, _), (_, twice, _) = rounds_of(algorithm, rounds=2)
  chex.assert_trees_all_equal(once.server.control, twice.server.control)
  chex.assert_tree_all_finite(twice.server)
  assert_close(once.server.model.params, twice.server.model.params)


def test_one_model_and_one_rate():
  with pytest.raises(ValueError, match="'b': its model is not the first"):
    scaffold([Client(MLP), Client(WIDE, "b")])
  with pytest.raises(ValueError, match="'b': has a learning rate or an optim"):
    scaffold([Client(MLP), Client(MLP, "b", learning_rate=0.1)])
  with pytest.raises(ValueError, match="optimizer: .* plain SGD; leave it out"):
    scaffold([Client(MLP)], learning_rate=0.1, optimizer=optax.adam)


# --- Ditto --------------------------------------------------------------------


def ditto_round(server, own, batches, weight):
  """Algorithm 1, whose personal models take steps on the same batches."""
  models = {}
  for k, of_client in batches.items():
    w = server
    for x, y in of_client:
      _, dz = codist.cross_entropy(codist.logits(w, x), y)
      w = descend(w, x, dz)
      _, dz = codist.cross_entropy(codist.logits(own[k], x), y)
      near = tree_map(lambda v, w: weight * (v - w), own[k], server)
      own[k] = descend(own[k], x, dz, near)
    models[k] = w
  return merged(models), own


def test_ditto_is_the_oracles():
  with jax.enable_x64(True):
    algorithm = ditto(ALIKE, weight=0.5, learning_rate=RATE)
    start = double(algorithm.init(jax.random.key(3)))
    server, own = plain(start.server.params), models_of(start)
    for plan, state, _ in rounds_of(algorithm, start):
      server, own = ditto_round(server, own, batches_of(plan), 0.5)
      assert_exact(plain(state.server.params), server)
      assert_exact(models_of(state), own)


def test_dittos_server_is_fedavgs_and_its_clients_may_learn_alone():
  size = lambda w: optax.tree.norm(w, squared=True)
  clients = [Client(MLP, optimizer=optax.adam, penalty=size)] * 5
  options = dict(learning_rate=RATE)
  algorithm = ditto(clients, weight=0.0, **options)
  start = algorithm.init(jax.random.key(3))
  state, metrics = last(algorithm, start)
  expected, _ = as_fedavg(start.server, ROUNDS)
  assert_close(state.server.params, expected)
  assert float(metrics["own_loss"].count) == sum(
    len(y)
    for batches in batches_of(make_plan(ROUNDS)).values()
    for _, y in batches
  )
  alone = personal(clients, **options)
  alone, _ = last(alone, alone.init(start.key).replace(clients=start.clients))
  assert_close(state.clients, alone.clients)


# --- FedKD --------------------------------------------------------------------


def cut_off(update, energy):
  """The fewest singular vectors with more than a share of the energy."""

  def leaf(a):
    if a.ndim == 1:
      return a
    left, values, right = np.linalg.svd(a, full_matrices=False)
    share = np.cumsum(values**2) / np.sum(values**2)
    r = 1 + np.argmax(share > energy)
    return left[:, :r] * values[:r] @ right[:r]

  return tree_map(leaf, update)


def fedkd_round(server, mentors, batches, energy):
  """Mutual distillation, and updates sent by their singular vectors."""
  updates = {}
  for k, of_client in batches.items():
    mentee = server
    for x, y in of_client:
      own, shared = codist.logits(mentors[k], x), codist.logits(mentee, x)
      own_ce, own_dz = codist.cross_entropy(own, y)
      shared_ce, shared_dz = codist.cross_entropy(shared, y)
      _, own_pull = codist.kl(codist.softmax(shared), own)
      _, shared_pull = codist.kl(codist.softmax(own), shared)
      both = own_ce + shared_ce
      mentors[k] = descend(mentors[k], x, own_dz + own_pull / both)
      mentee = descend(mentee, x, shared_dz + shared_pull / both)
    updates[k] = cut_off(tree_map(np.subtract, mentee, server), energy)
  update = cut_off(merged(updates), energy)
  return tree_map(np.add, server, update), mentors


def test_fedkd_is_the_oracles():
  with jax.enable_x64(True):
    algorithm = fedkd(
      UNLIKE,
      mentee=MLP,
      energy=lambda round: 0.5 + 0.1 * round,
      learning_rate=RATE,
    )
    start = double(algorithm.init(jax.random.key(3)))
    server, mentors = plain(start.server.params), models_of(start)
    rounds = enumerate(rounds_of(algorithm, start), 1)
    for round, (plan, state, _) in rounds:
      server, mentors = fedkd_round(
        server, mentors, batches_of(plan), 0.5 + 0.1 * round
      )
      assert_exact(plain(state.server.params), server)
      assert_exact(models_of(state), mentors)


# --- HeteroFL -----------------------------------------------------------------

WIDTHS = (5, 7, 5, 5, 7)  # Of UNLIKE.
WIDEST = model(Mlp(9))
LABELS = [POPULATION.client(k)["y"] for k in range(5)]
HAVE = np.array([np.isin(np.arange(CLASSES), y) for y in LABELS])
MASKED = dict(classes=HAVE, output="Dense_1", global_model=WIDEST)


def heterofl_round(server, batches, have):
  """Entry by entry, over the clients that hold it."""
  total = tree_map(np.zeros_like, server)
  count = tree_map(np.zeros_like, server)
  for k, of_client in batches.items():
    n = WIDTHS[k]
    part = {
      "Dense_0": {"kernel": np.s_[:, :n], "bias": np.s_[:n]},
      "Dense_1": {"kernel": np.s_[:n, have[k]], "bias": np.s_[have[k]]},
    }
    first, second = server["Dense_0"], server["Dense_1"]
    w = {
      "Dense_0": {name: a[..., :n] for name, a in first.items()},
      "Dense_1": second | {"kernel": second["kernel"][:n]},
    }
    for x, y in of_client:
      z = np.where(have[k], codist.logits(w, x), 0)
      w = descend(w, x, codist.cross_entropy(z, y)[1] * have[k])
    for layer, arrays in part.items():
      for name, at in arrays.items():
        own = w[layer][name]
        held = own[..., have[k]] if layer == "Dense_1" else own
        total[layer][name][at] += SIZES[k] * held
        count[layer][name][at] += SIZES[k]
  mean = lambda old, a, n: np.where(n > 0, a / np.maximum(n, 1), old)
  return tree_map(mean, server, total, count)


@pytest.mark.parametrize("make, more", [(ditto, {}), (heterofl, MASKED)])
def test_what_clients_keep_may_stay_on_the_host(make, more):
  clients = UNLIKE if more else ALIKE
  algorithm = make(clients, learning_rate=RATE, **more)
  hosted = on_host(algorithm, clients)
  state = hosted.init(jax.random.key(3))
  for plan, expected, _ in rounds_of(algorithm):
    state, _ = hosted.step(state, plan, mutual_data())
    assert_close(state.replace(key=None), expected.replace(key=None))


@pytest.mark.parametrize("masked", [False, True])
def test_heterofl_is_the_oracles(masked):
  have = HAVE if masked else np.ones_like(HAVE)
  options = dict(classes=HAVE, output="Dense_1") if masked else {}
  with jax.enable_x64(True):
    algorithm = heterofl(
      UNLIKE, global_model=WIDEST, learning_rate=RATE, **options
    )
    start = double(algorithm.init(jax.random.key(3)))
    first = server = plain(start.server.params)
    for plan, state, _ in rounds_of(algorithm, start):
      server = heterofl_round(server, batches_of(plan), have)
      assert_exact(plain(state.server.params), server)
  assert not HAVE.all()
  for get in (
    lambda w: w["Dense_0"]["kernel"][:, 7:],
    lambda w: w["Dense_1"]["kernel"][7:],
  ):  # Nobody holds these.
    np.testing.assert_array_equal(get(server), get(first))


@pytest.mark.parametrize("make", [ditto, heterofl])
def test_an_optimizer_that_holds_parameters_begins_with_the_servers(make):
  """At a rate of 0 nothing moves, also where a state, not the rate, says so."""
  averaging = lambda rate: optax.contrib.schedule_free(optax.sgd(rate), 1.0)
  more = dict(weight=0.0) if make is ditto else dict(global_model=MLP)
  algorithm = make(ALIKE, learning_rate=0.0, optimizer=averaging, **more)
  start = algorithm.init(jax.random.key(3))
  for _, state, _ in rounds_of(algorithm, start):
    assert_exact(state.server, start.server)
    if make is ditto:
      assert_exact(*(s.clients[0].learner.params for s in (state, start)))


def test_heterofls_clients_keep_their_types():
  half = lambda key: jax.tree.map(jnp.bfloat16, MLP.init(key))
  narrow = MLP._replace(init=half)
  algorithm = heterofl([Client(narrow)] * 5, global_model=MLP)
  state = jax.eval_shape(algorithm.init, jax.random.key(0))
  step = algorithm.step, state, make_plan(1), mutual_data()
  chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(*step)[0], state)


def test_heterofl_of_one_width_is_fedavg():
  optimizer = functools.partial(optax.sgd, momentum=0.9)
  algorithm = heterofl(
    ALIKE, global_model=MLP, learning_rate=RATE, optimizer=optimizer
  )
  start = algorithm.init(jax.random.key(3))
  state, metrics = last(algorithm, start)
  expected, loss = as_fedavg(start.server, ROUNDS, optimizer)
  assert_close(state.server.params, expected)
  assert_close(metrics["loss"], loss)


def test_narrow_resnets_are_leading_parts():
  """Among zeros they compute the same: groups are of the same channels."""
  x = jax.random.normal(jax.random.key(0), (2, 8, 8, 1))
  of = lambda width: core.Model.from_flax(
    families.body("resnet", 5, x.shape[1:], width=width), x
  )
  whole, narrow = of(1.0), of(0.25)
  part = jax.jit(narrow.init)(jax.random.key(1))
  among = filled(part, jax.eval_shape(whole.init, jax.random.key(1)))
  found = jax.jit(whole.predict)(among, x)
  assert_close(found, jax.jit(narrow.predict)(part, x))
  assert jnp.ptp(found) > 0.1


def test_heterofl_takes_leading_parts_only():
  def init(clients=UNLIKE, global_model=WIDEST, **options):
    algorithm = heterofl(clients, global_model=global_model, **options)
    return last(algorithm, rounds=1)

  for options, message in (
    (dict(global_model=MLP), "a client: its model beside the global one"),
    (dict(global_model=model(Cnn())), "beside the global one"),
    (dict(output="Dense_1"), "output='Dense_1': give classes too"),
    (dict(classes=HAVE, output="head"), "output='head': the models' layers"),
    (dict(classes=HAVE[:4]), r"classes: of shape \(4, 3\)"),
    (dict(classes=HAVE[:, :2]), "classes: 2 for each client"),
  ):
    with pytest.raises(ValueError, match=message):
      init(**options)
