"""Four CPU devices, so that meshes can be tested anywhere."""

import jax

jax.config.update("jax_num_cpu_devices", 4)
# An array that broadcasts by accident is an error.
jax.config.update("jax_numpy_rank_promotion", "raise")
