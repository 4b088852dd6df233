"""Start launchers, and see that nothing of them is left: processes, shared memory.

    with launching(folder, [fault, ...]) as launch:
        code = launch.wait()

Every wait has a limit, and everything that was started is killed at the end.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.faults import notes

REPOSITORY = Path(__file__).parents[2]
RUN = REPOSITORY / "tests/faults/run.py"
PLURAX = ("-m", "plurax.cli")
SHARED = Path("/dev/shm")
PRIVATE = ("sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"')
"""With a folder and a command: runs it with the folder as its `/dev/shm`, in a mount namespace."""

LIMIT = 300
"""Seconds that a launcher may take."""

GONE = 60
"""Seconds until no process may be left of a launcher that has ended."""


class Launch:
    """A launcher in a process group of its own.

    **Arguments:** `command`, what its processes run; `options`; `prefix`, what starts it; `plurax`,
    how Python finds it; `name`, of its files in `folder`; `shared`, what its `/dev/shm` is: without
    it a folder of its own where that is permitted, else that of this machine.

    **Attributes:** `output`, the folder of its run.
    """

    def __init__(
        self, folder, command, options=(), prefix=(), plurax=PLURAX, name="launch",
        shared=None, **environment,
    ):  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name = folder, name
        self._shared = shared
        if shared is None:
            prefix = (*prefix, *self._enter_private_memory())
        cache = Path(os.environ["PLURAX_TEST_CACHE"], "killed")  # half a program may be left there
        with self.path("said").open("ab") as said:
            self.popen = subprocess.Popen(
                [*prefix, sys.executable, *plurax, "launch", *map(str, options),
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

    def until(self, words, limit=LIMIT):
        """Wait until it or a process of it has printed some words. Raises `AssertionError`."""
        command = ["tail", "-n", "+1", "-f", str(self.path("said"))]
        ended, printed = os.pidfd_open(self.popen.pid), b""
        end = time.monotonic() + limit
        with subprocess.Popen(command, stdout=subprocess.PIPE) as tail:
            try:
                while words.encode() not in printed:
                    left = max(0.0, end - time.monotonic())
                    ready, *_ = select.select([tail.stdout, ended], [], [], left)
                    if tail.stdout not in ready:  # too late, or all is printed
                        assert words in self.said, f"{words!r} was not printed: {self.said}"
                        return
                    printed += os.read(tail.stdout.fileno(), 1 << 16)
            finally:
                tail.kill()
                os.close(ended)

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

    def ends(self):
        """The processes that ended in another way than by `kill -9`, and what was written then."""
        rows = [row for row in self.events if row["event"] == "exit" and row["code"] != 137]
        logs = {path.name: path.read_text()[-20_000:] for path in self.path("logs").glob("*.log")}
        return rows, logs

    def check_nothing_left(self):
        """Raise `AssertionError` where a process or shared memory outlives the launcher."""
        assert not [pid for pid, began in self._pids() if not _ends(pid, began)], (
            "processes are left"
        )
        left = {*os.listdir(self._shared)}
        assert not self.names() & left, "multiprocessing's is left"
        if self._shared != SHARED:  # what others have there is not ours
            # A worker that is killed while it creates some may leave what nobody has registered.
            left = {name for name in left if not name.startswith(("psm_", "sem.mp-"))}
            assert not left, f"shared memory is left: {left}"

    def names(self):
        """The shared memory that its processes have noted, as files."""
        return {name for path in self.folder.glob("*.names") for name in path.read_text().split()}

    def _enter_private_memory(self):
        """Return the command that starts one with a `/dev/shm` of its own, if that is permitted."""
        folder = self.path("shm")
        folder.mkdir()
        user = () if os.geteuid() == 0 else ("--map-root-user",)
        enter = ("unshare", *user, "--mount", *PRIVATE, str(folder))
        permitted = shutil.which("unshare") and not subprocess.call(
            [*enter, "true"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._shared = folder if permitted else SHARED
        return enter if permitted else ()

    def _pids(self):
        """The processes of all attempts."""
        lines = [
            line for path in self.folder.glob("*.pids") for line in path.read_text().splitlines()
        ]
        return {(int(pid), began) for pid, began in map(str.split, lines)}

    def close(self):
        """Kill what still runs."""
        left = [pid for pid, began in self._pids() if _lives(pid, began)]
        for pid in (self.popen.pid, *left):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(os.getpgid(pid), signal.SIGKILL)
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


def _lives(pid, began):
    """Whether a process lives, and is not a newer one of the same number."""
    try:
        return notes.began(pid) == began
    except OSError:
        return False


def _ends(pid, began):
    """Whether a process has ended, or does so within a limit."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return not _lives(pid, began) or bool(select.select([descriptor], [], [], GONE)[0])
    finally:
        os.close(descriptor)
