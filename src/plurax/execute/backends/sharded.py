"""A step in which parameters, operators or the optimizer's state are split over devices.

What a device does, in the order in which it does it:

    for each microbatch: its share of loss and gradient        (`divide` over `tensor`)
        zero=2, 3: the gradient reduced to its shard
    zero=0, 1: the gradients added up over `data`; zero=1: to their shards
    the update, on the shards that the device has              (`divide` over `data` and `tensor`)
        zero=1, 2: the new parameters gathered

Everything here runs inside `jax.shard_map`, on the shards of one device.
"""

import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from plurax import errors, tree
from plurax.execute.evaluate import device_evaluation
from plurax.execute.gradient import Totals, evaluation, gradient
from plurax.execute.initial_state import new_state
from plurax.execute.layouts.state_shardings import StateShardings, stacks
from plurax.execute.mask import loss_arguments
from plurax.execute.predict import device_predict
from plurax.execute.reduction import reduced
from plurax.execute.rows import Rows
from plurax.execute.step import Step, make_step, whole_update
from plurax.execute.totals import BatchTotals, coupled_totals, device_totals, uneven_totals
from plurax.jaxpr.primitives import holds, inner_jaxprs
from plurax.mesh import within
from plurax.partition.partitioner import Partitioner, Record, partition
from plurax.partition.values import ShardedValue, is_sharded_value, shard_of_rows
from plurax.plan import Plan
from plurax.sharding.annotations import Named, Split, Tag
from plurax.sharding.axes import Axes
from plurax.sharding.rules import Rules, is_sharding
from plurax.sharding.spec import TensorSharding
from plurax.state import TrainState
from plurax.task import Task


def needs_partitioner(task: Task, plan: Plan) -> bool:
    """Whether a task is divided under a plan: where anything is split but independent rows."""
    return plan.partitioned or (task.coupled and plan.data > 1)


