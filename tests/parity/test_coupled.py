"""Losses that couple examples, split over devices, compute what a step by hand computes."""

import dataclasses
import functools
import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given
from tests import models
from tests.draws import draws

import plurax as px
from plurax.execute.array_data import ArrayData
from plurax.execute.initial_state import new_state
from plurax.execute.mask import reads_mask

LARGEST = 13  # no multiple of anything
MLP = {"hidden": (None, "tensor"), "bias": ("tensor",), "out": ("tensor", None)}


def optimizer():
    return optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2))


def balanced_experts(dtype=jnp.float64):
    """A mixture of experts, its load balanced over the batch, with noise in the choice of each."""
    experts = 4

    def init(key):
        keys = jax.random.split(key, 3)
        return {
            "router": jax.random.normal(keys[0], (models.FEATURES, experts), dtype),
            "in": jax.random.normal(keys[1], (experts, models.FEATURES, 6), dtype),
            "out": jax.random.normal(keys[2], (experts, 6, models.CLASSES), dtype),
        }

    def loss(params, batch, keys, mask):
        noise = jax.vmap(lambda key: jax.random.normal(key, (experts,), dtype))(keys)
        scores = jax.nn.softmax(batch["x"] @ params["router"] + 0.1 * noise)
        chosen = jax.nn.one_hot(jnp.argmax(scores, 1), experts, dtype=dtype)
        real = mask.astype(dtype)[:, None]
        load = (chosen * real).sum(0) / real.sum()
        importance = (scores * real).sum(0) / real.sum()
        hidden = jnp.tanh(jnp.einsum("bf,efh->beh", batch["x"], params["in"]))
        logits = jnp.einsum("beh,ehc,be->bc", hidden, params["out"], scores * chosen)
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return entropy + 0.1 * experts * (load * importance).sum(), {"top": scores.max(1)}

    return px.Task(init=init, loss=loss, coupled=True)


def staged(dtype=jnp.float64):
    """Batch statistics in each of three stages, then each example against all others."""

    def init(key):
        keys = jax.random.split(key, 3)
        shapes = ((models.FEATURES, 8), (8, 6), (6, 4))
        return [jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True)]

    def loss(params, batch, keys, mask):
        x, real = batch["x"], mask[:, None]
        for number, weight in enumerate(params):
            x = x @ weight
            mean = jnp.where(real, x, 0).sum(0) / mask.sum().astype(dtype)
            x = jnp.tanh(x - mean[None])
            if number < 2:
                x = px.pipeline.stage_boundary(x)
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (4,)))(keys)
        x = jnp.where(kept, x, 0)
        near = jnp.where(mask[None, :], x @ x.T, -jnp.inf)
        return jax.nn.logsumexp(near, axis=1) - 0.5 * (x * x).sum(1), {"size": (x * x).sum(1)}

    return px.Task(init=init, loss=loss, coupled=True)


