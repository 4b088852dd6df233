"""Attention by a kernel of a library, as one operation forward and one backward.

A kernel returns for each query its result and the log-sum-exp of its scores. From these two the
results of parts of the keys can be joined; and the backward pass, given those of all keys, computes
the gradients of any part. So a kernel can compute on what a device has (`kernel_blocks.py`).
Letters of dims: B rows, T tokens of queries, S of keys, N heads, M heads of keys, H their width;
any number of dims may stand in front of them.

    attend             q (B, T, N, H), k and v (B, S, M, H)          -> (B, T, N, H), (B, N, T)
    attend_backward    these, the results, a gradient (B, T, N, H)   -> those of q, k and v

    kernel                    called by                                           order of dims
    `Cudnn`                   `jax.nn.dot_product_attention(                      B, T, N, H
                              implementation="cudnn")`                            or B, N, T, H
    `PallasFlash`, on TPUs    `jax.experimental.pallas.ops.tpu.flash_attention`   B, N, T, H
    `Splash`, on TPUs         `...tpu.splash_attention.make_splash_mha(...)`      N, T, H

All are found by the function that a `jax.custom_vjp` differentiates. Sources: JAX's
`cudnn/fused_attention_stablehlo.py`, `pallas/ops/tpu/flash_attention.py` and `splash_attention`;
Dao 2023, "FlashAttention-2", https://arxiv.org/abs/2307.08691, section 3.
"""

import abc
import dataclasses
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array

from plurax.jaxpr.compat import derivative_of, open_jaxpr
from plurax.jaxpr.equal_dims import shape_of
from plurax.jaxpr.fused_attention import (
    FORWARD,
    FUSED_ATTENTION,
    HEADS_FIRST,
    Dims,
    fused_dims,
    fused_products,
    is_plain,
)
from plurax.jaxpr.interpret import all_equations
from plurax.jaxpr.product_dims import ProductDims
from plurax.tree import sum_dtype

LANES = 128
"""Blocks of the kernels in Pallas for TPUs have a multiple of it of tokens."""


@dataclasses.dataclass(frozen=True)
class AttentionKernel(abc.ABC):
    """A kernel of a library with what is constant in a call of it.

    **Fields:** `causal`, whether a query sees the keys up to its own place, and not all; `scale`,
    of the scores; `heads_first`, whether heads stand before tokens.
    """

    causal: bool
    scale: float
    heads_first: bool

    @property
    def tokens(self) -> int:
        """The dim of tokens in queries, keys and values, from behind."""
        return -2 if self.heads_first else -3

    @property
    def heads(self) -> int:
        """The dim of heads, from behind."""
        return -3 if self.heads_first else -2

    def whole(self) -> "AttentionKernel":
        """Return the same kernel without a mask."""
        return dataclasses.replace(self, causal=False)

    @abc.abstractmethod
    def reason_against(self, queries: int, keys: int) -> str | None:
        """Return why the kernel cannot compute on so many queries and keys; None if it can."""

    @abc.abstractmethod
    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Return the result and the log-sum-exp, of operands with one dim of rows."""

    @abc.abstractmethod
    def backward(
        self, q: Array, k: Array, v: Array, out: Array, lse: Array, gradient: Array
    ) -> tuple[Array, Array, Array]:
        """Return the gradients of q, k and v; `out` and `lse` may be those of more keys."""


@final
@dataclasses.dataclass(frozen=True)
class Cudnn(AttentionKernel):
    """cuDNN's attention.

    **Fields:** `primitives`, the forward and the backward one; `params`, those of both.
    """

    primitives: tuple[Any, Any]
    params: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, jaxpr: Any) -> "Cudnn | None":
        """Return the kernel of a function that is its call, on q, k, v and what is empty.

        Under `jax.vmap` it reshapes them, so that all dims in front are one of rows, and back.
        """
        calls = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in FORWARD]
        others = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "reshape"]
        if len(calls) != 1 or len(others) + 1 != len(jaxpr.eqns) or not is_plain(calls[0]):
            return None
        (eqn,), source = calls, {one.outvars[0]: one.invars[0] for one in others}
        read = [source.get(var, var) for var in (*eqn.invars[:3], *jaxpr.outvars)]
        joined = all(shape_of(a.invars[0])[-3:] == shape_of(a.outvars[0])[-3:] for a in others)
        if not joined or read != [*jaxpr.invars[:3], eqn.outvars[0]]:
            return None
        library = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
        backward = library._dot_product_attention_bwd_p_wrapper
        params = dict(eqn.params)
        del params["is_training"]
        return cls(
            params["mask_type"] == library.MaskType.CAUSAL,
            params["scale"],
            params["layout"] == HEADS_FIRST,
            (eqn.primitive, backward),
            tuple(sorted(params.items())),
        )

    def reason_against(self, queries: int, keys: int) -> str | None:
        """cuDNN takes any number of tokens."""
        return None

    def _bound(self, primitive: Any, operands: Sequence[Array], more: Sequence[Array] = ()) -> Any:
        params = dict(self.params)
        mask = type(params["mask_type"])
        params["mask_type"] = mask.CAUSAL if self.causal else mask.NO_MASK
        empty = [jnp.zeros((0,), operands[0].dtype)] * 7
        kept = {"is_training": True} if primitive is self.primitives[0] else {}
        return primitive.bind(*operands, *empty, *more, **params, **kept)

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Call cuDNN, with its log-sum-exp."""
        out, lse = self._bound(self.primitives[0], (q, k, v))
        return out, lse

    def backward(
        self, q: Array, k: Array, v: Array, out: Array, lse: Array, gradient: Array
    ) -> tuple[Array, Array, Array]:
        """Call cuDNN's backward pass."""
        dq, dk, dv = self._bound(self.primitives[1], (q, k, v), (lse, out, gradient))
        return dq, dk, dv


