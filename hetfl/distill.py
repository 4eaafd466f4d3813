"""Distillation: tempered targets, mixup, and the scanned student update."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core, output_checks
from hetfl.models.language import TokenLogits

PyTree = Any
# (student's logits, teachers' logits, student's initial logits, batch, weights,
#  *, temperatures, regularization, label_weight) -> sum over the batch
Divergence = Callable[..., jax.Array]


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
  output_checks.dense(logits)
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
  output_checks.dense(logits)
  log_p = jax.nn.log_softmax(core.wide(logits), axis=-1)
  # log_p may be minus infinity where the target is 0, as for masked classes.
  log_p = jnp.where(target == 0, 0.0, log_p)
  return optax.losses.kl_divergence(log_p, target, axis=-1)


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
  output_checks.same_outputs(*teachers, student)
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
    ValueError: as `output_checks.labels`.

  >>> label_target(jnp.zeros((2, 2)), {'y': jnp.array([1, 2])}).tolist()
  [[0.0, 1.0], [nan, nan]]
  """
  y, classes = output_checks.labels(like, batch), like.shape[-1]
  known = jnp.expand_dims((y >= 0) & (y < classes), -1)
  return jnp.where(known, jax.nn.one_hot(y, classes, dtype=like.dtype), jnp.nan)


