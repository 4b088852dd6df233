"""Shardings, moving between them, and a function divided among devices."""

import functools
import itertools
from inspect import signature

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.experimental.compute_on import compute_on
from jax.experimental.sparse import BCOO
from jax.extend.random import threefry2x32_p
from jax.scipy.sparse.linalg import cg
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from tests import models, planning
from tests.draws import draws
from tests.promotion import row

import plurax as px
from plurax.hlo.compiled_collectives import collectives
from plurax.jaxpr.batch_minor import batch_minor
from plurax.jaxpr.compat import inner_jaxprs
from plurax.jaxpr.remat import rematerialized
from plurax.partition.partitioner import Partitioner, partition
from plurax.partition.values import ShardedValue, is_sharded_value
from plurax.pipeline.cut import inlined
from plurax.sharding.axes import Axes
from plurax.sharding.factors import factors
from plurax.sharding.reshard import apply_moves, plan_reshard, wire_bytes
from plurax.sharding.rules import Rules, zero_sharding
from plurax.sharding.spec import TensorSharding

SIZES = {"a": 2, "b": 2, "c": 2}
SHAPE = (8, 8, 16)


def mesh_of(sizes):
    count = int(np.prod(list(sizes.values())))
    grid = np.asarray(jax.devices()[:count]).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@st.composite
def shardings(draw, axes=tuple(SIZES), rank=3, partial=False):
    dims = [[] for _ in range(rank)]
    terms = []
    for axis in draw(st.permutations(axes)):
        place = draw(st.sampled_from([None, *range(rank), *(["partial"] if partial else [])]))
        if place == "partial":
            terms.append(axis)
        elif place is not None:
            dims[place].append(axis)
    return TensorSharding(tuple(map(tuple, dims)), frozenset(terms))


# --- The value ----------------------------------------------------------------------------------


@given(shardings())
@draws(50)
def test_a_sharding_goes_to_a_spec_and_comes_back(sharding):
    assert TensorSharding.from_spec(sharding.spec, 3) == sharding
    mesh = mesh_of(SIZES)
    by_jax = jax.NamedSharding(mesh, sharding.spec).shard_shape(SHAPE)
    assert sharding.shard_shape(SHAPE, SIZES) == by_jax
    assert sharding.shard_bytes(SHAPE, 4, SIZES) == np.prod(by_jax) * 4


@pytest.mark.parametrize("count", [3, 5, 6, 7])
def test_any_number_of_devices(count):
    sharding, axes = TensorSharding.of("data", None), {"data": count}
    assert sharding.shard_shape((10, 4), axes) == (-(-10 // count), 4)
    if 10 % count:
        with pytest.raises(px.errors.PlanError, match=f"cannot be split into {count} shards"):
            sharding.check((10, 4), axes, "the weight")
    else:
        sharding.check((10, 4), axes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorSharding.of("a", "a"), "An axis can split only one dim"),
        (
            lambda: TensorSharding.from_spec(P("a", "b", "c"), 2),
            "3 entries and the tensor has 2 dims",
        ),
        (lambda: TensorSharding.of("a").check((4, 4), {"a": 2}), "another number of entries"),
        (
            lambda: TensorSharding.of("d").check((4,), {"a": 2}),
            "names the mesh axis 'd'; the axes are a",
        ),
    ],
)
def test_what_is_no_sharding_says_so(make, message):
    with pytest.raises(px.errors.PlanError, match=message):
        make()


# --- Moving -------------------------------------------------------------------------------------

AXES = Axes(SIZES)


def moved(source, target, moves, axes=AXES):
    """What devices hold after the moves, and the collectives of the compiled program."""
    mesh = mesh_of(axes.mesh)
    whole = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)

    def local(array):
        terms = axes.size(sorted(source.partial))
        return apply_moves(array / terms, SHAPE, source, moves, axes)

    run = jax.shard_map(
        local, mesh=mesh, in_specs=TensorSharding(source.dims).spec, out_specs=target.spec,
        check_vma=False,
    )  # fmt: skip
    compiled = jax.jit(run).lower(jax.ShapeDtypeStruct(SHAPE, jnp.float32)).compile()
    found = collectives(compiled.as_text(), mesh)
    return np.asarray(compiled(whole)), whole, found


@given(shardings(partial=True), shardings())
@draws(15, times=9)
def test_resharding_is_right_and_costs_what_it_says(source, target):
    moves = plan_reshard(source, target, SHAPE, 4, AXES)
    got, whole, found = moved(source, target, moves)
    np.testing.assert_array_equal(got, whole)
    planned = [(m.kind, m.bytes) for m in moves if m.kind != "slice"]
    assert sorted((c.kind, c.bytes) for c in found) == sorted(planned)
    assert sum(c.bytes_sent for c in found) == pytest.approx(wire_bytes(moves))


PARTS = Axes({"a": 2, "b": 4}, {"b": (2, 2)})


@given(shardings(tuple(PARTS.sizes), partial=True), shardings(tuple(PARTS.sizes)))
@draws(40, times=25)
def test_each_move_is_one_collective_where_axes_are_used_in_parts(source, target):
    for move in plan_reshard(source, target, SHAPE, 4, PARTS):
        if move.kind not in ("slice", "collective-permute"):
            PARTS.group(move.axes)


@given(shardings(partial=True), shardings())
@draws(40, times=25)
def test_resharding_never_costs_more_than_gathering_all(source, target):
    moves = plan_reshard(source, target, SHAPE, 4, AXES)
    whole = plan_reshard(source, TensorSharding.replicated(3), SHAPE, 4, AXES)
    assert wire_bytes(moves) <= wire_bytes(whole)


@pytest.mark.parametrize("partial", [(), ("b",)], ids=["whole", "partial"])
def test_two_dims_that_devices_do_not_divide_are_both_padded(partial):
    shape, target = (5, 3), TensorSharding.of("a", "b")
    source = TensorSharding(((), ()), frozenset(partial))
    moves = plan_reshard(source, target, shape, 4, AXES)
    whole = np.arange(15, dtype=np.float32).reshape(shape)
    run = jax.shard_map(
        lambda array: apply_moves(array, shape, source, moves, AXES),
        mesh=mesh_of(AXES.mesh), in_specs=TensorSharding.replicated(2).spec,
        out_specs=target.spec, check_vma=False,
    )  # fmt: skip
    padded = np.pad(whole * (AXES.size(partial) if partial else 1), ((0, 1), (0, 1)))
    np.testing.assert_array_equal(jax.jit(run)(whole), padded)
    back = plan_reshard(target, TensorSharding.replicated(2), shape, 4, AXES)
    assert {move.kind for move in back} == {"all-gather"}


