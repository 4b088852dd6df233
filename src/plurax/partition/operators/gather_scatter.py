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
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from plurax.jaxpr.interpret import bind
from plurax.partition.operators.common import (
    local_shape,
    maybe_partial,
    result,
    through,
)
from plurax.partition.rule_context import RuleContext
from plurax.partition.values import Decision, DeferredValue, Operand, ValueVersions
from plurax.sharding.axes import Axes
from plurax.sharding.spec import REPLICAS, TensorSharding

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
        d: row_dim
        for d, row_dim in zip(kept, windows, strict=True)
        if rows[row_dim] == table[d] and d not in index_map
    }
    outer = [row_dim for row_dim in range(len(rows)) if row_dim not in windows]
    return Roles(
        window,
        dict(zip(*batching, strict=True)),
        {d: index_map.index(d) for d in removed if d in index_map},
        dict(enumerate(outer)),
    )


def _dims_of_table(
    context: RuleContext, table: ValueVersions, roles: Roles, sharding: TensorSharding
) -> tuple[Entry, ...]:
    """Return the sharding the table can have that is nearest to the given one.

    Dims that are neither a window, a batch nor an indexed dim are replicated, and so are those that
    the shards do not divide, but for batches.
    """
    padded = sharding.indivisible_dims(table.shape, context.axes.sizes)
    known = roles.window.keys() | roles.batch.keys() | roles.indexed.keys()
    return tuple(
        entry if dim in known and (dim not in padded or dim in roles.batch) else ()
        for dim, entry in enumerate(sharding.dims)
    )


def _split_as(
    have: TensorSharding, dims: Mapping[int, int], other: TensorSharding
) -> TensorSharding:
    """Return a sharding in which whole dims are split as `dims` of another tensor: slices."""
    for dim, place in dims.items():
        if not have.dims[dim] and {*have.axes, *have.partial}.isdisjoint(other.dims[place]):
            have = have.with_dim(dim, other.dims[place])
    return have


def _index_entries(
    have: TensorSharding, roles: Roles, table: Sequence[Entry], terms: frozenset[str]
) -> list[Entry]:
    """Return the dims' axes for the indices: those of the table on batch dims, elsewhere their own.

    Axes that split the table, or over which it is a partial sum, are left out, because each device
    needs all indices into its shard.
    """
    used = {axis for entry in table for axis in entry} | terms
    entries: list[Entry] = [tuple(a for a in entry if a not in used) for entry in have.dims]
    entries[-1] = ()
    for dim, index_dim in roles.batch.items():
        entries[index_dim] = table[dim]
    return entries


def _own_index(
    axes: Axes, indices: Array, roles: Roles, table: Sequence[Entry], shape: Sequence[int]
) -> tuple[Array, Array | None, Array | None]:
    """Return indices into this device's shard, whether each is in it, and whether in the table."""
    own = inside = None
    for dim, position in roles.indexed.items():
        if not table[dim]:
            continue
        size = shape[dim] // axes.size(table[dim])
        index = indices[..., position]
        # Device k has the rows k * size to (k + 1) * size.
        local = index - jnp.asarray(axes.index(table[dim]) * size, index.dtype)
        here = (local >= 0) & (local < size)
        there = (index >= 0) & (index < shape[dim])
        own = here if own is None else own & here
        inside = there if inside is None else inside & there
        indices = indices.at[..., position].set(local)
    return indices, own, inside


def _widened(indices: Array, roles: Roles, shape: Sequence[int], *, clips: bool) -> Array:
    """Return indices wide enough for offsets; if it `clips`, clipped into the table."""
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)
    for dim, position in roles.indexed.items() if clips else ():
        indices = indices.at[..., position].set(jnp.clip(indices[..., position], 0, shape[dim] - 1))
    return indices


