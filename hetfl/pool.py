"""Pools of clients that train one model by federated averaging.

What the algorithms of several pools share: a pool's configuration and state,
the jobs that train its clients, and its server's step.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core, output_checks
from hetfl import client as client_lib
from hetfl import engine as engine_lib
from hetfl.lanes import LanePlan
from hetfl.planning import RoundPlan

PyTree = Any

# Server optimizers: `learning rate -> optax optimizer`, which takes the
# clients' mean delta as its gradient (Reddi et al. 2021, algorithm 2; optax's
# Adam and Yogi correct their moments' bias, which that algorithm does not).
fedavg_server = optax.sgd
fedavgm_server = functools.partial(optax.sgd, momentum=0.9)
fedadam_server = functools.partial(optax.adam, b1=0.9, b2=0.999, eps=1e-5)
fedyogi_server = functools.partial(optax.yogi, b1=0.9, b2=0.999, eps=1e-3)


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
  """The configuration of a pool: clients that train one model.

  Attributes:
    name: its name in metrics and results.
    model: the model.
    client_lr: the clients' learning rate, constant.
    server_lr: the server's learning rate in the first round; see `rounds` in
      `hetfl.fedavg`.
    loss: the loss of each example, or a batch's mean; see `core.Loss`.
    transform: applied to each training batch as stored in the bank.
    client_optimizer: `learning rate -> optax optimizer`. Its state is new for
      each client and round: an optimizer that draws random numbers from its
      state draws the same ones each time.
    server_optimizer: `learning rate -> optax optimizer`.
    prox_mu: FedProx's weight; `None` leaves its term out.
    delta_transform: `(key, delta) -> delta`, applied to a client's update
      `w_server - w_k` before it is sent, such as clipping, noise, quantisation;
      `None` sends it unchanged. Batch statistics and the loss are always sent
      unchanged.
    aggregate: `ClientUpdates -> delta`, what the server optimizer takes as its
      gradient, such as a median; `None` for the clients' weighted mean. Plans
      then need a lane for each client, `num_lanes=clients_per_round`.

  Raises:
    ValueError: the model is a bare Flax module, a rate is negative or not a
      number, or an optimizer is not a function of a rate or holds the rate in
      its state.
  """

  name: str
  model: core.Model
  client_lr: float | jax.Array
  server_lr: float | jax.Array
  loss: core.Loss = core.cross_entropy
  transform: core.Transform | None = None
  client_optimizer: core.Optimizer = optax.sgd
  server_optimizer: core.Optimizer = fedadam_server
  prox_mu: float | jax.Array | None = None
  delta_transform: Callable[[jax.Array, PyTree], PyTree] | None = None
  aggregate: Callable[[client_lib.ClientUpdates], PyTree] | None = None

  def __post_init__(self):
    checks.kind("name", self.name, str, "hetfl.Pool(name, model, ...)")
    core.Model.check(f"pool {self.name!r}", self.model)
    if self.delta_transform is not None:
      checks.takes("delta_transform", self.delta_transform, "key", "delta")
    if self.aggregate is not None:
      checks.takes("aggregate", self.aggregate, "updates")
    checks.factories(
      client_optimizer=self.client_optimizer,
      server_optimizer=self.server_optimizer,
    )
    checks.between(
      0,
      np.inf,
      client_lr=self.client_lr,
      server_lr=self.server_lr,
      **checks.given(prox_mu=self.prox_mu),
    )

  @functools.cached_property
  def train_lane(self) -> Callable[..., client_lib.ClientSums]:
    """The program that trains a lane of clients."""
    program = client_lib.lane_program(
      client_lib.local_sgd(
        self.model,
        loss=self.loss,
        transform=self.transform,
        optimizer=self.client_optimizer,
        proximal=self.prox_mu is not None,
      ),
      self.delta_transform,
    )

    def train_lane(*args):
      with checks.noted(f"pool {self.name!r}"):
        return program(*args)

    return train_lane

  @functools.cached_property
  def train_client(self) -> Callable[..., client_lib.ClientUpdates]:
    """The program that trains the only client of a lane."""
    return client_lib.client_of_lane(self.train_lane)

  @functools.cached_property
  def combine(self) -> Callable[..., tuple[PyTree, PyTree]]:
    """The program `sent -> (gradient, stats)`: what the server makes of it.

    `sent` is the result of `lanes`. The statistics are the clients' weighted
    mean, whatever the gradient is.
    """
    if self.aggregate is None:
      return mean_update

    def combine(updates):
      weight = updates.weight / jnp.sum(updates.weight)
      mean = lambda x: jnp.tensordot(
        weight, x, 1, precision=jax.lax.Precision.HIGHEST
      )
      gradient = self.aggregate(updates)
      one = jax.tree.map(lambda a: a[0], updates.delta)
      output_checks.alike("aggregate", gradient, one)
      return gradient, jax.tree.map(mean, updates.stats)

    return combine

  @functools.cached_property
  def server_step(self) -> Callable[..., "PoolState"]:
    """One step of the server optimizer.

    The program `(state, gradient, stats, decay) -> state`: `gradient` is what
    the optimizer takes as its gradient, `stats` are the model's new
    statistics and `decay` is the factor of the server's rate in this round.
    Algorithms share this program, so that equal gradients give equal bits.
    """

    def step_server(state, gradient, stats, decay):
      optimizer = self.server_optimizer(decay * state.hyper["server_lr"])
      # Sums are float32 at least; the model and its optimizer keep their types.
      like = lambda x, old: core.as_type(x, old.dtype)
      gradient = jax.tree.map(like, gradient, state.params)
      params, opt_state = core.descend(
        optimizer, state.params, state.opt_state, gradient
      )
      stats = jax.tree.map(like, stats, state.stats)
      return state.replace(params=params, stats=stats, opt_state=opt_state)

    return step_server

  @functools.cached_property
  def reset_server(self) -> Callable[..., "PoolState"]:
    """The program that resets the server optimizer's state."""

    def reset_server(state):
      optimizer = self.server_optimizer(state.hyper["server_lr"])
      return state.replace(opt_state=optimizer.init(state.params))

    return reset_server

  def init(
    self, key: jax.Array, variables: core.Variables | None = None
  ) -> "PoolState":
    """Makes a model and a new server state.

    Args:
      key: a random key.
      variables: the model to continue from; `None` makes a new one.

    Returns:
      The pool's state before the first round.
    """
    if variables is None:
      variables = self.model.start(key)
    else:
      variables = self.model.adopt(f"pool {self.name!r}", variables)
    output_checks.statistics(variables.stats)
    hyper = {
      "client_lr": jnp.array(self.client_lr, jnp.float32),
      "server_lr": jnp.array(self.server_lr, jnp.float32),
    }
    if self.prox_mu is not None:
      hyper["prox_mu"] = jnp.array(self.prox_mu, jnp.float32)
    state = PoolState(variables.params, variables.stats, (), hyper)
    return self.reset_server(state)

  def lanes(
    self,
    state: "PoolState",
    key: jax.Array,
    bank: core.Batch,
    plan: LanePlan,
    *,
    apart: bool = False,
  ) -> engine_lib.Lanes:
    """The job that trains this round's clients.

    Args:
      state: the pool's state.
      key: the pool's key of the round.
      bank: the examples, on the device.
      plan: the round's lanes.
      apart: whether to return each client's update by itself, which `aggregate`
        needs too.

    Returns:
      The job, whose result is `ClientSums` or, apart, `ClientUpdates`.

    Raises:
      ValueError: a lane must hold one client but does not. In a traced plan
        this gives NaN.
    """
    apart = apart or self.aggregate is not None
    if apart and isinstance(plan.weight, np.ndarray):
      number = (plan.weight > 0).sum(axis=1)
      if (number != 1).any():
        raise ValueError(
          f"pool {self.name!r}: the plan's lanes hold {number.tolist()}"
          " clients, but to tell updates apart each must hold one: plan with"
          " num_lanes=clients_per_round"
        )
    return engine_lib.Lanes(
      self.train_client if apart else self.train_lane,
      (state.variables, state.hyper, key, bank),
      plan,
      plan.steps,
      stacked=apart,
    )


