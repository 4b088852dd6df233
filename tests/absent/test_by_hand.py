"""A step holds, sends and waits no more than the same step in plain JAX, compiled beside it."""

import jax
import pytest
from benchmarks import absent

from plurax.targets import Target

jax.config.update("jax_platforms", "cpu")

pytestmark = pytest.mark.ci

MODEL = absent.Transformer(width=512, depth=4)


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        ("8xH100", "data"),
        pytest.param("8xH100", "data, one microbatch", marks=pytest.mark.slow),
        pytest.param("v5e:2x4", "zero3", marks=pytest.mark.slow),
    ],
)
def test_no_worse_than_by_hand(machine, name):
    name = f"{name}, sums in bfloat16"
    sides = absent.measure(Target.of(machine), name, MODEL, ["plurax", "plain JAX"])
    own, by_hand = sides["plurax"], sides["plain JAX"]
    # A few numbers more, such as the count of the examples, are summed up.
    assert own["sent_mib"] <= by_hand["sent_mib"] + 64 / 2**20
    assert own["copied_mib"] < 0.01
    assert own["step_ms"] <= 1.02 * by_hand["step_ms"]
    assert own["temporaries_mib"] <= 1.02 * by_hand["temporaries_mib"]
