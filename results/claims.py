"""Writes CLAIMS.md of `claims.toml` and the runs' files.

  python results/claims.py

Keys of a claim, all of whose texts may have `{...}`, a word of `each`:

  claim: what the paper says; `{beats}` follows from the published numbers.
  cells: of `experiments/tables`, which have the published numbers. The first
    should have more than the second, or than its own published number if
    there is no second; the difference of the third and fourth is taken off.
  runs: the cells' folders, if they are not in `[runs]`.
  numbers: a name in the cell's table; a path in result.json; or, with a slash,
    a pattern of names in metrics.jsonl, over whose rounds `over` reduces. `#`
    is each of ten parties.
  kind: `more`, `every`, `reaches` or `level`; `margin`: points to be ahead by.
  note: what a reader must know.

One string is for all cells.
"""

from collections.abc import Iterator, Mapping, Sequence
import itertools
import json
import pathlib
import re
import statistics
import sys
import tomllib
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "experiments"))

import tables  # noqa: E402

from hetfl.run import logs, report  # noqa: E402

RESULTS = ROOT / "results"
COLUMNS = ["claim", "cell", "published", "ours", "lead"]
COLUMNS += ["held out", "seeds", "verdict", "runs"]


class Row(NamedTuple):
  """A claim, and what the runs say."""

  paper: str
  claim: str
  cell: str
  published: str
  ours: str = ""
  lead: str = ""
  held_out: str = ""
  seeds: str = ""
  verdict: str = "not run"
  runs: str = ""


def verdict(
  leads: Sequence[float],
  kind: str = "more",
  sign: int = 1,
  noise: float = 1.0,
) -> str:
  """The rule at the top of CLAIMS.md, for leads in points.

  >>> verdict([2.2, 2.1]), verdict([2.2, -0.1]), verdict([2.2], sign=-1)
  ('holds', 'not shown', 'does not hold')
  >>> verdict([-0.9], "reaches"), verdict([-2.0], "level")
  ('holds', 'does not hold')
  """
  leads = [sign * round(lead, 2) for lead in leads]  # As they are shown.
  if kind == "every":
    holds, fails = min(leads) > noise, min(leads) < -noise
  else:
    mean = statistics.fmean(leads)
    if len(leads) > 1:
      noise = max(noise, statistics.stdev(leads))
    if kind == "reaches":
      holds, fails = mean >= -noise, mean < -noise
    elif kind == "level":
      holds, fails = abs(mean) <= noise, abs(mean) > noise
    else:
      holds = mean > noise and min(leads) > 0
      fails = mean < -noise and max(leads) < 0
  return "holds" if holds else "does not hold" if fails else "not shown"


