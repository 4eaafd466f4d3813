"""What the benchmarks share: rows, rounds to time, and their FLOPs."""

import argparse
from collections.abc import Callable
import functools
import math
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import checks, core, engine, population

Round = Callable[..., Any]  # Runs that many rounds (or one), and waits.


def count(text: str) -> int:
  """Reads a flag's number of runs, rounds and the like."""
  if (number := int(text)) < 1:
    raise argparse.ArgumentTypeError(f"{text}: want 1 or more")
  return number


class Setup(NamedTuple):
  """Rounds of ours, before anything is compiled or run.

  Attributes:
    algorithm: our algorithm.
    runner: the engine it was built with.
    plan: maps a round to its plan.
    data: the data that `step` takes.
    cycle: number of rounds after which they repeat.
  """

  algorithm: core.Algorithm
  runner: engine.Engine
  plan: Callable[[int], Any]
  data: Any
  cycle: int | None = None


class Row(NamedTuple):
  """A line of the table, not yet measured.

  Attributes:
    ours: sets up our round.
    peer: what ours is compared with, in words.
    other: makes the peer's rounds: sets up, compiles, and returns a callable
      that runs more rounds and blocks until they are done.
    flops: FLOPs of the matrix products that a round needs, with direct
      convolutions and without padding.
    work: how much data a round processes, as `(amount, unit)`.
  """

  ours: Callable[[], Setup]
  peer: str
  other: Callable[[], Round]
  flops: Callable[[], float]
  work: Callable[[], tuple[float, str]]


def one_device(at_once: int | None = None) -> engine.Engine:
  """The engine of our rounds: CPU threads, or one accelerator.

  Args:
    at_once: the largest number of clients side by side on an accelerator.

  Returns:
    The engine.
  """
  if jax.default_backend() == "cpu":
    return engine.Threads()
  return engine.Inline(at_once=at_once)


def microbatch(runner: engine.Engine) -> int | None:
  """The commands' default for `--microbatch`."""
  return 16 if isinstance(runner, engine.Threads) else None


def looped(setup: Setup) -> Round:
  """A callable that runs the next rounds and blocks until they are done.

  Args:
    setup: our rounds. If they repeat, all are run once first, so that rounds of
      different shapes are compiled before the timing.

  Returns:
    The callable.
  """
  algorithm, runner, plan, data, cycle = setup
  state = jax.jit(algorithm.init)(jax.random.key(0))
  step = runner.compile(algorithm.step, donate=(0,))
  count, planned = 0, plan(1)

  def run(number: int = 1):
    nonlocal state, count, planned
    for _ in range(number):
      state, _ = step(state, planned, data)
      count += 1
      # As in training, which plans the next round while one runs.
      planned = plan(1 + (count % cycle if cycle else count))
    jax.block_until_ready(state)

  run(cycle or 2)
  return run


def stream() -> int:
  """Number of rounds that a turn times together, as training dispatches them.

  With an accelerator, the host waits for the last of ten, having dispatched the
  rest while earlier ones ran. A CPU's rounds are long, so each is a turn.

  Returns:
    The number of rounds.
  """
  return 1 if jax.default_backend() == "cpu" else 10


def take_turns(
  ours: Round, peer: Round, runs: int, products: Round | None = None
) -> dict[str, float]:
  """Times rounds of both and, if given, the products, in turn."""
  turns = (ours, peer, products) if products else (ours, peer)
  number, seconds = stream(), []
  for _ in range(runs):
    pair = []
    for run in turns:
      start = time.perf_counter()
      run(number)
      pair.append((time.perf_counter() - start) / number)
    seconds.append(pair)
  a, b, *c = zip(*seconds)
  row = {
    "ours_s": statistics.median(a),
    "ours_min_s": min(a),
    "ours_max_s": max(a),
    "peer_s": statistics.median(b),
    "peer_min_s": min(b),
    "peer_max_s": max(b),
    "ratio": statistics.median(y / x for x, y in zip(a, b)),
  }
  if products:
    row["ceiling_gflop_s"] = products.flops / statistics.median(c[0]) / 1e9
  return row


