"""Runs the phases of FedMD, as `fedmd.py` asks for.

`s.learning_rate` is the flag `--learning_rate`, and so on.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import itertools
import pathlib
from typing import Any

from absl import logging
from fedmd import FedMD, PHASES
import jax
import jax.numpy as jnp
import launch
import own_models
from settings import Given, UsageError

import hetfl
from hetfl import augment, checks, core
from hetfl.algorithms import public
from hetfl.data import fedmd_images, files
from hetfl.engine import from_first, jit
from hetfl.models import fedmd as models
from hetfl.run import charts, logs, report, training

SETTINGS = FedMD


def words(values: Mapping[str, Any], algorithm: str = "") -> set[str]:
  """What holds of a run; see `settings`."""
  s = FedMD.resolve(values, ())
  own = own_models.labels(values.get("models", ()))
  found = {*PHASES, "images", s.environment, s.stopping_set, s.digest_loss}
  found |= {"own_models"} if own else {"hetfl_models"}
  found |= {"hetfl_models"} if s.weak_parties else set()
  return found | launch.machine_words(values)


def make_parties(
  s: FedMD,
  num_classes: int,
  image_shape: tuple[int, int, int],
  transform: core.Preparation,
) -> tuple[list[str], list[hetfl.Participant]]:
  """Makes a run's parties.

  Args:
    s: the run's settings.
    num_classes: C, of public and private classes together.
    image_shape: height, width, channels.
    transform: prepares their private images.

  Returns:
    The names of the parties' models, and the parties.
  """
  own, shown = [], f"--models={','.join(s.models)}"
  if any(map(own_models.is_own, s.models)) or len(s.models) > 1:
    own_models.check("models", s.models, ())
    own = s.models
  strong = s.num_parties - s.weak_parties
  if own and len(own) > strong:
    raise UsageError(
      f"{shown}: {len(own)} models, but {strong} parties that are not"
      " --weak_parties; give more --num_parties"
    )
  named = [
    (name, own_models.load("models", name, num_classes, image_shape))
    for name in itertools.islice(itertools.cycle(own), strong if own else 0)
  ]
  if rest := s.num_parties - len(named):
    make = models.party_models
    options = s.arguments(
      make,
      # If all the rest are weak parties, the table does not matter.
      table="small" if own else s.models[0],
      num_parties=rest,
      num_classes=num_classes,
    )
    example = jnp.zeros((1, *image_shape))
    named += [(n, core.Model.from_flax(m, example)) for n, m in make(**options)]
  parties = []
  for k, (name, model) in enumerate(named):
    size = "x".join(map(str, image_shape[:2]))
    with checks.noted(
      f"party{k}'s ({name}) does not fit images of {size}; give other --models"
    ):
      model.shapes()
    parties.append(
      hetfl.Participant(
        model,
        f"party{k}",
        learning_rate=s.learning_rate,
        transform=transform,
        optimizer=hetfl.optimizers.keras_adam,
        l2=s.l2,
        penalty=models.head_penalty,
      )
    )
  return [name for name, _ in named], parties


class Experiment:
  """Data, models and engine of a run."""

  def __init__(self, s: FedMD):
    heldout = s.stopping_set == "heldout"
    self.s, self.engine = s, launch.engine_of(s)
    load, none = fedmd_images.load_fedmd_images, {"heldout_examples": 0}
    self.data = data = load(**s.arguments(load, **({} if heldout else none)))
    self.transforms = {
      "public": functools.partial(augment.center, mean=data.public_mean),
      "private": functools.partial(augment.center, mean=data.private_mean),
    }
    self.model_names, self.parties = make_parties(
      s, data.num_classes, data.image_shape, self.transforms["private"]
    )
    self.names = [party.name for party in self.parties]
    self.held = dict(zip(self.names, data.private.subsets()))
    self.private = data.private.examples()
    self.banks, self.stopping = {}, {}
    self.evaluators, self.fits = {}, {}
    for of, train, test, heldout in (
      ("public", data.public, data.public_test, data.public_stopping),
      ("private", self.private, data.private_test, data.private_stopping),
    ):
      given = checks.given(train=train, test=test, heldout=heldout)
      sets, _ = launch.put(given, {})
      self.banks[of] = sets["train"].bank
      self.stopping[of] = sets.get(s.stopping_set)  # None for "none".
      self.evaluators[of] = hetfl.Evaluator(
        [party.model for party in self.parties],
        {"test": sets["test"]},
        transform=self.transforms[of],
        engine=self.engine,
        batch_size=s.eval_batch_size,
      )
      # Transfer and pooled learning share one, and so compiled programs.
      transform, kind = self.transforms[of], settings_of(of)
      self.fits[of] = hetfl.fit(
        [dataclasses.replace(p, transform=transform) for p in self.parties],
        patience=getattr(s, f"{kind}_patience"),
        min_delta=getattr(s, f"{kind}_min_delta"),
        eval_batch_size=s.eval_batch_size,
        engine=self.engine,
      )

  @functools.cached_property
  def files(self) -> dict[bool, dict[str, bytes]]:
    """Files of the public phase (True) and of the others; reads all data."""
    data = self.data
    public = (data.public, data.public_stopping, data.public_test)
    private = (data.private, data.private_stopping, data.private_test)
    # With a user's images the models' outputs depend on the private classes.
    own = self.s.environment == "npz"
    classes = {"num_classes": data.num_classes} if own else {}
    records = {
      True: files.record(public, **classes),
      False: files.record((*public, *private), source=data.source),
    }
    sources = own_models.sources(self.s.models)
    return {of: {"data.json": text, **sources} for of, text in records.items()}

  def key(self, phase: str) -> jax.Array:
    """The key of a phase."""
    key = jax.random.key(self.s.seed)
    return jax.random.fold_in(key, PHASES.index(phase))

  def fit_plan(self, phase: str, round: int) -> hetfl.Plan:
    """An epoch's plan; a pure function of the epoch."""
    examples = {
      "public": dict.fromkeys(self.names, self.data.public),
      "transfer": self.held,
      "pooled": dict.fromkeys(self.names, self.private),
    }
    return hetfl.plan_fit(
      examples[phase],
      self.stopping[data_of(phase)],
      seed=self.s.seed,
      phase=PHASES.index(phase),
      round=round,
      batch_size=getattr(self.s, f"{settings_of(phase)}_batch_size"),
    )

  def phase_folder(self, phase: str, workdir: pathlib.Path) -> logs.RunFolder:
    """A phase's folder, of this run or the one whose phases it reuses."""

    def opened(path: pathlib.Path, named: str) -> logs.RunFolder:
      folder = launch.open_folder(of_phase(self.s, phase), path, named)
      folder.keep(self.files[phase == "public"])
      return folder

    if self.s.pretrained:
      other = pathlib.Path(self.s.pretrained, phase)
      try:
        if phase == "public" or (other / "config.json").exists():
          return opened(other, "--pretrained")
      except logs.ConfigMismatch as error:
        if phase == "public":
          raise
        logging.warning("Phase %s is retrained, not reused: %s", phase, error)
    return opened(workdir / phase, "--workdir")

  def fit(
    self,
    phase: str,
    workdir: pathlib.Path,
    variables: Sequence[core.Variables] | None = None,
  ) -> tuple[list[hetfl.Learner], dict]:
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
    start = (self.key(phase), variables)
    algorithm = from_tuple(self.fits[of])
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
      results = self.evaluators[of](
        [progress.learner.variables for progress in state.clients]
      )
      parties = zip(self.names, self.model_names, state.clients, results)
      return {
        "phase": phase,
        "environment": self.s.environment,
        "seed": self.s.seed,
        "parties": [
          {"name": name, "model": model, "epochs": int(p.epochs), **result}
          for name, model, p, result in parties
        ],
      }

    options = self.s.arguments(
      training.run,
      engine=self.engine,
      rounds=getattr(self.s, f"{phase}_epochs"),
      eval_every=1,
      folder=folder,
      summarize=summarize,
    )
    plan = functools.partial(self.fit_plan, phase)
    result = training.run(algorithm, start, plan, data, watch, **options)
    state = training.final_state(algorithm, start, folder)
    return [progress.learner for progress in state.clients], result

  def algorithm(self) -> core.Algorithm:
    """The collaboration."""
    return hetfl.fedmd(
      self.parties,
      # By name: digest_loss, consensus_weights, temperature, eval_batch_size.
      **self.s.arguments(
        hetfl.fedmd,
        public_transform=self.transforms["public"],
        engine=self.engine,
      ),
    )

  def plan(self, round: int) -> hetfl.Plan:
    """A round's plan; a pure function of the round."""
    # By name: seed, subset, and both phases' epochs and batch sizes.
    options = self.s.arguments(hetfl.plan_fedmd, round=round)
    return hetfl.plan_fedmd(self.data.public, self.held, **options)

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
    before = {phase: result["parties"] for phase, result in phases.items()}
    parties, images = [], self.s.public_subset
    sent, received = public.score_bytes(images, self.data.num_classes)
    for k, (party, model) in enumerate(zip(self.names, self.model_names)):
      variables = state.clients[k].variables
      accuracy = {p: of[k]["test_accuracy"] for p, of in before.items()}
      accuracy["final"] = evaluation[f"{party}/test_accuracy"]
      order = ("public", "transfer", "final", "pooled")
      parties.append(
        {
          "name": party,
          "model": model,
          "parameters": core.num_parameters(variables.params),
          "examples": int(self.data.private.sizes[k]),
          **{f"{when}_accuracy": accuracy[when] for when in order},
          **{f"{p}_epochs": of[k]["epochs"] for p, of in before.items()},
          "bytes_sent_per_round": sent,
          "bytes_received_per_round": received,
          # What sending, or receiving, the model would take.
          "bytes_weights_per_round": training.num_bytes(variables),
        }
      )
    s = self.s
    return {
      "environment": s.environment,
      "private_source": self.data.source,
      "models": ",".join(s.models),
      # 1 is the paper's; the filters are in the models' names.
      "width": s.width,
      "seed": s.seed,
      "consensus_weights": s.consensus_weights or "equal",
      "stopping_set": {
        name: s.stopping_set if subset else "none"
        for name, subset in self.stopping.items()
      },
      "test_examples": len(self.data.private_test.index),
      "bytes_per_round": len(parties) * (sent + received),
      # Of the phases in this run's folder; the collaboration's are `seconds`.
      "phase_seconds": {
        phase: result["seconds"]
        for phase, result in phases.items()
        if (folder.path / phase).exists()
      },
      "parties": parties,
      **{k: r[k] for r in phases.values() for k in r if k == "diverged"},
      "mean": {
        name: report.as_floats([p[name] for p in parties]).mean()
        for name in parties[0]
        if name.endswith("_accuracy")
      },
    }

  def run_all(self, folder: logs.RunFolder) -> dict:
    """Runs the four phases, and returns the result of the last."""
    folder.keep(self.files[False])
    phases = {}
    public, phases["public"] = self.fit("public", folder.path)
    start = [party.variables for party in public]
    own, phases["transfer"] = self.fit("transfer", folder.path, start)
    for party in phases["transfer"]["parties"]:
      if party["test_loss"] is None:
        logging.warning("%s has diverged; nobody hears it.", party["name"])
    _, phases["pooled"] = self.fit("pooled", folder.path, start)
    algorithm = from_tuple(self.algorithm())
    start = (self.key("collaboration"), own)
    begun = folder.result() is not None or logs.read_rows(folder.metrics)
    if not from_first(bool(begun)):
      # Round 0: the parties before the collaboration.
      with (
        folder.at_work(),
        logs.metrics_log(folder, tensorboard=self.s.tensorboard) as write,
      ):
        state = jit(algorithm.init, once=True)(start)
        write({"round": 0, **self.evaluate(state), "seconds": 0.0})
    logging.info("Collaboration, in %s", folder.path)
    data = dict.fromkeys(self.names, self.banks["private"])
    data["public"] = self.banks["public"]
    options = self.s.arguments(
      training.run,
      engine=self.engine,
      folder=folder,
      summarize=functools.partial(self.summarize, folder, phases),
    )
    result = training.run(
      algorithm, start, self.plan, data, self.evaluate, **options
    )
    rows = [logs.read_rows(folder.metrics)]
    draw(self.s.environment, folder.path, rows, [result])
    return result


