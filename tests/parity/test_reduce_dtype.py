"""Gradients that are added up over devices in bfloat16 are those of a step written by hand.

By hand: the batch is cut into the devices' rows, each device's gradient is rounded to bfloat16,
the rounded ones are added up, and the sum is rounded.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px
from plurax import tree
from plurax.execute import early_reduction

LAYERS, WIDTH, ROWS, STEPS = 4, 8, 24, 3
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


def init_embed(key):
    return {"table": jax.random.normal(key, (WIDTH, WIDTH)) / 3}


def init_block(key):
    dtype = jnp.ones(()).dtype
    up, down = models.normals(key, dtype, (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))
    return {"up": up / 3, "down": down / 3, "gain": jnp.ones(WIDTH)}


def init_head(key):
    return {"out": jax.random.normal(key, (WIDTH, 4)), "scale": jnp.ones(())}


def embed(params, batch, keys=None):
    return batch["x"] @ params["table"]


def block(params, x, batch=None, keys=None):
    return x + jnp.tanh(x @ params["up"]) @ params["down"] * params["gain"][None]


def head(params, x, batch, keys=None):
    # The table a second time, as in a language model; `tied` puts it among the head's parameters.
    y = x @ params["table"] @ params["out"] * params["scale"]
    return jnp.sum((y - batch["y"]) ** 2, axis=1)


def task(**more):
    return px.stack(
        (init_embed, embed), (init_block, block), (init_head, head), LAYERS, tied=["table"],
        weight=lambda batch: batch["weight"], **more,
    )  # fmt: skip


def examples(rows=ROWS):
    return models.weighted(rows, WIDTH, 4)


def bfloat16(array):
    """Round to the nearest of bfloat16, of two the even one. NumPy rounds float64 to float32 first,
    which makes ties of what is none: 42.8749981 becomes 42.875 and 43, not 42.75."""
    bits = np.asarray(array, np.float64).view(np.uint64)
    dropped = np.uint64(52 - 7)  # of the mantissa
    odd = bits >> dropped & np.uint64(1)
    bits = bits + (np.uint64(2**44 - 1) + odd)
    return (bits >> dropped << dropped).view(np.float64)


@jax.jit
def gradient(params, batch):
    """The gradient of the weighted sum, in two parts which together are all of it.

    The first has that of the table's first use, the second that of its other use.
    """

    def loss(params, table):
        x = embed(params["embed"], batch)
        for number in range(LAYERS):
            x = block(jax.tree.map(lambda leaf, at=number: leaf[at], params["blocks"]), x)
        losses = head({**params["head"], "table": table}, x, batch)
        return jnp.sum(losses * batch["weight"])

    first, table = jax.grad(loss, (0, 1))(params, params["embed"]["table"])
    none = jax.tree.map(jnp.zeros_like, first)
    return first, {**none, "embed": {"table": table}}


def mean_gradient(params, batch, plan, round_):
    """Of a batch, as the devices of a plan add it up."""
    each = ROWS // (plan.data * plan.microbatches)
    grads = []
    for first in range(0, ROWS, each):
        rows = jax.tree.map(lambda leaf, at=first: leaf[at : at + each], batch)
        grads += gradient(params, rows)

    def added(path, *leaves):
        parts = np.stack([np.asarray(leaf) for leaf in leaves])
        parts = parts.reshape(plan.data, plan.microbatches, 2, *parts.shape[1:])
        if tree.path_name(path) not in apart(plan):
            parts = parts.sum(2, keepdims=True)
        if plan.zero < 2 or parts.ndim == 3:  # a number is not split
            return round_(round_(parts.sum(1)).sum((0, 1)))
        # Each microbatch's is added up over devices, of two stages each by itself.
        return round_(round_(parts).sum(0)).sum((0, 1))

    sums = jax.tree.map_with_path(added, *grads)
    return jax.tree.map(lambda leaf: leaf / float(batch["weight"].sum()), sums)


def apart(plan):
    """Parameters whose gradient two devices have parts of, beside those along `data`."""
    return {"embed/table"} if plan.pipeline > 1 else set()


def by_hand(params, batch, plan, round_=bfloat16):
    state = OPTIMIZER.init(params)
    for _ in range(STEPS):
        grads = mean_gradient(params, batch, plan, round_)
        updates, state = OPTIMIZER.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


MEGATRON = {"blocks/up": (..., "tensor"), "blocks/down": (..., "tensor", None)}
TENSOR = {"tensor": 2, "shardings": MEGATRON}
PLANS = {
    "data": px.Plan(data=4),
    "microbatches": px.Plan(data=2, microbatches=3),
    "zero 1": px.Plan(data=4, zero=1, microbatches=2),
    "zero 2": px.Plan(data=3, zero=2, microbatches=2),
    "zero 3": px.Plan(data=4, zero=3, microbatches=2),
    "zero 3, each tensor by itself": px.Plan(data=4, zero=3, bucket_bytes=1, remat="full"),
    "tensor": px.Plan(data=2, microbatches=2, **TENSOR),
    "tensor, zero 1": px.Plan(data=2, zero=1, **TENSOR),
    "tensor, zero 3": px.Plan(data=2, zero=3, **TENSOR),
    "pipeline": px.Plan(data=2, pipeline=2, microbatches=4),
    "pipeline, zero 1": px.Plan(data=2, pipeline=2, microbatches=2, zero=1),
    "pipeline, zero 2": px.Plan(data=2, pipeline=2, microbatches=2, zero=2),
    "pipeline that splits B and W": px.Plan(
        data=2, pipeline=2, microbatches=4, schedule="zb-h1", zero=2
    ),
    "pipeline, tensor": px.Plan(data=2, pipeline=2, microbatches=2, **TENSOR),
    "one device": px.Plan(microbatches=2),
}


def compiled(plan):
    plan = dataclasses.replace(plan, reduce_dtype="bfloat16")
    return px.compile(task(), OPTIMIZER, plan, examples())


@functools.cache
def compiled_once(name):
    return compiled(PLANS[name])


def trained(program, rows):
    """The parameters at the start, and after some steps under a plan."""
    state = program.init(seed=0)
    start = jax.tree.map(jnp.array, program.to_canonical(state).params)
    for _ in range(STEPS):
        state, _ = program.step(state, examples(rows))
    return start, program.to_canonical(state).params


def check(plan, rows, params, start):
    round_ = bfloat16 if plan.data > 1 else np.asarray
    wanted = tree.named_leaves(by_hand(start, examples(rows), plan, round_))
    for path, leaf in tree.named_leaves(params).items():
        np.testing.assert_allclose(leaf, wanted[path], rtol=1e-10, atol=1e-12, err_msg=path)


@pytest.mark.parametrize("rows", [ROWS, ROWS - 3])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.usefixtures("x64")
def test_a_step_is_that_by_hand(name, rows):
    start, params = trained(compiled_once(name), rows)
    check(PLANS[name], rows, params, start)


EARLY = {
    "data": px.Plan(data=4),
    "microbatches": px.Plan(data=2, microbatches=3, remat="full"),
    "zero 1": px.Plan(data=4, zero=1, microbatches=3),
    "tensor": px.Plan(data=2, microbatches=3, **TENSOR),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", EARLY)
@pytest.mark.usefixtures("x64")
def test_gradients_reduced_in_the_backward_pass_are_those_by_hand(name, monkeypatch):
    monkeypatch.setattr(early_reduction, "PLATFORMS", frozenset({"cpu"}))
    start, params = trained(compiled(EARLY[name]), ROWS)
    check(EARLY[name], ROWS, params, start)


HYPER = {"rate": [1e-1, 1e-2, 1e-3]}


@pytest.mark.ci
@pytest.mark.parametrize(
    "plan",
    [
        px.Plan(data=2, microbatches=2),
        px.Plan(data=2, member=3, zero=3),
        px.Plan(data=2, pipeline=2, microbatches=2, chunk=2),
    ],
)
@pytest.mark.usefixtures("x64")
def test_members_are_those_by_hand(plan):
    members = px.Members(3, hyper=HYPER)
    plan = dataclasses.replace(plan, reduce_dtype="bfloat16")
    program = px.compile(
        lambda hyper: task(), lambda hyper: optax.sgd(hyper["rate"]), plan, examples(),
        members=members,
    )  # fmt: skip
    state = program.init()
    start = jax.device_get(program.to_canonical(state).params)
    state, _ = program.step(state, examples())
    found = jax.device_get(program.to_canonical(state).params)
    for member in range(3):
        rate = float(members.hyper_of(member)["rate"])
        params = jax.tree.map(lambda leaf, at=member: leaf[at], start)
        grads = mean_gradient(params, examples(), plan, bfloat16)
        wanted = jax.tree.map(lambda p, g, rate=rate: p - rate * g, params, grads)
        for path, leaf in tree.named_leaves(wanted).items():
            own = tree.named_leaves(found)[path][member]
            np.testing.assert_allclose(own, leaf, rtol=1e-10, atol=1e-12, err_msg=path)


def normed(params, batch, mask):
    """A loss whose examples see each other: of each device by its own copy of the parameters."""
    parts = zip(jnp.split(batch["x"], len(params)), params, strict=True)
    hidden = jnp.concatenate([x @ w for x, w in parts])
    mean = jnp.where(mask[:, None], hidden, 0).sum(0) / mask.sum().astype(hidden.dtype)
    return jnp.sum((jnp.tanh(hidden - mean[None]) - batch["y"][:, :1]) ** 2, axis=1)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.usefixtures("x64")
def test_a_loss_that_couples_examples_is_that_by_hand(zero):
    coupled = px.Task(
        init=lambda key: jax.random.normal(key, (WIDTH, WIDTH)),
        loss=lambda w, batch, keys, mask: normed([w], batch, mask),
        coupled=True,
    )
    plan = px.Plan(data=4, zero=zero, reduce_dtype="bfloat16")
    program = px.compile(coupled, optax.sgd(1.0), plan, examples())
    state = program.init()
    start = jnp.array(program.to_canonical(state).params)
    state, _ = program.step(state, examples())
    mask = jnp.ones(ROWS, bool)
    grads = jax.grad(lambda copies: normed(copies, examples(), mask).sum())([start] * 4)
    wanted = start - bfloat16(sum(map(bfloat16, grads))) / ROWS
    found = program.to_canonical(state).params
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.ci
@pytest.mark.parametrize(
    "plan", [px.Plan(data=4), px.Plan(data=4, zero=1), px.Plan(data=2, pipeline=2, microbatches=2)]
)
@pytest.mark.parametrize("platforms", [set(), {"cpu"}])
def test_only_gradients_are_rounded(plan, platforms, monkeypatch):
    """Not the loss, nor the weight, nor a metric of the evaluation."""
    monkeypatch.setattr(early_reduction, "PLATFORMS", platforms)

    def metrics(dtype):
        program = px.compile(
            task(), OPTIMIZER, dataclasses.replace(plan, reduce_dtype=dtype), examples()
        )
        state = program.init()
        step = program.step(state, examples())[1]
        return step, program.evaluate(program.init(), examples())

    (step, evaluated), (other, others) = metrics("bfloat16"), metrics(None)
    assert step["grad_norm"] != other["grad_norm"]
    for name in ("loss", "weight"):
        assert step[name] == other[name], name
    assert evaluated == others


DTYPES = {"float32": True, "bfloat16": False, "float16": False, "complex64": False}


@pytest.mark.parametrize(("dtype", "rounded"), DTYPES.items())
@pytest.mark.parametrize("zero", [2, 3])
def test_which_gradients_are_rounded(dtype, rounded, zero):
    """Those of float32 and float64, as each microbatch gives them to the devices."""

    def loss(w, batch, keys):
        return jnp.abs(batch["x"].astype(dtype) @ w).astype(jnp.float32).sum(1) ** 2

    numbers = np.random.default_rng(0).normal(size=(WIDTH, 4)).astype(np.float32)
    weights = px.Task(init=lambda key: jnp.asarray(numbers, dtype), loss=loss)

    def text(reduce_dtype):
        plan = px.Plan(data=2, zero=zero, reduce_dtype=reduce_dtype)
        return px.compile(weights, optax.sgd(0.1), plan, examples()).hlo()

    assert ("reduce-precision(" in text("bfloat16")) is rounded
    assert "reduce-precision(" not in text(None)


@pytest.mark.parametrize("name", ["data", "zero 1", "zero 3", "pipeline", "tensor, zero 3"])
def test_a_cpu_rounds_before_and_after_and_sends_float32(name):
    """XLA's CPU compiler adds up nothing in bfloat16; kinds, places and bytes stay as they were."""

    def program(dtype):
        plan = dataclasses.replace(PLANS[name], reduce_dtype=dtype)
        return px.compile(task(), OPTIMIZER, plan, examples())

    rounding, exact = program("bfloat16"), program(None)
    assert rounding.collectives() == exact.collectives()
    assert rounding.planned_collectives() == exact.planned_collectives()
    text = rounding.hlo()
    assert "exponent_bits=8, mantissa_bits=7" in text
    assert "bf16[" not in text
    assert "reduce-precision(" not in exact.hlo()
