"""Networks cut into stages compute what one device computes, whatever the schedule."""

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
from plurax.pipeline.schedule import SCHEDULES

# name: the task, and the rules by which it can be split over `tensor` besides.
NETWORKS = {
    "transformer": (
        models.transformer_stack,
        px.sharding.megatron(
            column={"*/qkv": (..., "tensor", None), "*/hidden": (..., "tensor"),
                    "*/bias": (..., "tensor")},
            row={"*/attention_out": (..., "tensor", None, None), "*/out": (..., "tensor", None)},
            sequence=["residual"],
        ),
    ),
    "perceptron": (models.perceptron_stack, {"blocks/hidden": (..., "tensor")}),
    "marked": (models.marked_task, {"layer0/w": (None, "tensor"), "layer0/b": ("tensor",)}),
}  # fmt: skip
LARGEST = 13  # no multiple of anything


def trained(name, plan, dtype, sizes=(LARGEST, 10, 1), *, everything=True):
    task = NETWORKS[name][0](dtype=dtype)
    text = name == "transformer"
    batch = models.text(LARGEST) if text else models.data(LARGEST, dtype=np.dtype(dtype))
    # Adam divides by the gradient's size: where that is near 0, another order of sums in float32,
    # of microbatches on one device, say, is enlarged without a bound unless `eps` sets one.
    eps = 1e-4 if dtype == jnp.float32 else 1e-8
    optimizer = optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2, eps=eps))
    program = px.compile(task, optimizer, plan, batch)
    # Of other seeds, such as 3, the network nearly hits the one example of the last step, whose
    # gradient is then a difference of nearly equal numbers: float32 keeps four digits of it.
    state = program.init(seed=4)
    for size in sizes:
        state, metrics = program.step(state, models.cut(batch, size))
    kept = program.to_canonical(state)
    found = {"params": kept.params, "opt_state": kept.opt_state, "metrics": metrics}
    if everything:
        found["means"] = program.evaluate(state, batch)
        found["outputs"] = program.predict(state, batch)
    return jax.device_get(found)


@functools.cache
def on_one_device(name, dtype, microbatches=1):
    return trained(name, px.Plan(microbatches=microbatches), dtype)


def max_rel_error(got, name, dtype, microbatches=1):
    expected = on_one_device(name, dtype, microbatches)
    return models.max_rel_error(got, {part: expected[part] for part in got})


def plan_of(schedule, stages, **more):
    """A plan with so many stages: two on a device where the schedule can."""
    two = schedule == "interleaved" and stages % 2 == 0 and stages > 2
    devices = stages // 2 if two else stages
    microbatches = devices if schedule == "interleaved" else 4
    return px.Plan(
        pipeline=devices, stages=stages, schedule=schedule, microbatches=microbatches, **more
    )


def cases(*others, rare=()):
    """Each schedule with each of `others`, the networks in turns; the rest under `make test-all`.

    Every two of schedule, network and number of stages meet in a run by default, but for the pairs
    of schedule and number in `rare`: of too many stages, or in one of the tests below.
    """
    for i, schedule in enumerate(SCHEDULES):
        for j, other in enumerate(others):
            for k, name in enumerate(NETWORKS):
                usual = k == (i + j) % len(NETWORKS) and (schedule, other) not in rare
                marks = [] if usual else pytest.mark.slow
                yield pytest.param(name, schedule, other, marks=marks)


# Many stages: one schedule with two on a device, one with split backward passes. 1F1B on three and
# four devices is in `HYBRIDS`, ZB-H1 on two in `test_members_in_stages`.
RARE = [("gpipe", 8), ("1f1b", 8), ("1f1b", 3), ("1f1b", 4), ("zb-h1", 2)]


@pytest.mark.parametrize(("name", "schedule", "stages"), list(cases(2, 3, 4, 8, rare=RARE)))
def test_every_schedule(x64, name, schedule, stages):
    """No number of stages divides the 11 layers; the last batch fills one of four microbatches."""
    whole = stages == 2
    got = trained(name, plan_of(schedule, stages), jnp.float64, everything=whole)
    assert max_rel_error(got, name, jnp.float64) < 1e-10