def example_weights(batch: core.Batch) -> jax.Array:
  """The weights of the examples in a distillation batch: their mask.

  Args:
    batch: holds `mask: float32[B]`, as `core.gather` returns it.

  Returns:
    `float32[B]`.

  >>> example_weights(core.gather({'x': jnp.ones(3)}, jnp.array([2, 0, -1])))
  Array([1., 1., 0.], dtype=float32)
  """
  return batch["mask"]


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
    weights: `batch -> weights`, in the mean, of the batch's examples, `[B]`, or
      of their positions, `[B, T]`.
    divergence: `None` for `kl_divergence` from `codist_target`. Otherwise a
      function such as `next_word.token_divergence`, for models whose outputs
      are arrays with examples on their first axis, or `TokenLogits`, which are
      too large to keep: only their features are kept, for all steps.

  Raises:
    ValueError: a value is out of its range, the optimizer is not a function of
      a rate or holds the rate in its state, or a custom divergence is combined
      with mixup.

  Reference: Lichtarge et al. 2023, appendix C.4, whose rate falls linearly to
    0; `final_share` is our reading of "decay coefficient" in the search space
    of appendix F.
  """

  learning_rate: float | Sequence[float] = 1e-3
  final_share: float | Sequence[float] = 0.0
  temperature: float | Sequence[float] = 1.0
  regularization: float | Sequence[float] = 0.01
  label_weight: float = 0.0
  transform: core.Transform | None = None
  mixup_beta: float | None = None
  optimizer: core.Optimizer = optax.adam
  microbatch: int | None = None
  weights: Callable[[core.Batch], jax.Array] = example_weights
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
    checks.factories(optimizer=self.optimizer)
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
      ValueError: if there is neither one value nor one for each pool.

    >>> Distiller(temperature=(1., 2.)).hyper(2)['temperature']
    Array([1., 2.], dtype=float32)
    """
    values = {
      "distill_lr": self.learning_rate,
      "final_share": self.final_share,
      "temperature": self.temperature,
      "regularization": self.regularization,
    }
    hyper = {}
    for name, value in values.items():
      array = jnp.asarray(value, jnp.float32)
      if array.shape not in ((), (num_pools,)):
        raise ValueError(f"{name}={value}: give one or {num_pools} values")
      hyper[name] = jnp.array(jnp.broadcast_to(array, (num_pools,)))
    return hyper

  def batch(self, key, bank: core.Batch, step, index) -> core.Batch:
    """Distillation batch number `step`, the same for teachers and students.

    Args:
      key: the exchange's key of the round.
      bank: the distillation bank.
      step: the number of the step.
      index: `int32[B]`, positions in the bank.

    Returns:
      The batch as models take it, with its weights `mixup: float32[B]` if it
      was mixed.
    """
    transform_key, mixup_key = jax.random.split(jax.random.fold_in(key, step))
    batch = core.prepare(
      self.transform, core.gather(bank, index), transform_key
    )
    if self.mixup_beta is not None:
      weight = symmetric_beta(mixup_key, self.mixup_beta, index.shape)
      batch = {**batch, "x": mixup(batch["x"], weight), "mixup": weight}
    return batch

  def predictor(self, model: core.Model) -> Callable[..., PyTree]:
    """The program that computes a model's view of distillation batches.

    Args:
      model: the model.

    Returns:
      `(variables, key, bank, (step [N], index [N, B])) -> view`: the logits
      `float[N, B, C]` or, if these are `TokenLogits`, their features.
    """

    def view_of_batches(variables, key, bank, rows):
      def predict(row):
        batch = self.batch(key, bank, *row)
        size = len(batch["mask"])
        view = jax.lax.map(
          lambda part: self._view(model.predict(variables, part)),
          core.split(batch["x"], core.num_parts(size, self.microbatch)),
        )
        return jax.tree.map(lambda a: a.reshape(size, *a.shape[2:]), view)

      steps, batch_size = rows[1].shape
      at_once = min(steps, _batches_at_once(batch_size))
      if at_once == 1 or core.num_parts(batch_size, self.microbatch) > 1:
        return jax.lax.map(predict, rows)
      return jax.lax.map(predict, rows, batch_size=at_once)

    return view_of_batches

  def _view(self, outputs: PyTree) -> PyTree:
    """The part of a model's outputs that is per example, not the last layer."""
    if self.divergence is None:
      output_checks.dense(outputs)
    return outputs.features if isinstance(outputs, TokenLogits) else outputs

  def student(
    self, models: Sequence[core.Model], index: int
  ) -> Callable[..., tuple[core.Variables, core.Mean]]:
    """The program that distils to one pool's model in S optimizer steps.

    Args:
      models: each pool's model.
      index: the student's pool, i.

    Returns:
      `(variables, hyper, decay, key, bank, steps [S], index [S, B], teachers)
      -> (student, loss)`, where `teachers` holds, for each pool including the
      student's, its `Variables` at the start and their view of the batches,
      from `predictor`. The loss is the mean KL to the target.
      With `shard`, an `engine.Shard`, each device takes its share of every
      batch, and gradients are added up.
    """
    others = [j for j in range(len(models)) if j != index]

    def distil(
      variables, hyper, decay, key, bank, steps, rows, teachers, shard=None
    ):
      final = hyper["final_share"][index]
      rate = hyper["distill_lr"][index] * (final + (1 - final) * decay)
      optimizer = self.optimizer(rate)
      # Differs from the batches' keys, and from the other students'.
      student_key = jax.random.fold_in(key, 2**31 + index)
      mix = dict(
        temperatures=[hyper["temperature"][j] for j in others],
        regularization=hyper["regularization"][index],
        label_weight=self.label_weight,
      )

      def to_target(logits, examples):
        kl = kl_divergence(examples["target"], logits)
        weights = examples["weights"]
        if kl.shape != weights.shape:
          raise ValueError(
            f"logits of shape {logits.shape} and weights of shape"
            f" {weights.shape}: Distiller.weights must return shape {kl.shape}"
          )
        return jnp.sum(weights * kl)

      def to_views(logits, examples):
        batch = examples["batch"]
        own, *outputs = (
          _outputs(models[j], teachers[j][0], batch["x"], examples["views"][j])
          for j in (index, *others)
        )
        weights = examples["weights"]
        return self.divergence(logits, outputs, own, batch, weights, **mix)

      def step(carry, row):
        student, opt_state = carry
        s, positions, views = row
        batch = self.batch(key, bank, s, positions)
        examples = {"x": batch["x"], "weights": self.weights(batch)}
        if self.divergence is None:
          divergence = to_target
          labels = None
          if self.label_weight:
            labels = label_target(core.wide(views[index]), batch)
            if self.mixup_beta is not None:
              labels = mixup(labels, batch["mixup"])
          examples["target"] = codist_target(
            [views[j] for j in others],
            views[index],
            labels,
            **mix,
          )
        else:
          divergence = to_views
          examples |= {"batch": batch, "views": views}
        loss, grads, stats = self._gradient(
          models[index],
          student,
          jax.random.fold_in(student_key, s),
          divergence,
          examples,
          shard,
        )
        params, opt_state = core.descend(
          optimizer, student.params, opt_state, grads, value=loss
        )
        return (core.Variables(params, stats), opt_state), loss

      start = (variables, optimizer.init(variables.params))
      views = [view for _, view in teachers]
      (student, _), losses = jax.lax.scan(step, start, (steps, rows, views))
      return student, core.Mean(
        jnp.sum(losses), jnp.asarray(len(losses), jnp.float32)
      )

    return distil

  def _gradient(self, model, student, key, divergence, examples, shard):
    """Mean loss, gradient and statistics over a batch, part by part."""
    count = jnp.sum(examples["weights"])
    share = 1 / jnp.where(count > 0, count, 1)

    def loss(params, stats, key, examples):
      logits, stats = model.outputs(
        core.Variables(params, stats), examples["x"], key, True
      )
      return share * divergence(logits, examples), stats

    def part(carry, row):
      total, grads, stats = carry
      (value, stats), g = jax.value_and_grad(loss, has_aux=True)(
        student.params, stats, *row
      )
      return (total + value, optax.tree.add(grads, g), stats), None

    # If the devices cannot share the batch equally, each takes all of it.
    batch_size = len(examples["weights"])
    if shard is not None and batch_size % shard.count:
      shard = None
    devices = shard.count if shard else 1
    parts = core.num_parts(batch_size, self.microbatch, multiple=devices)
    split = (jax.random.split(key, parts), core.split(examples, parts))
    sums, _ = jax.lax.scan(
      part,
      (jnp.zeros(()), core.sums_like(student.params), student.stats),
      shard.take(split) if shard else split,
    )
    total, grads, stats = sums
    if shard:
      total, grads, stats = shard.sum(sums)
      stats = jax.tree.map(
        lambda total: core.as_type(total / shard.count, total.dtype), stats
      )
    return total, optax.tree.cast_like(grads, student.params), stats


def _outputs(
  model: core.Model, variables: core.Variables, x: PyTree, view: PyTree
) -> PyTree:
  """A model's outputs, given their view."""
  # Of these only the output layer is used; the compiler drops the rest.
  outputs = model.predict(variables, x)
  if isinstance(outputs, TokenLogits):
    return dataclasses.replace(outputs, features=view)
  return view


def _batches_at_once(batch_size: int) -> int:
  """Batches that a teacher sees at once: on accelerators a thousand examples.

  One batch at a time, as a student takes them, leaves a large device idle; on
  CPUs the activations of one batch stay in the caches.
  """
  if jax.default_backend() == "cpu":
    return 1
  return max(1, 1024 // batch_size)
