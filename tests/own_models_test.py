"""Models of the user's own in the commands: FILE.py:FUNCTION."""

import json

import numpy as np
import own_models
import pytest

import hetfl
from hetfl.models import language
from tests.runs import outcome, write_posts

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


def narrow_conv(num_classes):
  return Net(num_classes, 16)


def impossible(num_classes):
  raise ValueError("no such model")


def map_of_classes(num_classes):
  return nn.Dense(num_classes)


def nothing(num_classes):
  return None

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
  codist(*run, f"--workdir={tmp_path}/run")
  result, rows = outcome(tmp_path / "run")
  assert result["models"] == [f"{nets}:narrow", f"{nets}:linear"]
  found = [result["pools"][p]["parameters"] for p in ("small", "large")]
  assert found == [weights(64, 8), 65 * 10]
  assert rows[-1]["small/distill_loss"] > 0
  # The run keeps the file, and is not continued with another model.
  assert (tmp_path / "run/model-nets.py").read_text() == NETS
  nets.write_text(NETS.replace("nn.relu", "nn.tanh"))
  line = codist.fails(*run, f"--workdir={tmp_path}/run")
  assert "model-nets.py is not what this run would write" in line


@pytest.mark.slow
def test_fml(experiment, nets, tmp_path):
  fml = experiment("fml")
  # The clients' numbers of images are no multiples of the batch size.
  run = ("--num_clients=3", "--partition=iid", "--batch_size=32", "--rounds=1")
  done = fml(
    f"--client_models={nets}:narrow,mlp,{nets}:linear",
    f"--global_model={nets}:narrow_conv",
    "--algorithm=fml,fedavg",
    "--beta=1",
    *run,
    "--dtype=bfloat16",
    f"--workdir={tmp_path}/run",
  )
  assert "--dtype has no effect" not in done.stderr  # On the mlp it has.
  results = {}
  for name in ("fml", "fedavg"):
    results[name], _ = outcome(tmp_path / "run" / name)
    assert results[name]["global"]["parameters"] == weights(64, 16)
    assert (tmp_path / "run" / name / "model-nets.py").exists()
  clients = results["fml"]["clients"]
  found = [client["parameters"] for client in clients]
  assert found[::2] == [weights(64, 8), 65 * 10]
  # With beta = 1 FML's global model is FedAvg's, batch statistics too: both
  # normalise whole batches, which are full.
  one, other = (
    outcome(tmp_path / "run" / name)[1][-1]["global/test_loss"]
    for name in ("fml", "fedavg")
  )
  assert one == pytest.approx(other, rel=1e-4)
  config = json.loads((tmp_path / "run/fml/config.json").read_text())
  assert config["config"]["microbatch"] == 0
  assert config["config"]["full_batches"]


@pytest.mark.slow
def test_fedmd(experiment, nets, tmp_path):
  fedmd = experiment("fedmd")
  few = [f"--{n}_epochs=1" for n in ("public", "transfer", "pooled")]
  done = fedmd(
    f"--models={nets}:narrow,{nets}:narrow_conv",
    *("--num_parties=4", "--weak_parties=1", "--rounds=1", *few),
    *("--l2=0.1", "--dtype=bfloat16", "--conv=native"),
    f"--workdir={tmp_path}/run",
  )
  parties = outcome(tmp_path / "run")[0]["parties"]
  narrow, wider = f"{nets}:narrow", f"{nets}:narrow_conv"
  found = [party["model"] for party in parties]
  assert found == [narrow, wider, narrow, "mlp(128)"]
  assert parties[0]["parameters"] == weights(256, 8)
  assert (tmp_path / "run/public/model-nets.py").exists()
  assert "--dtype has no effect" not in done.stderr  # On the mlp it has.


def test_compare(experiment, nets, tmp_path):
  compare, run = experiment("compare"), tmp_path / "run"
  (tmp_path / "a").mkdir()
  other = tmp_path / "a" / nets.name
  other.write_text(f"{nets.read_text()}\n# Another of the same name.\n")
  models = f"{nets}:narrow,{other}:linear"
  compare(
    f"--models={models}",
    "--method=fedproto",
    "--num_clients=4",
    "--rounds=1",
    "--notensorboard",
    f"--workdir={run}",
  )
  result, _ = outcome(run)
  # 32 features, batch normalisation of 8 and a head of 10 classes.
  narrow = 64 * 8 + 8 + 2 * 8 + 8 * 32 + 32 + 32 * 10 + 10
  linear = 64 * 32 + 32 + 32 * 10 + 10
  sizes = [client["parameters"] for client in result["clients"]]
  assert sizes == [narrow, linear, narrow, linear]
  texts = {path.read_text() for path in run.glob("model*-nets.py")}
  assert texts == {nets.read_text(), other.read_text()}
  needs = "is (1, 8, 8, 32), but 32 features need outputs of shape (1, 32)"
  cases = [((f"--models={nets}:map_of_classes",), needs)]
  needs = f"--global_model={nets}:three: {nets} has no function 'three'"
  cases.append(
    (("--method=fml", f"--global_model={nets}:three", "--models=mlp"), needs)
  )
  compare.refuse(cases, fresh=tmp_path / "fresh")


