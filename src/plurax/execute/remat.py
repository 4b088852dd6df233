"""What the backward pass computes again instead of keeping it: a transformation of a function."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array, PyTree

from plurax.plan import Remat
from plurax.primitives import open_jaxpr, scan_sizes, written


def rematerialized(
    fun: Callable[..., PyTree], policy: Remat, *, whole: bool = False
) -> Callable[..., PyTree]:
    """A function that differentiates with less memory and more work; its values are the same.

    - `none`: `fun`.
    - `dots`: results of matrix products are kept, all else is computed again.
    - `offload`: as `dots`, the results waiting in the host's memory.
    - `full`: kept is what one turn of a loop hands to the next. Outside of loops the function is
      cut into about √n pieces of n operations, and kept is what they hand on
      (Chen et al. 2016, https://arxiv.org/abs/1604.06174). With `whole` it is one piece: kept is
      what it is given.

    >>> import jax.numpy as jnp
    >>> float(jax.grad(rematerialized(lambda x: jnp.sin(jnp.sin(x)), "full"))(0.0))
    1.0
    """
    if policy == "none":
        return fun
    policies = jax.checkpoint_policies
    save = _real({
        "dots": policies.dots_saveable,
        "full": policies.nothing_saveable,
        "offload": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    }[policy])  # fmt: skip

    if whole:
        # Forward and backward are not in one program here: nothing could be joined.
        return jax.checkpoint(fun, prevent_cse=False, policy=save)

    def again(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(args)]
        count = len(closed.jaxpr.eqns)
        size = max(1, math.isqrt(count))
        out = _in_pieces(closed.jaxpr, closed.consts, leaves, size, save)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return again


def _real(save: Callable[..., Any]) -> Callable[..., Any]:
    """Complex results are computed again: JAX rounds what it keeps, and can round only reals."""

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        if any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in avals):
            return False
        return save(primitive, *avals, **params)

    return policy


def _in_pieces(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Array], size: int, save: Any
) -> list[Array]:
    """Evaluate equations: loops turn by turn, the others in pieces, each computed again."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    piece: list[Any] = []
    for place, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name != "scan":
            piece.append(eqn)
        loop = eqn.primitive.name == "scan"
        if piece and (loop or len(piece) >= size or place == len(jaxpr.eqns) - 1):
            _again(piece, known, save)
            piece = []
        if loop:
            with written(eqn):
                results = _loop(eqn, [read(a) for a in eqn.invars], save)
            known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _again(piece: list[Any], known: dict[Any, Any], save: Any) -> None:
    """Evaluate some equations as one function that the backward pass computes again."""
    made = {var for eqn in piece for var in eqn.outvars}
    atoms = [a for eqn in piece for a in eqn.invars if not isinstance(a, Literal)]
    needed = list(dict.fromkeys(atom for atom in atoms if atom not in made))

    def run(*values: Any) -> list[Any]:
        inside = dict(zip(needed, values, strict=True))
        for eqn in piece:
            inputs = [a.val if isinstance(a, Literal) else inside[a] for a in eqn.invars]
            params = eqn.primitive.get_bind_params(eqn.params)
            with written(eqn):
                out = eqn.primitive.bind(*inputs, **params)
            results = out if eqn.primitive.multiple_results else [out]
            inside.update(zip(eqn.outvars, results, strict=True))
        return [inside[var] for eqn in piece for var in eqn.outvars]

    results = jax.checkpoint(run, policy=save)(*(known[var] for var in needed))
    known.update(zip([var for eqn in piece for var in eqn.outvars], results, strict=True))


def _loop(eqn: Any, inputs: list[Any], save: Any) -> list[Any]:
    """A `scan` whose turns are computed again."""
    body, body_consts = open_jaxpr(eqn.params["jaxpr"])
    shared, carried = scan_sizes(eqn)
    kept = shared + carried
    consts, carry, xs = inputs[:shared], inputs[shared:kept], inputs[kept:]
    function = jaxpr_as_fun(ClosedJaxpr(body, body_consts))

    def turn(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        again = jax.checkpoint(function, prevent_cse=False, policy=save)
        out = again(*consts, *carry, *row)
        return list(out[:carried]), list(out[carried:])

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    last, stacked = jax.lax.scan(turn, carry, xs, **options)
    return [*last, *stacked]
