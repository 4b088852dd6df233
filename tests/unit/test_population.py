"""Populations as values, and fit with members: reports, frozen members, resume, growth."""

import copy
import dataclasses
import gc
import json
import warnings
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmarks import choosing
from tests import models
from tests.pictures import panels
from tests.promotion import allowed

import plurax as px
from plurax.errors import NonFiniteWarning
from plurax.execute.array_data import ArrayData
from plurax.execute.choose_chunk import (
    FEWEST,
    MemberWork,
    autotune,
    choose_chunk,
    even_chunk,
    member_work,
)
from plurax.execute.over_members import over_members
from plurax.execute.population import Population
from plurax.execute.program import Program
from plurax.execute.summary import choice_text
from plurax.mesh import make_mesh
from plurax.report.curves_picture import draw_curves

ROWS = models.data(50)
TASK = models.mlp_task()
# Chunks that divide are traced once, others twice: a population that grows has these.
PLAN = px.Plan(member=2, chunk=3, batch_dim="major")
MEMBERS = px.Members(5, {"rate": px.ensemble.log_uniform(1e-3, 1e-1)}, px.ensemble.bootstrap())


def adam(hyper):
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(hyper["rate"]))


def fit(members=MEMBERS, data=ROWS, optimizer=adam, **options):
    options = {"plan": PLAN, "epochs": 3, "batch_size": 16, "progress": False, **options}
    return px.fit(TASK, optimizer, data, members=members, **options)


@pytest.fixture(scope="module")
def reference():
    return fit(evaluation=ROWS)


# --- The population as a value ----------------------------------------------------------------


def test_counts():
    assert px.Members(100).count == 100
    assert px.Members([3, 9]).count == 2
    assert px.Members(hyper={"rate": [0.1, 0.2, 0.3]}).count == 3
    grid = px.ensemble.grid(rate=[0.1, 0.2], width=[1, 2, 3])
    assert px.Members(hyper=grid).count == 6
    assert px.Members([7, 8], grid).count == 12
    assert px.Members(range(4)).count == 4


def test_a_grid_is_trained_with_every_seed():
    table = px.Members([7, 8], px.ensemble.grid(rate=[0.1, 0.2])).table()
    assert [(row["rate"], row["seed"]) for row in table] == [
        (0.1, 7), (0.1, 8), (0.2, 7), (0.2, 8),
    ]  # fmt: skip


def test_draws_are_in_range_and_stay_when_the_population_grows():
    few = px.Members(
        5, {"a": px.ensemble.uniform(1, 2), "b": px.ensemble.log_uniform(1e-4, 1)}
    ).hyper_table()
    many = px.Members(
        500, {"b": px.ensemble.log_uniform(1e-4, 1), "a": px.ensemble.uniform(1, 2)}
    ).hyper_table()
    assert np.array_equal(few["a"], many["a"][:5])
    assert np.array_equal(few["b"], many["b"][:5])
    assert 1 <= many["a"].min() < 1.05 < 1.95 < many["a"].max() < 2
    assert -4 <= np.log10(many["b"]).min() < -3.8
    assert np.median(np.log10(many["b"])) == pytest.approx(-2, abs=0.2)


def test_a_member_stays_what_it_is_when_taken():
    taken = MEMBERS.take([4, 1])
    assert taken.table() == [MEMBERS.table()[4], MEMBERS.table()[1]]
    assert taken.take([1]).table() == [MEMBERS.table()[1]]
    assert taken.arrays(50).indices.tolist() == [4, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: px.Members(), r"does not say how many members there are"),
        (lambda: px.Members(0), r"a population needs at least one member"),
        (lambda: px.Members([-1]), r"seed -1 is not a whole number from 0 to"),
        (
            lambda: px.Members(3, {"r": [1.0, 2.0]}),
            r"2 values for 3 members; a list has one",
        ),
        (lambda: px.Members(2, {"r": ["a", "b"]}).hyper_table(), r"must be a number for each"),
        (lambda: px.ensemble.grid(r=0.1), r"plurax.ensemble.grid\(r=0.1\): give a list"),
        (
            lambda: px.ensemble.uniform(2, 1),
            r"plurax.ensemble.uniform\(2, 1\): needs finite numbers, low < high",
        ),
        (lambda: px.ensemble.log_uniform(0, 1), r"needs finite numbers, 0 < low < high"),
        (lambda: px.Members(3).take([3]), r"there is no member 3: the members are 0 to 2"),
    ],
)
def test_populations_that_cannot_be(make, message):
    with pytest.raises(px.errors.MembersError, match=message):
        make()


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        (lambda: (seed for seed in (7, 8)), (7, 8)),
        (lambda: map(int, "78"), (7, 8)),
        (lambda: np.array([7, 8]), (7, 8)),
        (lambda: np.array(2), 2),
        (lambda: jnp.array(2), 2),
    ],
    ids=["generator", "map", "array", "number of NumPy", "number of JAX"],
)
def test_seeds_are_read_once(seeds, expected):
    members = px.Members(seeds())
    assert members == px.Members(expected)
    assert members.table() == px.Members(expected).table()


