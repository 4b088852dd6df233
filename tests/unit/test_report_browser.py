"""The page of `plurax report` in a real browser: drawn, without errors, light, dark, on a phone.

Skipped where there is no Chromium (`make chromium` installs it), but not in CI.
"""

import json

import pytest
from tests import browser
from tests.browser import Browser
from tests.runs import epoch_row, write_rows, write_run, write_sweep

import plurax as px
from plurax.report.page.render import write_report

pytestmark = browser.needed

NASTY = "<img src=x onerror=alert(1)>"
DRAW_ALL = "document.querySelectorAll('.chart').forEach((one) => one.draw())"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of one run with all there is, and of two runs with nasty names."""
    folder = tmp_path_factory.mktemp("pages")
    one = write_run(folder / "one", members=6, plan=px.Plan(pipeline=2, microbatches=4))
    write_sweep(one / "sweep.csv")
    row = epoch_row(80, 5, 0.1, members=6)
    row["estimate"] = {
        "machine": "here",
        "predicted": {"seconds": 0.01, "peak": 1000, "bytes_sent": 0,
                      "memory": {"a": 600, "b": 400}},
        "measured": {"seconds": 0.012, "peak": 1100, "bytes_sent": 0},
    }  # fmt: skip
    later = {**row, "step": 90, "epoch": 6}
    event = {"kind": "event", "event": NASTY, "step": 85}
    with (one / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in (row, event, later))
    said = {"confidence": [None, 0.8], "accuracy": [None, 0.7], "count": [0, 10], "error": 0.1}
    table = {"predictions": {NASTY: said},
             "uncertainty": {NASTY: {"unit": "nats", "edges": [0, 0.5, 1],
                                     "total": {"count": [3, 1], "mean": 0.4}}}}  # fmt: skip
    (one / "calibration.json").write_text(json.dumps(table))
    write_report([one], folder / "one.html")
    two = [write_run(folder / name, start=start) for name, start in ((NASTY, 2.0), ("b", 3.0))]
    write_report(two, folder / "two.html")
    return folder


@pytest.fixture(scope="module")
def desktop(pages):
    with Browser() as browser:
        browser.open(pages / "one.html")
        yield browser


def canvases(browser):
    """How many charts have drawn something on their canvas."""
    return browser.run("""[...document.querySelectorAll('.chart canvas')].filter((one) => {
        const dots = one.getContext('2d').getImageData(0, 0, one.width, one.height).data;
        return dots.some((value) => value > 0); }).length""")


def test_charts_are_drawn_when_they_come_into_view(pages):
    with Browser() as browser:
        browser.open(pages / "one.html")
        browser.wait("document.querySelectorAll('.chart canvas').length > 0")
        every = browser.run("document.querySelectorAll('.chart').length")
        assert browser.run("document.querySelectorAll('.chart canvas').length") < every
        browser.run("document.getElementById('events').scrollIntoView({behavior: 'instant'})")
        browser.run(DRAW_ALL)
        assert canvases(browser) == every
        assert browser.said == []
        assert all(url.startswith(("file:", "data:")) for url in browser.asked)


def test_a_brush_on_an_axis_chooses_networks(desktop):
    box = "document.querySelector('.chart.parallel')"
    desktop.run(f"{box}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    desktop.wait(f"{box}.querySelector('canvas')")
    place = desktop.run(
        f"(() => {{ const r = {box}.getBoundingClientRect();"
        " return [r.left, r.top, r.width, r.height]; })()"
    )
    left, top, width, _ = place
    x = left + width - 64  # the last axis, the metric
    desktop.drag((x, top + 50), (x, top + 150))
    count = "document.querySelector('#sweeps output').textContent"
    desktop.wait(f"{count}.includes(' of 60 networks chosen')")
    chosen = int(desktop.run(count).split()[0])
    assert 5 < chosen < 40
    best = "document.querySelector('.chosen-rows tbody th').textContent"
    assert desktop.run(best) == "member 59 of bucket 1"
    button = (
        "[...document.querySelectorAll('#sweeps button')].find((b) => b.textContent === 'Show all')"
    )
    desktop.run(f"{button}.click()")
    assert desktop.run(count) == "all 60 networks"
    assert desktop.said == []


def test_ranges_can_be_given_by_keyboard(desktop):
    field = "document.querySelector('[aria-label=\"learning rate, at most\"]')"
    desktop.run(f"{field}.value = 0.00105; {field}.dispatchEvent(new Event('change'))")
    count = desktop.run("document.querySelector('#sweeps output').textContent")
    assert count == "21 of 60 networks chosen"
    active = """echarts.getInstanceByDom(document.querySelector('.chart.parallel')).getModel()
        .getSeriesByIndex(0).getRawIndicesByActiveState('active').length"""
    desktop.run("document.querySelector('.chart.parallel').draw()")
    assert desktop.run(active) == 21
    assert desktop.said == []


def test_dragging_zooms_and_a_double_click_shows_all(desktop):
    box = "document.querySelector('#curve-charts .chart')"
    desktop.run(f"{box}.scrollIntoView({{block: 'center', behavior: 'instant'}}); {box}.draw()")
    left, top = desktop.run(
        f"(() => {{ const r = {box}.getBoundingClientRect(); return [r.left, r.top]; }})()"
    )
    chart = f"echarts.getInstanceByDom({box})"
    zoom = f"{chart}.getOption().dataZoom.map((one) => one.end - one.start)"
    desktop.drag((left + 150, top + 60), (left + 300, top + 160))
    assert min(desktop.run(zoom)) < 50
    desktop.click((left + 200, top + 100), times=2)
    assert min(desktop.run(zoom)) == 100
    assert desktop.said == []


def test_arrow_keys_read_a_curve(desktop):
    desktop.run("document.querySelector('#curve-charts .chart').draw()")
    desktop.run("document.querySelector('#curve-charts .chart').focus()")
    desktop.press("ArrowRight")
    desktop.press("ArrowRight")
    said = desktop.run("document.getElementById('said').textContent")
    assert said.startswith("step ")
    assert "training" in said
    label = desktop.run("document.activeElement.getAttribute('aria-label')")
    assert label.startswith("loss. ")
    assert "evaluation from" in label


def test_dark_and_light_by_the_system_and_by_the_button(pages):
    paper = "getComputedStyle(document.body).backgroundColor"
    with Browser(dark=True) as browser:
        browser.open(pages / "two.html")
        assert browser.run(paper) == "rgb(20, 24, 29)"
        browser.run("document.getElementById('theme').click()")
        assert browser.run("document.getElementById('theme').textContent") == "Theme: light"
        assert browser.run(paper) == "rgb(255, 255, 255)"
        browser.run("document.getElementById('theme').click()")
        browser.run(DRAW_ALL)
        assert browser.run(paper) == "rgb(20, 24, 29)"
        assert canvases(browser) > 0
        assert browser.said == []


@pytest.mark.parametrize("name", ["one.html", "two.html"])
def test_a_phone_shows_all_without_scrolling_sideways(pages, name):
    with Browser(390, 800, phone=True) as browser:
        browser.open(pages / name)
        browser.run(DRAW_ALL)
        assert browser.run("document.documentElement.scrollWidth") <= 390
        widths = "[...document.querySelectorAll('.chart')].map((one) => one.offsetWidth)"
        assert max(browser.run(widths)) <= 390
        assert browser.said == []


def test_a_finger_brushes_on_an_axis_and_scrolls_elsewhere(pages):
    with Browser(390, 800, phone=True) as browser:
        browser.open(pages / "one.html")
        for box in ("'.chart.parallel'", "'#curve-charts .chart'"):
            find = f"document.querySelector({box})"
            browser.run(f"{find}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
            browser.wait(f"{find}.querySelector('canvas')")
            left, top = browser.run(
                f"(() => {{ const r = {find}.getBoundingClientRect(); return [r.left, r.top]; }})()"
            )
            if "parallel" in box:
                browser.touch((left + 120, top + 34), (left + 220, top + 34))
                count = "document.querySelector('#sweeps output').textContent"
                browser.wait(f"{count}.includes(' of 60 networks chosen')")
            before = browser.run("scrollY")
            browser.touch((left + 150, top + 160), (left + 150, top + 60))
            browser.wait(f"scrollY > {before} + 20")
        assert browser.said == []


def test_tables_sort_and_runs_are_named(pages):
    with Browser() as browser:
        browser.open(pages / "two.html")
        first = "document.querySelector('#runs tbody th').textContent"
        assert browser.run(first) == NASTY
        loss = "[...document.querySelectorAll('#runs thead button')][1]"
        browser.run(f"{loss}.click(); {loss}.click()")
        assert browser.run(first) == "b"
        assert browser.run(f"{loss}.parentElement.getAttribute('aria-sort')") == "descending"
        browser.run(DRAW_ALL)
        # A name of HTML is text, in the legend, too, and in what the cursor shows.
        chart = "echarts.getInstanceByDom(document.querySelector('#curve-charts .chart'))"
        browser.run(f"{chart}.dispatchAction({{type: 'showTip', x: 200, y: 100}})")
        browser.wait("document.querySelector('.chart table')")
        assert browser.run("document.querySelectorAll('img').length") == 0
        assert NASTY in browser.run("document.querySelector('.chart table').textContent")
        assert browser.said == []


def test_numbered_metrics_are_one_picture(tmp_path):
    """Shares of four experts, a vector of any sign, and names that are no vectors."""
    shares = {f"expert {i}": share for i, share in enumerate((0.1, 0.5, 0.25, 0.15))}
    alone = {"loss": 1.0, "top5": 0.5, "gap 0": 1.0, "gap 1": 1.0, "gap 3": 1.0}
    rows = [
        {"kind": "step", "step": step, "epoch": 1, **alone, **shares,
         **{f"delta_{i}": i * 10.0 - step for i in range(3)}}
        for step in range(1, 301)
    ]  # fmt: skip
    write_rows(tmp_path, rows)
    write_report([tmp_path], tmp_path / "report.html")
    with Browser() as browser:
        browser.open(tmp_path / "report.html")
        browser.wait("document.documentElement.dataset.ready")
        browser.run(DRAW_ALL)
        figures = "[...document.querySelectorAll('#curve-charts figure')]"
        captions = browser.run(f"{figures}.map((one) => one.querySelector('figcaption').innerText)")
        assert captions == [
            "loss", "gap 0", "gap 1", "gap 3", "top5",
            "delta every step: shades: the value",
            "expert every step: 1 has 2.0 × the even share over the last tenth; "
            "middle shade: 0.25",
        ]  # fmt: skip
        assert browser.run("document.documentElement.dataset.drawn") == "7"
        browser.run("document.querySelectorAll('#curve-charts details').forEach("
                    "(one) => { one.open = true; })")  # fmt: skip
        browser.wait("document.querySelectorAll('#curve-charts table').length === 7")
        table = f"{figures}[5].querySelector('table').innerText"
        first, second, *_ = [row.split("\t") for row in browser.run(table).splitlines()]
        assert first == ["step", "delta 0", "delta 1", "delta 2"]
        assert second == ["3", "-2", "8", "18"]  # the mean of steps 1 to 3
        assert browser.said == []
