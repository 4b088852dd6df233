"""Sum loss, metrics and gradient over a whole batch on all devices, with one reduction per step.

Two ways give the same totals. Where examples are independent, a device splits its own rows into
microbatches (`device_totals`). Where the loss couples examples (batch norm), microbatch `m` is the
same set of examples on any number of devices, and `fun` communicates (`coupled_totals`). Both add
up on each device and reduce once at the end. Example, 8 rows on 2 devices, 2 microbatches:

                         device 0               device 1
    rows                 0 1 2 3                4 5 6 7
    device_totals   m=0  0 1                    4 5
                    m=1  2 3                    6 7
    coupled_totals  m=0  0 2                    4 6        examples 0, 2, 4, 6 see each other
                    m=1  1 3                    5 7        examples 1, 3, 5, 7 see each other
    then                 psum over `data` of (weight, loss, metrics, grads), outside the loop

Devices that are not equally fast may have different numbers of microbatches (`device_totals`). Each
has rows for the most, and runs its loop as often as a table says at its index on `data`. There is
no collective over `data` inside. Example, microbatches of 2 rows, (3, 1) of them:

                         device 0               device 1
    rows                 0 1 2 3 4 5            6 7 - - - -
    trips of the loop    3                      1
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from plurax.execute.gradient import Totals
from plurax.execute.rows import Chunk, Rows, StepKey, index_device_rows, index_rows, of_this_device
from plurax.jaxpr.barrier import order_after, pick_dependency
from plurax.sharding.reduce_dtype import EXACT, SumRounding
from plurax.tree import sum_dtype

Total = TypeVar("Total")
Gradient = Callable[[PyTree, PyTree, Rows], tuple[Totals, PyTree]]
LastGradient = Callable[[PyTree, PyTree, Rows, Totals | None], tuple[Totals, PyTree]]
"""A gradient that adds itself to the totals of the microbatches before."""
BatchTotals = Callable[[PyTree, PyTree, PyTree, StepKey, Int[Array, ""]], tuple[Totals, PyTree]]


def accumulate(
    fun: Callable[[PyTree, PyTree], tuple[Total, PyTree]],
    microbatches: int,
    trips: Array | None = None,
) -> Callable[[PyTree, PyTree], tuple[Total, PyTree]]:
    """Return `fun(state, rows) -> (total, state)` for rows stacked by microbatch.

    As a program:

        total = 0
        for m in range(microbatches):
            part, state = fun(state, rows[m])
            total = total + part
        return total, state

    **Arguments:**

    - `fun`: returns a tree of sums and the next state.
    - `microbatches`: leading dim of every leaf of the `rows` given to the result.
    - `trips`: the number of microbatches that are run, the first ones. None: all.

    Sums are carried in float32 or wider. There is no communication here: each device keeps its own
    sums, unless `fun` reduces them.

    >>> import jax.numpy as jnp
    >>> total, steps = accumulate(lambda s, x: (x.sum(), s + 1), 2)(0, jnp.ones((2, 3)))
    >>> float(total), int(steps)
    (6.0, 2)
    """

    def run(state: PyTree, rows: PyTree) -> tuple[Total, PyTree]:
        if microbatches == 1 and trips is None:
            part, state = fun(state, jax.tree.map(lambda leaf: leaf[0], rows))
            return added(None, part), state

        # `jit` caches the trace, so that `eval_shape` and `scan` trace `fun` once together.
        traced = jax.jit(fun)

        def body(carry: tuple[Total, PyTree], row: PyTree) -> tuple[tuple[Total, PyTree], None]:
            total, state = carry
            part, state = traced(state, row)
            return (added(total, part), state), None

        shapes, _ = jax.eval_shape(lambda: traced(state, jax.tree.map(lambda x: x[0], rows)))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, sum_dtype(s.dtype)), shapes)
        if trips is not None:

            def microbatch(m: Array, carry: tuple[Total, PyTree]) -> tuple[Total, PyTree]:
                return body(carry, row_of(rows, m))[0]

            return jax.lax.fori_loop(0, trips, microbatch, (zeros, state))
        (total, state), _ = jax.lax.scan(body, (zeros, state), rows)
        return total, state

    return run


def accumulate_with_last(
    fun: Callable[[PyTree, PyTree], tuple[Total, PyTree]],
    last: Callable[[Total | None, PyTree, PyTree], tuple[Total, PyTree]],
    microbatches: int,
    trips: Array | None = None,
) -> Callable[[PyTree, PyTree], tuple[Total, PyTree]]:
    """Return what `accumulate` does, with the last microbatch after the loop.

    `last(total, state, rows)` returns the total with the last microbatch's part; `total` is None
    if that is the only one. It may send while it computes, which the loop must not.
    """

    def run(state: PyTree, rows: PyTree) -> tuple[Total, PyTree]:
        before_last = None if trips is None else trips - 1
        final, total = row_of(rows, microbatches - 1 if trips is None else before_last), None
        if microbatches > 1:
            # The loop reads rows by their index: those of all but one would be a copy.
            before = accumulate(
                lambda state, m: fun(state, row_of(rows, m)), microbatches - 1, before_last
            )
            total, state = before(state, jnp.arange(microbatches - 1, dtype=jnp.int32))
            # Otherwise a compiler may run the last one's forward pass, and keep what it computes,
            # before the backward pass of those before it.
            total = jax.lax.optimization_barrier(total)
            leaves, structure = jax.tree.flatten(final)
            # By a gradient: these come last, and all are read. Sums of losses may not be.
            by = pick_dependency(jax.tree.leaves(total)[::-1])
            final = jax.tree.unflatten(structure, order_after(leaves, by))
        return last(total, state, final)

    return run


def row_of(rows: PyTree, m: Any) -> PyTree:
    """Return the rows of microbatch `m` of rows stacked by microbatch."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, m, keepdims=False), rows)


