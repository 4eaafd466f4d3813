"""Image recipes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetfl import augment
from hetfl.data.vision import load_digits


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


def image(height, width):
  """Pixels that say where they are."""
  rows, columns = np.mgrid[:height, :width]
  return (rows * 16 + columns).astype(np.uint8)


def test_small_images_are_refused():
  x = jnp.zeros((1, 28, 28, 1))
  with pytest.raises(ValueError, match="larger than the images, 28x28"):
    augment.center_crop(x, 32)
  with pytest.raises(ValueError, match="the images, 30x30, padded by 1"):
    augment.random_crop(jax.random.key(0), x, 32, 1)


def test_crops_are_windows_and_reach_every_place():
  x = jnp.broadcast_to(image(8, 8)[None, :, :, None], (400, 8, 8, 1))
  crops = np.asarray(augment.random_crop(jax.random.key(0), x, 6, 0))
  starts = set()
  for crop in crops[..., 0]:
    top, left = divmod(int(crop[0, 0]), 16)
    np.testing.assert_array_equal(
      crop, image(8, 8)[top : top + 6, left:][:, :6]
    )
    starts.add((top, left))
  assert starts == {(i, j) for i in range(3) for j in range(3)}


@pytest.mark.parametrize("shape, size, pad", [((9, 8), 5, 0), ((7, 7), 7, 4)])
def test_crops_of_tpus_are_those_of_others(shape, size, pad, monkeypatch):
  x = jnp.broadcast_to(image(*shape)[None, :, :, None], (200, *shape, 1))
  x = 100 + x.astype(jnp.uint8)  # Up to 235: all eight bits are needed.
  crop = lambda: np.asarray(
    augment.random_crop(jax.random.key(3), x, size, pad)
  )
  expected = crop()
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  np.testing.assert_array_equal(crop(), expected)


def test_padding_is_zero_and_flips_are_fair():
  x = jnp.ones((300, 4, 4, 1), jnp.uint8)
  crops = np.asarray(augment.random_crop(jax.random.key(1), x, 4, 1))
  kept = crops.sum(axis=(1, 2, 3))
  # 3 x 3 offsets: whole, or without a row, a column or both.
  assert set(kept) == {16, 12, 9}
  x = jnp.broadcast_to(image(4, 4)[None, :, :, None], (1000, 4, 4, 1))
  for axis in (1, 2):
    flipped = augment.random_flip(jax.random.key(2), x, axis)
    is_flipped = np.asarray(flipped == jnp.flip(x, axis)).all(axis=(1, 2, 3))
    is_same = np.asarray(flipped == x).all(axis=(1, 2, 3))
    assert (is_flipped ^ is_same).all()
    assert 0.45 < is_flipped.mean() < 0.55


@pytest.mark.parametrize("name", augment.RECIPES)
def test_recipes(name):
  recipe = augment.RECIPES[name]
  side, channels = {"digits8": (8, 1), "mnist28": (28, 1)}.get(name, (32, 3))
  batch = {
    "x": jnp.full((5, side, side, channels), 255, jnp.uint8),
    "y": jnp.arange(5),
  }
  white = [(1 - m) / d for m, d in zip(recipe.mean, recipe.deviation)]
  evaluated = recipe.evaluate(batch)
  assert evaluated["x"].shape == (5, recipe.size, recipe.size, channels)
  np.testing.assert_allclose(evaluated["x"][0, 0, 0], white, rtol=1e-5)
  for transform in (recipe.train, recipe.distill):
    out = transform(jax.random.key(0), batch)
    assert out["x"].shape == evaluated["x"].shape
    assert out["x"].dtype == jnp.float32
    np.testing.assert_array_equal(out["y"], batch["y"])
    # Padding is black before it is normalised.
    black = [-m / d for m, d in zip(recipe.mean, recipe.deviation)]
    assert np.isclose(np.asarray(out["x"]).min(), min(white + black)) or (
      recipe.pad == 0
    )


@pytest.mark.parametrize("name", augment.RECIPES)
def test_which_ways_recipes_flip_and_where_they_cut(name):
  recipe = augment.RECIPES[name]
  side, channels = {"digits8": (8, 1), "mnist28": (28, 1)}.get(name, (32, 3))
  middle, ways = recipe.size // 2 - 1, {}
  for axis in (1, 2):
    # Pixels that count rows, or columns.
    x = np.expand_dims(np.arange(side, dtype=np.uint8), [0, 3 - axis, 3])
    x = np.broadcast_to(x, (1, side, side, channels))
    keys = jax.random.split(jax.random.key(axis), 64)
    for transform in (recipe.train, recipe.distill):
      of_one = lambda key, x=x, f=transform: f(key, {"x": x})["x"][0]
      out = np.asarray(jax.vmap(of_one)(keys))
      steps = np.diff(out, axis=axis)[:, middle, middle, 0]
      ways[transform.__name__, axis] = set(np.sign(steps).tolist())
    first = recipe.evaluate({"x": x})["x"][0, 0, 0, 0]
    first = 255 * (first * recipe.deviation[0] + recipe.mean[0])
    np.testing.assert_allclose(first, (side - recipe.size) // 2, atol=1e-3)
  both = {1.0, -1.0} if recipe.flip else {1.0}
  assert ways == {
    ("train", 1): {1.0},
    ("train", 2): both,
    ("distill", 1): both,
    ("distill", 2): both,
  }
  assert recipe.flip == (channels == 3)


def test_images_of_a_batch_share_a_crop_and_a_flip_in_fedjax():
  x = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
  recipe = augment.RECIPES["pad32_batch"]
  offsets = set()
  for seed in range(8):
    key = jax.random.key(seed)
    out = recipe.train(key, {"x": x})["x"]
    alone = [recipe.train(key, {"x": x[i : i + 1]})["x"][0] for i in range(3)]
    np.testing.assert_array_equal(out, alone)
    one = augment.RECIPES["pad32"].train(key, {"x": x[:1]})["x"]
    np.testing.assert_array_equal(out[:1], one)
    offsets.add(np.asarray(out).tobytes())
  assert len(offsets) == 8


def test_pixels_are_normalised_by_the_published_numbers():
  for name in ("crop24", "pad32"):
    recipe = augment.RECIPES[name]
    assert recipe.mean == (0.4914, 0.4822, 0.4465)
    assert recipe.deviation == (0.2023, 0.1994, 0.2010)
  mnist = augment.RECIPES["mnist28"]
  assert (mnist.mean, mnist.deviation) == ((0.1307,), (0.3081,))
  x = load_digits().train["x"] / 255
  digits = augment.RECIPES["digits8"]
  np.testing.assert_allclose(x.mean(), digits.mean[0], atol=5e-3)
  np.testing.assert_allclose(x.std(), digits.deviation[0], atol=5e-3)
