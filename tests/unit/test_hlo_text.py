"""What is read from the text of compiled programs, as compilers for accelerators write it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from plurax.analysis.compiled_schedule import walk_schedule
from plurax.hlo.compiled_collectives import collectives
from plurax.hlo.live_values import held_at_peak
from plurax.hlo.roofline import bytes_moved, products_of
from plurax.hlo.text import parse
from plurax.machine import Machine
from plurax.machine_fields import Level

MESH = ((4,), ("data",))
LINK = Level("node", 4, 1e9)
MACHINE = Machine("four", {"float32": 1e12, "bfloat16": 2e12}, 1e10, 1e9, (LINK,))
GATHER = "f32[256]{0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}"


@pytest.fixture(scope="module")
def mesh():
    shape, names = MESH
    kinds = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=jax.devices()[:4])


def loop(condition, body, attributes=""):
    """Return a program that runs a body in a loop."""
    return f"""
{condition}

%body (t: (s32[], f32[64])) -> (s32[], f32[64]) {{
  %t = (s32[], f32[64]) parameter(0)
  %x = f32[64]{{0}} get-tuple-element(%t), index=1
{body}
}}

ENTRY %main (t: (s32[], f32[64])) -> (s32[], f32[64]) {{
  %t = (s32[], f32[64]) parameter(0)
  ROOT %w = (s32[], f32[64]) while(%t), condition=%cond, body=%body{attributes}
}}
"""


CONDITIONS = {
    "a count": (
        "%cond (t: s32[]) -> pred[] {\n}", ', backend_config={"known_trip_count":{"n":"8"}}', 8,
    ),
    "a comparison": (
        "%cond (t: (s32[], f32[64])) -> pred[] {\n"
        "  %c = s32[]{:T(128)} constant(8), metadata={op_name=\"jit(f)\"}\n"
        "  %t = (s32[]{:T(128)}, f32[64]{0:T(1024)(128)}) parameter(0)\n"
        "  %i = s32[]{:T(128)} get-tuple-element(%t), index=0\n"
        "  ROOT %lt = pred[]{:T(512)} compare(%i, %c), direction=LT\n}", "", 8,
    ),
    "in a fusion, the constant outside": (
        "%compare (i: s32[], n: s32[]) -> pred[] {\n  %i = s32[] parameter(0)\n"
        "  %n = s32[] parameter(1)\n  ROOT %lt = pred[] compare(%i, %n), direction=LT\n}\n\n"
        "%cond (t: (s32[], f32[64])) -> pred[] {\n  %t = (s32[], f32[64]) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%t), index=0\n  %c = s32[] constant(8)\n"
        "  ROOT %f = pred[] fusion(%i, %c), kind=kLoop, calls=%compare\n}", "", 8,
    ),
    "in a fusion, with the constant": (
        "%compare (i: s32[]) -> pred[] {\n  %i = s32[] parameter(0)\n  %n = s32[] constant(8)\n"
        "  ROOT %lt = pred[] compare(%i, %n), direction=LT\n}\n\n"
        "%cond (t: (s32[], f32[64])) -> pred[] {\n  %t = (s32[], f32[64]) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%t), index=0\n"
        "  ROOT %f = pred[] fusion(%i), kind=kLoop, calls=%compare\n}", "", 8,
    ),
    "data": (
        "%cond (t: (s32[], s32[])) -> pred[] {\n  %t = (s32[], s32[]) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%t), index=0\n  %n = s32[] get-tuple-element(%t), index=1\n"
        "  ROOT %lt = pred[] compare(%i, %n), direction=LT\n}", "", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("written", CONDITIONS)
def test_how_often_a_loop_runs(written, mesh):
    condition, attributes, trips = CONDITIONS[written]
    text = loop(condition, f"  ROOT %g = {GATHER}", attributes)
    (found,) = collectives(text, mesh)
    assert (found.bytes, found.in_loop, found.trips) == (1024, True, trips)


@pytest.mark.parametrize(("added", "trips"), [("%two", 4), ("%x", 8)])
def test_an_unrolled_loop_counts_in_twos(added, trips, mesh):
    """XLA's loop of a windowed product runs two iterations in a body."""
    body = f"""  %i = s32[] get-tuple-element(%t), index=0
  %two = s32[]{{:T(128)}} constant(2)
  %next = s32[] add(%i, {added}), metadata={{op_name="jit(f)/dot_general"}}
  %g = {GATHER}
  ROOT %r = (s32[], f32[64]) tuple(%next, %x)"""
    (found,) = collectives(loop(CONDITIONS["a comparison"][0], body), mesh)
    assert found.trips == trips


