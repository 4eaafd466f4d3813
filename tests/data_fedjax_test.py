import os
import sqlite3

import numpy as np
import pytest

from hetfl.data import DataError, fedjax_source
from hetfl.population import ClientPopulation

fedjax = pytest.importorskip("fedjax")


def _population(n=12):
  rng = np.random.default_rng(0)
  bank = {
    "x": rng.integers(0, 256, (n, 4, 4, 3), dtype=np.uint8),
    "y": rng.integers(0, 5, n).astype(np.int32),
  }
  order = rng.permutation(n)
  return ClientPopulation.from_lists(
    bank, [order[:5], order[5:6], order[6:]], ["zoë", "ann", "bob"]
  )


def _write(population, path):
  with fedjax.SQLiteFederatedDataBuilder(str(path)) as builder:
    data = fedjax_source.to_fedjax(population)
    builder.add_many((k, client.all_examples()) for k, client in data.clients())


def _assert_same_clients(a, b):
  assert set(a.ids) == set(b.ids)
  for k, client_id in enumerate(a.ids):
    ours, theirs = a.client(k), b.client(b.ids.index(client_id))
    assert set(ours) == set(theirs)
    for name, array in ours.items():
      assert array.dtype == theirs[name].dtype
      np.testing.assert_array_equal(array, theirs[name])


def test_round_trip_in_memory():
  population = _population()
  data = fedjax_source.to_fedjax(population)
  assert isinstance(data, fedjax.FederatedData)
  # FedJAX's order is sorted by bytes.
  assert list(data.client_ids()) == [b"ann", b"bob", "zoë".encode()]
  back = fedjax_source.from_fedjax(data)
  assert back.ids == ("ann", "bob", "zoë")
  _assert_same_clients(population, back)
  # Copies: changing them does not change the originals.
  back.bank["x"][:] = 0
  _assert_same_clients(
    population, fedjax_source.from_fedjax(fedjax_source.to_fedjax(population))
  )


def test_round_trip_through_sqlite(tmp_path):
  population = _population()
  path = tmp_path / "a b#c?.sqlite"  # characters that mean something in a URI
  _write(population, path)
  back = fedjax_source.read_sqlite(path)
  assert os.listdir(tmp_path) == [path.name]
  assert back.ids == ("ann", "bob", "zoë")  # as written
  _assert_same_clients(population, back)
  # FedJAX's own arrays are read-only.
  data = fedjax.SQLiteFederatedData.new(str(path))
  assert not data.get_client(b"ann").all_examples()["x"].flags.writeable
  assert all(a.flags.writeable for a in back.bank.values())


def test_ids_that_are_str_or_any_bytes(tmp_path):
  ids = ["as str", b"as bytes", b"\xff\x00"]
  path = str(tmp_path / "ids.sqlite")
  with fedjax.SQLiteFederatedDataBuilder(path) as builder:
    builder.add_many((i, {"y": np.arange(k + 1)}) for k, i in enumerate(ids))
  population = fedjax_source.read_sqlite(path)
  assert population.ids[:2] == ("as str", "as bytes")
  assert population.sizes.tolist() == [1, 2, 3]
  back = list(fedjax_source.to_fedjax(population).client_ids())
  assert set(back) == {b"as str", b"as bytes", b"\xff\x00"}


def test_features_are_chosen_and_renamed():
  data = fedjax_source.to_fedjax(_population())
  assert set(fedjax_source.from_fedjax(data, ["y"]).bank) == {"y"}
  assert set(fedjax_source.from_fedjax(data, {"x": "image"}).bank) == {"image"}
  with pytest.raises(ValueError, match=r"\['z'\].*\['x', 'y'\]"):
    fedjax_source.from_fedjax(data, ["z"])


def test_unlike_clients_are_refused():
  def load(second):
    return fedjax_source.from_fedjax(
      fedjax.InMemoryFederatedData(
        {
          b"a": {"x": np.zeros((2, 3), np.uint8)},
          b"b": {"x": second},
        }
      )
    )

  assert load(np.zeros((1, 3), np.uint8)).sizes.tolist() == [2, 1]
  with pytest.raises(TypeError, match="float32.* to .*uint8") as info:
    load(np.zeros((1, 3), np.float32))
  assert info.value.__notes__ == ["joining the feature 'x' of all clients"]
  with pytest.raises(ValueError, match="size 3 and .* size 4"):
    load(np.zeros((1, 4), np.uint8))
  with pytest.raises(ValueError, match="no clients that have examples"):
    fedjax_source.from_fedjax(
      fedjax.InMemoryFederatedData({b"a": {"x": np.zeros(0)}})
    )


