"""Models made of parts: an encoder, a trunk and an adaptor."""

import jax

from hetfl import checks, core
from hetfl.model import joined, parted


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

  >>> import jax.numpy as jnp
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
    keys = dict(zip(("trunk", "adaptor", "encoder"), jax.random.split(key, 3)))
    return joined({name: m.start(keys[name]) for name, m in parts.items()})

  def apply(variables, x, key, train):
    stats, of = {}, parted(variables)
    for name, i in (("encoder", 2), ("trunk", 0), ("adaptor", 1)):
      if name in parts:
        own = None if key is None else jax.random.fold_in(key, i)
        with checks.noted(f"in the {name} of a spliced model"):
          x, stats[name] = parts[name].outputs(of[name], x, own, train)
    return x, stats

  parts = checks.given(trunk=trunk, adaptor=adaptor, encoder=encoder)
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
    The meme's variables, for the model that `splice` makes.

  >>> server, adaptor = (core.Variables(w, {}) for w in (2., 3.))
  >>> fork(server).params, fork(server, adaptor).params
  (2.0, {'trunk': 2.0, 'adaptor': 3.0})
  """
  if adaptor is None and encoder is None:
    return server
  return joined(checks.given(trunk=server, adaptor=adaptor, encoder=encoder))
