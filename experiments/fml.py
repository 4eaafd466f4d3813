r"""Federated Mutual Learning, and the baselines it is compared with.

Without flags it runs the quick start: FedAvg, FedProx, FML and independent
training side by side on the embedded data set `digits`, with five clients that
have different models. The paper's runs are in `experiments/flags`:

  python experiments/fml.py --flagfile=experiments/flags/NAME.flags \
      --data_dir=DIR

Put the flag file first: flags after it override it, and it overrides flags
before it.
"""

import dataclasses
import functools

from absl import flags
import common
import flax.linen as nn
import fml_report
from fml_settings import (
  ALGORITHMS,
  configuration,
  define_flags,
  models_of,
  TRUNKS,
  UNUSED,
  warn_of_idle,
)
import jax
import jax.numpy as jnp
import launch
import numpy as np
import own_models

from hetfl import (
  augment,
  Client,
  ClientPopulation,
  core,
  Evaluator,
  fedavg,
  fml,
  local_model,
  meme_model,
  Plan,
  plan_round,
  Pool,
  put_banks,
  Subset,
)
from hetfl.data import files, fml_images
from hetfl.models import fml as nets
from hetfl.models.spliced import splice
from hetfl.optimizers import fedavg_server, momentum_sgd
from hetfl.run import logs, training
from hetfl.streams import generator, Stream

FLAGS = flags.FLAGS
_RECIPES = {
  "digits": "digits8",
  "mnist": "mnist28",
  "cifar10": "pad32",
  "cifar100": "pad32",
}


