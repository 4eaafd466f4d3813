"""Models of the user's own in the commands: FILE.py:FUNCTION."""

import pytest

from tests.runs import error_of, outcome

NETS = """
import flax.linen as nn
import hetfl


class Net(nn.Module):
  num_classes: int
  width: int

  @nn.compact
  def __call__(self, x, train):
    x = nn.Dense(self.width)(x.reshape(len(x), -1))
    x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
    return nn.Dense(self.num_classes)(nn.relu(x))


def narrow(num_classes):
  return Net(num_classes, 8)


def linear(num_classes):
  from flax import nnx

  class Linear(nnx.Module):
    def __init__(self, rngs):
      self.out = nnx.Linear(64, num_classes, rngs=rngs)

    def __call__(self, x):
      return self.out(x.reshape(len(x), -1))

  return hetfl.Model.from_nnx(lambda rngs: Linear(rngs))


def map_of_classes(num_classes):
  return nn.Dense(num_classes)


def nothing(num_classes):
  return None


def two(a, b):
  return nn.Dense(a + b)
"""


@pytest.fixture
def nets(tmp_path):
  path = tmp_path / "nets.py"
  path.write_text(NETS)
  return path


def weights(inputs, hidden, classes=10):
  """The weights of `Net`: with biases, and a scale and a shift of each unit."""
  return (inputs + 1) * hidden + 2 * hidden + (hidden + 1) * classes


@pytest.mark.slow
def test_codist(experiment, nets, tmp_path):
  codist = experiment("codist")
  models = f"--models={nets}:narrow,{nets}:linear"
  run = ("--algorithm=merged", models, "--rounds=2", "--eval_every=2")
  done = codist(*run, f"--workdir={tmp_path}/run")
  assert done.returncode == 0, done.stderr
  result, rows = outcome(tmp_path / "run")
  assert result["models"] == [f"{nets}:narrow", f"{nets}:linear"]
  found = [result["pools"][p]["parameters"] for p in ("small", "large")]
  assert found == [weights(64, 8), 65 * 10]
  assert rows[-1]["small/distill_loss"] > 0
  # One name is for both pools.
  both = ("--models=small_cnn", "--algorithm=fedavg", *run[2:])
  done = codist(*both, f"--workdir={tmp_path}/both")
  assert done.returncode == 0, done.stderr
  pools = outcome(tmp_path / "both")[0]["pools"].values()
  assert [pool["parameters"] for pool in pools] == [31914, 31914]
  # The run keeps the file, and is not continued with another model.
  assert (tmp_path / "run/model-nets.py").read_text() == NETS
  nets.write_text(NETS.replace("nn.relu", "nn.tanh"))
  done = codist(*run, f"--workdir={tmp_path}/run")
  assert "model-nets.py is not what this run would write" in error_of(done)


@pytest.mark.slow
def test_fml(experiment, nets, tmp_path):
  models = (
    f"--client_models={nets}:narrow,mlp,{nets}:linear",
    f"--global_model={nets}:narrow",
  )
  # Clients' numbers of images are no multiples of the batch size, and the
  # model has batch statistics.
  done = experiment("fml")(
    *models,
    "--algorithm=fml,fedavg",
    "--num_clients=3",
    "--partition=iid",
    "--batch_size=32",
    "--rounds=1",
    f"--workdir={tmp_path}/run",
  )
  assert done.returncode == 0, done.stderr
  for name in ("fml", "fedavg"):
    result, _ = outcome(tmp_path / "run" / name)
    assert result["global"]["parameters"] == weights(64, 8)
    assert (tmp_path / "run" / name / "model-nets.py").exists()
  clients = outcome(tmp_path / "run/fml")[0]["clients"]
  found = [client["parameters"] for client in clients]
  assert found[::2] == [weights(64, 8), 65 * 10]


@pytest.mark.slow
def test_fedmd(experiment, nets, tmp_path):
  fedmd = experiment("fedmd")
  few = [f"--{n}_epochs=1" for n in ("public", "transfer", "pooled")]
  models = f"--models={nets}:narrow,{nets}:narrow"
  done = fedmd(
    models,
    *few,
    "--num_parties=4",
    "--weak_parties=1",
    "--rounds=1",
    f"--workdir={tmp_path}/run",
  )
  assert done.returncode == 0, done.stderr
  parties = outcome(tmp_path / "run")[0]["parties"]
  assert [party["model"] for party in parties] == [
    *[f"{nets}:narrow"] * 3,
    "mlp(128)",
  ]
  assert parties[0]["parameters"] == weights(256, 8)
  assert (tmp_path / "run/public/model-nets.py").exists()


def test_mistakes_are_named(experiment, nets, tmp_path):
  fresh = tmp_path / "fresh"
  codist, fml, fedmd = map(experiment, ("codist", "fml", "fedmd"))
  cases = {
    f"{nets}:map_of_classes": "given one image (8, 8, 1), the model's output is"
    " (1, 8, 8, 10), but 10 classes need logits of shape (1, 10)",
    f"{nets}:nothing": "returned a NoneType, not a Flax module",
    f"{nets}:two": "must take one argument, the number of classes",
    f"{nets}:three": f"{nets} has no function 'three'",
    f"{nets}2:narrow": f"there is no file {nets}2",
    "medium_cnn": "choose from small_cnn, large_cnn, or give a model of your",
    "small_cnn,small_cnn,small_cnn": "give one name, or two",
  }
  codist.refuse(
    [((f"--models={name}",), text) for name, text in cases.items()],
    fresh=fresh,
  )
  dropped = (f"--models=large_cnn,{nets}:narrow", "--dropout=0,0.5")
  codist.refuse([(dropped, f"has no effect on {nets}:narrow")], fresh=fresh)
  fml.refuse(
    [
      (("--global_model=cnn",), "--global_model=cnn: choose from mlp"),
      (("--client_models=cnn",), "--client_models=cnn: choose from mlp"),
    ],
    fresh=fresh,
  )
  mixed = (f"--models={nets}:narrow,small",)
  wide = (f"--models={nets}:narrow", "--width=2")
  fedmd.refuse(
    [
      (mixed, "small is not FILE.py:FUNCTION"),
      (wide, "--width=2.0: has no effect"),
      (("--models=table3",), "--models=table3: choose from small, table1"),
    ],
    fresh=fresh,
  )
