"""Labels that are not classes: each method learns them, or refuses by name.

One round of linear models `z = x w`, in batches of all examples. Each loss is
`A(z) - t z + c`, of slope `link(z) - t`: squared errors (t = 2 y), and
cross-entropies, of sigmoids (t = y) and, for each pixel, of a softmax (t is
one-hot). A divergence from a partner is the same with `t = link(z)` of its
outputs. So a few lines of NumPy say what each method learns.
"""

from collections.abc import Callable
import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetfl
from hetfl import core
from hetfl.algorithms.ditto import ditto
from hetfl.algorithms.dsfl import dsfl
from hetfl.algorithms.fd import fd
from hetfl.algorithms.features import headed
from hetfl.algorithms.feddf import feddf
from hetfl.algorithms.fedet import fedet
from hetfl.algorithms.fedgen import fedgen
from hetfl.algorithms.fedgh import fedgh
from hetfl.algorithms.fedgkt import fedgkt
from hetfl.algorithms.fedkd import fedkd
from hetfl.algorithms.fedmd import Translator
from hetfl.algorithms.fedmrl import fedmrl, matryoshka
from hetfl.algorithms.fedproto import fedproto
from hetfl.algorithms.fedtgp import fedtgp
from hetfl.algorithms.heterofl import heterofl
from hetfl.algorithms.ktpfl import ktpfl
from hetfl.algorithms.lgfedavg import lgfedavg
from hetfl.algorithms.personal import personal
from hetfl.algorithms.scaffold import scaffold
from hetfl.models.language import TokenLogits
from hetfl.optimizers import fedavg_server
from tests.algorithms import CASES
from tests.oracles.codist import softmax

RATE, CLASSES = 0.25, 3
HELD, PUBLIC = ([0, 1, 2], [3, 4]), [5, 6]
SHARES = np.array([0.6, 0.4])
# As wide as a batch is long: what is mixed up would broadcast.
SIZE = (1, 3)
RNG = np.random.default_rng(0)
STARTS = np.zeros((2, CLASSES)), RNG.normal(size=(2, CLASSES))


class Task(NamedTuple):
  """A kind of labels.

  Attributes:
    bank: its examples.
    loss: `(outputs, batch) -> float[B]`.
    divergence: `(outputs, partner's, temperature) -> float[B]`, of ours: twice
      what `link` says.
    link: `float64[n, C]` of outputs.
    value: `(outputs, t) -> float64[n]`, the loss.
    t: `float64[n, C]` of labels.
  """

  bank: dict[str, np.ndarray]
  loss: core.Loss
  divergence: Callable[..., jax.Array]
  link: Callable[..., np.ndarray]
  value: Callable[..., np.ndarray]
  t: Callable[[np.ndarray], np.ndarray]


def bank_of(y, *size):
  x = RNG.normal(size=(7, *size, 2))
  return {"x": x.astype(np.float32), "y": y}


def total(a):
  return a.sum(axis=-1)


def squares(z, p):
  return total(jnp.square(z - p))


def bernoulli(z, p):
  return total(optax.sigmoid_binary_cross_entropy(z, p))


def pixels(z, labels):
  return optax.softmax_cross_entropy(z, labels).mean(axis=(1, 2))


def twice(loss, link):
  """Twice the loss of what a partner predicts, less the least value."""

  def divergence(z, partner, temperature):
    p = link(partner)
    return 2 * temperature * (loss(z, p) - loss(partner, p))

  return divergence


TASKS = {
  "regression": Task(
    bank_of(RNG.normal(size=(7, CLASSES)).astype(np.float32)),
    lambda z, batch: squares(z, batch["y"]),
    twice(squares, lambda z: z),
    lambda z: 2 * z,
    lambda z, t: total((z - t / 2) ** 2),
    lambda y: 2 * y,
  ),
  "multi-label": Task(
    bank_of(RNG.integers(0, 2, (7, CLASSES)).astype(np.float32)),
    lambda z, batch: bernoulli(z, batch["y"]),
    twice(bernoulli, jax.nn.sigmoid),
    lambda z: 1 / (1 + np.exp(-z)),
    lambda z, t: total(np.logaddexp(0, z) - t * z),
    lambda y: y,
  ),
  "segmentation": Task(
    bank_of(RNG.integers(0, CLASSES, (7, *SIZE)).astype(np.int32), *SIZE),
    lambda z, batch: pixels(z, jax.nn.one_hot(batch["y"], CLASSES)),
    twice(pixels, jax.nn.softmax),
    softmax,
    lambda z, t: np.log(total(np.exp(z))) - total(t * z),
    lambda y: np.eye(CLASSES)[y].reshape(-1, CLASSES),
  ),
}


