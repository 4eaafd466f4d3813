"""Every algorithm, small, for the tests of what all of them must do."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import hetfl
from hetfl import core, distill, population
from hetfl.algorithms.ditto import ditto
from hetfl.algorithms.dsfl import dsfl
from hetfl.algorithms.fd import fd
from hetfl.algorithms.features import headed, logits_only
from hetfl.algorithms.feddf import feddf
from hetfl.algorithms.fedet import fedet
from hetfl.algorithms.fedgen import fedgen
from hetfl.algorithms.fedgh import fedgh
from hetfl.algorithms.fedgkt import fedgkt
from hetfl.algorithms.fedkd import fedkd
from hetfl.algorithms.fedmrl import fedmrl, matryoshka
from hetfl.algorithms.fedproto import fedproto
from hetfl.algorithms.fedtgp import fedtgp
from hetfl.algorithms.heterofl import heterofl
from hetfl.algorithms.ktpfl import ktpfl
from hetfl.algorithms.lgfedavg import lgfedavg
from hetfl.algorithms.scaffold import scaffold
from hetfl.models import fedmd as party_models
from tests import federation


class Case(NamedTuple):
  """An algorithm and all that its steps take.

  Attributes:
    build: (engine, rounds, **changes) -> the algorithm, in which all
      participants differ by these changes; a new `model` is the global one too.
    plan: round -> the round's plan.
    data: () -> the banks, on the device.
    pooled: whether it is of pools.
  """

  build: Callable[..., core.Algorithm]
  plan: Callable[[int], Any]
  data: Callable[[], Any]
  pooled: bool = False


def noisy(key, batch):
  """A transform that shows which key, and which batch, it was given."""
  return {**batch, "x": batch["x"] + jax.random.uniform(key, batch["x"].shape)}


def scaled(tree, scale):
  return jax.tree.map(lambda x: x * scale, tree)


class Flat(nn.Module):
  """A dense layer, soon compiled, that may count its steps."""

  dtype: jnp.dtype = jnp.float32
  counts: bool = False

  @nn.compact
  def __call__(self, x, train: bool = False):
    if self.counts:
      zero = lambda: jnp.zeros((), jnp.int32)
      count = self.variable("stats", "count", zero)
      if train:
        count.value += 1
    x = x.reshape(len(x), -1).astype(self.dtype)
    return nn.Dense(4, param_dtype=self.dtype)(x).astype(jnp.float32)


def flat_model(name, *args, **settings):
  """Such a model for an algorithm's banks."""
  bank = next(iter(CASES[name].data().values()))
  return core.Model.from_flax(Flat(*args, **settings), bank["x"][:1])


def changed(participants, **changes):
  return [dataclasses.replace(one, **changes) for one in participants]


# --- Pools --------------------------------------------------------------------


def make_distiller(**settings):
  # SGD does not amplify rounding errors, as Adam does for tiny gradients.
  defaults = dict(
    learning_rate=0.02,
    regularization=0.1,
    optimizer=optax.sgd,
    mixup_beta=2,
    transform=noisy,
  )
  return distill.Distiller(**{**defaults, **settings})


def make_pools(**settings):
  return federation.make_pools(
    server_optimizer=hetfl.optimizers.fedavg_server, server_lr=1.0, **settings
  )


def unlike(state, scale):
  """Other rates, penalties and, where there are any, consensus weights."""
  hyper = scaled(state.hyper, scale)
  if "consensus_weights" in hyper:
    weights = state.hyper["consensus_weights"]
    hyper["consensus_weights"] = weights.at[0].multiply(scale)
  return state.replace(hyper=hyper)


def pooled(build):
  return Case(build, federation.make_plan, federation.make_data, pooled=True)


# --- Clients of federated mutual learning -------------------------------------

SIZES = (3, 7, 4, 9, 5)
POPULATION = federation.make_population(SIZES)


def model(module):
  return core.Model.from_flax(module, np.zeros(federation.EXAMPLE.shape))


MLP, CNN, WIDE = map(model, federation.MODELS)
# A partial global model and an adaptor, which compile fast.
DENSE_TRUNK = model(
  nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(3)])
)
HEAD = core.Model.from_flax(nn.Dense(federation.CLASSES), np.zeros((1, 3)))
MUTUAL = [
  hetfl.Client(m, transform=noisy, adaptor=HEAD)
  for m in (MLP, WIDE, MLP, MLP, WIDE)
]


def mutual_plan(round, held=POPULATION, **settings):
  # Batches of four leave a last one that is not full.
  defaults = dict(batch_size=4, epochs=2, tail="short", uniform_weights=True)
  return hetfl.plan_round(
    {"train": held}, seed=0, round=round, **{**defaults, **settings}
  )


