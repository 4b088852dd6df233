"""Run functions of `tests.processes.cases` in several processes that train together.

    run(2, 4, "steps,fits", folder)    # two processes with four devices each; what each returned

Each process has its own output file, which is shown where one fails.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
LIMIT = 900
"""Seconds that a gang may take."""


def start(processes, devices, module, arguments, folder, **environment):
    """Start a gang; returns its processes."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = []
    for index in range(processes):
        gang = {
            "PLURAX_COORDINATOR": f"127.0.0.1:{port}",
            "PLURAX_PROCESSES": str(processes),
            "PLURAX_PROCESS": str(index),
            "PLURAX_DEVICES": str(devices),
            "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}",
            **environment,
        }
        with (folder / f"output.{index}").open("ab") as output:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-u", "-m", module, *map(str, arguments)],
                    env={**os.environ, **gang}, cwd=REPOSITORY, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
    return started


def finish(started, limit=LIMIT):
    """Wait for all processes; returns their exit codes. None of them outlives this."""
    try:
        return [one.wait(limit) for one in started]
    finally:
        for one in started:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
                one.wait()


def run(processes, devices, cases, folder, *arguments):
    """Return what some cases returned in each process, by case."""
    started = start(
        processes, devices, "tests.processes.cases", [cases, folder, *arguments], folder
    )
    codes = finish(started)
    assert codes == [0] * processes, said(folder)
    return [json.loads((folder / f"found.{index}.json").read_text()) for index in range(processes)]


def said(folder):
    """What the processes printed."""
    parts = [f"--- {path.name}\n{path.read_text()[-4000:]}" for path in folder.glob("output.*")]
    return "\n".join(parts)
