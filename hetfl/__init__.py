"""Heterogeneous federated learning by distillation, in JAX.

`hetfl.fedavg`, `hetfl.fml` and `hetfl.fedmd` are the functions; import other
members of the modules of these names from there, as in
`from hetfl.fedavg import linear_decay`.
"""

from hetfl.client import ClientUpdates
from hetfl.codist import merge_gradients, merged_codist, periodic_codist
from hetfl.core import (
  Algorithm,
  cross_entropy,
  Mean,
  Model,
  Variables,
)
from hetfl.distill import Distiller
from hetfl.engine import default_engine, Inline, Threads
from hetfl.evaluate import classification, ClientEvaluator, Evaluator
from hetfl.fedavg import fedavg
from hetfl.fedmd import fedmd, FedMDPlan, FedMDState, plan_fedmd
from hetfl.fml import fml, independent, MutualState
from hetfl.hyperparameters import with_hyper
from hetfl.lanes import LanePlan
from hetfl.models.language import TokenLogits
from hetfl.models.next_word import (
  next_word_metrics,
  sentence_loss,
  token_divergence,
  token_weights,
)
from hetfl.mutual import momentum_sgd, mutual_loss, MutualClient, splice
from hetfl.mutual_planning import group_clients, MutualPlan, plan_mutual
from hetfl.party import (
  fit,
  FitPlan,
  FitState,
  keras_adam,
  Party,
  plan_fit,
  Trained,
)
from hetfl.planning import (
  enough_lanes,
  localize,
  plan_clients,
  plan_distillation,
  plan_round,
  RoundPlan,
  stack_plans,
)
from hetfl.pool import (
  client_updates,
  fedadam_server,
  fedavg_server,
  fedavgm_server,
  fedyogi_server,
  Pool,
  PoolsState,
)
from hetfl.population import ClientPopulation, put_banks, Subset

__version__ = "0.1.0"

__all__ = (
  "Algorithm",
  "ClientEvaluator",
  "ClientPopulation",
  "ClientUpdates",
  "Distiller",
  "Evaluator",
  "FedMDPlan",
  "FedMDState",
  "FitPlan",
  "FitState",
  "Inline",
  "LanePlan",
  "Mean",
  "Model",
  "MutualClient",
  "MutualPlan",
  "MutualState",
  "Party",
  "Pool",
  "PoolsState",
  "RoundPlan",
  "Subset",
  "Threads",
  "TokenLogits",
  "Trained",
  "Variables",
  "classification",
  "client_updates",
  "cross_entropy",
  "default_engine",
  "enough_lanes",
  "fedadam_server",
  "fedavg",
  "fedavg_server",
  "fedavgm_server",
  "fedmd",
  "fedyogi_server",
  "fit",
  "fml",
  "group_clients",
  "independent",
  "keras_adam",
  "localize",
  "merge_gradients",
  "merged_codist",
  "momentum_sgd",
  "mutual_loss",
  "next_word_metrics",
  "periodic_codist",
  "plan_clients",
  "plan_distillation",
  "plan_fedmd",
  "plan_fit",
  "plan_mutual",
  "plan_round",
  "put_banks",
  "sentence_loss",
  "splice",
  "stack_plans",
  "token_divergence",
  "token_weights",
  "with_hyper",
)
