"""FedMD's flags: their defaults and their checks."""

import pathlib

from absl import flags
import common
import jax
import own_models
import run_flags

from hetfl.algorithms.fedmd import TRANSLATORS
from hetfl.data import fedmd_images
from hetfl.engine import batch_size_or_default
from hetfl.models import fedmd as models
from hetfl.models import kernels

FLAGS = flags.FLAGS

# The flags' defaults: the paper's values or, where it gives none, the released
# code's.
_PAPER = dict(
  models="table1",
  num_parties=10,
  weak_parties=0,
  learning_rate=1e-3,
  rounds=20,
  eval_every=1,
  examples_per_class=3,
  heldout_examples=2000,
  public_epochs=20,
  public_batch_size=128,
  public_min_delta=0.001,
  public_patience=3,
  transfer_epochs=25,
  transfer_batch_size=32,
  transfer_min_delta=0.001,
  transfer_patience=10,
  pooled_epochs=50,
  public_subset=5000,
  digest_batch_size=256,
  digest_epochs=1,
  revisit_batch_size=5,
  revisit_epochs=2,
)
# Table 2's narrower models and 18 images, one step an epoch: with the code's 25
# epochs and patience of 10, which are of Table 1's models, some are stopped
# before they learn anything.
_CIFAR = dict(
  _PAPER,
  models="table2",
  public_min_delta=0.005,
  transfer_epochs=100,
  transfer_patience=100,
  pooled_epochs=100,
  revisit_epochs=4,
)
DEFAULTS = {
  "digits": dict(
    _PAPER,
    models="small",
    num_parties=5,
    weak_parties=1,
    learning_rate=3e-3,
    rounds=12,
    heldout_examples=100,
    public_batch_size=32,
    public_patience=20,
    transfer_epochs=100,
    transfer_batch_size=6,
    transfer_patience=100,
    public_subset=300,
    digest_batch_size=32,
  ),
  "mnist_letters_iid": _PAPER,
  "mnist_letters_by_writer": dict(
    _PAPER, examples_per_class=None, revisit_epochs=4
  ),
  "cifar_iid": _CIFAR,
  "cifar_noniid": dict(
    _CIFAR,
    transfer_patience=25,  # Of four steps.
    rounds=13,
    examples_per_class=20,
    digest_batch_size=128,
    revisit_batch_size=10,
    revisit_epochs=10,
  ),
  "npz": dict(
    _CIFAR, examples_per_class=None, heldout_examples=200, public_subset=1000
  ),
}
# Runs can share phases that depend on the same flags (--pretrained).
# Flags that only the collaboration reads:
COLLABORATION = {
  "rounds",
  "eval_every",
  "public_subset",
  "consensus_weights",
  "digest_loss",
  "temperature",
  "digest_batch_size",
  "digest_epochs",
  "revisit_batch_size",
  "revisit_epochs",
}
# Flags that the public phase does not read; its data.json identifies its data:
PRIVATE = {
  "environment",
  "examples_per_class",
  "min_writer_examples",
  "superclasses",
}
# Flags that only this phase reads:
OF_PHASE = {
  "public": {"public_epochs", "public_batch_size", "public_min_delta"}
  | {"public_patience"},
  "transfer": {"transfer_epochs", "transfer_batch_size"}
  | {"transfer_min_delta", "transfer_patience"},
  "pooled": {"pooled_epochs", "transfer_batch_size"}
  | {"transfer_min_delta", "transfer_patience"},
}
PHASES = tuple(OF_PHASE)


def of_phase(phase: str, config: dict) -> dict:
  """The flags of a run that a phase depends on."""
  apart = set().union(*OF_PHASE.values()) - OF_PHASE[phase]
  apart |= COLLABORATION | (PRIVATE if phase == "public" else set())
  return {name: v for name, v in config.items() if name not in apart}


