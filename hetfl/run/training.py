"""The training loop: rounds, evaluations, checkpoints, and resuming.

A run that is stopped, in whatever way, and resumed gives bit for bit the
results of an uninterrupted run: checkpoints hold the state, the sums of the
metrics since the last evaluation and the last evaluation itself, and a round's
plan is a pure function of the round.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import threading
import time
from typing import Any

from absl import logging
import jax

import hetfl
from hetfl import checks, core
from hetfl import engine as engine_lib
from hetfl.engine.work import row
from hetfl.run import checkpoint, logs

# Metrics of this many dispatches are fetched at once, after as many more have
# been dispatched, so that the device need not wait for Python.
_BATCH = 10


class _Sums:
  """Sums of metrics since the last evaluation.

  Args:
    stored: `sums` by metric, of a checkpoint, and `diverged`; else empty.
    stop_on_nonfinite: see `run`.

  Attributes:
    diverged: the first round with a loss that is not finite, if there is one.
  """

  def __init__(self, stored: Mapping[str, Any], stop_on_nonfinite: bool):
    self.sums: dict[str, Any] = stored.get("sums", {})
    self.diverged: int | None = stored.get("diverged")
    self._stop, self._warned = stop_on_nonfinite, False
    self._pending: list[tuple[range, core.Metrics]] = []

  def add(self, rounds: range, metrics: core.Metrics) -> None:
    """Adds a dispatch's metrics; fetches a batch once enough are pending.

    Args:
      rounds: the rounds of the dispatch.
      metrics: their metrics, with a leading axis of rounds if there are
        several.
    """
    self._pending.append((rounds, metrics))
    if len(self._pending) >= 2 * _BATCH:
      self.fetch(_BATCH)

  def fetch(self, number: int | None = None) -> None:
    """Fetches the oldest metrics, by default all."""
    batch = self._pending[:number]
    del self._pending[:number]
    for rounds, metrics in jax.device_get(batch):
      for i, round in enumerate(rounds):
        one = row(metrics, i) if len(rounds) > 1 else metrics
        self.check(round, core.values(one))
        for name, mean in one.items():
          # In this order and in float64, however fetches were batched.
          before = self.sums.get(name, (0.0, 0.0))
          self.sums[name] = [a + float(b) for a, b in zip(before, mean)]

  def take(self) -> dict[str, float]:
    """The means of the rounds that were fetched since the last call."""
    sums, self.sums = self.sums, {}
    return core.values(sums)

  def check(self, round: int, values: Mapping[str, float]) -> None:
    """Notes a loss that is not finite, and warns of the first, or stops."""
    bad = [
      f"{name} is {value}"
      for name, value in values.items()
      if name.endswith("loss") and not math.isfinite(value)
    ]
    if not bad or self._warned:
      return
    self.diverged = self.diverged or round
    message = (
      f"round {round}: {', '.join(bad)}: training has diverged; lower the"
      " learning rates (a label out of the model's range of classes does the"
      " same)"
    )
    if self._stop:
      raise FloatingPointError(f"{message} (stop_on_nonfinite)")
    logging.warning("%s. Later ones are not reported.", message)
    self._warned = True


def run(
  algorithm: core.Algorithm,
  key: Any,
  plan_fn: Callable[[int], Any],
  data: Any,
  evaluate: Callable[[Any], Mapping[str, float]],
  *,
  engine: engine_lib.Engine,
  rounds: int,
  folder: logs.RunFolder,
  summarize: Callable[[Any, dict[str, float]], Mapping[str, Any]],
  eval_every: int = 50,
  checkpoint_every: int = 50,
  tensorboard: bool = True,
  stop_on_nonfinite: bool = False,
  rounds_per_dispatch: int = 1,
  patience: int | None = None,
  watched: str = "clients/validation_accuracy",
) -> dict[str, Any]:
  """Trains to the last round, resuming from the newest checkpoint if any.

  Rounds are numbered from 1. After every `eval_every`-th and after the last,
  a row goes to `metrics.jsonl`: `round`, what `evaluate` returns, the means
  of the step's metrics over the rounds since the previous row, and `seconds`.
  A run goes on from the newest checkpoint whose rows are all there.

  On SIGINT, SIGTERM or SIGUSR1 (if `run` is called from the main thread) the
  process finishes the dispatched rounds, saves a checkpoint and exits with
  status 128 + signal; on a second one it exits without a checkpoint, once the
  running programs are done.

  If several processes run one program (`jax.distributed`), all call this with
  the same arguments and a folder each. Only the first process's folder counts:
  all resume from its checkpoint, and the other folders may be deleted. A signal
  then acts after the next evaluation or checkpoint.

  Args:
    algorithm: the pair `init` and `step`.
    key: for `algorithm.init`.
    plan_fn: round -> plan, a pure function; called one dispatch ahead, from
      another thread.
    data: passed to each `step` unchanged.
    evaluate: state -> numbers by name; must not change anything.
    engine: the algorithm's; compiles its step, which then may reuse the memory
      of the state it is given.
    rounds: how many rounds the run has in all.
    folder: the run's folder. Its config should hold every value that changes
      the result, including `rounds` and `eval_every`.
    summarize: (state, last evaluation) -> the contents of `result.json`.
    eval_every: rounds from one evaluation to the next.
    checkpoint_every: rounds from one checkpoint to the next; changes only the
      time and, with several rounds per dispatch, rounding.
    tensorboard: whether to write `tensorboard/`.
    stop_on_nonfinite: whether to end the run when a metric whose name ends in
      "loss" is not finite, instead of warning once; the last finite checkpoint
      is kept in any case.
    rounds_per_dispatch: how many rounds are dispatched as one program, if no
      evaluation or checkpoint falls between them; other rounds are dispatched
      one by one. Changes results by floating-point rounding only. With more
      than one the step must be traceable, not one on `Threads`.
    patience: end the run after this many evaluations without a greater value of
      `watched` than before them; `None` for never.
    watched: a name of what `evaluate` returns.

  Returns:
    The contents of `result.json`: what `summarize` returned, `rounds`,
    `seconds` (of wall time, over all parts of the run), `versions`,
    `git_commit` and the checksums `rows_crc32` and, in the file, `crc32`; and,
    if a loss was not finite, `diverged`, the first round in which it was not.

  Raises:
    FloatingPointError: see `stop_on_nonfinite`.
    SystemExit: after a signal.
    ValueError: an argument is out of its range; `evaluate` and the step return
      a metric of the same name, or one named `round` or `seconds`; another
      process is using the folder; or its checkpoint is of another kind of
      state, of a later round than `rounds`, or gone.
  """
  checks.counts(
    rounds=rounds,
    eval_every=eval_every,
    checkpoint_every=checkpoint_every,
    rounds_per_dispatch=rounds_per_dispatch,
    **checks.given(patience=patience),
  )

  def rows_until(done: int) -> list[dict[str, Any]]:
    """The rows up to a round."""
    return [r for r in logs.read_rows(folder.metrics) if r["round"] <= done]

  def checksum(rows: Sequence[Mapping[str, Any]]) -> int:
    return functools.reduce(lambda c, r: logs.checksum(r, c), rows, 0)

  def over(done: int) -> bool:
    """Whether the run ends with this round."""
    rows = rows_until(done) if patience else []
    if rows and watched not in rows[0]:
      names = ", ".join(sorted(rows[0]))
      raise ValueError(f"watched={watched!r}: choose from {names}")
    values = [-math.inf if r[watched] is None else r[watched] for r in rows]
    wait = len(values) - 1 - values.index(max(values)) if values else 0
    return engine_lib.from_first(done == rounds or wait >= (patience or 1))

  def damage(done: int, stored: Mapping[str, Any]) -> str:
    """What is wrong with the rows up to a round, if anything is."""
    rows = rows_until(done)
    evaluated = {*range(eval_every, done + 1, eval_every)} | {done} & {rounds}
    if lost := sorted(evaluated - {row["round"] for row in rows}):
      return f"has no lines of rounds {', '.join(map(str, lost))}"
    whole = stored.get("rows_crc32") in (None, checksum(rows))
    return "" if whole else "is not what was written"

  result = folder.result() or {}
  reached = result.get("rounds", 0)
  finished = 0 < reached <= rounds and not damage(reached, result)
  if engine_lib.from_first(finished) and over(reached):
    logging.info("%s: the run is finished already.", folder.path)
    return _shared(folder)

  started = time.monotonic()
  code = provenance()  # Of the running code, not of a later checkout.
  checkpoints = checkpoint.Checkpoints(folder.checkpoints)
  step_one, step_several = algorithm.step, scanned(algorithm.step)
  if not algorithm.on_host:
    step_one = engine.compile(step_one, donate=(0,))
    step_several = engine.compile(step_several, donate=(0,))
  with contextlib.ExitStack() as stack:
    caught = stack.enter_context(stop_signals())
    # Processes stop together, when the first was told to.
    stopped = lambda: bool(engine_lib.from_first(bool(caught)))
    stack.enter_context(folder.at_work())
    done, state, extra = _latest(algorithm, key, checkpoints, reached, damage)
    if done > rounds:
      raise ValueError(
        f"rounds={rounds}: {folder.path} already has a checkpoint of round"
        f" {done}; use another folder or a larger value of rounds"
      )
    if done:
      logging.info("%s: resuming after round %d.", folder.path, done)
    evaluation = extra.get("evaluation", {})
    started -= extra.get("seconds", 0.0)
    seconds = lambda: time.monotonic() - started
    sums = _Sums(extra, stop_on_nonfinite)
    write = stack.enter_context(
      logs.metrics_log(folder, after=done, tensorboard=tensorboard)
    )
    bar = stack.enter_context(logs.bar(rounds, initial=done))
    crc32 = checksum(rows_until(done))  # Of the rows that are there.

    def save() -> None:
      sums.fetch()
      if jax.process_index() == 0:  # Its checkpoint serves all processes.
        extra = {"diverged": sums.diverged, "sums": sums.sums}
        extra |= {"seconds": seconds(), "evaluation": evaluation}
        extra["rows_crc32"] = crc32
        checkpoints.save(done, state, extra)

    every, ends = (eval_every, checkpoint_every), over(done)
    last = done if ends else rounds
    dispatches = _dispatches(done + 1, last, every, rounds_per_dispatch)
    for dispatch, plan in _ahead(plan_fn, dispatches):
      step = step_one if len(dispatch) == 1 else step_several
      state, metrics = step(state, plan, data)
      state = core.strong(state)
      done = dispatch[-1]
      sums.add(dispatch, metrics)
      evaluated = done % eval_every == 0 or done == rounds
      if evaluated:
        evaluation = {n: float(v) for n, v in evaluate(state).items()}
        sums.fetch()
        sums.check(done, evaluation)
        means = sums.take()
        row = {"round": done, **evaluation, **means, "seconds": seconds()}
        if len(row) < len(evaluation) + len(means) + 2:
          raise ValueError(
            "evaluate: a metric has the name of one of the step's, or round or"
            f" seconds: {sorted(evaluation)}, {sorted(means)}"
          )
        write(row)
        crc32 = logs.checksum(row, crc32)
        logs.show(row, bar)
        ends = over(done)
      bar.update(len(dispatch))
      due = done % checkpoint_every == 0 or ends
      # Several processes stop where they wait for each other anyway.
      stop = (jax.process_count() == 1 or due or evaluated) and stopped()
      if due or stop:
        save()
      if stop or ends:
        break
    if ends:
      result = {"rounds": done, "seconds": seconds(), **code}
      result |= checks.given(diverged=sums.diverged)
      result["rows_crc32"] = crc32
      folder.write_result({**summarize(state, evaluation), **result})
    if stopped():  # Perhaps after the last round.
      logging.warning(
        "%s: stopped after round %d of %d.", folder.path, done, rounds
      )
      if not caught:  # Another process was.
        raise SystemExit(128 + signal.SIGTERM)
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
  checkpoints = checkpoint.Checkpoints(folder.checkpoints)
  done, state, _ = _latest(algorithm, key, checkpoints)
  rounds = (folder.result() or {}).get("rounds")
  if engine_lib.from_first(done != rounds):
    raise ValueError(
      f"{folder.path}: no checkpoint of the last round of a finished run;"
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
  >>> zero, ones = jax.numpy.zeros(()), jax.numpy.ones(3)
  >>> state, metrics = scanned(step)(zero, ones, None)
  >>> float(state), metrics['sum'].tolist()
  (3.0, [1.0, 2.0, 3.0])
  """

  def scan(state, plans, data):
    def body(state, plan):
      state, metrics = step(state, plan, data)
      return core.strong(state), metrics

    return jax.lax.scan(body, state, plans)

  return scan


