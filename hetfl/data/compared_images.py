"""Image federations on which methods are compared side by side."""

import json
import os
import pathlib
from typing import NamedTuple

from absl import logging
import numpy as np

from hetfl import checks
from hetfl.data import partition as partition_lib
from hetfl.data import vision
from hetfl.data.errors import reading
from hetfl.data.npz import check_npz, images_of
from hetfl.population import ClientPopulation, positions_in, stratified, Subset
from hetfl.streams import Stream

PARTITIONS = ("dirichlet", "pathological", "iid", "file")


class ComparedImages(NamedTuple):
  """Clients and their examples, in one bank of `x` and `y`.

  Attributes:
    train: K clients' examples for training.
    test: for tests.
    num_classes: C.
    validation: to decide when to stop, or `None`.
    public: the images set aside, without labels; `None` if there are none.
  """

  train: ClientPopulation
  test: ClientPopulation
  num_classes: int
  validation: ClientPopulation | None = None
  public: Subset | None = None

  @property
  def class_counts(self) -> np.ndarray:
    """`int[K, C]`: how many training examples of each class a client holds."""
    y, n = self.train.bank["y"], self.num_classes
    held = [y[self.train.positions(k)] for k in range(len(self.train))]
    return np.stack([np.bincount(labels, minlength=n) for labels in held])


def load_compared_images(
  dataset: str,
  *,
  num_clients: int,
  examples: int | None = None,
  public_examples: int = 0,
  partition: str = "dirichlet",
  partition_alpha: float = 0.1,
  shards_per_client: int = 2,
  partition_file: str | os.PathLike | None = None,
  validation: float = 0.0,
  partition_seed: int = 0,
  data_dir: str | os.PathLike | None = None,
  download: bool = False,
  npz: str | os.PathLike | None = None,
) -> ComparedImages:
  """Divides all images of a data set, and keeps a quarter of each client's.

  The official training and test images are divided together. A quarter of each
  client's, with the same shares of classes, are for tests, at least one.

  Args:
    dataset: see `vision.load`, or `npz`.
    num_clients: K.
    examples: how many images are divided, with the same shares of classes; by
      default all.
    public_examples: how many images are set aside, before others are drawn.
    partition: `dirichlet`, `pathological` (shards of one class each) or `iid`;
      see `hetfl.data.partition`; or `file`.
    partition_alpha: the Dirichlet's concentration: small is skewed.
    shards_per_client: of `pathological`.
    partition_file: of `file`: JSON, a list of each client's positions among the
      images, training images numbered before test images.
    validation: the share of a client's remaining images that it keeps for
      validation, at most nine tenths, at least one image; 0 for none.
    partition_seed: makes the clients.
    data_dir: see `vision.load`.
    download: see `vision.load`.
    npz: a file of your own images, see `hetfl.data.npz.load_npz`.

  Returns:
    The federation.

  Raises:
    DataError: the data is missing or damaged.
    ValueError: an argument is out of its range, or a client has too few images.

  Reference: McMahan et al. 2017 for `pathological`; Tan et al. 2023 (PFLlib)
    for a quarter of all images.

  >>> images = load_compared_images('digits', num_clients=2, partition='iid')
  >>> images.train.sizes, images.test.sizes
  (array([675, 674]), array([224, 224]))
  """
  checks.one_of(PARTITIONS, partition=partition)
  check_npz(npz, [dataset])
  checks.between(0, 0.9, validation=validation)
  checks.counts(**checks.given(examples=examples))
  images = images_of(dataset, data_dir, download, npz)
  if images.clients is not None:
    logging.warning("%s: its clients are not used; see partition_file", npz)
  bank = {n: np.concatenate([images.train[n], images.test[n]]) for n in "xy"}
  if partition == "file" and (examples or public_examples):
    raise ValueError(
      "partition=file: says who has which images; leave out examples, and take"
      " public ones from another data set"
    )
  seed, public = partition_seed, None
  if public_examples:
    most = max(1, len(bank["y"]) - num_clients)  # Clients need some, too.
    checks.whole(1, most, public_examples=public_examples)
    public = _public(bank["x"], public_examples, seed)
    bank = {n: np.delete(a, public.index, axis=0) for n, a in bank.items()}
  if examples is not None:
    checks.whole(1, len(bank["y"]), examples=examples)
    draw = [Stream.EXAMPLES, seed]
    drawn = np.sort(stratified(bank["y"], size=examples, seed=draw))
    bank = {name: array[drawn] for name, array in bank.items()}
  y, draws = bank["y"], dict(num_clients=num_clients, seed=seed)
  if partition == "iid":
    parts = partition_lib.iid(len(y), **draws)
  elif partition == "dirichlet":
    parts = partition_lib.dirichlet(y, alpha=partition_alpha, **draws)
  elif partition == "file":
    parts = _of_file(partition_file, bank, num_clients)
  else:
    (parts,) = partition_lib.shards(
      y, shards_per_client=shards_per_client, **draws
    )
  shares = [(0.25, Stream.OWN_TEST)]
  shares += [(validation, Stream.OWN_VALIDATION)] * bool(validation)
  kept: list[list[np.ndarray]] = [[], [], []]  # Test, validation, training.
  for k, own in enumerate(parts):
    if len(own) <= len(shares):
      raise ValueError(
        f"num_clients={num_clients}: client {k} has {len(own)} of the"
        f" {len(shares) + 1} images it needs, for training, tests"
        f"{' and validation' * bool(validation)}; use fewer clients, a larger"
        " partition_alpha or another partition_seed"
      )
    for held, (share, stream) in zip(kept, shares):
      size = max(1, int(share * len(own)))
      chosen = stratified(y[own], size=size, seed=[stream, seed, k])
      held.append(np.sort(own[chosen]))
      own = np.delete(own, chosen)
    kept[-1].append(np.sort(own))
  test, heldout, train = (
    ClientPopulation.from_lists(bank, lists) for lists in kept
  )
  return ComparedImages(
    train,
    test,
    images.num_classes,
    heldout if validation else None,
    public and public.alone(),
  )


