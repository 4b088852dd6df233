"""Helpers that the rules of several operations share.

A rule `rule(context, eqn, inputs)` decides, without arrays, which sharding each operand must have,
which sharding each result then has, and what one device computes from its shards. Most rules bring
all operands to one common sharding. The choice is between the shardings that the operands already
have and those that join two of them, and the one that sends the fewest bytes wins.

    mesh tensor=4; a (8, 64) is split as (None, tensor), b (8, 64) is (None, None); float32

    candidate            to reshard a                     to reshard b      chosen
    (None, tensor)       nothing                          a slice, 0        yes
    (None, None)         an all-gather, 1536 bytes        nothing

An operand that is a partial sum may stay one if the operation is linear and no other equation reads
the operand: another reader could need it reduced, and it would then be reduced twice. How many
equations read a variable is counted in the traced function before the first one is evaluated, so a
decision depends on the equation, its inputs and the context alone.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array

from plurax.jaxpr.interpret import bind
from plurax.jaxpr.product_dims import PRODUCTS, product_dims
from plurax.partition.rule_context import RuleContext
from plurax.partition.values import (
    Decision,
    DeferredValue,
    Operand,
    ShardedValue,
    ValueVersions,
)
from plurax.sharding.reshard import apply_moves
from plurax.sharding.spec import TensorSharding

Rule = Callable[[RuleContext, Any, list[ValueVersions]], Decision | DeferredValue]


def result(
    context: RuleContext,
    eqn: Any,
    inputs: Sequence[ValueVersions],
    sharding: TensorSharding,
    index: int = 0,
) -> ShardedValue:
    """Return the spec of a result of an equation; what it depends on follows from the inputs."""
    aval = eqn.outvars[index].aval
    return context.spec(
        tuple(aval.shape),
        aval.dtype,
        sharding,
        data_varying=any(versions.data_varying for versions in inputs),
        is_param=all(versions.is_param for versions in inputs),
    )


def decided(
    context: RuleContext,
    eqn: Any,
    inputs: Sequence[ValueVersions],
    operands: Sequence[Operand],
    *shardings: TensorSharding,
    **changed: Any,
) -> Decision:
    """Return the decision to apply the equation's primitive to the operands' shards.

    **Arguments:** `inputs`, on which the results depend; `shardings`, of the results, or one for
    all; `changed`, parameters of the primitive that are other than in the equation.
    """
    outputs = tuple(
        result(context, eqn, inputs, shardings[min(index, len(shardings) - 1)], index)
        for index in range(len(eqn.outvars))
    )

    def execute(*shards: Array) -> list[Array]:
        return bind(eqn, shards, **changed)

    product = None
    if eqn.primitive.name in (*PRODUCTS, "ragged_dot_general"):
        sizes = context.axes.sizes
        shapes = [one.sharding.shard_shape(one.versions.shape, sizes) for one in operands]
        product = product_dims(eqn, shapes, outputs[0].array.shape)
    return Decision(tuple(operands), outputs, execute, product=product)


def by_default(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Apply an operation without a rule to replicated operands."""
    whole = [Operand(one, (TensorSharding.replicated(len(one.shape)),)) for one in inputs]
    outputs = [TensorSharding.replicated(len(var.aval.shape)) for var in eqn.outvars]
    decision = decided(context, eqn, inputs, whole, *outputs)
    return dataclasses.replace(decision, without_rule=True)


