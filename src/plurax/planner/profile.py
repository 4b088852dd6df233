"""Where the seconds and the bytes of a solved graph are: in layers or around them, ahead or back.

A solution is of one device's microbatch of the whole model. Stages of a pipeline share its layers;
the embedding and the head stay whole on the first and the last stage. A tick of a pipeline takes as
long as its slowest action, so forward and backward count apart.

    GPT of 24 layers, tensor=4, 1 row in each of 8 microbatches, milliseconds of one microbatch
                 forward    backward    kept
    embedding        1           4
    24 layers       96         192      1.2 GB, 50 MB each
    head             5          10      0.1 GB
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from plurax.planner.costs import TimeCosts
from plurax.planner.graph import Graph
from plurax.planner.parts import parts_of
from plurax.planner.problem import Problem, Solution


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of a model: `forward` and `backward`, its seconds for one microbatch; `kept`, the
    bytes that its forward pass keeps for its backward pass; `update`, the seconds of its parameters
    in a step, and of their gradients over `data`, if its stage alone has them."""

    forward: float
    backward: float
    kept: float
    update: float = 0.0

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    def times(self, factor: float) -> "Share":
        """Return the share of a microbatch that is so much larger."""
        passes = self.forward * factor, self.backward * factor
        return Share(*passes, self.kept * factor, self.update)


@dataclasses.dataclass(frozen=True)
class SolutionProfile:
    """Where seconds and bytes of a solution are.

    **Fields:** `layers`, all of them together; `embedding` and `head`, what is before and after
    them; `once`, seconds of a step whatever its microbatches, the update of parameters aside;
    `copies`, bytes of what is computed from parameters alone and kept, such as their copies in
    bfloat16; `parts`, of a model that stage boundaries cut, each of them, which `layers` are
    together.
    """

    layers: Share
    embedding: Share
    head: Share
    once: float
    copies: float
    parts: tuple[Share, ...] = ()

    @property
    def seconds(self) -> float:
        """Of one microbatch, forward and backward."""
        return self.layers.seconds + self.embedding.seconds + self.head.seconds

    @property
    def kept(self) -> float:
        """The bytes kept of one microbatch."""
        return self.layers.kept + self.embedding.kept + self.head.kept


def profile_of(
    graph: Graph, solution: Solution, costs: TimeCosts, microbatches: int, depth: int
) -> SolutionProfile:
    """Return the profile of a solution.

    `depth` is the number of layers of a stack, or 0: then all of a model is in layers, as the parts
    of a model with boundaries are.
    """
    seconds: dict[Any, float] = defaultdict(float)
    parts = _parts(graph, microbatches, depth)
    cut = [] if depth else parts_of(graph)
    once = 0.0
    for index, trips, cost in _node_seconds(graph, solution, costs):
        node = graph.nodes[index]
        if node.kind == "parameter":
            continue  # gradients over `data` and updates are of a candidate, not of a solution
        if trips < microbatches:
            once += cost
        else:
            for part in (parts[index], *cut[index : index + 1]):
                seconds[part, node.backward] += cost / microbatches
    kept: dict[Any, float] = defaultdict(float)
    copies = 0.0
    for value in graph.values:
        if not value.kept:
            continue
        node = graph.nodes[value.node]
        sharding = node.strategies[solution.choice[value.node]].outputs[value.output]
        size = sharding.shard_bytes(value.tensor.shape, value.tensor.itemsize, graph.axes.sizes)
        if value.varying:
            for part in (parts[value.node], *cut[value.node : value.node + 1]):
                kept[part] += size
        else:
            copies += size
    layers, embedding, head, *every = (
        Share(seconds[part, False], seconds[part, True], kept[part])
        for part in ("layers", "embedding", "head", *range(1 + max(cut, default=0)))
    )
    several = tuple(every) if len(every) > 1 else ()
    return SolutionProfile(layers, embedding, head, once, copies, several)


def _parts(graph: Graph, microbatches: int, depth: int) -> list[str]:
    """Return for each node the part of the model that it is of.

    Layers are the nodes in the loop over them, and those of arrays with a row for each layer. What
    is before that loop is the embedding; what is after the loop in which the backward pass goes
    through the layers is its backward pass.
    """
    if not depth:
        return ["layers"] * len(graph.nodes)
    trips = microbatches * depth
    loop = [i for i, node in enumerate(graph.nodes) if depth > 1 and node.trips % trips == 0]
    first, last = (loop[0], loop[-1]) if loop else (0, len(graph.nodes))
    parts = ["head" if first <= i <= last else "embedding" for i in range(len(graph.nodes))]
    for index in loop:
        parts[index] = "layers"
    for value in graph.values:
        if value.tensor.shape[:1] == (depth,) and value.tensor.shape[1:]:
            for index in (value.node, *(use.node for use in value.uses)):
                parts[index] = "layers"
    return parts


def _node_seconds(
    graph: Graph, solution: Solution, costs: TimeCosts
) -> Iterator[tuple[int, float, float]]:
    """Yield nodes, how often they run, and their seconds; reshards are of the node that reads."""
    problem = Problem(graph, costs)
    for index, choice in enumerate(solution.choice):
        node = graph.nodes[index]
        yield index, node.trips, costs.strategy(graph, node, node.strategies[choice])
    for value in graph.values:
        for source, target, trips in problem.copies(value, solution.choice):
            cost = trips * problem.reshard(value.tensor, source, target)
            reader = next(use.node for use in value.uses if use.trips == trips)
            yield reader, trips, cost