def test_a_plan_that_leaves_nothing_open_is_tuned_as_it_is(monkeypatch):
    """No program is built for it."""
    monkeypatch.setattr("plurax.train.tune.make_program", None)
    data = models.data(8)
    tuned = px.ensemble.tune(
        models.mlp_task(), models.optimizer(), data, members=px.Members(2), batch_size=4,
        plan=px.Plan(chunk=1, batch_dim="major"),
    )  # fmt: skip
    assert (tuned.plan, tuned.measured) == (px.Plan(chunk=1, batch_dim="major"), [])


# --- fit --------------------------------------------------------------------------------------


@pytest.mark.ci
def test_fit_reports_every_member(reference):
    last = reference.history[-1]
    losses = last["members"]["loss"]
    assert len(losses) == 5
    assert last["loss"] == pytest.approx(np.median(losses))
    assert (last["loss_best"], last["loss_worst"]) == (min(losses), max(losses))
    assert last["eval_loss"] < reference.history[0]["eval_loss"]
    assert last["examples"] == 5 * 50
    assert reference.state.params["bias"].shape[0] == 5
    assert reference.state.step.tolist() == [12] * 5
    means = reference.program.evaluate(reference.state, ROWS)
    assert np.allclose(means["loss"], last["members"]["eval_loss"])


def test_predict_gives_every_member_and_streams(reference):
    whole = reference.program.predict(reference.state, {"x": ROWS["x"]})
    assert whole.shape == (5, 50, 3)
    parts = reference.program.predict(reference.state, [{"x": ROWS["x"][:7]}, {"x": ROWS["x"][7:]}])
    assert np.allclose(np.concatenate(list(parts), axis=1), whole, atol=1e-6)
    for k in range(5):
        alone = models.logits(jax.tree.map(lambda x: x[k], reference.state.params), ROWS["x"])  # noqa: B023
        assert np.allclose(whole[k], alone, atol=1e-5)


@pytest.mark.ci
def test_batches_from_an_iterable_are_seen_by_every_member(reference):
    batches = [models.cut(ROWS, 16), jax.tree.map(lambda x: x[16:30], ROWS)]
    members = px.Members(2, {"rate": [0.01, 0.02]})
    result = fit(members, batches, epochs=2, batch_size=None)
    for k in range(2):
        alone = px.fit(TASK, adam(members.hyper_of(k)), batches, epochs=2, seed=k, progress=False)
        assert (
            models.max_rel_error(
                px.ensemble.export_member(result.state, k).params, alone.state.params
            )
            < 1e-5
        )
    with pytest.raises(
        px.errors.MembersError, match=r"draws rows by number, and these data do not stay"
    ):
        fit(MEMBERS, batches, batch_size=None)


def test_report_every_spares_rows(reference):
    result = fit(report_every=2, evaluation=ROWS)
    assert [row["epoch"] for row in result.history] == [2, 3]
    assert models.same_bits(result.state.params, reference.state.params)
    assert (
        result.history[-1]["members"]["eval_loss"]
        == (reference.history[-1]["members"]["eval_loss"])
    )
    with pytest.raises(
        px.errors.BatchError, match=r"report_every=0: give a whole number of epochs"
    ):
        fit(report_every=0)
    alone = px.fit(TASK, models.optimizer(), ROWS, epochs=3, batch_size=16, report_every=2,
                   progress=False)  # fmt: skip
    assert [row["examples"] for row in alone.history] == [100, 50]


LINEAR = px.Task(
    init=lambda key: jax.random.normal(key, (models.FEATURES,)),
    loss=lambda params, batch, keys: (batch["x"] @ params - batch["y"].astype(params.dtype)) ** 2,
)
DIVERGING = px.Members(3, {"rate": [0.01, 1e9, 0.01]})


def sgd(hyper):
    return optax.sgd(hyper["rate"])


def fit_diverging(members=DIVERGING, **options):
    options = {"plan": PLAN, "epochs": 4, "batch_size": 16, "progress": False, **options}
    return px.fit(LINEAR, sgd, ROWS, members=members, **options)


