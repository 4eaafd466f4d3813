r"""Searches for an experiment's hyper-parameters on held-out data.

  python experiments/tune.py --experiment=codist --trials=64 --block=16 \
      --workdir=DIR -- --algorithm=merged --dataset=digits --rounds=60

Flags after `--` are the experiment's own. By default the search space is the
paper's (codist: Lichtarge et al. 2023, appendix F), and the objective is the
mean of the models' accuracies on held-out data, never on test data;
`--experiment=fml` requires `--heldout_examples` for it. Trial 0 has the flags'
own values and is not halved, so the best trial is never worse than these on
held-out data. DIR then holds

  trials.jsonl  one line per trial
  result.json   the best trial, and the means of the best --top trials
  best.flags    a flag file of the best trial, for the experiment
  parallel.png  all trials, each a line across the hyper-parameters

The same command resumes a search that was stopped; with more --trials, it adds
to a finished one. To merge searches of several machines, with the same --seeds
for their trials and a different --seed each, run the same command with
--join=DIR1,DIR2 and a new DIR.
"""

from collections.abc import Callable
import importlib
import pathlib
from typing import Any

from absl import flags, logging
import common
import jax
import launch
import numpy as np
from search_space import (
  check_ends,
  flag_values,
  has_no_start,
  make_space,
  search_config,
  shown,
  start_values,
)
import tunables

from hetfl import engine
from hetfl.run import logs, report, training, trials, tune

FLAGS = flags.FLAGS


def _define_flags() -> None:
  flags.DEFINE_enum(
    "experiment",
    "codist",
    sorted(tunables.EXPERIMENTS),
    "The experiment whose hyper-parameters are searched.",
  )
  flags.DEFINE_integer(
    "trials",
    64,
    "Total number of trials; 1,024 in the paper. More can be added later. A"
    " multiple of --block is best, since a smaller last block is halved on its"
    " own.",
    lower_bound=1,
  )
  flags.DEFINE_list(
    "join",
    None,
    "Folders of searches with the same flags, including --seeds, but a"
    " different --seed each: merge their trials, and train none.",
  )
  flags.DEFINE_integer(
    "block",
    16,
    "Number of trials that train side by side, which bounds the memory: with"
    " --batching=vmap a trial of codist's CIFAR takes about a gigabyte. 64 in"
    " the paper.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "halvings",
    2,
    "How often the worse half of a block is dropped; 2: after 1/4 and after 1/2"
    " of the rounds.",
    lower_bound=0,
    upper_bound=10,
  )
  flags.DEFINE_list(
    "space",
    [],
    "Comma-separated ranges that replace the paper's: NAME=log:LOW:HIGH,"
    " NAME=linear:LOW:HIGH, or NAME=fixed for the value of its flag. NAME is a"
    " flag, such as client_lr, or a flag for one model, such as"
    " server_lr.small; a flag that has a default range for each model stands"
    " for both. Besides the default dimensions, prox_mu can be searched; batch"
    " sizes, epochs, momentum, dropout and label_weight cannot. Next-word"
    " prediction needs larger learning rates than the paper's:"
    " client_lr=log:1e-3:1.",
  )
  flags.DEFINE_string(
    "objective",
    "mean",
    "The held-out accuracy to maximize: for codist that of one model (small,"
    " large), for fml that of the global model or of the clients' own (global,"
    " clients); or their mean (mean).",
  )
  flags.DEFINE_enum(
    "proposer",
    "random",
    ["random", "optuna"],
    "How trials are proposed: by seeded random search, or by Optuna's TPE (pip"
    " install -e '.[tune]'), one block at a time.",
  )
  flags.DEFINE_enum(
    "batching",
    "auto",
    ["auto", "vmap", "threads"],
    "How trials train side by side: as one program, split over the devices if"
    " there are several (vmap), or as separate runs on one engine (threads);"
    " auto: vmap on accelerators, threads on CPUs. Changes speed only.",
  )
  flags.DEFINE_integer(
    "top",
    10,
    "Number of best trials in the table and in result.json's means, out of"
    " those that were trained to the end; 25 in the paper's Figure 4.",
    lower_bound=1,
  )


