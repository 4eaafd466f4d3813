"""Writes the flag files of the papers' tables.

  python experiments/make_flags.py

The cells, with their published numbers, are defined in `codist_tables.py`,
`fml_tables.py` and `fedmd_tables.py`. A test checks that the files are up to
date.
"""

import codist_tables
import fedmd_tables
import fml_tables
import tables

from hetfl.run import logs


def tables_of_the_papers() -> dict[str, tables.Table]:
  """All tables and figures, by the name that `reproduce.py` knows them by."""
  return codist_tables.tables() | fml_tables.tables() | fedmd_tables.tables()


def flag_files() -> dict[str, str]:
  """Each flag file's name and text."""
  return {
    f"{cell.name}.flags": tables.flag_file(table, cell)
    for table in tables_of_the_papers().values()
    for cell in table.cells
  }


def main() -> None:
  """Writes the files."""
  tables.FLAG_FILES.mkdir(exist_ok=True)
  for name, text in flag_files().items():
    logs.write_bytes(tables.FLAG_FILES / name, text.encode())
    print(tables.FLAG_FILES / name)


if __name__ == "__main__":
  main()
