"""What a plan takes, holds and sends on a machine: by hand, on machines with one kind of cost."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from tests import models
from tests.unit.test_liveness import perceptron, transformer

import plurax as px
from plurax.analysis.comparison import Comparison, differences
from plurax.analysis.estimate import human_seconds
from plurax.execute.recorder import record_step
from plurax.machine_fields import Level
from plurax.pipeline import make_schedule, simulate
from plurax.strategies import Strategies, Strategy
from plurax.trace.clock import Seconds, collective_seconds
from plurax.trace.liveness import peak_bytes
from plurax.tree import human_bytes

NEVER = 1e30
LINKS = [Level("node", 4, 1e9), Level("cluster", 8, 1e8)]
MACHINE = px.Machine("made", {"float32": NEVER}, 10**9, NEVER, LINKS)
FREE_LINKS = [Level("node", 8, NEVER)]
PRODUCTS = dataclasses.replace(MACHINE, flops={"float32": 1e9, "bfloat16": 1e10}, levels=FREE_LINKS)
TRAFFIC = dataclasses.replace(MACHINE, memory_bandwidth=1e9)


def estimated(model, machine, optimizer=None, **plan):
    task, batch, shardings = model()
    if plan.get("tensor", 1) > 1:
        plan["shardings"] = shardings
    return px.estimate(task, optimizer or optax.sgd(0.1), px.Plan(**plan), batch, machine)


def test_products_take_their_operations_at_the_rate_of_their_dtype():
    rows, width, layers = 512, 256, 4
    flops = 2 * rows * width**2 * (3 * layers - 1)
    whole = estimated(perceptron, PRODUCTS)
    assert whole.product_flops == flops
    assert whole.seconds == pytest.approx(flops / 1e9)
    assert whole.gradient.products == whole.gradient.total
    assert estimated(perceptron, PRODUCTS, data=4).seconds == pytest.approx(flops / 4e9)
    assert estimated(perceptron, PRODUCTS, precision="bfloat16").seconds == pytest.approx(
        flops / 1e10
    )


def test_a_product_takes_no_less_than_its_bytes():
    found = estimated(perceptron, TRAFFIC)
    rows, width = 512, 256
    small = 4 * (2 * rows * width + width**2)  # forward, and the gradient of the input
    assert found.gradient.products == pytest.approx(11 * small / 1e9)
    assert found.gradient.traffic > 0


@pytest.mark.parametrize(
    ("rate", "width", "share"),
    [
        pytest.param(1e9, 1024, 1.0, id="a step in a call"),
        pytest.param(1e13, 1024, None, id="many steps in a call"),
        pytest.param(1e9, 64, 0.0, id="kept between calls"),
    ],
)
def test_temporaries_that_are_handed_out_anew(rate, width, share):
    """Those above 32 MiB, once in a call; `fit` makes calls of a quarter of a second."""
    task = px.Task(
        init=lambda key: {"w": jnp.zeros((width, width))},
        loss=lambda p, batch, keys: jnp.tanh(jnp.tanh(batch @ p["w"]) @ p["w"]).sum(1),
    )
    batch, plan = jax.ShapeDtypeStruct((2**14, width), jnp.float32), px.Plan()
    known = dataclasses.replace(MACHINE, flops={"float32": rate}, page_bandwidth=2e9)
    unknown = dataclasses.replace(known, page_bandwidth=0.0)
    first, second = (px.estimate(task, optax.sgd(0.1), plan, batch, m) for m in (known, unknown))
    assert second.gradient.paging == 0
    needed = first.memory["temporaries"] + first.memory["gradients"]
    assert (needed > 2**25) == (share != 0)
    if share is None:
        share = second.seconds / 0.25
        assert share < 1
    assert first.gradient.paging == pytest.approx(share * needed / 2e9)
    assert first.seconds == pytest.approx(second.seconds + first.gradient.paging)
    assert first.between[0] <= first.seconds
    assert ("pages of new memory" in str(first)) == bool(share)


def test_an_update_reads_and_writes_parameters_and_state():
    parameters = 4 * (4 * 256**2 + 4 * 256)
    found = estimated(perceptron, TRAFFIC, optax.adam(1e-3))
    assert found.memory["parameters"] == parameters
    # The norm reads the gradients, then: gradient and three of parameters, mu, nu, thrice written.
    least = 8 * parameters / 1e9
    assert least <= found.update.total <= 1.5 * least


def test_collectives_take_the_slowest_link_of_their_group():
    bytes_summed = 4 * (4 * 256**2 + 4 * 256) + 8  # gradients, the loss and the weight
    inside, across = (estimated(perceptron, MACHINE, data=n) for n in (4, 8))
    assert inside.bytes_sent == {"data": pytest.approx(2 * 3 / 4 * bytes_summed)}
    assert inside.gradient.collectives["data"] == pytest.approx(2 * 3 / 4 * bytes_summed / 1e9)
    # Eight are in two nodes: the four of a node share what the ring sends between nodes.
    assert across.gradient.collectives["data"] == pytest.approx(2 * 7 / 8 * bytes_summed / 4 / 1e8)
    both = estimated(transformer, MACHINE, tensor=2, data=2)
    assert {*both.gradient.collectives} >= {"data", "tensor"}
    assert {*both.bytes_sent} == {*both.gradient.collectives, *both.update.collectives}
    assert "qkv" not in str(both)


@pytest.mark.ci
def test_memory_adds_up_to_the_peak():
    task, batch, _ = transformer()
    plan = px.Plan(data=2, zero=3, microbatches=2)
    found = px.estimate(task, optax.adam(1e-3), plan, batch, MACHINE)
    traced = record_step(task, optax.adam(1e-3), plan, batch, "cpu")
    assert found.peak == pytest.approx(peak_bytes(traced), abs=100)
    assert found.memory["gradients"] == traced.memory.gradients
    assert found.fits
    assert found.spare == 10**9 - found.peak
    full = px.estimate(
        task, optax.adam(1e-3), plan, batch, dataclasses.replace(MACHINE, memory=10**6)
    )
    assert not full.fits
    assert "does not fit" in str(full)


@pytest.mark.ci
def test_the_busiest_stage_of_a_pipeline():
    """The second device has the head; the first waits for it, and both for the schedule."""
    rows, tokens, width, depth, words = 16, 64, 128, 4, 256
    block = 2 * tokens * width * (12 * width + 2 * tokens)
    head = 2 * tokens * width * words
    found = estimated(transformer, PRODUCTS, pipeline=2, microbatches=4)
    own = 3 * rows * (depth // 2 * block + head)
    assert found.product_flops == own
    assert found.gradient.products == pytest.approx(own / 1e9)
    assert found.gradient.bubble > 0
    uneven = estimated(transformer, PRODUCTS, pipeline=2, microbatches=4, layers=(3, 1))
    assert uneven.product_flops == 3 * rows * 3 * block
    more = estimated(transformer, PRODUCTS, pipeline=2, microbatches=8)
    assert more.gradient.bubble < found.gradient.bubble
    assert more.gradient.products == pytest.approx(found.gradient.products)


STAGES = [("gpipe", 2), ("1f1b", 2), ("interleaved", 4), ("interleaved", 8)]


@pytest.mark.parametrize(("schedule", "stages"), STAGES)
def test_equal_stages_take_what_the_simulation_says(schedule, stages):
    """No embedding or head with products: a microbatch's backward takes twice its forward."""

    def stacked(depth=8, width=64):
        def block(params, x, batch, keys):
            return jnp.tanh(x @ params)

        return px.stack(
            embed=(lambda key: jnp.ones(width), lambda p, batch, keys: batch["x"] * p[None]),
            block=(lambda key: jnp.zeros((width, width)), block),
            head=(
                lambda key: jnp.ones(width),
                lambda p, x, batch, keys: jnp.sum(x * p[None], axis=1),
            ),
            depth=depth,
        )

    batch = {"x": jax.ShapeDtypeStruct((32, 64), jnp.float32)}
    plan = px.Plan(pipeline=2, microbatches=4, schedule=schedule, stages=stages)
    found = px.estimate(stacked(), optax.sgd(0.1), plan, batch, PRODUCTS)
    forward = 8 // 2 * 2 * 8 * 64 * 64 / 1e9
    line = simulate(
        make_schedule(schedule, 2, 4, plan.virtual_stages),
        forward=forward, backward=forward, weight=forward, lockstep=True,
    )  # fmt: skip
    assert found.seconds == pytest.approx(line.length)
    assert found.gradient.bubble == pytest.approx(line.bubble * line.length)


