"""Which parameters are weights of experts, and when a search sends rows to them."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import plurax as px
from plurax.planner import search
from plurax.planner.candidates import candidates, model_of
from plurax.planner.expert_weights import expert_rules, fields_of_rows_sent
from plurax.planner.wanted import Wanted

EXPERTS, WIDTH, HIDDEN = 64, 512, 2048


def mixture(up, down, table, x):
    """Experts by top-1: `up` (E, d, f), `down` (E, f, d)."""
    which = (x @ table).argmax(1)
    order = jnp.argsort(which)
    sizes = jnp.bincount(which, length=up.shape[0]).astype(jnp.int32)
    hidden = jnp.tanh(jax.lax.ragged_dot(x[order], up, sizes))
    return jax.lax.ragged_dot(hidden, down, sizes)[jnp.argsort(order)]


def plain(p, x):
    return mixture(p["up"], p["down"], p["table"], x)


def in_layers(p, x):
    """Experts of two layers in one array."""

    def layer(x, own):
        return x + mixture(own["up"], own["down"], p["table"], x), None

    return jax.lax.scan(layer, x, {"up": p["up"], "down": p["down"]})[0]


def moved(p, x):
    """Stored with the experts last, and cast; a call of its own."""

    @jax.jit
    def weights(w):
        return w.transpose(2, 0, 1).astype(jnp.float32)

    return mixture(weights(p["up"]), weights(p["down"]), p["table"], x)


def in_buffers(p, x):
    """As many rows for each expert as there are; the weights of one product are on the left."""
    choice = jax.nn.one_hot((x @ p["table"]).argmax(1), 8)
    buffers = jnp.einsum("ne,nd->end", choice, x)
    hidden = jnp.tanh(jnp.einsum("edf,end->efn", p["up"], buffers))
    return jnp.einsum("ne,end->nd", choice, jnp.einsum("efn,efd->end", hidden, p["down"]))


SHAPES = {
    in_buffers: {"up": (8, 4, 6), "down": (8, 6, 4)},
    plain: {"up": (8, 4, 6), "down": (8, 6, 4)},
    in_layers: {"up": (2, 8, 4, 6), "down": (2, 8, 6, 4)},
    moved: {"up": (4, 6, 8), "down": (6, 4, 8)},
}
DIMS = {plain: 0, in_buffers: 0, in_layers: 1, moved: 2}


def task_of(function, shapes, width=4, *, coupled=False):
    def init(key):
        return {name: jnp.ones(shape) for name, shape in shapes.items()}

    def loss(p, batch, keys, *mask):
        x = batch["x"]
        return (function(p, x.reshape(-1, width)) ** 2).reshape(x.shape).mean((1, 2))

    return px.Task(init=init, loss=loss, coupled=coupled)


def batch_of(rows, tokens, width=4):
    return {"x": jax.ShapeDtypeStruct((rows, tokens, width), jnp.float32)}


@pytest.mark.parametrize("coupled", [False, True], ids=["apart", "coupled"])
@pytest.mark.parametrize("function", SHAPES, ids=lambda function: function.__name__)
def test_weights_of_groups_are_found(function, coupled):
    shapes = {**SHAPES[function], "table": (4, 8)}
    rules = expert_rules(task_of(function, shapes, coupled=coupled), batch_of(2, 3), 4)
    expected = {
        name: tuple("data" if dim == DIMS[function] else None for dim in range(len(shape)))
        for name, shape in SHAPES[function].items()
    }
    assert rules == expected


def test_what_devices_do_not_divide_is_left_out():
    task = task_of(plain, {**SHAPES[plain], "table": (4, 8)})
    assert expert_rules(task, batch_of(2, 3), 3) == {}


def large():
    """64 experts of 2 million numbers, and 131,072 tokens."""
    shapes = {
        "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH),
        "table": (WIDTH, EXPERTS),
    }  # fmt: skip
    return task_of(plain, shapes, WIDTH), batch_of(64, 2048, WIDTH)


def test_more_stages_are_tried_where_fewer_do_not_fit():
    """Of as many devices as there are experts at most, and as many stages as are pinned."""
    task, batch = large()

    def sizes(pinned, held, devices=16):
        machine = px.Machine.preset("8xH100-80GB", nodes=devices // 8)
        wanted = Wanted(task, optax.sgd(0.1), batch, None, pinned, held, None, 5)
        sent = fields_of_rows_sent(wanted, machine)
        return [(one["data"], one["pipeline"]) for one in sent]

    assert sizes(px.Plan(), ()) == [(16, 1), (8, 2), (4, 4), (2, 8)]
    assert sizes(px.Plan(), (), 128) == [(64, 2), (32, 4), (16, 8), (8, 16), (4, 32), (2, 64)]
    assert sizes(px.Plan(pipeline=4), ("pipeline",)) == [(4, 4)]
    assert sizes(px.Plan(data=2, pipeline=8), ("data", "pipeline")) == [(2, 8)]
    assert sizes(px.Plan(tensor=2), ("tensor",)) == []


def test_more_stages_are_tried_until_some_fit(monkeypatch):
    """Here none does: each is tried once, behind the search without experts over `data`."""
    tried = []

    def nothing_fits(machine, wanted, effort):
        tried.append((wanted.pinned.data, wanted.pinned.pipeline))
        raise px.errors.PlanError("no plan fits")

    monkeypatch.setattr(search, "_search_on", nothing_fits)
    with pytest.raises(px.errors.PlanError, match="no plan fits"):
        found(pinned={"data": 4, "precision": "bfloat16"})
    assert tried == [(4, 1), (4, 1), (4, 2), (4, 4)]


def found(**options):
    task, batch = large()
    machine = px.Machine.preset("8xH100-80GB", nodes=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # too large to run here
        return px.search(task, optax.adam(1e-3), batch, machine, evaluations=8, **options)


@pytest.mark.ci
def test_a_search_sends_rows_where_that_is_fastest():
    sent, kept = found(), found(pinned=px.Plan(shardings={"up": (None, None, None)}))
    assert sent.best.splits_experts
    assert not kept.best.splits_experts
    assert sent.ranked[0].seconds < kept.ranked[0].seconds
    task, batch = large()
    again = px.estimate(task, optax.adam(1e-3), sent.best, batch, sent.machine)
    assert again.seconds == sent.ranked[0].seconds


def test_bounds_of_rows_sent_are_below_their_estimates():
    """Gradients of experts are not reduced, and a device multiplies with its own ones alone."""
    shapes = {"up": (8, WIDTH, HIDDEN), "down": (8, HIDDEN, WIDTH), "table": (WIDTH, 8)}
    task, batch = task_of(plain, shapes, WIDTH), batch_of(256, 128, WIDTH)
    machine, optimizer = px.Machine.preset("8xH100-80GB"), optax.adam(1e-3)
    pinned = px.Plan(data=8, shardings=expert_rules(task, batch, 8))
    known = model_of(task, optimizer, batch, "float32", machine, ("none",), pinned.rules)
    assert known.parameters == 4 * WIDTH * 8  # of the table
    held = ("data", "tensor", "pipeline", "microbatches", "remat", "shardings")
    every = [*candidates(known, machine, 8, pinned, held, machine.memory)]
    assert {one.sizes.zero for one in every} == {0, 1, 2, 3}
    for candidate in every:
        plan = candidate.plan
        assert candidate.seconds < px.estimate(task, optimizer, plan, batch, machine).seconds, plan


@pytest.mark.ci
def test_what_is_pinned_holds():
    """A size of `data` that does not split, and a rule for experts."""
    for pinned in ({"data": 1}, px.Plan(shardings={"down": (None, "tensor", None)})):
        assert not found(pinned=pinned).best.splits_experts
