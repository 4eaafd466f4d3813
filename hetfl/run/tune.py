"""Hyper-parameter search: many trials of one experiment at a time.

A *block* of trials trains side by side on the same plans (`trials.py`), and
successive halving drops the worse half of it at each rung. Blocks run one
after another. The values that a block tries are a pure function of the seed
and the rows of earlier blocks, and its state is in its checkpoints, so a
search that was killed resumes with the same trials.

Reference: Lichtarge et al. 2023, appendix F; Jamieson & Talwalkar 2016
(successive halving). The paper's values are proposed by Vizier's default
algorithm; here by random search or Optuna's TPE.
"""

from collections.abc import Callable, Sequence
import json
import os
import pathlib
import shutil
from statistics import fmean
import time
from typing import Any

from absl import logging
import numpy as np

from hetfl import checks
from hetfl.run import checkpoint, logs, report, training
from hetfl.run.trials import Problem, Runner, Space, Values

# The results of a trial; see `search`.
Row = dict[str, Any]
# (the rows of all earlier trials in order, the number of the next trial, how
# many) -> the values of these trials; the same for the same arguments
Proposer = Callable[[Sequence[Row], int, int], list[Values]]


def random_search(space: Space, seed: int) -> Proposer:
  """Seeded random search: trial i's values depend on the seed and i alone.

  Args:
    space: what to vary.
    seed: the search's seed.

  Returns:
    The proposer.

  >>> from hetfl.run.trials import Dimension
  >>> propose = random_search({'lr': Dimension(0.01, 1., log=True)}, seed=0)
  >>> propose([], 0, 2) == propose([], 0, 1) + propose([], 1, 1)
  True
  """

  def propose(rows, first, number):
    del rows
    rngs = [np.random.default_rng([seed, first + i]) for i in range(number)]
    shares = [dict(zip(sorted(space), r.random(len(space)))) for r in rngs]
    return [{n: space[n].at(x) for n, x in of.items()} for of in shares]

  return propose


def optuna_search(space: Space, seed: int) -> Proposer:
  """Optuna's TPE sampler; a diverged trial counts as an objective of 0.

  Each block is drawn by a new sampler that has seen all earlier blocks.

  Args:
    space: what to vary.
    seed: the search's seed.

  Returns:
    The proposer.

  Raises:
    ImportError: Optuna is not installed.
  """
  try:
    import optuna
  except ImportError as error:
    raise ImportError(
      "Optuna is not installed: pip install -e '.[tune]', or propose by random"
      " search (proposer=random)"
    ) from error
  optuna.logging.set_verbosity(optuna.logging.WARNING)
  distributions: dict[str, Any] = {
    name: optuna.distributions.FloatDistribution(d.low, d.high, log=d.log)
    for name, d in sorted(space.items())
  }
  states = optuna.trial.TrialState
  rounded = lambda of: {n: space[n].rounded(of[n]) for n in distributions}

  def trial(row):
    return optuna.create_trial(
      # A search's start may lie outside the ranges, which Optuna refuses.
      params=rounded(row["values"]),
      distributions=distributions,
      state=states.PRUNED if row["status"] == "halved" else states.COMPLETE,
      value=row["objective"] or 0.0,
      intermediate_values={int(t): v for t, v in row["rungs"].items()},
    )

  def propose(rows, first, number):
    sampler = optuna.samplers.TPESampler(
      seed=int(np.random.default_rng([seed, first]).integers(2**31)),
      n_startup_trials=max(10, 2 * len(space)),
      constant_liar=True,  # A block is proposed before it has any results.
    )
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.add_trials(map(trial, rows))
    return [rounded(study.ask(distributions).params) for _ in range(number)]

  return propose


