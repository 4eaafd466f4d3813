"""Many devices and many processes give what one gives."""

import gc
import json
import re
import shutil
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetfl import engine
from hetfl.engine import Task, Work
from hetfl.run import logs
from tests import federation
from tests.algorithms import CASES
from tests.runs import ROOT

ALGORITHMS = ("merged", "fml")  # FedMD's phases are a test of their own.
_FILE = ROOT / "tests/small_models.py"
SMALL = f"{_FILE}:small,{_FILE}:large"
# Sums of the same float32 numbers, taken in another order in each round.
TOLERANCE = dict(rtol=5e-4, atol=5e-6)


def start(environment, *command):
  return subprocess.Popen(
    [sys.executable, *command],
    env=environment | {"PYTHONPATH": str(ROOT)},
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def start_two(environment, *command):
  """Two processes of a command that train as one."""
  address = f"--distributed_coordinator=localhost:{free_port()}"
  return [
    start(
      environment,
      *command,
      address,
      "--distributed_processes=2",
      f"--distributed_process_id={process}",
    )
    for process in range(2)
  ]


def finish(*processes, timeout=600):
  """Waits for processes; returns what they wrote."""
  try:
    outputs = [process.communicate(timeout=timeout) for process in processes]
  finally:
    for process in processes:
      process.kill()
  for process, (_, err) in zip(processes, outputs):
    assert process.returncode == 0, err[-3000:]
  return outputs


def worker(environment, **task):
  return start(environment, "-m", "tests.processes", json.dumps(task))


def free_port():
  with socket.socket() as s:
    s.bind(("localhost", 0))
    return s.getsockname()[1]


def params(folder, name):
  with np.load(folder / f"{name}.npz") as stored:
    return [stored[key] for key in stored]


def assert_same(folder, expected, names):
  for name in names:
    for a, b in zip(params(folder, name), params(expected, name), strict=True):
      np.testing.assert_allclose(a, b, **TOLERANCE)
    rows, expected_rows = (
      [
        json.loads(line)
        for line in (f / name / "metrics.jsonl").read_text().splitlines()
      ]
      for f in (folder, expected)
    )
    assert [row["round"] for row in rows] == [2, 4]
    for row, expected_row in zip(rows, expected_rows, strict=True):
      del row["seconds"], expected_row["seconds"]
      assert row == pytest.approx(expected_row, rel=1e-3)


@pytest.fixture(scope="module")
def one_device(environment, tmp_path_factory):
  folder = tmp_path_factory.mktemp("one")
  finish(
    worker(environment, algorithms=ALGORITHMS, devices=1, folder=str(folder))
  )
  return folder


def after_round_2(one_device, folder):
  """MergedCodist's run as it was after round 2, on one device."""
  shutil.copytree(one_device / "merged", folder / "merged")
  (folder / "merged/result.json").unlink()
  shutil.rmtree(folder / "merged/checkpoints/000004")
  assert (folder / "merged/checkpoints/000002").is_dir()
  return folder


@pytest.mark.slow
def test_a_run_goes_on_with_other_devices(environment, one_device, tmp_path):
  # Eight devices for four lanes, and the eight examples of a batch.
  folder = after_round_2(one_device, tmp_path)
  task = dict(algorithms=["merged"], devices=8, dispatch=2)
  finish(worker(environment, **task, folder=str(folder)))
  assert_same(folder, one_device, ["merged"])


def two_processes(environment, folders, **task):
  address = f"localhost:{free_port()}"
  finish(
    *(
      worker(
        environment,
        **task,
        devices=2,
        coordinator=address,
        processes=2,
        process=process,
        folder=str(folder),
      )
      for process, folder in enumerate(folders)
    )
  )


@pytest.mark.slow
def test_two_processes(environment, one_device, tmp_path):
  folders = tmp_path / "first", tmp_path / "second"
  two_processes(environment, folders, algorithms=ALGORITHMS)
  assert_same(folders[0], one_device, ALGORITHMS)
  for name in ALGORITHMS:  # Both came to the same bits.
    for a, b in zip(*(params(folder, name) for folder in folders)):
      np.testing.assert_array_equal(a, b)
  # A process without folders, as without a shared file system, receives the
  # result of a finished run, and of another the first one's checkpoint.
  shutil.rmtree(tmp_path / "first/merged")
  after_round_2(one_device, tmp_path / "first")
  folders = tmp_path / "first", tmp_path / "third"
  two_processes(environment, folders, algorithms=ALGORITHMS)
  for file in ("metrics.jsonl", "result.json"):
    first, third = (folder / "fml" / file for folder in folders)
    assert first.read_bytes() == third.read_bytes()
  assert_same(folders[0], one_device, ["merged"])


@pytest.mark.slow
def test_what_one_process_refuses_ends_both(environment, tmp_path):
  (tmp_path / "thesis.tex").write_text("years of work")
  # The second process does not look into the folder.
  run = ("experiments/codist.py", f"--workdir={tmp_path}")
  processes = start_two(environment, *run)
  outputs = [process.communicate(timeout=120) for process in processes]
  assert all(process.returncode for process in processes)
  last = outputs[0][1].strip().splitlines()[-1]
  assert last.startswith(f"error: --workdir={tmp_path} holds thesis.tex")
  assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_the_command_line_of_two_processes(environment, experiment, tmp_path):
  run = ("experiments/fedmd.py", "--num_parties=2", "--public_subset=96")
  run += ("--public_epochs=2", "--transfer_epochs=2", "--pooled_epochs=1")
  run += ("--rounds=2", "--notensorboard", f"--models={SMALL}")
  alone = ("--engine=inline", f"--workdir={tmp_path}/one")
  experiment("fedmd")(*run[1:], *alone)
  outputs = finish(*start_two(environment, *run, f"--workdir={tmp_path}/two"))
  assert [("Curves:" in out) for out, _ in outputs] == [True, False]
  one, two = (
    json.loads((tmp_path / name / "result.json").read_text())["parties"]
    for name in ("one", "two")
  )
  for a, b in zip(one, two, strict=True):
    # Rounding moves some of a party's 148 images across a border.
    assert b == pytest.approx(a, abs=0.1)
  for phase in ("public", "transfer", "pooled", ""):
    losses = [
      [
        {key: value for key, value in row.items() if key.endswith("loss")}
        for row in logs.read_rows(tmp_path / name / phase / "metrics.jsonl")
      ]
      for name in ("one", "two")
    ]
    assert losses[0] and len(losses[0]) == len(losses[1])
    for a, b in zip(*losses):
      assert b == pytest.approx(a, rel=1e-4)


def test_a_program_holds_no_collectives_but_its_jobs():
  """The compiler adds no sharding of its own, even for uneven sizes."""
  mesh = federation.mesh(3)
  runner, case = engine.Inline(mesh), CASES["merged"]
  algorithm = case.build(runner, 4)
  state = jax.eval_shape(algorithm.init, jax.random.key(0))
  program = engine.jit(algorithm.step).lower(state, case.plan(1), case.data())
  collectives = re.findall(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(",
    program.compile().as_text(),
  )
  # Logits of each pool's model, and sums over lanes, one pool after the other.
  assert sorted(collectives) == 2 * ["all-gather"] + 2 * ["all-reduce"]


def test_devices_keep_what_comes_every_round(caplog):
  """One program for all rounds, and one copy of a bank while it lives."""
  mesh = federation.mesh(2)
  runner, case = engine.Inline(mesh), CASES["fedavg"]
  algorithm = case.build(runner, 4)
  step = runner.compile(algorithm.step, donate=(0,))
  state, data = algorithm.init(jax.random.key(0)), jax.device_put(case.data())
  with jax.log_compiles(), caplog.at_level("WARNING"):
    for t in range(1, 4):
      state, _ = step(state, case.plan(t), data)
  compiled = [r for r in caplog.messages if "Finished XLA compilation" in r]
  assert sum("(step)" in r for r in compiled) == 1, compiled
  copies = len(runner._placed)
  assert copies == len({id(leaf) for leaf in jax.tree.leaves(data)})
  del data
  gc.collect()
  assert not runner._placed


def shared_total(x, carry, s, shard=None):
  """The sum of a batch, and how many of its numbers this device saw."""
  part = shard.take(x) if shard else x
  value = part.sum(), part.shape[0] + 0 * part.sum()
  return shard.sum(value) if shard else value


TOTAL = Task(
  lambda x: (0 * x.sum(), 0 * x.sum()),
  shared_total,
  lambda x, carry: carry,
  shares=True,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loops_with_collectives_take_turns(dtype):
  """The second waits for the first; for all trials at once under `vmap`."""
  runner = engine.Inline(federation.mesh(2))

  def both(x):
    work = Work(TOTAL, (), x, np.int32(1))
    return runner.run(work, work)

  x = jnp.ones(4, dtype)
  for fn, arg in ((both, x), (jax.vmap(both), jnp.stack([x, x]))):
    program = jax.make_jaxpr(fn)(arg).jaxpr
    first, second = (
      i for i, e in enumerate(program.eqns) if e.primitive.name == "shard_map"
    )
    follows = set(map(id, program.eqns[first].outvars))
    for equation in program.eqns[first + 1 : second]:
      if any(id(v) in follows for v in equation.invars):
        follows.update(map(id, equation.outvars))
    late = [v for v in program.eqns[second].invars if id(v) in follows]
    assert [v.aval.shape for v in late] == [()]  # How many steps it takes.
    for total, count in jax.jit(fn)(arg):
      assert np.all(total == 4) and np.all(count == 4)


def test_devices_share_a_batch():
  x = np.arange(8.0, dtype=np.float32)
  for runner in (
    engine.Inline(),
    engine.Inline(federation.mesh(4)),
    engine.Threads(2),
  ):
    run = lambda work, runner=runner: runner.run(work)[0]
    for steps, expected in ((1, (28, 8)), (0, (0, 0))):
      found = run(Work(TOTAL, (), x, np.int32(steps)))
      assert tuple(map(float, found)) == expected


def test_devices_take_a_row_each():
  runner, ran = engine.Inline(federation.mesh(4)), []

  def times(k):
    def fn(x):
      jax.debug.callback(lambda: ran.append(k))
      return k * x

    return Task.of(fn)

  two, once = np.float32(2), np.int32(1)
  works = [Work(times(k), (), two, once) for k in range(6)]
  works[2] = works[2]._replace(steps=np.int32(0))
  pair = Work(
    Task.of(lambda x: -x), (), np.ones(2, np.float32), np.ones(2, int)
  )
  works.insert(1, pair._replace(total=True))
  results = jax.jit(lambda: runner.run(*works))()
  assert [float(result) for result in results] == [0, -2, 2, 0, 6, 8, 10]
  jax.effects_barrier()
  assert sorted(ran) == [0, 1, 3, 4, 5]  # Once, not on every device.


def test_what_comes_from_other_devices_keeps_its_type():
  """Sums over devices turn booleans into numbers, and do not accept keys."""
  key, once = jax.random.key(3), np.int32(1)
  states = [
    {"key": jax.random.fold_in(key, k), "yes": np.bool_(k), "n": np.int8(-k)}
    for k in range(3)
  ]
  same = Task(lambda row: row, lambda row, *_: row, lambda row, carry: carry)
  works = [Work(same, (), state, once) for state in states]
  runner = engine.Inline(federation.mesh(2))
  results = jax.jit(lambda: runner.run(*works))()
  for result, state in zip(results, states):
    assert result["key"].dtype == key.dtype
    assert jax.random.bits(result["key"]) == jax.random.bits(state["key"])
    assert (result["yes"].dtype, result["n"].dtype) == (bool, np.int8)
    assert (result["yes"], result["n"]) == (state["yes"], state["n"])
