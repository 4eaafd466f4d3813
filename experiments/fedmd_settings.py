"""FedMD's flags: what they mean where they are not given, and their checks."""

import pathlib

from absl import flags
import common
import jax

from hetfl import evaluate
from hetfl.data import fedmd_images
from hetfl.fedmd import TRANSLATORS
from hetfl.models import fedmd as models

FLAGS = flags.FLAGS

# What a flag that was not given means: the paper's values where it says, the
# released code's where it does not.
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
_CIFAR = dict(_PAPER, models="table2", public_min_delta=0.005, revisit_epochs=4)
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
    rounds=13,
    examples_per_class=20,
    digest_batch_size=128,
    revisit_batch_size=10,
    revisit_epochs=10,
  ),
}
# Runs can share phases that depend on the same values (--pretrained).
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
# Flags that the public phase does not read; its data.json tells data apart:
PRIVATE = {
  "environment",
  "examples_per_class",
  "min_writer_examples",
  "superclasses",
}
# Flags that this phase alone reads:
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
  """Those of a run's flags that a phase depends on."""
  apart = set().union(*OF_PHASE.values()) - OF_PHASE[phase]
  apart |= COLLABORATION | (PRIVATE if phase == "public" else set())
  return {name: v for name, v in config.items() if name not in apart}


def define_flags() -> None:
  """Defines the flags of the experiment."""
  common.define_run_flags()
  flags.DEFINE_enum(
    "environment",
    "digits",
    list(fedmd_images.ENVIRONMENTS),
    "Public data and the parties' own.",
  )
  _define_integers(
    num_parties="Parties; 10 in the paper.",
    examples_per_class="Images of each private class of a party; not for"
    " mnist_letters_by_writer, where a party has what its writer wrote.",
    public_subset="Public examples that a round exchanges scores of.",
    public_epochs="Epochs on public data, at most.",
    public_batch_size="Batch size on public data.",
    public_patience="Training on public data ends after so many epochs without"
    " progress.",
    transfer_epochs="Epochs on a party's own data, at most.",
    transfer_batch_size="Batch size on own, and on pooled, data.",
    transfer_patience="Training on own, and on pooled, data ends after so many"
    " epochs without progress.",
    pooled_epochs="Epochs on pooled private data, at most.",
    digest_batch_size="Batch size of Digest.",
    digest_epochs="Epochs of Digest over the round's public examples.",
    revisit_batch_size="Batch size of Revisit.",
    revisit_epochs="Epochs of Revisit over a party's own examples.",
    heldout_examples="Examples of --stopping_set=heldout, at most.",
    public_examples="Public training examples to keep; by default all.",
  )
  flags.DEFINE_integer(
    "min_writer_examples",
    18,
    "mnist_letters_by_writer: letters a to f of a writer, at least, all six"
    " together. 18 is the released code's; the paper has around 20 of each.",
    lower_bound=1,
  )
  flags.DEFINE_enum(
    "superclasses",
    "paper",
    sorted(fedmd_images.SUPERCLASSES),
    "cifar_noniid: the paper's list, 0 to 5, or the released code's.",
  )
  flags.DEFINE_enum(
    "models",
    None,
    sorted(models.TABLES),
    "The parties' networks: the paper's table 1 (letters; the released code has"
    " it for CIFAR too) or 2 (CIFAR), or small ones.",
  )
  flags.DEFINE_float(
    "width",
    1.0,
    "Factor on all numbers of filters; 1 is the paper's.",
    lower_bound=1e-6,
  )
  flags.DEFINE_integer(
    "weak_parties",
    None,
    "The last so many parties have two fully connected layers instead.",
    lower_bound=0,
  )
  flags.DEFINE_float(
    "learning_rate", None, "Of the parties' Adam, in all phases.", lower_bound=0
  )
  flags.DEFINE_float(
    "batch_norm_momentum",
    0.99,
    "Momentum of batch normalisation's running statistics. With few steps a"
    " round they lag behind, and the parties' logits may grow from round to"
    " round until all are lost; 0.9 follows faster.",
    lower_bound=0,
    upper_bound=1,
  )
  flags.DEFINE_float(
    "l2", 1e-3, "Weight of the head's sum of squares.", lower_bound=0
  )
  flags.DEFINE_enum(
    "stopping_set",
    "heldout",
    ["heldout", "test", "none"],
    "What says when training before the collaboration has converged: training"
    " images that no party trains on; the test images, as in the released"
    " code; or nothing: all epochs are run.",
  )
  for phase, data in (
    ("public", "public"),
    ("transfer", "own, and on pooled,"),
  ):
    flags.DEFINE_float(
      f"{phase}_min_delta",
      None,
      f"Training on {data} data makes progress where accuracy on the stopping"
      " set rises by more than this; 0.01 is one percentage point.",
      lower_bound=0,
      upper_bound=1,
    )
  flags.DEFINE_list(
    "consensus_weights",
    None,
    "A weight for each party, of which only the ratios count; by default"
    " equal. The paper's CIFAR runs suppress parties 0 and 9 slightly; their"
    " flag files have 0.5.",
  )
  flags.DEFINE_enum(
    "digest_loss",
    "mae",
    sorted(TRANSLATORS),
    "mae or mse between logits, or kl from the mean tempered softmax.",
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
    "Folder of an earlier run; with --seeds one that has seedN of each. Its"
    " training on public data is taken over, or resumed; the flags that it"
    " depends on must be the same. So are its transfer and pooled phases, if"
    " theirs are. So environments can share the training on public data.",
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
  if values["weak_parties"] > values["num_parties"]:
    raise common.UsageError(
      f"--weak_parties={values['weak_parties']}: there are"
      f" {values['num_parties']} parties"
    )
  elsewhere = {  # What says nothing in other environments.
    "examples_per_class": (None, set(DEFAULTS) - {"mnist_letters_by_writer"}),
    "min_writer_examples": (18, {"mnist_letters_by_writer"}),
    "superclasses": ("paper", {"cifar_noniid"}),
  }
  for name, (default, environments) in elsewhere.items():
    value = FLAGS[name].value
    if value != default and FLAGS.environment not in environments:
      raise common.UsageError(
        f"--{name}={value}: says nothing in --environment={FLAGS.environment};"
        " leave it out"
      )
  if FLAGS.temperature != 1 and FLAGS.digest_loss != "kl":
    raise common.UsageError(
      f"--temperature={FLAGS.temperature}: --digest_loss={FLAGS.digest_loss}"
      " has none; leave it out, or take kl"
    )
  common.refuse("FedMD has none; leave it out", "lanes", "microbatch")
  on_cpu = jax.default_backend() == "cpu"
  speed = {
    # Else rounds take less time than a checkpoint.
    "checkpoint_every": 1 if on_cpu and FLAGS.environment != "digits" else 10,
    # No party's kernels are a batch axis here, so accelerators' own form.
    "conv": "patches" if on_cpu else "native",
    "eval_batch_size": evaluate.batch_size_or_default(None),
  }
  return common.resolved_flags(__name__, values, speed, workdir)


def _weights(num_parties: int) -> list[float] | None:
  """`--consensus_weights`, checked."""
  given = FLAGS.consensus_weights
  if not given:
    return None
  shown = f"--consensus_weights={','.join(given)}"
  weights = common.numbers("consensus_weights", given, low=0)
  if len(weights) != num_parties:
    raise common.UsageError(
      f"{shown}: {len(weights)} values, want {num_parties}, one a party"
    )
  if not 0 < sum(weights) < float("inf"):
    raise common.UsageError(f"{shown}: must be finite, and not all zero")
  return weights
