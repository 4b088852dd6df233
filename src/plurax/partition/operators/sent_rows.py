"""Send rows to the devices of their experts, compute there, and send the results back.

Each device of `data` has rows of its own, sorted by expert, and the weights of its own experts. How
many rows go where depends on the batch, and shapes may not. So rows are sent in turns: in the first
every device has room for `SLOTS` times its own number of rows, equally many from each device. Turns
go on until all rows have been sent, one for a router that balances: nothing is ever dropped. The
first turn stands before the loop of the others, so that its exchanges can run beside other work,
and what the backward pass needs of it is kept (`FirstRows`). The others compute that anew, so they
have room for `LATER_SLOTS` times the rows: with all rows on one device it takes n - 1 turns.

    data=2; 4 experts, two on a device; 4 rows on each, room for 4 from each device (SLOTS = 2)

    device 0: rows a to d, sizes [1, 0, 2, 1]      device 1: rows p to s, sizes [2, 1, 1, 0]

    turn 1             device 0, experts 0 and 1     device 1, experts 2 and 3
    received           a . . .   p q r .             b c d .   s . . .
    by expert          a p q, r                      b c s, d
    computed           with sizes [3, 1]             with sizes [3, 1]
    returned           a to 0; p q r to 1            b c d to 0; s to 1

On TPUs and GPUs only rows are sent (`lax.ragged_all_to_all`), elsewhere all slots.

The buffers of experts, (E, C, d) of each device, are as large for any routing, and so sent at once:
those of a device's experts come from each device in turn.

    device 0: buffers 0 to 3       device 0: buffers 0 1 of device 0, 0 1 of device 1
    device 1: buffers 0 to 3       device 1: buffers 2 3 of device 0, 2 3 of device 1

Gradients of weights are added up over turns where the weights are, and never sent. The all-to-all
of tokens is that of GShard (Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668), the ragged one
is described at https://openxla.org/xla/operation_semantics#raggedalltoall.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from plurax.jaxpr.at_experts import LATER_SLOTS, RowFunction, kept_avals, slots_of, split
from plurax.partition.manual import eval_manual_body
from plurax.partition.rule_context import RuleContext
from plurax.partition.scopes import IF_UNEVEN
from plurax.partition.values import Decision, Operand, ValueVersions
from plurax.sharding.axes import Axes
from plurax.sharding.spec import TensorSharding
from plurax.tree import sum_dtype

AXIS = "data"
"""The mesh axis of devices that have other rows and other experts."""


def at_experts(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Compute rows with weights split over `data` by group; what they are split over else is whole.

    Rows and results are those of a device; so are sums over rows, of the rows it computed.
    """
    function: RowFunction = eqn.params["function"]
    rows, weights, whole, kept = split(inputs, function.operands)
    sizes = inputs[sum(function.operands) :]

    def by_group(versions: ValueVersions | Any, dim: int) -> TensorSharding:
        return TensorSharding.replicated(len(versions.shape)).with_dim(dim, (AXIS,))

    def replicated(versions: ValueVersions | Any) -> TensorSharding:
        return TensorSharding.replicated(len(versions.shape))

    operands = [Operand(one, (replicated(one),)) for one in rows]
    operands += [
        Operand(one, (by_group(one, dim),))
        for one, dim in zip(weights, function.groups, strict=True)
    ]
    operands += [Operand(one, (replicated(one),)) for one in (*whole, *kept, *sizes)]
    counts = (*function.results, len(kept_avals(function)))
    results = split([var.aval for var in eqn.outvars], counts)
    of_rows = [context.spec(a.shape, a.dtype, replicated(a), True) for a in results[0]]
    of_groups = [
        context.spec(a.shape, a.dtype, by_group(a, dim))
        for a, dim in zip(results[1], function.result_groups, strict=True)
    ]
    others = [
        context.spec(a.shape, a.dtype, replicated(a), True) for a in (*results[2], *results[3])
    ]
    turns = functools.partial(_in_turns, context.axes, function, results)
    execute = turns if sizes else functools.partial(_at_once, function)
    return Decision(tuple(operands), (*of_rows, *of_groups, *others), execute)


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """How many rows each device has for each other, and this device's experts.

    **Fields:** `axes`; `count`, the number of rows of a device; `before`, how many rows for each
    device have been sent; `slots`, the room for rows of one device, and `room`, that for all, which
    may be some more; `ends`, of the groups of each device (n, E); `bounds`, of its rows for each
    device (n, n + 1); `me`, this device's index.
    """

    axes: Axes
    count: int
    before: int
    slots: int
    room: int
    ends: Int[Array, "n E"]
    bounds: Int[Array, "n n1"]
    me: Any

    @classmethod
    def of(cls, axes: Axes, sizes: Int[Array, "E"], count: int) -> "_Exchange":
        """Gather the sizes of all devices, which each device needs."""
        n = axes.mesh[AXIS]
        every = lax.all_gather(sizes.astype(jnp.int32), AXIS)
        ends = jnp.cumsum(every, 1, dtype=jnp.int32)
        last = ends[:, sizes.shape[0] // n - 1 :: sizes.shape[0] // n]
        zeros = jnp.zeros((n, 1), jnp.int32)
        # Rows of no group come last, and go with those of the last device.
        bounds = jnp.concatenate([zeros, last[:, :-1], jnp.full((n, 1), count, jnp.int32)], 1)
        return cls(axes, count, 0, *slots_of(count, n), ends, bounds, lax.axis_index(AXIS))

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.axes.mesh[AXIS]

    def later(self) -> "_Exchange":
        """Return the exchange of the rows behind the first turn."""
        slots, room = slots_of(self.count, self.devices, LATER_SLOTS)
        return dataclasses.replace(self, before=self.slots, slots=slots, room=room)

    def turns(self) -> Int[Array, ""]:
        """Return in how many turns all rows of all devices are sent."""
        most = (self.bounds[:, 1:] - self.bounds[:, :-1]).max() - self.before
        return (most + self.slots - 1) // self.slots

    def turn(self, number: Int[Array, ""]) -> "_Turn":
        """Return what is sent in a turn."""
        offset = self.before + number * self.slots
        counts = jnp.clip(self.bounds[:, 1:] - self.bounds[:, :-1] - offset, 0, self.slots)
        mine = lax.dynamic_index_in_dim(self.bounds, self.me, 0, keepdims=False)
        there = lax.dynamic_index_in_dim(self.bounds, self.me, 1, keepdims=False)
        return _Turn(
            self,
            jnp.minimum(mine[:-1] + offset, self.count),
            there + offset,
            lax.dynamic_index_in_dim(counts, self.me, 0, keepdims=False),
            lax.dynamic_index_in_dim(counts, self.me, 1, keepdims=False),
        )


@dataclasses.dataclass(frozen=True)
class _Turn:
    """What is sent in one turn.

    **Fields:** `exchange`; of each device, `first`, the first of this device's rows for it, and
    `theirs`, the first of its rows for this one, among all rows of either; `sent` and `received`,
    how many.
    """

    exchange: _Exchange
    first: Int[Array, "n"]
    theirs: Int[Array, "n"]
    sent: Int[Array, "n"]
    received: Int[Array, "n"]

    @property
    def _ragged(self) -> bool:
        return self.exchange.axes.platform in ("gpu", "tpu")

    def _filled(self, array: Array, other: Any) -> Array:
        """Return what is in all slots, with another value in the rest of the room."""
        missing = self.exchange.room - array.shape[0]
        return jnp.concatenate([array, jnp.broadcast_to(other, (missing, *array.shape[1:]))])

    def _rows(self, first: Int[Array, "n"]) -> Int[Array, "n slots"]:
        """Return the number of the row in each slot, given the first one of each device."""
        return first[:, None] + jnp.arange(self.exchange.slots, dtype=jnp.int32)[None]

    def _has_row(self, counts: Int[Array, "n"]) -> Bool[Array, "n slots"]:
        return jnp.arange(self.exchange.slots, dtype=jnp.int32)[None] < counts[:, None]

    def out(self, array: Array, *, zeros: bool) -> Array:
        """Send rows `(count, ...)` to their devices; returns those received, `(room, ...)`.

        Slots without a row have `zeros`, or some other row: what the function is defined for.
        """
        n, slots = self.exchange.devices, self.exchange.slots
        other = jnp.zeros_like(array[:1]) if zeros else array[:1]
        if self._ragged:
            room = jnp.broadcast_to(other, (self.exchange.room, *array.shape[1:]))
            places = jnp.full((n,), self.exchange.me * slots, jnp.int32)
            return lax.ragged_all_to_all(
                array, room, self.first, self.sent, places, self.received, axis_name=AXIS
            )
        index = jnp.minimum(self._rows(self.first), self.exchange.count - 1)
        sent = array[index.reshape(-1)]
        if zeros:
            has_row = self._has_row(self.sent).reshape(-1, *(1,) * (array.ndim - 1))
            sent = jnp.where(has_row, sent, jnp.zeros((), sent.dtype))
        return self._filled(lax.all_to_all(sent, AXIS, 0, 0, tiled=True), other)

    def back(self, computed: Array, rows: Array) -> Array:
        """Send what was computed of received rows back; returns `rows` with it in their places."""
        n, slots = self.exchange.devices, self.exchange.slots
        if self._ragged:
            places = jnp.arange(n, dtype=jnp.int32) * slots
            return lax.ragged_all_to_all(
                computed, rows, places, self.received, self.theirs, self.sent, axis_name=AXIS
            )
        returned = lax.all_to_all(computed[: n * slots], AXIS, 0, 0, tiled=True)
        outside = self.exchange.count + jnp.arange(n * slots, dtype=jnp.int32).reshape(n, slots)
        index = jnp.where(self._has_row(self.sent), self._rows(self.first), outside)
        return rows.at[index.reshape(-1)].set(returned, mode="drop", unique_indices=True)

    def groups(self, own: int, spare: int) -> Int[Array, "room"]:
        """Return of each row received which of this device's `own` groups its row is in.

        `own` for a row of no group, `spare` for a slot without a row.
        """
        first = self.exchange.me * own
        ends = lax.dynamic_slice_in_dim(self.exchange.ends, first, own, 1)
        group = (self._rows(self.theirs)[:, :, None] >= ends[:, None, :]).sum(-1, dtype=jnp.int32)
        group = jnp.where(self._has_row(self.received), group, jnp.int32(spare))
        return self._filled(group.reshape(-1), jnp.int32(spare))


def _at_once(function: RowFunction, *shards: Array) -> list[Array]:
    """Compute this device's buffers at their experts, and others' buffers at this device's."""
    rows, *others = split(shards, function.operands)
    first = function.first
    jaxpr = function.jaxpr if first is None else first.jaxpr
    unsent = 0 if first is None else first.unsent
    received = [lax.all_to_all(x, AXIS, 0, 0, tiled=True) for x in rows[unsent:]]
    operands = [*received, *(x for part in others for x in part)]
    results = eval_manual_body(jaxpr.jaxpr, jaxpr.consts, operands)
    computed, *rest = split(results, (*function.results, len(results) - sum(function.results)))
    returned = [lax.all_to_all(y, AXIS, 0, 0, tiled=True) for y in computed]
    keeps = [results[place] for place in first.kept] if first is not None else []
    return [*returned, *rest[0], *rest[1], *keeps]


def _in_turns(
    axes: Axes, function: RowFunction, results: Sequence[Sequence[Any]], *shards: Array
) -> list[Array]:
    """Compute this device's rows at their experts, and others' rows at this device's."""
    *arrays, sizes = shards
    rows, weights, whole, kept = split(arrays, function.operands)
    exchange = _Exchange.of(axes, sizes, rows[0].shape[0])
    own = sizes.shape[0] // exchange.devices
    # Where all rows are added up, what has no row is computed as those that have: the product of
    # no group is zero, and the derivative there may be infinite.
    spare = own - 1 if function.adds_up else own + 1
    zeros = [number >= len(rows) - function.cotangents for number in range(len(rows))]

    def turn(
        exchange: _Exchange, carry: Any, jaxpr: Any, unsent: int, values: Sequence[Array]
    ) -> Any:
        """Return the carry after a turn of rows but the first `unsent`, and further results."""
        number, outs, totals = carry
        turn = exchange.turn(number)
        received = [
            turn.out(x, zeros=zero) for x, zero in zip(rows[unsent:], zeros[unsent:], strict=True)
        ]
        computed, added, more = _sorted_by_group(
            jaxpr, function.results, turn.groups(own, spare), own, received, [*weights, *values]
        )
        outs = [turn.back(y, out) for y, out in zip(computed, outs, strict=True)]
        totals = [total + y.astype(total.dtype) for total, y in zip(totals, added, strict=True)]
        return (number + 1, outs, totals), more

    outs = [jnp.zeros(a.shape, a.dtype) for a in results[0]]
    added = function.jaxpr.out_avals[len(outs) :]
    totals = [jnp.zeros(a.shape, sum_dtype(a.dtype)) for a in added]
    carry, keeps = (jnp.zeros((), jnp.int32), outs, totals), []
    if (first := function.first) is not None:
        carry, more = turn(exchange, carry, first.jaxpr, first.unsent, [*whole, *kept])
        before = len(function.jaxpr.out_avals)
        keeps = [more[place - before] for place in first.kept]
        exchange, carry = exchange.later(), (jnp.zeros((), jnp.int32), *carry[1:])
    with jax.named_scope(IF_UNEVEN) if first else contextlib.nullcontext():
        _, outs, totals = lax.while_loop(
            lambda c: c[0] < exchange.turns(),
            lambda c: turn(exchange, c, function.jaxpr, 0, whole)[0],
            carry,
        )
    return [*outs, *(y.astype(a.dtype) for y, a in zip(totals, added, strict=True)), *keeps]


def _sorted_by_group(
    jaxpr: Any,
    counts: tuple[int, ...],
    groups: Int[Array, "room"],
    own: int,
    rows: Sequence[Array],
    others: Sequence[Array],
) -> tuple[list[Array], list[Array], list[Array]]:
    """Apply a function to received rows in the order of their groups, and to `others`.

    **Returns:** results for each row, as received; those that are added up; and further ones.
    """
    order = jnp.argsort(groups, stable=True)
    places = jnp.arange(order.shape[0], dtype=order.dtype)
    inverse = jnp.zeros_like(order).at[order].set(places, unique_indices=True)
    sizes = (groups[:, None] == jnp.arange(own, dtype=groups.dtype)[None]).sum(0, dtype=jnp.int32)
    operands = [*(x[order] for x in rows), *others, sizes]
    results = eval_manual_body(jaxpr.jaxpr, jaxpr.consts, operands)
    of_rows = counts[0]
    added = sum(counts)
    return [y[inverse] for y in results[:of_rows]], results[of_rows:added], results[added:]
