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
them. With --search=N each cell is tuned first, by N trials judged on held-out
data, in --workdir/search, and then run with the best one's values; the first
trial has the cell's own:

  python experiments/reproduce.py --table=codist_table1_cifar --data_dir=DIR \
      --search=64 --search_rounds=300 --search_flags="--block=8"
"""

from collections.abc import Collection, Mapping, Sequence
import csv
import dataclasses
import io
import pathlib
import re
import shlex
import signal
import statistics
import subprocess
import sys

import settings
from settings import count, setting, UsageError
import tables

from hetfl.run import logs, report, training

_WIDE = 16  # columns


def rows_of(
  table: tables.Table, results: Mapping[str, Sequence[Mapping]]
) -> list[list[str]]:
  """The table as rows of text, published numbers beside ours.

  Args:
    table: the table.
    results: cell name -> the content of `result.json` of each seed.

  Returns:
    A header, and a row for each finished cell: its title; for each number ours
    (mean ± standard deviation if there are several seeds) and, if any cell has
    a published one, the published one and the difference, in percent; then
    rounds and minutes.
  """
  known = {name for cell in table.cells for name in cell.published}
  head = ["run"]
  for name in table.numbers:
    more = [f"{name}, published", "difference"] if name in known else []
    head += [name, *more]
  rows = [[*head, "rounds", "minutes"]]
  for cell in table.cells:
    seeds = results.get(cell.name)
    if not seeds:
      continue
    row = [cell.title]
    for name, path in table.numbers.items():
      ours = [tables.lookup(result, path) for result in seeds]
      row.append("" if None in ours else report.cell(ours, factor=100))
      theirs = cell.published.get(name)
      if name in known:
        row.append("" if theirs is None else f"{theirs:.2f}")
        one = theirs is None or None in ours
        row.append(
          "" if one else f"{100 * statistics.fmean(ours) - theirs:+.2f}"
        )
    row.append(report.cell([r["rounds"] for r in seeds], "{:d}"))
    minutes = [
      # With FedMD's phases before the collaboration.
      sum([r["seconds"], *r.get("phase_seconds", {}).values()]) / 60
      for r in seeds
    ]
    rows.append([*row, report.cell(minutes, "{:.1f}")])
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
  from hetfl.run import charts  # takes a second

  points, of_trials, tops = {}, {}, set()
  for cell in table.cells:
    tuned = logs.read_json(folder / "search" / cell.name / "result.json") or {}
    x = cell.flags.get(table.axis)
    for name, path in table.numbers.items():
      label = f"{cell.flags['algorithm']}, {name}"
      values = [tables.lookup(r, path) for r in results.get(cell.name, ())]
      if values and None not in values:
        point = (x, statistics.fmean(values))
        points.setdefault(label, []).append(point)
      if name in tuned.get("test", ()):
        tops.add(str(tuned["top"]))
        of_trials.setdefault(label, []).append((x, tuned["test"][name]))
  best = f"{table.title}: means of the best {' or '.join(sorted(tops))} trials"
  for drawn, name, title in (
    (points, "figure.png", table.title),
    (of_trials, "figure_trials.png", best),
  ):
    if drawn:
      charts.dependence(drawn, folder / name, axis=table.axis, title=title)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reproduce(settings.Settings):
  """A table that is run.

  Attributes:
    table: The table or figure to run; --list names them.
    list: List the tables, and run nothing.
    only: Only cells whose names have one of these parts.
    workdir: Folder; by default runs/TABLE.
    seeds: Seeds of each cell.
    data_dir: Folder of the data sets; by default HETFL_DATA_DIR.
    download: Download data sets that are not there into --data_dir.
    search: Tune each cell first, by this many trials (1,024 in the
      codistillation paper), and run it with the best one's values; not for
      FedMD and methods side by side. FML needs -- --heldout_examples.
    search_rounds: Number of rounds of a trial; by default that of the cell.
    search_flags: Flags of the searches, in quotes; see tune.py --help.
    commands: Print the commands, a line for each cell and seed, and run
      nothing; each cell of FedMD then trains on public data itself, unless --
      --pretrained=FOLDER names a run to reuse.
    tabulate: Write the table of the cells that are done, with the --seeds that
      they were run with, and run nothing.
  """

  table: str | None = setting()
  list: bool = setting(False)
  only: tuple[str, ...] | None = setting()
  workdir: str | None = setting()
  seeds: tuple[int, ...] = setting((), low=0, distinct=True)
  data_dir: str | None = setting()
  download: bool = setting(False)
  search: int | None = count()
  search_rounds: int | None = count()
  search_flags: str = setting("")
  commands: bool = setting(False)
  tabulate: bool = setting(False)


class Cells:
  """How the cells of a table are run.

  Args:
    table: the table.
    args: the arguments of the command.
    extra: flags of all runs.
  """

  def __init__(
    self, table: tables.Table, args: Reproduce, extra: Sequence[str]
  ):
    self.table, self.args, self.extra = table, args, extra
    self.folder = pathlib.Path(args.workdir or f"runs/{args.table}")
    self.places = [f"--data_dir={args.data_dir}"] if args.data_dir else []
    self.places += ["--download"] if args.download else []
    seeds = [f"--seeds={settings.shown(args.seeds)}"]
    self.seeds = seeds if args.seeds else []
    try:
      self.search_flags = shlex.split(args.search_flags)
    except ValueError as error:
      raise UsageError(f"--search_flags={args.search_flags}: {error}") from None

  def tuning(self, cell: tables.Cell) -> list[str]:
    """The command that tunes a cell."""
    rounds = self.args.search_rounds
    return [
      sys.executable,
      str(tables.HERE / "tune.py"),
      f"--experiment={self.table.command}",
      f"--trials={self.args.search}",
      f"--workdir={self.folder / 'search' / cell.name}",
      *self.search_flags,
      "--",
      f"--flagfile={tables.FLAG_FILES / cell.name}.flags",
      *self.extra,
      *self.places,
      *([f"--rounds={rounds}"] if rounds else []),
    ]

  def command(
    self, cell: tables.Cell, place: pathlib.Path, *flags: str
  ) -> list[str]:
    """The command that runs or resumes a cell, tuned or not, in a folder."""
    file, first, last = tables.FLAG_FILES / f"{cell.name}.flags", [], []
    if self.args.search:
      text = file.read_text(encoding="utf-8")
      first = re.findall(r"(?m)^--rounds=.*$", text)
      file = self.folder / "search" / cell.name / "best.flags"
      if self.table.command == "fml":  # The search's are for training again.
        last = ["--heldout_examples=0"]
    return [
      sys.executable,
      str(tables.HERE / f"{self.table.command}.py"),
      f"--flagfile={file}",
      *first,
      f"--workdir={place}",
      *flags,
      *self.places,
      *last,
    ]

  def listed(self, cell: tables.Cell) -> list[list[str]]:
    """The commands of a cell, one for each seed, each to be run by itself."""
    place = self.folder / cell.name
    if self.args.search:
      then = self.command(cell, place, *self.seeds, *self.extra)
      both = f"{shlex.join(self.tuning(cell))} && exec {shlex.join(then)}"
      return [["bash", "-c", both]]
    if not self.args.seeds:
      return [self.command(cell, place, *self.extra)]
    commands = []
    for seed in self.args.seeds:
      # A --pretrained folder has one folder per seed too.
      rest = [
        f"{flag}/seed{seed}" if "pretrained=" in flag else flag
        for flag in self.extra
      ]
      folder = place / f"seed{seed}"  # As with one command for all seeds.
      commands.append(self.command(cell, folder, f"--seed={seed}", *rest))
    return commands

  def run(self, cells: Sequence[tables.Cell]) -> dict[str, int]:
    """Runs or resumes cells, and writes the table after each.

    Args:
      cells: the cells.

    Returns:
      The exit statuses of the cells that failed, by name.
    """
    run_now, failed = set(), {}
    for cell in cells:
      flags, code = [*self.seeds, *self.extra], 0
      # Only of cells that this command has run, whose flags are the same.
      if cell.like in run_now and not any("pretrained" in f for f in flags):
        flags += self.shared_phases(cell)
      if self.args.search:
        code = run_cell(self.tuning(cell))
      if not code:
        code = run_cell(self.command(cell, self.folder / cell.name, *flags))
      if not code:
        run_now.add(cell.name)
        self.tabulate(run_now)
        continue
      failed[cell.name] = code
    return failed

  def shared_phases(self, cell: tables.Cell) -> list[str]:
    """The flag that reuses the public training of `cell.like`, if possible.

    It is if that is finished for all seeds, and this cell's has not begun.
    """
    names = [f"seed{seed}" for seed in self.args.seeds] or ["."]
    there, here = self.folder / str(cell.like), self.folder / cell.name
    begun = any((here / n / "public").exists() for n in names)
    done = all((there / n / "public/result.json").exists() for n in names)
    return [f"--pretrained={there}"] if done and not begun else []

  def tabulate(self, run_now: Collection[str] = ()) -> bool:
    """Writes the table of the finished cells.

    Args:
      run_now: names of the cells that this command has run.

    Returns:
      Whether any cell is finished; if not, nothing is written.
    """
    # Reads all cells again, since other processes may be running some.
    results = {
      cell.name: read_results(self.folder / cell.name, self.args.seeds)
      for cell in self.table.cells
    }
    done = {name for name, found in results.items() if found}
    if not done:
      return False
    shown = [f"--search={self.args.search}"] if self.args.search else []
    shown += [*self.seeds, *self.extra]
    # Cells of earlier commands may have had other flags.
    alike = done <= set(run_now)
    rows = rows_of(self.table, results)
    write(self.folder, self.table.title, rows, shown if alike else [])
    if self.table.axis:
      draw(self.folder, self.table, results)
    return True


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
  with training.stop_signals(process.send_signal):
    code = process.wait()  # A stopped run saves a checkpoint first.
  return code


def read_results(folder: pathlib.Path, seeds: Sequence[int]) -> list[dict]:
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
    rounds of one and the seconds of all. `None` if any is not finished; with
    --patience, one with fewer rounds than allowed may be.
  """
  if (folder / "config.json").exists():  # One run; folders in it are phases.
    result = logs.read_json(folder / "result.json")
    config = logs.read_json(folder / "config.json")["config"]
    if not result or config.get("patience"):
      return result
    return result if result["rounds"] == config["rounds"] else None
  # All algorithms have a config before the first trains; seeds are left out.
  results = {
    path.parent.name: read_result(path.parent)
    for path in sorted(folder.glob("*/config.json"))
    if not re.fullmatch(r"seed\d+", path.parent.name)
  }
  if not results or not all(results.values()):
    return None
  rounds = max(result["rounds"] for result in results.values())
  seconds = sum(result["seconds"] for result in results.values())
  return {**results, "rounds": rounds, "seconds": seconds}