def rungs(rounds: int, halvings: int) -> list[int]:
  """The rounds after which the worse half of a block is dropped.

  `ceil(T / 2^h)` for h from `halvings` to 1, with T rounds in all: each rung is
  at twice the rounds of the one before.

  Args:
    rounds: T.
    halvings: how many rungs.

  Returns:
    The rounds, in order; fewer than `halvings` if T is too small.

  >>> rungs(100, 2)
  [25, 50]
  """
  every = {-(-rounds // 2**h) for h in range(1, halvings + 1)}
  return sorted(every - {rounds})


def search(
  problem: Problem,
  propose: Proposer,
  runner: Runner,
  *,
  folder: str | os.PathLike[str],
  trials: int,
  block: int,
  halvings: int = 2,
  checkpoint_every: int = 50,
  start: Values | None = None,
) -> list[Row]:
  """Runs a search, or resumes it.

  A progress bar shows the block's rounds on a terminal; a log line reports each
  rung. On SIGINT, SIGTERM or SIGUSR1 the process ends after the next round with
  status 128 + signal; the next call resumes the block from its last checkpoint.

  Args:
    problem: the experiment.
    propose: proposes the values to try.
    runner: trains the trials.
    folder: holds `trials.jsonl` and the checkpoints of the current block.
    trials: how many trials in all.
    block: how many of them train side by side.
    halvings: how often the worse half of a block is dropped.
    checkpoint_every: rounds from one checkpoint of a block to the next.
    start: known values, which trial 0 then has in place of proposed ones. It is
      not halved, so the best trial is never worse, unless it diverges.

  Returns:
    A row for each trial: `trial`, `block_end`, `values`, `status` (`complete`,
    `halved` or `diverged`), `round` (the last one done), `objective` and
    `heldout` after it (None if diverged), `test` (of complete trials, if the
    problem has test data), `rungs` (round -> objective), `seconds` of the
    block, and `start`, true, if it has the values of `start`. Apart from
    `seconds`, a search that was killed and resumed gives the same rows.

  Raises:
    SystemExit: after a signal.
    ValueError: a number is out of its range, or a line of `trials.jsonl` is
      lost.
  """
  checks.counts(trials=trials, block=block, checkpoint_every=checkpoint_every)
  folder = logs.make_folder(folder, "folder").absolute()
  rows = logs.read_rows(folder / "trials.jsonl")
  done = rows[-1]["block_end"] if rows else 0
  if [row["trial"] for row in rows] != [*range(done)]:
    raise ValueError(
      f"{folder}: trials.jsonl does not have the trials 0 to {done - 1}, each"
      " once; put it back, or use another folder"
    )
  with training.stop_signals() as caught:
    while len(rows) < trials:
      first = len(rows)
      values = propose(rows, first, min(block, trials - first))
      work = _Block(problem, runner, folder / "checkpoints", first, values)
      if start is not None and not first:
        work.rows[0] |= {"values": start, "start": True}
      work.run(rungs(problem.rounds, halvings), checkpoint_every, caught)
      rows += logs.to_json(work.rows)  # As they will be read back.
      logs.write_rows(folder / "trials.jsonl", rows)
      shutil.rmtree(folder / "checkpoints", ignore_errors=True)
      logging.info(f"{len(rows)} of {trials} trials: {_standing(rows)}.")
  return rows


def join(searches: Sequence[str | os.PathLike[str]]) -> list[Row]:
  """Reads the trials of several searches as those of one.

  Of searches that started from the same values, only the first one's trial of
  these is read.

  Args:
    searches: their folders.

  Returns:
    All rows, with `trial` and `block_end` numbered through all searches.

  Raises:
    ValueError: two trials have the same values.
  """
  rows: list[Row] = []
  for search in searches:
    found = logs.read_rows(pathlib.Path(search) / "trials.jsonl")
    starts = [row["values"] for row in rows if row.get("start")]
    if found and found[0].get("start") and found[0]["values"] in starts:
      del found[0]
    move = len(rows) - found[0]["trial"] if found else 0
    for row in found:
      moved = {name: move + row[name] for name in ("trial", "block_end")}
      rows.append(row | moved)
  values = [json.dumps(row["values"], sort_keys=True) for row in rows]
  if len(set(values)) < len(values):
    raise ValueError(
      "two trials have the same values: give each search its own seed"
    )
  return rows


def _standing(rows: Sequence[Row]) -> str:
  status = [row["status"] for row in rows]
  counts = [f"{status.count(name)} {name}" for name in ("halved", "diverged")]
  best = [f"best {r['trial']}, {r['objective']:.4f}" for r in top(rows, 1)]
  return ", ".join([*counts, *best])


def _rank(row: Row) -> tuple[float, int]:
  """The order of trials, the best first; of equal ones the earlier."""
  return -row["objective"], row["trial"]


class _Block:
  """Trains some trials from their first round to their last.

  Attributes:
    rows: the trials' rows.
  """

  def __init__(self, problem, runner, folder, first, values):
    self._problem, self._runner, self._folder = problem, runner, folder
    last = first + len(values) - 1
    self._name, self._first = f"Trials {first} to {last}", first
    self.rows: list[Row] = [
      {"trial": first + i, "block_end": last + 1, "values": of_trial}
      | {"status": "complete", "round": 0, "objective": None}
      | {"heldout": None, "test": None, "rungs": {}}
      for i, of_trial in enumerate(values)
    ]
    self._members = list(range(len(values)))  # whose states are kept
    self._before = 0.0  # seconds before the last checkpoint

  def run(
    self, rungs: Sequence[int], checkpoint_every: int, caught: Sequence[int]
  ) -> None:
    """Trains the trials, from their last checkpoint if there is one."""
    rounds, started = self._problem.rounds, time.monotonic()
    saved, states = self._restore()
    seconds = lambda: self._before + time.monotonic() - started
    ends = {*rungs, *range(checkpoint_every, rounds, checkpoint_every), rounds}
    for end in sorted(end for end in ends if end > saved):
      rows = [self.rows[i] for i in self._members]
      alive = sum(row["status"] == "complete" for row in rows)
      if not alive:
        break
      with logs.bar(
        alive * len(self._runner.seeds) * (end - saved),
        desc=f"{self._name}, rounds {saved + 1} to {end}",
        leave=False,
      ) as bar:

        def tick(runs, bar=bar):
          bar.update(runs)
          if caught:
            raise SystemExit(128 + caught[0])

        done = np.array([row["round"] for row in rows])
        states, done = self._runner.advance(states, done, end, tick)
      for row, round in zip(rows, done.tolist()):
        row["round"] = round
        if round < end:
          row |= dict(status="diverged", objective=None, heldout=None)
      if end in rungs or end == rounds:
        states = self._judge(states, rows, end)
        logging.info(
          f"{self._name}: round {end} of {rounds}, {seconds():.1f} s;"
          f" {_standing(self.rows)}."
        )
      if end != rounds:
        extra = {"rows": self.rows, "members": self._members}
        extra = logs.to_json(extra | {"seconds": seconds()})
        self._checkpoints(len(self._members)).save(end, states, extra)
        saved = end
    for row in self.rows:
      row["seconds"] = seconds()

  def _judge(self, states, rows, round):
    """Evaluates the trials, and drops the worse half; at the end tests them.

    Returns the states of those that go on.
    """
    results = self._runner.evaluate(states)
    alive = [j for j, row in enumerate(rows) if row["status"] == "complete"]
    for j in alive:
      objective = self._problem.objective(results[j])
      if not np.isfinite(objective):  # Though the weights are.
        rows[j] |= dict(status="diverged", objective=None, heldout=None)
        continue
      rows[j] |= dict(objective=objective, heldout=results[j])
      rows[j]["rungs"] |= {str(round): objective}
    alive = [j for j in alive if rows[j]["status"] == "complete"]
    if round == self._problem.rounds:
      if "test" in self._problem.eval_data:
        tests = self._runner.evaluate(states, "test")
        for j in alive:
          rows[j]["test"] = tests[j]
      return states
    # The start goes on, and the others are halved among themselves.
    others = [rows[j] for j in alive if not rows[j].get("start")]
    for row in sorted(others, key=_rank)[-(-len(others) // 2) :]:
      row["status"] = "halved"
    alive = [j for j in alive if rows[j]["status"] == "complete"]
    self._members = [self._members[j] for j in alive] or self._members
    return self._runner.take(states, alive) if alive else states

  def _checkpoints(self, number):
    """The checkpoints of this many members; with fewer, they are newer."""
    name = f"trial{self._first:06d}-of{number:06d}"
    return checkpoint.Checkpoints(self._folder / name, keep=1)

  def _restore(self):
    """The newest checkpoint's round and states, or 0 and the first states."""
    values = [row["values"] for row in self.rows]
    start = self._runner.start(values)
    for number in range(1, len(values) + 1):
      store = self._checkpoints(number)
      if not store.rounds():
        continue
      found = store.latest(self._runner.take(start, range(number)))
      # Otherwise of another block, such as one of other --trials.
      if found and [row["values"] for row in found[2]["rows"]] == values:
        round, states, extra = found
        self.rows, self._members = extra["rows"], extra["members"]
        self._before = extra["seconds"]
        logging.info("%s: resuming after round %d.", self._name, round)
        return round, states
    return 0, start


def top(rows: Sequence[Row], k: int) -> list[Row]:
  """The k best trials that were trained to the end.

  >>> rows = [dict(trial=i, status=s, objective=o) for i, (s, o) in enumerate(
  ...     [('complete', .5), ('halved', .9), ('complete', .7)])]
  >>> [row['trial'] for row in top(rows, 2)]
  [2, 0]
  """
  complete = [row for row in rows if row["status"] == "complete"]
  return sorted(complete, key=_rank)[:k]


def summary(rows: Sequence[Row], k: int) -> dict[str, Any]:
  """The mean accuracies of the k best trials.

  Args:
    rows: the search's rows, at least one of them complete.
    k: how many trials to average, at most.

  Returns:
    `trials` and `complete`, how many there are; `top`, how many the means are
    over; `heldout` and, if it was measured, `test`, the mean accuracies.

  Reference: Lichtarge et al. 2023, Figure 4: "the averaged test accuracy of the
  25 tuning runs with the best performance on the held-out set".

  >>> rows = [dict(trial=i, status='complete', objective=o, heldout={'m': o},
  ...              test={'m': t})
  ...         for i, (o, t) in enumerate([(.5, .75), (.25, 1.), (1., .25)])]
  >>> summary(rows, 2)
  {'trials': 3, 'complete': 3, 'top': 2, 'heldout': {'m': 0.75}, \
'test': {'m': 0.5}}
  """
  complete = top(rows, len(rows))
  best = complete[:k]
  means = {
    which: {n: fmean(r[which][n] for r in best) for n in best[0][which]}
    for which in ("heldout", "test")
    if all(row.get(which) for row in best)
  }
  counts = {"trials": len(rows), "complete": len(complete), "top": len(best)}
  return counts | means


def table(rows: Sequence[Row], space: Space, k: int = 10) -> str:
  """Formats the k best trials, one line each.

  Args:
    rows: the search's rows, at least one of them complete.
    space: what was varied.
    k: how many.

  Returns:
    The table: accuracies on held-out data in percent, and the values.

  >>> from hetfl.run.trials import Dimension
  >>> row = dict(trial=3, status='complete', objective=.75,
  ...            heldout={'small': .5, 'large': 1.}, values={'lr': .01})
  >>> print(table([row], {'lr': Dimension(0., 1.)}))
  trial  objective %  small %  large %    lr
  -----  -----------  -------  -------  ----
      3        75.00    50.00   100.00  0.01
  """
  lines = []
  for row in top(rows, k):
    scores = {"objective": row["objective"], **row["heldout"]}
    line = {"trial": str(row["trial"])}
    line |= {f"{name} %": f"{100 * x:.2f}" for name, x in scores.items()}
    lines.append(line | {name: f"{row['values'][name]:.4g}" for name in space})
  columns = [[name, *(line[name] for line in lines)] for name in lines[0]]
  return report.align(columns, names=0)
