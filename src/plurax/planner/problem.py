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
from collections.abc import Mapping, Sequence

from plurax import errors
from plurax.jaxpr.compat import ANNOTATIONS
from plurax.planner.costs import TimeCosts
from plurax.planner.graph import Graph, GraphValue
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

Copies = dict[tuple[TensorSharding, TensorSharding, float], int]
"""Reshards, from and to a sharding, and how often each is done in a step, with their readers."""


@dataclasses.dataclass(frozen=True)
class Ticks:
    """How the seconds of a step follow from those of its parts, where devices run side by side.

    A tick takes as long as the longest of what its devices do. Two stages of two parts each:

        accounts   forward of stage 0, of stage 1, backward of each, update of each      0 .. 5
        ticks      once F of stage 0; 3 times B of stage 0 beside F of stage 1; ...

    **Fields:** `accounts`, for each node that of its seconds; `every`, how often there is a tick,
    and the accounts of each device in it, with the share of its seconds.
    """

    accounts: Sequence[int]
    every: Sequence[tuple[float, Sequence[Sequence[tuple[int, float]]]]]

    def seconds(self, amounts: Sequence[float]) -> float:
        """Return the seconds of a step by those of each account."""
        return sum(
            count * max(sum(share * amounts[one] for one, share in device) for device in devices)
            for count, devices in self.every
        )


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

    **Attributes:** `graph`, `costs`; `reshard`, the cost of a reshard; `ticks`, where the cost of a
    choice is no sum.

    Raises `PlanError` for a pin of no node, or that is no strategy of it.
    """

    def __init__(
        self,
        graph: Graph,
        costs: TimeCosts,
        pinned: Pins | None = None,
        within: Within | None = None,
        ticks: Ticks | None = None,
    ) -> None:
        self.graph, self.costs, self._within, self.ticks = graph, costs, within, ticks
        for path, inputs in (pinned or {}).items():
            self._pin(path, tuple(inputs))
        self.reshard = functools.cache(functools.partial(costs.reshard, graph.axes))

    @functools.cached_property
    def node_costs(self) -> list[list[float]]:
        """For each node the cost of each strategy; infinity for those that are not possible."""
        return [self._costs_of(index, self._within) for index in range(len(self.graph.nodes))]

    @functools.cached_property
    def allowed(self) -> list[list[int]]:
        """For each node the indices of the strategies that are possible."""
        return [
            [choice for choice, cost in enumerate(each) if cost < math.inf]
            for each in self.node_costs
        ]

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

    # --- The cost of a choice ---------------------------------------------------------------------

    @functools.cached_property
    def shared(self) -> Mapping[tuple[int, int], list[GraphValue]]:
        """By node and output the values that it produces: as it is, and as recomputed parts read
        it, which find a partial sum reduced as it was reduced outside."""
        every: dict[tuple[int, int], list[GraphValue]] = {}
        for value in self.graph.values:
            every.setdefault((value.node, value.output), []).append(value)
        return every

    def copies(self, value: GraphValue, choice: Sequence[int]) -> Copies:
        """Return the reshards of a value that its readers need, each once."""
        copies = self._all_copies(value, choice)
        for other in self.shared[value.node, value.output]:
            if other is value or not copies or not next(iter(copies))[0].partial:
                break
            for one in self._all_copies(other, choice):
                copies.pop(one, None)
        return copies

    def _all_copies(self, value: GraphValue, choice: Sequence[int]) -> Copies:
        nodes = self.graph.nodes
        source = nodes[value.node].strategies[choice[value.node]].outputs[value.output]
        copies: Copies = {}
        for use in value.uses:
            strategy = nodes[use.node].strategies[choice[use.node]]
            for first, second in strategy.reshards(use.input, source):
                copies.setdefault((first, second, use.trips), use.node)
        return copies

    def cost(self, choice: Sequence[int]) -> float:
        """Return the cost of a choice; infinity if it is not possible."""
        amounts = [self.node_costs[index][one] for index, one in enumerate(choice)]
        for value in self.graph.values:
            for (source, target, trips), reader in self.copies(value, choice).items():
                amounts[reader] += trips * self.reshard(value.tensor, source, target)
        if self.ticks is None:
            return sum(amounts)
        accounts = [0.0] * (1 + max(self.ticks.accounts))
        for account, amount in zip(self.ticks.accounts, amounts, strict=True):
            accounts[account] += amount
        return self.ticks.seconds(accounts)