@final
@dataclasses.dataclass(frozen=True)
class PallasFlash(AttentionKernel):
    """JAX's flash attention for TPUs, written in Pallas.

    **Fields:** `block_sizes`, for the whole; parts get the nearest that divide them.
    """

    block_sizes: Any

    LIBRARY = "jax.experimental.pallas.ops.tpu.flash_attention"

    @classmethod
    def of(cls, eqn: Any, constants: Mapping[str, Any]) -> "PallasFlash | None":
        """Return the kernel that a call of `flash_attention` without bias and segments is."""
        if len(eqn.invars) != 3 or not _has_rows_in_front(eqn):
            return None
        return cls(constants["causal"], constants["sm_scale"], True, constants["block_sizes"])

    def reason_against(self, queries: int, keys: int) -> str | None:
        """Blocks are of 128 tokens, or of a multiple."""
        sizes = {name: size for name, size in vars(self.block_sizes).items() if name != "block_b"}
        return _reason_against_blocks(sizes, queries, keys)

    def _sizes(self, queries: int, keys: int) -> Any:
        """Return block sizes that divide so many queries and keys."""
        sizes: dict[str, int] = {}
        # A major block comes first: the blocks in it divide it.
        for name in sorted(vars(self.block_sizes), key=lambda name: "major" not in name):
            size = getattr(self.block_sizes, name)
            if name != "block_b" and size is not None:
                outer = queries if "_q" in name else keys
                for inner in ("block_q", "block_k"):
                    outer = sizes.get(name.replace(inner, f"{inner}_major"), outer)
                size = _fitting(size, outer)
            sizes[name] = size
        return dataclasses.replace(self.block_sizes, **sizes | {"block_b": 1})

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Call the kernel, which returns sums and maxima beside."""
        library, sizes = importlib.import_module(self.LIBRARY), self._sizes(q.shape[2], k.shape[2])
        out, sums, maxima = library._flash_attention(
            q, k, v, None, None, True, self.causal, self.scale, sizes, False
        )
        return out, maxima + jnp.log(sums)

    def backward(
        self, q: Array, k: Array, v: Array, out: Array, lse: Array, gradient: Array
    ) -> tuple[Array, Array, Array]:
        """Call both kernels of the backward pass."""
        library, sizes = importlib.import_module(self.LIBRARY), self._sizes(q.shape[2], k.shape[2])
        kept = (q, k, v, None, None, out, jnp.ones_like(lse), lse)
        dq, dk, dv, _, _ = library._flash_attention_bwd(
            False, self.causal, self.scale, sizes, False, kept, gradient
        )
        return dq, dk, dv


@final
@dataclasses.dataclass(frozen=True)
class Splash(AttentionKernel):
    """JAX's splash attention for TPUs, written in Pallas, which skips blocks that its mask hides.

    It does not scale scores. Its mask comes as a function beside arrays that say which blocks are
    hidden; those of parts are computed anew.

    **Fields:** `block_sizes`, for the whole; parts get the nearest that divide them; `params`, the
    other constants of a call.
    """

    block_sizes: Any
    params: tuple[tuple[str, Any], ...]

    LIBRARY = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel"
    KEPT = ("mask_value", "attn_logits_soft_cap", "interpret")

    @classmethod
    def of(cls, eqn: Any, constants: Mapping[str, Any]) -> "Splash | None":
        """Return the kernel that a call with a causal mask is, of all heads.

        Before queries, keys and values stand the arrays of the mask; behind them may stand
        segments. Of other masks only the arrays say what is hidden, and these are not known.
        """
        operands = operands_of(eqn)
        if constants["is_mqa"] or operands != eqn.invars[-3:] or not _has_rows_in_front(eqn):
            return None
        if not cls._is_causal(constants["mask_function"], operands):
            return None
        kept = tuple((name, constants[name]) for name in cls.KEPT)
        return cls(True, 1.0, True, constants["block_sizes"], kept)

    @staticmethod
    def _is_causal(function: Any, operands: Sequence[Any]) -> bool:
        """Whether a mask's function is that of a `CausalMask` of all tokens in their order."""
        mask: Any = function and inspect.getclosurevars(function).nonlocals.get("self")
        if type(mask).__name__ != "CausalMask" or mask.offset:
            return False
        queries, keys = (shape_of(atom)[-2] for atom in operands[:2])
        return mask.shape == (queries, keys) and np.array_equal(mask.q_sequence, range(queries))

    def reason_against(self, queries: int, keys: int) -> str | None:
        """Blocks are of 128 tokens, or of a multiple."""
        return _reason_against_blocks(self._blocks(), queries, keys)

    def _blocks(self) -> dict[str, int]:
        fields = dataclasses.asdict(self.block_sizes).items()
        return {name: size for name, size in fields if name.startswith("block_") and size}

    def _kernel(self, heads: int, queries: int, keys: int) -> Any:
        """Return the library's kernel for so many queries and keys, its mask in `*_mask_info`."""
        sizes: dict[str, int] = {}
        # What is computed at a time divides the block it is of, which comes first.
        for name, size in sorted(self._blocks().items(), key=lambda pair: len(pair[0])):
            outer = queries if "_q" in name else keys
            sizes[name] = _fitting(size, sizes.get(name.removesuffix("_compute"), outer))
        masks = importlib.import_module(self.LIBRARY.replace("_kernel", "_mask"))
        mask = (masks.CausalMask if self.causal else masks.FullMask)((queries, keys))
        return importlib.import_module(self.LIBRARY).make_splash_mha(
            masks.MultiHeadMask([mask] * heads), head_shards=1, q_seq_shards=1,
            save_residuals=True, block_sizes=dataclasses.replace(self.block_sizes, **sizes),
            **dict(self.params),
        )  # fmt: skip

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Call the kernel, with its log-sum-exp."""
        out, (lse,) = jax.vmap(self._kernel(q.shape[1], q.shape[2], k.shape[2]))(q, k, v)
        return out, lse

    def backward(
        self, q: Array, k: Array, v: Array, out: Array, lse: Array, gradient: Array
    ) -> tuple[Array, Array, Array]:
        """Call the kernels of the backward pass."""
        kernel = self._kernel(q.shape[1], q.shape[2], k.shape[2])
        differentiate = importlib.import_module(self.LIBRARY)._splash_attention_bwd
        names = list(inspect.signature(differentiate).parameters)[:-2]
        constants = [kernel.kwargs[name] for name in names]

        def each(q: Array, k: Array, v: Array, out: Array, lse: Array, gradient: Array) -> Any:
            masks = kernel.dq_mask_info, kernel.dkv_mask_info
            kept = (q, k, v, None, None, out, lse, *masks)
            return differentiate(*constants, kept, gradient)[3:6]

        dq, dk, dv = jax.vmap(each)(q, k, v, out, lse, gradient)
        return dq, dk, dv


def _fitting(size: int, outer: int) -> int:
    """Return the largest block of at most `size` that divides `outer`."""
    return max(block for block in range(LANES, min(size, outer) + 1, LANES) if outer % block == 0)


def _reason_against_blocks(sizes: Mapping[str, int | None], queries: int, keys: int) -> str | None:
    if queries % LANES or keys % LANES:
        return f"its blocks are of {LANES} tokens, and a part would have {queries}"
    if any(size is not None and size % LANES for size in sizes.values()):
        return f"its blocks are no multiples of {LANES} tokens"
    return None


def _has_rows_in_front(eqn: Any) -> bool:
    """Whether the dims that `jax.vmap` added are the same in queries, keys, values and the result
    of a kernel in Pallas, and stand before the heads: its grid has them first, in this order."""
    inner = all_equations(open_jaxpr(eqn.params["call_jaxpr"])[0])
    calls = [one for one in inner if one.primitive.name == "pallas_call"]
    shapes = {shape_of(atom) for atom in (*operands_of(eqn), *eqn.outvars)}
    if len(calls) != 1 or len({shape[:-3] for shape in shapes}) != 1:
        return False
    arrays = {_without_single_rows(shape) for shape in shapes}
    mappings = calls[0].params["grid_mapping"].block_mappings
    mapped = [one for one in mappings if _without_single_rows(one.array_aval.shape) in arrays]
    return len(mapped) >= 4 and all(
        of.outvars[:rows] == of.invars[:rows]
        for of, rows in (
            (one.index_map_jaxpr.jaxpr, len(one.array_aval.shape) - 3) for one in mapped
        )
    )


def _without_single_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without dims of one row, which Pallas leaves out."""
    return (*(size for size in shape[:-3] if size > 1), *shape[-3:])


