"""The order in which a compiler runs the kernels of a block.

XLA's compiler for CPUs runs a kernel as soon as all it reads is there, first come, first served.
That of GPUs walks from the results to what they need, so that a kernel runs when its result is
wanted: gradients of weights, which only the optimizer reads, come late, and what they are computed
from waits for them. Example, `a = f(x)`, `b = g(x)`, `c = sum(a)`, `d = sum(b)`:

    breadth first    a b c d      a and b are in memory at once
    depth first      a c b d

Sources: XLA's `DFSMemoryScheduler` (`hlo_memory_scheduler.cc`), and compiled programs.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

from plurax.trace.kernels import Kernel
from plurax.trace.step_trace import Block, Value

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


def depth_first(kernels: Sequence[Kernel], size: Size) -> list[Kernel]:
    """Return kernels as a walk from the results finds them.

    Of the operands of a kernel, the one comes first that has the most other readers above it, then
    the one that takes the most bytes to compute.
    """
    makers, users = _edges(kernels)
    extra: dict[Kernel, int] = {}
    total: dict[Kernel, int] = {}
    for kernel in kernels:
        extra[kernel] = max(len(users[kernel]) - 1, 0)
        total[kernel] = sum(size(value) for value in kernel.outputs)
        for maker in makers[kernel]:
            extra[kernel] += extra[maker]
            total[kernel] += total[maker]
    largest_last = lambda kernel: (extra[kernel], total[kernel])  # noqa: E731
    order: dict[Kernel, None] = {}
    stack = sorted((kernel for kernel in kernels if not users[kernel]), key=largest_last)
    while stack:
        waiting = [one for one in makers[stack[-1]] if one not in order]
        if waiting and stack[-1] not in order:
            stack += sorted(waiting, key=largest_last)
        else:
            order.setdefault(stack.pop())
    return list(order)


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
