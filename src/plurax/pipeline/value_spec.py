"""Values of a pipeline without their arrays, and the parameters of a device."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from plurax.partition.values import ShardedValue
from plurax.pipeline.packing import Buffers, Packing, empty
from plurax.pipeline.stage_vjp import Values
from plurax.pipeline.stages import StageFn
from plurax.sharding.spec import TensorSharding


@dataclasses.dataclass(frozen=True)
class ValueSpec:
    """A `ShardedValue` without its array: `local`, the shape of a device's shard; its sharding."""

    local: jax.ShapeDtypeStruct
    shape: tuple[int, ...]
    sharding: TensorSharding
    data_varying: bool
    is_param: bool

    @classmethod
    def of(cls, value: ShardedValue) -> "ValueSpec":
        """The form of a value."""
        local = jax.ShapeDtypeStruct(value.array.shape, value.array.dtype)
        return cls(local, value.shape, value.sharding, value.data_varying, value.is_param)

    def value(self, array: Array) -> ShardedValue:
        """A value of this form."""
        return ShardedValue(array, self.shape, self.sharding, self.data_varying, self.is_param)


@dataclasses.dataclass(frozen=True)
class StageParams:
    """Parameters on one device, by number.

    **Fields:** `values`, for each parameter its `ShardedValue`, of layers those stacked on this
    device; None where it lives on one device of the pipeline. `homes`, on which device each lives,
    None where on all. `packings`, for each device where its own lie in the buffers `homed`.
    """

    values: Sequence[ShardedValue | None]
    homes: Sequence[int | None]
    packings: Sequence[Packing]
    forms: Sequence[ValueSpec]
    homed: Buffers

    def place(self, leaf: int) -> int:
        """The place of a parameter in the packing of its home."""
        home = self.homes[leaf]
        return sum(1 for other in self.homes[:leaf] if other == home)

    def used(self, edge: StageFn) -> Values:
        """The parameters of an edge, where it lives."""
        values = []
        for leaf in edge.leaves:
            value, home = self.values[leaf], self.homes[leaf]
            if value is None:
                assert home is not None
                (array,) = self.packings[home].read(self.homed, [self.place(leaf)])
                value = self.forms[leaf].value(array)
            values.append(value)
        return values


def shapes(values: Values) -> list[jax.ShapeDtypeStruct]:
    """The shapes of whole tensors."""
    return [jax.ShapeDtypeStruct(value.shape, value.array.dtype) for value in values]


def made(forms: Sequence[ValueSpec]) -> Values:
    """Values of some forms, of which only the form is looked at."""
    packing = Packing([form.local for form in forms])
    arrays = packing.read(empty(packing.lengths))
    return [form.value(array) for form, array in zip(forms, arrays, strict=True)]


def whole_value(array: Any) -> ShardedValue:
    """A value that every device has whole."""
    array = jnp.asarray(array)
    return ShardedValue(array, array.shape, TensorSharding.whole(array.ndim))


def arrays_of(values: Values) -> list[Array]:
    """The arrays of some values."""
    return [value.array for value in values]
