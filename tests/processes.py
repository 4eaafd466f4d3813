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

from hetfl import codist, distill, engine, logs, training
from hetfl.fedavg import fedavg, fedavg_server
from tests import federation

ROUNDS = 4


def build(name, runner):
  # Two dense models, which compile quickly.
  pools = federation.make_pools(
    3, server_optimizer=fedavg_server, server_lr=1.0
  )[::2]
  distiller = distill.Distiller(
    learning_rate=0.02,
    regularization=0.1,
    optimizer=optax.sgd,
    mixup_beta=2,
    # Draws of a whole batch, which devices must not draw for their part alone.
    transform=lambda key, batch: {
      **batch,
      "x": batch["x"] + 0.1 * jax.random.normal(key, batch["x"].shape),
    },
  )
  options = dict(rounds=ROUNDS, engine=runner)
  return {
    "fedavg": lambda: fedavg(pools, **options),
    "periodic": lambda: codist.periodic_codist(
      pools, distiller, period=2, **options
    ),
    "merged": lambda: codist.merged_codist(
      pools, distiller, alpha=0.5, **options
    ),
  }[name]()


def norms(state):
  """What an evaluation may be: a number of all parameters."""
  return {"pool0/norm": float(optax.tree.norm(state.pools[0].params))}


def run(name, folder, runner, dispatch=1):
  algorithm = build(name, runner)
  path = pathlib.Path(folder, name)
  path.parent.mkdir(parents=True, exist_ok=True)

  def summarize(state, evaluation):
    leaves = jax.tree.leaves(federation.params(state))
    np.savez(path.with_suffix(".npz"), *map(np.asarray, leaves))
    return {"algorithm": name, **evaluation}

  return training.run(
    algorithm._replace(step=runner.compile(algorithm.step, donate=(0,))),
    jax.random.key(0),
    lambda round: federation.make_plan(round, num_lanes=4),
    federation.make_data(),
    norms,
    rounds=ROUNDS,
    folder=logs.RunFolder(path, {"name": name}),
    summarize=summarize,
    eval_every=2,
    checkpoint_every=2,
    tensorboard=False,
    rounds_per_dispatch=dispatch,
    scanned_step=runner.compile(training.scanned(algorithm.step), donate=(0,)),
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