def test_a_dim_that_changes_its_axis_is_not_gathered_whole():
    """The case in which a compiler makes the whole tensor on every device."""
    moves = plan_reshard(
        TensorSharding.of("a", None, None), TensorSharding.of(None, "b", None), SHAPE, 4, AXES
    )
    gather = plan_reshard(
        TensorSharding.of("a", None, None), TensorSharding.replicated(3), SHAPE, 4, AXES
    )
    assert wire_bytes(moves) <= wire_bytes(gather) / 2


def test_blocks_are_permuted_along_axes_that_change():
    """Along another axis, which may join machines, no device sends its block."""
    axes = Axes({"a": 2, "b": 2, "c": 2})
    source = TensorSharding.of(("a", "b"), None, "c")
    target = TensorSharding.of(("b", "a"), None, "c")
    moves = plan_reshard(source, target, SHAPE, 4, axes)
    got, whole, found = moved(source, target, moves, axes)
    np.testing.assert_array_equal(got, whole)
    assert [(m.kind, m.axes) for m in moves] == [("collective-permute", ("a", "b"))]
    assert [(c.kind, c.axes) for c in found] == [("collective-permute", ("a", "b"))]


def test_parts_of_an_axis_move_in_groups():
    axes = Axes({"tensor": 8}, {"tensor": (2, 4)})
    source, target = (
        TensorSharding.of("tensor:0", "tensor:1", None),
        TensorSharding.of("tensor:0", None, None),
    )
    moves = plan_reshard(source, target, SHAPE, 4, axes)
    mesh = mesh_of({"tensor": 8})

    def local(array):
        own = plan_reshard(TensorSharding.replicated(3), source, SHAPE, 4, axes)
        shard = apply_moves(array, SHAPE, TensorSharding.replicated(3), own, axes)
        shard = apply_moves(shard, SHAPE, source, moves, axes)
        back = plan_reshard(target, TensorSharding.replicated(3), SHAPE, 4, axes)
        return apply_moves(shard, SHAPE, target, back, axes)

    run = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    whole = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    np.testing.assert_array_equal(jax.jit(run)(whole), whole)
    assert [m.kind for m in moves] == ["all-gather"]


@pytest.mark.parametrize("entry", [("tensor:0",), ("tensor:1",), ("tensor:0", "tensor:1")])
@pytest.mark.parametrize("size", [11, 12, 20])
def test_a_dim_that_parts_of_an_axis_do_not_divide(entry, size):
    """Of 12 places on 4 x 2 devices each has 2, and no three of them are those of a part."""
    axes = Axes({"tensor": 8}, {"tensor": (4, 2)})
    replicated, split = TensorSharding.replicated(1), TensorSharding((entry,))
    both = TensorSharding((("tensor:0", "tensor:1"),))
    whole = np.arange(size, dtype=np.float32)

    def local(array):
        for source, target in itertools.pairwise((replicated, both, split, both, replicated)):
            moves = plan_reshard(source, target, (size,), 4, axes)
            array = apply_moves(array, (size,), source, moves, axes)
        return array

    mesh = mesh_of({"tensor": 8})
    run = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    np.testing.assert_array_equal(jax.jit(run)(whole), whole)


# --- Dividing -----------------------------------------------------------------------------------


def shared(fun, args, shardings=None, count=4, parts=None, named=None):
    """The results of a partitioned function, gathered; its collectives; its results' shardings.

    Planned without executing anything, the function has the same results and collectives.
    """
    axes = Axes({"tensor": count}, parts)
    records, ends, executed = [], [], []

    def local(*arrays):
        divider = Partitioner(axes, named, mesh=mesh)
        whole = [
            ShardedValue(array, array.shape, TensorSharding.replicated(array.ndim))
            for array in arrays
        ]
        targets = shardings or [value.sharding for value in whole]
        values = map(divider.move, whole, targets)
        out = partition(fun, divider, tuple(values))
        executed[:] = planning.facts(out), list(divider.records)
        out = jax.tree.map(
            lambda v: divider.move(v, TensorSharding(v.sharding.dims)),
            out,
            is_leaf=is_sharded_value,
        )
        records[:] = list(divider.records)
        ends[:] = [value.sharding for value in jax.tree.leaves(out, is_leaf=is_sharded_value)]
        return jax.tree.map(
            lambda v: divider.move(v, TensorSharding.replicated(len(v.shape))).array,
            out,
            is_leaf=is_sharded_value,
        )

    mesh = mesh_of({"tensor": count})
    run = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    results = jax.jit(run)(*args)
    partitioner = Partitioner(axes, named, mesh=mesh)
    specs = [
        partitioner.context.spec(one.shape, one.dtype, sharding)
        for one, sharding in zip(
            map(jax.typeof, args),
            shardings or map(TensorSharding.replicated, map(jnp.ndim, args)),
            strict=True,
        )
    ]
    assert planning.planned(fun, partitioner, tuple(specs)) == tuple(executed)
    return results, records, ends


def assert_same(got, expected):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def matrices():
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=shape) for shape in ((8, 12), (12, 16), (16, 20)))


def two_products(first, second):
    """Z = (X W) V with a shard strategy for each product."""

    def z(x, w, v):
        return px.sharding.shard(jnp.matmul, second)(px.sharding.shard(jnp.matmul, first)(x, w), v)

    return z


