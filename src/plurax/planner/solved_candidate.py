"""The shardings found for a candidate: what its solution says of seconds, bytes and parts."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from plurax.plan import Plan
from plurax.planner.costs import TimeCosts
from plurax.planner.fewest import Walk
from plurax.planner.graph import Graph, Node
from plurax.planner.parts import parts_of
from plurax.planner.problem import Pins, Problem, Solution
from plurax.planner.profile import SolutionProfile, profile_of
from plurax.planner.shard_strategies import ShardStrategy
from plurax.sharding.spec import TensorSharding
from plurax.strategies import Strategy


@dataclasses.dataclass(frozen=True)
class Sharded:
    """The shardings found for a candidate.

    **Fields:** `plan`, the candidate solved; `batch_size`; `shardings` of the parameters, by path;
    `strategies` of all equations; `graph` and `solution`, from which they come, with its `costs`
    and `pins`; `walk`, over the equations; `depth`, the layers of a stack, or 0.
    """

    plan: Plan
    batch_size: int
    shardings: dict[str, TensorSharding]
    strategies: list[Strategy]
    graph: Graph
    solution: Solution
    costs: TimeCosts
    pins: Pins
    walk: Walk
    depth: int

    @property
    def rows(self) -> float:
        """The rows of a step on the device that has the most."""
        return self.rows_of_a_microbatch * self.plan.most_microbatches

    @property
    def rows_of_a_microbatch(self) -> int:
        """The rows of a microbatch on one device."""
        return -(-self.batch_size // self.plan.parts)

    @property
    def splits_products(self) -> bool:
        """Whether the devices of `tensor` share any matrix product."""
        return any(
            one.flops < max(other.flops for other in node.strategies)
            for node, one in self._chosen()
        )

    @functools.cached_property
    def profile(self) -> SolutionProfile:
        """Where the seconds and the bytes of one microbatch are."""
        costs, times = dataclasses.replace(self.costs, near=True), self.plan.most_microbatches
        return profile_of(self.graph, self.solution, costs, times, self.depth)

    @functools.cached_property
    def starts(self) -> float:
        """The seconds in which the products of one microbatch start, whatever its rows."""
        products = sum(node.trips for node, one in self._chosen() if one.product is not None)
        return self.costs.machine.start_seconds * products / self.plan.most_microbatches

    @functools.cached_property
    def seconds_sent(self) -> float:
        """The seconds of the collectives over `tensor` in one step."""
        alone = [dataclasses.replace(one, sent=()) for _, one in self._chosen()]
        nodes = self.graph.nodes
        without = sum(map(self.costs.strategy, itertools.repeat(self.graph), nodes, alone))
        return max(0.0, self.solution.cost - without)

    @property
    def moving(self) -> set[str]:
        """The paths of nodes that read some value in another sharding than it is produced in."""
        problem, nodes = Problem(self.graph, self.costs), self.graph.nodes
        paths = set()
        for value in self.graph.values:
            copies = problem.copies(value, self.solution.choice)
            source = next((source for source, _, _ in copies), None)
            for use in value.uses if copies else ():
                strategy = nodes[use.node].strategies[self.solution.choice[use.node]]
                if strategy.inputs[use.input] != source:
                    paths.add(nodes[use.node].path)
        return paths

    def parameter_seconds(self, costs: TimeCosts) -> tuple[float, float]:
        """Return the seconds of the parameters' update, and of their gradients over `data`."""
        every = [
            costs.parameter(self.graph, node.path, one.outputs[0])
            for node, one in self._chosen()
            if node.kind == "parameter"
        ]
        return sum(update for update, _ in every), sum(reduction for _, reduction in every)

    def updates(self, costs: TimeCosts) -> list[float]:
        """Return the seconds of the parameters of each part between stage boundaries."""
        seconds = [0.0] * len(self.profile.parts)
        every = zip(parts_of(self.graph), self._chosen(), strict=True)
        for part, (node, one) in every:
            if node.kind == "parameter":
                seconds[part] += sum(costs.parameter(self.graph, node.path, one.outputs[0]))
        return seconds

    def _chosen(self) -> Iterator[tuple[Node, ShardStrategy]]:
        for node, choice in zip(self.graph.nodes, self.solution.choice, strict=True):
            yield node, node.strategies[choice]
