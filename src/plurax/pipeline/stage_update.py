"""Evaluate an optimizer's update where each stage's tensors are on another device of a pipeline.

The update is one function of all parameters, gradients and optimizer state. `StageUpdate` traces it
for whole tensors and assigns each equation to a device. An equation that reads tensors of one stage
is computed on that stage's device; the others are computed on all devices. Only scalars cross
stages, such as partial squared norms. So an optimizer with a norm over all stages needs no code of
its own; one that needs a tensor of another stage raises `PlanError` (see `MAX_CROSSING`).

Example: `optax.clip_by_global_norm(1.0)` with `w0: f32[8, 4]` on device 0 and `w1: f32[4, 2]` on
device 1:

    round 0   device 0        a = sum(g0 ** 2)                    f32[]
              device 1        b = sum(g1 ** 2)                    f32[]
              all devices     a, b = psum((a, b), "pipeline")     8 bytes; a device that does not
                                                                  have a scalar adds a zero
    round 1   all devices     scale = 1 / max(sqrt(a + b), 1)     f32[]
              device 0        w0 - rate * scale * g0              f32[8, 4]
              device 1        w1 - rate * scale * g1              f32[4, 2]

A variable's *round* is the number of such reductions that precede it. All scalars that cross in
one round cross in one reduction, so the number of reductions is the depth of the dependency chain,
not the number of scalars.

A `lax.cond` whose cases read tensors of several devices (an optimizer that skips a step, say)
would be one equation on several devices. It becomes all its cases in sequence and one `select_n`
per result, so that each equation of the cases gets a device by itself.
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
from plurax.jaxpr.compat import open_jaxpr
from plurax.jaxpr.interpret import bind, interpret, needed, variables
from plurax.partition.partitioner import Partitioner
from plurax.partition.values import ShardedValue, ValueVersions
from plurax.pipeline.cut import inlined
from plurax.sharding.spec import TensorSharding

MAX_CROSSING = 1
"""Maximal number of elements of a tensor that crosses from one device to all."""


@dataclasses.dataclass(frozen=True)
class StageTensor:
    """A tensor that is on one device of the pipeline only.

    **Fields:** `device`, its index on the axis `pipeline`; `like`, the whole tensor as a
    `jax.ShapeDtypeStruct`; `read()`, which returns its `ShardedValue` and is called in that
    device's branch only.
    """

    device: int
    like: jax.ShapeDtypeStruct
    read: Callable[[], ShardedValue]


class StageUpdate:
    """A traced function whose equations are assigned to the devices of a pipeline.

    **Arguments:**

    - `fun`: `fun(*leaves) -> leaves`, of whole tensors.
    - `inputs`: for each leaf a `ShardedValue` (on all devices) or a `StageTensor` (on one).
    - `homes`: for each result the device that needs it, None for all devices.
    - `partitioner`: a `Partitioner` over all mesh axes, for equations that all devices compute.
    - `stage_partitioner`: a `Partitioner` without the axis `pipeline`, for equations that one
      device computes.
    - `devices`: the size of the axis `pipeline`.

    Raises `PlanError` where an equation reads tensors (of more than one element) of several
    devices, or where another device than the tensor's needs a result.
    """

    def __init__(
        self,
        fun: Callable[..., Sequence[Any]],
        inputs: Sequence[ShardedValue | StageTensor],
        homes: Sequence[int | None],
        partitioner: Partitioner,
        stage_partitioner: Partitioner,
        devices: int,
    ) -> None:
        self.partitioner, self.stage_partitioner = partitioner, stage_partitioner
        self.devices = devices
        self._inputs, self._homes = inputs, homes
        closed, _ = partitioner.traced(lambda *leaves: list(fun(*leaves)), *map(_like, inputs))
        body, consts = open_jaxpr(closed)
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.invars]
        # A call (`jit`) around the update of all parameters would be one equation on all devices.
        flat, _ = partitioner.traced(lambda *args: inlined(body, consts, args, every=True), *avals)
        self._jaxpr, self._consts = open_jaxpr(flat)
        # A case may contain another `cond`, which appears once the outer one is replaced.
        while several := self._branches_of_several():
            selecting = functools.partial(_selecting, self._jaxpr, self._consts, several)
            flat, _ = partitioner.traced(selecting, *avals)
            self._jaxpr, self._consts = open_jaxpr(flat)
        self._label()

    def _branches_of_several(self) -> set[int]:
        """Return the `id`s of the `cond` equations that read tensors of several devices."""
        homes: dict[Any, frozenset[int]] = {}
        for var, given in zip(self._jaxpr.invars, self._inputs, strict=True):
            if isinstance(given, StageTensor):
                homes[var] = frozenset([given.device])
        several = set()
        for eqn in self._jaxpr.eqns:
            read = [a for a in variables(eqn.invars) if a.aval.size > MAX_CROSSING]
            at = frozenset[int]().union(*(homes.get(atom, ()) for atom in read))
            homes.update(dict.fromkeys(eqn.outvars, at))
            if eqn.primitive.name == "cond" and len(at) > 1:
                several.add(id(eqn))
        return several

    def _label(self) -> None:
        """Assign each variable a device (or all) and a round, and find the scalars that cross.

        `_home` has the device of each variable that one device computes, `_at` by `id` the device
        (or None) and the round of each equation; `_crossing` maps each scalar that crosses to the
        round in which it is computed; `_readers` maps each variable that is on all devices and that
        a single device reads to the reading operation's name.
        """
        home: dict[Any, int] = {}
        rounds: dict[Any, int] = {}
        for var, given in zip(self._jaxpr.invars, self._inputs, strict=True):
            if isinstance(given, StageTensor):
                home[var] = given.device
        self._crossing: dict[Any, int] = {}
        self._at: dict[int, tuple[int | None, int]] = {}

        def crosses(atom: Any, eqn: Any) -> None:
            if atom.aval.size > MAX_CROSSING:
                raise errors.optimizer_needs_stages(eqn.primitive.name if eqn else "the result")
            self._crossing[atom] = rounds.get(atom, 0)

        for eqn in self._jaxpr.eqns:
            read = variables(eqn.invars)
            devices = {home[a] for a in read if a in home}
            at = max((rounds.get(a, 0) for a in read), default=0)
            small = all(a.aval.size <= MAX_CROSSING for a in read if a in home)
            mixed = any(a not in home for a in read)
            # An equation on scalars of one device and on a value of all devices (`norm + eps`)
            # is computed on all devices: its result is then at hand for every later reader, and
            # the scalars cross now or never. A tensor of one device keeps the equation there.
            if len(devices) > 1 or (devices and small and mixed):
                for atom in read:
                    if atom in home:
                        crosses(atom, eqn)
                        at = max(at, rounds.get(atom, 0) + 1)
                devices = set()
            device = next(iter(devices), None)
            self._at[id(eqn)] = device, at
            rounds.update(dict.fromkeys(eqn.outvars, at))
            if device is not None:
                home.update(dict.fromkeys(eqn.outvars, device))
        for atom, wanted in zip(self._jaxpr.outvars, self._homes, strict=True):
            if not isinstance(atom, Literal) and atom in home and home[atom] != wanted:
                crosses(atom, None)
        self._home = home
        self._readers = {
            atom: eqn.primitive.name
            for eqn in self._jaxpr.eqns
            if self._at[id(eqn)][0] is not None
            for atom in variables(eqn.invars)
            if atom not in home
        }

    def __call__(
        self,
        goals: Sequence[TensorSharding],
        pack: Callable[[int, list[Array]], Any] | None,
    ) -> tuple[list[ShardedValue | None], Any]:
        """Evaluate the function on this device's shards.

        **Arguments:** `goals`, a sharding for each result; `pack(device, arrays)`, which packs
        the results of a device in that device's branch (buffers of one shape on all devices), or
        None where all results are on all devices.

        **Returns:** a list with the `ShardedValue` of each result that is on all devices and None
        for each other; and what `pack` returned for this device, or None.

        Raises `PlanError` where one device needs a tensor that is sharded over `pipeline` or still
        a partial sum.
        """
        known = dict(
            zip(self._jaxpr.constvars, map(self.partitioner.constant, self._consts), strict=True)
        )
        for var, given in zip(self._jaxpr.invars, self._inputs, strict=True):
            if isinstance(given, ShardedValue):
                known[var] = ValueVersions(given)
        self._replicate_for_readers(known, [var for var in self._jaxpr.invars if var in known])
        # All devices run the rounds together. Equations of single devices are evaluated where they
        # are needed: for the scalars that cross after a round, and for the results at the end.
        rounds = [*(at for _, at in self._at.values()), *(n + 1 for n in self._crossing.values())]
        for round_ in range(max(rounds, default=0) + 1):
            eqns = [eqn for eqn in self._jaxpr.eqns if self._at[id(eqn)] == (None, round_)]
            results = [var for eqn in eqns for var in eqn.outvars if not _dropped(var)]
            cells = self.partitioner.evaluate_part(eqns, known, results)
            known.update(zip(results, cells, strict=True))
            self._replicate_for_readers(known, results)
            crossing = [var for var, at in self._crossing.items() if at == round_]
            if crossing:
                known.update(zip(crossing, self._broadcast(crossing, known), strict=True))
        return self._results(known, goals, pack)

    def _replicate_for_readers(self, known: dict[Any, ValueVersions], results: list[Any]) -> None:
        """Replicate what a single device reads later, while all devices take part.

        Equations of a single device run inside a branch of `lax.switch`, where a collective over
        `pipeline` would deadlock, so such a value must be complete before.
        """
        for var in results:
            reader = self._readers.get(var)
            if reader is None or known[var].deferred:
                continue
            if var.aval.size <= MAX_CROSSING:
                whole = TensorSharding.replicated(len(var.aval.shape))
                known[var] = ValueVersions(self.partitioner.reshard(known[var], whole))
            elif "pipeline" in (used := known[var].value.sharding).axes or used.partial:
                raise errors.optimizer_needs_stages(reader)

    def _broadcast(
        self, crossing: list[Any], known: dict[Any, ValueVersions]
    ) -> list[ValueVersions]:
        """Broadcast scalars, each computed on one device, to all devices in one reduction."""

        def branch(device: int) -> list[Array]:
            own = [var for var in crossing if self._home[var] == device]
            cells = iter(self._on_one(device, known, own, effects=False))
            return [
                self.stage_partitioner.reshard(
                    next(cells), TensorSharding.replicated(len(var.aval.shape))
                ).array
                if self._home[var] == device
                else jnp.zeros(var.aval.shape, var.aval.dtype)
                for var in crossing
            ]

        scalars = broadcast_from_stage(self._on_each(branch))
        for array in scalars:
            self.partitioner.record_all_reduce(["pipeline"], array)
        return [
            ValueVersions(ShardedValue(a, a.shape, TensorSharding.replicated(a.ndim)))
            for a in scalars
        ]

    def _results(
        self,
        known: dict[Any, ValueVersions],
        goals: Sequence[TensorSharding],
        pack: Callable[[int, list[Array]], Any] | None,
    ) -> tuple[list[ShardedValue | None], Any]:
        """Evaluate the results of each device in its branch, and reshard those of all devices."""
        atoms = self._jaxpr.outvars

        def branch(device: int) -> Any:
            assert pack is not None
            own = [index for index, home in enumerate(self._homes) if home == device]
            cells = self._on_one(device, known, [atoms[index] for index in own])
            values = self.stage_partitioner.finish(cells, [goals[index] for index in own])
            return pack(device, [value.array for value in values])

        packed = None if pack is None else self._on_each(branch)
        shared = [index for index, home in enumerate(self._homes) if home is None]
        cells = [
            self.partitioner.constant(atom.val) if isinstance(atom, Literal) else known[atom]
            for atom in (atoms[index] for index in shared)
        ]
        values = self.partitioner.finish(cells, [goals[index] for index in shared])
        found = dict(zip(shared, values, strict=True))
        return [found.get(index) for index in range(len(atoms))], packed

    def _on_one(
        self,
        device: int,
        known: dict[Any, ValueVersions],
        results: Sequence[Any],
        *,
        effects: bool = True,
    ) -> list[ValueVersions]:
        """Compute results on one device, from the values of all devices and that device's tensors.

        To be called in that device's branch, once with `effects` (`jax.debug.print`).
        """
        # The branch reshards its own copies: an array traced in one branch must not escape from it.
        here = {var: cell.fresh() for var, cell in known.items()}
        for var, given in zip(self._jaxpr.invars, self._inputs, strict=True):
            if isinstance(given, StageTensor) and given.device == device:
                here[var] = ValueVersions(given.read())
        eqns = [eqn for eqn in self._jaxpr.eqns if self._at[id(eqn)][0] == device]
        eqns = eqns if effects else needed(eqns, results, here)
        return self.stage_partitioner.evaluate_part(eqns, here, results)

    def _on_each(self, branch: Callable[[int], Any]) -> Any:
        """Run `branch(d)` on device `d` of the pipeline; the branches return the same shapes."""
        at = lax.axis_index("pipeline")
        return lax.switch(at, [lambda d=d: branch(d) for d in range(self.devices)])


def _selecting(jaxpr: Any, consts: Sequence[Any], several: set[int], *args: Any) -> list[Any]:
    """Evaluate a jaxpr, with the `cond` equations whose `id` is in `several` as selections.

    All cases are evaluated; they are pure, so an unused one costs time only.
    """

    def selected(eqn: Any, inputs: list[Any]) -> list[Any]:
        if id(eqn) not in several:
            return bind(eqn, inputs)
        which, *operands = inputs
        bodies = map(open_jaxpr, eqn.params["branches"])
        cases = [inlined(*body, operands, every=True) for body in bodies]
        return [lax.select_n(which, *values) for values in zip(*cases, strict=True)]

    return interpret(jaxpr, consts, args, {"cond": selected})


def broadcast_from_stage(arrays: Any) -> Any:
    """Broadcast a tree of arrays, each nonzero on one stage only, to all stages.

    Sums over `pipeline`; the stages that do not have an array pass zeros. Shapes and dtypes stay.
    """
    sums = lax.psum(arrays, "pipeline")
    # `psum` of booleans returns integers.
    return jax.tree.map(lambda array, like: array.astype(like.dtype), sums, arrays)


def _like(given: ShardedValue | StageTensor) -> jax.ShapeDtypeStruct:
    if isinstance(given, StageTensor):
        return given.like
    return jax.ShapeDtypeStruct(given.shape, given.array.dtype)


def _dropped(var: Any) -> bool:
    return type(var).__name__ == "DropVar"
