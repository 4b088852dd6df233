"""Exit codes of a process, and what a launcher does about each.

A process says by its exit code why it ended, so that whoever started it (`plurax launch`, Slurm, a
script) can tell a fault that a restart cures from a mistake that it does not. A signal that ends a
process is 128 + its number, as shells write it.

Source: sysexits.h for EX_TEMPFAIL = 75; the others are free in it and in shells.
"""

import enum
import signal


class ExitCode(enum.IntEnum):
    """Why a process ended."""

    DONE = 0
    FAILED = 1
    MISTAKE = 2
    PREEMPTED = 75
    STUCK = 76
    PERMANENT = 77
    CORRUPT = 78
    OUT_OF_MEMORY = 79
    INTERRUPTED = 130
    PEER_DIED = 134
    KILLED = 137
    READER_GONE = 141
    TERMINATED = 143


MEANINGS = {
    ExitCode.DONE: "it has done its work",
    ExitCode.FAILED: "an exception that nobody caught ended it",
    ExitCode.MISTAKE: "a mistake in what it was given; a restart does not cure it",
    ExitCode.PREEMPTED: "it was asked to stop, and has saved its state",
    ExitCode.STUCK: "its watchdog found it stuck: no step ended within the limit",
    ExitCode.PERMANENT: "a failure that a restart does not cure",
    ExitCode.CORRUPT: "replicas of the parameters differ: a silent corruption of memory",
    ExitCode.OUT_OF_MEMORY: "out of memory, of the host or of a device",
    ExitCode.INTERRUPTED: "Ctrl-C",
    ExitCode.PEER_DIED: "aborted, as JAX does in every process once another one died",
    ExitCode.KILLED: "killed with SIGKILL",
    ExitCode.READER_GONE: "nobody reads its output any more, as when `head` has read enough",
    ExitCode.TERMINATED: "ended by SIGTERM, before it could save",
}
"""A sentence for each code."""

ADVICE = {
    ExitCode.DONE: "of `plurax watch`, the run has ended",
    ExitCode.FAILED: "of `plurax verify`, a tensor differs; of `plurax replay`, a saved state does",
    ExitCode.MISTAKE: "one message, starting with `error:`, says what to write instead",
    ExitCode.PREEMPTED: "start it again with `--resume`",
    ExitCode.STUCK: "only of several processes; the stacks of all threads were printed",
    ExitCode.PERMANENT: "the message says why",
    ExitCode.CORRUPT: "nothing of it is saved: start it again with `--resume`",
    ExitCode.OUT_OF_MEMORY: "the message has the plans that need less",
    ExitCode.INTERRUPTED: "training has saved; of `plurax watch`, the run goes on",
    ExitCode.PEER_DIED: "another process of several is gone; `plurax launch` starts all again",
    ExitCode.READER_GONE: "training has saved: start it again with `--resume`",
}
"""What to do about it, or what it says besides."""

FINAL = frozenset(
    {
        ExitCode.DONE,
        ExitCode.MISTAKE,
        ExitCode.PERMANENT,
        ExitCode.OUT_OF_MEMORY,
        ExitCode.INTERRUPTED,
    }
)
"""After these a launcher does not start the processes again."""


def shell_code(returncode: int) -> int:
    """Return a return code of `subprocess` as shells write it: 128 + n for the signal n."""
    return 128 - returncode if returncode < 0 else returncode


def meaning(code: int) -> str:
    """Return what an exit code means, in words.

    >>> meaning(75)
    'it was asked to stop, and has saved its state'
    >>> meaning(139)
    'ended by SIGSEGV'
    """
    if code in MEANINGS:
        return MEANINGS[ExitCode(code)]
    try:
        return f"ended by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"exit code {code}"
