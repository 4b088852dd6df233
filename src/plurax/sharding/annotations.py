"""Marks in a model: a name for an activation, a shard strategy for an operator.

A mark is the identity. It says nothing about devices, and without a plan that splits tensors it is
compiled away. Where a function is divided among devices (`divide`), a mark says how the value it
stands on shall lie from there on; the cotangent of the value goes back the way the value came.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, PyTree

from plurax import errors
from plurax.sharding.factors import factors

Strategy = Sequence[Sequence[int] | None]


class Named:
    """The mark of `name`; a sharding rule of the plan may speak of it."""

    def __init__(self, name: str) -> None:
        self.name = name


class Split:
    """The mark that `shard` puts on one input of an operator.

    **Attributes:** `dims`, for each dim the number of the factor it belongs to; `ways`, how many
    ways each factor is split, by its number.
    """

    def __init__(self, dims: tuple[int, ...], ways: dict[int, int]) -> None:
        self.dims = dims
        self.num_shards = ways


class Boundary:
    """The mark of `stage_boundary`; what it stands on at one place is handed to the next stage."""


Tag = Named | Split | Boundary

# The identity; `batch` are the dims that vmap added; `transposed` on cotangents.
annotate_p = Primitive("annotate")
annotate_p.def_impl(lambda x, **_: x)
annotate_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(annotate_p, lambda context, x, **_: [x])


def _transpose(
    cotangent: Any, x: Any, *, tag: Tag, batch: tuple[int, ...], transposed: bool
) -> list[Any]:
    return [annotate_p.bind(cotangent, tag=tag, batch=batch, transposed=not transposed)]


def _batched(args: Any, dims: Any, *, tag: Tag, batch: tuple[int, ...], transposed: bool) -> Any:
    (x,), (dim,) = args, dims
    batch = tuple(sorted({dim, *(b + (b >= dim) for b in batch)}))
    return annotate_p.bind(x, tag=tag, batch=batch, transposed=transposed), dim


ad.deflinear2(annotate_p, _transpose)
batching.primitive_batchers[annotate_p] = _batched


def name(x: PyTree, text: str) -> PyTree:
    """Give an activation a name, of which `Plan(shardings=...)` can say how it shall lie.

    **Arguments:** `x`, an array or a tree of arrays; `text`, the name.

    **Returns:** `x`. The same name may stand on several values of the same rank. Inside `vmap`
    (and `per_example`) a rule speaks of the dims that the function sees.

    >>> import jax.numpy as jnp
    >>> name(jnp.ones(3), "hidden").shape
    (3,)
    """
    return jax.tree.map(lambda leaf: _mark(leaf, Named(text)), x)


def stage_boundary(x: PyTree) -> PyTree:
    """Say where a model can be cut into stages; under a plan with `pipeline` it is.

    **Arguments:** `x`, an array or a tree of arrays, floating, at some place between layers.

    **Returns:** `x`. What comes after it, by what depends on it, is the next stage. What else a
    later stage needs of an earlier one is handed on with it, and what depends on parameters alone
    or on the batch alone is computed where it is needed. It cannot stand inside a loop
    (`jax.lax.scan`): layers that repeat are for `plurax.stack`.

    >>> import jax.numpy as jnp
    >>> stage_boundary(jnp.ones(3)).shape
    (3,)
    """
    tag = Boundary()
    return jax.tree.map(lambda leaf: _mark(leaf, tag), x)


def shard(f: Callable[..., Any], strategy: Strategy) -> Callable[..., Any]:
    """Give an operator its shard strategy: how many ways each dim of each input is split.

    **Arguments:**

    - `f`: any function of arrays, `jnp.matmul` say.
    - `strategy`: for each argument a tuple with one count for each dim, or None for an argument
      that lies as it comes. Dims that are the same index of the operator are split alike: in
      `((1, 4), (4, 1))` the dim over which a matrix product sums.

    **Returns:** a function like `f`. Under a plan with `tensor=n` its inputs are brought to the
    shardings of the strategy, each device computes its share, and what belongs together is added
    up where it is used; the counts multiply to `n` or a divisor of it. Without, it is `f`.

    Raises `PlanError` where the strategy does not fit the arguments.

    >>> import jax.numpy as jnp
    >>> product = shard(jnp.matmul, strategy=((2, 1), (1, 4)))
    >>> product(jnp.ones((4, 3)), jnp.ones((3, 8))).shape
    (4, 8)
    """

    def sharded(*args: Array) -> Any:
        if len(args) != len(strategy):
            raise errors.strategy_wrong_arguments(strategy, len(args))
        numbers = factors(f, *args)
        ways: dict[int, int] = {}
        for place, (arg, counts, dims) in enumerate(zip(args, strategy, numbers, strict=True)):
            if counts is None:
                continue
            if len(counts) != arg.ndim:
                raise errors.strategy_wrong_rank(strategy, place, arg.shape)
            for dim, (factor, count) in enumerate(zip(dims, counts, strict=True)):
                if ways.setdefault(factor, count) != count:
                    raise errors.strategy_uneven(strategy, place, dim, ways[factor])
                if arg.shape[dim] % count:
                    raise errors.strategy_indivisible(strategy, place, arg.shape, dim)
        return f(
            *(
                arg if counts is None else _mark(arg, Split(tuple(dims), ways))
                for arg, counts, dims in zip(args, strategy, numbers, strict=True)
            )
        )

    return sharded


def _mark(x: Array, tag: Tag) -> Array:
    return annotate_p.bind(x, tag=tag, batch=(), transposed=False)
