"""Networks split over devices compute what one device computes."""

import dataclasses
import functools

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

MLP = {"hidden": (None, "tensor"), "bias": ("tensor",), "out": ("tensor", None)}
# name: the task, its data, and the rules by which it can be split.
NETWORKS = {
    "transformer": (
        models.transformer_task, models.text, (models.megatron(), models.megatron(sequence=True))),
    "perceptron": (models.mlp_task, None, (MLP,)),
    "convolutional": (models.convolutional_task, None, (models.CHANNELS,)),
}  # fmt: skip
LARGEST = 13  # no multiple of anything


def network(name, dtype):
    make, rows, _ = NETWORKS[name]
    task = make(dtype=dtype)
    if rows is not None:
        return task, rows(LARGEST)
    rows = models.data if name == "perceptron" else models.images
    return task, rows(LARGEST, dtype=np.dtype(dtype))


def trained(name, plan, dtype, sizes=(LARGEST, 10, 1), members=None):
    task, batch = network(name, dtype)
    optimizer = optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2))
    program = px.compile(task, optimizer, plan, batch, members=members)
    state = program.init() if members else program.init(seed=3)
    for size in sizes:
        state, metrics = program.step(state, models.cut(batch, size))
    state = program.to_canonical(state)
    return jax.device_get((state.params, state.opt_state, metrics, program.evaluate(state, batch)))


@functools.cache
def on_one_device(name, dtype):
    return trained(name, px.Plan(), dtype)


@st.composite
def plans(draw, name, devices=8):
    sizes = [(d, t) for d in range(1, 9) for t in (1, 2, 3, 4, 6, 8) if d * t <= devices]
    data, tensor = draw(st.sampled_from(sizes))
    return px.Plan(
        data=data,
        tensor=tensor,
        zero=draw(st.integers(0, 3)),
        bucket_bytes=draw(st.sampled_from([3000, 25_000_000, 1])),
        microbatches=draw(st.sampled_from([1, 2, 3])),
        remat=draw(st.sampled_from(["none", "dots", "full", 0.3])),
        shardings=draw(st.sampled_from(NETWORKS[name][2])),
    )  # fmt: skip


DRAWN = {
    "data": ("perceptron", {"data": 7, "microbatches": 2, "remat": "full", "bucket_bytes": 1}),
    "tensor": ("convolutional", {"tensor": 4, "microbatches": 3, "zero": 1}),
    "zero 1": ("transformer", {"data": 4, "microbatches": 3, "zero": 1, "bucket_bytes": 3000}),
    "zero 2": ("transformer", {"data": 3, "tensor": 2, "microbatches": 2, "zero": 2,
                               "remat": "dots"}),
    "zero 3": ("convolutional", {"data": 6, "zero": 3, "bucket_bytes": 3000}),
    "everything": ("perceptron", {"data": 2, "tensor": 3, "microbatches": 3, "zero": 3,
                                  "remat": "full"}),
}  # fmt: skip
"""Of what `plans` draws: each parallelism, ZeRO, remat and bucket, some of them together."""


@pytest.mark.filterwarnings("ignore::plurax.errors.ShardingWarning")
@pytest.mark.parametrize("case", DRAWN)
def test_plans_in_float64(x64, case):
    name, fields = DRAWN[case]
    plan = px.Plan(**fields, shardings=NETWORKS[name][2][-1])
    got = trained(name, plan, jnp.float64)
    assert models.max_rel_error(got, on_one_device(name, jnp.float64)) < 1e-10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::plurax.errors.ShardingWarning")
