"""Plans are values: they print, compare, hash, load and save, and refuse what cannot run."""

import dataclasses
import os
import subprocess
import sys
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import models

import plurax as px
from plurax import Plan
from plurax.errors import PlanError
from plurax.jaxpr.remat import POLICIES
from plurax.launch.network_hosts import free_port
from plurax.pipeline.schedule import SCHEDULES
from plurax.plan import ContextStrategy, RematPolicy, ScheduleName
from plurax.plan_text import CONTEXT_TEXTS, REMAT_TEXTS, ZERO_TEXTS
from plurax.planner.costs import REDUCTION

uneven = st.lists(st.integers(1, 9), min_size=2, max_size=9).map(
    lambda counts: Plan(data=len(counts), microbatches=counts)
)
plans = uneven | st.builds(
    Plan,
    data=st.integers(1, 64),
    microbatches=st.integers(1, 64),
    precision=st.sampled_from(("float32", "bfloat16")),
    member=st.integers(1, 64),
    chunk=st.none() | st.integers(1, 64),
    batch_dim=st.sampled_from((None, "major", "minor")),
    schedule=st.sampled_from(("1f1b", "gpipe", ("F0 F1 B0 B1", "F0 B0 F1 B1"))),
    layers=st.none() | st.integers(1, 9).map(lambda count: [count]),
)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
entries = st.permutations([None, "tensor", None]) | st.permutations([("tensor",), None, None])
entries = st.tuples(entries, st.integers(0, 3)).map(lambda drawn: tuple(drawn[0][: drawn[1]]))
shardings = st.dictionaries(texts, entries | entries.map(lambda rest: (..., *rest)), max_size=3)


@given(plans)
def test_toml_round_trip(plan):
    assert Plan.from_toml(plan.to_toml()) == plan


@given(shardings)
def test_any_pattern_is_written_so_that_it_can_be_read(shardings):
    plan = Plan(shardings=shardings)
    assert Plan.from_toml(plan.to_toml()) == plan


def test_patterns_with_quotes_backslashes_and_controls():
    rules = {'a"b': ("tensor",), "c\\d\n": (None,), "\x7f\x01 ü 😀": (..., ("tensor",))}
    assert dict(Plan.from_toml(Plan(shardings=rules).to_toml()).shardings) == rules


def test_of_rules_with_one_pattern_the_first_counts():
    plan = Plan(shardings=(("a", ("tensor",)), ("a", (None,))))
    assert plan.shardings == (("a", ("tensor",)),)


@given(plans)
def test_repr_rebuilds_the_plan(plan):
    assert eval(repr(plan)) == plan


@given(plans, plans)
def test_equal_plans_hash_alike(a, b):
    assert (a == b) == (dataclasses.astuple(a) == dataclasses.astuple(b))
    again = Plan.from_toml(a.to_toml())
    assert again is not a
    assert hash(again) == hash(a)


def test_microbatches_of_replicas():
    plan = Plan(data=2, microbatches=[3, np.int32(1)])
    assert repr(plan) == "Plan(data=2, microbatches=(3, 1))"
    assert plan.sizes_text() == "data=2, microbatches=(3, 1)"
    assert "microbatches = [3, 1]\n" in plan.to_toml()
    assert (plan.replica_microbatches, plan.most_microbatches, plan.parts) == ((3, 1), 3, 4)
    assert Plan(data=3, microbatches=(2, 2, 2)) == Plan(data=3, microbatches=2)
    assert Plan(microbatches=[4]) == Plan(microbatches=4)
    text = plan.explain(batch_size=10)
    assert "each device computes its number of equal microbatches, sums the gradients" in text
    assert "batch of 10: 3 + 1 = 4 microbatches × 3 examples; 2 of 12 rows are padding." in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"microbatches": (3, 1)}, "has 2 numbers of microbatches: give one for each device"),
        ({"data": 2, "microbatches": [3]}, "has 1 number of microbatches"),
        (
            {"data": 2, "microbatches": (3, 0)},
            "must be a whole number of at least 1; microbatches=",
        ),
        ({"data": 2, "microbatches": ()}, "must be a whole number of at least 1"),
        (
            {"data": 2, "microbatches": (3, 1), "zero": 2},
            "from zero=2 on all devices .* Use zero=1",
        ),
        ({"data": 2, "microbatches": (3, 1), "zero": 3}, "communicate in every microbatch"),
        ({"data": 2, "microbatches": (3, 1), "pipeline": 2}, "follow one schedule"),
        (
            {"data": 2, "microbatches": (3, 1), "shardings": {"w": ("data", None)}},
            "a rule splits a parameter over `data`, whose devices send rows",
        ),
    ],
)
def test_microbatches_that_no_replicas_have(fields, message):
    with pytest.raises(PlanError, match=message):
        Plan(**fields)


