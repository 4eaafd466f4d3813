"""A run's folder, its logs and its progress display.

A run's folder holds `config.flags` (a flag file that repeats the run),
`config.json`, `metrics.jsonl`, `result.json`, `checkpoints/` and
`tensorboard/`. Files are replaced atomically; JSON is strict, so a float that
is not finite is written as `null`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
import contextlib
import fcntl
import json
import math
import os
import pathlib
import platform
import re
import sys
import time
from typing import Any
import zlib

from absl import logging
import tqdm

from hetfl import checks

# Up to this many clients or parties are shown one by one in tables and curves.
FEW = 10
# The same on the line of an evaluation.
_FEW_ON_A_LINE = 3


class ConfigMismatch(ValueError):  # noqa: N818 (reads well in except)
  """The folder belongs to something other than this run."""


def writing(path: str | os.PathLike[str]) -> contextlib.AbstractContextManager:
  """Adds the file and a remedy to errors, such as that of a full disk."""
  return checks.noted(
    f"while writing {path}; free some space, or lift the quota, and repeat the"
    " command: it goes on from the last checkpoint"
  )


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
  """Writes a file atomically: at any moment it is the old or the new one."""
  path = pathlib.Path(path)
  # Other processes, on other hosts too, may be writing the same file.
  part = path.with_name(f".{path.name}.{platform.node()}-{os.getpid()}.part")
  with writing(path):
    part.write_bytes(content)
    sync(part)
    os.replace(part, path)
    sync(path.parent)


def make_folder(path: str | os.PathLike[str], named: str) -> pathlib.Path:
  """Makes a folder if it is not there.

  Args:
    path: the folder.
    named: the argument or flag that gives it, for error messages.

  Returns:
    The folder.

  Raises:
    ConfigMismatch: it cannot be made.
  """
  path = pathlib.Path(path)
  try:
    path.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ConfigMismatch(
      f"{named}={path}: cannot be made ({error}); use another {named}"
    ) from error
  return path


def sync(path: str | os.PathLike[str]) -> None:
  """Flushes a file's content, or the names in a folder, to disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def to_json(value: Any) -> Any:
  """Makes a value strictly JSON: NaN and infinities become None.

  Args:
    value: mappings, sequences, strings, numbers; arrays of one element count
      as numbers.

  Returns:
    The same value, made of dict, list, str, bool, int, float and None.

  Raises:
    TypeError: the value has no such form.

  >>> import numpy as np
  >>> to_json({'a': (1, float('nan')), 'b': np.float32(0.5)})
  {'a': [1, None], 'b': 0.5}
  """
  if isinstance(value, Mapping):
    return {str(k): to_json(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [to_json(v) for v in value]
  if getattr(value, "size", 0) == 1:
    value = value.item()
  if isinstance(value, float) and not math.isfinite(value):
    return None
  if value is None or isinstance(value, str | bool | int | float):
    return value
  raise TypeError(
    f"{value!r}: a {type(value).__name__} has no form in JSON; of an array give"
    " the list, array.tolist()"
  )


def read_json(path: str | os.PathLike[str]) -> Any:
  """Reads a file of JSON; `None` if it is missing.

  Args:
    path: the file.

  Returns:
    The value.

  Raises:
    ValueError: it is damaged.
  """
  try:
    return json.loads(pathlib.Path(path).read_bytes())
  except (FileNotFoundError, NotADirectoryError):
    return None
  except ValueError as error:
    raise ValueError(
      f"{path} is damaged ({error}); repeat the command that wrote it, which"
      " makes it again"
    ) from None


def write_json(path: str | os.PathLike[str], value: Any) -> None:
  """Writes a value as JSON, atomically; see `to_json` on NaN."""
  text = json.dumps(to_json(value), indent=2, allow_nan=False)
  write_bytes(path, (text + "\n").encode())


def checksum(value: Any, before: int = 0) -> int:
  """The CRC-32 of a value of JSON types, without the times in it.

  Args:
    value: the value.
    before: the checksum of earlier values, which the result then covers too.

  Returns:
    The checksum.

  >>> checksum({'a': 1, 'seconds': 2.5}) == checksum({'seconds': 9.0, 'a': 1})
  True
  """
  left_out = ("seconds", "phase_seconds", "crc32")
  kept = lambda d: {k: v for k, v in d.items() if k not in left_out}
  value = json.loads(json.dumps(to_json(value)), object_hook=kept)
  return zlib.crc32(json.dumps(value, sort_keys=True).encode(), before)


def flags_text(values: Mapping[str, Any]) -> str:
  """Formats values as an absl flag file, one `--name=value` per line.

  Args:
    values: by flag name; None is left out, lists are joined by commas.

  Returns:
    The text.

  >>> print(flags_text({'lr': 0.1, 'pools': ['a', 'b'], 'bf16': False}))
  --lr=0.1
  --pools=a,b
  --bf16=false
  """
  lines = []
  for name, value in values.items():
    if isinstance(value, bool):
      value = str(value).lower()
    elif isinstance(value, list | tuple):
      value = ",".join(map(str, value))
    if value is not None:
      lines.append(f"--{name}={value}")
  return "\n".join(lines)


def differences(
  there: Mapping[str, Any],
  here: Mapping[str, Any],
  ignoring: Collection[str] = (),
) -> list[str]:
  """Lists the values in which two configurations differ.

  Args:
    there: values by name, of JSON types.
    here: the values to compare them with.
    ignoring: names that may differ.

  Returns:
    A line for each difference. Types count: 1 is not 1.0.

  >>> differences({'lr': 0.1, 'seed': 0}, {'lr': 0.2, 'seed': 0, 'k': 3})
  ['lr: there 0.1, here 0.2', 'k: there unset, here 3']
  """

  def show(values, name):
    return json.dumps(values[name]) if name in values else "unset"

  return [
    f"{name}: there {show(there, name)}, here {show(here, name)}"
    for name in dict.fromkeys([*there, *here])
    if name not in ignoring
    # Compared as text, since 1 == 1.0 == True.
    and show(there, name) != show(here, name)
  ]


def read_config(workdir: str | os.PathLike[str]) -> dict[str, Any]:
  """The values of a run's flags, from its folder's `config.json`.

  Args:
    workdir: the folder.

  Returns:
    `config`, the values that change the result, and `speed`, the others; an
    empty dict if the folder is not a run's.
  """
  try:
    stored = json.loads(pathlib.Path(workdir, "config.json").read_bytes())
    return {"config": dict(stored["config"]), "speed": dict(stored["speed"])}
  except (OSError, ValueError, KeyError, TypeError):
    return {}


class RunFolder:
  """The folder of one run.

  >>> import tempfile
  >>> temporary = tempfile.TemporaryDirectory()
  >>> folder = RunFolder(temporary.name, {'lr': 0.1}, {'lanes': 4})
  >>> print((folder.path / 'config.flags').read_text())
  --lr=0.1
  --lanes=4
  >>> with RunFolder(temporary.name, {'lr': 0.1}, {'lanes': 8}).at_work():
  ...   print((folder.path / 'config.flags').read_text())
  --lr=0.1
  --lanes=8
  >>> folder = RunFolder(temporary.name, {'lr': 0.2}, {'lanes': 4})
  Traceback (most recent call last):
    ...
  hetfl.run.logs.ConfigMismatch: workdir=... holds another run: lr: there 0.1,
  here 0.2. Use another workdir, or the same values.

  Attributes:
    path: the folder.
    checkpoints: the folder of the checkpoints.
    metrics: the file `metrics.jsonl`.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    config: Mapping[str, Any],
    speed: Mapping[str, Any] | None = None,
    flags: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    named: str = "workdir",
    lengthens: bool = False,
  ):
    """Creates the folder, or opens it if it belongs to the same run.

    Args:
      workdir: the folder; missing, empty, or of an earlier run.
      config: the values that change the result, by flag name.
      speed: the values that change only the speed; they may differ.
      flags: the text of `config.flags`; by default made from the values.
      defaults: the values to assume for flags that are missing in the folder's
        config, because an earlier version did not have them.
      named: the argument or flag that gives the folder, for error messages.
      lengthens: whether a run of fewer `rounds` may be extended to these; it
        may if nothing depends on their number. Its last round must have been a
        multiple of `eval_every`, or the rows would differ.

    Raises:
      ConfigMismatch: the folder is of a run with other values, or of no run.
    """
    self.path = pathlib.Path(workdir).absolute()
    self.checkpoints = self.path / "checkpoints"
    self.metrics = self.path / "metrics.jsonl"
    self._named = named
    config, speed = to_json(config), to_json(speed or {})
    self._config = {"format": 1, "config": config, "speed": speed}
    flags = flags or flags_text({**config, **speed})
    self._flags = flags.rstrip("\n") + "\n"
    stored = read_config(self.path)
    self._known = [(stored or self._config)["config"], config]
    # Hidden files are the system's, or were left by a killed process.
    if not stored and (self.path.is_file() or any(self.path.glob("[!.]*"))):
      runs = [path.parent.name for path in self.path.glob("*/config.json")]
      holds = f"it holds the runs {', '.join(sorted(runs))}"
      raise ConfigMismatch(
        f"{named}={workdir} exists, but is not the folder of a run"
        f" ({holds if runs else 'it has no config.json of one'})."
        f" Use another {named}."
      )
    if not stored:
      make_folder(workdir, named)
      self._write_config()
      return
    assumed = {n: d for n, d in (defaults or {}).items() if n in config}
    there = to_json(assumed) | stored["config"]
    unlike, hint = differences(there, config), ""
    if unlike and not differences(there, config, {"rounds"}):
      last, every = there["rounds"], there.get("eval_every", 1)
      if lengthens and last < config["rounds"] and last % every == 0:
        return
      hint = (
        " Rounds can only be added to a multiple of eval_every, and only if"
        " nothing depends on their number, such as learning rates that decay."
      )
    if unlike:
      raise ConfigMismatch(
        f"{named}={workdir} holds another run: {'; '.join(unlike)}.{hint}"
        f" Use another {named}, or the same values."
      )

  def _write_config(self) -> None:
    write_json(self.path / "config.json", self._config)
    write_bytes(self.path / "config.flags", self._flags.encode())

  @contextlib.contextmanager
  def at_work(self) -> Iterator[None]:
    """Keeps other processes out while this one trains in the folder.

    Replaces the folder's config with this process's, whose speed values may
    differ from those of the process that created the folder.

    Yields:
      Nothing.

    Raises:
      ConfigMismatch: another process is using the folder, or has made it
        another run's.
    """
    with open(self.path / ".lock", "wb") as file:
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        raise ConfigMismatch(
          f"{self._named}={self.path}: another process is using the folder."
          f" Wait for it, or use another {self._named}."
        ) from error
      except OSError:
        pass  # A file system without locks.
      if read_config(self.path).get("config") not in self._known:
        raise ConfigMismatch(
          f"{self._named}={self.path}: another process has begun another run"
          f" there. Use another {self._named}."
        )
      self._write_config()
      yield

  def keep(self, files: Mapping[str, bytes]) -> None:
    """Stores files with the run; in a resumed run they must be the same.

    Args:
      files: name -> content, which identifies the run's data.

    Raises:
      ConfigMismatch: a file in the folder has other content.
    """
    for name, content in files.items():
      path = self.path / name
      if not path.exists():
        write_bytes(path, content)
      elif path.read_bytes() != content:
        raise ConfigMismatch(
          f"{path} is not what this run would write: the data has changed, or"
          " the file of your model, or, for pydoc, Python. Use another"
          f" {self._named}."
        )

  def result(self) -> dict[str, Any] | None:
    """The contents of `result.json`; None if it is missing or damaged."""
    path = self.path / "result.json"
    with contextlib.suppress(ValueError, AttributeError):
      result = read_json(path)
      if result is None or result.get("crc32") in (None, checksum(result)):
        return result
    logging.warning("%s is damaged; it is made again.", path)
    return None

  def write_result(self, result: Mapping[str, Any]) -> None:
    """Writes `result.json`, with the `checksum` of the rest as `crc32`."""
    path = self.path / "result.json"
    write_json(path, {**result, "crc32": checksum(result)})


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Reads `metrics.jsonl`; a half-written last line is left out.

  Args:
    path: the file; if it is missing, there are no rows.

  Returns:
    One dict per row; floats that were not finite are None.

  Raises:
    ValueError: a line before the last is not JSON, or has no round.
  """
  try:
    *lines, _ = pathlib.Path(path).read_bytes().split(b"\n")
  except FileNotFoundError:
    return []
  try:
    rows = list(map(json.loads, lines))
    for row in rows:
      int(row["round"])
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f"{path} holds a line that is not a row of JSON ({error!r}); delete it"
      " and those after it, or the run's folder, and repeat the command"
    ) from None
  return rows


def write_rows(
  path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]
) -> None:
  """Writes rows as lines of JSON, atomically."""
  write_bytes(path, b"".join(map(_line, rows)))


