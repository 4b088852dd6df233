"""Random keys, bits drawn from them, and bitcasts: entries that become several, or the reverse."""

from typing import Any

from plurax.jaxpr.interpret import bind
from plurax.partition.operators.common import replicate_dims, result
from plurax.partition.values import Output, ValueVersions
from plurax.sharding.spec import TensorSharding


def drawn(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Apply an operation that maps each entry to new trailing dims, or trailing dims to one entry.

    These dims are replicated: the words of a key, the numbers drawn from it, the bytes of a number.
    """
    cell = inputs[0]
    value = divider.reduced(cell)
    rank, made = len(value.shape), len(eqn.outvars[0].aval.shape)
    value = replicate_dims(divider, cell, value, list(range(made, rank)))
    sharding = TensorSharding((*value.sharding.dims[:made], *((),) * (made - rank)))
    return [result(eqn, inputs, bind(eqn, [value.array])[0], sharding)]
