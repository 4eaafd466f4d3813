r"""Runs a table of a paper, cell after cell, and puts our numbers beside it.

  python experiments/reproduce.py --table=codist_table1_cifar --data_dir=DIR
  python experiments/reproduce.py --list

Each cell is a run in a folder of its own, so the same command goes on where
it stopped, and finished cells are not run again. After each cell `table.md`
and `table.csv` in --workdir say what there is so far, for codist_fig4 in
`figure.png` too. Flags after `--` are handed to every run:

  python experiments/reproduce.py --table=fml_table1 --only=cnn1 \
      --data_dir=DIR -- --rounds=60
"""

import argparse
from collections.abc import Mapping, Sequence
import csv
import io
import json
import pathlib
import signal
import subprocess
import sys
from typing import Any

import make_flags
import tables

from hetfl import logs

_WIDE = 16  # columns


def rows_of(
  cells: Sequence[tables.Cell], results: Mapping[str, Mapping]
) -> list[list[str]]:
  """The table as rows of text, published numbers beside ours.

  Args:
    cells: the table's cells.
    results: cell names to what `result.json` holds, for those that are done.

  Returns:
    A head and a row for each cell that is done: its title, and for each number
    ours and, if one of the cells has it, the published one and the difference,
    in percent; then rounds and minutes.
  """
  paths = list(dict.fromkeys(p for c in cells for p in c.published))
  known = {
    p for c in cells for p, value in c.published.items() if value is not None
  }
  head = ["run"]
  for path in paths:
    name = tables.label(path)
    head.append(name)
    if path in known:
      head += [f"{name}, published", "difference"]
  rows = [[*head, "rounds", "minutes"]]
  for cell in cells:
    if cell.name not in results:
      continue
    result = results[cell.name]
    row = [cell.title]
    for path in paths:
      ours = tables.lookup(result, path)
      theirs = cell.published.get(path)
      row.append("" if ours is None else f"{100 * ours:.2f}")
      if path in known:
        row += [
          "" if theirs is None else f"{theirs:.2f}",
          "" if None in (ours, theirs) else f"{100 * ours - theirs:+.2f}",
        ]
    seconds = result.get("seconds")
    if seconds is not None:  # FedMD's phases before the collaboration count.
      seconds += sum(result.get("phase_seconds", {}).values())
    row.append(str(result.get("rounds", "")))
    row.append("" if seconds is None else f"{seconds / 60:.1f}")
    rows.append(row)
  return rows


def write(
  folder: pathlib.Path, title: str, rows: Sequence[Sequence[str]]
) -> None:
  """Writes `table.md`, a column a run if it is wide, and `table.csv`."""
  text = io.StringIO()
  csv.writer(text, lineterminator="\n").writerows(rows)
  logs.write_bytes(folder / "table.csv", text.getvalue().encode())
  if len(rows[0]) > _WIDE:
    rows = list(zip(*rows))
  lines = [f"# {title}", ""]
  for i, row in enumerate(rows):
    cells = [cell.replace("|", "\\|") for cell in row]  # as in |P_H|
    lines.append("| " + " | ".join(cells) + " |")
    if i == 0:
      lines.append("|---" * len(row) + "|")
  logs.write_bytes(folder / "table.md", ("\n".join(lines) + "\n").encode())


def draw(
  folder: pathlib.Path, table: tables.Table, results: Mapping[str, Any]
) -> None:
  """Draws what a table's cells gave against its axis, to `figure.png`.

  Args:
    folder: where to.
    table: a table with an axis; a cell without that flag is a level line.
    results: what `result.json` of a cell holds, by the cell's name.
  """
  from hetfl import report  # takes a second

  points = {}
  for cell in table.cells:
    for path in cell.published if cell.name in results else ():
      value = tables.lookup(results[cell.name], path)
      label = f"{cell.flags['algorithm']}, {tables.label(path)}"
      if value is not None:
        line = points.setdefault(label, [])
        line.append((cell.flags.get(table.axis), value))
  report.dependence(
    points, folder / "figure.png", axis=table.axis, title=table.title
  )


