"""A log that was cut, emptied or changed: whoever reads it says what is missing."""

import io
import json
import re

import pytest
from rich.console import Console
from tests import models

import plurax as px
from plurax.errors import DamagedLogWarning, ExperimentError
from plurax.loop.log_rows import read_rows
from plurax.report.page.chart_data import events
from plurax.report.page.run_data import read_run
from plurax.report.watch_frame import WatchedRun
from plurax.run_folder.log_check import log_damage

ROWS = models.data(50)
PER_EPOCH = 4
LAST = 3 * PER_EPOCH


def fit(output, **options):
    options = {"epochs": 3, "batch_size": 16, "progress": False, "resume": True, **options}
    return px.fit(models.mlp_task(), models.optimizer(), ROWS, output=output, **options)


@pytest.fixture
def run(tmp_path):
    fit(tmp_path / "run")
    return tmp_path / "run"


def cut(lines):
    return [*lines[:-4], lines[-4][:20]]


def digit(lines, at=6):
    row = json.loads(lines[at])
    row["loss"] += 1.0
    return [*lines[:at], json.dumps(row).encode() + b"\n", *lines[at + 1 :]]


DAMAGE = {
    "cut": (cut, r"3 rows of steps are missing: 10 to 12"),
    "emptied": (lambda lines: [], r"12 rows of steps are missing: 1 to 12"),
    "a digit changed": (digit, r"what it says of steps 5 to 12 is not what was written"),
    "lines removed": (
        lambda lines: [*lines[:1], *lines[2:6], *lines[7:]],
        r"2 rows of steps are missing: 2, 6",
    ),
    "an epoch removed": (
        lambda lines: [line for line in lines if b'"epoch"' not in line.split(b",")[0]],
        r"what it says of steps 1 to 12 is not what was written",
    ),
    "a line added": (lambda lines: [lines[0], *lines], r"what it says of steps 1 to 12 is not"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_readers_say_what_is_missing(run, name):
    change, said = DAMAGE[name]
    log = run / "metrics.jsonl"
    assert log_damage(run) is None
    log.write_bytes(b"".join(change(log.read_bytes().splitlines(keepends=True))))
    if name == "emptied":
        with pytest.raises(
            ExperimentError, match=f"a checkpoint of the run says that it had: {said}"
        ):
            read_run(run)
    else:
        with pytest.warns(DamagedLogWarning, match=said):
            data = read_run(run)
        assert "log damaged" in [row["event"] for row in events(data)]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(WatchedRun(run).frame())
    assert "log damaged" in console.export_text()
    with pytest.warns(DamagedLogWarning) as warned:  # that a line is torn, too
        resumed = fit(run, epochs=4)
    assert any(re.search(said, str(one.message)) for one in warned)
    assert models.same_bits(resumed.state.params, fit(None, epochs=4, resume=False).state.params)
    # What is left agrees with the next checkpoint, and says of itself what it lacks.
    assert log_damage(run) is None
    (row,) = [row for row in read_rows(log) if row["kind"] == "event"]
    assert (row["event"], row["step"]) == ("log damaged", LAST)


def test_a_log_that_is_gone_is_said(run):
    (run / "metrics.jsonl").unlink()
    with pytest.warns(DamagedLogWarning, match="the file is gone"):
        fit(run)


def test_many_gaps_are_not_all_listed(run):
    log = run / "metrics.jsonl"
    fit(run, epochs=6)
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(line for line in lines if json.loads(line)["step"] % 2))
    step, said = log_damage(run)
    assert step == 6 * PER_EPOCH
    assert said == "12 rows of steps are missing: 2, 4, 6, 8, 10, 12, 14, 16, and 4 more"


def test_what_was_intact_at_an_older_checkpoint_is_not_in_question(run):
    log = run / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(digit(lines, len(lines) - 2)))
    assert log_damage(run) == (LAST, "what it says of steps 9 to 12 is not what was written")
    assert log_damage(run, 2 * PER_EPOCH) is None


@pytest.mark.ci
def test_a_run_that_is_stopped_and_goes_on_is_not_damaged(run):
    """Nor is a log that ends behind the checkpoint, as that of a run that goes on."""
    with (run / "metrics.jsonl").open("ab") as log:
        log.write(b'{"kind": "step", "step": 13, "epoch": 4, "loss": 1.0}\n{"kind": "st')
    fit(run, epochs=5, max_steps=18)
    fit(run, epochs=5)
    fit(run, epochs=5, checkpoint_every=3)
    assert log_damage(run) is None
    read_run(run)


def test_checkpoints_of_ones_own_say_nothing_of_a_log(tmp_path):
    batch = {name: rows[:16] for name, rows in ROWS.items()}
    program = px.compile(models.mlp_task(), models.optimizer(), px.Plan(), batch)
    with px.Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(program.init(0), {"note": "by hand"})
    assert log_damage(tmp_path) is None
    assert log_damage(tmp_path / "nowhere") is None
