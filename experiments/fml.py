r"""Federated Mutual Learning, and the baselines it is compared with.

Without flags it runs the quick start: FedAvg, FedProx, FML and independent
training side by side on the embedded data set `digits`, with five clients that
have different models. The paper's runs are in `experiments/flags`:

  python experiments/fml.py --flagfile=experiments/flags/NAME.flags \
      --data_dir=DIR

Put the flag file first: flags after it override it, and it overrides flags
before it.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import sys
from typing import Any, Literal, Self

import settings
from settings import count, setting, share
import shared

ALGORITHMS = ("fedavg", "fedprox", "fml", "independent")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fml(shared.Rounds):
  """A run of Federated Mutual Learning or of a baseline.

  Defaults are from the paper's section 5.1 or, where it gives none, from the
  released code.

  Attributes:
    algorithm: One algorithm, or a comma-separated list of them, which are run
      one after another and compared.
    dataset: Data set (npz: your own); or a comma-separated list with one for
      each client, where clients with the same data set share it.
    partition: How the images are split among clients: evenly (iid); into 6, 4
      or 2 single-class shards per client (noniid1, noniid2, noniid3; with 100
      classes 60, 40 or 20); each class by a Dirichlet distribution; or as --npz
      says (file).
    partition_alpha: Concentration of --partition=dirichlet; small values give
      skewed clients.
    num_clients: Number of clients; by default the paper's 5, or the number of
      data sets if there are several.
    clients_per_round: Number of clients sampled in each round; by default all,
      as in the paper. The others keep their models unchanged.
    global_model: The global model: mlp, lenet5, cnn1, cnn2, or FILE.py:FUNCTION
      for one of your own, where FUNCTION(num_classes) returns a Flax module; or
      lenet5_conv, cnn1_conv, cnn2_conv, the convolutions only, on which each
      client has its own adaptor layer, for fml and independent.
    client_models: The clients' own models, one for all or one for each client:
      mlp, lenet5, cnn1, cnn2, or FILE.py:FUNCTION for one of your own.
    alpha: Weight of the labels in the clients' models' loss; FIRST,LAST to
      change it linearly over the rounds.
    beta: Weight of the labels in the meme models' loss; FIRST,LAST to change it
      linearly over the rounds.
    temperature: Softmax temperature of both models in the divergences; the
      paper's equation 5 has none.
    sequential_updates: Update the client's model first; the meme model then
      learns from the updated model.
    prox_mu: Weight of the proximal term.
    local_epochs: A client's passes over its examples in a round.
    batch_size: Clients' batch size.
    full_batches: Fill up the last batch of a pass with other images of the
      client, which models with batch statistics need.
    learning_rate: Clients' learning rate.
    momentum: Clients' momentum.
    weight_decay: Clients' weight decay.
    clip_norm: Scale larger gradients down to this norm; by default no clipping.
    clients_start: Initial weights of the clients' own models: each its own
      random draw (own), or the global model's for models of its architecture
      (global).
    merge_weights: Weights of the clients in the mean: their numbers of
      examples, or the same for all.
    augment: Crop and flip training images of CIFAR, as the released code does
      (the paper does not say), and crop those of digits and of npz.
    bad_clients: Indices, from 0, of clients that train on wrong labels (section
      6).
    bad_label_share: Share of the --bad_clients' labels that is replaced by
      uniform draws of a class.
    heldout_examples: Number of training examples, over all clients and equally
      many from each, that are held out for choosing hyper-parameters; 0, as in
      the paper, or a multiple of the number of clients.
  """

  OLD = ("autotune",)

  algorithm: tuple[Literal["fedavg", "fedprox", "fml", "independent"], ...] = (
    setting(ALGORITHMS, distinct=True)
  )
  dataset: tuple[shared.Images, ...] = setting("digits", argument="datasets")
  partition: Literal[
    "iid", "noniid1", "noniid2", "noniid3", "dirichlet", "file"
  ] = setting("iid", {"digits": "noniid3", "several_datasets": "iid"})
  partition_alpha: float = setting(0.5, only="dirichlet", low=1e-6)
  num_clients: int = count()
  clients_per_round: int | None = count()
  global_model: str = setting("cnn1", {"mnist npz": "lenet5"})
  client_models: tuple[str, ...] = setting(
    "cnn1",
    {
      "mnist npz": "lenet5",
      "digits": ("mlp", "lenet5", "cnn1", "cnn2", "cnn2"),
    },
    only="fml independent",
  )
  alpha: tuple[float, ...] = share(
    0.5, only="fml", most=2, search="linear:0.05:0.95"
  )
  beta: tuple[float, ...] = share(
    0.5, only="fml", most=2, search="linear:0.05:0.95"
  )
  temperature: float = setting(1.0, only="fml", low=1e-6)
  sequential_updates: bool = setting(False, only="fml")
  prox_mu: float = setting(0.01, only="fedprox", low=0, search="log:1e-4:1")
  rounds: int = count(200, {"digits": 40})
  eval_every: int = count(1, {"digits": 2})
  checkpoint_every: int = count(10, kind="speed")
  local_epochs: int = count(5, {"digits": 2})
  batch_size: int = count(128, {"digits": 16})
  full_batches: bool = setting(False, {"own_models": True})
  learning_rate: float = setting(0.01, low=1e-12, search="log:1e-3:0.3")
  momentum: float = share(0.9)
  weight_decay: float = setting(5e-4, low=0)
  clip_norm: float | None = setting(low=1e-6)
  clients_start: Literal["own", "global"] = setting("own", only="fml")
  merge_weights: Literal["uniform", "examples"] = setting(
    "uniform", only="fml fedavg fedprox"
  )
  augment: bool = setting(True)
  bad_clients: tuple[int, ...] = setting((), low=0)
  bad_label_share: float = share(1.0, only="bad_clients")
  heldout_examples: int = setting(0, low=0)
  microbatch: int = setting(
    0,
    {"cpu": 16, "mlps own_models": 0},
    kind="speed",
    only="fml independent",
    matters="own_models",
    low=0,
  )

  @classmethod
  def resolve(cls, given: Mapping[str, Any], words: settings.Words) -> Self:
    """The settings of a run, with a model for each client."""
    s = super().resolve(given, words)
    number = s.num_clients or (5 if len(s.dataset) == 1 else len(s.dataset))
    models = s.client_models
    if len(models) == 1 or "client_models" not in given:
      models = tuple(models[k % len(models)] for k in range(number))
    if len(models) != number:
      raise settings.UsageError(
        f"--client_models={','.join(models)}: {len(models)} models for"
        f" {number} clients; give one, or one for each client"
      )
    return dataclasses.replace(s, num_clients=number, client_models=models)


def main(argv: Sequence[str]) -> None:
  """Runs the algorithms of --algorithm, then prints a table."""
  settings.main(argv, Fml, "fml_run")


if __name__ == "__main__":
  main(sys.argv[1:])
