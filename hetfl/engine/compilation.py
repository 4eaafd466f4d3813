"""How programs are compiled."""

from collections.abc import Callable
import functools

import jax


def jit(
  fn: Callable, donate: tuple[int, ...] = (), *, once: bool = False
) -> Callable:
  """`jax.jit` with options that shorten compilation on CPUs.

  There XLA's fusion emitters take half of the compilation time and make
  programs no faster; they are switched off.

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
  options: dict[str, bool | int] = {}
  if jax.default_backend() == "cpu":
    options |= _known("xla_cpu_use_fusion_emitters", False)
    if once:
      options |= _known("xla_backend_optimization_level", 0)
  return jax.jit(fn, donate_argnums=donate, compiler_options=options or None)


@functools.cache
def _known(name: str, value: bool | int) -> dict[str, bool | int]:
  """The option as a dict; empty if this version of XLA does not have it."""
  option = {name: value}
  try:
    jax.jit(lambda: 0, compiler_options=option).lower().compile()
  except jax.errors.JaxRuntimeError:
    return {}
  return option
