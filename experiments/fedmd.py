r"""FedMD: parties with models of their own learn from each other's scores.

Without flags it runs the quick start: five small networks on the embedded data
set `digits`. The paper's runs are in `experiments/flags`:

  python experiments/fedmd.py --flagfile=experiments/flags/fedmd_NAME.flags \
      --data_dir=DIR

Put the flag file first: flags after it override it, and it overrides flags
before it.

A run has four phases, each in a folder of its own: training on public data
(`public/`), then on each party's own data (`transfer/`), the upper bound, which
is trained on all parties' private data (`pooled/`), and the collaboration, in
the run's folder.
"""

from collections.abc import Sequence
import dataclasses
import functools
import pathlib
import statistics

from absl import flags, logging
import common
from fedmd_parties import make_parties
import fedmd_settings as settings
import jax
import launch
import own_models

from hetfl import (
  augment,
  core,
  Evaluator,
  fedmd,
  fit,
  Learner,
  Plan,
  plan_fedmd,
  plan_fit,
  put_banks,
  Subset,
)
from hetfl.data import fedmd_images, files
from hetfl.engine import from_first, jit
from hetfl.run import logs, report, training

FLAGS = flags.FLAGS


class Experiment:
  """Data, models and engine of a run."""

  def __init__(self, config: dict, speed: dict):
    heldout = config["stopping_set"] == "heldout"
    self.data = fedmd_images.load_fedmd_images(
      config["environment"],
      data_dir=FLAGS.data_dir,
      num_parties=config["num_parties"],
      examples_per_class=config["examples_per_class"],
      min_writer_examples=config["min_writer_examples"],
      superclasses=config["superclasses"],
      heldout_examples=config["heldout_examples"] if heldout else 0,
      public_examples=config["public_examples"],
      npz=common.npz_path(of="environment"),
      public_npz=common.npz_path("public_npz", of="environment"),
      partition_seed=config["partition_seed"],
      download=FLAGS.download,
    )
    self.config, self.speed = config, speed
    self.engine = common.run_engine()
    data = self.data
    self.transforms = {
      "public": functools.partial(augment.center, mean=data.public_mean),
      "private": functools.partial(augment.center, mean=data.private_mean),
    }
    self.model_names, self.parties = make_parties(
      config,
      speed,
      data.num_classes,
      data.image_shape,
      self.transforms["private"],
    )
    self.names = [party.name for party in self.parties]
    self.held = dict(zip(self.names, data.private.subsets()))
    sets = {
      "public": data.public,
      "private": data.private.examples(),
      "public_test": data.public_test,
      "private_test": data.private_test,
      "public_stopping": data.public_stopping,
      "private_stopping": data.private_stopping,
    }
    given = {name: s for name, s in sets.items() if s is not None}
    for name, bank in zip(given, put_banks(*given.values())):
      sets[name] = Subset(bank, given[name].index)
    kinds = ("public", "private")
    self.banks = {of: sets[of].bank for of in kinds}
    test = {of: sets[f"{of}_test"] for of in kinds}
    self.stopping = {
      "heldout": {of: sets[f"{of}_stopping"] for of in kinds},
      "test": test,
      "none": dict.fromkeys(kinds),
    }[config["stopping_set"]]
    self.evaluators = {
      of: Evaluator(
        [party.model for party in self.parties],
        {"test": test[of]},
        transform=self.transforms[of],
        engine=self.engine,
        batch_size=speed["eval_batch_size"],
      )
      for of in test
    }

  @functools.cached_property
  def sources(self) -> dict[str, bytes]:
    """The files of the user's own models."""
    return own_models.sources(settings.own_names(self.config["models"]))

  def key(self, phase: int) -> jax.Array:
    """The key of a phase: public, transfer, pooled, collaboration."""
    return jax.random.fold_in(jax.random.key(self.config["seed"]), phase)

  def options(self, folder: logs.RunFolder) -> dict:
    """The arguments that all calls of `training.run` share."""
    return dict(
      engine=self.engine,
      folder=folder,
      checkpoint_every=self.speed["checkpoint_every"],
      tensorboard=self.speed["tensorboard"],
      stop_on_nonfinite=self.speed["stop_on_nonfinite"],
    )

  def fit_algorithm(self, phase: str) -> core.Algorithm:
    """The training of one phase before the collaboration."""
    transform = self.transforms[data_of(phase)]
    flags_of = flags_prefix(phase)
    return fit(
      [dataclasses.replace(p, transform=transform) for p in self.parties],
      patience=self.config[f"{flags_of}_patience"],
      min_delta=self.config[f"{flags_of}_min_delta"],
      eval_batch_size=self.speed["eval_batch_size"],
      engine=self.engine,
    )

  def fit_plan(self, phase: str, round: int) -> Plan:
    """An epoch's plan; a pure function of the epoch."""
    examples = {
      "public": dict.fromkeys(self.names, self.data.public),
      "transfer": self.held,
      "pooled": dict.fromkeys(self.names, self.data.private.examples()),
    }
    return plan_fit(
      examples[phase],
      self.stopping[data_of(phase)],
      seed=self.config["seed"],
      phase=settings.PHASES.index(phase),
      round=round,
      batch_size=self.config[f"{flags_prefix(phase)}_batch_size"],
    )

  def phase_folder(self, phase: str, workdir: pathlib.Path) -> logs.RunFolder:
    """A phase's folder; its config has the flags that the phase depends on."""
    public = phase == "public"
    config = settings.of_phase(phase, self.config)
    kept = {
      "data.json": self.public_record if public else self.record,
      **self.sources,
    }

    def opened(path: pathlib.Path, named: str) -> logs.RunFolder:
      folder = common.open_folder(path, config, self.speed, named=named)
      folder.keep(kept)
      return folder

    if self.speed["pretrained"]:
      other = pathlib.Path(self.speed["pretrained"], phase)
      try:
        if public or (other / "config.json").exists():
          return opened(other, "--pretrained")
      except logs.ConfigMismatch as error:
        if public:
          raise
        logging.warning("Phase %s is retrained, not reused: %s", phase, error)
    return opened(workdir / phase, "--workdir")

  @functools.cached_property
  def public_record(self) -> bytes:
    """A fingerprint of the public data."""
    # Of one's own images: the models' outputs depend on the private classes.
    own = self.config["environment"] == "npz"
    classes = {"num_classes": self.data.num_classes} if own else {}
    return files.record(self._public_sets, **classes)

  @functools.cached_property
  def record(self) -> bytes:
    """A fingerprint of all data."""
    data = self.data
    private = (data.private, data.private_stopping, data.private_test)
    return files.record((*self._public_sets, *private), source=data.source)

  @property
  def _public_sets(self):
    data = self.data
    return data.public, data.public_stopping, data.public_test

  def fit(
    self,
    phase: str,
    workdir: pathlib.Path,
    variables: Sequence[core.Variables] | None = None,
  ) -> tuple[list[Learner], dict]:
    """Runs or resumes a phase before the collaboration, or reads its result.

    Args:
      phase: 'public', 'transfer' or 'pooled'.
      workdir: the run's folder.
      variables: the models that it starts from; new ones by default.

    Returns:
      Each trained party, and the phase's result.
    """
    of = data_of(phase)
    folder = self.phase_folder(phase, workdir)
    start = (self.key(settings.PHASES.index(phase)), variables)
    algorithm = from_tuple(self.fit_algorithm(phase))
    data = dict.fromkeys(self.names, self.banks[of])
    if self.stopping[of] is not None:
      data["stopping"] = self.stopping[of].bank
    logging.info("Phase %s, in %s", phase, folder.path)

    def watch(state):
      values = {}
      for name, progress in zip(self.names, state.clients):
        values[f"{name}/epochs"] = progress.epochs
        if self.stopping[of] is not None:
          values[f"{name}/stopping_accuracy"] = progress.accuracy
      return jax.device_get(values)

    def summarize(state, evaluation):
      del evaluation
      trained = [progress.learner.variables for progress in state.clients]
      return {
        "phase": phase,
        "environment": self.config["environment"],
        "seed": self.config["seed"],
        "parties": [
          {
            "name": name,
            "model": model,
            "epochs": int(progress.epochs),
            **result,
          }
          for name, model, progress, result in zip(
            self.names,
            self.model_names,
            state.clients,
            self.evaluators[of](trained),
          )
        ],
      }

    result = training.run(
      algorithm,
      start,
      functools.partial(self.fit_plan, phase),
      data,
      watch,
      rounds=self.config[f"{phase}_epochs"],
      summarize=summarize,
      eval_every=1,
      **self.options(folder),
    )
    state = training.final_state(algorithm, start, folder)
    return [progress.learner for progress in state.clients], result

  def algorithm(self) -> core.Algorithm:
    """The collaboration."""
    return fedmd(
      self.parties,
      digest_loss=self.config["digest_loss"],
      consensus_weights=self.config["consensus_weights"],
      temperature=self.config["temperature"],
      public_transform=self.transforms["public"],
      eval_batch_size=self.speed["eval_batch_size"],
      engine=self.engine,
    )

  def plan(self, round: int) -> Plan:
    """A round's plan; a pure function of the round."""
    if self.config["public_subset"] > len(self.data.public.index):
      raise common.UsageError(
        f"--public_subset={self.config['public_subset']}: there are"
        f" {len(self.data.public.index)} public training images"
      )
    return plan_fedmd(
      self.data.public,
      self.held,
      seed=self.config["seed"],
      round=round,
      subset=self.config["public_subset"],
      digest_batch_size=self.config["digest_batch_size"],
      digest_epochs=self.config["digest_epochs"],
      revisit_batch_size=self.config["revisit_batch_size"],
      revisit_epochs=self.config["revisit_epochs"],
    )

  def evaluate(self, state) -> dict[str, float]:
    """Each party's accuracy and loss on the private task's test images."""
    results = self.evaluators["private"](
      [learner.variables for learner in state.clients]
    )
    return {
      f"{party}/{name}": value
      for party, result in zip(self.names, results)
      for name, value in result.items()
    }

  def summarize(
    self, folder: logs.RunFolder, phases: dict, state, evaluation
  ) -> dict:
    """What `result.json` says of a finished run."""
    config = self.config
    before = {phase: result["parties"] for phase, result in phases.items()}
    parties, sent = [], 0
    for k, (party, model) in enumerate(zip(self.names, self.model_names)):
      variables = state.clients[k].variables
      sizes = bytes_per_round(
        config["public_subset"], self.data.num_classes, variables
      )
      sent += sizes["sent"] + sizes["received"]
      entry = {
        "name": party,
        "model": model,
        "parameters": core.num_parameters(variables.params),
        "examples": int(self.data.private.sizes[k]),
        "public_accuracy": before["public"][k]["test_accuracy"],
        "transfer_accuracy": before["transfer"][k]["test_accuracy"],
        "final_accuracy": evaluation[f"{party}/test_accuracy"],
        "pooled_accuracy": before["pooled"][k]["test_accuracy"],
      }
      entry |= {
        f"{phase}_epochs": of_each[k]["epochs"]
        for phase, of_each in before.items()
      }
      # `weights`: the bytes that sending, or receiving, the model would take.
      entry |= {f"bytes_{name}_per_round": n for name, n in sizes.items()}
      parties.append(entry)
    return {
      "environment": config["environment"],
      "private_source": self.data.source,
      "models": config["models"],
      # 1 is the paper's; the filters are in the models' names.
      "width": config["width"],
      "seed": config["seed"],
      "consensus_weights": config["consensus_weights"] or "equal",
      "stopping_set": {
        name: config["stopping_set"] if subset else "none"
        for name, subset in self.stopping.items()
      },
      "test_examples": len(self.data.private_test.index),
      "bytes_per_round": sent,
      # Of the phases in this run's folder; the collaboration's are `seconds`.
      "phase_seconds": {
        phase: result["seconds"]
        for phase, result in phases.items()
        if (folder.path / phase).exists()
      },
      "parties": parties,
      "mean": {
        name: sum(p[name] for p in parties) / len(parties)
        for name in parties[0]
        if name.endswith("_accuracy")
      },
    }

  def collaborate(
    self, folder: logs.RunFolder, trained: list[Learner], phases: dict
  ) -> dict:
    """Runs or resumes the collaboration."""
    algorithm = from_tuple(self.algorithm())
    start = (self.key(len(settings.PHASES)), trained)
    begun = folder.result() is not None or logs.read_rows(folder.metrics)
    if not from_first(bool(begun)):
      # Round 0: the parties before the collaboration.
      with (
        folder.at_work(),
        logs.metrics_log(
          folder, tensorboard=self.speed["tensorboard"]
        ) as write,
      ):
        state = jit(algorithm.init, once=True)(start)
        write({"round": 0, **self.evaluate(state), "seconds": 0.0})
    logging.info("Collaboration, in %s", folder.path)
    result = training.run(
      algorithm,
      start,
      self.plan,
      dict.fromkeys(self.names, self.banks["private"])
      | {"public": self.banks["public"]},
      self.evaluate,
      rounds=self.config["rounds"],
      summarize=functools.partial(self.summarize, folder, phases),
      eval_every=self.config["eval_every"],
      **self.options(folder),
    )
    draw(
      config=self.config,
      folder=folder.path,
      rows=[common.rows_to_draw(folder)],
      results=[result],
    )
    return result