WORDS = """
import flax.linen as nn
from hetfl.models import language


class Last(nn.Module):
  vocabulary_size: int

  @nn.compact
  def __call__(self, x, train):
    h = nn.Embed(self.vocabulary_size, 6)(x)
    h = nn.Dropout(0.1, deterministic=not train)(h)
    shape = (6, self.vocabulary_size)
    kernel = self.param("kernel", nn.initializers.ones, shape)
    bias = self.param("bias", nn.initializers.zeros, (self.vocabulary_size,))
    return language.TokenLogits(h, kernel, bias)


def last(vocabulary_size):
  return Last(vocabulary_size)


def dense(vocabulary_size):
  return nn.Embed(vocabulary_size, vocabulary_size)


def short(vocabulary_size):
  return Last(vocabulary_size - 1)
"""


@pytest.mark.slow
def test_codist_of_text(experiment, tmp_path):
  codist, path = experiment("codist"), tmp_path / "words.py"
  path.write_text(WORDS)
  write_posts(tmp_path)
  data = ("--dataset=stackexchange", f"--data_dir={tmp_path}")
  data += ("--vocabulary=wordpiece", "--vocabulary_size=40")
  run = (*data, "--rounds=1", "--distill_steps=2", "--merge_every=1")
  run += ("--clients_per_round=3,2", "--high_capacity_clients=5")
  models = f"--models={path}:last"  # For both pools.
  idle = ("--model_size=paper", "--dtype=bfloat16", "--conv=native")
  place = f"--workdir={tmp_path / 'run'}"
  done = codist(*run, models, *idle, "--algorithm=merged", place)
  for flag in ("dtype", "model_size"):
    assert f"--{flag} has no effect here: it is for " in done.stderr
  assert done.stderr.count("--conv has no effect") == 1
  result, rows = outcome(tmp_path / "run")
  size = result["vocabulary"]["size"]
  assert result["models"] == 2 * [f"{path}:last"]
  assert result["pools"]["large"]["parameters"] == size * (6 + 6 + 1)
  assert "small/distill_loss" in rows[-1]
  assert (tmp_path / "run/model-words.py").read_text() == WORDS
  wanted = f"(1, 20, E), kernel (E, {size}) and bias ({size},)"
  text = data
  codist.refuse(
    [
      ((*text, f"--models={path}:dense"), wanted),
      ((*text, f"--models={path}:short"), wanted),
      ((*text, "--models=small_cnn"), "choose from small_lstm, large_lstm"),
      (("--models=small_lstm",), "choose from small_cnn, large_cnn"),
    ],
    fresh=tmp_path / "fresh",
  )


def test_logits_of_text_are_computed_in_chunks():
  def chunk_of(stated, given):
    logits = language.TokenLogits(
      *map(np.zeros, ((1, 2, 3), (3, 4), 4)), stated
    )
    model = hetfl.Model(None, lambda variables, x, key, train: (logits, {}))
    in_chunks = language.in_chunks(model, given)
    assert language.in_chunks(model, given) is in_chunks
    return in_chunks.apply(None, None, None, False)[0].chunk

  # The model's own, or else the engine's.
  assert chunk_of(7, 128) == 7
  assert chunk_of(None, 128) == 128
  assert chunk_of(None, None) is None


MADE = """import flax.linen as nn
import jax
import jax.numpy as jnp
import hetfl

class Flat(nn.Module):
  def __call__(self, x):
    return x.reshape(len(x), -1)[:, :10]

class Noisy(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    key = self.make_rng("noise") if train else jax.random.key(0)
    return nn.Dense(10)(Flat()(x) + jax.random.normal(key, (len(x), 10)))

def made(n, f=jnp.matmul, dtype=float, stats=lambda key: {}):
  return hetfl.Model(
    lambda key: hetfl.Variables(jnp.ones((64, n), dtype), stats(key)),
    lambda v, x, key, train: (f(v.params, x.reshape(len(x), -1)), v.stats),
  )

"""
# Of lines 22 and 23 of the file, but for one of its class `Noisy`.
MISTAKES = {
  "def net(n):\n  return nn.Dense(n": "importing {path}: SyntaxError: '(' was"
  " never closed (mistakes.py, line 23); mend the file",
  "import no_such": "importing {path}: ModuleNotFoundError at line 22: No"
  " module named 'no_such'",
  "import sys; sys.exit('bye')": "importing {path}: SystemExit at line 22: bye",
  "def net(n):\n  raise OSError(n)": "called with num_classes=10: OSError at"
  " line 23: 10",
  "def net(n):\n  exit(3)": "called with num_classes=10: SystemExit at line 23",
  "net = lambda n: made(n, lambda w, x: x @ w[1:])": "given images of shape"
  " (1, 8, 8, 1): TypeError at line 22: dot_general requires",
  "net = lambda n: made(n, lambda w, x: (x @ w).argmax(1))": "outputs must be"
  " floating numbers, such as logits, not int32",
  "net = lambda n: Noisy()": "given images of shape (1, 8, 8, 1):"
  " InvalidRngError at line 13",
  "net = lambda n: Flat()": "has no parameters, so it learns nothing",
  "net = lambda n: made(n, dtype=int)": "init returned .params of type int32",
  "net = lambda n: made(n, dtype=bool)": "init returned .params of type bool",
  "net = lambda n: made(n, stats=jax.random.split)": "init returned .stats of"
  " type key<fry>",
}


