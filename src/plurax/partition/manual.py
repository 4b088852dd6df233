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
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr
from jaxtyping import Array

from plurax.jaxpr.compat import Scan, is_call_or_remat, open_jaxpr
from plurax.jaxpr.interpret import Handler, interpret


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
    run: Any = by_row if params["cond_jaxpr"].out_avals[0].shape else lax.while_loop
    return run(
        lambda carry: eval_manual_body(*condition, [*consts[0], *carry])[0],
        lambda carry: eval_manual_body(*body, [*consts[1], *carry]),
        inputs[tested + shared :],
    )


def by_row(
    condition: Callable[[Any], Array],
    body: Callable[[Any], Sequence[Array]],
    start: Sequence[Array],
) -> list[Array]:
    """Return what `lax.while_loop` does, of a condition with one boolean for each example.

    `vmap` leaves such. It runs while any is true, and changes only the examples whose boolean is.
    """

    def turn(carry: Any) -> Any:
        return masked(condition(carry), body(carry), carry)

    return list(lax.while_loop(lambda carry: jnp.any(condition(carry)), turn, start))


def masked(on: Array, new: Sequence[Array], old: Sequence[Array]) -> list[Array]:
    """Return `new` of the examples that are `on`, and `old` of the others."""
    some = [on.reshape(on.shape + (1,) * (one.ndim - on.ndim)) for one in new]
    return list(map(jnp.where, some, new, old))


def switched(eqn: Any, inputs: list[Any], evaluate: Callable[..., list[Array]]) -> list[Array]:
    """Evaluate a `cond` or `switch`, with `evaluate(jaxpr, consts, args)` for its branches."""
    index, *operands = inputs

    def taking(branch: Any) -> Callable[..., list[Array]]:
        body, consts = open_jaxpr(branch)
        return lambda *args: evaluate(body, consts, args)

    branches = list(map(taking, eqn.params["branches"]))
    return taken(index, branches, eqn.params.get("branches_platforms"), *operands)


def taken(index: Any, branches: Sequence[Any], platforms: Any, *operands: Any) -> list[Any]:
    """Run `lax.switch`; with names of `platforms` of each branch, `lax.platform_dependent`."""
    if platforms is None:
        return list(lax.switch(index, branches, *operands))
    pairs = zip(platforms, branches, strict=True)
    named = {name: branch for names, branch in pairs for name in names or ("default",)}
    return list(lax.platform_dependent(*operands, **named))


def _all_gather(value: Array, params: Any) -> Array:
    dim, tiled = params["all_gather_dimension"], params["tiled"]
    return lax.all_gather(value, params["axis_name"], axis=dim, tiled=tiled)


def _unchecked(plain: Callable[[Array, Any], Array]) -> Handler:
    """Return the handler that applies `plain(value, params)` to each operand."""
    return lambda eqn, inputs: [plain(value, eqn.params) for value in inputs]


_HANDLERS: Mapping[str, Handler] = {
    "scan": _scan,
    "while": _while,
    "cond": lambda eqn, inputs: switched(eqn, inputs, eval_manual_body),
    "psum_invariant": _unchecked(lambda value, params: lax.psum(value, params["axes"])),
    "all_gather_invariant": _unchecked(_all_gather),
    "pvary": _unchecked(lambda value, _: value),
    # Of a constant, to the mesh of its trace: no axis is left to split it over.
    "reshard": _unchecked(lambda value, _: value),
}
