"""Callbacks: who is called when, with what; stopping, resuming, members; those of the library."""

import csv
import functools
import itertools
import json
import struct
import sys

import jax
import numpy as np
import optax
import pytest
from tests import models

import plurax as px
from plurax import callbacks as cb
from plurax.callbacks.followed_metric import FollowedMetric
from plurax.loop.log_rows import read_rows
from plurax.loop.planned_end import PlannedEnd

DATA = models.data(24)
STEPS = 3
"""Steps of an epoch."""
# Runs of one task and one optimizer share their compiled programs.
TASK, OPTIMIZER = models.mlp_task(), optax.adam(1e-2)


def fit(callbacks=(), task=TASK, optimizer=OPTIMIZER, data=DATA, **options):
    options = {"epochs": 4, "batch_size": 8, "evaluation": DATA, "progress": False, **options}
    return px.fit(task, optimizer, data, callbacks=callbacks, **options)


class Recorder:
    """Notes every call."""

    def __init__(self):
        self.calls = []

    def on_start(self, run):
        self.calls.append(("start", run.step))

    def on_step(self, run, row):
        assert row["step"] <= run.step
        self.calls.append(("step", row["step"]))

    def on_evaluation(self, run, row):
        assert "eval_loss" in row
        self.calls.append(("evaluation", run.step))

    def on_epoch(self, run, row):
        row["mine"] = 2.0 * row["epoch"]
        self.calls.append(("epoch", run.epoch))

    def on_save(self, run, step):
        self.calls.append(("save", step))

    def on_stop(self, run):
        self.calls.append(("stop", run.stopped))

    def of(self, *kinds):
        return [call for call in self.calls if call[0] in kinds]


class StopAt:
    """Ends a run at a step or an epoch, and remembers what it saw."""

    def __init__(self, hook, when):
        self.hook, self.when, self.seen = hook, when, []

    def on_step(self, run, row):
        self.seen.append(row["step"])
        if self.hook == "step" and row["step"] == self.when:
            run.stop("enough")

    def on_epoch(self, run, row):
        if self.hook == "epoch" and row["epoch"] == self.when:
            run.stop("enough")

    def get_state(self):
        return {"seen": self.seen}

    def set_state(self, state):
        self.seen = state["seen"]


RUNS = {
    "resident": {},
    "streamed": {"resident": False},
    "members": {"members": px.Members(3)},
    "servers": {"servers": px.Servers(workers=2)},
    "accumulated": {"plan": px.Plan(data=2, microbatches=2)},
}


@pytest.mark.parametrize("name", RUNS)
def test_who_is_called_when(name, tmp_path):
    seen = Recorder()
    result = fit([seen], output=tmp_path, **RUNS[name])
    assert seen.calls[0] == ("start", 0)
    assert seen.calls[-1] == ("stop", None)
    assert seen.of("step") == [("step", step) for step in range(1, 4 * STEPS + 1)]
    rest = [
        ((("evaluation", STEPS * epoch)), ("epoch", epoch), ("save", STEPS * epoch))
        for epoch in range(1, 5)
    ]
    assert seen.of("evaluation", "epoch", "save") == [*itertools.chain(*rest)]
    assert [row["mine"] for row in result.history] == [2.0, 4.0, 6.0, 8.0]
    rows = [row for row in read_rows(tmp_path / "metrics.jsonl") if row["kind"] == "epoch"]
    assert [row["mine"] for row in rows] == [2.0, 4.0, 6.0, 8.0], "added before it is logged"


@pytest.mark.parametrize("name", RUNS)
def test_a_callback_ends_a_run_after_an_epoch(name, tmp_path):
    result = fit([StopAt("epoch", 2)], output=tmp_path, **RUNS[name])
    assert (result.stopped, result.interrupted) == ("enough", None)
    assert result.state.steps_taken == 2 * STEPS
    assert px.Checkpoints(tmp_path / "checkpoints").steps()[-1] == 2 * STEPS
    assert "stopped='enough'" in repr(result)
    *_, event = read_rows(tmp_path / "metrics.jsonl")
    assert event == {"kind": "event", "event": "stopped", "step": 2 * STEPS, "reason": "enough"}


