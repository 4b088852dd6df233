"""Group operations into kernels as XLA fuses them: what is written to memory, and what is not.

XLA fuses an elementwise operation into the one that reads it, so that its result stays in
registers. The rules are those of XLA's `InstructionFusion` on CPU, from the last operation to the
first:

    an operation with one reader           fused, unless it is expensive and each number is read
                                           more than once (`exp` before a broadcast)
    with several readers, in one kernel    the same
    with readers in several kernels        copied into each if it is cheap and reads at most one
                                           array; else written to memory
    with a reader that fuses nothing       written to memory (a matrix product, a collective)

Example, a dense layer forward and backward; kernels in brackets:

    [h = dot x w]   [a = tanh(h + b)]   [g = da * (1 - a²)]   [dw = dot x g]
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from plurax.jaxpr.compat import ELEMENTWISE, REDUCTIONS
from plurax.jaxpr.product_dims import PRODUCTS
from plurax.trace import xla_cpu
from plurax.trace.compiler_rules import CompilerRules
from plurax.trace.product_epilogues import epilogues_of
from plurax.trace.step_trace import Block, Op, Value

SUMS = frozenset(["psum", "psum_invariant"])
"""All-reduces."""

SAME, OTHER, REUSED = 0, 1, 2
"""How a kernel reads a value: entry by entry as it writes its own; otherwise; more than once."""


class Kernel:
    """Operations that run as one.

    **Attributes:** `ops`, the last one first, and the `names` of these and of all inside; `root`,
    the last one; `outputs`, what it writes; `reads`, for each value it reads from memory how
    (`SAME`, `OTHER`, `REUSED`); `twin`, another one that computes the same.
    """

    __slots__ = ("inner", "names", "ops", "reads", "root", "rules", "twin")

    def __init__(
        self, root: Op, rules: CompilerRules, inner: Sequence[list["Kernel"]] = ()
    ) -> None:
        self.root, self.rules, self.ops, self.inner = root, rules, [root], inner
        self.reads, self.names = dict[Value, int](), set[str]()
        self.twin: Kernel | None = None
        self._read(root, SAME)
        if inner:
            self._leave_out_unread()

    @property
    def outputs(self) -> list[Value]:
        """What the kernel writes."""
        return self.root.outputs

    def has_any(self, names: Iterable[str]) -> bool:
        """Whether an operation of one of these names is in the kernel, or in a loop that it is."""
        return not self.names.isdisjoint(names)

    def _read(self, op: Op, how: int) -> None:
        self.names.update([op.name], (one.name for block in op.blocks for one in block.all_ops()))
        for index, value in enumerate(op.inputs):
            own = _how(op, index, value, self.rules)
            self.reads[value] = max(self.reads.get(value, SAME), how, own)

    def _leave_out_unread(self) -> None:
        """Forget the operands of a loop or a conditional that nothing inside reads."""
        inside = {value for block in self.inner for kernel in block for value in kernel.reads}
        inside.update(value for block in self.root.blocks for value in block.outputs if value)
        inside.update(self.root.params.get("carry", ()))
        given = {value for block in self.root.blocks for value in block.inputs}
        self.reads = {v: how for v, how in self.reads.items() if v not in given or v in inside}

    def fuse(self, op: Op) -> None:
        """Compute `op` in this kernel, which reads its result."""
        how = max(self.reads.pop(value, SAME) for value in op.outputs)
        self.ops.append(op)
        self._read(op, how)


def _how(op: Op, index: int, value: Value, rules: CompilerRules) -> int:
    """Return how an operation reads its operand."""
    if op.name in rules.in_place:
        return SAME if index == 0 and op.name != "stack" else OTHER
    if op.name == "broadcast_in_dim":
        return REUSED
    if op.name in SUMS:
        return SAME if rules.sums_in_place else OTHER
    if op.name in ELEMENTWISE or op.name in ("bitcast_convert_type", "select_n", "order_after"):
        return SAME if value.size == op.outputs[0].size else REUSED
    return OTHER


def kernels(
    block: Block,
    stacks: Container[Value] | None = None,
    rules: CompilerRules = xla_cpu.RULES,
) -> list[Kernel]:
    """Return a block's kernels by the rules of a compiler, in the order of their last operations.

    Operations whose results nobody reads are left out; of a loop's body also the `stack`s that are
    not among `stacks`.
    """
    needed = {value for value in block.outputs if value is not None}
    readers: dict[Value, list[Kernel]] = defaultdict(list)
    written: list[Kernel] = []
    updated = {op.inputs[0] for op in block.ops if op.name == "dynamic_update_slice" and op.inputs}
    spread = {op.outputs[0] for op in block.ops if op.name in ("broadcast_in_dim", "iota")}
    sources = _sources(block) if rules.fuses_epilogues else {}
    closed = rules.fuses_epilogues and not rules.fuses_operands
    if rules.fuses_epilogues:
        ops = _selected(block.ops) if rules.fuses_operands else block.ops
        ops = _scattered_onto(ops, block.outputs)
        block = Block(ops, block.inputs, block.outputs, block.carried)
    ends, epilogues = epilogues_of(block, not closed) if rules.fuses_epilogues else ({}, set[Op]())
    for op in reversed(block.ops):
        kept = any(value in needed for value in op.outputs) or op in ends.values()
        if op.name == "stack":
            kept = stacks is None or op.outputs[0] in stacks
        if not kept and not any(readers.get(value) for value in op.outputs):
            continue
        # What reads a part of a buffer, and writes it elsewhere, comes before the update.
        apart = op.name == "dynamic_slice" and op.inputs[:1] and op.inputs[0] in updated
        if op in ends:
            into: list[Kernel] | None = readers[op.outputs[0]]
        elif kept or apart or (closed and _is_closed(op, readers, epilogues)):
            into = None
        else:
            into = _into(op, readers, lambda op: _arrays_read(op, spread, sources, closed), rules)
        if into is None:
            read = {value for value in op.outputs if value in needed or readers.get(value)}
            kernel = Kernel(op, rules, [kernels(inner, read, rules) for inner in op.blocks])
            written.append(kernel)
            # What a product's kernel computes at its end is computed once, with the product.
            twins = [] if op in ends.values() else _twins(op, kernel, readers, rules)
            for twin in twins:
                twin.fuse(op)
            changed: Sequence[Kernel] = [kernel, *twins]
        else:
            changed = into
            for kernel in into:
                kernel.fuse(op)
        for kernel in changed:
            for value in op.inputs:
                if value in kernel.reads and kernel not in readers[value]:
                    readers[value].append(kernel)
    return _combined(written[::-1], rules)


def _zeros(ops: Sequence[Op]) -> set[Value]:
    return {op.outputs[0] for op in ops if op.name == "broadcast_in_dim" and not op.inputs}


def _selected(ops: Sequence[Op]) -> list[Op]:
    """Return operations, what is scattered into zeros as one number of each row as a selection.

    The gradient of a cross entropy, `softmax - one_hot(label)`, is computed number by number so.
    """
    zeros = _zeros(ops)
    return [
        Op("select_n", {}, op.inputs[1:], op.outputs)
        if op.name == "scatter-add" and op.inputs[0] in zeros
        and op.inputs[-1].size * op.outputs[0].shape[-1] == op.outputs[0].size
        and not op.params["dimension_numbers"].update_window_dims
        else op
        for op in ops
    ]  # fmt: skip


def _scattered_onto(block_ops: Sequence[Op], results: Sequence[Value | None]) -> list[Op]:
    """Return operations, what is scattered into zeros and added as one that adds itself.

    The gradient of a cross entropy is a softmax, from which one is taken at each label.
    """
    readers = Counter(value for op in block_ops for value in op.inputs)
    readers.update(value for value in results if value is not None)
    zeros = _zeros(block_ops)
    alone = {
        op.outputs[0]: op for op in block_ops
        if op.name == "scatter-add" and op.inputs[0] in zeros and readers[op.outputs[0]] == 1
    }  # fmt: skip
    ops: dict[Op, None] = {}
    for op in block_ops:
        scattered = [value for value in op.inputs if value in alone]
        if op.name in ("add", "add_any") and len(scattered) == 1 and len(op.inputs) == 2:
            scatter = alone[scattered[0]]
            onto = [value for value in op.inputs if value is not scattered[0]]
            ops.pop(scatter)
            op = Op("scatter-add", scatter.params, [*onto, *scatter.inputs[1:]], op.outputs)
        ops[op] = None
    return list(ops)


def _twins(
    op: Op, kernel: Kernel, readers: dict[Value, list[Kernel]], rules: CompilerRules
) -> list[Kernel]:
    """Return the kernels that compute an operation of another `kernel` once more.

    An operand that one product reads as it is, and another one transposed, is computed twice.
    """
    into = readers[op.outputs[0]]
    fusible = op.name in rules.fusible and op.name not in rules.expensive
    products = all(one.root.name in ("operand", "dot_general") for one in into)
    if not (fusible and products) or len(op.outputs[0].shape) < 3:
        return []
    twins = [one for one in into if one.root.name == "operand"]
    for twin in twins:
        twin.twin = kernel
    return twins


def _is_closed(op: Op, readers: Mapping[Value, list[Kernel]], epilogues: Container[Op]) -> bool:
    """Whether an operation is read by a product's kernel, which computes none but its epilogue."""
    if op in epilogues or op.name == "broadcast_in_dim":
        return False
    return any(kernel.root in epilogues for value in op.outputs for kernel in readers[value])


