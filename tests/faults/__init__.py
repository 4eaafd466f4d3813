"""What goes wrong around a run."""

from collections import Counter
from collections.abc import Sequence
import sys


def finish(
  what: str, counts: Counter[tuple[str, str]], faults: Sequence[str]
) -> None:
  """Says how a harness went, and ends; with an error if any was at fault.

  Args:
    what: what was tried, for the last line.
    counts: how many there were, by name and outcome.
    faults: what was at fault.
  """
  for (name, found), n in sorted(counts.items()):
    print(f"{n:6} {name}: {found}")
  print(f"{counts.total()} {what}, {len(faults)} at fault")
  sys.exit("\n".join(faults) or 0)
