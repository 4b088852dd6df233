"""Broadcast within a loop what a loop would read whole.

JAX computes what does not change over the iterations of a scan once, before it: a causal mask of
`(T, T)` for all rows and heads, and the number that stands for minus infinity. As operands of the
loop they are held while it runs, in the forward pass and in the backward pass. Broadcast within an
iteration they are fused with what reads them, and nothing of their size is ever held.

    rows = broadcast causal         bool (4, 8, 1024, 1024), 32 MiB, from bool (1024, 1024)
    least = broadcast -1e30         float32 (4, 8, 1024, 1024), 128 MiB
    scan[... where(rows, scores, least) ...] rows least

    scan[... rows = broadcast causal; least = broadcast -1e30; where(...) ...] causal -1e30
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Var
from jaxtyping import Array

from plurax.jaxpr.barrier import order_after
from plurax.jaxpr.compat import Scan, open_jaxpr
from plurax.jaxpr.interpret import variables


def broadcasts_inside(eqns: Sequence[Any], results: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return equations whose loops broadcast what they read; `results` are of the equations.

    Of each equation comes the one it replaces, or it itself.
    """
    broadcasts = {eqn.outvars[0]: eqn for eqn in eqns if _is_broadcast(eqn)}
    new = [_broadcasting(eqn, broadcasts) if eqn.primitive.name == "scan" else eqn for eqn in eqns]
    read = {*variables(results), *(var for eqn in new for var in variables(eqn.invars))}
    unread = {id(eqn) for var, eqn in broadcasts.items() if var not in read}
    return [(new, old) for new, old in zip(new, eqns, strict=True) if id(new) not in unread]


def _is_broadcast(eqn: Any) -> bool:
    if eqn.primitive.name != "broadcast_in_dim" or len(eqn.invars) > 1:
        return False
    (small,), (large,) = eqn.invars, eqn.outvars
    return math.prod(small.aval.shape) < math.prod(large.aval.shape)


def _broadcasting(eqn: Any, broadcasts: dict[Any, Any]) -> Any:
    """Return a scan whose body broadcasts those of its constants that are broadcasts."""
    scan, read = Scan.of(eqn), list(eqn.invars)
    inside, before = list(scan.body.invars), []
    for index, atom in enumerate(read[: scan.num_consts]):
        broadcast = broadcasts.get(atom) if variables([atom]) else None
        if broadcast is not None:
            (small,) = broadcast.invars
            own = Var(small.aval)
            before.append(broadcast.replace(invars=[own], outvars=[inside[index]]))
            read[index], inside[index] = small, own
    if not before:
        return eqn
    jaxpr, body = eqn.params["jaxpr"], scan.body.replace(invars=inside)
    body = body.replace(eqns=[*before, *body.eqns])
    body = body if open_jaxpr(jaxpr)[0] is jaxpr else jaxpr.replace(jaxpr=body)
    return eqn.replace(invars=read, params={**eqn.params, "jaxpr": body})


def changing(array: Any, start: Any) -> Array:
    """Return an array of numbers as what depends on a number that changes within the loop.

    Compilers of CPUs and GPUs compute what does not change before a loop, broadcasts too, and hold
    it: of -1e30 for a mask, an array of queries by the keys of a block for each loop.
    """
    number = array.dtype == jnp.bool_ or jnp.issubdtype(array.dtype, jnp.number)
    if isinstance(start, int) or not number:
        return array
    (zero,) = order_after([jnp.int32(0)], start)
    return array | (zero != 0) if array.dtype == jnp.bool_ else array + zero.astype(array.dtype)
