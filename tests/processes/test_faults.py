"""Faults that several processes bear together: bad steps, and a disk that is full for a while."""

import contextlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from plurax.checkpoint.save_barrier import SaveBarrier
from plurax.distributed.process_group import ProcessGroup
from tests import disks
from tests.processes import faults, gang

pytestmark = pytest.mark.gangs


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What two processes found, and the folder of their runs; a disk is in it if one can be."""
    folder = tmp_path_factory.mktemp("faults")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(pytest.skip.Exception):
            stack.enter_context(disks.mounted(folder / "small" / "disk", size="900k"))
            (folder / "disk").symlink_to(folder / "small" / "disk")
        codes = gang.finish(gang.start(2, 2, "tests.processes.faults", [folder], folder))
        assert codes == [0, 0], gang.said(folder)
        found = [json.loads((folder / f"found.{index}.json").read_text()) for index in (0, 1)]
        yield found, folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::plurax.errors.RollbackWarning")
@pytest.mark.filterwarnings("ignore::plurax.errors.NonFiniteWarning")
def test_a_rollback_is_that_of_one_process(ran, tmp_path):
    (first, second), folder = ran
    assert first == second
    alone = faults.rolled_back(tmp_path / "alone")
    found = first["rolled back"]
    for key in ("steps", "checkpoints"):
        assert found[key] == alone[key]
    for key in ("history", "params"):
        for one, other in zip(found[key], alone[key], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    runs = (folder / "rolled back", tmp_path / "alone")
    assert len({(run / "rollbacks.jsonl").read_bytes() for run in runs}) == 1


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while(ran):
    (first, second), _ = ran
    if "disk" not in first:
        pytest.skip("a tmpfs cannot be mounted")
    assert first["disk"] == second["disk"]
    assert first["disk"]["checkpoints"][-1] == 16
    assert first["disk"]["events"] == ["save failed"] * 2 + ["saving works again"]


def in_threads(*functions):
    """What functions return that wait for each other."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [each.result(30) for each in [pool.submit(one) for one in functions]]


@pytest.mark.parametrize("stage", ["async_write_complete", "async_commit_complete"])
def test_who_waits_for_a_process_that_failed_hears_of_it_at_once(stage, tmp_path):
    """And both go on together from the end of the save."""
    here, there = socket.socketpair()
    groups = in_threads(lambda: ProcessGroup(0, [here]), lambda: ProcessGroup(1, [there]))
    first, second = (SaveBarrier(group, tmp_path) for group in groups)

    def written():
        first(key="a save begins", timeout_ms=1)
        with pytest.raises(OSError, match=r"process 1 on .* could not write its part"):
            first(key=f"3.{stage}.0", timeout_ms=1)
        first(key="its end", timeout_ms=1)
        return "written"

    def failed():
        second(key="a save begins", timeout_ms=1)
        second(key="its end", timeout_ms=1)
        return "failed"

    try:
        assert in_threads(written, failed) == ["written", "failed"]
    finally:
        first.close()
        second.close()