def from_tuple(algorithm: core.Algorithm) -> core.Algorithm:
  """The algorithm with an `init` that takes its arguments as a tuple."""
  return algorithm._replace(init=lambda args: algorithm.init(*args))


def data_of(phase: str) -> str:
  """The data of a phase before the collaboration: public or private."""
  return "public" if phase == "public" else "private"


def flags_prefix(phase: str) -> str:
  """How the flags of a phase's training begin; pooled has transfer's."""
  return "public" if phase == "public" else "transfer"


def bytes_per_round(
  subset: int, num_classes: int, variables: core.Variables
) -> dict[str, int]:
  """Bytes, of float32 and int32, that a party sends and receives in a round.

  A party receives the positions of the round's public examples and the
  consensus on them, and sends its scores.

  Args:
    subset: N, public examples of a round.
    num_classes: C.
    variables: the party's parameters and statistics.

  Returns:
    `sent` and `received`; for comparison `weights`, what sending the variables
    would take; receiving them would take as many bytes again.

  >>> variables = core.Variables(jax.ShapeDtypeStruct((9, 16), 'float32'), {})
  >>> bytes_per_round(5000, 16, variables)
  {'sent': 320000, 'received': 340000, 'weights': 576}
  """
  scores = 4 * subset * num_classes
  return {
    "sent": scores,
    "received": scores + 4 * subset,
    "weights": training.num_bytes(variables),
  }


