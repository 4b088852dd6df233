"""What the nodes of a graph are to a user: parameters by path, equations by lines of the model.

A loop has operands of its own, which a user does not know:

    node         to a user
    14/3         dot_general at model.py:33 (block)
    14/row6      each row of blocks/mlp_in                 of which the loop's input is a view
    129/row2     each row of exp at model.py:30 (block)    of a loop of the backward pass
    14/carry0    the carry of the loop at model.py:40 (layers)
"""

import re
from pathlib import Path

from jax.extend import source_info_util

from plurax.partition.pins import enclosing
from plurax.planner.graph import Graph

VIEWS = frozenset([
    "annotate", "bitcast_convert_type", "broadcast_in_dim", "concatenate", "convert_element_type",
    "copy", "expand_dims", "name", "optimization_barrier", "pad", "reduce_precision", "reshape",
    "sharding_constraint", "slice", "split", "squeeze", "stop_gradient", "transpose",
])  # fmt: skip


def origin(graph: Graph, index: int) -> int:
    """Return the node that computes what a node only views, or what a loop reads or stacks."""
    if graph.nodes[index].kind in (*VIEWS, "row", "const", "stack") and (index, 0) in graph.reads:
        return origin(graph, graph.reads[index, 0].node)
    return index


def in_words(graph: Graph, index: int) -> str:
    """Return what a node is to a user."""
    node, line = graph.nodes[index], source_line(graph, graph.nodes[index].path)
    if not node.boundary:
        return f"{node.kind} at {line}" if node.decides else _GIVEN.get(node.kind, node.path)
    source = origin(graph, index)
    if graph.nodes[source].boundary:
        return f"the {node.kind} of the loop at {line}"
    return _BOUNDARIES[node.kind].format(in_words(graph, source))


_GIVEN = {"argument": "an input of the loss", "constant": "a constant"}
_BOUNDARIES = {"row": "each row of {}", "const": "{}, read in a loop", "stack": "the stack of {}"}


def readers(graph: Graph, parameter: str) -> list[str]:
    """Return the lines of the forward pass that read a parameter, in order."""
    at, lines = graph.index(parameter), dict[str, None]()
    for (index, _), value in sorted(graph.reads.items(), key=lambda read: read[0]):
        node = graph.nodes[index]
        looks = node.backward or node.boundary or not node.decides or node.kind in VIEWS
        if not looks and origin(graph, value.node) == at:
            lines[source_line(graph, node.path)] = None
    return list(filter(None, lines))


def source_line(graph: Graph, path: str) -> str:
    """Return the line of the model's code that an equation comes from, and its function.

    What a function of JAX computes has no line of its own; its call has.
    """
    for outer in enclosing(path)[::-1]:
        eqn = graph.equations.get(outer)
        frames = source_info_util.summarize(eqn.source_info).splitlines() if eqn else []
        # "folder/model.py:33:16 (block)" -> "model.py:33 (block)"
        if found := re.fullmatch(r"(.*):(\d+):\d+ \((.*)\)", frames[-1] if frames else ""):
            return f"{Path(found[1]).name}:{found[2]} ({found[3]})"
    return ""
