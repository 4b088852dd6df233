"""What is computed of parameters and grows is computed of whole parameters.

ZeRO 3 leaves what is computed of parameters alone split as they are, and gathers it where it meets
the batch. That is the parameter's size for a cast, but not for what grows: decays that are repeated
along a sequence, their powers in `lax.associative_scan`, a kernel of exponentials.

    mesh data=4, zero=3; decays a (64,) are split; x (8, 1024, 64) is a device's rows

    equation                              on shards                  of whole parameters
    r = broadcast a (1024, 64)            split                      a gathered, 64 numbers
    s = r[::2] * r[1::2] (512, 64)        split                      on each device
    y = s * x[:, ::2]                     s gathered, 32768          nothing is sent

So is a long filter that a small network computes, as Hyena's. Results are as large where parameters
are not split. What is only repeated is gathered in a bucket (`gathers.py`).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from plurax.jaxpr.compat import ELEMENTWISE
from plurax.jaxpr.interpret import variables
from plurax.partition.gathers import OF_THEIR_OWN, needs_gather
from plurax.partition.resharder import Resharder
from plurax.partition.values import ShardedValue, ValueVersions, split_by_zero
from plurax.sharding.spec import REPLICAS

_MOVED = frozenset(["broadcast_in_dim", "reshape", "squeeze", "transpose"])
_COMPUTED = ELEMENTWISE | _MOVED | {"concatenate", "pad", "rev", "slice"}
_COMPUTED |= {"cumlogsumexp", "cumprod", "cumsum", "dot_general", "fft"}
"""Operations of which each device computes all, instead of gathering the result."""


class Grown:
    """The equations that are computed of whole parameters.

    **Arguments:** `resharder`; `eqns`, in order; `known`, the variables that have values before
    them.
    """

    def __init__(
        self, resharder: Resharder, eqns: Sequence[Any], known: Mapping[Any, ValueVersions]
    ) -> None:
        self._resharder = resharder
        of_rows = resharder.context.of_rows
        batch = {var for var, one in known.items() if one.deferred is None and of_rows(one.value)}
        batch |= {var for var, one in known.items() if one.data_varying}
        split = {var for var, one in known.items() if needs_gather(resharder, one)}
        self._eqns = _grown(eqns, split, batch) if split else frozenset[int]()
        # By the id of what is split: that, which keeps its id, and what is gathered.
        self._whole: dict[int, tuple[Any, ShardedValue]] = {}

    def inputs(self, eqn: Any, inputs: list[ValueVersions]) -> list[ValueVersions]:
        """Return the inputs of an equation, gathered if its result grows."""
        return list(map(self._of, inputs)) if id(eqn) in self._eqns else inputs

    def _of(self, versions: ValueVersions) -> ValueVersions:
        deferred = versions.deferred
        if deferred is not None:
            if not (deferred.repeats and deferred.is_param and deferred.free is not None):
                return versions
            sources = (self._of(deferred.sources[0]),)
            free = deferred.free.without(REPLICAS)
            return ValueVersions(dataclasses.replace(deferred, sources=sources, free=free))
        if not all(map(split_by_zero, versions.values)):
            return versions
        value = versions.value
        if id(value.array) not in self._whole:
            whole = self._resharder.move(value, value.sharding.without(REPLICAS))
            self._whole[id(value.array)] = value.array, whole
        return ValueVersions(self._whole[id(value.array)][1])


def _grown(eqns: Sequence[Any], split: Set[Any], batch: Set[Any]) -> frozenset[int]:
    """Return the equations, by `id`, whose results have more bytes than the split parameters of
    which they are computed, and meet the batch, or are read by such an equation."""
    batch = {*batch}
    origins: dict[Any, frozenset[Any]] = {var: frozenset([var]) for var in split}
    grown, repeated, met = dict[Any, Any](), set[Any](), set[Any]()
    for eqn in eqns:
        read = variables(eqn.invars)
        if not batch.isdisjoint(read):
            batch.update(eqn.outvars)
            if eqn.primitive.name not in OF_THEIR_OWN:  # a loop reads a layer of a stack at a time
                met.update(read)
            continue
        of = frozenset[Any]().union(*(origins.get(var, frozenset()) for var in read))
        origins.update(dict.fromkeys(eqn.outvars, of))
        if not of or eqn.primitive.name not in _COMPUTED:
            continue
        (var,) = eqn.outvars
        if _bytes(var) > sum(map(_bytes, of)):
            grown[var] = eqn
            if eqn.primitive.name in _MOVED and all(v in repeated or v not in grown for v in read):
                repeated.add(var)
    ids = set[int]()
    for var, eqn in reversed(grown.items()):
        if var in met and var not in repeated:
            ids.add(id(eqn))
            met.update(variables(eqn.invars))
    return frozenset(ids)


def _bytes(var: Any) -> int:
    return math.prod(var.aval.shape) * int(var.aval.dtype.itemsize)
