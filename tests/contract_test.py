"""What every algorithm must do, whatever it is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetfl import codist, distill, engine, population
from hetfl.fedavg import fedadam_server, fedavg, fedavg_server
from tests import federation

ROUNDS = 4
# The same numbers in another order of addition, in float32.
TOLERANCE = dict(rtol=2e-4, atol=2e-6)


def make_distiller(**settings):
  return distill.Distiller(
    **{**dict(learning_rate=0.02, regularization=0.1), **settings}
  )


def build(name, runner=None, rounds=ROUNDS, **settings):
  # SGD's steps do not blow rounding up, as Adam's do for tiny gradients.
  pools = federation.make_pools(
    server_optimizer=fedavg_server, server_lr=1.0, **settings
  )
  distiller = make_distiller(optimizer=optax.sgd)
  options = dict(rounds=rounds, engine=runner)
  return {
    "fedavg": lambda: fedavg(pools, **options),
    "periodic": lambda: codist.periodic_codist(
      pools, distiller, period=2, **options
    ),
    "merged": lambda: codist.merged_codist(
      pools, distiller, alpha=0.5, **options
    ),
  }[name]()


def jitted(algorithm):
  return algorithm._replace(step=jax.jit(algorithm.step))


def assert_close(a, b, **tolerance):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, **(tolerance or TOLERANCE)),
    a,
    b,
  )


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


every_algorithm = pytest.mark.parametrize(
  "name", ["fedavg", "periodic", "merged"]
)


@pytest.fixture(scope="module")
def reference():
  """Each algorithm's state after all rounds: one lane, one program."""
  return {
    name: federation.run(jitted(build(name)), ROUNDS)
    for name in ("fedavg", "periodic", "merged")
  }


def mesh(size):
  return jax.make_mesh((size,), (engine.AXIS,), devices=jax.devices()[:size])


@every_algorithm
@pytest.mark.parametrize(
  "runner,num_lanes",
  [
    (lambda: None, 3),
    (lambda: None, 20),  # More than there are clients.
    (lambda: engine.Inline(mesh(1)), 1),
    (lambda: engine.Inline(mesh(4)), 4),
    (lambda: engine.Threads(2), 1),
    (lambda: engine.Threads(2), 4),
  ],
  ids=["lanes3", "lanes20", "mesh1", "mesh4", "threads1", "threads4"],
)
def test_lanes_devices_and_threads(reference, name, runner, num_lanes):
  runner = runner()
  algorithm = build(name, runner)
  if not isinstance(runner, engine.Threads):
    algorithm = jitted(algorithm)
  state, metrics = federation.run(algorithm, ROUNDS, num_lanes=num_lanes)
  expected, expected_metrics = reference[name]
  assert_close(federation.params(state), federation.params(expected))
  assert_close(metrics, expected_metrics)


@every_algorithm
def test_threads_give_the_same_bits_every_time(name):
  runner = engine.Threads(3)
  states = [
    federation.run(build(name, runner), 2, num_lanes=4)[0] for _ in range(2)
  ]
  assert_equal(*map(federation.params, states))


@every_algorithm
def test_ten_rounds_in_one_dispatch(name):
  algorithm = build(name, rounds=10)
  plans = population.stack_plans(
    [federation.make_plan(round) for round in range(1, 11)]
  )
  data = federation.make_data()
  state, metrics = jax.jit(
    lambda state: jax.lax.scan(
      lambda state, plan: algorithm.step(state, plan, data), state, plans
    )
  )(algorithm.init(jax.random.key(0)))
  expected, expected_metrics = federation.run(jitted(algorithm), 10)
  assert_close(federation.params(state), federation.params(expected))
  assert_close(jax.tree.map(lambda m: m[-1], metrics), expected_metrics)


@every_algorithm
def test_a_rounds_own_banks_are_enough(reference, name):
  algorithm = jitted(build(name))
  state = algorithm.init(jax.random.key(0))
  clients = [federation.POPULATION] * 2
  for round in range(1, ROUNDS + 1):
    plan, data = population.localize(
      federation.make_plan(round), clients, federation.POPULATION.examples()
    )
    # Both pools and the distillation share one bank, and still do.
    assert data["pools"][0] is data["distill"]
    assert len(data["distill"]["y"]) in (32, 64)
    state, metrics = algorithm.step(state, plan, data)
  expected, expected_metrics = reference[name]
  assert_close(federation.params(state), federation.params(expected))
  assert_close(metrics, expected_metrics)


