"""The graph of what one device does in one microbatch under a plan.

Traces are kept: as many rows under one remat policy are one trace, whatever the mesh.
"""

import dataclasses
from typing import Any

import jax
from jaxtyping import PyTree

from plurax import tree
from plurax.execute.gradient import gradient
from plurax.execute.initial_state import initial
from plurax.execute.placement import leading_dim
from plurax.execute.rows import abstract_rows
from plurax.execute.transformed_task import transformed_task
from plurax.jaxpr.interpret import holds
from plurax.jaxpr.stream import with_kernels
from plurax.mesh import abstract_mesh, within
from plurax.plan import Plan
from plurax.planner.graph import Graph, graph_of
from plurax.planner.shard_strategies import StrategyFinder
from plurax.sharding.axes import Axes
from plurax.sharding.rules import Rules
from plurax.task import Task


@dataclasses.dataclass(frozen=True)
class KnownGraphs:
    """What graphs of one task and batch have in common.

    **Fields:** `traces`, by rows, precision and remat policy; `finders` of strategies, by axes and
    by whether rules decide: under another policy most equations are equal.
    """

    traces: dict[Any, Any] = dataclasses.field(default_factory=dict)
    finders: dict[tuple[Axes, bool], StrategyFinder] = dataclasses.field(default_factory=dict)


def graph_of_step(
    task: Task,
    plan: Plan,
    batch: PyTree,
    known: KnownGraphs | None = None,
    *,
    by_rules: bool = False,
) -> Graph:
    """Return the graph of one device's microbatch under a plan, to be split over `tensor`.

    **Arguments:** `batch`: arrays or `jax.ShapeDtypeStruct`s, of all devices. Of the plan `data`,
    `microbatches` and `tensor` count, `precision` and `remat`, and its `shardings` for annotations;
    its shardings for parameters do not: these are what is searched. Traces that are `known` are
    used again for as many rows, unless they name the mesh that they are of. With `by_rules`
    equations have the replicated strategy alone, which those of rules replace (`decided_by_rules`).
    """
    known = KnownGraphs() if known is None else known
    size = plan.padded_size(leading_dim(batch)) // plan.parts
    key = size, plan.precision, plan.remat
    closed, args = known.traces.get(key) or _traced(task, plan, tree.with_rows(batch, size))
    if not any(holds(closed.jaxpr, name) for name in ("shard_map", "sharding_constraint")):
        known.traces[key] = closed, args
    split = ["tensor"] if plan.tensor > 1 else []
    axes = Axes(dict.fromkeys(split, plan.tensor), permutes=plan.permutes)
    named = Rules(plan.rules, {"tensor": plan.tensor}).find
    new = StrategyFinder(axes, split, replicated=by_rules)
    finder = known.finders.setdefault((axes, by_rules), new)
    return graph_of(
        closed, args, axes, searched=split, trips=plan.most_microbatches, named=named,
        finder=finder, frozen=task.frozen,
    )  # fmt: skip


def _traced(task: Task, plan: Plan, rows: PyTree) -> tuple[Any, tuple[PyTree, PyTree, PyTree]]:
    """Return the gradient of some rows, and the arguments with which it is traced.

    Its equations are those of a step with `tensor`, whose places strategies name.
    """
    params, model_state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
        jax.eval_shape(lambda: initial(task, jax.random.key(0))),
    )
    args = params, model_state, abstract_rows(rows)
    task = transformed_task(task, lambda fun, _: with_kernels(fun))
    fun = gradient(task, plan.precision, remat=plan.remat, penalties_apart=True)
    fun = within(abstract_mesh(plan), fun)
    return jax.make_jaxpr(fun)(*args), args
