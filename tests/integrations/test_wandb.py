"""Weights & Biases, offline: what its client wrote is read back from its file."""

import json

import optax
import pytest

import plurax as px
from tests import models

wandb = pytest.importorskip("wandb")


def rows(folder):
    """The history of each run in a folder, by the file that the client syncs."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    found = {}
    for path in sorted(folder.rglob("*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
                found.setdefault(path.parent.name, []).append(row)
    return found


def test_a_resumed_run_goes_on_in_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    data = models.data(24)

    def fit(**options):
        logger = px.callbacks.Wandb("mine", dir=str(tmp_path))
        px.fit(
            models.mlp_task(), optax.adam(1e-2), data, batch_size=8, epochs=4, callbacks=[logger],
            output=tmp_path / "run", resume=True, progress=False, **options,
        )  # fmt: skip
        return logger.get_state()["id"]

    first = fit(max_steps=6)
    assert fit() == first, "the id of the run is kept in the checkpoint"
    found = rows(tmp_path / "wandb")
    assert all(first in name for name in found)
    epochs = [row["_step"] for one in found.values() for row in one if "epoch/loss" in row]
    assert sorted(epochs) == [3, 6, 9, 12]