def gather(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
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
    have = context.reduced(table)
    if math.prod(out.shape) <= math.prod(table.shape) and _fills_alike(eqn):
        have = maybe_partial(context, eqn.invars[0], table)
    have = _split_as(have, roles.batch, context.reduced(indices))
    repeats = math.prod(out.shape) >= math.prod(table.shape)
    if repeats and context.of_parameters(context.first(table)):
        have = have.without(REPLICAS)  # such as a table of relative positions
    table_dims = _dims_of_table(context, table, roles, have)
    from_ = through(table, have, TensorSharding(table_dims, have.partial))
    index_dims = _index_entries(context.first(indices).sharding, roles, table_dims, have.partial)
    at = Operand(indices, (TensorSharding(tuple(index_dims)),))
    entries: list[Entry] = [()] * len(out.shape)
    for dim, row_dim in roles.window.items():
        entries[row_dim] = table_dims[dim]
    for dim, row_dim in roles.rows_of.items():
        entries[row_dim] = index_dims[dim]
    # A row is on one device along these axes, and zero on the others.
    summed = frozenset(axis for dim in roles.indexed for axis in table_dims[dim])
    local = local_shape(context, from_)
    kept = tuple(local[d] if d in roles.window else size for d, size in enumerate(sizes))
    spec = result(context, eqn, inputs, TensorSharding(tuple(entries), summed | have.partial))
    read = functools.partial(_read_own, context.axes, eqn, roles, table_dims, table.shape, kept)
    return Decision((from_, at), (spec,), read)


def _read_own(
    axes: Axes,
    eqn: Any,
    roles: Roles,
    table_dims: Sequence[Entry],
    shape: tuple[int, ...],
    slice_sizes: tuple[int, ...],
    table: Array,
    indices: Array,
) -> list[Array]:
    """Read the rows of this device's shard of a table of the given shape, and zeros for others."""
    # XLA reads the last row at indices past the end, even if promised that there are none.
    fills = eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    split = {axis for dim in roles.indexed for axis in table_dims[dim]}
    indices = _widened(indices, roles, shape, clips=bool(split) and not fills)
    index, own, inside = _own_index(axes, indices, roles, table_dims, shape)
    # Indices into other shards are clipped, and what they read is masked below. Those of other dims
    # are read as the mode says.
    for dim, position in roles.indexed.items():
        if table_dims[dim]:
            local = jnp.clip(index[..., position], 0, table.shape[dim] - 1)
            index = index.at[..., position].set(local)
    (array,) = bind(eqn, [table, index], slice_sizes=slice_sizes)
    if own is None:
        return [array]
    assert inside is not None
    mask_shape = [1] * array.ndim
    for dim, row_dim in roles.rows_of.items():
        mask_shape[row_dim] = own.shape[dim]
    own, inside = own.reshape(mask_shape), inside.reshape(mask_shape)
    array = jnp.where(own, array, jnp.zeros((), array.dtype))
    if fills:
        # Only one device fills in: the others' terms are zero.
        first = axes.index(sorted(split)) == 0
        array = jnp.where(~inside & first, _fill(eqn, array.dtype), array)
    return [array]


def _fills_alike(eqn: Any) -> bool:
    """Whether the sum of what each device fills in for reads out of bounds is that of one."""
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return True
    fill = eqn.params["fill_value"]
    return fill == 0 or (fill is None and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact))


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


def scatter_add(
    context: RuleContext, eqn: Any, inputs: list[ValueVersions]
) -> Decision | DeferredValue:
    """Evaluate `table.at[indices].add(rows)` or `subtract`; into zeros, the result is deferred."""
    table, _, rows = inputs
    terms: frozenset[str] = frozenset()
    if rows.deferred is None and math.prod(table.shape) <= math.prod(rows.shape):
        terms = maybe_partial(context, eqn.invars[2], rows).partial
    if table.deferred is None or not table.deferred.zero:
        have = _split_table(context, eqn, inputs)
        return _rows_added(context, inputs, have, eqn=eqn, path=(have,), terms=terms)
    return _deferred(context, eqn, inputs, functools.partial(_rows_added, eqn=eqn, terms=terms))


