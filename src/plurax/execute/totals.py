"""The totals of a whole batch over all devices: one reduction per step.

Two ways, one result. Where examples are independent, a microbatch of a device is some of its rows
(`device_totals`). Where the loss couples examples, a microbatch is some of the rows of all devices,
and what couples them crosses devices in `fun` (`coupled_totals`). Both add up on each device and
reduce once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, Key, PyTree

from plurax.execute.accumulate import accumulate
from plurax.execute.gradient import Totals
from plurax.execute.rows import Rows, index_device_rows, index_rows

Gradient = Callable[[PyTree, PyTree, Rows], tuple[Totals, PyTree]]
BatchTotals = Callable[
    [PyTree, PyTree, PyTree, Key[Array, ""], Int[Array, ""]], tuple[Totals, PyTree]
]


def over_data(axis_size: int) -> Callable[[Totals], Totals]:
    """Add up over the mesh axis `data`, in one `psum`, if that has more than one device."""
    return lambda totals: jax.lax.psum(totals, "data") if axis_size > 1 else totals


def device_totals(
    fun: Gradient,
    axis_size: int,
    microbatches: int,
    reduce: Callable[[Totals], Totals] | None = None,
) -> BatchTotals:
    """`(params, model_state, batch, key, count) -> (totals, model_state)` on one device of `data`.

    To be called inside `shard_map`, with the device's own rows. It runs them in `microbatches`
    pieces, adds up locally, and then over devices by `reduce` (default `over_data`).
    """

    def one(params: PyTree, state: PyTree, part: Rows, _: Array, __: Array) -> Any:
        return fun(params, state, part)

    def split(leaf: Array) -> Array:
        return leaf.reshape(microbatches, -1, *leaf.shape[1:])

    return _in_microbatches(one, split, axis_size, microbatches, reduce or over_data(axis_size))


def coupled_totals(
    fun: Gradient,
    microbatches: int,
    reduce: Callable[[Totals], Totals] | None = None,
    axis_size: int = 1,
) -> BatchTotals:
    """Like `device_totals`, for a `fun` that communicates, so that it sees the rows of all devices.

    Microbatch `m` holds the examples `m, m + microbatches, ...`, whatever the number of devices.
    Microbatches without an example are left out.
    """

    def one(params: PyTree, state: PyTree, part: Rows, number: Array, count: Array) -> Any:
        if microbatches == 1:
            return fun(params, state, part)
        # The example of a number is the first of its microbatch: the same on every device.
        return _where_any(number < count, lambda s: fun(params, s, part), state)

    def split(leaf: Array) -> Array:
        return dealt(leaf, microbatches)

    return _in_microbatches(one, split, axis_size, microbatches, reduce or (lambda totals: totals))


def _in_microbatches(
    fun: Callable[[PyTree, PyTree, Rows, Array, Array], tuple[Totals, PyTree]],
    split: Callable[[Array], Array],
    axis_size: int,
    microbatches: int,
    reduce: Callable[[Totals], Totals],
) -> BatchTotals:
    """The sum of `fun(params, model_state, rows, microbatch, count)` over microbatches.

    `split` turns a device's rows `(N, ...)` into `(microbatches, N / microbatches, ...)`.
    """

    def local(
        params: PyTree,
        model_state: PyTree,
        batch: PyTree,
        key: Key[Array, ""],
        count: Int[Array, ""],
    ) -> tuple[Totals, PyTree]:
        rows = jax.tree.map(split, index_device_rows(batch, key, count, axis_size))
        totals, model_state = accumulate(
            lambda state, part: fun(params, state, part[0], part[1], count), microbatches
        )(model_state, (rows, jnp.arange(microbatches, dtype=jnp.int32)))
        return reduce(totals), model_state

    return local


def uneven_totals(
    fun: Gradient, microbatches: int, reduce: Callable[[Totals], Totals] | None = None
) -> BatchTotals:
    """Like `coupled_totals`, for rows that every device has whole and that are all real.

    The first microbatches have one row more than the last where they do not divide the rows. Sums
    over each of the two kinds are passed through `reduce`.
    """

    def run(
        params: PyTree,
        model_state: PyTree,
        batch: PyTree,
        key: Key[Array, ""],
        count: Int[Array, ""],
    ) -> tuple[Totals, PyTree]:
        rows = index_rows(batch, key, count)
        each, more = divmod(rows.mask.shape[0], microbatches)
        sums = []
        for first, stop, size in ((0, more, each + 1), (more, microbatches, each)):
            if first == stop or not size:
                continue
            places = jnp.arange(first, stop)[:, None] + microbatches * jnp.arange(size)
            stacked = jax.tree.map(lambda leaf, at=places: leaf[at], rows)
            part, model_state = accumulate(
                lambda state, part: fun(params, state, part), stop - first
            )(model_state, stacked)
            sums.append(part if reduce is None else reduce(part))
        return jax.tree.map(lambda *parts: sum(parts), *sums), model_state

    return run


def data_parallel(fun: Gradient, mesh: Mesh, microbatches: int) -> BatchTotals:
    """`device_totals` on every device of the mesh axis `data`, for rows split over it."""
    local = device_totals(fun, mesh.shape["data"], microbatches)
    if mesh.shape["data"] == 1:
        return local
    # check_vma=False: the check would ask the user's own scans to mark their carries as varying
    # over `data`, and the user's code knows no mesh.
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P(), P("data"), P(), P()),
        out_specs=P(),
        axis_names={"data"},
        check_vma=False,
    )


def dealt(leaf: Array, microbatches: int) -> Array:
    """Rows dealt out to microbatches, as `(microbatches, size, ...)`.

    Splitting the rows as (size, microbatches) keeps each device's rows where they are.
    """
    return jnp.moveaxis(leaf.reshape(-1, microbatches, *leaf.shape[1:]), 1, 0)


def _where_any(
    some: Array, fun: Callable[[PyTree], tuple[Totals, PyTree]], state: PyTree
) -> tuple[Totals, PyTree]:
    """`fun(state)` where a microbatch has any example; else no totals and the state as it was."""
    shapes, _ = jax.eval_shape(fun, state)
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.cond(some, fun, lambda state: (nothing, state), state)