def _line(row: Mapping[str, Any]) -> bytes:
  return json.dumps(to_json(row), allow_nan=False).encode() + b"\n"


@contextlib.contextmanager
def metrics_log(
  folder: RunFolder, *, after: int = 0, tensorboard: bool = True
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
  """Opens `metrics.jsonl`, and TensorBoard's log, for a run that resumes.

  Args:
    folder: the run's folder.
    after: the round of the checkpoint; later rows are dropped.
    tensorboard: whether to write `tensorboard/` too.

  Yields:
    A function that appends a row, `round` and metrics by `'pool/name'`; it is
    on the disk when the function returns.

  >>> import tempfile
  >>> folder = RunFolder(tempfile.mkdtemp(), {})
  >>> with metrics_log(folder, tensorboard=False) as write:
  ...   write({'round': 1, 'loss': 0.5})
  ...   write({'round': 2, 'loss': float('nan')})
  >>> print(folder.metrics.read_text())
  {"round": 1, "loss": 0.5}
  {"round": 2, "loss": null}
  """
  rows = read_rows(folder.metrics)
  write_rows(folder.metrics, [row for row in rows if row["round"] <= after])
  with contextlib.ExitStack() as stack:
    draw = None
    if tensorboard:
      draw = stack.enter_context(_board(folder.path / "tensorboard", after))

    def write(row):
      with writing(folder.metrics), open(folder.metrics, "ab") as file:
        file.write(_line(row))
        file.flush()
        os.fsync(file)
      if draw:
        draw(row)

    yield write


@contextlib.contextmanager
def _board(
  folder: pathlib.Path, after: int
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
  """Opens TensorBoard's log; see `metrics_log`.

  In this thread: a `SummaryWriter`'s dies when the disk is full, and the queue
  to it then blocks for ever.
  """
  # Importing them takes seconds.
  from tensorboardX.event_file_writer import EventsWriter
  from tensorboardX.proto.event_pb2 import Event, SessionLog
  from tensorboardX.summary import scalar

  with writing(folder):
    folder.mkdir(exist_ok=True)
    events = EventsWriter(str(folder / "events"))
    # Drops what a killed process wrote.
    start = SessionLog(status=SessionLog.START)
    events.write_event(Event(step=after + 1, session_log=start))

  def write(row):
    facts = dict(step=row["round"], wall_time=time.time())
    with writing(folder):
      for name, value in to_json(row).items():
        # TensorBoard cannot draw floats that are not finite, None.
        if name != "round" and isinstance(value, int | float):
          events.write_event(Event(summary=scalar(name, value), **facts))
      events.flush()

  try:
    yield write
  finally:
    with contextlib.suppress(OSError):  # All is written, or an error said so.
      events.close()


def bar(total: int, **options: Any) -> tqdm.tqdm:
  """A progress bar of rounds on a terminal; nothing elsewhere.

  Args:
    total: how many rounds.
    **options: further options of `tqdm.tqdm`.

  Returns:
    The bar.
  """
  # The file is given here, since tqdm's default is fixed at import.
  options |= dict(unit="round", file=sys.stderr, dynamic_ncols=True)
  return tqdm.tqdm(total=total, disable=None, **options)


def show(row: Mapping[str, Any], bar: tqdm.tqdm) -> None:
  """Shows a row of metrics beside the bar or, where there is none, in the log.

  Args:
    row: metrics, with their `round` and `seconds`; only its accuracies are
      logged, if it has any.
    bar: the bar of a run's rounds.
  """
  numbers = {k: v for k, v in row.items() if k not in ("round", "seconds")}
  bar.set_postfix_str(_text(numbers), refresh=False)
  if bar.disable:
    accuracies = {k: v for k, v in numbers.items() if k.endswith("accuracy")}
    logging.info(
      f"round {row['round']} of {bar.total}, {row['seconds']:.1f} s:"
      f" {_text(accuracies or numbers)}"
    )


def _text(numbers: Mapping[str, float]) -> str:
  """Metrics on one line; of several clients or parties, their means.

  >>> _text({'a/loss': 1.5, 'b/loss': 2} | {f'c{k}/loss': k for k in range(5)})
  'loss a 1.5, b 2, c mean 2'
  """
  # metric -> kind of owner -> owner -> value
  found: dict[str, dict[str, dict[str, float]]] = {}
  for name, value in numbers.items():
    owner, _, metric = name.rpartition("/")
    kind = re.sub(r"\d+$", "", owner)
    found.setdefault(metric, {}).setdefault(kind, {})[owner] = value
  texts = []
  for metric, kinds in found.items():
    shown: dict[str, float] = {}
    for kind, of_each in kinds.items():
      if len(of_each) <= _FEW_ON_A_LINE:
        shown |= of_each
      elif f"{kind}s" not in kinds:  # Else the row has their mean.
        shown[f"{kind} mean"] = sum(of_each.values()) / len(of_each)
    parts = [f"{owner} {v:.4g}".strip() for owner, v in shown.items()]
    texts.append(f"{metric} {', '.join(parts)}")
  return "; ".join(texts)
