"""A gang of processes of JAX on this machine, each with virtual devices; sides as in `jax_divided`.

Every process of the gang runs this module too (`settings["process"]` is its index) and does the
same; the seconds of a side are those of the process that took longest. Side `by hand` waits for
each step, as plurax does; with `waits` false it dispatches all steps and waits for the last.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from typing import Any

import plurax as px
from benchmarks import split_by_hand
from benchmarks.workers.jax_divided import make_sides
from benchmarks.workers.serve import Settings, Side, serve


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    if "process" in settings:
        px.initialize()
        return make_sides(settings, split_by_hand.Split(**settings["split"]))
    gang = Gang(settings)
    facts = gang.read()[0]["facts"]

    def side(name: str) -> Side:
        return lambda units: gang.run(name, units)

    return {name: side(name) for name in ("plurax", *facts["by hand"])}, facts


LIMIT = 100.0
"""Seconds that one request may take: mixed up collectives may wait forever."""


class Gang:
    """The processes; they wait for requests in their pipes, using no core."""

    def __init__(self, settings: Settings) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._processes = []
        for index in range(settings["processes"]):
            place = {
                "PLURAX_COORDINATOR": f"127.0.0.1:{port}",
                "PLURAX_PROCESSES": str(settings["processes"]),
                "PLURAX_PROCESS": str(index),
                "PLURAX_DEVICES": str(settings["devices"] // settings["processes"]),
            }
            process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, json.dumps(settings | {"process": index})],
                env=os.environ | place,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._processes.append(process)

    def run(self, side: str, units: int) -> dict[str, Any]:
        """What a side answered, by the process that took longest."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"side": side, "units": units}) + "\n")
            process.stdin.flush()
        limit = threading.Timer(LIMIT, self._kill)
        limit.daemon = True
        limit.start()
        try:
            return max(self.read(), key=lambda answer: answer["seconds"])
        finally:
            limit.cancel()

    def read(self) -> list[dict[str, Any]]:
        """A line of each. Where a process has ended all of them end, and this one too."""
        found = []
        for index, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                self._kill()
                raise RuntimeError(f"process {index} ended: {process.wait()}")
            found.append(json.loads(line))
        return found

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


if __name__ == "__main__":
    serve(build)
