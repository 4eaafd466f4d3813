"""Models with a body and a head, and what is made of their features.

Methods that share features, prototypes or heads need to know where a model's
body ends.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from hetfl import checks, core, local
from hetfl.algorithms.personal import mean_sent
from hetfl.clients import Client, Group
from hetfl.model import joined, parted


class Features(NamedTuple):
  """The outputs of a model with a body and a head.

  Attributes:
    features: `float[B, D]`, the body's outputs.
    logits: `float[B, C]`, the head's.
  """

  features: jax.Array
  logits: jax.Array


def headed(body: core.Model, head: core.Model) -> core.Model:
  """A model whose outputs are `Features`: `head(body(x))`, and `body(x)`.

  Args:
    body: a model from inputs to features; it may differ between clients.
    head: a model from features to logits.

  Returns:
    The model; its parameters and statistics are dicts of `body` and `head`.

  >>> times = lambda w: core.Model(
  ...     lambda key: core.Variables(jnp.array([[w]]), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> model = headed(times(2.), times(3.))
  >>> outputs = model.predict(model.start(jax.random.key(0)), jnp.ones((1, 1)))
  >>> outputs.features.tolist(), outputs.logits.tolist()
  ([[2.0]], [[6.0]])
  """

  def init(key):
    body_key, head_key = jax.random.split(key)
    return joined({"body": body.start(body_key), "head": head.start(head_key)})

  def apply(variables, x, key, train):
    of = parted(variables)
    keys = (None, None) if key is None else jax.random.split(key)
    features, body_stats = body.outputs(of["body"], x, keys[0], train)
    logits, head_stats = head.outputs(of["head"], features, keys[1], train)
    stats = {"body": body_stats, "head": head_stats}
    return Features(features, logits), stats

  return core.Model(init, apply)


def logits_only(model: core.Model) -> core.Model:
  """The model of `headed`, with the logits alone as its outputs."""

  def apply(variables, x, key, train):
    outputs, stats = model.outputs(variables, x, key, train)
    return outputs.logits, stats

  return core.Model(model.init, apply)


def scored(model: core.Model, scores: Callable[[Any, Any], Any]) -> core.Model:
  """For evaluation: a client's model that classifies with what the server sent.

  Args:
    model: the client's model, of outputs such as `Features`.
    scores: `(outputs, what the server sent) -> class scores`.

  Returns:
    A model whose variables are the client's and, as `stats`, what was sent.

  >>> double = core.Model(None, lambda v, x, key, train: (2 * x, v.stats))
  >>> minus = scored(double, lambda outputs, sent: outputs - sent)
  >>> minus.predict(core.Variables(core.Variables({}, {}), 1), 3)
  5
  """

  def apply(both, x, key, train):
    return scores(model.predict(both.params, x), both.stats), both.stats

  return core.Model(model.init, apply)


def classes_of(
  batch: core.Batch, num_classes: int
) -> tuple[jax.Array, jax.Array]:
  """`core.labels_of` a batch whose examples must have one class each."""
  with checks.noted(
    "the method shares means of classes, so each example needs one class: for"
    " other labels use lgfedavg, fml or fedmd"
  ):
    scores = jnp.zeros((*batch["mask"].shape, num_classes))
    return core.labels_of(scores, batch)


def class_sums(
  values: jax.Array, batch: core.Batch, num_classes: int
) -> core.Mean:
  """The sum of values over the examples of each class, and their number.

  Args:
    values: `float[B, D]`.
    batch: holds `y: int[B]` and `mask: float32[B]`.
    num_classes: C.

  Returns:
    The class means as sums `float32[C, D]` and counts `float32[C]`.

  Raises:
    ValueError: as `core.labels_of`: labels are classes.

  >>> batch = {'y': jnp.array([1, 1, 0]), 'mask': jnp.array([1., 1., 0.])}
  >>> sums = class_sums(jnp.array([[1.], [2.], [9.]]), batch, 3)
  >>> sums.total.tolist(), sums.count.tolist()
  ([[0.0], [3.0], [0.0]], [0.0, 2.0, 0.0])
  """
  labels, known = classes_of(batch, num_classes)
  of_class = jax.nn.one_hot(labels, num_classes) * batch["mask"][:, None]
  of_class *= known[:, None]
  total = jnp.matmul(of_class.T, core.wide(values), precision="highest")
  return core.Mean(total, jnp.sum(of_class, axis=0))


def no_sums(num_classes: int, size: int) -> core.Mean:
  """`class_sums` of `size` numbers over no examples."""
  return core.Mean(jnp.zeros((num_classes, size)), jnp.zeros(num_classes))


def of_logits(client: Client) -> local.Objective:
  """Learning from labels, by a model whose outputs are `Features`."""
  loss = lambda outputs, batch: client.loss(outputs.logits, batch)
  return local.supervised(dataclasses.replace(client, loss=loss))


# How a model with a part of that name is made.
_MADE_BY = {
  "head": "features.headed(body, head)",
  "shared": "fedmrl.matryoshka(...)",
}


def first_part(
  key: jax.Array, kept: Sequence[Group], part: str = "head"
) -> core.Variables:
  """What the server first sends of a shared part: the first client's.

  Args:
    key: not used; see `Method.server`.
    kept: what the clients keep at first.
    part: the name of one of those that were `joined` to their models.

  Returns:
    The part's variables.

  Raises:
    ValueError: a client's model has no such part, or its shapes differ.
  """
  del key
  for group in kept:
    params = group.learner.params
    if not isinstance(params, dict) or part not in params:
      raise ValueError(
        f"client {group.clients[0]}: its model has no part {part!r} of its own;"
        f" make it by {_MADE_BY[part]}"
      )
  parts = [parted(group.learner.variables)[part] for group in kept]
  first, *others = [jax.tree.map(lambda a: a[0], one) for one in parts]
  for group, other in zip(kept[1:], others):
    number = group.clients[0]
    checks.alike(f"the {part} of client {number} beside client 0", other, first)
  return first


def with_parts(
  variables: core.Variables, **parts: core.Variables
) -> core.Variables:
  """A model's variables, with those of some parts replaced.

  >>> of = lambda w: core.Variables(w, {})
  >>> whole = joined({'body': of(1.), 'head': of(2.)})
  >>> with_parts(whole, head=of(3.)).params
  {'body': 1.0, 'head': 3.0}
  """
  return joined(parted(variables) | parts)


def begin_with(kept: Group, **parts: core.Variables) -> local.Learner:
  """A client's learner, with parts that the server sent; see `Method.begin`."""
  variables = with_parts(kept.learner.variables, **parts)
  return kept.learner._replace(variables=variables)


def sharing(part: str) -> dict[str, Any]:
  """Functions of a `Method` whose clients share a part of their models.

  A client begins with the server's part, trains its whole model, and sends the
  part; the server takes their mean with the plan's weights, which are numbers
  of examples if not uniform.

  Args:
    part: its name; see `first_part`.

  Returns:
    `server`, `begin`, `end` and `aggregate`.
  """

  def end(context, kept, learner, batches):
    del context, batches
    return kept.replace(learner=learner), parted(learner.variables)[part]

  return dict(
    server=lambda key, kept: first_part(key, kept, part),
    begin=lambda context, kept: begin_with(kept, **{part: context["server"]}),
    end=end,
    aggregate=mean_sent,
  )


def train_server(
  objective: local.Objective,
  variables: core.Variables,
  examples: core.Batch,
  key: jax.Array,
  context: dict[str, Any],
  *,
  epochs: int,
  batch_size: int,
) -> core.Variables:
  """The server's training on what clients sent: SGD in epochs of batches.

  Args:
    objective: the losses of a batch.
    variables: what is trained.
    examples: arrays `[R, ...]` by name, as a batch that holds all; examples
      whose `mask` is 0 enter no batch.
    key: for the order and the objective.
    context: the round's, with the step size as `server_learning_rate`.
    epochs: passes over the examples, each in a new order.
    batch_size: the last batch of an epoch may be smaller.

  Returns:
    The trained variables.

  Two of three examples count: an epoch in batches of one is two steps of 1.

  >>> minus = lambda v, batch, key, context: (-v.params * batch['x'], {}, {})
  >>> examples = {'x': jnp.ones(3), 'mask': jnp.array([1., 0., 1.])}
  >>> train_server(minus, core.Variables(0., {}), examples, jax.random.key(0),
  ...              {'server_learning_rate': 1.}, epochs=1, batch_size=1).params
  Array(2., dtype=float32)
  """
  there = examples["mask"] > 0
  count = jnp.sum(there, dtype=jnp.int32)
  sgd = lambda context: optax.sgd(context["server_learning_rate"])
  step = local.step_on(objective, sgd)

  def epoch(learner, key):
    order_key, step_key = jax.random.split(key)
    order = jax.random.permutation(order_key, len(there))
    order = order[jnp.argsort(~there[order], stable=True)]  # Valid ones first.

    def one(s, learner):
      at = s * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
      rows = jnp.take(order, at, mode="clip")
      batch = jax.tree.map(lambda a: a[rows], dict(examples))
      batch["mask"] = jnp.where(at < count, batch["mask"], 0)
      return step(learner, batch, jax.random.fold_in(step_key, s), context)[0]

    return jax.lax.fori_loop(0, -(-count // batch_size), one, learner), None

  learner = local.Learner(variables, sgd(context).init(variables.params))
  learner, _ = jax.lax.scan(epoch, learner, jax.random.split(key, epochs))
  return learner.variables
