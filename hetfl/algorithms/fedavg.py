"""Federated averaging: FedAvg, FedProx, FedAvgM, FedAdam and FedYogi.

The building block of codistillation, and its baseline when several pools run
side by side without exchange. The five differ in two fields of `Pool` only:
FedProx adds a term to the clients' loss, and FedAvgM, FedAdam and FedYogi use
another server optimizer.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core, local
from hetfl.batches import check_full, of_round, Plan
from hetfl.clients import weighted_mean
from hetfl.engine import Engine, Inline, Task, Work
from hetfl.optimizers import fedadam_server
from hetfl.privacy import PrivateMean

PyTree = Any


class ClientUpdates(NamedTuple):
  """What the clients of a round send to the server.

  Attributes:
    delta: `w_server - w_k`, arrays `[K, ...]`, shaped as the parameters.
    stats: arrays `[K, ...]`, shaped as the model's statistics.
    weight: `n_k`, `float32[K]`; 0 for absent clients, whose delta is 0.
    loss: each client's training loss over its steps, a `Mean` of `[K]`.
    client: `int32[K]`, the clients' numbers in their population.

  Without the axis K, these are sums over the clients, of delta and stats times
  the weight, and `client` is `None`.
  """

  delta: PyTree
  stats: PyTree
  weight: jax.Array
  loss: core.Mean
  client: jax.Array | None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Pool(local.Participant):
  """Clients that train one model: how they train, and what the server does.

  The clients' optimizer is new for each client and round: one that draws random
  numbers from its state draws the same ones each time.

  Attributes:
    server_lr: the server's learning rate in the first round; see `rounds` in
      `fedavg`.
    server_optimizer: `learning rate -> optax optimizer`.
    prox_mu: FedProx's weight; `None` leaves its term out.
    delta_transform: `(key, delta) -> delta`, applied to a client's update
      `w_server - w_k` before it is sent, such as clipping, noise, quantisation;
      `None` sends it unchanged. Batch statistics and the loss are always sent
      unchanged.
    aggregate: `ClientUpdates -> delta`, what the server optimizer takes as its
      gradient, such as a median; `None` for the clients' weighted mean.
    private: clips what clients send, after `delta_transform`, and adds noise to
      the sum, in which they count alike whatever their weights; for plans with
      `poisson=True`, models without batch statistics and no `aggregate`.

  Raises:
    ValueError: as `Participant`.
  """

  server_lr: float | jax.Array
  server_optimizer: core.Optimizer = fedadam_server
  prox_mu: float | jax.Array | None = None
  delta_transform: Callable[[jax.Array, PyTree], PyTree] | None = None
  aggregate: Callable[[ClientUpdates], PyTree] | None = None
  private: PrivateMean | None = None

  def __post_init__(self):
    super().__post_init__()
    checks.optimizers(server_optimizer=self.server_optimizer)
    values = checks.given(server_lr=self.server_lr, prox_mu=self.prox_mu)
    checks.between(0, np.inf, **values)

  @functools.cached_property
  def client_tasks(self) -> dict[bool, Task]:
    """The local update, whose results are sums or, if True, each client's."""
    proximal = None
    if self.prox_mu is not None:
      proximal = lambda w, context: proximal_term(
        w, context["server"].params, mu=context["prox_mu"]
      )
    step = local.step_of(self, penalty=proximal)

    def begin(context, own):
      del own
      return local.Learner.start(context["server"], self.optimizer)

    def sent(context, own, learner, metrics, batches, key):
      del own
      delta = optax.tree.sub(context["server"].params, learner.params)
      if self.delta_transform is not None:
        # No step draws with this number.
        noise_key = jax.random.fold_in(key, np.uint32(2**32 - 1))
        trained = batches.steps > 0
        delta = core.fixed_unless(trained, delta)
        changed = self.delta_transform(noise_key, delta)
        checks.alike(f"{self.label}: delta_transform", changed, delta)
        # A client without steps sends 0, whatever is made of a delta of 0.
        delta = optax.tree.where(trained, changed, delta)
      weight = batches.weight
      if self.private is not None:
        delta, weight = self.private.clip(delta), jnp.sign(weight)
      return ClientUpdates(
        delta, learner.stats, weight, metrics["loss"], batches.client
      )

    def weighted(*args):
      update = sent(*args)
      times = lambda x: update.weight * x
      return update._replace(
        delta=jax.tree.map(times, update.delta),
        stats=jax.tree.map(times, update.stats),
        client=None,
      )

    return {
      each: local.training(step, begin, end, transform=self.transform)
      for each, end in ((False, weighted), (True, sent))
    }

  @functools.cached_property
  def combine(
    self,
  ) -> Callable[[ClientUpdates, jax.Array], tuple[PyTree, PyTree, Any]]:
    """`(sent, key) -> (gradient, stats, weight)`: what is made of updates.

    `g = sum_k n_k (w - w_k) / sum_k n_k`, or what `aggregate` or `private`
    says; the statistics are the clients' weighted mean in any case.

    Reference: McMahan et al. 2017, algorithm 1; Lichtarge et al. 2023, section
    2.2 ("treats the combined model difference as a single gradient").
    """

    @jax.jit
    def combine(sent, key):
      if self.private is not None:
        if jax.tree.leaves(sent.stats):
          raise ValueError(
            f"{self.label}: private: its model's statistics would be sent as"
            " they are; give it a model without, such as with group norm"
          )
        # No client has this number. The weight does not reveal who takes part.
        noise_key = jax.random.fold_in(key, np.uint32(2**32 - 1))
        gradient = self.private.of_sum(noise_key, sent.delta)
        return gradient, sent.stats, jnp.ones(())
      if sent.client is None:  # The engine has added up weight * delta.
        weight = jnp.where(sent.weight > 0, sent.weight, 1)  # `server_step`.
        mean = lambda x: x / weight
        return *jax.tree.map(mean, (sent.delta, sent.stats)), sent.weight
      mean = lambda sent: weighted_mean(sent.delta, sent.weight)
      gradient = (self.aggregate or mean)(sent)
      one = jax.tree.map(lambda a: a[0], sent.delta)
      checks.alike(f"{self.label}: aggregate", gradient, one)
      stats = weighted_mean(sent.stats, sent.weight)
      return gradient, stats, jnp.sum(sent.weight)

    return combine

  @functools.cached_property
  def server_step(self) -> Callable[..., local.Learner]:
    """`(server, *combined, rate) -> server`: a server optimizer's step.

    Without weight, as no client takes part, the server stays as it is.
    Algorithms share this program, so that equal gradients give equal bits.
    """

    @jax.jit
    def step(server, gradient, stats, weight, rate):
      # Sums are float32 at least; the model and its optimizer keep their types.
      gradient = core.as_types(gradient, server.params)
      stats = core.as_types(stats, server.stats)
      new = server.descend(self.server_optimizer(rate), gradient, stats)
      return optax.tree.where(weight > 0, new, server)

    return step