def test_the_length_of_a_compiled_loop():
    """A scan of JAX, by this machine's own compiler, with its count and without."""
    scanned = jax.jit(lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c @ c), None), x, length=5))
    text = scanned.lower(jnp.ones((4, 4))).compile().as_text()
    for written in (text, text.replace("known_trip_count", "not_known")):
        module = parse(written)
        every = [one for block in module.computations.values() for one in block]
        (count,) = [module.trips(one) for one in every if one.opcode == "while"]
        assert count == 5


CHAIN = """
%part (x: f32[64]) -> f32[256] {
  %x = f32[64]{0} parameter(0)
  ROOT %g = f32[256]{0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}, CHAIN
}

ENTRY %main (x: f32[64], y: f32[100000]) -> f32[256] {
  %x = f32[64]{0} parameter(0)
  %y = f32[100000]{0} parameter(1)
  %async-collective-start = f32[256]{0} fusion(%x), kind=kCustom, calls=%part
  %f = f32[256]{0} fusion(%async-collective-start, %y), kind=kOutput, calls=%part, CYCLES
  ROOT %async-collective-done = f32[256]{0} fusion(%f), kind=kCustom, calls=%part
}
""".replace("CHAIN", 'frontend_attributes={chain_id="5"}').replace(
    "CYCLES", 'backend_config={"estimated_cycles":"1000"}'
)


def test_a_collective_in_three_fusions_counts_once(mesh):
    (found,) = collectives(CHAIN, mesh)
    assert (found.kind, found.bytes, found.bytes_sent) == ("all-gather", 1024, 768)


def test_a_collective_that_goes_on_in_a_loop_counts_once(mesh):
    """A TPU sends a part of it in each iteration."""
    text = """
%part (x: f32[64]) -> f32[256] {
  %x = f32[64]{0} parameter(0)
  ROOT %g = f32[256]{0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}, chain_id="5"
}

%body (s: (s32[], f32[256])) -> (s32[], f32[256]) {
  %s = (s32[], f32[256]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[256]{0} get-tuple-element(%s), index=1
  %f = f32[256]{0} fusion(%x), kind=kOutput, calls=%part
  ROOT %r = (s32[], f32[256]) tuple(%i, %f)
}

ENTRY %main (x: f32[64]) -> f32[256] {
  %x = f32[64]{0} parameter(0)
  %i = s32[] constant(0)
  %start = f32[256]{0} fusion(%x), kind=kCustom, calls=%part
  %t = (s32[], f32[256]) tuple(%i, %start)
  %w = (s32[], f32[256]) while(%t), condition=%c, body=%body, LOOP
  %last = f32[256]{0} get-tuple-element(%w), index=1
  ROOT %done = f32[256]{0} fusion(%last), kind=kCustom, calls=%part
}
""".replace("LOOP", 'backend_config={"known_trip_count":{"n":"8"}}')
    (found,) = collectives(text, mesh)
    assert (found.bytes, found.trips, found.in_loop) == (1024, 1, False)
    (walked,) = walk_schedule(parse(text), mesh, MACHINE, clock=1e9).collectives
    assert walked.collective == found


