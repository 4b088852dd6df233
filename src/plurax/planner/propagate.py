"""From what is pinned outward: the rest of a plan whose parts a person has given.

Pinned nodes are decided first. Then, of all nodes beside a decided one, the one about which there
is least doubt takes its cheapest strategy, and so on: where a sharding can go on for nothing it
does, and a reshard is put only where two of them meet.

    pinned: in (None, tensor); x is replicated
    0        h = x @ in                 (None, tensor)
    0        a = tanh(h)                (None, tensor)
    0        out                        (tensor, None), which a @ out takes as it is
    ...      y = a @ out                partial={tensor}
    bytes    z = y + x                  an all-reduce: the first that costs something

Xu et al. 2021, "GSPMD", section 3.5, https://arxiv.org/abs/2105.04663, propagates by priorities of
operators instead of costs.
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
    """Return a choice that keeps every pin, made from the pins outward.

    Without pins it starts at the arguments. Raises `PlanError` if the pins contradict each other.
    """
    started = time.perf_counter()
    problem = Problem(graph, costs, pinned, within)
    assignment = Assignment(problem, Foresight(problem))
    start = sorted(problem.pinned)
    for node in start:
        assignment.decide(node)
    assignment.spread(start)
    choice = assignment.choice()
    return problem.solution(choice, solve_seconds=time.perf_counter() - started)
