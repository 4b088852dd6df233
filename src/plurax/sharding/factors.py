"""Find the factors of an operator: the dims of its inputs that are one index.

A shard strategy must split equal indices alike, so it needs to know which dims are equal. The
function is traced; each equation yields pairs of (variable, dim) that are one index, and
union-find joins them. The idea and the name are those of Shardy's sharding rules
(https://openxla.org/shardy).

    f(x, w) = sum(exp(x @ w), axis=1), x (I=4, K=3), w (K=3, J=8)

    equation           pairs that are one index
    y = dot x w        (x, 1) = (w, 0), (x, 0) = (y, 0), (w, 1) = (y, 1)
    z = exp y          (y, 0) = (z, 0), (y, 1) = (z, 1)
    s = sum(z, 1)      (z, 0) = (s, 0)

    factors            I = 0, K = 1, J = 2; so x has [0, 1] and w has [1, 2]
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal

from plurax.jaxpr.compat import ELEMENTWISE, REDUCTIONS, called_jaxpr, is_call


def factors(f: Callable[..., Any], *args: Any) -> list[list[int]]:
    """Return for each argument and each dim the number of its factor.

    **Arguments:** `f`, a function of arrays; `args`, its arguments, or `jax.ShapeDtypeStruct`s.

    >>> import jax.numpy as jnp
    >>> factors(jnp.matmul, jnp.ones((2, 3)), jnp.ones((3, 4)))
    [[0, 1], [1, 2]]
    """
    closed = jax.make_jaxpr(f)(*args)
    parents: dict[tuple[Any, int], tuple[Any, int]] = {}

    def find(node: tuple[Any, int]) -> tuple[Any, int]:
        while (up := parents.get(node, node)) != node:
            node = up
        return node

    def join(a: tuple[Any, int], b: tuple[Any, int]) -> None:
        # The older node stays root, so that the inputs' dims, which come first, are the roots.
        if find(a) != find(b):
            parents[find(b)] = find(a)

    for a, b in _equal_dims(closed.jaxpr):
        join(a, b)
    ids: dict[Any, int] = {}
    result = []
    for var in closed.jaxpr.invars:
        roots = [find((var, dim)) for dim in range(len(_shape(var)))]
        result.append([ids.setdefault(root, len(ids)) for root in roots])
    return result


def _equal_dims(jaxpr: Jaxpr) -> Iterator[tuple[tuple[Any, int], tuple[Any, int]]]:
    """Yield the pairs of (variable, dim) that are one index."""
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        inputs = [v for v in eqn.invars if not isinstance(v, Literal)]
        out = eqn.outvars[0]
        if is_call(eqn):
            body, _ = called_jaxpr(eqn)
            yield from _same(zip(eqn.invars, body.invars, strict=True))
            yield from _equal_dims(body)
            yield from _same(zip(eqn.outvars, body.outvars, strict=True))
        elif name in ELEMENTWISE or name == "annotate":
            yield from _same((var, out) for var in inputs)
        elif name == "dot_general":
            (left_sum, right_sum), (left_batch, right_batch) = params["dimension_numbers"]
            left, right = eqn.invars
            for a, b in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
                yield (left, a), (right, b)
            left_free = _others(left, (*left_sum, *left_batch))
            right_free = _others(right, (*right_sum, *right_batch))
            sources = [(left, d) for d in (*left_batch, *left_free)]
            sources += [(right, d) for d in right_free]
            yield from ((source, (out, dim)) for dim, source in enumerate(sources))
        elif name == "transpose":
            for dim, source in enumerate(params["permutation"]):
                yield (inputs[0], source), (out, dim)
        elif name == "broadcast_in_dim" and inputs:
            for source, dim in enumerate(params["broadcast_dimensions"]):
                if _shape(inputs[0])[source] == _shape(out)[dim]:
                    yield (inputs[0], source), (out, dim)
        elif name in REDUCTIONS:
            for dim, source in enumerate(_others(inputs[0], params["axes"])):
                yield (inputs[0], source), (out, dim)
        elif name == "squeeze":
            for dim, source in enumerate(_others(inputs[0], params["dimensions"])):
                yield (inputs[0], source), (out, dim)
        elif name == "reshape":
            for source, dim in kept_dims(_shape(inputs[0]), _shape(out)):
                yield (inputs[0], source), (out, dim)
        elif name == "conv_general_dilated":
            numbers = params["dimension_numbers"]
            lhs, rhs, to = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
            yield (eqn.invars[0], lhs[0]), (out, to[0])
            yield (eqn.invars[1], rhs[0]), (out, to[1])
            yield (eqn.invars[0], lhs[1]), (eqn.invars[1], rhs[1])


def _same(pairs: Any) -> Iterator[tuple[tuple[Any, int], tuple[Any, int]]]:
    """Yield pairs of equal dims for pairs of variables of one shape."""
    for a, b in pairs:
        if isinstance(a, Literal) or isinstance(b, Literal):
            continue
        # A dim of size 1 broadcasts: it is not the same index as the other operand's dim.
        if len(_shape(a)) == len(_shape(b)):
            sizes = zip(_shape(a), _shape(b), strict=True)
            yield from (((a, d), (b, d)) for d, (one, other) in enumerate(sizes) if one == other)


def _others(var: Any, dims: Sequence[int]) -> list[int]:
    """Return the dims of a variable that are not in `dims`."""
    return [dim for dim in range(len(_shape(var))) if dim not in dims]


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
