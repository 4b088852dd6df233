"""Partial sums of which less is reduced later.

A partial sum that several equations read is reduced before them: reduced behind each, it could be
sent several times. But where all readers are linear in it and what they return is smaller, it is
less that is sent behind them. Whether it is follows from the equations alone, read backwards.

    tokens (8, 16), 2 experts each; y (16, 16) is a partial sum; w, the weights (8, 2)

    read by                        numbers to reduce
    p = y.reshape(8, 2, 16)        those of p's readers
    out = einsum("nkd,nk->nd")     128, for the residual that out is added to
    dw = einsum("nkd,nd->nk")      16, in the backward pass
                                   144 behind both readers of p, 256 before
"""

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from plurax.jaxpr.compat import is_linear
from plurax.jaxpr.interpret import variables

_MOVES = frozenset(["reduce_sum", "reshape", "squeeze", "transpose"])
"""Operations that move or add up the entries of their one operand."""


def shrinking(eqns: Sequence[Any], results: Sequence[Any]) -> frozenset[Any]:
    """Return the variables of which fewer numbers are reduced if all readers leave them partial."""
    # By variable: the numbers to reduce behind the readers that are linear in it; whether one is
    # not, before which it is reduced itself.
    behind: dict[Any, int] = {}
    whole = set(variables(results))
    less = set()

    def needed(var: Any) -> int:
        """Return the numbers to reduce of a variable that is a partial sum."""
        size, later = math.prod(var.aval.shape), behind.get(var, 0)
        return size if var in whole else min(size, later)

    for eqn in reversed(eqns):
        for var in eqn.outvars:
            if var in behind and var not in whole and behind[var] < math.prod(var.aval.shape):
                less.add(var)
        for place, atom in enumerate(eqn.invars):
            if isinstance(atom, Literal):
                continue
            if len(eqn.outvars) == 1 and linear(eqn, place):
                behind[atom] = behind.get(atom, 0) + needed(eqn.outvars[0])
            else:
                whole.add(atom)
    return frozenset(less)


SUMS = frozenset(["add", "add_any"])


def adds_up(eqn: Any, places: Sequence[int]) -> bool:
    """Whether the result is a partial sum if the operands at these places are, and no others."""
    if eqn.primitive.name not in SUMS | {"sub"}:
        return len(places) == 1 and linear(eqn, places[0])
    rest = [atom for place, atom in enumerate(eqn.invars) if place not in places]
    return all(isinstance(atom, Literal) and not atom.val for atom in rest)


def linear(eqn: Any, place: int) -> bool:
    """Whether the rule of an operation leaves this operand a partial sum, the others being none."""
    name = eqn.primitive.name
    if sum(other is eqn.invars[place] for other in eqn.invars) > 1:
        return False
    if is_linear(eqn) or name in _MOVES or name in ("gather", "div"):
        return place == 0
    if name == "select_n":
        return place > 0
    return name in ("mul", "dot_general") or (name == "scatter-add" and place == 2)
