"""Machines are values, and their seconds are those that a hand computes."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import plurax as px
from plurax import Machine
from plurax.analysis import Level
from plurax.errors import MachineError
from plurax.machine_fields import WIDTHS

NODE, CLUSTER = Level("node", 8, 300e9, 1e-6), Level("cluster", 32, 25e9, 10e-6)
PLAIN = Machine("plain", {"float32": 1e12, "bfloat16": 4e12}, 10**9, 1e11, (NODE, CLUSTER))

positive = st.floats(1e-30, 1e30)
numbers = st.just(0.0) | positive
names = st.text(st.characters(exclude_categories=["Cs"]))


kinds = st.builds(
    Machine,
    name=names,
    flops=st.dictionaries(st.sampled_from([*WIDTHS]), positive, min_size=1),
    memory=st.integers(1, 10**14),
    memory_bandwidth=positive,
    overhead=numbers,
    efficiency=st.floats(1e-9, 1.0),
    half_dim=numbers,
    product_efficiency=st.none() | st.floats(1e-9, 1.0),
    fast_memory=numbers,
    page_bandwidth=numbers,
    thread_share=st.floats(1e-9, 1.0),
    correction=positive,
)


@st.composite
def machines(draw):
    levels, devices = [], 1
    for _ in range(draw(st.integers(0, 3))):
        devices *= draw(st.integers(2, 9))
        levels.append(
            Level(draw(names), devices, draw(positive), draw(numbers), draw(st.booleans()))
        )
    machine = dataclasses.replace(draw(kinds), levels=levels)
    if devices == 1 or draw(st.booleans()):
        return machine
    first = draw(st.integers(1, devices - 1))
    groups = [(first, draw(kinds)), (devices - first, draw(kinds))]
    return Machine.uneven(machine.name, groups, levels)


# --- Values ---------------------------------------------------------------------------------------


@given(machines())
def test_toml_and_repr_round_trip(machine):
    again = Machine.from_toml(machine.to_toml())
    assert again == machine == eval(repr(machine))
    assert hash(again) == hash(machine)


def test_a_file_can_be_read_and_edited(tmp_path):
    path = tmp_path / "here.toml"
    Machine("here", {"float32": 1.5e11}, 8 * 10**9, 2e10, (Level("node", 2, 1e9, 2.5e-6),)).save(
        path
    )
    assert path.read_text() == (
        'name = "here"\nmemory = 8000000000\nmemory_bandwidth = 2e+10\noverhead = 0.0\n'
        "efficiency = 1.0\nhalf_dim = 0.0\ncorrection = 1.0\n\n[flops]\nfloat32 = 1.5e+11\n"
        '\n[[levels]]\nname = "node"\ndevices = 2\nbandwidth = 1e+9\nlatency = 2.5e-6\n'
    )
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"2e+10", b"20_000_000_000"))
    assert Machine.load(path).memory_bandwidth == 2e10


def test_it_is_frozen_and_its_rates_are_its_own():
    rates = {"float32": 1e12}
    machine = Machine("m", rates, 1, 1.0)
    rates["float32"] = 2.0
    assert machine.flops == {"float32": 1e12}
    with pytest.raises(dataclasses.FrozenInstanceError):
        machine.memory = 2


def test_it_shows_itself():
    text = str(Machine.preset("8xA100-80GB", nodes=4))
    assert text.splitlines()[0] == "4 nodes of 8xA100-80GB: 32 devices"
    for row in (
        "products in bfloat16: 312 Tflop/s", "memory: 80 GB, 2.04 TB/s",
        "node of 8: 300 GB/s, latency 3.4 µs", "cluster of 32: 25 GB/s, latency 9.6 µs",
        "reached at best: 80% of these rates, half of it at a smallest dim of 100",
    ):  # fmt: skip
        assert f"  {row}\n" in text + "\n"
    assert "<td" in Machine.preset("V100-32GB")._repr_html_()
    assert "node" not in str(Machine.preset("V100-32GB"))


# --- Seconds --------------------------------------------------------------------------------------


def test_products_lose_by_their_smallest_dim():
    machine = dataclasses.replace(PLAIN, efficiency=0.8, half_dim=100)
    # 2 · 3 · 1000 · 2000 · 300 operations at 1e12 · 0.8 · 300 / 400
    for m, n, k in ((1000, 2000, 300), (300, 1000, 2000), (2000, 300, 1000)):
        seconds = machine.product_seconds(m, n, k, "float32", batch=3)
        assert seconds == pytest.approx(3.6e9 / 0.6e12)
    assert machine.product_seconds(0, 5, 5, "float32") == 0
    assert PLAIN.product_seconds(10, 10, 10, "float32") == 2e3 / 1e12


@pytest.mark.parametrize(
    ("rows", "batch", "counted"),
    [
        pytest.param(2**9, 1, 4 * 2**22, id="alone by one thread"),
        pytest.param(2**9, 96, 96 * 4 * 2**22, id="each of a batch"),
        pytest.param(2**11, 1, 4 * 2**23, id="more threads, which wait"),
        pytest.param(2**13, 1, 2**26, id="all threads at work"),
    ],
)
def test_a_thread_computes_a_small_product(rows, batch, counted):
    """Of four threads one computes up to 2**23 operations, and four no product faster than that."""
    cores = dataclasses.replace(PLAIN, thread_share=0.25)
    assert cores.product_seconds(rows, 64, 64, "float32", batch=batch) == counted / 1e12
    assert "25% on one thread" in str(cores)


def test_products_may_reach_another_share_than_traffic():
    machine = dataclasses.replace(PLAIN, efficiency=0.5, product_efficiency=0.8)
    assert machine.product_seconds(10, 10, 10, "float32") == 2e3 / 0.8e12
    assert machine.traffic_seconds(5e10) == 1.0
    assert "reached at best: 50% of these rates, 80% in products" in str(machine)
    kinds = Machine("a", {"float32": 1e12}, 1e9, 1e9), Machine("b", {"float32": 1e12}, 1e9, 1e9)
    assert (
        Machine.uneven(
            "two", [(1, kinds[0]), (1, kinds[1])], [Level("node", 2, 1e9)]
        ).product_efficiency
        is None
    )
    kinds = kinds[0], dataclasses.replace(kinds[1], product_efficiency=0.7)
    assert (
        Machine.uneven(
            "two", [(1, kinds[0]), (1, kinds[1])], [Level("node", 2, 1e9)]
        ).product_efficiency
        == 0.7
    )


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [("float32", 1e12), ("bfloat16", 4e12), ("float16", 4e12), ("float64", 1e12), ("int32", 1e12)],
)
def test_a_dtype_without_a_rate_takes_that_of_one_as_wide_or_the_slowest(dtype, rate):
    assert PLAIN.product_seconds(10, 10, 10, dtype) == 2e3 / rate


def test_traffic():
    assert PLAIN.traffic_seconds(5e10) == 0.5
    assert dataclasses.replace(PLAIN, efficiency=0.5).traffic_seconds(5e10) == 1.0


@pytest.mark.parametrize(
    ("kind", "group_size", "stride", "seconds"),
    [
        # Inside a node: 3e9 bytes at 300e9; log2(8) = 3 messages of 1 µs.
        ("all-gather", 8, 1, 0.01 + 3e-6),
        ("all-reduce", 8, 1, 0.01 + 3e-6),
        ("reduce-scatter", 4, 2, 0.01 + 2e-6),
        # Axes of 4 and 8 that the inner has: one member in each node, 25e9 for each device.
        ("all-reduce", 4, 8, 0.12 + 20e-6),
        ("all-gather", 2, 16, 0.12 + 10e-6),
        # Two members in a node, four apart, share what leaves it; then all eight.
        ("all-gather", 8, 4, 0.06 + 1e-6 + 20e-6),
        ("all-reduce", 32, 1, 0.015 + 3e-6 + 20e-6),
        # All to all: 24 of a device's 31 parts leave the node.
        ("all-to-all", 32, 1, 0.12 * 24 / 31 + 3e-6 + 20e-6),
        ("all-to-all", 4, 8, 0.12 + 20e-6),
        # To the next stage: inside a node, or out of it.
        ("collective-permute", 4, 1, 0.01 + 1e-6),
        ("collective-permute", 4, 8, 0.12 + 10e-6),
        ("collective-permute", 16, 2, 0.12 + 10e-6),
    ],
)
def test_a_collective_is_bound_by_the_slowest_level_it_spans(kind, group_size, stride, seconds):
    found = PLAIN.collective_seconds(kind, 3e9, group_size, stride)
    assert found == pytest.approx(seconds, rel=1e-12)
    half = dataclasses.replace(PLAIN, efficiency=0.5)
    waits = PLAIN.collective_seconds(kind, 0.0, group_size, stride)
    assert half.collective_seconds(kind, 3e9, group_size, stride) == pytest.approx(
        2 * (seconds - waits) + waits
    )


def test_groups_that_do_not_fit_nodes():
    """Groups of 6 in nodes of 8: the second has two devices in one node and four in the next."""
    six = PLAIN.collective_seconds("all-gather", 3e9, 6, mesh_devices=24)
    assert six == pytest.approx(3e9 / (2 * 25e9) + math.ceil(math.log2(2)) * 1e-6 + 2 * 10e-6)
    alone = PLAIN.collective_seconds("all-gather", 3e9, 6, mesh_devices=6)
    assert alone == pytest.approx(0.01 + 3e-6)


def test_a_group_of_one_sends_nothing():
    assert PLAIN.collective_seconds("all-reduce", 0.0, 1) == 0
    assert Machine.preset("V100-16GB").collective_seconds("all-reduce", 0.0, 1) == 0


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.integers(2, 12))
def test_members_in_a_node_are_counted(group_size, stride, blocks, node):
    """By the definition: every group of the mesh, every node it has devices in."""
    mesh = group_size * stride * blocks
    groups = [
        [first + i * stride for i in range(group_size)]
        for block in range(blocks)
        for first in range(block * group_size * stride, block * group_size * stride + stride)
    ]
    fewest = min(
        sum(one // node == other // node for other in group) for group in groups for one in group
    )
    levels = (Level("a", node, 1e30), Level("b", 12 * 12 * 4 * node, 1.0))
    machine = Machine("m", {"float32": 1.0}, 1, 1.0, levels)
    seconds = machine.collective_seconds("all-gather", 1.0, group_size, stride, mesh_devices=mesh)
    assert seconds == pytest.approx(0 if fewest == group_size else 1 / fewest, abs=1e-20)


@pytest.mark.parametrize(
    ("kind", "group", "seconds"),
    [
        ("all-gather", (4, 1), 1.0),  # one axis
        ("all-gather", (4, 4), 1 / 3),  # the other one
        ("all-gather", (16, 1), 1 / 4),  # both at once
        ("all-reduce", (8, 2), 1 / 4),
        ("collective-permute", (16, 1), 1.0),  # one path, by the slower links
        ("all-gather", (32, 1), 1 / 4),  # the 16 members of a torus send 1/16 each beyond it
    ],
)
def test_a_group_of_both_axes_of_a_torus_uses_the_links_of_both(kind, group, seconds):
    levels = [Level("row", 4, 1.0), Level("slice", 16, 3.0, torus=True), Level("slices", 32, 0.5)]
    torus = Machine("torus", {"float32": 1.0}, 1, 1.0, levels)
    assert torus.collective_seconds(kind, 1.0, *group) == pytest.approx(seconds)


def test_whether_a_level_is_of_a_torus_is_true_or_false():
    with pytest.raises(MachineError, match=r"Level\('row'\): torus=1, and must be true or false"):
        Level("row", 4, 1.0, torus=1)
    assert "slice of 256: 100 GB/s, latency 1 µs, another axis of the torus" in str(
        Machine.preset("256xTPU-v5e")
    )


# --- Devices that differ --------------------------------------------------------------------------

FAST = Machine("fast", {"float32": 4e12, "bfloat16": 8e12}, 80e9, 2e12, efficiency=0.9, half_dim=50)
SLOW = Machine("slow", {"float32": 1e12}, 32e9, 3e12, overhead=1e-6)
LAB = Machine.uneven("lab", [(8, FAST), (8, SLOW), (16, FAST)], (NODE, CLUSTER))


def test_an_uneven_machine_is_as_fast_as_its_slowest_device():
    assert LAB.flops == {"float32": 1e12, "bfloat16": 1e12}
    assert (LAB.memory, LAB.memory_bandwidth, LAB.overhead) == (32e9, 2e12, 1e-6)
    assert (LAB.efficiency, LAB.half_dim, LAB.devices) == (0.9, 50, 32)
    assert "8 × slow: memory: 32 GB, 3 TB/s" in str(LAB)


def test_the_devices_of_a_stage_must_be_alike():
    assert LAB.rates_of(range(8)) == FAST
    assert LAB.rates_of([8, 15, 12]) == SLOW
    assert LAB.rates_of([*range(4), *range(16, 32)]) == FAST  # two groups of one kind
    assert PLAIN.rates_of([0, 31]) == PLAIN
    with pytest.raises(MachineError, match="lab: 1 × fast and 8 × slow would share one stage, and"):
        LAB.rates_of(range(7, 16))


def test_the_kind_of_a_group_is_one_device():
    with pytest.raises(MachineError, match="'plain' of a group is a machine of 32 devices"):
        Machine.uneven("m", [(32, PLAIN)], (NODE, CLUSTER))


# --- Presets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", Machine.presets())
def test_every_preset_is_a_machine(name):
    machine = Machine.preset(name, nodes=3)
    largest = int(name.split("x")[0])
    assert machine.devices == 3 * largest
    assert 0.5 < machine.efficiency < 1
    assert machine.levels[0].bandwidth > machine.levels[-1].bandwidth
    assert machine.memory > 10**10
    one = Machine.preset(name.split("x", 1)[1])
    assert (one.devices, one.levels, one.flops) == (1, (), machine.flops)
    assert Machine.preset(name) == dataclasses.replace(
        machine, name=name, levels=machine.levels[:-1]
    )


def test_what_the_presets_are():
    assert Machine.presets() == [
        "8xV100-16GB", "8xV100-32GB", "8xA100-40GB", "8xA100-80GB", "8xH100-80GB", "8xH200-141GB",
        "8xB200-180GB", "72xGB200-186GB", "4096xTPU-v4", "256xTPU-v5e", "8960xTPU-v5p",
        "256xTPU-v6e", "18432xTPU-7x", "8xMI300X-192GB", "8xAscend-910",
    ]  # fmt: skip
    tpus = [Machine.preset(f"{n}xTPU-v5e").levels for n in (8, 256)]
    assert [[level.devices for level in levels] for levels in tpus] == [[8], [16, 256]]
    assert [level.devices for level in Machine.preset("4xA100-40GB", nodes=2).levels] == [4, 8]


def test_an_amd_gpu_is_its_data_sheet():
    """304 compute units at 2.1 GHz; seven links of 64 GB/s in each direction."""
    machine = Machine.preset("8xMI300X-192GB")
    a_cycle = {"bfloat16": 2048, "float16": 2048, "float32": 256, "float64": 256, "int8": 4096}
    for dtype, operations in a_cycle.items():
        assert machine.flops[dtype] == pytest.approx(304 * 2.1e9 * operations, rel=1e-3)
    assert (machine.memory, machine.memory_bandwidth) == (192e9, 5.3e12)
    assert machine.levels[0].bandwidth == 7 * 64e9
    assert machine.platform == "gpu"
    assert (machine.product_efficiency, machine.efficiency) == (0.51, 0.8)


def test_the_machine_in_the_guide_can_be_read():
    guide = Path(__file__).parents[2] / "docs" / "guides" / "machines.md"
    (written,) = re.findall("```toml\n(.*?)```", guide.read_text("utf-8"), re.DOTALL)
    machine = Machine.from_toml(written)
    assert (machine.devices, machine.flops["bfloat16"]) == (8, 71e12)


# --- Mistakes -------------------------------------------------------------------------------------

LEVEL = "[[levels]]\nname = 'node'\ndevices = 8\nbandwidth = 1e9\n"
MACHINE = "name = 'm'\nmemory = 1e9\nmemory_bandwidth = 1e10\nflops = {float32 = 1e12}\n"
GROUP = "[[groups]]\ndevices = 2\n" + MACHINE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MACHINE.replace("memory = 1e9\n", ""), "a Machine needs 'memory', which is missing"),
        (MACHINE + LEVEL.replace("devices = 8\n", ""), "a Level needs 'devices', which is missing"),
        (MACHINE + "overhed = 1e-6\n", "of a Machine. Did you mean 'overhead'? The fields are"),
        (MACHINE + LEVEL + "speed = 1\n", "'speed' is not a field of a Level"),
        (MACHINE + "efficiency = 1.5\n", "efficiency=1.5, and is the share of the peak rates"),
        (
            MACHINE + "product_efficiency = 2.0\n",
            "product_efficiency=2.0, and is the share of the peak rates",
        ),
        (MACHINE + "efficiency = 0\n", "efficiency=0, and must be a finite number above 0"),
        (MACHINE + "half_dim = -1\n", "half_dim=-1, and must be a finite number of at least 0"),
        (MACHINE + "overhead = inf\n", "overhead=inf, and must be a finite number of at least 0"),
        (MACHINE.replace("1e10", "'1 TB/s'"), "bytes/s or seconds without a prefix: 80 GB"),
        (MACHINE.replace("1e9", "true"), "memory=True, and must be a finite number above 0"),
        (MACHINE.replace("1e12", "-1e12"), r"flops['float32']=-1000000000000.0, and must be a fin"),
        (MACHINE.replace("float32", "fp32"), "flops has a rate for 'fp32', which is none of"),
        (MACHINE.replace("{float32 = 1e12}", "1e12"), "and must be rates by dtype: {'float32'"),
        (MACHINE + LEVEL.replace("8", "1"), "devices or nodes; give a whole number of at least 2"),
        (MACHINE + LEVEL + LEVEL, "level 'node' of 8 devices does not hold whole groups of level"),
        (MACHINE + LEVEL.replace("1e9", "nan"), "Level('node'): bandwidth=nan, and must be"),
        (MACHINE + "levels = 8\n", "levels=8, and must be tables, one [[levels]] for each"),
        (MACHINE + LEVEL + GROUP, "'memory' is beside [[groups]]. Where devices differ, each "),
        ("name = 'm'\n" + LEVEL + GROUP, "its groups have 2 devices and its levels 8; give every"),
        ("name = 'm'\n" + LEVEL + GROUP.replace("devices = 2", "devices = '2'"),
         "'2' is not a number of devices or nodes"),
        (LEVEL + GROUP.replace("devices = 2", "devices = 8"), "a Machine needs 'name', which is"),
        (LEVEL + GROUP + "levels = [{name = 'a'}]\n", "and must be levels of links"),
        (LEVEL + GROUP.replace("devices = 2\n", ""), "a group needs 'devices', which is missing"),
        ("name = \n", "is not a machine in TOML"),
    ],
)  # fmt: skip
def test_what_is_no_machine_is_refused(text, said, tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(text)
    with pytest.raises(MachineError) as raised:
        Machine.load(path)
    assert said in str(raised.value)
    does_not_describe = "" if text == "name = \n" else "does not describe a machine: "
    assert str(raised.value).startswith(f"{path} {does_not_describe}")


def test_a_file_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(MachineError, match="is not a machine in TOML"):
            Machine.load(path)


def test_presets_that_are_not_there():
    with pytest.raises(MachineError, match="Did you mean '8xH100-80GB'") as raised:
        Machine.preset("8xH100")
    assert "There are 8xV100-16GB, 8xV100-32GB, 8xA100-40GB" in str(raised.value)
    with pytest.raises(MachineError, match="a node holds 1 to 8 A100-80GB; more come as nodes"):
        Machine.preset("16xA100-80GB")
    with pytest.raises(MachineError, match="a node holds 1 to 8"):
        Machine.preset("0xA100-80GB")
    with pytest.raises(MachineError, match="nodes: 0 is not a number of devices or nodes"):
        px.Machine.preset("8xA100-80GB", nodes=0)


def test_a_group_that_is_larger_than_the_machine():
    with pytest.raises(MachineError, match="a collective over 57 devices, and plain has 32"):
        PLAIN.collective_seconds("all-reduce", 1.0, 8, 8)


def test_a_machine_has_a_platform():
    assert {Machine.preset(name).platform for name in ("8xH100-80GB", "4xV100-32GB")} == {"gpu"}
    assert Machine.preset("8xTPU-v5e").platform == "tpu"
    assert PLAIN.platform == "cpu"
    assert "platform" not in PLAIN.to_toml()
    saved = dataclasses.replace(PLAIN, platform="gpu")
    assert Machine.from_toml(saved.to_toml()) == saved
    with pytest.raises(px.errors.MachineError, match="platform='ipu', and must be 'cpu', 'gpu'"):
        dataclasses.replace(PLAIN, platform="ipu")
