"""One round of federated averaging in FedJAX and in PyTorch, to time.

Each function here does its set-up, compilation and warm-up, and returns a
callable that runs one more round, or a given number, and blocks until they are
done. The work is the same for all: 60 clients of 100 images (uint8,
24x24x3), 100 classes, 20 clients a round, one epoch in batches of 20, client
SGD at .05, server Adam at .005; a CNN of three 3x3 convolutions and dense
layers.

    python -m benchmarks.peers --peer fedjax --backend jit --size small

FedJAX's `pmap` spreads clients over devices; a CPU is only one device unless
`XLA_FLAGS=--xla_force_host_platform_device_count=2` is set.

Reference: Ro et al., "FedJAX: Federated learning simulation with JAX", 2021;
the CNNs of Lichtarge et al., 2023, appendix E.
"""

import argparse
from collections.abc import Callable, Sequence
import statistics
import time
from typing import Any

import numpy as np

NUM_CLIENTS = 60
EXAMPLES = 100
SIDE = 24
NUM_CLASSES = 100
COHORT = 20
BATCH_SIZE = 20
CLIENT_LR = 0.05
SERVER_LR = 0.005
SERVER_EPS = 1e-5

# Filters, dense widths and numbers of parameters.
SIZES = {
  "small": ((16, 32, 32), (64, 128), 109_348),
  "large": ((32, 64, 64), (128, 256), 410_084),
}


def synthetic(seed: int = 0) -> list[dict[str, np.ndarray]]:
  """Random images and labels of each client, the same for all peers."""
  rng = np.random.default_rng(seed)
  return [
    {
      "x": rng.integers(0, 256, (EXAMPLES, SIDE, SIDE, 3), dtype=np.uint8),
      "y": rng.integers(0, NUM_CLASSES, EXAMPLES).astype(np.int32),
    }
    for _ in range(NUM_CLIENTS)
  ]


def _cohort(rng: np.random.Generator) -> np.ndarray:
  """The clients of a round."""
  return rng.choice(NUM_CLIENTS, COHORT, replace=False)


# --- FedJAX ----------------------------------------------------------------


def _shims() -> None:
  """Gives FedJAX 0.0.17 (2023) the names that JAX and NumPy have dropped.

  Call it before importing FedJAX. Names that still exist are not replaced. Of
  the names added, only the two `device_put_*` are in the timed path.
  """
  import jax
  import jax.numpy as jnp

  def put_sharded(shards, devices):
    mesh = jax.sharding.Mesh(np.array(devices), ("client",))
    spec = jax.sharding.PartitionSpec("client")
    sharding = jax.sharding.NamedSharding(mesh, spec)

    def put(*leaves):
      on_host = not any(isinstance(leaf, jax.Array) for leaf in leaves)
      stacked = (np if on_host else jnp).stack(leaves)
      return jax.device_put(stacked, sharding)

    return jax.tree.map(put, *shards)

  def put_replicated(tree, devices):
    return put_sharded([tree] * len(devices), devices)

  for module, name, value in (
    (jax, "tree_map", jax.tree.map),  # Used by every algorithm.
    (jnp, "NINF", -jnp.inf),  # Used by the language models, at import.
    (
      np,
      "issctype",  # Used by the serialization, at import.
      lambda t: isinstance(t, type) and issubclass(t, np.generic),
    ),
    (jax, "device_put_sharded", put_sharded),  # Used by the pmap backend.
    (jax, "device_put_replicated", put_replicated),
  ):
    if not hasattr(module, name):  # Removed names raise AttributeError.
      setattr(module, name, value)


def _fedjax_backend(name: str) -> Any:
  """A `for_each_client` backend of FedJAX, fixed for current JAX versions."""
  import fedjax
  from fedjax.core import for_each_client
  import jax

  if name != "pmap":
    if name not in ("jit", "debug"):
      raise ValueError(f"backend {name!r} is none of 'jit', 'pmap', 'debug'")
    with fedjax.for_each_client_backend(name):
      return fedjax.get_for_each_client_backend()

  class Pmap(for_each_client.ForEachClientPmapBackend):
    """The pmap backend, with outputs of the right rank.

    FedJAX splits the outputs by `addressable_data(i)`, which used to drop the
    device axis and now keeps it with length one. Unless removed, this axis is
    silently added to each parameter.
    """

    def __call__(self, client_init, client_step, client_final):
      run = super().__call__(client_init, client_step, client_final)
      squeeze = jax.jit(lambda tree: jax.tree.map(lambda a: a[0], tree))

      def squeezed(shared_input, clients):
        for client_id, output, results in run(shared_input, clients):
          yield client_id, squeeze(output), squeeze(results)

      return squeezed

  return Pmap()


