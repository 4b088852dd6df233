"""Programs drawn at random, with parameters and rows sharded at random: the same numbers as whole.

What a device's rows meet may be split over `data`, over `tensor`, or whole, and none of the
partitioner's own assertions may be reached.
"""

import dataclasses
import functools
import itertools
from collections import Counter

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from jax import lax
from jax.scipy.sparse.linalg import cg
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from tests import models, planning
from tests.promotion import allowed

from plurax.jaxpr.compat import inner_jaxprs
from plurax.jaxpr.remat import rematerialized
from plurax.partition.partitioner import Partitioner, partition
from plurax.partition.scopes import BY_HAND
from plurax.partition.values import ShardedValue, is_sharded_value
from plurax.sharding.axes import Axes
from plurax.sharding.reshard import apply_moves, plan_reshard
from plurax.sharding.spec import TensorSharding
from plurax.trace.collectives import collectives_of
from plurax.trace.flatten import Flattener
from plurax.trace.step_trace import Value

SIZES = {"data": 2, "tensor": 2}
SHAPES = {"a": (4, 6), "b": (6, 4), "c": (6,)}
RNG = np.random.default_rng(3)
MASK = RNG.normal(size=SHAPES["a"])
ROWS = {
    "x": RNG.normal(size=(6, 4)), "t": RNG.normal(size=(6, 3, 4)), "weight": RNG.uniform(size=6)
}  # fmt: skip


# --- What programs are made of ------------------------------------------------------------------


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _(primals, tangents):
    ((v,), (t,)) = primals, tangents
    return spike(v), t / (1 + 10 * jnp.abs(v)) ** 2


@jax.custom_vjp
def scaled(v, places):
    return v * (1 + places).astype(v.dtype)


# The residuals are whole numbers; the derivative is not quite that of the function.
scaled.defvjp(lambda v, i: (scaled(v, i), i), lambda i, g: (2 * g * (1 + i).astype(g.dtype), None))


def turns(w, count):
    return lax.while_loop(lambda s: s[1] < count, lambda s: (jnp.sin(s[0]), s[1] + 1), (w, 0))[0]


@jax.custom_vjp
def relaxed(w):
    return turns(w, 3)


relaxed.defvjp(lambda w: (relaxed(w), w), lambda w, g: (g * jnp.cos(turns(w, 2)),))

# Of a parameter of shape (4, 6), with the others there.
ON_PARAMETERS = {
    "times a constant": lambda w, p: w * MASK,
    "where a constant": lambda w, p: jnp.where(MASK > 0, w, 0),
    "beside another": lambda w, p: w + p["b"].T,
    "times a row": lambda w, p: w * p["c"],
    "spread": lambda w, p: w - w.mean(1, keepdims=True),
    "by its size": lambda w, p: w / jnp.sqrt(jnp.sum(w**2) + 1),
    "product of two sums": lambda w, p: w * (w @ p["b"]).sum() * p["c"].sum(),
    "loop": lambda w, p: lax.scan(lambda s, _: (s * 0.5 + jnp.sin(s), None), w, None, 3)[0],
    "loop without turns": lambda w, p: lax.scan(lambda s, r: (s * r, s), w, jnp.zeros(0))[0],
    "branch": lambda w, p: lax.cond(w.sum() > 0, jnp.sin, lambda w: w * p["c"], w),
    "branch of zeros": lambda w, p: w + lax.cond(w[0, 0] > 9, jnp.sin, jnp.zeros_like, w),
    "while": lambda w, p: relaxed(w),
    "joined": lambda w, p: jnp.concatenate([w, p["b"].T], 0)[2:6],
    "stacked": lambda w, p: jnp.stack([w, jnp.sin(w)], 1).sum(1),
    "cumulative": lambda w, p: jnp.cumsum(w, 1) - jnp.cumsum(w, 0),
    "products": lambda w, p: jnp.cumprod(1 + 0.1 * w, axis=1),
    "mask of rows": lambda w, p: jnp.where((w > 0)[np.array([3, 1, 0, 2])], w, w / 2),
    "set": lambda w, p: w.at[1].set(0.5),
    "less a row": lambda w, p: w.at[np.array([1, 3])].subtract(p["c"]),
    "reshaped": lambda w, p: (w.reshape(2, 2, 6) * 2).reshape(4, 6),
    "complex": lambda w, p: jnp.abs(jnp.exp(1j * w) @ (1j * p["b"]) @ (w + 0j)),
    "transform": lambda w, p: jnp.fft.irfft(jnp.fft.rfft(w, axis=1) * (1 + 2j), 6, axis=1),
    "largest so far": lambda w, p: lax.cummax(w, axis=0),
    "sorted": lambda w, p: jnp.sort(w, axis=1),
    "stopped": lambda w, p: w * lax.stop_gradient(jnp.tanh(w)),
    "rounded": lambda w, p: scaled(w, (MASK > 0).astype(np.int32)),
    "again": lambda w, p: jax.checkpoint(lambda w: jnp.tanh(w) * MASK)(w),
    "solved": lambda w, p: jnp.linalg.solve(jnp.eye(4) * 9 + w @ w.T, w),
    "conjugate gradients": lambda w, p: cg(lambda v: v * 9 + w @ (w.T @ v), w, tol=1e-14)[0],
    "decomposed": lambda w, p: jnp.linalg.cholesky(jnp.eye(4) * 9 + w @ w.T) @ w,
}