def ceiling(products: int = 8) -> Round:
  """A callable that multiplies large matrices on all cores or the device."""
  side = 1024 if jax.default_backend() == "cpu" else 8192

  def multiply(a):
    return jax.lax.fori_loop(0, products, lambda _, b: a @ b, a)

  runner = one_device()
  copies = getattr(runner, "num_threads", 1)
  # Scaled so that powers neither grow nor vanish.
  a = np.random.default_rng(0).normal(size=(side, side)) / side**0.5
  task = engine.Task.of(multiply)
  work = engine.Work(task, (), jnp.asarray(a, jnp.float32), np.int32(1))
  multiplied = runner.compile(lambda: runner.run(*[work] * copies))

  def run(number: int = 1):
    for _ in range(number):
      results = multiplied()
    jax.block_until_ready(results)

  run()
  run.flops = 2.0 * side**3 * products * copies
  return run


def product_flops(jaxpr) -> float:
  """FLOPs of the products of a traced function: `dot`s and convolutions.

  Args:
    jaxpr: the jaxpr of a function whose loops are all `lax.scan`s.

  Returns:
    The FLOPs, two for each multiply-add.

  >>> f = lambda a, b: jax.lax.scan(lambda c, _: (c @ b, None), a, None, 5)
  >>> product_flops(jax.make_jaxpr(f)(jnp.ones((2, 3)), jnp.ones((3, 3))).jaxpr)
  180.0
  """
  total = 0.0
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      (contracted, _), _ = equation.params["dimension_numbers"]
      left = equation.invars[0].aval.shape
      depth = math.prod(left[axis] for axis in contracted)
      total += 2.0 * depth * math.prod(equation.outvars[0].aval.shape)
    elif equation.primitive.name == "conv_general_dilated":
      _, features, *space = equation.params["dimension_numbers"].rhs_spec
      kernel = equation.invars[1].aval.shape
      depth = math.prod(kernel[axis] for axis in (features, *space))
      # A dilated image has zeros between its rows.
      depth /= math.prod(equation.params["lhs_dilation"])
      total += 2.0 * depth * math.prod(equation.outvars[0].aval.shape)
    times = equation.params.get("length", 1)
    for value in equation.params.values():
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        total += times * product_flops(inner)
  return total


@functools.cache
def example_flops(
  model: core.Model, loss: core.Loss, shape: tuple, dtype, train: bool
) -> float:
  """FLOPs of the products for one example, in training or in prediction.

  Args:
    model: a model whose convolutions are native or products of patches, since
      Winograd's need fewer products.
    loss: the loss of its outputs.
    shape: shape of a batch `x`.
    dtype: type of `x`.
    train: whether to count the gradient too.

  Returns:
    The FLOPs of the batch divided by its size.
  """
  key = jax.random.key(0)
  # Only shapes: making the parameters would compile each operation.
  variables = jax.eval_shape(model.init, key)

  def run(params, stats):
    x = jnp.zeros(shape, dtype)
    labels = x if dtype == jnp.int32 else jnp.zeros(shape[0], jnp.int32)
    batch = {"x": x, "y": labels, "mask": jnp.ones(shape[0])}
    there = core.Variables(params, stats)
    return jnp.sum(loss(model.apply(there, x, key, train)[0], batch))

  fn = jax.grad(run) if train else run
  jaxpr = jax.make_jaxpr(fn)(variables.params, variables.stats).jaxpr
  return product_flops(jaxpr) / shape[0]


def ragged_sizes(cohort: int, batch_size: int) -> tuple[list[int], list[int]]:
  """Lognormal sizes of clients of 1 to 64 batches, and of as many equal ones.

  Args:
    cohort: number of clients.
    batch_size: batch size, B.

  Returns:
    The numbers of examples of the ragged and of the equal clients, which have
    the same total number of batches.

  >>> unlike, equal = ragged_sizes(20, 10)
  >>> sum(unlike) == sum(equal), max(unlike), max(equal)
  (True, 180, 90)
  """
  draw = np.random.default_rng(1).lognormal(2.0, 1.0, cohort)
  steps = np.clip(np.round(draw), 1, 64).astype(int)
  equal = np.full(cohort, steps.sum() // cohort)
  equal[: steps.sum() - equal.sum()] += 1
  return (steps * batch_size).tolist(), (equal * batch_size).tolist()


def gathered(
  bank: dict[str, np.ndarray], sizes: list[int]
) -> population.ClientPopulation:
  """Clients with given numbers of examples, drawn from a bank.

  Args:
    bank: the examples.
    sizes: the number of examples of each client.

  Returns:
    The clients.
  """
  draw = np.random.default_rng(0)
  number = checks.num_examples(bank)
  return population.ClientPopulation.from_lists(
    bank, [draw.integers(0, number, n) for n in sizes]
  )
