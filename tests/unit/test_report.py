"""Runs read from their files, thinned, compared, and written as one HTML file."""

import hashlib
import html.parser
import json
import math
import re
import tomllib

import numpy as np
import pytest
from tests.runs import epoch_row, write_rows, write_run, write_sweep
from tests.unit.test_cli import run

import plurax as px
from plurax.errors import ExperimentError
from plurax.report.page import render
from plurax.report.page.chart_data import BUDGET, events, metric_names, runs_json
from plurax.report.page.run_data import LogTail, read_run, run_folders, run_names
from plurax.report.page.sweep_data import compared_settings, sweeps
from plurax.report.page.thin import thin
from plurax.sweeps.importance import importance

# --- Reading ------------------------------------------------------------------------------------


def test_a_run_is_read_from_its_files(tmp_path):
    found = read_run(write_run(tmp_path / "one", seed=3, plan=px.Plan(data=2)))
    assert found.name == "one"
    assert found.series.step == 40
    assert found.series.steps("loss").values.shape == (40,)
    assert [row["epoch"] for row in found.series.epochs] == [1, 2, 3, 4]
    assert found.settings == {"seed": 3}
    assert found.plan == px.Plan(data=2)
    assert found.series.batch_size == 16
    assert found.series.seconds == 2.0
    assert found.series.members is None