def test_uneven_devices_hold_stages_of_different_speed():
    fast = px.Machine("fast", {"float32": 2e9}, 10**9, NEVER)
    slow = px.Machine("slow", {"float32": 1e9}, 10**8, NEVER)
    machine = px.Machine.uneven("both", [(1, fast), (1, slow)], [Level("node", 2, NEVER)])
    found = estimated(transformer, machine, pipeline=2, microbatches=4)
    assert found.gradient.products == pytest.approx(found.product_flops / 1e9)
    with pytest.raises(px.errors.MachineError, match="differ"):
        estimated(transformer, machine, tensor=2)


def test_the_slowest_replica_counts_with_its_own_microbatches():
    """Of 512 rows: the fast device is three times as fast as the slow one."""
    fast = px.Machine("fast", {"float32": 3e9}, 10**9, NEVER)
    slow = px.Machine("slow", {"float32": 1e9}, 10**8, NEVER)
    machine = px.Machine.uneven("both", [(1, fast), (1, slow)], [Level("node", 2, NEVER)])
    flops = 2 * 512 * 256**2 * 11

    def seconds(**plan):
        return estimated(perceptron, machine, data=2, **plan).seconds

    assert seconds() == pytest.approx(flops / 2 / 1e9)
    assert seconds(microbatches=4) == pytest.approx(flops / 2 / 1e9)
    assert seconds(microbatches=(3, 1)) == pytest.approx(flops / 4 / 1e9)
    assert seconds(microbatches=(1, 3)) == pytest.approx(flops * 3 / 4 / 1e9)
    assert seconds(microbatches=(7, 1)) == pytest.approx(flops * 7 / 8 / 3e9)
    found = estimated(perceptron, machine, data=2, microbatches=(3, 1))
    assert (found.plan.microbatches, found.batch_size) == ((3, 1), 512)
    # Arrays are as large on both devices: rows for three microbatches of 128.
    assert (
        found.memory["batch"] == 3 * estimated(perceptron, fast, microbatches=4).memory["batch"] / 4
    )
    # Where all devices are alike, one with 3 of 4 microbatches takes half as long again.
    three, equal = (estimated(perceptron, PRODUCTS, data=2, microbatches=m) for m in ((3, 1), 1))
    assert three.seconds == pytest.approx(3 / 2 * equal.seconds)


