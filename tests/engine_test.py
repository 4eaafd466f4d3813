"""How the engines run jobs."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetfl import engine
from hetfl.engine import compilation


def test_results_come_in_the_order_of_the_jobs():
  def slow(x):
    return jax.lax.fori_loop(0, 20_000, lambda _, y: jnp.sin(y), x)

  runner = engine.Threads(3)
  jobs = [engine.Call(slow, (jnp.ones(()) * i,)) for i in range(3)]
  jobs += [engine.Call(lambda x: x, (jnp.ones(()) * 7,))]
  for _ in range(2):
    results = runner.run(*jobs)
    assert [float(r) > 0.01 for r in results] == [False, True, True, True]
    assert float(results[3]) == 7


def test_lanes_run_as_long_as_they_say():
  def count(start, lane, steps):
    return jax.lax.fori_loop(0, steps, lambda i, n: n + lane[i], start)

  lanes = np.arange(12.0, dtype=np.float32).reshape(3, 4)
  job = engine.Lanes(count, (jnp.zeros(()),), lanes, np.array([4, 2, 0]))
  (total,) = engine.Threads(2).run(job)
  assert float(total) == 0 + 1 + 2 + 3 + 4 + 5


@pytest.mark.parametrize("rows", [1, 7, 8, 200])
def test_chunks_are_put_together(rows):
  job = engine.Chunks(
    lambda a, x: a * x["v"], (jnp.full((), 2.0),), {"v": np.arange(rows)}
  )
  for runner in (engine.Threads(2), engine.Inline()):
    (result,) = runner.run(job)
    np.testing.assert_array_equal(result, 2 * np.arange(rows))
    (skipped,) = runner.run(job._replace(when=False))
    np.testing.assert_array_equal(skipped, np.zeros(rows))


def test_trials_that_differ_do_not_all_pay():
  """Under `vmap` a branch stays a branch, and no trial copies the bank."""

  def call(weight, bank, when):
    job = engine.Call(lambda w, b: w * jnp.sum(b), (weight, bank), when)
    return engine.Inline().run(job)[0]

  trials = jax.vmap(call, (0, None, 0))
  args = jnp.arange(1.0, 4.0), jnp.ones(500), jnp.array([True, False, True])
  np.testing.assert_array_equal(trials(*args), [500, 0, 1500])
  program = str(jax.make_jaxpr(trials)(*args))
  assert "cond[" in program and "f32[500]" in program
  assert "3,500]" not in program


def test_an_error_reaches_the_caller_and_the_engine_lives_on():
  def wrong(x):
    raise RuntimeError("a bug in a model")

  runner = engine.Threads(2)
  for _ in range(2):  # The first time it is being compiled.
    with pytest.raises(RuntimeError, match="a bug in a model"):
      runner.run(engine.Call(wrong, (jnp.ones(()),)))
  (result,) = runner.run(engine.Call(lambda x: x + 1, (jnp.ones(()),)))
  assert float(result) == 2


def test_after_an_error_no_more_programs_are_begun():
  begun = []

  def slow(x):
    jax.debug.callback(lambda: begun.append(time.sleep(0.2)))
    return x

  def wrong(x):
    raise RuntimeError("a bug in a model")

  runner = engine.Threads(1)
  jobs = [engine.Call(slow, (jnp.ones(()),))] * 20
  # Jobs that have never run go first, in their order.
  with pytest.raises(RuntimeError, match="a bug in a model"):
    runner.run(engine.Call(wrong, (jnp.ones(()),)), *jobs)
  runner.run(engine.Call(lambda x: x, (jnp.ones(()),)))  # The queue is empty.
  assert len(begun) < 5


def test_no_more_pieces_of_a_row_are_begun_either():
  begun = []

  def advance(x, carry, first, last):
    jax.debug.callback(lambda: begun.append(time.sleep(0.1)))
    return carry

  def wrong(x):
    raise RuntimeError("a bug in a model")

  stages = engine.Stages(lambda x: x, advance, lambda x, carry: carry)
  runner = engine.Threads(2)  # Three rows, which it cannot share equally.
  each = engine.Each(
    lambda x: x, (), np.ones(3), (stages, np.full(3, 8, np.int32))
  )
  runner.run(each)
  assert len(begun) == 3 * runner.num_pieces
  begun.clear()
  with pytest.raises(RuntimeError, match="a bug in a model"):
    runner.run(engine.Call(wrong, (jnp.ones(()),)), each)
  time.sleep(0.5)
  assert len(begun) < 6


@pytest.mark.parametrize(
  "rows, threads, chunks", [(10, 8, 10), (20, 4, 10), (200, 7, 25), (7, 2, 7)]
)
def test_chunks_are_as_many_as_fit(rows, threads, chunks):
  """Equal ones, at most four a thread."""
  seen = []

  def program(x):
    jax.debug.callback(lambda: seen.append(len(x)))
    return x

  job = engine.Chunks(program, (), np.arange(rows))
  (result,) = engine.Threads(threads).run(job)
  np.testing.assert_array_equal(result, np.arange(rows))
  assert seen == [rows // chunks] * chunks


def test_many_threads_compile_a_program_once():
  traced = []

  def program(x):
    traced.append(threading.get_ident())
    return x + 1

  runner = engine.Threads(4)
  jobs = [engine.Call(program, (jnp.ones(()) * i,)) for i in range(8)]
  assert [float(r) for r in runner.run(*jobs)] == list(range(1, 9))
  assert len(traced) == 1


@pytest.mark.parametrize("rows", [1, 5])
def test_each_row_by_itself(rows):
  def total(a, row):
    assert row["v"].shape == (3,)  # One row, whatever the engine.
    return a * jnp.sum(row["v"]), row["n"]

  v = np.arange(3.0 * rows, dtype=np.float32).reshape(rows, 3)
  job = engine.Each(total, (jnp.full((), 2.0),), {"v": v, "n": np.arange(rows)})
  mesh = jax.make_mesh((4,), (engine.AXIS,))
  for runner in (
    engine.Threads(2),
    engine.Inline(),
    engine.Inline(max_lanes=2),
    engine.Inline(mesh),
  ):
    ((sums, numbers),) = runner.run(job)
    np.testing.assert_array_equal(sums, 2 * v.sum(axis=1))
    np.testing.assert_array_equal(numbers, np.arange(rows))


@pytest.mark.parametrize("rows", [4, 5])
def test_rows_in_stages_are_rows(rows):
  """Sums 1 + 2 + ... + n; some rows have fewer steps than there are pieces."""
  whole = []
  stages = engine.Stages(
    begin=lambda row: jnp.zeros(()),
    advance=lambda row, carry, first, last: jax.lax.fori_loop(
      first, last, lambda s, total: total + s + 1, carry
    ),
    end=lambda row, carry: (row["n"], carry),
  )

  def fn(row):
    whole.append(row)
    return stages.whole(row, steps=row["n"])

  steps = np.array([9, 1, 0, 20, 7][:rows], np.int32)
  job = engine.Each(fn, (), {"n": steps}, (stages, steps))
  for runner in (engine.Threads(2), engine.Inline(max_lanes=2)):
    ((numbers, sums),) = runner.run(job)
    np.testing.assert_array_equal(numbers, steps)
    np.testing.assert_array_equal(sums, steps * (steps + 1) / 2)
    if isinstance(runner, engine.Threads):
      # Two threads share four rows equally, and five piece by piece.
      assert bool(whole) == (rows == 4)


def test_an_error_in_a_stage_is_raised():
  def broken(row, carry, first, last):
    raise ValueError("no step")

  stages = engine.Stages(lambda row: row, broken, lambda row, carry: carry)
  rows = np.arange(3)
  with pytest.raises(ValueError, match="no step"):
    engine.Threads(2).run(engine.Each(None, (), rows, (stages, rows)))


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