@pytest.mark.ci
def test_a_member_that_turns_nan_is_frozen_alone_and_named():
    with pytest.warns(NonFiniteWarning, match=r"in 1 of 3 members, which are frozen.*member 1"):
        result = fit_diverging()
    assert result.state.skipped[0] == result.state.skipped[2] == 0
    assert result.state.skipped[1] > 0
    assert np.isfinite(result.state.params).all()
    assert result.history[-1]["skipped"] == 1
    assert np.isfinite(result.history[-1]["loss_worst"])
    well = fit_diverging(DIVERGING.take([0, 2]))
    both = px.ensemble.take_members(result.state, [0, 2])
    assert models.max_rel_error(both.params, well.state.params) < 1e-6


def test_a_frozen_member_is_told_of_once():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = fit_diverging(epochs=9)
    assert [row["skipped"] for row in result.history][-3:] == [1, 1, 1]
    assert len([one for one in told if one.category is NonFiniteWarning]) == 1


@pytest.mark.ci
def test_reports_leave_frozen_members_out():
    """The evaluation of a frozen member is finite, and may be the best or the worst of all."""

    def poisoned(hyper):
        return dataclasses.replace(
            TASK,
            loss=lambda *args: jax.tree.map(lambda x: x / hyper["good"], TASK.loss(*args)),
        )

    members = px.Members(4, {"rate": 0.1, "good": [1.0, 0.0, 1.0, 1.0]})
    with pytest.warns(NonFiniteWarning, match="1 of 4 members"):
        result = px.fit(poisoned, adam, ROWS, members=members, plan=PLAN, epochs=2, batch_size=16,
                        evaluation=ROWS, progress=False)  # fmt: skip
    last = result.history[-1]
    losses = last["members"]["eval_loss"]
    well = [losses[0], losses[2], losses[3]]
    assert max(well) < losses[1] < np.inf
    assert last["eval_loss"] == pytest.approx(np.median(well))
    assert (last["eval_loss_best"], last["eval_loss_worst"]) == (min(well), max(well))


def test_a_population_with_a_frozen_member_resumes(tmp_path):
    with pytest.warns(NonFiniteWarning):
        whole = fit_diverging(epochs=7, evaluation=ROWS)
    for epochs in (2, 5, 7):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteWarning)
            resumed = fit_diverging(
                epochs=epochs, evaluation=ROWS, output=tmp_path, resume=epochs > 2
            )
    assert models.same_bits(resumed.state.params, whole.state.params)
    assert resumed.state.skipped.tolist() == whole.state.skipped.tolist()
    # What is not finite is null once it was written and read.
    one, other = (
        json.dumps([row["members"] for row in result.history])
        .replace("NaN", "null")
        .replace("Infinity", "null")
        for result in (resumed, whole)
    )
    assert one == other


def test_a_frozen_member_does_not_move_again():
    """One bad batch freezes it, though every other batch is well."""
    bad = {**ROWS, "x": ROWS["x"].copy()}
    bad["x"][40] = np.nan
    with pytest.warns(NonFiniteWarning, match=r"in 2 of 2 members"):
        result = fit(px.Members(2, {"rate": 0.01}), bad, shuffle=False, epochs=2)
    # Steps 1 and 2 were well, step 3 held row 40, and there were five more.
    assert result.state.skipped.tolist() == [6, 6]


def test_output_and_resume_bit_for_bit(tmp_path, reference):
    first = fit(epochs=2, output=tmp_path, evaluation=ROWS)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    epochs = [row for row in rows if row["kind"] == "epoch"]
    assert epochs[-1]["members"]["loss"] == first.history[-1]["members"]["loss"]
    assert px.Plan.load(tmp_path / "plan.toml") == PLAN
    resumed = fit(output=tmp_path, resume=True, evaluation=ROWS)
    assert models.same_bits(resumed.state.params, reference.state.params)
    assert models.same_bits(resumed.state.opt_state, reference.state.opt_state)
    assert [row["members"] for row in resumed.history] == [
        row["members"] for row in reference.history
    ]


# The first steps, on both sides of an epoch's end (of four steps each), and the last.
STOPS = (1, 4, 5, 11)


