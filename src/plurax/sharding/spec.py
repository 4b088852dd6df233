"""Shardings: for each dim of a tensor, the mesh axes over which it is split."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from plurax import errors
from plurax.argument_check import text

AxisSizes = Mapping[str, int]
Dims = tuple[tuple[str, ...], ...]

REPLICAS = ("data", "context", "context:0", "context:1")
"""The axes over which devices have equal parameters, of other rows or other tokens: mesh axes, and
the parts of `context` (`axes.py`). ZeRO splits parameters, gradients and the optimizer's state over
both."""

MOST_DIMS = 1000
"""The largest number of dims of a tensor; NumPy knows 64."""


@dataclasses.dataclass(frozen=True, repr=False)
class TensorSharding:
    """The sharding of a tensor on a mesh.

    **Fields:**

    - `dims`: for each dim of the tensor the mesh axes it is split over, major to minor; `()` where
      it is not split. Each axis splits at most one dim; over axes that split none, the tensor is
      replicated.
    - `partial`: mesh axes over which each device holds one term of a sum that is not reduced yet.
    - `axes`: those that split a dim, in the order of the dims.

    Raises `PlanError` if an axis is used twice.

    >>> sharding = TensorSharding.of(None, "tensor")
    >>> sharding
    TensorSharding(None, 'tensor')
    >>> sharding.shard_shape((6, 8), {"data": 2, "tensor": 4})
    (6, 2)
    """

    dims: Dims
    partial: frozenset[str] = frozenset()
    axes: tuple[str, ...] = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(axis for dim in self.dims for axis in dim))
        used = [*self.axes, *sorted(self.partial)] if self.partial else self.axes
        if len(used) > 1 and len({*used}) < len(used):
            axis = next(axis for axis in used if used.count(axis) > 1)
            raise errors.PlanError(
                f"{self!r} names the mesh axis {axis!r} twice. An axis can split only one "
                "dim of a tensor: remove it from the other."
            )

    @classmethod
    def of(cls, *entries: Any, partial: Sequence[str] = ()) -> "TensorSharding":
        """Create a sharding from one entry per dim: None, a mesh axis, or several in a tuple."""
        return cls(tuple(map(_names, entries)), frozenset(partial))

    @classmethod
    def replicated(cls, rank: int) -> "TensorSharding":
        """Return the replicated sharding of a tensor of some rank.

        Raises `PlanError` for more than `MOST_DIMS`.
        """
        if rank > MOST_DIMS:
            raise errors.PlanError(
                f"a sharding for {rank:,} dims: give the number of a tensor's dims, at most "
                f"{MOST_DIMS:,}, not its size."
            )
        return cls(((),) * rank)

    @classmethod
    def from_spec(cls, spec: PartitionSpec | Sequence[Any], rank: int) -> "TensorSharding":
        """Create a sharding from a `PartitionSpec` or tuple; missing entries count as None.

        Raises `PlanError` if the spec has more than `rank` entries.
        """
        if len(spec) > rank:
            raise errors.spec_too_long(tuple(spec), rank)
        return cls.of(*spec, *(None,) * (rank - len(spec)))

    @property
    def spec(self) -> PartitionSpec:
        """Return the `PartitionSpec`, without trailing Nones. A partial sum has none."""
        assert not self.partial, "a PartitionSpec knows no partial sums"
        entries = [None if not dim else dim[0] if len(dim) == 1 else dim for dim in self.dims]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def num_shards(self, dim: int, axes: AxisSizes) -> int:
        """Return the number of shards of a dim."""
        try:
            names = self.dims[dim]
            return axes[names[0]] if len(names) == 1 else math.prod([axes[name] for name in names])
        except KeyError as error:
            raise errors.sharding_unknown_axis("the tensor", error.args[0], tuple(axes)) from None
        except IndexError:
            raise errors.sharding_wrong_rank("the tensor", (1,) * (dim + 1), repr(self)) from None

    def shard_shape(self, shape: Sequence[int], axes: AxisSizes) -> tuple[int, ...]:
        """Return the shape of one shard; a dim that its shards do not divide is padded."""
        if len(shape) != len(self.dims):
            raise errors.sharding_wrong_rank("the tensor", tuple(shape), repr(self))
        if not self.axes:
            return tuple(shape)
        pairs = enumerate(zip(shape, self.dims, strict=True))
        return tuple([-(-n // self.num_shards(i, axes)) if names else n for i, (n, names) in pairs])

    def shard_bytes(self, shape: Sequence[int], itemsize: int, axes: AxisSizes) -> int:
        """Return the bytes of one shard."""
        return math.prod(self.shard_shape(shape, axes)) * itemsize

    def indivisible_dims(self, shape: Sequence[int], axes: AxisSizes) -> list[int]:
        """Return the dims whose size is not divisible by their number of shards.

        A dim of size 0 cannot be split either: no collective moves nothing.

        >>> [TensorSharding.of("data").indivisible_dims((12,), {"data": n}) for n in (3, 5, 6, 7)]
        [[], [0], [], [0]]
        """
        split = range(len(shape) if self.axes else 0)
        counts = ((dim, self.num_shards(dim, axes)) for dim in split)
        return [dim for dim, n in counts if n > 1 and (shape[dim] % n or not shape[dim])]

    def check(self, shape: Sequence[int], axes: AxisSizes, what: str = "the tensor") -> None:
        """Raise `PlanError` if a tensor of this shape cannot have this sharding.

        The rank differs, an axis is not in `axes`, or a dim is not divisible; `what` names the
        tensor in the message.
        """
        if len(self.dims) != len(shape):
            raise errors.sharding_wrong_rank(what, tuple(shape), repr(self))
        for axis in (*self.axes, *sorted(self.partial)):
            if axis not in axes:
                raise errors.sharding_unknown_axis(what, axis, tuple(axes))
        for dim in self.indivisible_dims(shape, axes):
            num_shards = self.num_shards(dim, axes)
            fits = max(
                n for n in range(1, num_shards + 1) if shape[dim] % n == 0 < shape[dim] or n == 1
            )
            raise errors.PlanError(
                f"dim {dim} of {what} with shape {tuple(shape)} has size {shape[dim]} and "
                f"cannot be split into {num_shards} shards; {fits} would fit."
            )

    def with_dim(self, dim: int, entry: tuple[str, ...]) -> "TensorSharding":
        """Return the sharding with other axes on one dim."""
        return TensorSharding((*self.dims[:dim], entry, *self.dims[dim + 1 :]), self.partial)

    def without(self, axes: Sequence[str]) -> "TensorSharding":
        """Return the sharding replicated, and reduced, over some axes."""
        kept = tuple(tuple(axis for axis in dim if axis not in axes) for dim in self.dims)
        return TensorSharding(kept, self.partial - set(axes))

    def __repr__(self) -> str:
        entries = [None if not dim else dim[0] if len(dim) == 1 else dim for dim in self.dims]
        parts = [repr(entry) for entry in entries]
        if self.partial:
            parts.append(f"partial={tuple(sorted(self.partial))}")
        return f"TensorSharding({', '.join(parts)})"


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    names = (entry,) if isinstance(entry, str) else entry
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise errors.argument_misfits(
            "TensorSharding.of", "entry", text(entry), "None, the name of a mesh axis, or several"
        )
    return tuple(names)
