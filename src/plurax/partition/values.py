"""The values of a partitioned function's variables.

A variable stands for one tensor, but equations may need it in different shardings, and some
tensors are best created only when a reader has asked for a sharding. `ShardedValue` is a tensor in
one sharding, and `DeferredValue` one that is not created yet. `ValueVersions` is what a variable
holds: the tensor in all the shardings to which it has been brought. A `Decision` says how one
equation is evaluated on shards.

    mesh tensor=4; h has shape (8, 32), float32

    equation         version of h                            sent by each device
    h = x @ w        partial={tensor}, (8, 32) per device
    a = tanh(h)      + (None, None), (8, 32)                 all-reduce, 1536 bytes
    b = h @ w1       + (None, tensor), (8, 8)                0: a slice of the second version
                       (w1 is split by its rows)
    c = tanh(h)      (the second version again)              0
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jaxtyping import Array

from plurax.collective import ring_bytes_sent
from plurax.jaxpr.product_dims import ProductDims
from plurax.sharding.spec import REPLICAS, TensorSharding


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array"],
    meta_fields=["shape", "sharding", "data_varying", "is_param", "rows"],
)
@dataclasses.dataclass(frozen=True)
class ShardedValue:
    """A tensor of a partitioned function: a pytree with one leaf, this device's shard.

    **Fields:**

    - `array`: this device's shard; a `jax.ShapeDtypeStruct` of its shape while nothing is computed.
    - `shape`: of the whole tensor.
    - `sharding`: of the tensor.
    - `data_varying`: whether it depends on the device's own rows of the batch.
    - `is_param`: whether it is a parameter, or computed from parameters and constants alone.
    - `rows`: of a partial sum of rows, of which each has one term, which device has it.
    """

    array: Any
    shape: tuple[int, ...]
    sharding: TensorSharding
    data_varying: bool = False
    is_param: bool = False
    rows: "OwnRows | None" = None

    def __post_init__(self) -> None:
        # `shape` counts one device's rows, so no dim of it can be split over `data` as well.
        assert not (self.data_varying and over_data(self.sharding)), self.sharding

    @property
    def dtype(self) -> Any:
        """The dtype of the tensor."""
        return self.array.dtype

    @property
    def own_rows(self) -> "OwnRows | None":
        """Whose rows it has, if it is a partial sum over their devices, and over no others."""
        rows = self.rows
        # In a stack each row has sizes of its own.
        if rows is None or len(rows.sizes.shape) > 1:
            return None
        return rows if self.sharding.partial == frozenset(rows.axes) else None

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

    - `shape`, `dtype`: of the whole tensor.
    - `decide`: `decide(context, sources, sharding)` returns the `Decision` that creates it from
      `sources`, in the given sharding or the nearest possible; `context` is a `RuleContext`.
    - `sources`: the values from which it is created.
    - `zero`: whether all entries are zero.
    - `flattened`: whether it is the reshape of its source to one dim.
    - `free`: the sharding in which creating it sends nothing, if not all are.
    - `repeats`: whether its source is repeated.
    - `data_varying`, `is_param`: as in `ShardedValue`.
    """

    shape: tuple[int, ...]
    dtype: Any
    decide: "Callable[[Any, Sequence[ValueVersions], TensorSharding], Decision]"
    sources: "tuple[ValueVersions, ...]" = ()
    zero: bool = False
    flattened: bool = False
    free: TensorSharding | None = None
    repeats: bool = False
    data_varying: bool = False
    is_param: bool = False

    @property
    def default_sharding(self) -> TensorSharding:
        """The sharding in which it is created for a reader that needs none in particular."""
        return self.free or TensorSharding.replicated(len(self.shape))

    @property
    def placed(self) -> Iterator[ShardedValue]:
        """The values from which it is created, if creating it elsewhere than with them sends."""
        for one in self.sources if self.free is not None else ():
            yield from one.deferred.placed if one.deferred else [one.value]

    def fresh(self) -> "DeferredValue":
        """Return a copy of which nothing is kept: creating it leaves the sources as they are."""
        return dataclasses.replace(self, sources=tuple(one.copy() for one in self.sources))


@dataclasses.dataclass(frozen=True)
class OwnRows:
    """Which rows of a partial sum a device has: those of its groups, and zeros for all others.

    **Fields:** `dim`, that of the rows; `axes`, those that split the groups; `sizes`, the numbers
    of rows of all groups, in the order of the rows.
    """

    dim: int
    axes: tuple[str, ...]
    sizes: "ValueVersions"


Output = ShardedValue | DeferredValue


def over_data(sharding: TensorSharding) -> bool:
    """Whether a dim is split over `data`, or the value is a partial sum over it."""
    return "data" in sharding.axes or "data" in sharding.partial


def zero_axes(value: ShardedValue) -> tuple[str, ...]:
    """Return the axes over which a value is gathered to meet the batch.

    ZeRO splits parameters over both; a value of the batch has its own tokens on `context`.
    """
    return REPLICAS if value.is_param else ("data",)


def split_by_zero(value: ShardedValue) -> bool:
    """Whether a dim is split over `zero_axes`, or the value is a partial sum over them."""
    return not {*value.sharding.axes, *value.sharding.partial}.isdisjoint(zero_axes(value))


