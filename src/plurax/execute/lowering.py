"""Lower a program's step and loop: trace them for abstract states, data and rows."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from plurax import errors
from plurax.execute.placement import Placement
from plurax.execute.step_functions import StepFunctions
from plurax.mesh import replicated

COUNT = jax.ShapeDtypeStruct((), jnp.int32)
"""A number of examples or steps, as the compiled functions take it."""


def lower_step(functions: StepFunctions, placement: Placement) -> jax.stages.Lowered:
    """Lower a step for batches of a placement's shapes."""
    return jitted_update(functions, functions.step).lower(
        *_state(functions), placement.abstract(), COUNT
    )


def lower_loop(
    functions: StepFunctions, data: PyTree, order: tuple[Any, ...] = ()
) -> jax.stages.Lowered:
    """Lower a loop over abstract data (see `abstract_data`) in an order on the devices.

    Raises `BatchError` where the functions take no such order.
    """
    functions.check_order(order)
    loop = jitted_update(functions, functions.loop)
    return loop.lower(*_state(functions), data, *abstract(order), COUNT, COUNT)


def check_constants(error: Exception) -> None:
    """Raise `TaskError` where a compiled program misses the value of an array of another trace.

    JAX takes it for a constant while it traces, and counts it among the program's inputs.
    """
    if "inputs but called with" in str(error):
        raise errors.TaskError(
            "a function of the task, or the optimizer, kept an array of one call and used it in "
            "another (in a list, an attribute or a global variable): return it from the function "
            "in place of storing it outside."
        ) from None


def compile_all(lowered: dict[Any, jax.stages.Lowered]) -> dict[Any, jax.stages.Compiled]:
    """Compile programs at the same time: the compilation of one uses one core."""
    with ThreadPoolExecutor(len(lowered)) as pool:
        started = {key: pool.submit(one.compile) for key, one in lowered.items()}
        return {key: future.result() for key, future in started.items()}


def abstract(values: PyTree) -> PyTree:
    """Return arrays on devices as `jax.ShapeDtypeStruct`s with their shardings."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), values
    )


def abstract_data(data: PyTree, mesh: Mesh) -> PyTree:
    """Return the shapes and dtypes of a data set, and its shardings; replicated where it is not
    on the devices of the mesh.
    """
    whole = replicated(mesh)

    def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
        placed = isinstance(leaf, jax.Array) and leaf.sharding.device_set == whole.device_set
        where = leaf.sharding if placed else whole
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=where)

    return jax.tree.map(abstract_leaf, data)


def _state(functions: StepFunctions) -> tuple[Any, ...]:
    return functions.layout.abstract(functions.mesh), *abstract(functions.arguments)


def jitted_update(functions: StepFunctions, fun: Callable[..., Any]) -> Any:
    """Return `fun`, jitted: it donates its state and returns one of the same shardings."""
    like = functions.layout.abstract(functions.mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(fun, donate_argnums=0, out_shardings=(shardings, functions.metrics_sharding))


def loop_key(data: PyTree, order: tuple[Any, ...]) -> Any:
    """Return the key of a compiled loop: structure, shapes and shardings of its data and order."""
    leaves, structure = jax.tree.flatten((data, *order))
    return ("loop", structure, *((leaf.shape, leaf.sharding) for leaf in leaves))
