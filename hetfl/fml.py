"""Federated Mutual Learning, and clients that learn alone.

Each client has a local model that never leaves it, and a *meme* model: a copy
of the global model. It trains both on the same batches, and each learns from
the labels and from the other's predictions. Only memes are sent and merged, so
the clients' local models may differ.

Reference: Shen et al. 2020, "Federated Mutual Learning", algorithm 1 and
equation 5.
"""

from collections.abc import Sequence
import functools
from typing import Any

from absl import logging
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from hetfl import checks, core, planning, population
from hetfl import engine as engine_lib
from hetfl.fedavg import round_keys
from hetfl.mutual import (
  client_program,
  ClientRounds,
  fork,
  GroupState,
  momentum_sgd,
  MutualClient,
)


@flax.struct.dataclass
class MutualPlan:
  """What one round of Federated Mutual Learning does.

  Attributes:
    round: `int32[]`, the number of the round, from 1.
    groups: a `ClientRounds` for each group of clients.
    clients: each group's client numbers. Like `full_batches` they are static,
      so that a wrong plan raises under `jax.jit` too.
    full_batches: for each group, whether all of its batches are full.
  """

  round: np.integer
  groups: tuple[ClientRounds, ...]
  clients: tuple[tuple[int, ...], ...] = flax.struct.field(pytree_node=False)
  full_batches: tuple[bool, ...] = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class MutualState:
  """The state of Federated Mutual Learning.

  Attributes:
    key: the run's key; it never changes, and every draw folds the round into
      it.
    server: the global model's variables; `None` without a global model.
    groups: a `GroupState` for each group.
    hyper: those of `learning_rate`, `alpha`, `beta` and `temperature` that are
      not schedules; `float32[]` each, so that `jax.vmap` can batch trials with
      different values.
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

    Raises:
      ValueError: there is no such client, or the state holds several trials.
    """
    group, row = self._find(client)
    return jax.tree.map(lambda a: a[row], group.local)

  def meme(self, client: int) -> core.Variables:
    """The variables of the meme model that a client would fork now.

    Args:
      client: the client's number.

    Returns:
      The global model's variables, with the client's adaptor and encoder if it
      has them: variables of the model
      `hetfl.splice(global_model, adaptor, encoder=encoder)`.

    Raises:
      ValueError: there is no such client, there is no global model, or the
        state holds several trials.
    """
    if self.server is None:
      raise ValueError(
        "this state has no global model, so there are no memes; use"
        " state.local(client)"
      )
    group, row = self._find(client)
    own = jax.tree.map(lambda a: a[row], (group.adaptor, group.encoder))
    return fork(self.server, *own)

  def _find(self, client: int) -> tuple[GroupState, int]:
    if core.of_trials(self):
      raise ValueError(
        "the state holds several trials: use"
        " jax.vmap(lambda state: state.local(client))(states)"
      )
    for group in self.groups:
      if client in group.clients:
        return group, group.clients.index(client)
    raise ValueError(f"client={client}: there is no such client")


def group_clients(
  clients: Sequence[MutualClient],
) -> tuple[tuple[int, ...], ...]:
  """The groups of clients with equal fields, as client numbers.

  Args:
    clients: K clients.

  Returns:
    The groups, in the order of their first clients.

  >>> a, b = (MutualClient(core.Model(None, f)) for f in (max, min))
  >>> group_clients([a, b, a])
  ((0, 2), (1,))
  """
  checks.sequence("clients", clients, MutualClient)
  groups: dict[tuple[Any, ...], list[int]] = {}
  for k, client in enumerate(clients):
    groups.setdefault(tuple(map(core.identity, client)), []).append(k)
  return tuple(map(tuple, groups.values()))


