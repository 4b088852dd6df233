"""The solvers of a search by name; each chooses a strategy for every node of a graph.

To add one: a module with a function as `exact.solve`, a row of `SOLVERS`, its name in `SolverName`.
"""

from collections.abc import Callable
from typing import Literal

from plurax.planner import exact, propagate, recursive
from plurax.planner.problem import Solution

SolverName = Literal["exact", "recursive", "propagate"]

SOLVERS: dict[SolverName, Callable[..., Solution]] = {
    "exact": exact.solve,
    "recursive": recursive.solve,
    "propagate": propagate.solve,
}
"""Functions `(graph, costs, pinned, *, within) -> Solution`."""
