"""For how long a process has been past the deadline in its status."""

from typing import Any


class Lateness:
    """Measures time since a status whose deadline is over was first seen.

    A process says in its status by when its piece of work ends at the latest. One late look says
    little: the host may have been suspended, process and launcher with it. So what counts is for
    how long the launcher has been awake and has seen the same status, past its deadline.
    """

    def __init__(self) -> None:
        self._status: dict[str, Any] | None = None
        self._since: float | None = None

    def look(self, status: dict[str, Any], now: float, awake: bool) -> None:
        """Take the status at a time; `awake`: this launcher has looked shortly before."""
        deadline = status.get("deadline")
        if deadline is None or now <= deadline:
            self._since = None
        elif self._since is None or not awake or status != self._status:
            self._since = now
        self._status = status

    def seconds(self, now: float) -> float | None:
        """Return for how long the process has been late; None if it is not."""
        return None if self._since is None else now - self._since
