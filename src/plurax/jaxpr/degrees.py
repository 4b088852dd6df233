"""How statistics of attention depend on the maximum by which scores are shifted.

The derivative of a streamed softmax treats the maximum m as a constant. That is right where the
model stops its gradient, and where a result does not change with m, which its degree says: how
often m itself is in a value ("sum"), or which power of exp(m) ("power").

    m = max(y)               sum 1
    l = sum(exp(y - m))      power -1
    o = exp(y - m) · v       power -1
    o / l                    constant: power -1 + 1
    m + log(l)               constant: sum 1 - 1
    o, as a result           refused: it changes with m
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from plurax.jaxpr.forms import EXTREMES, KEPT, UNARY, Form

_CONSTANT = ("constant", 0)


class Degrees:
    """The degrees of statistics, as they become known.

    **Attributes:** `degrees`, of the variables that depend on the maximum; `improper`, equations of
    such variables whose result has no degree.
    """

    def __init__(self) -> None:
        self.degrees: dict[Any, tuple[str, int]] = {}
        self.improper: list[Any] = []

    def add(self, eqn: Any, form: Form | None = None) -> None:
        """Note how a statistic depends on the maximum, if it does; `form`, of what is reduced."""
        own = [
            _CONSTANT if isinstance(atom, Literal) else self.degrees.get(atom, _CONSTANT)
            for atom in eqn.invars
        ]
        if form is not None:
            degree: Any = _degree_of_sum(eqn, form, self.degrees)
        elif all(one == _CONSTANT for one in own):
            return
        else:
            degree = _degree(eqn, own)
        if degree is None:
            self.improper.append(eqn)
        elif degree != _CONSTANT:
            self.degrees[eqn.outvars[0]] = degree


def _degree_of_sum(eqn: Any, form: Form, degrees: Mapping[Any, tuple[str, int]]) -> tuple[str, int]:
    """Return the degree of a reduction's result in the maximum."""
    if eqn.primitive.name in EXTREMES:
        return ("sum", 1)
    total = sum(sign * degrees.get(var, _CONSTANT)[1] for var, sign in form.terms)
    total += sum(n * degrees.get(var, _CONSTANT)[1] for var, n in form.factors)
    return ("power", total) if total else _CONSTANT


def _degree(eqn: Any, own: Sequence[tuple[str, int]]) -> tuple[str, int] | None:
    """Return the degree of an equation's result from its operands'; None where it has none."""
    name, first = eqn.primitive.name, own[0]
    kinds = {kind for kind, _ in own} - {"constant"}
    numbers = [n for _, n in own]
    if name == "stop_gradient":
        return _CONSTANT
    if name in KEPT or name in UNARY:
        return first
    if len(kinds) > 1:
        return None
    (kind,) = kinds
    result: tuple[str, int] | None = None
    if name == "neg":
        result = (kind, -first[1] if kind == "sum" else first[1])
    elif name in ("add", "sub", "add_any"):
        sign = -1 if name == "sub" else 1
        if kind == "sum":
            result = (kind, numbers[0] + sign * numbers[1])
        elif numbers[0] == numbers[1]:
            result = (kind, numbers[0])
    elif name in ("mul", "div") and kind == "power":
        result = (kind, numbers[0] + (-numbers[1] if name == "div" else numbers[1]))
    elif name == "log" and kind == "power":
        result = ("sum", first[1])
    elif name == "exp" and kind == "sum":
        result = ("power", first[1])
    return _CONSTANT if result is not None and result[1] == 0 else result
