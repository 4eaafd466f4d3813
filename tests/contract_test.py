"""What every algorithm must do, whatever it is."""

import dataclasses
import functools
import os
import weakref

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special

import hetfl
from hetfl import core, engine, population
from hetfl.algorithms.fedavg import round_keys
from hetfl.batches import leave_out
from tests import federation
from tests.algorithms import (
  arrays,
  CASES,
  flat_model,
  initial,
  make_distiller,
  METHODS,
  noisy,
  party_plan,
  run,
  unlike,
)
from tests.federation import jitted

ROUNDS = 4
# The same numbers in another order of addition, in float32.
TOLERANCE = dict(rtol=2e-4, atol=5e-6)
assert_close = functools.partial(chex.assert_trees_all_close, **TOLERANCE)
assert_equal = chex.assert_trees_all_equal
_STATS = ("mean", "var")  # Of Flax's batch normalisation.


def build(name, runner=None):
  """An algorithm as a loop on the host calls it."""
  algorithm = CASES[name].build(runner, ROUNDS)
  return algorithm if isinstance(runner, engine.Threads) else jitted(algorithm)


make_pools = functools.partial(federation.make_pools, models=federation.DENSE)
every_algorithm = pytest.mark.parametrize("name", CASES)
# Others stand for these in what is not their own: FedMD, FedDF, MergedCodist,
# and for clients that keep models one with a survey, one with a mentee and one
# whose server hears of each example.
ON_A_FRAME = {*METHODS} - {"fedproto", "fedkd", "fedgkt"}
ON_A_FRAME |= {"periodic", "fedet", "dsfl", "ktpfl"}
if os.environ.get("HETFL_ALL"):  # Once a week, nobody stands for another.
  ON_A_FRAME = set()
FRAMES = [name for name in CASES if name not in ON_A_FRAME]
IN_THREADS = ("fedavg", "merged", "fml", "fedmd")
every_frame = pytest.mark.parametrize("name", FRAMES)


def each_once(kind, *kinds):
  """Every algorithm with the first kind, and every frame with all."""
  cases = [(name, kind) for name in CASES]
  return cases + [(name, one) for one in kinds for name in FRAMES]


those_with_pools = pytest.mark.parametrize(
  "name", [name for name, case in CASES.items() if case.pooled]
)


@pytest.fixture(scope="module")
def in_one_program():
  """Each algorithm as a program, compiled once for several tests."""
  return functools.cache(build)


@pytest.fixture(scope="module")
def on_threads():
  """Each algorithm on threads, compiled once for several tests."""
  return functools.cache(lambda name: build(name, engine.Threads(2)))


@pytest.fixture(scope="module")
def reference(in_one_program):
  """Each algorithm's state after all rounds, in one program."""
  return functools.cache(lambda name: run(name, in_one_program(name), ROUNDS))


RUNNERS = {
  "side by side": lambda: engine.Inline(at_once=1000),
  "lanes3": lambda: engine.Inline(at_once=3),
  "mesh8": lambda: engine.Inline(federation.mesh(8)),  # More than there are.
  "mesh2": lambda: engine.Inline(federation.mesh(2), at_once=1000),
  "mesh3": lambda: engine.Inline(federation.mesh(3)),
  "threads1": lambda: engine.Threads(1),
}


def runners_of(name):
  """The kinds of engines that an algorithm hands its rows to."""
  some = {"fedavg": RUNNERS, "merged": ("mesh3",), "fml": ("mesh3", "lanes3")}
  return ["threads2", *some.get(name, ("mesh2",))]


@pytest.mark.parametrize(
  "name,kind", [(name, kind) for name in FRAMES for kind in runners_of(name)]
)
def test_lanes_devices_and_threads(reference, on_threads, name, kind):
  on_two = kind == "threads2"
  algorithm = on_threads(name) if on_two else build(name, RUNNERS[kind]())
  state, metrics = run(name, algorithm, ROUNDS)
  expected, expected_metrics = reference(name)
  assert_close(arrays(state), arrays(expected))
  assert_close(metrics, expected_metrics)


