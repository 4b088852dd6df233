"""What compilers of TPUs and GPUs make of a population: all members at once, in place, each alone.

Run as `test_programs.py` is. What is read is the loop of an epoch, which has the step in it.
"""

import functools
import itertools

import jax
import optax
import pytest
from benchmarks.absent_members import Case, branches, copies

import plurax as px
from plurax.hlo.text import parse

jax.config.update("jax_platforms", "cpu")

pytestmark = pytest.mark.ci

MACHINES = {"v5e:2x4": 8, "H100": 1}
WIDTHS = (16, 40, 10)


@functools.cache
def epoch(machine):
    """A thousand small networks or, where there are several devices, as many on each."""
    devices = MACHINES[machine]
    case = Case(1000 * devices, WIDTHS)
    return px.analysis.compiled_for(
        px.Task(init=case.init, loss=case.loss), optax.adam(1e-3), px.Plan(member=devices),
        case.batch(case.rows), machine, members=px.Members(case.members), function="epoch",
        data=case.batch(8 * case.rows),
    )  # fmt: skip


@pytest.fixture(params=MACHINES)
def compiled(request):
    return epoch(request.param)


def on_a_device(widths):
    """Bytes of the parameters of a device's members, and of one of their metrics of an epoch."""
    numbers = sum(a * b + b for a, b in itertools.pairwise(widths))
    return 4 * 1000 * numbers, 4 * 1000 * px.execute.population.MAX_STEPS_PER_CALL


def test_all_members_run_at_once_as_the_task_is_written(compiled):
    plan = compiled.program.plan
    assert (plan.chunk, plan.batch_dim) == (1000, "major")


def test_members_send_nothing(compiled):
    assert compiled.collectives == []


def test_an_epoch_s_loop_has_no_branch(compiled):
    """Whether a step is skipped, or begins a block of rows, is no reason to stop the device."""
    module = parse(compiled.compiled.as_text())
    loops = [
        one
        for computation in module.computations.values()
        for one in computation
        if one.opcode == "while" and module.trips(one) is None
    ]
    assert loops != []
    assert branches(module) == 0


def test_the_state_stays_where_it_is(compiled):
    """What is not in the memory of the state are metrics."""
    params, metric = on_a_device(WIDTHS)
    held = compiled.memory
    assert held.aliased >= 3 * params
    assert held.outputs - held.aliased <= 7 * metric
    smallest = 4 * 1000 * WIDTHS[1] * WIDTHS[2]
    assert copies(parse(compiled.compiled.as_text()), smallest) == []
