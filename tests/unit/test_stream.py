"""Attention in blocks of keys, against the same function as it is written."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.promotion import promotion

from plurax.errors import StreamWarning
from plurax.jaxpr import random_blocks
from plurax.jaxpr.equal_dims import shape_of
from plurax.jaxpr.interpret import all_equations
from plurax.jaxpr.stream import streamed

# Rows, queries, keys, heads, width: primes tell queries and keys apart in any shape.
B, T, S, N, H = 2, 11, 13, 4, 6
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}

pytestmark = pytest.mark.usefixtures("x64")


def scores(q, k):
    return jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5


def summed(weights, v):
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def attended(s, v):
    return summed(jax.nn.softmax(s), v)


def of_queries(x):
    """Bring `(B, N, T, ...)` to the order of the outputs."""
    return x.swapaxes(1, 2)


def distance():
    return jnp.arange(S)[None, None, None] - jnp.arange(T)[None, None, :, None]


def plain(p, q, k, v):
    return attended(scores(q, k), v)


def causal(p, q, k, v):
    return attended(jnp.where(distance() <= 2, scores(q, k), -1e30), v)


def causal_tril(p, q, k, v):
    return attended(
        jnp.where(jnp.tril(jnp.ones((T, S), bool))[None, None], scores(q, k), -jnp.inf), v
    )


def rows_without_keys(p, q, k, v):
    return attended(jnp.where(distance() < -3, scores(q, k), -1e30), v)


def window(p, q, k, v):
    return attended(jnp.where(jnp.abs(distance()) < 3, scores(q, k), -1e30), v)


def segments(p, q, k, v):
    same = p["of_queries"][:, None, :, None] == p["of_keys"][:, None, None, :]
    return attended(jnp.where(same, scores(q, k), -1e30), v)


def padding(p, q, k, v):
    return attended(jnp.where(p["of_keys"][:, None, None, :] > 0, scores(q, k), -1e30), v)


def bias(p, q, k, v):
    return attended(scores(q, k) + p["bias"][None], v)


def slopes(p, q, k, v):
    slope = 2.0 ** -jnp.arange(N, dtype=float)[None, :, None, None]
    return attended(scores(q, k) - jnp.abs(distance()).astype(float) * slope, v)


def soft_cap(p, q, k, v):
    return attended(5 * jnp.tanh(scores(q, k) / 5), v)


def kept(weights, p):
    draw = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (N, T, S)))
    return jnp.where(draw(p["keys"]), weights / 0.7, 0)


def dropout(p, q, k, v):
    return summed(kept(jax.nn.softmax(scores(q, k)), p), v)


def dropout_before_the_quotient(p, q, k, v):
    weights = jnp.exp(scores(q, k))
    return summed(kept(weights, p), v) / of_queries(weights.sum(-1, keepdims=True))


def softmax_with_where(p, q, k, v):
    return summed(jax.nn.softmax(scores(q, k), where=distance() <= 2), v)


def library(p, q, k, v):
    mask = distance() <= 2
    return jax.nn.dot_product_attention(q, k, v, bias=p["bias"][None], mask=mask)


def one_head_of_keys(p, q, k, v):
    s = jnp.einsum("btnh,bsh->bnts", q, k[:, :, 0])
    return jnp.einsum("bnts,bsh->btnh", jax.nn.softmax(s), v[:, :, 0])


def groups_of_heads(p, q, k, v):
    s = jnp.einsum("btmgh,bsmh->bmgts", q.reshape(B, T, 2, 2, H), k[:, :, :2])
    out = jnp.einsum("bmgts,bsmh->btmgh", jax.nn.softmax(s), v[:, :, :2])
    return out.reshape(q.shape)


def groups_of_heads_joined(p, q, k, v):
    """As Gemma's: heads are one dim for the bias and the mask, and groups for the products."""
    s = jnp.einsum("btmgh,bsmh->bmgts", q.reshape(B, T, 2, 2, H), k[:, :, :2])
    s = jnp.where(distance() <= 2, s.reshape(B, N, T, S) + p["bias"][None], -1e30)
    weights = jax.nn.softmax(s).reshape(B, 2, 2, T, S)
    return jnp.einsum("bmgts,bsmh->btmgh", weights, v[:, :, :2]).reshape(q.shape)


