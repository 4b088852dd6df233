"""Random keys, bits drawn from them, and bitcasts: entries that become several, or the reverse."""

from typing import Any

from plurax.partition.operators.common import decided, with_replicated
from plurax.partition.rule_context import RuleContext
from plurax.partition.values import Decision, ValueVersions
from plurax.sharding.spec import TensorSharding


def random(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Apply an operation that maps each entry to new trailing dims, or trailing dims to one entry.

    These dims are replicated: the words of a key, the numbers drawn from it, the bytes of a number.
    """
    rank, out_rank = len(inputs[0].shape), len(eqn.outvars[0].aval.shape)
    trailing = list(range(out_rank, rank))
    operand = with_replicated(inputs[0], context.reduced(inputs[0]), trailing)
    dims = (*operand.sharding.dims[:out_rank], *((),) * (out_rank - rank))
    return decided(context, eqn, inputs, [operand], TensorSharding(dims))
