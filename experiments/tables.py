"""The tables of the papers: cells, each with a flag file and a run."""

from collections.abc import Mapping, Sequence
import csv
import pathlib
import re
import textwrap
from typing import Any, NamedTuple

from hetfl.run import logs

HERE = pathlib.Path(__file__).resolve().parent
FLAG_FILES = HERE / "flags"
PUBLISHED = HERE / "published"


class Cell(NamedTuple):
  """One run of a table.

  Attributes:
    name: the name of its flag file, without `.flags`.
    title: what it is, in a line.
    flags: the flags of the flag file.
    published: path of a number in `result.json`, such as
      `pools.small.test_accuracy`, -> the published number in percent; `None`
      where the paper only plots it. In a cell of several algorithms paths begin
      with the algorithm: `fml.global.test_accuracy`.
    notes: further sentences for the header of the flag file.
    like: the cell with the same training on public data, if there is one; the
      later of the two reuses it.
  """

  name: str
  title: str
  flags: Mapping[str, Any]
  published: Mapping[str, float | None]
  notes: Sequence[str] = ()
  like: str | None = None


class Table(NamedTuple):
  """A table or figure of a paper.

  Attributes:
    title: the paper, and the number of the table or figure.
    script: the experiment that runs its cells, such as `codist.py`.
    cells: its runs.
    axis: the flag on a figure's horizontal axis.
  """

  title: str
  script: str
  cells: Sequence[Cell]
  axis: str | None = None


def read_published(name: str) -> list[dict[str, str]]:
  """Reads a file of published numbers.

  Args:
    name: its name in `experiments/published`; lines that begin with # are
      comments.

  Returns:
    Its rows.
  """
  lines = (PUBLISHED / name).read_text(encoding="utf-8").splitlines()
  return list(csv.DictReader(line for line in lines if line[0] != "#"))


def flag_file(table: Table, cell: Cell) -> str:
  """The text of a cell's flag file.

  Args:
    table: the cell's table.
    cell: the cell.

  Returns:
    A header of comments, then the flags.
  """
  head = [
    f"{table.title}: {cell.title}",
    f"  python experiments/{table.script} \\",
    f"      --flagfile=experiments/flags/{cell.name}.flags --data_dir=DIR",
    *textwrap.wrap(
      " ".join(cell.notes),
      width=78,
      break_long_words=False,
      break_on_hyphens=False,
    ),
  ]
  values = ", ".join(
    f"{label(path)} {value:.2f} %"
    for path, value in cell.published.items()
    if value is not None and not re.search(r"\.\d+\.", path)
  )
  if values:
    head.append(f"Published: {values}.")
  head.append("Our runs, where there are any: results/README.md.")
  lines = [f"# {line}".rstrip() for line in head]
  return "\n".join(lines) + "\n" + logs.flags_text(dict(cell.flags)) + "\n"


def label(path: str) -> str:
  """A short name for a number in `result.json`.

  >>> label("pools.small.test_accuracy"), label("global.test_accuracy")
  ('small', 'global')
  >>> label("pools.large.test_accuracy_questions")
  'large questions'
  >>> label("fml.clients.*.validation_accuracy")
  'fml clients'
  >>> label("independent.clients.0.best_validation_accuracy")
  'independent clients 0 best'
  >>> label("parties.*.final_accuracy")
  'parties final'
  """
  *middle, last = path.split(".")
  words = [word for word in middle if word not in ("pools", "*")]
  name = last.removeprefix("best_")
  words.append(name.partition("test_accuracy")[2].strip("_"))
  if "parties" in middle:
    words.append(name.removesuffix("_accuracy"))
  if name != last:
    words.append("best")
  return " ".join(filter(None, words)) or last


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
  some = re.fullmatch(r"(\d+)-(\d+)", name)
  if isinstance(result, list) and (some or name == "*"):
    first, last = map(int, some.groups()) if some else (0, len(result) - 1)
    chosen = range(first, last + 1)
    values = [lookup(result, f"{i}.{rest}") for i in chosen]
    return None if None in values or not values else sum(values) / len(values)
  if isinstance(result, list) and name.isdigit() and int(name) < len(result):
    return lookup(result[int(name)], rest) if rest else result[int(name)]
  if not isinstance(result, Mapping) or name not in result:
    return None
  return lookup(result[name], rest) if rest else result[name]