@pytest.mark.parametrize(
    "stop",
    [*STOPS, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12) if n not in STOPS)],
)
def test_resume_at_every_step(tmp_path, reference, stop):
    """A stop after any step: the loop goes on from (seed, member, epoch, position)."""
    source = ArrayData(ROWS, 16, resample=MEMBERS.resample, length=50)
    program = reference.program
    state = program.init()
    for turn in px.train.train_iter(program, state, source, epochs=3, checkpoint_every=stop):
        state, position = turn.state, turn.position
        if turn.step == stop:
            break
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(program.to_canonical(state), {})
        checkpoints.wait()
        restored, _ = checkpoints.restore(
            jax.eval_shape(program.to_canonical, program.state_shapes)
        )
    state = program.place(restored)
    for turn in px.train.train_iter(program, state, source, start=position, epochs=3):  # noqa: B007
        pass
    assert models.same_bits(program.to_canonical(turn.state).params, reference.state.params)


@pytest.mark.ci
def test_a_population_can_grow(tmp_path):
    fit(MEMBERS, epochs=2, output=tmp_path)
    more = px.Members(7, MEMBERS.hyper, MEMBERS.resample)
    grown = fit(more, epochs=3, output=tmp_path, resume=True)
    whole = fit(more, epochs=3)
    assert grown.state.params["bias"].shape[0] == 7
    assert models.max_rel_error(grown.state.params, whole.state.params) < 1e-5
    other = px.Members(7, {"rate": 0.1}, MEMBERS.resample)
    with pytest.raises(px.errors.CheckpointError, match=r"which do not begin with the same ones"):
        fit(other, output=tmp_path, resume=True)
    with pytest.raises(px.errors.CheckpointError, match=r"which do not begin with the same ones"):
        fit(MEMBERS.take([0, 1]), output=tmp_path, resume=True)


@pytest.mark.ci
def test_the_choice_of_a_run_is_written_down_and_kept_when_it_resumes(tmp_path):
    plan = px.Plan(member=2)
    first = fit(plan=plan, epochs=1, output=tmp_path)
    chosen = first.program.plan
    assert chosen.chunk == 3
    assert chosen.batch_dim == "minor"
    assert px.Plan.load(tmp_path / "plan.toml") == chosen
    assert "chunk=3, batch_dim=minor: chosen from the shapes" in choice_text(first.program.plan)
    other = dataclasses.replace(chosen, chunk=1, batch_dim="major")
    other.save(tmp_path / "plan.toml")
    resumed = fit(plan=plan, epochs=2, output=tmp_path, resume=True)
    assert resumed.program.plan == other


@pytest.mark.ci
def test_populations_repeat_bit_for_bit_with_everything_left_to_be_chosen():
    runs = [fit(plan=px.Plan(), optimizer=lambda h: optax.adam(h["rate"])) for _ in range(2)]
    assert runs[0].program.plan == runs[1].program.plan
    assert models.same_bits(runs[0].state.params, runs[1].state.params)
    assert runs[0].history[-1]["members"] == runs[1].history[-1]["members"]


@pytest.fixture(scope="module")
def linear():
    """A task, how it is trained, and the result; what was compiled is kept with the task."""
    task = dataclasses.replace(LINEAR)
    kind = {"members": MEMBERS, "plan": PLAN, "batch_size": 16, "progress": False}
    return task, kind, px.fit(task, sgd, ROWS, **kind)


def test_what_is_compiled_is_used_again(linear):
    """The same task, optimizer, plan and shapes: other seeds and rates in the same programs."""
    task, kind, first = linear
    other = px.Members(
        [9, 8, 7, 6, 5], {"rate": px.ensemble.uniform(0.01, 0.02)}, px.ensemble.bootstrap()
    )
    assert models.compilations(lambda: px.fit(task, sgd, ROWS, **{**kind, "members": other})) == 0
    again = px.fit(task, sgd, ROWS, **kind)
    assert models.same_bits(again.state.params, first.state.params)
    fresh = px.fit(dataclasses.replace(LINEAR), sgd, ROWS, **kind)
    assert models.same_bits(fresh.state.params, first.state.params)


