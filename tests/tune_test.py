"""Trials as a batch axis, and the search over them."""

import dataclasses
import json
import os
import re
import signal
import time
import typing

import chex
import codist_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tune_run

import hetfl
from hetfl import core, distill, engine, population
from hetfl import evaluate as evaluate_lib
from hetfl.engine.work import row
from hetfl.run import checkpoint, trials, tune
from tests import federation, runs

ROUNDS = 3


class Round(typing.NamedTuple):
  """The plan of a toy's round."""

  round: np.int32


class Toy:
  """w <- w + rate each round; the objective is w, so all is known by hand."""

  def __init__(self, fail_at=None):
    self.advanced = []
    self.fail_at = fail_at

  def problem(self, rounds=8):
    def step(state, plan, data):
      del data
      # Beyond 1e3 it blows up, after round 2.
      rate = jnp.where(
        (state["rate"] > 1e3) & (plan.round > 2), jnp.inf, state["rate"]
      )
      return state | {"w": state["w"] + rate}, {}

    one = jnp.ones(())
    return trials.Problem(
      init=lambda values, seed: {
        "w": jnp.asarray(0.0) + seed,
        "rate": jnp.asarray(values["rate"], jnp.float32),
        "key": jax.random.key(seed),
      },
      step=step,
      plan=lambda seed, round: Round(np.int32(round)),
      data=(),
      evaluate=lambda state, data: {"model": core.Mean(data * state["w"], one)},
      eval_data={"heldout": one, "test": 10 * one},
      objective=lambda heldout: heldout["model"],
      rounds=rounds,
    )

  def runner(self, kind, seeds=(0,), rounds=8):
    problem = self.problem(rounds)
    if kind == "vmapped":
      runner = trials.Vmapped(problem, seeds)
    elif kind == "devices":
      runner = trials.Vmapped(problem, seeds, devices=jax.devices()[1:4])
    else:
      runner = trials.SideBySide(
        problem._replace(step=jax.jit(problem.step)), seeds, at_once=2
      )
    advance = runner.advance

    def recorded(states, done, last, tick):
      if len(self.advanced) == self.fail_at:
        os.kill(os.getpid(), signal.SIGTERM)
      alive, first = done == done.max(), done.max() + 1
      self.advanced.append((alive.tolist(), first, last))
      counted = []
      result = advance(states, done, last, counted.append)
      tick(sum(counted))
      np.testing.assert_array_equal(result[1][~alive], done[~alive])
      going = (result[1] == last)[alive]
      # A trial that diverges may count for the round in which it did.
      runs = (last - first + 1) * len(seeds)
      assert going.sum() * runs <= sum(counted) <= len(going) * runs
      return result

    runner.advance = recorded
    return problem, runner


def listed(rates):
  """Proposes what is in a list."""

  def propose(rows, first, number):
    assert len(rows) == first
    return [{"rate": r} for r in rates[first : first + number]]

  return propose


RATES = [3.0, 1.0, 4.0, 1e4, 5.0, 9.0, 2.0]
KINDS = ("side", "vmapped", "devices")


def toy_search(folder, kind, *, fail_at=None, seeds=(0,), trials=7):
  toy = Toy(fail_at)
  problem, runner = toy.runner(kind, seeds)
  rows = tune.search(
    problem,
    listed(RATES),
    runner,
    folder=folder,
    trials=trials,
    block=5,
    halvings=2,
    checkpoint_every=3,
  )
  return rows, toy


def timeless(rows):
  return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_are_of_32_bits(kind):
  _, runner = Toy().runner(kind, seeds=(2**32 - 1,))
  key = jax.tree.leaves(
    jax.tree.map(
      lambda a: jax.random.key_data(a) if a.dtype != jnp.float32 else None,
      runner.start([{"rate": 1.0}]),
    )
  )[0]
  np.testing.assert_array_equal(np.ravel(key), [0, 2**32 - 1])


