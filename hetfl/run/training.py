"""The training loop: rounds, evaluations, checkpoints, and resuming.

A run that is stopped, in whatever way, and resumed gives bit for bit the
results of an uninterrupted run: checkpoints hold the state, the sums of the
metrics since the last evaluation and the last evaluation itself, and a round's
plan is a pure function of the round.
"""

import collections
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import signal
import subprocess
import threading
import time
from typing import Any

from absl import logging
import jax
import numpy as np

import hetfl
from hetfl import checks, core, engine
from hetfl.run import checkpoint, logs

# Metrics of this many dispatches are fetched at once, after as many more have
# been dispatched, so that the device need not wait for Python.
_BATCH = 10


class _Sums:
  """Sums of metrics since the last evaluation.

  Args:
    totals: by metric, of a checkpoint.
    counts: the same.
    stop_on_nonfinite: see `run`.
  """

  def __init__(
    self,
    totals: dict[str, float],
    counts: dict[str, float],
    stop_on_nonfinite: bool,
  ):
    self.totals, self.counts = totals, counts
    self._stop = stop_on_nonfinite
    self._warned = False
    self._pending: list[tuple[range, core.Metrics]] = []

  def add(
    self, rounds: range, metrics: core.Metrics
  ) -> dict[str, float] | None:
    """Adds a dispatch's metrics; fetches a batch once enough are pending.

    Args:
      rounds: the rounds of the dispatch.
      metrics: their metrics, with a leading axis of rounds if there are
        several.

    Returns:
      The values of the last round that was fetched, or None.
    """
    self._pending.append((rounds, metrics))
    return self.fetch(_BATCH) if len(self._pending) >= 2 * _BATCH else None

  def fetch(self, number: int | None = None) -> dict[str, float] | None:
    """Fetches the oldest metrics, by default all; returns the last round's."""
    batch = self._pending[:number]
    del self._pending[:number]
    values = None
    for rounds, metrics in jax.device_get(batch):
      for i, round in enumerate(rounds):
        several = len(rounds) > 1
        one = jax.tree.map(lambda a, i=i: a[i], metrics) if several else metrics
        values = core.values(one)
        self._check(round, values)
        for name, (total, count) in one.items():
          # In this order and in float64, however fetches were batched.
          self.totals[name] = self.totals.get(name, 0.0) + float(total)
          self.counts[name] = self.counts.get(name, 0.0) + float(count)
    return values

  def take(self) -> dict[str, float]:
    """The means of the rounds that were fetched since the last call."""
    totals, counts = self.totals, self.counts
    self.totals, self.counts = {}, {}
    return {n: total / counts[n] for n, total in totals.items() if counts[n]}

  def _check(self, round: int, values: Mapping[str, float]) -> None:
    bad = [
      f"{name} is {value}"
      for name, value in values.items()
      if name.endswith("loss") and not math.isfinite(value)
    ]
    message = (
      f"round {round}: {', '.join(bad)}: training has diverged, or a label is"
      " out of the model's range of classes, or the plan is for a larger bank"
    )
    if bad and self._stop:
      raise FloatingPointError(
        f"{message} (stop_on_nonfinite); lower the learning rate, or look"
        " at the last checkpoint"
      )
    if bad and not self._warned:
      logging.warning(
        "%s. Continuing; further non-finite losses are not reported.", message
      )
      self._warned = True


