"""Heterogeneous federated learning by distillation, in JAX."""

from hetfl.codist import merge_gradients, merged_codist, periodic_codist
from hetfl.core import Algorithm, Mean, Model, Variables
from hetfl.distill import Distiller
from hetfl.engine import default_engine, Inline, Threads
from hetfl.evaluate import Evaluator
from hetfl.fedavg import (
  fedadam_server,
  fedavg,
  fedavg_server,
  fedavgm_server,
  fedyogi_server,
  Pool,
)
from hetfl.fml import (
  fml,
  group_clients,
  independent,
  MutualPlan,
  plan_mutual,
)
from hetfl.mutual import momentum_sgd, mutual_loss, MutualClient
from hetfl.population import (
  ClientPopulation,
  plan_clients,
  plan_distillation,
  RoundPlan,
  stack_plans,
  Subset,
)

__version__ = "0.1.0"

__all__ = (
  "Algorithm",
  "ClientPopulation",
  "Distiller",
  "Evaluator",
  "Inline",
  "Mean",
  "Model",
  "MutualClient",
  "MutualPlan",
  "Pool",
  "RoundPlan",
  "Subset",
  "Threads",
  "Variables",
  "default_engine",
  "fedadam_server",
  "fedavg",
  "fedavg_server",
  "fedavgm_server",
  "fedyogi_server",
  "fml",
  "group_clients",
  "independent",
  "merge_gradients",
  "merged_codist",
  "momentum_sgd",
  "mutual_loss",
  "periodic_codist",
  "plan_clients",
  "plan_distillation",
  "plan_mutual",
  "stack_plans",
)
