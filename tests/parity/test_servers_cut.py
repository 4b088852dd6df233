"""Large parameters are cut over servers: the update is that of a step written by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models, optimizers

import plurax as px
from plurax.execute.initial_state import new_state
from plurax.jaxpr.homes import RowSplit
from plurax.jaxpr.interpret import all_equations
from plurax.server import shard_layout
from plurax.server.run_spec import RunSpec
from plurax.server.shard_layout import ShardLayout

SYNC = px.Servers(workers=2, shards=3, transport="threads")
ASYNC = dataclasses.replace(SYNC, mode="async", workers=1)
NAMES = sorted(optimizers.start())


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of a row or two of the tests' parameters, whether shards are uneven or not."""
    monkeypatch.setattr(shard_layout, "LARGE_BYTES", 120)  # of `first` and `second`
    monkeypatch.setattr(shard_layout, "CHUNK_BYTES", 64)
    monkeypatch.setattr(shard_layout, "UNEVEN", 0.0)


def task():
    return px.Task(
        init=lambda key: jax.tree.map(jnp.asarray, optimizers.start()), loss=optimizers.loss
    )


def spec(optimizer, servers=SYNC):
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), optimizers.rows())
    return RunSpec(task(), optimizer, servers, px.Plan(), like)


def cut(spec):
    return {
        n for n, home in zip(NAMES, spec.layout.homes, strict=True) if isinstance(home, RowSplit)
    }


def fitted(optimizer, servers, **options):
    batches = [optimizers.rows()] * optimizers.STEPS
    return px.fit(task(), optimizer, batches, servers=servers, progress=False, **options)


LARGE = {"first", "out", "second"}
"""The parameters of more than a chunk."""
FEW = {
    # name: which parameters are cut in `sync`, and in `async`
    "adamw": (LARGE, LARGE),
    "adafactor, factored": (set(), set()),  # means of rows and of columns
    "lamb": (LARGE, set()),  # a norm of the update of each parameter
    "contrib.muon": (set(), set()),  # products of matrices
    "add_noise": (LARGE, LARGE),  # all draw the noise of all rows
    "apply_if_finite": (LARGE, LARGE),
    "masked": (LARGE, LARGE),
    "adaptive_grad_clip": (set(), set()),  # norms of rows
    "conditionally_transform": (LARGE, LARGE),
    "contrib.prodigy": (set(), None),  # a product of vectors of all entries
}


@pytest.mark.parametrize("name", FEW)
def test_what_can_be_computed_on_rows_is_cut(x64, name):
    joint, stale = FEW[name]
    assert cut(spec(optimizers.OPTIMIZERS[name]())) == joint
    if stale is not None:
        assert cut(spec(optimizers.OPTIMIZERS[name](), ASYNC)) == stale


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in FEW)) for n in optimizers.OPTIMIZERS],
)
def test_servers_with_rows_beside_a_step_by_hand(x64, name):
    optimizer = optimizers.OPTIMIZERS[name]()
    if name == "flatten":
        with pytest.raises(px.errors.PlanError, match="reads tensors of several of them at once"):
            fitted(optimizer, SYNC)
        return
    found = fitted(optimizer, SYNC).state
    assert optimizers.same(
        optimizers._plain((found.params, found.opt_state)), optimizers.by_hand(name)
    )


def test_constants_are_cut_too(x64):
    """What is the same on all servers, and whole: an optimizer's state that is reset."""

    def update(updates, state, params=None):
        moments = optax.EmaState(state.count + 1, jax.tree.map(jnp.ones_like, state.ema))
        return jax.tree.map(lambda g: jnp.full_like(g, -0.5), updates), moments

    constant = optax.GradientTransformation(optax.ema(0.9).init, update)
    assert cut(spec(constant)) == LARGE
    state = fitted(constant, SYNC).state
    for name, first in optimizers.start().items():
        assert np.array_equal(state.opt_state.ema[name], np.ones_like(first))
        assert np.allclose(state.params[name], first - 0.5 * optimizers.STEPS)


def test_cases_are_cut_too(x64):
    """A `cond` on a tensor that is cut: each case is computed on rows."""

    def update(updates, count, params=None):
        def halved(grad):
            return jax.lax.cond(count % 2 == 0, lambda g: -0.05 * g, jnp.negative, grad)

        return jax.tree.map(halved, updates), count + 1

    cases = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
    assert cut(spec(cases)) == LARGE
    found = fitted(cases, SYNC).state.params
    alone = fitted(cases, None).state.params
    assert models.max_rel_error(found, alone) < 1e-10


