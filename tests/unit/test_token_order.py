"""Functions in order equal themselves as written, and what has no places stays in order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import plurax as px
from plurax.jaxpr.interpret import all_equations
from plurax.jaxpr.over_tokens import over_tokens
from plurax.jaxpr.token_order import RANGES, Order, OrderMark, marked

# Rows, tokens, width, devices.
B, T, D, N = 2, 24, 6, 3
ORDER = Order(N)

pytestmark = pytest.mark.usefixtures("x64")


def by_places(x):
    """Stand for attention: something that depends on the places of tokens, (B, T, ...)."""
    return x * jnp.cos(jnp.arange(T, dtype=x.dtype)).reshape(T, *(1,) * (x.ndim - 2))[None]


def by_order(x):
    """The same, of tokens that are in order."""
    places = ORDER.places(jnp.arange(T), T).astype(x.dtype)
    held = marked(x, OrderMark((1,), ORDER))
    result = held * jnp.cos(places).reshape(T, *(1,) * (x.ndim - 2))[None]
    return marked(result, OrderMark((1,), ORDER, computed=True))


# --- Functions of weights, vectors and numbers of tokens; `attend` is one of the above ------------


def entrywise(attend, w, x, tokens):
    h = jnp.tanh(attend(jnp.sin(x @ w["in"])) + x)
    return (h * x).sum(), h


def heads(attend, w, x, tokens):
    q = (x @ w["in"]).reshape(B, T, 2, D // 2)
    h = attend(q.swapaxes(2, 3)).swapaxes(2, 3)
    return h.reshape(B, T, D) @ w["out"]


def embedding(attend, w, x, tokens):
    h = attend(w["table"][tokens] + w["positions"][:T][None])
    logits = h @ w["table"].T
    log_p = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_p, (tokens[..., None] + 1) % 10, -1)[..., 0].mean(1)


def targets_ahead(attend, w, x, tokens):
    """What a language model predicts is the next token: a shift, before anything is in order."""
    ahead = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], 1)
    h = attend(w["table"][tokens])
    return (h * jax.nn.one_hot(ahead, D, dtype=h.dtype)).sum((1, 2))


def rotated(attend, w, x, tokens):
    angle = (
        jnp.arange(T, dtype=x.dtype)[None, :, None]
        * 2.0 ** -jnp.arange(D, dtype=x.dtype)[None, None]
    )
    return attend(x * jnp.cos(angle) + x[..., ::-1] * jnp.sin(angle)) @ w["out"]


def constant_table(attend, w, x, tokens):
    return attend(x + np.linspace(0, 1, T)[None, :, None])


def dropout(attend, w, x, tokens):
    kept = jax.random.bernoulli(jax.random.key(1), 0.6, x.shape)
    again = jax.random.normal(jax.random.key(2), (T, D))[None]
    return attend(jnp.where(kept, x, 0)) + again


def drawn_by_row(attend, w, x, tokens):
    keys = jax.random.split(jax.random.key(1), B)
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.6, (T, D)))(keys)
    return attend(jnp.where(kept, x, 0))


def drawn_by_token(attend, w, x, tokens):
    keys = jax.random.split(jax.random.key(1), T)
    noise = jax.vmap(lambda key: jax.random.normal(key, (D,)))(keys)
    return attend(x + noise[None])


def layers(attend, w, x, tokens):
    def layer(h, w):
        h = h + attend(jax.nn.gelu(h @ w)) + jnp.arange(T, dtype=h.dtype)[None, :, None] / T
        return h, h.sum(2)

    h, sums = lax.scan(layer, x, jnp.stack([w["in"], w["out"]]))
    return h, sums


def rematerialized(attend, w, x, tokens):
    return jax.checkpoint(lambda x: attend(jax.nn.relu(x @ w["in"])) + jnp.cumsum(x, 1))(x)


def own_derivative(attend, w, x, tokens):
    return jax.nn.logsumexp(attend(jax.nn.relu(x)), axis=2) + jax.nn.softplus(x).sum(2)


@jax.custom_jvp
def summed_so_far(x):
    return jnp.cumsum(x, 1)


summed_so_far.defjvp(lambda primals, tangents: (summed_so_far(*primals), jnp.cumsum(*tangents, 1)))


@jax.custom_vjp
def backwards(x):
    return x


backwards.defvjp(lambda x: (x, None), lambda _, ct: (ct[:, ::-1],))


def own_derivative_with_places(attend, w, x, tokens):
    return summed_so_far(attend(summed_so_far(x)))


def own_derivative_with_places_backward(attend, w, x, tokens):
    return attend(backwards(attend(x)))


def sums(attend, w, x, tokens):
    return jnp.cumsum(attend(jnp.cumsum(x, 1)), 1)


def sums_of_features(attend, w, x, tokens):
    return jnp.sort(jnp.cumsum(attend(x), 2)[..., ::-1], 2)


def shifted(attend, w, x, tokens):
    h = attend(jnp.roll(x, 1, 1))
    return jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def shifted_by_a_negative_padding(attend, w, x, tokens):
    return lax.pad(attend(x), jnp.zeros((), x.dtype), [(0, 0, 0), (2, -2, 0), (0, 0, 0)])


def convolved(attend, w, x, tokens):
    kernel = jnp.stack([w["in"], w["out"], w["in"]])
    return lax.conv_general_dilated(
        attend(x), kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


def sorted_tokens(attend, w, x, tokens):
    return attend(jnp.sort(attend(x), 1)) + jnp.argsort(x, 1).astype(x.dtype)


def one_token(attend, w, x, tokens):
    h = attend(x)
    return h[:, -1], h[:, 3:7], lax.dynamic_index_in_dim(h, 5, 1), h.argmax(1) / T, h.argmax(2) / T


def picked_tokens(attend, w, x, tokens):
    return attend(attend(x)[:, jnp.arange(T)[::-1]])


def first_features(attend, w, x, tokens):
    h = attend(jnp.concatenate([x, 2 * x], 2))
    return h[..., :3], jnp.pad(h, ((0, 0), (0, 0), (1, 1))), lax.top_k(h, 2)[0]


def merged(attend, w, x, tokens):
    return attend((x.reshape(B * T, D) @ w["in"]).reshape(B, T, D)).reshape(B * T, D)


def flattened(attend, w, x, tokens):
    h = jnp.sin(attend(x).reshape(B, T, 2, D // 2)).reshape(B, T * D)
    return (h * x.reshape(B, -1)).sum(1), h.reshape(B, T, D)


def chunks(attend, w, x, tokens):
    h = attend(x).reshape(B, 2, T // 2, D)
    return h * jnp.asarray([1.0, 2.0])[None, :, None, None], h.sum(2)


def barred(attend, w, x, tokens):
    h, x = lax.optimization_barrier((attend(x), x))
    return (px.sharding.name(h, "hidden") * x).sum(1)


def branches(attend, w, x, tokens):
    return lax.cond(tokens[0, 0] > 3, lambda h: jnp.cumsum(h, 1), lambda h: h, attend(x))


def repeated(attend, w, x, tokens):
    h = lax.stop_gradient(attend(x))
    return lax.while_loop(lambda h: abs(h[:, 0]).max() > 0.1, lambda h: h[:, ::-1] / 2, h)


def pairs(attend, w, x, tokens):
    h = attend(x)
    return jnp.einsum("btd,bsd->bts", h, jnp.cumsum(h, 1)), jnp.einsum("btd,bt->bd", h, x[..., 0])


def mixed(attend, w, x, tokens):
    return attend(jnp.einsum("ts,bsd->btd", w["mix"], x))


IN_ORDER = [entrywise, heads, embedding, targets_ahead, rotated, constant_table, dropout,
            drawn_by_row, layers, own_derivative, sums_of_features, first_features,
            flattened, barred]  # fmt: skip
"""Functions in which nothing asks for the places of what is in order."""

BY_PLACES = [drawn_by_token, rematerialized, own_derivative_with_places,
             own_derivative_with_places_backward, sums, shifted, shifted_by_a_negative_padding,
             convolved, sorted_tokens, one_token, picked_tokens, merged, chunks, branches, repeated,
             pairs, mixed]  # fmt: skip


def arguments():
    draw = np.random.default_rng(0)
    shapes = {"in": (D, D), "out": (D, D), "table": (10, D), "positions": (T + 3, D), "mix": (T, T)}
    weights = {name: jnp.asarray(draw.standard_normal(shape)) for name, shape in shapes.items()}
    return weights, jnp.asarray(draw.standard_normal((B, T, D))), draw.integers(0, 10, (B, T))


def scalar(fun, attend):
    """Return the sum of a function's results, and its results."""

    def summed(weights, x, tokens):
        out = fun(attend, weights, x, tokens)
        return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(out)), out

    return summed


