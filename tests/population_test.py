"""Who trains on what, from few clients and from very many."""

import functools
import time

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetfl import engine, localize, plan_round, population
from hetfl.batches import gather
from hetfl.engine import packing
from hetfl.plans import plan_clients, plan_distillation
from tests import federation

CLIENTS = 342_477  # Stack Overflow's


@pytest.fixture(scope="module")
def everyone():
  """Clients of 1 to 8 examples, client k's first being its own number."""
  rng = np.random.default_rng(0)
  offsets = np.concatenate([[0], np.cumsum(rng.integers(1, 9, CLIENTS))])
  members = np.arange(offsets[-1], dtype=np.int32)
  return population.ClientPopulation(
    {"y": np.zeros(offsets[-1], np.uint8)},
    members,
    offsets,
    tuple(map(str, range(CLIENTS))),
  )


def plan(clients, round):
  rows = plan_clients(
    clients, seed=0, round=round, clients_per_round=50, batch_size=4
  )
  batches = plan_distillation(
    clients.examples(), seed=0, round=round, steps=32, batch_size=128
  )
  return rows, batches.index[0]


def test_a_plans_time_does_not_grow_with_the_clients(everyone):
  """It is 1.5 times that of 3,000 times fewer; a permutation of all 30."""
  seconds = {everyone: [], everyone.take(range(100)): []}
  for round in range(1, 21):
    for clients, of_clients in seconds.items():
      start = time.perf_counter()
      plan(clients, round)
      of_clients.append(time.perf_counter() - start)
  # The least, since the machine may be busy.
  many, few = map(min, seconds.values())
  assert many < 4 * few


def test_a_plan_takes_clients_examples_and_each_once(everyone):
  rows, batches = plan(everyone, 7)
  chosen = np.unique(rows.client)
  assert len(chosen) == 50
  assert rows.weight.sum() == everyone.sizes[chosen].sum()
  held = np.concatenate([everyone.positions(k) for k in chosen])
  assert set(rows.index[rows.index >= 0]) == set(held)
  # 4,096 of 1.5 million: none twice, from everywhere.
  assert batches.shape == (32, 128) and batches.dtype == np.int32
  assert len(np.unique(batches)) == batches.size
  assert np.histogram(batches, 4, (0, len(everyone.members)))[0].min() > 900
  np.testing.assert_array_equal(plan(everyone, 7)[1], batches)
  assert not np.array_equal(plan(everyone, 8)[1], batches)


def test_some_of_very_many_clients(everyone):
  half = everyone.take(range(1, CLIENTS, 2))
  assert half.ids[:2] == ("1", "3")
  np.testing.assert_array_equal(half.sizes, everyone.sizes[1::2])
  np.testing.assert_array_equal(half.positions(9), everyone.positions(19))


def test_very_many_clients_are_made_in_seconds(everyone):
  lists = np.split(everyone.members, everyone.offsets[1:-1])
  start = time.perf_counter()
  made = population.ClientPopulation.from_lists(everyone.bank, lists)
  some = everyone.take([CLIENTS - 1, *range(1, CLIENTS, 2)])
  assert time.perf_counter() - start < 10  # One by one, half a minute.
  for name in ("members", "offsets", "ids"):
    np.testing.assert_array_equal(getattr(made, name), getattr(everyone, name))
  assert made.members.dtype == some.members.dtype == np.int32
  np.testing.assert_array_equal(some.positions(0), lists[-1])
  np.testing.assert_array_equal(some.positions(7), lists[13])
  for wrong, message in {
    9: "client '2': position 9 is outside",
    0.5: "client '2': positions must be integers",
    True: "client '2': positions must be integers",
  }.items():
    with pytest.raises(ValueError, match=message):
      held = [np.array([0]), np.array([], int), np.array([wrong])]
      population.ClientPopulation.from_lists({"y": np.zeros(9)}, held)
  with pytest.raises(IndexError, match=f"client {CLIENTS} does not exist"):
    everyone.take([0, CLIENTS])


