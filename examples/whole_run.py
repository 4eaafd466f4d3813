"""A whole comparison on your own data: seeds, checkpoints, curves, a table.

  python examples/whole_run.py

Scikit-learn's handwritten digits (`pip install scikit-learn` first) are split
among thirty clients by a Dirichlet(0.3) partition, so that each has a few
classes. All clients train a linear model, and a third of them also a network;
the two models learn with and without codistillation, with three seeds each.
Every run has its own folder under `runs/whole_run`. Running the command again
resumes a run that was stopped; a folder with other settings or data is refused.
"""

from collections.abc import Mapping
import functools
import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets

import hetfl
from hetfl.data import files, partition
from hetfl.run import charts, logs, report, training

# Everything that changes a result, except the algorithm and the seed.
SETTINGS = dict(
  rounds=60,
  eval_every=5,
  learning_rate=0.3,
  server_lr=0.01,
  distill_lr=3e-3,
  alpha=0.8,
  concentration=0.3,
  plan=dict(
    clients_per_round=5,
    batch_size=10,
    distill_steps=8,
    distill_batch_size=50,
  ),
)
MODELS = {
  "linear": nn.Dense(10),
  "network": nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)]),
}


def main(
  seeds: int = 3,
  workdir: str = "runs/whole_run",
  settings: Mapping[str, Any] = SETTINGS,
) -> dict[str, np.ndarray]:
  """Runs both algorithms; returns each one's test accuracy, `[seed, model]`."""
  x, y = datasets.load_digits(return_X_y=True)
  bank = {"x": (x / 16).astype(np.float32), "y": y.astype(np.int32)}
  order = np.random.default_rng(0).permutation(len(x))
  train, public, test = np.split(order, [1000, 1400])
  held = partition.dirichlet(
    y[train], num_clients=30, seed=0, alpha=settings["concentration"]
  )
  everyone = hetfl.ClientPopulation.from_lists(bank, [train[p] for p in held])
  clients = {"linear": everyone, "network": everyone.take(range(10))}
  public = hetfl.Subset(bank, public)  # Its labels are not used.
  record = files.record([everyone, public, hetfl.Subset(bank, test)])
  (on_device,) = hetfl.put_banks(everyone)
  data = dict.fromkeys((*clients, "distill"), on_device)

  engine = hetfl.default_engine()
  pools = [
    hetfl.Pool(
      hetfl.Model.from_flax(module, jnp.zeros((1, x.shape[1]))),
      name,
      learning_rate=settings["learning_rate"],
      server_lr=settings["server_lr"],
    )
    for name, module in MODELS.items()
  ]
  distiller = hetfl.Distiller(learning_rate=settings["distill_lr"])
  options = dict(rounds=settings["rounds"], engine=engine)
  algorithms = {
    "FedAvg": hetfl.fedavg(pools, **options),
    "MergedCodist": hetfl.merged_codist(
      pools, distiller, alpha=settings["alpha"], **options
    ),
  }
  evaluator = hetfl.Evaluator(
    [pool.model for pool in pools],
    {"test": hetfl.Subset(on_device, test)},
    engine=engine,
  )

  def plan(name, seed, round):
    distill = public if name == "MergedCodist" else None
    return hetfl.plan_round(
      clients, distill, seed=seed, round=round, **settings["plan"]
    )

  def evaluate(state):
    results = evaluator([learner.variables for learner in state.server])
    return {
      f"{name}/test_accuracy": result["test_accuracy"]
      for name, result in zip(MODELS, results)
    }

  rows = {}
  for name, algorithm in algorithms.items():
    for seed in range(seeds):
      config = {"algorithm": name, "seed": seed, **settings}
      folder = logs.RunFolder(pathlib.Path(workdir, f"{name}-{seed}"), config)
      folder.keep({"data.json": record})
      training.run(
        algorithm,
        jax.random.key(seed),
        functools.partial(plan, name, seed),
        data,
        evaluate,
        engine=engine,
        rounds=settings["rounds"],
        folder=folder,
        summarize=lambda state, evaluation: evaluation,
        eval_every=settings["eval_every"],
        tensorboard=False,
      )
      rows.setdefault(name, []).append(logs.read_rows(folder.metrics))
  charts.curves(rows, pathlib.Path(workdir, "curves.png"))
  last = lambda rows: [rows[-1][f"{name}/test_accuracy"] for name in MODELS]
  accuracies = {name: np.array([*map(last, of)]) for name, of in rows.items()}
  for name, each in accuracies.items():
    for model, of_seeds in zip(MODELS, each.T.tolist()):
      spread = report.cell(of_seeds, "{:.1f}", factor=100)
      print(f"{name:12} {model:8} {spread} %")
  return accuracies


if __name__ == "__main__":
  main()