@every_frame
def test_threads_give_the_same_bits_every_time(name):
  algorithm = build(name, engine.Threads(3))
  states = [run(name, algorithm, 2)[0] for _ in range(2)]
  assert_equal(*map(arrays, states))


@pytest.mark.parametrize(
  "name,runner",
  [*((n, None) for n in FRAMES), *((n, engine.Threads(2)) for n in IN_THREADS)],
)
def test_a_plan_for_larger_banks_shows(name, runner):
  """Its loss is NaN; it does not train on other examples instead."""
  case = CASES[name]
  algorithm = case.build(runner, ROUNDS, model=flat_model(name))
  data = jax.tree.map(lambda a: a[:1], case.data())
  state = jax.jit(algorithm.init)(jax.random.key(0))
  step = algorithm.step if runner else jax.jit(algorithm.step)
  _, metrics = step(state, case.plan(1), data)
  losses = [m.value for n, m in metrics.items() if n.endswith("loss")]
  assert losses and np.isnan(losses).all()


def in_one_dispatch(name, rounds):
  """The first rounds of an algorithm, as a function of its state."""
  case = CASES[name]
  algorithm, data = case.build(None, ROUNDS), case.data()
  plans = hetfl.stack_plans([case.plan(t) for t in range(1, rounds + 1)])
  step = lambda state, plan: algorithm.step(state, plan, data)
  return lambda state: jax.lax.scan(step, state, plans)


@every_frame
def test_several_rounds_in_one_dispatch(reference, name):
  state, metrics = jax.jit(in_one_dispatch(name, ROUNDS))(initial(name))
  expected, expected_metrics = reference(name)
  assert_close(arrays(state), arrays(expected))
  assert_close(jax.tree.map(lambda m: m[-1], metrics), expected_metrics)


@those_with_pools
def test_a_rounds_own_banks_are_enough(reference, name):
  algorithm, state = build(name), initial(name)
  clients = federation.POPULATION
  for round in range(1, ROUNDS + 1):
    sets = {"pool0": clients, "pool1": clients, "distill": clients.examples()}
    plan, data = hetfl.localize(federation.make_plan(round), sets)
    # Both pools and the distillation share one bank, and still do.
    assert data["pool0"] is data["distill"]
    assert len(data["distill"]["y"]) in (32, 64)
    state, metrics = algorithm.step(state, plan, data)
  expected, expected_metrics = reference(name)
  assert_close(arrays(state), arrays(expected))
  assert_close(metrics, expected_metrics)


@every_algorithm
def test_trials_are_a_batch_axis(in_one_program, name):
  """And two rounds one dispatch."""
  trials, rounds = 4, 2
  state = initial(name)
  states = [unlike(state, 1 - 0.2 * i) for i in range(trials)]
  # Keys cannot be stacked by jnp.stack in all versions.
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(arrays, states)).replace(
    key=jnp.broadcast_to(state.key, (trials,))
  )
  together, _ = jax.jit(jax.vmap(in_one_dispatch(name, rounds)))(stacked)
  one = in_one_program(name)
  ends = [run(name, one, rounds, state=s)[0] for s in states]
  with pytest.raises(AssertionError):
    assert_close(*(jax.tree.leaves(arrays(end))[:9] for end in ends[:2]))
  for i, end in enumerate(ends):
    ours = jax.tree.map(lambda x, i=i: x[i], arrays(together))
    assert_close(ours, arrays(end), rtol=2e-4, atol=2e-5)


@every_algorithm
def test_going_on_compiles_nothing(reference, in_one_program, name):
  expected, _ = reference(name)
  algorithm = in_one_program(name)
  state, _ = run(name, algorithm, 1)
  host = jax.tree.map(np.asarray, arrays(state))
  state = jax.tree.map(jnp.asarray, host).replace(key=state.key)
  state, _ = run(name, algorithm, ROUNDS - 1, state=state, first=2)
  assert_equal(arrays(state), arrays(expected))
  assert algorithm.step._cache_size() == 1