@pytest.mark.parametrize("name", NETWORKS)
@given(st.data())
@draws(4, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_plan_in_float64(x64, name, data):
    plan = data.draw(plans(name))
    got = trained(name, plan, jnp.float64)
    # The transformer has exp, tanh and rsqrt in it; the parts of its sums cancel.
    assert models.max_rel_error(got, on_one_device(name, jnp.float64)) < 1e-10, plan


EXPERTS = {
    "data": {"data": 8},
    "zero 1": {"data": 8, "zero": 1},
    "zero 2": {"data": 4, "zero": 2, "microbatches": 2},
    "zero 3": {"data": 6, "zero": 3, "bucket_bytes": 3000},
    "tensor": {"tensor": 6},
    "two dims": {"data": 2, "tensor": 3, "zero": 1},
    "everything": {"data": 3, "tensor": 2, "zero": 3, "microbatches": 2, "remat": "full"},
}


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::plurax.errors.ShardingWarning")
@pytest.mark.parametrize(
    ("name", "expert"),
    [
        # In a run by default each kind of plan and each network is in float64, above.
        ("transformer", "everything"),
        ("convolutional", "tensor"),
        *(pytest.param("transformer", expert, marks=pytest.mark.slow)
          for expert in EXPERTS if expert != "everything"),
        *(pytest.param("perceptron", expert, marks=pytest.mark.slow)
          for expert in ("tensor", "everything")),
        pytest.param("convolutional", "everything", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_every_parallelism_in_float32(name, expert):
    plan = px.Plan(**EXPERTS[expert], shardings=NETWORKS[name][2][-1])
    # Adam divides by the gradient's size: of the optimizer's state and the losses this is asked.
    params, opt_state, metrics, means = trained(name, plan, jnp.float32)
    expected = on_one_device(name, jnp.float32)
    assert models.max_rel_error((opt_state, metrics, means), expected[1:]) < 1e-5
    assert models.max_rel_error(params, expected[0]) < 1e-5


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "remat"),
    [
        *(("transformer", remat) for remat in ("dots", "full", "offload", 0.3)),
        ("convolutional", "dots"),
        *(
            pytest.param("perceptron", remat, marks=pytest.mark.slow)
            for remat in ("dots", "full", "offload")
        ),
        *(pytest.param("convolutional", r, marks=pytest.mark.slow) for r in ("full", "offload")),
    ],
)
def test_remat_changes_nothing(x64, name, remat):
    got = trained(name, px.Plan(remat=remat), jnp.float64)
    assert models.max_rel_error(got, on_one_device(name, jnp.float64)) < 1e-10


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_part_within_a_recomputed_one_reads_a_layer_of_a_stack(x64, tensor):
    """The layer has no name outside: it is a slice of the stack, which the other part reads."""

    def loss(params, batch, keys):
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), batch["x"], params["stack"])
        h = jax.checkpoint(lambda h, w: jnp.cos(h @ w) * h)(h, params["stack"][0])
        return jnp.sum((h @ params["out"]) ** 2, axis=1)

    def init(key):
        return {"stack": jax.random.normal(key, (4, 8, 8)), "out": jnp.ones((8, 4))}

    task, batch = px.Task(init=init, loss=loss), {"x": np.ones((8, 8)) / np.arange(1, 9)}

    def step(plan):
        program = px.compile(task, optax.sgd(0.1), plan, batch)
        state, metrics = program.step(program.init(seed=0), batch)
        return jax.device_get((program.to_canonical(state).params, metrics))

    rules = {"stack": (None, None, "tensor")} if tensor > 1 else ()
    split = px.Plan(data=2, tensor=tensor, zero=3, remat="full", shardings=rules)
    assert models.max_rel_error(step(split), step(px.Plan())) < 1e-10


@functools.cache
def three_members():
    plan = px.Plan(chunk=3, batch_dim="major")
    return trained("perceptron", plan, jnp.float64, members=px.Members(3))


@pytest.mark.ci
@pytest.mark.parametrize(
    "plan",
    [
        # Its two dims, and `data`, are in the third.
        pytest.param(px.Plan(member=2, tensor=2, chunk=1, shardings=MLP), marks=pytest.mark.slow),
        px.Plan(member=2, data=2, zero=2, microbatches=2, chunk=2),
        px.Plan(member=2, data=2, tensor=2, zero=3, chunk=1, shardings=MLP, remat="full"),
        px.Plan(data=5, zero=1, chunk=3),
    ],
)
def test_members_split_too(x64, plan):
    got = trained("perceptron", plan, jnp.float64, members=px.Members(3))
    assert models.max_rel_error(got, three_members()) < 1e-10


@pytest.mark.ci
@pytest.mark.parametrize(
    "plan",
    [
        px.Plan(data=2, zero=3, microbatches=2),
        px.Plan(data=2, tensor=2, zero=1, shardings={"out": ("tensor",)}, remat="dots"),
    ],
)
def test_parameters_that_are_not_there(x64, plan):
    """`None` in place of a bias, as Equinox has it, no numbers, and no tensors at all."""
    plain = models.mlp_task(dtype=jnp.float64)

    def without(params):
        return {**params, "bias": jnp.zeros(models.HIDDEN)}

    task = px.Task(
        init=lambda key: {**plain.init(key), "bias": None, "no": jnp.zeros((0, 8)), "none": {}},
        loss=lambda params, *args: plain.loss(without(params), *args),
        predict=lambda params, *args: plain.predict(without(params), *args),
    )
    batch = models.data(LARGEST, dtype=np.float64)

    def train(plan):
        program = px.compile(task, models.optimizer(), plan, batch)
        state, _ = program.step(program.init(0), batch)
        outputs = program.predict(state, batch)
        return jax.device_get((program.to_canonical(state).params, outputs))

    assert models.max_rel_error(train(plan), train(px.Plan())) < 1e-10


