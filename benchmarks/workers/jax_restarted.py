"""A process that `plurax launch` starts: `fit` of a network, and when it did what.

    plurax launch --processes 2 -- benchmarks/workers/jax_restarted.py MARKS OUTPUT SETTINGS

Each process appends lines to the file MARKS:

    {"mark": "joined", "process": 0, "pid": 4711, "attempt": 1, "step": 0, "time": 1763856000.25}

`began` (Python has started), `joined` (the processes have met), `restoring`, `restored`, and
`step`, after each step.
"""

import time

BEGAN = time.time()

import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402

import optax  # noqa: E402

import plurax as px  # noqa: E402
from benchmarks import sizes  # noqa: E402
from benchmarks.networks import make_batch, make_task  # noqa: E402

FOREVER = 1_000_000
"""Epochs."""


class Marks:
    """Appends lines, each in one write, so that those of several processes do not mix."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, mark: str, step: int = 0, at: float | None = None) -> None:
        """Write one."""
        row = {
            "mark": mark,
            "process": int(os.environ["PLURAX_PROCESS"]),
            "pid": os.getpid(),
            "attempt": int(os.environ.get("PLURAX_ATTEMPT", "0")),
            "step": step,
            "time": time.time() if at is None else at,
        }
        os.write(self._file, (json.dumps(row) + "\n").encode())


def watch_fit(marks: Marks) -> None:
    """Make `fit` write when it restores, and after each step."""
    opening = importlib.import_module("plurax.train.opening")
    guard_class = importlib.import_module("plurax.guards.replica_guard").ReplicaGuard
    restore, check = opening.restore, guard_class.check

    def restored(*args: Any) -> Any:
        marks.write("restoring")
        found = restore(*args)
        marks.write("restored")
        return found

    def checked(guard: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        marks.write("step", step)
        return check(guard, step, *args, **kwargs)

    opening.restore, guard_class.check = restored, checked


def main(path: str, output: str, given: str) -> None:
    marks, settings = Marks(path), json.loads(given)
    marks.write("began", at=BEGAN)
    px.initialize()
    marks.write("joined")
    watch_fit(marks)
    network = sizes.Mlp(tuple(settings["network"]["widths"]))
    px.fit(
        make_task(network),
        optax.adam(sizes.LEARNING_RATE),
        make_batch(network, settings["examples"]),
        plan=px.Plan(data=settings["devices"]),
        batch_size=settings["batch"],
        epochs=FOREVER,
        report_every=FOREVER,
        checkpoint_every=settings["checkpoint_every"],
        resident=False,
        output=output,
        resume=True,
        progress=False,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
