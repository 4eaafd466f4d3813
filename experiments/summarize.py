r"""Compares runs by the files in their folders.

  python experiments/summarize.py runs --target=90 --out=DIR

Folders are runs, finished or not, or contain runs at any depth; runs whose
paths differ only in a folder `seed0`, `seed1` and so on are seeds of one run.
For each model of a run the table has the last and the best evaluation and, with
--target, what it took until an evaluation first reached that many percent:
rounds, data sent, minutes. With --out, `summary.csv` has the same for each
seed, and `summary.png` the curves. The data that a run, or a pool of
codistillation, sends in a round is in `result.json`, so it is unknown (?) for
unfinished runs and for runs of earlier versions.
"""

from collections.abc import Mapping, Sequence
import csv
import dataclasses
import io
import pathlib
import re
import signal
import sys
from typing import Any, Literal, NamedTuple

import numpy as np
import settings
from settings import setting, UsageError

from hetfl.run import logs, report

_SEED = re.compile(r"seed\d+")
_PLURAL = {"party": "parties", "client": "clients"}


class Run(NamedTuple):
  """A run, read from its folder.

  Attributes:
    label: its path below the folder that all runs have in common, without the
      seed.
    seed: the name of its seed's folder, or empty.
    courses: for each model the metric over the rounds, from `series`.
    ended: whether it has ended, early or not.
    bytes_per_round: for each model the bytes that its clients and the server
      send each other in a round, from `result.json`; `None` if unknown.
  """

  label: str
  seed: str
  courses: Mapping[str, Sequence[tuple[int, float, float]]]
  ended: bool
  bytes_per_round: Mapping[str, int | None]


def read_runs(folders: Sequence[pathlib.Path], metric: str) -> list[Run]:
  """Reads the runs in some folders; one of them at least has the metric.

  Raises:
    ValueError: a folder holds no runs, or no run has the metric.
  """
  places = []
  for folder in folders:
    found = sorted(p.parent for p in folder.absolute().rglob("metrics.jsonl"))
    if not found:
      raise ValueError(
        f"{folder}: no run found (no metrics.jsonl in it or below it)"
      )
    places += [place for place in found if place not in places]
  # Without the seeds, or a single run's label would be only its seed.
  parts = [
    [p for p in place.parts if not _SEED.fullmatch(p)] for place in places
  ]
  common = min(map(len, parts)) - 1
  while common and len({tuple(p[:common]) for p in parts}) > 1:
    common -= 1
  runs, names = [], set()
  for place, of in zip(places, parts):
    rows = logs.read_rows(place / "metrics.jsonl")
    names |= {name.rpartition("/")[2] for row in rows for name in row}
    result = logs.read_json(place / "result.json") or {}  # Not finished.
    courses, pools = series(rows, metric), result.get("pools")
    runs.append(
      Run(
        label="/".join(of[common:]),
        seed=next(filter(_SEED.fullmatch, reversed(place.parts)), ""),
        courses=courses,
        ended=bool(result),
        # What a pool's clients send is not a cost of the other pool's model.
        bytes_per_round={
          model: (pools.get(model, {}) if pools else result).get(
            "bytes_per_round"
          )
          for model in courses
        },
      )
    )
  if not any(run.courses for run in runs):
    known = ", ".join(sorted(n for n in names if "accuracy" in n)) or "none"
    raise ValueError(f"--metric={metric}: no run has it; there are: {known}")
  return runs


def series(
  rows: Sequence[Mapping[str, Any]], metric: str
) -> dict[str, list[tuple[int, float, float]]]:
  """A metric over the rounds for each model: round, seconds so far and value.

  Numbered models, of parties or clients, are averaged, unless the rows already
  have their mean, such as `clients`. A value is NaN where the model, or one of
  these, has diverged.

  >>> rows = [{'round': t, 'seconds': 1.0 * t, 'party0/accuracy': 0.25 * t,
  ...          'party1/accuracy': 0.5 * t} for t in (1, 2)]
  >>> series(rows, 'accuracy')
  {'mean of 2 parties': [(1, 1.0, 0.375), (2, 2.0, 0.75)]}
  """
  found, numbers = {}, {}
  for row in rows:
    values = {}
    for name, value in row.items():
      model, _, what = name.rpartition("/")
      if what == metric:
        kind = re.sub(r"\d+$", "", model)
        values.setdefault(kind if kind in _PLURAL else model, []).append(value)
    for model, of in values.items():
      mean = float(np.array(of, float).mean())  # None is NaN.
      point = row["round"], row.get("seconds", 0.0), mean
      numbers[model] = max(len(of), numbers.get(model, 0))
      found.setdefault(model, []).append((len(of), point))
  courses = {}
  for model, points in found.items():
    # Rows that lack a model have no mean.
    course = [point for of, point in points if of == numbers[model]]
    if model not in _PLURAL:
      courses[model] = course
    elif _PLURAL[model] not in found:
      courses[f"mean of {numbers[model]} {_PLURAL[model]}"] = course
  return courses