class Oracle:
  """What is learnt of a task, with divergences of ours or with KL."""

  def __init__(self, task, ours):
    self.task, self.strength = task, 2 if ours else 1

  def x(self, rows):
    return self.task.bank["x"][rows].astype(np.float64).reshape(-1, 2)

  def t(self, k):
    return self.task.t(self.task.bank["y"][HELD[k]]).astype(np.float64)

  def slope(self, w, x, t):
    return x.T @ (self.task.link(x @ w) - t) / len(x)

  def labels(self, w, k):
    return self.slope(w, self.x(HELD[k]), self.t(k))

  def pull(self, w, rows, partner):
    """The slope of the divergence from outputs."""
    t = self.task.link(partner)
    return self.strength * self.slope(w, self.x(rows), t)

  def learnt(self, w, k):
    return w - RATE * self.labels(w, k)

  def alone(self):
    return [self.learnt(w, k) for k, w in enumerate(STARTS)]

  def trained(self, w):
    return [self.learnt(w, k) for k in (0, 1)]

  def averaged(self, w=STARTS[0]):
    return np.tensordot(SHARES, self.trained(w), 1)

  def fml(self):
    own, memes, first = [], [], STARTS[1]
    for k, w in enumerate(STARTS):
      x = self.x(HELD[k])
      towards = [
        alpha * self.labels(a, k) + (1 - alpha) * self.pull(a, HELD[k], x @ b)
        for alpha, a, b in ((0.75, w, first), (0.25, first, w))
      ]
      own.append(w - RATE * towards[0])
      memes.append(first - RATE * towards[1])
    return [*own, np.tensordot(SHARES, memes, 1)]

  def fedkd(self):
    own, mentees, first = [], [], STARTS[1]
    for k, w in enumerate(STARTS):
      x, t = self.x(HELD[k]), self.t(k)
      both = sum(self.task.value(x @ a, t).mean() for a in (w, first))
      slopes = [
        self.labels(a, k) + self.pull(a, HELD[k], x @ b) / both
        for a, b in ((w, first), (first, w))
      ]
      own.append(w - RATE * slopes[0])
      mentees.append(first - RATE * slopes[1])
    return [*own, np.tensordot(SHARES, mentees, 1)]

  def distilled(self, w, target):
    return w - RATE * self.pull(w, PUBLIC, target)

  def periodic(self):
    a, b = map(self.averaged, STARTS)
    x = self.x(PUBLIC)
    return [self.distilled(a, x @ b), self.distilled(b, x @ a)]

  def merged(self):
    new, x = [], self.x(PUBLIC)
    for w, other in (STARTS, STARTS[::-1]):
      g = w - self.averaged(w)
      delta = w - self.distilled(w, x @ other)
      scale = np.linalg.norm(g) / np.linalg.norm(delta)
      new.append(w - (g + scale * delta) / 2)
    return new

  def feddf(self):
    clients = [w for start in STARTS for w in self.trained(start)]
    ensemble = self.x(PUBLIC) @ np.mean(clients, axis=0)
    return [self.distilled(self.averaged(w), ensemble) for w in STARTS]

  def fedet(self):
    x, smallest = self.x(PUBLIC), 1e-30
    z = np.array([x @ w for start in STARTS for w in self.trained(start)])
    sure = z.var(axis=-1, keepdims=True)
    y = np.argmax((sure * z).sum(axis=0), axis=-1)
    sure = sure * (z.argmax(axis=-1) != y)[..., None]
    q = softmax((sure * z).sum(axis=0) / (sure.sum(axis=0) + smallest))
    q = 0.05 * q * (sure.sum(axis=0) > 0)
    slope = lambda z, target: total(target)[:, None] * softmax(z) - target
    server = self.digested(STARTS[1], slope, np.eye(CLASSES)[y] + q)
    return [*map(self.averaged, STARTS), server]

  def digested(self, w, slope, target):
    x = self.x(PUBLIC)
    return w - RATE * x.T @ slope(x @ w, target) / len(x)

  def fedmd(self, slope, scores=lambda z: z):
    said = [scores(self.x(PUBLIC) @ w) for w in STARTS]
    target = np.mean(said, axis=0)
    return [
      self.learnt(self.digested(w, slope, target), k)
      for k, w in enumerate(STARTS)
    ]

  def mae(self):
    return self.fedmd(lambda z, f: np.sign(z - f) / CLASSES)

  def translated(self):
    link = self.task.link
    return self.fedmd(lambda z, f: 2 * (link(z) - link(f)))

  def kl(self):
    return self.fedmd(lambda z, f: softmax(z) - f, softmax)

  def dsfl(self):
    models, x = self.alone(), self.x(PUBLIC)
    mean = np.mean([softmax(x @ w) for w in models], axis=0)
    target, slope = softmax(mean / 0.1), lambda z, f: softmax(z) - f
    return [self.digested(w, slope, target) for w in models]

  def ktpfl(self):
    p = np.array([softmax(self.x(PUBLIC) @ w) for w in STARTS])
    ratio = np.log(p.mean(axis=0)) - np.log(p) + 1
    c = 0.5 - 0.25 * np.einsum("jnc,knc->kj", p, ratio) / p.shape[1]
    # The nearest distributions of two.
    c -= (c.sum(axis=1, keepdims=True) - 1) / 2
    targets = np.einsum("kj,jnc->knc", np.clip(c, 0, 1), p)
    slope = lambda z, f: softmax(z) - f
    return [
      self.learnt(self.digested(w, slope, target), k)
      for k, (w, target) in enumerate(zip(STARTS, targets))
    ]