def integrated(x, w, p):
    """As many turns as the row needs; what every device does is its own."""
    start = x @ w

    def goes_on(s):
        return jnp.sum(jnp.abs(s[0])) > 2

    # Not differentiable: what is divided by the number of turns is.
    still, back, matrix = lax.stop_gradient((start, p["b"], w))

    def turn(s):
        return s[0] / 2 + jnp.tanh(s[0] @ back @ matrix) / 100, s[1] + 1

    count = lax.while_loop(goes_on, turn, (still, 0))
    return start / (1.0 + count[1])


# From rows to (B, 6).
ON_ROWS = {
    "product": lambda w, p, r: r["x"] @ w,
    "outer loop": lambda w, p, r: jax.vmap(lambda t: membrane(t, w, p))(r["t"]),
    "inner gradient": lambda w, p, r: jax.vmap(jax.grad(lambda x: energy(x, w, p)))(r["x"]) @ w,
    "laplacian": lambda w, p, r: (
        jax.vmap(jax.hessian(lambda x: energy(x, w, p)))(r["x"]).sum(1) @ w
    ),
    "row by row": lambda w, p, r: lax.map(
        lambda x: lax.cond(x[0] > 0, lambda x: jnp.sin(x @ w), lambda x: (x @ w) * p["c"], x),
        r["x"],
    ),
    "turns of its own": lambda w, p, r: lax.map(lambda x: integrated(x, w, p), r["x"]),
    "turns of each": lambda w, p, r: jax.vmap(lambda x: integrated(x, w, p))(r["x"]),
    "read": lambda w, p, r: p["b"].T[jnp.clip((r["x"][:, 0] * 2).astype(int), 0, 3)] + r["x"] @ w,
    "registers": lambda w, p, r: jax.vmap(lambda t: registers(t, w))(r["t"]),
    "regular": lambda w, p, r: r["x"] @ w + sum(jnp.sum(v**2) for v in p.values()),
}


def membrane(t, w, p):
    def step(v, x):
        v = 0.9 * v * (1 - spike(v - 1)) + x @ w + p["c"]
        return v, spike(v - 1) + 0.1 * v

    return lax.scan(step, jnp.zeros(6), t)[1].mean(0)


def energy(x, w, p):
    return jnp.tanh(jnp.tanh(x @ w + p["c"]) @ p["b"]).sum()


def registers(t, w):
    """What comes from rows takes twelve turns to reach the last."""

    def step(s, x):
        return (x @ w, *s[:-1]), s[-1]

    last, _ = lax.scan(step, tuple(jnp.full(6, float(i)) for i in range(12)), t)
    return sum(last) / 12