def heads_taken_apart(p, q, k, v):
    """Heads that are groups for the softmax alone, in other sizes, and rows and heads joined.

    XLA computes the scores twice here, and its derivative of their maximum, which finds no place
    in both, is NaN as written.
    """
    s = (scores(q, k) + p["bias"][None]).reshape(B * N, T, S)
    largest = jax.lax.stop_gradient(s.max(-1, keepdims=True))
    weights = jnp.exp(s - largest).reshape(B, 2, 2, T, S)
    weights = weights / weights.sum(-1, keepdims=True)
    return summed(weights.reshape(B, N, T, S), v)


def without_maximum(p, q, k, v):
    weights = jnp.exp(scores(q, k))
    return summed(weights / weights.sum(-1, keepdims=True), v)


def by_hand(p, q, k, v):
    s = scores(q, k)
    weights = jnp.exp(s - s.max(-1, keepdims=True))
    return summed(weights, v) / of_queries(weights.sum(-1, keepdims=True))


def by_a_reciprocal(p, q, k, v):
    s = scores(q, k)
    weights = jnp.exp(s - s.max(-1, keepdims=True))
    return summed(weights * (1 / weights.sum(-1, keepdims=True)), v)


def small_divisor(p, q, k, v):
    s = scores(q, k)
    weights = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    return summed(weights / (weights.sum(-1, keepdims=True) + 1e-3), v)


def one_more_in_the_divisor(p, q, k, v):
    s = scores(q, k)
    top = jax.lax.stop_gradient(s.max(-1, keepdims=True))
    weights = jnp.exp(s - top)
    return summed(weights / (weights.sum(-1, keepdims=True) + jnp.exp(-top)), v)


def log_sum_exp(p, q, k, v):
    s = scores(q, k)
    return summed(jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)), v)


def log_softmax(p, q, k, v):
    return summed(jnp.exp(jax.nn.log_softmax(scores(q, k))), v)


def a_result_beside(p, q, k, v):
    s = scores(q, k)
    weights = jax.nn.softmax(s)
    return summed(weights, v) + of_queries((weights * s).sum(-1, keepdims=True))


def sigmoid(p, q, k, v):
    return summed(jax.nn.sigmoid(scores(q, k)), v)


def linear(p, q, k, v):
    return summed(jnp.where(distance() <= 0, scores(q, k), 0), v)


def keys_first(p, q, k, v):
    s = jnp.einsum("bsnh,btnh->bnst", k, q)
    return jnp.einsum("bnst,bsnh->btnh", jax.nn.softmax(s, axis=-2), v)


def of_each_example(p, q, k, v):
    def one(q, k, v):
        return jax.nn.softmax(q @ k.T) @ v

    return jax.vmap(jax.vmap(one, in_axes=1, out_axes=1))(q, k, v)


def of_products_with_positions(p, q, k, v):
    return attended(scores(q, k) + jnp.einsum("btnh,tsh->bnts", q, p["positions"]), v)


def in_a_loop_over_layers(p, q, k, v):
    def layer(h, width):
        return plain(p, h * width, k, v), None

    return jax.lax.scan(layer, q, p["widths"])[0]


def recomputed(p, q, k, v):
    return jax.checkpoint(lambda q, k, v: plain(p, q, k, v))(q, k, v)


def one_after_another(p, q, k, v):
    return plain(p, plain(p, q, k, v), k, v)


def layers_with_one_mask(p, q, k, v):
    """Layers that are no loop: each traces the mask again, or reads the same one."""
    mask = distance() <= 2
    h = attended(jnp.where(mask, scores(q, k), -1e30), v)
    return causal_tril(
        p, attended(jnp.where(mask, scores(causal_tril(p, h, k, v), k), -1e30), v), k, v
    )


def mixed_heads(p, q, k, v):
    s = jnp.einsum("mn,bnts->bmts", p["mix"], scores(q, k))
    return attended(s, v)


