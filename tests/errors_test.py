"""Error messages of invalid calls, and unusual values that are valid."""

import dataclasses

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetfl import (
  augment,
  Client,
  ClientEvaluator,
  ClientPopulation,
  core,
  distill,
  evaluate,
  fedavg,
  fedmd,
  fml,
  Inline,
  local,
  local_model,
  localize,
  merged_codist,
  Participant,
  periodic_codist,
  plan_fedmd,
  plan_fit,
  plan_round,
  Pool,
  privacy,
  put_banks,
  stack_plans,
  Subset,
  with_hyper,
)
from hetfl.algorithms import codist
from hetfl.algorithms import fedmd as of_fedmd
from hetfl.algorithms.features import Features
from hetfl.algorithms.fedkd import compressed, fedkd
from hetfl.algorithms.fedmd import absolute_error, consensus, squared_error
from hetfl.algorithms.fml import mutual_loss
from hetfl.algorithms.personal import Method, personal
from hetfl.batches import gather, leave_out, prepare
from hetfl.clients import on_host
from hetfl.data.compared_images import load_compared_images
from hetfl.data.fml_images import load_fml_images
from hetfl.data.partition import pachinko
from hetfl.models import families, language, layers, next_word, vision
from tests import algorithms, federation
from tests.algorithms import CASES, make_distiller

TOKENS = language.TokenLogits(
  jnp.zeros((1, 2, 1)), jnp.zeros((1, 5)), jnp.zeros(5)
)
POOLS = federation.make_pools(models=federation.DENSE)
BANK = dict(federation.POPULATION.bank)
PUBLIC = Subset.whole(algorithms.PUBLIC)
MLP, NORMED = algorithms.MLP, algorithms.PARTIES[0].model
KEY = jax.random.key(0)
# Of another number of classes than its peers.
WIDER = core.Model.from_flax(
  nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(5)]),
  jnp.zeros(federation.EXAMPLE.shape),
)


class Training(nn.Module):
  @nn.compact
  def __call__(self, x, training):
    return nn.Dropout(0.5, deterministic=not training)(x)


def from_lists(*assignment):
  return ClientPopulation.from_lists(BANK, assignment)


def pool(model=MLP, **settings):
  rates = dict(learning_rate=0.1, server_lr=0.1)
  return Pool(model, "a", **{**rates, **settings})


def merged(pools=POOLS, distiller=None, **settings):
  settings = {**dict(alpha=0.5, rounds=1), **settings}
  return merged_codist(pools, distiller or make_distiller(), **settings)


def mutual(model=MLP, global_model=None, **settings):
  return fml(
    [Client(model, **settings)] * 2, global_model=global_model or model
  )


def plan_of(name, held, **settings):
  settings = {**dict(seed=0, round=1, batch_size=2), **settings}
  return plan_round({name: held}, **settings)


def first_round(algorithm, plan, data):
  return algorithm.step(algorithm.init(KEY), plan, data)


def pool_round(model=MLP, **settings):
  plan = plan_of("a", from_lists([0, 1, 2]))
  return first_round(
    fedavg([pool(model, **settings)], rounds=1), plan, {"a": BANK}
  )


def noisy_sgd(learning_rate):
  return optax.noisy_sgd(learning_rate, key=KEY)


def of_kernels(learning_rate):
  """An optimizer that holds the rate of some parameters."""
  held = optax.inject_hyperparams(optax.sgd)(learning_rate=learning_rate)
  mask = lambda params: jax.tree.map_with_path(
    lambda path, _: "kernel" in jax.tree_util.keystr(path), params
  )
  return optax.masked(held, mask)


COMPLEX = core.Model(
  lambda key: core.Variables(jnp.ones(1, jnp.complex64), {}), None
)


def mutual_round(model=MLP, global_model=None, **settings):
  plan = plan_of("train", from_lists([0, 1], [2]), tail="short")
  algorithm = mutual(model, global_model, **settings)
  return first_round(algorithm, plan, {"train": jax.device_put(BANK)})


def step(name, plan=None, data=None):
  """A first step with another plan or other data."""
  case = CASES[name]
  return first_round(
    case.build(None, 1), plan or case.plan(1), data or case.data()
  )


def normed_round(tail, held=(0, 1, 2), bank=algorithms.PRIVATE):
  """A round of a client with batch statistics, in batches of two."""
  plan = plan_of("train", Subset(bank, np.array(held)), tail=tail)
  algorithm = fml([Client(NORMED)], global_model=NORMED)
  return first_round(algorithm, plan, {"train": jax.device_put(bank)})


def evaluator(models=(MLP,), sets=None, **settings):
  sets = sets or {"test": Subset.whole(BANK)}
  return evaluate.Evaluator(list(models), sets, **settings)


