"""Shard strategies of equations that operator rules decide: in stages, and beside `context`.

Elsewhere a search chooses how each equation is computed, and its plan says so. In the stages of a
pipeline, and where `context` splits tokens, a plan says the shardings of parameters alone, and the
partitioner computes each equation by the rule of its operator: by how operands arrive, by who else
reads them, and by where a partial sum is split further on. What a search chose freely there would
not be what runs. So here a node has one strategy for each combination of shardings in which its
operands can arrive: what its rule decides for it.

    mesh tensor=4; x (8, 64), w (64, 256), v (256, 64); y = tanh(tanh(x @ w) @ v)

    equation          operands arrive as               taken as                 result
    h = x @ w         (None, None), (None, tensor)     as they arrive           (None, tensor)
                      (None, None), (tensor, None)     x sliced                 partial={tensor}
    g = tanh(h)       (None, tensor)                   as it arrives            (None, tensor)
                      partial={tensor}                 all-reduced: not linear  (None, None)
    g @ v             (None, tensor), (tensor, None)   as they arrive           partial={tensor}
                      (None, tensor), (None, tensor)   g all-gathered           (None, tensor)

A choice of shardings for w and v so decides all else, as it does in the program: the bytes and the
operations that a solution counts are those of the partitioner.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

from jax.extend.core import Literal

from plurax.jaxpr.compat import ANNOTATIONS, ELEMENTWISE
from plurax.partition.annotation_resolver import AnnotationResolver
from plurax.partition.operators import RULES, by_default
from plurax.partition.partial_sums import linear
from plurax.partition.rule_context import RuleContext
from plurax.partition.values import Decision, DeferredValue, ValueVersions
from plurax.planner.graph import Graph, GraphValue, Node
from plurax.planner.shard_strategies import (
    ShardStrategy,
    StrategyFinder,
    Tensor,
    every_sharding,
    strategy_of,
)
from plurax.sharding.spec import TensorSharding

_MAX_COMBINATIONS = 600
"""An equation whose operands can arrive in more ways may be computed in any way."""

Arrival = tuple[TensorSharding, ...]
"""The sharding in which an operand arrives, and that to which an earlier reader has resharded it.

