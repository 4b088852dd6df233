"""Bounds of traced values on ranges of their dims, by interval arithmetic on the equations.

A mask is written as equations: iotas, sums, comparisons. Whether it is false for all of queries
0 to 1023 and keys 1024 to 1535 is asked of the equations with a range in place of each index, so
that the answer costs as much as a scalar and no array of queries by keys:

    equation, of shape (4096, 4096)    bounds for queries 0…1023, keys 1024…1535
    t = iota, dim 0                    [0, 1023]
    s = iota, dim 1                    [1024, 1535]
    m = ge t s                         [0, 0]: false everywhere
    x = dot_general q k                [-1e28, 1e28], see below
    y = select_n m -inf x              [-inf, -inf]
    p = exp(y - shift)                 [0, 0]: no weight, whatever the inputs are

Bounds are never narrower than the values: an operation without a rule, an input, and what may
overflow are unbounded, and results of floating arithmetic are widened by its error. This is
assumed of inputs:

- They are finite: -inf plus an input is -inf, and 0 times an input is 0.
- A product of floating inputs, such as queries and keys, is within ±1e28 (`SCORE`). So a fill of
  -1e30 is below every score. A model whose scores are as large cannot be trained in float32,
  since their squares are infinite. Scores of -1e9 can occur, and nothing follows from such a fill.
- Nothing is assumed of an input that is added to scores: it may itself be a mask of -1e30.

Source: Moore, Kearfott and Cloud 2009, "Introduction to Interval Analysis",
https://doi.org/10.1137/1.9780898717716.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from plurax.jaxpr.equal_dims import equal_dims, shape_of

Bounds = tuple[Any, Any]
"""The smallest and the largest value, as arrays of float64: an entry for each box."""

Tags = tuple[str | None, ...]
"""For each dim of a value the name of the range in which its index is; None: it may be any."""

SCORE = 1e28
"""What products of inputs are assumed to stay within."""

NO_WEIGHT = -1e3
"""`exp` of this, and of what is less, is exactly zero in every dtype."""

_EXACT = 2.0**53


class Intervals:
    """Bounds of the values of equations on boxes: many at once, each a range for each tag.

    **Arguments:**

    - `producer`: of each variable the equation that computes it; others are inputs.
    - `constants`: arrays of numbers that are known, such as those of the user's module.
    - `inside`: the variables that may be masked already, whose products are not those of inputs.
    - `ranges`: of each tag the first and the last index, as arrays with an entry for each box.
    - `stand_ins`: by the `id` of an equation and the place of an operand, the operand's bounds.
    """

    def __init__(
        self,
        producer: Mapping[Any, Any],
        constants: Mapping[Any, Any],
        inside: Mapping[Any, Any],
        ranges: Mapping[str, tuple[Any, Any]],
        stand_ins: Mapping[tuple[int, int], Bounds],
    ) -> None:
        self._producer, self._constants, self._inside = producer, constants, inside
        self._ranges, self._stand_ins = ranges, stand_ins
        self._known: dict[tuple[Any, Tags], Bounds] = {}

    def of(self, atom: Any, tags: Tags) -> Bounds:
        """Return the bounds of a variable or a literal, whose dims have these tags."""
        if isinstance(atom, Literal):
            return _of_literal(atom)
        key = (atom, tags)
        if key not in self._known:
            eqn, array = self._producer.get(atom), self._constants.get(atom)
            bounds = _UNKNOWN
            with np.errstate(all="ignore"):
                if eqn is not None and len(eqn.outvars) == 1 and not eqn.effects:
                    bounds = self._evaluate(eqn, tags)
                elif array is not None:
                    bounds = float(array.min()), float(array.max())
            self._known[key] = _sound(bounds, atom.aval.dtype)
        return self._known[key]

    def of_operand(self, eqn: Any, place: int, tags: Tags) -> Bounds:
        """Return the bounds of an operand, or of what stands in for it."""
        stands = self._stand_ins.get((id(eqn), place))
        return self.of(eqn.invars[place], tags) if stands is None else stands

    def _evaluate(self, eqn: Any, tags: Tags) -> Bounds:
        name = eqn.primitive.name
        if name == "iota":
            dim = eqn.params["dimension"]
            size = shape_of(eqn.outvars[0])[dim]
            return (0.0, size - 1.0) if tags[dim] is None else self._ranges[str(tags[dim])]
        if name == "dot_general":
            return self._product(eqn, tags)
        rule = _RULES.get(name)
        return _UNKNOWN if rule is None else rule(eqn, self._operands(eqn, tags))

    def _operands(self, eqn: Any, tags: Tags) -> list[Bounds]:
        """Return the bounds of the operands, by the tags of the dims that are the result's."""
        out = len(eqn.invars)
        own: list[list[str | None]] = [[None] * len(shape_of(atom)) for atom in eqn.invars]
        for (place, dim), (to, result) in equal_dims(eqn):
            if to == out and place < out:
                own[place][dim] = tags[result]
        return [self.of_operand(eqn, place, tuple(one)) for place, one in enumerate(own)]

    def _product(self, eqn: Any, tags: Tags) -> Bounds:
        """Return the bounds of a product: zero, that of scores, or none."""
        if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
            return _UNKNOWN
        zero: Any = False
        bounded: Any = True
        for atom, (lo, hi) in zip(eqn.invars, self._operands(eqn, tags), strict=True):
            zero = zero | ((lo == 0) & (hi == 0))
            if atom in self._inside:
                bounded = bounded & (lo >= -SCORE) & (hi <= SCORE)
        large = np.where(bounded, SCORE, np.inf)
        return np.where(zero, 0.0, -large), np.where(zero, 0.0, large)