def is_sharded_value(node: Any) -> bool:
    """Whether a node of a tree is a `ShardedValue`."""
    return isinstance(node, ShardedValue)


class ValueVersions:
    """One variable's value, in each sharding to which it has been brought.

    **Attributes:** `values`, the versions, the first one as computed; `with_halos`, what devices
    read of them, their neighbours' places too; `pinned`, whether the plan pins this sharding for
    its reader; `ahead`, of a partial sum, the shardings in which it is met further on
    (`lookahead.py`).
    """

    def __init__(self, value: Output, *, pinned: bool = False) -> None:
        self.pinned = pinned
        self.ahead: Callable[[], Sequence[TensorSharding]] = tuple
        self._deferred = value if isinstance(value, DeferredValue) else None
        self.values = [] if isinstance(value, DeferredValue) else [value]
        self.with_halos: dict[Any, ShardedValue] = {}

    @property
    def _any(self) -> Output:
        return self.values[0] if self._deferred is None else self._deferred

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self._any.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the tensor."""
        return self._any.dtype

    @property
    def value(self) -> ShardedValue:
        """The first version. A deferred value has none until `Partitioner.value` creates it."""
        return self.values[0]

    @property
    def is_zero(self) -> bool:
        """Whether all entries are known to be zero."""
        return self._deferred is not None and self._deferred.zero

    @property
    def deferred(self) -> DeferredValue | None:
        """The deferred value, or None once it has been created."""
        return None if self.values else self._deferred

    @property
    def data_varying(self) -> bool:
        """Whether it depends on the device's own rows."""
        return (self.deferred or self.values[0]).data_varying

    @property
    def is_param(self) -> bool:
        """Whether it is computed from parameters and constants alone."""
        return (self.deferred or self.values[0]).is_param

    def fresh(self) -> "ValueVersions":
        """Return the value without its other versions, for the body of a loop."""
        return ValueVersions(self.deferred.fresh() if self.deferred else self.value)

    def copy(self) -> "ValueVersions":
        """Return the value with its versions; versions added to the copy stay in it."""
        other = ValueVersions(self._deferred.fresh() if self._deferred else self.value)
        other.values = list(self.values)
        return other

    def returned(self, results: "Sequence[ValueVersions]") -> "ValueVersions":
        """Return it as one of a function's results: whose rows it has is known with the sizes."""
        if all(one.rows is None or one.rows.sizes in results for one in self.values):
            return self
        other = self.copy()
        other.values = [dataclasses.replace(value, rows=None) for value in self.values]
        return other


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of an equation, and the sharding that it must have.

    **Fields:** `versions`, the operand; `path`, the shardings to which it is resharded one after
    another. Each is kept as a version, so that later equations find, for example, a partial sum
    reduced, and not only reduced and gathered; `halos`, the places that a device reads of it
    (`operators/halos.py`) where these are not just its own, kept as well.
    """

    versions: ValueVersions
    path: tuple[TensorSharding, ...]
    halos: Any = None

    @property
    def sharding(self) -> TensorSharding:
        """The sharding that the equation needs."""
        return self.path[-1]


@dataclasses.dataclass(frozen=True)
class InnerCollective:
    """A collective within an operation.

    **Fields:** `kind`, one of `all-reduce`, `all-gather` and `collective-permute`; `axes`, over
    which it runs; `shard`, the shape and dtype of what each device gives.
    """

    kind: str
    axes: tuple[str, ...]
    shard: Any

    def bytes(self, devices: int) -> int:
        """Return the bytes of the result on one device."""
        size = int(self.shard.size * self.shard.dtype.itemsize)
        return size * devices if self.kind == "all-gather" else size

    def bytes_sent(self, devices: int) -> float:
        """Return the bytes that each of so many devices sends, in a ring."""
        return ring_bytes_sent(self.kind, self.bytes(devices), devices)


@dataclasses.dataclass(frozen=True)
class Decision:
    """How one equation is evaluated on shards.

    **Fields:**

    - `operands`: in the order in which they are resharded.
    - `outputs`: the results, with a `jax.ShapeDtypeStruct` of the shard in place of each array.
    - `execute`: a function from the operands' shards to the outputs' shards.
    - `sent`: the collectives in `execute`.
    - `without_rule`: whether the operands are gathered only because the operation has no rule.
    - `defer`: if the result is deferred, a function that returns it from the resharded operands;
      then there are no `outputs`, and `execute` is not called.
    - `product`: the dims of a matrix product or convolution on one device, if it is one.
    """

    operands: tuple[Operand, ...]
    outputs: tuple[ShardedValue, ...]
    execute: Callable[..., Sequence[Array]]
    sent: tuple[InnerCollective, ...] = ()
    without_rule: bool = False
    defer: Callable[[Sequence[ShardedValue]], DeferredValue] | None = None
    product: ProductDims | None = None

    def collectives(self, context: Any) -> list[InnerCollective]:
        """Return what is sent for halos of operands, and by the operation."""
        sent = list(self.sent)
        for one in self.operands:
            if one.halos is not None:
                shape = one.sharding.shard_shape(one.versions.shape, context.axes.sizes)
                sent += one.halos.sent(context, shape, one.versions.dtype)
        return sent
