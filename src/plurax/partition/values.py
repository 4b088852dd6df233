"""What a variable of a divided function holds."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from plurax.sharding.spec import TensorSharding


@dataclasses.dataclass(frozen=True)
class ShardedValue:
    """A tensor of a divided function.

    **Fields:** `array`, this device's shard; `shape`, of the whole tensor; `sharding`; `varying`,
    whether it depends on the device's own rows; `fixed`, whether it is a parameter or made of
    parameters and constants alone.
    """

    array: Array
    shape: tuple[int, ...]
    sharding: TensorSharding
    data_varying: bool = False
    is_param: bool = False

    def __post_init__(self) -> None:
        # Each device has rows of its own: no dim of what comes from them is split over `data`.
        assert not (self.data_varying and over_data(self.sharding)), self.sharding

    @property
    def kind(self) -> tuple[TensorSharding, bool, bool]:
        """All but the array and its shape."""
        return self.sharding, self.data_varying, self.is_param


def shard_of_rows(array: Array, devices: int) -> ShardedValue:
    """Rows of one of so many devices, as a shard of those of all."""
    axes = ("data",) if devices > 1 else ()
    lies = TensorSharding.whole(array.ndim).with_dim(0, axes)
    return ShardedValue(array, (array.shape[0] * devices, *array.shape[1:]), lies)


@dataclasses.dataclass(frozen=True)
class DeferredValue:
    """A value made when it is known how it shall lie: zeros, what is scattered onto zeros, rows
    repeated, and tensors in one dim whose shards are not runs of it.

    **Fields:** `shape` of the whole tensor; `make(sharding) -> Value`; `zero`, whether it is zero
    everywhere; `flattened`, the cell of the tensor of which it is the reshape to one dim; `source`,
    what is repeated in it, and `free`, how it lies without moving that; `varying`, whether it will
    depend on the device's own rows.
    """

    shape: tuple[int, ...]
    make: Callable[[TensorSharding], ShardedValue]
    zero: bool = False
    flattened: "ValueVersions | None" = None
    source: ShardedValue | None = None
    free: TensorSharding | None = None
    data_varying: bool = False


Output = ShardedValue | DeferredValue


def over_data(sharding: TensorSharding) -> bool:
    """Whether a dim is split over `data`, or terms of a sum lie on the devices along it."""
    return "data" in sharding.axes or "data" in sharding.partial


def is_sharded_value(node: Any) -> bool:
    """Whether a node of a tree is a `ShardedValue`."""
    return isinstance(node, ShardedValue)


class ValueVersions:
    """What a variable holds: one value, in each of the shardings it has been brought to.

    **Attributes:** `values`; `uses`, how many equations read the variable.
    """

    def __init__(self, value: Output, uses: int = 1) -> None:
        self._late = value if isinstance(value, DeferredValue) else None
        self.values = [] if isinstance(value, DeferredValue) else [value]
        self.uses = uses

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._late.shape if self._late is not None else self.values[0].shape

    @property
    def value(self) -> ShardedValue:
        """As it lies; a late one is made whole, or as it lies without moving anything."""
        if self.deferred is not None:
            free = self.deferred.free or TensorSharding.whole(len(self.shape))
            self.values.append(self.deferred.make(free))
        return self.values[0]

    @property
    def is_zero(self) -> bool:
        """Whether it is zero everywhere, for all that is known."""
        return self._late is not None and self._late.zero

    @property
    def deferred(self) -> DeferredValue | None:
        """The late value, if it has not been made yet."""
        return None if self.values else self._late

    @property
    def data_varying(self) -> bool:
        """Whether it depends on the device's own rows."""
        return (self.deferred or self.values[0]).data_varying

    def fresh(self) -> "ValueVersions":
        """The same value in a cell of its own, for the body of a loop."""
        return ValueVersions(self.deferred or self.value, uses=2)
