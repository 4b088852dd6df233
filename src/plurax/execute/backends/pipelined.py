"""A training step whose network is cut into stages on the devices of a pipeline.

`ScheduleExecutor` runs forwards and backwards tick by tick, `StageUpdate` the optimizer. This
backend connects them to a task: it builds the staged network, gives the executor each device's
parameters and rows, reduces the gradient sums, and updates every parameter on the device that has
it. Over `data` and `tensor` it uses a `ShardedBackend`. One device runs, inside `jax.shard_map`:

    for each tick of the schedule: one action, send and receive    `ScheduleExecutor`
    reduce each gradient sum once over `data`                      `reduced`
    update this device's parameters                                `StageUpdate`

Example: `Plan(data=2, pipeline=2, microbatches=4)`, an embedding `f32[100, 16]` that the head
shares, 6 layers with kernels stacked as `f32[6, 16, 16]`, and the head's bias `f32[100]`:

    parameter    on device                  gradient sum of a device          reduced over
    embedding    all (two stages use it)    "shared_sums", f32[100, 16]       data, pipeline
    kernels      3 layers on each           "layer_sums", f32[3, 16, 16]      data
    bias         1 only                     "homed_sums", f32[100] on both    data

Device 0 carries a buffer of the bias's length too, because an SPMD program has one shape for all;
only device 1 reads it. Microbatches do not add reductions: each gradient is reduced once per step.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Int, PyTree

from plurax.execute.backends.backend import Backend
from plurax.execute.backends.sharded import ShardedBackend
from plurax.execute.gradient import Totals
from plurax.execute.initial_state import initial, new_state
from plurax.execute.layouts.staged_state import (
    NO_GRADIENT,
    ON_ALL,
    Staged,
    StagedState,
    StagePlacement,
    assign_layers,
    stacked_leaves,
)
from plurax.execute.reduction import reduced
from plurax.execute.rows import Chunk, Rows, StepKey, index_device_rows
from plurax.execute.stage_networks import (
    evaluating_network,
    layer_assignment,
    predicting_network,
    training_network,
)
from plurax.execute.step import Gradients, Metrics, make_apply, make_gradients, whole_update
from plurax.execute.totals import BatchTotals, round_robin
from plurax.freezing import frozen_leaves, trained
from plurax.partition.partitioner import Partitioner
from plurax.partition.values import ShardedValue
from plurax.pipeline.executor import ScheduleExecutor
from plurax.pipeline.layer_rows import on_layer_rows
from plurax.pipeline.packing import Packing, zeros
from plurax.pipeline.schedule import check_forwards_in_order, make_schedule
from plurax.pipeline.stage_update import StageTensor, StageUpdate, broadcast_from_stage
from plurax.pipeline.stage_values import StageParams
from plurax.pipeline.stages import StagedNetwork
from plurax.plan import Plan
from plurax.sharding.rules import is_sharding
from plurax.sharding.spec import TensorSharding
from plurax.state import TrainState
from plurax.task import Task
from plurax.tree import sum_dtype


class PipelinedBackend(Backend):
    """A task's functions on the stages of one device, and the placement of the state.

    **Arguments:** `task`, `optimizer`, `plan`, `mesh` and `rows`, as `ShardedBackend`'s.

    **Attributes:** `schedule`; `layout`, the `StagedState`; `parts_after`, for each stage with a
    part of its own (see `StageFn`) whether its layers come before it.

    Raises `PlanError` if the network cannot be cut into as many stages or the schedule is not
    legal, and if a stateful model's schedule runs forwards out of order.
    """

    layout: StagedState

    def __init__(
        self,
        task: Task,
        optimizer: optax.GradientTransformation,
        plan: Plan,
        mesh: Mesh,
        rows: PyTree,
    ) -> None:
        self.task, self.optimizer, self.plan, self._mesh = task, optimizer, plan, mesh
        self.manual_axes = frozenset(mesh.axis_names)
        self.schedule = make_schedule(
            plan.schedule, plan.pipeline, plan.most_microbatches, plan.virtual_stages
        )
        assignment = layer_assignment(task.stack, plan)
        layered = self._layered(task)
        state = jax.eval_shape(functools.partial(new_state, task, optimizer), jax.random.key(0))
        stacked = stacked_leaves(state, layered)
        self._base = ShardedBackend(
            task, optimizer, plan, mesh, rows,
            order_layers=lambda state: assign_layers(state, stacked, assignment), layered=layered,
        )  # fmt: skip
        count = len(layered)
        size = jax.tree.leaves(rows)[0].shape[0]
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), size))
        mask: Any = jax.ShapeDtypeStruct((size,), jnp.bool_)
        self._like = jax.eval_shape(functools.partial(initial, task), jax.random.key(0))
        # Cut the loss once now: which stages use a parameter decides on which device it is stored.
        network = training_network(task, plan, self._like, Rows(rows, keys, mask), self._stage())
        if any(stage_fn.writes for stage_fn in network.stage_fns.values()):
            check_forwards_in_order(self.schedule)
        self.parts_after = {stage: fn.after for stage, fn in network.stage_fns.items()}
        homes = network.homes(count, plan.pipeline)
        uses = [
            [leaf in stage_fn.leaves for stage_fn in network.stage_fns.values()]
            for leaf in range(count)
        ]
        self._many = [sum(used) > 1 for used in uses]
        self.layout = StagedState(self._base.layout, homes, assignment, stacked, mesh)
        self._layers = layered

    @staticmethod
    def _layered(task: Task) -> list[bool]:
        """Return for each parameter whether layers are stacked in it."""
        params, _ = jax.eval_shape(functools.partial(initial, task), jax.random.key(0))
        if task.stack is None:
            return [False] * len(jax.tree.leaves(params))
        marked = {
            name: jax.tree.map(lambda _, yes=name == "blocks": yes, part)
            for name, part in params.items()
        }
        return jax.tree.leaves(marked)

    def of(self, task: Task, optimizer: optax.GradientTransformation) -> "PipelinedBackend":
        """Return a copy for another member of a population."""
        other = copy.copy(self)
        other.task, other.optimizer = task, optimizer
        other._base = self._base.of(task, optimizer)
        return other

    def own(self, state: TrainState) -> TrainState:
        """Return this device's part of a replicated state."""
        return self.layout.staged(self._base.own(self.layout.by_device(state)))

    # --- What a device does -------------------------------------------------------------------

    def gradients(self, *, split: bool = True) -> Callable[..., Gradients]:
        """Return `(state, rows, count, first=None) -> gradients`, each reduced to its stage."""
        assert split, "microbatches of a pipeline have one size"
        return make_gradients(self._total())

    def apply(
        self, *, freeze: bool = False, select: bool = False
    ) -> Callable[[TrainState, Gradients], tuple[TrainState, Metrics]]:
        """Return `(state, gradients) -> (state, metrics)`, each parameter where it is stored."""
        return make_apply(
            self._update, self.layout.gradient_dtypes, self._norm, freeze=freeze, select=select
        )

    def _total(self) -> BatchTotals:
        """Return the function of a whole batch's totals and gradients, reduced."""

        def local(
            params: PyTree,
            model_state: PyTree,
            batch: PyTree,
            key: StepKey,
            count: Int[Array, ""],
        ) -> tuple[Totals, PyTree]:
            coupled = self.task.coupled
            rows = index_device_rows(batch, key, count, (1,) * self.plan.data)
            rows = self._microbatches(rows, coupled=coupled)
            like = _first(rows, self.plan.data if coupled else 1)
            network = training_network(self.task, self.plan, self._like, like, self._stage())
            partitioner = self._stage(joint=coupled, gradients=True)
            run = ScheduleExecutor(
                network, self.schedule, self._trained(params), rows, partitioner, self._goals(),
                joint=self.plan.data if coupled else None, live=count if coupled else None,
                states=jax.tree.leaves(model_state),
            )  # fmt: skip
            sums = run()
            self._base.warn(partitioner.records)
            return self._reduced(run, sums), self._broadcast(network, sums["states"], model_state)

        return local

    def _broadcast(self, network: StagedNetwork, states: list[Array], like: PyTree) -> PyTree:
        """Broadcast each leaf of the model state from the device of its stage to all stages."""
        here = lax.axis_index("pipeline")
        for stage, stage_fn in network.stage_fns.items():
            # A broadcast is a sum with zeros, and random keys cannot be added: pack them as uint32.
            packing = Packing([states[leaf] for leaf in stage_fn.writes])
            own = packing.write(zeros(packing.shapes), [states[leaf] for leaf in stage_fn.writes])
            mine = here == stage % self.plan.pipeline
            broadcast = broadcast_from_stage(
                {n: jnp.where(mine, a, jnp.zeros_like(a)) for n, a in own.items()}
            )
            for leaf, array in zip(stage_fn.writes, packing.read(broadcast), strict=True):
                states[leaf] = array
        return jax.tree.unflatten(jax.tree.structure(like), states)

    def _microbatches(self, rows: PyTree, *, coupled: bool = False) -> PyTree:
        """Reshape rows `(size, ...)` to `(microbatches, size / microbatches, ...)`.

        For a coupled loss every device has its part of the same examples of each microbatch.
        """
        m = self.plan.most_microbatches
        if coupled:
            return jax.tree.map(lambda leaf: round_robin(leaf, m), rows)
        return jax.tree.map(lambda leaf: leaf.reshape(m, len(leaf) // m, *leaf.shape[1:]), rows)

    def _stage(self, *, joint: bool = False, gradients: bool = False) -> Partitioner:
        return self._base.partitioner(stage=True, joint=joint, gradients=gradients)

    def _goals(self) -> list[TensorSharding | None]:
        """Return the sharding in which each parameter's gradient is summed over microbatches.

        With ZeRO-2 and 3 that is the shard over `data`. Otherwise None, which keeps the sharding in
        which a microbatch's gradient is computed.
        """
        base, zero = self._base, self.plan.zero
        tree = base.layout.shards if zero >= 2 else base.layout.shardings.params
        goals: list[TensorSharding | None] = []
        for sharding, layer, many in zip(
            jax.tree.leaves(tree, is_leaf=is_sharding), self._layers, self._many, strict=True
        ):
            one = base.stage_axes.expanded(TensorSharding(sharding.dims[1:]) if layer else sharding)
            # Stages that share a parameter add to one sum, so they need one sharding.
            goals.append(one if zero >= 2 or many else None)
        return goals

    def _trained(self, params: Staged) -> StageParams:
        """Return this device's parameters for the executor."""
        base, homes = self._base, self.layout.params
        shardings = jax.tree.leaves(
            base.expanded(base.layout.shardings.params), is_leaf=is_sharding
        )
        values = []
        for index, (array, leaf, sharding) in enumerate(
            zip(
                homes.values(params),
                jax.tree.leaves(base.layout.like.params),
                shardings,
                strict=True,
            )
        ):
            home, at = homes.locate(index)
            # Every device traces all stages, so it needs the specs of all parameters.
            here = homes.packings[home].leaves[at] if array is None else array
            values.append(ShardedValue(here, leaf.shape, sharding, is_param=True))
        is_frozen = frozen_leaves(self.task.frozen, base.layout.like.params)
        frozen = frozenset(index for index, yes in enumerate(is_frozen) if yes)
        return StageParams(values, homes.devices, homes.packings, params.stage_buffers, frozen)

    # --- Reduction ----------------------------------------------------------------------------

    def _reduced(self, run: ScheduleExecutor, sums: dict[str, Any]) -> Totals:
        """Reduce the executor's sums over `data`, those of shared parameters over `pipeline` too.

        Returns totals whose `grads` are `Staged`: each gradient in its shard, on its device.
        """
        base, homes = self._base, self.layout.shards
        targets = jax.tree.leaves(base.expanded(base.layout.shards), is_leaf=is_sharding)
        values, goals = [], []
        for array, spec in zip(sums["aux"], run.vjps.aux, strict=True):
            values.append(self._terms(array, spec, {"pipeline"}))
            goals.append(TensorSharding.replicated(array.ndim))
        on_all = [index for index, home in enumerate(homes.homes) if home == ON_ALL]
        for index in on_all:
            if self._layers[index]:
                # The spec is that of one layer; the sums have a leading dim over all layers, split
                # over `pipeline`.
                array, spec = sums["layer_sums"][index], run.vjps.grads[index]
                whole = jax.tree.leaves(base.layout.like.params)[index].shape
                one = TensorSharding((("pipeline",), *spec.sharding.dims), spec.sharding.partial)
                stacked = dataclasses.replace(spec, shape=whole, sharding=one)
                values.append(self._terms(array, stacked, set()))
            else:
                values.append(
                    self._terms(sums["shared_sums"][index], run.vjps.grads[index], {"pipeline"})
                )
            goals.append(targets[index])
        count = len(run.vjps.aux)
        found = reduced(values, goals, base.partitioner(gradients=True), exact=count)
        totals: Totals = jax.tree.unflatten(run.vjps.aux_structure, found[:count])
        stage_buffers = self._reduce_stage_buffers(run, sums["homed_sums"], targets)
        return totals._replace(grads=Staged(tuple(found[count:]), stage_buffers))

    def _reduce_stage_buffers(
        self,
        run: ScheduleExecutor,
        sums: Any,
        targets: Sequence[TensorSharding],
    ) -> dict[str, Array]:
        """Reduce over `data` the gradient sums of parameters that one stage's device has.

        Runs in that device's branch; returns the buffers that device has.
        """
        homes, partitioner = self.layout.shards, self._stage(gradients=True)
        packings = run.vjps.grad_packings

        def branch(device: int) -> dict[str, Array]:
            own = homes.own(device)
            arrays = packings[device].read(sums)
            values = [
                self._terms(array, run.vjps.grads[index], set())
                for array, index in zip(arrays, own, strict=True)
            ]
            found = reduced(values, [targets[index] for index in own], partitioner)
            return homes.written(device, found, wide=True)

        return homes.on_each(branch) if homes.lengths else {}

    def _terms(self, array: Array, spec: ShardedValue, more: set[str]) -> ShardedValue:
        """Return a device's sum as a partial sum over `data`, if it has varied rows, and `more`."""
        terms = spec.sharding.partial | more
        terms |= {"data"} if spec.data_varying and self.plan.data > 1 else set()
        return ShardedValue(array, spec.shape, TensorSharding(spec.sharding.dims, frozenset(terms)))

    # --- The update ---------------------------------------------------------------------------

    def _norm(self, grads: Staged) -> Array:
        """Return the global norm of gradients' sums; only partial squared norms cross stages."""

        def norm(*leaves: Array) -> list[Array]:
            return [jnp.sqrt(sum(jnp.sum(jnp.square(jnp.abs(leaf))) for leaf in leaves))]

        partitioner, layout = self._base.partitioner(), self._base.layout
        like = jax.tree.map(lambda p: p.update(dtype=sum_dtype(p.dtype)), layout.like.params)
        inputs = self._inputs(grads, self.layout.shards, like, layout.shards)
        there = StageUpdate(norm, inputs, [None], partitioner, self._stage(), self.plan.pipeline)
        (found,), _ = there([TensorSharding(())], None)
        assert found is not None
        return found.array

    def _update(
        self, grads: Staged, opt_state: Staged, params: Staged, loss: Array
    ) -> tuple[Staged, Staged]:
        """Run the optimizer's update, each parameter on the device that has it."""
        base, layout = self._base, self.layout
        partitioner = base.partitioner(shares_sums=True)
        stage = base.partitioner(stage=True, shares_sums=True)
        like, shardings = base.layout.like, base.layout.shardings
        inputs = [
            *self._inputs(grads, layout.shards, like.params, base.layout.shards),
            *self._inputs(opt_state, layout.opt_state, like.opt_state, shardings.opt_state),
            *self._inputs(params, layout.params, like.params, shardings.params),
            ShardedValue(loss, (), TensorSharding(())),
        ]
        whole = whole_update(self.optimizer, self.task.frozen)
        structure = jax.tree.structure(
            (base.layout.gradient_like, like.opt_state, like.params, loss)
        )

        def fun(*leaves: Array) -> list[Any]:
            return jax.tree.leaves(whole(*jax.tree.unflatten(structure, leaves)))

        on_rows: Callable[..., list[Any]] = fun
        if not layout.assignment.in_order:
            of_params, of_state = layout.stacked
            stacked = (trained(self.task.frozen, of_params), of_state, of_params, False)
            results = jax.tree.leaves((of_params, of_state))
            on_rows = on_layer_rows(fun, layout.assignment, jax.tree.leaves(stacked), results)
        homes = [*layout.params.devices, *layout.opt_state.devices]
        goals = jax.tree.leaves(
            base.expanded((shardings.params, shardings.opt_state)), is_leaf=is_sharding
        )
        count = len(layout.params.homes)

        def written(device: int, arrays: list[Array]) -> tuple[Any, Any]:
            cut = len(layout.params.own(device))
            return (
                layout.params.written(device, arrays[:cut]),
                layout.opt_state.written(device, arrays[cut:]),
            )

        there = StageUpdate(on_rows, inputs, homes, partitioner, stage, self.plan.pipeline)
        common, stage_buffers = there(goals, written)
        base.warn_of_gathers(partitioner.records + stage.records)

        def rest(values: Sequence[ShardedValue | None]) -> tuple[Array, ...]:
            return tuple(value.array for value in values if value is not None)

        return Staged(rest(common[:count]), stage_buffers[0]), Staged(
            rest(common[count:]), stage_buffers[1]
        )

    def _inputs(
        self, staged: Staged, homes: StagePlacement, like: PyTree, shardings: PyTree
    ) -> list[ShardedValue | StageTensor]:
        """Return the leaves of a staged tree as inputs of a `StageUpdate`."""
        inputs: list[ShardedValue | StageTensor] = []
        shardings = jax.tree.leaves(self._base.expanded(shardings), is_leaf=is_sharding)
        for index, (array, leaf, sharding) in enumerate(
            zip(homes.values(staged), jax.tree.leaves(like), shardings, strict=True)
        ):
            if array is not None:
                inputs.append(ShardedValue(array, leaf.shape, sharding))
                continue
            home, at = homes.locate(index)
            if home == NO_GRADIENT:
                continue

            def read(
                home: int = home, at: int = at, leaf: Any = leaf, sharding: Any = sharding
            ) -> ShardedValue:
                (there,) = homes.packings[home].read(staged.stage_buffers, [at])
                return ShardedValue(there, leaf.shape, sharding)

            inputs.append(StageTensor(home, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), read))
        return inputs

    # --- Evaluating and predicting ------------------------------------------------------------

    def evaluate(self) -> Callable[[PyTree, PyTree, PyTree, Chunk], Totals]:
        """Return `(params, model_state, rows, chunk) -> totals` on one device, without gradient.

        If the task's evaluation has other stages than its loss, every device gathers all parameters
        and evaluates the whole network.
        """

        def local(params: Staged, model_state: PyTree, batch: PyTree, chunk: Chunk) -> Totals:
            key = StepKey(jax.random.key(0), chunk.first)
            rows = index_device_rows(batch, key, chunk.examples, (1,) * self.plan.data)
            rows = self._microbatches(rows)
            network = evaluating_network(
                self.task, self.plan, self._like, _first(rows), self._stage()
            )
            if not self._in_stages(network):
                whole = self.layout.params.gathered(params)
                return self._base.evaluate()(whole, model_state, batch, chunk)
            run = self._forward(network, params, rows, model_state)
            values = [
                self._terms(array, spec, {"pipeline"})
                for array, spec in zip(run()["aux"], run.vjps.aux, strict=True)
            ]
            goals = [TensorSharding.replicated(value.array.ndim) for value in values]
            found = reduced(values, goals, self._base.partitioner())
            totals: Totals = jax.tree.unflatten(run.vjps.aux_structure, found)
            return totals

        return local

    def predict(self) -> Callable[[PyTree, PyTree, PyTree], PyTree]:
        """Return `(params, model_state, inputs) -> outputs` on one device, for its rows.

        If the task's prediction has other stages than its loss, every device gathers all parameters
        and predicts with the whole network.
        """

        def local(params: Staged, model_state: PyTree, inputs: PyTree) -> PyTree:
            rows = self._microbatches(inputs)
            network = predicting_network(
                self.task, self.plan, self._like, _first(rows), self._stage()
            )
            if not self._in_stages(network):
                whole = self.layout.params.gathered(params)
                return self._base.predict()(whole, model_state, inputs)
            run = self._forward(network, params, rows, model_state, stacked=True)
            # Only the last stage has outputs; the other devices have zeros.
            outputs = broadcast_from_stage(run()["aux"])
            return jax.tree.unflatten(
                run.vjps.aux_structure, [jax.lax.collapse(a, 0, 2) for a in outputs]
            )

        return local

    def _in_stages(self, network: StagedNetwork | None) -> TypeGuard[StagedNetwork]:
        """Return whether `evaluate` or `predict` finds each stage's parameters on its device.

        It may be cut at other places than the loss, by which the parameters were placed.
        """
        homes = self.layout.params.devices
        return network is not None and network.uses_at(homes, self.plan.pipeline)

    def _forward(
        self,
        network: StagedNetwork,
        params: Staged,
        rows: PyTree,
        model_state: PyTree,
        *,
        stacked: bool = False,
    ) -> ScheduleExecutor:
        """Return an executor of the schedule's forwards alone."""
        return ScheduleExecutor(
            network, self.schedule.forwards(), self._trained(params), rows, self._stage(),
            stacked=stacked, states=jax.tree.leaves(model_state),
        )  # fmt: skip


def _first(rows: PyTree, devices: int = 1) -> PyTree:
    """Return the shapes of one microbatch's rows, of `devices` devices together."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((devices * leaf.shape[1], *leaf.shape[2:]), leaf.dtype),
        rows,
    )
