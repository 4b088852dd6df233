"""What one compiled instruction computes and moves: its matrix products and its bytes.

instruction                                          products (m, n, k, batch)
fusion(f32[8,4], f32[4,16]), in it a dot             (8, 16, 4, 1)
custom-call(x, w)      __cublas$gemm                 by its contracting dims
custom-call(x, w)      __cudnn$convForward           (pixels, 64, 3 * 3 * 32, 1)
custom-call(q, k, v)   __cudnn$fmhaSoftmax           (tokens, tokens, width, heads), twice
bytes of each          of its operands and its result
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from plurax.hlo.text import Instruction, dims_of, dtype_of

Dims = tuple[int, int, int, int]
Products = list[tuple[Dims, str]]
"""Dims and dtype of each product."""


def bytes_moved(
    instruction: Instruction, operands: Sequence[Instruction], inside: Sequence[Instruction]
) -> float:
    """Return the bytes that an instruction reads and writes.

    A fusion that reads or writes slices of an array in place moves these.
    """
    by_name = {other.name: other for other in inside}
    readers = defaultdict[str, list[Instruction]](list)
    for other in inside:
        for name in other.operands:
            readers[name].append(other)
    params = {int(p.arguments): p.name for p in inside if p.opcode == "parameter"}
    read = [
        _read(params[place], operand.bytes, readers) if place in params else operand.bytes
        for place, operand in enumerate(operands)
    ]
    root = next((other for other in inside if other.root), None)
    written = instruction.bytes if root is None else _written(root, by_name)
    return sum(read) + written


def _read(name: str, size: int, readers: Mapping[str, Sequence[Instruction]]) -> int:
    """Return the bytes that are read of a value of so many: of slices alone, theirs."""
    read = 0
    for reader in readers[name]:
        sliced = reader.opcode in ("slice", "dynamic-slice") and reader.operands[0] == name
        if reader.opcode == "bitcast":
            read += _read(reader.name, size, readers)
        elif reader.opcode != "dynamic-update-slice" or reader.operands[0] != name:  # in place
            read += reader.bytes if sliced else size
    return min(size, read)


def _written(value: Instruction, by_name: Mapping[str, Instruction]) -> int:
    """Return the bytes that are written of a fusion's result: of what is updated in place, the
    slice."""
    if value.opcode == "tuple":
        return sum(_written(by_name[name], by_name) for name in value.operands)
    source = value
    while source.opcode == "bitcast" and source.operands[0] in by_name:
        source = by_name[source.operands[0]]
    updates = source.opcode == "dynamic-update-slice" and source.operands[1] in by_name
    return by_name[source.operands[1]].bytes if updates else value.bytes


def products_of(
    instruction: Instruction, operands: Sequence[Instruction], inside: Sequence[Instruction]
) -> Products:
    """Return the matrix products of an instruction.

    **Arguments:** its `operands`, and the instructions `inside` a fusion.
    """
    if "__cudnn$fmha" in instruction.attributes and operands:
        return _attention(instruction, operands[0])
    if "__cudnn$conv" in instruction.attributes and len(operands) > 1:
        return [_convolution(instruction, operands)]
    if "lhs_contracting" in instruction.attributes and operands:
        return [_product(instruction, operands[0])]
    by_name = {other.name: other for other in inside}
    return [
        _product(other, by_name.get(other.operands[0])) for other in inside if other.opcode == "dot"
    ]


def _product(dot: Instruction, left: Instruction | None) -> tuple[Dims, str]:
    """Return the dims (m, n, k, batch) of a matrix product, and its dtype."""
    if left is None:
        return (0, 0, 0, 0), "float32"
    dims = dims_of(left.type)
    size, out = math.prod(dims), math.prod(dims_of(dot.type))
    k = math.prod(dims[dim] for dim in _dims(dot, "lhs_contracting"))
    batch = math.prod(dims[dim] for dim in _dims(dot, "lhs_batch"))
    m = size // (k * batch or 1)
    return (m, out // (m * batch or 1), k, batch), dtype_of(left.type)


def _dims(dot: Instruction, what: str) -> list[int]:
    """Return the dims that a product sums over or shares, as a `dot` or a library call says."""
    dims = dot.attribute(rf"{what}_dims=\{{([\d,]*)\}}")
    if dims is None:
        dims = dot.attribute(rf'{what}_dimensions":\[([^\]]*)\]') or ""
    return [int(dim.strip(' "')) for dim in dims.split(",") if dim.strip(' "')]


def _convolution(call: Instruction, operands: Sequence[Instruction]) -> tuple[Dims, str]:
    """Return the product that cuDNN's convolution, or a gradient of it, amounts to.

    Whichever of the three is computed, each number of the forward result meets one column of the
    kernel.
    """
    forward = "Forward" in call.attributes
    kernel = call if "BackwardFilter" in call.attributes else operands[1]
    out = call if forward else operands[1 if kernel is call else 0]
    labels = call.attribute(r"dim_labels=\w+->(\w+)") or ""
    columns = dims_of(out.type)[labels.index("f")] if "f" in labels else 1
    rows, summed = (math.prod(dims_of(one.type)) // columns for one in (out, kernel))
    return (rows, columns, summed, 1), dtype_of(operands[0].type)


def _attention(call: Instruction, queries: Instruction) -> Products:
    """Return the products of cuDNN's attention: two forward, five backward, which computes the
    scores once more. A causal mask leaves out half of each."""
    text = call.attribute(r'intermediate_tensor_shape"?: ?\{.*?"dimensions"?: ?\[([^\]]*)\]') or ""
    scores = [int(size.strip(' "')) for size in text.split(",") if size.strip(' "')]
    if len(scores) != 4:
        return []
    batch, heads, tokens, keys = scores
    width = math.prod(dims_of(queries.type)) // (batch * heads * tokens)
    rows = tokens // 2 if "CAUSAL" in call.attributes else tokens
    product = (rows, keys, width, batch * heads), dtype_of(queries.type)
    return [product] * (5 if "Backward" in call.attributes else 2)
