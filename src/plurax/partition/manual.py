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

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import Jaxpr, Literal
from jaxtyping import Array

from plurax.jaxpr.primitives import INLINED, constant, open_jaxpr, scan_sizes, written
from plurax.partition.operators import bind


def eval_manual_body(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Array]) -> list[Array]:
    """Evaluate the equations of a `shard_map`'s body, in the mesh of the caller.

    **Arguments:** `jaxpr`, the body; `consts`, its constants; `args`, one device's shards.

    **Returns:** one device's shards of the results.
    """
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        inputs = [constant(a) if isinstance(a, Literal) else known[a] for a in eqn.invars]
        name = eqn.primitive.name
        with written(eqn):
            if name in INLINED:
                outputs = eval_manual_body(*open_jaxpr(eqn.params[INLINED[name]]), inputs)
            elif name in ("checkpoint", "remat2", "remat"):
                outputs = eval_manual_body(*open_jaxpr(eqn.params["jaxpr"]), inputs)
            elif name in _LOOPS:
                outputs = _LOOPS[name](eqn, inputs)
            elif name in _PLAIN:
                outputs = [_PLAIN[name](value, eqn.params) for value in inputs]
            else:
                outputs = bind(eqn, inputs)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [constant(a) if isinstance(a, Literal) else known[a] for a in jaxpr.outvars]


def _scan(eqn: Any, inputs: list[Any]) -> list[Any]:
    """Evaluate a `scan`, with `eval_manual_body` for its body."""
    body, consts = open_jaxpr(eqn.params["jaxpr"])
    shared, carried = scan_sizes(eqn)
    kept = shared + carried

    def turn(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        out = eval_manual_body(body, consts, [*inputs[:shared], *carry, *row])
        return out[:carried], out[carried:]

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    last, stacked = lax.scan(turn, inputs[shared:kept], inputs[kept:], **options)
    return [*last, *stacked]


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


_LOOPS: dict[str, Callable[[Any, list[Any]], list[Any]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


def _psum(value: Array, params: Any) -> Array:
    groups = params.get("axis_index_groups")
    return lax.psum(value, params["axes"], axis_index_groups=groups)


def _all_gather(value: Array, params: Any) -> Array:
    options = {name: params[name] for name in ("axis_index_groups", "tiled")}
    dim = params["all_gather_dimension"]
    return lax.all_gather(value, params["axis_name"], axis=dim, **options)


_PLAIN: dict[str, Callable[[Array, Any], Array]] = {
    "psum_invariant": _psum,
    "psum2": _psum,
    "all_gather_invariant": _all_gather,
    "pvary": lambda value, _: value,
    "pcast": lambda value, _: value,
    "pbroadcast": lambda value, _: value,
}
