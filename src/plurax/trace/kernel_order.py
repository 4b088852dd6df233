"""The order in which a compiler runs the kernels of a block.

XLA's compiler for CPUs runs a kernel as soon as all it reads is there, first come, first served.
Those of GPUs and TPUs take the order that needs the least memory, as a rule that of `list_order`:
of the kernels whose operands are there, the one runs first that frees the most bytes, and so
gradients of weights run as soon as they can. Example, `a = f(x)`, `b = g(x)`, `c = sum(a)`,
`d = sum(b)`:

    first come      a b c d      a and b are in memory at once
    least memory    a c b d

Then a compiler that runs collectives beside other work moves gradients to where a collective has to
be hidden (`gradients_late`).

Sources: XLA's `ListScheduler` and `DFSMemoryScheduler` (`hlo_memory_scheduler.cc`), its
`latency_hiding_scheduler.cc`, and compiled programs.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

from plurax.jaxpr.product_dims import PRODUCTS
from plurax.trace.kernels import Kernel, before_products
from plurax.trace.step_trace import COLLECTIVES, Block, Value

Size = Callable[[Value], int]


def breadth_first(kernels: Sequence[Kernel], block: Block) -> list[Kernel]:
    """Return kernels in the order in which XLA's CPU compiler runs them."""
    makers, users = _edges(kernels)
    position = {value: index for index, value in enumerate(block.inputs)}
    waits = {kernel: len(makers[kernel]) for kernel in kernels}
    ready = [kernel for kernel in kernels if not waits[kernel]]
    # The inputs come in order, and with the last one it reads a kernel is ready.
    ready.sort(key=lambda kernel: max((position.get(v, -1) for v in kernel.reads), default=-1))
    queue, order = deque(ready), []
    while queue:
        kernel = queue.popleft()
        order.append(kernel)
        for user in users[kernel]:
            waits[user] -= 1
            if not waits[user]:
                queue.append(user)
    return order


def list_order(kernels: Sequence[Kernel], block: Block, size: Size) -> list[Kernel]:
    """Return kernels so that each step frees the most bytes.

    Of two that free as many, the one with more readers comes first, then the one that was ready
    last. What comes from outside the block is not freed.
    """
    makers, users = _edges(kernels)
    own = {value for kernel in kernels for value in kernel.outputs}
    reads = Counter(value for kernel in kernels for value in kernel.reads if value in own)
    reads.update(value for value in block.outputs if value is not None)
    waits = {kernel: len(makers[kernel]) for kernel in kernels}
    written = {
        kernel: 0 if kernel.root.name == "stack" else sum(map(size, kernel.outputs))
        for kernel in kernels
    }

    def freed(kernel: Kernel) -> int:
        last = (size(value) for value in kernel.reads if reads[value] == 1)
        return sum(last) - written[kernel]

    ready = [kernel for kernel in kernels if not waits[kernel]]
    order = []
    while ready:
        place = max(range(len(ready)), key=lambda at: (freed(ready[at]), len(users[ready[at]]), at))
        kernel = ready.pop(place)
        order.append(kernel)
        reads.subtract(value for value in kernel.reads if value in own)
        for user in users[kernel]:
            waits[user] -= 1
            if not waits[user]:
                ready.append(user)
    return order


def gradients_late(order: Sequence[Kernel]) -> list[Kernel]:
    """Return kernels as a compiler orders them that hides collectives behind other work.

    What no product reads, gradients of weights above all, waits: behind the whole backward pass
    where that waits for sums over devices itself, or computes convolutions, each of which counts
    for a fifth of a collective; else behind the next gathers, and with it what is computed again
    for it alone. Nothing waits in a block whose only collectives are those of gradients.
    """
    before = before_products(order)
    final = {kernel for kernel in order if before.isdisjoint(kernel.outputs)}
    if backward_waits(order):
        return sorted(order, key=lambda kernel: kernel in final)
    gathers = _gathers(order)
    if not order or not gathers[order[-1]]:
        return list(order)
    alone = _for_gradients(order, final)
    alone = {one for one in alone if gathers[one] + GATHERS <= gathers[order[-1]]}
    late: list[Kernel] = []
    waiting: deque[tuple[int, Kernel]] = deque()
    behind: set[Value] = set()
    for kernel in order:
        follows = not behind.isdisjoint(kernel.reads) or _is_product(kernel)
        if kernel in alone or (kernel in final and follows):
            waiting.append((gathers[kernel] + GATHERS, kernel))
            behind.update(kernel.outputs)
            continue
        late.append(kernel)
        while waiting and waiting[0][0] <= gathers[kernel]:
            late.append(waiting.popleft()[1])
    return late + [kernel for _, kernel in waiting]