# ZB-H1 in float32 is in `test_verify_in_stages`.
@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "schedule", "stages"),
    list(cases(4, rare=[("gpipe", 4), ("interleaved", 4), ("zb-h1", 4)])),
)
def test_every_schedule_in_float32(name, schedule, stages):
    plan = plan_of(schedule, stages)
    got = trained(name, plan, jnp.float32, everything=False)
    assert max_rel_error(got, name, jnp.float32, plan.microbatches) < 1e-5


def numbers_of_layers(depth, stages):
    """Any numbers of at least 1 that add up to `depth`."""
    ends = st.permutations(range(1, depth)).map(
        lambda ends: [0, *sorted(ends[: stages - 1]), depth]
    )
    return ends.map(lambda ends: tuple(b - a for a, b in itertools.pairwise(ends)))


@st.composite
def hybrids(draw, name):
    sizes = [
        (d, p, t)
        for p in (2, 3, 4)
        for d in range(1, 5)
        for t in (1, 2, 3)
        if d * p * t <= 8 and d * t > 1
    ]
    data, pipeline, tensor = draw(st.sampled_from(sizes))
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    stages = pipeline * draw(st.sampled_from([1, 2])) if schedule == "interleaved" else pipeline
    rounds = draw(st.sampled_from([1, 2]))
    return px.Plan(
        data=data,
        pipeline=pipeline,
        stages=stages,
        schedule=schedule,
        tensor=tensor,
        zero=draw(st.integers(0, 3)),
        microbatches=pipeline * rounds if schedule == "interleaved" else rounds + 1,
        remat=draw(st.sampled_from(["none", "dots", "full", 0.3])),
        layers=draw(
            st.none() | numbers_of_layers(8 if name == "marked" else models.LAYERS, stages)
        ),
        shardings=NETWORKS[name][1],
    )


HYBRIDS = {
    "interleaved": ("transformer", {"data": 2, "pipeline": 2, "tensor": 2, "stages": 4, "zero": 3,
                                    "schedule": "interleaved", "remat": "dots"}),
    "gpipe": ("perceptron", {"data": 3, "pipeline": 2, "schedule": "gpipe", "zero": 2,
                             "microbatches": 3, "remat": "full"}),
    "zb-h1": ("perceptron", {"pipeline": 3, "tensor": 2, "schedule": "zb-h1"}),
    "1f1b": ("marked", {"data": 2, "pipeline": 4, "schedule": "1f1b", "zero": 3,
                        "microbatches": 3, "remat": "full"}),
    "eager-1f1b": ("transformer", {"data": 2, "pipeline": 3, "schedule": "eager-1f1b", "zero": 3,
                                   "microbatches": 7, "remat": "full"}),
    "eager-1f1b, tensor": ("marked", {"pipeline": 4, "tensor": 2, "schedule": "eager-1f1b",
                                      "zero": 2, "microbatches": 3, "remat": "dots"}),
    "a stage a device": ("marked", {"pipeline": 2, "tensor": 3, "schedule": "interleaved",
                                    "zero": 1, "microbatches": 4, "remat": "dots"}),
    "few layers first": ("perceptron", {"pipeline": 3, "layers": (1, 6, 4), "schedule": "zb-h1",
                                         "data": 2, "zero": 2, "microbatches": 3}),
    "few layers last": ("perceptron", {"pipeline": 4, "layers": (2, 5, 3, 1), "microbatches": 5,
                                        "remat": 0.4}),
    "unequal chunks": ("perceptron", {"pipeline": 2, "stages": 4, "layers": (1, 2, 3, 5),
                                      "schedule": "interleaved", "remat": "full", "tensor": 2}),
    "four stages a device": ("perceptron", {"data": 2, "pipeline": 2, "stages": 8, "zero": 1,
                                            "schedule": "interleaved", "microbatches": 2}),
    "unequal parts": ("marked", {"pipeline": 3, "layers": (1, 5, 2), "microbatches": 3}),
}  # fmt: skip
"""Of what `hybrids` draws: each schedule, ZeRO and remat, with `data`, with `tensor`, with both;
and numbers of layers."""


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::plurax.errors.ShardingWarning")
@pytest.mark.parametrize("case", HYBRIDS)
def test_hybrids(x64, case):
    name, fields = HYBRIDS[case]
    plan = px.Plan(**{"microbatches": 2, **fields}, shardings=NETWORKS[name][1])
    whole = case in ("few layers last", "unequal parts")
    got = trained(name, plan, jnp.float64, everything=whole)
    assert max_rel_error(got, name, jnp.float64) < 1e-10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::plurax.errors.ShardingWarning")
