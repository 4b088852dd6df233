"""What a compiled step communicates is what was planned, kind by kind and to the byte.

A new kind of model or plan is one line of `CASES`.
"""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from tests import models

import plurax as px
from plurax.hlo.compiled_collectives import TICKS, collectives, times_scope

WIDTH = 8
RNG = np.random.default_rng(0)
ROWS = {name: RNG.normal(size=(12, WIDTH)).astype(np.float32) for name in "xy"}
WORDS = {**ROWS, "word": RNG.integers(0, 30, 12)}
SEQUENCES = {name: RNG.normal(size=(12, 4, 16)).astype(np.float32) for name in "xy"}
TENSOR = {"blocks/hidden": (..., "tensor")}


def task(loss, **shapes):
    """A task with a loss `(params, batch) -> (B,)` and normal weights of these shapes."""

    def init(key):
        keys = jax.random.split(key, len(shapes))
        pairs = zip(shapes.items(), keys, strict=True)
        return {name: jax.random.normal(key, shape) * 0.3 for (name, shape), key in pairs}

    return px.Task(init=init, loss=lambda params, batch, keys: loss(params, batch))


def square():
    def loss(p, batch):
        return ((jnp.tanh(batch["x"] @ p["a"]) @ p["b"] - batch["y"]) ** 2).sum(1)

    return task(loss, a=(WIDTH, WIDTH), b=(WIDTH, WIDTH))


def complex_weights():
    def loss(p, batch):
        weight = jax.lax.complex(p["re"], p["im"])
        return (jnp.abs(batch["x"].astype(jnp.complex64) @ weight) ** 2).sum(1)

    real = task(loss, re=(WIDTH, 4), im=(WIDTH, 4))

    def init(key):
        return {"w": jax.lax.complex(*jax.random.normal(key, (2, WIDTH, 4)))}

    def of_complex(p, batch, keys):
        return real.loss({"re": p["w"].real, "im": p["w"].imag}, batch, keys)

    return px.Task(init=init, loss=of_complex)


def variational():
    def loss(p, batch):
        hidden = jax.nn.relu(batch["x"] @ p["encode"])
        mean, log = hidden @ p["mean"], hidden @ p["log"]
        out = jax.nn.relu((mean + jnp.exp(log) * batch["y"]) @ p["decode"]) @ p["out"]
        return ((out - batch["x"]) ** 2).sum(1) + (mean**2 + jnp.exp(2 * log) - log).sum(1)

    return task(
        loss, encode=(WIDTH, 32), mean=(32, WIDTH), log=(32, WIDTH), decode=(WIDTH, 32),
        out=(32, WIDTH),
    )  # fmt: skip


def attention():
    def loss(p, batch):
        x = batch["x"]
        q, k, v = ((x @ p[name]).reshape(*x.shape[:2], 2, -1) for name in "qkv")
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        return ((out @ p["o"] - batch["y"]) ** 2).sum((1, 2))

    return task(loss, **dict.fromkeys("qkvo", (16, 16)))


def physics():
    """The derivatives of a network are in its loss: one operation is traced many times."""

    def network(p, x):
        return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["out"]

    def residual(p, x):
        gradient = jax.grad(network, argnums=1)
        _, second = jax.jvp(lambda x: gradient(p, x), (x,), (jnp.ones_like(x),))
        return (second.sum() + network(p, x)) ** 2

    return task(
        lambda p, batch: jax.vmap(lambda x: residual(p, x))(batch["x"]),
        a=(WIDTH, WIDTH), b=(WIDTH, WIDTH), out=(WIDTH,),
    )  # fmt: skip


def embedding():
    """What a table meets are integers."""

    def loss(p, batch):
        return ((p["table"][batch["word"]] @ p["out"] - batch["y"]) ** 2).sum(1)

    return task(loss, table=(30, WIDTH), out=(WIDTH, WIDTH))


def meets_twice():
    """One equation after another reads the same parameter and the same value of the batch."""

    def loss(p, batch):
        x = batch["x"]
        transposed = jax.lax.dot_general(x, p["a"], (((1,), (1,)), ((), ())))
        return ((x @ p["a"] + jnp.tanh(transposed) @ p["b"] - batch["y"]) ** 2).sum(1)

    return task(loss, a=(WIDTH, WIDTH), b=(WIDTH, WIDTH))


