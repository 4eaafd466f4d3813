"""Every flag file makes two rounds, on real images where they are at hand.

The rounds are traced, or with HETFL_TRAIN=1, which takes long, they are run.
"""

import dataclasses
import functools
import importlib
import os

import fml
import jax
import numpy as np
import pytest
import settings
import tables

from hetfl.data import codist_images, vision
from hetfl.data.errors import DataError
from tests.runs import ROOT

# The least, with which the flags' meaning does not change.
LEAST = {
  "codist": ["--clients_per_round=1", "--codist_period=2", "--merge_every=2"]
  + ["--distill_steps=1", "--distill_batch_size=2", "--c4_path=/nowhere"],
  "fml": ["--local_epochs=1", "--batch_size=16"],
  "fedmd": ["--public_examples=40", "--public_subset=20"]
  + ["--heldout_examples=10", "--revisit_epochs=1", "--examples_per_class=1"],
  "compare": ["--examples=200", "--num_clients=4"],
}
# What no program reads: it is in plans, in data, or a number in the state.
NUMBERS = ("partition", "merge_weights", "high_capacity_clients", "environment")
NUMBERS += ("bad_clients", "distill_examples", "consensus_weights")
TRAIN = bool(os.environ.get("HETFL_TRAIN"))
KNOWN = {}  # What rounds return, by what their programs depend on.
TABLES = tables.tables()


def few(bank, classes):
  """The first images of each class, as many as there may be shards of it."""
  rows = [np.flatnonzero(bank["y"] == c)[:6] for c in range(classes)]
  rows = np.concatenate(rows)
  return {name: array[rows] for name, array in bank.items()}


def load_few(load, *args, **options):
  """`vision.load` of few images."""
  whole = load(*args, **options)
  train, test = (few(b, whole.num_classes) for b in (whole.train, whole.test))
  return whole._replace(train=train, test=test)


def rounds(s, algorithm, start, plans, data):
  """What two rounds return, but for its values if nothing is compiled."""
  arrays, tree = jax.tree.flatten((plans, data))
  values = {n: v for n, v in s.of_kind("result").items() if n not in NUMBERS}
  program = str((values, tree, *map(jax.typeof, arrays)))
  if program not in KNOWN:
    call = (lambda f, *args: f(*args)) if TRAIN else jax.eval_shape
    state = call(jax.jit(algorithm.init), *start)
    step = jax.jit(algorithm.step)  # Traced once.
    for plan in plans:
      state, metrics = call(step, state, plan, data)
      if TRAIN:
        assert all(np.isfinite(m.total) for m in metrics.values())
    KNOWN[program] = state, metrics
  return KNOWN[program]


def run(module, given, algorithm):
  """Two rounds of a flag file's algorithm, and of FedMD's phases."""
  words = module.words(given.values, algorithm)
  s = module.SETTINGS.resolve(given.values, words)
  if algorithm:
    flag = "method" if "method" in given.values else "algorithm"
    s = dataclasses.replace(s, **{flag: algorithm})
    experiment = module.Experiment(s)
    plans = [experiment.plan(s, t) for t in (1, 2)]
    start, data = (jax.random.key(0),), experiment.device_data(s)
    return rounds(s, experiment.algorithm(s), start, plans, data)
  experiment = module.Experiment(s)
  for phase in module.PHASES[:-1]:
    of = module.data_of(phase)
    data = dict.fromkeys(experiment.names, experiment.banks[of])
    if experiment.stopping[of] is not None:
      data["stopping"] = experiment.stopping[of].bank
    plans = [experiment.fit_plan(phase, 1)]
    fit, start = experiment.fits[of], (jax.random.key(0),)
    state, _ = rounds(module.of_phase(s, phase), fit, start, plans, data)
  start = (jax.random.key(0), [party.learner for party in state.clients])
  data = dict.fromkeys(experiment.names, experiment.banks["private"])
  data["public"] = experiment.banks["public"]
  plans = [experiment.plan(t) for t in (1, 2)]
  return rounds(s, experiment.algorithm(), start, plans, data)


@pytest.mark.parametrize("first", ["", "# A comment\n"])
def test_a_flag_file_may_begin_with_a_byte_order_mark(tmp_path, first):
  file = tmp_path / "windows.flags"
  file.write_text(f"{first}--rounds=3\n--seed=1\n", encoding="utf-8-sig")
  given = settings.parse([f"--flagfile={file}", "--seed=2"], fml.Fml)
  assert given.values == {"rounds": 3, "seed": 2}
  assert given.typed == {"seed"}


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_every_flag_file_makes_two_rounds(monkeypatch, name):
  table = TABLES[name]
  module = importlib.import_module(f"{table.command}_run")
  fewer = functools.partial(load_few, vision.load)
  # FML's clients pass over all images.
  load = fewer if table.command == "fml" else vision.load
  monkeypatch.setattr(vision, "load", functools.cache(load))
  load = codist_images.load_codist_images
  cached = functools.wraps(load)(functools.cache(load))
  monkeypatch.setattr(codist_images, "load_codist_images", cached)
  for cell in table.cells:
    file = ROOT / f"experiments/flags/{cell.name}.flags"
    least = ["--rounds=2", "--engine=inline", *LEAST[table.command]]
    if not TRAIN:
      least.append("--conv=native")  # It is traced soonest.
      # Each party, and each network of full size, is traced by itself.
      if name == "compare_cifar100":
        least.append("--models=htfe2")
      if table.command == "fedmd":
        least += ["--num_parties=2", "--consensus_weights=1"]
    if "by_writer" in cell.name:  # A party has all that its writer wrote.
      least[least.index("--examples_per_class=1")] = "--min_writer_examples=1"
    given = settings.parse([f"--flagfile={file}", *least], module.SETTINGS)
    names = given.values.get("method", ("",))
    for algorithm in given.values.get("algorithm", names):
      try:
        with jax.numpy_rank_promotion("allow"):
          state, metrics = run(module, given, algorithm)
      except DataError as error:  # It is not at hand.
        assert not os.environ.get("HETFL_DATA_DIR") or "cifar" not in str(error)
        continue
      assert jax.tree.leaves(state) and metrics