@pytest.mark.parametrize(
  "name", [n for n in CASES if n not in ("fit", "ktpfl")]
)
def test_who_takes_no_part_does_not_change(in_one_program, name):
  case, algorithm, start = CASES[name], in_one_program(name), initial(name)
  plan = case.plan(1)

  def after(**absent):
    """The state after a round without some clients, by their bank."""
    batches = dict(plan.batches)
    for bank, who in absent.items():
      batches[bank] = leave_out(batches[bank], who)
    plan_without = plan._replace(batches=batches)
    return algorithm.step(start, plan_without, case.data())[0]

  numbers = np.arange(99)
  banks = [bank for bank in plan.batches if bank not in ("public", "distill")]
  assert_equal(*map(arrays, (after(**dict.fromkeys(banks, numbers)), start)))
  usual = after()
  if case.pooled and name not in ("feddf", "fedet"):  # Else servers learn.
    one = after(pool0=numbers).server
    assert_equal(one, (start.server[0], usual.server[1]))
  elif case.plan is party_plan:
    one = after(digest=[1], party1=[0]).clients
    assert_equal(one[1], start.clients[1])
    with pytest.raises(AssertionError):  # They learn from each other alone.
      assert_equal(one[0], usual.clients[0])
  elif not case.pooled:
    own = lambda state: jax.tree.map(
      lambda a: a[group.clients.index(1)], state.clients[i]
    )
    i, group = next(
      (i, group) for i, group in enumerate(start.clients) if 1 in group.clients
    )
    assert_equal(own(after(train=[1])), own(start))
    with pytest.raises(AssertionError):
      assert_equal(own(usual), own(start))


TEACHING = ("periodic", "merged", "feddf", "fedet", "fedmd", "dsfl", "ktpfl")


@pytest.mark.parametrize("name", TEACHING)
def test_who_diverges_takes_nobody_along(name):
  """The first one's parameters are NaN; only its own losses are."""
  algorithm = CASES[name].build(None, ROUNDS, model=flat_model(name))
  start = jax.jit(algorithm.init)(jax.random.key(0))
  which = "server" if CASES[name].pooled else "clients"
  first, *others = getattr(start, which)
  lost = jax.tree.map(lambda a: a * jnp.nan, first.params)
  first = first._replace(variables=first.variables._replace(params=lost))
  poisoned = start.replace(**{which: (first, *others)})
  algorithm = jitted(algorithm)
  state, metrics = run(name, algorithm, 2, state=poisoned)
  _, *others = getattr(state, which)
  assert core.all_finite((others, state.clients[1:], state.server[1:]))
  values = core.values(metrics)
  owners = {n.split("/")[0] for n, x in values.items() if np.isnan(x)}
  assert owners == {"pool0" if CASES[name].pooled else "party0"}
  if "consensus_weights" in start.hyper:  # As if it had no weight.
    weights = start.hyper["consensus_weights"].at[0].set(0)
    muted = hetfl.with_hyper(start, consensus_weights=weights)
    _, *expected = run(name, algorithm, 2, state=muted)[0].clients
    assert_equal(others, expected)


@every_frame
def test_a_state_may_be_given_up(name):
  algorithm = CASES[name].build(None, ROUNDS, model=flat_model(name))
  with jax.checking_leaks():
    step = jax.jit(algorithm.step, donate_argnums=0)
    init = jax.jit(algorithm.init)
    for seed in (0, 1):  # The first run must not delete what the second needs.
      state = init(jax.random.key(seed))
      run(name, algorithm._replace(step=step), 2, state=state)


@every_frame
def test_a_plan_may_lie_on_the_device(on_threads, name):
  case, algorithm = CASES[name], on_threads(name)
  plan = case.plan(1)
  there, _ = algorithm.step(initial(name), jax.device_put(plan), case.data())
  here, _ = algorithm.step(initial(name), plan, case.data())
  chex.assert_trees_all_equal(arrays(there), arrays(here))


@every_algorithm
def test_what_a_model_holds_stays(name):
  """All participants begin with the same arrays, whose states are donated."""
  model = flat_model(name)
  give_up = jax.jit(lambda state: state, donate_argnums=0)
  for array in (jnp.asarray, np.asarray):
    start = jax.tree.map(array, model.init(jax.random.key(0)))
    held = model._replace(init=lambda key, start=start: start)
    algorithm = CASES[name].build(None, ROUNDS, model=held)
    for seed in (0, 1):
      give_up(algorithm.init(jax.random.key(seed)))
    assert np.isfinite(start.params["Dense_0"]["kernel"]).all()