# --- Rules ----------------------------------------------------------------------------------------

_UNKNOWN: Bounds = (-np.inf, np.inf)


def _of_literal(literal: Any) -> Bounds:
    dtype = literal.aval.dtype
    if np.ndim(literal.val) or not (dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.number)):
        return _UNKNOWN
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return _UNKNOWN
    value = float(np.asarray(literal.val, dtype))
    return _UNKNOWN if np.isnan(value) else _sound((value, value), dtype)


def _sound(bounds: Bounds, dtype: Any) -> Bounds:
    """Return bounds that hold in a dtype: no bounds where integers may overflow, or a rule failed.

    Bounds of booleans are 0 and 1.
    """
    lo, hi = bounds
    if dtype == jnp.bool_:
        return np.where(lo > 0, 1.0, 0.0), np.where(hi < 1, 0.0, 1.0)
    least, most = -np.inf, np.inf
    if jnp.issubdtype(dtype, jnp.integer):
        limits = np.iinfo(dtype)
        least, most = max(float(limits.min), -_EXACT), min(float(limits.max), _EXACT)
    good = (lo <= hi) & (lo >= least) & (hi <= most)  # false of NaN
    return np.where(good, lo, -np.inf), np.where(good, hi, np.inf)


def _rounded(eqn: Any, bounds: Bounds) -> Bounds:
    """Return the bounds of a result of floating arithmetic, wider by the error of its dtype."""
    dtype = eqn.outvars[0].aval.dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        return bounds
    limits: Any = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    error, tiny, largest = 4 * float(limits.eps), float(limits.tiny), float(limits.max)

    def wider(value: Any, sign: int) -> Any:
        value = np.where(np.abs(value) > largest, np.copysign(np.inf, value), value)
        moved = value + sign * error * np.abs(value)
        # What is as small may become zero.
        small = (value != 0) & (np.abs(value) < tiny)
        moved = np.where(small, np.where(value * sign > 0, sign * tiny, 0.0), moved)
        return np.where(np.isfinite(value), moved, value)

    return wider(bounds[0], -1), wider(bounds[1], 1)


def _added(eqn: Any, operands: Sequence[Bounds]) -> Bounds:
    """Return the bounds of a sum: infinity plus what is not known is infinity."""
    (a, b), (c, d) = operands
    lo, hi = np.asarray(a + c), np.asarray(b + d)
    lo, hi = np.where(np.isnan(lo), np.inf, lo), np.where(np.isnan(hi), -np.inf, hi)
    return _rounded(eqn, (lo, hi))


