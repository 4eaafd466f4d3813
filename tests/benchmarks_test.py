"""What the benchmarks count and how their rows are chosen."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
  codist,
  compare,
  compiled,
  fedmd,
  fml,
  frameworks,
  frameworks_peers,
  htfllib,
  programs,
  rounds,
)
from hetfl import core
from hetfl.models import vision


def test_flops_of_the_small_cnn():
  # 24x24x3, SAME 3x3 convolutions of 16, 32, 32 channels, pooled by 2 twice;
  # dense 1152 -> 64 -> 128 -> 100.
  convolutions = [576 * 27 * 16, 144 * 144 * 32, 36 * 288 * 32]
  dense = [1152 * 64, 64 * 128, 128 * 100]
  forward = 2 * sum(convolutions + dense)
  assert codist.image_flops("small", False) == forward
  # As much again for kernels and for inputs, but for the images.
  assert codist.image_flops("small", True) == 3 * forward - 2 * convolutions[0]
  native = vision.small_cnn(100, conv="native")
  example = jnp.zeros((1, 24, 24, 3))
  counted = rounds.example_flops(
    core.Model.from_flax(native, example),
    core.cross_entropy,
    (4, 24, 24, 3),
    jnp.float32,
    False,
  )
  assert counted == forward


def test_rows_are_chosen_by_their_beginnings():
  every = codist.rows()
  assert compare.chosen(None, every) == list(every)
  assert compare.chosen("merged", every) == ["merged_plain"]
  with pytest.raises(ValueError, match="--only=fedprox: choose from fedavg_"):
    compare.chosen("merged,fedprox", every)


def test_turns_and_ratios(monkeypatch):
  clock, turns = [0.0], []
  monkeypatch.setattr(rounds.time, "perf_counter", lambda: clock[0])

  def takes(name, *seconds):
    seconds = iter(seconds)

    def run(number):
      assert number == 1  # A CPU's turns are single rounds.
      turns.append(name)
      clock[0] += next(seconds)

    return run

  products = takes("products", 1.0, 2.0, 4.0)
  products.flops = 6e9
  row = rounds.take_turns(
    takes("ours", 1.0, 4.0, 2.0), takes("peer", 5.0, 4.0, 6.0), 3, products
  )
  assert turns == ["ours", "peer", "products"] * 3
  assert row == {
    "ours_s": 2,
    "ours_min_s": 1,
    "ours_max_s": 4,
    "peer_s": 5,
    "peer_min_s": 4,
    "peer_max_s": 6,
    "ratio": 3,  # the median of 5, 1 and 3, not 5 / 2
    "ceiling_gflop_s": 3,
  }


def test_an_accelerators_turn_is_ten_rounds(monkeypatch):
  clock = [0.0]
  monkeypatch.setattr(rounds.time, "perf_counter", lambda: clock[0])
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

  def takes(seconds):
    def run(number):
      clock[0] += number * seconds

    return run

  row = rounds.take_turns(takes(2.0), takes(6.0), 3)
  assert (row["ours_s"], row["peer_s"], row["ratio"]) == (2, 6, 3)


def test_a_torch_model_is_converted():
  torch = pytest.importorskip("torch")
  torch.manual_seed(0)
  nn = torch.nn
  theirs = nn.Sequential(
    *(nn.Conv2d(3, 4, 5), nn.MaxPool2d(2), nn.ReLU()),
    *(nn.Conv2d(4, 6, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()),
    *(nn.Linear(6 * 5 * 5, 7), nn.ReLU(), nn.Linear(7, 2)),
  )
  ours = vision.CNN((4, 6), 5, (7,), 2, padding="VALID", conv="native")
  x = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)
  params = jax.eval_shape(ours.init, jax.random.key(0), x)["params"]
  params = htfllib.like(params, htfllib.converted(theirs))
  expected = theirs(torch.from_numpy(x.transpose(0, 3, 1, 2))).detach().numpy()
  np.testing.assert_allclose(
    ours.apply({"params": params}, x), expected, atol=1e-5
  )


def test_simple_cnn_has_pfl_researchs_weights(tmp_path):
  weights = frameworks.first_weights(0)
  assert sum(w.size for w in weights) == 1_626_442
  # Glorot's limit for 3x3x3 -> 3x3x32; PyTorch's for the last bias.
  assert 0.99 < np.abs(weights[0]).max() / (6 / (27 + 288)) ** 0.5 <= 1
  assert np.abs(weights[-1]).max() <= 128**-0.5
  model = frameworks.simple_cnn((0.0, 0.0), None)
  params = frameworks.converted(weights)
  expected = jax.eval_shape(model.init, jax.random.key(0)).params
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, expected)

  pytest.importorskip("torch")
  rng = np.random.default_rng(0)
  bank = {
    "x": rng.normal(size=(100, 32, 32, 3)).astype(np.float32),
    "y": rng.integers(0, 10, 100),
  }
  settings = {"rounds": 2, "cohort": 2, "dropout": (0.5, 0.5), "classes": 10}
  frameworks.write(tmp_path, bank, settings)
  work = frameworks_peers.Work(tmp_path)
  # Each of the two users trains on its images in both rounds.
  assert [sorted(of_round.ravel()) for of_round in work.orders] == (
    [list(range(100))] * 2
  )
  x, y = work.client(1, 0)
  np.testing.assert_array_equal(y, bank["y"][work.orders[1, 0]])
  loss = frameworks_peers.loss(work.started(), x, y, eval=True).item()
  variables = core.Variables(jax.tree.map(jnp.asarray, params), {})
  batch = {"x": x.numpy(), "y": y.numpy()}
  ours = core.cross_entropy(model.predict(variables, batch["x"]), batch)
  assert jnp.mean(ours) == pytest.approx(loss, rel=1e-5)


def test_the_first_turn_of_frameworks_does_not_count():
  ours = types.SimpleNamespace(
    name="ours", versions={}, turns=[[9.0], [1.0], [2.0], [4.0]]
  )
  peer = types.SimpleNamespace(
    name="pfl", versions={}, turns=[[9.0], [5.0], [4.0], [12.0]]
  )
  row = frameworks.row(peer, ours)
  assert (row["iteration_s"], row["ratio"]) == (5, 3)  # of 5, 2 and 3


TEXT = """
%cond (a: (s32[], f32[4])) -> pred[] {
  %a = (s32[], f32[4]{0}) parameter(0)
  %limit = s32[] constant(7)
  %i = s32[] get-tuple-element(%a), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}