CHANGES = {
    "members": {"members": MEMBERS.take([0, 1])},
    "resampling": {"members": dataclasses.replace(MEMBERS, resample=px.ensemble.kfold(3))},
    "batch size": {"batch_size": 8},
    "batch dim": {"plan": dataclasses.replace(PLAN, batch_dim="minor")},
    "order": {"shuffle": False},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_compiled_for_something_else_is_not_used(linear, name):
    task, kind, first = linear
    result = px.fit(task, sgd, ROWS, **{**kind, **CHANGES[name]})
    assert result.program is not first.program
    # In another order of sums members compute nearly the same.
    same = models.same_bits(result.state.params, first.state.params)
    assert not same or name == "batch dim"


@pytest.mark.parametrize(
    "name", ["members", *(pytest.param(n, marks=pytest.mark.slow) for n in [*CHANGES][1:])]
)
def test_a_task_that_was_compiled_before_trains_as_one_that_was_not(linear, name):
    task, kind, _ = linear
    both = [
        px.fit(one, sgd, ROWS, **{**kind, **CHANGES[name]}).state.params
        for one in (task, dataclasses.replace(LINEAR))
    ]
    assert models.same_bits(*both)


def test_what_was_compiled_for_another_optimizer_is_not_used(linear):
    task, kind, first = linear
    result = px.fit(task, lambda hyper: optax.adam(hyper["rate"]), ROWS, **kind)
    assert not models.same_bits(result.state.params, first.state.params)


def test_compiled_programs_go_with_their_task():
    task = dataclasses.replace(LINEAR)
    program = px.fit(task, sgd, ROWS, members=MEMBERS, plan=PLAN, batch_size=16,
                     progress=False).program  # fmt: skip
    assert copy.deepcopy(task) == task
    kept = weakref.ref(program)
    del task, program
    gc.collect()
    assert kept() is None


def test_a_program_of_one_network_is_used_again():
    task = dataclasses.replace(TASK)
    kind = {"batch_size": 16, "progress": False, "evaluation": ROWS}
    rule = models.optimizer()
    first = px.fit(task, rule, ROWS, **kind)
    assert px.fit(task, rule, ROWS, **kind).program is first.program
    assert px.fit(task, rule, ROWS, **{**kind, "batch_size": 8}).program is not first.program


def test_a_program_is_not_for_members_that_read_otherwise(reference):
    with pytest.raises(
        px.errors.MembersError, match=r"compiled for members that read their data by"
    ):
        reference.program.of(dataclasses.replace(MEMBERS, resample=px.ensemble.kfold(2)))


# --- Keeping members --------------------------------------------------------------------------


@pytest.mark.ci
def test_a_member_goes_on_alone(reference):
    state = px.ensemble.export_member(reference.state, 3)
    optimizer = adam(MEMBERS.hyper_of(3))
    alone = Program(TASK, optimizer, px.Plan(), models.cut(ROWS, 16), make_mesh(px.Plan()))
    assert np.allclose(
        alone.predict(alone.place(state), {"x": ROWS["x"]}),
        reference.program.predict(reference.state, {"x": ROWS["x"]})[3],
        atol=1e-6,
    )
    source = ArrayData(ROWS, 16, MEMBERS.seed_of(3), resample=MEMBERS.resample, member=3)
    start = px.train.Position(3)
    for turn in px.train.train_iter(alone, alone.place(state), source, start=start, epochs=5):  # noqa: B007
        pass
    longer = fit(MEMBERS.take([3]), epochs=5, plan=px.Plan(chunk=1, batch_dim="major"))
    assert (
        models.max_rel_error(turn.state.params, px.ensemble.export_member(longer.state, 0).params)
        < 1e-5
    )


def test_take_and_join(reference):
    one, rest = (
        px.ensemble.take_members(reference.state, [2]),
        px.ensemble.take_members(reference.state, [0, 1]),
    )
    joined = px.ensemble.join_members(rest, one)
    assert joined.step.shape == (3,)
    assert models.same_bits(
        px.ensemble.export_member(joined, 2).params,
        px.ensemble.export_member(reference.state, 2).params,
    )
    with pytest.raises(px.errors.MembersError, match=r"there is no member 5"):
        px.ensemble.take_members(reference.state, [5])
    with pytest.raises(px.errors.MembersError, match=r"the states differ in structure, shape"):
        px.ensemble.join_members(one, dataclasses.replace(one, opt_state=()))
    with pytest.raises(px.errors.MembersError, match=r"this is the state of one network"):
        px.ensemble.export_member(px.ensemble.export_member(one, 0), 0)
    with pytest.raises(
        px.errors.MembersError, match=r"holds 3 members and this program is compiled for"
    ):
        reference.program.predict(joined, {"x": ROWS["x"]})


# --- Errors -----------------------------------------------------------------------------------


def test_a_plan_for_members_without_members():
    with pytest.raises(
        px.errors.PlanError, match=r"splits the members of a population, and this is one"
    ):
        px.fit(TASK, models.optimizer(), ROWS, batch_size=16, plan=px.Plan(member=2))


def test_hyperparameters_that_nobody_takes():
    with pytest.raises(
        px.errors.MembersError, match=r"neither the task nor the optimizer is a function"
    ):
        fit(optimizer=models.optimizer())


def test_a_hyperparameter_that_is_not_given():
    with pytest.raises(
        px.errors.TaskError, match=r"asked for the hyperparameter 'decay'.*gives 'rate'"
    ):
        fit(optimizer=lambda hyper: optax.adamw(hyper["rate"], weight_decay=hyper["decay"]))


def test_a_function_of_more_than_the_dict_of_hyperparameters():
    def named(rate, decay):
        return optax.adamw(rate, weight_decay=decay)

    with pytest.raises(
        px.errors.TaskError,
        match=r"optimizer=named is called with one argument, the dict of a member's .* cannot be: "
        r"missing a required argument: 'decay'\. Write .* lambda hyper: \.\.\.\(hyper\['rate'\]\)",
    ):
        fit(optimizer=named)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_what_members_compute_has_the_dtype_of_their_hyperparameters(dtype):
    """5 members on two devices fill 6 slots; the state of a member is as an array of JAX says."""

    def task(hyper):
        return px.Task(
            init=lambda key: jnp.full(2, hyper["start"]),
            loss=lambda params, batch, keys: (batch * params[None]).sum(axis=1),
        )

    starts, batch = np.arange(5, dtype=dtype), np.ones((4, 2), dtype)
    members = px.Members(5, {"start": starts})
    program = px.compile(task, optax.sgd(0.5), PLAN, batch, members=members)
    state, _ = program.step(program.init(), batch)
    params = program.to_canonical(state).params
    assert params.dtype == dtype
    np.testing.assert_array_equal(params, np.stack([starts, starts], 1) - dtype(0.5))
    other = dataclasses.replace(state, params=state.params.astype(jnp.bfloat16))
    with pytest.raises(px.errors.BatchError, match=r"params: bfloat16\[6,2\]"):
        program.step(other, batch)


def test_a_hyperparameter_that_decides_what_code_runs():
    def optimizer(hyper):
        return optax.adam(1e-3) if hyper["rate"] > 0.01 else optax.sgd(1e-3)

    with pytest.raises(px.errors.TaskError, match=r"it cannot decide what code runs"):
        fit(optimizer=optimizer)


# --- Choosing ---------------------------------------------------------------------------------


def measured_chunk(case, chunk):
    return min({one["chunk"] for one in case["milliseconds"]}, key=lambda c: abs(np.log(c / chunk)))


@pytest.mark.parametrize("index", range(5))
def test_the_rule_is_near_the_fastest_that_was_measured(index):
    """Processor time of a step, in the measurements that are kept beside the benchmark."""
    found = json.loads((Path(choosing.__file__).with_suffix(".json")).read_text())["cases"][index]
    case = choosing.CASES[index]
    assert found["case"]["name"] == case.name
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), choosing.batch(case))
    plan = px.Plan()
    rule = optax.adam(1e-2)
    task = allowed(choosing.task(case))
    population = Population(task, rule, plan, make_mesh(plan), like, px.Members(1))
    plan = choose_chunk(plan, case.members, member_work(population), "cpu")
    chunk = measured_chunk(found, plan.chunk)
    cpu = {(one["chunk"], one["batch_dim"]): one["cpu"] for one in found["milliseconds"]}
    assert cpu[chunk, plan.batch_dim] <= 1.05 * min(cpu.values())