@pytest.mark.parametrize("kind", KINDS)
def test_halving_by_hand(kind, tmp_path):
  rows, toy = toy_search(tmp_path, kind)
  # Block 0 to 4: rungs after rounds 2 and 4 of 8. Trial 3 leads at the first,
  # with 2e4, and diverges in round 3. At the first, 4 and 2 go on beside it.
  assert [r["status"] for r in rows] == [
    "halved",
    "halved",
    "halved",
    "diverged",
    "complete",
    "complete",
    "halved",
  ]
  assert [r["round"] for r in rows] == [2, 2, 4, 2, 8, 8, 2]
  assert [r["objective"] for r in rows] == [6, 2, 16, None, 40, 72, 4]
  tests = [row["test"] for row in rows]
  assert tests == [None] * 4 + [{"model": 400}, {"model": 720}, None]
  assert rows[4]["rungs"] == {"2": 10, "4": 20, "8": 40}
  assert rows[3]["rungs"] == {"2": 20_000}
  assert [r["block_end"] for r in rows] == [5] * 5 + [7] * 2
  # Segments end at rungs (2, 4), checkpoints (3, 6) and the last round.
  assert toy.advanced == [
    ([True] * 5, 1, 2),
    ([True, True, True], 3, 3),
    ([True, False, True], 4, 4),
    ([True], 5, 6),
    ([True], 7, 8),
    ([True, True], 1, 2),
    ([True], 3, 3),
    ([True], 4, 4),
    ([True], 5, 6),
    ([True], 7, 8),
  ]
  assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_an_objective_that_is_not_finite_has_diverged(kind, tmp_path):
  """Weights can be finite whose outputs are not."""
  problem, runner = Toy().runner(kind)
  known = lambda heldout: heldout["model"] if heldout["model"] < 60 else np.nan
  for _ in range(2):  # The second only reads what the first has written.
    rows = tune.search(
      problem._replace(objective=known),
      listed(RATES),
      runner,
      folder=tmp_path,
      trials=7,
      block=5,
    )
  # 2e4 after two rounds is none, nor is 8 x 9 at the end.
  assert [(r["status"], r["objective"]) for r in rows] == [
    ("halved", 6),
    ("halved", 2),
    ("halved", 16),
    ("diverged", None),
    ("complete", 40),
    ("diverged", None),
    ("halved", 4),
  ]
  assert [row["trial"] for row in tune.top(rows, 3)] == [4]


@pytest.mark.parametrize(
  "kind, fail_at",
  [("side", 1), ("side", 5), ("vmapped", 2), ("vmapped", 4), ("vmapped", 7)],
)
def test_a_stopped_search_goes_on_to_the_same_trials(
  kind, fail_at, tmp_path, capfd, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  expected, _ = toy_search("whole", kind, seeds=(0, 5))
  with pytest.raises(SystemExit) as end:
    toy_search("cut", kind, fail_at=fail_at, seeds=(0, 5))
  assert end.value.code == 128 + signal.SIGTERM
  assert (
    "SIGTERM: stopping soon; the same command resumes."
    in capfd.readouterr().err
  )
  rows, toy = toy_search("cut", kind, seeds=(0, 5))
  assert timeless(rows) == timeless(expected)
  assert len(toy.advanced) == 10 - fail_at  # Nothing was done twice.
  assert rows[4]["objective"] == 40 + 2.5  # The mean over the seeds.
  stored = (tmp_path / "cut/trials.jsonl").read_text().splitlines()
  assert [json.loads(line) for line in stored] == rows


def test_a_signal_in_a_checkpoint_waits_for_its_end(tmp_path, monkeypatch):
  expected, _ = toy_search(tmp_path / "whole", "side")
  save = checkpoint.Checkpoints.save

  def interrupted(store, *args):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)  # The handler has run.
    save(store, *args)

  monkeypatch.setattr(checkpoint.Checkpoints, "save", interrupted)
  with pytest.raises(SystemExit) as end:
    toy_search(tmp_path / "cut", "side")
  assert end.value.code == 128 + signal.SIGTERM
  monkeypatch.undo()
  rows, toy = toy_search(tmp_path / "cut", "side")
  assert toy.advanced[0][1] == 3  # Round 2 was saved.
  assert timeless(rows) == timeless(expected)


def test_of_equal_trials_the_earlier_go_on(tmp_path):
  problem, runner = Toy().runner("vmapped")
  rows = tune.search(
    problem,
    listed([2.0, 2.0, 3.0, 2.0, 2.0]),
    runner,
    folder=tmp_path,
    trials=5,
    block=5,
    halvings=1,
  )
  done = [row["trial"] for row in rows if row["status"] == "complete"]
  assert done == [0, 1, 2]
  assert [row["trial"] for row in tune.top(rows, 3)] == [2, 0, 1]
  assert tune.rungs(7, 2) == [2, 4] and tune.rungs(3, 3) == [1, 2]


