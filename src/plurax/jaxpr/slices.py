"""Read a slice of a slice as one slice.

The derivative of a pad cuts its edges off, by a pad with negative numbers, and then takes every
second entry where entries were put in between, as `lax.associative_scan` does. On a split dim the
first would shift all entries by one, which is then undone:

    y = pad x, -1 at the start     (7,) of x (8,)    1 2 3 4 5 6 7
    z = slice y [0::2]             (4,)              1 3 5 7

    z = slice x [1::2]
"""

from collections.abc import Sequence
from typing import Any

from plurax.jaxpr.interpret import variables


def of_whole(eqns: Sequence[Any], results: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return equations whose slices read the array that a pad cuts; `results` are theirs.

    Of each equation comes the one it replaces, or it itself.
    """
    cuts = {eqn.outvars[0]: eqn for eqn in eqns if _cuts(eqn)}
    if not cuts:
        return [(eqn, eqn) for eqn in eqns]
    new = [_of_whole(eqn, cuts) if eqn.primitive.name == "slice" else eqn for eqn in eqns]
    read = {*variables(results), *(var for eqn in new for var in variables(eqn.invars))}
    unread = {id(eqn) for var, eqn in cuts.items() if var not in read}
    return [(one, old) for one, old in zip(new, eqns, strict=True) if id(one) not in unread]


def _cuts(eqn: Any) -> bool:
    """Whether an equation is a pad that only cuts, and a variable's."""
    if eqn.primitive.name != "pad" or not variables(eqn.invars[:1]):
        return False
    return all(
        low <= 0 and high <= 0 and not between
        for low, high, between in eqn.params["padding_config"]
    )


def _of_whole(eqn: Any, cuts: dict[Any, Any]) -> Any:
    """Return a slice of what a pad cut, or the equation as it is."""
    if not variables(eqn.invars) or eqn.invars[0] not in cuts:
        return eqn
    cut = cuts[eqn.invars[0]]
    lows = [int(low) for low, _, _ in cut.params["padding_config"]]
    moved = {
        name: tuple(place - low for place, low in zip(eqn.params[name], lows, strict=True))
        for name in ("start_indices", "limit_indices")
    }
    return eqn.replace(invars=cut.invars[:1], params=eqn.params | moved)
