"""A choice of strategies that grows node by node; what one more node adds to its cost.

The solvers that prove nothing decide one node after another. A node's strategy then costs

    its own cost
    + of the values it reads that are produced by a decided node: the reshard, unless another
      decided reader pays for that sharding already
    + of the values it produces: the reshards that decided readers need

    + of neighbors that are not decided: what the messages say (`plurax.planner.foresight`)

    decided: h = x @ w, partial={tensor}; g = tanh(h), which needs (None, None): one all-reduce
    next:    k = h + x    from (None, None): 0, shares the all-reduce
                          from (tensor, None): a reduce-scatter
"""

import heapq
import itertools
import math
from collections.abc import Collection, Iterable

from plurax import errors
from plurax.planner.foresight import Foresight
from plurax.planner.graph import GraphValue
from plurax.planner.problem import Problem
from plurax.sharding.spec import TensorSharding


class Assignment:
    """A choice in the making.

    **Arguments:** `problem`; `foresight`, what strategies cost in nodes that are not decided yet.

    **Attributes:** `chosen`, for each decided node the index of its strategy.
    """

    def __init__(self, problem: Problem, foresight: Foresight) -> None:
        self.problem, self._foresight = problem, foresight
        self.chosen: dict[int, int] = {}
        count = len(problem.graph.nodes)
        self._values: list[list[GraphValue]] = [[] for _ in range(count)]
        for value in problem.graph.values:
            for node in dict.fromkeys([value.node, *(use.node for use in value.uses)]):
                self._values[node].append(value)

    def neighbors(self, node: int) -> set[int]:
        """Return the nodes that share a value with a node."""
        values = self._values[node]
        shared = {one for value in values for one in (value.node, *(u.node for u in value.uses))}
        return shared - {node}

    def decide(self, node: int) -> None:
        """Give a node the strategy that adds least; of equal ones the first.

        Raises `PlanError` if none is possible beside those of its neighbors.
        """
        if node not in self.chosen:
            self.chosen[node] = self._ranked(node)[0][1]

    def _ranked(self, node: int) -> list[tuple[float, int]]:
        """Return what each possible strategy of a node adds, and its index, cheapest first."""
        allowed = self.problem.allowed[node]
        ahead = self._foresight.ahead(node, self.chosen)
        ranked = sorted(
            (self.added(node, one) + more, one) for one, more in zip(allowed, ahead, strict=True)
        )
        possible = [one for one in ranked if one[0] < math.inf]
        if not possible:
            graph = self.problem.graph
            raise errors.pins_contradict([graph.nodes[one].path for one in self.problem.pinned])
        return possible

    def _doubt(self, node: int) -> float:
        """Return less, the more the second best strategy of a node costs than the best."""
        (best, _), *others = self._ranked(node)
        return best - others[0][0] if others else -math.inf

    def added(self, node: int, choice: int) -> float:
        """Return what a node's strategy adds to the cost; infinity if it is not possible."""
        cost = self.problem.node_costs[node][choice]
        for value in self._values[node]:
            cost += self._reshards(value, node, choice)
            if cost == math.inf:
                break
        return cost

    def _reshards(self, value: GraphValue, node: int, choice: int) -> float:
        """Return the cost of the copies of one value that a node's strategy adds."""
        nodes = self.problem.graph.nodes
        strategy = nodes[node].strategies[choice]
        asked: set[tuple[TensorSharding, float]] = set()
        paid: set[tuple[TensorSharding, float]] = set()
        for use in value.uses:
            if use.node == node:
                asked.add((strategy.inputs[use.input], use.trips))
            elif use.node in self.chosen:
                other = nodes[use.node].strategies[self.chosen[use.node]]
                paid.add((other.inputs[use.input], use.trips))
        if value.node == node:
            source, asked = strategy.outputs[value.output], asked | paid
        elif value.node in self.chosen:
            producer = nodes[value.node].strategies[self.chosen[value.node]]
            source, asked = producer.outputs[value.output], asked - paid
        else:
            return 0.0
        return sum(
            trips * self.problem.reshard(value.tensor, source, target) for target, trips in asked
        )

    def spread(self, start: Iterable[int], among: Collection[int] | None = None) -> None:
        """Decide from some nodes outward, the node about which there is least doubt first.

        `among` are the nodes that may be decided; default all.
        """
        order = itertools.count()
        queue: list[tuple[float, int, int]] = []

        def push(near: int) -> None:
            for node in sorted(self.neighbors(near)):
                if node not in self.chosen and (among is None or node in among):
                    heapq.heappush(queue, (self._doubt(node), next(order), node))

        for node in start:
            push(node)
        while queue:
            doubt, _, node = heapq.heappop(queue)
            if node in self.chosen:
                continue
            # A neighbor may have been decided since.
            now = self._doubt(node)
            if now > doubt:
                heapq.heappush(queue, (now, next(order), node))
                continue
            self.decide(node)
            push(node)

    def choice(self, sweeps: int = 4) -> list[int]:
        """Return the whole choice; nodes that nothing reached are decided now.

        Each node is then decided again, beside all others, some times or until nothing changes.
        """
        nodes = range(len(self.problem.graph.nodes))
        for node in nodes:
            if node not in self.chosen:
                self.decide(node)
                self.spread([node])
        for _ in range(sweeps):
            before = dict(self.chosen)
            for node in nodes:
                cost, choice = self._ranked(node)[0]
                if cost < self.added(node, before[node]) * (1 - 1e-9):
                    self.chosen[node] = choice
            if self.chosen == before:
                break
        return [self.chosen[node] for node in nodes]
