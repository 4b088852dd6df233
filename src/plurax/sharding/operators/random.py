"""Random keys and what is drawn from them, each key a number of its own; numbers read as bits."""

from typing import Any

from plurax.sharding.operators.common import bind, result, whole_over
from plurax.sharding.sharding import Sharding
from plurax.sharding.values import Cell, Output


def drawn(divider: Any, eqn: Any, inputs: list[Cell]) -> list[Output]:
    """From each number something of its own, in new dims at the end, or from such dims one number.

    These dims are whole: words of a key, what is drawn from it, the bytes of a number.
    """
    cell = inputs[0]
    value = divider.settled(cell)
    rank, made = len(value.shape), len(eqn.outvars[0].aval.shape)
    value = whole_over(divider, cell, value, list(range(made, rank)))
    sharding = Sharding((*value.sharding.dims[:made], *((),) * (made - rank)))
    return [result(eqn, inputs, bind(eqn, [value.array])[0], sharding)]
