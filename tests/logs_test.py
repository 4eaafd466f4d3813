import json
import math
import os
import resource
import subprocess
import sys

from absl import flags
import numpy as np
import pytest

from hetfl.data import disk
from hetfl.run import checkpoint, logs

CONFIG = {"lr": 0.1, "pools": ("small", "large"), "seed": 0, "mask": True}


def contents(folder):
  return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_config_flags_is_a_flag_file(tmp_path):
  logs.RunFolder(tmp_path / "run", CONFIG | {"none": None}, {"lanes": 4})
  values = flags.FlagValues()
  flags.DEFINE_float("lr", 0, "", flag_values=values)
  flags.DEFINE_list("pools", [], "", flag_values=values)
  flags.DEFINE_integer("seed", 1, "", flag_values=values)
  flags.DEFINE_boolean("mask", False, "", flag_values=values)
  flags.DEFINE_integer("lanes", 1, "", flag_values=values)
  flags.DEFINE_string("none", None, "", flag_values=values)
  flags.DEFINE_string("flagfile", "", "", flag_values=values)
  values(["program", f"--flagfile={tmp_path / 'run' / 'config.flags'}"])
  assert values.lr == 0.1
  assert values.pools == ["small", "large"]
  assert (values.seed, values.mask, values.lanes) == (0, True, 4)
  assert values.none is None


def test_the_same_run_is_opened_again_with_other_speed_flags(tmp_path):
  logs.RunFolder(tmp_path, CONFIG, {"lanes": 4})
  before = contents(tmp_path)
  folder = logs.RunFolder(tmp_path, CONFIG, {"lanes": 8}, flags="--lr=0.1")
  assert contents(tmp_path) == before  # Until it trains.
  with folder.at_work():
    assert (tmp_path / "config.flags").read_text() == "--lr=0.1\n"
    assert json.loads((tmp_path / "config.json").read_text())["speed"] == {
      "lanes": 8
    }


def test_one_process_at_a_time(tmp_path):
  first, second = (logs.RunFolder(tmp_path, CONFIG, {"n": n}) for n in (1, 2))
  with first.at_work():
    before = contents(tmp_path)
    with pytest.raises(logs.ConfigMismatch, match="another process is using"):
      with second.at_work():
        pass
    assert contents(tmp_path) == before
  with second.at_work():
    pass


def test_two_runs_begin_in_one_folder(tmp_path):
  """Both find it empty; the one that comes second writes its config."""
  first = logs.RunFolder(tmp_path, CONFIG)
  for path in tmp_path.iterdir():
    path.unlink()
  second = logs.RunFolder(tmp_path, CONFIG | {"lr": 0.2})
  with pytest.raises(logs.ConfigMismatch, match="has begun another run there"):
    with first.at_work():
      pass
  with second.at_work():
    assert logs.read_config(tmp_path)["config"]["lr"] == 0.2


def test_another_run_is_refused_and_left_alone(tmp_path):
  logs.RunFolder(tmp_path, CONFIG)
  before = contents(tmp_path)
  other = {"lr": 0.2, "pools": ["small"], "seed": 0, "mask": 1, "new": 3}
  with pytest.raises(logs.ConfigMismatch) as e:
    logs.RunFolder(tmp_path, other)
  assert str(e.value) == (
    f"workdir={tmp_path} holds another run: lr: there 0.1, here 0.2;"
    ' pools: there ["small", "large"], here ["small"];'
    " mask: there true, here 1; new: there unset, here 3."
    " Use another workdir, or the same values."
  )
  assert contents(tmp_path) == before
  # A flag that the run's version did not have.
  logs.RunFolder(tmp_path, CONFIG | {"new": 3}, defaults={"new": 3, "lr": 9})
  with pytest.raises(logs.ConfigMismatch, match="new: there 2, here 3"):
    logs.RunFolder(tmp_path, CONFIG | {"new": 3}, defaults={"new": 2})


