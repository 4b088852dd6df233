"""Partition `scan` and `while_loop`.

A loop's body is partitioned like any function, but each iteration must receive its operands in the
same shardings: the constants, the carry (see `carry.py`) and the rows of the stacked inputs. `Loop`
follows the body until these shardings are stable, mostly once, and runs under `lax.scan` what was
traced of it then.

    mesh tensor=2; a scan over 6 layers; the model's shapes and the shapes on one device

    operand        whole         sharding                    in the body     on one device
    stacked w      (6, 16, 32)   (None, None, tensor)        (16, 32)        (16, 16)
    stacked v      (6, 32, 16)   (None, tensor, None)        (32, 16)        (16, 16)
    carry h        (8, 16)       (None, None)                (8, 16)         (8, 16)
    x @ w          (8, 32)       (None, tensor)                              (8, 16)
    ... @ v        (8, 16)       partial={tensor}: one all-reduce per iteration

The leading dim of a stacked input is replicated: `lax.scan` takes a row per iteration, and a row
that is on one device only would cost a broadcast each time.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array

from plurax.jaxpr.compat import Scan, open_jaxpr
from plurax.jaxpr.context import GATHERED, RING
from plurax.partition.buckets import computed_at
from plurax.partition.carry import Carry
from plurax.partition.executors import FollowShapes
from plurax.partition.manual import masked
from plurax.partition.resharder import Attempt
from plurax.partition.ring import AXIS, PLACED, Ring, kind_of_stack, ring_of
from plurax.partition.values import OwnRows, ShardedValue, ValueVersions
from plurax.sharding.spec import REPLICAS, TensorSharding


class Loop:
    """One `scan` of a partitioned function.

    In an optimizer's loop, such as Newton-Schulz steps that make a matrix orthogonal, each
    iteration may gather over `data` (ZeRO). Where one gather before the loop sends less, the carry
    is replicated over `data` first.

    Where blocks of keys go around in a ring (see `ring.py`), the iterations are split over devices;
    not with `ring=False`.

    `less` has stacks that may be partial sums (`partial_sums.py`).
    """

    def __init__(
        self,
        partitioner: Any,
        eqn: Any,
        inputs: list[ValueVersions],
        goals: list[TensorSharding | None],
        less: Mapping[Any, int],
        *,
        ring: bool = True,
    ) -> None:
        self.partitioner, self.eqn = partitioner, eqn
        self.scan = Scan.of(eqn)
        self.length, self.carried = self.scan.length, self.scan.num_carry
        self.consts, carry, xs = self.scan.split(inputs)
        self.ring = ring_of(partitioner, eqn, [*self.consts, *carry], xs) if ring else ()
        # Whether an iteration communicates over the ring, where devices have different blocks.
        self.mixes_blocks = False
        self.carry = Carry(partitioner, self.scan.split(self.scan.body.invars)[1], carry)
        # The place of the sizes of a stack of which each device has its own rows.
        self.sizes = [self._place_of_sizes(versions, xs) for versions in xs]
        self.xs = [
            versions.value if place is not None else self._unstacked(versions, stack in less)
            for versions, place, stack in zip(
                xs, self.sizes, self.scan.split(eqn.invars)[2], strict=True
            )
        ]
        # How many numbers of a row are reduced where its stack is read, if it may be partial.
        self.later = [
            None if place < self.carried or var not in less else less[var] // max(self.length, 1)
            for place, var in enumerate(eqn.outvars)
        ]
        # The carry's shardings are its own fixed point; only stacked outputs can have goals.
        self.goals = [
            *[None] * self.carried,
            *(partitioner.row_goal(goal) for goal in goals[self.carried :]),
        ]
        reduce_shared(partitioner, self.consts)
        self.found: list[ShardedValue] = []
        # The last attempt, and what it followed.
        self.attempt: Attempt
        self.body: Callable[..., Any]
        # By the place of a stacked output: which rows a device has, and the place of their sizes.
        self.own: dict[int, tuple[OwnRows, int]] = {}

    def _place_of_sizes(self, versions: ValueVersions, xs: list[ValueVersions]) -> int | None:
        """Return the place of the sizes by which devices have rows of a stack, if they have."""
        rows = None if versions.deferred or self.ring else versions.value.rows
        if rows is None or versions.value.sharding.dims[0]:
            return None
        return next((place for place, one in enumerate(xs) if one is rows.sizes), None)

    def _unstacked(self, versions: ValueVersions, partial: bool) -> ShardedValue:
        """Return a stacked input with its leading dim replicated, so that a scan can take rows, or
        in a ring with each device's own; `partial`, whether it may stay a partial sum."""
        partial = partial and not (versions.deferred or self.ring)
        value: ShardedValue = versions.value if partial else self.partitioner.reduced(versions)
        if value.sharding.dims[0] not in ((), self.ring):
            # Of the user's tokens a warning is given, of blocks of attention it is meant so.
            scope = str(self.eqn.source_info.name_stack)
            of_tokens = AXIS in self.partitioner.axes.mesh_axes(value.sharding.dims[0])
            meant = RING in scope or GATHERED in scope or not of_tokens
            line = None if meant else self.partitioner.line(self.eqn)
            with self.partitioner.needed_by(self.eqn, line):
                value = self.partitioner.reshard(versions, value.sharding.with_dim(0, ()))
        return value

    def settle(self) -> None:
        """Find the shardings of the carry, by following the body."""
        rows = [jax.ShapeDtypeStruct(x.array.shape[1:], x.dtype) for x in self.xs]
        replicated = False
        # `max_attempts` reach a fixed point; replicating the carry over `data` starts a second.
        for _ in range(2 * self.carry.max_attempts):
            kind = FollowShapes if self.ring else None  # a ring runs the body in other ways
            with self.partitioner.repeated(self.length), self.partitioner.attempt(kind) as attempt:
                executor, records = self.attempt = attempt
                self.body = executor.follow(self._iteration, self.carry.shapes(), rows)
            if self.carry.learn(self.found[: self.carried]):
                self.mixes_blocks = bool(self.ring) and any(AXIS in one.axes for one in records)
                # `sent` is that of one iteration, and the alternative is sent once.
                gathers = [one for one in records if set(REPLICAS).intersection(one.axes)]
                sent = sum(record.bytes_sent for record in gathers)
                if replicated or not self.carry.is_gather_cheaper(sent * self.length):
                    return
                self.carry.replicate_over_data()
                replicated = True
        raise AssertionError("no sharding of the carry fits the loop")

    def run(self, start: list[Array]) -> list[ValueVersions]:
        """Run the loop and return the final carry and the stacked outputs."""
        rows = [value.array for value in self.xs]
        kinds = [kind_of_stack(x.sharding, self.ring) for x in self.found[self.carried :]]
        if self.ring:
            around = [value.sharding.dims[0] == self.ring for value in self.xs]
            ring = Ring(self.partitioner, self.ring, self.scan, self._iteration, around, kinds)
            arrays = ring.run(start, rows)
        else:
            self.partitioner.keep(self.attempt, self.length)
            arrays = self.partitioner.executor.scan(self.scan, self.body, start, rows)
        results = []
        kinds = [*[""] * self.carried, *kinds]
        for var, array, value, kind in zip(
            self.eqn.outvars, arrays, self.found, kinds, strict=True
        ):
            sharding, data_varying, is_param = value.kind
            # A stacked output has one leading dim more than the row that the body returned.
            if len(sharding.dims) < len(var.aval.shape):
                over = self.ring if kind != PLACED else ()
                sharding = TensorSharding((over, *sharding.dims), sharding.partial - {*over})
            shape = tuple(var.aval.shape)
            out = ShardedValue(array, shape, sharding, data_varying, is_param)
            results.append(ValueVersions(out))
        for place, (of_row, sizes) in self.own.items():
            own = OwnRows(of_row.dim + 1, of_row.axes, results[sizes])
            results[place] = ValueVersions(dataclasses.replace(results[place].value, rows=own))
        return results

    def _rows(self, xs: Sequence[Any]) -> list[ValueVersions]:
        """Return the rows of the stacked inputs for an iteration."""
        rows = [ValueVersions(_row(stack, array)) for stack, array in zip(self.xs, xs, strict=True)]
        for place, sizes in enumerate(self.sizes):
            of_stack = self.xs[place].rows
            if of_stack is not None and sizes is not None:
                own = OwnRows(of_stack.dim - 1, of_stack.axes, rows[sizes])
                rows[place] = ValueVersions(dataclasses.replace(rows[place].value, rows=own))
        return rows

    def _iteration(self, carry: Sequence[Any], xs: Sequence[Any]) -> list[Array]:
        """Run one iteration on one device's shards."""
        # Fresh, because a version that is created inside the body does not exist outside of it.
        inputs = [versions.fresh() for versions in self.consts]
        inputs += self.carry.received(carry)
        inputs += self._rows(xs)
        outside = self.partitioner.over_layers
        self.partitioner.over_layers = any(map(self.partitioner.context.of_parameters, self.xs))
        body, consts = self.scan.body, self.scan.body_consts
        options: Any = {"with_sizes": True, "later": self.later}
        out = self.partitioner.evaluate(body, consts, inputs, self.goals, **options)
        self.partitioner.over_layers = outside
        values = self.carry.returned(out[: self.carried])
        # A stacked gradient with a goal is reduced row by row, so only shards are stacked.
        order = computed_at(self.scan.body.eqns, self.scan.body.outvars[self.carried :])
        stacked = [
            one if one.deferred else ValueVersions(self.partitioner.stored(one))
            for one in out[self.carried :]
        ]
        values += self.partitioner.finish(stacked, self.goals[self.carried :], order)
        self.found = values
        self.own = {
            place: (value.rows, out.index(value.rows.sizes))
            for place, value in enumerate(values)
            if place >= self.carried and value.own_rows and value.rows
        }
        return [value.array for value in values]