def before_products(kernels: Sequence[Kernel]) -> set[Value]:
    """Return the values of which a product is computed, by way of other kernels too."""
    before: set[Value] = set()
    for kernel in reversed(kernels):
        if not before.isdisjoint(kernel.outputs) or kernel.has_any(PRODUCTS):
            before.update(kernel.reads)
    return before


def _combined(separate: list[Kernel], rules: CompilerRules) -> list[Kernel]:
    """Combine all-reduces over the same axes that do not depend on each other, as XLA does.

    Where collectives run beside other work, those of gradients are apart from those that the
    backward pass waits for.
    """
    before = before_products(separate) if rules.overlaps else set[Value]()
    above: dict[Value, frozenset[Op]] = {}
    groups: dict[str, list[list[Kernel]]] = defaultdict(list)
    for kernel in separate:
        root = kernel.root
        depends = frozenset().union(*(above.get(value, ()) for value in kernel.reads))
        if root.name in SUMS:
            waited = not before.isdisjoint(root.outputs)
            axes = root.params.get("axes"), root.params.get("axis_index_groups")
            same = groups[f"{waited} {axes}"]
            group = next((g for g in same if not any(k.root in depends for k in g)), None)
            if group is None:
                same.append([kernel])
            else:
                group.append(kernel)
            depends |= {root}
        above.update(dict.fromkeys(kernel.outputs, depends))
    gone: set[Kernel] = set()
    for group in (group for same in groups.values() for group in same):
        last = group[-1]
        for other in group[:-1]:
            last.root = Op(
                last.root.name,
                last.root.params,
                [*other.root.inputs, *last.root.inputs],
                [*other.root.outputs, *last.root.outputs],
            )
            last.reads |= other.reads
            last.ops += other.ops
            last.names |= other.names
            gone.add(other)
    return [kernel for kernel in separate if kernel not in gone]