def in_order(fun):
    return over_tokens(fun, jax.make_jaxpr(fun, return_shape=True), ORDER.devices)


@pytest.mark.parametrize("fun", [*IN_ORDER, *BY_PLACES], ids=lambda f: f.__name__)
def test_values_and_gradients_are_the_same(fun):
    args = arguments()
    of_inputs = {"argnums": (0, 1), "has_aux": True}
    written = jax.jit(jax.value_and_grad(scalar(fun, by_places), **of_inputs))(*args)
    ordered = in_order(scalar(fun, by_order))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-10, atol=1e-12),
        written,
        jax.jit(jax.value_and_grad(ordered, **of_inputs))(*args),
    )


def exchanges(fun):
    """Return the number of dims that are brought back to the order of their places."""
    jaxpr = jax.make_jaxpr(in_order(scalar(fun, by_order)))(*arguments()).jaxpr
    return sum(eqn.params.get("outer") == (N, RANGES) for eqn in all_equations(jaxpr))


@pytest.mark.parametrize("fun", IN_ORDER, ids=lambda f: f.__name__)
def test_only_results_are_brought_back(fun):
    results = jax.tree.leaves(jax.eval_shape(lambda *args: fun(by_places, *args), *arguments()))
    assert exchanges(fun) == sum(T in leaf.shape for leaf in results)


