"""Reading rows of a split table, and adding into one.

Where the indexed dim is split, each device reads the rows it has, zero for the others, and the
results are terms of a sum; adding into a split dim, each device takes the rows that are its own.
So an embedding, or the logit of the right class, never needs the whole table.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from plurax.partition.operators.common import bind, result
from plurax.partition.values import DeferredValue, Output, ShardedValue, ValueVersions
from plurax.sharding.spec import TensorSharding

Entry = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Roles:
    """What the dims of a table, of its indices and of the rows read or added are to each other.

    **Fields:** for a dim of the table `window`, the dim of the rows that runs along it whole;
    `batch`, the dim of the indices that runs along it; `indexed`, the place of its index in the
    indices' last dim. `rows_of`, for each dim of the indices but the last, that of the rows.
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


def _lies(
    divider: Any, cell: ValueVersions, roles: Roles, sharding: TensorSharding
) -> tuple[Entry, ...]:
    """How a table can lie, nearest to a given sharding."""
    ways = divider.axes.sizes
    return tuple(
        entry
        if (dim in roles.window or dim in roles.batch or dim in roles.indexed)
        and dim not in sharding.indivisible_dims(cell.shape, ways)
        else ()
        for dim, entry in enumerate(sharding.dims)
    )


def _index_entries(cell: ValueVersions, roles: Roles, table: Sequence[Entry]) -> list[Entry]:
    """How the indices lie: along the table's batch dims; else as they do, on axes that are free."""
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
    """Indices into this device's shard; which are its own; which are in the table at all."""
    own = inside = None
    for dim, place in roles.indexed.items():
        if not table[dim]:
            continue
        size = shape[dim] // divider.axes.size(table[dim])
        index = indices[..., place]
        local = index - jnp.asarray(divider.axes.index(table[dim]) * size, index.dtype)
        here = (local >= 0) & (local < size)
        there = (index >= 0) & (index < shape[dim])
        own = here if own is None else own & here
        inside = there if inside is None else inside & there
        indices = indices.at[..., place].set(local)
    return indices, own, inside


def _clipped(indices: Array, roles: Roles, shape: Sequence[int], mode: Any) -> Array:
    """Indices in the table where the mode says so; wide enough to be counted from any shard."""
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)
    if mode != lax.GatherScatterMode.CLIP:
        return indices
    for dim, place in roles.indexed.items():
        indices = indices.at[..., place].set(jnp.clip(indices[..., place], 0, shape[dim] - 1))
    return indices


