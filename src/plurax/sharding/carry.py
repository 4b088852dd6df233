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

from plurax.sharding.sharding import Sharding
from plurax.sharding.values import Cell, Value

Kind = tuple[Sharding, bool, bool]


class Carry:
    """What a loop carries from turn to turn.

    **Arguments:** `divider`; `variables` of the loop's body that hold it; `cells`, with which the
    loop starts.

    **Attributes:** `kinds`, how each value lies at the start of a turn, None for zeros that may lie
    in any way; `most`, the number of turns to try after which nothing can change any more.
    """

    def __init__(self, divider: Any, variables: Sequence[Any], cells: Sequence[Cell]) -> None:
        self._divider, self._cells = divider, cells
        self._avals = [var.aval for var in variables]
        self.kinds: list[Kind | None] = [self._first_kind(cell) for cell in cells]
        self._forced: list[Sharding | None] = [None] * len(cells)
        self._tried = False
        # Of each value only these change, each once: from zeros, moved, varying, not fixed.
        self.most = 2 + 4 * len(cells)

    def _first_kind(self, cell: Cell) -> Kind | None:
        """How a carried value comes; a sum will be added up, in the shards that are wanted."""
        if cell.unmade is not None and cell.unmade.zero:
            return None
        sharding, varying, fixed = cell.value.kind
        return Sharding(sharding.dims), varying, fixed

    def vary(self) -> None:
        """All of it depends on the device's own rows: on how many turns they take, for one."""
        for place, (cell, kind) in enumerate(zip(self._cells, self.kinds, strict=True)):
            sharding = Sharding.whole(len(cell.shape)) if kind is None else kind[0]
            self.kinds[place] = (sharding.without(["data"]), True, False)

    def cheaper_whole(self, sent: float) -> bool:
        """Whether to gather all of it over `data` sends less than the turns do; never of rows."""
        kinds = [kind for kind in self.kinds if kind is not None]
        if any(varying for _, varying, _ in kinds) or self._divider.joint:
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
                sharding = self._forced[place] = Sharding(kind[0].dims).without(["data"])
                self.kinds[place] = (sharding, *kind[1:])

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of what a turn finds; nothing is moved to learn them."""
        shapes = []
        for aval, kind, cell in zip(self._avals, self.kinds, self._cells, strict=True):
            sharding = Sharding.whole(len(cell.shape)) if kind is None else kind[0]
            local = sharding.shard_shape(cell.shape, self._divider.axes.sizes)
            shapes.append(jax.ShapeDtypeStruct(local, aval.dtype))
        return shapes

    def start(self) -> list[Array]:
        """What the first turn finds."""
        arrays = []
        for cell, kind in zip(self._cells, self.kinds, strict=True):
            sharding = Sharding.whole(len(cell.shape)) if kind is None else Sharding(kind[0].dims)
            arrays.append(self._divider.to(cell, sharding).array)
        return arrays

    def found(self, arrays: Sequence[Array]) -> list[Cell]:
        """What a turn finds."""
        cells = []
        for aval, kind, array in zip(self._avals, self.kinds, arrays, strict=True):
            shape = tuple(aval.shape)
            if kind is None:
                cells.append(Cell(self._divider.zeros(shape, array.dtype)))
            else:
                cells.append(Cell(Value(array, shape, *kind)))
        return cells

    def left(self, cells: Sequence[Cell]) -> list[Value]:
        """What a turn leaves, moved where that is known to be needed."""
        values = []
        for cell, kind, forced in zip(cells, self.kinds, self._forced, strict=True):
            if kind is None:
                values.append(cell.value)
                continue
            sharding, varying, fixed = kind
            target = forced
            if target is None:
                late = cell.unmade is not None and cell.unmade.free is None
                target = Sharding(sharding.dims) if late else cell.value.sharding
            # A turn may leave a constant in the place of what another leaves from its rows.
            target = target.without(["data"]) if varying else target
            value = self._divider.to(cell, target)
            values.append(
                dataclasses.replace(
                    value, varying=value.varying or varying, fixed=value.fixed and fixed
                )
            )
        return values

    def learn(self, values: Sequence[Value]) -> bool:
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
        sharding, varying, fixed = kind[0], kind[1] or new[1], kind[2] and new[2]
        if not self._tried and not new[0].partial:
            sharding = new[0]
        elif sharding != new[0]:
            sharding = self._forced[place] = Sharding(sharding.dims)
        if varying:
            sharding = sharding.without(["data"])
        return sharding, varying, fixed
