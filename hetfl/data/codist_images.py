"""The image federations for codistillation.

A federation depends on `partition_seed`, not on the seed of a run: runs that
differ only in their seed have the same clients in the same parts.
"""

import dataclasses
import os
from typing import Any, NamedTuple

import numpy as np

from hetfl import checks
from hetfl.data import fedjax_source, files, partition, vision
from hetfl.data.npz import check_npz, images_of
from hetfl.population import ClientPopulation, Subset
from hetfl.streams import Stream


@dataclasses.dataclass(frozen=True)
class CodistImages:
  """Two pools of clients and the server's data.

  Every bank has `x` `uint8[N, H, W, C]` and `y` `int32[N]`. The pools,
  `heldout` and in-domain `distill` share one bank object.

  Attributes:
    partition: how its clients were made, to be recorded with a run: 'tff',
      'pachinko', 'dirichlet' or 'file'.
    num_classes: number of classes of the pools, of `heldout` and of `test`.
    image_shape: (height, width, channels).
    pools: the small model's clients, which are the whole pool, and the large
      model's, which are the pool's clients with high capacity.
    distill: the server's images. Images from another data set keep its labels,
      which no model here uses.
    heldout: the images of the held-out clients, to choose hyper-parameters.
    test: the data set's own test images.
  """

  partition: str
  num_classes: int
  image_shape: tuple[int, int, int]
  pools: tuple[ClientPopulation, ClientPopulation]
  distill: Subset
  heldout: Subset
  test: Subset


class _Task(NamedTuple):
  """How many clients a data set has, and how many of them each part."""

  num_clients: int
  distill_clients: int
  heldout_clients: int
  high_capacity_clients: int


_TASKS = {
  "digits": _Task(60, 12, 6, 8),
  "cifar10": _Task(500, 135, 50, 47),
  "cifar100": _Task(500, 135, 50, 47),
}
DATASETS = (*_TASKS, "npz")
_OTHERS = {"cifar10": ("cifar100",), "cifar100": ("cifar10",)}
# Concentrations of the Dirichlet over labels; coarse labels for CIFAR-100.
_ALPHA = {"digits": 0.5, "cifar10": 0.5, "cifar100": 0.1, "npz": 0.5}


