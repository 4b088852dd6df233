"""One layer of a found plan as a small graph: what is computed on which shards, and what is sent.

A solution of the graph of a step has a sharding for each of hundreds of equations. What a reader
wants to see is the forward pass of one layer, in about a dozen boxes:

    a matrix product                                   a box
    equations that follow each other in one function,  a box, where they are split alike and nothing
                                                       is sent between them
    reshapes, casts and the like                       in the box before or after them
    a parameter, the layer's input and its output      a box each
    masks, keys, what only the backward pass reads     left out, unless something is sent for them

    input (8, 128, 512)
      |--------------------.
    normalised             |
    product                |     with query_key_value, split in dim 1
    ...                    |
    product                |     with attention_out, split in dim 0; the result is partial
      | all-reduce 3.0 MiB |
    add  <-----------------'

The layer is the body of the forward loop with the most work; without loops, the first of layers
that are equal; and if none are, the whole forward pass.
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plurax.jaxpr.compat import INLINED, is_transposed
from plurax.partition.pins import enclosing
from plurax.planner.costs import reshard_steps
from plurax.planner.equal_layers import classes_of
from plurax.planner.graph import Graph, GraphValue, Use
from plurax.planner.origins import VIEWS, origin, source_line
from plurax.planner.shard_strategies import ShardStrategy, Tensor
from plurax.planner.solved_candidate import Sharded
from plurax.sharding.spec import TensorSharding

Sent = tuple[tuple[str, float], ...]
"""Collectives by kind, with the bytes that a device sends in one run of the layer."""


@dataclasses.dataclass(frozen=True)
class Box:
    """Some equations of a layer, one of its parameters, its input or its output.

    **Fields:** `kind`: `"parameter"`, `"input"`, `"output"`, `"product"` or `"other"`; `name` of a
    parameter; `operators` that are computed; `where`, a line of the model's code; `tensor` and
    `sharding` of the result; `sent` within the equations.
    """

    kind: str
    name: str
    operators: tuple[str, ...]
    where: str
    tensor: Tensor
    sharding: TensorSharding
    sent: Sent = ()


@dataclasses.dataclass(frozen=True)
class Edge:
    """A value that one box computes and another reads, by their indices, and what is `sent` for it.

    If it is `shared`, another edge has what is sent: the boxes read one copy.
    """

    source: int
    target: int
    sent: Sent = ()
    shared: bool = False


@dataclasses.dataclass(frozen=True)
class LayerGraph:
    """One layer of a found plan: `boxes` in the order of evaluation, and `edges` between them.

    If it is `whole`, the network has no equal layers, and this is all of it.
    """

    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    whole: bool

    @property
    def bytes_sent(self) -> float:
        """The bytes that a device sends in one run: the forward pass of one microbatch."""
        every = [*(box.sent for box in self.boxes), *(edge.sent for edge in self.edges)]
        return sum(size for sent in every for _, size in sent)

    def depths(self) -> list[int]:
        """Return for each box the length of the longest path to it; parameters are as deep as what
        reads them.
        """
        depths = [0] * len(self.boxes)
        for edge in sorted(self.edges, key=lambda one: one.target):
            if self.boxes[edge.source].kind != "parameter":
                depths[edge.target] = max(depths[edge.target], depths[edge.source] + 1)
        for edge in self.edges:
            if self.boxes[edge.source].kind == "parameter":
                depths[edge.source] = depths[edge.target]
        return depths


def layer_of(found: Sharded) -> LayerGraph:
    """Return one layer of a solution."""
    return _LayerBuilder(found).layer()


class _LayerBuilder:
    """Collects the vertices of a layer, merges them, and says what they are.

    Vertices are the indices of nodes. A parameter, the input and the output have numbers of their
    own, so that vertices are evaluated in the order of their numbers.
    """

    def __init__(self, found: Sharded) -> None:
        self._graph, self._choice = found.graph, found.solution.choice
        self._eqns = self._graph.equations
        self._body, self._whole = _body(self._graph, self._choice, self._eqns)
        self._output = len(self._graph.nodes)
        self._input = -self._output - 1
        self._kinds = {
            node: "product" if self._strategy(node).product else "other" for node in self._body
        }
        self._edges: dict[tuple[int, int], Sent] = {}
        self._shared = set[tuple[int, int]]()
        self._values: dict[tuple[int, int], tuple[Tensor, TensorSharding]] = {}
        for value in self._graph.values:
            self._value(value)
        self._keep()

    def _strategy(self, node: int) -> ShardStrategy:
        return self._graph.nodes[node].strategies[self._choice[node]]

    # --- Vertices and edges -----------------------------------------------------------------------

    def _value(self, value: GraphValue) -> None:
        """Add the edges of a value that is read in the layer, or leaves it."""
        source = self._source(value)
        if source is None:
            return
        sharding = self._strategy(value.node).outputs[value.output]
        copied: set[Any] = set()
        for use in value.uses:
            target = self._target(use, value.node)
            if target is None:
                continue
            moves = self._strategy(use.node).reshards(use.input, sharding)
            steps = [
                step for move in moves if move not in copied
                for step in reshard_steps(self._graph.axes, value.tensor, *move) or ()
            ]  # fmt: skip
            sent = tuple((one.kind, one.bytes_sent) for one in steps if one.bytes_sent)
            if not copied.isdisjoint(moves):
                self._shared.add((source, target))
            copied.update(moves)
            self._edges[source, target] = self._edges.get((source, target), ()) + sent
            self._values[source, target] = value.tensor, sharding

    def _source(self, value: GraphValue) -> int | None:
        """Return the vertex that computes a value, or None if it has no part in the layer."""
        if value.node in self._body:
            return value.node
        kind = self._graph.nodes[value.node].kind
        parameter = self._parameter(value.node) != ""
        read = any(use.node in self._body for use in value.uses)
        # A loop's constants and rows are keys, masks and the like, if they are no parameters.
        extra = kind in ("constant", "const", "row") and not parameter
        if not read or not value.tensor.floating or extra:
            return None
        vertex = value.node - self._output if parameter else self._input
        self._kinds[vertex] = "parameter" if parameter else "input"
        return vertex

    def _parameter(self, index: int) -> str:
        """Return the path of the parameter that a node is, or of which it is a view, or ""."""
        node = self._graph.nodes[origin(self._graph, index)]
        return node.path if node.kind == "parameter" else ""

    def _target(self, use: Use, source: int) -> int | None:
        """Return the vertex that reads a value; None for what only the backward pass reads."""
        node = self._graph.nodes[use.node]
        # The end of an iteration is the carry's second input; of a loop in the layer it is left
        # out, since it leads back.
        end = node.kind == "carry" and use.input == 1
        if use.node in self._body:
            return None if end else use.node
        ends = end or node.kind == "output"
        onward = _forward(node.path, self._eqns)
        if source not in self._body or not (ends or onward):
            return None
        self._kinds[self._output] = "output"
        return self._output

    def _keep(self) -> None:
        """Leave out what depends on no input or parameter, and what the output does not need."""
        given = [one for one, kind in self._kinds.items() if kind in ("input", "parameter")]
        needed = _reached([self._output], _successors((b, a) for a, b in self._edges))
        kept = needed & _reached(given, _successors(self._edges))
        kept |= {one for edge, sent in self._edges.items() if sent for one in edge}
        kept |= {one for one in self._body if self._strategy(one).sent}
        self._kinds = {one: kind for one, kind in sorted(self._kinds.items()) if one in kept}
        self._edges = {edge: sent for edge, sent in self._edges.items() if {*edge} <= kept}
        self._values = {edge: self._values[edge] for edge in self._edges}

    # --- Boxes ------------------------------------------------------------------------------------

    def layer(self) -> LayerGraph:
        """Return the boxes and the edges between them."""
        members = self._merged().members()
        index = {one: place for place, group in enumerate(members) for one in group}
        edges: dict[tuple[int, int], Sent] = {}
        shared = {(index[a], index[b]) for a, b in self._shared & self._edges.keys()}
        for (a, b), sent in sorted(self._edges.items()):
            if index[a] != index[b]:
                pair = index[a], index[b]
                edges[pair] = edges.get(pair, ()) + sent
        return LayerGraph(
            tuple(map(self._box, members)),
            tuple(
                Edge(*pair, _summed(sent), pair in shared and not sent)
                for pair, sent in edges.items()
            ),
            self._whole,
        )

    def _merged(self) -> "_Groups":
        """Return groups of vertices: nodes that are alike, then views with what is next to them."""
        groups = _Groups(self._kinds, self._edges)
        free = sorted(edge for edge, sent in self._edges.items() if not sent)
        free = [edge for edge in free if edge not in self._shared]
        others = {one for one, kind in self._kinds.items() if kind == "other"}
        computed = {one for one in self._kinds if one in self._body}
        views = {one for one in others if self._operator(one) in VIEWS}
        for a, b in free:
            if {a, b} <= others and self._alike(a, b):
                groups.merge(a, b)
        # A view goes with what it is a view of, or else with its reader.
        for end in (1, 0):
            for edge in free:
                if {*edge} <= computed and views.issuperset(groups.of(edge[end])):
                    groups.merge(*edge)
        return groups

    def _alike(self, a: int, b: int) -> bool:
        """Whether two nodes are of one function, and both split or both not."""
        same = self._where(a).partition(" ")[2] == self._where(b).partition(" ")[2]
        first, second = (self._strategy(one).outputs[0] for one in (a, b))
        return same and (bool(first.axes), first.partial) == (bool(second.axes), second.partial)

    def _operator(self, node: int) -> str:
        """Return what a node computes: the jitted function that it is in, or its primitive."""
        path, kind = self._graph.nodes[node].path, self._graph.nodes[node].kind
        outer = self._eqns.get(path.rpartition("/")[0])
        while outer is not None and outer.primitive.name in INLINED:
            name = str(outer.params.get("name", "")).strip("_")
            if name.isidentifier():
                return name
            path = path.rpartition("/")[0]
            outer = self._eqns.get(path.rpartition("/")[0])
        return _PLAIN.get(kind, kind)

    def _where(self, node: int) -> str:
        """Return the line of the model's code, and its function."""
        return source_line(self._graph, self._graph.nodes[node].path)

    def _box(self, group: Sequence[int]) -> Box:
        """Return what a group of vertices is."""
        nodes = [one for one in group if one in self._body]
        computing = [one for one in nodes if self._operator(one) not in VIEWS] or nodes
        kinds = {self._kinds[one] for one in group}
        inside = [(kind, size) for one in nodes for kind, _, size in self._strategy(one).sent]
        tensor, sharding = self._result({*group})
        return Box(
            "product" if "product" in kinds else kinds.pop(),
            self._parameter(group[0] + self._output) if group[0] < 0 and not nodes else "",
            self._operators(computing),
            self._where(computing[0]) if computing else "",
            tensor,
            sharding,
            _summed(inside),
        )

    def _operators(self, nodes: Sequence[int]) -> tuple[str, ...]:
        """Return what nodes compute, arithmetic only where there is nothing else."""
        every = dict.fromkeys(map(self._operator, nodes))
        return tuple(one for one in every if one not in _ARITHMETIC) or tuple(every)

    def _result(self, group: set[int]) -> tuple[Tensor, TensorSharding]:
        """Return the largest value that leaves a group; of the output, that comes to it."""
        leaving = [
            value
            for (a, b), value in self._values.items()
            if (a in group and b not in group) or (b == self._output and group == {b})
        ]
        if not leaving:
            leaving = [value for edge, value in self._values.items() if group & {*edge}]
        return max(leaving, key=lambda value: math.prod(value[0].shape))