def test_what_an_init_is_given_stays():
  """Donating a state does not delete the arrays that `init` was given."""
  alpha, key = jnp.array(0.5), jax.random.key(0)
  merged = hetfl.merged_codist(
    make_pools(), make_distiller(), alpha=alpha, rounds=None
  )
  fitted = CASES["fit"].build(None, ROUNDS)
  variables = [p.learner.variables for p in fitted.init(key).clients]
  trained = [p.learner for p in fitted.init(key).clients]
  fedmd = CASES["fedmd"].build(None, ROUNDS)
  give_up = jax.jit(
    lambda state: jax.tree.map(jnp.copy, state), donate_argnums=0
  )
  for _ in range(2):
    give_up(merged.init(key))
    give_up(fitted.init(key, variables))
    give_up(fedmd.init(key, trained))
  assert float(alpha) == 0.5


@pytest.mark.parametrize("name,mesh", each_once(False, True))
def test_models_keep_their_own_types(name, mesh):
  """Parameters of bfloat16, and a statistic that is a whole number."""
  runner = engine.Inline(federation.mesh(2) if mesh else None)
  case, model = CASES[name], flat_model(name, jnp.bfloat16, counts=True)
  algorithm = case.build(runner, ROUNDS, model=model)
  state = jax.eval_shape(algorithm.init, jax.random.key(0))
  after, metrics = jax.eval_shape(
    algorithm.step, state, case.plan(1), case.data()
  )
  chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
  assert {m.total.dtype.name for m in metrics.values()} == {"float32"}


def flat_round(name, algorithm, **first):
  """A round with banks that have one more example, which nobody holds."""
  case = CASES[name]
  data = {
    bank: {n: jnp.insert(a, 0, first[n], axis=0) for n, a in columns.items()}
    for bank, columns in case.data().items()
  }
  plan = case.plan(1)
  for bank in data.keys() & plan.batches.keys():
    index = plan.batches[bank].index
    index[index >= 0] += 1
  state = jax.jit(algorithm.init)(jax.random.key(0))
  return arrays(algorithm.step(state, plan, data)[0])


@pytest.fixture(scope="module")
def flat():
  """Each algorithm with small models, and a round of it."""

  def make(name):
    model = flat_model(name)
    changes = dict(model=model, transform=lambda batch: batch, microbatch=1)
    algorithm = jitted(CASES[name].build(None, ROUNDS, **changes))
    return model, algorithm, flat_round(name, algorithm, x=0.0, y=0)

  return functools.cache(make)


@every_frame
def test_an_example_that_nobody_holds_may_be_anything(flat, name):
  """Empty places hold an example of the batch, not the bank's first."""
  _, algorithm, expected = flat(name)
  assert_equal(flat_round(name, algorithm, x=np.nan, y=-1), expected)


@every_frame
def test_inputs_may_be_a_tree_and_transforms_drop_the_mask(flat, name):
  """Two inputs under names do what one array of them does."""
  model, _, expected = flat(name)
  whole = lambda x: jnp.concatenate([x["left"], x["right"]], axis=1)
  split = model._replace(
    apply=lambda v, x, key, train: model.apply(v, whole(x), key, train)
  )

  def halves(batch):
    x = {"left": batch["x"][:, :1], "right": batch["x"][:, 1:]}
    return {"x": x, "y": batch["y"]}

  changes = dict(model=split, transform=halves, microbatch=1)
  algorithm = jitted(CASES[name].build(None, ROUNDS, **changes))
  assert_close(flat_round(name, algorithm, x=0.0, y=0), expected)


@pytest.mark.parametrize("name,kind", each_once("lanes3", "mesh3"))
def test_no_type_is_promoted(name, kind):
  case = CASES[name]
  adam = {} if name == "scaffold" else {"optimizer": optax.adam}
  algorithm = case.build(RUNNERS[kind](), ROUNDS, **adam)
  with jax.numpy_dtype_promotion("strict"):
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    jax.eval_shape(algorithm.step, state, case.plan(1), case.data())
  with jax.enable_x64(True):  # Where draws are float64, and models are not.
    before = jax.eval_shape(algorithm.init, jax.random.key(0))
    step = algorithm.step, before, case.plan(1), case.data()
    after, _ = jax.eval_shape(*step)
  chex.assert_trees_all_equal_shapes_and_dtypes(after, before)


