"""Folders of runs given to `plurax report` and `plurax watch`."""

from collections.abc import Sequence

from plurax.errors.kinds import BatchError, ExperimentError


def report_of_nothing() -> ExperimentError:
    return ExperimentError(
        "name the folders of the runs: plurax report RUN ..., such as plurax report runs/digits."
    )


def report_no_folder(path: str) -> ExperimentError:
    return ExperimentError(
        f"{path}: no such folder. Give the output directory of a run, which `fit(output=...)` and "
        "plurax train write: plurax report runs/digits."
    )


def report_not_a_run(path: str) -> ExperimentError:
    return ExperimentError(
        f"{path} is not the folder of a run: there is no metrics.jsonl in it, nor in the folders "
        "in it. Give the output directory of a run: plurax report runs/digits."
    )


def report_unreadable(path: str) -> ExperimentError:
    return ExperimentError(
        f"{path} cannot be read: you have no permission. Ask its owner, or run as the user who "
        "trained."
    )


def report_without_metrics(path: str) -> ExperimentError:
    return ExperimentError(
        f"{path} has no row of metrics yet: the run ended, or is still compiling, before its "
        "first step. plurax watch shows a run from its start."
    )


def report_log_damaged(path: str, damage: str) -> ExperimentError:
    return ExperimentError(
        f"{path} has no row of metrics, and a checkpoint of the run says that it had: {damage}. "
        "Put the file back from a copy; training with resume goes on without it."
    )


def report_output_is_a_run(path: str) -> ExperimentError:
    return ExperimentError(
        f"--output {path} is a folder, and the page is one file. Write --output {path}/report.html."
    )


def watch_one_run(path: str, count: int) -> ExperimentError:
    return ExperimentError(
        f"{path} holds {count} runs, and plurax watch shows one. Name it, like "
        f"plurax watch {path}/NAME; plurax report compares several."
    )


def calibration_of_nothing() -> BatchError:
    return BatchError(
        "save_calibration got nothing to write. Give what predictions were compared with their "
        "labels, by name: save_calibration(path, {'ensemble': plurax.ensemble.calibration(p, y)})."
    )


def picture_format(path: str, known: Sequence[str]) -> ExperimentError:
    return ExperimentError(
        f"{path!r} has not the name of a picture; its ending is the format, one of "
        f"{', '.join(known)}."
    )
