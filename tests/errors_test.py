"""Error messages of invalid calls, and unusual values that are valid."""

import dataclasses

import chex
import flax.linen as nn
from hetfl.fedavg import fedavg
from hetfl.fedmd import (
  absolute_error,
  consensus,
  fedmd,
  plan_fedmd,
  squared_error,
  TRANSLATORS,
)
from hetfl.fml import fml, independent
from hetfl.hyperparameters import with_hyper
from hetfl.lanes import pack_lanes
from hetfl.mutual import mutual_loss, MutualClient
from hetfl.mutual_planning import group_clients, plan_mutual
from hetfl.pool import Pool
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetfl import (
  augment,
  codist,
  core,
  distill,
  engine,
  evaluate,
  party,
  planning,
  population,
)
from hetfl.models import language, layers, next_word
from hetfl.models.kernels import convolution
from hetfl.run import trials
from tests import algorithms, federation
from tests.algorithms import CASES, make_distiller

TOKENS = language.TokenLogits(
  jnp.zeros((1, 2, 1)), jnp.zeros((1, 5)), jnp.zeros(5)
)
WORDS = {"y": jnp.ones((1, 2), int), "mask": jnp.ones(1)}
POOLS = federation.make_pools()
BANK = dict(federation.POPULATION.bank)
PUBLIC = population.Subset.whole(algorithms.PUBLIC)
# Of another number of classes than its peers.
WIDER = core.Model.from_flax(
  nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(5)]),
  jnp.zeros(federation.EXAMPLE.shape),
)


class Training(nn.Module):
  @nn.compact
  def __call__(self, x, training):
    return nn.Dropout(0.5, deterministic=not training)(x)


class Frozen(nn.Module):
  @nn.compact
  def __call__(self, x, use_running_average=True):
    return nn.BatchNorm(use_running_average)(x)


def plan_clients(**settings):
  return federation.make_plan(1, **settings)


def plan_distillation(examples=PUBLIC, **settings):
  settings = {**dict(seed=0, round=1, steps=1, batch_size=2), **settings}
  return planning.plan_distillation(examples, **settings)


def mutual(held=((0, 1), (2,)), **settings):
  settings = {**dict(seed=0, round=1, batch_size=2, epochs=1), **settings}
  return plan_mutual(held, ((0, 1),), **settings)


def parties(private=((0, 1), (2,)), **settings):
  return plan_fedmd(
    PUBLIC, private, seed=0, **{**dict(round=1, subset=4), **settings}
  )


def step(name, plan=None, data=None):
  """A first step with another plan or other data."""
  case = CASES[name]
  algorithm = case.build(None, 1)
  return algorithm.step(
    algorithm.init(jax.random.key(0)),
    plan or case.plan(1, 1),
    case.data() if data is None else data,
  )


def step_of(name, other):
  """A first step with the state of another algorithm."""
  case = CASES[name]
  state = other.init(jax.random.key(0))
  return case.build(None, 1).step(state, case.plan(1, 1), case.data())


def normed_pool():
  """A round with batches that are not full, of a model with statistics."""
  normed = algorithms.PARTIES[0].model
  clients = population.ClientPopulation.from_lists(
    algorithms.PRIVATE, [[0, 1, 2]]
  )
  plan = planning.plan_round(
    [clients],
    seed=0,
    round=1,
    clients_per_round=1,
    batch_size=2,
    full_batches=False,
  )
  algorithm = fedavg([Pool("a", normed, 0.1, 0.1)], rounds=1)
  bank = jax.device_put(dict(clients.bank))
  return algorithm.step(
    algorithm.init(jax.random.key(0)), plan, {"pools": (bank,)}
  )


def labelled(y):
  """The loss of two predictions with the labels `y`."""
  batch = {"x": 0} if y is None else {"y": y}
  return core.cross_entropy(jnp.zeros((2, 3)), batch)


def merged(pools=POOLS, distiller=None, **settings):
  settings = {**dict(alpha=0.5, rounds=1), **settings}
  return codist.merged_codist(pools, distiller or make_distiller(), **settings)


def from_lists(*assignment, **settings):
  return population.ClientPopulation.from_lists(BANK, assignment, **settings)


def unlike_pools():
  algorithm = merged([POOLS[0], Pool("wider", WIDER, 0.1, 0.1)])
  state = algorithm.init(jax.random.key(0))
  return algorithm.step(state, plan_clients(), federation.make_data())


def column_of_losses(make):
  """A loss `[B, 1]`, as in a regression whose labels have an extra axis."""
  loss = lambda logits, batch: core.cross_entropy(logits, batch)[:, None]
  return make(algorithms.MLP, loss=loss)


def pool_round(model, **settings):
  algorithm = fedavg([Pool("a", model, 0.1, 0.1, **settings)], rounds=1)
  return algorithm.step(
    algorithm.init(jax.random.key(0)),
    federation.make_plan(1, num_pools=1),
    {"pools": federation.make_data()["pools"][:1]},
  )


def mutual_round(model, **settings):
  algorithm = fml([MutualClient(model, **settings)] * 2, global_model=model)
  state = algorithm.init(jax.random.key(0))
  return algorithm.step(state, mutual(), {"train": jax.device_put(BANK)})


def one_class():
  single = core.Model.from_flax(
    nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(1)]),
    jnp.zeros(federation.EXAMPLE.shape),
  )
  return mutual_round(single, loss=lambda logits, batch: logits[:, 0])


def sequences(make, length):
  """A model with several softmaxes per example, as in a segmentation."""
  shape = (length, federation.CLASSES)
  many = core.Model.from_flax(
    nn.Sequential(
      [
        lambda x: x.reshape(len(x), -1),
        nn.Dense(length * federation.CLASSES),
        lambda x: x.reshape(len(x), *shape),
      ]
    ),
    jnp.zeros(federation.EXAMPLE.shape),
  )
  first = lambda logits, batch: core.cross_entropy(logits[:, 0], batch)
  return make(many, loss=first)


def codistil(model, **settings):
  pools = [Pool(name, model, 0.1, 0.1, **settings) for name in ("a", "b")]
  algorithm = merged(pools)
  state = algorithm.init(jax.random.key(0))
  return algorithm.step(state, plan_clients(), federation.make_data())


def bare_logits():
  model = algorithms.MLP._replace(
    apply=lambda variables, x, key, train: jnp.zeros((len(x), 3))
  )
  evaluator = evaluate.Evaluator(
    [model], {"test": population.Subset(BANK, [0])}
  )
  return evaluator([model.init(jax.random.key(0))])


def stopping_on(index):
  subset = population.Subset(algorithms.PRIVATE, np.asarray(index))
  return step("fit", data=CASES["fit"].data() | {"stopping": subset})


def unlike_clients():
  clients = [MutualClient(WIDER)] * 2
  algorithm = fml(clients, global_model=algorithms.MLP)
  state = algorithm.init(jax.random.key(0))
  return algorithm.step(state, mutual(), {"train": jax.device_put(BANK)})