def solve():
    """A factorization of a parameter, which no row changes."""

    def loss(p, batch):
        matrix = p["a"] + 4 * jnp.eye(WIDTH)
        return ((jnp.linalg.solve(matrix, (batch["x"] @ p["b"]).T).T - batch["y"]) ** 2).sum(1)

    return task(loss, a=(WIDTH, WIDTH), b=(WIDTH, WIDTH))


def strategy():
    """An operator that wants its weight in another sharding than the plan's."""

    def loss(p, batch):
        hidden = px.sharding.shard(jnp.matmul, strategy=((1, 2), (2, 1)))(batch["x"], p["a"])
        return ((hidden @ p["b"] - batch["y"]) ** 2).sum(1)

    return task(loss, a=(WIDTH, WIDTH), b=(WIDTH, WIDTH))


def exponential():
    """Products of a parameter with itself, branches that the parameter chooses, and a solve."""

    def loss(p, batch):
        return ((batch["x"] @ jax.scipy.linalg.expm(p["a"]) @ p["b"] - batch["y"]) ** 2).sum(1)

    return task(loss, a=(WIDTH, WIDTH), b=(WIDTH, WIDTH))


def by_platform():
    """On a CPU the derivative of a diagonal is a scatter, elsewhere a product."""

    def loss(p, batch, keys, mask):
        x, y = batch["x"] @ p["a"], batch["y"] @ p["b"]
        return jnp.diagonal(jax.nn.log_softmax(x @ y.T, axis=1))

    weights = task(loss, a=(WIDTH, WIDTH), b=(WIDTH, WIDTH))
    return px.Task(init=weights.init, loss=loss, coupled=True)


def scanned(depth=4, width=WIDTH):
    def loss(p, batch):
        def layer(h, w):
            return h + jnp.tanh(h @ w["a"]) @ w["b"], None

        x = jnp.broadcast_to(batch["x"][:, :1], (len(batch["x"]), width)).astype(p["a"].dtype)
        h, _ = jax.lax.scan(layer, x, p)
        return (h.astype(jnp.float32) ** 2).sum(1)

    return task(loss, a=(depth, width, width), b=(depth, width, width))


def until():
    """A loop whose number of iterations is data."""

    def loss(p, batch):
        def turn(carry):
            i, h = carry
            return i + 1, jnp.tanh(h @ jax.lax.stop_gradient(p["a"]))

        stop = (batch["x"] ** 2).mean() * 1e3
        x = jax.lax.stop_gradient(batch["x"])
        _, h = jax.lax.while_loop(lambda c: c[0] < stop, turn, (jnp.float32(0), x))
        return ((h @ p["b"] - batch["y"]) ** 2).sum(1)

    return task(loss, a=(WIDTH, WIDTH), b=(WIDTH, WIDTH))


def stack():
    return models.transformer_stack(depth=4, tied=False)


