"""Sums of several partial sums and of values that are none: the partial sums are reduced together.

A derivative adds up what the readers of a value give, in the order of the equations. Where weights
of queries, keys and values are column-parallel, three of these terms are partial sums, and the
first, that of the residual, is none.

    mesh tensor=4; ct (8, 16) is whole; dq, dk, dv (8, 16) are partial sums; float32

    equation     by its operands alone           apart
    a = ct + dq  dq all-reduced, 768 bytes       ct, and dq
    b = a + dk   dk all-reduced, 768 bytes       ct, and dq + dk
    c = b + dv   dv all-reduced, 768 bytes       dq + dk + dv all-reduced, 768 bytes; ct is added
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from plurax.jaxpr.interpret import variables
from plurax.partition.operators.common import can_stay_partial, decided, fitting
from plurax.partition.partial_sums import SUMS
from plurax.partition.rule_context import RuleContext
from plurax.partition.values import Decision, DeferredValue, Operand, ValueVersions
from plurax.sharding.spec import REPLICAS, TensorSharding


def terms_of_sums(eqns: Sequence[Any], readers: Mapping[Any, int]) -> frozenset[Any]:
    """Return the variables that one equation reads, as a term of a sum of their shape."""
    return frozenset(
        atom
        for eqn in eqns
        if eqn.primitive.name in SUMS
        for atom in variables(eqn.invars)
        if readers[atom] == 1 and atom.aval.shape == eqn.outvars[0].aval.shape
    )


def add_apart(
    partitioner: Any, context: RuleContext, eqn: Any, inputs: Sequence[ValueVersions]
) -> ValueVersions | None:
    """Return a sum of partial sums and others, None for any other sum.

    If it is a term of another sum, which may have further partial sums, its two parts are added up
    for a reader.
    """
    terms = [
        _terms(context, atom, versions) for atom, versions in zip(eqn.invars, inputs, strict=True)
    ]
    if not all(terms) or eqn.invars[0] is eqn.invars[1]:
        return None
    created = [one.deferred is not None and not is_apart(one) for one in inputs]
    if any(created) and any(not one.deferred and one.value.sharding.axes for one in inputs):
        return None  # What is created for its reader is created as the other is split.
    partial, rest = ([part for part in parts if part] for parts in zip(*terms, strict=True))
    axes = {context.first(one).sharding.partial for one in partial}
    shape = eqn.outvars[0].aval.shape
    if len(axes) != 1 or not rest or not next(iter(axes)).isdisjoint(REPLICAS):
        return None
    # The addition repeats a term with fewer numbers.
    if any(one.shape != shape for one in partial) or (
        len(rest) > 1 and all(one.shape != shape for one in rest)
    ):
        return None
    # A partial sum that is not created yet is created as it is, for this sum reads it.
    for one in partial:
        partitioner.value(one)
    # What the sum meets further on holds for its terms.
    ahead = partial[0].ahead
    parts = [
        some[0] if len(some) == 1 else partitioner.by_rule(context, eqn, some)[0]
        for some in (partial, rest)
    ]
    parts[0].ahead = ahead
    if eqn.outvars[0] not in context.terms:
        (total,) = partitioner.by_rule(context, eqn, parts)
        return total
    dims = parts[1].value.sharding.dims
    return ValueVersions(
        DeferredValue(
            shape,
            inputs[0].dtype,
            functools.partial(_added, eqn=eqn),
            tuple(parts),
            free=TensorSharding(dims) if len(dims) == len(shape) else None,
            data_varying=any(one.data_varying for one in parts),
            is_param=all(one.is_param for one in parts),
        )
    )


def is_apart(versions: ValueVersions) -> bool:
    """Whether a value is a partial sum and another value, which are not added up yet."""
    decide = versions.deferred and versions.deferred.decide
    return isinstance(decide, functools.partial) and decide.func is _added


def _terms(
    context: RuleContext, atom: Any, versions: ValueVersions
) -> Sequence[ValueVersions | None]:
    """Return the two parts of a term, one of them None; none where it stays as it is."""
    if versions.deferred is not None and is_apart(versions):
        return versions.deferred.sources
    if versions.is_zero or not context.first(versions).sharding.partial:
        return () if versions.deferred else (None, versions)
    if versions.deferred is None and versions.value.own_rows is not None:
        return ()  # added up on the device that has the rows
    return (versions, None) if can_stay_partial(context, atom, versions) else ()


def _added(
    context: RuleContext, sources: Sequence[ValueVersions], target: TensorSharding, *, eqn: Any
) -> Decision:
    """Decide to reduce the partial sum to a sharding, and to add the rest."""
    whole, shape = TensorSharding(target.dims), eqn.outvars[0].aval.shape
    operands = [Operand(one, (fitting(one, whole, shape),)) for one in sources]
    return decided(context, eqn, sources, operands, whole)
