"""Federated Mutual Learning against its oracle, and its limits."""

import dataclasses
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetfl import (
  Client,
  core,
  engine,
  fedavg,
  fml,
  local_model,
  meme_model,
  plan_round,
  Pool,
  Subset,
)
from hetfl.algorithms.fml import mutual_loss
from hetfl.clients import group_clients, on_host
from hetfl.models import layers, vision
from hetfl.optimizers import fedavg_server, momentum_sgd
from hetfl.run import checkpoint
from tests import federation
from tests.algorithms import (
  CNN,
  HEAD,
  MLP,
  model,
  mutual_data,
  mutual_plan,
  noisy,
  POPULATION,
  SIZES,
  WIDE,
)
from tests.federation import batches_of, double, jitted, plain
from tests.oracles import codist
from tests.oracles import fml as oracle

ROUNDS = 3
# The same numbers in another order of addition, in float32.
TOLERANCE = dict(rtol=2e-4, atol=2e-6)
assert_close = functools.partial(chex.assert_trees_all_close, **TOLERANCE)
assert_equal = chex.assert_trees_all_equal

TRUNK = model(vision.CNN((2, 3), 3, (), None))


class Stage(nn.Module):
  """The number `index` of TRUNK's convolutions; flattens after the second."""

  index: int

  @nn.compact
  def __call__(self, x):
    name, channels = f"Conv_{self.index}", (2, 3)[self.index]
    x = nn.relu(layers.Conv(channels, (3, 3), pool=True, name=name)(x))
    return x.reshape(len(x), -1) if self.index else x


def clients_with(models=(MLP, WIDE, MLP, MLP, WIDE), **settings):
  return [Client(m, **settings) for m in models]


FIRST = model(Stage(0))
MIDDLE = core.Model.from_flax(Stage(1), np.zeros((1, 2, 2, 2)))
ALIKE, UNLIKE = clients_with([MLP] * 5), clients_with()
ENCODED = clients_with(encoder=TRUNK)


def run(algorithm, rounds=ROUNDS, *, state=None, first=1, **settings):
  state = algorithm.init(jax.random.key(0)) if state is None else state
  for round in range(first, first + rounds):
    state, metrics = algorithm.step(
      state, mutual_plan(round, **settings), mutual_data()
    )
  return state, metrics


def build(clients=UNLIKE, runner=None, jit=True, **settings):
  options = dict(global_model=MLP, alpha=0.75, beta=0.25, learning_rate=0.125)
  algorithm = fml(clients, **{**options, **settings}, engine=runner)
  return jitted(algorithm) if jit else algorithm


# --- The paper's update -----------------------------------------------------

CASES = {
  "alike": dict(clients=ALIKE, global_model=MLP),
  "unlike": dict(clients=UNLIKE, global_model=CNN),
  "microbatch": dict(clients=clients_with(microbatch=2)),
  "first part": dict(clients=clients_with(adaptor=HEAD), global_model=TRUNK),
  "last part": dict(clients=ENCODED, global_model=HEAD),
  "middle": dict(
    clients=clients_with(adaptor=HEAD, encoder=FIRST), global_model=MIDDLE
  ),
  "tempered": dict(clients=UNLIKE, temperature=2.0),
  "sequential": dict(clients=UNLIKE, sequential=True),
}


def own_layers(state, client):
  """The layers of a client's meme that are not the global model's."""
  parts = dict(meme_model(state, client).params)
  if parts.pop("trunk", None) is None:
    return {}
  return {n: p for part in parts.values() for n, p in layered(part).items()}


def layered(params):
  """Parameters by layer; a model that is one dense layer has no names."""
  params = plain(params)
  return {"Dense_0": params} if "kernel" in params else params


