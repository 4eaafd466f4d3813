"""Images of one's own: the file, the federations, the commands."""

import zipfile

import jax
import numpy as np
import pytest

from hetfl import augment
from hetfl.data import codist_images, DataError, fml_images, npz, vision
from tests.runs import outcome, ROOT

# 240 and 60 digits as images of their own.
DIGITS = vision.load_digits()
ARRAYS = {
  "x_train": DIGITS.train["x"][:240],
  "y_train": DIGITS.train["y"][:240],
  "x_test": DIGITS.test["x"][:60],
  "y_test": DIGITS.test["y"][:60],
}
# Client 7 holds every twelfth image, from 7 on; names sort as numbers do not.
CLIENTS = np.array([f"{i % 12}" for i in range(240)])


@pytest.fixture
def save(tmp_path):
  def save(**changes):
    path = tmp_path / "own.npz"
    arrays = ARRAYS | changes
    np.savez(path, **{n: a for n, a in arrays.items() if a is not None})
    return path

  return save


def test_all_forms_of_the_arrays(save, caplog):
  plain = npz.load_npz(save())
  assert plain.clients is None and plain.num_classes == 10
  assert plain.test["x"].shape == (60, 8, 8, 1)
  grey_and_column = npz.load_npz(
    save(
      x_train=ARRAYS["x_train"][..., 0],
      y_train=ARRAYS["y_train"][:, None].astype(np.uint8),
      other=np.zeros(3),
    )
  )
  for name in ("x", "y"):
    np.testing.assert_array_equal(
      plain.train[name], grey_and_column.train[name]
    )
    assert grey_and_column.train[name].dtype == plain.train[name].dtype
  # A class of which there are only test images counts.
  assert npz.load_npz(save(y_test=np.full(60, 10))).num_classes == 11
  assert "have no image" not in caplog.text
  assert npz.load_npz(save(y_test=np.full(60, 12))).num_classes == 13
  assert "own.npz: 2 of 13 classes have no image" in caplog.text


@pytest.mark.parametrize(
  "changes, message",
  [
    (
      dict(y_test=None),
      "x_test or y_test is missing.: want a file by np.savez",
    ),
    (dict(x_train=np.zeros((240, 8, 8))), "x_train is float64.*want a file by"),
    (dict(x_test=np.zeros((60, 64), np.uint8)), r"x_test is uint8\[60, 64\]"),
    (dict(x_test=np.zeros((0, 8, 8), np.uint8)), "x_test has no images"),
    (
      dict(x_train=np.zeros((240, 3, 150, 150), np.uint8)),
      r"x_train is uint8\[240, 3, 150, 150\], with its channels first; save"
      r" x.transpose\(0, 2, 3, 1\)",
    ),
    (dict(x_test=np.zeros((60, 1, 28, 28), np.uint8)), "x_test .*ls first"),
    (
      dict(x_test=np.zeros((60, 9, 8), np.uint8)),
      r"of \(8, 8, 1\), x_test of \(9, 8, 1\)",
    ),
    (dict(y_train=np.zeros(239, int)), "y_train is int64.239. for 240 images"),
    (dict(y_train=np.zeros(240)), "y_train is float64.*int.N. from 0"),
    (dict(y_train=np.full(240, -1)), "y_train has labels from -1 to -1"),
    (dict(y_test=np.full(60, 2**40)), f"y_test has labels from {2**40}"),
    (dict(y_test=np.full(60, 300)), "a label is 300, but .* only 300 images"),
    (dict(clients_train=CLIENTS.astype("S")), "clients_train is .S2.240. for"),
    (dict(clients_train=np.zeros(3, int)), "clients_train is int64.3. for 240"),
    (dict(clients_train=np.zeros(240)), "clients_train is float64"),
    # Objects would have to be unpickled.
    (dict(y_train=np.full(240, None)), "cannot be read .*pickle"),
  ],
)
def test_other_arrays_are_refused(save, changes, message):
  with pytest.raises(DataError, match=message):
    npz.load_npz(save(**changes))