@every_algorithm
def test_trials_are_a_batch_axis(name):
  trials = 4
  algorithm = build(name)
  state = algorithm.init(jax.random.key(0))

  def unlike(i, state):
    """A trial's own rates: every hyper-parameter, scaled."""
    scale = lambda x: x * (1 - 0.2 * i)
    return state.replace(
      pools=tuple(
        pool.replace(hyper=jax.tree.map(scale, pool.hyper))
        for pool in state.pools
      ),
      hyper=jax.tree.map(scale, state.hyper),
    )

  states = [unlike(i, state) for i in range(trials)]
  one = jitted(algorithm)
  many = algorithm._replace(
    step=jax.jit(jax.vmap(algorithm.step, in_axes=(0, None, None)))
  )
  # Keys cannot be stacked by jnp.stack in all versions.
  stacked = jax.tree.map(
    lambda *x: jnp.stack(x), *[s.replace(key=None) for s in states]
  ).replace(key=jnp.broadcast_to(state.key, (trials,)))
  together, _ = federation.run(many, ROUNDS, state=stacked)
  ends = [federation.run(one, ROUNDS, state=s)[0] for s in states]
  assert not np.allclose(
    *(jax.tree.leaves(federation.params(e))[0] for e in ends[:2])
  )
  for i, end in enumerate(ends):
    ours = jax.tree.map(lambda x, i=i: x[i], federation.params(together))
    assert_close(ours, federation.params(end))


@every_algorithm
def test_going_on_from_a_state_is_going_on(reference, name):
  algorithm = jitted(build(name))
  state, _ = federation.run(algorithm, 2)
  host = jax.tree.map(np.asarray, state.replace(key=None))
  state = jax.tree.map(jnp.asarray, host).replace(key=state.key)
  state, _ = federation.run(algorithm, ROUNDS - 2, state=state, first=3)
  assert_equal(federation.params(state), federation.params(reference[name][0]))


@every_algorithm
def test_no_tracer_leaks_and_no_second_compilation(name):
  algorithm = build(name)
  with jax.checking_leaks():
    step = jax.jit(algorithm.step)
    state, _ = federation.run(algorithm._replace(step=step), 1)
  state, _ = federation.run(
    algorithm._replace(step=step), 3, state=state, first=2
  )
  assert step._cache_size() == 1


@every_algorithm
def test_threads_compile_nothing_after_the_first_exchange(name):
  events = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: events.append(event)
  )
  compiled = lambda: sum("backend_compile" in event for event in events)
  algorithm = build(name, engine.Threads(2), rounds=20)
  state, _ = federation.run(algorithm, 2, num_lanes=4)
  before = compiled()
  assert before > 0
  federation.run(algorithm, 6, state=state, first=3, num_lanes=4)
  assert compiled() == before


def as_fedavg(pools, runner):
  """Algorithms that should be FedAvg over so few rounds."""
  options = dict(rounds=ROUNDS, engine=runner)
  distiller = make_distiller()
  return {
    "merged": codist.merged_codist(pools, distiller, alpha=1.0, **options),
    "scheduled": codist.merged_codist(
      pools, distiller, alpha=lambda t: jnp.ones(()), **options
    ),
    "periodic": codist.periodic_codist(
      pools, distiller, period=ROUNDS + 1, **options
    ),
  }


def test_without_an_exchange_it_is_fedavg_bit_for_bit():
  pools, runner = federation.make_pools(), engine.Threads(2)
  plain = fedavg(pools, rounds=ROUNDS, engine=runner)
  expected, _ = federation.run(plain, ROUNDS, num_lanes=3)
  for name, algorithm in as_fedavg(pools, runner).items():
    state, metrics = federation.run(algorithm, ROUNDS, num_lanes=3)
    assert_equal(federation.params(state), federation.params(expected))
    assert metrics["pool0/distill_loss"].count == 0, name


@pytest.mark.parametrize("name", ["merged", "scheduled", "periodic"])
def test_without_an_exchange_it_is_fedavg_in_one_program(name):
  # There XLA may contract the same sums differently.
  pools = federation.make_pools()
  plain = jitted(fedavg(pools, rounds=ROUNDS))
  expected, _ = federation.run(plain, ROUNDS)
  algorithm = jitted(as_fedavg(pools, None)[name])
  state, _ = federation.run(algorithm, ROUNDS)
  assert_close(federation.params(state), federation.params(expected))


def test_proximal_term_of_weight_zero_is_fedavg():
  plain = federation.make_pools()
  proximal = federation.make_pools(prox_mu=jnp.zeros(()))
  states = [
    federation.run(jitted(fedavg(pools, rounds=ROUNDS)), 2)[0]
    for pools in (plain, proximal)
  ]
  assert_close(*map(federation.params, states))


