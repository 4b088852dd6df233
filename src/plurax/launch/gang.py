"""The processes of one attempt on this host: start them, watch them, end them.

Nothing here decides. What happens is reported as messages, and whoever decides sends orders
(`plurax.launch.supervisor`), from this host or over the network.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plurax.exit_codes import ExitCode, shell_code
from plurax.launch.lateness import Lateness
from plurax.launch.memory_kills import memory_kills
from plurax.launch.output import Output
from plurax.launch.protocol import Message
from plurax.launch.settings import Settings
from plurax.reading import parse_json
from plurax.reaper import ALONE, Reaper, end_group, kill_group

CHILD = str(Path(__file__).with_name("child.py"))


class Gang:
    """The processes of this host.

    **Arguments:** `settings`; `output`, for what they write; `selector`, which is waited on and
    whose keys' data are functions to call; `report`, which takes messages; `clock`, seconds of
    CLOCK_MONOTONIC, which is the same in all processes of a host.
    """

    def __init__(
        self,
        settings: Settings,
        output: Output,
        selector: selectors.BaseSelector,
        report: Callable[[Message], None],
        clock: Callable[[], float] = time.monotonic,
        kills: Callable[[], int] = memory_kills,
    ) -> None:
        self._settings, self._output, self._selector = settings, output, selector
        self._report, self._clock, self._kills = report, clock, kills
        self._processes: list[_Process] = []
        self._attempt, self._saved, self._looked = -1, -1, 0.0
        self._kills_before = 0
        self._reaper = Reaper(settings.limits.cleanup)
        self._reaper.tell(str(settings.status.resolve()))

    def obey(self, order: Message) -> None:
        """Do what whoever decides has ordered: start, signal or kill the processes."""
        if order["do"] == "start":
            self._start(order)
        elif order["do"] == "signal":
            for process in self.alive:
                process.send(order["signal"])
        elif order["do"] == "kill":
            for process in self.alive:
                # Where another one's watchdog ended it, who is late and has not ended is the one
                # that it waited for. Its stacks say where it is stuck.
                late = order["stuck"] and process.lateness.seconds(self._clock()) is not None
                stuck = late or process.is_stopped()
                if not stuck:
                    process.kill()
                elif process.abort_until is None:
                    self._abort(process)

    def tick(self) -> None:
        """Read what is there: who has ended, and at times the status files."""
        self._take_ended([process for process in self.alive if process.popen.poll() is not None])
        now = self._clock()
        if now - self._looked < self._settings.limits.poll:
            return
        awake = now - self._looked < self._settings.limits.slack
        self._looked = now
        self._output.flush()
        for process in self.alive:
            process.look(now, awake)
            if process.abort_until is None and self._late(process):
                self._abort(process)
            if process.abort_until is not None and now > process.abort_until:
                process.kill()
        self._report_progress()

    def close(self) -> None:
        """Kill what still runs, and end the reaper."""
        for process in self.alive:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a file system may hang
                process.popen.wait(self._settings.limits.silence)
        self._take_ended([process for process in self.alive if process.popen.poll() is not None])
        self._reaper.close(self._settings.limits.silence)
        self._output.close()

    @property
    def alive(self) -> list["_Process"]:
        """The processes that have not ended."""
        return [process for process in self._processes if not process.ended]

    def _start(self, order: Message) -> None:
        assert not self.alive
        settings = self._settings
        self._attempt, self._saved = order["attempt"], -1
        self._kills_before, self._looked = self._kills(), self._clock()
        folder = settings.status / str(self._attempt)
        folder.mkdir(parents=True, exist_ok=True)
        first = order["first"]
        self._processes = [
            _Process(number, settings.command, self._environment(order, number, folder), folder)
            for number in range(first, first + settings.processes)
        ]
        for process in self._processes:
            self._reaper.tell(f"+{process.popen.pid}")
            # An end only wakes up: `tick` looks who has ended.
            self._selector.register(process.pidfd, selectors.EVENT_READ, lambda: None)
            for stream, pipe in enumerate(process.pipes):
                read = _Reader(self._selector, self._output, process.number, stream, pipe)
                process.readers.append(read)

    def _environment(self, order: Message, number: int, folder: Path) -> dict[str, str]:
        """Return the environment of a process: this one's, and what it reads of the gang."""
        kept = {key: value for key, value in os.environ.items() if key not in OWN}
        variables = {
            "PLURAX_COORDINATOR": order["coordinator"],
            "PLURAX_PROCESSES": str(order["processes"]),
            "PLURAX_PROCESS": str(number),
            "PLURAX_ATTEMPT": str(order["attempt"]),
            "PLURAX_STATUS": str(folder.resolve()),
            "PLURAX_LOG": str(self._output.path(number).resolve()),
            "PYTHONUNBUFFERED": "1",  # what it wrote is there when it is killed
        }
        devices = self._settings.devices
        variables |= {} if devices is None else {"PLURAX_DEVICES": str(devices)}
        variables |= {"PLURAX_ELASTIC": "1"} if order.get("elastic") else {}
        return kept | variables

    def _late(self, process: "_Process") -> bool:
        late = process.lateness.seconds(self._clock())
        return late is not None and late > self._settings.limits.slack

    def _abort(self, process: "_Process") -> None:
        """Ask a stuck process for the stacks of its threads, and for its end."""
        process.stopped, process.stuck = process.is_stopped(), True
        process.abort_until = self._clock() + self._settings.limits.abort
        self._report({"is": "stuck", **process.description(self._attempt)})
        process.send(signal.SIGABRT)
        process.send(signal.SIGCONT)  # a stopped process gets no signal but this and SIGKILL

    def _take_ended(self, processes: list["_Process"]) -> None:
        """Report that processes have ended, once what they started has too."""
        groups = [(process, kill_group(process.popen.pid)) for process in processes]
        until = time.monotonic() + self._settings.limits.cleanup  # one limit for all of them
        for process, pids in groups:
            end_group(process.popen.pid, pids, until)
            self._ended(process)

    def _ended(self, process: "_Process") -> None:
        """Report that a process has ended, and close what belongs to it."""
        process.ended = True
        self._reaper.tell(f"-{process.popen.pid}")
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        for reader in process.readers:
            reader.drain()
        process.look(self._clock(), awake=False)
        self._report_progress()
        code = shell_code(process.popen.returncode)
        # Killed by somebody, and not by this launcher: perhaps by the kernel, for memory.
        kills = code == ExitCode.KILLED and not process.killed and self._kills()
        memory = bool(kills and kills > self._kills_before)
        code = ExitCode.OUT_OF_MEMORY if memory else ExitCode.STUCK if process.stuck else code
        end = {"code": int(code), "ours": process.killed and not process.stuck, "memory": memory}
        self._report({"is": "exit", **process.description(self._attempt), **end})

    def _report_progress(self) -> None:
        """Report the newest checkpoint, when there is a newer one."""
        steps = [process.status.get("saved") for process in self._processes]
        saved = max((step for step in steps if step is not None), default=-1)
        if saved > self._saved:
            self._saved = saved
            self._report({"is": "progress", "attempt": self._attempt, "saved": saved})


