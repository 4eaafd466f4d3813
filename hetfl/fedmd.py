"""FedMD: parties with different models agree on class scores.

Each party trains its model on public data, then on its few private examples
(`hetfl.fit`). In every round of the collaboration (`fedmd`) the parties share
their models' class scores on some public examples, and each model learns the
mean of these scores. Neither parameters nor private examples leave a party.

Reference: Li & Wang 2019, "FedMD: Heterogenous Federated Learning via Model
Distillation", algorithm 1. What the paper leaves open follows the released
code, github.com/diogenes0319/FedMD_clean.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from hetfl import checks, core, evaluate, output_checks, population
from hetfl import distill as distill_lib
from hetfl import engine as engine_lib
from hetfl.data import partition
from hetfl.party import (
  check_state,
  check_work,
  fresh_models,
  padded_rows,
  Party,
  shuffled_epochs,
  Trained,
)
from hetfl.streams import Stream

PyTree = Any


class Translator(NamedTuple):
  """The scores that parties share, and the loss between party and consensus.

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
  >>> jax.grad(lambda z: absolute_error(z, jnp.zeros(2)))(jnp.array([0., 3.]))
  Array([0. , 0.5], dtype=float32)
  """
  distance = _distance(logits, consensus)
  # The gradient of JAX's abs is 1 at 0, where there is nothing to learn.
  distance = jnp.where(distance == 0, 0.0, jnp.abs(distance))
  return jnp.mean(distance, axis=-1)


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
  return jnp.mean(_distance(logits, consensus) ** 2, axis=-1)


def _distance(logits, consensus):
  """The difference; 0 where both are minus infinity, as for masked classes."""
  logits, consensus = core.wide(logits), core.wide(consensus)
  alike = jnp.isinf(logits) & (logits == consensus)
  return jnp.where(alike, 0.0, logits - consensus)


def _tempered_scores(logits, temperature):
  if logits.ndim < 2:
    raise ValueError(
      "digest_loss='kl' needs logits float[B, C], not outputs of shape"
      f" {logits.shape}; use 'mae' or 'mse' for other outputs"
    )
  return distill_lib.tempered_softmax(logits, temperature)


def _tempered_divergence(logits, consensus, temperature):
  return distill_lib.kl_divergence(consensus, core.wide(logits) / temperature)


TRANSLATORS = {
  "mae": Translator(lambda z, t: z, lambda z, f, t: absolute_error(z, f)),
  "mse": Translator(lambda z, t: z, lambda z, f, t: squared_error(z, f)),
  "kl": Translator(_tempered_scores, _tempered_divergence),
}


def consensus(scores: Sequence[jax.Array], weights: jax.Array) -> jax.Array:
  """`f~ = sum_k c_k f_k / sum_k c_k`.

  Args:
    scores: P arrays `float[N, C]`.
    weights: c_k, `float[P]`, not negative; only their ratios matter.

  Returns:
    `float[N, C]`.

  Raises:
    ValueError: the scores differ in shape, or are not as many as the weights.

  Reference: Li & Wang 2019, algorithm 1, "Aggregate", and supplement, method
  4, where all weights are 1 / P except those of two weak models.

  >>> f = [jnp.array([[0., 4.]]), jnp.array([[4., 0.]])]
  >>> consensus(f, jnp.array([3., 1.])).tolist()
  [[1.0, 3.0]]
  """
  output_checks.same_outputs(*scores)
  if len(weights) != len(scores):
    raise ValueError(f"weights: {len(weights)} for {len(scores)} scores")
  weights = weights / jnp.sum(weights)
  # A party with weight zero may have any scores, NaN included.
  ignored = lambda c, f: (c == 0) & ~jnp.isfinite(f)
  terms = [c * jnp.where(ignored(c, f), 0, f) for c, f in zip(weights, scores)]
  return functools.reduce(jnp.add, terms)


@flax.struct.dataclass
class PartyState:
  """What a party holds between rounds.

  Attributes:
    variables: its model's variables.
    digest_opt_state: state of Digest's optimizer, which starts with the
      collaboration.
    revisit_opt_state: state of Revisit's optimizer, which continues from
      private training.
    hyper: `learning_rate` and, with a penalty, `l2`: `float32[]`.
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

  round: np.integer
  subset: np.ndarray
  digest: np.ndarray
  revisit: tuple[np.ndarray, ...]


