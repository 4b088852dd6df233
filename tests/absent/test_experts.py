"""What the compiler of H100 makes of mixtures of experts whose weights are split."""

import optax
import pytest

import plurax as px
from tests.hlo.test_planned_bytes import counted
from tests.parity import test_experts as mixtures

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("x64")]


@pytest.mark.parametrize("dispatch", mixtures.EVERY[:4], ids=mixtures.name_of)
def test_tokens_are_added_up_and_nothing_is_gathered(dispatch):
    task, batch = mixtures.task_of(dispatch), mixtures.batch_of()
    plan = px.Plan(tensor=4, shardings=mixtures.SPLIT)
    devices = px.topology("8xH100")[:4]
    program = px.compile(task, optax.sgd(0.1), plan, batch, devices=devices)
    sent = counted(program.collectives())
    assert {kind for kind, *_ in sent} == {"all-reduce"}
    assert sum(sent.values()) == sum(counted(program.planned_collectives()).values())
