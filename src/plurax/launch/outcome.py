"""Why an attempt ended: of all that happened to its processes, what came first."""

import dataclasses
from collections.abc import Sequence

from plurax.exit_codes import ExitCode, meaning


@dataclasses.dataclass(frozen=True)
class Exit:
    """How a process ended."""

    process: int
    code: int
    host: int = 0
    step: int | None = None
    """The last step that it reported."""
    stuck: bool = False
    """Whether the launcher found its deadline passed."""
    stopped: bool = False
    """Whether it was stopped then, as by SIGSTOP."""
    memory: bool = False
    """Whether the kernel killed it for memory."""
    ours: bool = False
    """Whether the launcher killed it because of another process."""
    lost: bool = False
    """Whether nobody knows, because its host is lost."""

    def sentence(self, hosts: int = 1) -> str:
        """Return what happened, without an end of the sentence."""
        name = f"process {self.process}" + (f" (host {self.host})" if hosts > 1 else "")
        at = "" if self.step is None else f" at step {self.step}"
        if self.lost:
            return f"host {self.host} is lost, with process {self.process}"
        if self.stopped:
            return f"{name} was stuck{at}: it is stopped, as by SIGSTOP"
        if self.stuck:
            return f"{name} was stuck{at}: past its deadline, and its watchdog did not end it"
        if self.ours:
            return f"{name} did not end in time{at}, and was killed"
        if self.memory:
            return f"{name} was killed{at} because its memory was full (SIGKILL by the kernel)"
        if self.code == ExitCode.KILLED:
            return f"{name} was killed (SIGKILL){at}"
        if self.code > 128:
            return f"{name} ended with {self.code}{at} ({meaning(self.code)})"
        return f"{name} ended with exit code {self.code}{at}: {meaning(self.code)}"


def cause(exits: Sequence[Exit]) -> Exit | None:
    """Return which of the exits, in the order in which they came, is why the others came.

    Where a process dies, the others abort a little later (134), or a collective raises an exception
    in them; where one is stuck, all are late. Returns None where all have done their work.
    """
    abnormal = [exit_ for exit_ in exits if exit_.code != ExitCode.DONE and not exit_.ours]
    abnormal = abnormal or [exit_ for exit_ in exits if exit_.code != ExitCode.DONE]
    return min(abnormal, key=lambda exit_: (_rank(exit_), _behind(exit_)), default=None)


def _behind(exit_: Exit) -> int:
    """Return the step of a process that its watchdog ended: the others wait for the last exit_."""
    return (exit_.step or 0) if exit_.code == ExitCode.STUCK else 0


def _rank(exit_: Exit) -> int:
    """Return a smaller number for what is rather a cause than a consequence."""
    if exit_.stopped:
        return 0
    if exit_.stuck or exit_.memory:
        return 1
    if exit_.lost or exit_.code in (ExitCode.STUCK, ExitCode.CORRUPT, ExitCode.OUT_OF_MEMORY):
        return 2
    if exit_.code > 128 and exit_.code not in (ExitCode.PEER_DIED, ExitCode.TERMINATED):
        return 2
    if exit_.code in (ExitCode.MISTAKE, ExitCode.PERMANENT):
        return 3
    late = {ExitCode.PEER_DIED: 5, ExitCode.PREEMPTED: 6, ExitCode.TERMINATED: 6}
    return {int(code): rank for code, rank in late.items()}.get(exit_.code, 4)
