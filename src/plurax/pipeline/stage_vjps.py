"""The VJPs of all stages of a network, and the shapes of every buffer that the executor carries.

The executor's scan needs carry buffers of fixed shapes before its first tick, yet the shapes and
shardings of boundary activations and residuals are known only once the partitioner has evaluated
each stage. So `StageVjps` plans every stage once (`Partitioner.planning`), first forwards from
stage to stage, then backwards, and keeps the spec of each result: a `ShardedValue` without its
array. Nothing of this reaches the program.

Example: an embedding on stage 0, four equal layers, a head on stage 1; two devices, microbatches of
4 rows, width 16, 10 classes, everything float32:

    boundaries         stage 0: [f32[4, 16]]        the activation sent, one spec per tensor
    residuals          {0: [...], 1: [...]}         of the embedding and of the head
    layer_residuals    [f32[4, 16], f32[4, 64]]     of one layer; all layers have the same
    weight_residuals,  as the two above             what B stores for W, in schedules that compute
      layer_weight_residuals                        the parameters' gradients apart from B
    grads              {leaf: f32[16, 64], ...}     one microbatch's gradient of each parameter

Boundaries and residuals are `PackedValues`, which read and write them in buffers: those of one
layer, and a boundary of one tensor between layers, in buffers of their shapes; others in flat ones,
as long as the longest that shares them.

All layers share one `StageVjp`: the executor runs it in a loop over the stage's layers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from plurax.partition.partitioner import Partitioner
from plurax.partition.values import ShardedValue, shard_of_rows, zero_axes
from plurax.pipeline.packing import Packing
from plurax.pipeline.schedule import Schedule
from plurax.pipeline.stage_values import PackedValues, StageParams, replicated_value
from plurax.pipeline.stage_vjp import Inputs, StageVjp, Values
from plurax.pipeline.stages import StagedNetwork, StageFn
from plurax.sharding.spec import TensorSharding


class StageVjps:
    """The differentiated stages of a network, on the shards of one device.

    Construct it while tracing the body of a `jax.shard_map` over all mesh axes.

    **Arguments:** as `ScheduleExecutor`'s; `goals=None` builds forwards only.

    **Attributes:**

    - `stage_fns`: for each stage with a `StageFn`, its `StageVjp`; `layer`: a layer's `StageVjp`.
    - `boundaries`: for each stage the `PackedValues` of the tensors it passes to the next one.
    - `residuals`, `layer_residuals`: those of the residuals of each `StageFn` and of one layer.
    - `weight_residuals`, `layer_weight_residuals`: those of the weight residuals, which B stores
      for W.
    - `grads`: for each parameter the spec of one microbatch's gradient.
    - `aux`, `aux_structure`: specs and tree structure of the last stage's `aux`.
    - `backward`: whether there are backward passes.
    """

    def __init__(
        self,
        network: StagedNetwork,
        schedule: Schedule,
        trained: StageParams,
        rows: PyTree,
        partitioner: Partitioner,
        goals: Sequence[TensorSharding | None] | None,
        joint: int | None = None,
        states: Sequence[Array] = (),
    ) -> None:
        self.network, self.schedule, self.trained = network, schedule, trained
        self._all_rows, self._joint = rows, joint
        self.backward = goals is not None
        self.states = states
        self._goals = goals or [None] * len(trained.homes)
        self.stage_fns: dict[int, StageVjp] = {}
        self.layer: StageVjp | None = None
        self.partitioner = partitioner
        self._plan()

    def _plan(self) -> None:
        """Differentiate the stages, and record the specs of boundaries and residuals."""
        stages = self.network.stages
        rows = jax.eval_shape(lambda: self.rows(0))
        self.boundaries: list[PackedValues] = []
        self.residuals: dict[int, PackedValues] = {}
        self.weight_residuals: dict[int, PackedValues] = {}
        self.layer_residuals = PackedValues([])
        self.layer_weight_residuals = PackedValues([])
        self.grads: dict[int, ShardedValue] = {}
        x: Values = []
        like: Any = ()
        for stage in range(stages):
            stage_fn = self.network.stage_fns.get(stage)
            if stage_fn is not None and not stage_fn.after:
                x, like = self._plan_stage_fn(stage, stage_fn, x, like, rows)
            if self.network.layers is not None:
                x = self._plan_layer(x, like, rows)
            if stage_fn is not None and stage_fn.after:
                x, like = self._plan_stage_fn(stage, stage_fn, x, like, rows)
            # Each buffer is sent by itself, so several tensors are packed in one.
            apart = self.network.layers is not None and len(x) == 1
            self.boundaries.append(PackedValues(x, apart=apart))
        if self.network.layers is not None:
            # Every boundary has the sharding that a layer returns. If the embedding returns
            # another, its forward reshards the result.
            self.boundaries = [self.boundaries[0]] * stages
        if self.backward:
            self._plan_back(rows)

    def _plan_stage_fn(
        self,
        stage: int,
        stage_fn: StageFn,
        x: Values,
        like: Any,
        rows: Values,
    ) -> tuple[Values, Any]:
        """Differentiate a `StageFn`; return its output and the shapes of the whole tensors."""
        params, states = jax.eval_shape(
            lambda: (
                self.trained.used(stage_fn),
                [replicated_value(self.states[leaf]) for leaf in stage_fn.reads],
            )
        )
        rest = (self._rows_like(), _whole(states)) if states else self._rows_like()
        vjp = StageVjp(
            stage_fn.fun, _whole(params), like, rest, self.partitioner,
            frozen=self.trained.frozen_places(stage_fn.leaves),
            reads=len(stage_fn.reads), writes=len(stage_fn.writes),
        )  # fmt: skip
        self.stage_fns[stage] = vjp
        last = stage == self.network.stages - 1
        wanted = None if last else ()
        inputs = Inputs(params, x, [*rows, *states])
        with self.partitioner.planning():
            y, aux, residuals = vjp.forward(inputs, wanted, keep=self.backward)
        self.residuals[stage] = PackedValues(residuals)
        if last:
            self.aux = aux[: len(aux) - len(stage_fn.writes)]
            self.aux_structure = jax.tree.structure(vjp.aux[0] if stage_fn.writes else vjp.aux)
        return self._of_batch(y), vjp.y

    def _of_batch(self, values: Values) -> Values:
        """Return the specs of values as those of the batch, which a boundary's are.

        What is computed from parameters alone, such as latents repeated for each example, does not
        depend on a device's rows, but its cotangent does, and has the same spec.
        """
        with self.partitioner.planning():
            whole = [
                self.partitioner.move(value, value.sharding.without(zero_axes(value)))
                if value.is_param
                else value
                for value in values
            ]
        varying = self._joint is None
        return [dataclasses.replace(value, data_varying=varying, is_param=False) for value in whole]

    def _plan_layer(self, x: Values, like: Any, rows: Values) -> Values:
        """Differentiate a layer, at the first stage that has one; return its output."""
        if self.layer is not None:
            return x
        layers = self.network.layers
        assert layers is not None
        inputs = self._layer_inputs(x, rows)
        rest = (self._rows_like(), jax.ShapeDtypeStruct((), jnp.int32))
        self.layer = vjp = StageVjp(
            layers.fun, _whole(inputs.params), like, rest, self.partitioner,
            frozen=self.trained.frozen_places(layers.leaves),
        )  # fmt: skip
        # A layer's output is the next layer's input, so both need one sharding: take that of the
        # output, and find the residuals for an input in that sharding.
        with self.partitioner.planning():
            y, _, _ = vjp.forward(inputs, (), keep=False)
            shardings = [value.sharding for value in self._of_batch(y)]
            pairs = zip(x, shardings, strict=True)
            x = [self.partitioner.move(value, sharding) for value, sharding in pairs]
            y, _, residuals = vjp.forward(inputs._replace(x=x), shardings, keep=self.backward)
        self.layer_residuals = PackedValues(residuals, apart=True)
        return self._of_batch(y)

    def _layer_inputs(self, x: Values, rows: Values) -> Inputs:
        """Return the specs of a layer's inputs."""
        params, index = jax.eval_shape(
            lambda: (self.layer_values(0), replicated_value(jnp.int32(0)))
        )
        return Inputs(params, x, [*rows, index])

    def _plan_back(self, rows: Values) -> None:
        """Record the specs of the gradients and of the weight residuals.

        Runs after all forwards: a cotangent arrives in the sharding of the boundary activation.
        """

        def back(
            vjp: StageVjp, inputs: Inputs, residuals: PackedValues, cotangent: Values,
            shardings: list[TensorSharding], goals: Sequence[TensorSharding | None],
            leaves: Sequence[int],
        ) -> PackedValues:  # fmt: skip
            stored, weight_residuals = residuals.specs, list[ShardedValue]()
            with self.partitioner.planning():
                if self.schedule.split:
                    _, weight_residuals = vjp.input_gradient(inputs, stored, cotangent, shardings)
                    grads = vjp.weight_gradient(inputs, stored, weight_residuals, goals)
                else:
                    grads, _ = vjp.backward(inputs, stored, cotangent, shardings, goals)
            self.grads.update(zip(self.trained.trained(leaves), grads, strict=True))
            return PackedValues(weight_residuals)

        for stage, stage_fn in self.network.stage_fns.items():
            vjp, goals = self.stage_fns[stage], self.stage_fn_goals(stage)
            params, cotangent = jax.eval_shape(
                lambda s=stage_fn, v=vjp: (self.trained.used(s), self.loss_cotangent(v))
            )
            if stage < self.network.stages - 1:
                cotangent = self.boundaries[stage].specs
            inputs = Inputs(params, [], rows)
            self.weight_residuals[stage] = back(
                vjp, inputs, self.residuals[stage], cotangent, self.input_shardings(stage), goals,
                stage_fn.leaves,
            )  # fmt: skip
        layers = self.network.layers
        if layers is not None and self.layer is not None:
            boundary = self.boundaries[0]
            weight_residuals = back(
                self.layer, self._layer_inputs([], rows), self.layer_residuals, boundary.specs,
                boundary.shardings, self.layer_goals, layers.leaves,
            )  # fmt: skip
            self.layer_weight_residuals = weight_residuals.apart()

    def loss_cotangent(self, vjp: StageVjp) -> Values:
        """Return the cotangent of the loss, ones, with which the backward pass begins."""
        return [
            replicated_value(jnp.ones(leaf.shape, leaf.dtype)) for leaf in jax.tree.leaves(vjp.y)
        ]

    def _rows_like(self) -> PyTree:
        """Return the shapes of a microbatch's rows, with `joint` those of all devices together."""
        n = self._joint or 1
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((n * a.shape[1], *a.shape[2:]), a.dtype), self._all_rows
        )

    def rows(self, microbatch: Any) -> Values:
        """Return this device's rows of a microbatch; with `joint`, as shards of all devices'."""
        rows = [
            lax.dynamic_index_in_dim(leaf, microbatch, keepdims=False)
            for leaf in jax.tree.leaves(self._all_rows)
        ]
        if self._joint is None:
            return [
                ShardedValue(row, row.shape, TensorSharding.replicated(row.ndim), data_varying=True)
                for row in rows
            ]
        return [shard_of_rows(row, self._joint) for row in rows]

    def layer_values(self, row: Any) -> Values:
        """Return the parameters of a layer: row `row` of this device's stacked parameters."""
        layers = self.network.layers
        assert layers is not None
        values = []
        for leaf in layers.leaves:
            stacked = self.trained.values[leaf]
            array = lax.dynamic_index_in_dim(stacked.array, row, keepdims=False)
            sharding = TensorSharding(stacked.sharding.dims[1:])
            values.append(ShardedValue(array, stacked.shape[1:], sharding, is_param=True))
        return values

    @property
    def grad_packings(self) -> list[Packing]:
        """Return for each device the `Packing` of the gradients of the parameters only it has.

        Shapes are those of `grads`, dtypes those of the parameters.
        """
        return [
            Packing(
                [
                    jax.ShapeDtypeStruct(
                        self.grads[leaf].array.shape, self.trained.values[leaf].dtype
                    )
                    for leaf, home in enumerate(self.trained.homes)
                    if home == device and leaf not in self.trained.frozen
                ]
            )
            for device in range(self.schedule.devices)
        ]

    def input_shardings(self, stage: int) -> list[TensorSharding]:
        """Return the shardings in which a stage sends back the gradients of its input."""
        return self.boundaries[stage - 1].shardings if stage > 0 else []

    def stage_fn_goals(self, stage: int) -> list[TensorSharding | None]:
        """Return the goal shardings of the gradients of a `StageFn`'s parameters."""
        leaves = self.network.stage_fns[stage].leaves
        return [self._goals[leaf] for leaf in self.trained.trained(leaves)]

    @property
    def layer_goals(self) -> list[TensorSharding | None]:
        """Return the goal shardings of the gradients of one layer's parameters."""
        layers = self.network.layers
        leaves = layers.leaves if layers else ()
        return [self._goals[leaf] for leaf in self.trained.trained(leaves)]


def _whole(values: Values) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the whole tensors."""
    return [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]