def test_rounds_can_only_be_added(tmp_path):
  config = {"rounds": 6, "eval_every": 3}
  logs.RunFolder(tmp_path, config)
  logs.RunFolder(tmp_path, config | {"rounds": 7}, lengthens=True)
  for more, lengthens, message in (
    ({"rounds": 7}, False, "here 7. Rounds can only be added to"),
    ({"rounds": 5}, True, "here 5. Rounds can only be added to"),
    ({"rounds": 7, "eval_every": 2}, True, "here 2. Use another"),
  ):
    with pytest.raises(logs.ConfigMismatch, match=message):
      logs.RunFolder(tmp_path, config | more, lengthens=lengthens)
  uneven = {"rounds": 7, "eval_every": 5}
  logs.RunFolder(tmp_path / "uneven", uneven)
  with pytest.raises(logs.ConfigMismatch, match="a multiple of eval_every"):
    logs.RunFolder(tmp_path / "uneven", uneven | {"rounds": 9}, lengthens=True)


def test_other_data_are_refused_and_left_alone(tmp_path):
  folder = logs.RunFolder(tmp_path, CONFIG)
  for _ in range(2):
    folder.keep({"data.json": b"one\n"})
  with pytest.raises(
    logs.ConfigMismatch, match="data.json is not what this run"
  ):
    folder.keep({"data.json": b"other\n"})
  assert (tmp_path / "data.json").read_bytes() == b"one\n"


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path):
  (tmp_path / "thesis.tex").write_text("years of work")
  for path in (tmp_path, tmp_path / "thesis.tex"):
    with pytest.raises(logs.ConfigMismatch, match="not the folder of a run"):
      logs.RunFolder(path, CONFIG)
  assert contents(tmp_path) == {"thesis.tex": b"years of work"}
  (tmp_path / "config.json").write_text('{"half')
  with pytest.raises(logs.ConfigMismatch, match="not the folder of a run"):
    logs.RunFolder(tmp_path, CONFIG)


def test_what_a_killed_start_left_is_no_obstacle(tmp_path):
  (tmp_path / ".config.json.part").write_text("{")
  (tmp_path / ".DS_Store").write_text("what a file browser leaves")
  logs.RunFolder(tmp_path, CONFIG)


def test_two_processes_write_the_same_file(tmp_path):
  lines = (
    # Not as a part of hetfl, which imports JAX.
    f"import sys; sys.path.insert(0, {os.path.dirname(logs.__file__)!r})",
    "import logs",
    "for i in range(50):",
    "  logs.write_bytes(sys.argv[1], sys.argv[2].encode() * 100_000)",
  )
  command = [sys.executable, "-c", "\n".join(lines), tmp_path / "table"]
  both = [
    subprocess.Popen([*command, letter], stderr=subprocess.PIPE, text=True)
    for letter in "ab"
  ]
  errors = [process.communicate(timeout=120)[1] for process in both]
  assert [process.returncode for process in both] == [0, 0], errors
  written = contents(tmp_path)
  assert list(written) == ["table"]
  assert written["table"] in (b"a" * 100_000, b"b" * 100_000)