def test_a_run_that_is_being_written_is_read_as_far_as_it_is_whole(tmp_path):
    folder = write_run(tmp_path / "one", steps=4, epochs=1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 5, "lo')
    (folder / "plan.toml").write_text("data = ")
    (folder / "run.toml").write_text("[[[")
    (folder / "servers.jsonl").write_text("{")
    (folder / "calibration.json").write_text("[1]")
    found = read_run(folder)
    assert found.series.step == 4
    assert found.plan is None
    assert found.settings == {}
    assert found.calibration == {}


def test_the_tail_of_a_log_gives_each_row_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = LogTail(path)
    assert tail.read() == []
    first, second = (json.dumps(epoch_row(step, step, 0.5)) + "\n" for step in (1, 2))
    path.write_text(first + second[:20])
    assert [row["step"] for row in tail.read()] == [1]
    path.write_text(first + second)
    assert [row["step"] for row in tail.read()] == [2]
    assert tail.read() == []
    assert tail.restarted == 0


def test_a_log_that_was_replaced_is_read_again(tmp_path):
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    path.write_text(json.dumps(epoch_row(1, 1, 0.5)) + "\n")
    tail = LogTail(path)
    assert len(tail.read()) == 1
    other.write_text(json.dumps(epoch_row(7, 1, 0.5)) + "\n")
    other.replace(path)
    assert [row["step"] for row in tail.read()] == [7]
    assert tail.restarted == 1
    path.write_text("")  # cut short in place
    assert tail.read() == []
    assert tail.restarted == 2


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda path: path / "nothing", "no such folder. Give the output directory of a run"),
        (lambda path: path, "is not the folder of a run: there is no metrics.jsonl in it"),
        (lambda path: write_rows(path, []) or path, "has no row of metrics yet"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(tmp_path, prepare, words):
    with pytest.raises(ExperimentError, match=words):
        render.write_report([prepare(tmp_path)], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_log_without_permission_is_said(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "one")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ExperimentError, match="cannot be read: you have no permission"):
        read_run(folder)


def test_a_folder_of_runs_stands_for_the_runs_in_it(tmp_path):
    for name in ("b", "a", "a/before.1"):
        write_run(tmp_path / "runs" / name, steps=4, epochs=1)
    folders = run_folders([tmp_path / "runs", tmp_path / "runs" / "a"])
    assert folders == [tmp_path / "runs" / "a", tmp_path / "runs" / "b"]
    assert run_names(folders) == ["a", "b"]


# --- Curves -------------------------------------------------------------------------------------


def test_a_thinned_curve_keeps_its_ends_and_its_peak():
    x = np.arange(10_000.0)
    y = np.sin(x / 500)
    y[5000], y[7000] = 9.0, math.nan
    kept = thin(x, y, 100)
    assert len(kept) == 100
    assert {0, 5000, 9999} <= set(kept.tolist())
    assert 7000 not in kept
    assert (np.diff(kept) > 0).all()
    assert thin(x[:50], y[:50], 100).tolist() == [*range(50)]


def test_a_hundred_runs_keep_to_the_budget_of_points(tmp_path):
    one = read_run(write_run(tmp_path / "one", steps=2000, epochs=50))
    found = runs_json([one] * 100, metric_names([one]))
    sizes = [
        len(line[1]) for run in found for lines in run["curves"].values() for line in lines.values()
    ]
    assert max(sizes) < 2000
    assert sum(sizes) <= BUDGET


def test_the_bands_of_members_are_their_quartiles_and_ends(tmp_path):
    one = read_run(write_run(tmp_path / "one", members=5))
    (found,) = runs_json([one], metric_names([one]))
    bands = found["curves"]["loss"]["train_members"]
    last = one.series.last["members"]["loss"]
    for key, index in (("low", 0), ("q25", 1), ("median", 2), ("q75", 3), ("high", 4)):
        assert bands[key][-1] == pytest.approx(last[index], rel=1e-4)
    assert bands["member"] == [0]
    assert metric_names([one]) == ["loss", "accuracy", "grad_norm", "examples_per_second"]


def test_a_confusion_matrix_is_shown_and_other_lists_are_not(tmp_path):
    folder = write_run(tmp_path / "one", members=2)
    lists = {"eval_confusion": [[5.0, 1.0], [2.0, 4.0]], "eval_row": [1.0, 2.0], "eval_no": [[1]],
             "eval_ragged": [[1.0, 2.0], [3.0]], "eval_text": [["a", "b"], ["c", "d"]]}  # fmt: skip
    row = epoch_row(80, 5, 0.1, members=2) | lists
    row["members"] |= {"eval_confusion": [lists["eval_confusion"]] * 2}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    one = read_run(folder)
    (found,) = runs_json([one], metric_names([one]))
    assert found["matrices"] == {"eval_confusion": [[5, 1], [2, 4]]}
    page_of(tmp_path, folder)


def test_events_are_listed_in_order(tmp_path):
    folder = write_run(tmp_path / "one")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["skipped"] = int(row["kind"] == "step" and row["step"] in (5, 6, 9))
    rows.append({"kind": "event", "event": "rollback", "step": 7, "from": 6, "to": 12})
    write_rows(folder, rows)
    (folder / "starts.jsonl").write_text('{"step": 0}\n{"step": 20}\n')
    (folder / "before.1").mkdir()
    found = [(row["step"], row["event"]) for row in events(read_run(folder))]
    assert found == [
        (0, "restarted from scratch"), (5, "2 updates skipped"), (7, "rollback"),
        (9, "update skipped"), (20, "resumed"),
    ]  # fmt: skip


# --- Sweeps -------------------------------------------------------------------------------------


def test_importance_finds_the_hyperparameter_that_matters():
    rng = np.random.default_rng(0)
    rate, other = rng.random(400), rng.random(400)
    score = (rate - 0.5) ** 2 + 0.01 * rng.normal(size=400)  # no direction, and yet it matters
    assert importance(rate.tolist(), score.tolist()).share > 0.8
    assert abs(importance(rate.tolist(), score.tolist()).direction) < 0.2
    assert importance(other.tolist(), score.tolist()).share < 0.05
    # What groups explain by chance is subtracted: of 40 members it would be a tenth.
    draws = rng.random((2, 100, 40))
    chance = [importance(a.tolist(), b.tolist()).share for a, b in zip(*draws, strict=True)]
    assert np.mean(chance) < 0.07
    kinds = ["a" if one < 0.2 else "b" for one in rate]
    assert importance(kinds, score.tolist()).share > 0.1
    assert importance([1.0] * 400, score.tolist()).share == 0
    assert importance([], []).share == 0
    gaps = [math.nan if one > 0.9 else value for one, value in zip(rate, score, strict=True)]
    assert importance(rate.tolist(), gaps).share > 0.7


def test_a_sweeps_table_is_read(tmp_path):
    folder = write_run(tmp_path / "one")
    write_sweep(folder / "sweep.csv")
    (folder / "other.csv").write_text("a,b\n1,2\n")
    (found,) = sweeps([read_run(folder)], [folder])
    shown = found.to_json()
    assert shown["names"] == ["width", "learning_rate", "dropout"]
    assert shown["metrics"] == ["loss", "eval_accuracy"]
    assert shown["rising"] == ["eval_accuracy"]
    assert shown["logs"] == ["learning_rate"]
    assert len(shown["rows"]) == 60
    shares = dict(zip(shown["names"], shown["importance"]["eval_accuracy"], strict=True))
    assert shares["learning_rate"][0] > 0.9 > 0.2 > shares["dropout"][0]
    assert shares["learning_rate"][1] == 1


def test_members_with_hyperparameters_of_their_own_are_a_sweep(tmp_path):
    folder = write_run(tmp_path / "one", members=5)
    (folder / "run.toml").write_text(
        'started = "now"\n[options]\nepochs = 4\nseed = "None"\n'
        "[members]\ncount = 5\n[members.hyper]\nrate = [0.1, 0.2, 0.3, 0.4, 0.5]\n"
        "same = [1, 1, 1, 1, 1]\n[plan]\ndata = 1\n"
    )
    run = read_run(folder)
    (found,) = sweeps([run], [])
    assert found.names == ["rate"]
    assert found.metrics == ["loss", "eval_loss", "eval_accuracy"]
    assert [row["rate"] for row in found.rows] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert compared_settings(run) == {"epochs": 4, "members.count": 5, "batch_size": 16}


def test_runs_with_other_settings_are_a_sweep(tmp_path):
    folders = [
        write_run(tmp_path / f"{i}", start=2.0 + i, learning_rate=0.1 * (i + 1), note="x", seed=i)
        for i in range(5)
    ]
    runs = [read_run(folder) for folder in folders]
    (found,) = sweeps(runs, [])
    assert found.names == ["learning_rate"]
    assert found.metrics[:2] == ["eval_loss", "eval_accuracy"]
    assert [row["label"] for row in found.rows] == ["0", "1", "2", "3", "4"]
    assert sweeps(runs[:2], []) == []


# --- The page -----------------------------------------------------------------------------------


class Parsed(html.parser.HTMLParser):
    """Elements of a page with their texts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self._stack = [], {}, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._stack.append(dict(attrs).get("id") or tag)

    def handle_endtag(self, tag):
        if self._stack:
            self._stack.pop()

    def handle_data(self, data):
        if self._stack:
            self.texts[self._stack[-1]] = self.texts.get(self._stack[-1], "") + data


def page_of(tmp_path, *folders):
    output = tmp_path / "pages" / "report.html"
    assert px.analysis.write_report(folders, output) == output
    return output.read_text(encoding="utf-8")


def test_a_page_holds_all_it_needs(tmp_path):
    text = page_of(tmp_path, write_run(tmp_path / "digits"))
    parsed = Parsed(text)
    assert "<title>digits · plurax</title>" in text
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "iframe", "img", "object")
        assert "src" not in attributes
        assert not str(attributes.get("href", "#")).startswith("http")
    assert text.count('id="echarts"') == 1
    data = json.loads(parsed.texts["data"])
    assert [run["name"] for run in data["runs"]] == ["digits"]
    assert data["metrics"][0] == "loss"


NASTY = '</script><img src=x onerror="document.title=1">&"'


def test_names_of_runs_and_metrics_stay_text(tmp_path):
    folder = write_run(tmp_path / NASTY.replace("/", "∕"), note=NASTY)
    rows = [epoch_row(step, step, 0.5) | {NASTY: 1.0} for step in (1, 2)]
    rows.append({"kind": "event", "event": NASTY, "step": 1, "why": NASTY})
    write_rows(folder, rows)
    (folder / "calibration.json").write_text(json.dumps({"predictions": {NASTY: {"error": 0.1}}}))
    text = page_of(tmp_path, folder, write_run(tmp_path / "two", note="b"))
    parsed = Parsed(text)
    assert {"img", "onerror"}.isdisjoint(tag for tag, _ in parsed.tags)
    data = json.loads(parsed.texts["data"])
    assert NASTY in data["runs"][0]["curves"]
    assert data["runs"][0]["events"][0]["text"] == NASTY


def test_the_policy_of_a_page_names_its_scripts_by_their_checksums(tmp_path):
    parsed = Parsed(page_of(tmp_path, write_run(tmp_path / "one")))
    policy = next(a["content"] for t, a in parsed.tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.split("style-src")[0]
    assert "'unsafe-eval'" not in policy


def test_what_differs_between_runs_is_marked(tmp_path):
    folders = [
        write_run(tmp_path / name, batch_size=16, learning_rate=rate, plan=px.Plan(data=data))
        for name, rate, data in (("a", 0.1, 1), ("b", 0.1, 1), ("c", 0.2, 2))
    ]
    text = page_of(tmp_path, *folders)
    assert '<th scope="col" class="differs number"' in text
    heads = text[text.index("<thead>") : text.index("</thead>")]
    assert "learning_rate" in heads
    assert "plan.data" in heads
    assert "batch_size" not in heads
    assert '<td class="number other" data-key="0.2">0.2</td>' in text
    assert "Alike in all runs: 1 settings" in text


def test_a_plan_is_shown_with_its_pipeline(tmp_path):
    plan = px.Plan(pipeline=2, microbatches=4, schedule="1f1b")
    text = page_of(tmp_path, write_run(tmp_path / "one", plan=plan))
    assert "the layers are split into 2 stages" in text
    assert "idle (bubble)" in text
    assert text.count('class="work-F"') == 2 * 2 * 4  # both timelines, devices, microbatches
    assert 'aria-label="2 devices: pipeline=2"' in text


def test_predicted_stands_beside_measured(tmp_path):
    folder = write_run(tmp_path / "one")
    row = epoch_row(80, 5, 0.1)
    row["estimate"] = {
        "machine": "8xH100", "correction": 1.0,
        "predicted": {"seconds": 0.010, "peak": 1024, "bytes_sent": 0},
        "measured": {"seconds": 0.012, "peak": 2048, "bytes_sent": 0},
    }  # fmt: skip
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    text = page_of(tmp_path, folder)
    assert "Predicted for 8xH100" in text
    assert "10 ms</td>" in text
    assert "+20 %" in text
    assert "+100 %" in text


COMPILED = """
[compiled]
function = "loop"
seconds = 3.2
state_bytes = 1024
batch_bytes = 2048
temporary_bytes = 3072
peak_bytes = 6144
planned_peak_bytes = 5120
collectives = 1
planned_collectives = 4
differs = ["all-reduce over data"]

[compiled.sent."all-reduce over data"]
count = 1
bytes = 3000
planned_count = 4
planned_bytes = 1500
"""


def test_what_the_compiler_made_stands_beside_the_plan(tmp_path):
    """It is no setting: runs do not differ by it, and older runs have none."""
    new, old = (write_run(tmp_path / name, batch_size=16) for name in ("new", "old"))
    with (new / "run.toml").open("a") as file:
        file.write(COMPILED)
    text = page_of(tmp_path, new, old)
    part = text[text.index('id="compiled"') : text.index('id="events"')]
    for shown in ("3.2 s", "1.0 KiB", "2.0 KiB", "3.0 KiB", "6.0 KiB", "5.0 KiB", "+20 %"):
        assert f">{shown}</td>" in part
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", part[part.index("sent in a step") :])
    sent = ["new", "all-reduce over data", "4", "1", "1.5 KiB", "2.9 KiB", "+100 %"]
    assert cells[-7:] == sent
    assert "compiled." not in text
    assert 'id="compiled"' not in page_of(tmp_path, old)


def test_calibration_and_uncertainty_are_written_and_shown(tmp_path):
    folder = write_run(tmp_path / "one")
    logits = np.random.default_rng(0).normal(size=(5, 30, 3))
    labels = np.arange(30) % 3
    combined = px.ensemble.combine_classification(logits)
    said = px.ensemble.calibration(combined.probabilities, labels, bins=5)
    spread = px.ensemble.combine_regression(logits[..., 0])
    path = px.ensemble.save_calibration(
        folder, {"five": said}, scores={"five": {"log loss": 1.25}},
        uncertainty={"five": combined, "targets": spread},
    )  # fmt: skip
    assert path == folder / "calibration.json"
    text = page_of(tmp_path, folder)
    assert "scores of predictions" in text
    assert ">1.25</td>" in text
    (shown,) = json.loads(Parsed(text).texts["data"])["calibrations"]
    assert shown["predictions"]["five"]["count"] == said.count.tolist()
    assert sum(shown["uncertainty"]["five"]["epistemic"]["count"]) == 30
    assert shown["uncertainty"]["five"]["total"]["mean"] == pytest.approx(
        combined.entropy.mean(), rel=1e-4
    )
    assert shown["uncertainty"]["targets"]["unit"] == "variance"
    with pytest.raises(px.errors.BatchError, match="save_calibration got nothing to write"):
        px.ensemble.save_calibration(folder, {})


def test_a_run_before_its_first_epoch_is_shown(tmp_path):
    folder = write_run(tmp_path / "one")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:5]))
    (folder / "plan.toml").unlink()
    text = page_of(tmp_path, folder)
    assert "<dt>loss</dt><dd>1.375" in text
    assert '<a href="#plan">' not in text


def contrast(first, second):
    """The ratio of two colours' luminances, as WCAG 2 defines it."""

    def luminance(color):
        parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1, 2], ids=["light", "dark", "dark by the system"])