def run(
  algorithm: core.Algorithm,
  key: Any,
  plan_fn: Callable[[int], Any],
  data: Any,
  evaluate: Callable[[Any], Mapping[str, float]],
  *,
  rounds: int,
  folder: logs.RunFolder,
  summarize: Callable[[Any, dict[str, float]], Mapping[str, Any]],
  eval_every: int = 50,
  checkpoint_every: int = 50,
  keep: int = 3,
  tensorboard: bool = True,
  stop_on_nonfinite: bool = False,
  rounds_per_dispatch: int = 1,
  scanned_step: Callable | None = None,
) -> dict[str, Any]:
  """Trains to the last round, resuming from the newest checkpoint if any.

  Rounds are numbered from 1. After every `eval_every`-th and after the last,
  a row goes to `metrics.jsonl`: `round`, what `evaluate` returns, the means
  of the step's metrics over the rounds since the previous row, and `seconds`.

  On SIGINT, SIGTERM or SIGUSR1 (if `run` is called from the main thread) the
  process finishes the dispatched rounds, saves a checkpoint and exits with
  status 128 + signal; on a second one it exits without a checkpoint, once the
  running programs are done.

  If several processes run one program (`jax.distributed`), all call this with
  the same arguments and a folder each. Only the first process's folder counts:
  all resume from its checkpoint, and the other folders may be deleted. A signal
  then acts after the next evaluation or checkpoint.

  Args:
    algorithm: the pair `init` and `step`; `step` is called as it is, so it
      should be compiled: `engine.compile(algorithm.step, donate=(0,))`.
    key: for `algorithm.init`.
    plan_fn: round -> plan, a pure function; called one dispatch ahead, from
      another thread.
    data: passed to each `step` unchanged.
    evaluate: state -> numbers by name; must not change anything.
    rounds: how many rounds the run has in all.
    folder: the run's folder. Its config should hold every value that changes
      the result, including `rounds` and `eval_every`.
    summarize: (state, last evaluation) -> the contents of `result.json`.
    eval_every: rounds from one evaluation to the next.
    checkpoint_every: rounds from one checkpoint to the next; changes only the
      time and, with several rounds per dispatch, rounding.
    keep: how many checkpoints are kept.
    tensorboard: whether to write `tensorboard/`.
    stop_on_nonfinite: whether to end the run when a metric whose name ends in
      "loss" is not finite, instead of warning once.
    rounds_per_dispatch: how many rounds are dispatched as one program, if no
      evaluation or checkpoint falls between them; other rounds are dispatched
      one by one. Changes results by floating-point rounding only.
    scanned_step: the program of several rounds, required if
      `rounds_per_dispatch` is above 1:
      `engine.compile(scanned(step), donate=(0,))`.

  Returns:
    The contents of `result.json`: what `summarize` returned, `rounds`,
    `seconds` (of wall time, over all parts of the run), `versions` and
    `git_commit`.

  Raises:
    FloatingPointError: see `stop_on_nonfinite`.
    SystemExit: after a signal.
    ValueError: an argument is out of its range; `scanned_step` is missing for
      more than one round per dispatch; `evaluate` and the step return a metric
      of the same name, or one named `round` or `seconds`; another process is
      using the folder; or its checkpoint is of another kind of state, or of a
      later round than `rounds`.
  """
  checks.counts(
    rounds=rounds, eval_every=eval_every, checkpoint_every=checkpoint_every
  )
  if rounds_per_dispatch > 1 and scanned_step is None:
    raise ValueError(
      f"rounds_per_dispatch={rounds_per_dispatch}: give scanned_step too"
    )
  finished = (folder.result() or {}).get("rounds") == rounds
  if engine.from_first(finished):
    logging.info(
      f"{folder.path}: the run is finished; this is its result.json. For"
      " another run, use another folder."
    )
    return _shared(folder)

  started = time.monotonic()
  commit = git_commit()  # Of the running code, not of a later checkout.
  checkpoints = checkpoint.Checkpoints(folder.checkpoints, keep)
  with contextlib.ExitStack() as stack:
    caught = stack.enter_context(stop_signals())
    stack.enter_context(folder.at_work())
    done, state, extra = _latest(algorithm, key, checkpoints)
    if done > rounds:
      raise ValueError(
        f"rounds={rounds}: {folder.path} already has a checkpoint of round"
        f" {done}; use another folder or a larger value of rounds"
      )
    if done:
      logging.info("%s: resuming after round %d.", folder.path, done)
    evaluation = extra.get("evaluation", {})
    started -= extra.get("seconds", 0.0)
    sums = _Sums(
      extra.get("totals", {}), extra.get("counts", {}), stop_on_nonfinite
    )
    write = stack.enter_context(
      logs.metrics_log(folder, after=done, tensorboard=tensorboard)
    )
    progress = stack.enter_context(
      contextlib.closing(logs.Progress(rounds, done))
    )
    dispatches = _dispatches(
      done + 1, rounds, (eval_every, checkpoint_every), rounds_per_dispatch
    )
    plans = stack.enter_context(contextlib.closing(_ahead(plan_fn, dispatches)))
    seconds = lambda: time.monotonic() - started

    def save() -> None:
      sums.fetch()
      if jax.process_index() == 0:  # Its checkpoint serves all processes.
        extra = {"totals": sums.totals, "counts": sums.counts}
        extra |= {"seconds": seconds(), "evaluation": evaluation}
        checkpoints.save(done, state, extra)

    saved = stop = False
    while done < rounds and not stop:
      dispatch, plan = next(plans)
      step = algorithm.step
      if scanned_step is not None and len(dispatch) > 1:
        step = scanned_step
      state, metrics = step(state, plan, data)
      state = core.strong(state)
      done = dispatch[-1]
      last = sums.add(dispatch, metrics)
      evaluated = done % eval_every == 0 or done == rounds
      if evaluated:
        given = evaluate(state)
        if not isinstance(given, dict):
          raise ValueError(
            f"evaluate returned a {type(given).__name__}, not a dict; an"
            " Evaluator's list has one for each model"
          )
        evaluation = {n: float(v) for n, v in given.items()}
        last = sums.fetch() or last
        row = _row(done, evaluation, sums.take(), seconds())
        write(row)
        progress.evaluated(row)
      progress.update(last, len(dispatch))
      saved = done % checkpoint_every == 0 or done == rounds
      if saved:
        save()
      # Several processes stop where they wait for each other anyway.
      if jax.process_count() == 1 or saved or evaluated:
        stop = bool(engine.from_first(bool(caught)))
    if stop and not saved:
      save()
    if done == rounds:
      result = {"rounds": rounds, "seconds": seconds()}
      result |= {"versions": versions(), "git_commit": commit}
      folder.write_result({**summarize(state, evaluation), **result})
  if jax.process_count() == 1:
    stop = bool(caught)  # A signal may have come after the last round.
  if stop:
    # Another process may have received the signal.
    number = caught[0] if caught else signal.SIGTERM
    so_far = "Checkpoint saved; run the same command to resume"
    logging.warning(
      f"{folder.path}: {signal.Signals(number).name} after round {done} of"
      f" {rounds}. {'Finished' if done == rounds else so_far}."
    )
    raise SystemExit(128 + number)
  return _shared(folder)