@given(plans, st.integers(1, 10_000))
def test_padded_size_is_the_next_multiple(plan, size):
    rows = plan.padded_size(size)
    unit = plan.parts
    assert rows % unit == 0
    assert size <= rows < size + unit
    assert plan.placed_rows(size) * unit == rows * plan.data * plan.most_microbatches


def test_save_and_load(tmp_path):
    rules = {"*/in": (..., None, "tensor")}
    plan = Plan(data=4, microbatches=8, precision="bfloat16", shardings=rules)
    plan.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == plan
    assert (tmp_path / "plan.toml").read_text() == (
        'data = 4\nmicrobatches = 8\nprecision = "bfloat16"\nmember = 1\n'
        'pipeline = 1\nschedule = "1f1b"\ncontext = 1\ncontext_strategy = "gather"\n'
        "tensor = 1\nzero = 0\n"
        'bucket_bytes = 4000000\nremat = "none"\n'
        '\n[shardings]\n"*/in" = ["...", "replicated", "tensor"]\n'
    )


def test_a_file_of_another_editor_is_read(tmp_path):
    """With a mark of its encoding, and lines that end as on Windows."""
    path = tmp_path / "plan.toml"
    path.write_bytes(b"\xef\xbb\xbfdata = 2\r\nzero = 1\r\n")
    assert Plan.load(path) == Plan(data=2, zero=1)


def test_what_a_plan_names_is_what_there_is():
    """A plan imports no JAX, so it has the names alone."""
    assert sorted(get_args(ScheduleName)) == sorted(SCHEDULES)
    assert get_args(RematPolicy) == tuple(POLICIES)
    assert {"none", *REMAT_TEXTS} == set(POLICIES)
    assert (0, *ZERO_TEXTS) == tuple(REDUCTION)
    assert get_args(ContextStrategy) == tuple(CONTEXT_TEXTS)


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().data = 2


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, None])
@pytest.mark.parametrize("field", ["data", "microbatches", "member"])
def test_sizes_must_be_positive(field, value):
    with pytest.raises(PlanError, match=rf"Plan\({field}=.*must be a whole number of at least 1"):
        Plan(**{field: value})


@pytest.mark.parametrize("value", [3.0, True, "3", None, 4, -1, [3], np.ones(2)])
def test_zero_must_be_a_whole_number(value):
    with pytest.raises(PlanError, match=r"Plan\(zero=.*: zero must be one of 0, 1, 2, 3\."):
        Plan(zero=value)


def test_integers_of_numpy_are_whole_numbers():
    plan = Plan(data=np.int64(4), microbatches=np.uint8(2), zero=np.int32(1), chunk=np.int64(3))
    assert plan == Plan(data=4, microbatches=2, zero=1, chunk=3)
    assert all(type(size) is int for size in (plan.data, plan.microbatches, plan.zero, plan.chunk))
    assert Plan.from_toml(plan.to_toml()) == plan


@pytest.mark.parametrize(
    ("schedule", "close"),
    [("gpip", "gpipe"), (("gpip",), "gpipe"), (["1F1B"], "1f1b"), (("zb_h1",), "zb-h1"),
     ("F0 B0", None), (("F0 B0", ""), None), ((), None), (3, None), ((1, 2), None), ({}, None)],
)  # fmt: skip
def test_what_is_no_schedule_is_not_taken_for_one_by_hand(schedule, close):
    match = "the schedules that have a name are gpipe, 1f1b, eager-1f1b, interleaved, zb-h1"
    with pytest.raises(PlanError, match=match) as raised:
        Plan(pipeline=2, schedule=schedule)
    assert ("Did you mean" in str(raised.value)) == (close is not None)
    assert close is None or f"Did you mean {close!r}?" in str(raised.value)


def test_a_list_of_one_name_is_the_name():
    assert Plan(schedule=["zb-h1"]) == Plan(schedule="zb-h1")


def test_precision_must_be_known():
    with pytest.raises(PlanError, match=r"precision must be one of 'float32', 'bfloat16'"):
        Plan(precision="fp16")


def test_a_chunk_must_be_positive_or_left_out():
    with pytest.raises(PlanError, match=r"chunk=0.*at least 1; leave it out to have it chosen"):
        Plan(chunk=0)


def test_batch_dim_must_be_known():
    with pytest.raises(PlanError, match=r"batch_dim must be one of 'major', 'minor'"):
        Plan(batch_dim="last")


def test_too_few_devices_for_members():
    match = r"8 devices \(member=4 × data=2\) and 6 are available; member=3 would fit"
    with pytest.raises(PlanError, match=match):
        Plan(member=4, data=2).check_devices(6)


