"""experiments/fml.py as a user runs it."""

import re

import pytest

from tests import runs
from tests.runs import error_of, everything, outcome

ALGORITHMS = ("fedavg", "fedprox", "fml", "independent")
# One kind of model, so that few programs are compiled.
QUICK = (
  "--client_models=mlp",
  "--global_model=mlp",
  "--notensorboard",
)


@pytest.fixture
def fml(experiment):
  return experiment("fml")


@pytest.mark.slow
def test_four_algorithms_side_by_side(fml, tmp_path):
  models = "--client_models=mlp,mlp,cnn1,cnn1,cnn1"
  run = ("--rounds=2", "--eval_every=1", "--notensorboard", models)
  done = fml(*run, f"--workdir={tmp_path}/all")
  for name in ALGORITHMS:
    assert re.search(rf"^{name} ", done.stdout, re.MULTILINE)
    result, rows = outcome(tmp_path / "all" / name)
    assert (result["algorithm"], result["dataset"]) == (name, "digits")
    assert [row["round"] for row in rows] == [1, 2]
    alone = name == "independent"
    personal = alone or name == "fml"
    accuracy = result["global"]["test_accuracy"]
    if alone:
      assert accuracy is None
    else:
      assert accuracy == rows[-1]["global/test_accuracy"]
      best = max(row["global/test_accuracy"] for row in rows)
      assert result["global"]["best_test_accuracy"] == best
    assert len(result["clients"]) == 5
    assert result["bytes_per_round"] == (0 if alone else 5 * 2 * 4 * 3350)
    for k, client in enumerate(result["clients"]):
      own = ("mlp", 3466) if k < 2 else ("cnn1", 3350)
      expected = own if personal else ("cnn1", 3350)
      assert (client["model"], client["parameters"]) == expected
      last = rows[-1][f"client{k}/validation_accuracy"]
      assert client["validation_accuracy"] == last
      best = max(row[f"client{k}/validation_accuracy"] for row in rows)
      assert client["best_validation_accuracy"] == best
      for way in ("sent", "received"):
        assert client[f"bytes_{way}_per_round"] == (0 if alone else 4 * 3350)
      shown = f"client{k}/global_validation_accuracy" in rows[-1]
      assert shown == (name == "fml")
    # The clients' validation images are the test images, shared out.
    assert sum(c["validation_examples"] for c in result["clients"]) == 360
    if not personal:
      correct = sum(
        c["validation_accuracy"] * c["validation_examples"]
        for c in result["clients"]
      )
      assert correct / 360 == pytest.approx(accuracy)
  png = (tmp_path / "all/curves.png").read_bytes()
  assert png.startswith(b"\x89PNG")
  # config.flags is a flag file that repeats the run, whatever the engine.
  fml(
    f"--flagfile={tmp_path}/all/fml/config.flags",
    "--engine=inline",
    "--microbatch=0",
    f"--workdir={tmp_path}/again",
  )
  _, theirs = outcome(tmp_path / "all/fml")
  for a, b in zip(outcome(tmp_path / "again")[1], theirs):
    assert a.keys() == b.keys()
    for name in ("local_loss", "meme_loss", "meme_kl"):
      assert a[name] == pytest.approx(b[name], rel=2e-3)


@pytest.mark.slow
def test_with_beta_one_fml_is_fedavg(fml, tmp_path):
  """The driver's two algorithms, same seed, same flags, same clients."""
  names = ("fml", "fedavg")
  run = ("--beta=1", "--clients_per_round=2", "--rounds=3", "--eval_every=3")
  run += (f"--algorithm={','.join(names)}", f"--workdir={tmp_path}")
  fml(*QUICK, *run)
  (a,), (b,) = (outcome(tmp_path / name)[1] for name in names)
  for name in ("global/test_loss", "global/test_accuracy"):
    assert a[name] == pytest.approx(b[name], rel=1e-4)


