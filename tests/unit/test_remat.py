"""What is recomputed: every segment but the last, whose backward pass follows at once."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plurax.jaxpr.compat import REMAT, called_jaxpr, is_call_or_remat
from plurax.jaxpr.remat import rematerialized

WIDTH = 4


def scanned(params, x):
    """Three layers in a loop, of five equations; a head, and a loss that reads its result."""

    def layer(x, w):
        y = jnp.tanh(x @ w)
        return x + y * jnp.cos(y), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.sum(jnp.sin(x @ params["head"]))


def unrolled(params, x):
    """Twelve products, each of which the next reads through a sine: 24 equations and a sum."""
    for _ in range(12):
        x = jnp.sin(x @ params["head"])
    return jnp.sum(x)


def long_tail(params, x):
    """A loop of one layer of five equations, and what follows it is longer."""
    return unrolled(params, jnp.cos(scanned(params, x)) * x)


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    layers = jax.random.normal(keys[0], (3, WIDTH, WIDTH))
    head = jax.random.normal(keys[1], (WIDTH, WIDTH))
    return {"layers": layers, "head": head}, jax.random.normal(keys[2], (2, WIDTH))


def count(jaxpr, name):
    """Count the equations of a name; those of loops once."""
    counts = collections.Counter()

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            counts[eqn.primitive.name] += 1
            if is_call_or_remat(eqn):
                walk(called_jaxpr(eqn)[0])

    walk(jaxpr)
    return counts[name]


@pytest.mark.parametrize(
    ("fun", "at_once", "products", "recomputed"),
    [
        # The head outside of the loop: forward, and twice backward; or again before them.
        pytest.param(scanned, True, 3, 0, id="loop"),
        pytest.param(scanned, False, 4, 1, id="loop, later"),
        # 12 forward, 23 backward: x has no gradient. 25 equations are segments of 5, 5, 5 and 10.
        # The sines of the first three need two products again, as the third is the next segment's
        # input; those of the last need four.
        pytest.param(unrolled, True, 35 + 6, 3, id="unrolled"),
        pytest.param(unrolled, False, 35 + 10, 4, id="unrolled, later"),
    ],
)
def test_the_last_segment_is_not_computed_again(fun, at_once, products, recomputed):
    params, x = arguments()
    again = rematerialized(fun, "full", at_once=at_once)
    jaxpr = jax.make_jaxpr(jax.grad(again))(params, x).jaxpr
    assert sum(count(jaxpr, name) for name in REMAT) == recomputed
    assert count(jaxpr, "dot_general") == products


@pytest.mark.parametrize("policy", ["dots", "full"])
@pytest.mark.parametrize("fun", [scanned, unrolled, long_tail])
def test_gradients_are_the_same(fun, policy, x64):
    params, x = arguments()
    want = jax.grad(fun)(params, x)
    got = jax.grad(rematerialized(fun, policy))(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), got, want)


def test_what_computes_more_than_an_iteration_is_cut():
    """Else all that follows a short loop would be held."""
    params, x = arguments()
    jaxpr = jax.make_jaxpr(jax.grad(rematerialized(long_tail, "full")))(params, x).jaxpr
    assert sum(count(jaxpr, name) for name in REMAT) >= 3


def wide_tail(params, x):
    """A loop over layers, and fewer equations behind it, but on 64 times as many rows."""

    def layer(x, w):
        for _ in range(8):
            x = jnp.sin(x @ w)
        return x, None

    x = jnp.tile(jax.lax.scan(layer, x, params["layers"])[0], (64, 1))
    return jnp.sum(jnp.sin(jnp.cos(jnp.tanh(x @ params["head"]))))


def test_an_iteration_is_measured_in_bytes():
    params, x = arguments()
    jaxpr = jax.make_jaxpr(jax.grad(rematerialized(wide_tail, "full")))(params, x).jaxpr
    assert sum(count(jaxpr, name) for name in REMAT) >= 1