def test_a_part_that_two_instructions_read_counts_once(mesh):
    """An all-reduce of which each device reads its quarter, and a quarter of that again."""
    text = """
ENTRY %main (x: f32[256], i: s32[]) -> f32[64] {
  %x = f32[256]{0} parameter(0)
  %i = s32[] parameter(1)
  %r = f32[256]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  %own = f32[64]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={64}
  %some = f32[16]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={16}
  ROOT %s = f32[64]{0} pad(%own, %some), padding=0_0
}
"""
    (found,) = collectives(text, mesh)
    assert (found.equivalent_kind, found.bytes) == ("reduce-scatter", 256)


# --- The walk along the schedule -----------------------------------------------------------------


def scheduled(between, start="all-gather-start", done="all-gather-done"):
    """Return a program with some instructions between the parts of an all-gather of 768 bytes."""
    return parse(f"""
ENTRY %main (x: f32[64], y: f32[100000]) -> f32[256] {{
  %x = f32[64]{{0}} parameter(0)
  %y = f32[1000]{{0}} parameter(1)
  %s = (f32[64], f32[256]) {start}(%x), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}
{between}
  ROOT %d = f32[256]{{0}} {done}(%s)
}}
""")


def cycles(name, count):
    return (
        f"  %{name} = f32[1000]{{0}} fusion(%y), kind=kLoop, calls=%f, "
        f'backend_config={{"estimated_cycles":"{count}"}}'
    )


SENDING = 768 / 1e9  # bytes that a device sends of 1,024, by the link


@pytest.mark.parametrize(
    ("between", "total", "hidden"),
    [
        ("", SENDING, 0.0),
        (cycles("a", 500), SENDING, 5e-7 / SENDING),
        (cycles("a", 500) + "\n" + cycles("b", 500), 1e-6, 1.0),
    ],
)
def test_what_runs_between_the_parts_hides_the_sending(between, total, hidden, mesh):
    walk = walk_schedule(scheduled(between), mesh, MACHINE, clock=1e9)
    assert walk.seconds == pytest.approx(total)
    assert walk.hidden == pytest.approx(hidden)
    assert walk.waiting == pytest.approx(total - walk.computing)
    (record,) = walk.collectives
    assert record.asynchronous
    assert record.dtype == "float32"


def test_an_instruction_without_an_estimate_is_not_covered(mesh):
    never = cycles("a", 9223372036854775807) + "\n" + cycles("b", 100)
    walk = walk_schedule(scheduled(never), mesh, MACHINE, clock=1e9)
    assert (walk.covered, walk.computing) == (0.5, 1e-7)


def test_a_loop_takes_its_trips_and_a_collective_in_it_waits_each_time(mesh):
    condition, attributes, trips = CONDITIONS["a comparison"]
    text = loop(condition, f"  ROOT %g = {GATHER}", attributes)
    walk = walk_schedule(parse(text), mesh, MACHINE, clock=1e9)
    assert walk.seconds == pytest.approx(trips * SENDING)
    assert (walk.hidden, walk.collectives[0].asynchronous) == (0.0, False)


def test_a_chain_of_fusions_hides_what_its_fusions_compute(mesh):
    walk = walk_schedule(parse(CHAIN), mesh, MACHINE, clock=1e9)
    assert walk.seconds == pytest.approx(1e-6)
    assert walk.hidden == pytest.approx(1.0)


FUSED = f"""
%all-reduce-scatter (x: f32[256]) -> f32[64] {{
  %x = f32[256]{{0}} parameter(0)
  %r = f32[256]{{0}} all-reduce(%x), replica_groups={{{{0,1,2,3}}}}, to_apply=%add
  %i = u32[] constant(0)
  ROOT %own = f32[64]{{0}} dynamic-slice(%r, %i), dynamic_slice_sizes={{64}}
}}

ENTRY %main (x: f32[256], y: f32[100000]) -> f32[64] {{
  %x = f32[256]{{0}} parameter(0)
  %y = f32[1000]{{0}} parameter(1)
  %s = f32[64]{{0}} fusion(%x), kind=kCustom, calls=%all-reduce-scatter
{cycles("a", 500)}
  ROOT %d = f32[64]{{0}} negate(%s)
}}
"""