@pytest.mark.parametrize("kept", [slice(1, 5), slice(0, 4)])
def test_a_search_that_lost_a_trial_is_refused(kept, tmp_path):
  toy_search(tmp_path, "side", trials=5)
  path = tmp_path / "trials.jsonl"
  path.write_text("".join(path.read_text().splitlines(True)[kept]))
  with pytest.raises(ValueError, match="the trials 0 to 4, each once"):
    toy_search(tmp_path, "side", trials=5)


def test_trials_can_be_added(tmp_path):
  few, _ = toy_search(tmp_path, "vmapped", trials=5)
  more, toy = toy_search(tmp_path, "vmapped")
  assert timeless(more[:5]) == timeless(few)
  assert toy.advanced[0] == ([True, True], 1, 2)


def test_on_tpus_trials_take_turns_with_the_same_results(monkeypatch):
  values = [{"rate": rate} for rate in (0.1, 0.2, 0.4)]
  done = np.array([2, 1, 2])

  def trained():
    _, runner = Toy().runner("vmapped", seeds=(0, 1))
    tick = lambda count: None
    return runner.advance(runner.start(values), done, 8, tick)

  (states, kept), loops = trained(), []
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  usual = jax.lax.map
  monkeypatch.setattr(
    jax.lax, "map", lambda *args: loops.append(args) or usual(*args)
  )
  theirs, also_kept = trained()
  assert loops
  np.testing.assert_array_equal(kept, also_kept)
  for one, other in zip(theirs, states, strict=True):  # Of each seed.
    np.testing.assert_allclose(one["w"], other["w"], rtol=1e-6)


def test_a_search_keeps_the_values_that_it_starts_from(tmp_path):
  def search(name, start, rates=(0.0, 1.0, 4.0, 5.0, 2.0), fail_at=None):
    toy = Toy(fail_at)
    problem, runner = toy.runner("side")
    rows = tune.search(
      problem,
      listed(rates),
      runner,
      folder=tmp_path / name,
      trials=5,
      block=4,
      start=start,
    )
    return rows, toy

  # The worst, it goes on to the end, beside 2 and 1 of the other 3.
  rows, toy = search("worst", {"rate": 0.5})
  assert [r["values"]["rate"] for r in rows] == [0.5, 1, 4, 5, 2]
  status = ["complete", "halved", "halved", "complete", "complete"]
  assert [r["status"] for r in rows] == status
  assert [r["round"] for r in rows] == [8, 2, 4, 8, 8]
  assert [r["objective"] for r in rows] == [4, 2, 16, 40, 16]
  assert [r.get("start") for r in rows] == [True] + [None] * 4
  # Those that have ended are left out.
  alive = [number for number, _, _ in toy.advanced]
  assert alive == [[True] * n for n in (4, 3, 2, 1, 1, 1)]
  # The best, it is the search's best.
  best, _ = search("best", {"rate": 6.0})
  assert [row["trial"] for row in tune.top(best, 2)] == [0, 3]
  with pytest.raises(SystemExit):
    search("cut", {"rate": 0.5}, fail_at=1)
  assert timeless(search("cut", {"rate": 0.5})[0]) == timeless(rows)
  # A search that began without goes on without.
  few, _ = toy_search(tmp_path / "old", "side", trials=5)
  more, _ = search("old", {"rate": 0.5})
  assert more == few
  # Joined searches have it once, and no other trial twice.
  other, _ = search("other", {"rate": 0.5}, (0.0, 1.5, 4.5, 5.5, 2.5))
  both = tune.join([tmp_path / "worst", tmp_path / "other"])
  values = [row["values"] for row in (*rows, *other[1:])]
  assert [row["values"] for row in both] == values
  assert [row["trial"] for row in both] == list(range(9))
  assert [row["block_end"] for row in both] == [4] * 4 + [5] + [8] * 3 + [9]
  search("twice", {"rate": 0.25}, (0.0, 1.5, 3.0, 6.0, 7.0))
  with pytest.raises(ValueError, match="two trials have the same values"):
    tune.join([tmp_path / "other", tmp_path / "twice"])