@pytest.mark.parametrize("name", ["merged", "fedmd", "fml", "fedproto"])
def test_a_round_under_the_checks_of_jax(name):
  """Types, NaN and leaks, with another kind of keys."""
  case = CASES[name]
  algorithm = case.build(None, ROUNDS, model=flat_model(name))
  key = jax.random.key(0, impl="rbg")
  with (
    jax.numpy_dtype_promotion("strict"),
    jax.debug_nans(True),
    jax.checking_leaks(),
  ):
    state = jax.jit(algorithm.init)(key)
    state, _ = jax.jit(algorithm.step)(state, case.plan(1), case.data())
  assert core.all_finite(state)
  assert jax.random.key_impl(state.key) == jax.random.key_impl(key)


@every_frame
def test_programs_are_freed_with_the_algorithm(name, monkeypatch):
  tasks, make = [], engine.Task.__init__

  def recorded(self, *args, **settings):
    tasks.append(weakref.ref(self))
    make(self, *args, **settings)

  monkeypatch.setattr(engine.Task, "__init__", recorded)
  case, model = CASES[name], flat_model(name)
  threaded, inline = (
    case.build(runner, ROUNDS, model=model)
    for runner in (engine.Threads(2), None)
  )
  state = jax.jit(inline.init)(jax.random.key(0))
  threaded.step(state, case.plan(1), case.data())
  jax.jit(inline.step).trace(state, case.plan(1), case.data())
  living = [task for task in (ref() for ref in tasks) if task]
  programs = [p for task in living for p in task.programs.values()]
  assert programs
  tasks += map(weakref.ref, programs)
  del threaded, inline, living, programs
  assert federation.are_freed(tasks)


@every_algorithm
def test_a_state_that_has_not_begun_is_finite(name):
  assert core.all_finite(initial(name))


OWNERS = {
  "fedavg": "pool 'pool0'",
  "periodic": "pool 'pool0'",
  "feddf": "pool 'pool0'",
  "fedet": "pool 'pool0'",
  "merged": "a teacher",
  "fml": "a client: local",
  "fit": "participant 'party0'",
  **dict.fromkeys(("fedmd", "dsfl", "ktpfl"), "participant 'party0'"),
  **dict.fromkeys(METHODS, "a client"),
}


@every_frame
def test_errors_of_models_and_losses_say_whose_they_are(name):
  """Those that Flax and optax raise, of another shape or signature."""
  narrow = core.Model.from_flax(nn.Dense(3), jnp.zeros((1, 7)))
  of_labels = optax.softmax_cross_entropy_with_integer_labels
  case = CASES[name]

  def notes(**changes):
    algorithm = case.build(None, ROUNDS, **changes)
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    with pytest.raises(Exception) as error:
      jax.eval_shape(algorithm.step, state, case.plan(1), case.data())
    return "".join(error.value.__notes__)

  found = notes(model=narrow)
  assert f"{OWNERS[name]}: its model, given inputs x of shape" in found
  assert "loss(logits, batch)" in notes(loss=of_labels)


@pytest.mark.parametrize(
  "name,backend", [*((name, "gpu") for name in FRAMES), ("fedavg", "tpu")]
)
def test_accelerators_can_lower_it(name, backend, monkeypatch):
  # Some forms are an accelerator's own.
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  case, platforms = CASES[name], ("cuda", "rocm", "tpu")
  step = jax.jit(case.build(None, ROUNDS).step)
  exported = jax.export.export(step, platforms=platforms)(
    initial(name), case.plan(1), case.data()
  )
  assert exported.platforms == platforms


