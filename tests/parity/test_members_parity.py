"""A member trained among others equals the member trained alone, through the one-network path."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px
from plurax.execute.array_data import ArrayData
from plurax.execute.program import Program
from plurax.mesh import make_mesh

COUNT, BATCH, STEPS = 30, 8, 52
K = 3


def optimizer(hyper):
    """Everything of a member's own: clipping norm, schedule with warm-up, decay, moments."""

    def schedule(step):
        return hyper["rate"] * jnp.minimum(1.0, jnp.asarray(step + 1, float) / hyper["warmup"])

    return optax.chain(
        optax.clip_by_global_norm(hyper["clip"]),
        optax.adamw(schedule, weight_decay=hyper["decay"], b1=hyper["momentum"]),
    )


def make_task(hyper, dtype=jnp.float64):
    """Dropout rate and initial scale of a member's own."""

    def loss(params, example, key):
        hidden = jnp.tanh(example["x"] @ params["hidden"] + params["bias"])
        kept = jax.random.bernoulli(key, 1 - hyper["dropout"], hidden.shape)
        out = jnp.where(kept, hidden / (1 - hyper["dropout"]), 0) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(out, example["y"])

    return px.Task(
        init=lambda key: jax.tree.map(lambda x: x * hyper["scale"], models.init(key, dtype)),
        loss=px.per_example(loss),
    )


HYPER = {
    "rate": px.ensemble.log_uniform(1e-3, 1e-1),
    "decay": px.ensemble.log_uniform(1e-4, 1e-1),
    "momentum": [0.9, 0.7, 0.95],
    "warmup": [1, 10, 40],
    "clip": px.ensemble.uniform(0.3, 1.0),
    "dropout": px.ensemble.uniform(0.0, 0.5),
    "scale": px.ensemble.uniform(0.5, 1.5),
}
RESAMPLE = {
    "everything": None,
    "bootstrap": px.ensemble.bootstrap(),
    "kfold": px.ensemble.kfold(3),
    "subsample": px.ensemble.subsample([12, 0.5, 30]),
}


def population(resample):
    options = {} if RESAMPLE[resample] is None else {"resample": RESAMPLE[resample]}
    return px.Members([11, 5, 8], HYPER, **options)


@functools.cache
def alone(resample, member):
    """Parameters of one member after `STEPS`, by the one-network path on one device."""
    members, rows = population(resample), models.data(COUNT, dtype=np.float64)
    hyper, seed = members.hyper_of(member), members.seed_of(member)
    source = ArrayData(rows, BATCH, seed, resample=members.resample, member=member,
                       length=members.epoch_length(COUNT))  # fmt: skip
    program = one_network(make_task(hyper), optimizer(hyper), source.example_batch())
    return jax.device_get(after_steps(program, source, seed).params)


def one_network(task, rule, batch, plan=px.Plan()):  # noqa: B008  frozen
    return Program(task, rule, plan, batch, make_mesh(plan))


def after_steps(program, source, seed):
    """The state of one network after `STEPS`."""
    turns = px.train.train_iter(
        program, program.init(seed), source, epochs=50, checkpoint_every=STEPS
    )
    return next(turn.state for turn in turns if turn.step == STEPS)


def among(members, plan, make=make_task, rule=optimizer, rows=None, shuffle=True):
    """The population after `STEPS`, by the loop of `fit` over resident data."""
    rows = models.data(COUNT, dtype=np.float64) if rows is None else rows
    data = ArrayData(rows, BATCH, shuffle=shuffle)
    program = px.compile(make, rule, plan, models.cut(rows, BATCH), members=members, data=data)
    state, _ = program.loop(program.init(), program.place_data(rows), (), 0, STEPS)
    return jax.device_get(program.to_canonical(state))


PLANS = [
    px.Plan(chunk=1),
    px.Plan(chunk=2, batch_dim="minor"),
    px.Plan(chunk=3),
    px.Plan(member=2, chunk=2),
    px.Plan(member=4, chunk=1, batch_dim="minor"),
    px.Plan(member=8, chunk=1),
    px.Plan(member=4, data=2, microbatches=2, chunk=1),
    px.Plan(member=2, data=3, chunk=2, batch_dim="minor"),
]


def each_plan():
    """Each plan with every resampling, by default with one of them in turns.

    Members on devices, minor or in chunks, are in the later plans with `data` too.
    """
    for i, plan in enumerate(PLANS):
        for j, resample in enumerate(["everything", "bootstrap"]):
            usual = j == i % 2 and plan not in PLANS[3:5]
            marks = [] if usual else pytest.mark.slow
            yield pytest.param(resample, plan, marks=marks, id=f"{resample}-{plan}")