def plan_mutual(
  held: (
    population.ClientPopulation
    | Sequence[population.Subset | population.Positions]
  ),
  groups: Sequence[Sequence[int]] | Sequence[MutualClient],
  *,
  seed: int,
  round: int,
  batch_size: int,
  epochs: int,
  uniform_weights: bool = True,
  full_batches: bool = False,
  clients_per_round: int | None = None,
) -> MutualPlan:
  """Orders the examples of all clients for a round.

  Each client passes over its examples `epochs` times. Each pass reshuffles
  them and cuts them into batches; its last batch holds the remainder.

  Args:
    held: the clients' examples as a population, or each client's subset or
      positions in its bank; bare positions are not checked against the bank.
    groups: the groups, as `group_clients` returns them; or the clients.
    seed: the run's seed.
    round: the number of the round, from 1.
    batch_size: B.
    epochs: E, passes of a client over its examples.
    uniform_weights: weight all memes equally in the merge, as the paper does,
      and not by the clients' numbers of examples, as FedAvg does.
    full_batches: fill up the last batch of a pass with the pass's first
      examples. Models with batch statistics need this, since the statistics
      would count empty places.
    clients_per_round: how many clients take part, drawn uniformly without
      replacement; the others keep their models and optimizer states. A group
      gets this many rows, or one for each of its clients if they are fewer.
      `None` for all clients, as in the paper.

  Returns:
    The plan, a pure function of the arguments; a client's batches do not
    depend on the other clients.

  Raises:
    ValueError: if a client holds no examples, a number is not at least 1, the
      groups do not hold each client once, `clients_per_round` exceeds the
      number of clients, or clients of one population have different banks.

  Reference: Shen et al. 2020, algorithm 1, line 4 of ClientUpdate.

  >>> plan = plan_mutual([np.arange(3), np.arange(5)], [(0, 1)],
  ...                    seed=0, round=1, batch_size=2, epochs=1)
  >>> plan.groups[0].steps, plan.groups[0].index.shape
  (array([2, 3], dtype=int32), (2, 3, 2))
  >>> plan.groups[0].index[0, 1, 1], plan.groups[0].weight
  (np.int32(-1), array([1., 1.], dtype=float32))
  """
  checks.counts(
    round=round,
    batch_size=batch_size,
    epochs=epochs,
    clients_per_round=clients_per_round,
  )
  given, held = held, population.holdings(held)
  active = np.ones(len(held), bool)
  if clients_per_round is not None:
    if clients_per_round > len(held):
      raise ValueError(
        f"clients_per_round={clients_per_round}: there are {len(held)} clients"
      )
    # 2**32 - 1 keeps this draw apart from those of any client.
    rng = np.random.default_rng([seed, round, 2**32 - 1])
    active[:] = False
    active[rng.choice(len(held), clients_per_round, replace=False)] = True
  checks.sequence("groups", groups, MutualClient)
  alike: tuple[Any, ...] = tuple(groups)
  if alike and isinstance(alike[0], MutualClient):
    checks.each("groups", alike, MutualClient, len(alike), "or give all groups")
    banks = sorted({client.bank for client in alike})
    if len(banks) > 1 and isinstance(given, population.ClientPopulation):
      raise ValueError(
        f"held: a population has one bank, but the clients' are {banks}; give"
        " each client's Subset"
      )
    alike = group_clients(alike)
  members = tuple(tuple(map(int, group)) for group in alike)
  if sorted(k for group in members for k in group) != list(range(len(held))):
    raise ValueError(
      f"groups={members}: must contain each of the {len(held)} clients in held"
      " exactly once; pass group_clients(clients)"
    )
  rounds = []
  for group in members:
    # Participants first, then other clients to fill up the rows.
    rows = sorted(range(len(group)), key=lambda row: not active[group[row]])
    rows = sorted(rows[:clients_per_round])
    chosen = [group[row] for row in rows]
    batches = [-(-len(held[k]) // batch_size) for k in group]
    index = np.full(
      (len(rows), epochs * max(batches), batch_size), -1, np.int32
    )
    steps, weight = np.zeros(len(rows), np.int32), np.zeros(len(rows))
    for i, (row, k) in enumerate(zip(rows, chosen)):
      if not active[k]:
        continue
      n = batches[row]
      steps[i], weight[i] = epochs * n, 1 if uniform_weights else len(held[k])
      rng = np.random.default_rng([seed, round, k])
      for epoch in range(epochs):
        order = np.resize(rng.permutation(held[k]), n * batch_size)
        if not full_batches:
          order[len(held[k]) :] = -1
        index[i, epoch * n : (epoch + 1) * n] = order.reshape(n, batch_size)
    rounds.append(
      ClientRounds(
        row=np.array(rows, np.int32),
        client=np.array(chosen, np.int32),
        index=index,
        steps=steps,
        weight=weight.astype(np.float32),
      )
    )
  whole = tuple(
    full_batches or all(len(held[k]) % batch_size == 0 for k in group)
    for group in members
  )
  return MutualPlan(np.int32(round), tuple(rounds), members, whole)


def as_lanes(plan: MutualPlan, *, num_lanes: int) -> planning.LanePlan:
  """A plan for FedAvg over one pool, with the same clients and batches.

  With this plan, `hetfl.fedavg` with `rounds=None` is FML's baseline, with the
  same batches and random draws, if its pool has `server_lr=1`,
  `server_optimizer=fedavg_server` and `client_optimizer=momentum_sgd`. Clients
  have equal weights, as in FML's merge and the released code's baseline. With
  `plan_mutual(uniform_weights=False)` they are weighted by their numbers of
  examples, as in FedAvg and the paper's equation 2.

  Args:
    plan: the plan; all clients' examples lie in one bank.
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
    for _, client, index, steps, weight in zip(*group)
    if steps
  )
  clients, batches, weights = zip(*rows)
  return planning.pack_lanes(batches, clients, weights, num_lanes=num_lanes)


def _merge(memes, weights):
  """`global <- sum_k w_k meme_k / sum_k w_k` over the groups' clients."""
  total = sum(jnp.sum(w) for w in weights)

  def mean(*leaves):
    parts = [
      jnp.tensordot(w, leaf, 1, precision=jax.lax.Precision.HIGHEST)
      for w, leaf in zip(weights, leaves)
    ]
    return core.as_type(sum(parts) / total, leaves[0].dtype)

  return jax.tree.map(mean, *memes)


def _check_plan(plan, groups, state):
  """Raises if a plan is not for these clients and models."""
  checks.kind("plan", plan, MutualPlan, "as plan_mutual makes it")
  if plan.clients != groups:
    raise ValueError(
      f"the plan groups clients as {plan.clients}, but the algorithm as"
      f" {groups}: pass group_clients(clients) to plan_mutual"
    )
  for full, kept in zip(plan.full_batches, state.groups):
    models = kept.local, kept.adaptor, kept.encoder, state.server
    stats = [model.stats for model in models if model is not None]
    if not full and jax.tree.leaves(stats):
      raise ValueError(
        "the plan has batches that are not full, whose empty places would enter"
        " the batch statistics: call plan_mutual with full_batches=True"
      )


def _rows(group, work):
  """The rows of a group's state that a plan has work for."""
  return jax.tree.map(lambda a: a[work.row], group)


def _with_rows(group, work, kept):
  """The group's state with those rows replaced by `kept`."""
  return jax.tree.map(lambda a, new: a.at[work.row].set(new), group, kept)


def _whole(stages, *args):
  """All steps of a client's round."""
  _, work = args[-1]
  return stages.whole(*args, steps=work.steps)


def _check_clients(clients, global_model, from_global):
  """The clients as a tuple; raises unless they and their models are valid."""
  checks.sequence("clients", clients, MutualClient)
  clients = tuple(clients)
  if not clients:
    raise ValueError("clients: give at least one client")
  for k, client in enumerate(clients):
    if not isinstance(client, MutualClient):
      raise ValueError(
        f"client {k} is a {type(client).__name__}, not a MutualClient: use"
        " MutualClient(model)"
      )
    core.Model.check(f"client {k}", client.model)
    if client.optimizer is not None:
      checks.factories(**{f"client {k}: optimizer": client.optimizer})
    for part in ("adaptor", "encoder"):
      if (model := getattr(client, part)) is not None:
        core.Model.check(f"client {k}'s {part}", model)
  if from_global and all(c.model != global_model for c in clients):
    raise ValueError("from_global=True: no client's model equals global_model")
  return clients


def _build(
  clients,
  global_model,
  hyper,
  engine,
  *,
  optimizer,
  microbatch,
  sequential=False,
  from_global=False,
) -> core.Algorithm:
  """Algorithm 1; without a global model, clients that learn alone."""
  clients = _check_clients(clients, global_model, from_global)
  engine = engine or engine_lib.Inline()
  highest = {"alpha": 1, "beta": 1}
  for name, value in hyper.items():
    low = 1e-6 if name == "temperature" else 0  # T is a divisor.
    checks.schedule(name, value, 1, allowed=(low, highest.get(name, np.inf)))
  checks.counts(microbatch=microbatch)
  checks.factories(optimizer=optimizer)
  groups = group_clients(clients)
  stages = [
    client_program(
      clients[group[0]],
      global_model,
      optimizer=optimizer,
      sequential=sequential,
      microbatch=microbatch,
    )
    for group in groups
  ]
  programs = [functools.partial(_whole, one) for one in stages]
  as_array = lambda x: jnp.array(x, jnp.float32)

  def init(key, server=None):
    init_key, run_key = jax.random.split(key)
    keys = lambda first, group: jnp.stack(
      [jax.random.fold_in(init_key, first + k) for k in group]
    )
    values = {n: as_array(x) for n, x in hyper.items() if not callable(x)}

    if global_model is None and server is not None:
      raise ValueError(
        "server: independent() has no global model; omit this argument"
      )
    if global_model is not None:
      if server is None:
        # The key that FedAvg gives its only pool.
        server = global_model.start(jax.random.fold_in(init_key, 0))
      else:
        hint = "state.server of another run"
        checks.kind("server", server, core.Variables, hint)
        server = global_model.adopt("server", server)
      checks.statistics(server.stats)

    def group_state(group):
      client = clients[group[0]]
      local = jax.vmap(client.model.start)(keys(1, group))
      if from_global and client.model == global_model:
        local = jax.tree.map(lambda a: jnp.stack([a] * len(group)), server)
      # The state does not depend on the rate, as `checks.factories` checks.
      own = (client.optimizer or optimizer)(0.0)
      opt_state = jax.vmap(own.init)(local.params)
      own_parts = [
        jax.vmap(part.start)(keys(1 + i * len(clients), group))
        if part is not None and global_model is not None
        else None
        for i, part in enumerate((client.adaptor, client.encoder), 1)
      ]
      return GroupState(local, opt_state, *own_parts, group)

    return MutualState(run_key, server, tuple(map(group_state, groups)), values)

  def step(state, plan, data):
    _check_plan(plan, groups, state)
    banks = [checks.bank(data, clients[group[0]].bank) for group in groups]
    key, *_ = round_keys(state.key, plan.round, 1)
    now = {
      name: core.scheduled(x, plan.round, high=highest.get(name, np.inf))
      if callable(x)
      else state.hyper[name]
      for name, x in hyper.items()
    }
    works, kept = plan.groups, state.groups
    sampled = [len(work.row) for work in works] != [len(g) for g in groups]
    if sampled:
      kept = engine.run(
        *(engine_lib.Call(_rows, args) for args in zip(kept, works))
      )
    results = engine.run(
      *(
        engine_lib.Each(
          program,
          (state.server, now, key, bank),
          (of_group, work),
          (one, work.steps),
        )
        for program, one, bank, of_group, work in zip(
          programs, stages, banks, kept, works
        )
      )
    )
    kept, memes, means = zip(*results)
    if sampled:
      each = zip(state.groups, works, kept)
      kept = engine.run(*(engine_lib.Call(_with_rows, args) for args in each))
    server = state.server
    if global_model is not None:  # Merge.
      weights = tuple(work.weight for work in works)
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
  alpha: float | jax.Array | core.Schedule = 0.5,
  beta: float | jax.Array | core.Schedule = 0.5,
  learning_rate: float | jax.Array | core.Schedule = 0.01,
  optimizer: core.Optimizer = momentum_sgd,
  temperature: float | jax.Array | core.Schedule = 1.0,
  sequential: bool = False,
  from_global: bool = False,
  microbatch: int | None = None,
  engine: engine_lib.Engine | None = None,
) -> core.Algorithm:
  """Federated Mutual Learning.

  In each round each client forks `meme <- global` and, on each of its batches,
  updates both of its models at once by a step on

  `L_local = alpha CE + (1 - alpha) KL(p_meme || p_local)`
  `L_meme = beta CE + (1 - beta) KL(p_local || p_meme)`

  with the partner's distribution held fixed. Then
  `global <- 1/K sum_k meme_k`. The meme's optimizer is new in each round; the
  local model, its optimizer, and the client's adaptor and encoder, if any,
  persist. With beta = 1 the global model is FedAvg's.

  Args:
    clients: K clients; the plan says which of them take part in a round.
    global_model: the global model. If its outputs are features and not
      logits, every client needs an adaptor; if its inputs are features, every
      client needs an encoder.
    alpha: weight of the labels in the local models' loss, in [0, 1]: a value,
      which trials may vary, or a schedule `round -> alpha`.
    beta: the same for the memes. The paper finds a falling alpha and a rising
      beta best (section 6).
    learning_rate: of both optimizers; a value or a schedule.
    optimizer: `learning rate -> optax optimizer`; `MutualClient.optimizer`
      replaces it for a client's local model.
    temperature: T of the divergences, which are then multiplied by T^2; a
      value or a schedule. The paper has none.
    sequential: whether the local model is updated first and the meme learns
      from the updated one, as in deep mutual learning (Zhang et al. 2018). The
      paper does not say; its code updates both at once.
    from_global: whether clients whose local model is the global model start
      from its weights ("the same model provided by server", section 4.2),
      and not from an initialisation of their own.
    microbatch: the most examples that pass through the models at once; the
      batch is cut into equal parts. `None` for all. Changes only speed and
      memory, except for dropout and batch normalisation, which act on the
      parts.
    engine: where the work runs; `Inline()` by default. With `Threads()` the
      step dispatches programs itself and must not be traced.

  Returns:
    The algorithm. Its `init` takes a key and, to start from an existing global
    model, its `Variables`. Its `step` takes a `MutualPlan` and the banks by
    name, on the device. Its metrics are means over all clients' examples:
    `local_loss`, equation 5's loss of the local models; `local_kl`, the
    divergence in it; and `meme_loss` and `meme_kl`, the same for the memes.

  Raises:
    ValueError: if a value is out of its range. A schedule that leaves its
      range in a later round gives NaN in that round.

  Reference: Shen et al. 2020, algorithm 1 and equation 5; the released code
    for what these leave open: alpha and beta of 1/2, simultaneous steps, a new
    meme optimizer in each round.

  For its only image, of class 0, a client's local model predicts (1/2, 1/2)
  and the global model (3/4, 1/4). Label and meme both pull the local model's
  first logit up, by 1/2 and 1/4; for the meme, the label's pull of 1/4 is
  cancelled by the local model's.

  >>> linear = lambda *w: core.Model(
  ...     lambda key: core.Variables(jnp.array([w]), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> clients = [MutualClient(linear(0., 0.))]
  >>> plan = plan_mutual([[0]], [(0,)], seed=0, round=1, batch_size=1, epochs=1)
  >>> algorithm = fml(clients, global_model=linear(jnp.log(3.), 0.),
  ...                 learning_rate=1.)
  >>> state, metrics = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan, {'train': bank})
  >>> state.local(0).params.round(3).tolist()  # (1/2 + 1/4) / 2
  [[0.37..., -0.37...]]
  >>> round(float(state.server.params[0, 0]), 2)  # log 3
  1.1
  >>> float(metrics['local_kl'].value)  # 3/4 log 3/2 + 1/4 log 1/2
  0.130...
  """
  core.Model.check("global_model", global_model)
  for name, value, effect in (
    ("alpha", alpha, "the clients' models learn nothing from the memes"),
    ("beta", beta, "the global model is FedAvg's"),
  ):
    if isinstance(value, float | int) and value == 1:
      logging.warning("%s=1 switches mutual learning off: %s.", name, effect)
  return _build(
    clients,
    global_model,
    {
      "alpha": alpha,
      "beta": beta,
      "learning_rate": learning_rate,
      "temperature": temperature,
    },
    engine,
    optimizer=optimizer,
    sequential=sequential,
    from_global=from_global,
    microbatch=microbatch,
  )


def independent(
  clients: Sequence[MutualClient],
  *,
  learning_rate: float | jax.Array | core.Schedule = 0.01,
  optimizer: core.Optimizer = momentum_sgd,
  microbatch: int | None = None,
  engine: engine_lib.Engine | None = None,
) -> core.Algorithm:
  """Clients that learn alone, each on its own examples, without a server.

  The clients' models equal the local models of `fml` with alpha = 1: batches
  and random draws are the same, and optimizers persist.

  Args:
    clients: see `fml`; adaptors and encoders are not used.
    learning_rate: see `fml`.
    optimizer: see `fml`.
    microbatch: see `fml`.
    engine: see `fml`.

  Returns:
    The algorithm. Its state's `server` is `None`; its metrics are
    `local_loss`, the loss on the labels, and `local_kl`, which is 0.

  Raises:
    ValueError: if a value is out of its range. A schedule that leaves its
      range in a later round gives NaN in that round.

  Reference: Shen et al. 2020, figures 5 and 6 ("independently training").

  >>> linear = lambda *w: core.Model(
  ...     lambda key: core.Variables(jnp.array([w]), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> plan = plan_mutual([[0]], [(0,)], seed=0, round=1, batch_size=1, epochs=1)
  >>> algorithm = independent([MutualClient(linear(0., 0.))], learning_rate=1.)
  >>> state, _ = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan, {'train': bank})
  >>> state.local(0).params.round(3).tolist()
  [[0.5, -0.5]]
  """
  return _build(
    clients,
    None,
    {"learning_rate": learning_rate},
    engine,
    optimizer=optimizer,
    microbatch=microbatch,
  )
