r"""Codistillation between two pools of clients with different models.

Without flags it runs the quick start: FedAvg, PeriodicCodist and MergedCodist
side by side on the embedded data set `digits`. The paper's runs are in
`experiments/flags`:

  python experiments/codist.py --flagfile=experiments/flags/NAME.flags \
      --data_dir=DIR

Put the flag file first: flags after it override it, and it overrides flags
before it.
"""

import functools
import pathlib

from absl import flags
import autotuning
import codist_images
import codist_language
import common
import jax
import launch
import numpy as np
import optax

from hetfl import (
  codist,
  core,
  distill,
  evaluate,
  logs,
  planning,
  population,
  report,
)
from hetfl import engine as engine_lib
from hetfl.data import files
from hetfl.fedavg import (
  fedadam_server,
  fedavg,
  fedavg_server,
  fedavgm_server,
  fedyogi_server,
  Pool,
)

FLAGS = flags.FLAGS
ALGORITHMS = ("fedavg", "periodic", "merged")
POOLS = ("small", "large")
SERVERS = {
  "adam": fedadam_server,
  "yogi": fedyogi_server,
  "momentum": fedavgm_server,
  "sgd": fedavg_server,
}
_DISTILL = (
  "c4_tokenizer",
  "distill_batch_size",
  "distill_data",
  "distill_epsilon",
  "distill_examples",
  "distill_lr",
  "distill_lr_decay",
  "distill_steps",
  "label_weight",
  "mixup_beta",
  "student_regularization",
  "teacher_temperature",
)
_MERGE = ("merge_alpha", "merge_every")
# Flags that an algorithm ignores.
UNUSED = {
  "fedavg": (*_DISTILL, "codist_period", *_MERGE, "microbatch"),
  "periodic": _MERGE,
  "merged": ("codist_period",),
}
TASKS = {
  dataset: task
  for task in (codist_images, codist_language)
  for dataset in task.DEFAULTS
}
# The flags' defaults, for each data set and algorithm.
DEFAULTS = {dataset: task.DEFAULTS[dataset] for dataset, task in TASKS.items()}


