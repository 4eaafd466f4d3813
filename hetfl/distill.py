"""Distillation: tempered targets, mixup, teachers' views and students."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core, local
from hetfl.batches import gather, prepare
from hetfl.engine import batch_size_or_default, Task, Work

PyTree = Any
# (student's logits, teachers' logits, student's initial logits, batch, weights,
#  *, temperatures, regularization, label_weight) -> sum over the batch
Divergence = Callable[..., jax.Array]
# (outputs, another model's outputs for the same batch, temperature) -> float[B]
PairDivergence = Callable[[PyTree, PyTree, Any], jax.Array]


def tempered_softmax(
  logits: jax.Array, temperature: float | jax.Array
) -> jax.Array:
  """`p_i = exp(z_i / T) / sum_j exp(z_j / T)`.

  Args:
    logits: `float[..., C]`.
    temperature: T > 0; below one sharpens, above one smooths.

  Returns:
    `float[..., C]`, probabilities.

  Raises:
    ValueError: there is only one class, whose softmax is always 1.

  Reference: Lichtarge et al. 2023, appendix C.4.

  >>> p = tempered_softmax(jnp.log(jnp.array([1., 3.])), 0.5)
  >>> [round(float(x), 4) for x in p]
  [0.1, 0.9]
  """
  checks.array("distillation", logits)
  if logits.shape[-1] < 2:
    raise ValueError(
      f"outputs of shape {logits.shape}: the softmax over one class is always"
      " 1; return two logits, such as (0, z) for a logit z"
    )
  return jax.nn.softmax(core.wide(logits) / temperature, axis=-1)


def kl_divergence(target: jax.Array, logits: jax.Array) -> jax.Array:
  """`KL(target || softmax(logits)) = sum_c p_c (log p_c - log q_c)`.

  Args:
    target: `float[..., C]`, probabilities.
    logits: `float[..., C]`, the student's.

  Returns:
    `float[...]`, in nats, summed over classes.

  Reference: Lichtarge et al. 2023, appendix C.4, which leaves the direction
  open; this is the usual one (Hinton et al. 2015), with the same gradient as
  cross-entropy to the target.

  >>> float(kl_divergence(jnp.array([0., 1.]), jnp.log(jnp.array([.75, .25]))))
  1.386...
  """
  log_p = jax.nn.log_softmax(core.wide(logits), axis=-1)
  # log_p may be minus infinity where the target is 0, as for masked classes.
  log_p = jnp.where(target == 0, 0.0, log_p)
  # Not optax's, whose log(0) makes the target's own derivative NaN.
  log_target = jnp.log(jnp.where(target == 0, 1.0, target))
  return jnp.sum(target * (log_target - log_p), axis=-1)


def of_examples(values: jax.Array, ndim: int = 1) -> jax.Array:
  """Means over positions, if there are any, such as an image's pixels.

  Args:
    values: `float[B, ...]`, such as the divergences of positions.
    ndim: how many axes stay.

  Returns:
    `float[B]`, or with `ndim` axes.

  >>> of_examples(jnp.array([[[1., 3.]], [[0., 0.]]])).tolist()
  [2.0, 0.0]
  """
  return jnp.mean(values, axis=tuple(range(ndim, values.ndim)))


def same_classes(*logits: jax.Array) -> None:
  """Checks that models which learn from each other have the same outputs.

  Args:
    *logits: each model's logits for the same examples.

  Raises:
    ValueError: they are of different shapes.

  >>> same_classes(jnp.zeros((8, 3)), jnp.zeros((8, 5)))
  Traceback (most recent call last):
    ...
  ValueError: outputs of shapes (8, 3), (8, 5): models that learn from each \
