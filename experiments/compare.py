r"""Methods of federated learning with unlike models, side by side.

Each client has a model of its own architecture, and examples of its own, of
which it keeps a quarter for tests. All methods have the same clients, models,
batches and evaluation. Without flags four of them run on the embedded data set
`digits`; for example:

  python experiments/compare.py --dataset=cifar10 --data_dir=DIR \
      --method=local,fml,fedproto --num_clients=20 --partition_alpha=0.1
"""

from collections.abc import Sequence
import dataclasses
import sys
from typing import Literal

import settings
from settings import count, setting, share
import shared

_PUBLIC = "fedmd dsfl ktpfl feddf fedet codist mergedcodist"
PUBLIC = tuple(_PUBLIC.split())  # On public images.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare(shared.Rounds):
  """A run of one of the methods.

  Attributes:
    method: One method, or a comma-separated list of them, which are run one
      after another and compared. local is each client alone; pooled one model
      of each architecture on the examples of all clients together. fedavg and
      fedprox average the clients of each architecture; scaffold, whose clients
      train by SGD without momentum, ditto and heterofl, whose clients have it
      in --widths, need one architecture for all, codist (PeriodicCodist) and
      mergedcodist two or more.
    dataset: Data set (npz is your own). Training and test images are divided
      together.
    examples: Number of the data set's images that are divided, drawn with the
      same shares of classes; by default all.
    public_dataset: Data set of the public images, of the same shape; their
      labels are not used. With --dataset itself they are set aside before it is
      divided, for all methods.
    public_examples: Number of public images.
    public_subset: Number of public images of a round; servers that distil
      (feddf, fedet, codist, mergedcodist) draw as many in each pass.
    digest_batch_size: Batch size on public images.
    digest_epochs: Passes over a round's public images.
    partition: How the images are split among clients: each class by a Dirichlet
      distribution; into single-class shards (pathological); evenly (iid); or as
      a file says.
    partition_alpha: Concentration of --partition=dirichlet; small values give
      skewed clients.
    shards_per_client: Shards, and so the most classes, of each client with
      --partition=pathological.
    partition_file: JSON, a list of each client's positions among the images,
      training images numbered before test images, as [[0, 5, 2], [1, 3]].
    validation: Share of a client's training images that it keeps to measure
      when to stop; 0 for none.
    patience: Ends a run after this many evaluations without a greater mean
      accuracy on --validation images; by default never.
    target_accuracy: Mean test accuracy of the clients, a share; the table then
      has the rounds and the data sent until an evaluation first reached it.
    num_clients: Number of clients.
    clients_per_round: Number of clients sampled in each round; by default all.
      The others keep their models unchanged.
    dropout_rate: Probability with which a client drops out of a round in which
      it would take part; it sends nothing and does not change. Not for ktpfl,
      nor are --late_clients and --clients_per_round.
    late_clients: Number of clients, the last ones, that take part only from
      --late_round on.
    late_round: The first round of --late_clients.
    models: Architectures, which clients have in turn: a family, cnn4 (cnn,
      small_cnn, lenet5, resnet) or mixed3 (mlp, small_cnn, lenet5), or a list
      of them and of their members; or FILE.py:FUNCTION for one of your own,
      where FUNCTION(num_features) returns a Flax module from images to that
      many features. For GPUs htfe2 (cnn, resnet18), htfe4 (cnn, googlenet,
      mobilenet_v2, resnet18) or htfe8 (these, resnet34, resnet50, resnet101,
      resnet152), HtFLlib's HtFE-img-2, 4 and 8 with --num_features=512.
    widths: Shares of the channels of --models=resnet, in eighths, which clients
      have in turn.
    num_features: Number of features in which all models end, before the layer
      that gives the class scores.
    inner_features: Number of features of the --global_model, whose head also
      classifies by as many of each client's.
    global_model: Architecture of the model that all clients share, or of the
      server's (fedet).
    local_epochs: A client's passes over its examples in a round.
    batch_size: Clients' batch size.
    learning_rate: Clients' learning rate.
    momentum: Clients' momentum.
    fml_alpha: Weight of the labels in the clients' models' loss.
    fml_beta: Weight of the labels in the shared model's loss.
    prototype_weight: Weight of the distance to the prototypes.
    fd_weight: Weight of the other clients' mean predictions.
    prox_mu: Weight of the proximal term.
    ditto_weight: Weight of the distance to the shared model.
    server_learning_rate: The server's, for prototypes, the head, the generator
      or FedGKT's large model.
    temperature: Of the mean of the clients' predictions (dsfl), or of all
      softmaxes (ktpfl), or of the divergences (fedgkt).
    distill_lr: Learning rate of the servers' distillation, by Adam.
    diversity: Weight of what disagreeing models say.
    codist_period: Rounds from one codistillation to the next.
    merge_alpha: Weight of the clients' gradient beside the distillation's.
  """

  # A new method also needs a line in METHODS of compare_methods.py.
  method: tuple[
    Literal[
      *("local", "pooled", "fml", "fedkd", "fd", "fedproto", "fedtgp"),
      *("fedgh", "lgfedavg", "fedgen", "fedgkt", "fedmrl"),
      *("ditto", "scaffold"),
      *("fedavg", "fedprox"),
      *("fedmd", "dsfl", "ktpfl", "feddf", "fedet", "codist"),
      *("mergedcodist", "heterofl"),
    ],
    ...,
  ] = setting(("local", "pooled", "fml", "fedproto"), distinct=True)
  dataset: shared.Images = setting("digits")
  examples: int | None = count()
  public_dataset: shared.Images | None = setting(
    None,
    {"cifar10": "cifar100", "cifar100": "cifar10"},
    only=f"{_PUBLIC} set_aside",
  )
  public_examples: int = count(
    5000, {"digits": 300}, only=f"{_PUBLIC} set_aside"
  )
  public_subset: int = count(
    1000, {"digits": 100}, only=_PUBLIC, argument="subset"
  )
  digest_batch_size: int = count(128, {"digits": 32}, only=_PUBLIC)
  digest_epochs: int = count(1, only=_PUBLIC)
  partition: Literal["dirichlet", "pathological", "iid", "file"] = setting(
    "dirichlet"
  )
  partition_alpha: float = setting(
    0.1, {"digits": 0.5}, only="dirichlet", low=1e-6
  )
  shards_per_client: int = count(2, {"cifar100": 20}, only="pathological")
  partition_file: str | None = setting(kind="place", only="file")
  validation: float = setting(0.0, low=0, high=0.9)
  patience: int | None = count()
  target_accuracy: float | None = share(kind="machine")
  num_clients: int = count(20, {"digits": 10})
  clients_per_round: int | None = count(only="several_clients")
  dropout_rate: float = share(0.0, only="several_clients")
  late_clients: int = setting(0, only="several_clients", low=0)
  late_round: int = count(1, only="several_clients")
  models: tuple[str, ...] = setting("cnn4", {"digits": "mixed3"})
  widths: tuple[float, ...] = share(
    (1.0, 0.5, 0.25), only="heterofl", argument="width"
  )
  num_features: int = count(128, {"digits": 32})
  inner_features: int = count(32, {"digits": 8}, only="fedmrl")
  global_model: str = setting(
    "small_cnn", {"fedet": "cnn"}, only="fml fedkd fedet fedmrl"
  )
  rounds: int = count(100, {"digits": 40})
  eval_every: int = count(5)
  checkpoint_every: int = count(10, kind="speed")
  local_epochs: int = count(1, {"digits": 2}, argument="epochs")
  batch_size: int = count(32, {"digits": 16})
  learning_rate: float = setting(0.01, {"scaffold": 0.1}, low=1e-12)
  momentum: float = share(0.9, only="momentum_sgd")
  fml_alpha: float = share(0.5, only="fml")
  fml_beta: float = share(0.5, only="fml")
  prototype_weight: float = setting(1.0, only="fedproto fedtgp", low=0)
  fd_weight: float = setting(1.0, only="fd", low=0)
  prox_mu: float = setting(0.01, only="fedprox", low=0)
  ditto_weight: float = setting(1.0, only="ditto", low=0)
  server_learning_rate: float = setting(
    0.01, {"fedgen": 1e-3}, only="fedtgp fedgh fedgen fedgkt", low=1e-12
  )
  temperature: float = setting(
    0.1,
    {"ktpfl": 10.0, "fedgkt": 3.0},
    only="dsfl ktpfl fedgkt",
    low=1e-6,
  )
  distill_lr: float = setting(
    1e-3, only="feddf fedet codist mergedcodist", low=0
  )
  diversity: float = setting(0.05, only="fedet", low=0)
  codist_period: int = count(5, only="codist", argument="period")
  merge_alpha: float = share(
    0.9, {"cifar10 cifar100": 0.95, "digits": 0.8}, only="mergedcodist"
  )


def main(argv: Sequence[str]) -> None:
  """Runs the methods of --method, then prints a table."""
  settings.main(argv, Compare, "compare_run")


if __name__ == "__main__":
  main(sys.argv[1:])