@pytest.mark.parametrize("name", NETWORKS)
@given(st.data())
@draws(4, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_hybrid(x64, name, data):
    plan = data.draw(hybrids(name))
    got = trained(name, plan, jnp.float64, everything=False)
    assert max_rel_error(got, name, jnp.float64) < 1e-10, plan


@pytest.mark.ci
def test_a_program_from_the_compilation_cache(x64):
    """Compiled once, and then loaded: XLA's CPU client has to keep its collectives apart."""
    plan = px.Plan(data=2, pipeline=3, microbatches=2, schedule="zb-h1", zero=2, remat="full")
    assert jax.config.values["jax_compilation_cache_dir"]
    for _ in range(2):
        got = trained("perceptron", plan, jnp.float64, everything=False)
        assert max_rel_error(got, "perceptron", jnp.float64) < 1e-10


@pytest.mark.ci
def test_the_plan_of_the_guide(x64):
    """All at once, evaluated and predicted too."""
    plan = px.Plan(
        data=2, pipeline=2, tensor=2, zero=1, microbatches=8, shardings=NETWORKS["transformer"][1]
    )
    assert (
        max_rel_error(trained("transformer", plan, jnp.float64), "transformer", jnp.float64) < 1e-10
    )


def test_a_schedule_written_by_hand_runs(x64):
    lines = ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 B0 F1 F2 B1 F3 B2 B3"]
    plan = px.Plan(pipeline=2, microbatches=4, schedule=lines)
    got = trained("perceptron", plan, jnp.float64, everything=False)
    assert max_rel_error(got, "perceptron", jnp.float64) < 1e-10
    assert px.Plan.from_toml(plan.to_toml()) == plan


@pytest.mark.ci
def test_without_microbatches(x64):
    """Inter-layer parallelism, as plain as it sounds: one microbatch."""
    got = trained("perceptron", px.Plan(pipeline=3), jnp.float64, everything=False)
    assert max_rel_error(got, "perceptron", jnp.float64) < 1e-10


@pytest.mark.ci
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_live_on_their_stages(tied):
    """On a device is what its stage needs: not embedding and head both, unless they are tied."""
    task = models.transformer_stack(depth=4, tied=tied)
    program = px.compile(task, optax.adam(1e-3), px.Plan(pipeline=4), models.text(8))
    lives = {one.path: one.note for one in program.shardings}
    assert lives["head/gain"] == "on device 3 of the pipeline"
    assert lives["embed/table"] == ("" if tied else "on device 0 of the pipeline")
    state = program.init(0)
    layers, edges = 0, models.WORDS * models.WIDTH + models.WIDTH
    for leaf in jax.tree.leaves(program.to_canonical(state).params["blocks"]):
        layers += leaf.size // 4
    (device,) = {shard.device for shard in state.step.addressable_shards[:1]}
    held = sum(
        shard.data.size
        for leaf in jax.tree.leaves(state.params)
        for shard in leaf.addressable_shards
        if shard.device == device
    )
    assert held == layers + edges


OPTIMIZERS = {
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "by block": optax.chain(optax.clip_by_block_rms(0.1), optax.lion(1e-3)),
    "trust ratio": optax.lamb(1e-2),
    "factored": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "masked": optax.adamw(
        1e-2, mask=lambda p: jax.tree.map_with_path(lambda path, x: "head" in str(path), p)
    ),
    "multi": optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.sgd(1e-2)}, {"embed": "a", "blocks": "b", "head": "a"}
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize(
    # What is clipped is in all other tests, and `multi` masks its parts.
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in ("clipped", "masked"))) for n in OPTIMIZERS],
)
def test_optimizers_where_tensors_live(x64, name):
    """Each optimizer works on a stage's own tensors; what it needs of all is numbers."""
    batch = models.data(8, dtype=np.float64)

    def run(plan):
        # Filled up from 3 to 4 layers, but for those that take means: a mean counts what is filled.
        depth = 4 if name in ("by block", "factored") else 3
        task = models.perceptron_stack(jnp.float64, depth=depth)
        program = px.compile(task, OPTIMIZERS[name], plan, batch)
        state = program.init(0)
        for _ in range(3):
            state, metrics = program.step(state, batch)
        kept = program.to_canonical(state)
        return jax.device_get((kept.params, kept.opt_state, metrics))

    assert models.max_rel_error(run(px.Plan(pipeline=2)), run(px.Plan())) < 1e-10


