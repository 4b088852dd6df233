"""A function of tensors that live on different devices of a pipeline: the optimizer's update.

The function is traced for whole tensors, and its equations are dealt out. What depends on the
tensors of one device is computed there, and what depends on those of several, or of none, on all.
There the tensors themselves do not go: only numbers do, the terms of a global norm say, in one
reduction for all that are needed at a time.

A branch (`lax.cond`) on the tensors of several devices, such as an optimizer that leaves a step
out, becomes a selection between the results of its cases, each computed where it lives.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jaxtyping import Array

from plurax import errors
from plurax.jaxpr.primitives import constant, open_jaxpr
from plurax.partition.operators.common import bind
from plurax.partition.partitioner import Partitioner
from plurax.partition.values import ShardedValue, ValueVersions
from plurax.pipeline.cut import inlined
from plurax.sharding.spec import TensorSharding

NUMBERS = 1
"""The most elements of what goes from one device to all."""


@dataclasses.dataclass(frozen=True)
class StageTensor:
    """A tensor that lives on one device of the pipeline.

    **Fields:** `device`; `like`, the whole tensor as a `jax.ShapeDtypeStruct`; `read()`, its
    `ShardedValue` there.
    """

    device: int
    like: jax.ShapeDtypeStruct
    read: Callable[[], ShardedValue]


class StageUpdate:
    """A traced function whose equations are dealt out to the devices of a pipeline.

    **Arguments:** `fun(*leaves) -> leaves`; `inputs`, a `ShardedValue` or a `StageTensor` for
    each; `homes`, the device on which each result is wanted, None for all; `divider` over all axes;
    `stage`, one over those of a stage alone; `devices`.

    Raises `PlanError` where tensors of several devices meet.
    """

    def __init__(
        self,
        fun: Callable[..., Sequence[Any]],
        inputs: Sequence[ShardedValue | StageTensor],
        homes: Sequence[int | None],
        divider: Partitioner,
        stage: Partitioner,
        devices: int,
    ) -> None:
        self.divider, self.stage, self.devices = divider, stage, devices
        self._inputs, self._homes = inputs, homes
        closed, _ = divider.traced(lambda *leaves: list(fun(*leaves)), *map(_like, inputs))
        body, consts = open_jaxpr(closed)
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.invars]
        flat, _ = divider.traced(lambda *args: inlined(body, consts, args, every=True), *avals)
        self._jaxpr, self._consts = open_jaxpr(flat)
        while several := self._branches_of_several():
            selecting = functools.partial(_selecting, self._jaxpr, self._consts, several)
            flat, _ = divider.traced(selecting, *avals)
            self._jaxpr, self._consts = open_jaxpr(flat)
        self._label()

    def _branches_of_several(self) -> set[int]:
        """The places of branches on tensors of several devices."""
        homes: dict[Any, frozenset[int]] = {}
        for var, given in zip(self._jaxpr.invars, self._inputs, strict=True):
            if isinstance(given, StageTensor):
                homes[var] = frozenset([given.device])
        several = set()
        for place, eqn in enumerate(self._jaxpr.eqns):
            read = [a for a in eqn.invars if not isinstance(a, Literal) and a.aval.size > NUMBERS]
            at = frozenset[int]().union(*(homes.get(atom, ()) for atom in read))
            homes.update(dict.fromkeys(eqn.outvars, at))
            if eqn.primitive.name == "cond" and len(at) > 1:
                several.add(place)
        return several

    def _label(self) -> None:
        """Where each variable is computed, in which round, and which go to all devices."""
        home: dict[Any, int] = {}
        rounds: dict[Any, int] = {}
        for var, given in zip(self._jaxpr.invars, self._inputs, strict=True):
            if isinstance(given, StageTensor):
                home[var] = given.device
        self._crossing: dict[Any, int] = {}

        def crosses(atom: Any, eqn: Any) -> None:
            if atom.aval.size > NUMBERS:
                raise errors.optimizer_needs_stages(eqn.primitive.name if eqn else "the result")
            self._crossing[atom] = rounds.get(atom, 0)

        for eqn in self._jaxpr.eqns:
            read = [a for a in eqn.invars if not isinstance(a, Literal)]
            places = {home[a] for a in read if a in home}
            at = max((rounds.get(a, 0) for a in read), default=0)
            small = all(a.aval.size <= NUMBERS for a in read if a in home)
            mixed = any(a not in home for a in read)
            # Numbers of one device that meet what is on all are told to all.
            if len(places) > 1 or (places and small and mixed):
                for atom in read:
                    if atom in home:
                        crosses(atom, eqn)
                        at = max(at, rounds.get(atom, 0) + 1)
                places = set()
            for var in eqn.outvars:
                rounds[var] = at
                if places:
                    (home[var],) = places
        for atom, wanted in zip(self._jaxpr.outvars, self._homes, strict=True):
            if not isinstance(atom, Literal) and atom in home and home[atom] != wanted:
                crosses(atom, None)
        self._home, self._rounds = home, rounds
        self._readers = {
            atom: eqn.primitive.name
            for eqn in self._jaxpr.eqns
            if eqn.outvars[0] in home
            for atom in eqn.invars
            if not isinstance(atom, Literal) and atom not in home
        }

    def __call__(
        self,
        goals: Sequence[TensorSharding],
        written: Callable[[int, list[Array]], Any] | None,
    ) -> tuple[list[ShardedValue | None], Any]:
        """The results as their `goals`; those of one device as what `written(device, arrays)` makes
        of them there, None standing for each in the list."""
        known = dict(
            zip(self._jaxpr.constvars, map(self.divider.constant, self._consts), strict=True)
        )
        for var, given in zip(self._jaxpr.invars, self._inputs, strict=True):
            if isinstance(given, ShardedValue):
                known[var] = ValueVersions(given)
        self._settle(known, [var for var in self._jaxpr.invars if var in known])
        last = max([*self._rounds.values(), *(n + 1 for n in self._crossing.values())], default=0)
        for number in range(last + 1):
            eqns = [
                eqn
                for eqn in self._jaxpr.eqns
                if self._rounds[eqn.outvars[0]] == number and eqn.outvars[0] not in self._home
            ]
            results = [var for eqn in eqns for var in eqn.outvars if not _dropped(var)]
            cells = self.divider.evaluate_part(eqns, known, results)
            known.update(zip(results, cells, strict=True))
            self._settle(known, results)
            crossing = [var for var, at in self._crossing.items() if at == number]
            if crossing:
                known.update(zip(crossing, self._told(crossing, known), strict=True))
        return self._results(known, goals, written)

    def _settle(self, known: dict[Any, ValueVersions], results: list[Any]) -> None:
        """What single devices will read made whole now, while all take part in it."""
        for var in results:
            reader = self._readers.get(var)
            if reader is None or known[var].deferred:
                continue
            if var.aval.size <= NUMBERS:
                whole = TensorSharding.whole(len(var.aval.shape))
                known[var] = ValueVersions(self.divider.reshard(known[var], whole))
            elif "pipeline" in (used := known[var].value.sharding).axes or used.partial:
                raise errors.optimizer_needs_stages(reader)

    def _told(self, crossing: list[Any], known: dict[Any, ValueVersions]) -> list[ValueVersions]:
        """Numbers of one device each, told to all."""

        def branch(device: int) -> list[Array]:
            own = [var for var in crossing if self._home[var] == device]
            cells = iter(self._there(device, known, own))
            return [
                self.stage.reshard(next(cells), TensorSharding.whole(len(var.aval.shape))).array
                if self._home[var] == device
                else jnp.zeros(var.aval.shape, var.aval.dtype)
                for var in crossing
            ]

        numbers = broadcast_from_stage(self._on_each(branch))
        for array in numbers:
            self.divider.record_all_reduce(["pipeline"], array)
        return [
            ValueVersions(ShardedValue(a, a.shape, TensorSharding.whole(a.ndim))) for a in numbers
        ]

    def _results(
        self,
        known: dict[Any, ValueVersions],
        goals: Sequence[TensorSharding],
        written: Callable[[int, list[Array]], Any] | None,
    ) -> tuple[list[ShardedValue | None], Any]:
        atoms = self._jaxpr.outvars

        def branch(device: int) -> Any:
            assert written is not None
            own = [place for place, home in enumerate(self._homes) if home == device]
            cells = self._there(device, known, [atoms[place] for place in own])
            values = self.stage.finish(cells, [goals[place] for place in own])
            return written(device, [value.array for value in values])

        homed = None if written is None else self._on_each(branch)
        shared = [place for place, home in enumerate(self._homes) if home is None]
        cells = [
            self.divider.constant(atom.val) if isinstance(atom, Literal) else known[atom]
            for atom in (atoms[place] for place in shared)
        ]
        values = self.divider.finish(cells, [goals[place] for place in shared])
        found = dict(zip(shared, values, strict=True))
        return [found.get(place) for place in range(len(atoms))], homed

    def _there(
        self, device: int, known: dict[Any, ValueVersions], results: Sequence[Any]
    ) -> list[ValueVersions]:
        """Results computed on one device, from what is known on all and what lives there."""
        here = {var: cell.fresh() for var, cell in known.items()}
        for var, given in zip(self._jaxpr.invars, self._inputs, strict=True):
            if isinstance(given, StageTensor) and given.device == device:
                here[var] = ValueVersions(given.read())
        eqns = [eqn for eqn in self._jaxpr.eqns if self._home.get(eqn.outvars[0]) == device]
        return self.stage.evaluate_part(eqns, here, results)

    def _on_each(self, branch: Callable[[int], Any]) -> Any:
        """Each device does its own."""
        at = lax.axis_index("pipeline")
        return lax.switch(at, [lambda d=d: branch(d) for d in range(self.devices)])


def _selecting(jaxpr: Any, consts: Sequence[Any], several: set[int], *args: Any) -> list[Any]:
    """A traced function in which the branches at some places are selections."""
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return constant(atom) if isinstance(atom, Literal) else known[atom]

    for place, eqn in enumerate(jaxpr.eqns):
        inputs = [read(atom) for atom in eqn.invars]
        if place in several:
            which, *operands = inputs
            bodies = map(open_jaxpr, eqn.params["branches"])
            cases = [inlined(*body, operands, every=True) for body in bodies]
            outputs = [lax.select_n(which, *values) for values in zip(*cases, strict=True)]
        else:
            outputs = bind(eqn, inputs)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def broadcast_from_stage(arrays: Any) -> Any:
    """A tree of arrays of which one stage has each, and the others zeros; in their dtypes."""
    sums = lax.psum(arrays, "pipeline")
    # A sum of truths is a whole number.
    return jax.tree.map(lambda array, like: array.astype(like.dtype), sums, arrays)


def _like(given: ShardedValue | StageTensor) -> jax.ShapeDtypeStruct:
    if isinstance(given, StageTensor):
        return given.like
    return jax.ShapeDtypeStruct(given.shape, given.array.dtype)


def _dropped(var: Any) -> bool:
    return type(var).__name__ == "DropVar"
