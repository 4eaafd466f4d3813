"""FedMD's environments: public images for all, a few private ones per party.

The parties' images depend on `partition_seed`, not on the seed of a run: runs
that differ only in their seed have the same parties.
"""

from collections.abc import Sequence
import dataclasses
import os

import numpy as np

from hetfl import checks
from hetfl.data import letters, mnist, partition, vision
from hetfl.data.errors import DataError
from hetfl.data.npz import check_npz, image_size, load_npz
from hetfl.population import Bank, ClientPopulation, Subset
from hetfl.streams import generator, Stream

ENVIRONMENTS = (
  "digits",
  "mnist_letters_iid",
  "mnist_letters_by_writer",
  "cifar_iid",
  "cifar_noniid",
  "npz",
)
_PUBLIC_CLASSES = 10
_LETTERS = tuple(range(6))  # a to f
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
  heldout_examples: int = 0,
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
    data_dir: the folder of the files, see `hetfl.data.vision`, `mnist`,
      `letters`.
    num_parties: P.
    examples_per_class: images of each private class per party; by default as
      above.
    min_writer_examples: letters a to f that a writer must have written, all
      six together. 18 is the released code's number; the paper's table 3 has
      "around 20 (varies)" per class and party.
    superclasses: 'paper', for CIFAR-100's 0 to 5, or 'code', for those of the
      released code: 0, 1, 7, 9, 12, 18.
    heldout_examples: images in each stopping set, at most. The public ones, a
      stratified sample, are removed from training.
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
  if environment not in ENVIRONMENTS:
    raise ValueError(
      f"environment={environment}: choose from {', '.join(ENVIRONMENTS)}"
    )
  if superclasses not in SUPERCLASSES:
    raise ValueError(
      f"superclasses={superclasses}: choose from {', '.join(SUPERCLASSES)}"
    )
  per_class = checks.given(examples_per_class=examples_per_class)
  checks.counts(num_parties=num_parties, **per_class)
  if heldout_examples < 0:
    raise ValueError(f"heldout_examples={heldout_examples}: want 0 or more")
  for argument, path in (("npz", npz), ("public_npz", public_npz)):
    check_npz(path, [environment], of="environment", argument=argument)
  if environment == "npz":
    task = _npz(npz, public_npz)
    by_writer = "writer" in task.train
    if by_writer:
      _check_clients(task, npz, num_parties, examples_per_class)
      min_writer_examples = 1
  else:
    load = {"digits": _digits, "cifar_iid": _cifar, "cifar_noniid": _cifar}
    task = load.get(environment, _letters)(
      environment, data_dir, download, superclasses
    )
    by_writer = environment == "mnist_letters_by_writer"
  each = dict(num_clients=num_parties, seed=partition_seed)
  if by_writer:
    parts = one_writer(
      task.train["y"],
      task.train["writer"],
      classes=task.classes,
      min_examples=min_writer_examples,
      **each,
    )
  elif environment == "cifar_noniid":
    parts = one_subclass(
      task.train["y"],
      task.train["fine"],
      classes=task.classes,
      examples_per_class=_or(examples_per_class, 20),
      **each,
    )
  else:
    parts = equal_classes(
      task.train["y"],
      classes=task.classes,
      examples_per_class=_or(examples_per_class, 3),
      **each,
    )
  bank = vision.plain(task.train)
  public, public_stopping = _hold_out(
    Subset.whole(task.public), heldout_examples, partition_seed
  )
  if public_examples is not None:
    public = _some(public, public_examples, partition_seed)
  return FedMDImages(
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
    private_test=Subset.whole(vision.plain(task.test)),
    public_mean=task.public_mean,
    private_mean=task.private_mean,
  )


def equal_classes(
  labels: np.ndarray,
  *,
  classes: Sequence[int],
  num_clients: int,
  examples_per_class: int,
  seed: int,
) -> list[np.ndarray]:
  """Gives each client the same number of examples per class, none twice.

  Args:
    labels: `int[N]`, label of each example.
    classes: the classes to distribute.
    num_clients: K.
    examples_per_class: examples of each class per client.
    seed: non-negative integer; with the other arguments it fixes the result.

  Returns:
    K arrays `int32[len(classes) * examples_per_class]`, class after class.

  Raises:
    ValueError: a class has too few examples, or clients want none.

  Reference: Li & Wang 2019, table 3, and the released code: FedMD's i.i.d.
  environments.

  >>> clients = equal_classes(np.arange(12) % 3, classes=[0, 2],
  ...                         num_clients=2, examples_per_class=2, seed=0)
  >>> [(c % 3).tolist() for c in clients], len(set(np.concatenate(clients)))
  ([[0, 0, 2, 2], [0, 0, 2, 2]], 8)
  """
  checks.counts(examples_per_class=examples_per_class)
  labels = np.asarray(labels)
  rng = generator(Stream.EQUAL_CLASSES, seed)
  clients: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
  for c in classes:
    members = np.flatnonzero(labels == c)
    wanted = num_clients * examples_per_class
    if len(members) < wanted:
      raise ValueError(
        f"examples_per_class={examples_per_class}: {num_clients} parties need"
        f" {wanted} examples of class {c}, but there are only {len(members)};"
        f" at most {len(members) // num_clients} per party"
      )
    drawn = rng.permutation(members)[:wanted]
    for client, part in zip(clients, np.split(drawn, num_clients)):
      client.append(part)
  return [np.concatenate(client).astype(np.int32) for client in clients]