def backward_waits(order: Sequence[Kernel]) -> bool:
    """Whether gradients run behind the backward pass: it waits for sums, or has convolutions."""
    before = before_products(order)
    waited = {one.root.name for one in order if not before.isdisjoint(one.outputs)}
    sums = waited.intersection(COLLECTIVES) - {"all_gather"}
    return bool(sums) or any(one.has_any(["conv_general_dilated"]) for one in order)


def _is_product(kernel: Kernel) -> bool:
    return kernel.has_any(PRODUCTS) and not kernel.inner


def _gathers(order: Sequence[Kernel]) -> dict[Kernel, int]:
    """Return how many gathers there are up to each kernel.

    Those that do not read each other's results are combined, and count once. Of a loop that gathers
    parameters and reduces gradients the compiler runs one iteration before the loop, so that the
    next one hides its reduction: what is there before the loop waits until it is over.
    """
    count, group, counts = 0, set[Value](), dict[Kernel, int]()
    for kernel in order:
        reads = not group.isdisjoint(kernel.reads)
        inside = {one.root.name for inner in kernel.inner for one in inner}
        if kernel.root.name == "all_gather":
            group = set() if reads else group
            count += not group
        if kernel.root.name == "all_gather" or reads:
            group.update(kernel.outputs)
        count += GATHERS * ({"all_gather", "reduce_scatter"} <= inside)
        counts[kernel] = count
    return counts


def _for_gradients(order: Sequence[Kernel], final: Container[Kernel]) -> set[Kernel]:
    """Return the products that only gradients of weights read, with what moves their results."""
    makers, users = _edges(order)
    ends = {kernel for kernel in order if kernel in final and _is_product(kernel)}
    alone: set[Kernel] = set()
    for kernel in reversed(order):
        if kernel not in final and users[kernel] and ends.issuperset(users[kernel]):
            (alone if kernel.has_any(PRODUCTS) else ends).add(kernel)
    for kernel in order:
        if kernel in ends and kernel not in final and not alone.isdisjoint(makers[kernel]):
            alone.add(kernel)
    return alone


def products_late(order: Sequence[Kernel], has_loops: bool) -> list[Kernel]:
    """Return kernels so that a product runs when its result is wanted.

    That is what was seen of one that would free an array of more than twice its bytes: the gradient
    of attention's values runs behind that of the scores, so that the weights are in memory still.
    In blocks with loops, and of loops, it was seen in half precision only; where `backward_waits`
    not at all.
    """
    if backward_waits(order):
        return list(order)
    widest = 2 if has_loops else 8
    last = {value: kernel for kernel in order for value in kernel.reads}
    first = {value: kernel for kernel in reversed(order) for value in kernel.reads}
    own = {value for kernel in order for value in kernel.outputs}
    held: dict[Kernel, list[Kernel]] = defaultdict(list)
    for kernel in order:
        result = kernel.outputs[0] if kernel.root.name == "dot_general" else None
        if result in first and result is not None and result.dtype.itemsize <= widest:
            freed = own.intersection(value for value in kernel.reads if last[value] is kernel)
            if any(value.bytes > 2 * result.bytes for value in freed):
                held[first[result]].append(kernel)
    moved = {kernel for group in held.values() for kernel in group}

    def with_held(kernel: Kernel) -> Iterator[Kernel]:
        for one in held.get(kernel, ()):
            yield from with_held(one)
        yield kernel

    return [one for kernel in order if kernel not in moved for one in with_held(kernel)]


GATHERS = 8
"""The gathers that a gradient of a weight waits for, those combined counted once: as many as in
compiled programs, at most."""


def _edges(
    kernels: Sequence[Kernel],
) -> tuple[Mapping[Kernel, list[Kernel]], Mapping[Kernel, list[Kernel]]]:
    """Return for each kernel those that compute what it reads, and those that read its results."""
    maker = {value: kernel for kernel in kernels for value in kernel.outputs}
    makers: dict[Kernel, list[Kernel]] = {}
    users: dict[Kernel, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        makers[kernel] = list(dict.fromkeys(maker[v] for v in kernel.reads if v in maker))
        for one in makers[kernel]:
            users[one].append(kernel)
    return makers, users
