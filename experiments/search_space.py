"""Which flags a search varies: `--space`, and trials' values as flags."""

from collections.abc import Collection
import pathlib
from typing import Any

from absl import flags, logging
import common
import tunables

from hetfl.run import logs, trials

FLAGS = flags.FLAGS
# Flags of the search that change its result.
_SEARCH_FLAGS = (
  "experiment",
  "block",
  "halvings",
  "objective",
  "proposer",
  "seeds",
)


def make_space(tunable: tunables.Tunable, algorithm: str) -> trials.Space:
  """The default space, with the changes of `--space`.

  Args:
    tunable: the experiment.
    algorithm: one of its algorithms.

  Returns:
    Dimension by name.

  Raises:
    UsageError: naming what is wrong with `--space`.
  """
  space = dict(tunable.space[algorithm])
  for item in FLAGS.space:
    name, _, text = item.partition("=")
    flag, _, model = name.partition(".")
    if flag not in FLAGS or model not in ("", *tunable.models):
      models = f", nor FLAG.MODEL with one of {', '.join(tunable.models)}"
      raise common.UsageError(
        f"--space={item}: {name!r} is not a flag of {tunable.module}"
        f"{models if tunable.models else ''}"
      )
    # One value for all models, or one for each: not both.
    each = [f"{flag}.{m}" for m in tunable.models]
    if model:
      whole = space.pop(flag, None)
      space |= {n: whole for n in each if whole}
      names = [name]
    else:
      names = each if set(each) & set(space) else [flag]
    for n in names:
      space.pop(n, None)
      if text != "fixed":
        space[n] = text
  dimensions = {}
  for n, text in space.items():
    try:
      dimensions[n] = trials.Dimension.parse(text)
    except ValueError as error:
      raise common.UsageError(f"--space, {n}: {error}") from error
  if not dimensions:
    raise common.UsageError(
      "--space=...: every value is fixed, so there is nothing to search"
    )
  for flag in sorted(common.typed() & _searched(dimensions, tunable)):
    logging.warning(
      "--%s=%s is where the search starts, and only trial 0 has it; for all"
      " trials add %s=fixed to --space.",
      flag,
      shown(FLAGS[flag].value),
      flag,
    )
  return dimensions


def start_values(
  tunable: tunables.Tunable,
  config: dict,
  space: trials.Space,
  off: Collection[str],
) -> dict[str, float] | None:
  """The flags' own values, which a search tries first.

  They may lie outside the ranges.

  Args:
    tunable: the experiment.
    config: its flags.
    space: dimension by name.
    off: the flags that are 0, though their values in `config` are not.

  Returns:
    Dimension -> value; None if a flag has one value for each model, where the
    search has one for all.
  """
  values = {}
  for name in space:
    flag, _, model = name.partition(".")
    given = 0.0 if flag in off else config[flag]
    each = list(given) if isinstance(given, list | tuple) else [given]
    if model and len(each) > 1:
      each = [each[tunable.models.index(model)]]
    if len({*each}) > 1:
      logging.warning(
        "No trial has the flags' own values, since --%s=%s is not one value, as"
        " in the search; add a range for each model to --space, such as %s.%s.",
        flag,
        shown([str(value) for value in each]),
        flag,
        tunable.models[0] if tunable.models else "MODEL",
      )
      return None
    values[name] = float(each[0])
  return values


def has_no_start(
  folder: pathlib.Path, space: trials.Space, tunable: tunables.Tunable
) -> bool:
  """Whether a folder's search did not begin with the flags' own values.

  Searches of earlier versions did not; then its config lacks these flags.
  """
  stored = logs.read_config(folder)
  # If it is no search, that is found out later.
  return (
    bool(stored) and not _searched(space, tunable) <= stored["config"].keys()
  )


def _searched(space: trials.Space, tunable: tunables.Tunable) -> set[str]:
  """The flags that are searched as one value or for all models."""

  def whole(flag):
    of_models = [f"{flag}.{model}" for model in tunable.models]
    return flag in space or (bool(of_models) and space.keys() >= {*of_models})

  return {f for f in (name.partition(".")[0] for name in space) if whole(f)}


def flag_values(
  tunable: tunables.Tunable, config: dict, values: dict[str, Any]
) -> dict[str, Any]:
  """A trial's values as values of flags.

  Args:
    tunable: the experiment.
    config: the experiment's flags, for models that are not searched.
    values: dimension -> value, a number or traced.

  Returns:
    Flag -> a value, or a list of one for each model.
  """
  result = {}
  for name, value in values.items():
    flag, _, model = name.partition(".")
    if not model:
      result[flag] = value
      continue
    if flag not in result:
      there = config[flag]
      alike = not isinstance(there, list | tuple)
      result[flag] = [there] * len(tunable.models) if alike else list(there)
    result[flag][tunable.models.index(model)] = value
  return result


def check_ends(
  tunable: tunables.Tunable,
  module,
  config: dict,
  space: trials.Space,
  workdir,
) -> None:
  """Checks that the experiment accepts both ends of all ranges.

  Args:
    tunable: the experiment.
    module: its module.
    config: its flags.
    space: dimension by name.
    workdir: the search's folder.

  Raises:
    UsageError: naming a flag and the value that it rejects.
  """
  for end in ("low", "high"):
    ends = {name: getattr(d, end) for name, d in space.items()}
    values = flag_values(tunable, config, ends)
    before = {flag: FLAGS[flag].value for flag in values}
    try:
      for flag, value in values.items():
        each = value if isinstance(value, list) else [value]
        text = ",".join(map(str, each))
        try:
          FLAGS[flag].value = FLAGS[flag].parser.parse(text)
        except ValueError as error:
          hint = ""
          if isinstance(FLAGS[flag].parser, flags.IntegerParser):
            hint = "; whole numbers cannot be searched"
          raise common.UsageError(f"--{flag}={text}: {error}{hint}") from error
      module.configuration(config["algorithm"], workdir)
    except ValueError as error:
      raise common.UsageError(f"--space: {error}") from error
    finally:
      for flag, value in before.items():
        FLAGS[flag].value = value


def search_config(
  tunable: tunables.Tunable,
  config: dict,
  space: dict[str, trials.Dimension],
  start: dict[str, float] | None,
) -> dict[str, Any]:
  """What identifies a search: its own flags, and its trials' fixed flags.

  Args:
    tunable: the experiment.
    config: the experiment's flags.
    space: dimension by name.
    start: the values of trial 0, if they are the flags' own.

  Returns:
    The config of the search's folder.
  """
  # A flag may be searched for one model and not for the other.
  searched = set() if start else _searched(space, tunable)
  own = flag_values(tunable, config, start or {})
  fixed = [
    f"{n}=fixed" for n in tunable.space[config["algorithm"]] if n not in space
  ]
  return (
    {name: FLAGS[name].value for name in _SEARCH_FLAGS}
    | {n: v for n, v in (config | own).items() if n not in searched}
    | {"space": [*(_range(name, d) for name, d in space.items()), *fixed]}
  )


def shown(value: Any) -> str:
  """A flag's value or values as written on the command line."""
  return ",".join(value) if isinstance(value, list | tuple) else str(value)


def _range(name: str, dimension: trials.Dimension) -> str:
  scale = "log" if dimension.log else "linear"
  return f"{name}={scale}:{dimension.low:.12g}:{dimension.high:.12g}"