def scatter(
    context: RuleContext, eqn: Any, inputs: list[ValueVersions]
) -> Decision | DeferredValue:
    """Evaluate `table.at[indices].set(rows)` and the like; into zeros, the result is deferred.

    Each device has all rows, and takes those that fall into its shard of the table.
    """
    table = inputs[0]
    decide = functools.partial(_rows_set, eqn=eqn)
    if table.deferred is None or not table.deferred.zero:
        return decide(context, inputs, _split_table(context, eqn, inputs))
    return _deferred(context, eqn, inputs, decide)


def _deferred(
    context: RuleContext, eqn: Any, inputs: Sequence[ValueVersions], decide: Callable[..., Decision]
) -> DeferredValue:
    """Return a scatter into zeros, which are created in the sharding that a reader needs."""
    free = _split_table(context, eqn, inputs)
    return DeferredValue(
        inputs[0].shape,
        inputs[0].dtype,
        decide,
        tuple(inputs),
        free=free if free.axes else None,
        data_varying=any(one.data_varying for one in inputs),
        is_param=all(one.is_param for one in inputs),
    )


def _rows_set(
    context: RuleContext, inputs: Sequence[ValueVersions], wanted: TensorSharding, *, eqn: Any
) -> Decision:
    """Decide on a scatter whose table has the sharding nearest to `wanted`."""
    table, indices, rows = inputs
    roles = _scattered(table, rows, eqn.params["dimension_numbers"])
    table_dims = _dims_of_table(context, table, roles, wanted)
    table_dims = _without_replicas(context, inputs, roles, table_dims)
    row_entries: list[Entry] = [()] * len(rows.shape)
    index_entries: list[Entry] = [()] * len(indices.shape)
    for dim, row_dim in roles.window.items():
        row_entries[row_dim] = table_dims[dim]
    for dim, index_dim in roles.batch.items():
        row_entries[roles.rows_of[index_dim]] = index_entries[index_dim] = table_dims[dim]
    target = TensorSharding(table_dims)
    operands = (
        Operand(table, (target,)) if table.is_zero else through(table, wanted, target),
        Operand(indices, (TensorSharding(tuple(index_entries)),)),
        Operand(rows, (TensorSharding(tuple(row_entries)),)),
    )
    spec = result(context, eqn, inputs, target)
    take = functools.partial(_add_own, context.axes, eqn, roles, table_dims, table.shape, ())
    return Decision(operands, (spec,), take)


def _without_replicas(
    context: RuleContext, inputs: Sequence[ValueVersions], roles: Roles, table: tuple[Entry, ...]
) -> tuple[Entry, ...]:
    """Return a table's dims without the axes of replicas, if what it is given is of the batch.

    Those that split the indices' batch dims stay: tokens, of which each device has its own.
    """
    if not any(value.data_varying for value in inputs):
        return table
    own = context.reduced(inputs[1]).dims
    tokens = {dim: own[index_dim] for dim, index_dim in roles.batch.items()}
    return tuple(
        tuple(a for a in entry if a not in REPLICAS or a in tokens.get(dim, ()))
        for dim, entry in enumerate(table)
    )


def _split_table(context: RuleContext, eqn: Any, inputs: Sequence[ValueVersions]) -> TensorSharding:
    """Return a table's sharding; batch dims, and those of zeros, are split as what it is given."""
    table, indices, rows = inputs
    roles = _scattered(table, rows, eqn.params["dimension_numbers"])
    have = _split_as(context.reduced(table), roles.batch, context.reduced(indices))
    return _split_as(have, roles.window, context.reduced(rows)) if table.is_zero else have


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