def test_what_a_fusion_reduces_and_slices_is_sent_at_once(mesh):
    """A TPU's compiler writes a reduce-scatter so."""
    walk = walk_schedule(parse(FUSED), mesh, MACHINE, clock=1e9)
    (sent,) = walk.collectives
    assert (sent.collective.equivalent_kind, sent.asynchronous) == ("reduce-scatter", False)
    assert walk.seconds == pytest.approx(SENDING + 5e-7)
    assert walk.hidden == 0


SPARSE_CORE = f"""
%offloaded (x: f32[64], t: token[]) -> f32[256] {{
  %t = token[] parameter(1)
  %x = f32[64]{{0}} parameter(0)
  ROOT %g = f32[256]{{0}} all-gather(%x), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}
}}, execution_thread="sparsecore"

ENTRY %main (x: f32[64], y: f32[100000]) -> f32[256] {{
  %x = f32[64]{{0}} parameter(0)
  %y = f32[1000]{{0}} parameter(1)
  %s = ((f32[64], token[]), f32[256]) call-start(%x), to_apply=%offloaded
{cycles("a", 1000)}
  ROOT %d = f32[256]{{0}} call-done(%s)
}}
"""


def test_what_a_sparse_core_sends_is_hidden_too(mesh):
    """A TPU's SparseCore runs it in a computation of its own, beside the instructions."""
    (found,) = collectives(SPARSE_CORE, mesh)
    assert (found.kind, found.bytes) == ("all-gather", 1024)
    walk = walk_schedule(parse(SPARSE_CORE), mesh, MACHINE, clock=1e9)
    (record,) = walk.collectives
    assert (record.collective, record.asynchronous) == (found, True)
    assert (walk.seconds, walk.hidden) == (pytest.approx(1e-6), pytest.approx(1.0))


def test_what_another_collective_waits_for_is_not_hidden(mesh):
    """The link sends one after another: the second one, at once, waits for both."""
    walk = walk_schedule(scheduled(f"  %other = {GATHER}"), mesh, MACHINE, clock=1e9)
    assert walk.seconds == pytest.approx(2 * SENDING)
    assert walk.waiting == pytest.approx(walk.sending)
    assert walk.hidden == pytest.approx(0.0)


def test_a_roofline_counts_products_and_bytes(mesh):
    """Without cycles: a product of 64 x 32 by 32 x 16, which its bytes bound."""
    text = """
ENTRY %main (a: f32[64,32], b: f32[32,16]) -> f32[64,16] {
  %a = f32[64,32]{1,0} parameter(0)
  %b = f32[32,16]{1,0} parameter(1)
  ROOT %c = f32[64,16]{1,0} custom-call(%a, %b), custom_call_target="gemm", DIMS
}
""".replace("DIMS", 'backend_config={"lhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[]}')
    walk = walk_schedule(parse(text), mesh, MACHINE)
    moved = 4 * (64 * 32 + 32 * 16 + 64 * 16)
    flops = 2 * 64 * 32 * 16
    assert walk.seconds == pytest.approx(max(moved / 1e9, flops / 1e12))
    assert walk.covered == 1
    slow = Machine("slow", {"float32": 1e9}, 1e10, 1e9, (LINK,))
    assert walk_schedule(parse(text), mesh, slow).seconds == pytest.approx(flops / 1e9)


# --- What is held at the peak ---------------------------------------------------------------------

MIB = "f32[512,512]{1,0}"


def held(body, result="(f32[512,512])", computations=""):
    """Return names and MiB of what a program with this body holds when it holds most."""
    text = f"""
{computations}
ENTRY %main (x: f32[512,512]) -> {result} {{
  %x = {MIB} parameter(0)
{body}
}}
"""
    return {v.instruction.name: v.bytes / 2**20 for v in held_at_peak(parse(text))}