WITHOUT_ELEMENTS = {
    "zero, pipeline": px.Plan(data=2, pipeline=2, microbatches=2, zero=3),
    "zero, tensor": px.Plan(data=2, tensor=2, zero=3, shardings={"*": (..., "tensor")}),
    "pipeline": px.Plan(pipeline=2, tensor=2, shardings={"*": (..., "tensor")}),
    "members": px.Plan(chunk=2, batch_dim="minor"),
}


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:some tensors are not split as the rules say")
@pytest.mark.parametrize("name", WITHOUT_ELEMENTS)
def test_tensors_without_elements(x64, name):
    """They are read, and cut from parameters: there is nothing of them to split or to send."""

    def init(key):
        shapes = {"w": (8, 4), "none": (8, 0), "row": (0, 4), "flat": (0,), "out": (4, 4)}
        shapes |= {"decay": (4,), "into": (8, 4)}
        return {n: jax.random.normal(key, s, jnp.float64) for n, s in shapes.items()}

    def loss(params, batch, keys):
        # A scan over five steps cuts their decays, of the parameters alone, in pieces of none.
        decays = jnp.tanh(params["decay"])[None] * jnp.ones((5, 4))

        def states(x):
            inputs = x[:5, None] * params["into"][:5]
            return jax.lax.associative_scan(
                lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decays, inputs)
            )[1].sum(0)

        cut = 2 * params["w"][:, 4:]
        x = batch["x"] @ jnp.tanh(params["w"]) + batch["x"] @ (cut + params["none"]) @ params["row"]
        x = jnp.tanh(x + jax.vmap(states)(batch["x"]))
        x = px.pipeline.stage_boundary(x) @ params["out"]
        flat = jnp.broadcast_to(params["flat"][None], (x.shape[0], 0))
        return (jnp.concatenate([x, flat], 1) ** 2).sum(1)

    task = px.Task(init=init, loss=loss)
    batch = {"x": np.random.default_rng(0).normal(size=(8, 8))}

    def train(plan, seed=None):
        members = None if seed is not None else px.Members(seeds=[0])
        program = px.compile(task, models.optimizer(), plan, batch, members=members)
        state = program.init() if members else program.init(seed)
        state, metrics = program.step(state, batch)
        return jax.device_get((program.to_canonical(state).params, metrics["loss"]))

    got = train(WITHOUT_ELEMENTS[name], None if name == "members" else 0)
    if name == "members":
        got = jax.tree.map(lambda leaf: leaf[0], got)
    assert models.max_rel_error(got, train(px.Plan(), 0)) < 1e-10


def test_what_is_gathered_for_want_of_a_rule_is_said_once():
    def loss(params, batch, keys):
        fixed = jax.lax.linalg.hessenberg(jax.lax.stop_gradient(params["w"]))[0]
        return ((batch["x"] @ (params["w"] + fixed)) ** 2).sum(1)

    task = px.Task(init=lambda key: {"w": jnp.eye(4)}, loss=loss)
    plan = px.Plan(tensor=2, shardings={"w": (None, "tensor")})
    batch = {"x": np.ones((4, 4), np.float32)}
    with pytest.warns(px.errors.ShardingWarning, match="has no sharding rule") as said:
        records = px.compile(task, optax.sgd(0.1), plan, batch).planned_collectives()
    texts = [str(one.message) for one in said]
    assert len(texts) == len(set(texts))
    assert all("test_divided.py" in text and "bytes of its operands" in text for text in texts)
    assert any(one.without_rule for one in records)


