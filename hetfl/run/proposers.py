"""Hyper-parameter spaces, and proposers of the values that a search tries.

Reference: Lichtarge et al. 2023, appendix F, for the spaces. The paper uses
Vizier's default algorithm; here random search and Optuna's TPE replace it.
"""

from collections.abc import Mapping, Sequence
import math
import pathlib
from typing import Any, NamedTuple, Protocol

import numpy as np

from hetfl.run import trials as trials_lib

Values = trials_lib.Values
# The results of a trial; see `hetfl.run.tune.search`.
Row = dict[str, Any]


class Dimension(NamedTuple):
  """One hyper-parameter and its range.

  Attributes:
    low: the least value.
    high: the greatest value.
    log: whether equal ratios, not equal differences, are equally likely.

  >>> Dimension.parse('log:1e-4:0.1')
  Dimension(low=0.0001, high=0.1, log=True)
  """

  low: float
  high: float
  log: bool = False

  @classmethod
  def parse(cls, text: str) -> "Dimension":
    """Reads `log:LOW:HIGH` or `linear:LOW:HIGH`.

    Args:
      text: the range.

    Returns:
      The dimension.

    Raises:
      ValueError: the text is malformed; the message says how.
    """
    scale, *ends = text.split(":")
    try:
      low, high = map(float, ends)
      fine = low < high < math.inf and (low > 0 or scale == "linear")
    except ValueError:
      fine = False
    if not fine or scale not in ("log", "linear"):
      raise ValueError(
        f"{text!r}: give log:LOW:HIGH or linear:LOW:HIGH, LOW below HIGH, and"
        " above 0 on a log scale"
      )
    return cls(low, high, scale == "log")

  def at(self, share: float) -> float:
    """The value at a share of the range, rounded to six digits.

    The rounding lets a flag file say exactly what was tried.

    Args:
      share: 0 gives the least value, 1 the greatest.

    Returns:
      The value; at share 0.5 of a log scale, the geometric mean of the ends.

    >>> Dimension(0.01, 100., log=True).at(0.5)
    1.0
    """
    span = self.high / self.low if self.log else self.high - self.low
    return self.rounded(
      self.low * span**share if self.log else self.low + span * share
    )

  def rounded(self, value: float) -> float:
    """A value to six digits, but not beyond the ends of the range.

    Args:
      value: any number.

    Returns:
      The number.

    >>> Dimension(0.1, 0.12345678).rounded(0.12345677)
    0.12345678
    """
    return min(max(float(f"{value:.6g}"), self.low), self.high)


Space = Mapping[str, Dimension]


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

  >>> search = RandomSearch({'lr': Dimension(0.01, 1., log=True)}, seed=0)
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
    """Adds the rows that the journal does not have yet.

    Args:
      rows: the rows of all trials so far, in order.
    """
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
