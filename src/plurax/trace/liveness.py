"""The memory of temporaries by liveness on the program of one device, before compiling.

What XLA allocates for temporaries follows from three decisions, which are made again here:

1. Which results are written to memory at all (`plurax.trace.kernels`).
2. The order of kernels. XLA's CPU compiler runs a kernel as soon as all it reads is there, first
   come, first served: every dynamic slice of a loop's body comes before the first product, and all
   temporaries of an optimizer's update are alive at once.
3. Which result takes the memory of which. A result that is computed number by number takes that of
   an operand read there for the last time; a new state takes that of the donated old one, a carry
   that of the iteration before. All others are packed into one allocation, the largest first, each
   into the smallest gap that is free while it is alive.

Example, a dense layer on 256 rows, float32; `h`, `a`, `g` are `(256, 512)`, 0.5 MiB each:

    time   kernel               buffers alive
    1      h = x @ w            h
    2      a = tanh(h + b)      a, in the memory of h
    3      g = (a - y) * s      a, g
    4      dw = aᵀ @ g          a, g, dw (512, 512), 1 MiB: 2 MiB at most

Sources: XLA's `BufferAssignment` and `GlobalDecreasingSizeBestFitHeap`
(https://openxla.org/xla/hlo_passes), and compiled programs.
"""

import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any

from plurax.jaxpr.compat import REDUCTIONS
from plurax.trace import xla_cpu
from plurax.trace.compiler_rules import CompilerRules
from plurax.trace.compilers import rules_of
from plurax.trace.fast_memory import placed
from plurax.trace.kernel_order import (
    breadth_first,
    gradients_late,
    list_order,
    products_late,
)
from plurax.trace.kernels import SAME, Kernel, kernels
from plurax.trace.product_operands import only_multiplied
from plurax.trace.step_trace import Block, Op, StepTrace, Value


def peak_bytes(trace: StepTrace, platform: str = "cpu", fast_memory: float = 0) -> int:
    """Return the most bytes that one device holds in a step: arguments, results, temporaries.

    **Arguments:** `platform`, whose compiler's rules are followed; `fast_memory`, its bytes in
    which temporaries are that need none of a device's memory.
    """
    return block_peak(trace.block, trace.state, platform, fast_memory)


def block_peak(block: Block, state: Sequence[Value], platform: str, fast_memory: float = 0) -> int:
    """Return `peak_bytes` of a program whose results begin with its new `state`."""
    rules = rules_of(platform)
    held = [*block.inputs, *block.outputs[len(state) :]]
    arrays = sum(rules.size(value, False) for value in held if value)
    return arrays + temporaries(block, state, rules, fast_memory)


def temporaries(
    block: Block,
    state: Sequence[Value],
    rules: CompilerRules = xla_cpu.RULES,
    fast_memory: float = 0,
) -> int:
    """Return the bytes that XLA allocates for temporaries.

    **Arguments:** `block`, a program; `state`, the inputs in whose memory its first results are;
    `rules`, of the compiler; `fast_memory`, bytes that are there beside a device's memory.
    """
    lifetimes = Lifetimes(rules, only_multiplied(block))
    homes = {
        result: old
        for result, old in zip(block.outputs, state, strict=False)
        if result is not None and result is not old
    }
    found = kernels(block, rules=rules)
    if not rules.overwrites_reduced:
        lifetimes.reduced.update(_reduced(found))
    lifetimes.run(block, found, homes)
    if fast_memory:
        return pack(outside(lifetimes.buffers, int(fast_memory)))
    return pack(lifetimes.buffers)


class Buffer:
    """Memory of `size` bytes that is in use from kernel `start` to kernel `end`, inclusive."""

    __slots__ = ("end", "size", "start")

    def __init__(self, size: int, start: int) -> None:
        self.size, self.start, self.end = size, start, start