def test_a_loss_that_prints_is_estimated_as_without():
    """`jax.debug.print` has no output, and neither has a branch that only prints."""
    task, batch = models.mlp_task(), models.data(64)

    def loss(params, batch, keys):
        losses = task.loss(params, batch, keys)
        jax.debug.print("{}", params["hidden"].sum())
        jax.lax.cond(params["hidden"][0, 0] > 9, lambda: jax.debug.print("large"), lambda: None)
        return losses

    plan = px.Plan(data=2, zero=3)
    printing = dataclasses.replace(task, loss=loss)
    silent, found = (
        px.estimate(one, optax.sgd(0.1), plan, batch, PRODUCTS) for one in (task, printing)
    )
    assert found.product_flops == silent.product_flops
    assert found.seconds == pytest.approx(silent.seconds)
    assert px.compile(printing, optax.sgd(0.1), plan, batch).planned_collectives()


def test_a_plan_of_more_devices_than_the_machine_has():
    with pytest.raises(px.errors.MachineError, match="needs 16 devices, and made has 8"):
        estimated(perceptron, MACHINE, data=16)


def test_what_an_estimate_shows():
    machine = px.Machine.preset("8xA100-80GB")
    found = estimated(transformer, machine, optax.adam(1e-3), pipeline=2, data=2, microbatches=4)
    for part in ("matrix products", "memory traffic", "collectives over data", "pipeline bubble",
                 "starting kernels", "optimizer's update", "are left", "temporaries"):  # fmt: skip
        assert part in str(found)
    assert "Estimate(Plan(data=2" in repr(found)
    assert "<table>" in found._repr_html_()
    assert found.device_hours(1600) == pytest.approx(100 * found.seconds * 4 / 3600)


