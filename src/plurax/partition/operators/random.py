"""Random keys and what is drawn from them, each key a number of its own; numbers read as bits."""

from typing import Any

from plurax.partition.operators.common import bind, replicate_dims, result
from plurax.partition.values import Output, ValueVersions
from plurax.sharding.spec import TensorSharding


def drawn(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """From each number something of its own, in new dims at the end, or from such dims one number.

    These dims are whole: words of a key, what is drawn from it, the bytes of a number.
    """
    cell = inputs[0]
    value = divider.reduced(cell)
    rank, made = len(value.shape), len(eqn.outvars[0].aval.shape)
    value = replicate_dims(divider, cell, value, list(range(made, rank)))
    sharding = TensorSharding((*value.sharding.dims[:made], *((),) * (made - rank)))
    return [result(eqn, inputs, bind(eqn, [value.array])[0], sharding)]
