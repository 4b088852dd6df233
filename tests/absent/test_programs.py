"""What the compilers of TPUs and GPUs make of our programs, on a machine that has neither.

    make test-absent

The environment has their packages, `plurax[tpu,cuda]`. Models are small: what is asserted is which
collectives there are, how large and where, and what is copied, not how long anything takes.
"""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import plurax as px
from plurax.execute import early_reduction
from plurax.execute.compiler_options import checked_options, try_options
from plurax.hlo.text import parse
from plurax.mesh import make_mesh
from plurax.pipeline import stage_values
from plurax.trace.advised_options import advised_options

jax.config.update("jax_platforms", "cpu")

WIDTH, DEPTH, ROWS = 512, 4, 32
MACHINES = ["v5e:2x2", "4xH100"]


def layer(x, p):
    """Products in float32, which a TPU would otherwise gather in bfloat16."""
    h = jax.nn.gelu(jnp.dot(x, p["up"], precision="highest"))
    return x + jnp.dot(h, p["down"], precision="highest"), None


def scanned_task(depth=DEPTH):
    def init(key):
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (depth, WIDTH, 2 * WIDTH)) * 0.02,
            "down": jax.random.normal(down, (depth, 2 * WIDTH, WIDTH)) * 0.02,
        }

    def loss(params, batch, keys):
        x, _ = jax.lax.scan(layer, batch["x"], params)
        return jnp.sum((x - batch["y"]) ** 2, axis=1)

    return px.Task(init=init, loss=loss)


def stacked_task(**more):
    def init_block(key):
        return jax.tree.map(lambda leaf: leaf[0], scanned_task(1).init(key))

    return px.stack(
        embed=(lambda key: jnp.ones(WIDTH), lambda p, batch, keys: batch["x"] * p[None]),
        block=(init_block, lambda p, x, batch, keys: layer(x, p)[0]),
        head=(
            lambda key: jnp.ones(WIDTH),
            lambda p, x, batch, keys: jnp.sum((x * p[None] - batch["y"]) ** 2, axis=1),
        ),
        depth=DEPTH,
        **more,
    )


MEGATRON = {"up": (..., "tensor"), "down": (..., "tensor", None)}
PLANS = {
    "data": {"data": 4, "microbatches": 4},
    "zero 1": {"data": 4, "zero": 1, "microbatches": 4},
    "zero 2": {"data": 4, "zero": 2, "microbatches": 2},
    "zero 3": {"data": 4, "zero": 3, "remat": "full", "microbatches": 2},
    "zero 1, together": {"data": 4, "zero": 1, "microbatches": 4, "bucket_bytes": 25_000_000},
    "zero 3, alone": {"data": 4, "zero": 3, "remat": "full", "bucket_bytes": 1},
    "tensor": {"data": 2, "tensor": 2, "shardings": MEGATRON},
    "tensor, zero 3": {"data": 2, "tensor": 2, "zero": 3, "shardings": MEGATRON},
    "pipeline": {"data": 2, "pipeline": 2, "microbatches": 4, "remat": "full"},
    "eager pipeline": {"pipeline": 4, "schedule": "eager-1f1b", "microbatches": 8},
}


def rows():
    return {name: jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32) for name in "xy"}


@functools.cache
def compiled(machine, name):
    task = stacked_task() if "pipeline" in PLANS[name] else scanned_task()
    plan = px.Plan(**PLANS[name])
    return px.analysis.compiled_for(task, optax.adam(1e-3), plan, rows(), machine)


CASES = [(machine, name) for machine in MACHINES for name in PLANS]


@pytest.mark.parametrize(("machine", "name"), CASES)
def test_what_is_sent_is_what_was_planned(machine, name):
    """By mesh axes; a compiler may reduce a few numbers with the gradients, or by themselves."""
    result = compiled(machine, name)
    planned, sent = Counter(), Counter()
    for one in result.collectives:
        if max(one.bytes, one.planned_bytes) > 64:
            planned[one.kind, one.axes] += one.planned_bytes
            sent[one.kind, one.axes] += one.bytes
    for key, size in planned.items():
        assert abs(sent[key] - size) <= 64, (key, sent, planned)
    assert all(record.collective.trips is not None for record in result.schedule.collectives)