@pytest.mark.parametrize("taken", ["data", None])
def test_a_model_that_splits_rows_itself_is_refused(taken):
    """What it takes, or only what it returns."""

    def loss(params, batch, keys):
        local = jax.shard_map(
            lambda x, w: (x[:2] @ w).sum(1), in_specs=(jax.P(taken), jax.P()),
            out_specs=jax.P("data"), axis_names={"data"},
        )  # fmt: skip
        return local(batch["x"], params["w"])

    task = px.Task(init=lambda key: {"w": jnp.eye(4)}, loss=loss)
    plan, batch = px.Plan(data=2, zero=3), {"x": np.ones((8, 4), np.float32)}
    with pytest.raises(px.errors.PlanError, match="already gets the rows of one device"):
        px.compile(task, optax.sgd(0.1), plan, batch).planned_collectives()


def test_a_dim_that_does_not_divide_is_left_whole_and_said():
    task, batch = network("perceptron", jnp.float32)
    rules = {**MLP, "out": (None, "tensor")}  # 3 classes
    with pytest.warns(
        px.errors.ShardingWarning, match="out: dim 1 is not split: 2 shards do not divide 3"
    ):
        program = px.compile(task, models.optimizer(), px.Plan(tensor=2, shardings=rules), batch)
    notes = {one.path: one.note for one in program.shardings}
    assert notes["out"] == "dim 1 is not split: 2 shards do not divide 3"


def test_a_rule_that_fits_nothing_says_so():
    task, batch = network("perceptron", jnp.float32)
    plan = px.Plan(tensor=2, shardings={**MLP, "*/hiden": (None,)})
    with pytest.raises(px.errors.PlanError, match="matches no parameter and no named activation"):
        px.compile(task, models.optimizer(), plan, batch)


@pytest.mark.ci
def test_resident_data_and_checkpoints_under_another_plan(x64, tmp_path):
    """Trained under one plan, resumed under two others: the same as on one device."""
    task, batch = network("perceptron", jnp.float64)

    def fit(plan, epochs, **how):
        return px.fit(task, models.optimizer(), batch, plan=plan, epochs=epochs, batch_size=5,
                      progress=False, **how)  # fmt: skip

    expected = fit(px.Plan(), 3).state.params
    fit(px.Plan(data=7, zero=3), 1, output=tmp_path)
    fit(px.Plan(data=2, tensor=2, zero=1, shardings=MLP), 2, output=tmp_path, resume=True)
    result = fit(px.Plan(data=3, zero=2), 3, output=tmp_path, resume=True)
    assert (
        models.max_rel_error(jax.device_get(result.state.params), jax.device_get(expected)) < 1e-10
    )
    assert result.program.predict(result.state, batch).shape == (LARGEST, models.CLASSES)


def two_steps(loss, plan):
    def init(key):
        params = models.init(key, jnp.float64)
        return {name: params[name] for name in ("hidden", "out")}

    task = px.Task(init=init, loss=loss)
    batch = models.data(8, dtype=np.float64)
    program = px.compile(task, optax.adam(1e-2), plan, batch)
    state = program.init(0)
    for _ in range(2):
        state, _ = program.step(state, batch)
    return jax.device_get(program.to_canonical(state).params)


@functools.cache
def two_steps_on_one_device():
    def plain(params, batch, keys):
        return jnp.sum((jnp.tanh(batch["x"] @ params["hidden"]) @ params["out"]) ** 2, 1)

    return two_steps(plain, px.Plan())


@pytest.mark.parametrize(
    ("data", "tensor"), [(1, 1), (1, 2), (2, 2), pytest.param(2, 1, marks=pytest.mark.slow)]
)
def test_a_model_that_communicates_itself(x64, data, tensor):
    """`jax.shard_map` over an axis of the plan, inside the loss; under `Plan()` too."""

    def by_hand(x, hidden, out):
        def local(x, hidden, out):
            y = jax.lax.cond(x[0, 0] == x[0, 0], jnp.tanh, jnp.sin, x @ hidden)
            return jax.lax.psum(y @ out, "tensor")

        spec = jax.P
        return jax.shard_map(
            local,
            in_specs=(spec(), spec(None, "tensor"), spec("tensor", None)),
            out_specs=spec(),
            axis_names={"tensor"},
        )(x, hidden, out)

    def loss(params, batch, keys):
        return jnp.sum(by_hand(batch["x"], params["hidden"], params["out"]) ** 2, 1)

    rules = {"hidden": (None, "tensor"), "out": ("tensor", None)} if data == 2 else {}
    plan = px.Plan(data=data, tensor=tensor, shardings=rules)
    zero = dataclasses.replace(plan, zero=3)
    for one in (plan, zero):
        assert models.max_rel_error(two_steps(loss, one), two_steps_on_one_device()) < 1e-10