def measures(
  course: Sequence[tuple[int, float, float]],
  target: float | None,
  bytes_per_round: int | None,
) -> dict[str, float | int | None]:
  """A model's last and best values, and what it took to reach a target.

  Args:
    course: rounds, seconds and values, from `series`.
    target: the value to reach, if any.
    bytes_per_round: bytes sent in a round; `None` if unknown.

  Returns:
    `rounds`, `last`, `best` and `best_round`, the first with the best value;
    with a target `rounds_to_target`, `bytes_to_target` and `seconds_to_target`
    of the first evaluation that is at least the target, `None` if none is.

  Reference: McMahan et al. 2017, section 3, counts rounds in the same way, but
    interpolates linearly between evaluations.

  >>> course = [(10, 1.5, 0.25), (20, 3.0, 0.75), (30, 4.5, 0.5)]
  >>> found = measures(course, 0.5, 8)
  >>> found['best_round'], found['rounds_to_target'], found['bytes_to_target']
  (20, 20, 160)
  """
  known = [point for point in course if point[2] == point[2]]  # Not NaN.
  best_round, _, best = max(known or course, key=lambda point: point[2])
  last_round, _, last = course[-1]
  found = dict(rounds=last_round, last=last, best=best, best_round=best_round)
  if target is not None:
    reached = next((p for p in course if p[2] >= target), (None, None, None))
    known = None not in (reached[0], bytes_per_round)
    found |= {
      "rounds_to_target": reached[0],
      "bytes_to_target": reached[0] * bytes_per_round if known else None,
      "seconds_to_target": reached[1],
    }
  return found


def lines_of(runs: Sequence[Run], target: float | None) -> list[dict[str, Any]]:
  """One dict for each model of each run: the lines of `summary.csv`."""
  return [
    {
      "run": run.label,
      "seed": run.seed.removeprefix("seed"),
      "model": model,
      **measures(course, target, run.bytes_per_round[model]),
      "bytes_per_round": run.bytes_per_round[model],
    }
    for run in runs
    for model, course in run.courses.items()
  ]


def table(lines: Sequence[Mapping[str, Any]], target: float | None) -> str:
  """The lines as a plain-text table, with one row for all seeds of a run.

  >>> line = dict(run='fedavg', model='small', rounds=20, last=0.5, best=0.75)
  >>> print(table([line, line | {'last': 0.75}], None))
  run     model  seeds  rounds         last %        best %
  ------  -----  -----  ------  -------------  ------------
  fedavg  small      2      20  62.50 ± 17.68  75.00 ± 0.00
  """
  runs = {}
  for line in lines:
    runs.setdefault((line["run"], line["model"]), []).append(line)

  def cell(of, name, form, factor=1.0):
    values = [line[name] for line in of]
    missing = values.count(None)
    if name == "bytes_to_target" and None in (x["bytes_per_round"] for x in of):
      return "?"  # Unknown.
    if 0 < missing < len(values):
      return f"{len(values) - missing} of {len(values)}"
    values = [None if v is None else float(v) for v in values]
    return report.cell(values, form, factor)

  columns = [
    ["run", *(run for run, _ in runs)],
    ["model", *(model for _, model in runs)],
    ["seeds", *(str(len(of)) for of in runs.values())],
    ["rounds", *(f"{max(x['rounds'] for x in of):,d}" for of in runs.values())],
  ]
  heads = [("last %", "last", "{:.2f}", 100), ("best %", "best", "{:.2f}", 100)]
  if target is not None:
    to = f"to {100 * target:g} %"
    heads += [
      (f"rounds {to}", "rounds_to_target", "{:,.0f}", 1),
      (f"MB {to}", "bytes_to_target", "{:,.1f}", 1e-6),
      (f"min {to}", "seconds_to_target", "{:,.1f}", 1 / 60),
    ]
  for head, *what in heads:
    columns.append([head, *(cell(of, *what) for of in runs.values())])
  return report.align(columns, names=2)


