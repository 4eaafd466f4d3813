"""Every algorithm, small, for the tests of what all of them must do."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax

import hetfl
from hetfl import core, distill, engine, population
from hetfl.models import fedmd as party_models
from tests import federation


class Case(NamedTuple):
  """An algorithm and all that its steps take.

  Attributes:
    build: (engine, rounds) -> the algorithm.
    plan: round -> the round's plan.
    data: () -> the banks, on the device.
    pooled: whether it is of pools.
  """

  build: Callable[[engine.Engine | None, int], core.Algorithm]
  plan: Callable[[int], Any]
  data: Callable[[], Any]
  pooled: bool = False


def noisy(key, batch):
  """A transform that shows which key, and which batch, it was given."""
  return {**batch, "x": batch["x"] + jax.random.uniform(key, batch["x"].shape)}


def scaled(tree, scale):
  return jax.tree.map(lambda x: x * scale, tree)


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


def mutual_plan(round):
  # Batches of four leave a last one that is not full.
  return hetfl.plan_round(
    {"train": POPULATION},
    seed=0,
    round=round,
    batch_size=4,
    epochs=2,
    tail="short",
    uniform_weights=True,
  )


def mutual(build):
  return Case(
    build,
    mutual_plan,
    lambda: {"train": jax.device_put(dict(POPULATION.bank))},
  )


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


def fit_plan(round):
  return hetfl.plan_fit(
    held_by_parties(PRIVATE),
    population.Subset(PRIVATE, np.arange(5, dtype=np.int32)),
    seed=0,
    round=round,
    batch_size=3,
  )


CASES = {
  "fedavg": pooled(
    lambda runner, rounds: hetfl.fedavg(
      make_pools(), rounds=rounds, engine=runner
    )
  ),
  "periodic": pooled(
    lambda runner, rounds: hetfl.periodic_codist(
      make_pools(), make_distiller(), period=2, rounds=rounds, engine=runner
    )
  ),
  "merged": pooled(
    lambda runner, rounds: hetfl.merged_codist(
      make_pools(), make_distiller(), alpha=0.5, rounds=rounds, engine=runner
    )
  ),
  "fml": mutual(
    lambda runner, rounds: hetfl.fml(
      MUTUAL,
      global_model=DENSE_TRUNK,
      alpha=0.75,
      beta=0.25,
      learning_rate=0.125,
      engine=runner,
    )
  ),
  "fit": Case(
    lambda runner, rounds: hetfl.fit(PARTIES, patience=2, engine=runner),
    fit_plan,
    party_data,
  ),
  "fedmd": Case(
    lambda runner, rounds: hetfl.fedmd(
      PARTIES,
      consensus_weights=(3.0, 1.0, 2.0),
      eval_batch_size=5,
      engine=runner,
    ),
    party_plan,
    party_data,
  ),
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
