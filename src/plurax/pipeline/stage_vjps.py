"""The VJPs of all stages of a network, and the shapes of every buffer that the executor carries.

The executor's scan needs carry buffers of fixed shapes before its first tick, yet the shapes and
shardings of boundary activations and residuals are known only once the partitioner has evaluated
each stage. So `StageVjps` evaluates every stage once under `jax.eval_shape`, first forwards from
stage to stage, then backwards, and records a `ValueSpec` of each result. No operation of this probe
reaches the program.

Example: an embedding on stage 0, four equal layers, a head on stage 1; two devices, microbatches of
4 rows, width 16, 10 classes, everything float32:

    handed            stage 0: [f32[4, 16]]       the boundary activation, one spec per tensor
    kept              {0: [...], 1: [...]}        residuals of the embedding and of the head
    layer_kept        [f32[4, 16], f32[4, 64]]    residuals of one layer; all layers have the same
    left, layer_left  the same for W              only where the schedule splits the backward pass
    grads             {leaf: f32[16, 64], ...}    one microbatch's gradient of each parameter
    between           [Packing]                   handed, flat: {"float32": 64}
    kept_packings     {0: Packing, 1: Packing}    kept, flat; buffers as long as the longer of both

All layers share one `StageVjp`: the executor runs it in a loop over the stage's layers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from plurax.partition.partitioner import Partitioner
from plurax.partition.values import ShardedValue, shard_of_rows
from plurax.pipeline.packing import Packing
from plurax.pipeline.schedule import Schedule
from plurax.pipeline.stage_vjp import Inputs, StageVjp, Values
from plurax.pipeline.stages import StagedNetwork, StageFn
from plurax.pipeline.value_spec import StageParams, ValueSpec, made, shapes, whole_value
from plurax.sharding.spec import TensorSharding


class StageVjps:
    """The differentiated stages of a network, on the shards of one device.

    Construct it while tracing the body of a `jax.shard_map` over all mesh axes.

    **Arguments:** as `ScheduleExecutor`'s; `goals=None` builds forwards only.

    **Attributes:**

    - `edges`: for each stage with a `StageFn`, its `StageVjp`; `layer`: the `StageVjp` of a layer.
    - `handed`: for each stage the `ValueSpec`s of the tensors it passes to the next one.
    - `kept`, `layer_kept`: `ValueSpec`s of the residuals of each `StageFn` and of one layer.
    - `left`, `layer_left`: `ValueSpec`s of the weight residuals, which B stores for W.
    - `between`, `kept_packings`, `left_packings`, `layer_packings`: the `Packing`s of the above;
      `layer_packings` is a pair, of residuals and weight residuals.
    - `grads`: for each parameter the `ValueSpec` of one microbatch's gradient.
    - `aux`, `aux_structure`: `ValueSpec`s and tree structure of the last stage's `aux`.
    - `dividers`: the partitioners, which record the collectives.
    - `backward`: whether there are backward passes.
    """

    def __init__(
        self,
        network: StagedNetwork,
        schedule: Schedule,
        trained: StageParams,
        rows: PyTree,
        divider: Callable[[int], Partitioner],
        goals: Sequence[TensorSharding | None] | None,
        joint: int | None = None,
        states: Sequence[Array] = (),
    ) -> None:
        self.network, self.schedule, self.trained = network, schedule, trained
        self._all_rows, self._joint = rows, joint
        self.backward = goals is not None
        self.states = states
        self._goals = goals or [None] * len(trained.homes)
        self.edges: dict[int, StageVjp] = {}
        self.layer: StageVjp | None = None
        self.dividers: list[Partitioner] = []
        jax.eval_shape(lambda: self._probe(divider))
        for one in self.dividers:
            # The probe's collectives are not part of the program.
            one.records.clear()
        self._pack()

    def _probe(self, divider: Callable[[int], Partitioner]) -> None:
        """Differentiate the stages, and record the specs of boundaries and residuals."""
        m, stages = self.schedule.microbatches, self.network.stages
        rows = self.rows(jnp.zeros((), jnp.int32))
        self.handed: list[list[ValueSpec]] = []
        self.kept: dict[int, list[ValueSpec]] = {}
        self.left: dict[int, list[ValueSpec]] = {}
        self.layer_kept: list[ValueSpec] = []
        self.layer_left: list[ValueSpec] = []
        self.grads: dict[int, ValueSpec] = {}
        x: Values = []
        like: Any = ()
        for stage in range(stages):
            edge = self.network.edges.get(stage)
            if edge is not None and not edge.after:
                x, like = self._probe_edge(stage, edge, x, like, rows, divider(m))
            if self.network.layers is not None:
                # The most layers on a device: each runs once per microbatch.
                most = -(-self.network.layers.depth // stages) * self.schedule.chunks
                x = self._probe_layer(x, like, rows, divider(m * most))
            if edge is not None and edge.after:
                x, like = self._probe_edge(stage, edge, x, like, rows, divider(m))
            self.handed.append([ValueSpec.of(value) for value in x])
        if self.network.layers is not None:
            # Every boundary has the sharding that a layer returns. If the embedding returns
            # another, its forward reshards the result.
            self.handed = [self.handed[0]] * stages
        if self.backward:
            self._probe_back(rows)

    def _probe_edge(
        self, stage: int, edge: StageFn, x: Values, like: Any, rows: Values, divider: Partitioner
    ) -> tuple[Values, Any]:
        """Differentiate a `StageFn`; return its output and the shapes of the whole tensors."""
        params = self.trained.used(edge)
        states = [whole_value(self.states[leaf]) for leaf in edge.reads]
        rest = (self._rows_like(), shapes(states)) if states else self._rows_like()
        piece = StageVjp(
            edge.fun, shapes(params), like, rest, divider,
            reads=len(edge.reads), writes=len(edge.writes),
        )  # fmt: skip
        self.dividers.append(divider)
        self.edges[stage] = piece
        last = stage == self.network.stages - 1
        wanted = None if last else ()
        inputs = Inputs(params, x, [*rows, *states])
        y, aux, kept = piece.forward(inputs, wanted, keep=self.backward)
        self.kept[stage] = [ValueSpec.of(value) for value in kept]
        if last:
            self.aux = [ValueSpec.of(value) for value in aux[: len(aux) - len(edge.writes)]]
            self.aux_structure = jax.tree.structure(piece.aux[0] if edge.writes else piece.aux)
        return y, piece.y

    def _probe_layer(self, x: Values, like: Any, rows: Values, divider: Partitioner) -> Values:
        """Differentiate a layer, at the first stage that has one; return its output."""
        if self.layer is not None:
            return x
        layers = self.network.layers
        assert layers is not None
        params, number = self.layer_values(jnp.zeros((), jnp.int32)), whole_value(jnp.int32(0))
        rest = (self._rows_like(), jax.ShapeDtypeStruct((), jnp.int32))
        self.layer = piece = StageVjp(layers.fun, shapes(params), like, rest, divider)
        self.dividers.append(divider)
        inputs = Inputs(params, x, [*rows, number])
        # A layer's output is the next layer's input, so both need one sharding: take that of the
        # output, and find the residuals for an input in that sharding.
        y, _, _ = piece.forward(inputs, (), keep=False)
        shardings = [value.sharding for value in y]
        x = [piece.divider.move(a, sharding) for a, sharding in zip(x, shardings, strict=True)]
        y, _, kept = piece.forward(inputs._replace(x=x), shardings, keep=self.backward)
        self.layer_kept = [ValueSpec.of(value) for value in kept]
        return y

    def _probe_back(self, rows: Values) -> None:
        """Record the specs of the gradients and of the weight residuals.

        Runs after all forwards: a cotangent arrives in the sharding of the boundary activation.
        """

        def back(
            piece: StageVjp, inputs: Inputs, kept: list[ValueSpec], cotangent: Values,
            shardings: list[TensorSharding], goals: Sequence[TensorSharding | None],
            leaves: Sequence[int],
        ) -> list[ValueSpec]:  # fmt: skip
            there = made(kept)
            left: Values = []
            if self.schedule.split:
                _, left = piece.input_gradient(inputs, there, cotangent, shardings)
                grads = piece.weight_gradient(inputs, there, left, goals)
            else:
                grads, _ = piece.backward(inputs, there, cotangent, shardings, goals)
            self.grads.update(zip(leaves, map(ValueSpec.of, grads), strict=True))
            return [ValueSpec.of(value) for value in left]

        for stage, edge in self.network.edges.items():
            last = stage == self.network.stages - 1
            piece, inputs = self.edges[stage], Inputs(self.trained.used(edge), [], rows)
            cotangent = self.loss_cotangent(piece) if last else made(self.handed[stage])
            goals = self.edge_goals(stage)
            self.left[stage] = back(
                piece, inputs, self.kept[stage], cotangent, self.edge_shardings(stage), goals,
                edge.leaves,
            )  # fmt: skip
        layers = self.network.layers
        if layers is not None and self.layer is not None:
            number = whole_value(jnp.int32(0))
            inputs = Inputs(self.layer_values(jnp.int32(0)), [], [*rows, number])
            shardings = [form.sharding for form in self.handed[0]]
            goals = self.layer_goals
            self.layer_left = back(
                self.layer, inputs, self.layer_kept, made(self.handed[0]), shardings, goals,
                layers.leaves,
            )  # fmt: skip

    def _pack(self) -> None:
        """Lay boundary activations and residuals out in flat buffers."""

        def packing(forms: list[ValueSpec]) -> Packing:
            return Packing([form.local for form in forms])

        self.between = [packing(forms) for forms in self.handed[:-1]]
        self.kept_packings = {stage: packing(forms) for stage, forms in self.kept.items()}
        self.left_packings = {stage: packing(forms) for stage, forms in self.left.items()}
        self.layer_packings = packing(self.layer_kept), packing(self.layer_left)

    def loss_cotangent(self, piece: StageVjp) -> Values:
        """Return the cotangent of the loss, ones, with which the backward pass begins."""
        return [whole_value(jnp.ones(leaf.shape, leaf.dtype)) for leaf in jax.tree.leaves(piece.y)]

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
            assert stacked is not None
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
                        self.grads[leaf].local.shape, self.trained.forms[leaf].local.dtype
                    )
                    for leaf, home in enumerate(self.trained.homes)
                    if home == device
                ]
            )
            for device in range(self.schedule.devices)
        ]

    def edge_shardings(self, stage: int) -> list[TensorSharding]:
        """Return the shardings in which a stage sends back the gradients of its input."""
        return [form.sharding for form in self.handed[stage - 1]] if stage > 0 else []

    def edge_goals(self, stage: int) -> list[TensorSharding | None]:
        """Return the goal shardings of the gradients of a `StageFn`'s parameters."""
        return [self._goals[leaf] for leaf in self.network.edges[stage].leaves]

    @property
    def layer_goals(self) -> list[TensorSharding | None]:
        """Return the goal shardings of the gradients of one layer's parameters."""
        layers = self.network.layers
        return [self._goals[leaf] for leaf in layers.leaves] if layers else []