def test_values_are_held_from_where_they_are_computed_to_their_last_reader():
    body = f"""
  %a = {MIB} dot(%x, %x)
  %view = f32[262144]{{0}} bitcast(%a)
  %b = {MIB} tanh(%a)
  %l = f32[] reduce(%b)
  %d = {MIB} multiply(%view, %b)
  %g = {MIB} dot(%x, %d)
  ROOT %r = ({MIB}, f32[]) tuple(%g, %l)"""
    assert held(body) == {"a": 1, "b": 1, "d": 1}  # results have memory of their own


FUSIONS = {
    "at once": "  %stack = {} fusion(%s, %row), kind=kLoop, calls=%update",
    "asynchronous": """
  %start = (({}, f32[1,512]), {}, u32[]) fusion-start(%s, %row), kind=kLoop, calls=%update
  %stack = {} fusion-done(%start)""",
}


@pytest.mark.parametrize("name", FUSIONS)
def test_what_a_loop_carries_stays_where_it_is_and_its_body_holds_more(name):
    computations = f"""
%update (p: f32[512,512], q: f32[1,512]) -> f32[512,512] {{
  %p = {MIB} parameter(0)
  %q = f32[1,512]{{1,0}} parameter(1)
  ROOT %u = {MIB} dynamic-update-slice(%p, %q)
}}
%body (t: (f32[512,512], f32[512,512])) -> (f32[512,512], f32[512,512]) {{
  %t = ({MIB}, {MIB}) parameter(0)
  %c = {MIB} get-tuple-element(%t), index=0
  %s = {MIB} get-tuple-element(%t), index=1
  %wide = f32[1024,512]{{1,0}} dot(%c, %c)
  %row = f32[1,512]{{1,0}} slice(%wide)
{FUSIONS[name].replace("{}", MIB)}
  ROOT %out = ({MIB}, {MIB}) tuple(%c, %stack)
}}"""
    body = f"""
  %c = {MIB} dot(%x, %x)
  %s = {MIB} broadcast(%x)
  %t = ({MIB}, {MIB}) tuple(%c, %s)
  %w = ({MIB}, {MIB}) while(%t), condition=%cond, body=%body
  %stack = {MIB} get-tuple-element(%w), index=1
  ROOT %r = f32[] reduce(%stack)"""
    row = 512 * 4 / 2**20
    assert held(body, "f32[]", computations) == {"c": 1, "s": 1, "wide": 2, "row": row}


def test_what_is_reduced_in_place_takes_the_memory_of_the_operand():
    """As JAX 0.11 writes it for a GPU; before, the result had memory of its own."""
    body = f"""
  %a = {MIB} dot(%x, %x)
  %s = (({MIB}), {MIB}) all-reduce-start(%a), output_to_operand_aliasing={{{{1}}: (0, {{}})}}
  %b = {MIB} all-reduce-done(%s)
  ROOT %l = f32[] reduce(%b)"""
    assert held(body, "f32[]") == {"a": 1}


def test_what_is_computed_by_element_takes_the_memory_of_an_operand():
    body = f"""
  %a = {MIB} dot(%x, %x)
  %b = {MIB} fusion(%a), kind=kLoop, calls=%f
  %c = {MIB} fusion(%a, %b), kind=kLoop, calls=%f
  ROOT %l = f32[] reduce(%c)"""
    assert held(body, "f32[]") == {"a": 1, "b": 1}


def test_tiles_are_filled_up_and_memory_on_the_chip_takes_nothing():
    body = """
  %tiled = bf16[512,3]{1,0:T(8,128)(2,1)} dot(%x, %x)
  %near = f32[512,512]{1,0:T(8,128)S(1)} tanh(%tiled)
  %start = (f32[512,512]{1,0}, f32[512,512]{1,0:T(8,128)S(1)}, u32[]) copy-start(%near)
  %far = f32[512,512]{1,0} copy-done(%start)
  ROOT %l = f32[] reduce(%far, %tiled)"""
    assert held(body, "f32[]") == {"tiled": 512 * 128 * 2 / 2**20, "start": 1}


