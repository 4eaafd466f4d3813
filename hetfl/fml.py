"""Federated Mutual Learning, and clients that learn alone.

Each client has a model of its own that never leaves it, and a *meme* model: a
copy of the global model that it trains beside its own on the same batches,
each learning from the labels and from what the other says. Only memes are
sent and merged, so that the clients' models may be unlike.

Reference: Shen et al. 2020, "Federated Mutual Learning", algorithm 1 and
equation 5.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from absl import logging
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import client as client_lib
from hetfl import core, population
from hetfl import distill as distill_lib
from hetfl import engine as engine_lib
from hetfl.fedavg import round_keys

PyTree = Any
Schedule = Callable[[jax.Array], jax.Array]


class MutualClient(NamedTuple):
  """A client of Federated Mutual Learning; its configuration.

  Clients whose fields are the same objects form a group, whose states are
  stacked and whose work is one program.

  Attributes:
    model: the client's own model, the paper's local or personalized one.
    transform: what is done to a training batch as it lies in the bank.
    bank: the name of the bank that its examples lie in.
    adaptor: where the global model is not a whole one: a model from the
      global model's outputs to logits, which stays with the client.
    loss: the loss of each example.
  """

  model: core.Model
  transform: core.Transform | None = None
  bank: str = "train"
  adaptor: core.Model | None = None
  loss: core.Loss = core.cross_entropy


class ClientRounds(NamedTuple):
  """The work of a group's clients in one round.

  Attributes:
    client: `int32[K]`, the clients' numbers.
    index: `int32[K, S, B]`, positions in the bank; -1 marks an empty place.
    steps: `int32[K]`, how many of the steps are work.
    weight: `float32[K]`, what each client's meme counts in the merge.
  """

  client: np.ndarray
  index: np.ndarray
  steps: np.ndarray
  weight: np.ndarray


class MutualPlan(NamedTuple):
  """What one round of Federated Mutual Learning does.

  Attributes:
    round: `int32[]`, the number of the round, from 1.
    groups: a `ClientRounds` for each group of clients.
  """

  round: np.ndarray
  groups: tuple[ClientRounds, ...]


@flax.struct.dataclass
class GroupState:
  """What the clients of a group keep from round to round.

  Attributes:
    local: their own models' variables, each array with an axis K in front.
    opt_state: their own models' optimizers, in the same way.
    adaptor: their adaptors' variables, in the same way; `None` without.
    clients: K client numbers.
  """

  local: core.Variables
  opt_state: PyTree
  adaptor: core.Variables | None
  clients: tuple[int, ...] = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class MutualState:
  """The state of Federated Mutual Learning.

  Attributes:
    key: the run's key; never changes, every draw folds the round into it.
    server: the global model's variables; `None` if there is none.
    groups: a `GroupState` for each group.
    hyper: `learning_rate` and, unless they are schedules, `alpha` and `beta`:
      `float32[]` each, so that trials with unlike values are a batch axis.
  """

  key: jax.Array
  server: core.Variables | None
  groups: tuple[GroupState, ...]
  hyper: dict[str, jax.Array]

  def local(self, client: int) -> core.Variables:
    """The variables of a client's own model.

    Args:
      client: the client's number.

    Returns:
      The variables, without the group's axis.
    """
    group, row = self._find(client)
    return jax.tree.map(lambda a: a[row], group.local)

  def meme(self, client: int) -> core.Variables:
    """The variables of a client's meme model as it would be forked now.

    Args:
      client: the client's number.

    Returns:
      The global model's variables, spliced with the client's adaptor if it
      has one.
    """
    group, row = self._find(client)
    return fork(self.server, jax.tree.map(lambda a: a[row], group.adaptor))

  def _find(self, client: int) -> tuple[GroupState, int]:
    for group in self.groups:
      if client in group.clients:
        return group, group.clients.index(client)
    raise ValueError(f"client {client}: there is none of that number")


def momentum_sgd(
  learning_rate: jax.Array,
  *,
  momentum: float = 0.9,
  weight_decay: float = 5e-4,
  clip_norm: float | None = None,
) -> optax.GradientTransformation:
  """SGD as PyTorch has it: `v <- m v + (g + d w); w <- w - lr v`.

  The weight decay is part of the gradient, and the learning rate is outside
  of the momentum.

  Args:
    learning_rate: lr.
    momentum: m.
    weight_decay: d.
    clip_norm: gradients of a larger norm are scaled down to it first; `None`
      for none, as in the paper.

  Returns:
    The optimizer.

  Reference: Shen et al. 2020, section 5.1; `torch.optim.SGD`.

  >>> sgd = momentum_sgd(0.5, momentum=0.5, weight_decay=0.25)
  >>> w, g = jnp.array(4.0), jnp.array(1.0)
  >>> updates, state = sgd.update(g, sgd.init(w), w)
  >>> float(updates)  # -0.5 (1 + 0.25 * 4)
  -1.0
  >>> float(sgd.update(g, state, w + updates)[0])  # -0.5 (0.5 * 2 + 1.75)
  -1.375
  """
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
  weight: jax.Array,
  temperature: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
  """`w CE + (1 - w) KL(p_partner || p)`, one of equation 5's two losses.

  Args:
    logits: `float[B, C]`, of the model that learns.
    partner: `float[B, C]`, the partner's, through which nothing is learnt.
    labels_loss: `float[B]`, the model's loss on the labels, CE.
    weight: alpha for the local model, beta for the meme.
    temperature: T, of both softmaxes; the divergence is then multiplied by
      T^2 as in Hinton et al. 2015. The paper has none.

  Returns:
    `float[B]` twice: the loss, and the divergence in it, summed over classes.

  Reference: Shen et al. 2020, equation 5.

  >>> logits, partner = jnp.log(jnp.array([[[.75, .25]], [[.5, .5]]]))
  >>> loss, kl = mutual_loss(logits, partner, jnp.array([2.]), 0.5)
  >>> [round(float(x[0]), 4) for x in (kl, loss)]  # log(4 / 3) / 2, + 2 / 2
  [0.1438, 1.0719]
  """
  target = distill_lib.tempered_softmax(
    jax.lax.stop_gradient(partner), temperature
  )
  kl = temperature**2 * distill_lib.kl_divergence(target, logits / temperature)
  return weight * labels_loss + (1 - weight) * kl, kl


def splice(trunk: core.Model, adaptor: core.Model | None) -> core.Model:
  """Puts an adaptor on a partial model.

  Args:
    trunk: a model whose outputs are features.
    adaptor: a model from these to logits; `None` leaves the trunk as it is.

  Returns:
    The model; `fork` makes its variables.

  Reference: Shen et al. 2020, section 4.2 ("splicing the forked global model
  with an adaptor layer").
  """
  if adaptor is None:
    return trunk

  def init(key):
    return fork(*(m.init(k) for m, k in zip(parts, jax.random.split(key))))

  def apply(variables, x, key, train):
    stats = {}
    for i, (name, part) in enumerate(zip(("trunk", "adaptor"), parts)):
      own = core.Variables(variables.params[name], variables.stats[name])
      part_key = None if key is None else jax.random.fold_in(key, i)
      x, stats[name] = part.apply(own, x, part_key, train)
    return x, stats

  parts = (trunk, adaptor)
  return core.Model(init, apply)


def fork(
  server: core.Variables, adaptor: core.Variables | None
) -> core.Variables:
  """`meme <- global`, with a client's adaptor if it has one.

  Args:
    server: the global model's variables.
    adaptor: the adaptor's variables or `None`.

  Returns:
    The meme's variables.
  """
  if adaptor is None:
    return server
  pair = {"trunk": server, "adaptor": adaptor}
  return core.Variables(
    {name: part.params for name, part in pair.items()},
    {name: part.stats for name, part in pair.items()},
  )


def _unsplice(meme, adaptor):
  """What of a meme is sent, and what stays."""
  if adaptor is None:
    return meme, None
  return tuple(
    core.Variables(meme.params[name], meme.stats[name])
    for name in ("trunk", "adaptor")
  )


def group_clients(
  clients: Sequence[MutualClient],
) -> tuple[tuple[int, ...], ...]:
  """The groups of clients that are alike, as clients' numbers.

  Args:
    clients: K clients.

  Returns:
    The groups, each in the order of its first client.

  >>> a, b = (MutualClient(core.Model(None, f)) for f in (max, min))
  >>> group_clients([a, b, a])
  ((0, 2), (1,))
  """
  groups = {}
  for k, client in enumerate(clients):
    groups.setdefault(client, []).append(k)
  return tuple(map(tuple, groups.values()))


def plan_mutual(
  held: Sequence[np.ndarray],
  groups: Sequence[Sequence[int]],
  *,
  seed: int,
  round: int,
  batch_size: int,
  epochs: int,
  weighted: bool = False,
) -> MutualPlan:
  """Orders the examples of all clients for a round.

  Each client passes over its examples `epochs` times, reshuffled each time
  and cut into batches; the last batch of a pass holds what is left.

  Args:
    held: K integer arrays, each client's positions in its bank.
    groups: the clients' groups, see `group_clients`.
    seed: the run's seed.
    round: the number of the round.
    batch_size: B.
    epochs: E, passes of a client over its examples.
    weighted: weight memes by their client's number of examples in the merge,
      as FedAvg does, and not alike, as the paper does.

  Returns:
    The plan, a pure function of its arguments; clients do not depend on each
    other.

  Reference: Shen et al. 2020, algorithm 1, line 4 of ClientUpdate.

  >>> plan = plan_mutual([np.arange(3), np.arange(5)], [(0, 1)],
  ...                    seed=0, round=1, batch_size=2, epochs=1)
  >>> plan.groups[0].steps, plan.groups[0].index.shape
  (array([2, 3], dtype=int32), (2, 3, 2))
  >>> plan.groups[0].index[0, 1, 1], plan.groups[0].weight
  (np.int32(-1), array([1., 1.], dtype=float32))
  """
  rounds = []
  for group in groups:
    batches = [-(-len(held[k]) // batch_size) for k in group]
    steps = epochs * max(batches)
    index = np.full((len(group), steps, batch_size), -1, np.int32)
    for row, (k, n) in enumerate(zip(group, batches)):
      rng = np.random.default_rng([seed, round, k])
      for epoch in range(epochs):
        order = np.full(n * batch_size, -1, np.int32)
        order[: len(held[k])] = rng.permutation(held[k])
        index[row, epoch * n : (epoch + 1) * n] = order.reshape(n, batch_size)
    rounds.append(
      ClientRounds(
        client=np.array(group, np.int32),
        index=index,
        steps=epochs * np.array(batches, np.int32),
        weight=np.array(
          [len(held[k]) if weighted else 1 for k in group], np.float32
        ),
      )
    )
  return MutualPlan(np.int32(round), tuple(rounds))


def as_lanes(plan: MutualPlan, *, num_lanes: int) -> population.LanePlan:
  """The same clients and batches as a plan for FedAvg over one pool.

  With it `hetfl.fedavg`, its server's rate 1 and its clients' optimizer
  `momentum_sgd`, is the FedAvg that the paper compares with, batch by batch
  and draw by draw.

  Args:
    plan: the plan.
    num_lanes: L.

  Returns:
    The lanes.

  >>> plan = plan_mutual([np.arange(3), np.arange(5)], [(0, 1)],
  ...                    seed=0, round=1, batch_size=2, epochs=1)
  >>> as_lanes(plan, num_lanes=1).weight[0, :5]
  array([0., 0., 1., 0., 1.], dtype=float32)
  """
  rows = sorted(
    (client, index[:steps], weight)
    for group in plan.groups
    for client, index, steps, weight in zip(*group)
  )
  clients, batches, weights = zip(*rows)
  return population.pack_lanes(batches, clients, weights, num_lanes=num_lanes)


def client_program(
  client: MutualClient,
  global_model: core.Model | None,
  *,
  optimizer: client_lib.Optimizer = momentum_sgd,
  temperature: float = 1.0,
  sequential: bool = False,
  microbatch: int | None = None,
) -> Callable[..., tuple[GroupState, core.Variables | None, core.Metrics]]:
  """A client's round: ClientUpdate of algorithm 1.

  Args:
    client: the client.
    global_model: the global model; `None` leaves the meme out, and the client
      learns alone.
    optimizer: see `fml`.
    temperature: see `fml`.
    sequential: see `fml`.
    microbatch: see `fml`.

  Returns:
    `(server, hyper, key, bank, (kept, work)) -> (kept, meme, metrics)`:
    `server` is the global model's `Variables`, `hyper` the round's
    `learning_rate`, `alpha` and `beta`, `key` the round's key, `bank` the
    examples on the device, `kept` a row of a `GroupState` and `work` a row of
    `ClientRounds`. Step `s` of client `k` draws from
    `fold_in(fold_in(key, k), s)`, as in `hetfl.client.lane_program`.
  """
  models = {"local": client.model}
  weights = {"local": "alpha", "meme": "beta"}
  if global_model is not None:
    models["meme"] = splice(global_model, client.adaptor)
  alike = models.get("meme") == client.model
  # Which models step together, on the same logits.
  turns = [(name,) for name in models] if sequential else [tuple(models)]

  def part_loss(params, variables, hyper, batch, key):
    """The sum of the losses of the models in `params`, over a part."""
    own = {
      name: variables[name]._replace(params=params.get(name, held.params))
      for name, held in variables.items()
    }
    # The meme draws what the model of a FedAvg client would.
    keys = {"local": jax.random.fold_in(key, 0), "meme": key}
    if alike:
      # Side by side the first layers of both are one matrix product.
      out = jax.vmap(client.model.apply, (0, None, 0, None))(
        jax.tree.map(lambda *a: jnp.stack(a), *(own[n] for n in models)),
        batch["x"],
        jnp.stack([keys[n] for n in models]),
        True,
      )
      out = {
        name: jax.tree.map(lambda a, i=i: a[i], out)
        for i, name in enumerate(models)
      }
    else:
      out = {
        name: model.apply(own[name], batch["x"], keys[name], True)
        for name, model in models.items()
      }
    logits = {name: out[name][0] for name in models}
    stats = {name: out[name][1] for name in models}
    total, sums = jnp.zeros(()), {}
    for name in params:
      losses = client.loss(logits[name], batch)
      kl = jnp.zeros_like(losses)
      for other in logits.keys() - {name}:
        losses, kl = mutual_loss(
          logits[name], logits[other], losses, hyper[weights[name]], temperature
        )
      total += jnp.sum(losses * batch["mask"])
      sums |= {
        f"{name}_loss": jnp.sum(losses * batch["mask"]),
        f"{name}_kl": jnp.sum(kl * batch["mask"]),
      }
    return total, (sums, {name: stats[name] for name in params})

  def gradients(names, variables, hyper, batch, key):
    """Mean gradients, statistics and summed losses of some models."""
    params = {name: variables[name].params for name in names}
    grad = jax.grad(part_loss, has_aux=True)
    count = jnp.sum(batch["mask"])
    scale = lambda grads: optax.tree.scale(1 / jnp.maximum(count, 1), grads)
    parts = num_parts(len(batch["mask"]), microbatch)
    if parts == 1:
      grads, (sums, stats) = grad(params, variables, hyper, batch, key)
      return scale(grads), stats, sums, count

    def add(carry, part):
      grads, sums, variables = carry
      g, (s, stats) = grad(params, variables, hyper, *part)
      variables = variables | {
        name: variables[name]._replace(stats=stats[name]) for name in names
      }
      return (
        optax.tree.add(grads, g),
        optax.tree.add(sums, s),
        variables,
      ), None

    zeros = {f"{n}_{x}": jnp.zeros(()) for n in names for x in ("loss", "kl")}
    split = {
      name: a.reshape(parts, -1, *a.shape[1:]) for name, a in batch.items()
    }
    (grads, sums, after), _ = jax.lax.scan(
      add,
      (optax.tree.zeros_like(params), zeros, variables),
      (split, jax.random.split(key, parts)),
    )
    return scale(grads), {n: after[n].stats for n in names}, sums, count

  def program(server, hyper, key, bank, row):
    kept, work = jax.tree.map(jnp.asarray, row)  # NumPy's, if not under jit.
    variables = {"local": kept.local}
    opt_states = {"local": kept.opt_state}
    sgd = optimizer(hyper["learning_rate"])
    if global_model is not None:
      variables["meme"] = fork(server, kept.adaptor)  # Line 3.
      opt_states["meme"] = sgd.init(variables["meme"].params)

    def step(s, carry):  # Lines 4 and 5.
      variables, opt_states, means = carry
      step_key = jax.random.fold_in(jax.random.fold_in(key, work.client), s)
      transform_key, model_key = jax.random.split(step_key)
      batch = core.gather(bank, work.index[s])
      if client.transform is not None:
        batch = client.transform(transform_key, batch)
      for names in turns:
        grads, stats, sums, count = gradients(
          names, variables, hyper, batch, model_key
        )
        for name in names:
          params = variables[name].params
          updates, new = sgd.update(grads[name], opt_states[name], params)
          params = optax.apply_updates(params, updates)
          variables = variables | {name: core.Variables(params, stats[name])}
          opt_states = opt_states | {name: new}
        means = means | {
          name: core.Mean(means[name].total + total, means[name].count + count)
          for name, total in sums.items()
        }
      return variables, opt_states, means

    zero = core.Mean(jnp.zeros(()), jnp.zeros(()))
    means = {f"{n}_{x}": zero for n in models for x in ("loss", "kl")}
    variables, opt_states, means = jax.lax.fori_loop(
      0, work.steps, step, (variables, opt_states, means)
    )
    meme, adaptor = None, kept.adaptor
    if global_model is not None:
      meme, adaptor = _unsplice(variables["meme"], kept.adaptor)
    kept = kept.replace(
      local=variables["local"], opt_state=opt_states["local"], adaptor=adaptor
    )
    return kept, meme, means

  return program


def num_parts(batch_size: int, at_most: int | None) -> int:
  """The least number of equal parts of a batch that are small enough.

  Args:
    batch_size: B.
    at_most: examples in a part, at most; `None` for all.

  Returns:
    A divisor of B.

  >>> num_parts(128, 32), num_parts(128, 60), num_parts(7, None)
  (4, 4, 1)
  """
  return next(
    n
    for n in range(1, batch_size + 1)
    if batch_size % n == 0 and batch_size // n <= (at_most or batch_size)
  )


def _merge(memes, weights):
  """`global <- sum_k w_k meme_k / sum_k w_k` over the groups' clients."""
  total = sum(jnp.sum(w) for w in weights)

  def mean(*leaves):
    return (
      sum(jnp.tensordot(w, leaf, 1) for w, leaf in zip(weights, leaves)) / total
    )

  return jax.tree.map(mean, *memes)


def _build(clients, global_model, hyper, engine, **options) -> core.Algorithm:
  """Algorithm 1, or its clients without a server."""
  clients = tuple(clients)
  if not clients:
    raise ValueError("clients: there are none")
  engine = engine or engine_lib.Inline()
  client_lib.check_hyper(
    hyper | options,
    learning_rate=(1e-12, float("inf")),
    alpha=(0, 1),
    beta=(0, 1),
    temperature=(1e-6, float("inf")),
    microbatch=(1, float("inf")),
  )
  groups = group_clients(clients)
  programs = [
    client_program(clients[group[0]], global_model, **options)
    for group in groups
  ]
  as_array = lambda x: jnp.asarray(x, jnp.float32)
  optimizer = options["optimizer"]

  def init(key):
    init_key, run_key = jax.random.split(key)
    keys = lambda first, group: jnp.stack(
      [jax.random.fold_in(init_key, first + k) for k in group]
    )
    values = {n: as_array(x) for n, x in hyper.items() if not callable(x)}

    def group_state(group):
      client = clients[group[0]]
      local = jax.vmap(client.model.init)(keys(1, group))
      # The optimizer's state does not depend on its learning rate.
      opt_state = jax.vmap(optimizer(0.0).init)(local.params)
      adaptor = None
      if client.adaptor is not None and global_model is not None:
        adaptor = jax.vmap(client.adaptor.init)(keys(1 + len(clients), group))
      return GroupState(local, opt_state, adaptor, group)

    server = None
    if global_model is not None:
      # The key that FedAvg's only pool would have.
      server = global_model.init(jax.random.fold_in(init_key, 0))
    return MutualState(run_key, server, tuple(map(group_state, groups)), values)

  def step(state, plan, data):
    if len(plan.groups) != len(groups):
      raise ValueError(
        f"{len(groups)} groups of clients, but a plan for {len(plan.groups)}"
      )
    key, *_ = round_keys(state.key, plan.round, 1)
    now = {
      name: as_array(x(plan.round)) if callable(x) else state.hyper[name]
      for name, x in hyper.items()
    }
    results = engine.run(
      *(
        engine_lib.Each(
          program,
          (state.server, now, key, data[clients[group[0]].bank]),
          (kept, work),
        )
        for program, group, kept, work in zip(
          programs, groups, state.groups, plan.groups
        )
      )
    )
    kept, memes, means = zip(*results)
    server = state.server
    if global_model is not None:  # Merge.
      weights = tuple(work.weight for work in plan.groups)
      (server,) = engine.run(engine_lib.Call(_merge, (memes, weights)))
    metrics = {
      name: core.Mean(
        *(sum(jnp.sum(m[name][i]) for m in means) for i in range(2))
      )
      for name in means[0]
    }
    return state.replace(server=server, groups=kept), metrics

  return core.Algorithm(init, step)


def fml(
  clients: Sequence[MutualClient],
  *,
  global_model: core.Model,
  alpha: float | jax.Array | Schedule = 0.5,
  beta: float | jax.Array | Schedule = 0.5,
  learning_rate: float | jax.Array | Schedule = 0.01,
  optimizer: client_lib.Optimizer = momentum_sgd,
  temperature: float = 1.0,
  sequential: bool = False,
  microbatch: int | None = None,
  engine: engine_lib.Engine | None = None,
) -> core.Algorithm:
  """Federated Mutual Learning.

  In each round each client forks `meme <- global` and, for each of its
  batches, takes a step with both of its models at once on

  `L_local = alpha CE + (1 - alpha) KL(p_meme || p_local)`
  `L_meme = beta CE + (1 - beta) KL(p_local || p_meme)`

  the partner's distribution held fixed. Then `global <- 1/K sum_k meme_k`.
  The meme's optimizer is new in each round; the local model and its optimizer
  persist, and so does an adaptor. With beta = 1 the global model is FedAvg's.

  Args:
    clients: K clients; all take part in every round.
    global_model: the global model. If its outputs are features and not
      logits, every client needs an adaptor.
    alpha: weight of the labels for the local models, in [0, 1]: a value,
      which trials may vary, or a schedule `round -> alpha`.
    beta: the same for the memes. The paper finds a falling alpha and a rising
      beta best (section 6).
    learning_rate: of both optimizers; a value or a schedule.
    optimizer: a learning rate to an optax optimizer.
    temperature: T of the divergences; the paper has none.
    sequential: as in deep mutual learning (Zhang et al. 2018), the local
      model steps first and the meme learns from it as it is then. The paper
      and its code step with both at once.
    microbatch: how many examples pass through the models at once, at most;
      the batch is cut into equal parts. `None` for all. Changes speed and
      memory only, but for dropout and batch normalisation.
    engine: where the work runs; `Inline()` by default. With `Threads()` the
      step dispatches programs itself and must not be traced.

  Returns:
    The algorithm. Its `step` takes a `MutualPlan` and the banks by name, on
    the device.

  Raises:
    ValueError: if a value is out of its range.

  Reference: Shen et al. 2020, algorithm 1 and equation 5; the released code
    for what these leave open: simultaneous steps, a new meme optimizer in
    each round, a mean that counts clients alike.
  """
  for name, value, loser in (
    ("alpha", alpha, "the clients' models learn nothing from the memes"),
    ("beta", beta, "the global model is FedAvg's"),
  ):
    if isinstance(value, float | int) and value == 1:
      logging.warning("%s=1 switches mutual learning off: %s.", name, loser)
  return _build(
    clients,
    global_model,
    {"alpha": alpha, "beta": beta, "learning_rate": learning_rate},
    engine,
    optimizer=optimizer,
    temperature=temperature,
    sequential=sequential,
    microbatch=microbatch,
  )


def independent(
  clients: Sequence[MutualClient],
  *,
  learning_rate: float | jax.Array | Schedule = 0.01,
  optimizer: client_lib.Optimizer = momentum_sgd,
  microbatch: int | None = None,
  engine: engine_lib.Engine | None = None,
) -> core.Algorithm:
  """Clients that learn alone, each on its own examples: no server.

  The clients' models are those of `fml` with alpha = 1: the same batches, the
  same draws, optimizers that persist.

  Args:
    clients: see `fml`; adaptors are not used.
    learning_rate: see `fml`.
    optimizer: see `fml`.
    microbatch: see `fml`.
    engine: see `fml`.

  Returns:
    The algorithm; its state has no `server`.

  Raises:
    ValueError: if a value is out of its range.

  Reference: Shen et al. 2020, figures 5 and 6 ("independently training").
  """
  return _build(
    clients,
    None,
    {"learning_rate": learning_rate},
    engine,
    optimizer=optimizer,
    microbatch=microbatch,
  )
