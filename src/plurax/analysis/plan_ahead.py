"""What a plan will do, read before anything is compiled, on devices that need not be here.

The step is traced over a `jax.sharding.AbstractMesh`, which has the axes of the plan and no
devices. Tracing decides every sharding and every collective, and the shapes on one device; only
XLA's temporaries are not known yet. Example: `Plan(data=128, tensor=8, zero=3)` and 4 layers of
512 x 512 with Adam, 1,024 devices, read on a laptop:

    a kernel       f32[512, 512]   (data, tensor)   f32[4, 64] on each device, and Adam's moments
    collectives    all-gather over data of each bucket of kernels, ... , all-reduce over tensor
    memory         parameters, optimizer, gradients, batch: bytes on one device
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from plurax.analysis.device_program import DeviceProgram
from plurax.collective import Collective
from plurax.execute.backends.backend import Backend
from plurax.execute.backends.pipelined import PipelinedBackend
from plurax.execute.check import check_kinds
from plurax.execute.layouts.parameter_info import ParameterInfo
from plurax.execute.lowering import COUNT
from plurax.execute.network import Network
from plurax.execute.placement import Placement, leading_dim
from plurax.mesh import split_rows
from plurax.pipeline.schedule import Schedule
from plurax.plan import MESH_AXES, Plan
from plurax.task import Task


@dataclasses.dataclass(frozen=True)
class PlannedMemory:
    """Bytes on one device of what a step is given and computes, XLA's temporaries aside.

    **Fields:** `parameters`, `optimizer` (its state), `model_state`, `gradients` (their reduced
    sums), `batch`.
    """

    parameters: int
    optimizer: int
    model_state: int
    gradients: int
    batch: int


@dataclasses.dataclass(frozen=True)
class Planned:
    """The result of `planned`.

    **Fields:**

    - `shardings`: of each parameter and of its optimizer state.
    - `collectives`: of one step. Empty for a plan that splits nothing but the batch, whose only
      collective is one all-reduce of all gradients.
    - `memory`: bytes on one device.
    """

    shardings: list[ParameterInfo]
    collectives: list[Collective]
    memory: PlannedMemory


@dataclasses.dataclass(frozen=True)
class PipelineParts:
    """What the actions of a pipeline consist of.

    **Fields:** `schedule`; `after`, for each stage that has an embedding, a head or another part of
    its own, whether the stage's layers come before it; `layers`, the number of layers of each
    stage.
    """

    schedule: Schedule
    after: Mapping[int, bool]
    layers: Sequence[int]

    def parts(self) -> list[tuple[str, int | None]]:
        """Return kind and part of each loop in the body of the tick loop, in order.

        A part is the number of a stage, or None for one layer.
        """
        found: list[tuple[str, int | None]] = []
        for kind in "FBW" if self.schedule.split else "FB":
            first = kind == "B"  # which goes through the parts backward
            found += [(kind, stage) for stage, after in self.after.items() if after == first]
            found += [(kind, None)] if any(self.layers) else []
            found += [(kind, stage) for stage, after in self.after.items() if after != first]
        return found

    def of_stage(self, stage: int) -> list[tuple[int | None, int]]:
        """Return the parts of a stage, each with how often it runs in an action."""
        own: list[tuple[int | None, int]] = [(stage, 1)] if stage in self.after else []
        return own + ([(None, self.layers[stage])] if any(self.layers) else [])


@dataclasses.dataclass(frozen=True)
class TracedPlan:
    """A plan with what it will do, `planned`, and the `program` of one device; `parts` of a
    pipeline, or None; `batch_size`, the examples of a step.
    """

    plan: Plan
    planned: Planned
    program: DeviceProgram
    parts: PipelineParts | None
    batch_size: int


def planned(
    task: Task, optimizer: optax.GradientTransformation, plan: Plan, batch: PyTree
) -> Planned:
    """Return the shardings, collectives and memory of a plan without compiling it.

    **Arguments:** as for `compile`. The plan's devices need not be here.

    Raises the errors that `compile` raises while it traces the step.

    >>> import jax, jax.numpy as jnp, optax, plurax as px
    >>> task = px.Task(
    ...     init=lambda key: jnp.zeros((1024, 256)),
    ...     loss=lambda params, batch, keys: jnp.sum((batch["x"] @ params) ** 2, axis=1),
    ... )
    >>> batch = {"x": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
    >>> found = px.analysis.planned(task, optax.adam(1e-3), px.Plan(data=1024, zero=3), batch)
    >>> found.shardings[0].shard, found.memory.parameters
    ((1, 256), 1024)
    >>> [(one.kind, one.axes) for one in found.collectives]  # doctest: +ELLIPSIS
    [('all-gather', ('data',)), ('reduce-scatter', ('data',)), ...]
    """
    return trace_plan(task, optimizer, plan, batch).planned


def trace_plan(
    task: Task, optimizer: optax.GradientTransformation, plan: Plan, batch: PyTree
) -> TracedPlan:
    """Trace a step under a plan on devices that need not be here. See `planned`."""
    check_kinds(task, optimizer, plan, None)
    sizes = tuple(plan.axes[axis] for axis in MESH_AXES)
    # Typed Any: it takes the place of a `Mesh`, of which the step reads only the axes.
    mesh: Any = AbstractMesh(sizes, MESH_AXES, (AxisType.Auto,) * len(sizes))
    placement = Placement(batch, plan.padded_size(leading_dim(batch)), split_rows(mesh))
    network = Network(task, optimizer, plan, mesh, placement.like, placement.sharding)
    state, rows = network.layout.abstract(mesh), placement.abstract()
    gradient, sums = jax.make_jaxpr(network.gradients, return_shape=True)(state, rows, COUNT)
    update = jax.make_jaxpr(network.apply)(state, sums)
    specs, layout = network.layout.specs, network.layout

    def held(values: PyTree, specs: PyTree) -> int:
        """Return the bytes of one device's shards of global arrays."""

        def shard(spec: PartitionSpec, leaf: jax.ShapeDtypeStruct) -> int:
            sharding = NamedSharding(mesh, spec)
            return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

        sizes = jax.tree.map(shard, specs, values, is_leaf=lambda x: isinstance(x, PartitionSpec))
        return sum(jax.tree.leaves(sizes))

    found = Planned(
        shardings=layout.parameters(),
        collectives=network.backend.planned_collectives(),
        memory=PlannedMemory(
            parameters=held(state.params, specs.params),
            optimizer=held(state.opt_state, specs.opt_state),
            model_state=held(state.model_state, specs.model_state),
            gradients=held(sums.grads, layout.gradient_specs),
            batch=held(rows, jax.tree.map(lambda leaf: leaf.sharding.spec, rows)),
        ),
    )
    leaves = len(jax.tree.leaves(state))
    program = DeviceProgram.of(gradient, update, leaves, plan.axes)
    return TracedPlan(plan, found, program, _parts(network.backend), leading_dim(batch))


def _parts(backend: Backend) -> PipelineParts | None:
    if not isinstance(backend, PipelinedBackend):
        return None
    return PipelineParts(backend.schedule, backend.parts_after, backend.layout.assignment.counts)