def test_two_estimates_side_by_side():
    first = estimated(perceptron, MACHINE, data=4)
    second = estimated(perceptron, dataclasses.replace(MACHINE, memory=1e6), data=4, zero=3)
    both = Comparison(first, second, ("a.toml", "b.toml"))
    assert both.plan_rows() == [("zero", "0", "3")]
    rows = {row[0].strip(): row[1:] for row in both.cost_rows()}
    assert rows["a step"][:2] == (human_seconds(first.seconds), human_seconds(second.seconds))
    assert {kind for kind, size in first.memory.items() if size} <= {*rows}
    held = (human_bytes(one.memory["parameters"]) for one in (first, second))
    assert rows["parameters"][:2] == (*held,)
    assert rows["parameters"][2].endswith("-75%")
    assert rows["left of it"] == (
        human_bytes(first.spare),
        f"{human_bytes(-second.spare)} too much",
        "",
    )
    assert rows["over data"][2] == "0" or "%" in rows["over data"][2]
    assert "pipeline bubble" not in rows
    assert "a.toml and b.toml, estimated on made\n" in str(both)
    assert "per step" in repr(both)
    assert "<table>" in both._repr_html_()
    same = Comparison(first, first)
    assert "the plans are equal" in str(same)
    assert {row[3] for row in same.cost_rows()} == {"0", ""}


def test_estimates_of_two_machines_and_batches():
    first = estimated(perceptron, MACHINE, data=4)
    second = dataclasses.replace(first, machine=PRODUCTS, batch_size=7)
    second = dataclasses.replace(second, machine=dataclasses.replace(PRODUCTS, name="other"))
    assert Comparison(first, second).plan_rows() == [
        ("examples of a step", "512", "7"), ("machine", "made", "other"),
    ]  # fmt: skip


def test_how_plans_differ():
    in_, out = (None, "tensor"), ("tensor", None)
    first = px.Plan(tensor=2, shardings={"in": in_, "out": out, "*": out})
    second = px.Plan(tensor=2, shardings={"out": in_, "in": in_, "new": out})
    assert differences(first, second) == [
        ("shardings['out']", str(out), str(in_)),
        ("shardings['*']", str(out), "-"),
        ("shardings['new']", "-", str(out)),
        ("order of shardings", "in, out", "out, in"),
    ]
    pins = [Strategy(f"{index} add", ((None,),)) for index in range(3)]
    some, others, older = (
        px.Plan(strategies=Strategies(traced, tuple(equations)))
        for traced, equations in (("a", pins[:2]), ("a", pins[1:]), ("b", pins))
    )
    assert differences(some, px.Plan()) == [("strategies", "2 equations", "-")]
    each = "2 equations, 1 of them its own"
    assert differences(some, others) == [("strategies", each, each)]
    assert differences(some, older) == [
        ("strategies", "2 equations, of another loss", "3 equations, of another loss")
    ]


def test_seconds_add_up():
    part = Seconds(1.0, 2.0, {"data": 3.0}, 4.0, 5.0, 6.0, 7.0)
    assert part.total == 22  # what is hidden takes no time
    every = Seconds.sum([part, part.times(2)])
    assert every == Seconds(3.0, 6.0, {"data": 9.0}, 12.0, 15.0, 18.0, 21.0)


def test_an_estimate_is_of_the_step_on_its_platform():
    """Only GPUs send while they compute, and reduce layer by layer: seconds and bytes say so."""
    task, batch = models.transformer_stack(depth=4), models.text(64)
    gpu = px.Machine.preset("8xA100-80GB")
    cpu = dataclasses.replace(gpu, platform="cpu")
    plan = px.Plan(data=8, remat="full")
    ours, other = (px.estimate(task, optax.adam(1e-3), plan, batch, m) for m in (gpu, cpu))
    assert ours.gradient.hidden > 0
    assert other.gradient.hidden == 0
    assert ours.seconds < other.seconds
    assert ours.total_sent == pytest.approx(other.total_sent, rel=0.01)


def test_seconds_are_given_with_what_they_may_be():
    """The least waits for nothing, at the peaks; the most has two thirds of the rates."""
    task, batch = models.transformer_stack(depth=4), models.text(64)
    plan = px.Plan(data=2, pipeline=2, microbatches=4)
    machine = px.Machine.preset("8xA100-80GB")
    found = px.estimate(task, optax.adam(1e-3), plan, batch, machine)
    least, most = found.between
    waits = found.gradient.bubble + sum(found.gradient.collectives.values())
    waits += sum(found.update.collectives.values())
    assert least == pytest.approx(machine.efficiency * (found.seconds - waits))
    assert least < 0.8 * found.seconds
    assert most == 1.5 * found.seconds
    assert "two thirds of rates" in str(found)


def test_a_thousand_devices_that_are_not_here():
    task, batch = models.transformer_stack(depth=8), models.text(1024)
    machine = px.Machine.preset("8xA100-80GB", nodes=128)
    plan = px.Plan(data=256, pipeline=4, microbatches=4)
    found = px.estimate(task, optax.adam(1e-3), plan, batch, machine)
    assert found.seconds > 0
    assert found.fits


