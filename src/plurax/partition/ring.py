"""Send the blocks of a loop around in a ring of devices.

The blocks are split over `context`, and so are the queries. `Loop` would gather the blocks on every
device before the loop. A ring keeps them apart: a device computes with the blocks that it has,
while it sends them to the next device and receives those of the one before.

    context=4, blocks 0 to 7 of keys and values, two on a device; 3 turns send them

    device     0       1       2       3
    at first   0 1     2 3     4 5     6 7
    then       6 7     0 1     2 3     4 5      each turn: the loop over a device's blocks
    then       4 5     6 7     0 1     2 3
    at last    2 3     4 5     6 7     0 1

The carry, maximum and sums of a device's queries, stays. A stacked result of an iteration, the
gradient of a block, is a sum over all queries: each device adds its part to what it received with
the blocks, and after the last turn it is one turn from home.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context",
https://arxiv.org/abs/2310.01889.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from plurax.jaxpr.compat import Scan
from plurax.jaxpr.context import RING
from plurax.partition.values import ValueVersions
from plurax.sharding.spec import TensorSharding

AXIS = "context"
"""The mesh axis of the ring, or of rings, where their devices are those along a part of it."""


def ring_of(
    partitioner: Any, eqn: Any, others: Sequence[ValueVersions], xs: Sequence[ValueVersions]
) -> tuple[str, ...]:
    """Return the axes over which the blocks of a loop go around; none where they do not.

    They do if the loop is marked, and its blocks and queries are split; not where only some devices
    run at a time, since all take part in a permute.

    **Arguments:** `others`, the inputs of the loop that are no stacks; `xs`, the stacks.
    """
    axes = partitioner.axes
    if RING not in str(eqn.source_info.name_stack) or AXIS not in axes.mesh or not axes.permutes:
        return ()
    stacks = [one.value.sharding.dims for one in xs if one.deferred is None]
    context = set(axes.expand(AXIS))
    rings = [dims[0] for dims in stacks if dims[0] and context.issuperset(dims[0])]
    rows = [one.value.sharding.axes for one in others if one.deferred is None]
    rows += [tuple(axis for entry in dims[1:] for axis in entry) for dims in stacks]
    return rings[0] if rings and any(set(rings[0]).intersection(row) for row in rows) else ()


TRAVELS, OWN, PLACED = "travels", "own", "placed"


def kind_of_stack(row: TensorSharding, ring: Sequence[str]) -> str:
    """Return what becomes of a stacked result of an iteration, by the sharding of its row.

    A sum over the queries of all devices travels with its block. What is split by queries, such as
    the gradient of a bias, is placed among the rows of all blocks, which each device has of its own
    queries. What is neither is complete where the block is at home.
    """
    if not row.partial.isdisjoint(ring):
        return TRAVELS
    return PLACED if set(ring).intersection(row.axes) else OWN


@final
class Ring:
    """A loop whose blocks go around.

    **Arguments:** `partitioner`; `ring`, the axes over which blocks go around; `scan`, the loop
    over all blocks; `iteration`, on one device's shards, `(carry, rows) -> [*carry, *stacked]`;
    `around`, of each stack whether a device has its own blocks of it, which go around, and not all,
    of which it takes those it needs; `kinds`, of each stacked result (see `kind_of_stack`).
    """

    def __init__(
        self,
        partitioner: Any,
        ring: tuple[str, ...],
        scan: Scan,
        iteration: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
        around: Sequence[bool],
        kinds: Sequence[str],
    ) -> None:
        self._partitioner, self._ring, self._iteration = partitioner, ring, iteration
        self._around, self._kinds = around, kinds
        self._devices: int = partitioner.axes.size(ring)
        self._scan = dataclasses.replace(scan, length=scan.length // self._devices)

    def run(self, carry: Sequence[Any], stacks: Sequence[Any]) -> list[Any]:
        """Run all turns; return the last carry, and the stacked results at home again."""
        blocks = [stack for stack, around in zip(stacks, self._around, strict=True) if around]
        whole = [stack for stack, around in zip(stacks, self._around, strict=True) if not around]
        # Device i has the blocks of device i - t in turn t.
        carry, following, parts = self._turn(carry, blocks, whole, 0)
        sums, placed = self._chosen(TRAVELS, parts), self._chosen(PLACED, parts)
        placed = [self._place(self._spread(part), part, 0) for part in placed]
        sizes = len(carry), len(following), len(sums), len(placed)

        def turn(state: Sequence[Any], number: Any, *, last: bool = False) -> list[Any]:
            carry, blocks, sums, placed = _parts(state, sizes)
            moved = self._moved(sums)  # sums follow their blocks while these are computed with
            carry, following, parts = self._turn(carry, blocks, whole, number, last=last)
            sums = list(map(self._added, moved, self._chosen(TRAVELS, parts)))
            rows = zip(placed, self._chosen(PLACED, parts), strict=True)
            return [*carry, *following, *sums, *(self._place(*one, number) for one in rows)]

        state, turns = [*carry, *following, *sums, *placed], self._devices - 2
        if turns > 0:
            outer = dataclasses.replace(
                self._scan, length=turns, num_consts=0, num_carry=len(state), reverse=False
            )
            numbers = 1 + jnp.arange(turns, dtype=jnp.int32)
            with self._partitioner.repeated(turns):
                state = self._partitioner.executor.scan(
                    outer, lambda state, row: turn(state, row[0]), state, [numbers]
                )
        carry, _, sums, placed = _parts(turn(state, self._devices - 1, last=True), sizes)
        results = {TRAVELS: self._moved(sums), PLACED: placed, OWN: self._chosen(OWN, parts)}
        stacked = {kind: iter(arrays) for kind, arrays in results.items()}
        return [*carry, *(next(stacked[kind]) for kind in self._kinds)]

    def _turn(
        self,
        carry: Sequence[Any],
        blocks: Sequence[Any],
        whole: Sequence[Any],
        number: Any,
        *,
        last: bool = False,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Run the loop over the blocks that a device has, and send these on but the `last` time.

        **Returns:** the carry, the next blocks, and the stacked results of those that were here.
        """
        following = list(blocks) if last else self._moved(blocks)
        here, rest = iter(blocks), (self._rows_of(stack, number) for stack in whole)
        rows = [next(here) if around else next(rest) for around in self._around]
        with self._partitioner.repeated(self._scan.length):
            out = self._partitioner.executor.scan(self._scan, self._iteration, carry, rows)
        return list(out[: self._scan.num_carry]), following, list(out[self._scan.num_carry :])

    def _chosen(self, kind: str, parts: Sequence[Any]) -> list[Any]:
        """Return the stacked results of a kind."""
        return [part for part, its in zip(parts, self._kinds, strict=True) if its == kind]

    # --- Arrays, or their shapes ----------------------------------------------------------------

    def _moved(self, arrays: Sequence[Any]) -> list[Any]:
        """Send arrays to the next device of the ring, and return those of the one before."""
        _, groups = self._partitioner.axes.group(self._ring)
        rings = groups or [list(range(self._devices))]
        pairs = [(ring[n - 1], device) for ring in rings for n, device in enumerate(ring)]
        for array in arrays:
            self._partitioner.record_permute(self._ring, array)

        def execute(*arrays: Array) -> list[Array]:
            return [lax.ppermute(array, AXIS, pairs) for array in arrays]

        return list(self._partitioner.executor.run(execute, arrays, arrays))

    def _first(self, number: Any) -> Any:
        """Return the place, among all blocks, of the first block that a device has in a turn."""
        index = self._partitioner.axes.index(self._ring)
        return (index - number) % self._devices * self._scan.length

    def _rows_of(self, stack: Any, number: Any) -> Any:
        """Return what a stack of all blocks has of those that a device has in a turn."""
        size = self._scan.length

        def execute(stack: Array) -> Array:
            return lax.dynamic_slice_in_dim(stack, self._first(number), size)

        like = jax.ShapeDtypeStruct((size, *stack.shape[1:]), stack.dtype)
        return self._run(execute, [stack], like)

    def _place(self, stack: Any, part: Any, number: Any) -> Any:
        """Write the rows of the blocks of a turn into a stack of all blocks."""

        def execute(stack: Array, part: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(stack, part, self._first(number), 0)

        return self._run(execute, [stack, part], stack)

    def _spread(self, part: Any) -> Any:
        """Return a stack of all blocks, of zeros."""
        shape = self._scan.length * self._devices, *part.shape[1:]
        like = jax.ShapeDtypeStruct(shape, part.dtype)
        return self._run(lambda: jnp.zeros(shape, part.dtype), [], like)

    def _added(self, total: Any, part: Any) -> Any:
        return self._run(lambda a, b: a + b, [total, part], total)

    def _run(self, execute: Callable[..., Array], arrays: Sequence[Any], like: Any) -> Any:
        return self._partitioner.executor.run(lambda *a: [execute(*a)], arrays, [like])[0]


def _parts(flat: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """Cut a list into lists of these lengths."""
    rest = iter(flat)
    return [[next(rest) for _ in range(size)] for size in sizes]