def operands_of(eqn: Any) -> list[Any]:
    """Return queries, keys and values: the first numbers of a call that have tokens, heads and a
    width. Masks are no such numbers."""
    numbers = [a for a in eqn.invars if jnp.issubdtype(a.aval.dtype, jnp.floating)]
    return [atom for atom in numbers if len(shape_of(atom)) > 2][:3]


def kernel_of(eqn: Any) -> AttentionKernel | None:
    """Return the kernel that an equation calls; None for any other equation.

    Those that read more than queries, keys and values are others too: with a bias, segments,
    lengths, dropout or a window.
    """
    if eqn.primitive.name != "custom_vjp_call" or eqn.params["num_consts"] or len(eqn.outvars) > 1:
        return None
    called = _in_pallas(eqn)
    if called is None:
        return Cudnn.of(open_jaxpr(eqn.params["call_jaxpr"])[0])
    kernel, constants = called
    return kernel.of(eqn, constants)


def calls_kernel(eqn: Any) -> bool:
    """Whether an equation calls one of the kernels at all."""
    if eqn.primitive.name != "custom_vjp_call":
        return False
    inner = all_equations(open_jaxpr(eqn.params["call_jaxpr"])[0])
    return _in_pallas(eqn) is not None or any(one.primitive.name in FORWARD for one in inner)