def test_text_and_lines_stand_out_from_the_paper(theme):
    style = render.importlib.resources.files("plurax.report.page") / "style.css"
    block = style.read_text().split("--paper:")[1:][theme].partition("}")[0]
    colors = dict(re.findall(r"--([\w-]+): (#\w{6})", f"--paper:{block}"))
    names = ["ink", "soft", "accent", *(f"run-{slot}" for slot in range(8))]
    poor = {name: contrast(colors[name], colors["paper"]) for name in names}
    assert all(ratio >= 4.5 for ratio in poor.values()), poor


def test_the_library_in_the_package_is_the_one_that_is_noted():
    vendor = render.importlib.resources.files("plurax.report.page") / "vendor"
    noted = tomllib.loads(vendor.joinpath("echarts.toml").read_text())
    assert noted["version"].startswith("6.")
    assert {"echarts.min.js", "LICENSE", "NOTICE"} <= noted["sha256"].keys()
    for name, digest in noted["sha256"].items():
        assert hashlib.sha256(vendor.joinpath(name).read_bytes()).hexdigest() == digest, name
    assert "</script" not in vendor.joinpath("echarts.min.js").read_text()


def test_the_command_writes_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b")
    code, out, _ = run(capsys, "report", "runs/a", "runs/b", "--output", "both.html")
    assert code == 0
    assert out.startswith("wrote both.html: ")
    assert (tmp_path / "both.html").is_file()
    assert run(capsys, "report", "runs")[0] == 0
    assert (tmp_path / "report.html").is_file()


def test_mistakes_in_a_command_line_are_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "one")
    for arguments, words in (
        (("report", "nothing"), "no such folder"),
        (("report", "one", "--output", "one"), "is a folder, and the page is one file"),
        (("report", "one", "--output", "one/plan.toml/x.html"), "could not be written"),
    ):
        code, _, said = run(capsys, *arguments)
        assert code == 2
        assert words in said