class ShardedBackend:
    """A task's functions on the shards of one device, and how the state lies.

    **Arguments:** `task`, `optimizer` and `plan`; `mesh`; `rows`, what the loss is given of one
    microbatch, as `microbatch` has it; in a pipeline, `dealt`, which deals out the layers of a
    state to stages, and for each parameter whether it is `layered`.

    **Attributes:** `state`, its `StateShardings`; `axes`, over which it is divided; `records`, the
    collectives of a step by its parts, once it has been traced.
    """

    def __init__(
        self,
        task: Task,
        optimizer: optax.GradientTransformation,
        plan: Plan,
        mesh: Mesh,
        rows: PyTree,
        *,
        dealt: Callable[[TrainState], TrainState] | None = None,
        layered: Sequence[bool] = (),
    ) -> None:
        if plan.batch_dim == "minor":
            raise errors.plan_minor_divided()
        self.task, self.optimizer, self.plan = task, optimizer, plan
        sizes = {axis: mesh.shape[axis] for axis in _AXES if mesh.shape[axis] > 1}
        self._mesh: Mesh | None = mesh
        self._data = mesh.shape["data"]
        rules = Rules(plan.shardings, {a: n for a, n in sizes.items() if a == "tensor"})
        fresh = functools.partial(new_state, task, optimizer)
        like: TrainState = jax.eval_shape(lambda: fresh(jax.random.key(0)))
        jaxpr = self._loss_jaxpr(like, rows)
        self._rules = rules
        stacked = stacks(jaxpr, like.params)
        if dealt is not None:
            like = jax.eval_shape(dealt, like)
        self.state = StateShardings(like, plan, rules, sizes, stacked, layered)
        tags = set(_tags(jaxpr))
        names = sorted({tag.name for tag in tags if isinstance(tag, Named)})
        self._rules.check_used(list(tree.named_leaves(like.params)), names)
        if sizes.get("tensor", 1) > 1 and not _uses_tensor(plan, tags, jaxpr):
            raise errors.plan_tensor_unused(
                plan.tensor, list(tree.named_leaves(like.params)), names
            )
        parts = _parts(tags, sizes.get("tensor", 1))
        self.axes = Axes(sizes, parts, permutes=plan.pipeline == 1)
        # What a stage does with its own tensors, it does on its own devices.
        inner = {axis: size for axis, size in sizes.items() if axis != "pipeline"}
        self.stage_axes = Axes(inner, parts, permutes=plan.pipeline == 1)
        self.records: dict[str, list[Record]] = {}
        self._said: set[str] = set()

    def _loss_jaxpr(self, like: TrainState, rows: PyTree) -> Any:
        loss = within(self._mesh, self.task.loss) if self._mesh else self.task.loss
        return jax.make_jaxpr(loss)(*loss_arguments(self.task, like, rows)).jaxpr

    def of(self, task: Task, optimizer: optax.GradientTransformation) -> "ShardedBackend":
        """The same for another member of a population, whose values may be traced ones."""
        other = copy.copy(self)
        other.task, other.optimizer = task, optimizer
        # Traced values belong to the mesh they were traced in: no other may stand around them.
        other._mesh = None
        return other

    def own(self, state: TrainState) -> TrainState:
        """This device's shards of a state that it has whole."""

        def cut(array: Array, lies: TensorSharding) -> Array:
            target = self.axes.expanded(lies)
            whole = ShardedValue(array, array.shape, TensorSharding.whole(array.ndim))
            return self.divider().move(whole, target).array

        return jax.tree.map(cut, state, self.state.lies)

    # --- What a device does -------------------------------------------------------------------

    def step(self, *, freeze: bool = False, split: bool = True) -> Step:
        """`(state, rows, count) -> (state, metrics)` on shards.

        The rows are those of this device, or with `split=False` of a coupled loss all.
        """
        return make_step(self._total(split), self._update, self._norm, freeze=freeze)

    def collectives(self) -> list[Record]:
        """What a step communicates, as it was planned; known once the step has been traced."""
        return [record for part in self.records.values() for record in part]

    def _total(self, split: bool = True) -> BatchTotals:
        kinds: list[Any] = []
        fun = self._gradient(kinds, split)
        microbatches = self.plan.microbatches

        def reduce(totals: Totals) -> Totals:
            return self._reduced(totals, kinds)

        if not self.task.coupled:
            return device_totals(fun, self._data, microbatches, reduce)
        if split:
            return coupled_totals(fun, microbatches, reduce, self._data)
        return uneven_totals(fun, microbatches, reduce)

    def _gradient(self, kinds: list[Any], split: bool) -> Callable[[PyTree, PyTree, Rows], Any]:
        """The gradient of one microbatch; how its results lie is left in `kinds`."""
        fun = gradient(self.task, self.plan.precision, remat=self.plan.remat)

        def run(params: PyTree, model_state: PyTree, rows: Rows) -> tuple[Totals, PyTree]:
            divider = self.divider(self.plan.microbatches, joint=self.task.coupled)

            def wanted(shapes: tuple[Totals, PyTree]) -> tuple[Totals, PyTree]:
                none = jax.tree.map(lambda _: None, shapes)
                totals: Totals = none[0]
                goals = self.state.shards if self.plan.zero >= 2 else self.state.lies.params
                return totals._replace(grads=self.expanded(goals)), none[1]

            own = (self._split if split else _whole) if self.task.coupled else _varying
            args = (self._parameters(params), _whole(model_state), own(rows))
            tight = self.plan.zero >= 2
            values, states = partition(fun, divider, args, wanted, tight=tight)
            states = jax.tree.map(divider.whole, states, is_leaf=is_sharded_value)
            self.records["gradient"] = divider.records
            kinds[:] = [
                jax.tree.map(lambda v: (v.shape, *v.kind), values, is_leaf=is_sharded_value)
            ]
            return _arrays(values), _arrays(states)

        return run

    def _reduced(self, totals: Totals, kinds: list[Any]) -> Totals:
        """What the microbatches summed up, summed over devices, in the shards that are wanted."""
        divider = self.divider()
        (kind,) = kinds
        whole = jax.tree.map(lambda _: TensorSharding(()), totals._replace(grads=()))
        targets = whole._replace(grads=self.expanded(self.state.shards))
        leaves, structure = jax.tree.flatten(totals)
        values = []
        for array, (shape, lies, data_varying, _) in zip(
            leaves, jax.tree.leaves(kind, is_leaf=_is_kind), strict=True
        ):
            terms = lies.partial | ({"data"} if data_varying and self._data > 1 else set())
            values.append(ShardedValue(array, shape, TensorSharding(lies.dims, terms)))
        sums = reduced(values, jax.tree.leaves(targets, is_leaf=is_sharding), divider)
        self.records["reduction"] = divider.records
        self.warn()
        return jax.tree.unflatten(structure, sums)

    def warn(self) -> None:
        """Say once what does not lie as its rule says; activations are known only now."""
        new = {name: note for name, note in self._rules.notes.items() if name not in self._said}
        self._said.update(new)
        if new:
            lines = "".join(f"\n  {name}: {note}" for name, note in new.items())
            warnings.warn(f"some tensors are not split as the rules say:{lines}",
                          errors.ShardingWarning, stacklevel=2)  # fmt: skip
        self.warn_of(self.collectives())

    def warn_of(self, records: Sequence[Record]) -> None:
        """Say of each place once where tensors are gathered for an operation without a rule."""
        sizes: dict[tuple[str, str], int] = {}
        for one in records:
            if one.without_rule is not None:
                sizes[one.without_rule] = sizes.get(one.without_rule, 0) + one.bytes
        for (operation, where), size in sizes.items():
            if f"{operation} at {where}" not in self._said:
                self._said.add(f"{operation} at {where}")
                text = errors.gathered_whole(operation, size, where)
                warnings.warn(text, errors.ShardingWarning, stacklevel=2)

    def _norm(self, grads: PyTree) -> Array:
        """The global norm of gradients that lie in shards."""
        sums: dict[tuple[str, ...], Array] = {}
        for array, lies in zip(
            jax.tree.leaves(grads),
            jax.tree.leaves(self.expanded(self.state.shards), is_leaf=is_sharding),
            strict=True,
        ):
            axes = self.axes.mesh_axes(lies.axes)
            sums[axes] = sums.get(axes, 0) + jnp.sum(jnp.square(jnp.abs(array)))
        divider = self.divider()
        for axes, part in sums.items():
            if axes:
                sums[axes] = lax.psum(part, axes)
                divider.record_all_reduce(self.axes.expand_all(axes), part)
        self.records["norm"] = divider.records
        return jnp.sqrt(sum(sums.values()))

    def _update(
        self, grads: PyTree, opt_state: PyTree, params: PyTree, loss: Array
    ) -> tuple[PyTree, PyTree]:
        divider = self.divider()
        args = (
            self._values(grads, self.state.like.params, self.state.shards),
            self._values(opt_state, self.state.like.opt_state, self.state.lies.opt_state),
            self._parameters(params),
            _whole(loss),
        )
        goals = self.expanded((self.state.lies.params, self.state.lies.opt_state))
        values = partition(whole_update(self.optimizer), divider, args, lambda _: goals)
        self.records["update"] = divider.records
        self.warn_of_gathers()
        # Over `data`, all that is gathered has been said, without a rule or not.
        self.warn_of([one for one in divider.records if "data" not in one.axes])
        return _arrays(values)

    def warn_of_gathers(self) -> None:
        """Say once which tensors in shards the update needs whole, and their bytes."""
        sizes: dict[str, int] = {}
        for one in self.records["update"]:
            if one.operation and one.kind in _GATHERS and "data" in one.axes:
                sizes[one.operation] = sizes.get(one.operation, 0) + one.bytes * one.trips
        if self.plan.zero and sizes and "update" not in self._said:
            self._said.add("update")
            lines = "".join(f"\n  {name}: {size:,} bytes" for name, size in sizes.items())
            warnings.warn(
                "the optimizer's update needs whole tensors that lie in shards: each device "
                f"gathers them, for the time of the update, in every step:{lines}",
                errors.ShardingWarning, stacklevel=2,
            )  # fmt: skip

    def evaluate(self) -> Callable[[PyTree, PyTree, PyTree, Any], Totals]:
        """`(params, model_state, rows, count) -> totals` on shards, without gradient."""
        kinds: list[Any] = []
        fun = evaluation(self.task, self.plan.precision)

        def run(params: PyTree, model_state: PyTree, rows: Rows) -> Totals:
            args = (self._parameters(params), _whole(model_state), _varying(rows))
            divider = self.divider()
            values = partition(fun, divider, args)
            self.warn_of(divider.records)
            kinds[:] = [
                jax.tree.map(lambda v: (v.shape, *v.kind), values, is_leaf=is_sharded_value)
            ]
            return _arrays(values)

        def reduced(totals: Totals) -> Totals:
            (kind,) = kinds
            return jax.tree.map(self._summed, totals, kind)

        return device_evaluation(run, self._data, reduced)

    def _summed(self, array: Array, kind: Any) -> Array:
        _, lies, data_varying, _ = kind
        axes = set(self.axes.mesh_axes(sorted(lies.partial)))
        axes |= {"data"} if data_varying and self._data > 1 else set()
        return lax.psum(array, tuple(sorted(axes))) if axes else array

    def predict(self) -> Callable[[PyTree, PyTree, PyTree], PyTree]:
        """`(params, model_state, inputs) -> outputs` on shards; a device has its own rows."""
        fun = device_predict(self.task, self.plan.precision)

        def run(params: PyTree, model_state: PyTree, inputs: PyTree) -> PyTree:
            args = (self._parameters(params), _whole(model_state), _varying(inputs))

            def wanted(shapes: PyTree) -> PyTree:
                return jax.tree.map(lambda leaf: TensorSharding.whole(len(leaf.shape)), shapes)

            divider = self.divider()
            values = partition(fun, divider, args, wanted)
            self.warn_of(divider.records)
            return _arrays(values)

        return run

    # --- Values -------------------------------------------------------------------------------

    def divider(self, trips: int = 1, *, stage: bool = False, joint: bool = False) -> Partitioner:
        """One that walks a function over all axes of the plan, or over those of a stage."""
        axes = self.stage_axes if stage else self.axes
        return Partitioner(
            axes, self._rules.find, mesh=self._mesh, joint=joint,
            bucket_bytes=self.plan.bucket_bytes, trips=trips,
        )  # fmt: skip

    def expanded(self, lies: PyTree) -> PyTree:
        """Shardings over mesh axes as such over the axes they are used in."""
        return jax.tree.map(self.axes.expanded, lies, is_leaf=is_sharding)

    def _split(self, rows: PyTree) -> PyTree:
        """This device's rows as shards of those of all devices."""
        return jax.tree.map(lambda array: shard_of_rows(array, self._data), rows)

    def _parameters(self, params: PyTree) -> PyTree:
        return self._values(params, self.state.like.params, self.state.lies.params, is_param=True)

    def _values(
        self, arrays: PyTree, like: PyTree, lies: PyTree, *, is_param: bool = False
    ) -> PyTree:
        return jax.tree.map(
            lambda array, leaf, one: ShardedValue(array, leaf.shape, one, is_param=is_param),
            arrays,
            like,
            self.expanded(lies),
        )


