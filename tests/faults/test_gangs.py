"""A gang of two real processes: signals, bad numbers, disks and folders, without a launcher.

Rows 7, 8, 9, 14 and 28 of the list of faults.
"""

import json
import os

import pytest

from plurax.checkpoint import Checkpoints
from tests import disks
from tests.faults.cases import MOMENTS, QUICK
from tests.faults.run import STEPS
from tests.processes import gang

pytestmark = pytest.mark.gangs

LIMIT = 300


def run(folder, *cases):
    """What each process found, by case."""
    started = gang.start(2, 2, "tests.faults.cases", [folder, *cases], folder)
    assert gang.finish(started, LIMIT) == [0, 0], gang.said(folder)
    return [json.loads((folder / f"found.{index}.json").read_text()) for index in range(2)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What each process found in a gang that bears one fault after another."""
    folder = tmp_path_factory.mktemp("ran")
    with Checkpoints(folder / "in use" / "checkpoints") as mine:
        mine.lock()
        return run(folder, "sigterm", "not_finite", "own_folders", "folder_in_use")


def check_signal(ran, case, moment):
    """Each saves the same step, and the run that goes on from it ends bit-equal."""
    found, other = (each[case][moment] for each in ran)
    assert found == other
    assert found["interrupted"] == "SIGTERM"
    assert found["then"] is None
    # While it is compiled the first batch may not be there: then no step is taken, by any process.
    assert found["steps"] > 0 or moment == "compile"
    assert (found["steps"] < STEPS) == (moment != "the last evaluation")
    assert found["saved"] == found["steps"]
    assert found["prints"] == found["undisturbed"]


@pytest.mark.parametrize("moment", QUICK)
def test_a_signal_to_one_process_stops_all_at_one_step(ran, moment):
    check_signal(ran, "sigterm", moment)


@pytest.fixture(scope="module")
def ran_more(tmp_path_factory):
    return run(tmp_path_factory.mktemp("ran"), "more_sigterm")


@pytest.mark.slow
@pytest.mark.parametrize("moment", [moment for moment in MOMENTS if moment not in QUICK])
def test_a_signal_at_any_moment(ran_more, moment):
    check_signal(ran_more, "more_sigterm", moment)


def test_rows_of_one_process_that_are_not_finite_change_nothing(ran):
    for each in [each["not_finite"] for each in ran]:
        assert each["kept"] == [False, True, True, True, True]
        assert each["skipped"] == 4
        assert each == ran[0]["not_finite"]


@pytest.mark.parametrize("folders", ["new", "old"])
def test_an_output_that_is_not_shared_is_refused(ran, folders):
    for each in ran:
        said = each["own_folders"][folders]
        assert said.startswith("CheckpointError: process 1 does not see")
        assert "give an output on a file system that all hosts share" in said


def test_a_folder_that_another_run_writes_is_refused_in_all_processes(ran):
    for each in ran:
        assert f"is written by process {os.getpid()}" in each["folder_in_use"]


@pytest.mark.slow
def test_a_full_disk_stops_no_process(tmp_path):
    with disks.mounted(tmp_path / "disk"):
        found = run(tmp_path, "full_disk")
    for each in [each["full_disk"] for each in found]:
        assert each["steps"] == STEPS
        assert each["prints"] == each["undisturbed"]
        assert "step 10 could not be saved, and training goes on" in each["said"][0]
        assert "No space left on device" in each["said"][0]
        assert each["events"] == ["save failed", "save failed", "saving works again"]


@pytest.mark.slow
def test_a_second_signal_ends_a_process_and_the_others_notice(tmp_path):
    started = gang.start(2, 2, "tests.faults.cases", [tmp_path, "twice"], tmp_path)
    other, struck = gang.finish(started, LIMIT)
    assert struck in (-15, 143), gang.said(tmp_path)
    assert other in (134, -6), gang.said(tmp_path)
    assert Checkpoints(tmp_path / "twice" / "checkpoints").steps()[-1] == 10
