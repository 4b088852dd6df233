"""Bad steps in a row: back to a proven checkpoint, their data skipped, the same after any kill."""

import json
import shutil

import grain
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import models
from tests.draws import draws

import plurax as px
from plurax.checkpoint import Checkpoints
from plurax.errors import RollbackWarning
from plurax.execute.array_data import ArrayData, Position
from plurax.guards.rollback import (
    FEWEST,
    WINDOW,
    Rollbacks,
    Watch,
    observe,
    target,
)
from plurax.loop.iterate import train_iter
from plurax.loop.log_rows import read_rows

pytestmark = pytest.mark.filterwarnings("ignore::plurax.errors.NonFiniteWarning")

TASK, OPTIMIZER, PLAN = models.mlp_task(), models.optimizer(), px.Plan(data=2)
SIZE, PER_EPOCH, EPOCHS = 4, 20, 2
RULE = px.train.Rollback(after=3)


def rows(*bad, value=np.nan):
    """Data of which some batches (from 1) have a value far from all others."""
    data = models.data(SIZE * PER_EPOCH)
    for batch in bad:
        data["x"][SIZE * (batch - 1) : SIZE * batch] = value
    return data


def fit(data, output=None, **options):
    options = {"epochs": EPOCHS, "rollback": RULE, "checkpoint_every": 4, **options}
    return px.fit(
        options.pop("task", TASK), OPTIMIZER, data, plan=PLAN, batch_size=SIZE, shuffle=False,
        output=output, progress=False, **options,
    )  # fmt: skip


def by_hand(program, data, back, skip, resident, epochs=EPOCHS):
    """The parameters of a run that trains `back` steps, and goes on after `skip` batches."""
    source = ArrayData(data, SIZE, shuffle=False)
    options = {"epochs": epochs, "resident": resident, "checkpoint_every": 1}
    turns = train_iter(program, program.init(0), source, **options)
    state = next(steps.state for steps in turns if steps.step == back)
    start = Position(*divmod(skip, PER_EPOCH))
    *_, last = train_iter(program, state, source, start=start, **options)
    return last.state.params


def records(output):
    lines = (output / "rollbacks.jsonl").read_text().splitlines()
    return [(one["from"], one["to"]) for one in map(json.loads, lines)]


# --- The rule ---------------------------------------------------------------------------------


def watched(rule, steps, watch=Watch()):  # noqa: B008  frozen
    for number, (loss, left_out) in enumerate(steps, 1):
        watch = observe(rule, watch, number, loss, left_out=left_out)
    return watch


@draws(100)
@given(st.lists(st.booleans(), max_size=60), st.integers(1, 6))
def test_what_is_counted(left_out, after):
    rule = px.train.Rollback(after=after)
    found = watched(rule, [(np.nan if out else 1.0, out) for out in left_out])
    ends = [
        i + 1 for i in range(after - 1, len(left_out)) if not any(left_out[i + 1 - after : i + 1])
    ]
    assert found.proven == max((end - after for end in ends), default=-1)
    tail = len(left_out) - max((i + 1 for i, out in enumerate(left_out) if not out), default=0)
    assert found.bad == tail
    assert target([2, 5, 9], found) == max(
        (s for s in (2, 5, 9) if s <= found.proven), default=None
    )


@draws(50)
@given(st.lists(st.sampled_from([1.0, 1.1, 0.9, 50.0, np.nan, np.inf]), max_size=300))
def test_spikes_and_what_is_not_finite_never_count_as_good_losses(losses):
    rule = px.train.Rollback(after=2, spike=8.0)
    watch, good = Watch(), [1.0, 1.1, 0.9] * FEWEST
    for loss in good:
        watch = observe(rule, watch, 1, loss, left_out=False)
    for loss in losses:
        watch = observe(rule, watch, 1, loss, left_out=not np.isfinite(loss))
        assert (watch.bad > 0) == (loss not in good)
    kept = [loss for loss in good + losses if loss in good]
    assert watch.losses == tuple(kept[-WINDOW:])


def test_no_loss_is_a_spike_after_a_few():
    watch = watched(px.train.Rollback(spike=3.0), [(1.0, False)] * (FEWEST - 1))
    assert observe(px.train.Rollback(spike=3.0), watch, 9, 1e9, left_out=False).bad == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"after": -1}, r"Rollback\(after=-1\): give the number of bad steps in a row"),
        ({"limit": 2.5}, r"Rollback\(limit=2.5\): give the number of rollbacks"),
        ({"spike": 0}, r"Rollback\(spike=0\): give the standard deviations above the mean"),
    ],
)
def test_what_no_rule_can_be(options, message):
    with pytest.raises(px.errors.BatchError, match=message):
        px.train.Rollback(**options)


# --- Runs -------------------------------------------------------------------------------------


