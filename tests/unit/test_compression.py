"""Compressed gradients: against NumPy, what is left over, what is not finite, and convergence."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.draws import draws

from plurax.server.compression import CHUNK, CODECS
from plurax.tree import byte_count

DTYPES = [np.float64, np.float32, ml_dtypes.bfloat16, np.float16]
SIZES = [0, 1, 99, 100, 101, CHUNK, CHUNK + 1, 3 * CHUNK - 1]
FEEDBACK = [name for name, codec in CODECS.items() if codec.feedback]

pytestmark = pytest.mark.usefixtures("x64")
every_dtype = pytest.mark.parametrize(
    "dtype",
    # Of those of two bytes one by default.
    [pytest.param(d, marks=[pytest.mark.slow] * (d == np.float16)) for d in DTYPES],
    ids=lambda dtype: np.dtype(dtype).name,
)
every_codec = pytest.mark.parametrize("name", CODECS)
with_feedback = pytest.mark.parametrize("name", FEEDBACK)


def wide(dtype):
    return np.promote_types(dtype, np.float32)


def bits(values):
    return values.view(np.uint16) if values.dtype.itemsize == 2 else values


def bfloat16_parts(total, dtype):
    if np.dtype(dtype).itemsize == 2:
        return [bits(total.astype(dtype))]
    word = total.astype(np.float32).view(np.uint32)
    half = np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))  # a tie goes to even
    return [((word + half) >> np.uint32(16)).astype(np.uint16)]


def bfloat16_values(parts, n, dtype):
    if np.dtype(dtype).itemsize == 2:
        return parts[0].view(dtype)
    return (parts[0].astype(np.uint32) << np.uint32(16)).view(np.float32).astype(dtype)


def int8_parts(total, dtype):
    steps, scales = [], []
    for at in range(0, len(total), CHUNK):
        chunk = total[at : at + CHUNK]
        scale = np.float32(np.abs(chunk).max() * total.dtype.type(1 / 127))
        steps.append(np.rint(chunk / total.dtype.type(scale)) if scale else 0 * chunk)
        scales.append(scale)
    return [np.concatenate([*steps, []]).astype(np.int8), np.asarray(scales, np.float32)]


def int8_values(parts, n, dtype):
    steps, scales = (part.astype(wide(dtype)) for part in parts)
    return (steps * np.repeat(scales, CHUNK)[:n]).astype(dtype)


def topk_parts(total, dtype):
    first = np.argsort(-np.abs(total), kind="stable")[: -(-len(total) // 100)]
    return [bits(total[first].astype(dtype)), first.astype(np.int32)]


def topk_values(parts, n, dtype):
    values = np.zeros(n, dtype)
    values[parts[1]] = parts[0].view(dtype)
    return values


MODELS = {
    "bfloat16": (bfloat16_parts, bfloat16_values),
    "int8": (int8_parts, int8_values),
    "topk": (topk_parts, topk_values),
}


def drawn_vector(seed, n, dtype):
    """Values of many magnitudes, equal ones and zeros among them; all normal numbers."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=n) * 10.0 ** rng.integers(-4, 4, n)
    values[rng.random(n) < 0.1] = 0
    values[rng.random(n) < 0.1] = 0.25
    return values.astype(dtype)


