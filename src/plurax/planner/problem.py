"""What the solver is given and what it returns: a graph with its costs in numbers, a solution.

A choice gives each node one of its strategies, by index. Its cost is

    sum over nodes of the cost of the chosen strategy
    + sum over values and over the shardings that its readers need, each counted once,
      of the cost of the reshard from the sharding in which it is produced

so that two readers of one sharding share one copy. `Problem.cost` is this sum.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from plurax import errors
from plurax.planner.costs import BytesSent, Costs
from plurax.planner.graph import Graph, GraphValue
from plurax.planner.shard_strategies import Tensor
from plurax.sharding.spec import TensorSharding

Pins = Mapping[str, Sequence[TensorSharding | None]]
"""For some nodes, by path or parameter name, the shardings that `Node.pin` returns; None: any.

See `Graph.index` for the names."""

Within = Sequence[Sequence[int]]
"""For each node the indices of the strategies among which one is chosen."""

Copies = dict[tuple[TensorSharding, float], None]


@dataclasses.dataclass(frozen=True)
class Solution:
    """A strategy for each node of a graph.

    **Fields:**

    - `choice`: for each node the index of its strategy.
    - `parameters`: the sharding of each parameter, by name.
    - `strategies`: of each equation and boundary of a loop, by path and operator
      (`"14/3 dot_general"`, `"14/row0 row"`), as a plan says them: see `Node.pin`.
    - `cost`: in the unit of the costs: seconds, or bytes.
    - `bytes_sent`: by each device in one step, reductions over `data` not counted.
    - `bound`: no choice that treats equal layers alike costs less.
    - `variables`, `solve_seconds`: of the solver.
    """

    choice: tuple[int, ...]
    parameters: Mapping[str, TensorSharding]
    strategies: Pins
    cost: float
    bytes_sent: float
    bound: float = -math.inf
    variables: int = 0
    solve_seconds: float = 0.0

    @property
    def gap(self) -> float:
        """How far above the bound the cost is, relative to the cost; infinity without a bound."""
        return max(0.0, self.cost - self.bound) / self.cost if self.cost else 0.0


class Problem:
    """A graph with the cost of every strategy, and the strategies that pins and `within` leave.

    **Attributes:** `graph`, `costs`; `allowed`, for each node the indices of the strategies that
    are possible; `node_costs`, for each node the cost of each strategy.

    Raises `PlanError` for a pin of no node, or that is no strategy of it.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        pinned: Pins | None = None,
        within: Within | None = None,
    ) -> None:
        self.graph, self.costs = graph, costs
        self.node_costs = [self._costs_of(index, within) for index in range(len(graph.nodes))]
        self.allowed = [
            [choice for choice, cost in enumerate(each) if cost < math.inf]
            for each in self.node_costs
        ]
        for path, inputs in (pinned or {}).items():
            self._pin(path, tuple(inputs))
        self.reshard = functools.cache(self._reshard)
        self._sent = functools.cache(self._bytes)

    def _costs_of(self, index: int, within: Within | None) -> list[float]:
        """Return the costs of a node's strategies; infinity for those that are not `within`."""
        node = self.graph.nodes[index]
        choices = range(len(node.strategies)) if within is None else within[index]
        # What a strategy costs may depend on the others that there are.
        shown = dataclasses.replace(node, strategies=tuple(node.strategies[i] for i in choices))
        costs = [math.inf] * len(node.strategies)
        for choice in choices:
            costs[choice] = self.costs.strategy(self.graph, shown, node.strategies[choice])
        return costs

    def _pin(self, path: str, inputs: tuple[TensorSharding | None, ...]) -> None:
        try:
            index = self.graph.index(path)
        except KeyError:
            raise errors.pin_of_nothing(path, [node.path for node in self.graph.nodes]) from None
        node = self.graph.nodes[index]
        self.allowed[index] = [
            choice
            for choice in self.allowed[index]
            if len(found := node.pin(choice)) == len(inputs)
            and all(want in (None, one) for want, one in zip(inputs, found, strict=True))
        ]
        if not self.allowed[index]:
            strategies = [node.pin(choice) for choice in range(len(node.strategies))]
            some = "".join(f"\n  {one}" for one in strategies[:12])
            raise errors.PlanError(
                f"{path!r} cannot be computed from the inputs pinned for it, {tuple(inputs)}. It "
                f"can be from:{some}"
            )

    def _reshard(self, tensor: Tensor, source: TensorSharding, target: TensorSharding) -> float:
        return self.costs.reshard(self.graph.axes, tensor, source, target)

    def _bytes(self, tensor: Tensor, source: TensorSharding, target: TensorSharding) -> float:
        return BytesSent().reshard(self.graph.axes, tensor, source, target)

    # --- The cost of a choice ---------------------------------------------------------------------

    def needed(self, value: GraphValue, choice: Sequence[int]) -> tuple[TensorSharding, Copies]:
        """Return the sharding in which a value is produced, and the copies that readers need."""
        nodes = self.graph.nodes
        source = nodes[value.node].strategies[choice[value.node]].outputs[value.output]
        copies: Copies = {}
        for use in value.uses:
            target = nodes[use.node].strategies[choice[use.node]].inputs[use.input]
            if target != source:
                copies[target, use.trips] = None
        return source, copies

    def cost(self, choice: Sequence[int]) -> float:
        """Return the cost of a choice; infinity if it is not possible."""
        total = sum(self.node_costs[index][one] for index, one in enumerate(choice))
        for value in self.graph.values:
            source, copies = self.needed(value, choice)
            for target, trips in copies:
                total += trips * self.reshard(value.tensor, source, target)
        return total

    def bytes_sent(self, choice: Sequence[int]) -> float:
        """Return the bytes that each device sends in one step over the searched axes."""
        total = sum(
            node.trips * node.strategies[one].bytes_sent
            for node, one in zip(self.graph.nodes, choice, strict=True)
        )
        for value in self.graph.values:
            source, copies = self.needed(value, choice)
            for target, trips in copies:
                total += trips * self._sent(value.tensor, source, target)
        return total

    def solution(
        self,
        choice: Sequence[int],
        *,
        bound: float,
        variables: int,
        solve_seconds: float,
    ) -> Solution:
        """Return the solution that a choice is."""
        pairs = list(zip(self.graph.nodes, choice, strict=True))
        return Solution(
            tuple(choice),
            {node.path: node.pin(one)[0] for node, one in pairs if node.kind == "parameter"},
            {f"{node.path} {node.kind}": node.pin(one) for node, one in pairs if node.decides},
            self.cost(choice),
            self.bytes_sent(choice),
            bound,
            variables,
            solve_seconds,
        )