VARIANTS = [
    plain, causal, causal_tril, rows_without_keys, window, segments, padding, bias, slopes,
    soft_cap, dropout, dropout_before_the_quotient, softmax_with_where, one_head_of_keys,
    groups_of_heads, groups_of_heads_joined, heads_taken_apart, without_maximum, by_hand,
    by_a_reciprocal, small_divisor,
    one_more_in_the_divisor, log_sum_exp, log_softmax, a_result_beside, sigmoid, linear,
    keys_first, of_each_example, of_products_with_positions, in_a_loop_over_layers, recomputed,
    one_after_another, layers_with_one_mask, mixed_heads,
]  # fmt: skip


def inputs():
    draw = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(draw.standard_normal(shape))

    parameters = {
        "bias": normal(N, T, S),
        "mix": normal(N, N),
        "widths": jnp.asarray([1.0, 0.5, 2.0]),
        "positions": normal(T, S, H),
        "of_queries": jnp.asarray(draw.integers(0, 3, (B, T))),
        "of_keys": jnp.asarray(draw.integers(0, 3, (B, S))),
        "keys": jax.random.split(jax.random.key(7), B),
    }
    return parameters, normal(B, T, N, H), normal(B, S, N, H), normal(B, S, N, H)


def value_and_grad(attention, args):
    """Return a sum of the outputs and its gradient in the parameters, queries, keys and values."""
    p, *activations = args
    whole = {name: p[name] for name in ("of_queries", "of_keys", "keys")}

    def loss(p, *activations):
        return jnp.sin(attention(p | whole, *activations)).sum()

    floating = {name: x for name, x in p.items() if name not in whole}
    fun = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))
    return fun, (floating, *activations)


def held(fun, args):
    """Return the shapes of all values of a function that have a dim of queries and one of keys.

    Those of parameters, and of their gradients, are not counted.
    """
    closed = jax.make_jaxpr(fun)(*args)
    large = [shape_of(var) for eqn in all_equations(closed.jaxpr) for var in eqn.outvars]
    parameters = {(N, T, S), (1, N, T, S), (T, S, H)}
    return [shape for shape in large if {T, S} <= set(shape) and shape not in parameters]


@functools.cache
def as_written(attention):
    fun, args = value_and_grad(attention, inputs())
    return jax.device_get(jax.jit(fun)(*args))


@pytest.mark.parametrize("attention", VARIANTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("block", [4, 5])
@pytest.mark.parametrize("skip", [False, True])
def test_values_and_gradients_are_the_same(attention, block, skip):
    fun, args = value_and_grad(streamed(attention, block, skip=skip), inputs())
    blocks = jax.jit(fun)(*args)
    whole = as_written(attention)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, **TOLERANCE), whole, blocks)


@pytest.mark.parametrize("attention", VARIANTS, ids=lambda f: f.__name__)
def test_no_array_of_queries_by_keys_is_computed(attention):
    fun, args = value_and_grad(attention, inputs())
    assert held(fun, args)
    fun, args = value_and_grad(streamed(attention, 4), inputs())
    assert not held(fun, args)


@pytest.mark.ci
def test_attention_of_a_library():
    """`jax.nn.dot_product_attention` computes its softmax in float32."""
    p, *activations = inputs()
    args = ({"bias": p["bias"].astype("float32")}, *(x.astype("float32") for x in activations))

    def loss(attention):
        return jax.value_and_grad(lambda *a: jnp.sin(attention(*a)).sum(), argnums=(0, 1, 2, 3))

    whole, blocks = (jax.jit(loss(fun))(*args) for fun in (library, streamed(library, 4)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5), whole, blocks)
    assert held(loss(library), args)
    assert not held(loss(streamed(library, 4)), args)


def linen_layer():
    nn = pytest.importorskip("flax.linen")
    layer = nn.MultiHeadDotProductAttention(4, dtype=float, param_dtype=float)
    mask = nn.make_causal_mask(jnp.ones((B, S)))
    x = inputs()[2].reshape(B, S, -1)[..., :16]
    return layer.init(jax.random.key(1), x, x), lambda p, x: layer.apply(p, x, x, mask=mask), x


