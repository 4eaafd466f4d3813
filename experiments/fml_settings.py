"""Federated Mutual Learning's flags: their defaults and their checks."""

import pathlib

from absl import flags
import common
import jax
import own_models
import run_flags

from hetfl.data import fml_images
from hetfl.models import fml as nets

FLAGS = flags.FLAGS
ALGORITHMS = ("fedavg", "fedprox", "fml", "independent")
_MUTUAL = (
  "alpha",
  "beta",
  "clients_start",
  "temperature",
  "sequential_updates",
)
# Flags that an algorithm ignores.
UNUSED = {
  "fml": ("prox_mu",),
  "fedavg": (*_MUTUAL, "client_models", "microbatch", "prox_mu"),
  "fedprox": (*_MUTUAL, "client_models", "microbatch"),
  "independent": (*_MUTUAL, "merge_weights", "prox_mu"),
}
TRUNKS = ("lenet5_conv", "cnn1_conv", "cnn2_conv")

# The flags' defaults: from the paper's section 5.1 or, where it gives none,
# from the released code.
_PAPER = dict(
  rounds=200,
  eval_every=1,
  partition="iid",
  local_epochs=5,
  batch_size=128,
  learning_rate=0.01,
  global_model="cnn1",
  client_models=("cnn1",),
)
DEFAULTS = {
  "digits": dict(
    _PAPER,
    rounds=40,
    eval_every=2,
    partition="noniid3",
    local_epochs=2,
    batch_size=16,
    client_models=("mlp", "lenet5", "cnn1", "cnn2", "cnn2"),
  ),
  "mnist": dict(_PAPER, global_model="lenet5", client_models=("lenet5",)),
  "cifar10": _PAPER,
  "cifar100": _PAPER,
  "npz": dict(_PAPER, global_model="lenet5", client_models=("lenet5",)),
}


