"""With servers in `sync`, and in `async` with one worker, training is that of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px

EXAMPLES, BATCH = 23, 8  # the last batch has 7 examples, whose parts are uneven too


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def optimizer():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


def fitted(task, data, servers=None, **options):
    return px.fit(
        task, optimizer(), data, epochs=2, batch_size=BATCH, progress=False, servers=servers,
        **options,
    )  # fmt: skip


def task_and_data():
    return models.mlp_task(weights=True, dtype=jnp.float64), models.data(
        EXAMPLES, weights=True, dtype=np.float64
    )


@pytest.fixture(scope="module")
def one_device():
    with jax.enable_x64(True):
        task, data = task_and_data()
        return task, data, fitted(task, data)


CASES = {
    f"{workers} workers, {shards} servers": px.Servers(
        workers=workers, shards=shards, transport="threads"
    )
    for workers in (1, 2, 3, 4)
    for shards in (1, 2, 3)
} | {
    "more servers than parameters": px.Servers(
        workers=1, shards=5, mode="async", transport="threads"
    ),
    "async, one worker": px.Servers(workers=1, shards=2, mode="async", transport="threads"),
    "bounded, one worker": px.Servers(
        workers=1, shards=3, mode="bounded", staleness=0, transport="threads"
    ),
}
QUICK = ("3 workers, 2 servers", "more servers than parameters")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in CASES]
)
def test_servers_compute_what_one_device_does(name, one_device):
    task, data, expected = one_device
    found = fitted(task, data, CASES[name])
    assert models.max_rel_error(found.state.params, expected.state.params) < 1e-10
    assert models.max_rel_error(found.state.opt_state, expected.state.opt_state) < 1e-10
    assert int(found.state.step) == int(expected.state.step) == 6
    for now, before in zip(found.history, expected.history, strict=True):
        for metric in ("loss", "accuracy", "examples", "skipped"):
            assert now[metric] == pytest.approx(before[metric], rel=1e-10)
    assert found.staleness.updates == 6
    assert not found.staleness.rejected


def test_a_parameter_without_entries(one_device):
    task, data, _ = one_device
    more = dataclasses.replace(task, init=lambda key: {**task.init(key), "none": jnp.ones((0, 3))})
    found = fitted(more, data, px.Servers(workers=2, shards=2, transport="threads"))
    assert models.max_rel_error(found.state.params, fitted(more, data).state.params) < 1e-10


PLANS = {
    "data": px.Plan(data=2),
    "microbatches and zero": px.Plan(data=2, microbatches=2, zero=3),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", PLANS)
def test_a_worker_may_have_any_plan(name, one_device):
    task, data, expected = one_device
    servers = px.Servers(workers=2, shards=2, transport="threads")
    found = fitted(task, data, servers, plan=PLANS[name])
    assert models.max_rel_error(found.state.params, expected.state.params) < 1e-10
    # One push and one pull for each of two workers and six batches, however many devices one has.
    once = sum(leaf.nbytes for leaf in jax.tree.leaves(expected.state.params))
    assert found.staleness.pushed_bytes == found.staleness.pulled_bytes == 2 * 6 * once


@pytest.mark.ci
def test_a_worker_may_be_a_pipeline():
    task = models.perceptron_stack(dtype=jnp.float64)
    data = models.data(EXAMPLES, dtype=np.float64)
    plan = px.Plan(pipeline=2, microbatches=2)
    expected = fitted(task, data)
    found = fitted(task, data, px.Servers(workers=2, transport="threads"), plan=plan)
    assert models.max_rel_error(found.state.params, expected.state.params) < 1e-10


@pytest.mark.ci
@pytest.mark.parametrize("strategy", ["ring", "gather", "heads"])
def test_a_worker_may_split_tokens(strategy):
    task = models.attention_task(8, 2, jnp.float64)
    data = {"x": np.random.default_rng(0).normal(size=(EXAMPLES, 16, 8))}
    plan = px.Plan(data=2, context=2, context_strategy=strategy, stream=4, zero=1)
    expected = fitted(task, data)
    found = fitted(task, data, px.Servers(workers=2, transport="threads"), plan=plan)
    assert models.max_rel_error(found.state.params, expected.state.params) < 1e-10


@pytest.mark.ci
@jax.enable_x64(False)
def test_batches_that_are_no_arrays():
    task, data = models.mlp_task(), models.data(EXAMPLES)
    batches = [jax.tree.map(lambda x, i=i: x[i : i + BATCH], data) for i in range(0, 23, BATCH)]
    expected = px.fit(task, optimizer(), batches, epochs=2, progress=False)
    servers = px.Servers(workers=3, shards=2, transport="threads")
    found = px.fit(task, optimizer(), batches, epochs=2, progress=False, servers=servers)
    assert models.max_rel_error(found.state.params, expected.state.params) < 1e-5


def test_a_batch_that_is_not_finite_updates_nothing(one_device):
    task, data, _ = one_device
    bad = {**data, "x": np.where(np.arange(EXAMPLES)[:, None] == 3, np.nan, data["x"])}
    expected = {}
    for servers in (None, px.Servers(workers=2, shards=2, transport="threads")):
        with pytest.warns(px.errors.NonFiniteWarning):
            expected[servers] = fitted(task, bad, servers)
    one, several = expected.values()
    assert int(several.state.skipped) == int(one.state.skipped) == 2
    assert models.max_rel_error(several.state.params, one.state.params) < 1e-10


@pytest.mark.ci
def test_a_run_goes_on_elsewhere(one_device, tmp_path):
    """With servers, without, and with other numbers of them: each from the other's checkpoint."""
    task, data, expected = one_device
    first = px.Servers(workers=2, shards=3, transport="threads")
    other = dataclasses.replace(first, workers=3, shards=1)
    kinds = {"servers then none": (first, None), "none then servers": (None, first),
             "other servers": (first, other)}  # fmt: skip
    for name, (before, after) in kinds.items():
        half = px.fit(
            task, optimizer(), data, epochs=1, batch_size=BATCH, progress=False,
            servers=before, output=tmp_path / name,
        )  # fmt: skip
        assert int(half.state.step) == 3
        whole = fitted(task, data, after, output=tmp_path / name, resume=True)
        assert models.max_rel_error(whole.state.params, expected.state.params) < 1e-10, name
        assert int(whole.state.step) == 6
