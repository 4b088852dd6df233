"""A training step with parameters, operators or optimizer state sharded over devices.

A task's loss and an optimizer's update are written for whole tensors. This backend partitions both
(`plurax.partition`) into the program of one device, which runs inside `jax.shard_map` on that
device's shards, with explicit collectives. One device runs, in this order:

    for each microbatch: loss and gradient on its rows         partitioned over `tensor`
        zero=2, 3: reduce-scatter the gradient to its shard
    zero=0: all-reduce the gradient sums over `data`; zero=1: reduce-scatter them; on GPUs those of
        layers in the backward pass of the last microbatch
    the update, on this device's shards                        partitioned over `data`, `tensor`
        zero=1, 2: all-gather the new parameters

Example: `Plan(data=4, tensor=2, zero=2)` with a kernel `f32[512, 2048]` under a rule that splits
its dim 1 over `tensor`. Each device has:

    parameter           (None, tensor)    f32[512, 1024]
    gradient sum        (data, tensor)    f32[128, 1024]    also with zero=1, once reduced
    Adam's mu and nu    (data, tensor)    f32[128, 1024]    each
    new parameter       f32[128, 1024], all-gathered over `data` to f32[512, 1024]

With zero=3 the parameter itself is `f32[128, 1024]`, gathered for each use.

Source: ZeRO (Rajbhandari et al. 2019, https://arxiv.org/abs/1910.02054).
"""

import copy
import fnmatch
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from plurax import errors, tree
from plurax.collective import Collective
from plurax.execute import early_reduction
from plurax.execute.backends.backend import Backend
from plurax.execute.gradient import Totals, device_predict, evaluation, gradient, with_precision
from plurax.execute.initial_state import new_state
from plurax.execute.layouts.state_shardings import StateShardings, stacks
from plurax.execute.mask import loss_arguments
from plurax.execute.penalties import PENALTIES, has_penalties, penalized_gradients
from plurax.execute.reduction import reduced
from plurax.execute.rows import Chunk, Rows
from plurax.execute.step import Gradients, Metrics, make_apply, make_gradients, whole_update
from plurax.execute.totals import (
    BatchTotals,
    coupled_totals,
    device_evaluation,
    device_totals,
    uneven_totals,
)
from plurax.freezing import trained
from plurax.jaxpr.annotate import OverContext
from plurax.jaxpr.at_experts import AT_EXPERTS
from plurax.jaxpr.compat import derivative_of, inner_jaxprs
from plurax.jaxpr.interpret import all_equations, holds
from plurax.jaxpr.rows_apart import ROWS_APART
from plurax.mesh import platform_of, within
from plurax.partition.operators.elementwise import only_real
from plurax.partition.partitioner import Partitioner, partition
from plurax.partition.pins import with_strategies
from plurax.partition.values import ShardedValue, is_sharded_value, shard_of_rows
from plurax.plan import Plan
from plurax.sharding.annotations import (
    Split,
    Tag,
    activation_names,
    annotations_in,
    parts_of_axes,
)
from plurax.sharding.axes import Axes
from plurax.sharding.rules import Rules, is_sharding
from plurax.sharding.spec import REPLICAS, TensorSharding
from plurax.state import TrainState
from plurax.strategies import RULE_AXES
from plurax.task import Task
from plurax.user_frames import warn


