"""A small run of several processes that strikes itself: `run.py OUTPUT FAULTS`.

`FAULTS` is JSON, a fault for each attempt of the gang and null where nothing happens:

    {"who": [1], "what": "kill", "step": 23}       before step 23
    {"who": [0, 1], "what": "kill", "event": 40}   before the 40th time that a file or folder below
                                                   OUTPUT is opened, made, renamed or removed after
                                                   the first step, which strikes inside a save
    {"who": [0], "what": "launcher", "step": 23}   the launcher is killed, not the process

At the end the same run follows in OUTPUT.undisturbed, to which nothing happens.

With both the earlier one counts. With "draw": SEED instead, each attempt but those from "rounds" on
draws who is killed and when.
"""

import dataclasses
import functools
import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

import plurax as px

if __name__ == "__main__":
    px.initialize()

import numpy as np
import optax

from plurax.execute.program import Program
from plurax.exit_codes import ExitCode
from tests import models

EVERY, STEPS = 10, 40
"""Steps between checkpoints, and of the run, in two epochs."""

MOST = 5
"""Checkpoints that a drawn attempt lives for, at most."""

EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "shutil.rmtree")

KINDS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "launcher": lambda: os.kill(os.getppid(), signal.SIGKILL),
}


class Batches:
    """The same batches whenever they are read."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        return (models.data(8, seed=number) for number in range(self.count))


def fit(output, steps=STEPS, every=EVERY, *, data=None, loss=models.example_loss, **options):
    """The run: a network on all devices of all processes, and checkpoints."""
    task = dataclasses.replace(models.mlp_task(), loss=px.per_example(loss))
    data = Batches(steps // 2) if data is None else data
    return px.fit(
        task, optax.adam(1e-2), data, plan=px.Plan(data=4), epochs=2, output=output, resume=True,
        checkpoint_every=every, progress=False, **options,
    )  # fmt: skip


def drawn(seed, attempt, every):
    """The fault of an attempt: who is killed, and inside a save or anywhere."""
    rng = np.random.default_rng([seed, attempt])
    fault = {
        "who": [[0], [1], [0, 1]][rng.integers(3)],
        "what": "kill",
        "steps": int(rng.integers(1, MOST * every)),
        "seconds": float(rng.choice([0.0, rng.uniform(0, 0.02)])),
    }
    return {**fault, "event": int(rng.integers(1, 400))} if rng.random() < 0.6 else fault


def strike(fault, output):
    """Let this process do what the fault says, when it says it."""
    act = KINDS[fault["what"]]
    began, seen = None, 0
    step = Program.step_placed

    @functools.wraps(step)
    def struck(program, state, placed):
        nonlocal began
        began = state.steps_taken if began is None else began
        if state.steps_taken + 1 == fault.get("step", began + fault.get("steps", -1)):
            if seconds := fault.get("seconds"):
                threading.Timer(seconds, act).start()
            else:
                act()
        return step(program, state, placed)

    def hook(event, arguments):
        nonlocal seen
        if began is not None and event in EVENTS and str(arguments[0]).startswith(output):
            seen += 1
            if seen == fault["event"]:
                act()

    Program.step_placed = struck
    if "event" in fault:
        sys.addaudithook(hook)


def main(output, given):
    attempt, process = (int(os.environ[f"PLURAX_{name}"]) for name in ("ATTEMPT", "PROCESS"))
    with Path(output).with_suffix(".pids").open("a") as file:
        file.write(f"{os.getpid()}\n")
    warnings.simplefilter("error", px.DamagedCheckpointWarning)
    faults, options = json.loads(given), {}
    if isinstance(faults, dict):
        options = {name: faults[name] for name in ("steps", "every")}
        left = attempt < faults["rounds"]
        faults = {attempt: drawn(faults["draw"], attempt, faults["every"])} if left else {}
    else:
        faults = dict(enumerate(faults))
    fault = faults.get(attempt)
    if fault and process in fault["who"]:
        strike(fault, output)
    result = fit(output, **options)
    if result.interrupted:
        raise SystemExit(ExitCode.PREEMPTED)
    fit(f"{output}.undisturbed", **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