def define_flags() -> None:
  """Defines the experiment's flags, including the shared ones."""
  common.define_run_flags()
  codist_images.define_flags()
  codist_language.define_flags()
  flags.DEFINE_list(
    "algorithm",
    list(ALGORITHMS),
    "fedavg, periodic or merged, or a comma-separated list of them, which are"
    " run one after another and compared.",
  )
  flags.DEFINE_enum(
    "dataset",
    "digits",
    sorted(DEFAULTS),
    "What clients hold: images (digits, cifar10, cifar100; npz, your own) or"
    " text (pydoc, stackexchange, stackoverflow); digits and pydoc need no"
    " download.",
  )
  flags.DEFINE_enum(
    "distill_data",
    "in_domain",
    ["in_domain", "cifar10", "cifar100", "c4"],
    "Data that the models distil on; c4 requires --c4_path.",
  )
  flags.DEFINE_integer(
    "distill_examples",
    None,
    "Number of distillation examples (paper, Figure 4). By default all, but at"
    " most 4,488,694 of --distill_data=c4, as in the paper, and at most"
    " 1,000,000 of stackoverflow's in_domain, to save memory (122,250,952 in"
    " the paper).",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "high_capacity_clients",
    None,
    "Number of clients that train the large model. The paper has 31, 47 or 63"
    " for CIFAR, and 684 for Stack Overflow, where its two other pools have the"
    " size of about 330 and 1,411 clients.",
    lower_bound=1,
  )
  flags.DEFINE_enum(
    "bank",
    "device",
    ["device", "round"],
    "Where the examples are stored: all on each device (device), or on the"
    " host, which sends only those of each round (round), for data sets that do"
    " not fit on a device. Changes speed and memory only.",
  )
  flags.DEFINE_list(
    "clients_per_round",
    None,
    "Clients of each pool that train in a round, one value or SMALL,LARGE.",
  )
  flags.DEFINE_integer(
    "client_batch_size", None, "Clients' batch size.", lower_bound=1
  )
  flags.DEFINE_integer(
    "client_epochs", 1, "A client's passes over its examples.", lower_bound=1
  )
  flags.DEFINE_list(
    "client_lr", None, "Clients' learning rate, one value or SMALL,LARGE."
  )
  flags.DEFINE_float(
    "client_momentum", 0.0, "Clients' momentum.", lower_bound=0, upper_bound=1
  )
  flags.DEFINE_float(
    "prox_mu", 0.0, "Weight of FedProx's term; 0 for none.", lower_bound=0
  )
  flags.DEFINE_enum(
    "client_weights",
    "examples",
    ["examples", "uniform"],
    "Weights of the clients in the mean: their numbers of examples, or the same"
    " for all.",
  )
  flags.DEFINE_enum(
    "server_optimizer",
    "adam",
    sorted(SERVERS),
    "How servers apply their clients' mean update: FedAdam, FedYogi, FedAvgM"
    " (momentum) or McMahan's FedAvg (sgd).",
  )
  flags.DEFINE_list(
    "server_lr",
    None,
    "Servers' learning rate in the first round, one value or SMALL,LARGE; it"
    " decays linearly to zero.",
  )
  flags.DEFINE_list(
    "distill_lr", None, "Students' learning rate, one value or SMALL,LARGE."
  )
  flags.DEFINE_list(
    "distill_lr_decay",
    ["0"],
    "Share of --distill_lr that is left after the last round, one value or"
    " SMALL,LARGE; the rate decays linearly over the rounds.",
  )
  flags.DEFINE_float(
    "distill_epsilon",
    None,
    "Epsilon of the students' Adam; the servers' is 1e-5.",
    lower_bound=0,
  )
  flags.DEFINE_integer(
    "distill_steps",
    None,
    "Distillation steps per exchange; in the paper 200 for periodic and 32 for"
    " merged.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "distill_batch_size", None, "Batch size of distillation.", lower_bound=1
  )
  flags.DEFINE_integer(
    "codist_period",
    None,
    "periodic: rounds from one codistillation to the next.",
    lower_bound=1,
  )
  flags.DEFINE_list(
    "merge_alpha",
    None,
    "merged: weight of the clients' gradient; FIRST,LAST to change it linearly"
    " over the rounds (paper, section 4).",
  )
  flags.DEFINE_integer(
    "merge_every",
    None,
    "merged: distil only in every N-th round; alpha is 1 in the others. The"
    " paper distils in every round.",
    lower_bound=1,
  )
  flags.DEFINE_list(
    "teacher_temperature",
    ["1"],
    "Softmax temperature of each model as a teacher, one value or SMALL,LARGE.",
  )
  flags.DEFINE_list(
    "student_regularization",
    ["0.01"],
    "Weight of a student's own initial predictions in its target, one value or"
    " SMALL,LARGE.",
  )
  flags.DEFINE_float(
    "label_weight",
    0.0,
    "Weight of true labels in distillation; the paper uses none.",
    lower_bound=0,
    upper_bound=1,
  )
  common.say_defaults(DEFAULTS)


def per_pool(
  name: str, value, low: float, high: float = np.inf, kind: type = float
) -> tuple:
  """Reads a flag with one value or SMALL,LARGE.

  Args:
    name: the flag.
    value: its value or values, as strings or numbers.
    low: the least allowed value.
    high: the greatest allowed value.
    kind: int or float.

  Returns:
    The small and the large pool's value.

  Raises:
    UsageError: naming the flag, the value and what is allowed.
  """
  value = value if isinstance(value, list | tuple) else [value]
  numbers = tuple(common.numbers(name, value, low=low, high=high, kind=kind))
  if len(numbers) not in (1, len(POOLS)):
    raise common.UsageError(
      f"--{name}={','.join(str(v) for v in value)}: give one value, or two for"
      " small and large"
    )
  return numbers if len(numbers) == len(POOLS) else numbers * len(POOLS)


