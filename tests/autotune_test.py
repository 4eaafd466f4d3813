"""Choices of speed: measured once, remembered, never in the way."""

import dataclasses
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetfl import core, engine, Plan
from hetfl.run import autotune
from tests.runs import ROOT

CANDIDATES = {"lanes": [4, 2, 8], "microbatch": [16, 0]}
SECONDS = {(4, 16): 1.0, (2, 16): 0.98, (8, 16): 0.5, (8, 0): 0.8}


class Measure:
  def __init__(self):
    self.asked = []

  def __call__(self, choice):
    self.asked.append((choice["lanes"], choice["microbatch"]))
    return SECONDS[self.asked[-1]]


def choose(cache, measure, key="here", candidates=CANDIDATES):
  return autotune.choose(measure, candidates, key=key, cache=cache)


def test_the_fastest_is_found_and_remembered(tmp_path):
  cache, measure = tmp_path / "deep/er/autotune.json", Measure()
  assert choose(cache, measure) == {"lanes": 8, "microbatch": 16}
  # 0.98 is no reason to leave 4; microbatches are tried with 8 lanes.
  assert measure.asked == [(4, 16), (2, 16), (8, 16), (8, 0)]
  again = Measure()
  assert choose(cache, again) == {"lanes": 8, "microbatch": 16}
  assert not again.asked
  assert choose(cache, again, "elsewhere") and again.asked
  assert len(json.loads(cache.read_text())) == 2


def test_nothing_to_choose_is_not_measured(tmp_path):
  cache = tmp_path / "autotune.json"
  one = {"lanes": [4], "conv": ["patches"]}
  found = choose(cache, None, candidates=one)
  assert found == {"lanes": 4, "conv": "patches"}


@pytest.mark.parametrize(
  "content",
  [b"", b"{", b"[1]"],
)
def test_a_cache_that_cannot_be_used_is_made_anew(tmp_path, content):
  cache, measure = tmp_path / "autotune.json", Measure()
  cache.write_bytes(content)
  assert choose(cache, measure)["lanes"] == 8 and measure.asked
  (stored,) = json.loads(cache.read_text()).values()
  assert stored["lanes"] == 8


def test_keys_are_of_shapes_and_not_of_values():
  def algorithm(width, rate):
    init = lambda key: {"w": jnp.zeros(width), "rate": jnp.asarray(rate)}
    return core.Algorithm(init, None)

  plan, data = np.zeros((2, 3), np.int32), {"x": np.zeros(7)}
  key = autotune.key_of(algorithm(4, 0.1), plan, data)
  assert key == autotune.key_of(algorithm(4, 0.2), plan + 1, data)
  assert key != autotune.key_of(algorithm(5, 0.1), plan, data)
  assert key != autotune.key_of(algorithm(4, 0.1), plan[:1], data)
  assert jax.__version__ in key and f"cpu {autotune.processor()}" in key


def test_the_first_run_which_compiles_is_not_counted(monkeypatch):
  calls = []

  def step(state, plan, data):
    calls.append(plan)
    return state + data, {}

  init = lambda key: jnp.zeros(())
  seconds = autotune.seconds_of(step, init, 5, jnp.ones(()))
  assert calls == [5] * 4 and 0 < seconds < 1
  # Accelerators do not wait for each step, nor does training.
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  autotune.seconds_of(step, init, 5, jnp.ones(()))
  assert calls == [5] * (4 + 4 * 5)


class Periodic:
  """An experiment whose rounds take a second, and exchanges ten more."""

  engine = engine.Threads(1)
  lanes = lambda self, s: s.lanes
  device_data = lambda self, s: ()
  plan = lambda self, s, round: Plan(np.int32(round), {})

  def __init__(self, s):
    del s

  def algorithm(self, s):
    del s
    init = lambda key: jnp.zeros(())
    step = lambda state, plan, data: (state, plan)
    return core.Algorithm(init, step)


@pytest.mark.parametrize("number", [1, 8])
@pytest.mark.parametrize("every, expected", [(1, 11.0), (5, 3.0), (200, None)])
def test_a_rounds_time_is_the_mean_over_a_period(
  monkeypatch, tmp_path, every, expected, number
):
  """If exchanges are rare, they do not count, nor are microbatches tuned."""
  with monkeypatch.context() as path:
    path.syspath_prepend(str(ROOT / "experiments"))
    autotuning = importlib.import_module("autotuning")
    codist = importlib.import_module("codist")
  found = {}

  def choose(measure, candidates, key):
    found.update(candidates)
    found["seconds"] = measure({})
    return {}

  def seconds_of(step, init, plan, data):
    due = np.atleast_1d(plan.round) % every == 0
    return float(np.sum(np.where(due, 11.0, 1.0)))

  monkeypatch.setattr(autotuning.autotune_lib, "choose", choose)
  monkeypatch.setattr(autotuning.autotune_lib, "seconds_of", seconds_of)
  given = {"clients_per_round": (4, 2), "rounds": 300, "codist_period": every}
  given |= {"lanes": 4, "microbatch": 16, "rounds_per_dispatch": number}
  words = {"periodic", "images", "hetfl_models", "cpu", "inline", "device"}
  s = codist.Codist.resolve(given, words)
  s = dataclasses.replace(s, algorithm="periodic")
  nothing = autotuning.Given({})
  autotuning.measure(Periodic, nothing, s, tmp_path / "none")
  assert ("microbatch" in found) == (expected is not None)
  assert found["lanes"] == [4, 2]  # Eight are more than the clients.
  assert found["seconds"] == pytest.approx(expected or 1.0)
