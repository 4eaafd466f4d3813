"""Times rounds of this checkout against those of another, in turns.

  git worktree add ../before COMMIT
  python benchmarks/commits.py ../before [--only=NAME,...] [--runs=N]

Each checkout runs its own `benchmarks` in a separate process, and the two take
turns round by round, so that drifts in the machine's speed affect both. For
each row the table gives the seconds to set up, compile and run the first rounds
(empty caches), and the median seconds of a round; `ratio` is the median over
the turns of ours / theirs, per FLOP of the rounds' batches: below one, this
checkout is faster. Run it with nothing else on the machine.
"""

import argparse
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = (
  "fedavg_small_fedjax_jit",
  "fedavg_large_fedjax_jit",
  "fedavg_large_ragged",
  "periodic_plain",
  "merged_plain",
  "fml_cnn1_torch_default",
  "independent_cnn1_torch_default",
  "fedmd_torch_default",
  "language_small_vmap",
  "language_large_vmap",
  "language_large_ragged",
)

# Runs in a checkout's folder and imports its modules: reads a line for each
# request, and answers with numbers.
WORKER = """
import sys, time
sys.path.insert(0, ".")
start = time.perf_counter()
import jax
from benchmarks import codist, fedmd, fml, language, rounds
every = codist.rows() | fml.rows(2000) | fedmd.rows(0.125)
every |= language.rows(None, int(sys.argv[1]))
answers, sys.stdout = sys.stdout, sys.stderr
def answer(*numbers):
  print(*numbers, file=answers, flush=True)
answer(time.perf_counter() - start)
for line in sys.stdin:
  name = line.strip()
  start = time.perf_counter()
  if name:
    run = None
    jax.clear_caches()
    run = rounds.looped(every[name].ours())
    answer(time.perf_counter() - start, every[name].flops())
  else:
    run(rounds.stream())
    answer((time.perf_counter() - start) / rounds.stream())
"""


class Checkout:
  """A process that runs rounds of one checkout."""

  def __init__(self, folder: pathlib.Path, runs: int):
    self._folder = folder
    self._process = subprocess.Popen(
      [sys.executable, "-c", WORKER, str(runs)],
      cwd=folder,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    self._read()

  def _read(self) -> list[float]:
    line = self._process.stdout.readline()
    if not line:
      raise SystemExit(f"{self._folder}: the checkout's process ended")
    return [float(number) for number in line.split()]

  def ask(self, name: str = "") -> list[float]:
    """Sets up a row (gives seconds and FLOPs), or runs a round (seconds)."""
    self._process.stdin.write(f"{name}\n")
    self._process.stdin.flush()
    return self._read()


def main() -> None:
  """Times the rows and prints a table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("other", help="folder of the other checkout")
  parser.add_argument("--only", default=",".join(ROWS), help="names of rows")
  parser.add_argument("--runs", type=int, default=9, help="turns of each")
  args = parser.parse_args()
  if args.runs < 1:
    parser.error(f"--runs={args.runs}: want 1 or more")
  names = args.only.split(",")
  if unknown := {*names} - {*ROWS}:
    parser.error(f"--only={min(unknown)}: choose from {', '.join(ROWS)}")
  if not pathlib.Path(args.other, "hetfl").is_dir():
    parser.error(f"{args.other}: not a checkout of hetfl")
  here, there = (
    Checkout(pathlib.Path(folder), args.runs) for folder in (ROOT, args.other)
  )
  print(
    f"{'row':33} {'first s':>8} {'other':>8} {'round s':>8} {'other':>8}"
    f" {'ratio':>6}"
  )
  for name in names:
    first, flops = zip(here.ask(name), there.ask(name))
    turns = []
    for turn in range(args.runs):
      # The first to run after the pause takes one to three percent longer.
      order = (here, there) if turn % 2 else (there, here)
      seconds = {side: side.ask()[0] for side in order}
      turns.append((seconds[here], seconds[there]))
      time.sleep(0.05)  # Lets the last program's threads come to rest.
    ours, theirs = (statistics.median(side) for side in zip(*turns))
    ratio = statistics.median(a / b for a, b in turns) * flops[1] / flops[0]
    print(
      f"{name:33} {first[0]:8.1f} {first[1]:8.1f} {ours:8.3f} {theirs:8.3f}"
      f" {ratio:6.3f}",
      flush=True,
    )


if __name__ == "__main__":
  main()
