"""Runs a search, as `tune.py` asks for."""

from collections.abc import Mapping
import dataclasses
import importlib
import pathlib
import statistics
from typing import Any

from absl import logging
import jax
import launch
from settings import Given, Settings, shown, UsageError
from tune import Search

import hetfl
from hetfl.run import charts, logs, report, training, trials, tune


def make_space(
  search: Search, cls: type[Settings], words: set[str]
) -> dict[str, trials.Dimension]:
  """The ranges that settings declare, with the changes of `--space`.

  Args:
    search: the search.
    cls: the experiment's settings.
    words: what holds of a trial.

  Returns:
    Dimension by name: of a setting, or SETTING.MODEL of one of its values.

  Raises:
    UsageError: naming what is wrong with `--space`.
  """
  declared, texts = cls.declared(), {}
  for name, s in declared.items():
    if s.search and s.kind_in(words) != "idle":
      names = (s.search_each and _of_each(s)) or [name]
      texts |= dict.fromkeys(names, s.search)
  for item in search.space:
    name, _, text = item.partition("=")
    s = declared.get(name.partition(".")[0])
    if s is None or name not in (s.name, *_of_each(s)) or s.type is not float:
      raise UsageError(
        f"--space={item}: {name!r} is not a flag of {search.experiment} with"
        " numbers that can be searched, nor FLAG.MODEL of one with a value for"
        " each model, small or large"
      )
    # One value for all models, or one for each: not both.
    if name != s.name and s.name in texts:
      texts |= dict.fromkeys(_of_each(s), texts.pop(s.name))
    both = name == s.name and {*_of_each(s)} & {*texts}
    for n in _of_each(s) if both else [name]:
      texts.pop(n, None)
      texts |= {} if text == "fixed" else {n: text}
  space = {}
  for name, text in texts.items():
    try:
      space[name] = d = trials.Dimension.parse(text)
      for end in (d.low, d.high):
        declared[name.partition(".")[0]].read(str(end))
    except ValueError as error:
      raise UsageError(f"--space, {name}: {error}") from error
  if not space:
    raise UsageError(
      "--space=...: every value is fixed, so there is nothing to search"
    )
  return space


def _of_each(s) -> list[str]:
  """The dimensions of a setting with a value for each model."""
  return [f"{s.name}.{model}" for model in s.each]


def whole(space: Mapping[str, Any], cls: type[Settings]) -> set[str]:
  """The settings that are searched as one value or for all models."""
  names = {name.partition(".")[0] for name in space}
  every = {n: {*_of_each(cls.declared()[n])} or {n} for n in names}
  return {n for n in names if n in space or every[n] <= space.keys()}


def start_values(s: Settings, space: trials.Space) -> dict[str, float] | None:
  """The flags' own values, which a search tries first.

  They may lie outside the ranges.

  Args:
    s: the settings of a trial.
    space: dimension by name.

  Returns:
    Dimension -> value; None if a flag has one value for each model, where the
    search has one for all.
  """
  values = {}
  for name in space:
    flag, _, model = name.partition(".")
    given, each = getattr(s, flag), s.declared()[flag].each
    given = given if isinstance(given, tuple) else (given,)
    if model:
      given = (given[each.index(model)],)
    if len({*given}) > 1:
      logging.warning(
        "No trial has the flags' own values, since --%s=%s is not one value, as"
        " in the search; give --space a range for each model.",
        *(flag, shown(given)),
      )
      return None
    values[name] = float(given[0])
  return values


def flag_values(s: Settings, values: Mapping[str, Any]) -> dict[str, Any]:
  """A trial's values as values of settings.

  Args:
    s: the settings of a trial, for models that are not searched.
    values: dimension -> value, a number or traced.

  Returns:
    Setting -> a value, or a list of one for each model.
  """
  found = {}
  for name, value in values.items():
    flag, _, model = name.partition(".")
    if model:
      each = s.declared()[flag].each
      found.setdefault(flag, list(getattr(s, flag) or [None] * len(each)))
      found[flag][each.index(model)] = value
    else:
      found[flag] = value
  return found


def place(state: Any, s: Settings, values: Mapping[str, Any]) -> Any:
  """A state with a trial's values.

  Args:
    state: the state of the algorithm.
    s: the settings of a trial.
    values: dimension -> value, a number or traced.

  Returns:
    The state.

  Raises:
    UsageError: the state holds no such value.
  """
  for name, value in flag_values(s, values).items():
    argument = s.declared()[name].argument or name
    try:
      state = hetfl.with_hyper(state, **{argument: value})
    except ValueError as error:
      raise UsageError(
        f"--space: --{name} cannot be searched: with these flags the state of"
        f" --algorithm={s.algorithm} does not contain it; have {name}=fixed in"
        " --space, or leave it out"
      ) from error
  return state


