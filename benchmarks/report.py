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

from benchmarks import charts, machine
from benchmarks.charts import range_of
from benchmarks.charts import speed_of as _speed
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
    "gpu": "One GPU",
    "divided": "One network, split",
    "pipelines": "One network, in stages",
    "compile": "Compiling, and what a step costs the host",
    "planning": "Plans searched and estimated",
    "ranked": "Plans in the order of their estimates",
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
UNEVEN_PICTURE = (
    "![Held-out loss over seconds in each way to train; a large mark where the goal is reached, "
    f"faint lines after it](assets/{UNEVEN})"
)


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
    charts.draw_speeds(results, TITLES, options.pictures)
    charts.draw_members(results, options.pictures / "benchmarks-members.png")
    charts.draw_uneven(results, options.pictures / UNEVEN)
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
    """A few rows: the range of speeds beside one peer each, on the machine measured last."""
    lines = [
        "| on the same work | times as fast as | | machine |",
        "|---|---|---:|---|",
    ]
    for text, group, part, against in HEADLINES:
        measured = []
        for result in results:
            speeds = [
                row["speed"] for row in result["rows"]
                if row["row"] == "comparison" and row["group"] == group
                and part in row["name"] and row["against"] == against
                and row["facts"].get("members", 100) >= 100
            ]  # fmt: skip
            if speeds:
                date = result["earlier"].get(group, result)["date"]
                measured.append((date, range_of(speeds), machine.label(result["machine"])))
        if measured:
            _, speed, where = max(measured)
            lines.append(f"| {text} | {against} | {speed} | {where} |")
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
            lines += ["", UNEVEN_PICTURE]
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


if __name__ == "__main__":
    main()
