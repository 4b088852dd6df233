"""Compare what several devices hold alike: a bit that differs is memory or arithmetic at fault.

Under a plan many devices hold the same values: parameters along `data`, Adam's moments too without
ZeRO. They stay equal bit by bit, because every device computes them from the same sums. A flipped
bit in one copy is invisible from outside: JAX reads an array from its first copy, and training goes
on with networks that drift apart. So each device computes a checksum of each shard that it holds,
and the checksums are compared by a vote along the axes over which the shard is replicated. Example,
`Plan(data=4, tensor=2)`, the parameter `w: f32[8, 6]` split over `tensor`, a bit flipped in the
copy of device 5:

                      data=0     data=1     data=2     data=3
    w[:, :3]          dev 0      dev 2      dev 4      dev 6       tensor=0
      checksum        a1c0       a1c0       a1c0       a1c0
      votes           4          4          4          4
    w[:, 3:]          dev 1      dev 3      dev 5      dev 7       tensor=1
      checksum        77e2       77e2       09bb       77e2
      votes           3          3          1          3           device 5 differs

What no other device holds cannot be compared: under ZeRO 3 the shards of the parameters. Bytes that
the check moves: 4 per leaf, along each replicated axis, and a byte per leaf of each device's
verdict. It is a compiled program of its own, and a step has nothing of it.

Source: majority voting over replicas, as in triple modular redundancy (Lyons and Vanderkulk 1962,
https://doi.org/10.1147/rd.62.0200).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, UInt8, UInt32

from plurax.distributed.global_arrays import one_at_a_time
from plurax.execute.layouts.state_layout import StateLayout
from plurax.fingerprint import checksums
from plurax.mesh import replicated
from plurax.state import TrainState, check_not_donated

SAME, OUTVOTED, TIED = 0, 1, 2
"""The verdict on a copy: equal to the majority, unlike it, or there is no majority."""


@dataclasses.dataclass(frozen=True)
class ReplicaFinding:
    """A device whose copies differ from those on other devices.

    **Fields:**

    - `device`: its `id`; `process`: the index of the process that it belongs to; `local`, its index
      among the devices of that process.
    - `leaves`: the names of the leaves of the state that differ.
    - `certain`: whether most copies are alike and this one is not. Of two copies, or of as many of
      one kind as of another, none can be said to be right, and each gets a finding.
    """

    device: int
    process: int
    local: int
    leaves: tuple[str, ...]
    certain: bool


class ReplicaCheck:
    """The comparison of what several devices hold alike in a training state.

    **Arguments:** `layout`, of the stored state; `mesh`.

    **Attributes:** `leaves`, the names of the leaves that are compared: those that more than one
    device holds.
    """

    def __init__(self, layout: StateLayout, mesh: Mesh) -> None:
        self._mesh = mesh
        self._specs = jax.tree.leaves(
            layout.specs, is_leaf=lambda node: isinstance(node, PartitionSpec)
        )
        names = jax.tree.leaves(layout.names)
        wide = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
        self._groups: dict[tuple[str, ...], list[int]] = {}
        for index, varying in enumerate(jax.tree.leaves(layout.varying_axes)):
            axes = tuple(axis for axis in wide if axis not in varying)
            if axes:
                self._groups.setdefault(axes, []).append(index)
        self._order = [index for group in self._groups.values() for index in group]
        self.leaves = tuple(names[index] for index in self._order)

    def compare(self, state: TrainState) -> UInt8[Array, "devices leaves"] | None:
        """Begin to compare, and return the verdicts, on all devices; None if there are no copies.

        The verdicts are for `findings`. The state, stored as the layout says, is not donated. All
        processes call this, as a step, and get the same verdicts.
        """
        check_not_donated(state)
        if not self._groups:
            return None
        leaves = jax.tree.leaves(state)
        verdicts: Array = self._compiled([leaves[index] for index in self._order])
        return one_at_a_time(verdicts)

    def findings(self, verdicts: UInt8[Array, "devices leaves"] | None) -> list[ReplicaFinding]:
        """Wait for what `compare` returned, and return a finding for each device that differs."""
        if verdicts is None:
            return []
        rows = np.asarray(verdicts.addressable_data(0))  # every device has all
        return [
            ReplicaFinding(
                device=device.id,
                process=device.process_index,
                local=_local(device),
                leaves=tuple(dict.fromkeys(np.array(self.leaves)[row != SAME].tolist())),
                certain=bool((row == OUTVOTED).any()),
            )
            for device, row in zip(self._mesh.devices.flat, rows, strict=True)
            if row.any()
        ]

    def check(self, state: TrainState) -> list[ReplicaFinding]:
        """Compare now, and return a finding for each device that differs; none where all is well.

        state, metrics = program.step(state, batch)
        assert not program.replicas.check(state)
        """
        return self.findings(self.compare(state))

    @functools.cached_property
    def _compiled(self) -> Any:
        specs = [self._specs[index] for index in self._order]
        verdicts = jax.shard_map(
            self._on_device,
            mesh=self._mesh,
            in_specs=(specs,),
            out_specs=PartitionSpec(),
            check_vma=False,
        )

        def compare(leaves: list[Array]) -> UInt8[Array, "devices leaves"]:
            return verdicts([_numbers(leaf) for leaf in leaves])

        return jax.jit(compare, out_shardings=replicated(self._mesh))

    def _on_device(self, shards: list[Array]) -> UInt8[Array, "devices leaves"]:
        """Return the verdicts on the copies of all devices, in the order of the mesh."""
        blocks = self._mesh.devices.flat[0].platform == "cpu"
        ends = np.cumsum([len(group) for group in self._groups.values()])
        sums = jnp.split(checksums(shards, blocks=blocks), ends[:-1])
        verdicts = [vote(own, axes) for own, axes in zip(sums, self._groups, strict=True)]
        return lax.all_gather(jnp.concatenate(verdicts), self._mesh.axis_names)


def vote(own: UInt32[Array, "leaves"], axes: Sequence[str]) -> UInt8[Array, "leaves"]:
    """Return the verdict on this device's checksums, among those of all devices along `axes`."""
    everyone = lax.all_gather(own, tuple(axes))
    votes = jnp.sum((everyone == own[None]).astype(jnp.int32), axis=0)
    half = len(everyone) // 2
    outvoted = jnp.where(lax.pmax(votes, tuple(axes)) > half, OUTVOTED, TIED)
    return jnp.where(votes > half, SAME, outvoted).astype(jnp.uint8)


def _numbers(leaf: Array) -> Array:
    """Return a random key as the numbers that it is, and other arrays unchanged."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _local(device: jax.Device) -> int:
    """Return the index of a device among those of its process."""
    own = [
        one.id for one in jax.devices(device.platform) if one.process_index == device.process_index
    ]
    return sorted(own).index(device.id)
