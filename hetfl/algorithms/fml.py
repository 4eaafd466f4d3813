"""Federated Mutual Learning.

Each client has a local model that never leaves it, and a *meme* model: a copy
of the global model. It trains both on the same batches, and each learns from
the labels and from the other's predictions. Only memes are sent and merged, so
the clients' local models may differ.

Reference: Shen et al. 2020, "Federated Mutual Learning", algorithm 1.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core, distill, local
from hetfl.clients import Client, Group, put_rows, Roster, weighted_mean
from hetfl.engine import Engine, Inline, Task
from hetfl.model import joined, parted
from hetfl.models.spliced import fork, splice
from hetfl.optimizers import by_name, momentum_sgd

PyTree = Any
_PARTNERS = {"local": "meme", "meme": "local"}
_WEIGHTS = {"local": "alpha", "meme": "beta"}


def local_model(state: core.State, client: int) -> core.Variables:
  """The variables of a client's own model, from the state of `fml`."""
  return _kept(state, client).learner.variables


def meme_model(state: core.State, client: int) -> core.Variables:
  """The meme that a client would fork now, of the model that `splice` makes."""
  return fork(state.server, **_kept(state, client).extra)


def _kept(state, client) -> Group:
  """What a client keeps, from a state of one trial."""
  for group in state.clients:
    if client in group.clients and not core.several_trials(state):
      row = group.clients.index(client)
      return jax.tree.map(lambda a, row=row: a[row], group)
  raise ValueError(
    f"client={client}: there is no such client; or the state holds several"
    " trials: use jax.vmap(lambda state: local_model(state, client))(states)"
  )


@functools.partial(jax.jit, static_argnums=0)
def _merge(merge, last, memes, weights):
  """Line 7: the new global model; the last one if nobody takes part."""
  each = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *memes)
  one = jax.tree.map(lambda a: a[0], each)
  weights = jnp.concatenate(weights)
  merged = merge(each, weights)
  checks.alike("merge", merged, one)
  anyone = jnp.sum(weights) > 0
  return optax.tree.where(anyone, core.as_types(merged, last), last)


def mutual_loss(
  logits: PyTree,
  partner: PyTree,
  labels_loss: jax.Array,
  *,
  weight: float | jax.Array,
  temperature: float | jax.Array = 1.0,
  divergence: distill.PairDivergence = distill.pair_divergence,
) -> tuple[jax.Array, jax.Array]:
  """`w CE + (1 - w) KL(p_partner || p)`, one of equation 5's two losses.

  Args:
    logits: `float[B, ..., C]`, of the model that learns.
    partner: likewise, the partner's; no gradient flows to them: `core.fixed`.
    labels_loss: `float[B]`, the model's loss on the labels, CE.
    weight: alpha for the local model, beta for the meme.
    temperature: T of the divergence. Equation 5 has none; equation 3 has one,
      of the teacher only.
    divergence: in place of KL, with its temperature.

  Returns:
    Two `float[B]`: the loss, and the divergence in it.

  Raises:
    ValueError: the arrays have other shapes.

  Reference: Shen et al. 2020, equation 5.

  >>> logits, partner = jnp.log(jnp.array([[[.75, .25]], [[.5, .5]]]))
  >>> loss, kl = mutual_loss(logits, partner, jnp.array([2.]), weight=0.5)
  >>> [round(float(x[0]), 4) for x in (kl, loss)]  # log(4 / 3) / 2, + 2 / 2
  [0.1438, 1.0719]
  """
  # A partner with weight zero may output NaN.
  heard = lambda z: jnp.where((weight < 1) | (z < jnp.inf), z, 0)
  partner = jax.tree.map(heard, core.fixed(partner))
  kl = divergence(logits, partner, temperature)
  if jnp.shape(kl) != jnp.shape(labels_loss) or jnp.ndim(kl) != 1:
    raise ValueError(
      f"losses of shape {jnp.shape(labels_loss)} with divergences of shape"
      f" {jnp.shape(kl)}: mutual learning needs one of each for each example,"
      " float[B]"
    )
  return weight * labels_loss + (1 - weight) * kl, kl