def proximal_term(
  params: PyTree, server: PyTree, *, mu: float | jax.Array
) -> jax.Array:
  """FedProx's term `mu / 2 ||w - w_server||^2`.

  Args:
    params: the client's parameters `w`.
    server: the server's parameters, fixed.
    mu: its weight.

  Returns:
    A scalar.

  Reference: Li et al. 2020 (FedProx), equation 2.

  >>> float(proximal_term(jnp.array([3., 4.]), jnp.zeros(2), mu=0.1))
  1.25
  """
  distance = optax.tree.norm(optax.tree.sub(params, server), squared=True)
  return mu / 2 * distance


@functools.partial(jax.jit, static_argnums=1)
def linear_decay(round: int | jax.Array, rounds: int | None) -> jax.Array:
  """`1 - (t - 1) / T`: one in the first round, zero after the last.

  Args:
    round: t, from 1.
    rounds: T; `None` for no decay.

  Returns:
    The factor of a learning rate, a scalar.

  Reference: Lichtarge et al. 2023, appendix C.3 ("linearly decaying", "with a
  zero final value").

  >>> [float(linear_decay(t, 4)) for t in (1, 4, 5)]
  [1.0, 0.25, 0.0]
  """
  if rounds is None:
    return jnp.ones(())
  passed = (jnp.asarray(round, jnp.float32) - 1.0) / rounds
  return jnp.maximum(1.0 - passed, 0.0)


