"""The two ways to run the partitioner: emit operations, or only follow shapes and shardings.

Operator rules decide shardings without arrays. What a decision does to arrays goes through an
executor, and only there the two ways differ:

    partitioner                     EmitOperations                 FollowShapes
    run(execute, shards, specs)     execute(*shards)               specs
    follow, then scan               the body's jaxpr, in lax.scan  the body once
    while_loop, switch              of jax.lax, on the shards      each body once

`FollowShapes` finds the shardings of branches and of `while` before their operations are emitted,
and plans a whole function: its results' shardings and its collectives, on any mesh, with no
operation traced.
"""

import abc
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array

from plurax.jaxpr.compat import Scan
from plurax.jaxpr.interpret import equation_context
from plurax.jaxpr.product_dims import ProductDims
from plurax.partition.manual import taken

Shard = Array | jax.ShapeDtypeStruct
"""One device's shard of a tensor, or its shape and dtype."""
Shards = Sequence[Any]
Carried = tuple[Shard, ...]
Function = Callable[..., Any]


class Executor(abc.ABC):
    """What the partitioner does to shards."""

    @abc.abstractmethod
    def run(
        self, execute: Function, shards: Shards, like: Shards, product: ProductDims | None = None
    ) -> Sequence[Shard]:
        """Return `execute(*shards)`, arrays of the shapes and dtypes of `like`.

        `product` has the dims of a product, if it is one.
        """

    @abc.abstractmethod
    def follow(self, body: Function, carry: Shards, row: Shards) -> Function:
        """Run a loop's body once on shapes, and return what it did, a body for `scan`."""

    @abc.abstractmethod
    def add(self, other: "Executor", trips: int) -> None:
        """Count what `other` has followed as often as a loop repeats it."""

    @abc.abstractmethod
    def scan(self, scan: Scan, body: Function, carry: Shards, xs: Shards) -> list[Shard]:
        """Return the last carry and the stacked results of a loop, as `Scan.run` does."""

    @abc.abstractmethod
    def while_loop(self, condition: Function, body: Function, start: Carried) -> Carried:
        """Return the last carry of `lax.while_loop`."""

    @abc.abstractmethod
    def switch(
        self, index: Any, branches: Sequence[Function], platforms: Sequence[Any] | None
    ) -> list[Shard]:
        """Return the results of the branch at `index`, or of the one for the platform."""

    @abc.abstractmethod
    def context(self, eqn: Any) -> contextlib.AbstractContextManager[None]:
        """Return the context in which an equation is evaluated."""


@final
class EmitOperations(Executor):
    """Applies operations to arrays, inside `jax.shard_map`."""

    def run(
        self, execute: Function, shards: Shards, like: Shards, product: ProductDims | None = None
    ) -> Sequence[Shard]:
        """Return `execute(*shards)`."""
        arrays = execute(*shards)
        for array, one in zip(arrays, like, strict=True):
            # What was decided and what is computed cannot drift apart.
            assert (array.shape, array.dtype) == (one.shape, one.dtype), (array, one)
        return arrays

    def follow(self, body: Function, carry: Shards, row: Shards) -> Function:
        """Trace a loop's body, and return a function that evaluates what was traced."""
        traced = jaxpr_as_fun(jax.make_jaxpr(body)(carry, row))
        return lambda carry, row: traced(*carry, *row)

    def add(self, other: Executor, trips: int) -> None:
        """Do nothing: what was traced is in the body."""

    def scan(self, scan: Scan, body: Function, carry: Shards, xs: Shards) -> list[Shard]:
        """Run `lax.scan`."""
        return list(scan.run(body, carry, xs))

    def while_loop(self, condition: Function, body: Function, start: Carried) -> Carried:
        """Run `lax.while_loop`."""
        last: Carried = lax.while_loop(condition, body, start)
        return last

    def switch(
        self, index: Any, branches: Sequence[Function], platforms: Sequence[Any] | None
    ) -> list[Shard]:
        """Run `lax.switch`, or `lax.platform_dependent`."""
        return taken(index, branches, platforms)

    def context(self, eqn: Any) -> contextlib.AbstractContextManager[None]:
        """Return the context in which an equation was traced: its name scopes and source line."""
        return equation_context(eqn)


@final
class FollowShapes(Executor):
    """Computes nothing: a shard is a `jax.ShapeDtypeStruct`, or an array that is not read.

    **Attributes:** of all operations so far, those in a loop counted in every iteration, `traffic`,
    the bytes of their operands and results; and `flops`, the operations of products.
    """

    def __init__(self) -> None:
        self.traffic, self.flops, self._trips = 0, 0, 1

    def run(
        self, execute: Function, shards: Shards, like: Shards, product: ProductDims | None = None
    ) -> Sequence[Shard]:
        """Return `like`."""
        for one in (*shards, *like):
            self.traffic += self._trips * one.size * one.dtype.itemsize
        if product is not None:
            self.flops += self._trips * 2 * math.prod(product)
        return like

    def follow(self, body: Function, carry: Shards, row: Shards) -> Function:
        """Run a loop's body, and return a function that returns the same shapes."""
        results = body(carry, row)
        return lambda carry, row: results

    def add(self, other: Executor, trips: int) -> None:
        """Count the traffic and flops of `other`."""
        assert isinstance(other, FollowShapes)
        self.traffic += self._trips * trips * other.traffic
        self.flops += self._trips * trips * other.flops

    def scan(self, scan: Scan, body: Function, carry: Shards, xs: Shards) -> list[Shard]:
        """Follow one iteration, which returns the carry as it received it."""
        before, self._trips = self._trips, self._trips * scan.length
        out = body(carry, [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in xs])
        self._trips = before
        ys = out[scan.num_carry :]
        stacked = [jax.ShapeDtypeStruct((scan.length, *y.shape), y.dtype) for y in ys]
        return [*out[: scan.num_carry], *stacked]

    def while_loop(self, condition: Function, body: Function, start: Carried) -> Carried:
        """Follow the condition and one iteration."""
        condition(start)
        last: Carried = body(start)
        return last

    def switch(
        self, index: Any, branches: Sequence[Function], platforms: Sequence[Any] | None
    ) -> list[Shard]:
        """Follow every branch; their results have the same shapes."""
        return [branch() for branch in branches][-1]

    def context(self, eqn: Any) -> contextlib.AbstractContextManager[None]:
        """Return no context: nothing is traced."""
        return contextlib.nullcontext()
