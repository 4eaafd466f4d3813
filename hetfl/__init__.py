"""Heterogeneous federated learning by distillation, in JAX."""

from hetfl.algorithms.codist import merged_codist, periodic_codist
from hetfl.algorithms.fedavg import fedavg, Pool
from hetfl.algorithms.fedmd import fedmd, plan_fedmd
from hetfl.algorithms.fit import fit, plan_fit
from hetfl.algorithms.fml import fml, local_model, meme_model
from hetfl.batches import Batches, localize, Plan, stack_plans
from hetfl.clients import Client
from hetfl.core import (
  Algorithm,
  cross_entropy,
  Mean,
  Model,
  State,
  Variables,
  with_hyper,
)
from hetfl.distill import Distiller
from hetfl.engine import default_engine, Inline, Threads
from hetfl.evaluate import ClientEvaluator, Evaluator
from hetfl.local import Learner, Participant
from hetfl.plans import plan_round
from hetfl.population import ClientPopulation, put_banks, Subset

__version__ = "0.1.0"

__all__ = (
  "Algorithm",
  "Batches",
  "Client",
  "ClientEvaluator",
  "ClientPopulation",
  "Distiller",
  "Evaluator",
  "Inline",
  "Learner",
  "Mean",
  "Model",
  "Participant",
  "Plan",
  "Pool",
  "State",
  "Subset",
  "Threads",
  "Variables",
  "cross_entropy",
  "default_engine",
  "fedavg",
  "fedmd",
  "fit",
  "fml",
  "local_model",
  "localize",
  "meme_model",
  "merged_codist",
  "periodic_codist",
  "plan_fedmd",
  "plan_fit",
  "plan_round",
  "put_banks",
  "stack_plans",
  "with_hyper",
)