@pytest.mark.ci
def test_checkpoints_under_another_plan(x64, tmp_path):
    """Trained as stages, resumed without stages, and as stages of other layers."""
    task, batch = models.perceptron_stack(jnp.float64), models.data(LARGEST, dtype=np.float64)

    def fit(plan, epochs, **how):
        return px.fit(task, models.optimizer(), batch, plan=plan, epochs=epochs, batch_size=5,
                      progress=False, **how)  # fmt: skip

    expected = fit(px.Plan(), 3).state.params
    fit(px.Plan(pipeline=4, microbatches=2, layers=(2, 1, 5, 3)), 1, output=tmp_path)
    fit(px.Plan(data=2, zero=3), 2, output=tmp_path, resume=True)
    plan = px.Plan(data=2, pipeline=2, stages=4, schedule="interleaved", microbatches=2, zero=1,
                   layers=(1, 3, 5, 2))  # fmt: skip
    result = fit(plan, 3, output=tmp_path, resume=True)
    assert (
        models.max_rel_error(jax.device_get(result.state.params), jax.device_get(expected)) < 1e-10
    )
    assert result.program.predict(result.state, batch).shape == (LARGEST, models.CLASSES)


@pytest.mark.ci
@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "zb-h1"])
def test_resident_epochs_in_stages(schedule):
    """In the compiled loop over an epoch, and the same twice, bit for bit."""
    task, batch = models.perceptron_stack(depth=4), models.data(LARGEST)
    plan = px.Plan(pipeline=2, microbatches=2, schedule=schedule)
    optimizer = models.optimizer()  # the program is compiled once for both

    def run():
        fit = px.fit(task, optimizer, batch, plan=plan, epochs=2, batch_size=5,
                     progress=False)  # fmt: skip
        return jax.device_get(fit.state.params)

    assert models.same_bits(run(), run())


@pytest.mark.ci
def test_bfloat16_in_stages():
    """Cast where it is used: parameters and what the optimizer keeps stay as they are."""
    task, batch = models.transformer_stack(depth=3), models.text(8)
    plan = px.Plan(pipeline=3, precision="bfloat16", microbatches=2)

    def run(plan):
        program = px.compile(task, optax.sgd(0.1), plan, batch)
        state, metrics = program.step(program.init(0), batch)
        return jax.device_get((program.to_canonical(state).params, metrics["loss"]))

    one = dataclasses.replace(plan, pipeline=1)
    assert models.max_rel_error(run(plan), run(one)) < 2e-2


def by_median(grads, state, params=None):
    """Reads the median of each gradient, and its root mean square."""

    def limited(g):
        size = jnp.median(jnp.abs(g)) + jnp.sqrt(jnp.mean(g**2))
        return -0.1 * jnp.clip(g, -size, size)

    return jax.tree.map(limited, grads), state


READS_ALL_LAYERS = {
    "median": lambda: optax.GradientTransformation(lambda params: (), by_median),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=4),
    "muon": lambda: optax.contrib.muon(0.1),
    "noise": lambda: optax.noisy_sgd(0.1, key=0),
}


