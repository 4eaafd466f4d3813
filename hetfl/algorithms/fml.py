"""Federated Mutual Learning.

Each client has a local model that never leaves it, and a *meme* model: a copy
of the global model. It trains both on the same batches, and each learns from
the labels and from the other's predictions. Only memes are sent and merged, so
the clients' local models may differ.

Reference: Shen et al. 2020, "Federated Mutual Learning", algorithm 1.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import checks, core, distill, local
from hetfl.algorithms.personal import Method, own_and_shared, round_step
from hetfl.clients import Client, Group, Roster, weighted_mean
from hetfl.engine import Engine, Inline
from hetfl.model import joined, parted
from hetfl.models.spliced import fork, splice
from hetfl.optimizers import momentum_sgd

PyTree = Any
# What the paper calls a client's `own` and its `shared` model.
_NAMES = {"own": "local", "shared": "meme"}
_PARTNERS = {"own": "shared", "shared": "own"}
_WEIGHTS = {"own": "alpha", "shared": "beta"}


def local_model(state: core.State, client: int) -> core.Variables:
  """The variables of a client's own model, from the state of `fml`."""
  return _kept(state, client).learner.variables


def meme_model(state: core.State, client: int) -> core.Variables:
  """The meme that a client would fork now, for the model from `splice`."""
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
    partner: likewise, the partner's; held fixed by whoever trains both, see
      `core.fixed`.
    labels_loss: `float[B]`, the model's loss on the labels, CE.
    weight: alpha for the local model, beta for the meme.
    temperature: T of the divergence. Equation 5 has none; equation 3 has one,
      of the teacher only.
    divergence: in place of KL, with its temperature.

  Returns:
    Two `float[B]`: the loss, and the divergence in it.

  Raises:
    ValueError: the arrays' shapes differ.

  Reference: Shen et al. 2020, equation 5.

  >>> logits, partner = jnp.log(jnp.array([[[.75, .25]], [[.5, .5]]]))
  >>> loss, kl = mutual_loss(logits, partner, jnp.array([2.]), weight=0.5)
  >>> [round(float(x[0]), 4) for x in (kl, loss)]  # log(4 / 3) / 2, + 2 / 2
  [0.1438, 1.0719]
  """
  # A partner with weight zero may output NaN.
  heard = lambda z: jnp.where((weight < 1) | (z < jnp.inf), z, 0)
  partner = jax.tree.map(heard, partner)
  kl = divergence(logits, partner, temperature)
  if jnp.shape(kl) != jnp.shape(labels_loss) or jnp.ndim(kl) != 1:
    raise ValueError(
      f"losses of shape {jnp.shape(labels_loss)} with divergences of shape"
      f" {jnp.shape(kl)}: mutual learning needs one of each for each example,"
      " float[B]"
    )
  return weight * labels_loss + (1 - weight) * kl, kl


def _objective(client, global_model, divergence) -> local.Objective:
  """Equation 5's losses, added up: each partner is held fixed.

  The gradient of the sum then holds each model's own. The context's `fixed`
  holds the variables of a partner that does not learn now.
  """
  meme = splice(global_model, **client.parts)
  models = {"own": client.model, "shared": meme}
  if divergence is None:
    client = local.of_classes(
      client, "fml compares softmaxes", "give fml(divergence=)"
    )
    divergence = distill.pair_divergence

  def objective(variables, batch, key, context):
    learns = parted(variables)
    # The meme's draws are those of a FedAvg client's model.
    keys = {"own": _own_key(key), "shared": key}
    logits, stats = {}, {}
    for name, model in models.items():
      own = learns[name] if name in learns else context["fixed"]
      logits[name], stats[name] = local.outputs_of(
        f"{client.label}: {_NAMES[name]}", model, own, batch, keys[name]
      )
    total, measured = 0.0, {}
    for name in learns:
      partner = logits[_PARTNERS[name]]
      # In turns it is constant within the step anyway, and `fixed` would end
      # the derivatives of a whole round.
      if _PARTNERS[name] in learns:
        partner = core.fixed(partner)
      loss = local.losses_of(client.loss, logits[name], batch)
      with checks.noted(
        "if the global model outputs features, give the client an adaptor"
      ):
        loss, kl = mutual_loss(
          logits[name],
          partner,
          loss,
          weight=context[_WEIGHTS[name]],
          temperature=context["temperature"],
          divergence=divergence,
        )
      total += loss
      called = _NAMES[name]
      measured |= {f"{called}_loss": loss, f"{called}_kl": kl}
    return total, {name: stats[name] for name in learns}, measured

  return objective


def _alone(client) -> local.Objective:
  """Learning from labels, with the draws of a client that has a meme."""
  supervised = local.supervised(client)

  def objective(variables, batch, key, context):
    loss, stats, _ = supervised(variables, batch, _own_key(key), context)
    kl = jnp.zeros_like(batch["mask"])
    return loss, stats, {"local_loss": loss, "local_kl": kl}

  return objective


def _own_key(key):
  # 2**31 differs from everything that `splice` folds in.
  return jax.random.fold_in(key, np.uint32(2**31))


def _in_turn(step):
  """The local model first; the meme then learns from the updated one."""

  def turns(learner, batch, key, context):
    parts, states = parted(learner.variables), dict(learner.opt_state)
    metrics = {}
    for name in tuple(parts):
      fixed = parts[_PARTNERS[name]]
      one = local.Learner(joined({name: parts[name]}), {name: states[name]})
      one, means = step(one, batch, key, {**context, "fixed": fixed})
      parts |= parted(one.variables)
      states |= one.opt_state
      metrics |= means
    return local.Learner(joined(parts), states), metrics

  return turns


def _mutual(global_model, divergence, merge) -> Method:
  """Algorithm 1, as clients and server take part in it."""

  def fork_meme(context):  # Line 3.
    return fork(context["server"], **context["own"].extra)

  def end(context, kept, learner, batches):
    del context, batches
    own, meme = own_and_shared(learner)
    if kept.extra:  # Only the trunk is sent.
      parts = parted(meme)
      meme, kept = parts.pop("trunk"), kept.replace(extra=parts)
    return kept.replace(learner=own), meme

  def aggregate(context, sent, key):  # Line 7.
    del key
    merged = merge(sent.value, sent.weight)
    checks.alike("merge", merged, context["server"])
    return merged

  return Method(
    objective=lambda client: _objective(client, global_model, divergence),
    shared=fork_meme,
    end=end,
    aggregate=aggregate,
    measured=("local_loss", "local_kl", "meme_loss", "meme_kl"),
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
      needs an encoder. `None` for clients that learn alone, with the same
      batches and draws ("independently training", figures 5 and 6).
    alpha: weight of the labels in the local models' loss, in [0, 1]: a value,
      which trials may vary, or a schedule `round -> alpha`.
    beta: likewise, for the memes; best if alpha falls and it rises (section 6).
    learning_rate: of memes, and of clients without a rate of their own; a value
      or a schedule.
    optimizer: `learning rate -> optax optimizer`, likewise.
    temperature: T of the divergences, then multiplied by T^2; likewise.
    divergence: `(outputs, partner's outputs, temperature) -> float[B]` in place
      of KL, for labels other than one class per example. `None` for
      `distill.pair_divergence`.
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
    full batches: plans with `tail="repeat"` or "wrap". Its metrics are means
    over all examples: `local_loss`, equation 5's loss of the local models;
    `local_kl`, the divergence in it; and `meme_loss` and `meme_kl`, the same
    for the memes.

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
  method = Method(objective=_alone, measured=("local_loss", "local_kl"))
  if global_model is not None:
    core.Model.check("global_model", global_model)
    hyper |= {"alpha": (alpha, 1), "beta": (beta, 1)}
    hyper |= {"temperature": (temperature, np.inf)}
    # It is a divisor.
    core.check_schedule("temperature", temperature, 1, low=1e-6, high=np.inf)
    method = _mutual(global_model, divergence, merge)
  in_turn = _in_turn if sequential and global_model is not None else None
  one_round = round_step(
    roster, method, hyper, optimizer, engine or Inline(), in_turn=in_turn
  )

  def init(key, server=None, *, rows=None):  # Line 2; of ClientUpdate, too.
    init_key, run_key = jax.random.split(key)
    if global_model is not None:
      # The key that FedAvg gives its only pool.
      server_key = jax.random.fold_in(init_key, 0)
      server = global_model.start(server_key, "server", server)
    elif server is not None:
      raise ValueError("server: there is no global_model for its variables")

    def start(client, group):
      def one(k):
        def new(model, i=0):
          number = 1 + i * len(clients) + k
          return model.start(jax.random.fold_in(init_key, number))

        from_server = from_global and client.model == global_model
        variables = server if from_server else new(client.model)
        own = local.Learner.start(variables, client.optimizer or optimizer)
        parts = client.parts.items()
        return own, {
          name: new(part, i) for i, (name, part) in enumerate(parts, 1)
        }

      return jax.vmap(one)(group)

    values = {name: x for name, (x, _) in hyper.items() if not callable(x)}
    kept = roster.start(start, rows)
    return core.State(run_key, core.hyper(**values), server, kept)

  def step(state, plan, data):
    # The key of FedAvg's only pool.
    key = jax.random.fold_in(jax.random.fold_in(state.key, plan.round), 0)
    return one_round(state, plan, data, key)

  return core.Algorithm(init, step)
