r"""Codistillation between two pools of clients with unlike models.

Without flags: the quick start, FedAvg, PeriodicCodist and MergedCodist side by
side on the embedded `digits`. The paper's runs are in `experiments/flags`:

  python experiments/codist.py --flagfile=experiments/flags/NAME.flags \
      --data_dir=DIR

A flag file comes first: flags after it win, those before it lose.
"""

import functools
import pathlib

from absl import flags
import common
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import (
  augment,
  codist,
  core,
  distill,
  evaluate,
  logs,
  population,
  report,
  training,
)
from hetfl.data import codist_images
from hetfl.fedavg import (
  fedadam_server,
  fedavg,
  fedavg_server,
  fedavgm_server,
  fedyogi_server,
  Pool,
)
from hetfl.models import vision

FLAGS = flags.FLAGS
ALGORITHMS = ("fedavg", "periodic", "merged")
POOLS = ("small", "large")
SERVERS = {
  "adam": fedadam_server,
  "yogi": fedyogi_server,
  "momentum": fedavgm_server,
  "sgd": fedavg_server,
}

# What a flag that was not given means: for CIFAR the paper's appendix C where
# it says, our own search (BUILD_NOTES.md) where it does not.
_PAPER = dict(
  recipe="crop24",
  high_capacity_clients=47,
  rounds=1500,
  eval_every=50,
  clients_per_round=20,
  client_batch_size=20,
  server_lr=(0.005, 0.002),
  distill_lr=(1e-3, 1e-3),
  distill_batch_size=128,
  codist_period=200,
  merge_alpha=0.9,
)
_CIFAR = {
  "fedavg": dict(_PAPER, client_lr=0.05, distill_steps=200),
  "periodic": dict(_PAPER, client_lr=0.02, distill_steps=200),
  "merged": dict(_PAPER, client_lr=0.05, distill_steps=32),
}
_DIGITS = dict(
  recipe="digits8",
  high_capacity_clients=8,
  rounds=120,
  eval_every=10,
  clients_per_round=6,
  client_batch_size=5,
  client_lr=0.05,
  server_lr=(0.01, 0.01),
  distill_lr=(1e-3, 1e-3),
  distill_batch_size=64,
  codist_period=25,
  merge_alpha=0.8,
)
DEFAULTS = {
  "cifar100": _CIFAR,
  "cifar10": _CIFAR,
  "digits": {
    "fedavg": dict(_DIGITS, distill_steps=30),
    "periodic": dict(_DIGITS, distill_steps=30),
    "merged": dict(_DIGITS, distill_steps=8),
  },
}


