"""Find on which rows of a batch each entry of a traced function's results depends.

A loss promises that its row i depends on row i of the batch alone. Whether it does is a question of
data flow: every value is interpreted as an array of levels, one for each of its entries and each
row of the batch, and every equation says how its results' levels follow from its operands'. A dim
along which the levels do not change has size 1, so that a matrix of activations is as small as its
batch dim. Example, a batch of B = 2 rows, `x` (2, 3):

    equation             levels                     entry ... depends on rows ...
    x                    (2, 1, 2)  [[1 0] [0 1]]   x[i, j]: row i
    s = sum(x, 0)        (1, 2)     [[1 1]]         s[j]: both rows
    c = x - s            (2, 1, 2)  [[1 1] [1 1]]   c[i, j]: both rows; the first line to name is
                                                    that of `s`, where rows left their order
    r = reshape(x, 6)    (6, 2)     [1 0] x 3, [0 1] x 3    r[k]: row k // 3

The levels are `NONE`; `MAY`, where only a decision depends on a row (a comparison, the end of a
loop) or where nothing is known of a primitive; and `DOES`. Integers that follow from the shapes
alone (`arange`) are computed, because they say which rows a gather reads.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from plurax.jaxpr import row_rules
from plurax.jaxpr.compat import Scan, call_operands, called_jaxpr, is_call_or_remat, open_jaxpr
from plurax.jaxpr.interpret import interpret, source_line
from plurax.jaxpr.row_rules import DOES, MAY, NONE, Levels, compressed, none

MOST_KNOWN = 2**16
"""The largest number of integers that are computed."""
MOST_UNROLLED = 20_000
"""The largest number of equations of a loop over rows that is followed iteration by iteration."""


@dataclasses.dataclass(frozen=True)
class RowsRead:
    """What a value is known to depend on.

    **Fields:** `levels`, `(*dims, B)`, a dim along which they are equal of size 1; `known`, the
    value `(*dims, 1)` if it is of integers that are known, NaN where one is not, or None; `line`,
    the line of the model where its rows left their order, empty where they are in order.
    """

    levels: Levels
    known: Any = None
    line: str = ""

    def others(self) -> Levels:
        """Return the level `(B, B)` of each row of the value in each other row of the batch."""
        size = self.levels.shape[-1]
        inner = tuple(range(1, self.levels.ndim - 1))
        per_row = np.broadcast_to(self.levels.max(inner, initial=NONE), (size, size)).copy()
        np.fill_diagonal(per_row, NONE)
        return per_row


def row_dependence(closed: Any, batch: Sequence[bool], size: int) -> list[RowsRead]:
    """Return for each result of a closed jaxpr on which rows it depends.

    **Arguments:** `batch`, for each input whether its leading dim is that of the batch; `size`, the
    number of rows.
    """
    args = [
        RowsRead(
            np.eye(size, dtype=np.uint8).reshape(size, *(1,) * (len(var.aval.shape) - 1), size)
            * DOES
        )
        if rows
        else RowsRead(none(len(var.aval.shape), size))
        for var, rows in zip(closed.jaxpr.invars, batch, strict=True)
    ]
    return _RowWalk(size).run(closed.jaxpr, closed.consts, args)


class _RowWalk:
    """One walk over the equations of a function."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._calls: list[Any] = []
        """The calls and loops that enclose the equation, outermost first."""
        self._control: dict[str, Callable[..., list[RowsRead]]] = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "shard_map": self._shard_map,
        }

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[RowsRead]) -> list[RowsRead]:
        return interpret(jaxpr, consts, args, default=self._equation, lift=self._constant)

    def _inside(self, eqn: Any, body: Any, args: Sequence[RowsRead]) -> list[RowsRead]:
        """Run the body of a call or loop."""
        self._calls.append(eqn)
        try:
            return self.run(*open_jaxpr(body), args)
        finally:
            self._calls.pop()

    def _constant(self, value: Any) -> RowsRead:
        known = None
        if row_rules.is_whole(value.dtype) and np.size(value) <= MOST_KNOWN:
            known = np.asarray(value, np.float64)[..., None]
        return RowsRead(none(np.ndim(value), self.size), known)

    def _equation(self, eqn: Any, inputs: list[RowsRead]) -> list[RowsRead]:
        if is_call_or_remat(eqn):
            self._calls.append(eqn)
            try:
                return self.run(*called_jaxpr(eqn), call_operands(eqn, inputs))
            finally:
                self._calls.pop()
        name = eqn.primitive.name
        reads = any(value.levels.any() for value in inputs)
        if reads and name in self._control:
            return self._control[name](eqn, inputs)
        if reads and (called := _called(eqn)):
            return self._inside(eqn, called, inputs)
        if reads:
            results = row_rules.levels_of(eqn, inputs, self.size)
        else:
            results = [none(len(var.aval.shape), self.size) for var in eqn.outvars]
        known = row_rules.known_of(eqn, [value.known for value in inputs], MOST_KNOWN)
        values = []
        for var, levels in zip(eqn.outvars, results, strict=True):
            value = RowsRead(compressed(self._decided(eqn, var, levels)), known)
            values.append(self._with_line(value, eqn, inputs))
        return values

    def _decided(self, eqn: Any, var: Any, levels: Levels) -> Levels:
        """Return the levels of a result, which of a decision are at most `MAY`."""
        kind = var.aval.dtype
        floats = any(jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in eqn.invars)
        decides = kind == jnp.bool_ or (floats and row_rules.is_whole(kind))
        return np.minimum(levels, MAY) if decides else levels

    def _with_line(self, value: RowsRead, eqn: Any, inputs: Sequence[RowsRead]) -> RowsRead:
        if row_rules.in_order(value.levels):
            return value
        before = next((one.line for one in inputs if one.line), "")
        return dataclasses.replace(value, line=before or source_line((*self._calls, eqn)))

    # --- Loops and branches -------------------------------------------------------------------

    def _scan(self, eqn: Any, inputs: list[RowsRead]) -> list[RowsRead]:
        scan = Scan.of(eqn)
        consts, carry, xs = scan.split(inputs)
        over_rows = any(x.levels.shape[0] > 1 for x in xs) or scan.length == self.size
        if over_rows and scan.length * len(scan.body.eqns) <= MOST_UNROLLED:
            return self._unrolled(eqn, scan, consts, carry, xs)
        rows = [_any_row(x) for x in xs]
        while True:
            out = self._inside(eqn, eqn.params["jaxpr"], [*consts, *carry, *rows])
            joined = [_joined(*pair) for pair in zip(carry, out, strict=False)]
            if _same(joined, carry):
                break
            carry = joined
        ys = [dataclasses.replace(y, levels=y.levels[None], known=None) for y in out[len(carry) :]]
        return [*carry, *ys]

    def _unrolled(self, eqn: Any, scan: Scan, consts: Any, carry: Any, xs: Any) -> list[RowsRead]:
        """Follow a loop iteration by iteration."""
        stacked: list[list[RowsRead]] = []
        for index in range(scan.length):
            at = scan.length - 1 - index if scan.reverse else index
            out = self._inside(
                eqn, eqn.params["jaxpr"], [*consts, *carry, *(_row(x, at) for x in xs)]
            )
            carry = out[: scan.num_carry]
            stacked.append(out[scan.num_carry :])
        if scan.reverse:
            stacked.reverse()
        ys = []
        for column in zip(*stacked, strict=True):
            shape = np.broadcast_shapes(*(y.levels.shape for y in column))
            levels = np.stack([np.broadcast_to(y.levels, shape) for y in column])
            value = RowsRead(compressed(levels))
            ys.append(self._with_line(value, eqn, column))
        return [*carry, *ys]

    def _while(self, eqn: Any, inputs: list[RowsRead]) -> list[RowsRead]:
        params = eqn.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        tested, consts = inputs[:first], inputs[first : first + second]
        carry = inputs[first + second :]
        while True:
            (goes_on,) = self._inside(eqn, params["cond_jaxpr"], [*tested, *carry])
            out = self._inside(eqn, params["body_jaxpr"], [*consts, *carry])
            out = [self._after(eqn, goes_on, value) for value in out]
            joined = [_joined(*pair) for pair in zip(carry, out, strict=True)]
            if _same(joined, carry):
                return carry
            carry = joined

    def _cond(self, eqn: Any, inputs: list[RowsRead]) -> list[RowsRead]:
        index, *operands = inputs
        branches = [self._inside(eqn, body, operands) for body in eqn.params["branches"]]
        joined = branches[0]
        for other in branches[1:]:
            joined = [_joined(*pair) for pair in zip(joined, other, strict=True)]
        return [self._after(eqn, index, value) for value in joined]

    def _after(self, eqn: Any, decision: RowsRead, value: RowsRead) -> RowsRead:
        """Return a value that depends on a decision, too.

        The dims of a decision are leading dims of the value: `vmap` of a `while` decides by row.
        """
        decided = np.minimum(decision.levels, MAY)
        ones = (1,) * (value.levels.ndim - decided.ndim)
        decided = decided.reshape(*decided.shape[:-1], *ones, self.size)
        levels = np.maximum(value.levels, decided)
        changed = RowsRead(compressed(levels), None, value.line or decision.line)
        return self._with_line(changed, eqn, [changed])

    def _shard_map(self, eqn: Any, inputs: list[RowsRead]) -> list[RowsRead]:
        """Follow the body on one device, where no dim that tells rows apart is split."""
        if all(map(_is_split_elsewhere, inputs, eqn.params["in_specs"])):
            out = self._inside(eqn, eqn.params["jaxpr"], inputs)
            if all(map(_is_split_elsewhere, out, eqn.params["out_specs"])):
                return out
        return [
            self._with_line(RowsRead(levels), eqn, inputs)
            for levels in row_rules.unknown(eqn, [one.levels for one in inputs])
        ]


