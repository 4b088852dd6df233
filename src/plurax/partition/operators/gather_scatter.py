"""Gather and scatter: read rows of a split table, or add rows to one.

An embedding table, or the logits from which cross entropy picks the right class, may be split along
the indexed dim, and gathering the whole table would send far more than the rows that are read. So
each device reads the rows of its shard and zeros for all others: the result is a partial sum. In a
scatter-add each device adds the rows that fall into its shard and drops the others.

    mesh tensor=2; table (6, 4) split by rows; indices [1, 5, 2], whole on both devices

    device   its rows   local indices    own               rows read (3, 4)
    0        0, 1, 2    1, 5, 2          yes, no, yes      t[1], 0, t[2]
    1        3, 4, 5    -2, 2, -1        no, yes, no       0, t[5], 0
                                         partial={tensor}: t[1], t[5], t[2]

The backward pass is a scatter-add of the cotangent's rows into zeros of the table's sharding.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from plurax.jaxpr.interpret import bind
from plurax.partition.operators.common import result
from plurax.partition.values import DeferredValue, Output, ShardedValue, ValueVersions
from plurax.sharding.spec import TensorSharding

Entry = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Roles:
    """How the dims of a table, its indices and the rows (read or added) correspond.

    **Fields:**

    - `window`: from a dim of the table that is read whole to the dim of the rows.
    - `batch`: from a batch dim of the table to the dim of the indices.
    - `indexed`: from an indexed dim of the table to its position in the indices' last dim.
    - `rows_of`: from each dim of the indices but the last to the dim of the rows.
    """

    window: dict[int, int]
    batch: dict[int, int]
    indexed: dict[int, int]
    rows_of: dict[int, int]


def _roles(
    table: Sequence[int],
    rows: Sequence[int],
    windows: Sequence[int],
    removed: Sequence[int],
    index_map: Sequence[int],
    batching: tuple[Sequence[int], Sequence[int]],
) -> Roles:
    """Return the roles for the shapes and dimension numbers of a gather or scatter."""
    kept = [d for d in range(len(table)) if d not in removed and d not in batching[0]]
    window = {
        d: place
        for d, place in zip(kept, windows, strict=True)
        if rows[place] == table[d] and d not in index_map
    }
    outer = [place for place in range(len(rows)) if place not in windows]
    return Roles(
        window,
        dict(zip(*batching, strict=True)),
        {d: index_map.index(d) for d in removed if d in index_map},
        dict(enumerate(outer)),
    )


def _dims_of_table(
    divider: Any, cell: ValueVersions, roles: Roles, sharding: TensorSharding
) -> tuple[Entry, ...]:
    """Return the sharding the table can have that is nearest to the given one.

    Dims that are neither a window, a batch nor an indexed dim are replicated, and so are dims that
    the shards do not divide.
    """
    ways = divider.axes.sizes
    return tuple(
        entry
        if (dim in roles.window or dim in roles.batch or dim in roles.indexed)
        and dim not in sharding.indivisible_dims(cell.shape, ways)
        else ()
        for dim, entry in enumerate(sharding.dims)
    )


def _index_entries(cell: ValueVersions, roles: Roles, table: Sequence[Entry]) -> list[Entry]:
    """Return the dims' axes for the indices: those of the table on batch dims, elsewhere their own.

    Axes that split the table are left out, because each device needs all indices into its shard.
    """
    used = {axis for entry in table for axis in entry}
    entries: list[Entry] = [
        tuple(a for a in entry if a not in used) for entry in cell.value.sharding.dims
    ]
    entries[-1] = ()
    for dim, place in roles.batch.items():
        entries[place] = table[dim]
    return entries


def _own_index(
    divider: Any, indices: Array, roles: Roles, table: Sequence[Entry], shape: Sequence[int]
) -> tuple[Array, Array | None, Array | None]:
    """Return indices into this device's shard, whether each is in it, and whether in the table."""
    own = inside = None
    for dim, place in roles.indexed.items():
        if not table[dim]:
            continue
        size = shape[dim] // divider.axes.size(table[dim])
        index = indices[..., place]
        # Device k has the rows k * size to (k + 1) * size.
        local = index - jnp.asarray(divider.axes.index(table[dim]) * size, index.dtype)
        here = (local >= 0) & (local < size)
        there = (index >= 0) & (index < shape[dim])
        own = here if own is None else own & here
        inside = there if inside is None else inside & there
        indices = indices.at[..., place].set(local)
    return indices, own, inside