def _define_flags() -> None:
  common.define_run_flags("120 for digits, else the paper's 1,500")
  flags.DEFINE_list(
    "algorithm",
    list(ALGORITHMS),
    "fedavg, periodic, merged, or several of them with commas, to be run one"
    " after another and compared.",
  )
  flags.DEFINE_enum("dataset", "digits", sorted(DEFAULTS), "Data set.")
  flags.DEFINE_enum(
    "distill_data",
    "in_domain",
    ["in_domain", "cifar10", "cifar100"],
    "What the models teach each other on.",
  )
  flags.DEFINE_integer(
    "distill_examples",
    None,
    "Distillation examples (paper, Figure 4); by default all.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "high_capacity_clients",
    None,
    "Clients that train the large model; 31, 47 or 63 in the paper.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "partition_seed", 0, "Seed of the clients' shares.", lower_bound=0
  )
  flags.DEFINE_enum(
    "recipe",
    None,
    sorted(augment.RECIPES),
    "Image size, cropping and padding; by default crop24 for the CIFARs.",
  )
  flags.DEFINE_integer(
    "clients_per_round",
    None,
    "Clients of each pool that train in a round.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "client_batch_size", None, "Examples of a client's step.", lower_bound=1
  )
  flags.DEFINE_integer(
    "client_epochs", 1, "A client's passes over its examples.", lower_bound=1
  )
  flags.DEFINE_list(
    "client_lr", None, "Clients' learning rate, one or SMALL,LARGE."
  )
  flags.DEFINE_float(
    "client_momentum", 0.0, "Clients' momentum.", lower_bound=0, upper_bound=1
  )
  flags.DEFINE_float(
    "prox_mu", 0.0, "FedProx's weight; 0 for none.", lower_bound=0
  )
  flags.DEFINE_enum(
    "client_weights",
    "examples",
    ["examples", "uniform"],
    "What a client counts in the mean.",
  )
  flags.DEFINE_enum(
    "server_optimizer", "adam", sorted(SERVERS), "Servers' optimizer."
  )
  flags.DEFINE_list(
    "server_lr",
    None,
    "Servers' learning rate in the first round, one or SMALL,LARGE; it falls"
    " linearly to zero.",
  )
  flags.DEFINE_list(
    "distill_lr", None, "Students' learning rate, one or SMALL,LARGE."
  )
  flags.DEFINE_list(
    "distill_lr_decay",
    ["0"],
    "What is left of --distill_lr in the end, one or SMALL,LARGE; it falls"
    " linearly over the rounds.",
  )
  flags.DEFINE_integer(
    "distill_steps",
    None,
    "Distillation steps at a time; in the paper 200 for periodic and 32 for"
    " merged.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "distill_batch_size", None, "Examples of such a step.", lower_bound=1
  )
  flags.DEFINE_integer(
    "codist_period",
    None,
    "periodic: rounds from one codistillation to the next.",
    lower_bound=1,
  )
  flags.DEFINE_float(
    "merge_alpha",
    None,
    "merged: weight of the clients' gradient.",
    lower_bound=0,
    upper_bound=1,
  )
  flags.DEFINE_integer(
    "merge_every",
    1,
    "merged: distil in every so many rounds only; alpha is 1 in the others.",
    lower_bound=1,
  )
  flags.DEFINE_list(
    "teacher_temperature",
    ["1"],
    "Softmax temperature of each model as a teacher, one or SMALL,LARGE.",
  )
  flags.DEFINE_list(
    "student_regularization",
    ["0.01"],
    "Weight of a student's own first view, one or SMALL,LARGE.",
  )
  flags.DEFINE_float(
    "label_weight",
    0.0,
    "Weight of true labels in distillation; the paper uses none.",
    lower_bound=0,
    upper_bound=1,
  )
  flags.DEFINE_float(
    "mixup_beta",
    2.0,
    "Mixup of distillation images by Beta(b, b); 0 for none.",
    lower_bound=0,
  )


def per_pool(name: str, value, low: float, high: float) -> tuple[float, float]:
  """Reads a flag with one value or SMALL,LARGE.

  Args:
    name: the flag.
    value: what it holds: strings or numbers.
    low: the least allowed value.
    high: the greatest allowed value.

  Returns:
    The small and the large pool's value.

  Raises:
    UsageError: naming the flag, the value and what is allowed.
  """
  value = value if isinstance(value, list | tuple) else [value]
  shown = ",".join(str(v) for v in value)
  try:
    numbers = tuple(float(v) for v in value)
  except ValueError as error:
    raise common.UsageError(f"--{name}={shown}: not a number") from error
  if len(numbers) not in (1, len(POOLS)):
    raise common.UsageError(
      f"--{name}={shown}: give one value, or two for small and large"
    )
  for number in numbers:
    if not low <= number <= high:
      raise common.UsageError(
        f"--{name}={shown}: {number:g} must lie between {low:g} and {high:g}"
      )
  return numbers if len(numbers) == len(POOLS) else numbers * len(POOLS)


def configuration(algorithm: str, workdir: pathlib.Path) -> tuple[dict, dict]:
  """The run's flags with defaults filled in.

  Args:
    algorithm: which of --algorithm.
    workdir: the run's folder.

  Returns:
    Values of flags that change the result, and of those that do not.

  Raises:
    UsageError: if a value is out of its range.
  """
  values = {
    name: default if FLAGS[name].value is None else FLAGS[name].value
    for name, default in DEFAULTS[FLAGS.dataset][algorithm].items()
  }
  positive = (1e-6, float("inf"))
  ranges = {
    "client_lr": positive,
    "server_lr": positive,
    "distill_lr": (0, float("inf")),
    "distill_lr_decay": (0, 1),
    "teacher_temperature": positive,
    "student_regularization": (0, 1),
  }
  for name, (low, high) in ranges.items():
    given = values.get(name, FLAGS[name].value)
    values[name] = per_pool(name, given, low, high)
  if FLAGS.label_weight and FLAGS.distill_data != "in_domain":
    raise common.UsageError(
      f"--label_weight={FLAGS.label_weight}: labels of"
      f" --distill_data={FLAGS.distill_data} are those of another data set;"
      " use 0, or in_domain"
    )
  on_cpu = jax.default_backend() == "cpu"
  speed = {
    "checkpoint_every": values["eval_every"],
    "conv": "patches",
    "eval_batch_size": 40 if on_cpu else 1000,
    "lanes": common.make_engine().num_lanes(values["clients_per_round"]),
    "microbatch": 16 if on_cpu else 0,
  }
  values["algorithm"] = algorithm
  return common.resolved_flags(__name__, values, speed, workdir)


