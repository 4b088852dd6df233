"""Reduce gradients over devices while the backward pass computes others.

A step adds up the gradients of its microbatches on each device, and reduces the sums once. After
the last microbatch nothing is left to compute but the update, so most of the reduction is waited
for. The last microbatch's backward pass can hide it: the gradient of a layer is complete as soon as
its part of the last microbatch is.

    forward, backward of microbatches 1 .. M-1                            sums on each device
    forward of microbatch M
    backward of microbatch M:   layer 5 | layer 4 | layer 3 | ...
    all-reduce of sum + part:             layer 5 | layer 4 | ...         as many bytes as after it

The layers of a scanned network are the iterations of a loop, which reads the sums row by row and
writes the reduced rows in their place (`partition/stacked_results.py`). What no loop stacks is
reduced after the gradient's last equation; a compiler moves that up.

Li et al. 2020, "PyTorch Distributed" (https://arxiv.org/abs/2006.15704), section 3.2.3, overlaps
reductions with the backward pass of the last of several accumulated batches.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jaxtyping import Array, PyTree

from plurax.execute.gradient import Totals
from plurax.execute.rows import Rows
from plurax.execute.totals import Gradient, LastGradient, added
from plurax.jaxpr.compat import Scan
from plurax.jaxpr.interpret import (
    constant,
    dependent,
    evaluate,
    flat_equations,
    interpret,
    needed,
    variables,
)
from plurax.jaxpr.loop_constants import broadcasts_inside
from plurax.partition.buckets import computed_at
from plurax.partition.partial_sums import SUMS
from plurax.partition.rule_context import count_readers
from plurax.partition.stacked_results import rows_inside
from plurax.plan import Plan
from plurax.sharding.in_turn import psum_in_turn
from plurax.sharding.reduce_dtype import SumRounding

Reduce = Callable[[Sequence[Array], Collection[int]], list[Array]]
"""Sums arrays over devices; those at the indices are no gradients."""
PLATFORMS = frozenset({"gpu"})
"""Platforms whose compilers run a reduction beside other operations."""


def reduces_early(plan: Plan, platform: str | None) -> bool:
    """Whether gradients are reduced in the backward pass of the last microbatch alone.

    From ZeRO 2 on they are in that of every microbatch. Of two microbatches the loop before the
    last has one iteration, which XLA writes out; then it keeps the activations of both, which
    without remat are most of the memory: GPT's temporaries of 2.4 GiB became 4.1.
    """
    keeps_both = plan.microbatches == 2 and plan.remat != "full"
    return platform in PLATFORMS and plan.data > 1 and plan.zero < 2 and not keeps_both


def last_gradient(fun: Gradient) -> LastGradient:
    """Return `(params, model_state, rows, sums) -> (totals, model_state)`, totals added to sums."""

    def run(
        params: PyTree, model_state: PyTree, rows: Rows, sums: Totals | None
    ) -> tuple[Totals, PyTree]:
        part, model_state = fun(params, model_state, rows)
        return added(sums, part), model_state

    return run


def reduced_gradient(fun: Gradient, rounding: SumRounding) -> LastGradient:
    """Return `last_gradient(fun)` with its totals summed over `data`. Call it inside `shard_map`.

    `fun` runs on one device that has the whole network.
    """
    in_turn = functools.partial(psum_in_turn, names="data", platform=rounding.platform)
    return _evaluated(last_gradient(fun), functools.partial(rounding.sums, in_turn))


def in_order(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a gradient whose parts that wait for no loop over layers are computed before it.

    Nothing else needs them before the update, so a compiler may leave their last products until
    after the loop, and keep what they read, such as the logits.
    """
    return _evaluated(fun, None)


def _evaluated(fun: Callable[..., Any], reduce: Reduce | None) -> Callable[..., Any]:
    """Return a function that evaluates the equations of `fun`, which returns totals and a state."""

    def run(*args: PyTree) -> tuple[Totals, PyTree]:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        count, exact = (len(jax.tree.leaves(t)) for t in (shapes[0], shapes[0]._replace(grads=())))
        out = _results(closed, jax.tree.leaves(args), count, exact, reduce)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run


def _results(
    closed: Any, args: Sequence[Array], totals: int, exact: int, reduce: Reduce | None
) -> list[Array]:
    """Evaluate a traced gradient; the first `totals` of its results are reduced.

    The first `exact` of these are no gradients.
    """
    jaxpr = closed.jaxpr
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))
    flat = flat_equations(jaxpr.eqns, jaxpr.outvars, known)
    known |= flat.constants
    eqns = flat.replaced(broadcasts_inside(flat.eqns, flat.results))
    readers = count_readers(eqns, flat.results)
    # Nothing else may read what is reduced where it is computed.
    wanted = {var for var in variables(flat.results[:totals]) if readers[var] == 1}
    eqns = flat.replaced(rows_inside(eqns, wanted, flat.results, known))
    order = computed_at(eqns, flat.results)
    reduced = set[Any]()
    for loop in [eqn for eqn in eqns if _wanted_stacks(eqn, wanted)]:
        # What does not wait for the loop: also sums that stand after it.
        late = dependent(eqns, loop.outvars)
        ready = [atom for atom in flat.results[:totals] if not _is_among(atom, late)]
        _, carry, stacks = Scan.of(loop).split(loop.invars)
        # Nor is a forward pass recomputed before, where the compiler writes out an iteration.
        kept = [var for var in variables(stacks) if var not in jaxpr.invars]
        tied = list(dict.fromkeys(variables([*ready, *carry, *kept])))
        before = needed(eqns, [*tied, *loop.invars], known)
        known |= _computed(before, known)
        known |= zip(tied, lax.optimization_barrier([known[var] for var in tied]), strict=True)
        operands = [_value(atom, known) for atom in loop.invars]
        if reduce is None:
            out = _run_loop(loop, operands)
        else:
            reducing = _wanted_stacks(loop, wanted)
            out = _ReducingLoop(loop, reducing, reduce).run(operands)
            reduced.update(loop.outvars[index] for index in reducing)
        known |= zip(loop.outvars, out, strict=True)
        done = {id(eqn) for eqn in (*before, loop)}
        eqns = [eqn for eqn in eqns if id(eqn) not in done]
    known |= _computed(eqns, known)
    out = [_value(atom, known) for atom in flat.results]
    if reduce is not None:
        left = [i for i in range(totals) if not _is_among(flat.results[i], reduced)]
        left.sort(key=lambda index: order[index])
        others = [place for place, index in enumerate(left) if index < exact]
        sums = reduce([jnp.asarray(out[index]) for index in left], others)
        for index, array in zip(left, sums, strict=True):
            out[index] = array
    return out