def test_the_rule():
    small = MemberWork(bytes=1000, columns=8.0, plain=True)
    large = MemberWork(bytes=10**9, columns=4096.0, plain=True)
    looped = MemberWork(bytes=1000, columns=8.0, plain=False)
    rule = lambda *args: (lambda p: (p.chunk, p.batch_dim))(choose_chunk(*args))  # noqa: E731
    assert rule(px.Plan(), 100, small, "cpu") == (100, "minor")
    assert rule(px.Plan(), 10_000, small, "cpu") == (625, "minor")
    assert rule(px.Plan(), 100, large, "cpu") == (20, "major")
    assert rule(px.Plan(), 100, looped, "cpu")[1] == "major"
    assert rule(px.Plan(), 10_000, small, "gpu") == (10_000, "major")
    assert rule(px.Plan(chunk=7), 100, small, "cpu") == (7, "minor")
    assert rule(px.Plan(batch_dim="major"), 100, small, "cpu") == (100, "major")
    assert even_chunk(FEWEST - 1, FEWEST) == FEWEST - 1
    for members in range(1, 60):
        for target in (1, 5, 16, 100):
            chunk = even_chunk(members, target)
            assert 1 <= chunk <= min(members, 2 * target)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("columns", [1.0, 8.0, 4096.0])