def one_writer(
  labels: np.ndarray,
  writers: np.ndarray,
  *,
  classes: Sequence[int],
  num_clients: int,
  min_examples: int,
  seed: int,
) -> list[np.ndarray]:
  """Gives each client all examples of some classes by one writer.

  Args:
    labels: `int[N]`, label of each example.
    writers: `int[N]`, writer of each example.
    classes: the classes to keep.
    num_clients: K.
    min_examples: writers with fewer examples of those classes, taken
      together, are left out.
    seed: non-negative integer; with the other arguments it fixes the result.

  Returns:
    K arrays `int32[n_k]`, `n_k >= min_examples`, of K writers.

  Raises:
    ValueError: too few writers.

  Reference: Li & Wang 2019, section 3 and table 3, whose "around 20 (varies)"
  is a number per class and party; the released code takes writers of at least
  18 letters a to f, all classes together.

  >>> clients = one_writer(np.array([0, 0, 1, 0, 7]), np.array([5, 5, 5, 6, 6]),
  ...                      classes=[0, 1], num_clients=1, min_examples=2,
  ...                      seed=0)
  >>> clients[0].tolist()
  [0, 1, 2]
  """
  members = np.flatnonzero(np.isin(labels, classes))
  of = np.asarray(writers)[members]
  able, counts = np.unique(of, return_counts=True)
  able = able[counts >= min_examples]
  if len(able) < num_clients:
    raise ValueError(
      f"min_writer_examples={min_examples}: only {len(able)} writers have at"
      f" least this many, but {num_clients} are needed, one per party"
    )
  chosen = generator(Stream.WRITERS, seed).choice(
    able, num_clients, replace=False
  )
  return [members[of == writer].astype(np.int32) for writer in chosen]


def one_subclass(
  coarse: np.ndarray,
  fine: np.ndarray,
  *,
  classes: Sequence[int],
  num_clients: int,
  examples_per_class: int,
  seed: int,
) -> list[np.ndarray]:
  """Gives each client one fine class of each coarse class.

  Of the F fine classes of each coarse class, in ascending order, client `k` has
  number `k mod F`. Clients with the same fine class draw from it independently
  and may hold the same examples.

  Args:
    coarse: `int[N]`, coarse label of each example.
    fine: `int[N]`, fine label of each example, within its coarse label.
    classes: the coarse classes.
    num_clients: K.
    examples_per_class: examples of each coarse class per client.
    seed: non-negative integer; with the other arguments it fixes the result.

  Returns:
    K arrays `int32[len(classes) * examples_per_class]`, class after class.

  Raises:
    ValueError: a fine class has too few examples, or clients want none.

  Reference: Li & Wang 2019, section 3, FedMD's CIFAR non-i.i.d. environment.
  Departure: the released code numbers fine classes in the order of a Python
  set. The order affects only which of them a client combines.

  >>> fine = np.repeat(np.arange(4), 3)
  >>> clients = one_subclass(fine // 2, fine, classes=[0, 1], num_clients=3,
  ...                        examples_per_class=2, seed=0)
  >>> [fine[c].tolist() for c in clients]
  [[0, 0, 2, 2], [1, 1, 3, 3], [0, 0, 2, 2]]
  """
  checks.counts(examples_per_class=examples_per_class)
  coarse, fine = np.asarray(coarse), np.asarray(fine)
  rng = generator(Stream.SUBCLASSES, seed)
  subclasses = {c: np.unique(fine[coarse == c]) for c in classes}
  clients = []
  for k in range(num_clients):
    parts = []
    for c in classes:
      subclass = subclasses[c][k % len(subclasses[c])]
      members = np.flatnonzero((coarse == c) & (fine == subclass))
      if len(members) < examples_per_class:
        raise ValueError(
          f"examples_per_class={examples_per_class}: fine class {subclass} has"
          f" only {len(members)}"
        )
      parts.append(rng.permutation(members)[:examples_per_class])
    clients.append(np.concatenate(parts).astype(np.int32))
  return clients


