"""Which part of a model each node of a graph is of, where stage boundaries cut it into parts.

Equations are traced in the order in which they run, so the boundary before one says its part. What
is computed of parameters alone may be traced long before it is read, such as their copies in
bfloat16, and their gradients are cast at the end: these are of the part that reads the parameter.

    layer 0, boundary, layer 1      forward     part 0, part 1
                                    backward    part 1, part 0
    cast of layer 1's weights       part 1, although it is traced before the boundary
"""

from plurax.planner.graph import Graph


def parts_of(graph: Graph) -> list[int]:
    """Return for each node the part of the model that it is of; 0 where nothing cuts it."""
    nodes = graph.nodes
    parts = [node.part for node in nodes]
    if not any(parts):
        return parts
    readers: dict[int, list[int]] = {}
    varying = set[int]()
    for value in graph.values:
        readers.setdefault(value.node, []).extend(use.node for use in value.uses)
        if value.varying:
            varying.add(value.node)
    parameters = {index for index, node in enumerate(nodes) if node.kind == "parameter"}
    # From readers to what they read: first to the parameters, then on to their gradients.
    constant = [i for i in range(len(nodes)) if i not in varying and i not in parameters]
    for index in (*reversed(constant), *parameters):
        if every := readers.get(index):
            parts[index] = min(parts[reader] for reader in every)
    of_gradients = set(parameters)
    for index in reversed(range(len(nodes))):
        every = readers.get(index, [])
        if nodes[index].backward and every and of_gradients.issuperset(every):
            of_gradients.add(index)
            parts[index] = parts[every[0]]
    return parts