def equal(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and np.array_equal(a, b)


@pytest.mark.parametrize("name", CODECS)
@every_dtype
@given(st.integers(0, 2**32 - 1), st.sampled_from(SIZES))
@draws(12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_steps_are_those_of_numpy(name, dtype, seed, n):
    """Parts, decoded vectors and residuals of three steps, bit for bit; nothing is lost."""
    codec, (parts_of, values_of) = CODECS[name], MODELS[name]
    residual = codec.residual(n, dtype)
    given, received = np.zeros(n), np.zeros(n)
    largest = 0.0
    for step in range(3):
        vector = drawn_vector([seed, step], n, dtype)
        total = vector if residual is None else vector.astype(wide(dtype)) + np.asarray(residual)
        parts, residual = codec.encode(jnp.asarray(vector), residual)
        assert all(map(equal, parts, parts_of(total, dtype)))
        sent = tuple(map(np.asarray, parts))
        decoded = np.asarray(codec.decode(sent, n, dtype))
        assert equal(decoded, values_of(sent, n, dtype))
        given += vector.astype(float)
        received += decoded.astype(float)
        largest = max(largest, np.abs(total.astype(float)).max(initial=0))
        if residual is None:
            continue
        assert equal(residual, total - decoded.astype(total.dtype))
        eps = 0 if name == "topk" else np.finfo(total.dtype).eps
        back = decoded.astype(total.dtype) + np.asarray(residual)
        np.testing.assert_allclose(back, total, rtol=eps, atol=0)
        rounding = 2 * step * np.finfo(total.dtype).eps * largest
        np.testing.assert_allclose(received, given - np.asarray(residual), rtol=0, atol=rounding)


@pytest.mark.parametrize("name", CODECS)
@every_dtype
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("n", "at"), [(1, 0), (5000, 0), (5000, 2001), (5000, 4999)])
def test_what_is_not_finite_stays_so_and_leaves_the_residual(name, dtype, bad, n, at):
    codec = CODECS[name]
    residual = codec.residual(n, dtype)
    _, residual = codec.encode(drawn_vector(1, n, dtype), residual)
    vector = drawn_vector(2, n, dtype)
    vector[at] = bad
    parts, after = codec.encode(vector, residual)
    assert not np.isfinite(np.asarray(codec.decode(parts, n, dtype)).astype(float)).all()
    assert after is None if residual is None else equal(after, residual)


def test_ties_are_rounded_to_even():
    words, _ = CODECS["bfloat16"].encode(jnp.asarray([1 + 1 / 256, 1 + 3 / 256], np.float32), None)
    decoded = CODECS["bfloat16"].decode(words, 2, np.float32)
    assert decoded.tolist() == [1, 1 + 4 / 256]
    vector = jnp.asarray([127, 0.5, 1.5, -2.5, -3.5], np.float32)
    parts, residual = CODECS["int8"].encode(vector, jnp.zeros(5, np.float32))
    assert parts[0].tolist() == [127, 0, 2, -2, -4]
    assert residual.tolist() == [0, 0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_bfloat16_loses_nothing_of_two_bytes(dtype):
    words = np.arange(2**16, dtype=np.uint16)
    parts, _ = CODECS["bfloat16"].encode(words.view(dtype), None)
    assert equal(parts[0], words)
    decoded = CODECS["bfloat16"].decode(parts, len(words), dtype)
    assert equal(np.asarray(decoded).view(np.uint16), words)


def test_bfloat16_is_at_most_a_256th_off():
    vector = drawn_vector(0, 10_000, np.float32)
    parts, _ = CODECS["bfloat16"].encode(vector, None)
    decoded = np.asarray(CODECS["bfloat16"].decode(parts, len(vector), np.float32))
    assert (np.abs(decoded - vector) <= np.abs(vector) / 256).all()


def test_scales_too_small_for_float32_leave_values_for_later():
    """Below 1e-38 a processor may round to zero; nothing overflows and nothing is lost."""
    for largest in (1e-300, 3e-44, 1e-37):
        vector = np.asarray([largest, -largest / 3, 0])
        parts, residual = CODECS["int8"].encode(vector, jnp.zeros(3))
        decoded = np.asarray(CODECS["int8"].decode(parts, 3, np.float64))
        np.testing.assert_allclose(decoded + residual, vector, rtol=1e-15)
        assert (np.abs(decoded) <= largest * 1.01).all()


@pytest.mark.parametrize("index", [-1, -7, 150, 2**31 - 1])
def test_an_index_outside_is_not_finite(index):
    vector = drawn_vector(0, 150, np.float32)
    (values, indices), _ = CODECS["topk"].encode(vector, jnp.zeros(150, np.float32))
    damaged = (values, indices.at[1].set(index))
    assert np.isnan(CODECS["topk"].decode(damaged, 150, np.float32)).any()


@pytest.mark.parametrize(
    ("name", "dtype", "count"),
    [
        ("bfloat16", np.float32, 20_000),
        ("bfloat16", np.float64, 20_000),
        ("int8", np.float32, 10_000 + 3 * 4),
        ("int8", ml_dtypes.bfloat16, 10_000 + 3 * 4),
        ("topk", np.float32, 100 * 8),
        ("topk", np.float64, 100 * 12),
        ("topk", ml_dtypes.bfloat16, 100 * 6),
    ],
)
def test_what_is_sent_is_of_numpys_dtypes(name, dtype, count):
    codec = CODECS[name]
    parts, _ = codec.encode(drawn_vector(0, 10_000, dtype), codec.residual(10_000, dtype))
    assert byte_count(parts) == count
    assert all(part.dtype.isbuiltin for part in parts)


def excess_loss(name, feedback=True, steps=1500, features=300):
    """The squared error beyond the noise's, in the last steps of SGD on least squares.

    Three features are large, and labels are noisy: their gradients never vanish, and are the
    largest of nearly every batch. The others are small.
    """
    rng = np.random.default_rng(0)
    size = np.where(np.arange(features) < 3, 2.0, 0.5)
    truth = rng.choice([-0.2, 0.2], features)
    codec, w, excess = CODECS.get(name), np.zeros(features), []
    residual = codec and codec.residual(features, w.dtype)
    for _ in range(steps):
        x = rng.normal(size=(8, features)) * size
        g = x.T @ (x @ (w - truth) - rng.normal(size=8)) / 8
        if codec is not None:
            parts, after = codec.encode(g, residual)
            g = np.asarray(codec.decode(parts, features, g.dtype))
            residual = after if feedback else residual
        w -= 0.02 * g
        excess.append(np.sum(np.square(size * (w - truth))))
    return np.mean(excess[-steps // 4 :])


@pytest.mark.ci
def test_sgd_converges_as_without_compression_only_with_feedback():
    """Losses within 2 %, where the noise's is 1."""
    plain = 1 + excess_loss(None)
    for name in CODECS:
        assert 1 + excess_loss(name) == pytest.approx(plain, rel=0.02), name
    assert 1 + excess_loss("topk", feedback=False) > 1.5 * plain
