"""Sums of an optimizer's update share all-reduces.

An optimizer that takes a norm of each parameter adds up the shards of each, a number, and its
equations come leaf by leaf. Reduced where it is read, each number has an all-reduce of its own.
Here equations come in rounds: first those that read no number of which devices have parts, then
all these numbers are reduced together, then equations that read them.

    mesh data=4, zero=1; LAMB's norms of two parameters, in the order in which they are traced

    equation              device has      round
    a = sum(w0 ** 2)      a partial sum   0
    r0 = sqrt(a)                          1
    b = sum(w1 ** 2)      a partial sum   0
    r1 = sqrt(b)                          1      before it: all-reduce (a, b), 8 bytes

Whether all numbers are finite is such a sum as well, of ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jaxtyping import Array

from plurax.jaxpr.interpret import variables
from plurax.partition.partial_sums import adds_up
from plurax.partition.resharder import Resharder
from plurax.partition.values import ValueVersions


def in_rounds(
    eqns: Sequence[Any],
    here: Mapping[Any, ValueVersions],
    readers: Mapping[Any, int],
    resharder: Resharder,
) -> Iterator[Any]:
    """Yield equations in the order in which they are evaluated, and reduce sums between rounds.

    `here` has the values of variables, those of an equation before the next one is asked for;
    `readers`, how often equations read each.
    """
    while eqns:
        waiting, unknown, parts = list[Any](), set[Any](), dict[Any, None]()
        for eqn in eqns:
            read = variables(eqn.invars)
            known = [var for var in read if var not in unknown]
            sums = [var for var in known if _all_reduces(here[var], resharder)]
            if len(known) == len(read) and (not sums or _is_sum(eqn, sums, here, readers)):
                yield eqn
                continue
            waiting.append(eqn)
            unknown.update(eqn.outvars)
            parts.update(dict.fromkeys(sums))
        _reduce([here[var] for var in parts], resharder)
        eqns = waiting


def _all_reduces(versions: ValueVersions, resharder: Resharder) -> bool:
    """Whether devices have parts of a sum of one dim at most, which is all-reduced to be read."""
    if len(versions.shape) > 1 or versions.deferred is not None:
        return False
    if not all(value.sharding.partial for value in versions.values):
        return False
    steps = resharder.context.steps(versions.value, resharder.context.reduced(versions))
    return [step.kind for step in steps] == ["all-reduce"]


def _is_sum(
    eqn: Any, sums: Sequence[Any], here: Mapping[Any, ValueVersions], readers: Mapping[Any, int]
) -> bool:
    """Whether the result of an equation of sums is one, too: each device computes its part."""
    if len(eqn.outvars) != 1:
        return False
    size = eqn.outvars[0].aval.size
    if any(readers[var] > 1 or var.aval.size < size for var in sums):
        return False
    places = [place for place, atom in enumerate(eqn.invars) if any(atom is var for var in sums)]
    axes = {here[var].value.sharding.partial for var in sums}
    return len(axes) == 1 and adds_up(eqn, places)


def _reduce(sums: Sequence[ValueVersions], resharder: Resharder) -> None:
    """All-reduce partial sums, those over the same axes and of one dtype in one buffer."""
    buffers: dict[Any, list[ValueVersions]] = {}
    context = resharder.context
    steps = {}
    for versions in sums:
        (steps[versions],) = context.steps(versions.value, context.reduced(versions))
        buffers.setdefault((steps[versions].axes, versions.dtype), []).append(versions)
    for (axes, dtype), some in buffers.items():
        names, groups = resharder.axes.group(axes)

        def add_up(*parts: Array, names: Any = names, groups: Any = groups) -> list[Array]:
            # Of several arrays JAX would make as many collectives.
            buffer = jnp.concatenate([part.reshape(-1) for part in parts])
            total = lax.psum(buffer, names, axis_index_groups=groups)
            ends = np.cumsum([part.size for part in parts])
            cut = jnp.split(total, ends[:-1])
            return [each.reshape(part.shape) for each, part in zip(cut, parts, strict=True)]

        specs = [
            context.spec(versions.shape, dtype, goal, is_param=versions.is_param)
            for versions, goal in zip(some, map(context.reduced, some), strict=True)
        ]
        resharder.record_together([steps[versions] for versions in some])
        totals = resharder.run(add_up, [versions.value.array for versions in some], specs)
        for versions, total in zip(some, totals, strict=True):
            versions.values.append(total)


def counted(eqns: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return equations in which whether any number is true, or all, is a sum of ones.

    A sum of devices' sums, of floats: it has no largest number after which it would start at zero.
    Of each equation comes the one it replaces, or it itself.
    """
    return [(new, eqn) for eqn in eqns for new in _counted(eqn)]


def _counted(eqn: Any) -> list[Any]:
    name = eqn.primitive.name
    if name not in ("reduce_and", "reduce_or") or eqn.invars[0].aval.dtype != jnp.bool_:
        return [eqn]

    def number(array: Array) -> Array:
        ones = (array if name == "reduce_or" else ~array).astype(jnp.float32)
        total = lax.reduce(ones, np.float32(0), lax.add, eqn.params["axes"])
        return total > 0 if name == "reduce_or" else total == 0

    (array,), (result,) = eqn.invars, eqn.outvars
    body = jax.make_jaxpr(number)(array.aval).jaxpr
    names = {body.invars[0]: array, body.outvars[0]: result}
    return [
        part.replace(
            invars=[v if isinstance(v, Literal) else names.get(v, v) for v in part.invars],
            outvars=[names.get(var, var) for var in part.outvars],
            source_info=eqn.source_info,
        )
        for part in body.eqns
    ]