@settings(deadline=None)
@given(
  sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
  batch_size=st.integers(1, 5),
  epochs=st.integers(1, 3),
  max_steps=st.none() | st.integers(1, 4),
  uniform=st.booleans(),
  tail=st.sampled_from(["wrap", "short", "repeat"]),
)
def test_clients_work_and_weights(
  sizes, batch_size, epochs, max_steps, uniform, tail
):
  """A client's examples take turns, in an order that is its own affair."""
  clients = population.ClientPopulation.from_lists(
    {"y": np.arange(sum(sizes))},
    np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]),
  )
  options = dict(batch_size=batch_size, epochs=epochs, max_steps=max_steps)
  options |= dict(uniform_weights=uniform, tail=tail, seed=0, round=1)
  rows = plan_clients(clients, **options)
  first = plan_clients(clients.take([0]), **options).index[0]
  np.testing.assert_array_equal(rows.index[0, : len(first)], first)
  assert rows.client.tolist() == list(range(len(sizes)))
  assert rows.weight.tolist() == [1 if uniform else n for n in sizes]
  for k, n in enumerate(sizes):
    a_pass = -(-n // batch_size)
    steps = epochs * a_pass
    if tail == "wrap":
      steps = -(-n * epochs // batch_size)
    steps = min(steps, max_steps or 10**9)
    assert rows.steps[k] == steps and (rows.index[k, steps:] == -1).all()
    held, batches = clients.positions(k), rows.index[k, :steps]
    seen = np.bincount(batches[batches >= 0], minlength=sum(sizes))
    assert seen.sum() == seen[held].sum()
    lengths = (batches >= 0).sum(1)
    if tail != "short":
      assert (lengths == batch_size).all()
    if tail == "repeat":  # With others.
      apart = min(n, batch_size)
      assert all(len(set(batch)) == apart for batch in batches.tolist())
    if tail != "repeat":
      assert seen[held].max() - seen[held].min() <= 1
    if tail != "wrap":  # Each pass begins with each example once.
      for one in np.split(batches, range(a_pass, steps, a_pass)):
        first = one.ravel()[:n]
        assert len(set(first)) == len(first) and set(first) <= set(held)
    if tail == "short":
      of_pass = [batch_size] * (a_pass - 1) + [n - batch_size * (a_pass - 1)]
      assert lengths.tolist() == (of_pass * epochs)[:steps]


def test_a_round_may_need_nothing_of_a_bank():
  """Such as the distillation set's, where no exchange is due."""
  clients = population.ClientPopulation.from_lists({"y": np.arange(9)}, [[4]])
  public = population.Subset.whole({"y": np.arange(5)})
  share = dict(clients_per_round=1, batch_size=1, distill_batch_size=2)
  sets = {"a": clients, "distill": public}
  plan = plan_round({"a": clients}, public, seed=0, round=1, **share)
  with pytest.raises(ValueError, match="clients: 'distill' is the name"):
    plan_round({"distill": clients}, public, seed=0, round=1, **share)
  distill = plan.batches["distill"]
  none = distill._replace(index=np.full_like(distill.index, -1))
  plan.batches["distill"] = none
  small, data = localize(plan, sets)
  assert (small.batches["distill"].index == -1).all()
  assert len(data["distill"]["y"])
  assert data["a"]["y"][small.batches["a"].index[0, 0, 0]] == 4


@settings(deadline=None)
@given(steps=st.lists(st.integers(1, 99), min_size=1, max_size=12))
def test_no_fewer_lanes_are_enough(steps):
  """Rounds of all clients: one fewer takes a tenth longer than the longest."""
  length = lambda n: max(
    sum(steps[k] for k in lane) for lane in packing.longest_first(steps, n)
  )
  enough = packing.enough_lanes(np.array(steps), len(steps))
  # Sums over sixteen rounds are rounded.
  assert length(enough) <= 1.1 * max(steps) + 1e-9
  assert enough == 1 or length(enough - 1) > 1.1 * max(steps) - 1e-9


def test_no_two_passes_have_one_order():
  """Of clients, pools, rounds, seeds, and of the distillation set."""
  clients = population.ClientPopulation.from_lists(
    {"y": np.arange(40)}, [np.arange(20), np.arange(20, 40)]
  )
  public, orders = population.Subset.whole({"y": np.arange(20)}), []
  for seed, round in ((0, 1), (0, 2), (1, 1)):
    share = dict(seed=seed, round=round, batch_size=20)
    orders += [
      plan_distillation(public, steps=2, **share).index[0],
      *(
        plan_clients(
          clients, pool=pool, clients_per_round=1, epochs=2, **share
        ).index[0, :2]
        % 20
        for pool in (0, 1)
      ),
    ]
  orders = np.concatenate([np.reshape(a, (-1, 20)) for a in orders])
  assert (np.sort(orders) == np.arange(20)).all()
  in_order = np.arange(20)[None]
  assert len(np.unique([*orders, *in_order], axis=0)) == 3 * (2 + 2 * 2) + 1


@pytest.mark.parametrize("devices", [1, 2])
def test_on_tpus_images_lie_one_after_another(devices, monkeypatch):
  """So that no round copies a bank to gather from it."""
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  monkeypatch.setattr(jax, "device_count", lambda: devices)
  draw = np.random.default_rng(0)
  bank = {
    "x": draw.integers(0, 256, (6, 3, 4, 3), dtype=np.uint8),
    "gray": draw.integers(0, 256, (6, 3, 4, 1), dtype=np.uint8),
    "y": np.arange(6),
  }
  (there,) = population.put_banks(population.Subset.whole(bank))
  runner = engine.Inline(federation.mesh(2) if devices > 1 else None)
  seen = {}

  def take(bank, index):
    seen.update(jax.tree.map(lambda a: a.shape, bank))
    return gather(bank, index)

  step = runner.compile(take)
  batch = step(there, np.array([4, 1]))
  for name, array in bank.items():
    np.testing.assert_array_equal(batch[name], array[[4, 1]])
  assert seen["x"] == (6, 3, 4, 3)
  placed = there if devices == 1 else runner._place(there, True)
  order = lambda name: placed[name].format.layout.major_to_minor
  assert order("x") == (0, 3, 1, 2) and order("gray") == (0, 1, 2, 3)
  assert runner.compile(jnp.sum)(placed["x"]) == bank["x"].sum()


def test_who_drops_out_does_not_depend_on_who_is_sampled():
  bank = {"y": np.zeros(40)}
  held = population.ClientPopulation.from_lists
  clients = held(bank, np.arange(40).reshape(20, 2))
  plan = functools.partial(plan_clients, clients, seed=3, batch_size=2)
  gone = []
  for t in range(1, 51):
    everyone = plan(round=t, dropout_rate=0.25)
    some = plan(round=t, dropout_rate=0.25, clients_per_round=5)
    usual = plan(round=t, clients_per_round=5)
    np.testing.assert_array_equal(some.client, usual.client)
    np.testing.assert_array_equal(some.index, usual.index)
    np.testing.assert_array_equal(some.steps, everyone.steps[some.client])
    np.testing.assert_array_equal(everyone.weight, 2 * everyone.steps)
    gone.append(1 - everyone.steps)
  assert np.mean(gone) == pytest.approx(0.25, abs=0.04)  # Three deviations.
  assert np.std(gone, axis=0).min() > 0
  late = dict(late_clients=3, late_round=5)
  present = [plan(round=t, **late).steps.tolist() for t in (4, 5)]
  assert present == [[1] * 17 + [0] * 3, [1] * 20]
