"""What a gang bears while it runs: `python -m tests.faults.cases FOLDER CASE ...`.

Each case is a run of `tests.faults.run.fit` in all processes. Each process writes what it finds to
`FOLDER/found.INDEX.json`.
"""

import contextlib
import functools
import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

import plurax as px

# In a test's process, this module is imported for its tables alone.
if __name__ == "__main__":
    px.initialize()

import numpy as np

from plurax.checkpoint.manager import state_fingerprints
from plurax.distributed.global_arrays import fetch
from plurax.errors import SaveFailedWarning
from plurax.execute.program import Program
from plurax.guards.saving import Saving
from plurax.loop.log_rows import read_rows
from tests import disks, models
from tests.faults.run import EVERY, STEPS, Batches, fit

PROCESS = int(os.environ.get("PLURAX_PROCESS", "0"))
AT = 15
"""The step at which a fault strikes; the checkpoint before it is that of step 10."""


def prints(output, step=STEPS):
    """The fingerprints of a checkpoint of a run."""
    return px.Checkpoints(output / "checkpoints").fingerprints(step)


@contextlib.contextmanager
def replaced(owner, name, changed):
    """A method that is another one for a while: `changed(the one before)`."""
    before = getattr(owner, name)
    setattr(owner, name, changed(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


# --- SIGTERM ----------------------------------------------------------------------------------


def training():
    """Whether training is under way, and signals are heard."""
    return signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, returns)


def returns(*_):
    """A handler of the caller's own, with which `fit` returns once it has saved."""


class Once:
    """Signals this process, if it is the one, the first time that training is under way."""

    def __init__(self, process):
        self.left = process == PROCESS

    def __call__(self):
        struck = self.left and training()
        if struck:
            self.left = False
            os.kill(os.getpid(), signal.SIGTERM)
        return struck


class Waiting(Batches):
    """Batches of which the next is not there yet, once the signal came."""

    def __init__(self, count, once):
        super().__init__(count)
        self.once = once

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number == AT and self.once():
                threading.Event().wait()
            yield batch


class Evaluation:
    """Data to evaluate on, during which the signal comes, the first or the second time."""

    def __init__(self, once, after=0):
        self.once, self.left = once, after

    def __iter__(self):
        for number in range(3):
            if number == 1 and training():
                self.left -= 1
            if self.left < 0:
                self.once()
            yield models.data(8, seed=100 + number)


def signalled(moment, once, output):
    """A run during which a process gets SIGTERM."""

    def at_step(step):
        def stepped(program, state, placed):
            if state.steps_taken + 1 == AT:
                once()
            return step(program, state, placed)

        return stepped

    def at_save(save):
        def saving(self, snapshot):
            if snapshot.step == EVERY:
                once()
            return save(self, snapshot)

        return saving

    def traced(params, batch, key):
        once()
        return models.example_loss(params, batch, key)

    how = {
        "step": (Program, "step_placed", at_step),
        "save": (Saving, "save", at_save),
    }
    with replaced(*how[moment]) if moment in how else contextlib.nullcontext():
        options = {}
        if moment == "compile":
            options["loss"] = traced
        if moment == "wait":
            options["data"] = Waiting(STEPS // 2, once)
        if "evaluation" in moment:
            options["evaluation"] = Evaluation(once, after=moment == "the last evaluation")
        return fit(output, **options)


MOMENTS = {
    "step": 1, "compile": 0, "an evaluation": 1, "the last evaluation": 1, "wait": 1, "save": 0,
}  # fmt: skip
"""When a process gets SIGTERM, and which one."""


QUICK = ["step", "wait"]
"""Those of a default run."""


def sigterm(folder):
    """Of each moment: what `fit` returned, and the checkpoint that the resumed run ends with."""
    return {moment: gone_on(folder, moment) for moment in QUICK}


def more_sigterm(folder):
    """The same of the other moments."""
    return {moment: gone_on(folder, moment) for moment in MOMENTS if moment not in QUICK}


def gone_on(folder, moment):
    """A run that a signal stops, and that goes on then."""
    output = folder / moment
    before = signal.signal(signal.SIGTERM, returns)
    result = signalled(moment, Once(MOMENTS[moment]), output)
    signal.signal(signal.SIGTERM, before)
    saved = max(px.Checkpoints(output / "checkpoints").steps(), default=0)
    evaluated = "evaluation" in moment
    again = fit(output, evaluation=Evaluation(lambda: None) if evaluated else None)
    return {
        "interrupted": result.interrupted,
        "steps": result.state.steps_taken,
        "saved": saved,
        "then": again.interrupted,
        "prints": prints(output),
        "undisturbed": undisturbed(folder),
    }


def twice(folder):
    """A second SIGTERM to process 1."""

    def at_step(step):
        def stepped(program, state, placed):
            if PROCESS == 1 and state.steps_taken + 1 == AT:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
            return step(program, state, placed)

        return stepped

    with replaced(Program, "step_placed", at_step):
        fit(folder / "twice")


@functools.cache
def undisturbed(folder):
    """The last checkpoint of a run that nothing happens to."""
    fit(folder / "undisturbed")
    return prints(folder / "undisturbed")


# --- Bad numbers, disks, folders --------------------------------------------------------------


BAD = {5: np.nan, 8: np.inf}
"""The batches of an epoch of which process 1 has a row that is not finite."""


class Poisoned(Batches):
    """Each process's own rows."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            own = {key: rows[4 * PROCESS : 4 * PROCESS + 4] for key, rows in batch.items()}
            if PROCESS == 1 and number in BAD:
                own["x"][2, 3] = BAD[number]
            yield own


def not_finite(folder):
    """What each bad step leaves as it was, and the end."""
    kept = []

    def at_step(step):
        def stepped(program, state, placed):
            bad = state.steps_taken % 10 in BAD
            before = values(program, state)
            state, metrics = step(program, state, placed)
            if bad or state.steps_taken == 1:
                kept.append(before == values(program, state))
            return state, metrics

        return stepped

    with replaced(Program, "step_placed", at_step), warnings.catch_warnings():
        warnings.simplefilter("ignore", px.errors.NonFiniteWarning)
        result = fit(folder / "not finite", data=Poisoned(10), local_batches=True)
    return {
        "kept": kept,
        "skipped": int(fetch(result.state.skipped)),
        "prints": prints(folder / "not finite", 20),
    }


def values(program, state):
    """The fingerprints of parameters and optimizer state."""
    found = state_fingerprints(program.to_canonical(state))
    return {name: one for name, one in found.items() if name.split("/")[0] in PARTS}


PARTS = ("params", "opt_state")


def full_disk(folder):
    """What a disk that is full from the save of step 10 to that of step 30 does to a run."""
    output = folder / "disk" / "run"
    freed = []

    def filling(save):
        def saving(self, snapshot):
            if snapshot.step == EVERY:
                self.wait(snapshot.step)
                freed.append(disks.fill(folder / "disk") if PROCESS == 0 else None)
            if PROCESS == 0 and snapshot.step == 3 * EVERY:
                freed.pop()()
            return save(self, snapshot)

        return saving

    with replaced(Saving, "save", filling), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", SaveFailedWarning)
        result = fit(output)
    said = [str(one.message) for one in warned if one.category is SaveFailedWarning]
    rows = read_rows(output / "metrics.jsonl")
    return {
        "said": said,
        "steps": result.state.steps_taken,
        "events": [row["event"] for row in rows if row["kind"] == "event"],
        "undisturbed": undisturbed(folder),
        "prints": prints(output),
    }


def refused(output):
    """What `fit` says."""
    try:
        fit(output)
    except px.errors.PluraxError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def own_folders(folder):
    """Each process is given another folder: a new one, and one that has held a run."""
    new = refused(folder / f"own{PROCESS}")
    (folder / f"old{PROCESS}").mkdir()
    (folder / f"old{PROCESS}" / "checkpoints").mkdir()
    (folder / f"old{PROCESS}" / "checkpoints" / "writer.lock").touch()
    return {"new": new, "old": refused(folder / f"old{PROCESS}")}


def folder_in_use(folder):
    """Another process writes to the folder."""
    return refused(folder / "in use")


CASES = {
    case.__name__: case
    for case in (sigterm, more_sigterm, twice, not_finite, full_disk, own_folders, folder_in_use)
}


def main(folder, *cases):
    warnings.simplefilter("error", px.errors.DamagedCheckpointWarning)
    folder = Path(folder)
    found = {case: CASES[case](folder) for case in cases}
    (folder / f"found.{PROCESS}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
