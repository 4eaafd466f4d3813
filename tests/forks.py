"""Runs scripts in forks of this process, which has imported what they import.

So that tests can run experiments a hundred times without importing JAX each
time. Each line of standard input starts a run, `[script, arguments, output,
errors]`, the last two files to be written, and is answered by its process id;
or asks for a run, `[id, whether to wait for its end]`, and is answered by its
status, null before it ends. The argument is the number of seconds after which a
run is killed.
"""

import gc
import json
import os
import pathlib
import runpy
import signal
import sys


def start(seconds: int, script: str, arguments: list, *files: str) -> int:
  """Starts a run, in a process group of its own."""
  child = os.fork()
  if child:
    os.setpgid(child, child)
    return child
  signal.alarm(seconds)
  for number, path in enumerate((os.devnull, *files)):
    mode = os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY
    os.dup2(os.open(path, mode), number)
  sys.argv = [script, *arguments]
  runpy.run_path(script, run_name="__main__")
  sys.exit()


def main(seconds: int) -> None:
  """Serves until standard input ends."""
  ended = {}
  for line in iter(sys.stdin.readline, ""):
    request = json.loads(line)
    if isinstance(request[0], str):
      answer = start(seconds, *request)
    else:
      child, wait = request
      if child not in ended:
        found, status = os.waitpid(child, 0 if wait else os.WNOHANG)
        ended |= {child: os.waitstatus_to_exitcode(status)} if found else {}
      answer = ended.get(child)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
  root = pathlib.Path(__file__).resolve().parent.parent
  sys.path[0] = str(root / "experiments")
  import codist_run  # noqa: F401
  import compare_run  # noqa: F401
  import fedmd_run  # noqa: F401
  import fml_run  # noqa: F401
  import tune_run  # noqa: F401

  gc.freeze()  # What is imported is not looked through again.
  gc.set_threshold(20_000, 20, 20)
  main(int(sys.argv[1]))
