"""The order in which devices have the tokens of a sequence, so that a causal mask leaves all equal.

Where each device has a piece of the sequence, the keys that a mask hides are those of other devices
for the first, and none for the last: all wait for the last. So each device has a share of each of
`RANGES` ranges instead, and what a range of queries does not see is left out by all alike:

    16 tokens on 2 devices, 4 ranges        device 0               device 1
    pieces                                  0 … 7                  8 … 15
    shares                                  0 1 4 5 8 9 12 13      2 3 6 7 10 11 14 15

    causal: queries of range r meet the keys of ranges 0 to r, so 10/16 of all pairs on each device

Attention computes on tokens in this order, and marks what it reads and returns; `over_tokens.py`
brings the rest of the function to it.

Sources: Brandon et al. 2023, "Striped Attention", https://arxiv.org/abs/2311.09431; Grattafiori et
al. 2024, "The Llama 3 Herd of Models", section 3.3.2, https://arxiv.org/abs/2407.21783.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from plurax.jaxpr.annotate import annotate_p

RANGES = 4
"""The ranges of a sequence. Under a causal mask (1 + 1/4) / 2 of all pairs are computed."""

Range = tuple[int, int]
"""The first token, and the first one behind the last, by their places."""


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of a dim of tokens: device by device, on each a share of each range.

    **Fields:** `devices`; of one the order is that of the places.
    """

    devices: int = 1

    @property
    def parts(self) -> int:
        """The parts of a sequence that stay together: a share of a range each."""
        return self.devices * RANGES

    def fits(self, size: int) -> bool:
        """Whether each device has an equal share of each range of so many tokens."""
        return self.devices == 1 or size % self.parts == 0

    def share(self, size: int) -> int:
        """Return the tokens of a range that a device has."""
        return size // self.parts

    def put(self, array: Array, dim: int) -> Array:
        """Return an array with a dim in this order."""
        return self._exchanged(array, dim, (RANGES, self.devices))

    def undo(self, array: Array, dim: int) -> Array:
        """Return an array with a dim that is in this order in the order of its places."""
        return self._exchanged(array, dim, (self.devices, RANGES))

    def _exchanged(self, array: Array, dim: int, outer: tuple[int, int]) -> Array:
        result: Array = reorder_p.bind(array, dim=dim, outer=outer)
        return result

    def places(self, index: Array, size: int, tokens: Range | None = None) -> Array:
        """Return the places of the tokens at an index of a dim in this order.

        **Arguments:** `size`, of the whole dim; `tokens`, those that the dim is cut to.

        >>> Order(2).places(jnp.arange(16), 16).tolist()
        [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]
        """
        if self.devices == 1:
            return index if tokens is None else index + jnp.asarray(tokens[0], index.dtype)
        start, end = tokens or (0, size)

        def divided(array: Array, by: int) -> tuple[Array, Array]:
            number = jnp.asarray(by, array.dtype)
            return lax.div(array, number), lax.rem(array, number)

        device, own = divided(index, (end - start) // self.devices)
        which, offset = divided(own, self.share(size))
        first, of_range, of_device = (
            jnp.asarray(n, index.dtype) for n in (start, size // RANGES, self.share(size))
        )
        return first + which * of_range + device * of_device + offset

    def cut(
        self, arrays: Sequence[Any], dims: Sequence[int | None], tokens: Range | None
    ) -> list[Any]:
        """Return the arrays, cut to tokens, of whole ranges, along the dims that are not None."""
        return [self._cut(x, dim, tokens) for x, dim in zip(arrays, dims, strict=True)]

    def _cut(self, array: Any, dim: int | None, tokens: Range | None) -> Any:
        if array is None or dim is None or tokens in (None, (0, array.shape[dim])):
            return array
        if self.devices == 1:
            return lax.slice_in_dim(array, *tokens, axis=dim)
        first, last = (place // self.devices for place in tokens)
        own = lax.slice_in_dim(self._apart(array, dim), first, last, axis=dim + 1)
        return self._joined(own, dim)

    def with_parts(
        self,
        arrays: Sequence[Any],
        parts: Sequence[Any],
        dims: Sequence[int | None],
        tokens: Range | None,
    ) -> list[Any]:
        """Return the arrays with parts in the place of what `cut` returns."""
        triples = zip(arrays, parts, dims, strict=True)
        return [self._with_part(x, part, dim, tokens) for x, part, dim in triples]

    def _with_part(self, array: Any, part: Any, dim: int | None, tokens: Range | None) -> Any:
        if array is None or dim is None or tokens is None:
            return part
        start = tokens[0] // self.devices
        if self.devices == 1:
            return lax.dynamic_update_slice_in_dim(array, part, start, dim)
        whole, new = self._apart(array, dim), self._apart(part, dim)
        return self._joined(lax.dynamic_update_slice_in_dim(whole, new, start, dim + 1), dim)

    def concatenated(self, parts: Sequence[Array]) -> Array:
        """Return parts, of whole ranges, as one array, along the first dim."""
        if len(parts) == 1:
            return parts[0]
        if self.devices == 1:
            return jnp.concatenate(parts)
        return self._joined(jnp.concatenate([self._apart(x, 0) for x in parts], axis=1), 0)

    def _apart(self, array: Array, dim: int) -> Array:
        shape = array.shape
        own = shape[dim] // self.devices
        return array.reshape(*shape[:dim], self.devices, own, *shape[dim + 1 :])

    def _joined(self, array: Array, dim: int) -> Array:
        shape = array.shape
        return array.reshape(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])


BY_PLACES = Order()
"""The order of a sequence that is not split."""

# --- From one order to another --------------------------------------------------------------------


def _reordered(array: Array, *, dim: int, outer: tuple[int, int]) -> Array:
    """Return an array of which a dim of `outer` parts has the second ones outside of the first."""
    shape = array.shape
    parts = array.reshape(*shape[:dim], *outer, -1, *shape[dim + 1 :])
    return parts.swapaxes(dim, dim + 1).reshape(shape)


def _batched(args: Any, dims: Any, *, dim: int, outer: tuple[int, int]) -> Any:
    (array,), (new,) = args, dims
    return reorder_p.bind(array, dim=dim + (new <= dim), outer=outer), new


# One operation, which the partitioner knows: of split tokens devices exchange shares.
reorder_p = Primitive("reorder_tokens")
reorder_p.def_impl(_reordered)
reorder_p.def_abstract_eval(lambda array, **_: array)
mlir.register_lowering(reorder_p, mlir.lower_fun(_reordered, multiple_results=False))
batching.primitive_batchers[reorder_p] = _batched
ad.deflinear2(
    reorder_p,
    lambda cotangent, _, *, dim, outer: [reorder_p.bind(cotangent, dim=dim, outer=outer[::-1])],
)

# --- Marks ----------------------------------------------------------------------------------------


class OrderMark:
    """The mark of a value that attention reads with `dims` in an order, or that it computed so."""

    def __init__(self, dims: tuple[int, ...], order: Order, *, computed: bool = False) -> None:
        self.dims, self.order, self.computed = dims, order, computed


def marked(array: Array, mark: OrderMark) -> Array:
    """Return an array with a mark, which `over_tokens` takes away."""
    result: Array = annotate_p.bind(array, tag=mark, batch=(), transposed=False)
    return result
