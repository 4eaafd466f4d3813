"""Damaged files of runs, full disks, kills at each write, and other mishaps.

  python -m tests.faults.folders --cases=200 --seed=1 --commands=fml,tune

The same command, given again, ends with the results of a run that nothing
disturbed; or with one line that names the folder or the file. Cases are drawn
from all of them: each file of a finished and of a half-finished run deleted,
truncated or with a flipped bit; the disk full, and the process killed, at each
write; folders that cannot be written to; the clock set back; two processes in
one folder; and another number of devices.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
import functools
import math
import pathlib
import random
import shutil
import signal
import tempfile
from typing import Any, NamedTuple

from tests.faults import finish
from tests.faults.commands import (
  COMMANDS,
  fault_of,
  last_line,
  left,
  results,
  Runner,
)

KINDS = ("deleted", "truncated", "flipped", "full", "killed", "read-only")
KINDS += ("clock", "two", "devices")
_DAY = 86_400


class Known(NamedTuple):
  """A command's undisturbed run.

  Attributes:
    command: the script and its flags.
    whole: the folder of the finished run.
    half: that of one that was killed in the middle.
    writes: how many there are.
  """

  command: tuple[str, ...]
  whole: pathlib.Path
  half: pathlib.Path
  writes: int


def known_of(runner: Runner, name: str) -> Known:
  """Runs a command, and half of it."""
  command, count = runner.command(name), runner.folder / "count"
  whole, half = (runner.folder / f"{part}-{name}" for part in ("whole", "half"))
  spec = {"folder": str(whole), "count": str(count)}
  done = runner.run(*command, workdir=whole, writes=spec)
  assert not done.returncode, done.stderr
  number = int(count.read_text())
  at = {"first": number * 2 // 3, "last": number, "do": "SIGKILL"}
  done = runner.run(*command, workdir=half, writes={"folder": str(half), **at})
  assert done.returncode == -signal.SIGKILL, done.stderr
  return Known(command, whole, half, number)


def damage(kind: str, path: pathlib.Path, rng: random.Random) -> None:
  """Deletes, truncates or changes a file."""
  content = bytearray(path.read_bytes())
  if kind == "deleted":
    path.unlink()
  elif kind == "truncated":
    path.write_bytes(content[: rng.randrange(len(content) or 1)])
  elif content:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def close(there: Any, here: Any) -> bool:
  """Whether numbers are the same up to rounding, and all else is the same."""
  if isinstance(there, dict):
    names = there.keys() - {"rows_crc32"}
    alike = names == here.keys() - {"rows_crc32"}
    return alike and all(close(there[n], here[n]) for n in names)
  if isinstance(there, list):
    return len(there) == len(here) and all(map(close, there, here))
  if isinstance(there, float):
    return math.isclose(there, here, rel_tol=1e-3, abs_tol=0.02)
  return there == here


def compared(
  done: Any,
  place: pathlib.Path,
  known: Known,
  of: Callable[[pathlib.Path], dict[str, Any]] = left,
  same: Callable[[Any, Any], bool] = lambda a, b: a == b,
  may_refuse: bool = False,
) -> str:
  """What is wrong with a run's end, and what it left, if anything is."""
  if fault := fault_of(done.returncode, done.stderr):
    return fault
  last = last_line(done.stderr)
  if done.returncode and may_refuse:
    return "" if str(place) in last else f"names no file: {last}"
  if done.returncode:
    return f"was refused: {last}"
  try:
    here = of(place)
  except ValueError as error:
    return f"left what cannot be read: {error}"
  there = of(known.whole)
  names = {n for n in there | here if there.get(n) != here.get(n)}
  return "" if same(there, here) else f"left other {sorted(names)} in {place}"