def _negative(bounds: Bounds) -> Bounds:
    return -bounds[1], -bounds[0]


def _multiplied(eqn: Any, operands: Sequence[Bounds]) -> Bounds:
    """Return the bounds of a product: zero times what is not known is zero."""
    (a, b), (c, d) = operands
    ends = np.stack(np.broadcast_arrays(a * c, a * d, b * c, b * d))
    # NaN is 0 · inf: zero where the other bound is but unknown, no bound where it is infinite.
    ends = np.where(np.isnan(ends), 0.0, ends)
    infinite = ((a == b) & np.isinf(a)) | ((c == d) & np.isinf(c))
    lo = np.where(infinite & (ends == 0).any(0), -np.inf, ends.min(0))
    return _rounded(eqn, (lo, np.where(infinite & (ends == 0).any(0), np.inf, ends.max(0))))


def _divided(eqn: Any, operands: Sequence[Bounds]) -> Bounds:
    """Return the bounds of a quotient by what has one sign; of integers towards zero."""
    (a, b), (c, d) = operands
    ends = np.stack(np.broadcast_arrays(a / c, a / d, b / c, b / d))
    if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
        ends = np.trunc(ends)
    sure = ((c > 0) | (d < 0)) & np.isfinite(c) & np.isfinite(d)
    lo, hi = np.where(sure, ends.min(0), -np.inf), np.where(sure, ends.max(0), np.inf)
    return _rounded(eqn, (lo, hi))


def _remainder(_: Any, operands: Sequence[Bounds]) -> Bounds:
    """Return the bounds of a remainder of integers, which has the sign of the first operand."""
    (a, b), (c, d) = operands
    most = np.maximum(np.abs(c), np.abs(d))
    sure = (c > 0) | (d < 0)
    lo, hi = np.where(a >= 0, 0.0, -most), np.where(b <= 0, 0.0, most)
    return np.where(sure, lo, -np.inf), np.where(sure, hi, np.inf)


def _converted(eqn: Any, operands: Sequence[Bounds]) -> Bounds:
    ((lo, hi),) = operands
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if new == jnp.bool_:
        return np.where((lo > 0) | (hi < 0), 1.0, 0.0), np.where((lo == 0) & (hi == 0), 0.0, 1.0)
    if jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.integer):
        return np.trunc(lo), np.trunc(hi)
    if not (jnp.issubdtype(new, jnp.floating) or jnp.issubdtype(new, jnp.integer)):
        return _UNKNOWN
    exact = _EXACT
    if jnp.issubdtype(new, jnp.floating):
        exact = 2 / float(jnp.finfo(new).eps)  # type: ignore[no-untyped-call]
    whole = old == jnp.bool_ or jnp.issubdtype(old, jnp.integer)
    same = (np.abs(lo) <= exact) & (np.abs(hi) <= exact) & whole
    wide = _rounded(eqn, (lo, hi))
    return np.where(same, lo, wide[0]), np.where(same, hi, wide[1])


def _selected(_: Any, operands: Sequence[Bounds]) -> Bounds:
    """Return the bounds of the cases that may be selected."""
    (least, most), *cases = operands
    lo: Any = np.inf
    hi: Any = -np.inf
    for index, (a, b) in enumerate(cases):
        possible = (least <= index) & (most >= index)
        lo = np.minimum(lo, np.where(possible, a, np.inf))
        hi = np.maximum(hi, np.where(possible, b, -np.inf))
    return lo, hi


def _compared(less: bool, equal: bool) -> Callable[..., Bounds]:
    """Return the rule of `<`, `<=`, `>` or `>=`."""

    def rule(_: Any, operands: Sequence[Bounds]) -> Bounds:
        (a, b), (c, d) = operands if less else operands[::-1]
        sure, possible = (b <= c, a <= d) if equal else (b < c, a < d)
        return np.where(sure, 1.0, 0.0), np.where(possible, 1.0, 0.0)

    return rule


