"""Experiments, run as a user runs them, and what they left."""

import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

SECONDS = 300  # A run may take no longer.
REAL = os.environ.get("HETFL_DATA_DIR")
needs_real_data = pytest.mark.skipif(not REAL, reason="no HETFL_DATA_DIR")
ROOT = pathlib.Path(__file__).resolve().parent.parent


def write_posts(folder):
  """A dump of Stack Exchange with thirty users; returns its file."""
  rows = [
    f'<row Id="{k}" PostTypeId="{1 + k % 2}" OwnerUserId="{k // 2 % 30}"'
    f' Body="&lt;p&gt;Say {"word" * (k % 3)} {k % 7}. Then stop.&lt;/p&gt;"/>'
    for k in range(240)
    if k % 2 == k // 2 % 2 or k % 5 == 0  # Most users ask or answer.
  ] + ['<row Id="240" PostTypeId="1" Body="x" />']
  posts = folder / "stackexchange" / "Posts.xml"
  posts.parent.mkdir()
  posts.write_text("<posts>" + "\n".join(rows) + "</posts>")
  return posts


class Forks:
  """Runs scripts in forks of a process that has imported JAX, see `forks.py`.

  Args:
    environment: of that process.
    folder: for the scripts' output.
  """

  def __init__(self, environment, folder):
    self.environment, self._folder = environment, folder

  def __exit__(self, *exception):
    if "_process" in vars(self):
      self._process.kill()  # It holds nothing, and ends on its own too.
      self._process.wait()

  def __enter__(self):
    return self

  @functools.cached_property
  def _process(self):
    return subprocess.Popen(
      [sys.executable, str(ROOT / "tests/forks.py"), str(SECONDS)],
      env=self.environment,
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )

  def ask(self, *request):
    """What `forks.py` answers."""
    self._process.stdin.write(f"{json.dumps(request)}\n")
    self._process.stdin.flush()
    return json.loads(self._process.stdout.readline())

  def run(self, script, *args):
    """Runs a script to its end."""
    files = [self._folder / name for name in ("stdout", "stderr")]
    for file in files:
      file.unlink(missing_ok=True)
    status = Fork(self, script, args, *files).wait()
    printed = [file.read_text() for file in files]
    return subprocess.CompletedProcess([script, *args], status, *printed)


class Fork:
  """A script that runs, with some of the methods of `subprocess.Popen`."""

  def __init__(self, forks, script, args, *files):
    self._ask = forks.ask
    self._pid = forks.ask(script, [*map(str, args)], *map(str, files))

  def poll(self):
    """Its exit code, or None as long as it runs."""
    return self._ask(self._pid, False)

  def wait(self):
    """Its exit code."""
    return self._ask(self._pid, True)

  def send_signal(self, number, group=False):
    """Sends it a signal, or it and the processes that it started."""
    (os.killpg if group else os.kill)(self._pid, number)


class Experiment:
  """A script of `experiments/`.

  Args:
    name: of the script.
    environment: of its processes.
    forks: a `Forks` with the tests' usual environment.
  """

  def __init__(self, name, environment, forks):
    self._script = str(ROOT / f"experiments/{name}.py")
    self._environment, self._forks = environment, forks

  def __call__(self, *args, **environment):
    """Runs it to its end, which has to be a good one."""
    done = self.ended(*args, **environment)
    assert done.returncode == 0, done.stderr
    return done

  def fails(self, *args):
    """Runs it to its end; returns the line that says what is wrong."""
    done = self.ended(*args)
    assert done.returncode != 0
    return error_of(done)

  def ended(self, *args, **environment):
    """Runs it to its end, whichever.

    With the tests' XLA_FLAGS programs are compiled soon but run slowly, those
    with XLA's own convolutions or of many images twenty times as long as with
    XLA_FLAGS="".
    """
    environment = self._environment | environment
    if environment == self._forks.environment:
      return self._forks.run(self._script, *args)
    return subprocess.run(
      [sys.executable, self._script, *map(str, args)],
      env=environment,
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=SECONDS,
    )

  def start(self, *args):
    """Starts it."""
    return Fork(self._forks, self._script, args, os.devnull, os.devnull)

  def refuse(self, cases, *args, fresh):
    """Checks that bad flags are one line and leave nothing behind.

    All in one process, which imports JAX and finds its devices once.

    Args:
      cases: flags, and what the line has to say, of each case.
      *args: flags of all cases.
      fresh: a folder that is not there, for the runs.
    """
    before = [f"--workdir={fresh}", *args]
    lines = json.dumps([[*map(str, (*before, *flags))] for flags, _ in cases])
    done = self._forks.run(str(ROOT / "tests/refusals.py"), self._script, lines)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    for (flags, message), (refused, text) in zip(cases, answers, strict=True):
      assert refused, flags
      assert message in error_of(text), (flags, text)
    assert not fresh.exists()


def error_of(done):
  """The one line in which a process, or its output, says what is wrong."""
  text = getattr(done, "stderr", done)
  assert "Traceback" not in text, text
  lines = [s for s in text.splitlines() if s.startswith("error: ")]
  assert len(lines) == 1, text
  return lines[0]


def outcome(workdir):
  """The result but for the time it took, and the rows but for theirs."""
  result = json.loads((workdir / "result.json").read_text())
  rows = [
    json.loads(line)
    for line in (workdir / "metrics.jsonl").read_text().splitlines()
  ]
  for entry in (result, *rows):
    del entry["seconds"]
    entry.pop("phase_seconds", None)
  return result, rows


def last_arrays(workdir):
  """The round of the last checkpoint, and its arrays by name."""
  last = sorted((workdir / "checkpoints").iterdir())[-1]
  with np.load(last / "state.npz") as arrays:
    return last.name, dict(arrays)


def last_state(workdir):
  """The same, with the bits of the arrays."""
  name, arrays = last_arrays(workdir)
  return name, {n: np.asarray(a).tobytes() for n, a in arrays.items()}


def everything(workdir):
  """All files of a folder and their contents."""
  return {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}


def checkpoints(workdir):
  """The names of the checkpoints of a folder that need not be there."""
  folder = workdir / "checkpoints"
  return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def stop(process, workdir, pause, sent=signal.SIGKILL):
  """Stops a process some time after its next checkpoint.

  Args:
    process: the process.
    workdir: where it leaves checkpoints.
    pause: seconds to wait after the checkpoint.
    sent: the signal.

  Returns:
    Its exit code.
  """
  before = checkpoints(workdir)
  deadline = time.monotonic() + 120
  while (
    checkpoints(workdir) == before
    and process.poll() is None
    and time.monotonic() < deadline
  ):
    time.sleep(0.005)
  time.sleep(pause)
  process.send_signal(sent)
  return process.wait()