def running(dtype=jnp.float64):
    """Running statistics in each of four stages, which the next microbatch's values depend on."""
    widths = (models.FEATURES, 8, 6, 8, 4)

    def init(key):
        keys = jax.random.split(key, 4)
        params = [
            0.6 * jax.random.normal(k, shape, dtype)
            for k, shape in zip(keys, itertools.pairwise(widths), strict=True)
        ]
        norms = [{"mean": jnp.zeros(n, dtype), "var": jnp.ones(n, dtype)} for n in widths[1:]]
        # Of no parameter; of nothing; the same for ever, in all stages.
        state = {"norms": norms, "input": jnp.zeros(widths[0], dtype),
                 "seen": jnp.zeros((), jnp.int32), "scale": jnp.full((), 1.1, dtype)}  # fmt: skip
        return params, state

    def layers(params, state, x, mask):
        new = []
        for number, (weight, old) in enumerate(zip(params, state["norms"], strict=True)):
            x = x @ weight
            real, count = mask[:, None], mask.sum().astype(dtype)
            mean = jnp.where(real, x, 0).sum(0) / count
            var = jnp.where(real, (x - mean[None]) ** 2, 0).sum(0) / count
            new.append({"mean": 0.9 * old["mean"] + 0.1 * mean,
                        "var": 0.8 * old["var"] + 0.2 * var})  # fmt: skip
            # The backward pass needs what the forward pass read, and not what it wrote. A lone
            # example has a gradient.
            x = x - 0.8 * mean[None] - 0.1 * old["mean"][None]
            x = state["scale"] * jnp.tanh(x * jax.lax.rsqrt(old["var"] + 1e-3)[None])
            if number < 3:
                x = px.pipeline.stage_boundary(x)
        return x, new

    def loss(params, state, batch, keys, mask):
        count = mask.sum()
        first = jnp.where(mask[:, None], batch["x"], 0).sum(0) / count.astype(dtype)
        x, norms = layers(params, state, batch["x"] - state["input"][None], mask)
        seen = state["seen"] + count.astype(jnp.int32)
        first = 0.9 * state["input"] + 0.1 * first
        new = {"norms": norms, "input": first, "seen": seen, "scale": state["scale"]}
        entropy = optax.softmax_cross_entropy_with_integer_labels(x, batch["y"])
        return entropy, {"top": x.max(-1)}, new

    def predict(params, state, inputs):
        x = inputs["x"] - state["input"][None]
        for number, (weight, old) in enumerate(zip(params, state["norms"], strict=True)):
            x = x @ weight - old["mean"][None]
            x = jnp.tanh(x * jax.lax.rsqrt(old["var"] + 1e-3)[None])
            x = px.pipeline.stage_boundary(x) if number < 3 else x
        return state["scale"] * x

    def score(params, state, batch):
        x = predict(params, state, batch)
        return optax.softmax_cross_entropy_with_integer_labels(x, batch["y"])

    return px.Task(
        init=init, loss=loss, predict=predict, evaluate=score, coupled=True, stateful=True
    )


# name: the task, and the rules by which it can be split.
TASKS = {
    "normed": (models.normed_task, MLP),
    "contrastive": (models.contrastive_task, MLP),
    "experts": (
        balanced_experts,
        {"in": ("tensor",), "out": ("tensor",), "router": (None, "tensor")},
    ),
    "staged": (staged, {"0": (None, "tensor"), "1": ("tensor",)}),
    "running": (running, {"0": (None, "tensor"), "1": ("tensor",)}),
}


@functools.cache
def example(name):
    return TASKS[name][0](dtype=jnp.float64), models.data(LARGEST, dtype=np.float64)


def unmasked(name, dtype=jnp.float32):
    """The task with a loss that takes its mask and does not read it, as most code is written."""
    task = TASKS[name][0](dtype=dtype)

    def loss(*args):
        *given, mask = args
        return task.loss(*given, jnp.ones(mask.shape, bool))

    return dataclasses.replace(task, loss=loss)


def by_hand(task, batch, sizes, microbatches, seed=3):
    """Steps that use nothing of plurax: the gradient of the loss over exactly the real rows."""
    init_key, run_key = jax.random.split(jax.random.key(seed))
    first = task.init(init_key)
    params, model_state = first if task.stateful else (first, ())
    rule, said = optimizer(), []
    opt_state = rule.init(params)

    def total(params, model_state, rows, keys):
        states = (model_state,) if task.stateful else ()
        out = task.loss(params, *states, rows, keys, jnp.ones(len(keys), bool))
        out = out if isinstance(out, tuple) else (out, {})
        metrics = {name: value.sum() for name, value in out[1].items()}
        return out[0].sum(), (metrics, out[2] if task.stateful else ())

    @jax.jit
    def part(params, model_state, rows, keys):
        return jax.value_and_grad(total, has_aux=True)(params, model_state, rows, keys)

    @jax.jit
    def update(sums, opt_state, params, size):
        loss, metrics, grads = jax.tree.map(lambda x: x / size, sums)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        updates, opt_state = rule.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, (loss, metrics, norm)

    for step, size in enumerate(sizes):
        now = jax.random.fold_in(run_key, step)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(now, jnp.arange(size))
        sums = None
        for m in range(min(microbatches, size)):
            rows = jax.tree.map(lambda leaf, m=m, n=size: leaf[m:n:microbatches], batch)
            (loss, (metrics, model_state)), grads = part(
                params, model_state, rows, keys[m::microbatches]
            )
            one = (loss, metrics, grads)
            sums = one if sums is None else jax.tree.map(jnp.add, sums, one)
        params, opt_state, now = update(sums, opt_state, params, size)
        said.append(now)
    return jax.device_get((params, opt_state, model_state, said))


