"""Shares of products: which are tried for the fastest plan that recomputes, which are ranked."""

import types

import jax
import jax.numpy as jnp
import optax
import pytest

import plurax as px
from plurax.planner.partly_kept import partly_kept


def ranked(remat, seconds, memory=10):
    estimated = types.SimpleNamespace(peak=memory - 1, margin=1)
    return types.SimpleNamespace(
        plan=px.Plan(remat=remat), seconds=seconds, estimate=estimated, memory=memory - 1
    )


@pytest.mark.parametrize(
    ("plans", "tried", "kept"),
    [
        pytest.param(
            {"full": 10},
            {(0.5, 1): (9, 50), (0.5, 0.5): (8, 80), (0.5, 0.25): (7, 140), (0.75, 0.5): (7, 99)},
            (0.75, 0.5),
            id="fewer microbatches, more products",
        ),
        pytest.param(
            {"full": 10},
            {(0.5, 1): (9, 50), (0.5, 0.5): (9.1, 80), (0.75, 1): (9, 60)},
            (0.5, 1),
            id="neither is faster",
        ),
        pytest.param(
            {"dots": 10},
            {(0.5, 1): (9, 50), (0.5, 0.5): None, (0.75, 1): (8, 101)},
            (0.5, 1),
            id="one microbatch, and more does not fit",
        ),
        # 90 bytes of 180 are free: of half of the products 0.95 of the half.
        pytest.param(
            {"full": 10},
            {(0.5, 1): (8, 190), (0.23, 1): (9, 95), (0.5, 2): (8.5, 105), (0.5, 4): (8.9, 70)},
            (0.5, 4),
            id="half fits with more microbatches",
        ),
        pytest.param(
            {"full": 10},
            {(0.5, 1): (8, 190), (0.23, 1): (9, 95), (0.5, 2): None},
            (0.23, 1),
            id="or does not",
        ),
        pytest.param({"full": 10}, {(0.5, 1): (8, 1e5), (0.5, 2): None}, None, id="hardly any"),
        pytest.param({"dots": 10}, {(0.5, 1): (11, 50), (0.25, 1): (9, 40)}, (0.25, 1), id="less"),
        pytest.param({"dots": 10}, {(0.5, 1): (11, 50), (0.25, 1): (12, 40)}, None, id="slower"),
        pytest.param(
            {"none": 9.9, "dots": 10},
            {(0.5, 1): (9, 50), (0.5, 0.5): None, (0.75, 1): None},
            (0.5, 1),
            id="behind one that recomputes nothing",
        ),
        pytest.param({"none": 8, "full": 10}, {}, None, id="too slow"),
        pytest.param({"none": 8}, {}, None, id="nothing recomputes"),
    ],
)
def test_which_shares_are_tried(plans, tried, kept):
    asked = []

    def estimated(plan, share, microbatches):
        assert plan.plan.remat in ("dots", "full")
        asked.append((share, microbatches))
        figures = tried[share, microbatches]
        if figures is None:
            return None
        found = ranked(share, *figures)
        found.asked = share, microbatches
        return found

    every = [ranked(remat, takes) for remat, takes in plans.items()]
    found = partly_kept(every, 1.15 * every[0].seconds, 100, estimated)
    assert asked == [*tried]
    assert (found and found.asked) == kept


def test_the_other_policy_is_tried_where_the_first_gains_nothing():
    asked = []

    def estimated(plan, share, microbatches):
        asked.append((plan.plan.remat, share, microbatches))
        return ranked(share, {"dots": 11, "full": 9}[plan.plan.remat], 50)

    every = [ranked("dots", 10), ranked("full", 10.5), ranked("full", 10.6)]
    kept = partly_kept(every, 11.5, 100, estimated)
    assert kept.seconds == 9
    assert [policy for policy, *_ in asked] == ["dots", "dots", "full", "full", "full"]
    # Not if it does, nor a plan that is far behind.
    assert partly_kept(every[1:] + every[:1], 11.5, 100, estimated).seconds == 9
    assert [policy for policy, *_ in asked[5:]] == ["full", "full", "full"]
    assert partly_kept(every, 10.2, 100, estimated) is None
    assert [policy for policy, *_ in asked[8:]] == ["dots", "dots"]


def attention(depth=2, width=1024, tokens=512):
    """Layers of attention, in which scores are as many bytes as a dozen other products."""

    def init(key):
        keys = jax.random.split(key, 6)
        sizes = dict.fromkeys(("q", "k", "v", "out"), (width, width))
        sizes |= {"up": (width, 4 * width), "down": (4 * width, width)}
        return {
            name: jax.random.normal(key, (depth, *size)) / width**0.5
            for key, (name, size) in zip(keys, sizes.items(), strict=True)
        }

    def layer(x, p):
        q, k, v = ((x @ p[name]).reshape(*x.shape[:2], 4, -1) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + mixed @ p["out"]
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    def loss(params, batch, keys):
        return jnp.mean(jax.lax.scan(layer, batch["x"], params)[0] ** 2, (1, 2))

    batch = {"x": jax.ShapeDtypeStruct((64, tokens, width), jnp.float32)}
    return px.Task(init=init, loss=loss), batch


@pytest.mark.ci
def test_a_search_finds_a_share_that_is_faster_than_each_policy():
    task, batch = attention()
    machine = px.Machine.preset("8xTPU-v5e")
    pinned = {"precision": "bfloat16", "tensor": 8, "microbatches": 1}
    found = px.search(task, optax.sgd(0.1), batch, machine, pinned=pinned)
    best, *others = found.ranked
    assert isinstance(best.plan.remat, float)
    assert {"dots", "full"} & {one.plan.remat for one in others}
    estimated = px.estimate(task, optax.sgd(0.1), found.best, batch, machine)
    assert (estimated.seconds, estimated.peak) == (best.seconds, best.memory)
    assert px.Plan.from_toml(found.best.to_toml()) == found.best