@pytest.mark.parametrize("code", MISTAKES)
def test_mistakes_in_the_file_are_a_line(code, tmp_path):
  path = tmp_path / "mistakes.py"
  path.write_text(MADE + code)
  with pytest.raises(ValueError) as error:
    own_models.load("models", f"{path}:net", 10, (8, 8, 1))
  line = str(error.value)
  assert line.startswith(f"--models={path}:net, ") and "\n" not in line
  assert MISTAKES[code].format(path=path) in line


def test_a_softmax_is_warned_of(tmp_path, caplog):
  path = tmp_path / "softmax.py"
  path.write_text(
    MADE
    + "net = lambda n: made(n, lambda w, x: jax.nn.softmax(x @ w))\n"
    + "logits = lambda n: made(n, lambda w, x: x @ w)\n"
  )
  own_models.load("models", f"{path}:logits", 10, (8, 8, 1))
  own_models.load("models", f"{path}:net", 10, (8, 8, 1), of="features")
  assert not caplog.messages
  own_models.load("models", f"{path}:net", 10, (8, 8, 1))
  assert f"{path}:net: its outputs sum to 1, as after a softmax" in caplog.text


def test_errors_in_the_file_have_a_traceback_on_demand(
  experiment, nets, tmp_path
):
  codist = experiment("codist")
  called = f"--models={nets}:impossible, called with num_classes=10: ValueError"
  flags = (f"--models={nets}:impossible",)
  codist.refuse([(flags, f"{called} at line 39")], fresh=tmp_path / "run")
  done = codist.ended(*flags, "--verbosity=1", f"--workdir={tmp_path}/run")
  assert done.returncode != 0 and not (tmp_path / "run").exists()
  assert f'File "{nets}", line ' in done.stderr and called in done.stderr


def test_ctrl_c_before_the_first_round_is_a_line(experiment, tmp_path):
  path = tmp_path / "nets.py"
  path.write_text(
    "import os, signal\n"
    "def net(num_classes):\n"
    # A shell's background jobs ignore it.
    "  signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "  os.kill(os.getpid(), signal.SIGINT)\n"
  )
  run = (f"--models={path}:net", f"--workdir={tmp_path}/a")
  done = experiment("codist").ended(*run)
  assert done.returncode == 130
  said = "SIGINT: stopped; the same command resumes.\n"
  assert done.stderr.endswith(said) and "Traceback" not in done.stderr


def test_mistakes_are_named(experiment, nets, tmp_path):
  fresh = tmp_path / "fresh"
  codist, fml, fedmd = map(experiment, ("codist", "fml", "fedmd"))
  cases = {
    f"{nets}:map_of_classes": "given one image (8, 8, 1), the model's output is"
    " (1, 8, 8, 10), but 10 classes need logits of shape (1, 10)",
    f"{nets}:nothing": "returned a NoneType, not a Flax Linen module",
    f"{nets}:three": f"{nets} has no function 'three'",
    f"{nets}2:narrow": f"there is no file {nets}2",
    "medium_cnn": "choose from small_cnn, large_cnn, or give models of your",
    "small_cnn,small_cnn,small_cnn": "give one value, or 2",
  }
  codist.refuse(
    [((f"--models={name}",), text) for name, text in cases.items()],
    fresh=fresh,
  )
  dropped = (
    ((f"--models=large_cnn,{nets}:narrow", f"--{flag}=0,0.5"), f"--{flag}=0.0,")
    for flag in ("dropout", "map_dropout", "logits_dropout")
  )
  codist.refuse(list(dropped), fresh=fresh)
  fml.refuse(
    [
      (("--global_model=cnn",), "--global_model=cnn: choose from mlp"),
      (("--client_models=cnn",), "--client_models=cnn: choose from mlp"),
    ],
    fresh=fresh,
  )
  mixed = (f"--models={nets}:narrow,small",)
  more = (f"--models={nets}:narrow,{nets}:narrow_conv", "--num_parties=1")
  fedmd.refuse(
    [
      (more, "2 models, but 1 parties that are not --weak_parties"),
      (mixed, "--models=small: give models of your own as FILE.py:FUNCTION"),
      (("--models=table3",), "--models=table3: choose from table1, table2"),
    ],
    fresh=fresh,
  )