@pytest.mark.parametrize("name", CASES)
def test_rounds_are_the_oracles(name):
  case = CASES[name]
  clients, weighted = case["clients"], name == "unlike"
  with jax.enable_x64(True):
    algorithm = build(**case)
    state = double(algorithm.init(jax.random.key(3)))
    server = layered(state.server.params)
    theirs = []
    for k in range(len(clients)):
      local = plain(local_model(state, k).params)
      zeros = codist.tree_map(np.zeros_like, local)
      theirs.append(oracle.Client(local, zeros, (), own_layers(state, k)))
    settings = oracle.Settings(
      0.75,
      0.25,
      0.125,
      temperature=case.get("temperature", 1.0),
      sequential=case.get("sequential", False),
    )
    for round in range(1, ROUNDS + 1):
      plan = mutual_plan(round, uniform_weights=not weighted)
      state, metrics = algorithm.step(state, plan, mutual_data())
      held = plan.batches["train"]
      each = batches_of(held, POPULATION.bank)
      for client, (k, client.batches) in zip(theirs, each):
        client.weight = SIZES[k] if weighted else 1.0
      server, theirs = oracle.fml_round(server, theirs, settings)
      tolerance = dict(rtol=1e-6, atol=1e-8)
      assert_close(layered(state.server.params), server, **tolerance)
      for k, client in enumerate(theirs):
        assert_close(
          plain(local_model(state, k).params), client.local, **tolerance
        )
        assert_close(own_layers(state, k), client.own, **tolerance)
      # The local model's momentum persists.
      for group in state.clients:
        trace = optax.tree.get(group.learner.opt_state, "trace")
        for row, k in enumerate(group.clients):
          ours = jax.tree.map(lambda a, row=row: np.asarray(a[row]), trace)
          assert_close(ours, theirs[k].velocity, **tolerance)
  # Two epochs, each example once an epoch.
  assert float(metrics["meme_loss"].count) == 2 * sum(SIZES)


def test_losses_by_hand():
  # p = (3/4, 1/4), q = (1/2, 1/2), label 0.
  z, w = jnp.log(jnp.array([[0.75, 0.25]])), jnp.zeros((1, 2))
  # KL(q || p) = 1/2 log(2/3) + 1/2 log 2 = 0.1438410
  loss, kl = mutual_loss(z, w, -jnp.log(jnp.array([0.75])), weight=0.25)
  np.testing.assert_allclose(kl, [0.1438410], rtol=1e-5)
  np.testing.assert_allclose(loss, [0.25 * 0.2876821 + 0.75 * 0.1438410])
  # KL(p || q) = 3/4 log(3/2) + 1/4 log(1/2) = 0.1308120
  _, kl = mutual_loss(w, z, jnp.zeros(1), weight=0.25)
  np.testing.assert_allclose(kl, [0.1308120], rtol=1e-5)
  # Nothing is learnt through the partner.
  grad = jax.grad(
    lambda w: mutual_loss(z, core.fixed(w), jnp.zeros(1), weight=0.5)[0].sum()
  )
  assert not np.asarray(grad(w)).any()


def test_a_partner_that_is_not_heard_may_be_anything():
  z, lost = jnp.zeros((2, 3)), jnp.full((2, 3), jnp.nan)
  labels = lambda z: -jax.nn.log_softmax(z)[:, 0]
  total = lambda z, w: mutual_loss(z, lost, labels(z), weight=w)[0].sum()
  assert_close(
    jax.value_and_grad(total)(z, 1.0),
    jax.value_and_grad(lambda z: labels(z).sum())(z),
  )
  assert np.isnan(total(z, 0.9))


def test_clipping_comes_before_weight_decay():
  sgd = momentum_sgd(1.0, weight_decay=0.5, clip_norm=1.0)
  w, g = jnp.array([2.0, 0.0]), jnp.array([3.0, 4.0])
  # -(0.6 + 0.5 * 2), -(0.8 + 0)
  np.testing.assert_allclose(sgd.update(g, sgd.init(w), w)[0], [-1.6, -0.8])


# --- Its limits -------------------------------------------------------------


def test_with_beta_one_the_global_model_is_fedavgs():
  """Another program, the same plans and keys: FedAvg's own."""
  clients = clients_with(transform=noisy)
  state, _ = run(build(clients, beta=1.0))
  pool = Pool(
    MLP,
    "train",
    learning_rate=0.125,
    server_lr=1.0,
    transform=noisy,
    optimizer=momentum_sgd,
    server_optimizer=fedavg_server,
  )
  algorithm = fedavg([pool], rounds=None)
  expected, _ = run(jitted(algorithm))
  assert_close(state.server.params, expected.server[0].params)
  # And it is not FedAvg's otherwise.
  other, _ = run(build(clients, beta=0.5))
  with pytest.raises(AssertionError):
    assert_close(other.server.params, expected.server[0].params)


def test_with_alpha_one_clients_learn_alone():
  clients = clients_with(transform=noisy)
  mutual, _ = run(build(clients, alpha=1.0))
  alone = fml(clients, global_model=None, learning_rate=0.125)
  state, metrics = run(jitted(alone))
  assert state.server is None
  assert set(metrics) == {"local_loss", "local_kl"}
  assert_close(mutual.clients, state.clients)
  other, _ = run(build(clients, alpha=0.5))
  with pytest.raises(AssertionError):
    assert_close(other.clients, state.clients)


