"""The vectors of a push as they are sent: bytes, or the parts of a compression."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from plurax.server.compression import CODECS, Compression
from plurax.server.messages import Content
from plurax.server.shard_layout import Vectors, from_bytes, to_bytes

Residuals = tuple[Array | None, ...]
"""What a compression has left to send, for each vector."""


def no_residuals(compression: Compression | None, lengths: Sequence[tuple[str, int]]) -> Residuals:
    """Return the residuals before the first push of vectors of these dtypes and lengths."""
    if compression is None:
        return tuple(None for _ in lengths)
    codec = CODECS[compression]
    return tuple(codec.residual(length, dtype) for dtype, length in lengths)


def encode(
    compression: Compression | None, vectors: Vectors, residuals: Residuals
) -> tuple[Content, Residuals]:
    """Return what is sent of vectors, and what is left."""
    if compression is None:
        return tuple((to_bytes(vector),) for vector in vectors), residuals
    codec = CODECS[compression]
    both = [
        codec.encode(vector.reshape(-1), residual)
        for vector, residual in zip(vectors, residuals, strict=True)
    ]
    content = tuple(tuple(np.asarray(part) for part in parts) for parts, _ in both)
    return content, tuple(residual for _, residual in both)


def decode(
    compression: Compression | None, content: Sequence[object], lengths: Sequence[tuple[str, int]]
) -> Vectors | None:
    """Return the vectors, or None where the content is not of vectors of these lengths."""
    if not isinstance(content, tuple) or len(content) != len(lengths):
        return None
    for parts, (dtype, length) in zip(content, lengths, strict=True):
        if not _fits(compression, parts, dtype, length):
            return None
    both = zip(content, lengths, strict=True)
    if compression is not None:
        codec = CODECS[compression]
        return tuple(codec.decode(parts, length, dtype) for parts, (dtype, length) in both)
    # Not copied: what has come stays as it is.
    return jax.device_put(tuple(from_bytes(parts[0], dtype) for parts, (dtype, _) in both))


def _fits(compression: Compression | None, parts: object, dtype: str, length: int) -> bool:
    """Return whether the parts have the shapes and dtypes of an encoded vector."""
    if not isinstance(parts, tuple) or not all(isinstance(part, np.ndarray) for part in parts):
        return False
    if compression is None:
        expected = [((length * jnp.dtype(dtype).itemsize,), np.dtype(np.uint8))]
    else:
        codec = CODECS[compression]
        like = jax.ShapeDtypeStruct((length,), jnp.dtype(dtype))
        left = jax.eval_shape(lambda: codec.residual(length, dtype))
        shapes, _ = jax.eval_shape(codec.encode, like, left)
        expected = [(shape.shape, np.dtype(shape.dtype)) for shape in shapes]
    return [(part.shape, part.dtype) for part in parts] == expected