def configuration(algorithm: str, workdir: pathlib.Path) -> tuple[dict, dict]:
  """The run's flags with defaults filled in.

  Args:
    algorithm: one of --algorithm.
    workdir: the run's folder.

  Returns:
    Values of flags that change the result, and of those that do not.

  Raises:
    UsageError: if a value is out of its range.
  """
  common.npz_path()
  task = TASKS[FLAGS.dataset]
  values = {}
  for other in set(TASKS.values()):
    for flag in FLAGS.get_flags_for_module(other.__name__):
      if other is task:
        values[flag.name] = flag.value
      elif flag.present:
        raise common.UsageError(
          f"--{flag.name}={flag.value}: not for --dataset={FLAGS.dataset}"
        )
  values |= common.filled(DEFAULTS[FLAGS.dataset][algorithm])
  if values.get("pools") == "domain":
    # Pools by domain do not use it; a value that is set is rejected later.
    values["high_capacity_clients"] = FLAGS.high_capacity_clients
  ranges = {
    "clients_per_round": (1, np.inf, int),
    "client_lr": (1e-6,),
    "server_lr": (1e-6,),
    "distill_lr": (0,),
    "distill_lr_decay": (0, 1),
    "teacher_temperature": (1e-6,),
    "student_regularization": (0, 1),
  }
  for name, allowed in ranges.items():
    given = values.get(name, FLAGS[name].value)
    values[name] = per_pool(name, given, *allowed)
  alpha = values["merge_alpha"]
  if isinstance(alpha, list):  # Constants stay numbers, which can be searched.
    alpha = common.first_last("merge_alpha", alpha)
    values["merge_alpha"] = alpha[0] if len({*alpha}) == 1 else alpha
  if values.get("dropout") is not None:
    rates = per_pool("dropout", values["dropout"], 0, 0.99)
    values["dropout"] = rates if any(rates) else None
  if FLAGS.label_weight and FLAGS.distill_data in ("cifar10", "cifar100"):
    raise common.UsageError(
      f"--label_weight={FLAGS.label_weight}: the labels of"
      f" --distill_data={FLAGS.distill_data} belong to another data set; use"
      " --label_weight=0 or --distill_data=in_domain"
    )
  speed = {"checkpoint_every": values["eval_every"]} | task.speed()
  if isinstance(common.run_engine(), engine_lib.Threads):
    lanes = common.run_engine().num_lanes(max(values["clients_per_round"]))
    speed["lanes"] = lanes  # Else the number depends on the clients' sizes.
  values["algorithm"] = algorithm
  config, speed = common.resolved_flags(__name__, values, speed, workdir)
  never = exchange_every(config) > config["rounds"]
  if never and not (workdir / "config.json").exists():
    name = {"periodic": "codist_period", "merged": "merge_every"}[algorithm]
    raise common.UsageError(
      f"--{name}={config[name]}: with --rounds={config['rounds']} the pools"
      f" never exchange anything, which is FedAvg; give a smaller --{name},"
      " more --rounds, or --algorithm=fedavg"
    )
  # Students draw dropout masks per microbatch, so it changes the result.
  if config.get("dropout") and "microbatch" not in UNUSED[algorithm]:
    config["microbatch"] = speed.pop("microbatch")
  if speed["bank"] == "round":
    reason = "not supported with --bank=round"
    common.refuse(reason, "autotune", "rounds_per_dispatch")
    speed["rounds_per_dispatch"] = 1
  return dict(sorted(config.items())), speed


def exchange_every(config: dict) -> int:
  """Rounds from one exchange between the pools to the next; 0: none."""
  return {
    "fedavg": 0,
    "periodic": config["codist_period"],
    "merged": config["merge_every"],
  }[config["algorithm"]]


