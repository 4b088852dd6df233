"""The limits on waiting of which one must end before another, in seconds, and how they are nested.

Who waits longest learns least: the process that is stuck can say where it hangs, a process that
waits for it only whom it misses, and the launcher only that nothing moves. So the limits are
nested, and the one that knows most is the shortest. There are two chains.

A process or host that is gone, or stopped by SIGSTOP, sends no heartbeats. JAX sends them from a
thread of C++, in steps of any length, so a process that only computes, or hangs, does send them:

    heartbeat 30                   JAX ends the others, with the exit code PEER_DIED
      < step 180                   before a watchdog takes those that wait for it for stuck

A process that is stuck and lives: in a collective that never ends, in a lock, in a reader of data:

    step 180 to longest_step 900   its watchdog writes the stacks of all threads, and ends it
      < save 1200                  a save gives up: a disk that does not answer is no stuck process
      < long_work 1500             the watchdog, of work that is long: to compile, restore or save
      < gang_round 1800            those that wait for it give up, and name it

The launcher reads from the status of a process when its watchdog will have ended it. If it has not,
because it holds the GIL or is stopped, the launcher waits `slack` longer, asks it for its stacks
(SIGABRT), and kills it after `abort`.
"""

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Limits in seconds, the shortest first. Raises `AssertionError` where they are not nested."""

    look: float = 0.2
    """Between two looks of a watchdog; the age that a status may have."""
    abort: float = 5.0
    """After SIGABRT, for a stuck process to write its stacks."""
    slack: float = 10.0
    """Of a launcher, after the limit of a watchdog."""
    heartbeat: float = 30.0
    """Without a heartbeat until JAX takes a process for dead."""
    step: float = 180.0
    """The least limit of a step, and of whatever else is done again and again."""
    longest_step: float = 900.0
    """The largest limit of a step, however long the steps before it took."""
    save: float = 1200.0
    """For a checkpoint to be written, by all processes."""
    long_work: float = 1500.0
    """For work that is long: to start, to compile, to save, and the first of its kind."""
    gang_round: float = 1800.0
    """That one process may come later than the others to a round on their hosts."""

    def __post_init__(self) -> None:
        chain = dataclasses.astuple(self)
        assert all(a < b for a, b in itertools.pairwise(chain)), "limits are not nested"
        # A watchdog looks, writes stacks and ends the process, all within the launcher's slack.
        assert self.slack > 10 * self.look, "a launcher does not wait for the watchdog"


TIMEOUTS = Timeouts()
