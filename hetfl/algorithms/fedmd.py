"""FedMD: parties with different models agree on class scores.

Each party trains its model on public data, then on its few private examples
(`hetfl.fit`). In every round of the collaboration (`fedmd`) the parties share
their models' class scores on some public examples, and each model learns the
mean of these scores. Neither parameters nor private examples leave a party.

Reference: Li & Wang 2019, "FedMD: Heterogenous Federated Learning via Model
Distillation", algorithm 1. What the paper leaves open follows the released
code, github.com/diogenes0319/FedMD_clean.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetfl import checks, core, distill, local, population
from hetfl.algorithms.fit import plan_parties
from hetfl.algorithms.public import Parties, Translator
from hetfl.batches import in_order, Plan
from hetfl.engine import Engine
from hetfl.plans import plan_clients
from hetfl.population import ClientPopulation, Subset
from hetfl.streams import generator, Stream


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
  # JAX's abs has a gradient of 1 at 0, where there is nothing to learn, and of
  # -1 at NaN, which here makes its gradient NaN too.
  distance *= jax.lax.stop_gradient(jnp.sign(distance))
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
      "class probabilities need logits float[B, C], not outputs of shape"
      f" {logits.shape}; fedmd's digest_loss 'mae' and 'mse' take other outputs"
    )
  return distill.tempered_softmax(logits, temperature)


def _tempered_divergence(logits, consensus, temperature):
  kl = distill.kl_divergence(consensus, core.wide(logits) / temperature)
  return distill.of_examples(kl)


def _between_scores(error: Callable[..., jax.Array]) -> Translator:
  return Translator(
    lambda z, t: z, lambda z, f, t: distill.of_examples(error(z, f))
  )


TRANSLATORS = {
  "mae": _between_scores(absolute_error),
  "mse": _between_scores(squared_error),
  "kl": Translator(_tempered_scores, _tempered_divergence, of_classes=True),
}


@jax.jit
def consensus(scores: Sequence[jax.Array], weights: jax.Array) -> jax.Array:
  """`f~ = sum_k c_k f_k / sum_k c_k`.

  Args:
    scores: P arrays `float[N, C]`.
    weights: c_k, `float[P]`, not negative; only their ratios matter.

  Returns:
    `float[N, C]`.

  Raises:
    ValueError: the scores differ in shape, or in number from the weights.

  Reference: Li & Wang 2019, algorithm 1, "Aggregate", and supplement, method 4.

  >>> f = [jnp.array([[0., 4.]]), jnp.array([[4., 0.]])]
  >>> consensus(f, jnp.array([3., 1.])).tolist()
  [[1.0, 3.0]]
  """
  distill.same_classes(*scores)
  if len(weights) != len(scores):
    raise ValueError(f"weights: {len(weights)} for {len(scores)} scores")
  weights = weights / jnp.sum(weights)
  # A party with weight zero may have any scores, NaN included.
  ignored = lambda c, f: (c == 0) & ~jnp.isfinite(f)
  terms = [c * jnp.where(ignored(c, f), 0, f) for c, f in zip(weights, scores)]
  return functools.reduce(jnp.add, terms)


def consensus_shares(
  weights: Sequence[float] | jax.Array | None, number: int
) -> jax.Array:
  """Consensus weights `float32[number]`; equal ones for `None`.

  Raises:
    ValueError: there are not so many, one is negative, or all are 0.

  >>> first, second = consensus_shares((1e-300, 3e-300), 2).tolist()
  >>> round(second / first, 6)
  3.0
  """
  values: Any = 1.0 if weights is None else weights
  core.hyper(number, consensus_weights=values)  # Checks their number.
  if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(values)):
    values = np.asarray(values, np.float64)
    for bound in (np.min(values), np.max(values)):
      checks.between(0, np.inf, consensus_weights=bound)
    if not values.any():
      raise ValueError("consensus_weights=0.0: one must be above 0")
    # As parts of a power of two, since float32 has no 1e-300.
    values = np.ldexp(values, -np.frexp(np.max(values))[1])
  return core.hyper(number, consensus_weights=values)["consensus_weights"]


def fedmd(
  parties: Sequence[local.Participant],
  *,
  digest_loss: str | Translator = "mae",
  consensus_weights: Sequence[float] | jax.Array | None = None,
  temperature: float | jax.Array = 1.0,
  public_transform: core.Preparation | None = None,
  eval_batch_size: int | None = None,
  engine: Engine | None = None,
) -> core.Algorithm:
  """FedMD's rounds: Communicate, Aggregate, Distribute, Digest, Revisit.

  The consensus on the round's public examples is `f~ = sum_k c_k f_k`, over all
  models as they are at the start of the round. Then each party trains for some
  epochs towards `f~` on those examples and for some on its private examples.
  Both optimizers of a party persist. A party whose scores are not finite, as it
  has diverged, is not heard; its own losses are NaN.

  Args:
    parties: P parties, whose models have the same number of outputs.
    digest_loss: 'mae' or 'mse' between logits; 'kl' from the mean of the
      tempered softmaxes, without `fml`'s factor T^2; or a `Translator`.
    consensus_weights: c_k, not negative; only their ratios matter. `None` for
      equal weights.
    temperature: T of 'kl'; 'mae' and 'mse' do not use it.
    public_transform: applied to each public batch as stored in its bank; a
      party's own transform is for its private batches.
    eval_batch_size: examples at once in Communicate, by default 40 on CPUs and
      1,000 elsewhere; changes speed only.
    engine: where the work runs, by default `Inline()`; see `hetfl.engine`.

  Returns:
    The algorithm. Its `init` takes a key and, to start from parties that have
    gone through transfer learning, P `Learner`s, whose optimizers continue in
    Revisit. Its `step` takes a plan of `plan_fedmd` and the banks on the
    device: `public`, and each party's by its name. Its state's `clients` holds
    a `Learner` for each party, with the states of its two optimizers; its
    metrics are each party's `NAME/digest_loss` and `NAME/revisit_loss`, means
    over the steps of Digest and of Revisit.

  Raises:
    ValueError: if a value is out of its range; or, with 'kl', labels are not
      classes.

  Reference: Li & Wang 2019, algorithm 1, whose first line is `hetfl.fit`. The
  loss, epochs and batch sizes are the released code's for MNIST and letters,
  i.i.d. Departures: see `plan_fit` and `keras_adam`.

  Two parties with logits (0, 0) and (2, 0) for the only image agree on
  (3/2, 0) if the second has three times the weight of the first.

  >>> linear = lambda *w: core.Model(
  ...     lambda key: core.Variables(jnp.array([w]), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> parties = [local.Participant(linear(z, 0.), name, learning_rate=1.)
  ...            for name, z in (('a', 0.), ('b', 2.))]
  >>> image = Subset.whole(bank)
  >>> plan = plan_fedmd(image, {'a': image, 'b': image}, seed=0, round=1,
  ...                   subset=1, revisit_epochs=1)
  >>> algorithm = fedmd(parties, consensus_weights=(1, 3))
  >>> state, metrics = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan,
  ...     {'public': bank, 'a': bank, 'b': bank})
  >>> [float(metrics[f'{k}/digest_loss'].value) for k in 'ab']
  [0.75, 0.25]
  >>> state.clients[0].params.round(2).tolist()  # Digest: (1/2, 0)
  [[0.8..., -0.3...]]
  """
  if not isinstance(digest_loss, Translator):
    if digest_loss not in TRANSLATORS:
      raise ValueError(
        f"digest_loss={digest_loss}: choose from {', '.join(TRANSLATORS)}, or"
        " give a Translator"
      )
    digest_loss = TRANSLATORS[digest_loss]
  group = Parties(
    parties,
    digest_loss,
    public_transform=public_transform,
    eval_batch_size=eval_batch_size,
    engine=engine,
  )
  shares = consensus_shares(consensus_weights, len(parties))
  checks.positive(temperature=temperature)

  def init(key, trained=None):
    values = core.hyper(temperature=temperature)
    values |= core.hyper(len(parties), consensus_weights=shares)
    return group.init(key, trained, values)

  def step(state, plan, data):
    # Communicate: each party computes its scores on the public subset.
    scores = group.communicate(state, plan, data)
    # Aggregate: the server computes the consensus, before any party trains.
    heard = group.heard(plan, scores)
    weights = state.hyper["consensus_weights"] * heard
    agreed = consensus(scores, weights)
    # Distribute: the subset becomes a bank, with the consensus in it.
    (shown,) = group.distribute(plan, data, agreed)
    # Digest: each party approaches the consensus on the public subset.
    everyone = [shown] * len(parties)
    state, digest_losses = group.digest(state, plan, everyone, weights)
    # Revisit: each party trains on its own private data for a few epochs, of
    # which the server hears in the next round's Communicate.
    state, revisit_losses = group.revisit(state, plan, data)
    return state, local.metrics_of(
      parties, digest_loss=digest_losses, revisit_loss=revisit_losses
    )

  return core.Algorithm(init, step)


def plan_fedmd(
  public: Subset,
  private: Mapping[str, Subset],
  *,
  seed: int,
  round: int,
  subset: int = 5000,
  digest_batch_size: int = 256,
  digest_epochs: int = 1,
  revisit_batch_size: int = 5,
  revisit_epochs: int = 2,
) -> Plan:
  """Draws a round's public subset and orders all parties' examples.

  The subset is stratified: its labels have the same shares as in the public
  set. From a bank whose `y` are not classes, or which has none, it is drawn
  uniformly.

  Args:
    public: the public examples.
    private: the parties' private examples, by their names.
    seed: the run's seed.
    round: the number of the round, from 1.
    subset: N, at most the size of the public set.
    digest_batch_size: B of Digest; N if N is less.
    digest_epochs: epochs over the subset.
    revisit_batch_size: B of Revisit; all examples of a party that has fewer.
    revisit_epochs: epochs over the private examples.

  Returns:
    The plan: batches `public`, the subset in one batch; `digest`, positions in
    that subset, one row for each party; and each party's by its name.

  Raises:
    ValueError: if the subset is larger than the public set, a party has no
      examples, or a number is not at least 1.

  Reference: Li & Wang 2019, supplement, method 2; the released code draws
  with scikit-learn's `StratifiedShuffleSplit`.

  >>> public = Subset.whole({'y': np.arange(12) // 6})
  >>> plan = plan_fedmd(public, {'a': public}, seed=0, round=1, subset=4,
  ...                   digest_batch_size=2)
  >>> drawn = plan.batches['public'].index[0, 0]
  >>> sorted((drawn // 6).tolist()), plan.batches['digest'].steps.tolist()
  ([0, 0, 1, 1], [2])
  """
  checks.counts(
    subset=subset,
    digest_batch_size=digest_batch_size,
    digest_epochs=digest_epochs,
    revisit_batch_size=revisit_batch_size,
    revisit_epochs=revisit_epochs,
  )
  population.check_kind(public, "public", Subset)
  for name in {"public", "digest"} & {*private}:
    raise ValueError(f"private: {name!r} is the name of other batches")
  if subset > len(public.index):
    raise ValueError(
      f"subset={subset}: exceeds the {len(public.index)} public examples"
    )
  positions = population.positions_in(public.bank, public.index, "public")
  draw = (Stream.PUBLIC_SUBSET, seed, round)
  labels = np.asarray(public.bank.get("y", 0))
  if checks.are_classes(labels):
    drawn = population.stratified(labels[positions], size=subset, seed=draw)
  else:
    drawn = generator(*draw).permutation(len(positions))[:subset]
  # Digest's positions count within the subset, which is a bank to plan on.
  subset_bank = {"public": positions[drawn]}
  everyone = [np.arange(subset)] * len(private)  # Each party has all of it.
  options: dict[str, Any] = {"seed": seed, "round": round}
  batches = {
    "public": in_order(positions[drawn], subset),
    "digest": plan_clients(
      ClientPopulation.from_lists(subset_bank, everyone),
      phase=Stream.DIGEST,
      batch_size=min(digest_batch_size, subset),
      epochs=digest_epochs,
      tail="repeat",
      **options,
    ),
  }
  batches |= plan_parties(
    private,
    phase=Stream.REVISIT,
    batch_size=revisit_batch_size,
    epochs=revisit_epochs,
    **options,
  )
  return Plan(np.int32(round), batches)