def _rows_added(
    context: RuleContext,
    inputs: Sequence[ValueVersions],
    wanted: TensorSharding,
    *,
    eqn: Any,
    path: tuple[TensorSharding, ...] = (),
    terms: frozenset[str] = frozenset(),
) -> Decision:
    """Decide on a scatter-add whose table has the sharding nearest to `wanted`.

    `path` are shardings to which the table is brought first; `terms` the axes over which the rows
    may stay a partial sum.
    """
    table, indices, rows = inputs
    roles = _scattered(table, rows, eqn.params["dimension_numbers"])
    table_dims = _dims_of_table(context, table, roles, wanted)
    # Rows of the batch are added on each device; over `data` the result is reduced later.
    table_dims = _without_replicas(context, inputs, roles, table_dims)
    index_dim_of = {row_dim: dim for dim, row_dim in roles.rows_of.items()}
    # Deferred rows can be created in any sharding.
    anywhere = rows.deferred is not None and rows.deferred.free is None
    whole = TensorSharding.replicated(len(rows.shape))
    have = whole if anywhere else context.reduced(rows)
    first = have if anywhere else context.first(rows).sharding
    split = {axis for entry in table_dims for axis in entry}
    stays = terms == first.partial and (table.is_zero or not terms & split)
    terms = terms if stays else frozenset()
    have = first if terms else have
    # Zeros are smaller than the rows: reduced to their shards afterwards, the sum sends less.
    table_dims = tuple(tuple(a for a in entry if a not in terms) for entry in table_dims)
    used = split - terms
    # The padding of an indivisible dim must not be added, so such dims of the rows are replicated.
    padded = have.indivisible_dims(rows.shape, context.axes.sizes)
    row_entries: list[Entry] = [
        tuple(a for a in entry if a not in used and dim in index_dim_of and dim not in padded)
        for dim, entry in enumerate(have.dims)
    ]
    for dim, row_dim in roles.window.items():
        row_entries[row_dim] = table_dims[dim]
    for dim, index_dim in roles.batch.items():
        row_entries[roles.rows_of[index_dim]] = table_dims[dim]
    index_entries: list[Entry] = [()] * len(indices.shape)
    for dim, row_dim in roles.rows_of.items():
        index_entries[dim] = row_entries[row_dim]
    # Devices with different rows each add theirs to a copy of the table: a partial sum.
    row_sharding = TensorSharding(tuple(row_entries), terms)
    terms |= {a for dim in index_dim_of for a in row_entries[dim] if a not in used}
    # A sum that is not reduced yet is scattered to the shards of the table, where that sends less.
    direct = anywhere or context.cost(rows, row_sharding) < context.cost(rows, have)
    operands = (
        through(table, *path, TensorSharding(table_dims)),
        Operand(indices, (TensorSharding(tuple(index_entries)),)),
        Operand(rows, (row_sharding,)) if direct else through(rows, have, row_sharding),
    )
    spec = result(context, eqn, inputs, TensorSharding(table_dims, terms))
    # The table itself counts once in that sum.
    once = () if table.is_zero else tuple(sorted(terms))
    add = functools.partial(_add_own, context.axes, eqn, roles, table_dims, table.shape, once)
    return Decision(operands, (spec,), add)


def _add_own(
    axes: Axes,
    eqn: Any,
    roles: Roles,
    table_dims: Sequence[Entry],
    shape: tuple[int, ...],
    once: tuple[str, ...],
    table: Array,
    indices: Array,
    rows: Array,
) -> list[Array]:
    """Add the rows that fall into this device's shard of a table of the given shape.

    `once` are the axes over which the results are added up: one device adds to the table itself,
    the others to zeros.
    """
    if once:
        table = jnp.where(axes.index(once) == 0, table, jnp.zeros((), table.dtype))
    mode = eqn.params["mode"]
    indices = _widened(indices, roles, shape, clips=mode == lax.GatherScatterMode.CLIP)
    index, own, _ = _own_index(axes, indices, roles, table_dims, shape)
    if own is not None:
        for dim, position in roles.indexed.items():
            # An index past the end is dropped.
            outside = jnp.asarray(table.shape[dim], index.dtype)
            index = index.at[..., position].set(jnp.where(own, index[..., position], outside))
        mode = lax.GatherScatterMode.FILL_OR_DROP
    return bind(eqn, [table, index, rows], mode=mode)
