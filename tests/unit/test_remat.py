"""What is recomputed: every segment but the last, whose backward pass follows at once."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plurax.jaxpr.compat import REMAT, called_jaxpr, is_call_or_remat
from plurax.jaxpr.kept_values import with_names
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


@pytest.mark.parametrize("policy", ["dots", "full", 0.2, 0.6])
@pytest.mark.parametrize("fun", [scanned, unrolled, long_tail])
def test_gradients_are_the_same(fun, policy, x64):
    params, x = arguments()
    want = jax.jit(jax.grad(fun))(params, x)
    got = jax.jit(jax.grad(rematerialized(fun, policy)))(params, x)
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


# --- Within a budget ------------------------------------------------------------------------------


def feedforward(params, x):
    """Three layers in a loop, each of three products."""

    def layer(x, w):
        wide = jnp.sin(x @ w["up"])  # (32, 64), of 4 terms
        narrow = jnp.sin(wide @ w["down"])  # (32, 4), of 64 terms
        return x + jnp.sin(narrow @ w["out"]), None  # (32, 4), of 4 terms

    return jnp.sum(jax.lax.scan(layer, x, params)[0])


def feedforward_arguments():
    sizes = {"up": (4, 64), "down": (64, 4), "out": (4, 4)}
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        n: jax.random.normal(k, (3, *s)) for k, (n, s) in zip(keys, sizes.items(), strict=True)
    }
    return params, jnp.ones((32, 4))


BYTES = 4 * (32 * 64 + 2 * 32 * 4)
"""Of the products of a layer."""


def stacked(budget):
    """Return the shapes that the forward loop stacks for the backward loop, without the carry's."""
    params, x = feedforward_arguments()
    again = rematerialized(feedforward, budget)
    jaxpr = jax.make_jaxpr(jax.grad(again))(params, x).jaxpr
    forward = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    shapes = [var.aval.shape for var in forward.outvars if len(var.aval.shape) == 3]
    shapes.remove((3, 32, 4))
    return shapes


@pytest.mark.parametrize(
    ("share", "kept"),
    [
        pytest.param(0.05, [], id="nothing"),
        pytest.param(0.06, [(3, 32, 4)], id="64 terms"),
        pytest.param(0.12, [(3, 32, 4)] * 2, id="and 4 terms, which fit"),
        pytest.param(0.95, [(3, 32, 4), (3, 32, 64)], id="and 4 terms, the first"),
        pytest.param(0.9999, [(3, 32, 4), (3, 32, 64)], id="all but the last"),
    ],
)
def test_what_has_most_operations_for_its_bytes_is_kept_first(share, kept):
    shapes = stacked(share)
    assert sorted(shapes) == kept
    assert sum(4 * np.prod(shape) for shape in shapes) / 3 <= share * BYTES


@pytest.mark.parametrize(("policy", "again"), [("full", 6), (0.6, 3), ("dots", 0)])
def test_of_two_products_of_a_segment_one_fits(policy, again):
    params, x = arguments()
    jaxpr = jax.make_jaxpr(jax.grad(rematerialized(unrolled, policy)))(params, x).jaxpr
    assert count(jaxpr, "dot_general") == 35 + again


def test_a_call_is_looked_into_but_its_own_derivative_stays(x64):
    """`jax.nn.relu` has a derivative of its own at 0; `jax.nn.gelu` is a plain call."""

    def loss(params, x):
        hidden = jax.nn.relu(jax.jit(lambda x, w: jnp.sin(x @ w))(x, params["head"]) * 0.0)
        return jnp.sum(jax.nn.gelu(hidden + x @ params["head"]))

    params, x = arguments()
    want = jax.grad(loss)(params, x)
    got = jax.grad(rematerialized(loss, 0.5, at_once=False))(params, x)
    np.testing.assert_allclose(got["head"], want["head"], rtol=1e-12)


def test_a_complex_value_and_a_key_are_computed_again(x64):
    def loss(params, x):
        key = jax.random.fold_in(jax.random.key(0), 1)
        noise = jax.random.normal(key, x.shape, x.dtype)
        waves = jnp.fft.fft((x + noise) @ params["head"])
        return jnp.sum(jnp.abs(waves * jnp.conj(waves)) ** 1.5)

    params, x = arguments()
    want = jax.grad(loss)(params, x)
    got = jax.grad(rematerialized(loss, 0.9, at_once=False))(params, x)
    np.testing.assert_allclose(got["head"], want["head"], rtol=1e-9)


@pytest.mark.parametrize(("share", "kept"), [(0.25, 5), (0.5, 7), (0.999, 7)])
def test_of_a_layer_the_scores_are_kept_last(share, kept):
    """The table of `kept_values.py`; `down` is read by no derivative, and none of these is it."""
    rows, tokens, width, heads = 4, 1024, 1024, 16

    def layer(x, p):
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, p[name]) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        x = x + jnp.einsum("bnts,bsnh->btnh", weights, v).reshape(x.shape) @ p["out"]
        return x + (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]

    sizes = dict.fromkeys("qkv", (width, heads, width // heads))
    sizes |= {"out": (width, width), "gate": (width, 4 * width), "up": (width, 4 * width)}
    shapes = {name: jax.ShapeDtypeStruct(size, jnp.bfloat16) for name, size in sizes.items()}
    shapes["down"] = jax.ShapeDtypeStruct((4 * width, width), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((rows, tokens, width), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(with_names(layer, share))(x, shapes).jaxpr
    named = [eqn.outvars[0].aval.shape for eqn in jaxpr.eqns if eqn.primitive.name == "name"]
    assert len(named) == kept
    assert (rows, heads, tokens, tokens) not in named


def test_a_product_in_a_loop_takes_no_share(x64):
    """Its derivative needs what each iteration computes, whatever the loop returns."""

    def loss(params, x):
        w = params["head"]
        x, _ = jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, length=3)
        return jnp.sum(jnp.sin(jnp.sin(x @ w) @ w))

    params, x = arguments()
    again = rematerialized(loss, 0.5, whole=True)
    jaxpr = jax.make_jaxpr(jax.grad(again))(params, x).jaxpr
    # Of the two products behind the loop the first fits, and is not computed again.
    assert count(jaxpr, "name") == 1
    want, got = jax.grad(loss)(params, x), jax.grad(again)(params, x)
    np.testing.assert_allclose(got["head"], want["head"], rtol=1e-12)