def cases(name: str, known: Known) -> Iterator[tuple[str, Any]]:
  """Yields a command's cases, as a kind and what it is about."""
  for folder in (known.whole, known.half):
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
      for kind in KINDS[:3]:
        yield kind, (folder, path.relative_to(folder))
  for kind in ("full", "killed"):
    yield from ((kind, n) for n in range(1, known.writes + 1))
  yield from (("read-only", f) for f in (known.whole, known.half, None))
  yield from (("clock", None), ("two", None))
  if name not in ("join", "reproduce"):
    yield "devices", None


def attempt(
  runner: Runner, known: Known, kind: str, about: Any, place: pathlib.Path
) -> str:
  """Has a case happen; returns what is at fault, if anything is."""
  again = functools.partial(runner.run, *known.command, workdir=place)
  writes = {"folder": str(place), "last": 1 << 60}
  if kind in KINDS[:3]:
    folder, name = about
    shutil.copytree(folder, place)
    damage(kind, place / name, random.Random(str(name)))
    return compared(again(), place, known, of=results, may_refuse=True)
  if kind in ("full", "killed"):
    do = "ENOSPC" if kind == "full" else "SIGKILL"
    done = again(writes=writes | {"first": about, "do": do})
    last = last_line(done.stderr)
    if kind == "full":
      if fault := fault_of(done.returncode, done.stderr):
        return fault
      if not done.returncode or str(place) not in last:
        return f"said {last!r}"
    return compared(again(), place, known)
  if kind == "read-only":
    if about:
      shutil.copytree(about, place)
    done = again(writes=writes | {"first": 1, "do": "EROFS"})
    fault = compared(done, place, known, may_refuse=True)
    return fault or compared(again(), place, known)
  if kind == "two":
    process = runner.start(*known.command, workdir=place)
    done = again()
    code = process.wait()
    if fault := fault_of(code, runner.errors.read_text()):
      return fault
    if code:
      return compared(done, place, known)
    fault = fault_of(done.returncode, done.stderr)
    return fault or compared(again(), place, known)
  shutil.copytree(known.half, place)
  if kind == "clock":
    return compared(again(clock=_DAY), place, known)
  found = runner.run(
    *known.command, "--cpu_devices=2", "--engine=mesh", workdir=place
  )
  return compared(found, place, known, of=results, same=close)


def run(
  folder: pathlib.Path,
  number: int,
  seed: int,
  names: Sequence[str] = tuple(COMMANDS),
  kinds: Sequence[str] = KINDS,
) -> tuple[Counter[tuple[str, str]], list[str]]:
  """Has cases happen.

  Args:
    folder: for the runs'.
    number: how many cases, or 0 for all.
    seed: draws them.
    names: of the commands.
    kinds: of the cases.

  Returns:
    How many of a command there were of which kind, and what was at fault.
  """
  counts: Counter[tuple[str, str]] = Counter()
  faults: list[str] = []
  with Runner(folder) as runner:
    known = {name: known_of(runner, name) for name in names}
    drawn = [
      (name, *case)
      for name in names
      for case in cases(name, known[name])
      if case[0] in kinds
    ]
    random.Random(seed).shuffle(drawn)
    for i, (name, kind, about) in enumerate(drawn[: number or len(drawn)]):
      place = folder / f"case{i}"
      if fault := attempt(runner, known[name], kind, about, place):
        what = [*map(str, about)] if isinstance(about, tuple) else about
        faults.append(f"{name}, {kind} {what}: {fault}")
        print(faults[-1], flush=True)
      else:
        shutil.rmtree(place, ignore_errors=True)
      counts[name, kind] += 1
  return counts, faults


def main() -> None:
  """Has many cases happen, and says how that went."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--cases", type=int, default=0)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--commands", default=",".join(COMMANDS))
  parser.add_argument("--kinds", default=",".join(KINDS))
  flags = parser.parse_args()
  folder = pathlib.Path(tempfile.mkdtemp())
  names, kinds = flags.commands.split(","), flags.kinds.split(",")
  counts, faults = run(folder, flags.cases, flags.seed, names, kinds)
  finish(f"cases in {folder}", counts, faults)


if __name__ == "__main__":
  main()