def _clipped(indices: Array, roles: Roles, shape: Sequence[int], mode: Any) -> Array:
    """Clip indices into the table if the mode says so; widen them, so that offsets fit."""
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)
    if mode != lax.GatherScatterMode.CLIP:
        return indices
    for dim, place in roles.indexed.items():
        indices = indices.at[..., place].set(jnp.clip(indices[..., place], 0, shape[dim] - 1))
    return indices


def gather(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Evaluate `table[indices]`, a partial sum over the axes of a split indexed dim."""
    table, indices = inputs
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    out = eqn.outvars[0].aval
    roles = _roles(
        table.shape,
        out.shape,
        numbers.offset_dims,
        numbers.collapsed_slice_dims,
        numbers.start_index_map,
        (numbers.operand_batching_dims, numbers.start_indices_batching_dims),
    )
    # The table stays in its sharding where the operation allows it; the indices follow.
    table_dims = _dims_of_table(divider, table, roles, divider.reduced(table).sharding)
    from_ = divider.reshard(table, TensorSharding(table_dims))
    at = divider.reshard(indices, TensorSharding(tuple(_index_entries(indices, roles, table_dims))))
    local = tuple(
        from_.array.shape[d] if d in roles.window else size for d, size in enumerate(sizes)
    )
    clipped = _clipped(at.array, roles, table.shape, eqn.params["mode"])
    index, own, inside = _own_index(divider, clipped, roles, table_dims, table.shape)
    params = {**eqn.params, "slice_sizes": local}
    # Indices into other shards are clipped, and what they read is masked below.
    if own is not None:
        params["mode"] = lax.GatherScatterMode.CLIP
    array = eqn.primitive.bind(from_.array, index, **params)
    entries: list[Entry] = [()] * len(out.shape)
    for dim, place in roles.window.items():
        entries[place] = table_dims[dim]
    for dim, place in roles.rows_of.items():
        entries[place] = at.sharding.dims[dim]
    # A row is on one device along these axes, and zero on the others.
    summed = frozenset(axis for dim in roles.indexed for axis in table_dims[dim])
    if own is not None:
        assert inside is not None
        shape = [1] * array.ndim
        for dim, place in roles.rows_of.items():
            shape[place] = own.shape[dim]
        own, inside = own.reshape(shape), inside.reshape(shape)
        array = jnp.where(own, array, jnp.zeros((), array.dtype))
        if eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
            # Only one device fills in: the others' terms are zero.
            first = divider.axes.index(sorted(summed)) == 0
            array = jnp.where(~inside & first, _fill(eqn, array.dtype), array)
    data_varying = from_.data_varying or at.data_varying
    return [
        ShardedValue(array, tuple(out.shape), TensorSharding(tuple(entries), summed), data_varying)
    ]


def _fill(eqn: Any, dtype: Any) -> Array:
    """Return the value that out-of-bounds reads give in the mode `FILL_OR_DROP`."""
    given = eqn.params["fill_value"]
    if given is not None:
        return jnp.asarray(given, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    limits = np.iinfo(dtype)
    least = jnp.issubdtype(dtype, jnp.signedinteger)
    return jnp.asarray(limits.min if least else limits.max, dtype)


def scatter_add(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Evaluate `table.at[indices].add(rows)`; into zeros, the result stays deferred."""
    table = inputs[0]
    late = table.deferred
    if late is not None and late.zero:
        data_varying = any(cell.data_varying for cell in inputs)
        make = functools.partial(_added, divider, eqn, inputs)
        return [DeferredValue(table.shape, make, data_varying=data_varying)]
    return [_added(divider, eqn, inputs, divider.reduced(table).sharding)]


def scatter(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Evaluate `table.at[indices].set(rows)` and the like; the indexed dims are replicated."""
    table, indices, rows = inputs
    numbers = eqn.params["dimension_numbers"]
    roles = _scattered(table, rows, numbers)
    have = divider.reduced(table).sharding
    uneven = have.indivisible_dims(table.shape, divider.axes.sizes)
    table_dims = tuple(
        entry if (dim in roles.window or dim in roles.batch) and dim not in uneven else ()
        for dim, entry in enumerate(have.dims)
    )
    row_entries: list[Entry] = [()] * len(rows.shape)
    index_entries: list[Entry] = [()] * len(indices.shape)
    for dim, place in roles.window.items():
        row_entries[place] = table_dims[dim]
    for dim, place in roles.batch.items():
        row_entries[roles.rows_of[place]] = index_entries[place] = table_dims[dim]
    targets = [
        TensorSharding(table_dims),
        TensorSharding(tuple(index_entries)),
        TensorSharding(tuple(row_entries)),
    ]
    arrays = [
        divider.reshard(cell, sharding).array
        for cell, sharding in zip(inputs, targets, strict=True)
    ]
    return [result(eqn, inputs, bind(eqn, arrays)[0], targets[0])]


def _scattered(table: ValueVersions, rows: ValueVersions, numbers: Any) -> Roles:
    """Return the roles of a scatter's operands."""
    return _roles(
        table.shape,
        rows.shape,
        numbers.update_window_dims,
        numbers.inserted_window_dims,
        numbers.scatter_dims_to_operand_dims,
        (numbers.operand_batching_dims, numbers.scatter_indices_batching_dims),
    )


def _added(
    divider: Any, eqn: Any, inputs: list[ValueVersions], wanted: TensorSharding
) -> ShardedValue:
    """Evaluate a scatter-add whose table has the sharding nearest to `wanted`."""
    table, indices, rows = inputs
    roles = _scattered(table, rows, eqn.params["dimension_numbers"])
    table_dims = _dims_of_table(divider, table, roles, wanted)
    # Rows of the batch are added on each device; over `data` the result is reduced later.
    if any(cell.data_varying for cell in inputs):
        table_dims = tuple(tuple(a for a in entry if a != "data") for entry in table_dims)
    used = {axis for entry in table_dims for axis in entry}
    place_of = {place: dim for dim, place in roles.rows_of.items()}
    # Deferred rows can be created in any sharding.
    late = rows.deferred is not None and rows.deferred.free is None
    have = TensorSharding.replicated(len(rows.shape)) if late else divider.reduced(rows).sharding
    # The padding of an indivisible dim must not be added, so such dims of the rows are replicated.
    uneven = have.indivisible_dims(rows.shape, divider.axes.sizes)
    row_entries: list[Entry] = [
        tuple(a for a in entry if a not in used and place in place_of and place not in uneven)
        for place, entry in enumerate(have.dims)
    ]
    for dim, place in roles.window.items():
        row_entries[place] = table_dims[dim]
    for dim, place in roles.batch.items():
        row_entries[roles.rows_of[place]] = table_dims[dim]
    index_entries: list[Entry] = [()] * len(indices.shape)
    for dim, place in roles.rows_of.items():
        index_entries[dim] = row_entries[place]
    # Devices with different rows each add theirs to a copy of the table: a partial sum.
    terms = frozenset(axis for place in place_of for axis in row_entries[place] if axis not in used)
    into = divider.reshard(table, TensorSharding(table_dims))
    at = divider.reshard(indices, TensorSharding(tuple(index_entries)))
    given = divider.reshard(rows, TensorSharding(tuple(row_entries)))
    base = into.array
    # The table itself counts once in that sum.
    if terms and not table.is_zero:
        base = jnp.where(divider.axes.index(sorted(terms)) == 0, base, jnp.zeros((), base.dtype))
    clipped = _clipped(at.array, roles, table.shape, eqn.params["mode"])
    index, own, _ = _own_index(divider, clipped, roles, table_dims, table.shape)
    params = dict(eqn.params)
    if own is not None:
        for dim, place in roles.indexed.items():
            # An index past the end is dropped.
            outside = jnp.asarray(base.shape[dim], index.dtype)
            index = index.at[..., place].set(jnp.where(own, index[..., place], outside))
        params["mode"] = lax.GatherScatterMode.FILL_OR_DROP
    params = eqn.primitive.get_bind_params(params)
    array = eqn.primitive.bind(base, index, given.array, **params)
    data_varying = into.data_varying or at.data_varying or given.data_varying
    return ShardedValue(array, table.shape, TensorSharding(table_dims, terms), data_varying)
