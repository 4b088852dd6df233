"""The parts of the page that are text and tables: runs side by side, plans, estimates, events."""

import collections
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plurax.report.lanes import worker_lanes
from plurax.report.page.chart_data import events
from plurax.report.page.html_parts import (
    Cell,
    as_cell,
    details,
    duration_text,
    escape,
    number_text,
    pairs,
    section,
    table,
)
from plurax.report.page.run_data import RunData
from plurax.report.page.sweep_data import (
    aligned_settings,
    compared_settings,
    differing,
    shared_metrics,
)
from plurax.report.page.timeline_svg import lanes_svg, pipeline_svg
from plurax.report.run_series import is_number
from plurax.tree import human_bytes

MOST_METRICS = 5
"""Metrics that are columns of the table of runs."""
FEW = 16
"""Settings of one run that are shown without being asked for."""
LONGEST = 60
"""Letters of a setting that a table shows."""
MOST_NAMES, MOST_BOXES = 6, 64
"""Runs that are named above their plan, and devices that are drawn."""
MOST_PIPELINES = 3
"""Pipelines whose timelines are drawn."""


# --- Runs ---------------------------------------------------------------------------------------


def runs_section(runs: Sequence[RunData]) -> str:
    """Return figures and settings of one run, or a table of several side by side."""
    return _one_run(runs[0]) if len(runs) == 1 else _several_runs(runs)


def _one_run(run: RunData) -> str:
    final, names = run.series.final, shared_metrics([run])[:MOST_METRICS]
    figures = {name: number_text(final[name]) for name in names}
    middle = f"median of {run.series.members} members" if run.series.members else ""
    tiles = [(name.replace("_", " "), value, middle) for name, value in figures.items()]
    tiles += [
        (name, text, note)
        for name, text, note in _amounts(run)
        if name not in figures and text != "–"
    ]
    shown = "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}'
        + (f"<small>{escape(note)}</small>" if note else "")
        + "</dd></div>"
        for name, value, note in tiles
    )
    settings = {name: _short(value) for name, value in compared_settings(run).items()}
    note = "The run was going on when this page was written." if run.going_on else ""
    more = details("Settings", pairs(settings), shown=len(settings) <= FEW) if settings else ""
    return section("runs", "Summary", f'<dl class="tiles">{shown}</dl>{more}', note)


def _amounts(run: RunData) -> list[tuple[str, str, str]]:
    series = run.series
    rate, epochs = series.last.get("examples_per_second"), series.last.get("epoch")
    return [
        ("steps", number_text(series.step), f"{epochs} epochs" if epochs else ""),
        ("time", duration_text(series.seconds) if series.epochs else "–", "without evaluation"),
        ("throughput", f"{rate:,.0f}" if is_number(rate) else "–", "examples/s, last epoch"),
    ]


def _several_runs(runs: Sequence[RunData]) -> str:
    settings = aligned_settings(runs)
    differ = differing(settings)
    metrics = [name for name in shared_metrics(runs) if name not in ("examples_per_second",)]
    metrics = metrics[:MOST_METRICS]
    common = {name: _usual([_short(values.get(name)) for values in settings]) for name in differ}
    columns: list[str | Cell] = ["run", *(Cell(name.replace("_", " ")) for name in metrics)]
    columns += ["steps", "time", "examples/s", *(Cell(name, mark="differs") for name in differ)]
    rows = []
    for run, values in zip(runs, settings, strict=True):
        named = f"{run.name} (going on)" if run.going_on else run.name
        row: list[Any] = [Cell(named, run.name), *(run.series.final.get(name) for name in metrics)]
        seconds = run.series.seconds
        row += [run.series.step, Cell(duration_text(seconds), seconds, "number")]
        row.append(run.series.last.get("examples_per_second"))
        row += [_setting(values.get(name), common[name]) for name in differ]
        rows.append(row)
    names = [run.name for run in runs]
    shown = table(
        f"{len(runs)} runs, last values of each", columns, rows, sortable=True, row_names=names
    )
    alike = {name: _short(v) for name, v in settings[0].items() if name not in differ}
    more = details(f"Alike in all runs: {len(alike)} settings", pairs(alike)) if alike else ""
    filter_ = (
        '<p class="controls" id="run-filter" hidden><label>Show runs whose name holds '
        '<input type="search" autocomplete="off"></label> '
        '<output aria-live="polite"></output></p>'
    )
    note = (
        "Columns marked ≠ are settings that differ between the runs; a value in bold is not that "
        "of most runs. Choose a column's heading to sort by it."
        if differ
        else "Choose a column's heading to sort by it."
    )
    return section("runs", "Runs side by side", filter_ + shown + more, note)


def _usual(texts: Sequence[str]) -> str | None:
    """Return what more than half of the texts are, None where there is no such text."""
    text, count = collections.Counter(texts).most_common(1)[0]
    return text if 2 * count > len(texts) else None