def _wanted_stacks(eqn: Any, wanted: Container[Any]) -> list[int]:
    """Return the indices of the stacked results of a loop that are `wanted`."""
    first = Scan.of(eqn).num_carry if eqn.primitive.name == "scan" else len(eqn.outvars)
    return [i for i, var in enumerate(eqn.outvars) if i >= first and var in wanted]


def _run_loop(eqn: Any, operands: Sequence[Any]) -> list[Array]:
    """Run a `scan` by its body alone: the equation's other parameters count other operands, since
    rows are read inside."""
    scan = Scan.of(eqn)
    return scan.apply(lambda *args: interpret(scan.body, scan.body_consts, args), operands)


def _computed(eqns: Sequence[Any], known: Mapping[Any, Any]) -> dict[Any, Array]:
    """Return the values of the variables that equations compute."""
    results = [var for eqn in eqns for var in eqn.outvars]
    return dict(zip(results, evaluate(eqns, known, results), strict=True))


def _is_among(atom: Any, some: Container[Any]) -> bool:
    return not isinstance(atom, Literal) and atom in some


def _value(atom: Any, known: Mapping[Any, Any]) -> Any:
    return constant(atom) if isinstance(atom, Literal) else known[atom]


class _ReducingLoop:
    """A `scan` that reduces the rows of some of its stacked results, `stacks`, by their index.

    A result that is a sum with the rows of an input of its shape is written into that input, which
    the loop carries: there is one such stack in memory, not two.
    """

    def __init__(self, eqn: Any, stacks: Sequence[int], reduce: Reduce) -> None:
        self._scan, self._reduce = Scan.of(eqn), reduce
        body = self._scan.body
        order = computed_at(body.eqns, body.outvars)
        self._stacks = sorted(stacks, key=lambda index: order[index])
        # By the index of a result, that of the input into which it is written.
        self._written = {
            index: place
            for index in self._stacks
            if (place := self._added_to(eqn, index)) is not None
        }

    def _added_to(self, eqn: Any, index: int) -> int | None:
        """Return the input whose rows are added to a result's, and read by nothing else."""
        body, scan = self._scan.body, self._scan
        rows = body.invars[scan.num_consts + scan.num_carry :]
        for one in body.eqns:
            if body.outvars[index] in one.outvars and one.primitive.name in SUMS:
                for atom in one.invars:
                    if not isinstance(atom, Literal) and atom in rows:
                        place = list(body.invars).index(atom)
                        alone = count_readers(body.eqns, body.outvars)[atom] == 1
                        same = eqn.invars[place].aval.dtype == eqn.outvars[index].aval.dtype
                        return place if alone and same else None
        return None

    def run(self, inputs: Sequence[Any]) -> list[Array]:
        """Run the loop, and return the carry and the stacked results."""
        scan, written = self._scan, self._written
        consts, carry, _ = scan.split(inputs)
        places = list(written.values())
        first = scan.num_consts + scan.num_carry
        others = [place for place in range(first, len(inputs)) if place not in places]
        results = [i for i in range(scan.num_carry, len(scan.body.outvars)) if i not in written]

        def iteration(carry: Sequence[Any], rows: Sequence[Any]) -> list[Array]:
            at, buffers = rows[0], carry[scan.num_carry :]
            values = dict(zip(others, rows[1:], strict=True))
            for place, buffer in zip(places, buffers, strict=True):
                values[place] = lax.dynamic_index_in_dim(buffer, at, keepdims=False)
            operands = [*consts, *carry[: scan.num_carry]]
            operands += [values[place] for place in range(first, len(inputs))]
            out = interpret(scan.body, scan.body_consts, operands)
            sums = self._reduce([out[index] for index in self._stacks], ())
            for index, array in zip(self._stacks, sums, strict=True):
                out[index] = array
            new = [
                lax.dynamic_update_index_in_dim(buffer, out[index], at, 0)
                for index, buffer in zip(written, buffers, strict=True)
            ]
            return [*out[: scan.num_carry], *new, *(out[index] for index in results)]

        loop = dataclasses.replace(scan, num_carry=scan.num_carry + len(places))
        start = [*carry, *(inputs[place] for place in places)]
        xs = [jnp.arange(scan.length), *(inputs[place] for place in others)]
        found = loop.run(iteration, start, xs)
        by_result = dict(zip([*range(scan.num_carry), *written, *results], found, strict=True))
        return [by_result[index] for index in range(len(scan.body.outvars))]
