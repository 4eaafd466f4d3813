"""Federated Mutual Learning, and clients that learn alone.

Each client has a local model that never leaves it, and a *meme* model: a copy
of the global model. It trains both on the same batches, and each learns from
the labels and from the other's predictions. Only memes are sent and merged, so
the clients' local models may differ.

Reference: Shen et al. 2020, "Federated Mutual Learning", algorithm 1 and
equation 5.
"""

from collections.abc import Callable, Sequence
import functools

from absl import logging
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from hetfl import checks, core, output_checks
from hetfl import engine as engine_lib
from hetfl.hyperparameters import of_trials, Schedule, scheduled
from hetfl.mutual import (
  client_program,
  fork,
  GroupState,
  momentum_sgd,
  MutualClient,
)
from hetfl.mutual_planning import group_clients, MutualPlan
from hetfl.pool import round_keys


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
    if of_trials(self):
      raise ValueError(
        "the state holds several trials: use"
        " jax.vmap(lambda state: state.local(client))(states)"
      )
    for group in self.groups:
      if client in group.clients:
        return group, group.clients.index(client)
    raise ValueError(f"client={client}: there is no such client")


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


def _merge_by(merge):
  """The program of a merge of the user's; see `fml`."""

  def merged(memes, weights):
    join = lambda *leaves: jnp.concatenate(leaves)
    each = jax.tree.map(join, *memes)
    result = merge(each, join(*weights))
    one = jax.tree.map(lambda a: a[0], each)
    output_checks.alike("merge", result, one)
    return jax.tree.map(lambda x, a: core.as_type(x, a.dtype), result, one)

  return merged


def _check_round(plan, groups, state, *hyper):
  """Raises if a plan or a state is not for these clients and models."""
  checks.kind("plan", plan, MutualPlan, "as plan_mutual makes it")
  checks.state(state, MutualState)
  checks.holds("state", state.hyper, *hyper)
  if (of := tuple(group.clients for group in state.groups)) != groups:
    raise ValueError(
      f"the state groups clients as {of}, but the algorithm as {groups}: use"
      " the state of this algorithm's init"
    )
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


def _warn_of_copies(clients, groups):
  """Warns if clients form more groups than their functions' code explains."""
  # Such as a lambda written in a comprehension: a new function each time.
  code = lambda field: getattr(field, "__code__", core.hash_key(field))
  kinds = {tuple(map(code, client)) for client in clients}
  if len(kinds) < len(groups):
    logging.warning(
      "%d clients form %d groups, each with a program of its own, but by their"
      " functions' code only %d. If they are to be alike, make the transform,"
      " loss or optimizer once and pass it to all.",
      len(clients),
      len(groups),
      len(kinds),
    )


def _build(
  clients,
  global_model,
  hyper,
  engine,
  *,
  optimizer,
  microbatch,
  merge=None,
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
  checks.counts(**checks.given(microbatch=microbatch))
  checks.factories(optimizer=optimizer)
  if merge is not None:
    checks.takes("merge", merge, "memes", "weights")
  merge = _merge if merge is None else _merge_by(merge)
  groups = group_clients(clients)
  _warn_of_copies(clients, groups)
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
  constant = {n: x for n, x in hyper.items() if not callable(x)}

  def init(key, server=None):  # Line 2; line 2 of ClientUpdate.
    init_key, run_key = jax.random.split(key)
    keys = lambda first, group: jnp.stack(
      [jax.random.fold_in(init_key, first + k) for k in group]
    )
    values = {name: as_array(x) for name, x in constant.items()}

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
      output_checks.statistics(server.stats)

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
    _check_round(plan, groups, state, *constant)
    banks = [checks.bank(data, clients[group[0]].bank) for group in groups]
    key, *_ = round_keys(state.key, plan.round, 1)
    now = {
      name: scheduled(x, plan.round, high=highest.get(name, np.inf))
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
    results = engine.run(  # Lines 4 to 6.
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
    if global_model is not None:  # Line 7: Merge.
      weights = tuple(work.weight for work in works)
      (server,) = engine.run(engine_lib.Call(merge, (memes, weights)))
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
  optimizer: core.Optimizer = momentum_sgd,
  temperature: float | jax.Array | Schedule = 1.0,
  sequential: bool = False,
  from_global: bool = False,
  merge: Callable[[core.Variables, jax.Array], core.Variables] | None = None,
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
      value or a schedule. Equation 5 has none.
    sequential: whether the local model is updated first and the meme learns
      from the updated one, as in deep mutual learning (Zhang et al. 2018). The
      paper does not say; its code updates both at once.
    from_global: whether clients whose local model is the global model start
      from its weights ("the same model provided by server", section 4.2),
      and not from an initialisation of their own.
    merge: `(memes, weights) -> global`, such as a median: `memes` are
      `Variables` of arrays `[K, ...]`, `weights` `float32[K]`, 0 for clients
      that do not take part. `None` for the weighted mean.
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
  >>> from hetfl import plan_mutual
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
    merge=merge,
    microbatch=microbatch,
  )


def independent(
  clients: Sequence[MutualClient],
  *,
  learning_rate: float | jax.Array | Schedule = 0.01,
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
  >>> from hetfl import plan_mutual
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
