"""The tables and the pictures of `docs/performance.md`, from the results.

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
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks import machine
from benchmarks.harness import ROOT

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
ASSETS = ROOT / "docs" / "assets"
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
    "planning": "Plans searched and estimated",
    "servers": "Parameter servers",
    "uneven": "Four workers, one of them four times as slow",
    "recovery": "Parameter servers: seconds from a death until training goes on",
    "reliability": "Copies compared bit by bit, and the watchdog",
    "callbacks": "What callbacks cost",
    "hosts": "Several processes, and a restart",
    "sources": "Data sources under fit, beside their own loops",
}
UNEVEN = "uneven.png"
"""Loss over seconds, of four workers of which one is slow."""
COLOURS = {True: "#0072B2", False: "#D55E00", None: "#999999"}
OCTAVES = (0.25, 0.5, 1, 2, 4, 8, 16)
LINES = (("#0072B2", "o"), ("#009E73", "s"), ("#D55E00", "^"), ("#000000", "D"), ("#CC79A7", "v"))
"""The colour and the marker of each peer of populations, and of each way to train."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--pictures", type=Path, default=ASSETS)
    options = parser.parse_args()
    if options.results:
        results = [json.loads(path.read_text()) for path in options.results]
    else:
        results = newest(ROOT / "benchmarks" / "results")
    options.pictures.mkdir(parents=True, exist_ok=True)
    plt.rc("font", size=12)
    draw(results, options.pictures / "benchmarks.png")
    draw_members(results, options.pictures / "benchmarks-members.png")
    draw_uneven(results, options.pictures / UNEVEN)
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
        if checked and group == "recovery":
            lines += _recoveries(checked)
        elif checked:
            lines += ["| | found | reached |", "|---|---|---|"]
            lines += [f"| {r['name']} | {r['found']} | {_mark(r)} |" for r in checked]
        if checked and group == "uneven":
            lines += ["", f"![Held-out loss over seconds in each way to train](assets/{UNEVEN})"]
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


def _recoveries(rows: list[dict[str, Any]]) -> list[str]:
    """A column for each kind of seconds: the median, and the range where there are several."""

    def cell(row: dict[str, Any], name: str) -> str:
        found = sorted(sample[name] for sample in row["facts"]["samples"])
        spread = f" ({found[0]:.2f} to {found[-1]:.2f})" if len(found) > 1 else ""
        return f"{row['facts']['medians'][name]:.2f}{spread}"

    columns = {
        "next update": "update",
        "itself at work again": "work",
        "longest time between updates": "gap",
    }
    return [
        f"| | {' | '.join(columns)} | times |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {row['name']} | {' | '.join(cell(row, name) for name in columns.values())} | "
            f"{len(row['facts']['samples'])} |"
            for row in rows
        ),
    ]


def _seconds(side: dict[str, Any]) -> str:
    median = side["median"]
    return f"{median:.2f} s" if median >= 1 else f"{1e3 * median:.3g} ms"


def _mark(row: dict[str, Any]) -> str:
    return {True: "yes", False: "**no**", None: ""}[row["reached"]]


