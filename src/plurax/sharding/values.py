"""What a variable of a divided function holds."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from plurax.sharding.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor of a divided function.

    **Fields:** `array`, this device's shard; `shape`, of the whole tensor; `sharding`; `varying`,
    whether it depends on the device's own rows; `fixed`, whether it is a parameter or made of
    parameters and constants alone.
    """

    array: Array
    shape: tuple[int, ...]
    sharding: Sharding
    varying: bool = False
    fixed: bool = False

    def __post_init__(self) -> None:
        # Each device has rows of its own: no dim of what comes from them is split over `data`.
        assert not (self.varying and over_data(self.sharding)), self.sharding

    @property
    def kind(self) -> tuple[Sharding, bool, bool]:
        """All but the array and its shape."""
        return self.sharding, self.varying, self.fixed


def shard_of_rows(array: Array, devices: int) -> Value:
    """Rows of one of so many devices, as a shard of those of all."""
    axes = ("data",) if devices > 1 else ()
    lies = Sharding.whole(array.ndim).with_dim(0, axes)
    return Value(array, (array.shape[0] * devices, *array.shape[1:]), lies)


@dataclasses.dataclass(frozen=True)
class Late:
    """A value made when it is known how it shall lie: zeros, what is scattered onto zeros, rows
    repeated, and tensors in one dim whose shards are not runs of it.

    **Fields:** `shape` of the whole tensor; `make(sharding) -> Value`; `zero`, whether it is zero
    everywhere; `flattened`, the cell of the tensor of which it is the reshape to one dim; `source`,
    what is repeated in it, and `free`, how it lies without moving that; `varying`, whether it will
    depend on the device's own rows.
    """

    shape: tuple[int, ...]
    make: Callable[[Sharding], Value]
    zero: bool = False
    flattened: "Cell | None" = None
    source: Value | None = None
    free: Sharding | None = None
    varying: bool = False


Output = Value | Late


def over_data(sharding: Sharding) -> bool:
    """Whether a dim is split over `data`, or terms of a sum lie on the devices along it."""
    return "data" in sharding.axes or "data" in sharding.partial


def is_value(node: Any) -> bool:
    """Whether a node of a tree is a `Value`."""
    return isinstance(node, Value)


class Cell:
    """What a variable holds: one value, in each of the shardings it has been brought to.

    **Attributes:** `values`; `uses`, how many equations read the variable.
    """

    def __init__(self, value: Output, uses: int = 1) -> None:
        self._late = value if isinstance(value, Late) else None
        self.values = [] if isinstance(value, Late) else [value]
        self.uses = uses

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._late.shape if self._late is not None else self.values[0].shape

    @property
    def value(self) -> Value:
        """As it lies; a late one is made whole, or as it lies without moving anything."""
        if self.unmade is not None:
            free = self.unmade.free or Sharding.whole(len(self.shape))
            self.values.append(self.unmade.make(free))
        return self.values[0]

    @property
    def made_zero(self) -> bool:
        """Whether it is zero everywhere, for all that is known."""
        return self._late is not None and self._late.zero

    @property
    def unmade(self) -> Late | None:
        """The late value, if it has not been made yet."""
        return None if self.values else self._late

    @property
    def varying(self) -> bool:
        """Whether it depends on the device's own rows."""
        return (self.unmade or self.values[0]).varying

    def fresh(self) -> "Cell":
        """The same value in a cell of its own, for the body of a loop."""
        return Cell(self.unmade or self.value, uses=2)
