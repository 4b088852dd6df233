"""Real gangs under the launcher: what is tried again, and what is not.

Rows 9, 23, 27 and 28 of the list of faults.
"""

import os
import socket

import pytest

from plurax.checkpoint import Checkpoints
from tests.faults.launched import launching
from tests.faults.test_kills import check_end

pytestmark = [pytest.mark.gangs, pytest.mark.slow]


def at(what, step, *who):
    return {"who": who, "what": what, "step": step}


def test_a_signal_to_a_process_is_cured_and_one_to_the_launcher_is_obeyed(tmp_path):
    with launching(tmp_path, [at("SIGTERM", 15, 1), at("preempt", 25, 1)]) as launch:
        assert launch.wait() == 75, launch.said
        launch.check_nothing_left()
        assert [code for _, code in launch.restarts()] == [75]
        assert "SIGTERM: passed on to the 2 processes" in launch.said
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps()[-1] < 40
    with launching(tmp_path, name="again") as launch:
        assert launch.wait() == 0, launch.said
    check_end(tmp_path)


def test_out_of_memory_is_not_tried_again(tmp_path):
    with launching(tmp_path, [at("memory", 15, 1)]) as launch:
        assert launch.wait() == 79, launch.said
        launch.check_nothing_left()
        assert launch.restarts() == []
        assert "process 1 ended with exit code 79" in launch.said
        assert "not restarted: the same plan would need the same memory" in launch.said


def test_a_file_that_is_short_ends_the_run(tmp_path):
    """What a restart might have cured, were it the network's; the budget ends it."""
    faults = [at("short file", 15, 0, 1)] * 3
    with launching(tmp_path, faults, options=("--restarts", 1)) as launch:
        assert launch.wait() == 1, launch.said
        launch.check_nothing_left()
        # Twice if the first attempt died before its checkpoint was written: the second is then new.
        assert [code for _, code in launch.restarts()] in ([1], [1, 1])
        assert "cannot reshape array of size" in launch.said
        assert "not restarted: 1 restarts in a row without a new checkpoint" in launch.said


def test_a_folder_that_another_run_writes_is_not_tried_again(tmp_path):
    with Checkpoints(tmp_path / "run" / "checkpoints") as mine:
        mine.lock()
        with launching(tmp_path) as launch:
            assert launch.wait() == 2, launch.said
            launch.check_nothing_left()
            assert launch.restarts() == []
            assert f"is written by process {os.getpid()}" in launch.said


TAKEN = """
import itertools, sys
from plurax.cli import main
from plurax.launch import network_hosts

free, calls = network_hosts.free_port, itertools.count()
network_hosts.free_port = lambda name: free(name) if next(calls) else {port}
main()
"""


def test_a_port_that_is_taken_meanwhile(tmp_path):
    """Another program takes the port that was free when the launcher looked."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        plurax = ("-c", TAKEN.format(port=taken.getsockname()[1]))
        with launching(tmp_path, plurax=plurax) as launch:
            assert launch.wait() == 0, launch.said
            launch.check_nothing_left()
            assert len(launch.restarts()) == 1
    check_end(tmp_path)
