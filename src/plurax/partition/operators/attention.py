"""cuDNN's attention: rows and heads stay split, tokens are whole.

mesh tensor=2; q (8, 1024, 16, 64)

heads of keys   k is resharded to            on one device               gradient of k
16 or 4         (None, None, tensor, None)   8 heads of q, 8 or 2 of k   as k is split
1               replicated                   8 heads of q, that of k     a partial sum
"""

import dataclasses
from typing import Any

from plurax.jaxpr.fused_attention import BACKWARD, Dims, attention_products, split_dims
from plurax.partition.operators.common import by_default, decided, local_shape
from plurax.partition.operators.products import match_operands
from plurax.partition.rule_context import RuleContext
from plurax.partition.values import Decision, ValueVersions
from plurax.sharding.spec import TensorSharding


def fused_attention(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Attend with rows and heads split, as far as both queries and keys can be."""
    dims = split_dims(eqn)
    if dims is None:
        return by_default(context, eqn, inputs)
    operands_dims, results_dims = dims
    for kept in ("BN", "B", ""):
        labels = [
            {index: letter if letter and letter in kept else None for index, letter in enumerate(d)}
            for d in operands_dims
        ]
        operands, split = match_operands(context, eqn, inputs, labels)
        sizes = context.axes.sizes
        if not any(one.sharding.indivisible_dims(one.versions.shape, sizes) for one in operands):
            break
    heads = frozenset(split.get("N", ()))

    def sharding(letters: Dims) -> TensorSharding:
        entries = tuple(split.get(letter, ()) if letter else () for letter in letters)
        # Each part of the heads of queries has its share in the gradient of a single key's.
        shared = heads if eqn.primitive.name in BACKWARD and "N" not in letters else frozenset()
        return TensorSharding(entries, shared)

    decision = decided(context, eqn, inputs, operands, *map(sharding, results_dims))
    count, (m, n, k, batch) = attention_products(eqn, [local_shape(context, o) for o in operands])
    return dataclasses.replace(decision, product=(m, n, count * k, batch))
