"""What each strategy will cost in the nodes around it, before these are decided.

Deciding nodes one by one is short-sighted: a strategy that costs nothing now can ask for the most
expensive reshard two equations later. Sequential tree-reweighted message passing sums up, for each
node and strategy, what the cheapest continuation through each neighbor costs. Messages run through
the nodes in order and back:

    to node j   m(k_j) = min over k_i of share * total(k_i) - m_back(k_i) + reshard(k_i, k_j)
    where       total(k_i) = the node's own cost + all messages to it

    x replicated; h = x @ in; a = tanh(h); y = a @ out, out by rows
    h by columns: 0 through tanh to y;  h partial: an all-reduce before tanh, known at h

A reshard that readers share is counted by each reader with its part, which is never too much.

Kolmogorov 2006, "Convergent Tree-Reweighted Message Passing for Energy Minimization",
https://doi.org/10.1109/TPAMI.2006.200.
"""

import dataclasses
from typing import Any

import numpy as np

from plurax.planner.graph import GraphValue, Use
from plurax.planner.problem import Problem


@dataclasses.dataclass(frozen=True)
class _SharedEdge:
    """Two nodes that share a value, and the cost of each pair of strategies `(K_i, K_j)`."""

    ends: tuple[int, int]
    cost: Any


class Foresight:
    """The messages of a problem, passed back and forth `passes` times."""

    def __init__(self, problem: Problem, passes: int = 12) -> None:
        self._own = [
            np.asarray([costs[choice] for choice in allowed], float)
            for costs, allowed in zip(problem.node_costs, problem.allowed, strict=True)
        ]
        self._problem = problem
        pairs: dict[tuple[int, int], Any] = {}
        for value in problem.graph.values:
            for use in value.uses:
                self._add(value, use, pairs)
        self._edges = [_SharedEdge(ends, cost) for ends, cost in pairs.items()]
        self._at: list[list[int]] = [[] for _ in self._own]
        for index, edge in enumerate(self._edges):
            for node in edge.ends:
                self._at[node].append(index)
        self._messages = [
            [np.zeros(len(self._own[node])) for node in edge.ends] for edge in self._edges
        ]
        for _ in range(passes):
            for node in range(len(self._own)):
                self._send(node, up=True)
            for node in reversed(range(len(self._own))):
                self._send(node, up=False)

    def _add(self, value: GraphValue, use: Use, pairs: dict[tuple[int, int], Any]) -> None:
        """Add the cost of one reader of a value; equal shardings are looked up once."""
        if use.node == value.node:
            return
        problem = self._problem
        produced, taken = (
            [
                getattr(problem.graph.nodes[node].strategies[choice], side)[slot]
                for choice in problem.allowed[node]
            ]
            for node, side, slot in (
                (value.node, "outputs", value.output), (use.node, "inputs", use.input)
            )
        )  # fmt: skip
        share = use.trips / sum(one.trips == use.trips for one in value.uses)
        known = {
            (s, d): share * problem.reshard(value.tensor, s, d)
            for s in dict.fromkeys(produced)
            for d in dict.fromkeys(taken)
        }
        cost = np.asarray([[known[s, d] for d in taken] for s in produced])
        ends = (value.node, use.node)
        if ends[0] > ends[1]:
            ends, cost = ends[::-1], cost.T
        pairs[ends] = pairs[ends] + cost if ends in pairs else cost

    def _send(self, node: int, *, up: bool) -> None:
        """Send messages to the neighbors behind a node, or with `up=False` before it."""
        edges = [(index, self._edges[index].ends.index(node)) for index in self._at[node]]
        behind = [pair for pair in edges if pair[1] == 0]
        targets = behind if up else [pair for pair in edges if pair[1] == 1]
        if not targets:
            return
        total = self._total(node)
        share = 1 / max(len(behind), len(edges) - len(behind))
        for index, side in targets:
            with np.errstate(invalid="ignore"):
                rest = share * total - self._messages[index][side]
            # Impossible here and there: still impossible.
            rest[np.isnan(rest)] = np.inf
            cost = self._edges[index].cost
            sent = (rest[:, None] + (cost if side == 0 else cost.T)).min(axis=0)
            least = sent.min()
            self._messages[index][1 - side] = sent - least if np.isfinite(least) else sent

    def _total(self, node: int) -> Any:
        total = self._own[node].copy()
        for index in self._at[node]:
            total += self._messages[index][self._edges[index].ends.index(node)]
        return total

    def ahead(self, node: int, decided: Any) -> Any:
        """Return for each allowed strategy what it costs in the neighbors that are not decided."""
        cost = np.zeros(len(self._own[node]))
        for index in self._at[node]:
            edge = self._edges[index]
            side = edge.ends.index(node)
            if edge.ends[1 - side] not in decided:
                cost += self._messages[index][side]
        return cost