class Lifetimes:
    """Runs kernels without computing anything, and notes when which memory is in use.

    **Arguments:** `rules`, of the compiler; `multiplied`, values that only products read.

    **Attributes:** `buffers`, once `run` has returned; `reduced`, values in whose memory no result
    is, since a reduction reads them in the same kernel.
    """

    def __init__(self, rules: CompilerRules, multiplied: Set[Value]) -> None:
        self.buffers: list[Buffer] = []
        self.reduced: set[Value] = set()
        self._rules, self._multiplied = rules, multiplied
        self._clock = 0
        self._of: dict[Value, Buffer] = {}
        self._casts: dict[Value, Buffer] = {}

    def run(
        self,
        block: Block,
        unordered: Sequence[Kernel],
        homes: Mapping[Value, Value],
        ending: Collection[Value] = (),
    ) -> None:
        """Run the kernels of a block.

        **Arguments:**

        - `homes`: for a result the value in whose memory it shall be.
        - `ending`: values computed outside that are read for the last time here.
        """
        order = self._ordered(unordered, block)
        last = {value: index for index, kernel in enumerate(order) for value in kernel.reads}
        last.update((value, len(order)) for value in block.outputs if value is not None)
        homes = _homes_of_operands(order, homes)
        own = set(ending)
        for index, kernel in enumerate(order):
            self._clock += 1
            dying = [value for value in kernel.reads if last[value] == index and value in own]
            free = list(dying)
            for value in _written(kernel, last):
                home = homes.get(value)
                if home is None or not _is_free(home, kernel, last, index):
                    own.add(value)
                    self._allocate(value, kernel, free)
            passed = self._run_inside(kernel, homes, dying)
            for value in dying:
                if value not in passed:
                    self._use(value)
        self._clock += 1
        for value in own:
            if last.get(value) == len(order):
                self._use(value)

    def _size(self, value: Value) -> int:
        return self._rules.size(value, value in self._multiplied)

    def _ordered(self, unordered: Sequence[Kernel], block: Block) -> list[Kernel]:
        if self._rules.order == "breadth first":
            return breadth_first(unordered, block)
        order = list_order(unordered, block, self._size)
        if not self._rules.overlaps:
            convolves = any(kernel.has_any(["conv_general_dilated"]) for kernel in order)
            return gradients_late(order) if convolves else order
        has_loops = bool(block.carried) or any(kernel.inner for kernel in order)
        return products_late(gradients_late(order), has_loops)

    def _allocate(self, value: Value, kernel: Kernel, free: list[Value]) -> None:
        """Give a result the memory of an operand that is not read again, or memory of its own."""
        for operand in free:
            taken = operand in self._of and _takes_memory_of(value, operand, kernel)
            if taken and (operand not in self.reduced or operand in dict(_in_place(kernel.root))):
                free.remove(operand)
                self._of[value] = self._of[operand]
                break
        else:
            self._of[value] = Buffer(self._size(value), self._clock)
            self.buffers.append(self._of[value])
        if kernel.root.name == "random_bits":
            self.buffers.append(Buffer(self._size(value), self._clock))  # the loop computes a copy
        self._use(value)

    def _use(self, value: Value) -> None:
        if value in self._of:
            self._of[value].end = max(self._of[value].end, self._clock)

    def _hoisted_masks(self, body: Block) -> list[Value]:
        """Return the broadcasts in a loop's body that are written once, before the loop."""
        if not self._rules.hoists_masks:
            return []
        constants = set(body.inputs) - {start for start, _ in body.carried}
        return [
            op.outputs[0] for op in body.ops
            if op.name == "broadcast_in_dim" and op.inputs and op.outputs[0].dtype == bool
            and constants.issuperset(op.inputs)
        ]  # fmt: skip

    def _hoisted_casts(self, body: Block) -> list[Buffer]:
        """Return the memory of what is rounded before a loop, or was before another one."""
        if not self._rules.hoists_casts:
            return []
        constants = set(body.inputs) - {start for start, _ in body.carried}
        kept = self._multiplied & self._of.keys()  # rounded where they were computed
        rounded = constants & only_multiplied(body) - kept
        for value in sorted(rounded - self._casts.keys(), key=body.inputs.index):
            self._casts[value] = Buffer(self._rules.size(value, True), self._clock)
            self.buffers.append(self._casts[value])
        return [self._casts[value] for value in rounded]

    def _run_inside(
        self, kernel: Kernel, homes: Mapping[Value, Value], dying: Sequence[Value]
    ) -> set[Value]:
        """Run the body of a loop once, or each branch; return what only a branch still needs."""
        root, passed = kernel.root, set[Value]()
        if not kernel.inner:
            return passed
        if root.name != "cond":
            body = root.blocks[0]
            carried = {end: start for start, end in body.carried if end is not None}
            masks = [Buffer(self._size(mask), self._clock) for mask in self._hoisted_masks(body)]
            casts = self._hoisted_casts(body)
            self.buffers += masks
            self.run(body, kernel.inner[0], carried)
            for buffer in (*masks, *casts):
                buffer.end = self._clock
            return passed
        pairs = list(zip(root.blocks, kernel.inner, strict=True))
        reads = [{*b.outputs, *(v for k in inner for v in k.reads)} for b, inner in pairs]
        for index, (block, inner) in enumerate(pairs):
            later = set[Any]().union(*reads[index + 1 :])
            ending = {value for value in dying if value in reads[index] and value not in later}
            passed |= ending
            results = {
                value: homes.get(result, result)
                for result, value in zip(root.outputs, block.outputs, strict=True)
                if value is not None and value not in block.inputs
            }
            self.run(block, inner, results, ending)
        return passed


