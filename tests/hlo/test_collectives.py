"""What the compiled step communicates, how often and where; what it compiles and holds."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tests import models

import plurax as px
from plurax import tree
from plurax.hlo.compiled_collectives import collectives

SCALARS = 64  # bytes: loss, weight and metrics ride along


def compiled(plan, task=None, size=32):
    return px.compile(task or models.mlp_task(), models.optimizer(), plan, models.data(size))


@pytest.mark.parametrize(
    ("data", "microbatches"),
    [
        *((8, count) for count in (1, 4, 16)),
        *((data, 4) for data in (2, 3)),
        *(pytest.param(data, n, marks=pytest.mark.slow) for data in (2, 3) for n in (1, 16)),
    ],
)
def test_gradients_are_reduced_once_and_outside_the_loop(data, microbatches):
    program = compiled(px.Plan(data=data, microbatches=microbatches))
    gradient = tree.byte_count(program.state_shapes.params)
    found = program.collectives()
    assert {c.kind for c in found} == {"all-reduce"}
    assert {c.axes for c in found} == {("data",)}
    assert not any(c.in_loop for c in found)
    assert gradient <= sum(c.bytes for c in found) <= gradient + SCALARS


@pytest.mark.parametrize("counts", [(3, 1), (1, 2, 1), (5, 2)])
def test_replicas_run_as_many_microbatches_as_a_table_says(counts):
    """And reduce once, after the loop, whose trips nothing else bounds."""
    program = compiled(px.Plan(data=len(counts), microbatches=counts))
    gradient = tree.byte_count(program.state_shapes.params)
    assert not any(c.in_loop for c in program.collectives())
    assert {(c.kind, c.axes) for c in program.collectives()} == {("all-reduce", ("data",))}
    assert gradient <= sum(c.bytes for c in program.collectives()) <= gradient + SCALARS
    table = f"s32[{len(counts)}]{{0}} constant({{{', '.join(map(str, counts))}}})"
    assert program.hlo().count(table) == 1
    loops = re.findall(r' while\(.*op_name="[^"]*shard_map/while".*', program.hlo())
    assert len(loops) == 1
    assert "known_trip_count" not in loops[0]


def test_one_device_communicates_nothing():
    assert compiled(px.Plan(microbatches=4)).collectives() == []


def test_the_reader_sees_a_reduction_inside_a_loop():
    """The mistake that plurax avoids: a scan under the partitioner reduces in every turn."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def step(w, x):
        def body(total, part):
            return total + jax.grad(lambda w: jnp.sum(jnp.tanh(part @ w)))(w), None

        return jax.lax.scan(body, jnp.zeros_like(w), x)[0]

    w = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=NamedSharding(mesh, P()))
    x = jax.ShapeDtypeStruct((5, 16, 4), jnp.float32, sharding=NamedSharding(mesh, P(None, "data")))
    found = collectives(jax.jit(step).lower(w, x).compile().as_text(), mesh)
    assert [(c.kind, c.in_loop, c.trips, c.bytes) for c in found] == [("all-reduce", True, 5, 64)]


