"""A network cut into stages: the functions of each stage and the parameters they use.

A stage has layers of a stack, a `StageFn` (an embedding, a head, a stage of an annotated model), or
both. Parameters are numbered as the leaves of the parameter tree. Stage `s` is on device
`s % devices`.

Example: a stack of 5 layers on 2 devices with 2 chunks each, so 4 stages:

    stage 0 (device 0)    embed, layers 0 1          stage 1 (device 1)    layer 2
    stage 2 (device 0)    layer 3                    stage 3 (device 1)    layer 4, head

    stacked kernels    f32[5, 16, 16] -> f32[8, 16, 16], split over `pipeline`: 4 rows per device
    device 0           layers 0 1 | 3 -         two rows per chunk; "-" is a row of zeros
    device 1           layers 2 - | 4 -
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
    `leaves`, indices of the stacked parameters; `depth`, the number of layers.
    """

    fun: Part
    leaves: tuple[int, ...]
    depth: int


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
    """The assignment of layers to stages: in order, as even as possible, earlier stages first.

    Every device has `max_layers` rows for each of its `chunks` stages; rows without a layer are
    padding.

    >>> LayerAssignment(depth=5, devices=2, chunks=2).layers
    [0, 1, 3, -1, 2, -1, 4, -1]
    """

    depth: int
    devices: int
    chunks: int

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.devices * self.chunks

    @property
    def max_layers(self) -> int:
        """The largest number of layers of a stage."""
        return -(-self.depth // self.stages)

    @property
    def counts(self) -> list[int]:
        """Number of layers of each stage."""
        least, more = divmod(self.depth, self.stages)
        return [least + (stage < more) for stage in range(self.stages)]

    @property
    def device_layers(self) -> int:
        """The largest number of layers of a device."""
        counts = self.counts
        return max(sum(counts[device :: self.devices]) for device in range(self.devices))

    @property
    def starts(self) -> list[int]:
        """Index of the first layer of each stage."""
        counts = self.counts
        return [sum(counts[:stage]) for stage in range(self.stages)]

    @property
    def layers(self) -> list[int]:
        """The layer in each row, device by device; -1 for padding."""
        rows = []
        for device in range(self.devices):
            for chunk in range(self.chunks):
                stage = chunk * self.devices + device
                own = [self.starts[stage] + k for k in range(self.counts[stage])]
                rows += own + [-1] * (self.max_layers - len(own))
        return rows

    @property
    def even(self) -> bool:
        """Whether the rows are the layers in order, without padding."""
        return self.layers == list(range(self.depth))
