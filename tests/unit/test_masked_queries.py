"""Queries that a mask hides keys from are left out, and only they."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.draws import draws

from plurax.jaxpr.context import Context
from plurax.jaxpr.interpret import all_equations, flat_equations
from plurax.jaxpr.intervals import Intervals
from plurax.jaxpr.stream import streamed

# Rows, queries and keys, heads, width.
B, T, N, H = 2, 32, 4, 5
BLOCK = 4
LEAST = float(np.finfo("float64").min)
LOW = jnp.asarray(-1e30)

pytestmark = pytest.mark.usefixtures("x64")


def scores(q, k):
    return jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5


def summed(weights, v):
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def places(q, k):
    return jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]


def before(q, k):
    t, s = places(q, k)
    return s <= t


def near(q, k):
    t, s = places(q, k)
    return abs(t - s) < 4


def near_before(q, k):
    return before(q, k) & near(q, k)


def aligned_at_the_end(q, k):
    t, s = places(q, k)
    return s - k.shape[1] <= t - q.shape[1]


def in_chunks(q, k):
    t, s = places(q, k)
    return t // 8 == s // 8


def lower_triangle(q, k):
    return jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))


def masked(mask, fill):
    def attention(p, q, k, v):
        return summed(jax.nn.softmax(jnp.where(mask(q, k), scores(q, k), fill)), v)

    return attention


def added(fill):
    def attention(p, q, k, v):
        mask = jnp.where(before(q, k), 0.0, fill)[None, None]
        return summed(jax.nn.softmax(scores(q, k) + mask), v)

    return attention


def then_bias(p, q, k, v):
    s = jnp.where(before(q, k), scores(q, k), -jnp.inf)
    return summed(jax.nn.softmax(s + p["bias"][None, :, : s.shape[2], : s.shape[3]]), v)


def bounded(p, q, k, v):
    """-1e4 is below scores that are within ±5."""
    s = jnp.where(before(q, k), 5 * jnp.tanh(scores(q, k) / 5), -1e4)
    return summed(jax.nn.softmax(s), v)


def of_weights(p, q, k, v):
    return summed(jax.nn.softmax(scores(q, k), where=before(q, k)), v)


def same_segment(p):
    return p["segments"][:, None, :, None] == p["segments"][:, None, None, :]


def and_segments(p, q, k, v):
    mask = before(q, k)[None, None] & same_segment(p)
    return summed(jax.nn.softmax(jnp.where(mask, scores(q, k), -jnp.inf)), v)


def sigmoid(p, q, k, v):
    return summed(jax.nn.sigmoid(jnp.where(before(q, k), scores(q, k), -jnp.inf)), v)


def linear(p, q, k, v):
    return summed(jnp.where(before(q, k), scores(q, k), 0.0), v)


def log_sum_exp(p, q, k, v):
    s = jnp.where(before(q, k), scores(q, k), -1e30)
    return summed(jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)), v)


def dropout(p, q, k, v):
    weights = jax.nn.softmax(jnp.where(before(q, k), scores(q, k), -jnp.inf))
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, weights.shape[1:]))(p["keys"])
    return summed(jnp.where(keep, weights / 0.7, 0), v)


def groups_of_heads(p, q, k, v):
    s = jnp.einsum("btmgh,bsmh->bmgts", q.reshape(*q.shape[:2], 2, 2, H), k[:, :, :2])
    weights = jax.nn.softmax(jnp.where(before(q, k), s, -1e30))
    return jnp.einsum("bmgts,bsmh->btmgh", weights, v[:, :, :2]).reshape(q.shape)


def keys_first(p, q, k, v):
    s = jnp.where(before(q, k).T, jnp.einsum("bsnh,btnh->bnst", k, q), -jnp.inf)
    return jnp.einsum("bnst,bsnh->btnh", jax.nn.softmax(s, axis=-2), v)


def in_layers(p, q, k, v):
    def layer(h, width):
        return jax.checkpoint(masked(before, -1e30))(p, h * width, k, v), None

    return jax.lax.scan(layer, q, jnp.asarray([1.0, 0.5]))[0]


def of_all_rows(p, q, k, v):
    """Rows with no key at all: NaN with -inf, as written."""
    t, s = places(q, k)
    return summed(jnp.exp(jnp.where(s < t - 8, scores(q, k), -jnp.inf)), v)


# Of each group the queries that see one of its keys, rounded out to `BLOCK`.
HALF = (32 + 24 + 16 + 8) / (4 * T)
WINDOW = (12 + 16 + 16 + 12) / (4 * T)

SKIPPED = {
    "causal": (masked(before, -jnp.inf), HALF),
    "causal, -1e30": (masked(before, -1e30), HALF),
    "causal, least": (masked(before, LEAST), HALF),
    "tril": (masked(lower_triangle, -1e30), HALF),
    "window": (masked(near, -jnp.inf), WINDOW),
    "window, -1e30": (masked(near, -1e30), WINDOW),
    "causal window": (masked(near_before, -1e30), (7 * 8 + 4) / (8 * T)),
    "chunks": (masked(in_chunks, -1e30), 8 / T),
    "a number of the module": (masked(before, np.float64(-1e30)), HALF),
    "an array of the module": (masked(before, LOW), HALF),
    "added": (added(-jnp.inf), HALF),
    "added, -1e30": (added(-1e30), HALF),
    "then bias": (then_bias, HALF),
    "bounded": (bounded, HALF),
    "of weights": (of_weights, HALF),
    "and segments": (and_segments, HALF),
    "sigmoid": (sigmoid, HALF),
    "linear": (linear, HALF),
    "log-sum-exp": (log_sum_exp, HALF),
    "dropout": (dropout, HALF),
    "groups of heads": (groups_of_heads, HALF),
    "keys first": (keys_first, HALF),
    "in layers": (in_layers, HALF),
    "rows without keys": (of_all_rows, (24 + 16 + 8 + 0) / (4 * T)),
}  # fmt: skip


def inputs(queries=T, keys=T):
    draw = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(draw.standard_normal(shape))

    parameters = {
        "bias": normal(N, queries, keys),
        "segments": jnp.asarray(draw.integers(0, 3, (B, keys))),
        "keys": jax.random.split(jax.random.key(7), B),
    }
    return parameters, normal(B, queries, N, H), normal(B, keys, N, H), normal(B, keys, N, H)


def value_and_grad(attention, args):
    whole = {name: x for name, x in args[0].items() if name != "bias"}

    def loss(bias, *activations):
        return jnp.sin(attention({"bias": bias, **whole}, *activations)).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3)), (args[0]["bias"], *args[1:])


def flops(jaxpr, times=1):
    """Multiplications of the products with keys in a jaxpr, loops as often as they run."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (sums, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            size = math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[d] for d in sums)
            total += times * size
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for value in jax.tree.leaves(list(eqn.params.values())):
            value = getattr(value, "jaxpr", value)
            total += flops(value, inner) if hasattr(value, "eqns") else 0
    return total


