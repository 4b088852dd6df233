"""Find which parameters are the weights of experts, so that a plan can split them over `data`.

A mixture multiplies groups of rows with the weights of each group, by `lax.ragged_dot`, or the
buffer of each expert with its weights. These are followed back to parameters, through loops over
layers, casts and transpositions:

    parameter                    read as                            rule
    up      (8, 512, 1024)       8 groups of (512, 1024)            ("data", None, None)
    blocks  (4, 8, 512, 1024)    a row of a loop, then the same     (None, "data", None, None)
    down    (8, 1024, 512)       8 matrices beside 8 buffers        ("data", None, None)
    table   (8, 64)              the rows of a gather               none
"""

import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from plurax import tree
from plurax.execute.initial_state import initial
from plurax.execute.rows import abstract_rows
from plurax.jaxpr.compat import Scan, is_call_or_remat
from plurax.jaxpr.interpret import interpret
from plurax.machine import Machine
from plurax.planner.sizes import doublings
from plurax.planner.wanted import Wanted
from plurax.task import Task

Entries = tuple[str | None, ...]


def fields_of_rows_sent(wanted: Wanted, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield the fields of plans that send rows to experts of other devices, of 1, 2, 4, ... stages.

    None where a rule of what is pinned says where experts are, and where what is held forbids it.
    """
    task, pinned, held = wanted.task, wanted.pinned, wanted.fields
    if wanted.members is not None:
        return
    if any(getattr(pinned, name) > 1 for name in ("tensor", "context") if name in held):
        return
    for pipeline in [pinned.pipeline] if "pipeline" in held else doublings(machine.devices):
        data = pinned.data if "data" in held else machine.devices // pipeline
        among = 1 < data <= machine.devices // pipeline
        rules = expert_rules(task, wanted.batch, data) if among else {}
        if rules and not any(fnmatch.filter(rules, pattern) for pattern, _ in pinned.rules):
            every = {**dict(pinned.rules), **rules}
            yield {"data": data, "tensor": 1, "pipeline": pipeline, "shardings": every}


def expert_rules(task: Task, batch: PyTree, devices: int) -> dict[str, Entries]:
    """Return rules that split the weights of experts over `data`, by parameter.

    Of weights whose experts so many devices do not divide there is none. `batch`: as
    `jax.ShapeDtypeStruct`s.
    """
    params, model_state = jax.eval_shape(lambda: initial(task, jax.random.key(0)))
    rows = abstract_rows(batch)
    states = (params, model_state) if task.stateful else (params,)
    masks = (rows.mask,) if task.coupled else ()
    closed = jax.make_jaxpr(task.loss)(*states, rows.batch, rows.keys, *masks)
    parameters = tree.named_leaves(params)
    walk = _GroupWalk()
    origins = [(path, tuple(range(leaf.ndim))) for path, leaf in parameters.items()]
    rest = [None] * (len(closed.jaxpr.invars) - len(origins))
    walk.follow(closed.jaxpr, len(closed.consts), [*origins, *rest])
    return {
        path: tuple("data" if d == dim else None for d in range(parameters[path].ndim))
        for path, dim in walk.dims.items()
        if parameters[path].shape[dim] % devices == 0
    }


class _GroupWalk:
    """Follows parameters to products of groups.

    A value is the path of the parameter that it is, with the parameter's dim of each of its dims;
    None for others. **Attributes:** `dims`, of a parameter that is weights the dim of its groups.
    """

    def __init__(self) -> None:
        self.dims: dict[str, int] = {}
        self._handlers = {
            "convert_element_type": lambda _, inputs: inputs,
            "dot_general": self._of_buffers,
            "ragged_dot_general": self._product,
            "scan": self._scan,
            "transpose": self._transposed,
        }

    def follow(self, jaxpr: Any, consts: int, values: Sequence[Any]) -> list[Any]:
        """Follow the inputs of a jaxpr, and return its results."""
        return interpret(
            jaxpr, [None] * consts, values, self._handlers, self._others,
            inline=is_call_or_remat, lift=lambda _: None,
        )  # fmt: skip

    def _others(self, eqn: Any, _: Any) -> list[Any]:
        return [None] * len(eqn.outvars)

    def _product(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        groups = eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
        if groups and inputs[1] is not None:
            path, dims = inputs[1]
            self.dims[path] = dims[groups[0]]
        return [None]

    def _of_buffers(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        _, batch = eqn.params["dimension_numbers"]
        for weights in (0, 1):
            if inputs[weights] is not None and inputs[1 - weights] is None and batch[weights]:
                path, dims = inputs[weights]
                self.dims[path] = dims[batch[weights][0]]
        return [None]

    def _scan(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        scan = Scan.of(eqn)
        consts, carry, xs = scan.split(inputs)
        rows = [None if x is None else (x[0], x[1][1:]) for x in xs]
        values = [*consts, *[None] * len(carry), *rows]
        self.follow(scan.body, len(scan.body_consts), values)
        return self._others(eqn, inputs)

    def _transposed(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        if inputs[0] is None:
            return [None]
        path, dims = inputs[0]
        return [(path, tuple(dims[d] for d in eqn.params["permutation"]))]