@pytest.mark.parametrize("name", ["resident", "streamed", "members"])
def test_a_run_that_was_ended_goes_on_bit_for_bit(name, tmp_path):
    """Ended within an epoch, saved, resumed: parameters and rows of one that was not ended."""
    whole = fit([StopAt("never", 0)], output=tmp_path / "whole", **RUNS[name])
    ended = fit([StopAt("never", 0)], output=tmp_path / "run", max_steps=4, **RUNS[name])
    assert ended.stopped == "max_steps=4"
    assert ended.state.steps_taken == 4
    assert [row["step"] for row in ended.history] == [3, 4], "the part of an epoch is reported"
    assert ended.history[-1]["epoch"] == 2
    seen = StopAt("never", 0)
    resumed = fit([seen], output=tmp_path / "run", resume=True, **RUNS[name])
    assert seen.seen == [*range(1, 4 * STEPS + 1)], "what a checkpoint kept, and then the rest"
    for one, other in zip(
        jax.tree.leaves(resumed.state.params), jax.tree.leaves(whole.state.params), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    rows = [row for row in resumed.history if row["step"] != 4]
    for one, other in zip(rows, whole.history, strict=True):
        assert (one["step"], one["loss"], one["eval_loss"]) == (
            other["step"], other["loss"], other["eval_loss"],
        )  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_steps_are_limited(name):
    result = fit(max_steps=5, **RUNS[name])
    assert result.state.steps_taken == 5
    assert [row["step"] for row in result.history] == [3, 5]


def test_seconds_are_limited(monkeypatch):
    clock = itertools.count(0, 10)
    timed = functools.partial(PlannedEnd, clock=lambda: next(clock))
    monkeypatch.setattr("plurax.train.fit.PlannedEnd", timed)
    result = fit(max_seconds=45, resident=False, epochs=100)
    assert result.stopped == "max_seconds=45"
    assert 0 < result.state.steps_taken < 20


def test_a_limit_that_is_reached_trains_no_step(tmp_path, capsys):
    fit(output=tmp_path, max_steps=4)
    again = fit(output=tmp_path, max_steps=4, resume=True, progress=True)
    assert "the run had ended at step 4, nothing is trained: max_steps=4" in capsys.readouterr().out
    assert again.state.steps_taken == 4
    assert again.stopped == "max_steps=4"


def test_a_fast_run_tries_everything_once_and_writes_nothing(tmp_path):
    seen = Recorder()
    result = fit([seen], fast_dev_run=True, output=tmp_path / "run")
    assert result.state.steps_taken == 1
    assert seen.of("start", "step", "evaluation", "epoch", "save", "stop") == [
        ("start", 0), ("step", 1), ("evaluation", 1), ("epoch", 0), ("stop", "max_steps=1"),
    ]  # fmt: skip
    assert not (tmp_path / "run").exists()
    few = fit(fast_dev_run=2, evaluation=models.cut(DATA, 16))
    all_ = fit(fast_dev_run=2, evaluation=[models.cut(DATA, 8)] * 2 + [{"x": "never read"}])
    assert few.state.steps_taken == all_.state.steps_taken == 2


def test_next_stop_shows_the_state_of_a_step():
    """Resident steps run many in a call; the call ends where a callback has to look."""
    states = {}

    class Looks:
        def next_stop(self, step):
            return step // 5 * 5 + 5

        def on_step(self, run, row):
            if row["step"] % 5 == 0:
                assert run.step == row["step"]
                states[run.step] = jax.tree.map(np.asarray, run.params())

    fit([Looks()], epochs=5)
    assert sorted(states) == [5, 10, 15]
    for step, params in states.items():
        alone = fit(max_steps=step, epochs=5)
        for one, other in zip(
            jax.tree.leaves(params), jax.tree.leaves(alone.state.params), strict=True
        ):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("hook", ["on_start", "on_step", "on_epoch", "on_save", "on_stop"])
def test_an_error_names_the_callback(hook, tmp_path):
    class Broken:
        pass

    def fails(*_):
        raise KeyError("mine")

    setattr(Broken, hook, fails)
    seen = Recorder()
    with pytest.raises(KeyError, match="mine") as caught:
        fit([seen, Broken()], output=tmp_path)
    assert caught.value.__notes__ == [f"This was raised by {hook} of the callback Broken."]
    if hook in ("on_step", "on_epoch", "on_save"):
        assert seen.calls[-1] == ("stop", "KeyError: 'mine'")


class Half:
    def on_epoch(self, run, row):
        pass

    def get_state(self):
        return {}


class Odd:
    def on_batch(self, run):
        pass


class Wrong:
    def on_epoch(self, row):
        pass


class Array:
    def on_epoch(self, run, row):
        pass

    def get_state(self):
        return {"mean": np.ones(2)}

    def set_state(self, state):
        pass


def test_a_callback_may_only_wrap_the_optimizer():
    class Halved:
        def wrap_optimizer(self, optimizer):
            return optax.chain(optax.scale(0.5), optimizer)

    plain = fit(optimizer=optax.sgd(0.05))
    halved = fit([Halved()], optimizer=optax.sgd(0.1))
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5),
        halved.state.params,
        plain.state.params,
    )