class Experiment:
  """Data, models and engine of one data set, shared by its algorithms."""

  def __init__(self, config: dict, speed: dict):
    self.engine = common.run_engine()
    self.task = TASKS[config["dataset"]].Task(config, speed, self.engine)
    self.data, self.models = self.task.data, self.task.models
    self._pools, self._banks, self._lanes = {}, {}, {}
    sampled = config["clients_per_round"]
    most = ",".join(str(len(clients)) for clients in self.data.pools)
    for pool, clients, number in zip(POOLS, self.data.pools, sampled):
      if number > len(clients):
        fewer = pool == "large" and config.get("pools") != "domain"
        raise common.UsageError(
          f"--clients_per_round={number}: the pool of the {pool} model has"
          f" {len(clients)} clients"
          + (", the --high_capacity_clients" if fewer else "")
          + f"; give at most {most}"
        )
    sets = {"test": self.data.test, "heldout": self.data.heldout}
    if speed["bank"] == "round":
      sets = {name: subset.alone() for name, subset in sets.items()}
      banks = population.put_banks(*sets.values())
    else:
      *banks, distill = population.put_banks(
        *sets.values(), *self.data.pools, self.data.distill
      )
      self._banks = {"pools": tuple(banks[2:]), "distill": distill}
    self.evaluator = evaluate.Evaluator(
      self.models,
      {
        name: population.Subset(bank, subset.index)
        for bank, (name, subset) in zip(banks, sets.items())
      },
      engine=self.engine,
      batch_size=speed["eval_batch_size"],
      **self.task.evaluator_options,
    )

  def pools(self, config: dict) -> list[Pool]:
    """The pools; equal rates share pools and so their compiled programs."""
    names = ("client_lr", "server_lr")
    rates = tuple(config[name] for name in names)
    if rates not in self._pools:
      client_optimizer = optax.sgd
      if config["client_momentum"]:
        client_optimizer = functools.partial(
          optax.sgd, momentum=config["client_momentum"]
        )
      self._pools[rates] = [
        Pool(
          name=name,
          model=model,
          client_lr=config["client_lr"][i],
          server_lr=config["server_lr"][i],
          client_optimizer=client_optimizer,
          server_optimizer=SERVERS[config["server_optimizer"]],
          prox_mu=config["prox_mu"] or None,
          **self.task.pool_options,
        )
        for i, (name, model) in enumerate(zip(POOLS, self.models))
      ]
    return self._pools[rates]

  def device_data(self, config: dict) -> dict:
    """The banks, as the algorithms take them; none with --bank=round."""
    del config
    return self._banks

  @functools.cached_property
  def files(self) -> dict[str, bytes]:
    """Name and content of files that belong to a run; reads all data."""
    data, partition = self.data, self.task.record()["partition"]
    sets = (*data.pools, data.distill, data.heldout, data.test)
    return {
      **self.task.files,
      "data.json": files.record(sets, partition=partition),
    }

  def algorithm(self, config: dict, speed: dict) -> core.Algorithm:
    """Builds one of the three algorithms."""
    pools = self.pools(config)
    options = dict(rounds=config["rounds"], engine=self.engine)
    if config["algorithm"] == "fedavg":
      return fedavg(pools, **options)
    distiller = distill.Distiller(
      learning_rate=config["distill_lr"],
      final_share=config["distill_lr_decay"],
      temperature=config["teacher_temperature"],
      regularization=config["student_regularization"],
      label_weight=config["label_weight"],
      optimizer=functools.partial(optax.adam, eps=config["distill_epsilon"]),
      microbatch=(config | speed)["microbatch"] or None,
      **self.task.distiller_options(config),
    )
    if config["algorithm"] == "periodic":
      return codist.periodic_codist(
        pools, distiller, period=config["codist_period"], **options
      )
    alpha = config["merge_alpha"]
    if isinstance(alpha, list):
      alpha = common.linear(alpha, config["rounds"])
    return codist.merged_codist(
      pools,
      distiller,
      alpha=alpha,
      every=config["merge_every"],
      **options,
    )

  def lanes(self, config: dict, speed: dict) -> int:
    """The number of lanes in the flags, or else enough for both pools."""
    if speed["lanes"]:
      return speed["lanes"]
    share = {
      "batch_size": config["client_batch_size"],
      "epochs": config["client_epochs"],
    }
    key = (config["clients_per_round"], *share.values())
    if key not in self._lanes:
      self._lanes[key] = max(
        planning.enough_lanes(clients, clients_per_round=number, **share)
        for clients, number in zip(self.data.pools, key[0])
      )
    return self._lanes[key]

  def plan(self, config: dict, speed: dict, round: int) -> planning.RoundPlan:
    """The plan of a round; a pure function of the round."""
    every = exchange_every(config)
    due = every and round % every == 0
    shape = (config["distill_steps"], config["distill_batch_size"])
    plan = planning.plan_round(
      self.data.pools,
      self.data.distill if due else None,
      seed=config["seed"],
      round=round,
      clients_per_round=config["clients_per_round"],
      batch_size=config["client_batch_size"],
      epochs=config["client_epochs"],
      uniform_weights=config["client_weights"] == "uniform",
      num_lanes=self.lanes(config, speed),
      distill_steps=shape[0],
      distill_batch_size=shape[1],
    )
    if every and not due:  # Plans have the same structure in all rounds.
      plan = plan._replace(distill=np.full(shape, -1, np.int32))
    return plan

  def localized(self, config: dict, speed: dict, round: int):
    """The plan of a round and the examples that it needs."""
    plan = self.plan(config, speed, round)
    work = planning.localize(plan, self.data.pools, self.data.distill)
    # Over several processes the engine places them, as it does the plan.
    return work if jax.process_count() > 1 else jax.device_put(work)

  def evaluate(self, state) -> dict[str, float]:
    """Accuracy and loss of each pool on the test and the held-out set."""
    results = self.evaluator([pool.variables for pool in state.pools])
    return {
      f"{pool}/{name}": value
      for pool, result in zip(POOLS, results)
      for name, value in self.task.finish(result).items()
    }

  def summarize(self, config: dict, state, evaluation) -> dict:
    """What `result.json` says of a finished run."""
    pools, sent, every = {}, 0, exchange_every(config)
    for pool, pool_state, clients, number in zip(
      POOLS, state.pools, self.data.pools, config["clients_per_round"]
    ):
      parameters = core.num_parameters(pool_state.params)
      sent += 2 * 4 * parameters * number
      pools[pool] = {
        "parameters": parameters,
        "clients": len(clients),
        "examples": int(clients.sizes.sum()),
        **{
          name: evaluation[f"{pool}/{name}"]
          for name in self.task.metrics
          if f"{pool}/{name}" in evaluation
        },
        "heldout_accuracy": evaluation[f"{pool}/heldout_accuracy"],
        "bytes_sent_per_client_round": 4 * parameters,
        "bytes_received_per_client_round": 4 * parameters,
      }
    return {
      "algorithm": config["algorithm"],
      "dataset": config["dataset"],
      **self.task.record(),
      "seed": config["seed"],
      "exchanges": config["rounds"] // every if every else 0,
      "bytes_per_round": sent,
      # Sizes of the server's sets, as in the paper's tables 3 to 5.
      **{
        f"{name}_examples": len(getattr(self.data, name).index)
        for name in ("distill", "heldout", "test")
      },
      "pools": pools,
    }