def fedjax_round(
  backend: str = "jit",
  filters: Sequence[int] = SIZES["small"][0],
  dense: Sequence[int] = SIZES["small"][1],
  *,
  seed: int = 0,
  warm_up: int = 2,
) -> Callable[[], Any]:
  """FedJAX 0.0.17's own federated averaging.

  Args:
    backend: backend of FedJAX's `for_each_client`: 'jit', 'pmap', or 'debug',
      which compiles nothing.
    filters: numbers of filters of the three convolutions.
    dense: widths of the dense layers before the logits.
    seed: for the data, the initial parameters and the clients' batches.
    warm_up: rounds run before returning, which compile.

  Returns:
    A callable that runs rounds and returns the server's parameters; its
    attribute `num_params` is their number.
  """
  _shims()
  import fedjax
  import haiku as hk
  import jax
  import jax.numpy as jnp

  def logits(batch):
    x = batch["x"].astype(jnp.float32) / 255
    for i, width in enumerate(filters):
      x = hk.Conv2D(width, 3)(x)
      if i < 2:
        x = hk.max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
      x = jax.nn.relu(x)
    x = hk.Flatten()(x)
    for width in dense:
      x = jax.nn.relu(hk.Linear(width)(x))
    return hk.Linear(NUM_CLASSES)(x)

  def loss(batch, z):
    labels = batch["y"][:, None]
    return -jnp.take_along_axis(jax.nn.log_softmax(z), labels, 1)[:, 0]

  clients = synthetic(seed)
  sample = {name: array[:1] for name, array in clients[0].items()}
  model = fedjax.create_model_from_haiku(hk.transform(logits), sample, loss)
  # The backend is read when the algorithm is made, not when it is run.
  with fedjax.for_each_client_backend(_fedjax_backend(backend)):
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
      fedjax.model_grad(model),
      fedjax.optimizers.sgd(CLIENT_LR),
      fedjax.optimizers.adam(SERVER_LR, eps=SERVER_EPS),
      fedjax.ShuffleRepeatBatchHParams(
        batch_size=BATCH_SIZE, num_epochs=1, seed=seed
      ),
    )
  state = algorithm.init(model.init(jax.random.PRNGKey(seed)))
  shapes = jax.tree.map(jnp.shape, state.params)
  datasets = [fedjax.ClientDataset(client) for client in clients]
  rng = np.random.default_rng(seed + 1)
  num_round = 0

  def run(number: int = 1) -> Any:
    nonlocal state, num_round
    for _ in range(number):
      key = jax.random.fold_in(jax.random.PRNGKey(seed), num_round)
      keys = np.asarray(jax.random.split(key, COHORT))
      chosen = _cohort(rng)
      state, _ = algorithm.apply(
        state, [(str(k), datasets[k], keys[i]) for i, k in enumerate(chosen)]
      )
      num_round += 1
    return jax.block_until_ready(state.params)

  run(warm_up)
  if jax.tree.map(jnp.shape, state.params) != shapes:
    raise RuntimeError(
      f"FedJAX's backend {backend!r} changed the shapes of the parameters on "
      f"JAX {jax.__version__}: its rounds are no federated averaging"
    )
  run.num_params = sum(a.size for a in jax.tree.leaves(state.params))
  return run


# --- PyTorch ---------------------------------------------------------------


def torch_device() -> str:
  """The device on which PyTorch trains, of the same kind as JAX's.

  Raises:
    ImportError: JAX has an accelerator, but this PyTorch does not support it.
  """
  import jax
  import torch

  if jax.default_backend() == "cpu":
    return "cpu"
  if not torch.cuda.is_available():
    raise ImportError(f"no PyTorch for {jax.devices()[0].device_kind}")
  # As ours.
  tf32 = jax.config.jax_default_matmul_precision == "tensorfloat32"
  torch.backends.cudnn.allow_tf32 = tf32
  torch.backends.cuda.matmul.allow_tf32 = tf32
  return "cuda"


def waited(one_round: Callable[[], Any], device: str) -> Callable[..., Any]:
  """Rounds of PyTorch that the host waits for together.

  Args:
    one_round: runs a round.
    device: where it runs.

  Returns:
    A callable that runs a given number of rounds (by default one), waits for
    them and returns what the last one returned.
  """
  import torch

  def run(number: int = 1) -> Any:
    result = None
    for _ in range(number):
      result = one_round()
    if torch.device(device).type == "cuda":
      torch.cuda.synchronize()
    return result

  return run


