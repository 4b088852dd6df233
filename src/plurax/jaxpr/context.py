"""Split the tokens that attention reads over devices, and the heads where these are exchanged.

Attention says which dim is that of tokens: the queries' dim, and the keys'. What it reads and
returns is annotated here, and `over_tokens.py` follows these dims to where they begin.

Heads are exchanged among as many devices as divide them, a group; over the groups tokens stay split
in attention as well, and keys are gathered or go around:

    context=8, 4 heads, 16 tokens      device  0     1     2     3     4     5     6     7
    tokens of all heads before                 0 1   2 3   4 5   6 7   8 9   ...
    in attention, group 0: tokens 0 to 7 of    head 0 head 1 head 2 head 3
                  group 1: tokens 8 to 15 of                             head 0 ...
    a ring of two groups                       0 <-> 4, 1 <-> 5, 2 <-> 6, 3 <-> 7

Source: Fang and Zhao 2024, "USP: A Unified Sequence Parallelism Approach for Long Context",
https://arxiv.org/abs/2405.07719.
"""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array

from plurax.jaxpr.annotate import over_context
from plurax.jaxpr.barrier import order_after, pick_dependency
from plurax.jaxpr.equal_dims import equal_dims, shape_of
from plurax.jaxpr.follow_dim import Region
from plurax.jaxpr.masked_queries import Queries
from plurax.jaxpr.token_order import Order, OrderMark, marked
from plurax.plan import ContextStrategy

RING = "plurax_ring"
"""The scope of a loop whose blocks go around in a ring of devices: their order does not matter."""

GATHERED = "plurax_gathered"
"""The scope of a loop each of whose devices needs the blocks of all."""