PRODUCTS = {
    # The first product split by rows, the second wants its left input whole.
    "gather": (((4, 1), (1, 1)), ((1, 1), (1, 4)), ["all-gather"]),
    # The first split by columns, the second by rows.
    "exchange": (((1, 1), (1, 4)), ((4, 1), (1, 1)), ["all-to-all"]),
    # The first's output split as the second wants it, which sums over a split dim.
    "sum": (((1, 1), (1, 4)), ((1, 4), (4, 1)), ["all-reduce"]),
}
# What each communication does to a cotangent; then the gradients of weights that every device has
# whole and sees a part of the rows of.
TRANSPOSES = {
    "gather": ["all-gather", "reduce-scatter", "all-reduce"],
    "exchange": ["all-to-all", "all-to-all", "all-reduce", "all-reduce"],
    "sum": ["all-reduce", "all-reduce"],
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_two_products(x64, case):
    first, second, kinds = PRODUCTS[case]
    z = two_products(first, second)
    got, records, _ = shared(z, matrices())
    assert_same(got, z(*matrices()))
    assert [record.kind for record in records] == kinds


@pytest.mark.parametrize("case", PRODUCTS)
def test_the_gradient_of_two_products_communicates_the_transpose(x64, case):
    z = two_products(*PRODUCTS[case][:2])
    grad = jax.grad(lambda *args: jnp.sum(jnp.sin(z(*args))), argnums=(0, 1, 2))
    got, records, _ = shared(grad, matrices())
    assert_same(got, grad(*matrices()))
    assert [record.kind for record in records] == TRANSPOSES[case]


def test_a_strategy_in_two_dims(x64):
    z = two_products(((2, 1), (1, 4)), ((2, 4), (4, 1)))
    grad = jax.grad(lambda *args: jnp.sum(jnp.sin(z(*args))), argnums=(0, 1, 2))
    got, records, ends = shared(grad, matrices(), count=8, parts={"tensor": (2, 2, 2)})
    assert_same(got, grad(*matrices()))
    assert {record.kind for record in records} == {"all-reduce"}
    assert ends[0] == TensorSharding.of("tensor:0", None)


def test_factors():
    x, w = jnp.ones((4, 6)), jnp.ones((6, 8))
    assert factors(jnp.matmul, x, w) == [[0, 1], [1, 2]]
    assert factors(lambda a, b: jnp.tanh(a).T + b, x, jnp.ones((6, 4))) == [[0, 1], [1, 0]]
    assert factors(lambda a: a.reshape(4, 2, 3).sum(1), x) == [[0, 1]]
    # JAX traces a function once, however often it is called: each call has indices of its own.
    scaled = jax.jit(lambda a: 2 * a)
    assert factors(lambda a, b: (scaled(a), scaled(b)), x, x) == [[0, 1], [2, 3]]
    # A dim of size 1 that is spread is no index of the other operand.
    assert factors(lambda a, b: a * b, jnp.ones((4, 1)), x) == [[0, 1], [0, 2]]
    image, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 5))
    convolved = functools.partial(
        jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    (n, _, _, c), (_, _, i, o) = factors(convolved, image, kernel)
    assert c == i
    assert len({n, c, o}) == 3


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (((2, 1),), "has counts for 1 arguments and the operator was called with 2"),
        (((2,), (1, 1)), "its counts must be 2, one for each dim"),
        (((1, 2), (4, 1)), "is the same index of the operator as a dim that is split into 2"),
        (((3, 1), (1, 1)), "which its count does not divide"),
    ],
)
def test_a_strategy_that_does_not_fit_says_so(strategy, message):
    with pytest.raises(px.errors.PlanError, match=message):
        px.sharding.shard(jnp.matmul, strategy)(jnp.ones((4, 6)), jnp.ones((6, 8)))


def test_a_strategy_for_another_number_of_devices_says_so():
    product = px.sharding.shard(jnp.matmul, ((2, 1), (1, 4)))
    with pytest.raises(
        px.errors.PlanError, match=r"splits an operator into 2 × .* the plan has tensor=4"
    ):
        shared(product, matrices()[:2])


# Each operation, with its operands split over `tensor`, beside the same on one device.
RNG = np.random.default_rng(1)
TABLE = RNG.normal(size=(8, 12))
IMAGE = RNG.normal(size=(4, 6, 6, 8))
INDEX = np.array([[0], [3], [7], [3], [9], [-1]], np.int32)
S = TensorSharding.of


def read_in_a_loop(table):
    return jax.lax.scan(
        lambda c, i: (c + (row(table[i], table) * table).sum(), table.sum(0)), 0.0, jnp.arange(3)
    )


def complex_product(x, y):
    x, y = x.astype(complex), y.astype(complex)
    return jnp.abs((x + 1j * y) @ (y - 2j * x).T)


def grouped(x, w):
    return jax.lax.ragged_dot(x, w, jnp.array([1, 5, 2]))


def experts(x, w):
    """Two products of groups of rows; in between each device has the rows of its groups."""
    sizes = jnp.array([1, 0, 5, 1])
    hidden = jnp.exp(jax.lax.ragged_dot(x, w, sizes)) - 2
    return jax.lax.ragged_dot(hidden, w.swapaxes(1, 2), sizes), hidden.sum(0)


def regrouped(x, w):
    """The rows of the second product have other groups than those of the first."""
    hidden = jnp.exp(jax.lax.ragged_dot(x, w, jnp.array([1, 0, 5, 1])))
    return jax.lax.ragged_dot(hidden, w.swapaxes(1, 2), jnp.array([4, 3, 0, 1]))


def read_partial(x, y):
    """A partial sum that a gather, a scatter and a product leave one."""
    rows = (x @ y.T)[jnp.array([1, 0, 5, 9, 3])].reshape(5, 2, 4)
    return (jnp.zeros(6).at[INDEX[:5, 0]].add(jnp.einsum("nkd,nd->nk", rows, rows[:, 0])[:, 0]),
            jnp.einsum("nkd,k->nd", rows, x[0, :2]))  # fmt: skip


def sparse(entries, dense):
    """The product with a sparse matrix (8, 8) of 12 entries, two of them in one place."""
    indices = jnp.array([[i % 8, 3 * i % 8] for i in range(11)] + [[0, 0]])
    return BCOO((entries, indices), shape=(8, 8)) @ dense