def added(total: Total | None, part: Total) -> Total:
    """Add a part to a total, which is float32 or wider; None is a total of nothing."""
    if total is None:
        return jax.tree.map(lambda b: b.astype(sum_dtype(b.dtype)), part)
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part)


def over_data(axis_size: int, rounding: SumRounding = EXACT) -> Callable[[Totals], Totals]:
    """Return a function that sums over the `axis_size` devices of `data` in one `psum`."""

    def run(totals: Totals) -> Totals:
        leaves, structure = jax.tree.flatten(totals)
        exact = range(len(jax.tree.leaves(totals._replace(grads=()))))
        sums = rounding.sums(lambda terms: jax.lax.psum(terms, "data"), leaves, exact)
        return jax.tree.unflatten(structure, sums)

    return run if axis_size > 1 else lambda totals: totals


def device_totals(
    fun: Gradient,
    parts: Sequence[int],
    reduce: Callable[[Totals], Totals] | None = None,
    last: LastGradient | None = None,
) -> BatchTotals:
    """Return `(params, model_state, batch, key, count) -> (totals, model_state)` on one device.

    Call it inside `shard_map`, with the device's own rows. Of these each device of `data` runs as
    many microbatches as `parts` says, adds up locally, and then over devices by `reduce` (default
    `over_data`). `last` is called for the last one; it may reduce gradients over devices while it
    computes others.
    """
    microbatches = max(parts)

    def one(params: PyTree, state: PyTree, part: Rows, _: Array, __: Array) -> Any:
        return fun(params, state, part)

    def split(leaf: Array) -> Array:
        # No -1 for a size: of a leaf without elements it could be any.
        return leaf.reshape(microbatches, leaf.shape[0] // microbatches, *leaf.shape[1:])

    return _in_microbatches(one, split, parts, reduce or over_data(len(parts)), last)


def coupled_totals(
    fun: Gradient,
    microbatches: int,
    reduce: Callable[[Totals], Totals] | None = None,
    axis_size: int = 1,
) -> BatchTotals:
    """Like `device_totals`, for a `fun` that communicates and so uses the rows of all devices.

    Microbatch `m` holds the examples `m, m + microbatches, ...`, whatever the number of devices.
    Microbatches without a real example are skipped.
    """

    def one(params: PyTree, state: PyTree, part: Rows, microbatch: Array, count: Array) -> Any:
        if microbatches == 1:
            return fun(params, state, part)
        # Example `m` is the first of microbatch `m`, so the microbatch is empty if `m >= count`.
        # All devices agree on the predicate, as collectives inside `fun` require.
        return _where_any(microbatch < count, lambda s: fun(params, s, part), state)

    def split(leaf: Array) -> Array:
        return round_robin(leaf, microbatches)

    parts = (microbatches,) * axis_size
    return _in_microbatches(one, split, parts, reduce or (lambda totals: totals))


def _in_microbatches(
    fun: Callable[[PyTree, PyTree, Rows, Array, Array], tuple[Totals, PyTree]],
    split: Callable[[Array], Array],
    parts: Sequence[int],
    reduce: Callable[[Totals], Totals],
    last: LastGradient | None = None,
) -> BatchTotals:
    """Sum `fun(params, model_state, rows, microbatch, count)` over microbatches.

    `split` reshapes a device's rows `(N, ...)` to `(microbatches, N / microbatches, ...)`; `parts`
    are the microbatches of each device of `data`.
    """
    microbatches = max(parts)

    def local(
        params: PyTree,
        model_state: PyTree,
        batch: PyTree,
        key: StepKey,
        count: Int[Array, ""],
    ) -> tuple[Totals, PyTree]:
        rows = jax.tree.map(split, index_device_rows(batch, key, count, parts))
        trips = of_this_device(parts) if len(set(parts)) > 1 else None

        def each(state: PyTree, part: PyTree) -> tuple[Totals, PyTree]:
            return fun(params, state, part[0], part[1], count)

        if last is None:
            run = accumulate(each, microbatches, trips)
        else:
            run = accumulate_with_last(
                each,
                lambda sums, state, part: last(params, state, part[0], sums),
                microbatches,
                trips,
            )
        totals, model_state = run(model_state, (rows, jnp.arange(microbatches, dtype=jnp.int32)))
        return reduce(totals), model_state

    return local


def uneven_totals(
    fun: Gradient, microbatches: int, reduce: Callable[[Totals], Totals] | None = None
) -> BatchTotals:
    """Like `coupled_totals`, for replicated rows that are all real.

    If `microbatches` does not divide the rows, the first microbatches have one row more than the
    last. A loop needs equal shapes, so each size is a loop of its own; `reduce` applies to the sums
    of each.
    """

    def run(
        params: PyTree,
        model_state: PyTree,
        batch: PyTree,
        key: StepKey,
        count: Int[Array, ""],
    ) -> tuple[Totals, PyTree]:
        rows = index_rows(batch, key, count)
        each, more = divmod(rows.mask.shape[0], microbatches)
        sums = []
        for first, stop, size in ((0, more, each + 1), (more, microbatches, each)):
            if first == stop or not size:
                continue
            places = jnp.arange(first, stop)[:, None] + microbatches * jnp.arange(size)[None]
            stacked = jax.tree.map(lambda leaf, at=places: leaf[at], rows)
            part, model_state = accumulate(
                lambda state, part: fun(params, state, part), stop - first
            )(model_state, stacked)
            sums.append(part if reduce is None else reduce(part))
        return jax.tree.map(lambda *parts: sum(parts), *sums), model_state

    return run


def device_evaluation(
    evaluate: Callable[[PyTree, PyTree, Rows], Totals],
    axis_size: int,
    reduce: Callable[[Totals], Totals] | None = None,
) -> Callable[[PyTree, PyTree, PyTree, Chunk], Totals]:
    """Return `(params, model_state, batch, chunk) -> totals` on one device of `data`.

    Call it inside `shard_map`, with the device's own rows; `reduce` sums over the `axis_size`
    devices (default `over_data`).
    """
    reduce = reduce or over_data(axis_size)

    def local(params: PyTree, model_state: PyTree, batch: PyTree, chunk: Chunk) -> Totals:
        key = StepKey(jax.random.key(0), chunk.first)
        rows = index_device_rows(batch, key, chunk.examples, (1,) * axis_size)
        return reduce(evaluate(params, model_state, rows))

    return local


def round_robin(leaf: Array, microbatches: int) -> Array:
    """Split rows `(N, ...)` round-robin into `(microbatches, N / microbatches, ...)`.

    The reshape to (size, microbatches) keeps each device's rows on the device.
    """
    size = leaf.shape[0] // microbatches
    return jnp.moveaxis(leaf.reshape(size, microbatches, *leaf.shape[1:]), 1, 0)


def _where_any(
    some: Array, fun: Callable[[PyTree], tuple[Totals, PyTree]], state: PyTree
) -> tuple[Totals, PyTree]:
    """Return `fun(state)` for a microbatch with examples, else zeros and the old state."""
    shapes, _ = jax.eval_shape(fun, state)
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.cond(some, fun, lambda state: (nothing, state), state)
