"""Attention by a kernel of a library where tokens are split over devices.

A kernel computes on the queries and keys that it gets, without a mask or with a causal one. So a
causal mask is taken apart into parts that have one of the two. Tokens are in the order of
`token_order.py`, in which each device has a share of each range:

    16 tokens on 2 devices, in 4 ranges; the queries 0 1, 4 5, 8 9, 12 13 of device 0

    keys                      on device 0                               the kernel gets
    0 1, 4 5, 8 9, 12 13      itself, share by share                    a causal mask, 2 keys a row
    0 1, then 2 3             all its queries                           no mask
    4 5, then 6 7             4 5 8 9 12 13                             no mask
    8 9, then 10 11           8 9 12 13                                 no mask
    12 13, then 14 15         12 13                                     no mask

Of a range's own queries the second kernel counts where the keys are those of a device before: else
a log-sum-exp of -inf takes its result away, and one of 1e30 its gradient. Results of parts are
joined by their log-sum-exp; the backward pass gets the joined one, so its gradients add up.

Sources: Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context",
https://arxiv.org/abs/2310.01889; Dao 2023, "FlashAttention-2", https://arxiv.org/abs/2307.08691.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from plurax.jaxpr.annotate import over_context
from plurax.jaxpr.attention_kernels import AttentionKernel, attend, attend_backward, operands_of
from plurax.jaxpr.block_arrays import stack_blocks, unstack_blocks, wide_dtype
from plurax.jaxpr.context import Context, own_blocks
from plurax.jaxpr.equal_dims import shape_of
from plurax.jaxpr.key_blocks import STREAMED
from plurax.jaxpr.token_order import BY_PLACES, RANGES, Order, OrderMark, Range, marked

NOTHING = 1e30
"""A log-sum-exp beside which no score weighs anything."""


@final
@dataclasses.dataclass(frozen=True)
class KernelRegion:
    """An equation that calls a kernel."""

    eqn: Any
    kernel: AttentionKernel

    @property
    def results(self) -> list[Any]:
        """What others read of it."""
        return list(self.eqn.outvars)

    def ids(self) -> set[int]:
        """Return the `id` of the equation."""
        return {id(self.eqn)}

    def reads(self) -> list[Any]:
        """Return the variables of queries, keys and values."""
        return operands_of(self.eqn)

    @property
    def tokens(self) -> list[int]:
        """The numbers of queries and of keys."""
        return self._sizes(self.kernel.tokens)

    def groups(self, context: Context) -> int:
        """Return the groups of devices over which tokens are split (see `context.py`)."""
        return context.devices // context.group(*self._sizes(self.kernel.heads))

    def order(self, context: Context) -> Order:
        """Return the order in which groups may have the tokens: that of places if no other."""
        return context.order_of(self.groups(context), *self.tokens) or BY_PLACES

    def reason_against(self, context: Context) -> str | None:
        """Return why it cannot be computed in parts; None if it can."""
        queries, keys = self.tokens
        if queries % context.devices or keys % context.devices:
            return f"{context.devices} devices do not divide {queries} queries and {keys} keys"
        if self.groups(context) == 1:
            return self.kernel.reason_against(queries, keys)
        if self.kernel.causal and queries != keys:
            return f"its causal mask is one of {queries} queries and {keys} keys"
        order, groups = self.order(context), self.groups(context)
        parts = order.parts if order.devices > 1 else groups
        return self.kernel.reason_against(queries // parts, keys // parts)

    def _sizes(self, dim: int) -> list[int]:
        """Return the size of a dim of the queries and of the keys."""
        return [shape_of(atom)[dim] for atom in self.reads()[:2]]


def on_all_keys(kernel: AttentionKernel, *operands: Array) -> Array:
    """Return a kernel's result, as operations whose rows and heads may be split."""
    run = jax.custom_vjp(lambda *args: attend(*args, kernel=kernel)[0])

    def forward(*args: Array) -> Any:
        out, lse = (checkpoint_name(x, STREAMED) for x in attend(*args, kernel=kernel))
        return out, (*args, out, lse)

    def backward(kept: Any, gradient: Array) -> Any:
        return attend_backward(*kept, gradient, kernel=kernel)

    run.defvjp(forward, backward)
    out: Array = run(*operands)
    return out


