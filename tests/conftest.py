"""Eight CPU devices, so that meshes can be tested anywhere, and experiments."""

import functools
import os

import jax
import pytest

from tests import runs

# The tests' own programs are small, and their compilation is most of the time.
# Not for the experiments, which run as users run them.
_QUICK_COMPILATION = "--xla_backend_optimization_level=0"
_XLA_FLAGS = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{_XLA_FLAGS} {_QUICK_COMPILATION}".strip()
jax.config.update("jax_num_cpu_devices", 8)
# An array that broadcasts by accident is an error.
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
  """Programs compiled by one process serve the next."""
  return os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": _XLA_FLAGS,
    "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("jax")),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "HETFL_DATA_DIR": "",
  }


@pytest.fixture(scope="session")
def experiment(environment):
  """Makes a `runs.Experiment` of a script's name."""
  return functools.partial(runs.Experiment, environment=environment)
