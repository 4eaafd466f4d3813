"""FedMD's environments: public images for all, a few private ones a party.

The shares are cut by `partition_seed`, and not by the seed of a run: runs that
differ in their seed have the same parties.
"""

from collections.abc import Sequence
import dataclasses
import os

import numpy as np

from hetfl.data import letters, mnist, partition, vision
from hetfl.population import Bank, ClientPopulation, Subset

ENVIRONMENTS = (
  "digits",
  "mnist_letters_iid",
  "mnist_letters_by_writer",
  "cifar_iid",
  "cifar_noniid",
)
_PUBLIC_CLASSES = 10
_LETTERS = tuple(range(6))  # a to f
_SUBCLASSES = (0, 2, 20, 63, 71, 82)
# The paper's list, and the one that the released code trains on.
SUPERCLASSES = {"paper": (0, 1, 2, 3, 4, 5), "code": (0, 1, 7, 9, 12, 18)}
_DIGITS_PUBLIC = 6  # of digits: 0 to 5 are public, 6 to 9 private


@dataclasses.dataclass(frozen=True)
class FedMDImages:
  """An environment: public data, the parties' own, and where to test.

  Every bank has `x` `uint8[N, H, W, C]` and `y` `int32[N]`. Labels of public
  classes come first, then those of private classes; models have an output for
  each of both. Private sets share one bank object.

  Attributes:
    name: the environment.
    source: where the private images come from, for the record of a run.
    num_classes: C, public and private classes.
    image_shape: (height, width, channels).
    public: the public training images.
    public_stopping: public images that nobody trains on; `None` if none are
      held out.
    public_test: the public data set's test images.
    private: the P parties and their images.
    private_stopping: training images of the private classes that no party
      holds; `None` if there are none, or none are held out.
    private_test: test images of the private classes, all parties' task.
    public_mean: `float32[H, W, C]`, mean of the whole public training set's
      images, in [0, 1].
    private_mean: the same of the whole set that the private images are from,
      all its classes.
  """

  name: str
  source: str
  num_classes: int
  image_shape: tuple[int, int, int]
  public: Subset
  public_stopping: Subset | None
  public_test: Subset
  private: ClientPopulation
  private_stopping: Subset | None
  private_test: Subset
  public_mean: np.ndarray
  private_mean: np.ndarray


