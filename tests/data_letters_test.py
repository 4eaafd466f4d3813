"""Letters from each of their sources, in files written as theirs are."""

import gzip

import numpy as np
import pytest
from scipy import io

from hetfl.data import DataError, letters
from hetfl.population import ClientPopulation
from tests.data_fedjax_test import _write
from tests.data_vision_test import _idx

SIZES = {"train": 30, "test": 27}


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
  """Small official sizes, and no data set that TFDS has prepared here."""
  monkeypatch.setattr(letters, "SIZES", SIZES)
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "no_tfds"))


def _images(n, seed):
  """Images as they are to be read: more ink at the top right."""
  rng = np.random.default_rng(seed)
  ramp = np.add.outer(-np.arange(28), np.arange(28)) + 28
  return (ramp + rng.integers(0, 190, (n, 28, 28))).astype(np.uint8)


def _expected():
  return {
    split: (_images(n, n), np.arange(n) % 26, np.arange(n) // 3)
    for split, n in SIZES.items()
  }


def _check(found, source, writers=True):
  assert (found.name, found.num_classes) == (source, 26)
  assert (found.clients is not None) == writers
  for split, (x, y, writer) in _expected().items():
    bank = getattr(found, split)
    if writers and split == "train":
      np.testing.assert_array_equal(found.clients, writer)
    np.testing.assert_array_equal(bank["x"][..., 0], x)
    np.testing.assert_array_equal(bank["y"], y)
    assert bank["x"].dtype == np.uint8 and bank["y"].dtype == np.int32


def _write_mat(path, labels_from=1):
  def part(x, y, writer):
    # MATLAB's arrays run down the columns: 784 pixels, column after column.
    columns = x.swapaxes(1, 2).reshape(len(x), -1)
    return {
      "images": columns,
      "labels": (y + labels_from).reshape(-1, 1).astype(float),
      "writers": writer.reshape(-1, 1).astype(float),
    }

  io.savemat(
    path,
    {"dataset": {name: part(*arrays) for name, arrays in _expected().items()}},
  )


def test_matlab(tmp_path):
  _write_mat(tmp_path / "emnist-letters.mat")
  _check(letters.load_letters(tmp_path), "mat")


@pytest.mark.parametrize("compressed", [False, True])
def test_idx_in_a_folder_of_the_folder(tmp_path, compressed):
  folder = tmp_path / "emnist"
  folder.mkdir()
  for split, (x, y, _) in _expected().items():
    arrays = {
      "images-idx3": x.swapaxes(1, 2),
      "labels-idx1": (y + 1).astype(np.uint8),
    }
    for what, array in arrays.items():
      content = _idx(array)
      path = folder / f"emnist-letters-{split}-{what}-ubyte"
      if compressed:
        path = path.with_name(path.name + ".gz")
        content = gzip.compress(content)
      path.write_bytes(content)
  _check(letters.load_letters(tmp_path), "idx", writers=False)
  with pytest.raises(DataError, match="letters.npz nor, without writers, emn"):
    letters.load_letters(tmp_path, writers=True)
  path.unlink()
  with pytest.raises(DataError, match="test-labels-idx1-ubyte.*no such file"):
    letters.load_letters(tmp_path)


def test_fedjax(tmp_path):
  for split, (x, y, writer) in _expected().items():
    digit = np.zeros((1, 28, 28), np.uint8)
    bank = {
      # A digit in front; upper and lower case in turn; ink dark on 1.
      "pixels": (1 - np.concatenate([digit, x]) / 255).astype(np.float32),
      "label": np.concatenate([[3], y + 10 + 26 * (y % 2)]).astype(np.int32),
    }
    writer = np.concatenate([[0], writer])
    population = ClientPopulation.from_lists(
      bank,
      [np.flatnonzero(writer == w) for w in np.unique(writer)],
      [f"f{w:04d}_00" for w in np.unique(writer)],
    )
    _write(population, tmp_path / f"federated_emnist_{split}.sqlite")
  _check(letters.load_letters(tmp_path), "fedjax")
  # The idx files come first, unless writers are requested.
  (tmp_path / "emnist-letters-train-images-idx3-ubyte").write_bytes(b"")
  _check(letters.load_letters(tmp_path, writers=True), "fedjax")


def test_npz_writers_are_for_training_or_for_testing(tmp_path):
  rng = np.random.default_rng(0)
  arrays = {
    "images": rng.integers(0, 256, (12, 28, 28)).astype(np.uint8),
    "labels": np.arange(12).astype(np.uint8),
    "writers": np.array([7, 7, 1, 1, 3, 3, 9, 9, 4, 4, 1, 7], np.uint8),
  }
  np.savez(tmp_path / "letters.npz", **arrays)
  found = letters.load_letters(tmp_path)
  # Five writers 1, 3, 4 | 7, 9.
  assert set(found.clients) == {1, 3, 4}
  kept = np.isin(arrays["writers"], [1, 3, 4])
  np.testing.assert_array_equal(
    found.train["x"][..., 0], arrays["images"][kept]
  )
  np.testing.assert_array_equal(found.test["y"], arrays["labels"][~kept])


def test_drawings_are_brought_to_mnists_form():
  # A square of 40 x 40 in a corner: 20 x 20 in the middle, rows 4 to 23.
  image = np.zeros((105, 105), np.uint8)
  image[60:100, 2:42] = 255
  expected = np.zeros((28, 28), np.uint8)
  expected[4:24, 4:24] = 255
  np.testing.assert_array_equal(letters.like_mnist(image), expected)
  # Means of what a pixel covers: 3 columns in 2, the middle one shared.
  share = letters._coverage(3, 2)
  np.testing.assert_allclose(share, [[2 / 3, 1 / 3, 0], [0, 1 / 3, 2 / 3]])
  assert not letters.like_mnist(np.zeros((5, 5), np.uint8)).any()


def test_bad_files_are_named(tmp_path):
  def refused(message, **arrays):
    if arrays:
      np.savez(tmp_path / "letters.npz", **arrays)
    with pytest.raises(DataError, match=message):
      letters.load_letters(tmp_path)

  refused("letters not found: data_dir=.*nist")
  with pytest.raises(DataError, match="data_dir=None"):
    letters.load_letters()
  images = np.zeros((2, 28, 28), np.uint8)
  refused(
    r"letters.npz: cannot be read \(has {'images': .*want images", images=images
  )
  # A pickle is never opened.
  objects = np.array([{}], object)
  refused("npz: cannot be read", images=objects, labels=[0], writers=[0])
  for writers in (["ann", "ben"], [0.1, 0.2]):
    arrays = dict(images=images, labels=[0, 1], writers=writers)
    refused("letters.npz: .*has .*'writers'.*want images", **arrays)
  refused(
    "has one writer, want two",
    images=images,
    labels=np.arange(2),
    writers=np.ones(2, int),
  )
  (tmp_path / "letters.npz").write_bytes(b"PK\3\4 not a zip")
  refused("letters.npz: cannot be read")
  mat = tmp_path / "emnist-letters.mat"
  mat.write_bytes(b"not matlab")
  refused("emnist-letters.mat: cannot be read")
  _write_mat(mat, labels_from=3)
  refused("labels are not those of 26 letters")
  _write_mat(mat)
  letters.SIZES["test"] = 28
  refused("mat: .*27 images and 27 labels, want 28")
  letters.SIZES["test"] = 27