class Experiment:
  """Data, models and engine of one data set, shared by its algorithms."""

  def __init__(self, config: dict, speed: dict):
    self.data = codist_images.load_codist_images(
      config["dataset"],
      data_dir=FLAGS.data_dir,
      high_capacity_clients=config["high_capacity_clients"],
      distill_data=config["distill_data"],
      distill_examples=config["distill_examples"],
      seed=config["seed"],
      partition_seed=config["partition_seed"],
      download=FLAGS.download,
    )
    self.engine = common.make_engine()
    self.recipe = augment.RECIPES[config["recipe"]]
    size = self.recipe.size
    example = jnp.zeros((1, size, size, self.data.image_shape[-1]))
    self.models = [
      core.Model.from_flax(
        cnn(
          self.data.num_classes,
          padding=self.recipe.padding,
          pool_after=self.recipe.pool_after,
          conv=speed["conv"],
        ),
        example,
      )
      for cnn in (vision.small_cnn, vision.large_cnn)
    ]
    self._pools = {}
    banks = {}

    def put(bank):
      """Puts a bank on the device, once for all sets that share it."""
      if id(bank) not in banks:
        banks[id(bank)] = jax.device_put({"x": bank["x"], "y": bank["y"]})
      return banks[id(bank)]

    self.device_data = {
      "pools": tuple(put(clients.bank) for clients in self.data.pools),
      "distill": put(self.data.distill.bank),
    }
    self.evaluator = evaluate.Evaluator(
      self.models,
      {
        name: population.Subset(put(subset.bank), subset.index)
        for name, subset in (
          ("test", self.data.test),
          ("heldout", self.data.heldout),
        )
      },
      transform=self.recipe.evaluate,
      engine=self.engine,
      batch_size=speed["eval_batch_size"],
    )

  def pools(self, config: dict) -> list[Pool]:
    """The pools; the same, and their programs, for the same rates."""
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
          transform=self.recipe.train,
          client_optimizer=client_optimizer,
          server_optimizer=SERVERS[config["server_optimizer"]],
          prox_mu=config["prox_mu"] or None,
        )
        for i, (name, model) in enumerate(zip(POOLS, self.models))
      ]
    return self._pools[rates]

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
      transform=self.recipe.distill,
      mixup_beta=config["mixup_beta"] or None,
      microbatch=speed["microbatch"] or None,
    )
    if config["algorithm"] == "periodic":
      return codist.periodic_codist(
        pools, distiller, period=config["codist_period"], **options
      )
    alpha, every = config["merge_alpha"], config["merge_every"]
    if every > 1:
      alpha = lambda t: jnp.where(t % every == 0, config["merge_alpha"], 1.0)
    return codist.merged_codist(pools, distiller, alpha=alpha, **options)

  def plan(self, config: dict, speed: dict, round: int) -> population.RoundPlan:
    """The plan of a round; a pure function of it."""
    lanes = tuple(
      population.plan_clients(
        clients,
        seed=config["seed"],
        round=round,
        pool=i,
        clients_per_round=config["clients_per_round"],
        batch_size=config["client_batch_size"],
        epochs=config["client_epochs"],
        uniform_weights=config["client_weights"] == "uniform",
        num_lanes=speed["lanes"],
      )
      for i, clients in enumerate(self.data.pools)
    )
    every = {
      "fedavg": 0,
      "periodic": config["codist_period"],
      "merged": config["merge_every"],
    }[config["algorithm"]]
    shape = (config["distill_steps"], config["distill_batch_size"])
    batches = None
    if every:
      batches = np.zeros(shape, np.int32)
      if round % every == 0:
        batches = population.plan_distillation(
          self.data.distill,
          seed=config["seed"],
          round=round,
          steps=shape[0],
          batch_size=shape[1],
        )
    return population.RoundPlan(np.int32(round), lanes, batches)

  def evaluate(self, state) -> dict[str, float]:
    """Accuracy and loss of each pool on the test and the held-out set."""
    results = self.evaluator([pool.variables for pool in state.pools])
    return {
      f"{pool}/{name}": value
      for pool, result in zip(POOLS, results)
      for name, value in result.items()
    }

  def summarize(self, config: dict, state, evaluation) -> dict:
    """What `result.json` says of a finished run."""
    pools = {}
    for pool, pool_state, clients in zip(POOLS, state.pools, self.data.pools):
      parameters = core.num_parameters(pool_state.params)
      pools[pool] = {
        "parameters": parameters,
        "clients": len(clients),
        "examples": int(clients.sizes.sum()),
        "test_accuracy": evaluation[f"{pool}/test_accuracy"],
        "heldout_accuracy": evaluation[f"{pool}/heldout_accuracy"],
        # What a client receives, and again what it sends, in a round.
        "bytes_per_client_round": 4 * parameters,
      }
    return {
      "algorithm": config["algorithm"],
      "dataset": config["dataset"],
      "partition": self.data.partition,
      "seed": config["seed"],
      "pools": pools,
    }


