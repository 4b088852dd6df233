"""The axes over which tensors are split: mesh axes, or parts of a mesh axis.

An operator may be split over two dims by one mesh axis, such as `tensor=8` as 2 x 4. The mesh is
fixed for the whole program, so such an axis is used in parts, and a collective over one part runs
in groups of devices (`axis_index_groups`).

    Axes({"data": 2, "tensor": 8}, parts={"tensor": (2, 4)})

    device along tensor     0  1  2  3  4  5  6  7
    tensor:0                0  0  0  0  1  1  1  1
    tensor:1                0  1  2  3  0  1  2  3

    collective over         groups of devices along tensor
    tensor:0                [0, 4], [1, 5], [2, 6], [3, 7]
    tensor:1                [0, 1, 2, 3], [4, 5, 6, 7]
    tensor:0, tensor:1      none: it runs over the whole mesh axis
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jax import lax
from jaxtyping import Array, Int

from plurax.sharding.spec import TensorSharding

Block = Callable[[dict[str, int]], tuple[int, ...]]


class Axes:
    """The names and sizes of axes, and the device groups of collectives over them.

    **Arguments:**

    - `sizes`: size of each mesh axis by name, in mesh order.
    - `parts`: for a mesh axis that is used in parts, their sizes, major to minor. The parts of
      `tensor` are axes called `tensor:0`, `tensor:1`, ...; the mesh does not change, and a
      collective over a part runs in groups.
    - `permutes`: whether resharding may use a collective permute, which needs all devices. False
      where only some run at a time (`Plan.permutes`).
    - `platform` of the devices, `cpu`, `gpu` or `tpu`; None if they are not known yet.

    **Attributes:** `mesh`, the sizes of the mesh axes; `sizes`, those of the axes in use, parts
    included.

    >>> Axes({"data": 2, "tensor": 8}, parts={"tensor": (2, 4)}).sizes
    {'data': 2, 'tensor:0': 2, 'tensor:1': 4}
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        parts: Mapping[str, Sequence[int]] | None = None,
        *,
        permutes: bool = True,
        platform: str | None = None,
    ) -> None:
        self.permutes, self.platform = permutes, platform
        self.mesh = dict(sizes)
        self.parts = {axis: tuple(sizes_) for axis, sizes_ in (parts or {}).items()}
        self.sizes: dict[str, int] = {}
        for axis, size in self.mesh.items():
            if axis not in self.parts:
                self.sizes[axis] = size
                continue
            assert math.prod(self.parts[axis]) == size
            self.sizes.update({f"{axis}:{i}": n for i, n in enumerate(self.parts[axis])})
        self._key = (tuple(self.mesh.items()), tuple(self.parts.items()), permutes, platform)

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are CPUs."""
        return self.platform == "cpu"

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Axes) and self._key == other._key

    def expand(self, axis: str) -> tuple[str, ...]:
        """Return a mesh axis as its parts, or as itself if it has none."""
        if axis not in self.parts:
            return (axis,)
        return tuple(f"{axis}:{i}" for i in range(len(self.parts[axis])))

    def expand_all(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return mesh axes, each as its parts."""
        return tuple(part for axis in axes for part in self.expand(axis))

    def expanded(self, sharding: TensorSharding) -> TensorSharding:
        """Return a sharding over mesh axes as one over their parts."""
        dims = (tuple(p for axis in entry for p in self.expand(axis)) for entry in sharding.dims)
        return TensorSharding(tuple(dims), sharding.partial)

    def size(self, axes: Sequence[str]) -> int:
        """Return the number of devices along some axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def mesh_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return the mesh axes to which some axes belong, in mesh order."""
        owners = {axis.partition(":")[0] for axis in axes}
        return tuple(axis for axis in self.mesh if axis in owners)

    def index(self, axes: Sequence[str]) -> Int[Array, ""] | int:
        """Return this device's index along some axes, the first one major, inside `shard_map`."""
        index: Array | int = 0
        for axis in axes:
            owner, _, part = axis.partition(":")
            at: Array | int = lax.axis_index(owner)
            if part:
                sizes = self.parts[owner]
                # A mixed-radix digit: parts are major to minor.
                at = at // math.prod(sizes[int(part) + 1 :]) % sizes[int(part)]
            index = index * self.sizes[axis] + at
        return index

    def group(self, axes: Sequence[str]) -> tuple[str | tuple[str, ...], list[list[int]] | None]:
        """Return the mesh axes and `axis_index_groups` for a collective over some axes.

        The groups are None if the axes are whole mesh axes.
        """
        owners = self.mesh_axes(axes)
        whole = [part for owner in owners for part in self.expand(owner)]
        if list(axes) == whole:
            return (owners[0] if len(owners) == 1 else owners), None
        if len(owners) > 1 and all(axis in self.mesh for axis in axes):
            return tuple(axes), None
        assert len(owners) == 1, f"one collective over parts of {owners}"
        coordinates = self._coordinates(owners[0])
        rest = [part for part in self.expand(owners[0]) if part not in axes]
        groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for device, coordinate in enumerate(coordinates):
            key = tuple(coordinate[part] for part in rest)
            # Devices that agree on all other parts form a group, ordered along `axes`.
            groups.setdefault(key, []).append((tuple(coordinate[a] for a in axes), device))
        return owners[0], [[device for _, device in sorted(group)] for group in groups.values()]

    def together(self, axes: Sequence[str]) -> bool:
        """Whether one collective can run over some axes.

        They must be parts of one mesh axis, or whole mesh axes.
        """
        owners = self.mesh_axes(axes)
        whole = [part for owner in owners for part in self.expand(owner)]
        return len(owners) <= 1 or list(axes) == whole or all(axis in self.mesh for axis in axes)

    def permute_pairs(
        self, have: Block, want: Block, axes: Sequence[str]
    ) -> tuple[str | tuple[str, ...], list[tuple[int, int]]]:
        """Return the mesh axes and `(source, target)` pairs of a permute that rearranges blocks.

        **Arguments:** `have` and `want`, functions from a device's coordinates to the index of the
        block it has before and after; `axes`, along which blocks change their device.
        """
        owners = self.mesh_axes(axes)
        grids = [self._coordinates(owner) for owner in owners]
        coordinates = [
            {k: v for part in combination for k, v in part.items()}
            for combination in itertools.product(*grids)
        ]
        # A replicated block has several holders; each sends it to one device.
        holders: dict[tuple[int, ...], list[int]] = {}
        for device, coordinate in enumerate(coordinates):
            holders.setdefault(have(coordinate), []).append(device)
        pairs = []
        for device, coordinate in enumerate(coordinates):
            sources = holders[want(coordinate)]
            # A device that has its block already keeps it, so replicas do not swap.
            source = device if device in sources else None
            if source is not None:
                sources.remove(device)
                pairs.append((device, device))
        taken = {target for _, target in pairs}
        for device, coordinate in enumerate(coordinates):
            if device not in taken:
                pairs.append((holders[want(coordinate)].pop(), device))
        return (owners[0] if len(owners) == 1 else owners), pairs

    def _coordinates(self, owner: str) -> list[dict[str, int]]:
        """Return for each index of a mesh axis the coordinates along its parts."""
        names = self.expand(owner)
        shape = self.parts.get(owner, (self.mesh[owner],))
        return [
            dict(zip(names, map(int, np.unravel_index(i, shape)), strict=True))
            for i in range(self.mesh[owner])
        ]