def make_problem(
  experiment: Any, s: Settings, objective: str, vmap: bool
) -> trials.Problem:
  """The experiment as a search's problem."""
  algorithm = experiment.algorithm(s)
  names, evaluate, eval_data = experiment.heldout(s)
  chosen = names if objective == "mean" else (objective,)
  if not {*chosen} <= {*names}:
    raise UsageError(
      f"--objective={objective}: choose from mean, {', '.join(names)}"
    )
  compiled = (lambda f: f) if vmap else experiment.engine.compile
  return trials.Problem(
    init=lambda values, seed: place(
      algorithm.init(jax.random.key(seed)), s, values
    ),
    step=compiled(algorithm.step),
    plan=lambda seed, round: experiment.plan(
      dataclasses.replace(s, seed=seed), round
    ),
    data=experiment.device_data(s),
    evaluate=compiled(evaluate),
    eval_data=eval_data,
    objective=lambda heldout: statistics.fmean(heldout[n] for n in chosen),
    rounds=s.rounds,
  )


def settle(
  given: Given, search: Search, command: Any
) -> tuple[Settings, trials.Space, set[str], bool]:
  """The settings of the trials.

  Args:
    given: the flags.
    search: the search.
    command: the experiment's module.

  Returns:
    The settings; the space; the names of settings whose value is 0, which are
    given as another number here, since the state would lack them; and whether
    trials are one program.

  Raises:
    UsageError: naming a flag that is not for searches, or several algorithms.
  """
  values, cls = dict(given.values), command.SETTINGS
  for name in (
    *("bank", "rounds_per_dispatch", "stop_on_nonfinite"),
    "distributed_coordinator",
  ):
    # A run's own config.flags contains these.
    value = values.get(name)
    if value is True or value not in (None, False, 1, "device"):
      raise UsageError(f"--{name}={shown(value)}: not for searches")
  names = cls.resolve(values, ()).algorithm
  if len(names) != 1:
    raise UsageError(f"--algorithm={shown(names)}: name one to search for")
  on_cpu = jax.default_backend() == "cpu"
  vmap = search.batching == "vmap" or (search.batching == "auto" and not on_cpu)
  if vmap:
    values["engine"] = "inline"
  words = command.words(values, names[0])
  space = make_space(search, cls, words)
  s, off = cls.resolve(values, words), set()
  for name, dimension in space.items():
    if getattr(s, name.partition(".")[0]) in (0, (0.0,)):
      off.add(name)
      values[name] = dimension.high
  return cls.resolve(values, words), space, off, vmap


def main(given: Given) -> None:
  """Runs the search, then writes and prints its results."""
  search = Search.resolve(given.values, ())
  command = importlib.import_module(f"{search.experiment}_run")
  s, space, off, vmap = settle(given, search, command)
  launch.warn_of_idle(given, [s])
  (algorithm,), seeds = s.algorithm, s.seeds or (s.seed,)
  s = dataclasses.replace(s, algorithm=algorithm)
  dataset = shown(s.dataset).replace(",", "-")
  workdir = launch.workdir_of(
    given, "tune", search.experiment, dataset, algorithm
  )
  if s.seeds and getattr(s, "distill_examples", None):
    raise UsageError(
      f"--seeds={shown(s.seeds)}: trials share the --distill_examples that"
      f" --seed={s.seed} draws; leave one of the two out"
    )
  experiment = command.Experiment(s)
  problem = make_problem(experiment, s, search.objective, vmap)
  # Raises errors before any folder is made.
  jax.eval_shape(lambda: problem.init({n: d.low for n, d in space.items()}, 0))
  problem.plan(seeds[0], 1)
  start = start_values(s, space)
  start = start and start | dict.fromkeys(off, 0.0)
  config = search_config(search, s, space, start)
  files = experiment.files(s)
  joined = [pathlib.Path(path) for path in search.join or ()]
  for path in joined:
    check_alike(path, config, files)
  rows = tune.join(joined)
  # `joined`: so that --join does not overwrite the trials of a search.
  folder = logs.RunFolder(
    workdir,
    config | ({"joined": True} if joined else {}),
    s.of_kind("speed", "machine") | search.of_kind("speed"),
    flags=logs.flags_text(config | search.of_kind("speed")),
    named="--workdir",
  )
  folder.keep(files)
  code = training.provenance()  # Of the running code, as in `training.run`.
  with folder.at_work():
    if joined:
      logs.write_rows(workdir / "trials.jsonl", rows)
    else:
      at_once = 2 * getattr(experiment.engine, "num_threads", 0) or 1
      runner = trials.SideBySide(problem, seeds, at_once=at_once)
      if vmap:
        runner = trials.Vmapped(problem, seeds, devices=jax.devices())
      optuna = search.proposer == "optuna"
      make = tune.optuna_search if optuna else tune.random_search
      options = search.arguments(
        tune.search,
        problem=problem,
        propose=make(space, s.seed),
        runner=runner,
        folder=workdir,
        checkpoint_every=s.checkpoint_every or s.eval_every,
        start=start,
      )
      rows = tune.search(**options)
  best = write_best(search, s, rows, workdir)
  charts.parallel_coordinates(
    {name: [row["values"][name] for row in rows] for name in space},
    [r["objective"] if r["status"] == "complete" else None for r in rows],
    workdir / "parallel.png",
    log=[name for name, dimension in space.items() if dimension.log],
    label=f"held-out % ({search.objective})",
    title=f"{algorithm}, {shown(s.dataset)}: {len(rows)} trials",
  )
  started = next((row for row in rows if row.get("start")), None)
  kept = ("trial", "objective", "heldout", "test", "values")
  result = {
    "experiment": search.experiment,
    "objective": search.objective,
    "algorithm": algorithm,
    "dataset": s.dataset,
    "rounds": s.rounds,
    "seeds": seeds,
    **{
      which: {name: row.get(name) for name in kept}
      for which, row in (("start", started), ("best", best))
      if row
    },
    # Each row of a block has the seconds of the whole block.
    "seconds": sum({row["block_end"]: row["seconds"] for row in rows}.values()),
    **code,
    **tune.summary(rows, search.top),
  }
  folder.write_result(result)
  print(tune.table(rows, space, search.top))
  if started:
    score = report.cell([started["objective"]], "{:.2f} %", 100)
    print(f"\nTrial 0 has the flags' own values: objective {score}")
  means = ", ".join(f"{n} {100 * v:.2f} %" for n, v in result["test"].items())
  print(f"\nOn test data, the mean of the best {result['top']}: {means}")
  print(f"\nBest flags: {workdir / 'best.flags'}")