SIZES = (LARGEST, 10, 1)


@functools.cache
def expected(name, microbatches):
    return by_hand(*example(name), SIZES, microbatches)


def trained(task, batch, plan, sizes):
    program = px.compile(task, optimizer(), plan, batch)
    state, said = program.init(seed=3), []
    for size in sizes:
        state, metrics = program.step(state, models.cut(batch, size))
        own = {key: metrics[key] for key in metrics if key in ("top", "size")}
        said.append((metrics["loss"], own, metrics["grad_norm"]))
    state = program.to_canonical(state)
    return jax.device_get((state.params, state.opt_state, state.model_state, said))


def check(name, plan):
    got = trained(*example(name), plan, SIZES)
    assert models.max_rel_error(got, expected(name, plan.microbatches)) < 1e-10, plan


@st.composite
def plans(draw, name):
    data, tensor = draw(st.sampled_from([(1, 2), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2)]))
    return px.Plan(
        data=data,
        tensor=tensor,
        zero=draw(st.integers(0, 3)),
        microbatches=draw(st.sampled_from([1, 3])),
        remat=draw(st.sampled_from(["none", "dots", "full"])),
        shardings=TASKS[name][1] if tensor > 1 else {},
    )


PLANS = {
    "zero 1": {"data": 4, "zero": 1},
    "zero 2": {"data": 2, "zero": 2, "microbatches": 3},
    "zero 3": {"data": 3, "zero": 3},
    "tensor": {"tensor": 2},
    "remat": {"data": 2, "remat": "full"},
    "everything": {"data": 2, "tensor": 2, "zero": 3, "microbatches": 3, "remat": "dots"},
}


FEW = {  # of all pairs
    ("normed", "zero 2"), ("normed", "everything"), ("contrastive", "zero 3"),
    ("experts", "tensor"),
}  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if (name, kind) in FEW else pytest.mark.slow)
        for name in TASKS
        for kind in PLANS
    ],
)
def test_every_parallelism(x64, name, kind):
    rules = TASKS[name][1] if "tensor" in PLANS[kind] else {}
    check(name, px.Plan(**PLANS[kind], shardings=rules))


STAGES = {
    "all at once": {"pipeline": 3, "data": 2, "zero": 3, "schedule": "zb-h1"},
    "tensor": {"pipeline": 3, "tensor": 2, "remat": "full"},
    "zero 2": {"pipeline": 3, "data": 2, "zero": 2, "schedule": "gpipe"},
    "data": {"pipeline": 3, "data": 2},
    "remat": {"pipeline": 2, "data": 2, "zero": 1, "remat": "full"},
    "dots": {"pipeline": 2, "zero": 1, "remat": "dots"},
    "by hand": {"pipeline": 2, "schedule": ["F0 F1 F2 B0 B1 B2", "F0 F1 B1 F2 B2 B0"]},
}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(
            name, kind,
            marks=[] if (name, kind) in {("staged", "all at once"), ("running", "remat")}
            else pytest.mark.slow,
        )
        for name in ("staged", "running")
        for kind in STAGES
    ],
)  # fmt: skip
def test_stages(x64, name, kind):
    """The last batch is a lone example: the microbatches without one are left out."""
    axes = STAGES[kind]
    rules = TASKS[name][1] if "tensor" in axes else {}
    check(name, px.Plan(microbatches=3, shardings=rules, **axes))


@pytest.mark.slow
def test_model_state_of_several_stages_on_a_device(x64):
    """Each of them works on another microbatch."""
    task, batch = example("running")
    plan = px.Plan(pipeline=2, stages=4, schedule="interleaved", microbatches=4)
    expected = by_hand(task, batch, SIZES, 4)
    assert models.max_rel_error(trained(task, batch, plan, SIZES), expected) < 1e-10