COUNTS = np.arange(96, dtype=np.uint32).reshape(8, 12)
OPERATIONS = {
    "add": (lambda x, y: x + y, (TABLE, TABLE), (S("tensor", None), S(None, "tensor"))),
    "spread": (lambda x: x - x.max(1, keepdims=True), (TABLE,), (S(None, "tensor"),)),
    "bits": (lambda x: threefry2x32_p.bind(x, x, x, x + 1), (COUNTS,), (S("tensor", None),)),
    "where": (lambda x: jnp.where(x > 0, x, 0), (TABLE,), (S("tensor", None),)),
    "product": (lambda x, y: x @ y.T, (TABLE, TABLE), (S(None, "tensor"), S(None, "tensor"))),
    "conflict": (lambda x, y: x @ y.T, (TABLE, TABLE), (S("tensor", None), S("tensor", None))),
    "mean": (lambda x: x.mean(0), (TABLE,), (S("tensor", None),)),
    "min": (lambda x: x.min(), (TABLE,), (S(None, "tensor"),)),
    "argmax": (lambda x: x.argmax(1), (TABLE,), (S(None, "tensor"),)),
    "prod": (lambda x: x.prod(1), (TABLE,), (S(None, "tensor"),)),
    "softmax": (jax.nn.softmax, (TABLE,), (S(None, "tensor"),)),
    "sort": (lambda x: jnp.sort(x, axis=1), (TABLE,), (S(None, "tensor"),)),
    "sort rows": (lambda x: jnp.sort(x, axis=1), (TABLE,), (S("tensor", None),)),
    "cumsum": (lambda x: jnp.cumsum(x, axis=0), (TABLE,), (S("tensor", None),)),
    "cumsum of other columns": (lambda x: jnp.cumsum(x, axis=0), (TABLE,), (S(None, "tensor"),)),
    "cumsum of sums": (
        lambda x, y: jnp.cumsum(x @ y.T, axis=0), (TABLE, TABLE),
        (S(None, "tensor"), S(None, "tensor"))),
    "cumsum of counts": (
        lambda x: jnp.cumsum((x > 0).astype(jnp.int8), axis=1, dtype=jnp.int8), (TABLE,),
        (S(None, "tensor"),)),
    **{
        f"{name}{' from the end' * reverse}": (
            functools.partial(getattr(jax.lax, name), axis=1, reverse=reverse), (TABLE,),
            (S(None, "tensor"),))
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
        for reverse in (False, True)
    },
    "top_k": (lambda x: jax.lax.top_k(x, 3), (TABLE,), (S("tensor", None),)),
    "top_k of columns": (
        lambda x: jax.lax.top_k(x, 3, axis=0), (TABLE,), (S("tensor", None),)),
    "half a count": (
        lambda x: jax.lax.div(jnp.sum(x > 0, axis=1, dtype=jnp.int32), jnp.int32(2)), (TABLE,),
        (S(None, "tensor"),)),
    "a count below zero": (
        lambda x: jax.lax.neg(jnp.sum(x > 0, axis=1, dtype=jnp.uint32)).astype(float), (TABLE,),
        (S(None, "tensor"),)),
    "reshape": (lambda x: x.reshape(4, 2, 12), (TABLE,), (S("tensor", None),)),
    "reshape minor": (lambda x: x.reshape(8, 3, 4), (TABLE,), (S(None, "tensor"),)),
    "flatten": (lambda x: x.ravel(), (TABLE,), (S("tensor", None),)),
    "flatten minor": (lambda x: x.ravel(), (TABLE,), (S(None, "tensor"),)),
    "flat argmax": (lambda x: x.ravel().argmax(), (TABLE,), (S(None, "tensor"),)),
    "flat times": (lambda x: x.ravel() * jnp.arange(96.0), (TABLE,), (S(None, "tensor"),)),
    "transpose": (lambda x: x.T, (TABLE,), (S("tensor", None),)),
    "reverse": (lambda x: x[::-1], (TABLE,), (S("tensor", None),)),
    "slice": (lambda x: x[1:5, ::2], (TABLE,), (S("tensor", None),)),
    "dynamic slice": (
        lambda x: jax.lax.dynamic_slice(x, (2, 0), (4, 12)), (TABLE,), (S(None, "tensor"),)),
    "dynamic update": (
        lambda x: jax.lax.dynamic_update_slice(x, x[:2] * 2, (3, 0)), (TABLE,),
        (S(None, "tensor"),)),
    "pad": (lambda x: jnp.pad(x, ((1, 2), (0, 0))), (TABLE,), (S("tensor", None),)),
    "concatenate": (
        lambda x, y: jnp.concatenate([x, y], 1), (TABLE, TABLE),
        (S("tensor", None), S(None, "tensor"))),
    "split": (lambda x: jnp.split(x, 2, axis=1), (TABLE,), (S("tensor", None),)),
    "take rows": (lambda x: x[INDEX[:4, 0]], (TABLE,), (S("tensor", None),)),
    "take outside": (
        lambda x: x.at[INDEX[:, 0]].get(mode="fill", wrap_negative_indices=False), (TABLE,),
        (S("tensor", None),)),
    "take outside of whole columns": (
        lambda x: x.at[INDEX[:5, 0] % 8, INDEX[:5, 0] + 8].get(mode="fill", fill_value=0), (TABLE,),
        (S("tensor", None),)),
    "take clipped": (
        lambda x: x.at[INDEX[:, 0]].get(mode="clip", wrap_negative_indices=False), (TABLE,),
        (S("tensor", None),)),
    "take past the ends": (
        lambda x: x[jnp.array([1, 9, -20, 3])], (TABLE,), (S("tensor", None),)),
    "take by bytes": (
        lambda x: jnp.take(x, jnp.arange(0, 128, 9, jnp.int8), axis=0), (np.tile(TABLE, (32, 1)),),
        (S("tensor", None),)),
    "take columns": (lambda x: x[INDEX[:4, 0]], (TABLE,), (S(None, "tensor"),)),
    "take along": (
        lambda x: jnp.take_along_axis(x, jnp.arange(8)[:, None], 1), (TABLE,),
        (S(None, "tensor"),)),
    "add rows": (
        lambda x: jnp.zeros((8, 12)).at[INDEX[:4, 0]].add(x[:4]), (TABLE,), (S(None, "tensor"),)),
    "add rows, transposed": (
        lambda x, y: (jnp.zeros((8, 12)).at[INDEX[:4, 0]].add(x[:4]).T @ y, jnp.exp(x.T)),
        (TABLE, TABLE), (S("tensor", None), S("tensor", None))),
    "add to rows": (
        lambda x: x.at[INDEX[:4, 0]].add(x[:4]), (TABLE,), (S("tensor", None),)),
    "subtract from rows": (
        lambda x: x.at[INDEX[:4, 0]].subtract(x[:4]), (TABLE,), (S("tensor", None),)),
    "subtract split rows": (
        lambda x, y: x.at[jnp.arange(8) % 3].subtract(y), (TABLE, TABLE),
        (S(None, None), S("tensor", None))),
    "add to columns": (lambda x: x.at[:, 2].add(1.0), (TABLE,), (S("tensor", None),)),
    "loop": (
        lambda x: jax.lax.scan(lambda c, row: (c + row, c * row), x[0], x), (TABLE,),
        (S(None, "tensor"),)),
    "loop over shards": (
        lambda x: jax.lax.scan(lambda c, row: (c + row, c * row), x[0], x), (TABLE,),
        (S("tensor", None),)),
    "sum in a loop": (
        lambda x: jax.lax.scan(lambda c, row: (c + row.sum(), None), 0.0, x)[0], (TABLE,),
        (S(None, "tensor"),)),
    "changing carry": (
        lambda x: jax.lax.scan(lambda c, _: (c.T @ c, None), x[:, :8], None, length=2)[0],
        (TABLE,), (S("tensor", None),)),
    "while": (
        lambda x: jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * 2, c[1] + 1), (x, 0))[0],
        (TABLE,), (S("tensor", None),)),
    "cond": (
        lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), (TABLE,), (S("tensor", None),)),
    "jit": (jax.jit(lambda x: x @ x.T), (TABLE,), (S(None, "tensor"),)),
    "remat": (jax.checkpoint(lambda x: jnp.sin(x @ x.T)), (TABLE,), (S(None, "tensor"),)),
    "pooling": (
        lambda x: jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        (IMAGE,), (S(None, None, None, "tensor"),)),
    "pooling split": (
        lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 3, 1, 1), (1, 1, 1, 1), "SAME"),
        (IMAGE,), (S("tensor", None, None, None),)),
    "random": (
        lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape).astype(x.dtype),
        (TABLE,), (S("tensor", None),)),
    "iota": (lambda x: x + jnp.arange(12.0)[None], (TABLE,), (S(None, "tensor"),)),
    "einsum": (
        lambda x, y: jnp.einsum("bij,bjk->bik", x, y),
        (IMAGE[0], IMAGE[0].swapaxes(1, 2)), (S(None, None, "tensor"), S(None, "tensor", None))),
    "product of two sums": (
        lambda x, y: (x @ y.T) * (y @ x.T), (TABLE, TABLE),
        (S(None, "tensor"), S(None, "tensor"))),
    "square of a sum": (lambda x: (x @ x.T) ** 2, (TABLE,), (S(None, "tensor"),)),
    "uneven sum": (lambda x: jnp.exp(x[:7]).sum(0), (TABLE,), (S("tensor", None),)),
    "uneven mean": (lambda x: jnp.cos(x).mean(1), (TABLE[:, :7],), (S(None, "tensor"),)),
    "uneven max": (lambda x: (-jnp.exp(x)).max(0), (TABLE[:7],), (S("tensor", None),)),
    "uneven product": (lambda x: jnp.cos(x).T @ x, (TABLE[:7],), (S("tensor", None),)),
    "uneven rows added": (
        lambda x: jnp.ones((3, 12)).at[jnp.arange(7) % 3].add(jnp.cos(x)), (TABLE[:7],),
        (S("tensor", None),)),
    "stack": (
        lambda x, y: jnp.stack([x, y, x], 1), (TABLE, TABLE),
        (S("tensor", None), S(None, "tensor"))),
    "unstack": (
        lambda x: tuple(jnp.unstack(x.reshape(8, 3, 4), axis=1)), (TABLE,), (S("tensor", None),)),
    "tile": (lambda x: jnp.tile(x, (2, 1)), (TABLE,), (S(None, "tensor"),)),
    "transform": (lambda x: jnp.fft.rfft(x, axis=1).real, (TABLE,), (S("tensor", None),)),
    "transform split": (lambda x: jnp.abs(jnp.fft.fft(x, axis=1)), (TABLE,), (S(None, "tensor"),)),
    "complex": (complex_product, (TABLE, TABLE), (S(None, "tensor"), S(None, "tensor"))),
    "set rows": (lambda x: x.at[INDEX[:2, 0]].set(x[:2] * 2), (TABLE,), (S(None, "tensor"),)),
    "largest rows": (lambda x: x.at[INDEX[:2, 0]].max(x[:2]), (TABLE,), (S("tensor", None),)),
    "decomposition": (
        lambda x: jnp.linalg.cholesky(jnp.einsum("bij,bik->bjk", x, x) + jnp.eye(6)[None]),
        (IMAGE[..., 0],), (S("tensor", None, None),)),
    "orthogonal": (
        lambda x: jnp.linalg.qr(x)[0], (IMAGE[..., :6],), (S("tensor", None, None, None),)),
    "branches": (
        lambda x, y: jax.lax.switch(
            1 + (x[0, 0] > 9).astype(int),
            [lambda x, y: (x, y), lambda x, y: (y, x), lambda x, y: (x * 2, 0 * y)], x, y),
        (TABLE, TABLE), (S("tensor", None), S(None, "tensor"))),
    "branch of a sum": (
        lambda x: jax.lax.cond(x[0, 0] < 9, lambda x: x @ x.T, lambda x: jnp.zeros((8, 8)), x),
        (TABLE,), (S(None, "tensor"),)),
    "while of a sum": (
        lambda x: jax.lax.while_loop(lambda c: (c**2).sum() < 1e3, lambda c: c @ x[:, :8].T / 2 + c,
                                     x[:, :8]),
        (TABLE,), (S(None, "tensor"),)),
    "while for each row": (
        lambda x: jax.vmap(lambda row: jax.lax.while_loop(
            lambda c: c[0].sum() > c[1], lambda c: (c[0] / 2, c[1] + 0.1), (row**2, 0.0)))(x),
        (TABLE,), (S("tensor", None),)),
    "while for each column": (
        lambda x: jax.vmap(lambda row: jax.lax.while_loop(
            lambda c: c.sum() > 1, lambda c: c / 2, row**2))(x),
        (TABLE,), (S(None, "tensor"),)),
    "loop without turns": (
        lambda x: jax.lax.scan(lambda c, row: (c * row[None], row), x, x[:0, :1])[0], (TABLE,),
        (S("tensor", None),)),
    "triangular": (lambda x: jnp.tril(x), (TABLE,), (S("tensor", None),)),
    "solved": (
        lambda x, y: jnp.linalg.solve(x[:, :8] @ x[:, :8].T + 9 * jnp.eye(8), y), (TABLE, TABLE),
        (S("tensor", None), S(None, "tensor"))),
    "conjugate gradients": (
        lambda x, y: cg(lambda v: x @ (x.T @ v) + v, y, tol=1e-14)[0], (TABLE, TABLE),
        (S(None, "tensor"), S("tensor", None))),
    "conjugate gradients of each row": (
        lambda x, y: jax.vmap(lambda row: cg(lambda v: x.T @ (x @ v) + v, row, tol=1e-14)[0])(y),
        (TABLE, TABLE), (S("tensor", None), S(None, "tensor"))),
    "put": (
        lambda x, y: jax.device_put((x @ y.T, y.sum(1))), (TABLE, TABLE),
        (S(None, "tensor"), S(None, "tensor"))),
    "groups of rows": (
        grouped, (TABLE, IMAGE[0].reshape(3, 12, 8)), (S("tensor", None), S(None, None, None))),
    "groups, inner": (
        grouped, (TABLE, IMAGE[0].reshape(3, 12, 8)), (S(None, "tensor"), S(None, "tensor", None))),
    "groups, columns": (
        grouped, (TABLE, IMAGE[0].reshape(3, 12, 8)), (S(None, None), S(None, None, "tensor"))),
    "groups of experts": (
        experts, (TABLE, IMAGE[:4, 0].reshape(4, 12, 4)), (S(None, None), S("tensor", None, None))),
    "other groups of experts": (
        regrouped, (TABLE, IMAGE[:4, 0].reshape(4, 12, 4)),
        (S(None, None), S("tensor", None, None))),
    "groups of experts, split rows": (
        experts, (TABLE, IMAGE[:4, 0].reshape(4, 12, 4)),
        (S("tensor", None), S("tensor", None, None))),
    "read partial sums": (read_partial, (TABLE, TABLE), (S(None, "tensor"), S(None, "tensor"))),
    "set split rows": (
        lambda x: x.at[INDEX[:5, 0]].set(x[:5] * 2), (TABLE,), (S("tensor", None),)),
    "set rows of zeros": (
        lambda x: jnp.zeros((8, 12)).at[INDEX[:3, 0]].set(x[:3], unique_indices=True) * x, (TABLE,),
        (S("tensor", None),)),
    "sparse entries": (sparse, (TABLE[0], TABLE), (S("tensor"), S(None, None))),
    "sparse times columns": (sparse, (TABLE[0], TABLE), (S(None), S(None, "tensor"))),
    "sparse times rows": (sparse, (TABLE[0], TABLE), (S(None), S("tensor", None))),
    "sparse examples": (
        lambda x, y: jax.vmap(sparse, (0, None))(x, y), (TABLE, TABLE),
        (S("tensor", None), S(None, None))),
    "inverse": (lambda x: jnp.linalg.inv(x[:, :8]), (TABLE,), (S("tensor", None),)),
    # Created in the loop's body for the first time, and again after it.
    "flat in a loop": (
        lambda x: (read_in_a_loop(x.ravel()), x.ravel() * 2), (TABLE,),
        (S(None, "tensor"),)),
    "added rows in a loop": (
        lambda x: read_in_a_loop(jnp.zeros((8, 12)).at[INDEX[:2, 0]].add(x[:2])), (TABLE,),
        (S(None, "tensor"),)),
    "pinned": (
        lambda x: jax.lax.with_sharding_constraint(x, P(None, "tensor")) * 2, (TABLE,),
        (S("tensor", None),)),
}  # fmt: skip