def equinox_layer():
    eqx = pytest.importorskip("equinox")
    layer = eqx.nn.MultiheadAttention(4, 16, key=jax.random.key(1), dtype=float)
    params, rest = eqx.partition(layer, eqx.is_inexact_array)
    seen = jnp.tril(jnp.ones((S, S), bool))

    def apply(p, x):
        return jax.vmap(lambda x: eqx.combine(p, rest)(x, x, x, mask=seen))(x)

    return params, apply, inputs()[2].reshape(B, S, -1)[..., :16]


def haiku_layer():
    hk = pytest.importorskip("haiku")

    def apply(x):
        layer = hk.MultiHeadAttention(4, 4, w_init=hk.initializers.RandomNormal(), model_size=16)
        return layer(x, x, x, mask=jnp.tril(jnp.ones((1, 1, S, S), bool)))

    layer, x = hk.transform(apply), inputs()[2].reshape(B, S, -1)[..., :16]
    return layer.init(jax.random.key(1), x), lambda p, x: layer.apply(p, None, x), x


@pytest.mark.ci
@pytest.mark.parametrize("make", [linen_layer, equinox_layer, haiku_layer])
def test_layers_of_libraries(make):
    params, apply, x = make()

    def of(fun):
        return jax.grad(lambda p, x: jnp.sin(fun(p, x)).sum(), argnums=(0, 1))

    with promotion():
        whole, blocks = (jax.jit(of(fun))(params, x) for fun in (apply, streamed(apply, 4)))
        closed = jax.make_jaxpr(of(streamed(apply, 4)))(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, **TOLERANCE), whole, blocks)
    shapes = [shape_of(v) for eqn in all_equations(closed.jaxpr) for v in eqn.outvars]
    assert not [shape for shape in shapes if shape.count(S) > 1]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("count", [None, 3])
def test_bits_of_a_block_are_those_of_the_whole(dtype, count):
    def draw(key):
        return jax.random.bits(key, (3, 5, 7), dtype)

    key = jax.random.key(3)
    keys, fun = (key, draw) if count is None else (jax.random.split(key, count), jax.vmap(draw))
    jaxpr = jax.make_jaxpr(fun)(keys).jaxpr
    (eqn,) = [one for one in all_equations(jaxpr) if one.primitive.name == "random_bits"]
    assert random_blocks.draws_apart(eqn)
    whole = np.asarray(fun(keys))
    for dim in range(keys.ndim, whole.ndim):
        for other in range(keys.ndim, whole.ndim):
            sizes = [2 if d in (dim, other) else n for d, n in enumerate(whole.shape)]
            block = random_blocks.bits_of_block(
                eqn, keys, sizes, lambda index, d, cut=(dim, other): index + jnp.uint32(d in cut)
            )
            expected = whole.take([1, 2], dim)
            expected = expected if dim == other else expected.take([1, 2], other)
            np.testing.assert_array_equal(block, expected)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1))
def test_indices_beyond_32_bits_are_exact(place, stride):
    """Of 131,072 queries by as many keys the last index has 34 bits."""
    high, low = random_blocks._product(jnp.asarray([place], jnp.uint32), stride)
    assert int(high[0]) << 32 | int(low[0]) == place * stride % 2**64


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_sums_of_indices_carry(a, b):
    halves = [(jnp.uint32(n >> 32), jnp.uint32(n & 0xFFFFFFFF)) for n in (a, b)]
    high, low = random_blocks._sum(*halves)
    assert int(high) << 32 | int(low) == (a + b) % 2**64


@pytest.mark.parametrize("mask", [-jnp.inf, -1e30])
def test_rows_without_any_key_are_as_written(mask):
    def attention(p, q, k, v):
        return attended(jnp.where(distance() < -3, scores(q, k), mask), v)

    args = inputs()
    np.testing.assert_allclose(
        streamed(attention, 4)(*args), attention(*args), equal_nan=True, **TOLERANCE
    )


