"""The local update of one client, and of a lane of clients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core, output_checks
from hetfl.lanes import OneClientLanes

PyTree = Any


class ClientState(NamedTuple):
  """What a client holds while it trains.

  Attributes:
    variables: its model.
    opt_state: its optimizer's state, new in each round.
  """

  variables: core.Variables
  opt_state: PyTree


class ClientSums(NamedTuple):
  """What clients send to the server, added up.

  Attributes:
    delta: `sum_k n_k (w_server - w_k)`, shaped as the parameters.
    stats: `sum_k n_k stats_k`, shaped as the model's statistics.
    weight: `sum_k n_k`, a scalar.
    loss: the clients' training loss over all steps.
  """

  delta: PyTree
  stats: PyTree
  weight: jax.Array
  loss: core.Mean


class ClientUpdates(NamedTuple):
  """What the clients of a round send to the server, each by itself.

  Attributes:
    delta: `w_server - w_k`, arrays `[K, ...]`, shaped as the parameters.
    stats: arrays `[K, ...]`, shaped as the model's statistics.
    weight: `n_k`, `float32[K]`.
    loss: each client's training loss over its steps, a `Mean` of `[K]`.
    client: `int32[K]`, the clients' numbers in their population.
  """

  delta: PyTree
  stats: PyTree
  weight: jax.Array
  loss: core.Mean
  client: jax.Array


class ClientUpdate(NamedTuple):
  """A client's local training as pure functions.

  Attributes:
    init: `(server, hyper) -> client`.
    step: `(client, server, hyper, key, batch) -> (client, loss)`.
  """

  init: Callable[..., ClientState]
  step: Callable[..., tuple[ClientState, jax.Array]]


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


def local_sgd(
  model: core.Model,
  *,
  loss: core.Loss = core.cross_entropy,
  transform: core.Transform | None = None,
  optimizer: core.Optimizer = optax.sgd,
  proximal: bool = False,
) -> ClientUpdate:
  """Local training: optimizer steps on the mean loss of each batch.

  `w <- w - lr grad [mean_b loss(w; x_b, y_b) + mu / 2 ||w - w_server||^2]`

  Args:
    model: the model.
    loss: the loss of each example, or a batch's mean; see `core.Loss`.
    transform: applied to each training batch as stored in the bank.
    optimizer: `learning rate -> optax optimizer`; its state is new in each
      round.
    proximal: whether to add FedProx's term with weight `hyper['prox_mu']`.

  Returns:
    Functions that read `hyper['client_lr']` and, for FedProx,
    `hyper['prox_mu']`.

  Reference: McMahan et al. 2017, algorithm 1, ClientUpdate.

  >>> model = core.Model(
  ...     init=lambda key: core.Variables(jnp.zeros((1, 2)), {}),
  ...     apply=lambda v, x, key, train: (x @ v.params, v.stats))
  >>> client = local_sgd(model)
  >>> hyper = {'client_lr': 0.5}
  >>> state = client.init(model.init(jax.random.key(0)), hyper)
  >>> batch = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int),
  ...          'mask': jnp.ones(1)}
  >>> state, value = client.step(
  ...     state, state.variables, hyper, jax.random.key(1), batch)
  >>> state.variables.params
  Array([[ 0.25, -0.25]], dtype=float32)
  """

  def init(server, hyper):
    return ClientState(
      server, optimizer(hyper["client_lr"]).init(server.params)
    )

  def step(client, server, hyper, key, batch):
    transform_key, model_key = jax.random.split(key)
    batch = core.prepare(transform, batch, transform_key)

    def objective(params):
      variables = core.Variables(params, client.variables.stats)
      with checks.noted(f"a model {core.inputs_of(batch)}"):
        logits, stats = model.outputs(variables, batch["x"], model_key, True)
      losses = core.losses_of(loss, logits, batch)
      value = core.masked_mean(losses, batch["mask"])
      total = value
      if proximal:
        total += proximal_term(params, server.params, mu=hyper["prox_mu"])
      return total, (value, stats)

    (total, (value, stats)), grads = jax.value_and_grad(
      objective, has_aux=True
    )(client.variables.params)
    params, opt_state = core.descend(
      optimizer(hyper["client_lr"]),
      client.variables.params,
      client.opt_state,
      grads,
      value=total,
    )
    return ClientState(core.Variables(params, stats), opt_state), value

  return ClientUpdate(init, step)


def lane_program(
  client: ClientUpdate,
  delta_transform: Callable[[jax.Array, PyTree], PyTree] | None = None,
) -> Callable[..., ClientSums]:
  """Trains the clients of a lane one after another.

  Args:
    client: the local update.
    delta_transform: `(key, w_server - w_k) -> delta`, which client k sends
      instead; see `hetfl.Pool`.

  Returns:
    `(server, hyper, key, bank, lane, steps) -> ClientSums`, where `server` is
    the server's `Variables`, `key` the pool's key of the round, `bank` the
    examples on the device, `lane` a `LanePlan` without its first axis, and
    `steps` how many steps to run. In `OneClientLanes` nothing is added up until
    the loop is over, which on a GPU saves a copy of the sums, and a wait for
    the host, in each step. Each client starts from the server's
    variables, and step `s` of client `k` draws from
    `fold_in(fold_in(key, k), s)`, wherever it is run; `delta_transform` draws
    with `s = 2**32 - 1`, which no step has.
  """

  def train_lane(server, hyper, key, bank, lane, steps):
    lane = jax.tree.map(jnp.asarray, lane)  # NumPy arrays, if not under jit.
    start = client.init(server, hyper)

    def finish(state, sums, client_key, weight):
      add = lambda total, x: total + weight * x
      delta = optax.tree.sub(server.params, state.variables.params)
      if delta_transform is not None:
        sent_key = jax.random.fold_in(client_key, np.uint32(2**32 - 1))
        sent = delta_transform(sent_key, delta)
        output_checks.alike("delta_transform", sent, delta)
        delta = sent
      return sums._replace(
        delta=jax.tree.map(add, sums.delta, delta),
        stats=jax.tree.map(add, sums.stats, state.variables.stats),
        weight=sums.weight + weight,
      )

    def train(s, state, sums):
      """Step `s` of the lane; a padding step's state does not count."""
      client_key = jax.random.fold_in(key, lane.client[s])
      step_key = jax.random.fold_in(client_key, lane.step[s])
      batch = core.gather(bank, lane.index[s])
      state, loss = client.step(state, server, hyper, step_key, batch)
      # Padding steps hold no example.
      active = jnp.any(batch["mask"] != 0).astype(jnp.float32)
      sums = sums._replace(
        loss=sums.loss + core.Mean(jnp.where(active > 0, loss, 0), active)
      )
      return client_key, state, sums

    def body(s, carry):
      client_key, state, sums = train(s, *carry)
      ends = lane.weight[s] > 0

      def end(state, sums, *args):
        new = start, finish(state, sums, *args)
        return jax.tree.map(
          lambda a, b: jnp.where(ends, a, b), new, (state, sums)
        )

      # Lanes side by side run `end` only in steps where one ends a client.
      return jax.lax.cond(
        core.any_of_batch(ends),
        end,
        lambda state, sums, *_: (state, sums),
        state,
        sums,
        client_key,
        lane.weight[s],
      )

    def body_of_one(s, carry):
      _, state, sums = train(s, *carry)
      # The lane may end before those beside it.
      state = jax.tree.map(
        lambda a, b: jnp.where(s < lane.steps, a, b), state, carry[0]
      )
      return state, sums

    sums = ClientSums(
      delta=core.sums_like(server.params),
      stats=core.sums_like(server.stats),
      weight=jnp.zeros(()),
      loss=core.Mean.zero(),
    )
    if not isinstance(lane, OneClientLanes):
      return jax.lax.fori_loop(0, steps, body, (start, sums))[1]
    state, sums = jax.lax.fori_loop(0, steps, body_of_one, (start, sums))
    client_key = jax.random.fold_in(key, lane.client[0])
    return finish(state, sums, client_key, jnp.sum(lane.weight))

  return train_lane


def client_of_lane(
  train_lane: Callable[..., ClientSums],
) -> Callable[..., ClientUpdates]:
  """Trains the only client of a lane.

  Args:
    train_lane: a program from `lane_program`.

  Returns:
    The program of the same arguments, whose result is `ClientUpdates` without
    its first axis. If the lane does not hold exactly one client, it is NaN.
  """

  def train_client(server, hyper, key, bank, lane, steps):
    sums = train_lane(server, hyper, key, bank, lane, steps)
    alone = jnp.sum(jnp.asarray(lane.weight) > 0) == 1
    weight = jnp.where(alone, sums.weight, jnp.nan)
    mean = lambda x: x / weight
    return ClientUpdates(
      delta=jax.tree.map(mean, sums.delta),
      stats=jax.tree.map(mean, sums.stats),
      weight=weight,
      loss=sums.loss,
      client=jnp.asarray(lane.client)[0],
    )

  return train_client
