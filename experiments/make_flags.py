"""Writes what is made from declarations: flag files and `docs/settings.md`.

  python experiments/make_flags.py

The cells of the papers' tables, with their published numbers, are in
`experiments/tables`; the settings are declared in `codist.py`, `fml.py`,
`fedmd.py`, `compare.py`, `tune.py`, `reproduce.py`, `summarize.py` and
`shared.py`. A test checks that the files are up to date.
"""

import sys

import codist
import compare
import fedmd
import fml
import reproduce
import settings
import shared
import summarize
import tables
import tune

from hetfl.run import logs

_HEAD = """# Settings

Made by `python experiments/make_flags.py` from what `experiments/` declares.
Words in parentheses, and after "For", say what a run is: its data set, its
algorithm, engine and the like; `own_models` are models of your own. Of several
defaults that fit a run, the last counts. `--flagfile=FILE` reads flags from a
file, one on each line.
"""


def files() -> dict[str, str]:
  """Each file's path below the repository, and its text."""
  found = {
    f"experiments/flags/{cell.name}.flags": tables.flag_file(table, cell)
    for table in tables.tables().values()
    for cell in table.cells
  }
  of_all, parts = shared.Run.declared(), [_HEAD]
  for title, cls in {
    "All commands": shared.Run,
    "`codist.py`": codist.Codist,
    "`fml.py`": fml.Fml,
    "`fedmd.py`": fedmd.FedMD,
    "`compare.py`": compare.Compare,
    "`tune.py`": tune.Search,
    "`reproduce.py`": reproduce.Reproduce,
    "`summarize.py`": summarize.Summarize,
  }.items():
    # Those that a command declares anew have a default or range of its own.
    again = {n for n, s in cls.declared().items() if s == of_all.get(n)}
    leave_out = set() if cls is shared.Run else again
    parts.append(f"\n## {title}\n\n{settings.table_of(cls, leave_out)}\n")
  return found | {"docs/settings.md": "".join(parts)}


def main() -> None:
  """Writes the files."""
  if sys.argv[1:]:
    sys.exit(__doc__)
  for name, text in files().items():
    logs.write_bytes(tables.HERE.parent / name, text.encode())
    print(name)


if __name__ == "__main__":
  main()
