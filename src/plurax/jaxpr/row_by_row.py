"""Which operations leave the rows of an operand apart, and where the result has them.

x (8, 4) has its rows in dim 0:

    y = silu(x)                    rows 0
    y = x.T                        rows 1
    y = concatenate([x, x], 1)     rows 0
    y = x.sum(0)                   none: rows are added up

A call with a derivative of its own, such as `jax.nn.relu`, does if all that it computes does.
"""

from typing import Any

from jax.extend.core import Literal

from plurax.jaxpr.compat import ELEMENTWISE, REDUCTIONS, called_jaxpr, is_call
from plurax.jaxpr.equal_dims import equal_dims, shape_of
from plurax.jaxpr.interpret import flat_equations

ROW_BY_ROW = REDUCTIONS | {
    "broadcast_in_dim", "concatenate", "pad", "reshape", "slice", "split", "squeeze", "transpose",
}  # fmt: skip
"""Operations beside elementwise ones that can leave rows apart; they then run as they stand."""


def row_of_result(eqn: Any, place: int, dim: int) -> int | None:
    """Return the dim of the result that is the rows of an operand, if they are left apart."""
    name, params, shape = eqn.primitive.name, eqn.params, shape_of(eqn.invars[place])
    if name in ELEMENTWISE:  # in which a dim of size 1 broadcasts
        to = shape_of(eqn.outvars[0])
        return dim if len(to) == len(shape) and to[dim] == shape[dim] else None
    if name == "concatenate":
        return None if params["dimension"] == dim else dim
    if name == "split":
        return None if params["axis"] == dim else dim
    if name == "pad":
        return dim if params["padding_config"][dim] == (0, 0, 0) and place == 0 else None
    if name == "slice":
        return dim if shape_of(eqn.outvars[0])[dim] == shape[dim] else None
    if name not in ROW_BY_ROW:
        return None
    out = len(eqn.invars)
    pairs = [to for of, to in equal_dims(eqn) if of == (place, dim) and to[0] == out]
    return pairs[0][1] if pairs else None


def row_of_operand(eqn: Any, place: int, dim: int) -> int | None:
    """Return the dim of an operand that is the rows `dim` of the result; None if it has none."""
    if eqn.primitive.name in ELEMENTWISE or eqn.primitive.name == "concatenate":
        shape, to = shape_of(eqn.invars[place]), shape_of(eqn.outvars[0])
        # A dim of size 1 broadcasts.
        return dim if len(shape) == len(to) and shape[dim] == to[dim] else None
    result = len(eqn.invars), dim
    pairs = [of for of, to in equal_dims(eqn) if to == result and of[0] == place]
    return pairs[0][1] if pairs else None


def row_of_call(eqn: Any, place: int, dim: int) -> int | None:
    """Return the same of a call with a derivative of its own, such as `jax.nn.relu`.

    None unless all that it computes of its one array works row by row.
    """
    arrays = [atom for atom in eqn.invars if shape_of(atom)]
    if not is_call(eqn) or arrays != [eqn.invars[place]]:
        return None
    jaxpr, consts = called_jaxpr(eqn)
    flat = flat_equations(jaxpr.eqns, jaxpr.outvars)
    if any(shape_of(value) for value in consts if hasattr(value, "aval")):
        return None
    dims = {jaxpr.invars[place]: dim}
    for inner in flat.eqns:
        places = {
            row_of_result(inner, index, dims[atom])
            for index, atom in enumerate(inner.invars)
            if not isinstance(atom, Literal) and atom in dims
        }
        if not places and inner.primitive.name != "broadcast_in_dim":
            return None
        if len(places) > 1 or None in places:
            return None
        dims |= {var: row for row in places for var in inner.outvars if row is not None}
    rows = {dims.get(atom) for atom in flat.results if not isinstance(atom, Literal)}
    return rows.pop() if len(rows) == 1 else None
