"""The shard strategies of one equation, asked of its operator rule.

An operator rule decides which shardings an operation needs. Asked with some input shardings, it
either takes them all as they are, and then they are a strategy, with the output shardings and the
all-reduces that follow; or it would reshard one of them first, and then they are none. So whatever
the partitioner can execute can be found, and nothing else, without a second set of rules.

    mesh tensor=4; float32; x (64, 128) @ w (128, 256)

    inputs                               the rule                     output
    (None, None)     (None, tensor)      takes them                   (None, tensor)
    (None, tensor)   (tensor, None)      takes them                   (None, None), partial={tensor}
    (tensor, None)   (None, None)        takes them                   (tensor, None)
    (tensor, None)   (None, tensor)      would reshard one            no strategy
    partial={tensor} (None, None)        would reduce x first         no strategy
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from plurax.jaxpr.compat import ELEMENTWISE
from plurax.jaxpr.fused_attention import FUSED_ATTENTION, fused_dims
from plurax.partition.operators import RULES
from plurax.partition.rule_context import RuleContext
from plurax.partition.values import Decision, DeferredValue, ValueVersions
from plurax.sharding.axes import Axes
from plurax.sharding.spec import TensorSharding

Placement = tuple[int | str | None, ...]
"""Over one axis, for each operand: the dim that is split, "partial", or None."""

PARTIAL = "partial"
_SAME_DIM = ELEMENTWISE | frozenset(
    ["concatenate", "dynamic_update_slice", "sort", "select_and_gather_add"]
)
_VIEWS = frozenset(
    ["broadcast_in_dim", "iota", "reshape", "squeeze", "copy", "name", "stop_gradient"]
)
_ROWS = frozenset(["gather", "dynamic_slice", "slice", "split"])


@dataclasses.dataclass(frozen=True)
class ShardStrategy:
    """One way to compute an equation on shards.

    **Fields:**

    - `inputs`: the sharding of each operand. Of zeros, that in which they are created.
    - `arrivals`: where a rule decides (`plurax.planner.rule_strategies`), for each operand the
      sharding in which it arrives, and that to which an earlier reader has to have resharded it, if
      it is taken from that. None where operands may arrive in any sharding.
    - `splits`: for operands that arrive as partial sums, and of which the rule asks, by place how
      they are split further on (`plurax.partition.lookahead`), or None.
    - `outputs`: the sharding of each result.
    - `sent`: the collectives within it: kind, axes, and the bytes that each device sends.
    - `product`: of a matrix product or convolution `(m, n, k, batch)` on one device, else None.
    - `dtype`: the dtype of the product's operands.
    - `traffic`: bytes that one device reads and writes, fused operations not counted.
    """

    inputs: tuple[TensorSharding, ...]
    outputs: tuple[TensorSharding, ...]
    sent: tuple[tuple[str, tuple[str, ...], float], ...] = ()
    product: tuple[int, int, int, int] | None = None
    dtype: str = ""
    traffic: float = 0.0
    arrivals: tuple[tuple[TensorSharding, ...], ...] | None = None
    splits: tuple[tuple[int, TensorSharding | None], ...] = ()

    @property
    def flops(self) -> float:
        """The floating-point operations of the product on one device."""
        return 2.0 * math.prod(self.product) if self.product else 0.0

    def reshards(self, place: int, source: TensorSharding) -> list[tuple[TensorSharding, ...]]:
        """Return the reshards, from and to, of an operand that arrives as `source`."""
        path = (source, *(self.arrivals[place][1:] if self.arrivals else ()), self.inputs[place])
        return [pair for pair in itertools.pairwise(path) if pair[0] != pair[1]]

    @property
    def bytes_sent(self) -> float:
        """The bytes that each device sends within the operation."""
        return sum(size for *_, size in self.sent)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An operand of an equation: its shape, its dtype, and whether it is known to be zero."""

    shape: tuple[int, ...]
    dtype: Any
    zero: bool = False

    @property
    def itemsize(self) -> int:
        """The bytes of one entry."""
        return int(self.dtype.itemsize)

    @property
    def floating(self) -> bool:
        """Whether it may be a partial sum."""
        return bool(jnp.issubdtype(self.dtype, jnp.inexact))


def every_sharding(
    shape: Sequence[int], axes: Axes, searched: Sequence[str], *, partial: bool = False
) -> tuple[TensorSharding, ...]:
    """Return all shardings of a tensor over some axes, of which the first is replicated.

    A dim is split only if its shards divide it. With `partial`, also the partial sums.

    >>> every_sharding((6, 4), Axes({"tensor": 4}), ["tensor"])
    (TensorSharding(None, None), TensorSharding(None, 'tensor'))
    """
    places = [None, *range(len(shape)), *([PARTIAL] if partial else [])]
    combinations = itertools.product(places, repeat=len(searched))
    found = (_sharding(shape, places, axes, searched) for places in combinations)
    return tuple(dict.fromkeys(one for one in found if one is not None))