def _into(
    op: Op,
    readers: dict[Value, list[Kernel]],
    arrays_read: Callable[[Op], float],
    rules: CompilerRules,
) -> list[Kernel] | None:
    """Return the kernels that compute `op` themselves, or None if it is a kernel of its own."""
    if op.name not in rules.fusible:
        return None
    (value,) = op.outputs[:1]
    into = readers[value]
    if not all(kernel.root.name in rules.readers for kernel in into):
        return None
    if op.name in rules.moves and any(kernel.root.name in REDUCTIONS for kernel in into):
        return None
    expensive = op.name in rules.expensive
    if len(into) == 1:
        return None if expensive and into[0].reads[value] == REUSED else into
    if len({kernel.twin or kernel for kernel in into}) == 1:
        return None if expensive else into
    copied = not expensive and rules.is_copied(arrays_read(op), len(into))
    return into if copied else None


def _arrays_read(
    op: Op, spread: Container[Value], sources: Mapping[Value, frozenset[Value]], closed: bool
) -> float:
    """Return how many operands are arrays as large as the result, broadcasts left out.

    What is computed for this operation alone counts by its `sources`, in bytes of the result:
    `x + x³` reads one array, and half of one if `x` is bfloat16 and the sum float32.
    """
    size = 0 if op.name == "concatenate" else op.outputs[0].size
    if not sources:
        return sum(value.size >= size and value not in spread for value in op.inputs)
    read = frozenset[Value]().union(*(sources.get(value, {value}) for value in op.inputs))
    large = [value.bytes for value in read if value.size >= size and value not in spread]
    if closed and op.outputs[0].dtype == bool and len(op.outputs[0].shape) < 2:
        return len(large)  # GPUs do not start a kernel for a mask of rows
    return sum(large) / max(op.outputs[0].bytes, 1)


def _sources(block: Block) -> dict[Value, frozenset[Value]]:
    """Return for each elementwise result with one reader the values that it is computed from."""
    readers = Counter(value for op in block.ops for value in op.inputs)
    readers.update(value for value in block.outputs if value is not None)
    sources: dict[Value, frozenset[Value]] = {}
    for op in block.ops:
        if op.name in ELEMENTWISE and readers[op.outputs[0]] == 1:
            read = (sources.get(value, {value}) for value in op.inputs)
            sources[op.outputs[0]] = frozenset[Value]().union(*read)
    return sources
