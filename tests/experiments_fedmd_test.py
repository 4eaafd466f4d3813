"""experiments/fedmd.py as a user runs it."""

import json
import random
import re
import shutil
import signal

import numpy as np
import pytest

from hetfl.run import logs
from tests.runs import last_state, outcome, stop

PHASES = ("public", "transfer", "pooled")
# Two parties, one of them dense, and a few epochs and rounds.
TINY = (
  "--num_parties=2",
  "--weak_parties=1",
  "--public_epochs=3",
  "--transfer_epochs=3",
  "--pooled_epochs=3",
  "--public_subset=96",
  "--rounds=4",
)


@pytest.fixture(scope="module")
def fedmd(experiment):
  return experiment("fedmd")


@pytest.fixture(scope="module")
def undisturbed(fedmd, tmp_path_factory):
  """The folder of a finished run, and what it printed."""
  path = tmp_path_factory.mktemp("fedmd") / "run"
  done = fedmd(*TINY, f"--workdir={path}")
  return path, done.stdout


@pytest.mark.slow
def test_a_run_says_what_became_of_each_party(undisturbed):
  path, printed = undisturbed
  result, rows = outcome(path)
  assert re.search(r"^party0 +cnn\(8,16\) +9,136 ", printed, re.MULTILINE)
  assert re.search(r"^mean  ", printed, re.MULTILINE)
  assert result["environment"] == "digits" and result["width"] == 1
  assert result["stopping_set"] == {"public": "heldout", "private": "heldout"}
  assert [row["round"] for row in rows] == [0, 1, 2, 3, 4]
  parts = {phase: outcome(path / phase)[0]["parties"] for phase in PHASES}
  for k, party in enumerate(result["parties"]):
    for phase in PHASES:
      assert party[f"{phase}_accuracy"] == parts[phase][k]["test_accuracy"]
      assert 0 <= party[f"{phase}_accuracy"] <= 1
      assert party[f"{phase}_epochs"] == 3
    # Round 0 is where transfer learning ends.
    name = f"party{k}/test_accuracy"
    assert rows[0][name] == party["transfer_accuracy"]
    assert rows[-1][name] == party["final_accuracy"]
    # 96 examples, 10 outputs, 4 bytes; and where the examples are.
    assert party["bytes_sent_per_round"] == 96 * 10 * 4
    assert party["bytes_received_per_round"] == 96 * 10 * 4 + 96 * 4
    # A mean and a variance of each of the CNN's 8 + 16 filters.
    sent = party["parameters"] + (48, 0)[k]
    assert party["bytes_weights_per_round"] == 4 * sent
  # Two parties.
  assert result["bytes_per_round"] == 2 * (2 * 96 * 10 * 4 + 96 * 4)
  for name, value in result["mean"].items():
    both = [party[name] for party in result["parties"]]
    assert value == pytest.approx(sum(both) / 2)
  assert "party1/digest_loss" in rows[1]
  assert (path / "curves.png").read_bytes().startswith(b"\x89PNG")
  assert list((path / "tensorboard").iterdir())


@pytest.mark.slow
def test_sigkill_before_the_rounds_and_in_them(undisturbed, fedmd, tmp_path):
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  shutil.copytree(undisturbed[0], whole)
  longer = (*TINY[:-1], "--rounds=16")  # Four are over before the signal.
  fedmd(*longer, f"--workdir={whole}")  # A finished run is lengthened.
  assert "--rounds=16\n" in (whole / "config.flags").read_text()
  run = (*longer, f"--workdir={killed}")
  draw = random.Random(0)
  seen = set()
  for folder in ("transfer", "."):
    code = stop(fedmd.start(*run), killed / folder, draw.uniform(0, 0.02))
    assert code == -signal.SIGKILL, "too fast to be killed"
    seen |= {p for p in PHASES if (killed / p / "result.json").exists()}
    assert not (killed / "result.json").exists()
  assert seen == set(PHASES)
  fedmd(*run)
  for folder in (".", *PHASES):
    ours, theirs = killed / folder, whole / folder
    assert outcome(ours) == outcome(theirs)
    assert last_state(ours) == last_state(theirs)
  # The same command with other data of one phase.
  (killed / "transfer/data.json").write_text('{"crc32": "00000000"}\n')
  assert "data.json is not what this run" in fedmd.fails(*run)