@flax.struct.dataclass
class PoolState:
  """What the server keeps of one pool.

  Attributes:
    params: the model's parameters.
    stats: the model's mutable collections; `{}` if none.
    opt_state: the server optimizer's state.
    hyper: `client_lr`, `server_lr` and, for FedProx, `prox_mu`: `float32[]`
      each, so that `jax.vmap` can batch trials with different values.
  """

  params: PyTree
  stats: PyTree
  opt_state: PyTree
  hyper: dict[str, jax.Array]

  @property
  def variables(self) -> core.Variables:
    """The model's parameters and statistics."""
    return core.Variables(self.params, self.stats)


@flax.struct.dataclass
class PoolsState:
  """The state of federated training over P pools.

  Attributes:
    key: the run's key; it never changes, and every draw folds the round into
      it.
    pools: P `PoolState`s, of models that may differ.
    hyper: the exchange's hyper-parameters; empty for FedAvg.
  """

  key: jax.Array
  pools: tuple[PoolState, ...]
  hyper: dict[str, jax.Array] = dataclasses.field(default_factory=dict)


def check_round(
  pools: Sequence[Pool],
  state: PoolsState,
  plan: RoundPlan,
  *hyper: str,
) -> None:
  """Checks that a round's state and plan are for these pools.

  Args:
    pools: P pools.
    state: the state.
    plan: the plan.
    *hyper: hyper-parameters that the state must have.

  Raises:
    ValueError: they are for others.
  """
  checks.kind("plan", plan, RoundPlan, "as plan_round makes it")
  checks.state(state, PoolsState, pools=len(pools))
  if len(plan.pools) != len(pools):
    raise ValueError(
      f"the plan is for {len(plan.pools)} pools, but there are {len(pools)}"
    )
  checks.holds("state", state.hyper, *hyper)
  for pool, kept, lanes in zip(pools, state.pools, plan.pools):
    proximal = ["prox_mu"] if pool.prox_mu is not None else []
    checks.holds(f"state of pool {pool.name!r}", kept.hyper, *proximal)
    # A traced plan, or one on the device, is not looked at.
    if isinstance(lanes.index, np.ndarray) and jax.tree.leaves(kept.stats):
      empty = lanes.index < 0
      if (empty.any(axis=-1) & ~empty.all(axis=-1)).any():
        raise ValueError(
          f"pool {pool.name!r}: the plan has batches that are not full, whose"
          " empty places would enter the batch statistics: plan with"
          " full_batches=True"
        )


