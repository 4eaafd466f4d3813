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

from collections.abc import Sequence
import json
import os
import pathlib
import shutil
import signal
import time
from typing import Any, Protocol

from absl import logging
import numpy as np

from hetfl import checks
from hetfl.run import checkpoint, logs, report, training
from hetfl.run import trials as trials_lib
from hetfl.run.trials import Space, Values

# The results of a trial; see `search`.
Row = dict[str, Any]


class Proposer(Protocol):
  """Proposes the values to try next."""

  def propose(
    self, rows: Sequence[Row], first: int, number: int
  ) -> list[Values]:
    """Proposes trials `first` to `first + number - 1`.

    Args:
      rows: the rows of all trials before `first`, in order.
      first: the first trial's number.
      number: how many trials.

    Returns:
      For each trial, a value for each dimension; the same arguments give the
      same values.
    """


class RandomSearch:
  """Seeded random search: trial i's values depend on the seed and i alone.

  Args:
    space: what to vary.
    seed: the search's seed.

  >>> rates = trials_lib.Dimension(0.01, 1., log=True)
  >>> search = RandomSearch({'lr': rates}, seed=0)
  >>> search.propose([], 0, 2) == (
  ...     search.propose([], 0, 1) + search.propose([], 1, 1))
  True
  """

  def __init__(self, space: Space, seed: int):
    self._space = dict(sorted(space.items()))
    self._seed = seed

  def propose(
    self, rows: Sequence[Row], first: int, number: int
  ) -> list[Values]:
    """Proposes trials; see `Proposer`."""
    del rows
    trials = range(first, first + number)
    rngs = [np.random.default_rng([self._seed, trial]) for trial in trials]
    return [
      {
        name: dimension.at(share)
        for (name, dimension), share in zip(
          self._space.items(), rng.random(len(self._space))
        )
      }
      for rng in rngs
    ]


