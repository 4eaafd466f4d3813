"""Runs scripts in forks of this process, which has imported what they import.

So that tests can run experiments a hundred times without importing JAX each
time. Each line of standard input is a run, `[script, arguments, output,
errors]`, the last two files to be written; each is answered by its status. The
argument is the number of seconds after which a run is killed.
"""

import json
import os
import pathlib
import runpy
import signal
import sys


def main(seconds: int) -> None:
  """Serves until standard input ends."""
  for line in iter(sys.stdin.readline, ""):
    script, arguments, *files = json.loads(line)
    child = os.fork()
    if child == 0:
      signal.alarm(seconds)
      for number, path in enumerate((os.devnull, *files)):
        mode = os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY
        os.dup2(os.open(path, mode), number)
      sys.argv = [script, *arguments]
      runpy.run_path(script, run_name="__main__")
      sys.exit()
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
  root = pathlib.Path(__file__).resolve().parent.parent
  sys.path[0] = str(root / "experiments")
  import codist_run  # noqa: F401
  import fedmd_run  # noqa: F401
  import fml_run  # noqa: F401

  main(int(sys.argv[1]))
