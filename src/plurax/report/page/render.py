"""Write runs as one HTML file, which needs neither a server nor the network.

    template.html    the page's frame
    style.css        ours
    *.js             ours, joined in the order of `SCRIPTS`
    vendor/          Apache ECharts, which draws the curves

Text and tables are in the HTML; charts are drawn from numbers in it, embedded as JSON, once they
come into view. ECharts stands in the page as text and is run after the first paint. The page's own
Content-Security-Policy names the scripts by their checksums and allows no connection, so no name in
a run's files can become code.
"""

import base64
import hashlib
import importlib.resources
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plurax
from plurax import errors
from plurax.argument_check import text
from plurax.disk import make_folder, replace_file
from plurax.report.page.chart_data import metric_names, runs_json
from plurax.report.page.embed import embedded, json_value
from plurax.report.page.html_parts import escape, section
from plurax.report.page.run_data import RunData, read_run, run_folders, run_names
from plurax.report.page.sections import (
    calibration_section,
    compiled_section,
    estimate_section,
    events_section,
    plan_section,
    runs_section,
    servers_section,
)
from plurax.report.page.sweep_data import SweepData, sweeps
from plurax.report.run_series import is_number
from plurax.validate import local_path

SCRIPTS = ("base.js", "vectors.js", "curves.js", "sweep.js", "details.js", "start.js")
CURVES = (
    '<div class="controls" id="curve-controls"></div><div id="curve-legend" class="legend"></div>'
    '<div class="charts" id="curve-charts"></div>'
)
NO_SCRIPT = "<noscript><p class=note>Charts need JavaScript; tables do not.</p></noscript>"


def write_report(
    runs: str | Path | Sequence[str | Path], output: str | Path = "report.html"
) -> Path:
    """Write runs as one HTML file, as `plurax report` does, and return its path.

    **Arguments:** `runs`, output directories of runs, or folders of such directories, as a sweep
    writes them; `output`, the file.

    Raises `ExperimentError` for a folder that is no run's, and where the file cannot be written.
    """
    asked = [runs] if isinstance(runs, str | Path) else runs
    folders, output = [local_path(path) for path in asked], local_path(output)
    if output.is_dir():
        raise errors.ExperimentError(
            f"--output {output} is a folder, and the page is one file. Write --output "
            f"{output}/report.html."
        )
    paths = run_folders(folders)
    if not paths:
        raise errors.argument_misfits(
            "plurax.analysis.write_report", "runs", text(runs), "at least one folder of a run"
        )
    read = [read_run(path, name) for path, name in zip(paths, run_names(paths), strict=True)]
    page = render(read, sweeps(read, folders)).encode()
    try:
        make_folder(output.parent)
        replace_file(output, page)
    except OSError as error:
        raise errors.not_written(str(output), error.strerror or str(error)) from None
    return output


def render(runs: Sequence[RunData], tables: Sequence[SweepData]) -> str:
    """Return the page of some runs and their sweeps as HTML."""
    metrics = metric_names(runs)
    parts = {
        "runs": runs_section(runs),
        "curves": section("curves", "Curves", NO_SCRIPT + CURVES),
        "sweep": section("sweep", "Sweep", '<div id="sweeps"></div>') if tables else "",
        "plan": plan_section(runs),
        "estimate": estimate_section(runs),
        "compiled": compiled_section(runs),
        "calibration": calibration_section(runs),
        "servers": servers_section(runs),
        "events": events_section(runs),
    }
    names = {"runs": "Runs" if len(runs) > 1 else "Summary", "curves": "Curves", "sweep": "Sweep",
             "plan": "Plan", "estimate": "Estimate", "compiled": "Compiled",
             "calibration": "Uncertainty", "servers": "Servers", "events": "Events"}  # fmt: skip
    links = "".join(
        f'<li><a href="#{key}">{escape(names[key])}</a></li>' for key, part in parts.items() if part
    )
    payload = {
        "runs": runs_json(runs, metrics),
        "metrics": metrics,
        "sweeps": [sweep.to_json() for sweep in tables],
        "estimates": [json_value(_estimates(run), 6) for run in runs],
        "calibrations": [{"run": run.name, **json_value(run.calibration, 6)} for run in runs
                         if run.calibration],
    }  # fmt: skip
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    script = "(() => {\n'use strict';\n" + "\n".join(map(_asset, SCRIPTS)) + "})();\n"
    echarts = _asset("vendor/echarts.min.js")
    return _filled(
        _asset("template.html"),
        {
            "title": escape(title),
            "version": escape(plurax.__version__),
            "policy": " ".join(f"'sha256-{_digest(text)}'" for text in (script, echarts)),
            "style": _asset("style.css"),
            "links": links,
            "sections": "\n".join(part for part in parts.values() if part),
            "data": embedded(payload),
            "echarts": echarts,
            "script": script,
        },
    )


def _estimates(run: RunData) -> dict[str, Any]:
    pairs = run.series.estimates
    last = pairs[-1][1] if pairs else {}
    seconds = [(step, pair.get("measured", {}).get("seconds")) for step, pair in pairs]
    return {
        "steps": [step for step, value in seconds if is_number(value)],
        "seconds": [value for _, value in seconds if is_number(value)],
        "predicted": last.get("predicted", {}),
        "measured": last.get("measured", {}),
        "limit": None if run.machine is None else run.machine.memory,
    }


def _asset(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Return a template with each `{{name}}` replaced, all at once: values are not read again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)
