"""The share of a loop: how what it carries lies, so that each turn finds it as it was left."""

import dataclasses
from typing import Any

import jax
from jax import lax
from jaxtyping import Array

from plurax.primitives import open_jaxpr, scan_sizes
from plurax.sharding.sharding import Sharding
from plurax.sharding.values import Cell, Value

Kind = tuple[Sharding, bool, bool]

TURNS = 8
"""After so many tries at most, what is carried lies as it does at the start of a turn."""


class Loop:
    """One `scan` of a divided function.

    What is carried starts as it comes. If a turn leaves it otherwise, that is tried as the start;
    if a turn then leaves it otherwise again, it is moved at the end of each turn. Zeros may start
    as anything, the terms of a sum too: a gradient added up over a loop crosses devices once.
    """

    def __init__(
        self, divider: Any, eqn: Any, inputs: list[Cell], goals: list[Sharding | None]
    ) -> None:
        self.divider, self.eqn = divider, eqn
        self.body, self.body_consts = open_jaxpr(eqn.params["jaxpr"])
        self.length: int = eqn.params["length"]
        shared, self.carried = scan_sizes(eqn)
        carried, kept = self.carried, shared + self.carried
        self.consts, self.carry = inputs[:shared], inputs[shared:kept]
        self.xs = [self._unstacked(cell) for cell in inputs[kept:]]
        self.goals = [*[None] * carried, *(_inner(goal) for goal in goals[carried:])]
        for cell in self.consts:
            if cell.unmade is None or cell.unmade.source is not None:
                cell.values.insert(0, divider.settled(cell))
        self.kinds: list[Kind | None] = [self._first_kind(cell) for cell in self.carry]
        self.forced: list[Sharding | None] = [None] * carried
        self.found: list[Kind] = []

    def _first_kind(self, cell: Cell) -> Kind | None:
        """How a carried value comes; a sum will be added up, in the shards that are wanted."""
        if cell.unmade is not None and cell.unmade.zero:
            return None
        sharding, varying, fixed = cell.value.kind
        return Sharding(sharding.dims), varying, fixed

    def _unstacked(self, cell: Cell) -> Value:
        """A stack whose leading dim is whole, so that a loop can take it row by row."""
        value: Value = self.divider.settled(cell)
        if value.sharding.dims[0]:
            value = self.divider.to(cell, value.sharding.with_dim(0, ()))
        return value

    def settle(self) -> None:
        """Find how what is carried shall lie."""
        for turn in range(TURNS):
            kept = len(self.divider.records)
            jax.eval_shape(self._turn, self._shapes(), [x.array[0] for x in self.xs])
            del self.divider.records[kept:]
            if self.found[: self.carried] == self.kinds:
                return
            for place, (kind, new) in enumerate(zip(self.kinds, self.found, strict=False)):
                if kind is None:
                    self.kinds[place] = new
                elif kind != new:
                    sharding, varying, fixed = kind
                    if turn == 0 and not new[0].partial:
                        sharding = new[0]
                    elif sharding != new[0]:
                        sharding = Sharding(sharding.dims)
                        self.forced[place] = sharding
                    self.kinds[place] = (sharding, varying or new[1], fixed and new[2])
        raise AssertionError("no way for the loop to lie")

    def run(self, start: list[Array]) -> list[Cell]:
        """The loop itself."""
        options = {name: self.eqn.params[name] for name in ("reverse", "unroll")}
        x_arrays = [value.array for value in self.xs]
        last, stacked = lax.scan(self._turn, start, x_arrays, self.length, **options)
        results = []
        for var, array, kind in zip(self.eqn.outvars, [*last, *stacked], self.found, strict=True):
            sharding, varying, fixed = kind
            if len(sharding.dims) < len(var.aval.shape):
                sharding = Sharding(((), *sharding.dims), sharding.partial)
            results.append(Cell(Value(array, tuple(var.aval.shape), sharding, varying, fixed)))
        return results

    def _shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of what the first turn finds; nothing is moved to learn them."""
        shapes = []
        for var, kind, cell in zip(self._inner, self.kinds, self.carry, strict=False):
            sharding = Sharding.whole(len(cell.shape)) if kind is None else kind[0]
            local = sharding.shard_shape(cell.shape, self.divider.axes.sizes)
            shapes.append(jax.ShapeDtypeStruct(local, var.aval.dtype))
        return shapes

    @property
    def _inner(self) -> list[Any]:
        """The body's variables behind those that its turns share."""
        return list(self.body.invars[len(self.consts) :])

    def start(self) -> list[Array]:
        """What the first turn finds."""
        arrays = []
        for cell, kind in zip(self.carry, self.kinds, strict=True):
            sharding = Sharding.whole(len(cell.shape)) if kind is None else Sharding(kind[0].dims)
            arrays.append(self.divider.to(cell, sharding).array)
        return arrays

    def _turn(self, carry: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
        cells = [cell.fresh() for cell in self.consts]
        for var, kind, array in zip(self._inner, self.kinds, carry, strict=False):
            shape = tuple(var.aval.shape)
            value = self.divider.zeros(shape, array.dtype) if kind is None else None
            cells.append(Cell(value or Value(array, shape, *(kind or ()))))
        for stack, array in zip(self.xs, xs, strict=True):
            cells.append(Cell(_row(stack, array)))
        out = self.divider.evaluate(self.body, self.body_consts, cells, self.goals)
        values = []
        for cell, target in zip(out[: self.carried], self.forced, strict=True):
            values.append(cell.value if target is None else self.divider.to(cell, target))
        for cell, goal in zip(out[self.carried :], self.goals[self.carried :], strict=True):
            values.append(cell.value if goal is None else self.divider.finished(cell, goal))
        self.found = [value.kind for value in values]
        arrays = [value.array for value in values]
        return arrays[: self.carried], arrays[self.carried :]


def _row(stack: Value, array: Array) -> Value:
    sharding = Sharding(stack.sharding.dims[1:], stack.sharding.partial)
    return dataclasses.replace(stack, array=array, shape=stack.shape[1:], sharding=sharding)


def _inner(goal: Sharding | None) -> Sharding | None:
    """How the rows of a stack shall lie, where each can be added up over `data` on its own."""
    if goal is None or goal.dims[0] or "data" not in goal.axes:
        return None
    return Sharding(goal.dims[1:])
