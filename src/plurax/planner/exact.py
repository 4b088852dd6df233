"""The best choice of strategies, proven: an integer program, solved by HiGHS.

Alpa and others solve this as an integer program with a binary variable for each pair of strategies
of two nodes that share an edge. Here the variables of an edge are a flow between shardings, of
which there are few, and the flow's marginals are exactly the strategies chosen at both ends:

    x[n, k] = 1         node n has strategy k; for each node they sum to 1
    z[v, r, s, d]       of value v, reader r takes sharding d and the producer gives s
    sum over d of z[v, r, s, d] = sum of x[producer, k] over the strategies k that give s
    sum over s of z[v, r, s, d] = sum of x[r, k] over the strategies k that take d
    y[v, s, d] >= z[v, r, s, d] for each reader r; y is what is paid: one copy for all readers
    x[n, k] <= sum over n's operands v of z[v, n, d, d], where k takes d: in plans that tell
    equations no strategies, some operand comes as the strategy takes it (`Problem.follows`)

Layers that are equal share their variables (`plurax.planner.equal_layers`): the answer and the
bound are of the choices that treat them alike.

Only x must be whole numbers. With exact marginals the linear relaxation has, on the graphs of
transformers, mostly whole solutions, so that it is both the answer and the proof. Reshards that are
impossible have no variable; no cost is a big number.

    x (64, 128) replicated, read by two products whose weights are split by columns: y[x, R, R] = 0
    h partial={tensor}, read by add (None, None) and by tanh (None, None): one all-reduce is paid

Zheng et al. 2022, "Alpa", section 4, https://arxiv.org/abs/2201.12023; the marginals are those of
the local polytope of Markov random fields.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from plurax import errors
from plurax.planner.costs import TimeCosts
from plurax.planner.equal_layers import classes_of
from plurax.planner.fewest import minimal
from plurax.planner.graph import Graph, GraphValue
from plurax.planner.origins import in_words
from plurax.planner.problem import Pins, Problem, Solution, Within, written
from plurax.sharding.spec import TensorSharding

Columns = dict[TensorSharding, list[int]]


@dataclasses.dataclass(frozen=True)
class Budget:
    """A limit on memory: `bytes`, and for each node and strategy the bytes that it needs."""

    bytes: float
    memory: Sequence[Sequence[float]]


def solve(
    graph: Graph,
    costs: TimeCosts,
    pinned: Pins | None = None,
    *,
    within: Within | None = None,
    by_rules: bool = False,
    budget: Budget | None = None,
    seconds: float = 60.0,
) -> Solution:
    """Return the cheapest choice, with the proof of how far from it another could be.

    **Arguments:** `pinned`, for some nodes the shardings of their inputs; `within`, for each node
    the strategies among which to choose; `by_rules`, whether equations are told none (`Problem`);
    `budget`, of memory; `seconds`, after which the best choice found so far is returned, with its
    bound.

    Raises `PlanError` if the pins contradict each other, nothing fits the budget, or the seconds
    are over before any choice is found.
    """
    problem = Problem(graph, costs, pinned, within, by_rules=by_rules)
    program = _IntegerProgram(problem, budget)
    relaxed = program.run(whole=False, seconds=seconds)
    best = relaxed
    if relaxed.status != 2 and (relaxed.x is None or program.fractional(relaxed.x)):
        best = program.run(whole=True, seconds=seconds)
    if best.x is None:
        if best.status == 1:
            raise errors.PlanError(
                f"the search found no shardings over `tensor` in {seconds:g} seconds. Leave it "
                "less to choose: a smaller `tensor`, or rules for some parameters, as in "
                "pinned=plurax.Plan(tensor=4, shardings=...)."
            )
        if budget is not None:
            raise errors.PlanError(
                "no choice of strategies keeps parameters, gradients, optimizer state and kept "
                f"activations within {budget.bytes:,.0f} bytes per device. More devices, a higher "
                "ZeRO stage, rematerialization or more microbatches make them smaller."
            )
        raise _contradiction(problem, pinned or {}, within)
    bound = best.fun if best is relaxed else best.mip_dual_bound
    choice = program.choice(best.x)
    pairs = zip(graph.nodes, choice, strict=True)
    parameters = {node.path: node.pin(one)[0] for node, one in pairs if node.kind == "parameter"}
    return Solution(
        tuple(choice), parameters, problem.cost(choice), bound / costs.scale, program.size
    )


def _contradiction(all_pins: Problem, pinned: Pins, within: Within | None) -> errors.PlanError:
    """Return the error that names the fewest pins that contradict each other."""
    graph, costs, by_rules = all_pins.graph, all_pins.costs, all_pins.by_rules

    def contradict(paths: Sequence[str]) -> bool:
        some = {path: pinned[path] for path in paths}
        problem = Problem(graph, costs, some, within, by_rules=by_rules)
        return _IntegerProgram(problem, None).run(whole=False, seconds=1.0).status == 2

    few = minimal(list(pinned), contradict) if contradict(list(pinned)) else list(pinned)
    some = [f"{one!r}, {in_words(graph, graph.index(one))}: {written(pinned[one])}" for one in few]
    return errors.PlanError(
        f"{len(few)} of the pinned strategies contradict each other: a sum that is not partial "
        "cannot become partial again. Leave out one of these, or leave an input open (`[]`):"
        + "".join(f"\n  {one}" for one in some[:12])
    )


class _IntegerProgram:
    """The variables and constraints of a problem."""

    def __init__(self, problem: Problem, budget: Budget | None) -> None:
        self._problem = problem
        self._costs: list[float] = []
        self._entries: list[tuple[int, int, float]] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        # A pin sets a node apart from those of its class that are not pinned so.
        alone: dict[Any, int] = {}
        self._classes = [
            alone.setdefault((first, tuple(problem.allowed[node])), node)
            for node, first in enumerate(classes_of(problem.graph))
        ]
        self._columns: list[dict[int, int]] = []
        for node, first in enumerate(self._classes):
            self._node(node, first)
        self._whole = len(self._costs)
        # Equal values between equal nodes are one flow, which costs as often as there are values.
        equal = collections.Counter(self._key(value) for value in problem.graph.values)
        # By value, reader and sharding, the column that says that it is read as it comes.
        self._same: dict[Any, int] = {}
        for value in problem.graph.values:
            if count := equal.pop(self._key(value), 0):
                self._value(value, count)
        if problem.by_rules:
            self._follow()
        if budget is not None:
            self._limit(budget)

    @property
    def size(self) -> int:
        """The number of variables."""
        return len(self._costs)

    def _node(self, node: int, first: int) -> None:
        """Add the variables of a node, or its costs to those of the first node of its class."""
        costs, allowed = self._problem.node_costs[node], self._problem.allowed[node]
        if first == node:
            columns = {choice: self._variable(costs[choice]) for choice in allowed}
            self._row([(column, 1.0) for column in columns.values()], 1, 1)
        else:
            columns = self._columns[first]
            for choice, column in columns.items():
                self._costs[column] += costs[choice] * self._problem.costs.scale
        self._columns.append(columns)

    def _key(self, value: GraphValue) -> Any:
        """Return what a value has in common with equal ones of other layers."""
        uses = [(self._classes[use.node], use.input, use.trips) for use in value.uses]
        return value.tensor, self._classes[value.node], value.output, tuple(sorted(uses))

    def _variable(self, cost: float) -> int:
        self._costs.append(cost * self._problem.costs.scale)
        return len(self._costs) - 1

    def _row(self, entries: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        row = len(self._lower)
        self._entries += [(row, column, factor) for column, factor in entries]
        self._lower.append(lower)
        self._upper.append(upper)

    def _value(self, value: GraphValue, count: int) -> None:
        """Add the flow of a value from its producer to each reader, `count` times."""
        reshard = self._problem.reshard
        produced = [*self._by_sharding(value.node, "outputs", value.output).items()]
        paid: dict[tuple[int, TensorSharding, float], int] = {}
        # A carry that is returned as it came has one sharding in any case.
        uses = [use for use in value.uses if use.node != value.node]
        for use in uses:
            taken = [*self._by_sharding(use.node, "inputs", use.input).items()]
            reader = self._key(value), self._classes[use.node], use.input
            out: list[list[tuple[int, float]]] = [[] for _ in produced]
            into: list[list[tuple[int, float]]] = [[] for _ in taken]
            for i, (s, _) in enumerate(produced):
                for j, (d, _) in enumerate(taken):
                    cost = count * use.trips * reshard(value.tensor, s, d)
                    if cost == math.inf or not self._problem.reaches(value, use, s, d):
                        continue
                    shared = len(uses) > 1 and cost > 0
                    flow = self._variable(0.0 if shared else cost)
                    if shared:
                        key = (i, d, use.trips)
                        if key not in paid:
                            paid[key] = self._variable(cost)
                        self._row([(paid[key], 1.0), (flow, -1.0)], 0, np.inf)
                    out[i].append((flow, 1.0))
                    into[j].append((flow, 1.0))
                    if s == d:
                        self._same[*reader, s] = flow
            for flows, (_, columns) in zip([*out, *into], [*produced, *taken], strict=True):
                self._row(flows + [(column, -1.0) for column in columns], 0, 0)

    def _follow(self) -> None:
        """Add for each strategy that some operand comes as it takes it."""
        graph, known = self._problem.graph, set()
        for node, (own, columns) in enumerate(zip(self._classes, self._columns, strict=True)):
            for choice, column in columns.items():
                follows = self._problem.follows(node, choice)
                if follows is None:
                    continue
                reads = [(self._key(graph.reads[node, i]), own, i, s) for i, s in follows]
                comes = sorted(self._same[read] for read in reads if read in self._same)
                if (row := (column, *comes)) not in known:
                    known.add(row)
                    self._row([(column, -1.0), *((one, 1.0) for one in comes)], 0, np.inf)

    def _by_sharding(self, node: int, side: str, place: int) -> Columns:
        """Return the columns of a node's strategies by the sharding of an input or an output."""
        strategies, columns = self._problem.graph.nodes[node].strategies, Columns()
        for choice, column in self._columns[node].items():
            columns.setdefault(getattr(strategies[choice], side)[place], []).append(column)
        return columns

    def _limit(self, budget: Budget) -> None:
        """Add the limit on memory, in thousandths of it."""
        unit = max(budget.bytes, 1.0) / 1e3
        entries = [
            (column, budget.memory[node][choice] / unit)
            for node, columns in enumerate(self._columns)
            for choice, column in columns.items()
            if budget.memory[node][choice]
        ]
        self._row(entries, 0, budget.bytes / unit)

    def run(self, *, whole: bool, seconds: float) -> Any:
        """Solve the program, or with `whole=False` its linear relaxation."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix

        rows, columns, factors = zip(*self._entries, strict=True)
        matrix = csr_matrix((factors, (rows, columns)), shape=(len(self._lower), self.size))
        integrality = np.zeros(self.size)
        integrality[: self._whole] = 1 if whole else 0
        return milp(
            np.asarray(self._costs),
            constraints=LinearConstraint(matrix, self._lower, self._upper),
            bounds=Bounds(0, 1),
            integrality=integrality,
            options={"time_limit": seconds, "mip_rel_gap": 1e-6},
        )

    def fractional(self, x: Any) -> bool:
        """Whether some node has parts of several strategies."""
        chosen = x[: self._whole]
        return bool(np.any((chosen > 1e-6) & (chosen < 1 - 1e-6)))

    def choice(self, x: Any) -> list[int]:
        """Return for each node the strategy that a solution gives it."""
        return [
            max((x[at], choice) for choice, at in columns.items())[1] for columns in self._columns
        ]