COLUMNS = RNG.normal(size=(6, 24))
OPERATIONS |= {
    f"{name} of parts": (fun, (value,), (S(*[None] * (value.ndim - 1), "tensor"),))
    for name, fun, value in (
        ("split", lambda x: jnp.split(x, 3, 1), COLUMNS),
        ("split into others", lambda x: jnp.split(x, [12, 18], 1), COLUMNS),
        ("concatenation", lambda x: jnp.concatenate([x, 2 * x, x**2], 1), COLUMNS),
        ("reshape", lambda x: x.reshape(6, 3, 4, 2), COLUMNS),
        ("reshape with rows", lambda x: x.reshape(2, 3, 3, 8), COLUMNS),
        ("join", lambda x: x.reshape(6, 30), RNG.normal(size=(6, 5, 6))),
        ("join with rows", lambda x: x.reshape(3, 60), RNG.normal(size=(3, 2, 5, 6))),
    )
}


def convolved(strides, groups):
    return lambda x, k: jax.lax.conv_general_dilated(
        x, k, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )  # fmt: skip


KERNEL = RNG.normal(size=(3, 3, 8, 12))
OPERATIONS |= {
    f"convolution {name}": (convolved(strides, groups), (IMAGE, kernel), shardings)
    for name, strides, groups, kernel, shardings in (
        ("out", (1, 1), 1, KERNEL, (TensorSharding.replicated(4), S(None, None, None, "tensor"))),
        ("in", (2, 2), 1, KERNEL, (S(None, None, None, "tensor"), S(None, None, "tensor", None))),
        ("batch", (1, 1), 1, KERNEL, (S("tensor", None, None, None), TensorSharding.replicated(4))),
        ("image", (1, 1), 1, KERNEL, (S(None, "tensor", None, None), TensorSharding.replicated(4))),
        ("grouped", (1, 1), 4, KERNEL[:, :, :2],
         (S(None, None, None, "tensor"), S(None, None, None, "tensor"))),
        ("by channel", (2, 2), 8, KERNEL[:, :, :1, :8],
         (S(None, None, None, "tensor"), S(None, None, None, "tensor"))),
        ("groups of a kernel", (1, 1), 2, KERNEL[:, :, :4],
         (TensorSharding.replicated(4), S(None, None, None, "tensor"))),
    )
}  # fmt: skip


