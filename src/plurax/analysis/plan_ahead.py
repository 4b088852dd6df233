"""What a plan will do, read before anything is compiled, on devices that need not be here."""

import dataclasses
from collections.abc import Sequence

import optax
from jaxtyping import PyTree

from plurax.collective import Collective
from plurax.execute.recorder import record_step
from plurax.plan import Plan
from plurax.sharding.parameter_info import ParameterInfo
from plurax.task import Task
from plurax.trace.collectives import planned_collectives
from plurax.trace.step_trace import PlannedMemory


@dataclasses.dataclass(frozen=True)
class Planned:
    """The result of `planned`.

    **Fields:**

    - `shardings`: of each parameter and of its optimizer state.
    - `collectives`: of one step. Empty for a plan that splits nothing but the batch, whose only
      collective is one all-reduce of all gradients.
    - `memory`: bytes on one device.
    """

    shardings: Sequence[ParameterInfo]
    collectives: Sequence[Collective]
    memory: PlannedMemory


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
    >>> planned = px.analysis.planned(task, optax.adam(1e-3), px.Plan(data=1024, zero=3), batch)
    >>> planned.shardings[0].shard, planned.memory.parameters
    ((1, 256), 1024)
    >>> [(one.kind, one.axes) for one in planned.collectives]  # doctest: +ELLIPSIS
    [('all-gather', ('data',)), ('reduce-scatter', ('data',)), ...]
    """
    trace = record_step(task, optimizer, plan, batch)
    return Planned(trace.shardings, planned_collectives(trace), trace.memory)
