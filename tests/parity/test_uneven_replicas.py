"""Replicas with different numbers of microbatches, beside one device: all that runs such a plan."""

import jax
import numpy as np
import pytest
from tests import models

import plurax as px
from plurax.execute import early_reduction, placement
from plurax.resample import bootstrap

ROWS = models.data(30, weights=True, dtype=np.float64)
TASK = models.mlp_task(weights=True, dtype=np.float64)
OPTIMIZER = models.optimizer()
PLANS = {
    "two": px.Plan(data=2, microbatches=(3, 1)),
    "three": px.Plan(data=3, microbatches=(1, 2, 1)),
    "zero 1": px.Plan(data=2, microbatches=(5, 2), zero=1),
    "tensor": px.Plan(
        data=2, tensor=2, microbatches=(1, 3), shardings={"hidden": (None, "tensor")}
    ),
}
pytestmark = pytest.mark.usefixtures("x64")


def fit(plan, **options):
    return px.fit(
        TASK, OPTIMIZER, ROWS, plan=plan, batch_size=13, epochs=2, progress=False, **options
    )


def states(run):
    state = run.state
    return jax.device_get((state.params, state.opt_state))


def difference(run, other):
    return models.max_rel_error(states(run), states(other))


@pytest.fixture(scope="module")
def one():
    with jax.enable_x64(True):
        return fit(px.Plan())


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("resident", [True, False])
def test_a_run_equals_that_of_one_device(one, name, resident):
    """Its last batch of an epoch has 4 examples: of most plans some microbatches have none."""
    run = fit(PLANS[name], resident=resident)
    assert difference(run, one) < 1e-10
    got, want = (np.asarray([row["loss"] for row in each.history]) for each in (run, one))
    np.testing.assert_allclose(got, want, rtol=1e-10)


@pytest.mark.ci
def test_evaluation_and_outputs_equal_those_of_one_device(one):
    program, alone = (
        px.compile(TASK, OPTIMIZER, plan, models.cut(ROWS, 13))
        for plan in (PLANS["two"], px.Plan())
    )
    state = program.place(one.state)
    want = alone.evaluate(alone.place(one.state), ROWS)
    assert models.max_rel_error(program.evaluate(state, ROWS), want) < 1e-12
    outputs = [each.predict(each.place(one.state), ROWS) for each in (program, alone)]
    np.testing.assert_allclose(*outputs, rtol=1e-12)


@pytest.mark.ci
def test_halves_of_a_step_and_parts_of_a_batch():
    program = px.compile(TASK, OPTIMIZER, PLANS["two"], ROWS)
    state, metrics = program.step(program.init(), ROWS)
    start = program.init()
    # As workers of parameter servers compute parts of a batch, of examples 0 to 10 and 11 to 29.
    parts = [
        program.gradients(start, jax.tree.map(lambda x, cut=cut: x[cut], ROWS), first=cut.start)
        for cut in (slice(0, 11), slice(11, 30))
    ]
    sums = jax.tree.map(lambda a, b: a + b, *(part._replace(model_state=()) for part in parts))
    halves, measured = program.apply(start, sums._replace(model_state=start.model_state))
    assert models.max_rel_error(halves.params, state.params) < 1e-10
    assert models.max_rel_error(measured, metrics) < 1e-10


@pytest.mark.ci
def test_servers(one):
    run = fit(PLANS["two"], servers=px.Servers(workers=1, shards=2))
    assert difference(run, one) < 1e-10


@pytest.mark.ci
@pytest.mark.parametrize("resampled", [False, True])
def test_members_equal_those_of_one_device(resampled):
    """Of a batch that all share, and of rows that each reads itself."""
    members = px.Members(3, **({"resample": bootstrap()} if resampled else {}))
    plan = px.Plan(member=2, data=2, microbatches=(1, 3), chunk=1, batch_dim="major")
    runs = [fit(each, members=members) for each in (plan, px.Plan())]
    assert difference(*runs) < 1e-10


@pytest.mark.ci
def test_a_reduction_in_the_backward_pass_of_the_last_microbatch(one, monkeypatch):
    """As GPUs do: the last microbatch of every replica is after its loop."""
    monkeypatch.setattr(early_reduction, "PLATFORMS", frozenset({"cpu"}))
    for name in ("two", "zero 1"):
        assert difference(fit(PLANS[name]), one) < 1e-10


def test_several_processes_read_rows_of_their_own_devices(monkeypatch):
    program = px.compile(TASK, OPTIMIZER, PLANS["three"], ROWS)
    want = jax.device_get(program.place_batch(models.cut(ROWS, 29)).rows)
    monkeypatch.setattr(placement, "process_count", lambda: 2)
    got = program.place_batch(models.cut(ROWS, 29)).rows
    assert models.same_bits(got, want)
    # Microbatches of 8 rows: of devices with 1, 2 and 1 microbatches, with room for 2.
    first = [int(np.flatnonzero((ROWS["x"] == row).all(1))[0]) for row in want["x"][::16]]
    assert first == [0, 8, 24]
    with pytest.raises(px.errors.BatchError, match="with one number of microbatches"):
        program.place_batch(ROWS, local=True)


def test_every_example_is_computed_once_and_padding_never():
    seen = []

    def loss(params, batch, keys):
        jax.debug.callback(lambda rows: seen.append(rows.tolist()), batch["row"])
        return (batch["x"] @ params["hidden"]).sum(axis=1) ** 2

    rows = {"x": models.data(12, dtype=np.float64)["x"], "row": np.arange(12)}
    task = px.Task(init=TASK.init, loss=loss)
    program = px.compile(task, OPTIMIZER, PLANS["two"], rows)
    state = program.init()
    jax.effects_barrier()
    seen.clear()
    jax.block_until_ready(program.step(state, rows))
    jax.effects_barrier()
    assert sorted(seen) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_a_coupled_loss_is_refused():
    with pytest.raises(px.errors.PlanError, match="couples the examples of a microbatch"):
        px.compile(models.normed_task(), OPTIMIZER, PLANS["two"], models.data(12))


@pytest.mark.ci
def test_a_run_goes_on_under_another_plan(tmp_path, one):
    fit(PLANS["two"], output=tmp_path, checkpoint_every=2, max_steps=4)
    run = fit(PLANS["three"], output=tmp_path, checkpoint_every=2, resume=True)
    assert int(run.state.step) == int(one.state.step) == 6
    assert difference(run, one) < 1e-10


@pytest.mark.ci
def test_verify_finds_the_same_training():
    assert px.verify(TASK, OPTIMIZER, PLANS["zero 1"], ROWS).ok
