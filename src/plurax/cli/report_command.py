"""`plurax report`: write runs as one HTML file."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from plurax import errors, tree
from plurax.cli.parser import parse_options
from plurax.report.page.render import write_report


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Write one HTML file with the curves, sweeps, plans, estimates and events of runs.

    It reads the files of the runs, finished or going on, and needs neither a server nor the
    network, now or when it is opened.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Output directories of runs, or folders of such directories, as a sweep writes them."""
    output: Path = Path("report.html")
    """The file to write."""


def report_command(arguments: list[str]) -> int:
    """Write the page of some runs, and say where it is."""
    options = parse_options(ReportOptions, "plurax report", arguments)
    if not options.runs:
        raise errors.ExperimentError(
            "name the folders of the runs: plurax report RUN ..., such as plurax report "
            "runs/digits."
        )
    written = write_report(options.runs, options.output)
    size = tree.human_bytes(written.stat().st_size)
    print(f"wrote {options.output}: {size}, open it in a browser")
    return 0