@pytest.mark.parametrize("name", ["data", "zero 1", "tensor"])
def test_a_gpu_reduces_layers_in_their_loop(name, monkeypatch):
    """Behind the backward pass, and not with all that is left at its end."""
    reductions = [
        one
        for one in compiled("4xH100", name).schedule.collectives
        if one.collective.kind in ("all-reduce", "reduce-scatter")
        and "data" in one.collective.axes
        and one.collective.bytes > 64
    ]
    # The compiler may move a loop's first iteration, or half of its iterations, out of it.
    assert any(one.collective.in_loop for one in reductions)
    monkeypatch.setattr(early_reduction, "PLATFORMS", frozenset())
    after = compiled.__wrapped__("4xH100", name).schedule
    assert not any(
        one.collective.in_loop
        for one in after.collectives
        if one.collective.kind != "all-gather" and one.collective.axes == ("data",)
    )
    assert compiled("4xH100", name).schedule.hidden > after.hidden


@pytest.mark.parametrize(("machine", "name"), CASES)
def test_the_state_is_updated_in_place(machine, name):
    result = compiled(machine, name)
    held = result.memory
    # What is not in the memory of an argument are the metrics: scalars, each in a tile of its own.
    assert held.outputs - held.aliased <= 8 * 1024
    module = parse(result.program.hlo())
    smallest = min(one.bytes for one in result.program.shardings if one.bytes > 4 * WIDTH)
    # A TPU copies to its fast memory, S(1), ahead of use.
    copied = [
        one.name
        for one in module.computations[module.entry]
        if one.opcode == "copy" and one.bytes >= smallest and "S(1)" not in one.type
    ]
    assert copied == []


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_zero_3_holds_a_layer_at_a_time(machine, precision):
    """What is held beside the state does not grow with the layers, but for their activations."""

    def temporaries(depth):
        plan = px.Plan(data=4, zero=3, remat="full", microbatches=2, precision=precision)
        result = px.analysis.compiled_for(
            scanned_task(depth), optax.adam(1e-3), plan, rows(), machine
        )
        # Gradients are held in shards, once as they are added up and once as they were, and each
        # layer's input.
        layer_bytes = 4 * 4 * WIDTH * WIDTH
        own = depth * (2 * layer_bytes / 4 + ROWS / 8 * WIDTH * 4)
        return result.memory.temporaries - own, layer_bytes

    (few, _), (many, layer_bytes) = temporaries(4), temporaries(16)
    assert many - few <= 2 * layer_bytes


@pytest.mark.parametrize("machine", MACHINES)
def test_a_tick_copies_no_parameter_of_a_stage(machine, monkeypatch):
    """Embedding and head are read out of their flat buffer once, not in each tick."""

    def table(key):
        return jax.random.normal(key, (WIDTH, WIDTH))

    def head_init(key):
        return {"gain": jnp.ones(WIDTH), "kernel": jax.random.normal(key, (WIDTH, 4 * WIDTH))}

    def head(p, x, batch, keys):
        return jax.nn.logsumexp((x * p["gain"][None]) @ p["kernel"], axis=1)

    task = px.stack(
        embed=(table, lambda p, batch, keys: batch["x"] @ p),
        block=(table, lambda p, x, batch, keys: x + jax.nn.gelu(x @ p)),
        head=(head_init, head),
        depth=DEPTH,
    )
    plan = px.Plan(data=2, pipeline=2, microbatches=4, remat="full")

    def copied():
        result = px.analysis.compiled_for(task, optax.sgd(0.1), plan, rows(), machine)
        return [
            one.name
            for computation in parse(result.program.hlo()).computations.values()
            for one in computation
            if re.search(r"schedule_ticks/while/body/.*/slice$", one.op_name)
            and f"[{4 * WIDTH * WIDTH}]" in one.type
        ]

    assert copied() == []
    monkeypatch.setattr(stage_values, "PLATFORMS", frozenset())
    assert copied() != []