def _of_file(path, bank, num_clients) -> list[np.ndarray]:
  """The positions of each client's images."""
  layout = (
    "want JSON, a list of each client's positions, as [[0, 5, 2], [1, 3]]"
  )
  if path is None:
    raise ValueError(f"partition_file=None: partition=file needs it; {layout}")
  with reading(path, layout):
    held = enumerate(json.loads(pathlib.Path(path).read_text()))
    parts = [positions_in(bank, own, f"client {k}") for k, own in held]
  if len(parts) != num_clients:
    raise ValueError(f"num_clients={num_clients}: {path} has {len(parts)}")
  positions, times = np.unique(np.concatenate(parts), return_counts=True)
  if np.any(times > 1):
    raise ValueError(
      f"partition_file={path}: position {positions[times > 1][0]} is there"
      " twice, and would be a test image and one to train on; give it once"
    )
  return parts


def load_public_images(
  public_dataset: str,
  *,
  public_examples: int,
  image_shape: tuple[int, ...],
  partition_seed: int = 0,
  data_dir: str | os.PathLike | None = None,
  download: bool = False,
) -> Subset:
  """Public images, without labels, from another data set than the clients'.

  Args:
    public_dataset: see `vision.load`.
    public_examples: how many of its training images are drawn.
    image_shape: height, width and channels of the clients' images.
    partition_seed: of the draw.
    data_dir: see `vision.load`.
    download: see `vision.load`.

  Returns:
    The images, in a bank of their own, of `x` alone.

  Raises:
    DataError: the data is missing or damaged.
    ValueError: there are fewer images, or they have another shape.

  >>> load_public_images(
  ...     'digits', public_examples=9, image_shape=(8, 8, 1)).bank['x'].shape
  (9, 8, 8, 1)
  """
  checks.one_of(vision.DATASETS, public_dataset=public_dataset)
  x = vision.load(public_dataset, data_dir, download).train["x"]
  if x.shape[1:] != image_shape:
    raise ValueError(
      f"public_dataset={public_dataset}: its images are {x.shape[1:]}, those of"
      f" the clients {image_shape}; choose another"
    )
  return _public(x, public_examples, partition_seed).alone()


def _public(x: np.ndarray, size: int, seed: int) -> Subset:
  draw = [Stream.PUBLIC_EXAMPLES, seed]
  return Subset.whole({"x": x}).draw(size, seed=draw, name="public_examples")