@every_frame
def test_threads_compile_nothing_later(on_threads, name):
  events = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: events.append(event)
  )
  compiled = lambda: sum("backend_compile" in event for event in events)
  jax.jit(lambda x: x + 1)(0)
  assert compiled() > 0
  algorithm = on_threads(name)
  # By then every program has run: exchanges, parties that stop.
  state, _ = run(name, algorithm, 8)
  before = compiled()
  run(name, algorithm, 6, state=state, first=9)
  assert compiled() == before


def as_fedavg(pools, runner):
  """Algorithms that should be FedAvg over so few rounds."""
  options = dict(rounds=ROUNDS, engine=runner)
  distiller = make_distiller()
  return {
    "merged": hetfl.merged_codist(pools, distiller, alpha=1.0, **options),
    "scheduled": hetfl.merged_codist(
      pools, distiller, alpha=lambda t: jnp.ones(()), **options
    ),
    "seldom": hetfl.merged_codist(
      pools, distiller, alpha=0.5, every=ROUNDS + 1, **options
    ),
    "periodic": hetfl.periodic_codist(
      pools, distiller, period=ROUNDS + 1, **options
    ),
  }


def test_without_an_exchange_it_is_fedavg_bit_for_bit():
  pools, runner = make_pools(), engine.Threads(2)
  plain = hetfl.fedavg(pools, rounds=ROUNDS, engine=runner)
  expected, _ = federation.run(plain, ROUNDS)
  for name, algorithm in as_fedavg(pools, runner).items():
    state, metrics = federation.run(algorithm, ROUNDS)
    assert_equal(federation.params(state), federation.params(expected))
    assert metrics["pool0/distill_loss"].count == 0, name


def test_without_an_exchange_it_is_fedavg_in_one_program():
  # There XLA may contract the same sums differently.
  pools = make_pools()
  plain = jitted(hetfl.fedavg(pools, rounds=ROUNDS))
  expected, _ = federation.run(plain, ROUNDS)
  for name in ("merged", "periodic"):
    algorithm = jitted(as_fedavg(pools, None)[name])
    state, _ = federation.run(algorithm, ROUNDS)
    assert_close(federation.params(state), federation.params(expected))


def test_every_other_round_is_a_schedule():
  runner = engine.Threads(2)
  options = dict(rounds=ROUNDS, engine=runner)
  schedule = lambda t: jnp.where(t % 2 == 0, 0.5, 1.0)
  pair = make_pools(), make_distiller()
  states = [
    federation.run(algorithm, ROUNDS)[0]
    for algorithm in (
      hetfl.merged_codist(*pair, alpha=schedule, **options),
      hetfl.merged_codist(*pair, alpha=0.5, every=2, **options),
      hetfl.merged_codist(*pair, alpha=0.5, **options),
    )
  ]
  scheduled, every_other, always = map(federation.params, states)
  assert_equal(scheduled, every_other)
  with pytest.raises(AssertionError):
    assert_close(always, every_other)


def test_proximal_term_of_weight_zero_is_fedavg():
  plain = make_pools()
  proximal = make_pools(prox_mu=jnp.zeros(()))
  states = [
    federation.run(jitted(hetfl.fedavg(pools, rounds=ROUNDS)), 2)[0]
    for pools in (plain, proximal)
  ]
  assert_close(*map(federation.params, states))


def test_one_client_with_all_data_is_centralised_sgd():
  n = 8
  everything = federation.make_population((n,))
  (pool,) = make_pools(
    1,
    server_optimizer=hetfl.optimizers.fedavg_server,
    server_lr=1.0,
    learning_rate=0.1,
  )
  algorithm = jitted(hetfl.fedavg([pool], rounds=10**9))
  state = algorithm.init(jax.random.key(0))
  bank = jax.tree.map(jnp.asarray, dict(everything.bank))

  def loss(params):
    logits, _ = pool.model.apply(
      state.server[0].variables._replace(params=params), bank["x"], None, True
    )
    return pool.loss(logits, bank).mean()

  expected = state.server[0].params
  for round in range(1, 4):
    plan = hetfl.plan_round(
      {"pool0": everything}, seed=0, round=round, batch_size=n
    )
    state, _ = algorithm.step(state, plan, {"pool0": bank})
    grads = jax.grad(loss)(expected)
    expected = jax.tree.map(lambda w, g: w - 0.1 * g, expected, grads)
  assert_close(state.server[0].params, expected)