def _is_split_elsewhere(value: RowsRead, spec: Any) -> bool:
    return all(size == 1 or not axes for size, axes in zip(value.levels.shape, spec, strict=False))


def _called(eqn: Any) -> Any:
    """Return the one jaxpr of an equation if it takes and returns the same, as any call does."""
    bodies = [body for body in eqn.params.values() if isinstance(body, ClosedJaxpr)]
    if len(bodies) != 1:
        return None
    body, _ = open_jaxpr(bodies[0])
    alike = [
        [str(var.aval) for var in eqn.invars] == [str(var.aval) for var in body.invars],
        [str(var.aval) for var in eqn.outvars] == [str(var.aval) for var in body.outvars],
    ]
    return bodies[0] if all(alike) else None


def _row(x: RowsRead, index: int) -> RowsRead:
    """Return one row of what a scan reads."""
    known = None if x.known is None else x.known[index]
    return RowsRead(compressed(x.levels[index if x.levels.shape[0] > 1 else 0]), known, x.line)


def _any_row(x: RowsRead) -> RowsRead:
    return RowsRead(compressed(x.levels.max(0, initial=NONE)), None, x.line)


def _joined(first: RowsRead, other: RowsRead) -> RowsRead:
    """Return what holds of a value that is one or the other."""
    known = None
    if first.known is not None and other.known is not None:
        known = np.where(first.known == other.known, first.known, np.nan)
    line = first.line or other.line
    return RowsRead(compressed(np.maximum(first.levels, other.levels)), known, line)


def _same(some: Sequence[RowsRead], others: Sequence[RowsRead]) -> bool:
    return all(
        np.array_equal(one.levels, other.levels)
        and (one.known is None) == (other.known is None)
        and (one.known is None or np.array_equal(one.known, other.known, equal_nan=True))
        for one, other in zip(some, others, strict=True)
    )