def _setting(value: Any, usual: str | None) -> Cell:
    cell = as_cell(value if is_number(value) or value is None else _short(value))
    return (
        cell if usual in (None, _short(value)) else cell._replace(mark=f"{cell.mark} other".strip())
    )


def _short(value: Any) -> str:
    text = number_text(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


# --- Plan ---------------------------------------------------------------------------------------


def plan_section(runs: Sequence[RunData]) -> str:
    """Return each distinct plan in words, with its pipeline over time; "" without any."""
    by_plan: dict[Any, list[RunData]] = {}
    for run in runs:
        if run.plan is not None:
            by_plan.setdefault(run.plan, []).append(run)
    drawn = itertools.count()
    parts = []
    for plan, having in by_plan.items():
        which = "" if len(by_plan) == 1 else f"<h3>{escape(_listed(having))}</h3>"
        picture = ""
        if plan.pipeline > 1 and next(drawn) < MOST_PIPELINES:
            picture = pipeline_svg(plan)
        text = plan.explain(having[0].series.batch_size)
        parts.append(f'{which}{_mesh(plan.axes)}<pre class="plan">{escape(text)}</pre>{picture}')
    return section("plan", "Plan", "".join(parts)) if parts else ""


def _mesh(sizes: Mapping[str, int]) -> str:
    """Return the devices of a mesh as boxes: rows are data or member, columns are the others."""
    used = {name: size for name, size in sizes.items() if size > 1}
    count = math.prod(used.values())
    if count == 1 or count > MOST_BOXES:
        return ""
    columns = count if len(used) == 1 else count // next(iter(used.values()))
    places = itertools.product(*(range(size) for size in used.values()))
    boxes = "".join(
        f"<li><b>{index}</b>"
        + "".join(f"<span>{name} {at}</span>" for name, at in zip(used, place, strict=True))
        + "</li>"
        for index, place in enumerate(places)
    )
    words = " × ".join(f"{name}={size}" for name, size in used.items())
    return (
        f'<ol class="mesh" style="--columns:{min(columns, 8)}" aria-label="{count} devices: '
        f'{words}">{boxes}</ol>'
    )


def _listed(runs: Sequence[RunData]) -> str:
    names = ", ".join(run.name for run in runs[:MOST_NAMES])
    more = len(runs) - MOST_NAMES
    return f"{names} and {more} more" if more > 0 else names


# --- Estimated beside measured ------------------------------------------------------------------

QUANTITIES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("seconds", "a step", duration_text),
    ("peak", "memory of a device", human_bytes),
    ("bytes_sent", "sent by a device in a step", human_bytes),
)
"""What is predicted and measured: its name, in words, and how it is written."""


def estimate_section(runs: Sequence[RunData]) -> str:
    """Return what was predicted beside what was measured; "" where nothing was."""
    rows: list[list[Any]] = []
    for run in runs:
        pairs = run.series.estimates
        if not pairs:
            continue
        _, last = pairs[-1]
        timed = [pair["measured"]["seconds"] for _, pair in pairs if _timed(pair)]
        for name, words, text in QUANTITIES:
            predicted = last.get("predicted", {}).get(name)
            measured = last.get("measured", {}).get(name)
            if name == "seconds" and timed:
                measured = sum(timed) / len(timed)
            named = [run.name] if len(runs) > 1 else []
            rows.append([*named, words, *_beside(predicted, measured, text)])
    if not rows:
        return ""
    columns = [*(["run"] if len(runs) > 1 else []), "", "predicted", "measured", "off by"]
    machines = {pair.get("machine") for run in runs for _, pair in run.series.estimates}
    note = f"Predicted for {', '.join(sorted(map(str, machines)))} before the first step; measured "
    note += "by the clock and read from the compiled program."
    content = table("predicted and measured", columns, rows)
    content += '<div class="charts" id="estimate-charts"></div>'
    return section("estimate", "Estimated beside measured", content, note)


def _timed(pair: Any) -> bool:
    return is_number(pair.get("measured", {}).get("seconds"))


def _beside(predicted: Any, measured: Any, text: Callable[[float], str]) -> list[Cell | str | None]:
    shown = [Cell(text(v), v, "number") if is_number(v) else None for v in (predicted, measured)]
    if not (is_number(predicted) and is_number(measured) and predicted):
        return [*shown, None]
    off = 100 * (measured / predicted - 1)
    words = f"{off:+.0f} %" if abs(off) < 200 else f"× {measured / predicted:.3g}"
    return [*shown, Cell(words, off, "number")]


# --- Compiled ------------------------------------------------------------------------------------

SIZES = {"state_bytes": "state", "batch_bytes": "data", "temporary_bytes": "temporaries",
         "peak_bytes": "in all"}  # fmt: skip
"""Bytes on a device of a compiled program: as `run.toml` names them, and in words."""


