"""What a loop carries: how it lies, so that each turn finds it as the one before left it.

It starts as it comes. If a turn leaves it otherwise, that is tried as the start; if a turn then
leaves it otherwise again, it is moved at the end of each turn. Zeros may start as anything, the
terms of a sum too: a gradient added up over a loop crosses devices once. What depends on the
device's own rows after any turn does so from the start.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array

from plurax.partition.values import ShardedValue, ValueVersions
from plurax.sharding.spec import TensorSharding

Kind = tuple[TensorSharding, bool, bool]


class Carry:
    """What a loop carries from turn to turn.

    **Arguments:** `divider`; `variables` of the loop's body that hold it; `cells`, with which the
    loop starts.

    **Attributes:** `kinds`, how each value lies at the start of a turn, None for zeros that may lie
    in any way; `most`, the number of turns to try after which nothing can change any more.
    """

    def __init__(
        self, divider: Any, variables: Sequence[Any], cells: Sequence[ValueVersions]
    ) -> None:
        self._divider, self._cells = divider, cells
        self._avals = [var.aval for var in variables]
        self.kinds: list[Kind | None] = [self._first_kind(cell) for cell in cells]
        self._forced: list[TensorSharding | None] = [None] * len(cells)
        self._tried = False
        # Of each value only these change, each once: from zeros, moved, varying, not fixed.
        self.most = 2 + 4 * len(cells)

    def _first_kind(self, cell: ValueVersions) -> Kind | None:
        """How a carried value comes; a sum will be added up, in the shards that are wanted."""
        if cell.deferred is not None and cell.deferred.zero:
            return None
        sharding, data_varying, is_param = cell.value.kind
        return TensorSharding(sharding.dims), data_varying, is_param

    def vary(self) -> None:
        """All of it depends on the device's own rows: on how many turns they take, for one."""
        for place, (cell, kind) in enumerate(zip(self._cells, self.kinds, strict=True)):
            sharding = TensorSharding.whole(len(cell.shape)) if kind is None else kind[0]
            self.kinds[place] = (sharding.without(["data"]), True, False)

    def cheaper_whole(self, sent: float) -> bool:
        """Whether to gather all of it over `data` sends less than the turns do; never of rows."""
        kinds = [kind for kind in self.kinds if kind is not None]
        if any(data_varying for _, data_varying, _ in kinds) or self._divider.joint:
            return False
        once = sum(
            self._divider.cost(cell, kind[0].without(["data"]))
            for cell, kind in zip(self._cells, self.kinds, strict=True)
            if kind is not None
        )
        return 0 < once < sent

    def make_whole(self) -> None:
        """All of it whole over `data`, at the start of each turn."""
        for place, kind in enumerate(self.kinds):
            if kind is not None:
                sharding = self._forced[place] = TensorSharding(kind[0].dims).without(["data"])
                self.kinds[place] = (sharding, *kind[1:])

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of what a turn finds; nothing is moved to learn them."""
        shapes = []
        for aval, kind, cell in zip(self._avals, self.kinds, self._cells, strict=True):
            sharding = TensorSharding.whole(len(cell.shape)) if kind is None else kind[0]
            local = sharding.shard_shape(cell.shape, self._divider.axes.sizes)
            shapes.append(jax.ShapeDtypeStruct(local, aval.dtype))
        return shapes

    def start(self) -> list[Array]:
        """What the first turn finds."""
        arrays = []
        for cell, kind in zip(self._cells, self.kinds, strict=True):
            sharding = (
                TensorSharding.whole(len(cell.shape))
                if kind is None
                else TensorSharding(kind[0].dims)
            )
            arrays.append(self._divider.reshard(cell, sharding).array)
        return arrays

    def found(self, arrays: Sequence[Array]) -> list[ValueVersions]:
        """What a turn finds."""
        cells = []
        for aval, kind, array in zip(self._avals, self.kinds, arrays, strict=True):
            shape = tuple(aval.shape)
            if kind is None:
                cells.append(ValueVersions(self._divider.zeros(shape, array.dtype)))
            else:
                cells.append(ValueVersions(ShardedValue(array, shape, *kind)))
        return cells

    def left(self, cells: Sequence[ValueVersions]) -> list[ShardedValue]:
        """What a turn leaves, moved where that is known to be needed."""
        values = []
        for cell, kind, forced in zip(cells, self.kinds, self._forced, strict=True):
            if kind is None:
                values.append(cell.value)
                continue
            sharding, data_varying, is_param = kind
            target = forced
            if target is None:
                late = cell.deferred is not None and cell.deferred.free is None
                target = TensorSharding(sharding.dims) if late else cell.value.sharding
            # A turn may leave a constant in the place of what another leaves from its rows.
            target = target.without(["data"]) if data_varying else target
            value = self._divider.reshard(cell, target)
            values.append(
                dataclasses.replace(
                    value,
                    data_varying=value.data_varying or data_varying,
                    is_param=value.is_param and is_param,
                )
            )
        return values

    def learn(self, values: Sequence[ShardedValue]) -> bool:
        """Whether a turn left all as it found it; if not, `kinds` are changed."""
        if [value.kind for value in values] == self.kinds:
            return True
        for place, (kind, value) in enumerate(zip(self.kinds, values, strict=True)):
            new = value.kind
            if kind is not None and kind != new:
                new = self._joined(place, kind, new)
            self.kinds[place] = new
        self._tried = True
        return False

    def _joined(self, place: int, kind: Kind, new: Kind) -> Kind:
        """What is found where it is left otherwise."""
        sharding, data_varying, is_param = kind[0], kind[1] or new[1], kind[2] and new[2]
        if not self._tried and not new[0].partial:
            sharding = new[0]
        elif sharding != new[0]:
            sharding = self._forced[place] = TensorSharding(sharding.dims)
        if data_varying:
            sharding = sharding.without(["data"])
        return sharding, data_varying, is_param
