"""Choose the backend that a task and a plan need."""

import dataclasses
import functools
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.execute.backends.apart import ApartBackend, is_apart, weighted_batch, weighted_task
from plurax.execute.backends.backend import Backend
from plurax.execute.backends.pipelined import PipelinedBackend
from plurax.execute.backends.replicated import ReplicatedBackend
from plurax.execute.backends.sharded import ShardedBackend
from plurax.execute.program_cache import cached_program
from plurax.execute.transformed_task import streamed_task, transformed_task
from plurax.jaxpr.at_experts import at_experts
from plurax.jaxpr.context import Context
from plurax.jaxpr.sorted_rows import with_rows_apart
from plurax.jaxpr.stream import with_kernels
from plurax.mesh import platform_of
from plurax.plan import Plan
from plurax.sharding.rules import Rules
from plurax.task import Task


def needs_partitioner(task: Task, plan: Plan) -> bool:
    """Return whether a plan needs the partitioner: if it splits anything but independent rows."""
    return plan.partitioned or (task.coupled and plan.data > 1)


def planned_task(task: Task, plan: Plan, *, member: bool = False) -> Task:
    """Return the task as a plan computes it; a `member` is one of a population."""
    written = task
    # Between stages tokens would be brought back to the order of their places.
    ordered = plan.pipeline == 1
    context = Context(plan.context, plan.context_strategy, ordered, tensor=plan.tensor)
    # Of tokens that may be split over `tensor` a range would be gathered from others.
    split = context if plan.context > 1 else None
    task = streamed_task(task, plan.stream, split, skip=plan.tensor == 1)
    if (plan.tensor > 1 or member) and split is None:
        task = transformed_task(task, lambda fun, _: with_kernels(fun))
    rules = Rules(plan.rules, {"data": plan.data})
    loss = task.loss
    if plan.splits_experts:
        task = transformed_task(
            task,
            lambda fun, part: at_experts(fun, plan.data, functools.partial(_groups, rules, part)),
        )
    if task.coupled and plan.data > 1 and not is_apart(task, plan):
        states = 2 if task.stateful else 1
        groups = functools.partial(_groups, rules, "") if plan.splits_experts else None
        # What of a loss leaves rows apart is run once, for all plans that trace it alike.
        traced = plan.stream, plan.context, plan.context_strategy, plan.tensor > 1, member
        known: dict[Any, Any] = cached_program(written, ("sorted rows", *traced), dict)
        loss = with_rows_apart(loss, states, plan.data, groups, known)
        task = dataclasses.replace(task, loss=loss)
    return task


def _groups(rules: Rules, part: str, params: PyTree) -> list[int | None]:
    """Return the dim that is split over `data` of each parameter of a `part` of a stack.

    "": all parameters; "blocks": one layer, without the dim of layers.
    """
    stacked = part == "blocks"
    dims: list[int | None] = []
    for path, leaf in tree.named_leaves(params).items():
        shape = (1, *leaf.shape) if stacked else leaf.shape
        sharding = rules.find(f"{part}/{path}" if part else path, shape)
        entries = [] if sharding is None else sharding.dims
        split = [dim - stacked for dim, axes in enumerate(entries) if "data" in axes]
        dims.append(split[0] if split else None)
    return dims


def make_backend(
    task: Task, optimizer: optax.GradientTransformation, plan: Plan, mesh: Mesh, batch: PyTree
) -> Backend:
    """Return the backend for a task under a plan.

    `batch` is a batch of the largest size as `jax.ShapeDtypeStruct`s, not padded. Raises
    `PlanError` where the plan does not fit the task.
    """
    if task.coupled and not isinstance(plan.microbatches, int):
        raise errors.PlanError(
            f"Plan(microbatches={plan.microbatches}): the loss of this task couples the examples "
            "of a microbatch (Task(coupled=True)), so that all devices of `data` communicate in "
            "every microbatch, and these have different numbers of them. Give one number for all: "
            f"microbatches={plan.most_microbatches}."
        )
    task = planned_task(task, plan)
    if not is_apart(task, plan):
        return _backend(task, optimizer, plan, mesh, batch)
    at_once = dataclasses.replace(plan, microbatches=1)
    direct = functools.partial(_backend, task, optimizer, at_once, mesh, batch)
    of_outputs = weighted_batch(task, plan, batch)
    inner = _backend(weighted_task(task), optimizer, plan, mesh, of_outputs, couples=True)
    whole = isinstance(inner, PipelinedBackend)
    return ApartBackend(task, optimizer, plan, mesh, inner, direct, whole=whole)


def _backend(
    task: Task,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    mesh: Mesh,
    batch: PyTree,
    *,
    couples: bool = False,
) -> Backend:
    """Return the backend for a task that `planned_task` returned, as `make_backend`.

    `couples`: whether another part of the step couples the examples of all devices.
    """
    if not (needs_partitioner(task, plan) or (couples and plan.data > 1)):
        # A plan that splits only the batch runs the task's functions unchanged: XLA may fuse them.
        return ReplicatedBackend(task, optimizer, plan, platform=platform_of(mesh))
    rows = microbatch(batch, plan, coupled=task.coupled)
    kind = PipelinedBackend if plan.pipeline > 1 else ShardedBackend
    return kind(task, optimizer, plan, mesh, rows)


def microbatch(batch: PyTree, plan: Plan, *, coupled: bool = False) -> PyTree:
    """Return the rows of one microbatch as `jax.ShapeDtypeStruct`s.

    The rows are those of one device, or with `coupled` (a loss that couples examples) those of all
    devices together. `batch` is the whole batch; its size is padded as the plan pads it.
    """
    devices = plan.data if coupled else 1

    def part(leaf: Any) -> jax.ShapeDtypeStruct:
        rows = plan.padded_size(leaf.shape[0]) // plan.parts * devices
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)

    return jax.tree.map(part, batch)