@pytest.mark.slow
def test_runs_share_what_comes_before(undisturbed, fedmd, tmp_path):
  path, _ = undisturbed
  before = {p: p.stat().st_mtime_ns for p in path.rglob("checkpoints/*")}
  fedmd(
    *TINY,
    f"--pretrained={path}",
    "--consensus_weights=1,0",
    "--digest_loss=kl",
    "--engine=inline",
    f"--workdir={tmp_path}/other",
  )
  result, rows = outcome(tmp_path / "other")
  theirs, other_rows = outcome(path)
  assert result["consensus_weights"] == [1, 0]
  for k, parties in enumerate(zip(result["parties"], theirs["parties"])):
    ours, other = parties
    for phase in PHASES:
      name = f"{phase}_accuracy"
      assert ours[name] == other[name]
    name = f"party{k}/test_loss"
    assert rows[0][name] == pytest.approx(other_rows[0][name], rel=1e-4)
    assert rows[1][name] != pytest.approx(other_rows[1][name], rel=1e-4)
  assert not (tmp_path / "other/public").exists()
  after = {p: p.stat().st_mtime_ns for p in path.rglob("checkpoints/*")}
  assert after == before
  # Its own flag file leaves out the other run's folder, which may move.
  flags = (tmp_path / "other/config.flags").read_text()
  assert "--pretrained" not in flags
  fedmd(
    f"--flagfile={tmp_path}/other/config.flags",
    f"--workdir={tmp_path}/other",
  )
  assert not (tmp_path / "other/public").exists()
  # Other flags for a phase on private data: it alone is trained.
  folder = tmp_path / "anew"
  done = fedmd(
    *TINY,
    f"--pretrained={path}",
    "--transfer_epochs=2",
    f"--workdir={folder}",
  )
  assert (
    f"Phase transfer is retrained, not reused: --pretrained={path}/transfer"
    " holds another run: transfer_epochs: there 3, here 2."
  ) in done.stderr
  assert {p for p in PHASES if (folder / p).exists()} == {"transfer"}
  result, _ = outcome(folder)
  for ours, other in zip(result["parties"], theirs["parties"]):
    assert ours["public_accuracy"] == other["public_accuracy"]
    assert (ours["public_epochs"], ours["transfer_epochs"]) == (3, 2)
  # Other flags for the public phase: no.
  line = fedmd.fails(
    *TINY,
    "--seed=1",
    f"--pretrained={path}",
    f"--workdir={tmp_path}/third",
  )
  assert not (tmp_path / "third").exists()
  assert "--pretrained=" in line
  assert "seed: there 0, here 1. Use another --pretrained" in line


@pytest.mark.slow
def test_seeds_have_folders_and_a_mean(undisturbed, fedmd, tmp_path):
  path = tmp_path / "seeds"
  done = fedmd(*TINY, "--seeds=0,3", f"--workdir={path}")
  for folder in (".", *PHASES):
    assert outcome(path / "seed0" / folder) == outcome(undisturbed[0] / folder)
  assert last_state(path / "seed0") == last_state(undisturbed[0])
  final = [
    outcome(path / f"seed{seed}")[0]["mean"]["final_accuracy"]
    for seed in (0, 3)
  ]
  mean, deviation = 100 * np.mean(final), 100 * np.std(final, ddof=1)
  shown = f"{mean:.2f} ± {deviation:.2f}"
  assert re.search(rf"^mean  .* {shown} ", done.stdout, re.MULTILINE)
  summary = json.loads((path / "summary.json").read_text())
  entry = summary["algorithms"]["fedmd"]["mean.final_accuracy"]
  assert entry["values"] == final
  assert 100 * entry["deviation"] == pytest.approx(deviation)
  assert (path / "curves.png").read_bytes().startswith(b"\x89PNG")
  # Each seed takes the phases of the same one.
  fedmd(
    *TINY[:-1],
    "--rounds=1",
    "--seeds=3",
    f"--pretrained={path}",
    f"--workdir={tmp_path}/one",
  )
  one, of_three = (outcome(p / "seed3")[0] for p in (tmp_path / "one", path))
  name = "pooled_accuracy"
  assert one["mean"][name] == of_three["mean"][name]
  assert not (tmp_path / "one/seed3/public").exists()


@pytest.mark.slow
def test_engines_agree(undisturbed, fedmd, tmp_path):
  fedmd(
    *TINY,
    "--engine=inline",
    "--eval_batch_size=500",
    f"--pretrained={undisturbed[0]}",
    f"--workdir={tmp_path}/inline",
  )
  rows = [
    logs.read_rows(folder / "metrics.jsonl")
    for folder in (tmp_path / "inline", undisturbed[0])
  ]
  for ours, theirs in zip(*rows, strict=True):
    for name in ours:
      if name.endswith("loss"):
        # Adam amplifies the rounding of gradients that are nearly zero.
        assert ours[name] == pytest.approx(theirs[name], rel=2e-2), name


@pytest.mark.slow
def test_bad_input_is_one_line_and_overwrites_nothing(
  undisturbed, fedmd, tmp_path
):
  letters = "--environment=mnist_letters_iid"
  cases = [
    (("--environment=mnist",), "environment"),
    (("--rounds=0",), "rounds"),
    (("--consensus_weights=1,2",), "give one or 5 values"),
    (("--consensus_weights=1,x,1,1,1",), "1,x,1,1,1: not a number"),
    (("--consensus_weights=1,1,1,1,-1",), "-1 must be at least 0"),
    (
      ("--num_parties=2", "--weak_parties=3"),
      "--weak_parties=3: must be a whole number, at least 0 and at most 2",
    ),
    (("--public_subset=9999",), "--public_subset=9999: exceeds the 771"),
    (("--examples_per_class=99",), "examples_per_class=99: 5 parties want 495"),
    (
      ("--heldout_examples=5000",),
      "--heldout_examples=5000: must be a whole number, at least 0 and at most"
      " 870",
    ),
    (("--digest_loss=l1",), "digest_loss"),
    (
      (f"--pretrained={tmp_path}",),
      "not the folder of a run (it has no public/",
    ),
    (("--lanes=3",), "--lanes: not for this command"),
    ((letters, f"--data_dir={tmp_path}"), "mnist not found"),
    (("--environment=npz",), "--npz=None: --environment=npz needs your file"),
    (("--public_npz=own.npz",), "--public_npz=own.npz: --environment=digits"),
  ]
  fedmd.refuse(cases, fresh=tmp_path / "fresh")
  path, _ = undisturbed
  before = outcome(path), last_state(path)
  line = fedmd.fails(*TINY[:-1], "--rounds=3", f"--workdir={path}")
  assert "rounds: there 4, here 3" in line
  assert (outcome(path), last_state(path)) == before