def test_clients_without_examples_are_left_out(tmp_path):
  path = str(tmp_path / "p.sqlite")
  with fedjax.SQLiteFederatedDataBuilder(path) as builder:
    builder.add_many((b"%d" % n, {"y": np.arange(n)}) for n in (0, 2))
  assert fedjax_source.read_sqlite(path).ids == ("2",)


def _error(path, read=fedjax_source.read_sqlite):
  with pytest.raises(DataError) as info:
    read(path)
  message = str(info.value)
  assert "\n" not in message and str(path) in message
  return message


def test_read_refuses_what_is_no_fedjax_sqlite(tmp_path):
  path = tmp_path / "p.sqlite"
  assert "no such file" in _error(path)
  assert not path.exists()  # FedJAX would have made it
  path.write_bytes(b"")
  assert "no such table: federated_data" in _error(path)
  path.unlink()
  with sqlite3.connect(path) as connection:
    connection.execute("CREATE TABLE examples (split_name TEXT)")
  connection.close()
  assert "no such table: federated_data" in _error(path)


def test_read_refuses_damage(tmp_path):
  path = tmp_path / "p.sqlite"
  _write(_population(2000), path)
  good = path.read_bytes()
  for size in (100, 4096, len(good) // 2, len(good) - 4096):
    path.write_bytes(good[:size])
    _error(path)
  for at in range(9000, len(good), len(good) // 7):  # in the clients' pages
    if not any(good[at : at + 64]):  # the unused end of a page
      continue
    path.write_bytes(good[:at] + bytes(64) + good[at + 64 :])
    assert "cannot be read" in _error(path)


def _write_cifar100(path, clients=3, **changes):
  rng = np.random.default_rng(0)
  with fedjax.SQLiteFederatedDataBuilder(str(path)) as builder:
    # As fedjax.datasets.cifar100 stores them: str ids, int64 labels.
    builder.add_many(
      (
        str(k),
        {
          "coarse_label": rng.integers(0, 20, 5),
          "image": rng.integers(0, 256, (5, 32, 32, 3), dtype=np.uint8),
          "label": rng.integers(0, 100, 5),
        }
        | changes,
      )
      for k in range(clients)
    )


def test_federated_cifar100(tmp_path):
  path = tmp_path / "federated_cifar100_train.sqlite"
  _write_cifar100(path)
  population = fedjax_source.load_federated_cifar100(path)
  assert {n: (a.dtype.name, a.shape) for n, a in population.bank.items()} == {
    "x": ("uint8", (15, 32, 32, 3)),
    "y": ("int32", (15,)),
    "coarse": ("int32", (15,)),
  }
  assert population.sizes.tolist() == [5, 5, 5]
  missing = tmp_path / "federated_cifar100_test.sqlite"
  with pytest.raises(DataError, match="federated_cifar100_test.sqlite: no"):
    fedjax_source.load_federated_cifar100(missing)


def test_federated_cifar100_refuses_other_data(tmp_path):
  path = tmp_path / "a.sqlite"
  _write_cifar100(path, image=np.zeros((5, 24, 24, 3), np.uint8))
  message = _error(path, fedjax_source.load_federated_cifar100)
  assert "images uint8[24, 24, 3]" in message
  for change, wrong in (
    ({"image": np.zeros((5, 32, 32, 3), np.float32)}, "images float32[32"),
    ({"label": np.array([0, 100, 0, 0, 0])}, "y is not of whole numbers 0 to"),
    ({"label": np.array([0, -1, 0, 0, 0])}, "y is not of whole numbers 0 to"),
    ({"coarse_label": np.full(5, 0.5)}, "coarse is not of whole numbers"),
  ):
    path.unlink()
    _write_cifar100(path, **change)
    message = _error(path, fedjax_source.load_federated_cifar100)
    assert wrong in message
  path.unlink()
  _write(_population(), path)
  message = _error(path, fedjax_source.load_federated_cifar100)
  assert "make it with fedjax.datasets.cifar100" in message