def test_the_reader_names_kinds_and_axes():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def local(x):
        a = jax.lax.psum_scatter(x, "tensor", tiled=True)
        b = jax.lax.all_gather(a, "tensor", tiled=True)
        c = jax.lax.ppermute(b, "data", [(0, 1), (1, 0)])
        return jax.lax.all_to_all(c, "tensor", 0, 0, tiled=True)

    f = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=P(None, "data"), out_specs=P(None, "data"), check_vma=False
        )
    )
    text = f.lower(jnp.ones((8, 6), jnp.float32)).compile().as_text()
    found = [(c.kind, c.axes, c.bytes) for c in collectives(text, mesh)]
    whole = 8 * 3 * 4
    assert found == [
        ("reduce-scatter", ("tensor",), whole // 4),
        ("all-gather", ("tensor",), whole),
        ("collective-permute", ("data",), whole),
        ("all-to-all", ("tensor",), whole),
    ]


ASYNCHRONOUS = {
    "all-gather": (
        "(f32[32]{0:T(256)}, f32[128]{0:T(256)}) all-gather-start(%p), "
        "replica_groups=[2,4]<=[8], dimensions={0}", ("tensor",), 512, 4,
    ),
    "all-gather of two": (
        "((f32[32], bf16[8]), (f32[128], bf16[32])) all-gather-start(%p, %q), "
        "replica_groups=[2,4]<=[8]", ("tensor",), 576, 4,
    ),
    "all-gather, transposed groups": (
        "(f32[32], f32[64]) all-gather-start(%p), replica_groups=[4,2]<=[2,4]T(1,0)",
        ("data",), 256, 2,
    ),
    "all-reduce": (
        "f32[128]{0} all-reduce-start(%p), replica_groups={{0,4},{1,5},{2,6},{3,7}}",
        ("data",), 512, 2,
    ),
    "all-reduce, since JAX 0.11": (
        "((f32[128]{0}), f32[128]{0}) all-reduce-start(%p), "
        "replica_groups={{0,4},{1,5},{2,6},{3,7}}, output_to_operand_aliasing={{1}: (0, {})}",
        ("data",), 512, 2,
    ),
    "all-reduce of two, since JAX 0.11": (
        "((f32[128], bf16[8]), (f32[128], bf16[8])) all-reduce-start(%p, %q), "
        "replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",), 528, 2,
    ),
    "collective-permute": (
        "(f32[128], f32[128], u32[], u32[]) collective-permute-start(%p), "
        "source_target_pairs={{0,1},{1,0}}", ("tensor",), 512, 4,
    ),
    "reduce-scatter": (
        "((f32[128]), f32[32], u32[]) reduce-scatter-start(%p), replica_groups=[2,4]<=[8]",
        ("tensor",), 128, 4,
    ),
    "all-to-all": (
        "((s4[128]), s4[128], u32[]) all-to-all-start(%p), replica_groups=[4,2]<=[2,4]T(1,0)",
        ("data",), 64, 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_the_reader_counts_what_an_asynchronous_start_returns(name):
    """As compilers for accelerators write it; its done is not counted again."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    start, axes, size, devices = ASYNCHRONOUS[name]
    kind = name.partition(" ")[0].rstrip(",")
    text = (
        "ENTRY %main (p: f32[32]) -> f32[128] {\n"
        f"  %s = {start}\n"
        f"  ROOT %d = f32[128]{{0}} {kind}-done(%s)\n"
        "}\n"
    )
    (found,) = collectives(text, mesh)
    assert (found.kind, found.axes, found.bytes) == (kind, axes, size)
    # Around a ring of n devices each sends n - 1 parts of the whole, twice for an all-reduce.
    whole = size * devices if kind == "reduce-scatter" else size
    parts = {"collective-permute": devices, "all-reduce": 2 * (devices - 1)}.get(kind, devices - 1)
    assert found.bytes_sent == whole * parts / devices


def test_the_reader_follows_a_wrapped_collective_once():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    text = """
%wrapped (p: f32[128]) -> f32[16] {
  ROOT %r = f32[16]{0} reduce-scatter(%p), replica_groups=[1,8]<=[8], dimensions={0}
}

ENTRY %main (p: f32[128]) -> f32[16] {
  %s = ((f32[128]), f32[16], u32[]) async-start(%p), calls=%wrapped
  %u = ((f32[128]), f32[16], u32[]) async-update(%s), calls=%wrapped
  ROOT %d = f32[16] async-done(%u), calls=%wrapped
}
"""
    found = [(c.kind, c.bytes) for c in collectives(text, mesh)]
    assert found == [("reduce-scatter", 64)]


def test_the_reader_finds_a_reduction_among_many_operands():
    """A compiler numbers every fifth operand in a comment, and some write the shapes of all."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    split = NamedSharding(mesh, P("data"))

    def fun(x, w, *others):
        y = jax.lax.with_sharding_constraint(x.T @ w, split)
        for other in others:
            y = jnp.sin(y) * other
        return y

    shapes = [(32, 16), (32, 8), *[(16, 8)] * 5]
    rows = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=split) for shape in shapes]
    text = jax.jit(fun).lower(*rows).compile().as_text()
    assert "/*index=5*/%all-reduce" in text
    shaped = re.sub(r"(%param[.\d]*), ", r"f32[4,8]{1,0:T(8,128)} \1, ", text)
    for one in (text, shaped):
        (found,) = collectives(one, mesh)
        assert (found.equivalent_kind, found.bytes) == ("reduce-scatter", 16 * 8 * 4 // 4)


def test_coupled_losses_reduce_gradients_once_a_step():
    """What couples the examples crosses devices in each microbatch; gradients behind the loop."""
    program = compiled(px.Plan(data=8, microbatches=4), models.normed_task())
    gradient = tree.byte_count(program.state_shapes.params)
    behind = [c for c in program.collectives() if not c.in_loop]
    assert {c.kind for c in behind} == {"all-reduce"}
    assert gradient <= sum(c.bytes for c in behind) <= gradient + SCALARS
    in_loop = [c for c in program.collectives() if c.in_loop]
    assert {(c.kind, c.trips) for c in in_loop} == {("all-reduce", 4)}
    assert sum(c.bytes for c in in_loop) <= 4 * models.HIDDEN * 4 + SCALARS


@pytest.fixture
def compilations():
    """Counts what XLA compiles."""
    events = []

    def listen(name, _seconds, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("plan", [px.Plan(), px.Plan(data=3, microbatches=2), px.Plan(data=8)])
def test_no_batch_size_compiles_anything(compilations, plan):
    program = compiled(plan)
    rows = models.data(32)
    state = program.init()
    assert compilations  # the listener works
    state, _ = program.step(state, rows)
    del compilations[:]
    for count in (31, 1, 7, 32, 8):
        state, _ = program.step(state, models.cut(rows, count))
    assert compilations == []


def test_predict_and_evaluate_compile_once(compilations):
    program = compiled(px.Plan(data=3))
    state = program.init()
    for count in (1, 3, 5, 33):  # an eighth of the batch or less has a program of its own
        program.predict(state, models.data(count))
        program.evaluate(state, models.data(count))
    del compilations[:]
    for count in (2, 17, 34, 100):
        program.predict(state, models.data(count))
        program.evaluate(state, models.data(count))
    assert compilations == []


def test_memory_does_not_grow_with_microbatches():
    def temporaries(microbatches):
        def init(key):
            return jax.random.normal(key, (64, 2048))

        def loss(params, rows, keys):
            return jnp.square(jnp.tanh(rows @ params)).mean(1)

        task = px.Task(init=init, loss=loss)
        size = 64 * 2 * microbatches
        like = jax.ShapeDtypeStruct((size, 64), jnp.float32)
        plan = px.Plan(data=2, microbatches=microbatches)
        program = px.compile(task, models.optimizer(), plan, like)
        return program.memory().temporaries

    few, many = temporaries(4), temporaries(32)
    activations = 64 * 2048 * 4
    assert many - few < activations / 4


def test_parameters_and_batch_lie_as_the_plan_says():
    program = compiled(px.Plan(data=8))
    state = program.init()
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.is_fully_replicated
        assert len(leaf.sharding.device_set) == 8
    rows = program.place_batch(models.data(32)).rows
    assert {shard.data.shape[0] for shard in rows["x"].addressable_shards} == {4}


def test_the_state_is_donated_and_its_memory_reused():
    program = compiled(px.Plan(data=2))
    state = program.init()
    new, _ = program.step(state, models.data(32))
    assert state.params["hidden"].is_deleted()
    memory = program.memory()
    assert memory.aliased >= tree.byte_count(new.params)
    assert memory.peak == (
        memory.arguments + memory.outputs - memory.aliased + memory.temporaries + memory.code
    )


def test_a_loop_gathers_rows_without_communication():
    program = compiled(px.Plan(data=8))
    placed = program.place_data(models.data(100))
    epoch = program.place_epoch(np.arange(96).reshape(3, 32), np.full(3, 32))
    text = program.compile_loop(placed, epoch).as_text()
    found = collectives(text, program.mesh)
    assert {c.kind for c in found} == {"all-reduce"}
    gradient = tree.byte_count(program.state_shapes.params)
    assert sum(c.bytes for c in found) <= gradient + SCALARS


def test_a_step_writes_out_no_paths(monkeypatch):
    """Paths of leaves are for errors; in a step they cost more than the step."""
    task = px.Task(
        init=lambda key: {"w": jnp.ones((5, 3))},
        loss=lambda params, batch, keys: jnp.sum(batch["x"] @ params["w"], axis=1) ** 2,
    )
    batch = {"x": np.ones((4, 5), np.float32)}
    program = px.compile(task, models.optimizer(), px.Plan(data=2, zero=1), batch)
    state = program.init()
    filled = [leaf.shape for leaf in jax.tree.leaves(program.state_shapes)]
    assert filled != [leaf.shape for leaf in jax.tree.leaves(program.canonical_shapes)]

    def never(path):
        raise AssertionError(path)

    state, _ = program.step(state, batch)
    monkeypatch.setattr(tree, "path_name", never)
    state, _ = program.step(state, batch)
    program.step_placed(state, program.place_batch(batch))


@pytest.mark.parametrize("fields", [{"zero": 1}, {"zero": 3, "remat": "full"}, {}])
def test_microbatches_trace_the_loss_no_more_often(fields):
    def traced(microbatches):
        count = []

        def loss(params, batch, keys):
            count.append(1)
            return models.mlp_task().loss(params, batch, keys)

        task = px.Task(init=models.init, loss=loss)
        compiled(px.Plan(data=2, microbatches=microbatches, **fields), task, 8)
        return len(count)

    assert traced(2) == traced(1)


def test_remat_alone_walks_nothing():
    """It is JAX's own: nothing is split, and so nothing planned."""
    plan = px.Plan(data=2, remat="dots")
    assert not plan.partitioned
    assert compiled(plan).planned_collectives() == []


def test_predict_is_compiled_for_each_dtype():
    task = px.Task(
        init=lambda key: {"w": jnp.float32(2)},
        loss=lambda params, batch, keys: params["w"] * batch["x"],
        predict=lambda params, inputs: (
            inputs["x"] // 2 if inputs["x"].dtype == jnp.int32 else inputs["x"] / params["w"]
        ),
    )
    rows = {"x": np.ones(4, np.float32)}
    program = px.compile(task, models.optimizer(), px.Plan(), rows)
    state = program.init()
    for dtype, half in ((np.float32, 1.5), (np.int32, 1)):
        given = {"x": np.full(4, 3, dtype)}
        np.testing.assert_array_equal(program.predict(state, given), np.full(4, half))
