"""The table and the chart of `docs/performance.md`, from the results.

    python -m benchmarks.report [RESULTS.json ...]

Without arguments the newest results of each machine are shown. What stands between the two markers
in the page is replaced; the rest of the page is written by hand.
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
}
REACHED, MISSED, TARGET = "#0072B2", "#D55E00", "#000000"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--chart", type=Path, default=CHART)
    options = parser.parse_args()
    paths = options.results or newest(ROOT / "benchmarks" / "results")
    results = [json.loads(path.read_text()) for path in paths]
    options.chart.parent.mkdir(parents=True, exist_ok=True)
    draw(results, options.chart)
    fill(options.page, "\n\n".join(table(result) for result in results))
    if options.page == PAGE:
        fill(README, "\n\n".join(summary(result) for result in results))


def fill(page: Path, tables: str) -> None:
    """Put the tables between the markers of a page."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}", encoding="utf-8")


def summary(result: dict[str, Any]) -> str:
    """One machine's results in short: the range of speeds against each peer."""
    lines = [
        f"{machine.label(result['machine'])}, {result['date']}; how many times as fast as the "
        "other, on the same work:",
        "",
        "| | against | speed | target |",
        "|---|---|---:|---:|",
    ]
    groups: dict[tuple[str, str, float], list[float]] = {}
    for row in result["rows"]:
        if row["row"] == "comparison":
            key = (row["group"], row["against"], row["target"])
            groups.setdefault(key, []).append(row["speed"])
    for (group, against, target), speeds in groups.items():
        low, high = f"{min(speeds):.2f}", f"{max(speeds):.2f}"
        span = f"{low} ×" if low == high else f"{low} to {high} ×"
        lines.append(f"| {TITLES[group].lower()} | {against} | {span} | {target:.2f} × |")
    return "\n".join(lines)


def newest(folder: Path) -> list[Path]:
    """For each machine the results of the latest date; quick runs are left out."""
    latest: dict[str, Path] = {}
    for path in sorted(folder.glob("*.json")):
        match = re.fullmatch(r"(?!quick-)(.+)-(\d{4}-\d\d-\d\d)\.json", path.name)
        if match:
            latest[match[1]] = path  # sorted by date within a machine
    return list(latest.values())


# ---- the table ---------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """One machine's results in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [f"### {machine.label(result['machine'])}, {result['date']}", "", f"{versions}."]
    for group, title in TITLES.items():
        rows = [row for row in result["rows"] if row["group"] == group]
        compared = [row for row in rows if row["row"] == "comparison"]
        checked = [row for row in rows if row["row"] == "check"]
        if rows:
            lines += ["", f"**{title}**", ""]
        if compared:
            lines += [
                "| | against | plurax | other | speed | quartiles | target | reached |",
                "|---|---|---:|---:|---:|---:|---:|---|",
                *(_comparison(row) for row in compared),
            ]
        if checked:
            lines += ["| | found | reached |", "|---|---|---|"]
            lines += [f"| {r['name']} | {r['found']} | {_mark(r)} |" for r in checked]
        skipped = [row for row in rows if row["row"] == "skipped"]
        lines += [""] * bool(skipped and len(skipped) < len(rows))
        lines += [f"- not measured: {row['name']}: {row['reason']}" for row in skipped]
    return "\n".join(lines)


def _comparison(row: dict[str, Any]) -> str:
    low, high = row["spread"]
    return (
        f"| {row['name']} | {row['against']} | {_seconds(row['plurax'])} | "
        f"{_seconds(row['other'])} | {row['speed']:.2f} × | {low:.2f} to {high:.2f} | "
        f"{row['target']:.2f} × | {_mark(row)} |"
    )


def _seconds(side: dict[str, Any]) -> str:
    median = side["median"]
    return f"{median:.2f} s" if median >= 1 else f"{1e3 * median:.3g} ms"


def _mark(row: dict[str, Any]) -> str:
    return "yes" if row["reached"] else "**no**"


# ---- the chart ---------------------------------------------------------------------------------


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Horizontal bars of speed, a tick at each target; one panel for each machine."""
    panels = [[row for row in result["rows"] if row["row"] == "comparison"] for result in results]
    heights = [sum(0.34 for _ in rows) + 0.9 for rows in panels]
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(11, sum(heights) + 0.6),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for result, rows, (axis,) in zip(results, panels, axes, strict=True):
        _panel(axis, rows, f"{machine.label(result['machine'])}, {result['date']}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axis: plt.Axes, rows: list[dict[str, Any]], title: str) -> None:
    places = range(len(rows))
    speeds = [row["speed"] for row in rows]
    colours = [REACHED if row["reached"] else MISSED for row in rows]
    edge = 1.12 * min(4.0, max(speeds + [row["target"] for row in rows]))
    axis.barh(places, [min(speed, edge) for speed in speeds], 0.62, color=colours)
    for place, row in zip(places, rows, strict=True):
        low, high = row["spread"]
        if row["plurax"]["repeats"] > 1 and low < edge:
            axis.plot([low, min(high, edge)], [place, place], color="white", linewidth=1.5)
            axis.plot([low, min(high, edge)], [place, place], color="black", linewidth=0.7)
        axis.plot([row["target"]] * 2, [place - 0.42, place + 0.42], color=TARGET, linewidth=2.2)
        axis.annotate(
            f"{row['speed']:.2f} ×",
            (min(max(row["speed"], high, row["target"]), edge), place),
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
    axis.set_xlim(0, edge)
    axis.set_xlabel("how many times as fast as the other (black tick: target)")
    axis.set_title(title, fontsize=11, loc="left")
    axis.spines[["top", "right", "left"]].set_visible(False)


if __name__ == "__main__":
    main()