other need the same classes
  """
  for outputs in logits:
    checks.array("models that learn from each other", outputs)
  shapes = list(dict.fromkeys(jnp.shape(z) for z in logits))
  if len(shapes) > 1:
    raise ValueError(
      f"outputs of shapes {', '.join(map(str, shapes))}: models that learn from"
      " each other need the same classes"
    )


def pair_divergence(
  logits: jax.Array, partner: jax.Array, temperature: float | jax.Array = 1.0
) -> jax.Array:
  """`T^2 KL(softmax(z_partner / T) || softmax(z / T))`, of classes.

  Args:
    logits: `float[B, ..., C]`, of the model that learns.
    partner: likewise, of the model that it learns from.
    temperature: T, of both softmaxes; the factor T^2 is that of Hinton et al.
      2015.

  Returns:
    `float[B]`, in nats: a sum over classes, and a mean over positions.

  Raises:
    ValueError: the models' classes differ, or there is only one.

  >>> z = jnp.log(jnp.array([[.75, .25]]))
  >>> round(float(pair_divergence(jnp.zeros((1, 2)), z)[0]), 4)
  0.1308
  """
  same_classes(logits, partner)
  target = tempered_softmax(partner, temperature)
  kl = kl_divergence(target, core.wide(logits) / temperature)
  return temperature**2 * of_examples(kl)


def codist_target(
  teachers: Sequence[jax.Array],
  student: jax.Array,
  labels: jax.Array | None = None,
  *,
  temperatures: Sequence[float | jax.Array],
  regularization: float | jax.Array,
  label_weight: float | jax.Array = 0.0,
) -> jax.Array:
  """A student's target: the teachers' prediction, mixed with its own.

  `(1 - r) [(1 - v) mean_j softmax(z_j / T_j) + v y] + r softmax(z_student)`

  Args:
    teachers: each teacher's logits, `float[..., C]`.
    student: logits of the student before distillation, `float[..., C]`.
    labels: y, as `label_target` returns it; `None` for no labels.
    temperatures: each teacher's T.
    regularization: r, in [0, 1].
    label_weight: v, in [0, 1].

  Returns:
    `float[..., C]`, probabilities.

  Reference: Lichtarge et al. 2023, appendix C.4, which interpolates between
  labels and "the teacher soft-labels", but uses no labels in its experiments.
  With more than two pools, the paper's "any number of pools", the teacher is
  the mean of the others.

  >>> p = jnp.log(jnp.array([.2, .8]))
  >>> q = jnp.log(jnp.array([.6, .4]))
  >>> target = codist_target([p], q, temperatures=[1.], regularization=0.25)
  >>> [round(float(x), 4) for x in target]
  [0.3, 0.7]
  """
  same_classes(*teachers, student)
  views = [
    tempered_softmax(z, t) for z, t in zip(teachers, temperatures, strict=True)
  ]
  teacher = sum(views) / len(views)
  if labels is not None:
    teacher += label_weight * (labels - teacher)
  own = jax.nn.softmax(core.wide(student), axis=-1)
  return (1 - regularization) * teacher + regularization * own


def symmetric_beta(key: jax.Array, beta: float, shape=()) -> jax.Array:
  """Draws from Beta(beta, beta).

  For a whole number `beta` up to 8 this is the median of `2 beta - 1` uniform
  draws, much cheaper than `jax.random.beta`.

  Args:
    key: a random key.
    beta: the parameter, positive.
    shape: the shape of the result.

  Returns:
    `float32[shape]` in (0, 1).

  >>> draws = symmetric_beta(jax.random.key(0), 2, (10_000,))
  >>> [round(float(m), 2) for m in (draws.mean(), draws.var())]  # 1/2, 1/20
  [0.5, 0.05]
  """
  if beta == int(beta) and beta <= 8:
    shape = (*shape, 2 * int(beta) - 1)
    uniform = jax.random.uniform(key, shape, jnp.float32)
    return jnp.sort(uniform, axis=-1)[..., int(beta) - 1]
  return jax.random.beta(key, beta, beta, shape, jnp.float32)


def mixup(x: PyTree, weight: jax.Array) -> PyTree:
  """Mixes each example with its neighbour: `w_b x_b + (1 - w_b) x_(b+1)`.

  Args:
    x: `float[B, ...]`, in random order, so that neighbours are random pairs;
      or a tree of such.
    weight: `float[B]`, drawn from Beta(beta, beta).

  Returns:
    As `x`, but float32 for integers.

  Reference: Zhang et al. 2017, section 2; Lichtarge et al. 2023, appendix C.1
  ("mixup with beta = 2", read as Beta(2, 2)).

  >>> mixup(jnp.array([0., 4., 8.]), jnp.array([.75, .5, 1.]))
  Array([1., 6., 8.], dtype=float32)
  """

  def mixed(x):
    w = weight.reshape(weight.shape + (1,) * (x.ndim - 1))
    y = w * x + (1 - w) * jnp.roll(x, -1, axis=0)
    return y.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else y

  return jax.tree.map(mixed, x)


def label_target(like: jax.Array, batch: core.Batch) -> jax.Array:
  """The labels as one-hot distributions.

  Args:
    like: `float[..., C]`, such as a target.
    batch: holds `y: int[...]`.

  Returns:
    `float[..., C]`; NaN where a label is out of range.

  Raises:
    ValueError: as `core.labels_of`.

  >>> label_target(jnp.zeros((2, 2)), {'y': jnp.array([1, 2])}).tolist()
  [[0.0, 1.0], [nan, nan]]
  """
  y, known = core.labels_of(like, batch)
  one_hot = jax.nn.one_hot(y, like.shape[-1], dtype=like.dtype)
  return jnp.where(jnp.expand_dims(known == 1, -1), one_hot, jnp.nan)


@dataclasses.dataclass(frozen=True, eq=False)
class Distiller:
  """The configuration of distillation: how students learn from teachers.

  The first four values may be one number for all pools or one for each.

  Attributes:
    learning_rate: the students' learning rate in the first round.
    final_share: the share of the learning rate left at the end, in [0, 1]: the
      rate falls linearly over the rounds from `learning_rate` to
      `final_share * learning_rate`.
    temperature: the softmax temperature of each pool's model as a teacher.
    regularization: r, the weight of the student's initial prediction in its
      target, in [0, 1].
    label_weight: weight of the true labels beside the teachers, in [0, 1]; 0
      is the paper's unlabelled distillation.
    transform: applied to each batch as stored in the distillation bank.
    mixup_beta: mixes inputs with weights from Beta(beta, beta); `None` for no
      mixup.
    optimizer: `learning rate -> optax optimizer`. Its state is new in each
      exchange: an optimizer that draws random numbers draws the same ones each
      time.
    microbatch: the most examples that pass through a model at once; the batch
      is cut into equal parts. `None` for all. Changes only speed and memory,
      except for dropout and batch normalisation, which act on the parts.
    dropout: whether students train as clients do, with dropout and statistics
      of the batch; if not, their outputs are those of evaluation.
    weights: `batch -> weights` in the mean, for the batch's examples, `[B]`, or
      their positions, `[B, T]`.
    divergence: `None` for `kl_divergence` from `codist_target`, for labels that
      are classes; a mean over positions, unless `weights` are of positions.
      Otherwise a function such as `next_word.token_divergence`, for models
      whose outputs are arrays with examples on their first axis, or
      `TokenLogits`, which are too large to keep: only their features are kept,
      for all steps.

  Raises:
    ValueError: a value is out of its range, the optimizer is not a function of
      a rate or holds the rate in its state, or a custom divergence is combined
      with mixup.

  Reference: Lichtarge et al. 2023, appendix C.4, whose rate falls linearly to
    0; `final_share` is our reading of "decay coefficient" in the search space
    of appendix F. The paper does not mention dropout.
  """

  learning_rate: float | Sequence[float] = 1e-3
  final_share: float | Sequence[float] = 0.0
  temperature: float | Sequence[float] = 1.0
  regularization: float | Sequence[float] = 0.01
  label_weight: float = 0.0
  transform: core.Transform | core.Preparation | None = None
  mixup_beta: float | None = None
  optimizer: core.Optimizer = optax.adam
  microbatch: int | None = None
  dropout: bool = True
  weights: Callable[[core.Batch], jax.Array] = core.mask_of
  divergence: Divergence | None = None

  def __post_init__(self):
    each = lambda value: value if np.ndim(value) else [value]
    for rate in each(self.learning_rate):
      checks.between(0, np.inf, learning_rate=rate)
    for share in each(self.final_share):
      checks.between(0, 1, final_share=share)
    for temperature in each(self.temperature):
      checks.positive(temperature=temperature)
    for r in each(self.regularization):
      checks.between(0, 1, regularization=r)
    checks.between(0, 1, label_weight=self.label_weight)
    checks.positive(**checks.given(mixup_beta=self.mixup_beta))
    checks.counts(**checks.given(microbatch=self.microbatch))
    checks.optimizers(optimizer=self.optimizer)
    if self.divergence and self.mixup_beta is not None:
      raise ValueError(
        f"mixup_beta={self.mixup_beta}: cannot be combined with a custom"
        " divergence; use None"
      )

  def hyper(self, num_pools: int) -> dict[str, jax.Array]:
    """The values that trials may vary, as `float32[P]` each.

    Args:
      num_pools: P.

    Returns:
      `distill_lr`, `final_share`, `temperature`, `regularization`.

    Raises:
      ValueError: there is neither one value nor one for each pool.

    >>> Distiller(temperature=(1., 2.)).hyper(2)['temperature']
    Array([1., 2.], dtype=float32)
    """
    return core.hyper(
      num_pools,
      distill_lr=self.learning_rate,
      final_share=self.final_share,
      temperature=self.temperature,
      regularization=self.regularization,
    )

  def of_classes(self, pools: Sequence[local.One]) -> tuple[local.One, ...]:
    """The pools, whose labels must be classes if targets are softmaxes."""
    if self.divergence is not None:
      return tuple(pools)
    why = "students learn softmaxes", "give Distiller(divergence=)"
    return tuple(local.of_classes(pool, *why) for pool in pools)

  def batch(self, key, bank: core.Batch, index, *, step) -> core.Batch:
    """Distillation batch number `step`, the same for teachers and students.

    Args:
      key: the exchange's key of the round.
      bank: the distillation bank.
      index: `int32[B]`, positions in the bank.
      step: the number of the step.

    Returns:
      The batch as models take it, with its weights `mixup: float32[B]` if it
      was mixed.
    """
    transform_key, mixup_key = jax.random.split(jax.random.fold_in(key, step))
    batch = prepare(self.transform, gather(bank, index), transform_key)
    if self.mixup_beta is not None:
      weight = symmetric_beta(mixup_key, self.mixup_beta, index.shape)
      batch = {**batch, "x": mixup(batch["x"], weight), "mixup": weight}
    return batch

  def view(self, model: core.Model) -> Task:
    """A model's view of a distillation batch, as the students see it.

    Args:
      model: the model.

    Returns:
      The task of a batch. Shared arguments are `(variables, key, bank)`, a row
      is its number and `index: int32[B]`, the result its logits `float[B, C]`
      or, for `TokenLogits`, the features.
    """

    def of_part(variables, x):
      outputs, _ = local.outputs_of("a teacher", model, variables, {"x": x})
      if hasattr(outputs, "features"):  # Its last layer is the same for all.
        return outputs.features
      if self.divergence is None:
        checks.array("a teacher", outputs)
      return outputs

    def of_batch(variables, key, bank, row):
      step, index = row
      batch = self.batch(key, bank, index, step=step)
      size = len(batch["mask"])
      parts = core.num_parts(size, self.microbatch)
      views = jax.lax.map(
        lambda x: of_part(variables, x), core.cut(batch["x"], parts)
      )
      return jax.tree.map(lambda a: a.reshape(size, *a.shape[2:]), views)

    return Task.of(of_batch)

  def look(
    self,
    view: Task,
    variables: core.Variables,
    key: jax.Array,
    bank: core.Batch,
    batches: Any,
    when: jax.Array | np.integer,
  ) -> Work:
    """The work of a teacher on all of a round's distillation batches.

    Args:
      view: from the method `view`.
      variables: the teacher's.
      key: the exchange's key of the round.
      bank: the distillation bank.
      batches: the round's `Batches`, one row of S steps.
      when: 1 if this round distils; 0 if not: the views are then zeros.

    Returns:
      The work, whose results are the views, `[S, B, ...]`.
    """
    index = batches.index[0]
    numbers = np.arange(len(index), dtype=np.int32)
    at_once = max(1, batch_size_or_default(None) // index.shape[1])
    if core.num_parts(index.shape[1], self.microbatch) > 1:
      at_once = 1
    steps = when * np.ones(len(index), np.int32)
    shared = (variables, key, bank)
    return Work(view, shared, (numbers, index), steps, at_once=at_once)

  def student(self, models: Sequence[core.Model], index: int) -> Task:
    """Distillation to one pool's model, in S optimizer steps.

    Args:
      models: each pool's model.
      index: the student's pool, i.

    Returns:
      The task of a row of distillation batches. Shared arguments are `(context,
      key, bank)`; the context holds the hyper-parameters, `decay`, the
      exchange's `key`, and for each pool, including the student's, its
      `Variables` at the start (`teachers`) and its views; or, in place of the
      other pools' views, those of another teacher (`said`). The result is the
      student's `Variables` and the mean KL to its target.
    """

    def others(context):
      """The teachers' pools and views; another teacher takes the own pool's."""
      if "said" in context:
        return [(index, context["said"])]
      return [(j, v) for j, v in enumerate(context["views"]) if j != index]

    def mix(context):
      return dict(
        temperatures=[context["temperature"][j] for j, _ in others(context)],
        regularization=context["regularization"][index],
        label_weight=self.label_weight,
      )

    def make_batch(context, key, bank, positions, s):
      del key  # Teachers and students see the same batch.
      batch = self.batch(context["key"], bank, positions, step=s)
      views = context["views"][index], *(v for _, v in others(context))
      own, *teachers = views = jax.tree.map(lambda a: a[s], views)
      if self.divergence is not None:
        return {**batch, "views": views}
      labels = None
      if self.label_weight:
        labels = label_target(core.wide(own), batch)
        if self.mixup_beta is not None:
          labels = mixup(labels, batch["mixup"])
      target = codist_target(teachers, own, labels, **mix(context))
      return {**batch, "target": target}

    def objective(variables, batch, key, context):
      key = key if self.dropout else None
      outputs, stats = local.outputs_of(
        "a student", models[index], variables, batch, key
      )
      stats = stats if self.dropout else variables.stats
      weights = self.weights(batch)
      if self.divergence is None:
        kl = kl_divergence(batch["target"], outputs)
        return of_examples(kl, weights.ndim), stats, {}
      pools = index, *(j for j, _ in others(context))
      own, *teachers = (
        _seen(models[j], context["teachers"][j], batch["x"], view)
        for j, view in zip(pools, batch["views"])
      )
      total = self.divergence(
        outputs, teachers, own, batch, weights, **mix(context)
      )
      count = jnp.sum(weights)
      return total / jnp.where(count > 0, count, 1), stats, {}

    def optimizer(context):
      final = context["final_share"][index]
      left = final + (1 - final) * context["decay"]
      return self.optimizer(context["distill_lr"][index] * left)

    def begin(context, own):
      del own
      return local.Learner.start(context["teachers"][index], self.optimizer)

    def end(context, own, learner, metrics, batches, key):
      del context, own, batches, key
      return learner.variables, metrics["loss"]

    step = local.step_on(
      objective, optimizer, weights=self.weights, microbatch=self.microbatch
    )
    return local.training(step, begin, end, make_batch=make_batch, shares=True)


def _seen(
  model: core.Model, variables: core.Variables, x: PyTree, view: PyTree
) -> PyTree:
  """A model's outputs, given their view."""
  # Of these only the output layer is used; the compiler drops the rest.
  outputs = model.predict(variables, x)
  if hasattr(outputs, "features"):
    return dataclasses.replace(outputs, features=view)
  return view
