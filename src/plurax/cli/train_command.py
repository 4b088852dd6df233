"""`plurax train FILE`: train, and draw what the run has logged."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from plurax import errors
from plurax.cli.arguments import experiment_names
from plurax.cli.machine_command import described_machine
from plurax.cli.options import chosen_rollback, chosen_servers, fit_options, train_class
from plurax.cli.parse import parse
from plurax.console import PlainConsole
from plurax.distributed.environment import writes_files
from plurax.exit_codes import ExitCode
from plurax.loop.log_rows import read_rows
from plurax.members import Members
from plurax.report.curves_picture import draw_curves
from plurax.report.servers_picture import draw_servers, draw_workers
from plurax.resample import Everything
from plurax.train.elastic import plan_for_those_left
from plurax.train.fit import Fit, fit

EXIT = {
    None: ExitCode.DONE,
    "SIGINT": ExitCode.INTERRUPTED,
    "SIGTERM": ExitCode.PREEMPTED,
    "SIGPIPE": ExitCode.READER_GONE,
}
"""The exit code by the signal that ended training, after saving."""


def train_experiment(arguments: list[str]) -> int:
    """Train the experiment of a file, and return the exit code."""
    experiment, options, report, file = parse(arguments, "train", train_class())
    console = PlainConsole()
    plan = plan_for_those_left(options.chosen_plan(), experiment.task)
    members = options.members.chosen(experiment.members)
    if members is not None:
        console.print(f"{members.count} members: {_of_members(members)}")
    console.print(plan.explain(options.batch_size))
    chosen = {name: getattr(options, name) for name in fit_options()}
    machine = described_machine(options.machine, options.nodes) or experiment.machine
    servers = chosen_servers(options.servers, experiment.servers)
    rollback = chosen_rollback(options.rollback, experiment.rollback)
    result = fit(**{**vars(experiment), **chosen, "plan": plan, "members": members,
                    "machine": machine, "servers": servers, "rollback": rollback,
                    "command": _remembered(file, options, arguments)})  # fmt: skip
    if result.staleness is not None:
        console.print(str(result.staleness))
    if options.fast_dev_run:
        console.print("a fast development run: nothing was written")
        return EXIT[result.interrupted]
    if writes_files():
        mode = None if servers is None else servers.mode
        written = _draw(result, options.output, mode, Path(arguments[0]).resolve().stem, console)
        console.print(f"wrote {options.output}: {', '.join(written)}")
    if report is not None and result.interrupted is None:
        _report(report, experiment, result, options.output, console)
    return EXIT[result.interrupted]


def _remembered(file: Path, options: Any, arguments: list[str]) -> dict[str, Any]:
    """Return for `run.toml` what `fit` does not know: FILE, its arguments, and other options.

    `named` are those arguments of FILE that this command line has: a run may go on with them.
    """
    names = {field.name for field in dataclasses.fields(options)}
    own = names - {*fit_options(), "plan", "plan_file", "experiment"}
    return {
        "file": str(file.resolve()),
        **{name: getattr(options, name) for name in sorted(own)},
        "experiment": dataclasses.asdict(options.experiment),
        "named": experiment_names(arguments),
    }


def _draw(
    result: Fit, output: Path, mode: str | None, title: str, console: PlainConsole
) -> list[str]:
    """Draw the curves, with parameter servers also what they did; return the files of the run.

    `mode` is that of parameter servers, or None without them.
    """
    written = ["metrics.jsonl", "tensorboard/", "checkpoints/", "plan.toml", "run.toml"]
    written += ["machine.toml"] if result.estimate else []
    rows = list(read_rows(output / "metrics.jsonl"))
    if not any(row["kind"] == "epoch" for row in rows):
        return written
    try:
        draw_curves(rows, output / "curves.png", title=title)
        written = ["curves.png", *written]
        if mode is not None:
            draw_servers({mode: rows}, output / "servers.png")
            draw_workers(output, output / "workers.png")
            written += ["servers.jsonl", "servers.png", "workers.png"]
    except errors.MissingPackageError as missing:
        console.print(f"no curves.png: {missing}")
    return written


def _report(report: Any, experiment: Any, result: Fit, output: Path, console: PlainConsole) -> None:
    """Call the file's own report; of several processes all compute it, and one keeps it."""
    if writes_files():
        for path in report(experiment, result, output) or ():
            console.print(f"wrote {path}")
    else:
        with tempfile.TemporaryDirectory() as elsewhere:
            report(experiment, result, Path(elsewhere))


def _of_members(members: Members) -> str:
    """Return a few words that describe a population."""
    parts = [type(members.resample).__name__.lower()] if members.resample != Everything() else []
    return ", ".join([*parts, *(f"{name} of their own" for name in members.hyper)]) or "seeds only"