def search_config(
  search: Search,
  s: Settings,
  space: trials.Space,
  start: Mapping[str, float] | None,
) -> dict[str, Any]:
  """What identifies a search: its own settings, and its trials' fixed ones.

  Args:
    search: the search.
    s: the settings of a trial.
    space: dimension by name.
    start: the values of trial 0, if they are the flags' own.

  Returns:
    The config of the search's folder.
  """
  fixed = s.of_kind("result") | flag_values(s, start or {})
  # A setting may be searched for one model and not for the other.
  for name in () if start else whole(space, type(s)):
    fixed.pop(name)
  ranges = [
    f"{name}={'log' if d.log else 'linear'}:{d.low:.12g}:{d.high:.12g}"
    for name, d in space.items()
  ]
  defaults = make_space(Search.resolve({}, ()), type(s), set(s.words))
  ranges += [f"{name}=fixed" for name in defaults if name not in space]
  own = search.of_kind("result") | {"seeds": s.seeds}
  return own | fixed | {"space": ranges}


def check_alike(
  path: pathlib.Path, config: dict, files: Mapping[str, bytes]
) -> None:
  """Checks that a folder holds a search that differs only in its seed.

  Args:
    path: the folder.
    config: this search's.
    files: those that identify its data.

  Raises:
    UsageError: it does not.
  """
  there = logs.read_config(path).get("config", {})
  why = "" if there else "it is not a search's folder"
  if there and not (path / "result.json").exists():
    why = "it has not ended"
  # Without --seeds, --seed is the trials' seed too, and so must be the same.
  own = {"joined", *(["seed"] if config["seeds"] else [])}
  unlike = logs.differences(there, logs.to_json(config), ignoring=own)
  if not why and unlike:
    raise UsageError(
      f"--join={path}: belongs to a different search: {'; '.join(unlike)}"
    )
  for name in files:
    if not why and (path / name).read_bytes() != files[name]:
      why = f"its {name} is of other data"
  if why:
    raise UsageError(f"--join={path}: not a search that can be joined: {why}")


def write_best(
  search: Search, s: Settings, rows: list[tune.Row], workdir: pathlib.Path
) -> tune.Row:
  """Writes `best.flags` for the experiment, and returns the best row."""
  best = tune.top(rows, 1)
  if not best:
    raise UsageError(
      f"--trials={len(rows)}: all have diverged; lower the ranges (--space), or"
      " add trials"
    )
  (row,) = best
  accuracies = ", ".join(
    f"{m} {100 * v:.2f} %" for m, v in row["heldout"].items()
  )
  head = [
    f"# Trial {row['trial']}, the best of {len(rows)}"
    f" (--objective={search.objective}); on held-out data {accuracies}.",
    f"#   python experiments/{search.experiment}.py --flagfile=best.flags"
    " --data_dir=DIR",
  ]
  # With --seeds, the trials' seeds and not the search's own.
  seeds = {"seed": None, "seeds": s.seeds} if s.seeds else {}
  used = s.of_kind("result") | flag_values(s, row["values"]) | seeds
  text = "\n".join([*head, logs.flags_text(used)]) + "\n"
  logs.write_bytes(workdir / "best.flags", text.encode())
  return row