_ARITHMETIC = frozenset(["add", "div", "integer_pow", "max", "mul", "neg", "sub"])
_PLAIN = {"dot_general": "product", "conv_general_dilated": "convolution"}


class _Groups:
    """Vertices of a graph without cycles, merged so that it stays without."""

    def __init__(self, vertices: Iterable[int], edges: Iterable[tuple[int, int]]) -> None:
        self._members = {one: [one] for one in vertices}
        self._group = {one: one for one in self._members}
        self._edges = list(edges)

    def of(self, vertex: int) -> list[int]:
        """Return the group of a vertex."""
        return self._members[self._group[vertex]]

    def merge(self, a: int, b: int) -> None:
        """Merge the groups at both ends of an edge, unless another path joins them, too."""
        a, b = self._group[a], self._group[b]
        after = self._after()
        if a != b and b not in _reached(after[a] - {b}, after):
            self._members[a] += self._members.pop(b)
            self._group.update(dict.fromkeys(self._members[a], a))

    def _after(self) -> dict[int, set[int]]:
        pairs = ((self._group[a], self._group[b]) for a, b in self._edges)
        return _successors((a, b) for a, b in pairs if a != b)

    def members(self) -> list[list[int]]:
        """Return the groups in the order of evaluation."""
        after = self._after()
        waits = collections.Counter(one for each in after.values() for one in each)
        ready = sorted(one for one in self._members if not waits[one])
        ordered = []
        while ready:
            group = heapq.heappop(ready)
            ordered.append(sorted(self._members[group]))
            for user in after[group]:
                waits[user] -= 1
                if not waits[user]:
                    heapq.heappush(ready, user)
        return ordered


