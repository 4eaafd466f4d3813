r"""Codistillation between two pools of clients with different models.

Without flags it runs the quick start: FedAvg, PeriodicCodist and MergedCodist
side by side on the embedded data set `digits`. The paper's runs are in
`experiments/flags`:

  python experiments/codist.py --flagfile=experiments/flags/NAME.flags \
      --data_dir=DIR

Put the flag file first: flags after it override it, and it overrides flags
before it.
"""

from collections.abc import Sequence
import dataclasses
import functools
import sys
from typing import Literal

import settings
from settings import count, setting, share
import shared

IMAGES = ("digits", "cifar10", "cifar100", "npz")
TEXTS = ("pydoc", "stackexchange", "stackoverflow")
POOLS = ("small", "large")
CONVOLUTIONS = ("first", "second", "third")
_CIFAR = "cifar10 cifar100"
_STUDENTS = "periodic merged"
# What says after how many rounds an algorithm's pools exchange something.
EXCHANGES = {"periodic": "codist_period", "merged": "merge_every"}
_RATE = "log:1e-4:0.1"
rates = functools.partial(setting, each=POOLS, low=1e-6, search=_RATE)
of_students = functools.partial(setting, each=POOLS, only=_STUDENTS)
rate_of_dropout = functools.partial(
  setting, only="images", each=POOLS, low=0, high=0.99
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codist(shared.Rounds):
  """A run of codistillation, or of FedAvg.

  For CIFAR and Stack Overflow defaults are from the paper's appendix C; where
  it gives none, they are the best of a few runs (BUILD_NOTES.md), and for text
  from Reddi et al. 2021 or our own choice. On digits and pydoc all algorithms
  have the same distillation, so that they share programs.

  Attributes:
    algorithm: One algorithm, or a comma-separated list of them, which are run
      one after another and compared.
    dataset: What clients hold: images (digits, cifar10, cifar100; npz, your
      own) or text (pydoc, stackexchange, stackoverflow). digits and pydoc need
      no download.
    models: The models of the small and the large pool, one for both or
      SMALL,LARGE: small_cnn, large_cnn, or for text small_lstm, large_lstm; or
      FILE.py:FUNCTION for one of your own, where FUNCTION(num_classes), for
      text FUNCTION(vocabulary_size), returns a Flax module. By default the
      paper's.
    recipe: Image size, cropping and padding: fixed size and statistics
      (pad32_batch has one crop and flip per batch, as FedJAX, not per image),
      or the data set's own, with random crops (crop), flips too (crop_flip) or
      neither (plain). crop does not flip, since images may be letters.
    layout: Where the CNNs make their maps smaller: for each of the three
      convolutions conv (as it is), pool (2x2 max pooling after it) or stride
      (steps of 2). By default pool,pool,conv, or conv,pool,pool for 32x32
      recipes. `hetfl.models.vision.small_cnn` lists those of the paper's size.
    num_clients: For --dataset=npz without clients_train, the number of clients
      that the images are divided into, by default 100, or one for ten images if
      there are fewer than a thousand; 27% of them are the server's, for
      distillation, and 10% are held out.
    partition_alpha: Concentration of the Dirichlet distribution over labels
      (coarse labels for CIFAR-100) that partitions the examples into clients;
      small values give skewed clients. By default 0.1 (cifar100); 0.5 (cifar10,
      digits, npz).
    dropout: Dropout rate of each dense layer's inputs, one value or
      SMALL,LARGE; by default no dropout, as the paper names none. With dropout,
      --microbatch changes what students drop, and so the result.
    map_dropout: Dropout rate of maps after pooling or strides, one value or
      SMALL,LARGE. FedJAX's CNN for EMNIST has 0.25, and --logits_dropout=0.5.
    logits_dropout: Dropout rate of the last layer's inputs, one value or
      SMALL,LARGE; by default --dropout.
    mixup_beta: b of the Beta(b, b) mixup of distillation images; 0 for no
      mixup.
    model_size: The paper's LSTMs, or LSTMs of half their width.
    vocabulary: Tokens: the most common words, or word pieces.
    vocabulary_size: Number of words or pieces, not counting PAD, BOS, EOS and
      OOV.
    pools: Which clients train which model. By capacity, all clients train the
      small model, and some of them (--high_capacity_clients) also the large
      one; by domain, users who answer train the small model, users who ask the
      large one.
    max_sentences_per_client: Maximum number of sentences per user; further ones
      are left out. For stackoverflow only the pools' users'.
    high_capacity_clients: Number of clients that train the large model. By
      default 8 for digits, 47 for CIFAR, 19 of 100 for npz, 40 for pydoc, 600
      for stackexchange and 684 for stackoverflow. The paper has 31, 47 or 63
      for CIFAR, and 684 for Stack Overflow, where its two other pools have the
      size of about 342 and 1,369 clients.
    distill_data: Data that the models distil on; c4 requires --c4_path.
    distill_examples: Number of distillation examples (paper, Figure 4). By
      default all, but at most 4,488,694 of --distill_data=c4, as in the paper,
      and at most 1,000,000 of stackoverflow's in_domain, to save memory
      (122,250,952 in the paper, with --bank=disk).
    c4_path: A C4 shard (*.json.gz), a text file with one paragraph per line, or
      a folder of such files.
    c4_tokenizer: How text is split into sentences and words; nltk requires
      NLTK's punkt_tab, which is never downloaded.
    bank: Where the examples are stored: all on each device (device), or on the
      host, which sends only those of each round (round), for data sets that do
      not fit on a device; or, for text, on disk (disk), in a folder hetfl_banks
      of --data_dir, written once, for those that do not fit in memory. Changes
      speed and memory only.
    clients_per_round: Clients of each pool that train in a round, one value or
      SMALL,LARGE.
    client_batch_size: Clients' batch size.
    checkpoint_every: Rounds from one checkpoint to the next; a resumed run
      repeats at most that many. Without a default it is --eval_every.
    client_epochs: A client's passes over its examples.
    client_lr: Clients' learning rate, one value or SMALL,LARGE.
    client_momentum: Clients' momentum.
    prox_mu: Weight of FedProx's term; 0 for none.
    client_weights: Weights of the clients in the mean: their numbers of
      examples, or the same for all.
    clip_norm: Greatest norm of a client's update, one value or SMALL,LARGE;
      longer ones are scaled down. Needs --client_weights=uniform; clients take
      part by chance, --clients_per_round on average (docs/privacy.md). By
      default no limit.
    epsilon: Client-level differential privacy, over all rounds and both models,
      by noise in the sum of the clipped updates.
    delta: The probability that --epsilon does not hold; by default N^-1.1,
      where N is the number of clients in the larger pool.
    server_optimizer: How servers apply their clients' mean update: FedAdam,
      FedYogi, FedAvgM (momentum) or McMahan's FedAvg (sgd).
    server_lr: Servers' learning rate in the first round, one value or
      SMALL,LARGE; it decays linearly to zero.
    distill_lr: Students' learning rate, one value or SMALL,LARGE.
    distill_lr_decay: Share of --distill_lr that is left after the last round,
      one value or SMALL,LARGE; the rate decays linearly over the rounds.
    distill_epsilon: Epsilon of the students' Adam; the paper's, and FedAdam's,
      is 1e-5.
    distill_steps: Distillation steps per exchange; in the paper 200 for
      periodic and 32 for merged.
    distill_batch_size: Batch size of distillation.
    teacher_temperature: Softmax temperature of each model as a teacher, one
      value or SMALL,LARGE.
    student_regularization: Weight of a student's own initial predictions in its
      target, one value or SMALL,LARGE.
    student_dropout: Whether students have dropout if clients do, which the
      paper does not say; MergedCodist is better without.
    label_weight: Weight of true labels in distillation; the paper uses none.
    codist_period: Rounds from one codistillation to the next.
    merge_alpha: Weight of the clients' gradient; FIRST,LAST to change it
      linearly over the rounds (paper, section 4).
    merge_every: Distil only in every N-th round; alpha is 1 in the others. The
      paper distils in every round.
  """

  OLD = ("autotune",)

  algorithm: tuple[Literal["fedavg", "periodic", "merged"], ...] = setting(
    ("fedavg", "periodic", "merged"), distinct=True
  )
  dataset: Literal[*IMAGES, *TEXTS] = setting("digits")
  models: tuple[str, ...] | None = setting(each=POOLS)
  recipe: Literal[
    "pad32",
    "pad32_batch",
    "crop24",
    "digits8",
    "mnist28",
    "crop",
    "crop_flip",
    "plain",
  ] = setting("pad32", {"digits": "digits8", "npz": "crop"}, only="images")
  layout: tuple[Literal["conv", "pool", "stride"], ...] | None = setting(
    only="images, hetfl_models", each=CONVOLUTIONS
  )
  num_clients: int | None = setting(only="images", low=3)
  partition_alpha: float | None = setting(only="images", low=1e-6)
  dropout: tuple[float, ...] = rate_of_dropout(0.0)
  map_dropout: tuple[float, ...] = rate_of_dropout(0.0)
  logits_dropout: tuple[float, ...] | None = rate_of_dropout()
  mixup_beta: float = setting(2.0, only=f"images, {_STUDENTS}", low=0)
  model_size: Literal["paper", "half"] = setting(
    "paper", {"pydoc": "half"}, only="text, hetfl_models"
  )
  vocabulary: Literal["word", "wordpiece"] = setting("word", only="text")
  vocabulary_size: int = count(
    10_000, {"stackexchange": 4000, "pydoc": 2000}, only="text"
  )
  pools: Literal["capacity", "domain"] = setting("capacity", only="text")
  max_sentences_per_client: int | None = count(
    None, {"stackexchange pydoc": 100}, only="text"
  )
  high_capacity_clients: int | None = count()
  distill_data: Literal["in_domain", "cifar10", "cifar100", "c4"] = setting(
    "in_domain"
  )
  distill_examples: int | None = count()
  c4_path: str | None = setting(kind="place", only="c4")
  c4_tokenizer: Literal["rules", "nltk"] = setting("rules", only="c4")
  bank: Literal["device", "round", "disk"] = setting("device", kind="speed")
  rounds: int = count(
    1500, {"digits": 120, "npz stackexchange": 300, "pydoc": 50}
  )
  eval_every: int = count(50, {"digits npz pydoc": 10, "stackexchange": 25})
  # On digits a checkpoint takes as long as two rounds.
  checkpoint_every: int | None = count(None, {"digits": 40}, kind="speed")
  clients_per_round: tuple[int, ...] = count(
    20, {"digits": 6, "npz pydoc": 10}, each=POOLS
  )
  client_batch_size: int = count(20, {"digits": 5, "stackexchange pydoc": 10})
  client_epochs: int = count(1)
  client_lr: tuple[float, ...] = rates(
    0.05, {"text": 0.3}, search_each=False, argument="learning_rate"
  )
  client_momentum: float = share(0.0)
  prox_mu: float = setting(0.0, low=0)
  client_weights: Literal["examples", "uniform"] = setting("examples")
  clip_norm: tuple[float, ...] | None = setting(each=POOLS, low=1e-6)
  epsilon: float | None = setting(low=1e-3)
  delta: float | None = setting(only="epsilon", low=1e-12, high=0.5)
  server_optimizer: Literal["adam", "yogi", "momentum", "sgd"] = setting("adam")
  server_lr: tuple[float, ...] = rates((0.005, 0.002), {"digits text": 0.01})
  distill_lr: tuple[float, ...] = of_students(
    1e-3, {f"{_CIFAR}, merged": 5e-3}, low=0, search=_RATE
  )
  distill_lr_decay: tuple[float, ...] = of_students(
    0.0, search="log:1e-3:1", argument="final_share", low=0, high=1
  )
  distill_epsilon: float = setting(
    1e-8,
    {f"{_CIFAR} stackoverflow": 1e-5, f"{_CIFAR}, merged": 1e-3},
    only=_STUDENTS,
    low=0,
  )
  distill_steps: int = count(
    200,
    {"stackexchange": 100, "merged npz": 32, "digits": 10, "pydoc": 20},
    only=_STUDENTS,
  )
  distill_batch_size: int = count(
    128,
    {f"{_CIFAR}, merged": 32, "digits stackexchange": 64, "pydoc": 32},
    only=_STUDENTS,
  )
  teacher_temperature: tuple[float, ...] = of_students(
    1.0, low=1e-6, search="log:0.1:10", argument="temperature"
  )
  student_regularization: tuple[float, ...] = of_students(
    0.01, search="log:1e-3:0.5", argument="regularization", low=0, high=1
  )
  student_dropout: bool = setting(True, only=_STUDENTS, argument="dropout")
  label_weight: float = share(0.0, only=_STUDENTS)
  codist_period: int = count(
    200,
    {"digits pydoc": 10, "npz": 20, "stackexchange": 50},
    only="periodic",
  )
  # In every round, as in the paper, models that have not learned much yet
  # hold each other back (BUILD_NOTES.md).
  merge_alpha: tuple[float, ...] = share(
    0.9,
    {
      _CIFAR: 0.95,
      "digits": 0.8,
      "stackoverflow": 0.5,
      "stackexchange pydoc": 0.7,
    },
    only="merged",
    most=2,
    search="linear:0.05:0.95",
    argument="alpha",
  )
  merge_every: int = count(1, {"stackexchange pydoc": 4}, only="merged")
  microbatch: int = setting(
    0,
    {"cpu, images": 16, "own_models": 0},
    kind="speed",
    only=_STUDENTS,
    matters="dropout own_models",
    low=0,
  )

  @property
  def exchange_every(self) -> int:
    """Rounds from one exchange between the pools to the next; 0: none."""
    flag = EXCHANGES.get(self.algorithm)
    return getattr(self, flag) if flag else 0


def main(argv: Sequence[str]) -> None:
  """Runs the algorithms of --algorithm, then prints a table."""
  settings.main(argv, Codist, "codist_run")


if __name__ == "__main__":
  main(sys.argv[1:])