class Experiment:
  """Data, models and engine of one federation, shared by its algorithms."""

  def __init__(self, config: dict, speed: dict):
    self.data = fml_images.load_fml_images(
      config["dataset"],
      num_clients=config["num_clients"],
      partition=config["partition"],
      data_dir=FLAGS.data_dir,
      partition_alpha=config["partition_alpha"],
      partition_seed=config["partition_seed"],
      bad_clients=config["bad_clients"],
      bad_label_share=config["bad_label_share"],
      heldout_examples=config["heldout_examples"],
      download=FLAGS.download,
      npz=common.npz_path(),
    )
    self.engine = common.run_engine()
    classes = self.data.num_classes
    trunk = config["global_model"] in TRUNKS
    if len(set(classes.values())) > 1 and not trunk:
      raise common.UsageError(
        f"--dataset={','.join(config['dataset'])}: clients with different"
        f" classes cannot share --global_model={config['global_model']}; use"
        f" one of {', '.join(TRUNKS)}"
      )
    if config["dataset"][0] == "npz":
      bank = self.data.clients[0].train.bank
      self.recipe = augment.fitted("crop", bank["x"])
    else:
      self.recipe = augment.RECIPES[_RECIPES[config["dataset"][0]]]
    shape = (*[self.recipe.size] * 2, self.data.image_shape[-1])
    example = jnp.zeros((1, *shape))

    @functools.cache
    def model(name, num_classes):
      """A network; clients with the same network share one object."""
      is_global = name == config["global_model"]
      return own_models.model(
        "global_model" if is_global else "client_models",
        name,
        num_classes,
        example,
        lambda: nets.net(
          name,
          num_classes,
          shape,
          conv=speed["conv"],
          dtype=config["dtype"],
        ),
      )

    @functools.cache
    def adaptor(num_classes):
      features = jax.eval_shape(
        lambda key: self.global_model.apply(
          self.global_model.init(key), example, None, False
        )[0],
        jax.random.key(0),
      )
      return core.Model.from_flax(
        nn.Dense(num_classes, kernel_init=nets.torch_init),
        jnp.zeros(features.shape),
      )

    self.global_model = model(
      config["global_model"].removesuffix("_conv" if trunk else ""),
      None if trunk else next(iter(classes.values())),
    )
    self.train_transform = self.recipe.train
    if not config["augment"]:
      self.train_transform = self.recipe.evaluate
    self.clients = [
      Client(
        model=model(name, classes[held.dataset]),
        transform=self.train_transform,
        bank=held.dataset,
        adaptor=adaptor(classes[held.dataset]) if trunk else None,
      )
      for name, held in zip(config["client_models"], self.data.clients)
    ]
    # The complete meme model of each client.
    self.memes = [splice(self.global_model, c.adaptor) for c in self.clients]
    held, sets = self.data.clients, {}
    for k, client in enumerate(held):
      sets[f"client{k}"] = client.validation
      if config["heldout_examples"]:
        sets[f"client{k}_heldout"] = client.heldout
    if not trunk:  # All clients share one data set.
      sets["test"] = next(iter(self.data.test.values()))
      if config["heldout_examples"]:
        everywhere = np.concatenate([c.heldout.index for c in held])
        sets["heldout"] = Subset(held[0].heldout.bank, everywhere)
    self.populations = {}
    for dataset in classes:
      own = [c.train for c in held if c.dataset == dataset]
      self.populations[dataset] = ClientPopulation.from_lists(
        own[0].bank, [subset.index for subset in own]
      )
    banks = put_banks(*self.populations.values(), *sets.values())
    self.banks = dict(zip(self.populations, banks))
    names = [
      {f"client{k}", f"client{k}_heldout"} & sets.keys()
      for k in range(len(self.clients))
    ]
    options = dict(
      sets={
        name: Subset(bank, subset.index)
        for (name, subset), bank in zip(sets.items(), banks[len(classes) :])
      },
      transform=self.recipe.evaluate,
      engine=self.engine,
      batch_size=speed["eval_batch_size"],
    )
    self.local_evaluator = Evaluator(
      [c.model for c in self.clients], only=names, **options
    )
    if trunk:
      self.meme_evaluator = Evaluator(self.memes, only=names, **options)
    else:
      self.global_evaluator = Evaluator([self.global_model], **options)

  @functools.cached_property
  def files(self) -> dict[str, bytes]:
    """Name and content of files that belong to a run; reads all data."""
    return {"data.json": files.record(self.data.sets)}

  def algorithm(self, config: dict, speed: dict) -> core.Algorithm:
    """Builds one of the four algorithms."""
    optimizer = functools.partial(
      momentum_sgd,
      momentum=config["momentum"],
      weight_decay=config["weight_decay"],
      clip_norm=config["clip_norm"],
    )
    engine = common.run_engine(speed["lanes"])
    options = dict(
      learning_rate=config["learning_rate"], optimizer=optimizer, engine=engine
    )
    microbatch = (config | speed)["microbatch"] or None
    clients = [
      dataclasses.replace(client, microbatch=microbatch)
      for client in self.clients
    ]
    if config["algorithm"] == "independent":
      return fml(clients, global_model=None, **options)
    if config["algorithm"] == "fml":
      return fml(
        clients,
        global_model=self.global_model,
        alpha=common.linear(config["alpha"], config["rounds"]),
        beta=common.linear(config["beta"], config["rounds"]),
        temperature=config["temperature"],
        sequential=config["sequential_updates"],
        from_global=config["clients_start"] == "global",
        **options,
      )
    # A server step of rate 1 takes the mean of the clients' models.
    pool = Pool(
      self.global_model,
      "global",
      learning_rate=config["learning_rate"],
      server_lr=1.0,
      transform=self.train_transform,
      optimizer=optimizer,
      server_optimizer=fedavg_server,
      prox_mu=config["prox_mu"] if config["algorithm"] == "fedprox" else None,
    )
    return fedavg([pool], rounds=None, engine=engine)

  def device_data(self, config: dict) -> dict:
    """The banks, as the algorithm takes them."""
    return named(config, self.banks)

  def plan(self, config: dict, round: int) -> Plan:
    """A round's plan, alike for all algorithms; a pure function of `round`."""
    sampled, number = config["clients_per_round"], len(self.populations)
    several = number > 1
    plan = plan_round(
      named(config, self.populations),
      seed=config["seed"],
      round=round,
      batch_size=config["batch_size"],
      epochs=config["local_epochs"],
      uniform_weights=config["merge_weights"] != "examples",
      clients_per_round=None if several else sampled,
      tail="repeat" if config["full_batches"] else "short",
    )
    if several and sampled:
      # Drawn from the clients of all data sets; the others have no steps, so
      # that plans have the same structure in all rounds.
      rng = generator(Stream.CLIENTS, config["seed"], 0, round, number)
      drawn = rng.permutation(len(self.clients)) < sampled
      for name, batches in plan.batches.items():
        active, drawn = np.split(drawn, [len(batches.client)])
        plan.batches[name] = batches._replace(
          steps=np.where(active, batches.steps, 0),
          weight=np.where(active, batches.weight, 0),
        )
    return plan

  def evaluate(self, config: dict, state) -> dict[str, float]:
    """Accuracies and losses of the global model and of the clients' products.

    A client's product is its own model or, with FedAvg and FedProx, the global
    model (the paper's Figure 4).
    """
    row, clients = {}, range(len(self.clients))
    kinds = {"validation": ""}
    if config["heldout_examples"]:
      kinds["heldout"] = "_heldout"
    prefix = "global_" if config["algorithm"] == "fml" else ""

    def add(k, values, prefix):
      for kind, suffix in kinds.items():
        for name in ("accuracy", "loss"):
          value = values[f"client{k}{suffix}_{name}"]
          row[f"client{k}/{prefix}{kind}_{name}"] = value

    server = self.server(config, state)
    if config["algorithm"] in ("fml", "independent"):
      locals_ = [local_model(state, k) for k in clients]
      for k, values in zip(clients, self.local_evaluator(locals_)):
        add(k, values, "")
    if server is not None and self.clients[0].adaptor is None:
      (values,) = self.global_evaluator([server])
      for name, value in values.items():
        if name.startswith(("test_", "heldout_")):
          row[f"global/{name}"] = value
      for k in clients:
        add(k, values, prefix)
    elif server is not None:
      memes = [meme_model(state, k) for k in clients]
      for k, values in zip(clients, self.meme_evaluator(memes)):
        add(k, values, prefix)
    for kind in kinds:
      row[f"clients/{kind}_accuracy"] = float(
        np.mean([row[f"client{k}/{kind}_accuracy"] for k in clients])
      )
    return row

  def server(self, config: dict, state) -> core.Variables | None:
    """The global model's variables; `None` if there is none."""
    if config["algorithm"] in ("fedavg", "fedprox"):
      return state.server[0].variables
    return state.server

  def summarize(
    self, config: dict, folder: logs.RunFolder, state, evaluation
  ) -> dict:
    """What `result.json` says of a finished run: last values and best ones."""
    rows = logs.read_rows(folder.metrics)

    def last_and_best(prefix, name):
      known = [r[f"{prefix}/{name}"] for r in rows if f"{prefix}/{name}" in r]
      return {
        name: evaluation.get(f"{prefix}/{name}"),
        f"best_{name}": max(known, default=None),
      }

    def heldout(prefix):
      value = evaluation.get(f"{prefix}/heldout_accuracy")
      return {} if value is None else {"heldout_accuracy": value}

    alone = config["algorithm"] == "independent"
    personal = alone or config["algorithm"] == "fml"
    init = lambda model: jax.eval_shape(model.init, jax.random.key(0))
    shared = init(self.global_model)
    sent = 0 if alone else training.num_bytes(shared)
    taking_part = config["clients_per_round"] or len(self.clients)
    clients = []
    for k, (client, held) in enumerate(zip(self.clients, self.data.clients)):
      own = client.model if personal else self.global_model
      name = config["client_models"][k] if personal else config["global_model"]
      entry = {
        "model": name,
        "parameters": core.num_parameters(init(own).params),
        "dataset": held.dataset,
        "examples": len(held.train.index),
        "validation_examples": len(held.validation.index),
        **last_and_best(f"client{k}", "validation_accuracy"),
        **heldout(f"client{k}"),
        # In a round that it takes part in.
        "bytes_sent_per_round": sent,
        "bytes_received_per_round": sent,
      }
      if config["algorithm"] == "fml":
        entry |= last_and_best(f"client{k}", "global_validation_accuracy")
      clients.append(entry)
    return {
      "algorithm": config["algorithm"],
      "dataset": ",".join(config["dataset"]),
      "partition": config["partition"],
      "seed": config["seed"],
      "bytes_per_round": 2 * sent * taking_part,
      "global": {
        "model": None if alone else config["global_model"],
        "parameters": None if alone else core.num_parameters(shared.params),
        **last_and_best("global", "test_accuracy"),
        **({} if alone else heldout("global")),
      },
      "clients": clients,
    }


