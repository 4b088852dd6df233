"""Slices, pads, concatenations and reversals, along split dims too.

JAX makes shifts of these, token shifts, short convolutions as sums of slices, the odd and even
entries of `lax.associative_scan`. Along a split dim each device reads a window (see `halos.py`)
where a halo is less than the whole dim. Else the dim is replicated first; of a few entries, such as
the last token, the device that has them gives them to all, a partial sum.

    mesh context=4; x (4096, 8); float32           sent by each device
    concatenate([zeros (1, 8), x[:-1]])            one column, 32 bytes
    x[::2], x[1::2]                                nothing
    x[-1:]                                         a partial sum of one column
    x[1024:]                                       gathered: all are on other devices
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jaxtyping import Array

from plurax.jaxpr.interpret import bind
from plurax.partition.operators import halos
from plurax.partition.operators.common import (
    common_sharding,
    created,
    decided,
    local_shape,
    maybe_partial,
    result,
    to_sharding,
    with_replicated,
    with_rows_split,
)
from plurax.partition.operators.halos import Halo, Halos
from plurax.partition.operators.shape_ops import single_dim_rule
from plurax.partition.operators.share_exchange import of_parts
from plurax.partition.rule_context import RuleContext
from plurax.partition.values import Decision, DeferredValue, InnerCollective, Operand, ValueVersions
from plurax.sharding.reshard import moved
from plurax.sharding.spec import REPLICAS, TensorSharding


@dataclasses.dataclass(frozen=True)
class _Entries:
    """Some places of a value: the operand, the sharding of the result, how it is computed."""

    operand: Operand
    sharding: TensorSharding
    execute: Callable[[Array], Array]


def _part(
    context: RuleContext, atom: Any, versions: ValueVersions, places: Mapping[int, range]
) -> _Entries:
    """Return what a device has of the places in some dims."""
    have, shape = maybe_partial(context, atom, versions), versions.shape
    reads, few, none = {}, [], [d for d, own in places.items() if not own]
    for d, own in places.items():
        entry, start, step = have.dims[d], own.start, own.step
        one = halos.halo(context, entry, shape[d], len(own), first=start, stride=step)
        if one is not None and halos.is_cheap(context, atom, versions, one):
            reads[d] = one
        elif _is_few(context, atom, versions, have, d, len(own)):
            few.append(d)
    operand = with_replicated(versions, have, [d for d in places if d not in (*reads, *few, *none)])
    if reads:
        operand = dataclasses.replace(operand, halos=Halos(tuple(reads.items())))
    entries = tuple(
        () if d in (*few, *none) else entry for d, entry in enumerate(operand.sharding.dims)
    )
    partial = operand.sharding.partial | {a for d in few for a in have.dims[d]}

    def execute(array: Array) -> Array:
        for d, own in places.items():
            if d in few:
                array = _few(context, array, have.dims[d], d, own)
            elif d in reads:
                array = lax.slice_in_dim(array, 0, None, own.step, d)
            elif d in none:
                array = lax.slice_in_dim(array, 0, 0, axis=d)
            else:
                array = lax.slice_in_dim(array, own.start, own.stop, own.step, d)
        return array

    return _Entries(operand, TensorSharding(entries, partial), execute)


def slice_(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Slice dims: split ones by windows, or a partial sum of a few entries, or replicated first."""
    params, (versions,) = eqn.params, inputs
    strides = params["strides"] or (1,) * len(versions.shape)
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    places = {d: range(*bound) for d, bound in enumerate(bounds)}
    cut = {d: own for d, own in places.items() if own != range(versions.shape[d])}
    part = _part(context, eqn.invars[0], versions, cut)
    decision = decided(context, eqn, inputs, [part.operand], part.sharding)
    decision = dataclasses.replace(decision, execute=lambda array: [part.execute(array)])
    return with_rows_split(context, decision, part.operand.path[0])


