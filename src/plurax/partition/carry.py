"""The shardings of a loop's carry.

An iteration must return each carried value in the sharding in which it received it. Which shardings
the body returns is only known by partitioning it, and depends on the shardings it receives.
`Carry` finds a fixed point: start from the input's shardings; if the body returns another, retry
with that; if it still differs, reshard the value at the end of each iteration.

    mesh tensor=2; the carry of a backward scan is (h, g)
    h (8, 32), an activation: the body returns it split by columns
    g (32, 32), a gradient: the body returns g + x.T @ dy, with the rows of x and dy split

    attempt   received by the body                      returned
    1         h (None, None), g zeros of any sharding   h (None, tensor), g partial={tensor}
    2         h (None, tensor), g partial={tensor}      the same: done

Zeros take whatever sharding the first attempt returns, partial sums included: a gradient summed
over the loop is reduced once, after it. A value that depends on the device's own rows after any
iteration is `data_varying` from the first.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array

from plurax.partition.resharder import Resharder
from plurax.partition.values import ShardedValue, ValueVersions
from plurax.sharding.spec import REPLICAS, TensorSharding

Kind = tuple[TensorSharding, bool, bool]


class Carry:
    """The shardings and arrays that a loop carries.

    **Arguments:** `resharder`; `variables` of the loop's body that hold the carry; `inputs`, the
    initial values.

    **Attributes:** `kinds`, for each value its sharding, `data_varying` and `is_param` at the start
    of an iteration, or None for zeros in any sharding; `max_attempts`, the
    number of attempts after which nothing can change.
    """

    def __init__(
        self, resharder: Resharder, variables: Sequence[Any], inputs: Sequence[ValueVersions]
    ) -> None:
        self._resharder, self._inputs = resharder, inputs
        self._avals = [var.aval for var in variables]
        self.kinds: list[Kind | None] = [self._first_kind(versions) for versions in inputs]
        self._forced: list[TensorSharding | None] = [None] * len(inputs)
        self._tried = False
        # Each value changes at most four times: no longer zeros, another sharding, data-varying,
        # no longer a parameter. Two more attempts confirm the result.
        self.max_attempts = 2 + 4 * len(inputs)

    def _first_kind(self, versions: ValueVersions) -> Kind | None:
        """Return the input's kind, reduced: a partial sum is reduced before the loop."""
        deferred = versions.deferred
        if deferred is None:
            sharding, data_varying, is_param = versions.value.kind
            return TensorSharding(sharding.dims), data_varying, is_param
        # Created at the start: what is repeated for each example is gathered before, not after.
        sharding = TensorSharding(deferred.default_sharding.dims)
        return None if deferred.zero else (sharding, deferred.data_varying, deferred.is_param)

    def vary(self) -> None:
        """Mark all values as data-varying, because the number of iterations depends on the rows."""
        for index, (versions, kind) in enumerate(zip(self._inputs, self.kinds, strict=True)):
            sharding = TensorSharding.replicated(len(versions.shape)) if kind is None else kind[0]
            self.kinds[index] = (sharding.without(["data"]), True, False)

    def is_gather_cheaper(self, sent: float) -> bool:
        """Whether gathering the carry over `data` once sends less than the loop's `sent` bytes.

        Never true for values of the batch: each device keeps its own rows.
        """
        kinds = [kind for kind in self.kinds if kind is not None]
        if any(data_varying for _, data_varying, _ in kinds) or self._resharder.joint:
            return False
        once = sum(
            self._resharder.context.cost(versions, kind[0].without(REPLICAS))
            for versions, kind in zip(self._inputs, self.kinds, strict=True)
            if kind is not None
        )
        return 0 < once < sent

    def replicate_over_data(self) -> None:
        """Replicate all values over `data` at the start of each iteration."""
        for index, kind in enumerate(self.kinds):
            if kind is not None:
                sharding = self._forced[index] = TensorSharding(kind[0].dims).without(REPLICAS)
                self.kinds[index] = (sharding, *kind[1:])

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shard shapes that the body receives; this emits no collective."""
        shapes = []
        for aval, kind in zip(self._avals, self.kinds, strict=True):
            sharding = TensorSharding.replicated(len(aval.shape)) if kind is None else kind[0]
            shapes.append(self._resharder.context.spec(aval.shape, aval.dtype, sharding).array)
        return shapes

    def start(self) -> list[Array]:
        """Reshard the initial values and return their shards for the first iteration."""
        arrays = []
        for versions, kind in zip(self._inputs, self.kinds, strict=True):
            # Only zeros start as a partial sum, and zeros are the same array with or without it.
            sharding = (
                TensorSharding.replicated(len(versions.shape))
                if kind is None
                else TensorSharding(kind[0].dims)
            )
            arrays.append(self._resharder.reshard(versions, sharding).array)
        return arrays

    def received(self, arrays: Sequence[Array]) -> list[ValueVersions]:
        """Wrap the arrays that an iteration receives."""
        carry = []
        for aval, kind, array in zip(self._avals, self.kinds, arrays, strict=True):
            shape = tuple(aval.shape)
            if kind is None:
                carry.append(ValueVersions(self._resharder.zeros(shape, array.dtype)))
            else:
                carry.append(ValueVersions(ShardedValue(array, shape, *kind)))
        return carry

    def returned(self, results: Sequence[ValueVersions]) -> list[ShardedValue]:
        """Return an iteration's results, resharded where the fixed point needs it."""
        values = []
        for versions, kind, forced in zip(results, self.kinds, self._forced, strict=True):
            if kind is None:
                values.append(self._resharder.value(versions))
                continue
            sharding, data_varying, is_param = kind
            target = forced
            if target is None:
                # A deferred result is created in the sharding of the start, which moves nothing.
                deferred = versions.deferred
                target = (
                    TensorSharding(sharding.dims)
                    if deferred is not None and deferred.free is None
                    else self._resharder.value(versions).sharding
                )
            # The body may return a constant for a value that is data-varying at the start.
            target = target.without(["data"]) if data_varying else target
            value = self._resharder.reshard(versions, target)
            values.append(
                dataclasses.replace(
                    value,
                    data_varying=value.data_varying or data_varying,
                    is_param=value.is_param and is_param,
                )
            )
        return values

    def learn(self, values: Sequence[ShardedValue]) -> bool:
        """Return whether the body returned the kinds it received; if not, update `kinds`."""
        if [value.kind for value in values] == self.kinds:
            return True
        for index, (kind, value) in enumerate(zip(self.kinds, values, strict=True)):
            new = value.kind
            if kind is not None and kind != new:
                new = self._joined(index, kind, new)
            self.kinds[index] = new
        self._tried = True
        return False

    def _joined(self, index: int, kind: Kind, new: Kind) -> Kind:
        """Return the kind to try next for a value that the body returned in another kind."""
        sharding, data_varying, is_param = kind[0], kind[1] or new[1], kind[2] and new[2]
        # The first attempt follows the body; a later mismatch is resharded in each iteration.
        # A partial sum cannot be the start of a value that is not zero.
        if not self._tried and not new[0].partial:
            sharding = new[0]
        elif sharding != new[0]:
            sharding = self._forced[index] = TensorSharding(sharding.dims)
        if data_varying:
            sharding = sharding.without(["data"])
        return sharding, data_varying, is_param