def _objective(client, models, divergence) -> local.Objective:
  """Equation 5's losses, added up: each partner is held fixed.

  The gradient of the sum then holds each model's own; of a partner that does
  not learn now, the context holds the variables as `fixed`.
  """

  def objective(variables, batch, key, context):
    learns = parted(variables)
    # The meme's draws are those of a FedAvg client's model; 2**31 differs from
    # everything that `splice` folds in.
    keys = {"local": jax.random.fold_in(key, np.uint32(2**31)), "meme": key}
    logits, stats = {}, {}
    for name, model in models.items():
      own = learns[name] if name in learns else context["fixed"]
      logits[name], stats[name] = local.outputs_of(
        f"{client.label}: {name}", model, own, batch, keys[name]
      )
    total, measured = 0.0, {}
    for name in learns:
      losses = local.losses_of(client.loss, logits[name], batch)
      kl = jnp.zeros_like(batch["mask"])
      if len(models) > 1:
        with checks.noted(
          "if the global model outputs features, give the client an adaptor"
        ):
          losses, kl = mutual_loss(
            logits[name],
            logits[_PARTNERS[name]],
            losses,
            weight=context[_WEIGHTS[name]],
            temperature=context["temperature"],
            divergence=divergence,
          )
      total += losses
      measured |= {f"{name}_loss": losses, f"{name}_kl": kl}
    return total, {name: stats[name] for name in learns}, measured

  return objective


def _in_turn(step):
  """The local model first; the meme then learns from the updated one."""

  def turns(learner, batch, key, context):
    parts, states = parted(learner.variables), dict(learner.opt_state)
    metrics = {}
    for name in tuple(parts):
      fixed = parts.get(_PARTNERS[name])
      one = local.Learner(joined({name: parts[name]}), {name: states[name]})
      one, means = step(one, batch, key, {**context, "fixed": fixed})
      parts |= parted(one.variables)
      states |= one.opt_state
      metrics |= means
    return local.Learner(joined(parts), states), metrics

  return turns


def _client_update(
  client, global_model, optimizer, sequential, divergence
) -> Task:
  """ClientUpdate of algorithm 1; without a global model, learning alone."""
  models = {"local": client.model}
  if global_model is not None:
    models["meme"] = splice(global_model, **client.parts)
    if divergence is None:
      client = local.of_classes(
        client, "fml compares softmaxes", "give fml(divergence=)"
      )
      divergence = distill.pair_divergence

  def optimizers(context):
    rate = context["learning_rate"]
    own = rate if client.learning_rate is None else client.learning_rate
    return by_name(
      {"local": (client.optimizer or optimizer)(own), "meme": optimizer(rate)}
    )

  def begin(context, kept):
    variables = {"local": kept.learner.variables}
    states = {"local": kept.learner.opt_state}
    if global_model is not None:  # Line 3: fork; its parts, a new optimizer.
      variables["meme"] = fork(context["server"], **kept.extra)
      meme = {"meme": variables["meme"].params}
      states |= optimizers(context).init(meme)
    return local.Learner(joined(variables), states)

  def end(context, kept, learner, metrics, batches, key):
    del context, batches, key
    models, states = parted(learner.variables), learner.opt_state
    meme = models.get("meme")
    if kept.extra and meme is not None:  # Only the trunk is sent.
      parts = parted(meme)
      meme, kept = parts.pop("trunk"), kept.replace(extra=parts)
    own = local.Learner(models["local"], states["local"])
    return kept.replace(learner=own), meme, metrics

  def penalty(params, context):  # 0 in turns while the meme steps alone.
    del context
    own = (client.penalty(w) for name, w in params.items() if name == "local")
    return client.l2 * sum(own, 0.0)

  step = local.step_on(
    _objective(client, models, divergence),
    optimizers,
    microbatch=client.microbatch,
    penalty=client.penalty and penalty,
  )
  return local.training(  # Lines 4 and 5.
    _in_turn(step) if sequential else step,
    begin,
    end,
    transform=client.transform,
    measured=tuple(f"{name}_{x}" for name in models for x in ("loss", "kl")),
  )


