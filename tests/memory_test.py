"""Memory does not grow with the rounds, nor beyond what one asks for."""

import gc

import jax
import jax.numpy as jnp
import pytest

from hetfl import (
  core,
  Distiller,
  engine,
  fedmd,
  merged_codist,
  Participant,
  periodic_codist,
  plan_fedmd,
  Subset,
)
from tests import federation


def resident_megabytes():
  with open("/proc/self/statm", encoding="ascii") as f:
    return int(f.read().split()[1]) * 4096 / 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
  "name,threads", [("periodic", False), ("merged", True)]
)
def test_memory_is_flat_over_300_rounds(name, threads):
  runner = engine.Threads(2) if threads else engine.Inline()
  args = (federation.make_pools(models=federation.DENSE), Distiller())
  options = dict(rounds=300, engine=runner)
  if name == "periodic":
    algorithm = periodic_codist(*args, period=3, **options)
  else:
    algorithm = merged_codist(*args, alpha=0.5, **options)
  step = runner.compile(algorithm.step, donate=(0,))
  data = federation.make_data()
  state = algorithm.init(jax.random.key(0))
  seen = {}
  for round in range(1, 301):
    state, _ = step(state, federation.make_plan(round), data)
    if round in (100, 300):
      jax.block_until_ready(state)
      gc.collect()
      seen[round] = (len(jax.live_arrays()), resident_megabytes())
  assert seen[300][0] <= seen[100][0]
  assert seen[300][1] <= seen[100][1] * 1.01 + 4


def test_communicate_holds_as_many_scores_as_it_is_told():
  """Also where rows run side by side, as on accelerators."""
  bank = {"x": jnp.ones((512, 256)), "y": jnp.zeros(512, jnp.int32)}
  model = core.Model(
    lambda key: core.Variables(jnp.zeros((256, 2)), {}),
    lambda v, x, key, train: (x @ v.params, v.stats),
  )
  public, party = Subset.whole(bank), Participant(model, "a", learning_rate=1.0)
  plan = plan_fedmd(
    public,
    {"a": public},
    seed=0,
    round=1,
    subset=512,
    digest_batch_size=1,
    revisit_batch_size=1,
  )
  data = {"public": bank, "a": bank}

  def bytes_held(eval_batch_size):
    algorithm = fedmd(
      [party],
      eval_batch_size=eval_batch_size,
      engine=engine.Inline(at_once=512),
    )
    state = algorithm.init(jax.random.key(0))
    program = jax.jit(algorithm.step).lower(state, plan, data).compile()
    return program.memory_analysis().temp_size_in_bytes

  # 496 inputs of 256 numbers of four bytes.
  assert bytes_held(512) - bytes_held(16) > 0.9 * 496 * 256 * 4