def normed_round(
  held=(0, 1, 2), bank=algorithms.PRIVATE, jit=False, **settings
):
  """A round of a client with batch statistics, in batches of two."""
  normed = algorithms.PARTIES[0].model
  algorithm = fml([MutualClient(normed)], global_model=normed)
  plan = plan_mutual(
    [held], [(0,)], seed=0, round=1, batch_size=2, epochs=1, **settings
  )
  state = algorithm.init(jax.random.key(0))
  step = jax.jit(algorithm.step) if jit else algorithm.step
  return step(state, plan, {"train": jax.device_put(bank)})


def swapped_groups():
  plan = CASES["fml"].plan(1, 1)
  clients = tuple(group[::-1] for group in plan.clients)
  return step("fml", plan.replace(clients=clients))


WRONG = {
  # Values.
  "alpha=1.5: must lie between 0 and 1": lambda: merged(alpha=1.5),
  "alpha=-0.5:": lambda: merged(alpha=np.float32(-0.5)),
  "alpha=2.0:": lambda: merged(alpha=jnp.asarray(2.0)),
  "alpha='0.5': must be a number": lambda: merged(alpha="0.5"),
  "alpha=50.0:": lambda: merged(alpha=lambda t: 50.0),
  "alpha=-1.0:": lambda: merged(alpha=lambda t: 0.5 * (1 - t), rounds=3),
  "alpha=(0.9, 0.5): must be one number": lambda: merged(alpha=(0.9, 0.5)),
  "beta=[0.1 0.9]: must be one number": lambda: fml(
    [MutualClient(WIDER)] * 2, global_model=WIDER, beta=np.array([0.1, 0.9])
  ),
  "beta=1.5": lambda: fml(
    [MutualClient(WIDER)], global_model=WIDER, beta=lambda t: 1.5
  ),
  "must be a number, not a schedule": lambda: federation.make_pools(
    client_lr=optax.constant_schedule(0.1)
  ),
  "rounds=0:": lambda: fedavg(POOLS, rounds=0),
  "period=0:": lambda: codist.periodic_codist(
    POOLS, make_distiller(), period=0, rounds=1
  ),
  "temperature=-1.0": lambda: merged(
    distiller=make_distiller(temperature=-1.0)
  ),
  "label_weight=(0.5, 0.5): must be one": lambda: make_distiller(
    label_weight=(0.5, 0.5)
  ),
  "mesh: has the axes ('a', 'b'); give one": lambda: engine.Inline(
    jax.make_mesh((1, 1), ("a", "b"))
  ),
  "max_lanes=0:": lambda: engine.Inline(max_lanes=0),
  "sets: give a Mapping, not a Subset": lambda: evaluate.Evaluator(
    [POOLS[0].model], PUBLIC
  ),
  "only=['test']: give a sequence of sets' names": lambda: evaluate.Evaluator(
    [POOLS[0].model], {"test": PUBLIC}, only=["test"]
  ),
  "only: 1 for 2 models": lambda: evaluate.Evaluator(
    [pool.model for pool in POOLS[:2]], {"test": PUBLIC}, only=[["test"]]
  ),
  "label_weight=7": lambda: make_distiller(label_weight=7).hyper(2),
  "give one or 2 values": lambda: make_distiller(temperature=(1, 2, 3)).hyper(
    2
  ),
  "regularization=-1": lambda: make_distiller(regularization=-1).hyper(2),
  "client_lr=-1:": lambda: federation.make_pools(client_lr=-1),
  "name: give a str, not a Model": lambda: Pool(WIDER, "a", 0.1, 0.1),
  "server_lr=nan:": lambda: federation.make_pools(server_lr=float("nan")),
  "prox_mu=-1:": lambda: federation.make_pools(prox_mu=-1),
  "server_optimizer: give a function": lambda: federation.make_pools(
    server_optimizer=optax.adam(1e-3)
  ),
  "optimizer: give a function": lambda: fml(
    [MutualClient(WIDER)], global_model=WIDER, optimizer=optax.sgd(0.1)
  ),
  "optimizer: give a function of": lambda: make_distiller(
    optimizer=optax.adam(1e-3)
  ).hyper(2),
  "its state holds the learning rate": lambda: federation.make_pools(
    server_optimizer=optax.inject_hyperparams(optax.sgd)
  ),
  "weights: 3 for 2 scores": lambda: consensus(
    jnp.zeros((2, 4, 3)), jnp.ones(3)
  ),
  "prox_mu: not all pools have this": lambda: with_hyper(
    fedavg([POOLS[0], *federation.make_pools(prox_mu=0.1)[1:]], rounds=1).init(
      jax.random.key(0)
    ),
    prox_mu=0.2,
  ),
  "at least 2, each with a different name": lambda: merged(POOLS[:1]),
  "at least 1, each with a different name": lambda: fedavg(
    [POOLS[0]] * 2, rounds=1
  ),
  "client_LR: this state has no such": lambda: with_hyper(
    merged().init(jax.random.key(0)), client_LR=1.0
  ),
  # Who holds what.
  "assignment[0]: positions must be integers, not bool; give np.flat": (
    lambda: from_lists(BANK["y"] == 0)
  ),
  "assignment[1]: positions must be integers, not float64": (
    lambda: from_lists([0], [0.5])
  ),
  "client '0': position": lambda: from_lists([0, 999]),
  "client '1' holds no examples": lambda: from_lists([0], []),
  "client '1': position 999 is outside": lambda: from_lists([7], [3, 999], [9]),
  "give each client's positions, not one number": lambda: (
    population.ClientPopulation.from_lists(BANK, BANK["y"])
  ),
  "bank: give arrays by name": lambda: population.Subset.whole(
    (BANK["x"], BANK["y"])
  ),
  "ids: of shape (3,) for a bank of": lambda: (
    population.ClientPopulation.from_ids(BANK, ["a", "b", "b"])
  ),
  "set 0: give the sets one by one": lambda: population.put_banks(
    [PUBLIC, PUBLIC]
  ),
  "set 0: bank['id'] is of type <U1": lambda: population.put_banks(
    population.Subset.whole({"id": np.array(["a", "b"])})
  ),
  "the clients' are ['a', 'b']; give each client's Subset": lambda: plan_mutual(
    from_lists([0], [1]),
    [MutualClient(WIDER, bank=name) for name in "ab"],
    seed=0,
    round=1,
    batch_size=1,
    epochs=1,
  ),
  "examples.index: position": lambda: plan_distillation(
    population.Subset(PUBLIC.bank, np.arange(24, 30))
  ),
  "examples.index: positions must be integers": lambda: plan_distillation(
    population.Subset(PUBLIC.bank, PUBLIC.bank["y"] == 0)
  ),
  "examples: there are none": lambda: plan_distillation(
    population.Subset(PUBLIC.bank, np.arange(0))
  ),
  "examples: give a Subset, not a bare bank": lambda: plan_distillation(BANK),
  "pool 0: give a ClientPopulation, not a bare bank": lambda: (
    planning.plan_clients(
      BANK, seed=0, round=1, clients_per_round=1, batch_size=1
    )
  ),
  "public: give a Subset": lambda: plan_fedmd(
    BANK, ((0,),), seed=0, round=1, subset=1
  ),
  "set 1: give a Subset": lambda: population.put_banks(PUBLIC, BANK),
  "test: give a Subset": lambda: evaluate.Evaluator(
    [POOLS[0].model], {"test": BANK}
  ),
  "stopping: give a Subset": lambda: step(
    "fit", data=CASES["fit"].data() | {"stopping": BANK}
  ),
  "client 0: positions outside the bank: -1": lambda: mutual(((-1, 0), (1,))),
  # Plans.
  "weights=[1, 0]: must be positive": lambda: pack_lanes(
    [np.zeros((1, 2), np.int32)] * 2, [0, 1], [1, 0], num_lanes=1
  ),
  "pool 1 has no clients": lambda: planning.plan_clients(
    from_lists(), seed=0, round=1, pool=1, clients_per_round=1, batch_size=1
  ),
  "clients_per_round=10: pool 0 has 9": lambda: plan_clients(
    clients_per_round=10
  ),
  "batch_size=0:": lambda: plan_clients(batch_size=0),
  "batch_size=None: must be a whole number": lambda: plan_clients(
    batch_size=None
  ),
  "clients_per_round=None: must be": lambda: plan_clients(
    clients_per_round=None
  ),
  "alpha=None: must be a number": lambda: merged(alpha=None),
  "server_lr=inf: must be finite, at least 0": lambda: federation.make_pools(
    server_lr=np.inf
  ),
  "seed='2': must be a whole number, at least 0": lambda: mutual(seed="2"),
  "seed=-1: must be": lambda: plan_distillation(seed=-1),
  "seed=True: must be": lambda: planning.plan_clients(
    federation.POPULATION,
    seed=True,
    round=1,
    clients_per_round=1,
    batch_size=1,
  ),
  "client_optimizer is called with (learning_rate) here, but takes ()": (
    lambda: federation.make_pools(client_optimizer=lambda: optax.sgd(0.1))
  ),
  "max_steps=0:": lambda: plan_clients(max_steps=0),
  "round=0:": lambda: federation.make_plan(0),
  "steps=0:": lambda: plan_distillation(steps=0),
  "client 1 holds no examples": lambda: mutual(((0, 1), ())),
  "epochs=0:": lambda: mutual(epochs=0),
  "client 0: positions must be integers": lambda: mutual(
    (BANK["y"] == 0, (1,))
  ),
  "must contain each of the 3 clients": lambda: mutual(((0,), (1,), (2,))),
  "plan_mutual with full_batches=True": normed_round,
  "would enter the batch statistics": lambda: normed_round(jit=True),
  "public: position": lambda: plan_fedmd(
    PUBLIC._replace(index=np.arange(9, 99)), ((0,),), seed=0, round=1, subset=4
  ),
  "subset=99: exceeds the 24 public": lambda: parties(subset=99),
  "digest_epochs=0:": lambda: parties(digest_epochs=0),
  "client 0 holds no examples": lambda: parties(((), (1,))),
  # Steps.
  "the plan is for 1 pools, but there are 2": lambda: step(
    "merged", federation.make_plan(1, num_pools=1)
  ),
  "the state is of 1 pools, but there are 2": lambda: step_of(
    "fedavg", fedavg(federation.make_pools(1), rounds=1)
  ),
  "the state is of 3 pools, but there are 2": lambda: step_of(
    "merged", merged(federation.make_pools(3))
  ),
  "state: has no hyper-parameter 'distill_lr'": lambda: step_of(
    "periodic", CASES["fedavg"].build(None, 1)
  ),
  "state: has no hyper-parameter 'alpha'": lambda: step_of(
    "merged", CASES["periodic"].build(None, 1)
  ),
  "state of pool 'pool0': has no hyper-parameter 'prox_mu'": lambda: fedavg(
    federation.make_pools(prox_mu=0.1), rounds=1
  ).step(
    CASES["fedavg"].build(None, 1).init(jax.random.key(0)),
    federation.make_plan(1),
    federation.make_data(),
  ),
  "state: give a PoolsState, not a MutualState": lambda: step_of(
    "fedavg", CASES["fml"].build(None, 1)
  ),
  "state: give a MutualState, not a PoolsState": lambda: step_of(
    "fml", CASES["fedavg"].build(None, 1)
  ),
  "the state groups clients as ((0,),), but": lambda: step_of(
    "fml", fml([MutualClient(WIDER)], global_model=WIDER)
  ),
  "state: has no hyper-parameter 'alpha', so": lambda: step_of(
    "fml", independent(algorithms.MUTUAL)
  ),
  "the state is of 1 parties, but there are 3": lambda: step_of(
    "fedmd", fedmd(algorithms.PARTIES[:1])
  ),
  "state: give a FitState, not a FedMDState": lambda: step_of(
    "fit", CASES["fedmd"].build(None, 1)
  ),
  "pool 'a': the plan has batches that are not full": normed_pool,
  "data has no 'pools'": lambda: step("fedavg", data={"pool": 1}),
  "data['pools']: must be a sequence of 2 banks, one per pool or party, not": (
    lambda: step("fedavg", data={"pools": {"x": 1, "y": 2}})
  ),
  "must be a sequence of 3 banks, one per pool or party, not of 1": (
    lambda: step("fedmd", data={"public": BANK, "private": [BANK]})
  ),
  "data has no 'distill'": lambda: step(
    "periodic", data={"pools": federation.make_data()["pools"]}
  ),
  "data has no 'train'": lambda: step("fml", data={}),
  "the plan groups clients as ((3, 2, 0)": swapped_groups,
  "bank has an array named 'mask'": lambda: step(
    "fit", data={"train": ({**algorithms.PRIVATE, "mask": np.ones(11)},) * 3}
  ),
  "distill=None:": lambda: planning.localize(
    federation.make_plan(1), [federation.POPULATION] * 2
  ),
  "stopping: positions must be integers, not bool": lambda: stopping_on(
    algorithms.PRIVATE["y"] == 0
  ),
  "stopping: position": lambda: stopping_on([3, 99]),
  "stopping: there are no examples": lambda: stopping_on([]),
  "data has no 'private'": lambda: step("fedmd", data={"public": BANK}),
  "data['public']: give a bank, arrays by name, not a Subset": lambda: step(
    "fedmd", data={"public": PUBLIC, "private": [BANK] * 3}
  ),
  "data: give a dict with 'pools', not a list": lambda: step("fedavg", data=[]),
  "data['pools'][1]: give a bank, arrays by name, not a ClientPop": (
    lambda: step("fedavg", data={"pools": [BANK, from_lists([0])]})
  ),
  "must be a sequence of 2 banks, one per pool or party, not a Client": (
    lambda: step("fedavg", data={"pools": from_lists([0])})
  ),
  "bank: arrays of different lengths {'x': 3, 'y': 2}": lambda: core.gather(
    {"x": jnp.zeros(3), "y": jnp.zeros(2)}, jnp.array([0])
  ),
  "examples: give a Subset, not a ClientPopulation; population.examples()": (
    lambda: plan_distillation(from_lists([0]))
  ),
  "pool 0: give a ClientPopulation, not a Subset": lambda: (
    planning.plan_clients(
      PUBLIC, seed=0, round=1, clients_per_round=1, batch_size=1
    )
  ),
  "clients: give a ClientPopulation, not a Subset": lambda: mutual(PUBLIC),
  "client 0: positions of shape (); give int[n] for one client": lambda: mutual(
    np.arange(4)
  ),
  "plans: must have the same number of pools, not 1 and 2": lambda: (
    planning.stack_plans(
      [plan_clients(), plan_clients()._replace(pools=plan_clients().pools[:1])]
    )
  ),
  "plans[1], beside plans[0]: lacks .distill": lambda: planning.stack_plans(
    [plan_clients(), plan_clients()._replace(distill=None)]
  ),
  "plans[1]: give a RoundPlan, not a tuple": lambda: planning.stack_plans(
    [plan_clients(), ()]
  ),
  "pools: has length 1, but the plan is for 2": lambda: planning.localize(
    plan_clients(), [from_lists([0])]
  ),
  "expected_length=-5.0: must be finite, at least": lambda: (
    next_word.sentence_loss(-5.0)
  ),
  "model's outputs must be an array float[..., C], not a TokenL": lambda: (
    core.cross_entropy(TOKENS, {"y": jnp.zeros((1, 2), int)})
  ),
  "outputs must be an array float[..., C], not a TokenLogits": lambda: (
    evaluate.classification(TOKENS, {"y": jnp.zeros((1, 2), int)})
  ),
  "must be an array float[..., C], not a TokenLogits": lambda: mutual_loss(
    TOKENS, TOKENS, jnp.zeros(1), weight=0.5
  ),
  "next-word losses and metrics need TokenLogits": lambda: (
    next_word.next_word_metrics(jnp.zeros((1, 2, 5)), {})
  ),
  "batch['y'] of shape (1, 3) for outputs at (1, 2) positions": lambda: (
    next_word.next_word_metrics(
      dataclasses.replace(TOKENS, chunk=2),
      {"y": jnp.ones((1, 3), int), "mask": jnp.ones(1)},
    )
  ),
  "batch['y'] of shape (1, 1) for outputs at (1, 2) positions": lambda: (
    next_word.sentence_loss()(
      TOKENS, {"y": jnp.ones((1, 1), int), "mask": jnp.ones(1)}
    )
  ),
  "next-word losses and metrics need TokenLogits(features": lambda: (
    next_word.token_divergence(
      TOKENS,
      [jnp.zeros((1, 2, 5))],
      TOKENS,
      WORDS,
      None,
      temperatures=[1.0],
      regularization=0.0,
    )
  ),
  "Language models need Pool(loss=sentence_loss()), Distiller(": lambda: (
    distill.Distiller().predictor(
      core.Model(lambda key: None, lambda v, x, key, train: (TOKENS, {}))
    )(
      core.Variables({}, {}),
      jax.random.key(0),
      {"x": jnp.zeros((1, 2), int)},
      (np.arange(1), np.zeros((1, 1), int)),
    )
  ),
  "weights of shape (1,) for outputs at (1, 2) positions": lambda: (
    next_word.token_divergence(
      TOKENS,
      [TOKENS],
      TOKENS,
      WORDS,
      jnp.ones(1),
      temperatures=[1.0],
      regularization=0.0,
    )
  ),
  "not outputs of shape (8,); use 'mae'": lambda: TRANSLATORS["kl"].scores(
    jnp.zeros(8), 1.0
  ),
  "loss: returned a scalar": lambda: mutual_loss(
    jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.zeros(()), weight=0.5
  ),
  "labels of shape (4, 2)": lambda: population.stratified(
    np.zeros((4, 2)), size=2, seed=0
  ),
  "outputs of shapes (8, ": unlike_pools,
  "outputs of shapes (2, ": unlike_clients,
  "trained: has length 1, expected 3; [p.trained for p": lambda: fedmd(
    algorithms.PARTIES
  ).init(jax.random.key(0), [None]),
  "trained[0]: give a Trained, not a Learner; [p.trained for p": lambda: fedmd(
    algorithms.PARTIES
  ).init(
    jax.random.key(0),
    party.fit(algorithms.PARTIES).init(jax.random.key(0)).parties,
  ),
  "variables: give a sequence of 3, each a Variables, not a Var": lambda: (
    party.fit(algorithms.PARTIES).init(
      jax.random.key(0), core.Variables({}, {})
    )
  ),
  "data['stoping']: unknown name; give 'train'": lambda: step(
    "fit", data={"train": (), "stoping": None}
  ),
  "a loss of shape (3, 1) on 3": lambda: column_of_losses(pool_round),
  "a loss of shape (2, 1) on 2": lambda: column_of_losses(mutual_round),
  "the softmax over one class is always 1": one_class,
  # As many softmaxes as examples, which could be mistaken for them.
  "with losses of shape (2,): mutual": lambda: sequences(mutual_round, 2),
  "Distiller.weights must return shape (8, 8)": lambda: sequences(codistil, 8),
  "but the loss takes labels 'y'": lambda: labelled(None),
  "batch['y'] is float32 of shape (2, 3)": lambda: labelled(jnp.eye(3)[:2]),
  "batch['y'] is int32 of shape (2, 1)": lambda: labelled(
    jnp.array([[0], [1]])
  ),
  # One where a sequence is expected.
  "pools: give a sequence, such as [pools]": lambda: fedavg(POOLS[0], rounds=1),
  "parties: give a sequence": lambda: fedmd(algorithms.PARTIES[0]),
  "clients: give a sequence": lambda: independent(MutualClient(POOLS[0].model)),
  "client 0 is a Model, not a MutualClient": lambda: independent(
    [POOLS[0].model]
  ),
  "models: give a sequence": lambda: evaluate.Evaluator(
    POOLS[0].model, {"test": PUBLIC}
  ),
  "variables: give a sequence": lambda: evaluate.Evaluator(
    [POOLS[0].model] * 2, {"test": PUBLIC}
  )(core.Variables({}, {})),
  "offsets: from 0 to 2, want 0 to 4": lambda: population.ClientPopulation(
    BANK, np.arange(4), np.array([0, 2]), ("a",)
  ),
  "clients_per_round=1.5: must be a whole number": lambda: plan_clients(
    clients_per_round=1.5
  ),
  "batch_size=True: must be a whole number": lambda: plan_clients(
    batch_size=True
  ),
  "client_lr: an array of shape (3,); give one value, or an": lambda: (
    with_hyper(merged().init(jax.random.key(0)), client_lr=jnp.ones(3))
  ),
  "the plan is for 1 parties, but there are 3": lambda: party.fit(
    algorithms.PARTIES
  ).step(
    party.fit(algorithms.PARTIES).init(jax.random.key(0)),
    party.plan_fit([[0]], seed=0, phase=0, round=1, batch_size=1),
    {"train": (algorithms.PRIVATE,) * 3},
  ),
  # Models.
  "global_model: give a Model, not a NoneType": lambda: fml(
    [MutualClient(WIDER)], global_model=None
  ),
  "global_model: give a Model, not a Dense": lambda: fml(
    [MutualClient(WIDER)], global_model=nn.Dense(3)
  ),
  "example=(1, 32): give an input": lambda: core.Model.from_flax(
    nn.Dense(3), (1, 32)
  ),
  "a transform is a Model: give a function": lambda: core.prepare(
    WIDER, {"x": jnp.ones(3), "mask": jnp.ones(3)}
  ),
  "client 0's adaptor: give a Model, not a Dense": lambda: fml(
    [MutualClient(WIDER, adaptor=nn.Dense(3))], global_model=WIDER
  ),
  "client 0's encoder: give a Model, not a Dense": lambda: fml(
    [MutualClient(WIDER, encoder=nn.Dense(3))], global_model=WIDER
  ),
  "models[1]: give a Model, not a Dense": lambda: evaluate.Evaluator(
    [POOLS[0].model, nn.Dense(3)], {"test": PUBLIC}
  ),
  "rate=1.0: must be at least 0 and below 1": lambda: layers.Dropout(1.0).apply(
    {}, jnp.ones(3), True
  ),
  "a map of 1x4 is too small for 2x2 pooling": lambda: convolution.max_pool_2x2(
    jnp.ones((1, 1, 4, 1))
  ),
  "a transform is called with (key, batch) here, but takes (b)": lambda: (
    pool_round(algorithms.MLP, transform=lambda b: b)
  ),
  "a transform is called with (batch) here, but takes (key, b)": lambda: (
    evaluate.Evaluator(
      [algorithms.MLP], {"test": PUBLIC}, transform=lambda key, b: b
    )([algorithms.MLP.init(jax.random.key(0))])
  ),
  "plans: give at least one": lambda: planning.stack_plans([]),
  "no global model, so there are no memes": lambda: (
    independent([MutualClient(WIDER)]).init(jax.random.key(0)).meme(0)
  ),
  "images of float32: want uint8 pixels": lambda: augment.normalize(
    jnp.ones((2, 1)), (0.5,), (0.25,)
  ),
  "pool 'p': give a Model, not a Dense; Model.from_flax": lambda: Pool(
    "p", nn.Dense(3), 1.0, 1.0
  ),
  "int is not a Flax Linen module": lambda: core.Model.from_flax(
    3, jnp.zeros(1)
  ),
  "Training takes 'training'": lambda: core.Model.from_flax(
    Training(), jnp.zeros((1, 2))
  ),
  "Frozen takes 'use_running_average'": lambda: core.Model.from_flax(
    Frozen(), jnp.zeros((1, 2))
  ),
  "apply must return a pair, (logits, stats)": bare_logits,
  "a model's init returned a dict: it must return Variables": lambda: (
    pool_round(algorithms.MLP._replace(init=lambda key: {}))
  ),
  "a model's apply returned stats of structure": lambda: pool_round(
    algorithms.MLP._replace(
      apply=lambda variables, x, key, train: (jnp.zeros((len(x), 3)), None)
    )
  ),
  "a transform returned a NoneType, not a batch": lambda: pool_round(
    POOLS[0].model, transform=lambda key, batch: None
  ),
  "a batch holds ['mask', 'y']": lambda: step(
    "fit", data={"train": ({"y": jnp.zeros(11, jnp.int32)},) * 3}
  ),
  "no set 'tset'": lambda: evaluate.Evaluator(
    [POOLS[0].model], {"test": PUBLIC}, only=[["tset"]]
  ),
  "test: positions must be integers": lambda: evaluate.Evaluator(
    [POOLS[0].model], {"test": PUBLIC._replace(index=[True, False])}
  ),
  "variables: has length 1, expected 2": lambda: evaluate.Evaluator(
    [POOLS[0].model] * 2, {"test": PUBLIC}
  )([None]),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_makes_no_sense_is_refused(message):
  with pytest.raises(ValueError) as error:
    WRONG[message]()
  assert message in str(error.value)


@pytest.mark.parametrize("name", ["alpha", "beta", "learning_rate"])
def test_a_schedule_that_leaves_its_range_gives_no_numbers(name):
  clients = [MutualClient(algorithms.MLP)] * 2
  # By rounding 1 may become a little more, which is no reason.
  values = jnp.array([0.0, 1 + 1e-6, -0.2])
  schedule = lambda t: values[jnp.asarray(t) - 1]
  algorithm = fml(
    clients, global_model=algorithms.MLP, **{"beta": 1.0, name: schedule}
  )
  state = algorithm.init(jax.random.key(0))
  for t in range(1, 4):
    state, _ = jax.jit(algorithm.step)(
      state, mutual(round=t), {"train": jax.device_put(BANK)}
    )
    models = state.server, state.groups[0].local
    finite = [np.isfinite(leaf).all() for leaf in jax.tree.leaves(models)]
    assert all(finite) == (t < 3)


def test_full_batches_keep_others_from_batch_statistics():
  held = (3, 4, 5)  # Example 0 is nobody's.
  statistics = []
  for scale in (1, 1000):
    bank = dict(algorithms.PRIVATE, x=algorithms.PRIVATE["x"].copy())
    bank["x"][0] *= scale
    state, _ = normed_round(held, bank, full_batches=True)
    statistics.append(state.server.stats)
  jax.tree.map(np.testing.assert_array_equal, *statistics)


@pytest.mark.parametrize("name", ["fedavg", "fml"])
def test_an_example_that_nobody_holds_may_be_anything(name):
  """Empty places hold an example of the batch, not the bank's first."""
  bank = dict(BANK, x=BANK["x"].copy())
  bank["x"][0] = np.nan
  if name == "fml":
    model = MutualClient(algorithms.MLP)
    algorithm = fml([model] * 2, global_model=algorithms.MLP)
    plan = mutual(((1, 2, 3), (4,)))
    data = {"train": jax.device_put(bank)}
  else:
    algorithm = fedavg(POOLS[:1], rounds=1)
    batches = [np.array([[1, 2], [3, -1]], np.int32), np.array([[4, 5]])]
    # Two lanes of different lengths, side by side.
    lanes = pack_lanes(batches, [0, 1], [3, 2], num_lanes=2)
    plan = planning.RoundPlan(np.int32(1), (lanes,), None)
    data = {"pools": (jax.device_put(bank),)}
  state = algorithm.init(jax.random.key(0))
  state, metrics = jax.jit(algorithm.step)(state, plan, data)
  chex.assert_tree_all_finite(state.replace(key=None))
  assert all(np.isfinite(mean.value) for mean in metrics.values())


def test_labels_that_are_no_class_show():
  batch = {"y": jnp.array([-1, 0, 2])}
  losses = core.cross_entropy(jnp.zeros((3, 2)), batch)
  assert np.isnan(losses).tolist() == [True, False, True]
  # And do not train a model unseen.
  total = lambda logits: core.cross_entropy(logits, batch).sum()
  grads = jax.grad(total)(jnp.zeros((3, 2)))
  assert np.isnan(grads).all(axis=1).tolist() == [True, False, True]
  head = jnp.zeros((1, 5)), jnp.zeros(5)
  for y, chunk in ((-1, None), (-1, 2), (5, None), (5, 2), (4, 2)):
    words = next_word.TokenLogits(jnp.zeros((1, 2, 1)), *head, chunk)
    batch = {"y": jnp.array([[3, y]]), "mask": jnp.ones(1)}
    assert np.isnan(next_word.sentence_loss()(words, batch)) == (y != 4)
    means = next_word.next_word_metrics(words, batch)
    assert np.isnan(means["loss"].value) == (y != 4)


@pytest.mark.parametrize("y", [-1, 2])
def test_labels_of_distillation_that_are_no_class_show(y):
  target = distill.label_target(jnp.zeros((2, 2)), {"y": jnp.array([1, y])})
  assert np.isnan(target).any(-1).tolist() == [False, True]
  bank = {"x": jnp.ones((2, 2)), "y": jnp.array([1, y])}
  linear = core.Model(None, lambda v, x, key, train: (x @ v.params, {}))
  student = make_distiller(label_weight=0.5).student([linear] * 2, 0)
  variables = core.Variables(jnp.zeros((2, 2)), {})
  views = [(variables, jnp.zeros((1, 2, 2)))] * 2
  _, loss = student(
    variables,
    make_distiller().hyper(2),
    1.0,
    jax.random.key(0),
    bank,
    jnp.zeros(1, jnp.int32),
    jnp.array([[0, 1]]),
    views,
  )
  assert np.isnan(loss.value)


def test_a_model_that_says_nan_is_right_about_nothing():
  logits = jnp.array([[jnp.nan, jnp.nan], [2.0, 1.0], [1.0, jnp.nan]])
  batch = {"y": jnp.zeros(3, jnp.int32), "mask": jnp.ones(3)}
  means = evaluate.classification(logits, batch)
  assert means["accuracy"].value == pytest.approx(1 / 3)
  first = next_word.EOS + 1
  head = jnp.full((1, 6), jnp.nan), jnp.zeros(6)
  for chunk in (None, 2):
    words = next_word.TokenLogits(jnp.ones((1, 2, 1)), *head, chunk)
    batch = {"y": jnp.array([[0, first]]), "mask": jnp.ones(1)}
    means = next_word.next_word_metrics(words, batch)
    assert means["accuracy"].total == means["accuracy_no_eos"].total == 0


def test_a_party_of_weight_zero_is_not_heard():
  nan = jnp.full((2, 3), jnp.nan)
  z = jnp.arange(6.0).reshape(2, 3)
  np.testing.assert_array_equal(consensus([nan, z], jnp.array([0.0, 2.0])), z)
  assert np.isnan(consensus([nan, z], jnp.array([0.1, 2.0]))).all()


def test_float16_gradients_keep_their_length():
  """Merging with alpha 0 keeps the norm of g, whose squares underflow."""
  g = jnp.array([1e-4], jnp.float16)
  merged = codist.merge_gradients(g, g, alpha=0.0)
  np.testing.assert_allclose(merged, g.astype(jnp.float32), rtol=1e-6)


@pytest.mark.parametrize("name", ["fml", "merged"])
def test_microbatches_of_half_precision_add_up_in_float32(name):
  """256 terms below half a unit of the sum's last place would all be lost."""

  class Half(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = x.reshape(len(x), -1).astype(jnp.bfloat16)
      dense = nn.Dense(3, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
      return dense(x).astype(jnp.float32)

  half = core.Model.from_flax(Half(), jnp.zeros(federation.EXAMPLE.shape))
  # The same example 512 times.
  bank = jax.tree.map(lambda a: jnp.repeat(a[:1], 512, axis=0), BANK)
  every = np.arange(512)

  def moved(microbatch):
    if name == "fml":
      algorithm = fml(
        [MutualClient(half)], global_model=half, microbatch=microbatch
      )
      plan = plan_mutual(
        [every], [(0,)], seed=0, round=1, batch_size=512, epochs=1
      )
      state = algorithm.init(jax.random.key(0))
      after, _ = jax.jit(algorithm.step)(state, plan, {"train": bank})
      return after.server.params, state.server.params
    distiller = make_distiller(microbatch=microbatch, optimizer=optax.sgd)
    student = distiller.student([half] * 2, 0)
    start = half.init(jax.random.key(0))
    other = half.init(jax.random.key(1))
    hyper = distiller.hyper(2) | {"distill_lr": jnp.ones(2)}
    args = (jax.random.key(0), bank, jnp.zeros(1, jnp.int32), every[None])
    views = [
      (v, distiller.predictor(half)(v, *args[:2], args[2:]))
      for v in (start, other)
    ]
    after, _ = jax.jit(student)(start, hyper, 1.0, *args, views)
    return after.params, start.params

  whole, start = moved(None)
  parts, _ = moved(2)
  kernels = [jax.tree.leaves(p)[1] for p in (whole, parts, start)]
  a, b, c = (np.asarray(k, np.float32) for k in kernels)
  assert np.abs(a - c).max() > 1e-3
  np.testing.assert_allclose(b - c, a - c, atol=0.02 * np.abs(a - c).max())


@pytest.mark.parametrize("array", [jnp.asarray, np.asarray])
@pytest.mark.parametrize("name", ["fedavg", "fml", "fedmd", "fit"])
def test_weights_that_a_model_holds_outlive_donation(name, array):
  """All pools, or parties, begin with the same arrays; then another seed."""
  of_parties = name in ("fedmd", "fit")
  base = algorithms.PARTIES[0].model if of_parties else algorithms.MLP
  start = jax.tree.map(array, base.init(jax.random.key(0)))
  held = core.Model(lambda key: start, base.apply)
  parties = [
    party.Party(p.name, held, learning_rate=0.1) for p in algorithms.PARTIES
  ]
  clients = [MutualClient(held)] * len(algorithms.SIZES)
  case, plan, algorithm = {
    "fedavg": lambda: (
      CASES["fedavg"],
      plan_clients(),
      fedavg([Pool(n, held, 0.1, 0.1) for n in "ab"], rounds=None),
    ),
    "fml": lambda: (
      CASES["fml"],
      plan_mutual(
        algorithms.POPULATION,
        group_clients(clients),
        seed=0,
        round=1,
        batch_size=2,
        epochs=1,
      ),
      fml(clients, global_model=held),
    ),
    "fedmd": lambda: (CASES[name], CASES[name].plan(1, 1), fedmd(parties)),
    "fit": lambda: (CASES[name], CASES[name].plan(1, 1), party.fit(parties)),
  }[name]()
  step = engine.Inline().compile(algorithm.step, donate=(0,))
  for seed in (0, 1):
    state = algorithm.init(jax.random.key(seed))
    for _ in range(2):
      state, _ = step(state, plan, case.data())
  assert np.isfinite(np.asarray(jax.tree.leaves(start.params)[0])).all()


@pytest.mark.parametrize("classes", [10, 1000])
def test_divergences_of_half_precision_are_taken_in_float32(classes):
  """Of models that nearly agree, where differences are mostly rounding."""
  key, other = jax.random.split(jax.random.key(0))
  z = jax.random.normal(key, (64, classes)).astype(jnp.bfloat16)
  t = z + 0.05 * jax.random.normal(other, z.shape).astype(jnp.bfloat16)
  batch = {"y": jnp.arange(64) % classes}

  def both(z, t):
    kl = lambda z: mutual_loss(z, t, core.cross_entropy(z, batch), weight=0.0)[
      0
    ].sum()
    target = distill.codist_target(
      [t], z, temperatures=[0.5], regularization=0.25
    )
    student = lambda z: distill.kl_divergence(target, z).sum()
    digest = lambda z: squared_error(z, t).sum() + absolute_error(z, t).sum()
    return [jax.value_and_grad(f)(z) for f in (kl, student, digest)]

  exact = both(z.astype(jnp.float32), t.astype(jnp.float32))
  for (value, grad), (want, want_grad) in zip(both(z, t), exact):
    assert value.dtype == jnp.float32 and grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(value, want, rtol=1e-5)
    # A gradient itself is rounded to bfloat16, 8 bits.
    error = jnp.linalg.norm(grad.astype(jnp.float32) - want_grad)
    assert error < 0.01 * jnp.linalg.norm(want_grad)


def test_labels_stand_beside_the_teachers():
  """(1 - r) [(1 - v) t + v y] + r s with r = v = 1/4, by hand."""
  t, s = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.75]]))
  labels = distill.label_target(t, {"y": jnp.array([0])})
  target = distill.codist_target(
    [t], s, labels, temperatures=[1.0], regularization=0.25, label_weight=0.25
  )
  # 3/4 (3/4 1/2 + 1/4) + 1/4 1/4 = 17/32, and 3/4 3/8 + 3/16 = 15/32.
  np.testing.assert_allclose(target, [[17 / 32, 15 / 32]], rtol=1e-6)


