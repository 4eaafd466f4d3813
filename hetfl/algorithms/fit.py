"""Participants that train by themselves until they converge.

Reference: Li & Wang 2019, "FedMD: Heterogenous Federated Learning via Model
Distillation", the first line of algorithm 1. What the paper leaves open follows
the released code, github.com/diogenes0319/FedMD_clean.
"""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core, evaluate, local
from hetfl.batches import Batches, in_order, Plan, row_of
from hetfl.engine import batch_size_or_default, Engine, Inline, Work
from hetfl.plans import plan_round
from hetfl.population import check_kind, positions_in, Subset


@flax.struct.dataclass
class Progress:
  """A party that trains until its accuracy stops rising.

  Attributes:
    learner: the model and its optimizer.
    accuracy: `float32[]`, on the stopping set after the last epoch.
    best: `float32[]`, the last accuracy that counted as progress.
    wait: `int32[]`, epochs since then.
    epochs: `int32[]`, epochs trained.
  """

  learner: local.Learner
  accuracy: jax.Array
  best: jax.Array
  wait: jax.Array
  epochs: jax.Array


def fit(
  parties: Sequence[local.Participant],
  *,
  patience: int = 3,
  min_delta: float = 1e-3,
  eval_batch_size: int | None = None,
  engine: Engine | None = None,
) -> core.Algorithm:
  """Trains each party by itself, to convergence; a step is an epoch.

  A party stops, and keeps its last epoch's model, when its accuracy on the
  stopping set has not risen by more than `min_delta` above its best for
  `patience` epochs. This is classification accuracy, whatever the loss; train
  models that are not classifiers without a stopping set.

  Args:
    parties: P parties.
    patience: epochs without progress after which a party stops.
    min_delta: the accuracy, as a fraction, must rise by more than this to count
      as progress.
    eval_batch_size: examples evaluated at once, by default 40 on CPUs and 1,000
      elsewhere; changes speed only.
    engine: where the work runs, by default `Inline()`; see `hetfl.engine`.

  Returns:
    The algorithm. Its `init` takes a key and, to start from existing models, P
    `Variables`; optimizers start afresh. Its `step` takes a plan of `plan_fit`
    and the banks on the device by the parties' names, and `stopping`; without
    a stopping set no party stops. Its state's `clients` holds a `Progress` for
    each party, its metrics are each party's `NAME/loss`, the mean over the
    epoch's steps.

  Raises:
    ValueError: if a value is out of its range.

  Reference: Li & Wang 2019, algorithm 1, "Transfer learning", and table 4's
  training on pooled data; Keras's `EarlyStopping` without
  `restore_best_weights`, as in the released code.

  >>> linear = lambda *w: core.Model(
  ...     lambda key: core.Variables(jnp.array([w]), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> party = local.Participant(linear(0., 0.), 'a', learning_rate=1.)
  >>> plan = plan_fit({'a': Subset.whole(bank)}, seed=0, round=1, batch_size=1)
  >>> algorithm = fit([party])
  >>> state, metrics = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan, {'a': bank})
  >>> state.clients[0].learner.params.tolist()
  [[0.5, -0.5]]
  >>> float(metrics['a/loss'].value)  # log 2
  0.693...
  """
  parties = core.unique_names("parties", parties, local.Participant)
  engine = engine or Inline()
  checks.between(0, 1, min_delta=min_delta)
  checks.counts(patience=patience)
  eval_batch_size = batch_size_or_default(eval_batch_size)
  train = [local.own_training(party) for party in parties]
  measure = [
    evaluate.measure_task(party.model, party.transform) for party in parties
  ]
  optimizers = [party.optimizer for party in parties]

  def init(key, variables=None):
    return core.State(
      jnp.copy(key),  # Since states may be donated.
      local.hyper_of(parties),
      clients=tuple(
        Progress(
          learner=learner,
          accuracy=jnp.zeros((), jnp.float32),
          # Below any accuracy, but finite: other values mark diverged states.
          best=jnp.full((), jnp.finfo(jnp.float32).min, jnp.float32),
          wait=jnp.zeros((), jnp.int32),
          epochs=jnp.zeros((), jnp.int32),
        )
        for learner in local.start_learners(
          parties, optimizers, key, variables, first=2**31
        )
      ),
    )

  def step(state, plan, data):
    key = jax.random.fold_in(state.key, plan.round)
    active = [
      (party.wait < patience).astype(np.int32) for party in state.clients
    ]
    works = []
    for k, (party, task) in enumerate(zip(parties, train)):
      learner = state.clients[k].learner
      context = local.values_of(state, k)  # The learning rate.
      bank = checks.bank(data, party.name)
      row = row_of(plan, party.name, k, stats=learner.stats)
      works.append(
        local.work(task, context, key, bank, learner, row, when=active[k])
      )
    learners, losses = zip(*engine.run(*works))
    accuracy = [party.accuracy for party in state.clients]
    stops = "stopping" in plan.batches
    if stops:
      bank = checks.bank(data, "stopping")
      index = row_of(plan, "stopping").index[0]
      (index,), (steps,), *_ = in_order(index, eval_batch_size)
      measured = engine.run(
        *(
          Work(task, (learner.variables, bank), (None, index), on * steps)
          for task, learner, on in zip(measure, learners, active)
        )
      )
      accuracy = [means["accuracy"] for means in measured]
    clients = tuple(
      _after_epoch(*args, min_delta, stops)
      for args in zip(state.clients, learners, accuracy, active)
    )
    metrics = local.metrics_of(parties, loss=losses)
    return state.replace(clients=clients), metrics

  return core.Algorithm(init, step)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _after_epoch(before, learner, accuracy, active, min_delta, stops):
  """A party's progress after an epoch; without one it stays as it is."""
  best, wait = before.best, before.wait
  if stops:
    accuracy = accuracy.value  # NaN for a party that has stopped.
    # A rise of exactly `min_delta` is none, however it is rounded.
    better = accuracy - best > min_delta + 1e-6
    best = jnp.where(better, accuracy, best)
    wait = jnp.where(better, 0, wait + 1)
  after = Progress(learner, accuracy, best, wait, before.epochs + 1)
  return optax.tree.where(active, after, before)