def define_flags() -> None:
  """Defines the flags of the experiment."""
  run_flags.define_run_flags()
  flags.DEFINE_enum(
    "environment",
    "digits",
    list(fedmd_images.ENVIRONMENTS),
    "Public data and the parties' private data; npz: your own.",
  )
  run_flags.define_npz_flag(of="environment")
  flags.DEFINE_string(
    "public_npz",
    None,
    "For --environment=npz: the public images, a file like --npz, whose images"
    " have the same shape.",
  )
  _define_integers(
    num_parties="Number of parties; 10 in the paper.",
    examples_per_class="Number of images per private class of a party; not for"
    " mnist_letters_by_writer, where a party has all that its writer wrote, nor"
    " for an --npz with clients. By default 3 for npz.",
    public_subset="Number of public examples per round on which the parties"
    " exchange scores.",
    public_epochs="Maximum number of epochs on public data.",
    public_batch_size="Batch size on public data.",
    public_patience="Number of epochs without progress after which training on"
    " public data stops.",
    transfer_epochs="Maximum number of epochs on a party's own data.",
    transfer_batch_size="Batch size on a party's own data and on pooled data.",
    transfer_patience="Number of epochs without progress after which training"
    " on a party's own data, or on pooled data, stops.",
    pooled_epochs="Maximum number of epochs on pooled private data.",
    digest_batch_size="Batch size of Digest.",
    digest_epochs="Epochs of Digest over the round's public examples.",
    revisit_batch_size="Batch size of Revisit.",
    revisit_epochs="Epochs of Revisit over a party's own examples.",
    heldout_examples="Maximum number of examples of --stopping_set=heldout.",
    public_examples="Number of public training examples used; by default all.",
  )
  flags.DEFINE_integer(
    "min_writer_examples",
    18,
    "mnist_letters_by_writer: minimum number of letters a to f of a writer, all"
    " six together. The released code has 18; the paper has around 20 of each"
    " letter.",
    lower_bound=1,
  )
  flags.DEFINE_enum(
    "superclasses",
    "paper",
    sorted(fedmd_images.SUPERCLASSES),
    "cifar_noniid: the paper's superclasses, 0 to 5, or the released code's.",
  )
  flags.DEFINE_list(
    "models",
    None,
    "The parties' networks: those of the paper's table 1 (table1: letters; in"
    " the released code CIFAR too) or table 2 (table2: CIFAR), or small ones"
    " (small); or your own, FILE.py:FUNCTION,FILE.py:OTHER, which repeat if"
    " there are more parties, where FUNCTION(num_classes) returns a Flax"
    " module. With these --weak_parties is 0 by default.",
  )
  flags.DEFINE_float(
    "width",
    1.0,
    "Factor on all numbers of filters; 1 in the paper.",
    lower_bound=1e-6,
  )
  flags.DEFINE_integer(
    "weak_parties",
    None,
    "Number of weak parties: the last ones, with two fully connected layers as"
    " their networks.",
    lower_bound=0,
  )
  flags.DEFINE_float(
    "learning_rate", None, "Adam's learning rate in all phases.", lower_bound=0
  )
  flags.DEFINE_float(
    "batch_norm_momentum",
    0.99,
    "Momentum of batch normalisation's running statistics. With few steps per"
    " round the statistics lag behind, and the parties' logits may grow from"
    " round to round until all parties diverge; with 0.9 they lag less.",
    lower_bound=0,
    upper_bound=1,
  )
  flags.DEFINE_float(
    "l2", 1e-3, "Weight of the head's sum of squared weights.", lower_bound=0
  )
  flags.DEFINE_enum(
    "stopping_set",
    "heldout",
    ["heldout", "test", "none"],
    "Images that decide when training before the collaboration has converged:"
    " training images that no party trains on (heldout); the test images, as in"
    " the released code; or none, so that all epochs are run.",
  )
  for phase, data in (
    ("public", "public"),
    ("transfer", "own or pooled"),
  ):
    flags.DEFINE_float(
      f"{phase}_min_delta",
      None,
      f"Training on {data} data makes progress if the accuracy on the stopping"
      " set exceeds the best so far by more than this; 0.01 is one percentage"
      " point.",
      lower_bound=0,
      upper_bound=1,
    )
  flags.DEFINE_list(
    "consensus_weights",
    None,
    "Weights of the parties in the consensus, of which only the ratios matter;"
    " by default equal. The paper's CIFAR runs slightly suppress parties 0 and"
    " 9; their flag files use 0.5.",
  )
  flags.DEFINE_enum(
    "digest_loss",
    "mae",
    sorted(TRANSLATORS),
    "Loss of Digest: mae or mse between logits, or kl from the mean tempered"
    " softmax.",
  )
  flags.DEFINE_float(
    "temperature",
    1.0,
    "Softmax temperature of --digest_loss=kl.",
    lower_bound=1e-6,
  )
  flags.DEFINE_string(
    "pretrained",
    None,
    "Folder of an earlier run; with --seeds one that has a folder seedN for"
    " each seed. Its training on public data is reused, or resumed; the flags"
    " that it depends on must be the same. Its transfer and pooled phases are"
    " reused too if the flags that they depend on are the same. Different"
    " environments can thus share the training on public data.",
  )
  common.say_defaults({name: {"": d} for name, d in DEFAULTS.items()})