Of zeros, and of what is created for its reader, nothing.
"""

Split = TensorSharding | None
"""How a partial sum is split further on (`plurax.partition.lookahead`); None: it is not."""


def decided_by_rules(graph: Graph) -> Graph:
    """Return the graph with the strategies that operator rules decide."""
    return _RuleDecisions(graph).graph()


@final
class _RuleDecisions:
    """Asks the rules of a graph's equations, in the order of evaluation."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._results: dict[int, list[GraphValue]] = defaultdict(list)
        for value in graph.values:
            self._results[value.node].append(value)
        self._shrinking = self._find_shrinking()
        # By node and output, the shardings that it can have.
        self._shardings = {
            (index, place): _distinct(strategy.outputs[place] for strategy in node.strategies)
            for index, node in enumerate(graph.nodes)
            for place in range(len(node.strategies[0].outputs))
        }
        self._known: dict[Any, tuple[tuple[ShardStrategy, ...], bool]] = {}
        self._finder = StrategyFinder(graph.axes, graph.searched)
        # Nodes whose results are created as their readers need them.
        self._deferred: set[int] = set()
        # By value, the reshards that readers so far may have asked for.
        self._resharded: dict[int, dict[Any, None]] = {}
        # Annotations and what they read, by their tags.
        self._tagged: dict[Any, tuple[Any, GraphValue]] = {}
        # What a partial sum meets further on, as `Graph.meets` has it.
        self._met: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}

    def graph(self) -> Graph:
        """Return the graph with the strategies that rules decide."""
        nodes = list(self._graph.nodes)
        for index, node in enumerate(nodes):
            reads = self._reads(index)
            options = [self._arrivals(index, value) for value in reads]
            splits = [self._splits(index, *each) for each in enumerate(reads)]
            strategies, deferred = self._strategies(index, reads, options, splits)
            self._note_reshards(index, strategies or node.strategies)
            if not strategies:
                continue
            if deferred:
                self._deferred.add(index)
            nodes[index] = dataclasses.replace(node, strategies=strategies)
            for place in range(len(strategies[0].outputs)):
                outputs = (strategy.outputs[place] for strategy in strategies)
                self._shardings[index, place] = _distinct(outputs)
        return dataclasses.replace(self._graph, nodes=tuple(nodes), meets=self._met)

    def _reads(self, index: int) -> list[GraphValue | None]:
        inputs = self._graph.nodes[index].strategies[0].inputs
        return [self._graph.reads.get((index, place)) for place in range(len(inputs))]

    # --- How operands arrive ----------------------------------------------------------------------

    def _arrivals(self, index: int, value: GraphValue | None) -> Sequence[Arrival]:
        """Return how a value may arrive at a node, perhaps reduced or gathered before."""
        boundary = self._graph.nodes[index].boundary
        if value is None or (value.node in self._deferred and not boundary):
            return [()]
        every = self._shardings[value.node, value.output]
        arrivals: list[Arrival] = [(sharding,) for sharding in every]
        whole = TensorSharding.replicated(len(value.tensor.shape))
        for source, target in self._resharded.get(id(value), ()):
            useful = target == whole if source.axes else not self._may_stay_partial(value)
            if source in every and useful:
                arrivals.append((source, target))
        return arrivals

    def _note_reshards(self, index: int, strategies: Sequence[ShardStrategy]) -> None:
        """Note to what a node may reshard its operands, where later readers find them."""
        for place, value in enumerate(self._reads(index)):
            if value is not None and index < value.uses[-1].node:
                known = self._resharded.setdefault(id(value), {})
                for strategy in strategies:
                    every = self._shardings[value.node, value.output]
                    sources = every if strategy.arrivals is None else [strategy.arrivals[place][0]]
                    for source in sources:
                        known.update(dict.fromkeys(strategy.reshards(place, source)))

    def _may_stay_partial(self, value: GraphValue) -> bool:
        return len(value.uses) <= 1 or id(value) in self._shrinking

    def _find_shrinking(self) -> frozenset[int]:
        """Return the ids of values of which less is reduced behind all readers than before them.

        As `plurax.partition.partial_sums` finds them among variables.
        """
        graph, size = self._graph, {id(v): math.prod(v.tensor.shape) for v in self._graph.values}
        behind: dict[int, int] = defaultdict(int)
        whole: set[int] = set()
        for index in range(len(graph.nodes) - 1, -1, -1):
            node, results = graph.nodes[index], [*map(id, self._results[index])]
            eqn = graph.equations[node.path] if node.decides and not node.boundary else None
            needed = size[results[0]] if results else 0
            # What a recomputed part reads, a second value, is read as it is.
            if len(results) < 2 and whole.isdisjoint(results):
                needed = min(needed, sum(behind[result] for result in results))
            for place, value in enumerate(self._reads(index)):
                if value is None:
                    continue
                if eqn is not None and len(eqn.outvars) == 1 and linear(eqn, place):
                    behind[id(value)] += needed
                else:
                    whole.add(id(value))
        return frozenset(one for one in behind if one not in whole and behind[one] < size[one])

    # --- What a partial sum meets further on ------------------------------------------------------

    def _splits(
        self, index: int, place: int, value: GraphValue | None
    ) -> tuple[TensorSharding, ...]:
        """Return how an operand that arrives as a partial sum may be split further on."""
        node = self._graph.nodes[index]
        if value is None or not node.decides or node.boundary:
            return ()
        if not any(one.partial for one in self._shardings[value.node, value.output]):
            return ()
        met = self._met[index, place] = self._meets(index, value)
        every = _distinct(sharding for source in met for sharding in self._shardings[source])
        return tuple(one for one in every if one.axes and not one.partial)

    def _meets(self, index: int, value: GraphValue) -> tuple[tuple[int, int], ...]:
        """Return the nodes and outputs that a value, or what is computed of it by entries, meets.

        Those that are known where a node reads it, computed before or carried by a loop, and those
        of which by entries what is not known yet will be computed.
        """
        graph, shape = self._graph, value.tensor.shape
        seen, met = {value.node}, dict[tuple[int, int], None]()
        left = [one for one in self._results[value.node] if one.output == value.output]

        def note(node: int) -> bool:
            """Note what an equation meets beside what is seen, and whether it is by entries."""
            reader = graph.nodes[node]
            if reader.boundary or reader.kind not in ANNOTATIONS | ELEMENTWISE:
                return False
            if reader.kind in ANNOTATIONS:
                if not graph.equations[reader.path].params.get("transposed"):
                    met[node, 0] = None
                return True
            for other in self._reads(node):
                if other is None or other.node in seen or other.tensor.shape != shape:
                    continue
                if other.node >= index and graph.nodes[other.node].kind != "carry":
                    seen.add(other.node)
                    note(other.node)
                elif other.varying and other.node not in self._deferred:
                    met[other.node, other.output] = None
            return True

        while left:
            for use in left.pop().uses:
                if note(use.node) and use.node not in seen:
                    seen.add(use.node)
                    left += [one for one in self._results[use.node] if one.tensor.shape == shape]
        return tuple(met)

    # --- What is decided --------------------------------------------------------------------------

    def _strategies(
        self,
        index: int,
        reads: Sequence[GraphValue | None],
        options: Sequence[Sequence[Arrival]],
        splits: Sequence[tuple[TensorSharding, ...]],
    ) -> tuple[tuple[ShardStrategy, ...], bool]:
        """Return what is decided for a node, and whether its result is created for its reader.

        No strategies where those that it has stay.
        """
        node = self._graph.nodes[index]
        if node.boundary:
            if node.kind == "carry":
                return tuple(_carried(node, options)), False
            (first,) = reads
            partial = first is not None and self._may_stay_partial(first)
            return tuple(_at_boundary(node, options[0], partial)), False
        if not node.decides:
            return (), False
        eqn = self._graph.equations[node.path]
        if node.kind in ANNOTATIONS and reads[0] is not None:
            return tuple(self._annotated(index, eqn, reads[0], options[0])), False
        if node.kind == "order_after":
            return tuple(_ordered(options)), False
        if eqn.primitive.name not in RULES:
            return (), False
        facts = tuple(
            value
            and (
                value.varying,
                len(value.uses),
                self._may_stay_partial(value),
                value.node in self._deferred,
            )
            for value in reads
        )
        # Equal equations have the same strategies, which the finder of the graph keeps.
        key = id(node.strategies), facts, tuple(map(tuple, options)), tuple(splits)
        if key not in self._known:
            decided: tuple[tuple[ShardStrategy, ...], bool] = (), False
            if math.prod(map(len, options)) <= _MAX_COMBINATIONS:
                decided = self._decided(eqn, reads, options, splits)
            if not decided[0]:
                atoms = zip(eqn.invars, reads, strict=True)
                operands = [
                    Tensor(tuple(atom.aval.shape), atom.aval.dtype, value is None)
                    for atom, value in atoms
                ]
                decided = self._finder.of(eqn, operands), False
            self._known[key] = decided
        return self._known[key]

    def _annotated(
        self, index: int, eqn: Any, value: GraphValue, arrivals: Sequence[Arrival]
    ) -> Iterator[ShardStrategy]:
        """Yield how an annotation takes its operand, and a cotangent that of its value before.

        In terms of `plurax.partition.annotation_resolver`.
        """
        nodes, axes, tag = self._graph.nodes, self._graph.axes, eqn.params.get("tag")
        context, (atom,) = RuleContext(axes), eqn.invars
        sources: list[TensorSharding | None] = [None]
        if eqn.params.get("transposed"):
            forward, before = self._tagged[tag]
            self._met[index, 0] = ((before.node, before.output),)
            sources = [*self._shardings[before.node, before.output]]
        elif tag is not None:
            self._tagged[tag] = eqn, value
        for arrival in arrivals:
            versions = self._operand(context, atom, value, arrival)
            for source in sources:
                if source is None:
                    targets = _distinct(one.outputs[0] for one in nodes[index].strategies)
                else:
                    resolver = AnnotationResolver(axes, _replicated, operator.attrgetter("value"))
                    resolver.of(forward, self._operand(context, atom, before, (source,)))
                    targets = [resolver.of(eqn, versions) or arrival[0]]
                for target in targets:
                    if _uses_reshard(context, versions, arrival, target):
                        splits = () if source is None else ((0, source),)
                        yield ShardStrategy(
                            (target,), (target,), arrivals=(arrival,), splits=splits
                        )

    def _decided(
        self,
        eqn: Any,
        reads: Sequence[GraphValue | None],
        options: Sequence[Sequence[Arrival]],
        splits: Sequence[tuple[TensorSharding, ...]],
    ) -> tuple[tuple[ShardStrategy, ...], bool]:
        """Return what the rule of an equation decides for each combination of arrivals."""
        known = {
            atom: value
            for atom, value in zip(eqn.invars, reads, strict=True)
            if value is not None and not isinstance(atom, Literal)
        }
        context = RuleContext(
            self._graph.axes,
            readers={atom: len(value.uses) for atom, value in known.items()},
            shrinking={atom: 0 for atom, v in known.items() if id(v) in self._shrinking},
        )
        asked: set[int] = set()
        # Rules only read operands, so that each is described once.
        every = [
            [
                (arrival, split, self._operand(context, atom, value, arrival, ahead))
                for arrival in arrivals
                for split, ahead in _lookaheads(place, arrival, splits[place], asked)
            ]
            for place, (atom, value, arrivals) in enumerate(
                zip(eqn.invars, reads, options, strict=True)
            )
        ]
        strategies: dict[Any, ShardStrategy] = {}
        deferred = False
        for combination in itertools.product(*every):
            arrivals, met, inputs = zip(*combination, strict=True) if combination else ((), (), ())
            asked.clear()
            decision = RULES[eqn.primitive.name](context, eqn, [*inputs])
            deferred |= not isinstance(decision, Decision)
            if any(split and place not in asked for place, split in enumerate(met)):
                continue  # as where it is not split
            used = tuple((place, met[place]) for place in sorted(asked))
            decided = [*self._of_rule(context, eqn, inputs, arrivals, decision)]
            if not decided and all(len(arrival) < 2 for arrival in arrivals):
                # Decided by more than shardings: of whole operands it can be computed in any case.
                decision = by_default(context, eqn, [*inputs])
                decided = [*self._of_rule(context, eqn, inputs, arrivals, decision)]
            for strategy in decided:
                ways = map(self._created_as, reads, arrivals, strategy.inputs)
                for each in itertools.product(*ways):
                    complete = dataclasses.replace(strategy, arrivals=each, splits=used)
                    strategies.setdefault((each, used, strategy.outputs), complete)
        return tuple(strategies.values()), deferred

    def _created_as(
        self, value: GraphValue | None, arrival: Arrival, taken: TensorSharding
    ) -> list[Arrival]:
        """Return how an operand arrives that is taken so: one created for it, as near as can be."""
        if arrival or value is None:
            return [arrival or (taken,)]
        every = self._shardings[value.node, value.output]
        near = [one for one in every if one == taken or one.partial]
        return [(one,) for one in (near if taken in every else every)]

    def _operand(
        self,
        context: RuleContext,
        atom: Any,
        value: GraphValue | None,
        arrival: Arrival,
        ahead: Callable[[], Sequence[TensorSharding]] = tuple,
    ) -> ValueVersions:
        """Return an operand as it arrives; zeros where it is zero or created for its reader."""
        shape, dtype = tuple(atom.aval.shape), atom.aval.dtype
        if value is None:
            return ValueVersions(context.zeros(shape, dtype))
        # What does not depend on the batch follows from parameters and constants.
        varying, of_parameters = value.varying, not value.varying
        if not arrival:
            created = dataclasses.replace(
                context.zeros(shape, dtype),
                zero=False, data_varying=varying, is_param=of_parameters,
            )  # fmt: skip
            return ValueVersions(created)
        values = [context.spec(shape, dtype, one, varying, of_parameters) for one in arrival]
        versions = ValueVersions(values[0])
        versions.values, versions.ahead = values, ahead
        return versions

    def _of_rule(
        self,
        context: RuleContext,
        eqn: Any,
        inputs: Sequence[ValueVersions],
        arrivals: Sequence[Arrival],
        decision: Decision | DeferredValue,
    ) -> Iterator[ShardStrategy]:
        """Yield the strategies of a rule's decision about operands that arrive so."""
        axes, searched = self._graph.axes, self._graph.searched
        decisions = [decision] if isinstance(decision, Decision) else [
            # A deferred result is created as its reader needs it.
            decision.decide(context, decision.sources, sharding)
            for sharding in every_sharding(decision.shape, axes, searched)
        ]  # fmt: skip
        operands = [Tensor(one.shape, one.dtype, one.is_zero) for one in inputs]
        for each in decisions:
            if each.defer is not None:
                continue
            taken = [
                arrival[0] if arrival else TensorSharding.replicated(len(tensor.shape))
                for tensor, arrival in zip(operands, arrivals, strict=True)
            ]
            for operand in each.operands:
                places = [place for place, some in enumerate(inputs) if some is operand.versions]
                if not places:
                    break  # computed from another value, such as a tensor before it was flattened
                taken[places[0]] = operand.sharding
            else:
                if all(map(functools.partial(_uses_reshard, context), inputs, arrivals, taken)):
                    yield strategy_of(axes, eqn, operands, tuple(taken), each)


