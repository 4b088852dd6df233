"""Operations along a dim that is split over devices: what is computed, and what is sent."""

import functools
import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import PartitionSpec as P
from tests.draws import draws
from tests.tiers import in_turns
from tests.unit.test_sharding import S, assert_same, mesh_of, shared

from plurax.partition.partitioner import Partitioner, partition
from plurax.partition.values import ShardedValue
from plurax.sharding.axes import Axes

pytestmark = pytest.mark.usefixtures("x64")

SEQUENCE = np.random.default_rng(3).normal(size=(24, 5))
BYTES = SEQUENCE.nbytes
COUNTS = [2, 3, 4, 5, 8]
"""Of devices; 5 do not divide 24, so that the last one has fewer."""
OTHERS = [2, 4, 5, 8]
"""Each operation has a quick case on three devices, and one on one of these."""


def on_devices(fun, count, *arrays, split=0):
    """The results of a function of arrays split along a dim, and what is sent."""
    arrays = [jnp.asarray(array) for array in arrays or (SEQUENCE,)]
    shardings = tuple(
        S(*("tensor" if dim == split else None for dim in range(array.ndim))) for array in arrays
    )
    got, records, ends = shared(fun, arrays, shardings, count=count)
    assert_same(got, jax.jit(fun)(*arrays))
    return records, ends


def gradient(fun):
    """The function's gradient, by its first argument."""
    return jax.grad(lambda *args: jnp.sin(fun(*args)).sum())


# --- Cumulative sums and the like -----------------------------------------------------------------

CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")


@pytest.mark.parametrize(
    ("name", "reverse", "count"),
    [*itertools.product(CUMULATIVE, [False, True], [3]),
     *in_turns(CUMULATIVE, [False, True], OTHERS, of=4)],
)  # fmt: skip
def test_the_last_value_of_each_device_is_gathered(name, reverse, count):
    fun = functools.partial(getattr(jax.lax, name), axis=0, reverse=reverse)
    records, ends = on_devices(fun, count)
    assert [(one.kind, one.bytes) for one in records] == [("all-gather", count * BYTES // 24)]
    assert ends == [S("tensor", None)]


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", CUMULATIVE[:4])
def test_a_cumulative_operation_keeps_its_dtype(name, dtype):
    """Exactly, of small integers; what is filled up is below or above all of them."""
    whole = np.random.default_rng(0).integers(1, 3, (10, 2)).astype(dtype)
    whole = -whole if np.dtype(dtype) == np.int32 else whole
    for reverse in (False, True):
        on_devices(functools.partial(getattr(jax.lax, name), axis=0, reverse=reverse), 4, whole)


def test_a_cumulative_sum_of_partial_sums_stays_one():
    def fun(x, y):
        return jax.lax.cumsum(x.T @ y, axis=0)

    records, ends = on_devices(fun, 4, SEQUENCE, SEQUENCE)
    assert [(one.kind, one.bytes) for one in records] == [("all-reduce", 5 * 5 * 8)]
    assert ends == [S(None, None)]


@pytest.mark.parametrize("count", COUNTS)
def test_the_gradient_of_a_cumulative_sum_is_one(count):
    records, _ = on_devices(gradient(functools.partial(jax.lax.cumsum, axis=0)), count)
    assert [one.kind for one in records] == ["all-gather"] * 2


# --- Shifts, and what is made of slices and pads --------------------------------------------------

COLUMN = BYTES // 24


def shifted(x):
    """As a token shift is written with a pad."""
    return jnp.pad(x[:-1], ((1, 0), (0, 0)))


def shifted_back(x):
    return jnp.pad(x[2:], ((0, 2), (0, 0)), constant_values=3)


def joined(x):
    """As it is written with a concatenation."""
    return jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])


def short_convolution(x):
    """A sum of shifted slices, as in Mamba."""
    padded = jnp.pad(x, ((3, 0), (0, 0)))
    return sum(padded[k : k + 24] * (k + 1) for k in range(4))