def cost(attention, args, **options):
    """Return what the products of the streamed function cost, and those of its gradients."""
    fun, args = value_and_grad(streamed(attention, BLOCK, **options), args)
    return flops(jax.make_jaxpr(fun)(*args).jaxpr)


def computed(attention, args):
    """Return values and gradients where keys are left out."""
    fun, args = value_and_grad(streamed(attention, BLOCK, skip=True), args)
    return jax.jit(fun)(*args)


@pytest.mark.parametrize("name", SKIPPED)
def test_values_and_gradients_are_the_same(name):
    attention, share = SKIPPED[name]
    fun, args = value_and_grad(attention, inputs())
    written = jax.jit(fun)(*args)
    out = computed(attention, inputs())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-10, atol=1e-12), written, out
    )
    every, some = cost(attention, inputs()), cost(attention, inputs(), skip=True)
    assert some / every == share


@pytest.mark.parametrize(
    ("strategy", "ordered", "share"),
    [
        ("heads", False, HALF),
        *((s, ordered, HALF if ordered else 1)
          for s in ("ring", "gather") for ordered in (False, True)),
    ],
)  # fmt: skip
def test_keys_are_left_out_where_a_device_has_tokens_of_all_ranges(strategy, ordered, share):
    attention, context = masked(before, -1e30), Context(2, strategy, ordered=ordered)
    every = cost(attention, inputs())
    some = cost(attention, inputs(), skip=True, context=context)
    assert some / every == share


