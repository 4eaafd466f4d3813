"""How the engines run work."""

import functools
import threading
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetfl import engine
from hetfl.engine import compilation, packing, Task, Work
from tests import federation


def begin(scale, row):
  return row["v"], jnp.zeros((), jnp.int32)


def step(scale, row, carry, s):
  """The order of the steps matters, and their number."""
  v, count = carry
  return scale * v + row["v"] * (s + 1), count + s


def end(scale, row, carry):
  kept = {"id": row["id"], "none": row["none"]}
  return {"v": carry[0], "count": carry[1], **kept}


SCALE = np.float32(0.5)
ENGINES = {
  "threads": lambda: engine.Threads(2),
  "one": lambda: engine.Inline(),
  "all": lambda: engine.Inline(at_once=1000),
  "lanes": lambda: engine.Inline(at_once=2),
  "mesh": lambda: engine.Inline(federation.mesh(4)),
  "mesh_lanes": lambda: engine.Inline(federation.mesh(2), at_once=2),
}
STEPS = {
  "one row": [3],
  "no steps": [0, 0, 0],
  "unlike": [0, 1, 5, 0, 2],
  "pieces": [13, 31, 0],  # Too few rows for threads to share equally.
  "equal": [4, 4, 4, 4],
  "many": np.random.default_rng(0).integers(0, 5, 97).tolist(),
}


def rows_of(number):
  v = np.random.default_rng(1).normal(size=(number, 3)).astype(np.float32)
  none = np.zeros((number, 0), np.float32)  # Such as no further classes.
  return {"v": v, "id": np.arange(number, dtype=np.int32), "none": none}


