"""Optimizers as functions of their rate, as the papers set them."""

from collections.abc import Mapping
import functools

import jax
import numpy as np
import optax

from hetfl import checks

# Servers take the clients' mean delta as their gradient (Reddi et al. 2021,
# algorithm 2; optax's Adam and Yogi correct their moments' bias, which that
# algorithm does not).
fedavg_server = optax.sgd
fedavgm_server = functools.partial(optax.sgd, momentum=0.9)
fedadam_server = functools.partial(optax.adam, b1=0.9, b2=0.999, eps=1e-5)
fedyogi_server = functools.partial(optax.yogi, b1=0.9, b2=0.999, eps=1e-3)
# Keras's defaults, which FedMD's released code trains with. Departure: optax's
# Adam adds epsilon after the bias correction, Keras's before it.
keras_adam = functools.partial(optax.adam, b1=0.9, b2=0.999, eps=1e-7)


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

  >>> import jax.numpy as jnp
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


def by_name(
  optimizers: Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformation:
  """An optimizer of several models by name, each with one of its own.

  Extra arguments, such as the loss as `value`, are for all models together.
  """

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
