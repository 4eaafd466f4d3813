"""The tables of the papers, each one file of `experiments/tables`."""

from collections.abc import Mapping, Sequence
import importlib
import pathlib
import re
import textwrap
import tomllib
from typing import Any, NamedTuple

from settings import shown

HERE = pathlib.Path(__file__).resolve().parent
FLAG_FILES = HERE / "flags"


class Cell(NamedTuple):
  """One run of a table.

  Attributes:
    name: the name of its flag file, without `.flags`.
    title: what it is, in a line.
    flags: its flags.
    published: published numbers in percent, by name; numbers that the paper
      only plots are left out.
    notes: what is said of it besides.
    like: the cell with the same training on public data, if there is one; the
      later of the two reuses it.
  """

  name: str
  title: str
  flags: Mapping[str, Any]
  published: Mapping[str, float] = {}
  notes: str = ""
  like: str | None = None


class Table(NamedTuple):
  """A table or figure of a paper.

  Attributes:
    title: the paper, and the number of the table or figure.
    command: the experiment that runs its cells, such as `codist`.
    cells: its runs.
    numbers: name -> path in `result.json`, such as
      `pools.small.test_accuracy`; in a cell of several algorithms or methods
      paths begin with their names.
    notes: what is said of all cells.
    axis: the flag on a figure's horizontal axis.
  """

  title: str
  command: str
  cells: Sequence[Cell]
  numbers: Mapping[str, str]
  notes: str
  axis: str | None = None


def tables() -> dict[str, Table]:
  """All tables and figures, by name."""
  found = {}
  for path in sorted((HERE / "tables").glob("*.toml")):
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    shared = entries.pop("flags", {})
    cells = [
      Cell(**cell | {"flags": shared | cell["flags"]})
      for cell in entries.pop("cells")
    ]
    found[path.stem] = Table(cells=cells, **entries)
  return found


def flag_file(table: Table, cell: Cell) -> str:
  """The text of a cell's flag file.

  Args:
    table: the cell's table.
    cell: the cell.

  Returns:
    A header of comments; the cell's flags; and the defaults that depend on what
    is run, such as the paper's hyper-parameters.
  """
  published = [f"{n} {v:.2f} %" for n, v in cell.published.items()]
  several = [text for text in published if not re.search(r"\d+ \w+ \d", text)]
  notes = f"{table.notes} {cell.notes}"
  head = [
    f"{table.title}: {cell.title}",
    f"  python experiments/{table.command}.py \\",
    f"      --flagfile=experiments/flags/{cell.name}.flags --data_dir=DIR",
    *textwrap.wrap(notes, 78, break_long_words=False, break_on_hyphens=False),
    *([f"Published: {', '.join(several)}."] if several else ()),
    "Our runs, where there are any: results/README.md.",
  ]
  flags = {name: shown(value) for name, value in cell.flags.items()}
  command = importlib.import_module(f"{table.command}_run")
  declared = command.SETTINGS.declared()
  values = {name: declared[name].read(text) for name, text in flags.items()}
  for which in values.get("algorithm") or values.get("method", ("",)):
    words = command.words(values, which)
    s = command.SETTINGS.resolve(values, words)
    for name, value in s.of_kind("result").items():
      of_run = declared[name].cases or declared[name].search
      if of_run and value is not None and value is not False:
        flags.setdefault(name, shown(value))
  lines = [f"# {line}".rstrip() for line in head]
  lines += [f"--{name}={value}" for name, value in flags.items()]
  return "\n".join(lines) + "\n"


def lookup(result: Any, path: str) -> Any:
  """A number of `result.json` by its path; `None` if it is not there.

  `*` takes the mean over a list, `0-3` over those of its entries.

  >>> lookup({"pools": {"small": {"test_accuracy": 0.5}}},
  ...        "pools.small.test_accuracy")
  0.5
  >>> clients = [{"accuracy": x} for x in (0.5, 1.0, 0.0)]
  >>> [lookup({"clients": clients}, f"clients.{which}.accuracy")
  ...  for which in ("*", "0-1", "2", "2-3")]
  [0.5, 0.75, 0.0, None]
  """
  name, _, rest = path.partition(".")
  if isinstance(result, list):
    first, _, last = name.replace("*", f"0-{len(result) - 1}").partition("-")
    chosen = range(int(first), int(last or first) + 1)
    if not chosen or chosen[-1] >= len(result):
      return None
    values = [lookup(result[i], rest) for i in chosen]
    return None if None in values else sum(values) / len(values)
  if not isinstance(result, Mapping) or name not in result:
    return None
  return lookup(result[name], rest) if rest else result[name]