def test_attributes_with_line_breaks_are_of_one_instruction():
    """As a kernel in Pallas writes them that describes itself in JSON."""
    module = parse(
        """
%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %k = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", kernel_metadata={
"metadata":"{\\"block_q\\": 128}"
}}, metadata={op_name="jit(step)/kernel"}
  ROOT %r = f32[8]{0} all-reduce(%k), replica_groups={{0,1}}, to_apply=%add
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %c = f32[8]{0} call(%x), to_apply=%body
}
"""
    )
    kernel = module.computations["body"][1]
    assert kernel.op_name == "jit(step)/kernel"
    assert [one.opcode for one in module.computations["body"]] == [
        "parameter", "custom-call", "all-reduce"
    ]  # fmt: skip
    assert [one.opcode for one in module.computations["main"]] == ["parameter", "call"]


def test_the_line_of_an_instruction():
    text = """HloModule jit_f, is_scheduled=true

FileNames
1 "/lib/library.py"
2 "/models/model.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=4 end_column=9}
2 {file_name_id=2 function_name_id=1 line=34 end_line=35 column=4 end_column=9}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}


ENTRY %main (x: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %y = f32[] tanh(%x), metadata={op_name="jit(f)/tanh" stack_frame_id=2}
}
"""
    module = parse(text)
    lines = [("/lib/library.py", "7"), ("/models/model.py", "34")]
    assert [list(module.lines(one)) for one in module.computations["main"]] == [[], lines]


# --- What an instruction computes and moves -------------------------------------------------------

# A convolution of 32 images of 64 x 64, 16 channels to 64, by a kernel of 3 x 3.
X, W, Y = "f32[32,64,64,16]{3,2,1,0}", "f32[64,3,3,16]{3,2,1,0}", "f32[32,64,64,64]{3,2,1,0}"
CONVOLUTION = (32 * 64 * 64, 64, 9 * 16, 1)


def call(out, target, **operands):
    """Return a library call, and its operands."""
    lines = ["HloModule m", "", "ENTRY %main (x: f32[1]) -> f32[1] {"]
    lines += [f"%{name} = {t} parameter({i})" for i, (name, t) in enumerate(operands.items())]
    names = ", ".join(f"%{name}" for name in operands)
    lines.append(f"ROOT %call = {out} custom-call({names}), custom_call_target={target}")
    module = parse("\n".join([*lines, "}", ""]))
    *given, instruction = module.computations[module.entry]
    return instruction, given


@pytest.mark.parametrize(("out", "kind", "operands"), [
    (Y, "Forward", {"x": X, "w": W}),
    (Y, "BiasActivationForward", {"x": X, "w": W, "bias": "f32[64]{0}"}),
    (X, "BackwardInput", {"g": Y, "w": W}),
    (W, "BackwardFilter", {"x": X, "g": Y}),
])  # fmt: skip
def test_a_convolution_by_a_library_and_its_gradients(out, kind, operands):
    labels = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f"
    instruction, given = call(f"({out}, u8[0]{{0}})", f'"__cudnn$conv{kind}", {labels}', **operands)
    assert products_of(instruction, given, []) == [(CONVOLUTION, "float32")]
    assert bytes_moved(instruction, given, []) >= 4 * 32 * 64 * 64 * (16 + 64)


QUERIES, KEYS = "bf16[4,1024,8,64]{3,2,1,0}", "bf16[4,512,2,64]{3,2,1,0}"
SCORES = '"intermediate_tensor_shape": {"type": "BF16", "dimensions": ["4","8","1024","512"]}'


