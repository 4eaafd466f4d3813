"""experiments/codist.py as a user runs it."""

import csv
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetfl
from hetfl import augment, privacy
from hetfl.data.codist_images import load_codist_images
from hetfl.run.checkpoint import Checkpoints
from tests import runs, small_models
from tests.runs import everything, last_state, outcome, ROOT

QUICK = ("--rounds=6", "--eval_every=3", "--codist_period=4")
FEW = ("--clients_per_round=3", "--distill_steps=2", "--notensorboard")
_FILE = ROOT / "tests/small_models.py"
SMALL = (*FEW, f"--models={_FILE}:small,{_FILE}:large")  # Soon compiled.
PRIVATE = ("--clip_norm=0.5,1", "--epsilon=8", "--client_weights=uniform")


@pytest.fixture
def codist(experiment):
  return experiment("codist")


@pytest.mark.slow
def test_three_algorithms_side_by_side(codist, tmp_path):
  done = codist(*QUICK, f"--workdir={tmp_path}/all")
  for name in ("fedavg", "periodic", "merged"):
    assert re.search(rf"^{name} +31,914", done.stdout, re.MULTILINE)
    result, rows = outcome(tmp_path / "all" / name)
    assert result["algorithm"] == name
    assert result["dataset"] == "digits"
    assert (result["rounds"], result["seed"]) == (6, 0)
    # Of both models, 6 clients, there and back, 4 bytes a parameter.
    assert result["bytes_per_round"] == (31914 + 124234) * 6 * 2 * 4
    entry = result["pools"]["small"]
    assert entry["bytes_sent_per_client_round"] == 4 * 31914
    assert entry["bytes_received_per_client_round"] == 4 * 31914
    assert entry["bytes_per_round"] == 31914 * 6 * 2 * 4
    for pool in ("small", "large"):
      entry = result["pools"][pool]
      assert entry["parameters"] == {"small": 31914, "large": 124234}[pool]
      for accuracy in ("test_accuracy", "heldout_accuracy"):
        assert entry[accuracy] == rows[-1][f"{pool}/{accuracy}"]
        assert 0 <= entry[accuracy] <= 1
    assert [row["round"] for row in rows] == [3, 6]
    assert ("small/distill_loss" in rows[0]) == (name == "merged")
    assert ("small/distill_loss" in rows[1]) == (name != "fedavg")
    flags = (tmp_path / "all" / name / "config.flags").read_text()
    assert "--rounds=6\n" in flags
    assert list((tmp_path / "all" / name / "tensorboard").iterdir())
  png = (tmp_path / "all/curves.png").read_bytes()
  assert png.startswith(b"\x89PNG")
  # FedAvg ignores alpha.
  other = (*QUICK, "--merge_alpha=0.3")
  codist(*other, "--algorithm=fedavg", f"--workdir={tmp_path}/all/fedavg")
  codist.fails(*other, "--algorithm=merged", f"--workdir={tmp_path}/all/merged")


@pytest.mark.slow
def test_few_rounds_with_the_default_period_exchange_nothing(codist, tmp_path):
  few = ("--algorithm=periodic", "--rounds=2", *SMALL)
  done = codist(*few, f"--workdir={tmp_path}")
  said = "--codist_period=10 the pools never exchange anything"
  assert said in done.stderr
  result, rows = outcome(tmp_path)
  assert result["exchanges"] == 0 and "small/distill_loss" not in rows[0]