def cnn(**changes):
  net = vision.CNN((4,), 3, (), 10, **changes)
  return jax.eval_shape(net.init, KEY, jnp.zeros((1, 8, 8, 3)))


def method(clients=None, **fields):
  """A round of clients, by a method of one's own."""
  algorithm = personal(clients or [Client(MLP)] * 2, Method(**fields))
  plan = plan_of("train", from_lists([0, 1], [2]), tail="short")
  return first_round(algorithm, plan, {"train": jax.device_put(BANK)})


def column(logits, batch):
  """A loss `[B, 1]`, as in a regression whose labels have an extra axis."""
  return core.cross_entropy(logits, batch)[:, None]


def of_distillation(examples):
  return plan_round(
    {"a": from_lists([0])}, examples, seed=0, round=1, batch_size=1
  )


WRONG = {
  "values: give one or more": lambda: evaluate.spread([]),
  "name=vgg: choose from": lambda: families.body("vgg", 9, (8, 8, 1)),
  "conv='planes': choose from": lambda: cnn(conv="planes"),
  "pool_after=(5,): give numbers of the 1 conv": lambda: cnn(pool_after=(5,)),
  "strides=(1, 2): give one for each": lambda: cnn(strides=(1, 2)),
  "(1, 8, 8, 1): want 3 channels": lambda: augment.normalize(
    jnp.zeros((1, 8, 8, 1), jnp.uint8), (0.5,) * 3, (0.5,) * 3
  ),
  "(1, 8, 8, 1): want (8, 8, 3) each": lambda: augment.center(
    {"x": jnp.zeros((1, 8, 8, 1), jnp.uint8)}, np.zeros((8, 8, 3))
  ),
  "validation=1.5: must lie": lambda: load_compared_images(
    "digits", num_clients=2, validation=1.5
  ),
  # Digits are 1,797.
  "public_examples=1797: must be a whole number, at least 1 and at most 1793": (
    lambda: load_compared_images(
      "digits", num_clients=4, partition="iid", public_examples=1797
    )
  ),
  "examples=0: must be": lambda: load_compared_images(
    "digits", num_clients=2, examples=0
  ),
  "num_clients=0: must be": lambda: load_fml_images(["digits"], num_clients=0),
  "bad_clients=1.5: must be a whole number": lambda: load_fml_images(
    ["digits"], bad_clients=[1.5]
  ),
  "tail='Short': choose one of wrap, short, repeat": lambda: plan_round(
    {"a": federation.POPULATION},
    seed=0,
    round=1,
    batch_size=2,
    tail="Short",
  ),
  # Values.
  "alpha=1.5: must lie between 0 and 1": lambda: merged(alpha=1.5),
  "alpha='0.5': must be one number": lambda: merged(alpha="0.5"),
  "alpha=50.0:": lambda: merged(alpha=lambda t: 50.0),
  "alpha=-1.0:": lambda: merged(alpha=lambda t: 0.5 * (1 - t), rounds=3),
  "rounds=0:": lambda: fedavg(POOLS, rounds=0),
  "period=0:": lambda: periodic_codist(
    POOLS, make_distiller(), period=0, rounds=1
  ),
  "temperature=-1.0": lambda: make_distiller(temperature=-1.0),
  "regularization=-1": lambda: make_distiller(regularization=-1),
  "label_weight=7": lambda: make_distiller(label_weight=7),
  "give one or 2 values": lambda: make_distiller(temperature=(1, 2, 3)).hyper(
    2
  ),
  "mesh: has the axes ('a', 'b'); give one": lambda: Inline(
    jax.make_mesh((1, 1), ("a", "b"))
  ),
  "at_once=0:": lambda: Inline(at_once=0),
  "learning_rate=-1:": lambda: pool(learning_rate=-1),
  "server_lr=nan:": lambda: pool(server_lr=float("nan")),
  "server_lr=inf: must be finite, at least 0": lambda: pool(server_lr=np.inf),
  "prox_mu=-1:": lambda: pool(prox_mu=-1),
  "microbatch=0:": lambda: Client(MLP, microbatch=0),
  "server_optimizer: give a function": lambda: pool(
    server_optimizer=optax.adam(1e-3)
  ),
  "its state holds the learning rate": lambda: pool(
    server_optimizer=optax.inject_hyperparams(optax.sgd)
  ),
  "client_LR: this state has no such": lambda: with_hyper(
    merged().init(KEY), client_LR=1.0
  ),
  "learning_rate: an array of shape (3,); give one value": lambda: with_hyper(
    merged().init(KEY), learning_rate=jnp.ones(3)
  ),
  "at least 2 Pool, each with a name of its own": lambda: merged(POOLS[:1]),
  "at least 1 Pool, each with a name of its own": lambda: fedavg(
    [POOLS[0]] * 2, rounds=1
  ),
  "pools: give a sequence": lambda: fedavg(POOLS[0], rounds=1),
  "parties: give a sequence": lambda: fedmd(algorithms.PARTIES[0]),
  "trained: give a Learner for each of 3 parties, not 0": lambda: fedmd(
    algorithms.PARTIES
  ).init(KEY, []),
  "server: there is no global_model": lambda: fml(
    [Client(MLP)], global_model=None
  ).init(KEY, MLP.start(KEY)),
  "distiller=None: give a Distiller": lambda: merged_codist(
    POOLS, None, alpha=0.5, rounds=1
  ),
  "weights: 3 for 2 scores": lambda: consensus(
    jnp.zeros((2, 4, 3)), jnp.ones(3)
  ),
  # Who holds what.
  "client '0': positions must be integers": lambda: from_lists(BANK["y"] == 0),
  "client '1' holds no examples": lambda: from_lists([0], []),
  "client '1': position 999 is outside": lambda: from_lists([7], [3, 999], [9]),
  "give each client's positions, not one number": lambda: (
    ClientPopulation.from_lists(BANK, BANK["y"])
  ),
  "bank: give arrays by name": lambda: Subset.whole((BANK["x"], BANK["y"])),
  "bank['x']: must be an array": lambda: Subset.whole({"x": {"a": np.ones(2)}}),
  "bank: arrays of different lengths {'x': 3, 'y': 2}": lambda: gather(
    {"x": jnp.zeros(3), "y": jnp.zeros(2)}, jnp.array([0])
  ),
  "ids: of shape (3,) for a bank of": lambda: ClientPopulation.from_ids(
    BANK, ["a", "b", "b"]
  ),
  "offsets: from 0 to 2, want 0 to 4": lambda: ClientPopulation(
    BANK, np.arange(4), np.array([0, 2]), ("a",)
  ),
  "set 0: bank['id'] is of type <U1": lambda: put_banks(
    Subset.whole({"id": np.array(["a", "b"])})
  ),
  "set 0: bank['x'] is of type >f4": lambda: put_banks(
    Subset.whole({**BANK, "x": np.asarray(BANK["x"], ">f4")})
  ),
  "set 1: give a Subset": lambda: put_banks(PUBLIC, BANK),
  # Plans.
  "examples.index: position": lambda: of_distillation(
    Subset(PUBLIC.bank, np.arange(24, 30))
  ),
  "examples: there are none": lambda: of_distillation(
    Subset(PUBLIC.bank, np.arange(0))
  ),
  "examples: give a Subset, not a bare bank": lambda: of_distillation(BANK),
  "examples: give a Subset, not a ClientPopulation; population.examples()": (
    lambda: of_distillation(from_lists([0]))
  ),
  "pool 0: give a ClientPopulation, not a bare bank": lambda: plan_of(
    "a", BANK
  ),
  "clients: give populations by name": lambda: plan_round(
    from_lists([0]), seed=0, round=1, batch_size=1
  ),
  "clients_per_round=10: pool 0 has 9": lambda: federation.make_plan(
    1, clients_per_round=10
  ),
  "batch_size=0:": lambda: federation.make_plan(1, batch_size=0),
  "batch_size=True: must be a whole number": lambda: federation.make_plan(
    1, batch_size=True
  ),
  "max_steps=0:": lambda: federation.make_plan(1, max_steps=0),
  "round=0:": lambda: federation.make_plan(0),
  "seed='2': must be a whole number, at least 0": lambda: plan_of(
    "a", from_lists([0]), seed="2"
  ),
  "public: give a Subset": lambda: plan_fedmd(
    BANK, {"a": PUBLIC}, seed=0, round=1, subset=1
  ),
  "stopping: give a Subset": lambda: plan_fit(
    {"a": PUBLIC}, BANK, seed=0, round=1, batch_size=1
  ),
  "stopping: position 99": lambda: plan_fit(
    {"a": PUBLIC}, PUBLIC._replace(index=[99]), seed=0, round=1, batch_size=1
  ),
  "private: 'digest' is the name of other batches": lambda: plan_fedmd(
    PUBLIC, {"digest": PUBLIC}, seed=0, round=1, subset=1
  ),
  "examples: 'stopping' is the name of the stopping set": lambda: plan_fit(
    {"stopping": PUBLIC}, PUBLIC, seed=0, round=1, batch_size=1
  ),
  "clients: numbers must be integers, not bool": lambda: from_lists(
    [0], [1, 2]
  ).take([True, False]),
  "consensus_weights=inf: must be": lambda: of_fedmd.consensus_shares(
    (np.inf, 1.0), 2
  ),
  "consensus_weights=[1. 2. 3.]: give one or 2": lambda: (
    of_fedmd.consensus_shares((1.0, 2.0, 3.0), 2)
  ),
  "sets: has no 'distill'": lambda: localize(
    federation.make_plan(1), dict.fromkeys(("pool0", "pool1"), from_lists([0]))
  ),
  "sets['a']: give a Subset, not a bare bank": lambda: localize(
    plan_of("a", from_lists([0])), {"a": BANK}
  ),
  "absent: numbers must be integers, not bool": lambda: leave_out(
    plan_of("a", from_lists([0])).batches["a"], [True]
  ),
  "late_clients=1.5: must be a whole number": lambda: plan_of(
    "a", from_lists([0], [1]), late_clients=1.5, late_round=2
  ),
  "optimizer: its state holds the learning rate": lambda: fml(
    [Client(MLP, optimizer=of_kernels)], global_model=None
  ).init(KEY),
  "of type complex64: parameters must be floating": lambda: COMPLEX.start(KEY),
  "clients: there are none to evaluate": lambda: ClientEvaluator(
    MLP, from_lists([0]).take([])
  ),
  "sampling=0.1: give a sequence": lambda: privacy.epsilon(
    1.0, 0.1, rounds=1, delta=0.1
  ),
  "sampling=[]: give a sequence": lambda: privacy.noise_multiplier(
    1.0, [], rounds=1, delta=0.1
  ),
  "examples_per_client=1.5: must be a whole number": lambda: pachinko(
    *np.zeros((2, 9)), num_clients=3, examples_per_client=1.5, seed=0
  ),
  "would enter the batch statistics": lambda: normed_round("short"),
  "learning_rate=None: give a number": lambda: fedavg(
    [Pool(MLP, "a", learning_rate=None, server_lr=1.0)], rounds=1
  ).init(KEY),
  # Steps.
  "'pool0', 'pool1']; give the Plan that the algorithm takes": lambda: step(
    "fedmd", CASES["fedavg"].plan(1)
  ),
  "plan: has no batches 'pool1'": lambda: step(
    "merged", federation.make_plan(1, num_pools=1)
  ),
  "plan: has no batches 'train'": lambda: step("fml", CASES["fedavg"].plan(1)),
  "the state is of 1 pools, but there are 2": lambda: fedavg(
    POOLS, rounds=1
  ).step(
    fedavg(POOLS[:1], rounds=1).init(KEY),
    federation.make_plan(1),
    federation.make_data(),
  ),
  "the state groups clients as": lambda: (
    CASES["fml"]
    .build(None, 1)
    .step(mutual().init(KEY), CASES["fml"].plan(1), CASES["fml"].data())
  ),
  "data: give a dict with a bank 'pool0'": lambda: step(
    "fedavg", data={"pool": 1}
  ),
  "data: give a dict with a bank 'train'": lambda: step(
    "fml", data={"train": from_lists([0])}
  ),
  "an array named 'mask'": lambda: step(
    "fit", data=dict.fromkeys(CASES["fit"].data(), {**BANK, "mask": BANK["y"]})
  ),
  "a loss of shape (2, 1) on 2": lambda: pool_round(loss=column),
  "outputs of shapes (2, ": lambda: mutual_round(WIDER, MLP),
  "the softmax over one class is always 1": lambda: distill.tempered_softmax(
    jnp.zeros((2, 1)), 1.0
  ),
  "but the loss takes labels 'y'": lambda: core.cross_entropy(
    jnp.zeros((2, 3)), {"x": 0}
  ),
  "must be floating numbers, such as logits, not int32": lambda: (
    core.cross_entropy(jnp.zeros((2, 3), int), {"y": jnp.array([0, 1])})
  ),
  "batch['y'] is int32 of shape (2, 1)": lambda: core.cross_entropy(
    jnp.zeros((2, 3)), {"y": jnp.array([[0], [1]])}
  ),
  "Language models need Pool(loss=sentence_loss()), Distiller(": lambda: (
    core.cross_entropy(TOKENS, {"y": jnp.zeros((1, 2), int)})
  ),
  "next-word losses and metrics need TokenLogits": lambda: (
    next_word.next_word_metrics(jnp.zeros((1, 2, 5)), {})
  ),
  "batch['y'] of shape (1, 1) for outputs at (1, 2) positions": lambda: (
    next_word.sentence_loss()(
      TOKENS, {"y": jnp.ones((1, 1), int), "mask": jnp.ones(1)}
    )
  ),
  # Models and functions.
  "global_model: give a Model, not a Dense": lambda: fml(
    [Client(MLP)], global_model=nn.Dense(3)
  ),
  "pool 'a': give a Model, not a Dense": lambda: pool(nn.Dense(3)),
  "adaptor: give a Model, not a Dense": lambda: Client(
    MLP, adaptor=nn.Dense(3)
  ),
  "models[1]: give a Model, not a Dense": lambda: evaluator((MLP, nn.Dense(3))),
  "apply is called with": lambda: pool(
    MLP._replace(apply=lambda variables, x: x)
  ),
  "int is not a Flax Linen module": lambda: core.Model.from_flax(
    3, jnp.zeros(1)
  ),
  "example=(1, 32): give an input": lambda: core.Model.from_flax(
    nn.Dense(3), (1, 32)
  ),
  "Training takes 'training'": lambda: core.Model.from_flax(
    Training(), jnp.zeros((1, 2))
  ),
  "apply must return a pair, (logits, stats)": lambda: pool_round(
    MLP._replace(apply=lambda variables, x, key, train: x)
  ),
  "a model's init returned a dict": lambda: pool_round(
    MLP._replace(init=lambda key: {})
  ),
  "init returned .params['n'] of type int32": lambda: pool_round(
    MLP._replace(init=lambda key: core.Variables({"n": jnp.zeros(3, int)}, {}))
  ),
  "init returned .stats['key'] of type key<fry>": lambda: pool_round(
    MLP._replace(init=lambda key: MLP.init(key)._replace(stats={"key": key}))
  ),
  "a model's apply returned stats of structure": lambda: pool_round(
    MLP._replace(apply=lambda variables, x, key, train: (x, None))
  ),
  "a transform returned a NoneType": lambda: pool_round(
    transform=lambda key, batch: None
  ),
  "a transform is called with (batch) here": lambda: evaluator(
    transform=lambda key, b: b
  )([MLP.start(KEY)]),
  "a batch holds ['mask', 'y']": lambda: prepare(
    lambda batch: {"y": batch["y"]}, {"y": 0, "mask": 1}
  ),
  "Method.end is called with (context, kept, learner, batches)": lambda: method(
    end=lambda context, kept: kept
  ),
  "Method.end: must return what is kept, and": lambda: method(
    end=lambda context, kept, learner, batches: learner
  ),
  "Method.end: gives {'.extra': (2,)}, expected {'.extra': ()}": lambda: method(
    extra=lambda variables, client: jnp.zeros(()),
    end=lambda context, kept, learner, batches: (
      kept.replace(extra=jnp.zeros(2)),
      (),
    ),
  ),
  "Method.begin: must return a Learner or Variables, not a dict": lambda: (
    method(begin=lambda context, kept: kept.learner.params)
  ),
  "loss: its sum and count have the shapes (3,) and ()": lambda: core.values(
    {"loss": core.Mean(jnp.ones(3), jnp.ones(()))}
  ),
  "Method.begin: gives": lambda: method(
    begin=lambda context, kept: core.Variables((), ())
  ),
  "Method.objective(client) is called with (variables, b": lambda: method(
    objective=lambda client: lambda variables, batch: 0.0
  ),
  "an objective must return (losses, stats, measured)": lambda: method(
    objective=lambda client: lambda variables, batch, key, context: (0.0, ())
  ),
  "measured a dict; not PyTreeDef((*, (), *))": lambda: method(
    objective=lambda client: lambda variables, batch, *_: (0.0, (), 1.0)
  ),
  "a gap of shape (1,) on 2 examples: give one": lambda: method(
    objective=lambda client: (
      lambda variables, batch, key, context: (
        jnp.zeros(2),
        (),
        {"gap": jnp.zeros(1)},
      )
    )
  ),
  "give a Method(...)": lambda: personal([Client(MLP)], Method),
  "Method.hyper: contexts hold another 'server'": lambda: method(
    hyper={"server": (1.0, 1.0)}
  ),
  "Method.hyper: 'weight' is 1.0: give a pair": lambda: method(
    hyper={"weight": 1.0}
  ),
  "messages of clients with unlike models: gives {": lambda: method(
    clients=[Client(MLP), Client(WIDER)],
    server=lambda key, kept: jnp.zeros(()),
    end=lambda context, kept, learner, batches: (kept, learner.params),
    aggregate=lambda context, sent, key: context["server"],
  ),
  "Method.aggregate: needs Method.server": lambda: method(
    aggregate=lambda context, sent, key: ()
  ),
  "Method.aggregate: clients send something, and no server": lambda: method(
    end=lambda context, kept, learner, batches: (kept, learner.params)
  ),
  "Method.aggregate, of clients that send nothing (see Meth": lambda: method(
    server=lambda key, kept: jnp.zeros(()),
    aggregate=lambda context, sent, key: sent.value,
  ),
  "measured: names 'distance', but there are ['loss']": lambda: method(
    measured=("loss", "distance")
  ),
  "clients: a Client; give a list": lambda: fml(Client(MLP), global_model=None),
  "clients: give one Client or more, not [Model]": lambda: fml(
    [MLP], global_model=MLP
  ),
  "on_host: init and step move rows": lambda: jax.eval_shape(
    on_host(personal([Client(MLP)]), [Client(MLP)]).init, KEY
  ),
  "on_host: clients keep typed random keys (0.learner.opt": lambda: on_host(
    personal([Client(MLP)], optimizer=noisy_sgd), [Client(MLP)]
  ).init(KEY),
  "Take features.logits_only(model)": lambda: core.cross_entropy(
    Features(jnp.zeros((1, 2)), jnp.zeros((1, 3))), {"y": jnp.zeros(1, int)}
  ),
  "no set 'tset'": lambda: evaluator(only=[["tset"]]),
  "only=['test']: give a sequence": lambda: evaluator(only=["test"]),
  "test: give a Subset": lambda: evaluator(sets={"test": BANK}),
  "variables: give a sequence of 1": lambda: evaluator()([]),
  "variables: give Variables(params, stats)": lambda: ClientEvaluator(
    MLP, from_lists([0])
  )(MLP.start(KEY).params),
  "plans: of [1, 2] clients with batches of [2]": lambda: stack_plans(
    [plan_of("a", from_lists(*of)) for of in ([[0]], [[0], [1]])]
  ),
  "a measure must return a dict of Means": lambda: evaluator(
    measure=lambda logits, batch: {"mean": jnp.mean(logits)}
  )([MLP.start(KEY)]),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_makes_no_sense_is_refused(message):
  with pytest.raises(ValueError) as error:
    WRONG[message]()
  assert message in str(error.value)


class Maps(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    return nn.BatchNorm(use_running_average=not train)(x)


NORMED_MAPS = core.Model.from_flax(Maps(), jnp.zeros(federation.EXAMPLE.shape))
NORMED_LOGITS = core.Model.from_flax(Maps(), jnp.zeros((1, 10)))


@pytest.mark.parametrize(
  "algorithm",
  [
    fedkd([Client(MLP)], mentee=NORMED_MAPS),
    fml([Client(MLP, encoder=NORMED_MAPS)], global_model=MLP),
    fml([Client(MLP, adaptor=NORMED_LOGITS)], global_model=MLP),
  ],
)
def test_empty_places_enter_no_statistics(algorithm):
  """Nor those of models that train beside the clients' own."""
  plan = plan_of("train", from_lists([0, 1, 2]), tail="short", batch_size=2)
  with pytest.raises(ValueError, match="would enter the batch statistics"):
    first_round(algorithm, plan, {"train": jax.device_put(BANK)})


def test_full_batches_keep_others_from_batch_statistics():
  held = (3, 4, 5)  # Example 0 is nobody's.
  statistics = []
  for scale in (1, 1000):
    bank = dict(algorithms.PRIVATE, x=algorithms.PRIVATE["x"].copy())
    bank["x"][0] *= scale
    state, _ = normed_round("repeat", held, bank)
    statistics.append(state.server.stats)
  chex.assert_trees_all_equal(*statistics)


def test_a_traced_plan_of_empty_places_shows_in_models_with_statistics():
  """It cannot be refused; see test_what_makes_no_sense_is_refused."""
  algorithm = fml([Client(NORMED)], global_model=NORMED)
  step, state = jax.jit(algorithm.step), algorithm.init(KEY)
  data = {"train": jax.device_put(algorithms.PRIVATE)}
  for tail, finite in (("short", False), ("repeat", True)):
    held = Subset(algorithms.PRIVATE, np.arange(3))
    new, _ = step(state, plan_of("train", held, tail=tail), data)
    assert bool(core.all_finite(new.server)) == finite


def test_a_traced_plan_of_more_clients_is_refused():
  plan = plan_of("train", from_lists([0], [1], [2]), tail="short")
  for make in (fml, personal):
    more = dict(global_model=MLP) if make is fml else {}
    algorithm = make([Client(MLP)] * 2, **more)
    state = jax.eval_shape(algorithm.init, KEY)
    with pytest.raises(ValueError, match="are of client 2, but there are 2"):
      jax.eval_shape(algorithm.step, state, plan, {"train": BANK})


@pytest.mark.parametrize("microbatch", [None, 2, 1])
def test_the_mean_over_no_examples_counts_nothing(microbatch):
  """Of four places a client of one example fills one: parts are empty."""

  def mean(logits, batch):  # As docs/library.md has it, and 0/0 for none.
    total = jnp.sum(core.cross_entropy(logits, batch) * batch["mask"])
    return total / jnp.sum(batch["mask"])

  of = lambda loss: first_round(
    fedavg([pool(loss=loss, microbatch=microbatch)], rounds=1),
    plan_of("a", from_lists([0], [1, 2]), batch_size=4, tail="short"),
    {"a": BANK},
  )
  (found, _), (expected, _) = of(mean), of(core.cross_entropy)
  chex.assert_trees_all_close(found.server, expected.server, rtol=1e-6)


def test_optimizers_may_draw_and_hold_the_parameters():
  """And a state that holds an array twice could not be donated."""
  noisy = lambda rate: optax.noisy_sgd(rate, key=jax.random.key(7))
  for server_optimizer in (optax.contrib.prodigy, noisy):
    algorithm = fedavg(
      [pool(server_optimizer=server_optimizer, optimizer=noisy)], rounds=1
    )
    value = jnp.asarray(0.25)
    state = with_hyper(algorithm.init(KEY), learning_rate=value)
    step = jax.jit(algorithm.step, donate_argnums=0)
    state, _ = step(state, plan_of("a", from_lists([0, 1])), {"a": BANK})
    assert core.all_finite(state) and float(value) == 0.25


def test_old_keys_are_of_one_trial():
  algorithm = personal([Client(MLP)] * 2)
  state = algorithm.init(jax.random.PRNGKey(0))
  state = with_hyper(state, learning_rate=0.5)
  assert float(state.hyper["learning_rate"]) == 0.5
  local_model(state, 1)
  several = jax.vmap(algorithm.init)(jax.random.split(KEY, 3))
  with pytest.raises(ValueError, match="several trials"):
    local_model(several, 1)


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


def test_labels_of_distillation_that_are_no_class_show():
  clients = from_lists([0])
  plan = plan_round(
    {"pool0": clients, "pool1": clients},
    Subset(BANK, np.arange(2)),
    seed=0,
    round=1,
    batch_size=1,
    distill_batch_size=2,
  )
  algorithm = merged(distiller=make_distiller(label_weight=0.5))
  step = jax.jit(algorithm.step)
  for y in (0, -1, 3):
    bank = dict(BANK, y=np.array(BANK["y"]))
    bank["y"][1] = y
    data = {"pool0": BANK, "pool1": BANK, "distill": bank}
    _, metrics = step(algorithm.init(KEY), plan, data)
    assert np.isnan(metrics["pool0/distill_loss"].value) == (y != 0)
    assert np.isfinite(metrics["pool0/client_loss"].value)


def test_a_model_that_says_nan_has_no_accuracy():
  logits = jnp.array([[1.0, jnp.nan], [2.0, 1.0]])
  batch = {"y": jnp.zeros(2, jnp.int32), "mask": jnp.ones(2)}
  means = evaluate.classification(logits, batch)
  assert np.isnan([mean.value for mean in means.values()]).all()
  assert np.isnan(evaluate.class_f1(logits, batch).value).all()
  for accuracies in ([np.nan], [0.5, np.nan]):
    assert np.isnan([*evaluate.spread(accuracies).values()]).all()
  # Nor has one whose labels are out of range.
  wrong = batch | {"y": jnp.array([0, 2])}
  assert np.isnan(evaluate.class_f1(jnp.eye(2), wrong).value).all()
  # An empty place says nothing.
  empty = batch | {"mask": jnp.array([0.0, 1.0])}
  assert evaluate.class_f1(logits, empty).value[0] == 1
  first = next_word.EOS + 1
  head = jnp.full((1, 6), jnp.nan), jnp.zeros(6)
  for chunk in (None, 2):
    words = next_word.TokenLogits(jnp.ones((1, 2, 1)), *head, chunk)
    batch = {"y": jnp.array([[0, first]]), "mask": jnp.ones(1)}
    means = next_word.next_word_metrics(words, batch)
    assert np.isnan([mean.value for mean in means.values()]).all()


def test_a_target_of_nan_has_no_gradient():
  """One is also what the consensus of nobody would be."""
  for error in (absolute_error, squared_error):
    slope = jax.grad(error)(jnp.ones(2), jnp.array([0.0, jnp.nan]))
    assert np.isnan(slope[1]) and np.isfinite(slope[0])


def test_all_singular_vectors_are_kept():
  """The small ones vanish in the sum of all squares."""
  left, right = (
    np.linalg.qr(np.random.default_rng(seed).normal(size=(48, 48)))[0]
    for seed in range(2)
  )
  matrix = jnp.asarray(left * ([1.0] + 47 * [2e-4]) @ right, jnp.float32)
  np.testing.assert_allclose(compressed(matrix, 1.0), matrix, atol=1e-6)
  assert np.linalg.matrix_rank(compressed(matrix, 0.5), tol=1e-5) == 1


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


def test_a_gradient_of_zero_has_derivatives():
  """Where there is nothing to merge, of either kind."""
  zero, g = jnp.zeros(2), jnp.array([3.0, 4.0])
  length = lambda *args: jnp.sum(codist.merge_gradients(*args, alpha=0.5))
  for given in ((g, zero), (zero, g)):
    found = jax.grad(length, (0, 1))(*given)
    np.testing.assert_allclose(found, [[0.5, 0.5], [0, 0]])


def test_microbatches_of_half_precision_add_up_in_float32():
  """256 terms below half a unit of the sum's last place would all be lost."""
  half = core.Model(
    None, lambda v, x, key, train: (jnp.float32(x @ v.params), v.stats)
  )
  variables = core.Variables(jnp.zeros((32, 3), jnp.bfloat16), {})
  x = BANK["x"][:1].reshape(1, -1).astype(jnp.bfloat16)
  batch = {  # The same example 512 times.
    "x": jnp.repeat(x, 512, axis=0),
    "y": jnp.zeros(512, int),
    "mask": jnp.ones(512),
  }
  objective = local.supervised(Participant(half, learning_rate=1.0))
  whole, parts = (
    local.gradient(objective, variables, batch, KEY, {}, microbatch=size)[1]
    for size in (None, 2)
  )
  assert parts.dtype == jnp.bfloat16
  whole, parts = (np.asarray(g, np.float32) for g in (whole, parts))
  np.testing.assert_allclose(parts, whole, atol=0.01 * np.abs(whole).max())


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


def test_there_is_no_client_below_zero():
  with pytest.raises(IndexError, match="client -1 does not exist: there are 1"):
    from_lists([0]).client(-1)


def test_means_add_up():
  total = core.Mean(1.0, 2.0) + core.Mean(3.0, 6.0) + core.Mean.zero()
  assert total.value == 0.5 and isinstance(total, core.Mean)


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


def test_what_clients_keep_keeps_its_type():
  """Else it depends on who takes part, or changes in the middle of a scan."""
  state, _ = method(
    extra=lambda variables, client: jnp.zeros((), jnp.int32),
    end=lambda context, kept, learner, batches: (
      kept.replace(learner=learner, extra=kept.extra + 1.5),
      (),
    ),
  )
  assert state.clients[0].extra.dtype == jnp.int32
  assert state.clients[0].extra.tolist() == [2, 2]  # 0, 1.5, 2.5.


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
  chex.assert_trees_all_close(ours, exact, atol=0.02)


def test_models_of_unhashable_functions_are_evaluated():
  @dataclasses.dataclass
  class Biased:
    shift: float

    def __call__(self, variables, x, key, train):
      logits, stats = MLP.apply(variables, x, key, train)
      return logits + self.shift * jnp.eye(logits.shape[-1])[:1], stats

  zero, one = (MLP._replace(apply=Biased(s)) for s in (0.0, 1e6))
  evaluator = evaluate.Evaluator(
    [zero, one, zero], {"test": Subset.whole(BANK)}
  )
  variables = MLP.init(jax.random.key(0))
  found = [r["test_accuracy"] for r in evaluator([variables] * 3)]
  # The second model always predicts the first class.
  assert found[1] == np.mean(BANK["y"] == 0) != found[0] == found[2]


def test_an_empty_set_has_no_accuracy():
  evaluator = evaluate.Evaluator(
    [POOLS[0].model], {"none": Subset(BANK, np.arange(0))}
  )
  assert evaluator([POOLS[0].model.init(jax.random.key(0))]) == [{}]


@pytest.mark.parametrize("name", ["alpha", "beta", "learning_rate"])
def test_a_schedule_that_leaves_its_range_gives_no_numbers(name):
  # By rounding 1 may become a little more, which is no reason.
  values = jnp.array([0.0, 1 + 1e-6, -0.2])
  schedule = lambda t: values[jnp.asarray(t) - 1]
  options = {"beta": 1.0, name: schedule}
  algorithm = fml([Client(MLP)] * 2, global_model=MLP, **options)
  state = algorithm.init(KEY)
  for t in range(1, 4):
    plan = plan_of("train", from_lists([0, 1], [2]), round=t)
    state, _ = jax.jit(algorithm.step)(
      state, plan, {"train": jax.device_put(BANK)}
    )
    models = state.server, local_model(state, 0)
    finite = [np.isfinite(leaf).all() for leaf in jax.tree.leaves(models)]
    assert all(finite) == (t < 3)
