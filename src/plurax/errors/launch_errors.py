"""Errors about several processes, and about the launcher that starts them."""

from collections.abc import Iterable

from plurax.errors.kinds import ExperimentError


def launch_nothing() -> ExperimentError:
    return ExperimentError(
        "plurax launch: say after -- what each process runs: a command of plurax, as in "
        "plurax launch --processes 2 -- train FILE, or a script of your own, as in "
        "plurax launch --processes 2 -- script.py."
    )


def launch_unknown(given: str, commands: Iterable[str]) -> ExperimentError:
    return ExperimentError(
        f"plurax launch -- {given}: what each process runs is a path that ends in .py, or a "
        f"command of plurax: {', '.join(commands)}."
    )


def launch_no_script(path: str) -> ExperimentError:
    return ExperimentError(f"plurax launch -- {path}: there is no such file.")


def launch_number(option: str, given: float, least: float) -> ExperimentError:
    return ExperimentError(f"plurax launch --{option} {given}: give a number of at least {least}.")
