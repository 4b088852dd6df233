"""The shardings of a candidate and its seconds: solve its graph, and say the solution as a plan.

The graph of one device's microbatch is solved on the machine, and the solution becomes rules for
parameters and the few strategies of equations that the partitioner would not choose by itself.
That takes a second, so candidates share solutions: one for each size of `tensor`, remat policy and
four-fold range of rows in a microbatch. The seconds of another candidate follow from it:

    solved      tensor=4, 2 rows in each of 8 microbatches: 800 ms without parameters, 60 ms with
    candidate   data=2, pipeline=2, tensor=4, 4 rows in each of 2 microbatches
    rows        half as many on each device: 400 ms; parameters with their gradients over `data`
                are computed anew: 70 ms; both are of two stages, with a bubble of 1/2
                400 ms / 2 x 1.5 + 70 ms / 2 = 335 ms
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from jaxtyping import PyTree

from plurax import errors
from plurax.execute.placement import leading_dim
from plurax.plan import Plan
from plurax.planner import exact, propagate, recursive
from plurax.planner.candidates import bubble
from plurax.planner.costs import Costs, memory_of
from plurax.planner.fewest import (
    Walk,
    fewest_strategies,
    rules_of,
    strategies_of,
)
from plurax.planner.graph import Graph, Node, graph_of_step
from plurax.planner.problem import Pins, Solution
from plurax.planner.shard_strategies import ShardStrategy
from plurax.sharding.rules import Rules
from plurax.sharding.spec import TensorSharding
from plurax.strategies import Strategy
from plurax.task import Task

SolverName = Literal["exact", "recursive", "propagate"]

SOLVERS = {"exact": exact.solve, "recursive": recursive.solve, "propagate": propagate.solve}


@dataclasses.dataclass(frozen=True)
class Sharded:
    """The shardings found for a candidate.

    **Fields:** `plan`, the candidate solved; `batch_size`; `shardings` of the parameters, by path;
    `strategies` of all equations; `graph` and `solution`, from which they come, with its `costs`
    and `pins`; `walk`, over the equations.
    """

    plan: Plan
    batch_size: int
    shardings: dict[str, TensorSharding]
    strategies: list[Strategy]
    graph: Graph
    solution: Solution
    costs: Costs
    pins: Pins
    walk: Walk

    @property
    def rows(self) -> float:
        """The rows of a step on one device."""
        return self.batch_size / self.plan.data

    @property
    def splits_products(self) -> bool:
        """Whether the devices of `tensor` share any matrix product."""
        return any(
            one.flops < max(other.flops for other in node.strategies)
            for node, one in self._chosen()
        )

    @functools.cached_property
    def seconds(self) -> float:
        """The seconds of a step without what parameters cost by themselves."""
        return self.solution.cost - self.parameter_seconds(self.costs)

    @functools.cached_property
    def seconds_sent(self) -> float:
        """The seconds of the collectives over `tensor` in one step."""
        alone = [dataclasses.replace(one, all_reduces=()) for _, one in self._chosen()]
        nodes = self.graph.nodes
        without = sum(map(self.costs.strategy, itertools.repeat(self.graph), nodes, alone))
        return max(0.0, self.solution.cost - without)

    def parameter_seconds(self, costs: Costs) -> float:
        """Return the seconds of the parameters' gradients over `data` and of their update."""
        return sum(
            costs.strategy(self.graph, node, one)
            for node, one in self._chosen()
            if node.kind == "parameter"
        )

    def _chosen(self) -> Iterator[tuple[Node, ShardStrategy]]:
        for node, choice in zip(self.graph.nodes, self.solution.choice, strict=True):
            yield node, node.strategies[choice]


