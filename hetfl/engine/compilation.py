"""How programs are compiled, and how banks are laid out for them."""

from collections.abc import Callable
import functools
import os

import jax
from jax.experimental import layout
import numpy as np

from hetfl import checks

# What XLA may record into a GPU's command buffers (CUDA graphs): its defaults,
# plus loops and conditionals; else the host waits for each iteration of a loop
# and launches its kernels anew.
_IN_COMMAND_BUFFERS = (
  "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"
  ",CONDITIONAL,WHILE"
)

Options = dict[str, bool | int | str]


def jit(
  fn: Callable, donate: tuple[int, ...] = (), *, once: bool = False
) -> Callable:
  """`jax.jit` with the options of `compiler_options`.

  Args:
    fn: the function; it must not be called in a function that is traced.
    donate: the numbers of the arguments to donate.
    once: whether it runs only once or twice, such as an `init`. On CPUs its
      compilation takes far longer than its run, and so is done quickly, without
      optimisation. One program still takes far less time than hundreds of small
      ones.

  Returns:
    The jitted function.

  >>> float(jit(lambda x: 2 * x)(3.0)), float(jit(lambda x: x, once=True)(3.0))
  (6.0, 3.0)
  """
  options = compiler_options(once=once) or None
  return jax.jit(fn, donate_argnums=donate, compiler_options=options)


def compiler_options(*, once: bool = False) -> Options:
  """Options for XLA, which change its speed or that of its programs.

  On CPUs XLA's fusion emitters take half of the compilation time and make
  programs no faster; they are switched off. On GPUs loops become part of CUDA
  graphs, unless the environment's `XLA_FLAGS` say otherwise.

  Args:
    once: see `jit`.

  Returns:
    The options that this version of XLA has, for the default backend.

  >>> options = compiler_options() or None
  >>> float(jax.jit(lambda x: 2 * x, compiler_options=options)(3.0))
  6.0
  """
  options: Options = {}
  backend = jax.default_backend()
  if backend == "cpu":
    options |= _known("xla_cpu_use_fusion_emitters", False)
    if once:
      options |= _known("xla_backend_optimization_level", 0)
  elif backend == "gpu" and not once:
    name = "xla_gpu_enable_command_buffer"
    if name not in os.environ.get("XLA_FLAGS", ""):
      options |= _known(name, _IN_COMMAND_BUFFERS)
  return options


@functools.cache
def _known(name: str, value: bool | int | str) -> Options:
  """The option as a dict; empty if this version of XLA does not have it."""
  option: Options = {name: value}
  try:
    jax.jit(lambda: 0, compiler_options=option).lower().compile()
  except jax.errors.JaxRuntimeError:
    return {}
  return option


def bank_format(
  array: jax.Array | np.ndarray, sharding: jax.sharding.Sharding
) -> jax.sharding.Sharding | layout.Format:
  """Where and how a bank's array should lie, for `jax.device_put`.

  TPUs keep images of several channels with the examples on an inner axis, and
  would copy the whole bank in each program that gathers from it.

  Args:
    array: examples on its first axis.
    sharding: the devices.

  Returns:
    The sharding; for images on TPUs a format with the examples outermost.

  >>> there = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  >>> bank_format(np.zeros((5, 8, 8, 3)), there) is there  # not on a TPU
  True
  """
  if jax.default_backend() != "tpu" or array.ndim != 4 or array.shape[3] == 1:
    return sharding
  return layout.Format(layout.Layout((0, 3, 1, 2)), sharding)


def batch_size_or_default(batch_size: int | None) -> int:
  """The given evaluation batch size, or a default that suits the device.

  Args:
    batch_size: examples evaluated at once. `None` for the default: 40 on CPUs,
      where activations then stay in the caches, and 1,000 elsewhere.

  Returns:
    B.

  >>> batch_size_or_default(64), batch_size_or_default(None) in (40, 1000)
  (64, True)
  """
  if batch_size is not None:
    checks.counts(batch_size=batch_size)
    return batch_size
  return 40 if jax.default_backend() == "cpu" else 1000