def init_pools(
  pools: Sequence[Pool],
  key: jax.Array,
  variables: Sequence[core.Variables] | None,
  hyper: dict[str, Any],
) -> PoolsState:
  """Makes the state of several pools.

  Args:
    pools: P pools.
    key: the run's key.
    variables: P models to continue from; `None` makes new ones.
    hyper: the exchange's hyper-parameters, plain numbers or arrays.

  Returns:
    The state.

  Raises:
    ValueError: `variables` is something else.
  """
  if variables is not None:
    hint = "[pool.variables for pool in state.pools] of another run"
    checks.each("variables", variables, core.Variables, len(pools), hint)
  init_key, run_key = jax.random.split(key)
  return PoolsState(
    key=run_key,
    pools=tuple(
      pool.init(
        jax.random.fold_in(init_key, i), variables[i] if variables else None
      )
      for i, pool in enumerate(pools)
    ),
    # Copies, since states may be donated.
    hyper=jax.tree.map(lambda x: jnp.array(x, jnp.float32), hyper),
  )


@functools.partial(jax.jit, static_argnums=2)
def round_keys(
  key: jax.Array, round: jax.Array, num_pools: int
) -> tuple[jax.Array, ...]:
  """The round's keys, one for each pool and one for the exchange.

  Args:
    key: the run's key.
    round: the number of the round.
    num_pools: P.

  Returns:
    P + 1 keys, `fold_in(fold_in(key, round), i)`.

  >>> key = jax.random.key(0)
  >>> *pools, exchange = round_keys(key, jnp.array(7), 2)
  >>> of_round = jax.random.fold_in(key, 7)
  >>> len(pools), bool(exchange == jax.random.fold_in(of_round, 2))
  (2, True)
  """
  round_key = jax.random.fold_in(key, round)
  return tuple(jax.random.fold_in(round_key, i) for i in range(num_pools + 1))


def mean_update(sums: client_lib.ClientSums) -> tuple[PyTree, PyTree]:
  """The clients' weighted mean: `g = sum_k n_k (w - w_k) / sum_k n_k`.

  Args:
    sums: what the clients sent.

  Returns:
    The gradient `g` for the server optimizer, and the mean statistics.

  Reference: McMahan et al. 2017, algorithm 1; Lichtarge et al. 2023, section
  2.2 ("treats the combined model difference as a single gradient").

  >>> from hetfl.client import ClientSums
  >>> from hetfl.core import Mean
  >>> sums = ClientSums(jnp.array([6., 3.]), {}, jnp.array(3.), Mean(0., 0.))
  >>> mean_update(sums)
  (Array([2., 1.], dtype=float32), {})
  """
  mean = lambda x: x / sums.weight
  return jax.tree.map(mean, sums.delta), jax.tree.map(mean, sums.stats)


