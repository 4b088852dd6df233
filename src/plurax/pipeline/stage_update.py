"""Evaluate an optimizer's update where each stage's tensors are on another device of a pipeline.

The update's equations are assigned to the devices where their tensors are (see
`plurax.jaxpr.homes`): an equation that reads tensors of one stage is computed on that stage's
device, the others on all devices. Only scalars cross stages. An optimizer that needs a tensor of
another stage raises `PlanError`.

Example: `optax.clip_by_global_norm(1.0)` with `w0: f32[8, 4]` on device 0 and `w1: f32[4, 2]` on
device 1:

    round 0   device 0        a = sum(g0 ** 2)                    f32[]
              device 1        b = sum(g1 ** 2)                    f32[]
              all devices     a, b = psum((a, b), "pipeline")     8 bytes; a device that does not
                                                                  have a scalar adds a zero
    round 1   all devices     scale = 1 / max(sqrt(a + b), 1)     f32[]
              device 0        w0 - rate * scale * g0              f32[8, 4]
              device 1        w1 - rate * scale * g1              f32[4, 2]
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
from plurax.jaxpr.homes import MAX_CROSSING, Homes, RowSplit
from plurax.jaxpr.interpret import needed
from plurax.partition.partitioner import Partitioner
from plurax.partition.values import ShardedValue, ValueVersions
from plurax.sharding.spec import TensorSharding


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
        self._inputs, self._results_of = inputs, homes
        self._homes = Homes(
            lambda fun, *args: partitioner.traced(fun, *args)[0],
            fun,
            [_like(given) for given in inputs],
            [given.device if isinstance(given, StageTensor) else None for given in inputs],
            homes,
            errors.optimizer_needs_stages,
        )
        self._jaxpr = self._homes.jaxpr
        # Variables that are on all devices and that a single device reads.
        self._readers = self._homes.readers()

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
            zip(
                self._jaxpr.constvars,
                map(self.partitioner.constant, self._homes.consts),
                strict=True,
            )
        )
        for var, given in zip(self._jaxpr.invars, self._inputs, strict=True):
            if isinstance(given, ShardedValue):
                known[var] = ValueVersions(given)
        self._replicate_for_readers(known, [var for var in self._jaxpr.invars if var in known])
        # All devices run the rounds together. Equations of single devices are evaluated where they
        # are needed: for the scalars that cross after a round, and for the results at the end.
        for round_ in range(self._homes.rounds):
            eqns = self._homes.of(None, round=round_)
            results = [var for eqn in eqns for var in eqn.outvars if not _dropped(var)]
            cells = self.partitioner.evaluate_part(eqns, known, results)
            known.update(zip(results, cells, strict=True))
            self._replicate_for_readers(known, results)
            crossing = [var for var, at in self._homes.crossing.items() if at == round_]
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
            own = [var for var in crossing if self._homes.home[var] == device]
            cells = iter(self._on_one(device, known, own, effects=False))
            return [
                self.stage_partitioner.reshard(
                    next(cells), TensorSharding.replicated(len(var.aval.shape))
                ).array
                if self._homes.home[var] == device
                else jnp.zeros(var.aval.shape, var.aval.dtype)
                for var in crossing
            ]

        scalars = broadcast_from_stage(self._on_each(branch))
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
            own = [index for index, home in enumerate(self._results_of) if home == device]
            cells = self._on_one(device, known, [atoms[index] for index in own])
            values = self.stage_partitioner.finish(cells, [goals[index] for index in own])
            return pack(device, [value.array for value in values])

        packed = None if pack is None else self._on_each(branch)
        shared = [index for index, home in enumerate(self._results_of) if home is None]
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
        eqns = self._homes.of(device)
        eqns = eqns if effects else needed(eqns, results, here)
        return self.stage_partitioner.evaluate_part(eqns, here, results)

    def _on_each(self, branch: Callable[[int], Any]) -> Any:
        """Run `branch(d)` on device `d` of the pipeline; the branches return the same shapes."""
        at, homes = lax.axis_index("pipeline"), {*self._results_of, *self._homes.home.values()}
        cut = any(isinstance(home, RowSplit) for home in homes)
        branches = {d: lambda d=d: branch(d) for d in range(self.devices) if cut or d in homes}
        # Devices without tensors of their own share a branch, which is traced once.
        idle = functools.partial(branch, min({*range(self.devices)} - {*branches}, default=0))
        return lax.switch(at, [branches.get(d, idle) for d in range(self.devices)])


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
