"""Cache compiled programs on the task they were compiled for.

Training the same task again under the same plan, on data of the same shapes, reuses the program, as
`jax.jit` does with a function: values that the task's functions close over are read once, when they
are traced. There is no global table: the cache is an attribute of the task (or of the function that
returns one) and is freed with it.
"""

import types
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
from jaxtyping import PyTree

from plurax.task import Task

KEPT = 5
"""The largest number of programs (and of checks of the loss) cached per task.

The least recently used is dropped first."""
ATTRIBUTE = "_plurax_programs"
TRACING = (
    "jax_enable_x64", "jax_default_prng_impl", "jax_default_matmul_precision", "jax_debug_nans",
    "jax_threefry_partitionable", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion",
    "jax_disable_jit",
)  # fmt: skip
"""The JAX settings that change what is traced; they are part of the key."""

P = TypeVar("P")


class ProgramCache:
    """The programs of one task. A copied or unpickled task starts with an empty cache."""

    def __init__(self) -> None:
        self.programs: OrderedDict[Hashable, Any] = OrderedDict()

    def __reduce__(self) -> tuple[type["ProgramCache"], tuple[()]]:
        return ProgramCache, ()


def cached_program(owner: Any, key: tuple[Any, ...], make: Callable[[], P]) -> P:
    """Return the program cached under `key`, calling `make` if there is none.

    **Arguments:** `owner`, a `Task` or a function that returns one; for any other owner, and for a
    key that cannot be hashed, `make` is called each time.
    """
    # Two owners may share a cache (`functools.wraps` copies attributes): the key names the owner.
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
    """Return a hashable key of the structure, shapes and dtypes of a tree of arrays."""
    leaves, structure = jax.tree.flatten(values)
    return structure, tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves)