def test_too_few_devices():
    with pytest.raises(
        PlanError,
        match=r"the plan needs 8 devices \(data=8\) and 6 are available; data=6 would fit",
    ):
        Plan(data=8).check_devices(6)
    Plan(data=8).check_devices(8)


def test_toml_with_an_unknown_key():
    with pytest.raises(PlanError, match=r"'microbatch' is not a field.*mean 'microbatches'"):
        Plan.from_toml("microbatch = 2")


def test_toml_that_is_none(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("data: 4")
    with pytest.raises(PlanError, match=r"(?s)plan.toml is not a plan in TOML.*data = 4"):
        Plan.load(path)
    with pytest.raises(PlanError, match=r"missing.toml is not a plan.*No such file"):
        Plan.load(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data = 4.0", "Plan(data=4.0): data must be a whole number of at least 1"),
        ('data = "4"', "Plan(data='4'): data must be a whole number"),
        ("data = true", "Plan(data=True): data must be a whole number"),
        ("data = [4]", "Plan(data=[4]): data must be a whole number"),
        ("data = 1979-05-27", "Plan(data=datetime.date(1979, 5, 27)): data must be a whole"),
        ("[data]\nsize = 4", "Plan(data={'size': 4}): data must be a whole number"),
        ("chunk = 0", "leave it out to have it chosen"),
        ("stages = 2.5", "Plan(stages=2.5): stages must be a whole number"),
        ("stages = 3\npipeline = 2", "every device needs the same number of stages"),
        ("zero = 3.0", "Plan(zero=3.0): zero must be one of 0, 1, 2, 3."),
        ("zero = true", "Plan(zero=True): zero must be one of 0, 1, 2, 3."),
        (
            'remat = "all"',
            "Plan(remat='all'): remat must be one of 'none', 'dots', 'full', 'offload'",
        ),
        (
            "remat = true",
            "Plan(remat=True): remat must be one of 'none', 'dots', 'full', 'offload'",
        ),
        ("remat = 1", "Plan(remat=1): a number is the share of the bytes of matrix products"),
        ("remat = 0.0", "Plan(remat=0.0): a number is the share of the bytes"),
        ("remat = nan", "Plan(remat=nan): a number is the share of the bytes"),
        ('precision = ["float32"]', "precision must be one of 'float32', 'bfloat16'"),
        (
            "batch_dim = 0",
            "Plan(batch_dim=0): batch_dim must be one of 'major', 'minor', or left out.",
        ),
        (
            'reduce_dtype = "fp8"',
            "Plan(reduce_dtype='fp8'): reduce_dtype must be one of 'bfloat16', or left out.",
        ),
        ("schedule = 1", "Plan(schedule=1): the schedules that have a name are"),
        ("schedule = [1, 2]", "Plan(schedule=[1, 2]): the schedules that have a name are"),
        ('schedule = "gpip"', "Did you mean 'gpipe'?"),
        ("shardings = 3", "Plan(shardings=3): give a dict of rules"),
        ('shardings = "a"', "Plan(shardings='a'): give a dict of rules"),
        ("shardings = [1]", "Plan(shardings=[1]): give a dict of rules"),
        ('[shardings]\na = "tensor"', "a rule has one entry for each dim in a tuple"),
        ("[shardings]\na = 3", "a rule has one entry for each dim in a tuple"),
        ("[shardings]\na = [3]", "over 'data'; none over 3"),
        ('[shardings]\na = ["member"]', "over 'data'; none over 'member'"),
        (
            '[shardings]\na = ["whole"]',
            "For a dim that is not split write None, which is 'replicated'",
        ),
        ('[shardings]\na = ["tensor", "tensor"]', "over 'data'; not two over 'tensor'"),
        ("[shardings]\na = [{b = 1}]", "over 'data'; none over {'b': 1}"),
        ('[shardings]\na = ["tensor", "..."]', "none over Ellipsis"),
        ("strategies = 3", "the strategies of equations are a table with `traced`"),
        ('[strategies]\ntraced = "0a"', "the strategies of equations are a table with `traced`"),
        ('[strategies]\ntraced = "0a"\nequations = [3]', "the strategies of equations are a table"),
        (
            '[strategies]\ntraced = "0a"\nequations = [{equation = "14"}]',
            "the strategies of equations are a table",
        ),
        (
            '[strategies]\ntraced = "0a"\nequations = [{equation = "add", inputs = []}]',
            "an equation is a path and an operator",
        ),
        (
            '[strategies]\ntraced = "0a"\nequations = [{equation = "3 add", inputs = "tensor"}]',
            "give a list for each operand",
        ),
        (
            '[strategies]\ntraced = "0a"\nequations = [{equation = "3 add", inputs = [[3]]}]',
            "give a list for each operand",
        ),
        ("data = 4\ndata = 2", "is not a plan in TOML (Cannot overwrite a value"),
        ("data 4", "is not a plan in TOML (Expected '=' after a key"),
        ("tensors = 4", "'tensors' is not a field of a plan. Did you mean 'tensor'?"),
        ("quantize = 4", "'quantize' is not a field of a plan. The fields are data,"),
    ],
)
def test_toml_of_every_wrong_kind(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(PlanError) as raised:
        Plan.load(path)
    assert message in str(raised.value)
    first = str(raised.value).split(": ")[0]
    assert first.startswith(str(path))
    if "Plan(" in message:
        assert first.endswith("is not a plan that can run")


def test_toml_that_is_no_text(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_bytes(b"data = \xff")
    with pytest.raises(PlanError, match=r"plan.toml is not a plan in TOML \('utf-8' codec"):
        Plan.load(path)
    with pytest.raises(PlanError, match=r"is not a plan in TOML \(Is a directory"):
        Plan.load(tmp_path)


def test_explain_counts_the_places():
    text = Plan(data=4, microbatches=8).explain(batch_size=100)
    assert "4 devices × 8 microbatches × 4 examples; 28 of 128 rows are padding." in text
    assert "bfloat16" in Plan(precision="bfloat16").explain()
    long = Plan(context=4, stream=8, context_strategy="ring", zero=1).explain()
    assert "each device has tokens of all sequences" in long
    assert "split over 4 devices;\n    keys and values go around in a ring" in long
    assert "optimizer's state is split over data and context" in long
    assert "add them up over data" in Plan(data=2, reduce_dtype="bfloat16").explain()
    assert Plan.from_toml(Plan(reduce_dtype="bfloat16").to_toml()).reduce_dtype == "bfloat16"


def test_explain_has_a_line_for_each_strategy():
    same = [{"equation": f"{n} add", "inputs": [["tensor"], []], "where": "net.py:7 (block)"}
            for n in (3, 9)]  # fmt: skip
    loop = {"equation": "4/row1 scan", "inputs": [["replicated", "partial:tensor"]]}
    found = {"traced": "0a", "equations": [*same, loop]}
    lines = Plan(tensor=2, strategies=found).explain().splitlines()
    assert lines[0] == "Plan(tensor=2): 2 devices"
    first = lines.index("  strategies: 3 equations are computed in another way than the default")
    assert lines[first + 1 : first + 3] == [
        "    net.py:7 (block), add: dim 0 over tensor; as it comes (2 times)",
        "    equation 4/row1, scan, row1: partial over tensor",
    ]
    many = {"traced": "0a", "equations": [{**loop, "equation": f"{n} add"} for n in range(30)]}
    shown = Plan(tensor=2, strategies=many).strategies.lines()
    assert (len(shown), shown[-1]) == (13, "and 19 more")


def test_a_cache_that_mixes_collectives_is_refused(monkeypatch):
    """XLA's CPU client loads programs of several devices wrong, but for one flag."""
    found = px.compile(models.mlp_task(), models.optimizer(), px.Plan(data=2), models.data(8))
    assert found.mesh.size == 2
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(
        px.errors.PlanError, match=r"receive each other's data\. Turn the cache on before plura"
    ):
        px.compile(models.mlp_task(), models.optimizer(), px.Plan(data=2), models.data(8))
    px.compile(models.mlp_task(), models.optimizer(), px.Plan(), models.data(8))


CACHED = """
import os, plurax as px
{start}
from plurax.distributed.compilation_cache import ONE_AT_A_TIME
from plurax.mesh import make_mesh
cached = bool(os.environ["JAX_COMPILATION_CACHE_DIR"])
assert (ONE_AT_A_TIME in os.environ["XLA_FLAGS"]) == cached
make_mesh(px.Plan(data=2))
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    "start",
    [
        "px.virtual_devices(2)",
        "px.initialize('127.0.0.1:{port}', 1, 0, devices=2)",  # as under a launcher
        "px.initialize('127.0.0.1:{port}', 1, 0)",
        "from plurax.cli.arguments import start_devices; start_devices([])",
    ],
)
def test_a_cache_is_safe_however_devices_are_chosen(tmp_path, start):
    """The flag is set before JAX starts, and what is loaded computes the same."""
    code = CACHED.format(start=start.format(port=free_port("127.0.0.1")))
    for cache in ("", str(tmp_path)):
        env = {**os.environ, "XLA_FLAGS": "", "JAX_COMPILATION_CACHE_DIR": cache,
               "JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}  # fmt: skip
        subprocess.run([sys.executable, "-c", code], env=env, check=True)
