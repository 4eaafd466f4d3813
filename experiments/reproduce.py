r"""Runs a table of a paper and puts our numbers next to the published ones.

  python experiments/reproduce.py --table=codist_table1_cifar --data_dir=DIR
  python experiments/reproduce.py --list

Each cell is a run in a folder of its own, so repeating the command resumes
where it stopped, and finished cells are not run again. After each cell
`table.md` and `table.csv` in --workdir (for codist_fig4 also `figure.png`)
contain the results so far. Flags after `--` are passed to every run:

  python experiments/reproduce.py --table=fml_table1 --only=cnn1 \
      --data_dir=DIR -- --rounds=60

With --seeds=0,1,2 every cell is run with each seed, and the table has means and
standard deviations. Cells can run in parallel, on several machines that share
--workdir: --commands prints the commands of the cells, and --tabulate writes
the table of the finished ones.

The papers tuned each cell; the cells' flags were chosen by hand, for a few of
them. With --search=N each cell is tuned first, by N trials that held-out data
judges, in --workdir/search, and then run with the values of the best; the first
trial has the cell's own:

  python experiments/reproduce.py --table=codist_table1_cifar --data_dir=DIR \
      --search=64 --search_rounds=300 --search_flags="--block=8"
"""

import argparse
from collections.abc import Collection, Mapping, Sequence
import csv
import io
import json
import pathlib
import re
import shlex
import signal
import statistics
import subprocess
import sys
from typing import NamedTuple

import make_flags
import tables

from hetfl.run import logs, training

_WIDE = 16  # columns


def rows_of(
  cells: Sequence[tables.Cell], results: Mapping[str, Sequence[Mapping]]
) -> list[list[str]]:
  """The table as rows of text, published numbers beside ours.

  Args:
    cells: the table's cells.
    results: cell name -> the content of `result.json` of each seed.

  Returns:
    A header, and a row for each finished cell: its title; for each number ours
    (mean ± standard deviation if there are several seeds) and, if any cell has
    a published one, the published one and the difference, in percent; then
    rounds and minutes.
  """
  from hetfl.run import report  # takes a second

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
    seeds = results.get(cell.name)
    if not seeds:
      continue
    row = [cell.title]
    for path in paths:
      ours = [tables.lookup(result, path) for result in seeds]
      theirs = cell.published.get(path)
      row.append("" if None in ours else report.cell(ours, factor=100))
      if path in known:
        row.append("" if theirs is None else f"{theirs:.2f}")
        both = theirs is not None and None not in ours
        difference = 100 * statistics.fmean(ours) - theirs if both else None
        row.append("" if difference is None else f"{difference:+.2f}")
    seconds = [result.get("seconds") for result in seeds]
    row.append(str(seeds[0].get("rounds", "")))
    if None in seconds:
      row.append("")
    else:  # Includes FedMD's phases before the collaboration.
      before = [sum(r.get("phase_seconds", {}).values()) for r in seeds]
      minutes = [(s + b) / 60 for s, b in zip(seconds, before)]
      row.append(report.cell(minutes, "{:.1f}"))
    rows.append(row)
  return rows


def write(
  folder: pathlib.Path,
  title: str,
  rows: Sequence[Sequence[str]],
  flags: Sequence[str] = (),
) -> None:
  """Writes `table.md`, with a column per run if it is wide, and `table.csv`.

  Args:
    folder: the folder to write to.
    title: the table's title.
    rows: the rows from `rows_of`.
    flags: flags of all runs besides those of their cells.
  """
  text = io.StringIO()
  csv.writer(text, lineterminator="\n").writerows(rows)
  logs.write_bytes(folder / "table.csv", text.getvalue().encode())
  if len(rows[0]) > _WIDE:
    rows = list(zip(*rows))
  lines = [f"# {title}", ""]
  if flags:
    lines += [f"All runs with `{' '.join(flags)}`.", ""]
  for i, row in enumerate(rows):
    cells = [cell.replace("|", "\\|") for cell in row]  # as in |P_H|
    lines.append("| " + " | ".join(cells) + " |")
    if i == 0:
      lines.append("|---" * len(row) + "|")
  logs.write_bytes(folder / "table.md", ("\n".join(lines) + "\n").encode())


