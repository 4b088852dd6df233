"""Computing with the batch in the minor dim gives the same values, for any function."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plurax.jaxpr.batch_minor import batch_minor

B, F, G = 6, 5, 3
X = np.random.default_rng(0).normal(size=(B, F)).astype(np.float32)
Y = np.arange(B) % G
W = np.random.default_rng(1).normal(size=(F, G)).astype(np.float32)
WIDE = np.random.default_rng(2).normal(size=(F, 16)).astype(np.float32)
SQUARE = np.random.default_rng(3).normal(size=(16, B)).astype(np.float32)
IMAGES = np.random.default_rng(4).normal(size=(B, 4, 4, 2)).astype(np.float32)
KERNEL = np.random.default_rng(5).normal(size=(3, 3, 2, 2)).astype(np.float32)

FUNCTIONS = {
    "linear": lambda w, x: x @ w,
    "product from the left": lambda w, x: w.T @ x.T,
    "few terms": lambda w, x: x[:, :2] @ w[:2],
    "wide": lambda w, x: jax.nn.gelu(x @ WIDE) @ SQUARE,
    "bias and relu": lambda w, x: jax.nn.relu(x @ w + w[:1]),
    "softmax": lambda w, x: jax.nn.softmax(x @ w, axis=-1),
    "over the batch": lambda w, x: jax.nn.softmax(x @ w, axis=0),
    "cross entropy": lambda w, x: optax.softmax_cross_entropy_with_integer_labels(x @ w, Y),
    "argmax": lambda w, x: (jnp.argmax(x @ w, axis=-1), jnp.argmin(x, axis=0)),
    "argmax of ties": lambda w, x: jnp.argmax(jnp.round(x), axis=-1),
    "argmin of NaN": lambda w, x: jnp.argmin(jnp.where(x > 0.5, jnp.nan, x), axis=-1),
    "argmax of integers": lambda w, x: jnp.argmax(x.astype(int) // 2, axis=1),
    "sums": lambda w, x: (x.sum(0), x.sum(1), x.sum(), x.max(1, keepdims=True), x.mean(0)),
    "cumulated": lambda w, x: (jnp.cumsum(x, axis=0), jnp.cumsum(x, axis=1), jnp.sort(x, axis=1)),
    "all pairs": lambda w, x: (x @ x.T, (x @ w) @ (x @ w).T),
    "moved": lambda w, x: (x.T, jnp.concatenate([x, 2 * x], 1), jnp.concatenate([x, x], 0)),
    "cut": lambda w, x: (x[:, 1:4:2], x[1:4], x[:, 2], x[2], jnp.pad(x, ((0, 0), (1, 2)))),
    "reshaped": lambda w, x: (x.reshape(B, 1, F), x.reshape(-1), x[:, None, :] * w.T[None]),
    "outer": lambda w, x: jnp.einsum("bf,bg->bfg", x, x @ w),
    "batched product": lambda w, x: jnp.einsum("bf,bfg->bg", x, x[:, :, None] * w[None]),
    "scanned": lambda w, x: jax.lax.scan(lambda c, r: (c + r @ w, c), jnp.zeros(G), x),
    "mapped": lambda w, x: jax.vmap(lambda row: jnp.tanh(row @ w).sum())(x),
    "rematerialised": lambda w, x: jax.checkpoint(lambda v: jnp.sin(v @ w))(x),
    "branching": lambda w, x: jax.lax.cond(x.sum() > 0, lambda v: v @ w, lambda v: -v @ w, x),
    "where": lambda w, x: jnp.where(x > 0, x, jnp.arange(F, dtype=x.dtype)[None]),
    "norms": lambda w, x: (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-3),
    "clipped": lambda w, x: jnp.clip(x @ w, -0.5, 0.5),
    "constant": lambda w, x: (jnp.ones(3), jnp.broadcast_to(w[0], (B, G))),
    "weakly typed": lambda w, x: jnp.where(x > 0, 1.0, 0.5) / 2.0 - x,
    "wrong way round": lambda w, x: jnp.ones((4, B)) @ x,
}


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_the_same(name):
    fun = FUNCTIONS[name]
    close(jax.jit(batch_minor(fun, 1))(W, X), jax.jit(fun)(W, X))

    def total(w, x):
        leaves = jax.tree.leaves(fun(w, x))
        return sum(jnp.sum(jnp.sin(leaf.astype(jnp.float32))) for leaf in leaves)

    gradient = jax.grad(total, argnums=(0, 1))
    close(jax.jit(batch_minor(gradient, 1))(W, X), jax.jit(gradient)(W, X))


@pytest.mark.ci
def test_under_vmap_over_members():
    weights = np.stack([W, 2 * W, -W])
    gradient = jax.grad(lambda w, x: FUNCTIONS["cross entropy"](w, x).sum())
    batch_last = jax.vmap(batch_minor(gradient, 1), (0, None))(weights, X)
    close(batch_last, jax.vmap(gradient, (0, None))(weights, X))


def test_images():
    def fun(k, x):
        y = jax.lax.conv_general_dilated(x, k, (1, 1), "SAME",
                                         dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip
        return jnp.tanh(y).mean((1, 2))

    close(batch_minor(fun, 1)(KERNEL, IMAGES), fun(KERNEL, IMAGES))
    gradient = jax.grad(lambda k, x: fun(k, x).sum())
    close(batch_minor(gradient, 1)(KERNEL, IMAGES), gradient(KERNEL, IMAGES))


def test_products_come_out_with_the_batch_last():
    """The point of it: every product of an MLP's gradient has the batch in the minor dim."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w["in"]) @ w["out"]) ** 2)

    weights = {"in": np.ones((F, 16), np.float32), "out": np.ones((16, 7), np.float32)}
    jaxpr = jax.make_jaxpr(batch_minor(jax.grad(loss), 1))(weights, X)
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    shapes = [e.outvars[0].aval.shape for e in products]
    forward_and_back = [shape for shape in shapes if B in shape]
    assert forward_and_back
    assert all(shape[-1] == B for shape in forward_and_back)


def test_a_custom_derivative_is_kept():
    """relu has slope 0 at 0, which its plain maximum has not."""
    gradient = jax.grad(lambda w, x: jax.nn.relu(x * w).sum())
    zero = np.zeros((B, F), np.float32)
    close(batch_minor(gradient, 1)(np.float32(1), zero), gradient(np.float32(1), zero))
