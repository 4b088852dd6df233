"""The step that is recorded sends what the compiled one does, for every network and plan.

By kind and mesh axes, to the byte. The recorded step has the collectives in the program that is
given to the compiler, so what differs is what the compiler did with them.
"""

import warnings
from collections import Counter

import pytest

import plurax as px
from plurax.execute.recorder import record_step
from plurax.trace.collectives import every_collective
from tests.zoo import by_hand, plans
from tests.zoo.test_zoo import MODELS, SIZES, pairs, task

pytestmark = pytest.mark.ci

# Loops of unknown length: the recorded step counts what is in them once, the compiled one as often
# as the compiler finds that they run. The collectives are of the same kinds, over the same axes.
UNKNOWN = {"equilibrium", "implicit", "neural ode"}

# The compiler computes some equal operations once: in derivatives of derivatives, in a scan that is
# written out, in two branches.
MERGED = {"branch", "pinn", "state space"}


def bytes_by_kind(collectives):
    sizes = Counter()
    for one in collectives:
        sizes[one.equivalent_kind or one.kind, one.axes] += one.bytes * (one.trips or 1)
    return sizes


@pytest.mark.parametrize(
    ("name", "planned"),
    [case for case in pairs() if not case.values[1].startswith("members")],
)
def test_what_is_recorded_is_what_is_compiled(x64, name, planned):
    model, fields = MODELS[name], plans.PLANS[planned]
    plan = px.Plan(**fields, shardings=model.rules if fields.get("tensor", 1) > 1 else ())
    batch = model.batches(SIZES)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", px.errors.ShardingWarning)
        program = px.compile(task(model), by_hand.optimizer(), plan, batch)
        compiled, recorded = program.collectives(), program.planned_collectives()
        if not recorded:  # the batch alone is split, which is not planned
            recorded = every_collective(record_step(task(model), by_hand.optimizer(), plan, batch))
            assert {one.axes for one in recorded} <= {("data",)}
    found, wanted = bytes_by_kind(recorded), bytes_by_kind(compiled)
    if name in UNKNOWN:
        assert found.keys() == wanted.keys()
    elif name in MERGED:
        assert found.keys() == wanted.keys()
        assert wanted <= found
    else:
        assert found == wanted