ZERO_3 = {"data": 3, "zero": 3}
STAGES = {"pipeline": 2, "microbatches": 4}
CASES = {
    "padded, zero 1": (square, ROWS, {"data": 3, "zero": 1}),
    "padded, zero 2": (square, ROWS, {"data": 3, "zero": 2, "microbatches": 2}),
    "padded, zero 3": (square, ROWS, ZERO_3),
    "padded, alone": (square, ROWS, {**ZERO_3, "bucket_bytes": 1}),
    "complex": (complex_weights, ROWS, ZERO_3),
    "variational": (variational, ROWS, ZERO_3),
    "attention": (attention, SEQUENCES, {**ZERO_3, "microbatches": 2}),
    "physics": (physics, ROWS, {"data": 2, "zero": 3}),
    "embedding": (embedding, WORDS, {**ZERO_3, "microbatches": 2}),
    "meets twice": (meets_twice, ROWS, {**ZERO_3, "bucket_bytes": 1}),
    "solve, accumulated": (solve, ROWS, {**ZERO_3, "microbatches": 2}),
    "strategy, accumulated": (
        strategy, ROWS, {"tensor": 2, "microbatches": 3, "shardings": {"a": (None, "tensor")}}
    ),
    "matrix exponential": (exponential, ROWS, {"data": 4, "zero": 3}),
    "by platform": (by_platform, ROWS, {"data": 2, "zero": 3}),
    "bfloat16": (square, ROWS, {**ZERO_3, "precision": "bfloat16"}),
    "bfloat16, scanned": (scanned, ROWS, {**ZERO_3, "precision": "bfloat16"}),
    "bfloat16, rematerialized": (
        scanned, ROWS, {**ZERO_3, "precision": "bfloat16", "remat": "full"}
    ),
    "reduced in bfloat16": (
        scanned, ROWS, {"data": 3, "zero": 2, "microbatches": 2, "reduce_dtype": "bfloat16"}
    ),
    "while": (until, ROWS, {"data": 2, "zero": 3}),
    "stages, tensor": (
        models.perceptron_stack, models.data(16), {**STAGES, "tensor": 2, "shardings": TENSOR}
    ),
    "stages, zero 3": (models.perceptron_stack, models.data(16), {**STAGES, "data": 2, "zero": 3}),
    "stages, split": (
        models.perceptron_stack, models.data(16),
        {**STAGES, "data": 2, "zero": 3, "schedule": "zb-h1"},
    ),
    "stages, interleaved": (
        models.perceptron_stack, models.data(16),
        {**STAGES, "data": 2, "zero": 3, "schedule": "interleaved"},
    ),
    "stages, reduced in bfloat16": (
        stack, models.text(16), {**STAGES, "data": 2, "zero": 1, "reduce_dtype": "bfloat16"},
    ),
    "stages, unequal": (
        models.perceptron_stack, models.data(16),
        {"pipeline": 3, "microbatches": 4, "data": 2, "zero": 3, "layers": (2, 6, 3)},
    ),
    "stages, language model": (
        stack, models.text(16), {**STAGES, "data": 2, "zero": 3, "precision": "bfloat16"}
    ),
}  # fmt: skip
SLOW = {
    "padded, zero 2",
    "padded, alone",
    "stages, zero 3",
    "stages, interleaved",
    "matrix exponential",
}


def counted(collectives):
    """Bytes by kind, axes and whether the number of trips is known, over all trips."""
    found = Counter()
    for one in collectives:
        kind = one.equivalent_kind or one.kind
        found[kind, one.axes, one.trips is None] += one.bytes * (one.trips or 1)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES]
)
def test_a_compiled_step_communicates_what_was_planned(name):
    make, batch, fields = CASES[name]
    program = px.compile(make(), optax.sgd(0.1), px.Plan(**fields), batch)
    found, planned = program.collectives(), program.planned_collectives()
    assert planned
    assert counted(found) == counted(planned)
    # None is merged with another, but for sums of numbers.
    assert len([c for c in found if c.bytes > 64]) == len([c for c in planned if c.bytes > 64])


def test_a_loss_is_added_up_over_rows_before_it_is_over_devices():
    """Each device computes a part of each example's loss; zeros have other readers, too."""

    def loss(p, batch):
        product = px.sharding.shard(jnp.matmul, strategy=((1, 1), (1, 2)))
        return jnp.sin(product(batch["x"], p["a"])).sum(1)

    program = px.compile(
        task(loss, a=(WIDTH, WIDTH)), optax.sgd(0.1), px.Plan(tensor=2), {"x": ROWS["x"]}
    )
    assert [c.bytes for c in program.planned_collectives() if c.kind == "all-reduce"] == [4]


