"""Networks of many kinds with parameter servers, against a training step written by hand.

In `sync` two workers have a part of each batch. Of a network whose loss couples the examples of a
batch one worker has it whole, in `async`: with nobody beside it its gradients are never stale.
"""

import jax
import pytest

import plurax as px
from tests import models
from tests.zoo import by_hand
from tests.zoo.test_zoo import MODELS, SIZES, task, wanted

DEFAULT = ("autoregressive", "batch norm", "contrastive")
JOINT = px.Servers(workers=2, shards=2, transport="threads")
ALONE = px.Servers(workers=1, shards=2, mode="async", transport="threads")


@pytest.mark.ci
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in DEFAULT)) for n in MODELS]
)
def test_servers_take_the_step_written_by_hand(name):
    model = MODELS[name]
    result = px.fit(
        task(model),
        by_hand.optimizer(),
        model.batches(SIZES),
        servers=ALONE if model.coupled else JOINT,
        progress=False,
    )
    state, rows = wanted(name, 0, 1)
    found = jax.device_get(result.state)
    parts = (found.params, found.opt_state, found.model_state)
    assert models.max_rel_error(parts, state) < 1e-10
    total = sum(float(row["weight"]) for row in rows)
    loss = sum(float(row["loss"]) * float(row["weight"]) for row in rows) / total
    assert result.history[-1]["loss"] == pytest.approx(loss, rel=1e-10)
