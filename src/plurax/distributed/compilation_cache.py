"""JAX's compilation cache, and programs for several CPU devices.

XLA's CPU client gives all collectives of a program that it loads from the cache the same number.
Concurrent ones then receive each other's data: the program returns wrong numbers, or ends the
process (seen with JAX 0.10 and 0.12). Run one after another they are right, and on two cores no
slower. So the flag for that is set wherever devices are chosen, before JAX starts, and where that
was not possible such a program is refused.
"""

import os

import jax

from plurax import errors

ONE_AT_A_TIME = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
"""An XLA flag under which a program on CPU runs its operations one after another."""


def make_cache_safe() -> None:
    """Set the flag where a cache is on; call it before the first use of JAX."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _is_cached() and ONE_AT_A_TIME not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {ONE_AT_A_TIME}".strip()


def check_cache() -> None:
    """Raise `PlanError` where a program for several CPU devices could be loaded from a cache."""
    if _is_cached() and ONE_AT_A_TIME not in os.environ.get("XLA_FLAGS", ""):
        directory = jax.config.values["jax_compilation_cache_dir"]
        raise errors.PlanError(
            f"JAX's compilation cache is on ({directory}), and a program for several CPU devices "
            "that XLA loads from it computes wrong numbers: its collectives receive each other's "
            "data. Turn the cache on before plurax.virtual_devices(...), and call that before any "
            f"other use of JAX; or start with XLA_FLAGS={ONE_AT_A_TIME}; or turn the cache off "
            'with jax.config.update("jax_enable_compilation_cache", False). Only CPU devices are '
            "affected."
        )


def _is_cached() -> bool:
    config = jax.config.values
    return bool(config["jax_compilation_cache_dir"] and config["jax_enable_compilation_cache"])