def run_cell(
  script: str, cell: tables.Cell, folder: pathlib.Path, extra: Sequence[str]
) -> dict:
  """Runs a cell in its folder, or goes on with it.

  Args:
    script: the experiment.
    cell: the cell.
    folder: the run's folder.
    extra: further flags.

  Returns:
    What `result.json` holds. If the run fails, this process ends too.
  """
  command = [
    sys.executable,
    str(tables.HERE / script),
    f"--flagfile={tables.FLAGS / cell.name}.flags",
    f"--workdir={folder}",
    *extra,
  ]
  from hetfl import training  # takes seconds

  print(" ".join(command), flush=True)
  process = subprocess.Popen(command)
  stopped = []

  def hand_on(number):
    stopped.append(number)
    if number == signal.SIGTERM:  # The run had a Ctrl-C too.
      process.send_signal(number)

  with training.on_signals(hand_on):
    code = process.wait()  # It saves.
  if stopped:
    sys.exit(128 + stopped[0])
  if code:
    sys.exit(
      f"error: {cell.name} ended with status {code}, see above; once that is"
      " mended, the same command goes on there"
    )
  return read_result(folder)


def has_result(folder: pathlib.Path) -> bool:
  """Whether a run is finished, or one of several algorithms."""
  if (folder / "config.json").exists():  # Of one run: those below are phases.
    return (folder / "result.json").exists()
  return any(folder.glob("*/result.json"))


def read_result(folder: pathlib.Path) -> dict:
  """What a finished run says; of several algorithms, by their names.

  Args:
    folder: the run's folder.

  Returns:
    What `result.json` holds, or those of the folders in it, with the rounds of
    one and the seconds of all.
  """
  path = folder / "result.json"
  if path.exists():
    return json.loads(path.read_bytes())
  results = {
    path.parent.name: json.loads(path.read_bytes())
    for path in sorted(folder.glob("*/result.json"))
  }
  rounds = max(result["rounds"] for result in results.values())
  seconds = sum(result["seconds"] for result in results.values())
  return {**results, "rounds": rounds, "seconds": seconds}


def main(argv: Sequence[str]) -> None:
  """Runs a table."""
  known = make_flags.tables_of_the_papers()
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--table", choices=list(known), metavar="TABLE")
  parser.add_argument("--list", action="store_true", help="list the tables")
  parser.add_argument("--only", help="parts of cells' names, with commas")
  parser.add_argument("--workdir", help="folder; by default runs/TABLE")
  parser.add_argument("--data_dir", help="as in the experiments")
  split = argv.index("--") if "--" in argv else len(argv)
  args, extra = parser.parse_args(argv[:split]), list(argv[split + 1 :])
  if args.table is None:
    for name, table in known.items():
      print(f"{name}: {table.title}")
      if args.list:
        for cell in table.cells:
          print(f"  {cell.name}: {cell.title}")
    if not args.list:
      parser.error("--table: choose one of these; --list says more")
    return
  table = known[args.table]
  parts = [part.strip() for part in args.only.split(",")] if args.only else [""]
  for part in parts:
    if not any(part in cell.name for cell in table.cells):
      parser.error(f"--only={args.only}: no cell {part!r}; see --list")
  cells = [c for c in table.cells if any(part in c.name for part in parts)]
  for flag in extra:
    if flag.lstrip("-").startswith(("workdir", "flagfile")):
      parser.error(f"{flag}: give --workdir before --; cells have their flags")
  if args.data_dir:
    extra.append(f"--data_dir={args.data_dir}")
  workdir = pathlib.Path(args.workdir or pathlib.Path("runs", args.table))
  workdir = workdir.expanduser()
  results = {
    cell.name: read_result(workdir / cell.name)
    for cell in table.cells
    if has_result(workdir / cell.name)
  }
  for cell in cells:
    results[cell.name] = run_cell(
      table.script, cell, workdir / cell.name, extra
    )
    write(workdir, table.title, rows_of(table.cells, results))
    if table.axis:
      draw(workdir, table, results)
  print((workdir / "table.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
  main(sys.argv[1:])