@pytest.mark.slow
def test_seeds_have_folders_and_a_mean(codist, experiment, tmp_path):
  both = ("--algorithm=fedavg,merged", "--rounds=2", "--eval_every=2", *SMALL)
  path = tmp_path / "seeds"
  done = codist(*both, "--seeds=4,0", f"--workdir={path}")
  # As the second seed, it was trained by the first one's programs.
  codist(*both, "--algorithm=merged", f"--workdir={tmp_path}/alone")
  assert outcome(path / "seed0/merged") == outcome(tmp_path / "alone")
  for name in ("fedavg", "merged"):
    accuracies = [
      outcome(path / f"seed{seed}" / name)[0]["pools"]["small"]["test_accuracy"]
      for seed in (4, 0)
    ]
    mean, deviation = np.mean(accuracies), np.std(accuracies, ddof=1)
    summary = json.loads((path / "summary.json").read_text())
    assert summary["seeds"] == [4, 0]
    entry = summary["algorithms"][name]["pools.small.test_accuracy"]
    assert entry["values"] == accuracies
    assert (entry["mean"], entry["deviation"]) == pytest.approx(
      (mean, deviation)
    )
    shown = rf"{100 * mean:.2f} ± {100 * deviation:.2f}"
    assert re.search(rf"^{name} .* {shown} ", done.stdout, re.MULTILINE)
  assert (path / "curves.png").read_bytes().startswith(b"\x89PNG")
  # The files of summarize.py do not prevent further seeds.
  done = experiment("summarize")(path, f"--out={path}")
  assert re.search(rf"^merged +small +2 +2 .* {shown} ", done.stdout, re.M)
  assert (path / "summary.csv").exists() and (path / "summary.png").exists()
  # One more seed: finished runs stay as they are.
  before = everything(path / "seed4")
  codist(*both, "--seeds=0,4,1", f"--workdir={path}")
  after = everything(path / "seed4")
  assert {p.name for p in after if after[p] != before.get(p)} <= {".lock"}
  assert "seed1" in {p.name for p in path.iterdir()}


@pytest.mark.slow
def test_speed_flags_change_nothing_but_rounding(codist, tmp_path):
  run = ("--algorithm=merged", "--rounds=2", "--eval_every=2", *SMALL)
  # config.flags is a flag file that repeats the run, whatever the engine.
  again = (f"--flagfile={tmp_path}/threads/config.flags",)
  cases = {
    "threads": run,
    "inline": (
      *again,
      "--engine=inline",
      "--microbatch=0",
      "--rounds_per_dispatch=2",
    ),
    "mesh": (
      *again,
      "--engine=mesh",
      "--cpu_devices=2",
      "--lanes=4",
      "--bank=round",
    ),
  }
  results = {}
  for name, flags in cases.items():
    codist(*flags, f"--workdir={tmp_path / name}")
    results[name] = outcome(tmp_path / name)[1][-1]
  for name in ("inline", "mesh"):
    assert results[name].keys() == results["threads"].keys()
    for key, value in results["threads"].items():
      # Of 178 and 360 images, three may lie within rounding of another class.
      near = 3 / 178 if key.endswith("accuracy") else None
      expected = pytest.approx(value, rel=2e-3, abs=near)
      assert results[name][key] == expected, key


@pytest.mark.slow
def test_epsilon_is_in_the_result_and_the_table(codist, tmp_path):
  run = ("--algorithm=fedavg", "--rounds=2", *SMALL, *PRIVATE)
  done = codist(*run, f"--workdir={tmp_path}/run")
  assert re.search(r"^fedavg .* 8\.00 +2 ", done.stdout, re.MULTILINE)
  result, _ = outcome(tmp_path / "run")
  assert (result["epsilon"], result["clip_norm"]) == (8, [0.5, 1])
  # Three of 42 clients train the small model, and three of 8 the large one.
  assert result["delta"] == pytest.approx(42**-1.1)
  found = privacy.epsilon(
    result["noise_multiplier"],
    [3 / 42, 3 / 8],
    rounds=2,
    delta=result["delta"],
  )
  assert 7.9 < found <= 8


ONE = ("--algorithm=fedavg", "--rounds=1", *SMALL)


@pytest.fixture(scope="module")
def finished(experiment, tmp_path_factory):
  """The folder of a finished run of `ONE`, and what it printed."""
  path = tmp_path_factory.mktemp("finished") / "run"
  done = experiment("codist")(*ONE, f"--workdir={path}")
  return path, done.stdout


@pytest.mark.slow
def test_a_model_is_read_out_of_a_finished_run(finished):
  """As docs/commands.md has it."""
  model = hetfl.Model.from_flax(small_models.small(10), jnp.zeros((1, 8, 8, 1)))
  checkpoints = Checkpoints(finished[0] / "checkpoints")
  shapes = model.shapes()
  variables = checkpoints.part(".server[0].variables", like=shapes)
  evaluate = hetfl.Evaluator(
    [model],
    {"test": load_codist_images("digits").test},
    transform=augment.RECIPES["digits8"].evaluate,
  )
  (found,) = evaluate([variables])
  result, _ = outcome(finished[0])
  expected = result["pools"]["small"]["test_accuracy"]
  assert found["test_accuracy"] == pytest.approx(expected)
  with pytest.raises(ValueError, match="where='.server.1..variables': .* has"):
    checkpoints.part(".server[1].variables", like=shapes)
  with pytest.raises(ValueError, match=r"has .*'.server\[1\]': '...'.*, not"):
    checkpoints.part(".server[9].variables", like=shapes)