def test_files_that_are_no_archives(save, tmp_path):
  path = save()
  with pytest.raises(DataError, match="nowhere.npz: no such file: want a file"):
    npz.load_npz(tmp_path / "nowhere.npz")
  flipped = bytearray(path.read_bytes())
  flipped[2000] ^= 1
  np.savez_compressed(path, **ARRAYS)
  packed = bytearray(path.read_bytes())
  packed[200:260] = bytes(60)
  for damaged in (flipped, flipped[:1000], packed):
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"own.npz: cannot be read \("):
      npz.load_npz(path)
  with zipfile.ZipFile(tmp_path / "renamed.zip", "w") as archive:
    archive.writestr("x_train", b"pixels")
    archive.writestr("y_train", b"labels")
  with pytest.raises(DataError, match="x_train is .S6"):
    npz.load_npz(tmp_path / "renamed.zip")
  np.save(tmp_path / "one.npy", np.zeros(3))
  with pytest.raises(DataError, match="one.npy: cannot be read"):
    npz.load_npz(tmp_path / "one.npy")


def test_fitted_recipes_normalise():
  rng = np.random.default_rng(0)
  x = rng.integers(0, 256, (50, 6, 9, 3)).astype(np.uint8)
  x[..., 2] = 7
  recipe = augment.fitted("plain", x[:, :, :6])
  y = np.asarray(recipe.evaluate({"x": jax.numpy.asarray(x[:, :, :6])})["x"])
  # Mean 0 and deviation 1, but for the constant channel.
  np.testing.assert_allclose(y.mean((0, 1, 2)), 0, atol=1e-5)
  np.testing.assert_allclose(y.std((0, 1, 2)), (1, 1, 0), atol=1e-5)
  expected = x.reshape(-1, 3).astype(np.float64) / 255
  recipe = augment.fitted("crop_flip", x)
  np.testing.assert_allclose(recipe.mean, expected.mean(0), atol=1e-12)
  np.testing.assert_allclose(recipe.deviation[:2], expected.std(0)[:2])
  assert (recipe.size, recipe.pad, recipe.flip) == (6, 0, True)
  with pytest.raises(ValueError, match="name='crops': choose one of"):
    augment.fitted("crops", x)