def test_periodic_resets_the_servers_moments():
  pools = make_pools(server_optimizer=hetfl.optimizers.fedadam_server)
  algorithm = hetfl.periodic_codist(
    pools, make_distiller(), period=2, rounds=ROUNDS
  )
  counts = []
  state = algorithm.init(jax.random.key(0))
  for round in (1, 2, 3):
    state, _ = federation.run(jitted(algorithm), 1, state=state, first=round)
    counts.append(int(optax.tree.get(state.server[0].opt_state, "count")))
  assert counts == [1, 0, 1]


class Normed(nn.Module):
  """A model whose statistics are those of its inputs."""

  @nn.compact
  def __call__(self, x, train=False):
    x = x.reshape(x.shape[0], -1)
    x = nn.BatchNorm(use_running_average=not train, momentum=0.75)(x)
    return nn.Dense(federation.CLASSES)(x)


def test_two_devices_are_two_halves_of_a_batch_to_batch_normalisation():
  model = core.Model.from_flax(Normed(), jnp.zeros(federation.EXAMPLE.shape))
  pools = [
    dataclasses.replace(pool, model=model)
    for pool in make_pools(server_optimizer=hetfl.optimizers.fedavg_server)
  ]

  def after_a_round(period, microbatch=None, runner=None):
    algorithm = hetfl.periodic_codist(
      pools,
      make_distiller(transform=None, mixup_beta=None, microbatch=microbatch),
      period=period,
      rounds=ROUNDS,
      engine=runner,
    )
    return federation.run(jitted(algorithm), 1)[0].server

  halves = after_a_round(1, microbatch=4)
  shared = after_a_round(1, runner=engine.Inline(federation.mesh(2)))
  assert_close([p.params for p in shared], [p.params for p in halves])

  x = federation.POPULATION.bank["x"].reshape(-1, 32).astype(np.float64)
  batches = x[federation.make_plan(1).batches["distill"].index[0]].reshape(
    3, 2, 4, 32
  )
  before = after_a_round(2)  # No exchange yet.
  for pool, start in zip(shared, before):
    mean, var = (start.stats["batch_stats"]["BatchNorm_0"][n] for n in _STATS)
    for batch in batches:
      mean = 0.75 * mean + 0.25 * batch.mean((0, 1))
      var = 0.75 * var + 0.25 * batch.var(1).mean(0)  # One for each half.
    found = pool.stats["batch_stats"]["BatchNorm_0"]
    assert_close([found[n] for n in _STATS], [mean, var])


@pytest.mark.parametrize("threads", [False, True])
def test_teachers_and_students_see_the_same_images(threads):
  """A student whose target is its own prediction starts at zero loss."""

  def noisy(key, batch):
    noise = jax.random.normal(key, batch["x"].shape)
    return {**batch, "x": batch["x"] + noise}

  def loss_of(regularization):
    algorithm = hetfl.merged_codist(
      make_pools(),
      make_distiller(
        learning_rate=0.0,
        regularization=regularization,
        transform=noisy,
        mixup_beta=2,
        microbatch=2,
      ),
      alpha=0.5,
      rounds=1,
      engine=engine.Threads(2) if threads else None,
    )
    _, metrics = federation.run(algorithm if threads else jitted(algorithm), 1)
    return metrics["pool1/distill_loss"].total

  assert abs(loss_of(1.0)) < 1e-5
  assert loss_of(0.0) > 1e-2


def recorded(build):
  """Random draws and inputs of two pools in two rounds, a client of 2 steps."""
  pools = [
    hetfl.Pool(
      federation.recorder(20),
      name,
      learning_rate=0.125,
      server_lr=1.0,
      transform=noisy,
      server_optimizer=hetfl.optimizers.fedavg_server,
    )
    for name in "ab"
  ]
  algorithm = build(
    pools, make_distiller(microbatch=1, mixup_beta=None), rounds=2
  )
  bank = federation.recorders_bank(4)
  clients = population.ClientPopulation.from_lists(bank, [np.arange(4)])
  start = state = algorithm.init(jax.random.key(0))
  step = jax.jit(algorithm.step)
  for round in (1, 2):
    plan = hetfl.plan_round(
      {"a": clients, "b": clients},
      clients.examples(),
      seed=0,
      round=round,
      clients_per_round=1,
      batch_size=2,
      distill_steps=3,
      distill_batch_size=2,
    )
    state, _ = step(state, plan, {"a": bank, "b": bank, "distill": bank})
  assert (start.server[0].params != start.server[1].params).any()
  stats = [pool.stats for pool in state.server]
  return [np.array([s[name] for s in stats]) for name in ("draws", "seen")]


