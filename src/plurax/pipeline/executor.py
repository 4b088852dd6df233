"""Run a pipeline schedule on each device, inside `jax.shard_map`.

All devices run one SPMD program, yet in each tick each device runs different actions of the
schedule (`pipeline/schedule.py`), on different microbatches and stages. The actions, and the buffer
slots that they read and write, are therefore data: an int32 table `(ticks, devices, kinds, fields)`
(`pipeline/slots.py`). One `lax.scan` over the ticks reads this device's rows and runs:

    for each tick:
        F: read x, the boundary activation; apply the stage; store the residuals in their slot
        B: read the cotangent; apply the stage's VJP; add the parameters' gradients to the sums
        W: only in schedules that split the backward pass, where B computes the gradient of x only:
           compute the parameters' gradients, and add them to the sums
        ppermute x to the next device and the cotangent to the previous one

A new schedule of these actions needs no change here. A new kind of action needs its letter and its
dependencies in `schedule.py`, its number and slots in `slots.py`, its derivative in `stage_vjp.py`,
and here two methods, for a stage function and for a layer, that `_tick` runs.

Example: the 1F1B schedule with 2 devices and 3 microbatches takes 8 ticks:

    tick       0   1   2   3   4   5   6   7
    device 0   F0  F1  -   B0  F2  B1  -   B2
    device 1   -   F0  B0  F1  B1  F2  B2  -

Under eager 1F1B a device runs an F and then a B in one tick, each with slots of its own.

With two float32 layers per device and a boundary activation of shape `(4, 16)`, a device carries:

    x, cotangent               {"float32": (4, 16)}   what it sends at the end of the tick
    arrived_x, ..._cotangent   {..: (2, 4, 16)}       1 slot, and a last row that is never read
    layer_residuals            {..: (4, *shape), ..}  2 slots * 2 layers, for each residual
    layer_sums                 {leaf: (2, *shape)}    gradient sums, one row for each layer

Each action runs in a `fori_loop` with a trip count of 0 or 1. A `lax.cond` would copy every buffer
that it does not change; XLA updates the carry of a loop in place. The loops over ticks and layers
keep the program's size independent of the number of microbatches and layers.

Sources: 1F1B (PipeDream, Narayanan et al. 2019, https://arxiv.org/abs/1806.03377); the split of
B and W (Qi et al. 2023, https://arxiv.org/abs/2401.10241).
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from plurax.hlo.compiled_collectives import TICKS, times_scope
from plurax.jaxpr.barrier import order_after
from plurax.partition.partitioner import Partitioner
from plurax.partition.values import ShardedValue
from plurax.pipeline.packing import Buffers, flat_shapes, max_lengths, zeros
from plurax.pipeline.schedule import Schedule
from plurax.pipeline.slots import FIELDS, make_slot_table
from plurax.pipeline.stage_values import PackedValues, StageParams, replicated_value
from plurax.pipeline.stage_vjp import Inputs, Values
from plurax.pipeline.stage_vjps import StageVjps
from plurax.pipeline.stages import LayerAssignment, StagedNetwork
from plurax.sharding.reshard import moved
from plurax.sharding.spec import TensorSharding
from plurax.tree import sum_dtype

Carry = dict[str, Any]


class ScheduleExecutor:
    """Run a network under a schedule, on the shards of one device.

    Construct it while tracing the body of a `jax.shard_map` over all mesh axes.

    **Arguments:**

    - `network`: the `StagedNetwork`.
    - `schedule`: the `Schedule`; it has as many stages as the network.
    - `trained`: this device's parameters.
    - `rows`: tree of this device's arrays `(microbatches, rows, ...)`.
    - `partitioner`: evaluates the equations of stages; its axes are without `pipeline`.
    - `goals`: for each parameter the sharding in which each microbatch's gradient is summed (for
      stacked parameters: the sharding of one layer), or None for the sharding in which the VJP
      returns it. `goals=None` runs forwards only.
    - `joint`: where the loss couples examples, the number of `data` devices over which the rows
      are one sharded dim; otherwise None, and each device computes on its rows alone.
    - `live`: number of microbatches that contain an example; the executor skips the others. None
      means all.
    - `states`: the leaves of the model state. A stage's forwards read and write the leaves of that
      stage, in the order of the microbatches.
    - `stacked`: stack `aux` as `(microbatches, ...)` of replicated tensors instead of summing it.
    """

    def __init__(
        self,
        network: StagedNetwork,
        schedule: Schedule,
        trained: StageParams,
        rows: PyTree,
        partitioner: Partitioner,
        goals: Sequence[TensorSharding | None] | None = None,
        *,
        stacked: bool = False,
        joint: int | None = None,
        live: Any = None,
        states: Sequence[Array] = (),
    ) -> None:
        self._live = live
        self.network, self.schedule = network, schedule
        self.trained = trained.read_once(network.stage_fns.values(), partitioner.axes.platform)
        self._stacked = stacked
        self.table = make_slot_table(schedule, sorted(network.stage_fns))
        self.device = lax.axis_index("pipeline")
        self.assignment = (
            network.layers.assignment
            if network.layers
            else LayerAssignment((0,) * schedule.stages, schedule.devices)
        )
        self.vjps = StageVjps(network, schedule, trained, rows, partitioner, goals, joint, states)
        sharing = Counter(map(self._head_store, network.stage_fns))
        for packed in (self.vjps.residuals, self.vjps.weight_residuals):
            for stage in packed:
                if sharing[self._head_store(stage)] == 1:
                    packed[stage] = packed[stage].apart()

    # --- Running ------------------------------------------------------------------------------

    def __call__(self) -> Carry:
        """Run all ticks and return the last carry.

        Of its entries a caller reads:

        - `aux`: the sums (or stacks) of the last stage's `aux`; zeros on the other devices.
        - `states`: the leaves of the model state; each device has new values only in the leaves
          that its stages write.
        - `layer_sums`: gradient sums of stacked parameters, `{leaf: (layers per device, ...)}`.
        - `shared_sums`: gradient sums of parameters that are on all devices, `{leaf: ...}`.
        - `homed_sums`: flat buffers with the gradient sums of parameters that only this device has.

        Gradient sums are float32 or wider; the three gradient entries exist only with `goals`.
        """
        columns = jnp.asarray(self.table.columns)
        with jax.named_scope(TICKS):
            end, _ = lax.scan(lambda c, row: (self._tick(c, row), None), self._start(), columns)
        return end

    def _start(self) -> Carry:
        slots, vjps = self.table.slots, self.vjps
        if self.network.layers is not None:
            boundary = vjps.boundaries[0].shapes  # all are equal
        else:
            boundary = flat_shapes(max_lengths(one.lengths for one in vjps.boundaries[:-1]))
        carry: Carry = {
            "aux": [self._zero_aux(spec) for spec in self.vjps.aux],
            "x": zeros(boundary),
            # One row more than slots: a device to which nothing is sent writes there.
            "arrived_x": zeros(boundary, slots["x"] + 1),
            "states": list(self.vjps.states),
        }
        if not self.vjps.backward:
            return carry
        layers = self.network.layers.leaves if self.network.layers else ()
        shared = [
            leaf
            for leaf in self.trained.trained(range(len(self.trained.homes)))
            if self.trained.homes[leaf] is None and leaf not in layers
        ]
        residuals, weight_residuals = vjps.layer_residuals, vjps.layer_weight_residuals
        return carry | {
            "cotangent": zeros(boundary),
            "arrived_cotangent": zeros(boundary, slots["cotangent"] + 1),
            "layer_residuals": zeros(residuals.shapes, self._layer_slots("layer_residuals")),
            "layer_weight_residuals": zeros(
                weight_residuals.shapes, self._layer_slots("layer_weight_residuals")
            ),
            "fn_residuals": self._fn_buffers("fn_residuals", vjps.residuals),
            "fn_weight_residuals": self._fn_buffers("fn_weight_residuals", vjps.weight_residuals),
            # Gradients: one sum per layer of this device, one per parameter of all devices, and
            # flat buffers for parameters of this device only: their shapes differ by device.
            "layer_sums": {
                leaf: _zeros(vjps.grads[leaf].array, self.assignment.rows)
                for leaf in self.trained.trained(layers)
            },
            "shared_sums": {leaf: _zeros(vjps.grads[leaf].array) for leaf in shared},
            "homed_sums": zeros(
                flat_shapes(max_lengths(one.lengths for one in vjps.grad_packings)), wide=True
            ),
        }

    def _tick(self, carry: Carry, columns: Array) -> Carry:
        rows = lax.dynamic_index_in_dim(columns, self.device, keepdims=False)
        forward, backward, weight = (dict(zip(FIELDS, row, strict=True)) for row in rows)
        for action in (forward, backward, weight):
            action["stage"] = action["chunk"] * self.schedule.devices + self.device
        # Each action reads and overwrites `x` or `cotangent` in place, so the tick starts by
        # loading its slot. On an idle tick this loads any slot, and nobody reads the result.
        carry = {**carry, "x": _row(carry["arrived_x"], forward["x"])}
        carry = self._run_action(carry, forward, self._fn_forward, self._layer_forward)
        if self.vjps.backward:
            carry["cotangent"] = _row(carry["arrived_cotangent"], backward["cotangent"])
            back = (
                (self._fn_input_gradient, self._layer_input_gradient)
                if self.schedule.split
                else (self._fn_backward, self._layer_backward)
            )
            carry = self._run_action(carry, backward, *back, reverse=True)
            if self.schedule.split:
                of_weights = self._fn_weight_gradient, self._layer_weight_gradient
                carry = self._run_action(carry, weight, *of_weights)
        return self._exchange(carry, {"x": forward, "cotangent": backward})

    def _run_action(
        self,
        carry: Carry,
        action: Carry,
        run_fn: Callable[[Carry, Carry, int], Carry],
        run_layer: Callable[[Carry, Carry, Array], Carry],
        *,
        reverse: bool = False,
    ) -> Carry:
        """Run this tick's action of a kind on the parts of its stage, if there is one.

        The parts are, in order: a `StageFn` before the layers (an embedding), by
        `run_fn(carry, action, stage)`; the layers, each by `run_layer(carry, action, k)`; and a
        `StageFn` after them (a head). `reverse` runs them in reverse order, for B.
        """
        mine = action["runs"] == 1
        if self._live is not None:
            mine &= action["microbatch"] < self._live

        def run_fns(carry: Carry, after: bool) -> Carry:
            for stage, stage_fn in self.network.stage_fns.items():
                if stage_fn.after == after:
                    here = mine & (action["stage"] == stage)
                    run = functools.partial(_on_stage, run_fn, action, stage)
                    carry = _repeat(here, run, carry, times=self.schedule.microbatches)
            return carry

        carry = run_fns(carry, after=reverse)
        if self.network.layers is not None:
            count = jnp.asarray(self.assignment.counts, jnp.int32)[action["stage"]]

            def run_one(carry: Carry, i: Array) -> Carry:
                return run_layer(carry, action, count - 1 - i if reverse else i)

            # Stages may differ in their layers, so the trip count is data as well.
            times = self.schedule.microbatches * self.assignment.rows
            carry = _repeat(jnp.where(mine, count, 0), run_one, carry, times=times)
        return run_fns(carry, after=not reverse)

    def _exchange(self, carry: Carry, sent_by: Mapping[str, Carry]) -> Carry:
        """Send `x` and the cotangent to the neighbours; store what arrives in its slot.

        The table was computed ahead, so the receiver knows the slot without a message: the field
        `arriving_x` of this tick, from which a later tick's field `x` reads.
        """
        devices, chunks = self.schedule.devices, self.schedule.chunks
        forward = [(d, d + 1) for d in range(devices - 1)]
        if chunks > 1:
            # The last device's chunk c feeds the first device's chunk c + 1.
            forward.append((devices - 1, 0))
        directions = {"x": forward, "cotangent": [(b, a) for a, b in forward]}
        carry = dict(carry)
        for name, pairs in directions.items():
            if name == "cotangent" and not self.vjps.backward:
                continue
            arrived = dict(carry[f"arrived_{name}"])
            slot = sent_by[name][f"arriving_{name}"]
            for dtype, buffer in carry[name].items():
                permute = functools.partial(lax.ppermute, axis_name="pipeline", perm=pairs)
                received = moved(permute, buffer, self.vjps.partitioner.axes)
                arrived[dtype] = lax.dynamic_update_index_in_dim(arrived[dtype], received, slot, 0)
            carry[f"arrived_{name}"] = arrived
        return carry

    # --- One stage function -------------------------------------------------------------------

    def _x(self, carry: Carry, stage: int, name: str = "x") -> Values:
        """Unpack the tensors at the boundary behind `stage` from the buffers `x` or `cotangent`."""
        return self.vjps.boundaries[stage].read(carry[name])

    def _fn_inputs(self, carry: Carry, action: Carry, stage: int) -> Inputs:
        params = self.trained.used(self.network.stage_fns[stage])
        x = self._x(carry, stage - 1) if stage > 0 else []
        return Inputs(params, x, self.vjps.rows(action["microbatch"]))

    def _fn_forward(self, carry: Carry, action: Carry, stage: int) -> Carry:
        vjp, inputs = self.vjps.stage_fns[stage], self._fn_inputs(carry, action, stage)
        stage_fn, last = self.network.stage_fns[stage], stage == self.network.stages - 1
        # Only forwards read model state from the carry: by the time of B, later microbatches have
        # changed it, and the residuals contain what B needs of it.
        states = [replicated_value(carry["states"][leaf]) for leaf in stage_fn.reads]
        inputs = inputs._replace(rest=[*inputs.rest, *states])
        # The last stage's `y` is the loss; no stage receives it.
        wanted = None if last else self.vjps.boundaries[stage].shardings
        y, aux, residuals = vjp.forward(inputs, wanted, keep=self.vjps.backward)
        carry = {**carry, "states": list(carry["states"])}
        count = len(aux) - len(stage_fn.writes)
        for leaf, value in zip(stage_fn.writes, aux[count:], strict=True):
            carry["states"][leaf] = value.array
        if last:
            carry["aux"] = self._add_aux(carry["aux"], aux[:count], action)
        else:
            carry["x"] = self.vjps.boundaries[stage].write(carry["x"], y)
        if self.vjps.backward:
            packed, slot = self.vjps.residuals[stage], action["fn_residuals"]
            store, key = carry["fn_residuals"], self._head_store(stage)
            carry["fn_residuals"] = {**store, key: packed.write_row(store[key], slot, residuals)}
        return carry

    def _fn_buffers(self, store: str, packed: Mapping[int, PackedValues]) -> dict[bool, Buffers]:
        """Return the slots of the residuals of `StageFn`s, for each `_head_store`."""
        slots, buffers = self.table.device_slots[store], {}
        for key in sorted(set(map(self._head_store, self.network.stage_fns))):
            stages = [stage for stage in packed if self._head_store(stage) == key]
            counts = [slots[stage % self.schedule.devices] for stage in stages]
            shapes = flat_shapes(max_lengths(packed[stage].lengths for stage in stages))
            if len(stages) == 1:
                shapes = packed[stages[0]].shapes
            buffers[key] = zeros(shapes, max(counts, default=0))
        return buffers

    def _head_store(self, stage: int) -> bool:
        """Return whether a `StageFn`'s residuals have slots apart from those before the layers.

        Under 1F1B the first device stores as many microbatches as there are devices, and the last
        one a single one: the head's residuals, of the size of the logits, shall not have the
        embedding's number of slots. And each of both then has buffers of its tensors' shapes.
        """
        return self.network.stage_fns[stage].after

    def _zero_aux(self, spec: ShardedValue) -> Array:
        """Return the zeros in which `aux` is summed, or stacked by microbatch."""
        if self._stacked:
            return jnp.zeros((self.schedule.microbatches, *spec.shape), spec.dtype)
        return _zeros(spec.array)

    def _add_aux(self, sums: list[Array], aux: Values, action: Carry) -> list[Array]:
        if self._stacked:
            partitioner = self.vjps.partitioner
            whole = [partitioner.move(v, TensorSharding.replicated(len(v.shape))) for v in aux]
            return [
                lax.dynamic_update_index_in_dim(a, value.array, action["microbatch"], 0)
                for a, value in zip(sums, whole, strict=True)
            ]
        return [a + value.array.astype(a.dtype) for a, value in zip(sums, aux, strict=True)]

    def _fn_residuals(self, carry: Carry, action: Carry, stage: int) -> Values:
        packed = self.vjps.residuals[stage]
        store = carry["fn_residuals"][self._head_store(stage)]
        return _after(action, packed.read_row(store, action["fn_residuals"]))

    def _fn_cotangent(self, carry: Carry, stage: int) -> Values:
        if stage == self.network.stages - 1:
            return self.vjps.loss_cotangent(self.vjps.stage_fns[stage])
        return self._x(carry, stage, "cotangent")

    def _fn_backward(self, carry: Carry, action: Carry, stage: int) -> Carry:
        """Run B where the schedule has no W: the gradients of parameters and input together."""
        inputs = self._fn_inputs(carry, action, stage)
        grads, dx = self.vjps.stage_fns[stage].backward(
            inputs,
            self._fn_residuals(carry, action, stage),
            self._fn_cotangent(carry, stage),
            self.vjps.input_shardings(stage),
            self.vjps.stage_fn_goals(stage),
        )
        return self._send_back(self._add_fn_gradients(carry, stage, grads), stage, dx)

    def _fn_input_gradient(self, carry: Carry, action: Carry, stage: int) -> Carry:
        """Run B of a split backward: the input's gradient; store the weight residuals."""
        inputs = self._fn_inputs(carry, action, stage)
        dx, weight_residuals = self.vjps.stage_fns[stage].input_gradient(
            inputs,
            self._fn_residuals(carry, action, stage),
            self._fn_cotangent(carry, stage),
            self.vjps.input_shardings(stage),
        )
        packed, slot = self.vjps.weight_residuals[stage], action["fn_weight_residuals"]
        store, key = carry["fn_weight_residuals"], self._head_store(stage)
        stored = {**store, key: packed.write_row(store[key], slot, weight_residuals)}
        return self._send_back({**carry, "fn_weight_residuals": stored}, stage, dx)

    def _fn_weight_gradient(self, carry: Carry, action: Carry, stage: int) -> Carry:
        """Run W: the parameters' gradients, from the residuals and the weight residuals."""
        packed, slot = self.vjps.weight_residuals[stage], action["fn_weight_residuals"]
        store = carry["fn_weight_residuals"][self._head_store(stage)]
        grads = self.vjps.stage_fns[stage].weight_gradient(
            self._fn_inputs(carry, action, stage),
            self._fn_residuals(carry, action, stage),
            _after(action, packed.read_row(store, slot)),
            self.vjps.stage_fn_goals(stage),
        )
        return self._add_fn_gradients(carry, stage, grads)

    def _send_back(self, carry: Carry, stage: int, dx: Values) -> Carry:
        """Write the gradient of a stage's input to the buffer that is sent at the tick's end."""
        if stage == 0:
            return carry
        new = self.vjps.boundaries[stage - 1].write(carry["cotangent"], dx)
        return {**carry, "cotangent": new}

    def _add_fn_gradients(self, carry: Carry, stage: int, grads: Values) -> Carry:
        """Add a microbatch's gradients of a stage function's parameters to the sums."""
        shared, homed = dict(carry["shared_sums"]), carry["homed_sums"]
        packing = self.vjps.grad_packings[stage % self.schedule.devices]
        leaves = self.trained.trained(self.network.stage_fns[stage].leaves)
        for leaf, grad in zip(leaves, grads, strict=True):
            if self.trained.homes[leaf] is None:
                shared[leaf] = shared[leaf] + grad.array.astype(shared[leaf].dtype)
            else:
                homed = packing.add(homed, [grad.array], [self.trained.gradient_index(leaf)])
        return {**carry, "shared_sums": shared, "homed_sums": homed}

    # --- One layer ----------------------------------------------------------------------------

    def _layer_inputs(self, carry: Carry, action: Carry, k: Array, x: Values) -> Inputs:
        index = jnp.asarray(self.assignment.starts, jnp.int32)[action["stage"]] + k
        rest = [*self.vjps.rows(action["microbatch"]), replicated_value(index)]
        return Inputs(self.vjps.layer_values(self._layer_row(action, k)), x, rest)

    def _layer_row(self, action: Carry, k: Array) -> Array:
        """Return the row of the stage's `k`-th layer in this device's stacked parameters."""
        return jnp.asarray(self.assignment.first_rows, jnp.int32)[action["stage"]] + k

    def _layer_slots(self, store: str) -> int:
        """Return the number of rows of a store: a slot has a row per layer of a stage.

        The program is one for all devices, so the store is as large as the largest device's needs:
        under 1F1B an early stage has more slots, and may have fewer layers.
        """
        counts = zip(self.table.device_slots[store], self.assignment.max_layers, strict=True)
        return max(slots * layers for slots, layers in counts)

    def _layer_slot(self, store: str, action: Carry, k: Array) -> Array:
        """Return the row of the stage's `k`-th layer in a store."""
        return action[store] * jnp.asarray(self.assignment.max_layers, jnp.int32)[self.device] + k

    def _layer_forward(self, carry: Carry, action: Carry, k: Array) -> Carry:
        assert self.vjps.layer is not None
        boundary = self.vjps.boundaries[0]
        inputs = self._layer_inputs(carry, action, k, self._x(carry, 0))
        y, _, residuals = self.vjps.layer.forward(
            inputs, boundary.shardings, keep=self.vjps.backward
        )
        carry = {**carry, "x": boundary.write(carry["x"], y)}
        if self.vjps.backward:
            slot = self._layer_slot("layer_residuals", action, k)
            carry["layer_residuals"] = self.vjps.layer_residuals.write_row(
                carry["layer_residuals"], slot, residuals
            )
        return carry

    def _layer_residuals(self, carry: Carry, action: Carry, k: Array) -> Values:
        slot = self._layer_slot("layer_residuals", action, k)
        return self.vjps.layer_residuals.read_row(carry["layer_residuals"], slot)

    def _layer_backward(self, carry: Carry, action: Carry, k: Array) -> Carry:
        """Run B where the schedule has no W, for one layer."""
        assert self.vjps.layer is not None
        boundary = self.vjps.boundaries[0]
        grads, dx = self.vjps.layer.backward(
            self._layer_inputs(carry, action, k, []),
            self._layer_residuals(carry, action, k),
            self._x(carry, 0, "cotangent"),
            boundary.shardings,
            self.vjps.layer_goals,
        )
        carry = {**carry, "cotangent": boundary.write(carry["cotangent"], dx)}
        return self._add_layer_gradients(carry, action, k, grads)

    def _layer_input_gradient(self, carry: Carry, action: Carry, k: Array) -> Carry:
        """Run B of a split backward for one layer; store the weight residuals."""
        assert self.vjps.layer is not None
        boundary = self.vjps.boundaries[0]
        dx, weight_residuals = self.vjps.layer.input_gradient(
            self._layer_inputs(carry, action, k, []),
            self._layer_residuals(carry, action, k),
            self._x(carry, 0, "cotangent"),
            boundary.shardings,
        )
        slot = self._layer_slot("layer_weight_residuals", action, k)
        stored = self.vjps.layer_weight_residuals.write_row(
            carry["layer_weight_residuals"], slot, weight_residuals
        )
        cotangent = boundary.write(carry["cotangent"], dx)
        return {**carry, "cotangent": cotangent, "layer_weight_residuals": stored}

    def _layer_weight_gradient(self, carry: Carry, action: Carry, k: Array) -> Carry:
        """Run W for one layer."""
        assert self.vjps.layer is not None
        slot = self._layer_slot("layer_weight_residuals", action, k)
        grads = self.vjps.layer.weight_gradient(
            self._layer_inputs(carry, action, k, []),
            self._layer_residuals(carry, action, k),
            self.vjps.layer_weight_residuals.read_row(carry["layer_weight_residuals"], slot),
            self.vjps.layer_goals,
        )
        return self._add_layer_gradients(carry, action, k, grads)

    def _add_layer_gradients(self, carry: Carry, action: Carry, k: Array, grads: Values) -> Carry:
        """Add a microbatch's gradients of one layer to that layer's row of the sums."""
        assert self.network.layers is not None
        sums, row = dict(carry["layer_sums"]), self._layer_row(action, k)
        leaves = self.trained.trained(self.network.layers.leaves)
        for leaf, grad in zip(leaves, grads, strict=True):
            old = lax.dynamic_index_in_dim(sums[leaf], row, keepdims=False)
            new = old + grad.array.astype(old.dtype)
            sums[leaf] = lax.dynamic_update_index_in_dim(sums[leaf], new, row, 0)
        return {**carry, "layer_sums": sums}


