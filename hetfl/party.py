"""A party of FedMD: its model, and training that ends when it converges.

Reference: Li & Wang 2019, "FedMD: Heterogenous Federated Learning via Model
Distillation", the first line of algorithm 1. What the paper leaves open follows
the released code, github.com/diogenes0319/FedMD_clean.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetfl import checks, core, output_checks, population
from hetfl import engine as engine_lib
from hetfl import evaluate as evaluate_lib
from hetfl.lanes import padded_length
from hetfl.streams import Stream

PyTree = Any
# Keras's defaults, which the released code trains with.
keras_adam = functools.partial(optax.adam, b1=0.9, b2=0.999, eps=1e-7)


@dataclasses.dataclass(frozen=True, eq=False)
class Party:
  """The configuration of a participant and of the model it designed.

  Attributes:
    name: its name in metrics and results.
    model: the model f_k.
    learning_rate: the learning rate in all its training.
    l2: weight of `penalty` in every loss, including that of Digest, as in the
      released code; the paper has none. Unused without a penalty.
    penalty: a function from parameters to a scalar, such as the head's
      `sum(w^2)`; `None` for no penalty.
    optimizer: `learning rate -> optax optimizer`. Departure: optax's Adam adds
      epsilon after the bias correction, Keras's before it.
    loss: the loss of each example against its label, except in Digest.

  Raises:
    ValueError: the model is a bare Flax module, a value is negative or not a
      number, or the optimizer is not a function of a learning rate or holds
      the rate in its state.
  """

  name: str
  model: core.Model
  learning_rate: float | jax.Array = 1e-3
  l2: float | jax.Array = 1e-3
  penalty: Callable[[PyTree], jax.Array] | None = None
  optimizer: core.Optimizer = keras_adam
  loss: core.Loss = core.cross_entropy

  def __post_init__(self):
    core.Model.check(f"party {self.name!r}", self.model)
    checks.factories(optimizer=self.optimizer)
    checks.between(0, np.inf, learning_rate=self.learning_rate, l2=self.l2)

  def hyper(self) -> dict[str, jax.Array]:
    """The values that trials may vary: `learning_rate` and `l2`, scalars.

    `l2` is there only with a penalty.
    """
    values = {"learning_rate": self.learning_rate}
    if self.penalty is not None:
      values["l2"] = self.l2
    return {name: jnp.array(v, jnp.float32) for name, v in values.items()}

  def trainer(
    self, transform: core.Preparation | None, loss: core.Loss
  ) -> Callable[..., tuple["Trained", core.Mean]]:
    """The program that takes optimizer steps on a bank's examples.

    `w <- Adam(w, grad [mean_b loss(f(x_b; w), b) + l2 penalty(w)])`, in
    training mode: with dropout, and batch statistics updated.

    Args:
      transform: applied to each batch as stored in the bank.
      loss: the loss of each example.

    Returns:
      `(trained, hyper, key, bank, index [S, B], more, steps) -> (trained,
      loss)`, where `more` holds arrays `[S, ...]`, whose row s joins batch s,
      `steps` says how many of the S batches are run, and the loss is the mean
      over those, without the penalty.
    """

    def train_batches(trained, hyper, key, bank, index, more, steps):
      optimizer = self.optimizer(hyper["learning_rate"])
      rows = jax.tree.map(jnp.asarray, (index, more))  # NumPy if not traced.

      def step(s, carry):
        trained, total = carry
        positions, more = jax.tree.map(lambda a: a[s], rows)
        batch = core.prepare(transform, core.gather(bank, positions))
        batch = {**batch, **more}

        def objective(params):
          variables = trained.variables._replace(params=params)
          with checks.noted(f"party {self.name!r}, {core.inputs_of(batch)}"):
            logits, stats = self.model.outputs(
              variables, batch["x"], jax.random.fold_in(key, s), True
            )
            losses = core.losses_of(loss, logits, batch)
          value = core.masked_mean(losses, batch["mask"])
          total = value
          if self.penalty is not None:
            total += hyper["l2"] * self.penalty(params)
          return total, (value, stats)

        params = trained.variables.params
        (whole, (value, stats)), grads = jax.value_and_grad(
          objective, has_aux=True
        )(params)
        params, opt_state = core.descend(
          optimizer, params, trained.opt_state, grads, value=whole
        )
        trained = Trained(core.Variables(params, stats), opt_state)
        return trained, total + value

      trained, total = jax.lax.fori_loop(
        0, steps, step, (trained, jnp.zeros(()))
      )
      return trained, core.Mean(total, jnp.asarray(steps, jnp.float32))

    return train_batches

  def start(self, variables: core.Variables) -> "Trained":
    """The model with a fresh optimizer."""
    optimizer = self.optimizer(self.hyper()["learning_rate"])
    return Trained(variables, optimizer.init(variables.params))

  def adopt(self, trained: "Trained") -> "Trained":
    """Copies a model and its optimizer's state, if they fit the party's.

    Args:
      trained: what to continue from.

    Returns:
      Copies, since states may be donated.

    Raises:
      ValueError: their shapes differ from those that `start` returns.
    """
    owner = f"party {self.name!r}"
    variables = self.model.adopt(owner, trained.variables)
    wanted = jax.eval_shape(self.start, variables)
    output_checks.alike(
      f"{owner}, opt_state", trained.opt_state, wanted.opt_state
    )
    return Trained(variables, jax.tree.map(jnp.copy, trained.opt_state))


class Trained(NamedTuple):
  """A model and the optimizer that trains it.

  Attributes:
    variables: the model's variables.
    opt_state: the optimizer's state.
  """

  variables: core.Variables
  opt_state: PyTree


@flax.struct.dataclass
class Learner:
  """A party that trains until its accuracy stops rising.

  Attributes:
    trained: the model and its optimizer.
    hyper: `learning_rate` and, with a penalty, `l2`: `float32[]`.
    accuracy: `float32[]`, on the stopping set after the last epoch.
    best: `float32[]`, the last accuracy that counted as progress.
    wait: `int32[]`, epochs since then.
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
    batches: P arrays `int32[S_k, B_k]`, positions in each party's bank; S_k is
      padded to 128, 512, ..., so that different phases share compiled programs.
    steps: P scalars `int32[]`, how many of the S_k batches are run.
  """

  round: np.integer
  batches: tuple[np.ndarray, ...]
  steps: tuple[np.integer, ...]


def fit(
  parties: Sequence[Party],
  *,
  transform: core.Preparation | None = None,
  patience: int = 3,
  min_delta: float = 1e-3,
  eval_batch_size: int | None = None,
  engine: engine_lib.Engine | None = None,
) -> core.Algorithm:
  """Trains each party by itself, to convergence; a step is an epoch.

  A party stops, and keeps its last epoch's model, when its accuracy on the
  stopping set has not risen by more than `min_delta` above its best for
  `patience` epochs. This is classification accuracy, whatever the loss; train
  models that are not classifiers without a stopping set.

  Args:
    parties: P parties.
    transform: applied to each batch as stored in the bank.
    patience: epochs without progress after which a party stops.
    min_delta: the accuracy, as a fraction, must rise by more than this to count
      as progress.
    eval_batch_size: examples evaluated at once, by default 40 on CPUs and 1,000
      elsewhere; changes speed only.
    engine: where the work runs; `Inline()` by default. With `Threads()` the
      step dispatches programs itself and must not be traced.

  Returns:
    The algorithm. Its `init` takes a key and, to start from existing models, P
    `Variables`; optimizers start afresh. Its `step` takes a `FitPlan` and
    `{'train': P banks, 'stopping': Subset}`, the banks on the device; without
    a stopping set no party stops. Its metrics are each party's `NAME/loss`,
    the mean over the epoch's steps.

  Raises:
    ValueError: if a value is out of its range, or the stopping set has no
      examples or, unless it is traced, positions outside its bank.

  Reference: Li & Wang 2019, algorithm 1, "Transfer learning", and table 4's
  training on pooled data; Keras's `EarlyStopping` without
  `restore_best_weights`, as in the released code.

  >>> linear = lambda *w: core.Model(
  ...     lambda key: core.Variables(jnp.array([w]), {}),
  ...     lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jnp.ones((1, 1)), 'y': jnp.zeros(1, int)}
  >>> party = Party('a', linear(0., 0.), learning_rate=1., optimizer=optax.sgd)
  >>> plan = plan_fit([[0]], seed=0, round=1, batch_size=1)
  >>> algorithm = fit([party])
  >>> state, metrics = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan, {'train': (bank,)})
  >>> state.parties[0].trained.variables.params.tolist()
  [[0.5, -0.5]]
  >>> float(metrics['a/loss'].value)  # log 2
  0.693...
  """
  parties = checks.named("parties", parties, Party)
  engine = engine or engine_lib.Inline()
  checks.between(0, 1, min_delta=min_delta)
  eval_batch_size = evaluate_lib.batch_size_or_default(eval_batch_size)
  checks.counts(patience=patience, eval_batch_size=eval_batch_size)
  epochs = [
    _epoch_program(party, transform, min_delta, eval_batch_size)
    for party in parties
  ]

  def init(key, variables=None):
    if variables is not None:
      hint = "[p.trained.variables for p in state.parties] after another fit"
      number = len(parties)
      checks.each("variables", variables, core.Variables, number, hint)
      variables = [
        party.model.adopt(f"party {party.name!r}", v)
        for party, v in zip(parties, variables)
      ]
    else:
      variables = fresh_models(key, parties)
    key = jnp.copy(key)  # Since states may be donated.
    return FitState(
      tuple(
        Learner(
          trained=party.start(v),
          hyper=party.hyper(),
          accuracy=jnp.zeros((), jnp.float32),
          # Below any accuracy, and finite, as `trials.all_finite` requires.
          best=jnp.full((), jnp.finfo(jnp.float32).min, jnp.float32),
          wait=jnp.zeros((), jnp.int32),
          epochs=jnp.zeros((), jnp.int32),
        )
        for party, v in zip(parties, variables)
      ),
      key,
    )

  def step(state, plan, data):
    checks.kind("plan", plan, FitPlan, "as plan_fit makes it")
    check_work(plan.batches, parties)
    check_state(state, FitState, parties)
    names = set(data) if isinstance(data, Mapping) else set()
    if strange := names - {"train", "stopping"}:
      raise ValueError(
        f"data[{min(strange)!r}]: unknown name; give 'train' and, optionally,"
        " 'stopping'"
      )
    train = checks.banks(data, "train", len(parties))
    stopping = data.get("stopping")
    if stopping is not None:
      population.check_subset(stopping, "stopping")
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
            steps,
            stopping,
          ),
          learner.wait < patience,
          core.unchanged,
          apart=True,
        )
        for k, (epoch, learner, bank, batches, steps) in enumerate(
          zip(
            epochs,
            state.parties,
            train,
            plan.batches,
            plan.steps,
            strict=True,
          )
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
  """The program of a party's epoch, which updates its stopping criterion."""
  train = party.trainer(transform, party.loss)
  measure = evaluate_lib.measure_program(party.model, transform)

  def train_epoch(learner, key, bank, batches, steps, stopping):
    trained, loss = train(
      learner.trained, learner.hyper, key, bank, batches, {}, steps
    )
    accuracy, best, wait = learner.accuracy, learner.best, learner.wait
    if stopping is not None:
      rows = padded_rows(stopping.index, batch_size)
      total, count = measure(trained.variables, stopping.bank, rows, len(rows))[
        "accuracy"
      ]
      accuracy = total / count
      # A rise of exactly `min_delta` is none, however it is rounded.
      better = accuracy - best > min_delta + 1e-6
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

  return train_epoch