@pytest.mark.ci
def test_single_bad_steps_are_left_out_as_ever(tmp_path):
    data = rows(9, 11, 12)
    result = fit(data, tmp_path)
    assert int(result.state.skipped) == 6
    assert not (tmp_path / "rollbacks.jsonl").exists()
    assert models.same_bits(result.state.params, fit(data).state.params)


@pytest.mark.parametrize("resident", [True, False])
def test_a_run_goes_back_and_skips(tmp_path, resident):
    """Bad at 13, 14 and 15: what follows step 9 is proven by steps 10 to 12, so back to step 8."""
    data = rows(13, 14, 15)
    with pytest.warns(
        RollbackWarning, match=r"steps up to 15 were bad .* goes back to step 8, and"
    ):
        result = fit(data, tmp_path, resident=resident, epochs=1)
    assert records(tmp_path) == [(8, 15)]
    assert int(result.state.step) == 8 + PER_EPOCH - 15
    assert int(result.state.skipped) == 0
    expected = by_hand(result.program, data, 8, 15, resident, epochs=1)
    assert models.same_bits(result.state.params, expected)
    logged = list(read_rows(tmp_path / "metrics.jsonl"))
    assert [row["step"] for row in logged if row["kind"] == "step"] == list(range(1, 14))
    (event,) = [row for row in logged if row["kind"] == "event"]
    assert (event["event"], event["from"], event["to"]) == ("rollback", 8, 15)
    assert [row["step"] for row in result.history] == [13]
    assert Checkpoints(tmp_path / "checkpoints").steps()[-1] == 13
    again = fit(data, tmp_path, resident=resident, epochs=1, resume=True)
    assert models.same_bits(again.state.params, expected)


@pytest.mark.ci
def test_a_window_over_the_end_of_an_epoch(tmp_path):
    """Batches 19 and 20 of the first epoch and 1 of the second: that epoch has no row."""
    listed = [
        batch for batch, _ in ArrayData(rows(1, 19, 20), SIZE, shuffle=False).batches(Position())
    ]
    source = [*listed, *listed]
    with pytest.warns(RollbackWarning, match=r"steps up to 21 were bad .* back to step 12"):
        result = fit(source, tmp_path, epochs=1)
    assert records(tmp_path) == [(12, 21)]
    with pytest.warns(RollbackWarning):
        epochs = fit(rows(1, 19, 20), tmp_path / "epochs", resident=False)
    assert records(tmp_path / "epochs") == [(12, 21)]
    assert [(row["epoch"], row["examples"]) for row in epochs.history] == [(2, SIZE * 19)]
    assert models.same_bits(epochs.state.params, result.state.params)


class Score:
    """The first epoch is the best, in whatever row it has."""

    def on_epoch(self, run, row):
        row["score"] = float(row["epoch"])


def test_a_best_state_that_a_rollback_abandons_is_forgotten(tmp_path):
    """Step 20, the end of an epoch, was kept as the best; from step 12 that epoch has no end."""
    best = px.callbacks.KeepBest("score")
    with pytest.warns(RollbackWarning, match="back to step 12"):
        result = fit(rows(1, 19, 20), tmp_path, resident=False, callbacks=[Score(), best])
    assert [row["epoch"] for row in result.history] == [2]
    kept = best.restore(result.program)
    assert models.same_bits(result.program.to_canonical(kept).params, result.state.params)
    assert Checkpoints(tmp_path / "best").steps() == [int(result.state.step)]


def test_a_grain_dataset_goes_on_after_the_window(tmp_path):
    data = rows(13, 14, 15)
    dataset = grain.MapDataset.source(range(SIZE * PER_EPOCH)).map(
        lambda i: jax.tree.map(lambda leaf: leaf[i], data)
    )
    with pytest.warns(RollbackWarning):
        result = fit(dataset.to_iter_dataset().batch(SIZE), tmp_path, epochs=1)
    expected = by_hand(result.program, data, 8, 15, resident=False, epochs=1)
    assert models.same_bits(result.state.params, expected)


def squared(params, batch, keys):
    return (batch["x"] @ params["hidden"]).sum(1) ** 2


@pytest.mark.ci
def test_a_spike_rolls_back(tmp_path):
    """Found by its size alone: the losses are finite, and the steps are taken."""
    task = px.Task(init=models.init, loss=squared)
    data = models.data(SIZE * 60)
    data["x"][SIZE * 50 : SIZE * 52] *= 1e3
    options = {"epochs": 1, "rollback": px.train.Rollback(after=2, spike=8.0), "task": task}
    with pytest.warns(RollbackWarning, match=r"not finite, or a spike\)"):
        result = fit(data, tmp_path / "once", **options)
    assert records(tmp_path / "once") == [(48, 52)]
    with pytest.warns(RollbackWarning):
        again = fit(data, tmp_path / "again", **options)
    assert models.same_bits(again.state.params, result.state.params)
    once, again = (tmp_path / name / "rollbacks.jsonl" for name in ("once", "again"))
    assert once.read_bytes() == again.read_bytes()
    assert int(fit(data, tmp_path / "without", **{**options, "rollback": RULE}).state.step) == 60
    assert not (tmp_path / "without" / "rollbacks.jsonl").exists()


