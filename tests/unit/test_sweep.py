"""Sweeps, successive halving, and how many members fit."""

import csv
import dataclasses
import json
import math
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models
from tests.pictures import panels

import plurax as px
from plurax.errors import NonFiniteWarning
from plurax.report.parallel_picture import draw_parallel
from plurax.sweeps import halving as halving_
from plurax.sweeps.sweep import Sweep, _value

ROWS = models.data(48)
TASK = models.mlp_task()
PLAN = px.Plan(chunk=4, batch_dim="major")
MEMBERS = px.Members(4, {"rate": [1e-4, 1e-1, 1e-2, 1e-3]})


def adam(hyper):
    return optax.adam(hyper["rate"])


def make_task(width):
    """A network of some width."""

    def init(key):
        return {
            "in": jnp.ones((models.FEATURES, width)) * 0.1,
            "out": jnp.linspace(-1, 1, width * models.CLASSES).reshape(width, models.CLASSES),
        }

    def loss(params, batch, keys):
        out = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(out, batch["y"])

    return px.Task(init=init, loss=loss)


SHAPES = px.ensemble.grid(width=[4, 8], batch_size=[16, 24])


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    output = tmp_path_factory.mktemp("sweep")
    found = px.sweep(
        make_task, adam, ROWS, members=MEMBERS, shapes=SHAPES, plan=PLAN, epochs=2,
        evaluation=ROWS, output=output, progress=False,
    )  # fmt: skip
    return found, output


# --- Sweeps -----------------------------------------------------------------------------------


@pytest.mark.ci
def test_every_setting_has_a_row(table):
    found, _ = table
    assert len(found.rows) == 2 * 2 * 4
    assert {(row["width"], row["batch_size"], row["rate"]) for row in found.rows} == {
        (width, size, rate)
        for width in (4, 8) for size in (16, 24) for rate in MEMBERS.hyper["rate"]
    }  # fmt: skip
    assert {"member", "seed", "loss", "eval_loss", "frozen", "seconds"} < set(found.rows[0])


@pytest.mark.ci
def test_a_row_is_the_end_of_its_members_history(table):
    found, _ = table
    for bucket, (shape, result) in enumerate(found.fits):
        assert result.state.step.devices() == {jax.devices()[0]}  # of one plan after another
        rows = [row for row in found.rows if row["bucket"] == bucket]
        seconds = sum(one["seconds"] for one in result.history) / 4
        assert rows == [
            {
                "bucket": bucket,
                "width": shape["width"],
                "batch_size": shape["batch_size"],
                **one,
                **{
                    name: values[member]
                    for name, values in result.history[-1]["members"].items()
                },
                "frozen": False,
                "seconds": pytest.approx(seconds),
            }
            for member, one in enumerate(MEMBERS.table())
        ]  # fmt: skip
        for row in rows:
            assert found.history(row) == [
                {
                    "epoch": one["epoch"],
                    "step": one["step"],
                    **{name: values[row["member"]] for name, values in one["members"].items()},
                }
                for one in result.history
            ]


def test_a_bucket_is_the_population_trained_alone(table):
    found, _ = table
    row = next(r for r in found.rows if (r["width"], r["batch_size"], r["member"]) == (8, 24, 2))
    alone = px.fit(
        make_task(8), optax.adam(1e-2), ROWS, batch_size=24, epochs=2, seed=2, progress=False
    )
    assert models.max_rel_error(found.state(row).params, alone.state.params) < 1e-5
    assert [one["epoch"] for one in found.history(row)] == [1, 2]
    assert found.history(row)[-1]["eval_loss"] == row["eval_loss"]


def test_best(table):
    found, _ = table
    assert found.best()["eval_loss"] == min(row["eval_loss"] for row in found.rows)
    assert found.best("loss", mode="max")["loss"] == max(row["loss"] for row in found.rows)
    with pytest.raises(px.errors.MembersError, match=r"there is no metric 'accuracy'; there are"):
        found.best("accuracy")
    with pytest.raises(
        px.errors.MembersError, match=r"mode='largest': choose 'min' where the smallest"
    ):
        found.best("loss", mode="largest")
    with pytest.raises(px.errors.MembersError, match=r"this is not a row of this sweep"):
        found.state({"width": 5, "batch_size": 16, "member": 0})