@pytest.mark.slow
def test_a_run_does_not_go_on_with_other_data(codist, finished, tmp_path):
  shutil.copytree(finished[0], tmp_path / "run")
  path = tmp_path / "run/data.json"
  path.write_text(path.read_text().replace("dirichlet", "pachinko"))
  line = codist.fails(*ONE, f"--workdir={tmp_path}/run")
  assert "data.json is not what this run would write" in line


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_is(codist, finished):
  path, printed = finished
  before = everything(path)
  run = (*ONE, f"--workdir={path}", "--lanes=1", "--eval_batch_size=7")
  assert codist(*run).stdout == printed
  assert everything(path) == before


@pytest.mark.slow
def test_alpha_changes_over_the_rounds(codist, tmp_path):
  folder = tmp_path / "run"
  run = ("--algorithm=merged", "--rounds=2", "--eval_every=1", *SMALL)
  done = codist(*run, "--merge_alpha=1,0.5", f"--workdir={folder}")
  first, second = outcome(folder)[1]
  # A round with alpha = 1 has no distillation.
  assert "small/distill_loss" not in first and "small/distill_loss" in second
  assert "--merge_alpha=1.0,0.5\n" in (folder / "config.flags").read_text()
  again = codist(f"--flagfile={folder}/config.flags", f"--workdir={folder}")
  assert again.stdout == done.stdout


