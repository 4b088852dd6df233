"""Timelines of pipelines: in the terminal, as a picture, schedules side by side."""

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console
from tests.command import run
from tests.pictures import legend, panels

import plurax as px
from plurax.collective import Collective
from plurax.hlo.memory import Memory
from plurax.pipeline.schedule import SCHEDULES, make_schedule
from plurax.plan import chunks_of
from plurax.report.plan_picture import draw_plan
from plurax.report.timeline import ScheduleCosts, compared_schedules_table, timeline_report
from plurax.strategies import Strategies, Strategy

MEMORY = Memory(arguments=3000, outputs=2000, aliased=2000, temporaries=8192, code=0)


def costs(name, devices, microbatches, chunks=1):
    return ScheduleCosts(make_schedule(name, devices, microbatches, chunks), 4096, MEMORY)


def printed(report, width=100):
    console = Console(width=width, soft_wrap=True, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(report)
    return captured.get()


def lines_of(text):
    return [line for line in text.splitlines() if line.startswith("stage")]


def test_every_unit_of_work_stands_in_its_columns():
    text = printed(timeline_report(costs("1f1b", 2, 3), 100))
    assert "timeline of 1f1b: 2 devices, 3 microbatches" in text
    assert lines_of(text) == [
        "stage 0 F0F1····B0──F2B1──··B2──",
        "stage 1 ··F0B0──F1B1──F2B2──····",
        "stage 0 F0F1····B0──F2··B1──····B2──",
        "stage 1 ··F0B0──F1··B1──F2··B2──····",
    ]
    assert "as soon as each can: idle (bubble) 25.0 %" in text
    assert "in lockstep, as it runs here: idle (bubble) 35.7 %" in text
    assert "backward, as long as two forwards" in text
    assert "scaled" not in text


def test_one_drawing_where_lockstep_changes_nothing():
    text = printed(timeline_report(costs("zb-h1", 2, 2), 100))
    assert lines_of(text) == ["stage 0 F0F1··B0W0B1W1", "stage 1 ··F0B0F1B1W0W1"]
    assert "as soon as each can, and in lockstep, as it runs here" in text
    assert "W gradient of weights" in text


def test_what_a_pipeline_costs():
    text = " ".join(printed(timeline_report(costs("1f1b", 4, 8), 100)).split())
    for row in (
        "each device as soon as it can │ 27.3 %",
        "lockstep, as it runs here │ 40.0 %",
        "activations of a microbatch │ 4, 3, 2, 1",
        "exchanged by a device in a step │ 4.0 KiB",
        "temporaries │ 8.0 KiB",
        "peak │ 10.9 KiB",
    ):
        assert row in text


def test_a_device_with_several_stages():
    text = printed(timeline_report(costs("interleaved", 2, 2, chunks=2), 100))
    assert lines_of(text)[1].startswith("stages 1, 3 ····F0──F1──F0.1B0.1────F1.1B1.1────")
    assert "activations of a microbatch on one stage" in text


@pytest.mark.parametrize("width", [60, 80, 120, 300])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_long_schedule_is_scaled_and_says_so(name, width):
    chunks = chunks_of(name)
    report = timeline_report(costs(name, 4, 64, chunks), width)
    text = printed(report, width)
    assert "scaled to fit: a column is the time of" in text
    drawn = lines_of(text)
    longest = max(map(len, drawn))
    assert longest <= min(max(width, 80), 120)
    assert longest >= 78
    # Letters stand in proportion: a third of the busy time of 1F1B is forwards.
    forwards, busy = drawn[0].count("F"), sum(drawn[0].count(kind) for kind in "FBW")
    assert forwards / busy == pytest.approx(1 / 3, abs=0.06)


def test_bytes_exchanged_are_those_between_stages():
    schedule = make_schedule("gpipe", 2, 2)
    planned = [
        Collective("collective-permute", ("pipeline",), 100, 100.0, True, 6),
        Collective("collective-permute", ("tensor",), 7, 7.0, False, 1),
        Collective("all-reduce", ("pipeline",), 9, 9.0, False, 1),
    ]
    assert ScheduleCosts.of(schedule, planned, MEMORY).exchanged == 600


def test_schedules_side_by_side():
    compared = {
        "gpipe": costs("gpipe", 8, 8),
        "1f1b": costs("1f1b", 4, 8),
        "interleaved": "too few layers",
        "zb-h1": costs("interleaved", 4, 8, chunks=2),
    }
    text = printed(compared_schedules_table(compared, "1f1b"))
    assert "│ 1f1b *      │ 27.3 % │      40.0 % │" in text
    assert "8 on each" in text
    assert "11, 9, 7, 5 of 1/2" in text
    assert "interleaved cannot run: too few layers" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("compare", [False, True])
def test_a_pipeline_is_drawn(tmp_path, compare, drawn):
    own = costs("1f1b", 2, 4)
    compared = {
        "gpipe": costs("gpipe", 2, 4),
        "1f1b": own,
        "interleaved": costs("interleaved", 2, 4, chunks=2),
        "zb-h1": "too few layers",
    }
    found = [Collective("collective-permute", ("pipeline",), 100, 100.0, True, 10)]
    path = tmp_path / "plan.png"
    draw_plan("a plan", [], MEMORY, found, path, own, compared if compare else None)
    *above, memory, sent = panels(drawn["plan.png"])
    numbers = sorted(2 * [0, 1, 2, 3] * 2)  # a box for each pass of each microbatch on each device
    timelines = [panel for panel in above if panel.y.startswith("stage")]
    assert all(sorted(map(int, panel.texts)) == numbers for panel in timelines[:4])
    assert memory.texts == ["2.9 KiB", "8.0 KiB"]
    assert sent.texts == ["1000 B"]
    if not compare:
        assert [panel.title for panel in above] == [
            "1f1b, as soon as each can: idle (bubble) 20.0 %",
            "1f1b, in lockstep, as it runs here: idle (bubble) 33.3 %",
        ]
        assert legend(drawn["plan.png"]) == ["forward", "backward, as long as two forwards", "idle"]
        return
    assert legend(drawn["plan.png"])[2:] == ["paler: a device's later stage", "idle"]
    assert [panel.title.split(",")[0] for panel in timelines] == [
        "gpipe", "gpipe", "1f1b", "1f1b", "interleaved", "interleaved"
    ]  # fmt: skip
    assert any("zb-h1 cannot run: too few layers" in panel.texts for panel in above)
    bars = {panel.title: panel.texts for panel in above[-4:]}
    assert bars["bubble, in lockstep"] == ["20.0 %", "33.3 %", "25.0 %"]
    assert bars["stored at most, in microbatches"] == ["4", "2", "2.5"]
    assert bars["temporaries per device"] == ["8.0 KiB"] * 3


def test_strategies_stand_below_what_is_drawn(tmp_path, drawn):
    one = Strategy("3 add", (("tensor",), ()), "net.py:7 (block)")
    pins = Strategies("0a", (one, dataclasses.replace(one, equation="9 add")))
    draw_plan("a plan", [], MEMORY, [], tmp_path / "plan.png", strategies=pins)
    assert [text.get_text() for text in drawn["plan.png"].subfigs[-1].texts] == [
        "2 equations are computed in another way than the default",
        "net.py:7 (block), add: dim 0 over tensor; as it comes (2 times)",
    ]


# --- On the command line --------------------------------------------------------------------------

EXPERIMENT = """
import optax, plurax as px
from tests import models


def experiment(depth: int = 3):
    return px.Experiment(
        task=models.perceptron_stack(depth=depth),
        optimizer=optax.sgd(0.1),
        data=models.data(24),
        batch_size=12,
        plan=px.Plan(pipeline=2, microbatches=3),
    )
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("stacked.py").write_text(EXPERIMENT)
    return tmp_path


@pytest.mark.ci
def test_plan_draws_the_timeline(workplace, capsys, drawn):
    code, out, _ = run(
        capsys, "plan", "stacked.py", "--plan.pipeline", "2", "--plan.schedule", "zb-h1",
        "--plan.microbatches", "2", "--save", "plan.png",
    )  # fmt: skip
    assert code == 0
    assert "stage 0 F0F1··B0W0B1W1\n" in out
    assert "exchanged by a device in a step" in out
    assert "embed: on device 0 of the pipeline" in out
    timeline, memory, sent = panels(drawn["plan.png"])
    title = "zb-h1, as soon as each can, and in lockstep, as it runs here: idle (bubble) 14.3 %"
    assert timeline.title == title
    assert sorted(timeline.texts) == sorted("01" * 6)  # F, B, W of two microbatches on two devices
    assert (memory.shapes, sent.shapes) == (4, 2)
    assert sent.title == "sent by a device in a step: 2.0 KiB"


@pytest.mark.ci
def test_compare_has_every_schedule_or_why_it_cannot_run(workplace, capsys, drawn):
    code, out, _ = run(capsys, "plan", "stacked.py", "--compare", "--save", "plan.png")
    assert code == 0
    for name in ("gpipe", "1f1b *", "eager-1f1b", "interleaved", "zb-h1"):
        assert f"│ {name} " in out
    assert (
        "interleaved cannot run: the schedule 'interleaved' processes microbatches in groups" in out
    )
    *timelines, _, _, _, _, memory, sent = panels(drawn["plan.png"])
    assert [len(panel.texts) for panel in timelines] == [*[12] * 6, 1, 0, 18, 18]
    assert timelines[6].texts[0].startswith("interleaved cannot run: the schedule 'interleaved'")
    assert (memory.shapes, sent.shapes) == (4, 2)


@pytest.mark.ci
def test_layers_of_each_stage_and_a_schedule_by_hand(workplace, capsys):
    code, out, _ = run(
        capsys, "plan", "stacked.py", "--compare", "--plan.microbatches", "2",
        "--plan.schedule", "F0 F1 B0 B1", "F0 F1 B0 B1", "--plan.layers", "1", "2",
    )  # fmt: skip
    assert code == 0
    assert "of 1, 2 layers; the schedule is written by hand." in out
    assert "timeline of by hand" in out
    assert "│ by hand * " in out
    assert "interleaved cannot run: Plan(layers=(1, 2)) has 2 numbers of layers, and the" in out


def test_compare_without_a_pipeline(workplace, capsys):
    code, _, err = run(capsys, "plan", "stacked.py", "--compare", "--plan.pipeline", "1")
    assert code == 2
    assert "compares the schedules of a pipeline, and the plan has pipeline=1" in err


@pytest.mark.ci
def test_a_population_in_stages_has_a_timeline(workplace, capsys):
    code, out, _ = run(capsys, "plan", "stacked.py", "--members.seeds", "2")
    assert code == 0
    assert "stage 0 F0F1····B0──F2B1──··B2──\n" in out


def test_schedules_are_drawn_before_anything_runs(tmp_path):
    by_hand = px.pipeline.Schedule.parse(["F0 F1 B0 B1", "F0 B0 F1 B1"])
    path = tmp_path / "schedules.png"
    px.pipeline.draw_schedules([px.pipeline.make_schedule("zb-h1", 4, 8), by_hand], path)
    assert path.read_bytes()[:4] == b"\x89PNG"
