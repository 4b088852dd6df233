"""Options of XLA's compiler for the programs of one task and plan.

They are checked before anything is traced, and all functions of a program are jitted here, so that
step, loops, evaluation and prediction are compiled alike:

    compiler_options={"xla_gpu_enable_pipelined_all_gather": True}
      checked_options    (("xla_gpu_enable_pipelined_all_gather", True),)   a part of a cache's key
      try_options        compiles a sum with them: the compiler takes names and values
      jitted             jax.jit(fun, compiler_options=...)
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from plurax import errors
from plurax.mesh import replicated

Options = tuple[tuple[str, bool | int | float | str], ...]
"""Names and values, sorted by name."""


def checked_options(options: Any) -> Options:
    """Return options that were given, or none. Raises `ArgumentError` for what is no such thing."""
    if options is None:
        return ()
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise errors.ArgumentError(
            f"compiler_options={options!r}: give a dict from names of options of XLA's compiler to "
            "their values, such as {'xla_gpu_enable_pipelined_all_gather': True}, or None."
        )
    plain = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in options.items()
    }
    for name, value in plain.items():
        if not isinstance(value, bool | int | float | str):
            raise errors.ArgumentError(
                f"compiler_options={{{name!r}: {value!r}}}: a {type(value).__name__} is no value "
                "of an option. Give True or False, a number or a text."
            )
    return tuple(sorted(plain.items()))


def try_options(options: Options, mesh: Mesh) -> None:
    """Raise `ArgumentError` for options that the compiler of a mesh's devices refuses."""
    if not options:
        return
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh))
    try:
        jitted(lambda x: x + x, options).trace(number).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        raise _refused(options, mesh.devices.flat[0].device_kind, str(error)) from None


def _refused(options: Options, kind: str, reason: str) -> errors.ArgumentError:
    said = reason.splitlines()[0].partition(": ")[2].rstrip(": .") or reason
    name, value = next((one for one in options if one[0] in said), (None, None))
    if name is None:
        return errors.ArgumentError(
            f"compiler_options={dict(options)}: XLA's compiler for {kind} refuses them, and says: "
            f"{said}. Leave out what it does not take."
        )
    if "No such compile option" not in said:
        return errors.ArgumentError(
            f"compiler_options={{{name!r}: {value!r}}}: XLA's compiler for {kind} does not take "
            f"this value, and says: {said}. Give a switch True or False, another option a number "
            "or a text of its kind."
        )
    return errors.ArgumentError(
        f"compiler_options={{{name!r}: {value!r}}}: XLA's compiler for {kind} has no such option. "
        "A name is that of a flag of XLA without its dashes, such as "
        "'xla_gpu_enable_pipelined_all_gather'; the compiler for TPUs alone knows those that begin "
        "with 'xla_tpu_'. Correct the name, or leave the option out."
    )


def jitted(fun: Callable[..., Any], options: Options, **how: Any) -> Any:
    """Return `jax.jit(fun, **how)`, compiled with options."""
    return jax.jit(fun, compiler_options=dict(options) or None, **how)
