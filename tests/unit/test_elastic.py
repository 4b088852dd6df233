"""A plan for the devices that are left: the same update on fewer."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import models
from tests.draws import draws

import plurax as px
from plurax.train.elastic import plan_for_those_left, shrink


@pytest.mark.parametrize(
    ("plan", "devices", "processes", "wanted"),
    [
        (px.Plan(data=8), 8, 2, px.Plan(data=8)),
        (px.Plan(data=8), 4, 1, px.Plan(data=4, microbatches=2)),
        (px.Plan(data=8, microbatches=3), 6, 3, px.Plan(data=6, microbatches=4)),
        (px.Plan(data=4, microbatches=(3, 3, 1, 1)), 3, 1, px.Plan(data=3, microbatches=3)),
        (px.Plan(data=4, zero=3), 6, 3, px.Plan(data=3, zero=3, microbatches=2)),
        (px.Plan(data=4, tensor=2), 4, 2, px.Plan(data=2, tensor=2, microbatches=2)),
        (px.Plan(member=8), 6, 3, px.Plan(member=6)),
        (px.Plan(member=4, data=2), 4, 2, px.Plan(member=2, data=2)),
        (px.Plan(tensor=8), 4, 2, px.Plan(tensor=8)),
    ],
)
def test_the_nearest_plan(plan, devices, processes, wanted):
    assert shrink(plan, devices, processes) == wanted


@draws(200)
@given(*(st.integers(1, 8) for _ in range(4)), st.integers(1, 4))
def test_it_fits_and_no_device_gets_more(data, microbatches, tensor, own, processes):
    plan = px.Plan(data=data, microbatches=microbatches, tensor=tensor)
    found = shrink(plan, own * processes, processes)
    if found.devices > own * processes or found.devices % processes:
        assert found == plan, "nothing fits: refused by its mesh"
        return
    assert found.data <= data
    assert found.data * found.microbatches >= data * microbatches
    assert found.tensor == tensor


def test_only_a_launcher_that_says_so_shrinks_a_plan(monkeypatch):
    plan = px.Plan(data=16)
    assert plan_for_those_left(plan, models.mlp_task()) == plan
    monkeypatch.setenv("PLURAX_ELASTIC", "1")
    assert plan_for_those_left(plan, models.mlp_task()) == px.Plan(data=8, microbatches=2)
    coupled = models.normed_task()
    assert plan_for_those_left(plan, coupled) == px.Plan(data=8)


@pytest.mark.ci
def test_the_update_is_the_same(monkeypatch, x64):
    """Of a run that began on eight devices and goes on with those that are there."""
    monkeypatch.setenv("PLURAX_ELASTIC", "1")
    arguments = (models.mlp_task(dtype=np.float64), models.optimizer())
    rows = models.data(50, dtype=np.float64)
    runs = [
        px.fit(*arguments, rows, plan=plan, batch_size=16, epochs=2, progress=False)
        for plan in (px.Plan(data=16), px.Plan())
    ]
    assert runs[0].program.plan == px.Plan(data=8, microbatches=2)
    both = [jax.device_get(run.state.params) for run in runs]
    assert models.max_rel_error(*both) < 1e-10
