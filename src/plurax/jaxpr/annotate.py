"""The primitive of annotations: the identity, with a tag that the partitioner reads.

It survives tracing, differentiation and `vmap` (see `sharding/annotations.py`).
"""

from typing import Any, Literal

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

# The identity. `batch`: the dims that vmap added. `transposed`: whether the value is a cotangent.
annotate_p = Primitive("annotate")
annotate_p.def_impl(lambda x, **_: x)
annotate_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(annotate_p, lambda context, x, **_: [x])


def _transpose(
    cotangent: Any, x: Any, *, tag: Any, batch: tuple[int, ...], transposed: bool
) -> list[Any]:
    """Annotate the cotangent; a second transposition gives a forward annotation again."""
    return [annotate_p.bind(cotangent, tag=tag, batch=batch, transposed=not transposed)]


def _batched(args: Any, dims: Any, *, tag: Any, batch: tuple[int, ...], transposed: bool) -> Any:
    """Annotate a batched value, and add the new dim to `batch`, whose later dims shift by one."""
    # Dims at or behind the new one move back by one.
    (x,), (dim,) = args, dims
    batch = tuple(sorted({dim, *(b + (b >= dim) for b in batch)}))
    return annotate_p.bind(x, tag=tag, batch=batch, transposed=transposed), dim


ad.deflinear2(annotate_p, _transpose)
batching.primitive_batchers[annotate_p] = _batched


Over = Literal["devices", "groups", "heads"]
"""Over what of `context` a dim is split: tokens over all devices, or over groups of devices that
exchange heads, or heads over the devices of a group."""


class OverContext:
    """The annotation of a value with a dim split over `context`; `dim` None: with none.

    **Arguments:** `over`, over what of it; `group`, with heads, the devices of a group.
    """

    def __init__(self, dim: int | None, over: Over, group: int) -> None:
        self.dim, self.over, self.group = dim, over, group


def over_context(x: Array, dim: int | None, over: Over = "devices", group: int = 1) -> Array:
    """Split a dim over the mesh axis `context`, or a part of it (see `OverContext`)."""
    tag = OverContext(dim, over, group)
    split: Array = annotate_p.bind(x, tag=tag, batch=(), transposed=False)
    return split