def load_fedmd_images(
  environment: str,
  *,
  data_dir: str | os.PathLike | None = None,
  num_parties: int = 10,
  examples_per_class: int | None = None,
  min_writer_examples: int = 18,
  superclasses: str = "paper",
  heldout_examples: int = 0,
  public_examples: int | None = None,
  partition_seed: int = 0,
  download: bool = False,
) -> FedMDImages:
  """Loads an environment.

  - `mnist_letters_iid`: MNIST; letters a to f, three of each a party.
  - `mnist_letters_by_writer`: MNIST; a party has all letters a to f of one
    writer who wrote 18 or more of them.
  - `cifar_iid`: CIFAR-10; CIFAR-100's apple, baby, chair, porcupine, sea and
    sunflower, three of each a party.
  - `cifar_noniid`: CIFAR-10; six superclasses of CIFAR-100, of each of which a
    party has 20 images of one subclass, and is tested on all.
  - `digits`: scikit-learn's 0 to 5, and 6 to 9, three of each a party, at 16 x
    16 pixels. Not in the paper; made for trying out, with no download.

  Args:
    environment: its name.
    data_dir: where the files lie, see `hetfl.data.vision`, `mnist`, `letters`.
    num_parties: P.
    examples_per_class: images of each private class of a party; by default
      as above.
    min_writer_examples: letters a to f that a writer must have written.
    superclasses: 'paper', CIFAR-100's 0 to 5, or 'code', 0, 1, 7, 9, 12, 18,
      those of the released code.
    heldout_examples: images, at most, of each stopping set. Public ones, drawn
      by their shares of labels, are taken out of training.
    public_examples: keep so many public training images, drawn by their
      shares of labels; by default all.
    partition_seed: draws the parties' images and the stopping sets.
    download: download a set that is not there into `data_dir`, where that can
      be done.

  Returns:
    The environment.

  Raises:
    DataError: the data is missing or damaged.
    ValueError: an argument out of its range.

  Reference: Li & Wang 2019, section 3 and table 3; the released code for the
  scaling, by the mean image, and for the writers.

  >>> images = load_fedmd_images('digits', num_parties=5)
  >>> images.num_classes, images.private.sizes.tolist(), images.image_shape
  (10, [12, 12, 12, 12, 12], (16, 16, 1))
  """
  if environment not in ENVIRONMENTS:
    raise ValueError(
      f"--environment={environment}: choose from {', '.join(ENVIRONMENTS)}"
    )
  if superclasses not in SUPERCLASSES:
    raise ValueError(
      f"--superclasses={superclasses}: choose from {', '.join(SUPERCLASSES)}"
    )
  if num_parties < 1:
    raise ValueError(f"--num_parties={num_parties}: want 1 or more")
  if heldout_examples < 0:
    raise ValueError(f"--heldout_examples={heldout_examples}: want 0 or more")
  load = {"digits": _digits, "cifar_iid": _cifar, "cifar_noniid": _cifar}
  task = load.get(environment, _letters)(
    environment, data_dir, download, superclasses
  )
  each = dict(num_clients=num_parties, seed=partition_seed)
  if environment == "mnist_letters_by_writer":
    if "writer" not in task.train:
      raise ValueError(
        f"--environment={environment}: these letters ({task.source}) do not"
        " say who wrote them; get emnist-letters.mat"
      )
    parts = partition.one_writer(
      task.train["y"],
      task.train["writer"],
      classes=task.classes,
      min_examples=min_writer_examples,
      **each,
    )
  elif environment == "cifar_noniid":
    parts = partition.one_subclass(
      task.train["y"],
      task.train["fine"],
      classes=task.classes,
      examples_per_class=_or(examples_per_class, 20),
      **each,
    )
  else:
    parts = partition.equal_classes(
      task.train["y"],
      classes=task.classes,
      examples_per_class=_or(examples_per_class, 3),
      **each,
    )
  bank = _plain(task.train)
  public, public_stopping = _hold_out(
    Subset.whole(task.public), heldout_examples, partition_seed
  )
  if public_examples is not None:
    public = _some(public, public_examples, partition_seed)
  return FedMDImages(
    name=environment,
    source=task.source,
    num_classes=task.num_public + len(task.classes),
    image_shape=bank["x"].shape[1:],
    public=public,
    public_stopping=public_stopping,
    public_test=Subset.whole(task.public_test),
    private=ClientPopulation.from_lists(bank, parts),
    private_stopping=_left_over(
      bank, task.classes, parts, heldout_examples, partition_seed
    ),
    private_test=Subset.whole(_plain(task.test)),
    public_mean=task.public_mean,
    private_mean=task.private_mean,
  )


@dataclasses.dataclass(frozen=True)
class _Task:
  """The data of an environment before it is shared out."""

  source: str
  num_public: int
  classes: tuple[int, ...]  # labels of the private classes
  public: Bank
  public_test: Bank
  train: Bank  # private images and what partitions want to know of them
  test: Bank
  public_mean: np.ndarray
  private_mean: np.ndarray


def _digits(environment, data_dir, download, superclasses) -> _Task:
  del environment, data_dir, download, superclasses
  digits = vision.load_digits()
  banks = {}
  for name, bank in (("train", digits.train), ("test", digits.test)):
    x = bank["x"].repeat(2, axis=1).repeat(2, axis=2)
    public = bank["y"] < _DIGITS_PUBLIC
    for part, keep in (("public", public), ("private", ~public)):
      banks[part, name] = {"x": x[keep], "y": bank["y"][keep]}
  return _Task(
    source="digits",
    num_public=_DIGITS_PUBLIC,
    classes=tuple(range(_DIGITS_PUBLIC, digits.num_classes)),
    public=banks["public", "train"],
    public_test=banks["public", "test"],
    train=banks["private", "train"],
    test=banks["private", "test"],
    public_mean=_mean(banks["public", "train"]),
    private_mean=_mean(banks["private", "train"]),
  )


