"""Search ranks plans by estimates, keeps what is pinned, and says what cannot be."""

import jax
import optax
import pytest
from tests import models

import plurax as px
from plurax.machine import Level
from plurax.planner.steady import estimate_steady

# Products cost most: 1 Gflop/s, and links and memory of 1 TB/s.
SLOW = px.Machine("slow products", {"float32": 1e9}, 1e9, 1e12, [Level("node", 4, 1e12)])
# A message costs more than all else.
FAR = px.Machine("far apart", {"float32": 1e12}, 1e9, 1e12, [Level("node", 4, 1e12, 1.0)])


def searched(machine, **options):
    return px.search(models.mlp_task(), optax.adam(1e-2), models.data(64), machine, **options)


# One process, so that the search of `found` runs once.
pytestmark = pytest.mark.xdist_group("search")


@pytest.fixture(scope="module")
def found():
    return searched(SLOW, seconds=60.0, count=3)


def test_the_ranking_is_of_estimates(found):
    assert [one.seconds for one in found.ranked] == sorted(one.seconds for one in found.ranked)
    best = found.ranked[0]
    again = px.estimate(models.mlp_task(), optax.adam(1e-2), best.plan, models.data(64), SLOW)
    assert again.seconds == best.seconds
    assert again.peak == best.memory
    assert best.plan.devices == 4, "products cost most, so all devices share them"
    one = px.estimate(models.mlp_task(), optax.adam(1e-2), px.Plan(), models.data(64), SLOW)
    assert best.seconds < one.seconds / 3
    assert found.gap == 0


def test_the_best_plan_runs(found):
    task, batch = models.mlp_task(), models.data(64)
    program = px.compile(task, optax.adam(1e-2), found.best, batch)
    state, _ = program.step(program.init(seed=0), batch)
    alone = px.compile(task, optax.adam(1e-2), px.Plan(), batch)
    expected, _ = alone.step(alone.init(seed=0), batch)
    got = jax.device_get(program.to_canonical(state).params)
    assert models.max_rel_error(got, jax.device_get(expected.params)) < 1e-5


def test_one_device_where_messages_cost_most():
    found = searched(FAR, pinned={"tensor": 1}, count=1, seconds=60.0)
    assert found.best.devices == 1


def test_the_text_says_what_was_found(found):
    text = str(found)
    assert "the fastest of" in text
    assert "slow products" in text
    assert "products" in text.splitlines()[2]
    assert "plans that were not estimated are not faster" in text
    assert repr(found).startswith("Found(")
    assert "<table>" in found._repr_html_()


def test_what_is_pinned_holds():
    found = searched(SLOW, pinned=px.Plan(data=2, tensor=1, zero=1), count=1, seconds=60.0)
    assert (found.best.data, found.best.zero) == (2, 1)
    offloaded = searched(SLOW, pinned={"remat": "offload", "tensor": 1}, count=1, seconds=60.0)
    assert offloaded.best.remat == "offload"
    rules = {"out": ("tensor", None)}
    by_rule = searched(SLOW, pinned=px.Plan(tensor=2, shardings=rules), count=1, seconds=60.0)
    assert by_rule.best.tensor == 2
    assert dict(by_rule.best.rules)["out"] == ("tensor", None)


def test_why_a_parameter_is_split():
    found = searched(SLOW, pinned=px.Plan(tensor=4), count=1, seconds=60.0)
    text = found.explain("hidden")
    assert text.startswith("hidden (5, 16) is ")
    assert "%" in text.splitlines()[1]
    with pytest.raises(px.PlanError, match="no parameter of this step"):
        found.explain("hiden")


def test_a_plan_that_fits_is_needed():
    with pytest.raises(px.PlanError, match=r"no plan fits in 10 bytes per device"):
        searched(SLOW, pinned={"tensor": 1}, memory=10.0)
    with pytest.raises(px.PlanError, match="must multiply to a divisor of the devices"):
        searched(SLOW, pinned=px.Plan(data=3))
    little = searched(SLOW, pinned={"tensor": 1}, memory=6000.0, count=1, seconds=60.0)
    assert little.ranked[0].memory <= 6000 < max(one.memory for one in little.refused)


def test_many_microbatches_are_estimated_from_few():
    task, batch = models.transformer_stack(), models.text(24)
    plan = px.Plan(pipeline=2, microbatches=12)
    exact = px.estimate(task, optax.sgd(0.1), plan, batch, SLOW)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    steady = estimate_steady(task, optax.sgd(0.1), plan, like, SLOW)
    assert steady.seconds == pytest.approx(exact.seconds, rel=0.05)
    assert steady.peak == pytest.approx(exact.peak, rel=0.05)
