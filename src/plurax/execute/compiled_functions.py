"""Lower a program's functions for abstract states, data and rows, and compile them when needed.

What is compiled depends on shapes alone. Populations of as many members share it: their seeds and
hyperparameters are arguments of every call.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from plurax import errors
from plurax.execute.array_data import ArrayData
from plurax.execute.compiler_options import jitted
from plurax.execute.placement import Placement, jax_dtype
from plurax.execute.step_functions import StepFunctions
from plurax.mesh import replicated

COUNT: Any = jax.ShapeDtypeStruct((), jnp.int32)
"""A number of examples or steps, as the compiled functions take it."""


@dataclasses.dataclass(frozen=True)
class CompileRecord:
    """How a function was compiled: its `jaxpr`, as traced, the `seconds` of tracing and compiling,
    and whether it is a loop over steps."""

    jaxpr: Any
    seconds: float
    looped: bool


def _record(key: Any, traced: jax.stages.Traced, began: float) -> CompileRecord:
    """Return the record of a function that has just been compiled."""
    return CompileRecord(traced.jaxpr, time.perf_counter() - began, isinstance(key, tuple))


def trace_step(functions: StepFunctions, placement: Placement) -> jax.stages.Traced:
    """Trace a step for batches of a placement's shapes."""
    step = jitted_update(functions, functions.step)
    return step.trace(*_state(functions), placement.abstract(), COUNT)


def trace_loop(
    functions: StepFunctions, data: PyTree, order: tuple[Any, ...] = ()
) -> jax.stages.Traced:
    """Trace a loop over abstract data (see `abstract_data`) in an order on the devices.

    Raises `BatchError` where the functions take no such order.
    """
    functions.check_order(order)
    loop = jitted_update(functions, functions.loop)
    return loop.trace(*_state(functions), data, *abstract(order), COUNT, COUNT)


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


def compile_all(traced: dict[Any, jax.stages.Traced]) -> dict[Any, jax.stages.Compiled]:
    """Compile programs at the same time: the compilation of one uses one core."""
    lowered = {key: one.lower() for key, one in traced.items()}
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
        own = getattr(leaf, "sharding", None)
        where = own if own is not None and own.device_set == whole.device_set else whole
        return jax.ShapeDtypeStruct(np.shape(leaf), jax_dtype("", leaf), sharding=where)

    return jax.tree.map(abstract_leaf, data)


def lower_most_run(
    functions: StepFunctions, placement: Placement, data: ArrayData | None
) -> jax.stages.Lowered:
    """Lower the loop over the data that members read themselves, or without data the step."""
    if data is None:
        return trace_step(functions, placement).lower()
    return trace_loop(functions, abstract_data(data.arrays, functions.mesh)).lower()


def abstract_inference(functions: StepFunctions) -> tuple[Any, ...]:
    """Return what `evaluate` and `predict` take before their rows, abstract."""
    like = functions.layout.abstract(functions.mesh)
    return like.params, like.model_state, *abstract(functions.arguments)


def _state(functions: StepFunctions) -> tuple[Any, ...]:
    return functions.layout.abstract(functions.mesh), *abstract(functions.arguments)


def jitted_update(functions: StepFunctions, fun: Callable[..., Any]) -> Any:
    """Return `fun`, jitted: it donates its state and returns one of the same shardings."""
    like = functions.layout.abstract(functions.mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    out = (shardings, functions.metrics_sharding)
    return jitted(fun, functions.options, donate_argnums=0, out_shardings=out)


def loop_key(data: PyTree, order: tuple[Any, ...]) -> Any:
    """Return the key of a compiled loop: structure, shapes and shardings of its data and order."""
    leaves, structure = jax.tree.flatten((data, *order))
    return ("loop", structure, *((leaf.shape, leaf.sharding) for leaf in leaves))


class CompiledFunctions:
    """The compiled functions of a program.

    **Arguments:** `functions`; `placement`, of a step's batch; `data`, the shapes of the arrays
    that members read themselves, or None.

    **Attributes:** `so_far`, what has been compiled, by what it is: `"step"`, `"init"` or the key
    of a loop; `records`, of these, how; `gradients`, `apply` and `init`, jitted: JAX compiles them
    when they are called.
    """

    def __init__(
        self, functions: StepFunctions, placement: Placement, data: ArrayData | None
    ) -> None:
        self._functions, self._placement, self._data = functions, placement, data
        self.so_far: dict[Any, jax.stages.Compiled] = {}
        self.records: dict[Any, CompileRecord] = {}

    @property
    def step(self) -> jax.stages.Compiled:
        """The compiled step."""
        return self._compile("step", lambda: trace_step(self._functions, self._placement))

    def _compile(self, key: Any, trace: Callable[[], jax.stages.Traced]) -> jax.stages.Compiled:
        if key not in self.so_far:
            began = time.perf_counter()
            traced = trace()
            self.so_far[key] = traced.lower().compile()
            self.records[key] = _record(key, traced, began)
        return self.so_far[key]

    def record_of(self, compiled: jax.stages.Compiled) -> CompileRecord | None:
        """Return how a step or a loop was compiled, None where it is not of these."""
        keys = (key for key, one in self.so_far.items() if one is compiled)
        return self.records.get(next(keys, None))

    def loop(self, data: PyTree, order: tuple[Any, ...] = ()) -> jax.stages.Compiled:
        """Return the compiled loop for data and an order of these shapes."""
        data = abstract_data(data, self._functions.mesh)
        key = loop_key(data, order)
        return self._compile(key, lambda: trace_loop(self._functions, data, order))

    @property
    def most_run(self) -> jax.stages.Compiled:
        """The step; of members that read data themselves the loop, once compiled."""
        if self._data is None:
            return self.step
        data = abstract_data(self._data.arrays, self._functions.mesh)
        return self.so_far.get(loop_key(data, ())) or self.step

    @functools.cached_property
    def gradients(self) -> Any:
        """The first half of a step."""
        return jitted(self._functions.gradients, self._functions.options)

    def trace_gradients(self) -> jax.stages.Traced:
        """Trace the first half of a step; of one network for a part of a step's batch."""
        first = (COUNT,) if self._functions.count is None else ()
        rows = self._placement.abstract()
        return self.gradients.trace(*_state(self._functions), rows, COUNT, *first)

    @functools.cached_property
    def apply(self) -> Any:
        """The second half of a step."""
        return jitted_update(self._functions, self._functions.apply)

    @functools.cached_property
    def init(self) -> Any:
        """The function of a fresh state."""
        functions = self._functions
        like = functions.layout.abstract(functions.mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
        return jitted(functions.init, functions.options, out_shardings=shardings)

    def init_members(self, start: dict[str, jax.Array]) -> jax.stages.Compiled:
        """Return the compiled function of fresh members, and compile their loop beside it."""
        if "init" not in self.so_far:
            began = time.perf_counter()
            arguments = abstract((*self._functions.arguments, start))
            traced = {"init": self.init.trace(*arguments)}
            if self._data is not None:  # the loop runs next
                data = abstract_data(self._data.arrays, self._functions.mesh)
                if (key := loop_key(data, ())) not in self.so_far:
                    traced[key] = trace_loop(self._functions, data)
            self.so_far |= compile_all(traced)
            self.records |= {key: _record(key, one, began) for key, one in traced.items()}
        return self.so_far["init"]
