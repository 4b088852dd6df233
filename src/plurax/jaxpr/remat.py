"""Rematerialization: recompute values in the backward pass instead of keeping them.

Differentiation keeps every intermediate value that the backward pass reads. A function of n
equations is cut into about √n segments of √n equations: only the values between segments are kept,
and the backward pass recomputes one segment at a time, so about 2√n values are alive instead of n.
Each equation of the forward pass runs twice. A loop is recomputed iteration by iteration.

    16 equations on x (64, 256), float32: 64 KiB each

    policy    kept for the backward pass                   recomputed
    none      16 values, 1 MiB                             nothing
    dots      the results of matrix products               all else
    full      3 values between 4 segments, 192 KiB,        each segment, once
              and at most 4 values of one segment

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174.
"""

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
    """Return a function whose gradient uses less memory and more compute; its values are the same.

    **Arguments:**

    - `fun`: a function of trees of arrays.
    - `policy`: what is kept for the backward pass.
      - `none`: all values; `fun` is returned.
      - `dots`: the results of matrix products; all else is recomputed.
      - `offload`: as `dots`, with the results in host memory.
      - `full`: the carry of each loop iteration and, outside of loops, the values between about √n
        segments of √n of the n equations.
    - `whole`: one segment, so that only the arguments are kept.

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
        # Forward and backward are in different programs here, so XLA cannot merge them.
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
    """Return the policy with complex results recomputed.

    JAX rounds what it keeps, by `lax.reduce_precision`, which takes real numbers only.
    """

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        if any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in avals):
            return False
        return save(primitive, *avals, **params)

    return policy


def _in_pieces(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Array], size: int, save: Any
) -> list[Array]:
    """Evaluate equations: loops iteration by iteration, the others in recomputed segments."""
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
    """Split equations into loops, one each, and segments of about `size` in between.

    A cut within a layer keeps several of its activations, one between layers keeps a single one. So
    a segment ends where the fewest bytes are alive, `size / 2` to `2 * size` equations after its
    start:

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
    """Return after each equation the bytes of computed values that later equations read."""
    last = {
        var: place
        for place, eqn in enumerate(jaxpr.eqns)
        for var in eqn.invars
        if not isinstance(var, Literal)
    }
    last |= dict.fromkeys((v for v in jaxpr.outvars if not isinstance(v, Literal)), len(jaxpr.eqns))
    # A value is alive from its equation to its last reader: sum up the changes.
    change = [0] * (len(jaxpr.eqns) + 1)
    for place, eqn in enumerate(jaxpr.eqns):
        for var in eqn.outvars:
            aval: Any = var.aval
            size = math.prod(aval.shape) * aval.dtype.itemsize
            change[place] += size
            change[max(last.get(var, place), place)] -= size
    return list(itertools.accumulate(change))[:-1]


def order_recomputation(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return a function in which the backward pass recomputes values only once it has the
    cotangent.

    `jax.checkpoint` asks for that by an optimization barrier, which XLA's CPU compiler drops. There
    the backward pass would reuse the forward pass's values and keep them (see
    `plurax.jaxpr.barrier`).

    **Arguments:** `fun`, a gradient; its first argument are the parameters.
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
    """Evaluate equations; a recomputed segment runs after the last of its inputs."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, args, strict=True))
    # Variables that depend on parameters and constants alone need no selection on CPU.
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
    """Evaluate a segment as one function that the backward pass recomputes."""
    made = {var for eqn in piece for var in eqn.outvars}
    atoms = [a for eqn in piece for a in eqn.invars if not isinstance(a, Literal)]
    # The segment's inputs, each once: these are kept for the backward pass.
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
    """Evaluate a `scan` whose iterations the backward pass recomputes."""
    body, body_consts = open_jaxpr(eqn.params["jaxpr"])
    shared, carried = scan_sizes(eqn)
    kept = shared + carried
    consts, carry, xs = inputs[:shared], inputs[shared:kept], inputs[kept:]
    function = jaxpr_as_fun(ClosedJaxpr(body, body_consts))

    def turn(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        # Forward and backward are different loops, which XLA does not merge.
        again = jax.checkpoint(function, prevent_cse=False, policy=save)
        out = again(*consts, *carry, *row)
        return list(out[:carried]), list(out[carried:])

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    last, stacked = jax.lax.scan(turn, carry, xs, **options)
    return [*last, *stacked]