@pytest.mark.parametrize(("mask", "rows"), [("NO_MASK", 1024), ("CAUSAL", 512)])
@pytest.mark.parametrize(("kind", "count"), [("", 2), ("Backward", 5)])
def test_an_attention_by_a_library(kind, count, mask, rows):
    """Of grouped heads too: those of queries count. Its products name contracting dims as well."""
    rest = f'"mask_type": "{mask}", "lhs_contracting_dims": ["3"]'
    config = f'backend_config={{"fmha": {{{SCORES}, {rest}}}}}'
    instruction, given = call(
        f"({QUERIES}, f32[4,8,1024]{{2,1,0}})", f'"__cudnn$fmhaSoftmax{kind}", {config}',
        q=QUERIES, k=KEYS, v=KEYS,
    )  # fmt: skip
    assert products_of(instruction, given, []) == [((rows, 512, 64, 32), "bfloat16")] * count


def test_a_fusion_that_reads_slices_moves_the_slices_and_its_result():
    """Of the last layer's rows, cut out where a loop's last turn stands alone, and of a stack that
    a loop reads; what is read whole as well counts whole."""
    text = """HloModule m

%add (kept: f32[8,256], rows: f32[4,256], both: f32[2,256], i: s32[]) -> f32[256] {
  %kept = f32[8,256]{1,0} parameter(0)
  %rows = f32[4,256]{1,0} parameter(1)
  %both = f32[2,256]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %zero = s32[] constant(0)
  %last = f32[1,256]{1,0} slice(%kept), slice={[7:8], [0:256]}
  %row = f32[1,256]{1,0} dynamic-slice(%rows, %i, %zero), dynamic_slice_sizes={1,256}
  %first = f32[1,256]{1,0} slice(%both), slice={[0:1], [0:256]}
  %least = f32[256]{0} reduce(%both, %zero), dimensions={0}, to_apply=%min
  %sum = f32[1,256]{1,0} add(%last, %row)
  %more = f32[1,256]{1,0} add(%sum, %first)
  %flat = f32[256]{0} bitcast(%more)
  ROOT %all = f32[256]{0} add(%flat, %least)
}

ENTRY %main (a: f32[8,256], b: f32[4,256], c: f32[2,256], d: s32[]) -> f32[256] {
  %a = f32[8,256]{1,0} parameter(0)
  %b = f32[4,256]{1,0} parameter(1)
  %c = f32[2,256]{1,0} parameter(2)
  %d = s32[] parameter(3)
  ROOT %fused = f32[256]{0} fusion(%a, %b, %c, %d), kind=kLoop, calls=%add
}
"""
    module = parse(text)
    *given, fusion = module.computations[module.entry]
    row = 256 * 4
    moved = bytes_moved(fusion, given, module.computations["add"])
    assert moved == row + row + 2 * row + 4 + row


def test_a_fusion_that_writes_a_slice_moves_the_slice(mesh):
    """What it writes there is computed from its other operands, and read once."""
    text = """HloModule m

%update (stack: f32[8,256], row: f32[256], i: s32[]) -> f32[8,256] {
  %stack = f32[8,256]{1,0} parameter(0)
  %row = f32[256]{0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %one = f32[1,256]{1,0} bitcast(%row)
  ROOT %new = f32[8,256]{1,0} dynamic-update-slice(%stack, %one, %i, %zero)
}

ENTRY %main (a: f32[8,256], b: f32[256], c: s32[]) -> f32[8,256] {
  %a = f32[8,256]{1,0} parameter(0)
  %b = f32[256]{0} parameter(1)
  %c = s32[] parameter(2)
  ROOT %fused = f32[8,256]{1,0} fusion(%a, %b, %c), kind=kLoop, calls=%update
}
"""
    module = parse(text)
    *given, fusion = module.computations[module.entry]
    assert bytes_moved(fusion, given, module.computations["update"]) == 2 * 256 * 4 + 4
    seconds = walk_schedule(module, mesh, MACHINE).seconds
    assert seconds == pytest.approx(MACHINE.traffic_seconds(2 * 256 * 4 + 4))
