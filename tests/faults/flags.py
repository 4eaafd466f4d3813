"""Sets of flags drawn at random: a run, or an error in one line.

  python -m tests.faults.flags --sets=1000 --seed=1

The flags are the declared settings themselves, with values that are allowed, at
the ends of their ranges, outside of them, and no values at all. Most sets stop
where the first round is traced; some make two rounds. An error has to name a
flag. The sets at fault are printed, with as few flags as are at fault.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
import functools
import importlib
import json
import math
import pathlib
import re
import sys
import tempfile
from typing import Any, NamedTuple

import hypothesis
from hypothesis import strategies as st
import numpy as np

from tests import runs
from tests.faults import finish
from tests.faults.commands import fault_of, last_line, LEAST, Runner

COMMANDS = ("codist", "fml", "fedmd", "compare", "tune")
_TOGETHER = 25  # Sets that one process traces.
FINE = ("refused", "traced", "ran", "diverged")
_MODELS = runs.ROOT / "tests/small_models.py"
# Flags that reach out of the process, or whose errors have a traceback; each
# run has a folder of its own.
LEFT_OUT = ("workdir", "download", "distributed_coordinator", "verbosity")
LEFT_OUT += ("compilation_cache", "join", "pretrained", "data_dir")
_ROUNDS = ("--rounds=2", "--eval_every=1", "--notensorboard")
# One each, since each is compiled.
ONE_OF = {
  "codist": ("algorithm", ("fedavg", "periodic", "merged")),
  "fml": ("algorithm", ("fedavg", "fedprox", "fml", "independent")),
}


class Case(NamedTuple):
  """A command line, and whether it only traces."""

  command: str
  flags: tuple[str, ...]
  trace: bool


def write_files(folder: pathlib.Path) -> dict[str, list[str]]:
  """Writes files that flags may name; returns values by flag."""
  rng = np.random.default_rng(0)
  for name, shape in (("grey", (8, 8)), ("small", (3, 3)), ("rgb", (9, 9, 3))):
    arrays = {}
    for split, number in (("train", 160), ("test", 40)):
      images = rng.integers(0, 256, (number, *shape), np.uint8)
      arrays |= {f"x_{split}": images, f"y_{split}": np.arange(number) % 4}
    if name != "rgb":
      arrays["clients_train"] = np.arange(160) % 8
    np.savez(folder / f"{name}.npz", **arrays)
  (folder / "parts.json").write_text(json.dumps([[*range(99)], [100, 101]]))
  (folder / "c4.txt").write_text("One sentence. Another one.\n" * 50)
  of_npz = [str(folder / f"{name}.npz") for name in ("grey", "small", "rgb")]
  own = [f"{_MODELS}:small", f"{_MODELS}:large", f"{_MODELS}:none", "mlp"]
  own += ["cnn1", "lenet5_conv", "small_cnn", "large_cnn", "small_lstm"]
  own += ["table1", "table2", "small", "resnet", "mixed3"]
  return {
    "npz": of_npz,
    "public_npz": of_npz,
    "partition_file": [str(folder / "parts.json")],
    "c4_path": [str(folder / "c4.txt")],
    "models": own,
    "global_model": own,
    "client_models": own,
    "objective": ["mean", "small", "global", "clients"],
    "space": ["client_lr=log:1e-3:1", "prox_mu=fixed", "lr=1", "alpha=log:0:1"],
  }


def text_of(value: Any) -> str:
  """A value as on the command line."""
  return f"{value:.4g}" if isinstance(value, float) else str(value)


def numbers(s: Any) -> st.SearchStrategy:
  """Allowed numbers of a setting, also at the ends of its range."""
  low = s.low if math.isfinite(s.low) else 0
  if s.type is int:
    most = int(low) + 40 if math.isinf(s.high) else s.high
    few = st.integers(int(low), min(int(low) + 6, int(most)))
    return few | st.integers(int(low), int(most))
  high = s.high if math.isfinite(s.high) else low + 10
  return st.floats(low, high) | st.sampled_from([float(low), float(high)])


def values(s: Any, known: dict[str, list[str]], wrong: bool):
  """Texts that a flag may have, or may not."""
  if wrong:
    bad = ["", "nan", "-1", "0", "inf", "1e400", "0.5,", "x", "1,2,3", "１"]
    bad += ["9" * 30, "-0.0", "/nowhere.npz", "a=b", ",", " 1", "1e-400"]
    return st.sampled_from(bad)
  if s.type is bool:
    return st.sampled_from(["true", "false"])
  if s.choices:
    one = st.sampled_from(s.choices)
  elif s.type is str:
    one = st.sampled_from(known.get(s.name, ["x", "a,b"]))
  else:
    one = numbers(s)
  one = one.map(text_of)
  if not s.many:
    return one
  longest = len(s.each) or s.most or (1 if s.choices else 3)
  return st.lists(one, min_size=1, max_size=longest).map(",".join)


def cases(
  known: dict[str, list[str]], classes: dict[str, Any], ran: bool
) -> st.SearchStrategy:
  """Command lines.

  Args:
    known: texts of flags that name files, models and the like.
    classes: the settings, by command; of `tune` those of the search.
    ran: whether some are run and not only traced.
  """

  @st.composite
  def draw_case(draw):
    command = draw(st.sampled_from(COMMANDS))
    inner = command
    if command == "tune":
      inner = draw(st.sampled_from(("codist", "fml")))
    declared = dict(classes[inner])
    found = [*LEAST[inner], *_ROUNDS]
    if inner in ONE_OF:
      name, names = ONE_OF[inner]
      found.append(f"--{name}={draw(st.sampled_from(names))}")
    elif inner == "compare":
      methods = declared["method"].choices
      found.append(f"--method={draw(st.sampled_from(methods))}")
    if command == "tune":
      declared |= classes["tune"]
      found += [f"--experiment={inner}", "--trials=2", "--block=2"]
      found += ["--heldout_examples=50"] if inner == "fml" else []
    trace = draw(st.sampled_from((True,) * 24 + (not ran,)))
    if trace:
      found.append("--engine=inline")
      found.append("--conv=native")  # It is traced soonest.
      found += ["--batching=vmap"] if command == "tune" else []
    names = sorted(declared.keys() - {*LEFT_OUT})
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=6))
    for name in dict.fromkeys(chosen):
      wrong = draw(st.sampled_from((False,) * 15 + (True,)))
      text = draw(values(declared[name], known, wrong))
      found.append(f"--{name}={text}")
    return Case(command, tuple(found), trace)

  return draw_case()


def outcome(code: int, errors: str, folder: pathlib.Path, trace: bool) -> str:
  """One of `FINE`, or what was not.

  Args:
    code: the status.
    errors: what was written to standard error.
    folder: the run's.
    trace: whether rounds were only traced.
  """
  if fault := fault_of(code, errors):
    return fault
  if not code and trace:
    return "traced"
  if not code:
    names = {path.name for path in folder.rglob("*")}
    return "ran" if "result.json" in names else "left no result"
  last = last_line(errors)
  if ": diverged; " in last:
    return "diverged"
  if folder.exists() and trace:
    return f"left a folder: {last}"
  named = re.search("--[a-z]|^error: Unknown command line flag '", last)
  return "refused" if named else f"names no flag: {last}"


def batches(drawn: Sequence[Case]) -> Iterator[list[Case]]:
  """Yields cases that can share a process, and last those that cannot."""
  of: dict[str, list[Case]] = {}
  for case in dict.fromkeys(drawn):
    own = not case.trace or any("cpu_devices" in flag for flag in case.flags)
    of.setdefault("" if own else case.command, []).append(case)
  alone = of.pop("", [])
  for found in of.values():
    for i in range(0, len(found), _TOGETHER):
      yield found[i : i + _TOGETHER]
  yield from ([case] for case in alone)


def least(flags: Sequence[str], at_fault: Callable) -> list[str]:
  """The flags without which it would not be at fault."""
  flags = list(flags)
  for flag in list(reversed(flags)):
    fewer = [f for f in flags if f != flag]
    if at_fault(fewer):
      flags = fewer
  return flags


def run(
  folder: pathlib.Path,
  number: int,
  seed: int,
  ran: bool = True,
  lessen: bool = False,
) -> tuple[Counter[tuple[str, str]], list[str]]:
  """Has sets of flags run.

  Args:
    folder: for their folders.
    number: how many.
    seed: draws them.
    ran: whether some of them run.
    lessen: whether to leave out flags that are not at fault.

  Returns:
    How many of a command had which outcome, and what was at fault.
  """
  if (experiments := str(runs.ROOT / "experiments")) not in sys.path:
    sys.path.append(experiments)
  classes = {}
  for command in COMMANDS:
    module = importlib.import_module(command)
    name = {"fedmd": "FedMD", "tune": "Search"}.get(command)
    cls = getattr(module, name or command.capitalize())
    classes[command] = cls.declared()
  drawn: list[Case] = []

  @hypothesis.seed(seed)
  @hypothesis.settings(
    max_examples=number,
    database=None,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=[*hypothesis.HealthCheck],
  )
  @hypothesis.given(cases(write_files(folder), classes, ran))
  def draw(case):
    drawn.append(case)

  draw()
  counts: Counter[tuple[str, str]] = Counter()
  faults: list[str] = []
  places = (folder / f"run{i}" for i in range(1 << 60))
  with Runner(folder) as runner:

    def found_alone(case, flags):
      place, at_fault = next(places), {"trace": 1} if case.trace else {}
      done = runner.run(case.command, *flags, workdir=place, **at_fault)
      return outcome(done.returncode, done.stderr, place, case.trace)

    for batch in batches(drawn):
      found, many = {}, len(batch) > 1
      if many:
        runs_of = {next(places): case.flags for case in batch}
        answers = runner.attempts(batch[0].command, runs_of, trace=1)
        for case, place, (refused, text) in zip(batch, runs_of, answers):
          found[case] = outcome(int(refused), text, place, True)
      for case in batch:
        result, flags = found.get(case, ""), case.flags
        # One of many may suffer from those before it.
        if result not in FINE:
          result = found_alone(case, flags)
        if result not in FINE:
          if lessen:
            alone = functools.partial(found_alone, case)
            flags = least(flags, lambda f, alone=alone: alone(f) not in FINE)
            result = alone(flags)
          faults.append(f"{case.command} {' '.join(flags)}\n  {result}")
          print(faults[-1], flush=True)
          result = "at fault"
        counts[case.command, result] += 1
      print(f"{counts.total()} of {len(drawn)}", flush=True)
  return counts, faults


def main() -> None:
  """Has many sets run, and says how that went."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--sets", type=int, default=1000)
  parser.add_argument("--seed", type=int, default=0)
  flags = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    counts, faults = run(
      pathlib.Path(folder), flags.sets, flags.seed, lessen=True
    )
  finish("sets of flags", counts, faults)


if __name__ == "__main__":
  main()
