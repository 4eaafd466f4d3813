"""The examples run, and collaboration helps in them."""

import doctest
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from examples import (
  ensemble_distillation,
  fedmd_any_model,
  fine_tuning,
  mutual_hospitals,
  whole_run,
)
from hetfl.run import logs
from tests.runs import ROOT

SCRIPTS = [
  path
  for folder in ("benchmarks", "experiments")
  for path in sorted((ROOT / folder).glob("*.py"))
  if doctest.DocTestParser().get_examples(path.read_text(encoding="utf-8"))
]


@pytest.fixture(autouse=True)
def user_settings():
  """Users' code may broadcast as it likes."""
  with jax.numpy_rank_promotion("allow"):
    yield


def accuracies(results):
  return np.array([result["test_accuracy"] for result in results])


@pytest.mark.slow
def test_hospitals():
  found = accuracies(mutual_hospitals.main(rounds=20))
  alone, together, server = found[:4], found[4:8], found[8]
  assert together[0] > alone[0]  # The smallest, of 20 records.
  assert together.mean() > alone.mean()
  assert server > 0.95


@pytest.mark.slow
def test_any_model():
  alone, together = map(accuracies, fedmd_any_model.main(rounds=8))
  assert (together - alone).min() > 0.03


@pytest.mark.slow
def test_fine_tuning():
  before, after = fine_tuning.main(rounds=20)
  assert after > before + 0.05


@pytest.mark.slow
def test_ensemble_distillation():
  fedavg, feddf = ensemble_distillation.main()
  assert feddf > fedavg + 0.01


@pytest.mark.slow
def test_whole_run(tmp_path):
  found = whole_run.main(seeds=1, workdir=tmp_path)
  assert found["FedAvg"].shape == (1, 2)
  assert all(each.min() > 0.6 for each in found.values())
  assert (tmp_path / "curves.png").exists()
  # Finished runs are read, not run again, and others are refused.
  results = list(tmp_path.glob("*/result.json"))
  before = {path: path.stat().st_mtime_ns for path in results}
  again = whole_run.main(seeds=1, workdir=tmp_path)
  assert len(before) == 2
  assert before == {path: path.stat().st_mtime_ns for path in results}
  for name, each in found.items():
    np.testing.assert_array_equal(again[name], each)
  other = whole_run.SETTINGS | {"learning_rate": 0.1}
  with pytest.raises(
    logs.ConfigMismatch, match="learning_rate: there 0.3, here"
  ):
    whole_run.main(seeds=1, workdir=tmp_path, settings=other)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_examples_in_scripts(path):
  done = subprocess.run(
    [sys.executable, "-m", "doctest", str(path)],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr
