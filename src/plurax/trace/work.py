"""What one device does in a step: products, memory traffic and collectives, counted before running.

The kernels are those of `plurax.trace.kernels`, by the rules of a machine's compiler. A loop's body
counts once for each trip, and of a conditional's branches the one with the most work. Example,
`(B, F) @ (F, G)` and a `tanh`, float32:

    product   m=B n=G k=F        2·B·G·F operations, reads 4·(B·F + F·G) bytes, writes 4·B·G
    tanh      one kernel         reads and writes 4·B·G bytes each

A loop whose length is known only while it runs counts one trip.
"""

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from plurax.collective import Collective
from plurax.jaxpr.compat import ELEMENTWISE, REDUCTIONS
from plurax.jaxpr.product_dims import PRODUCTS
from plurax.trace import xla_cpu
from plurax.trace.collectives import collective_of
from plurax.trace.compiler_rules import CompilerRules
from plurax.trace.fast_memory import near_values, resident_values
from plurax.trace.kernels import Kernel, kernels
from plurax.trace.several_outputs import joined, unordered
from plurax.trace.step_trace import (
    COLLECTIVES,
    Block,
    Op,
    PipelineActions,
    StepTrace,
    Value,
    is_tick_loop,
)


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of `batch` pairs of matrices `(m, k)` and `(k, n)` in a dtype; a convolution is one
    of them. `bytes` are read and written by one such product."""

    m: int
    n: int
    k: int
    batch: int
    dtype: str
    bytes: int

    @property
    def flops(self) -> float:
        """Floating-point operations: a multiplication and an addition for each term."""
        return 2.0 * self.m * self.n * self.k * self.batch


@dataclasses.dataclass(frozen=True)
class Sending:
    """Collectives of one block, and what is computed beside them.

    **Fields:** `collectives`, each with its `trips`, as XLA combines them; `beside`, the block's
    other work in parts, each with the indices of the collectives that do not wait for it, nor it
    for them. On a machine that sends while it computes these hide each other.
    """

    collectives: tuple[Collective, ...]
    beside: tuple[tuple["Work", frozenset[int]], ...] = ()


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device does.

    **Fields:**

    - `products`: each kind of matrix product with how often it runs.
    - `other_flops`: operations on single numbers.
    - `bytes`: read from and written to memory by all kernels that are no products.
    - `kernels`: how many kernels start, products and collectives included.
    - `sending`: the collectives, by blocks.
    """

    products: Mapping[Product, int] = dataclasses.field(default_factory=dict, hash=False)
    other_flops: float = 0
    bytes: float = 0
    kernels: int = 0
    sending: tuple[Sending, ...] = ()

    @property
    def collectives(self) -> list[Collective]:
        """All collectives, each with its `trips`."""
        return [one for sending in self.sending for one in sending.collectives]

    @property
    def product_flops(self) -> float:
        """The operations of all matrix products and convolutions."""
        return sum(product.flops * count for product, count in self.products.items())

    @property
    def flops(self) -> float:
        """All floating-point operations."""
        return self.product_flops + self.other_flops

    def times(self, trips: int) -> "Work":
        """Return the work of so many repetitions."""
        return Work(
            {product: count * trips for product, count in self.products.items()},
            self.other_flops * trips,
            self.bytes * trips,
            self.kernels * trips,
            tuple(_repeated(sending, trips) for sending in self.sending),
        )

    @staticmethod
    def sum(parts: Iterable["Work"]) -> "Work":
        """Return the work of all parts together."""
        parts = list(parts)
        products = Counter[Product]()
        for part in parts:
            products.update(part.products)
        return Work(
            dict(products),
            sum(part.other_flops for part in parts),
            sum(part.bytes for part in parts),
            sum(part.kernels for part in parts),
            tuple(sending for part in parts for sending in part.sending),
        )


def _repeated(sending: Sending, trips: int) -> Sending:
    collectives = tuple(
        dataclasses.replace(one, trips=(one.trips or 1) * trips, in_loop=True)
        for one in sending.collectives
    )
    return dataclasses.replace(sending, collectives=collectives)


@dataclasses.dataclass(frozen=True)
class StepWork:
    """What one device does in a step, by its parts.

    **Fields:** `gradient`, without loops over the ticks of a pipeline; `update`, of the optimizer;
    `loops`, those over ticks.
    """

    gradient: Work
    update: Work
    loops: Sequence["TickWork"] = ()


