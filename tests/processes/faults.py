"""Runs with faults, in one process or several: `python -m tests.processes.faults FOLDER`.

"rolled back" meets bad batches; "disk" saves to FOLDER/disk, where there is such a folder, which is
full for two epochs.
"""

import contextlib
import json
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

import plurax as px
from plurax.guards.saving import Saving
from plurax.loop.log_rows import read_rows
from tests import disks, models
from tests.resume import runs

PLAN = px.Plan(data=4)


def outcome(result, output):
    params = [leaf.addressable_data(0) for leaf in jax.tree.leaves(result.state.params)]
    return {
        "steps": int(result.state.step),
        "history": [row["loss"] for row in result.history],
        "checkpoints": px.Checkpoints(output / "checkpoints").steps(),
        "params": [np.asarray(leaf).tolist() for leaf in params],
    }


def fit(data, output, **options):
    return px.fit(models.mlp_task(), models.optimizer(), data, plan=PLAN, batch_size=16,
                  progress=False, output=output, **options)  # fmt: skip


def rolled_back(output):
    rule = px.train.Rollback(after=3, limit=9)
    return outcome(
        fit(runs.poisoned(), output, epochs=3, checkpoint_every=3, rollback=rule), output
    )


def full_disk(output, *, primary):
    """Process 0 fills the disk before the save of the second epoch; frees it before the last."""
    real, freed = Saving.save, contextlib.ExitStack()

    def save(self, snapshot):
        if snapshot.step == 8:
            assert not self._checkpoints.busy(60)  # the save of the first epoch
        if primary and snapshot.step == 8:
            freed.callback(disks.fill(output.parent))
        if snapshot.last:
            freed.close()
        real(self, snapshot)

    Saving.save = save
    try:
        found = outcome(fit(runs.batches(), output, epochs=4), output)
    finally:
        Saving.save = real
    multihost_utils.sync_global_devices("process 0 has written its log")
    rows = read_rows(output / "metrics.jsonl")
    return {**found, "events": [row["event"] for row in rows if row["kind"] == "event"]}


def main(folder):
    warnings.simplefilter("ignore")
    px.initialize()
    folder, index = Path(folder), jax.process_index()
    found = {"rolled back": rolled_back(folder / "rolled back")}
    if (folder / "disk").exists():
        found["disk"] = full_disk(folder / "disk" / "run", primary=index == 0)
    (folder / f"found.{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