def recurrence(x):
    def step(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return jax.lax.associative_scan(step, (jax.nn.sigmoid(x), x))[1]


SHIFTS = {
    "shift": shifted,
    "back": shifted_back,
    "joined": joined,
    "by a pad": lambda x: jax.lax.pad(x, jnp.zeros((), x.dtype), [(1, -1, 0), (0, 0, 0)]),
    "every second": lambda x: x[1::2],
    "every third": lambda x: x[2:20:3],
    "in between": lambda x: jax.lax.pad(x, jnp.ones((), x.dtype), [(1, 2, 1), (0, 0, 0)]),
    "in between, less": lambda x: jax.lax.pad(x, jnp.ones((), x.dtype), [(-1, -2, 1), (0, 0, 0)]),
    "all but the first": lambda x: jnp.sin(x[1:]),
    "short convolution": short_convolution,
    "differences": lambda x: jnp.diff(x, axis=0),
    "roll": lambda x: jnp.roll(x, 1, axis=0),
    "roll back": lambda x: jnp.roll(x, -1, axis=0),
    "reversed": lambda x: jnp.flip(x, 0),
    "tail": lambda x: x[-2:],
    "recurrence": recurrence,
    "recurrence from the end": lambda x: jax.lax.associative_scan(jnp.add, x, reverse=True),
}


OF_SHIFTS = [*itertools.product(SHIFTS, [3]), *in_turns(SHIFTS, OTHERS, of=4)]


@pytest.mark.parametrize(("name", "count"), OF_SHIFTS)
def test_a_shift(name, count):
    on_devices(SHIFTS[name], count)


@pytest.mark.parametrize(("name", "count"), OF_SHIFTS)
def test_the_gradient_of_a_shift(name, count):
    on_devices(gradient(SHIFTS[name]), count)


@st.composite
def cuts_and_pads(draw):
    """A slice or a pad of a short sequence, with any numbers that are allowed."""
    size = draw(st.integers(1, 13))
    if draw(st.booleans()):
        start = draw(st.integers(0, size))
        end, step = draw(st.integers(start, size)), draw(st.integers(1, 3))
        return size, lambda x: x[start:end:step]
    between = draw(st.integers(0, 2))
    whole = size + (size - 1) * between
    low = draw(st.integers(-whole, 3))
    edges = [(low, draw(st.integers(-(whole + min(low, 0)), 3)), between), (0, 0, 0)]
    return size, lambda x: jax.lax.pad(x, jnp.full((), 7, x.dtype), edges)


@pytest.mark.ci
@given(cuts_and_pads(), st.integers(2, 5))
@draws(30, times=9)
def test_any_slice_and_any_pad(case, count):
    size, fun = case
    on_devices(fun, count, SEQUENCE[:size])


# --- Convolutions ---------------------------------------------------------------------------------

IMAGE = np.random.default_rng(4).normal(size=(2, 24, 6, 4))
KERNEL = np.random.default_rng(5).normal(size=(3, 3, 4, 4))
SPACED = [
    {"padding": "SAME"},
    {"padding": ((2, 0), (1, 1))},
    {"padding": "VALID"},
    {"padding": "SAME", "window_strides": (2, 1)},
    {"padding": ((1, 2), (0, 0)), "window_strides": (3, 2)},
    {"padding": ((2, 2), (2, 2)), "rhs_dilation": (2, 2)},
    {"padding": ((1, 3), (1, 1)), "lhs_dilation": (2, 1)},
    {"padding": ((-1, 0), (1, -1))},
    {"padding": "SAME", "feature_group_count": 4},
    {"padding": "SAME", "feature_group_count": 2, "window_strides": (2, 2)},
]


def convolved(padding, **fields):
    numbers = ("NHWC", "HWIO", "NHWC")
    strides = fields.pop("window_strides", (1, 1))

    def fun(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, strides, padding, dimension_numbers=numbers, **fields
        )

    return fun


@pytest.mark.parametrize(
    ("fields", "count"),
    [*itertools.product(SPACED, [3]), *in_turns(SPACED, OTHERS, of=4)],
    ids=str,
)
def test_a_convolution_over_a_split_dim(fields, count):
    fun, groups = convolved(**fields), fields.get("feature_group_count", 1)
    kernel = jnp.asarray(KERNEL[:, :, : 4 // groups])

    def both(x):
        out, back = jax.vjp(fun, x, kernel)
        return out, *back(jnp.cos(out))

    on_devices(both, count, IMAGE, split=1)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 4])
def test_what_a_causal_convolution_sends(count, groups):
    """Two columns of what is convolved, and of its cotangent; the kernel's gradient is a sum."""
    fun = convolved(padding=((2, 0), (1, 1)), feature_group_count=groups)
    kernel = jnp.asarray(KERNEL[:, :, : 4 // groups])

    def both(x):
        out, back = jax.vjp(fun, x, kernel)
        return out, *back(jnp.cos(out))

    records, ends = on_devices(both, count, IMAGE, split=1)
    columns = 2 * IMAGE.nbytes // 24
    *halos, total = [(one.kind, one.bytes) for one in records]
    assert halos == [("collective-permute", columns)] * 2
    assert total == ("all-reduce", kernel.nbytes)
    assert ends == [S(None, "tensor", None, None)] * 2 + [S(None, None, None, None)]


# --- What devices do not divide -------------------------------------------------------------------


def product_of_all_but_the_first(x, w):
    return jnp.log(x[1:] ** 2) @ w


@pytest.mark.parametrize("count", COUNTS)
def test_a_product_of_what_devices_do_not_divide(count):
    """What fills up the last device is the logarithm of zero, which no sum over places has."""
    weight = np.random.default_rng(6).normal(size=(5, 3))

    def both(x, w):
        out, back = jax.vjp(product_of_all_but_the_first, x, w)
        return out, *back(jnp.cos(out))

    args = tuple(map(jnp.asarray, (SEQUENCE, weight)))
    shardings = S("tensor", None), S(None, None)
    got, records, _ = shared(both, args, shardings, count=count)
    assert_same(got, jax.jit(both)(*args))
    assert {one.kind for one in records} <= {"collective-permute", "all-reduce"}


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_a_loss_of_all_but_the_last_place_picks_labels_where_they_are(count):
    labels = jnp.asarray(np.random.default_rng(7).integers(0, 5, 24), jnp.int32)

    def loss(x):
        picked = jnp.take_along_axis(jax.nn.log_softmax(x[:-1]), labels[1:, None], 1)
        return -picked.mean()

    records, _ = on_devices(jax.value_and_grad(loss), count)
    assert {one.kind for one in records} <= {"collective-permute", "all-reduce"}
    assert max(one.bytes for one in records) <= COLUMN


def test_places_of_neighbours_are_gathered_where_not_all_devices_run():
    """A permute needs all devices; in a branch that depends on rows edges are gathered."""
    axes = Axes({"tensor": 4}, permutes=False)

    def local(x):
        partitioner = Partitioner(axes)
        value = ShardedValue(x, SEQUENCE.shape, S("tensor", None))
        out = partition(short_convolution, partitioner, (value,))
        assert {one.kind for one in partitioner.records} == {"all-gather"}
        assert max(one.bytes for one in partitioner.records) < BYTES
        return out.array

    split = P("tensor")
    run = jax.shard_map(
        local, mesh=mesh_of({"tensor": 4}), in_specs=split, out_specs=split, check_vma=False
    )
    x = jnp.asarray(SEQUENCE)
    assert "ppermute" not in str(jax.make_jaxpr(run)(x))
    assert_same(jax.jit(run)(x), short_convolution(x))