# ---- the pictures ------------------------------------------------------------------------------


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """A dot for each comparison, in one line for each peer, on a logarithmic axis.

    The dots of a peer are what the tables have in as many rows. Populations have a picture of
    their own: what counts there is the number of networks.
    """
    lines: list[tuple[str, list[dict[str, Any]]]] = []
    for group, title in TITLES.items():
        for result in results if group != "members" else ():
            peers: dict[str, list[dict[str, Any]]] = {}
            for row in _compared(result, group):
                peers.setdefault(row["against"], []).append(row)
            if peers:
                lines.append((f"{title}: {machine.label(result['machine'])}", []))
                lines += peers.items()
    if not lines:
        return
    speeds = [row["speed"] for _, rows in lines for row in rows]
    height = 0.29 * len(lines) + 1.2
    figure, axis = plt.subplots(figsize=(9, height))
    figure.subplots_adjust(left=0.4, right=0.83, bottom=0.75 / height, top=1 - 0.45 / height)
    axis.set_xscale("log")
    axis.set_xlim(0.85 * min(speeds), 1.15 * max(speeds))
    axis.set_ylim(len(lines) - 0.4, -0.6)
    axis.axvspan(axis.get_xlim()[0], 1, color="#F0F0F0", zorder=0)
    axis.axvline(1, color="black", linewidth=1.2, zorder=1)
    for place, (text, rows) in enumerate(lines):
        _line(axis, place, text, rows)
    for reached, words in ((True, "target reached"), (False, "missed"), (None, "none set")):
        axis.plot([], [], "o", color=COLOURS[reached], label=words)
    figure.legend(loc="upper center", ncols=3, frameon=False)
    axis.set_yticks([])
    axis.set_xticks([tick for tick in OCTAVES if min(speeds) < tick < 1.15 * max(speeds)])
    axis.minorticks_off()
    axis.xaxis.set_major_formatter("{x:g} ×")
    axis.set_xlabel("slower    ←    times as fast as the peer    →    faster")
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _line(axis: plt.Axes, place: int, text: str, rows: list[dict[str, Any]]) -> None:
    """A peer's name, its dots and their range; without rows a heading, `title: machine`."""
    beside = axis.get_yaxis_transform()
    if not rows:
        title, where = text.split(": ")
        axis.text(-0.91, place, title, transform=beside, va="center", weight="bold")
        axis.text(
            1.38, place, where, transform=beside, va="center", ha="right", color="#666666"
        ).set_fontsize(10.5)
        return
    speeds = [row["speed"] for row in rows]
    low, high = _speed(min(speeds)), _speed(max(speeds))
    axis.text(-0.02, place, text, transform=beside, va="center", ha="right")
    axis.text(1.02, place, f"{low} ×" if low == high else f"{low} to {high} ×",
              transform=beside, va="center")  # fmt: skip
    axis.axhline(place, color="#DDDDDD", linewidth=0.8, zorder=0)
    axis.plot([min(speeds), max(speeds)], [place] * 2, color="#444444", linewidth=1.5, zorder=2)
    for row in rows:
        axis.plot(
            row["speed"], place, "o", color=COLOURS[row["reached"]], markersize=7, mec="white"
        )


def draw_members(results: list[dict[str, Any]], path: Path) -> None:
    """Speed over the number of networks, a panel for each population and a line for each peer."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        for row in _compared(result, "members"):
            facts = row["facts"]
            title = f"{facts['case']}: {facts['parameters']:,} parameters"
            panels.setdefault(f"{title}\n{machine.label(result['machine'])}", []).append(row)
    if not panels:
        return
    peers = list(dict.fromkeys(row["against"] for rows in panels.values() for row in rows))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(9, 4.6), sharey=True, squeeze=False, layout="constrained"
    )
    for (title, rows), axis in zip(panels.items(), axes[0], strict=True):
        for peer, (colour, marker) in zip(peers, LINES, strict=False):
            points = sorted(
                (row["facts"]["members"], row["speed"]) for row in rows if row["against"] == peer
            )
            axis.loglog(
                *zip(*points, strict=True), color=colour, marker=marker, linewidth=2, label=peer
            )
        axis.axhline(1, color="black", linewidth=1.2, zorder=1.9)
        axis.set_title(title, fontsize=12)
        axis.set_xlabel("networks")
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.yaxis.set_major_formatter("{x:g} ×")
        axis.minorticks_off()
        axis.grid(color="#DDDDDD", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("times as fast as the peer")
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_uneven(results: list[dict[str, Any]], path: Path) -> None:
    """Held-out loss over seconds, a panel for each example and a line for each way to train.

    Every epoch takes the median of the epochs after the first, as in the tables.
    """
    panels: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        for row in result["rows"]:
            if (row["row"], row["group"]) == ("check", "uneven"):
                title = f"{row['facts']['data']}\n{machine.label(result['machine'])}"
                panels.setdefault(title, []).append(row["facts"])
    if not panels:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(9, 4.6), squeeze=False,
                                layout="constrained")  # fmt: skip
    for (title, ways), axis in zip(panels.items(), axes[0], strict=True):
        for facts, (colour, marker) in zip(ways, LINES, strict=False):
            seconds = [facts["epoch"] * (index + 1) for index in range(len(facts["losses"]))]
            axis.semilogy(seconds, facts["losses"], color=colour, marker=marker, markersize=4,
                          linewidth=1.6, label=facts["way"])  # fmt: skip
        goal = ways[0]["goal"]
        axis.axhline(goal, color="black", linewidth=1, linestyle=":")
        axis.text(1.01, goal, f"goal\n{goal:g}", transform=axis.get_yaxis_transform(), va="center")
        axis.set_title(title, fontsize=12)
        axis.set_xlabel("seconds")
        axis.set_xlim(left=0)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(NullLocator())
        axis.grid(color="#DDDDDD", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("held-out loss")
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=len(handles[0]), frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _compared(result: dict[str, Any], group: str) -> list[dict[str, Any]]:
    """The comparisons of a group."""
    return [row for row in result["rows"] if (row["row"], row["group"]) == ("comparison", group)]


if __name__ == "__main__":
    main()
