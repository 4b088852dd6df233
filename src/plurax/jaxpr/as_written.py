"""Attention on all keys at once, as it is written, where tokens are split over devices.

    context=4, 8 heads, T = S = 1,024    queries on a device    keys       scores
    before and behind attention          256 of 8 heads         as these
    in attention, "gather"               256 of 8 heads         1,024      (8, 256, 1,024)
    in attention, "heads"                1,024 of 2 heads       1,024      (2, 1,024, 1,024)

Blocks pay where the scores are too large to be held. A `Plan(stream=...)` of as many keys as there
are says that they are not, and compilers fuse what is written (a transformer of 8 layers on H100s:
82 ms in blocks, 30 as it is written).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jaxtyping import Array

from plurax.jaxpr.context import Context
from plurax.jaxpr.follow_dim import Region
from plurax.jaxpr.interpret import bind, constant, equation_context, needed, variables
from plurax.jaxpr.masked_queries import Queries
from plurax.jaxpr.random_blocks import draws_apart


def as_written(
    region: Region, context: Context, eqns: Sequence[Any], values: Mapping[Any, Any]
) -> list[Array]:
    """Return a region's results, in the order of `region.results`.

    **Arguments:** `eqns`, the function's, without calls; `values`, of what the region reads.
    """
    steps = needed(eqns, region.results, set(region.reads()))
    inner = {var for eqn in steps for var in eqn.outvars}

    def is_beside(eqn: Any, place: int) -> bool:
        atom = eqn.invars[place]
        read = isinstance(atom, Literal) or (id(eqn), place) in region.read
        return not read and atom not in inner

    places = [(eqn, place) for eqn in steps for place in range(len(eqn.invars))]
    beside = list(dict.fromkeys(eqn.invars[n] for eqn, n in places if is_beside(eqn, n)))

    def attention(*arrays: Array) -> list[Array]:
        known: dict[Any, Any] = dict(zip((*region.inputs, *beside), arrays, strict=True))
        for eqn in steps:
            atoms = [region.read.get((id(eqn), n), atom) for n, atom in enumerate(eqn.invars)]
            inputs = [constant(a) if isinstance(a, Literal) else known[a] for a in atoms]
            with equation_context(eqn):
                results = bind(eqn, inputs)
            for var, array in zip(eqn.outvars, results, strict=True):
                # The places that a mask compares, and what is drawn, begin here.
                begins = not variables(eqn.invars) or draws_apart(eqn)
                labels = region.labels.get(var, ()) if begins else ()
                known[var] = context.of_queries(region, labels, array)
        return [known[var] for var in region.results]

    # In it no dim is followed: it may be split by heads, and not by tokens.
    run = jax.custom_vjp(attention)
    run.defvjp(lambda *args: jax.vjp(attention, *args), lambda pull, of_results: pull(of_results))
    queries = Queries([(0, 1, None)])
    inputs = context.of_inputs(region, queries, [values[var] for var, _ in region.inputs])
    results = run(*context.with_keys(region, inputs), *(values[var] for var in beside))
    return context.of_results(region, queries, results)
