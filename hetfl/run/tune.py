"""Hyper-parameter search: many trials of one experiment at a time.

A *block* of trials trains side by side on the same plans (`trials.py`), and
successive halving drops the worse half of it at each rung. Blocks run one
after another. The values that a block tries are a pure function of the seed
and the rows of earlier blocks, and its state is in its checkpoints, so a
search that was killed resumes with the same trials.

Reference: Lichtarge et al. 2023, appendix F; Jamieson & Talwalkar 2016
(successive halving).
"""

from collections.abc import Iterator, Sequence
import contextlib
import json
import os
import pathlib
import shutil
import signal
import time
from typing import Any

from absl import logging
import numpy as np

from hetfl import checks
from hetfl.run import checkpoint, logs, proposers, report, training
from hetfl.run import trials as trials_lib
from hetfl.run.proposers import Row


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


def _read_trials(path: pathlib.Path) -> list[Row]:
  """Reads `trials.jsonl`; cuts off a block that was only partly written."""
  rows = logs.read_rows(path)
  # A row says where its block ends.
  while rows and rows[-1]["trial"] != rows[-1]["block_end"] - 1:
    rows.pop()
  logs.write_rows(path, rows)
  return rows


def search(
  problem: trials_lib.Problem,
  proposer: proposers.Proposer,
  runner: trials_lib.Runner,
  *,
  folder: str | os.PathLike[str],
  trials: int,
  block: int,
  halvings: int = 2,
  checkpoint_every: int = 50,
  start: trials_lib.Values | None = None,
) -> list[Row]:
  """Runs a search, or resumes it.

  A progress bar shows the block's rounds on a terminal; a log line reports each
  rung. SIGINT, SIGTERM and SIGUSR1 end the process with status 128 + signal;
  the next call resumes the block from its last checkpoint.

  Args:
    problem: the experiment.
    proposer: proposes the values to try.
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
    ValueError: a number is out of its range.
  """
  checks.counts(trials=trials, block=block, checkpoint_every=checkpoint_every)
  if halvings < 0:
    raise ValueError(f"halvings={halvings}: must be at least 0")
  folder = pathlib.Path(folder).absolute()
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / "trials.jsonl"
  rows = _read_trials(path)
  if rows and len(rows) < trials and len(rows) % block:
    logging.warning(
      "The %d earlier trials are not a multiple of block=%d, so the last"
      " of them were halved in a smaller block than with trials=%d from the"
      " start.",
      len(rows),
      block,
      trials,
    )
  while len(rows) < trials:
    first = len(rows)
    values = proposer.propose(rows, first, min(block, trials - first))
    work = _Block(problem, runner, folder / "checkpoints", first, values)
    if start is not None and first == 0:
      work.begin_with(start)
    with _ended_by_signals(work):
      done = work.run(rungs(problem.rounds, halvings), checkpoint_every)
      logs.write_rows(path, done, append=True)
      work.clean()
    rows += logs.to_json(done)  # As they will be read back.
    _say(rows, first, trials)
  if hasattr(proposer, "record"):
    proposer.record(rows)
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


class _Signal(BaseException):
  """Carries a signal out of whatever the main thread is doing."""


@contextlib.contextmanager
def _ended_by_signals(work: "_Block") -> Iterator[None]:
  """Ends the process on a stop signal; logs where the search will resume."""

  def handler(number):
    raise _Signal(number)

  with training.on_signals(handler):
    try:
      yield
    except _Signal as caught:
      (number,) = caught.args
      logging.warning(
        "%s: %s; run the same command to resume after round %d.",
        work.name,
        signal.Signals(number).name,
        work.saved,
      )
      raise SystemExit(128 + number) from None


def _say(rows, first, trials):
  done = rows[first:]
  logging.info(
    "%d of %d trials; of the last %d, %d complete, %d halved, %d diverged,"
    " in %.1f s; best %s.",
    len(rows),
    trials,
    len(done),
    *_counts(done),
    done[-1]["seconds"],
    _best(rows),
  )


