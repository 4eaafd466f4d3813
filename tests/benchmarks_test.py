"""What the benchmarks count and how their rows are chosen."""

import jax.numpy as jnp
import pytest

from benchmarks import codist, compare, rounds
from hetfl import core
from hetfl.models import vision


def test_flops_of_the_small_cnn():
  # 24x24x3, SAME 3x3 convolutions of 16, 32, 32 channels, pooled by 2 twice;
  # dense 1152 -> 64 -> 128 -> 100.
  convolutions = [576 * 27 * 16, 144 * 144 * 32, 36 * 288 * 32]
  dense = [1152 * 64, 64 * 128, 128 * 100]
  forward = 2 * sum(convolutions + dense)
  assert codist.image_flops("small", False) == forward
  # As much again for kernels and for inputs, but for the images.
  assert codist.image_flops("small", True) == 3 * forward - 2 * convolutions[0]
  native = vision.small_cnn(100, conv="native")
  example = jnp.zeros((1, 24, 24, 3))
  counted = rounds.example_flops(
    core.Model.from_flax(native, example),
    core.cross_entropy,
    (4, 24, 24, 3),
    jnp.float32,
    False,
  )
  assert counted == forward


def test_rows_are_chosen_by_their_beginnings():
  every = codist.rows()
  assert compare.chosen(None, every) == list(every)
  assert compare.chosen("merged", every) == ["merged_plain"]
  with pytest.raises(ValueError, match="--only=fedprox: choose from fedavg_"):
    compare.chosen("merged,fedprox", every)


def test_turns_and_ratios(monkeypatch):
  clock, turns = [0.0], []
  monkeypatch.setattr(rounds.time, "perf_counter", lambda: clock[0])

  def takes(name, *seconds):
    seconds = iter(seconds)

    def run():
      turns.append(name)
      clock[0] += next(seconds)

    return run

  products = takes("products", 1.0, 2.0, 4.0)
  products.flops = 6e9
  row = rounds.take_turns(
    takes("ours", 1.0, 4.0, 2.0), takes("peer", 5.0, 4.0, 6.0), 3, products
  )
  assert turns == ["ours", "peer", "products"] * 3
  assert row == {
    "ours_s": 2,
    "ours_min_s": 1,
    "ours_max_s": 4,
    "peer_s": 5,
    "peer_min_s": 4,
    "peer_max_s": 6,
    "ratio": 3,  # the median of 5, 1 and 3, not 5 / 2
    "ceiling_gflop_s": 3,
  }