@pytest.mark.slow
def test_bad_input_is_one_line_and_overwrites_nothing(
  codist, finished, tmp_path
):
  held, _ = finished
  before = everything(held)
  foreign = tmp_path / "foreign"
  foreign.mkdir()
  (foreign / "thesis.tex").write_text("x")
  cifar = ("--dataset=cifar100", f"--data_dir={tmp_path}/data")
  binary = tmp_path / "data/cifar-100-binary"
  binary.mkdir(parents=True)
  fresh = tmp_path / "fresh"
  cases = [  # The first two before JAX has found its devices.
    (("--cpu_devices=2", "--engine=threads"), "--cpu_devices=2: CPU threads"),
    (
      ("--distributed_coordinator=auto",),
      "(auto is for TPU pods, srun and mpirun)",
    ),
    (
      ("--distributed_coordinator=localhost:1",),
      "error: --distributed_processes: missing; give all three of",
    ),
    (("--learning_rat=1",), "learning_rat"),
    (
      ("--flagfile=experiments/flags/fml_dynamic.flags",),
      "It is in a flag file, maybe of another command.",
    ),
    (("--merge_alpha=1.5",), "--merge_alpha=1.5: 1.5 must lie between 0 and 1"),
    (
      ("--merge_alpha=1,0.5,0",),
      "--merge_alpha=1,0.5,0: give one value, or FI",
    ),
    (("--clients_per_round=0",), "clients_per_round"),
    (("--high_capacity_clients=99",), "--high_capacity_clients"),
    (
      ("--clients_per_round=20,9",),
      "error: --clients_per_round=9: pool 1 has 8 clients",
    ),
    (("--clients_per_round=4.5",), "--clients_per_round=4.5: not a whole"),
    (("--client_lr=0.1,x",), "--client_lr=0.1,x: not a number"),
    (("--client_lr=1,2,3",), "--client_lr=1,2,3: give one value, or 2"),
    (("--teacher_temperature=0",), "--teacher_temperature=0"),
    (("--rounds=0",), "rounds"),
    (("--epsilon=8",), "--epsilon=8.0: give --clip_norm too"),
    (("--clip_norm=1", "--epsilon=8"), "add --client_weights=uniform"),
    (("--epsilon=0",), "--epsilon=0: 0 must be at least 0.001"),
    (("--algorithm=fedsgd",), "--algorithm=fedsgd: choose from fedavg"),
    (("--algorithm=merged,merged",), "merged,merged: name each once"),
    (("--distill_data=cifar10",), "--distill_data"),
    (("--recipe=crop24",), "24x24x3 do not fit images of 8x8x1 (digits)"),
    (("--client_momentum=nan",), "--client_momentum=nan: must be a finite"),
    (("--seeds=0,0",), "--seeds=0,0: name each once"),
    (("--dropout=1",), "--dropout=1: "),
    (("--layout=conv,same,pool",), "choose from conv, pool, stride"),
    (("--layout=conv,pool",), "--layout=conv,pool: give one value, or 3"),
    (("--dropout=0,0,0",), "--dropout=0,0,0: give one value, or 2"),
    (("--seeds=0,x",), "--seeds=0,x: not a whole number"),
    (("--seed=1", "--seeds=2"), "--seed=1: give it or --seeds, not both"),
    ((f"--seed={2**32}",), f"{2**32} must lie between 0 and {2**32 - 1}"),
    ((f"--rounds={2**31}",), f"--rounds={2**31}: {2**31} must be below 2^31"),
    (("--cpu_devices=2000",), "--cpu_devices=2000: 2000 must lie between 1"),
    (("--flagfile=/nowhere",), "error: Unable to open flagfile: "),
    (("--flagfile=",), "error: --flagfile: give a file, or leave it out"),
    (("--flagfile",), "error: --flagfile: give a file, or leave it out"),
    ((f"--flagfile={sys.executable}",), "--flagfile: a file is not UTF-8 text"),
    (
      ("--notensorboard=true",),
      "--notensorboard=true does not take an argument",
    ),
    (("--tensorboard=maybe",), "error: --tensorboard=maybe: give true or fal"),
    (
      ("--workdir=/proc/self/run",),
      "--workdir=/proc/self/run/fedavg: cannot b",
    ),
    (("--num_clients=7",), "--num_clients=7: digits has 60 clients; leave"),
    (("stray",), "unexpected argument 'stray'"),
    (
      ("--distributed_coordinator=auto", "--distributed_processes=2"),
      "leave the other two flags out",
    ),
    (cifar, "give --data_dir=DIRECTORY"),
    ((*cifar, "--download"), "cifar-100-binary.tar.gz"),
  ]
  codist.refuse(cases, fresh=fresh)
  (binary / "test.bin").write_bytes(bytes(10_000 * 3074))
  (binary / "train.bin").write_bytes(bytes(1000))  # truncated
  codist.refuse([(cifar, "train.bin")], fresh=fresh)
  in_held, in_foreign = f"--workdir={held}", f"--workdir={foreign}"
  line = codist.fails(*ONE, "--rounds=2", in_held)
  assert "rounds: there 1, here 2" in line
  line = codist.fails("--algorithm=fedavg", in_foreign)
  assert "not the folder of a run" in line
  assert "holds checkpoints" in codist.fails(in_held)
  assert "holds thesis.tex" in codist.fails(in_foreign)
  assert {p.name for p in foreign.iterdir()} == {"thesis.tex"}
  assert everything(held) == before


@pytest.mark.slow
@runs.needs_real_data
def test_real_cifar_100_and_a_flipped_bit(codist, tmp_path):
  flags = ROOT / "experiments/flags/table1_cifar_4700_periodic_out.flags"
  run = (f"--flagfile={flags}", "--rounds=1", "--codist_period=1", *SMALL)
  place = f"--workdir={tmp_path}/run"
  codist(*run, f"--data_dir={runs.REAL}", place)
  result, rows = outcome(tmp_path / "run")
  pools = result["pools"]
  # 32x32x3 in, 8 or 16 hidden, 100 out.
  assert [pools[p]["parameters"] for p in pools] == [25_484, 50_868]
  assert [pools[p]["clients"] for p in pools] == [315, 47]
  assert [pools[p]["examples"] for p in pools] == [31_500, 4_700]
  assert np.isfinite(rows[-1]["large/distill_loss"])
  shutil.copytree(
    pathlib.Path(runs.REAL, "cifar-100-binary"), tmp_path / "cifar-100-binary"
  )
  file = tmp_path / "cifar-100-binary/train.bin"
  file.chmod(0o644)
  with open(file, "r+b") as f:
    f.seek(10**8)
    byte = f.read(1)[0]
    f.seek(10**8)
    f.write(bytes([byte ^ 4]))
  bad = (f"--data_dir={tmp_path}", f"--workdir={tmp_path}/bad")
  line = codist.fails(*run, *bad)
  assert "train.bin" in line and "sha256" in line.lower()
  line = codist.fails(*run, f"--data_dir={runs.REAL}", "--recipe=mnist28")
  assert "crops of 28x28x1 do not fit images of 32x32x3" in line