def torch_round(
  filters: Sequence[int] = SIZES["small"][0],
  dense: Sequence[int] = SIZES["small"][1],
  *,
  channels_last: bool = False,
  device: str | None = None,
  seed: int = 0,
  warm_up: int = 2,
) -> Callable[[], Any]:
  """A plain PyTorch loop over the clients, written with care.

  One module serves all clients; the images stay uint8 on the device and are
  converted to floats batch by batch. PyTorch chooses the number of threads.

  Args:
    filters: numbers of filters of the three convolutions.
    dense: widths of the dense layers before the logits.
    channels_last: whether to keep images and kernels channels last.
    device: where to train; by default `torch_device()`.
    seed: for the data, the initial parameters and the clients' batches.
    warm_up: rounds run before returning.

  Returns:
    A callable that runs rounds and returns the server's parameters; its
    attribute `num_params` is their number.
  """
  import torch
  from torch import nn

  device = device or torch_device()
  torch.manual_seed(seed)
  layers: list[nn.Module] = []
  channels = 3
  for i, width in enumerate(filters):
    layers.append(nn.Conv2d(channels, width, 3, padding=1))
    if i < 2:
      layers.append(nn.MaxPool2d(2))
    layers.append(nn.ReLU())
    channels = width
  layers.append(nn.Flatten())
  features = (SIDE // 4) ** 2 * channels
  for width in dense:
    layers += [nn.Linear(features, width), nn.ReLU()]
    features = width
  layers.append(nn.Linear(features, NUM_CLASSES))
  layout = torch.channels_last if channels_last else torch.contiguous_format
  model = nn.Sequential(*layers).to(device, memory_format=layout)
  model.train()

  data = []
  for client in synthetic(seed):
    x = torch.from_numpy(client["x"]).permute(0, 3, 1, 2)
    y = torch.from_numpy(client["y"]).long()
    data.append((x.contiguous(memory_format=layout).to(device), y.to(device)))

  local = list(model.parameters())
  server = [nn.Parameter(p.detach().clone()) for p in local]
  client_optimizer = torch.optim.SGD(local, lr=CLIENT_LR)
  server_optimizer = torch.optim.Adam(server, lr=SERVER_LR, eps=SERVER_EPS)
  loss_fn = nn.CrossEntropyLoss()
  rng = np.random.default_rng(seed + 1)

  def train(x: torch.Tensor, y: torch.Tensor) -> None:
    order = torch.randperm(len(y)).to(device)
    for index in order.split(BATCH_SIZE):
      images = x[index].to(memory_format=layout).float().div_(255)
      client_optimizer.zero_grad()
      loss_fn(model(images), y[index]).backward()
      client_optimizer.step()

  def one_round() -> Any:
    deltas = [torch.zeros_like(p) for p in server]
    total = 0
    for k in _cohort(rng):
      x, y = data[k]
      with torch.no_grad():
        for p, s in zip(local, server):
          p.copy_(s)
      train(x, y)
      with torch.no_grad():
        for d, s, p in zip(deltas, server, local):
          d.add_(s - p, alpha=len(y))
      total += len(y)
    for s, d in zip(server, deltas):
      s.grad = d.div_(total)
    server_optimizer.step()
    return server

  run = waited(one_round, device)
  run(warm_up)
  run.num_params = sum(p.numel() for p in server)
  return run


def main(argv: Sequence[str] | None = None) -> None:
  """Times a peer and prints the seconds of its rounds."""
  parser = argparse.ArgumentParser(description=main.__doc__)
  parser.add_argument("--peer", choices=("fedjax", "torch"), required=True)
  parser.add_argument("--size", choices=tuple(SIZES), default="small")
  parser.add_argument("--backend", default="jit", help="of FedJAX")
  parser.add_argument("--channels-last", action="store_true", help="PyTorch")
  parser.add_argument("--rounds", type=int, default=5)
  args = parser.parse_args(argv)
  filters, dense, count = SIZES[args.size]
  if args.peer == "fedjax":
    run = fedjax_round(args.backend, filters, dense)
  else:
    run = torch_round(filters, dense, channels_last=args.channels_last)
  if run.num_params != count:
    raise RuntimeError(f"{run.num_params} parameters instead of {count}")
  seconds = []
  for _ in range(args.rounds):
    start = time.perf_counter()
    run()
    seconds.append(time.perf_counter() - start)
  print(
    f"{args.peer} {args.size}: {count:,} parameters, "
    f"median {statistics.median(seconds):.3f} s, min {min(seconds):.3f} s, "
    f"rounds {[round(s, 3) for s in seconds]}"
  )


if __name__ == "__main__":
  main()