@pytest.mark.slow
def test_bad_input_is_one_line_and_overwrites_nothing(fml, tmp_path):
  held = tmp_path / "held"
  one = (*QUICK, "--algorithm=fedavg", "--rounds=1", f"--workdir={held}")
  fml(*one)
  before = everything(held)
  mnist = ("--dataset=mnist", f"--data_dir={tmp_path}/data")
  (tmp_path / "data/mnist").mkdir(parents=True)
  cases = [
    (("--alpha=1.5",), "--alpha=1.5: 1.5 must lie between 0 and 1"),
    (("--alpha=1,0,1",), "--alpha=1,0,1: give one value, or FIRST,LAST"),
    (("--beta=x",), "--beta=x: not a number"),
    (("--algorithm=fedsgd",), "--algorithm=fedsgd: choose from fedavg"),
    (("--dataset=svhn",), "--dataset=svhn: choose from"),
    (
      ("--clients_per_round=6",),
      "--clients_per_round=6: must be a whole number, at least 1 and at most 5",
    ),
    (
      ("--clients_start=global", "--client_models=mlp"),
      "--clients_start=global: none of --client_models is the --global_model",
    ),
    (("--client_models=mlp,mlp",), "--client_models=mlp,mlp: 2 models for 5"),
    (("--client_models=vgg",), "--client_models=vgg: choose from"),
    (("--num_clients=4",), "num_clients=4: 10 classes cannot share 8 shards"),
    (("--num_clients=1",), "use a multiple of 5 clients, or another partition"),
    (
      ("--bad_clients=5",),
      "--bad_clients=5: must be a whole number, at least 0",
    ),
    (("--global_model=cnn2_conv",), "algorithm=fedavg needs a complete model"),
    (("--learning_rate=0",), "learning_rate"),
    (mnist, "mnist not found"),
    ((*one, "--momentum=0.5"), "momentum: there 0.9, here 0.5"),
    ((*one, "--rounds=2", "--alpha=1,0"), "rounds: there 1, here 2"),
  ]
  fml.refuse(cases, fresh=tmp_path / "fresh")
  assert everything(held) == before
  # The same command with other data.
  (held / "data.json").write_text('{"crc32": "00000000"}\n')
  assert "data.json is not what this run" in fml.fails(*one)


@pytest.mark.slow
def test_a_run_that_diverges_is_no_result(fml, tmp_path):
  run = (*QUICK, "--algorithm=fedavg", "--rounds=2", "--eval_every=1")
  run += ("--learning_rate=1e30", f"--workdir={tmp_path}/run")
  for _ in range(2):  # It is finished, and still says so.
    done = fml.ended(*run)
    assert done.returncode == 1
    assert error_of(done) == "error: fedavg: diverged; lower the learning rates"
    assert re.search("^fedavg .* diverged ", done.stdout, re.MULTILINE)
    assert " 0.00 " not in done.stdout
  result, rows = outcome(tmp_path / "run")
  assert result["diverged"] == 1
  assert result["clients"][0]["validation_accuracy"] is None
  assert rows[-1]["clients/validation_accuracy"] is None


@pytest.mark.slow
@runs.needs_real_data
def test_unlike_tasks_on_real_images(fml, tmp_path):
  # Figure 6 in small: partial global model, two data sets, MLPs as clients.
  fml(
    "--algorithm=fml",
    "--dataset=cifar10,cifar100",
    "--global_model=cnn1_conv",
    "--client_models=mlp",
    "--rounds=1",
    "--local_epochs=1",
    "--batch_size=500",
    "--microbatch=50",
    "--notensorboard",
    f"--data_dir={runs.REAL}",
    f"--workdir={tmp_path}/run",
    XLA_FLAGS="",
  )
  result, rows = outcome(tmp_path / "run")
  assert result["global"]["test_accuracy"] is None
  assert result["global"]["parameters"] == 168 + 880
  assert [c["dataset"] for c in result["clients"]] == ["cifar10", "cifar100"]
  assert [c["parameters"] for c in result["clients"]] == [656_810, 674_900]
  for k, chance in enumerate((0.1, 0.01)):
    assert rows[0][f"client{k}/validation_accuracy"] > 1.5 * chance
    assert rows[0][f"client{k}/global_validation_accuracy"] > 1.5 * chance