def squared_sum(fun):
    return lambda *args: jnp.sum(fun(*args) ** 2)


OPERATIONS |= {
    f"derivatives of a convolution, {groups} groups": (
        jax.grad(squared_sum(convolved((1, 1), groups)), (0, 1)),
        (IMAGE[..., :6], RNG.normal(size=(3, 3, 6 // groups, 12))),
        (S(None, None, None, "tensor"), S(None, None, None, "tensor")),
    )
    for groups in (2, 3, 6)
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_on_shards(x64, name):
    fun, args, shardings = OPERATIONS[name]
    count, args = 2, tuple(map(jnp.asarray, args))
    with jax.sharding.use_abstract_mesh(mesh_of({"tensor": count}).abstract_mesh):
        expected = jax.jit(fun)(*args) if name != "pinned" else args[0] * 2
    got, _, _ = shared(fun, args, shardings, count=count)
    assert_same(got, expected)


# In filled-up places each of these has what would change the result.
FILLED = {
    "sum": lambda x, y: (x + 1).sum(),
    "mean of rows": lambda x, y: (x + 1).mean(0),
    "max": lambda x, y: (-(x**2) - 1).max(),
    "max of columns": lambda x, y: (-(x**2) - 1).max(1),
    "min": lambda x, y: (x**2 + 1).min(),
    "integers": lambda x, y: (-jnp.ceil(x**2).astype(int)).max(),
    "all": lambda x, y: (x != 0).all(),
    "any": lambda x, y: (x == 0).any(),
    "norm": lambda x, y: jnp.linalg.norm(jnp.cos(x)),
    "flat sum": lambda x, y: (x + 1).ravel().sum(),
    "flat max": lambda x, y: (-(x**2) - 1).ravel().max(),
    "inner product": lambda x, y: jnp.vdot(1 / x, y),
    "inner product of rows": lambda x, y: jnp.vdot(1 / x[:, 0], y[:, 0]),
    "of whole and shards": lambda x, y: jnp.vdot(TABLE, 1 / y),
}


@pytest.mark.parametrize(
    "sharding", [S("tensor", None), S(None, "tensor")], ids=["rows", "columns"]
)
@pytest.mark.parametrize("name", FILLED)
def test_filled_up_shards_count_for_nothing(x64, name, sharding):
    """Of 8 rows or 12 columns on 5 devices; only numbers cross them."""
    args = (jnp.asarray(TABLE), jnp.asarray(TABLE[::-1]))
    got, records, _ = shared(FILLED[name], args, (sharding, sharding), count=5)
    assert_same(got, jax.jit(FILLED[name])(*args))
    sliced = name == "inner product of rows" and sharding == S(None, "tensor")
    assert sliced or {record.kind for record in records} <= {"all-reduce"}


DIFFERENTIABLE = [
    name
    for name in OPERATIONS
    if name
    not in (
        "sort",
        "argmax",
        "while",
        "take outside",
        "take outside of whole columns",
        "pinned",
        "top_k",
        "top_k of columns",
        "half a count",
        "a count below zero",
        "bits",
        "inverse",
        "sparse examples",
        "while of a sum",
        "while for each row",
        "while for each column",
        "flat argmax",
        "take by bytes",
    )
]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_gradient_of_an_operation_on_shards(x64, name):
    same_gradient(name)


@pytest.mark.ci
def test_the_gradient_of_a_take_by_bytes(x64, uncached):
    """XLA's older code for a scatter ends the process where bytes count more than 127 rows."""
    if uncached:
        same_gradient("take by bytes")


def same_gradient(name):
    fun, args, shardings = OPERATIONS[name]
    places = tuple(range(len(args)))

    def total(*args):
        leaves = jax.tree.leaves(fun(*args))
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in leaves)

    grad = jax.grad(total, argnums=places)
    got, _, _ = shared(grad, args, shardings, count=2)
    assert_same(got, jax.jit(grad)(*args))


STAYING = {
    # A branch that is zero, and one that is a sum: added up once, where it is used.
    "branch": (
        lambda x: jax.lax.cond(
            x.sum() < 99, lambda x: x @ x.T, lambda x: jnp.zeros((8, 8)), x), ["all-reduce"]),
    "condition": (lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), ["all-reduce"]),
    # The condition is added up in each turn; the carried value never moves.
    "while": (
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x), ["all-reduce"]),
    "unstack": (lambda x: jnp.unstack(x), []),
    "stack": (lambda x: jnp.stack([x, x]), []),
    "subtract": (lambda x: x.at[INDEX[:4, 0]].subtract(x[:4]), []),
}  # fmt: skip


@pytest.mark.parametrize("name", STAYING)
def test_what_is_split_stays_so(x64, name):
    fun, kinds = STAYING[name]
    _, records, _ = shared(fun, (jnp.asarray(TABLE),), (S(None, "tensor"),), count=2)
    # What is left a sum is added up at the end, by the test.
    assert [one.kind for one in records if one.bytes <= 8] == kinds
    assert all(one.kind == "all-reduce" for one in records)


def test_a_maximum_over_devices_is_recorded(x64):
    """Eight bytes, round a ring of four and back: each device sends six quarters of them."""
    _, records, _ = shared(lambda x: x.min(), (TABLE,), (S(None, "tensor"),))
    assert [(r.kind, r.axes, r.bytes, r.bytes_sent, r.trips) for r in records] == [
        ("all-reduce", ("tensor",), 8, 12.0, 1)
    ]


READ_TWICE = {
    "by equations": lambda h: (2 * h, jnp.sin(h)),
    "by a call": lambda h: jax.jit(lambda h: (2 * h, jnp.sin(h)))(h),
    "inside and outside of a call": lambda h: (jax.jit(lambda h: 2 * h)(h), jnp.sin(h)),
    "before and after its annotation": lambda h: (2 * px.sharding.name(h, "h"), jnp.sin(h)),
    "as a result": lambda h: (2 * h, h),
}


@pytest.mark.parametrize("name", READ_TWICE)
def test_a_partial_sum_with_two_readers_is_reduced_before_the_first(name):
    """Whatever the order of the readers: they are counted in the traced function."""
    partitioner = Partitioner(Axes({"tensor": 2}))
    spec = partitioner.context.spec
    x = spec((4, 8), np.float32, S(None, "tensor"))
    w = spec((8, 6), np.float32, S("tensor", None), is_param=True)
    alone, records = planning.plan_partition(lambda x, w: 2 * (x @ w), partitioner, (x, w))
    assert alone.sharding.partial
    assert not records
    values, records = planning.plan_partition(
        lambda x, w: READ_TWICE[name](x @ w), partitioner, (x, w)
    )
    assert not values[0].sharding.partial
    assert [(one.kind, one.bytes) for one in records] == [("all-reduce", 4 * 6 * 4)]


@pytest.mark.parametrize("partial", [(), ("tensor",)], ids=["whole", "partial"])
def test_operands_that_are_split_along_other_dims_are_split_along_both(partial):
    """Tokens over `context`, positions by width: no device has the tokens of another."""
    partitioner = Partitioner(Axes({"context": 2, "tensor": 2}))
    spec = partitioner.context.spec
    x = spec((4, 8, 6), np.float32, S(None, "context", None, partial=partial))
    position = spec((8, 6), np.float32, S(None, "tensor"), is_param=True)
    y, records = planning.plan_partition(
        lambda x, position: jnp.tanh(x + position[None]), partitioner, (x, position)
    )
    assert y.sharding == S(None, "context", "tensor")
    # What the devices of `tensor` add up is reduced to their shards.
    expected = [("reduce-scatter", 4 * 4 * 3 * 4)] if partial else []
    assert [(one.kind, one.bytes) for one in records] == expected


def test_planning_needs_no_devices():
    """32 columns over 128 devices: each sends one, most of them padding."""
    partitioner = Partitioner(Axes({"data": 128, "tensor": 8}))
    spec = partitioner.context.spec
    x = spec((4, 16), np.float32, S(None, "tensor"), data_varying=True)
    w = spec((16, 32), np.float32, S("tensor", "data"), is_param=True)
    y, records = planning.plan_partition(lambda x, w: jnp.tanh(x @ w), partitioner, (x, w))
    assert (y.sharding, y.array.shape) == (S(None, None), (4, 32))
    assert [(one.kind, one.axes, one.bytes) for one in records] == [
        ("all-gather", ("data",), 1024),
        ("all-reduce", ("tensor",), 512),
    ]


def test_what_is_read_from_parameters_and_constants_alone_counts_as_one():
    """Where rows are one dim split over `data`, anything else would be taken for rows."""
    partitioner = Partitioner(Axes({"data": 2}), joint=True)
    table = partitioner.context.spec(TABLE.shape, np.float32, S("data", None), is_param=True)

    def fun(table):
        rows = table[INDEX[:4, 0]]
        return rows, jnp.zeros(TABLE.shape, rows.dtype).at[INDEX[:4, 0]].add(rows)

    values, _ = planning.plan_partition(fun, partitioner, (table,))
    assert [value.is_param for value in values] == [True, True]


def test_what_is_gathered_for_want_of_a_rule_is_known_by_its_line():
    def reduced(x):
        return jax.lax.linalg.hessenberg(x)[0]

    _, records, _ = shared(reduced, (jnp.eye(8),), (S("tensor", None),), count=2)
    found = {one.without_rule for one in records} - {None}
    assert found
    assert all("test_sharding.py" in where and "reduced)" in where for _, where in found), found
    # Whole already: nothing is gathered, so nothing is said.
    _, records, _ = shared(reduced, (jnp.eye(8),), count=2)
    assert not records


def every_equation(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from every_equation(inner)


def test_where_an_operation_computes_is_kept(x64):
    """`compute_on` is in an equation's context, and not in its name."""

    def doubled(x):
        return jnp.sin(x) * 2

    def fun(x):
        if "out_memory_spaces" in signature(compute_on).parameters:  # JAX 0.12 takes a function
            return compute_on(
                doubled, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device
            )(x)
        with compute_on("device_host"):
            return doubled(x)

    for walked in (lambda x: shared(fun, (x,), count=2)[0], rematerialized(fun, "full")):
        closed = jax.make_jaxpr(walked)(jnp.ones(4))
        where = {eqn.primitive.name: eqn.ctx.compute_type for eqn in every_equation(closed.jaxpr)}
        assert where["sin"] == where["mul"] == "device_host"


def test_names_of_a_function_that_is_walked():
    def model(x, w):
        with jax.named_scope("attention"):
            y = jnp.tanh(x @ w)
        with jax.named_scope("readout"):
            return jax.lax.scan(named_step, y, None, length=2)[0]

    def named_step(c, _):
        with jax.named_scope("inside"):
            return jnp.sin(c), None

    walked = {
        "as it is": lambda x, w: shared(model, (x, w), count=2)[0],
        "gradient": lambda x, w: shared(
            jax.grad(lambda x, w: model(x, w).sum(), argnums=1), (x, w), count=2)[0],
        "again": rematerialized(model, "dots"),
        "batch last": batch_minor(model, 0),
        "by hand": lambda x, w: shared(
            lambda x, w: jax.shard_map(
                model, in_specs=(P(), P()), out_specs=P(), axis_names={"tensor"})(x, w),
            (x, w), count=2)[0],
        "stages": lambda x, w: inlined(
            jax.make_jaxpr(model)(x, w).jaxpr, (), (x, w), every=True),
        "in a call": lambda x, w: shared(jax.jit(model), (x, w), count=2)[0],
    }  # fmt: skip
    x, w = jnp.ones((4, 6)), jnp.ones((6, 6))
    for name, fun in walked.items():
        text = jax.jit(fun).lower(x, w).as_text(debug_info=True)
        for scope in ("attention", "readout", "inside"):
            assert scope in text, (name, scope)
        # It says where in the model an operation stands.
        assert "test_sharding.py" in text


# --- Rules --------------------------------------------------------------------------------------


def test_rules_find_the_first_pattern_and_note_what_does_not_divide():
    rules = Rules(
        px.Plan(
            tensor=4, shardings={"*/out": (..., "tensor", None), "*": (..., "tensor")}
        ).shardings,
        {"tensor": 4},
    )
    assert rules.find("a/out", (3, 8, 5)) == TensorSharding.of(None, "tensor", None)
    assert rules.find("a/in", (8, 8)) == TensorSharding.of(None, "tensor")
    assert rules.find("a/odd", (8, 6)) == TensorSharding.replicated(2)
    assert rules.notes == {"a/odd": "dim 1 is not split: 4 shards do not divide 6"}


def test_a_pattern_for_all_parameters_leaves_scalars_whole():
    rules = Rules([("a/scale", (..., "tensor")), ("*", (..., "tensor"))], {"tensor": 4})
    assert rules.find("b/scale", ()) == TensorSharding.replicated(0)
    assert rules.notes == {"b/scale": "a scalar has no dim to split"}
    with pytest.raises(px.errors.PlanError, match="a/scale has 0 dims"):
        rules.find("a/scale", ())


@pytest.mark.parametrize(
    ("shape", "sharding", "plan", "stacked", "expected"),
    [
        ((6, 8), S(None, None), px.Plan(data=4, zero=1), False, S(None, "data")),
        ((8, 8), S(None, "tensor"), px.Plan(data=4, tensor=2, zero=3), False, S("data", "tensor")),
        ((4, 6), S(None, None), px.Plan(data=4, zero=3), True, S(None, "data")),
        ((4, 6), S(None, None), px.Plan(data=4, zero=3), False, S("data", None)),
        ((16,), S("tensor"), px.Plan(data=4, tensor=2, zero=1), False, S(("tensor", "data"))),
        ((16,), S("tensor"), px.Plan(data=4, tensor=2, zero=3), False, S("tensor")),
        ((5, 7), S(None, None), px.Plan(data=4, zero=2), False, S(None, "data")),
        ((), S(), px.Plan(data=4, zero=3), False, S()),
        ((0, 8), S(None, None), px.Plan(data=4, zero=1), False, S(None, None)),
    ],
)
def test_what_zero_splits(shape, sharding, plan, stacked, expected):
    assert zero_sharding(shape, sharding, plan, stacked=stacked) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: px.Plan(shardings={"w": "tensor"}), "a rule has one entry for each dim"),
        (
            lambda: px.Plan(shardings={"w": ("model",)}),
            "over 'data'; none over 'model'",
        ),
        (lambda: px.Plan(zero=4), "zero must be one of 0, 1, 2, 3"),
        (lambda: px.Plan(remat="some"), "remat must be one of 'none', 'dots'"),
        (lambda: px.Plan(tensor=2, batch_dim="minor"), "the batch in the minor dim is for"),
        (lambda: px.Plan(tensor=0), "tensor must be a whole number"),
    ],
)
def test_a_plan_that_cannot_run_says_so(make, message):
    with pytest.raises(px.errors.PlanError, match=message):
        make()