@pytest.mark.ci
@pytest.mark.parametrize(
    "plans",
    [
        (px.Plan(pipeline=2, microbatches=2), px.Plan(data=2, zero=1, microbatches=2)),
        pytest.param(
            (
                px.Plan(data=2, zero=3, microbatches=2),
                px.Plan(pipeline=2, stages=4, schedule="interleaved", microbatches=2),
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_model_state_under_another_plan(x64, tmp_path, plans):
    """Trained under one, resumed under the other; then evaluated and predicted."""
    task, batch = example("running")
    rule, batch = optimizer(), models.cut(batch, 8)

    def fit(plan, epochs, **how):
        return px.fit(task, rule, batch, plan=plan, epochs=epochs, batch_size=5, progress=False,
                      **how)  # fmt: skip

    def found(program, state):
        outputs = program.evaluate(state, batch), program.predict(state, {"x": batch["x"]})
        return jax.device_get((state.params, state.model_state, *outputs))

    rows = ArrayData(batch, 5)
    alone = px.compile(task, rule, px.Plan(microbatches=2), rows.example_batch())
    turns = px.train.train_iter(alone, alone.init(0), rows, epochs=2)
    after = {turn.step: found(alone, turn.state) for turn in turns}
    for number, plan in enumerate(plans):
        got = fit(plan, number + 1, output=tmp_path, resume=number > 0)
        expected = after[(number + 1) * rows.batches_per_epoch]
        assert models.max_rel_error(found(got.program, got.state), expected) < 1e-10


@pytest.mark.slow
def test_members_with_model_state_in_stages(x64):
    task, batch = example("running")

    def run(plan):
        program = px.compile(task, optimizer(), plan, batch, members=px.Members(3))
        state = program.init()
        for size in SIZES:
            state, _ = program.step(state, models.cut(batch, size))
        kept = program.to_canonical(state)
        return jax.device_get((kept.params, kept.model_state, program.evaluate(state, batch)))

    alone = run(px.Plan(chunk=3, batch_dim="major", microbatches=3))
    for plan in (
        px.Plan(pipeline=2, microbatches=3, chunk=3),
        px.Plan(member=2, data=2, pipeline=2, microbatches=3, chunk=1, zero=1),
    ):
        assert models.max_rel_error(run(plan), alone) < 1e-10


def counting(read):
    """Two stages and a counter, of which `read(state, x, number)` makes something in each."""

    def loss(params, state, batch, keys, mask):
        x = batch["x"]
        for number, weight in enumerate(params):
            x = read(state, jnp.tanh(x @ weight), number)
            if number == 0:
                x = px.pipeline.stage_boundary(x)
        real = mask.astype(x.dtype)
        state = {"seen": state["seen"] + real.sum(), "mean": state["mean"] + x.mean() * real[0]}
        return x.sum(1) * real, {}, state

    def init(key):
        return [jnp.ones((models.FEATURES, 4)), jnp.ones((4, 3))], {
            "seen": jnp.zeros(()), "mean": jnp.zeros(()),
        }  # fmt: skip

    return px.Task(init=init, loss=loss, coupled=True, stateful=True)


@pytest.mark.parametrize(
    ("read", "match"),
    [
        (lambda state, x, number: x / state["seen"],
         "state 'seen' is written by stage 0 and read by stages 0 and 1. Stages work on several"),
        (lambda state, x, number: x + (state["mean"] if number == 0 else 0),
         "state 'mean' is written by stage 1 and read by stages 0 and 1. Stages work on several"),
    ],
)  # fmt: skip
def test_model_state_of_several_stages(read, match):
    with pytest.raises(px.errors.PlanError, match=match):
        px.compile(counting(read), optimizer(), px.Plan(pipeline=2), models.data(8))


def spectral():
    """The last stage divides its weights by their norm, which is kept and never read.

    In the tree it stands before the vector that it is computed from and that is read.
    """

    def init(key):
        first, second = jax.random.split(key)
        params = [
            jax.random.normal(first, (models.FEATURES, 6), jnp.float64),
            jax.random.normal(second, (6, models.CLASSES), jnp.float64),
        ]
        return params, {"norm": jnp.ones(()), "vector": jnp.ones(models.CLASSES)}

    def loss(params, state, batch, keys, mask):
        x = px.pipeline.stage_boundary(jnp.tanh(batch["x"] @ params[0]))
        left = params[1] @ state["vector"]
        right = left @ params[1]
        vector = jax.lax.stop_gradient(right / jnp.linalg.norm(right))
        norm = jnp.linalg.norm(params[1] @ vector)
        entropy = optax.softmax_cross_entropy_with_integer_labels(
            x @ (params[1] / norm), batch["y"]
        )
        return entropy, {}, {"norm": norm, "vector": vector}

    return px.Task(init=init, loss=loss, coupled=True, stateful=True)


def test_model_state_that_no_stage_reads(x64):
    task, batch = spectral(), models.data(LARGEST, dtype=np.float64)
    plan = px.Plan(pipeline=2, microbatches=2)
    got = trained(task, batch, plan, (LARGEST, 10))
    assert models.max_rel_error(got, by_hand(task, batch, (LARGEST, 10), 2)) < 1e-10


def test_model_state_needs_forwards_in_order():
    lines = ["F0 F2 F1 B0 B1 B2", "F0 F2 F1 B0 B1 B2"]
    plan = px.Plan(pipeline=2, microbatches=3, schedule=lines)
    task = counting(lambda state, x, number: x)
    with pytest.raises(
        px.errors.PlanError, match="device 0 the schedule has F2 before F1, and model"
    ):
        px.compile(task, optimizer(), plan, models.data(9))


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
@given(st.data())
@draws(8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_plan(x64, name, data):
    check(name, data.draw(plans(name)))


@pytest.mark.ci
def test_operations_along_the_rows(x64):
    """Two views joined, turned, sorted and summed along the rows, pooled, and a grouped kernel."""

    def init(key):
        kernel = jax.random.normal(key, (3, 3, 1, 6))
        return {"kernel": kernel, "out": jnp.eye(6, 4), "temperature": jnp.ones(())}

    def view(key, image):
        turn, noise = jax.random.split(key)
        image = jnp.where(jax.random.bernoulli(turn), image[:, ::-1], image)
        return image + 0.1 * jax.random.normal(noise, image.shape)

    def loss(params, batch, keys, mask):
        n = len(mask)
        first, second = jax.vmap(jax.random.split, out_axes=1)(keys)
        views = [jax.vmap(view)(keys, batch["x"]) for keys in (first, second)]
        x = jax.lax.conv_general_dilated(
            jnp.concatenate(views), params["kernel"], (1, 1), "SAME", feature_group_count=3,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        z = x.mean((1, 2)) @ params["out"]
        real = jnp.concatenate([mask, mask])
        near = jnp.where(real[None] & ~jnp.eye(2 * n, dtype=bool), z @ z.T, -1e9)
        pair = jnp.concatenate([jnp.arange(n, 2 * n), jnp.arange(n)])
        entropy = optax.softmax_cross_entropy_with_integer_labels(
            near * params["temperature"], pair
        )
        ranks = jnp.sort(jnp.where(mask, z[:n, 0], 1e9))[::-1]
        summed = jnp.cumsum(jnp.where(mask, z[:n, 1], 0))
        far = jnp.where(ranks < 1e8, jnp.tanh(ranks), 0).sum()
        return entropy[:n] + entropy[n:] + 0.1 * far + 0.1 * jnp.tanh(summed)

    task = px.Task(init=init, loss=loss, coupled=True)
    batch, sizes = models.images(8, dtype=np.float64), (5,)
    got = trained(task, batch, px.Plan(data=2, zero=1), sizes)
    assert models.max_rel_error(got, by_hand(task, batch, sizes, 1)) < 1e-10


OF_EACH_EXAMPLE = {  # tokens (6, 4) of an example, and a number for each
    "add": lambda x, i: jnp.zeros((4, 4)).at[i].add(x),
    "buffers": lambda x, i: jnp.zeros((4, 2, 4)).at[i, i % 3].add(x, mode="drop"),
    "set": lambda x, i: jnp.zeros((4, 4)).at[i].set(x),
    "read": lambda x, i: x.reshape(3, 2, 4)[i % 3, i % 2],
    "added to others": lambda x, i: jnp.ones((4, 4)).at[i].add(x),
    "turned": lambda x, i: jnp.zeros((4, 4)).at[i].add(x).T,
}


@pytest.mark.parametrize("kind", [{}, {"zero": 3, "remat": "full"}], ids=["data", "zero 3"])
@pytest.mark.parametrize("name", OF_EACH_EXAMPLE)
def test_what_each_example_scatters_stays_with_it(x64, name, kind):
    def loss(params, batch, keys, mask):
        which = (jnp.abs(batch["y"]) * 3).astype(jnp.int32) % 4
        x = jax.vmap(OF_EACH_EXAMPLE[name])(batch["x"] @ params["in"], which)
        losses = (jnp.tanh(x @ params["out"]) ** 2).reshape(len(mask), -1).sum(1)
        real = mask.astype(float)
        return losses + (losses * real).sum() ** 2 / real.sum() ** 2

    def init(key):
        return {"in": jnp.eye(4) + 0.1, "out": jnp.eye(4) - 0.1}

    rng = np.random.default_rng(2)
    batch = {"x": rng.normal(size=(8, 6, 4)), "y": rng.normal(size=(8, 6))}
    task, plan = px.Task(init=init, loss=loss, coupled=True), px.Plan(data=4, **kind)
    sent = px.compile(task, optimizer(), plan, batch).planned_collectives()
    of_parameters = {"all-gather"} if plan.zero == 3 else set()
    assert {one.kind for one in sent} - of_parameters <= {"all-reduce", "reduce-scatter"}
    assert max(one.bytes for one in sent) <= 2 * 16 * 8
    got = trained(task, batch, plan, (8, 7))
    assert models.max_rel_error(got, by_hand(task, batch, (8, 7), 1)) < 1e-10


# --- Losses that do not read their mask -----------------------------------------------------------

UNMASKED = {  # batches of 12 and 7, which nothing divides
    "one device": {},
    "data": {"data": 2, "microbatches": 3},
    "zero 3": {"data": 2, "microbatches": 3, "zero": 3},
    "zero 1": {"data": 4, "zero": 1},
}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("normed", "one device"),
        ("normed", "zero 3"),
        pytest.param("contrastive", "data", marks=pytest.mark.slow),
        pytest.param("normed", "zero 1", marks=pytest.mark.slow),
    ],
)
def test_a_mask_that_is_not_read_has_no_filled_rows(x64, name, kind):
    plan, task, batch = px.Plan(**UNMASKED[kind]), unmasked(name, jnp.float64), example(name)[1]
    batch, sizes = models.cut(batch, 12), (12, 7, 12, 7)
    with pytest.warns(
        px.errors.MaskWarning, match="does not read its mask, so a batch of 7"
    ) as said:
        got = trained(task, batch, plan, sizes)
    assert len(said) == 1
    assert ("device computes all of its rows" in str(said[0].message)) == (kind != "one device")
    assert models.max_rel_error(got, by_hand(task, batch, sizes, plan.microbatches)) < 1e-10


@pytest.mark.parametrize("resident", [True, False])
def test_fit_with_a_mask_that_is_not_read(x64, resident):
    """Twelve, and a last batch of seven, in every epoch."""
    task, data = unmasked("normed", jnp.float64), models.data(19, dtype=np.float64)
    with pytest.warns(px.errors.MaskWarning):
        result = px.fit(
            task, optimizer(), data, plan=px.Plan(data=2), batch_size=12, epochs=2, seed=3,
            shuffle=False, resident=resident, progress=False,
        )  # fmt: skip
    full = models.cut(data, 12)
    program = px.compile(models.normed_task(jnp.float64), optimizer(), px.Plan(), full)
    state = program.init(3)
    last = jax.tree.map(lambda leaf: leaf[12:], data)
    for batch in (full, last) * 2:
        state, _ = program.step(state, batch)
    trained_, expected_ = ((s.params, s.model_state) for s in (result.state, state))
    assert models.max_rel_error(trained_, expected_) < 1e-10


@pytest.mark.ci
def test_a_population_leaves_out_a_batch_that_would_be_filled_up():
    options = {"batch_size": 12, "epochs": 2, "ragged": "drop", "progress": False}
    task, plan = unmasked("normed"), px.Plan(chunk=2, batch_dim="major")
    many = px.fit(task, optimizer(), models.data(19), members=px.Members(2), plan=plan, **options)
    alone = px.fit(task, optimizer(), models.data(19), **options)
    first = px.ensemble.export_member(many.state, 0)
    assert many.history[-1]["step"] == 2
    assert models.max_rel_error(first.params, alone.state.params) < 1e-5


def test_a_batch_size_that_would_be_filled_up_is_refused():
    match = r"batches of 13 examples need padding .* into 4 .*4 divides \(12 or 16\)"
    with pytest.raises(px.errors.BatchError, match=match):
        px.compile(unmasked("normed"), optimizer(), px.Plan(data=4), models.data(13))


def test_a_population_fills_up_no_batch_for_a_mask_that_is_not_read():
    task, members = unmasked("contrastive"), px.Members(2)
    plan = px.Plan(chunk=2, batch_dim="major")
    program = px.compile(task, optimizer(), plan, models.data(12), members=members)
    with pytest.raises(px.errors.BatchError, match="a population got a batch of 7 examples"):
        program.step(program.init(), models.data(7))
    with pytest.raises(px.errors.BatchError, match="a population got a batch of 7 examples"):
        px.fit(task, optimizer(), models.data(19), members=members, batch_size=12, plan=plan,
               progress=False)  # fmt: skip


def reads(task):
    rows = jax.eval_shape(lambda: models.data(6))
    like = jax.eval_shape(lambda: new_state(task, optimizer(), jax.random.key(0)))
    return reads_mask(task, like, rows, task.loss)


def test_whether_a_mask_is_read():
    assert all(reads(TASKS[name][0](dtype=jnp.float32)) for name in TASKS)
    assert not any(reads(unmasked(name)) for name in TASKS)


def test_a_mask_that_only_the_losses_read():
    """The statistics let the rows in all the same."""
    task = unmasked("normed")

    def loss(params, state, batch, keys, mask):
        losses, metrics, state = task.loss(params, state, batch, keys, mask)
        return jnp.where(mask, losses, 0), metrics, state

    assert not reads(dataclasses.replace(task, loss=loss))
    jitted = dataclasses.replace(task, loss=jax.jit(jax.checkpoint(task.loss)))
    assert not reads(jitted)


@pytest.mark.parametrize("fields", [{"data": 4}, {"data": 2, "zero": 3}], ids=str)
def test_a_mean_over_a_named_vmap_sends_means(x64, fields):
    """As batch norm has it in layers of one example: no device gathers the rows of another."""

    def loss(params, batch, keys, mask):
        def example(x, y, real):
            count = jax.lax.psum(real, "rows")
            x = x - jax.lax.psum(real * x, "rows") / count
            return (jnp.tanh(x) @ params - y) ** 2

        real = mask.astype(float)
        return jax.vmap(example, axis_name="rows")(batch["x"], batch["y"], real)

    task = px.Task(init=lambda key: jax.random.normal(key, (64,)), loss=loss, coupled=True)
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(12, 64)), "y": rng.normal(size=12)}
    program = px.compile(task, optax.sgd(0.1), px.Plan(**fields), batch)
    sent = [one for one in program.planned_collectives() if one.bytes > 16]
    assert len([one for one in sent if one.kind == "all-reduce" and one.bytes == 8 * 64]) >= 1
    assert max(one.bytes for one in sent) <= 8 * 64 + 16
    got = trained(task, batch, px.Plan(**fields), (12, 7))
    assert models.max_rel_error(got, by_hand(task, batch, (12, 7), 1)) < 1e-10


@pytest.mark.parametrize("fields", [{"data": 4}, {"data": 2, "microbatches": 2}], ids=str)
def test_a_teacher_that_follows_its_student_needs_no_mask(x64, fields):
    """Its model state is a moving average of the parameters, and the losses keep rows apart."""

    def init(key):
        params = jax.random.normal(key, (6, 4))
        return params, params / 2

    def loss(params, teacher, batch, keys, mask):
        goal = jax.lax.stop_gradient(jnp.tanh(batch["x"] @ teacher))
        follows = 0.9 * teacher + 0.1 * jax.lax.stop_gradient(params)
        return ((batch["x"] @ params - goal) ** 2).sum(1), {}, follows

    task = px.Task(init=init, loss=loss, coupled=True, stateful=True)
    batch = {"x": np.random.default_rng(0).normal(size=(11, 6))}  # which no plan here divides
    got = trained(task, batch, px.Plan(**fields), (11, 6))
    wanted = by_hand(task, batch, (11, 6), fields.get("microbatches", 1))
    assert models.max_rel_error(got, wanted) < 1e-10