# --- The methods --------------------------------------------------------------


def line(start):
  weights = jnp.asarray(start, jnp.float32)
  return core.Model(
    lambda key: core.Variables(weights, {}),
    lambda v, x, key, train: (x @ v.params, v.stats),
  )


LINES = [line(start) for start in STARTS]
BOTH = [LINES[0]] * 2
SAME = core.Model(
  lambda key: core.Variables({}, {}), lambda v, x, key, train: (x, v.stats)
)
HEADED = [headed(SAME, LINES[0])] * 2
# The mean of a client's features and the shared ones, which are the same.
MEAN = SAME._replace(
  apply=lambda v, x, key, train: ((x[..., :2] + x[..., 2:]) / 2, v.stats)
)
SHARED = dict(shared_body=SAME, shared_head=LINES[1])
NESTED = [matryoshka(SAME, LINES[0], MEAN, **SHARED)] * 2


def of_clients(method, models=LINES, **options):
  """A method of two clients, whose batches are all that they hold."""

  def build(task, **ours):
    clients = [hetfl.Client(model, loss=task.loss) for model in models]
    algorithm = method(
      clients, learning_rate=RATE, optimizer=optax.sgd, **options, **ours
    )
    held = hetfl.ClientPopulation.from_lists(task.bank, HELD)
    plan = hetfl.plan_round(
      {"train": held}, seed=0, round=1, batch_size=3, tail="short"
    )
    return algorithm, plan, {"train": task.bank}

  return build


def of_pools(method, models=LINES, distiller=True, **options):
  """A method of two pools with the same clients."""

  def build(task, divergence=None):
    own = None
    if divergence is not None:

      def own(student, teachers, start, batch, weights, **mix):
        target = sum(teachers) / len(teachers)
        return jnp.sum(weights * divergence(student, target, 1.0))

    pools = [
      hetfl.Pool(
        model,
        name,
        learning_rate=RATE,
        loss=task.loss,
        server_lr=1.0,
        server_optimizer=fedavg_server,
      )
      for name, model in zip("ab", models)
    ]
    how = hetfl.Distiller(
      RATE, regularization=0.0, optimizer=optax.sgd, divergence=own
    )
    algorithm = method(pools, *[how] * distiller, rounds=None, **options)
    held = hetfl.ClientPopulation.from_lists(task.bank, HELD)
    plan = hetfl.plan_round(
      {"a": held, "b": held},
      hetfl.Subset(task.bank, np.array(PUBLIC)),
      seed=0,
      round=1,
      batch_size=3,
      distill_batch_size=2,
      tail="short",
    )
    return algorithm, plan, dict.fromkeys(("a", "b", "distill"), task.bank)

  return build


