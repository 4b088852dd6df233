"""The matrix products of a kernel that is written in Pallas, such as JAX's flash attention.

A `pallas_call` runs the jaxpr of its kernel once for each point of a grid. Example: the forward
pass of `flash_attention` for 4 rows, 2 heads, 512 tokens and heads 128 wide, in blocks of 128:

    grid (4, 2, 4, 4)      128 times, of which each has two products (128, 128, 128)

Of a conditional, and of a loop whose length the kernel computes, everything counts once: blocks
that a causal mask leaves out are counted. What a kernel declares (`cost_estimate`) counts them,
too, and its backward passes declare nothing.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from plurax.jaxpr.compat import inner_jaxprs
from plurax.jaxpr.product_dims import PRODUCTS, ProductDims, product_dims


def pallas_products(eqn: Any) -> tuple[int, ProductDims, str] | None:
    """Return how many products a `pallas_call` runs, their dims, and the dtype that they multiply.

    Those with the most operations stand for all: as many of them as have the operations of all.
    None for a kernel without products.
    """
    flops: Counter[tuple[ProductDims, str]] = Counter()
    for times, product in _products(eqn.params["jaxpr"]):
        shapes = [var.aval.shape for var in product.invars[:2]]
        dims = product_dims(product, shapes, product.outvars[0].aval.shape)
        if dims is not None:
            flops[dims, str(product.invars[0].aval.dtype)] += times * math.prod(dims)
    if not flops:
        return None
    (dims, dtype), _ = flops.most_common(1)[0]
    grid = math.prod(size for size in eqn.params["grid_mapping"].grid if isinstance(size, int))
    return max(1, round(grid * sum(flops.values()) / math.prod(dims))), dims, dtype


def _products(jaxpr: Any, times: int = 1) -> Iterator[tuple[int, Any]]:
    """Yield the products in a kernel, each with how often it runs at a point of the grid."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in PRODUCTS:
            yield times, eqn
        trips = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for inner in inner_jaxprs(eqn):
            yield from _products(inner, times * trips)
