"""Rounds of parties that share class scores on public examples: their phases.

FedMD, DS-FL and KT-pFL differ in the order of the phases, and in what the
server makes of the scores.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core, local
from hetfl.batches import gather, in_order, of_round, Plan, prepare, row_of
from hetfl.clients import group_clients
from hetfl.engine import batch_size_or_default, Engine, Inline, Task, Work

PyTree = Any


class Translator(NamedTuple):
  """The scores that parties share, and the loss between party and target.

  Attributes:
    scores: `(logits [..., C], temperature) -> float[..., C]`.
    loss: `(logits [B, C], target [B, C], temperature) -> float[B]`.
    of_classes: whether scores are of classes: private labels other than one
      class per example are then refused.
  """

  scores: Callable[[jax.Array, jax.Array | float], jax.Array]
  loss: Callable[[jax.Array, jax.Array, jax.Array | float], jax.Array]
  of_classes: bool = False


class Parties:
  """P parties that keep models of their own, and the phases of their rounds.

  Both optimizers of a party persist, that of Digest and that of Revisit. The
  phases take the round's plan, of `plan_fedmd`, and the banks on the device:
  `public`, and each party's by its name.

  Args:
    parties: P parties, whose models have the same number of outputs.
    translator: what they share, and how they learn from targets.
    server: how the server's model, which only digests, trains; or `None`.
    public_transform: applied to each public batch as stored in its bank; a
      party's own transform is for its private batches.
    eval_batch_size: examples at once in `communicate`, by default 40 on CPUs
      and 1,000 elsewhere; changes speed only.
    engine: where the work runs, by default `Inline()`; see `hetfl.engine`.

  Attributes:
    parties: the parties.
    students: the parties and, after them, the server if it has a model.

  Raises:
    ValueError: two have the same name, or a value is out of its range.
  """

  def __init__(
    self,
    parties: Sequence[local.Participant],
    translator: Translator,
    *,
    server: local.Participant | None = None,
    public_transform: core.Preparation | None = None,
    eval_batch_size: int | None = None,
    engine: Engine | None = None,
  ):
    self.parties = core.unique_names("parties", parties, local.Participant)
    self.students = self.parties
    if server is not None:
      everyone = (*parties, server)
      self.students = core.unique_names(
        "parties and server", everyone, local.Participant
      )
    self._engine = engine or Inline()
    self._batch_size = batch_size_or_default(eval_batch_size)
    how = translator, public_transform
    first = {k: of[0] for of in group_clients(self.students) for k in of}

    def tasks(make):
      """A task for each student; those that are alike share one."""
      made = functools.cache(lambda k: make(self.students[k]))
      return [made(first[k]) for k in range(len(self.students))]

    def revisit(student):
      if translator.of_classes:
        why = "parties share softmaxes", "use fedmd with 'mae' or a Translator"
        student = local.of_classes(student, *why)
      return local.own_training(student)

    self._scores = tasks(lambda student: _scores_task(student, *how))
    self._phases = {
      "digest": tasks(lambda student: _digest_task(student, *how)),
      "revisit": tasks(revisit),
    }

  def init(
    self,
    key: jax.Array,
    trained: Sequence[local.Learner] | None,
    hyper: dict[str, jax.Array],
    server: PyTree = (),
  ) -> core.State:
    """The state before the first round.

    Args:
      key: the run's key.
      trained: P learners to start from, whose optimizers continue in `revisit`;
        `None` makes new models.
      hyper: the algorithm's hyper-parameters; `temperature`, which the
        translator takes, is one, by default 1.
      server: what a server without a model keeps.

    Returns:
      The state; `clients` holds a `Learner` for each party, with the states of
      its two optimizers by their phases, `server` the server's, if it has one.
    """
    optimizers = [student.optimizer for student in self.students]
    learners = local.start_learners(self.students, optimizers, key, first=2**31)
    new, last = learners[: len(self.parties)], learners[len(self.parties) :]
    if trained is not None:
      if len(trained) != len(new):
        raise ValueError(
          f"trained: give a Learner for each of {len(new)} parties, not"
          f" {len(trained)}"
        )
      for party, learner, given in zip(self.parties, new, trained):
        checks.alike(party.label, given, learner)
      new = jax.tree.map(jnp.copy, tuple(trained))
    clients = tuple(
      learner._replace(
        opt_state={
          # Like the one from `Learner.start`, which has checked the optimizer.
          "digest": core.unshared(
            party.optimizer(0.0).init(learner.params), learner.variables
          ),
          "revisit": learner.opt_state,
        }
      )
      for party, learner in zip(self.parties, new)
    )
    values = local.hyper_of(self.students) | core.hyper(temperature=1.0) | hyper
    server = last[0] if last else server
    return core.State(jnp.copy(key), values, server, clients)  # If donated.

  def communicate(
    self, state: core.State, plan: Plan, data: dict[str, core.Batch]
  ) -> list[jax.Array]:
    """Each party's scores on the round's N public examples, `float[N, C]`."""
    subset = _subset(plan)
    lots = in_order(subset, self._batch_size).index[0]
    public, steps = checks.bank(data, "public"), np.ones(len(lots), int)
    works = [
      Work(
        task,
        (_context(state, k), kept.variables, public),
        lots,
        steps,
        at_once=1,
      )
      for k, (task, kept) in enumerate(zip(self._scores, state.clients))
    ]
    return _without_lots(self._engine.run(*works), len(subset))

  def heard(self, plan: Plan, scores: Sequence[jax.Array]) -> jax.Array:
    """Which parties are heard: those that take part and have not diverged.

    Args:
      plan: the round's plan; those that take part have steps of Digest.
      scores: each party's scores.

    Returns:
      `float32[P]`, ones and zeros; 0 where a score is NaN or infinite, but for
      minus infinity, the logit of a class that is left out.
    """
    steps = of_round(plan, "digest", len(self.parties)).steps
    return jnp.asarray(steps > 0, jnp.float32) * known(scores)

  def distribute(
    self, plan: Plan, data: dict[str, core.Batch], *targets: jax.Array
  ) -> list[core.Batch]:
    """The round's public examples, gathered once, with each of some targets.

    Args:
      plan: the round's plan.
      data: holds the public bank.
      *targets: each `float[N, C]`.

    Returns:
      For each a bank of N examples, as stored, with the target as `consensus`.
    """
    public, subset = checks.bank(data, "public"), _subset(plan)
    shown, known = _shown(public, subset, targets)
    return [{**shown, "consensus": target} for target in known]

  def digest(
    self,
    state: core.State,
    plan: Plan,
    shown: Sequence[core.Batch],
    heard: jax.Array | None = None,
  ) -> tuple[core.State, list[core.Mean]]:
    """Each student approaches its targets on the round's public examples.

    Args:
      state: the state.
      plan: the round's plan.
      shown: for each student what `distribute` returned.
      heard: the weights of those whose scores made the targets; if all are 0,
        there are no targets, and the students stay as they are.

    Returns:
      The state, and each student's mean loss over its steps.
    """
    number = len(self.parties)
    rows = [row_of(plan, "digest", k, rows=number) for k in range(number)]
    if len(self.students) > number:  # The server has the first one's batches.
      steps = of_round(plan, "digest").steps.max()
      client = np.asarray(number, np.int32)
      rows.append(rows[0]._replace(steps=steps, client=client))
    return self._train("digest", state, plan, shown, rows, heard)

  def revisit(
    self, state: core.State, plan: Plan, data: dict[str, core.Batch]
  ) -> tuple[core.State, list[core.Mean]]:
    """Each party trains on its own private examples.

    Args:
      state: the state.
      plan: the round's plan.
      data: the parties' banks, or others for the plan's positions, such as a
        party's examples beside public ones.

    Returns:
      The state, and each party's mean loss over its steps.
    """
    banks = [checks.bank(data, party.name) for party in self.parties]
    rows = [
      row_of(plan, party.name, k, stats=kept.stats)
      for k, (party, kept) in enumerate(zip(self.parties, state.clients))
    ]
    return self._train("revisit", state, plan, banks, rows)

  def _train(self, phase, state, plan, banks, rows, heard=None):
    """Runs a phase for those with rows; returns the state and the losses."""
    key = jax.random.fold_in(state.key, plan.round)
    key = jax.random.split(key)[[*self._phases].index(phase)]
    learners = [
      kept._replace(opt_state=kept.opt_state[phase]) for kept in state.clients
    ]
    learners = (*learners, state.server)[: len(rows)]
    each = zip(self._phases[phase], banks, learners, rows)
    works = [
      local.work(task, _context(state, k), key, *own)
      for k, (task, *own) in enumerate(each)
    ]
    new, losses = zip(*self._engine.run(*works))
    if heard is not None:
      anyone, nothing = jnp.any(heard > 0), optax.tree.zeros_like(losses)
      old = learners, nothing
      new, losses = optax.tree.where(anyone, (new, losses), old)
    clients = tuple(
      learner._replace(opt_state={**kept.opt_state, phase: learner.opt_state})
      for kept, learner in zip(state.clients, new)
    )
    server = new[-1] if len(new) > len(clients) else state.server
    return state.replace(clients=clients, server=server), list(losses)


@jax.jit
def known(scores: Sequence[jax.Array]) -> jax.Array:
  """`float32[P]`: 1 for scores below infinity, 0 if one is NaN or infinite.

  >>> known([jnp.array([1., -jnp.inf]), jnp.array([1., jnp.nan])]).tolist()
  [1.0, 0.0]
  """
  below = [jnp.all(of_party < jnp.inf) for of_party in scores]
  return jnp.stack(below).astype(jnp.float32)


def _subset(plan):
  return row_of(plan, "public").index[0]


def _context(state, k):
  # With the party's learning rate.
  return local.values_of(state, k, "temperature")


@functools.partial(jax.jit, static_argnums=1)
def _without_lots(scores, size):
  """Scores in lots `[L, B, ...]`, the last filled up, as `[size, ...]`."""
  return [a.reshape(-1, *a.shape[2:])[:size] for a in scores]


@jax.jit
def _shown(public, subset, targets):
  """The public subset, and the targets on it."""
  shown = gather(public, subset)
  # NaN for positions beyond the bank.
  known = shown.pop("mask") - 1
  add = lambda target: target + known.reshape(-1, *[1] * (target.ndim - 1))
  return shown, list(map(add, targets))


def _scores_task(party, translator, transform) -> Task:
  """A party's scores on a batch of public examples, in inference mode."""

  def scores(context, variables, bank, index):
    batch = prepare(transform, gather(bank, index))
    logits, _ = party.outputs(variables, batch)
    checks.array(party.label, logits)
    return translator.scores(logits, context["temperature"])

  return Task.of(scores)


def _digest_task(party, translator, transform) -> Task:
  """A student's training towards its targets, on what `_shown` made."""

  def towards(variables, batch, key, context):
    logits, stats = party.outputs(variables, batch, key)
    target = batch["consensus"]
    losses = translator.loss(logits, target, context["temperature"])
    return losses, stats, {}

  party = dataclasses.replace(party, transform=transform)
  return local.own_training(party, towards, keep=("consensus",))


def score_bytes(num_images: int, num_classes: int) -> tuple[int, int]:
  """Bytes that a party sends and receives in a round.

  It sends its scores, and receives the consensus and which images come next.

  Args:
    num_images: N, public images of a round.
    num_classes: C.

  Returns:
    Bytes sent and received, of float32 scores and int32 positions.

  >>> score_bytes(5000, 16)
  (320000, 340000)
  """
  scores = 4 * num_images * num_classes
  return scores, scores + 4 * num_images
