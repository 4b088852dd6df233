"""Where marks in a function take the values they stand on, and the cotangents of those."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from plurax import errors
from plurax.partition.values import ValueVersions
from plurax.sharding.annotations import Boundary, Named, Split, Tag
from plurax.sharding.axes import Axes
from plurax.sharding.spec import TensorSharding

NameRule = Callable[[str, Sequence[int]], TensorSharding | None]


class AnnotationResolver:
    """The marks of one function, as they are met.

    **Arguments:** `axes`; `named`, from the name of a mark and the shape of what it stands on, how
    that shall lie, or None for as it comes.
    """

    def __init__(self, axes: Axes, named: NameRule) -> None:
        self._axes = axes
        self._named = named
        self._came: dict[Tag, TensorSharding] = {}

    def of(self, eqn: Any, cell: ValueVersions) -> TensorSharding | None:
        """How what a mark or a constraint stands on shall lie; None for as it comes."""
        if eqn.primitive.name == "annotate":
            target = self._target(cell, **eqn.params)
        else:
            target = self._pinned(cell, eqn.params["sharding"].spec)
        # A cotangent depends on the rows even where its value, a parameter, was split over `data`.
        return target.without(["data"]) if target is not None and cell.data_varying else target

    def _target(
        self, cell: ValueVersions, *, tag: Tag, batch: tuple[int, ...], transposed: bool
    ) -> TensorSharding | None:
        """How a marked value, or the cotangent of one, shall lie; None for as it comes."""
        if isinstance(tag, Boundary):
            return None
        if transposed:
            return self._back(cell, tag)
        target = self._forward(cell, tag, batch)
        if target is not None:
            self._came[tag] = cell.value.sharding
        return target

    def _back(self, cell: ValueVersions, tag: Tag) -> TensorSharding | None:
        """A cotangent goes back the way its value came.

        Split where that was; whole where that was a sum; over the other axes as it comes.
        """
        came = self._came.get(tag)
        if came is None or len(came.dims) != len(cell.shape):
            return None
        now = cell.value.sharding
        free = set(self._axes.sizes) - set(came.axes) - came.partial
        dims = tuple(
            (*entry, *(axis for axis in here if axis in free))
            for entry, here in zip(came.dims, now.dims, strict=True)
        )
        return TensorSharding(dims, now.partial & free)

    def _forward(
        self, cell: ValueVersions, tag: Named | Split, batch: tuple[int, ...]
    ) -> TensorSharding | None:
        """The dims that vmap added are left whole."""
        rank = len(cell.shape)
        own = [dim for dim in range(rank) if dim not in batch]
        if isinstance(tag, Named):
            rule = self._named(tag.name, [cell.shape[dim] for dim in own])
            if rule is None:
                return None
            entries = dict(zip(own, self._axes.expanded(rule).dims, strict=True))
        else:
            given = self._assigned(tag)
            entries = {dim: given[factor] for dim, factor in zip(own, tag.dims, strict=True)}
        target = TensorSharding(tuple(entries.get(dim, ()) for dim in range(rank)))
        return self._with_rows(cell, target)

    def _with_rows(self, cell: ValueVersions, target: TensorSharding) -> TensorSharding:
        """The target with rows split over `data` as they are: marks speak of the other axes."""
        if (cell.deferred and cell.deferred.free is None) or cell.value.is_param:
            return target
        for dim, entry in enumerate(cell.value.sharding.dims):
            if "data" in entry:
                rest = [axis for axis in target.dims[dim] if axis != "data"]
                both = target.with_dim(dim, ("data", *rest))
                fits = not both.indivisible_dims(cell.shape, self._axes.sizes)
                target = both if fits else target.with_dim(dim, ("data",))
        return target

    def _assigned(self, tag: Split) -> dict[int, tuple[str, ...]]:
        """The axes of each factor: the parts of `tensor` in order, as many as its ways take."""
        left = list(self._axes.expand("tensor")) if "tensor" in self._axes.mesh else []
        given: dict[int, tuple[str, ...]] = {}
        for factor, ways in tag.num_shards.items():
            taken: list[str] = []
            while left and self._axes.size(taken) < ways:
                taken.append(left.pop(0))
            # Without the axis the operator is whole, as on one device.
            if self._axes.size(taken) != ways and "tensor" in self._axes.mesh:
                raise errors.strategy_not_of_tensor(
                    tuple(tag.num_shards.values()), self._axes.mesh["tensor"]
                )
            given[factor] = tuple(taken)
        return given

    def _pinned(self, cell: ValueVersions, spec: Any) -> TensorSharding | None:
        """What a model pins by `jax.lax.with_sharding_constraint`, over the axes that are known."""
        entries = list(cell.value.sharding.dims)
        for dim, entry in enumerate(spec):
            if entry is not PartitionSpec.UNCONSTRAINED:
                names = TensorSharding.of(entry).dims[0]
                known = [axis for axis in names if axis in self._axes.mesh and axis != "data"]
                entries[dim] = self._axes.expand_all(known)
        target = self._with_rows(cell, TensorSharding(tuple(entries)))
        return None if target.indivisible_dims(cell.shape, self._axes.sizes) else target
