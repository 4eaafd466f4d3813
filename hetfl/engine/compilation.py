"""How programs are compiled."""

from collections.abc import Callable
import functools

import jax


def jit(
  fn: Callable, donate: tuple[int, ...] = (), *, once: bool = False
) -> Callable:
  """`jax.jit` with what shortens compilation on CPUs.

  There XLA's fusion emitters take half of it and make programs no faster; they
  are switched off.

  Args:
    fn: the function; it must not be called in a function that is traced.
    donate: the arguments given up to it.
    once: it runs once or twice, such as an `init`: on CPUs its compilation
      takes far longer than its run, and is done quickly, rather than well. As
      one program it still takes far less than as hundreds of small ones.

  Returns:
    The same, jitted.

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
  """The option, or nothing, if this XLA has none of that name."""
  option = {name: value}
  try:
    jax.jit(lambda: 0, compiler_options=option).lower().compile()
  except jax.errors.JaxRuntimeError:
    return {}
  return option