def fml(
  clients: Sequence[Client],
  *,
  global_model: core.Model | None,
  alpha: float | jax.Array | core.Schedule = 0.5,
  beta: float | jax.Array | core.Schedule = 0.5,
  learning_rate: float | jax.Array | core.Schedule = 0.01,
  optimizer: core.Optimizer = momentum_sgd,
  temperature: float | jax.Array | core.Schedule = 1.0,
  divergence: distill.PairDivergence | None = None,
  sequential: bool = False,
  from_global: bool = False,
  merge: Callable[[core.Variables, jax.Array], core.Variables] = weighted_mean,
  engine: Engine | None = None,
) -> core.Algorithm:
  """Federated Mutual Learning.

  In each round each client forks `meme <- global` and, on each of its batches,
  updates both of its models at once by a step on

  `L_local = alpha CE + (1 - alpha) KL(p_meme || p_local)`
  `L_meme = beta CE + (1 - beta) KL(p_local || p_meme)`

  with the partner's distribution held fixed. Then
  `global <- sum_k w_k meme_k / sum_k w_k`, with the plan's weights; the paper's
  are uniform. The meme's optimizer is new in each round; the
  local model, its optimizer, and the client's adaptor and encoder, if any,
  persist. With beta = 1 the global model is FedAvg's.

  Args:
    clients: K clients; the plan says which of them take part in a round.
    global_model: the global model. If its outputs are features and not logits,
      every client needs an adaptor; if its inputs are features, every client
      needs an encoder. `None` for clients that learn alone, with the batches
      and draws of all others ("independently training", figures 5 and 6).
    alpha: weight of the labels in the local models' loss, in [0, 1]: a value,
      which trials may vary, or a schedule `round -> alpha`.
    beta: likewise, for the memes; best if alpha falls and it rises (section 6).
    learning_rate: of memes, and of clients without a rate of their own; a value
      or a schedule.
    optimizer: `learning rate -> optax optimizer`, likewise.
    temperature: T of the divergences, then multiplied by T^2; likewise.
    divergence: `(outputs, partner's outputs, temperature) -> float[B]` in place
      of KL, for labels that are not classes, of which an example has one.
      `None` for `distill.pair_divergence`.
    sequential: whether the local model is updated first and the meme learns
      from the updated one, as in deep mutual learning (Zhang et al. 2018). The
      paper does not say; its code updates both at once.
    from_global: whether clients whose local model is the global model start
      from its weights ("the same model provided by server", section 4.2).
    merge: `(memes, weights) -> global`, such as a median: `memes` are
      `Variables` of arrays `[K, ...]`, `weights` `float32[K]`, 0 for clients
      that do not take part.
    engine: where the work runs, by default `Inline()`; see `hetfl.engine`.

  Returns:
    The algorithm. Its `init` takes a key and, to start from an existing global
    model, its `Variables`. Its `step` takes a plan with batches and data with
    banks on the device, by the names of the clients' banks; a bank's clients
    are numbered in the order of `clients`. Models with batch statistics need
    plans with `tail="repeat"`. Its metrics are means over all examples:
    `local_loss`, equation 5's loss of the local models; `local_kl`, the
    divergence in it; and `meme_loss` and `meme_kl`, the same for the memes.

  Raises:
    ValueError: a value is out of its range; labels are not classes, and there
      is no divergence for them. A schedule that leaves its range later gives
      NaN in that round.

  Reference: Shen et al. 2020, algorithm 1 and equation 5; the released code for
    alpha and beta of 1/2, simultaneous steps, new meme optimizers.

  For its only image, of class 0, a client's local model predicts (1/2, 1/2)
  and the global model (3/4, 1/4). Label and meme pull the local model's first
  logit up, by 1/2 and 1/4; for the meme, the local model cancels the label.

  >>> linear = lambda *w: core.Model(
  ...     lambda key: core.Variables(jnp.array([w]), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> from hetfl import ClientPopulation, plan_round
  >>> held = ClientPopulation.from_lists(bank, [[0]])
  >>> plan = plan_round({'train': held}, seed=0, round=1, batch_size=1)
  >>> algorithm = fml([Client(linear(0., 0.))],
  ...                 global_model=linear(jnp.log(3.), 0.), learning_rate=1.)
  >>> state, metrics = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan, {'train': bank})
  >>> local_model(state, 0).params.round(3).tolist()  # (1/2 + 1/4) / 2
  [[0.37..., -0.37...]]
  >>> round(float(state.server.params[0, 0]), 2)  # log 3
  1.1
  >>> float(metrics['local_kl'].value)  # 3/4 log 3/2 + 1/4 log 1/2
  0.130...
  """
  roster = Roster(clients)
  if from_global and all(c.model != global_model for c in clients):
    raise ValueError("from_global=True: no client's model equals global_model")
  hyper = {"learning_rate": (learning_rate, np.inf)}
  if global_model is not None:
    core.Model.check("global_model", global_model)
    hyper |= {"alpha": (alpha, 1), "beta": (beta, 1)}
    hyper |= {"temperature": (temperature, np.inf)}
  for name, (value, high) in hyper.items():
    low = 1e-6 if name == "temperature" else 0  # T is a divisor.
    core.check_schedule(name, value, 1, low=low, high=high)
  checks.optimizers(optimizer=optimizer)
  engine = engine or Inline()
  updates = [
    _client_update(client, global_model, optimizer, sequential, divergence)
    for client in roster.first  # Of each group of like clients.
  ]

  def init(key, server=None, rows=None):  # Line 2; of ClientUpdate, too.
    init_key, run_key = jax.random.split(key)
    if global_model is not None:
      # The key that FedAvg gives its only pool.
      server_key = jax.random.fold_in(init_key, 0)
      server = global_model.start(server_key, "server", server)
    elif server is not None:
      raise ValueError("server: there is no global_model for its variables")

    def start_all(model, group, part=0):
      numbers = 1 + part * len(clients) + group
      start = lambda k: model.start(jax.random.fold_in(init_key, k))
      return jax.vmap(start)(numbers)

    def group_state(client, group):
      variables = start_all(client.model, group)
      if from_global and client.model == global_model:
        alike = lambda a: jnp.broadcast_to(a, (len(group), *a.shape))
        variables = jax.tree.map(alike, server)
      own = client.optimizer or optimizer
      start = jax.vmap(lambda variables: local.Learner.start(variables, own))
      parts = {
        name: start_all(part, group, i)
        for i, (name, part) in enumerate(client.parts.items(), 1)
      }
      return start(variables), parts

    values = {name: x for name, (x, _) in hyper.items() if not callable(x)}
    kept = roster.start(group_state, rows)
    return core.State(run_key, core.hyper(**values), server, kept)

  def step(state, plan, data):
    # The key of FedAvg's only pool.
    key = jax.random.fold_in(jax.random.fold_in(state.key, plan.round), 0)
    context = {"server": state.server}
    context |= core.scheduled(hyper, state, plan.round)
    turns = roster.turns(state.clients, plan, data, state.server)
    works = [
      local.work(update, context, key, turn.bank, turn.kept, turn.batches)
      for update, turn in zip(updates, turns)
    ]
    new, memes, means = zip(*engine.run(*works))  # Lines 4 to 6.
    rows = [turn.rows for turn in turns]
    kept = tuple(map(put_rows, state.clients, rows, new))
    server = state.server
    if global_model is not None:  # Line 7.
      weights = [turn.batches.weight for turn in turns]
      server = _merge(merge, server, memes, weights)
    total = lambda *of_groups: sum(map(jnp.sum, of_groups))
    metrics = jax.tree.map(total, *means)
    return state.replace(server=server, clients=kept), metrics

  return core.Algorithm(init, step)