@pytest.mark.parametrize("mask", [before, near_before, aligned_at_the_end, near])
@pytest.mark.parametrize(("queries", "keys"), [(32, 22), (19, 32), (30, 31)])
@pytest.mark.parametrize("fill", [-1e30, -jnp.inf])
def test_other_numbers_of_queries_than_of_keys(mask, queries, keys, fill):
    args = inputs(queries, keys)

    def attention(p, q, k, v):
        weights = jnp.exp(jnp.where(mask(q, k), scores(q, k), fill))
        return summed(weights, v) / (weights.sum(-1, keepdims=True) + 1).swapaxes(1, 2)

    fun, own = value_and_grad(attention, args)
    written, out = jax.jit(fun)(*own), computed(attention, args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-10), written, out)
    assert cost(attention, args, skip=True) < 0.9 * cost(attention, args)


# --- What cannot be proven ------------------------------------------------------------------------


def not_masked(p, q, k, v):
    return summed(jax.nn.softmax(scores(q, k)), v)


def segments(p, q, k, v):
    return summed(jax.nn.softmax(jnp.where(same_segment(p), scores(q, k), -jnp.inf)), v)


def padded_segments(p, q, k, v):
    """Rows all of whose keys are masked would be a mean of all keys."""
    mask = before(q, k)[None, None] & same_segment(p)
    return summed(jax.nn.softmax(jnp.where(mask, scores(q, k), -1e30)), v)


def padding_before_the_mask(p, q, k, v):
    s = jnp.where(p["segments"][:, None, None, :] > 0, scores(q, k), -1e30)
    return summed(jax.nn.softmax(jnp.where(before(q, k), s, -1e30)), v)


def bias_before_the_mask(p, q, k, v):
    """The bias may be a mask itself."""
    return summed(jax.nn.softmax(jnp.where(before(q, k), scores(q, k) + p["bias"][None], -1e30)), v)


def rows_without_keys(p, q, k, v):
    t, s = places(q, k)
    return summed(jax.nn.softmax(jnp.where(s < t - 8, scores(q, k), -1e30)), v)


def larger_outside(p, q, k, v):
    """What is masked is in a maximum beside."""
    s = scores(q, k)
    top = jax.lax.stop_gradient(s.max(-1, keepdims=True))
    weights = jnp.exp(jnp.where(before(q, k), s, -jnp.inf) - top)
    return summed(weights, v) / weights.sum(-1, keepdims=True).swapaxes(1, 2)


KEPT = {
    "not masked": not_masked,
    "segments": segments,
    "segments, -1e30": padded_segments,
    "padding before the mask": padding_before_the_mask,
    "bias before the mask": bias_before_the_mask,
    "rows without keys": rows_without_keys,
    "larger outside": larger_outside,
    "-1e9": masked(before, -1e9),
    "-1e4": masked(before, -1e4),
    "all but the last key": masked(lambda q, k: places(q, k)[1] < T - 1, -jnp.inf),
}  # fmt: skip


def text_of(fun, args):
    """The traced program, without the addresses of functions."""
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(fun)(*args)))


@pytest.mark.parametrize("name", KEPT)
def test_what_is_not_proven_is_computed_as_before(name):
    fun, args = value_and_grad(streamed(KEPT[name], BLOCK), inputs())
    other, _ = value_and_grad(streamed(KEPT[name], BLOCK, skip=True), inputs())
    assert text_of(other, args) == text_of(fun, args)


def test_a_mask_of_sixteen_bits_has_no_number_that_is_low_enough():
    args = [x.astype("float16") for x in inputs()[1:]]
    for fill, same in ((-6e4, True), (-jnp.inf, False)):
        one, other = (
            text_of(streamed(masked(before, fill), BLOCK, skip=skip), (None, *args))
            for skip in (False, True)
        )
        assert (one == other) == same


# --- Intervals ------------------------------------------------------------------------------------


def bounds_of(mask, queries, keys, ranges):
    """The bounds of a function of the places of queries and keys on boxes."""
    closed = jax.make_jaxpr(lambda: mask(jnp.arange(queries)[:, None], jnp.arange(keys)[None]))()
    flat = flat_equations(closed.jaxpr.eqns, closed.jaxpr.outvars)
    producer = {var: eqn for eqn in flat.eqns for var in eqn.outvars}
    (out,) = flat.results
    return Intervals(producer, {}, {}, ranges, {}).of(out, ("queries", "keys"))


numbers = st.integers(-5, 5)


