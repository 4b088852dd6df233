"""Record what one device does in a step, on devices that need not be here.

The step is traced over a `jax.sharding.AbstractMesh`, which has the axes of the plan and no
devices. Tracing runs the partitioner, or the executor of a pipeline, which put the operations of
one device into a jaxpr; `plurax.trace.flatten` makes blocks of it. Nothing is compiled. Example:
`Plan(data=128, tensor=8, zero=3)` and 4 layers of 512 x 512 with Adam, 1,024 devices, on a laptop:

    a kernel       f32[512, 512]   (data, tensor)   f32[4, 64] on each device, and Adam's moments
    collectives    all-gather over data of each bucket of kernels, ... , all-reduce over tensor
    memory         parameters, optimizer, gradients, batch: bytes on one device

A step is traced in two halves, as a step runs them: the gradient's sums, and the update from them.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from plurax.collective import Collective
from plurax.execute.backends.apart import ApartBackend
from plurax.execute.backends.backend import Backend
from plurax.execute.backends.choose import needs_partitioner
from plurax.execute.backends.pipelined import PipelinedBackend
from plurax.execute.check import check_kinds, check_population
from plurax.execute.choose_chunk import by_rule
from plurax.execute.compiled_functions import COUNT
from plurax.execute.network import Network
from plurax.execute.placement import Placement, leading_dim
from plurax.execute.population import HyperFn, Population
from plurax.execute.step_functions import StepFunctions
from plurax.jaxpr.compat import inner_jaxprs, open_jaxpr
from plurax.members import Members
from plurax.mesh import abstract_mesh
from plurax.pipeline.schedule import make_schedule, named
from plurax.plan import Plan
from plurax.task import Task
from plurax.trace.collectives import collectives_of
from plurax.trace.flatten import Flattener
from plurax.trace.liveness import block_peak
from plurax.trace.step_trace import (
    Block,
    Op,
    PipelineActions,
    PlannedMemory,
    StepTrace,
    Value,
    is_tick_loop,
)
from plurax.whole_batch import OverBatch


def record_step(
    task: Task,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    batch: PyTree,
    platform: str | None = None,
) -> StepTrace:
    """Return what one device does in a step under a plan.

    **Arguments:** as for `compile`. The plan's devices need not be here; `platform`, what they are,
    where the program is another one there: `cpu`, `gpu` or `tpu`.

    Raises the errors that `compile` raises while it traces the step.
    """
    check_kinds(task, optimizer, plan, None)
    mesh = abstract_mesh(plan, platform)
    placement = Placement.of(batch, plan, mesh)
    network = Network(task, optimizer, plan, mesh, placement.like, placement.sharding)
    return record_network(network, placement)


def record_network(network: Network, placement: Placement) -> StepTrace:
    """Return what one device does in a step of a network, for batches of a placement's shapes."""
    plan, mesh = network.plan, network.mesh
    layout, state, rows = network.layout, network.layout.abstract(mesh), placement.abstract()
    gradient, sums = jax.make_jaxpr(network.gradients, return_shape=True)(state, rows, COUNT)
    update = jax.make_jaxpr(network.apply)(state, sums)

    def sharded(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    grads = jax.tree.map(sharded, sums.grads, layout.gradient_specs)
    block, arguments, start = _join(gradient, update, len(jax.tree.leaves(state)), plan.axes)
    return StepTrace(
        plan=plan,
        batch_size=placement.size,
        block=block,
        state=arguments[: len(jax.tree.leaves(state))],
        arguments=arguments,
        update=start,
        shardings=layout.parameters(),
        partitioned=needs_partitioner(network.task, plan),
        memory=PlannedMemory(
            parameters=_held(state.params),
            optimizer=_held(state.opt_state),
            model_state=_held(state.model_state),
            gradients=_held(grads),
            batch=_held(rows),
        ),
        pipelines=_pipelines(network.backend, block),
    )


def _held(tree: PyTree) -> int:
    """Return the bytes of one device's shards of global arrays."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def record_population(
    task: Task | HyperFn,
    optimizer: Any,
    plan: Plan,
    batch: PyTree,
    members: Members,
    platform: str | None = None,
) -> StepTrace:
    """Return what one device does in a step of a population.

    **Arguments:** as for `compile`; of the plan's open choices, `chunk` and `batch_dim`, the rule
    of the platform decides (`choose_chunk.py`). The trace has the plan with these.

    A chunk of members is updated before the next one's gradients, so all is one half: the trace's
    `update` is its end. Raises the errors that `compile` raises while it traces the step.
    """
    check_population(task, optimizer, plan, members)
    mesh = abstract_mesh(plan, platform)
    placement = Placement.of(batch, plan, mesh)

    def population_of(plan: Plan) -> Population:
        population = Population(task, optimizer, plan, mesh, placement.like, members)
        return population.abstract_of(members.count)

    plan, _ = by_rule(population_of(plan))
    population = population_of(plan)
    state, rows = population.layout.abstract(mesh), placement.abstract()
    step = jax.make_jaxpr(population.step)(state, *population.arguments, rows, COUNT)
    jaxpr, inputs, _ = _of_one_device(step)
    arguments = [Value(var.aval) for var in jaxpr.invars]
    block = Flattener(plan.axes).block(jaxpr, arguments)
    of_input = dict(zip(inputs, arguments, strict=True))
    leaves = len(jax.tree.leaves(state))

    return StepTrace(
        plan=plan,
        batch_size=placement.size,
        block=block,
        state=[of_input[index] for index in range(leaves) if index in of_input],
        arguments=arguments,
        update=len(block.ops),
        shardings=(),
        partitioned=needs_partitioner(population.example.task, plan),
        memory=PlannedMemory(
            parameters=_held(state.params),
            optimizer=_held(state.opt_state),
            model_state=_held(state.model_state),
            gradients=0,  # of a chunk, among the temporaries
            batch=_held(rows),
        ),
    )


def record_steady_step(
    task: Task,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    batch: PyTree,
    platform: str | None = None,
) -> StepTrace:
    """Return `record_step`; of a pipeline with many microbatches, recorded with few.

    With more microbatches of the same rows the program is the same but for the ticks of its loop,
    and what a device holds does not grow, the batch aside. To draw up the table of 64 stages and
    768 microbatches takes many seconds, so few are traced, and the schedule is that of all:

        pipeline=4, microbatches=256, 1F1B, 512 rows       traced: 16 microbatches, 32 rows
        the loop over ticks, each action once              as it is
        the schedule                                       518 ticks, of all microbatches
        bytes of the batch                                 those of 512 rows
    """
    size, few = leading_dim(batch), max(16, 2 * plan.pipeline)
    # Whole microbatches only, or the rows of one would differ.
    whole = size % plan.most_microbatches == 0
    known = named(plan.schedule)
    grows = known is None or known.stores_all
    grows = grows or isinstance(task.loss, OverBatch)  # by the outputs of all examples
    if plan.pipeline == 1 or plan.most_microbatches <= few or grows or not whole:
        return record_step(task, optimizer, plan, batch, platform)
    less = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (size // plan.most_microbatches * few, *x.shape[1:]), x.dtype
        ),
        batch,
    )
    few_plan = dataclasses.replace(plan, microbatches=few)
    trace = record_step(task, optimizer, few_plan, less, platform)
    (pipeline,) = trace.pipelines
    schedule = make_schedule(
        plan.schedule, plan.pipeline, plan.most_microbatches, plan.virtual_stages
    )
    rows = trace.memory.batch * plan.most_microbatches // few
    return dataclasses.replace(
        trace,
        plan=plan,
        batch_size=size,
        memory=dataclasses.replace(trace.memory, batch=rows),
        pipelines=[dataclasses.replace(pipeline, schedule=schedule)],
    )


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """What is planned for a step: its `collectives`, and the `peak` bytes of a device.

    Of a loop over steps the peak leaves out the data, unless there is one device.
    """

    collectives: list[Collective]
    peak: int


def read_traced(functions: StepFunctions, traced: Any) -> TracedStep | None:
    """Return what is planned for a step, or a loop over steps, from the jaxpr that was compiled.

    None for a population, and where no body of one device is in it.
    """
    if not isinstance(functions, Network):
        return None
    mesh, count = functions.mesh, len(jax.tree.leaves(functions.layout.abstract(functions.mesh)))
    jaxpr, first = open_jaxpr(traced)[0], 0
    if mesh.size > 1:
        eqn = _mapped(jaxpr)
        if eqn is None:
            return None
        # Constants come before the state, which the first results replace.
        state = [var.aval for var in eqn.outvars[:count]]
        avals = [atom.aval for atom in eqn.invars]
        starts = range(len(avals) - count + 1)
        first = next((i for i in starts if avals[i : i + count] == state), 0)
        jaxpr = inner_jaxprs(eqn)[0]
    axes, platform = functions.plan.axes, mesh.devices.flat[0].platform
    args = [Value(var.aval) for var in jaxpr.invars]
    block = Flattener(axes).block(jaxpr, args)
    block.inputs = args[first:]
    return TracedStep(
        collectives_of(block, axes, _pipelines(functions.backend, block)),
        block_peak(block, args[first : first + count], platform),
    )


def _mapped(jaxpr: Any) -> Any:
    """Return the `jax.shard_map` of a step, which may be in a loop; None without any."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            return eqn
        for inner in inner_jaxprs(eqn):
            if (found := _mapped(inner)) is not None:
                return found
    return None


def _pipelines(backend: Backend, block: Block) -> list[PipelineActions]:
    """Return what the actions consist of, for each loop over ticks in the block of a step."""
    if isinstance(backend, ApartBackend):
        inner = _pipelines(backend.inner, block)
        # Outputs are computed before it, in stages unless these are cut elsewhere.
        before = inner if sum(map(is_tick_loop, block.ops)) > len(inner) else []
        forwards = [dataclasses.replace(each, schedule=each.schedule.forwards()) for each in before]
        return [*forwards, *inner]
    if not isinstance(backend, PipelinedBackend):
        return []
    counts = backend.layout.assignment.counts
    return [PipelineActions(backend.schedule, backend.parts_after, counts)]


def _join(
    gradient: Any, update: Any, states: int, sizes: Mapping[str, int]
) -> tuple[Block, list[Value], int]:
    """Join the two halves of a step, as `Network.gradients` and `Network.apply` trace to.

    **Arguments:** `gradient`, the jaxpr of `(state, rows, count) -> sums`; `update`, that of
    `(state, sums) -> (state, metrics)`; `states`, the number of leaves of the state; `sizes`, of
    the mesh axes.

    **Returns:** the block; its arguments, the state and the batch; and the index of the first
    operation of the update.
    """
    flattener, ops = Flattener(sizes), list[Op]()
    values: dict[int, Value] = {}

    def run(closed: Any, sums: Sequence[Value | None]) -> list[Value | None]:
        jaxpr, inputs, results = _of_one_device(closed)
        args = [
            Value(var.aval) if index is None  # a constant
            else sums[index - states] if sums and index >= states
            else values.setdefault(index, Value(var.aval))
            for index, var in zip(inputs, jaxpr.invars, strict=True)
        ]  # fmt: skip
        outputs = flattener.inline(jaxpr, args, ops)
        return [None if index is None else outputs[index] for index in results]

    sums = run(gradient, ())
    start = len(ops)
    outputs = run(update, sums)
    arguments = [values[index] for index in sorted(values)]
    return Block(ops, arguments, outputs), arguments, start


def _of_one_device(closed: Any) -> tuple[Any, list[int | None], list[int | None]]:
    """Return the jaxpr of one device, and which inputs and results of the traced one its are.

    That is the body of the `jax.shard_map` that all equations are in; for a program of one device
    the jaxpr itself. Of each of its inputs comes the index of the traced one, None for a constant;
    of each traced result the index among its own, None where that is an input or a literal.
    """
    jaxpr, _ = open_jaxpr(closed)
    order = {var: index for index, var in enumerate(jaxpr.invars)}
    if [eqn.primitive.name for eqn in jaxpr.eqns] != ["shard_map"]:
        return jaxpr, list(range(len(jaxpr.invars))), list(range(len(jaxpr.outvars)))
    (eqn,) = jaxpr.eqns
    inputs = [None if isinstance(atom, Literal) else order.get(atom) for atom in eqn.invars]
    computed = {var: index for index, var in enumerate(eqn.outvars)}
    results = [None if isinstance(atom, Literal) else computed.get(atom) for atom in jaxpr.outvars]
    return inner_jaxprs(eqn)[0], inputs, results
