"""An axis of several prime factors: part by part, each choice refining the last.

With `tensor=6` as 2 x 3 an operator may be split in two dims, or in one of them twice. There are
then as many strategies as pairs, and the joint problem is not solved in minutes. One part at a time
it is solved in seconds: first over `tensor:0` alone, all else replicated; then over `tensor:1`
among the strategies that agree with what `tensor:0` has.

    tensor:0 = 2, tensor:1 = 3; x (8, 64) @ in (64, 6)

    first    (tensor:0, None), replicated                  rows of x
    then     (tensor:0, None), (None, tensor:1)            rows of x, columns of in
             or (tensor:0, None), replicated               rows of x, three times the same
             or ((tensor:0, tensor:1), None), ...          here 8 rows are not divisible by 6

What comes first decides most, so that 2 x 3 and 3 x 2 are two searches.
"""

from collections.abc import Callable, Sequence

from plurax.planner.costs import Costs
from plurax.planner.graph import Graph, Node
from plurax.planner.problem import Pins, Problem, Solution, Within
from plurax.planner.shard_strategies import ShardStrategy
from plurax.sharding.spec import TensorSharding

Shardings = tuple[TensorSharding, ...]


def factors(size: int) -> list[int]:
    """Return the prime factors of a size, largest first.

    >>> factors(12), factors(7)
    ([3, 2, 2], [7])
    """
    found, factor = [], 2
    while size > 1:
        while size % factor == 0:
            found.append(factor)
            size //= factor
        factor += 1
    return found[::-1]


def solve_by_parts(
    solve: Callable[..., Solution], graph: Graph, costs: Costs, pinned: Pins | None = None
) -> Solution:
    """Return the choice of a solver that decides the searched axes of a graph one after another.

    **Arguments:** `solve`, such as `plurax.planner.recursive.solve`; pins hold from the first part
    on. Its bound is that of the last part, given the others.

    Raises `PlanError` as the solver does.
    """
    held = Problem(graph, costs, pinned).pinned
    solution: Solution | None = None
    for count in range(1, len(graph.searched) + 1):
        later = graph.searched[count:]
        within: Within = [
            range(len(node.strategies))
            if index in held
            else _refining(node, later, graph.searched[count - 1 :], solution, index)
            for index, node in enumerate(graph.nodes)
        ]
        solution = solve(graph, costs, pinned, within=within)
    assert solution is not None, "no axis to search"
    return solution


def _refining(
    node: Node,
    later: Sequence[str],
    open_: Sequence[str],
    before: Solution | None,
    index: int,
) -> list[int]:
    """Return the strategies that use no later axis, and agree with the last choice on decided ones.

    A node of which there is no such strategy, because its only ones use later axes, keeps all.
    """
    decided = None
    if before is not None:
        decided = _without(node.strategies[before.choice[index]], open_)
    found = [
        choice
        for choice, strategy in enumerate(node.strategies)
        if _without(strategy, later) == (strategy.inputs, strategy.outputs)
        and (decided is None or _without(strategy, open_) == decided)
    ]
    return found or list(range(len(node.strategies)))


def _without(strategy: ShardStrategy, axes: Sequence[str]) -> tuple[Shardings, Shardings]:
    """Return a strategy's shardings, replicated over some axes."""
    return (
        tuple(one.without(axes) for one in strategy.inputs),
        tuple(one.without(axes) for one in strategy.outputs),
    )