def load_codist_images(
  dataset: str,
  *,
  data_dir: str | os.PathLike | None = None,
  high_capacity_clients: int | None = None,
  distill_data: str = "in_domain",
  seed: int = 0,
  download: bool = False,
  distill_examples: int | None = None,
  partition_alpha: float | None = None,
  partition_seed: int = 0,
  npz: str | os.PathLike | None = None,
  num_clients: int | None = None,
) -> CodistImages:
  """Two pools of clients over one bank, and the server's data.

  - `cifar100`: 500 clients of 100 images: 315 in the pool, 135 for
    distillation, 50 held out; 47 of the pool have high capacity (the paper has
    31, 47 and 63). The clients are TensorFlow Federated's own if FedJAX's
    `federated_cifar100_train.sqlite` is in `data_dir` or a folder in it, else a
    Pachinko allocation from the same distribution (alpha 0.1, beta 10).
    `federated_cifar100_test.sqlite` there replaces the official test images,
    which are the same.
  - `cifar10`: the same numbers; each client draws its labels from its own
    Dirichlet(0.5) over the 10 classes. Not in the paper.
  - `digits`: 60 clients of different sizes that share 1,437 images by a
    Dirichlet(0.5) for each label: 42 in the pool, 12 for distillation, 6 held
    out; 8 of the pool have high capacity. Not in the paper; for trying out,
    without a download.
  - `npz`: your own images, by `hetfl.data.npz.load_npz`. The clients are those
    of the file or, without `clients_train`, drawn like those of `digits`; of
    100 clients 63 are in the pool, 27 for distillation, 10 held out, and 19 of
    the pool have high capacity.

  Args:
    dataset: 'digits', 'cifar10', 'cifar100' or 'npz'.
    data_dir: the folder of the CIFARs, see `hetfl.data.vision`.
    high_capacity_clients: clients of the pool that train the large model too;
      by default as above. A smaller number takes a subset of the clients of a
      larger one; the other parts do not change.
    distill_data: 'in_domain', for the images of the distillation clients, or
      the other CIFAR's name, for all its 50,000 training images.
    seed: the run's seed. It only draws the images that `distill_examples`
      keeps; a smaller number keeps a subset of the images of a larger one.
    download: download a missing CIFAR into `data_dir`.
    distill_examples: how many distillation images to keep; by default all.
    partition_alpha: concentration of the Dirichlet over labels (coarse ones for
      CIFAR-100), small is skewed; by default as above. Not for TFF's clients
      or those of a file.
    partition_seed: makes the clients (except TFF's and the file's) and assigns
      them to parts.
    npz: the file of `npz`.
    num_clients: the number of clients into which to divide the images of
      `npz`; by default 100, or one for ten images if there are fewer than a
      thousand, or those of the file.

  Returns:
    The pools and the server's data.

  Raises:
    DataError: the data is missing or damaged.
    ValueError: an argument out of its range.

  >>> images = load_codist_images('digits')
  >>> len(images.pools[0]), len(images.pools[1]), images.image_shape
  (42, 8, (8, 8, 1))
  >>> images.pools[1].bank is images.pools[0].bank
  True

  Reference: Lichtarge et al. 2023, appendix C and Tables 1, 3 and 4;
    `distill_examples` as in Figure 4.
  """
  # Arguments are checked first, before minutes of reading.
  checks.one_of(DATASETS, dataset=dataset)
  known = "in_domain", *_OTHERS.get(dataset, ())
  checks.one_of(known, distill_data=distill_data)
  check_npz(npz, [dataset])
  optional = checks.given(
    distill_examples=distill_examples,
    high_capacity_clients=high_capacity_clients,
    num_clients=num_clients,
  )
  checks.counts(**optional)
  load = lambda name: images_of(name, data_dir, download, npz)
  tff = None
  if dataset == "cifar100":
    tff = files.find(data_dir, "federated_cifar100_train.sqlite")
  images = load(dataset) if tff is None else _tff(tff, data_dir, load)
  task = _TASKS.get(dataset) or _own_task(images, num_clients)
  if num_clients not in (None, task.num_clients):
    raise ValueError(
      f"num_clients={num_clients}: {dataset} has {task.num_clients} clients;"
      " leave it out"
    )
  if high_capacity_clients is not None:
    task = task._replace(high_capacity_clients=high_capacity_clients)
  split = partition.codist_split(**task._asdict(), seed=partition_seed)
  bank = vision.plain(images.train)
  if images.clients is None:
    alpha = _ALPHA[dataset] if partition_alpha is None else partition_alpha
    name, parts = _drawn(images, task.num_clients, alpha, partition_seed)
    clients = ClientPopulation.from_lists(bank, parts)
  elif partition_alpha is None:
    name = "file" if dataset == "npz" else "tff"
    clients = ClientPopulation.from_ids(bank, images.clients)
  else:
    raise ValueError(
      f"partition_alpha={partition_alpha}: the file of {dataset} says which"
      " client holds which image; leave it out"
    )
  if distill_data == "in_domain":
    distill = clients.take(split.distill).examples()
  else:
    other = load(distill_data)
    distill = Subset.whole(vision.plain(other.train))
  if distill_examples is not None:
    distill = distill.draw(
      distill_examples,
      seed=[Stream.DISTILL_IMAGES, seed],
      name="distill_examples",
    )
  return CodistImages(
    partition=name,
    num_classes=images.num_classes,
    image_shape=bank["x"].shape[1:],
    pools=(clients.take(split.pool), clients.take(split.high_capacity)),
    distill=distill,
    heldout=clients.take(split.heldout).examples(),
    test=Subset.whole(vision.plain(images.test)),
  )


def _tff(path, data_dir, load) -> vision.VisionDataset:
  """CIFAR-100 with TFF's clients, by their numbers."""
  clients = fedjax_source.load_federated_cifar100(path)
  # The test clients together are the test images of CIFAR-100.
  path = files.find(data_dir, "federated_cifar100_test.sqlite")
  if path is None:
    test = load("cifar100").test
  else:
    test = vision.plain(fedjax_source.load_federated_cifar100(path).bank)
  numbers = np.repeat(np.arange(len(clients)), clients.sizes)
  train = vision.plain(clients.bank)
  return vision.VisionDataset("tff", train, test, 100, numbers)


def _own_task(own: vision.VisionDataset, num_clients: int | None) -> _Task:
  """The parts of a user's clients: CIFAR-100's shares, a larger large pool."""
  clients = num_clients or min(100, len(own.train["y"]) // 10)
  if own.clients is not None:
    clients = len(np.unique(own.clients))
  checks.whole(3, len(own.train["y"]), num_clients=clients)
  distill, heldout = (max(1, round(share * clients)) for share in (0.27, 0.1))
  high = max(1, round(0.3 * (clients - distill - heldout)))
  return _Task(clients, distill, heldout, high)


def _drawn(
  images: vision.VisionDataset, num_clients: int, alpha: float, seed: int
) -> tuple[str, list[np.ndarray]]:
  """The partition's name, and the positions of each client's images."""
  train, y = images.train, images.train["y"]
  draw: dict[str, Any] = dict(num_clients=num_clients, seed=seed, alpha=alpha)
  if images.name in ("digits", "npz"):
    return "dirichlet", partition.dirichlet(y, **draw)
  # With one level of labels Pachinko allocation is a Dirichlet label skew
  # with clients of equal size (Hsu et al. 2019).
  name, coarse = "dirichlet", y
  if "coarse" in train:
    name, coarse = "pachinko", train["coarse"]
  return name, partition.pachinko(coarse, y, examples_per_client=100, **draw)
