"""One step, anchored by numbers worked out by hand: the mean, its gradient, what is left out."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models
from tests.zoo.by_hand import scale_by_loss

import plurax as px
from plurax.execute.step import Gradients, make_apply, whole_update
from plurax.execute.totals import accumulate
from plurax.state import TrainState

X, Y = np.array([1.0, 2, 3, 4, 5, 6], np.float32), np.array([1.0, 0, 2, 1, 3, 2], np.float32)
WEIGHTS = np.array([1.0, 2, 1, 4, 1, 3], np.float32)
ROWS = {"x": X, "y": Y, "w": WEIGHTS}
PLANS = [
    px.Plan(),
    px.Plan(data=3, microbatches=2),
    px.Plan(data=2, zero=1),
    px.Plan(data=2, zero=2, microbatches=2),
    px.Plan(data=2, zero=3),
    px.Plan(remat="full"),
]
EACH = pytest.mark.parametrize("plan", PLANS, ids=str)


def line(**fields):
    """`y = a x` with two parameters; `b` meets `x` under a square root."""
    return px.Task(
        init=lambda key: {"a": jnp.full(2, 0.25), "b": jnp.ones(2)},
        loss=lambda params, batch, keys: (
            (params["a"].sum() * batch["x"] - batch["y"]) ** 2
            + jnp.sqrt((params["b"].sum() * batch["x"]) ** 2),
            {"height": batch["y"]},
        ),
        **fields,
    )


@EACH
@pytest.mark.parametrize("weighted", [False, True])
def test_norm_and_value_are_those_of_the_mean(plan, weighted):
    task = line(weight=(lambda batch: batch["w"]) if weighted else None)
    rule = optax.chain(scale_by_loss(), optax.sgd(0.1))
    program = px.compile(task, rule, plan, ROWS)
    state, metrics = program.step(program.init(), ROWS)
    weights = WEIGHTS if weighted else np.ones(6)
    loss = np.average((0.5 * X - Y) ** 2 + 2 * X, weights=weights)
    slope = np.average(2 * (0.5 * X - Y) * X, weights=weights), np.average(X, weights=weights)
    norm = np.sqrt(2 * slope[0] ** 2 + 2 * slope[1] ** 2)
    height = np.average(Y, weights=weights)
    names = ("loss", "height", "grad_norm", "weight", "examples", "skipped")
    got = [metrics[name] for name in names]
    np.testing.assert_allclose(got, [loss, height, norm, weights.sum(), 6, 0], rtol=1e-5)
    params = jax.device_get(program.to_canonical(state).params)
    np.testing.assert_allclose(params["a"], 0.25 - 0.1 * slope[0] / (1 + loss) + np.zeros(2), 1e-5)
    np.testing.assert_allclose(params["b"], 1 - 0.1 * slope[1] / (1 + loss) + np.zeros(2), 1e-5)


@EACH
def test_a_gradient_that_is_not_finite_under_a_loss_that_is(plan):
    """The square root of nothing has no derivative; its value is nothing."""
    program = px.compile(line(), optax.adam(0.1), plan, ROWS)
    before = program.init()
    kept = jax.device_get(program.to_canonical(before))
    state, metrics = program.step(before, {**ROWS, "x": np.where(X == 5, 0, X).astype(np.float32)})
    assert np.isfinite(metrics["loss"])
    assert not np.isfinite(metrics["grad_norm"])
    assert int(metrics["skipped"]) == int(state.skipped) == int(state.step) == 1
    after = jax.device_get(program.to_canonical(state))
    assert models.same_bits((after.params, after.opt_state), (kept.params, kept.opt_state))


def test_a_member_whose_gradient_is_not_finite_under_a_loss_that_is():
    plan = px.Plan(chunk=2, batch_dim="major")
    program = px.compile(line(), optax.adam(0.1), plan, ROWS, members=px.Members(2))
    state, metrics = program.step(program.init(), {**ROWS, "x": np.zeros_like(X)})
    assert np.isfinite(metrics["loss"]).all()
    assert state.skipped.tolist() == metrics["skipped"].tolist() == [1, 1]
    assert np.isfinite(state.params["b"]).all()


@EACH
def test_steps_and_evaluations_without_weight(plan):
    """Neither has a mean: the step is left out, and the evaluation is not zero but nothing."""
    task = line(weight=lambda batch: batch["w"])
    program = px.compile(task, optax.adam(0.1), plan, ROWS)
    none = {**ROWS, "w": np.zeros_like(X)}
    assert np.isnan(program.evaluate(program.init(), none)["loss"])
    state, metrics = program.step(program.init(), none)
    assert int(metrics["skipped"]) == 1
    assert np.isfinite(program.to_canonical(state).params["a"]).all()
    assert np.isfinite(program.evaluate(state, [none, ROWS])["loss"])


@EACH
def test_a_loss_that_is_not_finite_counts_under_any_weight(plan):
    """Zero times NaN is NaN."""
    program = px.compile(line(weight=lambda batch: batch["w"]), optax.adam(0.1), plan, ROWS)
    hidden = {**ROWS, "y": np.full_like(Y, 1), "w": np.ones_like(X)}
    hidden["y"][2], hidden["w"][2] = np.nan, 0
    state, metrics = program.step(program.init(), hidden)
    assert (int(metrics["skipped"]), np.isnan(metrics["loss"])) == (1, True)
    hidden["y"][2] = 1
    assert int(program.step(state, hidden)[1]["skipped"]) == 0


@pytest.mark.parametrize("members", [None, px.Members(2)])
def test_skipped_steps_are_no_part_of_an_epochs_means(tmp_path, members):
    """The epoch's row is the mean over the steps that were taken, by their weights."""
    weight = lambda batch: batch["w"]  # noqa: E731
    bad = {**ROWS, "y": np.where(X == 4, np.nan, Y).astype(np.float32)}
    plan = px.Plan(chunk=2, batch_dim="major") if members else px.Plan()
    with pytest.warns(px.errors.NonFiniteWarning):
        result = px.fit(
            line(weight=weight), optax.sgd(0.0), bad, batch_size=2, epochs=1, shuffle=False,
            plan=plan, members=members, output=tmp_path / "run", progress=False,
        )  # fmt: skip
    # Rate nothing: the parameters stay, and the loss of every example is known. A member is frozen
    # from the second step on; one network leaves out that step alone.
    losses, taken = (0.5 * X - Y) ** 2 + 2 * X, np.array([1, 1, 0, 0, 1, 1])
    if members:
        taken = np.array([1, 1, 0, 0, 0, 0])
    expected = np.average(losses, weights=WEIGHTS * taken)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (row,) = [row for row in map(json.loads, lines) if row["kind"] == "epoch"]
    for one in (row, result.history[-1]):  # frozen members stand in no median
        got = one["members"]["loss"] if members else one["loss"]
        np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("given", "summed"), [("bfloat16", "float32"), ("float16", "float32"), ("float64", "float64")]
)
def test_sums_over_microbatches_are_wide_for_one_of_them_too(x64, microbatches, given, summed):
    rows = jnp.ones((microbatches, 3), given)
    total, turns = accumulate(lambda turns, row: (row.sum(), turns + 1), microbatches)(0, rows)
    assert (total.dtype, int(turns)) == (summed, microbatches)
    assert float(total) == 3 * microbatches