def fedmd(
  parties: Sequence[Party],
  *,
  digest_loss: str | Translator = "mae",
  consensus_weights: Sequence[float] | jax.Array | None = None,
  temperature: float | jax.Array = 1.0,
  public_transform: core.Preparation | None = None,
  private_transform: core.Preparation | None = None,
  eval_batch_size: int | None = None,
  engine: engine_lib.Engine | None = None,
) -> core.Algorithm:
  """FedMD's rounds: Communicate, Aggregate, Distribute, Digest, Revisit.

  The consensus on the round's public examples is `f~ = sum_k c_k f_k`, over all
  models as they are at the start of the round. Then each party trains for some
  epochs towards `f~` on those examples and for some on its private examples.
  Both optimizers of a party persist.

  Args:
    parties: P parties, whose models have the same number of outputs.
    digest_loss: 'mae' or 'mse' between logits; 'kl' from the mean of the
      tempered softmaxes, without `fml`'s factor T^2; or a `Translator`.
    consensus_weights: c_k, not negative; only their ratios matter. `None` for
      equal weights.
    temperature: T of 'kl'; 'mae' and 'mse' do not use it.
    public_transform: applied to each public batch as stored in its bank.
    private_transform: the same for private batches.
    eval_batch_size: examples at once in Communicate, by default 40 on CPUs and
      1,000 elsewhere; changes speed only.
    engine: where the work runs; `Inline()` by default. With `Threads()` the
      step dispatches programs itself and must not be traced.

  Returns:
    The algorithm. Its `init` takes a key and, to start from parties that have
    gone through transfer learning, P `Trained`, whose optimizers continue in
    Revisit. Its `step` takes a `FedMDPlan` and `{'public': bank, 'private': P
    banks}`, on the device. Its metrics are each party's `NAME/digest_loss` and
    `NAME/revisit_loss`, means over the steps of Digest and of Revisit.

  Raises:
    ValueError: if a value is out of its range.

  Reference: Li & Wang 2019, algorithm 1. The paper gives neither the loss, nor
  epochs, nor batch sizes; the defaults of `plan_fedmd` are those of the
  released code for MNIST and letters, i.i.d.
  Departures: see `shuffled_epochs` and `Party.optimizer`.

  Two parties with logits (0, 0) and (2, 0) for the only image agree on
  (3/2, 0) if the second has three times the weight of the first.

  >>> linear = lambda *w: core.Model(
  ...     lambda key: core.Variables(jnp.array([w]), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> import optax
  >>> parties = [
  ...     Party('a', linear(0., 0.), learning_rate=1., optimizer=optax.sgd),
  ...     Party('b', linear(2., 0.), learning_rate=1., optimizer=optax.sgd)]
  >>> plan = plan_fedmd(population.Subset.whole(bank), [[0], [0]], seed=0,
  ...                   round=1, subset=1, revisit_epochs=1)
  >>> algorithm = fedmd(parties, consensus_weights=(1, 3))
  >>> state, metrics = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan,
  ...     {'public': bank, 'private': (bank, bank)})
  >>> [float(metrics[f'{k}/digest_loss'].value) for k in 'ab']
  [0.75, 0.25]
  >>> state.parties[0].variables.params.round(2).tolist()  # Digest: (1/2, 0)
  [[0.8..., -0.3...]]
  """
  parties = checks.named("parties", parties, Party)
  engine = engine or engine_lib.Inline()
  if not isinstance(digest_loss, Translator):
    if digest_loss not in TRANSLATORS:
      raise ValueError(
        f"digest_loss={digest_loss}: choose from {', '.join(TRANSLATORS)}, or"
        " give a Translator"
      )
    digest_loss = TRANSLATORS[digest_loss]
  translator = digest_loss
  weights = _weights(consensus_weights, len(parties))
  checks.positive(temperature=temperature)
  eval_batch_size = evaluate.batch_size_or_default(eval_batch_size)
  checks.counts(eval_batch_size=eval_batch_size)
  score = [
    scores_program(party, translator, public_transform, eval_batch_size)
    for party in parties
  ]
  learn = [
    learn_program(party, translator, public_transform, private_transform)
    for party in parties
  ]

  def init(key, trained=None):
    if trained is not None:
      hint = "[p.trained for p in state.parties] after fit"
      checks.each("trained", trained, Trained, len(parties), hint)
      trained = [party.adopt(t) for party, t in zip(parties, trained)]
    else:
      trained = [
        party.start(v) for party, v in zip(parties, fresh_models(key, parties))
      ]
    key = jnp.copy(key)  # States may be donated.
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
        "consensus_weights": jnp.array(weights),
        "temperature": jnp.array(temperature, jnp.float32),
      },
    )

  def step(state, plan, data):
    checks.kind("plan", plan, FedMDPlan, "as plan_fedmd makes it")
    check_work(plan.digest, parties)
    check_state(state, FedMDState, parties)
    key = jax.random.fold_in(state.key, plan.round)
    public = checks.bank(data, "public")
    private = checks.banks(data, "private", len(parties))
    # Communicate: each party computes its scores on the public subset.
    scores = engine.run(
      *(
        engine_lib.Call(
          program,
          (
            party.variables,
            state.hyper["temperature"],
            public,
            plan.subset,
          ),
          apart=True,
        )
        for program, party in zip(score, state.parties)
      )
    )
    # Aggregate: the server computes the consensus, before any party trains.
    (agreed,) = engine.run(
      engine_lib.Call(consensus, (scores, state.hyper["consensus_weights"]))
    )
    # Distribute, Digest and Revisit: each party by itself.
    each = zip(
      learn, state.parties, plan.digest, private, plan.revisit, strict=True
    )
    jobs = []
    for k, (program, kept, digest, bank, revisit) in enumerate(each):
      args = (
        kept,
        state.hyper["temperature"],
        jax.random.fold_in(key, k),
        public,
        agreed,
        plan.subset,
        digest,
        bank,
        revisit,
      )
      jobs.append(engine_lib.Call(program, args, apart=True))
    moved, digest_losses, revisit_losses = zip(*engine.run(*jobs))
    metrics = {}
    for k, party in enumerate(parties):
      metrics[f"{party.name}/digest_loss"] = digest_losses[k]
      metrics[f"{party.name}/revisit_loss"] = revisit_losses[k]
    return state.replace(parties=moved), metrics

  return core.Algorithm(init, step)


