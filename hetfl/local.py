"""Local training: the one loop that all algorithms run.

A participant's row of work takes optimizer steps on its batches: gather,
prepare, gradient (in microbatches), descend. Algorithms differ in the objective
that they give it, and in what a participant starts from and sends.
"""

from collections.abc import Callable, Collection, Sequence
import dataclasses
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core
from hetfl.batches import Batches, gather, prepare
from hetfl.engine import Shard, Task, Work

PyTree = Any
Objective = Callable[..., tuple[jax.Array, PyTree, dict[str, jax.Array]]]
"""`(variables, batch, key, context) -> (losses, stats, measured)`: losses of
shape `[B]`, or of the weights given to `gradient`, or a scalar that is their
mean already; the model's new statistics; and a dict of further values of the
losses' shape, to be averaged. `context` is what the server sent this round:
models, hyper-parameters."""


@dataclasses.dataclass(frozen=True, eq=False)
class Participant:
  """How a participant trains: a pool's clients, a party, a client.

  Attributes:
    model: its model.
    name: its name in metrics, results and errors.
    learning_rate: the learning rate that `state.hyper` holds at first.
    loss: the loss of each example, or a batch's mean; see `core.Loss`.
    transform: applied to each training batch as stored in the bank.
    optimizer: `learning rate -> optax optimizer`.
    microbatch: the most examples that pass through the model at once; a batch
      is cut into equal parts. `None` for all. Changes only speed and memory,
      except for dropout, batch normalisation and FedKD's denominators, which
      act on the parts.
    penalty: a function from parameters to a scalar that is added to every loss,
      such as a head's `sum(w^2)`; `None` for none.
    l2: the penalty's weight.

  Raises:
    ValueError: the model is a bare Flax module, a value is out of its range, or
      an optimizer is not a function of a rate or holds the rate in its state.
  """

  model: core.Model
  name: str = ""
  _: dataclasses.KW_ONLY
  learning_rate: float | jax.Array | None
  loss: core.Loss = core.cross_entropy
  transform: core.Transform | core.Preparation | None = None
  optimizer: core.Optimizer = optax.sgd
  microbatch: int | None = None
  penalty: Callable[[PyTree], jax.Array] | None = None
  l2: float | jax.Array = 1e-3

  def __post_init__(self):
    if not isinstance(self.name, str):
      raise ValueError(f"name={self.name!r}: give a string")
    core.Model.check(self.label, self.model)
    checks.optimizers(**checks.given(optimizer=self.optimizer))
    checks.counts(**checks.given(microbatch=self.microbatch))
    checks.between(
      0, np.inf, l2=self.l2, **checks.given(learning_rate=self.learning_rate)
    )

  @property
  def label(self) -> str:
    """What error messages call it."""
    kind = type(self).__name__.lower()
    return f"{kind} {self.name!r}" if self.name else f"a {kind}"

  def outputs(
    self,
    variables: core.Variables,
    batch: core.Batch,
    key: jax.Array | None = None,
  ) -> tuple[PyTree, PyTree]:
    """Its model's outputs and new statistics; see `outputs_of`."""
    return outputs_of(self.label, self.model, variables, batch, key)


One = TypeVar("One", bound=Participant)


def of_classes(participant: One, why: str, instead: str) -> One:
  """A participant whose labels must be classes, one for each example.

  Args:
    participant: the participant; `core.cross_entropy` is such a loss itself.
    why: what the method makes of classes, for the error's note.
    instead: what to do for other labels.

  Returns:
    The participant, whose loss raises `core.labels_of`'s `ValueError`.

  >>> one = Participant(core.Model(None, max), learning_rate=1., loss=min)
  >>> loss = of_classes(one, 'fd shares means', 'use fml').loss
  >>> loss(jnp.zeros((8, 3)), {'y': jnp.zeros((8, 3))})
  Traceback (most recent call last):
    ...
  ValueError: batch['y'] is float32 of shape (8, 3) beside logits of shape \
(8, 3): labels are whole numbers, 0 to C - 1, of shape (8,)
  fd shares means, so each example needs one class: for other labels use fml
  """
  own = participant.loss
  if own is core.cross_entropy:
    return participant

  def loss(outputs, batch):
    with checks.noted(
      f"{why}, so each example needs one class: for other labels {instead}"
    ):
      core.labels_of(outputs, batch)
    return own(outputs, batch)

  return dataclasses.replace(participant, loss=loss)