def combine(
  pools: Sequence[Pool],
  sent: Sequence[client_lib.ClientSums | client_lib.ClientUpdates],
  engine: engine_lib.Engine,
) -> tuple[tuple[PyTree, PyTree], ...]:
  """What each pool's server makes of what its clients sent.

  Args:
    pools: P pools.
    sent: the results of `client_jobs`.
    engine: where the work runs.

  Returns:
    P pairs: the gradient for the server optimizer, and the new statistics.
  """
  return engine.run(
    *(engine_lib.Call(pool.combine, (of,)) for pool, of in zip(pools, sent))
  )


def step_servers(
  pools: Sequence[Pool],
  states: Sequence[PoolState],
  updates: Sequence[tuple[PyTree, PyTree]],
  decay: jax.Array,
  engine: engine_lib.Engine,
) -> tuple[PoolState, ...]:
  """A step of each pool's server optimizer.

  Args:
    pools: P pools.
    states: their states.
    updates: P pairs as `combine` returns them.
    decay: the factor of the servers' learning rates.
    engine: where the work runs.

  Returns:
    The P states after the step.
  """
  return engine.run(
    *(
      engine_lib.Call(pool.server_step, (state, *update, decay))
      for pool, state, update in zip(pools, states, updates)
    )
  )


def client_jobs(
  pools: Sequence[Pool],
  state: PoolsState,
  keys: Sequence[jax.Array],
  plan: RoundPlan,
  data: dict[str, Any],
  *,
  apart: bool = False,
) -> list[engine_lib.Lanes]:
  """The jobs that train this round's clients, pool by pool.

  Args:
    pools: P pools.
    state: the state.
    keys: the round's keys; the first P are used.
    plan: the round's plan.
    data: `pools` holds P banks on the device.
    apart: see `Pool.lanes`.

  Returns:
    P jobs, whose results are those of `Pool.lanes`.

  Raises:
    ValueError: if data is for another number of pools.
  """
  banks = checks.banks(data, "pools", len(pools))
  return [
    pool.lanes(*args, apart=apart)
    for pool, *args in zip(pools, state.pools, keys, banks, plan.pools)
  ]


def client_updates(
  pools: Sequence[Pool],
  state: PoolsState,
  plan: RoundPlan,
  data: dict[str, Any],
  *,
  engine: engine_lib.Engine | None = None,
) -> tuple[client_lib.ClientUpdates, ...]:
  """What each client sends in a round, for algorithms of your own.

  The same clients, batches and random draws as in a step of `fedavg`, without
  the server's step, which is `pool.server_step`.

  Args:
    pools: P pools.
    state: their state; it does not change.
    plan: the round's plan, with a lane for each client.
    data: as for `fedavg`.
    engine: as for `fedavg`.

  Returns:
    P `ClientUpdates`. Client k's parameters are `w_server - delta[k]`.

  Raises:
    ValueError: the plan or the state is not for these pools, or a lane does not
      hold one client; in a traced plan this gives NaN.

  >>> model = core.Model(
  ...     lambda key: core.Variables(jnp.zeros((1, 2)), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> pool = Pool('a', model, 1., 1., server_optimizer=fedavg_server)
  >>> bank = {'x': jnp.ones((2, 1)), 'y': jnp.arange(2)}
  >>> from hetfl import fedavg, plan_round, population
  >>> clients = population.ClientPopulation.from_lists(bank, [[0], [1]])
  >>> plan = plan_round(
  ...     [clients], seed=0, round=1, clients_per_round=2, batch_size=1)
  >>> (updates,) = client_updates(
  ...     [pool], fedavg([pool], rounds=None).init(jax.random.key(0)), plan,
  ...     {'pools': (bank,)})
  >>> updates.client.tolist(), updates.delta.tolist()
  ([0, 1], [[[-0.5, 0.5]], [[0.5, -0.5]]])
  """
  check_round(pools, state, plan)
  engine = engine or engine_lib.Inline()
  keys = round_keys(state.key, plan.round, len(pools))
  return engine.run(*client_jobs(pools, state, keys, plan, data, apart=True))


def client_metrics(
  pools: Sequence[Pool],
  sent: Sequence[client_lib.ClientSums | client_lib.ClientUpdates],
) -> core.Metrics:
  """The clients' training loss of each pool.

  Args:
    pools: P pools.
    sent: what the clients of each pool sent.

  Returns:
    `NAME/client_loss` of each pool, a mean over steps, in nats.
  """

  def total(loss):
    return jax.tree.map(jnp.sum, loss) if jnp.ndim(loss.count) else loss

  return {
    f"{pool.name}/client_loss": total(of.loss) for pool, of in zip(pools, sent)
  }