_AXES = ("data", "pipeline", "tensor")
_GATHERS = ("all-gather", "all-to-all")


def microbatch(batch: PyTree, plan: Plan, *, coupled: bool = False) -> PyTree:
    """The rows that a loss is given at a time, as `jax.ShapeDtypeStruct`s.

    Those of one device; of all devices together where the loss couples examples.
    """
    devices = 1 if coupled else plan.data

    def part(leaf: Any) -> jax.ShapeDtypeStruct:
        rows = plan.padded_size(leaf.shape[0]) // (devices * plan.microbatches)
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)

    return jax.tree.map(part, batch)


def _whole(arrays: PyTree) -> PyTree:
    return jax.tree.map(lambda a: ShardedValue(a, a.shape, TensorSharding.whole(a.ndim)), arrays)


def _varying(arrays: PyTree) -> PyTree:
    return jax.tree.map(
        lambda a: ShardedValue(a, a.shape, TensorSharding.whole(a.ndim), data_varying=True), arrays
    )


def _arrays(values: PyTree) -> PyTree:
    return jax.tree.map(lambda value: value.array, values, is_leaf=is_sharded_value)


def _is_kind(node: Any) -> bool:
    return isinstance(node, tuple) and len(node) == 4 and isinstance(node[1], TensorSharding)