def program(on_parameters, on_rows, remat, beside=False):
    def losses(p, rows):
        w = p["a"]
        if beside:
            # One after another, so many would blow up.
            w = sum(ON_PARAMETERS[name](w, p) for name in on_parameters) / len(on_parameters)
        else:
            w = functools.reduce(lambda w, name: ON_PARAMETERS[name](w, p), on_parameters, w)
        hidden = ON_ROWS[on_rows](w, p, rows)
        return jnp.sum((jnp.tanh(hidden + p["c"]) @ p["b"]) ** 2, 1)

    losses = rematerialized(allowed(losses), remat)  # they promote as what users write does
    return jax.grad(lambda p, rows: jnp.sum(rows["weight"] * losses(p, rows)))


# --- Evaluated whole, and on shards --------------------------------------------------------------


def parameters():
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape)) for name, shape in SHAPES.items()}


def without_array(value):
    like = jax.ShapeDtypeStruct(value.array.shape, value.array.dtype)
    return dataclasses.replace(value, array=like)


def _leaves(tree):
    return jax.tree.leaves(tree, is_leaf=is_sharded_value)


def on_shards(fun, shardings):
    """`fun` of whole parameters and all rows, evaluated on four devices; its records.

    Planned without executing anything, it has the same results and collectives.
    """
    axes, records = Axes(SIZES, platform="cpu"), []
    mesh = Mesh(
        np.asarray(jax.devices()[:4]).reshape(2, 2), tuple(SIZES),
        axis_types=(AxisType.Auto,) * 2,
    )  # fmt: skip

    def local(params, rows):
        def split(array, sharding):
            whole = TensorSharding.replicated(array.ndim)
            moves = plan_reshard(whole, sharding, array.shape, 8, axes)
            shard = apply_moves(array, array.shape, whole, moves, axes)
            return ShardedValue(shard, array.shape, sharding, is_param=True)

        def own(array):
            return ShardedValue(
                array, array.shape, TensorSharding.replicated(array.ndim), data_varying=True
            )

        divider = Partitioner(axes, mesh=mesh)
        args = (jax.tree.map(split, params, shardings), jax.tree.map(own, rows))
        sums = partition(fun, divider, args)
        records[:] = divider.records
        # What one equation needs is of no use to another, and Python may give it the same `id`.
        assert not any(map(is_sharded_value, _leaves(vars(divider))))
        specs = jax.tree.map(without_array, args, is_leaf=is_sharded_value)
        plan = planning.planned(fun, Partitioner(axes, mesh=mesh), specs)
        assert plan == (planning.facts(sums), records)

        def whole(value):
            terms = value.sharding.partial | ({"data"} if value.data_varying else set())
            sharding = TensorSharding(value.sharding.dims, frozenset(terms))
            moves = plan_reshard(
                sharding, TensorSharding.replicated(len(value.shape)), value.shape, 8, axes
            )
            with jax.named_scope(BY_HAND):  # of the test, not of what is tested
                return apply_moves(value.array, value.shape, sharding, moves, axes)

        return jax.tree.map(whole, sums, is_leaf=is_sharded_value)

    specs = ({name: P() for name in SHAPES}, P("data"))
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return run, records


@st.composite
def shardings_of_inputs(draw):
    shardings = {}
    for name, shape in SHAPES.items():
        dims = [[] for _ in shape]
        for axis in SIZES:
            place = draw(st.sampled_from([None, *range(len(shape))]))
            # Over several axes a dim is split only if it divides.
            if place is not None and (not dims[place] or shape[place] % 4 == 0):
                dims[place].append(axis)
        shardings[name] = TensorSharding(tuple(map(tuple, dims)))
    return shardings


