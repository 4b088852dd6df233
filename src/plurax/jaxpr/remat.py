"""Rematerialization: recompute values in the backward pass instead of keeping them.

Differentiation keeps every intermediate value that the backward pass reads. A function of n
equations is cut into about √n segments of √n equations: only the values between segments are kept,
and the backward pass recomputes one segment at a time, so about 2√n values are alive instead of n.
Each equation of the forward pass but the last segment's runs twice. A loop is recomputed iteration
by iteration.

    16 equations on x (64, 256), float32: 64 KiB each

    policy    kept for the backward pass                   recomputed
    none      16 values, 1 MiB                             nothing
    dots      the results of matrix products               all else
    offload   those without batch dims, on the host        all else
    full      3 values between 4 segments, 192 KiB,        each segment but the last, once
              and at most 4 values of one segment

The backward pass begins with the last segment: its values are needed as soon as they are computed,
so to compute them again would save nothing.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array, PyTree

from plurax.jaxpr.barrier import order_after_cotangent
from plurax.jaxpr.compat import REMAT, Scan, called_jaxpr, is_recomputed
from plurax.jaxpr.fused_attention import FUSED_ATTENTION
from plurax.jaxpr.interpret import (
    bind,
    dependent,
    evaluate,
    interpret,
    last_reads,
    variables,
)
from plurax.jaxpr.kept_values import KEPT, with_names
from plurax.jaxpr.key_blocks import STREAMED
from plurax.plan import Remat, RematPolicy


def _products_saveable(primitive: Any, *args: Any, **params: Any) -> bool:
    """Keep the results of matrix products, and of attention that is computed at once."""
    if primitive.name == "name":
        return bool(params["name"] == STREAMED)
    saved = jax.checkpoint_policies.dots_saveable(primitive, *args, **params)
    return bool(saved) or primitive.name in FUSED_ATTENTION


def _named_saveable(primitive: Any, *args: Any, **params: Any) -> bool:
    """Keep the products chosen for a share, and attention as under `dots`."""
    if primitive.name == "name":
        return params["name"] in (KEPT, STREAMED)
    return primitive.name in FUSED_ATTENTION


# To add a policy: a row here; its name, in the same place, in `plan.Remat`, and in words in
# `plan_text.REMAT_TEXTS`. A search tries it, unless `planner.candidates.REMATS` leaves it out.
POLICIES: dict[RematPolicy, Callable[..., Any] | None] = {
    "none": None,
    "dots": _products_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}
"""For each policy, which results of operations are kept for the backward pass; None: all."""


def rematerialized(
    fun: Callable[..., PyTree], policy: Remat, *, whole: bool = False, at_once: bool = True
) -> Callable[..., PyTree]:
    """Return a function whose gradient uses less memory and more compute; its values are the same.

    **Arguments:**

    - `fun`: a function of trees of arrays.
    - `policy`: what is kept for the backward pass.
      - `none`: all values; `fun` is returned.
      - `dots`: the results of matrix products; all else is recomputed.
      - `offload`: the results of products without batch dims, such as those with weights, in host
        memory; all else is recomputed.
      - a number: as `full`, and that share of the bytes of products (`kept_values.py`).
      - `full`: the carry of each loop iteration and, outside of loops, the values between about √n
        segments of √n of the n equations, or of as many bytes as one of those iterations computes.
    - `whole`: one segment, so that only the arguments are kept.
    - `at_once`: the backward pass follows the forward pass at once, so that the last segment is not
      recomputed.

    >>> import jax.numpy as jnp
    >>> float(jax.grad(rematerialized(lambda x: jnp.sin(jnp.sin(x)), "full"))(0.0))
    1.0
    """
    checkpoint = _checkpoint(policy)
    if checkpoint is None:
        return fun
    if whole:
        # Forward and backward are in different programs here, so XLA cannot merge them.
        return checkpoint(fun, prevent_cse=False)

    def again(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(args)]
        count = len(jax.tree.leaves(args[:1]))
        out = _in_segments(closed.jaxpr, closed.consts, leaves, checkpoint, at_once, count)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return again


def _checkpoint(policy: Remat) -> Callable[..., Any] | None:
    """Return `jax.checkpoint` by a policy, `(fun, prevent_cse=True) -> fun`; None: keep all."""
    if isinstance(policy, float):

        def within(fun: Callable[..., Any], prevent_cse: bool = True) -> Callable[..., Any]:
            fun = with_names(fun, policy)
            return jax.checkpoint(fun, policy=_named_saveable, prevent_cse=prevent_cse)

        return within
    kept = POLICIES[policy]
    return None if kept is None else functools.partial(jax.checkpoint, policy=_real(kept))


def _casts_for_loops(jaxpr: Jaxpr) -> list[Any]:
    """Return the equations that cast an argument which a loop reads."""
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    read = {atom for eqn in loops for atom in variables(eqn.invars)}
    return [
        eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "convert_element_type"
        and eqn.invars[0] in jaxpr.invars
        and eqn.outvars[0] in read
    ]


def _real(save: Callable[..., Any]) -> Callable[..., Any]:
    """Return the policy with complex results recomputed.

    JAX rounds what it keeps, by `lax.reduce_precision`, which takes real numbers only.
    """

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        if any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in avals):
            return False
        return save(primitive, *avals, **params)

    return policy


def _in_segments(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Array],
    checkpoint: Any,
    at_once: bool,
    parameters: int,
) -> list[Array]:
    """Evaluate equations: loops iteration by iteration, the others in recomputed segments.

    The first `parameters` arguments are those of the network.
    """
    known: dict[Any, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
    )
    handlers = {"scan": functools.partial(_loop, checkpoint=checkpoint)}
    # In a segment, the cast of a stack would hide from the loop's gradient what it is cast to.
    casts = _casts_for_loops(jaxpr)
    cast = [var for eqn in casts for var in eqn.outvars]
    known.update(zip(cast, evaluate(casts, known, cast), strict=True))
    jaxpr = jaxpr.replace(eqns=[eqn for eqn in jaxpr.eqns if eqn not in casts])
    segments = _with_readers(_segments(jaxpr), jaxpr, parameters)
    for segment in segments:
        results = [var for eqn in segment for var in eqn.outvars]
        if segment[0].primitive.name == "scan" or (at_once and segment is segments[-1]):
            out = evaluate(segment, known, results, handlers)
        else:
            # The segment's inputs, each once: these are kept for the backward pass.
            atoms = variables([atom for eqn in segment for atom in eqn.invars])
            inputs = [atom for atom in dict.fromkeys(atoms) if atom in known]
            again = functools.partial(_segment, segment, inputs, results)
            out = checkpoint(again)(*(known[var] for var in inputs))
        known.update(zip(results, out, strict=True))
    return evaluate([], known, jaxpr.outvars)


def _segment(
    eqns: Sequence[Any], inputs: Sequence[Any], results: Sequence[Any], *values: Any
) -> list[Any]:
    """Evaluate a segment, from the values of its `inputs`."""
    return evaluate(eqns, dict(zip(inputs, values, strict=True)), results)


def _segments(jaxpr: Jaxpr) -> list[list[Any]]:
    """Split n equations into loops, one each, and segments of about `size`, √n, in between.

    What computes no more bytes than one iteration of a loop is one segment, such as a head and a
    loss behind layers: an iteration is recomputed whole, so a device holds as much anyway.

    A cut within a layer keeps several of its activations, one between layers keeps a single one. So
    a segment ends where the fewest bytes are alive, `size / 2` to `2 * size` equations after its
    start:

        x -> norm -> q, k, v -> scores -> softmax -> out -> x + out -> norm -> ...
                     3 arrays    1 large                 ^ 1 array: here
    """
    eqns, live = jaxpr.eqns, _live_bytes(jaxpr)
    size = max(1, math.isqrt(len(eqns)))
    loops = [index for index, eqn in enumerate(eqns) if eqn.primitive.name == "scan"]
    iteration = max((_computed_bytes(Scan.of(eqns[i]).body.eqns) for i in loops), default=0)
    start, segments = 0, []
    while start < len(eqns):
        stop = next((index for index in loops if index >= start), len(eqns))
        end = stop
        if start in loops:
            end = start + 1
        elif stop - start > size and _computed_bytes(eqns[start:stop]) > iteration:
            ends = range(start + max(1, size // 2), min(start + 2 * size, stop) + 1)
            end = min(ends, key=lambda end: (live[end - 1], abs(end - start - size)))
        segments.append(eqns[start:end])
        start = end
    return segments


def _with_readers(segments: Sequence[list[Any]], jaxpr: Jaxpr, parameters: int) -> list[list[Any]]:
    """Move what is computed of parameters alone to the segment that reads it first.

    A weight that is normalized or quantized is not kept between the two, nor is its gradient.
    """
    first = {id(eqn): place for place, segment in enumerate(segments) for eqn in segment}
    others = dependent(jaxpr.eqns, jaxpr.invars[parameters:])
    of_parameters = dependent(jaxpr.eqns, jaxpr.invars[:parameters]) - others
    loops = {place for place, segment in enumerate(segments) if segment[0].primitive.name == "scan"}
    readers: dict[Any, int] = dict.fromkeys(variables(jaxpr.outvars), -1)
    for eqn in reversed(jaxpr.eqns):
        place = min((readers[var] for var in eqn.outvars if var in readers), default=-1)
        alone = not of_parameters.isdisjoint(eqn.outvars) and first[id(eqn)] not in loops
        if alone and place not in loops:
            first[id(eqn)] = max(place, first[id(eqn)])
        for atom in variables(eqn.invars):
            readers[atom] = min(readers.get(atom, len(segments)), first[id(eqn)])
    moved: list[list[Any]] = [[] for _ in segments]
    for eqn in jaxpr.eqns:
        moved[first[id(eqn)]].append(eqn)
    return [segment for segment in moved if segment]


def _live_bytes(jaxpr: Jaxpr) -> list[int]:
    """Return after each equation the bytes of computed values that later equations read."""
    last = last_reads(jaxpr.eqns, jaxpr.outvars)
    # A value is alive from its equation to its last reader: sum up the changes.
    change = [0] * (len(jaxpr.eqns) + 1)
    for index, eqn in enumerate(jaxpr.eqns):
        for var in eqn.outvars:
            size = _bytes(var)
            change[index] += size
            change[last.get(var, index)] -= size
    return list(itertools.accumulate(change))[:-1]


def _computed_bytes(eqns: Sequence[Any]) -> int:
    """Return the bytes of the results of equations."""
    return sum(_bytes(var) for eqn in eqns for var in eqn.outvars)


def _bytes(var: Any) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize


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
    # Variables that depend on parameters and constants alone need no selection on CPU.
    others = dependent(jaxpr.eqns, jaxpr.invars[parameters:])

    def recomputed(eqn: Any, inputs: list[Any]) -> list[Array]:
        if not is_recomputed(eqn):
            return bind(eqn, inputs)
        free = [isinstance(atom, Literal) or atom not in others for atom in eqn.invars]
        ordered = order_after_cotangent([jnp.asarray(x) for x in inputs], free)
        return interpret(*called_jaxpr(eqn), ordered)

    return interpret(jaxpr, consts, args, dict.fromkeys(REMAT, recomputed))


def _loop(eqn: Any, inputs: list[Any], checkpoint: Any) -> list[Array]:
    """Evaluate a `scan` whose iterations the backward pass recomputes."""
    scan = Scan.of(eqn)
    function = jaxpr_as_fun(ClosedJaxpr(scan.body, scan.body_consts))
    # Forward and backward are different loops, which XLA does not merge.
    return scan.apply(checkpoint(function, prevent_cse=False), inputs)
