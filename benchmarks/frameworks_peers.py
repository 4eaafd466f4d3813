"""Federated averaging in pfl-research and in Flower, for `frameworks.py`.

`frameworks.py` runs this file with each peer's interpreter, without hetfl:

  python frameworks_peers.py SYSTEM FOLDER

The folder holds `settings.json`; `x.npy` and `y.npy`, all training examples;
`orders.npy`, which of them each client trains on in each round, in order; and
`initial.npz`, the initial weights. The final weights are written there as
`SYSTEM.npz`. SYSTEM is `flower`, or any name for pfl-research.
"""

import importlib.metadata
import json
import os
import pathlib
import platform
import sys
import time
import types
from typing import Any

import numpy as np


class Turns:
  """Times iterations; each turn of them waits for a line on stdin.

  Before each turn, a line of JSON on stdout gives the seconds of the previous
  turn's iterations. Whatever else is printed goes to stderr.

  Args:
    number: iterations in a turn.
    *packages: packages whose versions each line gives too.
  """

  def __init__(self, number: int, *packages: str):
    self._replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    self._number, self._seconds, self._began = number, [], None
    self._versions = {"python": platform.python_version()}
    self._versions |= {p: importlib.metadata.version(p) for p in packages}

  def next(self) -> None:
    """Must be called before the first iteration and after each."""
    if self._began is not None:
      self._seconds.append(time.perf_counter() - self._began)
    if self._began is None or len(self._seconds) == self._number:
      reply = {"seconds": self._seconds, "versions": self._versions}
      print(json.dumps(reply), file=self._replies, flush=True)
      self._seconds = []
      if not sys.stdin.readline():
        raise EOFError("nobody asks for another turn")
    self._began = time.perf_counter()


class Work:
  """The training data and weights, for PyTorch.

  Args:
    folder: see the module's docstring.
  """

  def __init__(self, folder: pathlib.Path):
    self._folder = folder
    self.settings = json.loads((folder / "settings.json").read_text())
    # Only images that are used are read.
    self._x, self._y, self.orders = (
      np.load(folder / f"{name}.npy", mmap_mode="r")
      for name in ("x", "y", "orders")
    )

  def client(self, round: int, place: int) -> tuple[Any, Any]:
    """Images `float32[n, H, W, c]` and labels of a client in a round."""
    import torch

    own = self.orders[round, place]
    return torch.from_numpy(self._x[own]), torch.from_numpy(self._y[own])

  def model(self) -> Any:
    """pfl-research's `simple_cnn`, with PyTorch's weights."""
    from torch import nn

    of_maps, of_features = self.settings["dropout"]
    classes = self.settings["classes"]
    return nn.Sequential(
      *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
      *(nn.MaxPool2d(2), nn.Dropout(of_maps), nn.Flatten()),
      *(nn.Linear(14 * 14 * 64, 128), nn.ReLU(), nn.Dropout(of_features)),
      nn.Linear(128, classes),
    )

  def started(self) -> Any:
    """The model with the initial weights."""
    import torch

    model, weights = self.model(), np.load(self._folder / "initial.npz")
    with torch.no_grad():
      for parameter, name in zip(model.parameters(), weights, strict=True):
        parameter.copy_(torch.from_numpy(weights[name]))
    return model

  def finish(self, system: str, model: Any) -> None:
    """Writes the final weights."""
    weights = [p.detach().numpy() for p in model.parameters()]
    np.savez(self._folder / f"{system}.npz", *weights)


def loss(model: Any, x: Any, y: Any, eval: bool = False) -> Any:
  """The mean cross-entropy of a batch."""
  import torch

  model.train(not eval)
  return torch.nn.functional.cross_entropy(model(x.permute(0, 3, 1, 2)), y)