def test_a_party_that_has_not_begun_is_finite():
  state = party.fit(algorithms.PARTIES).init(jax.random.key(0))
  assert trials.all_finite(state)


def test_there_is_no_client_below_zero():
  with pytest.raises(IndexError, match="client -1 does not exist: there are 1"):
    from_lists([0]).client(-1)


def test_means_add_up():
  total = core.Mean(1.0, 2.0) + core.Mean(3.0, 6.0) + core.Mean.zero()
  assert total.value == 0.5 and isinstance(total, core.Mean)


def test_generators_of_pools_and_parties_are_sequences():
  key = jax.random.key(0)
  assert len(fedavg(iter(POOLS), rounds=1).init(key).pools) == len(POOLS)
  parties = algorithms.PARTIES
  assert len(party.fit(iter(parties)).init(key).parties) == len(parties)


def test_classes_that_all_models_mask_say_nothing():
  """Logits of minus infinity make different numbers of classes equal."""
  z = jnp.array([[1.0, 0.0, -jnp.inf]])
  w = jnp.array([[0.0, 0.0, -jnp.inf]])
  part = lambda a: a[:, :2]

  def kl(student, teacher):
    return distill.kl_divergence(jax.nn.softmax(teacher), student).sum()

  for loss, scale in (
    (kl, 1),
    # Means, over three classes instead of two.
    (lambda a, b: absolute_error(a, b).sum(), 2 / 3),
    (lambda a, b: squared_error(a, b).sum(), 2 / 3),
  ):
    value, grad = jax.value_and_grad(loss)(z, w)
    expected, expected_grad = jax.value_and_grad(loss)(part(z), part(w))
    np.testing.assert_allclose(value, scale * expected, rtol=1e-6)
    np.testing.assert_allclose(part(grad), scale * expected_grad, rtol=1e-6)
    assert grad[0, 2] == 0


