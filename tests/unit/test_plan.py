"""Plans are values: they print, compare, hash, load and save, and refuse what cannot run."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plurax import Plan, PlanError

plans = st.builds(
    Plan,
    data=st.integers(1, 64),
    microbatches=st.integers(1, 64),
    precision=st.sampled_from(("float32", "bfloat16")),
    member=st.integers(1, 64),
    chunk=st.none() | st.integers(1, 64),
    batch_dim=st.sampled_from((None, "major", "minor")),
)


@given(plans)
def test_toml_round_trip(plan):
    assert Plan.from_toml(plan.to_toml()) == plan


@given(plans)
def test_repr_rebuilds_the_plan(plan):
    assert eval(repr(plan)) == plan


@given(plans, plans)
def test_equal_plans_hash_alike(a, b):
    assert (a == b) == (dataclasses.astuple(a) == dataclasses.astuple(b))
    assert a != b or hash(a) == hash(b)


@given(plans, st.integers(1, 10_000))
def test_padded_size_is_the_next_multiple(plan, size):
    rows = plan.padded_size(size)
    unit = plan.data * plan.microbatches
    assert rows % unit == 0
    assert size <= rows < size + unit


def test_save_and_load(tmp_path):
    plan = Plan(data=4, microbatches=8, precision="bfloat16")
    plan.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == plan
    assert (tmp_path / "plan.toml").read_text() == (
        'data = 4\nmicrobatches = 8\nprecision = "bfloat16"\nmember = 1\n'
        'pipeline = 1\nschedule = "1f1b"\ntensor = 1\nzero = 0\nremat = "none"\n'
    )


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().data = 2


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, None])
@pytest.mark.parametrize("field", ["data", "microbatches", "member"])
def test_sizes_must_be_positive(field, value):
    with pytest.raises(PlanError, match=rf"Plan\({field}=.*must be a whole number of at least 1"):
        Plan(**{field: value})


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


def test_explain_counts_the_places():
    text = Plan(data=4, microbatches=8).explain(batch_size=100)
    assert "4 devices × 8 microbatches × 4 examples, 28 of 128 places filled up." in text
    assert "bfloat16" in Plan(precision="bfloat16").explain()