def test_importance_of_settings(table):
    found, _ = table
    shares = found.importance()
    assert next(iter(shares)) == "rate"
    assert shares.keys() == {"rate", "width", "batch_size"}
    assert 0.3 < shares["rate"] <= 1
    assert found.importance("loss").keys() == shares.keys()
    with pytest.raises(px.errors.MembersError, match="lost"):
        found.importance("lost")


def test_a_report_of_a_sweep_has_its_table(table, tmp_path):
    page = px.analysis.write_report(table[1], tmp_path / "sweep.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert len(data["runs"]) == 4
    first = data["sweeps"][0]
    assert first["title"].endswith("/table.csv")
    assert first["names"] == ["width", "batch_size", "rate"]
    assert len(first["rows"]) == 16
    assert dict(zip(first["names"], first["importance"]["eval_loss"], strict=True))["rate"][0] > 0.3


def test_tables_leave_the_library(table, tmp_path, monkeypatch, drawn):
    found, output = table
    with (output / "table.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [float(row["eval_loss"]) for row in read] == [row["eval_loss"] for row in found.rows]
    assert (output / "width=4,batch_size=16" / "metrics.jsonl").is_file()
    frame = found.to_pandas()
    assert frame.shape == (16, len(found.rows[0]))
    history = found.to_pandas(history=True)
    assert len(history) == 32
    assert {"width", "rate", "epoch", "eval_loss"} < set(history.columns)
    draw_parallel(found.rows, ["width", "batch_size", "rate"], "eval_loss", tmp_path / "p.png")
    (panel,) = panels(drawn["p.png"])
    across, upright = (sum(n == size for _, n in panel.lines) for size in (4, 2))
    assert (across, upright) == (len(found.rows), 4)  # a line for each row, an axis for each name
    assert {"width", "batch size", "rate (log)", "eval loss"} < set(panel.texts)
    assert sum(label == "the best" for label, _ in panel.lines) == 1
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(px.errors.MembersError, match=r"to_pandas needs pandas: pip install pandas"):
        found.to_pandas()


def test_of_values_close_together_one_is_labelled():
    rows = [{"rate": rate, "loss": rate} for rate in (0.00116, 0.00134, 0.0239, 0.297, 0.403)]
    (axis,) = draw_parallel(rows, ["rate"], "loss").axes
    texts = [text.get_text() for text in axis.texts]
    assert "0.00134" not in texts
    assert texts[:4] == ["0.00116", "0.0239", "0.297", "0.403"]


@pytest.mark.parametrize(("mode", "best"), [("min", 1.0), ("max", 3.0)])
def test_the_best_row_is_the_one_drawn_as_best(mode, best):
    scores = [2.0, 3.0, np.nan, 1.0]
    rows = [{"rate": score, "loss": score} for score in scores]
    (axis,) = draw_parallel(rows, ["rate"], "loss", mode=mode).axes
    (line,) = [line for line in axis.lines if line.get_label() == "the best"]
    place = (best - 1) / 2
    np.testing.assert_allclose(line.get_ydata(), [place, place])


@pytest.mark.ci
def test_buckets_side_by_side_give_the_same(table):
    found, _ = table
    beside = px.sweep(
        make_task, adam, ROWS, members=MEMBERS, shapes=SHAPES, epochs=2, evaluation=ROWS,
        plan=px.Plan(member=2, chunk=4, batch_dim="major"), num_parallel=4, progress=False,
    )  # fmt: skip
    for a, b in zip(beside.rows, found.rows, strict=True):
        assert a["eval_loss"] == pytest.approx(b["eval_loss"], rel=1e-4)
    devices = [result.state.step.sharding.device_set for _, result in beside.fits]
    pairs = [set(jax.devices()[start : start + 2]) for start in range(0, 8, 2)]
    assert all(one in pairs for one in devices), devices
    with pytest.raises(px.errors.PlanError, match=r"needs 16 devices"):
        px.sweep(TASK, adam, ROWS, members=MEMBERS, plan=px.Plan(member=4), num_parallel=4,
                 batch_size=16)  # fmt: skip


def test_callbacks_begin_anew_in_each_bucket():
    """Of buckets that train at once they would be told of several runs."""
    options = {"members": MEMBERS, "plan": PLAN, "epochs": 4, "progress": False}
    stops = {"callbacks": [px.callbacks.EarlyStopping("loss", patience=1, mode="max")]}
    shapes = [{"width": 4, "batch_size": 16}] * 2
    found = px.sweep(make_task, adam, ROWS, shapes=shapes, **options, **stops)
    assert [len(result.history) for _, result in found.fits] == [2, 2]
    message = r"the callback EarlyStopping follows one run at a time, and num_parallel=2 buckets"
    with pytest.raises(px.errors.TaskError, match=message):
        px.sweep(make_task, adam, ROWS, shapes=shapes, num_parallel=2, **options, **stops)
    options |= {"plan": px.Plan(member=4), "callbacks": stops["callbacks"][0]}
    with pytest.raises(px.errors.TaskError, match="are a EarlyStopping; write a list"):
        px.sweep(make_task, adam, ROWS, shapes=shapes, num_parallel=2, **options)


def test_a_sweep_that_is_all_frozen():
    bad = {**ROWS, "x": np.full_like(ROWS["x"], np.nan)}
    with pytest.warns(NonFiniteWarning, match="4 of 4 members"):
        found = px.sweep(TASK, adam, bad, members=MEMBERS, plan=PLAN, batch_size=16, progress=False)
    assert all(row["frozen"] for row in found.rows)
    with pytest.raises(px.errors.MembersError, match=r"all 4 members of the sweep are frozen"):
        found.best()


# --- Successive halving -----------------------------------------------------------------------


def test_the_order_of_scores():
    """The best first; then what is not finite and who is frozen, as they come."""
    scores, skipped = [2.0, 1.0, math.nan, 0.5, 1.0, math.inf, 9.0], np.array([0, 0, 0, 1, 0, 0, 2])
    assert halving_._ranked(scores, skipped, sign=1) == [1, 4, 0, 2, 3, 5, 6]
    assert halving_._ranked(scores, skipped, sign=-1) == [0, 1, 4, 2, 3, 5, 6]


@pytest.mark.parametrize(
    ("given", "budgets"),
    [((1, 20, 3), [1, 3, 9, 20]), ((2, 8, 2), [2, 4, 8]), ((2, 7, 2), [2, 4, 7]), ((5, 5, 2), [5])],
)
def test_budgets_grow_by_the_reduction(given, budgets):
    assert halving_._budgets(*given) == budgets


MANY = px.Members(9, {"rate": px.ensemble.log_uniform(1e-4, 1e-1)}, px.ensemble.bootstrap())


# Members that a chunk does not divide are another program beside it.
THREES = dataclasses.replace(PLAN, chunk=3)


def halving(**options):
    options = {"epochs": 9, "plan": THREES, "batch_size": 16,
               "evaluation": ROWS, "progress": False, **options}  # fmt: skip
    return px.ensemble.successive_halving(TASK, adam, ROWS, members=MANY, **options)


@pytest.fixture(scope="module")
def halved():
    return halving()


@pytest.fixture(scope="module")
def straight():
    """All members to the end, with their evaluation after every epoch."""
    return px.fit(TASK, adam, ROWS, members=MANY, plan=THREES, epochs=9, batch_size=16,
                  evaluation=ROWS, progress=False)  # fmt: skip


@pytest.mark.ci
def test_survivors_are_the_best_by_the_metric(halved, straight):
    """Read from a run that halves nothing."""
    alive = list(range(9))
    for epochs, rung in zip([1, 3, 9], halved.rungs, strict=True):
        losses = straight.history[epochs - 1]["members"]["eval_loss"]
        assert rung.members == alive
        assert rung.scores == pytest.approx([losses[k] for k in alive], rel=1e-4)
        order = sorted(range(len(alive)), key=lambda i: rung.scores[i])
        alive = [alive[i] for i in order[: -(-len(alive) // 3)]]
    assert [row["member"] for row in halved.members.table()] == alive


@pytest.mark.ci
def test_survivors_trained_as_if_nothing_had_been_halved(halved, straight):
    number = halved.members.table()[0]["member"]
    whole = px.ensemble.export_member(straight.state, number)
    assert (
        models.max_rel_error(px.ensemble.export_member(halved.state, 0).params, whole.params) < 1e-5
    )
    means = halved.program.evaluate(halved.state, ROWS)
    assert means["loss"][0] == pytest.approx(halved.rungs[-1].scores[0], rel=1e-5)


def test_the_work_shrinks(halved):
    assert [len(rung.members) for rung in halved.rungs] == [9, 3, 1]
    assert [rung.epochs for rung in halved.rungs] == [1, 3, 9]


@pytest.mark.ci
@pytest.mark.parametrize("slots", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_fewer_slots_choose_the_same(halved, slots):
    turns = halving(slots=slots)
    assert [rung.members for rung in turns.rungs] == [rung.members for rung in halved.rungs]
    assert models.max_rel_error(turns.state.params, halved.state.params) < 1e-5


def test_the_table_has_every_candidate(halved):
    rows = halved.table()
    assert [row["member"] for row in rows] == list(range(9))
    assert sorted(row["epochs"] for row in rows) == [1] * 6 + [3] * 2 + [9]
    assert {"rate", "seed", "score"} < set(rows[0])


def test_halving_by_the_training_metric_and_its_errors():
    found = halving(evaluation=None, metric="accuracy", mode="max", epochs=3)
    scores = found.rungs[0].scores
    assert found.rungs[1].members[0] == int(np.argmax(scores))
    with pytest.raises(
        px.errors.MembersError, match=r"needs 1 <= min_epochs <= epochs and a reduction"
    ):
        halving(min_epochs=0)
    with pytest.raises(
        px.errors.MembersError, match=r"needs 1 <= min_epochs <= epochs and a reduction"
    ):
        halving(reduction=1)
    with pytest.raises(px.errors.MembersError, match=r"there is no metric 'none'"):
        halving(metric="none")


@pytest.mark.parametrize("evaluation", [None, ROWS])
def test_halving_names_metrics_as_rows_do(evaluation, monkeypatch):
    """`eval_accuracy` of the evaluation, `accuracy` of training; known before the first step."""
    wanted = "accuracy" if evaluation is None else "eval_accuracy"
    both = halving(evaluation=ROWS, metric="accuracy", mode="max", epochs=1)
    found = halving(evaluation=evaluation, metric=wanted, mode="max", epochs=1)
    assert (found.rungs[0].scores == both.rungs[0].scores) == (evaluation is None)
    monkeypatch.setattr("plurax.sweeps.halving._train", None)
    there = "there are loss, grad_norm, accuracy" + ", eval_loss, eval_accuracy" * bool(evaluation)
    for name in ("acc", "eval_acc", "members", *(() if evaluation else ("eval_accuracy",))):
        with pytest.raises(px.errors.MembersError, match=rf"no metric '{name}'; {there}"):
            halving(evaluation=evaluation, metric=name)


def hyper_task(**metrics):
    """Linear regression whose metrics are hyperparameters; the loss of a `bad` member is NaN."""

    def values(hyper, batch):
        return {name: jnp.full(batch["x"].shape[:1], hyper[of]) for name, of in metrics.items()}

    def task(hyper):
        def loss(params, batch, keys):
            losses = (batch["x"] @ params - batch["y"].astype(params.dtype)) ** 2
            return jnp.where(hyper["bad"] > 0, jnp.nan, losses), values(hyper, batch)

        return px.Task(
            init=lambda key: jax.random.normal(key, (models.FEATURES,)),
            loss=loss,
            evaluate=lambda params, batch: (
                batch["x"] @ params - batch["y"].astype(params.dtype),
                values(hyper, batch),
            ),
        )

    return task


@pytest.mark.ci
@pytest.mark.parametrize(
    ("slots", "mode"),
    [
        (None, "max"),
        (3, "min"),
        pytest.param(None, "min", marks=pytest.mark.slow),
        pytest.param(3, "max", marks=pytest.mark.slow),
    ],
)
def test_frozen_members_are_the_first_to_go(slots, mode):
    """Ranked by hand: the frozen have the best score of all, and it is finite."""
    score = [5.0, 99.0, 3.0, 8.0, 98.0, 1.0, 4.0] if mode == "max" else [5, -9, 3, 8, -8, 1, 4]
    members = px.Members(7, {"score": score, "bad": [0, 1, 0, 0, 1, 0, 0]})
    with pytest.warns(NonFiniteWarning, match="are frozen") as told:
        # The warning names the caller's line: here without the check of its annotations.
        found = px.ensemble.successive_halving.__wrapped__(
            hyper_task(merit="score"), optax.sgd(1e-2), ROWS, members=members, epochs=4,
            min_epochs=1, reduction=2, slots=slots, batch_size=16, evaluation=ROWS,
            metric="eval_merit", mode=mode, plan=px.Plan(chunk=7, batch_dim="major"),
            progress=False,
        )  # fmt: skip
    assert {one.filename for one in told} == {__file__}
    # Of 7 stay 4, of 4 stay 2: one in two, rounded up.
    best, stay, left = (
        ([3, 0, 6, 2], [3, 0], [5, 1, 4]) if mode == "max" else ([5, 2, 6, 0], [5, 2], [3])
    )
    assert [rung.members for rung in found.rungs] == [list(range(7)), best, stay]
    assert found.rungs[0].scores == pytest.approx(score)
    assert [row["member"] for row in found.members.table()] == stay
    assert {row["member"] for row in found.table() if row["epochs"] == 1} >= {*left, 1, 4}


def test_where_all_are_frozen_the_survivors_are_too():
    members = px.Members(3, {"score": [1.0, 2.0, 3.0], "bad": 1})
    with pytest.warns(NonFiniteWarning, match="3 of 3 members"):
        found = px.ensemble.successive_halving(
            hyper_task(merit="score"), optax.sgd(1e-2), ROWS, members=members, epochs=2,
            min_epochs=1, reduction=2, batch_size=16, plan=PLAN, progress=False,
        )  # fmt: skip
    assert np.isnan(found.rungs[-1].scores).all()
    assert (np.asarray(found.state.skipped) > 0).all()


def test_scores_are_of_the_last_epoch_of_training(straight):
    """The mean over the rung's last epoch, as a run that halves nothing reports it."""
    found = halving(evaluation=None)
    for rung in found.rungs:
        losses = straight.history[rung.epochs - 1]["members"]["loss"]
        assert rung.scores == pytest.approx([losses[k] for k in rung.members], rel=1e-4)


@pytest.mark.parametrize("use", [Sweep.best, lambda found: found.save_csv("table.csv")])
def test_a_sweep_that_was_stopped_at_once_has_no_rows(use):
    with pytest.raises(
        px.errors.MembersError, match=r"the table of this sweep is empty: it was stopped"
    ):
        use(Sweep([], []))


def test_best_is_never_a_frozen_member():
    rows = [
        {"member": 0, "loss": 0.5, "accuracy": 0.7, "frozen": False},
        {"member": 1, "loss": 0.1, "accuracy": 0.9, "frozen": True},
        {"member": 2, "loss": 0.4, "accuracy": 0.6, "frozen": False},
        {"member": 3, "loss": math.nan, "accuracy": math.nan, "frozen": False},
    ]
    found = Sweep(rows, [])
    assert found.best()["member"] == 2
    assert found.best("accuracy", mode="max")["member"] == 0
    assert found.best("loss", mode="max")["member"] == 0


# --- How many fit -----------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize(
    "plan", [px.Plan(member=2, chunk=2), pytest.param(PLAN, marks=pytest.mark.slow)], ids=str
)
def test_found_members_fit_and_more_do_not(plan):
    batch = models.cut(ROWS, 16)
    found = px.ensemble.max_members(TASK, adam, plan, batch, members=MEMBERS, memory=2**20)
    assert int(found) == found.count > 16
    assert found.count % (plan.member * plan.chunk) == 0
    assert found.bytes <= 2**20 < found.next_bytes
    assert found.compilations <= 10
    members = px.Members(found.count, {"rate": 0.1})
    program = px.compile(TASK, adam, px.Plan(**{**vars(plan), "batch_dim": "major"}), batch,
                         members=members)  # fmt: skip
    assert program.memory().peak == found.bytes


@pytest.mark.ci
def test_a_few_large_members_fit_where_a_chunk_does_not():
    batch = models.cut(ROWS, 16)
    one = px.ensemble.max_members(
        TASK, adam, px.Plan(chunk=1), batch, members=MEMBERS, memory=2**20
    )
    per_member = one.bytes / one.count
    found = px.ensemble.max_members(TASK, adam, px.Plan(), batch, members=MEMBERS,
                           memory=int(12 * per_member) + 20_000)  # fmt: skip
    assert found.count >= 1
    assert found.bytes <= found.budget < found.next_bytes


def test_no_member_fits():
    with pytest.raises(
        px.errors.MembersError, match=r"no population fits: the smallest possible, 4 mem"
    ):
        px.ensemble.max_members(
            TASK, adam, PLAN, models.cut(ROWS, 16), members=MEMBERS, memory=1000
        )


def test_halving_needs_arrays():
    with pytest.raises(
        px.errors.MembersError, match=r"successive_halving needs data that stay on the"
    ):
        px.ensemble.successive_halving(TASK, adam, [ROWS], members=MEMBERS, batch_size=16, epochs=3)


@pytest.mark.ci
def test_shapes_of_different_names(tmp_path, capsys):
    """A shape whose settings are a part of another's is a bucket of its own."""
    note = "[red]" + 50 * "wide"
    shapes = [{"width": 4}, {"width": 4, "batch_size": 16, "note": note}]
    found = px.sweep(
        lambda width, note="": make_task(width), adam, ROWS, members=MEMBERS.take([1, 2]),
        shapes=shapes, plan=PLAN, batch_size=24, epochs=2, output=tmp_path,
    )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    names = ("width=4", f"width=4,batch_size=16,note={note}")
    for line, name, (_, result) in zip(lines, names, found.fits, strict=True):
        last, seconds = result.history[-1], sum(one["seconds"] for one in result.history)
        assert line == (
            f"{name}: 2 members, loss {last['loss']:.4f} ({last['loss_best']:.4f} to "
            f"{last['loss_worst']:.4f}), {seconds:.1f} s"
        )
    places = [(row["bucket"], row["member"], row["batch_size"], row["note"]) for row in found.rows]
    assert places == [(0, 1, None, None), (0, 2, None, None), (1, 1, 16, note), (1, 2, 16, note)]
    for row in found.rows:
        assert found.history(row)[-1]["loss"] == row["loss"]
    assert found.rows[0]["loss"] != found.rows[2]["loss"]
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 5


def test_values_that_are_not_there_are_not_a_number():
    """A member that was added later, or had no finite value."""
    values = [_value([0.5, None], index) for index in (0, 1, 2, 5)]
    assert values == pytest.approx([0.5, math.nan, math.nan, math.nan], nan_ok=True)


def test_a_signal_ends_a_sweep_with_what_is_done():
    """The first shape stops in its second epoch, and the second shape is not begun."""
    made = []

    class Batches:
        passes = 0

        def __iter__(self):
            self.passes += 1  # the first only looks at one batch
            for start in (0, 16, 32):
                if (self.passes, start) == (3, 16):
                    os.kill(os.getpid(), signal.SIGINT)
                yield {name: rows[start : start + 16] for name, rows in ROWS.items()}

    def task(width):
        made.append(width)
        return make_task(width)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    found = px.sweep(task, adam, Batches(), members=MEMBERS, shapes=px.ensemble.grid(width=[4, 8]),
                     plan=PLAN, epochs=3, progress=False)  # fmt: skip
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert made == [4]
    ((shape, result),) = found.fits
    assert (shape, result.interrupted) == ({"width": 4}, "SIGINT")
    assert [row["width"] for row in found.rows] == [4] * 4