_NAMES = "COORDINATOR PROCESSES PROCESS DEVICES ATTEMPT STATUS LOG ELASTIC TOKEN"
OWN = frozenset(f"PLURAX_{name}" for name in _NAMES.split())
"""Variables that speak of another gang where this launcher has them; the last is a secret."""


class _Process:
    """A process, and what is known of it."""

    def __init__(
        self, number: int, command: tuple[str, ...], environment: Mapping[str, str], folder: Path
    ) -> None:
        self.number, self._file = number, folder / f"{number}.json"
        self.popen = subprocess.Popen(
            [*ALONE, CHILD, str(os.getpid()), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.popen.stdout is not None
        assert self.popen.stderr is not None
        self.pipes = (self.popen.stdout, self.popen.stderr)
        self.pidfd = os.pidfd_open(self.popen.pid)
        self.readers: list[_Reader] = []
        self.ended = self.killed = self.stuck = self.stopped = False
        self.abort_until: float | None = None
        self.lateness = Lateness()
        self.status: dict[str, Any] = {}

    def send(self, number: int) -> None:
        """Send a signal to the process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self.popen.send_signal(number)

    def kill(self) -> None:
        """Kill the process and what it started, but what removes their shared memory."""
        self.killed = True
        kill_group(self.popen.pid)

    def look(self, now: float, awake: bool) -> None:
        """Read the status file. Being late counts only while this launcher is awake itself."""
        try:
            status = parse_json(self._file.read_text())
        except (OSError, ValueError):
            status = self.status
        if isinstance(status, dict):
            self.status = status
        self.lateness.look(self.status, now, awake)

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process, as SIGSTOP does."""
        try:
            stat = Path(f"/proc/{self.popen.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"

    def description(self, attempt: int) -> Message:
        """Return what a message says of the process."""
        status = {key: self.status.get(key) for key in ("step", "phase", "saved")}
        flags = {"stuck": self.stuck, "stopped": self.stopped}
        return {"attempt": attempt, "process": self.number, **status, **flags}


class _Reader:
    """Reads a pipe of a process whenever there is something in it."""

    def __init__(
        self, selector: selectors.BaseSelector, output: Output, process: int, stream: int, pipe: Any
    ) -> None:
        self._selector, self._output, self._pipe = selector, output, pipe
        self._process, self._stream = process, stream
        os.set_blocking(pipe.fileno(), False)
        selector.register(pipe, selectors.EVENT_READ, self.read)

    def read(self) -> bool:
        """Pass on what is there; return whether there may be more."""
        if self._pipe.closed:
            return False
        try:
            data = os.read(self._pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._close()
            return False
        self._output.write(self._process, self._stream, data)
        return True

    def drain(self) -> None:
        """Read what is left, and close."""
        while self.read():
            pass
        self._close()

    def _close(self) -> None:
        if not self._pipe.closed:
            self._selector.unregister(self._pipe)
            self._pipe.close()
