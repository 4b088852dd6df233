"""Find the factors of an operator: the dims of its inputs that are one index.

A shard strategy must split equal indices alike, so it needs to know which dims are equal. The
function is traced and interpreted with an index for each dim in place of an array; each equation
yields pairs of (value, dim) that are one index, and union-find joins them. The idea and the name
are those of Shardy's sharding rules (https://openxla.org/shardy).

    f(x, w) = sum(exp(x @ w), axis=1), x (I=4, K=3), w (K=3, J=8)

    equation           pairs that are one index
    y = dot x w        (x, 1) = (w, 0), (x, 0) = (y, 0), (w, 1) = (y, 1)
    z = exp y          (y, 0) = (z, 0), (y, 1) = (z, 1)
    s = sum(z, 1)      (z, 0) = (s, 0)

    factors            I = 0, K = 1, J = 2; so x has [0, 1] and w has [1, 2]
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from plurax.jaxpr.compat import ELEMENTWISE, REDUCTIONS, is_call
from plurax.jaxpr.interpret import interpret


def factors(f: Callable[..., Any], *args: Any) -> list[list[int]]:
    """Return for each argument and each dim the number of its factor.

    **Arguments:** `f`, a function of arrays; `args`, its arguments, or `jax.ShapeDtypeStruct`s.

    >>> import jax.numpy as jnp
    >>> factors(jnp.matmul, jnp.ones((2, 3)), jnp.ones((3, 4)))
    [[0, 1], [1, 2]]
    """
    closed = jax.make_jaxpr(f)(*args)
    number = itertools.count()
    parents: dict[int, int] = {}

    def indices(shape: Sequence[int]) -> list[int]:
        """Return a new index for each dim: the value of a variable."""
        return [next(number) for _ in shape]

    def find(index: int) -> int:
        while index in parents:
            index = parents[index]
        return index

    def joined(eqn: Any, inputs: list[Any]) -> list[Any]:
        outputs = [indices(_shape(var)) for var in eqn.outvars]
        for (a, dim), (b, other) in _equal_dims(eqn):
            values = (*inputs, outputs[0])
            one, same = sorted((find(values[a][dim]), find(values[b][other])))
            if one != same:
                # The older index stays root, so that those of the inputs, which come first, do.
                parents[same] = one
        return outputs

    args_indices = [indices(_shape(var)) for var in closed.jaxpr.invars]
    interpret(
        closed.jaxpr, closed.consts, args_indices, default=joined, inline=is_call,
        lift=lambda value: indices(np.shape(value)),
    )  # fmt: skip
    ids: dict[int, int] = {}
    return [[ids.setdefault(find(index), len(ids)) for index in one] for one in args_indices]


def _equal_dims(eqn: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the pairs of (place, dim) that are one index.

    The place is that of an operand among the operands, and `out` for the result.
    """
    name, params = eqn.primitive.name, eqn.params
    shapes = [_shape(var) for var in (*eqn.invars, eqn.outvars[0])]
    out = len(eqn.invars)
    if name in ELEMENTWISE or name == "annotate":
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


def _shape(var: Any) -> tuple[int, ...]:
    return tuple(var.aval.shape)
