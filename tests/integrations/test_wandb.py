"""Weights & Biases, offline: what its client wrote is read back from its file."""

import json
import struct

import optax
import wandb

import plurax as px
from tests import models


def records(data):
    """The records of a file in LevelDB's log format: blocks of 32 KiB, records in parts."""
    at, parts = 7, b""  # after the header of the file
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def written(folder, kind):
    """All records of a kind in a folder, by the files that the client syncs."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.rglob("*.wandb")):
        for data in records(path.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == kind:
                yield getattr(record, kind)


def values(items):
    return {one.key or one.nested_key[0]: json.loads(one.value_json) for one in items}


def rows(folder):
    """The history of all runs in a folder."""
    return [values(one.item) for one in written(folder, "history")]


def test_a_resumed_run_goes_on_in_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    data = models.data(24)

    def fit(**options):
        logger = px.callbacks.Wandb("mine", dir=str(tmp_path))
        result = px.fit(
            models.mlp_task(), optax.adam(1e-2), data, batch_size=8, epochs=4, callbacks=[logger],
            output=tmp_path / "run", resume=True, progress=False, **options,
        )  # fmt: skip
        return logger.get_state()["id"], result

    first, _ = fit(max_steps=6)
    again, result = fit()
    assert again == first, "the id of the run is kept in the checkpoint"
    assert {path.stem for path in tmp_path.rglob("*.wandb")} == {f"run-{first}"}
    epochs = {row["_step"]: row["epoch/loss"] for row in rows(tmp_path) if "epoch/loss" in row}
    assert epochs == {row["step"]: row["loss"] for row in result.history}


class Pictures:
    """What a user logs besides, with the step of the rows."""

    def on_evaluation(self, run, row):
        wandb.run.log({"seen": run.epoch}, step=run.step)


def test_what_a_user_logs_and_configures_stands_beside_the_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    data = models.data(24)
    logger = px.callbacks.Wandb("mine", dir=str(tmp_path), every=1, config={"width": 7})
    result = px.fit(
        models.mlp_task(), optax.adam(1e-2), data, batch_size=8, epochs=3, seed=5,
        evaluation=data, callbacks=[Pictures(), logger], progress=False,
    )  # fmt: skip
    found = rows(tmp_path)
    seen = {row["_step"]: row["seen"] for row in found if "seen" in row}
    assert [*seen] == [row["step"] for row in result.history]
    assert {row["_step"] for row in found if "epoch/eval_loss" in row} == {*seen}
    assert {row["_step"] for row in found if "step/loss" in row} == {*range(1, 10)}
    config = next(values(one.config.update) for one in written(tmp_path, "run"))
    assert (config["width"], config["seed"]) == (7, 5)