programs = st.tuples(
    st.lists(st.sampled_from(sorted(ON_PARAMETERS)), max_size=3).filter(
        # XLA's CPU compiler fails for the transform of a solution in plain JAX, too.
        lambda names: ("solved", "transform") not in itertools.pairwise(names)
    ),
    st.sampled_from(sorted(ON_ROWS)),
    st.sampled_from(["none", "none", "dots", "full"]),
)


def assert_same(names, shardings):
    fun = program(*names)
    run, records = on_shards(fun, shardings)
    got, expected = jax.jit(run)(parameters(), ROWS), jax.jit(fun)(parameters(), ROWS)
    error = models.max_rel_error(got, expected)
    assert error < 1e-10 or error < 10 * by_rounding(fun, expected)
    assert not [one.without_rule for one in records if one.without_rule]
    assert facts_of(emitted(run)) == facts_of(records)


def by_rounding(fun, expected):
    """How far the parameters' last bits move results: some drawn programs are ill-conditioned."""
    signs = np.random.default_rng(0)
    moved = [
        jax.tree.map(lambda leaf: leaf * (1 + 1e-15 * signs.choice([-1, 1], leaf.shape)), each)
        for each in [parameters()] * 5
    ]
    return max(models.max_rel_error(jax.jit(fun)(params, ROWS), expected) for params in moved)


def emitted(run):
    """The collectives in the program, but those whose results nothing reads."""
    closed = jax.make_jaxpr(run)(parameters(), ROWS)
    values = [Value(var.aval) for var in closed.jaxpr.invars]
    return collectives_of(Flattener(SIZES).block(closed.jaxpr, values), SIZES, by_hand=False)


def facts_of(collectives):
    """Without trips: of what is the same in each iteration, the program's are those outside."""
    return Counter((one.kind, one.axes, one.bytes, one.operation) for one in collectives)


fixture_too = functools.partial(
    settings, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.ci
@given(programs, shardings_of_inputs())
@fixture_too(max_examples=15)
def test_any_program_can_be_sharded_in_any_way(x64, names, shardings):
    run, _ = on_shards(program(*names), shardings)
    jax.eval_shape(run, parameters(), ROWS)


@given(programs, shardings_of_inputs())
@fixture_too(max_examples=3)
def test_any_program_on_shards_computes_the_same(x64, names, shardings):
    assert_same(names, shardings)


@pytest.mark.slow
@given(programs, shardings_of_inputs())
@fixture_too(max_examples=300)
def test_many_programs_on_shards_compute_the_same(x64, names, shardings):
    assert_same(names, shardings)


ZERO3 = {
    "a": TensorSharding.of("data", "tensor"),
    "b": TensorSharding.of("tensor", "data"),
    "c": TensorSharding.of("data"),
}  # fmt: skip


@pytest.mark.ci
def test_each_operation_on_parameters_meets_rows(x64):
    """All of them beside each other, in one compiled program."""
    assert_same((sorted(ON_PARAMETERS), "product", "none", True), ZERO3)


def test_columns_of_a_transform_are_reduce_scattered(x64):
    """XLA's CPU compiler would lay its result out as the reduce-scatter wants it, and fail."""
    assert_same((["transform"], "regular", "none"), ZERO3)


def test_nothing_communicates_over_data_where_devices_turn_differently(x64):
    """One of them would wait for ever."""
    run, _ = on_shards(program([], "turns of its own", "none"), ZERO3)

    def inside(jaxpr, loop):
        for eqn in jaxpr.eqns:
            yield from [eqn.primitive.name] if loop else []
            for inner in inner_jaxprs(eqn):
                yield from inside(inner, loop or eqn.primitive.name == "while")

    found = set(inside(jax.make_jaxpr(run)(parameters(), ROWS).jaxpr, loop=False))
    assert "dot_general" in found
    assert "all_gather" not in found


@pytest.mark.parametrize(
    "on_rows", ["turns of each", *(pytest.param(n, marks=pytest.mark.slow) for n in ON_ROWS)]
)
def test_each_way_to_read_rows(x64, on_rows):
    assert_same(([], on_rows, "none"), ZERO3)
