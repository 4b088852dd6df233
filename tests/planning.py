"""Run the partitioner without executing anything; costs of a search in bytes."""

import dataclasses
import math
from unittest import mock

import jax
from jax.extend.core import Primitive

from plurax.partition.partitioner import partition
from plurax.partition.values import is_sharded_value
from plurax.plan import Plan
from plurax.planner.costs import parameter_bytes, reshard_steps
from plurax.planner.problem import Problem


def plan_partition(fun, partitioner, args):
    """The results of `partition`, with shapes in place of arrays, and what is sent."""
    with partitioner.planning() as records:
        return partition(fun, partitioner, args), records


def planned(fun, partitioner, args):
    """The facts of the results, and the collectives, of `plan_partition`.

    Functions are still traced to jaxprs, which is not what is tested here.
    """
    traced = partitioner.traced

    def refuse(self, *args, **params):
        raise AssertionError(f"{self.name} was applied while planning")

    refusing = mock.patch.object(Primitive, "bind", refuse)

    def trace(*args):
        refusing.stop()
        try:
            return traced(*args)
        finally:
            refusing.start()

    with mock.patch.object(partitioner, "traced", trace):
        refusing.start()
        try:
            out, records = plan_partition(fun, partitioner, args)
        finally:
            refusing.stop()
    assert not partitioner.records
    return facts(out), records


def facts(values):
    """What is known of `ShardedValue`s without their arrays, and the shards' shapes."""
    return jax.tree.map(
        lambda v: (v.shape, *v.kind, v.array.shape, v.dtype), values, is_leaf=is_sharded_value
    )


def memory_of(graph, plan=None, state_ratios=None):
    """For each node and strategy of a search's graph the bytes on one device through a step.

    Parameters, their gradients and their optimizer state; and what the forward pass keeps for the
    backward pass, of one microbatch.
    """
    plan, ratios = plan or Plan(), state_ratios or {}
    memory = [[0.0] * len(node.strategies) for node in graph.nodes]
    for index, node in enumerate(graph.nodes):
        if node.kind == "parameter":
            memory[index] = [
                parameter_bytes(graph, node.path, strategy.outputs[0], plan, ratios)
                for strategy in node.strategies
            ]
    for value in graph.values:
        if value.kept:
            for choice, strategy in enumerate(graph.nodes[value.node].strategies):
                held, sizes = strategy.outputs[value.output], graph.axes.sizes
                memory[value.node][choice] += held.shard_bytes(
                    value.tensor.shape, value.tensor.itemsize, sizes
                )
    return memory


@dataclasses.dataclass(frozen=True)
class BytesSent:
    """Costs in bytes that each device sends, for comparison with the collectives of a plan.

    **Fields:** `split_products`, whether matrix products must be split as far as they can be.
    Otherwise a step on replicated values sends nothing, and is the cheapest.

    Among equal bytes, fewer operations and less memory traffic cost less.
    """

    split_products: bool = True

    @property
    def scale(self):
        """A byte is sent in a nanosecond."""
        return 1e-3

    def strategy(self, graph, node, strategy):
        """Return the bytes sent within an operation."""
        if self.split_products and strategy.flops:
            least = min(one.flops for one in node.strategies)
            if strategy.flops > least:
                return math.inf
        extra = 1e-9 * strategy.flops + 1e-6 * strategy.traffic
        return node.trips * (strategy.bytes_sent + extra)

    def reshard(self, axes, tensor, source, target):
        """Return the bytes sent to reshard a value."""
        steps = reshard_steps(axes, tensor, source, target)
        return math.inf if steps is None else sum(step.bytes_sent for step in steps)


def bytes_sent(graph, solution):
    """The bytes that a device sends in one step over the searched axes."""
    problem, choice = Problem(graph, BytesSent()), solution.choice
    within = zip(graph.nodes, choice, strict=True)
    total = sum(node.trips * node.strategies[one].bytes_sent for node, one in within)
    for value in graph.values:
        for source, target, trips in problem.copies(value, choice):
            total += trips * problem.reshard(value.tensor, source, target)
    return total


def pins_of(graph, solution):
    """The strategies of equations and of boundaries of loops, as pins of another search."""
    pairs = zip(graph.nodes, solution.choice, strict=True)
    return {f"{node.path} {node.kind}": node.pin(one) for node, one in pairs if node.decides}