def scores_program(
  party: Party,
  translator: Translator,
  transform: core.Preparation | None,
  batch_size: int,
) -> Callable[..., jax.Array]:
  """A party's scores on some public examples, in inference mode.

  Args:
    party: the party.
    translator: computes the scores from the logits.
    transform: applied to each batch as stored in the bank.
    batch_size: examples at once; changes speed only.

  Returns:
    The program `(variables, temperature, bank, index [N]) -> float[N, C]`.
  """

  def all_scores(variables, temperature, bank, subset):
    def score(index):
      batch = core.prepare(transform, core.gather(bank, index))
      logits = party.model.predict(variables, batch["x"])
      output_checks.dense(logits)
      return translator.scores(logits, temperature)

    scores = jax.lax.map(score, padded_rows(subset, batch_size))
    return scores.reshape(-1, *scores.shape[2:])[: len(subset)]

  return all_scores


def learn_program(
  party: Party,
  translator: Translator,
  public_transform: core.Preparation | None,
  private_transform: core.Preparation | None,
) -> Callable[..., tuple["PartyState", core.Mean, core.Mean]]:
  """A party's Digest and Revisit.

  Args:
    party: the party.
    translator: gives the loss of Digest.
    public_transform: applied to each public batch as stored in its bank.
    private_transform: the same for private batches.

  Returns:
    The program `(state, temperature, key, public, consensus [N, C], subset
    [N], digest [S, B], private, revisit [S', B']) -> (state, loss of Digest,
    loss of Revisit)`, where `digest` holds positions in `subset`.
  """
  revisit = party.trainer(private_transform, party.loss)

  def digest_and_revisit(
    state, temperature, key, public, agreed, subset, digest_rows, private, rows
  ):
    digest_key, revisit_key = jax.random.split(key)

    # Digest: approach the consensus on the public subset.
    def towards(logits, batch):
      return translator.loss(logits, batch["consensus"], temperature)

    digest = party.trainer(public_transform, towards)
    (variables, digest_opt_state), digested = digest(
      Trained(state.variables, state.digest_opt_state),
      state.hyper,
      digest_key,
      public,
      jnp.where(digest_rows < 0, -1, jnp.asarray(subset)[digest_rows]),
      {"consensus": agreed[digest_rows]},
      len(digest_rows),
    )
    # Revisit: train on its own private data for a few epochs.
    (variables, revisit_opt_state), revisited = revisit(
      Trained(variables, state.revisit_opt_state),
      state.hyper,
      revisit_key,
      private,
      rows,
      {},
      len(rows),
    )
    state = state.replace(
      variables=variables,
      digest_opt_state=digest_opt_state,
      revisit_opt_state=revisit_opt_state,
    )
    return state, digested, revisited

  return digest_and_revisit


