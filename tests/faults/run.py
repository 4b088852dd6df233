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
import resource
import signal
import subprocess
import sys
import tempfile
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
from tests.faults.notes import NoteNames, children, note, workers

EVERY, STEPS = 10, 40
"""Steps between checkpoints, and of the run, in two epochs."""

MOST = 5
"""Checkpoints that a drawn attempt lives for, at most."""

EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "shutil.rmtree")


def fill_memory():
    """Ask for more memory than this process may have."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
    np.zeros(2**30).sum()


def read_a_short_file():
    """Read rows of a file that ends within them."""
    with tempfile.TemporaryFile() as file:
        file.write(bytes(30))
        file.seek(0)
        np.fromfile(file, np.float32).reshape(8, models.FEATURES)


LINK = "plurax"
"""The link of a network namespace to another."""


def cut():
    """Cut the link of this network namespace."""
    subprocess.run(["ip", "link", "set", LINK, "down"], check=True)
    print("the link is down", flush=True)


def drop():
    """Drop all that this network namespace sends: no packet fits into the bucket of one byte."""
    bucket = ("tbf", "rate", "1kbit", "burst", "1", "limit", "1")
    subprocess.run(["tc", "qdisc", "replace", "dev", LINK, "root", *bucket], check=True)


KINDS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "launcher": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "preempt": lambda: os.kill(os.getppid(), signal.SIGTERM),
    "memory": fill_memory,
    "short file": read_a_short_file,
    "worker": lambda: os.kill(workers()[0], signal.SIGKILL),
    "cut": cut,
    "drop": drop,
}


def loaded(count, output):
    """The same batches from worker processes of Grain."""
    from absl import flags
    from grain import MapDataset, MultiprocessingOptions

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["run"])
    note_names = NoteNames(output)
    note_names()
    batches = MapDataset.source(Rows(count)).to_iter_dataset()
    two = MultiprocessingOptions(num_workers=2, per_worker_buffer_size=1)
    return batches.mp_prefetch(two, worker_init_fn=note_names)


class Rows:
    """Batches by their number."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return models.data(8, seed=int(number))


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
    first, seen = None, 0
    step = Program.step_placed

    @functools.wraps(step)
    def struck(program, state, placed):
        nonlocal first
        first = state.steps_taken if first is None else first
        note(output, *children())
        if state.steps_taken + 1 == fault.get("step", first + fault.get("steps", -1)):
            Program.step_placed = step  # whoever outlives this is not struck again
            if seconds := fault.get("seconds"):
                threading.Timer(seconds, act).start()
            else:
                act()
        return step(program, state, placed)

    def hook(event, arguments):
        nonlocal seen
        if first is not None and event in EVENTS and str(arguments[0]).startswith(output):
            seen += 1
            if seen == fault["event"]:
                act()

    Program.step_placed = struck
    if "event" in fault:
        sys.addaudithook(hook)


def main(output, given):
    attempt, process = (int(os.environ[f"PLURAX_{name}"]) for name in ("ATTEMPT", "PROCESS"))
    note(output, *children(os.getppid()))  # with what ends others when the launcher is killed
    warnings.simplefilter("error", px.errors.DamagedCheckpointWarning)
    faults, options = json.loads(given), {}
    if isinstance(faults, dict):
        options = {name: faults[name] for name in ("steps", "every")}
        left = attempt < faults["rounds"]
        faults = {attempt: drawn(faults["draw"], attempt, faults["every"])} if left else {}
    else:
        faults = dict(enumerate(faults))
    if os.environ.get("LOADER"):
        options["data"] = loaded(STEPS // 2, output)
    fault = faults.get(attempt)
    if fault and process in fault["who"]:
        strike(fault, output)
    result = fit(output, **options)
    if result.interrupted:
        raise SystemExit(ExitCode.PREEMPTED)
    fit(f"{output}.undisturbed", **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
