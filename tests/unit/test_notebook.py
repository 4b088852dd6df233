"""What a notebook shows: the tables' cells are the objects' own figures."""

from xml.etree import ElementTree

import optax
import pytest
from tests import models

import plurax as px
from plurax.notebook import html_table
from plurax.tree import human_bytes

ROWS = models.data(20)


@pytest.fixture(scope="module")
def fitted():
    return px.fit(
        models.mlp_task(), optax.sgd(0.1), ROWS, batch_size=10, epochs=12, progress=False
    )  # fmt: skip


def parsed(shown):
    """The title and the rows of a table, its head first; well-formed, so everything is escaped."""
    table = ElementTree.fromstring(shown)
    assert table.tag == "table"
    rows = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
    assert {len(row) for row in rows} == {len(rows[0])}
    return table.find("caption").text, rows[0], rows[1:]


def test_text_is_escaped_and_numbers_are_on_the_right():
    shown = html_table("<&>", ["a", "b"], [["</td>", 1234567], ['"', 0.5]])
    assert parsed(shown) == ("<&>", ["a", "b"], [["</td>", "1234567"], ['"', "0.5"]])
    assert shown.count("text-align:right") == 2


def test_plan():
    plan = px.Plan(data=4, zero=1, tensor=2, shardings={"*<": (..., "tensor")})
    title, _, rows = parsed(plan._repr_html_())
    assert title == "Plan on 8 devices"
    assert rows == [["data", "4"], ["tensor", "2"], ["zero", "1"],
                    ["shardings['*<']", "(Ellipsis, 'tensor')"]]  # fmt: skip
    assert parsed(px.Plan()._repr_html_())[0] == "Plan on 1 device"


def test_program(fitted):
    program = px.compile(models.mlp_task(), optax.sgd(0.1), px.Plan(data=2), ROWS)
    peak = human_bytes(program.memory().peak)
    assert repr(program) == (
        f"Program(plan=Plan(data=2), batch_size=20, parameters=144, peak_per_device={peak})"
    )
    _, _, rows = parsed(program._repr_html_())
    assert rows == [["plan", "Plan(data=2)"], ["batch_size", "20"], ["parameters", "144"],
                    ["peak_per_device", peak]]  # fmt: skip


def test_fit(fitted):
    last = fitted.history[-1]
    assert repr(fitted) == f"Fit(12 epochs, loss={last['loss']:.4g})"
    title, names, rows = parsed(fitted._repr_html_())
    assert title == f"{fitted!r}, the last 10 shown"
    assert [row[names.index("epoch")] for row in rows] == [str(k) for k in range(3, 13)]
    for row, shown in zip(fitted.history[-10:], rows, strict=True):
        assert float(shown[names.index("loss")]) == pytest.approx(row["loss"], rel=1e-5)


def test_timeline():
    timeline = px.pipeline.simulate(px.pipeline.make_schedule("1f1b", 4, 8))
    title, _, rows = parsed(timeline._repr_html_())
    assert (
        title
        == repr(timeline)
        == (
            f"Timeline(1f1b, 4 devices, 8 microbatches: length {timeline.length:g}, "
            f"{timeline.bubble:.1%} idle)"
        )
    )
    assert [int(row[3]) for row in rows] == list(timeline.stored)
    busy = sum(float(row[1]) for row in rows)
    assert 1 - busy / (4 * timeline.length) == pytest.approx(timeline.bubble)


def test_verification():
    differences = (
        px.analysis.Difference("loss", "", 1e-9, 1e-6),
        px.analysis.Difference("gradient", "a/<b>", float("inf"), 1e-6),
    )
    found = px.analysis.Verification(px.Plan(data=2), 3, differences, 1e-8)
    title, _, rows = parsed(found._repr_html_())
    assert title == repr(found) == "Verification(Plan(data=2), 3 steps: 1 of 2 tensors differ)"
    assert rows == [["loss", "", "1.0e-09", "1.0e-06", "yes"],
                    ["gradient", "a/<b>", "inf", "1.0e-06", "NO"]]  # fmt: skip


def test_max_batch_size():
    found = px.analysis.MaxBatchSize(96, 3 * 2**20, 128, None, 4 * 2**20, 5)
    title, _, rows = parsed(found._repr_html_())
    assert title == "MaxBatchSize 96: budget 4.0 MiB per device, 5 programs compiled"
    assert rows == [["96", "3.0 MiB", "yes"], ["128", "not compiled", "no"]]


def test_results_of_many_members_are_shown_in_a_line(fitted):
    rows = [{"loss": 1.0}] * 6
    found = px.ensemble.Sweep(rows, [({"width": 4}, fitted)])
    assert repr(found) == "Sweep(6 members in 1 buckets)"
    rungs = [px.ensemble.Rung(1, [0, 1, 2], [0.1, 0.2, 0.3], 1.0)]
    halved = px.ensemble.Halving(px.Members(1), fitted.state, fitted.program, rungs)
    assert repr(halved) == "Halving(1 of 3 members, 1 rungs)"
