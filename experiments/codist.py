r"""Codistillation between two pools of clients with different models.

Without flags it runs the quick start: FedAvg, PeriodicCodist and MergedCodist
side by side on the embedded data set `digits`. The paper's runs are in
`experiments/flags`:

  python experiments/codist.py --flagfile=experiments/flags/NAME.flags \
      --data_dir=DIR

Put the flag file first: flags after it override it, and it overrides flags
before it.
"""

import functools
import pathlib

from absl import flags
import autotuning
import codist_language
from codist_settings import (
  ALGORITHMS,
  configuration,
  define_flags,
  exchange_every,
  POOLS,
  SERVERS,
  TASKS,
  UNUSED,
)
import common
import jax
import launch
import numpy as np
import optax
import own_models

from hetfl import (
  core,
  Distiller,
  Evaluator,
  fedavg,
  localize,
  merged_codist,
  periodic_codist,
  Plan,
  plan_round,
  Pool,
  put_banks,
  Subset,
)
from hetfl.batches import in_order, number_of_steps
from hetfl.data import files
from hetfl.engine.packing import enough_lanes
from hetfl.run import logs, report, training

FLAGS = flags.FLAGS


class Experiment:
  """Data, models and engine of one data set, shared by its algorithms."""

  def __init__(self, config: dict, speed: dict):
    self.engine = common.run_engine()
    self.task = TASKS[config["dataset"]].Task(config, speed, self.engine)
    self.data, self.models = self.task.data, self.task.models
    self._pools, self._banks, self._lanes = {}, {}, {}
    # Whose examples a plan's batches are.
    self.sets = dict(zip(POOLS, self.data.pools))
    self.sets["distill"] = self.data.distill
    sampled = config["clients_per_round"]
    most = ",".join(str(len(clients)) for clients in self.data.pools)
    for pool, clients, number in zip(POOLS, self.data.pools, sampled):
      if number > len(clients):
        fewer = pool == "large" and config.get("pools") != "domain"
        raise common.UsageError(
          f"--clients_per_round={number}: the pool of the {pool} model has"
          f" {len(clients)} clients"
          + (", the --high_capacity_clients" if fewer else "")
          + f"; give at most {most}"
        )
    sets = {"test": self.data.test, "heldout": self.data.heldout}
    if speed["bank"] == "round":
      sets = {name: subset.alone() for name, subset in sets.items()}
      banks = put_banks(*sets.values())
    else:
      banks = put_banks(*sets.values(), *self.sets.values())
      self._banks = dict(zip(self.sets, banks[len(sets) :]))
    self.evaluator = Evaluator(
      self.models,
      {
        name: Subset(bank, subset.index)
        for bank, (name, subset) in zip(banks, sets.items())
      },
      engine=self.engine,
      batch_size=speed["eval_batch_size"],
      **self.task.evaluator_options,
    )

  def pools(self, config: dict) -> list[Pool]:
    """The pools; equal rates share pools and so their compiled programs."""
    names = ("client_lr", "server_lr")
    rates = tuple(config[name] for name in names)
    if rates not in self._pools:
      client_optimizer = optax.sgd
      if config["client_momentum"]:
        client_optimizer = functools.partial(
          optax.sgd, momentum=config["client_momentum"]
        )
      self._pools[rates] = [
        Pool(
          model,
          name,
          learning_rate=config["client_lr"][i],
          server_lr=config["server_lr"][i],
          optimizer=client_optimizer,
          server_optimizer=SERVERS[config["server_optimizer"]],
          prox_mu=config["prox_mu"] or None,
          **self.task.pool_options,
        )
        for i, (name, model) in enumerate(zip(POOLS, self.models))
      ]
    return self._pools[rates]

  def device_data(self, config: dict) -> dict:
    """The banks, as the algorithms take them; none with --bank=round."""
    del config
    return self._banks

  @functools.cached_property
  def files(self) -> dict[str, bytes]:
    """Name and content of files that belong to a run; reads all data."""
    data, partition = self.data, self.task.record()["partition"]
    sets = (*data.pools, data.distill, data.heldout, data.test)
    return {
      **self.task.files,
      "data.json": files.record(sets, partition=partition),
    }

  def algorithm(self, config: dict, speed: dict) -> core.Algorithm:
    """Builds one of the three algorithms."""
    pools = self.pools(config)
    engine = common.run_engine(self.lanes(config, speed))
    options = dict(rounds=config["rounds"], engine=engine)
    if config["algorithm"] == "fedavg":
      return fedavg(pools, **options)
    distiller = Distiller(
      learning_rate=config["distill_lr"],
      final_share=config["distill_lr_decay"],
      temperature=config["teacher_temperature"],
      regularization=config["student_regularization"],
      label_weight=config["label_weight"],
      optimizer=functools.partial(optax.adam, eps=config["distill_epsilon"]),
      microbatch=(config | speed)["microbatch"] or None,
      **self.task.distiller_options(config),
    )
    if config["algorithm"] == "periodic":
      period = config["codist_period"]
      return periodic_codist(pools, distiller, period=period, **options)
    alpha = config["merge_alpha"]
    if isinstance(alpha, list):
      alpha = common.linear(alpha, config["rounds"])
    every = config["merge_every"]
    return merged_codist(pools, distiller, alpha=alpha, every=every, **options)

  def lanes(self, config: dict, speed: dict) -> int | None:
    """The number of lanes in the flags, or else enough for both pools."""
    if speed["lanes"] or common.on_threads():
      return speed["lanes"]
    share = {
      "batch_size": config["client_batch_size"],
      "epochs": config["client_epochs"],
    }
    key = (config["clients_per_round"], *share.values())
    if key not in self._lanes:
      self._lanes[key] = max(
        enough_lanes(number_of_steps(clients.sizes, **share), number)
        for clients, number in zip(self.data.pools, key[0])
      )
    return self._lanes[key]

  def plan(self, config: dict, round: int) -> Plan:
    """The plan of a round; a pure function of the round."""
    every = exchange_every(config)
    due = every and round % every == 0
    steps, batch_size = config["distill_steps"], config["distill_batch_size"]
    plan = plan_round(
      dict(zip(POOLS, self.data.pools)),
      self.data.distill if due else None,
      seed=config["seed"],
      round=round,
      clients_per_round=config["clients_per_round"],
      batch_size=config["client_batch_size"],
      epochs=config["client_epochs"],
      uniform_weights=config["client_weights"] == "uniform",
      distill_steps=steps,
      distill_batch_size=batch_size,
    )
    if every and not due:  # Plans have the same structure in all rounds.
      nothing = np.full(steps * batch_size, -1, np.int32)
      plan.batches["distill"] = in_order(nothing, batch_size)
    return plan

  def localized(self, config: dict, round: int):
    """The plan of a round and the examples that it needs."""
    work = localize(self.plan(config, round), self.sets)
    # Over several processes the engine places them, as it does the plan.
    return work if jax.process_count() > 1 else jax.device_put(work)

  def evaluate(self, state) -> dict[str, float]:
    """Accuracy and loss of each pool on the test and the held-out set."""
    results = self.evaluator([pool.variables for pool in state.server])
    return {
      f"{pool}/{name}": value
      for pool, result in zip(POOLS, results)
      for name, value in self.task.finish(result).items()
    }

  def summarize(self, config: dict, state, evaluation) -> dict:
    """What `result.json` says of a finished run."""
    pools, every = {}, exchange_every(config)
    for pool, learner, clients, number in zip(
      POOLS, state.server, self.data.pools, config["clients_per_round"]
    ):
      sent = training.num_bytes(learner.variables)
      pools[pool] = {
        "parameters": core.num_parameters(learner.params),
        "clients": len(clients),
        "examples": int(clients.sizes.sum()),
        **{
          name: evaluation[f"{pool}/{name}"]
          for name in self.task.metrics
          if f"{pool}/{name}" in evaluation
        },
        "heldout_accuracy": evaluation[f"{pool}/heldout_accuracy"],
        "bytes_sent_per_client_round": sent,
        "bytes_received_per_client_round": sent,
        "bytes_per_round": 2 * sent * number,
      }
    return {
      "algorithm": config["algorithm"],
      "dataset": config["dataset"],
      **self.task.record(),
      **({"models": config["models"]} if config["models"] else {}),
      "seed": config["seed"],
      "exchanges": config["rounds"] // every if every else 0,
      "bytes_per_round": sum(p["bytes_per_round"] for p in pools.values()),
      # Sizes of the server's sets, as in the paper's tables 3 to 5.
      **{
        f"{name}_examples": len(getattr(self.data, name).index)
        for name in ("distill", "heldout", "test")
      },
      "pools": pools,
    }