def test_a_plan_with_rules_goes_to_toml_and_comes_back():
    plan = px.Plan(
        data=2,
        tensor=2,
        zero=1,
        remat="dots",
        shardings={"*/w": (..., None, "tensor"), "b": (("tensor",),), "x": (None,)},
    )
    assert px.Plan.from_toml(plan.to_toml()) == plan
    assert hash(plan) == hash(px.Plan.from_toml(plan.to_toml()))


@pytest.mark.ci
def test_a_tensor_axis_that_splits_nothing_is_refused():
    """Each device would do the same work, and nobody would be told."""
    with pytest.raises(px.errors.PlanError) as error:
        px.compile(models.mlp_task(), models.optimizer(), px.Plan(tensor=4), models.data(8))
    assert str(error.value) == (
        "Plan(tensor=4): no rule and no annotation splits anything over `tensor`, so 4 devices "
        "would each do the same work. Say what is split: Plan(tensor=4, shardings={'bias': (..., "
        "'tensor')}) for parameters and activations named by plurax.sharding.name, "
        "plurax.sharding.megatron for the rules of a transformer, plurax.sharding.shard in the "
        "model for an operator. Or use data=4, which splits the batch and needs no rules. "
        "Parameters: bias, hidden, out. Named activations: none."
    )


def test_attention_in_blocks_does_not_split_over_tensor_by_hand():
    """Its derivative is a function of plurax's own, which is seen."""

    def loss(p, x, keys):
        weights = jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", x * p, x))
        return jnp.einsum("bnqk,bknh->bqnh", weights, x).sum((1, 2, 3))

    task, x = px.Task(init=lambda key: jnp.ones(()), loss=loss), jnp.zeros((4, 8, 2, 4))
    with pytest.raises(px.errors.PlanError, match="splits anything over `tensor`"):
        px.compile(task, models.optimizer(), px.Plan(tensor=2, stream=4), x)
