"""Runs codistillation and FedAvg, as `codist.py` asks for.

`s.client_lr` is the flag `--client_lr`, one value for each pool, and so on.
"""

from collections.abc import Mapping
import functools
import pathlib
from typing import Any

from absl import logging
from codist import Codist, EXCHANGES, POOLS, TEXTS
from codist_tasks import task_of
import jax
import launch
import numpy as np
import optax
import own_models
from settings import Given, shown, UsageError

import hetfl
from hetfl import core, optimizers, privacy
from hetfl.batches import in_order
from hetfl.data import files
from hetfl.engine.packing import enough_lanes
from hetfl.evaluate import accuracies
from hetfl.models import next_word
from hetfl.plans import number_of_steps
from hetfl.run import charts, logs, report, training

# Optax's optimizers with the papers' constants, called with the rate.
_SERVERS = {
  "adam": optimizers.fedadam_server,
  "yogi": optimizers.fedyogi_server,
  "momentum": optimizers.fedavgm_server,
  "sgd": optimizers.fedavg_server,
}

SETTINGS = Codist
_noise_multiplier = functools.cache(privacy.noise_multiplier)


def words(values: Mapping[str, Any], algorithm: str) -> set[str]:
  """What holds of an algorithm's run; see `settings`."""
  s = Codist.resolve(values, ())
  own = [own_models.is_own(name) for name in s.models or ("",)]
  found = {algorithm, s.dataset, s.distill_data, s.pools, s.bank}
  found.add("text" if s.dataset in TEXTS else "images")
  found |= {"own_models"} if any(own) else set()
  found |= {"hetfl_models"} if not all(own) else set()
  rates = *s.dropout, *s.map_dropout, *(s.logits_dropout or ())
  found |= {"dropout"} if any(rates) else set()
  found |= {"epsilon"} if s.epsilon else set()
  return found | launch.machine_words(values)


