"""What the backward pass computes again instead of keeping it: a transformation of a function."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array, PyTree

from plurax.jaxpr.barrier import order_after_cotangent
from plurax.jaxpr.primitives import is_recomputed, open_jaxpr, scan_sizes, written
from plurax.plan import Remat


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

    for piece in _pieces(jaxpr, size):
        if piece[0].primitive.name == "scan":
            (eqn,) = piece
            with written(eqn):
                out = _loop(eqn, [read(a) for a in eqn.invars], save)
            known.update(zip(eqn.outvars, out, strict=True))
        else:
            _again(piece, known, save)
    return [read(atom) for atom in jaxpr.outvars]


def _pieces(jaxpr: Jaxpr, size: int) -> Iterator[list[Any]]:
    """Cut equations into loops, one each, and pieces of about `size` in between.

    A cut within a layer keeps several of its activations where one between layers keeps one. So a
    piece ends, half to twice `size` equations after it began, where the fewest bytes are alive:

        x -> norm -> q, k, v -> scores -> softmax -> out -> x + out -> norm -> ...
                     3 arrays    1 large                 ^ 1 array: here
    """
    eqns, live = jaxpr.eqns, _live_bytes(jaxpr)
    loops = [place for place, eqn in enumerate(eqns) if eqn.primitive.name == "scan"]
    start = 0
    while start < len(eqns):
        stop = next((place for place in loops if place >= start), len(eqns))
        end = stop
        if start in loops:
            end = start + 1
        elif stop - start > size:
            ends = range(start + max(1, size // 2), min(start + 2 * size, stop) + 1)
            end = min(ends, key=lambda end: (live[end - 1], abs(end - start - size)))
        yield eqns[start:end]
        start = end


def _live_bytes(jaxpr: Jaxpr) -> list[int]:
    """After each equation, the bytes of what equations have computed and later ones read."""
    last = {
        var: place
        for place, eqn in enumerate(jaxpr.eqns)
        for var in eqn.invars
        if not isinstance(var, Literal)
    }
    last |= dict.fromkeys((v for v in jaxpr.outvars if not isinstance(v, Literal)), len(jaxpr.eqns))
    change = [0] * (len(jaxpr.eqns) + 1)
    for place, eqn in enumerate(jaxpr.eqns):
        for var in eqn.outvars:
            aval: Any = var.aval
            size = math.prod(aval.shape) * aval.dtype.itemsize
            change[place] += size
            change[max(last.get(var, place), place)] -= size
    return list(itertools.accumulate(change))[:-1]


def order_recomputation(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return a function in which what the backward pass computes again waits for its cotangent.

    `jax.checkpoint` asks for that by an optimization barrier, which XLA's CPU compiler drops: there
    the backward pass would read what the forward pass computed, and keep it (see
    `plurax.jaxpr.barrier`). `fun` is a gradient; its first argument are the parameters.
    """

    def run(params: PyTree, *args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(params, *args)
        count = len(jax.tree.leaves(params))
        out = _ordered(closed.jaxpr, closed.consts, jax.tree.leaves((params, *args)), count)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run


def _ordered(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Array], parameters: int
) -> list[Array]:
    """Evaluate equations; those of a recomputed piece after the last of its inputs."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, args, strict=True))
    fixed = {*jaxpr.constvars, *jaxpr.invars[:parameters]}
    for eqn in jaxpr.eqns:
        inputs = [a.val if isinstance(a, Literal) else known[a] for a in eqn.invars]
        free = [isinstance(atom, Literal) or atom in fixed for atom in eqn.invars]
        if all(free):
            fixed.update(eqn.outvars)
        if is_recomputed(eqn):
            body, body_consts = open_jaxpr(eqn.params["jaxpr"])
            inputs = order_after_cotangent([jnp.asarray(x) for x in inputs], free)
            results = jaxpr_as_fun(ClosedJaxpr(body, body_consts))(*inputs)
        else:
            with written(eqn):
                out = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            results = out if eqn.primitive.multiple_results else [out]
        known.update(zip(eqn.outvars, results, strict=True))
    return [atom.val if isinstance(atom, Literal) else known[atom] for atom in jaxpr.outvars]


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