def draw(
  config: dict, folder: pathlib.Path, rows: Sequence, results: Sequence[dict]
) -> None:
  """Draws the collaboration, the mean of all seeds, to `curves.png`."""
  pooled = [[p["pooled_accuracy"] for p in r["parties"]] for r in results]
  parties = results[0]["parties"]
  report.collaboration(
    rows,
    folder / "curves.png",
    parties={
      p["name"]: f"{p['name'].removeprefix('party')} {p['model']}"
      for p in parties
    },
    bounds={
      party["name"]: statistics.fmean(values)
      for party, values in zip(parties, zip(*pooled))
    },
    title=config["environment"],
  )


def run(experiment: Experiment, folder: logs.RunFolder) -> dict:
  """Runs the four phases, and returns the result of the last."""
  folder.keep({"data.json": experiment.record, **experiment.sources})
  phases = {}
  public, phases["public"] = experiment.fit("public", folder.path)
  start = [party.variables for party in public]
  own, phases["transfer"] = experiment.fit("transfer", folder.path, start)
  _, phases["pooled"] = experiment.fit("pooled", folder.path, start)
  return experiment.collaborate(folder, own, phases)


def setup(place: pathlib.Path, seed: int) -> tuple[dict, dict]:
  """The flags of a seed's run, `config` and `speed`.

  Raises:
    UsageError: if `--pretrained` is not a run's folder.
    ConfigMismatch: if that run's public phase had other flags.
  """
  config, speed = settings.configuration(place)
  config["seed"] = seed
  if jax.process_index() > 0:  # Only the first reads the other run's folder.
    speed["pretrained"] = None
  elif FLAGS.pretrained:
    of_run = pathlib.Path(FLAGS.pretrained).expanduser().absolute()
    if FLAGS.seeds:
      of_run /= place.name
    speed["pretrained"] = str(of_run)
  if speed["pretrained"]:
    public = pathlib.Path(speed["pretrained"], "public")
    if not (public / "config.json").exists():
      if not FLAGS.pretrained:  # It is gone; a resumed run does without it.
        return config, speed | {"pretrained": None}
      raise common.UsageError(
        f"--pretrained={public.parent}: not the folder of a run (it has no"
        " public/config.json); give a run's --workdir, or leave it out"
      )
    # The public phase must match; other phases are retrained if they do not.
    of_public = settings.of_phase("public", config)
    common.open_folder(public, of_public, speed, named="--pretrained")
  return config, speed


