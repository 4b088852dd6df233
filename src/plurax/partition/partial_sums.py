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

In a loop over layers the second reader is in another loop, of the backward pass: p is stacked as a
partial sum, and its rows are read as such there.
"""

import itertools
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from jax.extend.core import Literal

from plurax.jaxpr.compat import Scan, is_linear
from plurax.jaxpr.interpret import flat_equations, variables

_MOVES = frozenset(["reduce_sum", "reshape", "squeeze", "transpose"])
"""Operations that move or add up the entries of their one operand."""


def shrinking(
    eqns: Sequence[Any], results: Sequence[Any], later: Sequence[int | None] = ()
) -> dict[Any, int]:
    """Return the variables of which fewer numbers are reduced if all readers leave them partial,
    with these numbers.

    `later` has the numbers of results that are read elsewhere, and may be partial sums there.
    """
    numbers = itertools.chain(later, itertools.repeat(None))
    pairs = [pair for pair in zip(results, numbers, strict=False) if variables(pair[:1])]
    sums = {var: size for var, size in pairs if size is not None}
    behind, _ = behind_readers(eqns, [var for var, size in pairs if size is None], sums)
    computed = [var for eqn in eqns for var in eqn.outvars]
    return {var: behind[var] for var in computed if behind.get(var, math.inf) < _size(var)}


def _size(var: Any) -> int:
    return math.prod(var.aval.shape)


def behind_readers(
    eqns: Sequence[Any], results: Sequence[Any], later: Mapping[Any, int]
) -> tuple[dict[Any, int], set[Any]]:
    """Return by variable the numbers to reduce behind its readers; without those of which a reader
    is not linear, before which they are reduced, and these."""
    behind, whole = dict(later), set(variables(results))
    stacks = {var for eqn in eqns if eqn.primitive.name == "scan" for var in eqn.outvars}
    for eqn in reversed(eqns):
        rows = _behind_rows(eqn, stacks)
        for place, atom in enumerate(eqn.invars):
            if isinstance(atom, Literal):
                continue
            if len(eqn.outvars) == 1 and linear(eqn, place):
                (var,) = eqn.outvars
                needed = _size(var) if var in whole else min(_size(var), behind.get(var, 0))
                behind[atom] = behind.get(atom, 0) + needed
            elif place in rows:
                behind[atom] = behind.get(atom, 0) + rows[place]
            else:
                whole.add(atom)
    return {var: numbers for var, numbers in behind.items() if var not in whole}, whole


def _behind_rows(eqn: Any, stacks: Set[Any]) -> dict[int, int]:
    """Return by the place of a stack that a loop reads the numbers to reduce behind its rows.

    Of those that another loop has computed, `stacks`, and that may be partial sums.
    """
    if eqn.primitive.name != "scan" or stacks.isdisjoint(variables(eqn.invars)):
        return {}
    scan = Scan.of(eqn)
    flat = flat_equations(scan.body.eqns, scan.body.outvars)
    behind, whole = behind_readers(flat.eqns, flat.results, {})
    first = scan.num_consts + scan.num_carry
    return {
        place: scan.length * behind.get(scan.body.invars[place], 0)
        for place, atom in enumerate(eqn.invars)
        if place >= first and atom in stacks and scan.body.invars[place] not in whole
    }


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