def train(
  experiment: Experiment, config: dict, speed: dict, folder: logs.RunFolder
) -> dict:
  """Runs one algorithm in a folder of its own, or goes on with it."""
  algorithm = experiment.algorithm(config, speed)
  compile = functools.partial(experiment.engine.compile, donate=(0,))
  result = training.run(
    algorithm._replace(step=compile(algorithm.step)),
    jax.random.key(config["seed"]),
    functools.partial(experiment.plan, config, speed),
    experiment.device_data,
    experiment.evaluate,
    rounds=config["rounds"],
    folder=folder,
    summarize=functools.partial(experiment.summarize, config),
    eval_every=config["eval_every"],
    checkpoint_every=speed["checkpoint_every"],
    tensorboard=speed["tensorboard"],
    stop_on_nonfinite=speed["stop_on_nonfinite"],
    rounds_per_dispatch=speed["rounds_per_dispatch"],
    scanned_step=compile(training.scanned(algorithm.step)),
  )
  report.curves(
    {config["algorithm"]: logs.read_rows(folder.metrics)},
    folder.path / "curves.png",
    title=config["dataset"],
  )
  return result


def open_comparison(workdir: pathlib.Path) -> None:
  """Checks that a folder is fit to hold one run's folder an algorithm."""
  allowed = {*ALGORITHMS, "curves.png"}
  if workdir.is_dir():
    strange = sorted(p.name for p in workdir.iterdir() if p.name not in allowed)
    if strange:
      raise common.UsageError(
        f"--workdir={workdir} holds {strange[0]}, which no comparison of"
        " algorithms does. Use another --workdir."
      )


def main() -> None:
  """Runs what --algorithm names, then prints a table."""
  names = FLAGS.algorithm
  for name in names:
    if name not in ALGORITHMS:
      raise common.UsageError(
        f"--algorithm={name}: choose from {', '.join(ALGORITHMS)}"
      )
  workdir = common.default_workdir("codist", FLAGS.dataset, *names)
  several = len(names) > 1
  paths = {name: workdir / name if several else workdir for name in names}
  configs = {name: configuration(name, paths[name]) for name in names}
  if FLAGS.autotune:
    configs = {
      name: (config, common.autotune(Experiment, config, speed, paths[name]))
      for name, (config, speed) in configs.items()
    }
  experiment = Experiment(*configs[names[0]])
  # All that can be wrong should show before a folder is made.
  for config, speed in configs.values():
    experiment.algorithm(config, speed)
    experiment.plan(config, speed, 1)
  if several:
    open_comparison(workdir)
  folders = {
    name: logs.RunFolder(paths[name], *configs[name]) for name in names
  }
  results, rows = {}, {}
  for name in names:
    results[name] = train(experiment, *configs[name], folders[name])
    rows[name] = logs.read_rows(folders[name].metrics)
  if several:
    report.curves(rows, workdir / "curves.png", title=FLAGS.dataset)
  print(report.table(results))
  print(f"\nCurves: {workdir / 'curves.png'}")


if __name__ == "__main__":
  _define_flags()
  common.run(main)