def init_pools(
  pools: Sequence[Pool],
  key: jax.Array,
  variables: Sequence[core.Variables] | None,
  hyper: dict[str, jax.Array],
  *students: local.Participant,
) -> core.State:
  """The state of several pools before the first round.

  Args:
    pools: P pools.
    key: the run's key.
    variables: P models to continue from; `None` makes new ones.
    hyper: the exchange's hyper-parameters.
    *students: the server's models without clients, with their own optimizers;
      they count as pools after the P, except for `server_lr` and `prox_mu`.
      Give `client_works`, `combine` and `step_servers` the state without them.

  Returns:
    The state; its server holds P `Learner`s, its `hyper` also `learning_rate`,
    `server_lr` and, if any pool has them, `prox_mu` and `l2`, `float32[P]`;
    `learning_rate` and `l2` have the students' after the pools'.

  Raises:
    ValueError: there are not P `Variables`.
  """
  init_key, run_key = jax.random.split(key)
  values = {"server_lr": [pool.server_lr for pool in pools]}
  if any(pool.prox_mu is not None for pool in pools):
    values["prox_mu"] = [
      0.0 if pool.prox_mu is None else pool.prox_mu for pool in pools
    ]
  everyone = (*pools, *students)
  optimizers = [pool.server_optimizer for pool in pools]
  optimizers += [student.optimizer for student in students]
  return core.State(
    run_key,
    local.hyper_of(everyone) | core.hyper(len(pools), **values) | hyper,
    server=local.start_learners(everyone, optimizers, init_key, variables),
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


def client_works(
  pools: Sequence[Pool],
  state: core.State,
  plan: Plan,
  data: dict[str, core.Batch],
  *,
  each: bool = False,
) -> list[Work]:
  """The training of this round's clients, pool by pool.

  Args:
    pools: P pools.
    state: their state.
    plan: the round's plan.
    data: banks by the pools' names.
    each: whether to return each client's update, as `aggregate` needs too.

  Returns:
    P works, whose results are `ClientUpdates`.

  Raises:
    ValueError: the plan, the state or the data is not for these pools.
  """
  if len(state.server) != len(pools):
    raise ValueError(
      f"the state is of {len(state.server)} pools, but there are {len(pools)}:"
      " without the students of init_pools, give"
      " state.replace(server=state.server[:P])"
    )
  keys = round_keys(state.key, plan.round, len(pools))
  works = []
  for i, (pool, server, key) in enumerate(zip(pools, state.server, keys)):
    batches = of_round(plan, pool.name)
    check_full(pool.label, batches, server.stats)
    context = {"server": server.variables}
    # With the clients' learning rate.
    context |= local.values_of(state, i, "prox_mu")
    bank = checks.bank(data, pool.name)
    apart = each or pool.aggregate is not None
    if apart and pool.private is not None:
      raise ValueError(
        f"{pool.label}: private: noise is in the sum of its clients' updates,"
        " but here each of them is seen (by aggregate, an ensemble or"
        " client_updates); leave it out"
      )
    task = pool.client_tasks[apart]
    works.append(
      local.work(task, context, key, bank, (), batches, total=not apart)
    )
  return works


def client_updates(
  pools: Sequence[Pool],
  state: core.State,
  plan: Plan,
  data: dict[str, core.Batch],
  *,
  engine: Engine | None = None,
) -> tuple[ClientUpdates, ...]:
  """What each client sends in a round, for algorithms of your own.

  The same clients, batches and random draws as in a step of `fedavg`, without
  the server's step, which is `pool.server_step`.

  Args:
    pools: P pools.
    state: their state; it does not change.
    plan: the round's plan.
    data: as for `fedavg`.
    engine: as for `fedavg`.

  Returns:
    P `ClientUpdates`. Client k's parameters are `w_server - delta[k]`.

  Raises:
    ValueError: the plan, the state or the data is not for these pools.

  >>> from hetfl import ClientPopulation, plan_round
  >>> model = core.Model(
  ...     lambda key: core.Variables(jnp.zeros((1, 2)), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> pool = Pool(model, 'a', learning_rate=1., server_lr=1.)
  >>> bank = {'x': jnp.ones((2, 1)), 'y': jnp.arange(2)}
  >>> clients = ClientPopulation.from_lists(bank, [[0], [1]])
  >>> plan = plan_round({'a': clients}, seed=0, round=1, batch_size=1)
  >>> (updates,) = client_updates(
  ...     [pool], fedavg([pool], rounds=None).init(jax.random.key(0)), plan,
  ...     {'a': bank})
  >>> updates.client.tolist(), updates.delta.tolist()
  ([0, 1], [[[-0.5, 0.5]], [[0.5, -0.5]]])
  """
  works = client_works(pools, state, plan, data, each=True)
  return (engine or Inline()).run(*works)


def combine(
  pools: Sequence[Pool],
  state: core.State,
  plan: Plan,
  sent: Sequence[ClientUpdates],
) -> list[tuple[PyTree, PyTree, Any]]:
  """What each pool's server makes of what its clients send; see `Pool.combine`.

  Args:
    pools: P pools.
    state: their state, from whose key the round's noise is drawn.
    plan: the round's plan.
    sent: P results of `client_works`.

  Returns:
    P triples, as `step_servers` takes them.
  """
  keys = round_keys(state.key, plan.round, len(pools))
  return [pool.combine(*given) for pool, *given in zip(pools, sent, keys)]


def step_servers(
  pools: Sequence[Pool],
  state: core.State,
  gradients: Sequence[tuple[PyTree, PyTree, Any]],
  decay: jax.Array,
) -> core.State:
  """A step of each pool's server optimizer.

  Args:
    pools: P pools.
    state: their state.
    gradients: P triples: what the optimizer takes as its gradient, the model's
      new statistics, and the clients' total weight.
    decay: the factor of the servers' learning rates in this round.

  Returns:
    The state after the step.
  """
  rates = decay * state.hyper["server_lr"]
  return state.replace(
    server=tuple(
      pool.server_step(server, *gradient, rate)
      for pool, server, gradient, rate in zip(
        pools, state.server, gradients, rates
      )
    )
  )


def client_losses(sent: Sequence[ClientUpdates]) -> list[core.Mean]:
  """Each pool's loss, a mean over the steps of its clients, in nats."""
  return [jax.tree.map(jnp.sum, update.loss) for update in sent]


def fedavg(
  pools: Sequence[Pool], *, rounds: int | None, engine: Engine | None = None
) -> core.Algorithm:
  """Federated averaging in each of P pools, without exchange.

  `w <- server_optimizer(w, sum_k n_k (w - w_k) / sum_k n_k)`

  Each pool has its own server optimizer, by default FedAdam. With
  `server_optimizer=optax.sgd, server_lr=1., rounds=None` the algorithm is
  McMahan's FedAvg, whose plans have `tail="short"`.

  Args:
    pools: P pools.
    rounds: T, over which the servers' learning rates fall linearly to zero, so
      that later rounds change no parameters; `None` keeps them constant.
    engine: where the work runs, by default `Inline()`; see `hetfl.engine`.

  Returns:
    The algorithm. Its `init` takes a key and, to continue from existing models,
    P `Variables`. Its `step` takes a plan with batches, and data with banks on
    the device, by the pools' names. Its state's `server` holds each pool's
    `Learner`, its metrics are each pool's `NAME/client_loss`, the mean over its
    clients' steps.

  Raises:
    ValueError: if `rounds` is below 1, there are no pools, or two pools have
      the same name.

  Reference: McMahan et al. 2017, algorithm 1; Reddi et al. 2021, algorithm 2;
  Lichtarge et al. 2023, appendix C.3.

  With one client, one image of class 0 and logits (0, 0), the client moves to
  (1/2, -1/2), and so does the server, at a learning rate of 1.

  >>> from hetfl import ClientPopulation, optimizers, plan_round
  >>> model = core.Model(
  ...     lambda key: core.Variables(jnp.zeros((1, 2)), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> pool = Pool(model, 'a', learning_rate=1., server_lr=1.,
  ...             server_optimizer=optimizers.fedavg_server)
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> clients = ClientPopulation.from_lists(bank, [[0]])
  >>> plan = plan_round({'a': clients}, seed=0, round=1, batch_size=1)
  >>> algorithm = fedavg([pool], rounds=None)
  >>> state = algorithm.init(jax.random.key(0))
  >>> state, metrics = algorithm.step(state, plan, {'a': bank})
  >>> state.server[0].params.tolist()
  [[0.5, -0.5]]
  >>> float(metrics['a/client_loss'].value)  # log 2
  0.693...
  """
  pools = core.unique_names("pools", pools, Pool)
  engine = engine or Inline()
  checks.counts(**checks.given(rounds=rounds))

  def init(key, variables=None):
    return init_pools(pools, key, variables, {})

  def step(state, plan, data):
    sent = engine.run(*client_works(pools, state, plan, data))
    gradients = combine(pools, state, plan, sent)
    decay = linear_decay(plan.round, rounds)
    state = step_servers(pools, state, gradients, decay)
    return state, local.metrics_of(pools, client_loss=client_losses(sent))

  return core.Algorithm(init, step)