def of_parties(method, public=True, **options):
  """A method of two parties."""

  def build(task, divergence=None):
    ours = {}
    if divergence is not None:
      ours["digest_loss"] = Translator(lambda z, t: z, divergence)
    parties = [
      hetfl.Participant(model, name, learning_rate=RATE, loss=task.loss)
      for name, model in zip("ab", LINES)
    ]
    held = {
      name: hetfl.Subset(task.bank, np.array(rows))
      for name, rows in zip("ab", HELD)
    }
    plan = hetfl.plan_fit(held, seed=0, round=1, batch_size=3)
    if public:
      plan = hetfl.plan_fedmd(
        hetfl.Subset(task.bank, np.array(PUBLIC)),
        held,
        seed=0,
        round=1,
        subset=2,
        revisit_epochs=1,
      )
    data = dict.fromkeys(("a", "b", "public"), task.bank)
    return method(parties, **options, **ours), plan, data

  return build


def own(state):
  return [w for group in state.clients for w in group.learner.params]


def learners(state):
  return [learner.params for learner in state.clients]


def pools(state):
  return [learner.params for learner in state.server]


class Row(NamedTuple):
  """A method.

  Attributes:
    build: `(task, **ours) -> algorithm, plan, data`.
    models: what of a state to compare with the oracle.
    oracle: what these are after a round.
    refuses: what it says of the tasks that it refuses, by their first letters.
    ours: whether it is given a divergence of ours.
  """

  build: Callable[..., Any]
  models: Callable[[core.State], list[jax.Array]] | None = None
  oracle: Callable[[Oracle], list[np.ndarray]] | None = None
  refuses: dict[str, str] = {}
  ours: bool = False


def exclusive(words):
  """A refusal of all labels but those of one class for each position."""
  return dict.fromkeys("rm", words)


def of_class_means(method, models=HEADED, **options):
  """A method that refuses all labels but one class for each example."""
  words = "needs one class: for other labels use lgfedavg, fml or fedmd"
  build = of_clients(method, models, **options)
  return Row(build, refuses=dict.fromkeys("rms", words))


def with_and_without(name, row, argument):
  """A row without a divergence of ours, and one that is given it."""
  refuses = exclusive(f"for other labels give {argument}(divergence=)")
  return {
    name: row._replace(refuses=refuses),
    f"{name} with ours": row._replace(ours=True),
  }


def with_server(pools, **options):
  server = hetfl.Participant(
    LINES[1], "server", learning_rate=RATE, optimizer=optax.sgd
  )
  return fedet(pools, server, **options)


def scaffolds(clients, *, optimizer, **options):
  del optimizer  # It is SGD.
  return scaffold(clients, **options)


