"""The methods that `compare.py` runs side by side: a line each in `METHODS`.

`e` is compare_run's `Experiment`, `s.learning_rate` the flag `--learning_rate`.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

from compare import Compare
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import hetfl
from hetfl import core
from hetfl.algorithms import (
  ditto,
  dsfl,
  fd,
  feddf,
  fedet,
  fedgen,
  fedgh,
  fedgkt,
  fedkd,
  fedmrl,
  fedproto,
  fedtgp,
  heterofl,
  ktpfl,
  lgfedavg,
  personal,
  scaffold,
)
from hetfl.algorithms.public import score_bytes
from hetfl.engine.work import row
from hetfl.model import parted
from hetfl.models.fedgen import Generator
from hetfl.run import training


class Kind(NamedTuple):
  """An architecture: its name, and the share of its channels."""

  model: str
  width: float = 1.0


by_head = lambda outputs, sent: {"": getattr(outputs, "logits", outputs)}


class Method(NamedTuple):
  """A method, as `METHODS` names them.

  Attributes:
    make: the library's function. It gets who takes part, by the name `of`, and
      what all of that kind take.
    more: `(experiment, s) -> its other arguments`.
    of: `clients`, whose state is of `hetfl.clients.Group`s; `parties`; or
      `pools` of the clients of an architecture.
    shared: `state -> models`, one for all clients of each architecture.
    model: `(experiment, kind) -> model` of a client; by default its outputs are
      logits.
    scores: `(outputs, what the server sent) -> class scores` by way; by default
      the logits.
    sent: `state -> what the server sent`, of which `scores` takes notice.
    ways: how clients classify; the paper's way is "", others are suffixes.
    server: `state -> variables` of the --global_model, by which clients may
      classify too, "_by_server".
    traffic: `(experiment, s, kind) -> bytes` that a client sends and receives
      in a round.
  """

  make: Callable[..., core.Algorithm]
  more: Callable[[Any, Compare], dict[str, Any]] = lambda e, s: {}
  of: str = "clients"
  shared: Callable[[Any], Sequence[hetfl.Variables]] | None = None
  model: Callable[[Any, Kind], core.Model] = lambda e, kind: e.model(kind)
  scores: Callable[[Any, Any], dict[str, jax.Array]] = by_head
  sent: Callable[[Any], Any] = lambda state: ()
  ways: Sequence[str] = ("",)
  server: Callable[[Any], hetfl.Variables] | None = None
  traffic: Callable[..., Sequence[int]] = lambda e, s, kind: (0, 0)


def _numbers(e, s):
  return dict(num_classes=e.num_classes, num_features=s.num_features)


def _prototypes(e, s):
  return _numbers(e, s) | dict(weight=s.prototype_weight)


def _server_rate(e, s):
  return dict(server_learning_rate=s.server_learning_rate)


def _distiller(e, s):
  made = hetfl.Distiller(
    s.distill_lr, regularization=0.0, transform=e.transform
  )
  return dict(distiller=made)


def _larger(e, s):
  server = hetfl.Participant(
    _shared_model(e, s),
    "server",
    learning_rate=s.distill_lr,
    transform=e.transform,
    optimizer=optax.adam,
  )
  return dict(server=server, diversity=s.diversity, shared="head")


def _nearest(outputs, sent):
  sent = getattr(sent, "prototypes", sent)
  nearest = fedproto.nearest(outputs, sent)
  return {"": nearest, "_by_head": outputs.logits}


def _large(num_features, num_classes):
  """FedGKT's server: dense layers, as the clients' features are vectors."""
  layers = [nn.Dense(512), nn.relu, nn.Dense(512), nn.relu]
  module = nn.Sequential([*layers, nn.Dense(num_classes)])
  return core.Model.from_flax(module, jnp.zeros((1, num_features)))


def _by_large(outputs, sent):
  features, logits = outputs
  large = _large(features.shape[-1], logits.shape[-1])
  return {"": large.predict(sent, features), "_by_head": logits}


_headed = lambda e, kind: e.headed(kind)
_shared_model = lambda e, s: e.model(Kind(s.global_model))
_global_bytes = lambda e, s, kind: [e.num_bytes(Kind(s.global_model))] * 2
_own_bytes = lambda e, s, kind: [e.num_bytes(kind)] * 2
_head_bytes = lambda e, s, kind: [4 * e.num_classes * (s.num_features + 1)] * 2


def _prototype_bytes(e, s, kind):
  numbers = e.num_classes * s.num_features
  return 4 * (numbers + e.num_classes), 4 * numbers


def _generator_bytes(e, s, kind):
  head, _ = _head_bytes(e, s, kind)
  inputs = jnp.zeros((1, _GENERATOR["noise"] + e.num_classes))
  module = Generator(_GENERATOR["hidden"], s.num_features)
  shapes = e.shapes(core.Model.from_flax(module, inputs))
  return head, head + training.num_bytes(shapes)


def _example_bytes(e, s, kind):
  number = int(e.images.train.sizes.sum()) // s.num_clients  # On average.
  sent = s.num_features + e.num_classes + 1
  # Sent in each epoch.
  return number * s.local_epochs * 4 * sent, number * 4 * e.num_classes


def _small_bytes(e, s, kind):
  shared = parted(e.shapes(e.nested(kind)))["shared"]
  return [training.num_bytes(shared)] * 2


def _one_of_group(state):
  return [row(group.learner.variables, 0) for group in state.clients]


_GENERATOR = dict(noise=32, hidden=128)  # FedGen's.
# Methods with a --global_model.
WITH_GLOBAL = {"fml", "fedkd", "fedet", "fedmrl"}
WITH_ONE_MODEL = {"ditto", "scaffold"}  # The clients' and the server's.
_by_prototype = functools.partial(
  Method,
  model=_headed,
  scores=_nearest,
  sent=lambda state: state.server,
  ways=("", "_by_head"),
  traffic=_prototype_bytes,
)
_by_scores = functools.partial(
  Method,
  of="parties",
  traffic=lambda e, s, kind: score_bytes(s.public_subset, e.num_classes),
)
_with_global = functools.partial(
  Method,
  ways=("", "_by_server"),
  server=lambda state: state.server,
  traffic=_global_bytes,
)
_in_pools = functools.partial(
  Method,
  of="pools",
  shared=lambda state: [learner.variables for learner in state.server],
  traffic=_own_bytes,
)
METHODS = {
  "local": Method(personal.personal),
  "pooled": Method(personal.personal, shared=_one_of_group),
  "fml": _with_global(
    hetfl.fml,
    lambda e, s: dict(
      global_model=_shared_model(e, s),
      alpha=s.fml_alpha,
      beta=s.fml_beta,
    ),
  ),
  "fedkd": _with_global(  # Its bytes are those before compression.
    fedkd.fedkd, lambda e, s: dict(mentee=_shared_model(e, s))
  ),
  "fd": Method(
    fd.fd,
    lambda e, s: dict(num_classes=e.num_classes, weight=s.fd_weight),
    traffic=lambda e, s, kind: [4 * e.num_classes * (e.num_classes + 1)] * 2,
  ),
  "fedproto": _by_prototype(fedproto.fedproto, _prototypes),
  "fedtgp": _by_prototype(
    fedtgp.fedtgp, lambda e, s: _prototypes(e, s) | _server_rate(e, s)
  ),
  "fedgh": Method(
    fedgh.fedgh,
    lambda e, s: dict(head=e.head) | _server_rate(e, s),
    model=_headed,
    traffic=_head_bytes,
  ),
  "lgfedavg": Method(lgfedavg.lgfedavg, model=_headed, traffic=_head_bytes),
  "fedgen": Method(
    fedgen.fedgen,
    lambda e, s: (
      dict(head=e.head) | _GENERATOR | _numbers(e, s) | _server_rate(e, s)
    ),
    model=_headed,
    traffic=_generator_bytes,
  ),
  "fedgkt": Method(
    fedgkt.fedgkt,
    lambda e, s: (
      dict(
        server=_large(s.num_features, e.num_classes),
        num_classes=e.num_classes,
        num_examples=len(e.images.train.bank["y"]),
        temperature=s.temperature,
      )
      | _server_rate(e, s)
    ),
    model=_headed,
    scores=_by_large,
    sent=lambda state: state.server.model,
    ways=("", "_by_head"),
    traffic=_example_bytes,
  ),
  "fedmrl": Method(
    fedmrl.fedmrl,
    model=lambda e, kind: e.nested(kind),
    traffic=_small_bytes,
  ),
  "ditto": Method(
    ditto.ditto, lambda e, s: dict(weight=s.ditto_weight), traffic=_own_bytes
  ),
  "scaffold": Method(  # Its clients train by plain SGD.
    lambda optimizer, **options: scaffold.scaffold(**options),
    shared=lambda state: [state.server.model],
    traffic=lambda e, s, kind: [2 * e.num_bytes(kind)] * 2,
  ),
  "heterofl": Method(  # Group normalisation makes its Scaler needless.
    heterofl.heterofl,
    lambda e, s: dict(global_model=e.model(e.of_client[0])),
    shared=lambda state: [
      heterofl.leading(state.server, own) for own in _one_of_group(state)
    ],
    traffic=_own_bytes,
  ),
  "fedavg": _in_pools(hetfl.fedavg),
  "fedprox": _in_pools(hetfl.fedavg),  # With a proximal term, by its flag.
  "feddf": _in_pools(feddf.feddf, _distiller),
  "fedet": _in_pools(
    fedet.fedet,
    _larger,
    ways=("", "_by_server"),
    server=lambda state: state.server[-1].variables,
  ),
  "codist": _in_pools(
    hetfl.periodic_codist,
    lambda e, s: _distiller(e, s) | dict(period=s.codist_period),
  ),
  "mergedcodist": _in_pools(
    hetfl.merged_codist,
    lambda e, s: _distiller(e, s) | dict(alpha=s.merge_alpha),
  ),
  "fedmd": _by_scores(hetfl.fedmd),
  "dsfl": _by_scores(dsfl.dsfl, lambda e, s: dict(temperature=s.temperature)),
  "ktpfl": _by_scores(
    ktpfl.ktpfl, lambda e, s: dict(temperature=s.temperature)
  ),
}