@pytest.mark.parametrize("fun", BY_PLACES, ids=lambda f: f.__name__)
def test_what_asks_for_places_gets_them(fun):
    assert exchanges(fun) > 0


@pytest.mark.ci
@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_what_an_order_cuts_and_replaces(devices, share, data):
    """Cut to ranges, an array in order is these ranges in order; `places` says which tokens."""
    order, size = Order(devices), devices * share * RANGES
    assert order.fits(size)
    first, last = sorted(data.draw(st.lists(st.integers(0, RANGES), min_size=2, max_size=2)))
    tokens = first * size // RANGES, last * size // RANGES
    x = jnp.arange(3 * size).reshape(size, 3)
    in_places = lambda array: array if devices == 1 else order.put(array, 0)  # noqa: E731
    (part,) = order.cut([in_places(x)], [0], tokens)
    if first < last:
        places = order.places(jnp.arange(tokens[1] - tokens[0]), size, tokens)
        np.testing.assert_array_equal(part, x[places])
        assert sorted(places.tolist()) == list(range(*tokens))
    (whole,) = order.with_parts([in_places(x)], [-part], [0], tokens)
    expected = x.at[slice(*tokens)].multiply(-1)
    np.testing.assert_array_equal(whole, in_places(expected))
    np.testing.assert_array_equal(in_places(x), x[order.places(jnp.arange(size), size)])
    if devices > 1:
        np.testing.assert_array_equal(order.undo(order.put(x, 0), 0), x)
