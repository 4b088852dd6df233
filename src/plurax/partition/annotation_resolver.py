"""Resolve annotations: find the sharding to which an annotated value is resharded.

A model annotates values by `plurax.sharding.name`, `plurax.sharding.shard` and
`jax.lax.with_sharding_constraint`. An annotation gives the sharding over the axes it names;
over the mesh axis `data` the value stays as it is. After differentiation the annotation also stands
on the cotangent, which is resharded to the sharding that the value had before its annotation.

    mesh tensor=4; h (8, 64) is the result of a row-parallel layer
    the plan has shardings={"hidden": ("tensor", None)}: sequence parallelism

    equation                        sharding before      resharded to        collective
    h1 = name(h, "hidden")          partial={tensor}     (tensor, None)      reduce-scatter
    dh = cotangent of h1            (tensor, None)       (None, None)        all-gather
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from plurax import errors
from plurax.jaxpr.annotate import OverContext
from plurax.partition.values import ShardedValue, ValueVersions
from plurax.sharding.annotations import Boundary, Named, Pinned, Split, Tag
from plurax.sharding.axes import Axes
from plurax.sharding.spec import REPLICAS, TensorSharding

NameRule = Callable[[str, Sequence[int]], TensorSharding | None]


class AnnotationResolver:
    """The annotations of one function, resolved in order of evaluation.

    **Arguments:** `axes`; `named`, a function from the name of an annotation and the shape of its
    value to the sharding, or to None for no constraint; `first`, which returns a value's first
    version.
    """

    def __init__(
        self, axes: Axes, named: NameRule, first: Callable[[ValueVersions], ShardedValue]
    ) -> None:
        self._axes = axes
        self._named = named
        self._first = first
        self._before: dict[Tag, TensorSharding] = {}

    def of(self, eqn: Any, versions: ValueVersions) -> TensorSharding | None:
        """Return the sharding for the operand of an annotation; None for no constraint."""
        if eqn.primitive.name == "annotate":
            target = self._target(versions, **eqn.params)
        else:
            target = self._pinned(versions, eqn.params["sharding"].spec)
        # The value may be a parameter split over `data`; its cotangent is data-varying all the
        # same, and a data-varying value is never split over `data`.
        return target.without(["data"]) if target is not None and versions.data_varying else target

    def ahead(self, eqn: Any, value: ShardedValue) -> TensorSharding | None:
        """Return the sharding that a value gets by an annotation further on, or None."""
        versions, params = ValueVersions(value), eqn.params
        if eqn.primitive.name != "annotate":
            return self._pinned(versions, params["sharding"].spec)
        if isinstance(params["tag"], Named | Split) and not params["transposed"]:
            return self._forward(versions, params["tag"], params["batch"])
        return None

    def _target(
        self, versions: ValueVersions, *, tag: Tag, batch: tuple[int, ...], transposed: bool
    ) -> TensorSharding | None:
        """Return the sharding for an annotated value or its cotangent; None for no constraint."""
        if isinstance(tag, Boundary):
            return None
        if isinstance(tag, Pinned):
            # The carry of a gradient starts as zeros, which become a partial sum by what they meet.
            if versions.is_zero and tag.sharding.partial:
                return None
            pinned = self._pinned_by_plan(versions, tag.sharding)
            return self._with_zero(versions, self._with_rows(versions, pinned))
        if transposed:
            return self._back(versions, tag)
        if isinstance(tag, OverContext):
            target = self._over_context(versions, tag, batch)
        else:
            target = self._forward(versions, tag, batch)
        if target is not None:
            # For the cotangent, which has the same tag.
            self._before[tag] = self._first(versions).sharding
        return target

    def _over_context(
        self, versions: ValueVersions, tag: OverContext, batch: tuple[int, ...]
    ) -> TensorSharding | None:
        """Return the sharding of a value with a dim, or none, over `context` or a part of it; other
        axes stay.

        None where the mesh has no `context`, or the shards would not divide the dim, and for a
        parameter that is split otherwise: on what meets it, it is cut.
        """
        now = self._first(versions).sharding
        if "context" not in self._axes.mesh or (versions.is_param and now.axes):
            return None
        every = axes = self._axes.expand("context")
        if len(every) > 1 and tag.over != "devices":
            axes = every[1:] if tag.over == "heads" else every[:1]
        target = TensorSharding(now.dims).without(axes)
        if tag.dim is None:
            return target
        dim = [d for d in range(len(versions.shape)) if d not in batch][tag.dim]
        kept = (axis for axis in target.dims[dim] if axis not in every)
        target = target.with_dim(dim, (*axes, *kept))
        return None if target.indivisible_dims(versions.shape, self._axes.sizes) else target

    def _back(self, versions: ValueVersions, tag: Tag) -> TensorSharding | None:
        """Return the sharding for a cotangent: that of its value before the annotation.

        Dims that were split are split again. A value that was a partial sum gets a cotangent that
        is replicated over the same axes. Axes that the value did not use stay as they are.
        """
        before = self._before.get(tag)
        if before is None or len(before.dims) != len(versions.shape):
            return None
        now = self._first(versions).sharding
        free = set(self._axes.sizes) - set(before.axes) - before.partial
        dims = tuple(
            (*entry, *(axis for axis in here if axis in free))
            for entry, here in zip(before.dims, now.dims, strict=True)
        )
        return TensorSharding(dims, now.partial & free)

    def _forward(
        self, versions: ValueVersions, tag: Named | Split, batch: tuple[int, ...]
    ) -> TensorSharding | None:
        """Return the sharding for an annotated value; dims that vmap added are replicated."""
        rank = len(versions.shape)
        # The rule was written for the function inside of `vmap`.
        own = [dim for dim in range(rank) if dim not in batch]
        if isinstance(tag, Named):
            rule = self._named(tag.name, [versions.shape[dim] for dim in own])
            if rule is None:
                return None
            entries = dict(zip(own, self._axes.expanded(rule).dims, strict=True))
        else:
            given = self._assigned(tag)
            entries = {dim: given[factor] for dim, factor in zip(own, tag.dims, strict=True)}
        target = TensorSharding(tuple(entries.get(dim, ()) for dim in range(rank)))
        return self._with_rows(versions, target)

    def _with_rows(self, versions: ValueVersions, target: TensorSharding) -> TensorSharding:
        """Return the target with rows still split over `data`: annotations concern other axes."""
        if (versions.deferred and versions.deferred.free is None) or versions.is_param:
            return target
        for dim, entry in enumerate(self._first(versions).sharding.dims):
            if "data" in entry:
                rest = [axis for axis in target.dims[dim] if axis != "data"]
                # `data` stays the major axis of its dim, so that no rows change their device.
                both = target.with_dim(dim, ("data", *rest))
                fits = not both.indivisible_dims(versions.shape, self._axes.sizes)
                target = both if fits else target.with_dim(dim, ("data",))
        return target

    def _with_zero(self, versions: ValueVersions, target: TensorSharding) -> TensorSharding:
        """Return the target of a parameter with the shards of ZeRO-3, until it is gathered."""
        if not versions.is_param or set(REPLICAS).intersection(target.axes):
            return target
        for dim, entry in enumerate(self._first(versions).sharding.dims):
            by_zero = [axis for axis in entry if axis in REPLICAS]
            if by_zero:
                rest = tuple(axis for axis in entry if axis not in by_zero)
                both = entry if rest == target.dims[dim] else (*target.dims[dim], *by_zero)
                kept = target.with_dim(dim, both)
                fits = not kept.indivisible_dims(versions.shape, self._axes.sizes)
                target = kept if fits else target
        return target

    def _pinned_by_plan(self, versions: ValueVersions, sharding: TensorSharding) -> TensorSharding:
        """Return a sharding that the plan pins, over the axes of this mesh.

        A sum that is reduced already stays so, and a dim that the shards do not divide is whole.
        """
        dims = tuple(tuple(a for a in entry if a in self._axes.sizes) for entry in sharding.dims)
        partial = sharding.partial & self._first(versions).sharding.partial
        target = TensorSharding(dims, partial)
        for dim in target.indivisible_dims(versions.shape, self._axes.sizes):
            target = target.with_dim(dim, ())
        return target

    def _assigned(self, tag: Split) -> dict[int, tuple[str, ...]]:
        """Return the axes of each factor.

        The parts of `tensor` are assigned in order, to each factor as many as its shards take.
        Raises `PlanError` if they do not multiply to the factor's number of shards.
        """
        left = list(self._axes.expand("tensor")) if "tensor" in self._axes.mesh else []
        assigned: dict[int, tuple[str, ...]] = {}
        for factor, num_shards in tag.num_shards.items():
            taken: list[str] = []
            while left and self._axes.size(taken) < num_shards:
                taken.append(left.pop(0))
            # Without the axis `tensor` the operator stays replicated, as on one device.
            if self._axes.size(taken) != num_shards and "tensor" in self._axes.mesh:
                tensor = self._axes.mesh["tensor"]
                counts = " × ".join(map(str, tag.num_shards.values()))
                raise errors.PlanError(
                    f"shard splits an operator into {counts} shards and the plan has "
                    f"tensor={tensor}: the product of the counts must be {tensor} or a divisor of "
                    "it, and each count a product of its prime factors."
                )
            assigned[factor] = tuple(taken)
        return assigned

    def _pinned(self, versions: ValueVersions, spec: Any) -> TensorSharding | None:
        """Return the sharding for `jax.lax.with_sharding_constraint`.

        Axes that the mesh lacks, and `data`, are ignored; None if the shards do not divide the
        shape.
        """
        entries = list(self._first(versions).sharding.dims)
        for dim, entry in enumerate(spec):
            if entry is not PartitionSpec.UNCONSTRAINED:
                names = TensorSharding.of(entry).dims[0]
                known = [axis for axis in names if axis in self._axes.mesh and axis != "data"]
                entries[dim] = self._axes.expand_all(known)
        target = self._with_rows(versions, TensorSharding(tuple(entries)))
        return None if target.indivisible_dims(versions.shape, self._axes.sizes) else target
