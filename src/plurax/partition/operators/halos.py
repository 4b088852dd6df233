"""Halos: the places of a split dim that each device reads, its own and some of its neighbours'.

A shift of a sequence, a convolution over it, or every second of its entries, reads places that are
mostly a device's own. What is missing comes from the device before or behind, a halo:

    mesh context=4; x (16,) is (context): device 1 has the places 4 to 7

    operation                          device 1 reads    of its neighbours        result
    pad(x[:-1], left 1)                3 4 5 6           1 of the one before      (16,)
    x[1:]                              5 6 7 8           1 of the one behind      (15,): 4 4 4 3
    x[1::2]                            5 7               none                     (8,)
    pad(y, interior 1), y (8,)         y[2] . y[3] .     none                     (15,): 4 4 4 3
    convolution with 3 kernels, SAME   3 4 5 6 7 8       1 of each                (16,)

So two columns are sent at most, where 12 would be gathered. A result that devices do not divide
fills up the last of them. Places outside of the source have the fill value. If the sizes of source
and result differ, the windows drift: a device starts to read at a place of its own.

Halos of stencils: Kjolstad and Snir 2010, "Ghost Cell Pattern".
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from plurax.partition.rule_context import RuleContext
from plurax.partition.values import InnerCollective, ValueVersions
from plurax.sharding.axes import Axes
from plurax.sharding.reshard import moved


@dataclasses.dataclass(frozen=True)
class Halo:
    """The places that devices read of a dim; between its entries may be `dilation - 1` others.

    Device k reads `width` places from `first + k * step` on.

    **Fields:** `axis`, the mesh axis, and `devices` along it; `split`, whether it splits the source
    dim, of which else each device has all; `size`, of the source dim; `end`, behind the last place
    that counts: what a device reads from there on only fills up its result.
    """

    axis: str
    devices: int
    split: bool
    size: int
    first: int
    step: int
    width: int
    end: int
    dilation: int = 1

    @property
    def _last(self) -> int:
        return self.dilation * (self.size - 1)

    @property
    def _share(self) -> int:
        """The entries of the source that a device has."""
        return -(-self.size // self.devices) if self.split else self.size

    def _own(self, device: int) -> int:
        """Return the first entry of the source that a device has."""
        return device * self._share if self.split else 0

    def _entries(self, device: int) -> tuple[int, int] | None:
        """Return the first and the last entry of the source that a device needs, if any."""
        start = max(self.first + device * self.step, 0)
        stop = min(self.first + device * self.step + self.width, self.end, self._last + 1)
        first, last = -(-start // self.dilation), (stop - 1) // self.dilation
        return (first, last) if start < stop and first <= last else None

    @functools.cached_property
    def edges(self) -> tuple[int, int]:
        """The entries that a device reads of the one before it, and of the one behind."""
        before = behind = 0
        for device in range(self.devices):
            if self.split and (needed := self._entries(device)) is not None:
                before = max(before, self._own(device) - needed[0])
                behind = max(behind, needed[1] - self._own(device) - self._share + 1)
        return before, behind

    @property
    def _fills(self) -> bool:
        """Whether a place that counts is outside of the source, or a device needs no entry."""
        starts = [self.first + k * self.step for k in range(self.devices)]
        ends = [min(start + self.width, self.end) for start in starts]
        return any(
            start < end and (start < 0 or end > self._last + 1 or self._entries(k) is None)
            for k, (start, end) in enumerate(zip(starts, ends, strict=True))
        )

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """Where each device's window begins in its entries, with halos and what is in between."""
        before, _ = self.edges
        starts = [
            self.first + k * self.step - self.dilation * (self._own(k) - before)
            if self._entries(k) is not None
            else None
            for k in range(self.devices)
        ]
        some = next((start for start in starts if start is not None), 0)
        return np.asarray([some if start is None else start for start in starts], np.int32)

    def sent(
        self, context: RuleContext, shape: Sequence[int], dtype: Any, dim: int
    ) -> list[InnerCollective]:
        """Return what is sent, for a source whose shards have this shape."""
        kind = "collective-permute" if context.axes.permutes else "all-gather"
        shapes = [_with(shape, dim, count) for count in self.edges if count]
        like = [jax.ShapeDtypeStruct(edge, dtype) for edge in shapes]
        return [InnerCollective(kind, context.axes.expand(self.axis), one) for one in like]

    def read(self, axes: Axes, array: Array, dim: int, fill: Array) -> Array:
        """Return the places that this device reads, of width `width` along a dim.

        **Arguments:** `array`, its shard of the source; `fill`, for places outside of the source,
        and in between its entries.
        """
        before, behind = self.edges
        parts = [array]
        if before:
            edge = lax.slice_in_dim(array, array.shape[dim] - before, None, axis=dim)
            parts.insert(0, self._from_neighbour(axes, edge, dim, -1))
        if behind:
            edge = lax.slice_in_dim(array, 0, behind, axis=dim)
            parts.append(self._from_neighbour(axes, edge, dim, 1))
        array = lax.concatenate(parts, dim) if len(parts) > 1 else array
        device = lax.axis_index(self.axis)
        starts, length = self._starts, self.dilation * (array.shape[dim] - 1) + 1
        left, right = max(0, -min(starts)), max(0, max(starts) + self.width - length)
        if left or right or self.dilation > 1:
            edges = [(0, 0, 0)] * array.ndim
            edges[dim] = (int(left), int(right), self.dilation - 1)
            array = lax.pad(array, fill, edges)
        if all(start == starts[0] for start in starts):
            first = int(starts[0] + left)
            array = lax.slice_in_dim(array, first, first + self.width, axis=dim)
        else:
            own = jnp.asarray(starts + left)[device]
            array = lax.dynamic_slice_in_dim(array, own, self.width, dim)
        if not self._fills:
            return array
        place = lax.broadcasted_iota(jnp.int32, array.shape, dim)
        place += device * self.step + self.first
        real = (place >= 0) & (place <= self._last)
        if self.dilation > 1:
            real &= place % self.dilation == 0
        return jnp.where(real, array, fill)

    def _from_neighbour(self, axes: Axes, edge: Array, dim: int, away: int) -> Array:
        """Return the edge of the device before (-1) or behind (1); at the ends anything."""
        if axes.permutes:
            devices = range(self.devices)
            pairs = [(k, k - away) for k in devices if k - away in devices]
            return moved(lambda x: lax.ppermute(x, self.axis, pairs), edge, axes)
        # A permute would wait for devices that do not run.
        edges = moved(lambda x: lax.all_gather(x, self.axis, axis=0), edge, axes)
        return lax.dynamic_index_in_dim(edges, lax.axis_index(self.axis) + away, 0, keepdims=False)