def draw(
  runs: Sequence[Run],
  path: pathlib.Path,
  *,
  metric: str,
  over: str,
  published: Mapping[str, Mapping[str, float]],
) -> None:
  """Draws the curves, over rounds or over the data sent.

  Args:
    runs: the runs.
    path: the PNG.
    metric: what to draw.
    over: `rounds` or `megabytes`.
    published: see `charts.curves`.

  Raises:
    ValueError: the data that a run sends is unknown.
  """
  from hetfl.run import charts  # takes a second

  rounds: dict[tuple[str, str], set[int]] = {}
  for run in runs:
    for model, course in run.courses.items():
      rounds.setdefault((run.label, model), set()).update(t for t, *_ in course)
  by_label = {}
  for run in runs:
    rows = []
    for model, course in run.courses.items():
      own = [{f"{model}/{metric}": v, "round": t} for t, _, v in course]
      if run.ended:
        own = report.carried_on(own, rounds[run.label, model])
      sent = run.bytes_per_round[model]
      if over == "megabytes" and sent is None:
        raise ValueError(
          f"--over=megabytes: no result.json says what {run.label}, {model},"
          " sends in a round; it has not ended, or is of an earlier version"
        )
      each = sent / 1e6 if over == "megabytes" else 1
      rows += [row | {"round": row["round"] * each} for row in own]
    if rows:
      by_label.setdefault(run.label, []).append(rows)
  megabytes = "Sent between clients and server (MB)"
  charts.curves(
    by_label,
    path,
    metric=metric,
    ylabel=f"{metric.replace('_', ' ').capitalize()} (%)",
    xlabel=megabytes if over == "megabytes" else "Round",
    published=published,
  )


def read_published(
  given: Sequence[str], lines: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
  """Reads `RUN/MODEL=PERCENT`.

  Args:
    given: the texts.
    lines: the lines of the runs that are drawn.

  Returns:
    Model -> run -> a share.

  Raises:
    ValueError: a text has another form, or is of no run that is drawn.

  >>> read_published(['fml/global=93.75'], [dict(run='fml', model='global')])
  {'global': {'fml': 0.9375}}
  """
  found, drawn = {}, {f"{line['run']}/{line['model']}" for line in lines}
  for text in given:
    place, _, number = text.rpartition("=")
    run, _, model = place.rpartition("/")
    try:
      found.setdefault(model, {})[run] = float(number) / 100
    except ValueError:
      run = ""
    if not run:
      raise ValueError(
        f"--published={text}: give RUN/MODEL=PERCENT, as fml/global=93.77"
      )
    if place not in drawn:
      known = ", ".join(sorted(drawn))
      raise ValueError(f"--published={place}=...: there are {known}")
  return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summarize(settings.Settings):
  """A comparison.

  Attributes:
    metric: Another accuracy in the evaluations of each model, such as
      heldout_accuracy, or validation_accuracy of fml's clients.
    target: Target accuracy in percent, not as a share.
    over: What the curves are drawn over.
    published: RUN/MODEL=PERCENT, levels to draw dashed, in the colours of the
      runs; further ones may follow, with spaces between them.
    out: Where summary.csv and summary.png go.
  """

  metric: str = setting("test_accuracy")
  target: float | None = setting(low=1, high=100)
  over: Literal["rounds", "megabytes"] = setting("rounds")
  published: tuple[str, ...] = setting(())
  out: str | None = setting()


def run(given: settings.Given) -> None:
  """Reads the folders, prints the table and writes the files."""
  s = Summarize.resolve(given.values, ())
  target = None if s.target is None else s.target / 100
  if "accuracy" not in s.metric:
    raise UsageError(f"--metric={s.metric}: name an accuracy")
  if not s.out and (s.published or s.over != "rounds"):
    raise UsageError("--published, --over: for the chart; give --out=DIR too")
  is_level = lambda text: "=" in text and not pathlib.Path(text).is_dir()
  folders = [pathlib.Path(text) for text in given.rest if not is_level(text)]
  if not folders:
    raise UsageError("give the folders of runs")
  runs = read_runs(folders, s.metric)
  lines = lines_of(runs, target)
  more = filter(is_level, given.rest)
  published = read_published([*s.published, *more], lines)
  if not s.out:
    print(table(lines, target))
    return
  out = logs.make_folder(s.out, "--out")
  text = io.StringIO()
  writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
  writer.writeheader()
  writer.writerows(lines)
  logs.write_bytes(out / "summary.csv", text.getvalue().encode())
  options = dict(metric=s.metric, over=s.over, published=published)
  draw(runs, out / "summary.png", **options)
  print(table(lines, target))
  print(f"\nAll seeds: {out / 'summary.csv'}, curves: {out / 'summary.png'}")


def main(argv: Sequence[str]) -> None:
  """Reads the flags, and compares runs."""
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # As when `head` has enough.
  try:
    run(settings.parse(argv, Summarize, more=True))
  except (OSError, ValueError) as error:
    sys.exit(f"error: {error}")


if __name__ == "__main__":
  main(sys.argv[1:])
