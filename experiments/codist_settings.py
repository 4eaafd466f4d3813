"""The codistillation experiment's flags: their defaults and their checks."""

import pathlib

from absl import flags, logging
import codist_images
import codist_language
import common
import numpy as np
import own_models
import run_flags

from hetfl.optimizers import (
  fedadam_server,
  fedavg_server,
  fedavgm_server,
  fedyogi_server,
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
  run_flags.define_run_flags()
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
  flags.DEFINE_list(
    "models",
    None,
    "The models of the small and the large pool, one for both or SMALL,LARGE:"
    f" {', '.join(codist_images.MODELS)}, or for text"
    f" {', '.join(codist_language.MODELS)}; or FILE.py:FUNCTION for one of your"
    " own, where FUNCTION(num_classes), for text FUNCTION(vocabulary_size),"
    " returns a Flax module. By default the paper's.",
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
    " size of about 342 and 1,369 clients.",
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
  if FLAGS.models is not None:
    values["models"] = _models(
      FLAGS.models, list(task.MODELS), values.get("dropout")
    )
  if FLAGS.label_weight and FLAGS.distill_data in ("cifar10", "cifar100"):
    raise common.UsageError(
      f"--label_weight={FLAGS.label_weight}: the labels of"
      f" --distill_data={FLAGS.distill_data} belong to another data set; use"
      " --label_weight=0 or --distill_data=in_domain"
    )
  own = own_models.labels(FLAGS.models or ())
  speed = {"checkpoint_every": values["eval_every"]} | task.speed()
  if own:
    speed["microbatch"] = 0
  values["algorithm"] = algorithm
  config, speed = common.resolved_flags(__name__, values, speed, workdir)
  if exchange_every(config) > config["rounds"]:
    name = {"periodic": "codist_period", "merged": "merge_every"}[algorithm]
    problem = (
      f"--{name}={config[name]}: with --rounds={config['rounds']} the pools"
      f" never exchange anything, which is FedAvg; give a smaller --{name},"
      " more --rounds, or --algorithm=fedavg"
    )
    # It may be the default, or that of a run that config.flags repeats.
    asked = FLAGS[name].value is not None and common.typed() & {name, "rounds"}
    if asked and not (workdir / "config.json").exists():
      raise common.UsageError(problem)
    logging.log_first_n(logging.WARNING, "%s", 1, problem)
  # Students draw dropout masks, and models of the user's may have batch
  # statistics, per microbatch, which then changes the result.
  by_part = config.get("dropout") or own
  if by_part and "microbatch" not in UNUSED[algorithm]:
    config["microbatch"] = speed.pop("microbatch")
  if speed["bank"] == "round":
    reason = "not supported with --bank=round"
    common.refuse(reason, "autotune", "rounds_per_dispatch")
    speed["rounds_per_dispatch"] = 1
  return dict(sorted(config.items())), speed


def _models(
  names: list[str], known: list[str], dropout: tuple | None
) -> list[str]:
  """`--models` as one name for each pool, checked."""
  own_models.check("models", names, known)
  if len(names) not in (1, len(POOLS)):
    raise common.UsageError(
      f"--models={','.join(names)}: give one name, or two for small and large"
    )
  names = names * (len(POOLS) // len(names))
  for name, rate in zip(names, dropout or ()):
    if rate and own_models.is_own(name):
      raise common.UsageError(
        f"--dropout={','.join(map(str, dropout))}: has no effect on {name};"
        " give it a rate of 0, and write dropout into the model"
      )
  return names


def exchange_every(config: dict) -> int:
  """Rounds from one exchange between the pools to the next; 0: none."""
  return {
    "fedavg": 0,
    "periodic": config["codist_period"],
    "merged": config["merge_every"],
  }[config["algorithm"]]
