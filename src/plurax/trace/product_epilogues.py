"""Operations that a matrix product computes on its result, before it is written.

XLA's compiler for GPUs makes a kernel of a product and of the elementwise operations after it, as
long as each has one reader, and what else they read comes from outside the block:

    h = x @ w + b          a kernel if `b` is a parameter: h is read by tanh and by its gradient
    total = total + h @ g  a kernel, which adds in place to what a loop carries
    y = x + h @ w          two kernels: `x` was computed here
    h = x @ w + bucket[8:] two kernels: the bias is a part of what was gathered
    float32(x @ w)         two kernels, in bfloat16: what is written would be twice as large

Source: XLA's `gemm_fusion.cc`, and programs compiled for H100 (`benchmarks/absent_memory.py`).
"""

from collections import defaultdict

from plurax.jaxpr.compat import ELEMENTWISE
from plurax.trace.step_trace import Block, Op, Value


def epilogues_of(block: Block, reads_any: bool = False) -> tuple[dict[Op, Op], set[Op]]:
    """Return for each product with an epilogue its last operation, and all operations of these.

    **Arguments:** `reads_any`, whether an epilogue reads what is computed in the block, and writes
    more bytes than the product would.
    """
    readers = _readers(block)
    outside = set(block.inputs)
    outside.update(
        op.outputs[0]
        for op in block.ops
        if op.name == "broadcast_in_dim" and outside.issuperset(op.inputs)
    )
    computed = {value for op in block.ops for value in op.outputs} - outside
    last: dict[Op, Op] = {}
    inside: set[Op] = set()
    for product in block.ops:
        if product.name != "dot_general":
            continue
        end = product
        while (reader := _only(readers[end.outputs[0]])) is not None:
            own = end.outputs[0]
            result = reader.outputs[0]
            same = reader.name in ELEMENTWISE and result.size == own.size
            if not same or reader in inside:
                break
            alone = computed.intersection(reader.inputs) == {own}
            if not reads_any and (result.bytes > own.bytes or not alone):
                break
            end = reader
            inside.add(end)
        if end is not product:
            last[product] = end
    return last, inside


def _only(readers: list[Op | None]) -> Op | None:
    return readers[0] if len(readers) == 1 else None


def _readers(block: Block) -> defaultdict[Value, list[Op | None]]:
    """Return the operations that read each value, those left out that nothing needs; None for the
    results of the block."""
    readers: defaultdict[Value, list[Op | None]] = defaultdict(list)
    for value in block.outputs:
        if value is not None:
            readers[value].append(None)
    for op in reversed(block.ops):
        if op.name == "stack" or op.blocks or any(readers[value] for value in op.outputs):
            for value in op.inputs:
                readers[value].append(op)
    return readers