def named(config: dict, of_datasets: dict) -> dict:
  """Banks or populations by the names by which the algorithm takes them."""
  if config["algorithm"] in ("fml", "independent"):
    return of_datasets
  return dict(zip(["global"], of_datasets.values()))


def train(
  experiment: Experiment, config: dict, speed: dict, folder: logs.RunFolder
) -> dict:
  """Runs or resumes one algorithm in a folder of its own."""
  folder.keep(experiment.files | own_models.sources(models_of(config)))
  return launch.train(
    experiment.algorithm(config, speed),
    functools.partial(experiment.plan, config),
    experiment.device_data(config),
    functools.partial(experiment.evaluate, config),
    config=config,
    speed=speed,
    engine=experiment.engine,
    folder=folder,
    summarize=functools.partial(experiment.summarize, config, folder),
  )


def main() -> None:
  """Runs the algorithms of --algorithm, then prints a table."""
  common.refuse("not supported by fml; leave it out", "autotune")
  if not FLAGS.bad_clients:
    common.warn_of_idle("there are no --bad_clients", "bad_label_share")
  warn_of_idle()
  models = [FLAGS.global_model or "", *(FLAGS.client_models or ())]

  def configure(name, path, seed):
    config, speed = configuration(name, path)
    config["seed"] = seed
    return config, speed

  launch.side_by_side(
    ("fml", *FLAGS.dataset, *own_models.labels(models)),
    ALGORITHMS,
    unused=UNUSED,
    configure=configure,
    build=Experiment,
    train=train,
    draw=lambda rows, *, config, folder, experiment: fml_report.draw(
      rows, config, folder
    ),
    table=fml_report.table,
    # Without schedules, nothing depends on the number of rounds.
    lengthens=lambda config: (
      len({*config["alpha"]}) == len({*config["beta"]}) == 1
    ),
  )


if __name__ == "__main__":
  define_flags()
  launch.run(main, refused=["autotune"])