def _tags(jaxpr: Any) -> Iterator[Tag]:
    """All marks of a function."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "annotate":
            yield eqn.params["tag"]
        for inner in inner_jaxprs(eqn):
            yield from _tags(inner)


def _uses_tensor(plan: Plan, tags: set[Tag], jaxpr: Any) -> bool:
    """Whether anything splits work over `tensor`: a rule, a mark, or the model by itself."""
    by_rule = any("tensor" in _names(entries) for _, entries in plan.shardings)
    by_mark = any(isinstance(tag, Split) for tag in tags)
    # The backward pass of a custom_vjp cannot be seen here; it may use the axis itself.
    by_hand = ("shard_map", "sharding_constraint", "custom_vjp_call", "custom_vjp_call_jaxpr")
    return by_rule or by_mark or any(holds(jaxpr, name) for name in by_hand)


def _names(entries: Sequence[Any]) -> list[Any]:
    return [name for e in entries for name in (e if isinstance(e, tuple) else (e,))]


def _parts(tags: set[Tag], tensor: int) -> dict[str, tuple[int, ...]]:
    """The parts in which `tensor` is used, should an operator be split in several dims."""
    ways = {n for tag in tags if isinstance(tag, Split) for n in tag.num_shards.values()}
    if tensor == 1 or ways <= {1, tensor}:
        return {}
    parts, left, factor = [], tensor, 2
    while left > 1:
        while left % factor == 0:
            parts.append(factor)
            left //= factor
        factor += 1
    return {"tensor": tuple(parts)}
