"""Eight CPU devices, so that meshes can be tested anywhere, and experiments."""

import functools
import os

import jax
import pytest

from tests import runs

jax.config.update("jax_num_cpu_devices", 8)
# An array that broadcasts by accident is an error.
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
  """Programs compiled by one process serve the next."""
  return os.environ | {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("jax")),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "HETFL_DATA_DIR": "",
  }


@pytest.fixture(scope="session")
def experiment(environment):
  """Makes a `runs.Experiment` of a script's name."""
  return functools.partial(runs.Experiment, environment=environment)
