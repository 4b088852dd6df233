"""Annotations in a model: a name for an activation, a shard strategy for an operator.

An annotation is the identity function as a primitive, so that it survives tracing,
differentiation and `vmap`. It mentions no devices, and without a plan that splits tensors it is
compiled away. When the function is partitioned (`plurax.partition`), the annotated value is
resharded; the cotangent is resharded to the sharding that the value had before.

    def f(x): return jnp.sin(name(x, "hidden"))          x (B, 64)

    traced                                               dims of a rule
    y = annotate[tag=hidden batch=()] x                  both
    under vmap, with a new dim 0:
    y = annotate[tag=hidden batch=(0,)] x                the last two
    in the backward pass:
    dx = annotate[tag=hidden transposed=True] dy
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PyTree

from plurax import errors
from plurax.argument_check import text
from plurax.jaxpr.annotate import OverContext, annotate_p
from plurax.jaxpr.interpret import all_equations
from plurax.sharding.factors import factors
from plurax.sharding.spec import TensorSharding

Strategy = Sequence[Sequence[int] | None]


class Named:
    """The annotation of `name`; a sharding rule of the plan may match it."""

    def __init__(self, name: str) -> None:
        self.name = name


class Split:
    """The annotation that `shard` puts on one input of an operator.

    **Attributes:** `dims`, for each dim the number of its factor; `num_shards`, from a factor's
    number to its number of shards.
    """

    def __init__(self, dims: tuple[int, ...], num_shards: dict[int, int]) -> None:
        self.dims = dims
        self.num_shards = num_shards


class Pinned:
    """The annotation of an operand of an equation whose shard strategy a plan pins.

    **Attributes:** `sharding`, over mesh axes other than `data`.
    """

    def __init__(self, sharding: TensorSharding) -> None:
        self.sharding = sharding


class Boundary:
    """The annotation of `stage_boundary`.

    The values with one tag are sent to the next stage together.
    """


Tag = Named | Split | Pinned | OverContext | Boundary


def name(x: PyTree, text: str) -> PyTree:
    """Name an activation, so that `Plan(shardings=...)` can give its sharding.

    **Arguments:** `x`, an array or a tree of arrays; `text`, the name.

    **Returns:** `x`. Several values of the same rank may have the same name. Inside `vmap` (and
    `per_example`) a rule applies to the dims that the function sees.

    >>> import jax.numpy as jnp
    >>> name(jnp.ones(3), "hidden").shape
    (3,)
    """
    return jax.tree.map(lambda leaf: _mark(leaf, Named(text)), x)


def annotations_in(jaxpr: Any) -> set[Tag]:
    """Return the annotations of a traced function."""
    annotations = (e for e in all_equations(jaxpr) if e.primitive.name == "annotate")
    return {eqn.params["tag"] for eqn in annotations}


def activation_names(tags: Iterable[Tag]) -> list[str]:
    """Return the names that annotations give to activations."""
    return sorted({tag.name for tag in tags if isinstance(tag, Named)})


def stage_boundary(x: PyTree) -> PyTree:
    """Mark where a model can be cut into pipeline stages; a plan with `pipeline` cuts it there.

    **Arguments:** `x`, a floating-point array or a tree of such arrays, between two layers.

    **Returns:** `x`. The equations that depend on it belong to the next stage. Other values that a
    later stage reads from an earlier one are sent along. Equations that depend on parameters alone,
    or on the batch alone, are duplicated into each stage that reads them. A boundary cannot be
    inside a loop (`jax.lax.scan`); use `plurax.stack` for repeated layers.

    >>> import jax.numpy as jnp
    >>> stage_boundary(jnp.ones(3)).shape
    (3,)
    """
    tag = Boundary()
    return jax.tree.map(lambda leaf: _mark(leaf, tag), x)


def shard(f: Callable[..., Any], strategy: Strategy) -> Callable[..., Any]:
    """Give an operator a shard strategy: the number of shards of each dim of each input.

    **Arguments:**

    - `f`: any function of arrays, such as `jnp.matmul`.
    - `strategy`: for each argument a tuple with one number of shards per dim, or None to leave the
      argument's sharding open. Dims that are the same index of the operator must have the same
      number: in `((1, 4), (4, 1))` the dim that a matrix product contracts.

    **Returns:** a function with the signature of `f`. Under a plan with `tensor=n` its inputs are
    resharded to the strategy, each device computes its share, and partial sums are reduced where
    they are used; the numbers multiply to `n` or a divisor of it. Without `tensor` it computes `f`.

    Raises `PlanError` if the strategy does not fit the arguments.

    >>> import jax.numpy as jnp
    >>> product = shard(jnp.matmul, strategy=((2, 1), (1, 4)))
    >>> product(jnp.ones((4, 3)), jnp.ones((3, 8))).shape
    (4, 8)
    """

    def sharded(*args: Array) -> Any:
        if len(args) != len(strategy):
            raise errors.PlanError(
                f"shard(strategy={tuple(strategy)}) has counts for {len(strategy)} arguments and "
                f"the operator was called with {len(args)}: give one tuple of counts for each, or "
                "None."
            )
        # Equal indices must get equal counts, so find out which dims are equal.
        factor_ids = factors(f, *args)
        num_shards: dict[int, int] = {}
        for index, (arg, counts, dims) in enumerate(zip(args, strategy, factor_ids, strict=True)):
            if counts is None:
                continue
            if len(counts) != arg.ndim:
                raise errors.PlanError(
                    f"shard(strategy={tuple(strategy)}): argument {index} has the shape "
                    f"{tuple(arg.shape)}, so its counts must be {len(arg.shape)}, one for each "
                    "dim; 1 leaves a dim unsplit."
                )
            for dim, (factor, count) in enumerate(zip(dims, counts, strict=True)):
                if num_shards.setdefault(factor, count) != count:
                    raise errors.PlanError(
                        f"shard(strategy={tuple(strategy)}): dim {dim} of argument {index} is the "
                        "same index of the operator as a dim that is split into "
                        f"{num_shards[factor]} shards: give both the same count."
                    )
                if arg.shape[dim] % count:
                    raise errors.PlanError(
                        f"shard(strategy={tuple(strategy)}): dim {dim} of argument {index} with "
                        f"shape {tuple(arg.shape)} has size {arg.shape[dim]}, which its count does "
                        "not divide."
                    )
        return f(
            *(
                arg if counts is None else _mark(arg, Split(tuple(dims), num_shards))
                for arg, counts, dims in zip(args, strategy, factor_ids, strict=True)
            )
        )

    return sharded


def _mark(x: Any, tag: Tag) -> Array:
    if not isinstance(x, jax.Array) and np.asarray(x).dtype.kind not in "biufcV":  # V: bfloat16
        raise errors.PlanError(
            f"{text(x)} is no array; plurax.sharding.name, plurax.pipeline.stage_boundary and "
            "plurax.sharding.shard take an array of numbers, or a tree of such arrays."
        )
    return annotate_p.bind(x, tag=tag, batch=(), transposed=False)


def parts_of_axes(tags: set[Tag], sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the parts in which annotations use mesh axes; those that are used whole have none.

    `tensor=4` and an annotation with 2 shards give its prime factors, each an axis of its own;
    `context=8` and heads exchanged among 4 devices give the number of such groups and their size.

    >>> parts_of_axes({OverContext(2, "heads", group=4)}, {"context": 8})
    {'context': (2, 4)}
    """
    context, tensor = (sizes.get(axis, 1) for axis in ("context", "tensor"))
    groups = {tag.group for tag in tags if isinstance(tag, OverContext)} - {1, context}
    parts: dict[str, tuple[int, ...]] = {}
    if groups:
        parts["context"] = context // max(groups), max(groups)
    ways = {n for tag in tags if isinstance(tag, Split) for n in tag.num_shards.values()}
    if tensor == 1 or ways <= {1, tensor}:
        return parts
    factors, left, factor = [], tensor, 2
    while left > 1:
        while left % factor == 0:
            factors.append(factor)
            left //= factor
        factor += 1
    return parts | {"tensor": tuple(factors)}