@pytest.mark.parametrize("bytes_", [1, 1000, 10**9])
@pytest.mark.parametrize("plain", [True, False])
def test_what_the_caches_of_a_cpu_ask_for_is_chosen_there_alone(platform, columns, bytes_, plain):
    work = MemberWork(bytes=bytes_, columns=columns, plain=plain)
    plan = choose_chunk(px.Plan(), 1000, work, platform)
    assert (plan.chunk, plan.batch_dim) == (1000, "major")


@pytest.mark.ci
def test_less_memory_makes_smaller_chunks(monkeypatch):
    batch, members = models.cut(ROWS, 16), px.Members(64)
    kind = (TASK, models.optimizer(), px.Plan(batch_dim="major"), batch)
    whole = px.compile(*kind, members=members)
    assert whole.plan.chunk == 64
    monkeypatch.setattr(
        "plurax.execute.choose_chunk.memory_budget", lambda mesh: whole.memory().peak - 1
    )
    assert px.compile(*kind, members=members).plan.chunk == 16


@pytest.mark.ci
def test_tune_measures_what_is_left_open():
    tuning = px.ensemble.tune(
        TASK, adam, ROWS, members=MEMBERS, batch_size=16, plan=px.Plan(chunk=5)
    )
    assert tuning.plan.chunk == 5
    assert {(one.chunk, one.batch_dim) for one in tuning.measured} == {(5, "major"), (5, "minor")}
    assert f"fastest: chunk=5, batch_dim={tuning.plan.batch_dim}" in str(tuning)
    assert (
        px.ensemble.tune(TASK, adam, ROWS, members=MEMBERS, batch_size=16, plan=PLAN).plan == PLAN
    )


def chosen(seconds, differs=False, budget=10**9, plan=px.Plan(), members=100):  # noqa: B008
    """`fastest_plan` on made-up programs: `seconds(chunk, batch_dim)` is the time of a step."""
    now = [0.0]

    def build(candidate):
        def make():
            def run(steps):
                now[0] += steps * seconds(candidate.chunk, candidate.batch_dim)
                off = 0.1 if differs and candidate.batch_dim == "minor" else 0.0
                return {"loss": np.ones(3) + off, "grad_norm": np.ones(3)}

            return run

        return candidate.chunk * 1000, make

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plurax.execute.choose_chunk.time.perf_counter", lambda: now[0])
        return autotune(plan, members, build, budget, 1e-4)


def test_the_fastest_is_chosen():
    plan, _ = chosen(lambda chunk, dim: chunk + (0.5 if dim == "minor" else 1) + 64 / chunk)
    assert (plan.batch_dim, plan.chunk) == ("minor", 16)
    plan, _ = chosen(lambda chunk, dim: 1 / chunk)
    assert (plan.batch_dim, plan.chunk) == ("major", 100)
    plan, _ = chosen(lambda chunk, dim: chunk)
    assert plan.chunk == 1


def test_what_was_set_is_not_chosen():
    plan, measured = chosen(lambda chunk, dim: chunk, plan=px.Plan(chunk=7))
    assert (plan.chunk, [c.chunk for c in measured]) == (7, [7, 7])
    plan, _ = chosen(lambda chunk, dim: chunk, plan=px.Plan(batch_dim="minor"))
    assert (plan.chunk, plan.batch_dim) == (1, "minor")


def test_minor_that_differs_is_left_out():
    fast_minor = lambda chunk, dim: 1.0 if dim == "minor" else 2.0  # noqa: E731
    plan, measured = chosen(fast_minor, differs=True)
    assert plan.batch_dim == "major"
    assert "differs by 1.0e-01 from major" in next(c.left_out for c in measured if c.left_out)


def test_a_chunk_that_does_not_fit_is_left_out():
    plan, measured = chosen(lambda chunk, dim: 1 / chunk, budget=70_000)
    assert plan.chunk == 64
    assert any("needs 100,000 bytes of 70,000" in c.left_out for c in measured)


def test_init_takes_hyperparameters_too():
    def task(hyper):
        return px.Task(
            init=lambda key: jax.tree.map(lambda x: x * hyper["scale"], models.init(key)),
            loss=TASK.loss,
        )

    members = px.Members([0, 0], {"scale": [1.0, 2.0]})
    program = px.compile(task, optax.sgd(0.1), px.Plan(chunk=2, batch_dim="major"), ROWS,
                         members=members)  # fmt: skip
    params = program.init().params
    assert jnp.allclose(params["hidden"][1], 2 * params["hidden"][0])