def main() -> None:
  """Runs all seeds, then prints a table."""
  common.refuse(
    "not for FedMD, whose rounds are long", "autotune", "rounds_per_dispatch"
  )
  common.warn_of_idle_engine()
  stopping = f"--stopping_set={FLAGS.stopping_set}"
  if FLAGS.stopping_set != "heldout":
    common.warn_of_idle(f"{stopping} takes none", "heldout_examples")
  if FLAGS.stopping_set == "none":
    common.warn_of_idle(
      f"with {stopping} all epochs are run",
      *("public_patience", "public_min_delta"),
      *("transfer_patience", "transfer_min_delta"),
    )
  if FLAGS.models:
    own_models.warn_of_idle(FLAGS.models, "batch_norm_momentum", "conv")
    if not FLAGS.weak_parties:
      own_models.warn_of_idle(FLAGS.models, "dtype")
  workdir = common.default_workdir(
    "fedmd",
    FLAGS.environment,
    *own_models.labels(FLAGS.models or ()),
    *["seeds"] * bool(FLAGS.seeds),
  )
  places = common.seed_folders(workdir)
  setups = [(place, *setup(place, seed)) for seed, place in places.items()]
  _, config, speed = setups[0]
  experiment = Experiment(config, speed)
  # Raises errors before any folder is made.
  experiment.algorithm()
  experiment.plan(1)
  for phase in settings.PHASES:
    experiment.fit_algorithm(phase)
  folders = [common.open_folder(*s, lengthens=True) for s in setups]
  for of, subset in experiment.stopping.items():
    if subset is None and config["stopping_set"] != "none":
      logging.warning(
        "--stopping_set=%s: no %s training images are left to hold out, so all"
        " epochs are run.",
        config["stopping_set"],
        of,
      )
  results = []
  for (place, config, speed), folder in zip(setups, folders):
    if place != setups[0][0]:
      experiment = None  # frees its data before the next one loads
      common.forget_engine()
      experiment = Experiment(config, speed)
    results.append(run(experiment, folder))
  if FLAGS.seeds:
    rows = [common.rows_to_draw(folder) for folder in folders]
    draw(config, workdir, rows, results)
    launch.write_summary(workdir, {"fedmd": results}, list(places))
  print(report.parties_table([result["parties"] for result in results]))
  print(f"\nCurves: {workdir / 'curves.png'}")


if __name__ == "__main__":
  settings.define_flags()
  refused = ("autotune", "lanes", "microbatch", "rounds_per_dispatch")
  launch.run(main, refused=refused)