@final
class KernelBlocks:
    """Attention by a kernel as a function of q, k and v, with a derivative.

    **Arguments:** `kernel`; `context`, over which tokens are split; `groups` of its devices that
    have tokens of their own, the heads being exchanged within a group; `order`, in which groups
    have the tokens; `rank`, the number of dims of queries, keys and values: of rows, tokens, heads,
    width.
    """

    def __init__(
        self, kernel: AttentionKernel, context: Context, groups: int, order: Order, rank: int
    ) -> None:
        self.kernel, self._context, self._order = kernel, context, order
        self._groups = groups
        # Dims of queries, keys and values, and that of queries in numbers for each and each head.
        self._tokens, self._heads = rank + kernel.tokens, rank + kernel.heads
        self._queries = rank - 2

    def __call__(
        self,
        q: Float[Array, "*rows _ _ H"],
        k: Float[Array, "*rows _ _ H"],
        v: Float[Array, "*rows _ _ H"],
    ) -> Array:
        """Return the kernel's result for all queries."""
        q, k, v = map(self._split, (q, k, v))
        if self._groups < self._context.devices:
            q, k, v = map(self._with_heads, (q, k, v))
        stacks = [stack_blocks(x, self._tokens, self._share(x)) for x in (k, v)]
        run = jax.custom_vjp(lambda *args: self._forward(*args)[0])
        run.defvjp(self._forward, self._backward)
        out = over_context(run(q, *stacks), self._tokens)
        if self._order.devices > 1:
            out = marked(out, OrderMark((self._tokens,), self._order, computed=True))
        return out

    def with_heads(self, q: Array, k: Array, v: Array) -> Array:
        """Return the same where each device gets all tokens of a share of the heads."""
        operands = (self._with_heads(self._split(x)) for x in (q, k, v))
        return over_context(on_all_keys(self.kernel, *operands), self._tokens)

    # --- Parts ----------------------------------------------------------------------------------

    def _split(self, array: Array) -> Array:
        """Return queries, keys or values with their tokens split over devices, in order."""
        if self._order.devices > 1:
            array = marked(array, OrderMark((self._tokens,), self._order))
        return over_context(array, self._tokens)

    def _with_heads(self, array: Array) -> Array:
        """Return what a device of a group computes with: all tokens of the group for its heads."""
        return over_context(array, self._heads, "heads", self._context.devices // self._groups)

    def _share(self, array: Array) -> int:
        """Return the tokens of a block: those that a device has of a range."""
        parts = self._order.parts if self._order.devices > 1 else self._groups
        return array.shape[self._tokens] // parts

    def _ranges(self, q: Array, k: Array) -> list[tuple[tuple[int, int], Range | None]]:
        """Return ranges of key blocks, each with the queries that see any of it; None: all."""
        blocks = k.shape[0]
        if not self.kernel.causal or self._order.devices == 1:
            return [((0, blocks), None)]
        size, per = q.shape[self._tokens], blocks // RANGES
        return [((r * per, (r + 1) * per), (r * size // RANGES, size)) for r in range(RANGES)]

    def _counts(self, q: Array, share: int, number: Int[Array, ""]) -> Bool[Array, "T"] | None:
        """Return which queries see all keys of a block of the first range that they see.

        They are those of later ranges, and those of groups of devices behind the one whose keys
        they are, `number`. None: all.
        """
        if not self.kernel.causal:
            return None
        count = q.shape[self._tokens]
        places = over_context(jnp.arange(count, dtype=jnp.int32), 0, "groups")
        own = count // self._groups
        return (places % own >= share) | (places // own > number)

    def _aligned(self, statistics: Float[Array, "*rows N T"]) -> Array:
        """Return numbers for each query and head in the order of the dims of results."""
        return (statistics if self.kernel.heads_first else statistics.swapaxes(-1, -2))[..., None]

    # --- Forward --------------------------------------------------------------------------------

    def _forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        """Return the result, and what the derivative reads, of keys and values in blocks."""
        share, wide = k.shape[self._tokens + 1], wide_dtype(q.dtype)
        dims = (self._tokens, self._tokens, self._queries)
        if self.kernel.causal:
            out, lse = attend(stack_blocks(q, self._tokens, share), k, v, kernel=self.kernel)
            out = unstack_blocks(out, self._tokens).astype(wide)
            lse = unstack_blocks(lse, self._queries)
        else:
            out = jnp.zeros((*q.shape[:-1], v.shape[-1]), wide)
            statistics = (*q.shape[:-3], q.shape[self._heads], q.shape[self._tokens])
            lse = jnp.full(statistics, -jnp.inf, wide)
        stacks = self._context.received([k, v], self._order)
        for blocks, seen in self._ranges(q, k):
            queries, *carry = self._order.cut([q, out, lse], dims, seen)

            def body(carry: Any, row: Any, queries: Array = queries) -> Any:
                (out, lse), (number, keys, values) = carry, row
                part, more = attend(queries, keys, values, kernel=self.kernel.whole())
                counts = self._counts(queries, share, number)
                more = more if counts is None else jnp.where(counts, more, -jnp.inf)
                return self._joined(out, lse, part, more), None

            carry, _ = self._over_blocks(body, tuple(carry), stacks, blocks)
            out, lse = self._order.with_parts([out, lse], carry, dims[1:], seen)
        out, lse = (checkpoint_name(x, STREAMED) for x in (out.astype(q.dtype), lse))
        return out, (q, k, v, out, lse)

    def _over_blocks(
        self, body: Any, carry: Any, stacks: Sequence[Array], blocks: tuple[int, int]
    ) -> tuple[Any, Any]:
        """Run a loop over some blocks of keys and values, each with the number of its device."""
        group = self._order.cut(stacks, [0] * len(stacks), blocks)
        numbers = jnp.arange(group[0].shape[0], dtype=jnp.int32)
        with self._context.scope(self._groups):
            return lax.scan(body, carry, (numbers, *group))

    def _joined(self, out: Array, lse: Array, part: Array, more: Array) -> tuple[Array, Array]:
        """Join the results for some keys with those for others."""
        top = jnp.maximum(lse, more)
        old, new = jnp.exp(lse - top), jnp.exp(more - top)
        total = old + new
        out = out * self._aligned(old / total) + part.astype(out.dtype) * self._aligned(new / total)
        return out, top + jnp.log(total)

    # --- Backward -------------------------------------------------------------------------------

    def _backward(self, kept: Any, gradient: Array) -> tuple[Array, Array, Array]:
        """Return the gradients of queries, and of keys and values in blocks."""
        q, k, v, out, lse = kept
        share, of_queries = k.shape[self._tokens + 1], (q, out, lse, gradient)
        dims, of_blocks = (self._tokens, self._tokens, self._queries, self._tokens), []
        of_q = jnp.zeros(q.shape, wide_dtype(q.dtype))
        stacks = self._context.received([k, v], self._order, [gradient])
        for blocks, seen in self._ranges(q, k):
            mine = self._order.cut(of_queries, dims, seen)

            def body(total: Array, row: Any, mine: Sequence[Array] = mine) -> Any:
                (number, keys, values), (queries, out, lse, gradient) = row, mine
                counts = self._counts(queries, share, number)
                lse = lse if counts is None else jnp.where(counts, lse, NOTHING)
                of_q, *of_block = attend_backward(
                    queries, keys, values, out, lse, gradient, kernel=self.kernel.whole()
                )
                return total + of_q.astype(total.dtype), of_block

            (part,) = self._order.cut([of_q], dims[:1], seen)
            part, rows = self._over_blocks(body, part, stacks, blocks)
            (of_q,) = self._order.with_parts([of_q], [part], dims[:1], seen)
            of_blocks.append(rows)
        of_k, of_v = (own_blocks(x, self._order) for x in zip(*of_blocks, strict=True))
        if self.kernel.causal:
            own = [stack_blocks(x, dim, share) for x, dim in zip(of_queries, dims, strict=True)]
            more, *rows = attend_backward(own[0], k, v, *own[1:], kernel=self.kernel)
            of_q = of_q + unstack_blocks(more, self._tokens).astype(of_q.dtype)
            of_k, of_v = of_k + rows[0], of_v + rows[1]
        return of_q.astype(q.dtype), of_k, of_v
