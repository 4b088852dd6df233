"""`plurax launch` of a training of which processes are killed; side `kill` kills one of them.

A turn answers the seconds of each part of the way from `kill -9` to the next step: see `PARTS`.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from benchmarks.workers.serve import Settings, Side, serve

PARTS = ("noticed", "ended", "backoff", "processes", "data", "restore", "step")
"""From the signal until the launcher knows; until the others have ended; until it starts new ones;
until these have met; until data and program are there, which is lowered at its first step; until
the checkpoint is read; until the first step is compiled and done."""
CALM = 3
"""Checkpoints before each signal."""
LIMIT = 200
"""Seconds to wait for anything."""
Rows = list[dict[str, Any]]


class Launched:
    """A run under the launcher, in a folder."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        self._killed = 0
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        count, devices = settings["processes"], settings["devices"]
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "plurax.cli", "launch", "--logs", str(folder)),
                *("--processes", str(count), "--devices", str(devices // count), "--"),
                str(Path(__file__).with_name("jax_restarted.py")),
                *(str(folder / "marks.jsonl"), str(folder / "run"), json.dumps(settings)),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )

    def kill(self, _units: int) -> dict[str, Any]:
        """Kill one process once all is calm; return the seconds of each part until the next step.

        Process 1 the first time, then process 0, and so on.
        """
        steps = CALM * self._settings["checkpoint_every"]
        process, attempt = (self._killed + 1) % self._settings["processes"], self._killed
        calm = self._wait(lambda: self._steps(attempt, process)[steps:])
        at = time.time()
        os.kill(calm[-1]["pid"], signal.SIGKILL)
        self._killed += 1
        done = self._wait(lambda: self._steps(self._killed, 0))
        return parts(at, self._rows("launch.jsonl"), self._rows("marks.jsonl"), done[0])

    def _steps(self, attempt: int, process: int) -> Rows:
        wanted = {"mark": "step", "attempt": attempt, "process": process}
        return [row for row in self._rows("marks.jsonl") if wanted.items() <= row.items()]

    def _rows(self, name: str) -> Rows:
        path = self._folder / name
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines(True) if line[-1:] == "\n"]

    def _wait(self, find: Callable[[], Rows]) -> Rows:
        end = time.monotonic() + LIMIT
        while not (found := find()):
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the launched processes do not go on")
            time.sleep(0.05)
        return found

    def close(self) -> None:
        """End the run: the second signal ends it at once."""
        while self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            time.sleep(1)


def parts(at: float, events: Rows, marks: Rows, done: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each of `PARTS`, from the launcher's events and process 0's marks.

    **Arguments:** `at`, of the signal; `done`, the mark of the first step after it.
    """
    later = [row for row in events if row["time"] >= round(at, 3)]
    of = {event: [row["time"] for row in later if row["event"] == event] for event in
          ("exit", "restart", "start")}  # fmt: skip
    seen = {row["mark"]: row["time"] for row in reversed(marks)
            if (row["attempt"], row["process"]) == (done["attempt"], 0)}  # fmt: skip
    times = [at, of["exit"][0], of["restart"][0], of["start"][0], seen["joined"],
             seen["restoring"], seen["restored"], done["time"]]  # fmt: skip
    found = [b - a for a, b in itertools.pairwise(times)]
    return {"seconds": done["time"] - at, "parts": dict(zip(PARTS, found, strict=True))}


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    folder = tempfile.TemporaryDirectory()  # gone with this process
    launched = Launched(settings, Path(folder.name))

    def end(_units: int) -> dict[str, Any]:
        launched.close()
        folder.cleanup()
        return {}

    return {"kill": launched.kill, "end": end}, {"parts": PARTS}


if __name__ == "__main__":
    serve(build)