def plan_fedmd(
  public: population.Subset,
  private: (
    population.ClientPopulation
    | Sequence[population.Subset | population.Positions]
  ),
  *,
  seed: int,
  round: int,
  subset: int = 5000,
  digest_batch_size: int = 256,
  digest_epochs: int = 1,
  revisit_batch_size: int = 5,
  revisit_epochs: int = 2,
) -> FedMDPlan:
  """Draws a round's public subset and orders all parties' examples.

  The subset is stratified: its labels have the same shares as in the public
  set. From a bank without labels `y` it is drawn uniformly.

  Args:
    public: the public examples.
    private: the parties' private examples, or each party's positions in its
      bank.
    seed: the run's seed.
    round: the number of the round, from 1.
    subset: N, at most the size of the public set.
    digest_batch_size: B of Digest; N if N is less.
    digest_epochs: epochs over the subset.
    revisit_batch_size: B of Revisit; all examples of a party that has fewer.
    revisit_epochs: epochs over the private examples.

  Returns:
    The plan; the same for the same arguments.

  Raises:
    ValueError: if the subset is larger than the public set, a party has no
      examples, or a number is not at least 1.

  Reference: Li & Wang 2019, supplement, method 2; the released code draws
  with scikit-learn's `StratifiedShuffleSplit`.

  >>> public = population.Subset.whole({'y': np.arange(12) // 6})
  >>> plan = plan_fedmd(public, [np.arange(3)], seed=0, round=1, subset=4,
  ...                   digest_batch_size=2)
  >>> sorted((plan.subset // 6).tolist()), plan.digest.shape
  ([0, 0, 1, 1], (1, 2, 2))
  """
  checks.counts(
    round=round,
    subset=subset,
    digest_batch_size=digest_batch_size,
    digest_epochs=digest_epochs,
    revisit_batch_size=revisit_batch_size,
    revisit_epochs=revisit_epochs,
  )
  checks.seed(seed)
  population.check_kind(public, "public", population.Subset)
  if subset > len(public.index):
    raise ValueError(
      f"subset={subset}: exceeds the {len(public.index)} public examples"
    )
  positions = population.positions_in(public.bank, public.index, "public")
  private = population.holdings(private)
  drawn_by = [Stream.PUBLIC_SUBSET, seed, round]
  labels = public.bank.get("y")
  if labels is not None and np.ndim(labels) == 1:
    labels = np.asarray(labels)[positions]
    drawn = partition.stratified(labels, size=subset, seed=drawn_by)
  else:
    drawn = np.random.default_rng(drawn_by).permutation(len(positions))[:subset]
  return FedMDPlan(
    round=np.int32(round),
    subset=positions[drawn],
    digest=np.stack(
      [
        shuffled_epochs(
          np.arange(subset),
          seed=[Stream.DIGEST, seed, round, k],
          batch_size=digest_batch_size,
          epochs=digest_epochs,
        )
        for k in range(len(private))
      ]
    ),
    revisit=tuple(
      shuffled_epochs(
        positions,
        seed=[Stream.REVISIT, seed, round, k],
        batch_size=revisit_batch_size,
        epochs=revisit_epochs,
      )
      for k, positions in enumerate(private)
    ),
  )


def _weights(values, num_parties: int) -> jax.Array:
  if values is None:
    return jnp.full((num_parties,), 1 / num_parties, jnp.float32)
  weights = jnp.asarray(values, jnp.float32)
  if weights.shape != (num_parties,):
    raise ValueError(
      f"consensus_weights={values}: give {num_parties} values, one per party"
    )
  if not isinstance(weights, jax.core.Tracer) and not (
    jnp.all(weights >= 0) and 0 < jnp.sum(weights) < jnp.inf
  ):
    raise ValueError(
      f"consensus_weights={values}: must not be negative, nor all zero"
    )
  return weights