@dataclasses.dataclass(frozen=True)
class _Task:
  """The data of an environment before it is partitioned."""

  source: str
  num_public: int
  classes: tuple[int, ...]  # labels of the private classes
  public: Bank
  public_test: Bank
  train: Bank  # private images, and what the partitions need to know of them
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
  del superclasses
  public = mnist.load_mnist(data_dir, download)
  by_writer = environment == "mnist_letters_by_writer"
  private = letters.load_letters(data_dir, writers=by_writer)
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


def _npz(npz, public_npz) -> _Task:
  public, private = load_npz(public_npz), load_npz(npz)
  size, public_size = image_size(private.train), image_size(public.train)
  if size != public_size:
    raise DataError(
      f"{public_npz}: images of {public_size}, but of {size} in {npz}; give"
      " both the same shape"
    )
  first = public.num_classes
  train, test = (
    {**bank, "y": bank["y"] + first} for bank in (private.train, private.test)
  )
  if private.clients is not None:
    train["writer"] = np.unique(private.clients, return_inverse=True)[1]
  return _Task(
    source="npz",
    num_public=first,
    classes=tuple(range(first, first + private.num_classes)),
    public=public.train,
    public_test=public.test,
    train=train,
    test=test,
    public_mean=_mean(public.train),
    private_mean=_mean(private.train),
  )


def _check_clients(task, npz, num_parties, examples_per_class) -> None:
  """Checks the arguments against the clients that a file names."""
  if examples_per_class is not None:
    raise ValueError(
      f"examples_per_class={examples_per_class}: {npz} has clients_train, so a"
      " party has all images of a client; leave it out"
    )
  clients = int(task.train["writer"].max()) + 1
  if num_parties > clients:
    raise ValueError(
      f"num_parties={num_parties}: {npz} has the images of {clients} clients,"
      f" one per party; give at most {clients}"
    )


def _new_labels(classes: Sequence[int]) -> tuple[int, ...]:
  return tuple(range(_PUBLIC_CLASSES, _PUBLIC_CLASSES + len(classes)))


def _relabelled(bank: Bank, classes: Sequence[int]) -> Bank:
  """The examples of some classes, with labels that follow the public ones."""
  keep = np.isin(bank["y"], classes)
  kept = {name: array[keep] for name, array in bank.items()}
  new = np.full(max(*classes, int(bank["y"].max())) + 1, -1, np.int32)
  new[list(classes)] = _new_labels(classes)
  return {**kept, "y": new[kept["y"]]}


def _mean(bank: Bank) -> np.ndarray:
  """The mean image; sums of bytes are exact in float64."""
  mean = bank["x"].sum(axis=0, dtype=np.float64) / len(bank["x"]) / 255
  return mean.astype(np.float32)


def _or(value: int | None, default: int) -> int:
  return default if value is None else value


def _hold_out(subset: Subset, size: int, seed: int):
  """Splits a stratified sample off a set."""
  if not size:
    return subset, None
  y = np.asarray(subset.bank["y"])[subset.index]
  if size >= len(y):
    raise ValueError(
      f"heldout_examples={size}: there are {len(y)} public images, want"
      f" 0 to {len(y) - 1}"
    )
  drawn = partition.stratified(y, size=size, seed=[Stream.PUBLIC_HELDOUT, seed])
  held = np.zeros(len(y), bool)
  held[drawn] = True
  return (
    Subset(subset.bank, subset.index[~held]),
    Subset(subset.bank, subset.index[held]),
  )


def _some(subset: Subset, size: int, seed: int) -> Subset:
  y = np.asarray(subset.bank["y"])[subset.index]
  if not 1 <= size <= len(y):
    raise ValueError(
      f"public_examples={size}: there are {len(y)}, want 1 to {len(y)}"
    )
  drawn = partition.stratified(
    y, size=size, seed=[Stream.PUBLIC_EXAMPLES, seed]
  )
  return Subset(subset.bank, subset.index[np.sort(drawn)])


def _left_over(bank, classes, parts, size, seed) -> Subset | None:
  """A stratified sample of private-class images that no party holds."""
  free = np.isin(bank["y"], classes)
  free[np.concatenate(parts)] = False
  free = np.flatnonzero(free).astype(np.int32)
  size = min(size, len(free))
  if not size:
    return None
  drawn = partition.stratified(
    bank["y"][free], size=size, seed=[Stream.PRIVATE_HELDOUT, seed]
  )
  return Subset(bank, free[np.sort(drawn)])