class OptunaSearch:
  """Optuna's TPE sampler; a diverged trial counts as an objective of 0.

  Finished trials are kept in an Optuna journal, for Optuna's own tools. Each
  block is drawn by a new sampler that has seen all earlier blocks.

  Args:
    space: what to vary.
    seed: the search's seed.
    journal: the journal's file; if it does not fit the rows, it is renamed to
      `.old` and rebuilt from them.

  Raises:
    ImportError: Optuna is not installed.
  """

  def __init__(self, space: Space, seed: int, journal: pathlib.Path):
    try:
      import optuna
    except ImportError as error:
      raise ImportError(
        "Optuna is not installed: pip install -e '.[tune]', or"
        " use RandomSearch (proposer=random)"
      ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    self._optuna = optuna
    self._space = dict(sorted(space.items()))
    self._distributions: dict[str, Any] = {
      name: optuna.distributions.FloatDistribution(d.low, d.high, log=d.log)
      for name, d in self._space.items()
    }
    self._seed = seed
    self._journal = journal

  def propose(
    self, rows: Sequence[Row], first: int, number: int
  ) -> list[Values]:
    """Proposes trials; see `Proposer`."""
    self.record(rows)
    sampler = self._optuna.samplers.TPESampler(
      seed=int(np.random.default_rng([self._seed, first]).integers(2**31)),
      n_startup_trials=max(10, 2 * len(self._space)),
      constant_liar=True,  # A block is proposed before it has any results.
    )
    study = self._optuna.create_study(direction="maximize", sampler=sampler)
    study.add_trials(map(self._trial, rows))
    asked = [study.ask(self._distributions).params for _ in range(number)]
    return list(map(self._rounded, asked))

  def record(self, rows: Sequence[Row]) -> None:
    """Adds those of the rows of all trials that the journal does not have."""
    optuna = self._optuna

    def add():
      backend = optuna.storages.journal.JournalFileBackend(str(self._journal))
      study = optuna.create_study(
        storage=optuna.storages.JournalStorage(backend),
        study_name="hetfl",
        direction="maximize",
        load_if_exists=True,
      )
      known = [t.user_attrs.get("trial") for t in study.trials]
      if known != [row["trial"] for row in rows[: len(known)]]:
        raise ValueError(f"{self._journal} holds other trials")
      study.add_trials(map(self._trial, rows[len(known) :]))

    try:
      add()
    except (ValueError, AssertionError):  # Other trials, or a cut-off line.
      if self._journal.exists():
        self._journal.replace(self._journal.with_suffix(".old"))
      add()

  def _rounded(self, values: Values) -> Values:
    return {name: d.rounded(values[name]) for name, d in self._space.items()}

  def _trial(self, row: Row):
    states = self._optuna.trial.TrialState
    halved = row["status"] == "halved"
    return self._optuna.create_trial(
      # A search's start may lie outside the ranges, which Optuna refuses.
      params=self._rounded(row["values"]),
      distributions=self._distributions,
      state=states.PRUNED if halved else states.COMPLETE,
      value=row["objective"] or 0.0,
      intermediate_values={int(t): v for t, v in row["rungs"].items()},
      user_attrs={"trial": row["trial"], "status": row["status"]},
    )


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
  problem: trials_lib.Problem,
  proposer: Proposer,
  runner: trials_lib.Runner,
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
  folder = pathlib.Path(folder).absolute()
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / "trials.jsonl"
  rows = logs.read_rows(path)
  # A row says where its block ends; one that was only partly written is cut.
  while rows and rows[-1]["trial"] != rows[-1]["block_end"] - 1:
    rows.pop()
  logs.write_rows(path, rows)
  if rows and len(rows) < trials and len(rows) % block:
    logging.warning(
      f"The {len(rows)} earlier trials are not a multiple of block={block}, so"
      " the last of them were halved in a smaller block than with"
      f" trials={trials} from the start."
    )
  while len(rows) < trials:
    first = len(rows)
    values = proposer.propose(rows, first, min(block, trials - first))
    own = start if first == 0 else None
    work = _Block(problem, runner, folder / "checkpoints", first, values, own)
    try:
      with training.on_signals(_exit):
        done = work.run(rungs(problem.rounds, halvings), checkpoint_every)
        logs.write_rows(path, done, append=True)
        work.clean()
    except SystemExit as end:
      name = signal.Signals(end.code - 128).name  # type: ignore[operator]
      logging.warning(
        f"{work.name}: {name}; run the same command to resume after round"
        f" {work.saved}."
      )
      raise
    rows += logs.to_json(done)  # As they will be read back.
    logging.info(
      f"{len(rows)} of {trials} trials, best {_best(rows)}; of the last"
      f" {len(done)}, in {done[-1]['seconds']:.1f} s,"
      f" {_counts(done, 'complete')}."
    )
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


def _exit(number: int) -> None:
  """Ends the process on a signal."""
  raise SystemExit(128 + number)


def _counts(rows: Sequence[Row], going: str) -> str:
  status = [row["status"] for row in rows]
  counts = {"complete": going, "halved": "halved", "diverged": "diverged"}
  return ", ".join(f"{status.count(s)} {word}" for s, word in counts.items())


def _best(rows: Sequence[Row]) -> str:
  best = top(rows, 1)
  if not best:
    return "none"
  return f"trial {best[0]['trial']}, {best[0]['objective']:.4f}"


def _rank(row: Row) -> tuple[float, int]:
  """The order of trials, the best first; of equal ones the earlier."""
  return -row["objective"], row["trial"]


class _Block:
  """Trains some trials from their first round to their last.

  Attributes:
    name: which trials.
    saved: the round of its last checkpoint.
  """

  def __init__(self, problem, runner, folder, first, values, start):
    self.name = f"Trials {first} to {first + len(values) - 1}"
    self.saved = 0
    self._problem = problem
    self._runner = runner
    self._folder = folder
    self._first = first
    self._rows: list[Row] = [
      {"trial": first + i, "block_end": first + len(values), "values": v}
      | {"status": "complete", "round": 0, "objective": None}
      | {"heldout": None, "test": None, "rungs": {}}
      for i, v in enumerate(values)
    ]
    if start is not None:
      self._rows[0] |= {"values": start, "start": True}

  def run(self, rungs: list[int], checkpoint_every: int) -> list[Row]:
    """Trains the block and returns its rows."""
    rounds = self._problem.rounds
    started = time.monotonic()
    done, before, members, states = self._restore()
    seconds = lambda: before + time.monotonic() - started
    ends = {*rungs, *range(checkpoint_every, rounds, checkpoint_every), rounds}
    for end in sorted(e for e in ends if e > done):
      rows = [self._rows[i] for i in members]
      alive = np.array([row["status"] == "complete" for row in rows])
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
      for j in np.flatnonzero(alive):
        rows[j]["round"] = int(ended[j])
        if ended[j] < end:
          rows[j] |= dict(status="diverged", objective=None, heldout=None)
      done = end
      if end in rungs or end == rounds:
        members, states = self._judge(members, states, end)
      if end != rounds:
        self._save(done, seconds(), members, states)
        if end in rungs:
          logging.info(
            f"{self.name}: round {done} of {rounds}, {seconds():.1f} s;"
            f" {_counts(self._rows, 'continue')}; best {_best(self._rows)}."
          )
    for row in self._rows:
      row["seconds"] = seconds()
    return self._rows

  def clean(self) -> None:
    """Deletes the block's checkpoints."""
    shutil.rmtree(self._folder, ignore_errors=True)

  def _judge(self, members, states, round):
    """Evaluates the block; drops its worse half, or at the end tests it.

    Returns the members and states that go on. Trials that have ended are left
    out once half of the members have; with the start, half of the others.
    """
    results = self._runner.evaluate(states)
    places = self._alive(members)
    rows = [self._rows[members[j]] for j in places]
    for j, row in zip(places, rows):
      objective = self._problem.objective(results[j])
      row |= dict(objective=objective, heldout=results[j])
      row["rungs"] |= {str(round): objective}
    if round < self._problem.rounds:
      # The start goes on, and the others are halved among themselves.
      others = sorted((r for r in rows if not r.get("start")), key=_rank)
      for row in others[-(-len(others) // 2) :]:
        row["status"] = "halved"
    elif rows and "test" in self._problem.eval_data:
      tests = self._runner.evaluate(self._runner.take(states, places), "test")
      for row, test in zip(rows, tests):
        row["test"] = test
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
    caught: list[int] = []
    with training.on_signals(caught.append):  # Orbax must not be interrupted.
      store.save(done, states, logs.to_json(extra))
    self.saved = done
    if caught:
      _exit(caught[0])
    for other in self._folder.iterdir():
      if other != store.folder:
        shutil.rmtree(other, ignore_errors=True)

  def _restore(self):
    """The newest checkpoint of the block, or its initial states."""
    values = [row["values"] for row in self._rows]
    start = self._runner.start(values)
    # The fewer trials a checkpoint holds, the newer it is.
    for number in range(1, len(values) + 1):
      store = self._checkpoints(number)
      if not store.folder.is_dir():
        continue
      found = store.latest(self._runner.take(start, range(number)))
      if found is None:
        continue
      done, states, extra = found
      if [row["values"] for row in extra["rows"]] != values:
        break
      self._rows, self.saved = extra["rows"], done
      logging.info("%s: resuming after round %d.", self.name, done)
      return done, extra["seconds"], extra["members"], states
    # Other checkpoints are of another block, such as one that has ended.
    self.clean()
    return 0, 0.0, list(range(len(values))), start


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
    which: {
      name: sum(row[which][name] for row in best) / len(best)
      for name in best[0][which]
    }
    for which in ("heldout", "test")
    if all(row.get(which) for row in best)
  }
  counts = {"trials": len(rows), "complete": len(complete), "top": len(best)}
  return counts | means


def table(rows: Sequence[Row], space: Space, k: int = 10) -> str:
  """Formats the k best trials, one line each.

  Args:
    rows: the search's rows.
    space: what was varied.
    k: how many.

  Returns:
    The table: accuracies on held-out data in percent, and the values.

  >>> row = dict(trial=3, status='complete', objective=.75,
  ...            heldout={'small': .5, 'large': 1.}, values={'lr': .01})
  >>> print(table([row], {'lr': trials_lib.Dimension(0., 1.)}))
  trial  objective %  small %  large %    lr
  -----  -----------  -------  -------  ----
      3        75.00    50.00   100.00  0.01
  """
  best = top(rows, k)
  names = list(best[0]["heldout"]) if best else []
  columns = [["trial", *(str(row["trial"]) for row in best)]]
  scores = {"objective": [row["objective"] for row in best]}
  scores |= {name: [row["heldout"][name] for row in best] for name in names}
  for name, of_each in scores.items():
    columns.append([f"{name} %", *(f"{100 * x:.2f}" for x in of_each)])
  for name in space:
    columns.append([name, *(f"{row['values'][name]:.4g}" for row in best)])
  return report.align(columns, names=0)
