"""cuDNN's attention, to which `jax.nn.dot_product_attention(implementation="cudnn")` is traced.

It is one operation forward and one backward, and no array of tokens by tokens. Heads and rows are
apart in it, so both may be split; letters of dims: B rows, T tokens of queries, S of keys, N heads,
M heads of keys, of which each serves N / M, H their width.

    dot_product_attention_fwd_wrapper    q (B, T, N, H), k and v (B, S, M, H) -> (B, T, N, H),
                                         log-sum-exp (B, N, T)
    dot_product_attention_bwd_wrapper    these, the results, a gradient -> those of q, k and v

After q, k and v come a bias and integers, of shape (0,) where there are none. In the other layout
heads come before tokens.

Sources: JAX's `cudnn/fused_attention_stablehlo.py`; Dao 2023, "FlashAttention-2",
https://arxiv.org/abs/2307.08691, section 3, for the products of the backward pass.
"""

from collections.abc import Sequence
from typing import Any

from plurax.jaxpr.product_dims import ProductDims

FORWARD = frozenset(["dot_product_attention_fwd_wrapper"])
BACKWARD = frozenset(["dot_product_attention_bwd_wrapper"])
FUSED_ATTENTION = FORWARD | BACKWARD

Dims = tuple[str | None, ...]
"""For each dim its letter if it may be split."""

_HEADS_LAST, HEADS_FIRST = 0, 1
"""The values of the parameter `layout` of (B, T, N, H) and (B, N, T, H)."""
_OPERANDS = 10
"""Of the forward operation: q, k, v, bias, two lengths, two offsets, two tables of pages."""


def fused_dims(eqn: Any) -> tuple[list[Dims], list[Dims]] | None:
    """Return the letters of an operation's operands and of its results; None if nothing of it may
    be split.

    "N" is on the heads of keys too, if there are several: a part of one is that of the other. What
    is drawn for dropout depends on the place in the whole, segments cross rows, slopes (ALiBi)
    depend on the head, and the gradient of a bias is a sum over rows. Newer versions of JAX have
    other layouts, and operands of a function of the scores.
    """
    params, shapes = eqn.params, [tuple(var.aval.shape) for var in eqn.invars]
    bias, rows, rest = shapes[3], shapes[4:6], shapes[6:_OPERANDS]
    known = _OPERANDS + (0 if eqn.primitive.name in FORWARD else 3)
    if len(shapes) != known or params["layout"] not in (_HEADS_LAST, HEADS_FIRST):
        return None
    if params["dropout_rate"] or any(shape != (0,) for shape in rest):
        return None
    if params["variadic_args"][1] or getattr(params["mask_type"], "name", "") == "ALIBI":
        return None
    heads_first = params["layout"] == HEADS_FIRST
    query: Dims = ("B", "N", None, None) if heads_first else ("B", None, "N", None)
    one_head = shapes[1][1 if heads_first else 2] == 1
    key: Dims = tuple(None if one_head and letter == "N" else letter for letter in query)
    statistics: Dims = ("B", "N", None)
    bias_dims: Dims = (None,) * len(bias)
    if len(bias) == 4:
        whole = shapes[0][0], shapes[0][1 if heads_first else 2]
        both = ("B" if bias[0] == whole[0] else None), ("N" if bias[1] == whole[1] else None)
        bias_dims = (*both, None, None)
    lengths: list[Dims] = [("B",) if shape != (0,) else (None,) for shape in rows]
    operands = [query, key, key, bias_dims, *lengths, *[(None,)] * len(rest)]
    if eqn.primitive.name in FORWARD:
        return operands, [query, statistics][: len(eqn.outvars)]
    return [*operands, statistics, query, query], [query, key, key]


def is_plain(eqn: Any) -> bool:
    """Whether a forward operation reads q, k and v alone, all keys or those of a causal mask."""
    params, shapes = eqn.params, [tuple(var.aval.shape) for var in eqn.invars]
    mask, window = params["mask_type"].name, params["sliding_window_length"]
    return (
        len(shapes) == _OPERANDS
        and params["layout"] in (_HEADS_LAST, HEADS_FIRST)
        and not params["dropout_rate"]
        and all(shape == (0,) for shape in shapes[3:])
        and mask in ("NO_MASK", "CAUSAL")
        and window is None
        and params.get("score_mod") is None  # of newer versions of JAX
    )


def fused_products(eqn: Any, shapes: Sequence[Sequence[int]]) -> tuple[int, ProductDims]:
    """Return how many products an operation has, and the dims `(m, n, k, batch)` of each.

    Two forward and five backward, which computes the scores once more. A causal mask leaves half of
    the scores out. `shapes` are those of the operands on one device.

    >>> from types import SimpleNamespace as Eqn
    >>> mask = Eqn(name="CAUSAL")
    >>> (name,) = BACKWARD
    >>> eqn = Eqn(primitive=Eqn(name=name), params={"layout": 0, "mask_type": mask})
    >>> fused_products(eqn, [(4, 1024, 8, 64), (4, 512, 2, 64)])
    (5, (512, 512, 64, 32))
    """
    (rows, tokens, heads, width), keys = shapes[0], shapes[1][1]
    if eqn.params["layout"] == HEADS_FIRST:
        tokens, heads, keys = heads, tokens, shapes[1][2]
    causal = "CAUSAL" in getattr(eqn.params["mask_type"], "name", "")
    size = max(tokens // 2, 1) if causal else tokens
    return 2 if eqn.primitive.name in FORWARD else 5, (size, keys, width, rows * heads)
