"""Gradients of what is computed of parameters are added up over devices before they meet these.

A weight may be a function of parameters: of a direction and a length (weight normalization), of a
matrix and a gate. Its gradient is a sum over the rows of all devices, and what follows is linear in
it, up to the gradients of the parameters. Under ZeRO 3 devices have shards of what it meets. Where
the sum is reduced to shards first, nothing of these is gathered. Nor are the weights of a network
that computes others, whose products meet the sum.

    mesh data=4, zero=3; w = g * v; v (8, 64) and g (64,) are split by columns; x and dy are a
    device's rows

    equation             added up at the end              added up first
    dw = x.T @ dy        of a device's rows               of a device's rows, reduce-scattered
    dv = dw * g          g gathered; reduce-scattered     on shards
    dg = sum(dw * v)     v gathered; reduce-scattered     on shards
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
from jax.extend.core import Literal

from plurax.jaxpr.compat import ELEMENTWISE
from plurax.jaxpr.interpret import variables
from plurax.partition.gathers import needs_gather
from plurax.partition.operators.shifts import pads_with_zeros
from plurax.partition.partial_sums import adds_up
from plurax.partition.resharder import Resharder
from plurax.partition.values import ValueVersions
from plurax.sharding.spec import TensorSharding

_MOVES = frozenset(["broadcast_in_dim", "rev", "slice"])
"""Operations that move or repeat the entries of their one operand."""


class SumsFirst:
    """The equations before which a gradient is added up over devices.

    **Arguments:** `resharder`; `eqns`, in order, and their `results`, of which `sums` are sums over
    the rows of all devices, and their shardings; `known`, the variables that have values before
    them.

    **Attributes:** `eqns`, these equations, by `id`.
    """

    def __init__(
        self,
        resharder: Resharder,
        eqns: Sequence[Any],
        results: Sequence[Any],
        sums: Mapping[Any, TensorSharding],
        known: Mapping[Any, ValueVersions],
    ) -> None:
        self._resharder = resharder
        self._goals: Mapping[Any, TensorSharding] = {}
        self._totals: dict[ValueVersions, ValueVersions] = {}
        self.eqns: Set[int] = frozenset()
        if sums and not resharder.joint:
            batch = {var for var, versions in known.items() if versions.data_varying}
            split = {var for var, versions in known.items() if needs_gather(resharder, versions)}
            self.eqns = _of_sums(eqns, results, {*sums}, batch, split)
            self._goals = _goals([eqn for eqn in eqns if id(eqn) in self.eqns], sums)

    def added_up(self, eqn: Any, inputs: list[ValueVersions]) -> list[ValueVersions]:
        """Return the inputs of an equation: what a device has of its rows as a part of the sum."""
        if id(eqn) not in self.eqns:
            return inputs
        return [self._total(*pair) for pair in zip(eqn.invars, inputs, strict=True)]

    def _total(self, atom: Any, versions: ValueVersions) -> ValueVersions:
        if not versions.data_varying:
            return versions
        if versions not in self._totals:
            value = self._resharder.value(versions)
            sharding = TensorSharding(value.sharding.dims, value.sharding.partial | {"data"})
            total = dataclasses.replace(value, sharding=sharding, data_varying=False)
            self._totals[versions] = ValueVersions(total)
            if atom in self._goals:  # where what it meets does not say how it is split
                self._resharder.reshard(self._totals[versions], self._goals[atom])
        return self._totals[versions]


def _of_sums(
    eqns: Sequence[Any], results: Sequence[Any], sums: Set[Any], batch: Set[Any], split: Set[Any]
) -> set[int]:
    """Return the equations, by `id`, whose operands of the batch are added up over devices first.

    `batch` and `split`: inputs that depend on a device's rows, and parameters of which devices have
    shards.
    """
    batch, split = {*batch}, {*split}
    for eqn in eqns:
        read = variables(eqn.invars)
        if not batch.isdisjoint(read):
            batch.update(eqn.outvars)
        elif not split.isdisjoint(read):
            split.update(eqn.outvars)
    behind = _linear(eqns, results, sums, batch)
    summed, ids = set[Any](), set[int]()
    for eqn in eqns:
        if len(eqn.outvars) != 1 or eqn.outvars[0] not in behind:
            continue
        terms = [atom for atom in variables(eqn.invars) if atom in behind]
        # No more is sent than of the gradients that follow; products may need shards by both dims.
        times = 2 if eqn.primitive.name == "dot_general" else eqn.primitive.name in ELEMENTWISE
        meets = times > 0 and not split.isdisjoint(variables(eqn.invars))
        less = all(times * _size([var]) <= _size(behind[var]) for var in terms)
        if terms and (not summed.isdisjoint(terms) or (meets and less)):
            summed.update(eqn.outvars)
            ids.add(id(eqn))
    return ids


def _goals(eqns: Sequence[Any], sums: Mapping[Any, TensorSharding]) -> dict[Any, TensorSharding]:
    """Return the shardings of sums, and of what they are computed of entry by entry."""
    goals = {**sums}
    for eqn in reversed(eqns):
        (var,) = eqn.outvars
        if var in goals and eqn.primitive.name in ELEMENTWISE:
            same = [atom for atom in variables(eqn.invars) if atom.aval.shape == var.aval.shape]
            goals.update((atom, goals[var]) for atom in same)
        elif var in goals and eqn.primitive.name == "dot_general":
            goals.update(_of_operands(eqn, goals[var]))
        elif var in goals and eqn.primitive.name == "transpose":
            entries = zip(eqn.params["permutation"], goals[var].dims, strict=True)
            goals[eqn.invars[0]] = TensorSharding(tuple(entry for _, entry in sorted(entries)))
    return goals


def _of_operands(eqn: Any, goal: TensorSharding) -> Iterator[tuple[Any, TensorSharding]]:
    """Return for the operands of a product the shardings of the dims that its result has."""
    contracted, batch = eqn.params["dimension_numbers"]
    place = len(batch[0])
    for atom, summed, shared in zip(eqn.invars, contracted, batch, strict=True):
        entries = {dim: goal.dims[index] for index, dim in enumerate(shared)}
        free = [dim for dim in range(len(atom.aval.shape)) if dim not in (*summed, *shared)]
        entries |= {dim: goal.dims[place + index] for index, dim in enumerate(free)}
        place += len(free)
        yield atom, TensorSharding(tuple(entries.get(d, ()) for d in range(len(atom.aval.shape))))


def _linear(
    eqns: Sequence[Any], results: Sequence[Any], sums: Set[Any], batch: Set[Any]
) -> Mapping[Any, frozenset[Any]]:
    """Return the variables of the batch in which `sums` are linear, and nothing else reads; of each
    the sums that depend on it."""
    others, zeros = {*variables(results)} - sums, _zeros(eqns)
    behind: dict[Any, frozenset[Any]] = {}
    read: dict[Any, frozenset[Any]] = {var: frozenset([var]) for var in sums}
    for eqn in reversed(eqns):
        for var in eqn.outvars:
            if var in batch and var in read and var not in others:
                behind[var] = read[var]
        terms = [place for place, v in enumerate(eqn.invars) if _of(v, batch)]
        known = [behind[var] for var in eqn.outvars if var in behind]
        if len(eqn.outvars) == len(known) == 1 and _adds_up(eqn, terms, zeros):
            for var in variables(eqn.invars):
                read[var] = read.get(var, frozenset()) | known[0]
        else:
            others.update(variables(eqn.invars))
    return behind


def _zeros(eqns: Sequence[Any]) -> set[Any]:
    """Return the variables that are zeros, as those of a derivative where it is none."""
    filled = [eqn for eqn in eqns if eqn.primitive.name == "broadcast_in_dim"]
    return {eqn.outvars[0] for eqn in filled if _is_zero(eqn.invars[0])}


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, Literal) and not np.any(atom.val)


def _adds_up(eqn: Any, terms: Sequence[int], zeros: Set[Any]) -> bool:
    """Whether an equation is linear in its operands of the batch, at the places `terms`."""
    if eqn.primitive.name == "select_n":  # of any other constant each device would add its own
        rest = [atom for place, atom in enumerate(eqn.invars) if place and place not in terms]
        return 0 not in terms and all(_is_zero(atom) or _of(atom, zeros) for atom in rest)
    moves = (eqn.primitive.name in _MOVES or pads_with_zeros(eqn)) and terms == [0]
    return moves or adds_up(eqn, terms)


def _of(atom: Any, variables: Set[Any]) -> bool:
    return not isinstance(atom, Literal) and atom in variables


def _size(variables: Any) -> int:
    return sum(math.prod(var.aval.shape) for var in variables)
