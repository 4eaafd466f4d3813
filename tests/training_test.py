import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetfl
from hetfl import core, engine
from hetfl.algorithms.personal import personal
from hetfl.clients import on_host
from hetfl.run import checkpoint, logs, training
from tests.algorithms import MLP, mutual_data, POPULATION
from tests.runs import outcome

ROUNDS, EVAL_EVERY = 12, 5
PACKAGE = pathlib.Path(training.__file__).resolve().parents[1]


def test_the_library_does_not_import_what_runs_experiments():
  imports = re.compile(
    r"^ *(from|import) .*(hetfl\.run|hetfl import .*\brun\b)"
  )
  for path in PACKAGE.rglob("*.py"):
    if path.parent.name != "run":
      lines = path.read_text().splitlines()
      assert not any(map(imports.match, lines)), path


class Regression:
  """Linear regression by SGD, with noise from a key in the state."""

  def init(self, key):
    # A weakly typed leaf: jnp.full of a Python number.
    return {"w": jnp.full(3, 0.0), "key": key, "round": jnp.asarray(0)}

  traces, on_host = 0, False

  def step(self, state, plan, data):
    self.traces += 1
    x, y = data["x"][plan], data["y"][plan]

    def loss_fn(w):
      return jnp.mean((x @ w - y) ** 2)

    loss, gradient = jax.value_and_grad(loss_fn)(state["w"])
    key, noise = jax.random.split(state["key"])
    noise = 0.01 * jax.random.normal(noise, (3,))
    w = state["w"] - 0.1 * (gradient + noise)
    one = jnp.ones(())
    metrics = {
      "small/loss": core.Mean(loss, one),
      "small/batch": core.Mean(one * x.shape[0], one),
      "small/rare": core.Mean(0 * one, 0 * one),  # not measured: left out
    }
    return {"w": w, "key": key, "round": state["round"] + 1}, metrics


DATA = {
  "x": jnp.asarray(np.random.default_rng(0).normal(size=(40, 3)), "float32"),
  "y": jnp.asarray(np.random.default_rng(1).normal(size=40), "float32"),
}


def plan(round):
  return np.random.default_rng([7, round]).integers(40, size=8)


def evaluate(state):
  error = jnp.mean((DATA["x"] @ state["w"] - DATA["y"]) ** 2)
  return {"small/test_error": float(error), "small/gap": float("nan")}


def summarize(state, evaluation):
  bits = (
    np.asarray(state["w"]).tobytes()
    + np.asarray(jax.random.key_data(state["key"])).tobytes()
  )
  return {"algorithm": "sgd", "bits": bits.hex(), "pools": evaluation}


def run(workdir, algorithm=None, **changes):
  options = dict(
    engine=engine.Inline(),
    rounds=ROUNDS,
    folder=logs.RunFolder(workdir, {"rounds": ROUNDS}),
    summarize=summarize,
    eval_every=EVAL_EVERY,
    checkpoint_every=4,
    tensorboard=False,
  )
  arguments = dict(plan_fn=plan, data=DATA, evaluate=evaluate)
  return training.run(
    algorithm or Regression(),
    jax.random.key(0),
    **(arguments | options | changes),
  )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("undisturbed")
  result = run(workdir)
  folder = logs.RunFolder(workdir, {"rounds": ROUNDS})
  assert result == folder.result()
  last = logs.read_rows(folder.metrics)[-1]
  assert result["seconds"] >= last["seconds"] > 0
  return outcome(workdir)