def compiled_section(runs: Sequence[RunData]) -> str:
    """Return what the compiler made of each run's program; "" where no run says so."""
    several, rows, sent = len(runs) > 1, list[list[Any]](), list[list[Any]]()
    for run in runs:
        if not (read := run.compiled):
            continue
        named = [run.name] if several else []
        seconds, peak = read.get("seconds"), read.get("peak_bytes")
        took = Cell(duration_text(seconds), seconds, "number") if is_number(seconds) else None
        sizes = [_beside(read.get(name), None, human_bytes)[0] for name in SIZES]
        planned, _, off = _beside(read.get("planned_peak_bytes"), peak, human_bytes)
        rows.append([*named, str(read.get("function")), took, *sizes, planned, off])
        sent += [[*named, name, *_sent(one)] for name, one in _tables(read.get("sent")).items()]
    if not rows:
        return ""
    first = ["run"] if several else []
    columns = [*first, "compiled", "in", *SIZES.values(), "planned", "off by"]
    content = table("memory of a device", columns, rows)
    if sent:
        columns = [*first, "collective", "planned", "compiled", "planned bytes", "bytes", "off by"]
        content += table("sent in a step, planned and as compiled", columns, sent)
    note = "Read from the compiled program after the first epoch. A compiler joins collectives, "
    note += "and splits them: it is the bytes that should agree."
    return section("compiled", "Compiled program", content, note)


def _sent(one: Mapping[str, Any]) -> list[Any]:
    counts = [one.get(name) for name in ("planned_count", "count")]
    beside = _beside(one.get("planned_bytes"), one.get("bytes"), human_bytes)
    return [*(count if is_number(count) else None for count in counts), *beside]


# --- Calibration --------------------------------------------------------------------------------


def calibration_section(runs: Sequence[RunData]) -> str:
    """Return how well predictions know what they know, where a run wrote `calibration.json`."""
    rows: list[list[Any]] = []
    names: dict[str, None] = {}
    for run in runs:
        for name, result in _tables(run.calibration.get("predictions")).items():
            scores = {"calibration error": result.get("error")}
            scores |= _tables(result.get("scores"), False)
            names |= dict.fromkeys(scores)
            label = f"{run.name}: {name}" if len(runs) > 1 else name
            rows.append([Cell(label), scores])
    if not rows and not any(run.calibration for run in runs):
        return ""
    filled = [
        [label, *(scores.get(n) if is_number(scores.get(n)) else None for n in names)]
        for label, scores in rows
    ]
    content = table("scores of predictions", ["", *names], filled) if rows else ""
    content += '<div class="charts" id="calibration-charts"></div>'
    return section("calibration", "Uncertainty and calibration", content)


def _tables(value: Any, nested: bool = True) -> dict[str, Any]:
    """Return a table of tables, or of values; what a file has otherwise is left out."""
    if not isinstance(value, Mapping):
        return {}
    return {str(k): v for k, v in value.items() if not nested or isinstance(v, Mapping)}


# --- Events -------------------------------------------------------------------------------------


def events_section(runs: Sequence[RunData]) -> str:
    """Return what happened in the runs: skipped updates, rollbacks, saves that failed, resumes."""
    several = len(runs) > 1
    rows = [
        [*([run.name] if several else []), row["step"], row["event"], row["details"]]
        for run in runs
        for row in events(run)
    ]
    if not rows:
        text = "No update was skipped, and nothing went wrong."
        return section("events", "Events", f'<p class="note">{text}</p>')
    columns = [*(["run"] if several else []), "step", "event", "details"]
    caption = "1 event" if len(rows) == 1 else f"{len(rows)} events"
    return section("events", "Events", table(caption, columns, rows, sortable=True))


# --- Parameter servers --------------------------------------------------------------------------


def servers_section(runs: Sequence[RunData]) -> str:
    """Return what workers and servers did over time; "" without parameter servers."""
    parts = []
    for run in runs:
        account = run.series.last.get("servers")
        if isinstance(account, dict):
            parts += [f"<h3>{escape(run.name)}</h3>"] if len(runs) > 1 else []
            parts.append(_account(account))
        if run.servers:
            try:
                lanes, resumed, end = worker_lanes(run.servers)
            except (KeyError, TypeError, ValueError):
                continue  # of another version
            parts.append(lanes_svg(lanes, resumed, end))
    return section("servers", "Parameter servers", "".join(parts)) if parts else ""


def _account(account: dict[str, Any]) -> str:
    staleness = account.get("staleness") or {}
    total = sum(staleness.values()) or 1
    rows = [
        [Cell(v, float(v)), n, Cell(f"{100 * n / total:.1f} %", n, "number")]
        for v, n in staleness.items()
    ]
    figures = {
        "updates": account.get("updates", 0),
        "rejected": ", ".join(f"{n} {why}" for why, n in (account.get("rejected") or {}).items())
        or "none",
        "lost updates": sum((account.get("lost_updates") or {}).values()),
        "started again": ", ".join(account.get("restarts") or []) or "none",
        "pushed": human_bytes(account.get("pushed_bytes", 0)),
        "pulled": human_bytes(account.get("pulled_bytes", 0)),
    }
    shown = pairs(figures)
    if rows:
        shown += table("staleness of gradients", ["versions", "gradients", "share"], rows)
    return shown
