"""Corrections of stale gradients, against NumPy and against optimizers with a smaller rate."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from plurax.server.corrections import delay, scale

RATE = 0.03
DTYPES = [np.float64, np.float32, ml_dtypes.bfloat16, np.float16]
OPTIMIZERS = {
    "sgd": optax.sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "nesterov": functools.partial(optax.sgd, momentum=0.9, nesterov=True),
    "adam": optax.adam,
    "adamw": functools.partial(optax.adamw, weight_decay=0.1),
    "adamw, clipped": lambda rate: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(rate)),
}

pytestmark = pytest.mark.usefixtures("x64")
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)


def tree(rng, dtype=np.float64):
    return {"w": rng.normal(size=(3, 5)).astype(dtype), "b": [rng.normal(size=5).astype(dtype)]}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scale_is_the_optimizer_with_a_smaller_rate(name):
    rng = np.random.default_rng(0)
    params = expected = jax.tree.map(jnp.asarray, tree(rng))
    make = OPTIMIZERS[name]
    state = state_expected = make(RATE).init(params)
    scaled = jax.jit(scale)
    for staleness in (0, 1, 2, 7, 3, 0, 12):
        grads = tree(rng)
        updates, state = make(RATE).update(grads, state, params)
        params = scaled(params, optax.apply_updates(params, updates), staleness)
        smaller = make(RATE / max(staleness, 1))
        updates, state_expected = smaller.update(grads, state_expected, expected)
        expected = optax.apply_updates(expected, updates)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-13, atol=1e-15)
        jax.tree.map(close, (params, state), (expected, state_expected))


@every_dtype
@pytest.mark.parametrize("staleness", [0, 1, 2, 300])
def test_scale_is_that_of_numpy(dtype, staleness):
    rng = np.random.default_rng(1)
    old, updated = tree(rng, dtype), tree(rng, dtype)
    wide = np.promote_types(dtype, np.float32)

    def model(old, updated):
        step = (updated.astype(wide) - old.astype(wide)) / wide.type(max(staleness, 1))
        return (old.astype(wide) + step).astype(dtype) if staleness > 1 else updated

    found = scale(old, updated, staleness)
    assert jax.tree.all(jax.tree.map(lambda a: a.dtype == dtype, found))
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(model, old, updated))


def test_scale_leaves_what_is_fresh_or_no_float():
    old, updated = np.float32([1e8, 3.0]), np.float32([1e-8, 0.1])
    assert (old + (updated - old) != updated).all()  # what the formula alone would give
    for staleness in (0, 1):
        assert np.array_equal(scale(old, updated, jnp.int32(staleness)), updated)
    assert np.array_equal(scale(np.int32([0]), np.int32([7]), 4), [7])


@every_dtype
@pytest.mark.parametrize("strength", [0.0, 0.04, 2.0])
def test_delay_is_that_of_numpy(dtype, strength):
    rng = np.random.default_rng(2)
    grads, now, base = (tree(rng, dtype) for _ in range(3))
    wide = np.promote_types(dtype, np.float32)

    def model(g, now, base):
        g, moved = g.astype(wide), now.astype(wide) - base.astype(wide)
        return (g + wide.type(strength) * g * g * moved).astype(dtype)

    found = delay(grads, now, base, strength)
    assert jax.tree.all(jax.tree.map(lambda a: a.dtype == dtype, found))
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(model, grads, now, base))


def test_delay_changes_nothing_where_nothing_moved():
    rng = np.random.default_rng(3)
    grads, now = tree(rng), tree(rng)
    jax.tree.map(np.testing.assert_array_equal, delay(grads, now, now), grads)


def test_delay_is_the_gradient_now_where_the_hessian_is_as_estimated():
    """Of `h / 2 * w ** 2` the second derivative is `h`, and `strength * g ** 2` at one `base`."""
    h, base, now = 3.0, np.asarray([2.0, -2.0]), np.asarray([1.5, 4.0])
    found = delay(h * base, now, base, strength=h / (h * 2.0) ** 2)
    np.testing.assert_allclose(found, h * now, rtol=1e-14)


def test_the_default_strength_is_that_of_dcasgd():
    found = delay(np.float64([2.0]), np.float64([0.4]), np.float64([1.0]))
    np.testing.assert_allclose(found, [1.904], rtol=1e-14)