def draw(
  folder: pathlib.Path,
  table: tables.Table,
  results: Mapping[str, Sequence[Mapping]],
) -> None:
  """Draws the results of a table's cells against its axis, to `figure.png`.

  If cells were tuned, `figure_trials.png` has the means of their searches' best
  trials, as the paper's figure does.

  Args:
    folder: the table's folder, to which it writes.
    table: a table with an axis; a cell without that flag is a horizontal line.
    results: cell name -> the content of `result.json` of each seed; the mean is
      drawn.
  """
  from hetfl.run import report  # takes a second

  points, of_trials, tops = {}, {}, set()
  for cell in table.cells:
    tuned = _read(folder / "search" / cell.name / "result.json") or {}
    tops |= {tuned["top"]} if "test" in tuned else set()
    x = cell.flags.get(table.axis)
    for path in cell.published:
      name = tables.label(path)
      label = f"{cell.flags['algorithm']}, {name}"
      values = [tables.lookup(r, path) for r in results.get(cell.name, ())]
      if values and None not in values:
        point = (x, statistics.fmean(values))
        points.setdefault(label, []).append(point)
      if name in tuned.get("test", ()):
        of_trials.setdefault(label, []).append((x, tuned["test"][name]))
  report.dependence(
    points, folder / "figure.png", axis=table.axis, title=table.title
  )
  if of_trials:
    report.dependence(
      of_trials,
      folder / "figure_trials.png",
      axis=table.axis,
      title=f"{table.title}: means of the best"
      f" {' or '.join(map(str, sorted(tops)))} trials",
    )


class Search(NamedTuple):
  """How cells are tuned before they are run.

  Attributes:
    folder: has a folder for each cell's search.
    trials: how many trials a cell has.
    rounds: how many rounds a trial has; the cell's, if it is `None`.
    flags: further flags of `tune.py`.
    extra: further flags of the trials.
  """

  folder: pathlib.Path
  trials: int
  rounds: int | None
  flags: Sequence[str]
  extra: Sequence[str]

  def command_of(self, script: str, cell: tables.Cell) -> list[str]:
    """The command that tunes a cell of an experiment."""
    return [
      sys.executable,
      str(tables.HERE / "tune.py"),
      f"--experiment={pathlib.Path(script).stem}",
      f"--trials={self.trials}",
      f"--workdir={self.folder / cell.name}",
      *self.flags,
      "--",
      f"--flagfile={tables.FLAG_FILES / cell.name}.flags",
      *self.extra,
      *([f"--rounds={self.rounds}"] if self.rounds else []),
    ]


def command_of(
  script: str,
  cell: tables.Cell,
  folder: pathlib.Path,
  extra: Sequence[str],
  search: Search | None = None,
) -> list[str]:
  """The command that runs or resumes a cell in a folder.

  Args:
    script: the experiment.
    cell: the cell.
    folder: the folder.
    extra: further flags.
    search: the search whose best values it has; `None` for the cell's own.

  Returns:
    The command's words.
  """
  flags = [f"--flagfile={tables.FLAG_FILES / cell.name}.flags"]
  if search:
    flags = [
      f"--flagfile={search.folder / cell.name / 'best.flags'}",
      f"--rounds={cell.flags['rounds']}",
    ]
    if script == "fml.py":  # The search's are training images again.
      extra = [*extra, "--heldout_examples=0"]
  return [
    sys.executable,
    str(tables.HERE / script),
    *flags,
    f"--workdir={folder}",
    *extra,
  ]


def shared_phases(
  cell: tables.Cell, workdir: pathlib.Path, seeds: Sequence[str]
) -> list[str]:
  """The flag that reuses the public training of `cell.like`, if possible.

  Args:
    cell: the cell.
    workdir: the table's folder.
    seeds: the seeds of each cell; if empty, each has one run.

  Returns:
    `--pretrained`, if the public training of `cell.like` is finished for all
    seeds and this cell's has not begun; else nothing.
  """
  names = [f"seed{seed}" for seed in seeds] or ["."]
  done = [workdir / cell.like / n / "public" / "result.json" for n in names]
  begun = [workdir / cell.name / n / "public" for n in names]
  if any(p.exists() for p in begun) or not all(p.exists() for p in done):
    return []
  return [f"--pretrained={workdir / cell.like}"]


def run_cell(command: Sequence[str]) -> int:
  """Runs a cell's command.

  Args:
    command: its words.

  Returns:
    The run's exit status.

  Raises:
    SystemExit: if a signal stopped it.
  """
  print(shlex.join(command), flush=True)
  process = subprocess.Popen(command)
  # If it has reached the run already, this second one does nothing.
  with training.stop_signals(process.send_signal) as caught:
    code = process.wait()  # A stopped run saves a checkpoint first.
  if caught:
    sys.exit(128 + caught[0])
  return code


def read_results(folder: pathlib.Path, seeds: Sequence[str]) -> list[dict]:
  """The results of a cell's runs; none until all of them are finished."""
  places = [folder / f"seed{seed}" for seed in seeds] or [folder]
  results = [read_result(place) for place in places]
  return results if all(results) else []


