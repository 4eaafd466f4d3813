"""Damaged runs and full disks; `tests.faults.folders` has all commands."""

import random
import shutil

import pytest

from tests.faults import flags, folders, inside, kills
from tests.runs import outcome
from tests.training_test import run

FEW = dict(rounds=4, eval_every=2, checkpoint_every=2)
DISK = {}  # What happens at writes.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The folder of a run that nothing disturbed."""
  place = tmp_path_factory.mktemp("whole") / "run"
  run(place, **FEW)
  return place


def test_a_run_survives_damage_to_any_file(tmp_path, whole):
  refused, seen = set(), set()
  files = [p.relative_to(whole) for p in whole.rglob("*") if p.is_file()]
  for name in files:
    for kind in ("deleted", "truncated", "flipped"):
      place = tmp_path / kind / str(name).replace("/", "-")
      shutil.copytree(whole, place)
      folders.damage(kind, place / name, random.Random(str(name)))
      seen.add(kind)
      try:
        run(place, **FEW)
      except ValueError as error:
        assert str(place) in str(error) and "\n" not in str(error)
        refused.add(name.name)
      else:
        assert outcome(place) == outcome(whole), (kind, name)
  # Nobody else knows whose run it was; rows before the last must be JSON.
  assert refused <= {"config.json", "metrics.jsonl"}
  assert {p.name for p in files} >= {
    *("config.json", "config.flags", "result.json", "metrics.jsonl"),
    *("manifest.json", "state.npz"),
  }
  assert len(files) > 8 and len(seen) == 3


@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl"])
def test_another_number_is_noticed(tmp_path, whole, name):
  for folder in (tmp_path / "finished", tmp_path / "half"):
    shutil.copytree(whole, folder)
    if folder.name == "half":
      (folder / "result.json").unlink()
    file = folder / name
    if file.exists():
      text = file.read_text()
      at = text.index(".") + 2  # A digit of the first number.
      digit = str((int(text[at]) + 1) % 10)
      file.write_text(text[:at] + digit + text[at + 1 :])
    if name == "metrics.jsonl":  # No checkpoint is older than its first row.
      with pytest.raises(ValueError, match="metrics.jsonl is not what was"):
        run(folder, plan_fn=None, **FEW)
    else:
      run(folder, plan_fn=None, **FEW)
      assert outcome(folder) == outcome(whole)


def test_a_disk_that_is_full_at_any_write(tmp_path, whole):
  inside.writes(DISK)
  failed = 0
  for n in range(1, 1000, 5):  # All of them pass, and take a minute.
    place = tmp_path / str(n)
    DISK.update(folder=str(place), first=n, last=1000, do="ENOSPC", seen=0)
    try:
      run(place, **FEW)
      break
    except (OSError, ValueError) as error:
      notes = getattr(error, "__notes__", [])
      assert str(place) in " ".join([str(error), *notes]), n
      failed += 1
    finally:
      DISK.update(last=0)
    run(place, **FEW)
    assert outcome(place) == outcome(whole), n
  assert failed > 4


@pytest.mark.slow
def test_flags_make_a_run_or_an_error_in_one_line(tmp_path):
  counts, faults = flags.run(tmp_path, 12, seed=0, ran=False)
  assert not faults
  assert {"traced", "refused"} <= {found for _, found in counts}


@pytest.mark.slow
def test_a_few_kills(tmp_path):
  counts, faults = kills.run(tmp_path, 3, seed=0, names=("fml",))
  assert not faults
  assert sum(n for (_, end), n in counts.items() if end != "finished") >= 3