def _successors(edges: Iterable[tuple[int, int]]) -> dict[int, set[int]]:
    after: dict[int, set[int]] = collections.defaultdict(set)
    for a, b in edges:
        after[a].add(b)
    return after


def _reached(starts: Iterable[int], after: Mapping[int, set[int]]) -> set[int]:
    """Return the vertices to which a path leads, those at the start included."""
    seen, left = set[int](), list(starts)
    while left:
        vertex = left.pop()
        if vertex not in seen:
            seen.add(vertex)
            left += after.get(vertex, ())
    return seen


def _summed(sent: Iterable[tuple[str, float]]) -> Sent:
    totals: dict[str, float] = collections.defaultdict(float)
    for kind, size in sent:
        totals[kind] += size
    return tuple(totals.items())


# --- Which equations are a layer ------------------------------------------------------------------


def _body(graph: Graph, choice: Sequence[int], eqns: Mapping[str, Any]) -> tuple[set[int], bool]:
    """Return the nodes of one layer's forward pass, and whether they are of the whole network."""
    forward = {i for i, node in enumerate(graph.nodes) if _forward(node.path, eqns)}
    loops: dict[str, float] = collections.defaultdict(float)
    for index in forward:
        node = graph.nodes[index]
        for outer in _loops_around(node.path, eqns):
            loops[outer] += node.trips * max(one.flops for one in node.strategies)
    if any(loops.values()):
        # Of nested loops the outer one has as much work.
        loop = max(loops, key=lambda path: (loops[path], -path.count("/")))
        inside = [i for i, node in enumerate(graph.nodes) if node.path.startswith(f"{loop}/")]
        return {i for i in inside if not _boundary_of(loop, graph.nodes[i].path)}, False
    classes = classes_of(graph, choice)[0]
    sizes = collections.Counter(classes)
    first = {index for index in forward if classes[index] == index and sizes[index] > 2}
    return (first, False) if first else (forward, True)


def _loops_around(path: str, eqns: Mapping[str, Any]) -> list[str]:
    return [one for one in enclosing(path)[:-1] if eqns[one].primitive.name == "scan"]


def _boundary_of(loop: str, path: str) -> bool:
    last = path.removeprefix(f"{loop}/")
    return "/" not in last and not last.isdigit()


def _forward(path: str, eqns: Mapping[str, Any]) -> bool:
    """Whether a path is of an equation of the forward pass: transposed ones are marked."""
    around = enclosing(path)
    return path in eqns and not any(is_transposed(eqns[one]) for one in around)
