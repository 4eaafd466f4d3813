"""Memory does not grow with the rounds."""

import gc

import jax
import pytest

from hetfl import Distiller, engine, merged_codist, periodic_codist
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
