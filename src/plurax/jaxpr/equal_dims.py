"""Which dims of an operation's operands and of its result are one index."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from plurax.jaxpr.compat import ELEMENTWISE, REDUCTIONS

Place = tuple[int, int]
"""An operand by its place among them, or the result by their number; and one of its dims."""


def equal_dims(eqn: Any) -> Iterator[tuple[Place, Place]]:
    """Yield the pairs of dims of an equation's operands and its first result that are one index.

        y = dot x w, x (I, K), w (K, J)    (0, 1) = (1, 0), (0, 0) = (2, 0), (1, 1) = (2, 1)
        s = sum(y, axis 1)                 (0, 0) = (1, 0)

    Nothing is known of an operation that has no rule here.
    """
    name, params = eqn.primitive.name, eqn.params
    shapes = [shape_of(var) for var in (*eqn.invars, eqn.outvars[0])]
    out = len(eqn.invars)
    if name in ELEMENTWISE or name == "annotate" or is_bitcast(eqn):
        for place in range(out):
            # A dim of size 1 broadcasts: it is not the same index as the other operand's dim.
            if len(shapes[place]) == len(shapes[out]):
                sizes = enumerate(zip(shapes[place], shapes[out], strict=True))
                yield from (((place, d), (out, d)) for d, (one, other) in sizes if one == other)
    elif name == "dot_general":
        (left_sum, right_sum), (left_batch, right_batch) = params["dimension_numbers"]
        for a, b in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
            yield (0, a), (1, b)
        sources = [(0, d) for d in (*left_batch, *_others(shapes[0], (*left_sum, *left_batch)))]
        sources += [(1, d) for d in _others(shapes[1], (*right_sum, *right_batch))]
        yield from ((source, (out, dim)) for dim, source in enumerate(sources))
    elif name == "transpose":
        yield from (((0, source), (out, dim)) for dim, source in enumerate(params["permutation"]))
    elif name == "broadcast_in_dim":
        for source, dim in enumerate(params["broadcast_dimensions"]):
            if shapes[0][source] == shapes[out][dim]:
                yield (0, source), (out, dim)
    elif name in REDUCTIONS or name == "squeeze":
        gone = params["dimensions" if name == "squeeze" else "axes"]
        yield from (((0, s), (out, dim)) for dim, s in enumerate(_others(shapes[0], gone)))
    elif name == "reshape":
        yield from (((0, s), (out, dim)) for s, dim in kept_dims(shapes[0], shapes[out]))
    elif name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        lhs, rhs, to = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
        yield (0, lhs[0]), (out, to[0])
        yield (1, rhs[0]), (out, to[1])
        yield (0, lhs[1]), (1, rhs[1])


def is_bitcast(eqn: Any) -> bool:
    """Whether an operation reads the bits of each entry as a number of another dtype."""
    same = shape_of(eqn.invars[0]) == shape_of(eqn.outvars[0]) if eqn.invars else False
    return same and eqn.primitive.name == "bitcast_convert_type"


def _others(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Return the dims of a shape that are not in `dims`."""
    return [dim for dim in range(len(shape)) if dim not in dims]


def kept_dims(old: Sequence[int], new: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs of dims that a reshape leaves as they are: equal size, equal stride.

    >>> kept_dims((4, 6, 5), (4, 2, 3, 5))
    [(0, 0), (2, 3)]
    """
    dims: dict[tuple[int, int], int] = {}
    for dim, size in enumerate(old):
        if size > 1:
            dims[math.prod(old[:dim]), size] = dim
    return [
        (dims[key], dim)
        for dim, size in enumerate(new)
        if size > 1 and (key := (math.prod(new[:dim]), size)) in dims
    ]


def shape_of(var: Any) -> tuple[int, ...]:
    """Return the shape of a variable or a literal."""
    return tuple(var.aval.shape)
