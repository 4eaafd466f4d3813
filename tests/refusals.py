"""Runs a script with command lines that it should refuse, one after another.

Its arguments are the script and the command lines, as JSON. Prints, as JSON,
the status of each and what it wrote to standard error.
"""

import contextlib
import io
import json
import os
import runpy
import sys
import traceback


def attempt(script: str, arguments: list[str]) -> tuple[bool, str]:
  """Whether a command line was refused, and what it wrote."""
  sys.argv, errors, code = [script, *arguments], io.StringIO(), 0
  with contextlib.redirect_stderr(errors), open(os.devnull, "w") as nothing:
    try:
      with contextlib.redirect_stdout(nothing):
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
      code = end.code
    except BaseException:
      code = traceback.format_exc()
  return code not in (0, None), f"{errors.getvalue()}{code}\n"


if __name__ == "__main__":
  _, name, lines = sys.argv
  print(json.dumps([attempt(name, line) for line in json.loads(lines)]))
