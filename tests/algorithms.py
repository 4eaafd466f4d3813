"""Every algorithm, small, for the tests of what all of them must do."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax

from hetfl import codist, core, distill, engine, party, population
from hetfl.fedavg import fedavg
from hetfl.fedmd import fedmd, plan_fedmd
from hetfl.fml import fml
from hetfl.models import fedmd as party_models
from hetfl.mutual import MutualClient
from hetfl.mutual_planning import group_clients, plan_mutual
from hetfl.pool import fedavg_server
from tests import federation


class Case(NamedTuple):
  """An algorithm and all that its steps take.

  Attributes:
    build: (engine, rounds) -> the algorithm.
    plan: (round, lanes) -> the round's plan.
    data: () -> the banks, on the device.
    unlike: (state, scale) -> the state of a trial with other hyper-parameters;
      a scale of 1 gives those of the first trial.
    lanes: whether the plan has lanes.
  """

  build: Callable[[engine.Engine | None, int], core.Algorithm]
  plan: Callable[[int, int], Any]
  data: Callable[[], Any]
  unlike: Callable[[Any, float], Any]
  lanes: bool = False


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
    server_optimizer=fedavg_server, server_lr=1.0, **settings
  )


def unlike_pools(state, scale):
  pools = tuple(
    pool.replace(hyper=scaled(pool.hyper, scale)) for pool in state.pools
  )
  return state.replace(pools=pools, hyper=scaled(state.hyper, scale))


def pooled(build):
  return Case(
    build,
    lambda round, lanes: federation.make_plan(round, num_lanes=lanes),
    federation.make_data,
    unlike_pools,
    lanes=True,
  )


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
  MutualClient(m, transform=noisy, adaptor=HEAD)
  for m in (MLP, WIDE, MLP, MLP, WIDE)
]


def mutual_plan(round, lanes):
  del lanes
  # Batches of four leave a last one that is not full.
  return plan_mutual(
    [POPULATION.positions(k) for k in range(len(SIZES))],
    group_clients(MUTUAL),
    seed=0,
    round=round,
    batch_size=4,
    epochs=2,
  )


def mutual(build):
  return Case(
    build,
    mutual_plan,
    lambda: {"train": jax.device_put(dict(POPULATION.bank))},
    lambda state, scale: state.replace(hyper=scaled(state.hyper, scale)),
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
  party.Party(
    name=f"party{k}",
    model=core.Model.from_flax(
      PartyMlp(width, 0.25), np.zeros((1, *PUBLIC["x"].shape[1:]))
    ),
    learning_rate=2.0 ** -(6 + k),
    l2=0.125,
    penalty=party_models.head_penalty,
    optimizer=optax.sgd,
  )
  for k, width in enumerate((3, 5, 4))
]


def party_plan(round, lanes):
  del lanes
  return plan_fedmd(
    population.Subset.whole(PUBLIC),
    EXAMPLES,
    seed=0,
    round=round,
    subset=12,
    digest_batch_size=5,
    revisit_batch_size=3,
    revisit_epochs=2,
  )


def party_data():
  private = jax.device_put(PRIVATE)
  return {
    "public": jax.device_put(PUBLIC),
    "private": (private,) * len(EXAMPLES),
  }


def fit_plan(round, lanes):
  del lanes
  return party.plan_fit(EXAMPLES, seed=0, phase=0, round=round, batch_size=3)


def fit_data():
  bank = jax.device_put(PRIVATE)
  stopping = population.Subset(bank, np.arange(5, dtype=np.int32))
  return {"train": (bank,) * len(EXAMPLES), "stopping": stopping}


def unlike_parties(state, scale):
  """Rates, penalties and, where there are any, weights of the consensus."""
  parties = tuple(
    p.replace(hyper=scaled(p.hyper, scale)) for p in state.parties
  )
  state = state.replace(parties=parties)
  if not hasattr(state, "hyper"):
    return state
  weights = state.hyper["consensus_weights"]
  weights = weights.at[0].multiply(scale)
  return state.replace(hyper={**state.hyper, "consensus_weights": weights})


CASES = {
  "fedavg": pooled(
    lambda runner, rounds: fedavg(make_pools(), rounds=rounds, engine=runner)
  ),
  "periodic": pooled(
    lambda runner, rounds: codist.periodic_codist(
      make_pools(), make_distiller(), period=2, rounds=rounds, engine=runner
    )
  ),
  "merged": pooled(
    lambda runner, rounds: codist.merged_codist(
      make_pools(), make_distiller(), alpha=0.5, rounds=rounds, engine=runner
    )
  ),
  "fml": mutual(
    lambda runner, rounds: fml(
      MUTUAL,
      global_model=DENSE_TRUNK,
      alpha=0.75,
      beta=0.25,
      learning_rate=0.125,
      engine=runner,
    )
  ),
  "fit": Case(
    lambda runner, rounds: party.fit(PARTIES, patience=2, engine=runner),
    fit_plan,
    fit_data,
    unlike_parties,
  ),
  "fedmd": Case(
    lambda runner, rounds: fedmd(
      PARTIES,
      consensus_weights=(3.0, 1.0, 2.0),
      eval_batch_size=5,
      engine=runner,
    ),
    party_plan,
    party_data,
    unlike_parties,
  ),
}


@functools.cache
def initial(name):
  """An algorithm's first state, which is the same for every engine."""
  return jax.jit(CASES[name].build(None, 4).init)(jax.random.key(0))


def run(name, algorithm, rounds, *, state=None, first=1, lanes=1):
  """Runs some rounds; returns the state and the last metrics."""
  case = CASES[name]
  state = initial(name) if state is None else state
  data = case.data()
  for round in range(first, first + rounds):
    state, metrics = algorithm.step(state, case.plan(round, lanes), data)
  return state, metrics


def arrays(state):
  """All of a state but its key, which cannot be compared with a tolerance."""
  return state.replace(key=None)
