"""Rounds of clients that keep their own models: a framework for many methods.

In a round the server sends something (prototypes, a head, class scores), each
client that takes part trains its model with it and sends something back, and
the server makes its next message from that. A method is what differs: a loss,
what a client starts from and sends, and the server's aggregation; see
docs/methods.md for two that are written from scratch.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core, local
from hetfl.batches import gather, prepare
from hetfl.clients import Client, Group, put_rows, Roster, weighted_mean
from hetfl.engine import Engine, Inline, Task
from hetfl.engine.work import row
from hetfl.model import joined, parted
from hetfl.optimizers import by_name

PyTree = Any


class Sent(NamedTuple):
  """What the clients of a round send, clients that do not take part included.

  Attributes:
    value: arrays `[N, ...]`.
    weight: `float32[N]`, the plan's; 0 for clients that do not take part.
    client: `int32[N]`, their numbers among all clients.
    index: `int32[N, S, B]`, which examples of the bank the answers are of, -1
      for none; `()` without `Method.answers`.
  """

  value: PyTree
  weight: jax.Array
  client: jax.Array
  index: PyTree = ()


class Method(NamedTuple):
  """What a method adds to clients that train their own models.

  A context, where a function takes one, is a dict: what the server sent as
  `server`, the number of the `round`, `learning_rate`, the method's
  hyper-parameters by name and, for `objective`, what the client keeps as `own`,
  a `Group` without its first axis.

  Attributes:
    objective: `client -> Objective`, the loss of its batches; see
      `hetfl.local.Objective`. By default that of learning from labels.
    hyper: the method's hyper-parameters by name: a value, or a schedule `round
      -> value`, and the greatest it may be.
    server: `(key, clients' first states) -> server`, what the server sends in
      the first round; `()` by default.
    begin: `(context, kept) -> learner`, what a client starts the round from; by
      default its own learner. `Variables` are trained by a new optimizer.
    shared: `context -> variables`, of another model that a client trains in the
      round, by a new optimizer; the context holds `own`, too. The objective's
      variables are then those of `own` and `shared`, `joined`, and so is the
      learner that `end` gets; see `own_and_shared`.
    end: `(context, kept, learner, batches) -> (kept, message)`, by default the
      new learner and no message, or the shared model's variables.
    survey: `(outputs, batch) -> sums`; in place of the message a client sends
      their sum over its batches, by its trained model in inference mode. An
      example counts as often as it is in the plan: plan with `tail="short"`.
    answers: `(outputs, batch) -> arrays [B, ...]`; in place of the message a
      client sends these for each example of its S batches, `[S, B, ...]`, by
      its trained model in inference mode; 0 in empty places.
    shown: by name, `server -> array [N, ...]`, what the server knows of each of
      the bank's examples: the batches of clients have it. The server may have
      room for more examples; the bank must be the same in each round, and so
      not from `hetfl.localize`.
    extra: `(variables, client) -> pytree`, what else a client of that number
      keeps at first.
    alike: whether all clients begin with the same model, `start(key)` with the
      key that `server` gets; by default each has a key of its own.
    aggregate: `(context, sent, key) -> server`, from `Sent`; cast to the types
      of the server's last.
    measured: names of the metrics, `loss` and what the objective measures.
  """

  objective: Callable[[Client], local.Objective] = local.supervised
  hyper: Mapping[str, tuple[Any, float]] = MappingProxyType({})
  server: Callable[..., PyTree] | None = None
  begin: Callable[..., local.Learner | core.Variables] | None = None
  shared: Callable[[Mapping[str, Any]], core.Variables] | None = None
  end: Callable[..., tuple[Group, PyTree]] | None = None
  survey: Callable[[PyTree, core.Batch], PyTree] | None = None
  answers: Callable[[PyTree, core.Batch], PyTree] | None = None
  shown: Mapping[str, Callable[[PyTree], jax.Array]] = MappingProxyType({})
  extra: Callable[..., PyTree] = lambda variables, client: ()
  alike: bool = False
  aggregate: Callable[..., PyTree] | None = None
  measured: tuple[str, ...] = ("loss",)


def personal(
  clients: Sequence[Client],
  method: Method | None = None,
  *,
  learning_rate: float | jax.Array | core.Schedule = 0.01,
  optimizer: core.Optimizer = optax.sgd,
  engine: Engine | None = None,
) -> core.Algorithm:
  """Rounds of clients that keep their models, as a method says.

  Args:
    clients: K clients; the plan says which of them take part in a round.
    method: what they do. By default each learns alone.
    learning_rate: of clients without a rate of their own; a value, which trials
      may vary, or a schedule `round -> rate`.
    optimizer: `learning rate -> optax optimizer`, likewise.
    engine: where the work runs, by default `Inline()`; see `hetfl.engine`.

  Returns:
    The algorithm. Its `init` takes a key; its `step` takes a plan with batches
    and data with banks on the device, by the names of the clients' banks, whose
    clients are numbered in the order of `clients`. Its state's `clients` holds
    a `Group` for each kind of client. Its metrics are `loss`, a mean over
    steps, and means over examples of what the method measures.

  Raises:
    ValueError: a value is out of its range. A schedule that leaves its range
      later gives NaN in that round.

  Two clients learn that the only image is of class 0; the second has twice the
  rate.

  >>> from hetfl import ClientPopulation, plan_round
  >>> linear = core.Model(
  ...     lambda key: core.Variables(jnp.zeros((1, 2)), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> held = ClientPopulation.from_lists(bank, [[0], [0]])
  >>> plan = plan_round({'train': held}, seed=0, round=1, batch_size=1)
  >>> algorithm = personal(
  ...     [Client(linear), Client(linear, learning_rate=2.)], learning_rate=1.)
  >>> state, metrics = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan, {'train': bank})
  >>> [float(group.learner.params[0, 0, 0]) for group in state.clients]
  [0.5, 1.0]
  """
  roster = Roster(clients)
  engine, method = engine or Inline(), method or Method()
  _check(method)
  hyper = {"learning_rate": (learning_rate, np.inf), **method.hyper}
  one_round = round_step(roster, method, hyper, optimizer, engine)

  def init(key, *, rows=None):
    init_key, server_key, run_key = jax.random.split(key, 3)

    def start(client, group):
      def one(k):
        own_key = jax.random.fold_in(init_key, k)
        variables = client.model.start(server_key if method.alike else own_key)
        own = client.optimizer or optimizer
        extra = core.unshared(method.extra(variables, k), variables)
        return local.Learner.start(variables, own), extra

      return jax.vmap(one)(group)

    kept = roster.start(start, rows)
    server = () if method.server is None else method.server(server_key, kept)
    server = core.unshared(server, kept)
    values = {name: x for name, (x, _) in hyper.items() if not callable(x)}
    return core.State(run_key, core.hyper(**values), server, kept)

  def step(state, plan, data):
    key = jax.random.fold_in(state.key, plan.round)
    return one_round(state, plan, data, key)

  return core.Algorithm(init, step)


def round_step(
  roster: Roster,
  method: Method,
  hyper: Mapping[str, tuple[Any, float]],
  optimizer: core.Optimizer,
  engine: Engine,
  *,
  in_turn: Callable[[Callable], Callable] | None = None,
) -> Callable[..., tuple[core.State, core.Metrics]]:
  """The step of `personal`, with the round's key as an argument.

  Args:
    roster: the clients.
    method: what they do.
    hyper: all hyper-parameters, as `core.scheduled` takes them.
    optimizer: of clients without one of their own.
    engine: where the work runs.
    in_turn: turns a step of both models at once into steps in turn.

  Returns:
    `(state, plan, data, key) -> (state, metrics)`.

  Raises:
    ValueError: as `personal`.
  """
  for name, (value, high) in hyper.items():
    core.check_schedule(name, value, 1, high=high)
  checks.optimizers(optimizer=optimizer)
  updates = [
    _update(client, method, optimizer, in_turn) for client in roster.first
  ]
  heard = method.survey or method.answers
  surveys = [_survey(client, method) for client in roster.first if heard]
  if method.shown or method.answers:
    banks = sorted({client.bank for client in roster.first})
    if len(banks) > 1:
      raise ValueError(f"clients: have banks {banks}; the method takes one")

  def with_shown(server, data):
    """The data, with what the server knows of each example."""
    if not method.shown:
      return data
    bank = checks.bank(data, banks[0])
    number, known = checks.num_examples(bank), {}
    for name, of in method.shown.items():
      known[name] = of(server)[:number]
      if len(known[name]) < number:
        raise ValueError(
          f"the server has {name!r} of {len(known[name])} examples, but bank"
          f" {banks[0]!r} has {number}"
        )
    return {**data, banks[0]: {**bank, **known}}

  def step(state, plan, data, key):
    data = with_shown(state.server, data)
    context = {"server": state.server, "round": plan.round}
    context |= core.scheduled(hyper, state, plan.round)
    trained = () if method.shared is None else state.server
    turns = roster.turns(state.clients, plan, data, trained)
    works = [
      local.work(update, context, key, turn.bank, turn.kept, turn.batches)
      for update, turn in zip(updates, turns)
    ]
    kept, messages, means = zip(*engine.run(*works))
    if heard:
      models = [group.learner.variables for group in kept]
      works = [
        local.work(survey, (), key, turn.bank, model, turn.batches)
        for survey, turn, model in zip(surveys, turns, models)
      ]
      messages = engine.run(*works)
    rows = [turn.rows for turn in turns]
    clients = tuple(map(put_rows, state.clients, rows, kept))
    server = state.server
    if method.aggregate is not None:
      sent = [
        Sent(
          message,
          turn.batches.weight,
          turn.batches.client,
          turn.batches.index if method.answers else (),
        )
        for message, turn in zip(messages, turns)
      ]
      server_key = jax.random.fold_in(key, np.uint32(2**31))
      server = aggregate(context, sent, server_key)
    elif jax.tree.leaves(messages):
      raise ValueError(
        "Method.aggregate: clients send something, and no server takes it: give"
        " one, such as mean_sent"
      )
    total = lambda *of_groups: sum(map(jnp.sum, of_groups))
    metrics = jax.tree.map(total, *means)
    return state.replace(server=server, clients=clients), metrics

  @jax.jit
  def aggregate(context, of_groups, key):
    one, *others = [row(sent.value, 0) for sent in of_groups]
    for other in others:
      checks.alike("messages of clients with unlike models", other, one)
    together = lambda *leaves: jnp.concatenate(leaves)
    sent = jax.tree.map(together, *of_groups)
    new = method.aggregate(context, sent, key)
    last, anyone = context["server"], jnp.sum(sent.weight) > 0
    silent = not jax.tree.leaves(sent.value)
    of = ", of clients that send nothing (see Method.end)," if silent else ""
    checks.alike(f"Method.aggregate{of}", new, last)
    return optax.tree.where(anyone, core.as_types(new, last), last)

  return step


_ARGUMENTS = {
  "objective": ("client",),
  "server": ("key", "kept"),
  "begin": ("context", "kept"),
  "shared": ("context",),
  "end": ("context", "kept", "learner", "batches"),
  "survey": ("outputs", "batch"),
  "answers": ("outputs", "batch"),
  "extra": ("variables", "client"),
  "aggregate": ("context", "sent", "key"),
}


def _check(method: Method) -> None:
  """Raises a `ValueError` if a method's functions take other arguments."""
  if not isinstance(method, Method):
    raise ValueError(f"method={method!r}: give a Method(...)")
  for name, arguments in _ARGUMENTS.items():
    if (function := getattr(method, name)) is not None:
      checks.takes(f"Method.{name}", function, *arguments)
  for name, pair in method.hyper.items():
    if name in ("server", "round", "own", "learning_rate"):
      raise ValueError(f"Method.hyper: contexts hold another {name!r}")
    if not isinstance(pair, tuple) or len(pair) != 2:
      raise ValueError(
        f"Method.hyper: {name!r} is {pair!r}: give a pair, the value and the"
        " greatest that it may be"
      )
  if method.aggregate is not None and method.server is None:
    raise ValueError(
      "Method.aggregate: needs Method.server, what the server sends in the"
      " first round, of the same shapes"
    )


def _update(client, method, optimizer, in_turn) -> Task:
  """A client's training, and what it sends."""

  def own_optimizer(context):
    rate = context["learning_rate"]
    own = rate if client.learning_rate is None else client.learning_rate
    return (client.optimizer or optimizer)(own)

  def optimizer_of(context):
    own = own_optimizer(context)
    if method.shared is None:
      return own
    shared = optimizer(context["learning_rate"])
    return by_name({"own": own, "shared": shared})

  def begin(context, kept):
    learner = kept.learner
    if method.begin is not None:
      learner = method.begin(context, kept)
      if isinstance(learner, core.Variables):
        opt_state = own_optimizer(context).init(learner.params)
        learner = local.Learner(learner, opt_state)
      if not isinstance(learner, local.Learner):
        raise ValueError(
          "Method.begin: must return a Learner or Variables, not a"
          f" {type(learner).__name__}"
        )
      checks.alike("Method.begin", learner.params, kept.learner.params)
      # Such as a head of float32 for a client of bfloat16.
      params = core.as_types(learner.params, kept.learner.params)
      variables = learner.variables._replace(params=params)
      learner = learner._replace(variables=variables)
    if method.shared is None:
      return learner
    shared = method.shared({**context, "own": kept})
    states = optimizer_of(context).init({"shared": shared.params})
    return local.Learner(
      joined({"own": learner.variables, "shared": shared}),
      {"own": learner.opt_state, **states},
    )

  def end(context, kept, learner, metrics, batches, key):
    del key
    if method.end is not None:
      sent = method.end(context, kept, learner, batches)
      if not isinstance(sent, tuple) or not isinstance(sent[0], Group):
        raise ValueError(
          "Method.end: must return what is kept, and a message: such as"
          " kept.replace(learner=learner), ()"
        )
      new, message = sent
    elif method.shared is not None:
      own, message = own_and_shared(learner)
      new = kept.replace(learner=own)
    else:
      new, message = kept.replace(learner=learner), ()
    checks.alike("Method.end", new, kept)
    # Those that only fill up the rows keep what they had before `begin`.
    new = optax.tree.where(batches.steps > 0, core.as_types(new, kept), kept)
    return new, message, metrics

  def penalty(params, context):  # Of the client's own model.
    del context
    own = params if method.shared is None else params.get("own")
    # 0 in turns while the shared model steps alone.
    return 0.0 if own is None else client.l2 * client.penalty(own)

  objective = method.objective(client)
  arguments = "variables", "batch", "key", "context"
  checks.takes("Method.objective(client)", objective, *arguments)
  step = local.step_on(
    objective,
    optimizer_of,
    microbatch=client.microbatch,
    penalty=client.penalty and penalty,
  )
  return local.training(
    in_turn(step) if in_turn else step,
    begin,
    end,
    transform=client.transform,
    keep=method.shown,
    measured=method.measured,
  )


def own_and_shared(
  learner: local.Learner,
) -> tuple[local.Learner, core.Variables]:
  """A client's own learner and the shared model, out of a learner of both."""
  parts = parted(learner.variables)
  return local.Learner(parts["own"], learner.opt_state["own"]), parts["shared"]


def _survey(client, method) -> Task:
  """What a client says of its batches: sums, or answers batch by batch."""

  def one(context, key, bank, row, s):
    del context
    variables, batches = row
    # The transform draws what it drew in training: `local.training`.
    step_key = jax.random.fold_in(jax.random.fold_in(key, batches.client), s)
    batch_key, _ = jax.random.split(step_key)
    stored = gather(bank, batches.index[s])
    batch = prepare(client.transform, stored, batch_key, keep=method.shown)
    outputs, _ = client.outputs(variables, batch)
    if method.survey is not None:
      return method.survey(outputs, batch)  # Empty places have mask 0.
    there = lambda a: batch["mask"].reshape(-1, *[1] * (a.ndim - 1)) > 0
    # Empty places may hold NaN.
    hide = lambda a: jnp.where(there(a), a, 0)
    return jax.tree.map(hide, method.answers(outputs, batch))

  if method.survey is not None:
    return Task.sums(one)
  return Task.stacked(one, lambda row: len(row[1].index))


def mean_sent(context: Any, sent: Sent, key: jax.Array) -> PyTree:
  """As `Method.aggregate`: the mean of what clients send, by their weights."""
  del context, key
  return weighted_mean(sent.value, sent.weight)


def one_model(clients: Sequence[Client]) -> core.Model:
  """The model of all clients; a `ValueError` if they have several."""
  for client in clients:
    if client.model != clients[0].model:
      raise ValueError(
        f"{client.label}: its model is not the first client's: the server's is"
        " the mean of the clients', which need one model"
      )
  return clients[0].model
