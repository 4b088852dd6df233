"""Run a pipeline schedule on each device, inside `jax.shard_map`.

All devices run one SPMD program, yet in each tick each device runs a different action of the
schedule (`pipeline/schedule.py`), on a different microbatch and stage. The actions, and the buffer
slots that they read and write, are therefore data: an int32 table `(ticks, devices, fields)`
(`pipeline/slots.py`). One `lax.scan` over the ticks reads this device's row and runs:

    for each tick:
        F: read x from its slot; apply the stage; store the residuals in their slot
        B: read the cotangent from its slot; apply the stage's VJP; add the gradients to the sums
        W: (split backward only) read the weight residuals; add the weights' gradients to the sums
        ppermute x to the next device and the cotangent to the previous one

Example: the 1F1B schedule with 2 devices and 3 microbatches takes 8 ticks:

    tick       0   1   2   3   4   5   6   7
    device 0   F0  F1  -   B0  F2  B1  -   B2
    device 1   -   F0  B0  F1  B1  F2  B2  -

With two float32 layers per device and a boundary activation of shape `(4, 16)`, a device carries:

    x, cotangent               {"float32": (64,)}     what it sends at the end of the tick
    arrived_x, ..._cotangent   {"float32": (2, 64)}   1 slot, and a last row that is never read
    kept                       {"float32": (4, r)}    2 slots * 2 layers; r numbers per residual row
    layers                     {leaf: (2, *shape)}    gradient sums, one row for each layer

Each action runs in a `fori_loop` with a trip count of 0 or 1. A `lax.cond` would copy every buffer
that it does not change; XLA updates the carry of a loop in place. The loops over ticks and layers
keep the program's size independent of the number of microbatches and layers.

Sources: 1F1B (PipeDream, Narayanan et al. 2019, https://arxiv.org/abs/1806.03377); the split of
B and W (Qi et al. 2023, https://arxiv.org/abs/2401.10241).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from plurax.partition.partitioner import Partitioner, Record
from plurax.pipeline.packing import Buffers, empty, longest
from plurax.pipeline.schedule import Schedule
from plurax.pipeline.slots import FIELDS, KIND, make_slot_table
from plurax.pipeline.stage_vjp import Inputs, Values
from plurax.pipeline.stage_vjps import StageVjps
from plurax.pipeline.stages import LayerAssignment, StagedNetwork
from plurax.pipeline.value_spec import StageParams, ValueSpec, arrays_of, whole_value
from plurax.sharding.spec import TensorSharding

Carry = dict[str, Any]


class ScheduleExecutor:
    """Run a network under a schedule, on the shards of one device.

    Construct it while tracing the body of a `jax.shard_map` over all mesh axes.

    **Arguments:**

    - `network`: the `StagedNetwork`.
    - `schedule`: the `Schedule`; it has as many stages as the network.
    - `trained`: this device's parameters.
    - `rows`: tree of this device's arrays `(microbatches, rows, ...)`.
    - `divider`: `divider(trips)` returns a `Partitioner` for a `StageVjp` that runs `trips` times
      per step.
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

    **Attributes:** `records`, the collectives of a step; complete once the executor has run.
    """

    def __init__(
        self,
        network: StagedNetwork,
        schedule: Schedule,
        trained: StageParams,
        rows: PyTree,
        divider: Callable[[int], Partitioner],
        goals: Sequence[TensorSharding | None] | None = None,
        *,
        stacked: bool = False,
        joint: int | None = None,
        live: Any = None,
        states: Sequence[Array] = (),
    ) -> None:
        self._live = live
        self.network, self.schedule, self.trained = network, schedule, trained
        self._stacked = stacked
        self.table = make_slot_table(schedule, sorted(network.edges))
        self.device = lax.axis_index("pipeline")
        self.sends = Partitioner(divider(1).axes, trips=len(self.table.columns))
        layers = network.layers
        self.dealing = LayerAssignment(
            layers.depth if layers else 0, schedule.devices, schedule.chunks
        )
        self.pieces = StageVjps(network, schedule, trained, rows, divider, goals, joint, states)

    @property
    def records(self) -> list[Record]:
        """Return the collectives of all stage functions and of the sends between devices."""
        walked = [*self.pieces.dividers, self.sends]
        return [record for divider in walked for record in divider.records]

    # --- Running ------------------------------------------------------------------------------

    def __call__(self) -> Carry:
        """Run all ticks and return the last carry.

        Of its entries a caller reads:

        - `aux`: the sums (or stacks) of the last stage's `aux`; zeros on the other devices.
        - `states`: the leaves of the model state; each device has new values only in the leaves
          that its stages write.
        - `layers`: gradient sums of stacked parameters, `{leaf: (layers per device, ...)}`.
        - `shared`: gradient sums of parameters that are on all devices, `{leaf: ...}`.
        - `homed`: flat buffers with the gradient sums of parameters that only this device has.

        Gradient sums are float32 or wider; the three gradient entries exist only with `goals`.
        """
        columns = jnp.asarray(self.table.columns)
        end, _ = lax.scan(lambda c, row: (self._tick(c, row), None), self._start(), columns)
        return end

    def _start(self) -> Carry:
        slots, dealing = self.table.slots, self.dealing
        between = longest(self.pieces.between)
        kept, left = self.pieces.layer_packings
        carry: Carry = {
            "aux": [self._empty_aux(form) for form in self.pieces.aux],
            "x": empty(between),
            # One row more than slots: a device to which nothing is sent writes there.
            "arrived_x": empty(between, slots["x"] + 1),
            "states": list(self.pieces.states),
        }
        if not self.pieces.backward:
            return carry
        layers = self.network.layers.leaves if self.network.layers else ()
        shared = [
            leaf
            for leaf, home in enumerate(self.trained.homes)
            if home is None and leaf not in layers
        ]
        rows = dealing.most * dealing.chunks
        return carry | {
            "cotangent": empty(between),
            "arrived_cotangent": empty(between, slots["cotangent"] + 1),
            "kept": empty(kept.lengths, slots["kept"] * dealing.most),
            "left": empty(left.lengths, slots["left"] * dealing.most),
            "edge": empty(longest(list(self.pieces.kept_packings.values())), slots["edge"]),
            "edge_left": empty(
                longest(list(self.pieces.left_packings.values())), slots["edge_left"]
            ),
            # Gradients: one sum per layer of this device, one per parameter of all devices, and
            # flat buffers for parameters of this device only: their shapes differ by device.
            "layers": {leaf: _zeros(self.pieces.grads[leaf].local, rows) for leaf in layers},
            "shared": {leaf: _zeros(self.pieces.grads[leaf].local) for leaf in shared},
            "homed": empty(longest(self.pieces.grad_packings), wide=True),
        }

    def _tick(self, carry: Carry, columns: Array) -> Carry:
        row = lax.dynamic_index_in_dim(columns, self.device, keepdims=False)
        at = dict(zip(FIELDS, row, strict=True))
        at["stage"] = at["chunk"] * self.schedule.devices + self.device
        # Each action reads and overwrites `x` or `cotangent` in place, so the tick starts by
        # loading its slot. On an idle tick this loads any slot, and nobody reads the result.
        carry = {**carry, "x": _row(carry["arrived_x"], at["x"])}
        carry = self._along(carry, at, KIND["F"], self._edge_forward, self._layer_forward)
        if self.pieces.backward:
            carry["cotangent"] = _row(carry["arrived_cotangent"], at["cotangent"])
            back = (
                (self._edge_input, self._layer_input)
                if self.schedule.split
                else (self._edge_back, self._layer_back)
            )
            carry = self._along(carry, at, KIND["B"], *back, reverse=True)
            if self.schedule.split:
                carry = self._along(carry, at, KIND["W"], self._edge_weight, self._layer_weight)
        return self._exchanged(carry, at)

    def _along(
        self,
        carry: Carry,
        at: Carry,
        kind: int,
        edge: Callable[[Carry, Carry, int], Carry],
        layer: Callable[[Carry, Carry, Array], Carry],
        *,
        reverse: bool = False,
    ) -> Carry:
        """Run this tick's action on the parts of its stage if the action is of this `kind`.

        The parts are, in order: a `StageFn` before the layers (an embedding), the layers, and a
        `StageFn` after them (a head). `reverse` runs them in reverse order, for B.
        """
        mine = at["kind"] == kind
        if self._live is not None:
            mine &= at["microbatch"] < self._live

        def edges(carry: Carry, after: bool) -> Carry:
            for stage, one in self.network.edges.items():
                if one.after == after:
                    here = mine & (at["stage"] == stage)
                    carry = _times(here, functools.partial(_of_stage, edge, at, stage), carry)
            return carry

        carry = edges(carry, after=reverse)
        if self.network.layers is not None:
            count = jnp.asarray(self.dealing.counts, jnp.int32)[at["stage"]]

            def turn(carry: Carry, i: Array) -> Carry:
                return layer(carry, at, count - 1 - i if reverse else i)

            # Stages may differ by one layer, so the trip count is data as well.
            carry = _times(jnp.where(mine, count, 0), turn, carry)
        return edges(carry, after=not reverse)

    def _exchanged(self, carry: Carry, at: Carry) -> Carry:
        """Send `x` and the cotangent to the neighbours; store what arrives in its slot.

        The table was computed ahead, so the receiver knows the slot without a message: the field
        `arriving_x` of this tick, from which a later tick's field `x` reads.
        """
        devices, chunks = self.schedule.devices, self.schedule.chunks
        on = [(d, d + 1) for d in range(devices - 1)]
        if chunks > 1:
            # The last device's chunk c feeds the first device's chunk c + 1.
            on.append((devices - 1, 0))
        ways = {"x": on, "cotangent": [(b, a) for a, b in on]}
        carry = dict(carry)
        for name, pairs in ways.items():
            if name == "cotangent" and not self.pieces.backward:
                continue
            arrived = dict(carry[f"arrived_{name}"])
            for dtype, buffer in carry[name].items():
                made = lax.ppermute(buffer, "pipeline", pairs)
                size = made.size * made.dtype.itemsize
                self.sends.records.append(
                    Record("collective-permute", ("pipeline",), size, float(size),
                           len(self.table.columns))
                )  # fmt: skip
                where = (at[f"arriving_{name}"], jnp.int32(0))
                arrived[dtype] = lax.dynamic_update_slice(arrived[dtype], made[None], where)
            carry[f"arrived_{name}"] = arrived
        return carry

    # --- One stage function -------------------------------------------------------------------

    def _x(self, carry: Carry, stage: int, name: str = "x") -> Values:
        """Unpack the tensors at the boundary behind `stage` from the buffers `x` or `cotangent`."""
        arrays = self.pieces.between[stage].read(carry[name])
        return [form.value(a) for form, a in zip(self.pieces.handed[stage], arrays, strict=True)]

    def _edge_inputs(self, carry: Carry, at: Carry, stage: int) -> Inputs:
        edge = self.network.edges[stage]
        x = self._x(carry, stage - 1) if stage > 0 else []
        return Inputs(self.trained.used(edge), x, self.pieces.rows(at["microbatch"]))

    def _edge_forward(self, carry: Carry, at: Carry, stage: int) -> Carry:
        piece, inputs = self.pieces.edges[stage], self._edge_inputs(carry, at, stage)
        edge, last = self.network.edges[stage], stage == self.network.stages - 1
        # Only forwards read model state from the carry: by the time of B, later microbatches have
        # changed it, and the residuals contain what B needs of it.
        states = [whole_value(carry["states"][leaf]) for leaf in edge.reads]
        inputs = inputs._replace(rest=[*inputs.rest, *states])
        # The last stage's `y` is the loss; no stage receives it.
        wanted = None if last else [form.sharding for form in self.pieces.handed[stage]]
        y, aux, kept = piece.forward(inputs, wanted, keep=self.pieces.backward)
        carry = {**carry, "states": list(carry["states"])}
        count = len(aux) - len(edge.writes)
        for leaf, value in zip(edge.writes, aux[count:], strict=True):
            carry["states"][leaf] = value.array
        if last:
            carry["aux"] = self._with_aux(carry["aux"], aux[:count], at)
        else:
            carry["x"] = self.pieces.between[stage].write(carry["x"], arrays_of(y))
        if self.pieces.backward:
            packing = self.pieces.kept_packings[stage]
            carry["edge"] = packing.write_row(carry["edge"], at["edge"], arrays_of(kept))
        return carry

    def _empty_aux(self, form: ValueSpec) -> Array:
        """Return the zeros in which `aux` is summed, or stacked by microbatch."""
        if self._stacked:
            return jnp.zeros((self.schedule.microbatches, *form.shape), form.local.dtype)
        return _zeros(form.local)

    def _with_aux(self, sums: list[Array], aux: Values, at: Carry) -> list[Array]:
        if self._stacked:
            divider = self.pieces.edges[self.network.stages - 1].divider
            whole = [divider.move(v, TensorSharding.replicated(len(v.shape))) for v in aux]
            return [
                lax.dynamic_update_index_in_dim(a, value.array, at["microbatch"], 0)
                for a, value in zip(sums, whole, strict=True)
            ]
        return [a + value.array.astype(a.dtype) for a, value in zip(sums, aux, strict=True)]

    def _edge_kept(self, carry: Carry, at: Carry, stage: int) -> Values:
        arrays = self.pieces.kept_packings[stage].read_row(carry["edge"], at["edge"])
        return [form.value(a) for form, a in zip(self.pieces.kept[stage], arrays, strict=True)]

    def _edge_cotangent(self, carry: Carry, stage: int) -> Values:
        if stage == self.network.stages - 1:
            return self.pieces.loss_cotangent(self.pieces.edges[stage])
        return self._x(carry, stage, "cotangent")

    def _edge_back(self, carry: Carry, at: Carry, stage: int) -> Carry:
        """Run B where the schedule has no W: the gradients of parameters and input together."""
        inputs = self._edge_inputs(carry, at, stage)
        grads, dx = self.pieces.edges[stage].backward(
            inputs,
            self._edge_kept(carry, at, stage),
            self._edge_cotangent(carry, stage),
            self.pieces.edge_shardings(stage),
            self.pieces.edge_goals(stage),
        )
        return self._handed_back(self._edge_added(carry, stage, grads), stage, dx)

    def _edge_input(self, carry: Carry, at: Carry, stage: int) -> Carry:
        """Run B of a split backward: the input's gradient; store the weight residuals."""
        inputs = self._edge_inputs(carry, at, stage)
        dx, left = self.pieces.edges[stage].input_gradient(
            inputs,
            self._edge_kept(carry, at, stage),
            self._edge_cotangent(carry, stage),
            self.pieces.edge_shardings(stage),
        )
        carry = dict(carry)
        packing = self.pieces.left_packings[stage]
        carry["edge_left"] = packing.write_row(carry["edge_left"], at["edge_left"], arrays_of(left))
        return self._handed_back(carry, stage, dx)

    def _edge_weight(self, carry: Carry, at: Carry, stage: int) -> Carry:
        """Run W: the parameters' gradients, from the residuals and the weight residuals."""
        arrays = self.pieces.left_packings[stage].read_row(carry["edge_left"], at["edge_left"])
        left = [form.value(a) for form, a in zip(self.pieces.left[stage], arrays, strict=True)]
        grads = self.pieces.edges[stage].weight_gradient(
            self._edge_inputs(carry, at, stage),
            self._edge_kept(carry, at, stage),
            left,
            self.pieces.edge_goals(stage),
        )
        return self._edge_added(carry, stage, grads)

    def _handed_back(self, carry: Carry, stage: int, dx: Values) -> Carry:
        """Write the gradient of a stage's input to the buffer that is sent at the tick's end."""
        if stage == 0:
            return carry
        new = self.pieces.between[stage - 1].write(carry["cotangent"], arrays_of(dx))
        return {**carry, "cotangent": new}

    def _edge_added(self, carry: Carry, stage: int, grads: Values) -> Carry:
        """Add a microbatch's gradients of a stage function's parameters to the sums."""
        shared, homed = dict(carry["shared"]), carry["homed"]
        packing = self.pieces.grad_packings[stage % self.schedule.devices]
        for leaf, grad in zip(self.network.edges[stage].leaves, grads, strict=True):
            if self.trained.homes[leaf] is None:
                shared[leaf] = shared[leaf] + grad.array.astype(shared[leaf].dtype)
            else:
                homed = packing.add(homed, [grad.array], [self.trained.place(leaf)])
        return {**carry, "shared": shared, "homed": homed}

    # --- One layer ----------------------------------------------------------------------------

    def _layer_inputs(self, carry: Carry, at: Carry, k: Array, x: Values) -> Inputs:
        number = jnp.asarray(self.dealing.starts, jnp.int32)[at["stage"]] + k
        rest = [*self.pieces.rows(at["microbatch"]), whole_value(number)]
        return Inputs(self.pieces.layer_values(self._layer_row(at, k)), x, rest)

    def _layer_row(self, at: Carry, k: Array) -> Array:
        """Return the row of the stage's `k`-th layer in this device's stacked parameters."""
        return at["chunk"] * self.dealing.most + k

    def _layer_forward(self, carry: Carry, at: Carry, k: Array) -> Carry:
        assert self.pieces.layer is not None
        inputs = self._layer_inputs(carry, at, k, self._x(carry, 0))
        shardings = [form.sharding for form in self.pieces.handed[0]]
        y, _, kept = self.pieces.layer.forward(inputs, shardings, keep=self.pieces.backward)
        carry = {**carry, "x": self.pieces.between[0].write(carry["x"], arrays_of(y))}
        if self.pieces.backward:
            packing, slot = self.pieces.layer_packings[0], at["kept"] * self.dealing.most + k
            carry["kept"] = packing.write_row(carry["kept"], slot, arrays_of(kept))
        return carry

    def _layer_kept(self, carry: Carry, at: Carry, k: Array) -> Values:
        slot = at["kept"] * self.dealing.most + k
        arrays = self.pieces.layer_packings[0].read_row(carry["kept"], slot)
        return [form.value(a) for form, a in zip(self.pieces.layer_kept, arrays, strict=True)]

    def _layer_back(self, carry: Carry, at: Carry, k: Array) -> Carry:
        layers = self.network.layers
        assert layers is not None
        assert self.pieces.layer is not None
        grads, dx = self.pieces.layer.backward(
            self._layer_inputs(carry, at, k, []),
            self._layer_kept(carry, at, k),
            self._x(carry, 0, "cotangent"),
            [form.sharding for form in self.pieces.handed[0]],
            self.pieces.layer_goals,
        )
        carry = {
            **carry,
            "cotangent": self.pieces.between[0].write(carry["cotangent"], arrays_of(dx)),
        }
        return self._layer_added(carry, at, k, grads)

    def _layer_input(self, carry: Carry, at: Carry, k: Array) -> Carry:
        assert self.pieces.layer is not None
        dx, left = self.pieces.layer.input_gradient(
            self._layer_inputs(carry, at, k, []),
            self._layer_kept(carry, at, k),
            self._x(carry, 0, "cotangent"),
            [form.sharding for form in self.pieces.handed[0]],
        )
        slot = at["left"] * self.dealing.most + k
        new = self.pieces.layer_packings[1].write_row(carry["left"], slot, arrays_of(left))
        back = self.pieces.between[0].write(carry["cotangent"], arrays_of(dx))
        return {**carry, "cotangent": back, "left": new}

    def _layer_weight(self, carry: Carry, at: Carry, k: Array) -> Carry:
        layers = self.network.layers
        assert layers is not None
        assert self.pieces.layer is not None
        slot = at["left"] * self.dealing.most + k
        arrays = self.pieces.layer_packings[1].read_row(carry["left"], slot)
        grads = self.pieces.layer.weight_gradient(
            self._layer_inputs(carry, at, k, []),
            self._layer_kept(carry, at, k),
            [form.value(a) for form, a in zip(self.pieces.layer_left, arrays, strict=True)],
            self.pieces.layer_goals,
        )
        return self._layer_added(carry, at, k, grads)

    def _layer_added(self, carry: Carry, at: Carry, k: Array, grads: Values) -> Carry:
        """Add a microbatch's gradients of one layer to that layer's row of the sums."""
        assert self.network.layers is not None
        sums, row = dict(carry["layers"]), self._layer_row(at, k)
        for leaf, grad in zip(self.network.layers.leaves, grads, strict=True):
            old = lax.dynamic_index_in_dim(sums[leaf], row, keepdims=False)
            new = old + grad.array.astype(old.dtype)
            sums[leaf] = lax.dynamic_update_index_in_dim(sums[leaf], new, row, 0)
        return {**carry, "layers": sums}


def _of_stage(
    edge: Callable[[Carry, Carry, int], Carry], at: Carry, stage: int, carry: Carry, _: Array
) -> Carry:
    return edge(carry, at, stage)


def _times(count: Array, body: Callable[[Carry, Array], Carry], carry: Carry) -> Carry:
    """Apply `body(carry, i)` for `i < count`; `count` may be 0 and may differ between devices."""
    count = jnp.asarray(count, jnp.int32)
    result: Carry = lax.fori_loop(jnp.int32(0), count, lambda i, c: body(c, i), carry)
    return result


def _row(buffers: Buffers, row: Any) -> Buffers:
    return {n: lax.dynamic_index_in_dim(b, row, keepdims=False) for n, b in buffers.items()}


def _zeros(local: jax.ShapeDtypeStruct, rows: int | None = None) -> Array:
    """Return zeros to sum arrays of shape `local` in, or `rows` of them; float32 or wider."""
    dtype = jnp.promote_types(local.dtype, jnp.float32)
    return jnp.zeros(local.shape if rows is None else (rows, *local.shape), dtype)