def from_tuple(algorithm: core.Algorithm) -> core.Algorithm:
  """The algorithm with an `init` that takes its arguments as a tuple."""
  return algorithm._replace(init=lambda args: algorithm.init(*args))


def data_of(phase: str) -> str:
  """The data of a phase before the collaboration: public or private."""
  return "public" if phase == "public" else "private"


def settings_of(phase: str) -> str:
  """How the settings of training in a phase, or on its data, begin.

  All but those of public training are transfer learning's.
  """
  return "public" if phase == "public" else "transfer"


def of_phase(s: FedMD, phase: str) -> FedMD:
  """The settings of a phase, without effect where they are of others."""
  return dataclasses.replace(s, words=s.words - {*PHASES} | {phase})


def draw(
  title: str, folder: pathlib.Path, rows: Sequence, results: Sequence[dict]
) -> None:
  """Draws the collaboration, the mean of all seeds, to `curves.png`."""
  of_seeds = list(zip(*(result["parties"] for result in results)))
  charts.collaboration(
    rows,
    folder / "curves.png",
    parties={
      p["name"]: f"{p['name'].removeprefix('party')} {p['model']}"
      for p, *_ in of_seeds
    },
    bounds={
      party[0]["name"]: [p["pooled_accuracy"] for p in party]
      for party in of_seeds
    },
    title=title,
  )