def federated(runner=None):
  """MergedCodist over the tests' federation, as a problem."""
  # Two dense models, which compile quickly.
  pools = federation.make_pools(
    3, server_optimizer=hetfl.optimizers.fedavg_server, server_lr=1.0
  )
  pools = [pools[0], dataclasses.replace(pools[2], name="pool1")]
  algorithm = hetfl.merged_codist(
    pools,
    distill.Distiller(learning_rate=0.02, regularization=0.1),
    alpha=0.5,
    rounds=ROUNDS,
    engine=runner,
  )
  data = federation.make_data()
  subset = population.Subset.whole(data["distill"])
  evaluator = evaluate_lib.Evaluator(
    [pool.model for pool in pools],
    {"heldout": subset, "test": subset},
    transform=lambda batch: batch,
    engine=runner,
  )

  def init(values, seed):
    state = algorithm.init(jax.random.key(seed))
    return hetfl.with_hyper(
      state, learning_rate=values["client_lr"], alpha=values["alpha"]
    )

  def evaluate(state, data):
    sums = evaluator.sums([pool.variables for pool in state.server], data)
    return {str(i): s["heldout_loss"] for i, s in enumerate(sums)}

  return trials.Problem(
    init=init,
    step=algorithm.step,
    plan=lambda seed, round: federation.make_plan(round + 100 * seed)._replace(
      round=np.int32(round)
    ),
    data=data,
    evaluate=evaluate,
    eval_data={"heldout": evaluator.data("heldout")},
    objective=lambda heldout: -heldout["0"] - heldout["1"],
    rounds=ROUNDS,
  )


SPACE = {
  "client_lr": trials.Dimension(0.01, 0.5, log=True),
  "alpha": trials.Dimension(0.05, 0.95),
}
PROPOSED = tune.random_search(SPACE, seed=0)([], 0, 5)
PROPOSED[2] = PROPOSED[2] | {"client_lr": 1e30}


DONE = np.array([0, 0, 0, 0, -1])  # The last has diverged.


@pytest.fixture(scope="module")
def ends():
  """Each runner's states after all rounds, and up to where they were finite."""
  results = {}
  devices = jax.devices()[1:3]  # Do not share five trials equally.
  for name, make in (
    ("side", lambda p: trials.SideBySide(p, (0, 1), at_once=3)),
    ("vmapped", lambda p: trials.Vmapped(p, (0, 1), devices=devices)),
  ):
    problem = federated(engine.Threads(2) if name == "side" else None)
    runner = make(problem)
    states, ended = runner.advance(runner.start(PROPOSED), DONE, ROUNDS)
    results[name] = (runner, states, ended, runner.evaluate(states))
  return results


def test_a_block_is_as_good_as_runs_of_their_own(ends):
  _, states, ended, losses = ends["vmapped"]
  params = states[0].server[0].params
  assert jax.tree.leaves(params)[0].devices() == set(jax.devices()[1:3])
  _, expected, expected_ended, expected_losses = ends["side"]
  np.testing.assert_array_equal(ended, expected_ended)
  assert ended[2] < 2 and ended[4] == -1 and set(ended[[0, 1, 3]]) == {ROUNDS}
  for trial in range(5):
    for seed in range(2):
      ours = row([p.params for p in states[seed].server], trial)
      theirs = [p.params for p in expected[trial][seed].server]
      chex.assert_trees_all_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert losses[trial] == pytest.approx(expected_losses[trial], rel=1e-3)
  assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def test_a_diverged_trial_touches_no_other(ends):
  runner, states, _, _ = ends["vmapped"]
  start = runner.start(PROPOSED)
  # Masked from the start, and diverged: as it was, bit for bit, and finite.
  for before, after in zip(start, states):
    chex.assert_trees_all_equal(row(before, 4), row(after, 4))
    assert all(core.all_finite(row(after, i)) for i in (2, 4))
  calm = [
    v | {"client_lr": 0.1} if i == 2 else v for i, v in enumerate(PROPOSED)
  ]
  others, ended = runner.advance(runner.start(calm), DONE, ROUNDS)
  assert (ended[:4] == ROUNDS).all()
  for a, b in zip(states, others):
    for i in (0, 1, 3):
      chex.assert_trees_all_equal(row(a, i), row(b, i))
      assert core.all_finite(row(a, i))


