"""Evaluate the body of a `jax.shard_map` that a model calls itself.

A model may use `jax.shard_map` over the plan's mesh, for an operator written by hand. Its body is
already code for one device, so it needs no rules: its equations are evaluated as they are, inside
the `shard_map` of the plan. But the model's `shard_map` was traced with JAX's check of which values
vary over the mesh (`check_vma`), which inserts casts and special collectives that only exist under
that check. They are replaced by the ordinary ones.

    traced, for shards (4, 16) over tensor=2         evaluated
    a = pvary[axes=("tensor",)] x                    a = x
    b = dot_general a w                              b = dot_general a w
    c = psum_invariant[axes=("tensor",)] b           c = lax.psum(b, "tensor")
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr
from jaxtyping import Array

from plurax.jaxpr.compat import Scan, is_call_or_remat, open_jaxpr
from plurax.jaxpr.interpret import Handler, bind, interpret


def eval_manual_body(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Array]) -> list[Array]:
    """Evaluate the equations of a `shard_map`'s body, in the mesh of the caller.

    **Arguments:** `jaxpr`, the body; `consts`, its constants; `args`, one device's shards.

    **Returns:** one device's shards of the results.
    """
    return interpret(jaxpr, consts, args, _HANDLERS, inline=is_call_or_remat, lift=_without_mesh)


def _without_mesh(constant: Any) -> Any:
    """Return a constant without the mesh of its trace: an array created there remembers it."""
    if isinstance(constant, jax.core.Tracer) or not isinstance(constant, jax.Array):
        return constant
    return constant if jax.typeof(constant).sharding.mesh.empty else np.asarray(constant)


def _scan(eqn: Any, inputs: list[Any]) -> list[Any]:
    """Evaluate a `scan`, with `eval_manual_body` for its body."""
    scan = Scan.of(eqn)
    return scan.apply(lambda *args: eval_manual_body(scan.body, scan.body_consts, args), inputs)


def _while(eqn: Any, inputs: list[Any]) -> list[Any]:
    """Evaluate a `while_loop`, with `eval_manual_body` for its condition and body."""
    params = eqn.params
    condition, body = open_jaxpr(params["cond_jaxpr"]), open_jaxpr(params["body_jaxpr"])
    tested, shared = params["cond_nconsts"], params["body_nconsts"]
    consts = inputs[:tested], inputs[tested : tested + shared]
    return lax.while_loop(
        lambda carry: eval_manual_body(*condition, [*consts[0], *carry])[0],
        lambda carry: eval_manual_body(*body, [*consts[1], *carry]),
        inputs[tested + shared :],
    )


def _cond(eqn: Any, inputs: list[Any]) -> list[Any]:
    """Evaluate a `cond` or `switch`, with `eval_manual_body` for its branches."""
    if eqn.params.get("branches_platforms") is not None:
        return bind(eqn, inputs)
    index, *operands = inputs

    def taking(branch: Any) -> Callable[..., list[Array]]:
        body, consts = open_jaxpr(branch)
        return lambda *args: eval_manual_body(body, consts, args)

    return list(lax.switch(index, list(map(taking, eqn.params["branches"])), *operands))


def _all_gather(value: Array, params: Any) -> Array:
    dim, tiled = params["all_gather_dimension"], params["tiled"]
    return lax.all_gather(value, params["axis_name"], axis=dim, tiled=tiled)


def _unchecked(plain: Callable[[Array, Any], Array]) -> Handler:
    """Return the handler that applies `plain(value, params)` to each operand."""
    return lambda eqn, inputs: [plain(value, eqn.params) for value in inputs]


_HANDLERS: Mapping[str, Handler] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "psum_invariant": _unchecked(lambda value, params: lax.psum(value, params["axes"])),
    "all_gather_invariant": _unchecked(_all_gather),
    "pvary": _unchecked(lambda value, _: value),
    # Of a constant, to the mesh of its trace: no axis is left to split it over.
    "reshard": _unchecked(lambda value, _: value),
}