def shuffled_epochs(
  positions: np.ndarray,
  *,
  seed: int | Sequence[int],
  batch_size: int,
  epochs: int = 1,
) -> np.ndarray:
  """Shuffles examples into batches, epoch after epoch.

  A short last batch is filled up with the epoch's first examples, so that all
  batches have the same size: batch normalisation would treat empty places as
  images. Departure: Keras's last batch is short.

  Args:
    positions: `int[n]`, the examples.
    seed: one or more integers that determine the result.
    batch_size: B; n if n is less.
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
    batches.append(np.resize(rng.permutation(positions), (steps, size)))
  return np.concatenate(batches)


def plan_fit(
  examples: (
    population.ClientPopulation
    | Sequence[population.Subset | population.Positions]
  ),
  *,
  seed: int,
  phase: int = 0,
  round: int,
  batch_size: int,
) -> FitPlan:
  """One epoch of every party over its examples, each in its own random order.

  Args:
    examples: the parties' examples, or each party's positions in its bank.
    seed: the run's seed.
    phase: distinguishes the phases of a run, which train one after another.
    round: the number of the epoch, from 1.
    batch_size: B; all examples of a party that has fewer.

  Returns:
    The plan; the same for the same arguments.

  Raises:
    ValueError: if a party has no examples, or a number is not at least 1.

  >>> plan = plan_fit(
  ...     [np.arange(4), np.arange(9)], seed=0, round=1, batch_size=5)
  >>> [(b.shape, int(s)) for b, s in zip(plan.batches, plan.steps)]
  [((128, 4), 1), ((128, 5), 2)]
  """
  checks.counts(round=round, batch_size=batch_size)
  checks.seed(seed)
  epochs = [
    shuffled_epochs(
      positions, seed=[Stream.FIT, seed, phase, round, k], batch_size=batch_size
    )
    for k, positions in enumerate(population.holdings(examples))
  ]

  def filled(batches):
    length = padded_length(len(batches), at_least=128)
    return np.pad(batches, ((0, length - len(batches)), (0, 0)))

  return FitPlan(
    np.int32(round),
    tuple(map(filled, epochs)),
    tuple(np.int32(len(batches)) for batches in epochs),
  )


def check_work(work: Sequence[Any], parties: Sequence[Party]) -> None:
  """Raises a `ValueError` if a plan is for another number of parties."""
  if len(work) != len(parties):
    raise ValueError(
      f"the plan is for {len(work)} parties, but there are {len(parties)}"
    )


def check_state(state: Any, kind: type, parties: Sequence[Party]) -> None:
  """Raises a `ValueError` if a state is not of these parties.

  Args:
    state: the state.
    kind: its type, with a field `parties`.
    parties: the parties.
  """
  checks.state(state, kind, parties=len(parties))
  for party, kept in zip(parties, state.parties):
    penalty = ["l2"] if party.penalty is not None else []
    checks.holds(f"state of party {party.name!r}", kept.hyper, *penalty)


def fresh_models(key, parties) -> list[core.Variables]:
  """Newly initialised models of all parties.

  Args:
    key: the run's key; 2**31 + k, folded into it, differs from any round.
    parties: P parties.

  Returns:
    P `Variables`.
  """
  return [
    party.model.start(jax.random.fold_in(key, 2**31 + k))
    for k, party in enumerate(parties)
  ]


def padded_rows(index: jax.Array, batch_size: int) -> jax.Array:
  """Lays positions out as rows, the last one filled up with -1.

  Args:
    index: `int32[N]`.
    batch_size: B; N if N is less.

  Returns:
    `int32[ceil(N / B), B]`.

  >>> padded_rows(jnp.array([4, 8, 6]), 2).tolist()
  [[4, 8], [6, -1]]
  """
  size = min(batch_size, len(index))
  missing = -len(index) % size
  return jnp.pad(jnp.asarray(index), (0, missing), constant_values=-1).reshape(
    -1, size
  )