def reduced(rows: Sequence[Mapping[str, Any]], names: str, over: str) -> float:
  """A metric, the mean of those of the same pattern, reduced over the rounds.

  By `round N`, `first N`, `last ten`, `every N`, `around N`, `change`, `mean`.

  >>> rows = [{"round": t, "a/x": t / 8, "b/x": 0.0} for t in (1, 2, 4, 8)]
  >>> [reduced(rows, "[ab]/x", over) for over in ("round 4", "mean", "change")]
  [0.25, 0.234375, 0.1875]
  >>> over = ("first 2", "every 4", "around 4")
  >>> [reduced(rows, "[ab]/x", one) for one in over]
  [0.09375, 0.25, 0.3125]
  """
  course = {
    row["round"]: statistics.fmean(
      value for name, value in row.items() if re.fullmatch(names, name)
    )
    for row in rows
  }
  values = list(course.values())
  what, _, number = over.partition(" ")
  if what == "round":
    return course[int(number)]
  if what == "change":
    late = values[len(values) // 2 - 1 :]
    return statistics.fmean(abs(b - a) for a, b in itertools.pairwise(late))
  if what == "first":
    values = [value for t, value in course.items() if t <= int(number)]
  if what == "last":
    values = values[-10:]
  if what in ("every", "around"):
    # At the multiples of a period, or on average just before and after them.
    inner = zip([*course][1:], values, values[1:], values[2:])
    values = [
      now if what == "every" else (before + after) / 2
      for t, before, now, after in inner
      if t % int(number) == 0
    ]
  return statistics.fmean(values)


def measured(
  run: pathlib.Path, result: Mapping[str, Any], path: str, over: str
) -> list[float]:
  """The numbers of a run, in percent: one, or ten if the path has `#`.

  The list is empty if the run's result has no such number.
  """
  if "/" in path:
    rows = logs.read_rows(run / "metrics.jsonl")
    return [100 * reduced(rows, path, over)]
  each = range(10) if "#" in path else [0]
  values = [tables.lookup(result, path.replace("#", str(k))) for k in each]
  return [] if None in values else [100 * value for value in values]


def expanded(entry: Mapping[str, Any], names: Mapping[str, str]) -> Iterator:
  """The claims of an entry: one for each combination of the words of `each`."""
  each = entry.get("each", {})
  for words in itertools.product(*each.values()):
    raw = dict(zip(each, words))
    shown = {k: names.get(v, v) for k, v in raw.items()} | {"beats": "{beats}"}

    def fill(value, raw=raw):
      if isinstance(value, list):
        return [fill(v) for v in value]
      return value.format(**raw) if isinstance(value, str) else value

    claim = entry["claim"].format(**shown)
    rest = {k: fill(v) for k, v in entry.items() if k not in ("each", "claim")}
    yield {"numbers": raw.get("number"), **rest, "claim": claim}


def row_of(
  entry: Mapping[str, Any],
  known: Mapping[str, tuple[tables.Table, tables.Cell]],
  folders: Mapping[str, str],
) -> Row:
  """Looks up the published numbers and ours, and compares them.

  Raises:
    ValueError: a folder that is named is not there.
  """
  given = [entry.get(k, "") for k in ("cells", "numbers", "runs", "over")]
  given = [[v] if isinstance(v, str) else v for v in given]
  sides = max(map(len, given))
  signs = (1, -1, -1, 1)[:sides]
  published, found, held, links = [], [], [], {}
  for name, number, run, over in zip(*(v * (sides // len(v)) for v in given)):
    table, cell = known[name]
    published.append(cell.published.get(number))
    path = table.numbers.get(number.replace("#", "0"), number)
    path = path.replace(".0.", ".#.") if "#" in number else path
    found.append({})
    held.append({})
    kept_back = path.replace("test_accuracy", "heldout_accuracy")
    pattern = run or folders.get(name, "")
    places = sorted(RESULTS.glob(pattern)) if pattern else []
    if pattern and not places:
      raise ValueError(f"claims.toml: {pattern} is not in {RESULTS}")
    for place in places:
      result = json.loads((place / "result.json").read_bytes())
      found[-1][result["seed"]] = measured(place, result, path, over)
      if "pools" in result and not over:
        held[-1][result["seed"]] = measured(place, result, kept_back, over)
      link = place.relative_to(RESULTS).as_posix()
      links[link] = result["seed"], result["git_commit"][:7]
  ahead = None in published or sum(s * p for s, p in zip(signs, published)) >= 0
  row = Row(
    entry["paper"],
    entry["claim"].format(beats="beats" if ahead else "is behind"),
    f"`{given[0][0]}`",
    ", ".join("–" if p is None else f"{p:.2f}" for p in published)
    if any(published)
    else "",
  )
  seeds = sorted(set.intersection(*map(set, found)))
  if not seeds:  # What there is, of one side, is shown.
    means = [[*map(statistics.fmean, of.values())] for of in found]
    cells = ["–" if not each else report.cell(each) for each in means]
    return row._replace(
      ours=", ".join(cells) if any(found) else "",
      runs=", ".join(f"[{c}]({n})" for n, (_, c) in links.items()),
    )
  reached = published[0] if sides == 1 else 0.0
  leads, on_held_out = (
    [
      sum(s * v for s, v in zip(signs, values)) - reached
      for seed in seeds
      for values in zip(*(of.get(seed, ()) for of in sides_of))
    ]
    for sides_of in (found, held)
  )
  says = verdict(
    [lead - entry.get("margin", 0) for lead in leads],
    entry.get("kind", "reaches" if sides == 1 else "more"),
    1 if ahead else -1,
    0.1 if entry.get("over") == "change" else 1.0,
  )
  lead = f"{statistics.fmean(leads):+z.2f}"
  if len(leads) > 1:
    lead += f" ({min(leads):+z.2f} to {max(leads):+z.2f})"
  if on_held_out and sides > 1:
    row = row._replace(held_out=f"{statistics.fmean(on_held_out):+z.2f}")
  return row._replace(
    ours=", ".join(
      report.cell([statistics.fmean(of[seed]) for seed in seeds])
      for of in found
    ),
    lead=lead,
    seeds=str(len(seeds)),
    verdict=": ".join(filter(None, (says, entry.get("note")))),
    runs=", ".join(f"[{c}]({n})" for n, (s, c) in links.items() if s in seeds),
  )


def text() -> str:
  """The text of CLAIMS.md."""
  data = tomllib.loads((RESULTS / "claims.toml").read_text(encoding="utf-8"))
  of_tables = tables.tables().values()
  known = {
    cell.name: (table, cell) for table in of_tables for cell in table.cells
  }
  rows = [
    row_of(claim, known, data["runs"])
    for entry in data["claims"]
    for claim in expanded(entry, data["names"])
  ]
  rows.sort(key=lambda row: row.verdict == "not run")
  parts = [data["head"]]
  for paper, about in data["papers"].items():
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    lines += [row[1:] for row in rows if row.paper == paper]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    parts.append(f"\n## {about}\n\n{table}\n")
  return "".join(parts)


def main() -> None:
  """Writes the file."""
  logs.write_bytes(RESULTS / "CLAIMS.md", text().encode())


if __name__ == "__main__":
  main()
