"""Conversion from and to FedJAX's federated data sets.

Only FedJAX's data layer is used, and it is imported when a function here is
called: `fedjax.FederatedData`, in memory or in SQLite files, is an interface
shared with other code; FedJAX's algorithms do not run on current JAX.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import os
import pathlib
import sqlite3
from typing import Any
import zlib

import jax
import numpy as np

from hetfl import checks
from hetfl.data.errors import reading
from hetfl.population import ClientPopulation

_CODING = ("utf-8", "surrogateescape")  # of ids, which may be any bytes
_MAX_BYTES = 1 << 26  # Per client; the largest here have a few million.
_CIFAR100_FEATURES = {"image": "x", "label": "y", "coarse_label": "coarse"}


def from_fedjax(
  federated_data: Any, features: Sequence[str] | Mapping[str, str] | None = None
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
      different shapes, or two clients with the same id.
    TypeError: clients whose features are of different types.

  >>> import fedjax
  >>> data = fedjax.InMemoryFederatedData({
  ...     b'ann': {'y': np.array([0, 1])}, b'bob': {'y': np.array([2])}})
  >>> population = from_fedjax(data)
  >>> population.ids, population.bank['y'], population.sizes
  (('ann', 'bob'), array([0, 1, 2]), array([2, 1]))
  """
  held = [
    (decoded(key), client.all_examples())
    for key, client in federated_data.clients()
    if len(client)
  ]
  if not held:
    raise ValueError("federated_data: no clients that have examples")
  ids, each = zip(*held)
  if not isinstance(features, Mapping):
    features = {name: name for name in features or each[0]}
  if not features.keys() <= each[0].keys():
    raise ValueError(
      f"features={[*features]}: client {ids[0]!r} has {[*each[0]]}"
    )
  bank = {}
  for name, new in features.items():
    with checks.noted(f"joining the feature {name!r} of all clients"):
      arrays = [np.asarray(examples[name]) for examples in each]
      kind = arrays[0].dtype
      bank[new] = np.concatenate(arrays, dtype=kind, casting="no")
  ends = np.cumsum([len(next(iter(examples.values()))) for examples in each])
  parts = np.split(np.arange(ends[-1]), ends[:-1])
  return ClientPopulation.from_lists(bank, parts, ids)


def to_fedjax(population: ClientPopulation) -> Any:
  """Copies a population into a `fedjax.InMemoryFederatedData`.

  Args:
    population: K >= 1 clients.

  Returns:
    The data set; client ids are bytes (UTF-8), as in FedJAX, which gives the
    clients in sorted order.

  >>> population = ClientPopulation.from_lists(
  ...     {'y': np.array([5, 6, 7])}, [[2, 0], [1]], ['ann', 'bob'])
  >>> to_fedjax(population).get_client(b'ann').all_examples()
  {'y': array([7, 5])}
  """
  import fedjax

  return fedjax.InMemoryFederatedData(
    {
      # FedJAX takes NumPy arrays only, and the bank may be on a device.
      name.encode(*_CODING): jax.device_get(population.client(k))
      for k, name in enumerate(population.ids)
    }
  )


def decoded(client_id: Any) -> str:
  """A client's id as text; FedJAX's may be any bytes."""
  if isinstance(client_id, bytes):
    client_id = client_id.decode(*_CODING)
  return str(client_id)


@contextlib.contextmanager
def open_sqlite(path: str | os.PathLike, remedy: str) -> Iterator[Any]:
  """Opens a FedJAX SQLite file to read it.

  Args:
    path: the file.
    remedy: what to do about a bad file, for errors.

  Yields:
    A `fedjax.SQLiteFederatedData`.

  Raises:
    DataError: the file is missing or not SQLite's, or it cannot be read
      within.
  """
  from fedjax.core import sqlite_federated_data as sqlite

  with reading(path, remedy):
    uri = pathlib.Path(path).expanduser().resolve(strict=True).as_uri()
    # FedJAX itself would make a missing file.
    connection = sqlite3.connect(f"{uri}?mode=ro", uri=True)
    with contextlib.closing(connection):
      yield sqlite.SQLiteFederatedData(connection, _examples)


def _examples(data: bytes) -> Any:
  """A client's examples, as FedJAX stores them, unless they are a zip bomb."""
  from fedjax.core import serialization

  stream = zlib.decompressobj()
  content = stream.decompress(data, _MAX_BYTES)
  if not stream.eof:
    raise ValueError(f"a client's data is cut, or beyond {_MAX_BYTES} bytes")
  return serialization.msgpack_deserialize(content)


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
    DataError: the file is missing, not a FedJAX SQLite file, or damaged, or it
      lacks a feature.
  """
  with open_sqlite(path, "want a file by FedJAX's SQLite builder") as data:
    return from_fedjax(data, features)


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
  remedy = "make it with fedjax.datasets.cifar100.load_data()"
  with open_sqlite(path, remedy) as data:
    population = from_fedjax(data, _CIFAR100_FEATURES)
    x, held = population.bank["x"], dict(population.bank)
    if x.shape[1:] != (32, 32, 3) or x.dtype != np.uint8:
      raise ValueError(
        f"images {x.dtype}{[*x.shape[1:]]}, want uint8[32, 32, 3]"
      )
    for name, classes in (("y", 100), ("coarse", 20)):
      labels = held[name]
      if labels.dtype.kind not in "iu" or np.any(labels // classes):
        raise ValueError(f"{name} is not of whole numbers 0 to {classes - 1}")
      held[name] = labels.astype(np.int32)
  return dataclasses.replace(population, bank=held)
