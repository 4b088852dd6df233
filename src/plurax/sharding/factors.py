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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from plurax.jaxpr.compat import is_call
from plurax.jaxpr.equal_dims import equal_dims, shape_of
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
        outputs = [indices(shape_of(var)) for var in eqn.outvars]
        for (a, dim), (b, other) in equal_dims(eqn):
            values = (*inputs, outputs[0])
            one, same = sorted((find(values[a][dim]), find(values[b][other])))
            if one != same:
                # The older index stays root, so that those of the inputs, which come first, do.
                parents[same] = one
        return outputs

    args_indices = [indices(shape_of(var)) for var in closed.jaxpr.invars]
    interpret(
        closed.jaxpr, closed.consts, args_indices, default=joined, inline=is_call,
        lift=lambda value: indices(np.shape(value)),
    )  # fmt: skip
    ids: dict[int, int] = {}
    return [[ids.setdefault(find(index), len(ids)) for index in one] for one in args_indices]
