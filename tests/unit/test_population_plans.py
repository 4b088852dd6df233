"""Estimates of populations, and the plans that a search finds for them."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px
from plurax.machine_fields import Level
from plurax.planner.populations import layouts, share

NODE = px.Machine.preset("8xH100-80GB")
BATCH = models.data(16)


def estimated(members, machine=NODE, task=None, batch=BATCH, optimizer=None, **plan):
    plan = {"chunk": 2, "batch_dim": "major", **plan}
    task, optimizer = task or models.mlp_task(), optimizer or models.optimizer()
    return px.estimate(task, optimizer, px.Plan(**plan), batch, machine, px.Members(members))


def wide(width):
    """Return a task whose products take long, and its batch."""
    task = px.Task(
        init=lambda key: {"a": jnp.zeros((width, width)), "b": jnp.zeros((width, width))},
        loss=lambda p, batch, keys: jnp.mean((jnp.tanh(batch["x"] @ p["a"]) @ p["b"]) ** 2, -1),
    )
    return task, {"x": jax.ShapeDtypeStruct((1024, width), jnp.float32)}


@pytest.mark.parametrize(
    ("plan", "batches"),
    [({}, 6), ({"chunk": 6}, 6), ({"chunk": 4}, 6), ({"member": 2}, 3), ({"member": 4}, 2),
     ({"data": 2}, 3), ({"member": 2, "data": 2, "microbatches": 2}, 1.5)],
    ids=str,
)  # fmt: skip
def test_products_are_those_of_the_members_of_a_device(plan, batches):
    alone = px.estimate(models.mlp_task(), models.optimizer(), px.Plan(), BATCH, NODE)
    assert estimated(6, **plan).product_flops == pytest.approx(batches * alone.product_flops)


@pytest.mark.parametrize("member", [1, 2, 4])
def test_a_device_holds_the_states_of_its_members(member):
    alone = px.estimate(models.mlp_task(), models.optimizer(), px.Plan(), BATCH, NODE)
    held = -(-6 // member)
    memory = estimated(6, member=member).memory
    assert memory["parameters"] == held * alone.memory["parameters"]
    assert memory["optimizer"] == held * alone.memory["optimizer"]


def test_temporaries_are_those_of_a_chunk():
    task, batch = wide(256)
    one, two, four = (
        estimated(8, task=task, batch=batch, chunk=chunk).memory["temporaries"]
        for chunk in (1, 2, 4)
    )
    assert one < two < four <= 4.1 * one


@pytest.mark.parametrize("plan", [{"member": 4}, {"data": 2}, {"member": 2, "data": 2}], ids=str)
def test_bytes_sent_are_those_of_the_compiled_program(plan):
    plan = {"chunk": 2, "batch_dim": "major", **plan}
    program = px.compile(
        models.mlp_task(), models.optimizer(), px.Plan(**plan), BATCH, members=px.Members(4)
    )
    compiled = sum(one.bytes_sent * one.trips for one in program.collectives())
    assert estimated(4, **plan).total_sent == pytest.approx(compiled)


def test_hyperparameters_and_open_choices():
    """A task that is a function of hyperparameters; the rule chooses, as `compile` does."""
    members = px.Members(hyper={"rate": np.linspace(0.1, 0.4, 24)})
    plan = px.Plan(member=2)

    def optimizer(hyper):
        return optax.sgd(hyper["rate"])

    cores = dataclasses.replace(NODE, platform="cpu")
    estimate = px.estimate(models.mlp_task(), optimizer, plan, BATCH, cores, members)
    program = px.compile(models.mlp_task(), optimizer, plan, BATCH, members=members)
    assert estimate.plan == program.plan
    assert estimate.members == 24
    assert "a step" in str(estimate)
    assert "16 examples, 24 members" in str(estimate)


# --- The search -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("members", "devices"), [(1, 8), (3, 8), (100, 8), (7, 12), (5, 1)])
def test_layouts_leave_out_none_that_computes_less(members, devices):
    pairs = layouts(members, devices, 64)
    assert len(pairs) == len(set(pairs))
    for member, data in itertools.product(range(1, devices + 1), repeat=2):
        if member * data <= devices and member <= members:
            least = min(share(members, *pair) for pair in pairs if pair[0] * pair[1] <= devices)
            assert least <= share(members, member, data)
    assert all(member * data <= devices for member, data in pairs)


def with_biases():
    """Return a perceptron that starts fewer kernels on GPUs with the batch in the minor dim."""

    def init(key):
        shapes = ((8, 64), (64, 64), (64, 4))
        return [{"w": jnp.zeros(shape), "b": jnp.zeros(shape[1])} for shape in shapes]

    def loss(params, batch, keys):
        x = batch["x"]
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"][None])
        return jnp.sum((x @ params[-1]["w"] + params[-1]["b"][None]) ** 2, -1)

    return px.Task(init=init, loss=loss), {"x": jax.ShapeDtypeStruct((256, 8), jnp.float32)}


CASES = {
    "many small": lambda: (models.mlp_task(), BATCH, 24),
    "with biases": lambda: (*with_biases(), 24),
    "few wide": lambda: (*wide(4096), 3),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", CASES)
def test_no_plan_by_hand_is_faster(name):
    task, batch, members = CASES[name]()
    found = px.search(
        task, optax.adam(1e-3), batch, NODE, members=px.Members(members), evaluations=8
    )
    best, by_hand = found.ranked[0].seconds, {}
    for member, data in itertools.product((1, 3, 4, 8), (1, 2, 8)):
        if member * data <= 8 and member <= members:
            held = -(-members // member)
            for chunk, dim in itertools.product({held, -(-held // 8)}, ("major", "minor")):
                plan = px.Plan(member=member, data=data, chunk=chunk, batch_dim=dim)
                by_hand[plan] = px.estimate(
                    task, optax.adam(1e-3), plan, batch, NODE, px.Members(members)
                ).seconds
    assert best <= min(by_hand.values()) * 1.005, min(by_hand, key=by_hand.get)
    assert found.least_left <= best
    assert found.best.devices <= 8
    assert found.estimate.members == members


@pytest.mark.ci
def test_rows_are_split_where_devices_are_left_over():
    task, batch = wide(4096)
    found = px.search(task, optax.adam(1e-3), batch, NODE, members=px.Members(4), evaluations=6)
    assert (found.best.member, found.best.devices) == (4, 8)
    pinned = {"tensor": 1}
    many = px.search(
        task, optax.adam(1e-3), batch, NODE, members=px.Members(16), evaluations=2, pinned=pinned
    )
    assert many.best.devices == 8


def test_chunks_are_cut_until_a_step_fits():
    task, batch = wide(512)
    whole = estimated(16, task=task, batch=batch, member=8, chunk=2, optimizer=optax.adam(1e-3))
    limit = whole.peak - 2**20
    found = px.search(
        task, optax.adam(1e-3), batch, NODE, members=px.Members(16), memory=limit,
        pinned={"member": 8, "data": 1},
    )  # fmt: skip
    assert found.best.chunk == 1
    assert all(one.memory <= limit for one in found.ranked)
    assert "more than" in str(found)


def test_what_is_pinned_stays():
    task, batch = wide(512)
    members = px.Members(16)
    pinned = {"member": 4, "chunk": 2, "precision": "bfloat16", "remat": "full"}
    found = px.search(task, optax.adam(1e-3), batch, NODE, members=members, pinned=pinned)
    for plan in (one.plan for one in found.ranked):
        assert {name: getattr(plan, name) for name in pinned} == pinned
    assert found.best.devices in (4, 8)


@pytest.mark.parametrize("pinned", [{"member": 3}, {"data": 3, "tensor": 1}], ids=str)
def test_pinned_sizes_need_not_be_among_those_that_are_tried(pinned):
    task, members = models.mlp_task(), px.Members(4)
    found = px.search(task, optax.sgd(0.1), BATCH, NODE, members=members, pinned=pinned)
    assert {name: getattr(found.best, name) for name in pinned} == pinned


def test_a_pinned_size_that_no_machine_has():
    with pytest.raises(px.errors.PlanError, match=r"(?s)no plan that agrees with what is pinned "
                       r"can be:.*needs 16 devices, and 8xH100-80GB has 8"):  # fmt: skip
        px.search(models.mlp_task(), optax.sgd(0.1), BATCH, NODE, members=px.Members(32),
                  pinned={"member": 16})  # fmt: skip


def test_a_population_that_fits_nowhere():
    task, batch = wide(512)
    with pytest.raises(px.errors.PlanError, match=r"(?s)no plan fits in 1,000,000 bytes.*member=8"
                       r".*More devices, fewer members, a smaller batch"):  # fmt: skip
        px.search(task, optax.adam(1e-3), batch, NODE, members=px.Members(16), memory=1e6)


def test_a_search_of_a_population_explains_no_parameter():
    members = px.Members(8)
    found = px.search(models.mlp_task(), optax.sgd(0.1), BATCH, NODE, members=members)
    with pytest.raises(px.errors.PlanError, match="Search one network, without members="):
        found.explain("hidden")


@pytest.mark.ci
def test_large_members_are_split_as_one_network_is():
    """Several devices for one member after another, where rows alone split too little."""
    task, _ = wide(4096)
    few = {"x": jax.ShapeDtypeStruct((256, 4096), jnp.float32)}
    found = px.search(task, optax.adam(1e-3), few, NODE, members=px.Members(2), evaluations=12)
    alone = px.search(task, optax.adam(1e-3), few, px.Machine.preset("4xH100-80GB"))
    assert found.best.member == 2
    assert found.best.tensor > 1
    assert found.ranked[0].seconds == pytest.approx(alone.ranked[0].seconds, rel=0.3)


@pytest.mark.ci
@pytest.mark.usefixtures("x64")
def test_a_plan_with_strategies_trains_members_as_one_device_does():
    pinned = {"member": 2, "tensor": 2}
    members = px.Members(3)
    machine = px.Machine("cores", {"float64": 1e9}, 8e9, 1e10, [Level("node", 4, 5e9)])
    arguments = (models.mlp_task(dtype=jnp.float64), models.optimizer())
    batch = models.data(16, dtype=np.float64)
    plan = px.search(*arguments, batch, machine, members=members, pinned=pinned).best
    assert (plan.member, plan.tensor, plan.devices) == (2, 2, 4)
    assert plan.strategies
    losses = []
    for some in (plan, px.Plan()):
        program = px.compile(*arguments, some, batch, members=members)
        state = program.init()
        for _ in range(3):
            state, metrics = program.step(state, batch)
        losses.append(np.asarray(metrics["loss"]))
    np.testing.assert_allclose(*losses, rtol=1e-10)


@pytest.mark.ci
def test_machines_of_unequal_devices():
    """The fast kind alone, where the slow one would hold it up."""
    a100, v100 = px.Machine.preset("A100-80GB"), px.Machine.preset("V100-32GB")
    level = Level("node", 8, 150e9, 3.4e-6)
    lab = px.Machine.uneven("lab", [(4, a100), (4, v100)], [level])
    task, batch = wide(4096)
    found = px.search(task, optax.adam(1e-3), batch, lab, members=px.Members(4), evaluations=3)
    fast = px.search(
        task, optax.adam(1e-3), batch, px.Machine.preset("4xA100-80GB"), members=px.Members(4),
        evaluations=3,
    )  # fmt: skip
    assert found.ranked[0].seconds <= fast.ranked[0].seconds * 1.01