def _counts(rows):
  """The numbers of complete (or running), halved and diverged trials."""
  status = [row["status"] for row in rows]
  return [status.count(s) for s in ("complete", "halved", "diverged")]


def _best(rows):
  best = top(rows, 1)
  return (
    f"trial {best[0]['trial']}, {best[0]['objective']:.4f}" if best else "none"
  )


class _Block:
  """Trains some trials from their first round to their last.

  Attributes:
    name: which trials.
    saved: the round of its last checkpoint.
  """

  def __init__(self, problem, runner, folder, first, values):
    self.name = f"Trials {first} to {first + len(values) - 1}"
    self.saved = 0
    self._problem = problem
    self._runner = runner
    self._folder = folder
    self._first = first
    self._values = values
    self._rows = [
      {
        "trial": first + i,
        "block_end": first + len(values),
        "values": v,
        "status": "complete",
        "round": 0,
        "objective": None,
        "heldout": None,
        "test": None,
        "rungs": {},
      }
      for i, v in enumerate(values)
    ]

  def begin_with(self, start: trials_lib.Values) -> None:
    """Gives the first trial these values, and keeps it from being halved."""
    self._values[0] = start
    self._rows[0] |= {"values": start, "start": True}

  def run(self, rungs: list[int], checkpoint_every: int) -> list[Row]:
    """Trains the block and returns its rows."""
    rounds = self._problem.rounds
    started = time.monotonic()
    done, seconds, members, states = self._restore()
    ends = {*rungs, *range(checkpoint_every, rounds, checkpoint_every), rounds}
    for end in sorted(e for e in ends if e > done):
      alive = np.array([self._rows[i]["status"] == "complete" for i in members])
      if not alive.any():
        break
      with logs.bar(
        int(alive.sum()) * (end - done),
        desc=f"{self.name}, rounds {done + 1} to {end}",
        bar_format="{l_bar}{bar}| [{elapsed}<{remaining}, {rate_fmt}]",
        leave=False,
      ) as bar:
        states, ended = self._runner.advance(
          states, alive, done + 1, end, bar.update
        )
      for i, a, e in zip(members, alive, ended):
        if a:
          self._rows[i]["round"] = int(e)
          if e < end:
            self._rows[i] |= dict(status="diverged", objective=None)
            self._rows[i]["heldout"] = None
      done = end
      if end in rungs or end == rounds:
        self._judge(members, states, end, drop=end != rounds)
        members, states = self._compact(members, states)
      if end != rounds:
        so_far = seconds + time.monotonic() - started
        self._save(done, so_far, members, states)
        if end in rungs:
          self._say(done, so_far)
    for row in self._rows:
      row["seconds"] = seconds + time.monotonic() - started
    return self._rows

  def clean(self) -> None:
    """Deletes the block's checkpoints."""
    shutil.rmtree(self._folder, ignore_errors=True)

  def _say(self, done, seconds):
    logging.info(
      "%s: round %d of %d, %.1f s; %d continue, %d halved, %d diverged;"
      " best %s.",
      self.name,
      done,
      self._problem.rounds,
      seconds,
      *_counts(self._rows),
      _best(self._rows),
    )

  def _judge(self, members, states, round, drop):
    """Evaluates the block; drops its worse half if `drop`, else tests it."""
    results = self._runner.evaluate(states)
    places = self._alive(members)
    rows = [self._rows[members[j]] for j in places]
    for j, row in zip(places, rows):
      objective = self._problem.objective(results[j])
      row |= dict(objective=objective, heldout=results[j])
      row["rungs"] |= {str(round): objective}
    if drop:
      # The start goes on, and the others are halved among themselves.
      rows = [row for row in rows if not row.get("start")]
      # Of two equal trials the earlier one survives.
      rows.sort(key=lambda row: (-row["objective"], row["trial"]))
      for row in rows[-(-len(rows) // 2) :]:
        row["status"] = "halved"
    elif rows and "test" in self._problem.eval_data:
      tests = self._runner.evaluate(self._runner.take(states, places), "test")
      for row, test in zip(rows, tests):
        row["test"] = test

  def _compact(self, members, states):
    """Leaves out trials that have ended, once half of the members have.

    With the start beside them, half of the others.
    """
    alive = self._alive(members)
    if not alive or len(alive) > len(members) // 2 + 1:
      return members, states
    return [members[j] for j in alive], self._runner.take(states, alive)

  def _alive(self, members) -> list[int]:
    """Places of the members that were neither halved nor diverged."""
    return [
      j for j, i in enumerate(members) if self._rows[i]["status"] == "complete"
    ]

  def _checkpoints(self, number) -> checkpoint.Checkpoints:
    name = f"trial{self._first:06d}-of{number:06d}"
    return checkpoint.Checkpoints(self._folder / name, keep=1)

  def _save(self, done, seconds, members, states):
    store = self._checkpoints(len(members))
    extra = {"rows": self._rows, "members": members, "seconds": seconds}
    caught = []
    with training.on_signals(caught.append):  # Orbax must not be interrupted.
      store.save(done, states, logs.to_json(extra))
    self.saved = done
    if caught:
      raise _Signal(caught[0])
    for other in self._folder.iterdir():
      if other != store.folder:
        shutil.rmtree(other, ignore_errors=True)

  def _restore(self):
    """The newest checkpoint of the block, or its initial states."""
    start = self._runner.start(self._values)
    if self._folder.is_dir():
      # The fewer trials a checkpoint holds, the newer it is.
      for number in range(1, len(self._values) + 1):
        store = self._checkpoints(number)
        if not store.folder.is_dir():
          continue
        found = store.latest(self._runner.take(start, range(number)))
        if found is not None:
          done, states, extra = found
          if [r["values"] for r in extra["rows"]] != self._values:
            break
          self._rows = extra["rows"]
          self.saved = done
          logging.info("%s: resuming after round %d.", self.name, done)
          return done, extra["seconds"], extra["members"], states
      # The checkpoints are of another block, such as one that has ended.
      shutil.rmtree(self._folder)
    return 0, 0.0, list(range(len(self._values))), start


def top(rows: Sequence[Row], k: int) -> list[Row]:
  """The k best trials that were trained to the end.

  >>> rows = [dict(trial=i, status=s, objective=o) for i, (s, o) in enumerate(
  ...     [('complete', .5), ('halved', .9), ('complete', .7)])]
  >>> [row['trial'] for row in top(rows, 2)]
  [2, 0]
  """
  complete = [row for row in rows if row["status"] == "complete"]
  return sorted(complete, key=lambda row: (-row["objective"], row["trial"]))[:k]


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
    which: {
      name: sum(row[which][name] for row in best) / len(best)
      for name in best[0][which]
    }
    for which in ("heldout", "test")
    if all(row.get(which) for row in best)
  }
  counts = {"trials": len(rows), "complete": len(complete), "top": len(best)}
  return counts | means


def table(rows: Sequence[Row], space: proposers.Space, k: int = 10) -> str:
  """Formats the k best trials, one line each.

  Args:
    rows: the search's rows.
    space: what was varied.
    k: how many.

  Returns:
    The table: accuracies on held-out data in percent, and the values.

  >>> row = dict(trial=3, status='complete', objective=.75,
  ...            heldout={'small': .5, 'large': 1.}, values={'lr': .01})
  >>> print(table([row], {'lr': proposers.Dimension(0., 1.)}))
  trial  objective %  small %  large %    lr
  -----  -----------  -------  -------  ----
      3        75.00    50.00   100.00  0.01
  """
  best = top(rows, k)
  names = list(best[0]["heldout"]) if best else []
  lines = [["trial", "objective %", *(f"{n} %" for n in names), *space]]
  for row in best:
    numbers = [row["objective"], *(row["heldout"][n] for n in names)]
    lines.append(
      [
        str(row["trial"]),
        *(f"{100 * n:.2f}" for n in numbers),
        *(f"{row['values'][name]:.4g}" for name in space),
      ]
    )
  return report.align(list(zip(*lines)), names=0)