class Experiment:
  """Data, models and engine of one data set, shared by its algorithms."""

  def __init__(self, s: Codist):
    self.engine = launch.engine_of(s)
    self.task = task_of(s)
    self.data, self.models = self.task.data, self.task.models
    self._pools = {}
    # The sets that a plan's batches are of.
    self.sets = dict(zip(POOLS, self.data.pools))
    self.sets["distill"] = self.data.distill
    if s.label_weight and s.distill_data.startswith("cifar"):
      raise UsageError(
        f"--label_weight={s.label_weight}: the labels of"
        f" --distill_data={s.distill_data} belong to another data set; use"
        " --label_weight=0 or --distill_data=in_domain"
      )
    sets = {"test": self.data.test, "heldout": self.data.heldout}
    if s.bank != "device":
      sets = {name: subset.alone() for name, subset in sets.items()}
    trained = self.sets if s.bank == "device" else {}
    sets, self._banks = launch.put(sets, trained)
    self.evaluator = hetfl.Evaluator(
      self.models,
      sets,
      engine=self.engine,
      batch_size=s.eval_batch_size,
      **self.task.evaluator,
    )

  def private(self, s: Codist) -> dict[str, Any]:
    """What `result.json` says of --clip_norm and --epsilon; else nothing."""
    if s.clip_norm is None:
      if s.epsilon is not None:
        raise UsageError(f"--epsilon={s.epsilon}: give --clip_norm too")
      return {}
    if s.client_weights != "uniform":
      raise UsageError(
        f"--clip_norm={shown(s.clip_norm)}: bounds what a client changes only"
        " if all count alike: add --client_weights=uniform"
      )
    found = {"clip_norm": s.clip_norm, "noise_multiplier": 0.0}
    if s.epsilon is not None:
      numbers = [len(clients) for clients in self.data.pools]
      # The plan refuses more clients than all.
      sampling = (min(k / n, 1) for k, n in zip(s.clients_per_round, numbers))
      delta = s.delta or max(numbers) ** -1.1
      found["noise_multiplier"] = _noise_multiplier(
        s.epsilon, tuple(sampling), rounds=s.rounds, delta=delta
      )
      found |= {"epsilon": s.epsilon, "delta": delta}
    return found

  def pools(self, s: Codist) -> list[hetfl.Pool]:
    """The pools; equal rates share pools and so their compiled programs.

    Of a command's runs only the rates, and noise for their rounds, differ.
    """
    noise = self.private(s).get("noise_multiplier")
    means = [
      None if noise is None else privacy.PrivateMean(clip, noise, number)
      for clip, number in zip(s.clip_norm or POOLS, s.clients_per_round)
    ]
    rates = tuple(zip(s.client_lr, s.server_lr, means))
    if rates not in self._pools:
      self._pools[rates] = [
        hetfl.Pool(
          model,
          name,
          learning_rate=client_lr,
          server_lr=server_lr,
          # Without momentum there is no state.
          optimizer=functools.partial(
            optax.sgd, momentum=s.client_momentum or None
          ),
          server_optimizer=_SERVERS[s.server_optimizer],
          prox_mu=s.prox_mu or None,
          private=mean,
          **self.task.pool,
        )
        for name, model, (client_lr, server_lr, mean) in zip(
          POOLS, self.models, rates
        )
      ]
    return self._pools[rates]

  def device_data(self, s: Codist) -> dict:
    """The banks, as the algorithms take them; none if they are elsewhere."""
    return self._banks

  def files(self, s: Codist) -> dict[str, bytes]:
    """Name and content of files that belong to a run."""
    return {**self.task.files, "data.json": self._record}

  @functools.cached_property
  def _record(self) -> bytes:
    data, record = self.data, self.task.record
    sets = (*data.pools, data.distill, data.heldout, data.test)
    return files.record(sets, partition=record["partition"])  # Reads all data.

  def algorithm(self, s: Codist) -> core.Algorithm:
    """Builds one of the three algorithms."""
    if s.exchange_every > s.rounds:
      logging.warning(
        "--algorithm=%s: with --rounds=%d and --%s=%d the pools never exchange"
        " anything, which is FedAvg.",
        *(s.algorithm, s.rounds, EXCHANGES[s.algorithm], s.exchange_every),
      )
    engine = launch.engine_of(s, self.lanes(s))
    built = self._algorithm(s, dict(rounds=s.rounds, engine=engine))
    if s.bank == "device":
      return built
    return built._replace(step=lambda state, work, _: built.step(state, *work))

  def _algorithm(self, s: Codist, options: dict) -> core.Algorithm:
    pools = self.pools(s)
    if s.algorithm == "fedavg":
      return hetfl.fedavg(pools, **options)
    # Not by `s.arguments`: a `learning_rate` is the clients'.
    distiller = hetfl.Distiller(
      learning_rate=s.distill_lr,
      final_share=s.distill_lr_decay,
      temperature=s.teacher_temperature,
      regularization=s.student_regularization,
      label_weight=s.label_weight,
      dropout=s.student_dropout,
      optimizer=functools.partial(optax.adam, eps=s.distill_epsilon),
      microbatch=s.microbatch or None,
      **self.task.distiller,
    )
    if s.algorithm == "periodic":
      return hetfl.periodic_codist(
        pools, distiller, period=s.codist_period, **options
      )
    return hetfl.merged_codist(
      pools,
      distiller,
      alpha=launch.linear(s.merge_alpha, s.rounds),
      every=s.merge_every,
      **options,
    )

  def lanes(self, s: Codist) -> int | None:
    """The number of lanes in the settings, or else enough for both pools."""
    if s.lanes or "cpu" in s.words:
      return s.lanes
    return max(
      enough_lanes(
        number_of_steps(
          clients.sizes, batch_size=s.client_batch_size, epochs=s.client_epochs
        ),
        number,
      )
      for clients, number in zip(self.data.pools, s.clients_per_round)
    )

  def plan(self, s: Codist, round: int) -> Any:
    """The plan of a round, with its examples if these are not on the device."""
    every = s.exchange_every
    due = every and round % every == 0
    # And by name: seed, clients_per_round, distill_steps, distill_batch_size.
    options = s.arguments(
      hetfl.plan_round,
      clients=dict(zip(POOLS, self.data.pools)),
      distill=self.data.distill if due else None,
      round=round,
      batch_size=s.client_batch_size,
      epochs=s.client_epochs,
      uniform_weights=s.client_weights == "uniform",
      poisson=s.clip_norm is not None,
    )
    plan = hetfl.plan_round(**options)
    if every and not due:  # Plans have the same structure in all rounds.
      size = s.distill_batch_size
      nothing = np.full(s.distill_steps * size, -1, np.int32)
      plan.batches["distill"] = in_order(nothing, size)
    if s.bank == "device":
      return plan
    work = hetfl.localize(plan, self.sets)
    # Over several processes the engine places them, as it does the plan.
    return work if jax.process_count() > 1 else jax.device_put(work)

  def evaluate(self, s: Codist, state) -> dict[str, float]:
    """Accuracy and loss of each pool on the test and the held-out set."""
    results = self.evaluator([pool.variables for pool in state.server])
    row = {}
    for pool, result in zip(POOLS, results):
      row |= {f"{pool}/{name}": value for name, value in result.items()}
      for name, value in result.items() if "text" in s.words else ():
        if name.endswith("_loss"):
          perplexity = f"{pool}/{name.removesuffix('loss')}perplexity"
          row[perplexity] = next_word.perplexity(value)
    return row

  def heldout(self, s: Codist) -> tuple:
    """The accuracies that a search chooses by; see `tune`."""

    def evaluate(state, data):
      models = [pool.variables for pool in state.server]
      sums = self.evaluator.sums(models, data)
      return dict(zip(POOLS, accuracies(sums)))

    data = {which: self.evaluator.data(which) for which in ("heldout", "test")}
    return POOLS, evaluate, data

  def summarize(
    self, s: Codist, folder: logs.RunFolder, state, evaluation
  ) -> dict:
    """What `result.json` says of a finished run."""
    pools = {}
    names = (*self.task.metrics, "heldout_accuracy")
    for pool, learner, clients, number in zip(
      POOLS, state.server, self.data.pools, s.clients_per_round
    ):
      sent = training.num_bytes(learner.variables)
      pools[pool] = {
        "parameters": core.num_parameters(learner.params),
        "clients": len(clients),
        "examples": int(clients.sizes.sum()),
        **{
          n: evaluation[key]
          for n in names
          if (key := f"{pool}/{n}") in evaluation
        },
        "bytes_sent_per_client_round": sent,
        "bytes_received_per_client_round": sent,
        "bytes_per_round": 2 * sent * number,
      }
    return {
      "algorithm": s.algorithm,
      "dataset": s.dataset,
      **self.task.record,
      **({"models": s.models} if s.models else {}),
      "seed": s.seed,
      **self.private(s),
      "exchanges": s.rounds // s.exchange_every if s.exchange_every else 0,
      "bytes_per_round": sum(p["bytes_per_round"] for p in pools.values()),
      # Sizes of the server's sets, as in the paper's tables 3 to 5.
      **{
        f"{name}_examples": len(getattr(self.data, name).index)
        for name in ("distill", "heldout", "test")
      },
      "pools": pools,
    }


def draw(
  runs: dict, s: Codist, folder: pathlib.Path, experiment: Experiment
) -> None:
  """Draws each algorithm's accuracies, for all its seeds, over the rounds."""
  measured = {n for seeds in runs.values() for n in seeds[0][-1]}
  for suffix in experiment.task.charts:
    metric = f"test_accuracy{suffix}"
    if any(f"{pool}/{metric}" in measured for pool in POOLS):
      charts.curves(
        runs,
        folder / f"curves{suffix}.png",
        metric=metric,
        title=s.dataset + suffix.replace("_", ", "),
      )


def main(given: Given) -> None:
  """Runs the algorithms of --algorithm, then prints a table."""
  s = Codist.resolve(given.values, ())
  launch.side_by_side(
    given,
    Codist,
    ("codist", s.dataset, *own_models.labels(s.models or ())),
    words=words,
    build=Experiment,
    draw=draw,
    table=lambda results, rows: report.table(results),
  )
