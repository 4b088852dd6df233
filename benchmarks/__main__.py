"""Run the measurements, print a table, and write the results.

    python -m benchmarks                            # all of them
    python -m benchmarks step accumulation          # some
    python -m benchmarks --peers PATH_TO_PYTHON     # with PyTorch and TensorFlow
    python -m benchmarks --quick                    # tiny sizes: does the harness work?

Results of one machine and day share a file: rows measured again replace those measured before.
"""

import argparse
import dataclasses
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine, sizes
from benchmarks.harness import ROOT, Check, Comparison, Row, Skipped, WorkerFailedError
from benchmarks.measurements import MEASUREMENTS
from benchmarks.run import Run

MARKS = {True: "yes", False: "no", None: ""}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure plurax against its peers."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(MEASUREMENTS)}"
    )
    parser.add_argument("--peers", metavar="PYTHON", help="a Python with torch and tensorflow")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, in under two minutes")
    options = parser.parse_args()
    names = options.names or list(MEASUREMENTS)
    unknown = [name for name in names if name not in MEASUREMENTS]
    if unknown:
        parser.error(f"no measurement is called {unknown[0]}; there are {', '.join(MEASUREMENTS)}")

    description = machine.describe(options.peers)
    run = Run(
        sizes=sizes.QUICK if options.quick else sizes.FULL,
        peers=options.peers,
        platform=description["platform"],
        cores=machine.cores(),
    )
    prefix = "quick-" if options.quick else ""
    path = options.output / (prefix + machine.file_name(description))
    console = Console(stderr=True, soft_wrap=True)
    rows: list[Row] = []
    failed = False
    for name in names:
        console.print(f"{name} ...")
        try:
            for row in MEASUREMENTS[name](run):
                rows.append(row)
                console.print(f"  {one_line(row)}", highlight=False)
                # After each row, so that a run that is stopped keeps what it has.
                write(path, description, rows)
        except WorkerFailedError as error:
            rows.append(Skipped(name, "the rest", "a worker failed"))
            console.print(str(error), markup=False)
            failed = True
        write(path, description, rows)
    print_table(rows)
    console.print(f"wrote {path}")
    return 1 if failed else 0


def write(path: Path, description: dict[str, Any], rows: list[Row]) -> None:
    """Write the results; of a file already there, keep the measurements not made again.

    And the versions it names that this run did not ask for: of the peers.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    new = [
        {"row": type(row).__name__.lower(), **dataclasses.asdict(row), "measured": now}
        for row in rows
    ]
    again = {row.group for row in rows}
    old = json.loads(path.read_text()) if path.exists() else {"versions": {}, "rows": []}
    kept = [row for row in old["rows"] if row["group"] not in again]
    order = list(MEASUREMENTS)
    ordered = sorted(kept + new, key=lambda row: order.index(row["group"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    versions = old["versions"] | description["versions"]
    values = {**description, "versions": versions, "rows": ordered}
    path.write_text(json.dumps(values, indent=1) + "\n")


def one_line(row: Row) -> str:
    """A row as it is done."""
    match row:
        case Comparison():
            return (
                f"{row.name}: {1e3 * row.plurax.median:,.2f} ms, {row.against} "
                f"{1e3 * row.other.median:,.2f} ms, {row.speed:.3f} × as fast"
            )
        case Check():
            return f"{row.name}: {row.found}"
        case Skipped():
            return f"{row.name}: skipped, {row.reason}"


def print_table(rows: list[Row]) -> None:
    """All rows on standard output."""
    table = Table()
    for column in ("measurement", "plurax (ms)", "other (ms)", "× as fast", "target", "reached"):
        table.add_column(column)
    for row in rows:
        match row:
            case Comparison():
                cells = (
                    f"{1e3 * row.plurax.median:,.2f}",
                    f"{1e3 * row.other.median:,.2f}",
                    f"{row.speed:.3f} ({row.spread[0]:.3f} to {row.spread[1]:.3f})",
                    "" if row.target is None else f"{row.target:.2f}",
                    MARKS[row.reached],
                )
                table.add_row(f"{row.group}: {row.name}; {row.against}", *cells)
            case Check():
                cells = (row.found, "", "", row.wanted, MARKS[row.reached])
                table.add_row(f"{row.group}: {row.name}", *cells)
            case Skipped():
                table.add_row(f"{row.group}: {row.name}", f"skipped: {row.reason}", *[""] * 4)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    sys.exit(main())