_BY_DERIVATIVE: Mapping[tuple[str, str], type[PallasFlash | Splash]] = {
    (PallasFlash.LIBRARY, "_flash_attention_bwd"): PallasFlash,
    (Splash.LIBRARY, "_splash_attention_bwd"): Splash,
}


def _in_pallas(eqn: Any) -> tuple[type[PallasFlash | Splash], dict[str, Any]] | None:
    """Return the kernel in Pallas that a `jax.custom_vjp` calls, and its constants by their names;
    None if it calls none."""
    derivative = derivative_of(eqn)
    if derivative is None:
        return None
    function, constants = derivative
    kernel = _BY_DERIVATIVE.get((function.__module__, getattr(function, "__name__", "")))
    if kernel is None:
        return None
    names = inspect.signature(function).parameters
    return kernel, dict(zip(names, constants, strict=False))


# --- Operations -----------------------------------------------------------------------------------

ATTENTION = FUSED_ATTENTION | {"attend", "attend_backward"}
"""Those of all operations that are attention at once: cuDNN's in a user's function, too."""

attend_p, attend_backward_p = Primitive("attend"), Primitive("attend_backward")


def attend(q: Array, k: Array, v: Array, *, kernel: AttentionKernel) -> tuple[Array, Array]:
    """Return the result of a kernel, and the log-sum-exp `(..., N, T)`."""
    out, lse = attend_p.bind(q, k, v, kernel=kernel)
    return out, lse


