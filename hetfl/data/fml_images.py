"""The image federations for Federated Mutual Learning.

A federation depends on `partition_seed`, not on the seed of a run: runs that
differ only in their seed have the same clients.
"""

from collections.abc import Sequence
import os
from typing import NamedTuple

from absl import logging
import numpy as np

from hetfl import checks
from hetfl.data import partition as partition_lib
from hetfl.data import vision
from hetfl.data.npz import check_npz, images_of
from hetfl.population import ClientPopulation, Subset
from hetfl.streams import generator, Stream

# The default concentration of `dirichlet`.
DIRICHLET_ALPHA = 0.5
PARTITIONS = ("iid", "noniid1", "noniid2", "noniid3", "dirichlet", "file")
# Shards per client, as a share of the classes: 6, 4 and 2 of 10.
_SHARDS = {"noniid1": 0.6, "noniid2": 0.4, "noniid3": 0.2}
DATASETS = (*vision.DATASETS, "npz")


class ClientData(NamedTuple):
  """What one client holds.

  Attributes:
    dataset: the name of its data set.
    train: its private training examples.
    heldout: private training examples that it does not train on, to choose
      hyper-parameters; empty by default.
    validation: its private validation examples, a part of the test images with
      the same pattern of classes as its training examples.
  """

  dataset: str
  train: Subset
  heldout: Subset
  validation: Subset


class FmlImages(NamedTuple):
  """The clients and the data sets they share.

  Banks have `x` `uint8[N, H, W, C]` and `y` `int32[N]`; clients of one data
  set share one bank object.

  Attributes:
    clients: K clients.
    test: for each data set, all its test images.
    num_classes: for each data set, its number of classes.
    image_shape: (height, width, channels), the same for all.
  """

  clients: tuple[ClientData, ...]
  test: dict[str, Subset]
  num_classes: dict[str, int]
  image_shape: tuple[int, int, int]

  @property
  def sets(self) -> list[Subset]:
    """All subsets, for `files.record`."""
    held = [subset for c in self.clients for subset in c[1:]]
    return [*held, *self.test.values()]


