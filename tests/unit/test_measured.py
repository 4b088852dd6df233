"""Predicted beside measured: in `fit`, in its log, and in a machine that learns from runs."""

import dataclasses
import json
import re
import signal

import jax
import numpy as np
import optax
import pytest
from tests import models
from tests.unit.test_liveness import perceptron

import plurax as px
from plurax.analysis.measured import Measured
from plurax.hlo.memory import memory
from plurax.loop.iterate import train_iter
from plurax.loop.log_rows import read_rows
from plurax.report.curves_picture import draw_curves
from plurax.train.learn import learned, machine_of_run

LINKS = [px.analysis.Level("node", 8, 1e9)]
MACHINE = px.Machine("made", {"float32": 5e10}, 10**9, 1e10, LINKS, overhead=1e-6)
KEYS = {"machine", "correction", "predicted", "measured"}


def fit(machine=MACHINE, **options):
    task, batch, _ = perceptron()
    rows = batch["x"].shape[0]
    rng = np.random.default_rng(0)
    data = {name: rng.normal(size=(3 * rows, *leaf.shape[1:])).astype(np.float32)
            for name, leaf in batch.items()}  # fmt: skip
    options = {"plan": px.Plan(data=4, zero=3, microbatches=2), "progress": False, **options}
    return px.fit(task, optax.adam(1e-3), data, batch_size=rows, machine=machine, **options)


