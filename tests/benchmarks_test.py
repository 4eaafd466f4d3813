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


def test_turns_and_ratios():
  clock = []
  row = rounds.take_turns(lambda: clock.append(0), lambda: clock.append(1), 3)
  assert clock == [0, 1] * 3
  assert row["ours_min_s"] <= row["ours_s"] <= row["ours_max_s"]
  assert row["ratio"] > 0
