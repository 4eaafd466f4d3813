"""LG-FedAvg: clients share the heads of their models and keep the bodies.

Reference: Liang et al. 2020, "Think Locally, Act Globally: Federated Learning
with Local and Global Representations", algorithm 1.
"""

from collections.abc import Sequence
from typing import Any

from hetfl import core
from hetfl.algorithms.features import of_logits, sharing
from hetfl.algorithms.personal import Method, personal
from hetfl.clients import Client


def lgfedavg(clients: Sequence[Client], **options: Any) -> core.Algorithm:
  """LG-FedAvg.

  A client begins with the server's head, trains body and head on its labels and
  sends the head; the server takes their mean with the plan's weights, which are
  numbers of examples if not uniform: `head = sum_k n_k head_k / sum_k n_k`.
  A client sends and receives a head, C (D + 1) numbers if it is one dense
  layer.

  Args:
    clients: K clients, whose models' outputs are `Features`, see `headed`: the
      bodies may differ, and the heads are alike.
    **options: `learning_rate`, `optimizer` and `engine`; see `personal`.

  Returns:
    The algorithm; see `personal`. Its state's `server` holds the head's
    variables, at first the first client's. Clients keep the heads that they
    trained, until they take part again; `with_parts` gives them the server's.
    Its metric is `loss`.

  Raises:
    ValueError: as `personal`; heads have unlike shapes.

  Reference: Liang et al. 2020, algorithm 1. Departures from the released code:
  a client keeps its optimizer's state; the mean is weighted as the plan is, the
  code's equally; the code's models start from one that FedAvg has trained, and
  are evaluated with the new head.

  Each client has the image 1, of a class of its own; bodies are 1, and heads
  begin at (0, 0). Steps of 1 on p - y, of 1/2 each, go opposite ways: the mean
  is 0.

  >>> import jax
  >>> from hetfl import ClientPopulation, plan_round
  >>> from hetfl.algorithms.features import headed
  >>> same = core.Model(lambda key: core.Variables({}, {}),
  ...                   lambda v, x, key, train: (x, v.stats))
  >>> zero = core.Model(lambda key: core.Variables(jax.numpy.zeros((1, 2)), {}),
  ...                   lambda v, x, key, train: (x @ v.params, v.stats))
  >>> bank = {'x': jax.numpy.ones((2, 1)), 'y': jax.numpy.arange(2)}
  >>> held = ClientPopulation.from_lists(bank, [[0], [1]])
  >>> plan = plan_round({'train': held}, seed=0, round=1, batch_size=1)
  >>> algorithm = lgfedavg([Client(headed(same, zero))] * 2, learning_rate=1.)
  >>> state, _ = algorithm.step(
  ...     algorithm.init(jax.random.key(0)), plan, {'train': bank})
  >>> state.clients[0].learner.params['head'][:, 0].tolist()
  [[0.5, -0.5], [-0.5, 0.5]]
  >>> state.server.params.tolist()
  [[0.0, 0.0]]
  """
  method = Method(objective=of_logits, **sharing("head"))
  return personal(clients, method, **options)
