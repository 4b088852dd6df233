"""Numbers beyond any machine, or beyond the data, for whatever counts something.

What is counted one by one in Python, or takes memory, is refused at once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import command, models

import plurax as px
from plurax.planner import tensor_search
from plurax.planner.effort import BESIDE
from plurax.sharding.spec import TensorSharding

ROWS = models.data(8)


@pytest.fixture(scope="module")
def program():
    return compiled(models.mlp_task())


def compiled(task, **plan):
    return px.compile(task, optax.sgd(0.1), px.Plan(**plan), ROWS)


def fitted(data=ROWS, **arguments):
    options = {"batch_size": 8, "epochs": 1, "progress": False, **arguments}
    return px.fit(models.mlp_task(), optax.sgd(0.1), data, **options)


def deep(depth):
    layer = (lambda key: jnp.ones((3, 3)), lambda w, x, batch, keys: x @ w)
    first = (layer[0], lambda w, batch, keys: batch["x"] @ w)
    return px.stack(embed=first, block=layer, head=layer, depth=depth)


HUGE = 10**9
ROWS_TOO_MANY = r"of 1,000,000,000,000 rows: a program takes at most"
PARTS = r"1,000,000,000 parts, and most of them would be padding"
TOO_LARGE = {
    "microbatches": (lambda _: compiled(models.mlp_task(), microbatches=HUGE), PARTS),
    "fit, microbatches": (lambda _: fitted(plan=px.Plan(microbatches=HUGE)), PARTS),
    "pipeline": (
        lambda _: compiled(deep(4), pipeline=2, microbatches=10**7),
        r"10,000,000 parts, and most of them would be padding",
    ),
    "verify": (
        lambda _: px.verify(models.mlp_task(), optax.sgd(0.1), px.Plan(microbatches=HUGE), ROWS),
        PARTS,
    ),
    "schedule": (lambda _: px.pipeline.gpipe(2, 10**6), "is too long to write down"),
    "batch": (
        lambda _: px.compile(
            models.mlp_task(), optax.sgd(0.1), px.Plan(),
            {"x": jax.ShapeDtypeStruct((10**12, 5), np.float32)},
        ),
        ROWS_TOO_MANY,
    ),
    "fit, batch": (lambda _: fitted(batch_size=10**12), ROWS_TOO_MANY),
    "fit, batches": (
        lambda _: fitted([ROWS], batch_size=HUGE),
        r"batch_size=1,000,000,000, and the first batch of the data has \d+ examples: every batch",
    ),
    "predict": (
        lambda program: program.predict(program.init(), ROWS, chunk=10**12), ROWS_TOO_MANY
    ),
    **{
        f"members {seeds}": (
            lambda _, seeds=seeds: px.Members(seeds),
            r"000 members: a population is compiled as one",
        )
        for seeds in (10**6, 10**12, range(10**12))
    },
    "layers": (lambda _: deep(HUGE), r"depth must be a whole number from 1 to 1,000,000"),
    "servers": (lambda _: px.Servers(shards=HUGE), r"each of them is a process, or a thread"),
    "workers": (lambda _: px.Servers(workers=10**6), r"each of them is a process, or a thread"),
    "devices": (
        lambda _: px.virtual_devices(10**6),
        r"1,000,000 virtual devices: each takes threads of this machine; give at most 4,096",
    ),
    "rank": (
        lambda _: TensorSharding.replicated(HUGE),
        r"a sharding for 1,000,000,000 dims: give the number of a tensor's dims, at most 1,000",
    ),
    "bins": (
        lambda _: px.metrics.auc(jnp.ones(2), jnp.ones(2), bins=HUGE),
        r"bins has to be a whole number from 1 to 1048576",
    ),
    "bins of a calibration": (
        lambda _: px.ensemble.calibration(np.full((2, 2), 0.5), np.zeros(2, int), HUGE),
        r"give a whole number of bins, at least 1 and at most 1,048,576",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_LARGE)
def test_numbers_beyond_any_machine_are_refused_at_once(program, name):
    call, said = TOO_LARGE[name]
    with pytest.raises(px.errors.PluraxError, match=said):
        call(program)


@pytest.mark.ci
def test_numbers_beyond_the_data_take_all_of_them(program):
    """A batch, or a chunk, is then all examples, and members are computed all at a time."""
    count = len(jax.tree.leaves(ROWS)[0])
    alike = [fitted(batch_size=size).state.params for size in (count, HUGE)]
    assert models.same_bits(*alike)
    state = program.init()
    outputs = [program.predict(state, ROWS, chunk=chunk) for chunk in (count, HUGE, None)]
    assert all(models.same_bits(one, outputs[0]) for one in outputs)
    many = [
        fitted(members=px.Members(2), plan=px.Plan(chunk=chunk)).state.params for chunk in (2, HUGE)
    ]
    assert models.same_bits(*many)


@pytest.mark.ci
def test_a_search_on_millions_of_devices_ends(monkeypatch):
    """Hundreds of plans with `tensor` have smaller bounds than those that can be."""
    traced, trace = [], tensor_search.graph_of_step
    monkeypatch.setattr(
        tensor_search,
        "graph_of_step",
        lambda *args, **named: traced.append(args) or trace(*args, **named),
    )
    machine = px.Machine.preset("8xH100-80GB", nodes=10**6)
    found = px.search(models.mlp_task(), optax.sgd(0.1), models.data(512), machine, evaluations=6)
    assert found.best.devices <= 512
    # Evaluations, as many of experts' plans, and those tried beside the best.
    assert len(traced) <= 2 * 6 + BESIDE


def test_processes_of_a_host(capsys):
    code, _, said = command.run(capsys, "launch", "--processes", 10**6, "--", "train", "a.py")
    assert code == 2
    assert "start at most 1000 processes on a host" in said