@pytest.mark.parametrize("name", ["data", "zero 3"])
def test_what_is_held_adds_up_to_the_compiler_s_temporaries(name):
    """On a GPU: a TPU holds much of it in its memory on the chip."""
    result = compiled("4xH100", name)
    held = sum(values.bytes for values in result.held)
    assert held == pytest.approx(result.memory.temporaries, rel=0.05)
    assert any(values.line.startswith("test_programs.py:") for values in result.held)


def too_large(rows):
    batch = {name: jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32) for name in ("x", "y")}
    return scanned_task(64), optax.adam(1e-3), px.Plan(data=4), batch


def test_a_step_that_does_not_fit_names_a_plan_that_does():
    task, optimizer, plan, batch = too_large(2**22)
    result = px.analysis.compiled_for(task, optimizer, plan, batch, "4xH100")
    assert not result.fits
    written = re.search(r"should fit +(Plan\(.*\))", str(result))
    lighter = eval(written[1], {"Plan": px.Plan})
    assert px.analysis.compiled_for(task, optimizer, lighter, batch, "4xH100").fits


def test_a_step_that_a_compiler_refuses_names_a_plan_too():
    message = (
        r"the step of Plan\(data=4\) does not fit v5e:2x2: its compiler says "
        r"'.*exceeds available HBM.*Plan\(data=4, .*\) should fit; plurax"
    )
    with pytest.raises(px.errors.OutOfMemoryError, match=message):
        px.analysis.compiled_for(*too_large(2**20), "v5e:2x2")


@pytest.mark.parametrize("machine", MACHINES)
def test_losses_of_all_examples_hold_the_activations_of_one_microbatch(machine):
    """The last microbatch waits for the others, though nothing reads their losses."""
    wide, microbatches = 1024, 8
    batch = {"x": jax.ShapeDtypeStruct((4 * microbatches * wide, WIDTH), jnp.float32)}

    def outputs(params, batch, keys):
        x, _ = jax.lax.scan(layer, batch["x"], params)
        return x.mean(1)

    def losses(outputs, batch, mask):
        real = jnp.where(mask, outputs, 0)
        return (outputs - real.sum() / mask.sum().astype(real.dtype)) ** 2

    def of_each(params, batch, keys):
        return outputs(params, batch, keys) ** 2

    init = scanned_task().init
    plan = px.Plan(data=4, microbatches=microbatches)
    devices = px.topology(machine)
    held = [
        px.compile(px.Task(init, loss), optax.sgd(0.1), plan, batch, devices=devices).memory()
        for loss in (px.over_batch(outputs, losses), of_each)
    ]
    assert held[0].temporaries < 1.3 * held[1].temporaries


@pytest.mark.parametrize("machine", ["4xH100", pytest.param("v5e:2x2", marks=pytest.mark.slow)])
def test_a_share_of_the_products_is_held(machine):
    """Of three in a layer, with 512, 1,024 and 512 terms, the second; the third is added to `x`."""
    sizes = {"up": (WIDTH, 2 * WIDTH), "mid": (2 * WIDTH, WIDTH), "down": (WIDTH, WIDTH)}

    def init(key):
        return {
            name: 0.02 * jax.random.normal(key, (2 * DEPTH, *size)) for name, size in sizes.items()
        }

    def layer(x, p):
        wide = jax.nn.gelu(x @ p["up"])
        return x + jax.nn.gelu(wide @ p["mid"]) @ p["down"], None

    def loss(params, batch, keys):
        return jnp.sum(jax.lax.scan(layer, batch["x"], params)[0] ** 2, axis=1)

    task, devices = px.Task(init=init, loss=loss), px.topology(machine)
    batch = {"x": jax.ShapeDtypeStruct((4 * 8192, WIDTH), jnp.float32)}

    def held(remat):
        plan = px.Plan(data=4, remat=remat)
        return px.compile(task, optax.sgd(0.1), plan, batch, devices=devices).memory().temporaries

    stack = 2 * DEPTH * 8192 * WIDTH * 4
    none, second, both = (held(remat) / stack for remat in ("full", 0.4, "dots"))
    assert second - none == pytest.approx(1, abs=0.3)
    assert both - second == pytest.approx(2, abs=0.3)