@dataclasses.dataclass(frozen=True)
class TickWork:
    """What one device does in a loop over the ticks of a pipeline.

    **Fields:** `pipeline`; `tick`, what every device does in each tick; `actions`, by kind and part
    of a stage, what the schedule says when (see `PipelineActions`).
    """

    pipeline: PipelineActions
    tick: Work
    actions: Mapping[tuple[str, int | None], Work]

    def action(self, kind: str, stage: int) -> Work:
        """Return the work of one action of a stage."""
        parts = self.pipeline.of_stage(stage)
        return Work.sum(self.actions[kind, part].times(times) for part, times in parts)


def work_of_step(
    trace: StepTrace, rules: CompilerRules = xla_cpu.RULES, fast_memory: float = 0
) -> StepWork:
    """Return what one device does in a step, by the rules of a compiler.

    `fast_memory`: bytes beside a device's memory, in which traffic costs nothing.

    A pipeline runs the ticks of its schedule in one loop. In its body each action of each part of a
    stage (embedding, one layer, head) is a loop that runs or not.
    """
    sizes, every = trace.plan.axes, kernels(trace.block, rules=rules)
    after = set(trace.block.ops[trace.update :])
    of = functools.partial(work_of, sizes=sizes, fast_memory=fast_memory)
    update = of([kernel for kernel in every if not after.isdisjoint(kernel.ops)])
    gradient = [kernel for kernel in every if after.isdisjoint(kernel.ops)]
    if not trace.pipelines:
        recomputed = trace.plan.remat != "none"
        return StepWork(of(gradient, recomputed=recomputed), update)
    loops = [kernel for kernel in gradient if is_tick_loop(kernel.root)][: len(trace.pipelines)]
    works = []
    for pipeline, loop in zip(trace.pipelines, loops, strict=True):
        body = loop.inner[0]
        actions = [kernel for kernel in body if kernel.root.name == "while"]
        parts = zip(pipeline.parts(), actions, strict=True)
        by_part = {part: of(kernel.inner[0]) for part, kernel in parts}
        works.append(TickWork(pipeline, of(body, without=actions), by_part))
    return StepWork(of(gradient, without=loops), update, works)


def work(block: Block, sizes: Mapping[str, int], rules: CompilerRules = xla_cpu.RULES) -> Work:
    """Return what a device does in a block, on a mesh of these sizes, by a compiler's rules."""
    return work_of(kernels(block, rules=rules), sizes)


def work_of(
    separate: Sequence[Kernel],
    sizes: Mapping[str, int],
    without: Collection[Kernel] = (),
    *,
    recomputed: bool = False,
    fast_memory: float = 0,
    resident: Collection[Value] = (),
) -> Work:
    """Return what a device does in some kernels of one block, a few of them left `without`.

    `resident`, of a loop's body: values that are in the fast memory as long as it runs.

    `recomputed`: some are rematerialized. What these wait for is not in the block, so that only
    gradients over `data` are taken to be sent meanwhile.
    """
    if not separate:
        return Work()
    rules = separate[0].rules
    groups = joined(separate) if rules.joins_kernels else [[kernel] for kernel in separate]
    left = fast_memory - sum(value.bytes for value in resident)
    near = near_values(separate, left).union(resident)
    works = [
        Work() if group[0] in without
        else _of_kernel(group[0], sizes, near, fast_memory) if len(group) == 1
        else _of_several(group, near)
        for group in groups
    ]  # fmt: skip
    sent = [index for index, group in enumerate(groups) if group[0].root.name in COLLECTIVES]
    if not rules.overlaps or not sent:
        return Work.sum(works)
    collectives = tuple(one for index in sent for one in works[index].collectives)
    parts = defaultdict[frozenset[int], list[Work]](list)
    late = {place for place, one in enumerate(collectives) if one.axes == ("data",)}
    for index, free in enumerate(unordered(groups, sent)):
        free = free & late if recomputed else free
        if free and index not in sent:
            parts[free].append(works[index])
    beside = tuple((Work.sum(part), free) for free, part in parts.items())
    computed = [work for index, work in enumerate(works) if index not in sent]
    together = Work(kernels=len(sent), sending=(Sending(collectives, beside),))
    return Work.sum([*computed, together])


def _of_several(group: Sequence[Kernel], near: Collection[Value]) -> Work:
    """Return the work of elementwise kernels and reductions that run as one."""
    inside = {value for kernel in group for value in kernel.outputs}
    read: dict[Value, int] = {}
    for kernel in group:
        for value, size in _reads(kernel, near).items():
            if value not in inside:
                read[value] = max(size, read.get(value, 0))
    return Work(
        other_flops=sum(_flops(kernel.ops) for kernel in group),
        bytes=sum(read.values()) + sum(_bytes_written(kernel.root, near) for kernel in group),
        kernels=1,
    )