def with_constants(optimizer):
    """An optimizer with more in its state: a constant, the same array twice, what it was given."""

    def init(params):
        own = {"constant": jnp.float32(3), "first": jnp.ones(3), "second": jnp.ones(3)}
        return {"own": own, "kept": jnp.arange(3.0), "inner": optimizer.init(params)}

    def update(grads, state, params=None):
        updates, inner = optimizer.update(grads, state["inner"], params)
        total = state["own"]["first"] + state["own"]["second"]
        own = {"constant": jnp.float32(5), "first": total, "second": total}
        return updates, {"own": own, "kept": state["kept"], "inner": inner}

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("skipped", [0, 1])
def test_a_select_leaves_a_step_out_as_a_branch_does(bad, skipped):
    """What runs on TPUs and GPUs, and for members on CPU, bit for bit; where optimizer and model
    state are of other dtypes than the update computes."""
    inner = optax.adam(optax.cosine_decay_schedule(0.1, 10), mu_dtype=jnp.bfloat16)
    optimizer = with_constants(inner)
    params = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16)}
    state = TrainState(
        step=jnp.int32(3),
        params=params,
        opt_state=optimizer.init(params),
        model_state={"mean": jnp.zeros(3), "key": jax.random.key(1)},
        key=jax.random.key(0),
        skipped=jnp.int32(skipped),
    )
    grads = jax.tree.map(lambda leaf: jnp.full(leaf.shape, jnp.nan if bad else 2.0), params)
    after = {"mean": jnp.ones(3), "key": jax.random.key(2)}
    sums = Gradients(jnp.float32(4), jnp.float32(8), {}, grads, after, jnp.int32(4))
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, params)
    # A network that is no member goes on after a step that was left out.
    ways = [{"freeze": True, "select": True}, {"freeze": True}, *([] if skipped else [{}])]
    results = [
        jax.jit(make_apply(whole_update(optimizer), dtypes, **way))(state, sums) for way in ways
    ]
    first, *others = (jax.tree.map(_bits, result) for result in results)
    assert all(jax.tree.all(jax.tree.map(np.array_equal, first, other)) for other in others)
    left_out = bad or skipped
    assert int(results[0][1]["skipped"]) == left_out
    assert np.array_equal(results[0][0].params["w"], params["w"]) == left_out
    assert int(results[0][0].opt_state["own"]["constant"]) == (3 if left_out else 5)


def _bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()
