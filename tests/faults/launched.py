"""Start launchers, and see that nothing of them is left: processes, shared memory.

    with launching(folder, [fault, ...]) as launch:
        code = launch.wait()

Every wait has a limit, and everything that was started is killed at the end.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
RUN = REPOSITORY / "tests/faults/run.py"
LIMIT = 300
"""Seconds that a launcher may take."""

GONE = 60
"""Seconds until no process may be left of a launcher that has ended."""


class Launch:
    """A launcher in a process group of its own.

    **Attributes:** `output`, the folder of its run.
    """

    def __init__(self, folder, command, options=(), prefix=(), name="launch", **environment):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name = folder, name
        self._before = {*os.listdir("/dev/shm")}
        cache = Path(os.environ["PLURAX_TEST_CACHE"], "killed")  # half a program may be left there
        with self.path("said").open("ab") as said:
            self.popen = subprocess.Popen(
                [*prefix, sys.executable, "-m", "plurax.cli", "launch", *map(str, options),
                 "--logs", str(self.path("logs")), "--", *map(str, command)],
                cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache),
                     "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}", **environment},
            )  # fmt: skip

    def path(self, ending):
        """A file of this launcher."""
        return self.folder / f"{self.name}.{ending}"

    def wait(self, limit=LIMIT):
        """Return its exit code, once it has ended."""
        return self.popen.wait(limit)

    @property
    def said(self):
        """What it and its processes have printed."""
        return self.path("said").read_text()[-20_000:]

    @property
    def events(self):
        """The rows of its events."""
        (path,) = self.path("logs").glob("launch*.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]

    def restarts(self):
        """The processes and exit codes that it gave as causes of its restarts."""
        rows = [row for row in self.events if row["event"] == "restart"]
        return [(row["process"], row["code"]) for row in rows]

    def check_nothing_left(self):
        """Raise `AssertionError` where a process or shared memory outlives the launcher."""
        assert not [pid for pid in self._pids() if not _ends(pid)], "processes are left"
        assert not _unused(self._before), "shared memory is left"

    def _pids(self):
        """The processes of all attempts."""
        found = [path.read_text().split() for path in self.folder.glob("*.pids")]
        return [int(pid) for pids in found for pid in pids]

    def close(self):
        """Kill what still runs."""
        for pid in (self.popen.pid, *filter(_is_ours, self._pids())):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.popen.wait()


@contextlib.contextmanager
def launching(folder, faults=(), processes=2, devices=2, options=(), **more):
    """Launch the run of `tests.faults.run` in a folder; all launches there share its output."""
    options = ("--processes", processes, "--devices", devices, *options)
    launch = Launch(folder, (RUN, folder / "run", json.dumps(faults)), options, **more)
    try:
        yield launch
    finally:
        launch.close()


def _is_ours(pid):
    """Whether a process of that number lives and is one of the run, not a newer one."""
    try:
        return b"tests/faults" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _ends(pid):
    """Whether a process has ended, or does so within a limit."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return not _is_ours(pid) or bool(select.select([descriptor], [], [], GONE)[0])
    finally:
        os.close(descriptor)


def _unused(before):
    """The files of shared memory that are new and that no process has mapped."""
    new = {*os.listdir("/dev/shm")} - before
    mapped = ""
    for path in Path("/proc").glob("[0-9]*/maps") if new else ():
        with contextlib.suppress(OSError):
            mapped += path.read_text()
    return {name for name in new if f"/dev/shm/{name}" not in mapped}