def test_sums_are_wide():
    """In bfloat16 blocks are added up in float32, so that more blocks are not less exact."""
    args = [jnp.asarray(x, jnp.bfloat16) for x in inputs()[1:]]
    exact = plain(None, *[jnp.asarray(x, jnp.float64) for x in args])
    whole, blocks = plain(None, *args), streamed(plain, 1)(None, *args)
    assert blocks.dtype == jnp.bfloat16
    errors = [jnp.abs(out.astype(float) - exact).max() for out in (whole, blocks)]
    assert errors[1] <= 1.5 * errors[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_window_in_a_narrow_dtype(dtype):
    """The first block is seen by some of the queries, and maxima keep the dtype of scores."""
    args = [jnp.asarray(x, dtype) for x in inputs()[1:]]
    whole, blocks = window(None, *args), streamed(window, 4, skip=True)(None, *args)
    tolerance = 2 * float(jnp.finfo(dtype).eps)
    assert jnp.abs(whole - blocks).max() <= tolerance * jnp.abs(whole).max()


# --- What cannot be streamed ----------------------------------------------------------------------


def squared_weights(p, q, k, v):
    return summed(jax.nn.softmax(scores(q, k)) ** 2, v)


def only_large_weights(p, q, k, v):
    weights = jax.nn.softmax(scores(q, k))
    return summed(jnp.where(weights > 0.1, weights, 0), v)


def less_than_a_share(p, q, k, v):
    return summed(jax.nn.softmax(scores(q, k)) - 0.1, v)


def heads_mixed_behind(p, q, k, v):
    return summed(jnp.einsum("mn,bnts->bmts", p["mix"], jax.nn.softmax(scores(q, k))), v)


def weights_returned(p, q, k, v):
    return jax.nn.softmax(scores(q, k))


def the_maximum_used(p, q, k, v):
    s = scores(q, k)
    return attended(s, v) + of_queries(s.max(-1, keepdims=True))


def shifted_keys(p, q, k, v):
    s = scores(q, k)
    return attended(jnp.concatenate([s[..., 1:], s[..., :1]], -1), v)


def a_sink_beside_keys(p, q, k, v):
    sink = jnp.broadcast_to(p["bias"][None, :, :, :1], (B, N, T, 1))
    weights = jax.nn.softmax(jnp.concatenate([scores(q, k), sink], -1))
    return summed(weights[..., :-1], v)


def sorted_keys(p, q, k, v):
    return attended(jnp.sort(scores(q, k)), v)


def one_maximum_of_all_heads(p, q, k, v):
    s = scores(q, k)
    weights = jnp.exp(s - jax.lax.stop_gradient(s.max((1, 3), keepdims=True)))
    return summed(weights / weights.sum(-1, keepdims=True), v)


def queries_mixed_with_keys(p, q, k, v):
    s = jnp.einsum("btnh,bsnh->bnts", k, k)
    return attended(s + s.swapaxes(2, 3), v)


@jax.custom_jvp
def own_softmax(s):
    weights = jnp.exp(s)
    return weights / weights.sum(-1, keepdims=True)


own_softmax.defjvp(lambda primals, tangents: (own_softmax(*primals), 0 * tangents[0]))


def a_derivative_of_its_own(p, q, k, v):
    return summed(own_softmax(scores(q, k)), v)


REFUSED = {
    a_derivative_of_its_own: "custom_jvp_call at .* there is no rule for it",
    one_maximum_of_all_heads: "sub at .* its maximum is that of several softmaxes",
    queries_mixed_with_keys: "add at .* it mixes keys with queries",
    squared_weights: "integer_pow at .* what it computes is no softmax of its operands",
    only_large_weights: "gt at .* what it computes is no softmax of its operands",
    less_than_a_share: "sub at .* weights of two softmaxes are multiplied with the values first",
    heads_mixed_behind: "dot_general at .* it sums weights of several softmaxes",
    weights_returned: "nothing reduces the dim of what it computes",
    the_maximum_used: "the maximum is in a result",
    a_sink_beside_keys: "concatenate at .* An attention sink is one more term of the divisor",
    shifted_keys: "slice at .* there is no rule for it",
    sorted_keys: "sort at .* there is no rule for it",
}


@pytest.mark.parametrize("attention", REFUSED, ids=lambda f: f.__name__)
def test_what_is_not_recognised_is_computed_whole_and_said(attention):
    args = inputs()
    with pytest.warns(StreamWarning, match=REFUSED[attention]) as said:
        out = streamed(attention, 4)(*args)
    assert len(said) == 1
    assert "test_stream.py" in str(said[0].message)
    np.testing.assert_array_equal(out, attention(*args))


def test_what_is_said_is_of_the_keys():
    """`jnp.einsum` may write keys first; queries are followed too, and further, as to a result."""

    def keys_first(p, q, k, v):
        s = jnp.einsum("bsnh,btnh->bnst", k, q).swapaxes(2, 3)
        return summed(jax.nn.softmax(s) ** 2, v)

    with pytest.warns(StreamWarning, match="integer_pow at .* what it computes is no softmax"):
        streamed(keys_first, 4)(*inputs())


def test_attention_behind_what_is_computed_whole_is_streamed():
    """What was refused is in its queries, as in those of the next layer."""

    def layers(p, q, k, v):
        return plain(p, q + the_maximum_used(p, q, k, v), k, v)

    args = inputs()
    with pytest.warns(StreamWarning) as said:
        closed = jax.make_jaxpr(streamed(layers, 4))(*args)
    assert len(said) == 1
    assert (B, N, T, 4) in {shape_of(v) for e in all_equations(closed.jaxpr) for v in e.outvars}


def test_attention_behind_queries_that_are_parameters_is_streamed():
    """As Perceiver's: the product of parameters and keys is none that is looked at, that of its
    weights and the values is refused, and all that is computed from it has the size of its result.
    """

    def latents(p, q, k, v):
        s = jnp.einsum("tnh,bsnh->bnts", p["positions"][:, :N, :], k)
        x = of_queries(jnp.einsum("bnts,bsnh->bnth", jax.nn.softmax(s), v)) * 2
        return plain(p, x, x, x)

    closed = jax.make_jaxpr(streamed(latents, 6))(*inputs())
    shapes = {shape_of(v) for e in all_equations(closed.jaxpr) for v in e.outvars}
    assert (B, N, T, 6) in shapes
    assert (B, N, T, T) not in shapes


def test_a_maximum_whose_gradient_is_stopped_may_be_used():
    def attention(p, q, k, v):
        s = scores(q, k)
        top = jax.lax.stop_gradient(s.max(-1, keepdims=True))
        return attended(s, v) + of_queries(top)

    fun, args = value_and_grad(attention, inputs())
    whole = jax.jit(fun)(*args)
    fun, _ = value_and_grad(streamed(attention, 4), inputs())
    blocks = jax.jit(fun)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, **TOLERANCE), whole, blocks)
    assert not held(fun, args)