@pytest.mark.parametrize("resident", [True, False])
def test_predicted_stands_beside_measured(capsys, resident):
    result = fit(epochs=2, resident=resident, progress=True)
    task, batch, _ = perceptron()
    alone = px.estimate(task, optax.adam(1e-3), result.program.plan, batch, MACHINE)
    rows = batch["x"].shape[0]
    data = 3 * (sum(leaf.size * 4 for leaf in jax.tree.leaves(batch)) + 4 * rows // 4)
    assert result.estimate.seconds == alone.seconds
    assert result.estimate.peak == alone.peak + (data if resident else 0)
    measured = result.measured
    assert measured.estimate is result.estimate
    # To the byte, and in a loop over steps those of one step.
    assert measured.bytes_sent == alone.total_sent > 0
    (ran,) = result.program._compiled.so_far.values()
    assert measured.peak == memory(ran).peak
    pairs = [row["estimate"] for row in result.history]
    assert all(set(pair) == KEYS and pair["machine"] == "made" for pair in pairs)
    assert {pair["predicted"]["seconds"] for pair in pairs} == {alone.seconds}
    assert {pair["measured"]["peak"] for pair in pairs} == {measured.peak}
    # Of an epoch the row has its own seconds, the result those of all: five steps but the first.
    seconds = [pair["measured"]["seconds"] for pair in pairs]
    assert measured.seconds == pytest.approx((2 * seconds[0] + 3 * seconds[1]) / 5)
    shown = [line for line in capsys.readouterr().out.splitlines() if line[:9] in
             ("predicted", "measured ")]  # fmt: skip
    assert measured.figures() in repr(result)
    first = dataclasses.replace(measured, seconds=seconds[0])
    assert shown == [str(first).splitlines()[0], first.line(), measured.line()]


def test_what_it_shows():
    task, batch, _ = perceptron()
    found = px.estimate(task, optax.adam(1e-3), px.Plan(), batch, MACHINE)
    said = dataclasses.replace(found, memory={"batch": 4 * 2**20}, bytes_sent={"data": 1024.0})
    off = Measured(said, 3 * 2**20, 1024.0, 1.06 * said.seconds)
    first, second = str(off).splitlines()
    assert first.endswith("a step, 4.0 MiB on a device, 1.0 KiB sent, on made")
    assert re.fullmatch(r"measured   \S+ ms a step \(\+6 %\), 3\.0 MiB \(-25 %\), 1\.0 KiB", second)
    assert (
        repr(off)
        == f"Measured({second.removeprefix('measured   ')})"
        == f"Measured({off.figures()})"
    )
    # A run of one call has no step that could be timed.
    untimed = dataclasses.replace(off, seconds=None)
    assert untimed.line() == "compiled   3.0 MiB (-25 %), 1.0 KiB"
    assert "seconds" not in untimed.to_json()["measured"]
    learnt = dataclasses.replace(said, machine=dataclasses.replace(MACHINE, correction=1.5))
    assert "sent, on made (seconds × 1.5, by runs)" in str(
        dataclasses.replace(off, estimate=learnt)
    )
    assert "  by runs" in str(learnt)
    assert "seconds, by runs: × 1.5" in str(learnt.machine)


def test_without_a_machine_nothing_more_is_traced_or_compiled(monkeypatch):
    counts = {"traced": 0, "compiled": 0}
    compiled = jax.stages.Lowered.compile

    def compile(self, *args, **options):
        counts["compiled"] += 1
        return compiled(self, *args, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)

    def run(machine):
        def loss(params, batch, keys):
            counts["traced"] += 1
            return (batch["x"] @ params) ** 2

        counts.update(traced=0, compiled=0)
        task = px.Task(init=lambda key: jax.numpy.zeros(5), loss=loss)
        data = {"x": models.data(32)["x"]}
        result = px.fit(task, optax.sgd(0.1), data, batch_size=8, machine=machine, progress=False)
        return result, dict(counts)

    with monkeypatch.context() as never:
        never.setattr("plurax.train.measurements.estimate", None)
        never.setattr("plurax.analysis.measured.collectives", None)
        plain, least = run(None)
    assert (plain.estimate, plain.measured) == (None, None)
    assert "estimate" not in plain.history[0]
    beside, found = run(MACHINE)
    assert beside.measured is not None
    assert found["compiled"] == least["compiled"]
    assert found["traced"] > least["traced"]


@pytest.mark.ci
def test_a_run_that_is_resumed_keeps_both(tmp_path):
    fit(epochs=1, output=tmp_path)
    result = fit(epochs=3, output=tmp_path, resume=True)
    assert [row["epoch"] for row in result.history if "estimate" in row] == [1, 2, 3]
    rows = list(read_rows(tmp_path / "metrics.jsonl"))
    assert [row["estimate"] for row in rows if row["kind"] == "epoch"] == [
        row["estimate"] for row in result.history
    ]
    assert not any("estimate" in row for row in rows if row["kind"] == "step")
    assert machine_of_run(tmp_path) == MACHINE
    assert len(draw_curves(rows).axes) == 1  # the loss alone


def test_a_run_that_is_stopped_in_its_first_epoch_is_measured(monkeypatch):
    turns = train_iter

    def stopped(*args, **options):
        for steps in turns(*args, **{**options, "checkpoint_every": 1}):
            if steps.step == 2:
                signal.raise_signal(signal.SIGTERM)
            yield steps

    monkeypatch.setattr("plurax.train.fit.train_iter", stopped)
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # else it ends the process
    result = fit(resident=False)
    signal.signal(signal.SIGTERM, before)
    assert (result.interrupted, result.history) == ("SIGTERM", [])
    assert result.measured.seconds > 0


@pytest.mark.ci
def test_a_population_has_no_estimate(tmp_path, capsys):
    result = px.fit(
        models.mlp_task(), models.optimizer(), models.data(16), members=px.Members(2),
        batch_size=8, machine=MACHINE, output=tmp_path,
    )  # fmt: skip
    said = "predicted  nothing: the step of one network is estimated, not a population's"
    assert said in capsys.readouterr().out
    assert (result.estimate, result.measured) == (None, None)
    assert "estimate" not in result.history[0]
    assert not (tmp_path / "machine.toml").exists()


def test_a_plan_that_is_larger_than_the_machine_is_refused_first(tmp_path):
    with pytest.raises(px.errors.MachineError, match="needs 4 devices, and one has 1"):
        fit(px.Machine("one", {"float32": 1.0}, 1, 1.0), output=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


# --- A machine that learns ------------------------------------------------------------------------


def logged(path, *ratios, machine="made", correction=1.0):
    """Write a run whose steps took so many times the second that was predicted."""
    path.mkdir()
    rows = [
        {"kind": "epoch", "epoch": i, "step": i, "estimate": {
            "machine": machine, "correction": correction, "predicted": {"seconds": 1.0},
            "measured": {} if ratio is None else {"seconds": ratio},
        }}
        for i, ratio in enumerate(ratios)
    ]  # fmt: skip
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_machine_learns_the_median_of_its_runs(tmp_path):
    runs = [logged(tmp_path / "a", 1.2, None, 1.1, 9.0), logged(tmp_path / "b", 1.4123)]
    assert learned(MACHINE, runs[:1]).correction == 1.2
    assert learned(MACHINE, runs) == dataclasses.replace(MACHINE, correction=1.31)
    # What was predicted with a correction counts as if there had been none.
    again = logged(tmp_path / "c", 1.1, correction=1.2)
    assert learned(dataclasses.replace(MACHINE, correction=7.0), [again]).correction == 1.32
    kinds = [(4, dataclasses.replace(MACHINE, levels=())) for _ in range(2)]
    uneven = learned(px.Machine.uneven("made", kinds, LINKS), runs)
    assert [uneven.correction, *(kind.correction for _, kind in uneven.groups)] == [1.31] * 3
    assert px.Machine.from_toml(uneven.to_toml()) == uneven


def test_all_seconds_are_corrected():
    task, batch, _ = perceptron()
    slow = dataclasses.replace(MACHINE, correction=2.0)
    for plan in (px.Plan(data=4, zero=3), px.Plan(data=2, microbatches=2)):
        first, second = (
            px.estimate(task, optax.adam(1e-3), plan, batch, m) for m in (MACHINE, slow)
        )
        assert first.gradient.overhead > 0
        assert second.parts() == {name: 2 * part for name, part in first.parts().items()}
        assert (second.memory, second.bytes_sent) == (first.memory, first.bytes_sent)