@pytest.mark.ci
@pytest.mark.parametrize(("resample", "plan"), [*each_plan()])
def test_among_others_equals_alone(x64, resample, plan):
    plan = px.Plan(**{**vars(plan), "batch_dim": plan.batch_dim or "major"})
    state = among(population(resample), plan)
    for member in range(K):
        params = jax.tree.map(lambda leaf: leaf[member], state.params)  # noqa: B023
        assert models.max_rel_error(params, alone(resample, member)) < 1e-10


@pytest.mark.ci
@pytest.mark.parametrize("resample", ["kfold", "subsample"])
def test_other_resampling_equals_alone(x64, resample):
    """Without hyperparameters, so that one program is every member's alone."""
    members = px.Members([11, 5, 8], resample=RESAMPLE[resample])
    task, rule = models.mlp_task(dtype=jnp.float64), models.optimizer()
    rows = models.data(COUNT, dtype=np.float64)
    plan = px.Plan(member=2, data=2, chunk=2, batch_dim="minor")
    state, program = among(members, plan, task, rule), None
    for member in range(K):
        seed = members.seed_of(member)
        source = ArrayData(rows, BATCH, seed, resample=members.resample, member=member,
                           length=members.epoch_length(COUNT))  # fmt: skip
        program = program or one_network(task, rule, source.example_batch())
        params = jax.tree.map(lambda leaf: leaf[member], state.params)  # noqa: B023
        assert models.max_rel_error(params, after_steps(program, source, seed).params) < 1e-10


@pytest.mark.ci
def test_members_taken_out_are_the_same(x64):
    plan = px.Plan(chunk=2, batch_dim="major")
    members = population("bootstrap")
    whole, some = among(members, plan), among(members.take([2, 1]), plan)
    assert models.max_rel_error(px.ensemble.take_members(whole, [2, 1]).params, some.params) < 1e-12


CHUNKED, SPREAD = px.Plan(chunk=2), px.Plan(member=2, data=2, microbatches=2)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("normed", SPREAD),
        ("contrastive", CHUNKED),
        pytest.param("normed", CHUNKED, marks=pytest.mark.slow),
        pytest.param("contrastive", SPREAD, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_coupled_and_stateful_members(x64, kind, plan):
    """A loss over the whole microbatch, with model state of each member's own."""
    task = {"normed": models.normed_task, "contrastive": models.contrastive_task}[kind](jnp.float64)
    plan = px.Plan(**{**vars(plan), "batch_dim": "major", "chunk": plan.chunk or 1})
    members = px.Members(3, resample=px.ensemble.bootstrap())
    rows = models.data(COUNT, dtype=np.float64)
    state = among(members, plan, task, models.optimizer(), rows)
    one = px.Plan(microbatches=plan.microbatches)
    program = one_network(task, models.optimizer(), models.cut(rows, BATCH), one)
    for member in range(3):
        source = ArrayData(rows, BATCH, member, resample=members.resample, member=member)
        after = after_steps(program, source, member)
        params = jax.tree.map(lambda leaf: leaf[member], state.params)  # noqa: B023
        assert models.max_rel_error(params, after.params) < 1e-10
        if kind == "normed":
            assert (
                models.max_rel_error(state.model_state["mean"][member], after.model_state["mean"])
                < 1e-9
            )


@pytest.mark.parametrize("batch_dim", ["major", "minor"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_precision_of_members(batch_dim, precision):
    """What bfloat16 cannot tell from 1, float32 can; parameters and updates stay in float32."""
    near = np.float32(1 + 2**-10)
    rows = {"x": np.full((4, 1), near)}
    task = px.Task(
        init=lambda key: jnp.ones(1),
        loss=lambda params, batch, keys: 1024 * (batch["x"] @ params - 1),
    )
    plan = px.Plan(chunk=2, precision=precision, batch_dim=batch_dim)
    members = px.Members(3, {"rate": [1e-6, 2e-6, 3e-6]})
    program = px.compile(task, lambda hyper: optax.sgd(hyper["rate"]), plan, rows, members=members)
    state, metrics = program.step(program.init(), rows)
    loss, slope = (1, 1025) if precision == "float32" else (0, 1024)
    assert metrics["loss"].tolist() == [loss] * 3
    assert metrics["grad_norm"].tolist() == [slope] * 3
    assert state.params.dtype == np.float32
    wanted = 1 - np.asarray(members.hyper["rate"]) * slope
    assert np.allclose(state.params[:, 0], wanted, rtol=2e-7, atol=0)