def test_tiles_of_a_tpu_are_counted():
    """A weight of 96 columns takes those of 128, unless its rows are the last dim."""
    task, batch, _ = perceptron(layers=2, width=100, rows=512)
    tpu = px.Machine.preset("TPU-v5e")
    found = px.estimate(task, optax.adam(1e-3), px.Plan(), batch, tpu)
    traced = record_step(task, optax.adam(1e-3), px.Plan(), batch)
    assert found.memory["padding"] >= 3 * 2 * 4 * (104 * 128 - 100 * 100)
    assert found.peak == pytest.approx(peak_bytes(traced, "tpu", tpu.fast_memory), abs=4096)
    other = dataclasses.replace(tpu, platform="cpu")
    assert "padding" not in px.estimate(task, optax.adam(1e-3), px.Plan(), batch, other).memory


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.ci), 8])
def test_heads_are_faster_than_gathered_keys_on_more_than_one_and_groups_devices(devices, groups):
    """As the bytes say: 4 (g + 1) f / n of a layer's keys, and 4 f."""
    heads, size, width = 64, 2, 128

    def loss(params, batch, keys):
        q = jnp.einsum("btd,dmgh->btmgh", batch["x"], params["q"])
        k, v = (jnp.einsum("btd,dmh->btmh", batch["x"], params[name]) for name in "kv")
        weights = jax.nn.softmax(jnp.einsum("btmgh,bsmh->bmgts", q, k))
        out = jnp.einsum("bmgts,bsmh,mghd->btd", weights, v, params["o"])
        return (out**2).mean((1, 2))

    shapes = {"q": (width, heads // groups, groups, size), "k": (width, heads // groups, size)}
    shapes |= {"v": shapes["k"], "o": (*shapes["q"][1:], width)}
    task = px.Task(
        init=lambda key: {name: jnp.ones(shape) for name, shape in shapes.items()}, loss=loss
    )
    batch = {"x": jax.ShapeDtypeStruct((2, 512, width), "float32")}
    machine = px.Machine.preset("8xA100-40GB")
    slow = [dataclasses.replace(level, bandwidth=1e6) for level in machine.levels]
    machine = dataclasses.replace(machine, levels=tuple(slow))
    gathered, exchanged = (
        px.estimate(
            task, optax.sgd(0.1), px.Plan(context=devices, context_strategy=strategy, stream=64),
            batch, machine,
        ).seconds
        for strategy in ("gather", "heads")
    )  # fmt: skip
    assert (exchanged < gathered * 0.999) == (devices > 1 + groups)


@pytest.mark.ci
def test_heads_that_are_exchanged_within_a_node_use_its_links():
    """Two nodes of eight: neighbours exchange heads, and keys go from node to node, while devices
    compute. With half of the rate between nodes only the sum of the gradients takes longer."""
    task, machine = models.attention_task(64, 8), px.Machine.preset("8xH100-80GB", nodes=2)
    batch = {"x": jax.ShapeDtypeStruct((1, 8192, 64), "float32")}
    plan = px.Plan(context=16, context_strategy="heads+ring", stream=512)
    node, between = machine.levels
    half = dataclasses.replace(between, bandwidth=between.bandwidth / 2)
    slower = dataclasses.replace(machine, levels=(node, half))
    first, second = (
        px.estimate(task, optax.sgd(0.1), plan, batch, each) for each in (machine, slower)
    )
    gradients = 4 * 4 * 64 * 64
    sent = 2 * gradients * 15 / 16 / 8  # each device of a node its part
    longer = sent / (machine.efficiency * between.bandwidth)
    assert second.seconds - first.seconds == pytest.approx(longer, rel=1e-2)


@pytest.mark.parametrize(("group", "stride"), [((8, 1), 2), ((2, 8), 16), ((4, 2), 4)])
def test_a_part_of_an_axis_has_the_links_that_it_spans(group, stride):
    machine = px.Machine.preset("8xH100-80GB", nodes=4)
    sizes = {"data": 1, "context": 16, "tensor": 2}
    args = machine, "all-to-all", 1e9, ("context",), sizes, 32
    alone = machine.collective_seconds("all-to-all", 1e9, group[0], stride, mesh_devices=32)
    assert collective_seconds(*args, group) == alone != collective_seconds(*args)