def test_ranges():
  share = np.random.default_rng(0).random(2000)
  values = [SPACE["client_lr"].at(s) for s in share]
  assert 0.01 <= min(values) < 0.0105 and 0.48 < max(values) <= 0.5
  assert np.median(values) == pytest.approx((0.01 * 0.5) ** 0.5, rel=0.1)
  for text in (
    "log:0:1",
    "linear:2:1",
    "cubic:0:1",
    "log:1",
    "log:a:b",
    "log:",
  ):
    with pytest.raises(ValueError, match=re.escape(repr(text))):
      trials.Dimension.parse(text)


def test_optuna_learns_from_trials_that_may_lie_outside_the_ranges():
  pytest.importorskip("optuna")
  space = {"rate": trials.Dimension(1.0, 100.0, log=True)}

  def row_of(trial, values):
    rate = values["rate"]
    status = "halved" if trial % 2 else "complete"
    row = dict(trial=trial, values=values, status=status, objective=1 / rate)
    if rate > 50:
      row |= dict(status="diverged", objective=None)
    return row | dict(rungs={"2": 0.5 / rate})

  def searched():
    propose = tune.optuna_search(space, 0)
    rows = [row_of(0, {"rate": 200.0})]  # A start.
    while len(rows) < 40:
      first = len(rows)
      each = propose(rows, first, 8)
      rows += [row_of(first + i, values) for i, values in enumerate(each)]
    return [row["values"]["rate"] for row in rows[1:]]

  rates = searched()
  assert searched() == rates
  assert len(set(rates)) == 40 and all(1 <= rate <= 100 for rate in rates)
  # The best is at 1; random search's median is at 10.
  assert np.median(rates[-16:]) < 4


_FILE = runs.ROOT / "tests/small_models.py"
QUICK = ("--algorithm=fedavg", "--rounds=4", "--eval_every=4")
QUICK += (f"--models={_FILE}:small,{_FILE}:large",)


@pytest.mark.slow
def test_the_best_flags_repeat_the_best_trial(experiment, tmp_path):
  tune = experiment("tune")
  search = ("--experiment=codist", "--trials=4", "--block=2", "--halvings=1")
  # FedProx's weight too, which is switched off by default.
  space = "--space=client_lr=log:1e-2:0.3,server_lr.large=fixed"
  space += ",prox_mu=log:1e-3:1"
  runs = ("--seeds=3,5", *QUICK)
  done = tune(*search, space, f"--workdir={tmp_path}/tune", "--", *runs)
  lines = (tmp_path / "tune/trials.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert [set(row["values"]) for row in rows] == [
    {"client_lr", "server_lr.small", "prox_mu"}
  ] * 4
  # The first has the flags' own values.
  assert rows[0]["start"] and rows[0]["status"] == "complete"
  own = {"client_lr": 0.05, "server_lr.small": 0.01, "prox_mu": 0}
  assert rows[0]["values"] == own
  shown = f"objective {100 * rows[0]['objective']:.2f} %"
  assert f"Trial 0 has the flags' own values: {shown}" in done.stdout
  best = max(
    (r for r in rows if r["status"] == "complete"), key=lambda r: r["objective"]
  )
  assert best["objective"] == pytest.approx(
    (best["heldout"]["small"] + best["heldout"]["large"]) / 2
  )
  assert re.search(rf"^ +{best['trial']} ", done.stdout, re.MULTILINE)
  assert (tmp_path / "tune/parallel.png").exists()
  # Of a flag that is searched for one model, the other's value counts.
  other = ("--server_lr=0.01,0.02", *runs)
  line = tune.fails(*search, space, f"--workdir={tmp_path}/tune", "--", *other)
  assert "server_lr: there [0.01, 0.01]" in line
  experiment("codist")(
    f"--flagfile={tmp_path}/tune/best.flags",
    f"--workdir={tmp_path}/best",
    "--notensorboard",
  )
  summary = json.loads((tmp_path / "best/summary.json").read_text())
  assert summary["seeds"] == [3, 5]
  (means,) = summary["algorithms"].values()
  for which in ("heldout", "test"):
    for model, accuracy in best[which].items():
      entry = means[f"pools.{model}.{which}_accuracy"]
      assert entry["mean"] == pytest.approx(accuracy)
  summary = json.loads((tmp_path / "tune/result.json").read_text())
  complete = [row for row in rows if row["status"] == "complete"]
  assert summary["complete"] == summary["top"] == len(complete)
  assert summary["test"]["small"] == pytest.approx(
    sum(row["test"]["small"] for row in complete) / len(complete)
  )
  # What FedAvg makes nothing of is not in its flags.
  flags = (tmp_path / "tune/best.flags").read_text()
  assert "--server_lr" in flags and "distill_lr" not in flags
  assert summary["best"]["trial"] == best["trial"]
  assert summary["best"]["heldout"] == best["heldout"]
  # Another search of the same, and both as one.
  other = (space, "--seed=9", f"--workdir={tmp_path}/other")
  tune(*search[:1], "--trials=2", *search[2:], *other, "--", *runs)
  join = (space, f"--join={tmp_path}/other,{tmp_path}/tune")
  tune(*search, *join, f"--workdir={tmp_path}/both", "--", *runs)
  # There is no flag of that name.
  assert "joined" not in (tmp_path / "both/config.flags").read_text()
  both = (tmp_path / "both/trials.jsonl").read_text().splitlines()
  both = [json.loads(line) for line in both]
  assert both[0]["values"] == own
  values = [row["values"] for row in rows[1:]]
  assert [row["values"] for row in both[2:]] == values
  assert [row["trial"] for row in both] == list(range(5))
  summary = json.loads((tmp_path / "both/result.json").read_text())
  assert summary["best"]["objective"] >= best["objective"]
  assert summary["trials"] == 5 and summary["start"]["values"] == own
  elsewhere = ("--client_lr=0.3", f"--workdir={tmp_path}/tune", "--", *runs)
  line = tune.fails(*search, space, *elsewhere)
  assert "holds another run: client_lr: there 0.05, here 0.3" in line
  line = tune.fails(*search, *join, f"--workdir={tmp_path}/tune", "--", *runs)
  assert "holds another run: joined: there unset, here true" in line
  assert (tmp_path / "tune/trials.jsonl").read_text().splitlines() == lines
  line = tune.fails(*search, *join, f"--workdir={tmp_path}/no", "--", *QUICK)
  assert "other: belongs to a different search: seeds: there" in line