class While:
    """One `while_loop` of a partitioned function.

    Devices that communicate inside the loop must run equally many iterations. If the condition
    depends on a device's own rows, the devices run different numbers: then everything that the loop
    reads is replicated over `data` before it, and nothing inside communicates over `data`.
    """

    def __init__(self, partitioner: Any, eqn: Any, inputs: list[ValueVersions]) -> None:
        self.partitioner, self.eqn = partitioner, eqn
        condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        tested, shared = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        self.tested, self.shared = inputs[:tested], inputs[tested : tested + shared]
        # `vmap` over a data-dependent condition leaves one boolean per example.
        if condition.out_avals[0].shape:
            condition, body = _masked_iterations(partitioner, condition, body, tested, shared)
            self.shared = inputs[: tested + shared]
        self.condition, self.condition_consts = open_jaxpr(condition)
        self.body, self.body_consts = open_jaxpr(body)
        reduce_shared(partitioner, inputs[: tested + shared])
        self.carry = Carry(
            partitioner, self.body.invars[len(self.shared) :], inputs[tested + shared :]
        )
        self.found: list[ShardedValue] = []
        self.data_varying = False

    def settle(self) -> None:
        """Find the carry's shardings, and whether devices run different numbers of iterations."""
        for _ in range(1 + self.carry.max_attempts):
            with self.partitioner.planning():
                self._goes_on(self.carry.shapes())
                self._iteration(self.carry.shapes())
            # First make sure that all devices can run the loop on their own, then find a fixed
            # point for the carry without `data`.
            if self._uneven and not self.data_varying:
                self.data_varying = True
                self.carry.vary()
                self.tested, self.shared = (
                    [ValueVersions(replicated_over_data(self.partitioner, one)) for one in some]
                    for some in (self.tested, self.shared)
                )
            elif self.carry.learn(self.found):
                return
        raise AssertionError("no sharding of the carry fits the loop")

    def run(self) -> list[ValueVersions]:
        """Run the loop and return the final carry."""
        start = tuple(self.carry.start())
        # A permute needs all devices, and here each may leave the loop at another iteration.
        # How many iterations there are is not known before.
        with self.partitioner.apart(self.data_varying), self.partitioner.repeated(None):
            last = self.partitioner.executor.while_loop(self._goes_on, self._iteration, start)
        return [
            ValueVersions(dataclasses.replace(value, array=array))
            for value, array in zip(self.found, last, strict=True)
        ]

    def _goes_on(self, carry: Any) -> Array:
        """Evaluate the condition, and note in `_uneven` whether it depends on the device's rows."""
        inputs = [versions.fresh() for versions in self.tested] + self.carry.received(carry)
        (holds,) = self.partitioner.evaluate(self.condition, self.condition_consts, inputs)
        # Every device needs the whole condition: a partial sum is reduced.
        value: ShardedValue = self.partitioner.reshard(holds, TensorSharding(()))
        self._uneven = value.data_varying
        return value.array

    def _iteration(self, carry: Any) -> tuple[Array, ...]:
        """Run one iteration on one device's shards."""
        inputs = [versions.fresh() for versions in self.shared] + self.carry.received(carry)
        out = self.partitioner.evaluate(self.body, self.body_consts, inputs)
        self.found = self.carry.returned(out)
        return tuple(value.array for value in self.found)