def _replicated(name: str, shape: Sequence[int]) -> TensorSharding:
    return TensorSharding.replicated(len(shape))


def _lookaheads(
    place: int, arrival: Arrival, splits: Sequence[TensorSharding], asked: set[int]
) -> Iterator[tuple[Split, Callable[[], Sequence[TensorSharding]]]]:
    """Yield how an operand is split further on, with a function that tells a rule so.

    It adds to `asked` the place of an operand about which a rule asks: else nothing depends on it.
    """
    if not splits or len(arrival) != 1 or not arrival[0].partial:
        yield None, tuple
        return

    def ahead(split: Split) -> list[TensorSharding]:
        asked.add(place)
        return [] if split is None else [split]

    for split in (None, *splits):
        yield split, functools.partial(ahead, split)


def _uses_reshard(
    context: RuleContext, versions: ValueVersions, arrival: Arrival, taken: TensorSharding
) -> bool:
    """Whether an operand is taken from what an earlier reader has resharded, if there is that."""
    return len(arrival) < 2 or context.cheapest(versions, taken).sharding == arrival[1]


def _at_boundary(
    node: Node, arrivals: Sequence[Arrival], may_stay_partial: bool
) -> Iterator[ShardStrategy]:
    """Yield what happens to what a loop reads or stacks."""
    for arrival in arrivals:
        if not arrival or (len(arrival) > 1 and not arrival[0].partial):
            continue
        reduced = TensorSharding(arrival[-1].dims)
        if node.kind == "const":
            yield ShardStrategy((reduced,), (reduced,), arrivals=(arrival,))
        elif node.kind == "row":
            rows = TensorSharding(((), *reduced.dims[1:]))
            yield ShardStrategy((rows,), (TensorSharding(rows.dims[1:]),), arrivals=(arrival,))
        else:
            row = arrival[0] if may_stay_partial else reduced
            stack = TensorSharding(((), *row.dims), row.partial)
            yield ShardStrategy((row,), (stack,), arrivals=(arrival,))


def _ordered(options: Sequence[Sequence[Arrival]]) -> Iterator[ShardStrategy]:
    """Yield that values stay as they arrive, with what they are computed after."""
    each = [_distinct(arrival[:1] for arrival in arrivals) for arrivals in options]
    for arrivals in itertools.product(*each):
        if all(arrivals):
            taken = tuple(sharding for (sharding,) in arrivals)
            yield ShardStrategy(taken, taken[:-1], arrivals=arrivals)


def _carried(node: Node, options: Sequence[Sequence[Arrival]]) -> Iterator[ShardStrategy]:
    """Yield how a loop carries a value: as it starts, or as iterations return it."""
    starts, ends = options
    for strategy in node.strategies:
        (sharding, _) = strategy.outputs
        for start, end in itertools.product(starts, ends):
            returned = not end or end[0] == sharding
            if start and sharding.partial:
                continue  # only zeros start as a partial sum
            if start and start[-1].dims != sharding.dims and not returned:
                continue
            # Else a partial sum is reduced in each iteration.
            if returned or (start and end[0].partial):
                arrivals = start or (sharding,), end or (sharding,)
                yield dataclasses.replace(strategy, arrivals=arrivals)


def _distinct(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))
