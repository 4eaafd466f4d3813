"""A run of an algorithm over many devices or processes, for tests.

  python -m tests.processes '{"algorithms": ["merged"], "devices": 8, ...}'

Writes a run's folder an algorithm below `folder`, with the final parameters
in `params.npz`.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import engine
from hetfl.run import logs, training
from tests.algorithms import arrays, CASES

ROUNDS = 4


def norms(state):
  """What an evaluation may be: a number of all parameters."""
  floats = [a for a in jax.tree.leaves(arrays(state)) if a.dtype == jnp.float32]
  # One program: many small ones could wait for each other on CPU devices.
  return {"norm": float(jax.jit(optax.tree.norm)(floats))}


def run(name, folder, runner, dispatch=1):
  case = CASES[name]
  algorithm = case.build(runner, ROUNDS)
  path = pathlib.Path(folder, name)
  path.parent.mkdir(parents=True, exist_ok=True)

  def summarize(state, evaluation):
    leaves = jax.tree.leaves(arrays(state))
    np.savez(path.with_suffix(".npz"), *map(np.asarray, leaves))
    return {"algorithm": name, "norm": evaluation["norm"]}

  return training.run(
    algorithm,
    jax.random.key(0),
    case.plan,
    case.data(),
    norms,
    engine=runner,
    rounds=ROUNDS,
    folder=logs.RunFolder(path, {"name": name}),
    summarize=summarize,
    eval_every=2,
    checkpoint_every=2,
    tensorboard=False,
    rounds_per_dispatch=dispatch,
  )


def main():
  task = json.loads(sys.argv[1])
  jax.config.update("jax_num_cpu_devices", task["devices"])
  if "processes" in task:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
      task["coordinator"], task["processes"], task["process"]
    )
  devices = jax.device_count()
  mesh = jax.make_mesh((devices,), (engine.AXIS,)) if devices > 1 else None
  runner = engine.Inline(mesh)
  for name in task["algorithms"]:
    run(name, task["folder"], runner, task.get("dispatch", 1))
  assert jnp.ones(()).devices()  # JAX lives.


if __name__ == "__main__":
  main()