def _masked_iterations(
    partitioner: Any, condition: Any, body: Any, tested: int, shared: int
) -> tuple[Any, Any]:
    """Return condition and body of a loop to which `vmap` gave one condition per example.

    The loop runs while any example's condition is true, and an iteration updates only the examples
    whose condition is. The body takes the condition's constants first, then its own.
    """
    holds, turned = jaxpr_as_fun(condition), jaxpr_as_fun(body)

    def any_holds(*args: Any) -> Any:
        return jnp.any(holds(*args)[0])

    def turn(*args: Any) -> list[Any]:
        carry = args[tested + shared :]
        yes = holds(*args[:tested], *carry)[0]
        return masked(yes, turned(*args[tested : tested + shared], *carry), carry)

    def like(avals: Any) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

    all_avals = [*condition.in_avals[:tested], *body.in_avals]
    return (
        partitioner.traced(any_holds, *like(condition.in_avals))[0],
        partitioner.traced(turn, *like(all_avals))[0],
    )


def reduce_shared(partitioner: Any, inputs: list[ValueVersions]) -> None:
    """Reduce partial sums among a loop's constants before the loop, not in each iteration."""
    for versions in inputs:
        if versions.deferred is None or versions.deferred.free is not None:
            # First, because `ValueVersions.fresh` gives the body the first version.
            versions.values.insert(0, partitioner.reduced(versions))


def replicated_over_data(partitioner: Any, versions: ValueVersions) -> Any:
    """Return a value replicated over `data`; a deferred value is returned as it is."""
    if versions.deferred is not None:
        return versions.deferred
    value: ShardedValue = partitioner.reduced(versions)
    return partitioner.reshard(versions, value.sharding.without(["data"]))


def _row(stack: ShardedValue, array: Array) -> ShardedValue:
    """Return one row of a stacked input."""
    sharding = TensorSharding(stack.sharding.dims[1:], stack.sharding.partial)
    shape = stack.shape[1:]
    return dataclasses.replace(stack, array=array, shape=shape, sharding=sharding, rows=None)