def final_state(
  algorithm: core.Algorithm, key: Any, folder: logs.RunFolder
) -> Any:
  """The final state of a finished run, in every process.

  Args:
    algorithm: the run's algorithm.
    key: what `run` was given for `algorithm.init`.
    folder: the run's folder.

  Returns:
    The state after the last round.

  Raises:
    ValueError: the run is not finished, or the checkpoint of its last round is
      gone.
  """
  rounds = _shared(folder)["rounds"]
  checkpoints = checkpoint.Checkpoints(folder.checkpoints)
  done, state, _ = _latest(algorithm, key, checkpoints)
  if done != rounds:
    raise ValueError(
      f"{folder.path}: the run is finished, but its last checkpoint is missing;"
      " delete the folder and run the same command again"
    )
  return state


def scanned(step: Callable) -> Callable:
  """Turns a step into one program over several rounds.

  Args:
    step: a traceable step.

  Returns:
    `(state, plans, data) -> (state, metrics)`, where the first axis of each
    array in plans and metrics is the round; pass it to `engine.compile`.

  >>> step = lambda state, plan, data: (state + plan, {'sum': state + plan})
  >>> state, metrics = scanned(step)(jax.numpy.zeros(()), np.ones(3), None)
  >>> float(state), metrics['sum'].tolist()
  (3.0, [1.0, 2.0, 3.0])
  """

  def scan(state, plans, data):
    def body(state, plan):
      state, metrics = step(state, plan, data)
      return core.strong(state), metrics

    return jax.lax.scan(body, state, plans)

  return scan


def versions(*more: str) -> dict[str, str]:
  """The device, and the versions of the packages that results depend on.

  Args:
    *more: packages besides those that every run depends on.

  Returns:
    Version by package; the device's `platform` and `device_kind`.
  """
  device = jax.devices()[0]
  found = {"python": platform.python_version()}
  for name in ("hetfl", "jax", "jaxlib", "flax", "optax", "numpy", *more):
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = "not installed"
  found |= {"platform": device.platform, "device_kind": device.device_kind}
  return found


def git_commit() -> str | None:
  """The commit of hetfl's checkout, `-dirty` if changed; None without one."""
  root = pathlib.Path(__file__).resolve().parents[2]

  def git(*args: str) -> str:
    return subprocess.run(
      ["git", "-C", str(root), *args],
      check=True,
      capture_output=True,
      text=True,
      timeout=10,
    ).stdout.strip()

  try:
    # A package installed inside another project's checkout is not part of it.
    if pathlib.Path(git("rev-parse", "--show-toplevel")).resolve() != root:
      return None
    return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
  except (OSError, subprocess.SubprocessError):
    return None


def _row(
  round: int,
  evaluation: Mapping[str, float],
  means: Mapping[str, float],
  seconds: float,
) -> dict[str, Any]:
  names = ["round", *evaluation, *means, "seconds"]
  for name in names:
    if names.count(name) > 1:
      raise ValueError(
        f"evaluate, step: metric name {name!r} is used by both, or is reserved"
        " (round, seconds)"
      )
  return {"round": round, **evaluation, **means, "seconds": seconds}