def test_whole_numbers_among_statistics_are_warned_of(caplog):
  class Counter(nn.Module):
    @nn.compact
    def __call__(self, x):
      self.variable("stats", "count", lambda: jnp.zeros((), jnp.int32))
      return nn.Dense(2)(x)

  model = core.Model.from_flax(Counter(), jnp.zeros((1, 3)))
  with caplog.at_level("WARNING", logger="absl"):
    Pool("p", model, 0.1, 0.1).init(jax.random.key(0))
  assert "['count'] is int32: the mean over clients" in caplog.text


def test_a_module_without_parameters_is_a_model():
  model = core.Model.from_flax(nn.Sequential([nn.relu]), jnp.zeros((1, 3)))
  assert model.init(jax.random.key(0)).params == {}


def test_mixup_keeps_the_type_of_inputs():
  """Else the type of a student's statistics changes in the middle of a scan."""
  x = jnp.arange(4, dtype=jnp.bfloat16)
  weight = distill.symmetric_beta(jax.random.key(0), 2, (4,))
  assert distill.mixup(x, weight).dtype == jnp.bfloat16
  with jax.enable_x64(True):
    for beta in (2, 0.5):
      draws = distill.symmetric_beta(jax.random.key(0), beta, (4,))
      assert draws.dtype == jnp.float32


