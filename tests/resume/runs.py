"""Small runs to be killed: `python -m tests.resume.runs KIND OUTPUT MOMENT` resumes one.

`MOMENT` is `event:N`, before the Nth time a file or folder below OUTPUT is opened, made, renamed or
removed by Python, which strikes inside a save; `rollback:N`, likewise, from the first of a rollback
on; `file:NAME:N`, before the Nth time that a file of that name is opened or renamed; `remove:N`,
before the Nth time that any file is removed; `time:S`, some seconds after the first of them;
`batch:N`, when the Nth batch of "streamed" is asked for, or `stop:N`, when it then waits to be
killed; or `evaluation:N`, in the Nth of "data".
"""

import functools
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import optax
from tests import models

import plurax as px
from plurax.errors import DamagedCheckpointWarning, DamagedLogWarning
from plurax.execute.array_data import ArrayData, Position

ROWS = models.data(50)
EPOCHS, STEPS = 4, 16


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    print("stopped", flush=True)
    threading.Event().wait()


class Deadly:
    """An iterable that tells nothing; the process dies when the `fatal`th item is asked for."""

    def __init__(self, items, fatal=0, end=die):
        self.items, self.left, self.end = items, fatal, end

    def __iter__(self):
        for item in self.items:
            self.left -= 1
            if self.left == 0:
                self.end()
            yield item


def batches(fatal=0, end=die):
    return Deadly([batch for batch, _ in ArrayData(ROWS, 16).batches(Position(0))], fatal, end)


def poisoned():
    """Thirteen batches, the fifth to the seventh without a finite loss."""
    items = [batch for batch, _ in ArrayData(ROWS, 16).batches(Position(0))]
    bad = [{**batch, "x": np.full_like(batch["x"], np.nan)} for batch in items]
    return Deadly([*items, *bad[:3], *items, *items[:2]])


KINDS = {
    "data": lambda: {"plan": px.Plan(data=2, microbatches=2), "evaluation": ROWS},
    "streamed": lambda: {"data": batches(), "plan": px.Plan(data=2, microbatches=2)},
    "zero": lambda: {"plan": px.Plan(data=2, zero=3)},
    "pipeline": lambda: {
        "task": models.perceptron_stack(depth=2),
        "plan": px.Plan(pipeline=2, microbatches=2),
    },
    "logged": lambda: {"data": batches()},
    "rolled back": lambda: {"data": poisoned(), "rollback": px.train.Rollback(after=3, limit=9)},
    "members": lambda: {
        "optimizer": lambda hyper: optax.adamw(hyper["rate"]),
        "plan": px.Plan(chunk=2, batch_dim="major"),
        "members": px.Members(
            3, {"rate": px.ensemble.log_uniform(1e-3, 1e-1)}, px.ensemble.bootstrap()
        ),
    },
}


def loggers(output):
    return [px.callbacks.KeepBest("loss"), px.callbacks.Csv(output / "logs" / "table.csv"),
            px.callbacks.JsonLines(output / "logs" / "rows.jsonl"),
            px.callbacks.TensorBoard(output / "board", every=1)]  # fmt: skip


@functools.cache
def arguments(kind):
    """Of `fit`; the same objects each time, for which programs are compiled once in a process."""
    usual = {"task": models.mlp_task(), "optimizer": models.optimizer(), "data": ROWS}
    return {**usual, **KINDS[kind]()}


def fit(kind, output, **options):
    """One of the runs: four epochs of four steps, eight checkpoints; "rolled back" is longer."""
    if kind == "logged":
        options["callbacks"] = loggers(Path(output))
    return px.fit(
        batch_size=16,
        epochs=EPOCHS,
        checkpoint_every=3,
        progress=False,
        output=output,
        **{**arguments(kind), **options},
    )


EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "shutil.rmtree")


def die_at(moment, output):
    """Kill this process at a moment."""
    how, _, number = moment.partition(":")
    name, _, count = number.rpartition(":")
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        if event not in EVENTS:
            return
        path = str(arguments[0])
        if how == "remove":
            counts = event == "os.remove"  # inside a folder that is removed by its bare name
        elif how == "file":
            counts = path.startswith(output) and os.path.basename(path) == name
        else:
            counts = path.startswith(output)
        if how == "rollback" and not seen and ".rollbacks.jsonl.new" not in path:
            return
        seen += counts
        if counts and how in ("event", "rollback", "file", "remove") and seen == int(count):
            die()
        if counts and how == "time" and seen == 1:
            threading.Timer(float(number), die).start()

    sys.addaudithook(hook)
    return lambda: seen


def main(kind, output, moment):
    px.virtual_devices(8)
    for category in (DamagedCheckpointWarning, DamagedLogWarning):
        warnings.simplefilter("error", category)
    how, _, number = moment.partition(":")
    options = {}
    if how in ("batch", "stop"):
        options["data"] = batches(int(number), die if how == "batch" else stop)
    if how == "evaluation":  # after each epoch, before its checkpoint
        options["evaluation"] = Deadly([ROWS], int(number))
    seen = die_at(moment, output)
    fit(kind, output, resume=True, **options)
    print(f"{seen()} events", flush=True)
    os._exit(0)  # before a timer strikes


if __name__ == "__main__":
    main(*sys.argv[1:])
