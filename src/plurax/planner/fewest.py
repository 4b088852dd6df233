"""From a solution of the graph to a plan: shardings by name, and few strategies of equations.

The partitioner obeys the shardings of parameters and decides the rest by its own rules. Most of
what the solver chose it chooses too, so a plan needs to say only where it would not.
`fewest_strategies` finds these few: of the strategies for which a value is resharded it drops
halves, quarters and so on, as in delta debugging, and keeps a part dropped if one device then sends
and touches no more bytes, and computes no more. Each trial walks the equations with shapes alone.

    a transformer block on tensor=4, 327 strategies, for 28 of which a value is resharded
    without any       92,160 bytes more     needed
    first half        no more               dropped
    ...
    6 left

Source: Zeller and Hildebrandt 2002, "Simplifying and isolating failure-inducing input".
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from plurax import tree
from plurax.partition.annotation_resolver import NameRule
from plurax.partition.executors import FollowShapes
from plurax.partition.partitioner import Partitioner
from plurax.partition.pins import annotated, traced_as
from plurax.partition.values import ValueVersions
from plurax.planner.graph import Graph
from plurax.planner.origins import in_words, source_line
from plurax.planner.problem import SAID_BY_MODEL, Solution
from plurax.sharding.spec import TensorSharding
from plurax.strategies import Strategies, Strategy, entries_of


@dataclasses.dataclass(frozen=True)
class Moved:
    """What one device does in one microbatch: `bytes_sent`, `traffic`, the bytes it touches, and
    `flops`, the operations of its products."""

    bytes_sent: float
    traffic: float
    flops: float

    def exceeds(self, other: "Moved") -> bool:
        """Whether one of them is more, beyond rounding."""
        more = (self.bytes_sent - other.bytes_sent, self.traffic - other.traffic)
        moved = max(more) > 1e-9 * (other.bytes_sent + other.traffic)
        return moved or self.flops > other.flops * (1 + 1e-9)


class Walk:
    """Walks a traced gradient with shapes alone, under some shardings and strategies.

    **Arguments:** `graph` of the gradient; `named`, the shardings of named activations.
    """

    def __init__(self, graph: Graph, named: NameRule | None = None) -> None:
        self._jaxpr, self._consts = graph.traced.jaxpr, graph.traced.consts
        self._axes, self._named, self._frozen = graph.axes, named, graph.frozen
        self._params = tree.named_leaves(graph.args[0])
        self._others = [jax.tree.leaves(arg) for arg in graph.args[1:]]

    def moved(
        self, shardings: Mapping[str, TensorSharding], strategies: Sequence[Strategy]
    ) -> Moved:
        """Return what one device sends and touches; gradients come to their parameters' sharding.

        `shardings` has that of each parameter, by its path.
        """
        partitioner = Partitioner(self._axes, self._named)
        spec = partitioner.context.spec
        goals = [one for path, one in shardings.items() if path not in self._frozen]
        inputs = [
            spec(leaf.shape, leaf.dtype, shardings[path], is_param=True)
            for path, leaf in self._params.items()
        ]
        for leaves, varying in zip(self._others, (False, True), strict=True):
            inputs += [
                spec(leaf.shape, leaf.dtype, TensorSharding.replicated(len(leaf.shape)), varying)
                for leaf in leaves
            ]
        jaxpr = annotated(self._jaxpr, strategies)
        # The results are totals, of which gradients come last, and then the model state.
        states = len(self._others[0])
        before = len(jaxpr.outvars) - states - len(goals)
        wanted = [*[None] * before, *goals, *[None] * states]
        with partitioner.planning() as records:
            values = [ValueVersions(value) for value in inputs]
            results = partitioner.evaluate(jaxpr, self._consts, values, wanted)
            partitioner.finish(results, wanted)
            executor = partitioner.executor
        assert isinstance(executor, FollowShapes)
        sent = sum(one.bytes_sent * (one.trips or 1) for one in records)
        return Moved(sent, executor.traffic, executor.flops)

    def pinned(self, strategies: Sequence[Strategy]) -> Strategies | None:
        """Return strategies as a plan has them, or None if there are none."""
        return Strategies(traced_as(self._jaxpr), tuple(strategies)) if strategies else None


def strategies_of(graph: Graph, solution: Solution) -> list[Strategy]:
    """Return the strategies of all equations and boundaries of loops, as a plan says them."""
    strategies = []
    for index, (node, choice) in enumerate(zip(graph.nodes, solution.choice, strict=True)):
        if not node.decides:
            continue
        eqn = graph.equations[node.path.rpartition("/")[0] if node.boundary else node.path]
        if eqn.primitive.name in SAID_BY_MODEL:
            continue
        shardings = node.pin(choice)
        inputs = tuple(entries_of(one.dims, one.partial) for one in shardings)
        if any(one.partial for one in shardings) and not node.boundary:
            # Zeros beside a partial sum, which a mask puts there, become one themselves.
            inputs = tuple(
                one if (index, slot) in graph.reads else () for slot, one in enumerate(inputs)
            )
        at = in_words(graph, index) if node.boundary else source_line(graph, node.path)
        strategies.append(Strategy(f"{node.path} {eqn.primitive.name}", inputs, at))
    return strategies


def fewest_strategies(
    walk: Walk,
    shardings: Mapping[str, TensorSharding],
    strategies: Sequence[Strategy],
    moving: Collection[str],
) -> list[Strategy]:
    """Return those strategies without which a device would send, touch or compute more.

    `moving` are the paths of equations for which some value is resharded: the partitioner mostly
    computes the others as their operands come, so their strategies are left out at first.
    """
    limit = walk.moved(shardings, strategies)
    likely = [one for one in strategies if one.path in moving]
    now = walk.moved(shardings, likely)

    def no_worse(kept: Sequence[Strategy]) -> bool:
        nonlocal now
        moved = walk.moved(shardings, kept)
        if moved.exceeds(now) and moved.exceeds(limit):
            return False
        now = moved
        return True

    few = minimal(likely, no_worse)
    if not now.exceeds(limit):
        return few
    others = [one for one in strategies if one.path not in moving]
    every = [*others, *likely]
    return minimal(every, lambda kept: not walk.moved(shardings, kept).exceeds(limit))


def minimal(items: list[Any], enough: Callable[[Sequence[Any]], bool]) -> list[Any]:
    """Return items of which none can be dropped alone, given that all together are `enough`.

    >>> minimal(list(range(100)), lambda kept: {7, 63} <= set(kept))
    [7, 63]
    """
    size = len(items)
    while size:
        start = 0
        while start < len(items):
            kept = items[:start] + items[start + size :]
            if enough(kept):
                items = kept
            else:
                start += size
        size = math.ceil(size / 2) if size > 1 else 0
    return items


def rules_of(shardings: Mapping[str, TensorSharding]) -> dict[str, tuple[Any, ...]]:
    """Return one rule for each parameter that is split, by its path."""
    return {
        path: entries_of(sharding.dims, frozenset())
        for path, sharding in shardings.items()
        if sharding.axes
    }