def test_parameters_are_float32_in_x64_mode_too():
  with jax.enable_x64(True):
    for module, x in (
      (layers.Conv(2, (3, 3)), jnp.zeros((1, 8, 8, 1), jnp.float32)),
      (
        layers.Conv(2, (3, 3), form="planes", pool=True),
        jnp.zeros((1, 8, 8, 1), jnp.float32),
      ),
      (
        language.LSTMLanguageModel(9, 4, 6, 1, chunk=4),
        jnp.zeros((1, 3), jnp.int32),
      ),
    ):
      shapes = jax.eval_shape(module.init, jax.random.key(0), x)
      types = {leaf.dtype for leaf in jax.tree.leaves(shapes["params"])}
      assert types == {jnp.dtype(jnp.float32)}, module


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_chunks_of_narrow_parameters_are_the_whole(dtype):
  """Gradients of the chunked loss, in the parameters' types."""
  draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
  arrays = draw(0, 2, 3, 4), draw(1, 4, 6), draw(2, 6)
  batch = {"y": jnp.array([[3, 4, 2], [5, 2, 0]]), "mask": jnp.ones(2)}

  def grads(dtype, chunk):
    def loss(arrays):
      logits = next_word.TokenLogits(*arrays, chunk)
      return next_word.sentence_loss()(logits, batch)

    cast = jax.tree.map(lambda a: a.astype(dtype), arrays)
    return jax.value_and_grad(loss)(cast)

  ours, exact = grads(dtype, 2), grads(jnp.float32, None)
  assert all(g.dtype == dtype for g in ours[1])
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=0.02), ours, exact
  )


