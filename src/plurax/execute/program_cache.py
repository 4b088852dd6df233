"""Programs that are already compiled, kept on the task they were compiled for.

Training the same task again under the same plan, on data of the same shapes, uses the program of
before, as `jax.jit` does with a function: what the task's functions read from outside of them is
read once. There is no table of programs anywhere: they are an attribute of the task (or of the
function that returns one) and go when it goes.
"""

import types
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
from jaxtyping import PyTree

from plurax.task import Task

KEPT = 4
"""Programs kept for one task; the one not used for longest goes first."""
ATTRIBUTE = "_plurax_programs"
TRACING = (
    "jax_enable_x64", "jax_default_prng_impl", "jax_default_matmul_precision", "jax_debug_nans",
    "jax_threefry_partitionable", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion",
    "jax_disable_jit",
)  # fmt: skip
"""Settings of JAX that decide what is traced."""

P = TypeVar("P")


class ProgramCache:
    """The programs of one task. A copy of the task, or one that was pickled, starts without."""

    def __init__(self) -> None:
        self.programs: OrderedDict[Hashable, Any] = OrderedDict()

    def __reduce__(self) -> tuple[type["ProgramCache"], tuple[()]]:
        return ProgramCache, ()


def cached_program(owner: Any, key: tuple[Any, ...], make: Callable[[], P]) -> P:
    """The program under a key, made where there is none yet.

    **Arguments:** `owner`, a `Task` or a function that returns one; for anything else, and for a
    key that cannot be hashed, nothing is kept.
    """
    key = (owner, *key, *(getattr(jax.config, name, None) for name in TRACING))
    try:
        hash(key)
    except TypeError:
        return make()
    if not isinstance(owner, Task | types.FunctionType):
        return make()
    cache = vars(owner).setdefault(ATTRIBUTE, ProgramCache())
    if key in cache.programs:
        cache.programs.move_to_end(key)
        return cache.programs[key]
    program = make()
    cache.programs[key] = program
    while len(cache.programs) > KEPT:
        cache.programs.popitem(last=False)
    return program


def shapes_key(values: PyTree) -> Hashable:
    """Structure, shapes and dtypes of a tree of arrays."""
    leaves, structure = jax.tree.flatten(values)
    return structure, tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves)