def whole(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Apply an operation that is meant for whole tensors, such as a print, to replicated ones."""
    return dataclasses.replace(by_default(context, eqn, inputs), without_rule=False)


def fitting(
    versions: ValueVersions, target: TensorSharding, result: Sequence[int]
) -> TensorSharding:
    """Return an operand's sharding for a result of a shape that is sharded as `target`.

    Scalars are replicated, and so are dims of size 1 that broadcast.
    """
    if not versions.shape:
        return TensorSharding(())
    if versions.shape == tuple(result) and not target.partial:
        return target
    sizes = zip(versions.shape, result, target.dims, strict=True)
    return TensorSharding(tuple(entry if size == whole else () for size, whole, entry in sizes))


def common_sharding(
    context: RuleContext, inputs: Sequence[ValueVersions], kept: frozenset[str] = frozenset()
) -> TensorSharding:
    """Return the operand sharding to which all operands are resharded for the fewest bytes.

    Partial sums over the axes in `kept` may stay, so they cost nothing. With equal bytes the
    sharding with the most shards wins.
    """
    rank = max(len(one.shape) for one in inputs)
    ranked = [one for one in inputs if len(one.shape) == rank]
    known = [one for one in ranked if not one.deferred]
    # Partial sums are candidates in their reduced form. What a parameter or a constant is sliced to
    # for another reader, in another layer, is none: it would split what is whole here.
    options = {
        TensorSharding(value.sharding.dims)
        for one in known
        for value in (one.values[:1] if one.is_param else one.values)
    }
    options |= {context.reduced(one) for one in known}
    shape = [max(sizes) for sizes in zip(*(one.shape for one in ranked), strict=True)]
    free = {one.deferred.free for one in ranked if one.deferred and one.deferred.free}
    # A device's own rows cannot be split over `data`, as a parameter that is repeated may be.
    varies = any(one.data_varying for one in known)
    options |= {option for option in free if not (varies and "data" in option.axes)}
    if not options:
        return TensorSharding.replicated(rank)
    if len(options) == 1:
        return next(iter(options))
    options |= {_joined(*pair) for pair in itertools.combinations(options, 2)}

    def cost(option: TensorSharding) -> tuple[float, float]:
        total = 0.0
        for one in known:
            still, fit = kept & one.value.sharding.partial, fitting(one, option, shape)
            total += context.cost(one, TensorSharding(fit.dims, still) if still else fit)
        return total, -context.axes.size(option.axes)

    allowed = [option for option in options if not kept & set(option.axes)]
    # Sets have no fixed order: sorting makes the choice the same in every process.
    return min(sorted(allowed, key=repr), key=cost)


def _joined(first: TensorSharding, second: TensorSharding) -> TensorSharding:
    """Return what is split as both are, along other dims over other axes; else the first.

    Tokens (None, context, None) and positions (None, None, tensor): (None, context, tensor).
    """
    dims = tuple(a or b for a, b in zip(first.dims, second.dims, strict=True))
    every = [*first.axes, *second.axes]
    return TensorSharding(dims) if sum(map(len, dims)) == len({*every}) == len(every) else first


def created(inputs: Sequence[ValueVersions]) -> Sequence[ValueVersions]:
    """Return the inputs that are not deferred, or all if all are."""
    return [versions for versions in inputs if not versions.deferred] or inputs


def to_sharding(inputs: Sequence[ValueVersions], target: TensorSharding) -> list[Operand]:
    """Return operands that all need one sharding."""
    return [Operand(versions, (target,)) for versions in inputs]


def can_stay_partial(context: RuleContext, atom: Any, versions: ValueVersions) -> bool:
    """Whether a partial sum may stay unreduced, for which it has no reduced version.

    It has one reader, or less is reduced behind all of them, or they read each device's own rows.
    `atom` is what the equation reads, and `versions` its value.
    """
    if not all(value.sharding.partial for value in versions.values):
        return False
    own = versions.deferred is None and versions.value.own_rows is not None
    return own or context.num_readers(atom) <= 1 or atom in context.shrinking


def maybe_partial(context: RuleContext, atom: Any, versions: ValueVersions) -> TensorSharding:
    """Return the sharding for a linear operation that only moves entries, partial if possible."""
    if can_stay_partial(context, atom, versions):
        return context.first(versions).sharding
    return context.reduced(versions)


def through(versions: ValueVersions, *path: TensorSharding) -> Operand:
    """Return an operand that is brought to some shardings one after another."""
    return Operand(versions, tuple(dict.fromkeys(path)))


def with_replicated(
    versions: ValueVersions, sharding: TensorSharding, dims: Sequence[int]
) -> Operand:
    """Return an operand that has `sharding`, and in which some dims are then replicated."""
    entries = tuple(() if dim in dims else entry for dim, entry in enumerate(sharding.dims))
    return through(versions, sharding, TensorSharding(entries, sharding.partial))


def local_shape(context: RuleContext, operand: Operand) -> tuple[int, ...]:
    """Return the shape of one shard of an operand."""
    return operand.sharding.shard_shape(operand.versions.shape, context.axes.sizes)


def with_rows_split(context: RuleContext, decision: Decision, before: TensorSharding) -> Decision:
    """Split over `data` the rows that an operation needed whole, to keep later equations parallel.

    `before` is the sharding before the operation. This applies in `joint` mode only, in which rows
    are one dim split over `data`.
    """
    targets = [_rows_split(context, value, before) for value in decision.outputs]
    if all(value.sharding == to for value, to in zip(decision.outputs, targets, strict=True)):
        return decision
    outputs = tuple(
        context.spec(one.shape, one.dtype, to, one.data_varying, one.is_param)
        for one, to in zip(decision.outputs, targets, strict=True)
    )

    def execute(*shards: Array) -> list[Array]:
        arrays = decision.execute(*shards)
        return [
            sliced(context, value, array, to)
            for value, array, to in zip(decision.outputs, arrays, targets, strict=True)
        ]

    return dataclasses.replace(decision, outputs=outputs, execute=execute)


def _rows_split(
    context: RuleContext, value: ShardedValue, before: TensorSharding
) -> TensorSharding:
    """Return the sharding with `data` on the dim where `before` has it, if possible."""
    sharding = value.sharding
    if context.joint and "data" not in {*sharding.axes, *sharding.partial}:
        for dim, entry in enumerate(before.dims):
            if "data" in entry and value.shape[dim] % context.axes.size(["data"]) == 0:
                return sharding.with_dim(dim, ("data",))
    return sharding


def sliced(context: RuleContext, spec: ShardedValue, array: Array, target: TensorSharding) -> Array:
    """Return the part of a replicated dim that a device keeps; nothing is sent."""
    steps = context.steps(spec, target)
    assert all(step.kind == "slice" for step in steps), steps
    return apply_moves(array, spec.shape, spec.sharding, steps, context.axes)


def reshaped_whole(
    versions: ValueVersions,
    shape: tuple[int, ...],
    reshape: Callable[[Array], Array],
    *,
    flattened: bool = False,
) -> DeferredValue:
    """Return the deferred reshape of a value that is gathered when an operation reads it."""
    return DeferredValue(
        shape,
        versions.dtype,
        functools.partial(_reshaped, shape=shape, reshape=reshape),
        sources=(versions,),
        flattened=flattened,
        data_varying=versions.data_varying,
        is_param=versions.is_param,
    )


def _reshaped(
    context: RuleContext,
    sources: Sequence[ValueVersions],
    target: TensorSharding,
    *,
    shape: tuple[int, ...],
    reshape: Callable[[Array], Array],
) -> Decision:
    """Decide to gather the source, reshape it, and keep this device's shard."""
    (versions,) = sources
    whole, flags = TensorSharding.replicated(len(shape)), (versions.data_varying, versions.is_param)
    spec = context.spec(shape, versions.dtype, whole, *flags)
    return Decision(
        (Operand(versions, (TensorSharding.replicated(len(versions.shape)),)),),
        (context.spec(shape, versions.dtype, target, *flags),),
        lambda array: [sliced(context, spec, reshape(array), target)],
    )
