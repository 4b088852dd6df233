"""What the solver is given and what it returns: a graph with its costs in numbers, a solution.

A choice gives each node one of its strategies, by index. Its cost is

    sum over nodes of the cost of the chosen strategy
    + sum over values and over the shardings that its readers need, each counted once,
      of the cost of the reshard from the sharding in which it is produced

so that two readers of one sharding share one copy. `Problem.cost` is this sum.
"""

import dataclasses
import difflib
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence

from plurax import errors
from plurax.jaxpr.compat import ANNOTATIONS
from plurax.planner.costs import TimeCosts
from plurax.planner.graph import Graph, GraphValue, Use
from plurax.planner.origins import in_words
from plurax.sharding.spec import TensorSharding
from plurax.strategies import entries_of, spelled

Pins = Mapping[str, Sequence[TensorSharding | None]]
"""For some nodes, by path or parameter name, the shardings that `Node.pin` returns; None: any.

See `Graph.index` for the names."""

Within = Sequence[Sequence[int]]
"""For each node the indices of the strategies among which one is chosen."""

SAID_BY_MODEL = ANNOTATIONS | {"shard_map"}
"""Operators by which a model itself says shardings."""

Copies = dict[tuple[TensorSharding, float], None]


@dataclasses.dataclass(frozen=True)
class Solution:
    """A strategy for each node of a graph.

    **Fields:**

    - `choice`: for each node the index of its strategy.
    - `parameters`: the sharding of each parameter, by name.
    - `cost`: in the unit of the costs: seconds, or bytes.
    - `bound`: no choice that treats equal layers alike costs less.
    - `variables`: of the integer program.
    """

    choice: tuple[int, ...]
    parameters: Mapping[str, TensorSharding]
    cost: float
    bound: float
    variables: int


def written(inputs: Sequence[TensorSharding | None]) -> str:
    """Return the inputs of a strategy as a plan's file has them."""
    return json.dumps(
        spelled(tuple(entries_of(one.dims, one.partial) if one else () for one in inputs))
    )


class Problem:
    """A graph with the cost of every strategy, and the strategies that pins and `within` leave.

    With `by_rules` a plan says the shardings of parameters and no strategies of equations. The
    partitioner then computes an equation as its operands come, and nothing else is possible:

        x (8, 2048, 512) replicated, w (512, 2048) by columns    x @ w by columns
        x replicated, w replicated                               not by rows of x, for no reason
        h (8, 2048, 2048) by columns, w (2048, 512) by rows      a partial sum: neither is moved

    **Attributes:** `graph`, `costs`; `allowed`, for each node the indices of the strategies that
    are possible; `node_costs`, for each node the cost of each strategy.

    Raises `PlanError` for a pin of no node, or that is no strategy of it.
    """

    def __init__(
        self,
        graph: Graph,
        costs: TimeCosts,
        pinned: Pins | None = None,
        within: Within | None = None,
        *,
        by_rules: bool = False,
    ) -> None:
        self.graph, self.costs, self.by_rules = graph, costs, by_rules
        self.node_costs = [self._costs_of(index, within) for index in range(len(graph.nodes))]
        self.allowed = [
            [choice for choice, cost in enumerate(each) if cost < math.inf]
            for each in self.node_costs
        ]
        for path, inputs in (pinned or {}).items():
            self._pin(path, tuple(inputs))
        self._operands = [*self._operands_by_rules()] if by_rules else [()] * len(graph.nodes)
        self.reshard = functools.cache(functools.partial(costs.reshard, graph.axes))

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
            raise errors.PlanError(
                f"the strategy pinned for {path!r} belongs to no equation and no parameter of this "
                f"step.{errors.did_you_mean(path, [node.path for node in self.graph.nodes])}"
            ) from None
        node = self.graph.nodes[index]
        self.allowed[index] = [
            choice
            for choice in self.allowed[index]
            if len(found := node.pin(choice)) == len(inputs)
            and all(want in (None, one) for want, one in zip(inputs, found, strict=True))
        ]
        if not self.allowed[index]:
            every = list(
                {written(node.pin(choice)): choice for choice in range(len(node.strategies))}
            )
            near = difflib.get_close_matches(written(inputs), every, n=12, cutoff=0)
            some = "".join(f"\n  {one}" for one in near)
            raise errors.PlanError(
                f"the plan pins {path!r}, {in_words(self.graph, index)}, to the inputs "
                f"{written(inputs)}, from which it cannot be computed over `tensor`. Of the "
                f"{len(every)} inputs from which it can, these are nearest:{some}"
            )

    def reaches(
        self, value: GraphValue, use: Use, source: TensorSharding, target: TensorSharding
    ) -> bool:
        """Whether a value that is produced in one sharding may be read in another.

        By rules what follows from parameters alone is read as it comes, if it can be.
        """
        if source == target or value.varying or use.input not in self._operands[use.node]:
            return True
        strategies = self.graph.nodes[use.node].strategies
        return all(one.inputs[use.input] != source for one in strategies)

    def follows(self, node: int, choice: int) -> list[tuple[int, TensorSharding]] | None:
        """Return the inputs of which, by rules, one has to come as the strategy takes it.

        None where that does not matter. What a loop carries is not split for the sake of what an
        iteration makes of it.
        """
        graph, operands = self.graph, self._operands[node]
        inputs = graph.nodes[node].strategies[choice].inputs
        split = [i for i, one in enumerate(inputs) if any(one.dims) and (node, i) in graph.reads]
        if not split or not operands:
            return None
        coming = [(i, inputs[i]) for i in operands if i in split]
        return coming[:1] if graph.nodes[node].kind == "carry" else coming

    def _operands_by_rules(self) -> Iterator[tuple[int, ...]]:
        """Yield for each node the inputs by which the partitioner decides how to compute it.

        They depend on the batch or on parameters. Constants are created in any sharding, and so is
        what is broadcast, what a loop makes of a constant, and what is computed of these alone.
        There are none where a parameter or the model itself decides.
        """
        graph = self.graph
        created: set[int] = set()
        entries = {value.node: math.prod(value.tensor.shape) for value in graph.values}

        def guides(value: GraphValue | None) -> bool:
            if value is None or value.node in created:
                return False
            if graph.nodes[value.node].kind == "carry" and not value.output:
                return guides(graph.reads.get((value.node, 0)))  # as the loop starts
            return value.varying or value.node in graph.of_parameters

        for index, node in enumerate(graph.nodes):
            decided = node.decides and node.kind not in SAID_BY_MODEL
            places = range(len(node.strategies[0].inputs) if decided else 0)
            operands = tuple(i for i in places if guides(graph.reads.get((index, i))))
            repeats = node.kind == "broadcast_in_dim" and any(
                entries.get(index) != math.prod(graph.reads[index, i].tensor.shape)
                for i in operands
            )
            if decided and (repeats or not operands):
                created.add(index)
            yield operands

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
