"""The largest batch fits and the next does not; the search is short for any memory curve."""

import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import models

import plurax as px
from plurax.analysis.batch_size import MAX_COMPILATIONS, Throughput, _flat, largest_below
from plurax.execute import placement
from plurax.tree import with_rows

ROWS = models.data(4)


LINEAR = px.Task(
    init=lambda key: jnp.ones(models.FEATURES),
    loss=lambda params, batch, keys: (batch["x"] @ params - batch["y"].astype(params.dtype)) ** 2,
)
SPLIT = px.Plan(data=2, microbatches=3)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("task", "plan"),
    [
        (LINEAR, SPLIT),
        (models.contrastive_task(), px.Plan()),
        pytest.param(models.mlp_task(), px.Plan(), marks=pytest.mark.slow),
        pytest.param(models.mlp_task(), SPLIT, marks=pytest.mark.slow),
        pytest.param(models.contrastive_task(), SPLIT, marks=pytest.mark.slow),
    ],
)
def test_found_fits_and_next_does_not(task, plan):
    budget, optimizer = 1_000_000, optax.adam(1e-2)
    found = px.analysis.max_batch_size(task, optimizer, plan, ROWS, memory=budget)
    assert found.size % (plan.data * plan.microbatches) == 0
    assert found.compilations <= MAX_COMPILATIONS

    def peak(size):
        like = with_rows(ROWS, size)
        return px.compile(task, optimizer, plan, like).memory().peak

    assert peak(found.size) == found.bytes <= budget
    assert peak(found.next_size) == found.next_bytes > budget
    assert int(found) == found.size


@pytest.mark.ci
def test_the_budget_has_a_default_on_cpu():
    found = px.analysis.max_batch_size(LINEAR, optax.sgd(0.1), px.Plan(data=2), ROWS)
    twice = px.analysis.max_batch_size(LINEAR, optax.sgd(0.1), px.Plan(), ROWS)
    assert abs(twice.budget - 2 * found.budget) <= 2  # the devices share the machine's memory


def test_compiling_makes_no_array_of_all_rows(monkeypatch):
    """A search compiles for as many rows as the memory has room for."""
    monkeypatch.setattr(placement, "row_numbers", lambda *_: pytest.fail("an array of rows"))
    program = px.compile(LINEAR, optax.sgd(0.1), px.Plan(data=2), with_rows(ROWS, 2**30))
    assert program.memory().peak > 2**30


def test_nothing_fits():
    with pytest.raises(
        px.errors.BatchError, match=r"no batch fits: the smallest possible, 2 example"
    ):
        px.analysis.max_batch_size(LINEAR, optax.sgd(0.1), px.Plan(data=2), ROWS, memory=10)


@given(
    fixed=st.integers(0, 10**9),
    slope=st.integers(1, 10**6),
    bend=st.integers(0, 100),
    steps=st.integers(0, 3),
    answer=st.integers(1, 10**6),
)
def test_the_search_is_exact_and_short(fixed, slope, bend, steps, answer):
    """Memory curves as compilers make them: lines or parabolas, with jumps at powers of two."""

    def peak(n):
        return fixed + slope * n + bend * n * n + steps * (slope * n // 50) * (n.bit_length() % 2)

    budget = peak(answer)
    evaluated = []

    def measure(n):
        evaluated.append(n)
        return peak(n)

    fits, size, over, over_bytes, count = largest_below(measure, budget)
    assert count == len(evaluated) <= MAX_COMPILATIONS
    assert len(set(evaluated)) == len(evaluated)
    assert size == peak(fits) <= budget
    if over is not None:
        assert over_bytes == peak(over) > budget
    if steps == 0:
        assert (fits, over) == (answer, answer + 1)


def test_the_fastest_batch_has_a_curve_and_a_knee():
    found = px.analysis.fastest_batch_size(
        LINEAR, optax.sgd(0.1), px.Plan(data=2), ROWS, max_size=64, repeats=2
    )
    sizes = [point.size for point in found.curve]
    assert sizes == [2 * 2**k for k in range(len(sizes))]
    assert sizes[-1] <= 64
    best = max(point.examples_per_second for point in found.curve)
    assert found.knee.examples_per_second >= 0.95 * best
    smaller = [p for p in found.curve if p.size < found.knee.size]
    assert all(p.examples_per_second < 0.95 * best for p in smaller)
    assert str(found).count("← knee") == 1
    assert int(found) == found.knee.size


def test_a_curve_that_falls_twice_ends_the_measurement():
    def curve(*speeds):
        return [Throughput(100, 100 / speed) for speed in speeds]

    assert _flat(curve(1, 2, 3, 2, 2))
    assert not _flat(curve(1, 2, 3, 2, 4))
    assert not _flat(curve(3, 2))