def _sharding(
    shape: Sequence[int], places: Sequence[int | str | None], axes: Axes, searched: Sequence[str]
) -> TensorSharding | None:
    """Return the sharding with each searched axis in its place; None if a dim is not divisible."""
    dims: list[tuple[str, ...]] = [()] * len(shape)
    for axis, place in zip(searched, places, strict=True):
        if isinstance(place, int):
            dims[place] = (*dims[place], axis)
    terms = [axis for axis, place in zip(searched, places, strict=True) if place == PARTIAL]
    sharding = TensorSharding(tuple(dims), frozenset(terms))
    return None if sharding.indivisible_dims(shape, axes.sizes) else sharding


class StrategyFinder:
    """Finds the shard strategies of equations; equal equations are looked up once.

    **Arguments:** `axes` of the mesh; `searched`, the axes over which operators may be split;
    `replicated`, whether to find the replicated strategies alone.
    """

    def __init__(self, axes: Axes, searched: Sequence[str], *, replicated: bool = False) -> None:
        self.axes, self.searched, self._replicated = axes, tuple(searched), replicated
        self._context = RuleContext(axes)
        self._known: dict[Any, tuple[ShardStrategy, ...]] = {}

    def of(self, eqn: Any, operands: Sequence[Tensor]) -> tuple[ShardStrategy, ...]:
        """Return the strategies of an equation; there is at least the replicated one.

        No operation is traced or executed: the rules see only shapes.
        """
        params = {k: v for k, v in eqn.params.items() if k not in ("sharding", "out_sharding")}
        results = tuple((tuple(var.aval.shape), var.aval.dtype) for var in eqn.outvars)
        key = (eqn.primitive.name, str(params), tuple(operands), results)
        if key not in self._known:
            self._known[key] = tuple(self._strategies_of(eqn, operands))
        return self._known[key]

    def _strategies_of(self, eqn: Any, operands: Sequence[Tensor]) -> Iterator[ShardStrategy]:
        if self._replicated or eqn.primitive.name not in RULES:
            yield _replicated(eqn, operands)
            return
        per_axis = list(dict.fromkeys(_placements(eqn, operands)))
        tried, seen = set(), set()
        for placements in itertools.product(per_axis, repeat=len(self.searched)):
            shardings = tuple(
                _sharding(
                    one.shape, [place[index] for place in placements], self.axes, self.searched
                )
                for index, one in enumerate(operands)
            )
            if shardings in tried or any(one is None for one in shardings):
                continue
            tried.add(shardings)
            for strategy in self._by_rule(eqn, operands, shardings):
                # Of equal shardings the first is kept; their costs are equal too.
                if (strategy.inputs, strategy.outputs) not in seen:
                    seen.add((strategy.inputs, strategy.outputs))
                    yield strategy
        assert seen, f"no strategy of {eqn}"

    def _by_rule(
        self, eqn: Any, operands: Sequence[Tensor], shardings: Sequence[Any]
    ) -> Iterator[ShardStrategy]:
        """Ask the rule with some input shardings, and yield the strategies that they are."""
        context = self._context
        inputs = [
            ValueVersions(
                context.zeros(tensor.shape, tensor.dtype)
                if tensor.zero
                else context.spec(tensor.shape, tensor.dtype, sharding)
            )
            for tensor, sharding in zip(operands, shardings, strict=True)
        ]
        decision = RULES[eqn.primitive.name](context, eqn, inputs)
        # A deferred result is created as its reader needs it: each such sharding is a strategy.
        created = [decision] if isinstance(decision, Decision) else self._created(decision)
        for choice in created:
            # Of a dim that the shards do not divide, few readers take a part.
            filled = any(map(self._context.is_filled, choice.outputs))
            if not filled and (taken := _kept_shardings(choice, inputs, shardings)) is not None:
                yield strategy_of(self.axes, eqn, operands, taken, choice)

    def _created(self, deferred: DeferredValue) -> list[Decision]:
        wanted = every_sharding(deferred.shape, self.axes, self.searched)
        return [deferred.decide(self._context, deferred.sources, one) for one in wanted]


