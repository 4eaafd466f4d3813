"""Conversion from and to FedJAX's federated data sets.

Only FedJAX's data layer is used, and it is imported when a function here is
called: `fedjax.FederatedData`, in memory or in SQLite files, is an interface
shared with other code; FedJAX's algorithms do not run on current JAX.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import os
import tempfile
from typing import Any

import numpy as np

from hetfl.data import files
from hetfl.data.errors import reading
from hetfl.population import ClientPopulation

_REMEDY = (
  "want a file by FedJAX's SQLiteFederatedDataBuilder, whole; get or write it"
  " again"
)
_CIFAR100_FEATURES = {"image": "x", "label": "y", "coarse_label": "coarse"}


def from_fedjax(
  federated_data: Any,
  features: Sequence[str] | Mapping[str, str] | None = None,
) -> ClientPopulation:
  """Copies a `fedjax.FederatedData` into one bank.

  Clients keep the order in which FedJAX gives them (in memory by sorted id, in
  SQLite as written); their examples lie one after another in the bank. The
  data set's own preprocessing is applied. The arrays are new and writable.
  Clients without examples are left out.

  Args:
    federated_data: a `fedjax.FederatedData`.
    features: names of the features to keep, or `{FedJAX's name: name in the
      bank}`; by default all, under FedJAX's names.

  Returns:
    The population. Ids that are bytes are decoded as UTF-8 (invalid bytes as
    surrogates, so that any id survives `to_fedjax`).

  Raises:
    ValueError: no clients, an unknown feature, clients whose features are of
      different types or shapes, or two clients with the same id.

  >>> import fedjax
  >>> data = fedjax.InMemoryFederatedData({
  ...     b'ann': {'y': np.array([0, 1])}, b'bob': {'y': np.array([2])}})
  >>> population = from_fedjax(data)
  >>> population.ids, population.bank['y'], population.sizes
  (('ann', 'bob'), array([0, 1, 2]), array([2, 1]))
  """
  clients = federated_data.clients()
  return _collect(((k, data.all_examples()) for k, data in clients), features)


def to_fedjax(population: ClientPopulation) -> Any:
  """Copies a population into a `fedjax.InMemoryFederatedData`.

  Args:
    population: K >= 1 clients.

  Returns:
    The data set; client ids are bytes (UTF-8), as in FedJAX, which gives the
    clients in sorted order.

  Raises:
    ValueError: there are no clients.

  >>> population = ClientPopulation.from_lists(
  ...     {'y': np.array([5, 6, 7])}, [[2, 0], [1]], ['ann', 'bob'])
  >>> to_fedjax(population).get_client(b'ann').all_examples()
  {'y': array([7, 5])}
  """
  import fedjax

  if not len(population):
    raise ValueError("population: no clients, FedJAX needs at least one")
  return fedjax.InMemoryFederatedData(dict(_clients(population)))


def write_sqlite(
  population: ClientPopulation,
  path: str | os.PathLike,
  *,
  overwrite: bool = False,
) -> None:
  """Writes a population as a FedJAX SQLite file.

  The file is written atomically. `fedjax.SQLiteFederatedData.new` and
  `read_sqlite` read it.

  Args:
    population: the clients; client ids are written as bytes (UTF-8).
    path: the file to write.
    overwrite: replace an existing file.

  Raises:
    FileExistsError: the file exists and `overwrite` is false.
    FileNotFoundError: the folder to write into does not exist.

  >>> population = ClientPopulation.from_lists(
  ...     {'y': np.array([5, 6, 7])}, [[2, 0], [1]], ['ann', 'bob'])
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   write_sqlite(population, os.path.join(folder, 'a.sqlite'))
  ...   read_sqlite(os.path.join(folder, 'a.sqlite')).bank
  {'y': array([7, 5, 6])}
  """
  import fedjax

  path = os.path.expanduser(os.fspath(path))
  if os.path.exists(path) and not overwrite:
    raise FileExistsError(
      f"{path}: already exists: remove it or pass overwrite=True"
    )
  folder = os.path.dirname(path) or "."
  # In a folder of its own, since SQLite may put a journal beside its file.
  with tempfile.TemporaryDirectory(dir=folder, prefix=".sqlite-") as temporary:
    part = os.path.join(temporary, "part.sqlite")
    with fedjax.SQLiteFederatedDataBuilder(part) as builder:
      builder.add_many(_clients(population))
    os.replace(part, path)


def read_sqlite(
  path: str | os.PathLike,
  features: Sequence[str] | Mapping[str, str] | None = None,
) -> ClientPopulation:
  """Reads a FedJAX SQLite file, whatever program wrote it.

  Args:
    path: the file; it is opened read-only.
    features: as in `from_fedjax`.

  Returns:
    The population; its arrays are new and writable.

  Raises:
    DataError: the file is missing, not a FedJAX SQLite file, or damaged.
    ValueError: an unknown feature.
  """
  from fedjax.core import sqlite_federated_data

  with files.open_sqlite(path, _REMEDY) as connection:
    data = sqlite_federated_data.SQLiteFederatedData(
      connection, sqlite_federated_data.decompress_and_deserialize
    )
    clients = [(k, dataset.all_examples()) for k, dataset in data.clients()]
    sizes = [size for _, size in data.client_sizes()]
    for (client_id, examples), size in zip(clients, sizes, strict=True):
      if {len(array) for array in examples.values()} != {size}:
        raise ValueError(
          f"client {client_id!r} does not have the {size} examples that the "
          "file states"
        )
    if not any(sizes):
      raise ValueError("no examples")
  return _collect(clients, features)


def load_federated_cifar100(path: str | os.PathLike) -> ClientPopulation:
  """TensorFlow Federated's own CIFAR-100 clients, as FedJAX stores them.

  FedJAX makes `federated_cifar100_train.sqlite` (500 clients of 100 images)
  and `federated_cifar100_test.sqlite` (100 of 100) from TFF's archive by
  `fedjax.datasets.cifar100.load_data()`, which needs TensorFlow, and keeps
  them in `~/.cache/fedjax`.

  Args:
    path: one of those files.

  Returns:
    The population; its bank has `x` `uint8[N, 32, 32, 3]`, `y` `int32[N]` in
    0..99 and `coarse` `int32[N]` in 0..19.

  Raises:
    DataError: the file is missing, damaged, or not CIFAR-100.
  """
  with reading(path, "make it with fedjax.datasets.cifar100.load_data()"):
    population = read_sqlite(path, _CIFAR100_FEATURES)
    x = np.asarray(population.bank["x"])
    if x.shape[1:] != (32, 32, 3) or x.dtype != np.uint8:
      raise ValueError(
        f"images are {x.dtype}{[*x.shape[1:]]} and not uint8[32, 32, 3]"
      )
    bank = {"x": x}
    for name, classes in (("y", 100), ("coarse", 20)):
      label = np.asarray(population.bank[name])
      if label.ndim != 1 or label.min() < 0 or label.max() >= classes:
        raise ValueError(f"label {name!r} out of 0..{classes - 1}")
      bank[name] = label.astype(np.int32)
  return dataclasses.replace(population, bank=bank)


def _clients(
  population: ClientPopulation,
) -> Iterator[tuple[bytes, dict[str, np.ndarray]]]:
  for k, client_id in enumerate(population.ids):
    yield (
      client_id.encode("utf-8", "surrogateescape"),
      # FedJAX takes NumPy arrays only, and the bank may be on a device.
      {name: np.asarray(a) for name, a in population.client(k).items()},
    )


def _collect(
  clients: Iterable[tuple[bytes | str, Mapping[str, np.ndarray]]],
  features: Sequence[str] | Mapping[str, str] | None,
) -> ClientPopulation:
  """Puts the examples of clients one after another into new arrays."""
  held = {}
  for client_id, examples in clients:
    if any(len(array) for array in examples.values()):
      if isinstance(client_id, bytes):
        client_id = client_id.decode("utf-8", "surrogateescape")
      client_id = str(client_id)
      if client_id in held:
        raise ValueError(f"federated_data: two clients with id {client_id!r}")
      held[client_id] = examples
  if not held:
    raise ValueError("federated_data: no clients that have examples")
  if not isinstance(features, Mapping):
    names = next(iter(held.values())) if features is None else features
    features = {name: name for name in names}
  bank = {}
  for name, new in features.items():
    for client_id, examples in held.items():
      if name not in examples:
        raise ValueError(
          f"features={list(features)}: client {client_id!r} has"
          f" {sorted(examples)}"
        )
    arrays = [np.asarray(examples[name]) for examples in held.values()]
    kinds = {f"{a.dtype}{[*a.shape[1:]]}": k for k, a in zip(held, arrays)}
    if len(kinds) > 1:  # Joining them would silently convert them all.
      raise ValueError(f"feature {name!r}: of different kinds, such as {kinds}")
    bank[new] = np.concatenate(arrays)
  sizes = [len(next(iter(examples.values()))) for examples in held.values()]
  offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
  members = np.arange(offsets[-1], dtype=np.int32)
  return ClientPopulation(bank, members, offsets, tuple(held))