@pytest.mark.slow
def test_a_search_for_fml(experiment, tmp_path):
  tune = experiment("tune")
  run = ("--algorithm=fml", "--rounds=2", "--heldout_examples=100")
  run += ("--client_models=mlp", "--global_model=mlp", "--local_epochs=1")
  run += ("--noaugment",)
  search = ("--experiment=fml", "--trials=2", "--block=2", "--halvings=0")
  tune(*search, f"--workdir={tmp_path}/tune", "--", *run)
  lines = (tmp_path / "tune/trials.jsonl").read_text().splitlines()
  best = max(map(json.loads, lines), key=lambda row: row["objective"])
  start = json.loads(lines[0])
  own = {"learning_rate": 0.01, "alpha": 0.5, "beta": 0.5}
  assert start["start"] and start["values"] == own
  assert set(best["values"]) == {"learning_rate", "alpha", "beta"}
  experiment("fml")(
    f"--flagfile={tmp_path}/tune/best.flags",
    f"--workdir={tmp_path}/best",
    "--notensorboard",
  )
  result = json.loads((tmp_path / "best/result.json").read_text())
  clients = [c["heldout_accuracy"] for c in result["clients"]]
  assert best["heldout"] == pytest.approx(
    {
      "global": result["global"]["heldout_accuracy"],
      "clients": sum(clients) / 5,
    }
  )
  clients = [c["validation_accuracy"] for c in result["clients"]]
  assert best["test"] == pytest.approx(
    {
      "global": result["global"]["test_accuracy"],
      "clients": sum(clients) / 5,
    }
  )
  # 1,437 images: 20 of each client are held out.
  assert sum(c["examples"] for c in result["clients"]) == 1337
  (tmp_path / "schedule.flags").write_text("--alpha=1,0")
  schedule = f"--flagfile={tmp_path}/schedule.flags"
  for flags, message in (
    (("--heldout_examples=0",), "--heldout_examples=0: a search chooses"),
    (("--heldout_examples=7",), "give 0 or a multiple of the 5 clients"),
    ((schedule,), "--alpha cannot be searched"),
    (("--space=beta=linear:0:2",), "--space, beta: --beta=2.0: 2.0 must lie"),
    (("--stop_on_nonfinite",), "--stop_on_nonfinite=true: not for"),
    (("--seeds=0,0",), "--seeds=0,0: name each once"),
  ):
    bad = (f"--workdir={tmp_path}/bad", "--", *run, *flags)
    assert message in tune.fails(*search, *bad)
    assert not (tmp_path / "bad").exists()