def test_inputs_may_be_a_tree():
  """Two inputs under names do what one array of them does."""
  half = lambda x: {"left": x[:, :1], "right": x[:, 1:]}
  whole = lambda x: jnp.concatenate([x["left"], x["right"]], axis=1)
  model = algorithms.DENSE_TRUNK
  split = model._replace(
    apply=lambda v, x, key, train: model.apply(v, whole(x), key, train)
  )
  ends = []
  for net, prepare in (
    (model, lambda key, batch: batch),
    (split, lambda key, batch: {**batch, "x": half(batch["x"])}),
  ):
    client = MutualClient(net, transform=prepare)
    mutually = fml([client] * 2, global_model=net, microbatch=1)
    pools = [Pool(n, net, 0.1, 0.1, transform=prepare) for n in ("a", "b")]
    distiller = distill.Distiller(transform=prepare, mixup_beta=2, microbatch=2)
    codistilling = merged(pools, distiller)
    for algorithm, plan, data in (
      (mutually, mutual(), {"train": jax.device_put(BANK)}),
      (codistilling, plan_clients(), federation.make_data()),
    ):
      state = algorithm.init(jax.random.key(0))
      state, _ = jax.jit(algorithm.step)(state, plan, data)
      ends.append(state.replace(key=None))
  for one, other in zip(ends[:2], ends[2:]):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
      one,
      other,
    )


