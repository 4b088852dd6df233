"""The layers of stages that are found are those of trying all."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.draws import draws

import plurax as px
from plurax.pipeline.schedule import make_schedule
from plurax.planner.stage_layers import best_layers

SECONDS = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 7.0])


@st.composite
def pipelines(draw):
    """Up to 7 layers on up to 4 stages."""
    depth = draw(st.integers(1, 7))
    of_layers = st.lists(SECONDS, min_size=depth, max_size=depth)
    pipeline = draw(st.integers(1, min(4, depth)))
    speeds = st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=pipeline, max_size=pipeline)
    return {
        "layer_seconds": draw(of_layers | SECONDS.map(lambda n: [n] * depth)),
        "pipeline": pipeline,
        "microbatches": draw(st.integers(1, 6)),
        "schedule": draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])),
        "end_seconds": draw(st.tuples(SECONDS, SECONDS)),
        "speeds": draw(st.none() | speeds),
    }


def compositions(depth, stages):
    for ends in itertools.combinations(range(1, depth), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise([0, *ends, depth]))


def costs(case, layers):
    """Seconds of a step, from the definition."""
    p, m = case["pipeline"], case["microbatches"]
    ends = itertools.pairwise(itertools.accumulate(layers, initial=0))
    seconds = [sum(case["layer_seconds"][i:j]) for i, j in ends]
    seconds[0] += case["end_seconds"][0]
    seconds[-1] += case["end_seconds"][1]
    seconds = [s / v for s, v in zip(seconds, case["speeds"] or [1.0] * p, strict=True)]
    fill = 1 / 3 if case["schedule"] == "zb-h1" else 1
    return fill * sum(seconds) + (m - fill) * max(seconds)


@given(pipelines())
@draws(300)
def test_no_other_layers_are_faster(case):
    every = {n: costs(case, n) for n in compositions(len(case["layer_seconds"]), case["pipeline"])}
    found = best_layers(**case)
    assert found.seconds == pytest.approx(every[found.layers], rel=1e-12)
    assert found.seconds == pytest.approx(min(every.values()), rel=1e-8)


def test_a_head_that_takes_long_has_fewer_layers():
    found = best_layers([1.0] * 8, 4, 16, end_seconds=(0, 2))
    assert (found.layers, found.stage_seconds, found.seconds) == ((2, 2, 3, 1), (2, 2, 3, 3), 55)
    assert best_layers([1.0] * 8, 4, 16).layers == (2, 2, 2, 2)
    assert best_layers([1.0] * 3, 4, 16) is None


def test_slower_devices_get_fewer_layers():
    """Two stages on devices a third as fast: A100 and V100, about."""
    machine = px.Machine.uneven(
        "lab",
        [(8, px.Machine.preset("A100-80GB")), (8, px.Machine.preset("V100-32GB"))],
        [px.analysis.Level("node", 4, 1e11), px.analysis.Level("cluster", 16, 6e9)],
    )
    seconds = [
        machine.rates_of(range(first, first + 4)).product_seconds(4096, 4096, 4096, "bfloat16")
        for first in range(0, 16, 4)
    ]
    found = best_layers([seconds[0]] * 24, 4, 32, speeds=[seconds[0] / one for one in seconds])
    assert sum(found.layers) == 24
    assert min(found.layers[:2]) >= 2 * max(found.layers[2:])
    assert best_layers([seconds[0]] * 24, 4, 32).seconds < found.seconds


@pytest.mark.parametrize(("microbatches", "layers"), [(1, (5, 1)), (3, (4, 2))])
def test_few_microbatches_spend_their_time_on_fast_devices(microbatches, layers):
    """4 s and 4 s, or 5 s and 2 s: one microbatch takes the sum, many take the slowest stage."""
    assert best_layers([1.0] * 6, 2, microbatches, speeds=[1, 0.5]).layers == layers


def test_several_stages_on_a_device():
    found = best_layers(
        [1.0] * 9, 2, 4, virtual_stages=2, schedule="interleaved", end_seconds=(0, 1)
    )
    assert sorted(found.layers) == [2, 2, 2, 3]
    assert found.layers[-1] == 2
    # With equal stages of 3 s: (v m + p - 1) t.
    found = best_layers([1.5] * 8, 2, 4, virtual_stages=2, schedule="interleaved")
    assert found.seconds == (2 * 4 + 1) * 3


@pytest.mark.parametrize("microbatches", [1, 5])
def test_the_seconds_are_those_of_the_simulated_schedule(microbatches):
    found = best_layers([1.0, 2.0, 3.0, 1.0, 1.0, 4.0], 3, microbatches, schedule="gpipe",
                        end_seconds=(0.5, 2.0), speeds=[1, 2, 1])  # fmt: skip
    schedule = make_schedule("gpipe", 3, microbatches)
    timeline = px.pipeline.simulate(schedule, forward=1 / 3, backward=1 / 3, weight=1 / 3,
                                    stage_lengths=found.stage_seconds)  # fmt: skip
    assert timeline.length == pytest.approx(found.seconds)
