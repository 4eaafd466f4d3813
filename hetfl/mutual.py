"""Deep mutual learning: two models learn from labels and from each other.

Reference: Shen et al. 2020, "Federated Mutual Learning", equation 5; Zhang et
al. 2018, "Deep Mutual Learning".
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core, distill, local

PyTree = Any


def momentum_sgd(
  learning_rate: float | jax.Array,
  *,
  momentum: float = 0.9,
  weight_decay: float = 5e-4,
  clip_norm: float | None = None,
) -> optax.GradientTransformation:
  """SGD as in PyTorch: `v <- m v + (g + d w); w <- w - lr v`.

  Weight decay is added to the gradient, and the learning rate is applied after
  the momentum.

  Args:
    learning_rate: lr.
    momentum: m.
    weight_decay: d.
    clip_norm: gradients with a larger global norm are first scaled down to it;
      `None` for no clipping, as in the paper.

  Returns:
    The optimizer.

  Raises:
    ValueError: if a value is out of its range.

  Reference: Shen et al. 2020, section 5.1; `torch.optim.SGD`.

  >>> sgd = momentum_sgd(0.5, momentum=0.5, weight_decay=0.25)
  >>> w, g = jnp.array(4.0), jnp.array(1.0)
  >>> updates, state = sgd.update(g, sgd.init(w), w)
  >>> float(updates)  # -0.5 (1 + 0.25 * 4)
  -1.0
  >>> float(sgd.update(g, state, w + updates)[0])  # -0.5 (0.5 * 2 + 1.75)
  -1.375
  """
  checks.between(0, 1, momentum=momentum)
  checks.between(0, np.inf, weight_decay=weight_decay)
  checks.positive(**checks.given(clip_norm=clip_norm))
  clip = optax.identity()
  if clip_norm is not None:
    clip = optax.clip_by_global_norm(clip_norm)
  return optax.chain(
    clip,
    optax.add_decayed_weights(weight_decay),
    optax.sgd(learning_rate, momentum=momentum),
  )


def mutual_loss(
  logits: jax.Array,
  partner: jax.Array,
  labels_loss: jax.Array,
  *,
  weight: float | jax.Array,
  temperature: float | jax.Array = 1.0,
) -> tuple[jax.Array, jax.Array]:
  """`w CE + (1 - w) KL(p_partner || p)`, one of equation 5's two losses.

  Args:
    logits: `float[B, C]`, of the model that learns.
    partner: `float[B, C]`, the partner's logits; no gradient flows to them.
    labels_loss: `float[B]`, the model's loss on the labels, CE.
    weight: alpha for the local model, beta for the meme.
    temperature: T, of both softmaxes; the divergence is then multiplied by
      T^2 as in Hinton et al. 2015. Equation 5 has none; equation 3 has one, of
      the teacher only.

  Returns:
    Two `float[B]`: the loss, and the divergence in it, summed over classes.

  Raises:
    ValueError: the arrays have other shapes.

  Reference: Shen et al. 2020, equation 5.

  >>> logits, partner = jnp.log(jnp.array([[[.75, .25]], [[.5, .5]]]))
  >>> loss, kl = mutual_loss(logits, partner, jnp.array([2.]), weight=0.5)
  >>> [round(float(x[0]), 4) for x in (kl, loss)]  # log(4 / 3) / 2, + 2 / 2
  [0.1438, 1.0719]
  """
  distill.same_classes(logits, partner)
  target = distill.tempered_softmax(
    jax.lax.stop_gradient(partner), temperature
  )
  # A partner with weight zero may output NaN.
  counts = (weight < 1) | jnp.isfinite(target)
  target = jnp.where(counts, target, 0.0)
  kl = temperature**2 * distill.kl_divergence(
    target, core.wide(logits) / temperature
  )
  if kl.shape != jnp.shape(labels_loss):
    raise ValueError(
      f"logits of shape {logits.shape} with losses of shape"
      f" {jnp.shape(labels_loss)}: mutual learning needs logits float[B, C] and"
      " one loss for each example, float[B]"
    )
  return weight * labels_loss + (1 - weight) * kl, kl


def splice(
  trunk: core.Model,
  adaptor: core.Model | None = None,
  *,
  encoder: core.Model | None = None,
) -> core.Model:
  """Completes a partial model: `adaptor(trunk(encoder(x)))`.

  Args:
    trunk: the partial model.
    adaptor: a model from the trunk's outputs to logits; `None` if these are
      logits.
    encoder: a model from inputs to the trunk's inputs; `None` if these are the
      same. Its outputs may be any pytree that the trunk takes.

  Returns:
    The model; `fork` makes its variables. Without adaptor and encoder it is the
    trunk itself.

  Reference: Shen et al. 2020, section 4.2 ("splicing the forked global model
  with an adaptor layer"), section 4.1 for what may be shared.

  >>> times = lambda w: core.Model(
  ...     lambda key: core.Variables(jnp.array([[w]]), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> model = splice(times(2.), times(3.))
  >>> variables = fork(*(times(w).start(jax.random.key(0)) for w in (2., 3.)))
  >>> float(model.predict(variables, jnp.ones((1, 1)))[0, 0])
  6.0
  """
  if adaptor is None and encoder is None:
    return trunk

  def init(key):
    keys = jax.random.split(key, 3)
    return fork(*(m and m.start(k) for m, k in zip(parts.values(), keys)))

  def apply(variables, x, key, train):
    stats = {}
    for name, i in (("encoder", 2), ("trunk", 0), ("adaptor", 1)):
      if (part := parts[name]) is None:
        continue
      own = core.Variables(variables.params[name], variables.stats[name])
      part_key = None if key is None else jax.random.fold_in(key, i)
      with checks.noted(f"in the {name} of a spliced model"):
        x, stats[name] = part.outputs(own, x, part_key, train)
    return x, stats

  parts = {"trunk": trunk, "adaptor": adaptor, "encoder": encoder}
  return core.Model(init, apply)


def fork(
  server: core.Variables,
  adaptor: core.Variables | None = None,
  encoder: core.Variables | None = None,
) -> core.Variables:
  """`meme <- global`, with a client's adaptor and encoder if it has them.

  Args:
    server: the global model's variables.
    adaptor: the adaptor's variables or `None`.
    encoder: the encoder's variables or `None`.

  Returns:
    The meme's variables, of the model that `splice` makes.

  >>> server, adaptor = (core.Variables(w, {}) for w in (2., 3.))
  >>> fork(server).params, fork(server, adaptor).params
  (2.0, {'trunk': 2.0, 'adaptor': 3.0})
  """
  if adaptor is None and encoder is None:
    return server
  parts = {"trunk": server, "adaptor": adaptor, "encoder": encoder}
  return joined({name: part for name, part in parts.items() if part})


def joined(parts: Mapping[str, core.Variables]) -> core.Variables:
  """Several models' variables by name as one."""
  return core.Variables(
    {name: part.params for name, part in parts.items()},
    {name: part.stats for name, part in parts.items()},
  )


def parted(variables: core.Variables) -> dict[str, core.Variables]:
  """The parts of variables that `joined` made of several."""
  return {
    name: core.Variables(variables.params[name], variables.stats[name])
    for name in variables.params
  }


def mutual_objective(
  models: Mapping[str, core.Model], loss: core.Loss, label: str
) -> local.Objective:
  """Equation 5's losses of two models, `local` and `meme`, added up.

  `L_local = alpha CE + (1 - alpha) KL(p_meme || p_local)`
  `L_meme = beta CE + (1 - beta) KL(p_local || p_meme)`

  Each partner's distribution is held fixed, so that the gradient of the sum
  holds each model's own.

  Args:
    models: the two models; or `local` alone, which learns from labels only.
    loss: the loss of each example on the labels.
    label: what error messages call the client.

  Returns:
    The objective, over the variables of those models that learn, by name. The
    context holds `alpha`, `beta`, `temperature`, and in `fixed` the variables
    of a model that does not learn now.
  """
  weights, partners = {"local": "alpha", "meme": "beta"}, {"local": "meme"}
  partners["meme"] = "local"

  def objective(variables, batch, key, context):
    learns = parted(variables)
    # The meme's draws are those of a FedAvg client's model; 2**31 differs from
    # everything that `splice` folds in.
    keys = {"local": jax.random.fold_in(key, np.uint32(2**31)), "meme": key}
    logits, stats = {}, {}
    for name, model in models.items():
      own = learns[name] if name in learns else context["fixed"]
      logits[name], stats[name] = local.outputs_of(
        f"{label}: {name}", model, own, batch, keys[name]
      )
    total, measured = 0.0, {}
    for name in learns:
      losses, kl = loss(logits[name], batch), jnp.zeros_like(batch["mask"])
      if len(models) > 1:
        with checks.noted(
          "a client's own model and its meme; if the global model outputs"
          " features, give the client an adaptor"
        ):
          losses, kl = mutual_loss(
            logits[name],
            logits[partners[name]],
            losses,
            weight=context[weights[name]],
            temperature=context["temperature"],
          )
      total += losses
      measured |= {f"{name}_loss": losses, f"{name}_kl": kl}
    return total, {name: stats[name] for name in learns}, measured

  return objective


def each_by_its_own(
  optimizers: Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformation:
  """An optimizer of several models by name, each with one of its own."""

  def init(params):
    return {name: optimizers[name].init(w) for name, w in params.items()}

  def update(grads, states, params, **extra):
    updates, new = {}, {}
    for name, g in grads.items():
      optimizer = optax.with_extra_args_support(optimizers[name])
      updates[name], new[name] = optimizer.update(
        g, states[name], params[name], **extra
      )
    return updates, new

  return optax.GradientTransformationExtraArgs(init, update)


def mutual_step(
  objective: local.Objective,
  optimizer: Callable[[PyTree], optax.GradientTransformation],
  *,
  sequential: bool,
  microbatch: int | None,
) -> Callable[..., tuple[local.Learner, core.Metrics]]:
  """A step of both models on a batch.

  Args:
    objective: from `mutual_objective`.
    optimizer: `context -> optimizer` of the models by name.
    sequential: whether the local model is updated first and the meme learns
      from the updated one, as in Zhang et al. 2018.
    microbatch: see `local.gradient`.

  Returns:
    `(learner, batch, key, context) -> (learner, metrics)`.
  """
  step = local.descend(objective, optimizer, microbatch=microbatch)
  if not sequential:
    return step

  def in_turn(learner, batch, key, context):
    parts, states = parted(learner.variables), dict(learner.opt_state)
    metrics = {}
    for name in tuple(parts):
      others = [of for n, of in parts.items() if n != name]
      now = {**context, "fixed": others[0] if others else None}
      one = local.Learner(joined({name: parts[name]}), {name: states[name]})
      one, means = step(one, batch, key, now)
      parts |= parted(one.variables)
      states |= one.opt_state
      metrics |= means
    return local.Learner(joined(parts), states), metrics

  return in_turn