class Learner(NamedTuple):
  """A model and the optimizer that trains it.

  Attributes:
    variables: the model's parameters and statistics.
    opt_state: the optimizer's state.
  """

  variables: core.Variables
  opt_state: PyTree = ()

  @property
  def params(self) -> PyTree:
    """The model's parameters."""
    return self.variables.params

  @property
  def stats(self) -> PyTree:
    """The model's statistics, such as those of batch normalisation."""
    return self.variables.stats

  @classmethod
  def start(
    cls, variables: core.Variables, optimizer: core.Optimizer
  ) -> "Learner":
    """A model with a new optimizer, whose state does not depend on the rate."""
    checks.optimizers(variables.params, optimizer=optimizer)
    opt_state = optimizer(jnp.zeros(())).init(variables.params)
    return cls(variables, core.unshared(opt_state, variables))

  def descend(
    self,
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    stats: PyTree,
    **extra: Any,
  ) -> "Learner":
    """One step of an optimizer.

    Args:
      optimizer: an optax optimizer.
      grads: the gradient, shaped as the parameters.
      stats: the new statistics.
      **extra: extra arguments, such as the loss as `value`, for optimizers that
        take them; others do not get them.

    Returns:
      The learner after the step.

    >>> sgd = optax.sgd(0.5)
    >>> learner = Learner(core.Variables(jnp.array(3.), {}), sgd.init(0.))
    >>> learner.descend(sgd, jnp.array(2.), {}, value=9.).params
    Array(2., dtype=float32)
    """
    optimizer = optax.with_extra_args_support(optimizer)
    with jax.numpy_dtype_promotion("standard"):  # Optax raises to whole powers.
      updates, opt_state = optimizer.update(
        grads, self.opt_state, self.params, **extra
      )
      params = optax.apply_updates(self.params, updates)
    return Learner(core.Variables(params, stats), opt_state)


def supervised(participant: Participant) -> Objective:
  """The objective of learning from labels, `mean_b loss(f(x_b; w), y_b)`."""

  def objective(variables, batch, key, context):
    del context
    outputs, stats = participant.outputs(variables, batch, key)
    return losses_of(participant.loss, outputs, batch), stats, {}

  return objective


def losses_of(loss: core.Loss, outputs: PyTree, batch: core.Batch) -> jax.Array:
  """A loss of the labels; its errors say what it is given.

  A part of a batch may hold only empty places. A loss that is a mean over
  examples would be NaN, and so would 0 times it: it gets a mask of ones.
  """
  mask = batch["mask"]
  batch = {**batch, "mask": jnp.where(jnp.any(mask != 0), mask, 1)}
  with checks.noted(
    "a loss is called as loss(logits, batch), and takes what it needs from the"
    f" batch, which holds {sorted(batch)}"
  ):
    return loss(outputs, batch)


def outputs_of(
  owner: str,
  model: core.Model,
  variables: core.Variables,
  batch: core.Batch,
  key: jax.Array | None = None,
) -> tuple[PyTree, PyTree]:
  """A model's outputs and new statistics, in training if there is a key.

  Its errors say whose it is.
  """
  shapes = jax.tree.map(jnp.shape, batch["x"])
  with checks.noted(f"{owner}: its model, given inputs x of shape {shapes}"):
    return model.outputs(variables, batch["x"], key, key is not None)


