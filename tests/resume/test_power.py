"""A power cut takes what the kernel has not written yet; what was acknowledged is on the disk."""

import shutil

import pytest
from tests import disks, models

import plurax as px
from plurax.checkpoint import Checkpoints
from plurax.loop.log_rows import read_rows

pytestmark = pytest.mark.ci

ROWS = models.data(50)
PER_EPOCH = 4
SERVERS = px.Servers(workers=2, transport="threads", compression="int8")


def fit(output, **options):
    options = {"epochs": 2, "progress": False, "plan": px.Plan(data=2), **options}
    return px.fit(models.mlp_task(), models.optimizer(), ROWS, batch_size=16, output=output,
                  **options)  # fmt: skip


def callbacks(output):
    return [px.callbacks.KeepBest("loss"), px.callbacks.Csv(output / "logs" / "epochs.csv"),
            px.callbacks.JsonLines(output / "logs" / "rows.jsonl"),
            px.callbacks.TensorBoard(output / "board")]  # fmt: skip


RUNS = {
    "network": lambda output: fit(output),
    "callbacks": lambda output: fit(output, callbacks=callbacks(output)),
    "resumed": lambda output: (fit(output, epochs=1), fit(output, resume=True)),
    "restarted": lambda output: (fit(output, epochs=1), fit(output, restart=True)),
    "machine": lambda output: fit(output, machine=px.Machine.preset("8xH100-80GB")),
    "members": lambda output: fit(
        output, members=px.Members(2), plan=px.Plan(member=2), callbacks=callbacks(output)
    ),
    "servers": lambda output: fit(output, servers=SERVERS, plan=px.Plan()),
}


@pytest.mark.parametrize("run", RUNS)
def test_all_that_a_run_has_written_is_synced(tmp_path, monkeypatch, run):
    """Files and folders, before a checkpoint gets its name, and the folder that has the name."""
    syncs = disks.Syncs(monkeypatch)
    output = tmp_path / "runs" / "a"
    RUNS[run](output)
    assert not syncs.missing(tmp_path / "runs")
    named = {
        new: missing for new, missing in syncs.renamed.items() if new.rpartition("/")[2].isdigit()
    }
    assert {str(output / "checkpoints" / step) for step in ("4", "8")} <= named.keys()
    own = ("commit_success.txt", "_CHECKPOINT_METADATA", ".orbax-checkpoint-tmp")
    for missing in named.values():
        # Of its own files Orbax writes two after that; nobody reads them.
        assert not [path for path in missing if not path.endswith(own)]


def test_a_power_cut_loses_nothing_that_was_acknowledged(tmp_path):
    image = tmp_path / "disk"
    with disks.ext4(image, tmp_path / "before") as disk:
        fit(disk / "runs" / "a", callbacks=callbacks(disk / "runs" / "a"))
        left = shutil.copyfile(image, tmp_path / "left")
    with disks.ext4(left, tmp_path / "after") as disk:
        output = disk / "runs" / "a"
        checkpoints = Checkpoints(output / "checkpoints")
        assert checkpoints.steps() == [PER_EPOCH, 2 * PER_EPOCH]
        rows = [row["step"] for row in read_rows(output / "metrics.jsonl") if row["kind"] == "step"]
        assert rows == list(range(1, 2 * PER_EPOCH + 1))
        assert len((output / "logs" / "epochs.csv").read_text().splitlines()) == 3
        resumed = fit(output, epochs=3, resume=True, callbacks=callbacks(output))
        assert int(resumed.state.step) == 3 * PER_EPOCH
        assert not checkpoints.damaged()
    assert models.same_bits(resumed.state.params, fit(None, epochs=3).state.params)