@pytest.mark.parametrize("shard", range(3))
def test_no_server_computes_a_whole_parameter_that_is_cut(x64, shard):
    run = spec(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1)))
    state = new_state(run.task, run.optimizer, jax.random.key(0))
    leaves = dict(enumerate(jax.tree.leaves((state, run.sums))))
    grads = {i: jnp.zeros(run.leaves[i].shape) for i in run.update.grads}
    scalars = {i: jnp.zeros(run.leaves[i].shape, run.leaves[i].dtype) for i in run.update.scalars}
    leaves |= grads | scalars
    held = {i: run.update.piece(i, shard, leaves[i]) for i in run.update.inputs(shard)}
    numbers = run.update.worker_numbers(grads | scalars)
    jaxpr = jax.make_jaxpr(functools.partial(run.update.update, shard))(held, numbers)
    sizes = {v.aval.size for eqn in all_equations(jaxpr.jaxpr) for v in eqn.outvars}
    assert 1 < max(sizes) < min(optimizers.start()[name].size for name in LARGE)


def test_servers_are_as_even_as_rows_allow():
    leaves = [jax.ShapeDtypeStruct(shape, np.float32)
              for shape in [(1000, 7), (3, 5), (1, 700), (2, 300), (40,), ()]]  # fmt: skip
    for shards in (2, 3, 5):
        layout = ShardLayout(leaves, shards)
        loads = [sum(n * 4 for _, n in layout.lengths(shard)) for shard in range(shards)]
        # Of each of three parameters one chunk more, and the last of its chunks is smaller.
        assert max(loads) - min(loads) <= 3 * 64
        arrays = [np.random.default_rng(0).normal(size=leaf.shape) for leaf in leaves]
        parts = [layout.pieces(shard, dict(enumerate(arrays))) for shard in range(shards)]
        for index, leaf in layout.whole(parts).items():
            assert np.array_equal(leaf, arrays[index])
        for index, home in enumerate(layout.homes):
            if isinstance(home, RowSplit):
                assert sum(part[index].size for part in parts) == arrays[index].size


def test_what_is_even_is_not_cut(monkeypatch):
    """Pieces are put together by every worker, which costs a copy."""
    monkeypatch.setattr(shard_layout, "UNEVEN", 1.1)
    same = [jax.ShapeDtypeStruct((100, 100), np.float32)] * 2
    assert ShardLayout(same, 2).homes == [0, 1]
    assert ShardLayout(same, 3).homes == [RowSplit(0), RowSplit(1)]
    assert ShardLayout(same, 1).homes == [None, None]


RUNS = [
    {"mode": "bounded", "staleness": 1, "correction": "delay"},
    {"mode": "sync", "compression": "topk"},
    {"mode": "async", "correction": "scale"},
    {"mode": "async", "compression": "int8"},
    {"mode": "sync", "quorum": 1},
]


@pytest.mark.ci
@pytest.mark.parametrize(
    "changes",
    [pytest.param(run, marks=[pytest.mark.slow] * (at > 1)) for at, run in enumerate(RUNS)],
    ids=str,
)
def test_rows_change_nothing_in_a_run_on_one_worker(x64, changes, tmp_path, monkeypatch):
    """Saved, continued on other servers, and replayed."""
    servers = dataclasses.replace(SYNC, workers=1, **changes)
    found = fitted(optax.adam(0.1), servers, output=tmp_path / "rows", epochs=2)
    batches = [optimizers.rows()] * optimizers.STEPS
    replayed = px.train.replay(task(), optax.adam(0.1), batches, tmp_path / "rows")
    assert models.same_bits(found.state.params, replayed.params)
    fitted(optax.adam(0.1), dataclasses.replace(servers, shards=2), output=tmp_path / "other")
    resumed = fitted(optax.adam(0.1), servers, output=tmp_path / "other", resume=True, epochs=2)
    monkeypatch.setattr(shard_layout, "CHUNK_BYTES", 1 << 22)
    whole = fitted(optax.adam(0.1), servers, epochs=2)
    if "compression" not in changes:  # chunks and the largest are of each vector
        assert models.max_rel_error(found.state.params, whole.state.params) < 1e-10
        assert models.max_rel_error(resumed.state.params, whole.state.params) < 1e-10