class ShardedBackend(Backend):
    """A task's functions on the shards of one device, and the shardings of the state.

    **Arguments:**

    - `task`, `optimizer`, `plan`, `mesh`.
    - `rows`: the rows of one microbatch as `jax.ShapeDtypeStruct`s.
    - `order_layers`: in a pipeline, the function that orders the layers of a state by stage.
    - `layered`: in a pipeline, for each parameter whether layers are stacked in it.

    **Attributes:** `layout`, the `StateShardings`; `axes`, the mesh axes with more than one device;
    `stage_axes`, the same without `pipeline`.

    Raises `PlanError` if the plan asks for `batch_dim="minor"`, if a rule of the plan matches
    nothing, or if nothing uses the axis `tensor`.
    """

    layout: StateShardings

    def __init__(
        self,
        task: Task,
        optimizer: optax.GradientTransformation,
        plan: Plan,
        mesh: Mesh,
        rows: PyTree,
        *,
        order_layers: Callable[[TrainState], TrainState] | None = None,
        layered: Sequence[bool] = (),
    ) -> None:
        if plan.batch_dim == "minor":
            raise errors.plan_minor_divided()
        self.task, self.optimizer, self.plan = task, optimizer, plan
        self.manual_axes = frozenset(mesh.axis_names)
        sizes = {axis: mesh.shape[axis] for axis in _AXES if mesh.shape[axis] > 1}
        self._mesh: Mesh | None = mesh
        self._data = mesh.shape["data"]
        rules = Rules(plan.rules, {a: n for a, n in sizes.items() if a in RULE_AXES})
        fresh = functools.partial(new_state, task, optimizer)
        like: TrainState = jax.eval_shape(lambda: fresh(jax.random.key(0)))
        jaxpr = self._loss_jaxpr(like, rows)
        self._rules = rules
        stacked = stacks(jaxpr, like.params)
        if order_layers is not None:
            like = jax.eval_shape(order_layers, like)
        self.layout = StateShardings(like, plan, rules, sizes, stacked, layered, frozen=task.frozen)
        self._rows, self._has_penalties = rows, has_penalties(jaxpr, like.params)
        tags = annotations_in(jaxpr)
        names = activation_names(tags)
        paths = list(tree.named_leaves(like.params))
        self._rules.check_used(paths, names)
        _check_activations(plan, names)
        if sizes.get("tensor", 1) > 1 and not _uses_tensor(plan, tags, jaxpr):
            example = paths[0] if paths else "*"
            raise errors.PlanError(
                f"Plan(tensor={plan.tensor}): no rule and no annotation splits anything over "
                f"`tensor`, so {plan.tensor} devices would each do the same work. Say what is "
                f"split: Plan(tensor={plan.tensor}, shardings={{{example!r}: (..., 'tensor')}}) "
                "for parameters and activations named by plurax.sharding.name, "
                "plurax.sharding.megatron for the rules of a transformer, plurax.sharding.shard in "
                f"the model for an operator. Or use data={plan.tensor}, which splits the batch and "
                "needs no rules. Parameters: "
                f"{', '.join(paths) or 'none'}. Named activations: {', '.join(names) or 'none'}."
            )
        if plan.context > 1 and not any(isinstance(tag, OverContext) for tag in tags):
            raise errors.PlanError(
                f"Plan(context={plan.context}): no attention was found whose queries and keys "
                f"{plan.context} devices divide, so no tokens are split, and all devices would do "
                "the same work. Attention is a product of two activations that is summed over its "
                "keys, or a call of cuDNN's or of JAX's flash attention without a bias; its tokens "
                f"must be a multiple of {plan.context}; a StreamWarning names what it cannot be "
                f"followed through. Or data={plan.context} splits the batch."
            )
        parts = parts_of_axes(tags, sizes)
        runs: dict[str, Any] = {"permutes": plan.permutes, "platform": platform_of(mesh)}
        self.axes = Axes(sizes, parts, **runs)
        # Only the devices of one stage run its equations: no collective there spans `pipeline`.
        inner = {axis: size for axis, size in sizes.items() if axis != "pipeline"}
        self.stage_axes = Axes(inner, parts, **runs)
        self._warned: set[str] = set()

    def _loss_jaxpr(self, like: TrainState, rows: PyTree) -> Any:
        loss = with_precision(self.task.loss, self.plan.precision, self.task.stateful)
        loss = within(self._mesh, loss) if self._mesh else loss
        return jax.make_jaxpr(loss)(*loss_arguments(self.task, like, rows)).jaxpr

    def of(self, task: Task, optimizer: optax.GradientTransformation) -> "ShardedBackend":
        """Return a copy for another member of a population."""
        other = copy.copy(self)
        other.task, other.optimizer = task, optimizer
        # Traced values belong to the mesh in which they were traced; do not enter another.
        other._mesh = None
        return other

    def own(self, state: TrainState) -> TrainState:
        """Return this device's shards of a replicated state."""

        def cut(array: Array, sharding: TensorSharding) -> Array:
            target = self.axes.expanded(sharding)
            whole = ShardedValue(array, array.shape, TensorSharding.replicated(array.ndim))
            return self.partitioner().move(whole, target).array

        return jax.tree.map(cut, state, self.layout.shardings)

    # --- What a device does -------------------------------------------------------------------

    def gradients(self, *, split: bool = True) -> Callable[..., Gradients]:
        """Return `(state, rows, count, first=None) -> gradients` on shards."""
        return make_gradients(self._total(split))

    def apply(
        self, *, freeze: bool = False, select: bool = False
    ) -> Callable[[TrainState, Gradients], tuple[TrainState, Metrics]]:
        """Return `(state, gradients) -> (state, metrics)` on this device's shards."""
        return make_apply(
            self._update, self.layout.gradient_dtypes, self._norm, freeze=freeze, select=select
        )

    def _total(self, split: bool = True) -> BatchTotals:
        fun = gradient(
            self.task, self.plan.precision, remat=self.plan.remat,
            penalties_apart=self._has_penalties,
        )  # fmt: skip
        total = self._total_of_rows(fun, split)
        total = self._with_penalties(total) if self._has_penalties else total
        return self._with_zeros(total)

    def _with_zeros(self, total: BatchTotals) -> BatchTotals:
        """Return totals with gradients that are zero in the padding, where that of 1 / x is not."""
        shards = self.expanded(self.layout.gradient_shards)

        def only(array: Array, like: Any, sharding: TensorSharding) -> Array:
            for dim in sharding.indivisible_dims(like.shape, self.axes.sizes):
                array = only_real(self.axes, sharding, like.shape, array, dim)
            return array

        def run(*args: Any) -> tuple[Totals, PyTree]:
            totals, state = total(*args)
            grads = jax.tree.map(only, totals.grads, self.layout.gradient_like, shards)
            return totals._replace(grads=grads), state

        return run

    def _total_of_rows(self, fun: Any, split: bool) -> BatchTotals:
        each, microbatches = self._gradient(fun, split), self.plan.most_microbatches
        if not self.task.coupled:
            last = self._gradient(fun, split, last=True) if self._reduces_early else None
            return device_totals(each, self.plan.replica_microbatches, self._reduced, last)
        if split:
            return coupled_totals(each, microbatches, self._reduced, self._data)
        return uneven_totals(each, microbatches, self._reduced)

    def _with_penalties(self, total: BatchTotals) -> BatchTotals:
        """Return totals with the gradients of penalties (`penalties.py`), on shards."""
        loss = with_precision(self.task.loss, self.plan.precision, self.task.stateful)
        arguments = loss_arguments(self.task, self.layout.like, self._rows)
        whole = penalized_gradients(loss, arguments, self.task.frozen)
        shards = self.layout.gradient_shards

        def run(params: PyTree, *rest: Any) -> tuple[Totals, PyTree]:
            totals, state = total(params, *rest)
            metrics = {**totals.metrics}
            by = metrics.pop(PENALTIES)
            grads = self._values(totals.grads, self.layout.gradient_like, shards)
            args = (self._parameters(params), grads, _whole(by))
            partitioner = self.partitioner()
            grads = partition(whole, partitioner, args, lambda _: self.expanded(shards))
            self.warn_of(partitioner.records)
            return totals._replace(grads=_arrays(grads), metrics=metrics), state

        return run

    @property
    def _reduces_early(self) -> bool:
        """Whether gradients are reduced in the backward pass of the last microbatch alone."""
        early = early_reduction.reduces_early(self.plan, self.axes.platform)
        return early and not self.task.coupled

    def _gradient(self, fun: Any, split: bool, *, last: bool = False) -> Callable[..., Any]:
        """Return the gradient function of one microbatch; its totals are `ShardedValue`s.

        That of the `last` one takes the totals of those before, and adds its own. It reduces the
        gradients that a loop stacks in that loop.
        """
        again = last and self.plan.most_microbatches > 1
        whole: Callable[..., Any] = with_strategies(fun, self.plan.strategies, again=again)
        whole = early_reduction.last_gradient(whole) if last else whole
        whole = early_reduction.in_order(whole) if self._reduces_early else whole

        def run(params: PyTree, model_state: PyTree, rows: Rows, *totals: Any) -> Any:
            partitioner = self.partitioner(joint=self.task.coupled, sums=last, gradients=True)

            def wanted(shapes: tuple[Totals, PyTree]) -> tuple[Totals, PyTree]:
                none = jax.tree.map(lambda _: None, shapes)
                none_of_totals: Totals = none[0]
                layout = self.layout
                reduced = last or self.plan.zero >= 2
                goals = layout.shards if reduced else layout.shardings.params
                grads = self.expanded(trained(layout.frozen, goals))
                return none_of_totals._replace(grads=grads), none[1]

            own = (self._split if split else _whole) if self.task.coupled else _varying
            args = (self._parameters(params), _whole(model_state), own(rows), *totals)
            # Below ZeRO-2 a gradient stays a partial sum until all microbatches are added up, so
            # that it is reduced once per step.
            tight = self.plan.zero >= 2
            values, states = partition(whole, partitioner, args, wanted, tight=tight)
            states = jax.tree.map(partitioner.whole, states, is_leaf=is_sharded_value)
            self.warn(partitioner.records)
            return values, _arrays(states)

        return run

    def _reduced(self, totals: Totals) -> Totals:
        """Reduce sums over devices: gradients to their shards, others, which may be arrays of a
        metric, to every device."""
        leaves, structure = jax.tree.flatten(totals, is_leaf=is_sharded_value)
        exact = len(jax.tree.leaves(totals._replace(grads=()), is_leaf=is_sharded_value))
        goals = [TensorSharding.replicated(len(value.shape)) for value in leaves[:exact]]
        if exact < len(leaves):
            shards = self.expanded(self.layout.gradient_shards)
            goals += jax.tree.leaves(shards, is_leaf=is_sharding)
        values, partitioner = map(self._sum_over_rows, leaves), self.partitioner(gradients=True)
        return jax.tree.unflatten(structure, reduced([*values], goals, partitioner, exact=exact))

    def _sum_over_rows(self, value: ShardedValue) -> ShardedValue:
        """Return a device's sum as a partial sum over `data` if it depends on the device's rows."""
        over = {"data"} if value.data_varying and self._data > 1 else set()
        sharding = TensorSharding(value.sharding.dims, value.sharding.partial | over)
        return ShardedValue(value.array, value.shape, sharding)

    def warn(self, records: Sequence[Collective]) -> None:
        """Warn once of each tensor that is not sharded as its rule says, and of `warn_of`.

        Called after the gradient has been traced, because only then are the activations known.
        """
        new = {name: note for name, note in self._rules.notes.items() if name not in self._warned}
        self._warned.update(new)
        if new:
            lines = "".join(f"\n  {name}: {note}" for name, note in new.items())
            warn(f"some tensors are not split as the rules say:{lines}", errors.ShardingWarning)
        self.warn_of(records)

    def warn_of(self, records: Sequence[Collective]) -> None:
        """Warn once per source line where tensors are gathered for an operation without a rule."""
        sizes: dict[tuple[str, str], int] = {}
        for one in records:
            if one.without_rule is not None:
                sizes[one.without_rule] = sizes.get(one.without_rule, 0) + one.bytes
        for (operation, where), size in sizes.items():
            if f"{operation} at {where}" not in self._warned:
                self._warned.add(f"{operation} at {where}")
                cost = (
                    f"{size:,} bytes of its operands are gathered on every device each time, and "
                    "all devices compute the same. The result is right. "
                )
                text = (
                    f"`lax.scan` at {where} goes over tokens, which are split over devices: {cost}"
                    "Write a linear recurrence as `jax.lax.associative_scan`."
                    if operation == "scan"
                    else f"`{operation}` at {where} has no sharding rule: {cost}To split the work, "
                    "put the operation into a `jax.shard_map`; to avoid the gather, replicate its "
                    "operands by a rule in Plan(shardings=...)."
                )
                warn(text, errors.ShardingWarning)

    def _norm(self, grads: PyTree) -> Array:
        """Return the global norm of sharded gradients: one `psum` per set of mesh axes."""
        sums: dict[tuple[str, ...], Array] = {}
        for array, sharding in zip(
            jax.tree.leaves(grads),
            jax.tree.leaves(self.expanded(self.layout.gradient_shards), is_leaf=is_sharding),
            strict=True,
        ):
            # Squares of shards split over the same axes are added up before they are communicated.
            axes = self.axes.mesh_axes(sharding.axes)
            sums[axes] = sums.get(axes, 0) + jnp.sum(jnp.square(jnp.abs(array)))
        for axes, part in sums.items():
            if axes:
                sums[axes] = lax.psum(part, axes)
        return jnp.sqrt(sum(sums.values()))

    def _update(
        self, grads: PyTree, opt_state: PyTree, params: PyTree, loss: Array
    ) -> tuple[PyTree, PyTree]:
        partitioner = self.partitioner(shares_sums=True)
        args = (
            self._values(grads, self.layout.gradient_like, self.layout.gradient_shards),
            self._values(opt_state, self.layout.like.opt_state, self.layout.shardings.opt_state),
            self._parameters(params),
            _whole(loss),
        )
        goals = self.expanded((self.layout.shardings.params, self.layout.shardings.opt_state))
        values = partition(
            whole_update(self.optimizer, self.task.frozen), partitioner, args, lambda _: goals
        )
        self.warn_of_gathers(partitioner.records)
        # `warn_of_gathers` has reported all gathers over `data` already.
        self.warn_of([one for one in partitioner.records if not _over_replicas(one)])
        return _arrays(values)

    def warn_of_gathers(self, records: Sequence[Collective]) -> None:
        """Warn once of the sharded tensors that the update gathers, with their bytes."""
        sizes: dict[str, int] = {}
        for one in records:
            if one.operation and one.kind in _GATHERS and _over_replicas(one):
                sizes[one.operation] = sizes.get(one.operation, 0) + one.bytes * (one.trips or 1)
        if self.plan.zero and sizes and "update" not in self._warned:
            self._warned.add("update")
            lines = "".join(f"\n  {name}: {size:,} bytes" for name, size in sizes.items())
            warn(
                "the optimizer's update needs whole tensors that are sharded: each device "
                f"gathers them during the update of every step:{lines}",
                errors.ShardingWarning,
            )

    def evaluate(self) -> Callable[[PyTree, PyTree, PyTree, Chunk], Totals]:
        """Return `(params, model_state, rows, chunk) -> totals` on shards, without gradient."""
        fun = evaluation(self.task, self.plan.precision)

        def run(params: PyTree, model_state: PyTree, rows: Rows) -> Totals:
            args = (self._parameters(params), _whole(model_state), _varying(rows))
            partitioner = self.partitioner()
            values: Totals = partition(fun, partitioner, args)
            self.warn_of(partitioner.records)
            return values

        return device_evaluation(run, self._data, self._reduced)

    def predict(self) -> Callable[[PyTree, PyTree, PyTree], PyTree]:
        """Return `(params, model_state, inputs) -> outputs` on shards, for this device's rows."""
        fun = device_predict(self.task, self.plan.precision)

        def run(params: PyTree, model_state: PyTree, inputs: PyTree) -> PyTree:
            args = (self._parameters(params), _whole(model_state), _varying(inputs))

            def wanted(shapes: PyTree) -> PyTree:
                return jax.tree.map(lambda leaf: TensorSharding.replicated(len(leaf.shape)), shapes)

            partitioner = self.partitioner()
            values = partition(fun, partitioner, args, wanted)
            self.warn_of(partitioner.records)
            return _arrays(values)

        return run

    # --- Values -------------------------------------------------------------------------------

    def partitioner(
        self, *, stage: bool = False, gradients: bool = False, **more: bool
    ) -> Partitioner:
        """Return a `Partitioner` over all mesh axes, or with `stage` over those without `pipeline`.

        `gradients` says that the results are, and what devices add up for them; `more` is as of
        `Partitioner`.
        """
        return Partitioner(
            self.stage_axes if stage else self.axes, self._rules.find, mesh=self._mesh,
            bucket_bytes=self.plan.bucket_bytes,
            reduce_dtype=self.plan.reduce_dtype if gradients else None, **more,
        )  # fmt: skip

    def expanded(self, shardings: PyTree) -> PyTree:
        """Return shardings over mesh axes as shardings over the parts of these axes.

        An axis has parts where operators are split in several dims: `tensor=4` as 2 times 2.
        """
        return jax.tree.map(self.axes.expanded, shardings, is_leaf=is_sharding)

    def _split(self, rows: PyTree) -> PyTree:
        """Return this device's rows as shards of the rows of all devices."""
        return jax.tree.map(lambda array: shard_of_rows(array, self._data), rows)

    def _parameters(self, params: PyTree) -> PyTree:
        return self._values(
            params, self.layout.like.params, self.layout.shardings.params, is_param=True
        )

    def _values(
        self, arrays: PyTree, like: PyTree, shardings: PyTree, *, is_param: bool = False
    ) -> PyTree:
        return jax.tree.map(
            lambda array, leaf, one: ShardedValue(array, leaf.shape, one, is_param=is_param),
            arrays,
            like,
            self.expanded(shardings),
        )


