"""The folders of a launcher on its host."""

import tempfile
from pathlib import Path

from plurax.exit_codes import ExitCode
from plurax.locked_folder import LockedFolder


class LaunchFolders:
    """Folders for what processes write. `logs`: that of their output, or None for a temporary one.

    **Attributes:** `asked`, the argument; `logs`; `status`, in which they say what they do.
    """

    def __init__(self, logs: Path | None) -> None:
        self.asked = logs
        temporary = Path(tempfile.gettempdir())
        self._status = LockedFolder(temporary, "plurax-status-")
        self._own_logs: LockedFolder | None = None
        if logs is None:
            self._own_logs = LockedFolder(temporary, "plurax-launch-")
            logs = self._own_logs.path
        self.logs, self.status = logs, self._status.path

    def close(self, code: int) -> Path:
        """Remove what is temporary, but the output of what failed; return where that is."""
        self._status.close()
        if self._own_logs is not None:
            if code != ExitCode.DONE:  # kept: the next launcher does not remove it
                self.logs = self.logs.rename(tempfile.mkdtemp(prefix="plurax-logs-"))
            self._own_logs.close()
        return self.logs
