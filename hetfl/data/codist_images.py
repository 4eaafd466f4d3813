"""The image federations for codistillation.

A federation depends on `partition_seed`, not on the seed of a run: runs that
differ only in their seed have the same clients in the same parts.
"""

import dataclasses
import os

import numpy as np

from hetfl import checks
from hetfl.data import fedjax_source, files, partition, vision
from hetfl.data.errors import DataError, one_of
from hetfl.data.npz import check_npz, load_npz
from hetfl.population import AnyBank, ClientPopulation, Subset
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


@dataclasses.dataclass(frozen=True)
class _Task:
  """How many clients of a data set are in each part."""

  clients: int
  distill_clients: int
  heldout_clients: int
  high_capacity_clients: int
  distill_data: tuple[str, ...]


_TASKS = {
  "digits": _Task(60, 12, 6, 8, ("in_domain",)),
  "cifar10": _Task(500, 135, 50, 47, ("in_domain", "cifar100")),
  "cifar100": _Task(500, 135, 50, 47, ("in_domain", "cifar10")),
}
DATASETS = (*_TASKS, "npz")
_EXAMPLES_PER_CLIENT = 100  # of the CIFARs
# Concentrations of the Dirichlet over labels; coarse labels for CIFAR-100.
_ALPHA = {"digits": 0.5, "cifar10": 0.5, "cifar100": 0.1, "npz": 0.5}
_NPZ_CLIENTS = 100


def _npz_task(clients: int) -> _Task:
  """The parts of one's own clients: CIFAR-100's shares, a larger large pool."""
  distill, heldout = (max(1, round(share * clients)) for share in (0.27, 0.1))
  high = max(1, round(0.3 * (clients - distill - heldout)))
  return _Task(clients, distill, heldout, high, ("in_domain",))


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
      thousand. Not if the file has clients.

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
  one_of(DATASETS, dataset=dataset)
  check_npz(npz, [dataset])
  own = None if npz is None else load_npz(npz)
  if own is not None:
    task = _npz_task(_number_of_own(own, npz, num_clients))
  elif num_clients is not None:
    raise ValueError(
      f"num_clients={num_clients}: {dataset} has {_TASKS[dataset].clients}"
    )
  else:
    task = _TASKS[dataset]
  # Arguments are checked first, before minutes of reading.
  one_of(task.distill_data, distill_data=distill_data)
  checks.counts(**checks.given(distill_examples=distill_examples))
  if high_capacity_clients is None:
    high_capacity_clients = task.high_capacity_clients
  checks.counts(high_capacity_clients=high_capacity_clients)
  split = partition.codist_split(
    task.clients,
    seed=partition_seed,
    distill_clients=task.distill_clients,
    heldout_clients=task.heldout_clients,
    high_capacity_clients=high_capacity_clients,
  )
  tff = None
  if dataset == "cifar100":
    tff = files.find(data_dir, "federated_cifar100_train.sqlite")
  if partition_alpha is not None and (tff or (own and own.clients is not None)):
    raise ValueError(
      f"partition_alpha={partition_alpha}: {tff or npz} says which client holds"
      " which image; leave partition_alpha out, or use data without clients"
    )

  if tff is not None:
    name, num_classes = "tff", 100
    clients, test = _tff(tff, task, data_dir, download)
  else:
    images = own or vision.load(dataset, data_dir, download)
    num_classes, test = images.num_classes, images.test
    alpha = _ALPHA[dataset] if partition_alpha is None else partition_alpha
    name, clients = _clients(images, task.clients, alpha, partition_seed)
  bank = vision.plain(clients.bank)
  clients = dataclasses.replace(clients, bank=bank)
  if distill_data == "in_domain":
    distill = clients.take(split.distill).examples()
  else:
    other = vision.load(distill_data, data_dir, download)
    distill = Subset.whole(vision.plain(other.train))
  if distill_examples is not None:
    distill = distill.draw(
      distill_examples,
      seed=[Stream.DISTILL_IMAGES, seed],
      name="distill_examples",
    )
  return CodistImages(
    partition=name,
    num_classes=num_classes,
    image_shape=bank["x"].shape[1:],
    pools=(clients.take(split.pool), clients.take(split.high_capacity)),
    distill=distill,
    heldout=clients.take(split.heldout).examples(),
    test=Subset.whole(vision.plain(test)),
  )


def _number_of_own(
  own: vision.VisionDataset, path: str | os.PathLike | None, given: int | None
) -> int:
  """How many clients a file of one's own images has, or is to have."""
  images = len(own.train["y"])
  number = min(_NPZ_CLIENTS, images // 10) if given is None else given
  if own.clients is not None:
    number = len(np.unique(own.clients))
    if given is not None:
      raise ValueError(
        f"num_clients={given}: {path} has clients of its own; leave it out"
      )
  if number < 3:
    raise ValueError(
      f"num_clients={number}, for the {images} training images of {path}: want"
      " 3 or more, for the pool, for distillation and to be held out"
    )
  return number


def _tff(
  path: str, task: _Task, data_dir: str | os.PathLike | None, download: bool
) -> tuple[ClientPopulation, AnyBank]:
  """TFF's clients of CIFAR-100, and the test images."""
  clients = fedjax_source.load_federated_cifar100(path)
  sizes = set(clients.sizes.tolist())
  if len(clients) != task.clients or sizes != {_EXAMPLES_PER_CLIENT}:
    raise DataError(
      f"{path}: {len(clients)} clients of {sorted(sizes)} images, want "
      f"{task.clients} of {_EXAMPLES_PER_CLIENT}: make it again with "
      "fedjax.datasets.cifar100.load_data()"
    )
  # The test clients together are the test images of CIFAR-100.
  test = files.find(data_dir, "federated_cifar100_test.sqlite")
  if test is not None:
    return clients, fedjax_source.load_federated_cifar100(test).bank
  return clients, vision.load("cifar100", data_dir, download).test


def _clients(
  images: vision.VisionDataset, num_clients: int, alpha: float, seed: int
) -> tuple[str, ClientPopulation]:
  """The partition's name, and its clients: the file's own, or drawn ones."""
  if images.clients is not None:
    return "file", ClientPopulation.from_ids(images.train, images.clients)
  name, y = "dirichlet", images.train["y"]
  if images.name in ("digits", "npz"):
    parts = partition.dirichlet(
      y, num_clients=num_clients, seed=seed, alpha=alpha
    )
  else:
    # With one level of labels Pachinko allocation is a Dirichlet label skew
    # with clients of equal size (Hsu et al. 2019).
    name = "pachinko" if "coarse" in images.train else "dirichlet"
    parts = partition.pachinko(
      images.train.get("coarse", y),
      y,
      num_clients=num_clients,
      examples_per_client=_EXAMPLES_PER_CLIENT,
      seed=seed,
      alpha=alpha,
    )
  return name, ClientPopulation.from_lists(images.train, parts)
