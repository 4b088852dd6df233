"""Layers that are equal, without a scan: one decision for all of them.

A Python loop over 48 layers traces to 48 times the same equations, forward and then backward. A
choice that treats them alike is found in the time of one layer: their nodes share variables, and
what one costs counts 48 times.

    nodes      embed  a b c  a b c  a b c  head  c' b' a'  c' b' a'  c' b' a'  embed'
    periods           -------- 3 --------        ------------ 3 ------------
    classes    0      1 2 3  1 2 3  1 2 3  4     5  6  7   5  6  7   5  6  7   8

Two nodes are equal if they have one kind, the same strategies and as many trips. A period counts if
it holds a matrix product and is seen three times or more: two layers are cheap to decide apart.
Parameters are equal if equal nodes read them in the same place.
"""

from typing import Any

import numpy as np

from plurax.planner.graph import Graph


def classes_of(graph: Graph) -> list[int]:
    """Return for each node the first node that is decided with it: itself, if it is alone."""
    known: dict[Any, int] = {}
    kinds = np.asarray([
        known.setdefault((node.kind, node.strategies, node.trips), len(known))
        for node in graph.nodes
    ])  # fmt: skip
    products = np.asarray([
        any(strategy.product for strategy in node.strategies) for node in graph.nodes
    ])  # fmt: skip
    ordered = [index for index, node in enumerate(graph.nodes) if node.kind not in _LAST]
    classes = list(range(len(graph.nodes)))
    spans = [(0, len(ordered))]
    while spans:
        start, stop = spans.pop()
        span = np.asarray(ordered[start:stop], int)
        first, period, length = _longest(kinds[span], products[span])
        if not period:
            continue
        for index in range(first + period, first + length):
            classes[span[index]] = classes[span[index - period]]
        spans += [(start, start + first), (start + first + length, stop)]
    _tie_parameters(graph, classes)
    return classes


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