class TensorSearch:
    """Finds the shardings of candidates of one task.

    **Arguments:** `task`; `batch`, as `jax.ShapeDtypeStruct`s; `costs`, a function from a candidate
    to what its solver minimises; `ratios`, for each parameter the bytes of its optimizer state by
    its own; `solver`, its name.
    """

    def __init__(
        self,
        task: Task,
        batch: PyTree,
        costs: Callable[[Plan], Costs],
        ratios: Mapping[str, float] | None = None,
        solver: SolverName = "exact",
    ) -> None:
        self._ratios = ratios or {}
        self._task, self._batch, self._costs = task, batch, costs
        self._solve: Callable[..., Solution] = SOLVERS[solver]
        self._batch_size = leading_dim(batch)
        self._found: dict[Any, Sharded] = {}

    def plan(self, plan: Plan, *, fewest: bool = False) -> Plan:
        """Return a candidate with the best shardings over `tensor`.

        With `fewest`, only those strategies of equations that make a difference. Raises `PlanError`
        if nothing is worth splitting.
        """
        if plan.tensor == 1:
            return plan
        found = self.sharded(plan)
        rules = {**dict(plan.rules), **rules_of(found.shardings)}
        if not found.splits_products:
            raise errors.search_splits_nothing(plan.sizes_text())
        strategies = found.strategies
        if plan.pipeline > 1:
            strategies = []
        elif fewest:
            strategies = fewest_strategies(found.walk, found.shardings, strategies)
        pinned = found.walk.pinned(strategies)
        return dataclasses.replace(plan, shardings=rules, strategies=pinned)

    def explain(self, plan: Plan, name: str) -> str:
        """Return how a parameter is split under a candidate, and what the best step costs if it
        is split otherwise.

        Raises `PlanError` if there is no such parameter.
        """
        found = self.sharded(plan)
        if name not in found.graph.parameters:
            raise errors.pin_of_nothing(name, list(found.graph.parameters))
        tensor, chosen = found.graph.parameters[name], found.shardings[name]
        node = found.graph.nodes[found.graph.index(name)]
        lines = [f"{name} {tensor.shape} is {_text(chosen)} under {plan.sizes_text()}"]
        for strategy in node.strategies:
            (other,) = strategy.outputs
            if other == chosen:
                continue
            solution = self._solve(found.graph, found.costs, {**found.pins, name: (other,)})
            more = solution.cost - found.solution.cost
            lines.append(f"  {_text(other)}: {more / found.solution.cost:+.1%}, {more:+.3g} s")
        return "\n".join(lines)

    def splits(self, plan: Plan) -> bool:
        """Whether the devices of `tensor`, if there are several, share any matrix product."""
        return plan.tensor == 1 or self.sharded(plan).splits_products

    def seconds(self, plan: Plan) -> float:
        """Return the seconds of a step under a candidate, from a solution that it shares."""
        found = self.sharded(plan)
        rows = found.seconds * (self._batch_size / plan.data) / found.rows
        update = found.parameter_seconds(self._costs(plan))
        return (rows * (1 + bubble(plan)) + update) / plan.pipeline

    def memory(self, plan: Plan) -> float:
        """Return the bytes that a device holds under a candidate, temporaries aside.

        A pipeline keeps as many microbatches as it has stages, each of one stage.
        """
        found, held = self.sharded(plan), [0.0, 0.0]
        each = memory_of(found.graph, plan, self._ratios)
        for node, own, choice in zip(found.graph.nodes, each, found.solution.choice, strict=True):
            held[node.kind == "parameter"] += own[choice]
        rows = self._batch_size / plan.data / plan.microbatches
        kept = held[0] * rows / (found.rows / found.plan.microbatches)
        kept *= min(plan.pipeline, plan.microbatches)
        # ZB-H1 keeps what the gradients of the weights need after those of the inputs are done.
        kept *= 1.5 if plan.schedule == "zb-h1" else 1
        return (held[1] + kept) / plan.pipeline

    def sent_for_a_row(self, plan: Plan) -> float:
        """Return the seconds of the collectives over `tensor` for one row of a step."""
        found = self.sharded(plan)
        return found.seconds_sent / found.rows

    def sharded(self, plan: Plan) -> Sharded:
        """Return the solution for a candidate, found now or shared with another."""
        rows = self._batch_size / plan.data / plan.microbatches
        key = (plan.tensor, plan.remat, round(math.log(rows, 4)))
        if key not in self._found:
            # Stages are not in the graph: it is of the whole model.
            self._found[key] = self._search(dataclasses.replace(plan, pipeline=1, schedule="1f1b"))
        return self._found[key]

    def _search(self, plan: Plan) -> Sharded:
        graph = graph_of_step(self._task, plan, self._batch)
        costs = self._costs(plan)
        rules = Rules(plan.rules, graph.axes.mesh)
        given = {path: rules.find(path, one.shape) for path, one in graph.parameters.items()}
        pins = {path: (sharding,) for path, sharding in given.items() if sharding is not None}
        solution = self._solve(graph, costs, pins)
        strategies = strategies_of(graph, solution)
        shardings = dict(solution.parameters)
        walk = Walk(graph, rules.find)
        return Sharded(
            plan, self._batch_size, shardings, strategies, graph, solution, costs, pins, walk
        )


def _text(sharding: TensorSharding) -> str:
    """Return a sharding as its entries, or "replicated"."""
    return repr(sharding).removeprefix("TensorSharding") if sharding.axes else "replicated"