def _letters(environment, data_dir, download, superclasses) -> _Task:
  del environment, superclasses
  public = mnist.load_mnist(data_dir, download)
  private = letters.load_letters(data_dir)
  return _Task(
    source=private.source,
    num_public=_PUBLIC_CLASSES,
    classes=_new_labels(_LETTERS),
    public=public.train,
    public_test=public.test,
    train=_relabelled(private.train, _LETTERS),
    test=_relabelled(private.test, _LETTERS),
    public_mean=_mean(public.train),
    private_mean=_mean(private.train),
  )


def _cifar(environment, data_dir, download, superclasses) -> _Task:
  public = vision.load_cifar10(data_dir, download)
  private = vision.load_cifar100(data_dir, download)
  train, test = private.train, private.test
  classes = _SUBCLASSES
  if environment == "cifar_noniid":
    classes = SUPERCLASSES[superclasses]
    train, test = (
      {"x": bank["x"], "y": bank["coarse"], "fine": bank["y"]}
      for bank in (train, test)
    )
  return _Task(
    source="cifar100",
    num_public=_PUBLIC_CLASSES,
    classes=_new_labels(classes),
    public=public.train,
    public_test=public.test,
    train=_relabelled(train, classes),
    test=_relabelled(test, classes),
    public_mean=_mean(public.train),
    private_mean=_mean(private.train),
  )


def _new_labels(classes: Sequence[int]) -> tuple[int, ...]:
  return tuple(range(_PUBLIC_CLASSES, _PUBLIC_CLASSES + len(classes)))


def _relabelled(bank: Bank, classes: Sequence[int]) -> Bank:
  """The examples of some classes, which get the labels after the public."""
  keep = np.isin(bank["y"], classes)
  kept = {name: array[keep] for name, array in bank.items()}
  new = np.full(int(bank["y"].max()) + 1, -1, np.int32)
  new[list(classes)] = _new_labels(classes)
  return {**kept, "y": new[kept["y"]]}


def _plain(bank: Bank) -> Bank:
  return {"x": bank["x"], "y": bank["y"]}


def _mean(bank: Bank) -> np.ndarray:
  """The mean image; sums of bytes are exact in float64."""
  mean = bank["x"].sum(axis=0, dtype=np.float64) / len(bank["x"]) / 255
  return mean.astype(np.float32)


def _or(value: int | None, default: int) -> int:
  return default if value is None else value


def _hold_out(subset: Subset, size: int, seed: int):
  """Takes a stratified sample out of a set."""
  if not size:
    return subset, None
  y = subset.bank["y"][subset.index]
  if size >= len(y):
    raise ValueError(
      f"--heldout_examples={size}: there are {len(y)} public images, want"
      f" 0 to {len(y) - 1}"
    )
  drawn = partition.stratified(y, size=size, seed=[21, seed])
  held = np.zeros(len(y), bool)
  held[drawn] = True
  return (
    Subset(subset.bank, subset.index[~held]),
    Subset(subset.bank, subset.index[held]),
  )


def _some(subset: Subset, size: int, seed: int) -> Subset:
  y = subset.bank["y"][subset.index]
  if not 1 <= size <= len(y):
    raise ValueError(
      f"--public_examples={size}: there are {len(y)}, want 1 to {len(y)}"
    )
  drawn = partition.stratified(y, size=size, seed=[22, seed])
  return Subset(subset.bank, subset.index[np.sort(drawn)])


def _left_over(bank, classes, parts, size, seed) -> Subset | None:
  """Images of the private classes that are nobody's, by shares of labels."""
  free = np.isin(bank["y"], classes)
  free[np.concatenate(parts)] = False
  free = np.flatnonzero(free).astype(np.int32)
  size = min(size, len(free))
  if not size:
    return None
  drawn = partition.stratified(bank["y"][free], size=size, seed=[23, seed])
  return Subset(bank, free[np.sort(drawn)])
