"""Layers that are equal, without a scan: one decision for all of them.

A Python loop over 48 layers traces to 48 times the same equations, forward and then backward. A
choice that treats them alike is found in the time of one layer: their nodes share variables, and
what one costs counts 48 times.

    nodes      embed  a b c  a b c  a b c  head  c' b' a'  c' b' a'  c' b' a'  embed'
    periods           -------- 3 --------        ------------ 3 ------------
    classes    0      1 2 3  1 2 3  1 2 3  4     5  6  7   5  6  7   5  6  7   8

Two nodes are equal if they have one kind, the same strategies and as many trips. A period counts if
it holds a matrix product and is seen three times or more: two layers are cheap to decide apart.
Layers with one product each, as of a perceptron, may be better in pairs: one split by columns, the
next by rows. Parameters are equal if equal nodes read them in the same place.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from plurax.planner.graph import Graph, GraphValue


def classes_of(graph: Graph, choice: Sequence[int] | None = None) -> list[list[int]]:
    """Return for each node the first node that is decided with it: itself, if it is alone.

    Another list follows if there are layers of one product: there they are equal in pairs. With a
    `choice`, of a strategy for each node, nodes are equal if these are, too.
    """
    known: dict[Any, int] = {}
    kinds = np.asarray([
        known.setdefault((node.kind, node.strategies, node.trips, choice and choice[i]), len(known))
        for i, node in enumerate(graph.nodes)
    ])  # fmt: skip
    products = np.asarray([
        any(strategy.product for strategy in node.strategies) for node in graph.nodes
    ])  # fmt: skip
    ordered = [index for index, node in enumerate(graph.nodes) if node.kind not in _LAST]
    every = [list(range(len(graph.nodes))) for _ in range(2)]
    spans = [(0, len(ordered))]
    while spans:
        start, stop = spans.pop()
        span = np.asarray(ordered[start:stop], int)
        first, period, length = _longest(kinds[span], products[span])
        if not period:
            continue
        layers = span[first : first + 2 * period].reshape(2, period)
        pair = 2 if _decided_in_pairs(graph, layers, products) else 1
        for classes, apart in zip(every, (period, pair * period), strict=True):
            for index in range(first + apart, first + length):
                classes[span[index]] = classes[span[index - apart]]
        spans += [(start, start + first), (start + first + length, stop)]
    if every[0] == every[1]:
        every.pop()
    for classes in every:
        _tie_parameters(graph, classes)
    return every


def _decided_in_pairs(graph: Graph, layers: Any, products: Any) -> bool:
    """Whether a layer, of two by their nodes, has one product with weights and reads the other."""
    first, second = map(list, layers)

    def reads(index: int) -> list[GraphValue]:
        places = range(len(graph.nodes[index].strategies[0].inputs))
        every = (graph.reads.get((index, place)) for place in places)
        return [value for value in every if value is not None]

    weighted = [i for i in first if products[i] and not all(one.varying for one in reads(i))]
    return len(weighted) == 1 and any(one.node in first for i in second for one in reads(i))


_LAST = ("parameter", "argument", "output")


def _longest(kinds: Any, products: Any) -> tuple[int, int, int]:
    """Return start, period and length of the longest part that repeats; period 0 if there is none.

    The part is `period` nodes, seen three times or more, the last time perhaps not whole.
    """
    best = (0, 0, 0)
    for period in range(1, len(kinds) // 3 + 1):
        same = kinds[period:] == kinds[:-period]
        # Runs of equal kinds, from the places where they begin and end.
        edges = np.flatnonzero(np.diff(np.concatenate([[0], same.astype(np.int8), [0]])))
        for start, stop in edges.reshape(-1, 2):
            length = int(stop - start) + period
            once = products[start : start + period]
            if length >= 3 * period and length > best[2] and once.any():
                best = (int(start), period, length)
    return best


def _tie_parameters(graph: Graph, classes: list[int]) -> None:
    """Put parameters into one class that equal nodes read in the same place."""
    read: dict[Any, int] = {}
    for value in graph.values:
        node = graph.nodes[value.node]
        if node.kind == "parameter":
            places = tuple(sorted({(classes[use.node], use.input) for use in value.uses}))
            first = read.setdefault((places, node.strategies), value.node)
            classes[value.node] = first