def settled(given: Given, seed: int, place: pathlib.Path) -> FedMD:
  """The settings of a seed's run, with the place of its pretrained phases.

  Raises:
    UsageError: if `--pretrained` is not a run's folder.
    ConfigMismatch: if that run's public phase had other flags.
  """
  s = launch.settle(FedMD, given, words(given.values), place)
  s, asked = dataclasses.replace(s, seed=seed), given.values.get("pretrained")
  if jax.process_index() > 0:  # Only the first reads the other run's folder.
    return dataclasses.replace(s, pretrained=None)
  if not s.pretrained:
    return s
  path = pathlib.Path(s.pretrained)
  if asked:
    path = path.absolute() / (place.name if "seeds" in given.values else "")
  if not (path / "public/config.json").exists():
    if not asked:  # It is gone; a resumed run does without it.
      return dataclasses.replace(s, pretrained=None)
    raise UsageError(
      f"--pretrained={path}: not the folder of a run (it has no"
      " public/config.json); give a run's --workdir, or leave it out"
    )
  # The public phase must match; other phases are retrained if they do not.
  launch.open_folder(of_phase(s, "public"), path / "public", "--pretrained")
  return dataclasses.replace(s, pretrained=str(path))


def main(given: Given) -> None:
  """Runs all seeds, then prints a table."""
  label = own_models.labels(given.values.get("models", ()))
  environment = FedMD.resolve(given.values, ()).environment
  workdir = launch.workdir_of(given, "fedmd", environment, *label)
  places = launch.seed_folders(given, workdir)
  runs = [(settled(given, seed, p), p) for seed, p in places.items()]
  launch.warn_of_idle(given, [s for s, _ in runs])
  first = runs[0][0]
  experiment = Experiment(first)
  # Raises errors before any folder is made.
  experiment.algorithm()
  experiment.plan(1)
  folders = [launch.open_folder(s, p, lengthens=True) for s, p in runs]
  results = []
  for (s, _), folder in zip(runs, folders):
    if s is not first:
      experiment = None  # frees its data before the next one loads
      experiment = Experiment(s)
    results.append(experiment.run_all(folder))
  if "seeds" in given.values:
    rows = [logs.read_rows(folder.metrics) for folder in folders]
    draw(environment, workdir, rows, results)
    report.write_summary(workdir, {"fedmd": results}, list(places))
  print(report.parties_table([result["parties"] for result in results]))
  print(f"\nCurves: {workdir / 'curves.png'}")
  launch.check_finite({"fedmd": results})
