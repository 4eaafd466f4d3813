"""Deep mutual learning on a client: its own model and its meme.

The work that `hetfl.fml` runs for each client in a round, and the state that a
client keeps.

Reference: Shen et al. 2020, "Federated Mutual Learning", equation 5 and
ClientUpdate of algorithm 1; Zhang et al. 2018, "Deep Mutual Learning".
"""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core, output_checks
from hetfl import distill as distill_lib
from hetfl import engine as engine_lib

PyTree = Any


class MutualClient(NamedTuple):
  """The configuration of a client of Federated Mutual Learning.

  Clients with equal fields form a group, whose states are stacked and whose
  work is one program. Functions are equal only to themselves: make a transform,
  or a model without `Model.from_flax`, once and pass it to all clients.

  Attributes:
    model: the client's own model, the paper's local or personalized one.
    transform: applied to each training batch as stored in the bank.
    bank: the name of the bank that holds its examples.
    adaptor: a model from the global model's outputs to logits, for a global
      model whose outputs are features; it stays with the client.
    encoder: a model from inputs to the global model's inputs, for a global
      model that takes features; it stays with the client. With both, the global
      model is the middle of the meme.
    loss: the loss of each example. Whatever it is, the models' outputs must be
      logits, since equation 5's divergence is between softmaxes.
    optimizer: the local model's optimizer, in place of `fml`'s. It is given the
      same learning rate and may scale it: `lambda lr: optax.adam(0.1 * lr)`.
  """

  model: core.Model
  transform: core.Transform | None = None
  bank: str = "train"
  adaptor: core.Model | None = None
  encoder: core.Model | None = None
  loss: core.Loss = core.cross_entropy
  optimizer: core.Optimizer | None = None