def test_clients_of_unhashable_transforms_are_grouped():
  @dataclasses.dataclass
  class Scale:
    factor: float

    def __call__(self, key, batch):
      return {**batch, "x": self.factor * batch["x"]}

  one, two = (
    MutualClient(algorithms.MLP, transform=Scale(f)) for f in (1.0, 2.0)
  )
  assert group_clients([one, two, one]) == ((0, 2), (1,))


def test_models_of_unhashable_functions_are_evaluated():
  @dataclasses.dataclass
  class Biased:
    shift: float

    def __call__(self, variables, x, key, train):
      logits, stats = algorithms.MLP.apply(variables, x, key, train)
      return logits + self.shift * jnp.eye(logits.shape[-1])[:1], stats

  zero, one = (algorithms.MLP._replace(apply=Biased(s)) for s in (0.0, 1e6))
  evaluator = evaluate.Evaluator(
    [zero, one, zero], {"test": population.Subset.whole(BANK)}
  )
  variables = algorithms.MLP.init(jax.random.key(0))
  found = [r["test_accuracy"] for r in evaluator([variables] * 3)]
  # The second model always predicts the first class.
  assert found[1] == np.mean(BANK["y"] == 0) != found[0] == found[2]


def test_an_empty_set_has_no_accuracy():
  evaluator = evaluate.Evaluator(
    [POOLS[0].model], {"none": population.Subset(BANK, np.arange(0))}
  )
  assert evaluator([POOLS[0].model.init(jax.random.key(0))]) == [{}]