def gather(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """`table[indices]`."""
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
    lies = _lies(divider, table, roles, divider.reduced(table).sharding)
    from_ = divider.reshard(table, TensorSharding(lies))
    at = divider.reshard(indices, TensorSharding(tuple(_index_entries(indices, roles, lies))))
    local = tuple(
        from_.array.shape[d] if d in roles.window else size for d, size in enumerate(sizes)
    )
    clipped = _clipped(at.array, roles, table.shape, eqn.params["mode"])
    index, own, inside = _own_index(divider, clipped, roles, lies, table.shape)
    params = {**eqn.params, "slice_sizes": local}
    if own is not None:
        params["mode"] = lax.GatherScatterMode.CLIP
    array = eqn.primitive.bind(from_.array, index, **params)
    entries: list[Entry] = [()] * len(out.shape)
    for dim, place in roles.window.items():
        entries[place] = lies[dim]
    for dim, place in roles.rows_of.items():
        entries[place] = at.sharding.dims[dim]
    summed = frozenset(axis for dim in roles.indexed for axis in lies[dim])
    if own is not None:
        assert inside is not None
        shape = [1] * array.ndim
        for dim, place in roles.rows_of.items():
            shape[place] = own.shape[dim]
        own, inside = own.reshape(shape), inside.reshape(shape)
        array = jnp.where(own, array, jnp.zeros((), array.dtype))
        if eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
            first = divider.axes.index(sorted(summed)) == 0
            array = jnp.where(~inside & first, _fill(eqn, array.dtype), array)
    data_varying = from_.data_varying or at.data_varying
    return [
        ShardedValue(array, tuple(out.shape), TensorSharding(tuple(entries), summed), data_varying)
    ]


def _fill(eqn: Any, dtype: Any) -> Array:
    given = eqn.params["fill_value"]
    if given is not None:
        return jnp.asarray(given, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    limits = np.iinfo(dtype)
    least = jnp.issubdtype(dtype, jnp.signedinteger)
    return jnp.asarray(limits.min if least else limits.max, dtype)


def scatter_add(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """`table.at[indices].add(rows)`; onto zeros it waits to be told how to lie."""
    table = inputs[0]
    late = table.deferred
    if late is not None and late.zero:
        data_varying = any(cell.data_varying for cell in inputs)
        make = functools.partial(_added, divider, eqn, inputs)
        return [DeferredValue(table.shape, make, data_varying=data_varying)]
    return [_added(divider, eqn, inputs, divider.reduced(table).sharding)]


def scatter(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """`table.at[indices].set(rows)` and the like: the indexed dims are whole."""
    table, indices, rows = inputs
    numbers = eqn.params["dimension_numbers"]
    roles = _scattered(table, rows, numbers)
    have = divider.reduced(table).sharding
    uneven = have.indivisible_dims(table.shape, divider.axes.sizes)
    lies = tuple(
        entry if (dim in roles.window or dim in roles.batch) and dim not in uneven else ()
        for dim, entry in enumerate(have.dims)
    )
    row_entries: list[Entry] = [()] * len(rows.shape)
    index_entries: list[Entry] = [()] * len(indices.shape)
    for dim, place in roles.window.items():
        row_entries[place] = lies[dim]
    for dim, place in roles.batch.items():
        row_entries[roles.rows_of[place]] = index_entries[place] = lies[dim]
    targets = [
        TensorSharding(lies),
        TensorSharding(tuple(index_entries)),
        TensorSharding(tuple(row_entries)),
    ]
    arrays = [divider.reshard(cell, lie).array for cell, lie in zip(inputs, targets, strict=True)]
    return [result(eqn, inputs, bind(eqn, arrays)[0], targets[0])]


def _scattered(table: ValueVersions, rows: ValueVersions, numbers: Any) -> Roles:
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
    table, indices, rows = inputs
    roles = _scattered(table, rows, eqn.params["dimension_numbers"])
    lies = _lies(divider, table, roles, wanted)
    if any(cell.data_varying for cell in inputs):
        lies = tuple(tuple(a for a in entry if a != "data") for entry in lies)
    used = {axis for entry in lies for axis in entry}
    place_of = {place: dim for dim, place in roles.rows_of.items()}
    # Rows that are not made yet can lie as they are wanted.
    late = rows.deferred is not None and rows.deferred.free is None
    have = TensorSharding.whole(len(rows.shape)) if late else divider.reduced(rows).sharding
    # Where shards of rows are filled up, what fills them must not be added.
    uneven = have.indivisible_dims(rows.shape, divider.axes.sizes)
    row_entries: list[Entry] = [
        tuple(a for a in entry if a not in used and place in place_of and place not in uneven)
        for place, entry in enumerate(have.dims)
    ]
    for dim, place in roles.window.items():
        row_entries[place] = lies[dim]
    for dim, place in roles.batch.items():
        row_entries[roles.rows_of[place]] = lies[dim]
    index_entries: list[Entry] = [()] * len(indices.shape)
    for dim, place in roles.rows_of.items():
        index_entries[dim] = row_entries[place]
    # Terms of a sum: rows of different devices that are added into one table.
    terms = frozenset(axis for place in place_of for axis in row_entries[place] if axis not in used)
    into = divider.reshard(table, TensorSharding(lies))
    at = divider.reshard(indices, TensorSharding(tuple(index_entries)))
    given = divider.reshard(rows, TensorSharding(tuple(row_entries)))
    base = into.array
    if terms and not table.is_zero:
        base = jnp.where(divider.axes.index(sorted(terms)) == 0, base, jnp.zeros((), base.dtype))
    clipped = _clipped(at.array, roles, table.shape, eqn.params["mode"])
    index, own, _ = _own_index(divider, clipped, roles, lies, table.shape)
    params = dict(eqn.params)
    if own is not None:
        for dim, place in roles.indexed.items():
            outside = jnp.asarray(base.shape[dim], index.dtype)
            index = index.at[..., place].set(jnp.where(own, index[..., place], outside))
        params["mode"] = lax.GatherScatterMode.FILL_OR_DROP
    params = eqn.primitive.get_bind_params(params)
    array = eqn.primitive.bind(base, index, given.array, **params)
    data_varying = into.data_varying or at.data_varying or given.data_varying
    return ShardedValue(array, table.shape, TensorSharding(lies, terms), data_varying)
