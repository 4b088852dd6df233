"""The dims of matrix products and convolutions, from which their operations are counted."""

import math
from collections.abc import Sequence
from typing import Any

ProductDims = tuple[int, int, int, int]
"""`(m, n, k, batch)` of a product: `2 m n k batch` operations."""
PRODUCTS = frozenset(["dot_general", "conv_general_dilated"])


def product_dims(
    eqn: Any, shapes: Sequence[Sequence[int]], out: Sequence[int]
) -> ProductDims | None:
    """Return `(m, n, k, batch)` of a matrix product or a convolution; of other equations None.

    `shapes` of the operands and `out` of the result are those on one device.

        x (8, 64, 32) @ w (32, 16)      (512, 16, 32, 1)
    """
    if eqn.primitive.name == "dot_general":
        (left_sum, _), (left_batch, _) = eqn.params["dimension_numbers"]
        k = math.prod(shapes[0][d] for d in left_sum)
        batch = math.prod(shapes[0][d] for d in left_batch)
        m = math.prod(shapes[0]) // max(1, k * batch)
        return m, math.prod(out) // max(1, m * batch), k, batch
    if eqn.primitive.name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        n = shapes[1][numbers.rhs_spec[0]]
        return math.prod(out) // max(1, n), n, math.prod(shapes[1]) // max(1, n), 1
    return None