@pytest.mark.parametrize("sequential", [False, True])
def test_a_penalty_is_the_local_models(sequential):
  size = lambda w: optax.tree.norm(w, squared=True)
  models, both = [], dict(alpha=1.0, beta=1.0, sequential=sequential)
  for l2 in (0, 1):
    clients = clients_with([MLP] * 5, penalty=size, l2=l2)
    models.append(run(build(clients, **both), rounds=1)[0])
  plain, pulled = models
  assert_close(plain.server, pulled.server)
  for k in range(5):
    assert size(local_model(pulled, k).params) < size(
      local_model(plain, k).params
    )


def test_clients_that_are_not_there_are_refused():
  with pytest.raises(ValueError, match="are of client 4, but there are 3"):
    run(build(clients_with([MLP] * 3), jit=False), rounds=1)


class Recording(engine.Inline):
  """Remembers the results of the clients' programs."""

  def run(self, *works):
    self.results = super().run(*works)
    return self.results


def test_no_example_reaches_another_client_in_a_round():
  """One client's bank is poisoned: only its own upload changes."""
  runner = Recording()
  algorithm = build(UNLIKE, runner, jit=False)
  state = algorithm.init(jax.random.key(0))
  uploads = []
  for poison in (0.0, 1e3):
    data = mutual_data()
    bad = POPULATION.positions(2)
    data["train"]["x"] = data["train"]["x"].at[bad].add(poison)
    after, _ = algorithm.step(state, mutual_plan(1), data)
    uploads.append(
      {
        k: (
          jax.tree.map(lambda a, row=row: np.asarray(a[row]), memes),
          local_model(after, k),
        )
        for group, (_, memes, _) in zip(after.clients, runner.results)
        for row, k in enumerate(group.clients)
      }
    )
  clean, poisoned = uploads
  for k in range(len(SIZES)):
    if k != 2:
      assert_equal(clean[k], poisoned[k])
      continue
    for before, now in zip(clean[k], poisoned[k]):
      assert not np.allclose(*(jax.tree.leaves(t)[0] for t in (before, now)))


def test_clients_start_unlike_and_persist():
  state = build(ALIKE).init(jax.random.key(0))
  models = [local_model(state, k) for k in range(5)] + [state.server]
  first = [np.asarray(jax.tree.leaves(m)[1]) for m in models]
  for i in range(6):
    for j in range(i):
      assert not np.allclose(first[i], first[j])


# --- Options ----------------------------------------------------------------