# --- Pictures ---------------------------------------------------------------------------------


def epoch(step, losses):
    finite = [loss for loss in losses if np.isfinite(loss)]
    middle = float(np.median(finite)) if finite else "nan"
    row = {"kind": "epoch", "step": step, "epoch": step, "loss": middle}
    return {**row, "members": {"loss": [loss if np.isfinite(loss) else None for loss in losses]}}


@pytest.mark.parametrize(
    ("rows", "points"),
    [
        ([epoch(1, [3.0, 2.0]), epoch(2, [1.0, 0.5])], 2),
        ([epoch(1, [3.0]), epoch(2, [1.0, 0.5, 2.0])], 2),
        ([epoch(1, [3.0, 2.0]), epoch(2, [np.nan, 0.5])], 2),
        ([epoch(1, [3.0, 2.0]), epoch(2, [np.nan, np.nan])], 1),
        ([epoch(1, [np.nan, np.nan])], 0),
    ],
    ids=["two epochs", "grown", "one frozen", "all frozen", "never finite"],
)
def test_curves_of_a_population(tmp_path, drawn, rows, points):
    draw_curves(rows, tmp_path / "curves.png")
    (panel,) = panels(drawn["curves.png"])
    assert (panel.x, panel.y) == ("step", "loss")
    assert panel.title == ("" if points else "no finite value")
    assert panel.areas == (2 if points else 0)
    median = "training, mean of the epoch: median, 50 %, 90 %"
    assert panel.lines == ([(median, points), ("best member", points)] if points else [])


def test_a_population_starts_from_seeds_of_its_own():
    batch = models.cut(ROWS, 16)
    program = px.compile(TASK, models.optimizer(), PLAN, batch, members=px.Members(2))
    with pytest.raises(px.errors.MembersError, match=r"init\(seed=...\) starts one network"):
        program.init(0)
    with pytest.raises(px.errors.MembersError, match=r"init\(params=...\) starts one network"):
        program.init(params=program.init().params)


def test_one_network_has_no_members_to_exchange_and_no_data_of_its_own():
    batch = models.cut(ROWS, 16)
    program = px.compile(TASK, models.optimizer(), px.Plan(), batch)
    with pytest.raises(
        px.errors.MembersError, match="compiled for one network, so it has no members"
    ):
        program.of(px.Members(2))
    with pytest.raises(
        px.errors.MembersError, match="is for members, each of which reads the arrays"
    ):
        px.compile(TASK, models.optimizer(), px.Plan(), batch, data=px.train.ArrayData(ROWS, 16))


def test_data_of_members_are_arrays_with_an_order():
    batch = models.cut(ROWS, 16)
    with pytest.raises(
        px.errors.MembersError, match="takes arrays and the order in which members read"
    ):
        px.compile(TASK, models.optimizer(), PLAN, batch, members=px.Members(2), data=ROWS)
    with pytest.raises(
        px.errors.BatchError, match=r"ArrayData.* have 24 examples, and batch has 16"
    ):
        px.compile(TASK, models.optimizer(), PLAN, batch, members=px.Members(2),
                   data=px.train.ArrayData(ROWS, 24))  # fmt: skip


def test_a_program_keeps_the_shapes_of_its_data_and_not_the_data():
    data = px.train.ArrayData(ROWS, 16)
    program = px.compile(TASK, models.optimizer(), PLAN, data.example_batch(),
                         members=px.Members(2), data=data)  # fmt: skip
    assert all(
        isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(program.data.arrays)
    )


@pytest.mark.parametrize("chunk", [None, 1, 2, 3, 5, 9])
def test_a_function_of_one_member_runs_over_all_of_them(chunk):
    """Chunks change nothing; what is shared has no dim of members."""

    def step(state, rate, x):
        return {"w": state["w"] - rate * x}, {"loss": state["w"].sum()}

    state, rates = {"w": jnp.arange(10.0).reshape(5, 2)}, jnp.arange(5.0)
    x = jnp.array([1.0, 2.0])
    after, metrics = jax.jit(over_members(step, chunk))(state, rates, x)
    for member in range(5):
        alone, loss = step({"w": state["w"][member]}, rates[member], x)
        assert jnp.array_equal(after["w"][member], alone["w"])
        assert metrics["loss"][member] == loss["loss"]
    # Without states nothing is written back, and a chunk that divides is traced once.
    results = over_members(lambda w, rate: ((), w["w"] * rate), chunk, keep=False)(state, rates)
    assert results[0] == ()
    assert jnp.array_equal(results[1], state["w"] * rates[:, None])