def mutual_data():
  return {"train": jax.device_put(dict(POPULATION.bank))}


# --- Parties ------------------------------------------------------------------

PARTY_CLASSES = 4
EXAMPLES = (np.arange(4), np.arange(4, 11), np.arange(2, 9))


class PartyMlp(nn.Module):
  """A dense network with dropout and batch normalisation; soon compiled."""

  width: int
  dropout: float

  @nn.compact
  def __call__(self, x, train: bool = False):
    x = nn.Dense(self.width)(x.reshape(x.shape[0], -1))
    x = nn.relu(nn.BatchNorm(not train, momentum=0.9)(x))
    x = nn.Dropout(self.dropout, deterministic=not train)(x)
    return nn.Dense(PARTY_CLASSES, use_bias=False, name="head")(x)


def make_bank(n, seed, shape=(2, 3, 1)):
  rng = np.random.default_rng(seed)
  return {
    "x": rng.normal(size=(n, *shape)).astype(np.float32),
    "y": rng.integers(0, PARTY_CLASSES, n).astype(np.int32),
  }


PUBLIC, PRIVATE = make_bank(24, 0), make_bank(11, 1)
PARTIES = [
  hetfl.Participant(
    core.Model.from_flax(
      PartyMlp(width, 0.25), np.zeros((1, *PUBLIC["x"].shape[1:]))
    ),
    f"party{k}",
    learning_rate=2.0 ** -(6 + k),
    l2=0.125,
    penalty=party_models.head_penalty,
    optimizer=optax.sgd,
  )
  for k, width in enumerate((3, 5, 4))
]


def held_by_parties(bank):
  """Each party's examples by its name."""
  return {
    party.name: population.Subset(bank, index.astype(np.int32))
    for party, index in zip(PARTIES, EXAMPLES)
  }


def party_plan(round):
  return hetfl.plan_fedmd(
    population.Subset.whole(PUBLIC),
    held_by_parties(PRIVATE),
    seed=0,
    round=round,
    subset=12,
    digest_batch_size=5,
    revisit_batch_size=3,
    revisit_epochs=2,
  )


def party_data():
  private = jax.device_put(PRIVATE)
  data = dict.fromkeys([party.name for party in PARTIES], private)
  return data | {"public": jax.device_put(PUBLIC), "stopping": private}


def public(method, server=False, **options):
  """A method of parties that share scores on public examples."""

  def build(runner, rounds, **changes):
    del rounds
    *group, last = parties(**changes)
    if server:  # Has no data of its own.
      options["server"] = dataclasses.replace(last, name="server")
    return method(
      [*group, last],
      public_transform=changes.get("transform"),
      eval_batch_size=5,
      engine=runner,
      **options,
    )

  return Case(build, party_plan, party_data)


def fit_plan(round):
  return hetfl.plan_fit(
    held_by_parties(PRIVATE),
    population.Subset(PRIVATE, np.arange(5, dtype=np.int32)),
    seed=0,
    round=round,
    batch_size=3,
  )


def codistilling(build, **options):
  """Pools and a distiller, which prepares its batches as the pools do."""

  def of_pools(runner, rounds, **changes):
    transform = changes.get("transform", noisy)
    return build(
      changed(make_pools(models=federation.DENSE), **changes),
      make_distiller(transform=transform),
      rounds=rounds,
      engine=runner,
      **options,
    )

  return pooled(of_pools)


def of_clients(runner, rounds, sequential=False, **changes):
  del rounds
  if model := changes.get("model"):
    changes["adaptor"] = None
  return hetfl.fml(
    changed(MUTUAL, **changes),
    global_model=model or DENSE_TRUNK,
    alpha=0.75,
    beta=0.25,
    learning_rate=0.125,
    sequential=sequential,
    engine=runner,
  )


def parties(model=None, **changes):
  if model:  # The penalty is of a head.
    changes |= dict(model=model, penalty=None)
  return changed(PARTIES, **changes)


# --- Clients that keep models of their own ------------------------------------

FEATURES = 4
BODIES = [
  model(nn.Sequential([lambda x: x.reshape(len(x), -1), *layers]))
  for layers in (
    [nn.Dense(FEATURES)],
    [nn.Dense(5), nn.relu, nn.Dense(FEATURES)],
  )
]
TOP = core.Model.from_flax(
  nn.Dense(federation.CLASSES), np.zeros((1, FEATURES))
)


def with_top(body):
  """A body with the head that all have."""
  return headed(body, TOP)


def with_small(body):
  """A body around a small model with one feature, and heads."""
  one = model(nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(1)]))
  dense = lambda inputs, outputs: core.Model.from_flax(
    nn.Dense(outputs), np.zeros((1, inputs))
  )
  return matryoshka(
    body,
    TOP,
    dense(1 + FEATURES, FEATURES),
    shared_body=one,
    shared_head=dense(1, federation.CLASSES),
  )