def test_schedules_are_functions_of_the_round():
  falling = build(
    alpha=lambda t: 1 - 0.25 * t,
    beta=lambda t: 0.25 * t,
    learning_rate=lambda t: 0.125 / t,
    temperature=lambda t: 1.0 + t,
  )
  state, _ = run(falling, 2)
  assert not state.hyper
  expected = None
  for t in (1, 2):
    constant = build(
      alpha=1 - 0.25 * t,
      beta=0.25 * t,
      learning_rate=0.125 / t,
      temperature=1.0 + t,
    )
    start = constant.init(jax.random.key(0))
    if expected is not None:
      start = expected.replace(hyper=start.hyper)
    expected, _ = run(constant, 1, state=start, first=t)
  # Two programs, of which one computes the values: to rounding.
  assert_close(state.server, expected.server, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("microbatch,parts", [(None, 1), (1, 2)])
def test_no_draw_is_made_twice(microbatch, parts):
  """Not by the two models, in two steps of some parts, or in two rounds."""
  recorder = federation.recorder(2 * 2 * parts)
  client = Client(recorder, transform=noisy, microbatch=microbatch)
  algorithm = fml([client], global_model=recorder)
  state, step = algorithm.init(jax.random.key(0)), jax.jit(algorithm.step)
  bank = federation.recorders_bank(4)
  for t in (1, 2):
    plan = mutual_plan(t, Subset.whole(bank), batch_size=2, epochs=1)
    state, _ = step(state, plan, {"train": bank})
  local, server = local_model(state, 0).stats, state.server.stats
  draws = np.array([local["draws"], server["draws"]])
  assert draws.all() and len(np.unique(draws)) == draws.size
  # Both see the same images; no key serves both for these and in a model.
  np.testing.assert_array_equal(local["seen"], server["seen"])
  assert len(np.unique(local["seen"])) == 2 * 2 * parts
  assert not np.isin(draws.round(5), (local["seen"] - 1).round(5)).any()


def test_clients_may_start_from_the_global_model():
  """Clients of its architecture do; the others keep their own random draws."""
  own, same = (
    build(from_global=f, jit=False).init(jax.random.key(0))
    for f in (False, True)
  )
  assert_equal(own.server, same.server)
  for k, client in enumerate(UNLIKE):
    start = same.server if client.model == MLP else local_model(own, k)
    assert_equal(local_model(same, k), start)
  with pytest.raises(ValueError, match="from_global=True: no client's model"):
    build(from_global=True, global_model=CNN)


@pytest.mark.parametrize("clients", [ALIKE, UNLIKE])
@pytest.mark.parametrize("runner", [None, engine.Threads(2)])
def test_who_does_not_take_part_keeps_its_model(clients, runner):
  """And the global model is the mean of those who do, weighted if asked for."""
  algorithm = build(clients, runner=runner, jit=runner is None)
  state = algorithm.init(jax.random.key(0))
  seen = set()
  for t in range(1, 6):
    plan = mutual_plan(t, clients_per_round=2, uniform_weights=False)
    everyone = mutual_plan(t, uniform_weights=False)
    active = set(plan.batches["train"].client.tolist())
    assert len(active) == 2
    seen |= active
    after, metrics = algorithm.step(state, plan, mutual_data())
    for k in range(len(clients)):
      before, now = (local_model(s, k).params for s in (state, after))
      moved = [
        (a != b).any() for a, b in zip(*map(jax.tree.leaves, (before, now)))
      ]
      assert any(moved) == (k in active)
    # The same as if all took part and the others' memes had no weight.
    held = everyone.batches["train"]
    heard = np.isin(held.client, [*active]) * held.weight
    silent = everyone._replace(batches={"train": held._replace(weight=heard)})
    heard, _ = algorithm.step(state, silent, mutual_data())
    assert_close(after.server, heard.server)
    for k in active:
      assert_close(local_model(after, k), local_model(heard, k))
    assert metrics["local_loss"].count == 2 * sum(SIZES[k] for k in active)
    state = after
  assert len(seen) > 2


@pytest.mark.parametrize("runner", [None, engine.Threads(2)])
def test_what_clients_keep_may_stay_on_the_host(runner, tmp_path):
  """Bit for bit, also on disk, also with what else they keep."""
  options = dict(clients=ENCODED, global_model=HEAD, runner=runner)
  some = dict(rounds=4, clients_per_round=2)
  usual, expected = run(build(**options, jit=runner is None), **some)
  algorithm = build(**options, jit=False)
  for folder in (None, tmp_path):
    hosted = on_host(algorithm, ENCODED, engine=runner, folder=folder)
    state, metrics = run(hosted, **some)
    kept = jax.tree.leaves(state.clients)
    assert all(isinstance(a, np.ndarray) for a in kept)
    assert all(isinstance(a, np.memmap) == bool(folder) for a in kept)
    chex.assert_trees_all_equal(state, usual)
    chex.assert_trees_all_equal(metrics, expected)
    # A checkpoint goes on as they are, bit for bit.
    saved = checkpoint.Checkpoints(tmp_path / f"saved{bool(folder)}")
    saved.save(4, state, {})
    plan, copy = mutual_plan(5), jax.tree.map(jnp.array, state)
    then, _ = hosted.step(state, plan, mutual_data())
    _, state, _ = saved.latest(like=jax.tree.map(lambda a: a, then))
    chex.assert_trees_all_equal(state, copy)
    then, _ = hosted.step(state, plan, mutual_data())
    usually, _ = algorithm.step(copy, plan, mutual_data())
    chex.assert_trees_all_equal(then, usually)
  # A run that is resumed may have the same folder: no file has a name.
  before = jax.tree.map(np.array, then.clients)
  again = hosted.init(jax.random.key(1))
  assert not any(path.is_file() for path in tmp_path.iterdir())
  chex.assert_trees_all_equal(then.clients, before)
  with pytest.raises(AssertionError):
    chex.assert_trees_all_equal(again.clients, before)
  with pytest.raises(ValueError, match="of client 5, but there are 5"):
    strange = mutual_plan(1).batches["train"]._replace(client=np.arange(1, 6))
    plan = mutual_plan(1)._replace(batches={"train": strange})
    hosted.step(state, plan, mutual_data())


@pytest.mark.parametrize("runner", [None, engine.Threads(2)])
def test_clients_of_two_banks_are_numbered_in_each(runner):
  """The same as with all of their examples in one bank."""
  names = ("mnist", "cifar", "mnist", "mnist", "cifar")
  clients = [dataclasses.replace(c, bank=b) for c, b in zip(UNLIKE, names)]
  algorithm = build(clients, runner=runner, jit=runner is None)
  held = {
    name: POPULATION.take([k for k in range(5) if names[k] == name])
    for name in ("cifar", "mnist")
  }
  # Each bank has examples of its own in another order.
  flipped = {n: a[::-1] for n, a in POPULATION.bank.items()}
  last = len(flipped["y"]) - 1
  held["cifar"] = type(POPULATION).from_lists(
    flipped, [last - POPULATION.positions(k) for k in (1, 4)]
  )
  plan = plan_round(
    held, seed=0, round=1, batch_size=9, tail="short", uniform_weights=True
  )
  data = {name: jax.device_put(dict(of.bank)) for name, of in held.items()}
  state, _ = algorithm.step(algorithm.init(jax.random.key(0)), plan, data)
  expected, _ = run(build(), 1, batch_size=9, epochs=1)  # One full gradient.
  assert_close(state.server, expected.server)
  for k in range(5):
    assert_close(local_model(state, k), local_model(expected, k))


def test_clients_may_have_rates_and_optimizers_of_their_own():
  """Two clients' models stand still; the third's learns as before."""
  still = [dict(optimizer=lambda rate: optax.sgd(0 * rate))]
  still.append(dict(learning_rate=0.0))
  mixed = build([Client(MLP, **settings) for settings in (*still, {})])
  held = POPULATION.take([0, 1, 2])
  start = mixed.init(jax.random.key(0))
  after, _ = run(mixed, 1, held=held)
  usual, _ = run(build(ALIKE[:3]), 1, held=held)
  for k in (0, 1):
    assert_close(local_model(after, k), local_model(start, k))
    with pytest.raises(AssertionError):
      assert_close(local_model(usual, k), local_model(start, k))
  # In a first round a client's two models hear of nobody else.
  assert_close(local_model(after, 2), local_model(usual, 2))


def test_equal_clients_form_a_group():
  """Of models made one by one, and of transforms without a hash."""

  class Layers(nn.Module):
    widths: list[int]  # not hashable

    @nn.compact
    def __call__(self, x):
      return nn.Sequential([nn.Dense(width) for width in self.widths])(x)

  make = lambda *widths, shape=(1, 2): core.Model.from_flax(
    Layers(list(widths)), jnp.ones(shape)
  )
  models = [make(*widths) for widths in ((4, 3), (3,), (4, 3), (3,))]
  assert group_clients(clients_with(models)) == ((0, 2), (1, 3))
  assert make(3) != make(3, shape=(1, 5))

  class Shifted(nn.Module):
    by: jax.Array  # equality gives no single truth value

    @nn.compact
    def __call__(self, x):
      return nn.Dense(3)(x) + self.by

  one, other = (
    core.Model.from_flax(Shifted(jnp.ones(3)), jnp.ones((1, 2))) for _ in "ab"
  )
  assert one == one and one != other

  @dataclasses.dataclass
  class Scale:
    factor: float

    def __call__(self, key, batch):
      return {**batch, "x": self.factor * batch["x"]}

  a, b = (
    Client(MLP, name=n, transform=Scale(f)) for n, f in (("a", 1), ("b", 2))
  )
  named = dataclasses.replace(a, name="c")
  assert group_clients([a, b, named]) == ((0, 2), (1,))


@pytest.mark.parametrize(
  "clients,global_model,note",
  [
    (ENCODED, MIDDLE, "in the trunk of a spliced model"),
    (UNLIKE, HEAD, "a client: meme: its model, given inputs x of shape (4, 4"),
    (UNLIKE, FIRST, "give the client an adaptor"),
  ],
)
def test_parts_that_do_not_fit_are_named(clients, global_model, note):
  with pytest.raises(Exception) as error:
    run(build(clients, global_model=global_model))
  assert any(note in each for each in error.value.__notes__)


def test_what_is_out_of_range_is_refused():
  for name, value in (
    ("alpha", 1.5),
    ("beta", -0.1),
    ("learning_rate", -0.1),
    ("temperature", 0.0),
  ):
    with pytest.raises(ValueError, match=f"{name}={value}"):
      build(**{name: value})
  with pytest.raises(ValueError, match="clients: give one"):
    build([])
  with pytest.raises(ValueError, match="client=7"):
    local_model(build().init(jax.random.key(0)), 7)


def test_models_of_several_trials_are_taken_by_vmap():
  keys = jax.random.split(jax.random.key(0), 3)
  states = jax.jit(jax.vmap(build().init))(keys)
  with pytest.raises(ValueError, match="the state holds several trials"):
    local_model(states, 0)
  ours = jax.vmap(lambda state: local_model(state, 1))(states)
  one = local_model(build().init(keys[2]), 1)
  assert_close(one, jax.tree.map(lambda a: a[2], ours))