def run(args: Reproduce, extra: Sequence[str]) -> None:
  """Runs or lists a table, or prints its commands."""
  known = tables.tables()
  if args.list:
    for name, table in known.items():
      print(f"{name}: {table.title}")
      for cell in table.cells:
        print(f"  {cell.name}: {cell.title}")
    return
  if args.table not in known:
    raise UsageError(f"--table={args.table}: choose from {', '.join(known)}")
  table = known[args.table]
  parts = args.only or ("",)
  for part in parts:
    if not any(part in cell.name for cell in table.cells):
      raise UsageError(f"--only={part}: no cell {part!r}; see --list")
  chosen = [c for c in table.cells if any(part in c.name for part in parts)]
  for flag in extra:
    if flag.lstrip("-").startswith(("workdir", "flagfile", "seed")):
      raise UsageError(
        f"{flag}: give --workdir and --seeds before --; cells have their flags"
      )
  if args.search and table.command not in ("codist", "fml"):
    raise UsageError(
      f"--search={args.search}: {table.command}.py has no search"
    )
  if not args.search and (args.search_rounds or args.search_flags):
    raise UsageError("--search_rounds, --search_flags: only with --search")
  cells, failed = Cells(table, args, extra), {}
  if args.commands:
    for command in (c for cell in chosen for c in cells.listed(cell)):
      print(shlex.join(command))
    return
  if not args.tabulate:
    failed = cells.run(chosen)
  elif not cells.tabulate():
    raise UsageError(
      f"--tabulate: no cell is done in {cells.folder}; give the --workdir and"
      " the --seeds that the cells were run with"
    )
  if (cells.folder / "table.md").exists():
    print((cells.folder / "table.md").read_text(encoding="utf-8"))
  if failed:
    codes = ", ".join(f"{n} (status {code})" for n, code in failed.items())
    raise UsageError(
      f"cells failed (see above): {codes}; after a fix, repeat the command to"
      " resume"
    )


def main(argv: Sequence[str]) -> None:
  """Reads the flags, and runs a table."""
  split = argv.index("--") if "--" in argv else len(argv)
  try:
    given = settings.parse(argv[:split], Reproduce)
    run(Reproduce.resolve(given.values, ()), argv[split + 1 :])
  except ValueError as error:
    sys.exit(f"error: {error}")


if __name__ == "__main__":
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # For `--list | head`.
  main(sys.argv[1:])