def test_no_draw_is_made_twice():
  """Two steps of a client and three of a student, each of two parts."""
  draws, seen = recorded(functools.partial(hetfl.periodic_codist, period=1))
  assert (draws > 0).sum(axis=1).tolist() == [16, 16]
  assert len(np.unique(draws[draws > 0])) == 32
  # No key is used both for an image, which is 1 before, and in the model.
  assert not np.isclose(seen - 1, draws)[draws > 0].any()
  # Both students see the same images, in the same two parts.
  of_round = np.r_[[False] * 2, [True] * 6]
  students = np.tile(of_round[::-1], 2)
  np.testing.assert_array_equal(*seen[:, :16][:, students])
  assert len(np.unique(seen[0, :16])) == 16
  assert len(np.unique(seen[:, :16][:, ~students])) == 2 * 4


def test_statistics_are_the_clients_weighted_mean():
  pool = hetfl.Pool(
    federation.recorder(1),
    "a",
    learning_rate=0.125,
    server_lr=1.0,
    server_optimizer=hetfl.optimizers.fedavg_server,
  )
  bank = {"x": jnp.array([[1.0], [5], [5], [5]]), "y": jnp.zeros(4, jnp.int32)}
  clients = population.ClientPopulation.from_lists(bank, [[0], [1, 2, 3]])
  plan = hetfl.plan_round({"a": clients}, seed=0, round=1, batch_size=1)
  algorithm = hetfl.fedavg([pool], rounds=None)
  state = algorithm.init(jax.random.key(0))
  state, _ = algorithm.step(state, plan, {"a": bank})
  assert state.server[0].stats["seen"] == (1 * 1 + 3 * 5) / 4


def test_merging_keeps_the_clients_statistics():
  draws, _ = recorded(functools.partial(hetfl.merged_codist, alpha=0.5))
  # Two steps in each of two rounds; the students' are dropped.
  assert (draws > 0).sum(axis=1).tolist() == [4, 4]
  assert len(np.unique(draws[draws > 0])) == 8


def test_labels_in_distillation_are_mixed_as_the_images_are():
  distiller = make_distiller(
    learning_rate=0.0, label_weight=1.0, regularization=0.0
  )
  pools = make_pools()
  algorithm = hetfl.merged_codist(pools, distiller, alpha=0.5, rounds=1)
  state = algorithm.init(jax.random.key(0))
  plan, data = federation.make_plan(1), federation.make_data()
  _, metrics = jax.jit(algorithm.step)(state, plan, data)
  *_, key = round_keys(state.key, plan.round, 2)
  y, expected = np.asarray(data["distill"]["y"]), []
  for s, index in enumerate(plan.batches["distill"].index[0]):
    batch = distiller.batch(key, data["distill"], index, step=s)
    logits = pools[1].model.predict(state.server[1].variables, batch["x"])
    onehot, w = np.eye(logits.shape[-1])[y[index]], batch["mixup"][:, None]
    mixed = w * onehot + (1 - w) * np.roll(onehot, -1, axis=0)
    kl = scipy.special.rel_entr(mixed, jax.nn.softmax(logits)).sum(axis=1)
    expected.append(kl.mean())
  loss = metrics["pool1/distill_loss"].value
  np.testing.assert_allclose(loss, np.mean(expected), rtol=1e-5)


def test_threads_refuse_to_be_traced():
  algorithm = hetfl.fedavg(make_pools(), rounds=1, engine=engine.Threads(1))
  with pytest.raises(TypeError, match="Inline"):
    federation.run(jitted(algorithm), 1)
