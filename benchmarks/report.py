"""The table and the chart of `docs/performance.md`, from the results.

    python -m benchmarks.report [RESULTS.json ...]

Without arguments the newest results of each machine are shown, each group of rows from the latest
file that has it. What stands between the two markers in the page is replaced; the rest of the page
is written by hand.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import machine
from benchmarks.harness import ROOT

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
CHART = ROOT / "docs" / "assets" / "benchmarks.png"
TITLES = {
    "step": "A training step",
    "accumulation": "Gradient accumulation",
    "domains": "Training the rock domains on two devices",
    "inference": "Inference",
    "max_batch_size": "The largest batch",
    "members": "Many small networks",
    "divided": "One network, split",
    "pipelines": "One network, in stages",
    "compile": "Compiling, and what a step costs the host",
}
COLOURS = {True: "#0072B2", False: "#D55E00", None: "#999999"}
TARGET = "#000000"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--chart", type=Path, default=CHART)
    options = parser.parse_args()
    if options.results:
        results = [json.loads(path.read_text()) for path in options.results]
    else:
        results = newest(ROOT / "benchmarks" / "results")
    options.chart.parent.mkdir(parents=True, exist_ok=True)
    draw(results, options.chart)
    fill(options.page, "\n\n".join(table(result) for result in results))
    if options.page == PAGE:
        fill(README, headlines(results))


def fill(page: Path, tables: str) -> None:
    """Put the tables between the markers of a page."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}", encoding="utf-8")


HEADLINES = (
    ("a training step, batch on the devices", "step", "batch on the devices", "JAX by hand"),
    (
        "gradient accumulation, 16 microbatches",
        "accumulation",
        "16 microbatches",
        "optax.MultiSteps",
    ),
    (
        "100 and 1,000 small networks (PyTorch's 1,000: scaled from 20)",
        "members",
        "spirals, 1",
        "PyTorch, one network after another",
    ),
    ("one network in shards (ZeRO)", "divided", "", "PyTorch FSDP2"),
)
"""The rows of the README: what it says, group, a part of the rows' names, against what."""


def headlines(results: list[dict[str, Any]]) -> str:
    """A few rows of all machines: the range of speeds beside one peer each."""
    lines = [
        "| on the same work | times as fast as | | machine |",
        "|---|---|---:|---|",
    ]
    for text, group, part, against in HEADLINES:
        for result in results:
            speeds = [
                row["speed"] for row in result["rows"]
                if row["row"] == "comparison" and row["group"] == group
                and part in row["name"] and row["against"] == against
                and row["facts"].get("members", 100) >= 100
            ]  # fmt: skip
            if speeds:
                low, high = _speed(min(speeds)), _speed(max(speeds))
                span = f"{low} ×" if low == high else f"{low} to {high} ×"
                lines.append(
                    f"| {text} | {against} | {span} | {machine.label(result['machine'])} |"
                )
    return "\n".join(lines)


def newest(folder: Path) -> list[dict[str, Any]]:
    """Each machine's results, every group of rows from the latest file that has it.

    Quick runs are left out. `earlier` says of what groups the rows are from an earlier file, and
    its date and versions.
    """
    merged: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        match = re.fullmatch(r"(?!quick-)(.+)-(\d{4}-\d\d-\d\d)\.json", path.name)
        if match:  # sorted by date within a machine
            result = json.loads(path.read_text())
            merged[match[1]] = _over(merged.get(match[1]), result)
    return list(merged.values())