def provenance(*packages: str) -> dict[str, Any]:
  """What a result depends on besides its flags.

  Args:
    *packages: packages besides those that every run depends on.

  Returns:
    `versions`: by package, and the device's `platform` and `device_kind`.
    `git_commit`: that of hetfl's checkout, `-dirty` if it was changed; None if
    hetfl is installed otherwise.
  """
  found = {"python": platform.python_version()}
  for name in ("hetfl", "jax", "jaxlib", "flax", "optax", "numpy", *packages):
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = "not installed"
  device = jax.devices()[0]
  found |= {"platform": device.platform, "device_kind": device.device_kind}
  root, commit = pathlib.Path(__file__).resolve().parents[2], None
  # A package installed inside another project's checkout is not part of it.
  if (root / ".git").exists() and shutil.which("git"):
    git = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    done = subprocess.run(
      [*git, "--exclude=*"], cwd=root, capture_output=True, text=True
    )
    commit = done.stdout.strip() or None
  return {"versions": found, "git_commit": commit}


def num_bytes(tree: Any) -> int:
  """The bytes of a pytree's arrays, such as of the variables that are sent.

  >>> num_bytes({'w': jax.numpy.zeros((3, 2)), 'b': jax.numpy.zeros(2, 'f2')})
  28
  """
  return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


