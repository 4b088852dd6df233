"""Attention by a kernel: rows and heads stay split, and tokens of queries without a mask.

mesh tensor=2; q (8, 1024, 16, 64)

heads of keys   k is resharded to            on one device               gradient of k
16 or 4         (None, None, tensor, None)   8 heads of q, 8 or 2 of k   as k is split
1               replicated                   8 heads of q, that of k     a partial sum

Where a device has a part of the queries, the gradients of keys are partial sums, too.
"""

import dataclasses
from typing import Any

from plurax.jaxpr.attention_kernels import attention_dims, attention_products
from plurax.jaxpr.fused_attention import Dims
from plurax.partition.operators.common import by_default, decided, local_shape
from plurax.partition.operators.products import match_operands
from plurax.partition.rule_context import RuleContext
from plurax.partition.values import Decision, ValueVersions
from plurax.sharding.spec import TensorSharding


def attention(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Attend with all split that may be, as far as both queries and keys can be."""
    dims = attention_dims(eqn)
    if dims is None:
        return by_default(context, eqn, inputs)
    operands_dims, results_dims = dims
    backward = len(results_dims) == 3
    letters = {letter for letter in operands_dims[0] if letter}
    for kept in (letters, letters - {"N"}, set()):
        labels = [
            {index: letter if letter and letter in kept else None for index, letter in enumerate(d)}
            for d in operands_dims
        ]
        operands, split = match_operands(context, eqn, inputs, labels)
        sizes = context.axes.sizes
        if not any(one.sharding.indivisible_dims(one.versions.shape, sizes) for one in operands):
            break

    def sharding(letters: Dims) -> TensorSharding:
        entries = tuple(split.get(letter, ()) if letter else () for letter in letters)
        # Each part of the queries, and of their heads, has its share in the gradients of keys.
        shared = {axis for letter in {"N", "T"} - set(letters) for axis in split.get(letter, ())}
        return TensorSharding(entries, frozenset(shared) if backward else frozenset())

    decision = decided(context, eqn, inputs, operands, *map(sharding, results_dims))
    count, (m, n, k, batch) = attention_products(eqn, [local_shape(context, o) for o in operands])
    return dataclasses.replace(decision, product=(m, n, count * k, batch))