def _over(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    if old is None:
        return {**new, "earlier": {}}
    again = {row["group"] for row in new["rows"]}
    kept = [row for row in old["rows"] if row["group"] not in again]
    here = {"date": old["date"], "versions": old["versions"]}
    earlier = {row["group"]: old["earlier"].get(row["group"], here) for row in kept}
    return {**new, "rows": kept + new["rows"], "earlier": earlier}


def _speed(speed: float) -> str:
    """Three digits, more before the point, two after it at most."""
    return f"{speed:.{2 if speed < 10 else 1 if speed < 100 else 0}f}"


def _target(target: float | None) -> str:
    return "" if target is None else f"{_speed(target)} ×"


# ---- the table ---------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """One machine's results in Markdown."""
    heading = f"### {machine.label(result['machine'])}, {result['date']}"
    lines = [heading, "", f"{_versions(result)}."]
    for group, title in TITLES.items():
        rows = [row for row in result["rows"] if row["group"] == group]
        compared = [row for row in rows if row["row"] == "comparison"]
        checked = [row for row in rows if row["row"] == "check"]
        if rows:
            lines += ["", f"**{title}**", ""]
        if group in result.get("earlier", {}):
            before = result["earlier"][group]
            lines += [f"Measured {before['date']} with {_versions(before)}.", ""]
        if compared:
            lines += [
                "| | against | plurax | other | speed | quartiles | target | reached |",
                "|---|---|---:|---:|---:|---:|---:|---|",
                *(_comparison(row) for row in compared),
            ]
        lines += [""] * bool(compared and checked)
        if checked:
            lines += ["| | found | reached |", "|---|---|---|"]
            lines += [f"| {r['name']} | {r['found']} | {_mark(r)} |" for r in checked]
        skipped = [row for row in rows if row["row"] == "skipped"]
        lines += [""] * bool(skipped and len(skipped) < len(rows))
        lines += [f"- not measured: {row['name']}: {row['reason']}" for row in skipped]
    return "\n".join(lines)


def _versions(result: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in result["versions"].items())


def _comparison(row: dict[str, Any]) -> str:
    low, high = row["spread"]
    return (
        f"| {row['name']} | {row['against']} | {_seconds(row['plurax'])} | "
        f"{_seconds(row['other'])} | {_speed(row['speed'])} × | {_speed(low)} to {_speed(high)} | "
        f"{_target(row['target'])} | {_mark(row)} |"
    )


def _seconds(side: dict[str, Any]) -> str:
    median = side["median"]
    return f"{median:.2f} s" if median >= 1 else f"{1e3 * median:.3g} ms"


def _mark(row: dict[str, Any]) -> str:
    return {True: "yes", False: "**no**", None: ""}[row["reached"]]


# ---- the chart ---------------------------------------------------------------------------------


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Horizontal bars of speed, a tick at each target; the panels of each machine.

    Populations, whose speeds span factors of hundreds, have a panel of their own.
    """
    panels: list[tuple[str, bool, list[dict[str, Any]]]] = []
    for result in results:
        title = f"{machine.label(result['machine'])}, {result['date']}"
        compared = [row for row in result["rows"] if row["row"] == "comparison"]
        for wide in (False, True):
            rows = [row for row in compared if (row["group"] == "members") == wide]
            panels += [(title, wide, rows)] * bool(rows)
    heights = [0.34 * len(rows) + 0.9 for _, _, rows in panels]
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(11, sum(heights) + 0.6),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for (title, wide, rows), (axis,) in zip(panels, axes, strict=True):
        (_wide_panel if wide else _panel)(axis, rows)
        axis.set_title(title, fontsize=11, loc="left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axis: plt.Axes, rows: list[dict[str, Any]]) -> None:
    """Bars from 0, cut off where they are longest."""
    numbers = [row["speed"] for row in rows] + [row["target"] or 0.0 for row in rows]
    edge = 1.12 * min(4.0, max(numbers))
    axis.set_xlim(0, edge)
    _bars(axis, rows, 0.0, edge)
    axis.set_xlabel("how many times as fast as the other (black tick: target)")


def _wide_panel(axis: plt.Axes, rows: list[dict[str, Any]]) -> None:
    """Bars to either side of 1, on a logarithmic axis."""
    numbers = [row["speed"] for row in rows] + [row["target"] or 1.0 for row in rows]
    edge = 2 * max(numbers)
    axis.set_xscale("log")
    lowest = min(numbers + [row["spread"][0] for row in rows])
    axis.set_xlim(min(0.5, 0.8 * lowest), edge)
    _bars(axis, rows, 1.0, edge)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("how many times as fast as the other (black tick: target; grey: none set)")


def _bars(axis: plt.Axes, rows: list[dict[str, Any]], start: float, edge: float) -> None:
    places = range(len(rows))
    colours = [COLOURS[row["reached"]] for row in rows]
    lengths = [min(row["speed"], edge) - start for row in rows]
    axis.barh(places, lengths, 0.62, left=start, color=colours)
    for place, row in zip(places, rows, strict=True):
        low, high = row["spread"]
        if row["plurax"]["repeats"] > 1 and low < edge:
            axis.plot([low, min(high, edge)], [place, place], color="white", linewidth=1.5)
            axis.plot([low, min(high, edge)], [place, place], color="black", linewidth=0.7)
        target = row["target"]
        if target is not None:
            axis.plot([target] * 2, [place - 0.42, place + 0.42], color=TARGET, linewidth=2.2)
        axis.annotate(
            f"{_speed(row['speed'])} ×",
            (min(max(row["speed"], high, target or start), edge), place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            annotation_clip=False,
        )
    axis.axvline(1.0, color="#999999", linewidth=0.8, zorder=0)
    axis.set_yticks(
        places, [f"{row['group']}: {row['name']}\nagainst {row['against']}" for row in rows]
    )
    axis.tick_params(axis="y", labelsize=7.5, length=0)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.spines[["top", "right", "left"]].set_visible(False)


if __name__ == "__main__":
    main()