@contextlib.contextmanager
def stop_signals(
  then: Callable[[int], None] = lambda number: None,
) -> Iterator[list[int]]:
  """Collects stop signals in a list; a second one ends the process at once.

  Stop signals are SIGINT, SIGTERM, and SIGUSR1, which batch systems send when a
  job's time is nearly over. Outside the main thread they are left alone.

  Args:
    then: called with each signal's number.

  Yields:
    The list; the previous handlers are restored afterwards.

  Raises:
    SystemExit: at the end, if there was one.
  """
  caught: list[int] = []
  since = 0.0

  def handler(number, _):
    nonlocal since
    then(number)
    if not caught:
      caught.append(number)
      since = time.monotonic()
      # Not by `logging`: the signal may have interrupted a call of it.
      name = signal.Signals(number).name
      message = f"{name}: stopping soon; the same command resumes. Send it"
      os.write(2, f"{message} again to stop at once.\n".encode())
    # One signal may come twice: to a group of processes, and from one of them.
    elif number != caught[0] or time.monotonic() - since > 1:
      raise SystemExit(128 + number)

  before = {}
  if threading.current_thread() is threading.main_thread():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
      before[number] = signal.signal(number, handler)
  try:
    yield caught
  finally:
    for number, old in before.items():
      # A handler not set from Python reads as None and cannot be restored.
      signal.signal(number, old or signal.SIG_DFL)
  if caught:  # Perhaps after the caller's last look.
    raise SystemExit(128 + caught[0])


