"""The parts of `codist.py` that are specific to image classifiers."""

from absl import flags
import common
import jax
import jax.numpy as jnp
import own_models
import run_flags

from hetfl import augment
from hetfl.data import codist_images
from hetfl.engine import batch_size_or_default
from hetfl.models import vision

FLAGS = flags.FLAGS
CNNS = {"small_cnn": vision.small_cnn, "large_cnn": vision.large_cnn}
MODELS = tuple(CNNS)

# The flags' defaults. For CIFAR they are from the paper's appendix C or, where
# it gives none, from the best of a few runs (BUILD_NOTES.md).
_CIFAR = dict(
  recipe="pad32",
  high_capacity_clients=47,
  rounds=1500,
  eval_every=50,
  clients_per_round=20,
  client_batch_size=20,
  client_lr=0.05,
  server_lr=(0.005, 0.002),
  distill_lr=(1e-3, 1e-3),
  distill_epsilon=1e-8,
  distill_steps=200,
  distill_batch_size=128,
  codist_period=200,
  merge_alpha=0.9,
  merge_every=1,
)
_CIFARS = {
  "fedavg": _CIFAR,
  "periodic": _CIFAR | dict(client_lr=0.02),
  "merged": _CIFAR
  | dict(
    distill_lr=(5e-3, 5e-3),
    distill_epsilon=1e-3,
    distill_steps=32,
    distill_batch_size=32,
    merge_alpha=0.95,
  ),
}
_DIGITS = dict(
  recipe="digits8",
  high_capacity_clients=8,
  rounds=120,
  eval_every=10,
  clients_per_round=6,
  client_batch_size=5,
  client_lr=0.05,
  server_lr=(0.01, 0.01),
  distill_lr=(1e-3, 1e-3),
  distill_epsilon=1e-8,
  distill_steps=10,  # for all algorithms, so that they share programs
  distill_batch_size=64,
  codist_period=10,
  merge_alpha=0.8,
  merge_every=1,
)
# For images of which nothing is known; "crop" flips none, since they may be
# letters.
_NPZ = _CIFAR | dict(
  recipe="crop",
  high_capacity_clients=None,
  rounds=300,
  eval_every=10,
  clients_per_round=10,
  distill_steps=32,
  codist_period=20,
)
DEFAULTS = {
  "cifar100": _CIFARS,
  "cifar10": _CIFARS,
  "digits": dict.fromkeys(("fedavg", "periodic", "merged"), _DIGITS),
  "npz": dict.fromkeys(("fedavg", "periodic", "merged"), _NPZ),
}


def define_flags() -> None:
  """Defines the flags that only image runs have."""
  run_flags.define_npz_flag()
  flags.DEFINE_enum(
    "recipe",
    None,
    sorted((*augment.RECIPES, *augment.FITTED)),
    "Image size, cropping and padding: one of fixed size and statistics; or of"
    " the data set's own, with random crops (crop), flips too (crop_flip) or"
    " neither (plain).",
  )
  flags.DEFINE_integer(
    "num_clients",
    None,
    "For --dataset=npz without clients_train: the number of clients that the"
    " images are divided into, by default 100, or one for ten images if there"
    " are fewer than a thousand; 27% of them are the server's, for"
    " distillation, and 10% are held out.",
    lower_bound=3,
  )
  flags.DEFINE_float(
    "partition_alpha",
    None,
    "Concentration of the Dirichlet distribution over labels (coarse labels for"
    " CIFAR-100) that partitions the examples into clients; small values give"
    " skewed clients. By default 0.1 (cifar100); 0.5 (cifar10, digits, npz).",
    lower_bound=1e-6,
  )
  flags.DEFINE_list(
    "dropout",
    None,
    "Dropout rate of each dense layer's inputs, one value or SMALL,LARGE; by"
    " default no dropout, as the paper names none. With dropout, --microbatch"
    " changes what students drop, and so the result.",
  )
  flags.DEFINE_float(
    "mixup_beta",
    2.0,
    "b of the Beta(b, b) mixup of distillation images; 0 for no mixup.",
    lower_bound=0,
  )


