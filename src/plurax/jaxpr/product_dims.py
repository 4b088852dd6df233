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
    """Return `(m, n, k, batch)` of a product, also of groups, or a convolution; of others None.

    `shapes` of the operands and `out` of the result are those on one device.

        x (8, 64, 32) @ w (32, 16)                    (512, 16, 32, 1)
        ragged_dot(x (512, 32), w (8, 32, 16))        (512, 16, 32, 8)
    """
    if eqn.primitive.name == "dot_general":
        (left_sum, _), (left_batch, _) = eqn.params["dimension_numbers"]
        k = math.prod(shapes[0][d] for d in left_sum)
        batch = math.prod(shapes[0][d] for d in left_batch)
        m = math.prod(shapes[0]) // max(1, k * batch)
        return m, math.prod(out) // max(1, m * batch), k, batch
    if eqn.primitive.name == "ragged_dot_general":  # as XLA without a kernel: all rows by each
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (left_sum, right_sum), (left_batch, right_batch) = numbers.dot_dimension_numbers
        k, batch = (math.prod(shapes[0][d] for d in dims) for dims in (left_sum, left_batch))
        of_groups = {*right_sum, *right_batch, *numbers.rhs_group_dimensions}
        n = math.prod(size for d, size in enumerate(shapes[1]) if d not in of_groups)
        return math.prod(shapes[0]) // max(1, k * batch), n, k, batch * shapes[2][-1]
    if eqn.primitive.name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        n = shapes[1][numbers.rhs_spec[0]]
        return math.prod(out) // max(1, n), n, math.prod(shapes[1]) // max(1, n), 1
    return None


def product_operations(eqn: Any) -> int:
    """Return the operations of a product of whole operands, a multiply-add being two; else 0."""
    shapes = [getattr(atom.aval, "shape", ()) for atom in (*eqn.invars, *eqn.outvars[:1])]
    dims = product_dims(eqn, shapes[:-1], shapes[-1]) if shapes else None
    return 0 if dims is None else 2 * math.prod(dims)