@pytest.mark.parametrize("machine", MACHINES)
def test_members_do_not_communicate(machine):
    result = px.analysis.compiled_for(
        scanned_task(1), optax.adam(1e-3), px.Plan(member=4), rows(), machine,
        members=px.Members(8),
    )  # fmt: skip
    assert list(result.collectives) == []
    assert result.memory.outputs - result.memory.aliased <= 8 * 1024


@pytest.mark.parametrize("machine", MACHINES)
def test_a_program_for_devices_that_are_not_here_does_not_run(machine):
    program = compiled(machine, "data").program
    batch = {name: np.zeros((ROWS, WIDTH), np.float32) for name in "xy"}
    calls = (
        lambda: program.init(seed=0), lambda: program.place(None),
        lambda: program.step(None, batch), lambda: program.place_batch(batch),
        lambda: program.evaluate(None, batch), lambda: program.predict(None, batch),
        lambda: px.fit(
            scanned_task(), optax.adam(1e-3), batch, batch_size=ROWS, plan=program.plan,
            devices=px.topology(machine),
        ),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(px.errors.PlanError, match=r"^4 x .* no state, batch or data can be"):
            call()


def test_no_machine_of_these_chips():
    with pytest.raises(px.errors.MachineError, match=r"cannot describe it: .* of a host's"):
        px.topology("v5e:3x5")


def test_an_option_of_the_compiler_is_used():
    """Reductions that it may not join are several."""

    def reductions(options):
        result = px.analysis.compiled_for(
            scanned_task(), optax.adam(1e-3), px.Plan(data=4), rows(), "4xH100",
            compiler_options=options,
        )  # fmt: skip
        assert result.program.compiler_options == (options or {})
        (reduced,) = (one for one in result.collectives if one.kind == "all-reduce")
        return reduced.count

    apart = {"xla_gpu_all_reduce_combine_threshold_bytes": 1}
    assert reductions(apart) > reductions(None)


@pytest.mark.parametrize(
    ("machine", "options", "text"),
    [
        ("4xH100", {"xla_nope": 1}, "compiler for NVIDIA H100 80GB HBM3 has no such option"),
        ("4xH100", {"xla_tpu_scoped_vmem_limit_kib": 1}, "the compiler for TPUs alone knows"),
        ("v5e:2x2", {"xla_nope": 1}, "compiler for TPU v5 lite has no such option"),
        ("v5e:2x2", {"xla_tpu_scoped_vmem_limit_kib": "x"}, "does not take this value, and says"),
    ],
)
def test_an_option_that_a_compiler_refuses(machine, options, text):
    with pytest.raises(px.errors.ArgumentError, match=text):
        px.compile(
            scanned_task(), optax.adam(1e-3), px.Plan(data=4), rows(),
            devices=px.topology(machine), compiler_options=options,
        )  # fmt: skip


KINDS = {"NVIDIA H100 80GB HBM3": "8xH100", "TPU v6 lite": "v6e:2x2"}


@pytest.mark.parametrize("kind", sorted(advised_options()))
def test_a_compiler_takes_the_options_that_are_advised_for_it(kind):
    devices = px.topology(KINDS[kind])
    assert devices[0].device_kind == kind
    advised = {name: advice["value"] for name, advice in advised_options()[kind].items()}
    try_options(checked_options(advised), make_mesh(px.Plan(), devices))


QUICK = {("4xH100", "zero 2"), ("v5e:2x2", "data")}
IN_BFLOAT16 = [
    (machine, name)
    for machine in MACHINES
    for name, fields in PLANS.items()
    if "data" in fields and "bucket_bytes" not in fields
]


@pytest.mark.parametrize(
    ("machine", "name"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in IN_BFLOAT16],
)
def test_gradients_travel_in_bfloat16(machine, name):
    """Half the bytes of float32 are added up over `data`, as planned; all else is as before."""
    task = stacked_task() if "pipeline" in PLANS[name] else scanned_task()
    plan = px.Plan(**PLANS[name], reduce_dtype="bfloat16")
    result = px.analysis.compiled_for(task, optax.adam(1e-3), plan, rows(), machine)

    def sent(collectives, field):
        sizes = Counter()
        for one in collectives:
            reduces = one.kind in ("all-reduce", "reduce-scatter") and "data" in one.axes
            if max(one.bytes, one.planned_bytes) > 64:
                sizes["reduced" if reduces else one.kind, one.axes] += getattr(one, field)
        return sizes

    exact = sent(compiled(machine, name).collectives, "planned_bytes")
    for field in ("planned_bytes", "bytes"):
        found = sent(result.collectives, field)
        for key, size in exact.items():
            wanted = size / 2 if key[0] == "reduced" else size
            assert abs(found[key] - wanted) <= 64, (field, key, found, exact)


@pytest.mark.parametrize("name", ["data", "zero 1", "tensor", "tensor, zero 3"])
def test_an_estimate_is_near_to_the_schedule_of_the_compiler(name):
    """Made before anything is compiled: kernels, and what is sent while others compute."""
    machine = px.Machine.preset("8xH100-80GB")
    plan = px.Plan(**PLANS[name])
    estimate = px.estimate(scanned_task(), optax.adam(1e-3), plan, rows(), machine)
    assert estimate.seconds == pytest.approx(compiled("4xH100", name).schedule.seconds, rel=0.15)


# --- Attention of a library -----------------------------------------------------------------------


def attention_task(key_heads):
    shapes = {"q": (512, 8, 64), "k": (512, key_heads, 64), "v": (512, key_heads, 64)}

    def init(key):
        return {name: jnp.ones(shape) for name, shape in (shapes | {"o": (8, 64, 512)}).items()}

    def loss(params, batch, keys):
        q, k, v = (jnp.einsum("btd,dnh->btnh", batch["x"], params[name]) for name in "qkv")
        q, k, v = (one.astype(jnp.bfloat16) for one in (q, k, v))
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        out = jnp.einsum("btnh,nhd->btd", out.astype(jnp.float32), params["o"])
        return jnp.mean((out - batch["x"]) ** 2, (1, 2))

    return px.Task(init=init, loss=loss)


HEADS = {"q": (None, "tensor", None), "o": ("tensor", None, None)}
KEYS = {"k": (None, "tensor", None), "v": (None, "tensor", None)}
ATTENTION = {
    "one": (8, {}),
    "data": (8, {"data": 4}),
    "zero 3": (2, {"data": 4, "zero": 3}),
    "tensor": (2, {"data": 2, "tensor": 2, "shardings": HEADS | KEYS}),
    "one head of keys": (1, {"data": 2, "tensor": 2, "shardings": HEADS}),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_a_library_is_split_and_not_gathered(name):
    """No array of tokens by tokens, heads apart, nothing sent that was not planned."""
    key_heads, sizes = ATTENTION[name]
    task, plan = attention_task(key_heads), px.Plan(**sizes)
    batch = {"x": jax.ShapeDtypeStruct((16, 1280, 512), jnp.float32)}
    result = px.analysis.compiled_for(task, optax.adam(1e-3), plan, batch, "4xH100")
    text = result.program.hlo()
    assert len(re.findall(r"custom-call\(.*__cudnn\$fmhaSoftmax", text)) >= 2
    assert "1280,1280]{" not in text
    for one in result.collectives:
        if max(one.bytes, one.planned_bytes) > 64:
            assert one.bytes == one.planned_bytes, one
    assert not any(one.axes == "tensor" and "gather" in one.kind for one in result.collectives)