def test_write_json_is_strictly_json(tmp_path):
  path = tmp_path / "x.json"
  value = {"a": np.float32(0.5), "b": [math.nan, -math.inf], 3: np.int64(4)}
  logs.write_json(path, value)

  def refuse(token):
    raise AssertionError(token)

  read = json.loads(path.read_text(), parse_constant=refuse)
  assert read == {"a": 0.5, "b": [None, None], "3": 4}
  with pytest.raises(TypeError, match="no form in JSON"):
    logs.write_json(path, {"a": object()})
  with pytest.raises(TypeError, match="array.tolist"):
    logs.write_json(path, {"a": np.arange(2)})
  assert json.loads(path.read_text()) == read
  assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_full_disk_is_named(tmp_path):
  """What cannot be written, as files may only have so many bytes here."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  folder, checkpoints = logs.RunFolder(tmp_path, {}), tmp_path / "checkpoints"
  large = {"w": np.random.default_rng(0).normal(size=10_000)}
  # Longer in TensorBoard's log than in the metrics' file.
  many = {f"client{k}/loss": 0.5 for k in range(1000)}
  fill = lambda append: append("x", large["w"])
  with logs.metrics_log(folder) as write:
    for name, attempt in {
      "tensorboard": lambda: write({"round": 2, **many}),
      "table": lambda: logs.write_bytes(tmp_path / "table", b"x" * 50_000),
      "metrics.jsonl": lambda: write({"round": 1, "text": "x" * 50_000}),
      "000001": lambda: checkpoint.Checkpoints(checkpoints).save(1, large, {}),
      "bank": lambda: disk.stored(tmp_path / "bank", 1, fill),
    }.items():
      resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
      try:
        with pytest.raises((OSError, ValueError)) as error:
          attempt()
      finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
      (note,) = error.value.__notes__
      assert f"/{name}; free some space" in note
  assert not checkpoint.Checkpoints(checkpoints).rounds()
  assert logs.read_rows(folder.metrics) == [{"round": 2, **many}]


@pytest.mark.parametrize("tail", [b"", b'{"round": 4, "lo', b'{"round": 4}'])
def test_metrics_are_cut_back_and_gone_on_with(tmp_path, tail):
  folder = logs.RunFolder(tmp_path, {})
  rows = [{"round": r, "loss": 1 / r} for r in (1, 2, 3)]
  with logs.metrics_log(folder, tensorboard=False) as write:
    for row in rows:
      write(row)
  with open(folder.metrics, "ab") as f:
    f.write(tail)
  assert logs.read_rows(folder.metrics) == rows
  with logs.metrics_log(folder, after=2, tensorboard=False) as write:
    assert logs.read_rows(folder.metrics) == rows[:2]
    write({"round": 3, "loss": 0.25})
  assert logs.read_rows(folder.metrics) == [
    *rows[:2],
    {"round": 3, "loss": 0.25},
  ]


def test_rows_before_the_last_must_be_whole(tmp_path):
  path = tmp_path / "metrics.jsonl"
  assert logs.read_rows(path) == []
  path.write_text('{"round": 1}\n{"rou\n{"round": 3}\n')
  with pytest.raises(ValueError, match="metrics.jsonl holds a line that is"):
    logs.read_rows(path)


def test_tensorboard_can_be_switched_off(tmp_path):
  folder = logs.RunFolder(tmp_path, {})
  row = {"round": 1, "a/loss": 0.5, "b/loss": math.nan, "note": "text"}
  with logs.metrics_log(folder, tensorboard=False) as write:
    write(row)
  assert not (tmp_path / "tensorboard").exists()
  with logs.metrics_log(folder, after=1) as write:
    write(row | {"round": 2})
  (events,) = (tmp_path / "tensorboard").iterdir()
  assert b"a/loss" in events.read_bytes()


def test_progress_off_a_terminal_is_a_line_an_evaluation(caplog, capsys):
  caplog.set_level("INFO", logger="absl")
  bar = logs.bar(10, initial=3)
  logs.show({"round": 4, "small/loss": 0.123456, "seconds": 2.0}, bar)
  bar.update(1)
  # Accuracies, if there are any; of more than three clients the mean.
  few = {f"party{k}/test_accuracy": k / 4 for k in range(3)}
  many = {f"client{k}/validation_accuracy": k / 4 for k in range(5)}
  of_all = {"global/test_accuracy": 0.75, "local_loss": 9.0}
  logs.show({"round": 5, "seconds": 2.5} | of_all | few | many, bar)
  mean = {"clients/validation_accuracy": 0.5}
  logs.show({"round": 6, "seconds": 3.0} | many | mean, bar)
  bar.close()
  assert caplog.messages == [
    "round 4 of 10, 2.0 s: loss small 0.1235",
    "round 5 of 10, 2.5 s: test_accuracy global 0.75, party0 0, party1 0.25,"
    " party2 0.5; validation_accuracy client mean 0.5",
    "round 6 of 10, 3.0 s: validation_accuracy clients 0.5",
  ]
  assert capsys.readouterr() == ("", "")