def test_one_client_with_all_data_is_centralised_sgd():
  n = 8
  everything = federation.make_population((n,))
  (pool,) = federation.make_pools(
    1, server_optimizer=fedavg_server, server_lr=1.0, client_lr=0.1
  )
  algorithm = fedavg([pool], rounds=10**9)
  state = algorithm.init(jax.random.key(0))
  bank = jax.tree.map(jnp.asarray, dict(everything.bank))

  def loss(params):
    logits, _ = pool.model.apply(
      state.pools[0].variables._replace(params=params), bank["x"], None, True
    )
    return pool.loss(logits, bank).mean()

  expected = state.pools[0].params
  for round in range(1, 4):
    lanes = population.plan_clients(
      everything, seed=0, round=round, clients_per_round=1, batch_size=n
    )
    plan = population.RoundPlan(np.int32(round), (lanes,), None)
    state, _ = algorithm.step(state, plan, {"pools": (bank,)})
    grads = jax.grad(loss)(expected)
    expected = jax.tree.map(lambda w, g: w - 0.1 * g, expected, grads)
  assert_close(state.pools[0].params, expected)


def test_periodic_resets_the_servers_moments():
  pools = federation.make_pools(server_optimizer=fedadam_server)
  algorithm = codist.periodic_codist(
    pools, make_distiller(), period=2, rounds=ROUNDS
  )
  counts = []
  state = algorithm.init(jax.random.key(0))
  for round in (1, 2, 3):
    state, _ = federation.run(jitted(algorithm), 1, state=state, first=round)
    counts.append(int(optax.tree.get(state.pools[0].opt_state, "count")))
  assert counts == [1, 0, 1]


@pytest.mark.parametrize("threads", [False, True])
def test_teachers_and_students_see_the_same_images(threads):
  """A student whose target is its own view starts at no loss at all."""

  def noisy(key, batch):
    noise = jax.random.normal(key, batch["x"].shape)
    return {**batch, "x": batch["x"] + noise}

  def loss_of(regularization):
    algorithm = codist.merged_codist(
      federation.make_pools(),
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


def test_labels_in_distillation_are_mixed_as_the_images_are():
  onehot = jnp.eye(federation.CLASSES)[jnp.array([0, 1])]
  mixed = distill.mixup(onehot, jnp.array([0.75, 0.5]))
  np.testing.assert_allclose(mixed, [[0.75, 0.25, 0], [0.5, 0.5, 0]])
  pools = federation.make_pools()
  states = [
    federation.run(
      jitted(
        codist.merged_codist(
          pools,
          make_distiller(label_weight=weight, mixup_beta=2),
          alpha=0.0,
          rounds=1,
        )
      ),
      1,
    )[0]
    for weight in (0.0, 1.0)
  ]
  a, b = (jax.tree.leaves(federation.params(s))[0] for s in states)
  assert not np.allclose(a, b)


def test_threads_refuse_to_be_traced():
  algorithm = fedavg(
    federation.make_pools(), rounds=1, engine=engine.Threads(1)
  )
  with pytest.raises(TypeError, match="Inline"):
    federation.run(jitted(algorithm), 1)


def test_more_lanes_than_clients():
  algorithm = jitted(build("fedavg"))
  few, _ = federation.run(algorithm, 1, num_lanes=1)
  many, _ = federation.run(jitted(build("fedavg")), 1, num_lanes=8)
  assert_close(federation.params(few), federation.params(many))


def test_what_is_out_of_range_is_refused():
  pools = federation.make_pools()
  with pytest.raises(ValueError, match="merge_alpha=1.5"):
    codist.merged_codist(pools, make_distiller(), alpha=1.5, rounds=1)
  with pytest.raises(ValueError, match="codist_period=0"):
    codist.periodic_codist(pools, make_distiller(), period=0, rounds=1)
  with pytest.raises(ValueError, match="needs two pools"):
    codist.merged_codist(pools[:1], make_distiller(), alpha=0.5, rounds=1)
  for alpha in (np.float32(-0.5), jnp.asarray(2.0)):
    with pytest.raises(ValueError, match="merge_alpha="):
      codist.merged_codist(pools, make_distiller(), alpha=alpha, rounds=1)
  with pytest.raises(ValueError, match="rounds=0"):
    fedavg(pools, rounds=0)
  with pytest.raises(ValueError, match="temperature=-1.0"):
    bad = make_distiller(temperature=-1.0)
    codist.periodic_codist(pools, bad, period=2, rounds=1)
  with pytest.raises(ValueError, match="label_weight=7"):
    make_distiller(label_weight=7).hyper(2)
  with pytest.raises(ValueError, match="temperature=.* one or 2 values"):
    make_distiller(temperature=(1.0, 2.0, 3.0)).hyper(2)
  with pytest.raises(ValueError, match="regularization=-1"):
    make_distiller(regularization=-1).hyper(2)
  with pytest.raises(ValueError, match="--clients_per_round=10: pool 0 has 9"):
    federation.make_plan(1, clients_per_round=10)
  with pytest.raises(ValueError, match="2 pools, but a plan for 1"):
    fedavg(pools, rounds=1).step(
      fedavg(pools, rounds=1).init(jax.random.key(0)),
      federation.make_plan(1, num_pools=1),
      federation.make_data(2),
    )
