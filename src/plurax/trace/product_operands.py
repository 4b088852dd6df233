"""Arrays that nothing but matrix products and convolutions reads.

The matrix unit of a TPU multiplies bfloat16. Under JAX's default precision an array of float32 that
only products read is rounded where it is computed, and kept in half the bytes, in a stack of a
loop's iterations too:

    h = gelu(x @ up)        bfloat16 in memory, (6, 8, 512, 3072) of six scanned layers
    y = h @ down            reads h; its gradient reads h too
    x + attention           float32: the sum and the norm read it

Source: programs compiled for v5e and v5p (`benchmarks/absent_memory.py`).
"""

from collections import defaultdict

from plurax.jaxpr.product_dims import PRODUCTS
from plurax.trace.step_trace import Block, Op, Value


def only_multiplied(block: Block) -> set[Value]:
    """Return the values of float32 that nothing but products reads, at JAX's default precision."""
    readers: dict[Value, list[tuple[Op, Value]]] = defaultdict(list)
    kept = {value for value in block.outputs if value is not None}
    for op in block.all_ops():
        # A body reads the loop's operands themselves; what it carries keeps its dtype.
        kept.update(value for value in op.params.get("carry", ()) if value is not None)
        kept.update(value for inner in op.blocks for value in inner.outputs if value is not None)
        ordered = op.name == "order_after"  # what it waits for is not read
        for index, value in enumerate(() if op.blocks else op.inputs[: -1 if ordered else None]):
            readers[value].append((op, op.outputs[index if ordered else 0]))
    known: dict[Value, bool] = {}

    def multiplied(value: Value) -> bool:
        if value not in known:
            known[value] = False
            own = readers[value]
            known[value] = value not in kept and bool(own) and all(multiplies(*one) for one in own)
        return known[value]

    def multiplies(op: Op, result: Value) -> bool:
        if op.name in PRODUCTS:
            return "HIGH" not in str(op.params.get("precision"))
        if op.name == "convert_element_type":
            return result.dtype == "bfloat16"
        return op.name in MOVES and multiplied(result)

    values = {value for op in block.all_ops() for value in (*op.inputs, *op.outputs)}
    return {value for value in values if value.dtype == "float32" and multiplied(value)}


MOVES = frozenset(["all_gather", "operand", "order_after", "row", "slice", "stack", "transpose"])
"""Operations that move numbers as they are."""