def test_products_with_parameters_are_left_as_they_are():
    def layers(params, x):
        return jnp.tanh(x @ params["w"]) @ params["v"]

    args = ({"w": jnp.ones((H, 32)), "v": jnp.ones((32, H))}, jnp.ones((B, T, H)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert str(jax.make_jaxpr(streamed(layers, 4))(*args)) == str(jax.make_jaxpr(layers)(*args))


def test_fewer_keys_than_a_block_are_left_as_they_are():
    args = inputs()
    count = sum(eqn.primitive.name == "custom_vjp_call" for eqn in all_equations(
        jax.make_jaxpr(streamed(plain, S))(*args).jaxpr))  # fmt: skip
    assert count == 0
    assert streamed(plain, None) is plain


def test_nothing_is_said_of_fewer_keys_than_a_block():
    """As in attention of an image to a text: no array grows with tokens by tokens."""

    def flat(p, q, k, v):
        return plain(p, k, q, q).reshape(B, -1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        streamed(flat, S - 1)(*inputs())


@pytest.mark.ci
def test_shapes_have_the_keys_of_a_block():
    closed = jax.make_jaxpr(streamed(plain, 4))(*inputs())
    blocks = {
        shape_of(v) for e in all_equations(closed.jaxpr) for v in e.outvars if T in shape_of(v)
    }
    assert (B, N, T, 4) in blocks
    assert (B, N, T, 1) in blocks