def gradient(
  objective: Objective,
  variables: core.Variables,
  batch: core.Batch,
  key: jax.Array,
  context: PyTree,
  *,
  weights: Callable[[core.Batch], jax.Array] = core.mask_of,
  microbatch: int | None = None,
  shard: Shard | None = None,
) -> tuple[jax.Array, PyTree, PyTree, core.Metrics]:
  """The mean loss of a batch and its gradient, part by part.

  `sum_b w_b loss_b / sum_b w_b`. Statistics pass from one part to the next.

  Args:
    objective: the losses.
    variables: the model's, or a tree of several models'.
    batch: holds `x` and `mask: float32[B]`.
    key: a random key.
    context: what the server sent this round.
    weights: `batch -> w`, of its examples, by default their mask.
    microbatch: the most examples at once; `None` for all.
    shard: the devices that share the batch; `None` for one.

  Returns:
    The loss, its gradient, the statistics, and the means of what the objective
    measured.

  Raises:
    ValueError: the objective's losses, or what it measures, have another shape
      than the weights.

  >>> line = lambda v, batch, key, context: (
  ...     v.params * batch['x'], v.stats, {'x': batch['x']})
  >>> batch = {'x': jnp.array([1., 5., 9.]), 'mask': jnp.array([1., 1., 0.])}
  >>> loss, grads, _, means = gradient(
  ...     line, core.Variables(2., {}), batch, jax.random.key(0), {})
  >>> float(loss), float(grads), float(means['x'].value)
  (6.0, 3.0, 3.0)
  """
  count = jnp.sum(weights(batch))
  divisor = jnp.where(count > 0, count, 1)

  def part_loss(params, stats, key, part):
    w = weights(part)
    found = objective(
      variables._replace(params=params, stats=stats), part, key, context
    )
    three = isinstance(found, tuple) and len(found) == 3
    if not three or not isinstance(found[2], dict):
      raise ValueError(
        "an objective must return (losses, stats, measured), measured a dict;"
        f" not {jax.tree.structure(found)}"
      )
    losses, stats, measured = found
    for name, x in {**measured, "loss": losses}.items():
      if jnp.shape(x) not in ((), w.shape):
        raise ValueError(
          f"a {name} of shape {jnp.shape(x)} on {len(w)} examples: give one"
          f" number for each, float{list(w.shape)}, or their mean"
        )
    losses = jnp.broadcast_to(losses, w.shape)
    sums = {name: jnp.sum(x * w) for name, x in measured.items()}
    return jnp.sum(losses * w) / divisor, (stats, sums)

  differentiate = jax.value_and_grad(part_loss, has_aux=True)
  devices = (
    shard.count if shard and len(batch["mask"]) % shard.count == 0 else 1
  )
  parts = core.num_parts(len(batch["mask"]), microbatch, multiple=devices)
  if parts == 1:
    (value, (stats, sums)), grads = differentiate(
      variables.params, variables.stats, key, batch
    )
  else:

    def add_part(carry, part):
      grads, stats = carry
      (value, (stats, sums)), more = differentiate(
        variables.params, stats, *part
      )
      return (optax.tree.add(grads, more), stats), (value, sums)

    several = (jax.random.split(key, parts), core.cut(batch, parts))
    (grads, stats), of_parts = jax.lax.scan(
      add_part,
      (core.sums_like(variables.params), variables.stats),
      shard.take(several) if shard and devices > 1 else several,
    )
    value, sums = jax.tree.map(lambda a: jnp.sum(a, axis=0), of_parts)
    if shard and devices > 1:
      value, sums, grads, stats = shard.sum((value, sums, grads, stats))
      mean = lambda total: core.as_type(total / devices, total.dtype)
      stats = jax.tree.map(mean, stats)
    grads = optax.tree.cast_like(grads, variables.params)
  # Optimizers that clip are not differentiable at 0, an empty batch's gradient.
  grads = core.fixed_unless(count > 0, grads)
  means = {name: core.Mean(s, count) for name, s in sums.items()}
  return value, grads, stats, means


def step_on(
  objective: Objective,
  optimizer: Callable[[PyTree], optax.GradientTransformation],
  *,
  penalty: Callable[[PyTree, PyTree], jax.Array] | None = None,
  **options: Any,
) -> Callable[..., tuple[Learner, core.Metrics]]:
  """One optimizer step on a batch.

  `w <- w - optimizer(grad [mean_b loss_b(w) + penalty(w)])`

  Args:
    objective: the losses of a batch.
    optimizer: `context -> optax optimizer`; the learning rate is a value in the
      context. It is given the loss as `value` if it takes extra arguments.
    penalty: `(params, context) -> scalar`, added to the loss; `None` for none.
    **options: `weights` and `microbatch`; see `gradient`.

  Returns:
    `(learner, batch, key, context, shard=None) -> (learner, metrics)`: `loss`
    without the penalty, a mean over steps, and what the objective measured, a
    mean over examples.
  """

  def step(learner, batch, key, context, shard=None):
    value, grads, stats, means = gradient(
      objective, learner.variables, batch, key, context, shard=shard, **options
    )
    total = value
    if penalty is not None:
      more, slope = jax.value_and_grad(penalty)(learner.params, context)
      total, grads = total + more, optax.tree.add(grads, slope)
    learner = learner.descend(optimizer(context), grads, stats, value=total)
    return learner, {"loss": core.Mean(value, jnp.ones(())), **means}

  return step