def _define_experiment() -> None:
  """Defines the flags of the experiment that --experiment names."""
  module = importlib.import_module(
    tunables.EXPERIMENTS[FLAGS.experiment].module
  )
  if "workdir" not in FLAGS:
    module.define_flags()


def make_objective(names: tuple[str, ...]) -> Callable[[dict], float]:
  """The objective of `--objective`, a function of the held-out accuracies."""
  if FLAGS.objective == "mean":
    return lambda heldout: float(np.mean(list(heldout.values())))
  if FLAGS.objective not in names:
    raise common.UsageError(
      f"--objective={FLAGS.objective}: choose from mean, {', '.join(names)}"
    )
  return lambda heldout: heldout[FLAGS.objective]


def make_problem(
  tunable: tunables.Tunable,
  experiment: Any,
  config: dict,
  speed: dict,
  vmap: bool,
) -> trials.Problem:
  """The experiment as a search's problem."""
  algorithm = experiment.algorithm(config, speed)
  names, evaluate, eval_data = tunable.accuracies(experiment, config)

  def init(values, seed):
    state = algorithm.init(jax.random.key(seed))
    for flag, value in flag_values(tunable, config, values).items():
      try:
        state = tunable.place(state, flag, value)
      except ValueError as error:
        raise common.UsageError(
          f"--space: --{flag} cannot be searched: with these flags the state"
          f" of --algorithm={config['algorithm']} does not contain it; add"
          f" {flag}=fixed to --space"
        ) from error
    return state

  return trials.Problem(
    init=init,
    step=algorithm.step if vmap else experiment.engine.compile(algorithm.step),
    plan=lambda seed, round: experiment.plan(config | {"seed": seed}, round),
    data=experiment.device_data(config),
    evaluate=evaluate if vmap else experiment.engine.compile(evaluate),
    eval_data=eval_data,
    objective=make_objective(names),
    rounds=config["rounds"],
  )


def check_flags(tunable: tunables.Tunable, module: Any) -> str:
  """The algorithm to search for, if searches support all flags.

  Args:
    tunable: the experiment.
    module: its module.

  Returns:
    The only name of `--algorithm`.

  Raises:
    UsageError: naming a flag that is not for searches, or several algorithms.
  """
  common.refuse("a search decides itself how its rounds run", "autotune")
  common.refuse(
    "a search is one process's, over all its devices",
    "distributed_coordinator",
  )
  common.refuse("trials run round by round", "rounds_per_dispatch")
  common.refuse(
    "a trial that diverges is masked, and the search goes on",
    "stop_on_nonfinite",
  )
  if "bank" in FLAGS and FLAGS.bank == "round":
    raise common.UsageError(
      "--bank=round: trials share the banks on the device"
    )
  names = FLAGS.algorithm
  if len(names) != 1 or names[0] not in tunable.space:
    raise common.UsageError(
      f"--algorithm={','.join(names)}: name one to search for, of"
      f" {', '.join(tunable.space)}"
    )
  common.warn_of_idle(
    f"--algorithm={names[0]} ignores it", *module.UNUSED[names[0]]
  )
  return names[0]


def choose_batching() -> bool:
  """Whether trials are one program; sets `--engine` if they are."""
  vmap = FLAGS.batching == "vmap" or (
    FLAGS.batching == "auto" and jax.default_backend() != "cpu"
  )
  if vmap:
    if FLAGS.engine not in ("auto", "inline"):
      raise common.UsageError(
        f"--engine={FLAGS.engine}: --batching=vmap makes one program of all"
        " trials itself; leave --engine out"
      )
    FLAGS.engine = "inline"
  return vmap


