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
    abnormal = [one for one in exits if one.code != ExitCode.DONE and not one.ours]
    abnormal = abnormal or [one for one in exits if one.code != ExitCode.DONE]
    return min(abnormal, key=lambda one: (_rank(one), _behind(one)), default=None)


def _behind(one: Exit) -> int:
    """Return the step of a process that its watchdog ended: the others wait for the last one."""
    return (one.step or 0) if one.code == ExitCode.STUCK else 0


def _rank(one: Exit) -> int:
    """Return a smaller number for what is rather a cause than a consequence."""
    if one.stopped:
        return 0
    if one.stuck or one.memory:
        return 1
    if one.lost or one.code in (ExitCode.STUCK, ExitCode.CORRUPT, ExitCode.OUT_OF_MEMORY):
        return 2
    if one.code > 128 and one.code not in (ExitCode.PEER_DIED, ExitCode.TERMINATED):
        return 2
    if one.code in (ExitCode.MISTAKE, ExitCode.PERMANENT):
        return 3
    late = {ExitCode.PEER_DIED: 5, ExitCode.PREEMPTED: 6, ExitCode.TERMINATED: 6}
    return {int(code): rank for code, rank in late.items()}.get(one.code, 4)
