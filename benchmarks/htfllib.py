"""hetfl's methods and HtFLlib's, on the same clients, models and batches.

  python -m benchmarks.htfllib --htfllib=DIR --data_dir=DIR --json=FILE

`--htfllib` is a checkout of HtFLlib (github.com/TsingZ0/HtFLlib), whose servers
and clients run unchanged in this process. Both sides have the same clients,
architectures, initial weights (HtFLlib's) and rates, and the same batches in
the same order: each client's images as stored, in full batches of 10, one pass
a round. The sides take turns round by round; rounds are timed without
evaluations, in wall-clock and CPU seconds, and ours are compiled beforehand.
HtFLlib's times include its files: its servers read images and models anew for
each client. `apart` is the distance of our clients' parameters from HtFLlib's,
as a share of the distance that HtFLlib's have moved.

Known differences; Local and LG-FedAvg are the same up to rounding:

* FML: HtFLlib divides its divergences by the number of classes, for which our
  rates and weights compensate; it does not hold their targets fixed, and clips
  gradients to a norm of 10.
* FD: HtFLlib's clients share logits, where the paper's share probabilities, and
  its cross-entropy takes them for probabilities; its mean is over all clients,
  the paper's over the others.
* FedProto: HtFLlib gathers prototypes while a client trains, and weights
  clients equally; ours are from the trained model, weighted by examples.
"""

import argparse
from collections.abc import Callable
import contextlib
import functools
import importlib
import os
import pathlib
import sys
import tempfile
import time
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.compare import chosen, provenance
from benchmarks.rounds import count
import hetfl
from hetfl import core
from hetfl.algorithms import fd, fedproto, lgfedavg, personal
from hetfl.algorithms.features import headed, logits_only, scored, with_parts
from hetfl.batches import Plan, rows_of
from hetfl.data.compared_images import ComparedImages, load_compared_images
from hetfl.models import vision
from hetfl.run import logs

FEATURES = 512
BATCH_SIZE = 10
# Filters of the 5x5 convolutions, and dense widths before the features; clients
# take these in turn, and FML's global model takes the first.
ARCHITECTURES = ((32, 64), ()), ((32,), ()), ((32, 64), (120,)), ((32,), (256,))


def _logits(outputs, server):
  return getattr(outputs, "logits", outputs)


class Method(NamedTuple):
  """A method's two sides.

  Attributes:
    server: HtFLlib's module and class.
    build: `(options, args, classes) -> algorithm`, ours.
    features: whether our clients' outputs are `Features`.
    scores: `(outputs, server) -> class scores` of ours.
    sent: HtFLlib's file with our server's first variables, if it has any.
    received: `(variables, server) -> variables` that clients are tested with.
    by_size: whether the server's mean weights examples, not clients, equally.
  """

  server: tuple[str, str]
  build: Callable[..., core.Algorithm]
  features: bool = False
  scores: Callable = _logits
  sent: str | None = None
  received: Callable = lambda variables, server: variables
  by_size: bool = False


def _fml(options, args, classes):
  """`alpha CE + (1 - alpha) / C KL`, as weights whose sum is one."""
  scale = args.alpha + (1 - args.alpha) / classes
  options |= dict(learning_rate=args.learning_rate * scale)
  options |= dict(alpha=args.alpha / scale, beta=args.alpha / scale)
  return hetfl.fml(global_model=options["clients"][0].model, **options)


def _fd(options, args, classes):
  return fd.fd(num_classes=classes, weight=args.lamda, **options)


def _fedproto(options, args, classes):
  numbers = dict(num_classes=classes, num_features=FEATURES)
  return fedproto.fedproto(weight=args.lamda, **numbers, **options)


METHODS = {
  "local": Method(("local", "Local"), lambda o, *_: personal.personal(**o)),
  "fml": Method(("fml", "FML"), _fml, sent="global_model"),
  "fd": Method(("fd", "FD"), _fd),
  "fedproto": Method(
    ("proto", "FedProto"), _fedproto, True, scores=fedproto.nearest
  ),
  "lgfedavg": Method(
    ("lg", "LG_FedAvg"),
    lambda o, *_: lgfedavg.lgfedavg(**o),
    True,
    sent="head",
    received=lambda variables, head: with_parts(variables, head=head),
    by_size=True,
  ),
}


