"""The values of a partitioned function's variables.

A variable stands for one tensor, but equations may need it in different shardings, and some
tensors are best created only when a reader has asked for a sharding. `ShardedValue` is a tensor in
one sharding, and `DeferredValue` one that is not created yet. `ValueVersions` is what a variable
holds: the tensor in all the shardings to which it has been brought.

    mesh tensor=4; h has shape (8, 32), float32

    equation         version of h                            sent by each device
    h = x @ w        partial={tensor}, (8, 32) per device
    a = tanh(h)      + (None, None), (8, 32)                 all-reduce, 1536 bytes
    b = h @ w1       + (None, tensor), (8, 8)                0: a slice of the second version
                       (w1 is split by its rows)
    c = tanh(h)      (the second version again)              0
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from plurax.sharding.spec import TensorSharding


@dataclasses.dataclass(frozen=True)
class ShardedValue:
    """A tensor of a partitioned function.

    **Fields:**

    - `array`: this device's shard.
    - `shape`: of the whole tensor.
    - `sharding`: of the tensor.
    - `data_varying`: whether it depends on the device's own rows of the batch.
    - `is_param`: whether it is a parameter, or computed from parameters and constants alone.
    """

    array: Array
    shape: tuple[int, ...]
    sharding: TensorSharding
    data_varying: bool = False
    is_param: bool = False

    def __post_init__(self) -> None:
        # `shape` counts one device's rows, so no dim of it can be split over `data` as well.
        assert not (self.data_varying and over_data(self.sharding)), self.sharding

    @property
    def kind(self) -> tuple[TensorSharding, bool, bool]:
        """Return the sharding, `data_varying` and `is_param`."""
        return self.sharding, self.data_varying, self.is_param


def shard_of_rows(array: Array, devices: int) -> ShardedValue:
    """Return one device's rows `(B / devices, ...)` as a shard of the batch `(B, ...)`."""
    axes = ("data",) if devices > 1 else ()
    sharding = TensorSharding.replicated(array.ndim).with_dim(0, axes)
    return ShardedValue(array, (array.shape[0] * devices, *array.shape[1:]), sharding)


@dataclasses.dataclass(frozen=True)
class DeferredValue:
    """A value created once its sharding is known, which saves moving it.

    Zeros, a scatter into zeros, repeated rows, and a tensor flattened to one dim whose shards are
    not contiguous in it.

    **Fields:**

    - `shape`: of the whole tensor.
    - `make`: a function `make(sharding) -> ShardedValue`.
    - `zero`: whether all entries are zero.
    - `flattened`: the tensor of which this is the reshape to one dim.
    - `source`: the value that is repeated, and `free`, the sharding in which repeating it sends
      nothing.
    - `data_varying`: whether the value will depend on the device's own rows.
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
    """Whether a dim is split over `data`, or the value is a partial sum over it."""
    return "data" in sharding.axes or "data" in sharding.partial


def is_sharded_value(node: Any) -> bool:
    """Whether a node of a tree is a `ShardedValue`."""
    return isinstance(node, ShardedValue)


class ValueVersions:
    """One variable's value, in each sharding to which it has been brought.

    **Attributes:** `values`, the versions, the first one as computed; `uses`, the number of
    equations that read the variable.
    """

    def __init__(self, value: Output, uses: int = 1) -> None:
        self._late = value if isinstance(value, DeferredValue) else None
        self.values = [] if isinstance(value, DeferredValue) else [value]
        self.uses = uses

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self._late.shape if self._late is not None else self.values[0].shape

    @property
    def value(self) -> ShardedValue:
        """The first version. A deferred value is created: replicated, or in its `free` sharding."""
        if self.deferred is not None:
            free = self.deferred.free or TensorSharding.replicated(len(self.shape))
            self.values.append(self.deferred.make(free))
        return self.values[0]

    @property
    def is_zero(self) -> bool:
        """Whether all entries are known to be zero."""
        return self._late is not None and self._late.zero

    @property
    def deferred(self) -> DeferredValue | None:
        """The deferred value, or None once it has been created."""
        return None if self.values else self._late

    @property
    def data_varying(self) -> bool:
        """Whether it depends on the device's own rows."""
        return (self.deferred or self.values[0]).data_varying

    def fresh(self) -> "ValueVersions":
        """Return the value without its other versions, for the body of a loop.

        `uses` is 2: each iteration reads the value, so a reader must not consume a partial sum.
        """
        return ValueVersions(self.deferred or self.value, uses=2)