def define_flags() -> None:
  """Defines the experiment's flags, including the shared ones."""
  run_flags.define_run_flags()
  run_flags.define_npz_flag()
  flags.DEFINE_list(
    "algorithm",
    list(ALGORITHMS),
    "fedavg, fedprox, fml or independent, or a comma-separated list of them,"
    " which are run one after another and compared.",
  )
  flags.DEFINE_list(
    "dataset",
    ["digits"],
    f"Data set, one of {', '.join(DEFAULTS)} (npz: your own); or a"
    " comma-separated list with one for each client, where clients with the"
    " same data set share it.",
  )
  flags.DEFINE_enum(
    "partition",
    None,
    fml_images.PARTITIONS,
    "How the images are split among clients: evenly (iid); into 6, 4 or 2"
    " single-class shards per client (noniid1, noniid2, noniid3; with 100"
    " classes 60, 40 or 20); each class by a Dirichlet distribution; or as"
    " --npz says (file). With several data sets the default is iid.",
  )
  flags.DEFINE_float(
    "partition_alpha",
    None,
    "Concentration of --partition=dirichlet, by default"
    f" {fml_images.DIRICHLET_ALPHA}; small values give skewed clients.",
    lower_bound=1e-6,
  )
  flags.DEFINE_integer(
    "num_clients",
    None,
    "Number of clients; by default the paper's 5, or the number of data sets if"
    " there are several.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "clients_per_round",
    None,
    "Number of clients sampled in each round; by default all, as in the paper."
    " The others keep their models unchanged.",
    lower_bound=1,
  )
  flags.DEFINE_string(
    "global_model",
    None,
    f"The global model: {', '.join(nets.NAMES)}, or FILE.py:FUNCTION for one of"
    " your own, where FUNCTION(num_classes) returns a Flax module; or"
    f" {' or '.join(TRUNKS)}, the convolutions only, on which each client has"
    " its own adaptor layer; fml and independent only.",
  )
  flags.DEFINE_list(
    "client_models",
    None,
    "The clients' own models, one for all or one for each client, of"
    f" {', '.join(nets.NAMES)}, or FILE.py:FUNCTION for one of your own; fml"
    " and independent only.",
  )
  flags.DEFINE_list(
    "alpha",
    ["0.5"],
    "fml: weight of the labels in the clients' models' loss; FIRST,LAST to"
    " change it linearly over the rounds.",
  )
  flags.DEFINE_list(
    "beta",
    ["0.5"],
    "fml: weight of the labels in the meme models' loss; FIRST,LAST to change"
    " it linearly over the rounds.",
  )
  flags.DEFINE_float(
    "temperature",
    1.0,
    "fml: softmax temperature of both models in the divergences; the paper's"
    " equation 5 has none.",
    lower_bound=1e-6,
  )
  flags.DEFINE_bool(
    "sequential_updates",
    False,
    "fml: update the client's model first; the meme model then learns from the"
    " updated model.",
  )
  flags.DEFINE_float(
    "prox_mu", 0.01, "fedprox: weight of the proximal term.", lower_bound=0
  )
  flags.DEFINE_integer(
    "local_epochs",
    None,
    "A client's passes over its examples in a round.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "batch_size", None, "Clients' batch size.", lower_bound=1
  )
  flags.DEFINE_bool(
    "full_batches",
    None,
    "Fill up the last batch of a pass with other images of the client, which"
    " models with batch statistics need; by default only if a model is of your"
    " own.",
  )
  flags.DEFINE_float(
    "learning_rate", None, "Clients' learning rate.", lower_bound=1e-12
  )
  flags.DEFINE_float(
    "momentum", 0.9, "Clients' momentum.", lower_bound=0, upper_bound=1
  )
  flags.DEFINE_float(
    "weight_decay", 5e-4, "Clients' weight decay.", lower_bound=0
  )
  flags.DEFINE_float(
    "clip_norm",
    None,
    "Scale larger gradients down to this norm; by default no clipping.",
    lower_bound=1e-6,
  )
  flags.DEFINE_enum(
    "clients_start",
    "own",
    ["own", "global"],
    "fml: initial weights of the clients' own models: each its own random draw"
    " (own), or the global model's for models of its architecture (global).",
  )
  flags.DEFINE_enum(
    "merge_weights",
    "uniform",
    ["uniform", "examples"],
    "Weights of the clients in the mean: their numbers of examples, or the same"
    " for all.",
  )
  flags.DEFINE_bool(
    "augment",
    True,
    "Crop and flip training images of CIFAR, as the released code does (the"
    " paper does not say), and crop those of digits and of npz.",
  )
  flags.DEFINE_list(
    "bad_clients",
    [],
    "Indices, from 0, of clients that train on wrong labels (section 6).",
  )
  flags.DEFINE_float(
    "bad_label_share",
    1.0,
    "Share of the --bad_clients' labels that is replaced by uniform draws of a"
    " class.",
    lower_bound=0,
    upper_bound=1,
  )
  flags.DEFINE_integer(
    "heldout_examples",
    0,
    "Number of training examples, over all clients and equally many from each,"
    " that are held out for choosing hyper-parameters: 0, as in the paper, or a"
    " multiple of the number of clients.",
    lower_bound=0,
  )
  common.say_defaults({dataset: {"": d} for dataset, d in DEFAULTS.items()})


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
  datasets = FLAGS.dataset
  for dataset in datasets:
    if dataset not in DEFAULTS:
      raise common.UsageError(
        f"--dataset={dataset}: choose from {', '.join(DEFAULTS)}"
      )
  common.npz_path()
  if "npz" in datasets and len({*datasets}) > 1:
    raise common.UsageError(
      f"--dataset={','.join(datasets)}: npz cannot be combined with others,"
      " which are normalised in another way"
    )
  values = common.filled(DEFAULTS[datasets[0]])
  several = len(datasets) > 1
  default_clients = len(datasets) if several else 5
  values["num_clients"] = FLAGS.num_clients or default_clients
  alike = values["global_model"] in values["client_models"]
  if algorithm == "fml" and FLAGS.clients_start == "global" and not alike:
    raise common.UsageError(
      "--clients_start=global: none of --client_models is the"
      f" --global_model={values['global_model']}"
    )
  sampled = FLAGS.clients_per_round or 1
  if sampled > values["num_clients"]:
    raise common.UsageError(
      f"--clients_per_round={sampled}: there are"
      f" {values['num_clients']} clients"
    )
  if several and FLAGS.partition is None:
    values["partition"] = "iid"  # Clients of one data set share it evenly.
  if values["partition"] == "dirichlet":
    given = FLAGS.partition_alpha
    default = fml_images.DIRICHLET_ALPHA
    values["partition_alpha"] = default if given is None else given
  elif FLAGS.partition_alpha is not None:
    raise common.UsageError(
      f"--partition_alpha={FLAGS.partition_alpha}: not for"
      f" --partition={values['partition']}, but for dirichlet"
    )
  for name in ("alpha", "beta"):
    values[name] = common.first_last(name, FLAGS[name].value)
  values["bad_clients"] = common.numbers(
    "bad_clients",
    FLAGS.bad_clients,
    low=0,
    high=values["num_clients"] - 1,
    kind=int,
  )
  models = list(values["client_models"])
  own_models.check("client_models", models, nets.NAMES)
  own_models.check(
    "global_model", [values["global_model"]], [*nets.NAMES, *TRUNKS]
  )
  if len(models) == 1 or FLAGS.client_models is None:
    models = [models[k % len(models)] for k in range(values["num_clients"])]
  if len(models) != values["num_clients"]:
    raise common.UsageError(
      f"--client_models={','.join(models)}: {len(models)} models for"
      f" {values['num_clients']} clients; give one, or one for each client"
    )
  values["client_models"] = models
  if values["global_model"] in TRUNKS and algorithm in ("fedavg", "fedprox"):
    raise common.UsageError(
      f"--global_model={values['global_model']} has no output layer, but"
      f" --algorithm={algorithm} needs a complete model"
    )
  own = own_models.labels([values["global_model"], *models])
  values["full_batches"] = FLAGS.full_batches
  if FLAGS.full_batches is None:
    values["full_batches"] = bool(own)
  on_cpu = jax.default_backend() == "cpu"
  dense = {values["global_model"], *models} == {"mlp"}
  speed = {
    "checkpoint_every": 10,
    "conv": common.default_conv(datasets[0]),
    "eval_batch_size": 50 if on_cpu else 2000,
    "microbatch": 16 if on_cpu and not dense and not own else 0,
  }
  values["algorithm"] = algorithm
  config, speed = common.resolved_flags(__name__, values, speed, workdir)
  # Models of the user's may have dropout or batch statistics, which act on
  # microbatches.
  if own and "microbatch" not in UNUSED[algorithm]:
    config["microbatch"] = speed.pop("microbatch")
  return config, speed


def models_of(config: dict) -> list[str]:
  """The models that a run trains."""
  unused = UNUSED[config["algorithm"]]
  names = [] if "global_model" in unused else [config["global_model"]]
  return [
    *names,
    *(() if "client_models" in unused else config["client_models"]),
  ]


def warn_of_idle() -> None:
  """Warns of flags that no model of any of the algorithms reads."""
  # An unknown data set, or algorithm, is refused later.
  values = common.filled(DEFAULTS.get(FLAGS.dataset[0], DEFAULTS["digits"]))
  trained = [
    model
    for name in FLAGS.algorithm
    if name in ALGORITHMS
    for model in models_of(values | {"algorithm": name})
  ]
  own_models.warn_of_idle(trained, "conv", "dtype")