@flax.struct.dataclass
class GroupState:
  """What the clients of a group keep from round to round.

  Attributes:
    local: their local models' variables, each array with a leading axis K.
    opt_state: the states of their local models' optimizers, likewise stacked.
    adaptor: their adaptors' variables, likewise stacked; `None` without
      adaptors.
    encoder: the same for their encoders.
    clients: K client numbers.
  """

  local: core.Variables
  opt_state: PyTree
  adaptor: core.Variables | None
  encoder: core.Variables | None
  clients: tuple[int, ...] = flax.struct.field(pytree_node=False)


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
  output_checks.same_outputs(logits, partner)
  target = distill_lib.tempered_softmax(
    jax.lax.stop_gradient(partner), temperature
  )
  # A partner with weight zero may output NaN.
  counts = (weight < 1) | jnp.isfinite(target)
  target = jnp.where(counts, target, 0.0)
  kl = temperature**2 * distill_lib.kl_divergence(
    target, core.wide(logits) / temperature
  )
  if jnp.ndim(labels_loss) == 0:
    raise ValueError(
      "loss: returned a scalar; mutual learning needs one loss per example,"
      " float[B]"
    )
  if kl.shape != labels_loss.shape:
    raise ValueError(
      f"logits of shape {logits.shape} with losses of shape"
      f" {labels_loss.shape}: mutual learning needs logits float[B, C] and"
      " losses float[B]"
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
  held = {name: part for name, part in parts.items() if part is not None}
  return core.Variables(
    {name: part.params for name, part in held.items()},
    {name: part.stats for name, part in held.items()},
  )


def _unsplice(meme, kept):
  """The part of a meme that is sent, and `kept` with the parts that stay."""
  if kept.adaptor is None and kept.encoder is None:
    return meme, kept
  parts = {
    name: core.Variables(meme.params[name], meme.stats[name])
    for name in meme.params
  }
  return parts.pop("trunk"), kept.replace(**parts)


def _part_loss(client: MutualClient, models: dict[str, core.Model]):
  """Equation 5's losses of a client's models, on a part of a batch."""
  weights = {"local": "alpha", "meme": "beta"}

  def part_loss(params, variables, hyper, share, batch, key):
    """The losses of the models in `params`; `share` weights each example."""
    own = {
      name: variables[name]._replace(params=params.get(name, held.params))
      for name, held in variables.items()
    }
    # The meme's draws are those of a FedAvg client's model; 2**31 differs from
    # everything that `splice` folds in.
    keys = {"local": jax.random.fold_in(key, 2**31), "meme": key}
    given = f"{core.inputs_of(batch)} (bank {client.bank!r})"
    notes = {
      "local": f"a client's own model, {given}",
      "meme": f"a client's meme, {given}: its encoder, if it has one, the"
      " global model and its adaptor, if it has one",
    }
    logits, stats = {}, {}
    for name, model in models.items():
      with checks.noted(notes[name]):
        logits[name], stats[name] = model.outputs(
          own[name], batch["x"], keys[name], True
        )
    total, sums = jnp.zeros(()), {}
    for name in params:
      losses = core.losses_of(client.loss, logits[name], batch)
      output_checks.losses(losses, batch["mask"])
      kl = jnp.zeros_like(losses)
      if "meme" in logits:
        partner = logits["meme" if name == "local" else "local"]
        with checks.noted(
          "a client's own model and its meme; if the global model outputs"
          " features, give the client an adaptor"
        ):
          losses, kl = mutual_loss(
            logits[name],
            partner,
            losses,
            weight=hyper[weights[name]],
            temperature=hyper["temperature"],
          )
      part = jnp.sum(losses * batch["mask"])
      total += share * part
      sums |= {
        f"{name}_loss": part,
        f"{name}_kl": jnp.sum(kl * batch["mask"]),
      }
    return total, (sums, {name: stats[name] for name in params})

  return part_loss


def _gradients(part_loss, microbatch: int | None):
  """Gradients of `part_loss`, in parts of at most `microbatch` examples."""

  def gradients(names, variables, hyper, batch, key):
    """Mean gradients, statistics and summed losses of some models."""
    params = {name: variables[name].params for name in names}
    grad = jax.grad(part_loss, has_aux=True)
    count = jnp.sum(batch["mask"])
    share = 1 / jnp.maximum(count, 1)
    parts = core.num_parts(len(batch["mask"]), microbatch)
    if parts == 1:
      grads, (sums, stats) = grad(params, variables, hyper, share, batch, key)
      return grads, stats, sums, count

    def add(carry, part):
      grads, sums, variables = carry
      g, (s, stats) = grad(params, variables, hyper, share, *part)
      variables = variables | {
        name: variables[name]._replace(stats=stats[name]) for name in names
      }
      return (
        optax.tree.add(grads, g),
        optax.tree.add(sums, s),
        variables,
      ), None

    zeros = {f"{n}_{x}": jnp.zeros(()) for n in names for x in ("loss", "kl")}
    split = core.split(batch, parts)
    (grads, sums, after), _ = jax.lax.scan(
      add,
      (core.sums_like(params), zeros, variables),
      (split, jax.random.split(key, parts)),
    )
    grads = optax.tree.cast_like(grads, params)
    return grads, {n: after[n].stats for n in names}, sums, count

  return gradients


def client_program(
  client: MutualClient,
  global_model: core.Model | None,
  *,
  optimizer: core.Optimizer = momentum_sgd,
  sequential: bool = False,
  microbatch: int | None = None,
) -> engine_lib.Stages:
  """A client's round: ClientUpdate of algorithm 1.

  Args:
    client: the client.
    global_model: the global model; with `None` there is no meme, and the client
      learns alone.
    optimizer: see `fml`.
    sequential: see `fml`.
    microbatch: see `fml`.

  Returns:
    The stages of `(server, hyper, key, bank, (kept, work)) -> (kept, meme,
    metrics)`: `server` is the global model's `Variables`, `hyper` the round's
    `learning_rate`, `alpha`, `beta` and `temperature`, `key` the round's key,
    `bank` the examples on the device, `kept` a row of a `GroupState` and `work`
    a row of `GroupPlan`. Step `s` of client `k` draws from
    `fold_in(fold_in(key, k), s)`, as in `hetfl.client.lane_program`.
  """
  models = {"local": client.model}
  if global_model is not None:
    models["meme"] = splice(
      global_model, client.adaptor, encoder=client.encoder
    )
  # Which models step together, on the same logits.
  turns = [(name,) for name in models] if sequential else [tuple(models)]
  optimizers = {"local": client.optimizer or optimizer, "meme": optimizer}
  part_loss = _part_loss(client, models)
  gradients = _gradients(part_loss, microbatch)

  def begin(server, hyper, key, bank, row):
    del key, bank
    kept, _ = jax.tree.map(jnp.asarray, row)  # NumPy arrays if not under jit.
    variables = {"local": kept.local}
    opt_states = {"local": kept.opt_state}
    if global_model is not None:
      variables["meme"] = fork(  # Line 3.
        server, kept.adaptor, kept.encoder
      )
      of_meme = optimizers["meme"](hyper["learning_rate"])
      opt_states["meme"] = of_meme.init(variables["meme"].params)
    means = {
      f"{n}_{x}": core.Mean.zero() for n in models for x in ("loss", "kl")
    }
    return variables, opt_states, means

  def advance(server, hyper, key, bank, row, carry, first, last):
    del server
    _, work = jax.tree.map(jnp.asarray, row)
    rate = hyper["learning_rate"]

    def step(s, carry):  # Lines 4 and 5.
      variables, opt_states, means = carry
      step_key = jax.random.fold_in(jax.random.fold_in(key, work.client), s)
      transform_key, model_key = jax.random.split(step_key)
      batch = core.prepare(
        client.transform, core.gather(bank, work.index[s]), transform_key
      )
      for names in turns:
        grads, stats, sums, count = gradients(
          names, variables, hyper, batch, model_key
        )
        for name in names:
          params, new = core.descend(
            optimizers[name](rate),
            variables[name].params,
            opt_states[name],
            grads[name],
            value=sums[f"{name}_loss"] / jnp.maximum(count, 1),
          )
          variables = variables | {name: core.Variables(params, stats[name])}
          opt_states = opt_states | {name: new}
        means = means | {
          name: means[name] + core.Mean(total, count)
          for name, total in sums.items()
        }
      return variables, opt_states, means

    return jax.lax.fori_loop(first, last, step, carry)

  def end(server, hyper, key, bank, row, carry):
    del server, hyper, key, bank
    kept, _ = row
    variables, opt_states, means = carry
    meme = None
    if global_model is not None:
      meme, kept = _unsplice(variables["meme"], kept)
    kept = kept.replace(local=variables["local"], opt_state=opt_states["local"])
    return kept, meme, means

  return engine_lib.Stages(begin, advance, end)
