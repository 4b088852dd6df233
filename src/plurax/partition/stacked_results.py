"""Let a loop do, on each row, what follows on a result that it stacks.

The backward pass of a scanned network is a loop that stacks the gradient of each layer. What a step
does with these gradients it does with the whole stack after the loop, so the stack is kept, and
nothing can be sent before the last layer is done. Done row by row in the loop, one layer's gradient
is reduced over devices while the next layer's is computed.

    dw16 = scan[... g16] ...              bfloat16 (6, 16, 32), from `precision="bfloat16"`
    dw = cast dw16                        float32
    total = sums + dw                     the sums of the microbatches before

    total = scan[... g = cast g16; t = sum + g; t] ... sums       `sums` is read row by row

Who reduces a result of these loops can then do it in the loop, on each row.
"""

from collections.abc import Container, Sequence
from typing import Any

from jax.extend.core import Literal, Var

from plurax.jaxpr.compat import Scan, open_jaxpr
from plurax.jaxpr.interpret import variables
from plurax.partition.partial_sums import SUMS
from plurax.partition.rule_context import count_readers

BY_ROWS = frozenset(["convert_element_type", "reshape", "transpose"])
"""Operations that may be done row by row of their first dim. Sums may be, where their other operand
is known before the loop."""


def rows_inside(
    eqns: Sequence[Any], wanted: Container[Any], results: Sequence[Any], known: Container[Any]
) -> list[tuple[Any, Any]]:
    """Return equations in which loops do what follows on the rows of stacked results.

    **Arguments:** `wanted`, the results that shall be stacked by a loop as they are; `results`, of
    the equations; `known`, the variables of which rows may be read in the loop.

    Of each equation comes the one it replaces, or it itself.
    """
    # Of what follows from a stacked result alone: that result, and the equations in between.
    chains = dict[Any, tuple[Any, list[Any]]]()
    moved = dict[Any, list[Any]]()
    readers = count_readers(eqns, results)
    for eqn in eqns:
        if eqn.primitive.name == "scan":
            chains.update((var, (var, [])) for var in eqn.outvars[Scan.of(eqn).num_carry :])
            continue
        value = _stacked_operand(eqn, chains, known)
        if value is None or readers[value] != 1:
            continue
        (result,), (stack, before) = eqn.outvars, chains[value]
        chains[result] = stack, [*before, eqn]
        if result in wanted:
            moved[stack] = chains[result][1]
    done = {id(eqn) for chain in moved.values() for eqn in chain}
    return [
        (_with_rows(eqn, moved) if not moved.keys().isdisjoint(eqn.outvars) else eqn, eqn)
        for eqn in eqns
        if id(eqn) not in done
    ]


def _stacked_operand(eqn: Any, chains: Container[Any], known: Container[Any]) -> Any:
    """Return the stacked operand of an equation that may be done row by row, or None."""
    name, read = eqn.primitive.name, variables(eqn.invars)
    stacked = [var for var in read if var in chains]
    if len(stacked) != 1:
        return None
    if name in BY_ROWS and row_params(eqn) is not None:
        return stacked[0]
    shapes = {var.aval.shape for var in read}
    rest = [var for var in read if var not in chains]
    sums = name in SUMS and len(rest) == 1 and rest[0] in known and len(shapes) == 1
    return stacked[0] if sums else None


def row_params(eqn: Any) -> dict[str, Any] | None:
    """Return the parameters that do a `BY_ROWS` operation on one row, or None if none do."""
    name, params = eqn.primitive.name, eqn.params
    if name == "reshape":
        old, new = eqn.invars[0].aval.shape, params["new_sizes"]
        alone = params["dimensions"] is None and old[:1] == new[:1] and len(eqn.invars) == 1
        return {**params, "new_sizes": new[1:]} if alone and old else None
    if name == "transpose":
        first, *rest = params["permutation"]
        return {**params, "permutation": tuple(dim - 1 for dim in rest)} if not first else None
    return dict(params)


def _with_rows(eqn: Any, moved: dict[Any, list[Any]]) -> Any:
    """Return a scan whose body does what follows on the rows of some stacked results.

    What it reads row by row for that are its last inputs.
    """
    body = Scan.of(eqn).body
    ends, inside, outside = list(body.eqns), list(body.outvars), list(eqn.outvars)
    read, rows = list(eqn.invars), list(body.invars)
    for index, var in enumerate(eqn.outvars):
        like: Any = inside[index].aval
        for after in moved.get(var, ()):
            own = {outside[index]: inside[index]}
            for other in variables(after.invars):
                if other not in own:
                    own[other] = Var(_row(like, other.aval))
                    read.append(other)
                    rows.append(own[other])
            (outside[index],) = after.outvars
            row = Var(_row(like, outside[index].aval))
            operands = [atom if isinstance(atom, Literal) else own[atom] for atom in after.invars]
            ends.append(after.replace(invars=operands, outvars=[row], params=row_params(after)))
            inside[index] = row
    jaxpr, new = eqn.params["jaxpr"], body.replace(eqns=ends, invars=rows, outvars=inside)
    new = new if open_jaxpr(jaxpr)[0] is jaxpr else jaxpr.replace(jaxpr=new)
    return eqn.replace(invars=read, outvars=outside, params={**eqn.params, "jaxpr": new})


def _row(like: Any, stack: Any) -> Any:
    """Return the aval of a row of a stack, beside `like` in a loop's body."""
    return like.update(shape=stack.shape[1:], dtype=stack.dtype)
