"""A network cut into stages: the functions of each stage and the parameters they use.

A stage has layers of a stack, a `StageFn` (an embedding, a head, a stage of an annotated model), or
both. Parameters are numbered as the leaves of the parameter tree. Stage `s` is on device
`s % devices`.

Example: a stack of 5 layers on 2 devices with 2 chunks each, so 4 stages:

    stage 0 (device 0)    embed, layers 0 1          stage 1 (device 1)    layer 2
    stage 2 (device 0)    layer 3                    stage 3 (device 1)    layer 4, head

    stacked kernels    f32[5, 16, 16] -> f32[6, 16, 16], split over `pipeline`: 3 rows per device
    device 0           layers 0 1 | 3
    device 1           layers 2 | 4 -           "-" is a row of zeros
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Part = Callable[[Sequence[Any], Any, Any], tuple[Any, Any]]
"""A stage function `(leaves of params, x, rest) -> (y, aux)`.

`x` and `y` are the boundary activations that it receives and sends, trees of arrays `(rows, ...)`;
`rest` is not differentiated; `aux` is not sent.
"""


@dataclasses.dataclass(frozen=True)
class StageFn:
    """The function of a stage besides its layers: embedding, head, or annotated stage.

    **Fields:**

    - `fun`: a `Part`.
    - `leaves`: indices of the parameters that it uses, in the order in which it takes them.
    - `after`: whether it runs after the stage's layers instead of before.
    - `reads`, `writes`: indices of the leaves of model state that it reads and writes. If it reads
      any, `rest` is the pair `(rows, states read)`; if it writes any, `aux` is the pair
      `(aux, states written)`.
    """

    fun: Part
    leaves: tuple[int, ...]
    after: bool = False
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of a stack: one function, with parameters stacked along their leading dim.

    **Fields:** `fun`, a `Part` for one layer, with `rest` the pair `(rows, index of the layer)`;
    `leaves`, indices of the stacked parameters; `assignment`, the `LayerAssignment`.
    """

    fun: Part
    leaves: tuple[int, ...]
    assignment: "LayerAssignment"


@dataclasses.dataclass(frozen=True)
class StagedNetwork:
    """A network cut into stages.

    **Fields:** `stage_fns`, the `StageFn` of each stage that has one; `layers`, those of a stack,
    or None; `stages`, their number.
    """

    stage_fns: Mapping[int, StageFn]
    layers: Layers | None
    stages: int

    def homes(self, count: int, devices: int) -> list[int | None]:
        """Return for each of `count` parameters the one device that uses it, or None.

        None means that several devices have it, or that it is stacked and split over all. A
        parameter that no stage uses is on device 0.
        """
        used: list[set[int]] = [set() for _ in range(count)]
        for stage, stage_fn in self.stage_fns.items():
            for leaf in stage_fn.leaves:
                used[leaf].add(stage % devices)
        layered = set(self.layers.leaves) if self.layers else set()
        return [
            None if leaf in layered or len(at) > 1 else min(at, default=0)
            for leaf, at in enumerate(used)
        ]

    def uses_at(self, homes: Sequence[int | None], devices: int) -> bool:
        """Return whether each stage finds its parameters on its device, under these `homes`."""
        return all(
            homes[leaf] in (None, stage % devices)
            for stage, stage_fn in self.stage_fns.items()
            for leaf in stage_fn.leaves
        )


@dataclasses.dataclass(frozen=True)
class LayerAssignment:
    """The assignment of layers to stages, in order, and of each device's layers to rows.

    Every device has as many rows as the one with the most layers; rows without a layer are padding.

    **Fields:** `counts`, the number of layers of each stage; `devices`, their number.

    >>> LayerAssignment((2, 1, 1, 1), devices=2).layers
    [0, 1, 3, 2, 4, -1]
    """

    counts: tuple[int, ...]
    devices: int

    @property
    def depth(self) -> int:
        """The number of layers."""
        return sum(self.counts)

    @property
    def rows(self) -> int:
        """The number of rows of each device."""
        return max(sum(self.counts[device :: self.devices]) for device in range(self.devices))

    @property
    def max_layers(self) -> list[int]:
        """For each device the largest number of layers of one of its stages."""
        return [max(self.counts[device :: self.devices]) for device in range(self.devices)]

    @property
    def starts(self) -> list[int]:
        """Index of the first layer of each stage."""
        return [sum(self.counts[:stage]) for stage in range(len(self.counts))]

    @property
    def first_rows(self) -> list[int]:
        """The row of each stage's first layer, among those of its device."""
        return [
            sum(self.counts[stage % self.devices : stage : self.devices])
            for stage in range(len(self.counts))
        ]

    @property
    def layers(self) -> list[int]:
        """The layer in each row, device by device; -1 for padding."""
        rows = [-1] * (self.rows * self.devices)
        for stage, (start, row) in enumerate(zip(self.starts, self.first_rows, strict=True)):
            first = stage % self.devices * self.rows + row
            count = self.counts[stage]
            rows[first : first + count] = range(start, start + count)
        return rows

    @property
    def order(self) -> list[int]:
        """The row of each layer."""
        rows = self.layers
        return [rows.index(layer) for layer in range(self.depth)]

    @property
    def in_order(self) -> bool:
        """Whether the rows are as of any dim that devices divide: in order, padding at the end."""
        return self.rows == -(-self.depth // self.devices) and self.order == [*range(self.depth)]


def even_layers(depth: int, stages: int) -> tuple[int, ...]:
    """Return numbers of layers as equal as can be, earlier stages having more.

    >>> even_layers(10, stages=4)
    (3, 3, 2, 2)
    """
    least, more = divmod(depth, stages)
    return tuple(least + (stage < more) for stage in range(stages))
