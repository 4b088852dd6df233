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
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal
from jaxtyping import Array

from plurax.jaxpr.barrier import order_after, pick_dependency
from plurax.jaxpr.context import Context
from plurax.jaxpr.equal_dims import shape_of
from plurax.jaxpr.follow_dim import Region, own_dims
from plurax.jaxpr.forms import EXTREMES, Form
from plurax.jaxpr.interpret import bind, constant, equation_context
from plurax.jaxpr.random_blocks import bits_of_block
from plurax.tree import sum_dtype

STREAMED = "plurax_stream"
"""The name of what the derivative keeps, for rematerialization."""

RING = "plurax_ring"
"""The scope of a loop whose blocks go around in a ring of devices: their order does not matter."""


class KeyBlocks:
    """A region as a function of its inputs, with a derivative.

    Arrays come in the order of `region.inputs`; what statistics read besides in that of `beside`.

    Operands of products are transposed once, before the loop, to have the dims first that both
    operands share: for keys (B, S, N, H) of N heads that is (B, N, S, H). XLA's CPU compiler would
    transpose them for each block.
    """

    def __init__(self, region: Region, block: int, context: Context | None = None) -> None:
        self._context = context if context is not None and context.splits(region) else None
        if self._context is not None:
            block = self._context.block(region.size, block)
        self.region, self.block, self.beside = region, block, region.beside()
        self.whole, self.rest = divmod(region.size, block)
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
            inputs = self._context.of_inputs(self.region, inputs)
        arrays = [_transposed(inputs[place], order) for place, order in self._operands]
        pairs = list(zip(arrays, self._dims, strict=True))
        end = self.whole * self.block
        constant = [x if dim is None else None for x, dim in pairs]
        stacked = [None if dim is None else _stacked(x, dim, self.block) for x, dim in pairs]
        ends = [
            None if dim is None or not self.rest else lax.slice_in_dim(x, end, None, axis=dim)
            for x, dim in pairs
        ]
        run = jax.custom_vjp(lambda *args: self._forward(*args)[0])
        run.defvjp(self._forward_of_primals, self._backward, symbolic_zeros=True)
        results: list[Array] = run(constant, stacked, ends, beside)
        if self._context is not None:
            results = self._context.of_results(self.region, results)
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

        def iteration(carry: Any, block: Any) -> tuple[Any, None]:
            start, rows = block
            return self._added(carry, _with(constant, rows), start, self.block), None

        with self._scope():
            xs = self._starts(constant + stacked), stacked
            carry, _ = lax.scan(iteration, self._empty(), xs)
        if self.rest:
            carry = self._added(carry, _with(constant, ends), self.whole * self.block, self.rest)
        shift, sums = jax.tree.map(lambda x: checkpoint_name(x, STREAMED), carry)
        return self._finish(sums, shift, beside), (constant, stacked, ends, beside, shift, sums)

    @property
    def _goes_around(self) -> bool:
        return self._context is not None and self._context.strategy == "ring"

    def _scope(self) -> contextlib.AbstractContextManager[None]:
        """Return the scope of the loop over blocks: whether these go around in a ring."""
        return jax.named_scope(RING) if self._goes_around else contextlib.nullcontext()

    def _starts(self, arrays: Sequence[Any]) -> Array:
        """Return the first key of each whole block.

        They depend on the `arrays`: rematerialization keeps what depends on no argument, and what
        follows from the starts alone, a causal mask, would be an array of queries by keys.
        """
        starts = self.block * jnp.arange(self.whole, dtype=jnp.int32)
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
                sums.append(jnp.full(aval.shape, _neutral(eqn.primitive.name, aval.dtype)))
            else:
                zeros = jnp.zeros(aval.shape, _wide(aval.dtype))
                sums.append(_transposed(zeros, self._stored[id(eqn)]))
        return shift, sums

    def _added(self, carry: Any, parts: Sequence[Any], start: Any, size: int) -> Any:
        """Return the maximum and the sums with those of one more block."""
        old, sums = carry
        new: list[Any] = [old]

        def shifted(scores: Array) -> Array:
            new[0] = jnp.maximum(old, scores.max(self._dim(self.region.shifted)).astype(old.dtype))
            return _finite(new[0])

        of_block = self._block(parts, start, size, shifted)
        scale: Any = None
        if old is not None:
            scale = jnp.where(old == new[0], 1, jnp.exp(old - _finite(new[0])))
        added = []
        for (eqn, form), total, part in zip(self.region.reductions, sums, of_block, strict=True):
            name = eqn.primitive.name
            if name in EXTREMES:
                added.append(_combine(name, total, part))
                continue
            if form.terms:
                own = self._aligned(scale, self._shift_labels(), eqn.outvars[0])
                total = total * _transposed(own, self._stored[id(eqn)])
            added.append(total + part.astype(total.dtype))
        return new[0], added

    def _block(
        self, parts: Sequence[Any], start: Any, size: int, shifted: Callable[[Array], Array]
    ) -> list[Array]:
        """Evaluate the region on the keys from `start` on, and return its reductions' parts.

        **Arguments:** `parts`, the inputs of the block; `shifted` returns the maximum from the
        values of which it is taken.
        """
        region = self.region
        computed: dict[Any, Any] = {}
        maximum: list[Any] = []

        def operand(eqn: Any, place: int) -> Any:
            atom = eqn.invars[place]
            if isinstance(atom, Literal):
                return constant(atom)
            stands = region.stand_ins.get((id(eqn), place))
            if stands is not None:
                kind, number = stands
                if kind == "constant":
                    return jnp.full(shape_of(atom), number, atom.aval.dtype)
                if not maximum:
                    maximum.append(shifted(computed[region.shifted]))
                value = self._aligned(maximum[0], self._shift_labels(), atom)
                return jnp.broadcast_to(-number * value, shape_of(atom)).astype(atom.aval.dtype)
            if (id(eqn), place) in self._read:
                return parts[self._read[id(eqn), place]]
            return computed[atom]

        sums: dict[int, Array] = {}
        for eqn in (*region.eqns, *(eqn for eqn, _ in region.reductions)):
            arrays = [operand(eqn, place) for place in range(len(eqn.invars))]
            with equation_context(eqn):
                if eqn.outvars[0] in region.dims:
                    out = self._resized(eqn, arrays, start, size)
                    computed[eqn.outvars[0]] = out
                else:
                    sums[id(eqn)] = self._reduced(eqn, arrays)
        return [sums[id(eqn)] for eqn, _ in region.reductions]

    def _resized(self, eqn: Any, arrays: Sequence[Any], start: Any, size: int) -> Array:
        """Apply an equation to a block of `size` keys."""
        (out,), dim = eqn.outvars, self._dim(eqn.outvars[0])
        name, shape = eqn.primitive.name, list(shape_of(eqn.outvars[0]))
        shape[dim] = size
        if name == "iota":
            along = eqn.params["dimension"]
            counts = lax.iota(out.aval.dtype, shape[along])
            if along == dim:
                counts = counts + jnp.asarray(start, counts.dtype)
            return lax.broadcast_in_dim(self._own_places(out, counts, along), shape, (along,))
        if name == "random_bits":
            split = functools.partial(self._own_places, out)
            return bits_of_block(eqn, arrays[0], start, size, dim, split)
        changed: dict[str, Any] = {}
        if name == "dot_general":
            changed["dimension_numbers"] = self._numbers[id(eqn)]
        elif name == "broadcast_in_dim":
            changed["shape"] = tuple(shape)
        elif name == "reshape":
            changed["new_sizes"] = tuple(shape)
        return bind(eqn, arrays, **changed)[0]

    def _own_places(self, var: Any, places: Array, dim: int) -> Array:
        """Return the places along a dim of a value: where it is one of tokens, those of the tokens
        that a device has. An array of all would be held by each."""
        if self._context is None:
            return places
        return self._context.of_places(self.region, places, self.region.labels[var][dim])

    def _reduced(self, eqn: Any, arrays: Sequence[Array]) -> Array:
        """Apply a reduction, or a product that contracts the dim, to a block; sums are wide."""
        wide = _wide(eqn.outvars[0].aval.dtype)
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
        target = self.region.labels[var]
        kept = [d for d, label in enumerate(labels) if label in target]
        gone = tuple(d for d in range(array.ndim) if d not in kept)
        array = jnp.squeeze(array, gone)
        places = [target.index(labels[d]) for d in kept]
        order = sorted(range(len(places)), key=places.__getitem__)
        array = array.transpose(order)
        shape = [1] * len(target)
        for index in order:
            shape[places[index]] = array.shape[order.index(index)]
        return array.reshape(shape)

    # --- Behind the last block ------------------------------------------------------------------

    def _finish(self, sums: Sequence[Array], shift: Any, beside: Sequence[Any]) -> list[Array]:
        """Return the results from the sums: each by its factor, and what follows from them."""
        region = self.region
        known = dict(zip(self.beside, beside, strict=True))
        totals = {id(eqn): total for (eqn, _), total in zip(region.reductions, sums, strict=True)}
        for eqn, form in region.behind:
            if form is not None:
                (out,) = eqn.outvars
                total = _transposed(totals[id(eqn)], _inverse(self._stored[id(eqn)]))
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
            exponent = self._aligned(_finite(shift), labels, out)
            for var, sign in form.terms:
                term = self._aligned(known[var], self.region.labels[var], out)
                exponent = exponent + sign * term.astype(exponent.dtype)
            factor = jnp.exp(exponent)
        for var, sign in form.factors:
            term = self._aligned(known[var], self.region.labels[var], out)
            term = term.astype(_wide(term.dtype))
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
            return self._finish(_with(sums, some), shift, _with(beside, others))

        _, pull = jax.vjp(finish, _floating(sums, summed), _floating(beside, perturbed[3]))
        of_sums, of_beside = pull(cotangents)
        moved = _floating(constant, perturbed[0])

        def of_block(start: Any, size: int, rows: list[Any], marks: list[Any]) -> Any:
            """Return the cotangents of the inputs without the dim, and of the block's rows."""

            def sums_of(some: list[Any], others: list[Any]) -> list[Any]:
                parts = _with(_with(constant, some), _with(rows, others))
                totals = self._block(parts, start, size, lambda scores: _finite(shift))
                return [t for t, ct in zip(totals, of_sums, strict=True) if ct is not None]

            totals, pull = jax.vjp(sums_of, moved, _floating(rows, marks))
            given = [ct for ct in of_sums if ct is not None]
            return pull([ct.astype(t.dtype) for ct, t in zip(given, totals, strict=True)])

        def iteration(carry: list[Any], block: Any) -> tuple[list[Any], list[Any]]:
            more, rows = of_block(block[0], self.block, block[1], perturbed[1])
            return _plus(carry, more), rows

        if self._goes_around:
            # Or a compiler would keep what the forward pass received for the backward pass.
            known = [x for x in stacked if x is not None]
            tied = iter(order_after(known, pick_dependency(cotangents)))
            stacked = [None if x is None else next(tied) for x in stacked]
        totals = [None if x is None else jnp.zeros(x.shape, _wide(x.dtype)) for x in moved]
        with self._scope():
            xs = self._starts(cotangents), stacked
            totals, of_stacked = lax.scan(iteration, totals, xs)
        of_ends: list[Any] = [None] * len(ends)
        if self.rest:
            more, of_ends = of_block(self.whole * self.block, self.rest, ends, perturbed[2])
            totals = _plus(totals, more)
        of_constant = [
            None if total is None else total.astype(x.dtype)
            for total, x in zip(totals, constant, strict=True)
        ]
        return of_constant, of_stacked, of_ends, of_beside