def attention_dims(eqn: Any) -> tuple[list[Dims], list[Dims]] | None:
    """Return the letters of an operation's operands and of its results, for dims that may be split;
    None if nothing of it may be.

    "N" is on the heads of keys too, if there are several: a part of one is that of the other. "T"
    is on tokens of queries where no mask asks for their places.
    """
    if eqn.primitive.name in FUSED_ATTENTION:
        return fused_dims(eqn)
    kernel, shapes = eqn.params["kernel"], [var.aval.shape for var in eqn.invars]
    front = tuple(f"B{dim}" for dim in range(len(shapes[0]) - 3))
    tokens = None if kernel.causal else "T"
    query: Dims = ("N", tokens, None) if kernel.heads_first else (tokens, "N", None)
    one_head = shapes[1][kernel.heads] == 1
    key = tuple("N" if letter == "N" and not one_head else None for letter in query)
    queries, keys, statistics = (*front, *query), (*front, *key), (*front, "N", tokens)
    if eqn.primitive is attend_p:
        return [queries, keys, keys], [queries, statistics]
    return [queries, keys, keys, queries, statistics, queries], [queries, keys, keys]


def attention_products(eqn: Any, shapes: Sequence[Sequence[int]]) -> tuple[int, ProductDims]:
    """Return how many products an operation has, and the dims of each (see `fused_products`)."""
    if eqn.primitive.name in FUSED_ATTENTION:
        return fused_products(eqn, shapes)
    kernel, (q, k) = eqn.params["kernel"], shapes[:2]
    tokens, keys = q[kernel.tokens], k[kernel.tokens]
    queries = max(tokens // 2, 1) if kernel.causal else tokens
    batch = math.prod(q[:-3]) * q[kernel.heads]
    return 2 if eqn.primitive is attend_p else 5, (queries, keys, q[-1], batch)


def attend_backward(*operands: Array, kernel: AttentionKernel) -> tuple[Array, Array, Array]:
    """Return the gradients of q, k and v, given these, the results of `attend` and a gradient."""
    dq, dk, dv = attend_backward_p.bind(*operands, kernel=kernel)
    return dq, dk, dv


def _with_rows(method: Callable[..., Sequence[Array]], arrays: Sequence[Array]) -> list[Array]:
    """Apply a method of a kernel to arrays with any dims in front: all are rows to it."""
    front = arrays[0].shape[:-3]

    def joined(x: Array) -> Array:
        return x.reshape(-1, *x.shape[len(front) :])

    return [x.reshape(*front, *x.shape[1:]) for x in method(*map(joined, arrays))]


def _forward(q: Array, k: Array, v: Array, *, kernel: AttentionKernel) -> list[Array]:
    out, lse = _with_rows(kernel.forward, (q, k, v))
    return [out, lse.astype(sum_dtype(q.dtype))]


def _backward(*arrays: Array, kernel: AttentionKernel) -> list[Array]:
    q, k, v, out, lse, gradient = arrays
    operands = q, k, v, out, lse.astype(jnp.float32), gradient.astype(q.dtype)
    return _with_rows(kernel.backward, operands)


def _avals(q: Any, k: Any, v: Any, *, kernel: AttentionKernel) -> list[Any]:
    tokens, heads = q.shape[kernel.tokens], q.shape[kernel.heads]
    statistics = (*q.shape[:-3], heads, tokens)
    result = (*q.shape[:-1], v.shape[-1])
    return [q.update(shape=result), q.update(shape=statistics, dtype=sum_dtype(q.dtype))]


def _batched(primitive: Primitive, args: Any, dims: Any, **params: Any) -> Any:
    """Put the new dim in front, of all operands."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims, strict=True)
    ]
    outs = primitive.bind(*moved, **params)
    return outs, [0] * len(outs)


for _primitive, _implementation in ((attend_p, _forward), (attend_backward_p, _backward)):
    _primitive.multiple_results = True
    _primitive.def_impl(jax.jit(_implementation, static_argnames="kernel"))
    mlir.register_lowering(_primitive, mlir.lower_fun(_implementation, multiple_results=True))
    batching.primitive_batchers[_primitive] = functools.partial(_batched, _primitive)
attend_p.def_abstract_eval(_avals)
attend_backward_p.def_abstract_eval(lambda q, k, v, *rest, kernel: [q, k, v])
