"""The values that one device of a pipeline stores: boundaries, residuals and parameters.

The executor stores only arrays between ticks. It rebuilds `ShardedValue`s from them by their
specs: `ShardedValue`s with a `jax.ShapeDtypeStruct` in place of the array.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from plurax.partition.values import ShardedValue
from plurax.pipeline.packing import Buffers, Packing, buffer_bytes, max_lengths
from plurax.pipeline.stage_vjp import Values
from plurax.pipeline.stages import StageFn
from plurax.sharding.spec import TensorSharding

PLATFORMS = frozenset({"gpu", "tpu"})
"""Platforms whose compilers copy a parameter out of its buffer in each tick that reads it.

On CPUs, too, but there the arrays of all devices cost more time than the copies.
"""
MAX_BUFFERS = 2
"""How many buffers the parameters of all devices may need to be read before the ticks.

A stack's embedding and head are on two devices, and need two at most.
"""


class PackedValues:
    """The specs of some values and their offsets in buffers (see `packing.py`), flat or `apart`.

    **Attributes:** `specs`; `shardings` of the values; `lengths` and `shapes` of the buffers.
    """

    def __init__(self, specs: Values, *, apart: bool = False) -> None:
        self.specs = specs
        self.shardings = [spec.sharding for spec in specs]
        self._packing = Packing([spec.array for spec in specs], apart=apart)
        self.lengths, self.shapes = self._packing.lengths, self._packing.shapes

    def apart(self) -> "PackedValues":
        """Return the same values, each with a buffer of its own shape."""
        return PackedValues(self.specs, apart=True)

    def read(self, buffers: Buffers) -> Values:
        """Return the values in buffers of at least these lengths."""
        return self._values(self._packing.read(buffers))

    def write(self, buffers: Buffers, values: Values) -> Buffers:
        """Return the buffers with the values written at their offsets."""
        return self._packing.write(buffers, [value.array for value in values])

    def read_row(self, buffers: Buffers, row: Any) -> Values:
        """Return the values in row `row` of buffers `(rows, length)`."""
        return self._values(self._packing.read_row(buffers, row))

    def write_row(self, buffers: Buffers, row: Any, values: Values) -> Buffers:
        """Return buffers `(rows, length)` with the values written in row `row`."""
        return self._packing.write_row(buffers, row, [value.array for value in values])

    def _values(self, arrays: Sequence[Array]) -> Values:
        pairs = zip(self.specs, arrays, strict=True)
        return [dataclasses.replace(spec, array=array) for spec, array in pairs]


@dataclasses.dataclass(frozen=True)
class StageParams:
    """The parameters that one device of a pipeline has.

    A parameter that several stages use is on all devices; the layers of stacked parameters are
    split over them; a parameter of a single stage is on that stage's device only, packed in flat
    buffers. Parameters are numbered as the leaves of the parameter tree.

    **Fields:**

    - `values`: for each parameter its `ShardedValue` (stacked ones: `(layers per device, ...)`), or
      only its spec where it is on one device.
    - `homes`: for each parameter the one device that has it; None where all do.
    - `packings`: for each device the `Packing` of the parameters that only it has.
    - `homed`: this device's flat buffers, laid out by its packing.
    - `frozen`: the parameters without gradient.
    - `arrays`: by number, parameters that have been read from the buffers (`read_once`).
    """

    values: Values
    homes: Sequence[int | None]
    packings: Sequence[Packing]
    homed: Buffers
    frozen: frozenset[int] = frozenset()
    arrays: Mapping[int, Array] = dataclasses.field(default_factory=dict)

    def trained(self, leaves: Sequence[int]) -> list[int]:
        """Return those of some parameters that have a gradient."""
        return [leaf for leaf in leaves if leaf not in self.frozen]

    def frozen_places(self, leaves: Sequence[int]) -> list[int]:
        """Return the places of the frozen ones among some parameters."""
        return [place for place, leaf in enumerate(leaves) if leaf in self.frozen]

    def gradient_index(self, leaf: int) -> int:
        """Return the index of a parameter's gradient in the packing of its device."""
        home = self.homes[leaf]
        return sum(self.homes[other] == home for other in self.trained(range(leaf)))

    def packing_index(self, leaf: int) -> int:
        """Return the index of a parameter in the packing of its device."""
        home = self.homes[leaf]
        return sum(1 for other in self.homes[:leaf] if other == home)

    def used(self, stage_fn: StageFn) -> Values:
        """Return the parameters of a `StageFn`; valid on its device only."""
        values = []
        for leaf in stage_fn.leaves:
            value, home = self.values[leaf], self.homes[leaf]
            if home is not None:
                value = dataclasses.replace(value, array=self._read(leaf, home))
            values.append(value)
        return values

    def _read(self, leaf: int, home: int) -> Array:
        # Every device traces this read, at the offset that `home` uses: elsewhere it returns
        # meaningless numbers, and the stage runs zero times.
        if leaf in self.arrays:
            return self.arrays[leaf]
        (array,) = self.packings[home].read(self.homed, [self.packing_index(leaf)])
        return array

    def read_once(self, stage_fns: Iterable[StageFn], platform: str | None) -> "StageParams":
        """Return these with all parameters of `StageFn`s read from the buffers.

        What is read before the loop over ticks is its constant. The program is one for all devices,
        so each then has arrays for the parameters of all: they are read at each use, as before,
        where these need more than `MAX_BUFFERS` buffers, or if the platform is not in `PLATFORMS`.
        """
        lengths = [packing.lengths for packing in self.packings]
        most = MAX_BUFFERS * buffer_bytes(max_lengths(lengths))
        if platform not in PLATFORMS or sum(map(buffer_bytes, lengths)) > most:
            return self
        arrays = {
            leaf: self._read(leaf, home)
            for stage_fn in stage_fns
            for leaf in stage_fn.leaves
            if (home := self.homes[leaf]) is not None
        }
        return dataclasses.replace(self, arrays=arrays)


def replicated_value(array: Any) -> ShardedValue:
    """Return an array as a replicated value."""
    array = jnp.asarray(array)
    return ShardedValue(array, array.shape, TensorSharding.replicated(array.ndim))