def _latest(
  algorithm: core.Algorithm, key: Any, checkpoints: checkpoint.Checkpoints
) -> tuple[int, Any, dict[str, Any]]:
  """The first process's newest checkpoint, else initial state, in all."""
  state = core.strong(engine.jit(algorithm.init, once=True)(key))
  first = jax.process_index() == 0  # The other folders do not count.
  found = checkpoints.latest(like=state) if first else None
  done, state, extra = found or (0, state, {})
  if jax.process_count() == 1 or not engine.from_first(done):
    return done, state, extra
  extra = json.loads(engine.bytes_from_first(json.dumps(extra).encode()))
  is_key = lambda a: jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)
  data = lambda a: np.asarray(jax.random.key_data(a) if is_key(a) else a)
  done, arrays = engine.from_first((done, jax.tree.map(data, state)))

  def like(a, b):
    if is_key(a):
      return jax.random.wrap_key_data(b, impl=jax.random.key_impl(a))
    return jax.numpy.asarray(b)

  return int(done), jax.tree.map(like, state, arrays), extra


def _shared(folder: logs.RunFolder) -> dict[str, Any]:
  """Returns the first process's result; copies its files to the others."""
  if not engine.from_first(folder.result() is not None):
    raise ValueError(
      f"{folder.path}: the run is not finished: it has no result.json; resume"
      " it first"
    )
  if jax.process_count() > 1:
    for path in (folder.metrics, folder.path / "result.json"):
      first = jax.process_index() == 0
      content = engine.bytes_from_first(path.read_bytes() if first else b"")
      if not first:
        logs.write_bytes(path, content)
  result = folder.result()
  assert result is not None  # The first process has a result, so all do.
  return result


def _dispatches(
  first: int, last: int, multiples: Sequence[int], size: int
) -> Iterator[range]:
  """Splits rounds into dispatches.

  A dispatch is either `size` rounds that cross no multiple or a single round,
  so two programs are enough.

  >>> [list(d) for d in _dispatches(2, 9, (6, 100), 3)]
  [[2], [3], [4, 5, 6], [7, 8, 9]]
  """
  while first <= last:
    end = min(last, *(m * -(-first // m) for m in multiples))
    number = size if (end - first + 1) % size == 0 else 1
    yield range(first, first + number)
    first += number


def _ahead(
  plan_fn: Callable[[int], Any],
  dispatches: Iterator[range],
) -> Generator[tuple[range, Any], None, None]:
  """Yields dispatches with their plans, made while earlier ones run."""

  def plan(rounds):
    plans = [plan_fn(round) for round in rounds]
    several = len(plans) > 1
    return rounds, hetfl.stack_plans(plans) if several else plans[0]

  executor = futures.ThreadPoolExecutor(1, thread_name_prefix="plan")
  waiting: collections.deque[futures.Future] = collections.deque()
  try:
    for rounds in dispatches:
      waiting.append(executor.submit(plan, rounds))
      if len(waiting) > 1:
        yield waiting.popleft().result()
    while waiting:
      yield waiting.popleft().result()
  finally:
    executor.shutdown(wait=False, cancel_futures=True)


def num_bytes(tree: Any) -> int:
  """The bytes of a pytree's arrays, such as of the variables that are sent.

  >>> num_bytes({'w': np.zeros((3, 2), np.float32), 'mean': np.zeros(2, 'f2')})
  28
  """
  return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
  """Collects stop signals in a list; a second one acts at once."""
  caught: list[int] = []
  since = 0.0
  when = "this round"
  if jax.process_count() > 1:
    when = "the next evaluation or checkpoint"

  def handler(number):
    nonlocal since
    if caught:
      # Sent to a group of processes, and handed on by one of them.
      if number == caught[0] and time.monotonic() - since < 1:
        return
      if number == signal.SIGINT:
        raise KeyboardInterrupt
      raise SystemExit(128 + number)
    caught.append(number)
    since = time.monotonic()
    name = signal.Signals(number).name
    # Not by `logging`: the signal may have interrupted a call of it.
    message = f"{name}: stopping after {when}; send it again to stop at once\n"
    os.write(2, message.encode())

  with on_signals(handler):
    yield caught


@contextlib.contextmanager
def on_signals(handler: Callable[[int], None]) -> Iterator[None]:
  """Makes stop signals call a handler; does nothing outside the main thread.

  Stop signals are SIGINT, SIGTERM, and SIGUSR1, which batch systems send when a
  job's time is nearly over.

  Args:
    handler: called with the signal's number.

  Yields:
    Nothing; the previous handlers are restored afterwards.
  """
  before = {}
  if threading.current_thread() is threading.main_thread():
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
      if number := getattr(signal, name, None):  # Windows has no SIGUSR1.
        before[number] = signal.signal(number, lambda n, _: handler(n))
  try:
    yield
  finally:
    for number, old in before.items():
      # A handler not set from Python reads as None and cannot be restored.
      signal.signal(number, old or signal.SIG_DFL)