def speed() -> dict:
  """Defaults of flags that change the speed only."""
  on_cpu = jax.default_backend() == "cpu"
  defaults = {
    "conv": common.default_conv(FLAGS.dataset),
    "eval_batch_size": batch_size_or_default(None),
    "microbatch": 16 if on_cpu else 0,
  }
  if FLAGS.dataset == "digits":  # A checkpoint takes as long as two rounds.
    defaults["checkpoint_every"] = 40
  return defaults


class Task:
  """Data, models and transforms of one data set.

  Attributes:
    data: the pools and the server's data.
    models: the models of the small and the large pool.
    pool_options: arguments of a `Pool` besides names, models and rates.
    evaluator_options: arguments of an `Evaluator` besides models and sets.
    metrics: test metrics of each pool that go into `result.json`.
    charts: suffix of a chart's file name -> the metric that it shows.
    files: name and content of files that belong to a run, besides `data.json`.
  """

  metrics = ("test_accuracy",)
  charts = {"": "test_accuracy"}

  def __init__(self, config: dict, speed: dict, engine):
    del engine
    self.data = codist_images.load_codist_images(
      config["dataset"],
      data_dir=FLAGS.data_dir,
      high_capacity_clients=config["high_capacity_clients"],
      distill_data=config["distill_data"],
      distill_examples=config["distill_examples"],
      seed=config["seed"],
      partition_alpha=config["partition_alpha"],
      partition_seed=config["partition_seed"],
      download=FLAGS.download,
      npz=common.npz_path(),
      num_clients=config["num_clients"],
    )
    name = config["recipe"]
    self._recipe = augment.RECIPES.get(name) or augment.fitted(
      name, self.data.pools[0].bank["x"]
    )
    size, side = self._recipe.size, min(self.data.image_shape[:2])
    channels = self.data.image_shape[-1]
    if size > side:
      raise common.UsageError(
        f"--recipe={config['recipe']}: crops of {size}x{size} do not fit images"
        f" of {side}x{side} ({config['dataset']}); choose another"
      )
    if size < 4:
      raise common.UsageError(
        f"--npz={FLAGS.npz}: images of {size}x{size} are too small for the"
        " CNNs, which need 4x4 or more"
      )
    if len(self._recipe.mean) != channels:
      raise common.UsageError(
        f"--recipe={config['recipe']}: for images of {len(self._recipe.mean)}"
        f" channels, not {channels} ({config['dataset']}); choose another"
      )
    example = jnp.zeros((1, size, size, channels))
    self.models, classes = [], self.data.num_classes
    for name, dropout in zip(
      config["models"] or MODELS, config["dropout"] or (0.0, 0.0)
    ):
      build = lambda name=name, dropout=dropout: CNNS[name](
        classes,
        padding=self._recipe.padding,
        pool_after=self._recipe.pool_after,
        conv=speed["conv"],
        dropout=dropout,
        dtype=config["dtype"],
      )
      self.models.append(
        own_models.model("models", name, classes, example, build)
      )
    self.files = own_models.sources(config["models"] or ())
    self.pool_options = dict(transform=self._recipe.train)
    self.evaluator_options = dict(transform=self._recipe.evaluate)

  def distiller_options(self, config: dict) -> dict:
    """Arguments of a `Distiller` besides rates and those of the target."""
    return dict(
      transform=self._recipe.distill, mixup_beta=config["mixup_beta"] or None
    )

  def finish(self, results: dict[str, float]) -> dict[str, float]:
    """Adds metrics that are computed from a pool's means."""
    return results

  def record(self) -> dict:
    """What `result.json` says of the data."""
    return {"partition": self.data.partition}