def _define_integers(**helps) -> None:
  for name, text in helps.items():
    flags.DEFINE_integer(name, None, text, lower_bound=1)


def configuration(workdir: pathlib.Path) -> tuple[dict, dict]:
  """The run's flags with defaults filled in.

  Args:
    workdir: the run's folder.

  Returns:
    Values of flags that change the result, and of those that do not.

  Raises:
    UsageError: if a value is out of its range.
  """
  values = common.filled(DEFAULTS[FLAGS.environment])
  values["consensus_weights"] = _weights(values["num_parties"])
  values["models"] = _models(values["models"])
  own = own_names(values["models"])
  if own and FLAGS.weak_parties is None:
    values["weak_parties"] = 0
  if values["weak_parties"] > values["num_parties"]:
    raise common.UsageError(
      f"--weak_parties={values['weak_parties']}: there are"
      f" {values['num_parties']} parties"
    )
  strong = values["num_parties"] - values["weak_parties"]
  if len(own) > strong:
    raise common.UsageError(
      f"--models={values['models']}: {len(own)} models, but {strong} parties"
      " that are not --weak_parties; give more --num_parties"
    )
  elsewhere = {  # Flags that other environments ignore.
    "examples_per_class": (None, set(DEFAULTS) - {"mnist_letters_by_writer"}),
    "min_writer_examples": (18, {"mnist_letters_by_writer"}),
    "superclasses": ("paper", {"cifar_noniid"}),
  }
  for name, (default, environments) in elsewhere.items():
    value = FLAGS[name].value
    if value != default and FLAGS.environment not in environments:
      raise common.UsageError(
        f"--{name}={value}: has no effect in"
        f" --environment={FLAGS.environment}; leave it out"
      )
  if FLAGS.temperature != 1 and FLAGS.digest_loss != "kl":
    raise common.UsageError(
      f"--temperature={FLAGS.temperature}: only for --digest_loss=kl, not"
      f" {FLAGS.digest_loss}"
    )
  common.refuse("FedMD has none; leave it out", "lanes", "microbatch")
  on_cpu = jax.default_backend() == "cpu"
  speed = {
    # Otherwise a round takes less time than a checkpoint.
    "checkpoint_every": 1 if on_cpu and FLAGS.environment != "digits" else 10,
    "conv": kernels.default_conv(alone=True),
    "eval_batch_size": batch_size_or_default(None),
  }
  return common.resolved_flags(__name__, values, speed, workdir)


def own_names(models: str) -> list[str]:
  """The names in `--models` if they are of the user's own models."""
  names = models.split(",")
  return names if own_models.is_own(names[0]) else []


def _models(given: str | list[str]) -> str:
  """`--models` as one string, checked."""
  names = [given] if isinstance(given, str) else given
  if not any(map(own_models.is_own, names)) and len(names) == 1:
    own_models.check("models", names, sorted(models.TABLES))
    return names[0]
  for name in names:
    if not own_models.is_own(name):
      raise common.UsageError(
        f"--models={','.join(names)}: {name} is not FILE.py:FUNCTION; give one"
        f" of {', '.join(sorted(models.TABLES))}, or only models of your own"
      )
  own_models.check("models", names, [])
  if FLAGS.width != 1:
    raise common.UsageError(
      f"--width={FLAGS.width}: has no effect on models of your own; leave it"
      " out"
    )
  return ",".join(names)


def _weights(num_parties: int) -> list[float] | None:
  """`--consensus_weights`, checked."""
  given = FLAGS.consensus_weights
  if not given:
    return None
  shown = f"--consensus_weights={','.join(given)}"
  weights = common.numbers("consensus_weights", given, low=0)
  if len(weights) != num_parties:
    raise common.UsageError(
      f"{shown}: {len(weights)} values, give {num_parties}, one per party"
    )
  if not 0 < sum(weights) < float("inf"):
    raise common.UsageError(f"{shown}: must be finite, and not all zero")
  return weights