def _equal(_: Any, operands: Sequence[Bounds]) -> Bounds:
    (a, b), (c, d) = operands
    return 1.0 * ((a == b) & (c == d) & (a == c)), 1.0 * ((a <= d) & (c <= b))


def _logical(name: str) -> Callable[..., Bounds]:
    """Return the rule of `and` or `or`, of booleans."""
    both = np.minimum if name == "and" else np.maximum

    def rule(eqn: Any, operands: Sequence[Bounds]) -> Bounds:
        if eqn.outvars[0].aval.dtype != jnp.bool_:
            return _UNKNOWN
        (a, b), (c, d) = operands
        return both(a, c), both(b, d)

    return rule


def _not(eqn: Any, operands: Sequence[Bounds]) -> Bounds:
    ((lo, hi),) = operands
    return (1 - hi, 1 - lo) if eqn.outvars[0].aval.dtype == jnp.bool_ else _UNKNOWN


def _exponential(eqn: Any, operands: Sequence[Bounds]) -> Bounds:
    """Return the bounds of `exp` and `exp2`, and of `logistic`, which is at most 1."""
    ((_, hi),) = operands
    hi = hi * np.log(2) if eqn.primitive.name == "exp2" else hi
    top = 1.0 if eqn.primitive.name == "logistic" else np.inf
    return np.zeros(np.shape(hi)), np.where(hi <= NO_WEIGHT, 0.0, top)


def _increasing(fun: Any) -> Callable[..., Bounds]:
    """Return the rule of a function that increases; where it is not defined there are no bounds."""
    return lambda eqn, operands: _rounded(eqn, (fun(operands[0][0]), fun(operands[0][1])))


def _absolute(_: Any, operands: Sequence[Bounds]) -> Bounds:
    ((lo, hi),) = operands
    least = np.where((lo <= 0) & (hi >= 0), 0.0, np.minimum(np.abs(lo), np.abs(hi)))
    return least, np.maximum(np.abs(lo), np.abs(hi))


def _summed(_: Any, operands: Sequence[Bounds]) -> Bounds:
    """Return the bounds of a sum over a dim: zero, or none."""
    ((lo, hi),) = operands
    zero = (lo == 0) & (hi == 0)
    return np.where(zero, 0.0, -np.inf), np.where(zero, 0.0, np.inf)


def _moved(_: Any, operands: Sequence[Bounds]) -> Bounds:
    return operands[0]


_RULES: dict[str, Callable[[Any, Sequence[Bounds]], Bounds]] = {
    **dict.fromkeys(
        ("broadcast_in_dim", "reshape", "squeeze", "transpose", "copy", "name", "stop_gradient",
         "reduce_max", "reduce_min"), _moved,
    ),
    "add": _added,
    "add_any": _added,
    "sub": lambda eqn, operands: _added(eqn, [operands[0], _negative(operands[1])]),
    "neg": lambda eqn, operands: _negative(operands[0]),
    "mul": _multiplied,
    "div": _divided,
    "rem": _remainder,
    "max": lambda _, x: (np.maximum(x[0][0], x[1][0]), np.maximum(x[0][1], x[1][1])),
    "min": lambda _, x: (np.minimum(x[0][0], x[1][0]), np.minimum(x[0][1], x[1][1])),
    "abs": _absolute,
    "sign": lambda _, x: (np.sign(x[0][0]), np.sign(x[0][1])),
    "convert_element_type": _converted,
    "select_n": _selected,
    "lt": _compared(less=True, equal=False),
    "le": _compared(less=True, equal=True),
    "gt": _compared(less=False, equal=False),
    "ge": _compared(less=False, equal=True),
    "eq": _equal,
    "ne": lambda eqn, operands: _negative_truth(_equal(eqn, operands)),
    "and": _logical("and"),
    "or": _logical("or"),
    "not": _not,
    "exp": _exponential,
    "exp2": _exponential,
    "logistic": _exponential,
    "tanh": _increasing(np.tanh),
    "sqrt": _increasing(np.sqrt),
    "reduce_sum": _summed,
}  # fmt: skip


def _negative_truth(bounds: Bounds) -> Bounds:
    return 1 - bounds[1], 1 - bounds[0]