def _reduced(found: Sequence[Kernel]) -> Iterator[Value]:
    """Yield the arrays that a reduction reads."""
    for kernel in found:
        if kernel.root.name in REDUCTIONS:
            rank = len(kernel.root.outputs[0].shape)
            yield from (value for value in kernel.reads if len(value.shape) > rank)
        for inner in kernel.inner:
            yield from _reduced(inner)


def _written(kernel: Kernel, last: Mapping[Value, int]) -> list[Value]:
    """Return the results that are new in memory: a row of a stack is not, nor one unread."""
    if kernel.root.name == "stack":
        return []
    return [v for v in kernel.outputs if v.bytes and (v in last or not kernel.inner)]


def _homes_of_operands(order: Sequence[Kernel], homes: Mapping[Value, Value]) -> dict[Value, Value]:
    """Return `homes` with those of the values that are updated in place on the way to a result."""
    all_homes = dict(homes)
    for kernel in reversed(order):
        for before, after in _in_place(kernel.root):
            home = all_homes.get(after)
            if home is not None and home is not before and before.bytes == after.bytes:
                all_homes.setdefault(before, home)
    return all_homes


def _in_place(op: Op) -> list[tuple[Value, Value]]:
    """Return the operands that an operation updates, each with the result in its memory."""
    if op.name in UPDATES:
        return list(zip(op.inputs[:1], op.outputs, strict=False))
    pairs = zip(op.params.get("carry", ()), op.outputs, strict=False) if op.blocks else ()
    return [(before, after) for before, after in pairs if before is not None]


def _is_free(home: Value, kernel: Kernel, last: Mapping[Value, int], index: int) -> bool:
    """Whether a kernel may write to the memory of `home`."""
    at = last.get(home, -1)
    if at != index:
        return at < index
    in_place = kernel.root.name in UPDATES or bool(kernel.inner)
    return in_place or kernel.reads[home] == SAME


def _takes_memory_of(value: Value, operand: Value, kernel: Kernel) -> bool:
    """Whether a result can be where an operand is that is not read again."""
    if operand.bytes != value.bytes:
        return False
    if kernel.inner or kernel.root.name in UPDATES:
        return any(operand is before and value is after for before, after in _in_place(kernel.root))
    same_width = operand.dtype.itemsize == value.dtype.itemsize
    return same_width and kernel.reads.get(operand) == SAME


UPDATES = frozenset([
    "dynamic_update_slice", "scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul",
    "sort",
])  # fmt: skip
"""Operations that write to the memory of their first operand."""


# --- Packing --------------------------------------------------------------------------------------


def pack(buffers: Sequence[Buffer]) -> int:
    """Return the size of one allocation in which all buffers are, none in another's way.

    XLA places the largest first, or those in use the longest, and takes the better of both.
    Buffers of less than a thousandth of the largest are left out.
    """
    small = max((one.size for one in buffers), default=0) / 1000
    large = [one for one in buffers if one.size > small]
    return min(
        _packed(large, lambda one: (-one.size,)),
        _packed(large, lambda one: (one.start - one.end, -one.size)),
    )


def outside(buffers: Sequence[Buffer], fast_memory: int) -> list[Buffer]:
    """Return the buffers for which there is no room in a fast memory of so many bytes.

    Those in use the shortest are there first. Beside what a kernel reads there is room for the
    largest operand of the next one, which is fetched meanwhile.
    """
    room = fast_memory - max((b.size for b in buffers if 2 * b.size <= fast_memory), default=0)
    spans = {buffer: range(buffer.start, buffer.end + 1) for buffer in buffers}
    inside = placed(spans, {buffer: buffer.size for buffer in buffers}, room)
    return [b for b in sorted(buffers, key=lambda b: len(spans[b])) if b not in inside]


def _packed(buffers: Sequence[Buffer], key: Callable[[Buffer], tuple[int, ...]]) -> int:
    placed: list[tuple[int, int, Buffer]] = []  # from, to
    for buffer in sorted(buffers, key=key):
        free = into = 0
        smallest = None
        for start, stop, other in placed:
            if other.start <= buffer.end and buffer.start <= other.end:
                gap = start - free
                if gap >= buffer.size and (smallest is None or gap < smallest):
                    smallest, into = gap, free
                free = max(free, stop)
        at = free if smallest is None else into
        bisect.insort(placed, (at, at + buffer.size, buffer), key=lambda entry: entry[0])
    return max((stop for _, stop, _ in placed), default=0)
