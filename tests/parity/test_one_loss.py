"""One transformer, dense and with experts, has one loss under every plan of the benchmark.

The benchmark trains 200 steps in float32 and in float64; here are fewer, in float64, under all of
its plans. A loss is a mean of some 500 terms, each behind four layers of sums of at most 128
products: other orders of these sums change it by a few roundings of 1.1e-16, and the parameters
that twenty updates lead to hardly more. 1e-12 leaves room for thousands of roundings, and none for
a gradient of which 1e-9 is missing.
"""

import json

import numpy as np
import pytest
from benchmarks.one_loss import PAGE, STORED, tables
from benchmarks.one_loss_plans import NETWORKS, Way, train, train_in_processes, ways

STEPS = 20
TOLERANCE = 1e-12

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(scope="module")
def alone():
    """The losses of one device, by network, each trained once."""
    found = {}

    def losses(network):
        if network not in found:
            found[network] = np.asarray(train(network, Way("one device", {}), STEPS))
        return found[network]

    return losses


PAIRS = [(network, way) for network in NETWORKS for way in ways(network).values()]
HERE = [pair for pair in PAIRS if pair[1].processes == 1 and pair[1].name != "one device"]
TOGETHER = [(network, way.name) for network, way in PAIRS if way.processes > 1]


def apart(losses, expected):
    return np.abs(np.asarray(losses) / expected - 1).max()


@pytest.mark.parametrize(("network", "way"), HERE, ids=lambda one: getattr(one, "name", one))
def test_the_losses_are_those_of_one_device(network, way, alone):
    assert apart(train(network, way, STEPS), alone(network)) < TOLERANCE


def test_the_losses_of_two_processes_are_those_of_one_device(alone):
    found = train_in_processes(TOGETHER, STEPS, float64=True)
    for network, name in TOGETHER:
        assert apart(found[network][name], alone(network)) < TOLERANCE, (network, name)


def test_what_changes_numbers_is_seen(alone):
    """Gradients that travel in bfloat16 are not those of one device."""
    rounded = Way("data", {"data": 2, "reduce_dtype": "bfloat16"})
    assert 1e-6 < apart(train("dense", rounded, STEPS), alone("dense")) < 1e-2


def test_the_losses_fall(alone):
    """A loss that stays where it is would be the same under any plan."""
    for network in NETWORKS:
        first, *_, last = alone(network)
        assert last < first - 0.5


def test_the_page_has_what_is_stored():
    """All plans were trained, and the page has how far their losses are apart."""
    stored = json.loads(STORED.read_text())
    for network in NETWORKS:
        assert set(stored["differences"][network]) == set(ways(network))
    assert tables(stored) in PAGE.read_text(encoding="utf-8")