def main() -> None:
  """Runs the search, then writes and prints its results."""
  tunable = tunables.EXPERIMENTS[FLAGS.experiment]
  module = importlib.import_module(tunable.module)
  algorithm = check_flags(tunable, module)
  seeds = common.read_seeds()
  space = make_space(tunable, algorithm)
  off = set()
  for name, dimension in space.items():
    flag = name.partition(".")[0]
    if FLAGS[flag].value == 0:  # Switched off, it is not part of the state.
      FLAGS[flag].value = dimension.high
      off.add(flag)
  vmap = choose_batching()
  common.warn_of_idle_engine()
  dataset = shown(FLAGS.dataset).replace(",", "-")
  workdir = common.default_workdir("tune", FLAGS.experiment, dataset, algorithm)
  config, speed = module.configuration(algorithm, workdir)
  if FLAGS.seeds and config.get("distill_examples"):
    raise common.UsageError(
      f"--seeds={shown(FLAGS.seeds)}: trials share the --distill_examples that"
      f" --seed={FLAGS.seed} draws; leave one of the two out"
    )
  check_ends(tunable, module, config, space, workdir)
  experiment = module.Experiment(config, speed)
  problem = make_problem(tunable, experiment, config, speed, vmap)
  # Raises errors before any folder is made.
  jax.eval_shape(lambda: problem.init({n: d.low for n, d in space.items()}, 0))
  problem.plan(seeds[0], 1)
  own = start_values(tunable, config, space, off)

  def start_of(folder):
    return None if has_no_start(folder, space, tunable) else own

  start = start_of(workdir)
  if own and not start:
    logging.warning(
      "--workdir=%s: this search began without a trial of the flags' own"
      " values, and goes on without one.",
      workdir,
    )
  search = search_config(tunable, config, space, start)
  joined = [pathlib.Path(path).expanduser() for path in FLAGS.join or ()]
  for path in joined:
    theirs = search_config(tunable, config, space, start_of(path))
    check_alike(path, theirs, experiment.files)
  rows = tune.join(joined)
  folder = common.open_folder(
    workdir,
    # So that --join does not overwrite the trials of a search.
    search | ({"joined": True} if joined else {}),
    speed | {"trials": FLAGS.trials, "batching": FLAGS.batching},
  )
  folder.keep(experiment.files)
  code = training.provenance()  # Of the running code, as in `training.run`.
  with folder.at_work():
    if joined:
      logs.write_rows(workdir / "trials.jsonl", rows)
    else:
      rows = tune.search(
        problem,
        make_proposer(space),
        make_runner(problem, seeds, experiment.engine, vmap),
        folder=workdir,
        trials=FLAGS.trials,
        block=FLAGS.block,
        halvings=FLAGS.halvings,
        checkpoint_every=speed["checkpoint_every"],
        start=start,
      )
  best = write_best(tunable, module, rows, config, workdir)
  started = next((row for row in rows if row.get("start")), None)
  title = f"{algorithm}, {shown(config['dataset'])}: {len(rows)} trials"
  draw(rows, space, workdir / "parallel.png", title)
  result = {
    "experiment": FLAGS.experiment,
    "objective": FLAGS.objective,
    **{name: config[name] for name in ("algorithm", "dataset", "rounds")},
    "seeds": seeds,
    **{
      which: {
        name: row.get(name)
        for name in ("trial", "objective", "heldout", "test", "values")
      }
      for which, row in (("start", started), ("best", best))
      if row
    },
    # Each row of a block has the seconds of the whole block.
    "seconds": sum({row["block_end"]: row["seconds"] for row in rows}.values()),
    **code,
    **tune.summary(rows, FLAGS.top),
  }
  folder.write_result(result)
  print(tune.table(rows, space, FLAGS.top))
  if started:
    score = started["objective"]
    print(
      f"\nTrial {started['trial']} has the flags' own values: objective"
      f" {'none, it diverged' if score is None else f'{100 * score:.2f} %'}"
    )
  if "test" in result:  # Else the trials are of an older version.
    means = ", ".join(f"{n} {100 * v:.2f} %" for n, v in result["test"].items())
    print(f"\nOn test data, the mean of the best {result['top']}: {means}")
  print(f"\nBest flags: {workdir / 'best.flags'}")