def test_some_rollbacks_stop_the_run(tmp_path):
    data, once = rows(10, 11, 12, 16, 17, 18), px.train.Rollback(after=3, limit=1)
    with (
        pytest.warns(RollbackWarning),
        pytest.raises(
            px.errors.RunStoppedError,
            match=r"(?s)batch 18 of epoch 1: the last 3 steps were bad .*at step 12 it went back "
            r"to step 4.*Try a smaller learning rate",
        ),
    ):
        fit(data, tmp_path, epochs=1, rollback=once)
    with pytest.raises(px.errors.RunStoppedError):  # it does not get past that by resuming
        fit(data, tmp_path, epochs=1, rollback=once, resume=True)
    with pytest.warns(RollbackWarning):
        fit(data, tmp_path, epochs=1, resume=True)


def test_without_a_proven_checkpoint_training_goes_on(tmp_path):
    data = rows(2, 3, 4)
    with pytest.warns(RollbackWarning, match=r"no checkpoint before them is proven good yet"):
        result = fit(data, tmp_path, epochs=1)
    assert records(tmp_path) == [(None, 4)]
    assert int(result.state.skipped) == 3
    assert models.same_bits(result.state.params, fit(data, epochs=1).state.params)


def test_a_checkpoint_in_the_middle_of_bad_steps_is_not_gone_back_to(tmp_path):
    """Steps 8, 12, 16 and 20 have checkpoints, and only that of 8 has good steps after it."""
    with pytest.warns(RollbackWarning):
        fit(rows(12, 14, 16, 17, 18), tmp_path, epochs=1)
    assert records(tmp_path) == [(8, 18)]


def test_a_proven_checkpoint_is_kept_until_another_is_proven(tmp_path):
    data = rows(7, 9, 11, 13, 15, 17, 18, 19)
    with pytest.warns(RollbackWarning):
        fit(data, tmp_path, epochs=1, checkpoint_every=2)
    assert records(tmp_path) == [(2, 19)]


def test_a_target_that_is_damaged_gives_way_to_one_before(tmp_path, monkeypatch):
    """Killed once a rollback is recorded; the checkpoint to go back to has lost a bit since."""
    data, real = rows(13, 14, 15), Rollbacks._replace

    def replace(self, written):
        real(self, written)
        if not (tmp_path / "killed").exists():
            shutil.copytree(tmp_path / "run", tmp_path / "killed")

    monkeypatch.setattr(Rollbacks, "_replace", replace)
    with pytest.warns(RollbackWarning):
        whole = fit(data, tmp_path / "run", epochs=1)
    killed = tmp_path / "killed"
    assert records(killed) == [(8, 15)]
    (killed / "checkpoints" / "8" / "meta" / "metadata").write_text("torn")
    (killed / "checkpoints" / "writer.lock").write_text("")  # this process has not died
    with pytest.warns((RollbackWarning, px.errors.DamagedCheckpointWarning)):
        resumed = fit(data, killed, epochs=1, resume=True)
    assert Checkpoints(killed / "checkpoints").damaged() == ["8.damaged"]
    assert records(killed) == [(8, 15)]
    assert models.same_bits(resumed.state.params, whole.state.params)


def test_another_restart_forgets_them(tmp_path):
    with pytest.warns(RollbackWarning):
        fit(rows(13, 14, 15), tmp_path, epochs=1)
    fit(rows(), tmp_path, epochs=1, restart=True)
    assert not (tmp_path / "rollbacks.jsonl").exists()
    assert (tmp_path / "before.1" / "rollbacks.jsonl").exists()


def test_off_without_output_and_by_choice(tmp_path):
    data = rows(13, 14, 15)
    assert int(fit(data, epochs=1).state.skipped) == 3
    off = px.train.Rollback(after=0)
    assert int(fit(data, tmp_path, epochs=1, rollback=off).state.skipped) == 3


@pytest.mark.parametrize(
    "options", [{"members": px.Members(2)}, {"servers": px.Servers(1, workers=1)}]
)
def test_members_and_servers_have_rules_of_their_own(tmp_path, options):
    with pytest.raises(
        px.errors.BatchError, match=r"rollback= is for one network without servers, and"
    ):
        fit(rows(), tmp_path, **options)
    with pytest.raises(px.errors.BatchError, match=r"must be a plurax.train.Rollback"):
        fit(rows(), rollback=10)