def federation(args: argparse.Namespace, seed: int) -> ComparedImages:
  """The clients, with about `--examples` images, the same share of each's."""
  images = load_compared_images(
    args.dataset,
    num_clients=args.num_clients,
    partition_alpha=args.partition_alpha,
    partition_seed=seed,
    data_dir=args.data_dir,
  )
  (bank,), everyone = hetfl.put_banks(images.train), range(args.num_clients)
  step = max(1, len(bank["y"]) // args.examples)
  train, test = (
    hetfl.ClientPopulation.from_lists(
      bank, [clients.positions(k)[::step] for k in everyone]
    )
    for clients in (images.train, images.test)
  )
  return ComparedImages(train, test, images.num_classes)


def scaled(batch: core.Batch) -> core.Batch:
  """Images between -1 and 1."""
  return {"x": batch["x"] / 127.5 - 1.0, "y": batch["y"]}


def write(images: ComparedImages, folder: pathlib.Path) -> None:
  """Writes the images as HtFLlib reads them."""
  for name in ("train", "test"):
    (folder / name).mkdir(parents=True)
    clients = getattr(images, name)
    for k in range(len(clients)):
      own = {n: a[clients.positions(k)] for n, a in clients.bank.items()}
      data = {n: np.asarray(a) for n, a in scaled(own).items()}
      data["x"] = data["x"].transpose(0, 3, 1, 2)
      np.savez(folder / name / f"{k}.npz", data=np.array(data))


def start_theirs(method: Method, images: ComparedImages, args) -> Any:
  """HtFLlib's server and clients, which have written their first models."""
  height, _, channels = images.train.bank["x"].shape[1:]
  models = [
    f"CNN(in_features={channels}, height={height}, num_cov={len(filters)},"
    f" feature_dim={FEATURES}, hidden_dims={list(dense)})"
    for filters, dense in ARCHITECTURES
  ]
  options = argparse.Namespace(
    **dict(algorithm=method.server[1], dataset="ours", device="cpu", goal=""),
    **dict(models=models, feature_dim=FEATURES, models_folder_name=""),
    **dict(num_clients=args.num_clients, num_classes=images.num_classes),
    **dict(batch_size=BATCH_SIZE, local_learning_rate=args.learning_rate),
    **dict(global_rounds=args.rounds, local_epochs=1, eval_gap=1),
    **dict(alpha=args.alpha, beta=args.alpha, lamda=args.lamda),
    **dict(join_ratio=1.0, random_join_ratio=False, client_drop_rate=0.0),
    **dict(train_slow_rate=0.0, send_slow_rate=0.0, few_shot=0),
    **dict(time_select=False, time_threthold=0.0, top_cnt=0, auto_break=False),
    save_folder_name="temp",
  )
  module = importlib.import_module(f"flcore.servers.server{method.server[0]}")
  return getattr(module, method.server[1])(options, 0)


def converted(module: Any) -> list[np.ndarray]:
  """A PyTorch model's parameters in our form, in the order of our leaves.

  Args:
    module: convolutions, then dense layers.

  Returns:
    The bias and kernel of each layer.
  """
  leaves, channels = [], 0
  for layer in (m for m in module.modules() if hasattr(m, "weight")):
    kernel = layer.weight.detach().numpy().T
    if kernel.ndim == 4:  # [W, H, c, C] so far.
      kernel, channels = kernel.transpose(1, 0, 2, 3), kernel.shape[3]
    elif channels:  # Its inputs are [c, H, W] there, and [H, W, c] here.
      side = round((len(kernel) / channels) ** 0.5)
      planes = kernel.reshape(channels, side, side, -1)
      kernel, channels = planes.transpose(1, 2, 0, 3).reshape(kernel.shape), 0
    # Copies, so that PyTorch does not change them.
    leaves += [layer.bias.detach().numpy().copy(), kernel.copy()]
  return leaves


def like(tree: Any, leaves: Any) -> Any:
  """The leaves in the structure of a tree."""
  return jax.tree.unflatten(jax.tree.structure(tree), leaves)


class Ours:
  """Our side of a method, from HtFLlib's first weights.

  Args:
    method: the method.
    images: the clients.
    load: `(who, what) -> leaves`, one of HtFLlib's stored models.
    args: the flags.
  """

  def __init__(self, method: Method, images: ComparedImages, load, args):
    self._method, self._images = method, images
    bank, everyone = images.train.bank, range(args.num_clients)
    head = core.Model.from_flax(
      nn.Dense(images.num_classes), jnp.zeros((1, FEATURES))
    )
    models = []
    for filters, dense in ARCHITECTURES:
      net = vision.CNN(filters, 5, dense, FEATURES, padding="VALID")
      body = core.Model.from_flax(
        nn.Sequential([net, nn.relu]), jnp.zeros((1, *bank["x"].shape[1:]))
      )
      model = headed(body, head)
      models.append(model if method.features else logits_only(model))
    of_client = [models[k % len(models)] for k in everyone]
    options = dict(
      clients=[hetfl.Client(model=m, transform=scaled) for m in of_client],
      learning_rate=args.learning_rate,
      optimizer=optax.sgd,
      engine=hetfl.Threads(),
    )
    self._algorithm = method.build(options, args, images.num_classes)

    state = jax.jit(self._algorithm.init)(jax.random.key(0))
    groups, self._evaluators = [], []
    for group in state.clients:
      own = group.learner.variables
      theirs = zip(*[load(f"Client_{k}", "model") for k in group.clients])
      own = own._replace(params=like(own.params, map(jnp.stack, theirs)))
      learner = group.learner._replace(variables=own)
      groups.append(group.replace(learner=learner))
      evaluator = hetfl.ClientEvaluator(
        scored(of_client[group.clients[0]], method.scores),
        images.test.take(group.clients),
        transform=scaled,
        engine=options["engine"],
      )
      self._evaluators.append(evaluator)
    server = state.server
    if method.sent:
      params = like(server.params, load("Server", method.sent))
      server = server._replace(params=params)
    self.state = state.replace(clients=tuple(groups), server=server)

    full = lambda at: at[: len(at) // BATCH_SIZE * BATCH_SIZE]
    orders = [full(images.train.positions(k)) for k in everyone]
    self._batches = rows_of(
      [at.reshape(-1, BATCH_SIZE) for at in orders],
      everyone,
      images.train.sizes if method.by_size else np.ones(args.num_clients),
    )

  def next(self, round: int) -> core.State:
    """The state after the next round, once it is ready."""
    plan = Plan(np.int32(round), {"train": self._batches})
    data = {"train": self._images.train.bank}
    state, _ = self._algorithm.step(self.state, plan, data)
    return jax.block_until_ready(state)

  def variables(self) -> list[tuple[core.Variables, Any]]:
    """For each group, its clients' models and what the server sent to each."""
    found = []
    for group in self.state.clients:
      number = len(group.clients)
      sent = jax.tree.map(
        lambda a, n=number: jnp.stack([a] * n), self.state.server
      )
      found.append((self._method.received(group.learner.variables, sent), sent))
    return found

  def accuracy(self) -> float:
    """The share of all clients' test images that are classified correctly."""
    right, sizes = 0.0, self._images.test.sizes
    for group, evaluator, (own, sent) in zip(
      self.state.clients, self._evaluators, self.variables()
    ):
      found = evaluator(core.Variables(own, sent), own=True)["accuracy"]
      right += float(np.sum(found * sizes[list(group.clients)]))
    return right / float(np.sum(sizes))

  def apart(self, theirs: list, first: list) -> float:
    """Our clients' distance from theirs, as a share of how far those moved."""
    gap = way = 0.0
    for group, (own, _) in zip(self.state.clients, self.variables()):
      for row, k in enumerate(group.clients):
        ours = jax.tree.leaves(own.params)
        for a, b, c in zip(ours, theirs[k], first[k]):
          gap += float(np.sum((a[row] - b) ** 2))
          way += float(np.sum((c - b) ** 2))
    return (gap / way) ** 0.5 if way else gap


def compare(name: str, images: ComparedImages, args) -> dict[str, Any]:
  """Runs a method's two sides in turns; ours run in HtFLlib's tests.

  Args:
    name: the method's.
    images: the clients.
    args: the flags.

  Returns:
    The method's entry in the JSON. Accuracies and distances are from before the
    first round and after each.
  """
  from flcore.clients.clientbase import load_item

  theirs = start_theirs(METHODS[name], images, args)
  folder, everyone = theirs.save_folder_name, range(args.num_clients)
  load = lambda who, what: converted(load_item(who, what, folder))
  models = lambda: [load(f"Client_{k}", "model") for k in everyone]
  ours, first = Ours(METHODS[name], images, load, args), models()
  clock = lambda: np.array([time.perf_counter(), time.process_time()])
  spent = {"ours": [], "theirs": []}  # In each round, by wall and CPU.
  began = clock()
  ours.next(1)
  result = {"method": name, "first_call_s": float((clock() - began)[0])}
  found = {n: [] for n in ("accuracy", "their_accuracy", "apart")}
  evaluate = theirs.evaluate

  def turn():
    nonlocal began
    done = len(found["accuracy"])
    if done:
      spent["theirs"].append(clock() - began)
    try:
      evaluate()
    except ValueError as error:  # For example NaN, which scikit-learn refuses.
      result["their_error"] = f"round {done}: {error}".splitlines()[0]
      raise StopIteration from error
    found["their_accuracy"].append(float(theirs.rs_test_acc[-1]))
    found["accuracy"].append(ours.accuracy())
    found["apart"].append(ours.apart(models(), first))
    if done == args.rounds:
      raise StopIteration
    began = clock()
    ours.state = ours.next(done + 1)
    spent["ours"].append(clock() - began)
    began = clock()

  theirs.evaluate = turn
  with contextlib.suppress(StopIteration):
    theirs.train()
  a, b = np.array(spent["ours"]), np.array(spent["theirs"])  # Equal in number.
  result |= found
  for i, what in enumerate(("seconds", "cpu_seconds")):
    result |= {what: a[:, i].tolist(), f"their_{what}": b[:, i].tolist()}
  ratio, cpu_ratio = np.median(b / a, axis=0).tolist()
  return result | {
    "rounds_per_s": float(1 / np.median(a[:, 0])),
    "their_rounds_per_s": float(1 / np.median(b[:, 0])),
    "ratio": ratio,
    "cpu_ratio": cpu_ratio,
  }


def main() -> None:
  """Runs the methods, prints a table and writes JSON."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--htfllib", required=True, help="a checkout of HtFLlib")
  parser.add_argument("--only", help="names or their beginnings, with commas")
  parser.add_argument("--dataset", default="cifar10")
  parser.add_argument("--data_dir", default=os.environ.get("HETFL_DATA_DIR"))
  parser.add_argument("--partition_alpha", type=float, default=0.1)
  parser.add_argument("--num_clients", type=count, default=20)
  parser.add_argument("--examples", type=count, default=12_000)
  parser.add_argument("--rounds", type=count, default=10)
  parser.add_argument("--seeds", default="0", help="of partitions")
  parser.add_argument("--learning_rate", type=float, default=0.01)
  parser.add_argument(
    "--alpha", type=float, default=0.5, help="HtFLlib's alpha and beta of FML"
  )
  parser.add_argument(
    "--lamda", type=float, default=1.0, help="of FD and FedProto"
  )
  parser.add_argument("--json", help="file for the results")
  args = parser.parse_args()
  # Otherwise PyTorch's threads hold the cores while waiting for each other.
  os.environ.setdefault("OMP_WAIT_POLICY", "passive")
  import torch

  torch.set_num_threads(hetfl.Threads().num_threads)
  # HtFLlib stores whole models, which newer versions refuse to load.
  torch.load = functools.partial(torch.load, weights_only=False)
  sys.path.insert(0, str(pathlib.Path(args.htfllib, "system").resolve()))
  file = args.json and pathlib.Path(args.json).resolve()
  named = ("dataset", "partition_alpha", "num_clients", "examples", "rounds")
  named += ("learning_rate", "alpha", "lamda")
  origin = provenance() | {"settings": {n: getattr(args, n) for n in named}}
  results = []
  print(
    f"{'method':9} seed  last % (HtFLlib)  best % (HtFLlib)"
    "  rounds/s (HtFLlib)  ratio, CPU  apart: first, last round"
  )
  for seed in map(int, args.seeds.split(",")):
    images = federation(args, seed)
    for name in chosen(args.only, METHODS):
      with tempfile.TemporaryDirectory() as root:
        write(images, pathlib.Path(root, "dataset", "ours"))
        pathlib.Path(root, "system").mkdir()
        with contextlib.chdir(pathlib.Path(root, "system")):
          torch.manual_seed(seed)
          with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
            row = {"seed": seed} | compare(name, images, args)
      results.append(row | origin)
      a, b = (
        100 * np.array(row[n][1:]) for n in ("accuracy", "their_accuracy")
      )
      print(
        f"{name:9} {seed:4}  {a[-1]:6.2f} ({b[-1]:6.2f})"
        f"    {a.max():6.2f} ({b.max():6.2f})    {row['rounds_per_s']:7.3f}"
        f" ({row['their_rounds_per_s']:6.3f})   {row['ratio']:5.2f},"
        f" {row['cpu_ratio']:5.2f}  {row['apart'][1]:.1e},"
        f" {row['apart'][-1]:.1e} {row.get('their_error', '')}",
        flush=True,
      )
      if file:
        logs.write_json(file, results)


if __name__ == "__main__":
  main()