def _latest(
  algorithm: core.Algorithm,
  key: Any,
  checkpoints: checkpoint.Checkpoints,
  reached: int = 0,
  damage: Callable[[int, Mapping[str, Any]], str] = lambda done, stored: "",
) -> tuple[int, Any, dict[str, Any]]:
  """The first process's newest checkpoint, else the initial state, in all.

  Args:
    algorithm: the run's algorithm.
    key: for its `init`.
    checkpoints: the run's checkpoints.
    reached: the round of its result, if it has one.
    damage: (round, what is stored with its checkpoint) -> what is wrong with
      the rows up to it; only checkpoints with nothing wrong count.

  Returns:
    The round, the state and what is stored with it.

  Raises:
    ValueError: the run has come further than any checkpoint that counts.
  """
  init = algorithm.init
  if not algorithm.on_host:
    init = engine_lib.jit(init, once=True)
  state = core.strong(init(key))
  found = None
  if jax.process_index() == 0:  # The other folders do not count.
    found = checkpoints.latest(like=state)
    reached = found[0] if found else reached
    what = damage(*(found[::2] if found else (reached, {})))
    where = f"{checkpoints.folder.parent}: "
    where += f"metrics.jsonl {what}: " if what else ""
    while found and damage(*found[::2]):
      found = checkpoints.latest(like=state, before=found[0])
    if reached and not found:
      raise ValueError(
        f"{where}the run has done {reached} rounds, and there is no checkpoint"
        " to go on from; put the files back, or use another folder"
      )
    if found and what:
      logging.warning("%sgoing on from round %d.", where, found[0])
  done, like, extra = found or (0, state, {})
  if jax.process_count() == 1:
    return done, like, extra
  text = engine_lib.bytes_from_first(json.dumps(extra).encode())
  sent = engine_lib.from_first((done, checkpoint.to_host(like)))
  return int(sent[0]), checkpoint.from_host(sent[1], state), json.loads(text)


def _shared(folder: logs.RunFolder) -> dict[str, Any]:
  """The first process's result; copies its files to the others' folders."""
  first = jax.process_index() == 0
  for path in (folder.metrics, folder.path / "result.json"):
    content = path.read_bytes() if first else b""
    content = engine_lib.bytes_from_first(content)
    if not first:
      logs.write_bytes(path, content)
  return folder.result() or {}


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
  plan_fn: Callable[[int], Any], dispatches: Iterator[range]
) -> Iterator[tuple[range, Any]]:
  """Yields dispatches with their plans, made while earlier ones run."""

  def planned(rounds):
    plans = [plan_fn(round) for round in rounds]
    return rounds, plans[0] if len(plans) == 1 else hetfl.stack_plans(plans)

  with futures.ThreadPoolExecutor(1, thread_name_prefix="plan") as executor:
    made = (executor.submit(planned, rounds) for rounds in dispatches)
    coming = next(made, None)
    while coming:
      now, coming = coming, next(made, None)
      yield now.result()