def split(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision | DeferredValue:
    """Split a value into slices along one dim, which is replicated where one needs all of it."""
    (versions,), dim = inputs, eqn.params["axis"]
    have = maybe_partial(context, eqn.invars[0], versions)
    if not have.dims[dim]:
        return decided(context, eqn, inputs, [Operand(versions, (have,))], have)
    ends = list(itertools.accumulate(eqn.params["sizes"]))
    starts = [0, *ends[:-1]]
    parts = [
        _part(context, eqn.invars[0], versions, {dim: range(start, end)})
        for start, end in zip(starts, ends, strict=True)
    ]
    exchanged = _exchanged(context, eqn, versions, have, parts)
    if exchanged is not None:
        return exchanged
    if not all(part.operand.sharding.dims[dim] for part in parts):
        return single_dim_rule("axis")(context, eqn, inputs)
    outputs = tuple(
        result(context, eqn, inputs, part.sharding, index) for index, part in enumerate(parts)
    )

    def execute(*arrays: Array) -> list[Array]:
        return [part.execute(array) for part, array in zip(parts, arrays, strict=True)]

    return Decision(tuple(part.operand for part in parts), outputs, execute)


def _exchanged(
    context: RuleContext,
    eqn: Any,
    versions: ValueVersions,
    have: TensorSharding,
    parts: Sequence[_Entries],
) -> Decision | None:
    """Split a value into parts of which each device gets a share from others.

    None if that is more than all of the value, or than what is read of others for these `parts`.
    """
    dim, sizes = eqn.params["axis"], eqn.params["sizes"]
    readers = context.num_readers(eqn.invars[0])
    exchange = of_parts(context, versions, have.dims[dim], sizes, readers=readers)
    reads = [part.operand.halos for part in parts]
    edges = [sum(one.dims[0][1].edges) for one in reads if one is not None]
    if exchange is None or (len(edges) == len(parts) and sum(edges) <= exchange.entries):
        return None
    operand = Operand(versions, (have,))
    shares = tuple(size // exchange.devices for size in sizes)
    decision = decided(context, eqn, [versions], [operand], have, sizes=shares)
    sent = exchange.sent(local_shape(context, operand), dim, versions.dtype)

    def execute(array: Array) -> Sequence[Array]:
        return decision.execute(exchange.run(context.axes, array, dim))

    return dataclasses.replace(decision, execute=execute, sent=sent)


def _is_few(
    context: RuleContext,
    atom: Any,
    versions: ValueVersions,
    have: TensorSharding,
    dim: int,
    count: int,
) -> bool:
    """Whether a sum of what devices have of some entries is less than all entries gathered."""
    number = jnp.issubdtype(versions.dtype, jnp.number)
    if not have.dims[dim] or "data" in have.dims[dim] or not number:
        return False
    if versions.is_param and context.of_parameters(context.first(versions)):
        return False
    return 0 < 2 * count * context.num_readers(atom) < versions.shape[dim]


def _few(
    context: RuleContext, array: Array, over: tuple[str, ...], dim: int, places: range
) -> Array:
    """Return the entries at some places, zeros where these are on other devices."""
    size = array.shape[dim]
    index = jnp.arange(len(places), dtype=jnp.int32) * places.step + places.start
    index -= jnp.asarray(context.axes.index(over) * size, jnp.int32)
    entries = jnp.take(array, jnp.clip(index, 0, size - 1), axis=dim)
    own = ((index >= 0) & (index < size)).reshape(-1, *(1,) * (array.ndim - dim - 1))
    own = jnp.broadcast_to(own, entries.shape)
    return jnp.where(own, entries, jnp.zeros((), entries.dtype))


def pads_with_zeros(eqn: Any) -> bool:
    """Whether an equation puts zeros around and between the entries of its first operand."""
    fill = eqn.invars[1] if eqn.primitive.name == "pad" else None
    return isinstance(fill, Literal) and not fill.val


def pad(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Pad dims: split ones by windows, or replicated first."""
    versions, fill = inputs
    config, out = eqn.params["padding_config"], eqn.outvars[0].aval.shape
    padded = [d for d, edge in enumerate(config) if tuple(edge) != (0, 0, 0)]
    # The padding value is added on every device, so a partial sum would count it several times.
    # Zeros are not: a gradient of a part of a parameter is added to those of the others first.
    have = context.reduced(versions)
    if pads_with_zeros(eqn):
        first = maybe_partial(context, eqn.invars[0], versions)
        over = first.partial.intersection(REPLICAS)
        have = TensorSharding(first.dims, over) if over else have
    reads: dict[int, Halo] = {}
    for d in padded:
        low, _, between = config[d]
        halo = halos.halo(
            context, have.dims[d], versions.shape[d], out[d], first=-low, dilation=between + 1
        )
        if halo is not None and halos.is_cheap(context, eqn.invars[0], versions, halo):
            reads[d] = halo
    operand = with_replicated(versions, have, [d for d in padded if d not in reads])
    around = Halos(tuple(reads.items()))
    operands = [operand, Operand(fill, (TensorSharding(()),))]
    decision = decided(context, eqn, inputs, operands, operand.sharding)
    rest = tuple((0, 0, 0) if d in reads else edge for d, edge in enumerate(config))
    before = [
        max(0, size + low + high + max(0, size - 1) * between)
        for size, (low, high, between) in zip(local_shape(context, operand), rest, strict=True)
    ]

    def execute(array: Array, fill: Array) -> list[Array]:
        return [around.read(context.axes, lax.pad(array, fill, rest), fill)]

    sent = tuple(around.sent(context, before, versions.dtype))
    decision = dataclasses.replace(decision, execute=execute, sent=sent)
    return with_rows_split(context, decision, operand.path[0])


def concatenate(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Concatenate along a dim, of which each device reads windows, or which is replicated first.

    The other dims match in all operands.
    """
    dim = eqn.params["dimension"]
    some = [place for place, one in enumerate(inputs) if one.shape[dim]] or [0]
    eqn = eqn.replace(invars=[eqn.invars[place] for place in some])
    inputs = [inputs[place] for place in some]
    before = common_sharding(context, created(inputs))
    parts = _parts(context, eqn, inputs, before.dims[dim]) if before.dims[dim] else None
    exchange = None
    if parts is None and all(before.dims[dim] in _entries(one, dim) for one in inputs):
        sizes, over = [one.shape[dim] for one in inputs], before.dims[dim]
        exchange = of_parts(context, inputs[0], over, sizes, back=True)
    if exchange is not None:
        decision = decided(context, eqn, inputs, to_sharding(inputs, before), before)
        join, local = decision.execute, decision.outputs[0].array.shape
        return dataclasses.replace(
            decision,
            execute=lambda *arrays: [exchange.run(context.axes, join(*arrays)[0], dim)],
            sent=exchange.sent(local, dim, inputs[0].dtype),
        )
    if parts is None:
        target = before.with_dim(dim, ())
        decision = decided(context, eqn, inputs, to_sharding(inputs, target), target)
        return with_rows_split(context, decision, before)
    whole = before.with_dim(dim, ())
    operands = [
        Operand(one, (before if part.split else whole,), Halos(((dim, part),)))
        for one, part in zip(inputs, parts, strict=True)
    ]
    ends = list(itertools.accumulate(part.size for part in parts))
    step, axis = parts[0].step, parts[0].axis

    def execute(*arrays: Array) -> list[Array]:
        joined = arrays[0]
        place = lax.broadcasted_iota(jnp.int32, joined.shape, dim) + lax.axis_index(axis) * step
        for array, begin in zip(arrays[1:], ends, strict=False):
            joined = jnp.where(place < begin, joined, array)
        return [joined]

    decision = decided(context, eqn, inputs, operands, before)
    return dataclasses.replace(decision, execute=execute)


def _entries(versions: ValueVersions, dim: int) -> list[tuple[str, ...]]:
    """Return over which axes a dim is split, of each version of a value that is not deferred."""
    values = [] if versions.deferred is not None else versions.values
    return [value.sharding.dims[dim] for value in values]


def _parts(
    context: RuleContext, eqn: Any, inputs: list[ValueVersions], entry: tuple[str, ...]
) -> list[Halo] | None:
    """Return the windows of the operands of a concatenation; None if a dim is gathered.

    Operands that are whole on each device are read there.
    """
    dim, out = eqn.params["dimension"], eqn.outvars[0].aval.shape
    parts: list[Halo] = []
    begin = 0
    for atom, versions in zip(eqn.invars, inputs, strict=True):
        size = versions.shape[dim]
        split = versions.deferred is None and all(
            value.sharding.dims[dim] == entry for value in versions.values
        )
        part = halos.halo(context, entry, size, out[dim], split=split, first=-begin)
        if part is None or not halos.is_cheap(context, atom, versions, part):
            return None
        parts.append(part)
        begin += size
    return parts


def rev(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Reverse dims: of a split one devices exchange their parts, others are replicated first."""
    (versions,), dims = inputs, eqn.params["dimensions"]
    have = maybe_partial(context, eqn.invars[0], versions)
    split = [d for d in dims if _turns(context, eqn, versions, have, d)]
    operand = with_replicated(versions, have, [d for d in dims if d not in split])
    decision = decided(context, eqn, inputs, [operand], operand.sharding)
    shard = jax.ShapeDtypeStruct(local_shape(context, operand), versions.dtype)
    sent = tuple(InnerCollective("collective-permute", have.dims[d], shard) for d in split)

    def execute(array: Array) -> list[Array]:
        (array,) = bind(eqn, [array])
        for d in split:
            (axis,) = context.axes.mesh_axes(have.dims[d])
            count = context.axes.mesh[axis]
            pairs = [(k, count - 1 - k) for k in range(count)]
            exchange = functools.partial(lax.ppermute, axis_name=axis, perm=pairs)
            array = moved(exchange, array, context.axes)
        return [array]

    decision = dataclasses.replace(decision, execute=execute, sent=sent)
    return with_rows_split(context, decision, operand.path[0])


def _turns(
    context: RuleContext, eqn: Any, versions: ValueVersions, have: TensorSharding, dim: int
) -> bool:
    """Whether devices exchange their parts of a dim that is reversed."""
    size, axes = versions.shape[dim], context.axes
    whole = halos.halo(context, have.dims[dim], size, size)
    if whole is None or size % whole.devices or not axes.permutes:
        return False
    return context.num_readers(eqn.invars[0]) < whole.devices - 1 or whole.devices == 2
