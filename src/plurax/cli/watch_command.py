"""`plurax watch`: show a run that is going on in the terminal."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import tyro
from rich.live import Live

from plurax.cli.parser import parse_options
from plurax.console import PlainConsole
from plurax.exit_codes import ExitCode
from plurax.report.watch_frame import WatchedRun
from plurax.validate import local_path


@dataclasses.dataclass(frozen=True)
class WatchOptions:
    """Show a run in the terminal while it goes on: its last rows, a curve and what happened.

    It reads the run's files and ends with the run, or by Ctrl-C (exit status 130), which leaves the
    run alone.
    """

    run: tyro.conf.Positional[Path]
    """The run's output directory."""
    metric: str = "loss"
    """The metric of the curve: one that every step logs."""
    once: bool = False
    """Print one frame and end."""
    every: float = 1.0
    """Seconds between two readings of the files."""


def watch_command(arguments: list[str]) -> int:
    """Show a run until it has ended."""
    options = parse_options(WatchOptions, "plurax watch", arguments)
    run = WatchedRun(local_path(options.run), options.metric)
    return watch(run, PlainConsole(soft_wrap=False), options.every, once=options.once)


def watch(
    run: WatchedRun,
    console: PlainConsole,
    every: float,
    *,
    once: bool = False,
    wait: Callable[[float], object] = time.sleep,
) -> int:
    """Show a run until it has ended; `wait` is called between two readings.

    Where the output is no terminal, only the last frame is printed.
    """
    if once:
        console.print(run.frame(console.width))
        return ExitCode.DONE
    with Live(run.frame(console.width), console=console, auto_refresh=False) as live:
        try:
            while not run.ended:
                wait(every)
                run.read()
                live.update(run.frame(console.width), refresh=True)
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
    return ExitCode.DONE