# --- Arrays ---------------------------------------------------------------------------------------


def _neutral(name: str, dtype: Any) -> Any:
    """Return what an extreme starts with."""
    if dtype == jnp.bool_:
        return name in ("reduce_and", "reduce_min")
    largest = name == "reduce_max"
    if jnp.issubdtype(dtype, jnp.integer):
        limits = np.iinfo(dtype)
        return limits.min if largest else limits.max
    return -jnp.inf if largest else jnp.inf


def _combine(name: str, total: Array, part: Array) -> Array:
    """Return the extreme of two."""
    both = {"max": jnp.maximum, "min": jnp.minimum, "and": jnp.bitwise_and, "or": jnp.bitwise_or}
    return both[EXTREMES[name]](total, part)


def _transposed(array: Any, order: tuple[int, ...]) -> Any:
    return array if order == tuple(range(array.ndim)) else array.transpose(order)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the order that undoes an order of dims."""
    return tuple(map(order.index, range(len(order))))


def _wide(dtype: Any) -> Any:
    """Return the dtype in which blocks are added up."""
    return sum_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _finite(shift: Array) -> Array:
    """Return the maximum, 0 where there is no score but -inf, which would make 0 of exp a NaN."""
    return jnp.where(shift == -jnp.inf, 0, shift)


def _floating(arrays: Sequence[Any], chosen: Sequence[Any]) -> list[Any]:
    """Return the arrays that have a derivative, and None for others and those not `chosen`."""
    return [
        x if mark not in (None, False) and jnp.issubdtype(x.dtype, jnp.inexact) else None
        for x, mark in zip(arrays, chosen, strict=True)
    ]


def _with(arrays: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return the arrays, with those of `others` that are not None in their places."""
    return [x if y is None else y for x, y in zip(arrays, others, strict=True)]


def _plus(totals: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """Add cotangents to their sums."""
    return [None if x is None else x + y.astype(x.dtype) for x, y in zip(totals, more, strict=True)]


def _stacked(array: Array, dim: int, block: int) -> Array:
    """Return the whole blocks along a dim as `(n, ..., block, ...)`."""
    count = array.shape[dim] // block
    if count * block < array.shape[dim]:
        array = lax.slice_in_dim(array, 0, count * block, axis=dim)
    shape = (*array.shape[:dim], count, block, *array.shape[dim + 1 :])
    return jnp.moveaxis(array.reshape(shape), dim, 0)