def personal(method, models=BODIES, whole=with_top, **options):
  """A method of clients whose models are made of bodies of some kinds."""

  def build(runner, rounds, **changes):
    del rounds
    bodies = [changes.pop("model")] if "model" in changes else models
    kinds = list(map(whole, bodies))
    kinds = [kinds[k % len(kinds)] for k in range(5)]
    clients = [hetfl.Client(model, transform=noisy) for model in kinds]
    return method(
      changed(clients, **changes),
      learning_rate=0.125,
      engine=runner,
      **options,
    )

  return Case(build, mutual_plan, mutual_data)


# Small models and a large one of one head.
HEADED = [logits_only(headed(body, TOP)) for body in (*BODIES, BODIES[1])]


def teaching(runner, rounds, **changes):
  """Pools whose models, of some kinds, teach the server's."""
  pools = make_pools(models=federation.DENSE)
  pools = [
    dataclasses.replace(pool, model=kind) for pool, kind in zip(pools, HEADED)
  ]
  server = hetfl.Participant(HEADED[-1], "server", learning_rate=0.125)
  shared = None if "model" in changes else "head"
  changes = dict(transform=noisy) | changes
  *pools, server = changed([*pools, server], **changes)
  return fedet(
    pools, server, diversity=0.5, shared=shared, rounds=rounds, engine=runner
  )


bare = functools.partial(personal, whole=lambda body: body)
SIZED = dict(num_classes=federation.CLASSES, num_features=FEATURES)
METHODS = {
  "ditto": bare(ditto, BODIES[:1]),
  # There may be classes of which nobody has an example.
  "fd": bare(fd, num_classes=FEATURES),
  "fedgen": personal(
    functools.partial(fedgen, head=TOP),
    **SIZED,
    server_learning_rate=0.125,
    server_steps=2,
    server_batch_size=4,
    noise=2,
    hidden=3,
  ),
  "fedgh": personal(
    functools.partial(fedgh, head=TOP),
    server_learning_rate=0.125,
    server_batch_size=4,
  ),
  "fedgkt": personal(
    functools.partial(fedgkt, server=TOP),
    num_classes=federation.CLASSES,
    num_examples=99,
    server_learning_rate=0.125,
    server_epochs=2,
    server_batch_size=4,
  ),
  "fedkd": bare(
    lambda clients, **options: fedkd(
      clients, mentee=clients[0].model, **options
    ),
  ),
  "fedmrl": personal(fedmrl, whole=with_small),
  "fedproto": personal(fedproto, **SIZED),
  "fedtgp": personal(
    fedtgp,
    **SIZED,
    server_learning_rate=0.125,
    server_epochs=2,
    server_batch_size=4,
  ),
  "heterofl": bare(
    lambda clients, **options: heterofl(
      clients, global_model=clients[0].model, **options
    ),
    [WIDE, MLP],
  ),
  "lgfedavg": personal(lgfedavg),
  "scaffold": bare(scaffold, BODIES[:1], server_lr=0.5),
}

CASES = {
  "fedavg": pooled(
    lambda runner, rounds, **changes: hetfl.fedavg(
      changed(make_pools(), **changes), rounds=rounds, engine=runner
    )
  ),
  "periodic": codistilling(hetfl.periodic_codist, period=2),
  "merged": codistilling(hetfl.merged_codist, alpha=0.5),
  "feddf": codistilling(feddf),
  "fedet": pooled(teaching),
  "fml": Case(of_clients, mutual_plan, mutual_data),
  "fit": Case(
    lambda runner, rounds, **changes: hetfl.fit(
      parties(**changes), patience=2, engine=runner
    ),
    fit_plan,
    party_data,
  ),
  "fedmd": public(hetfl.fedmd, consensus_weights=(3.0, 1.0, 2.0)),
  "dsfl": public(dsfl, server=True, consensus_weights=(3.0, 1.0, 2.0)),
  "ktpfl": public(ktpfl, temperature=2.0, coefficients_lr=0.25),
  **METHODS,
}


@functools.cache
def initial(name):
  """An algorithm's first state, which is the same for every engine."""
  return jax.jit(CASES[name].build(None, 4).init)(jax.random.key(0))


def run(name, algorithm, rounds, *, state=None, first=1):
  """Runs some rounds; returns the state and the last metrics."""
  case = CASES[name]
  state = initial(name) if state is None else state
  data = case.data()
  for round in range(first, first + rounds):
    state, metrics = algorithm.step(state, case.plan(round), data)
  return state, metrics


def arrays(state):
  """All of a state but its key, which cannot be compared with a tolerance."""
  return state.replace(key=None)