def curves(
  runs: dict, *, config: dict, folder: pathlib.Path, experiment: Experiment
) -> None:
  """Draws each algorithm's accuracies, for all its seeds, over the rounds."""
  measured = {n for seeds in runs.values() for n in seeds[0][-1]}
  for suffix, metric in experiment.task.charts.items():
    if any(f"{pool}/{metric}" in measured for pool in POOLS):
      report.curves(
        runs,
        folder / f"curves{suffix}.png",
        metric=metric,
        title=config["dataset"] + suffix.replace("_", ", "),
      )


def train(
  experiment: Experiment, config: dict, speed: dict, folder: logs.RunFolder
) -> dict:
  """Runs or resumes one algorithm in a folder of its own."""
  folder.keep(experiment.files)
  algorithm = experiment.algorithm(config, speed)
  plan = experiment.plan
  if speed["bank"] == "round":
    plan, step = experiment.localized, algorithm.step
    algorithm = algorithm._replace(
      step=lambda state, work, _: step(state, *work)
    )
  return launch.train(
    algorithm,
    functools.partial(plan, config),
    experiment.device_data(config),
    experiment.evaluate,
    config=config,
    speed=speed,
    engine=experiment.engine,
    folder=folder,
    summarize=functools.partial(experiment.summarize, config),
  )


def main() -> None:
  """Runs the algorithms of --algorithm, then prints a table."""
  if FLAGS.distill_data != "c4":
    common.warn_of_idle(
      f"it is for --distill_data=c4, not {FLAGS.distill_data}",
      "c4_path",
      "c4_tokenizer",
    )
  of_text = TASKS[FLAGS.dataset] is codist_language
  if of_text:
    common.warn_of_idle("language models have no convolutions", "conv")
  if FLAGS.models:
    other = "model_size" if of_text else "conv"
    own_models.warn_of_idle(FLAGS.models, "dtype", other)

  def configure(name, path, seed):
    config, speed = configuration(name, path)
    config["seed"] = seed
    if FLAGS.autotune:
      every = exchange_every(config)
      speed = autotuning.measure(Experiment, config, speed, path, every)
    return config, speed

  launch.side_by_side(
    ("codist", FLAGS.dataset, *own_models.labels(FLAGS.models or ())),
    ALGORITHMS,
    unused=UNUSED,
    configure=configure,
    build=Experiment,
    train=train,
    draw=curves,
    table=report.table,
  )


if __name__ == "__main__":
  define_flags()
  launch.run(main)