def trial_of(algorithm, **given):
  """The settings of a trial of codist, and a function `space`."""
  given["algorithm"] = (algorithm,)
  s = codist_run.Codist.resolve(given, codist_run.words(given, algorithm))

  def space(*items):
    search = tune_run.Search.resolve({"space": items}, ())
    return tune_run.make_space(search, codist_run.Codist, s.words)

  return s, space


def test_spaces():
  # Appendix F: one client rate, all else for each model; alpha for merged.
  sizes = {a: len(trial_of(a)[1]()) for a in ("fedavg", "periodic", "merged")}
  assert sizes == {"fedavg": 3, "periodic": 11, "merged": 12}
  s, space = trial_of("fedavg")
  rate = trials.Dimension(1e-4, 0.1, log=True)
  assert space() == dict.fromkeys(
    ["client_lr", "server_lr.small", "server_lr.large"], rate
  )
  new = trials.Dimension(1.0, 2.0)
  for item, expected in (
    ("server_lr=linear:1:2", {"server_lr.small": new, "server_lr.large": new}),
    ("server_lr.large=linear:1:2", {"server_lr.large": new}),
    ("client_lr.small=linear:1:2", {"client_lr.small": new}),
    ("prox_mu=linear:1:2", {"prox_mu": new}),
  ):
    assert {n: d for n, d in space(item).items() if d == new} == expected
  # The other model keeps a dimension of its own.
  assert space("client_lr.small=linear:1:2")["client_lr.large"] == rate
  assert set(space("server_lr=fixed", "client_lr=linear:1:2")) == {"client_lr"}
  for item, message in (
    ("client_lr=log:0:1", "above 0 on a log scale"),
    ("prox_mu", "--space, prox_mu: '': give log:LOW:HIGH"),
    ("color=log:1:2", "is not a flag of codist"),
    ("rounds=log:1:2", "is not a flag of codist with numbers"),
    ("client_lr.huge=log:1:2", "small or large"),
    ("client_lr=fixed,server_lr=fixed", "every value is fixed"),
    ("client_lr=linear:0:1", "--client_lr=0.0: 0.0 must be at least 1e-06"),
  ):
    with pytest.raises(ValueError, match=message):
      space(*item.split(","))
  # One that is not given has no value to start from.
  assert tune_run.flag_values(s, {"clip_norm.large": 2.0}) == {
    "clip_norm": [None, 2.0]
  }
  whole = lambda *items: tune_run.whole(space(*items), type(s))
  assert whole() == {"client_lr", "server_lr"}
  assert whole("server_lr.small=fixed") == {"client_lr"}


def test_a_search_starts_from_the_flags_own_values(caplog):
  s, space = trial_of("fedavg", server_lr=(0.3, 0.4), client_lr=0.1)
  ranges = space("prox_mu=log:1:2", "server_lr.small=fixed")
  start = tune_run.start_values(s, ranges)
  assert start == {"client_lr": 0.1, "server_lr.large": 0.4, "prox_mu": 0}
  # The search has one value for both models, and the flag two.
  s, _ = trial_of("fedavg", client_lr=(0.1, 0.2))
  assert tune_run.start_values(s, space()) is None
  assert "--client_lr=0.1,0.2 is not one value" in caplog.text
  assert "a range for each model" in caplog.text


def test_values_become_flags_and_states():
  s, _ = trial_of("merged", client_lr=0.1, server_lr=(0.3, 0.4))
  values = {"client_lr": 0.2, "server_lr.large": 0.5, "merge_alpha": 0.25}
  assert tune_run.flag_values(s, values) == {
    "client_lr": 0.2,
    "server_lr": [0.3, 0.5],
    "merge_alpha": 0.25,
  }
  state = hetfl.merged_codist(
    federation.make_pools(),
    distill.Distiller(),
    alpha=0.5,
    rounds=1,
  ).init(jax.random.key(0))
  placed = tune_run.place(state, s, values)
  rates = [placed.hyper[name] for name in ("learning_rate", "server_lr")]
  np.testing.assert_allclose(rates, [(0.2, 0.2), (0.3, 0.5)], rtol=1e-6)
  assert placed.hyper["alpha"] == 0.25
  for flag in ("prox_mu", "rounds"):
    with pytest.raises(ValueError, match=f"--{flag} cannot be searched"):
      tune_run.place(state, s, {flag: 0.1})