def curves(
  runs: dict, *, config: dict, folder: pathlib.Path, experiment: Experiment
) -> None:
  """Draws each algorithm's accuracies, for all its seeds, over the rounds."""
  measured = {n for seeds in runs.values() for n in seeds[0][-1]}
  for suffix, metric in experiment.task.charts.items():
    if any(f"{pool}/{metric}" in measured for pool in POOLS):
      report.curves(
        runs,
        folder / f"curves{suffix}.png",
        metric=metric,
        title=config["dataset"] + suffix.replace("_", ", "),
      )


def train(
  experiment: Experiment, config: dict, speed: dict, folder: logs.RunFolder
) -> dict:
  """Runs or resumes one algorithm in a folder of its own."""
  folder.keep(experiment.files)
  algorithm = experiment.algorithm(config, speed)
  plan = experiment.plan
  if speed["bank"] == "round":
    plan, step = experiment.localized, algorithm.step
    algorithm = algorithm._replace(
      step=lambda state, work, _: step(state, *work)
    )
  return launch.train(
    algorithm,
    functools.partial(plan, config, speed),
    experiment.device_data(config),
    experiment.evaluate,
    config=config,
    speed=speed,
    engine=experiment.engine,
    folder=folder,
    summarize=functools.partial(experiment.summarize, config),
  )


def main() -> None:
  """Runs the algorithms of --algorithm, then prints a table."""
  if FLAGS.distill_data != "c4":
    common.warn_of_idle(
      f"it is for --distill_data=c4, not {FLAGS.distill_data}",
      "c4_path",
      "c4_tokenizer",
    )
  if TASKS[FLAGS.dataset] is codist_language:
    common.warn_of_idle("language models have no convolutions", "conv")

  def configure(name, path):
    config, speed = configuration(name, path)
    if FLAGS.autotune:
      every = exchange_every(config)
      speed = autotuning.measure(Experiment, config, speed, path, every)
    return config, speed

  launch.side_by_side(
    ("codist", FLAGS.dataset),
    ALGORITHMS,
    unused=UNUSED,
    configure=configure,
    build=Experiment,
    train=train,
    draw=curves,
    table=report.table,
  )


if __name__ == "__main__":
  define_flags()
  launch.run(main)