MISTAKES = {
    "not a list": (Recorder(), "the callbacks are a Recorder; write a list: "),
    "a class": ([Recorder], "the callback Recorder is a class; write an object of it"),
    "no hook": (
        [object()],
        "the callback object has no hook; the hooks of a callback are",
    ),
    "an unknown hook": ([Odd()], "the callback Odd has on_batch, which nothing calls; the hooks"),
    "other arguments": ([Wrong()], "on_epoch of the callback Wrong"),
    "half a state": ([Half()], "the callback Half has one of get_state() and set_state(state)"),
    "no metric": (
        [cb.EarlyStopping("eval_f2")],
        "the callback EarlyStopping follows 'eval_f2', and a row has loss",
    ),
    "not a number": (
        [Recorder(), cb.EarlyStopping("kind")],
        "the callback EarlyStopping follows 'kind', which is a str in the row; name a number",
    ),
    "no rate": ([cb.LearningRate()], "LearningRate() finds no learning rate in the optimizer's"),
    "no directory": ([cb.Profile()], "Profile() has no directory to write to"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    callbacks, said = MISTAKES[name]
    with pytest.raises(px.errors.TaskError) as caught:
        fit(callbacks)
    assert said in str(caught.value)


@pytest.mark.parametrize("make", [cb.KeepBest, cb.EarlyStopping, cb.ReduceOnPlateau])
@pytest.mark.parametrize("metric", ["acc", "eval_loss", "eval_accuracy", "eval_ema_losss"])
def test_a_metric_that_no_row_will_have_is_refused_before_the_first_step(monkeypatch, make, metric):
    monkeypatch.setattr("plurax.train.fit.train_iter", lambda *_, **__: pytest.fail("a step"))
    evaluation = DATA if "ema" in metric else None
    with pytest.raises(
        px.errors.TaskError, match=f"follows '{metric}', and a row has loss, grad_norm"
    ):
        fit([make(metric)], evaluation=evaluation)


def test_a_state_that_json_cannot_hold(tmp_path):
    with pytest.raises(
        px.errors.TaskError, match="state of the callback Array cannot be saved: Object"
    ):
        fit([Array()], output=tmp_path)


LIMITS = {
    "max_steps": (0, 2.5, True),
    "max_seconds": (0, -1.0, True, "10", float("nan"), float("inf")),
    "fast_dev_run": (-1, 1.5, "yes"),
}


@pytest.mark.parametrize(
    ("name", "given"), [(name, one) for name, values in LIMITS.items() for one in values]
)
def test_limits_that_are_none(name, given):
    said = {
        "max_steps": "give a whole number ≥ 1, or None for no limit",
        "max_seconds": "give a number > 0, or None for no limit",
        "fast_dev_run": "give a number of steps, True for one, or 0 for a whole run",
    }
    with pytest.raises(px.errors.TaskError) as caught:
        fit(**{name: given})
    assert said[name] in str(caught.value)


# --- Those of the library -----------------------------------------------------------------------


class Says:
    """Puts numbers into the rows, as an evaluation would."""

    def __init__(self, *values):
        self.values = values

    def on_epoch(self, run, row):
        values = self.values[row["epoch"] - 1]
        if run.members is None:
            row["score"] = values
        else:
            row["members"]["score"] = list(values)


STOPS = {
    "min": ([3.0, 2.0, 2.0, 2.5, 1.0, 1.0], {"patience": 2}, 4),
    "max": ([0.1, 0.5, 0.4, 0.3, 0.6, 0.7], {"patience": 2, "mode": "max"}, 4),
    "small steps": ([3.0, 2.9, 2.8, 2.7, 2.6, 2.5], {"patience": 2, "min_delta": 0.5}, 3),
    "not finite": ([3.0, float("nan"), 2.0, 1.0, 0.5, 0.4], {"patience": 2}, 6),
    "never finite": ([float("nan")] * 6, {"patience": 2}, 2),
    "improves": ([6.0, 5.0, 4.0, 3.0, 2.0, 1.0], {"patience": 1}, 6),
}


@pytest.mark.parametrize("name", STOPS)
def test_early_stopping(name):
    values, options, epochs = STOPS[name]
    result = fit([Says(*values), cb.EarlyStopping("score", **options)], epochs=6)
    assert len(result.history) == epochs
    assert (result.stopped is None) == (epochs == 6)


def test_early_stopping_waits_for_all_members():
    values = [(3.0, 3.0), (2.0, 3.0), (1.0, 3.0), (1.0, 2.0), (1.0, 2.0), (1.0, 2.0)]
    callbacks = [Says(*values), cb.EarlyStopping("score", patience=2)]
    result = fit(callbacks, members=px.Members(2), epochs=6)
    assert len(result.history) == 6
    assert result.stopped == "EarlyStopping('score', patience=2): the best score is 1"


def test_early_stopping_remembers_over_a_resume(tmp_path):
    values = [3.0, 2.0, 2.0, 2.0, 1.0, 1.0]

    def go(**options):
        callbacks = [Says(*values), cb.EarlyStopping("score", patience=2)]
        return fit(callbacks, epochs=6, output=tmp_path, resume=True, **options)

    assert len(go(max_steps=3 * STEPS).history) == 3
    ended = go()
    assert ended.state.steps_taken == 4 * STEPS
    again = go()
    assert again.state.steps_taken == 4 * STEPS, "it does not train on"
    assert "EarlyStopping" in again.stopped


@pytest.mark.parametrize("given", [0, 1.5])
def test_patience_is_a_count(given):
    with pytest.raises(px.errors.TaskError, match=r"EarlyStopping\(patience=.*give a whole number"):
        cb.EarlyStopping("loss", given)


# Whether the largest value is the best, by the name.
MODES = {
    **dict.fromkeys(
        ("eval_loss", "f1_loss", "eval_perplexity", "accumulated_cost", "layer2"), False
    ),
    **dict.fromkeys(("eval_accuracy", "auc", "eval_r2", "eval_acc", "top-5-acc", "acc5"), True),
    **dict.fromkeys(("eval_f1", "mIoU", "episode_reward", "eval_psnr", "sacreBLEU"), True),
    **dict.fromkeys(("surface", "grad_norm", "error_score", "f1_err"), False),
}


@pytest.mark.parametrize("metric", MODES)
def test_a_mode_is_guessed_by_the_name(metric):
    followed = FollowedMetric("EarlyStopping", metric, None, 0.0)
    found = [followed.improved({metric: value}).item() for value in (0.5, 0.6, 0.4)]
    assert found == [True, MODES[metric], not MODES[metric]]


def test_there_are_two_modes():
    with pytest.raises(px.errors.TaskError, match=r"EarlyStopping\(mode='up'\): give 'min', 'max'"):
        cb.EarlyStopping("loss", mode="up")


PLANS = {
    "one device": {},
    "zero": {"plan": px.Plan(data=2, zero=2)},
    "members": {"members": px.Members(2)},
    "streamed": {"resident": False},
}


@pytest.mark.ci
@pytest.mark.parametrize("name", PLANS)
def test_the_average_is_that_of_a_loop_by_hand(name, x64, uncached):
    """The parameters after every step, averaged by NumPy.

    They are those of a run without it to the bit, as a user's machine code makes them.
    """
    if not uncached:
        return
    data = models.data(24, dtype=np.float64)
    task = models.mlp_task(dtype=np.float64)
    ema = cb.Ema(0.9)
    seen = []

    class Params:
        def next_stop(self, step):
            return step + 1

        def on_start(self, run):
            seen.append(jax.tree.map(np.asarray, run.params()))

        def on_step(self, run, row):
            seen.append(jax.tree.map(np.asarray, run.params()))

    options = {"epochs": 2, "data": data, "evaluation": data, **PLANS[name]}
    result = fit([Params(), ema], task, **options)
    wanted = seen[0]
    for params in seen[1:]:
        wanted = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, wanted, params)
    for one, other in zip(
        jax.tree.leaves(ema.params(result.state)), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    plain = fit([], task, **options)
    for one, other in zip(
        jax.tree.leaves(result.state.params), jax.tree.leaves(plain.state.params), strict=True
    ):
        np.testing.assert_array_equal(one, other, "it changes no step")
    assert result.history[-1]["eval_ema_loss"] != result.history[-1]["eval_loss"]
    with pytest.raises(px.errors.TaskError, match="has no average of the parameters: train with"):
        ema.params(plain.state)


def test_frozen_parameters_are_their_own_average():
    ema = cb.Ema(0.9)
    result = fit([ema], px.freeze(models.mlp_task(), "bias"))
    average = ema.params(result.state)
    same(average["bias"], result.state.params["bias"])
    assert (average["out"] != result.state.params["out"]).any()
    assert np.isfinite(result.history[-1]["eval_ema_loss"])


@pytest.mark.parametrize("given", [1.0, -0.1, "0.9", True])
def test_a_decay_is_below_one(given):
    with pytest.raises(px.errors.TaskError, match=r"give a number ≥ 0 and < 1"):
        cb.Ema(given)


@pytest.mark.ci
def test_the_learning_rate_is_logged(tmp_path):
    schedule = optax.linear_schedule(1.0, 0.0, 12)
    result = fit([cb.LearningRate(schedule)], optimizer=optax.sgd(schedule), output=tmp_path)
    rates = [row["learning_rate"] for row in read_rows(tmp_path / "metrics.jsonl")
             if row["kind"] == "step"]  # fmt: skip
    np.testing.assert_allclose(rates, [1 - step / 12 for step in range(12)], rtol=1e-6)
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
    kept = fit([cb.LearningRate()], optimizer=optimizer)
    assert [row["learning_rate"] for row in kept.history] == pytest.approx(
        [1 - step / 12 for step in (2, 5, 8, 11)]
    )
    assert len(result.history) == len(kept.history)


def test_the_learning_rates_of_members_are_logged():
    members = px.Members(2, hyper={"rate": [0.1, 0.2]})
    result = fit(
        [cb.LearningRate()], members=members,
        optimizer=lambda hyper: optax.inject_hyperparams(optax.sgd)(learning_rate=hyper["rate"]),
    )  # fmt: skip
    np.testing.assert_allclose(result.history[-1]["members"]["learning_rate"], [0.1, 0.2])


def test_chosen_steps_are_traced(tmp_path):
    result = fit([cb.Profile((4, 6))], output=tmp_path)
    traces = [*(tmp_path / "profile").rglob("*.xplane.pb")]
    assert len(traces) == 1
    assert result.state.steps_taken == 12
    fit([cb.Profile((12, 30), tmp_path / "short")])
    assert len([*(tmp_path / "short").rglob("*.xplane.pb")]) == 1, "a run may end before"


@pytest.mark.parametrize("given", [(3, 2), (0, 2), [1, 2], (1,), 5])
def test_steps_to_trace(given):
    with pytest.raises(px.errors.TaskError, match="give the first and the last step"):
        cb.Profile(given)


def test_a_checkpoint_keeps_json(tmp_path):
    fit([cb.EarlyStopping("loss"), cb.EarlyStopping("eval_loss")], output=tmp_path)
    meta = px.Checkpoints(tmp_path / "checkpoints").run_meta(12)
    assert sorted(meta["callbacks"]) == ["EarlyStopping.0", "EarlyStopping.1"]
    json.dumps(meta["callbacks"])


def same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


BEST = {
    "on disk": {"output": True},
    "in memory": {},
    "zero": {"output": True, "plan": px.Plan(data=2, zero=3)},
    "streamed": {"resident": False},
}


@pytest.mark.parametrize("name", BEST)
def test_the_best_epoch_is_kept(name, tmp_path):
    options = dict(BEST[name])
    if options.pop("output", False):
        options["output"] = tmp_path
    best = cb.KeepBest("score")
    result = fit([Says(3.0, 1.0, 2.0, float("nan")), best], **options)
    options.pop("output", None)
    wanted = fit(max_steps=2 * STEPS, **options)
    same(result.program.to_canonical(best.restore(result.program)).params, wanted.state.params)
    assert best.restore(result.program).steps_taken == 2 * STEPS


@pytest.mark.parametrize("output", [True, False])
def test_each_member_keeps_its_own_best_epoch(output, tmp_path):
    """Also over a resume, where the run was ended in between."""
    values = [(3.0, 1.0), (2.0, 2.0), (4.0, 0.5), (5.0, 5.0)]
    options = {"members": px.Members(2), **({"output": tmp_path} if output else {})}
    best = cb.KeepBest("score")
    if output:
        fit([Says(*values), best], max_steps=2 * STEPS, **options)
        best = cb.KeepBest("score")
        result = fit([Says(*values), best], resume=True, **options)
    else:
        result = fit([Says(*values), best], **options)
    kept = best.restore(result.program)
    for member, epoch in enumerate((2, 3)):
        wanted = fit(members=px.Members(2), max_steps=epoch * STEPS).state.params
        same(
            jax.tree.map(lambda leaf, m=member: leaf[m], kept.params),
            jax.tree.map(lambda leaf, m=member: leaf[m], wanted),
        )


def test_a_run_that_goes_on_keeps_what_was_the_best(tmp_path):
    """The newer of two was kept after the checkpoint from which the run goes on."""
    values = (3.0, 1.0, 2.0, 0.5)

    class KilledError(Exception):
        pass

    class Kills:
        def on_save(self, run, step):
            if step == 4 * STEPS:
                raise KilledError

    callbacks = [Says(*values), cb.KeepBest("score"), Kills()]
    with pytest.raises(KilledError):
        fit(callbacks, output=tmp_path)
    again = cb.KeepBest("score")
    result = fit([Says(*values), again], output=tmp_path, resume=True, max_steps=3 * STEPS)
    assert again.restore(result.program).steps_taken == 2 * STEPS
    result = fit([Says(*values), again], output=tmp_path, resume=True)
    assert again.restore(result.program).steps_taken == 4 * STEPS


FOLLOWING = {
    "EarlyStopping": lambda: cb.EarlyStopping("score", patience=2),
    "ReduceOnPlateau": lambda: cb.ReduceOnPlateau("score", patience=2),
    "KeepBest": lambda: cb.KeepBest("score"),
}


@pytest.mark.parametrize("name", FOLLOWING)
def test_another_run_begins_anew(name):
    """With the callback that has followed one before."""
    first, second = [1.0, 2.0, 0.5, 3.0], [7.0, 6.0, 8.0, 9.0]
    used, new = FOLLOWING[name](), FOLLOWING[name]()
    fit([Says(*first), used])
    again, wanted = (fit([Says(*second), one]) for one in (used, new))
    assert [row["step"] for row in again.history] == [row["step"] for row in wanted.history]
    assert used.get_state() == new.get_state()
    same(again.state.params, wanted.state.params)


@pytest.mark.parametrize("name", FOLLOWING)
def test_new_members_have_no_best_value_yet(name, tmp_path):
    """A population grows by two, after an epoch in which its first two did not improve."""
    values = [(3.0, 1.0), (3.0, 2.0), (2.0, 3.0, 5.0, 5.0), (4.0, 0.5, 6.0, 4.0)]
    fit([Says(*values), FOLLOWING[name]()], members=px.Members(2), epochs=2, output=tmp_path)
    callback = FOLLOWING[name]()
    result = fit([Says(*values), callback], members=px.Members(4), output=tmp_path, resume=True)
    assert callback.get_state()["best"] == [2.0, 0.5, 5.0, 4.0]
    assert len(result.history) == 4
    if name == "KeepBest":
        kept = callback.restore(result.program)
        assert kept.step.tolist() == [3 * STEPS, 4 * STEPS, 3 * STEPS, 4 * STEPS]
        same(kept.params["out"][3], result.state.params["out"][3])
    else:
        assert callback.get_state()["waited"] == [1, 0, 1, 0]


def test_nothing_is_kept_before_an_epoch():
    best = cb.KeepBest("score")
    result = fit([Says(*[float("nan")] * 4), best])
    with pytest.raises(px.errors.TaskError, match="has kept no state yet"):
        best.restore(result.program)


# --- Loggers ------------------------------------------------------------------------------------


class Fails:
    def on_epoch(self, run, row):
        if row["epoch"] == 3:
            raise RuntimeError("mine")


def read_csv(folder):
    with (folder / "rows.csv").open(newline="") as file:
        return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]


def read_board(folder):
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in sorted((folder / "board").iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            for value in event.summary.value:
                if value.tag == "epoch/loss":
                    found[event.step] = value.simple_value
    return sorted(found.items())


def read_mlflow(folder):
    import mlflow  # takes seconds: not in every process that collects this file

    client = mlflow.MlflowClient(str(folder / "mlruns"))
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    history = client.get_metric_history(run.info.run_id, "epoch/loss")
    return sorted({(one.step, one.value) for one in history})


LOGGERS = {
    "json": (
        lambda folder: cb.JsonLines(folder / "rows.jsonl"),
        lambda folder: [
            (row["step"], row["loss"])
            for row in read_rows(folder / "rows.jsonl")
            if row["kind"] == "epoch"
        ],
    ),
    "csv": (lambda folder: cb.Csv(folder / "rows.csv"), read_csv),
    "board": (lambda folder: cb.TensorBoard(folder / "board"), read_board),
    "mlflow": (
        lambda folder: cb.Mlflow("mine", tracking_uri=(folder / "mlruns").as_uri()),
        read_mlflow,
    ),
}
"""What makes a logger, and what reads the losses of epochs that it wrote."""


@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_goes_on_where_a_run_does(name, tmp_path, monkeypatch):
    """Ended by an error in epoch 3, resumed from the checkpoint of epoch 2: every row once."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs packages of its own
    make, read = LOGGERS[name]
    with pytest.raises(RuntimeError, match="mine"):
        fit([make(tmp_path), Fails()], output=tmp_path / "run")
    result = fit([make(tmp_path)], output=tmp_path / "run", resume=True)
    wanted = [(row["step"], row["loss"]) for row in result.history]
    assert [step for step, _ in wanted] == [3, 6, 9, 12]
    assert read(tmp_path) == [(step, pytest.approx(loss)) for step, loss in wanted]


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        px.errors.MissingPackageError, match=r"Wandb needs wandb, .*plurax\[wandb\]"
    ):
        cb.Wandb()


@pytest.mark.parametrize("given", [0, 1.5])
def test_steps_between_rows(given):
    with pytest.raises(px.errors.TaskError, match=r"JsonLines\(every=.*give a whole number"):
        cb.JsonLines("rows.jsonl", every=given)
