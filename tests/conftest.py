"""Eight CPU devices, so that meshes can be tested anywhere, and experiments."""

import functools
import gc
import os

import jax
import pytest

from tests import runs

# Tests' programs are small, and their compilation is most of the time.
_QUICK_COMPILATION = "--xla_backend_optimization_level=0"
_QUICK_COMPILATION += " --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):  # later XLA has no such flag
  _QUICK_COMPILATION += " --xla_cpu_use_fusion_emitters=false"
if not os.environ.get("HETFL_TRAIN"):  # Flag files' networks are large.
  os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), _QUICK_COMPILATION]
  )
jax.config.update("jax_num_cpu_devices", 8)
# An array that broadcasts by accident is an error.
jax.config.update("jax_numpy_rank_promotion", "raise")
# Tracing makes many objects, and looking through all of JAX's takes longer.
gc.freeze()
gc.set_threshold(20_000, 20, 20)


def pytest_configure(config):
  """Programs compiled by one process, or run, serve the next."""
  if not hasattr(config, "cache"):  # With `-p no:cacheprovider`.
    return
  programs = config.cache.mkdir("programs")
  jax.config.update("jax_compilation_cache_dir", str(programs))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@pytest.fixture(scope="module", autouse=True)
def forgotten_programs():
  """No process holds the programs of all modules, which are gigabytes."""
  yield
  jax.clear_caches()
  gc.collect()


@pytest.fixture(scope="session")
def environment():
  """What experiments run in."""
  return os.environ | {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or "",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "HETFL_DATA_DIR": "",
  }


@pytest.fixture(scope="session")
def experiment(environment, tmp_path_factory):
  """Makes a `runs.Experiment` of a script's name."""
  folder = tmp_path_factory.mktemp("forks")
  with runs.Forks(environment, folder) as forks:
    yield functools.partial(
      runs.Experiment, environment=environment, forks=forks
    )
