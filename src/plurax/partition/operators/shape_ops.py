"""Operations that rearrange entries: reshape, transpose, split, tile, and the like.

They are linear, so a partial sum usually passes through. A dim that the operation does not change
stays split; a dim that it cuts, joins or reorders is replicated first. A reshape keeps a dim split
if the dim is the major one of those it is merged with, or is split into.

    mesh tensor=4

    operation                          sharding before       sharding after
    reshape (8, 12) -> (96)            (tensor, None)        (tensor): rows are contiguous
    reshape (8, 12) -> (96)            (None, tensor)        deferred: columns are not contiguous
    reshape (96) -> (8, 12)            (tensor)              (tensor, None)
    transpose (8, 12) -> (12, 8)       (tensor, None)        (None, tensor)
    squeeze (8, 1) -> (8)              (tensor, None)        (tensor)
    squeeze (8, 1) -> (8)              (None, tensor)        (None), partial over tensor
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array

from plurax.jaxpr.interpret import bind
from plurax.partition.operators.common import (
    Rule,
    common_sharding,
    decided,
    local_shape,
    maybe_partial,
    reshaped_whole,
    result,
    to_sharding,
    with_replicated,
    with_rows_split,
)
from plurax.partition.operators.elementwise import only_real
from plurax.partition.operators.share_exchange import of_parts
from plurax.partition.rule_context import RuleContext
from plurax.partition.values import (
    Decision,
    DeferredValue,
    Operand,
    ValueVersions,
)
from plurax.sharding.spec import TensorSharding


def _linear(
    context: RuleContext, eqn: Any, inputs: Sequence[ValueVersions], dims: Sequence[int] = ()
) -> Operand:
    """Return the first operand of an operation that only moves its entries, with some dims
    replicated.
    """
    return with_replicated(inputs[0], maybe_partial(context, eqn.invars[0], inputs[0]), dims)


def _indices(inputs: Sequence[ValueVersions]) -> list[Operand]:
    """Return replicated operands."""
    return [Operand(one, (TensorSharding.replicated(len(one.shape)),)) for one in inputs]


def broadcast_in_dim(
    context: RuleContext, eqn: Any, inputs: list[ValueVersions]
) -> Decision | DeferredValue:
    """Broadcast a value; new dims are replicated, and zeros stay deferred."""
    versions, aval = inputs[0], eqn.outvars[0].aval
    shape = tuple(aval.shape)
    if versions.is_zero:
        return context.zeros(shape, aval.dtype)
    grows = math.prod(shape) > math.prod(versions.shape)
    # A partial sum is smaller before it is repeated: reduce it now.
    have = context.reduced(versions) if grows else maybe_partial(context, eqn.invars[0], versions)
    dims = eqn.params["broadcast_dimensions"]
    # A dim of size 1 that grows is the same on all devices.
    widened = [d for d, dim in enumerate(dims) if versions.shape[d] != shape[dim]]
    operand = with_replicated(versions, have, widened)
    entries: list[tuple[str, ...]] = [()] * len(shape)
    for d, dim in enumerate(dims):
        entries[dim] = operand.sharding.dims[d]
    sharding = TensorSharding(tuple(entries), operand.sharding.partial)

    def repeated(
        context: RuleContext, sources: Sequence[ValueVersions], target: TensorSharding
    ) -> Decision:
        # Reshard the rows, not the larger tensor in which they are repeated.
        rows = tuple(() if d in widened else target.dims[dim] for d, dim in enumerate(dims))
        operand = Operand(sources[0], (TensorSharding(rows),))
        local = target.shard_shape(shape, context.axes.sizes)
        return decided(context, eqn, sources, [operand], TensorSharding(target.dims), shape=local)

    def defer(source: ValueVersions) -> DeferredValue:
        return DeferredValue(
            shape, aval.dtype, repeated, (source,), free=sharding, repeats=True,
            data_varying=versions.data_varying, is_param=versions.is_param,
        )  # fmt: skip

    if versions.deferred is not None and versions.deferred.repeats:
        return defer(versions)
    by_rows = context.joint and "data" in sharding.axes and not versions.is_param
    if grows and (by_rows or context.of_parameters(context.first(versions))):
        return Decision((operand,), (), bind, defer=lambda values: defer(ValueVersions(values[0])))
    local = sharding.shard_shape(shape, context.axes.sizes)
    return decided(context, eqn, inputs, [operand], sharding, shape=local)


def reshape(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Reshape a value, keeping a split dim split if it is the major one of its group.

    If that fails for a reshape to one dim, the result stays deferred: a sum over it, or its inner
    product with another such tensor, only needs the shards.
    """
    versions, shape = inputs[0], tuple(eqn.outvars[0].aval.shape)
    have = maybe_partial(context, eqn.invars[0], versions)
    entries: list[tuple[str, ...]] = [()] * len(shape)
    # The derivative of a convolution of groups transposes its kernel in a reshape.
    order = eqn.params["dimensions"] or range(len(versions.shape))
    lost = []
    for place, dim in enumerate(order):
        entry = have.dims[dim]
        if not entry:
            continue
        before = math.prod(versions.shape[d] for d in order[:place])
        num_shards = have.num_shards(dim, context.axes.sizes)
        # A new dim can take over the split if it starts at the same stride and divides evenly.
        to = [
            new
            for new, size in enumerate(shape)
            if math.prod(shape[:new]) == before and size % num_shards == 0 and not entries[new]
        ]
        if to and versions.shape[dim] % num_shards == 0:
            entries[to[-1]] = entry
        else:
            lost.append(dim)
    if len(lost) == 1 and eqn.params["dimensions"] is None and versions.deferred is None:
        exchanged = _in_parts(context, eqn, versions, have, lost[0], entries)
        if exchanged is not None:
            return exchanged
    if lost and len(shape) == 1 and not have.partial:

        def flatten(array: Array) -> Array:
            return bind(eqn, [array])[0]

        deferred = reshaped_whole(versions, shape, flatten, flattened=True)
        return Decision((Operand(versions, (have,)),), (), bind, defer=lambda _: deferred)
    sharding = TensorSharding(tuple(entries), have.partial)
    local = sharding.shard_shape(shape, context.axes.sizes)
    operand = with_replicated(versions, have, lost)
    return decided(context, eqn, inputs, [operand], sharding, new_sizes=local)