def _kept_shardings(
    decision: Decision, inputs: Sequence[ValueVersions], shardings: Sequence[TensorSharding]
) -> tuple[TensorSharding, ...] | None:
    """Return the operands' shardings if the decision reshards none of them, else None."""
    if decision.defer is not None:
        return None
    taken = list(shardings)
    for operand in decision.operands:
        places = [index for index, one in enumerate(inputs) if one is operand.versions]
        if not places:
            # Computed from another value, such as a tensor before it was flattened.
            return None
        index = places[0]
        if inputs[index].is_zero:
            taken[index] = operand.sharding
        elif any(sharding != shardings[index] for sharding in operand.path):
            return None
    return tuple(taken)


def _replicated(eqn: Any, operands: Sequence[Tensor]) -> ShardStrategy:
    """Return the strategy of an operation without a rule: everything is replicated."""
    return ShardStrategy(
        tuple(TensorSharding.replicated(len(one.shape)) for one in operands),
        tuple(TensorSharding.replicated(len(var.aval.shape)) for var in eqn.outvars),
        traffic=float(
            sum(math.prod(one.shape) * one.itemsize for one in operands)
            + sum(math.prod(var.aval.shape) * var.aval.dtype.itemsize for var in eqn.outvars)
        ),
    )


def strategy_of(
    axes: Axes,
    eqn: Any,
    operands: Sequence[Tensor],
    taken: tuple[TensorSharding, ...],
    decision: Decision,
) -> ShardStrategy:
    """Return the strategy of a decision that reshards nothing."""
    shapes = [
        sharding.shard_shape(one.shape, axes.sizes)
        for one, sharding in zip(operands, taken, strict=True)
    ]
    read = sum(math.prod(s) * one.itemsize for s, one in zip(shapes, operands, strict=True))
    written = sum(one.array.size * one.dtype.itemsize for one in decision.outputs)
    sent = tuple(
        (one.kind, one.axes, one.bytes_sent(axes.size(one.axes)))
        for one in decision.collectives(RuleContext(axes))
    )
    return ShardStrategy(
        taken,
        tuple(one.sharding for one in decision.outputs),
        sent,
        decision.product,
        str(operands[0].dtype),
        float(_traffic(eqn.primitive.name, read, written)),
    )


def _traffic(name: str, read: float, written: float) -> float:
    """Return the bytes read and written, as if elementwise operations were fused with others."""
    if name in _VIEWS:
        return 0.0
    if name in ELEMENTWISE:
        return written
    if name in _ROWS:
        return 2 * written
    return read + written


def _placements(eqn: Any, operands: Sequence[Tensor]) -> Iterator[Placement]:
    """Yield the placements of operands over one axis that a rule could take."""
    name, shapes = eqn.primitive.name, [one.shape for one in operands]
    yield (None,) * len(operands)
    if name == "dot_general":
        yield from _of_product(eqn, shapes)
    elif name in FUSED_ATTENTION:
        letters = (fused_dims(eqn) or ([], []))[0]
        for letter in "BN" if letters else "":
            yield tuple(dims.index(letter) if letter in dims else None for dims in letters)
    elif name in _SAME_DIM or len(operands) > 3:
        yield from _of_equal_dims(operands, partial=name in ELEMENTWISE)
    else:
        yield from itertools.product(*map(_places, operands))


def _of_product(eqn: Any, shapes: Sequence[tuple[int, ...]]) -> Iterator[Placement]:
    """Yield the placements of a matrix product: over a shared, or over a free index."""
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    yield from zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True)
    for dim in range(len(shapes[0])):
        if dim not in left_sum and dim not in left_batch:
            yield dim, None
    for dim in range(len(shapes[1])):
        if dim not in right_sum and dim not in right_batch:
            yield None, dim


def _of_equal_dims(operands: Sequence[Tensor], *, partial: bool) -> Iterator[Placement]:
    """Yield the placements in which all operands are split in the same dim, or some are sums."""
    rank = max((len(one.shape) for one in operands), default=0)
    for dim in range(rank):
        yield tuple(
            dim if len(one.shape) == rank and one.shape[dim] > 1 and not one.zero else None
            for one in operands
        )
    floats = [index for index, one in enumerate(operands) if one.floating and not one.zero]
    if not partial:
        return
    sizes = range(1, len(floats) + 1) if len(floats) <= 3 else [len(floats)]
    for size in sizes:
        for sums in itertools.combinations(floats, size):
            yield tuple(PARTIAL if index in sums else None for index in range(len(operands)))


def _places(tensor: Tensor) -> list[int | str | None]:
    """Return where one axis may be in an operand."""
    if tensor.zero:
        return [None]
    split = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    return [None, *split, *([PARTIAL] if tensor.floating else [])]