def expected(rows, steps, scale=SCALE):
  v = rows["v"].copy()
  for k, most in enumerate(steps):
    for s in range(most):
      v[k] = scale * v[k] + rows["v"][k] * (s + 1)
  steps = np.asarray(steps)
  return {**rows, "v": v, "count": steps * (steps - 1) // 2}


assert_same = functools.partial(
  chex.assert_trees_all_close, rtol=1e-5, atol=1e-4
)


def run(runner, *works, traced=False):
  """Runs works, with arrays of which a program knows the values or not."""
  if not traced:
    return runner.run(*works)
  tasks = [work.task for work in works]
  others = [work[1:4] for work in works]

  def program(others):
    return runner.run(
      *(
        Work(task, *other, total=work.total, at_once=work.at_once)
        for task, other, work in zip(tasks, others, works)
      )
    )

  return jax.jit(program)(others)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kind", ENGINES)
def test_engines_agree(kind, name):
  steps = np.array(STEPS[name], np.int32)
  rows, task = rows_of(len(steps)), Task(begin, step, end)
  each = Work(task, (SCALE,), rows, steps)
  works = each, each._replace(total=True), each._replace(total=True, at_once=1)
  wanted = expected(rows, STEPS[name])
  sums = {name: a.sum(axis=0) for name, a in wanted.items()}
  runner = ENGINES[kind]()
  ways = {"threads": [False], "one": [False, True], "lanes": [False, True]}
  for traced in ways.get(kind, [True]):
    stacked, total, one_by_one = run(runner, *works, traced=traced)
    assert_same(stacked, wanted)
    assert_same(total, sums)
    assert_same(one_by_one, sums)


@pytest.mark.parametrize("kind", ENGINES)
def test_single_rows_have_no_axis(kind):
  rows, task = rows_of(3), Task(begin, step, end)
  steps = [13, 0, 1]
  works = [
    Work(task, (SCALE,), {name: a[k] for name, a in rows.items()}, np.int32(n))
    for k, n in enumerate(steps)
  ]
  results = run(ENGINES[kind](), *works, traced=kind != "threads")
  wanted = expected(rows, steps)
  for k, result in enumerate(results):
    assert_same(result, {name: a[k] for name, a in wanted.items()})


@pytest.mark.parametrize("kind", ENGINES)
def test_a_function_whose_rows_have_no_steps_gives_zeros(kind):
  task = Task.of(lambda a, x: {"y": a * x + 1, "n": jnp.ones((2,), jnp.int32)})
  x, runner = np.arange(5, dtype=np.float32), ENGINES[kind]()
  for steps in (np.array([1, 0, 1, 1, 0]), np.zeros(5, int), np.ones(5, int)):
    each = Work(task, (np.float32(2),), x, steps.astype(np.int32))
    works = (
      each,
      each._replace(total=True),
      each._replace(rows=x[4], steps=each.steps[4]),
    )
    stacked, total, one = run(runner, *works, traced=kind != "threads")
    y, n = np.where(steps, 2 * x + 1, 0), np.stack([steps, steps], 1)
    assert_same(stacked, {"y": y, "n": n})
    assert_same(total, {"y": y.sum(), "n": n.sum(axis=0)})
    assert_same(one, {"y": y[4], "n": n[4]})


@pytest.mark.parametrize("kind", ["one", "threads"])
def test_a_function_whose_rows_have_no_steps_does_not_run(kind):
  """Though it is the same in each step, which XLA would compute before them."""
  w = jax.random.normal(jax.random.key(0), (2048, 2048))
  task, runner = Task.of(lambda w, row: row @ w @ w), ENGINES[kind]()
  rows = jnp.ones((4, 64, 2048))
  ask = lambda rows, steps: runner.run(Work(task, (w,), rows, steps))
  run = ask if kind == "threads" else jax.jit(ask)
  seconds = {0: [], 1: []}
  for steps in (0, 1) * 4:  # The first pair compiles.
    begun = time.perf_counter()
    jax.block_until_ready(run(rows, np.full(4, steps, np.int32)))
    seconds[steps].append(time.perf_counter() - begun)
  assert min(seconds[0]) < min(seconds[1]) / 4, seconds


def test_trials_may_have_unlike_steps_and_share_a_bank():
  """Under `vmap` no trial copies the bank."""
  task = Task.of(lambda weight, bank, row: weight * row * jnp.sum(bank))

  def call(weight, bank, steps):
    works = Work(task, (weight, bank), jnp.ones(2), steps)
    return engine.Inline().run(works)[0]

  trials = jax.vmap(call, (0, None, 0))
  steps = jnp.array([[1, 1], [0, 0], [0, 1]])
  args = jnp.arange(1.0, 4.0), jnp.ones(500), steps
  np.testing.assert_array_equal(trials(*args), [[500, 500], [0, 0], [0, 1500]])
  program = str(jax.make_jaxpr(trials)(*args))
  assert "f32[500]" in program and "3,500]" not in program


@pytest.mark.parametrize("num_lanes", [1, 2, 5, 40])
def test_traced_packing_is_packing(num_lanes):
  lengths = np.random.default_rng(num_lanes).integers(1, 9, 31)
  lanes = packing.longest_first(lengths.tolist(), num_lanes)
  ids, number = packing.traced_longest_first(jnp.array(lengths), num_lanes)
  traced = [i[:n].tolist() for i, n in zip(ids, number)]
  assert sorted(k for lane in traced for k in lane) == list(range(31))
  load = lambda lanes: sorted(
    int(lengths[lane].sum()) for lane in lanes if lane
  )
  assert load(traced) == load(lanes)
  # No lane is longer than the mean by more than one row.
  assert max(load(lanes)) <= lengths.sum() / num_lanes + lengths.max()


def wrong(*args):
  raise RuntimeError("a bug in a model")


@pytest.mark.parametrize("steps", [1, [1, 1], [9, 9, 9]])
@pytest.mark.parametrize("where", ["begin", "step", "end"])
def test_an_error_reaches_the_caller_and_the_engine_lives_on(where, steps):
  parts = {"begin": begin, "step": step, "end": end} | {where: wrong}
  steps = np.array(steps, np.int32)
  rows = rows_of(steps.size)
  if steps.ndim == 0:
    rows = jax.tree.map(lambda a: a[0], rows)
  broken = Work(Task(**parts), (SCALE,), rows, steps)
  runner = engine.Threads(2)
  for _ in range(2):  # The first time it is being compiled.
    with pytest.raises(RuntimeError, match="a bug in a model"):
      runner.run(broken)
  runner.run(broken._replace(task=Task(begin, step, end)))


def test_after_an_error_nothing_more_is_begun():
  """No more rows, and no more pieces of a row."""
  begun = []

  def slow(row, carry, s):
    jax.debug.callback(lambda: begun.append(time.sleep(0.1)))
    return carry

  task = Task(lambda x: x, slow, lambda x, carry: carry)
  for rows, steps in ((3, 8), (40, 1)):
    runner = engine.Threads(2)
    work = Work(task, (), np.ones(rows), np.full(rows, steps, np.int32))
    runner.run(work)
    assert len(begun) == rows * steps
    begun.clear()
    with pytest.raises(RuntimeError, match="a bug in a model"):
      runner.run(Work(Task.of(wrong), (), np.ones(()), np.int32(1)), work)
    time.sleep(0.5)
    runner.run(Work(Task.of(lambda x: x), (), np.ones(()), np.int32(1)))
    assert len(begun) < 16
    begun.clear()


def test_many_threads_compile_a_program_once():
  traced = []

  def fn(x):
    traced.append(threading.get_ident())
    return x + 1

  task, runner = Task.of(fn), engine.Threads(4)
  one = Work(task, (), np.float32(0), np.int32(1))
  works = [one._replace(rows=np.float32(i)) for i in range(8)]
  runner.run(*works)
  first = len(traced)
  assert first <= 3  # Its shapes, its step, its step's shapes.
  results = runner.run(*works)
  assert [float(r) for r in results] == list(range(1, 9))
  assert len(traced) == first


def test_an_option_that_xla_does_not_know_is_left_out():
  assert compilation._known("xla_cpu_no_such_option", False) == {}
  option = {"xla_backend_optimization_level": 0}
  assert compilation._known(*option.popitem()) != {}


def test_a_gpus_loops_become_part_of_its_graphs(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  # If this XLA did not know one of the kinds, it would know none.
  (kinds,) = engine.compiler_options().values()
  assert {"WHILE", "CONDITIONAL"} < set(kinds.split(","))
  assert not engine.compiler_options(once=True)  # Not worth recording.