def _on_stage(
    run_fn: Callable[[Carry, Carry, int], Carry], action: Carry, stage: int, carry: Carry, i: Array
) -> Carry:
    """Run an action of a `StageFn`, the body of a loop of 0 or 1 iterations with index `i`.

    All that the action reads is ordered after `i`. XLA would otherwise move what does not depend on
    the iteration in front of the loop, where every device computes and sends it in every tick: the
    whole of a head, whose result does not overwrite the `x` that it reads.
    """
    boundaries = {name: carry[name] for name in ("x", "cotangent") if name in carry}
    leaves, structure = jax.tree.flatten((action, boundaries))
    action, boundaries = jax.tree.unflatten(structure, order_after(leaves, i))
    return run_fn({**carry, **boundaries}, {**action, "iteration": i}, stage)


def _after(action: Carry, values: Values) -> Values:
    """Return what an action of a `StageFn` reads from a slot, ordered after its iteration.

    The slot's index is ordered, too, but of a single slot XLA does not read it.
    """
    arrays = order_after([value.array for value in values], action["iteration"])
    return [
        dataclasses.replace(value, array=array) for value, array in zip(values, arrays, strict=True)
    ]


def _repeat(
    count: Array, body: Callable[[Carry, Array], Carry], carry: Carry, *, times: int
) -> Carry:
    """Apply `body(carry, i)` for `i < count`; `count` may be 0 and may differ between devices.

    In all ticks together that is `times` on the device that does it most often.
    """

    def run(i: Array, carry: Carry) -> Carry:
        with jax.named_scope(times_scope(times)):
            return body(carry, i)

    result: Carry = lax.fori_loop(jnp.int32(0), jnp.asarray(count, jnp.int32), run, carry)
    return result


def _row(buffers: Buffers, row: Any) -> Buffers:
    return {n: lax.dynamic_index_in_dim(b, row, keepdims=False) for n, b in buffers.items()}


def _zeros(local: jax.ShapeDtypeStruct, rows: int | None = None) -> Array:
    """Return zeros to sum arrays of shape `local` in, or `rows` of them; float32 or wider."""
    dtype = sum_dtype(local.dtype)
    return jnp.zeros(local.shape if rows is None else (rows, *local.shape), dtype)
