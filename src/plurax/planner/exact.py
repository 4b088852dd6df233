"""The best choice of strategies, proven: an integer program, solved by HiGHS.

Alpa and others solve this as an integer program with a binary variable for each pair of strategies
of two nodes that share an edge. Here the variables of an edge are a flow between shardings, of
which there are few, and the flow's marginals are exactly the strategies chosen at both ends:

    x[n, k] = 1         node n has strategy k; for each node they sum to 1
    z[v, r, s, d]       of value v, reader r takes sharding d and the producer gives s
    sum over d of z[v, r, s, d] = sum of x[producer, k] over the strategies k that give s
    sum over s of z[v, r, s, d] = sum of x[r, k] over the strategies k that take d
    y[v, s, d] >= z[v, r, s, d] for each reader r; y is what is paid: one copy for all readers

Where rules decide (`plurax.planner.rule_strategies`), x[n, k] says how the operands of n arrive,
and takes the place of z.

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
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from plurax import errors
from plurax.jaxpr.compat import ANNOTATIONS
from plurax.planner.costs import TimeCosts
from plurax.planner.equal_layers import classes_of
from plurax.planner.fewest import minimal
from plurax.planner.graph import Graph, GraphValue, Use
from plurax.planner.origins import in_words
from plurax.planner.problem import Pins, Problem, Solution, Ticks, Within, written
from plurax.sharding.spec import TensorSharding

Columns = dict[TensorSharding, list[int]]
Moves = dict[tuple[TensorSharding, ...], list[int]]


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
    budget: Budget | None = None,
    ticks: Ticks | None = None,
    seconds: float = 60.0,
) -> Solution:
    """Return the cheapest choice, with the proof of how far from it another could be.

    **Arguments:** `pinned`, for some nodes the shardings of their inputs; `within`, for each node
    the strategies among which to choose; `budget`, of memory; `ticks`, of devices that run side by
    side, of which the slowest counts; `seconds`, after which the best choice found so far is
    returned, with its bound.

    Raises `PlanError` if the pins contradict each other, nothing fits the budget, or the seconds
    are over before any choice is found.
    """
    problem = Problem(graph, costs, pinned, within, ticks)
    programs = [_IntegerProgram(problem, classes, budget) for classes in classes_of(graph)]
    first, *pairs = (_solved(one, pinned or {}, within, seconds) for one in programs)
    # Layers are decided alike unless pairs of them are better.
    return next((one for one in pairs if one.cost < first.cost * (1 - 1e-6)), first)


def _solved(
    program: "_IntegerProgram", pinned: Pins, within: Within | None, seconds: float
) -> Solution:
    problem = program.problem
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
        if program.budget is not None:
            raise errors.PlanError(
                "no choice of strategies keeps parameters, gradients, optimizer state and kept "
                f"activations within {program.budget.bytes:,.0f} bytes per device. More devices, "
                "a higher ZeRO stage, rematerialization or more microbatches make them smaller."
            )
        raise _contradiction(problem, pinned, within)
    bound = best.fun if best is relaxed else best.mip_dual_bound
    choice = program.choice(best.x)
    pairs = zip(problem.graph.nodes, choice, strict=True)
    parameters = {node.path: node.pin(one)[0] for node, one in pairs if node.kind == "parameter"}
    return Solution(
        tuple(choice), parameters, problem.cost(choice), bound / problem.costs.scale, program.size
    )


def _contradiction(all_pins: Problem, pinned: Pins, within: Within | None) -> errors.PlanError:
    """Return the error that names the fewest pins that contradict each other."""
    graph, costs = all_pins.graph, all_pins.costs

    def contradict(paths: Sequence[str]) -> bool:
        some = {path: pinned[path] for path in paths}
        problem = Problem(graph, costs, some, within)
        classes = classes_of(graph)[0]
        return _IntegerProgram(problem, classes).run(whole=False, seconds=1.0).status == 2

    few = minimal(list(pinned), contradict) if contradict(list(pinned)) else list(pinned)
    some = [f"{one!r}, {in_words(graph, graph.index(one))}: {written(pinned[one])}" for one in few]
    return errors.PlanError(
        f"{len(few)} of the pinned strategies contradict each other: a sum that is not partial "
        "cannot become partial again. Leave out one of these, or leave an input open (`[]`):"
        + "".join(f"\n  {one}" for one in some[:12])
    )


_NODES = 500
"""Of branch and bound, where the slowest device counts."""


class _IntegerProgram:
    """The variables and constraints of a problem."""

    def __init__(
        self, problem: Problem, classes: Sequence[int], budget: Budget | None = None
    ) -> None:
        self.problem, self.budget = problem, budget
        self._costs: list[float] = []
        # Of each account of `ticks` the variables that cost something, and what they cost.
        self._accounts: dict[int, dict[int, float]] = {}
        self._entries: list[tuple[int, int, float]] = []
        self._lower: list[float] = []
        self._seen: set[Any] = set()
        self._upper: list[float] = []
        # A pin sets a node apart from those of its class that are not pinned so, and a stage too.
        alone: dict[Any, int] = {}
        accounts = problem.ticks.accounts if problem.ticks else [0] * len(classes)
        self._classes = [
            alone.setdefault((first, accounts[node], tuple(problem.allowed[node])), node)
            for node, first in enumerate(classes)
        ]
        self._columns: list[dict[int, int]] = []
        # By a value, of partial sums by its producer, and a reshard: the variable that costs it.
        self._paid: dict[Any, int] = {}
        for node, first in enumerate(self._classes):
            self._node(node, first)
        self._whole = len(self._costs)
        # Equal values between equal nodes are one flow, which costs as often as there are values.
        equal = collections.Counter(self._key(value) for value in problem.graph.values)
        for value in problem.graph.values:
            if count := equal.pop(self._key(value), 0):
                self._value(value, count)
        for place in problem.graph.meets:
            self._look_ahead(*place)
        loops = [node for node in problem.graph.nodes if node.kind == "carry"]
        if any(node.strategies[0].arrivals for node in loops):
            self._carry()
        if budget is not None:
            self._limit(budget)
        if problem.ticks is not None:
            self._count_ticks(problem.ticks)

    @property
    def size(self) -> int:
        """The number of variables."""
        return len(self._costs)

    def _node(self, node: int, first: int) -> None:
        """Add the variables of a node, or its costs to those of the first node of its class."""
        costs, allowed = self.problem.node_costs[node], self.problem.allowed[node]
        if first == node:
            columns = {choice: self._variable() for choice in allowed}
            self._row([(column, 1.0) for column in columns.values()], 1, 1)
        else:
            columns = self._columns[first]
        for choice, column in columns.items():
            self._charge(column, costs[choice], node)
        self._columns.append(columns)

    def _key(self, value: GraphValue) -> Any:
        """Return what a value has in common with equal ones of other layers."""
        uses = [(self._classes[use.node], use.input, use.trips) for use in value.uses]
        return value.tensor, self._classes[value.node], value.output, tuple(sorted(uses))

    def _variable(self, cost: float = 0.0) -> int:
        self._costs.append(cost * self.problem.costs.scale)
        return len(self._costs) - 1

    def _charge(self, column: int, cost: float, node: int) -> None:
        """Add to what a variable costs; with `ticks` to the account of a node."""
        cost *= self.problem.costs.scale
        if self.problem.ticks is None:
            self._costs[column] += cost
        else:
            entries = self._accounts.setdefault(self.problem.ticks.accounts[node], {})
            entries[column] = entries.get(column, 0.0) + cost

    def _count_ticks(self, ticks: Ticks) -> None:
        """Let a step cost its ticks, and each at least what each of its devices does."""
        amounts: dict[int, int] = {}
        for account, entries in self._accounts.items():
            amounts[account] = amount = self._variable()
            self._row([(amount, 1.0), *((c, -cost) for c, cost in entries.items())], 0, np.inf)
        for count, devices in ticks.every:
            tick = self._variable(count / self.problem.costs.scale)
            for device in devices:
                does = [(amounts[one], -share) for one, share in device if one in amounts]
                self._row([(tick, 1.0), *does], 0, np.inf)

    def _row(self, entries: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        row = len(self._lower)
        self._entries += [(row, column, factor) for column, factor in entries]
        self._lower.append(lower)
        self._upper.append(upper)

    def _no_more(self, columns: Iterable[int], than: Iterable[int]) -> None:
        """Let some variables together be no more than others together."""
        self._row([*((c, 1.0) for c in than), *((c, -1.0) for c in columns)], 0, np.inf)

    def _value(self, value: GraphValue, count: int) -> None:
        """Add the flow of a value from its producer to each reader, `count` times."""
        produced = self._by_sharding(value.node, "outputs", value.output)
        earlier: Moves = {}
        as_is, *again = self.problem.shared[value.node, value.output]
        # A carry that is returned as it came has one sharding in any case.
        uses = [use for use in value.uses if use.node != value.node]
        for use in uses:
            if self.problem.graph.nodes[use.node].strategies[0].arrivals is None:
                moves = self._flow(value, use, produced)
            else:
                moves = self._arrivals(use, produced, earlier)
            for move, columns in moves.items():
                earlier.setdefault(move, []).extend(columns)
                cost = count * use.trips * self.problem.reshard(value.tensor, *move)
                if cost == math.inf:
                    self._row([(column, 1.0) for column in columns], 0, 0)
                elif cost > 0 and len(uses) == 1 and not (again and move[0].partial):
                    for column in columns:
                        self._charge(column, cost, use.node)
                elif cost > 0:
                    of = self._key(as_is) if move[0].partial else id(value)
                    key = of, *move, use.trips
                    if key not in self._paid:
                        self._paid[key] = self._variable()
                        self._charge(self._paid[key], cost, use.node)
                    self._no_more(columns, [self._paid[key]])

    def _flow(self, value: GraphValue, use: Use, produced: Columns) -> Moves:
        """Add variables of a reader that may take a value in any sharding."""
        taken = self._by_sharding(use.node, "inputs", use.input)
        moves: Moves = {
            (source, target): [self._variable(0.0)]
            for source in produced
            for target in taken
            if self.problem.reshard(value.tensor, source, target) < math.inf
        }
        for side, shardings in enumerate((produced, taken)):
            for sharding, columns in shardings.items():
                flows = [(one, 1.0) for move, (one,) in moves.items() if move[side] == sharding]
                self._row(flows + [(column, -1.0) for column in columns], 0, 0)
        return moves

    def _arrivals(self, use: Use, produced: Columns, earlier: Moves) -> Moves:
        """Return a reader's columns by the reshards of a value that they need.

        What it takes as an earlier reader has resharded it, one of these has to reshard.
        """
        strategies, moves = self.problem.graph.nodes[use.node].strategies, Moves()
        arriving: Columns = {sharding: [] for sharding in produced}
        resharded: Moves = {}
        for choice, column in self._columns[use.node].items():
            strategy = strategies[choice]
            assert strategy.arrivals is not None
            arrival = strategy.arrivals[use.input]
            arriving.setdefault(arrival[0], []).append(column)
            if len(arrival) > 1:
                resharded.setdefault(arrival, []).append(column)
            for move in strategy.reshards(use.input, arrival[0]):
                moves.setdefault(move, []).append(column)
        for source, columns in arriving.items():
            entries = [(column, -1.0) for column in produced.get(source, ())]
            self._row([(column, 1.0) for column in columns] + entries, 0, 0)
        for move, columns in resharded.items():
            self._no_more(columns, earlier.get(move, ()))
        return moves

    def _look_ahead(self, node: int, place: int) -> None:
        """Let a partial sum be scattered to how it is split further on, where it is split so."""
        graph, needed = self.problem.graph, dict[TensorSharding | None, list[int]]()
        for choice, column in self._columns[node].items():
            for at, split in graph.nodes[node].strategies[choice].splits:
                if at == place:
                    needed.setdefault(split, []).append(column)
        sources = [(self._classes[source], output) for source, output in graph.meets[node, place]]
        key = self._classes[node], place, tuple(sources)
        if len(needed) < 2 or key in self._seen:
            return
        self._seen.add(key)
        every = [self._by_sharding(source, "outputs", output) for source, output in sources]
        for split, columns in needed.items():
            if split is not None:
                self._no_more(columns, [c for each in every for c in each.get(split, ())])
        for each in every:
            met = [c for split, columns in each.items() if split in needed for c in columns]
            self._row([(column, 1.0) for column in [*met, *needed.get(None, ())]], -np.inf, 1)

    def _by_sharding(self, node: int, side: str, place: int) -> Columns:
        """Return the columns of a node's strategies by the sharding of an input or an output."""
        strategies, columns = self.problem.graph.nodes[node].strategies, Columns()
        for choice, column in self._columns[node].items():
            columns.setdefault(getattr(strategies[choice], side)[place], []).append(column)
        return columns

    def _carry(self) -> None:
        """Let loops carry a value otherwise than it starts only with a cause.

        By rules a loop tries how it starts, and goes on with what an iteration then returns: split
        by a parameter, say, and not by the carry itself. A variable for each value and each
        sharding says whether there is a cause: it is 1 where the value has the sharding, and at
        most the sum of the causes of its operands in the shardings in which they are taken.
        """
        graph = self.problem.graph
        causes: dict[tuple[int, int, TensorSharding], int] = {}
        for value in graph.values:
            first = self._classes[value.node]
            for sharding, columns in self._by_sharding(first, "outputs", value.output).items():
                if sharding.axes and (first, value.output, sharding) not in causes:
                    variable = causes[first, value.output, sharding] = self._variable(0.0)
                    self._no_more([variable], columns)

        def cause(node: int, place: int, sharding: TensorSharding) -> set[int]:
            value = graph.reads.get((node, place))
            if value is None:
                return set()
            key = self._classes[value.node], value.output, sharding
            return {causes[key]} if key in causes else set()

        for (index, output, sharding), variable in causes.items():
            node, operands = graph.nodes[index], set[int]()
            for choice in self._columns[index]:
                if node.strategies[choice].outputs[output] == sharding:
                    for place, taken in enumerate(node.strategies[choice].inputs):
                        # In its first iteration a loop has what it starts with.
                        if node.kind != "carry" or output or not place:
                            operands |= cause(index, place, taken)
            if node.kind not in {"parameter", *ANNOTATIONS}:
                self._no_more([variable], sorted(operands))
        for index, node in enumerate(graph.nodes):
            if node.kind == "carry" and (index, 1) in graph.reads:
                for choice, column in self._columns[index].items():
                    strategy, started = node.strategies[choice], (index, 0) in graph.reads
                    assert strategy.arrivals is not None
                    start, carried = strategy.arrivals[0][-1], strategy.outputs[0]
                    if carried.axes and not (started and start.dims == carried.dims):
                        self._no_more([column], cause(index, 1, carried))

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
            # No variable can be more than one: with that bound HiGHS may take 100 times as long.
            bounds=Bounds(0, np.inf),
            integrality=integrality,
            # What the slowest device does is proven slowly, and known no better than that.
            options={"time_limit": seconds, "mip_rel_gap": 1e-6}
            if self.problem.ticks is None
            else {"time_limit": seconds, "mip_rel_gap": 1e-3, "node_limit": _NODES},
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
