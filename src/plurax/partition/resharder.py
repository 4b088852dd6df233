"""Reshard the values of a partitioned function, execute operations on shards, record collectives.

The `Partitioner` walks equations; a `Resharder` does what each of them needs done to values. With a
`Decision` of an operator rule:

    mesh tensor=4; float32; y = x @ w, x (8, 64) is (None, tensor), w (64, 32) is (None, tensor)

    decision                                   the resharder
    x: (None, tensor), w: (tensor, None)       records an all-to-all of w, 1536 bytes sent
                                               runs it (an executor: emits it, or follows shapes)
    y: (8, 32), partial={tensor}; execute      runs execute: (8, 16) @ (16, 32)
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from plurax.collective import Collective
from plurax.jaxpr.barrier import order_after
from plurax.jaxpr.product_dims import ProductDims
from plurax.partition.executors import EmitOperations, Executor, FollowShapes
from plurax.partition.rule_context import RuleContext
from plurax.partition.scopes import reason_scope
from plurax.partition.values import (
    Decision,
    DeferredValue,
    InnerCollective,
    Operand,
    Output,
    ShardedValue,
    ValueVersions,
)
from plurax.sharding.axes import Axes
from plurax.sharding.reduce_dtype import SumRounding
from plurax.sharding.reshard import ReshardStep, apply_moves
from plurax.sharding.spec import REPLICAS, TensorSharding

Attempt = tuple[Executor, list[Collective]]
"""What executed operations that may not be kept, and their collectives."""


class Resharder:
    """Brings values to shardings, and executes operations on one device's shards.

    **Arguments:**

    - `axes`: the axes over which tensors are split.
    - `joint`: the batch is one dim split over `data`, so no value is `data_varying`. A parameter
      split over `data` is then gathered wherever an equation reads it with a value of the batch.
    - `bucket_bytes`: bytes of tensors gathered, or reduce-scattered, over `data` in one collective.
    - `reduce_dtype`: what gradients are rounded to where they are added up over `data`.

    **Attributes:** `records`, what resharding and operators sent so far, in order. Decisions and
    warnings read it; what a step communicates is read from the recorded step (`plurax.trace`).
    """

    def __init__(
        self, axes: Axes, *, joint: bool = False, bucket_bytes: int = 1,
        reduce_dtype: str | None = None,
    ) -> None:  # fmt: skip
        self.axes, self.joint, self.bucket_bytes = axes, joint, bucket_bytes
        self.rounding = SumRounding(reduce_dtype, axes.platform)
        self.records: list[Collective] = []
        self._executor: Executor = EmitOperations()
        self._trips: int | None = 1
        self._eqn: Any = None
        self._without_rule: tuple[str, str] | None = None

    # --- Executing, or only following shapes ------------------------------------------------------

    @contextlib.contextmanager
    def planning(self) -> Iterator[list[Collective]]:
        """Execute nothing within: shards are `jax.ShapeDtypeStruct`s. Yields the collectives."""
        with self.attempt(FollowShapes) as (_, records):
            yield records

    @contextlib.contextmanager
    def attempt(self, kind: type[Executor] | None = None) -> Iterator[Attempt]:
        """Keep apart what is executed within, by default as everything else, until `keep`."""
        executor, records = self._executor, self.records
        self._executor, self.records = (kind or type(executor))(), []
        try:
            yield self._executor, self.records
        finally:
            self._executor, self.records = executor, records

    def keep(self, attempt: Attempt, trips: int) -> None:
        """Count what an attempt has executed, which a loop repeats."""
        self._executor.add(attempt[0], trips)
        self.records += attempt[1]

    @property
    def executor(self) -> Executor:
        """What is done to shards: operations are emitted, or only shapes followed."""
        return self._executor

    @property
    def context(self) -> RuleContext:
        """What operator rules know of the mesh."""
        return RuleContext(self.axes, self.joint)

    def run(
        self,
        execute: Callable[..., Sequence[Array]],
        arrays: Sequence[Any],
        specs: Sequence[ShardedValue],
        product: ProductDims | None = None,
    ) -> list[ShardedValue]:
        """Apply operations to shards; `specs` are the results, with shapes in place of arrays."""
        out = self._executor.run(execute, arrays, [spec.array for spec in specs], product)
        return [
            spec if array is spec.array else dataclasses.replace(spec, array=array)
            for spec, array in zip(specs, out, strict=True)
        ]

    def apply(self, decision: Decision) -> list[Output]:
        """Reshard the operands of a decision and execute it."""
        values = [self._operand(operand) for operand in decision.operands]
        if decision.defer is not None:
            return [decision.defer(values)]
        self._record_sent(decision.sent)
        shards = [value.array for value in values]
        return [*self.run(decision.execute, shards, decision.outputs, decision.product)]

    def _operand(self, operand: Operand) -> ShardedValue:
        for sharding in operand.path:
            value = self.reshard(operand.versions, sharding)
        return value if operand.halos is None else self._with_halos(operand, value)

    def _with_halos(self, operand: Operand, value: ShardedValue) -> ShardedValue:
        """Return the places that a device reads of a value, its neighbours' too."""
        halos, shape = operand.halos, value.array.shape
        known, key = operand.versions.with_halos, (value.sharding, halos)
        if key not in known:
            self._record_sent(halos.sent(self.context, shape, value.dtype))
            array = jax.ShapeDtypeStruct(halos.shape(shape), value.dtype)
            spec = dataclasses.replace(value, array=array)
            read = self.run(lambda array: [halos.read(self.axes, array)], [value.array], [spec])
            known[key] = read[0]
        return known[key]

    # --- Resharding -------------------------------------------------------------------------------

    def value(self, versions: ValueVersions) -> ShardedValue:
        """Return the first version; a deferred value is created for it."""
        if versions.deferred is not None:
            self.create(versions, versions.deferred.default_sharding)
        return versions.value

    def stored(self, versions: ValueVersions) -> ShardedValue:
        """Return the version to keep: of a partial sum that was reduced, what it was reduced to."""
        first = self.value(versions)
        return next((one for one in versions.values if not one.sharding.partial), first)

    def create(self, versions: ValueVersions, sharding: TensorSharding) -> None:
        """Create a deferred value in a sharding, or the nearest possible, as its first version."""
        deferred = versions.deferred
        assert deferred is not None
        decision = deferred.decide(self.context, deferred.sources, sharding)
        (value,) = self.apply(decision)
        assert isinstance(value, ShardedValue)
        versions.values.append(value)

    def reshard(self, versions: ValueVersions, target: TensorSharding) -> ShardedValue:
        """Reshard a value from whichever of its versions is cheapest, and keep the new version."""
        if versions.deferred is not None:
            self.create(versions, target)
        best = self.context.cheapest(versions, target)
        if best.sharding == target:
            return best
        if versions.is_zero:
            # Zeros are created in the target sharding, which sends nothing.
            zeros = ValueVersions(self.zeros(versions.shape, best.dtype))
            self.create(zeros, target)
            moved = zeros.value
        else:
            moved = self.move(best, target)
        versions.values.append(moved)
        return moved

    def move(self, value: ShardedValue, target: TensorSharding) -> ShardedValue:
        """Reshard one value and record the collectives."""
        if value.sharding == target:
            return value
        steps = self.context.steps(value, target)
        by = "" if self._eqn is None else _named(self._eqn)
        for step in steps:
            # A slice is local.
            if step.kind != "slice":
                over = self.axes.mesh_axes(step.axes)
                self._record(step.kind, over, step.bytes, step.bytes_sent, by)
        spec = self.context.spec(
            value.shape, value.dtype, target, value.data_varying, value.is_param
        )
        axes = self.axes

        def apply(shard: Array) -> list[Array]:
            return [apply_moves(shard, value.shape, value.sharding, steps, axes)]

        line = self._without_rule and self._without_rule[1]
        with jax.named_scope(reason_scope(by, line)) if by else contextlib.nullcontext():
            return self.run(apply, [value.array], [spec])[0]

    def rounded_to_send(self, value: ShardedValue, target: TensorSharding) -> ShardedValue:
        """Return a gradient as it is sent, rounded if its reshard adds it up over `data`."""
        adds_up = not (value.sharding.partial - target.partial).isdisjoint(REPLICAS)
        if not (adds_up and self.rounding.rounds(value.dtype)):
            return value
        return self._apply(self.rounding.term, value)

    def rounded_sum(
        self, total: ShardedValue, sent: ShardedValue, own: ShardedValue
    ) -> ShardedValue:
        """Return the sum of what was `sent` for a gradient, in the `own` dtype of that."""
        if sent is own:
            return total
        return self._apply(lambda array: self.rounding.total(array, own.dtype), total)

    def _apply(self, fun: Callable[[Array], Array], value: ShardedValue) -> ShardedValue:
        spec = dataclasses.replace(value, array=jax.eval_shape(fun, value.array))
        return self.run(lambda array: [fun(array)], [value.array], [spec])[0]

    def order_after(self, values: Sequence[ShardedValue], by: Array) -> list[ShardedValue]:
        """Return values with a data dependency on `by` (see `jaxpr.barrier`)."""
        return self.run(
            lambda *arrays: order_after(arrays, by), [value.array for value in values], values
        )

    def whole(self, value: ShardedValue) -> ShardedValue:
        """Replicate a value on every device."""
        return self.move(value, TensorSharding.replicated(len(value.shape)))

    def reduced(self, versions: ValueVersions) -> ShardedValue:
        """Return a version that is not a partial sum; reduce one if there is none."""
        return self.reshard(versions, self.context.reduced(versions))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> DeferredValue:
        """Return zeros whose sharding is chosen by the first reader."""
        return self.context.zeros(shape, dtype)

    def constant(self, value: Any) -> ValueVersions:
        """Return a constant of a traced function, replicated; a numeric zero stays deferred."""
        aval = jax.typeof(value)
        known = isinstance(value, np.ndarray | np.generic | int | float)
        if known and not np.shape(value) and not value and not isinstance(value, bool):
            return ValueVersions(self.zeros((), aval.dtype))
        whole = TensorSharding.replicated(len(aval.shape))
        spec = self.context.spec(aval.shape, aval.dtype, whole, is_param=True)
        return ValueVersions(self.run(lambda: [jnp.asarray(value)], [], [spec])[0])

    def record_together(self, steps: Sequence[ReshardStep]) -> None:
        """Record one collective that performs several steps in one buffer."""
        first, axes = steps[0], self.axes.mesh_axes(steps[0].axes)
        size, bytes_sent = sum(step.bytes for step in steps), sum(step.bytes_sent for step in steps)
        self._record(first.kind, axes, size, bytes_sent)

    def _record_sent(self, sent: Sequence[InnerCollective]) -> None:
        for one in sent:
            n, over = self.axes.size(one.axes), self.axes.mesh_axes(one.axes)
            self._record(one.kind, over, one.bytes(n), one.bytes_sent(n))

    def record_permute(self, axes: tuple[str, ...], shard: Any) -> None:
        """Record that a device sends a shard to another along axes."""
        size = shard.size * shard.dtype.itemsize
        self._record("collective-permute", self.axes.mesh_axes(axes), size, size)

    def _record(
        self, kind: str, axes: tuple[str, ...], size: int, bytes_sent: float, operation: str = ""
    ) -> None:
        trips = self._trips
        gathers = kind in ("all-gather", "all-to-all")
        because = self._without_rule if gathers else None
        self.records.append(
            Collective(kind, axes, size, bytes_sent, trips != 1, trips, operation, because)
        )

    def repeated(self, trips: int | None) -> contextlib.AbstractContextManager[None]:
        """Record collectives within as those of a loop's body; None for an unknown length."""
        total = None if trips is None or self._trips is None else self._trips * trips
        return self._with(_trips=total)

    def needed_by(
        self, eqn: Any, line: str | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Record collectives within as those of an equation's operands.

        `line` is that of the model's code if the equation's operation has no rule.
        """
        without_rule = None if line is None else (eqn.primitive.name, line)
        return self._with(_eqn=eqn, _without_rule=without_rule)

    def apart(self, data_varying: bool) -> contextlib.AbstractContextManager[None]:
        """Disable permutes in a branch or loop that not all devices along `data` execute.

        All devices of a mesh take part in a collective permute, so it would wait forever there.
        """
        axes = self.axes
        if data_varying:
            axes = Axes(axes.mesh, axes.parts, permutes=False, platform=axes.platform)
        return self._with(axes=axes)

    @contextlib.contextmanager
    def _with(self, **attributes: Any) -> Iterator[None]:
        before = {name: getattr(self, name) for name in attributes}
        vars(self).update(attributes)
        try:
            yield
        finally:
            vars(self).update(before)


def _named(eqn: Any) -> str:
    """Return an equation's operation and enclosing function, such as "dot_general in attention"."""
    name = str(eqn.primitive.name)
    # `jnp.sort` is a jitted function that calls the primitive `sort`.
    frames = str(eqn.source_info.name_stack).split("/")
    frames = [frame for frame in frames if frame not in ("", f"jit({name})")]
    return f"{name} in {frames[-1]}" if frames else name