def make_proposer(space: dict[str, trials.Dimension]) -> tune.Proposer:
  """The proposer that `--proposer` names."""
  optuna = FLAGS.proposer == "optuna"
  make = tune.optuna_search if optuna else tune.random_search
  return make(space, FLAGS.seed)


def make_runner(
  problem: trials.Problem, seeds: list[int], at: engine.Engine, vmap: bool
) -> trials.Runner:
  """The runner of trials: as one program, or side by side on an engine."""
  if vmap:
    return trials.Vmapped(problem, seeds, devices=jax.devices())
  threads = isinstance(at, engine.Threads)
  at_once = 2 * at.num_threads if threads else 1
  return trials.SideBySide(problem, seeds, at_once=at_once)


def draw(
  rows: list[tune.Row],
  space: dict[str, trials.Dimension],
  path: pathlib.Path,
  title: str,
) -> None:
  """Draws the trials as lines in parallel coordinates."""
  report.parallel_coordinates(
    {name: [row["values"][name] for row in rows] for name in space},
    [r["objective"] if r["status"] == "complete" else None for r in rows],
    path,
    log=[name for name, dimension in space.items() if dimension.log],
    label=f"held-out % ({FLAGS.objective})",
    title=title,
  )


def check_alike(
  path: pathlib.Path, search: dict, data: dict[str, bytes]
) -> None:
  """Checks that a folder holds a search that differs only in its seed.

  Args:
    path: the folder.
    search: this search's flags.
    data: files that identify its data.

  Raises:
    UsageError: it does not.
  """
  content = logs.read_config(path).get("config", {})
  why = "" if content else "it is no folder of a search"
  if content and not (path / "result.json").exists():
    why = "it has not ended"
  for name in data:
    if not why and (path / name).read_bytes() != data[name]:
      why = f"its {name} is of other data"
  if why:
    raise common.UsageError(
      f"--join={path}: not a search that can be joined: {why}"
    )
  here = logs.to_json(search)
  # An earlier version may not have had all flags.
  missing = {n for n in here if n not in content and n in FLAGS}
  content |= logs.to_json({n: FLAGS[n].default for n in missing})
  # Without --seeds, --seed is the trials' seed too, and so must be the same.
  own = {"joined", *(["seed"] if FLAGS.seeds else [])}
  unlike = logs.differences(content, here, ignoring=own)
  if unlike:
    raise common.UsageError(
      f"--join={path}: belongs to a different search: {'; '.join(unlike)}"
    )


def write_best(tunable, module, rows, config, workdir) -> tune.Row:
  """Writes `best.flags` for the experiment, and returns the best row."""
  best = tune.top(rows, 1)
  if not best:
    raise common.UsageError(
      f"--trials={len(rows)}: all have diverged; lower the ranges (--space), or"
      " add trials"
    )
  row = best[0]
  found = flag_values(tunable, config, row["values"])
  accuracies = ", ".join(
    f"{m} {100 * v:.2f} %" for m, v in row["heldout"].items()
  )
  head = [
    f"# Trial {row['trial']}, the best of {len(rows)}"
    f" (--objective={FLAGS.objective}); on held-out data {accuracies}.",
    f"#   python experiments/{tunable.module}.py --flagfile=best.flags"
    " --data_dir=DIR",
  ]
  # With --seeds, the trials' seeds and not the search's own.
  seeds = {"seed": None, "seeds": FLAGS.seeds} if FLAGS.seeds else {}
  used = {
    name: value
    for name, value in (config | found | seeds).items()
    if name not in module.UNUSED[config["algorithm"]]
  }
  text = "\n".join([*head, logs.flags_text(used)]) + "\n"
  logs.write_bytes(workdir / "best.flags", text.encode())
  return row


if __name__ == "__main__":
  _define_flags()
  refused = ("autotune", "rounds_per_dispatch", "stop_on_nonfinite")
  launch.run(main, _define_experiment, refused=refused)
