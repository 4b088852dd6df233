"""Losses of all examples of a step: the steps are those by hand, whatever microbatches there are.

The loss by hand sees all examples at once, on one device. Four networks: one compares examples and
balances the load of its experts, one has model state and boundaries of stages, one has attention,
and one is a stack.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px

BATCH, TOKENS, WIDTH, EXPERTS, DEPTH = 16, 6, 8, 4, 4
RNG = np.random.default_rng(0)
ROWS = {
    "x": RNG.normal(size=(BATCH, TOKENS, WIDTH)),
    "y": RNG.normal(size=(BATCH, TOKENS, WIDTH)),
    "weight": RNG.uniform(0.5, 2, size=BATCH),
}
SIZES = (16, 13)
"""The second batch has fewer examples than rows."""
OPTIMIZER = optax.adam(1e-2)


def weight(batch):
    return batch["weight"]


def normal(key, *shape):
    return 0.3 * jax.random.normal(key, shape)


def dropped(x, keys):
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, x.shape[1:]))(keys)
    return jnp.where(kept, x, 0)


def compared(z, scale, mask):
    """Each example with all others, as in contrastive losses."""
    logits = jnp.where(mask, (z @ z.T) * scale[:, None], -1e9)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(mask)))


def balance(outputs, mask):
    scores = outputs["scores"]
    real = mask.astype(scores.dtype)[:, None] / mask.sum().astype(scores.dtype)
    load = (outputs["picked"].astype(scores.dtype) * real).sum(0)
    return EXPERTS * jnp.sum(load * (scores * real).sum(0)), load


def choices(scores):
    picked = jax.lax.top_k(scores, 2)[1]
    return jax.nn.one_hot(picked, EXPERTS, dtype=jnp.int32).sum((1, 2)), scores.mean(1)


# --- A mixture of experts whose examples are compared ---------------------------------------------


def init(key):
    keys = jax.random.split(key, 4)
    return {
        "in": normal(keys[0], WIDTH, WIDTH),
        "router": normal(keys[1], WIDTH, EXPERTS),
        "experts": normal(keys[2], EXPERTS, WIDTH, WIDTH),
        "out": normal(keys[3], WIDTH, WIDTH),
        "temperature": jnp.zeros(()),
    }


def mixture(params, x):
    best, which = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
    order = jnp.argsort(which.reshape(-1))
    sizes = jnp.bincount(which.reshape(-1), length=EXPERTS)
    y = jnp.tanh(jax.lax.ragged_dot(x[order // 2], params["experts"], sizes))
    return jnp.zeros_like(x).at[order // 2].add(y * best.reshape(-1)[order, None])


def outputs(params, batch, keys):
    x = dropped(jnp.tanh(batch["x"] @ params["in"]), keys)
    y = x + mixture(params, x.reshape(-1, WIDTH)).reshape(x.shape)
    picked, scores = choices(jax.nn.softmax(x @ params["router"]))
    return {
        "error": jnp.mean((y - batch["y"]) ** 2, (1, 2)),
        "picked": picked,
        "scores": scores,
        "z": (y @ params["out"]).mean(1),
        "scale": jnp.broadcast_to(jnp.exp(params["temperature"]), (len(y),)),
    }


def losses(outputs, batch, mask):
    comparison = compared(outputs["z"], outputs["scale"], mask)
    losses = outputs["error"] + 0.1 * balance(outputs, mask)[0] + comparison
    return losses, {"comparison": comparison}


MIXTURE = px.Task(init, px.over_batch(outputs, losses), weight=weight)


# --- A network with model state, and boundaries of stages -----------------------------------------


def init_with_bias(key):
    return init(key), {"bias": jnp.zeros(EXPERTS)}


def outputs_of_bias(params, state, batch, keys):
    x = px.pipeline.stage_boundary(jnp.tanh(batch["x"] @ params["in"]))
    scores = jax.nn.softmax(x @ params["router"]) + state["bias"][None, None]
    picked, means = choices(scores)
    y = jnp.einsum("bnd,edf,bne->bnf", x, params["experts"], scores)
    y = px.pipeline.stage_boundary(jnp.tanh(y)) @ params["out"]
    return {"error": jnp.mean((y - batch["y"]) ** 2, (1, 2)), "picked": picked, "scores": means}


def losses_of_bias(state, outputs, batch, mask):
    value, load = balance(outputs, mask)
    new = {"bias": state["bias"] + 0.1 * jnp.sign(load.mean() - load)}
    return outputs["error"] + 0.1 * value, {}, new


BIAS = px.Task(
    init_with_bias, px.over_batch(outputs_of_bias, losses_of_bias), weight=weight, stateful=True
)


# --- A stack --------------------------------------------------------------------------------------


def linear(key):
    return {"w": normal(key, WIDTH, WIDTH)}


def block(params, x, batch, keys):
    return x + dropped(jnp.tanh(x @ params["w"]), keys)


def head(params, x, batch, keys):
    z = x.mean(1) @ params["w"]
    return {"z": z, "error": jnp.mean((x - batch["y"]) ** 2, (1, 2))}


def losses_of_head(outputs, batch, mask):
    return outputs["error"] + compared(outputs["z"], jnp.ones(len(mask)), mask)


STACK = px.stack(
    embed=(linear, lambda params, batch, keys: batch["x"] @ params["w"]),
    block=(linear, block),
    head=(linear, px.over_batch(head, losses_of_head)),
    depth=DEPTH,
    predict=lambda params, x, inputs: x @ params["w"],
    weight=weight,
)


def stack_by_hand(params, batch, keys, mask):
    def folded(index):
        return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, index)

    x = batch["x"] @ params["embed"]["w"]
    for index in range(DEPTH):
        x = block({"w": params["blocks"]["w"][index]}, x, batch, folded(index))
    return losses_of_head(head(params["head"], x, batch, None), batch, mask)


# --- Attention, whose tokens are split ------------------------------------------------------------


def attended(params, batch, keys):
    q, k, v = (batch["x"] @ params[name] for name in ("in", "out", "value"))
    y = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k), axis=-1) @ v
    y = y + dropped(batch["x"], keys)
    picked, scores = choices(jax.nn.softmax(y @ params["router"]))
    return {
        "error": jnp.mean((y - batch["y"]) ** 2, (1, 2)),
        "picked": picked,
        "scores": scores,
        "tokens": y,
    }


def losses_of_tokens(outputs, batch, mask):
    z = outputs["tokens"].mean(1)
    return outputs["error"] + balance(outputs, mask)[0] + compared(z, jnp.ones(len(z)), mask)


def init_attention(key):
    return init(key) | {"value": normal(jax.random.fold_in(key, 1), WIDTH, WIDTH)}


ATTENTION = px.Task(init_attention, px.over_batch(attended, losses_of_tokens), weight=weight)


# --- Steps by hand --------------------------------------------------------------------------------


def mixture_by_hand(params, state, batch, keys, mask):
    return losses(outputs(params, batch, keys), batch, mask)[0], state


def bias_by_hand(params, state, batch, keys, mask):
    values, _, new = losses_of_bias(state, outputs_of_bias(params, state, batch, keys), batch, mask)
    return values, new


TASKS = {
    "mixture": (MIXTURE, mixture_by_hand),
    "bias": (BIAS, bias_by_hand),
    "attention": (
        ATTENTION,
        lambda p, state, batch, keys, mask: (
            losses_of_tokens(attended(p, batch, keys), batch, mask),
            state,
        ),
    ),
    "stack": (STACK, lambda p, state, *args: (stack_by_hand(p, *args), state)),
}


@functools.cache
def by_hand(name):
    """Losses, parameters and model state of steps on one device, all examples at once."""
    task, losses_fn = TASKS[name]
    start = px.compile(task, OPTIMIZER, px.Plan(), ROWS).init(seed=0)
    params, state, key = start.params, start.model_state, start.key
    opt_state, values = OPTIMIZER.init(params), []
    for step, size in enumerate(SIZES):
        batch = models.cut(ROWS, size)
        numbers = jnp.arange(size, dtype=jnp.int32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, step), numbers)
        mask = jnp.ones(size, bool)

        def mean(params, state=state, batch=batch, keys=keys, mask=mask):
            values, new = losses_fn(params, state, batch, keys, mask)
            return jnp.sum(values * batch["weight"]) / jnp.sum(batch["weight"]), new

        @jax.jit
        def stepped(params, opt_state, mean=mean):
            (value, new), grads = jax.value_and_grad(mean, has_aux=True)(params)
            updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
            return value, optax.apply_updates(params, updates), opt_state, new

        value, params, opt_state, state = stepped(params, opt_state)
        values.append(value)
    return jax.device_get((values, params, state))


BY_EXPERT = {"experts": ("tensor", None, None)}
BY_OWNER = {"experts": ("data", None, None)}
BY_COLUMN = {"blocks/w": (..., "tensor")}
ROUND = {
    "mixture": [
        {},
        {"data": 4},
        {"microbatches": 4},
        {"data": 2, "microbatches": 2},
        {"data": 4, "microbatches": 2, "zero": 1},
        {"data": 2, "microbatches": 4, "zero": 2, "remat": "dots"},
        {"data": 4, "microbatches": 4, "zero": 3, "remat": "full"},
        {"data": 2, "tensor": 4, "microbatches": 2, "shardings": BY_EXPERT, "zero": 1},
        {"tensor": 4, "microbatches": 4, "shardings": BY_EXPERT},
        {"data": 4, "microbatches": 2, "shardings": BY_OWNER},
    ],
    "bias": [
        {"microbatches": 4},
        {"data": 4, "microbatches": 2, "zero": 3},
        {"data": 2, "pipeline": 2, "microbatches": 4, "zero": 1},
        {"pipeline": 2, "microbatches": 2, "remat": "full"},
    ],
    "attention": [
        {"context": 2, "stream": 2, "microbatches": 4},
        {"data": 2, "context": 3, "stream": 2, "microbatches": 2, "zero": 3, "remat": "full"},
        {"data": 2, "context": 2, "context_strategy": "ring", "stream": 2, "microbatches": 2},
    ],
    "stack": [
        {"microbatches": 4, "zero": 3, "data": 2},
        {"data": 2, "pipeline": 2},
        {"pipeline": 4, "microbatches": 4, "remat": "full"},
        {"data": 2, "pipeline": 2, "microbatches": 4, "zero": 2, "schedule": "gpipe"},
        {"pipeline": 2, "stages": 4, "microbatches": 4, "schedule": "interleaved"},
        {"data": 2, "pipeline": 2, "tensor": 2, "microbatches": 2, "shardings": BY_COLUMN},
    ],
}
CASES = [(name, plan) for name, plans in ROUND.items() for plan in plans]


@pytest.mark.parametrize(("name", "plan"), CASES, ids=lambda case: str(case))
def test_steps_are_those_of_all_examples_at_once(x64, name, plan):
    program = px.compile(TASKS[name][0], OPTIMIZER, px.Plan(**plan), ROWS)
    state, values = program.init(seed=0), []
    for size in SIZES:
        state, metrics = program.step(state, models.cut(ROWS, size))
        values.append(metrics["loss"])
    last = jax.device_get(program.to_canonical(state))
    got = jax.device_get((values, last.params, last.model_state))
    assert models.max_rel_error(got, by_hand(name)) < 1e-10


def test_a_coupled_loss_is_that_of_each_microbatch(x64):
    task = px.Task(init, lambda *args: losses(outputs(*args[:3]), *args[1::2]), coupled=True)
    program = px.compile(task, OPTIMIZER, px.Plan(microbatches=4), ROWS)
    _, metrics = program.step(program.init(seed=0), ROWS)
    assert abs(metrics["loss"] - by_hand("mixture")[0][0]) > 1e-2


@pytest.mark.ci
def test_members_each_have_their_own(x64):
    plans = [px.Plan(), px.Plan(microbatches=4), px.Plan(member=2, data=2, microbatches=2)]
    values = []
    for plan in plans:
        program = px.compile(MIXTURE, OPTIMIZER, plan, ROWS, members=px.Members(2))
        _, metrics = program.step(program.init(), ROWS)
        values.append(np.asarray(metrics["loss"]))
    np.testing.assert_allclose(values[1], values[0], rtol=1e-12)
    np.testing.assert_allclose(values[2], values[0], rtol=1e-12)


@pytest.mark.parametrize(
    "plan",
    [ROUND["mixture"][3], ROUND["mixture"][6], {"data": 2, "pipeline": 2, "microbatches": 4}],
)
def test_what_is_planned_is_compiled(plan):
    task = STACK if "pipeline" in plan else MIXTURE
    program = px.compile(task, OPTIMIZER, px.Plan(**plan), ROWS)
    planned, compiled = collections.Counter(), collections.Counter()
    for counted, which in (
        (planned, program.planned_collectives()),
        (compiled, program.collectives()),
    ):
        for one in which:
            counted[one.kind, one.axes] += one.bytes * one.trips
    assert planned == compiled


def test_gradients_are_reduced_once_a_step():
    program = px.compile(MIXTURE, OPTIMIZER, px.Plan(data=2, microbatches=4), ROWS)
    assert all(one.trips == 1 for one in program.collectives())


def test_a_step_holds_the_activations_of_one_microbatch():
    wide = {name: np.repeat(x, 8, 0).astype(np.float32) for name, x in ROWS.items()}
    sizes = [
        px.compile(STACK, OPTIMIZER, px.Plan(microbatches=m), wide).memory().temporaries
        for m in (1, 8)
    ]
    assert sizes[1] < 0.35 * sizes[0]


def test_estimates_count_three_passes_by_the_schedule():
    """The outputs of a pipeline are computed by its forward passes, once more than of others."""
    plan, machine = px.Plan(pipeline=4, microbatches=8), px.Machine.preset("8xA100-80GB")
    alone = px.stack(
        embed=(linear, lambda params, batch, keys: batch["x"] @ params["w"]),
        block=(linear, block),
        head=(linear, lambda *args: head(*args)["z"].sum(1)),
        depth=DEPTH,
    )
    whole, other = (px.estimate(t, OPTIMIZER, plan, ROWS, machine) for t in (STACK, alone))
    assert whole.gradient.bubble > other.gradient.bubble
    assert 1.2 < whole.product_flops / other.product_flops < 1.4


@pytest.mark.ci
def test_low_precision_is_verified():
    plan = px.Plan(data=2, microbatches=4, precision="bfloat16")
    rows = jax.tree.map(np.float32, ROWS)
    assert px.verify(MIXTURE, OPTIMIZER, plan, rows).ok


def test_without_a_mask_each_device_has_all_rows_of_an_odd_batch():
    unmasked = px.over_batch(
        outputs, lambda o, batch, mask: losses(o, batch, jnp.ones(len(mask), bool))
    )
    task = px.Task(init, unmasked, weight=weight)
    program = px.compile(task, OPTIMIZER, px.Plan(data=4, microbatches=2), ROWS)
    with pytest.warns(px.errors.MaskWarning):
        _, metrics = program.step(program.init(seed=0), models.cut(ROWS, 13))
    alone = px.compile(task, OPTIMIZER, px.Plan(), models.cut(ROWS, 13))
    _, expected = alone.step(alone.init(seed=0), models.cut(ROWS, 13))
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
