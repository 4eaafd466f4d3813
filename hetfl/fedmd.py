"""FedMD: parties with models of their own agree on class scores.

Each party trains its model on public data, then on its few private examples
(`fit`); in every round of the collaboration (`fedmd`) the parties say what
they think of some public examples, and each learns the mean of what was said.
Neither parameters nor private examples leave a party.

Reference: Li & Wang 2019, "FedMD: Heterogenous Federated Learning via Model
Distillation", algorithm 1. What the paper leaves open is as in the released
code, github.com/diogenes0319/FedMD_clean.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import client as client_lib
from hetfl import core, population
from hetfl import distill as distill_lib
from hetfl import engine as engine_lib
from hetfl import evaluate as evaluate_lib
from hetfl.data import partition

PyTree = Any
Transform = Callable[[core.Batch], core.Batch]
# Keras's defaults, which the released code trains with.
keras_adam = functools.partial(optax.adam, b1=0.9, b2=0.999, eps=1e-7)


@dataclasses.dataclass(frozen=True, eq=False)
class Party:
  """A participant and the model it designed; its configuration.

  Attributes:
    name: its name in metrics and results.
    model: the model f_k.
    learning_rate: of all its training.
    l2: weight of `penalty` in every loss, that of Digest too.
    penalty: parameters to a scalar, such as the head's `sum(w^2)`; `None`:
      nothing decays.
    optimizer: a learning rate to an optax optimizer. Departure: optax's Adam
      adds epsilon after the correction of the bias, Keras's before.
  """

  name: str
  model: core.Model
  learning_rate: float | jax.Array = 1e-3
  l2: float | jax.Array = 1e-3
  penalty: Callable[[PyTree], jax.Array] | None = None
  optimizer: client_lib.Optimizer = keras_adam

  def hyper(self) -> dict[str, jax.Array]:
    """The values that trials may vary: `learning_rate` and `l2`, scalars.

    Raises:
      ValueError: if a value is out of its range.
    """
    values = {"learning_rate": self.learning_rate, "l2": self.l2}
    client_lib.check_hyper(
      values, learning_rate=(0, float("inf")), l2=(0, float("inf"))
    )
    return {name: jnp.asarray(v, jnp.float32) for name, v in values.items()}

  def trainer(
    self, transform: Transform | None, loss: core.Loss
  ) -> Callable[..., tuple["Trained", core.Mean]]:
    """The program that makes optimizer steps on a bank's examples.

    `w <- Adam(w, grad [mean_b loss(f(x_b; w), b) + l2 penalty(w)])`, in
    training mode: with dropout, and batch statistics updated.

    Args:
      transform: what is done to a batch as it lies in the bank.
      loss: the loss of each example.

    Returns:
      `(trained, hyper, key, bank, index [S, B], more) -> (trained, loss)`,
      where `more` holds arrays `[S, B, ...]` that join the batches, and the
      loss is the mean over the steps, without the penalty.
    """

    def program(trained, hyper, key, bank, index, more):
      optimizer = self.optimizer(hyper["learning_rate"])

      def step(trained, row):
        s, positions, more = row
        batch = core.gather(bank, positions)
        if transform is not None:
          batch = transform(batch)
        batch = {**batch, **more}

        def objective(params):
          variables = trained.variables._replace(params=params)
          logits, stats = self.model.apply(
            variables, batch["x"], jax.random.fold_in(key, s), True
          )
          value = jnp.mean(loss(logits, batch))
          total = value
          if self.penalty is not None:
            total += hyper["l2"] * self.penalty(params)
          return total, (value, stats)

        params = trained.variables.params
        grads, (value, stats) = jax.grad(objective, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, trained.opt_state, params)
        params = optax.apply_updates(params, updates)
        return Trained(core.Variables(params, stats), opt_state), value

      steps = jnp.arange(len(index))
      trained, values = jax.lax.scan(step, trained, (steps, index, more))
      count = jnp.asarray(len(index), jnp.float32)
      return trained, core.Mean(jnp.sum(values), count)

    return program

  def start(self, variables: core.Variables) -> "Trained":
    """The model with a fresh optimizer."""
    optimizer = self.optimizer(self.hyper()["learning_rate"])
    return Trained(variables, optimizer.init(variables.params))


class Trained(NamedTuple):
  """A model and the optimizer that trains it.

  Attributes:
    variables: the model.
    opt_state: the optimizer's state.
  """

  variables: core.Variables
  opt_state: PyTree


# --- Training to convergence: line 1 of algorithm 1, and its upper bound ----


@flax.struct.dataclass
class Learner:
  """A party that trains until it gets no better.

  Attributes:
    trained: the model and its optimizer.
    hyper: `learning_rate`, `l2`: `float32[]`.
    accuracy: `float32[]`, on the stopping set after the last epoch.
    best: `float32[]`, the best before it.
    wait: `int32[]`, epochs since the best.
    epochs: `int32[]`, epochs trained.
  """

  trained: Trained
  hyper: dict[str, jax.Array]
  accuracy: jax.Array
  best: jax.Array
  wait: jax.Array
  epochs: jax.Array


@flax.struct.dataclass
class FitState:
  """The state of `fit`.

  Attributes:
    parties: P `Learner`s.
    key: the run's key.
  """

  parties: tuple[Learner, ...]
  key: jax.Array


class FitPlan(NamedTuple):
  """One epoch of every party.

  Attributes:
    round: `int32[]`, the number of the epoch, from 1.
    batches: P arrays `int32[S_k, B_k]`, positions in each party's bank.
  """

  round: np.ndarray
  batches: tuple[np.ndarray, ...]


def fit(
  parties: Sequence[Party],
  *,
  transform: Transform | None = None,
  patience: int = 3,
  min_delta: float = 1e-3,
  eval_batch_size: int = 40,
  engine: engine_lib.Engine | None = None,
) -> core.Algorithm:
  """Trains each party by itself, to convergence; a step is an epoch.

  A party stops, and keeps what its last epoch gave, when its accuracy on the
  stopping set has not risen by more than `min_delta` above its best for
  `patience` epochs.

  Args:
    parties: P parties.
    transform: what is done to a batch as it lies in the bank.
    patience: epochs without progress after which a party stops.
    min_delta: how much is progress, as a share.
    eval_batch_size: examples evaluated at once; changes speed only.
    engine: where the work runs; `Inline()` by default. With `Threads()` the
      step dispatches programs itself and must not be traced.

  Returns:
    The algorithm. Its `init` takes a key and, to go on from models that there
    are, P `Variables`, whose optimizers begin anew. Its `step` takes a
    `FitPlan` and `{'train': P banks, 'stopping': Subset or None}`, the banks on
    the device; without a stopping set no party stops.

  Raises:
    ValueError: if a value is out of its range.

  Reference: Li & Wang 2019, algorithm 1, "Transfer learning", and table 4's
  training on pooled data; Keras's `EarlyStopping` without
  `restore_best_weights`, as in the released code.
  """
  parties = _checked(parties)
  engine = engine or engine_lib.Inline()
  client_lib.check_hyper(
    {"patience": patience, "min_delta": min_delta},
    patience=(1, float("inf")),
    min_delta=(0, 1),
  )
  epochs = [
    _epoch_program(party, transform, min_delta, eval_batch_size)
    for party in parties
  ]

  def init(key, variables=None):
    variables = variables or _fresh(parties, key)
    zero = jnp.zeros((), jnp.int32)
    return FitState(
      tuple(
        Learner(
          trained=party.start(v),
          hyper=party.hyper(),
          accuracy=jnp.zeros(()),
          best=jnp.full((), -jnp.inf),
          wait=zero,
          epochs=zero,
        )
        for party, v in zip(parties, variables)
      ),
      key,
    )

  def step(state, plan, data):
    key = jax.random.fold_in(state.key, plan.round)
    results = engine.run(
      *(
        engine_lib.Call(
          epoch,
          (
            learner,
            jax.random.fold_in(key, k),
            bank,
            batches,
            data["stopping"],
          ),
          learner.wait < patience,
          _stopped,
        )
        for k, (epoch, learner, bank, batches) in enumerate(
          zip(epochs, state.parties, data["train"], plan.batches, strict=True)
        )
      )
    )
    learners, losses = zip(*results)
    metrics = {
      f"{party.name}/loss": loss for party, loss in zip(parties, losses)
    }
    return state.replace(parties=learners), metrics

  return core.Algorithm(init, step)


def _epoch_program(party, transform, min_delta, batch_size):
  """One epoch of a party, and what it says of going on."""
  train = party.trainer(transform, core.cross_entropy)
  measure = evaluate_lib.lane_program(
    party.model, transform or (lambda batch: batch)
  )

  def program(learner, key, bank, batches, stopping):
    trained, loss = train(
      learner.trained, learner.hyper, key, bank, batches, {}
    )
    accuracy, best, wait = learner.accuracy, learner.best, learner.wait
    if stopping is not None:
      rows = _rows(stopping.index, batch_size)
      total, count = measure(trained.variables, stopping.bank, rows, len(rows))[
        "accuracy"
      ]
      accuracy = total / count
      better = accuracy - min_delta > best
      best = jnp.where(better, accuracy, best)
      wait = jnp.where(better, 0, wait + 1)
    learner = learner.replace(
      trained=trained,
      accuracy=accuracy,
      best=best,
      wait=wait,
      epochs=learner.epochs + 1,
    )
    return learner, loss

  return program


def _stopped(learner, *_):
  return learner, core.Mean(jnp.zeros(()), jnp.zeros(()))


# --- The collaboration ------------------------------------------------------


class Translator(NamedTuple):
  """What parties tell each other, and how far they are from the consensus.

  Attributes:
    scores: `(logits [..., C], temperature) -> float[..., C]`.
    loss: `(logits [B, C], consensus [B, C], temperature) -> float[B]`.
  """

  scores: Callable[[jax.Array, jax.Array], jax.Array]
  loss: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def absolute_error(logits: jax.Array, consensus: jax.Array) -> jax.Array:
  """`mean_c |f_c - f~_c|` of each example.

  Args:
    logits: `float[B, C]`.
    consensus: `float[B, C]`.

  Returns:
    `float[B]`.

  Reference: the released code's `mean_absolute_error`, over all outputs; the
  paper gives no loss.

  >>> float(absolute_error(jnp.array([[1., -2.]]), jnp.array([[0., 0.]]))[0])
  1.5
  """
  return jnp.mean(jnp.abs(logits - consensus), axis=-1)


def squared_error(logits: jax.Array, consensus: jax.Array) -> jax.Array:
  """`mean_c (f_c - f~_c)^2` of each example.

  Args:
    logits: `float[B, C]`.
    consensus: `float[B, C]`.

  Returns:
    `float[B]`.

  >>> float(squared_error(jnp.array([[1., -2.]]), jnp.array([[0., 0.]]))[0])
  2.5
  """
  return jnp.mean((logits - consensus) ** 2, axis=-1)


def _tempered_divergence(logits, consensus, temperature):
  return distill_lib.kl_divergence(consensus, logits / temperature)


TRANSLATORS = {
  "mae": Translator(lambda z, t: z, lambda z, f, t: absolute_error(z, f)),
  "mse": Translator(lambda z, t: z, lambda z, f, t: squared_error(z, f)),
  "kl": Translator(distill_lib.tempered_softmax, _tempered_divergence),
}


def consensus(scores: Sequence[jax.Array], weights: jax.Array) -> jax.Array:
  """`f~ = sum_k c_k f_k / sum_k c_k`.

  Args:
    scores: P arrays `float[N, C]`.
    weights: c_k, `float[P]`, not negative; only their ratios count.

  Returns:
    `float[N, C]`.

  Reference: Li & Wang 2019, algorithm 1, "Aggregate", and supplement, method
  4, whose weights are 1 / P but for two weak models.

  >>> f = [jnp.array([[0., 4.]]), jnp.array([[4., 0.]])]
  >>> consensus(f, jnp.array([3., 1.])).tolist()
  [[1.0, 3.0]]
  """
  weights = weights / jnp.sum(weights)
  return sum(weights[k] * f for k, f in enumerate(scores))


@flax.struct.dataclass
class PartyState:
  """What a party holds between rounds.

  Attributes:
    variables: its model.
    digest_opt_state: Digest's optimizer, which begins with the collaboration.
    revisit_opt_state: Revisit's, which goes on from private training.
    hyper: `learning_rate`, `l2`: `float32[]`.
  """

  variables: core.Variables
  digest_opt_state: PyTree
  revisit_opt_state: PyTree
  hyper: dict[str, jax.Array]


@flax.struct.dataclass
class FedMDState:
  """The state of `fedmd`.

  Attributes:
    parties: P `PartyState`s.
    key: the run's key.
    hyper: `consensus_weights`: `float32[P]`; `temperature`: `float32[]`.
  """

  parties: tuple[PartyState, ...]
  key: jax.Array
  hyper: dict[str, jax.Array]


class FedMDPlan(NamedTuple):
  """What one round does.

  Attributes:
    round: `int32[]`, the number of the round, from 1.
    subset: `int32[N]`, the round's public examples d_j, as positions in the
      public bank.
    digest: `int32[P, S, B]`, each party's batches, as positions in `subset`.
    revisit: P arrays `int32[S_k, B_k]`, each party's batches, as positions in
      its private bank.
  """

  round: np.ndarray
  subset: np.ndarray
  digest: np.ndarray
  revisit: tuple[np.ndarray, ...]


def fedmd(
  parties: Sequence[Party],
  *,
  digest_loss: str = "mae",
  consensus_weights: Sequence[float] | jax.Array | None = None,
  temperature: float | jax.Array = 1.0,
  public_transform: Transform | None = None,
  private_transform: Transform | None = None,
  eval_batch_size: int = 40,
  engine: engine_lib.Engine | None = None,
) -> core.Algorithm:
  """FedMD's rounds: Communicate, Aggregate, Distribute, Digest, Revisit.

  `f~ = sum_k c_k f_k` on the round's public examples, from all models as the
  round found them; then each party takes epochs towards `f~` on those
  examples and epochs on its own. Both optimizers of a party persist.

  Args:
    parties: P parties, whose models end in as many outputs.
    digest_loss: 'mae' or 'mse' between logits, or 'kl' from the mean of the
      tempered softmaxes. Like every loss here, without a factor T^2.
    consensus_weights: c_k, not negative; only their ratios count; by default
      equal.
    temperature: T of 'kl'.
    public_transform: what is done to a public batch as it lies in its bank.
    private_transform: the same for private batches.
    eval_batch_size: examples at once in Communicate; changes speed only.
    engine: where the work runs; `Inline()` by default. With `Threads()` the
      step dispatches programs itself and must not be traced.

  Returns:
    The algorithm. Its `init` takes a key and, to start from parties that have
    gone through transfer learning, P `Trained`, whose optimizers go on in
    Revisit. Its `step` takes a `FedMDPlan` and `{'public': bank, 'private': P
    banks}`, on the device.

  Raises:
    ValueError: if a value is out of its range.

  Reference: Li & Wang 2019, algorithm 1; the paper gives neither the loss, nor
  epochs, nor batch sizes: those of `plan_fedmd` are the released code's.
  Departures: see `shuffled_epochs` and `Party.optimizer`.
  """
  parties = _checked(parties)
  engine = engine or engine_lib.Inline()
  if digest_loss not in TRANSLATORS:
    raise ValueError(
      f"digest_loss={digest_loss}: choose from {', '.join(TRANSLATORS)}"
    )
  translator = TRANSLATORS[digest_loss]
  weights = _weights(consensus_weights, len(parties))
  client_lib.check_hyper(
    {"temperature": temperature}, temperature=(1e-6, float("inf"))
  )
  speak = [
    speak_program(party, translator, public_transform, eval_batch_size)
    for party in parties
  ]
  learn = [
    learn_program(party, translator, public_transform, private_transform)
    for party in parties
  ]

  def init(key, trained=None):
    trained = trained or [
      party.start(v) for party, v in zip(parties, _fresh(parties, key))
    ]
    return FedMDState(
      tuple(
        PartyState(
          variables=t.variables,
          digest_opt_state=party.start(t.variables).opt_state,
          revisit_opt_state=t.opt_state,
          hyper=party.hyper(),
        )
        for party, t in zip(parties, trained)
      ),
      key,
      {
        "consensus_weights": weights,
        "temperature": jnp.asarray(temperature, jnp.float32),
      },
    )

  def step(state, plan, data):
    key = jax.random.fold_in(state.key, plan.round)
    # Communicate: each party computes its scores on the public subset.
    scores = engine.run(
      *(
        engine_lib.Call(
          program,
          (
            party.variables,
            state.hyper["temperature"],
            data["public"],
            plan.subset,
          ),
        )
        for program, party in zip(speak, state.parties)
      )
    )
    # Aggregate: the server computes the consensus, before any party moves.
    (agreed,) = engine.run(
      engine_lib.Call(consensus, (scores, state.hyper["consensus_weights"]))
    )
    # Distribute, Digest and Revisit: each party by itself.
    results = engine.run(
      *(
        engine_lib.Call(
          program,
          (
            party,
            state.hyper["temperature"],
            jax.random.fold_in(key, k),
            data["public"],
            agreed,
            plan.subset,
            digest,
            private,
            revisit,
          ),
        )
        for k, (program, party, digest, private, revisit) in enumerate(
          zip(
            learn,
            state.parties,
            plan.digest,
            data["private"],
            plan.revisit,
            strict=True,
          )
        )
      )
    )
    moved, digested, revisited = zip(*results)
    metrics = {}
    for party, a, b in zip(parties, digested, revisited):
      metrics |= {f"{party.name}/digest_loss": a}
      metrics |= {f"{party.name}/revisit_loss": b}
    return state.replace(parties=moved), metrics

  return core.Algorithm(init, step)


def speak_program(
  party: Party,
  translator: Translator,
  transform: Transform | None,
  batch_size: int,
) -> Callable[..., jax.Array]:
  """What a party says of some public examples, in inference mode.

  Args:
    party: the party.
    translator: how it says it.
    transform: what is done to a batch as it lies in the bank.
    batch_size: examples at once; changes speed only.

  Returns:
    The program `(variables, temperature, bank, index [N]) -> float[N, C]`.
  """

  def program(variables, temperature, bank, subset):
    def speak(index):
      batch = core.gather(bank, index)
      if transform is not None:
        batch = transform(batch)
      logits, _ = party.model.apply(variables, batch["x"], None, False)
      return translator.scores(logits, temperature)

    scores = jax.lax.map(speak, _rows(subset, batch_size))
    return scores.reshape(-1, scores.shape[-1])[: len(subset)]

  return program


def learn_program(
  party: Party,
  translator: Translator,
  public_transform: Transform | None,
  private_transform: Transform | None,
) -> Callable[..., tuple["PartyState", core.Mean, core.Mean]]:
  """A party's Digest and Revisit.

  Args:
    party: the party.
    translator: gives the loss of Digest.
    public_transform: what is done to a public batch as it lies in its bank.
    private_transform: the same for private batches.

  Returns:
    The program `(state, temperature, key, public, consensus [N, C], subset
    [N], digest [S, B], private, revisit [S', B']) -> (state, loss of Digest,
    loss of Revisit)`, where `digest` holds positions in `subset`.
  """

  def towards(logits, batch):
    return translator.loss(logits, batch["consensus"], batch["temperature"])

  digest = party.trainer(public_transform, towards)
  revisit = party.trainer(private_transform, core.cross_entropy)

  def program(
    state, temperature, key, public, agreed, subset, digest_rows, private, rows
  ):
    digest_key, revisit_key = jax.random.split(key)
    # Digest: approach the consensus on the public subset.
    more = {
      "consensus": agreed[digest_rows],
      "temperature": jnp.broadcast_to(temperature, (len(digest_rows),)),
    }
    (variables, digest_opt_state), digested = digest(
      Trained(state.variables, state.digest_opt_state),
      state.hyper,
      digest_key,
      public,
      jnp.asarray(subset)[digest_rows],
      more,
    )
    # Revisit: train on its own private data for a few epochs.
    (variables, revisit_opt_state), revisited = revisit(
      Trained(variables, state.revisit_opt_state),
      state.hyper,
      revisit_key,
      private,
      rows,
      {},
    )
    state = state.replace(
      variables=variables,
      digest_opt_state=digest_opt_state,
      revisit_opt_state=revisit_opt_state,
    )
    return state, digested, revisited

  return program


def bytes_per_round(
  subset: int, num_classes: int, parameters: int
) -> dict[str, int]:
  """What a party sends and receives in a round, in bytes of float32 and int32.

  It receives the positions of the round's public examples and the consensus
  on them, and sends its scores.

  Args:
    subset: N, public examples of a round.
    num_classes: C.
    parameters: number of the party's parameters.

  Returns:
    `sent`, `received`, and `weights`, what sending the parameters, and again
    what receiving them, would take.

  >>> bytes_per_round(5000, 16, 989440)
  {'sent': 320000, 'received': 340000, 'weights': 3957760}
  """
  scores = 4 * subset * num_classes
  return {
    "sent": scores,
    "received": scores + 4 * subset,
    "weights": 4 * parameters,
  }


# --- Plans ------------------------------------------------------------------

_SUBSET, _DIGEST, _REVISIT, _FIT = range(101, 105)  # streams of random numbers


def shuffled_epochs(
  positions: np.ndarray,
  *,
  seed: int | Sequence[int],
  batch_size: int,
  epochs: int = 1,
) -> np.ndarray:
  """Shuffles examples into batches, epoch after epoch.

  A last batch that would be short is filled up with the epoch's first
  examples, so that all batches are alike: batch normalisation could not tell
  empty places from images. Departure: Keras's last batch is short.

  Args:
    positions: `int[n]`, the examples.
    seed: whole numbers that fix the result.
    batch_size: B; n if that is less.
    epochs: E.

  Returns:
    `int32[E ceil(n / B), B]`.

  >>> shuffled_epochs(np.array([5, 6, 7]), seed=0, batch_size=2).shape
  (2, 2)
  """
  positions = np.asarray(positions, np.int32)
  size = min(batch_size, len(positions))
  steps = -(-len(positions) // size)
  rng = np.random.default_rng(seed)
  batches = []
  for _ in range(epochs):
    order = rng.permutation(positions)
    order = np.concatenate([order, order])[: steps * size]
    batches.append(order.reshape(steps, size))
  return np.concatenate(batches)


def plan_fit(
  examples: Sequence[np.ndarray],
  *,
  seed: int,
  phase: int,
  round: int,
  batch_size: int,
) -> FitPlan:
  """One epoch of every party over its examples, in an order of its own.

  Args:
    examples: P arrays, each party's positions in its bank.
    seed: the run's seed.
    phase: tells apart the phases of a run.
    round: the number of the epoch.
    batch_size: B, at most.

  Returns:
    The plan; the same for the same arguments.

  >>> plan = plan_fit(
  ...     [np.arange(4), np.arange(9)], seed=0, phase=0, round=1, batch_size=5)
  >>> [batches.shape for batches in plan.batches]
  [(1, 4), (2, 5)]
  """
  return FitPlan(
    np.int32(round),
    tuple(
      shuffled_epochs(
        positions,
        seed=[_FIT, seed, phase, round, k],
        batch_size=batch_size,
      )
      for k, positions in enumerate(examples)
    ),
  )


def plan_fedmd(
  public: population.Subset,
  private: Sequence[np.ndarray],
  *,
  seed: int,
  round: int,
  subset: int = 5000,
  digest_batch_size: int = 256,
  digest_epochs: int = 1,
  revisit_batch_size: int = 5,
  revisit_epochs: int = 2,
) -> FedMDPlan:
  """Draws a round's public subset and orders everybody's examples.

  The subset is stratified: its labels have the shares of the public set's.

  Args:
    public: the public examples; the bank has `y`.
    private: P arrays, each party's positions in its bank.
    seed: the run's seed.
    round: the number of the round.
    subset: N, at most as many as there are.
    digest_batch_size: B of Digest, at most.
    digest_epochs: epochs over the subset.
    revisit_batch_size: B of Revisit, at most.
    revisit_epochs: epochs over the own examples.

  Returns:
    The plan; the same for the same arguments.

  Raises:
    ValueError: if the subset is larger than the public set.

  Reference: Li & Wang 2019, supplement, method 2; the released code draws
  with scikit-learn's `StratifiedShuffleSplit`.

  >>> public = population.Subset.whole({'y': np.arange(12) // 6})
  >>> plan = plan_fedmd(public, [np.arange(3)], seed=0, round=1, subset=4,
  ...                   digest_batch_size=2)
  >>> sorted((plan.subset // 6).tolist()), plan.digest.shape
  ([0, 0, 1, 1], (1, 2, 2))
  """
  drawn = partition.stratified(
    np.asarray(public.bank["y"])[public.index],
    size=subset,
    seed=[_SUBSET, seed, round],
  )
  return FedMDPlan(
    round=np.int32(round),
    subset=np.asarray(public.index, np.int32)[drawn],
    digest=np.stack(
      [
        shuffled_epochs(
          np.arange(subset),
          seed=[_DIGEST, seed, round, k],
          batch_size=digest_batch_size,
          epochs=digest_epochs,
        )
        for k in range(len(private))
      ]
    ),
    revisit=tuple(
      shuffled_epochs(
        positions,
        seed=[_REVISIT, seed, round, k],
        batch_size=revisit_batch_size,
        epochs=revisit_epochs,
      )
      for k, positions in enumerate(private)
    ),
  )


# --- Helpers ----------------------------------------------------------------


def _checked(parties: Sequence[Party]) -> tuple[Party, ...]:
  """The parties, if they can be told apart and their values make sense."""
  names = [party.name for party in parties]
  if not names or len(set(names)) != len(names):
    raise ValueError(f"parties={names}: give one or more, of unlike names")
  for party in parties:
    party.hyper()
  return tuple(parties)


def _weights(values, num_parties: int) -> jax.Array:
  if values is None:
    return jnp.full((num_parties,), 1 / num_parties, jnp.float32)
  weights = jnp.asarray(values, jnp.float32)
  if weights.shape != (num_parties,):
    raise ValueError(
      f"consensus_weights={values}: want {num_parties} values, one a party"
    )
  if not isinstance(weights, jax.core.Tracer) and not (
    jnp.all(weights >= 0) and 0 < jnp.sum(weights) < jnp.inf
  ):
    raise ValueError(
      f"consensus_weights={values}: must not be negative, nor all zero"
    )
  return weights


def _fresh(parties, key) -> list[core.Variables]:
  """New models. Keys 2**31 + k are apart from those of any round."""
  return [
    party.model.init(jax.random.fold_in(key, 2**31 + k))
    for k, party in enumerate(parties)
  ]


def _rows(index: jax.Array, batch_size: int) -> jax.Array:
  """Lays positions out as rows, the last one filled up with -1."""
  size = min(batch_size, len(index))
  missing = -len(index) % size
  return jnp.pad(jnp.asarray(index), (0, missing), constant_values=-1).reshape(
    -1, size
  )