def run_pfl(work: Work, name: str) -> None:
  """Trains like pfl-research's CIFAR-10 benchmark, without its evaluations."""
  from pfl.aggregate.simulate import SimulatedBackend
  from pfl.aggregate.weighting import WeightByUser
  from pfl.algorithm.base import NNAlgorithmParams
  from pfl.algorithm.federated_averaging import FederatedAveraging
  from pfl.callback.base import TrainingProcessCallback
  from pfl.data import FederatedDataset
  from pfl.data.dataset import Dataset
  from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
  from pfl.metrics import Metrics, Weighted
  from pfl.model.pytorch import PyTorchModel
  import torch

  settings, net = work.settings, work.started()
  rounds, cohort, _ = work.orders.shape
  first = os.environ.get("RANK", "0") == "0"  # Of several processes.
  turns = first and Turns(settings["turn"], "pfl", "torch", "numpy")

  class NextTurn(TrainingProcessCallback):
    def on_train_begin(self, *, model):
      turns.next()
      return Metrics()

    def after_central_iteration(
      self, aggregate_metrics, model, *, central_iteration
    ):
      turns.next()
      return False, Metrics()

  def metrics(model, x, y, eval=True):
    return {"loss": Weighted(loss(model, x, y, eval).item() * len(y), len(y))}

  net.loss = types.MethodType(loss, net)
  net.metrics = types.MethodType(torch.no_grad()(metrics), net)
  clients = FederatedDataset(
    lambda place: Dataset(work.client(*divmod(place, cohort))),
    iter(range(rounds * cohort)).__next__,
  )
  FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
      central_num_iterations=rounds,
      evaluation_frequency=rounds,  # The first always has one.
      train_cohort_size=cohort,
      val_cohort_size=0,
    ),
    backend=SimulatedBackend(clients, clients, [WeightByUser()]),
    model=PyTorchModel(
      net,
      local_optimizer_create=torch.optim.SGD,
      central_optimizer=torch.optim.SGD(net.parameters(), 1.0),
    ),
    model_train_params=NNTrainHyperParams(
      local_learning_rate=settings["learning_rate"],
      local_num_epochs=1,
      local_batch_size=settings["batch_size"],
    ),
    model_eval_params=NNEvalHyperParams(local_batch_size=None),
    callbacks=[NextTurn()] if first else [],
  )
  if first:
    work.finish(name, net)


def run_flower(work: Work, folder: pathlib.Path) -> None:
  """Trains like Flower's guide to simulation: a client on each core."""
  from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
  from flwr.clientapp import ClientApp
  from flwr.serverapp import ServerApp
  from flwr.serverapp.strategy import FedAvg
  from flwr.simulation import run_simulation
  import torch

  rounds, cohort, _ = work.orders.shape
  turns = Turns(work.settings["turn"], "flwr", "ray", "torch", "numpy")
  client_app, server_app = ClientApp(), ServerApp()

  @client_app.train()
  def train(message, context):
    work = Work(folder)
    model, settings = work.model(), work.settings
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = work.client(
      message.content["config"]["server-round"] - 1,
      context.node_config["partition-id"],
    )
    optimizer = torch.optim.SGD(model.parameters(), settings["learning_rate"])
    size = settings["batch_size"]
    for batch in zip(x.split(size), y.split(size)):
      optimizer.zero_grad()
      loss(model, *batch).backward()
      optimizer.step()
    content = {
      "arrays": ArrayRecord(model.state_dict()),
      "metrics": MetricRecord({"num-examples": len(y)}),
    }
    return Message(content=RecordDict(content), reply_to=message)

  @server_app.main()
  def main(grid, context):
    model = work.started()
    result = FedAvg(
      fraction_evaluate=0.0,
      min_train_nodes=cohort,
      min_available_nodes=cohort,
    ).start(
      grid=grid,
      initial_arrays=ArrayRecord(model.state_dict()),
      num_rounds=rounds,
      # Called before the first round and after each.
      evaluate_fn=lambda *_: turns.next(),
    )
    model.load_state_dict(result.arrays.to_torch_state_dict())
    work.finish("flower", model)

  run_simulation(
    server_app,
    client_app,
    num_supernodes=cohort,
    backend_config={
      "init_args": {"num_cpus": len(os.sched_getaffinity(0))},
      "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    },
  )


if __name__ == "__main__":
  root = pathlib.Path(sys.argv[2])
  if sys.argv[1] == "flower":
    run_flower(Work(root), root)
  else:
    run_pfl(Work(root), sys.argv[1])