@pytest.mark.slow
def test_language_models_of_two_domains(codist, tmp_path):
  """A dump of thirty users: pools by domain, word pieces, resuming."""
  posts = runs.write_posts(tmp_path)
  run = (
    "--algorithm=merged",
    "--dataset=stackexchange",
    f"--data_dir={tmp_path}",
    "--pools=domain",
    "--vocabulary=wordpiece",
    "--partition_seed=1",
    "--vocabulary_size=30",
    "--model_size=half",
    "--clients_per_round=3,2",
    "--distill_steps=2",
    "--distill_batch_size=8",
    "--codist_period=2",
    "--rounds=4",
    "--eval_every=2",
    "--checkpoint_every=1",
    "--notensorboard",
  )
  done = codist(*run, "--conv=patches", f"--workdir={tmp_path}/run")
  unused = re.findall(r"--(\w+) has no effect here: (.*)", done.stderr)
  assert unused == [
    ("codist_period", "it is for periodic."),
    ("conv", "it is for images with hetfl_models."),
  ]
  assert re.search(r"questions % +answers %", done.stdout)
  result, rows = outcome(tmp_path / "run")
  vocabulary = (tmp_path / "run/vocabulary.json").read_bytes()
  assert result["vocabulary"] == {
    "kind": "wordpiece",
    "size": len(json.loads(vocabulary)["tokens"]) + 4,
    "sha256": hashlib.sha256(vocabulary).hexdigest(),
  }
  assert result["skipped"] == {"posts without an owner": 1}
  small, large = (result["pools"][p]["parameters"] for p in ("small", "large"))
  assert result["bytes_per_round"] == 2 * 4 * (3 * small + 2 * large)
  for pool in ("small", "large"):
    entry = result["pools"][pool]
    for metric in ("", "_questions", "_answers", "_no_eos"):
      name = f"test_accuracy{metric}"
      assert entry[name] == rows[-1][f"{pool}/{name}"]
    assert entry["test_perplexity"] == pytest.approx(
      np.exp(rows[-1][f"{pool}/test_loss"])
    )
  for curve in ("", "_questions", "_answers"):
    png = (tmp_path / f"run/curves{curve}.png").read_bytes()
    assert png.startswith(b"\x89PNG")
  # A run that was stopped goes on, bit for bit.
  expected = outcome(tmp_path / "run"), last_state(tmp_path / "run")
  (tmp_path / "run/result.json").unlink()
  for late in ("000003", "000004"):
    shutil.rmtree(tmp_path / "run/checkpoints" / late)
  codist(*run, f"--workdir={tmp_path}/run")
  assert (outcome(tmp_path / "run"), last_state(tmp_path / "run")) == expected
  cases = [
    (("--high_capacity_clients=3",), "pools by domain have none"),
    (("--distill_data=c4",), "--distill_data=c4: give --c4_path=PATH"),
    (("--distill_data=cifar10",), "--distill_data=cifar10"),
    ((f"--data_dir={tmp_path}/nowhere",), "archive.org/details/stackexchange"),
    (
      ("--clients_per_round=30",),
      "--clients_per_round=30: pool 0 has 6 clients",
    ),
  ]
  codist.refuse(cases, *run, fresh=tmp_path / "fresh")
  posts.write_text(posts.read_text().replace("Say", "Shout"))
  (tmp_path / "run/result.json").unlink()
  line = codist.fails(*run, f"--workdir={tmp_path}/run")
  assert "the data has changed" in line


def _run_python_of(path):
  """Runs a document's Python blocks in turn; returns the names they define."""
  text = (ROOT / path).read_text(encoding="utf-8")
  names = {}
  with jax.numpy_rank_promotion("allow"):
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
      exec(compile(code, path, "exec"), names)
  return names


@pytest.mark.slow
def test_the_readmes_example_learns():
  names = _run_python_of("README.md")
  server = [learner.variables for learner in names["state"].server]
  for result in names["evaluate"](server):
    assert result["test_accuracy"] > 0.5  # Of ten classes.