_AXES = ("data", "pipeline", "context", "tensor")
_GATHERS = ("all-gather", "all-to-all")


def _over_replicas(one: Collective) -> bool:
    """Whether a collective runs over axes that ZeRO splits parameters over."""
    return not set(REPLICAS).isdisjoint(one.axes)


def _whole(arrays: PyTree, *, data_varying: bool = False) -> PyTree:
    return jax.tree.map(
        lambda a: ShardedValue(
            a, a.shape, TensorSharding.replicated(a.ndim), data_varying=data_varying
        ),
        arrays,
    )


_varying = functools.partial(_whole, data_varying=True)


def _arrays(values: PyTree) -> PyTree:
    return jax.tree.map(lambda value: value.array, values, is_leaf=is_sharded_value)


def _check_activations(plan: Plan, names: Sequence[str]) -> None:
    """Raise `PlanError` for a rule that splits a named activation over `data`."""
    by_data = [pattern for pattern, entries in plan.rules if "data" in _names(entries)]
    for pattern in by_data if plan.splits_experts else ():
        if named := fnmatch.filter(names, pattern):
            raise errors.PlanError(
                f"Plan(shardings={{{pattern!r}: ...}}): the activation {named[0]!r} is named, and "
                "activations are split over `data` by the batch. A rule over 'data' is one for "
                "parameters, the experts of a mixture: give its pattern their paths, or split the "
                "activation over 'tensor'."
            )


