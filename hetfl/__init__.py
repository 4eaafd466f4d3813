"""Heterogeneous federated learning by distillation, in JAX."""

from hetfl.codist import merge_gradients, merged_codist, periodic_codist
from hetfl.core import Algorithm, Mean, Model, Variables
from hetfl.distill import Distiller
from hetfl.engine import Inline, Threads
from hetfl.fedavg import fedavg, Pool
from hetfl.population import (
  ClientPopulation,
  plan_clients,
  plan_distillation,
  RoundPlan,
  Subset,
)

__version__ = "0.1.0"

__all__ = (
  "Algorithm",
  "ClientPopulation",
  "Distiller",
  "Inline",
  "Mean",
  "Model",
  "Pool",
  "RoundPlan",
  "Subset",
  "Threads",
  "Variables",
  "fedavg",
  "merge_gradients",
  "merged_codist",
  "periodic_codist",
  "plan_clients",
  "plan_distillation",
)