def read_result(folder: pathlib.Path) -> dict | None:
  """The result of a finished run; if it has several algorithms, by their names.

  Args:
    folder: the run's folder.

  Returns:
    The content of `result.json`, or those of all algorithms' folders with the
    rounds of one and the seconds of all. `None` if any is not finished.
  """
  if (folder / "config.json").exists():  # One run; folders in it are phases.
    return _of_run(folder)
  # All algorithms have a config before the first trains; seeds are left out.
  places = [path.parent for path in sorted(folder.glob("*/config.json"))]
  results = {
    place.name: _of_run(place)
    for place in places
    if not re.fullmatch(r"seed\d+", place.name)
  }
  if not results or not all(results.values()):
    return None
  rounds = max(result["rounds"] for result in results.values())
  seconds = sum(result["seconds"] for result in results.values())
  return {**results, "rounds": rounds, "seconds": seconds}


def _of_run(folder: pathlib.Path) -> dict | None:
  """A run's `result.json`, if it covers all rounds of its `config.json`."""
  result, config = (_read(folder / f"{n}.json") for n in ("result", "config"))
  done = result and config and result["rounds"] == config["config"]["rounds"]
  return result if done else None


def _read(path: pathlib.Path) -> dict | None:
  """A file of JSON; `None` if there is none."""
  try:
    return json.loads(path.read_bytes())
  except FileNotFoundError:
    return None