def test_codistillation_with_the_files_clients(save):
  path = save(clients_train=CLIENTS)
  images = codist_images.load_codist_images("npz", npz=path)
  small, large = images.pools
  # 3 of 12 for distillation, 1 held out, 2 of the pool with high capacity.
  assert images.partition == "file"
  assert (len(small), len(large)) == (8, 2)
  assert len(images.distill.index) == 60 and len(images.heldout.index) == 20
  for k, name in enumerate(small.ids):
    np.testing.assert_array_equal(
      small.positions(k), np.arange(int(name), 240, 12)
    )
  for kwargs, message in (
    (dict(num_clients=9), "num_clients=9: npz has 12"),
    (
      dict(partition_alpha=1.0),
      "partition_alpha=1.0: the file of npz says which",
    ),
    (
      dict(high_capacity_clients=9),
      "high_capacity_clients=9: .* at most 8",
    ),
    (dict(npz=None), "npz=None: dataset=npz needs your file"),
    (
      dict(distill_data="cifar10"),
      "distill_data=cifar10: choose from in_domain",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      codist_images.load_codist_images("npz", **{"npz": path} | kwargs)
  with pytest.raises(ValueError, match="npz=.*: dataset=digits does not read"):
    codist_images.load_codist_images("digits", npz=path)
  with pytest.raises(ValueError, match="num_clients=9: digits has 60"):
    codist_images.load_codist_images("digits", num_clients=9)


def test_codistillation_with_drawn_clients(save):
  images = codist_images.load_codist_images("npz", npz=save(), num_clients=20)
  parts = (images.pools[0].members, images.distill.index, images.heldout.index)
  assert sorted(np.concatenate(parts)) == list(range(240))
  assert [len(pool) for pool in images.pools] == [13, 4]
  assert images.partition == "dirichlet"
  # Ten images a client where there are few.
  images = codist_images.load_codist_images("npz", npz=save())
  assert len(images.pools[0]) == 24 - 6 - 2
  with pytest.raises(ValueError, match="num_clients=2: .* 3 and at most 240"):
    codist_images.load_codist_images("npz", npz=save(), num_clients=2)
  two = save(clients_train=np.arange(240) % 2)
  with pytest.raises(ValueError, match="num_clients=2: .* 3 and at most 240"):
    codist_images.load_codist_images("npz", npz=two)


def test_mutual_learning_with_the_files_clients(save, caplog):
  path = save(clients_train=CLIENTS)
  load = fml_images.load_fml_images
  images = load(["npz"], npz=path, partition="file", num_clients=12)
  in_order = sorted(map(str, range(12)))  # '0', '1', '10', '11', '2', ...
  for client, name in zip(images.clients, in_order):
    np.testing.assert_array_equal(
      client.train.index, np.arange(int(name), 240, 12)
    )
  validation = np.concatenate([c.validation.index for c in images.clients])
  assert sorted(validation) == list(range(60))
  with pytest.raises(
    ValueError, match="takes all clients .*; give num_clients=12"
  ):
    load(["npz"], npz=path, partition="file")
  with pytest.raises(
    ValueError, match="num_clients=61: more than the 60 examples"
  ):
    load(["npz"], npz=path, num_clients=61)
  load(["npz"], npz=path, partition="iid")
  assert "own.npz: its clients are for partition=file only" in caplog.text
  with pytest.raises(ValueError, match="partition=file: npz has no clients"):
    load(["npz"], npz=save(), partition="file")
  with pytest.raises(ValueError, match="partition=file: digits has no clients"):
    load(["digits"], partition="file")


@pytest.mark.slow
def test_the_commands_train_on_own_images(experiment, save, tmp_path):
  path = save(clients_train=CLIENTS)
  run = ("--dataset=npz", f"--npz={path}", "--rounds=2", "--eval_every=1")
  codist = (*run, "--clients_per_round=3,2", "--client_batch_size=10")
  experiment("codist")(
    *codist,
    "--algorithm=fedavg",
    "--recipe=crop_flip",
    f"--models={ROOT}/tests/small_models.py:small",
    f"--workdir={tmp_path}/codist",
  )
  result, rows = outcome(tmp_path / "codist")
  assert result["partition"] == "file" and len(rows) == 2
  assert result["pools"]["small"]["clients"] == 8
  flags = (tmp_path / "codist/config.flags").read_text()
  assert "--recipe=crop_flip" in flags and "own.npz" not in flags
  for flags, message in (
    ((*run, "--npz="), "error: --npz=: give a value"),
    (run[:1], "error: --npz=None: --dataset=npz needs your file"),
    (run[:2], "--clients_per_round=10: pool 0 has 8 clients"),
  ):
    place = f"--workdir={tmp_path}/refused"
    assert message in experiment("codist").fails(*flags, place)
  save(x_train=ARRAYS["x_train"][:, :3], x_test=ARRAYS["x_test"][:, :3])
  line = experiment("codist").fails(*codist, "--algorithm=fedavg")
  assert "do not fit images of 3x8x1 (npz) and the CNNs" in line

  # Not square, of a path in the user's home.
  home = {
    n: a[:, :6] if n.startswith("x") else a for n, a in ARRAYS.items()
  } | {"clients_train": CLIENTS}
  np.savez(tmp_path / "home.npz", **home)
  done = experiment("fml")(
    *run,
    "--npz=~/home.npz",
    "--engine=inline",
    "--threads=2",
    "--algorithm=fml",
    "--partition=file",
    "--num_clients=12",
    "--global_model=mlp",
    "--client_models=mlp",
    "--local_epochs=1",
    "--batch_size=10",
    f"--workdir={tmp_path}/fml",
    HOME=str(tmp_path),
  )
  # Many clients have no columns and no log lines of their own.
  assert "lowest %" in done.stdout and "11: mlp" not in done.stdout
  assert "validation_accuracy clients 0." in done.stderr
  assert "--threads has no effect here: it is for threads" in done.stderr
  assert "client11/" not in done.stderr
  assert "client11/validation_accuracy" in outcome(tmp_path / "fml")[1][0]


@pytest.mark.slow
def test_fedmd_on_own_images(experiment, save, tmp_path):
  path = save(clients_train=CLIENTS)
  run = (
    "--environment=npz",
    f"--public_npz={path}",
    f"--models={ROOT}/tests/small_models.py:small",
    "--num_parties=2",
    *(f"--{phase}_epochs=1" for phase in ("public", "transfer", "pooled")),
    "--heldout_examples=20",
    "--public_subset=40",
    "--rounds=1",
    f"--workdir={tmp_path}/run",
  )
  experiment("fedmd")(*run, f"--npz={path}")
  result, _ = outcome(tmp_path / "run")
  assert [p["examples"] for p in result["parties"]] == [20, 20]
  assert result["private_source"] == "npz" and result["test_examples"] == 60
  assert "npz" not in (tmp_path / "run/config.flags").read_text().replace(
    "--environment=npz", ""
  )
  four = ("--models=small", "--num_parties=4", f"--npz={path}")
  line = experiment("fedmd").fails(*run, *four)
  assert "party3's (cnn(8,12,16)) does not fit images of 8x8" in line
