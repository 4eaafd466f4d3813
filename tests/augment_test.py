"""Random views of images."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import augment


def test_crops_and_flips_are_independent():
  # 2x2 pixels in a border of one: 9 crops, which no flip turns into another.
  recipe = dataclasses.replace(
    augment.RECIPES["digits8"], size=2, pad=1, flip=True
  )
  images = jnp.tile(jnp.array([10, 20, 30, 40], jnp.uint8), (7200, 1))
  batch = {"x": images.reshape(-1, 2, 2, 1)}
  views = {
    9 * 2: recipe.train,  # Left and right.
    9 * 4: recipe.distill,  # Top and bottom too.
  }
  for number, view in views.items():
    x = np.asarray(view(jax.random.key(0), batch)["x"]).reshape(-1, 4)
    _, counts = np.unique(x.round(3), axis=0, return_counts=True)
    assert len(counts) == number
    mean = 7200 / number
    assert abs(counts - mean).max() < 5 * mean**0.5