def combined(parts):
    """Expressions of places from smaller ones."""
    two = st.tuples(parts, parts)
    return st.one_of(
        two.map(lambda x: lambda t, s: x[0](t, s) + x[1](t, s)),
        two.map(lambda x: lambda t, s: x[0](t, s) - x[1](t, s)),
        two.map(lambda x: lambda t, s: jnp.maximum(x[0](t, s), x[1](t, s))),
        two.map(lambda x: lambda t, s: jnp.where(x[0](t, s) < x[1](t, s), x[0](t, s), 3 * s)),
        st.tuples(parts, numbers).map(lambda x: lambda t, s: x[0](t, s) * x[1]),
        st.tuples(parts, st.integers(1, 4)).map(lambda x: lambda t, s: x[0](t, s) // x[1]),
        st.tuples(parts, st.integers(1, 4)).map(lambda x: lambda t, s: x[0](t, s) % x[1]),
        parts.map(lambda x: lambda t, s: abs(x(t, s))),
        parts.map(lambda x: lambda t, s: (x(t, s).astype("float32") * 0.3 - 1).astype(int)),
    )


terms = st.recursive(
    st.one_of(
        st.just(lambda t, s: t + 0 * s),
        st.just(lambda t, s: s + 0 * t),
        numbers.map(lambda n: lambda t, s: n + 0 * s + 0 * t),
    ),
    combined,
    max_leaves=4,
)


def compared(pair):
    return st.sampled_from([
        lambda t, s: pair[0](t, s) <= pair[1](t, s),
        lambda t, s: pair[0](t, s) < pair[1](t, s),
        lambda t, s: pair[0](t, s) > pair[1](t, s),
        lambda t, s: pair[0](t, s) >= pair[1](t, s),
        lambda t, s: pair[0](t, s) == pair[1](t, s),
        lambda t, s: pair[0](t, s) != pair[1](t, s),
        lambda t, s: (pair[0](t, s) - pair[1](t, s)).astype(bool),
    ])  # fmt: skip


comparisons = st.tuples(terms, terms).flatmap(compared)
masks = st.recursive(
    comparisons,
    lambda parts: st.one_of(
        st.tuples(parts, parts).map(lambda x: lambda t, s: x[0](t, s) & x[1](t, s)),
        st.tuples(parts, parts).map(lambda x: lambda t, s: x[0](t, s) | x[1](t, s)),
        parts.map(lambda x: lambda t, s: ~x(t, s)),
    ),
    max_leaves=3,
)
ranges_of = st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted)


@draws(60)
@given(st.one_of(masks, terms), ranges_of, ranges_of)
def test_bounds_hold_every_entry(mask, rows, keys):
    ranges = {name: tuple(np.asarray([x], float) for x in pair)
              for name, pair in (("queries", rows), ("keys", keys))}  # fmt: skip
    lo, hi = bounds_of(mask, 9, 9, ranges)
    exact = np.asarray(mask(jnp.arange(9)[:, None], jnp.arange(9)[None])).astype(float)
    entries = exact[rows[0] : rows[1] + 1, keys[0] : keys[1] + 1]
    assert np.all(lo <= entries.min())
    assert np.all(entries.max() <= hi)


@pytest.mark.parametrize("mask", [
    lambda t, s: s <= t, lambda t, s: abs(t - s) < 3, lambda t, s: (s <= t) & (t - s < 4),
    lambda t, s: t.astype("float32") - 0.5 > s.astype("float32"), lambda t, s: ~(s + 2 > t),
    lambda t, s: jnp.where(s < t, t, s) == t,
])  # fmt: skip
def test_bounds_of_one_entry_are_that_entry(mask):
    rows, keys = (x.ravel().astype(float) for x in np.indices((7, 9)))
    lo, hi = bounds_of(mask, 7, 9, {"queries": (rows, rows), "keys": (keys, keys)})
    exact = np.asarray(mask(jnp.arange(7)[:, None], jnp.arange(9)[None])).ravel()
    np.testing.assert_array_equal(lo, exact)
    np.testing.assert_array_equal(hi, exact)


@pytest.mark.ci
def test_large_sequences_cost_no_array_of_queries_by_keys():
    """A mask of 131,072 queries by as many keys, of which an array would be 17 GB."""
    shape = jax.ShapeDtypeStruct((1, 131072, 1, 8), jnp.float32)
    fun = streamed(masked(before, -1e30), 512, skip=True)
    closed = jax.make_jaxpr(fun)(None, shape, shape, shape)
    scans = [eqn for eqn in all_equations(closed.jaxpr) if eqn.primitive.name == "scan"]
    assert [eqn.params["length"] for eqn in scans] == [64] * 4