def halo(
    context: RuleContext,
    entry: tuple[str, ...],
    size: int,
    result: int,
    *,
    split: bool = True,
    first: int = 0,
    stride: int = 1,
    more: int = 0,
    dilation: int = 1,
) -> Halo | None:
    """Return the windows of a result that is split by `entry`; None where these are no neighbours'.

    Entry j of the result reads the places from `first + j * stride` on, `1 + more` of them.

    **Arguments:** `size`, of the source dim, and `result`, of the result's; `split`, whether the
    source is split too; `dilation`, of the source.
    """
    axes = context.axes
    whole = axes.mesh_axes(entry)
    # Rows over `data`, and parts of an axis, are gathered.
    if len(whole) != 1 or entry != axes.expand(*whole) or whole == ("data",) or not size * result:
        return None
    count = axes.size(entry)
    first, dilation = int(first), int(dilation)  # JAX has some as NumPy's
    own = -(-result // count)
    reads = Halo(
        whole[0], count, split, size, first, stride * own, stride * (own - 1) + 1 + more,
        first + stride * (result - 1) + 1 + more, dilation,
    )  # fmt: skip
    # Of less than one for each second device all get all, once.
    least, most = 2 * result > count, max(reads.edges) <= -(-size // count)
    return reads if not any(reads.edges) or (least and most) else None


def is_cheap(context: RuleContext, atom: Any, versions: ValueVersions, reads: Halo) -> bool:
    """Whether fewer entries are sent than if all readers of a value share a gathered version."""
    if jnp.issubdtype(versions.dtype, jax.dtypes.extended):
        return False  # of keys there is no number to fill up with
    if versions.is_param and context.of_parameters(context.first(versions)):
        return False
    own = -(-reads.size // reads.devices)
    return sum(reads.edges) * context.num_readers(atom) < own * (reads.devices - 1)


def _with(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


@dataclasses.dataclass(frozen=True)
class Halos:
    """The windows of several dims of one operand, read one after another.

    **Fields:** `dims`, pairs of a dim and its window.
    """

    dims: tuple[tuple[int, Halo], ...]

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of what is read of shards of a shape."""
        for dim, one in self.dims:
            shape = _with(shape, dim, one.width)
        return tuple(shape)

    def sent(self, context: RuleContext, shape: Sequence[int], dtype: Any) -> list[InnerCollective]:
        """Return what is sent, for a source whose shards have this shape."""
        sent: list[InnerCollective] = []
        for dim, one in self.dims:
            sent += one.sent(context, shape, dtype, dim)
            shape = _with(shape, dim, one.width)
        return sent

    def read(self, axes: Axes, array: Array, fill: Array | None = None) -> Array:
        """Return the places that this device reads; those outside of the source are `fill`."""
        fill = jnp.zeros((), array.dtype) if fill is None else fill
        for dim, one in self.dims:
            array = one.read(axes, array, dim, fill)
        return array