def training(
  step: Callable[..., tuple[Learner, core.Metrics]],
  begin: Callable[..., Learner],
  end: Callable[..., PyTree],
  *,
  transform: core.Transform | core.Preparation | None = None,
  keep: Collection[str] = (),
  make_batch: Callable[..., core.Batch] | None = None,
  measured: tuple[str, ...] = ("loss",),
  shares: bool = False,
) -> Task:
  """The task of a row of `Batches`: local training.

  Step `s` of client `k` draws from `fold_in(fold_in(key, k), s)`, wherever it
  runs.

  Args:
    step: `(learner, batch, key, context) -> (learner, metrics)`; the context
      also holds what the row's client keeps, as `own`.
    begin: `(context, own) -> learner`.
    end: `(context, own, learner, metrics, batches, key) -> result`, where the
      key is the client's.
    transform: applied to each batch as stored in the bank.
    keep: names of the bank's arrays that no transform changes or drops.
    make_batch: `(context, key, bank, index, s) -> batch`, in place of gathering
      and transforming.
    measured: the names of the metrics.
    shares: whether devices may share each step, which then takes `shard`.

  Returns:
    The task. Its shared arguments are `(context, key, bank)`; a row is a pair:
    what the client keeps of its own, and its row of `Batches`.
  """

  def gathered(context, key, bank, index, s):
    del context, s
    return prepare(transform, gather(bank, index), key, keep=keep)

  make_batch = make_batch or gathered

  def begin_row(context, key, bank, row):
    del key, bank
    zeros = {name: core.Mean.zero() for name in measured}
    return begin(context, row[0]), zeros

  def step_of_row(context, key, bank, row, carry, s, **shard):
    (learner, metrics), (own, batches) = carry, row
    step_key = jax.random.fold_in(jax.random.fold_in(key, batches.client), s)
    batch_key, model_key = jax.random.split(step_key)
    batch = make_batch(context, batch_key, bank, batches.index[s], s)
    if _statistics(learner.stats):  # For traced plans: see `check_full`.
      empty = batches.index[s] < 0
      partly = jnp.any(empty) & ~jnp.all(empty)
      batch = {**batch, "mask": jnp.where(partly, jnp.nan, batch["mask"])}
    seen = {**context, "own": own}
    learner, new = step(learner, batch, model_key, seen, **shard)
    if missing := {*measured} - {*new}:
      raise ValueError(
        f"measured: names {min(missing)!r}, but there are {sorted(new)}"
      )
    return learner, {name: metrics[name] + new[name] for name in measured}

  def end_of_row(context, key, bank, row, carry):
    del bank
    (learner, metrics), (own, batches) = carry, row
    client_key = jax.random.fold_in(key, batches.client)
    return end(context, own, learner, metrics, batches, client_key)

  # An engine calls `begin_row` once, `step_of_row` for each of the row's steps,
  # and `end_of_row` once; it stacks the rows' results, or adds them up.
  return Task(begin_row, step_of_row, end_of_row, shares=shares)


def _statistics(stats: PyTree) -> list[jax.Array]:
  """Statistics except sums, from which a batch's mask keeps empty places."""
  is_sum = lambda leaf: isinstance(leaf, core.Mean)
  leaves = jax.tree.leaves(stats, is_leaf=is_sum)
  return [leaf for leaf in leaves if not is_sum(leaf)]


