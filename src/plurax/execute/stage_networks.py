"""Build a `StagedNetwork` from a task: for training, for evaluation and for prediction.

A task comes in one of two forms. A `plurax.stack` has an embedding, equal layers and a head: its
layers are assigned to stages, the embedding is a `StageFn` of the first stage and the head one of
the last. Any other task is traced and cut at its `plurax.pipeline.stage_boundary` annotations
(`Cut`), one `StageFn` per stage. What the last stage returns depends on the use:

    network       y, differentiated           aux, returned
    training      the weighted loss sum       `Totals`: sums of losses, weights and metrics
    evaluating    the same, not used          `Totals`
    predicting    ()                          the outputs, `(rows, ...)`

Remat applies to training alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.execute.gradient import (
    Totals,
    cast_floating,
    check_losses,
    check_weight,
    device_predict,
    evaluation,
    split_output,
    weighted_sums,
    with_metrics,
    with_precision,
    without_data_set,
)
from plurax.execute.rows import Rows
from plurax.jaxpr.remat import rematerialized
from plurax.partition.partitioner import Partitioner
from plurax.pipeline.cut import Cut, has_boundaries
from plurax.pipeline.stages import LayerAssignment, Layers, StagedNetwork, StageFn, even_layers
from plurax.plan import Plan, Precision
from plurax.task import Stack, Task


def totals_of(
    task: Task, output: Any, rows: Rows, where: str, more: dict[str, Any] | None = None
) -> tuple[Any, Totals]:
    """Return the loss sum to differentiate, and all sums, from a loss's output.

    `where` names the function in errors; `more` are the metrics over a data set in evaluation,
    None in training. Raises `TaskError` if losses, metrics or weights do not have one value per
    row.
    """
    size = rows.mask.shape[0]
    losses, metrics = check_losses(output, size, where)
    if more is None:
        metrics = without_data_set(metrics)
    else:
        metrics = with_metrics(metrics, more, size, "metrics of plurax.stack")
    totals = weighted_sums(losses, metrics, check_weight(task, rows.batch, size), rows)
    return totals.loss, totals


def training_network(
    task: Task, plan: Plan, like: PyTree, rows: Rows, partitioner: Partitioner
) -> StagedNetwork:
    """Return the network whose last stage computes a microbatch's loss sum and totals.

    **Arguments:**

    - `task`, `plan`.
    - `like`: the pair `(params, model_state)` as `jax.ShapeDtypeStruct`s of whole tensors.
    - `rows`: one microbatch's rows as `jax.ShapeDtypeStruct`s.
    - `partitioner`: a `Partitioner` with the mesh in which the task is traced.

    Raises `PlanError` if the model cannot be cut into as many stages as the plan has.
    """
    if task.stack is not None:

        def end(params: PyTree, x: PyTree, rows: Rows, batch: PyTree) -> tuple[Any, Totals]:
            assert task.stack is not None
            output = task.stack.apply_head(params, x, batch, rows.keys)
            return totals_of(task, output, rows, "head.apply of plurax.stack")

        return stack_network(task.stack, plan, like, end, remat=True)

    def total(params: PyTree, model_state: PyTree, rows: Rows) -> tuple[Any, Totals, PyTree]:
        loss = with_precision(task.loss, plan.precision, task.stateful)
        states = (model_state,) if task.stateful else ()
        masks = (rows.mask,) if task.coupled else ()
        output = loss(params, *states, rows.batch, rows.keys, *masks)
        losses, metrics, new = split_output(task, output, model_state, rows.mask.shape[0])
        return *totals_of(task, (losses, metrics), rows, "Task.loss"), new

    closed, shapes = partitioner.traced(total, *like, rows)
    return _cut(closed, shapes, plan, like, partitioner, training=True)


def evaluating_network(
    task: Task, plan: Plan, like: PyTree, rows: Rows, partitioner: Partitioner
) -> StagedNetwork | None:
    """Return the network whose last stage computes the totals of evaluation.

    Returns None if the task's evaluation has no stage boundaries, or `Task.metrics` runs the
    network once more. Arguments as `training_network`.
    """
    if task.stack is not None and not task.coupled:

        def end(params: PyTree, x: PyTree, rows: Rows, batch: PyTree) -> tuple[Any, Totals]:
            assert task.stack is not None
            output = task.stack.apply_head(params, x, batch, None)
            metrics = task.stack.metrics
            more = {} if metrics is None else metrics(params, x, batch)
            return totals_of(task, output, rows, "head.apply of plurax.stack", more)

        return stack_network(task.stack, plan, like, end, keyless=True)
    if task.metrics is not None:
        return None
    evaluate = evaluation(task, plan.precision)

    def total(params: PyTree, model_state: PyTree, rows: Rows) -> tuple[Any, Totals, tuple[()]]:
        totals = evaluate(params, model_state, rows)
        return totals.loss, totals, ()

    return _if_marked(total, plan, like, rows, partitioner)


def predicting_network(
    task: Task, plan: Plan, like: PyTree, inputs: PyTree, partitioner: Partitioner
) -> StagedNetwork | None:
    """Return the network whose last stage computes the outputs of prediction.

    Returns None if the task's prediction has no stage boundaries. Arguments as `training_network`,
    with `inputs` for rows. If they are `Rows`, a stack predicts what its head returns.
    """
    predict = device_predict(task, plan.precision)
    if task.stack is not None:
        stack, of_head = task.stack, isinstance(inputs, Rows)

        def end(params: PyTree, x: PyTree, rows: Any, batch: PyTree) -> tuple[Any, PyTree]:
            if of_head:
                outputs = stack.apply_head(params, x, batch, rows.keys)
            else:
                assert stack.predict is not None
                outputs = stack.predict(params, x, batch)
            size = jax.tree.leaves(rows)[0].shape[0]
            for leaf in jax.tree.leaves(outputs):
                if leaf.shape[:1] != (size,):
                    raise errors.predict_wrong_shape(leaf.shape, size)
            if plan.precision != "float32":
                outputs = cast_floating(outputs, jax.numpy.dtype("float32"))
            return (), outputs

        return stack_network(stack, plan, like, end, keyless=not of_head)

    def outputs(params: PyTree, model_state: PyTree, inputs: PyTree) -> tuple[Any, ...]:
        return (), predict(params, model_state, inputs), ()

    return _if_marked(outputs, plan, like, inputs, partitioner)


def layer_assignment(stack: Stack | None, plan: Plan) -> LayerAssignment:
    """Return the assignment of a stack's layers to stages, of no layers for None.

    Raises `PlanError` if there are fewer layers than stages, or not as many as the plan says.
    """
    depth, stages = stack.depth if stack is not None else 0, plan.total_stages
    even = even_layers(depth, stages)
    if stack is not None and plan.layers is not None:
        if sum(plan.layers) != depth:
            raise errors.layers_wrong_sum(plan.layers, depth, "stack", even)
        return LayerAssignment(tuple(plan.layers), plan.pipeline)
    if stack is not None and depth < stages:
        chunks = stages // plan.pipeline
        near = max((n for n in range(1, plan.pipeline + 1) if n * chunks <= depth), default=1)
        raise errors.PlanError(
            f"the plan has {stages} stages and the stack {depth} layers: every stage needs one. "
            f"pipeline={near} works" + (f", stages={near * chunks}." if chunks > 1 else ".")
        )
    return LayerAssignment(even, plan.pipeline)


def stack_network(
    stack: Stack,
    plan: Plan,
    like: PyTree,
    end: Callable[[PyTree, PyTree, Any, PyTree], tuple[Any, PyTree]],
    *,
    keyless: bool = False,
    remat: bool = False,
) -> StagedNetwork:
    """Return a stack as a network: the embedding on the first stage, `end` on the last.

    **Arguments:**

    - `stack`, `plan`; `like`, the pair `(params, model_state)`.
    - `end`: `end(head's params, x, rows, batch) -> (y, aux)`, with params and batch in the plan's
      precision; `rows` are `Rows`, or for prediction the inputs alone.
    - `keyless`: pass None for the random keys.
    - `remat`: rematerialize each part by the plan's policy.

    Raises `PlanError` as `layer_assignment`.
    """
    stages, params = plan.total_stages, like[0]
    numbers = jax.tree.unflatten(jax.tree.structure(params), range(len(jax.tree.leaves(params))))
    cast = _caster(plan.precision)

    def batch_of(rest: Any) -> PyTree:
        return cast(rest.batch if isinstance(rest, Rows) else rest)

    def keys_of(rest: Any) -> Any:
        return None if keyless else rest.keys

    def embed(params: PyTree, x: Any, rest: Any) -> tuple[Any, Any]:
        return stack.apply_embed(cast(params), batch_of(rest), keys_of(rest)), ()

    def layer(params: PyTree, x: PyTree, rest: Any) -> tuple[Any, Any]:
        rows, number = rest
        return stack.apply_block(cast(params), x, batch_of(rows), keys_of(rows), number), ()

    def head(params: PyTree, x: PyTree, rest: Any) -> tuple[Any, Any]:
        return end(cast(params), x, rest, batch_of(rest))

    def part(fun: Callable[..., Any], tree: PyTree) -> tuple[Callable[..., Any], tuple[int, ...]]:
        leaves, structure = jax.tree.flatten(tree)
        policy = plan.remat if remat else "none"

        def run(params: Sequence[Any], x: Any, rest: Any) -> tuple[Any, Any]:
            return fun(jax.tree.unflatten(structure, params), x, rest)

        return rematerialized(run, policy, whole=True), tuple(leaves)

    return StagedNetwork(
        {0: StageFn(*part(embed, numbers["embed"])),
         stages - 1: StageFn(*part(head, stack.head_params(numbers)), after=True)},
        Layers(*part(layer, numbers["blocks"]), layer_assignment(stack, plan)),
        stages,
    )  # fmt: skip


def _if_marked(
    total: Callable[[PyTree, PyTree, Any], tuple[Any, ...]],
    plan: Plan,
    like: PyTree,
    rows: Any,
    partitioner: Partitioner,
) -> StagedNetwork | None:
    """Trace and cut a function, or return None if it has no stage boundaries."""
    closed, shapes = partitioner.traced(total, *like, rows)
    return _cut(closed, shapes, plan, like, partitioner) if has_boundaries(closed.jaxpr) else None


def _cut(
    closed: Any,
    shapes: Any,
    plan: Plan,
    like: PyTree,
    partitioner: Partitioner,
    *,
    training: bool = False,
) -> StagedNetwork:
    params, model_state = like
    count, states = len(jax.tree.leaves(params)), list(tree.named_leaves(model_state))
    outputs = jax.tree.structure(shapes[:2])
    assign = functools.partial(_parts_of_stages, plan, training=training)
    network = Cut(closed, count, states, outputs, assign, partitioner).network()
    if not training or plan.remat == "none":
        return network
    # Between a stage's forward and backward pass are those of other microbatches.
    again = functools.partial(rematerialized, policy=plan.remat, at_once=False)
    edges = {
        stage: dataclasses.replace(stage_fn, fun=again(stage_fn.fun))
        for stage, stage_fn in network.stage_fns.items()
    }
    return StagedNetwork(edges, None, plan.total_stages)


def _parts_of_stages(plan: Plan, parts: int, *, training: bool) -> tuple[int, ...]:
    """Return the number of parts of each stage, of a model that boundaries cut into `parts`."""
    even = even_layers(parts, plan.total_stages)
    if plan.layers is not None:
        if sum(plan.layers) == parts:
            return tuple(plan.layers)
        # The plan's numbers are those of the loss. What is cut at other places is evaluated and
        # predicted whole, unless its stages happen to find their parameters.
        if training:
            raise errors.layers_wrong_sum(plan.layers, parts, "boundaries", even)
    if parts < plan.total_stages:
        raise errors.PlanError(
            f"the plan has {plan.total_stages} stages, and the model's "
            f"plurax.pipeline.stage_boundary calls split it into {parts}, one after another: add "
            "a call between any two layers, or build the task with plurax.stack, which can be "
            "split between any two layers. Without "
            f"a change, pipeline={parts} works."
        )
    return even


def _caster(precision: Precision) -> Callable[[PyTree], PyTree]:
    if precision == "float32":
        return lambda values: values
    return lambda values: cast_floating(values, jax.numpy.dtype(precision))