def _uses_tensor(plan: Plan, tags: set[Tag], jaxpr: Any) -> bool:
    """Return whether anything uses `tensor`: a rule, an annotation or the model's own code."""
    by_rule = any("tensor" in _names(entries) for _, entries in plan.rules)
    by_rule = by_rule or plan.strategies is not None
    by_mark = any(isinstance(tag, Split) for tag in tags)
    return by_rule or by_mark or any(map(_by_hand, all_equations(jaxpr)))


def _by_hand(eqn: Any) -> bool:
    """Whether the model splits over devices itself: the backward pass of a `custom_vjp` cannot be
    seen, and may; that of rows sent to experts, or left apart, does not, nor one of plurax's own,
    as of attention in blocks, or of JAX."""
    name, inner = eqn.primitive.name, inner_jaxprs(eqn)
    own = any(holds(jaxpr, which) for jaxpr in inner for which in (AT_EXPERTS, ROWS_APART))
    derivative = derivative_of(eqn) if name == "custom_vjp_call" else None
    if derivative is not None:
        module = getattr(derivative[0], "__module__", "")
        own = own or module.split(".")[0] in ("jax", "plurax")
    return name in ("shard_map", "sharding_constraint", "custom_vjp_call") and not own


def _names(entries: Sequence[Any]) -> list[Any]:
    return [name for e in entries for name in (e if isinstance(e, tuple) else (e,))]