def make_parser(known: Mapping[str, tables.Table]) -> argparse.ArgumentParser:
  """The parser of the arguments before `--`."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--table",
    choices=list(known),
    metavar="TABLE",
    help="the table or figure to run; --list names them",
  )
  parser.add_argument("--list", action="store_true", help="list the tables")
  parser.add_argument("--only", help="parts of cells' names, with commas")
  parser.add_argument("--workdir", help="folder; by default runs/TABLE")
  parser.add_argument("--seeds", help="seeds of each cell, with commas")
  parser.add_argument(
    "--data_dir", help="folder of the data sets; by default HETFL_DATA_DIR"
  )
  parser.add_argument(
    "--download",
    action="store_true",
    help="download data sets that are not there into --data_dir",
  )
  parser.add_argument(
    "--keep_going",
    action="store_true",
    help="go on with the next cell if one fails, and say which did at the end",
  )
  parser.add_argument(
    "--search",
    type=int,
    metavar="N",
    help="tune each cell first, by N trials (1,024 in the codistillation"
    " paper), and run it with the best one's values; not for FedMD. FML needs"
    " -- --heldout_examples",
  )
  parser.add_argument(
    "--search_rounds",
    type=int,
    metavar="R",
    help="number of rounds of a trial; by default that of the cell",
  )
  parser.add_argument(
    "--search_flags",
    default="",
    metavar="FLAGS",
    help="flags of the searches, in quotes: see tune.py --help",
  )
  parser.add_argument(
    "--commands",
    action="store_true",
    help="print the commands, a line for each cell and seed, and run nothing;"
    " each cell of FedMD then trains on public data itself, unless"
    " -- --pretrained=FOLDER names a run to reuse",
  )
  parser.add_argument(
    "--tabulate",
    action="store_true",
    help="write the table of the cells that are done, with the --seeds that"
    " they were run with, and run nothing",
  )
  return parser


def run_cells(
  table: tables.Table,
  cells: Sequence[tables.Cell],
  workdir: pathlib.Path,
  seeds: Sequence[str],
  *,
  shown: Sequence[str],
  hidden: Sequence[str],
  keep_going: bool,
  search: Search | None,
) -> dict[str, int]:
  """Runs or resumes cells, and writes the table after each.

  Args:
    table: the table.
    cells: the cells to run.
    workdir: the table's folder.
    seeds: the seeds of each cell; if empty, each has one run.
    shown: flags of all runs that the table shows.
    hidden: flags of all runs that it does not show, such as --data_dir.
    keep_going: whether to go on after a cell that fails.
    search: how cells are tuned first; `None` for not at all.

  Returns:
    The exit statuses of the cells that failed, by name.
  """
  run_now, failed = set(), {}
  titled = [f"--search={search.trials}", *shown] if search else shown
  for cell in cells:
    flags = [*shown, *hidden]
    # Only of cells that this command has run, whose flags are the same.
    if cell.like in run_now and not any("pretrained" in f for f in flags):
      flags += shared_phases(cell, workdir, seeds)
    folder, code = workdir / cell.name, 0
    if search:
      code = run_cell(search.command_of(table.script, cell))
    if not code:
      code = run_cell(command_of(table.script, cell, folder, flags, search))
    if code:
      failed[cell.name] = code
      if not keep_going:
        break
      continue
    run_now.add(cell.name)
    tabulate(table, workdir, seeds, titled, run_now)
  if run_now:
    print((workdir / "table.md").read_text(encoding="utf-8"))
  return failed


def tabulate(
  table: tables.Table,
  workdir: pathlib.Path,
  seeds: Sequence[str],
  shown: Sequence[str] = (),
  run_now: Collection[str] = (),
) -> bool:
  """Writes the table of the finished cells.

  Args:
    table: the table.
    workdir: its folder.
    seeds: the seeds of each cell; if empty, each has one run.
    shown: flags of the cells that this command has run.
    run_now: names of these cells.

  Returns:
    Whether any cell is finished; if not, nothing is written.
  """
  # Reads all cells again, since other processes may be running some.
  results = {c.name: read_results(workdir / c.name, seeds) for c in table.cells}
  done = {name for name, found in results.items() if found}
  if not done:
    return False
  # Cells of earlier commands may have had other flags.
  alike = done <= set(run_now)
  rows = rows_of(table.cells, results)
  write(workdir, table.title, rows, shown if alike else [])
  if table.axis:
    draw(workdir, table, results)
  return True


def main(argv: Sequence[str]) -> None:
  """Runs a table."""
  known = make_flags.tables_of_the_papers()
  parser = make_parser(known)
  split = argv.index("--") if "--" in argv else len(argv)
  args, extra = parser.parse_args(argv[:split]), list(argv[split + 1 :])
  if args.table is None:
    for name, table in known.items():
      print(f"{name}: {table.title}")
      if args.list:
        for cell in table.cells:
          print(f"  {cell.name}: {cell.title}")
    if not args.list:
      parser.error("--table: choose one of these; --list shows their cells")
    return
  if args.commands and args.tabulate:
    parser.error("--commands and --tabulate: give one of them")
  table = known[args.table]
  parts = [part.strip() for part in (args.only or "").split(",")]
  parts = [part for part in parts if part] or [""]
  for part in parts:
    if not any(part in cell.name for cell in table.cells):
      parser.error(f"--only={args.only}: no cell {part!r}; see --list")
  cells = [c for c in table.cells if any(part in c.name for part in parts)]
  for flag in extra:
    if flag.lstrip("-").startswith(("workdir", "flagfile", "seed")):
      parser.error(
        f"{flag}: give --workdir and --seeds before --; cells have their flags"
      )
  try:
    seeds = [str(int(seed)) for seed in (args.seeds or "").split(",") if seed]
  except ValueError:
    parser.error(f"--seeds={args.seeds}: give whole numbers with commas")
  shown = [*([f"--seeds={','.join(seeds)}"] if seeds else []), *extra]
  hidden = [f"--data_dir={args.data_dir}"] if args.data_dir else []
  hidden += ["--download"] if args.download else []
  workdir = pathlib.Path(args.workdir or pathlib.Path("runs", args.table))
  workdir = workdir.expanduser()
  search = None
  if args.search is not None:
    if table.script == "fedmd.py":
      parser.error(f"--search={args.search}: FedMD has no search; leave it out")
    search = Search(
      workdir / "search",
      args.search,
      args.search_rounds,
      shlex.split(args.search_flags),
      [*extra, *hidden],
    )
  elif args.search_rounds or args.search_flags:
    parser.error("--search_rounds, --search_flags: only with --search")
  if args.commands:
    for cell in cells:
      folder = workdir / cell.name
      if search:
        first = search.command_of(table.script, cell)
        flags = [*shown, *hidden]
        then = command_of(table.script, cell, folder, flags, search)
        both = f"{shlex.join(first)} && exec {shlex.join(then)}"
        print(shlex.join(["bash", "-c", both]))
        continue
      # The folders that a single command for all seeds would use.
      runs = {folder / f"seed{seed}": [f"--seed={seed}"] for seed in seeds}
      for place, seed in (runs or {folder: []}).items():
        # A --pretrained folder has one folder per seed too.
        rest = [
          f"{flag}/{place.name}" if seed and "pretrained=" in flag else flag
          for flag in extra
        ]
        flags = [*seed, *rest, *hidden]
        print(shlex.join(command_of(table.script, cell, place, flags)))
  elif args.tabulate:
    if not tabulate(table, workdir, seeds):
      parser.error(
        f"--tabulate: no cell is done in {workdir}; give the --workdir and the"
        " --seeds that the cells were run with"
      )
    print((workdir / "table.md").read_text(encoding="utf-8"))
  else:
    failed = run_cells(
      table,
      cells,
      workdir,
      seeds,
      shown=shown,
      hidden=hidden,
      keep_going=args.keep_going,
      search=search,
    )
    if failed:
      codes = ", ".join(f"{n} (status {code})" for n, code in failed.items())
      sys.exit(
        f"error: cells failed (see above): {codes}; after a fix, repeat the"
        " command to resume"
      )


if __name__ == "__main__":
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # For `--list | head`.
  main(sys.argv[1:])