def step_of(
  participant: Participant,
  objective: Objective | None = None,
  penalty: Callable[[PyTree, PyTree], jax.Array] | None = None,
) -> Callable[..., tuple[Learner, core.Metrics]]:
  """A participant's step; see `step_on`.

  Args:
    participant: how it trains.
    objective: by default that of learning from labels.
    penalty: `(params, context) -> scalar`, added to the participant's own.

  Returns:
    The step. Its context holds `learning_rate` and, with a penalty, `l2`.
  """
  own = participant.penalty

  def penalties(params, context):
    total = 0.0 if own is None else context["l2"] * own(params)
    return total if penalty is None else total + penalty(params, context)

  return step_on(
    objective or supervised(participant),
    lambda context: participant.optimizer(context["learning_rate"]),
    microbatch=participant.microbatch,
    penalty=None if own is None and penalty is None else penalties,
  )


def own_training(
  participant: Participant,
  objective: Objective | None = None,
  **batches: Any,
) -> Task:
  """The training of a learner that its participant keeps.

  Args:
    participant: how it trains.
    objective: by default that of learning from labels.
    **batches: `keep` or `make_batch`, how `training` makes a batch; by default
      the participant's transform alone.

  Returns:
    The task of a row `(learner, batches)`, whose result is the learner and its
    mean loss.
  """

  def end(context, own, learner, metrics, batches, key):
    del context, own, batches, key
    return learner, metrics["loss"]

  return training(
    step_of(participant, objective),
    lambda context, own: own,
    end,
    transform=participant.transform,
    **batches,
  )


def start_learners(
  participants: Sequence[Participant],
  optimizers: Sequence[core.Optimizer],
  key: jax.Array,
  given: Sequence[core.Variables] | None = None,
  *,
  first: int = 0,
) -> tuple[Learner, ...]:
  """The participants' models, new or given, with new optimizers.

  Args:
    participants: P participants.
    optimizers: P optimizers.
    key: participant k's key folds `first + k` into it.
    given: P models to continue from; `None` makes new ones.
    first: see `key`; 2**31 differs from any round.

  Returns:
    P learners.

  Raises:
    ValueError: there are not P given models, or one has other shapes.
  """
  models = [None] * len(participants) if given is None else [*given]
  if len(models) != len(participants):
    raise ValueError(f"variables: give {len(participants)}, not {len(models)}")
  return tuple(
    Learner.start(
      one.model.start(jax.random.fold_in(key, np.uint32(k)), one.label, model),
      optimizer,
    )
    for k, (one, optimizer, model) in enumerate(
      zip(participants, optimizers, models), first
    )
  )


def metrics_of(
  participants: Sequence[Participant], **means: Sequence[core.Mean]
) -> core.Metrics:
  """`{"NAME/loss": mean, ...}`, from each participant's mean by its kind."""
  return {
    f"{one.name}/{kind}": mean
    for kind, each in means.items()
    for one, mean in zip(participants, each)
  }


def hyper_of(participants: Sequence[Participant]) -> dict[str, jax.Array]:
  """`learning_rate` and, if any has a penalty, `l2`: `float32[P]` each."""
  for one in participants:
    if one.learning_rate is None:
      raise ValueError(f"{one.label}: learning_rate=None: give a number")
  values = {"learning_rate": [one.learning_rate for one in participants]}
  if any(one.penalty is not None for one in participants):
    values["l2"] = [one.l2 for one in participants]
  return core.hyper(len(participants), **values)


def values_of(state: core.State, k: int, *names: str) -> dict[str, jax.Array]:
  """Participant k's rate, `l2` and `names`, those that the state has."""
  names = ("learning_rate", "l2", *names)
  held = {name: x for name, x in state.hyper.items() if name in names}
  return {name: x[k] if jnp.ndim(x) else x for name, x in held.items()}


def work(
  task: Task,
  context: PyTree,
  key: jax.Array,
  bank: core.Batch,
  own: PyTree,
  batches: Batches,
  *,
  when: jax.Array | np.integer | int = 1,
  total: bool = False,
) -> Work:
  """The work of rows of local training.

  Args:
    task: from `training`.
    context: what the server sent this round.
    key: the round's key; each row folds in its client and its steps.
    bank: the examples.
    own: what each row's client keeps of its own.
    batches: K rows; or one, without that axis.
    when: 1 if the rows train, 0 if they take no steps.
    total: whether to add the results up.

  Returns:
    The work.
  """
  shared, steps = (context, key, bank), when * batches.steps
  return Work(task, shared, (own, batches), steps, total)
