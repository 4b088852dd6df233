"""Values of a pipeline without their arrays, and the parameters of a device."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from plurax.pipeline.network import Edge
from plurax.pipeline.packing import Buffers, Packing, empty
from plurax.pipeline.piece import Values
from plurax.sharding.sharding import Sharding
from plurax.sharding.values import Value


@dataclasses.dataclass(frozen=True)
class Form:
    """A `Value` without its array: `local`, the shape of a device's shard, and how it lies."""

    local: jax.ShapeDtypeStruct
    shape: tuple[int, ...]
    sharding: Sharding
    varying: bool
    fixed: bool

    @classmethod
    def of(cls, value: Value) -> "Form":
        """The form of a value."""
        local = jax.ShapeDtypeStruct(value.array.shape, value.array.dtype)
        return cls(local, value.shape, value.sharding, value.varying, value.fixed)

    def value(self, array: Array) -> Value:
        """A value of this form."""
        return Value(array, self.shape, self.sharding, self.varying, self.fixed)


@dataclasses.dataclass(frozen=True)
class Trained:
    """Parameters on one device, by number.

    **Fields:** `values`, for each parameter its `Value`, of layers those stacked on this device;
    None where it lives on one device of the pipeline. `homes`, on which device each lives, None
    where on all. `packings`, for each device where its own lie in the buffers `homed`.
    """

    values: Sequence[Value | None]
    homes: Sequence[int | None]
    packings: Sequence[Packing]
    forms: Sequence[Form]
    homed: Buffers

    def place(self, leaf: int) -> int:
        """The place of a parameter in the packing of its home."""
        home = self.homes[leaf]
        return sum(1 for other in self.homes[:leaf] if other == home)

    def used(self, edge: Edge) -> Values:
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


def made(forms: Sequence[Form]) -> Values:
    """Values of some forms, of which only the form is looked at."""
    packing = Packing([form.local for form in forms])
    arrays = packing.read(empty(packing.lengths))
    return [form.value(array) for form, array in zip(forms, arrays, strict=True)]


def whole_value(array: Any) -> Value:
    """A value that every device has whole."""
    array = jnp.asarray(array)
    return Value(array, array.shape, Sharding.whole(array.ndim))


def arrays_of(values: Values) -> list[Array]:
    """The arrays of some values."""
    return [value.array for value in values]