def _in_parts(
    context: RuleContext,
    eqn: Any,
    versions: ValueVersions,
    have: TensorSharding,
    dim: int,
    entries: Sequence[tuple[str, ...]],
) -> Decision | None:
    """Cut a split dim into parts, or join it with these, where devices exchange shares of them.

    None where it is neither, or gathered for less. `entries`: of the other dims of the result.

        mesh tensor=4; queries, keys and values of 32 entries each
        (8, 96), split as (None, tensor), to (8, 3, 32), split as (None, None, tensor)
    """
    old, new, over = versions.shape, tuple(eqn.outvars[0].aval.shape), have.dims[dim]
    before = math.prod(old[:dim])
    starts = [math.prod(new[:d]) for d in range(len(new))]
    back = before not in starts
    if back:  # the parts are dims before it
        to = max(d for d, start in enumerate(starts) if start <= before)
        size, parts, share = new[to], before // starts[to], old[dim]
        inner = range(len([d for d in range(dim) if math.prod(old[:d]) < starts[to]]), dim)
        fits = before % starts[to] == 0 and not any(have.dims[d] for d in inner)
    else:
        to = max(d for d, start in enumerate(starts) if start == before) + 1
        size, parts, share = old[dim], new[to - 1], new[to] if to < len(new) else 0
        fits = share > 0
    if not fits or entries[to] or size % (parts * share) or share % context.axes.size(over):
        return None
    readers = 1 if back else context.num_readers(eqn.invars[0])
    sizes = [size // parts] * parts
    exchange = of_parts(context, versions, over, sizes, readers=readers, back=back)
    if exchange is None:
        return None
    sharding = TensorSharding(tuple(entries), have.partial).with_dim(to, over)
    local = sharding.shard_shape(new, context.axes.sizes)
    operand = Operand(versions, (have,))
    decision = decided(context, eqn, [versions], [operand], sharding, new_sizes=local)
    exchanged = functools.partial(exchange.run, context.axes, dim=to if back else dim)

    def execute(array: Array) -> list[Array]:
        if back:
            return [exchanged(bind(eqn, [array], new_sizes=local)[0])]
        return bind(eqn, [exchanged(array)], new_sizes=local)

    shape = local if back else local_shape(context, operand)
    sent = exchange.sent(shape, to if back else dim, versions.dtype)
    return dataclasses.replace(decision, execute=execute, sent=sent)


def transpose(
    context: RuleContext, eqn: Any, inputs: list[ValueVersions]
) -> Decision | DeferredValue:
    """Transpose the shards; what is created for its reader is transposed for it."""
    order, deferred = eqn.params["permutation"], inputs[0].deferred
    if deferred is None or deferred.zero or deferred.repeats:
        operand = _linear(context, eqn, inputs)
        return decided(context, eqn, inputs, [operand], _permuted(operand.sharding, order))

    def decide(
        context: RuleContext, sources: Sequence[ValueVersions], target: TensorSharding
    ) -> Decision:
        (source,), wanted = sources, _permuted(target, [order.index(d) for d in range(len(order))])
        if source.deferred:
            made = source.deferred.decide(context, source.deferred.sources, wanted)
            wanted = made.outputs[0].sharding
        operand = Operand(source, (wanted,))
        return decided(context, eqn, sources, [operand], _permuted(wanted, order))

    return dataclasses.replace(
        deferred,
        shape=tuple(eqn.outvars[0].aval.shape),
        decide=decide,
        sources=(inputs[0],),
        flattened=False,
        free=None if deferred.free is None else _permuted(deferred.free, order),
    )


def _permuted(sharding: TensorSharding, order: Sequence[int]) -> TensorSharding:
    """Return the sharding of a tensor whose dims are put in another order."""
    return TensorSharding(tuple(sharding.dims[dim] for dim in order), sharding.partial)


def squeeze(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Remove dims of size 1. Of a split one a device has the entry: it becomes a partial sum."""
    versions, shape = inputs[0], inputs[0].shape
    have = maybe_partial(context, eqn.invars[0], versions)
    gone = [d % len(shape) for d in eqn.params["dimensions"]]
    sums = jnp.issubdtype(versions.dtype, jnp.number) and not versions.is_param
    summed = [d for d in gone if sums and have.dims[d] and "data" not in have.dims[d]]
    operand = with_replicated(versions, have, [d for d in gone if d not in summed])
    split = operand.sharding
    dims = tuple(e for d, e in enumerate(split.dims) if d not in gone)
    sharding = TensorSharding(dims, split.partial | {a for d in summed for a in split.dims[d]})
    decision = decided(context, eqn, inputs, [operand], sharding)

    def execute(array: Array) -> Sequence[Array]:
        for d in summed:
            array = only_real(context.axes, split, shape, array, d)
        return decision.execute(array)

    return dataclasses.replace(decision, execute=execute)


def dynamic_slice(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Slice at dynamic indices; the dims that are cut are replicated first."""
    shape, sizes = inputs[0].shape, eqn.params["slice_sizes"]
    cut = [d for d, size in enumerate(sizes) if size != shape[d]]
    operand = _linear(context, eqn, inputs, cut)
    local = local_shape(context, operand)
    kept = tuple(size if d in cut else local[d] for d, size in enumerate(sizes))
    operands = [operand, *_indices(inputs[1:])]
    return decided(context, eqn, inputs, operands, operand.sharding, slice_sizes=kept)


def dynamic_update_slice(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Update a slice; the dims that it cuts are replicated, the others match in both operands."""
    into, part, *indices = inputs
    cut = [d for d, size in enumerate(part.shape) if size != into.shape[d]]
    target = common_sharding(context, [one for one in (part, into) if not one.deferred] or [part])
    target = TensorSharding(tuple(() if d in cut else e for d, e in enumerate(target.dims)))
    operands = [*to_sharding([into, part], target), *_indices(indices)]
    return decided(context, eqn, inputs, operands, target)


def fft(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Transform dims, which are replicated first. The transform is linear, so partial sums stay.

    XLA's CPU compiler takes the order of dims in memory from what reads the result, such as a
    reduce-scatter of columns, and cannot run a transform with another one than rows first.
    """
    rank = len(inputs[0].shape)
    dims = list(range(rank - len(eqn.params["fft_lengths"]), rank))
    operand = _linear(context, eqn, inputs, dims)
    decision = decided(context, eqn, inputs, [operand], operand.sharding)
    if not context.axes.on_cpu:
        return decision

    def transform(shard: Array) -> list[Array]:
        return with_layout_constraint(bind(eqn, [shard]), Layout(tuple(range(rank))))

    return dataclasses.replace(decision, execute=transform)


def matrices(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Decompose or solve matrices; the two minor dims are replicated, batch dims stay split."""
    batch = len(inputs[0].shape) - 2
    # The operands of a solve share their batch dims; the ranks of pivots and eigenvalues differ.
    dims = common_sharding(context, inputs).dims[:batch]

    def batched(rank: int) -> TensorSharding:
        return TensorSharding((*dims, *((),) * (rank - batch)))

    operands = [Operand(versions, (batched(len(versions.shape)),)) for versions in inputs]
    outputs = [batched(len(var.aval.shape)) for var in eqn.outvars]
    return decided(context, eqn, inputs, operands, *outputs)


def single_dim_rule(parameter: str, *, last: bool = False) -> Rule:
    """Return the rule for operations along one dim, such as a sort: that dim is replicated.

    `parameter` is the name of the equation's parameter with the dim; `last` for the last dim.
    """

    def rule(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
        rank = len(inputs[0].shape)
        dim = rank - 1 if last else eqn.params[parameter] % rank
        before = common_sharding(context, inputs)
        target = before.with_dim(dim, ())
        decision = decided(context, eqn, inputs, to_sharding(inputs, target), target)
        return with_rows_split(context, decision, before)

    return rule


def reduce_window(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Pool; dims without a window stay split."""
    sizes, out = eqn.params["window_dimensions"], eqn.outvars[0].aval.shape
    # The backward pass of max pooling has a cotangent and an operand: follow the operand.
    target = common_sharding(context, [one for one in inputs if one.shape == inputs[-1].shape])
    for dim, size in enumerate(sizes):
        if size > 1 or any(one.shape[dim] != out[dim] for one in inputs):
            target = target.with_dim(dim, ())
    return decided(context, eqn, inputs, to_sharding(inputs, target), target)


def barrier(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Apply an operation that returns all its operands; shardings stay as they are."""
    shardings = [
        maybe_partial(context, atom, versions)
        for atom, versions in zip(eqn.invars, inputs, strict=True)
    ]
    operands = [Operand(one, (have,)) for one, have in zip(inputs, shardings, strict=True)]
    outputs = tuple(
        result(context, eqn, [versions], sharding, index)
        for index, (versions, sharding) in enumerate(zip(inputs, shardings, strict=True))
    )
    return Decision(tuple(operands), outputs, lambda *shards: bind(eqn, shards))


def unchanged(
    context: RuleContext, _eqn: Any, inputs: list[ValueVersions]
) -> Decision | DeferredValue:
    """Return the input as it is."""
    if inputs[0].deferred:
        return inputs[0].deferred
    value = inputs[0].value
    return Decision((Operand(inputs[0], (value.sharding,)),), (value,), lambda array: [array])
