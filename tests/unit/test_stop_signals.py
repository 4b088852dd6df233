"""Signals that end training: the first after a step, the second at once."""

import os
import queue
import signal

import pytest

from plurax.train.stop_signals import SAME_SECONDS, StopSignals

LATE = SAME_SECONDS + 1


@pytest.mark.parametrize(
    ("launched", "times", "ending"),
    [
        (True, [0, LATE], 2),
        (True, [0, SAME_SECONDS - 1, LATE], 3),  # the second is a copy of the first
        (False, [0, 0], 2),
    ],
)
def test_which_signal_ends_the_process(launched, times, ending):
    """Slurm sends one to all processes of a step, and a launcher passes its own on."""
    seen, ended = queue.Queue(), queue.Queue()
    clock, count = iter(times), 0

    def now():
        nonlocal count
        count += 1
        seen.put(count)
        return next(clock)

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with StopSignals(launched, now, lambda code: ended.put((code, count))) as stop:
            for number in range(ending):
                os.kill(os.getpid(), signal.SIGTERM)
                assert stop.name == "SIGTERM"
                if launched:
                    seen.get(timeout=20)
                elif number == 0:
                    seen.get(timeout=20)
                    signal.signal(signal.SIGTERM, lambda *_: None)  # else it ends the tests
            assert ended.get(timeout=20) == (143, ending if launched else 1)
    finally:
        signal.signal(signal.SIGTERM, before)