def load_fml_images(
  datasets: Sequence[str],
  *,
  num_clients: int = 5,
  partition: str = "iid",
  data_dir: str | os.PathLike | None = None,
  partition_alpha: float = DIRICHLET_ALPHA,
  partition_seed: int = 0,
  bad_clients: Sequence[int] = (),
  bad_label_share: float = 1.0,
  heldout_examples: int = 0,
  download: bool = False,
  npz: str | os.PathLike | None = None,
) -> FmlImages:
  """Divides the images of one or more data sets among clients.

  All training images are divided, and in the same pattern the test images,
  which become the clients' validation examples; all test images together test
  the global model.

  - `iid`: shuffled and dealt out evenly.
  - `noniid1`, `noniid2`, `noniid3`: 6, 4, 2 shards per client, each of one
    class (60, 40, 20 for CIFAR-100); see `hetfl.data.partition.shards`.
  - `dirichlet`, not in the paper: a Dirichlet divides each class, so clients
    are of different sizes; see `hetfl.data.partition.dirichlet`.
  - `file`, for `npz`: the clients of the file; the test images are divided in
    the pattern of their classes.

  Args:
    datasets: one data set, or one for each client; clients of the same one
      share it. `npz` is the file of that argument.
    num_clients: K.
    partition: one of the above.
    data_dir: the folder of the data sets, see `hetfl.data.vision`.
    partition_alpha: the Dirichlet's concentration: small is skewed.
    partition_seed: makes the clients.
    bad_clients: the numbers of clients with wrong training labels.
    bad_label_share: the share of their labels that are replaced by classes
      drawn uniformly.
    heldout_examples: how many training examples of all clients together are
      held out, equally many per client; the paper has none.
    download: download a missing data set into `data_dir`.
    npz: a file of your own images, see `hetfl.data.npz.load_npz`.

  Returns:
    The federation.

  Raises:
    DataError: the data is missing or damaged.
    ValueError: an argument out of its range.

  >>> images = load_fml_images(['digits'], partition='noniid3')
  >>> [len(np.unique(c.train.bank['y'][c.train.index])) for c in images.clients]
  [2, 2, 2, 2, 2]
  >>> sum(len(c.validation.index) for c in images.clients)
  360

  Reference: Shen et al. 2020, section 5.1. The released code makes the
    clients' validation parts and then overwrites them with the whole test set;
    here the parts are kept, as in the paper's text.
  """
  for dataset in datasets:
    checks.one_of(DATASETS, datasets=dataset)
  checks.one_of(PARTITIONS, partition=partition)
  check_npz(npz, datasets)
  checks.between(0, 1, bad_label_share=bad_label_share)
  checks.counts(num_clients=num_clients)
  for k in bad_clients:
    checks.whole(0, num_clients - 1, bad_clients=k)
  if len(datasets) not in (1, num_clients):
    raise ValueError(
      f"datasets={','.join(datasets)}: {len(datasets)} data sets for"
      f" {num_clients} clients; give one, or one for each client"
    )
  kept, rest = divmod(heldout_examples, num_clients)
  if kept < 0 or rest:
    raise ValueError(
      f"heldout_examples={heldout_examples}: give 0 or a multiple of the"
      f" {num_clients} clients"
    )
  of = list(datasets) * (num_clients if len(datasets) == 1 else 1)
  clients: dict[int, ClientData] = {}
  test, num_classes, shapes = {}, {}, {}
  for dataset in dict.fromkeys(of):
    images = images_of(dataset, data_dir, download, npz)
    if images.clients is not None and partition != "file":
      logging.warning("%s: its clients are for partition=file only", npz)
    members = [k for k in range(num_clients) if of[k] == dataset]
    draw = dict(num_clients=len(members), seed=partition_seed)
    parts = _parts(images, partition, partition_alpha, draw)
    bank = {"x": images.train["x"], "y": images.train["y"].copy()}
    test[dataset] = Subset.whole(vision.plain(images.test))
    num_classes[dataset] = images.num_classes
    shapes[dataset] = bank["x"].shape[1:]
    for k, held, validation in zip(members, *parts):
      if kept >= len(held):
        raise ValueError(
          f"heldout_examples={heldout_examples}: client {k} has only"
          f" {len(held)} training images"
        )
      rng = generator(Stream.HELDOUT_IMAGES, partition_seed, k)
      order = rng.permutation(len(held))
      heldout, train = held[order[:kept]], held[np.sort(order[kept:])]
      if k in bad_clients:
        rng = generator(Stream.BAD_LABELS, partition_seed, k)
        wrong = train[rng.random(len(train)) < bad_label_share]
        bank["y"][wrong] = rng.integers(0, images.num_classes, len(wrong))
      clients[k] = ClientData(
        dataset,
        Subset(bank, train),
        Subset(bank, heldout),
        Subset(test[dataset].bank, validation),
      )
  if len(set(shapes.values())) > 1:
    raise ValueError(
      f"datasets={','.join(datasets)}: one global model cannot see images of"
      f" different shapes {shapes}"
    )
  in_order = tuple(clients[k] for k in range(num_clients))
  return FmlImages(in_order, test, num_classes, shapes[of[0]])


def _parts(
  images: vision.VisionDataset, split: str, alpha: float, draw: dict[str, int]
) -> list[list[np.ndarray]]:
  """Each client's training and validation positions."""
  labels = [images.train["y"], images.test["y"]]
  if split == "iid":
    return [partition_lib.iid(len(y), **draw) for y in labels]
  if split in _SHARDS:
    shards = round(_SHARDS[split] * images.num_classes)
    return partition_lib.shards(*labels, shards_per_client=shards, **draw)
  if split == "dirichlet":
    train = partition_lib.dirichlet(labels[0], alpha=alpha, **draw)
  elif images.clients is None:
    raise ValueError(
      f"partition=file: {images.name} has no clients; choose another partition"
      " or, for npz, add clients_train"
    )
  else:
    held = ClientPopulation.from_ids(images.train, images.clients).subsets()
    wanted, clients = draw["num_clients"], len(held)
    if clients != wanted:
      raise ValueError(
        f"num_clients={wanted}: partition=file takes all clients of the file;"
        f" give num_clients={clients}"
      )
    train = [subset.index for subset in held]
  return [train, partition_lib.matching(train, *labels, seed=draw["seed"])]