@pytest.mark.filterwarnings("ignore::plurax.errors.ShardingWarning")
@pytest.mark.parametrize("layers", [(2, 1), (1, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("name", READS_ALL_LAYERS)
def test_optimizers_that_read_all_layers(x64, name, layers):
    """Devices with unequal numbers of layers hold rows of padding, of which nothing is read."""
    batch = {"x": np.random.default_rng(0).normal(size=(8, 6))}

    def matrix(key):
        return jax.random.normal(key, (6, 6), jnp.float64)

    task = px.stack(
        embed=(matrix, lambda w, batch, keys: batch["x"] @ w),
        block=(
            lambda key: {"w": matrix(key), "b": matrix(key)[0]},
            lambda params, x, batch, keys: x + jnp.tanh(x @ params["w"] + params["b"][None]),
        ),
        head=(matrix, lambda w, x, batch, keys: jnp.sum((x @ w) ** 2, 1)),
        depth=sum(layers),
    )
    rule = READS_ALL_LAYERS[name]()
    plan = px.Plan(pipeline=len(layers), layers=layers, microbatches=2)
    program = px.compile(task, rule, plan, batch)
    state = program.init(seed=1)
    params = program.to_canonical(state).params
    opt_state = rule.init(params)

    @jax.jit
    def step(params, opt_state):
        grads = jax.grad(lambda params: task.loss(params, batch, None).mean())(params)
        updates, opt_state = rule.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(2):
        state, _ = program.step(state, batch)
        params, opt_state = step(params, opt_state)
    assert models.max_rel_error(program.to_canonical(state).params, params) < 1e-10


def repeated(x, p):
    """Something of parameters alone, for each example of a batch."""
    return jnp.broadcast_to(jnp.tanh(p), (x.shape[0], *p.shape))


def with_latents():
    """An embedding of parameters alone, which the layers show the rows."""
    return {
        "embed": (lambda key: normal(key, 3, 4), lambda p, b, keys: repeated(b["x"], p)),
        "block": (
            lambda key: {"x": normal(key, 4, 4), "b": normal(key, 3, 4)},
            lambda p, x, b, keys: x + jnp.tanh(x @ p["x"]) * (b["x"] @ p["b"])[:, None],
        ),
        "head": (lambda key: normal(key, 4), lambda p, x, b, keys: ((x @ p) ** 2).sum(1)),
    }


def with_biases():
    """A bias for all layers, as T5 has it, and gains that each layer passes to the next."""
    return {
        "embed": (
            lambda key: {"x": normal(key, 3, 4), "bias": normal(key, 4)},
            lambda p, b, keys: {
                "x": b["x"] @ p["x"],
                "bias": repeated(b["x"], p["bias"]),
                "gain": jnp.ones((b["x"].shape[0], 4), jnp.float64),
            },
        ),
        "block": (
            lambda key: {"x": normal(key, 4, 4), "gain": normal(key, 4)},
            lambda p, x, b, keys: {
                "x": jnp.tanh(x["x"] @ p["x"] * x["gain"] + x["bias"]),
                "bias": x["bias"],
                "gain": repeated(b["x"], p["gain"]),
            },
        ),
        "head": (
            lambda key: normal(key, 4),
            lambda p, x, b, keys: ((x["x"] + x["gain"]) @ p - 1) ** 2,
        ),
    }


def normal(key, *shape):
    return jax.random.normal(key, shape, jnp.float64)


@pytest.mark.parametrize(
    "plan",
    [
        px.Plan(data=2, pipeline=2),
        px.Plan(data=2, pipeline=2, microbatches=2, zero=3, schedule="zb-h1"),
        px.Plan(pipeline=2, tensor=2, shardings={"*": (..., "tensor")}),
    ],
    ids=lambda plan: plan.sizes_text(),
)
@pytest.mark.parametrize("parts", [with_latents, with_biases])
def test_what_a_stage_passes_on_of_parameters_alone(x64, parts, plan):
    """It is the same for all rows, and its gradient is added up over those of all devices."""
    parts, depth = parts(), 4
    batch = {"x": np.random.default_rng(0).normal(size=(8, 3))}

    def loss(params):
        x = parts["embed"][1](params["embed"], batch, None)
        for layer in range(depth):
            own = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])
            x = parts["block"][1](own, x, batch, None)
        return parts["head"][1](params["head"], x, batch, None).mean()

    program = px.compile(px.stack(**parts, depth=depth), optax.sgd(0.1), plan, batch)
    state = program.init(seed=1)
    params = program.to_canonical(state).params
    state, _ = program.step(state, batch)
    updated = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.jit(jax.grad(loss))(params))
    assert models.max_rel_error(program.to_canonical(state).params, updated) < 1e-10


def test_zero_3_gathers_what_a_stage_repeats_and_recomputes(x64):
    """Latents are repeated in a stage, and again for the gradient of the weight that they meet."""
    batch = {"x": np.random.default_rng(0).normal(size=(8, 3))}

    def init(key):
        first, second, third = jax.random.split(key, 3)
        return {"of": normal(first, 2, 4), "w": normal(second, 4, 4), "x": normal(third, 3, 4)}

    def loss(boundary, params, batch, keys):
        latents = repeated(batch["x"], params["of"])
        x = jnp.tanh(latents @ params["w"] + (batch["x"] @ params["x"])[:, None])
        return (jnp.tanh(boundary(x)) ** 2).sum((1, 2))

    task = px.Task(init=init, loss=functools.partial(loss, px.pipeline.stage_boundary))
    program = px.compile(task, optax.sgd(0.1), px.Plan(data=2, pipeline=2, zero=3), batch)
    state = program.init(seed=1)
    params = program.to_canonical(state).params
    state, _ = program.step(state, batch)
    mean = lambda params: loss(lambda x: x, params, batch, None).mean()  # noqa: E731
    grads = jax.jit(jax.grad(mean))(params)
    updated = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    assert models.max_rel_error(program.to_canonical(state).params, updated) < 1e-10


