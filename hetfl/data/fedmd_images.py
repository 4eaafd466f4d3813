"""FedMD's environments: public images for all, a few private ones per party.

The parties' images depend on `partition_seed`, not on the seed of a run: runs
that differ only in their seed have the same parties.
"""

from collections.abc import Sequence
import dataclasses
import os
from typing import Any

import numpy as np

from hetfl import checks
from hetfl.data import letters, vision
from hetfl.data.errors import DataError
from hetfl.data.npz import check_npz, load_npz
from hetfl.population import Bank, ClientPopulation, stratified, Subset
from hetfl.streams import generator, Stream

ENVIRONMENTS = (
  *("digits", "mnist_letters_iid", "mnist_letters_by_writer"),
  *("cifar_iid", "cifar_noniid", "npz"),
)
_SUBCLASSES = (0, 2, 20, 63, 71, 82)
# The paper's list, and the one that the released code trains on.
SUPERCLASSES = {"paper": (0, 1, 2, 3, 4, 5), "code": (0, 1, 7, 9, 12, 18)}
_DIGITS_PUBLIC = 6  # of digits: 0 to 5 are public, 6 to 9 private


@dataclasses.dataclass(frozen=True)
class FedMDImages:
  """An environment: public data, the parties' private data, and test data.

  Every bank has `x` `uint8[N, H, W, C]` and `y` `int32[N]`. Labels of public
  classes come first, then those of private classes; models have one output per
  class, public or private. `private` and `private_stopping` share one bank
  object.

  Attributes:
    source: where the private images come from, to be recorded with a run.
    num_classes: C, the number of public and private classes.
    image_shape: (height, width, channels).
    public: the public training images.
    public_stopping: public images that nobody trains on; `None` if none are
      held out.
    public_test: the public data set's test images.
    private: the P parties and their images.
    private_stopping: training images of the private classes that no party
      holds; `None` if there are none, or none are held out.
    private_test: test images of the private classes, the task of all parties.
    public_mean: `float32[H, W, C]`, the mean image of the whole public training
      set, in [0, 1]; of `digits`, of the public classes only.
    private_mean: the same for the whole training set from which the private
      images are taken, with all its classes; of `digits`, of the private ones.
  """

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
  heldout_examples: int | None = 0,
  public_examples: int | None = None,
  npz: str | os.PathLike | None = None,
  public_npz: str | os.PathLike | None = None,
  partition_seed: int = 0,
  download: bool = False,
) -> FedMDImages:
  """Loads an environment.

  - `mnist_letters_iid`: public MNIST; private letters a to f, three of each per
    party.
  - `mnist_letters_by_writer`: public MNIST; a party has all letters a to f of
    one writer who wrote 18 or more of them.
  - `cifar_iid`: public CIFAR-10; private images of CIFAR-100's apple, baby,
    chair, porcupine, sea and sunflower, three of each per party.
  - `cifar_noniid`: public CIFAR-10; six private superclasses of CIFAR-100. A
    party has 20 images of one subclass of each, and is tested on all
    subclasses.
  - `digits`: public digits 0 to 5; private digits 6 to 9, three of each per
    party; 16 x 16 pixels. Not in the paper; for trying out, without a download.
  - `npz`: your own private and public images, two files, see
    `hetfl.data.npz.load_npz`. A party has the images of one client of the
    private file, or, if it names none, three of each of its classes.

  Args:
    environment: its name.
    data_dir: the folder of the files, see `hetfl.data.vision` and
      `hetfl.data.letters`.
    num_parties: P.
    examples_per_class: images of each private class per party; by default as
      above.
    min_writer_examples: letters a to f that a writer must have written, all
      six together. 18 is the released code's number; the paper's table 3 has
      "around 20 (varies)" per class and party.
    superclasses: 'paper', for CIFAR-100's 0 to 5, or 'code', for those of the
      released code: 0, 1, 7, 9, 12, 18.
    heldout_examples: images in each stopping set, at most. The public ones, a
      stratified sample, are removed from training. `None` for 200, but no more
      than a fifth of the public images.
    public_examples: how many public training images to keep, a stratified
      sample; by default all.
    npz: the private images of `npz`.
    public_npz: the public ones, of the same shape.
    partition_seed: draws the parties' images and the stopping sets.
    download: download a missing set into `data_dir`, where possible.

  Returns:
    The environment.

  Raises:
    DataError: the data is missing or damaged.
    ValueError: an argument out of its range.

  Reference: Li & Wang 2019, section 3 and table 3; the released code for
  scaling by the mean image and for the choice of writers.

  >>> images = load_fedmd_images('digits', num_parties=5)
  >>> images.num_classes, images.private.sizes.tolist(), images.image_shape
  (10, [12, 12, 12, 12, 12], (16, 16, 1))
  """
  checks.one_of(ENVIRONMENTS, environment=environment)
  checks.one_of(SUPERCLASSES, superclasses=superclasses)
  checks.counts(num_parties=num_parties)
  for argument, path in (("npz", npz), ("public_npz", public_npz)):
    check_npz(path, [environment], of="environment", argument=argument)
  label = "y"
  by_writer = environment == "mnist_letters_by_writer"
  if npz is not None and public_npz is not None:
    public, private = _own(npz, public_npz)
    classes = tuple(range(private.num_classes))
    by_writer, min_writer_examples = private.clients is not None, 1
  elif environment == "digits":
    public, private = _digits()
    classes = tuple(range(public.num_classes, private.num_classes))
  elif environment in ("cifar_iid", "cifar_noniid"):
    public = vision.load("cifar10", data_dir, download)
    private = vision.load("cifar100", data_dir, download)
    classes = _SUBCLASSES
    if environment == "cifar_noniid":
      label, classes = "coarse", SUPERCLASSES[superclasses]
  else:
    public = vision.load("mnist", data_dir, download)
    private = letters.load_letters(data_dir, writers=by_writer)
    classes = tuple(range(6))  # a to f
  train, test = (
    _relabelled(bank, label, classes, public.num_classes)
    for bank in (private.train, private.test)
  )
  draw: dict[str, Any] = dict(num_clients=num_parties, seed=partition_seed)
  draw |= checks.given(examples_per_class=examples_per_class)
  if by_writer and private.clients is not None:
    if examples_per_class is not None:
      raise ValueError(
        f"examples_per_class={examples_per_class}: a party has all images of a"
        " writer, or of a client of clients_train; leave it out"
      )
    writers = private.clients[np.isin(private.train["y"], classes)]
    parts = one_writer(writers, min_examples=min_writer_examples, **draw)
  elif environment == "cifar_noniid":
    parts = one_subclass(train["y"], train["fine"], **draw)
  else:
    parts = equal_classes(train["fine"], **draw)  # Named in errors.

  seed = lambda stream: [stream, partition_seed]
  bank, shared = vision.plain(train), Subset.whole(public.train)
  most = len(shared.index) - 1
  if heldout_examples is None:
    heldout_examples = min(200, len(shared.index) // 5)
  checks.whole(0, most, heldout_examples=heldout_examples)
  shared, public_stopping = _split_off(
    shared, heldout_examples, seed(Stream.PUBLIC_HELDOUT)
  )
  if public_examples is not None:
    checks.whole(1, len(shared.index), public_examples=public_examples)
    of = seed(Stream.PUBLIC_EXAMPLES)
    shared = _split_off(shared, public_examples, of)[1] or shared
  held = np.concatenate(parts)
  free = Subset(bank, np.setdiff1d(Subset.whole(bank).index, held))
  _, private_stopping = _split_off(
    free, min(heldout_examples, len(free.index)), seed(Stream.PRIVATE_HELDOUT)
  )
  return FedMDImages(
    source=private.name,
    num_classes=public.num_classes + len(classes),
    image_shape=bank["x"].shape[1:],
    public=shared,
    public_stopping=public_stopping,
    public_test=Subset.whole(public.test),
    private=ClientPopulation.from_lists(bank, parts),
    private_stopping=private_stopping,
    private_test=Subset.whole(vision.plain(test)),
    public_mean=_mean(public.train),
    private_mean=_mean(private.train),
  )


def equal_classes(
  labels: np.ndarray,
  *,
  num_clients: int,
  examples_per_class: int = 3,
  seed: int,
) -> list[np.ndarray]:
  """Gives each client the same number of examples per class, none twice.

  Args:
    labels: `int[N]`, label of each example, of C classes.
    num_clients: K.
    examples_per_class: examples of each class per client.
    seed: non-negative integer; with the other arguments it fixes the result.

  Returns:
    K arrays `int32[C * examples_per_class]`, class after class.

  Raises:
    ValueError: a class has too few examples, or clients want none.

  Reference: Li & Wang 2019, table 3, and the released code: FedMD's i.i.d.
  environments.

  >>> clients = equal_classes(np.arange(12) % 3, num_clients=2,
  ...                         examples_per_class=2, seed=0)
  >>> [(c % 3).tolist() for c in clients], len(set(np.concatenate(clients)))
  ([[0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2]], 12)
  """
  checks.counts(examples_per_class=examples_per_class)
  rng = generator(Stream.EQUAL_CLASSES, seed)
  parts = []
  for c in np.unique(labels):
    drawn = _drawn(rng, labels == c, c, examples_per_class, num_clients)
    parts.append(np.split(drawn, num_clients))
  return [np.concatenate(own) for own in zip(*parts)]


def _drawn(
  rng, of_class: np.ndarray, label: int, each: int, parties: int
) -> np.ndarray:
  """The positions of some examples of a class, for one or more parties."""
  members = rng.permutation(np.flatnonzero(of_class)).astype(np.int32)
  if len(members) < each * parties:
    raise ValueError(
      f"examples_per_class={each}: {parties} parties want {each * parties} of"
      f" class {label}, which has {len(members)}"
    )
  return members[: each * parties]


def one_writer(
  writers: np.ndarray, *, num_clients: int, min_examples: int, seed: int
) -> list[np.ndarray]:
  """Gives each client all examples by one writer.

  Args:
    writers: `int[N]`, writer of each example.
    num_clients: K.
    min_examples: writers with fewer examples are left out.
    seed: non-negative integer; with the other arguments it fixes the result.

  Returns:
    K arrays `int32[n_k]`, `n_k >= min_examples`, of K writers.

  Raises:
    ValueError: too few writers.

  Reference: Li & Wang 2019, section 3 and table 3, whose "around 20 (varies)"
  is a number per class and party; the released code takes writers of at least
  18 letters a to f, all classes together.

  >>> writers = np.array([5, 5, 6, 5, 7])
  >>> one_writer(writers, num_clients=1, min_examples=2, seed=0)
  [array([0, 1, 3], dtype=int32)]
  """
  able, counts = np.unique(writers, return_counts=True)
  able = able[counts >= min_examples]
  if len(able) < num_clients:
    raise ValueError(
      f"num_parties={num_clients}: only {len(able)} writers have at least"
      f" {min_examples} images; give at most {len(able)}, or a smaller"
      " min_writer_examples"
    )
  rng = generator(Stream.WRITERS, seed)
  chosen = rng.choice(able, num_clients, replace=False)
  return [np.flatnonzero(writers == w).astype(np.int32) for w in chosen]


def one_subclass(
  coarse: np.ndarray,
  fine: np.ndarray,
  *,
  num_clients: int,
  examples_per_class: int = 20,
  seed: int,
) -> list[np.ndarray]:
  """Gives each client one fine class of each coarse class.

  Of the F fine classes of each coarse class, in ascending order, client `k` has
  number `k mod F`. Clients with the same fine class draw from it independently
  and may hold the same examples.

  Args:
    coarse: `int[N]`, coarse label of each example, of C classes.
    fine: `int[N]`, fine label of each example, within its coarse label.
    num_clients: K.
    examples_per_class: examples of each coarse class per client.
    seed: non-negative integer; with the other arguments it fixes the result.

  Returns:
    K arrays `int32[C * examples_per_class]`, class after class.

  Raises:
    ValueError: a fine class has too few examples, or clients want none.

  Reference: Li & Wang 2019, section 3, FedMD's CIFAR non-i.i.d. environment.
  Departure: the released code numbers fine classes in the order of a Python
  set. The order affects only which of them a client combines.

  >>> fine = np.repeat(np.arange(4), 3)
  >>> clients = one_subclass(
  ...     fine // 2, fine, num_clients=3, examples_per_class=2, seed=0)
  >>> [fine[c].tolist() for c in clients]
  [[0, 0, 2, 2], [1, 1, 3, 3], [0, 0, 2, 2]]
  """
  checks.counts(examples_per_class=examples_per_class)
  rng = generator(Stream.SUBCLASSES, seed)
  clients = []
  for k in range(num_clients):
    parts = []
    for c in np.unique(coarse):
      subclasses = np.unique(fine[coarse == c])
      subclass = subclasses[k % len(subclasses)]
      of_class = (coarse == c) & (fine == subclass)
      parts.append(_drawn(rng, of_class, subclass, examples_per_class, 1))
    clients.append(np.concatenate(parts))
  return clients


def _digits() -> tuple[vision.VisionDataset, vision.VisionDataset]:
  """The digits below `_DIGITS_PUBLIC` and the others, with doubled pixels."""
  digits = vision.load_digits()

  def part(bank: Bank, public: bool) -> Bank:
    keep = (bank["y"] < _DIGITS_PUBLIC) == public
    x = bank["x"][keep].repeat(2, axis=1).repeat(2, axis=2)
    return {"x": x, "y": bank["y"][keep]}

  public, private = (
    digits._replace(train=part(digits.train, p), test=part(digits.test, p))
    for p in (True, False)
  )
  return public._replace(num_classes=_DIGITS_PUBLIC), private


def _own(npz, public_npz) -> tuple[vision.VisionDataset, vision.VisionDataset]:
  """A user's public and private images."""
  public, private = load_npz(public_npz), load_npz(npz)
  shapes = [images.train["x"].shape[1:] for images in (public, private)]
  if shapes[0] != shapes[1]:
    raise DataError(
      f"{public_npz}: images of {shapes[0]}, but of {shapes[1]} in {npz}"
    )
  return public, private


def _relabelled(
  bank: Bank, label: str, classes: Sequence[int], first: int
) -> Bank:
  """The examples of some classes, ascending, numbered anew from `first` on."""
  keep = np.isin(bank[label], classes)
  kept = {name: array[keep] for name, array in bank.items()}
  new = first + np.searchsorted(classes, kept[label])
  return {**kept, "y": new.astype(np.int32), "fine": kept["y"]}


def _mean(bank: Bank) -> np.ndarray:
  """The mean image; sums of bytes are exact in float64."""
  mean = bank["x"].sum(axis=0, dtype=np.float64) / len(bank["x"]) / 255
  return mean.astype(np.float32)


def _split_off(
  subset: Subset, size: int, seed: Sequence[int]
) -> tuple[Subset, Subset | None]:
  """The others, and a stratified sample, in their old order."""
  if not size:
    return subset, None
  labels = np.asarray(subset.bank["y"])[subset.index]
  drawn = np.sort(stratified(labels, size=size, seed=seed))
  rest = subset._replace(index=np.delete(subset.index, drawn))
  return rest, subset._replace(index=subset.index[drawn])
