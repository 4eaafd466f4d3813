"""Every algorithm, small, for the tests of what all of them must do."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax

from hetfl import (
  Algorithm,
  Client,
  core,
  Distiller,
  fedavg,
  fedavg_server,
  fedmd,
  fit,
  fml,
  merged_codist,
  Participant,
  periodic_codist,
  plan_fedmd,
  plan_fit,
  plan_round,
  Subset,
)
from hetfl.engine import Engine
from hetfl.models import fedmd as party_models
from tests import federation


class Case(NamedTuple):
  """An algorithm and all that its steps take.

  Attributes:
    build: (engine, rounds) -> the algorithm.
    plan: round -> the round's plan.
    data: () -> the banks, on the device.
    unlike: names of hyper-parameters in which trials may differ.
    pooled: whether its state is of pools.
  """

  build: Callable[[Engine | None, int], Algorithm]
  plan: Callable[[int], Any]
  data: Callable[[], Any]
  unlike: tuple[str, ...]
  pooled: bool = False


def noisy(key, batch):
  """A transform that shows which key, and which batch, it was given."""
  return {**batch, "x": batch["x"] + jax.random.uniform(key, batch["x"].shape)}


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
  return Distiller(**{**defaults, **settings})


def make_pools(**settings):
  return federation.make_pools(
    server_optimizer=fedavg_server, server_lr=1.0, **settings
  )


def pooled(build):
  return Case(
    build,
    federation.make_plan,
    federation.make_data,
    ("learning_rate", "server_lr", "distill_lr", "alpha"),
    pooled=True,
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
  Client(m, transform=noisy, adaptor=HEAD) for m in (MLP, WIDE, MLP, MLP, WIDE)
]


def mutual_plan(round):
  # Batches of four leave a last one that is not full.
  return plan_round(
    {"train": POPULATION},
    seed=0,
    round=round,
    batch_size=4,
    epochs=2,
    tail="short",
    uniform_weights=True,
  )


# --- Parties ------------------------------------------------------------------

PARTY_CLASSES = 4
NAMES = ("party0", "party1", "party2")


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
EXAMPLES = {
  name: Subset(PRIVATE, index)
  for name, index in zip(
    NAMES, (np.arange(4), np.arange(4, 11), np.arange(2, 9))
  )
}
PARTIES = [
  Participant(
    core.Model.from_flax(
      PartyMlp(width, 0.25), np.zeros((1, *PUBLIC["x"].shape[1:]))
    ),
    name,
    learning_rate=2.0 ** -(6 + k),
    l2=0.125,
    penalty=party_models.head_penalty,
    optimizer=optax.sgd,
  )
  for k, (name, width) in enumerate(zip(NAMES, (3, 5, 4)))
]


def party_plan(round):
  return plan_fedmd(
    Subset.whole(PUBLIC),
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
  return {"public": jax.device_put(PUBLIC)} | dict.fromkeys(NAMES, private)


def fit_plan(round):
  stopping = Subset(PRIVATE, np.arange(5, dtype=np.int32))
  return plan_fit(EXAMPLES, stopping, seed=0, round=round, batch_size=3)


def fit_data():
  return dict.fromkeys((*NAMES, "stopping"), jax.device_put(PRIVATE))


CASES = {
  "fedavg": pooled(
    lambda runner, rounds: fedavg(make_pools(), rounds=rounds, engine=runner)
  ),
  "periodic": pooled(
    lambda runner, rounds: periodic_codist(
      make_pools(), make_distiller(), period=2, rounds=rounds, engine=runner
    )
  ),
  "merged": pooled(
    lambda runner, rounds: merged_codist(
      make_pools(), make_distiller(), alpha=0.5, rounds=rounds, engine=runner
    )
  ),
  "fml": Case(
    lambda runner, rounds: fml(
      MUTUAL,
      global_model=DENSE_TRUNK,
      alpha=0.75,
      beta=0.25,
      learning_rate=0.125,
      engine=runner,
    ),
    mutual_plan,
    lambda: {"train": jax.device_put(dict(POPULATION.bank))},
    ("alpha", "beta", "learning_rate", "temperature"),
  ),
  "fit": Case(
    lambda runner, rounds: fit(PARTIES, patience=2, engine=runner),
    fit_plan,
    fit_data,
    ("learning_rate", "l2"),
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
    ("learning_rate", "l2", "consensus_weights"),
  ),
}


def unlike(name, state, scale):
  """The state of a trial with other hyper-parameters; as it is at scale 1."""
  values = {}
  for key in set(CASES[name].unlike) & set(state.hyper):
    value = state.hyper[key]
    # Of weights only the ratios matter.
    if key == "consensus_weights":
      values[key] = value.at[0].multiply(scale)
    else:
      values[key] = value * scale
  return core.with_hyper(state, **values)


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