@dataclasses.dataclass(frozen=True)
class Context:
    """The devices over which tokens are split, and how queries meet the keys of other devices.

    **Fields:** `devices`, `strategy`; `ordered`, whether devices may have shares of ranges of the
    tokens instead of pieces (see `token_order.py`), if a mask makes it worthwhile; `common`, the
    devices among which heads are exchanged, or not at all; None: as many as divide them; `tensor`,
    the devices over which heads are split besides.
    """

    devices: int
    strategy: ContextStrategy
    ordered: bool = False
    common: int | None = None
    tensor: int = 1

    @property
    def in_ring(self) -> bool:
        """Whether keys go around."""
        return self.strategy in ("ring", "heads+ring")

    def group(self, *heads: int) -> int:
        """Return the devices among which heads are exchanged for tokens, which divide all of these
        numbers of heads; 1: they are not."""
        if self.strategy not in ("heads", "heads+ring"):
            return 1
        own = [n if n % self.tensor else n // self.tensor for n in heads]
        if self.common is None:
            return math.gcd(self.devices, *own)
        return 1 if any(number % self.common for number in own) else self.common

    def groups(self, region: Region) -> int:
        """Return the groups of devices over which a region's tokens are split."""
        return self.devices // self._heads(region)[1]

    def block(self, region: Region, block: int, order: Order | None = None) -> int:
        """Return the keys of a block, so that each group has whole blocks of its own keys."""
        groups = self.groups(region)
        if groups == 1:
            return block
        if order is None:
            return nearest_divisor(region.size // groups, block)
        share = order.share(region.size)
        # XLA has no loop over one block, and would hold what all turns of a ring compute.
        most = share // 2 if self.in_ring and share > 1 else share
        return nearest_divisor(share, min(block, most))

    def order(self, region: Region) -> Order | None:
        """Return the order in which groups may have a region's tokens; None for that of places."""
        tokens, size = region.tokens
        order = self.order_of(self.groups(region), size, region.size)
        if order is None:
            return None
        # Behind the sums each dim of tokens is known to be one.
        known = all(
            own == tokens
            for eqn, _ in region.behind
            for var in eqn.outvars
            for own, length in zip(region.labels[var], shape_of(var), strict=True)
            if length == size
        )
        beside = any(size in shape_of(var) for var in region.beside())
        joined = {label for whole, own in region.parts.items() for label in (whole, *dict(own))}
        return None if beside or not known or tokens in joined else order

    def order_of(self, groups: int, *sizes: int) -> Order | None:
        """Return the order in which so many groups may have dims of tokens of these sizes, if they
        may: all attention of a function has one order."""
        fits = self.ordered and all(map(Order(groups).fits, sizes))
        same = self.common in (None, self.devices // groups)
        return Order(groups) if fits and same else None

    def splits(self, region: Region) -> bool:
        """Whether the devices divide a region's keys and queries."""
        sizes = region.size, region.tokens[1]
        return all(size % self.devices == 0 for size in sizes)

    def gathers(self, region: Region) -> bool:
        """Whether all of a region's keys, of some heads, come to a device at once."""
        return self.splits(region) and not (self.in_ring and self.groups(region) > 1)

    def of_inputs(self, region: Region, queries: Queries, arrays: Sequence[Array]) -> list[Array]:
        """Return a region's inputs, split over `context` by tokens, and then by heads if asked."""
        (tokens, _), (head, group) = region.tokens, self._heads(region)
        labels = _labels_of_inputs(region)
        split = []
        in_order = _in_order(region, queries, arrays)
        for array, (var, key), known in zip(in_order, region.inputs, labels, strict=True):
            dims = [d for d, label in known.items() if label == tokens]
            dims += [] if key is None else [key]
            heads = [d for d, label in known.items() if label == head and shape_of(var)[d] > 1]
            if dims and shape_of(var)[dims[0]] > 1:
                # What has no heads is the same for all of them: each device of a group has it.
                of_groups = 1 < group < self.devices and not heads
                array = over_context(array, dims[0], "groups" if of_groups else "devices")
            if heads and group > 1:
                array = over_context(array, heads[0], "heads", group)
            split.append(array)
        return split

    def of_results(self, region: Region, queries: Queries, arrays: Sequence[Array]) -> list[Array]:
        """Return a region's results with their tokens split over `context`."""
        tokens, _ = region.tokens
        split = []
        for var, array in zip(region.results, arrays, strict=True):
            labels = region.labels[var]
            if tokens in labels:
                dim = labels.index(tokens)
                array = over_context(array, dim)
                if queries.order.devices > 1:
                    array = marked(array, OrderMark((dim,), queries.order, computed=True))
            split.append(array)
        return split

    def scope(self, groups: int) -> contextlib.AbstractContextManager[None]:
        """Return the scope of a loop over blocks: whether these go around in a ring of groups."""
        return jax.named_scope(RING if self.in_ring and groups > 1 else GATHERED)

    def received(self, stacks: Sequence[Any], order: Order, by: Sequence[Array] = ()) -> list[Any]:
        """Return stacks of blocks as the loops over them read them.

        All blocks on each device, where loops over ranges would gather them one after another, and
        again in the derivative. Those of a ring stay where they are; in the derivative after its
        cotangents, `by`, or a compiler would keep what the forward pass received.
        """
        known = [x for x in stacks if x is not None]
        if self.in_ring:
            known = order_after(known, pick_dependency(by)) if by else known
        elif order.devices > 1:
            known = [over_context(x, None, "groups") for x in known]
        arrays = iter(known)
        return [None if x is None else next(arrays) for x in stacks]

    def of_queries(self, region: Region, labels: Sequence[int], array: Array) -> Array:
        """Return what attention computes, by the labels of its dims, its queries split over
        groups."""
        tokens = region.tokens[0]
        if tokens not in labels or self.groups(region) == 1:
            return array
        return over_context(array, labels.index(tokens), "groups")

    def with_keys(self, region: Region, arrays: Sequence[Array]) -> list[Array]:
        """Return a region's inputs, those of keys with the keys of all groups."""
        one_group, keys = self.groups(region) == 1, [key for _, key in region.inputs]
        return [
            array if one_group or key is None else over_context(array, None, "groups")
            for array, key in zip(arrays, keys, strict=True)
        ]

    def _heads(self, region: Region) -> tuple[int | None, int]:
        """Return the label of the heads that are exchanged for tokens, and among how many devices;
        1: they are not."""
        sizes = region.sizes
        head: tuple[int | None, int] = None, 1
        for label in region.shared:
            group = self.group(sizes[label])
            head = (label, group) if group >= head[1] else head
        return head


def own_blocks(stacks: Sequence[Array], order: Order) -> Array:
    """Return the gradients of the blocks of ranges, joined, on each group those of its own."""
    split = [over_context(x, 0, "groups") if order.devices > 1 else x for x in stacks]
    return order.concatenated(split)


def _in_order(region: Region, queries: Queries, arrays: Sequence[Array]) -> list[Array]:
    """Return a region's inputs, with a mark on those that have queries or keys in an order."""
    if queries.order.devices == 1:
        return list(arrays)
    of_queries = {
        region.read[node]: dim for node, dim in queries.dims.items() if node in region.read
    }
    result = []
    for array, source in zip(arrays, region.inputs, strict=True):
        both = {source[1], of_queries.get(source)} - {None}
        dims = tuple(d for d in range(array.ndim) if d in both and array.shape[d] > 1)
        result.append(marked(array, OrderMark(dims, queries.order)) if dims else array)
    return result


def nearest_divisor(number: int, size: int) -> int:
    """Return the divisor of a number that is nearest to a size, by their ratio.

    >>> nearest_divisor(1024, 300), nearest_divisor(1024, 2048)
    (256, 1024)
    """
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return min(divisors, key=lambda n: max(n, size) / min(n, size))


def _labels_of_inputs(region: Region) -> list[dict[int, int]]:
    """Return for each input of a region the labels of its dims, by the dim."""
    labels: dict[Any, dict[int, int]] = {source: {} for source in region.inputs}
    for eqn in (*region.eqns, *(eqn for eqn, _ in region.reductions)):
        result = len(eqn.invars)
        known = {(result, d): n for d, n in enumerate(region.labels.get(eqn.outvars[0], ()))}
        for _ in range(2):  # a dim that a product's operands share is known from its result
            for left, right in equal_dims(eqn):
                for one, other in ((left, right), (right, left)):
                    if other in known:
                        known.setdefault(one, known[other])
        for (place, dim), label in known.items():
            source = region.read.get((id(eqn), place))
            if source is not None:
                labels[source].setdefault(dim, label)
    return [labels[source] for source in region.inputs]