@pytest.mark.parametrize(
    ("remat", "passes"),
    # What full rematerialization computes again reads what the gradient gathers anyway.
    [("none", 2), pytest.param("full", 2, marks=pytest.mark.slow)],
)
def test_bfloat16_and_zero_3_hold_no_whole_stack(remat, passes):
    """Temporaries grow by the shards of a gradient and of what is cast, and by no layer."""

    def program(depth):
        plan = px.Plan(data=8, zero=3, precision="bfloat16", remat=remat)
        return px.compile(scanned(depth, 128), optax.sgd(0.1), plan, cut(ROWS, 8))

    few, many = (program(depth).memory().temporaries for depth in (4, 16))
    shards = 12 * 2 * 128 * 128 * 4 // 8
    assert many - few < 2.5 * shards
    gathers = [c for c in program(4).collectives() if c.kind == "all-gather"]
    assert sum(c.bytes * c.trips for c in gathers) == passes * (4 * 2 * 128 * 128) * 2


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["reshaped", "transposed"])
def test_a_stack_that_each_layer_reads_in_another_form_is_not_held_whole(how, precision):
    """What follows row by row between a stack and its loop is done in the loop."""

    def program(depth, width=128):
        inner = (width * width,) if how == "reshaped" else (width, width)

        def loss(p, batch):
            flat = how == "reshaped"
            w = p["a"].reshape(depth, width, width) if flat else p["a"].swapaxes(1, 2)
            x = jnp.broadcast_to(batch["x"][:, :1], (len(batch["x"]), width)).astype(w.dtype)
            h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, w)
            return (h.astype(jnp.float32) ** 2).sum(1)

        plan = px.Plan(data=8, zero=3, precision=precision)
        return px.compile(task(loss, a=(depth, *inner)), optax.sgd(0.1), plan, cut(ROWS, 8))

    few, many = (program(depth).memory().temporaries for depth in (4, 16))
    assert many - few < 3 * 12 * 128 * 128 * 4 // 8


def cut(batch, count):
    return {name: leaf[:count] for name, leaf in batch.items()}


def test_a_head_computes_in_its_own_actions():
    """XLA moves none of its products in front of the action, where each tick would compute them."""
    rows, width, classes = 3, 4, 29
    task = px.stack(
        embed=(lambda key: jnp.ones((WIDTH, width)), lambda w, batch, keys: batch["x"] @ w),
        block=(lambda key: jnp.ones((width, width)), lambda w, x, batch, keys: jnp.tanh(x @ w)),
        head=(
            lambda key: jnp.ones((width, classes)),
            lambda w, x, batch, keys: jax.nn.logsumexp(x @ w, axis=1),
        ),
        depth=2,
    )
    program = px.compile(
        task, optax.sgd(0.1), px.Plan(pipeline=2, microbatches=4), cut(ROWS, 4 * rows)
    )
    bodies = re.split(r"\n}\n", program.hlo())
    ticks = [body for body in bodies if " collective-permute(" in body]
    products = [body for body in bodies if re.search(r" dot\(.*", body)]
    assert len(ticks) == 1
    assert any(f"[{rows},{classes}]" in body for body in products)
    assert not re.search(r" dot\(", ticks[0])


def test_trips_of_an_action_are_those_of_its_scope_while_it_is_in_it():
    """What stands in the loop over ticks itself runs in every tick, whatever its name.

    An operation that a compiler makes anew has the name of the loop around it: in an action it runs
    as often as the others there.
    """
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    name = f'metadata={{op_name="jit(step)/{TICKS}/while/body/{times_scope(6)}/gather"}}'
    anew = name.replace(f"/while/body/{times_scope(6)}", "")
    gather = "all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}"
    text = f"""
%action (c: (s32[])) -> (s32[]) {{
  %a = f32[8] {gather}, {name}
  %d = f32[4] {gather}, {anew}
}}
%tick (c: (s32[])) -> (s32[]) {{
  %b = f32[16] {gather}, {name}
  %e = f32[2] {gather}, {anew}
  %w = (s32[]) while(%t), condition=%c, body=%action, metadata={{op_name="{TICKS}/while/body"}}
}}
ENTRY %main (c: (s32[])) -> (s32[]) {{
  %w = (s32[]) while(%t), condition=%c, body=%tick, metadata={{op_name="jit(step)/{TICKS}/while"}}, backend_config={{"known_trip_count":{{"n":"10"}}}}
}}
"""  # noqa: E501
    trips = {c.bytes: c.trips for c in collectives(text, mesh)}
    assert trips == {64: 10, 8: 10, 32: 6, 16: 6}