@pytest.mark.slow
def test_the_library_guides_examples_run():
  names = _run_python_of("docs/library.md")
  for result in names["accuracies"]:
    assert result["test_accuracy"] > 0.5  # Of ten classes.
  # The second example's: two rounds of each of three trials.
  assert names["metrics"]["large/client_loss"].value.shape == (3, 2)
  count = names["metrics"]["large/distill_loss"].count
  assert count.tolist() == [[4, 4]] * 3
  assert names["small"]["test_accuracy"].value.shape == (3,)


@pytest.mark.slow
def test_the_guide_to_new_methods_runs():
  names = _run_python_of("docs/methods.md")
  far = names["metrics_of_trials"]["far"].value
  assert far.shape == (16,) and (np.diff(far) < 0).all()  # By their weights.
  assert names["metrics"]["loss"].value < 0.3  # SCAFFOLD's; log 10 at first.


def test_reproduce_puts_our_numbers_beside_the_published(experiment, tmp_path):
  run = experiment("reproduce")
  assert "table1_cifar_4700_merged_in" in run("--list").stdout
  for flags, message in (
    (("--only=4701",), "no cell '4701'"),
    (("--only=",), "--only=: give a value, or leave it out"),
    (
      ("--search=4", "--search_flags=--block='2"),
      "--search_flags=--block='2: No closing quotation",
    ),
    (("--", "--workdir=/elsewhere"), "give --workdir and --seeds before"),
  ):
    assert message in run.fails("--table=codist_table1_cifar", *flags)
  # A cell on digits instead, 2 of its rounds; another one joins it.
  table = ("--table=fml_table1", f"--workdir={tmp_path}")
  shorter = ("--dataset=digits", "--rounds=2", "--local_epochs=1")
  run(*table, "--only=mnist_mlp_iid_fedavg", "--", *shorter)
  cells = [
    f"{tmp_path}/fml_table1_mnist_mlp_iid_{n}" for n in ("fedavg", "fml")
  ]
  shutil.copytree(*cells)
  run(*table, "--tabulate")
  with open(tmp_path / "table.csv", encoding="utf-8") as stream:
    fedavg, fml = csv.DictReader(stream)
  result = json.loads(
    (tmp_path / "fml_table1_mnist_mlp_iid_fedavg/result.json").read_text()
  )
  ours = 100 * result["global"]["best_test_accuracy"]
  assert fedavg["global best"] == f"{ours:.2f}"
  assert fedavg["global best, published"] == "98.44"
  assert fml["global best, published"] == "98.49" and fml["rounds"] == "2"


@pytest.mark.parametrize(
  "name,text",
  [
    ("codist", "By default 1500; 120 (digits); 300 (npz or stackexchange)"),
    ("fml", "By default 200; 40 (digits)."),
    ("fedmd", "By default 20; 12 (digits); 13 (cifar_noniid)."),
    ("tune", "By default 1500; 120 (digits); 300 (npz or stackexchange)"),
  ],
)
def test_help_lists_all_flags_and_what_they_are_by_default(name, text):
  code = f"import sys, {name}\ntry:\n  {name}.main(['--help'])\nfinally:\n"
  code += "  assert 'jax' not in sys.modules"  # It would take seconds.
  done = subprocess.run(
    [sys.executable, "-c", code],
    cwd=ROOT / "experiments",
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  for flag in ("--rounds:", "--seed:", "--data_dir:", "--checkpoint_every:"):
    assert f"\n  {flag}" in done.stdout
  # What is not for the command is left out.
  assert ("--lanes:" in done.stdout) == (name != "fedmd")
  assert text in " ".join(done.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--compilation_cache=none",)])
def test_compiled_programs_serve_later_runs(experiment, tmp_path, flags):
  experiment("fml")(
    "--algorithm=fedavg",
    "--global_model=mlp",
    "--rounds=1",
    "--notensorboard",
    f"--workdir={tmp_path}/run",
    *flags,
    JAX_COMPILATION_CACHE_DIR="",
    XDG_CACHE_HOME=str(tmp_path / "cache"),
  )
  programs = [*tmp_path.glob("cache/hetfl/programs/*/*-cache")]
  assert bool(programs) == (not flags)
  config = (tmp_path / "run/config.flags").read_text()
  assert "compilation_cache" not in config
