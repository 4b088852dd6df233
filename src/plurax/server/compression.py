"""Compress gradients on their way from a worker to a server.

A worker sends the gradients of a server's parameters as a few vectors `(n,)`
(`plurax.server.shard_layout`), as they are. Between nodes their bytes may take longer than the
step; a compression sends fewer, and the server decodes an approximation.
With *error feedback* the worker keeps what an approximation left out, the residual, and adds it to
the next gradient: after any number of steps the decoded vectors and the last residual sum to the
gradients, so that nothing is lost, only late.

    name       what is sent for n values                                     float32, n = 10,000
    bfloat16   n values, rounded to nearest even, as uint16                  20,000 of 40,000 bytes
    int8       n values in steps of a scale, one float32 scale for each      10,012
               chunk of 4096: round(x / scale), scale = max |x| / 127
    topk       the ceil(n / 100) largest by magnitude, and int32 indices     800

Example, `topk` of 3 values, so one is sent, a residual of float32 `(3,)`:

    step   vector            + residual           sent: value, index    residual left
    0      0.5 -2.0  0.25    0.5 -2.0  0.25       -2.0  1                0.5  0.0  0.25
    1      0.5 -0.5  0.25    1.0 -0.5  0.5         1.0  0                0.0 -0.5  0.5

    >>> import jax.numpy as jnp
    >>> from plurax.tree import byte_count
    >>> topk = CODECS["topk"]
    >>> residual = topk.residual(3, jnp.float32)
    >>> parts, residual = topk.encode(jnp.asarray([0.5, -2.0, 0.25]), residual)
    >>> topk.decode(parts, 3, jnp.float32).tolist(), residual.tolist(), byte_count(parts)
    ([0.0, -2.0, 0.0], [0.5, 0.0, 0.25], 8)
    >>> parts, residual = topk.encode(jnp.asarray([0.5, -0.5, 0.25]), residual)
    >>> topk.decode(parts, 3, jnp.float32).tolist(), residual.tolist()
    ([1.0, 0.0, 0.0], [0.0, -0.5, 0.5])

`bfloat16` has no residual. Rounding to nearest changes each value by at most 1/256 of itself,
down to 1e-38, so the error vanishes with the gradient. In `int8` it is up to half a step, set
by the largest value of the chunk, and in `topk` the whole value: small entries might never be sent.

A vector with a value that is not finite decodes to one that is not finite, which a server rejects;
the residual stays as it was, so that later gradients are sent.

Sources. Error feedback: Seide et al. 2014, "1-Bit Stochastic Gradient Descent and its Application
to Data-Parallel Distributed Training of Speech DNNs". int8: Alistarh et al. 2017, "QSGD", a scale
for each chunk; rounding is to nearest here, not at random, as the residual corrects the bias. topk:
Lin et al. 2018, "Deep Gradient Compression"; Stich et al. 2018, "Sparsified SGD with Memory".
bfloat16: Kalamkar et al. 2019, "A Study of BFLOAT16 for Deep Learning Training", where training in
bfloat16 reaches the results of float32 in as many iterations, without other hyperparameters.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8, Int32, Shaped, UInt16

from plurax.server.messages import Content
from plurax.server.shard_layout import Vectors, from_bytes, to_bytes
from plurax.tree import sum_dtype

Compression = Literal["bfloat16", "int8", "topk"]

Vector = Float[Array, "n"]
Parts = tuple[Shaped[Array | np.ndarray, "_"], ...]
"""What is sent: arrays of dtypes that NumPy has by itself."""
Residuals = tuple[Array | None, ...]
"""What a compression has left to send, for each vector of a push."""

CHUNK = 4096
"""Values of `int8` that share a scale."""


@dataclasses.dataclass(frozen=True)
class Codec:
    """A compression: how a worker encodes its vectors, and how a server decodes them.

    **Fields:**

    - `encode(vector, residual) -> (parts, residual)`: `vector` of `n` elements of any float dtype;
      `residual` `(n,)`, returned with the vector before, or at first that of `Codec.residual`.
      It consists of jitted functions, and is itself not for `jax.jit`: XLA would compute the new
      residual with digits that are not sent.
    - `decode(parts, n, dtype) -> vector`: `parts` as JAX or NumPy arrays; jitted, `n` and `dtype`
      static.
    - `feedback`: whether there is a residual.
    """

    encode: Callable[..., tuple[Parts, Vector | None]]
    decode: Callable[..., Vector]
    feedback: bool

    def residual(self, n: int, dtype: DTypeLike) -> Vector | None:
        """Return the residual before the first vector: zeros `(n,)`, None without feedback.

        Its dtype is float32 or wider: small values add up in it that a bfloat16 would round off.
        """
        return jnp.zeros(n, sum_dtype(dtype)) if self.feedback else None


@jax.jit
def _encode_bfloat16(vector: Vector, residual: None) -> tuple[Parts, None]:
    vector = vector.reshape(-1)
    if vector.dtype.itemsize > 2:  # float16 is as small, and has more digits
        vector = vector.astype(jnp.float32).astype(jnp.bfloat16)
    return (lax.bitcast_convert_type(vector, jnp.uint16),), residual


@functools.partial(jax.jit, static_argnums=(1, 2))
def _decode_bfloat16(parts: tuple[UInt16[Array, "n"]], n: int, dtype: DTypeLike) -> Vector:
    sent = dtype if jnp.dtype(dtype).itemsize == 2 else jnp.bfloat16
    return lax.bitcast_convert_type(parts[0], sent).astype(dtype)


@functools.partial(jax.jit, static_argnums=1)
def _quantize(total: Vector, dtype: DTypeLike) -> tuple[Int8[Array, "n"], Float32[Array, "chunks"]]:
    chunks = _chunks(total)
    # On CPU, XLA's maximum of many values passes over NaN (openxla/xla issue 21461). A division by
    # a constant is compiled to this product.
    finite = jnp.isfinite(chunks).all(axis=1)
    scales = jnp.where(finite, jnp.abs(chunks).max(axis=1) * (1 / 127), jnp.nan)
    scales = scales.astype(jnp.float32)
    # A scale of NaN or infinity makes its chunk NaN or infinite when decoded, whatever its steps;
    # one of zero, below float32's numbers, leaves it for later.
    steps = jnp.round(chunks / scales.astype(total.dtype)[:, None])
    # The scale itself is rounded, coarsely if it is tiny.
    return jnp.clip(steps, -127, 127).astype(jnp.int8).ravel()[: total.size], scales


@functools.partial(jax.jit, static_argnums=(1, 2))
def _dequantize(
    parts: tuple[Int8[Array, "n"], Float32[Array, "chunks"]], n: int, dtype: DTypeLike
) -> Vector:
    steps, scales = (part.astype(sum_dtype(dtype)) for part in parts)
    return (_chunks(steps) * scales[:, None]).ravel()[:n].astype(dtype)


def _chunks(vector: Shaped[Array, "n"]) -> Shaped[Array, "chunks 4096"]:
    """Return the vector as rows of `CHUNK`, the last padded with zeros."""
    count = -(-vector.size // CHUNK)
    return jnp.pad(vector, (0, count * CHUNK - vector.size)).reshape(count, CHUNK)


@functools.partial(jax.jit, static_argnums=1)
def _largest(total: Vector, dtype: DTypeLike) -> tuple[Shaped[Array, "k"], Int32[Array, "k"]]:
    magnitudes = jnp.where(jnp.isnan(total), jnp.inf, jnp.abs(total))
    _, indices = lax.top_k(magnitudes, -(-total.size // 100))
    values = total[indices].astype(dtype)
    if values.dtype.itemsize == 2:  # NumPy has no bfloat16
        values = lax.bitcast_convert_type(values, jnp.uint16)
    return values, indices


@functools.partial(jax.jit, static_argnums=(1, 2))
def _scatter(
    parts: tuple[Shaped[Array, "k"], Int32[Array, "k"]], n: int, dtype: DTypeLike
) -> Vector:
    values, indices = parts
    if jnp.dtype(dtype).itemsize == 2:
        values = lax.bitcast_convert_type(values, dtype)
    # An index that was damaged on the way is seen by the server, as what is not finite is.
    values = jnp.where((indices >= 0) & (indices < n), values, jnp.nan)
    return jnp.zeros(n, dtype).at[indices].set(values, mode="clip")


def _with_feedback(
    compress: Callable[[Vector, DTypeLike], Parts], decode: Callable[..., Vector]
) -> Codec:
    """Return the codec that sends vector and residual together and keeps what was not sent."""

    # Three programs, not one: decoded is to the bit what the server's program computes.
    def encode(vector: Vector, residual: Vector) -> tuple[Parts, Vector]:
        total = _add(vector, residual)
        parts = compress(total, vector.dtype)
        decoded = decode(parts, vector.size, vector.dtype)
        return parts, _left(total, decoded, residual)

    return Codec(encode, decode, feedback=True)


@jax.jit
def _add(vector: Vector, residual: Vector) -> Vector:
    return vector.reshape(-1).astype(residual.dtype) + residual


@jax.jit
def _left(total: Vector, decoded: Vector, residual: Vector) -> Vector:
    """Return the next residual; where the server rejects the vector, the one before."""
    left = total - decoded.astype(total.dtype)
    return jnp.where(jnp.isfinite(decoded).all(), left, residual)


CODECS: dict[Compression, Codec] = {
    "bfloat16": Codec(_encode_bfloat16, _decode_bfloat16, feedback=False),
    "int8": _with_feedback(_quantize, _dequantize),
    "topk": _with_feedback(_largest, _scatter),
}

WHOLE = Codec(
    lambda vector, residual: ((to_bytes(vector),), residual),
    # Not copied: what has come stays as it is.
    lambda parts, n, dtype: jax.device_put(from_bytes(parts[0], dtype)),
    feedback=False,
)
"""Vectors as they are, as bytes."""


def get_codec(compression: Compression | None) -> Codec:
    """Return the codec of `Servers.compression`."""
    return WHOLE if compression is None else CODECS[compression]


# --- All vectors of a push ------------------------------------------------------------------------


def first_residuals(codec: Codec, lengths: Sequence[tuple[str, int]]) -> Residuals:
    """Return the residuals before the first push of vectors of these dtypes and lengths."""
    return tuple(codec.residual(length, dtype) for dtype, length in lengths)


def encode(codec: Codec, vectors: Vectors, residuals: Residuals) -> tuple[Content, Residuals]:
    """Return what is sent of vectors, and what is left."""
    encoded = [codec.encode(*both) for both in zip(vectors, residuals, strict=True)]
    content = tuple(tuple(map(np.asarray, parts)) for parts, _ in encoded)
    return content, tuple(residual for _, residual in encoded)


def decode(codec: Codec, content: Any, lengths: Sequence[tuple[str, int]]) -> Vectors | None:
    """Return the vectors, or None where the content is not of vectors of these lengths."""
    if not isinstance(content, tuple) or len(content) != len(lengths):
        return None
    both = [*zip(content, lengths, strict=True)]
    if not all(_fits(codec, parts, dtype, length) for parts, (dtype, length) in both):
        return None
    return tuple(codec.decode(parts, length, dtype) for parts, (dtype, length) in both)


def _fits(codec: Codec, parts: Any, dtype: str, length: int) -> bool:
    """Return whether the parts have the shapes and dtypes of an encoded vector."""
    if not isinstance(parts, tuple) or not all(isinstance(part, np.ndarray) for part in parts):
        return False
    if codec is WHOLE:
        expected = [((length * jnp.dtype(dtype).itemsize,), np.dtype(np.uint8))]
    else:
        like = jax.ShapeDtypeStruct((length,), jnp.dtype(dtype))
        residual = jax.eval_shape(lambda: codec.residual(length, dtype))
        shapes, _ = jax.eval_shape(codec.encode, like, residual)
        expected = [(shape.shape, np.dtype(shape.dtype)) for shape in shapes]
    return [(part.shape, part.dtype) for part in parts] == expected
