"""Who trains on what, from few clients and from very many."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetfl import core, engine, planning, population
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
  lanes = planning.plan_clients(
    clients,
    seed=0,
    round=round,
    clients_per_round=50,
    batch_size=4,
    num_lanes=4,
  )
  batches = planning.plan_distillation(
    clients.examples(), seed=0, round=round, steps=32, batch_size=128
  )
  return lanes, batches


def test_a_round_is_planned_in_milliseconds(everyone):
  seconds = []
  for round in range(1, 21):
    start = time.perf_counter()
    plan(everyone, round)
    seconds.append(time.perf_counter() - start)
  assert min(seconds) < 0.005  # The least, since the machine may be busy.


def test_a_plan_takes_clients_examples_and_each_once(everyone):
  lanes, batches = plan(everyone, 7)
  chosen = np.unique(lanes.client[lanes.weight > 0])
  assert len(chosen) == 50
  assert lanes.weight.sum() == everyone.sizes[chosen].sum()
  held = np.concatenate([everyone.positions(k) for k in chosen])
  assert set(lanes.index[lanes.index >= 0]) == set(held)
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


@settings(deadline=None)
@given(
  sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
  batch_size=st.integers(1, 5),
  epochs=st.integers(1, 3),
  max_steps=st.none() | st.integers(1, 4),
  uniform=st.booleans(),
  full=st.booleans(),
  num_lanes=st.integers(1, 4),
)
def test_clients_work_and_weights(
  sizes, batch_size, epochs, max_steps, uniform, full, num_lanes
):
  """All of a client's steps lie in a row, and its examples take turns."""
  clients = population.ClientPopulation.from_lists(
    {"y": np.arange(sum(sizes))},
    np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]),
  )
  lanes = planning.plan_clients(
    clients,
    seed=0,
    round=1,
    clients_per_round=len(sizes),
    batch_size=batch_size,
    epochs=epochs,
    max_steps=max_steps,
    uniform_weights=uniform,
    full_batches=full,
    num_lanes=num_lanes,
  )
  work = np.arange(lanes.client.shape[1]) < lanes.steps[:, None]
  assert not lanes.weight[~work].any() and (lanes.index[~work] == -1).all()
  for k, n in enumerate(sizes):
    mine = work & (lanes.client == k)
    assert len(np.unique(np.nonzero(mine)[0])) == 1  # One lane.
    a_pass = -(-n // batch_size)
    steps = -(-n * epochs // batch_size) if full else epochs * a_pass
    steps = min(steps, max_steps or 10**9)
    assert lanes.step[mine].tolist() == list(range(steps))
    ends = [0] * (steps - 1) + [1 if uniform else n]
    assert lanes.weight[mine].tolist() == ends
    held, batches = clients.positions(k), lanes.index[mine]
    seen = np.bincount(batches[batches >= 0], minlength=sum(sizes))
    assert seen.sum() == seen[held].sum()
    assert seen[held].max() - seen[held].min() <= 1
    if full:
      assert seen.sum() == steps * batch_size
    elif steps % a_pass == 0:  # Whole passes: each example once in each.
      assert (seen[held] == steps // a_pass).all()
    lengths = (batches >= 0).sum(1)
    of_pass = [batch_size] * (a_pass - 1) + [n - batch_size * (a_pass - 1)]
    expected = [batch_size] if full else of_pass
    assert lengths.tolist() == (expected * steps)[:steps]


def test_a_round_may_need_nothing_of_a_bank():
  """Such as the distillation set's, where no exchange is due."""
  clients = population.ClientPopulation.from_lists({"y": np.arange(9)}, [[4]])
  public = population.Subset.whole({"y": np.arange(5)})
  share = dict(clients_per_round=1, batch_size=1, distill_batch_size=2)
  plan = planning.plan_round([clients], public, seed=0, round=1, **share)
  none = plan._replace(distill=np.full_like(plan.distill, -1))
  small, data = planning.localize(none, [clients], public)
  assert (small.distill == -1).all() and len(data["distill"]["y"])
  assert data["pools"][0]["y"][small.pools[0].index[0, 0, 0]] == 4


@settings(deadline=None)
@given(
  sizes=st.lists(st.integers(1, 99), min_size=1, max_size=12),
  batch_size=st.integers(1, 5),
)
def test_no_fewer_lanes_are_enough(sizes, batch_size):
  """Rounds of all clients: one fewer takes a tenth longer than the longest."""
  clients = population.ClientPopulation.from_lists(
    {"y": np.arange(sum(sizes))},
    np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]),
  )
  share = dict(clients_per_round=len(sizes), batch_size=batch_size)
  length = lambda n: planning.plan_clients(
    clients, seed=0, round=1, num_lanes=n, **share
  ).steps.max()
  enough = planning.enough_lanes(clients, **share)
  longest = length(len(sizes))
  assert length(enough) <= 1.1 * longest
  assert enough == 1 or length(enough - 1) > 1.1 * longest


def test_no_two_passes_have_one_order():
  """Of clients, pools, rounds, seeds, and of the distillation set."""
  clients = population.ClientPopulation.from_lists(
    {"y": np.arange(40)}, [np.arange(20), np.arange(20, 40)]
  )
  public, orders = population.Subset.whole({"y": np.arange(20)}), []
  for seed, round in ((0, 1), (0, 2), (1, 1)):
    share = dict(seed=seed, round=round, batch_size=20)
    orders += [
      *planning.plan_distillation(public, steps=2, **share),
      *(
        planning.plan_clients(
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
    return core.gather(bank, index)

  step = runner.compile(take)
  batch = step(there, np.array([4, 1]))
  for name, array in bank.items():
    np.testing.assert_array_equal(batch[name], array[[4, 1]])
  assert seen["x"] == (6, 3, 4, 3)
  placed = there if devices == 1 else runner._place(there, True)
  order = lambda name: placed[name].format.layout.major_to_minor
  assert order("x") == (0, 3, 1, 2) and order("gray") == (0, 1, 2, 3)
  assert runner.compile(jnp.sum)(placed["x"]) == bank["x"].sum()
