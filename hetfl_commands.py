"""The commands, wherever hetfl is installed: `hetfl COMMAND [FLAGS]`."""

import pathlib
import runpy
import sys

COMMANDS = (
  "codist",
  "fml",
  "fedmd",
  "compare",
  "reproduce",
  "tune",
  "summarize",
)


def main() -> None:
  """Runs a command of `experiments/`, which a wheel has inside the package."""
  here = pathlib.Path(__file__).parent
  folder = here / "hetfl" / "experiments"
  if not folder.is_dir():
    folder = here / "experiments"  # Of a checkout.
  if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
    usage = f"usage: hetfl {{{','.join(COMMANDS)}}} [FLAGS]; --help lists them"
    if sys.argv[1:] in (["-h"], ["--help"]):
      print(usage)
      return
    sys.exit(usage)
  script = str(folder / f"{sys.argv.pop(1)}.py")
  sys.argv[0] = script
  sys.path.insert(0, str(folder))  # Where a script's own imports are.
  runpy.run_path(script, run_name="__main__")
