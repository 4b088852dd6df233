"""The largest operators first: a good choice at once, without a proof.

Matrix products are decided in the order of their work. After each of them the decision spreads
through the equations around it, up to the next products, so that these know what their operands
look like. What is left is decided from there on, and each node once more beside all others.

    x (8, 64); h = x @ in (64, 256); y = tanh(h) @ out (256, 64); logits = y @ head (64, 128)

    1. h, the heaviest: columns of `in`; then tanh: columns
    2. y: its operand is split by columns already, so rows of `out`; a partial sum
    3. logits: ...

Wang et al. 2021, "Efficient and Systematic Partitioning of Large and Deep Neural Networks"
(D-Rec), https://doi.org/10.1109/TPDS.2021.3105914.
"""

import time

from plurax.planner.assignment import Assignment
from plurax.planner.costs import Costs
from plurax.planner.foresight import Foresight
from plurax.planner.graph import Graph
from plurax.planner.problem import Pins, Problem, Solution, Within


def solve(
    graph: Graph, costs: Costs, pinned: Pins | None = None, *, within: Within | None = None
) -> Solution:
    """Return a choice made from the largest operator to the smallest.

    Raises `PlanError` if the pins contradict each other.
    """
    started = time.perf_counter()
    problem = Problem(graph, costs, pinned, within)
    assignment = Assignment(problem, Foresight(problem))
    work = [
        node.trips * max(strategy.flops for strategy in node.strategies) for node in graph.nodes
    ]
    light = {index for index, amount in enumerate(work) if not amount}
    for node in sorted(problem.pinned):
        assignment.decide(node)
    assignment.spread(sorted(problem.pinned), light)
    # Of equal work, the later comes last, so that the choice is the same in every process.
    for node in sorted(set(range(len(work))) - light, key=lambda index: (-work[index], index)):
        assignment.decide(node)
        assignment.spread([node], light)
    choice = assignment.choice()
    return problem.solution(choice, solve_seconds=time.perf_counter() - started)