%body (a: (s32[], f32[4])) -> (s32[], f32[4]) {
  %a = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0:T(128)} get-tuple-element(%a), index=1
  %y = f32[4]{0:T(128)} fusion(%x, %x), c={"estimated_cycles":"30"}
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %y)
}
%yes (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %y = f32[4]{0} copy(%x)
}
%no (x: f32[4]) -> f32[4] {
  ROOT %x = f32[4]{0} parameter(0)
}
ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %s = (f32[4], bf16[2,3]{1,0:T(2,1)}) sort(%x), c={"estimated_cycles":"5"}
  %w = (s32[], f32[4]) while(%s), condition=%cond, body=%body
  %u = (s32[], f32[4]) while(%s), condition=%unknown, body=%body
  %k = (s32[], f32[4]) while(%s), body=%body, {"known_trip_count":{"n":"2"}}
  ROOT %c = f32[4]{0} conditional(%p, %x), branch_computations={%no, %yes}
}
"""


def test_programs_add_up():
  total = programs.total(TEXT, steps=5)
  # 7, 5 and 2 turns of a fusion of 16 bytes in and 16 out; a sort of 16 in and
  # 16 + 12 out; the branch that copies.
  assert total.launches == 14 + 1 + 1
  assert total.bytes == 14 * 32 + 44 + 32
  assert total.cycles == 14 * 30 + 5


def test_a_program_for_a_device():
  x = np.zeros((5, 8), np.float32)
  step = lambda w, plan, data: (data.T @ (data @ w), plan[0])
  job = compiled.Job(lambda: x[0], step, x, x, 1, 80)
  there = compiled.Target("cpu", jax.devices()[0], gb_per_s=2.0, ghz=0.0)
  row = compiled.measure("row", job, there)
  assert row["name"] == "row" and row["gflop"] == 80e-9
  assert row["arguments_mb"] >= 4e-6 and row["operations"] >= 1
  assert row["bandwidth_ms"] == row["moved_gb"] / 2 * 1e3 > 0
  assert "expected_ms" not in row  # Only TPUs' compilers state it.
  assert "round_ms" not in row
  row = compiled.measure("row", job, there._replace(runs=2))
  assert min(row["round_ms"], row["stream_ms"]) > 0
  # 80 FLOPs in `stream_ms` milliseconds.
  assert row["tflop_per_s"] == pytest.approx(80e-9 / row["stream_ms"])


def test_every_round_can_be_compiled(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  rows = codist.rows() | fml.rows(1) | fedmd.rows(1.0)
  named = {name.split("_")[0] for name in compiled.jobs()}
  assert {name.split("_")[0] for name in rows} - named == {"independent"}
  job = compiled.jobs()["fedavg_both"]()
  state, plan, data = jax.eval_shape(job.init), job.plan, job.data
  assert len(state.server) == len(plan.batches) == len(data) == 2
  assert plan.batches["small"].steps.tolist() == [job.steps] * 20


def test_targets_are_checked(tmp_path):
  with pytest.raises(ValueError, match="--target=here: no accelerator"):
    compiled.here(1)
  with pytest.raises(ValueError, match="none.txtpb: No such file"):
    compiled.target_of(str(tmp_path / "none.txtpb"))
