"""A network as stages: which pieces each has, and which parameters they use."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Part = Callable[[Sequence[Any], Any, Any], tuple[Any, Any]]
"""`(leaves of params, x, rest) -> (y, aux)`."""


@dataclasses.dataclass(frozen=True)
class StageFn:
    """What a stage has besides layers: an embedding, a head, a stage of a marked model.

    **Fields:** `fun`, a `Part`; `leaves`, the numbers of the parameters it uses, in their order;
    `after`, whether it comes after the stage's layers; `reads` and `writes`, the numbers of the
    leaves of model state that it reads and writes. Where there are any, `rest` is a pair of the
    rows and what it reads, and `aux` a pair of what it is without and what it writes.
    """

    fun: Part
    leaves: tuple[int, ...]
    after: bool = False
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of a stack.

    **Fields:** `fun`, a `Part` for one layer, whose `rest` is a pair of the rows and the layer's
    number; `leaves`, the numbers of the parameters that are stacked; `depth`.
    """

    fun: Part
    leaves: tuple[int, ...]
    depth: int


@dataclasses.dataclass(frozen=True)
class StagedNetwork:
    """A network cut into stages.

    **Fields:** `edges` by stage; `layers`, where it is a stack; `stages`, how many.
    """

    edges: Mapping[int, StageFn]
    layers: Layers | None
    stages: int

    def homes(self, count: int, devices: int) -> list[int | None]:
        """For each of `count` parameters the device it lives on: None where several use it.

        Stacked ones live on all devices, a part on each, and count as None.
        """
        used: list[set[int]] = [set() for _ in range(count)]
        for stage, edge in self.edges.items():
            for leaf in edge.leaves:
                used[leaf].add(stage % devices)
        layered = set(self.layers.leaves) if self.layers else set()
        return [
            None if leaf in layered or len(at) > 1 else min(at, default=0)
            for leaf, at in enumerate(used)
        ]

    def uses_at(self, homes: Sequence[int | None], devices: int) -> bool:
        """Whether each stage uses parameters that are on its own device alone, or on all."""
        return all(
            homes[leaf] in (None, stage % devices)
            for stage, edge in self.edges.items()
            for leaf in edge.leaves
        )


@dataclasses.dataclass(frozen=True)
class LayerAssignment:
    """How layers are dealt out to stages, as evenly as it goes, earlier stages having more.

    Every device has `rows` places for layers, `most` for each of its stages, and what is not needed
    is filled up.

    >>> Dealing(depth=5, devices=2, chunks=2).layers
    [0, 1, 3, -1, 2, -1, 4, -1]
    """

    depth: int
    devices: int
    chunks: int

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.devices * self.chunks

    @property
    def most(self) -> int:
        """The most layers of a stage."""
        return -(-self.depth // self.stages)

    @property
    def counts(self) -> list[int]:
        """Layers of each stage."""
        least, more = divmod(self.depth, self.stages)
        return [least + (stage < more) for stage in range(self.stages)]

    @property
    def starts(self) -> list[int]:
        """The first layer of each stage."""
        counts = self.counts
        return [sum(counts[:stage]) for stage in range(self.stages)]

    @property
    def layers(self) -> list[int]:
        """For each place, device by device, the layer in it; -1 for none."""
        places = []
        for device in range(self.devices):
            for chunk in range(self.chunks):
                stage = chunk * self.devices + device
                own = [self.starts[stage] + k for k in range(self.counts[stage])]
                places += own + [-1] * (self.most - len(own))
        return places

    @property
    def even(self) -> bool:
        """Whether layers lie in their own order, none filled up."""
        return self.layers == list(range(self.depth))
