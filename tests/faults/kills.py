"""Runs that are killed at random moments, and end as if they had not been.

  python -m tests.faults.kills --kills=100 --seed=1

Each command is started, killed by SIGKILL or SIGTERM, and started again, until
it is finished. Its results, rows, states and flags are then those of a run that
nothing disturbed. SIGTERM may save and end, but not fail.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
import pathlib
import random
import signal
import tempfile
import time

from tests.faults import finish
from tests.faults.commands import COMMANDS, fault_of, left, Runner

_MOST = 4  # Kills of one run.
_ENDS = {
  signal.SIGKILL: (0, -signal.SIGKILL),
  signal.SIGTERM: (0, -signal.SIGTERM, 128 + signal.SIGTERM),
}


def run(
  folder: pathlib.Path,
  number: int,
  seed: int,
  names: Sequence[str] = tuple(COMMANDS),
) -> tuple[Counter[tuple[str, str]], list[str]]:
  """Kills runs.

  Args:
    folder: for theirs.
    number: how many kills.
    seed: draws the moments and the signals.
    names: of the commands, which are run in turn.

  Returns:
    How many runs of a command were ended by which signal, or finished first;
    and what was at fault.
  """
  rng, counts, faults = random.Random(seed), Counter(), []
  whole, lasts, killed, turn = {}, {}, 0, 0
  with Runner(folder) as runner:
    while killed < number:
      name = names[turn % len(names)]
      command, place = runner.command(name), folder / f"{name}{turn}"
      turn += 1
      if name not in whole:  # The second run has the first one's programs.
        for part in ("first", "whole"):
          begun = time.monotonic()
          path = folder / f"{part}-{name}"
          done = runner.run(*command, workdir=path)
          assert not done.returncode, done.stderr
          lasts[name] = time.monotonic() - begun
        whole[name] = left(path)
      for _ in range(_MOST):
        sent = rng.choice([*_ENDS])
        process = runner.start(*command, workdir=place)
        time.sleep(rng.uniform(0, lasts[name]))
        if process.poll() is None:
          # What `reproduce` started would go on without it.
          process.send_signal(sent, group=sent == signal.SIGKILL)
        code = process.wait()
        errors = runner.errors.read_text() if runner.errors.exists() else ""
        if code not in _ENDS[sent] or "Traceback" in errors:
          faults.append(f"{name}, {sent.name}: {code}: {errors[-1500:]}")
        counts[name, sent.name if code else "finished"] += 1
        killed += code != 0
        if not code:
          break
        time.sleep(0.1)  # Until its children have ended too.
      done = runner.run(*command, workdir=place)
      if fault := fault_of(done.returncode, done.stderr):
        faults.append(f"{name}, resumed: {fault}")
      elif done.returncode or left(place) != whole[name]:
        faults.append(f"{name}: {place} is not as {folder}/whole-{name}")
  return counts, faults


def main() -> None:
  """Kills many runs, and says how that went."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--kills", type=int, default=100)
  parser.add_argument("--seed", type=int, default=0)
  flags = parser.parse_args()
  folder = pathlib.Path(tempfile.mkdtemp())
  counts, faults = run(folder, flags.kills, flags.seed)
  finish(f"runs in {folder}", counts, faults)


if __name__ == "__main__":
  main()
