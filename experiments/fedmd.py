r"""FedMD: parties with models of their own learn from each other's scores.

Without flags it runs the quick start: five small networks on the embedded data
set `digits`. The paper's runs are in `experiments/flags`:

  python experiments/fedmd.py --flagfile=experiments/flags/fedmd_NAME.flags \
      --data_dir=DIR

Put the flag file first: flags after it override it, and it overrides flags
before it.

A run has four phases, each in a folder of its own: training on public data
(`public/`), then on each party's own data (`transfer/`), the upper bound, which
is trained on all parties' private data (`pooled/`), and the collaboration, in
the run's folder.
"""

from collections.abc import Sequence
import dataclasses
import sys
from typing import Literal

import settings
from settings import count, setting, share
import shared

# A phase's folder is compared by the settings that it depends on.
PHASES = ("public", "transfer", "pooled", "collaboration")
_PRIVATE = "transfer pooled collaboration"
_BOTH = "transfer pooled"
_TOGETHER = "collaboration"
_STOPS = "heldout test"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedMD(shared.Run):
  """A run of FedMD.

  Defaults are the paper's or, where it gives none, the released code's. On
  CIFAR, Table 2's narrower models and 18 images take one step an epoch: with
  the code's 25 epochs and patience of 10, for Table 1's models, some are
  stopped before they learn anything.

  Attributes:
    environment: Public data and the parties' private data; npz is your own.
    public_npz: For --environment=npz, the public images; a file like --npz,
      whose images have the same shape.
    models: The parties' networks: those of the paper's table 1 (table1, for
      letters; in the released code for CIFAR too) or table 2 (table2, for
      CIFAR), or small ones (small); or your own,
      FILE.py:FUNCTION,FILE.py:OTHER, which repeat if there are more parties,
      where FUNCTION(num_classes) returns a Flax module.
    width: Factor on all numbers of filters; 1 in the paper.
    num_parties: Number of parties; 10 in the paper.
    weak_parties: Number of weak parties, the last ones, whose networks are two
      fully connected layers.
    examples_per_class: Number of images per private class of a party; not for
      mnist_letters_by_writer, where a party has all that its writer wrote, nor
      for an --npz with clients. By default 3 for npz.
    min_writer_examples: Minimum number of letters a to f of a writer, all six
      together. The released code has 18; the paper has around 20 of each
      letter.
    superclasses: The paper's superclasses, 0 to 5, or the released code's.
    public_examples: Number of public training examples used; by default all.
    learning_rate: Adam's learning rate in all phases.
    batch_norm_momentum: Momentum of batch normalisation's running statistics.
      With few steps per round the statistics lag behind, and the parties'
      logits may grow from round to round until all parties diverge; with 0.9
      they lag less.
    l2: Weight of the head's sum of squared weights.
    stopping_set: Images that decide when training before the collaboration has
      converged: training images that no party trains on (heldout); the test
      images, as in the released code; or none, so that all epochs are run.
    heldout_examples: Maximum number of examples of --stopping_set=heldout; with
      0 all epochs are run. By default for npz 200, but no more than a fifth of
      the public images.
    public_epochs: Maximum number of epochs on public data.
    public_batch_size: Batch size on public data.
    public_patience: Number of epochs without progress after which training on
      public data stops.
    public_min_delta: Training on public data makes progress if the accuracy on
      the stopping set exceeds the best so far by more than this; 0.01 is one
      percentage point.
    transfer_epochs: Maximum number of epochs on a party's own data.
    transfer_batch_size: Batch size on a party's own data and on pooled data.
    transfer_patience: Number of epochs without progress after which training on
      a party's own data, or on pooled data, stops.
    transfer_min_delta: As --public_min_delta, on own or pooled data.
    pooled_epochs: Maximum number of epochs on pooled private data.
    public_subset: Number of public examples per round on which the parties
      exchange scores.
    consensus_weights: Weights of the parties in the consensus, of which only
      the ratios matter; by default equal. The paper's CIFAR runs slightly
      suppress parties 0 and 9; their flag files use 0.5.
    digest_loss: Loss of Digest: mae or mse between logits, or kl from the mean
      tempered softmax.
    temperature: Softmax temperature of --digest_loss=kl.
    digest_batch_size: Batch size of Digest.
    digest_epochs: Epochs of Digest over the round's public examples.
    revisit_batch_size: Batch size of Revisit.
    revisit_epochs: Epochs of Revisit over a party's own examples.
    pretrained: Folder of an earlier run; with --seeds one that has a folder
      seedN for each seed. Its training on public data is reused, or resumed;
      the flags that it depends on must be the same. Its transfer and pooled
      phases are reused too if the flags that they depend on are the same.
      Different environments can thus share the training on public data.
  """

  OLD = ("autotune", "lanes", "microbatch", "rounds_per_dispatch")

  environment: Literal[
    "mnist_letters_iid",
    "mnist_letters_by_writer",
    "cifar_iid",
    "cifar_noniid",
    "digits",
    "npz",
  ] = setting("digits", only=_PRIVATE)
  public_npz: str | None = setting(kind="place")
  models: tuple[str, ...] = setting(
    "table1",
    {"digits": "small", "cifar_iid cifar_noniid npz": "table2"},
    argument="table",
  )
  width: float = setting(1.0, only="hetfl_models", low=1e-6)
  num_parties: int = count(10, {"digits": 5})
  weak_parties: int = setting(0, {"digits": 1, "own_models": 0}, low=0)
  examples_per_class: int | None = count(
    3, {"cifar_noniid": 20, "mnist_letters_by_writer npz": None}, only=_PRIVATE
  )
  min_writer_examples: int = count(
    18, only=f"mnist_letters_by_writer, {_PRIVATE}"
  )
  superclasses: Literal["paper", "code"] = setting(
    "paper", only=f"cifar_noniid, {_PRIVATE}"
  )
  public_examples: int | None = count()
  learning_rate: float = setting(1e-3, {"digits": 3e-3}, low=0)
  batch_norm_momentum: float = share(0.99, only="hetfl_models")
  l2: float = setting(1e-3, low=0)
  stopping_set: Literal["heldout", "test", "none"] = setting("heldout")
  heldout_examples: int | None = setting(
    2000, {"digits": 100, "npz": None}, only="heldout", low=0
  )
  public_epochs: int = count(20, only="public")
  public_batch_size: int = count(128, {"digits": 32}, only="public")
  public_patience: int = count(3, {"digits": 20}, only=f"public, {_STOPS}")
  public_min_delta: float = share(
    0.001, {"cifar_iid cifar_noniid npz": 0.005}, only=f"public, {_STOPS}"
  )
  transfer_epochs: int = count(
    25, {"digits cifar_iid cifar_noniid npz": 100}, only="transfer"
  )
  transfer_batch_size: int = count(32, {"digits": 6}, only=_BOTH)
  # An epoch of non-i.i.d. parties has four steps.
  transfer_patience: int = count(
    10,
    {"digits cifar_iid npz": 100, "cifar_noniid": 25},
    only=f"{_BOTH}, {_STOPS}",
  )
  transfer_min_delta: float = share(0.001, only=f"{_BOTH}, {_STOPS}")
  pooled_epochs: int = count(
    50, {"cifar_iid cifar_noniid npz": 100}, only="pooled"
  )
  rounds: int = count(20, {"digits": 12, "cifar_noniid": 13}, only=_TOGETHER)
  eval_every: int = count(1, only=_TOGETHER)
  # Elsewhere a round takes less time than a checkpoint.
  checkpoint_every: int = count(10, {"cpu": 1, "digits": 10}, kind="speed")
  public_subset: int = count(
    5000, {"digits": 300, "npz": 1000}, only=_TOGETHER, argument="subset"
  )
  consensus_weights: tuple[float, ...] | None = setting(only=_TOGETHER, low=0)
  digest_loss: Literal["kl", "mae", "mse"] = setting("mae", only=_TOGETHER)
  temperature: float = setting(1.0, only=f"kl, {_TOGETHER}", low=1e-6)
  digest_batch_size: int = count(
    256, {"digits": 32, "cifar_noniid": 128}, only=_TOGETHER
  )
  digest_epochs: int = count(1, only=_TOGETHER)
  revisit_batch_size: int = count(5, {"cifar_noniid": 10}, only=_TOGETHER)
  revisit_epochs: int = count(
    2,
    {"mnist_letters_by_writer cifar_iid npz": 4, "cifar_noniid": 10},
    only=_TOGETHER,
  )
  pretrained: str | None = setting(kind="speed")


def main(argv: Sequence[str]) -> None:
  """Runs all seeds, then prints a table."""
  settings.main(argv, FedMD, "fedmd_run")


if __name__ == "__main__":
  main(sys.argv[1:])