MUTUAL = lambda state: [*own(state), state.server.params]
NO_CLASSES = exclusive("for other labels use fedmd with 'mae' or a Translator")
ROWS = {
  "personal": Row(of_clients(personal), own, Oracle.alone),
  "ditto": Row(
    of_clients(ditto, BOTH),
    MUTUAL,
    lambda of: [*of.trained(STARTS[0]), of.averaged()],
  ),
  "scaffold": Row(
    of_clients(scaffolds, BOTH),
    lambda state: [state.server.model.params],
    lambda of: [np.mean(of.trained(STARTS[0]), axis=0)],
  ),
  "lgfedavg": Row(
    of_clients(lgfedavg, HEADED),
    lambda state: [state.server.params],
    lambda of: [of.averaged()],
  ),
  "fedmrl": Row(
    of_clients(fedmrl, NESTED),
    lambda state: [state.server.params["head"]],
    lambda of: [of.averaged(STARTS[1])],
  ),
  "fedavg": Row(
    of_pools(hetfl.fedavg, distiller=False),
    pools,
    lambda of: [of.averaged(w) for w in STARTS],
  ),
  "fit": Row(
    of_parties(hetfl.fit, public=False),
    lambda state: [party.learner.params for party in state.clients],
    Oracle.alone,
  ),
  **with_and_without(
    "fml",
    Row(
      of_clients(hetfl.fml, global_model=LINES[1], alpha=0.75, beta=0.25),
      MUTUAL,
      Oracle.fml,
    ),
    "fml",
  ),
  **with_and_without(
    "fedkd",
    Row(of_clients(fedkd, mentee=LINES[1], energy=1.0), MUTUAL, Oracle.fedkd),
    "fedkd",
  ),
  **with_and_without(
    "periodic",
    Row(of_pools(hetfl.periodic_codist, period=1), pools, Oracle.periodic),
    "Distiller",
  ),
  **with_and_without(
    "merged",
    Row(of_pools(hetfl.merged_codist, alpha=0.5), pools, Oracle.merged),
    "Distiller",
  ),
  **with_and_without(
    "feddf", Row(of_pools(feddf), pools, Oracle.feddf), "Distiller"
  ),
  "fedet": Row(
    of_pools(with_server, distiller=False),
    pools,
    Oracle.fedet,
    exclusive("for other labels use feddf with Distiller(divergence=)"),
  ),
  "heterofl": Row(
    of_clients(heterofl, BOTH, global_model=LINES[0]),
    lambda state: [state.server.params],
    lambda of: [of.averaged()],
  ),
  "fedmd": Row(of_parties(hetfl.fedmd), learners, Oracle.mae),
  "fedmd with ours": Row(
    of_parties(hetfl.fedmd), learners, Oracle.translated, ours=True
  ),
  "fedmd with 'kl'": Row(
    of_parties(hetfl.fedmd, digest_loss="kl"), learners, Oracle.kl, NO_CLASSES
  ),
  "dsfl": Row(of_parties(dsfl), learners, Oracle.dsfl, NO_CLASSES),
  "ktpfl": Row(
    of_parties(ktpfl, temperature=1.0, coefficients_lr=0.25),
    learners,
    Oracle.ktpfl,
    NO_CLASSES,
  ),
  "fd": of_class_means(fd, LINES, num_classes=CLASSES),
  "fedgen": of_class_means(
    fedgen, head=LINES[0], num_classes=CLASSES, num_features=2
  ),
  "fedgh": of_class_means(fedgh, head=LINES[0]),
  "fedgkt": of_class_means(
    fedgkt, server=LINES[0], num_classes=CLASSES, num_examples=9
  ),
  "fedproto": of_class_means(fedproto, num_classes=CLASSES, num_features=2),
  "fedtgp": of_class_means(fedtgp, num_classes=CLASSES, num_features=2),
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("row", ROWS)
def test_labels_are_learnt_or_refused(row, task):
  row, words = ROWS[row], ROWS[row].refuses.get(task[0])
  task = TASKS[task]
  ours = dict(divergence=task.divergence) if row.ours else {}
  algorithm, plan, data = row.build(task, **ours)
  state = algorithm.init(jax.random.key(0))
  step = lambda state: algorithm.step(state, plan, data)[0]
  if words is None:
    found = row.models(jax.jit(step)(state))
    expected = row.oracle(Oracle(task, row.ours))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    return
  with pytest.raises(ValueError) as error:
    jax.eval_shape(step, state)
  assert f"batch['y'] is {task.bank['y'].dtype} of shape" in str(error.value)
  assert any(words in note for note in error.value.__notes__)


@pytest.mark.parametrize("row", ["fml", "fedkd", "merged", "feddf", "dsfl"])
def test_labels_of_another_name_may_be_anything(row):
  bank = dict(TASKS["regression"].bank)
  task = TASKS["regression"]._replace(
    bank=bank | {"target": bank.pop("y")},
    loss=lambda z, batch: squares(z, batch["target"]),
  )
  algorithm, plan, data = ROWS[row].build(task)
  step = lambda state: algorithm.step(state, plan, data)[0]
  with pytest.raises(ValueError, match="takes labels 'y': name the bank's"):
    jax.eval_shape(step, algorithm.init(jax.random.key(0)))


def test_feddf_takes_no_mean_of_features():
  def apply(variables, x, key, train):
    features = (x @ variables.params)[:, None]
    return TokenLogits(features, jnp.eye(CLASSES), jnp.zeros(CLASSES)), {}

  models = [model._replace(apply=apply) for model in LINES]
  task = TASKS["regression"]
  task = task._replace(loss=lambda z, batch: total(z.features[:, 0]))
  algorithm, plan, data = of_pools(feddf, models)(task, task.divergence)
  step = lambda state: algorithm.step(state, plan, data)[0]
  with pytest.raises(ValueError, match="feddf: outputs must be an array"):
    jax.eval_shape(step, algorithm.init(jax.random.key(0)))


def test_the_guide_says_what_each_method_takes():
  guide = pathlib.Path(__file__).parent.parent / "docs/methods.md"
  _, table = guide.read_text().split("| method | regression, multi-label |")
  told = {}
  for line in table.split("\n\n")[0].splitlines()[2:]:
    names, *cells = line.strip("|").split("|")
    for name in re.findall(r"`(\w+?)(?:_codist)?`", names):
      told[name] = [cell.split()[0].strip(";") for cell in cells]

  def answer(name, task):
    if task not in ROWS[name].refuses:
      return "yes"
    return "with" if f"{name} with ours" in ROWS else "no"

  assert told == {
    name: [answer(name, task) for task in "rs"] for name in (*CASES, "personal")
  }
