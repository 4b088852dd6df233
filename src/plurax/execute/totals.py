"""The totals of a whole batch over all devices: one reduction per step.

Two ways, one result. Where examples are independent, each device adds up its own rows and reduces
once (`data_parallel`). Where the loss couples examples, the loss is written over the whole
microbatch and the partitioner spreads it (`coupled`); it then reduces once per microbatch, because
what couples the examples has to cross devices before the gradient is known.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, Key, PyTree

from plurax.execute.accumulate import accumulate
from plurax.execute.gradient import Totals
from plurax.execute.rows import Rows, number_rows

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
    reduce = reduce or over_data(axis_size)

    def local(
        params: PyTree,
        model_state: PyTree,
        batch: PyTree,
        key: Key[Array, ""],
        count: Int[Array, ""],
    ) -> tuple[Totals, PyTree]:
        size = jax.tree.leaves(batch)[0].shape[0]
        first = jax.lax.axis_index("data") * size if axis_size > 1 else 0
        rows = number_rows(batch, key, count, first)
        stacked = jax.tree.map(
            lambda leaf: leaf.reshape(microbatches, size // microbatches, *leaf.shape[1:]), rows
        )
        totals, model_state = accumulate(
            lambda state, part: fun(params, state, part), microbatches
        )(model_state, stacked)
        return reduce(totals), model_state

    return local


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


def coupled(fun: Gradient, mesh: Mesh, microbatches: int) -> BatchTotals:
    """Like `data_parallel`, for a loss that sees every example of a microbatch.

    Microbatch `m` holds the examples `m, m + microbatches, ...`, whatever the number of devices.
    Microbatches without an example are left out.
    """

    def run(
        params: PyTree,
        model_state: PyTree,
        batch: PyTree,
        key: Key[Array, ""],
        count: Int[Array, ""],
    ) -> tuple[Totals, PyTree]:
        rows = number_rows(batch, key, count)

        def deal(leaf: Array) -> Array:
            # Splitting the rows as (size, microbatches) keeps each device's rows where they are.
            dealt = leaf.reshape(-1, microbatches, *leaf.shape[1:])
            stacked = jnp.moveaxis(dealt, 1, 0)
            # Inside another shard_map the mesh is the one of the context.
            context = jax.sharding.get_abstract_mesh()
            where = NamedSharding(mesh if context.empty else context, P(None, "data"))
            return jax.lax.with_sharding_constraint(stacked, where)

        def one(state: PyTree, part: Rows) -> tuple[Totals, PyTree]:
            if microbatches == 1:
                return fun(params, state, part)
            shapes, _ = jax.eval_shape(fun, params, state, part)
            nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            return jax.lax.cond(
                jnp.any(part.mask),
                lambda: fun(params, state, part),
                lambda: (nothing, state),
            )

        return accumulate(one, microbatches)(model_state, jax.tree.map(deal, rows))

    return run