def test_a_population_is_as_good_as_its_positions():
  held = algorithms.POPULATION
  groups = group_clients(algorithms.MUTUAL)
  options = dict(seed=0, round=1, batch_size=4, epochs=2)
  jax.tree.map(
    np.testing.assert_array_equal,
    plan_mutual(held, groups, **options),
    CASES["fml"].plan(1, 1),
  )


def test_transforms_need_not_hand_the_mask_on():
  model, ends = algorithms.DENSE_TRUNK, []
  for transform in (None, lambda key, batch: {n: batch[n] for n in ("x", "y")}):
    pools = [
      Pool(name, model, 0.1, 0.1, transform=transform)
      for name in ("one", "two")
    ]
    algorithm = codist.merged_codist(
      pools, distill.Distiller(transform=transform), alpha=0.5, rounds=2
    )
    state = algorithm.init(jax.random.key(0))
    state, _ = algorithm.step(state, plan_clients(), federation.make_data())
    ends.append(federation.params(state))
  jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.parametrize("name", ["merged", "fml", "mesh"])
def test_models_keep_their_own_types(name):
  """Parameters of bfloat16, and a statistic that is a whole number."""

  class Half(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
      count = self.variable("stats", "count", lambda: jnp.zeros((), jnp.int32))
      if train:
        count.value += 1
      x = x.reshape(len(x), -1).astype(jnp.bfloat16)
      return nn.Dense(3, param_dtype=jnp.bfloat16)(x).astype(jnp.float32)

  half = core.Model.from_flax(Half(), jnp.zeros(federation.EXAMPLE.shape))
  if name != "fml":
    mesh = federation.mesh(2)
    runner = engine.Inline(mesh if name == "mesh" else None)
    pools = [Pool(n, half, 0.1, 0.1) for n in ("one", "two")]
    algorithm = merged(pools, rounds=9, engine=runner)
    plans = [federation.make_plan(t) for t in (1, 2)]
    data = federation.make_data()
  else:
    algorithm = fml([MutualClient(half)] * 2, global_model=half)
    plans = [mutual(round=t, full_batches=True) for t in (1, 2)]
    data = {"train": jax.device_put(BANK)}
  step = jax.jit(algorithm.step)
  state = algorithm.init(jax.random.key(0))
  types = jax.tree.map(jnp.result_type, state)
  for plan in plans:
    state, metrics = step(state, plan, data)
  assert jax.tree.map(jnp.result_type, state) == types
  # On a mesh the first state lies on one device, those after it on all.
  assert step._cache_size() == (2 if name == "mesh" else 1)
  assert all(np.isfinite(mean.value) for mean in metrics.values())


def test_equal_flax_models_are_one():
  """So that clients whose models were made one by one form a group."""

  class Layers(nn.Module):
    widths: list[int]  # not hashable

    @nn.compact
    def __call__(self, x):
      return nn.Sequential([nn.Dense(width) for width in self.widths])(x)

  make = lambda *widths, shape=(1, 2): core.Model.from_flax(
    Layers(list(widths)), jnp.ones(shape)
  )
  clients = [
    MutualClient(make(*widths)) for widths in ((4, 3), (3,), (4, 3), (3,))
  ]
  assert group_clients(clients) == ((0, 2), (1, 3))
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


def test_errors_of_models_and_losses_say_whose_they_are():
  """Those that Flax and optax raise, of another shape or signature."""
  clients = population.ClientPopulation.from_lists(BANK, [[0, 1]])
  plan = planning.plan_round(
    [clients], seed=0, round=1, clients_per_round=1, batch_size=2
  )

  def notes(model=algorithms.MLP, **settings):
    algorithm = fedavg([Pool("a", model, 0.1, 0.1, **settings)], rounds=1)
    state = algorithm.init(jax.random.key(0))
    with pytest.raises(Exception) as error:
      algorithm.step(state, plan, {"pools": (jax.device_put(BANK),)})
    # JAX adds a note of its own.
    return [n for n in error.value.__notes__ if "---" not in n]

  narrow = core.Model.from_flax(nn.Dense(3), jnp.zeros((1, 7)))
  assert notes(narrow) == [
    "a model given inputs x of shape (2, 4, 4, 2)",
    "pool 'a'",
  ]
  of_labels = optax.softmax_cross_entropy_with_integer_labels
  called, _ = notes(loss=of_labels)
  assert "loss(logits, batch)" in called and "['mask', 'x', 'y']" in called


@pytest.mark.parametrize("makes_one", [False, True])
def test_groups_by_functions_of_the_same_code_are_warned_of(caplog, makes_one):
  same = lambda key, batch: batch
  make = lambda: same if makes_one else lambda key, batch: batch
  clients = [MutualClient(algorithms.MLP, transform=make()) for _ in range(3)]
  with caplog.at_level("WARNING"):
    fml(clients, global_model=algorithms.MLP)
  assert len(group_clients(clients)) == (1 if makes_one else 3)
  warned = "3 groups, each with a program of its own" in caplog.text
  assert warned != makes_one


def test_a_rate_without_effect_is_warned_of(caplog):
  with caplog.at_level("WARNING"):
    federation.make_pools(1)
    assert not caplog.text
    federation.make_pools(1, client_optimizer=lambda rate: optax.sgd(0.1))
  assert "client_optimizer: its steps do not depend on the" in caplog.text