def _of_kernel(
    kernel: Kernel, sizes: Mapping[str, int], near: Collection[Value], fast_memory: float
) -> Work:
    root = kernel.root
    if kernel.inner:
        loops = len(root.blocks) == 1 and root.name != "cond"
        stay = resident_values(kernel, fast_memory) if loops else set[Value]()
        parts = [
            work_of(inner, sizes, fast_memory=fast_memory, resident=stay) for inner in kernel.inner
        ]
        if root.name == "cond":
            return max(parts, key=lambda part: (part.flops + part.bytes, part.kernels))
        if root.trips in (0, 1, None):
            return Work() if root.trips == 0 else parts[0]
        # A loop begins with zeros in the stacks that it writes row by row.
        once = sum(_stack_bytes(inner) for inner in kernel.inner[0])
        once += sum(value.bytes for value in stay if value in kernel.reads)
        return Work.sum([parts[0].times(root.trips), Work(bytes=once)])
    if root.name in COLLECTIVES:
        sent = sum(value.bytes for value in root.outputs)  # its operands together
        return Work(kernels=1, sending=(Sending((collective_of(root, sent, sizes),)),))
    moved = sum(_reads(kernel, near).values()) + _bytes_written(root, near)
    product = next((op for op in kernel.ops if op.name in PRODUCTS or "product" in op.params), None)
    if product is not None:
        count = product.params.get("count", 1)
        return Work({_product(product, moved // count, kernel.rules): count}, kernels=1)
    if root.name == "operand" and len(kernel.ops) == 1:  # XLA's own, and not on every device
        return Work()
    if root.name == "order_after" and root.name not in kernel.rules.fusible:  # a barrier
        return Work()
    return Work(other_flops=_flops(kernel.ops), bytes=moved, kernels=1)


def _reads(kernel: Kernel, near: Collection[Value]) -> dict[Value, int]:
    """Return the bytes that a kernel reads of each value; of one that is sliced, the slice; of
    those in the fast memory, none."""
    sizes: dict[Value, int] = {}
    for op in kernel.ops:
        for index, value in enumerate(op.inputs):
            if value not in kernel.reads or value in near or (op.name in UPDATES and index == 0):
                continue
            size = min(value.bytes, op.outputs[0].bytes) if op.name in SLICES else value.bytes
            sizes[value] = max(sizes.get(value, 0), size)
    return sizes


def _bytes_written(root: Op, near: Collection[Value]) -> int:
    """Return the bytes that an operation writes to the large memory; where it updates a part in
    place, that part."""
    if root.name == "stack":
        return sum(value.bytes for value in root.inputs)
    if root.name in UPDATES:
        return root.inputs[-1].bytes if root.inputs else 0
    return sum(value.bytes for value in root.outputs if value not in near)


def _stack_bytes(kernel: Kernel) -> int:
    """Return the bytes of a loop's stacked results of which a kernel writes a row."""
    return kernel.root.outputs[0].bytes if kernel.root.name == "stack" else 0


def _product(op: Op, moved: int, rules: CompilerRules) -> Product:
    """Return the matrix product of an operation, or the one that a convolution amounts to."""
    if op.name != "conv_general_dilated":
        m, n, k, batch = op.params["product"]
        if op.name == "ragged_dot_general" and rules.skips_groups and op.params["rows"]:
            batch = 1
        return Product(m, n, k, batch, op.params["dtype"], moved)
    kernel, out = op.params["kernel"], op.outputs[0].size
    columns = kernel[op.params["dimension_numbers"].rhs_spec[0]]
    summed = math.prod(kernel) // columns
    groups = op.params["feature_group_count"]
    return Product(out // columns, columns // groups, summed, groups, op.params["dtype"], moved)


def _flops(ops: Sequence[Op]) -> float:
    """Return one operation for each number that is computed or reduced."""
    computed = sum(op.outputs[0].size for op in ops if op.name in ELEMENTWISE)
    reduced = sum(op.inputs[0].size for op in ops if op.name in REDUCTIONS and op.inputs)
    return float(computed + reduced)


SLICES = frozenset(["dynamic_slice", "gather", "row", "slice", "split"])
"""Operations that read a part of their first operand."""

UPDATES = frozenset([
    "dynamic_update_slice", "scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul",
])  # fmt: skip
"""Operations that write a part of their first operand."""
