"""Attention on one block of keys at a time: blocks added up, corrected, and differentiated.

    4 heads, T = S = 4096, width 64, float32     whole              in blocks of 512
    x = q · k, and what follows from it          256 MiB a value    32 MiB
    carried: m and l (T,), o (T, 64)                                4.1 MiB

    for each block:
        m' = max(m, max(y))               y the user's scores, with bias, mask and soft cap
        c  = exp(m - m')
        l' = l c + sum(exp(y - m'))       the user's sums, in which m' stands for the maximum,
        o' = o c + exp(y - m') · v        1 for divisors and 0 for further terms
    after the last: o / l                 the factors that stood for 1, 0 and m'

A weight of the form `free × exp(Σ ± z) × Π d^(± 1)` is computed on a block as `free × exp(-m')`, so
its sum is right after a multiplication with exp(m + Σ ± z) Π d^(± 1), a number for each query.

The derivative keeps m and the sums, as others keep log-sum-exp, and evaluates each block again:
what is behind the sums is differentiated as it stands, and then each block, with the maximum as a
constant. For softmax that is dx = p (do · v - sum(p do · v)), in one pass.

Sources: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax",
https://arxiv.org/abs/1805.02867; Rabe and Staats 2021, "Self-attention Does Not Need O(n²) Memory",
https://arxiv.org/abs/2112.05682; Dao 2023, "FlashAttention-2", https://arxiv.org/abs/2307.08691.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal
from jaxtyping import Array

from plurax.jaxpr.barrier import order_after, pick_dependency
from plurax.jaxpr.block_arrays import (
    combine,
    filled,
    finite,
    floating,
    inverse,
    neutral,
    plus,
    stack_blocks,
    transposed,
    wide_dtype,
    zero_blocks,
)
from plurax.jaxpr.context import Context, own_blocks
from plurax.jaxpr.equal_dims import shape_of
from plurax.jaxpr.follow_dim import Region, own_dims
from plurax.jaxpr.forms import EXTREMES, Form
from plurax.jaxpr.interpret import bind, constant, equation_context
from plurax.jaxpr.joined_dims import aligned
from plurax.jaxpr.loop_constants import changing
from plurax.jaxpr.masked_queries import Queries, Range, is_empty
from plurax.jaxpr.random_blocks import bits_of_block
from plurax.tree import sum_dtype

STREAMED = "plurax_stream"
"""The name of what the derivative keeps, for rematerialization."""

_Body = Callable[[list[Any], Any, int, list[Any]], tuple[list[Any], list[Any]]]
"""From what is carried, the first key of a block, their number and the inputs of the block, to what
is carried on and what is returned for the block."""


class KeyBlocks:
    """A region as a function of its inputs, with a derivative.

    Arrays come in the order of `region.inputs`; what statistics read besides in that of `beside`.

    Operands of products are transposed once, before the loop, to have the dims first that both
    operands share: for keys (B, S, N, H) of N heads that is (B, N, S, H). XLA's CPU compiler would
    transpose them for each block.
    """

    def __init__(
        self,
        region: Region,
        block: int,
        context: Context | None = None,
        queries: Queries | None = None,
    ) -> None:
        self._context = context
        self.region, self.block, self.beside = region, block, region.beside()
        self.whole, self.rest = divmod(region.size, block)
        self._queries = queries or Queries([(0, self.whole, None)])
        self._order = self._queries.order
        # The inputs as blocks read them: the place in `region.inputs`, and the order of the dims.
        self._operands: list[tuple[int, tuple[int, ...]]] = []
        self._read: dict[tuple[int, int], int] = {}
        self._numbers: dict[int, Any] = {}
        for eqn in (*region.eqns, *(eqn for eqn, _ in region.reductions)):
            self._order_operands(eqn)
        self._dims = [
            None if (dim := region.inputs[place][1]) is None else order.index(dim)
            for place, order in self._operands
        ]
        # The dim of the queries of each of them, also in a block.
        self._rows: list[int | None] = [None] * len(self._operands)
        for read, number in self._read.items():
            if read in self._queries.dims:
                self._rows[number] = self._operands[number][1].index(self._queries.dims[read])

    def _order_operands(self, eqn: Any) -> None:
        """Set in which order an equation reads the dims of inputs."""
        product = eqn.primitive.name == "dot_general"
        sums, batches = eqn.params["dimension_numbers"] if product else ((), ())
        new_sums, new_batches = list(sums), list(batches)
        for place, atom in enumerate(eqn.invars):
            source = self.region.read.get((id(eqn), place))
            if source is None:
                continue
            order = tuple(range(len(shape_of(atom))))
            if product:
                order = (*batches[place], *(d for d in order if d not in batches[place]))
                new_sums[place] = tuple(map(order.index, sums[place]))
                new_batches[place] = tuple(range(len(batches[place])))
            operand = (self.region.inputs.index(source), order)
            if operand not in self._operands:
                self._operands.append(operand)
            self._read[id(eqn), place] = self._operands.index(operand)
        if product:
            self._numbers[id(eqn)] = (tuple(new_sums), tuple(new_batches))

    def __call__(self, inputs: list[Any], beside: list[Any]) -> list[Array]:
        """Return the region's results, in the order of `region.results`.

        Keys and values become a stack of blocks here. So where their tokens are split over devices
        they are gathered once, before the loop, and not in it.
        """
        if self._context is not None:
            inputs = self._context.of_inputs(self.region, self._queries, inputs)
        arrays = [transposed(inputs[place], order) for place, order in self._operands]
        pairs = list(zip(arrays, self._dims, strict=True))
        end = self.whole * self.block
        constant = [x if dim is None else None for x, dim in pairs]
        stacked = [None if dim is None else stack_blocks(x, dim, self.block) for x, dim in pairs]
        ends = [
            None if dim is None or not self.rest else lax.slice_in_dim(x, end, None, axis=dim)
            for x, dim in pairs
        ]
        run = jax.custom_vjp(lambda *args: self._forward(*args)[0])
        run.defvjp(self._forward_of_primals, self._backward, symbolic_zeros=True)
        results: list[Array] = run(constant, stacked, ends, beside)
        if self._context is not None:
            results = self._context.of_results(self.region, self._queries, results)
        return results

    # --- Forward --------------------------------------------------------------------------------

    def _forward_of_primals(self, *primals: list[Any]) -> tuple[list[Array], Any]:
        """Return the results, and what the derivative reads: also which inputs have one.

        A mask of floating numbers has none, and would have an array of queries by keys.
        """
        # Of no leaves, since they are no arrays.
        perturbed = [
            [() if x is not None and x.perturbed else None for x in one] for one in primals
        ]
        args = [[None if x is None else x.value for x in one] for one in primals]
        results, kept = self._forward(*args)
        return results, (perturbed, *kept)

    def _forward(
        self, constant: list[Any], stacked: list[Any], ends: list[Any], beside: list[Any]
    ) -> tuple[list[Array], Any]:
        """Return the results, and what the derivative reads.

        **Arguments:** the inputs without the dim, the blocks of the others, and what is left of
        these; each with None in the places of the others.
        """

        def of_queries(seen: Range | None) -> _Body:
            fixed = self._seen(constant, seen)

            def body(carry: list[Any], start: Any, size: int, rows: list[Any]) -> Any:
                parts = filled(fixed, self._seen(rows, seen))
                shift, sums = self._added((carry[0], carry[1:]), parts, start, size, seen)
                return [shift, *sums], [None] * len(rows)

            return body

        blocks = self._starts(constant + stacked), self._received(stacked), ends
        shift, sums = self._empty()
        (shift, *sums), _, _ = self._over_blocks(
            of_queries, [shift, *sums], self._carried_rows, blocks, [None] * len(stacked)
        )
        shift, sums = jax.tree.map(lambda x: checkpoint_name(x, STREAMED), (shift, sums))
        return self._finish(sums, shift, beside), (constant, stacked, ends, beside, shift, sums)

    def _scope(self) -> contextlib.AbstractContextManager[None]:
        """Return the scope of the loop over blocks."""
        context = self._context
        if context is None:
            return contextlib.nullcontext()
        return context.scope(context.groups(self.region))

    def _starts(self, arrays: Sequence[Any]) -> Array:
        """Return the first key of each whole block.

        They depend on the `arrays`: rematerialization keeps what depends on no argument, and what
        follows from the starts alone, a causal mask, would be an array of queries by keys.
        """
        starts = self.block * jnp.arange(self.whole, dtype=jnp.int32)
        starts = self._order.places(starts, self.region.size)
        return order_after([starts], pick_dependency([x for x in arrays if x is not None]))[0]

    def _empty(self) -> tuple[Any, list[Array]]:
        """Return the maximum and the sums of no key."""
        shift = None
        if self.region.shifted is not None:
            aval = self.region.shifted.aval
            rows = [n for d, n in enumerate(aval.shape) if d != self._dim(self.region.shifted)]
            shift = jnp.full(rows, -jnp.inf, sum_dtype(aval.dtype))
        sums = []
        for eqn, _ in self.region.reductions:
            aval = eqn.outvars[0].aval
            if eqn.primitive.name in EXTREMES:
                start = neutral(eqn.primitive.name, aval.dtype)
                sums.append(jnp.full(aval.shape, start, aval.dtype))
            else:
                zeros = jnp.zeros(aval.shape, wide_dtype(aval.dtype))
                sums.append(transposed(zeros, self._stored[id(eqn)]))
        return shift, sums

    def _seen(self, arrays: Sequence[Any], seen: Range | None) -> list[Any]:
        """Return the inputs, of a block or without the dim, of the queries that are seen."""
        return self._order.cut(arrays, self._rows, seen)

    @functools.cached_property
    def _carried_rows(self) -> list[int | None]:
        """The dim of the queries in the maximum and in each sum, as the loop carries them."""
        dims, shifted = self._queries.dims, self.region.shifted
        row = dims.get(shifted)
        rows = [None if row is None else row - (row > self._dim(shifted))]
        for eqn, _ in self.region.reductions:
            row = dims.get(eqn.outvars[0])
            rows.append(None if row is None else self._stored[id(eqn)].index(row))
        return rows

    def _over_blocks(
        self,
        of_queries: Callable[[Range | None], _Body],
        carry: list[Any],
        dims: Sequence[int | None],
        blocks: tuple[Array, list[Any], list[Any]],
        moved: list[Any],
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Carry values over all blocks; return them, and what the bodies return beside.

        **Arguments:** `of_queries`, the body of the loop for the queries that a group of blocks
        is seen by; `dims`, those of the queries in the values that are carried; `blocks`, the
        starts, the stacked inputs and what is left of them; `moved`, the stacked inputs of which
        the bodies return something of the same shape.
        """
        starts, stacked, ends = blocks
        of_groups: list[list[Any]] = []
        for first, last, seen in self._queries.groups:
            if is_empty(seen):
                of_groups.append([zero_blocks(x, last - first) for x in moved])
                continue
            body = of_queries(seen)

            def iteration(own: list[Any], block: Any, body: _Body = body) -> Any:
                start, rows = block
                return body(own, start, self.block, rows)

            group = [starts, *stacked]
            group = self._order.cut(group, [0] * len(group), (first, last))
            if of_groups:
                # Else the scores of all groups are computed first, which depend on no sum.
                before = pick_dependency(jax.tree.leaves([carry, of_groups]))
                tied = iter(order_after([x for x in group if x is not None], before))
                group = [None if x is None else next(tied) for x in group]
            own = self._order.cut(carry, dims, seen)
            with self._scope():
                own, of_rows = lax.scan(iteration, own, (group[0], group[1:]))
            carry = self._order.with_parts(carry, own, dims, seen)
            of_groups.append(of_rows)
        of_stacked = [
            None if x[0] is None else own_blocks(x, self._order)
            for x in zip(*of_groups, strict=True)
        ]
        seen, of_ends = self._queries.rest, [None] * len(ends)
        if self.rest and is_empty(seen):
            of_ends = [
                None if x is None else zero_blocks(y) for x, y in zip(moved, ends, strict=True)
            ]
        elif self.rest:
            own, start = self._order.cut(carry, dims, seen), self.whole * self.block
            own, of_ends = of_queries(seen)(own, start, self.rest, ends)
            carry = self._order.with_parts(carry, own, dims, seen)
        return carry, of_stacked, of_ends

    def _received(self, stacked: Sequence[Any], by: Sequence[Array] = ()) -> list[Any]:
        """Return stacks of blocks as devices receive them, where tokens are split."""
        if self._context is None:
            return list(stacked)
        return self._context.received(stacked, self._order, by)

    def _added(
        self, carry: Any, parts: Sequence[Any], start: Any, size: int, seen: Range | None
    ) -> Any:
        """Return the maximum and the sums with those of one more block."""
        old, sums = carry
        new: list[Any] = [old]

        def shifted(scores: Array) -> Array:
            new[0] = jnp.maximum(old, scores.max(self._dim(self.region.shifted)).astype(old.dtype))
            return finite(new[0])

        of_block = self._block(parts, start, size, seen, shifted)
        scale: Any = None
        if old is not None:
            scale = jnp.where(old == new[0], 1, jnp.exp(old - finite(new[0])))
        added = []
        for (eqn, form), total, part in zip(self.region.reductions, sums, of_block, strict=True):
            name = eqn.primitive.name
            if name in EXTREMES:
                added.append(combine(name, total, part))
                continue
            if form.terms:
                own = self._aligned(scale, self._shift_labels(), eqn.outvars[0])
                total = total * transposed(own, self._stored[id(eqn)])
            added.append(total + part.astype(total.dtype))
        return new[0], added

    def _block(
        self,
        parts: Sequence[Any],
        start: Any,
        size: int,
        seen: Range | None,
        shifted: Callable[[Array], Array],
    ) -> list[Array]:
        """Evaluate the region on the keys from `start` on, and return its reductions' parts.

        **Arguments:** `parts`, the inputs of the block and of the queries that are `seen`;
        `shifted` returns the maximum from the values of which it is taken.
        """
        region = self.region
        computed: dict[Any, Any] = {}
        maximum: list[Any] = []

        def operand(eqn: Any, place: int) -> Any:
            atom = eqn.invars[place]
            if isinstance(atom, Literal):
                return jnp.asarray(constant(atom))
            stands = region.stand_ins.get((id(eqn), place))
            if stands is not None:
                kind, number = stands
                shape = self._shape(atom, (id(eqn), place), seen)
                if kind == "constant":
                    return jnp.full(shape, number, atom.aval.dtype)
                if not maximum:
                    maximum.append(shifted(computed[region.shifted]))
                value = self._aligned(maximum[0], self._shift_labels(), atom)
                return jnp.broadcast_to(-number * value, shape).astype(atom.aval.dtype)
            if (id(eqn), place) in self._read:
                return parts[self._read[id(eqn), place]]
            return computed[atom]

        sums: dict[int, Array] = {}
        for eqn in (*region.eqns, *(eqn for eqn, _ in region.reductions)):
            arrays = [operand(eqn, place) for place in range(len(eqn.invars))]
            with equation_context(eqn):
                if eqn.outvars[0] in region.dims:
                    out = self._resized(eqn, arrays, start, size, seen)
                    computed[eqn.outvars[0]] = out
                else:
                    sums[id(eqn)] = self._reduced(eqn, arrays)
        return [sums[id(eqn)] for eqn, _ in region.reductions]

    def _shape(self, var: Any, node: Any, seen: Range | None) -> list[int]:
        """Return the shape of a variable, on the queries that are seen."""
        shape, row = list(shape_of(var)), self._queries.dims.get(node)
        if seen is not None and row is not None:
            shape[row] = seen[1] - seen[0]
        return shape

    def _resized(
        self, eqn: Any, arrays: Sequence[Any], start: Any, size: int, seen: Range | None
    ) -> Array:
        """Apply an equation to a block of `size` keys, and to the queries that are seen."""
        (out,), dim = eqn.outvars, self._dim(eqn.outvars[0])
        name, shape = eqn.primitive.name, self._shape(out, out, seen)
        shape[dim] = size
        row = self._queries.dims.get(out)

        def places(counts: Array, along: int) -> Array:
            if along == dim:
                return counts + jnp.asarray(start, counts.dtype)
            counts = self._own_places(out, counts, along)
            return self._order.places(counts, self._queries.size, seen) if along == row else counts

        if name == "iota":
            along = eqn.params["dimension"]
            counts = lax.iota(jnp.int32, shape[along])
            if self._queries.dims:
                counts = changing(counts, start)
            numbers = places(counts, along).astype(out.aval.dtype)
            return lax.broadcast_in_dim(numbers, shape, (along,))
        if name == "random_bits":
            return bits_of_block(eqn, arrays[0], shape, places)
        changed: dict[str, Any] = {}
        if name == "dot_general":
            changed["dimension_numbers"] = self._numbers[id(eqn)]
        elif name == "broadcast_in_dim":
            changed["shape"] = tuple(shape)
            if arrays[0].ndim == 0 and self._queries.dims:
                arrays = [changing(arrays[0], start)]
        elif name == "reshape":
            changed["new_sizes"] = tuple(shape)
        return bind(eqn, arrays, **changed)[0]

    def _own_places(self, var: Any, places: Array, dim: int) -> Array:
        """Return the places along a dim of a value: where it is one of tokens, those of the tokens
        that a device has. An array of all would be held by each."""
        if self._context is None:
            return places
        return self._context.of_queries(self.region, (self.region.labels[var][dim],), places)

    def _reduced(self, eqn: Any, arrays: Sequence[Array]) -> Array:
        """Apply a reduction, or a product that contracts the dim, to a block; sums are wide."""
        wide = wide_dtype(eqn.outvars[0].aval.dtype)
        if eqn.primitive.name == "dot_general":
            numbers = self._numbers[id(eqn)]
            if self._is_swapped(eqn):
                arrays, numbers = arrays[::-1], tuple(pair[::-1] for pair in numbers)
            return bind(eqn, arrays, preferred_element_type=wide, dimension_numbers=numbers)[0]
        if eqn.primitive.name == "reduce_sum":
            return bind(eqn, [arrays[0].astype(wide)])[0]
        return bind(eqn, arrays)[0]

    def _is_swapped(self, eqn: Any) -> bool:
        """Whether a product has values before weights, as `jnp.einsum` may write it.

        Weights (B, N, T, S) by values (B, N, S, H) need no transposition of the larger array.
        """
        if eqn.primitive.name != "dot_general":
            return False
        values, weights = ((id(eqn), place) in self._read for place in (0, 1))
        return values and not weights

    @functools.cached_property
    def _stored(self) -> dict[int, tuple[int, ...]]:
        """Of each reduction the order in which the loop carries the dims of its result."""
        orders = {}
        for eqn, _ in self.region.reductions:
            order = tuple(range(len(shape_of(eqn.outvars[0]))))
            if self._is_swapped(eqn):
                left, right = map(len, own_dims(eqn))
                batch = len(order) - left - right
                order = (*order[:batch], *order[batch + left :], *order[batch : batch + left])
            orders[id(eqn)] = order
        return orders

    def _dim(self, var: Any) -> int:
        return self.region.dims[var]

    def _shift_labels(self) -> tuple[int, ...]:
        """Return the labels of the maximum's dims."""
        var = self.region.shifted
        return tuple(n for d, n in enumerate(self.region.labels[var]) if d != self._dim(var))

    def _aligned(self, array: Array, labels: Sequence[int], var: Any) -> Array:
        """Return an array with its dims, by their labels, where `var` has them, else of size 1."""
        return aligned(array, labels, self.region.labels[var], self.region.parts)

    # --- Behind the last block ------------------------------------------------------------------

    def _finish(self, sums: Sequence[Array], shift: Any, beside: Sequence[Any]) -> list[Array]:
        """Return the results from the sums: each by its factor, and what follows from them."""
        region = self.region
        known = dict(zip(self.beside, beside, strict=True))
        totals = {id(eqn): total for (eqn, _), total in zip(region.reductions, sums, strict=True)}
        for eqn, form in region.behind:
            if form is not None:
                (out,) = eqn.outvars
                total = transposed(totals[id(eqn)], inverse(self._stored[id(eqn)]))
                factor = self._factor(out, form, shift, known)
                known[out] = (total if factor is None else total * factor).astype(out.aval.dtype)
                continue
            inputs = [constant(a) if isinstance(a, Literal) else known[a] for a in eqn.invars]
            with equation_context(eqn):
                known.update(zip(eqn.outvars, bind(eqn, inputs), strict=True))
        return [known[var] for var in region.results]

    def _factor(self, out: Any, form: Form, shift: Any, known: Mapping[Any, Any]) -> Array | None:
        """Return what a sum of weights is multiplied with, of size 1 along other dims."""
        factor: Any = None
        if form.terms:
            labels = self._shift_labels()
            exponent = self._aligned(finite(shift), labels, out)
            for var, sign in form.terms:
                term = self._aligned(known[var], self.region.labels[var], out)
                exponent = exponent + sign * term.astype(exponent.dtype)
            factor = jnp.exp(exponent)
        for var, sign in form.factors:
            term = self._aligned(known[var], self.region.labels[var], out)
            term = term.astype(wide_dtype(term.dtype))
            term = term if sign > 0 else 1 / term
            factor = term if factor is None else factor * term
        return factor

    # --- Backward -------------------------------------------------------------------------------

    def _backward(self, kept: Any, cotangents: list[Array]) -> tuple[list[Any], ...]:
        """Return the cotangents of what `_forward` takes."""
        perturbed, constant, stacked, ends, beside, shift, sums = kept
        cotangents = [
            jnp.zeros(ct.shape, ct.dtype) if isinstance(ct, SymbolicZero) else ct
            for ct in cotangents
        ]
        summed = [eqn.primitive.name not in EXTREMES for eqn, _ in self.region.reductions]

        def finish(some: list[Any], others: list[Any]) -> list[Array]:
            return self._finish(filled(sums, some), shift, filled(beside, others))

        _, pull = jax.vjp(finish, floating(sums, summed), floating(beside, perturbed[3]))
        of_sums, of_beside = pull(cotangents)

        def of_queries(seen: Range | None) -> _Body:
            fixed = self._seen(constant, seen)
            own, *of_own = self._order.cut([shift, *of_sums], self._carried_rows, seen)
            known = [ct for ct in of_own if ct is not None]

            def body(carry: list[Any], start: Any, size: int, rows: list[Any]) -> Any:
                def sums_of(some: list[Any], others: list[Any]) -> list[Any]:
                    parts = filled(filled(fixed, some), self._seen(filled(rows, others), seen))
                    totals = self._block(parts, start, size, seen, lambda scores: finite(own))
                    return [t for t, ct in zip(totals, of_own, strict=True) if ct is not None]

                moved = floating(fixed, perturbed[0])
                totals, pull = jax.vjp(sums_of, moved, floating(rows, perturbed[1]))
                pairs = zip(known, totals, strict=True)
                more, of_rows = pull([ct.astype(t.dtype) for ct, t in pairs])
                return plus(carry, more), of_rows

            return body

        totals = [
            None if x is None else jnp.zeros(x.shape, wide_dtype(x.dtype))
            for x in floating(constant, perturbed[0])
        ]
        blocks = self._starts(cotangents), self._received(stacked, cotangents), ends
        moved = floating(stacked, perturbed[1])
        totals, of_stacked, of_ends = self._over_blocks(
            of_queries, totals, self._rows, blocks, moved
        )
        of_constant = [
            None if total is None else total.astype(x.dtype)
            for total, x in zip(totals, constant, strict=True)
        ]
        return of_constant, of_stacked, of_ends, of_beside