@pytest.mark.parametrize("zero", [1, 3])
def test_zero_where_neither_layers_nor_dims_divide(x64, zero):
    """Three layers on two stages, and biases of three numbers on two devices of `data`."""
    batch = {"x": np.random.default_rng(0).normal(size=(8, 3))}

    def matrix(key):
        return jax.random.normal(key, (3, 3), jnp.float64)

    task = px.stack(
        embed=(matrix, lambda w, batch, keys: batch["x"] @ w),
        block=(lambda key: matrix(key)[0], lambda b, x, batch, keys: x + jnp.tanh(x + b[None])),
        head=(matrix, lambda w, x, batch, keys: jnp.sum((x @ w) ** 2, 1)),
        depth=3,
    )
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    program = px.compile(task, rule, px.Plan(data=2, pipeline=2, zero=zero), batch)
    state = program.init(seed=1)
    params = program.to_canonical(state).params
    grads = jax.grad(lambda params: task.loss(params, batch, None).mean())(params)
    updates, _ = rule.update(grads, rule.init(params), params)
    state, _ = program.step(state, batch)
    updated = optax.apply_updates(params, updates)
    assert models.max_rel_error(program.to_canonical(state).params, updated) < 1e-10


def test_bfloat16_parameters_of_one_stage():
    """Their gradients are summed in float32, and so is the norm of these sums."""
    batch = {"x": np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)}

    def init(key):
        return {name: jax.random.normal(key, (6, 6), jnp.bfloat16) for name in "ab"}

    def loss(params, batch, keys):
        x = jnp.tanh(batch["x"].astype(jnp.bfloat16) @ params["a"])
        return jnp.sum((px.pipeline.stage_boundary(x) @ params["b"]) ** 2, 1).astype(jnp.float32)

    def run(plan):
        program = px.compile(px.Task(init=init, loss=loss), optax.sgd(0.01), plan, batch)
        state, metrics = program.step(program.init(0), batch)
        state = jax.device_get(program.to_canonical(state))
        return jax.tree.map(np.float32, (state.params, metrics["grad_norm"]))

    found, wanted = run(px.Plan(pipeline=2, microbatches=2)), run(px.Plan(microbatches=2))
    assert models.max_rel_error(found, wanted) < 1e-2


@pytest.mark.ci
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(px.Plan(pipeline=2, microbatches=2, chunk=3), marks=pytest.mark.slow),
        px.Plan(member=2, data=2, pipeline=2, microbatches=2, chunk=1, zero=1, schedule="zb-h1"),
    ],
)
def test_members_in_stages(x64, plan):
    """Populations of networks that are cut into stages."""
    batch = models.data(LARGEST, dtype=np.float64)

    def run(plan):
        task = models.perceptron_stack(jnp.float64, depth=3)
        program = px.compile(task, models.optimizer(), plan, batch, members=px.Members(3))
        state = program.init()
        for size in (LARGEST, 1):
            state, metrics = program.step(state, models.cut(batch, size))
        kept = program.to_canonical(state)
        means, outputs = program.evaluate(state, batch), program.predict(state, batch)
        return jax.device_get((kept.params, kept.opt_state, metrics, means, outputs))

    assert models.max_rel_error(run(plan), run(px.Plan(chunk=3, batch_dim="major"))) < 1e-10


@pytest.mark.ci
@pytest.mark.parametrize(
    "name",
    ["perceptron", *(pytest.param(n, marks=pytest.mark.slow) for n in ("transformer", "marked"))],
)
def test_verify_in_stages(name):
    """The check for a user's own task; float32 and dropout and all."""
    batch = models.text(8) if name == "transformer" else models.data(8)
    plan = px.Plan(data=2, pipeline=3, microbatches=2, schedule="zb-h1")
    found = px.verify(NETWORKS[name][0](), optax.adam(1e-3), plan, batch)
    assert found.ok, found