def plan_fit(
  examples: Mapping[str, Subset],
  stopping: Subset | None = None,
  *,
  seed: int,
  phase: int = 0,
  round: int,
  batch_size: int,
) -> Plan:
  """One epoch of every party over its examples, each in its own random order.

  A short last batch is filled up with the epoch's first examples, so that all
  batches have the same size: batch normalisation would treat empty places as
  images. Departure: Keras's last batch is short.

  Args:
    examples: the parties' examples by their names.
    stopping: the stopping set; `None` for none.
    seed: the run's seed.
    phase: distinguishes the phases of a run, which train one after another.
    round: the number of the epoch, from 1.
    batch_size: B; all examples of a party that has fewer.

  Returns:
    The plan; the same for the same arguments.

  Raises:
    ValueError: if a party has no examples, or a number is not at least 1.

  >>> bank = {'y': np.zeros(9)}
  >>> held = {'a': Subset(bank, np.arange(4)), 'b': Subset(bank, np.arange(9))}
  >>> plan = plan_fit(held, seed=0, round=1, batch_size=5)
  >>> [plan.batches[name].steps.tolist() for name in 'ab']
  [[1], [2]]
  """
  checks.counts(batch_size=batch_size)
  batches = plan_parties(
    examples, batch_size=batch_size, seed=seed, phase=phase, round=round
  )
  if stopping is not None:
    check_kind(stopping, "stopping", Subset)
    if "stopping" in batches:
      raise ValueError("examples: 'stopping' is the name of the stopping set")
    index = positions_in(stopping.bank, stopping.index, "stopping")
    batches["stopping"] = in_order(index, len(index))
  return Plan(np.int32(round), batches)


def plan_parties(
  examples: Mapping[str, Subset], *, batch_size: int, **options: Any
) -> dict[str, Batches]:
  """Parties' full batches: the tail is "repeat", B at most what a party holds.

  Args:
    examples: the parties' examples by their names.
    batch_size: B; all examples of a party that has fewer.
    **options: see `plan_round`.

  Returns:
    The batches by the parties' names, one row each.

  Raises:
    ValueError: one has no examples, or as `plan_round`.
  """
  for name, held in examples.items():
    check_kind(held, name, Subset)
    if not len(held.index):
      raise ValueError(f"{name}: it has no examples")
  sizes = [min(batch_size, len(held.index)) for held in examples.values()]
  plan = plan_round(examples, batch_size=sizes, tail="repeat", **options)
  return plan.batches