def test_undisturbed(undisturbed):
  result, rows = undisturbed
  assert [row["round"] for row in rows] == [5, 10, 12]
  assert result["rounds"] == ROUNDS
  assert result["versions"]["jax"] == jax.__version__
  # By hand, without `run`; the last row has the mean of rounds 11 and 12.
  algorithm = Regression()
  state, losses = core.strong(algorithm.init(jax.random.key(0))), []
  step = engine.jit(algorithm.step)
  for round in range(1, ROUNDS + 1):
    state, metrics = step(state, plan(round), DATA)
    losses.append(float(metrics["small/loss"].total))
  assert summarize(state, {})["bits"] == result["bits"]
  assert rows[-1] == {
    "round": 12,
    "small/test_error": evaluate(state)["small/test_error"],
    "small/gap": None,
    "small/loss": (losses[10] + losses[11]) / 2,
    "small/batch": 8.0,
  }


class CrashError(Exception):
  pass


# Before the first checkpoint, between an evaluation and a checkpoint, ...
@pytest.mark.parametrize("crash", [1, 3, 6, 11])
def test_resume_after_a_crash(tmp_path, undisturbed, crash):
  def crashing_plan(round):
    if round == crash:
      raise CrashError
    return plan(round)

  every = 1 + crash % 3
  with pytest.raises(CrashError):
    run(tmp_path, plan_fn=crashing_plan, checkpoint_every=every)
  assert not (tmp_path / "result.json").exists()
  # A row that is later than the checkpoint, and half of another.
  with open(tmp_path / "metrics.jsonl", "ab") as f:
    f.write(b'{"round": 12, "small/loss": 3}\n{"round"')
  made = []

  def noting_plan(round):
    made.append(round)
    return plan(round)

  run(tmp_path, plan_fn=noting_plan, checkpoint_every=every)
  assert made == list(range((crash - 1) // every * every + 1, ROUNDS + 1))
  assert outcome(tmp_path) == undisturbed


def test_resume_after_the_last_checkpoint_but_before_the_result(
  tmp_path, undisturbed
):
  run(tmp_path)
  (tmp_path / "result.json").unlink()
  run(tmp_path, plan_fn=None)
  assert outcome(tmp_path) == undisturbed


def test_a_damaged_checkpoint_costs_rounds_only(tmp_path, undisturbed):
  run(tmp_path)
  (tmp_path / "result.json").unlink()
  for round in (8, 12):
    (tmp_path / f"checkpoints/{round:06d}/manifest.json").write_bytes(b"x")
  run(tmp_path)
  assert outcome(tmp_path) == undisturbed


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("left,first", [(0, 5), (1, 9), (2.5, 9)])
def test_lost_rows_are_made_again(tmp_path, undisturbed, finished, left, first):
  run(tmp_path)
  if not finished:
    (tmp_path / "result.json").unlink()
  metrics, made = tmp_path / "metrics.jsonl", []
  lines = metrics.read_bytes().splitlines(keepends=True)  # 5, 10 and 12.
  half = lines[2][:9] if left % 1 else b""
  metrics.write_bytes(b"".join([*lines[: int(left)], half]))
  if not left:
    metrics.unlink()

  def noting_plan(round):
    made.append(round)
    return plan(round)

  run(tmp_path, plan_fn=noting_plan)
  assert made == list(range(first, ROUNDS + 1))
  assert outcome(tmp_path) == undisturbed


@pytest.mark.parametrize("finished", [False, True])
def test_what_cannot_be_made_again_is_named(tmp_path, finished):
  run(tmp_path, checkpoint_every=1)  # The last three are kept.
  if not finished:
    (tmp_path / "result.json").unlink()
  (tmp_path / "metrics.jsonl").unlink()
  with pytest.raises(ValueError, match=r"no lines of rounds 5, 10, 12: .*12 "):
    run(tmp_path, plan_fn=None)


def test_a_finished_run_without_checkpoints_is_not_extended(tmp_path):
  run(tmp_path)
  shutil.rmtree(tmp_path / "checkpoints")
  with pytest.raises(ValueError, match="has done 12 rounds, and there is no"):
    run(tmp_path, rounds=15, plan_fn=None)


def test_a_finished_run_is_not_run_again(tmp_path):
  result = run(tmp_path)
  assert run(tmp_path, plan_fn=None, evaluate=None) == result
  with pytest.raises(ValueError, match="already has a checkpoint of round 12"):
    run(tmp_path, rounds=3)


def test_patience_ends_a_run_for_good(tmp_path):
  accuracy, seen = (None, 0.1, 0.5, float("nan"), 0.5, 0.9), []

  def measured(state):
    seen.append(int(state["round"]))
    return {"accuracy": accuracy[seen[-1]]}

  def once():
    done = run(
      tmp_path, evaluate=measured, eval_every=1, patience=2, watched="accuracy"
    )
    return done["rounds"], done["pools"]["accuracy"], seen

  # The best is not exceeded for two evaluations.
  assert once() == (4, 0.5, [1, 2, 3, 4])
  assert once() == (4, 0.5, [1, 2, 3, 4])
  (tmp_path / "result.json").unlink()
  assert once() == (4, 0.5, [1, 2, 3, 4])


def test_patience_knows_what_it_watches(tmp_path):
  with pytest.raises(ValueError, match="watched='loss': .*small/gap"):
    run(tmp_path / "a", patience=2, watched="loss")
  values = iter([-5.0, float("nan"), *np.arange(-4.0, 0.0, 0.25).tolist()])
  result = run(
    tmp_path / "b",
    evaluate=lambda state: {"gain": next(values)},
    eval_every=1,
    patience=3,
    watched="gain",
  )
  assert result["rounds"] == ROUNDS  # It rose to the end: NaN is not the best.


def test_the_second_round_does_not_compile(tmp_path):
  algorithm = Regression()
  run(tmp_path, algorithm)
  assert algorithm.traces == 1


def test_plans_are_made_one_ahead(tmp_path):
  made, seen = [], []

  def noting_plan(round):
    assert threading.current_thread() is not threading.main_thread()
    made.append(round)
    return plan(round)

  def noting_evaluate(state):
    round = int(state["round"])
    deadline = time.monotonic() + 10
    while round == len(made) < 11 and time.monotonic() < deadline:
      time.sleep(0.001)
    seen.append(len(made) - round)
    return {}

  run(tmp_path, plan_fn=noting_plan, evaluate=noting_evaluate, rounds=11)
  assert made == list(range(1, 12))
  assert seen == [1, 1, 0]


@pytest.mark.parametrize("stop", [False, True])
def test_a_loss_that_is_not_finite(tmp_path, caplog, stop):
  data = DATA | {"y": DATA["y"] + jnp.inf}
  if stop:
    with pytest.raises(FloatingPointError, match="round 1: small/loss is inf"):
      run(tmp_path, data=data, stop_on_nonfinite=True)
    assert not list((tmp_path / "checkpoints").glob("*"))
  else:
    assert run(tmp_path, data=data)["diverged"] == 1
    (line,) = [line for line in caplog.messages if "diverged" in line]
    assert line.startswith("round 1: small/loss is inf")
    assert logs.read_rows(tmp_path / "metrics.jsonl")[-1]["small/loss"] is None


def test_a_run_that_diverges_says_so_and_keeps_what_was_finite(tmp_path):
  data = {n: jnp.append(a, a[:1], axis=0) for n, a in DATA.items()}
  data["y"] = data["y"].at[-1].set(jnp.inf)  # Nobody's until round 4.
  poisoned = lambda round: plan(round) if round < 4 else plan(round) * 0 + 40
  run_on = lambda **changes: run(
    tmp_path, data=data, checkpoint_every=1, plan_fn=poisoned, **changes
  )
  with pytest.raises(FloatingPointError, match="round 4: small/loss is inf"):
    run_on(stop_on_nonfinite=True)
  assert run_on()["diverged"] == 4
  kept = checkpoint.Checkpoints(tmp_path / "checkpoints")
  assert kept.rounds() == [3, 10, 11, 12]
  (tmp_path / "result.json").unlink()
  assert run_on()["diverged"] == 4


def test_clashing_names_are_an_error(tmp_path):
  for name in ("small/loss", "seconds"):
    with pytest.raises(ValueError, match=rf"one of the step's.*\['{name}'\]"):
      run(tmp_path, evaluate=lambda state, name=name: {name: 0.0})


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def test_handlers_come_back_and_threads_need_none(tmp_path, undisturbed):
  before = [signal.getsignal(s) for s in STOPS]
  thread = threading.Thread(target=run, args=(tmp_path,))
  thread.start()
  thread.join()
  assert outcome(tmp_path) == undisturbed
  run(tmp_path / "main")
  after = [signal.getsignal(s) for s in STOPS]
  assert after == before


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_saves_and_exits(tmp_path, undisturbed, number):
  def signalled_plan(round):
    if round == 4:  # made while round 3 is at work, or just before it is
      os.kill(os.getpid(), number)
    return plan(round)

  with pytest.raises(SystemExit) as e:
    run(tmp_path, plan_fn=signalled_plan, checkpoint_every=100)
  assert e.value.code == 128 + number
  (saved,) = checkpoint.Checkpoints(tmp_path / "checkpoints").rounds()
  assert saved in (3, 4)
  run(tmp_path)
  assert outcome(tmp_path) == undisturbed


def start(workdir, sleep):
  """This file as a program: a run with slow rounds, in a process."""
  return subprocess.Popen(
    [sys.executable, __file__, str(workdir), str(sleep)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ
    | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(PACKAGE.parent)},
  )


def wait_for_checkpoint(process, workdir, round):
  path = workdir / f"checkpoints/{round:06d}"
  deadline = time.monotonic() + 60
  while not path.exists():
    if process.poll() is not None or time.monotonic() > deadline:
      process.kill()
      pytest.fail(f"no {path}: {process.communicate()[1]}")
    time.sleep(0.005)


def test_sigterm_in_a_process(tmp_path, undisturbed):
  process = start(tmp_path, 0.2)
  wait_for_checkpoint(process, tmp_path, 2)
  process.terminate()
  _, errors = process.communicate(timeout=60)
  assert process.returncode == 143, errors
  at_once, line = [line for line in errors.split("\n") if "stop" in line]
  assert "stopping soon; the same command resumes" in at_once
  assert "of 12" in line
  run(tmp_path)
  assert outcome(tmp_path) == undisturbed


def test_a_signal_after_the_last_round_counts(tmp_path, undisturbed):
  def interrupted(state, evaluation):
    os.kill(os.getpid(), signal.SIGTERM)
    return summarize(state, evaluation)

  with pytest.raises(SystemExit) as end:
    run(tmp_path, summarize=interrupted)
  assert end.value.code == 128 + signal.SIGTERM
  assert outcome(tmp_path) == undisturbed  # It is finished all the same.


def test_a_signal_that_comes_twice_at_once_is_one():
  """As when a group of processes gets it, and one of them hands it on."""
  with pytest.raises(SystemExit) as last, training.stop_signals() as caught:
    for _ in range(2):
      os.kill(os.getpid(), signal.SIGTERM)
      time.sleep(0.05)  # For the handler; signals that wait are one anyway.
    assert caught == [signal.SIGTERM]
    with pytest.raises(SystemExit) as end:
      os.kill(os.getpid(), signal.SIGINT)  # Another one stops at once.
      time.sleep(5)
    assert end.value.code == 128 + signal.SIGINT
  assert last.value.code == 128 + signal.SIGTERM  # Though nobody asked for it.


def test_sigkill_at_random_moments(tmp_path, undisturbed):
  rng, done = random.Random(0), 0
  for _ in range(2):
    process = start(tmp_path, 0.05)
    wait_for_checkpoint(process, tmp_path, done + 1)
    time.sleep(rng.uniform(0, 0.15))
    process.kill()
    process.communicate(timeout=60)
    done = checkpoint.Checkpoints(tmp_path / "checkpoints").rounds()[-1]
    assert done < ROUNDS
  run(tmp_path)
  assert outcome(tmp_path) == undisturbed


class Counted(engine.Inline):
  """Notes the shapes of the plans of programs that run."""

  def __init__(self):
    super().__init__()
    self.shapes = []

  def compile(self, fn, donate=()):
    program = super().compile(fn, donate)

    def run(state, plan, data):
      self.shapes.append(plan.shape)
      return program(state, plan, data)

    return run


@pytest.mark.parametrize("size", [2, 5])
def test_rounds_in_one_dispatch(undisturbed, tmp_path, size):
  counted = Counted()
  run(tmp_path, engine=counted, checkpoint_every=100, rounds_per_dispatch=size)
  # Evaluations after rounds 5, 10 and 12 cut the rounds into 5, 5 and 2.
  fives = [(8,), (2, 8), (2, 8)]
  shapes = {2: [*fives, *fives, (2, 8)], 5: [(5, 8), (5, 8), (8,), (8,)]}
  assert counted.shapes == shapes[size]
  result, rows = outcome(tmp_path)
  expected, expected_rows = undisturbed
  for ours, theirs in zip(rows, expected_rows, strict=True):
    assert ours.pop("small/gap") is theirs["small/gap"] is None
    numbers = {k: v for k, v in theirs.items() if v is not None}
    assert ours == pytest.approx(numbers, rel=1e-5)
  assert result["rounds"] == expected["rounds"]


def test_clients_on_the_host_go_on(tmp_path):
  clients = [hetfl.Client(MLP)] * 5
  make = personal(clients, learning_rate=0.1)
  plan_fn = lambda t: hetfl.plan_round(
    {"train": POPULATION}, seed=0, round=t, clients_per_round=2, batch_size=4
  )
  learners = lambda state: [group.learner for group in state.clients]
  outcomes = []
  for name, rounds, folder in (("a", (4,), None), ("b", (2, 4), tmp_path)):
    algorithm = on_host(make, clients)
    for last in rounds:
      run(
        tmp_path / name,
        algorithm,
        rounds=last,
        plan_fn=plan_fn,
        data=mutual_data(),
        evaluate=lambda state: {},
        summarize=lambda state, evaluation: {"pools": {}},
        eval_every=2,
      )
      if folder is not None:  # Another process; the rows are on disk now.
        algorithm = on_host(make, clients, folder=folder)
    state = training.final_state(
      on_host(make, clients),
      jax.random.key(0),
      logs.RunFolder(tmp_path / name, {"rounds": ROUNDS}),
    )
    outcomes.append(jax.tree.leaves(learners(state)))
    assert all(isinstance(a, np.ndarray) for a in outcomes[-1])
  for one, other in zip(*outcomes):
    np.testing.assert_array_equal(one, other)


def test_final_state_wants_a_finished_run(tmp_path):
  folder = logs.RunFolder(tmp_path, {"rounds": ROUNDS})
  with pytest.raises(ValueError, match="of a finished run"):
    training.final_state(Regression(), jax.random.key(0), folder)
  run(tmp_path)
  state = training.final_state(Regression(), jax.random.key(0), folder)
  assert int(state["round"]) == ROUNDS


def test_bytes_that_are_sent_count_statistics():
  module = nn.Sequential([nn.Dense(3), nn.BatchNorm(use_running_average=True)])
  model = core.Model.from_flax(module, jnp.zeros((1, 2)))
  variables = model.shapes()
  # By hand: 2 x 3 weights and 3 biases, 3 scales and 3 shifts; then 3 means and
  # 3 variances, of 4 bytes each.
  assert core.num_parameters(variables.params) == 15
  assert training.num_bytes(variables) == 4 * (15 + 6)


def main(workdir, sleep):
  def slow_plan(round):
    time.sleep(float(sleep))
    return plan(round)

  run(workdir, plan_fn=slow_plan, checkpoint_every=1)


if __name__ == "__main__":
  main(*sys.argv[1:])
