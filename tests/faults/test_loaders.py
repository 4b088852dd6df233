"""Processes that read from workers of a data loader: they are killed, or a worker, or the launcher.

Row 27 of the list of faults. What Python's multiprocessing shares between them must not be left.
"""

import pytest

from tests.faults.launched import REPOSITORY, Launch, launching
from tests.faults.test_kills import check_end

pytestmark = pytest.mark.gangs

DIED = "Worker process was terminated unexpectedly with exit code -9"


def check(launch, code, *restarts):
    """Raise `AssertionError` unless it ended like this, has shared memory, and nothing is left."""
    assert launch.wait() == code, launch.said
    launch.check_nothing_left()
    assert launch.names()
    assert launch.restarts() == [*restarts]


@pytest.mark.parametrize(
    ("who", "code", "restarts"),
    [("process", 0, [(1, 137)]), ("worker", 1, []), ("launcher", -9, [])],
)
def test_what_is_shared_with_a_worker_is_removed(tmp_path, who, code, restarts):
    """The other process is killed by the launcher, or, as it is, by the kernel."""
    command = (REPOSITORY / "tests/faults/reader.py", tmp_path / "run", 1, who)
    launch = Launch(tmp_path, command, ("--processes", 2))
    try:
        check(launch, code, *restarts)
    finally:
        launch.close()


@pytest.mark.slow
@pytest.mark.parametrize(("what", "code"), [("kill", 137), ("worker", 1)])
def test_a_process_or_its_worker_is_killed(tmp_path, what, code):
    """Of Grain. A dead worker ends its process, with an error that says so."""
    fault = {"who": [1], "what": what, "step": 23}
    with launching(tmp_path, [fault], LOADER="1") as launch:
        check(launch, 0, (1, code))
        assert (DIED in launch.said) == (what == "worker")
    check_end(tmp_path)


@pytest.mark.slow
def test_a_launcher_is_killed(tmp_path):
    """Its processes have workers of Grain."""
    fault = {"who": [0], "what": "launcher", "step": 23}
    with launching(tmp_path, [fault], LOADER="1") as launch:
        check(launch, -9)
    with launching(tmp_path, name="again", LOADER="1") as launch:
        check(launch, 0)
    check_end(tmp_path)
