"""Random keys and what is drawn from them: each key is a number of its own."""

from typing import Any

from plurax.sharding.operators.common import bind, movable, result, whole_over
from plurax.sharding.sharding import Sharding
from plurax.sharding.values import Cell, Output


def drawn(divider: Any, eqn: Any, inputs: list[Cell]) -> list[Output]:
    """From each key something of its own, in new dims: these are whole."""
    value = divider.settled(inputs[0])
    new = len(eqn.outvars[0].aval.shape) - len(value.shape)
    sharding = Sharding((*value.sharding.dims, *((),) * new))
    return [result(eqn, inputs, bind(eqn, [value.array])[0], sharding)]


def wrapped(divider: Any, eqn: Any, inputs: list[Cell]) -> list[Output]:
    """Keys from their words, which are whole."""
    last = len(inputs[0].shape) - 1
    value = whole_over(divider, inputs[0], movable(divider, inputs[0]), [last])
    sharding = Sharding(value.sharding.dims[:-1], value.sharding.partial)
    return [result(eqn, inputs, bind(eqn, [value.array])[0], sharding)]
