"""Short runs of every command, and what they leave."""

from collections.abc import Mapping, Sequence
import json
import os
import pathlib
import time
from typing import Any

from tests import runs

_MODELS = runs.ROOT / "tests/small_models.py"
# What makes a run short; later flags override it.
LEAST = {
  "codist": ("--clients_per_round=2", "--distill_steps=1", "--codist_period=2")
  + (f"--models={_MODELS}:small,{_MODELS}:large",),
  "fml": ("--client_models=mlp", "--global_model=mlp", "--local_epochs=1"),
  "fedmd": ("--num_parties=2", "--public_epochs=2", "--transfer_epochs=2")
  + ("--pooled_epochs=2", "--public_subset=40", "--public_examples=200"),
  "compare": ("--models=mlp", "--global_model=mlp", "--num_clients=3")
  + ("--local_epochs=1", "--examples=300", "--public_examples=40")
  + ("--public_subset=20",),
}
_ROUNDS = ("--rounds=4", "--eval_every=2", "--checkpoint_every=1")
_SEARCH = ("--experiment=codist", "--algorithm=merged", "--trials=4")
_SEARCH += ("--block=2", "--seeds=0", *LEAST["codist"], *_ROUNDS)
# name -> the script and its flags
COMMANDS = {
  "codist": ("codist", *LEAST["codist"], *_ROUNDS, "--algorithm=periodic"),
  "codists": ("codist", *LEAST["codist"], *_ROUNDS, "--notensorboard")
  + ("--algorithm=fedavg,merged", "--seeds=0,1"),
  "private": ("codist", *LEAST["codist"], *_ROUNDS, "--algorithm=merged")
  + ("--clip_norm=1", "--epsilon=8", "--client_weights=uniform"),
  "fml": ("fml", *LEAST["fml"], *_ROUNDS, "--algorithm=fml")
  + ("--alpha=0.75,0.5", "--clients_per_round=4"),
  "fedmd": ("fedmd", *LEAST["fedmd"], *_ROUNDS, "--eval_every=1"),
  "compare": ("compare", *LEAST["compare"], *_ROUNDS, "--method=fml,local"),
  "tune": ("tune", *_SEARCH),
  "join": ("tune", *_SEARCH),
  "reproduce": ("reproduce", "--table=fml_dynamic", "--only=constant", "--")
  + (*LEAST["fml"], *_ROUNDS, "--dataset=digits", "--partition=iid")
  + ("--algorithm=fml", "--num_clients=2", "--clients_per_round=2"),
}


class Runner:
  """Runs commands in forks.

  Args:
    folder: for what they print, and the programs that they compile.
  """

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "HETFL_DATA_DIR": "",
      "XLA_FLAGS": "--xla_backend_optimization_level=0",
      "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    self._forks = runs.Forks(environment, folder)
    self._searches: list[str] = []

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    self._forks.__exit__()

  def arguments(
    self, script: str, *flags: str, workdir: pathlib.Path, **faults: Any
  ) -> list[str]:
    """The arguments of a fork.

    Args:
      script: of `experiments/`.
      *flags: its flags.
      workdir: its folder.
      **faults: what is at fault, see `inside.py`.
    """
    path = str(runs.ROOT / f"experiments/{script}.py")
    found = [path, f"--workdir={workdir}", *flags]
    if not faults:
      return found
    inside = str(runs.ROOT / "tests/faults/inside.py")
    return [inside, json.dumps(faults), *found]

  def run(self, script: str, *flags: str, **options: Any):
    """Runs a script to its end; see `arguments`."""
    return self._forks.run(*self.arguments(script, *flags, **options))

  def attempts(
    self,
    script: str,
    lines: Mapping[pathlib.Path, Sequence[str]],
    **faults: Any,
  ) -> list[tuple[bool, str]]:
    """What `tests/refusals.py` says of command lines; nothing if it fails.

    Args:
      script: of `experiments/`.
      lines: the flags, by the folder of each.
      **faults: see `arguments`.
    """
    tests = runs.ROOT / "tests"
    inside, refusals = tests / "faults/inside.py", tests / "refusals.py"
    path = str(runs.ROOT / f"experiments/{script}.py")
    texts = [[f"--workdir={place}", *flags] for place, flags in lines.items()]
    done = self._forks.run(
      str(inside), json.dumps(faults), refusals, path, json.dumps(texts)
    )
    return [] if done.returncode else json.loads(done.stdout)

  def command(self, name: str) -> tuple[str, ...]:
    """One of `COMMANDS`."""
    if name == "join" and not self._searches:
      for seed in range(2):
        place = self.folder / f"search{seed}"
        done = self.run(*COMMANDS[name], f"--seed={seed}", workdir=place)
        assert not done.returncode, done.stderr
        self._searches.append(str(place))
    more = [f"--join={','.join(self._searches)}"] if name == "join" else []
    return (*COMMANDS[name], *more)

  def start(self, script: str, *flags: str, **options: Any):
    """Starts a script; see `arguments`."""
    first, *rest = self.arguments(script, *flags, **options)
    self.errors = self.folder / f"errors{time.monotonic_ns()}"
    return runs.Fork(self._forks, first, rest, os.devnull, self.errors)


def last_line(errors: str) -> str:
  """The line that says how a command ended."""
  return errors.rstrip().rpartition("\n")[2]


def fault_of(code: int, errors: str) -> str:
  """What is wrong with how a command ended, if anything is.

  Args:
    code: its status.
    errors: what it wrote to standard error.
  """
  said = [line for line in errors.splitlines() if line.startswith("error: ")]
  if code < 0:
    return f"was ended by signal {-code}"  # SIGALRM if it took too long.
  if "Traceback" in errors or (code == 1 and said != [last_line(errors)]):
    return f"said {errors[-1500:]!r}"
  return ""


def _timeless(value: Any) -> Any:
  if isinstance(value, dict):
    others = ("seconds", "phase_seconds", "git_commit", "crc32")
    return {n: _timeless(v) for n, v in value.items() if n not in others}
  return [*map(_timeless, value)] if isinstance(value, list) else value


def results(folder: pathlib.Path) -> dict[str, Any]:
  """The results and rows that a command left, but for times."""
  found: dict[str, Any] = {}
  for path in sorted(folder.rglob("*")):
    name = str(path.relative_to(folder))
    if path.name in ("result.json", "summary.json"):
      found[name] = _timeless(json.loads(path.read_bytes()))
    elif path.suffix == ".jsonl":
      rows = map(json.loads, path.read_text().splitlines())
      found[name] = [_timeless(row) for row in rows]
  return found


def left(folder: pathlib.Path) -> dict[str, Any]:
  """All that a command left, also states, flags and the names of charts."""
  found = results(folder)
  for path in sorted(folder.rglob("*")):
    name = str(path.relative_to(folder))
    if path.name == "checkpoints" and any(path.iterdir()):
      found[name] = runs.last_state(path.parent)
    elif path.suffix == ".flags" or path.name == "data.json":
      found[name] = path.read_text()
    elif path.suffix in (".png", ".md", ".csv"):
      found[name] = True
  return found
