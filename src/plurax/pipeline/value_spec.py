"""Shapes and shardings of values without their arrays, and the parameters that a device has.

A `ValueSpec` is to a `ShardedValue` what `jax.ShapeDtypeStruct` is to an array. The executor stores
only flat arrays between ticks, and rebuilds `ShardedValue`s from them by their specs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from plurax.partition.values import ShardedValue
from plurax.pipeline.packing import Buffers, Packing, zeros
from plurax.pipeline.stage_vjp import Values
from plurax.pipeline.stages import StageFn
from plurax.sharding.spec import TensorSharding


@dataclasses.dataclass(frozen=True)
class ValueSpec:
    """A `ShardedValue` without its array.

    **Fields:** `local`, shape and dtype of one device's shard; `shape`, of the whole tensor;
    `sharding`; `data_varying`, whether it depends on the device's own rows; `is_param`, whether it
    depends on parameters and constants alone.
    """

    local: jax.ShapeDtypeStruct
    shape: tuple[int, ...]
    sharding: TensorSharding
    data_varying: bool
    is_param: bool

    @classmethod
    def of(cls, value: ShardedValue) -> "ValueSpec":
        """Return the spec of a value."""
        local = jax.ShapeDtypeStruct(value.array.shape, value.array.dtype)
        return cls(local, value.shape, value.sharding, value.data_varying, value.is_param)

    def value(self, array: Array) -> ShardedValue:
        """Return a value of this spec; `array` has the shape `local.shape`."""
        return ShardedValue(array, self.shape, self.sharding, self.data_varying, self.is_param)


class PackedSpecs:
    """The specs of some values and their offsets in flat buffers (see `packing.py`).

    **Attributes:** `specs`; `shardings` of the values; `lengths` of the buffers, by dtype.
    """

    def __init__(self, specs: Sequence[ValueSpec]) -> None:
        self.specs = list(specs)
        self.shardings = [spec.sharding for spec in specs]
        self._packing = Packing([spec.local for spec in specs])
        self.lengths = self._packing.lengths

    def read(self, buffers: Buffers) -> Values:
        """Return the values in buffers of at least these lengths."""
        return self._values(self._packing.read(buffers))

    def write(self, buffers: Buffers, values: Values) -> Buffers:
        """Return the buffers with the values written at their offsets."""
        return self._packing.write(buffers, arrays_of(values))

    def read_row(self, buffers: Buffers, row: Any) -> Values:
        """Return the values in row `row` of buffers `(rows, length)`."""
        return self._values(self._packing.read_row(buffers, row))

    def write_row(self, buffers: Buffers, row: Any, values: Values) -> Buffers:
        """Return buffers `(rows, length)` with the values written in row `row`."""
        return self._packing.write_row(buffers, row, arrays_of(values))

    def zeros(self) -> Values:
        """Return values of these specs, all zero, to trace functions with."""
        return self.read(zeros(self.lengths))

    def _values(self, arrays: Sequence[Array]) -> Values:
        return [spec.value(array) for spec, array in zip(self.specs, arrays, strict=True)]


@dataclasses.dataclass(frozen=True)
class StageParams:
    """The parameters that one device of a pipeline has.

    A parameter that several stages use is on all devices; the layers of stacked parameters are
    split over them; a parameter of a single stage is on that stage's device only, packed in flat
    buffers. Parameters are numbered as the leaves of the parameter tree.

    **Fields:**

    - `values`: for each parameter its `ShardedValue` (stacked ones: `(layers per device, ...)`);
      None where it is on one device only.
    - `homes`: for each parameter the one device that has it; None where all do.
    - `packings`: for each device the `Packing` of the parameters that only it has.
    - `specs`: for each parameter its `ValueSpec`.
    - `homed`: this device's flat buffers, laid out by its packing.
    """

    values: Sequence[ShardedValue | None]
    homes: Sequence[int | None]
    packings: Sequence[Packing]
    specs: Sequence[ValueSpec]
    homed: Buffers

    def packing_index(self, leaf: int) -> int:
        """Return the index of a parameter in the packing of its device."""
        home = self.homes[leaf]
        return sum(1 for other in self.homes[:leaf] if other == home)

    def used(self, stage_fn: StageFn) -> Values:
        """Return the parameters of a `StageFn`; valid on its device only."""
        values = []
        for leaf in stage_fn.leaves:
            value, home = self.values[leaf], self.homes[leaf]
            if value is None:
                assert home is not None
                # Every device traces this read, at the offset that `home` uses: elsewhere it
                # returns meaningless numbers, and the stage runs zero times.
                (array,) = self.packings[home].read(self.homed, [self.packing_index(leaf)])
                value = self.specs[leaf].value(array)
            values.append(value)
        return values


def shapes(values: Values) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the whole tensors."""
    return [jax.ShapeDtypeStruct(value.shape, value.array.dtype) for value in values]


def replicated_value(array: Any) -> ShardedValue:
    """Return an array as a replicated value."""
    array = jnp.asarray(array)
    return ShardedValue(array, array.shape, TensorSharding.replicated(array.ndim))


def arrays_of(values: Values) -> list[Array]:
    """Return this device's shards of some values."""
    return [value.array for value in values]
